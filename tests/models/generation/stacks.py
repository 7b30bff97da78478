"""Small decoders of any mixers, with random weights large enough that attention is not uniform."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

from regard.caches import Cache
from regard.masks import Causal
from regard.models import Model
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, InputEmbedding, PreNorm, RMSNorm, SwiGLU, rotary_projection
from regard.positions import Rotary, Scaling
from tests.models import small

M, H, G, D, V = 24, 4, 2, 8, 300


def stack(*mixers: nn.Module, positional: nn.Module | None = None, seed: int = 0) -> Decoder:
    """Pre-norm blocks of these mixers."""
    blocks = [
        Block(mixer, SwiGLU(M, 32), PreNorm(RMSNorm(M)), PreNorm(RMSNorm(M)))  # type: ignore[arg-type]
        for mixer in mixers
    ]
    embed = InputEmbedding(nn.Embedding(V, M), positional)
    decoder = Decoder(embed, blocks, RMSNorm(M), nn.Linear(M, V, bias=False))
    small.randomize(decoder, seed)
    return decoder.eval().requires_grad_(False)


def following(scaling: Scaling, layers: int = 2) -> Decoder:
    """Rotary frequencies that follow the length, under the policy "recompute"."""

    def mixer() -> Attention:
        rotary = Rotary(D, 100.0, scaling=scaling, length="current")
        project = rotary_projection(M, H, G, D, rotary, policy="recompute")
        return Attention(project, nn.Linear(H * D, M, bias=False), mask=Causal())

    return stack(*(mixer() for _ in range(layers)))


def held(decoder: Decoder) -> Model:
    """As users hold it."""
    return Model(decoder, small.model().tokenizer, small.config(), eos_ids=())


def exact(decoder: Decoder, ids: Tensor, positions: Tensor | None = None) -> Tensor:
    """Logits of one pass without a cache, in fp64."""
    return copy.deepcopy(decoder).double()(ids, positions)


def kinds(caches: list[Cache]) -> list[str]:
    return [type(cache).__name__ for cache in caches]


def read_in_pieces(context: object, ids: Tensor, sizes: list[int]) -> Tensor:
    """The logits [B,pieces,V] behind each piece."""
    parts = [context.append(x)[:, None] for x in ids.split(sizes, 1)]  # type: ignore[attr-defined]
    return torch.cat(parts, 1)
