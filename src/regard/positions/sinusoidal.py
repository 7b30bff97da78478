"""Absolute position embeddings: sinusoidal ones and a learned table."""

from __future__ import annotations

from typing import Literal, TypeAlias, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_choice, check_number, check_positions
from regard.errors import ArgumentError
from regard.process_state import is_compiling
from regard.span import Positions, Span, as_tensor, follow_by_construction, slot_count

SinusoidalLayout: TypeAlias = Literal["interleaved", "halves", "tensor2tensor"]
LAYOUTS: tuple[str, ...] = get_args(SinusoidalLayout)


def sinusoidal(
    positions: int | Positions,
    dim: int,
    *,
    base: float = 10000.0,
    layout: SinusoidalLayout = "interleaved",
    dtype: torch.dtype = torch.float32,
) -> Float[Tensor, "*B L M"]:
    """Compute sinusoidal position embeddings, in fp64 before the cast to `dtype`.

    interleaved:    PE[p, 2i] = sin(p b^(-2i/M)), PE[p, 2i+1] = cos(same)
    halves:         the same numbers as [all sines; all cosines]
    tensor2tensor:  [sines; cosines] with exponent -i/(M/2 - 1), as in fairseq

    With an odd dim, the first two have one more sine, and the third ends in a zero.

    Args:
        positions: a length, for positions 0..length-1, or positions [B or 1, L].
        dim: the model dim M.
        base: the base b.
        layout: "interleaved", "halves" or "tensor2tensor", as above.
        dtype: the dtype of the result.

    Returns:
        The embeddings: [length, M] for a length, [B or 1, L, M] for positions.

    Raises:
        ArgumentError: length is negative, dim below 1, base not above 0, or layout unknown.
        ArgumentTypeError: positions are not integers.

    >>> [round(x, 4) for x in sinusoidal(2, 4)[1].tolist()]
    [0.8415, 0.5403, 0.01, 0.9999]

    Source: Vaswani et al. 2017 (arXiv 1706.03762), section 3.5.
    """
    if dim < 1:
        raise ArgumentError(f"dim is {dim}; it must be at least 1")
    check_number("base", base, 0, float("inf"), "above 0")
    check_choice("layout", layout, LAYOUTS)
    if isinstance(positions, int):
        return sinusoidal(Span(0, positions), dim, base=base, layout=layout, dtype=dtype)[0]
    _check_positions(positions)
    p = as_tensor(positions).to(torch.float64)
    half = dim // 2 if layout == "tensor2tensor" else (dim + 1) // 2
    i = torch.arange(half, dtype=torch.float64, device=p.device)
    exponent = i / max(half - 1, 1) if layout == "tensor2tensor" else 2 * i / dim
    angle = p[..., None] * base**-exponent  # [B, L, half]
    if layout == "interleaved":
        table = torch.stack((angle.sin(), angle.cos()), dim=-1).flatten(-2)[..., :dim]
    elif layout == "halves":
        table = torch.cat((angle.sin(), angle[..., : dim // 2].cos()), dim=-1)
    else:
        odd = angle.new_zeros(*angle.shape[:-1], dim % 2)
        table = torch.cat((angle.sin(), angle.cos(), odd), dim=-1)
    return table.to(dtype)


class LearnedPositions(nn.Module):
    """A learned vector for each position below a maximum; an empty slot gets zeros.

    y = weight[position + offset]

    Args:
        max_len: the number of positions with a vector. A larger position raises an error.
        dim: the model dim M.
        offset: the number of unused rows at the start of the table (2 in OPT).

    Raises:
        ArgumentError: a size is out of range; when called, a position is max_len or more.
        ArgumentTypeError: when called, positions are not integers.

    >>> LearnedPositions(16, 4)(Span(0, 3)).shape
    torch.Size([1, 3, 4])

    Source: Gehring et al. 2017 (arXiv 1705.03122), section 3.1.
    """

    def __init__(self, max_len: int, dim: int, *, offset: int = 0) -> None:
        super().__init__()
        if min(max_len, dim) < 1 or offset < 0:
            raise ArgumentError(
                f"LearnedPositions({max_len}, {dim}, offset={offset}): max_len and dim must be at "
                "least 1, offset at least 0"
            )
        self.max_len, self.offset = max_len, offset
        self.weight = nn.Parameter(torch.empty(max_len + offset, dim))
        nn.init.normal_(self.weight, std=0.02)

    def forward(self, positions: Positions) -> Float[Tensor, "B L M"]:
        """Return the vectors of positions.

        Args:
            positions: positions [B or 1, L].

        Returns:
            The vectors [B or 1, L, M].
        """
        _check_positions(positions)
        if isinstance(positions, Span):
            last = positions.stop - 1 if positions.length else -1
        elif is_compiling() or not positions.numel():
            last = -1
        elif not positions.is_cpu and follow_by_construction(positions):
            last = -1  # a read would wait for the device: see below
        else:
            last = int(positions.max())
        if last >= self.max_len:
            raise ArgumentError(
                f"position {last} has no vector: this table has positions 0 to {self.max_len - 1}; "
                "shorten the input, or use rotary positions"
            )
        p = as_tensor(positions, self.weight.device)
        if p.is_cpu:
            vectors = self.weight[p.clamp(min=0) + self.offset]
        else:
            # A position without a vector gets NaN, and no kernel of the device reads behind the
            # table; the NaN reaches the logits, where the one read of a step refuses it.
            vectors = self.weight[p.clamp(0, self.max_len - 1) + self.offset]
            vectors = vectors.masked_fill((p >= self.max_len)[..., None], torch.nan)
        return vectors.masked_fill((p < 0)[..., None], 0)

    def extra_repr(self) -> str:
        """Return the sizes of the table and the offset."""
        return f"{self.max_len}, {self.weight.shape[1]}, offset={self.offset}"


def _check_positions(positions: Positions) -> None:
    """Check that positions are a `Span` or integers [B or 1, L]."""
    rows = positions.shape[0] if isinstance(positions, Tensor) and positions.ndim else 1
    is_known = isinstance(positions, Span) or (isinstance(positions, Tensor) and positions.ndim)
    check_positions("positions", positions, rows, slot_count(positions) if is_known else 0)
