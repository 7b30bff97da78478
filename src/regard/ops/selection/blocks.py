"""What selections share: slots put in the order of their positions, in blocks, and the choice of
the best of them.
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

ROW_BYTES = 2**27
"""Scores of a selection that are held at once: more queries are taken in turns."""


@dataclass(frozen=True, eq=False)
class Order:
    """Where slots go when they are put in the order of their positions, cut into blocks of `size`
    positions.

    Block edges are absolute multiples of `size`, row by row, so that padding and the way a sequence
    was cut into chunks change nothing. Place i of row b stands for position first[b] * size + i.

    Attributes:
        size: positions per block.
        blocks: how many blocks there are, N; at least one.
        first: the number of the first block, int64 [B or 1].
        held: which places hold a token, bool [B or 1, N * size].
        source: the slot of each place, int64 [B or 1, N * size]; None where slots are in order
            already.
    """

    size: int
    blocks: int
    first: Int[Tensor, " B"]
    held: Bool[Tensor, "B L"]
    source: Int[Tensor, "B L"] | None
    _left: int = 0

    def lay(self, x: Float[Tensor, "B n S d"]) -> Float[Tensor, "B n L d"]:
        """Slots [B,n,S,d] in the order of their positions, [B,n,N*size,d]; 0 where nothing is
        held.
        """
        L, (B, n, S, d) = self.blocks * self.size, x.shape
        if self.source is None:
            return F.pad(x, (0, 0, self._left, L - S - self._left))
        if S == 0:
            return x.new_zeros(B, n, L, d)
        at = self.source[:, None, :, None].expand(B, n, L, d)
        return x.gather(2, at).masked_fill(~self.held[:, None, :, None], 0)

    def split(self, x: Float[Tensor, "B n S d"]) -> Float[Tensor, "B n N size d"]:
        """Slots [B,n,S,d] as blocks [B,n,N,size,d]."""
        return torch.unflatten(self.lay(x), 2, (self.blocks, self.size))

    @property
    def filled(self) -> Int[Tensor, "B N"]:
        """How many tokens each block holds, [B or 1, N]."""
        return torch.unflatten(self.held, 1, (self.blocks, self.size)).sum(-1)

    @property
    def number(self) -> Int[Tensor, "B N"]:
        """The number of each block, counted from position 0: [B or 1, N]."""
        return self.first[:, None] + torch.arange(self.blocks, device=self.first.device)

    def own(self, positions: Positions) -> Int[Tensor, "B T"]:
        """The number of the block in which each query stands, [B or 1, T]; -1 for a slot that holds
        nothing.
        """
        q = as_tensor(positions, self.first.device)
        return torch.where(q >= 0, q.long() // self.size, -1)


def order(positions: Positions, size: int, device: torch.device | str | None = None) -> Order:
    """Put slots at these positions in order, in blocks of `size`.

    A `Span` is in order already, and nothing is read from the device. For positions in a tensor the
    largest one is read; a compiled graph cannot, and there the tokens of a row must follow one
    another without gaps (asserted on the device).

    >>> x = torch.tensor([3.0, 9.0, 2.0, 5.0])[None, None, :, None]
    >>> order(torch.tensor([[3, -1, 2, 5]]), 2).split(x).flatten()
    tensor([2., 3., 0., 5.])
    """
    if isinstance(positions, Span) and positions.start >= 0:
        return _of_span(positions, size, device)
    p = as_tensor(positions, device).long()
    rows, S = p.shape
    valid = p >= 0
    far = 2**62
    least = F.pad(torch.where(valid, p, far), (0, 1), value=far).amin(1)
    first = torch.where(least == far, 0, least // size)  # [B]
    place = p - first[:, None] * size
    if is_compiling():
        blocks = -(-S // size) + 1
        torch._assert_async(
            (place < blocks * size).all(),
            "positions of a row have gaps: a compiled selection needs tokens that follow one "
            "another",
        )
    else:
        blocks = int(F.pad(place, (0, 1), value=0).amax()) // size + 1
    L = blocks * size
    place = torch.where(valid, place, L)
    slots = torch.arange(S, device=p.device).expand(rows, S)
    source = torch.zeros(rows, L + 1, dtype=torch.int64, device=p.device)
    held = torch.zeros(rows, L + 1, dtype=torch.bool, device=p.device)
    source, held = source.scatter(1, place, slots), held.scatter(1, place, valid)
    return Order(size, blocks, first, held[:, :L], source[:, :L])


def _of_span(span: Span, size: int, device: torch.device | str | None) -> Order:
    first, left = divmod(span.start, size)
    blocks = max(1, -(-(left + span.length) // size))
    at = torch.arange(blocks * size, device=device)[None]
    held = (at >= left) & (at < left + span.length)
    return Order(size, blocks, torch.tensor([first], device=device), held, None, left)


def top(
    scores: Float[Tensor, "*b N"], k: int, taken: Int[Tensor, "*b 1"] | None = None
) -> Bool[Tensor, "*b N"]:
    """The k largest of the last dimension, at most; -inf is never taken, and of equal ones the
    first are.

    A NaN counts as the largest: what is not a number must show in the output, not vanish from it.

    Args:
        scores: any shape.
        k: how many.
        taken: how many of the k places of each row are taken already, [..., 1].

    >>> top(torch.tensor([1.0, 3.0, 1.0, -torch.inf]), 2).tolist()
    [True, True, False, False]
    """
    N = scores.shape[-1]
    if N == 0 or k < 1:
        return torch.zeros_like(scores, dtype=torch.bool)
    scores = scores.masked_fill(scores.isnan(), torch.inf)
    best = scores.topk(min(k, N)).values
    free = torch.full_like(best[..., :1], min(k, N), dtype=torch.int64)
    if taken is not None:
        free = (k - taken).clamp(0, min(k, N))
    least = best.gather(-1, (free - 1).clamp(min=0))
    above = (scores > least) & (free > 0)
    tied = (scores == least) & (scores > -torch.inf)
    return above | (tied & (tied.cumsum(-1) <= free - above.sum(-1, keepdim=True)))


def best_blocks(
    scores: Float[Tensor, "B n T N"],
    forced: Bool[Tensor, "#B #n T N"],
    allowed: Bool[Tensor, "#B #n T N"],
    k: int,
) -> Bool[Tensor, "B n T N"]:
    """The forced blocks that are allowed, and the best of the other allowed ones: k in all, or the
    forced alone.

    >>> scores = torch.tensor([[[[5.0, 4.0, 3.0, 9.0]]]])
    >>> yes = torch.ones(1, 1, 1, 4, dtype=torch.bool)
    >>> best_blocks(scores, yes & torch.tensor([False, False, True, False]), yes, 2).int().tolist()
    [[[[0, 0, 1, 1]]]]
    """
    forced = (forced & allowed).expand(scores.shape)
    free = scores.masked_fill(forced | ~allowed, -torch.inf)
    return forced | top(free, k, forced.sum(-1, keepdim=True))


def by_rows(
    choose: Callable[[slice], Tensor], T: int, row_bytes: int, most: int = ROW_BYTES
) -> Tensor:
    """choose(rows) [B,n,t,...] for all T queries, so many at a time as fit into `most` bytes."""
    step = max(1, most // max(1, row_bytes))
    if step >= T:
        return choose(slice(0, T))
    return torch.cat([choose(slice(i, min(i + step, T))) for i in range(0, T, step)], 2)


@contextmanager
def undifferentiated(device: torch.device) -> Iterator[None]:
    """No gradient flows through a choice, and autocast does not round what it is made of."""
    with torch.no_grad(), torch.autocast(device.type, enabled=False):
        yield
