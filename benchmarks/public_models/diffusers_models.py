"""Denoising models of diffusers: the UNet of Stable Diffusion, and a DiT."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.problems.public_model import BuiltModel, PublicModelSizes

NEEDS = ("diffusers",)


def unet(sizes: PublicModelSizes) -> BuiltModel:
    """Build the two outer levels of Stable Diffusion 1.5's UNet: 64 x 64 latents, with
    self-attention and with cross-attention to 77 tokens of text.
    """
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


def dit(sizes: PublicModelSizes) -> BuiltModel:
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
