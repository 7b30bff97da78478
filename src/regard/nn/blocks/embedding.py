"""Input embeddings of tokens and of log-mel features, added positions, and capped logits."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.argument_checks import check_device, check_number, check_positions, check_sizes
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.weights import Linear
from regard.positions import sinusoidal
from regard.positions.sinusoidal import SinusoidalLayout
from regard.span import Positions, Span, find_empty_slots


class SinusoidalPositions(nn.Module):
    """Sinusoidal position embeddings as a module, without parameters or a maximum length.

    Args:
        dim: the model dim M.
        layout: the order of sines and cosines, as in `regard.positions.sinusoidal`.

    Raises:
        ArgumentError: dim is less than 1, or layout is unknown.

    >>> [round(x, 4) for x in SinusoidalPositions(4)(Span(1, 1)).flatten().tolist()]
    [0.8415, 0.5403, 0.01, 1.0]

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5.
    """

    def __init__(self, dim: int, *, layout: SinusoidalLayout = "interleaved") -> None:
        super().__init__()
        sinusoidal(0, dim, layout=layout)  # checks both
        self.dim, self.layout = dim, layout

    def forward(self, positions: Positions) -> Float[Tensor, "B L M"]:
        """Return the vectors [B or 1, L, M] of positions [B or 1, L], in fp64."""
        return sinusoidal(positions, self.dim, layout=self.layout, dtype=torch.float64)

    def extra_repr(self) -> str:
        """Return the model dim, which is the size of a vector, and the layout if it is another."""
        return f"{self.dim}" + (f", layout={self.layout!r}" * (self.layout != "interleaved"))


def without_empty_slots(ids: Tensor, positions: Positions) -> Tensor:
    """Return token ids [B,T] with 0 in the slots that hold no token."""
    empty = find_empty_slots(positions, ids.device)
    return ids if empty is None else ids.masked_fill(empty, 0)


class InputEmbedding(nn.Module):
    """Token, position and segment embeddings, then a norm and dropout; only the first are required.

    x_t = norm(scale * E[id_t] + P[position_t] + S[segment_t])

    Args:
        embedding: an `nn.Embedding` [V, M]; several models may share one.
        positional: a module from positions [B,L] to vectors [B or 1, L, M], such as
            `SinusoidalPositions` or `positions.LearnedPositions`; None adds nothing.
        scale: the factor on the token embedding, sqrt(M) in the first Transformer.
        segments: an `nn.Embedding` [n, M] of segments (BERT's token types); None adds nothing.
        norm: a module [B,T,M] -> [B,T,M]; None applies none.
        dropout: the dropout probability, in training only.

    Raises:
        ArgumentError: scale or dropout is out of range; when called, ids are not [B,T], or segments
            are passed to a model without an embedding for them.

    >>> InputEmbedding(nn.Embedding(7, 4), SinusoidalPositions(4))(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 4])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), sections 3.4, 3.5 and 5.4; segments: Devlin et
    al. 2018 (arXiv 1810.04805), figure 2.
    """

    def __init__(
        self,
        embedding: nn.Embedding,
        positional: nn.Module | None = None,
        *,
        scale: float = 1.0,
        segments: nn.Embedding | None = None,
        norm: nn.Module | None = None,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        check_number("scale", scale, float("-inf"), float("inf"), "finite")
        check_number("dropout", dropout, -1e-300, 1, "at least 0 and less than 1")
        self.embedding, self.positional, self.scale = embedding, positional, scale
        self.segments, self.norm = segments, norm if norm is not None else nn.Identity()
        self.dropout = nn.Dropout(dropout)

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Positions | None = None,
        segments: Int[Tensor, "B T"] | None = None,
    ) -> Float[Tensor, "B T M"]:
        """Embed token ids.

        Args:
            ids: token ids [B,T]; the id at position -1 (an empty slot) is ignored.
            positions: positions of the tokens; 0..T-1 by default.
            segments: segment ids [B,T]; 0 by default.

        Returns:
            The embeddings [B,T,M].
        """
        self._check_ids("ids", ids)
        if ids.ndim != 2:
            raise ArgumentError(
                f"ids are {tuple(ids.shape)}; they must be [batch, length]: use ids[None]"
            )
        positions = Span(0, ids.shape[1]) if positions is None else positions
        check_positions("positions", positions, *ids.shape)
        if segments is not None:
            self._check_ids("segments", segments)
            check_sizes(ids=(ids, "B T"), segments=(segments, "B T"))
        x = self.embedding(without_empty_slots(ids, positions))
        if self.scale != 1:
            x = x * torch.full((), self.scale, dtype=x.dtype, device=x.device)
        if self.positional is not None:
            x = x + self.positional(positions).to(x)
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        elif segments is not None:
            raise ArgumentError(
                "segments are given, but this model has no segment embedding; leave them out"
            )
        out: Tensor = self.dropout(self.norm(x))
        return out

    def _check_ids(self, name: str, ids: Tensor) -> None:
        """Check that ids are an integer tensor on the device of the embedding."""
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise ArgumentTypeError(
                f"{name} are {got}; they must be integers [batch, length]: use .long()"
            )
        stored = getattr(self.embedding, "stored_weight", None)
        # reading the weight of an embedding that is stored in fewer bits would dequantize all rows
        like = self.embedding.weight if stored is None else next(iter(stored.tensors().values()))
        check_device(name, ids, like, "the embedding")

    def extra_repr(self) -> str:
        """Return the factor on the token embedding."""
        return f"scale={self.scale:g}"


class CappedLogits(Linear):
    """An output head whose logits are softly capped.

    logits = c tanh((W x) / c)

    Args:
        dim: the model dim M.
        vocabulary: the number of logits V.
        cap: the cap c, above 0; logits stay within (-c, c).

    Raises:
        ArgumentError: cap is not above 0.

    >>> head = CappedLogits(2, 1, cap=30.0)
    >>> torch.nn.init.constant_(head.weight, 1e6)[0, 0].item(), head(torch.ones(2)).tolist()
    (1000000.0, [30.0])

    Source: Gemma Team 2024 (arXiv 2408.00118), section 2.
    """

    def __init__(self, dim: int, vocabulary: int, *, cap: float) -> None:
        check_number("cap", cap, 0, float("inf"), "above 0")
        super().__init__(dim, vocabulary, bias=False)
        self.cap = cap

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L V"]:
        """Return the logits [..., V] of hidden states [..., M]."""
        return self.cap * torch.tanh(super().forward(x) / self.cap)

    def extra_repr(self) -> str:
        """Return the sizes of the matrix and the cap."""
        return f"{super().extra_repr()}, cap={self.cap:g}"


class ScaledLogits(Linear):
    """An output head that scales the hidden states, for a weight tied to an embedding.

    logits = W (scale x)

    Source: Raffel et al. 2020 (arXiv 1910.10683), the released code.
    """

    def __init__(self, dim: int, vocabulary: int, *, scale: float) -> None:
        check_number("scale", scale, float("-inf"), float("inf"), "finite")
        super().__init__(dim, vocabulary, bias=False)
        self.scale = scale

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L V"]:
        """Return the logits [..., V] of hidden states [..., M]."""
        return super().forward(x * self.scale)

    def extra_repr(self) -> str:
        """Return the sizes of the matrix and the factor."""
        return f"{super().extra_repr()}, scale={self.scale:g}"


class LogMelEmbedding(nn.Module):
    """The input embedding of Whisper's encoder: two convolutions over time, of L to (L + 1) // 2.

    x = gelu(conv2(gelu(conv1(features)))) + P[position]
    Source: Radford et al. 2022 (arXiv 2212.04356), section 2.2.
    """

    def __init__(self, bins: int, dim: int, positional: nn.Module) -> None:
        super().__init__()
        self.bins = bins
        self.conv1 = nn.Conv1d(bins, dim, 3, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.positional = positional

    @staticmethod
    def states(features: Float[Tensor, "B F L"]) -> int:
        """Return the number of states that become of features [B, F, L]: (L + 1) // 2."""
        return (features.shape[-1] + 1) // 2

    def forward(
        self, features: Float[Tensor, "B F L"], positions: Positions | None = None
    ) -> Float[Tensor, "B S M"]:
        """Embed log-mel features as encoder states."""
        if not isinstance(features, Tensor) or not features.is_floating_point():
            got = getattr(features, "dtype", type(features).__name__)
            raise ArgumentTypeError(
                f"features are {got}; they must be floating-point log-mel features "
                "[batch, bins, frames]"
            )
        if features.ndim != 3 or features.shape[1] != self.bins or not features.shape[2]:
            raise ArgumentError(
                f"features are {tuple(features.shape)}; they must be [batch, {self.bins}, frames], "
                "with at least one frame"
            )
        S = self.states(features)
        positions = Span(0, S) if positions is None else positions
        check_positions("positions", positions, features.shape[0], S)
        x = F.gelu(self.conv2(F.gelu(self.conv1(features)))).mT
        if (empty := find_empty_slots(positions, x.device)) is not None:
            x = x.masked_fill(empty[..., None], 0)
        out: Tensor = x + self.positional(positions).to(x)
        return out
