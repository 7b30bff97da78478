"""Published config.json files of ModernBERT, BART and Marian: how large the models are."""

from __future__ import annotations

from typing import Any

import pytest

from regard.configs.reader import parse, read_sizes
from regard.models.families import family
from tests.parity.families.published import build, count

modernbert = family("modernbert")

MODERNBERT: dict[str, Any] = {
    "architectures": ["ModernBertForMaskedLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 50281,
    "classifier_activation": "gelu",
    "classifier_bias": False,
    "classifier_dropout": 0.0,
    "classifier_pooling": "mean",
    "cls_token_id": 50281,
    "decoder_bias": True,
    "deterministic_flash_attn": False,
    "embedding_dropout": 0.0,
    "eos_token_id": 50282,
    "global_attn_every_n_layers": 3,
    "global_rope_theta": 160000.0,
    "gradient_checkpointing": False,
    "hidden_activation": "gelu",
    "hidden_size": 768,
    "initializer_cutoff_factor": 2.0,
    "initializer_range": 0.02,
    "intermediate_size": 1152,
    "layer_norm_eps": 1e-05,
    "local_attention": 128,
    "local_rope_theta": 10000.0,
    "max_position_embeddings": 8192,
    "mlp_bias": False,
    "mlp_dropout": 0.0,
    "model_type": "modernbert",
    "norm_bias": False,
    "norm_eps": 1e-05,
    "num_attention_heads": 12,
    "num_hidden_layers": 22,
    "pad_token_id": 50283,
    "position_embedding_type": "absolute",
    "sep_token_id": 50282,
    "tie_word_embeddings": True,
    "torch_dtype": "float32",
    "transformers_version": "4.47.0.dev0",
    "vocab_size": 50368,
}
MODERNBERT_LARGE = MODERNBERT | {
    "hidden_size": 1024,
    "intermediate_size": 2624,
    "num_attention_heads": 16,
    "num_hidden_layers": 28,
}
BART_BASE: dict[str, Any] = {
    "activation_dropout": 0.1,
    "activation_function": "gelu",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "attention_dropout": 0.1,
    "bos_token_id": 0,
    "classif_dropout": 0.1,
    "classifier_dropout": 0.0,
    "d_model": 768,
    "decoder_attention_heads": 12,
    "decoder_ffn_dim": 3072,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 6,
    "decoder_start_token_id": 2,
    "dropout": 0.1,
    "early_stopping": True,
    "encoder_attention_heads": 12,
    "encoder_ffn_dim": 3072,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 6,
    "eos_token_id": 2,
    "forced_bos_token_id": 0,
    "forced_eos_token_id": 2,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_position_embeddings": 1024,
    "model_type": "bart",
    "no_repeat_ngram_size": 3,
    "normalize_before": False,
    "normalize_embedding": True,
    "num_beams": 4,
    "num_hidden_layers": 6,
    "pad_token_id": 1,
    "scale_embedding": False,
    "use_cache": True,
    "vocab_size": 50265,
}
BART_LARGE = BART_BASE | {
    "d_model": 1024,
    "decoder_attention_heads": 16,
    "decoder_ffn_dim": 4096,
    "decoder_layers": 12,
    "encoder_attention_heads": 16,
    "encoder_ffn_dim": 4096,
    "encoder_layers": 12,
    "num_hidden_layers": 12,
}
OPUS: dict[str, Any] = {
    "_num_labels": 3,
    "activation_dropout": 0.0,
    "activation_function": "swish",
    "add_bias_logits": False,
    "add_final_layer_norm": False,
    "bad_words_ids": [[58100]],
    "bos_token_id": 0,
    "classif_dropout": 0.0,
    "d_model": 512,
    "decoder_attention_heads": 8,
    "decoder_ffn_dim": 2048,
    "decoder_layerdrop": 0.0,
    "decoder_layers": 6,
    "decoder_start_token_id": 58100,
    "decoder_vocab_size": 58101,
    "encoder_attention_heads": 8,
    "encoder_ffn_dim": 2048,
    "encoder_layerdrop": 0.0,
    "encoder_layers": 6,
    "eos_token_id": 0,
    "forced_eos_token_id": 0,
    "init_std": 0.02,
    "is_encoder_decoder": True,
    "max_length": 512,
    "max_position_embeddings": 512,
    "model_type": "marian",
    "normalize_before": False,
    "normalize_embedding": False,
    "num_beams": 6,
    "num_hidden_layers": 6,
    "pad_token_id": 58100,
    "scale_embedding": True,
    "share_encoder_decoder_embeddings": True,
    "static_position_embeddings": True,
    "vocab_size": 58101,
}


@pytest.mark.parametrize(
    ("raw", "size"),
    [
        (MODERNBERT, 149_014_272),
        (MODERNBERT_LARGE, 394_781_696),
        (BART_BASE, 139_420_416),
        (BART_LARGE, 406_291_456),
        # 74,410,496 with two tables of sinusoids
        (OPUS, 74_410_496 - 2 * 512 * 512),
    ],
    ids=["ModernBERT-base", "ModernBERT-large", "bart-base", "bart-large", "opus-mt-en-de"],
)
def test_published_sizes(raw: dict[str, Any], size: int) -> None:
    assert count(build(raw)[1]) == size
    assert read_sizes(raw, "it").parameters == size


def test_modernbert_with_its_head() -> None:
    """149,655,232 with the head, as the released file has."""
    config = parse(modernbert.config, MODERNBERT)
    stored = ["model.final_norm.weight", "head.dense.weight"]
    whole = modernbert.complete_config(config, MODERNBERT, stored)
    assert count(modernbert.build_empty(whole)) == 149_655_232
