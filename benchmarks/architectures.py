"""Architectures of public libraries with random weights: torch, transformers, timm and diffusers.

Each builder imports its library, takes `PublicModelSizes`, and returns a `BuiltModel` in fp32.
Widths are those of published models, and layers are few, so that a step takes at most seconds.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.public_models import BuiltModel, PublicModelSizes

VOCABULARY = 256


def _widths(dim: int, heads: int, inner: int, **more: int) -> dict[str, int]:
    """Return the options of a config that set its widths."""
    return {
        "hidden_size": dim,
        "num_attention_heads": heads,
        "intermediate_size": inner,
        **more,
    }


def _whisper_widths(dim: int, heads: int, inner: int, **more: int) -> dict[str, int]:
    """Return the same for a Whisper."""
    sides = {f"{side}_attention_heads": heads for side in ("encoder", "decoder")}
    return {"d_model": dim, **sides, "encoder_ffn_dim": inner, "decoder_ffn_dim": inner, **more}


WIDTHS = {
    "llama": _widths(2048, 32, 8192, num_key_value_heads=8),  # Llama-3.2-1B
    "mistral": _widths(  # a quarter of Mistral-7B
        1024, 8, 3584, num_key_value_heads=2, head_dim=128, sliding_window=512
    ),
    "qwen2": _widths(896, 14, 4864, num_key_value_heads=2),  # Qwen2-0.5B
    "gpt2": {"n_embd": 768, "n_head": 12},
    "bert": _widths(768, 12, 3072),
    "t5": {"d_model": 768, "num_heads": 12, "d_kv": 64, "d_ff": 3072},
    "vit": _widths(768, 12, 3072),
    "whisper": _whisper_widths(768, 12, 3072),  # Whisper small
}
"""The options of a config that set the widths of a published model."""

NARROW = {
    **dict.fromkeys(("llama", "qwen2"), _widths(32, 4, 48, num_key_value_heads=2)),
    "mistral": _widths(32, 4, 48, num_key_value_heads=2, head_dim=8, sliding_window=4),
    "gpt2": {"n_embd": 32, "n_head": 4},
    "bert": _widths(32, 4, 48),
    "t5": {"d_model": 32, "num_heads": 4, "d_kv": 8, "d_ff": 48},
    "vit": _widths(32, 4, 48),
    "whisper": _whisper_widths(32, 4, 48, max_source_positions=50),
}
"""The same for models of a few dims."""


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
    """Build a decoder that reads a prompt without a cache."""
    model = _decoder(kind, sizes)
    ids = torch.randint(VOCABULARY, (sizes.batch, sizes.tokens))
    return BuiltModel(
        model, lambda _: lambda: model(input_ids=ids, use_cache=False).last_hidden_state
    )


def decode(sizes: PublicModelSizes, *, kind: str, static: bool = False) -> BuiltModel:
    """Build a decoder that reads one token behind a cache of random keys and values."""
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


class CausalSelfAttention(nn.Module):
    """Causal self-attention as small GPT implementations write it: one map for q, k and v."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.c_attn, self.c_proj = nn.Linear(dim, 3 * dim), nn.Linear(dim, dim)

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs `[B, T, M]`."""
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2)
            for part in self.c_attn(x).chunk(3, dim=-1)
        )
        z: Tensor = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        out: Tensor = self.c_proj(z.transpose(1, 2).flatten(2))
        return out


class NanoGptBlock(nn.Module):
    """Attention and a feed-forward network, each behind a layer norm and with a residual path."""

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        self.ln_1, self.ln_2 = nn.LayerNorm(dim), nn.LayerNorm(dim)
        self.attn = CausalSelfAttention(dim, heads)
        self.mlp = nn.Sequential(nn.Linear(dim, 4 * dim), nn.GELU(), nn.Linear(4 * dim, dim))

    def forward(self, x: Tensor) -> Tensor:
        """Return the outputs `[B, T, M]`."""
        x = x + self.attn(self.ln_1(x))
        out: Tensor = x + self.mlp(self.ln_2(x))
        return out


class NanoGpt(nn.Module):
    """A small GPT: embeddings of tokens and positions, blocks, and a layer norm."""

    def __init__(self, vocabulary: int, length: int, dim: int, heads: int, layers: int) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocabulary, dim), nn.Embedding(length, dim)
        self.blocks = nn.ModuleList(NanoGptBlock(dim, heads) for _ in range(layers))
        self.ln_f = nn.LayerNorm(dim)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the hidden states `[B, T, M]` of tokens `[B, T]`."""
        x = self.wte(ids) + self.wpe(torch.arange(ids.shape[1], device=ids.device))
        for block in self.blocks:
            x = block(x)
        out: Tensor = self.ln_f(x)
        return out


def nano_gpt(sizes: PublicModelSizes) -> BuiltModel:
    """Build a nanoGPT of GPT-2's widths, which reads a prompt."""
    dim, heads = (32, 4) if sizes.narrow else (768, 12)
    model = NanoGpt(64, sizes.tokens, dim, heads, sizes.layers)
    ids = torch.randint(64, (sizes.batch, sizes.tokens))
    return BuiltModel(model, lambda _: lambda: model(ids))


def padding(batch: int, tokens: int) -> Tensor:
    """Return which slots `[B, T]` hold tokens; row i has (i + 1) T / B, half are padding."""
    lengths = torch.arange(1, batch + 1) * tokens // batch
    return torch.arange(tokens) < lengths[:, None]


