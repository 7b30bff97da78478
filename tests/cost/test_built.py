"""Counted against built models: every family's parameters, windows, and active parameters."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from regard.configs import CONFIGS
from regard.configs.published import PUBLISHED_MODELS
from regard.configs.reader import parse, read_sizes
from regard.cost import model_of
from regard.cost.softmax import SoftmaxSpec
from regard.models.checkpoint.config import read_config
from regard.models.families import FAMILIES, family
from regard.nn import Attention, Block, CausalConvolution
from regard.nn.blocks.mixer_block import ParallelMixers, Tokenwise
from regard.nn.blocks.ngrams import NGramBlock
from regard.nn.mixer import Mixer
from regard.positions import LearnedPositions
from tests.cost.tiny import ENCODER_DECODERS, ENCODERS, TINY


def built(raw: dict[str, Any]) -> nn.Module:
    """The network of a config, without memory."""
    found = family(raw["model_type"])
    with torch.device("meta"):
        network: nn.Module = found.build(parse(found.config, raw))
    return network


@cache
def network_of(name: str) -> nn.Module:
    """A small one, built once: nothing here changes it."""
    return built(TINY[name])


def parameters(network: nn.Module) -> int:
    return sum(p.numel() for p in network.parameters())


def of_kinds(network: nn.Module) -> tuple[int, int, int]:
    """Numbers of matrices, tables and filters, of biases, and of norms, told apart by the modules
    that own them.
    """
    norms = {
        id(p)
        for m in network.modules()
        if "Norm" in type(m).__name__
        for p in m.parameters(recurse=False)
    }
    matrices = {
        id(m.weight): m.weight.numel()
        for m in network.modules()
        if isinstance(m, (nn.Linear, nn.Embedding, nn.Conv1d, CausalConvolution))
    }
    sizes = {id(p): p.numel() for p in network.parameters()}
    assert not norms & matrices.keys()
    in_norms = sum(sizes[i] for i in norms)
    return sum(matrices.values()), sum(sizes.values()) - in_norms - sum(matrices.values()), in_norms


def test_every_family_has_a_small_config() -> None:
    assert {raw["model_type"] for raw in TINY.values()} == set(FAMILIES)
    assert set(FAMILIES) == set(CONFIGS)


@pytest.mark.full(keep=14)
@pytest.mark.parametrize("name", TINY)
def test_parameters_of_every_family(name: str) -> None:
    network, model = network_of(name), read_sizes(TINY[name], name)
    assert model.parameters == parameters(network)


@pytest.mark.full(keep=30)
@pytest.mark.parametrize("name", [name for name in TINY if TINY[name]["model_type"] != "t5"])
def test_biases_and_norms_of_every_family(name: str) -> None:
    """A learned table of positions is a matrix here; T5's table of distances is a bias there."""
    parts = {part.name: part.parameters for part in read_sizes(TINY[name], name).parts}
    matrices, biases, norms = of_kinds(network_of(name))
    learned = sum(
        m.weight.numel() for m in network_of(name).modules() if isinstance(m, LearnedPositions)
    )
    biases, matrices = biases - learned, matrices + learned  # the table is no `nn.Embedding`
    assert (parts.get("biases", 0), parts.get("norms", 0)) == (biases, norms)
    assert sum(parts.values()) - biases - norms == matrices


QWEN4_EXP = {
    "indexer_n_heads": 4,
    "indexer_kv_heads": 1,
    "indexer_head_dim": 256,
    "indexer_budget": 2048,
    "indexer_compress_ratio": 4,
    "ple_layer_ids": [1, 3],
    "eos_token_id": 1,
}
"""The keys of Qwen4-Exp that have no default."""
DEEPSEEK_V2 = PUBLISHED_MODELS["deepseek-v2"].config
RELEASED: dict[str, dict[str, Any]] = {
    "deepseek_v2": {k: v for k, v in DEEPSEEK_V2.items() if k != "model_type"}
    | {"topk_method": "group_limited_greedy", "n_group": 8, "topk_group": 3},
    "kimi_k25": {"text_config": {"num_hidden_layers": 4}},
    "step3p7": {"text_config": {"num_hidden_layers": 4}},
    "minimax_m3_vl": {"text_config": {"num_hidden_layers": 4}},
    "qwen4_exp": {"text_config": {"num_hidden_layers": 4, **QWEN4_EXP}},
    "qwen4_exp_text": QWEN4_EXP,
    "glm4_moe": {"head_dim": 128, "num_hidden_layers": 46},
    "hunyuan_v1_dense": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "conv"], "num_hidden_layers": 4},
    "nemotron": {"head_dim": 128, "num_key_value_heads": 8},
    "gemma3n_text": {
        "num_hidden_layers": 30,
        "num_kv_shared_layers": 10,
        "intermediate_size": [8192] * 30,
        "activation_sparsity_pattern": [0.95] * 10 + [0.0] * 20,
    },
}
"""Values of config.json of deepseek-ai/DeepSeek-V2, zai-org/GLM-4.5-Air and google/gemma-3n-E2B
that differ from the defaults of transformers' class.
"""


