"""Published config.json files of Gemma, GPT-2, GPT-NeoX, BLOOM and MPT: what they mean, how large
the models are, what their tensors are called.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import pytest

from regard.biases.alibi import alibi_slopes
from regard.configs.base import ACTIVATIONS, rename_keys
from regard.configs.reader import parse
from regard.errors import ArgumentError
from regard.models.assembly.building_blocks import activation
from regard.models.families import family
from regard.nn.projections.fused import ClippedQKV
from tests.parity.families.published import build, count, layer, placed

GEMMA_2B: dict[str, Any] = {
    "architectures": ["GemmaForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 2,
    "eos_token_id": 1,
    "head_dim": 256,
    "hidden_act": "gelu",
    "hidden_activation": None,
    "hidden_size": 2048,
    "initializer_range": 0.02,
    "intermediate_size": 16384,
    "max_position_embeddings": 8192,
    "model_type": "gemma",
    "num_attention_heads": 8,
    "num_hidden_layers": 18,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.38.0.dev0",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_7B = GEMMA_2B | {
    "hidden_size": 3072,
    "intermediate_size": 24576,
    "num_hidden_layers": 28,
    "num_attention_heads": 16,
    "num_key_value_heads": 16,
}
GEMMA_2_2B: dict[str, Any] = {
    "architectures": ["Gemma2ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": 50.0,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": 1,
    "final_logit_softcapping": 30.0,
    "head_dim": 256,
    "hidden_act": "gelu_pytorch_tanh",
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 2304,
    "initializer_range": 0.02,
    "intermediate_size": 9216,
    "max_position_embeddings": 8192,
    "model_type": "gemma2",
    "num_attention_heads": 8,
    "num_hidden_layers": 26,
    "num_key_value_heads": 4,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_theta": 10000.0,
    "sliding_window": 4096,
    "torch_dtype": "float32",
    "transformers_version": "4.42.4",
    "use_cache": True,
    "vocab_size": 256000,
}
GEMMA_3_1B: dict[str, Any] = {
    "architectures": ["Gemma3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "attn_logit_softcapping": None,
    "bos_token_id": 2,
    "cache_implementation": "hybrid",
    "eos_token_id": [1, 106],
    "final_logit_softcapping": None,
    "head_dim": 256,
    "hidden_activation": "gelu_pytorch_tanh",
    "hidden_size": 1152,
    "initializer_range": 0.02,
    "intermediate_size": 6912,
    "max_position_embeddings": 32768,
    "model_type": "gemma3_text",
    "num_attention_heads": 4,
    "num_hidden_layers": 26,
    "num_key_value_heads": 1,
    "pad_token_id": 0,
    "query_pre_attn_scalar": 256,
    "rms_norm_eps": 1e-06,
    "rope_local_base_freq": 10000,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "sliding_window": 512,
    "sliding_window_pattern": 6,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "use_cache": True,
    "vocab_size": 262144,
}
GEMMA_3_4B: dict[str, Any] = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "boi_token_index": 255999,
    "eoi_token_index": 256000,
    "eos_token_id": [1, 106],
    "image_token_index": 262144,
    "initializer_range": 0.02,
    "mm_tokens_per_image": 256,
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.50.0.dev0",
    "text_config": {
        "hidden_size": 2560,
        "intermediate_size": 10240,
        "model_type": "gemma3_text",
        "num_hidden_layers": 34,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        "sliding_window": 1024,
    },
    "vision_config": {
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "model_type": "siglip_vision_model",
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
        "vision_use_head": False,
    },
}
GPT2: dict[str, Any] = {
    "activation_function": "gelu_new",
    "architectures": ["GPT2LMHeadModel"],
    "attn_pdrop": 0.1,
    "bos_token_id": 50256,
    "embd_pdrop": 0.1,
    "eos_token_id": 50256,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "model_type": "gpt2",
    "n_ctx": 1024,
    "n_embd": 768,
    "n_head": 12,
    "n_layer": 12,
    "n_positions": 1024,
    "resid_pdrop": 0.1,
    "summary_activation": None,
    "summary_first_dropout": 0.1,
    "summary_proj_to_labels": True,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "task_specific_params": {"text-generation": {"do_sample": True, "max_length": 50}},
    "vocab_size": 50257,
}
GPT2_MEDIUM = GPT2 | {
    "n_embd": 1024,
    "n_head": 16,
    "n_layer": 24,
    "n_special": 0,
    "predict_special_tokens": True,
}
PYTHIA_70M: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu",
    "hidden_size": 512,
    "initializer_range": 0.02,
    "intermediate_size": 2048,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 8,
    "num_hidden_layers": 6,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.24.0",
    "use_cache": True,
    "use_parallel_residual": True,
    "vocab_size": 50304,
}
NEOX_20B: dict[str, Any] = {
    "architectures": ["GPTNeoXForCausalLM"],
    "attention_probs_dropout_prob": 0,
    "bos_token_id": 0,
    "eos_token_id": 0,
    "hidden_act": "gelu_fast",
    "hidden_dropout_prob": 0,
    "hidden_size": 6144,
    "initializer_range": 0.02,
    "intermediate_size": 24576,
    "layer_norm_eps": 1e-05,
    "max_position_embeddings": 2048,
    "model_type": "gpt_neox",
    "num_attention_heads": 64,
    "num_hidden_layers": 44,
    "rotary_emb_base": 10000,
    "rotary_pct": 0.25,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
    "transformers_version": "4.19.0.dev0",
    "use_cache": True,
    "vocab_size": 50432,
}
BLOOM_560M: dict[str, Any] = {
    "apply_residual_connection_post_layernorm": False,
    "architectures": ["BloomForCausalLM"],
    "attention_dropout": 0.0,
    "attention_softmax_in_fp32": True,
    "bias_dropout_fusion": True,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "hidden_dropout": 0.0,
    "initializer_range": 0.02,
    "layer_norm_epsilon": 1e-05,
    "masked_softmax_fusion": True,
    "model_type": "bloom",
    "n_embed": 1024,
    "n_inner": None,
    "n_layer": 24,
    "num_attention_heads": 16,
    "offset_alibi": 100,
    "pad_token_id": 3,
    "pretraining_tp": 1,
    "seq_length": 2048,
    "skip_bias_add": True,
    "skip_bias_add_qkv": False,
    "slow_but_exact": False,
    "transformers_version": "4.20.0",
    "unk_token_id": 0,
    "use_cache": True,
    "vocab_size": 250880,
}
BLOOM = BLOOM_560M | {"n_embed": 14336, "n_layer": 70, "num_attention_heads": 112}
MPT_7B: dict[str, Any] = {
    "architectures": ["MPTForCausalLM"],
    "auto_map": {
        "AutoConfig": "configuration_mpt.MPTConfig",
        "AutoModelForCausalLM": "modeling_mpt.MPTForCausalLM",
    },
    "attn_config": {
        "alibi": True,
        "alibi_bias_max": 8,
        "attn_impl": "torch",
        "attn_pdrop": 0,
        "attn_type": "multihead_attention",
        "attn_uses_sequence_id": False,
        "clip_qkv": None,
        "prefix_lm": False,
        "qk_ln": False,
        "softmax_scale": None,
    },
    "d_model": 4096,
    "emb_pdrop": 0,
    "embedding_fraction": 1.0,
    "expansion_ratio": 4,
    "init_config": {
        "emb_init_std": None,
        "fan_mode": "fan_in",
        "init_div_is_residual": True,
        "init_gain": 0,
        "init_nonlinearity": "relu",
        "init_std": 0.02,
        "name": "kaiming_normal_",
        "verbose": 0,
    },
    "init_device": "cpu",
    "learned_pos_emb": True,
    "logit_scale": None,
    "max_seq_len": 2048,
    "model_type": "mpt",
    "n_heads": 32,
    "n_layers": 32,
    "no_bias": True,
    "norm_type": "low_precision_layernorm",
    "resid_pdrop": 0,
    "tokenizer_name": "EleutherAI/gpt-neox-20b",
    "torch_dtype": "bfloat16",
    "transformers_version": "4.28.1",
    "use_cache": False,
    "verbose": 0,
    "vocab_size": 50432,
}
STORYWRITER = MPT_7B | {
    "attn_config": MPT_7B["attn_config"] | {"alibi_bias_max": 16, "clip_qkv": 6},
    "max_seq_len": 65536,
}

PUBLISHED: dict[str, tuple[dict[str, Any], int]] = {
    "gemma-2b": (GEMMA_2B, 2_506_172_416),
    "gemma-7b": (GEMMA_7B, 8_537_680_896),
    "gemma-2-2b": (GEMMA_2_2B, 2_614_341_888),
    "gemma-3-1b": (GEMMA_3_1B, 999_885_952),
    # the report's 3209M and the embedding's 262208 x 2560, without the 420M that see
    "gemma-3-4b": (GEMMA_3_4B, 3_880_263_168),
    "gpt2": (GPT2, 124_439_808),
    "gpt2-medium": (GPT2_MEDIUM, 354_823_168),
    "pythia-70m": (PYTHIA_70M, 70_426_624),
    "gpt-neox-20b": (NEOX_20B, 20_554_567_680),
    "bloom-560m": (BLOOM_560M, 559_214_592),
    "bloom": (BLOOM, 176_247_271_424),
    "mpt-7b": (MPT_7B, 6_649_286_656),
    "mpt-7b-storywriter": (STORYWRITER, 6_649_286_656),
}


@functools.cache
def built(name: str) -> tuple[Any, Any]:
    return build(PUBLISHED[name][0])


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", PUBLISHED)
def test_parameters_are_as_many_as_published(name: str) -> None:
    _, network = built(name)
    assert count(network) == PUBLISHED[name][1]


def test_gemmas() -> None:
    config, network = built("gemma-2b")
    assert network.embed.scale == 2048**0.5
    assert config.tie_word_embeddings
    config, network = built("gemma-2-2b")
    assert config.windows() == (4096, None) * 13
    attention = network.layers[0].attention
    assert (attention.scale, attention.softcap, network.head.cap) == (1 / 16, 50.0, 30.0)
    config, network = built("gemma-3-1b")
    assert [i for i, window in enumerate(config.windows()) if window is None] == [5, 11, 17, 23]
    assert config.windows()[0] == 512
    bases = [block.attention.project.q.steps[-1].base for block in network.layers]
    assert bases[:6] == [1e4] * 5 + [1e6]
    config, network = built("gemma-3-4b")
    assert (config.num_attention_heads, config.num_key_value_heads, config.head_dim) == (8, 4, 256)
    scalings = [block.attention.project.q.steps[-1].scaling for block in network.layers]
    assert [i for i, scaling in enumerate(scalings) if scaling is not None] == [5, 11, 17, 23, 29]
    assert scalings[5].factor == 8.0


def test_the_others() -> None:
    _, network = built("gpt2")
    assert network.layers[3].attention.scale == 64**-0.5
    assert network.embed.positional.max_len == 1024
    _, network = built("pythia-70m")
    assert network.layers[0].attention.project.steps[0].rotary_dim == 16
    assert network.head.weight is not network.embed.embedding.weight
    _, network = built("gpt-neox-20b")
    assert network.layers[0].feed_forward.activation.approximate == "tanh"
    _, network = built("bloom")
    assert network.layers[0].attention.bias.heads == 112
    _, network = built("mpt-7b")
    assert list(network.layers[0].attention.bias.slopes) == list(alibi_slopes(32))
    _, network = built("mpt-7b-storywriter")
    attention = network.layers[0].attention
    assert isinstance(attention.project, ClippedQKV)
    assert attention.project.limit == 6
    expected = [2.0 ** (-16 * (h + 1) / 32) for h in range(32)]
    assert all(
        math.isclose(a, b, rel_tol=1e-15)
        for a, b in zip(attention.bias.slopes, expected, strict=True)
    )


GPT2_LAYER = {
    "ln_1.weight": (768,),
    "ln_1.bias": (768,),
    "ln_2.weight": (768,),
    "ln_2.bias": (768,),
    "attn.c_attn.weight": (768, 2304),
    "attn.c_attn.bias": (2304,),
    "attn.c_proj.weight": (768, 768),
    "attn.c_proj.bias": (768,),
    "mlp.c_fc.weight": (768, 3072),
    "mlp.c_fc.bias": (3072,),
    "mlp.c_proj.weight": (3072, 768),
    "mlp.c_proj.bias": (768,),
}
NEOX_LAYER = {
    "attention.query_key_value.weight": (1536, 512),
    "attention.query_key_value.bias": (1536,),
    "attention.dense.weight": (512, 512),
    "attention.dense.bias": (512,),
    "mlp.dense_h_to_4h.weight": (2048, 512),
    "mlp.dense_h_to_4h.bias": (2048,),
    "mlp.dense_4h_to_h.weight": (512, 2048),
    "mlp.dense_4h_to_h.bias": (512,),
    "input_layernorm.weight": (512,),
    "input_layernorm.bias": (512,),
    "post_attention_layernorm.weight": (512,),
    "post_attention_layernorm.bias": (512,),
}
BLOOM_LAYER = {
    "self_attention.query_key_value.weight": (3072, 1024),
    "self_attention.query_key_value.bias": (3072,),
    "self_attention.dense.weight": (1024, 1024),
    "self_attention.dense.bias": (1024,),
    "mlp.dense_h_to_4h.weight": (4096, 1024),
    "mlp.dense_h_to_4h.bias": (4096,),
    "mlp.dense_4h_to_h.weight": (1024, 4096),
    "mlp.dense_4h_to_h.bias": (1024,),
    "input_layernorm.weight": (1024,),
    "input_layernorm.bias": (1024,),
    "post_attention_layernorm.weight": (1024,),
    "post_attention_layernorm.bias": (1024,),
}
MPT_LAYER = {
    "attn.Wqkv.weight": (12288, 4096),
    "attn.out_proj.weight": (4096, 4096),
    "ffn.up_proj.weight": (16384, 4096),
    "ffn.down_proj.weight": (4096, 16384),
    "norm_1.weight": (4096,),
    "norm_2.weight": (4096,),
}
GEMMA_LAYER = {
    "input_layernorm.weight": (2048,),
    "post_attention_layernorm.weight": (2048,),
    "self_attn.q_proj.weight": (2048, 2048),
    "self_attn.k_proj.weight": (256, 2048),
    "self_attn.v_proj.weight": (256, 2048),
    "self_attn.o_proj.weight": (2048, 2048),
    "mlp.gate_proj.weight": (16384, 2048),
    "mlp.up_proj.weight": (16384, 2048),
    "mlp.down_proj.weight": (2048, 16384),
}
GEMMA_3_LAYER = {
    "input_layernorm.weight": (1152,),
    "post_attention_layernorm.weight": (1152,),
    "pre_feedforward_layernorm.weight": (1152,),
    "post_feedforward_layernorm.weight": (1152,),
    "self_attn.q_proj.weight": (1024, 1152),
    "self_attn.k_proj.weight": (256, 1152),
    "self_attn.v_proj.weight": (256, 1152),
    "self_attn.o_proj.weight": (1152, 1024),
    "self_attn.q_norm.weight": (256,),
    "self_attn.k_norm.weight": (256,),
    "mlp.gate_proj.weight": (6912, 1152),
    "mlp.up_proj.weight": (6912, 1152),
    "mlp.down_proj.weight": (1152, 6912),
}
GEMMA_2_LAYER = {
    "self_attn.q_proj.weight": (2048, 2304),
    "self_attn.k_proj.weight": (1024, 2304),
    "self_attn.v_proj.weight": (1024, 2304),
    "self_attn.o_proj.weight": (2304, 2048),
    "mlp.gate_proj.weight": (9216, 2304),
    "mlp.up_proj.weight": (9216, 2304),
    "mlp.down_proj.weight": (2304, 9216),
} | {name: (2304,) for name in GEMMA_3_LAYER if "layernorm" in name}


@pytest.mark.parametrize(
    "name, shapes, inside, bare",
    [
        ("gpt2", GPT2_LAYER, "transformer.h.0.attn.c_attn.weight", "h.0.attn.c_attn.weight"),
        (
            "pythia-70m",
            NEOX_LAYER,
            "gpt_neox.layers.0.attention.query_key_value.weight",
            "layers.0.attention.query_key_value.weight",
        ),
        (
            "bloom-560m",
            BLOOM_LAYER,
            "transformer.h.0.self_attention.query_key_value.weight",
            "h.0.self_attention.query_key_value.weight",
        ),
        ("mpt-7b", MPT_LAYER, "transformer.blocks.0.attn.Wqkv.weight", "blocks.0.attn.Wqkv.weight"),
        ("gemma-2b", GEMMA_LAYER, "model.layers.0.self_attn.q_proj.weight", None),
        ("gemma-2-2b", GEMMA_2_LAYER, "model.layers.0.pre_feedforward_layernorm.weight", None),
        ("gemma-3-1b", GEMMA_3_LAYER, "model.layers.0.self_attn.q_norm.weight", None),
    ],
    ids=["gpt2", "gpt_neox", "bloom", "mpt", "gemma", "gemma2", "gemma3"],
)
def test_names_and_shapes_of_a_layer(
    name: str, shapes: dict[str, tuple[int, ...]], inside: str, bare: str | None
) -> None:
    raw, (_, network) = PUBLISHED[name][0], built(name)
    assert layer(raw, network) == shapes
    assert placed(raw, network, inside) == [inside]
    if bare is not None:
        assert placed(raw, network, bare) == [inside]


@pytest.mark.parametrize(
    "name, stored, table",
    [
        ("gpt2", "wte.weight", "transformer.wte.weight"),
        ("gpt2", "wpe.weight", "transformer.wpe.weight"),
        ("gpt2", "lm_head.weight", "lm_head.weight"),
        ("pythia-70m", "embed_out.weight", "embed_out.weight"),
        ("pythia-70m", "lm_head.weight", "embed_out.weight"),
        (
            "bloom-560m",
            "word_embeddings_layernorm.bias",
            "transformer.word_embeddings_layernorm.bias",
        ),
        (
            "gemma-3-4b",
            "language_model.model.layers.7.mlp.up_proj.weight",
            "model.layers.7.mlp.up_proj.weight",
        ),
        (
            "gemma-3-4b",
            "model.language_model.layers.7.mlp.up_proj.weight",
            "model.layers.7.mlp.up_proj.weight",
        ),
        ("gemma-3-4b", "language_model.lm_head.weight", "lm_head.weight"),
        ("gemma-3-4b", "vision_tower.vision_model.encoder.layers.0.mlp.fc1.weight", None),
        ("gpt2", "transformer.h.12.ln_1.weight", None),
    ],
)
def test_where_stored_names_go(name: str, stored: str, table: str | None) -> None:
    raw, (_, network) = PUBLISHED[name][0], built(name)
    assert placed(raw, network, stored) == [table]


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "unknown key 'n_heads'; did you mean 'n_head'?": (GPT2, {"n_heads": 12}),
    "hidden_size is 512 and n_embd is 768; they mean the same: keep one": (
        GPT2,
        {"hidden_size": 512},
    ),
    "activation_function is 'gelu_neu'; supported are .*; did you mean 'gelu_new'": (
        GPT2,
        {"activation_function": "gelu_neu"},
    ),
    "dim 768 is not divisible by 7 heads": (GPT2, {"n_head": 7}),
    "layer_norm_epsilon is -1.0; it must be above 0": (GPT2, {"layer_norm_epsilon": -1.0}),
    "layer_norm_epsilon is 0.0; it must be above 0": (BLOOM, {"layer_norm_epsilon": 0.0}),
    "layer_norm_epsilon is inf; it must be above 0": (MPT_7B, {"layer_norm_epsilon": math.inf}),
    "layer_norm_eps is -1.0; it must be above 0": (PYTHIA_70M, {"layer_norm_eps": -1.0}),
    "rms_norm_eps is -1.0; it must be above 0": (GEMMA_2B, {"rms_norm_eps": -1.0}),
    "n_inner is 0; it must be at least 1": (GPT2, {"n_inner": 0}),
    "add_cross_attention is True": (GPT2, {"add_cross_attention": True}),
    "it lacks n_layer": (GPT2, {"n_layer": None}),
    "n_embed is 1024 and hidden_size is 64": (BLOOM_560M, {"hidden_size": 64}),
    "n_inner is 4096; only None": (BLOOM_560M, {"n_inner": 4096}),
    "hidden_act is 'gelu_neu'": (PYTHIA_70M, {"hidden_act": "gelu_neu"}),
    "partial_rotary_factor is 1.5; it must be above 0 and at most 1": (
        PYTHIA_70M,
        {"rotary_pct": 1.5},
    ),
    "rope_scaling.rope_type is 'yarm'; did you mean 'yarn'": (
        PYTHIA_70M,
        {"rope_scaling": {"rope_type": "yarm"}},
    ),
    "hidden_act is 'silu'; only 'gelu' or 'gelu_pytorch_tanh'": (GEMMA_2B, {"hidden_act": "silu"}),
    "hidden_activation is 'gelu'; only None or 'gelu_pytorch_tanh'": (
        GEMMA_2B,
        {"hidden_activation": "gelu"},
    ),
    "use_bidirectional_attention is True": (GEMMA_2B, {"use_bidirectional_attention": True}),
    "8 query heads are not divisible by 16 key/value heads": (
        GEMMA_2B,
        {"num_key_value_heads": ...},
    ),
    "sliding_window is null": (GEMMA_2_2B, {"sliding_window": None}),
    "attn_logit_softcapping is -5.0; it must be above 0": (
        GEMMA_2_2B,
        {"attn_logit_softcapping": -5.0},
    ),
    "unknown key 'mm_token_per_image'": (GEMMA_3_4B, {"mm_token_per_image": 256}),
    "auto_map names 'evil.Other'": (MPT_7B, {"auto_map": {"AutoConfig": "evil.Other"}}),
    "attn_config.attn_type is 'grouped_query_attention'": (
        MPT_7B,
        {"attn_config": {"attn_type": "grouped_query_attention"}},
    ),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_is_refused(message: str) -> None:
    raw, change = REFUSED[message]
    changed = {k: v for k, v in (raw | change).items() if v is not ...}
    if change.get("n_layer", 0) is None:
        del changed["n_layer"]
    found = family(raw["model_type"])
    with pytest.raises(ArgumentError, match=message):
        found.check(parse(found.config, changed))


def test_a_null_says_nothing() -> None:
    assert rename_keys({"a": None, "b": 1}, {"a": "b"}) == {"b": 1}
    assert rename_keys({"a": 1, "b": 1}, {"a": "b"}) == {"b": 1}
    assert rename_keys({"a": 1, "b": None}, {"a": "b"}) == {"b": 1}


def test_activations_are_those_of_their_names() -> None:
    import torch
    from transformers.activations import ACT2FN

    x = torch.linspace(-6, 6, 1001, dtype=torch.float64)
    for name in ACTIVATIONS:
        assert float((activation(name)(x) - ACT2FN[name](x)).abs().max()) < 1e-6, name
    assert float((activation("gelu")(x) - ACT2FN["gelu_new"](x)).abs().max()) > 1e-4
