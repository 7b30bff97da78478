"""Attention of Llama, Qwen3 and OLMo 2 as transformers computes it, against `gqa`, `qk_norm` and
`qk_norm_flat`.
"""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch

from regard.masks import Causal, Window
from regard.nn.variants import gqa, qk_norm, qk_norm_after_rotary, qk_norm_flat
from regard.positions import Rotary
from tests.parity import layers
from tests.parity.layers import LENGTH, Change, Family, Pair

M, H, G, D = 24, 6, 2, 8
SIZES = {
    "vocab_size": 8,
    "hidden_size": M,
    "intermediate_size": 16,
    "num_hidden_layers": layers.LAYERS,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": D,
    "rms_norm_eps": 1e-2,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "eos_token_id": 0,
}
LINEAR = {
    "q_proj.weight": "project.q.linear.weight",
    "k_proj.weight": "project.k.linear.weight",
    "v_proj.weight": "project.v.linear.weight",
    "o_proj.weight": "output.weight",
}
IN_HEADS = {
    "q_norm.weight": "project.q.steps.0.weight",
    "k_norm.weight": "project.k.steps.0.weight",
}
FLAT = {"q_norm.weight": "project.q.flat.weight", "k_norm.weight": "project.k.flat.weight"}


def rope(base: float) -> dict[str, Any]:
    return {"rope_parameters": {"rope_type": "default", "rope_theta": base}}


def base_of(config: Any) -> float:
    return config.rope_parameters["rope_theta"]


def with_eps(module: Any, config: Any) -> Any:
    """Norms with the eps of a configuration; the catalogue's is 1e-6."""
    for part in (module.project.q, module.project.k):
        for norm in (part.flat, *part.steps):
            if hasattr(norm, "eps"):
                norm.eps = config.rms_norm_eps
    return module


def build(name: str) -> Any:
    make: Any = {"Llama": gqa, "Qwen3": qk_norm, "Olmo2": qk_norm_flat}[name]
    return lambda config, layer: with_eps(
        make(M, H, groups=G, head_dim=D, base=base_of(config)), config
    )


FAMILIES = {
    name: Family(name, SIZES | rope(10000.0), "layers.{}.self_attn", LINEAR | norms, build(name))
    for name, norms in (("Llama", {}), ("Qwen3", IN_HEADS), ("Olmo2", FLAT))
}


@functools.cache
def made(name: str, layer: int = 0) -> Pair:
    return Pair(FAMILIES[name], layer)


@pytest.fixture(params=FAMILIES)
def pair(request: pytest.FixtureRequest) -> Pair:
    return made(request.param, 1)


def test_prefill(pair: Pair) -> None:
    layers.assert_prefill(pair)


def test_chunks_and_decoding(pair: Pair) -> None:
    layers.assert_chunks(pair)


def test_left_padding(pair: Pair) -> None:
    layers.assert_left_padding(pair)


def test_offset(pair: Pair) -> None:
    layers.assert_offset(pair)
    layers.assert_shift(pair)


@pytest.mark.parametrize("name", FAMILIES)
def test_offset_with_exact_angles(name: str) -> None:
    """Base 256 makes the frequencies 1, 1/4, 1/16, 1/64, so that fp32 angles are exact on both
    sides.

    With others, theirs are off by up to half a unit of an angle, which passes the bound at some
    4000 positions.
    """
    pair = Pair(FAMILIES[name], **rope(256.0))
    assert pair.theirs.rotary_emb.inv_freq.tolist() == [1, 1 / 4, 1 / 16, 1 / 64]
    layers.assert_offset(pair, 4000)


# Negative controls: what must be told apart.


def interleaved(ours: Any) -> None:
    for part in (ours.project.q, ours.project.k):
        part.steps[-1] = Rotary(D, layout="interleaved")


def other_base(ours: Any) -> None:
    for part in (ours.project.q, ours.project.k):
        part.steps[-1] = Rotary(D, 9000.0)


def other_scale(ours: Any) -> None:
    ours.scale = M**-0.5


def window(ours: Any) -> None:
    """All but one key of one query."""
    ours.mask = Causal() & Window(LENGTH - 1)


def not_causal(ours: Any) -> None:
    ours.mask = None


def other_groups(ours: Any) -> None:
    """Query head h with key/value head h % G."""
    order = [h // (H // G) + G * (h % (H // G)) for h in range(H)]
    for linear, dim in ((ours.project.q.linear, 0), (ours.output, 1)):
        weight = linear.weight.data
        linear.weight.data = (
            weight.unflatten(dim, (H, D))
            .index_select(dim, torch.tensor(order))
            .flatten(dim, dim + 1)
        )


def other_eps(ours: Any) -> None:
    for part in (ours.project.q, ours.project.k):
        part.steps[0].eps = 1e-6


def norm_behind_rotary(ours: Any) -> Any:
    other = qk_norm_after_rotary(M, H, groups=G, head_dim=D)
    for mine, right in ((other.project.q, ours.project.q), (other.project.k, ours.project.k)):
        mine.linear, mine.steps[1] = right.linear, right.steps[0]
    other.project.v, other.output = ours.project.v, ours.output
    return other


def norms_swapped(ours: Any) -> None:
    """The queries' norm on keys."""
    q, k = ours.project.q, ours.project.k
    q.steps[0], k.steps[0] = k.steps[0], q.steps[0]


def no_norm(ours: Any) -> None:
    ours.project.k.flat = torch.nn.Identity()


def norm_head_by_head(ours: Any) -> None:
    """OLMo 2's weights in Qwen3's place."""
    q = ours.project.q
    flat = q.flat

    class EachHead(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            heads = x.unflatten(-1, (H, D))
            normed = heads * (heads.square().mean(-1, keepdim=True) + flat.eps).rsqrt()
            return normed.flatten(-2) * flat.weight

    q.flat = EachHead()


EVERYWHERE = (interleaved, other_base, other_scale, window, not_causal, other_groups)
WRONG = [(name, change) for name in FAMILIES for change in EVERYWHERE] + [
    ("Qwen3", other_eps),
    ("Qwen3", norm_behind_rotary),
    ("Qwen3", norms_swapped),
    ("Olmo2", no_norm),
    ("Olmo2", norm_head_by_head),
]


@pytest.mark.parametrize("name, change", WRONG, ids=lambda x: getattr(x, "__name__", x))
def test_a_wrong_variant_is_far(name: str, change: Change) -> None:
    layers.assert_wrong(made(name), change)
