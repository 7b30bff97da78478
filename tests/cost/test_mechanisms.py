"""Mechanisms as sizes against the catalogue's modules, and prompts against the sum over their
tokens.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from regard.cost.fixed_state import InfiniSpec
from regard.cost.head_parts import HEAD_PARTS
from regard.cost.latent import LatentSpec
from regard.cost.mechanisms import MECHANISMS, mechanism_spec
from regard.cost.selected import NSASpec
from regard.cost.softmax import CrossSpec, SoftmaxSpec
from regard.cost.spec import HeadShape, Spec
from regard.errors import ArgumentError
from regard.nn.variants import VARIANTS

SIZES = {"compress": 4, "stride": 2, "select": 4, "count": 4, "window": 6}
LATENT = {"kv_rank": 16, "nope_dim": 8, "rope_dim": 4, "value_dim": 6}
CASES: list[tuple[str, dict[str, Any]]] = [
    ("mha", {}),
    ("mha", {"head_dim": 6}),
    ("gqa", {"groups": 2}),
    ("gqa", {"groups": 4, "head_dim": 6}),
    ("mqa", {}),
    ("sliding_window", {"groups": 2, "window": 7}),
    ("mla", LATENT),
    ("mla", {**LATENT, "q_rank": 24}),
    ("mla", {**LATENT, "q_rank": 24, "form": "expand"}),
    ("mla", {**LATENT, "form": "absorb"}),
    ("tpa", {}),
    ("tpa", {"rank": 3, "q_rank": 4, "head_dim": 6}),
    ("mfa", {"q_rank": 12, "head_dim": 16}),
    ("gta", {"groups": 2}),
    ("grouped_latent", LATENT),
    ("mlra", {**LATENT, "latents": 4, "branches": 2, "q_rank": 24}),
    ("linear_attention", {"groups": 2, "value_dim": 10}),
    ("retention", {}),
    ("retention", {"groups": 2, "head_dim": 4}),
    ("gated_linear", {"rank": 3}),
    ("gated_linear", {"groups": 2, "value_dim": 6}),
    ("delta_net", {"groups": 2}),
    ("gated_delta_net", {"groups": 2, "value_dim": 16}),
    ("linear_attention", {"groups": 2, "value_heads": 4}),
    ("linear_attention", {"value_heads": 8}),
    ("retention", {"groups": 2, "value_heads": 4}),
    ("gated_linear", {"groups": 2, "value_heads": 8, "rank": 3}),
    ("delta_net", {"groups": 1, "value_heads": 2}),
    ("gated_delta_net", {"value_heads": 8, "value_dim": 16}),
    ("gated_delta_net", {"groups": 2, "value_heads": 4, "kernel": 3}),
    ("gated_delta_net", {"groups": 2, "kernel": 3}),
    ("kimi_delta", {}),
    ("kimi_delta", {"value_heads": 8, "value_dim": 6, "rank": 5, "lower_bound": -5.0}),
    ("gated_delta_2", {"value_heads": 8, "kernel": 3}),
    ("comba", {"value_heads": 8, "head_dim": 6}),
    ("delta_product", {}),
    ("delta_product", {"value_heads": 8, "value_dim": 6, "writes": 3, "kernel": 2}),
    ("preconditioned_delta", {"value_dim": 6, "rank": 3}),
    ("mesa", {"head_dim": 4}),
    ("titans_linear", {"value_dim": 6}),
    ("short_convolution", {"kernel": 4}),
    ("lightning", {}),
    ("hgrn2", {"value_dim": 6}),
    ("lightnet", {"head_dim": 4}),
    ("mamba2", {"head_dim": 8}),
    ("mamba2", {"groups": 2, "head_dim": 6, "value_dim": 4, "kernel": 3}),
    ("rwkv4", {}),
    ("rwkv6", {"rank": 3}),
    ("rwkv7", {"rank": 3, "gate_rank": 5}),
    ("rwkv7", {"head_dim": 6, "value_rank": 2, "layer": 1}),
    ("mamba", {}),
    ("mamba", {"inner": 12, "state": 4, "kernel": 3, "rank": 5}),
    ("value_residual", {"groups": 2}),
    ("value_residual", {"groups": 4, "head_dim": 6, "layer": 3}),
    ("mlstm", {}),
    ("gsa", {"groups": 2, "slots": 5}),
    ("abc", {"slots": 3}),
    ("based", {"head_dim": 4}),
    ("rebased", {"head_dim": 4, "value_dim": 6}),
    ("power_attention", {"groups": 2, "power": 4}),
    ("performer", {"features": 12}),
    ("cosformer", {"groups": 2}),
    ("infini", {"segment": 8, "groups": 2}),
    ("infini_delta", {"segment": 8}),
    *((name, {"groups": 2}) for name in HEAD_PARTS if name != "mrope"),
    ("shared_kv", {}),
    ("mrope", {"groups": 2, "head_dim": 16}),
    ("nsa", {"groups": 2, **SIZES}),
    ("nsa", {"groups": 1, "head_dim": 6, **SIZES}),
]


@pytest.mark.full(keep="each")
@pytest.mark.parametrize(("name", "options"), CASES)
@pytest.mark.parametrize("context", [1, 5, 16, 100])
def test_one_layer_as_the_catalogue_builds_and_describes_it(
    name: str, options: dict[str, Any], context: int
) -> None:
    ours = mechanism_spec(name, 32, 4, options)
    entry = VARIANTS[name]
    with torch.device("meta"):
        layer = entry.build(32, 4, **options)
    told = layer.describe(context)
    cached = ours.cached(context)
    assert ours.weights.total == sum(p.numel() for p in layer.parameters())
    if name != "mha":  # the catalogue's looks ahead, and so do its figures
        assert (cached.values_per_token, cached.state) == (
            told.kv_per_token.value,
            told.state.value,
        )
        assert cached.tokens == told.kv_tokens.value
    flops = 2 * ours.weights.multiplied_once + ours.decode_flops(context)
    assert flops == told.flops_per_token.value - _again(ours, context)
    assert (layer.spec.weights.total, layer.spec.weights.multiplied_once) == (
        ours.weights.total,
        ours.weights.multiplied_once,
    )
    if name not in ("mha", "nsa"):
        assert layer.spec.prefill_flops(context) == ours.prefill_flops(context)


def _again(mixer: Spec, context: int) -> int:
    """What regard's own NSA computes beyond the mechanism: every block is compressed anew for each
    token, not once.
    """
    if not isinstance(mixer, NSASpec):
        return 0
    D, l, groups = mixer.shape.head_dim, mixer.compress, mixer.shape.groups
    blocks = (context - l) // mixer.stride + 1 if context >= l else 0
    each = 2 * groups * 2 * (l * D * D + D * D)
    return blocks * each - each // mixer.stride


def test_every_mechanism_is_compared() -> None:
    assert {name for name, _ in CASES} == set(MECHANISMS) <= set(VARIANTS)


SHAPE = HeadShape(4, 2, 8, 6)
SUMMED: list[Spec] = [
    SoftmaxSpec.of(32, SHAPE),
    SoftmaxSpec.of(32, SHAPE, window=7),
    InfiniSpec.of(32, SHAPE, 8),
    InfiniSpec.of(32, SHAPE, 8, delta=True),
    mechanism_spec("linear_attention", 32, 4, {}),
    mechanism_spec("gated_delta_net", 32, 4, {}),
]


@pytest.mark.parametrize("mixer", SUMMED, ids=lambda m: m.name)
@pytest.mark.parametrize("context", [1, 6, 7, 8, 9, 40])
def test_a_prompt_is_the_sum_of_its_tokens(mixer: Spec, context: int) -> None:
    """Causal mechanisms compute for a prompt what its tokens cost one after another."""
    tokens = sum(mixer.decode_flops(t) for t in range(1, context + 1))
    assert mixer.prefill_flops(context) == tokens


@pytest.mark.parametrize("context", [1, 3, 4, 5, 6, 7, 8, 33, 100])
def test_a_prompt_of_nsa(context: int) -> None:
    """Pairs counted one by one from the definition; blocks are compressed once each."""
    l, d, size, count, window = SIZES.values()
    mixer = NSASpec.of(32, SHAPE, l, d, size, count, window)
    pairs, compressed = 0, 0
    for t in range(context):
        ready = sum(1 for start in range(0, context, d) if start + l - 1 <= t)
        own = t // size
        chosen = sum(
            1 for j in range(t + 1) if own - (count - 1) <= j // size
        )  # as many as any choice has
        pairs += ready + chosen + min(window, t + 1)
        compressed += ready
    blocks = sum(1 for start in range(0, context, d) if start + l <= context)
    D, E, H, G = SHAPE.head_dim, SHAPE.value_dim, SHAPE.heads, SHAPE.groups
    network = sum(2 * G * blocks * (l * w * w + w * w) for w in (D, E))
    assert (
        mixer.prefill_flops(context) == 2 * H * pairs * (D + E) + 2 * H * compressed * D + network
    )


def test_pairs_of_an_encoder_and_across() -> None:
    both = SoftmaxSpec.of(32, HeadShape(4, 4, 8, 8), causal=False)
    assert both.prefill_flops(10) == 2 * 4 * 100 * 16
    assert both.cached(10).values == 0
    across = CrossSpec.of(32, SHAPE)
    assert across.cached(10).values == 10 * 2 * (8 + 6)
    assert across.cached(10).from_source
    assert across.prefill_flops(10) == 2 * 10 * 32 * 2 * (8 + 6)
    assert across.weights.multiplied_once + 32 * 2 * (8 + 6) == SHAPE.maps(32).multiplied_once


def test_latents_absorb_few_queries_and_expand_many() -> None:
    layer = LatentSpec.of(7168, 128, 512, 128, 64, 128, 1536)
    assert (
        layer.decode_flops(8192) == layer.flops(1, 8192, "absorb") < layer.flops(1, 8192, "expand")
    )
    assert layer.prefill_flops(8192) == layer.flops(8192, 8192, "expand")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("gqaa", {"groups": 2}, "the cost of attention 'gqaa' cannot be counted; did you mean"),
        ("moba", {"groups": 2}, "regard describe NAME prints the cost of one layer of any"),
        ("gqa", {}, "attention 'gqa' needs a value for groups; give it"),
        ("mla", {"kv_rank": 4}, "needs a value for nope_dim, rope_dim, value_dim"),
        ("linear_attention", {"window": 4}, "'linear_attention' has no option window"),
        ("gqa", {"groups": 3}, "query heads, 4, is not divisible by .* key/value heads, 3; give"),
        ("gqa", {"groups": 0}, "groups is 0; it must be an integer of at least 1"),
        ("mla", {**LATENT, "form": "naive"}, "form is 'naive'; it must be auto, expand or absorb"),
    ],
)
def test_what_is_refused(name: str, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        mechanism_spec(name, 32, 4, options)


def test_a_width_that_heads_do_not_divide() -> None:
    with pytest.raises(ArgumentError, match="dim 34 is not divisible by 4, which is needed for 4"):
        mechanism_spec("mha", 34, 4, {})
    assert mechanism_spec("mha", 34, 4, {"head_dim": 8}).weights.total == 4 * 34 * 32
