"""Residual paths of n streams of width M, which each sublayer reads as one and writes to all:
AltUp of Gemma 3n, the hyper-connections (mHC) of DeepSeek-V4, and the gated streams of Qwen4-Exp.

A state of the streams, and of the embeddings for the layers of AltUp, is one tensor [B, T, n M + L
P].
"""

from __future__ import annotations

from typing import NamedTuple, cast

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.argument_checks import check_positive_sizes
from regard.caches import Cache
from regard.nn.blocks.blocks import Block, Residual, SandwichNorm, Sublayer
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


class StreamsEmbedding(InputEmbedding):
    """The input embedding of a decoder with n streams, which all begin with the embedding."""

    def __init__(self, embedding: nn.Embedding, streams: int) -> None:
        super().__init__(embedding)
        self.streams = streams

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Positions | None = None,
        segments: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T W"]:
        """Return the state [B, T, n M] of ids [B, T], as in `InputEmbedding.forward`."""
        return super().forward(ids, positions, segments).repeat(1, 1, self.streams)


class StreamMixes(nn.Module):
    """The numbers by which streams are mixed, from the streams themselves: scale W norm(x) + base.

    Args:
        dim: the model dim M.
        streams: the number of streams n.
        sizes: how many numbers of each kind a token has; each kind has its own scale.
        eps: the epsilon of the norm, which has no weight.
    """

    def __init__(self, dim: int, streams: int, sizes: tuple[int, ...], *, eps: float) -> None:
        super().__init__()
        check_positive_sizes(type(self).__name__, dim=dim, streams=streams)
        self.streams, self.sizes, self.eps = streams, sizes, eps
        self.linear = nn.Linear(streams * dim, sum(sizes), bias=False)
        self.base = nn.Parameter(torch.zeros(sum(sizes)))
        self.scale = nn.Parameter(torch.ones(len(sizes)))

    def forward(self, x: Float[Tensor, "B T W"]) -> tuple[Tensor, ...]:
        """Return the numbers of each kind [B, T, size] for a state x [B, T, n M], in fp32."""
        dtype = torch.promote_types(x.dtype, torch.float32)
        with torch.autocast(x.device.type, enabled=False):
            wide = x.to(dtype)
            wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
            mixes = F.linear(wide, self.linear.weight.to(dtype))
            kinds = zip(
                mixes.split_with_sizes(self.sizes, -1),
                self.scale.to(dtype).unbind(),
                self.base.to(dtype).split_with_sizes(self.sizes),
                strict=True,
            )
            return tuple(part * scale + base for part, scale, base in kinds)

    def join(self, x: Tensor, shares: Tensor) -> Tensor:
        """Return the sum of the streams in x [B, T, n M], each times its share [B, T, n]."""
        streams = x.unflatten(-1, (self.streams, -1))  # [B,T,n M] -> [B,T,n,M]
        y: Tensor = (shares[..., None] * streams).sum(-2).to(x.dtype)
        return y


def sinkhorn(x: Float[Tensor, "*L n n"], iterations: int, eps: float) -> Float[Tensor, "*L n n"]:
    """Divide a positive matrix by the sums of its columns, and then by those of rows and columns in
    turn, until both are near 1. Source: Sinkhorn and Knopp 1967.
    """
    x = x / (x.sum(-2, keepdim=True) + eps)
    for _ in range(iterations - 1):
        x = x / (x.sum(-1, keepdim=True) + eps)
        x = x / (x.sum(-2, keepdim=True) + eps)
    return x


class HyperConnection(Residual):
    """A residual path of n streams around a sublayer, with weights that depend on the token.

    y = sublayer(norm(sum_i a_i x_i));  x_i <- b_i y + sum_j C_ji x_j
    a = sigmoid(.) + eps,  b = 2 sigmoid(.),  C = sinkhorn(softmax(.) + eps), from `StreamMixes`

    Args:
        norm: the norm before the sublayer, of the model dim.
        dim: the model dim M.
        streams: the number of streams n.
        iterations: how often `sinkhorn` divides.
        eps: added to a and C, and to the sums of `sinkhorn`.
        norm_eps: the epsilon of the norm of `StreamMixes`.

    Source: Xie et al. 2026 (mHC); the code of DeepSeek-V4 in transformers.
    """

    def __init__(
        self,
        norm: nn.Module,
        dim: int,
        streams: int,
        *,
        iterations: int = 20,
        eps: float = 1e-6,
        norm_eps: float = 1e-6,
    ) -> None:
        super().__init__(norm)
        check_positive_sizes("HyperConnection", iterations=iterations)
        sizes = (streams, streams, streams * streams)
        self.mixes = StreamMixes(dim, streams, sizes, eps=norm_eps)
        self.iterations, self.eps = iterations, eps

    def forward(self, x: Float[Tensor, "B T W"], sublayer: Sublayer) -> Float[Tensor, "B T W"]:
        """Apply the sublayer to one stream of a state x [B, T, n M], and mix it into all."""
        n = self.mixes.streams
        read, write, mix = self.mixes(x)
        y = sublayer(tap("norm", self.norm(self.mixes.join(x, read.sigmoid() + self.eps))))
        square = mix.unflatten(-1, (n, n)).softmax(-1) + self.eps
        square = sinkhorn(square, self.iterations, self.eps).to(x.dtype)
        mixed = square.mT @ x.unflatten(-1, (n, -1))  # [B,T,n,M]
        added = (2 * write.sigmoid()).to(x.dtype)[..., None] * self.apply_dropout(y)[..., None, :]
        out: Tensor = (added + mixed).flatten(-2)
        return out

    def extra_repr(self) -> str:
        """Return the number of streams and of iterations."""
        return f"{self.mixes.streams} streams, iterations={self.iterations}"


