"""Models made of torch's own modules: `nn.Transformer`, its encoder, and a nanoGPT."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.problems.public_model import BuiltModel, PublicModelSizes


class CausalSelfAttention(nn.Module):
    """Causal self-attention as small GPT implementations write it: one map for q, k and v.

    Args:
        dim: the width of the model.
        heads: the number of heads.
    """

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
    """Attention and a feed-forward network, each behind a layer norm and with a residual path.

    Args:
        dim: the width of the model.
        heads: the number of heads.
    """

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
    """A small GPT: embeddings of tokens and positions, blocks, and a layer norm.

    Args:
        vocabulary: the number of tokens.
        length: the largest number of positions.
        dim, heads, layers: the sizes of the blocks.
    """

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
    """Return which slots `[B, T]` of a right-padded batch hold tokens.

    Row i of the batch has (i + 1) T / B tokens, so that half of all slots are padding.
    """
    lengths = torch.arange(1, batch + 1) * tokens // batch
    return torch.arange(tokens) < lengths[:, None]


def encoder(sizes: PublicModelSizes, *, padded: bool = False, nested: bool = False) -> BuiltModel:
    """Build an `nn.TransformerEncoder` of BERT-base's widths.

    Args:
        sizes: the sizes.
        padded: whether the batch is padded, with `src_key_padding_mask`.
        nested: whether torch may convert the padded batch to a nested tensor.
    """
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
    """Build an `nn.Transformer` of the published base widths: an encoder, and a decoder with a
    causal mask.
    """
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
