"""Models of transformers with `attn_implementation="sdpa"`: decoders, encoders, Whisper and T5."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.problems.public_model import BuiltModel, PublicModelSizes
from benchmarks.public_models.torch_models import padding

NEEDS = ("transformers",)
VOCABULARY = 256

WIDTHS: dict[str, dict[str, object]] = {
    "llama": {  # Llama-3.2-1B
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "intermediate_size": 8192,
    },
    "mistral": {  # a quarter of Mistral-7B
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 2,
        "intermediate_size": 3584,
        "head_dim": 128,
        "sliding_window": 512,
    },
    "qwen2": {  # Qwen2-0.5B
        "hidden_size": 896,
        "num_attention_heads": 14,
        "num_key_value_heads": 2,
        "intermediate_size": 4864,
    },
    "gpt2": {"n_embd": 768, "n_head": 12},
    "bert": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "t5": {"d_model": 768, "num_heads": 12, "d_kv": 64, "d_ff": 3072},
    "vit": {"hidden_size": 768, "num_attention_heads": 12, "intermediate_size": 3072},
    "whisper": {  # Whisper small
        "d_model": 768,
        "encoder_attention_heads": 12,
        "decoder_attention_heads": 12,
        "encoder_ffn_dim": 3072,
        "decoder_ffn_dim": 3072,
    },
}
"""The options of a config that set the widths of a published model."""

NARROW: dict[str, dict[str, object]] = {
    "llama": {
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "intermediate_size": 48,
    },
    "gpt2": {"n_embd": 32, "n_head": 4},
    "bert": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
    "t5": {"d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 48},
    "vit": {"hidden_size": 32, "num_attention_heads": 4, "intermediate_size": 48},
    "whisper": {
        "d_model": 32,
        "encoder_attention_heads": 4,
        "decoder_attention_heads": 4,
        "encoder_ffn_dim": 48,
        "decoder_ffn_dim": 48,
        "max_source_positions": 50,
    },
}
"""The same for models of a few dims."""
NARROW["qwen2"] = NARROW["llama"]
NARROW["mistral"] = NARROW["llama"] | {"head_dim": 8, "sliding_window": 4}


def _model(kind: str, sizes: PublicModelSizes, **options: object) -> Any:
    """Return a model of transformers without a head, with random weights."""
    from transformers import AutoConfig, AutoModel

    widths = (NARROW if sizes.narrow else WIDTHS)[kind]
    config = AutoConfig.for_model(kind, **{**widths, **options})
    return AutoModel.from_config(config, attn_implementation="sdpa")


def _decoder(kind: str, sizes: PublicModelSizes) -> Any:
    layers = "n_layer" if kind == "gpt2" else "num_hidden_layers"
    positions = "n_positions" if kind == "gpt2" else "max_position_embeddings"
    options = {layers: sizes.layers, positions: sizes.tokens + 1, "vocab_size": VOCABULARY}
    return _model(kind, sizes, **options)


def prefill(sizes: PublicModelSizes, *, kind: str) -> BuiltModel:
    """Build a decoder that reads a prompt without a cache.

    Args:
        sizes: the sizes.
        kind: the `model_type` of transformers.
    """
    model = _decoder(kind, sizes)
    ids = torch.randint(VOCABULARY, (sizes.batch, sizes.tokens))
    return BuiltModel(
        model, lambda _: lambda: model(input_ids=ids, use_cache=False).last_hidden_state
    )


def decode(sizes: PublicModelSizes, *, kind: str, static: bool = False) -> BuiltModel:
    """Build a decoder that reads one token behind a cache of random keys and values.

    Args:
        sizes: the sizes.
        kind: the `model_type` of transformers.
        static: whether the cache is a `StaticCache` instead of a `DynamicCache`.
    """
    model = _decoder(kind, sizes)
    ids = torch.randint(VOCABULARY, (sizes.batch, 1))

    def prepare(dtype: torch.dtype) -> Callable[[], Tensor]:
        cache = _filled_cache(model.config, sizes, dtype, static=static)

        def step() -> Tensor:
            out: Tensor = model(
                input_ids=ids, past_key_values=cache, use_cache=True
            ).last_hidden_state
            if static:
                for layer in cache.layers:
                    layer.cumulative_length.sub_(1)
            else:
                cache.crop(-1)  # remove the new token
            return out

        return step

    return BuiltModel(model, prepare)


def _filled_cache(config: Any, sizes: PublicModelSizes, dtype: torch.dtype, *, static: bool) -> Any:
    """Return a cache with random keys and values, the same in each dtype up to rounding."""
    from transformers import DynamicCache, StaticCache

    cache = (
        StaticCache(config=config, max_cache_len=sizes.tokens + 1)
        if static
        else DynamicCache(config=config)
    )
    heads = config.num_attention_heads
    groups = getattr(config, "num_key_value_heads", heads)
    head_dim = getattr(config, "head_dim", None) or config.hidden_size // heads
    generator = torch.Generator().manual_seed(1)
    for layer in range(sizes.layers):
        k, v = (
            torch.randn(sizes.batch, groups, sizes.tokens, head_dim, generator=generator)
            # half-precision numbers, so that every dtype has the same ones
            .to(torch.bfloat16)
            .to(dtype)
            for _ in range(2)
        )
        cache.update(k, v, layer)
    return cache


def bert(sizes: PublicModelSizes) -> BuiltModel:
    """Build a BERT that reads a right-padded batch."""
    model = _model(
        "bert",
        sizes,
        num_hidden_layers=sizes.layers,
        vocab_size=VOCABULARY,
        max_position_embeddings=sizes.tokens,
    )
    ids = torch.randint(VOCABULARY, (sizes.batch, sizes.tokens))
    keep = padding(sizes.batch, sizes.tokens)
    return BuiltModel(
        model,
        lambda _: lambda: model(input_ids=ids, attention_mask=keep.long()).last_hidden_state[keep],
    )


def t5(sizes: PublicModelSizes) -> BuiltModel:
    """Build the encoder of a T5, whose attention has a position bias."""
    model = _model("t5", sizes, num_layers=sizes.layers, vocab_size=VOCABULARY)
    ids = torch.randint(VOCABULARY, (sizes.batch, sizes.tokens))
    return BuiltModel(model.encoder, lambda _: lambda: model.encoder(ids).last_hidden_state)


def vit(sizes: PublicModelSizes) -> BuiltModel:
    """Build a ViT with patches of 16 pixels, which reads images of 384 pixels (577 tokens)."""
    side = 48 if sizes.narrow else 384
    model = _model("vit", sizes, num_hidden_layers=sizes.layers, image_size=side)
    images = torch.randn(sizes.batch, 3, side, side)

    def prepare(dtype: torch.dtype) -> Callable[[], Tensor]:
        pixels = images.to(dtype)
        return lambda: model(pixels).last_hidden_state

    return BuiltModel(model, prepare)


def _whisper(sizes: PublicModelSizes) -> Any:
    return _model(
        "whisper",
        sizes,
        encoder_layers=sizes.layers,
        decoder_layers=sizes.layers,
        vocab_size=VOCABULARY,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
    )


def whisper_encoder(sizes: PublicModelSizes) -> BuiltModel:
    """Build the encoder of a Whisper, which reads 30 seconds of audio (1500 frames)."""
    model = _whisper(sizes).encoder
    audio = torch.randn(sizes.batch, 80, 2 * model.config.max_source_positions)

    def prepare(dtype: torch.dtype) -> Callable[[], Tensor]:
        features = audio.to(dtype)
        return lambda: model(features).last_hidden_state

    return BuiltModel(model, prepare)


def whisper_decode(sizes: PublicModelSizes) -> BuiltModel:
    """Build the decoder of a Whisper, which reads one token with cross-attention to 1500 frames."""
    model = _whisper(sizes).decoder
    frames = torch.randn(sizes.batch, model.config.max_source_positions, model.config.d_model)
    ids = torch.randint(VOCABULARY, (sizes.batch, sizes.tokens + 1))

    def prepare(dtype: torch.dtype) -> Callable[[], Tensor]:
        from transformers import DynamicCache, EncoderDecoderCache

        encoded = frames.to(dtype)
        cache = EncoderDecoderCache(DynamicCache(), DynamicCache())
        options = {"encoder_hidden_states": encoded, "past_key_values": cache, "use_cache": True}
        with torch.no_grad():
            model(input_ids=ids[:, :-1], **options)

        def step() -> Tensor:
            out: Tensor = model(input_ids=ids[:, -1:], **options).last_hidden_state
            cache.crop(-1)  # remove the new token
            return out

        return step

    return BuiltModel(model, prepare)
