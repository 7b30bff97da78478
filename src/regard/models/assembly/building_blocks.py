"""What builders of many families share: initial weights, tied embedding and head, activations by
name, rotary modules for the settings of a config.json, and projections of heads that use them.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

from torch import nn

from regard.configs.base import ACTIVATIONS, check_activation
from regard.configs.rope import ORIGINAL, RopeSettings, check_rope
from regard.errors import ArgumentError
from regard.models.decoder import Decoder
from regard.nn import Block, HeadProjection, SeparateQKV
from regard.nn.blocks.feed_forward import XIELU, ReLUSquared
from regard.nn.blocks.mixer_block import Tokenwise
from regard.nn.mixer import Mixer
from regard.nn.projections.dynamic_rotary import PerRowRotary, RecomputedQKV
from regard.nn.weights import Linear
from regard.positions import DynamicNTK, LinearScaling, Llama3, LongRoPE, Rotary, Scaling, YaRN
from regard.positions.scalings import Backwards
from regard.units import plural


def initialize_weights(decoder: Decoder) -> Decoder:
    """Give a decoder initial weights for training, in place: norms 1, biases 0, matrices with std
    1/sqrt(fan-in), those that write to the residual stream 0, the head 0.02, as a tied embedding;
    an untied one has 0.5.
    """
    embedding, head = decoder.embed.embedding, decoder.head
    tied = getattr(head, "weight", None) is embedding.weight
    for module in decoder.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            own = module is embedding and not tied
            nn.init.normal_(module.weight, std=0.5 if own else 0.02)
            if isinstance(module, nn.Linear) and module.bias is not None:
                nn.init.zeros_(module.bias)
    for layer in decoder.layers:
        block = cast("Block", layer)
        writers = {id(part) for part in _writers(block)}
        for module in block.modules():
            if isinstance(module, nn.Linear):
                std = 0.0 if id(module) in writers else module.in_features**-0.5
                nn.init.normal_(module.weight, std=std)
    return decoder


def _writers(block: Block) -> list[nn.Module]:
    """Return the linear maps that write to the residual stream: the output map of each mechanism,
    and the down projection of the feed-forward layer or of each expert.
    """
    mixers = [part for part in block.attention.modules() if isinstance(part, Mixer)]
    networks = [block.feed_forward]
    networks += [mixer.network for mixer in mixers if isinstance(mixer, Tokenwise)]
    attributes: list[tuple[nn.Module, str]] = [(mixer, "output") for mixer in mixers]
    attributes += [(part, "down") for network in networks for part in network.modules()]
    return [getattr(part, name) for part, name in attributes if hasattr(part, name)]


def embedding_and_head(
    vocabulary: int, dim: int, *, tied: bool, bias: bool = False
) -> tuple[nn.Embedding, nn.Linear]:
    """Build an embedding [V, M] and a head from M to V; tied ones share the matrix."""
    embedding, head = nn.Embedding(vocabulary, dim), Linear(dim, vocabulary, bias=bias)
    if tied:
        head.weight = embedding.weight
    return embedding, head


def _gelu_tanh() -> nn.Module:
    return nn.GELU("tanh")


def flags_of_stored(**names: str) -> Callable[[Any, object, Collection[str]], Any]:
    """Return a `complete_config` that sets each flag by whether the tensor of this name is stored;
    without flags it returns the config as it is.
    """
    return lambda config, _raw, stored: replace(
        config, **{flag: name in stored for flag, name in names.items()}
    )


NONLINEARITIES: dict[str, Callable[[], nn.Module]] = {
    "gelu": nn.GELU,
    "gelu_tanh": _gelu_tanh,
    "linear": nn.Identity,
    "relu": nn.ReLU,
    "relu_squared": ReLUSquared,
    "sigmoid": nn.Sigmoid,
    "silu": nn.SiLU,
    "tanh": nn.Tanh,
    "xielu": XIELU,
}
"""Value of `regard.configs.base.ACTIVATIONS` -> its module."""


def activation(name: str, key: str = "hidden_act") -> nn.Module:
    """Return the module of an activation in config.json. Source: Hendrycks and Gimpel 2016 (arXiv
    1606.08415), section 2, for both forms of GELU.
    """
    check_activation(name, key)
    return NONLINEARITIES[ACTIVATIONS[name]]()


def rotary_module(settings: RopeSettings) -> Rotary:
    """Build the `Rotary` of a config, with the formulas of transformers' `modeling_rope_utils`:
    int(head_dim * partial) dims are rotated; "dynamic" and "longrope" depend on the length of the
    text, so that a cache of rotated keys needs `rotary_heads`.
    """
    checked, D, partial = check_rope(settings), settings.head_dim, settings.partial
    proportional = checked["rope_type"] == "proportional"
    rotated = 2 * int(partial * D // 2) if proportional else int(D * partial)
    scaling = rope_scaling(checked, rotated // 2, settings.max_positions, settings.original)
    if settings.backwards:
        assert scaling is None, "the config has refused a scaling"
        scaling = Backwards()
    return Rotary(
        D,
        settings.theta,
        scaling=scaling,
        rotary_dim=rotated,
        proportional=proportional,
        layout=settings.layout,
        length="current" if scaling is not None and scaling.needs_length else None,
    )


def rotary_heads(
    dim: int,
    H: int,
    G: int,
    head_dim: int,
    rotary: Rotary | None,
    *,
    q_steps: Sequence[nn.Module] = (),
    k_steps: Sequence[nn.Module] = (),
    q_flat: nn.Module | None = None,
    k_flat: nn.Module | None = None,
    bias: bool = False,
    value_dim: int | None = None,
) -> SeparateQKV:
    """Build the projection of queries, keys and values with rotary positions or none; where
    frequencies depend on the length, keys rotated with others raise when they are read
    (`regard.nn.PrefixRecomputer`).
    """
    if rotary is not None and rotary.dim != head_dim:
        raise ArgumentError(f"rotary is for heads of {rotary.dim}, and head_dim is {head_dim}")
    last = () if rotary is None or rotary.follows_length else (rotary,)
    q = HeadProjection(dim, H, head_dim, *q_steps, *last, flat=q_flat, bias=bias)
    k = HeadProjection(dim, G, head_dim, *k_steps, *last, flat=k_flat, bias=bias)
    v = HeadProjection(dim, G, head_dim if value_dim is None else value_dim, bias=bias)
    return (
        RecomputedQKV(q, k, v, PerRowRotary(rotary))
        if rotary is not None and rotary.follows_length
        else SeparateQKV(q, k, v)
    )


def rope_scaling(
    settings: Mapping[str, Any], pairs: int, max_positions: int, original: int | None
) -> Scaling | None:
    """Return the scaling of a checked rope_scaling; None if it changes nothing."""
    kind = settings["rope_type"]
    if kind == "default":
        return None
    rest = {k: v for k, v in settings.items() if k not in ("rope_type", "finetuned", ORIGINAL)}
    if kind in ("linear", "proportional"):
        return LinearScaling(**rest) if rest else None
    if kind == "dynamic":
        return DynamicNTK(original_length=max_positions, **rest)
    length = _original_length(settings, kind, max_positions, original)
    if kind == "llama3":
        return Llama3(original_length=length, **rest)
    if rest.get("factor") is None:
        rest["factor"] = max_positions / length
    if kind == "yarn":
        return YaRN(original_length=length, **rest)
    for name in ("short_factor", "long_factor"):
        if len(rest[name]) != pairs:
            raise ArgumentError(
                f"rope_scaling.{name} has {plural(len(rest[name]), 'number')} and a head has "
                f"{plural(pairs, 'rotary pair')}; give one number per pair"
            )
    return LongRoPE(original_length=length, **rest)


def _original_length(
    settings: Mapping[str, Any], kind: str, max_positions: int, original: int | None
) -> int:
    """Return the length with which the frequencies were trained."""
    inner = settings.get(ORIGINAL)
    if original is not None and inner is not None and original != inner:
        raise ArgumentError(
            f"{ORIGINAL} is {original} at the top level and {inner} in rope_scaling; remove the "
            "wrong one"
        )
    length = inner if original is None else original
    if length is not None:
        return length
    if kind == "llama3":
        raise ArgumentError(
            f"rope_scaling of rope_type 'llama3' lacks {ORIGINAL}, the length before the extension"
        )
    return max_positions
