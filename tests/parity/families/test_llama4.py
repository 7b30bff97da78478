"""Llama 4 of transformers, saved by it and loaded here: chunks, layers without positions whose
queries have a temperature, norms behind the rotation, and experts that read weighted inputs. Wrong
variants must be far.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import regard
from regard import masks
from regard.configs.llama import SIZES as DEFAULTS
from regard.configs.llama import Llama4Config
from regard.configs.reader import parse
from regard.nn import MoE, QueryTemperature, SoftmaxRouter, SwiGLU, WeightlessRMSNorm
from regard.nn.blocks.experts import InputWeightedMoE
from regard.nn.blocks.routers import LogitSigmoidRouter
from regard.positions import Rotary
from regard.span import Span
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import named, put
from tests.parity.families.harness import (
    LENGTH,
    assert_differs,
    assert_near,
    assert_refused,
    ids_of,
    saved,
    transformers,
)
from tests.parity.families.test_llama_relatives import SIZES as RELATIVES
from tests.parity.families.test_llama_relatives import (
    experts_of,
    gate_and_up_swapped,
    one_expert_less,
)

CHUNK, D = 6, 8
SIZES: dict[str, Any] = {
    **RELATIVES,
    "intermediate_size_mlp": 28,
    "num_hidden_layers": 4,
    "head_dim": D,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": CHUNK,
    "no_rope_layer_interval": 2,
    "floor_scale": 4,
    "attn_scale": 0.7,
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 100.0,
    "factor": 4.0,
    "attention_factor": 1.5,
    "original_max_position_embeddings": 16,
}
"""Its factor makes a norm before the rotation another computation than one behind it."""
SCOUT = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 16.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 1.0,
    "original_max_position_embeddings": 64,
}
"""As in Llama 4 Scout: no frequency is between the two limits, because they are equal."""


def parts(network: Any, *, rotated: bool) -> list[Any]:
    """The projections of queries and keys of layers with or without rotary positions."""
    return [
        part
        for attention in changes.attentions(network)
        if any(isinstance(m, Rotary) for m in attention.modules()) == rotated
        for part in (attention.project.q, attention.project.k)
    ]


def steps(name: str, change: Any, *, rotated: bool) -> changes.Change:
    """Other steps on the heads of some layers; `change` maps the steps of a projection."""

    def changed(network: Any) -> None:
        for part in parts(network, rotated=rotated):
            part.steps = nn.ModuleList(change(list(part.steps)))

    return named(name, changed)


def other_temperature(*arguments: Any, **options: Any) -> changes.Change:
    def change(old: list[nn.Module]) -> list[nn.Module]:
        return [QueryTemperature(*arguments, **options) for _ in old]

    return steps(f"temperature {arguments} {options}", change, rotated=False)


def masked(name: str, *made: masks.Mask) -> changes.Change:
    """Other masks, layer by layer."""

    def change(network: Any) -> None:
        for attention, mask in zip(changes.attentions(network), made, strict=True):
            attention.mask = mask

    return named(name, change)


def weights_on_outputs(network: Any) -> None:
    for mixture in experts_of(network):
        mixture.weighted_expert = MoE.weighted_expert.__get__(mixture)


def softmax_router(network: Any) -> None:
    for mixture in experts_of(network):
        linear, mixture.router = mixture.router.linear, SoftmaxRouter(36, 5, 2, normalize=True)
        mixture.router.linear = linear


def weights_that_sum_to_one(network: Any) -> None:
    for mixture in experts_of(network):
        route = mixture.router.forward

        def forward(x: Tensor, route: Any = route) -> Any:
            weights, experts = route(x)
            return weights / weights.sum(-1, keepdim=True), experts

        mixture.router.forward = forward


def shared_expert_for_one(network: Any) -> None:
    for mixture in experts_of(network):
        mixture.shared, mixture.experts[0] = mixture.experts[0], mixture.shared


class UnitLength(nn.Module):
    """Vectors of length 1, not of mean square 1."""

    def forward(self, x: Tensor, positions: object = None) -> Tensor:
        return nn.functional.normalize(x, dim=-1)


CAUSAL, TEMPERATURE = masks.Causal(), QueryTemperature(scale=0.7, length=4)
IN_CHUNKS, WIDER = CAUSAL & masks.Chunk(CHUNK), CAUSAL & masks.Chunk(CHUNK + 1)
WRONG = (
    changes.norms_swapped,
    changes.other_groups,
    gate_and_up_swapped,
    changes.halves,
    masked("a larger chunk", WIDER, CAUSAL, WIDER, CAUSAL),
    masked("chunks everywhere", *[IN_CHUNKS] * 4),
    masked("chunks in the layers without positions", CAUSAL, IN_CHUNKS, CAUSAL, IN_CHUNKS),
    masked("no chunks", *[CAUSAL] * 4),
    masked("windows", *[CAUSAL & masks.Window(CHUNK), CAUSAL] * 2),
    put("layers.*.feed_forward", shared=None),
    one_expert_less,
    other_temperature("llama4", scale=0.1, length=4),
    other_temperature("llama4", scale=0.7, length=5),
    other_temperature("ministral3", scale=0.7, length=4),
    shared_expert_for_one,
    softmax_router,
    steps("a norm before the rotation", lambda old: old[::-1], rotated=True),
    steps("no norm", lambda old: old[:1], rotated=True),
    steps("no positions at all", lambda old: old[1:], rotated=True),
    steps("no temperature", lambda _: [], rotated=False),
    steps("rotated everywhere", lambda old: [*old, Rotary(D, 100.0)], rotated=False),
    steps("temperatures in all layers", lambda old: [*old, TEMPERATURE], rotated=True),
    steps("vectors of length 1", lambda old: [old[0], UnitLength()], rotated=True),
    steps("a norm without positions", lambda old: [*old, WeightlessRMSNorm()], rotated=False),
    weights_on_outputs,
    weights_that_sum_to_one,
)


# from position 0: the temperatures of transformers count from the start of its cache
LLAMA4 = Case("Llama4", SIZES, kind="TextConfig")
CASES: dict[str, Case] = {
    "llama4": LLAMA4._replace(keys=SIZES | {"rope_parameters": YARN}, wrong=WRONG),
    "as Scout": LLAMA4._replace(
        keys=SIZES
        | {
            "interleave_moe_layer_step": 1,
            "num_experts_per_tok": 1,
            "no_rope_layer_interval": 4,
            "rope_parameters": SCOUT,
        }
    ),
    "lists, biases, tied, no norms": LLAMA4._replace(
        keys=SIZES
        | {
            "no_rope_layers": [0, 1, 1, 0],
            "layer_types": [*["full_attention"] * 2, *["chunked_attention"] * 2],
            "moe_layers": [0, 3],
            "attention_bias": True,
            "tie_word_embeddings": True,
            "use_qk_norm": False,
            "attn_temperature_tuning": False,
        }
    ),
}


test_every_family, test_wrong_variants_are_far = parity_tests(CASES, keep=1)


@pytest.mark.full
@pytest.mark.parametrize("start", [CHUNK, 50 * CHUNK])
def test_from_a_later_position(start: int, tmp_path: Path) -> None:
    """Empty slots in front move the positions of transformers; whole chunks of them, because its
    chunks begin at the first token.
    """
    model, mine = CASES["llama4"].load(tmp_path)
    ids = ids_of(model)
    padded = torch.cat([torch.full((2, start), 2), ids], 1)
    exact = model(
        input_ids=padded,
        attention_mask=(torch.arange(start + LENGTH) >= start).long().expand(2, -1),
        position_ids=torch.arange(start + LENGTH).expand(2, -1),
        use_cache=False,
    ).logits[:, start:]
    assert_near(mine(ids, Span(start, LENGTH)), exact)
    caches, found = mine.new_caches(), []
    for at, size in [(0, 11), (11, 1), (12, 20), *((i, 1) for i in range(32, LENGTH))]:
        found.append(mine(ids[:, at : at + size], Span(start + at, size), caches))
    assert_near(torch.cat(found, 1), exact)
    with pytest.raises(AssertionError, match="times the bound"):
        assert_near(mine(ids), exact)  # temperatures of other positions


@pytest.mark.full
def test_equal_limits_of_the_scaling(tmp_path: Path) -> None:
    """Negative controls for Scout's frequencies: without the scaling, and with a blend."""
    model, mine = CASES["as Scout"].load(tmp_path)
    for high in (None, 20.0):
        scaling = None if high is None else regard.positions.Llama3(16.0, 1.0, high, 64)

        def change(network: Any, scaling: Any = scaling) -> None:
            made = Rotary(D, 500000.0, scaling=scaling, layout="interleaved")
            for part in parts(network, rotated=True):
                part.steps[0] = made

        assert_differs(mine, model, named(f"high limit {high}", change))


