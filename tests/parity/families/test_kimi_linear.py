"""Kimi Linear of transformers, saved by it and loaded here: Kimi Delta Attention, latent attention
without positions, and experts. Wrong variants must be far.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regard
from regard.configs.deepseek import KimiLinearConfig
from regard.configs.reader import parse
from regard.nn import LatentProjection, Recurrent
from regard.nn.blocks.norms import L2Norm
from regard.nn.recurrence.delta import ChannelLogDecay
from regard.positions import Rotary
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import drop, put, zeros
from tests.parity.families.harness import assert_near, ids_of, saved
from tests.parity.families.test_llama_relatives import (
    gate_and_up_swapped,
    one_expert_less,
    other_weights_of_experts,
)

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 20,
    "moe_intermediate_size": 12,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "num_local_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "n_group": 2,
    "topk_group": 1,
    "routed_scaling_factor": 1.5,
    "linear_head_dim": 8,
    "linear_num_heads": 3,
    "linear_conv_kernel_dim": 3,
    "rms_norm_eps": 1e-2,  # a norm of a small result would amplify roundings
    "layer_types": ["linear_attention", "full_attention", "linear_attention", "full_attention"],
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def rotated_keys(network: Any) -> None:
    """The part of queries and keys that has positions in DeepSeek-V3."""
    for project in (m for m in network.modules() if isinstance(m, LatentProjection)):
        project.rotary = Rotary(4)


def scale_of_one_part(network: Any) -> None:
    for block in network.layers:
        if not isinstance(block.attention, Recurrent):
            block.attention.scale = 8**-0.5


def one_decay_for_a_head(network: Any) -> None:
    """Gated DeltaNet, whose decay is the same for all channels: the mean of those here."""

    class Mean(nn.Module):
        def __init__(self, decay: ChannelLogDecay) -> None:
            super().__init__()
            self.decay = decay

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.decay(x).mean(-1)

    for mixer in changes.recurrences(network):
        mixer.rule.decay = Mean(mixer.rule.decay)


def filters_exchanged(network: Any) -> None:
    """The filters of queries and of keys."""
    for mixer in changes.recurrences(network):
        q, k, _ = mixer.project.convolution.parts
        q.weight.data, k.weight.data = k.weight.data, q.weight.data


CASE = Case(
    "KimiLinear",
    SIZES,
    (
        changes.norms_swapped,
        filters_exchanged,
        gate_and_up_swapped,
        changes.no_convolution,
        zeros("layers.*.feed_forward.router.correction"),
        changes.no_decay,
        put("layers.*.feed_forward", shared=None),
        zeros("layers.*.attention.rule.decay.dt_bias"),
        drop("layers.*.attention.project.k", L2Norm),
        one_decay_for_a_head,
        one_expert_less,
        other_weights_of_experts,
        rotated_keys,
        scale_of_one_part,
        put("layers.*.attention", gate_activation="silu"),
    ),
    start=1000,
)


test_kimi_linear, test_wrong_variants_are_far = parity_tests({"kimi_linear": CASE})


def test_file_of_the_makers(tmp_path: Path) -> None:
    """Layers are numbered from 1 in lists of their own, sizes of states stand in an object; the
    queries of this one have a latent, too.
    """
    model = CASE.model(q_lora_rank=20)
    folder = saved(model, tmp_path)
    keys = json.loads((folder / "config.json").read_text())
    for key in ("layer_types", "mlp_layer_types", "linear_head_dim", "linear_num_heads"):
        del keys[key]
    keys |= {
        "first_k_dense_replace": 1,
        "head_dim": 9,
        "linear_attn_config": {
            "full_attn_layers": [2, 4],
            "kda_layers": [1, 3],
            "head_dim": 8,
            "num_heads": 3,
            "short_conv_kernel_size": 3,
        },
        "mla_use_nope": True,
        "model_max_length": 64,
        "moe_layer_freq": 1,
        "moe_router_activation_func": "sigmoid",
        "num_nextn_predict_layers": 0,
        "rope_scaling": None,
        "rope_theta": 10000.0,
        "use_grouped_topk": True,
    }
    (folder / "config.json").write_text(json.dumps(keys))
    ids = ids_of(model)
    assert_near(regard.load(folder)(ids), model(input_ids=ids, use_cache=False).logits)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"mlp_layer_types": ["sparse", "dense"] * 2}, "'dense' for the first ones"),
        ({"mla_use_nope": False}, "mla_use_nope is False; only True"),
        ({"num_key_value_heads": 2}, "every head has its own keys: make them equal"),
        (
            {
                "layer_types": None,
                "linear_attn_config": {"full_attn_layers": [2], "kda_layers": []},
            },
            "layer 1 of linear_attn_config is in both lists, full_attn_layers and kda_layers",
        ),
        ({"linear_attn_config": {"head_dim": 9}}, "head_dim is 9 and linear_head_dim is 8"),
        ({"num_experts": 5}, "num_local_experts is 8 and num_experts is 5"),
    ],
)
def test_what_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(regard.ArgumentError, match=message):
        parse(KimiLinearConfig, {"model_type": "kimi_linear"} | SIZES | change)
