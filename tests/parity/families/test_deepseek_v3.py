"""DeepSeek-V3 of transformers, saved by it and loaded here; wrong ones must be far; the published
files.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.configs.reader import parse
from regard.errors import ArgumentError, FileError
from regard.models.families import family
from regard.models.save import save
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
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
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
    "n_shared_experts": 1,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "max_position_embeddings": 4096,
    "rope_parameters": YARN,
}
CHANGES: dict[str, dict[str, Any]] = {
    "as V3": {},
    "halves, biases, tied, no scaling": {
        "attention_bias": True,
        "tie_word_embeddings": True,
        "first_k_dense_replace": 0,
        "rope_interleave": False,
        "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
    },
    "one group, no low rank, not normalized": {
        "q_lora_rank": None,
        "n_group": 1,
        "topk_group": 1,
        "norm_topk_prob": False,
        "routed_scaling_factor": 1.0,
    },
}


def made(**change: Any) -> Any:
    """Corrections are buffers there: they are drawn too, large enough to decide."""
    model = theirs("DeepseekV3", SMALL | change)
    make = torch.Generator().manual_seed(8)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(0.3 * torch.randn(buffer.shape, generator=make))
    return model


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CHANGES)
def test_deepseek_v3(name: str, tmp_path: Path) -> None:
    start = 1000 if name == "as V3" else 0
    model = made(**CHANGES[name])
    mine = assert_decoder(model, tmp_path, start=start)
    assert_saved(mine, model, tmp_path, start=start)


# Negative controls.


def routers(network: Any) -> list[Any]:
    return [block.feed_forward.router for block in network.layers[1:]]


def halves(network: Any) -> None:
    for rotary in (m for m in network.modules() if isinstance(m, Rotary)):
        rotary.layout, rotary._last = "half", None


def no_mscale(network: Any) -> None:
    for block in network.layers:
        block.attention.scale = (NOPE + ROPE) ** -0.5


def no_groups(network: Any) -> None:
    for router in routers(network):
        router.groups = None


def groups_by_one(network: Any) -> None:
    for router in routers(network):
        router.groups = ExpertGroups(4, 2, best=1)


def no_correction(network: Any) -> None:
    for router in routers(network):
        router.correction.data.zero_()


def weights_of_the_corrected(self: Any, x: torch.Tensor) -> Any:
    scores = self.logits(x).sigmoid() + self.correction
    chosen = self.choose(scores, scores)
    weights = scores.gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) * self.scale, chosen


def corrected_weights(network: Any) -> None:
    for router in routers(network):
        router.forward = weights_of_the_corrected.__get__(router)


def not_normalized(network: Any) -> None:
    for router in routers(network):
        router.normalize = False


def not_scaled(network: Any) -> None:
    for router in routers(network):
        router.scale = 1.0


WRONG = (
    halves,
    no_mscale,
    no_groups,
    groups_by_one,
    no_correction,
    corrected_weights,
    not_normalized,
    not_scaled,
)


@pytest.mark.full
def test_wrong_variants_are_far(tmp_path: Path) -> None:
    model = made()
    mine = assert_decoder(model, tmp_path)
    for change in WRONG:
        assert_differs(mine, model, change, start=1000)


# Published files.

V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_deepseek.DeepseekV3Config",
        "AutoModel": "modeling_deepseek.DeepseekV3Model",
        "AutoModelForCausalLM": "modeling_deepseek.DeepseekV3ForCausalLM",
    },
    "bos_token_id": 0,
    "eos_token_id": 1,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "initializer_range": 0.02,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "model_type": "deepseek_v3",
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "quantization_config": {
        "activation_scheme": "dynamic",
        "fmt": "e4m3",
        "quant_method": "fp8",
        "weight_block_size": [128, 128],
    },
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.33.1",
    "use_cache": True,
    "v_head_dim": 128,
    "vocab_size": 129280,
}


@pytest.mark.full
def test_published_config_and_names() -> None:
    raw = V3 | {"num_hidden_layers": 4}
    _, network = build(raw)
    each = sum(p.numel() for p in network.layers[3].parameters())
    # 671,026,404,352 weights and 58 times 256 corrections
    assert count(network) + 57 * each == 671_026_419_200
    assert network.layers[3].attention.scale == pytest.approx(0.1352337788608801)
    attention = {
        "input_layernorm.weight": (7168,),
        "post_attention_layernorm.weight": (7168,),
        "self_attn.q_a_proj.weight": (1536, 7168),
        "self_attn.q_a_layernorm.weight": (1536,),
        "self_attn.q_b_proj.weight": (24576, 1536),
        "self_attn.kv_a_proj_with_mqa.weight": (576, 7168),
        "self_attn.kv_a_layernorm.weight": (512,),
        "self_attn.kv_b_proj.weight": (32768, 512),
        "self_attn.o_proj.weight": (7168, 16384),
    }
    assert layer(raw, network) == attention | {
        "mlp.gate_proj.weight": (18432, 7168),
        "mlp.up_proj.weight": (18432, 7168),
        "mlp.down_proj.weight": (7168, 18432),
    }
    found = layer(raw, network, 3)
    assert len(found) == len(attention) + 2 + 3 * 257
    assert attention.items() <= found.items()
    assert found["mlp.gate.e_score_correction_bias"] == (256,)
    assert found["mlp.experts.255.down_proj.weight"] == (7168, 2048)
    heads = ["model.embed_tokens.weight", "model.norm.weight", "lm_head.weight"]
    assert placed(raw, network, *heads) == heads


@pytest.mark.parametrize(
    "change, message",
    [
        ({"n_group": 7}, "256 experts cannot be in ExpertGroups"),
        ({"topk_group": 9}, "topk at most count, 8"),
        ({"scoring_func": "softmax"}, "scoring_func is 'softmax'; only 'sigmoid'"),
        ({"topk_method": "greedy"}, "topk_method is 'greedy'; only 'noaux_tc'"),
        ({"num_experts_per_tok": 129}, "allows a token at most 128 of 256"),
        ({"num_key_value_heads": 8}, "num_key_value_heads is 8"),
        ({"qk_head_dim": 128}, "qk_head_dim is 128"),
        (
            {"rope_interleaved": True},
            "unknown key 'rope_interleaved'; did you mean 'rope_interleave'",
        ),
    ],
)
def test_it_refuses(change: dict[str, Any], message: str) -> None:
    found = family("deepseek_v3")
    with pytest.raises(ArgumentError, match=message):
        found.check(parse(found.config, V3 | change))


def test_what_a_narrower_dtype_would_spoil_stays(tmp_path: Path) -> None:
    """Corrections decide who is chosen: in a file, in a loaded model and in one saved again they
    are fp32.
    """
    model = made()
    model.save_pretrained(tmp_path)
    wide, narrow = regard.load(tmp_path), regard.load(tmp_path, dtype=torch.bfloat16)
    for one, other in zip(routers(wide.decoder), routers(narrow.decoder), strict=True):
        assert torch.equal(one.correction, other.correction)
        assert (other.correction.dtype, other.linear.weight.dtype) == (
            torch.float32,
            torch.bfloat16,
        )
    (tmp_path / "again").mkdir()
    save(narrow.decoder, narrow.config, tmp_path / "again", torch.bfloat16)
    again = regard.load(tmp_path / "again")
    for one, other in zip(narrow.decoder.parameters(), again.decoder.parameters(), strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_the_layer_that_predicts_a_second_token_is_left_out(tmp_path: Path) -> None:
    model = made()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {
        "model.layers.61.eh_proj.weight": torch.ones(2),
        "model.layers.61.embed_tokens.weight": torch.ones(3),
    }
    save_file(tensors | extra, tmp_path / "model.safetensors")
    regard.load(tmp_path)
    save_file(
        tensors | {"model.layers.60.eh_proj.weight": torch.ones(2)}, tmp_path / "model.safetensors"
    )
    with pytest.raises(FileError, match="1 unexpected"):
        regard.load(tmp_path)
