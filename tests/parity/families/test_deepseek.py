"""DeepSeek-V2 and V3 of transformers, saved by it and loaded here; wrong variants must be far; the
published files.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard.configs.published import PUBLISHED_MODELS
from regard.configs.reader import parse, read_sizes
from regard.errors import ArgumentError
from regard.models.families import family
from regard.models.model import Model
from regard.models.save import save
from regard.nn import QueryTemperature
from regard.nn.blocks.routers import ExpertGroups
from tests.parity.families import changes
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import put, zeros
from tests.parity.families.harness import assert_refused, ids_of, saved
from tests.parity.families.published import build, count, published

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
SECOND = {key: value for key, value in SMALL.items() if "group" not in key} | {
    "n_shared_experts": 2,
    "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
}
GROUPS = {
    "topk_method": "group_limited_greedy",
    "n_group": 4,
    "topk_group": 2,
    "routed_scaling_factor": 4.0,
}
NO_SCALING = {
    "attention_bias": True,
    "tie_word_embeddings": True,
    "first_k_dense_replace": 0,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500.0},
}


def routers(network: Any) -> list[Any]:
    return [block.feed_forward.router for block in network.layers[1:]]


def routed(name: str, value: object) -> changes.Change:
    """An attribute of every router, changed."""

    def change(network: Any) -> None:
        for router in routers(network):
            setattr(router, name, value)

    return changes.named(f"router.{name} = {value}", change)


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


def weights_of_the_corrected(self: Any, x: torch.Tensor) -> Any:
    scores = self.logits(x).sigmoid() + self.correction
    chosen = self.choose(scores, scores)
    weights = scores.gather(-1, chosen)
    return weights / weights.sum(-1, keepdim=True) * self.scale, chosen


def corrected_weights(network: Any) -> None:
    for router in routers(network):
        router.forward = weights_of_the_corrected.__get__(router)


OF_BOTH = (
    changes.halves,
    changes.each("no mscale", scale=(NOPE + ROPE) ** -0.5),
    routed("groups", None),
    routed("scale", 1.0),
)
CASES: dict[str, Case] = {
    "deepseek_v2": Case(
        "DeepseekV2",
        SECOND | GROUPS,
        (
            *OF_BOTH,
            values_first,
            rope_rows_first,
            put("layers.*.attention.project", kv_norm=torch.nn.Identity()),
            routed("groups", ExpertGroups(4, 2, best=2)),
            routed("normalize", True),
            put("layers.*.feed_forward", shared=None),
        ),
        start=1000,
    ),
    "deepseek_v2, as Lite": Case("DeepseekV2", SECOND | {"q_lora_rank": None}),
    "deepseek_v2, biases, tied, no scaling": Case("DeepseekV2", SECOND | NO_SCALING),
    "mistral4": Case(
        "Mistral4",
        SMALL | {"rope_parameters": YARN | {"llama_4_scaling_beta": 0.1}},
        (
            changes.halves,
            changes.drop("layers.*.attention.project.q.up", QueryTemperature),
            routed("groups", ExpertGroups(4, 2, best=1)),
            routed("normalize", False),
        ),
        start=1000,
    ),
    "glm4_moe_lite": Case(
        "Glm4MoeLite",
        {k: v for k, v in SMALL.items() if k != "first_k_dense_replace"}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
        (changes.halves, zeros("layers.*.feed_forward.router.correction"), routed("scale", 1.0)),
        start=1000,
        corrections=8,
    ),
    "deepseek_v3": Case(
        "DeepseekV3",
        SMALL,
        (
            *OF_BOTH,
            routed("groups", ExpertGroups(4, 2, best=1)),
            zeros("layers.*.feed_forward.router.correction"),
            corrected_weights,
            routed("normalize", False),
        ),
        start=1000,
        corrections=8,
    ),
    "deepseek_v3, halves, biases, tied, no scaling": Case(
        "DeepseekV3", SMALL | NO_SCALING | {"rope_interleave": False}, corrections=8
    ),
    "deepseek_v3, one group, no low rank, not normalized": Case(
        "DeepseekV3",
        SMALL
        | {
            "q_lora_rank": None,
            "n_group": 1,
            "topk_group": 1,
            "norm_topk_prob": False,
            "routed_scaling_factor": 1.0,
        },
        corrections=8,
    ),
}


test_every_family, test_wrong_variants_are_far = parity_tests(CASES, keep=2)


def test_a_cache_keeps_latents(tmp_path: Path) -> None:
    caches = (mine := Case("DeepseekV2", SECOND).load(tmp_path)[1]).new_caches()
    mine(torch.full((1, 9), 3), caches=caches)
    assert [cache.bytes for cache in caches] == [9 * (RANK + ROPE) * 4] * 3


# Published files.

LITE = published("deepseek-v2-lite")


@pytest.mark.parametrize(
    "change, message",
    [
        ({"topk_method": "noaux_tc"}, "topk_method is 'noaux_tc'; supported are 'greedy'"),
        ({"topk_method": "group_limited_greedy", "n_group": None}, "n_group is None and"),
        ({"topk_method": "group_limited_greedy", "n_group": 7}, "64 experts cannot"),
        ({"scoring_func": "sigmoid"}, "scoring_func is 'sigmoid'; only 'softmax'"),
        ({"norm_topk_prob": True}, "norm_topk_prob is True"),
        ({"moe_layer_freq": 2}, "moe_layer_freq is 2"),
        ({"num_key_value_heads": 4}, "num_key_value_heads is 4, and num_attention_heads 16"),
        ({"head_dim": 128}, "head_dim is 128, but qk_nope_head_dim is 128 and qk_rope_head_dim"),
        ({"num_experts_per_tok": 65}, "num_experts_per_tok is 65, and n_routed_experts is 64"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "whose frequencies depend on"),
        ({"auto_map": {"AutoModel": "mine.Other"}}, "auto_map names 'mine.Other'"),
        ({"qk_rope_head_dim": 63}, "63"),
    ],
)
def test_v2_refuses(change: dict[str, Any], message: str) -> None:
    found = family("deepseek_v2")
    with pytest.raises(ArgumentError, match=message):
        found.check(parse(found.config, LITE | change))


def test_older_files_do_not_name_key_heads() -> None:
    found = family("deepseek_v2")
    raw = {k: v for k, v in LITE.items() if k != "num_key_value_heads"}
    assert parse(found.config, raw) == parse(
        found.config, LITE | {"head_dim": 64, "qk_head_dim": 192}
    )


V3 = published("deepseek-v3")


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
        ({"rope_interleaved": True}, "unknown key 'rope_interleaved'; did you mean"),
    ],
)
def test_v3_refuses(change: dict[str, Any], message: str) -> None:
    found = family("deepseek_v3")
    with pytest.raises(ArgumentError, match=message):
        found.check(parse(found.config, V3 | change))


def test_what_a_narrower_dtype_would_spoil_stays(tmp_path: Path) -> None:
    """Corrections decide who is chosen: in a file, in a loaded model and in one saved again they
    are fp32.
    """
    model = CASES["deepseek_v3"].model()
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
    model = CASES["deepseek_v3"].model()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    extra = {
        "model.layers.61.eh_proj.weight": torch.ones(2),
        "model.layers.61.embed_tokens.weight": torch.ones(3),
    }
    save_file(tensors | extra, tmp_path / "model.safetensors")
    regard.load(tmp_path)
    more = {"model.layers.60.eh_proj.weight": torch.ones(2)}
    assert_refused(tmp_path, "1 unexpected", tensors | more)


def test_all_parameters_of_kimi() -> None:
    """K2.5 without what sees: 1.03 trillion, counted and built."""
    text = dict(PUBLISHED_MODELS["kimi-k2.5"].config) | {"n_group": 1, "topk_group": 1}
    raw = {"model_type": "kimi_k25", "text_config": text, "tie_word_embeddings": False}
    _, network = build(raw | {"text_config": text | {"num_hidden_layers": 2}})
    each = sum(p.numel() for p in network.layers[1].parameters())
    assert count(network) + 59 * each == read_sizes(raw, "").parameters == 1_026_408_232_448


def test_kimi_as_its_makers_write_it(tmp_path: Path) -> None:
    """Keys and quantization inside text_config, names with a prefix, and what sees beside them."""
    model = CASES["deepseek_v3"].model()
    tensors = load_file(saved(model, tmp_path) / "model.safetensors")
    plain = regard.load(tmp_path, kind=Model)
    name = "model.layers.1.self_attn.o_proj.weight"
    narrow = (tensors[name] / 2**-6).to(torch.float8_e4m3fn)
    plain.decoder.layers[1].attention.output.weight.data = narrow.float() * 2**-6
    tensors |= {name: narrow, f"{name}_scale_inv": torch.full((1, 1), 2**-6)}
    stored = {f"language_model.{k}": v for k, v in tensors.items()}
    stored |= {f"{k}.weight": torch.zeros(2) for k in ("mm_projector.pre_norm", "vision_tower.x")}
    raw = json.loads((tmp_path / "config.json").read_text())
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128], "activation_scheme": "dynamic"}
    text = {**raw, "model_type": "kimi_k2", "quantization_config": fp8}
    whole = {
        "architectures": ["KimiK25ForConditionalGeneration"],
        "model_type": "kimi_k25",
        "text_config": text,
        "vision_config": {},
        "tie_word_embeddings": False,
        "ignore_index": -100,
        "media_placeholder_token_id": 5,
        "use_unified_vision_chunk": True,
        "video_placeholder": "<video>",
    }
    save_file(stored, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps(whole))
    ids = ids_of(model)
    assert torch.equal(regard.load(tmp_path, kind=Model)(ids), plain(ids))
    with pytest.raises(ArgumentError, match="only the language models deepseek_v3 and kimi_k2 are"):
        parse(type(plain.config), whole | {"text_config": text | {"model_type": "llama"}})
    # transformers ties what says nothing
    del whole["tie_word_embeddings"]
    (tmp_path / "config.json").write_text(json.dumps(whole))
    with pytest.raises(regard.FileError, match="lm_head"):
        regard.load(tmp_path)