class StreamsMerge(nn.Module):
    """The end of a decoder with n streams: norm(sum_i a_i x_i), a = sigmoid(.) + eps.

    Source: the code of DeepSeek-V4 in transformers.
    """

    def __init__(
        self, norm: nn.Module, dim: int, streams: int, *, eps: float = 1e-6, norm_eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.norm, self.eps = norm, eps
        self.mixes = StreamMixes(dim, streams, (streams,), eps=norm_eps)

    def forward(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T M"]:
        """Return the states [B, T, M] of the streams in x [B, T, n M]."""
        (read,) = self.mixes(x)
        y: Tensor = self.norm(self.mixes.join(x, read.sigmoid() + self.eps))
        return y


class StreamNorm(nn.Module):
    """An `OffsetRMSNorm` of each of n streams, with weights of its own.

    Source: the code of Qwen4-Exp in transformers, `Qwen4ExpTextRMSNorm` with `group_size`.
    """

    def __init__(self, dim: int, streams: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        check_positive_sizes("StreamNorm", dim=dim, streams=streams)
        self.weight = nn.Parameter(torch.zeros(streams * dim))
        self.streams, self.eps = streams, eps

    def forward(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T W"]:
        """Normalize each stream of a state x [B, T, n M]."""
        weight = self.weight.unflatten(0, (self.streams, -1))  # [n M] -> [n,M]
        streams = x.unflatten(-1, (self.streams, -1))  # [B,T,n M] -> [B,T,n,M]
        wide = streams.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        y: Tensor = (wide * (1 + weight.to(wide.dtype))).to(x.dtype).flatten(-2)
        return y


class StreamGate(nn.Module):
    """One state from n streams, whose channels have gates of low rank.

    n = norm(x);  y = mean_i sigmoid(W_u silu(W_d n / count))_i * n_i

    It is what a sublayer of `GatedStreams` reads, and the end of a decoder with such streams.

    Args:
        dim: the model dim M.
        streams: the number of streams.
        rank: the rank of the gates.
        eps: the epsilon of the norm.

    Source: the code of Qwen4-Exp in transformers, `Qwen4ExpTextGatedResidual`.
    """

    def __init__(self, dim: int, streams: int, rank: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        self.norm, self.streams = StreamNorm(dim, streams, eps=eps), streams
        self.down = Linear(streams * dim, rank, bias=False)
        self.up = Linear(rank, streams * dim, bias=False)

    def read(self, x: Float[Tensor, "B T W"]) -> tuple[Tensor, Tensor]:
        """Return the one state [B, T, M], and the normed streams [B, T, n M]."""
        normed = self.norm(x)
        gates = self.up(F.silu(self.down(normed) / self.streams)).sigmoid()
        return (gates * normed).unflatten(-1, (self.streams, -1)).mean(-2), normed

    def forward(self, x: Float[Tensor, "B T W"]) -> Float[Tensor, "B T M"]:
        """Return one state [B, T, M] of the streams in x [B, T, n M]."""
        return self.read(x)[0]


class GatedStreams(Residual):
    """A residual path of n streams around a sublayer, which reads a `StreamGate` of them.

    y = sublayer(gate(x));  x_i <- x_i + 2 sigmoid(W_b norm(x) / count)_i y

    Source: the code of Qwen4-Exp in transformers, `Qwen4ExpTextGatedResidual`.
    """

    def __init__(self, dim: int, streams: int, rank: int, *, eps: float = 1e-6) -> None:
        super().__init__(StreamGate(dim, streams, rank, eps=eps))
        self.write = Linear(streams * dim, streams, bias=False)

    def forward(self, x: Float[Tensor, "B T W"], sublayer: Sublayer) -> Float[Tensor, "B T W"]:
        """Apply the sublayer to one state of x [B, T, n M], and add it to each stream."""
        gate = cast("StreamGate", self.norm)
        read, normed = gate.read(x)
        y = self.apply_dropout(sublayer(tap("norm", read)))
        shares = 2 * (self.write(normed) / gate.streams).sigmoid()  # [B,T,n]
        added: Tensor = (shares[..., None] * y[..., None, :]).flatten(-2)
        return x + added
