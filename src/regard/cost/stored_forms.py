"""The bytes of a model's weights in the forms in which files hold them, scales and the parts that
stay wide included, from the sizes of the model alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction

from regard.cost.model import DenseSpec, ModelSpec, MoESpec, StoredSize
from regard.cost.softmax import SoftmaxSpec
from regard.did_you_mean import suggest
from regard.errors import ArgumentError

Bits = dict[str, Fraction]
"""Part of a model -> bits for each of its numbers; "" is every other part."""

WIDE = ("embedding", "positions", "router", "biases", "norms", "head")
"""The parts that quantized safetensors files keep in 16 bits."""

Q4_K, Q5_K, Q6_K, Q8_0 = (Fraction(x, 32) for x in (144, 176, 210, 272))
"""Bits per number of llama.cpp's blocks, scales included: 4.5, 5.5, 6.5625 and 8.5."""
WITHOUT_BLOCKS_OF_256 = {Q4_K: Fraction(176, 32), Q5_K: Fraction(192, 32), Q6_K: Q8_0}
"""What llama.cpp stores in their place (Q5_0, Q5_1, Q8_0) if rows are no multiple of 256 long."""


def _linear_maps(bits: Fraction) -> Callable[[ModelSpec], Bits]:
    """Return a form that stores every linear map in so many bits, and the rest in 16."""
    return lambda _: {**dict.fromkeys(WIDE, Fraction(16)), "": bits}


def _matrices(bits: Fraction) -> Callable[[ModelSpec], Bits]:
    """Return a form that stores linear maps, embedding and head in so many bits, the rest in 16."""
    return lambda _: {**dict.fromkeys(("positions", "biases", "norms"), Fraction(16)), "": bits}


def _experts(bits: Fraction) -> Callable[[ModelSpec], Bits]:
    """Return a form that stores the experts in so many bits, and the rest in 16."""
    return lambda _: {"experts": bits, "": Fraction(16)}


def _plain_gguf(bits: Fraction) -> Callable[[ModelSpec], Bits]:
    """Return a form of llama.cpp in blocks of 32: the head takes Q6_K or more, norms fp32."""

    def of(model: ModelSpec) -> Bits:
        head = _in_rows(max(bits, Q6_K), model.dim)
        return _FP32 | {"embedding": head if model.tied else bits, "head": head, "": bits}

    return of


def _gguf(bits: Fraction, better: Fraction) -> Callable[[ModelSpec], Bits]:
    """Return a "medium" mix of llama.cpp: the head in Q6_K, norms and biases in fp32, and W_V and
    the down projection of about half of the layers in `better` bits.
    """

    def of(model: ModelSpec) -> Bits:
        layers, dim = len(model.layers), model.dim
        edge = layers // 8  # the first and the last eighth, and every third layer between them
        share = Fraction(2 * edge + len(range(edge + 2, layers - edge, 3)), layers)
        usual, head = _in_rows(bits, dim), _in_rows(max(bits, Q6_K), dim)

        def mixed(least: Fraction, width: int) -> Fraction:
            return share * _in_rows(better, width) + (1 - share) * _in_rows(least, width)

        down = mixed(bits, _hidden(model) or dim)
        values, part = mixed(_least_for_values(model, bits), dim), _share_of_values(model)
        feed = Fraction(2, 3) * usual + Fraction(1, 3) * down
        return _FP32 | {
            "embedding": head if model.tied else usual,
            "head": head,
            "attention": (1 - part) * usual + part * values,
            **dict.fromkeys(("feed-forward", "experts", "shared expert"), feed),
            "": usual,
        }

    return of


_FP32 = dict.fromkeys(("norms", "biases", "router"), Fraction(32))


def _in_rows(bits: Fraction, width: int) -> Fraction:
    """Return the bits of a matrix whose rows have a width, which blocks of 256 must divide."""
    return WITHOUT_BLOCKS_OF_256.get(bits, bits) if width % 256 else bits


def _hidden(model: ModelSpec) -> int:
    """Return the width between the projections of the first feed-forward layer; 0 without one."""
    for layer in model.layers:
        feed = layer.feed_forward
        if isinstance(feed, DenseSpec):
            return feed.hidden
        if isinstance(feed, MoESpec):
            return feed.expert.hidden
    return 0