def released(name: str, **change: Any) -> tuple[dict[str, Any], Any]:
    """The config.json of a released model, and transformers' config: its class has the values of
    one, which its documentation names.
    """
    from transformers import AutoConfig

    config = AutoConfig.for_model(name, **RELEASED.get(name, {}) | change)
    raw: dict[str, Any] = json.loads(config.to_json_string(use_diff=False))
    return raw, config


@pytest.mark.full(keep=["gemma3n_text", "apertus"])
@pytest.mark.parametrize("name", sorted({*FAMILIES} - {"regard"}))
def test_a_released_config_is_read_built_and_counted(name: str) -> None:
    found = family(name)
    raw, theirs = released(name)
    assert read_sizes(raw, name).parameters > 10**7
    if any("expert" in key for key in raw):  # thousands of modules: four layers have all sizes
        shorter, few = released(name, num_hidden_layers=4)
        raw, theirs = (shorter, few) if "text_config" not in shorter else (raw, theirs)
    config, _ = read_config(Path(name), found, raw, tensors=100)
    network = found.build_empty(config)
    assert read_sizes(raw, name).parameters == parameters(network)
    if name not in (*ENCODERS, *ENCODER_DECODERS) and "text_config" not in raw:
        assert parameters(network) == counted_by_transformers(theirs)


BUFFERS = (
    "e_score_correction_bias",
    "expert_bias",
    "act_fn.beta",
    "act_fn.eps",
    "layer_scalar",
    "tid2eid",
    "layer_multipliers",
    "ngram_heads_vocab_sizes",
    "ngram_heads_offsets",
)
"""What is a parameter here, and a stored buffer in transformers."""


def counted_by_transformers(config: Any) -> int:
    """The parameters of transformers' own model with a head."""
    import transformers

    name = type(config).__name__.removesuffix("Config").removesuffix("Text")
    endings = ("ForCausalLM", "LMHeadModel", "TextModel")
    kind = next(filter(None, (getattr(transformers, name + x, None) for x in endings)))
    with torch.device("meta"):
        model = kind(config)
    buffers = (x.numel() for name, x in model.named_buffers() if name.endswith(BUFFERS))
    head = config.vocab_size * config.hidden_size if kind.__name__.endswith("TextModel") else 0
    return sum(p.numel() for p in model.parameters()) + sum(buffers) + head


HEADED = [
    name
    for name, raw in TINY.items()
    if raw["model_type"] not in (*ENCODERS, *ENCODER_DECODERS)
    and all(isinstance(layer.mixer, SoftmaxSpec) for layer in read_sizes(raw, name).layers)
]


LATENT = {"deepseek_v2", "deepseek_v3", "deepseek_v32", "kimi_linear", "glm4_moe_lite"}
LATENT |= {"mistral4", "deepseek_v4", "kimi_k25", "glm_moe_dsa"}
RECURRENT = {"bamba", "granitemoehybrid", "jamba", "mamba2", "minimax", "nemotron_h", "olmo_hybrid"}
RECURRENT |= {"falcon_mamba", "lfm2", "lfm2_moe", "mamba", "qwen4_exp", "qwen4_exp_text"}
RECURRENT |= {"qwen3_next", "qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text", "qwen3_5_text", "rwkv"}
SELECTED = {"minimax_m3_vl", "minimax_m3_vl_text"}
OTHERS = SELECTED | {*ENCODERS, *ENCODER_DECODERS} | LATENT | RECURRENT
"""Families that are not decoders with softmax attention in every layer."""


def test_most_families_have_heads() -> None:
    assert {TINY[name]["model_type"] for name in HEADED} == {*FAMILIES} - OTHERS


