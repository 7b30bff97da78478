"""Image models of timm: a ViT, and a Swin with shifted windows."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from benchmarks.problems.public_model import BuiltModel, PublicModelSizes

NEEDS = ("timm",)


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


def vit(sizes: PublicModelSizes, *, side: int = 224) -> BuiltModel:
    """Build a ViT-B/16.

    Args:
        sizes: the sizes.
        side: the height and the width of an image in pixels.
    """
    from timm.models.vision_transformer import VisionTransformer

    side = 48 if sizes.narrow else side
    dim, heads = (32, 4) if sizes.narrow else (768, 12)
    model = VisionTransformer(
        img_size=side, patch_size=16, embed_dim=dim, num_heads=heads, depth=sizes.layers
    )
    return _features(model, side, sizes.batch)


def swin(sizes: PublicModelSizes) -> BuiltModel:
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