# Folders.


@pytest.mark.full
def test_loading_is_strict(tmp_path: Path) -> None:
    """A key, a missing tensor, one that nothing reads, and one of another shape."""
    folder = saved(LLAMA4.model(), tmp_path)
    tensors = load_file(folder / "model.safetensors")
    message = "unknown key 'attn_scales'; did you mean 'attn_scale'"
    assert_refused(folder, message, attn_scales=0.1)
    name = "model.layers.1.feed_forward.experts.gate_up_proj"
    assert tensors[name].shape == (5, 36, 40)
    for change, message in (
        ({name: None}, "gate_up_proj"),
        ({name: tensors[name].mT.contiguous()}, "gate_up_proj"),
        ({"model.layers.0.self_attn.qk_norm.weight": torch.ones(8)}, "qk_norm"),
    ):
        wrong = {k: v for k, v in {**tensors, **change}.items() if v is not None}
        assert_refused(folder, message, wrong)


def test_keys_of_the_first_files() -> None:
    keys = {k: v for k, v in SIZES.items() if not k.startswith("floor")}
    keys |= {"attn_temperature_tuning": 4, "no_rope_layers": [], "for_llm_compressor": False}
    config = parse(Llama4Config, keys | {"model_type": "llama4_text"})
    assert config.attn_temperature_tuning is True
    assert config.rotated() == config.chunked() == (True, False, True, False)
    off = parse(Llama4Config, keys | {"attn_temperature_tuning": 0})
    assert off.attn_temperature_tuning is False