@pytest.mark.full(keep=14)
@pytest.mark.parametrize("name", HEADED)
def test_windows_of_every_family(name: str) -> None:
    """A mask that is built shows as many keys to the last of 12 tokens as are counted."""
    layers = [m for m in network_of(name).modules() if isinstance(m, Attention)]
    model = read_sizes(TINY[name], name)
    told = [
        m.visible_keys(12)
        for layer in model.layers
        for m in layer.mixers
        if isinstance(m, SoftmaxSpec)
    ]
    positions = torch.arange(12)[None]
    seen = []
    for layer in layers:
        mask = layer.mask
        assert mask is not None
        seen.append(int(mask.allows(positions[:, -1:, None], positions[:, None]).sum()))
    assert told == seen


@pytest.mark.full(keep="each")
@pytest.mark.parametrize(
    "name", [n for n in TINY if TINY[n]["model_type"] not in (*ENCODERS, *ENCODER_DECODERS)]
)
@pytest.mark.parametrize("context", [1, 12, 40])
def test_specs_of_every_layer_are_those_of_the_built_modules(name: str, context: int) -> None:
    """What a config says of a layer and what the built module says of itself are the same."""
    model = read_sizes(TINY[name], name)
    blocks = [m for m in network_of(name).modules() if isinstance(m, Block)]
    assert len(blocks) == len(model.layers)
    for block, layer in zip(blocks, model.layers, strict=True):
        assert isinstance(block.attention, Mixer)
        mixer = block.attention
        built = list(mixer.mixers) if isinstance(mixer, ParallelMixers) else [mixer]
        if isinstance(mixer, Tokenwise):
            built = []  # a feed-forward layer
        if isinstance(block.feed_forward, Mixer):
            built.append(block.feed_forward)
        if isinstance(block, NGramBlock):
            built.append(block.grams)
        for module, ours in zip((part.spec for part in built), layer.mixers, strict=True):
            assert type(module) is type(ours)
            assert module.weights.total == ours.weights.total
            assert module.weights.multiplied_once == ours.weights.multiplied_once
            assert module.cached(context).values == ours.cached(context).values
            assert module.bounded == ours.bounded
            assert module.step(context).value == ours.step(context).value
            assert module.prefill_flops(context) == ours.prefill_flops(context)


SMALL = {
    "num_kv_shared_layers": 1,
    "num_hidden_layers": 4,
    "n_layer": 4,
    "n_routed_experts": 16,
    "num_local_experts": 8,
    "num_experts": 16,
}


@pytest.mark.full(keep=8)
@pytest.mark.parametrize(
    "name", [n for n in PUBLISHED_MODELS if PUBLISHED_MODELS[n].config["model_type"] in FAMILIES]
)
def test_known_models_with_few_layers_and_experts(name: str) -> None:
    """The real widths; four layers and few experts, so that a built network stays small."""
    raw = {**PUBLISHED_MODELS[name].config}
    layers = raw.get("num_hidden_layers")
    raw |= {key: value for key, value in SMALL.items() if key in raw}
    raw |= {k: x[:4] for k, x in raw.items() if isinstance(x, list) and len(x) == layers}
    if raw["model_type"] == "deepseek_v3":
        raw |= {"n_group": 4, "topk_group": 2}
    for key in ("layer_types", "hybrid_override_pattern"):
        if key in raw:
            raw[key] = raw[key][: raw["num_hidden_layers"]]
    if raw["model_type"] == "gemma4_text":  # the last layer has no window, and none is shared
        raw |= {"layer_types": None, "num_kv_shared_layers": 0}
    if raw.get("num_experts_per_tok", 0) > SMALL["num_local_experts"]:
        raw["num_experts_per_tok"] = 1
    assert read_sizes(raw, name).parameters == parameters(built(raw))


@pytest.mark.parametrize(
    ("name", "changed"),
    [
        ("qwen2", {"model_type": "llama"}),  # no biases
        ("gpt_oss", {"num_local_experts": 7}),
        ("gemma2", {"model_type": "gemma"}),  # half the norms
        ("deepseek_v3", {"model_type": "deepseek_v2"}),  # no correction
        ("llama", {"num_key_value_heads": 3}),
        ("olmo2", {"model_type": "llama"}),
        ("llama", {"tie_word_embeddings": True}),
    ],
)
def test_another_model_has_another_count(name: str, changed: dict[str, Any]) -> None:
    """Negative control."""
    network = network_of(name)
    assert read_sizes({**TINY[name], **changed}, name).parameters != parameters(network)


def test_a_token_meets_its_experts_only() -> None:
    model = read_sizes(TINY["gpt_oss"], "gpt_oss")
    rows = {part.name: part for part in model.parts}
    assert rows["experts"].parameters == 4 * rows["experts"].active_parameters
    assert model_of("mixtral-8x7b").active_parameters * 2 < model_of("mixtral-8x7b").parameters
