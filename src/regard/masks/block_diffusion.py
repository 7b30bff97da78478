"""The masks of block diffusion, for sampling and for training.

Such a model denoises all tokens of a block together, after the finished blocks.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from regard.errors import ArgumentError
from regard.masks.base import Mask, Refusal, check_int
from regard.masks.tiling import Intervals
from regard.units import plural


@dataclass(frozen=True, eq=False)
class BlockCausal(Mask):
    """A query sees its own block of positions and all earlier ones: k // size <= q // size.

    Within a block, queries see later keys. With size 1 this is the causal mask.

    Args:
        size: positions per block.

    Raises:
        ArgumentError, ArgumentTypeError: size below 1 or not an int.

    >>> from regard.span import Span
    >>> BlockCausal(2).block(Span(0, 4), Span(0, 4)).int().tolist()
    [[[[1, 1, 0, 0], [1, 1, 0, 0], [1, 1, 1, 1], [1, 1, 1, 1]]]]

    Source: Arriola et al. 2025 (arXiv 2503.09573), appendix B.6, the mask M_BC.
    """

    size: int

    def __post_init__(self) -> None:
        check_int("BlockCausal size", self.size, 1, "1 is the causal mask")

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return k // size <= q // size for each pair."""
        return k // self.size <= q // self.size

    def _intervals(self, q: Tensor) -> Intervals:
        return Intervals(torch.zeros_like(q), (q // self.size + 1) * self.size)

    def refusal(self) -> Refusal:
        """Explain that the key is in a later block."""
        return Refusal(f"later block of {self.size}", "future", str(self))


@dataclass(frozen=True, eq=False)
class BlockDiffusion(Mask):
    """The mask for training a block diffusion model, on a noisy and a clean copy of each text.

    A text takes 2 * length positions: the noisy copy x_t, then the clean copy x_0. A noisy query
    sees its own noisy block, and the clean blocks before it; a clean query sees the clean blocks up
    to its own. One pass computes the loss of every block.

    A rotary embedding needs the position in the text instead, `position % length`.

    Args:
        size: positions per block.
        length: the number of tokens of the text, n; it need not be a multiple of size.

    Raises:
        ArgumentError, ArgumentTypeError: a size is no positive int, or there are too many keys.

    >>> from regard.span import Span
    >>> rows = BlockDiffusion(2, 4).block(Span(0, 8), Span(0, 8))[0, 0].int()
    >>> for row in rows[[0, 2, 4, 6]].tolist():  # the first token of each block
    ...     print(row)
    [1, 1, 0, 0, 0, 0, 0, 0]
    [0, 0, 1, 1, 1, 1, 0, 0]
    [0, 0, 0, 0, 1, 1, 0, 0]
    [0, 0, 0, 0, 1, 1, 1, 1]

    Source: Arriola et al. 2025 (arXiv 2503.09573), section 3.2 and appendix B.6.
    """

    size: int
    length: int

    def __post_init__(self) -> None:
        check_int("BlockDiffusion size", self.size, 1)
        check_int("BlockDiffusion length", self.length, 1, "the number of tokens of the text")

    def allows(self, q: Int[Tensor, "*q"], k: Int[Tensor, "*k"]) -> Bool[Tensor, "*qk"]:
        """Return the union of the masks M_BD, M_OBC and M_BC of the paper."""
        n = self.length
        q_clean, k_clean = q >= n, k >= n
        q_block, k_block = (
            torch.where(clean, x - n, x) // self.size for x, clean in ((q, q_clean), (k, k_clean))
        )
        own_block = (q_block == k_block) & (q_clean == k_clean)
        finished_blocks = (k_block < q_block) & k_clean
        inside = (q >= 0) & (q < 2 * n) & (k >= 0) & (k < 2 * n)
        return (own_block | finished_blocks) & inside

    def _intervals(self, q: Tensor) -> Intervals:
        n = self.length
        clean = q >= n
        start = torch.where(clean, q - n, q) // self.size * self.size
        stop = (start + self.size).clamp(max=n)
        empty = torch.full_like(q, n)
        outside = (q < 0) | (q >= 2 * n)
        finished = torch.where(clean, stop, start).masked_fill(outside, 0)
        starts = torch.cat([torch.where(clean | outside, empty, start), empty], -1)
        stops = torch.cat([torch.where(clean | outside, empty, stop), n + finished], -1)
        return Intervals(starts, stops)

    def refusal(self) -> Refusal:
        """Explain that the key is neither in the query's block nor in a finished one."""
        return Refusal(f"outside the blocks of {self}", "outside", str(self))

    def require(self, B: int, H: int, T: int, S: int) -> None:
        """Check that the two copies cover all keys of the call."""
        if 2 * self.length < S:
            raise ArgumentError(
                f"BlockDiffusion covers two copies of {plural(self.length, 'token')}, but there "
                f"are {plural(S, 'key')}; give length={-(-S // 2)}, the number of tokens of the "
                "text without its copy"
            )
