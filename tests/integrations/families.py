"""Small random models of transformers, one of each kind of attention that it has."""

from __future__ import annotations

import copy
import functools
from typing import Any

import pytest
import torch
from torch import Tensor

transformers = pytest.importorskip("transformers", reason="needs the extra `transformers`")
from regard.integrations.transformers import (  # noqa: E402, F401  (handed on to the tests)
    BoolMask,
    MaskRule,
    PreallocatedCache,
    PreallocatedLayer,
    architectures,
    name_taps,
    regard_attention,
    regard_mask,
)

VOCAB, WINDOW, CHUNK = 48, 4, 5
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": None,
}
EXPERTS = {"num_experts_per_tok": 2, "num_local_experts": 4}
LATENT = {
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 8,
    "qk_rope_head_dim": 4,
    "v_head_dim": 6,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
    "head_dim": 4,
}
WIDE = {"n_embd": 32, "n_head": 4, "n_layer": 2, "n_positions": 128, "vocab_size": VOCAB}
ENDS = {"pad_token_id": 0, "bos_token_id": 1, "eos_token_id": None}
DECODERS: dict[str, dict[str, Any]] = {
    "Llama": SIZES,
    "Mistral": SIZES | {"sliding_window": WINDOW},
    "Qwen2": SIZES,
    "Qwen3": SIZES,
    "Gemma2": SIZES
    | {"sliding_window": WINDOW, "attn_logit_softcapping": 2.0, "query_pre_attn_scalar": 16},
    "Gemma3": SIZES | {"sliding_window": WINDOW, "sliding_window_pattern": 2},
    "GptOss": SIZES
    | EXPERTS
    | {"sliding_window": WINDOW, "rope_parameters": {"rope_type": "default", "rope_theta": 1e4}},
    "GPT2": WIDE | ENDS,
    "GPTNeoX": SIZES,
    "Phi3": SIZES | {"sliding_window": WINDOW},
    "Olmo2": SIZES,
    "Mixtral": SIZES | EXPERTS,
    "DeepseekV3": SIZES | LATENT,
    "Llama4": SIZES
    | EXPERTS
    | {"attention_chunk_size": CHUNK, "intermediate_size_mlp": 24, "no_rope_layers": [1, 0]},
}
CONFIGS = {"Gemma3": "Gemma3TextConfig", "Llama4": "Llama4TextConfig"}


def loud(model: Any) -> Any:
    """Weights so large that scores differ by more than rounding, and norms and sinks that are not
    their initial 0 or 1.
    """
    for name, x in model.named_parameters():
        std = 0.3 if x.ndim < 2 else 1.4 * x.shape[-1] ** -0.5
        x.data.normal_(0, std)
        if x.ndim == 1 and "norm" in name:
            x.data.add_(1)
    return model


@functools.cache
def _decoder(name: str) -> Any:
    torch.manual_seed(7)
    config = getattr(transformers, CONFIGS.get(name, f"{name}Config"))(**DECODERS[name])
    kind = "GPT2LMHeadModel" if name == "GPT2" else f"{name}ForCausalLM"
    return loud(getattr(transformers, kind)(config)).eval()


def decoder(name: str, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """The language model of that family with an attention implementation; the same weights each
    time.
    """
    model = copy.deepcopy(_decoder(name)).to(dtype)
    model.set_attn_implementation(attention)
    model.set_experts_implementation("eager")  # the fused one knows no float64
    return model


def tokens(*shape: int, seed: int = 3) -> Tensor:
    return torch.randint(2, VOCAB, shape, generator=torch.Generator().manual_seed(seed))


def keep(lengths: list[int], total: int, side: str) -> Tensor:
    """The attention mask [B, total] of rows of these lengths, padded on one side."""
    at = torch.arange(total)
    rows = [at < n if side == "right" else at >= total - n for n in lengths]
    return torch.stack(rows).long()


SEQ2SEQ: dict[str, dict[str, Any]] = {
    "T5": {
        "vocab_size": VOCAB,
        "d_model": 32,
        "d_kv": 8,
        "d_ff": 24,
        "num_layers": 2,
        "num_heads": 4,
        "relative_attention_num_buckets": 8,
        "relative_attention_max_distance": 12,
        "pad_token_id": 0,
        "eos_token_id": 1,
        "decoder_start_token_id": 0,
    },
    "Bart": {
        "vocab_size": VOCAB,
        "d_model": 32,
        "encoder_layers": 2,
        "decoder_layers": 2,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 24,
        "decoder_ffn_dim": 24,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "decoder_start_token_id": 2,
        "forced_eos_token_id": None,
    },
}
ENCODERS: dict[str, dict[str, Any]] = {
    "Bert": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
    },
    "ModernBert": {
        "vocab_size": VOCAB,
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "local_attention": 4,
        "global_attn_every_n_layers": 2,
        "max_position_embeddings": 64,
        "pad_token_id": 0,
        "bos_token_id": 1,
        "eos_token_id": 1,
        "cls_token_id": 1,
        "sep_token_id": 1,
    },
}


@functools.cache
def _other(name: str) -> Any:
    torch.manual_seed(7)
    config = getattr(transformers, f"{name}Config")(**(SEQ2SEQ | ENCODERS)[name])
    kind = f"{name}Model" if name in ENCODERS else f"{name}ForConditionalGeneration"
    return loud(getattr(transformers, kind)(config)).eval()


def other(name: str, attention: str, dtype: torch.dtype = torch.float32) -> Any:
    """The encoder, or the encoder and decoder, of that family; the same weights each time."""
    model = copy.deepcopy(_other(name)).to(dtype)
    model.set_attn_implementation(attention)
    return model