def encoder(sizes: PublicModelSizes, *, padded: bool = False, nested: bool = False) -> BuiltModel:
    """Build an `nn.TransformerEncoder` of BERT-base's widths."""
    dim, heads = (32, 4) if sizes.narrow else (768, 12)
    layer = nn.TransformerEncoderLayer(
        dim, heads, 4 * dim, activation="gelu", batch_first=True, dropout=0.0
    )
    model = nn.TransformerEncoder(layer, sizes.layers, enable_nested_tensor=nested)
    x = torch.randn(sizes.batch, sizes.tokens, dim)
    keep = padding(sizes.batch, sizes.tokens) if padded else None

    def prepare(dtype: torch.dtype) -> Callable[[], Tensor]:
        src = x.to(dtype)
        if keep is None:
            return lambda: model(src)
        # the outputs of padding are not defined: the fused kernel of torch writes other numbers
        return lambda: model(src, src_key_padding_mask=~keep)[keep]

    return BuiltModel(model, prepare)


def transformer(sizes: PublicModelSizes) -> BuiltModel:
    """Build an `nn.Transformer` of the base widths: an encoder, and a causal decoder."""
    dim, heads = (32, 4) if sizes.narrow else (512, 8)
    model = nn.Transformer(
        dim,
        heads,
        sizes.layers,
        sizes.layers,
        4 * dim,
        batch_first=True,
        dropout=0.0,
    )
    source, target = torch.randn(2, sizes.batch, sizes.tokens, dim).unbind(0)

    def prepare(dtype: torch.dtype) -> Callable[[], Tensor]:
        x, y = source.to(dtype), target.to(dtype)
        mask = nn.Transformer.generate_square_subsequent_mask(sizes.tokens, dtype=dtype)
        return lambda: model(x, y, tgt_mask=mask, tgt_is_causal=True)

    return BuiltModel(model, prepare)


def _features(model: Any, side: int, batch: int) -> BuiltModel:
    """Return a model that maps images to features."""
    images = torch.randn(batch, 3, side, side)

    def prepare(dtype: torch.dtype) -> Callable[[], Tensor]:
        pixels = images.to(dtype)

        def step() -> Tensor:
            out: Tensor = model.forward_features(pixels)
            return out

        return step

    return BuiltModel(model, prepare)


def timm_vit(sizes: PublicModelSizes, *, side: int = 224) -> BuiltModel:
    """Build a ViT-B/16 of timm, which reads images of 224 pixels."""
    from timm.models.vision_transformer import VisionTransformer

    side = 48 if sizes.narrow else side
    dim, heads = (32, 4) if sizes.narrow else (768, 12)
    model = VisionTransformer(
        img_size=side, patch_size=16, embed_dim=dim, num_heads=heads, depth=sizes.layers
    )
    return _features(model, side, sizes.batch)


def timm_swin(sizes: PublicModelSizes) -> BuiltModel:
    """Build the first two stages of a Swin-T, with windows of 7 x 7 patches."""
    from timm.models.swin_transformer import SwinTransformer

    side, dim = (56, 16) if sizes.narrow else (224, 96)
    heads = (dim // 32 or 2, dim // 16)
    model = SwinTransformer(
        img_size=side, embed_dim=dim, depths=(sizes.layers,) * 2, num_heads=heads, window_size=7
    )
    for module in model.modules():
        if hasattr(module, "fused_attn"):  # timm calls torch's function for Swin only if asked to
            module.fused_attn = True
    return _features(model, side, sizes.batch)


def diffusers_unet(sizes: PublicModelSizes) -> BuiltModel:
    """Build the two outer levels of Stable Diffusion 1.5's UNet, for latents of 64 x 64."""
    from diffusers import UNet2DConditionModel

    narrow = sizes.narrow
    channels, text, side = ((32, 64), 24, 8) if narrow else ((320, 640), 768, 64)
    model: Any = UNet2DConditionModel(
        sample_size=side,
        block_out_channels=channels,
        down_block_types=("CrossAttnDownBlock2D", "CrossAttnDownBlock2D"),
        up_block_types=("CrossAttnUpBlock2D", "CrossAttnUpBlock2D"),
        layers_per_block=sizes.layers,
        cross_attention_dim=text,
        attention_head_dim=4 if narrow else 8,  # the number of heads, as diffusers names it
    )
    latents = torch.randn(sizes.batch, 4, side, side)
    words = torch.randn(sizes.batch, 77, text)

    def prepare(dtype: torch.dtype) -> Callable[[], Tensor]:
        x, states = latents.to(dtype), words.to(dtype)
        return lambda: model(x, 10, encoder_hidden_states=states).sample

    return BuiltModel(model, prepare)


def diffusers_dit(sizes: PublicModelSizes) -> BuiltModel:
    """Build layers of DiT-XL/2: latents of 64 x 64, 1024 tokens, 16 heads of 72."""
    from diffusers import DiTTransformer2DModel

    heads, head_dim, side = (4, 8, 8) if sizes.narrow else (16, 72, 64)
    model: Any = DiTTransformer2DModel(
        num_attention_heads=heads,
        attention_head_dim=head_dim,
        in_channels=4,
        out_channels=8,
        num_layers=sizes.layers,
        sample_size=side,
        patch_size=2,
    )
    latents = torch.randn(sizes.batch, 4, side, side)
    steps, labels = torch.full((sizes.batch,), 10), torch.arange(sizes.batch)

    def prepare(dtype: torch.dtype) -> Callable[[], Tensor]:
        x = latents.to(dtype)
        return lambda: model(x, timestep=steps, class_labels=labels).sample

    return BuiltModel(model, prepare)
