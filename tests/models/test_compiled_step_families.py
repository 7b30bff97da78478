"""The compiled step of families with LayerNorms, networks without a gate, parallel sublayers, one
matrix for queries, keys and values, norms over all heads, and factors, against their modules.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import masks
from regard.biases import ALiBi
from regard.models.decoder import Decoder
from regard.nn import (
    Attention,
    Block,
    FeedForward,
    FusedQKV,
    GatedFeedForward,
    HeadProjection,
    InputEmbedding,
    MoE,
    OffsetRMSNorm,
    ParallelBlock,
    PreNorm,
    RMSNorm,
    ScaledPreNorm,
    SeparateQKV,
    SharedNormBlock,
    SoftmaxRouter,
)
from regard.nn.blocks.blocks import NormedResidual, OutputNorm
from regard.nn.blocks.embedding import ScaledLogits
from regard.nn.blocks.feed_forward import ReLUSquared
from regard.nn.blocks.norms import OffsetLayerNorm
from regard.nn.projections.fused import ClippedQKV
from regard.nn.projections.steps import Clip
from regard.nn.weights import Linear
from regard.ops.cpu import arguments
from regard.ops.cpu.step import ACTIVATIONS, NORM_KINDS, DecodeStep, Fields, StepLayer
from regard.ops.stored_weights import Int4Weight, Int8Weight
from regard.positions import Rotary
from tests.cost.test_built import family, parse
from tests.cost.tiny import TINY
from tests.kernels import require_kernels
from tests.models import small
from tests.models.step_models import (
    DTYPES,
    F,
    M,
    V,
    assert_changes_are_used,
    assert_equals_modules,
    assert_leaves_step,
    assert_same_bits,
    assert_threads_change_no_bit,
    decode,
    in_few_bits,
    step,
)
from tests.rules import assert_close_rule

require_kernels()

IDS = torch.randint(90, (2, 21), generator=torch.Generator().manual_seed(1))
LARGE: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "d_model"), 192),
    **dict.fromkeys(("intermediate_size", "n_inner", "ffn_dim"), 136),
    "head_dim": 32,
}
"""Sizes at which the matrices of a tiny configuration are large enough for the compiled step."""

FAMILIES = [
    *("arcee", "bloom", "cohere", "cohere2", "falcon", "falcon, groups", "gpt2", "gpt_bigcode"),
    *("gpt_neo", "gpt_neox", "gpt_neox, no biases", "gptj", "granite", "granitemoe", "minimax_m2"),
    *("mpt", "nemotron", "olmo", "olmo2", "olmo3", "olmoe", "opt", "phi", "stablelm"),
    *("stablelm, parallel", "starcoder2"),
]


@cache
def _of_family(name: str) -> Decoder:
    raw = {key: LARGE.get(key, value) for key, value in TINY[name].items()}
    if raw["model_type"] in ("granite", "granitemoe"):
        raw |= {"head_dim": 32, "logits_scaling": 3.0, "residual_multiplier": 0.3}
    if raw["model_type"].startswith("cohere"):
        raw["logit_scale"] = 0.25
    found = family(raw["model_type"])
    assert found is not None
    return finished(found.build(parse(found.config, raw)))


def finished(decoder: Decoder, seed: int = 0) -> Decoder:
    small.randomize(decoder, seed)
    return decoder.eval().requires_grad_(False)


def of_family(name: str, dtype: torch.dtype = torch.float32) -> Decoder:
    """A decoder of a family, with random weights."""
    return copy.deepcopy(_of_family(name)).to(dtype)


def cases(names: Iterable[str], dtypes: Sequence[torch.dtype] = DTYPES) -> pytest.MarkDecorator:
    """Every name with every dtype, one word for each: "gpt2 float32"."""
    pairs = [
        pytest.param(name, dtype, id=f"{name} {dtype}".replace("torch.", ""))
        for name in names
        for dtype in dtypes
    ]
    return pytest.mark.parametrize(("name", "dtype"), pairs)


@pytest.mark.full(keep=["gpt2 float32", "gpt_neox bfloat16", "olmoe float32", "mpt bfloat16"])
@cases(FAMILIES)
def test_the_step_equals_the_modules(name: str, dtype: torch.dtype) -> None:
    assert_equals_modules(of_family(name, dtype), IDS, 15)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("kind", ["fixed", "paged", "8 bits", "4 bits"])
@pytest.mark.parametrize("name", ["gpt2", "falcon, groups", "olmo2", "bloom"])
def test_other_caches(name: str, kind: str) -> None:
    assert_equals_modules(of_family(name), IDS, 15, kind=kind)


@pytest.mark.full(keep=["gpt_neox float32"])
@pytest.mark.parametrize("form", [Int8Weight, Int4Weight], ids=["int8", "int4"])
@cases(["gpt2", "gpt_neox", "falcon, groups", "olmo2"], DTYPES[:2])
def test_stored_weights(name: str, dtype: torch.dtype, form: type[Int8Weight | Int4Weight]) -> None:
    assert_equals_modules(in_few_bits(of_family(name, dtype), form.quantize), IDS, 15)


HEADS, GROUPS, SIZE = 8, 4, 32


def rms_decoder(**parts: Any) -> Decoder:
    """Two blocks whose sums the step computes in the order of the modules; `parts` change the
    ingredients.
    """
    rotary = Rotary(SIZE)
    order = parts.get("order")

    def projection() -> nn.Module:
        if order is not None:
            groups = HEADS if order == "heads" else GROUPS
            sizes, steps = (M, HEADS, groups, SIZE), [rotary]
            if parts.get("clip"):
                return ClippedQKV(*sizes, limit=parts["clip"], order=order, steps=steps)
            return FusedQKV(*sizes, order=order, steps=steps)
        heads = (HEADS, GROUPS, GROUPS)
        flat: list[nn.Module | None] = [None] * 3
        if parts.get("flat"):
            flat = [parts["flat"](HEADS * SIZE), parts["flat"](GROUPS * SIZE), None]
        if parts.get("clip"):
            flat = [Clip(parts["clip"]) for _ in range(3)]
        steps = [[RMSNorm(SIZE)] if parts.get("head_norms") else [] for _ in range(2)]
        last = [[*steps[0], rotary], [*steps[1], rotary], []]
        maps = zip(heads, last, flat, strict=True)
        return SeparateQKV(*(HeadProjection(M, n, SIZE, *s, flat=f, bias=True) for n, s, f in maps))

    def block() -> Block:
        attention = Attention(
            projection(),  # type: ignore[arg-type]
            Linear(HEADS * SIZE, M),
            mask=masks.Causal(),
            bias=ALiBi(HEADS) if parts.get("alibi") else None,
        )
        network = parts.get("network", lambda: FeedForward(M, F, ReLUSquared()))()
        norm = parts.get("norm", RMSNorm)
        residual = parts.get("residual", PreNorm)
        kind = parts.get("block", Block)
        if kind is SharedNormBlock:
            return SharedNormBlock(attention, network, PreNorm(norm(M)))
        return kind(attention, network, residual(norm(M)), residual(norm(M)))  # type: ignore[no-any-return]

    scale = parts.get("logit_scale")
    head = Linear(M, V) if scale is None else ScaledLogits(M, V, scale=scale)
    last_norm = parts.get("norm", RMSNorm)(M)
    embed = InputEmbedding(nn.Embedding(V, M))
    return finished(Decoder(embed, [block() for _ in range(2)], last_norm, head))


def scaled(norm: nn.Module) -> ScaledPreNorm:
    return ScaledPreNorm(norm, 0.3)


EXACT: dict[str, dict[str, Any]] = {
    "plain-network": {},
    "relu": {"network": lambda: FeedForward(M, F, nn.ReLU(), bias=False)},
    "parts": {"order": "parts"},
    "heads": {"order": "heads"},
    "groups": {"order": "groups", "alibi": True},
    "clipped": {"order": "groups", "clip": 0.7},
    "clips": {"clip": 0.7},
    "flat": {"flat": RMSNorm, "head_norms": True},
    "flat-offset": {"flat": OffsetRMSNorm, "residual": OutputNorm},
    "parallel": {"block": ParallelBlock},
    "shared": {"block": SharedNormBlock, "network": lambda: GatedFeedForward(M, F, nn.ReLU())},
    "factors": {"residual": scaled, "logit_scale": 0.7},
}


@pytest.mark.full(
    keep=[
        "groups float32",
        "flat bfloat16",
        "factors float32",
        "clipped float32",
        "shared bfloat16",
    ]
)
@cases(EXACT)
def test_where_the_sums_are_the_same_all_bits_are(name: str, dtype: torch.dtype) -> None:
    decoder = rms_decoder(**EXACT[name]).to(dtype)
    ids = torch.randint(V, (3, 14), generator=torch.Generator().manual_seed(2))
    assert_same_bits(decoder, ids, 9)


def run_parts(
    x: Tensor,
    norm: Fields | None = None,
    network: Fields | None = None,
    shift: Tensor | None = None,
) -> Tensor:
    """The result [1, 1, M] of a step whose only layer adds to x [M] a shift and the result of a
    network that reads x, and whose head is the identity behind a norm.
    """
    dtype, M = x.dtype, len(x)
    nothing, memory = torch.zeros(16, M, dtype=dtype), torch.zeros(1, 1, 1, 16, dtype=dtype)
    heads: Fields = {"n": 1, "size": 16, "run": 1, "map": {"w": nothing}}
    place = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    call: dict[str, Any] = {"scale": 1.0, "slopes": arguments.NO_SLOPES, "starts": place}
    call |= {"stops": place + 1, "q_positions": place[0, 0], "S": 1, "page_size": 1}
    call |= {"k_positions": arguments.NO_POSITIONS, "pages": arguments.NO_POSITIONS}
    own = {"F": 16, "up": {"w": nothing}, "down": {"w": nothing.T.contiguous()}}
    layer: Fields = {
        **dict.fromkeys("qkv", heads),
        "out": {"w": nothing.T.contiguous(), "b": shift},
        "parallel": True,
        "slots": place.view(1),
        "attention": {**call, "k": memory, "v": memory},
        "network": own if network is None else network,
    }
    fields: Fields = {"norm": norm, "head_map": {"w": torch.eye(M, dtype=dtype)}}
    return DecodeStep(fields, [StepLayer(layer, (), 0, None)], dtype, M, M).run(x.view(1, 1, M))


def _norm64(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """LayerNorm by loops in Python, in fp64."""
    rows = []
    for row in x.double().tolist():
        mean = math.fsum(row) / len(row)
        scale = (math.fsum((a - mean) ** 2 for a in row) / len(row) + eps) ** -0.5
        rows.append([(a - mean) * scale for a in row])
    y = torch.tensor(rows, dtype=torch.float64)
    y = y if weight is None else y * weight.double()
    return y if bias is None else y + bias.double()


@pytest.mark.full(keep=["both float32"])
@pytest.mark.parametrize("spread", [1e-3, 1.0, 100.0])
@cases(["both", "weight", "none", "offset"])
def test_layer_norm_against_its_definition(name: str, dtype: torch.dtype, spread: float) -> None:
    """Rows with a mean far from 0, of equal numbers, and of zeros."""
    make = torch.Generator().manual_seed(3)
    x = spread * torch.randn(6, 77, generator=make)
    x[1] += 40 * spread
    x[2], x[3] = 5 * spread, 0
    x[4, 7] = 1e3 * spread
    x = x.to(dtype)
    weight, bias = (torch.randn(77, generator=make).to(dtype) for _ in range(2))
    offset, has_bias = float(name == "offset"), name in ("both", "offset")
    norm: dict[str, Any] = {"kind": NORM_KINDS.index("layer"), "offset": offset}
    norm |= {"w": None if name == "none" else weight, "b": bias if has_bias else None}
    y = torch.cat([run_parts(row, {**norm, "eps": 1e-5})[0] for row in x])
    factor = None if name == "none" else weight + 1 if offset else weight
    exact = _norm64(x, factor, bias if has_bias else None, 1e-5)
    plain = nn.functional.layer_norm(x, (77,), factor, bias if has_bias else None, 1e-5)
    assert_close_rule(y, plain, exact)
    y = torch.cat([run_parts(row, {**norm, "eps": 0.1 * spread**2})[0] for row in x])
    with pytest.raises(AssertionError, match="above"):
        assert_close_rule(y, plain, exact)


FUNCTIONS: dict[str, tuple[nn.Module, Callable[[float], float]]] = {
    "silu": (nn.SiLU(), lambda x: x / (1 + math.exp(-x)) if x > -700 else 0.0),
    "gelu_tanh": (
        nn.GELU("tanh"),
        lambda x: x * 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))),
    ),
    "relu": (nn.ReLU(), lambda x: max(x, 0.0)),
    "gelu": (nn.GELU(), lambda x: x * 0.5 * math.erfc(-x / math.sqrt(2))),
    "relu_squared": (ReLUSquared(), lambda x: max(x, 0.0) ** 2),
}


@pytest.mark.full(keep=["gelu float32"])
@cases(FUNCTIONS)
def test_activations_against_their_definition(name: str, dtype: torch.dtype) -> None:
    """Everywhere between -20 and 20, near 0, and where the result is not a number."""
    module, define = FUNCTIONS[name]
    make = torch.Generator().manual_seed(4)
    tiny = 1e-6 * torch.randn(99, generator=make)
    ranges = [torch.linspace(-s, s, 401) for s in (20.0, 3.0, 0.02)]
    for x in (*ranges, torch.cat([tiny, torch.tensor([0.0, -0.0])]), torch.tensor([torch.nan])):
        x = x.to(dtype)
        exact = torch.tensor([define(a) for a in x.double().tolist()], dtype=torch.float64)
        exact = torch.where(x.isnan(), torch.nan, exact)
        square = torch.zeros(len(x), len(x), dtype=dtype)
        # the hidden units are x, their results are mapped by the identity, and x is subtracted
        network: Fields = {
            "F": len(x),
            "activation": ACTIVATIONS.index(name),
            "up": {"w": square, "b": x},
            "down": {"w": torch.eye(len(x), dtype=dtype)},
        }
        y = run_parts(x.nan_to_num(0), network=network, shift=-x.nan_to_num(0))
        assert_close_rule(y.view(-1), module(x), exact)
    x = ranges[0].to(dtype)
    exact = torch.tensor([define(a) for a in x.double().tolist()], dtype=torch.float64)
    wrong = FUNCTIONS["silu" if name != "silu" else "gelu"][0](x)
    with pytest.raises(AssertionError, match="above"):
        assert_close_rule(wrong, module(x), exact)


def test_changed_parts_of_gpt2_are_used() -> None:
    decoder = of_family("gpt2")
    first, second = decoder.layers
    project, embed = first.attention.project, decoder.embed
    norm = second.attention_residual.norm
    assert_changes_are_used(
        decoder,
        IDS[:, :14],
        11,
        [
            lambda: embed.positional.weight.mul_(0.5),
            lambda: norm.bias.add_(1),
            lambda: norm.weight.mul_(2),
            lambda: setattr(norm, "eps", 0.5),
            lambda: setattr(norm, "bias", None),
            lambda: setattr(decoder, "norm", nn.LayerNorm(192, elementwise_affine=False)),
            lambda: project.linear.bias.mul_(2),
            lambda: setattr(first.feed_forward, "activation", nn.GELU()),
            lambda: setattr(first.feed_forward, "activation", ReLUSquared()),
            lambda: setattr(first, "feed_forward_residual", OutputNorm(norm)),
            lambda: decoder.layers.__setitem__(0, of_family("gpt2").layers[1]),
        ],
    )


@pytest.mark.full
def test_changed_parts_are_used() -> None:
    decoder = rms_decoder(**EXACT["flat"], residual=scaled, logit_scale=0.7)
    layer = decoder.layers[1]
    project = layer.attention.project
    assert_changes_are_used(
        decoder,
        IDS[:, :14],
        11,
        [
            lambda: project.q.flat.weight.mul_(2),
            lambda: setattr(project.k.flat, "eps", 1.0),
            lambda: setattr(project.k, "flat", nn.Identity()),
            lambda: setattr(project.q, "flat", nn.Identity()),
            lambda: setattr(layer.feed_forward_residual, "scale", 0.5),
            lambda: setattr(layer.attention_residual, "scale", -0.5),
            lambda: setattr(decoder.head, "scale", 0.3),
            lambda: setattr(layer, "attention_residual", PreNorm(RMSNorm(M))),
        ],
    )


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"order": "groups"}, {"order": "groups", "clip": 0.7}),
        ({"order": "parts"}, {"order": "groups"}),
        ({"block": ParallelBlock}, {}),
        ({"norm": nn.LayerNorm}, {"norm": OffsetLayerNorm}),
        ({"norm": nn.LayerNorm}, {}),
    ],
)
def test_the_wrong_part_is_far(one: dict[str, Any], other: dict[str, Any]) -> None:
    """The same weights with another part give other numbers."""
    decoder, wrong = rms_decoder(**one), rms_decoder(**other)
    wrong.load_state_dict(decoder.state_dict(), strict=False)
    found, _ = decode(decoder, IDS, 15)
    plain, _ = decode(decoder, IDS, 15, backend="reference")
    torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
    assert not torch.allclose(found, decode(wrong, IDS, 15)[0], rtol=1e-2, atol=1e-2)


@pytest.mark.full(keep=["5"])
@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    """Norms over all heads have a phase more, in which late threads find other work."""
    assert_threads_change_no_bit(of_family("olmo2"), threads)


@pytest.mark.parametrize("name", ["gpt_neox", "olmo2"])
def test_a_trace_and_a_prompt_between_compiled_steps(name: str, steps: list[int]) -> None:
    """What the step has written to the caches is what a trace, and a longer text, then read."""
    decoder = of_family(name)
    _, caches = decode(decoder, IDS[:1, :8], 4)
    assert len(steps) == 4
    with torch.inference_mode(), regard.Trace("layers.1.pattern") as trace:
        step(decoder, IDS[:1, 8:9], caches)
    assert len(steps) == 4
    with torch.inference_mode():
        rest = step(decoder, IDS[:1, 9:14], caches)
        last = step(decoder, IDS[:1, 14:15], caches)
        assert len(steps) == 6, "five tokens of one row are one step, too"
        whole = decoder(IDS[:1, :15], last=6)
        with regard.Trace("layers.1.pattern") as one_pass:
            decoder(IDS[:1, :9])
    torch.testing.assert_close(
        trace["pattern"], one_pass["pattern"][:, :, -1:], rtol=1e-3, atol=1e-4
    )
    torch.testing.assert_close(torch.cat([rest, last], 1), whole, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("name", ["gptj", "gpt2"])
def test_experts_behind_a_layer_norm_and_beside_the_attention(name: str) -> None:
    decoder = of_family(name)
    experts = [GatedFeedForward(192, F, nn.GELU()), GatedFeedForward(192, F, ReLUSquared())]
    decoder.layers[0].feed_forward = MoE(SoftmaxRouter(192, 2, 1), experts)
    assert_equals_modules(finished(decoder), IDS, 15)


def _layer_norm(decoder: Decoder) -> nn.LayerNorm:
    norm = decoder.layers[1].attention_residual.norm
    assert isinstance(norm, nn.LayerNorm)
    return norm


REFUSED: dict[str, tuple[str, Callable[[Decoder], object], str]] = {
    "hook": ("gpt2", lambda d: _layer_norm(d).register_forward_hook(print), "has a hook"),
    "subclass": (
        "gpt2",
        lambda d: setattr(_layer_norm(d), "__class__", type("Other", (nn.LayerNorm,), {})),
        "layer 1: a norm is Other",
    ),
    "size of a norm": (
        "gpt2",
        lambda d: setattr(_layer_norm(d), "normalized_shape", (3,)),
        "another size than its input",
    ),
    "size of its bias": (
        "gpt2",
        lambda d: setattr(_layer_norm(d), "bias", nn.Parameter(torch.ones(3))),
        "another size than its input",
    ),
    "activation": (
        "gpt2",
        lambda d: setattr(d.layers[0].feed_forward, "activation", nn.Tanh()),
        "layer 0: the activation is Tanh()",
    ),
    "residual": (
        "bloom",
        lambda d: setattr(d.layers[0], "attention_residual", NormedResidual(nn.LayerNorm(192))),
        "the residual connection is NormedResidual",
    ),
    "parallel residual": (
        "gpt_neox",
        lambda d: setattr(d.layers[0], "attention_residual", OutputNorm(nn.LayerNorm(192))),
        "the residual connection is OutputNorm",
    ),
    "method": (
        "gpt2",
        lambda d: setattr(d.layers[0].attention.project, "remember", print),
        "the remember of a FusedQKV was replaced",
    ),
    "norm over all heads": (
        "olmo2",
        lambda d: setattr(d.layers[0].attention.project.v, "flat", RMSNorm(64)),
        "the norm over all heads of values is RMSNorm",
    ),
    "its class": (
        "olmo2",
        lambda d: setattr(d.layers[0].attention.project.q, "flat", nn.LayerNorm(192)),
        "the norm over all heads is LayerNorm",
    ),
    "factor on an inner map": (
        "granite",
        lambda d: setattr(d.layers[0].attention, "output", ScaledLogits(192, 192, scale=0.5)),
        "layer 0: a linear map is ScaledLogits",
    ),
    "limits": (
        "olmo",
        lambda d: setattr(d.layers[0].attention.project.q.flat, "limit", 1.0),
        "clipped to different limits",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_leaves_the_step_and_why(case: str) -> None:
    name, change, reason = REFUSED[case]
    assert_leaves_step(of_family(name), change, reason)
