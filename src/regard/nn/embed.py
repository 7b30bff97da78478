"""From ids to the vectors that the first block sees: an embedding, and positions added to it."""

from __future__ import annotations

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.arguments import check_device, check_number, check_positions, check_sizes
from regard.errors import ArgumentError, ArgumentTypeError
from regard.positions import sinusoidal
from regard.span import Positions, Span, vacant


class Sinusoidal(nn.Module):
    """`regard.positions.sinusoidal` as a module: nothing learned, no longest length.

    >>> [round(x, 4) for x in Sinusoidal(4)(Span(1, 1)).flatten().tolist()]
    [0.8415, 0.5403, 0.01, 1.0]

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5.
    """

    def __init__(self, dim: int) -> None:
        super().__init__()
        if dim < 1:
            raise ArgumentError(f"dim is {dim}; it must be at least 1")
        self.dim = dim

    def forward(self, positions: Positions) -> Float[Tensor, "B L M"]:
        """positions [B or 1, L] -> [B or 1, L, M], in fp64."""
        return sinusoidal(positions, self.dim, dtype=torch.float64)

    def extra_repr(self) -> str:
        """The size."""
        return str(self.dim)


class Embed(nn.Module):
    """ids -> scale * embedding + positions + segments, then a norm, then dropout: each part but the first may be absent.

    x_t = norm(scale * E[id_t] + P[position_t] + S[segment_t])

    Args:
        embedding: an `nn.Embedding` [V, M]; several models may share one.
        positional: a module from positions [B,L] to vectors [B or 1, L, M]: `Sinusoidal`, or `positions.Learned`.
        scale: the factor on the embedding, sqrt(M) in the first Transformer; in half precision it is rounded, too.
        segments: an `nn.Embedding` [n, M]: which of the texts of the input a token belongs to.
        norm: a module [B,T,M] -> [B,T,M].
        dropout: in training only.

    Raises:
        ArgumentError: ids are not [B,T]; or segments are given, and there is no embedding for them.

    >>> Embed(nn.Embedding(7, 4), Sinusoidal(4))(torch.tensor([[1, 2]])).shape
    torch.Size([1, 2, 4])

    Source: Vaswani et al. 2017 (arXiv 1706.03762), sections 3.4, 3.5 and 5.4; segments: Devlin et al. 2018 (arXiv 1810.04805), figure 2.
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
        """ids [B,T] at positions, 0..T-1 by default, of segment 0 by default -> [B,T,M]; the id of a slot at position -1 means nothing."""
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
        if (empty := vacant(positions, ids.device)) is not None:
            ids = ids.masked_fill(empty, 0)
        x = self.embedding(ids)
        if self.scale != 1:
            x = x * torch.full((), self.scale, dtype=x.dtype, device=x.device)
        if self.positional is not None:
            x = x + self.positional(positions).to(x)
        if self.segments is not None:
            x = x + (self.segments.weight[0] if segments is None else self.segments(segments))
        elif segments is not None:
            raise ArgumentError("segments are given, and this embedding has none; leave them out")
        return self.dropout(self.norm(x))

    def _check_ids(self, name: str, ids: Tensor) -> None:
        if not isinstance(ids, Tensor) or ids.dtype not in (torch.int64, torch.int32):
            got = ids.dtype if isinstance(ids, Tensor) else type(ids).__name__
            raise ArgumentTypeError(
                f"{name} are {got}; they must be integers [batch, length]: use .long()"
            )
        check_device(name, ids, self.embedding.weight, "the embedding")

    def extra_repr(self) -> str:
        """The scale."""
        return f"scale={self.scale:g}"
