"""The arrangement of keys in blocks of positions, and the choice of the best blocks.

A slot is an index along the dimension S of the keys; its position is -1 if it is empty.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor

from regard.process_state import is_compiling
from regard.span import Positions, Span, as_tensor

MAX_CHUNK_BYTES = 2**27
"""The largest size in bytes of the selection scores of one chunk of queries."""


@dataclass(frozen=True, eq=False)
class BlockLayout:
    """The arrangement of slots in the order of their positions, in blocks of `size` positions.

    Block n has the positions n size to (n + 1) size - 1 of every row, whatever the padding. Index i
    of row b stands for the position first[b] * size + i.

    Args:
        size: the number of positions per block.
        blocks: N, the number of blocks in the arrangement, at least one.
        first: the number of the first of these blocks in each row, int64 `[B or 1]`.
        occupied: which indices have a token, bool `[B or 1, N * size]`.
        source: the slot of each index, int64 `[B or 1, N * size]`; None if slots are in order.
        _left: where `source` is None, the number of indices before the first slot.
    """

    size: int
    blocks: int
    first: Int[Tensor, " B"]
    occupied: Bool[Tensor, "B L"]
    source: Int[Tensor, "B L"] | None
    _left: int = 0

    def to_position_order(self, x: Float[Tensor, "B n S d"]) -> Float[Tensor, "B n L d"]:
        """Arrange one vector per slot in the order of the positions.

        Args:
            x: one vector per slot, `[B, n, S, d]`.

        Returns:
            `[B, n, N * size, d]`, with 0 where there is no token.
        """
        L, (B, n, S, d) = self.blocks * self.size, x.shape
        if self.source is None:
            return F.pad(x, (0, 0, self._left, L - S - self._left))
        if S == 0:
            return x.new_zeros(B, n, L, d)
        index = self.source[:, None, :, None].expand(B, n, L, d)
        return x.gather(2, index).masked_fill(~self.occupied[:, None, :, None], 0)

    def to_blocks(self, x: Float[Tensor, "B n S d"]) -> Float[Tensor, "B n N size d"]:
        """Arrange one vector per slot in blocks of consecutive positions.

        Args:
            x: one vector per slot, `[B, n, S, d]`.

        Returns:
            `[B, n, N, size, d]`, with 0 where there is no token.
        """
        return torch.unflatten(self.to_position_order(x), 2, (self.blocks, self.size))

    @property
    def token_counts(self) -> Int[Tensor, "B N"]:
        """The number of tokens in each block, `[B or 1, N]`."""
        return torch.unflatten(self.occupied, 1, (self.blocks, self.size)).sum(-1)

    @property
    def block_numbers(self) -> Int[Tensor, "B N"]:
        """The number of each block, counted from position 0, `[B or 1, N]`."""
        return self.first[:, None] + torch.arange(self.blocks, device=self.first.device)

    def block_of(self, positions: Positions) -> Int[Tensor, "B T"]:
        """Return the number of the block that contains each position.

        Args:
            positions: the positions, for example of queries.

        Returns:
            The block numbers `[B or 1, T]`; -1 for an empty slot.
        """
        q = as_tensor(positions, self.first.device)
        return torch.where(q >= 0, q.long() // self.size, -1)


def block_layout(
    positions: Positions, size: int, device: torch.device | str | None = None
) -> BlockLayout:
    """Arrange slots at the given positions in blocks of `size` positions.

    For positions in a tensor the largest is read from the device. A compiled graph cannot read it:
    there the positions of a row must be consecutive.

    Args:
        positions: the position of each slot.
        size: the number of positions per block.
        device: the device of the layout; None: that of the positions.

    Returns:
        The layout.

    >>> x = torch.tensor([3.0, 9.0, 2.0, 5.0])[None, None, :, None]
    >>> block_layout(torch.tensor([[3, -1, 2, 5]]), 2).to_blocks(x).flatten()
    tensor([2., 3., 0., 5.])
    """
    if isinstance(positions, Span) and positions.start >= 0:
        return _span_layout(positions, size, device)
    tensor = as_tensor(positions, device).long()
    rows, S = tensor.shape
    is_token = tensor >= 0
    no_position = 2**62
    smallest = F.pad(torch.where(is_token, tensor, no_position), (0, 1), value=no_position).amin(1)
    first = torch.where(smallest == no_position, 0, smallest // size)  # [B]
    index = tensor - first[:, None] * size
    if is_compiling():
        blocks = -(-S // size) + 1
        torch._assert_async(
            (index < blocks * size).all(),
            "the positions of a row have gaps: in a compiled graph a selection needs consecutive "
            "positions",
        )
    else:
        blocks = int(F.pad(index, (0, 1), value=0).amax()) // size + 1
    length = blocks * size
    index = torch.where(is_token, index, length)
    slots = torch.arange(S, device=tensor.device).expand(rows, S)
    source = torch.zeros(rows, length + 1, dtype=torch.int64, device=tensor.device)
    occupied = torch.zeros(rows, length + 1, dtype=torch.bool, device=tensor.device)
    source, occupied = source.scatter(1, index, slots), occupied.scatter(1, index, is_token)
    return BlockLayout(size, blocks, first, occupied[:, :length], source[:, :length])


def _span_layout(span: Span, size: int, device: torch.device | str | None) -> BlockLayout:
    """Return the layout of contiguous positions, without reading a tensor."""
    first, left = divmod(span.start, size)
    blocks = max(1, -(-(left + span.length) // size))
    index = torch.arange(blocks * size, device=device)[None]
    occupied = (index >= left) & (index < left + span.length)
    return BlockLayout(size, blocks, torch.tensor([first], device=device), occupied, None, left)


def top_k_mask(
    scores: Float[Tensor, "*b N"], k: int, taken: Int[Tensor, "*b 1"] | None = None
) -> Bool[Tensor, "*b N"]:
    """Mark the k largest numbers of the last dimension; among equal numbers, the first ones.

    -inf is never marked. A NaN counts as the largest number.

    Args:
        scores: numbers `[..., N]`.
        k: how many numbers to mark in each row.
        taken: how many fewer than k to mark in each row, `[..., 1]`; None: 0.

    Returns:
        A bool tensor in the shape of the scores.

    >>> top_k_mask(torch.tensor([1.0, 3.0, 1.0, -torch.inf]), 2).tolist()
    [True, True, False, False]
    """
    N = scores.shape[-1]
    if N == 0 or k < 1:
        return torch.zeros_like(scores, dtype=torch.bool)
    scores = scores.masked_fill(scores.isnan(), torch.inf)
    largest = scores.topk(min(k, N)).values
    places = torch.full_like(largest[..., :1], min(k, N), dtype=torch.int64)
    if taken is not None:
        places = (k - taken).clamp(0, min(k, N))
    threshold = largest.gather(-1, (places - 1).clamp(min=0))
    above = (scores > threshold) & (places > 0)
    tied = (scores == threshold) & (scores > -torch.inf)
    return above | (tied & (tied.cumsum(-1) <= places - above.sum(-1, keepdim=True)))


def select_blocks(
    scores: Float[Tensor, "B n T N"],
    forced: Bool[Tensor, "#B #n T N"],
    allowed: Bool[Tensor, "#B #n T N"],
    k: int,
) -> Bool[Tensor, "B n T N"]:
    """Mark k of the allowed blocks for each query: all forced ones, then the best."""
    forced = (forced & allowed).expand(scores.shape)
    free = scores.masked_fill(forced | ~allowed, -torch.inf)
    return forced | top_k_mask(free, k, forced.sum(-1, keepdim=True))


def head_scores(
    q: Float[Tensor, "B H t D"], k: Float[Tensor, "B G N D"]
) -> Float[Tensor, "B H t N"]:
    """Return the products of queries with one vector per block and key head, in the dtype of k."""
    G, n = k.shape[1], q.shape[1] // k.shape[1]
    rows = torch.unflatten(q.to(k.dtype), 1, (G, n)).flatten(2, 3)
    return torch.unflatten(rows @ k.mT, 2, (n, -1)).flatten(1, 2)


def in_query_chunks(
    choose: Callable[[slice], Tensor], T: int, row_bytes: int, max_bytes: int = MAX_CHUNK_BYTES
) -> Tensor:
    """Compute `choose` for all T queries in chunks, and concatenate the results."""
    step = max(1, max_bytes // max(1, row_bytes))
    if step >= T:
        return choose(slice(0, T))
    return torch.cat([choose(slice(i, min(i + step, T))) for i in range(0, T, step)], 2)


@contextmanager
def without_gradient(device: torch.device) -> Iterator[None]:
    """Disable autograd and autocast for a choice, whose inputs are not rounded."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
