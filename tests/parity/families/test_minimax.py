"""MiniMax-Text-01 of transformers, saved by it and loaded here: lightning and softmax attention,
experts, and weighted residual connections. Wrong variants must be far.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard.configs.minimax import MiniMaxConfig
from regard.configs.reader import parse
from regard.inspect import attribute
from regard.models.families import family
from regard.nn import NormedResidual, PreNorm, Recurrent
from regard.nn.projections.steps import Swish
from regard.nn.recurrence.decays import RetentionRule
from regard.positions import Rotary
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import drop, put, swap
from tests.parity.families.test_llama_relatives import SIZES as RELATIVES
from tests.parity.families.test_llama_relatives import gate_and_up_swapped, one_expert_less

minimax = family("minimax")

SIZES: dict[str, Any] = {
    **RELATIVES,
    "num_hidden_layers": 4,
    "head_dim": 8,
    "num_local_experts": 5,
    "num_experts_per_tok": 2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "full_attn_alpha_factor": 1.5,
    "full_attn_beta_factor": 0.5,
    "linear_attn_alpha_factor": 2.5,
    "linear_attn_beta_factor": 0.75,
    "mlp_alpha_factor": 1.25,
    "mlp_beta_factor": 2.0,
}


def residuals(network: nn.Module) -> list[NormedResidual]:
    return [m for m in network.modules() if isinstance(m, NormedResidual)]


def norm_before_each_sublayer(network: Any) -> None:
    """The states themselves are added, not the normalized ones."""
    for block in network.layers:
        for name in ("attention_residual", "feed_forward_residual"):
            setattr(block, name, PreNorm(getattr(block, name).norm))


def rates_of_the_first_layer(network: Any) -> None:
    first, *rest = changes.recurrences(network)
    for mixer in rest:
        mixer.rule = first.rule


def queries_for_keys(network: Any) -> None:
    """The rows of queries and keys exchanged; their products alone would be the same."""
    for mixer in changes.recurrences(network):
        q, v = mixer.project.q.linear, mixer.project.v.linear
        q.weight.data, v.weight.data = v.weight.data, q.weight.data


def half_rotated(network: Any) -> None:
    for block in network.layers:
        if not isinstance(block.attention, Recurrent):
            for part in (block.attention.project.q, block.attention.project.k):
                part.steps[-1] = Rotary(8, 1e6, rotary_dim=4)


def wider(network: Any) -> None:
    for block in network.layers:
        if not isinstance(block.attention, Recurrent):
            block.attention.mask = regard.masks.Causal() & regard.masks.Window(9)


CASES = {
    "minimax": Case("MiniMax", SIZES, start=1000),
    "minimax, window": Case(
        "MiniMax",
        SIZES | {"sliding_window": 8},
        (
            changes.interleave,
            changes.norms_swapped,
            put("layers.*.attention", rule=RetentionRule(6, scale=1.0)),
            swap("layers.*.(attention|feed_forward)_residual", "alpha", "beta"),
            gate_and_up_swapped,
            put("layers.*.attention", gate_before_norm=True),
            half_rotated,
            drop("layers.*.attention.project.[qk]", Swish),
            put("layers.*.(attention|feed_forward)_residual", alpha=1.0, beta=1.0),
            norm_before_each_sublayer,
            one_expert_less,
            queries_for_keys,
            rates_of_the_first_layer,
            put("layers.*.attention", gate_activation="silu"),
            wider,
        ),
        start=1000,
    ),
}


test_every_family, test_wrong_variants_are_far = parity_tests(CASES)


def test_names_of_the_makers() -> None:
    """Their keys mean the same; rotary_dim is the part of a head that they rotate."""
    keys = {k: v for k, v in SIZES.items() if "factor" not in k and k != "layer_types"}
    keys |= {
        "model_type": "minimax",
        "attn_type_list": [0, 1, 0, 1],
        "rotary_dim": 4,
        "postnorm": True,
        "layernorm_linear_attention_alpha": 3.5,
        "layernorm_mlp_beta": 0.25,
    }
    config = parse(MiniMaxConfig, keys)
    network = minimax.build(config)
    assert [type(block.attention).__name__ for block in network.layers] == [
        *("Recurrent", "Attention", "Recurrent", "Attention")
    ]
    first, second = network.layers[0], network.layers[1]
    assert (first.attention_residual.alpha, first.attention_residual.beta) == (3.5, 1.0)
    assert (second.attention_residual.alpha, second.feed_forward_residual.beta) == (1.0, 0.25)
    assert second.attention.project.q.steps[-1].rotary_dim == 4
    with pytest.raises(regard.ArgumentError, match="postnorm is False; only True is supported"):
        parse(MiniMaxConfig, keys | {"postnorm": False})


def test_direct_attribution_counts_both_factors(tmp_path: Path) -> None:
    """The terms of all layers sum to the difference of two logits; without beta they do not."""
    mine = CASES["minimax"].load(tmp_path)[1]
    ids = torch.randint(3, 96, (1, 12), generator=torch.Generator().manual_seed(2))
    table = attribute(mine, ids, (5, 6))
    logits = mine(ids)[0, -1]
    total = float(table.values[:-1].sum())  # without the row of the rounding
    assert total == pytest.approx(float(logits[5] - logits[6]), abs=1e-4)
    for residual in residuals(mine.decoder):
        residual.beta = 1.0
    assert abs(float(mine(ids)[0, -1, 5] - mine(ids)[0, -1, 6]) - total) > 1e-2
