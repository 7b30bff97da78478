"""The group "models": architectures that other people wrote, with `regard.accelerate` and without.

The size "default" has the widths of a published model and few layers; "small" has a few dims, so
that every attention call is left to torch; "paper" has the layers of the published model.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch

from benchmarks.interfaces import Case
from benchmarks.peers.accelerated import peers
from benchmarks.problems.public_model import PublicModelSizes
from benchmarks.public_models import (
    diffusers_models,
    timm_models,
    torch_models,
    transformers_models,
)

FP32, BF16 = torch.float32, torch.bfloat16
SMALL_TOKENS = 8
"""The number of tokens of the size "small", if the model does not fix it."""


def _case(
    name: str,
    description: str,
    sizes: PublicModelSizes,
    published_layers: int,
    needs: tuple[str, ...] = (),
) -> Case:
    """Return a case in fp32 and bf16; `sizes` is the size "default"."""
    small = replace(sizes, layers=1, tokens=min(sizes.tokens, SMALL_TOKENS), batch=2, narrow=True)
    paper = replace(sizes, layers=published_layers)
    return Case(
        name,
        description,
        {
            "small": replace(small, memory=1 << 28),
            "default": sizes,
            "paper": replace(paper, memory=sizes.memory * published_layers // sizes.layers),
        },
        (FP32, BF16),
        peers(*needs),
    )


def _decode(kind: str, tokens: int, *, static: bool = False) -> Case:
    """Return a case of one token behind a cache, with a model of transformers."""
    widths, layers, published_layers = DECODERS[kind]
    cache = "StaticCache" if static else "DynamicCache"
    build = partial(transformers_models.decode, kind=kind, static=static)
    suffix = "-static" if static else ""
    return _case(
        f"{kind}-decode-{tokens // 1024}k{suffix}",
        f"One token behind {tokens} cached ones, grouped heads, {cache}.",
        PublicModelSizes(build, widths, layers, tokens),
        published_layers,
        transformers_models.NEEDS,
    )


def _prefill(kind: str, description: str, tokens: int, *, batch: int = 1) -> Case:
    """Return a case of a prompt, with a decoder of transformers."""
    widths, layers, published_layers = DECODERS[kind]
    build = partial(transformers_models.prefill, kind=kind)
    return _case(
        f"{kind}-prefill",
        description,
        PublicModelSizes(build, widths, layers, tokens, batch),
        published_layers,
        transformers_models.NEEDS,
    )


DECODERS = {
    "llama": ("Llama-3.2-1B's widths", 1, 16),
    "qwen2": ("Qwen2-0.5B's widths", 2, 24),
    "mistral": ("a quarter of Mistral-7B's widths", 1, 32),
    "gpt2": ("GPT-2's widths", 2, 12),
}
"""Decoders of transformers: whose widths they have, and the numbers of layers of the sizes
"default" and "paper".
"""

_LANGUAGE_MODELS = (
    _prefill("llama", "A prompt, grouped heads.", 2048),
    *(_decode("llama", tokens) for tokens in (1024, 8192, 32768)),
    _decode("llama", 32768, static=True),
    _prefill("qwen2", "A prompt, grouped heads.", 2048),
    *(_decode("qwen2", tokens) for tokens in (1024, 8192, 32768)),
    _decode("qwen2", 32768, static=True),
    _prefill("mistral", "A prompt under a sliding window of 512, as a dense mask.", 8192),
    _prefill("gpt2", "A batch of prompts.", 1024, batch=2),
    _case(
        "nanogpt",
        "A prompt through a GPT of 60 lines.",
        PublicModelSizes(torch_models.nano_gpt, "GPT-2's widths", 2, 1024, batch=2),
        12,
    ),
)

BERT = "BERT-base's widths"

_ENCODERS = (
    _case(
        "bert-padded",
        "A right-padded batch of texts, half of it padding.",
        PublicModelSizes(transformers_models.bert, BERT, 2, 512, batch=4),
        12,
        transformers_models.NEEDS,
    ),
    _case(
        "t5-encoder",
        "A text through an encoder whose attention has a position bias.",
        PublicModelSizes(transformers_models.t5, "T5-base's widths", 2, 512, batch=2),
        12,
        transformers_models.NEEDS,
    ),
    _case(
        "torch-encoder",
        "nn.TransformerEncoder: the fused path.",
        PublicModelSizes(torch_models.encoder, BERT, 2, 512, batch=4),
        12,
    ),
    _case(
        "torch-encoder-padded",
        "nn.TransformerEncoder with src_key_padding_mask, half of the batch padding.",
        PublicModelSizes(partial(torch_models.encoder, padded=True), BERT, 2, 512, batch=4),
        12,
    ),
    _case(
        "torch-encoder-nested",
        "nn.TransformerEncoder with src_key_padding_mask, which torch makes a nested tensor.",
        PublicModelSizes(
            partial(torch_models.encoder, padded=True, nested=True), BERT, 2, 512, batch=4
        ),
        12,
    ),
    _case(
        "torch-transformer",
        "nn.Transformer: an encoder, and a decoder with a causal mask and cross-attention.",
        PublicModelSizes(torch_models.transformer, "the base Transformer's widths", 2, 512, 4),
        6,
    ),
)

_OTHER_DATA = (
    _case(
        "whisper-encoder",
        "30 seconds of audio, 1500 frames.",
        PublicModelSizes(transformers_models.whisper_encoder, "Whisper small's widths", 2),
        12,
        transformers_models.NEEDS,
    ),
    _case(
        "whisper-decode",
        "One token with cross-attention to 1500 frames.",
        PublicModelSizes(transformers_models.whisper_decode, "Whisper small's widths", 2, 64),
        12,
        transformers_models.NEEDS,
    ),
    _case(
        "vit-384",
        "transformers' ViT on images of 384 x 384, 577 tokens.",
        PublicModelSizes(transformers_models.vit, "ViT-B/16", 2, batch=2),
        12,
        transformers_models.NEEDS,
    ),
    _case(
        "timm-vit",
        "timm's ViT on images of 224 x 224, 197 tokens.",
        PublicModelSizes(timm_models.vit, "ViT-B/16", 2, batch=4),
        12,
        timm_models.NEEDS,
    ),
    _case(
        "timm-swin",
        "timm's Swin on images of 224 x 224, windows of 49 tokens.",
        PublicModelSizes(timm_models.swin, "Swin-T's first two stages", 2),
        2,
        timm_models.NEEDS,
    ),
    _case(
        "diffusers-unet",
        "Latents of 64 x 64: self-attention of 4096 tokens, cross-attention to 77.",
        PublicModelSizes(diffusers_models.unet, "Stable Diffusion 1.5's outer levels", 1),
        2,
        diffusers_models.NEEDS,
    ),
    _case(
        "diffusers-dit",
        "Latents of 64 x 64 in 1024 tokens, heads of 72.",
        PublicModelSizes(diffusers_models.dit, "DiT-XL/2's widths", 2),
        28,
        diffusers_models.NEEDS,
    ),
)

MODELS: tuple[Case, ...] = (*_LANGUAGE_MODELS, *_ENCODERS, *_OTHER_DATA)
"""The cases of the group."""
