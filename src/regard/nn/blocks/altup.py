"""Alternating updates (AltUp) of Gemma 3n: of n residual streams of width M, a block computes one
and predicts the others.

A state of the streams and of the embeddings for the layers is one tensor [B, T, n M + L P].
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.caches import Cache
from regard.nn.blocks.blocks import Block, SandwichNorm
from regard.nn.blocks.embedding import InputEmbedding
from regard.nn.blocks.norms import RMSNorm
from regard.nn.mixer import Mixer
from regard.nn.weights import Linear
from regard.span import Positions, Span, find_empty_slots
from regard.tracing import is_tracing, named_scope, tap


class AltUpSizes(NamedTuple):
    """The sizes of a decoder with alternating updates."""

    dim: int
    streams: int
    layers: int
    layer_dim: int

    def split(self, x: Float[Tensor, "B T W"]) -> tuple[Tensor, Tensor]:
        """Return the streams [n, B, T, M] and the layers' embeddings [B, T, L P] of a state."""
        width = self.streams * self.dim
        streams = x[..., :width].unflatten(-1, (self.streams, self.dim))  # [B,T,n M] -> [B,T,n,M]
        return streams.movedim(-2, 0), x[..., width:]

    def join(self, streams: Float[Tensor, "n B T M"], for_layers: Tensor) -> Tensor:
        """Return the state [B, T, n M + L P] of streams and embeddings for the layers."""
        return torch.cat([streams.movedim(0, -2).flatten(-2), for_layers], -1)


def _at_magnitude(x: Tensor, like: Tensor) -> Tensor:
    """Return x with the root mean square of another tensor."""
    target = like.square().mean(-1, keepdim=True).sqrt()
    return x * target / x.square().mean(-1, keepdim=True).clamp(min=1e-5).sqrt()