def test_defaults_are_those_of_transformers() -> None:
    """A text_config inside another one has only what differs from the defaults."""
    ours = parse(Llama4Config, {"model_type": "llama4", "text_config": {}})
    default = transformers.Llama4TextConfig()
    found = vars(ours)
    assert DEFAULTS.keys() <= found.keys()
    for name in found.keys() - {"rope_theta", "rope_scaling", "no_rope_layers", "layer_types"}:
        if name != "moe_layers":
            assert found[name] == getattr(default, name), name
    assert ours.rope_theta == default.rope_parameters["rope_theta"]
    assert ours.rope_scaling is None
    assert ours.rotated() == tuple(map(bool, default.no_rope_layers))
    assert ours.chunked() == tuple(x == "chunked_attention" for x in default.layer_types)
    assert [i for i, has in enumerate(ours.with_experts()) if has] == default.moe_layers


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"no_rope_layers": [1, 0]}, "no_rope_layers must have 0 or 1 for each of 4 layers"),
        ({"layer_types": ["full_attention"]}, "layer_types must have 'chunked_attention' or"),
        ({"moe_layers": [1, 4]}, "moe_layers has 4; the model has 4 layers, counted from 0"),
        ({"attention_chunk_size": 0}, "attention_chunk_size is 0; it must be at least 1"),
        ({"attention_chunk_size": None}, "attention_chunk_size is None; it must be int"),
        ({"attn_scale": float("nan")}, "attn_scale is nan; it must be finite"),
        ({"for_llm_compressor": True}, "for_llm_compressor is True; only False"),
        ({"num_experts_per_tok": 6}, "num_experts_per_tok is 6"),
        ({"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "norm behind such a rotation"),
        ({"model_type": "llama4"}, "text_config is None; it must be an object"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(regard.ArgumentError, match=message):
        parse(Llama4Config, {"model_type": "llama4_text"} | SIZES | change)


# The mixture alone.


def test_weighted_inputs_are_the_definition() -> None:
    """Against loops in fp64, with gradients; in a batch, and token by token."""
    make = torch.Generator().manual_seed(7)
    router = LogitSigmoidRouter(6, 4, 2)
    moe = InputWeightedMoE(router, [SwiGLU(6, 5) for _ in range(4)], SwiGLU(6, 5)).double()
    for parameter in moe.parameters():
        parameter.data = torch.randn(parameter.shape, generator=make, dtype=torch.float64)
    x = torch.randn(9, 6, generator=make, dtype=torch.float64, requires_grad=True)
    rows = []
    for row in x:
        logits = [float(w @ row.detach()) for w in router.linear.weight.detach()]
        chosen = sorted(range(4), key=lambda e, s=logits: -s[e])[:2]
        y = moe.shared(row)
        for e in chosen:
            y = y + moe.experts[e](torch.sigmoid(router.linear.weight[e] @ row) * row)
        rows.append(y)
    exact, found = torch.stack(rows), moe(x)
    torch.testing.assert_close(found, exact, rtol=1e-12, atol=1e-12)
    inputs = (x, *moe.parameters())
    for one, other in zip(
        torch.autograd.grad(found.square().sum(), inputs),
        torch.autograd.grad(exact.square().sum(), inputs),
        strict=True,
    ):
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
    alone = torch.cat([moe(row[None]) for row in x])
    torch.testing.assert_close(alone, exact, rtol=1e-12, atol=1e-12)
    on_outputs = MoE(router, list(moe.experts), moe.shared)
    assert float((on_outputs(x) - exact).detach().abs().max()) > 1e-3


def test_large_logits_are_told_apart() -> None:
    """Their sigmoids are all 1 in fp32: a choice by them would be the first expert."""
    router = LogitSigmoidRouter(1, 3, 1)
    router.linear.weight.data = torch.tensor([[40.0], [42.0], [41.0]])
    weights, experts = router(torch.ones(2, 1))
    assert experts.tolist() == [[1], [1]]
    assert weights.tolist() == [[1.0], [1.0]]