def _least_for_values(model: ModelSpec, bits: Fraction) -> Fraction:
    """Return the bits of W_V outside the better layers: models with 80 layers and few key/value
    heads take Q5_K.
    """
    shapes = [x.shape for x in model.mixers if isinstance(x, SoftmaxSpec)]
    grouped = any(x.groups < x.heads for x in shapes)
    return max(bits, Q5_K) if len(model.layers) == 80 and grouped else bits


def _share_of_values(model: ModelSpec) -> Fraction:
    """Return the share of W_V in the parameters of attention; 0 for other mechanisms."""
    shapes = [x.shape for x in model.mixers if isinstance(x, SoftmaxSpec)]
    values = sum(model.dim * x.groups * x.value_dim for x in shapes)
    return Fraction(values, model.attention_parameters or 1)


STORED_FORMS: dict[str, Callable[[ModelSpec], Bits]] = {
    "q8_0": _plain_gguf(Q8_0),
    "q6_k": _gguf(Q6_K, Q6_K),
    "q5_k_m": _gguf(Q5_K, Q6_K),
    "q4_k_m": _gguf(Q4_K, Q6_K),
    "q4_0": _plain_gguf(Fraction(144, 32)),
    # codes, and for 128 of them a scale in fp16 and a zero point of 4 bits
    "awq": _linear_maps(4 + Fraction(16 + 4, 128)),
    "gptq": _linear_maps(4 + Fraction(16 + 4, 128)),
    # codes, for 64 of them a scale of 8 bits, and for 256 such scales one in fp32
    "nf4": _linear_maps(4 + Fraction(8, 64) + Fraction(32, 64 * 256)),
    # codes, and a scale in fp32 for each square of 128 x 128
    "fp8": _linear_maps(8 + Fraction(32, 128 * 128)),
    # our own folders: every matrix, in groups of 128 a scale, and with 4 bits a zero point, in fp16
    "int8": _matrices(8 + Fraction(16, 128)),
    "int4": _matrices(4 + Fraction(2 * 16, 128)),
    # codes of the experts, and an exponent of 8 bits for 32 of them
    "mxfp4": _experts(4 + Fraction(8, 32)),
    # experts as in mxfp4, and other maps as in fp8 with exponents of 8 bits (DeepSeek-V4)
    "fp8_mxfp4": lambda model: {
        **_linear_maps(8 + Fraction(8, 128 * 128))(model),
        "experts": 4 + Fraction(8, 32),
    },
    # codes of the experts, and a scale in bf16 for 32 of them
    "int4_experts": _experts(4 + Fraction(16, 32)),
}
"""The forms that `regard cost --weights` counts, by the names that files have."""


def stored_as(model: ModelSpec, form: str) -> StoredSize:
    """Return the bytes of a model's weights in a form.

    bytes = sum over parts of parameters x bits / 8

    Args:
        model: the sizes of the model.
        form: a name in `STORED_FORMS`, in any case.

    Returns:
        The bytes, and the bits per number of each part.

    Raises:
        ArgumentError: the form is not known, or the model has no part that it stores.

    >>> from regard.cost import model_of
    >>> round(stored_as(model_of("llama-3.1-70b"), "q4_k_m").bytes / 1e9, 1)
    42.5
    """
    name = form.lower().replace("-", "_")
    if name not in STORED_FORMS:
        hint = suggest(name, STORED_FORMS, otherwise=".")
        raise ArgumentError(
            f"the weights {form!r} are not known{hint} Known are {', '.join(STORED_FORMS)}",
            argument="weights",
            value=form,
        )
    bits = STORED_FORMS[name](model)
    if "experts" in bits and "feed-forward" not in bits and not _has_experts(model):
        raise ArgumentError(
            f"{name} stores experts, and {model.name} has none; choose another form",
            argument="weights",
            value=form,
        )
    total = sum(x.parameters * bits.get(x.name, bits[""]) for x in model.parts)
    return StoredSize(name, -(-int(total) // 8), tuple(sorted(bits.items())))


def with_weights(model: ModelSpec, form: str | None) -> ModelSpec:
    """Return a model with its weights in a form; None counts all of them in the dtype."""
    return replace(model, stored=None if form is None else stored_as(model, form))


def _has_experts(model: ModelSpec) -> bool:
    return any(x.name == "experts" for x in model.parts)