class AltUpEmbedding(InputEmbedding):
    """The input embedding of a decoder with alternating updates.

    e = sqrt(M) E[id];  stream_0 = e;  stream_j = W_j e at the magnitude of e
    layer_l = (norm(W e / sqrt(M))_l + sqrt(P) E'[id]_l) / sqrt(2)

    Source: Gemma 3n, the released code; streams: Baykal et al. 2023 (arXiv 2301.13310).
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        layer_embedding: nn.Embedding,
        sizes: AltUpSizes,
        *,
        eps: float = 1e-6,
    ) -> None:
        super().__init__(embedding, scale=sizes.dim**0.5)
        M, L, P = sizes.dim, sizes.layers, sizes.layer_dim
        self.sizes, self.layer_embedding = sizes, layer_embedding
        self.to_streams = nn.ModuleList(Linear(M, M, bias=False) for _ in range(sizes.streams - 1))
        self.to_layers = Linear(M, L * P, bias=False)
        self.layer_norm = RMSNorm(P, eps=eps)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Positions | None = None,
        segments: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T W"]:
        """Return the state [B, T, n M + L P] of ids [B, T], as in `InputEmbedding.forward`."""
        e, P = super().forward(ids, positions, segments), self.sizes.layer_dim
        streams = [e, *(_at_magnitude(part(e), e) for part in self.to_streams)]
        outside = ids >= self.layer_embedding.num_embeddings
        empty = find_empty_slots(Span(0, 1) if positions is None else positions, ids.device)
        known = ids.masked_fill(outside if empty is None else outside | empty, 0)
        factor = torch.full((), P**0.5, dtype=e.dtype, device=e.device)
        own = (self.layer_embedding(known) * factor).unflatten(-1, (-1, P))
        shared = (self.to_layers(e) * self.sizes.dim**-0.5).unflatten(-1, (-1, P))
        for_layers = (self.layer_norm(shared) + own) * 0.5**0.5
        return self.sizes.join(torch.stack(streams), for_layers.flatten(-2))


class AltUpMerge(nn.Module):
    """The end of a decoder with alternating updates: the mean of its streams, and a norm.

    stream_0

    Source: Gemma 3n, the released code.
    """

    def __init__(self, sizes: AltUpSizes, *, eps: float = 1e-6) -> None:
        super().__init__()
        M, self.sizes = sizes.dim, sizes
        self.from_streams = nn.ModuleList(
            Linear(M, M, bias=False) for _ in range(sizes.streams - 1)
        )
        self.norm = RMSNorm(M, eps=eps)

    def forward(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T M"]:
        """Return the states [B, T, M] of the streams in x [B, T, n M + L P]."""
        first, *others = self.sizes.split(x)[0]
        parts = zip(self.from_streams, others, strict=True)
        merged = [first, *(_at_magnitude(part(stream), first) for part, stream in parts)]
        y: Tensor = self.norm(torch.stack(merged).mean(0))
        return y


class AltUp(nn.Module):
    """Alternating updates around a block, which computes only the first of n streams.

    r(x) = tanh(W_r norm(x) / M)
    predict:  p_i = x_i + sum_j C(r(x_0))_ij x_j
    correct:  y_i = p_i + (1 + c(r(b))_i) (b - p_0), where b is what the block made of p_0

    Source: Baykal et al. 2023 (arXiv 2301.13310), algorithm 1; the coefficients that depend on the
    token are those of Gemma 3n's released code.
    """

    def __init__(self, dim: int, streams: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.router = Linear(dim, streams, bias=False)
        self.router_norm = RMSNorm(dim, eps=eps)
        self.prediction = Linear(streams, streams * streams, bias=False)
        self.correction = Linear(streams, streams, bias=False)

    def _route(self, x: Tensor) -> Tensor:
        routed: Tensor = self.router(self.router_norm(x) / x.shape[-1])
        return torch.tanh(routed.float()).type_as(x)

    def predict(self, streams: Float[Tensor, "n B T M"]) -> Float[Tensor, "n B T M"]:
        """Predict the streams after the block from those before it."""
        n = streams.shape[0]
        maps = self.prediction(self._route(streams[0])).unflatten(-1, (n, n))
        return streams + torch.einsum("btij,jbtm->ibtm", maps, streams)

    def correct(
        self, predicted: Float[Tensor, "n B T M"], computed: Float[Tensor, "B T M"]
    ) -> Float[Tensor, "n B T M"]:
        """Correct the predictions by what the block computed."""
        factors = self.correction(self._route(computed)) + 1
        corrected: Tensor = predicted + factors.movedim(-1, 0)[..., None] * (
            computed - predicted[0]
        )
        return corrected


class LowRankResidual(nn.Module):
    """A learned low-rank branch of the residual path (LAuReL): x + norm(B A x).

    Source: Menghani et al. 2024 (arXiv 2411.07501), section 2.1, "LAuReL-LR".
    """

    def __init__(self, dim: int, rank: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.left, self.right = Linear(dim, rank, bias=False), Linear(rank, dim, bias=False)
        self.norm = RMSNorm(dim, eps=eps)

    def forward(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B T M"]:
        """Return x + norm(B A x) for x [B, T, M]."""
        y: Tensor = x + self.norm(self.right(self.left(x)))
        return y


class LayerInput(nn.Module):
    """What a block adds to all streams but the first, from the token's embedding for this layer.

    y = norm(W_2 (gelu(W_1 (s * x)) * e)), where s is a learned vector and e the embedding

    Source: Gemma 3n, the released code ("per-layer embeddings").
    """

    def __init__(self, dim: int, layer_dim: int, *, scaled: bool = True, eps: float = 1e-6) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim)) if scaled else None
        self.gate, self.project = (
            Linear(dim, layer_dim, bias=False),
            Linear(layer_dim, dim, bias=False),
        )
        self.norm = RMSNorm(dim, eps=eps)
        self.activation = nn.GELU("tanh")

    def forward(
        self, x: Float[Tensor, "B T M"], embedded: Float[Tensor, "B T P"]
    ) -> Float[Tensor, "B T M"]:
        """Return the addition [B, T, M] for the first stream x and the embedding [B, T, P]."""
        x = x if self.scale is None else x * self.scale
        y: Tensor = self.norm(self.project(self.activation(self.gate(x)) * embedded))
        return y


class AltUpBlock(Block):
    """A block of Gemma 3n: attention and feed-forward on the first stream, beside a low-rank
    branch.

    p = predict(streams);  n = norm(p_0);  h = (p_0 + after(attention(n)) + laurel(n)) / sqrt(2)
    streams = correct(p, h + after(feed_forward(norm(h))));  streams_j += layer_input for j > 0

    Source: Gemma 3n, the released code.
    """

    def __init__(
        self,
        attention: Mixer,
        feed_forward: nn.Module,
        attention_residual: SandwichNorm,
        feed_forward_residual: SandwichNorm,
        *,
        altup: AltUp,
        laurel: LowRankResidual,
        layer_input: LayerInput,
        sizes: AltUpSizes,
        index: int,
    ) -> None:
        super().__init__(attention, feed_forward, attention_residual, feed_forward_residual)
        self.altup, self.laurel, self.layer_input = altup, laurel, layer_input
        self.sizes, self.index = sizes, index

    def forward(
        self,
        x: Float[Tensor, "B T W"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T W"]:
        """Apply the block to a state [B, T, n M + L P]; the arguments are those of `Block`."""
        streams, for_layers = self.sizes.split(x)
        predicted = self.altup.predict(streams)
        around = cast("SandwichNorm", self.attention_residual)
        with named_scope("attention"):
            normed = tap("norm", around.norm(predicted[0]))
            mixed = self._tapped_attention(positions, cache, backend)(normed)
            with named_scope("after"):
                mixed = tap("norm", around.after(mixed))
            mixed = around.apply_dropout(mixed)
        h = (predicted[0] + mixed + self.laurel(normed)) / 2**0.5
        with named_scope("mlp"):
            h = self.feed_forward_residual(h, self._tapped_feed_forward)
        corrected = self.altup.correct(predicted, h)
        P = self.sizes.layer_dim
        embedded = for_layers[..., self.index * P : (self.index + 1) * P]
        added = self.layer_input(corrected[0], embedded)
        streams = torch.cat([corrected[:1], corrected[1:] + added])
        return tap("residual", self.sizes.join(streams, for_layers))


class LayerInputBlock(Block):
    """A block of Gemma 4: what a `Block` computes, plus a layer input, times a stored number.

    h = Block(x);  y = scale (h + norm(W_2 (gelu(W_1 h) * e))), where e is the layer's embedding

    A state is one stream and the embeddings for the layers [B, T, M + L P], or the stream alone
    where there is no layer input.

    Source: Gemma 4, the released code.
    """

    def __init__(
        self,
        attention: Mixer,
        feed_forward: nn.Module,
        attention_residual: SandwichNorm,
        feed_forward_residual: SandwichNorm,
        *,
        layer_input: LayerInput | None,
        sizes: AltUpSizes,
        index: int,
    ) -> None:
        super().__init__(attention, feed_forward, attention_residual, feed_forward_residual)
        self.layer_input, self.sizes, self.index = layer_input, sizes, index
        self.scale = nn.Parameter(torch.ones(1), requires_grad=False)

    def forward(
        self,
        x: Float[Tensor, "B T W"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T W"]:
        """Apply the block to a state [B, T, M + L P]; the arguments are those of `Block`."""
        M, P = self.sizes.dim, self.sizes.layer_dim
        sublayers = self._traced_sublayers if is_tracing() else self._plain_forward
        h = sublayers(x[..., :M], positions, cache, backend)
        if self.layer_input is None:
            return tap("residual", h * self.scale)
        start = M + self.index * P
        h = h + self.layer_input(h, x[..., start : start + P])
        return tap("residual", torch.cat([h * self.scale, x[..., M:]], -1))
