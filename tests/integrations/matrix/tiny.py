"""A tiny configuration of every architecture of transformers: its own defaults, with every size
that is known made small.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from tests.integrations.families import transformers

VOCAB, WIDTH, HEADS, WINDOW, CHUNK = 128, 32, 4, 4, 5

NAMES: list[tuple[float, str]] = [
    (
        WIDTH,
        """
        hidden_size d_model n_embd dim embed_dim hidden_dim emb_dim projection_dim embedding_dim
        out_hidden_size word_embed_proj_dim output_dim encoder_hidden_size decoder_hidden_size
        embedding_size encoder_hidden_dim decoder_hidden_dim text_hidden_size vision_hidden_size
        output_hidden_size projection_size width lstm_dim lru_width attention_dim
        backbone_hidden_size audio_hidden_size pooler_hidden_size pooler_output_size d_embed
        n_embed mem_dim hidden_size_global cross_attention_hidden_size conv_dim_out
        decoder_embed_dim encoder_embed_dim attention_hidden_size dense_hidden_size
        """,
    ),
    (
        48,
        """
        intermediate_size encoder_ffn_dim decoder_ffn_dim ffn_dim d_ff n_inner mlp_dim d_inner
        ffn_hidden_size decoder_intermediate_size encoder_intermediate_size
        intermediate_size_mlp dense_intermediate_size prefix_dim inner_dim ff_dim dim_ff
        feed_forward_size mlp_hidden_size feedforward_dim dim_feedforward encoder_linear_units
        decoder_linear_units block_ff_dim shared_intermediate_size hidden_size_mlp fc_dim
        adapter_hidden_size classifier_proj_size shared_expert_intermediate_size
        moe_intermediate_size expert_ffn_size moe_shared_expert_intermediate_size
        expert_ffn_hidden_size expert_hidden_size expert_dim
        """,
    ),
    (
        HEADS,
        """
        num_attention_heads n_head n_heads num_heads encoder_attention_heads
        decoder_attention_heads attention_heads nhead num_key_value_heads_per_layer
        n_attention_heads num_heads_per_layer swa_num_attention_heads
        decoder_num_attention_heads encoder_num_attention_heads num_encoder_attention_heads
        """,
    ),
    (
        8,
        """
        head_dim qk_nope_head_dim qk_rope_head_dim v_head_dim attention_head_dim d_kv
        attention_head_size kv_channels global_head_dim swa_head_dim swa_v_head_dim d_head
        dim_head linear_head_dim linear_key_head_dim linear_value_head_dim head_size rotary_dim
        rope_head_dim d_rel mamba_head_dim sparse_head_dim
        """,
    ),
    (16, "qk_head_dim index_head_dim indexer_head_dim mamba_d_head"),
    (16, "kv_lora_rank q_lora_rank o_lora_rank bottleneck_size d_conv rank"),
    (
        VOCAB,
        """
        vocab_size text_vocab_size codebook_size entity_vocab_size vocab_size_per_layer_input
        n_vocab char_vocab_size input_vocab_size output_vocab_size audio_vocab_size
        encoder_vocab_size decoder_vocab_size src_vocab_size tgt_vocab_size num_embeddings
        unit_vocab_size t2u_vocab_size speech_vocab_size
        """,
    ),
    (
        128,
        """
        max_position_embeddings n_positions max_seq_len max_source_positions
        max_target_positions n_ctx context_length max_sequence_length max_seq_length
        model_max_length seq_length max_2d_position_embeddings num_position_embeddings
        original_max_position_embeddings rel_extent max_encoder_position_embeddings
        max_decoder_position_embeddings max_context_length position_embedding_size n_position
        """,
    ),
    (WINDOW, "sliding_window sliding_window_size local_window_size window_length"),
    (
        4,
        """
        num_experts n_routed_experts num_local_experts moe_num_experts n_experts
        routed_num_experts num_routed_experts
        """,
    ),
    (
        2,
        """
        num_experts_per_tok moe_topk top_k_experts num_experts_per_token moe_k moe_top_k
        """,
    ),
    (1, "n_group topk_group num_expert_group first_k_dense_replace num_dense_layers"),
    (
        HEADS,
        """
        linear_num_key_heads linear_num_value_heads linear_num_heads mamba_n_heads
        mamba_num_heads
        """,
    ),
    (8, "num_queries num_query_tokens num_latents latent_dim d_latents"),
    (CHUNK, "attention_chunk_size"),
    (3, "index_topk indexer_topk index_block_size"),
    (HEADS, "index_n_heads indexer_n_heads index_num_heads"),
    (2, "index_topk_blocks"),
    (
        8,
        """
        state_size mamba_d_state ssm_state_size hidden_size_per_layer_input num_mel_bins
        feature_size input_feat_per_channel num_conv_pos_embeddings block_size
        relative_attention_num_buckets
        """,
    ),
    (64, "mamba_d_ssm"),
    (
        16,
        """
        mamba_chunk_size chunk_size image_size input_size pretrain_image_size
        query_pre_attn_scalar
        """,
    ),
    (
        4,
        """
        patch_size num_conv_pos_embedding_groups upsample_groups local_attention num_frames
        """,
    ),
    (0, "num_kv_shared_layers"),
    (2.0, "attn_logit_softcapping"),
    (1, "max_window_layers"),
    (12, "relative_attention_max_distance"),
]
"""Small sizes, and the names that configurations have for them."""

SIZES = {name: size for size, names in NAMES for name in names.split()}
PREFIXES = ("swa_", "sliding_", "global_", "local_", "compress_")
"""A size of one kind of layer, which is as small as that of all."""

LAYERS = {
    "num_hidden_layers",
    "n_layer",
    "n_layers",
    "num_layers",
    "encoder_layers",
    "decoder_layers",
    "num_encoder_layers",
    "num_decoder_layers",
    "depth",
    "num_blocks",
    "encoder_num_hidden_layers",
    "decoder_num_hidden_layers",
    "num_layers_per_block",
    "num_encoder_blocks_",
    "num_temporal_layers",
    "num_self_attends_per_block",
    "t2u_encoder_layers",
    "t2u_decoder_layers",
    "speech_encoder_layers",
    "text_encoder_layers",
    "text_decoder_layers",
}
SECTIONS = re.compile(
    r"glm.*(4v|46v|image|ocr|ga)|qwen2.*vl|qwen2_5_omni|qwen3_omni|ernie4_5_vl|paddleocr|cosmos3_edge_text"
)
"""Architectures whose code has sections of a rotation by time, height and width, whether the
configuration names them or not.
"""

PER_LAYER = (
    "layer_types",
    "mlp_layer_types",
    "indexer_types",
    "layers_block_type",
    "layer_block_type",
    "block_types",
    "attention_types",
    "attn_type_list",
    "layer_type_list",
    "attention_layers",
)
OWN: dict[str, dict[str, Any]] = {
    "reformer": {"is_decoder": True},
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "window_size": WINDOW},
    "mamba2": {"num_heads": 8},
    "falcon_h1": {"mamba_n_heads": 4, "mamba_d_head": 16, "mamba_d_ssm": 64},
    "lfm2_moe": {"layer_types": ["conv", "full_attention"]},
    "glm5_next_text": {"index_topk": 4, "index_kpool": 2},
    "nemotron": {"num_key_value_heads": 2},
    "bamba": {"attn_layer_indices": [1]},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1, "num_experts_per_tok": 2},
    "deepseek_v2": {
        "n_group": 1,
        "topk_group": 1,
        "num_experts_per_tok": 2,
        "topk_method": "greedy",
    },
    "jamba": {
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
    },
    "esm": {"vocab_size": VOCAB, "mask_token_id": 4, "pad_token_id": 0},
    "blt": {"encoder_hash_byte_group_vocab": 64, "vocab_size": 260},
    "mllama_text_model": {"cross_attention_layers": [1]},
    "cohere_compass_text": {
        "rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 1e4}},
    },
    "dots3_note_text": {
        "per_layer_config": {"1": {"kv_lora_rank": 12}},
        "use_dsa": True,
        "head_dim": 16,
    },
}
"""What one architecture needs besides: model_type -> settings."""


def tiny(kind: Any, model_type: str = "", **given: Any) -> Any:
    """A small configuration of this class; a configuration inside it is made small, too.

    >>> config = tiny(transformers.MistralConfig)
    >>> config.hidden_size, config.num_hidden_layers, config.sliding_window
    (32, 2, 4)
    """
    default = kind()
    settings: dict[str, Any] = {}
    held = {name: value for name, value in vars(default).items() if not name.startswith("_")}
    for name, value in held.items():
        size = SIZES.get(
            name, SIZES.get(name.partition("_")[2]) if name.startswith(PREFIXES) else None
        )
        if isinstance(value, transformers.PretrainedConfig):
            settings[name] = tiny(type(value), value.model_type)
        elif name == "head_dim" and value is None:
            settings[name] = WIDTH // HEADS
        elif isinstance(value, bool):
            settings |= {name: False} if name == "tie_word_embeddings" else {}
        elif size is not None and isinstance(value, (int, float)):
            settings[name] = size if name == "intermediate_size" else min(value, size)
    if "use_sliding_window" in held:
        settings |= {"use_sliding_window": True, "sliding_window": WINDOW}
    rope = held.get("rope_parameters")
    if isinstance(rope, dict) and ("mrope_section" in rope or SECTIONS.search(default.model_type)):
        # the sections share the rotated half of a head among time, height and width
        head = 16 if "head_dim" in held else WIDTH // HEADS
        half = int(head * rope.get("partial_rotary_factor", 1)) // 2
        part = half // 3
        sections = [half - 2 * part, part, part]
        settings |= {"rope_parameters": {**rope, "mrope_section": sections}}
        settings |= {"head_dim": head} if "head_dim" in held else {}
    settings |= dict(_kv_heads(held)) | dict(_tokens(held)) | dict(_layers(held, settings))
    settings |= OWN.get(model_type or default.model_type, {}) | given
    return kind(**settings)


def _kv_heads(held: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    for name in (
        "num_key_value_heads",
        "num_kv_heads",
        "n_kv_heads",
        "swa_num_key_value_heads",
        "num_global_key_value_heads",
    ):
        value = held.get(name)
        if isinstance(value, int) and not isinstance(value, bool):
            queries = held.get("num_attention_heads", held.get("num_heads", value))
            # multi-query stays so, latent attention keeps its heads, and every other has half as
            # many
            full = value == queries or "kv_lora_rank" in held
            yield name, 1 if value == 1 else HEADS if full else HEADS // 2


def _tokens(held: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    last = VOCAB - 1
    for name in sorted(held):
        if not name.endswith(("_token_id", "_token_index", "_token_ids")):
            continue
        fixed = {
            "pad_token_id": 0,
            "bos_token_id": 1,
            "eos_token_id": 2,
            "decoder_start_token_id": 1,
        }
        if name in fixed:
            yield name, fixed[name]
        elif isinstance(held[name], int):
            yield name, last
            last -= 1


def _layers(held: dict[str, Any], settings: dict[str, Any]) -> Iterator[tuple[str, Any]]:
    """Two layers, or as many as there are kinds of them, one of each."""
    kinds = {
        name: list(dict.fromkeys(held[name]))
        for name in PER_LAYER
        if isinstance(held.get(name), (list, tuple)) and all(isinstance(x, str) for x in held[name])
    }
    count = max([2, *map(len, kinds.values())])
    for name in LAYERS & held.keys():
        if isinstance(held[name], int):
            yield name, count
    if "num_hidden_layers" in held:
        for name, found in kinds.items():
            # where a number says which layers slide, they are counted again: one does, and one does
            # not
            if found and not (name == "layer_types" and "max_window_layers" in held):
                yield name, [*found, *[found[-1]] * (count - len(found))]
