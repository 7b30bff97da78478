"""Models that mix mechanisms: parameters as transformers builds them, and as their makers publish
them; caches and FLOPs of each kind of layer against sums by hand.
"""

from __future__ import annotations

import json
from dataclasses import replace
from typing import Any

import pytest
import torch

from regard.configs.published import PUBLISHED_MODELS
from regard.configs.reader import read_sizes
from regard.cost import CostReport, Setting, model_of
from regard.cost.compressed import CompressedSpec
from regard.cost.fixed_state import DeltaSpec, LinearSpec
from regard.cost.latent import IndexedLatentSpec, LatentSpec
from regard.cost.selected import IndexSelection
from regard.cost.softmax import CausalKeys, SharedKeysSpec, SoftmaxSpec, causal_pairs
from regard.cost.spec import HeadShape
from regard.errors import ArgumentError
from tests.cost.tiny import TINY

STATE_SPACE = {"bamba", "falcon_h1", "granitemoehybrid", "jamba", "mamba2", "nemotron_h", "rwkv"}
LOADED = ["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "olmo_hybrid", "minimax", "kimi_linear"]
LOADED += ["llama4_text", "deepseek_v4", "glm_moe_dsa"]
LOADED += [name for name, raw in TINY.items() if raw["model_type"] in STATE_SPACE]
"""Small models that mix mechanisms, and that are loaded, too."""

# billions of all and of active parameters that the makers state, and how far rounding and parts
# that are not counted (vision, a second token's layer) go
PUBLISHED: dict[str, tuple[float, float | None, float]] = {
    "qwen3-next-80b-a3b": (80, 3.5, 0.03),
    "qwen3.5-9b": (9, None, 0.01),
    "qwen3.5-35b-a3b": (35, 3, 0.04),
    "kimi-linear-48b-a3b": (48, 3, 0.04),
    "granite-4.0-h-micro": (3.2, None, 0.02),
    "granite-4.0-h-tiny": (7, None, 0.02),
    "granite-4.0-h-small": (32, 9, 0.03),
    "jamba-v0.1": (52, 12, 0.02),
    "jamba-1.5-large": (398, 94, 0.01),
    "falcon-h1-0.5b": (0.521, None, 0.01),
    "falcon-h1-7b": (7.59, None, 0.01),
    "falcon-h1-34b": (33.6, None, 0.01),
    "nemotron-h-8b": (8.1, None, 0.01),
    "nemotron-nano-9b-v2": (8.9, None, 0.01),
    "minimax-text-01": (456, 45.9, 0.03),
    "minimax-m2": (230, 10, 0.05),
    "llama-4-scout": (109, 17, 0.06),
    "llama-4-maverick": (400, 17, 0.06),
    "glm-4.5": (355, 32, 0.03),
    "glm-4.5-air": (106, 12, 0.07),
    "glm-4.6": (355, 32, 0.03),
    "glm-5": (744, 40, 0.03),
    "deepseek-v3.2": (671, 37, 0.02),
    "deepseek-v4-flash": (284, 13, 0.03),
    "deepseek-v4-pro": (1600, 49, 0.02),
    "gemma-3n-e2b": (4.46, None, 0.01),
    "gemma-3n-e4b": (6.87, None, 0.01),
    # llama.cpp counts 4.63, 7.46 and 30.70 in its files
    "gemma-4-e2b": (4.63, 2.3, 0.01),
    "gemma-4-e4b": (7.46, 4.5, 0.04),
    "gemma-4-31b": (30.7, None, 0.01),
    "gemma-4-26b-a4b": (25.2, 3.8, 0.01),
    "olmo-3-7b": (7.3, None, 0.01),
    "olmo-3-32b": (32.2, None, 0.01),
    "ministral-3-3b": (3.4, None, 0.01),
    "ministral-3-8b": (8.4, None, 0.02),
    "ministral-3-14b": (13.5, None, 0.01),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published_figures(name: str) -> None:
    total, active, room = PUBLISHED[name]
    model = model_of(name)
    assert model.parameters / 1e9 == pytest.approx(total, rel=room)
    if active is not None:
        assert model.active_parameters / 1e9 == pytest.approx(active, rel=room)


def keys_of_transformers(raw: dict[str, Any]) -> dict[str, Any]:
    """The same sizes with the keys of transformers' newest classes."""
    keys = {k: v for k, v in raw.items() if k != "model_type"}
    kinds = {0: "linear_attention", 1: "full_attention"}
    if (linear := keys.pop("linear_attn_config", None)) is not None:
        layers = range(1, keys["num_hidden_layers"] + 1)
        keys["layer_types"] = [kinds[int(i in linear["full_attn_layers"])] for i in layers]
        keys |= {"linear_head_dim": linear["head_dim"], "linear_num_heads": linear["num_heads"]}
        keys["num_local_experts"] = keys.pop("num_experts")
        keys["num_experts_per_tok"] = keys.pop("num_experts_per_token")
        keys["n_shared_experts"] = keys.pop("num_shared_experts")
        keys["head_dim"] = keys["qk_rope_head_dim"]
        keys["pad_token_id"] = None
        first = keys.pop("first_k_dense_replace")
        keys["mlp_layer_types"] = ["dense"] * first + ["sparse"] * (len(layers) - first)
    if (listed := keys.pop("attn_type_list", None)) is not None:
        keys["layer_types"] = [kinds[kind] for kind in listed]
    if raw["model_type"] == "granitemoehybrid":
        names = {"mamba": kinds[0], "attention": kinds[1]}
        keys["layer_types"] = [names.get(kind, kind) for kind in keys["layer_types"]]
    if raw["model_type"] == "gemma3n_text":
        keys["activation_sparsity_pattern"] = [0.0] * keys["num_hidden_layers"]
    if raw["model_type"] in ("deepseek_v32", "glm_moe_dsa"):
        keys["num_key_value_heads"] = keys["num_attention_heads"]
    return keys


def built_by_transformers(raw: dict[str, Any]) -> int:
    """The number of parameters of transformers' model, without memory.

    The correction of a router, a table of experts, and the factor of a layer of Gemma 4, are
    buffers there, and tensors of every checkpoint.
    """
    transformers = pytest.importorskip("transformers", reason="needs the transformers extra")
    kind = raw["model_type"]
    try:
        config = transformers.AutoConfig.for_model(kind, **keys_of_transformers(raw))
    except ValueError:
        pytest.skip(f"this transformers has no {kind}")
    with torch.device("meta"):
        network = transformers.AutoModelForCausalLM.from_config(config)
    names = ("e_score_correction_bias", "layer_scalar", "tid2eid")
    stored = [b for n, b in network.named_buffers() if n.endswith(names)]
    parts = [*network.parameters(), *stored]
    return sum(part.numel() for part in parts)


# the files of models with images are compared in tests/configs: they have the same language model
@pytest.mark.parametrize("name", [n for n in LOADED if "text_config" not in TINY[n]])
def test_small_models_have_the_parameters_of_transformers(name: str) -> None:
    assert read_sizes(TINY[name], name).parameters == built_by_transformers(TINY[name])


@pytest.mark.full
@pytest.mark.parametrize("name", PUBLISHED)
def test_published_models_have_the_parameters_of_transformers(name: str) -> None:
    assert model_of(name).parameters == built_by_transformers(dict(PUBLISHED_MODELS[name].config))


def test_cache_of_qwen3_next() -> None:
    """12 of 48 layers cache 2 heads of 256; each other layer has 32 states of 128 x 128 in fp32,
    and 3 past inputs of 16 x 128 + 16 x 128 + 32 x 128 channels.
    """
    report = CostReport(model_of("qwen3-next-80b-a3b"), Setting(1000))
    assert report.kv_bytes_per_token == 12 * 2 * 2 * 256 * 2
    assert report.state_bytes == 36 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert report.kv_bytes == 1000 * report.kv_bytes_per_token + report.state_bytes


def test_both_mechanisms_of_falcon_h1_are_counted() -> None:
    report = CostReport(model_of("falcon-h1-0.5b"), Setting(100))
    assert report.kv_bytes_per_token == 36 * 2 * 2 * 64 * 2
    assert report.state_bytes == 36 * 4 * (24 * 64 * 128 + 3 * (1536 + 2 * 128))
    attention = {name for name in report.model.attention_kinds if name.startswith("GQA")}
    assert len(attention) == 1
    assert set(report.model.attention_kinds.values()) == {36}


def test_shared_keys_are_read_and_not_cached() -> None:
    """Of the 35 layers of Gemma 3n E4B, the last 15 use the keys of earlier ones."""
    model = model_of("gemma-3n-e4b")
    shared = [m for m in model.mixers if isinstance(m, SharedKeysSpec)]
    assert len(shared) == 15
    report = CostReport(model, Setting(4096))
    assert report.kv_bytes_per_token == 20 * 2 * 2 * 256 * 2
    assert all(m.read(4096).values == 2 * 2 * 256 * m.tokens(4096).value for m in shared)
    without = replace(model, layers=model.layers[:20])
    more = report.decode_bytes() - CostReport(without, Setting(4096)).decode_bytes()
    weights = sum(w.parameters for w in model.parts) - sum(w.parameters for w in without.parts)
    assert more == 2 * (weights + sum(m.read(4096).values for m in shared))


def test_llama_4_caches_one_chunk_in_three_of_four_layers() -> None:
    report = CostReport(model_of("llama-4-scout"), Setting(32768))
    assert report.kv_bytes == (36 * 8192 + 12 * 32768) * 2 * 8 * 128 * 2
    assert report.kv_growth == 12 * 2 * 8 * 128 * 2


def test_deepseek_v32_reads_2048_latents_and_all_index_keys() -> None:
    """61 layers: 576 values of a latent and its rotary key, and 128 of an index key."""
    report = CostReport(model_of("deepseek-v3.2"), Setting(65536))
    assert report.kv_bytes == 61 * 65536 * (576 + 128) * 2
    layer = report.model.layers[0].mixer
    assert isinstance(layer, IndexedLatentSpec)
    assert layer.read(65536).values == 2048 * 576 + 65536 * 128
    dense = LatentSpec.of(7168, 128, 512, 128, 64, 128, 1536)
    # at 2048 tokens every token is selected, and only the index scores are added
    scores = 64 * 2048 * 2 * (128 + 1)
    assert layer.step(2048).value == dense.decode_flops(2048, "absorb") + scores


@pytest.mark.parametrize(
    ("name", "cache", "plain_cache", "flops"),
    [("deepseek-v4-pro", 0.10, 0.1147, 0.27), ("deepseek-v4-flash", 0.07, 0.0801, 0.10)],
)
def test_deepseek_v4_at_a_million_tokens(
    name: str, cache: float, plain_cache: float, flops: float
) -> None:
    """The makers' shares of V3.2, 10 % and 7 % of the cache and 27 % and 10 % of the FLOPs of a
    token, and the shares in one format.

    In their formats a token of V3.2 has 512 values of 8 bits with four fp32 factors, 64 of 16 bits,
    and an index key of 8 bits with a factor; an entry of V4 has 448 values of 8 bits with seven
    exponents, 64 of 16 bits, and an index key of 4 bits with four exponents.
    """
    S = 1 << 20
    ours, theirs = (CostReport(model_of(x), Setting(S)) for x in (name, "deepseek-v3.2"))
    assert ours.kv_bytes / theirs.kv_bytes == pytest.approx(plain_cache, abs=1e-4)
    entry, index = 448 + 7 + 2 * 64, 128 // 2 + 4
    specs = [m for m in ours.model.mixers if isinstance(m, CompressedSpec)]
    size = sum(m.entries(S) * (entry + index * (m.index_dim > 0)) for m in specs)
    share = size / (61 * S * (512 + 16 + 2 * 64 + 128 + 4))
    assert share == pytest.approx(cache, abs=0.005)
    # they count operations of 8 bits, and we count all alike
    assert ours.decode_flops / theirs.decode_flops == pytest.approx(flops, abs=0.025)


SMALL_SPECS = {
    "chunks": replace(
        SoftmaxSpec.of(24, HeadShape(4, 2, 6, 6)), visible=CausalKeys(5, chunked=True)
    ),
    "selected latents": IndexedLatentSpec.from_latent(
        LatentSpec.of(24, 4, 16, 8, 4, 6, 20), 24, 20, IndexSelection(3, 8, 5)
    ),
    **{
        f"{name}, {i}": mixer
        for name in ("qwen3_next", "kimi_linear", "jamba", "falcon_h1", "minimax")
        for i, mixer in enumerate(dict.fromkeys(read_sizes(TINY[name], name).mixers))
        if isinstance(mixer, (DeltaSpec, LinearSpec))
    },
}


@pytest.mark.parametrize("name", SMALL_SPECS)
def test_a_prompt_costs_the_sum_of_its_tokens(name: str) -> None:
    spec = SMALL_SPECS[name]
    for context in (1, 4, 5, 6, 13):
        steps = sum(spec.step(t).value for t in range(1, context + 1))
        assert spec.prefill_flops(context) == steps


def test_keys_that_a_chunk_shows() -> None:
    """Token 11 of chunks of 5 is the second of the third chunk."""
    chunks = CausalKeys(5, chunked=True)
    assert [chunks.visible_keys(t) for t in (1, 5, 6, 10, 11, 12)] == [1, 5, 1, 5, 1, 2]
    assert chunks.pairs(12) == 2 * causal_pairs(5, 5) + 3


@pytest.mark.parametrize(
    ("name", "change", "message"),
    [
        ("qwen3_next", {"layer_types": ["full_attention"]}, "1 entry and num_hidden_layers is 5"),
        ("qwen3_next", {"layer_types": ["full_atention"] * 5}, "'full_atention'; supported"),
        ("qwen3_next", {"num_experts_per_tok": 5}, "num_experts_per_tok is 5, and num_experts"),
        ("granitemoehybrid", {"num_local_experts": 1}, "num_experts_per_tok is 2"),
        ("nemotron_h", {"layers_block_type": ["mlq"] * 7}, "is 'mlq'; supported are mamba,"),
        ("nemotron_h", {"layers_block_type": ["mamba"] * 6}, "6 entries and num_hidden_layers is"),
        (
            "nemotron_h",
            {"layers_block_type": None, "hybrid_override_pattern": "M-M?"},
            r"has '\?'; supported are M, \*, -, E",
        ),
        ("nemotron_h", {"moe_latent_size": 3}, "moe_latent_size is 3; only None"),
        ("llama4_text", {"layer_types": ["sliding_attention"] * 4}, "layer_types must have"),
        ("deepseek_v32", {"index_topk_freq": 4}, "index_topk_freq is 4; only 1"),
        ("glm_moe_dsa", {"indexer_types": ["shared", "full", "full"]}, "the first layer must"),
        ("deepseek_v32", {"q_lora_rank": None}, "q_lora_rank is null, but the indexer"),
        ("kimi_linear", {"layer_types": ["full_attention"]}, "1 entry and num_hidden_layers"),
        ("gemma3n_text", {"intermediate_size": [40] * 6 + [41]}, "differs from layer to layer"),
    ],
)
def test_what_is_refused(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        read_sizes({**TINY[name], **change}, name)


def test_every_mixed_model_has_a_report() -> None:
    for name in PUBLISHED:
        figures = CostReport(model_of(name), Setting(4096)).as_json()
        assert json.dumps(figures)
        assert figures["decode_flops"] > 2 * (figures["active_parameters"] - 2e9)
