"""DeepSeek-V2 of transformers, saved by it and loaded here; wrong ones must be far; the published
files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.configs.reader import parse
from regard.errors import ArgumentError
from regard.models.families import family
from regard.nn.blocks.routers import ExpertGroups
from regard.positions import Rotary
from tests.parity.families.harness import assert_decoder, assert_differs, theirs
from tests.parity.families.published import assert_saved, build, count, layer, placed

H, NOPE, ROPE, V, RANK = 5, 8, 6, 10, 12
YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e4,
    "factor": 40.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32,
    "beta_slow": 1,
    "mscale": 0.707,
    "mscale_all_dim": 0.707,
}
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 40,
    "intermediate_size": 48,
    "moe_intermediate_size": 16,
    "num_hidden_layers": 3,
    "num_attention_heads": H,
    "num_key_value_heads": H,
    "kv_lora_rank": RANK,
    "q_lora_rank": 9,
    "qk_nope_head_dim": NOPE,
    "qk_rope_head_dim": ROPE,
    "v_head_dim": V,
    "n_routed_experts": 8,
    "n_shared_experts": 2,
    "num_experts_per_tok": 3,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "rope_parameters": YARN,
}
GROUPS = {
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 4.0,
}
CHANGES: dict[str, dict[str, Any]] = {
    "as V2": GROUPS,
    "as Lite": {"q_lora_rank": None},
    "biases, tied, no scaling": {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "first_k_dense_replace": 0,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CHANGES)
def test_deepseek_v2(name: str, tmp_path: Path) -> None:
    start = 1000 if name == "as V2" else 0
    model = theirs("DeepseekV2", SMALL | CHANGES[name])
    mine = assert_decoder(model, tmp_path, start=start)
    assert_saved(mine, model, tmp_path, start=start)


def test_a_cache_keeps_latents(tmp_path: Path) -> None:
    mine = assert_decoder(theirs("DeepseekV2", SMALL), tmp_path)
    caches = mine.new_caches()
    mine(torch.full((1, 9), 3), caches=caches)
    assert [cache.bytes for cache in caches] == [9 * (RANK + ROPE) * 4] * 3


# Negative controls.


def halves(network: Any) -> None:
    for rotary in (m for m in network.modules() if isinstance(m, Rotary)):
        rotary.layout, rotary._last = "half", None


def no_mscale(network: Any) -> None:
    for block in network.layers:
        block.attention.scale = (NOPE + ROPE) ** -0.5


def values_first(network: Any) -> None:
    """The rows of a head in kv_b: values, then keys."""
    for block in network.layers:
        weight = block.attention.project.kv_up.linear.weight
        rows = weight.data.unflatten(0, (H, NOPE + V)).split((NOPE, V), 1)
        weight.data = torch.cat(rows[::-1], 1).flatten(0, 1)


def rope_rows_first(network: Any) -> None:
    for block in network.layers:
        weight = block.attention.project.kv_down.weight
        weight.data = weight.data.roll(ROPE, 0)


def no_inner_norm(network: Any) -> None:
    for block in network.layers:
        block.attention.project.kv_norm = torch.nn.Identity()


def no_groups(network: Any) -> None:
    for block in network.layers[1:]:
        block.feed_forward.router.groups = None


def groups_by_two(network: Any) -> None:
    for block in network.layers[1:]:
        block.feed_forward.router.groups = ExpertGroups(4, 2, best=2)


def renormalized(network: Any) -> None:
    for block in network.layers[1:]:
        block.feed_forward.router.normalize = True


def not_scaled(network: Any) -> None:
    for block in network.layers[1:]:
        block.feed_forward.router.scale = 1.0


def nobody_shared(network: Any) -> None:
    for block in network.layers[1:]:
        block.feed_forward.shared = None


WRONG = (
    halves,
    no_mscale,
    values_first,
    rope_rows_first,
    no_inner_norm,
    no_groups,
    groups_by_two,
    renormalized,
    not_scaled,
    nobody_shared,
)


@pytest.mark.full
def test_wrong_variants_are_far(tmp_path: Path) -> None:
    model = theirs("DeepseekV2", SMALL | GROUPS)
    mine = assert_decoder(model, tmp_path)
    for change in WRONG:
        assert_differs(mine, model, change, start=1000)


# Published files.

LITE: dict[str, Any] = {
    "architectures": ["DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV2Config",
        "AutoModel": "modeling_deepseek.DeepseekV2Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV2ForCausalLM",
    },
    "aux_loss_alpha": 0.001,
    "bos_token_id": 100000,
    "eos_token_id": 100001,
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 10944,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v2",
    "moe_intermediate_size": 1408,
    "moe_layer_freq": 1,
    "n_group": 1,
    "n_routed_experts": 64,
    "n_shared_experts": 2,
    "norm_topk_prob": False,
    "num_attention_heads": 16,
    "num_experts_per_tok": 6,
    "num_hidden_layers": 27,
    "num_key_value_heads": 16,
    "pretraining_tp": 1,
    "q_lora_rank": None,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 0.707,
        "mscale_all_dim": 0.707,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 1.0,
    "scoring_func": "softmax",
    "seq_aux": True,
    "tie_word_embeddings": False,
    "topk_group": 1,
    "topk_method": "greedy",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 102400,
}
V2 = LITE | {
    "ep_size": 1,
    "hidden_size": 5120,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "n_group": 8,
    "n_routed_experts": 160,
    "num_attention_heads": 128,
    "num_hidden_layers": 60,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "routed_scaling_factor": 16.0,
    "topk_group": 3,
    "topk_method": "group_limited_greedy",
}


@pytest.mark.parametrize(
    "raw, parameters", [(LITE, 15_706_484_224), (V2, 235_741_434_880)], ids=["Lite", "V2"]
)
def test_published_configs(raw: dict[str, Any], parameters: int) -> None:
    _, network = build(raw | {"num_hidden_layers": 2})
    each = sum(p.numel() for p in network.layers[1].parameters())
    assert count(network) + (raw["num_hidden_layers"] - 2) * each == parameters
    assert network.layers[1].attention.scale == pytest.approx(0.11472138679292611)


def test_published_names() -> None:
    raw = LITE | {"num_hidden_layers": 2}
    _, network = build(raw)
    attention = {
        "input_layernorm.weight": (2048,),
        "post_attention_layernorm.weight": (2048,),
        "self_attn.q_proj.weight": (3072, 2048),
        "self_attn.kv_a_proj_with_mqa.weight": (576, 2048),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (4096, 512),
        "self_attn.o_proj.weight": (2048, 2048),
    }
    assert layer(raw, network) == attention | {
        "mlp.gate_proj.weight": (10944, 2048),
        "mlp.up_proj.weight": (10944, 2048),
        "mlp.down_proj.weight": (2048, 10944),
    }
    found = layer(raw, network, 1)
    assert len(found) == len(attention) + 1 + 3 * 65
    assert attention.items() <= found.items()
    assert found["mlp.gate.weight"] == (64, 2048)
    assert found["mlp.experts.63.down_proj.weight"] == (2048, 1408)
    assert found["mlp.shared_experts.up_proj.weight"] == (2816, 2048)
    heads = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert placed(raw, network, *heads) == heads
    low = {
        name.removeprefix("self_attn.")
        for name in layer(V2, build(V2 | {"num_hidden_layers": 1})[1])
    }
    assert {"q_a_proj.weight", "q_a_layernorm.weight", "q_b_proj.weight"} <= low
    assert "q_proj.weight" not in low


@pytest.mark.parametrize(
    "change, message",
    [
        (
            {"topk_method": "noaux_tc"},
            "topk_method is 'noaux_tc'; supported are 'greedy' and 'group_limited_greedy'",
        ),
        (
            {"topk_method": "group_limited_greedy", "n_group": None},
            "n_group is None and topk_group 1; groups need both",
        ),
        (
            {"topk_method": "group_limited_greedy", "n_group": 7},
            "64 experts cannot be in ExpertGroups",
        ),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; only 'softmax'"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4, and num_attention_heads 16"),
        (
            {"head_dim": 128},
            "head_dim is 128, but qk_nope_head_dim is 128 and qk_rope_head_dim is 64",
        ),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok is 65, and n_routed_experts is 64"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "whose frequencies depend on"),
        ({"auto_map": {"AutoModel": "mine.Other"}}, "auto_map names 'mine.Other'"),
        ({"qk_rope_head_dim": 63}, "63"),
    ],
)
def test_it_refuses(change: dict[str, Any], message: str) -> None:
    found = family("deepseek_v2")
    with pytest.raises(ArgumentError, match=message):
        found.check(parse(found.config, LITE | change))


def test_older_files_do_not_name_key_heads() -> None:
    found = family("deepseek_v2")
    raw = {k: v for k, v in LITE.items() if k != "num_key_value_heads"}
    assert parse(found.config, raw) == parse(
        found.config, LITE | {"head_dim": 64, "qk_head_dim": 192}
    )
