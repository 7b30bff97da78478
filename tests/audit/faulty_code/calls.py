"""Wrong calls: dropout, state, batches, inputs, caches, padding in front."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.audit.faulty_code.base import Right, RightCached, RightPadded, RightRotary


class FirstLength(Right):
    """What it made for the first call serves every later one: here, a gate from the first text."""

    gate: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        out = super().forward(x)
        if self.gate is None or x.shape[0] == 1:
            self.gate = torch.sigmoid(x[0, 0, 0])
        return out * self.gate


class Clocked(Right):
    """Reads what no input and no state of its own decides."""

    ticks = iter(range(10**9))

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (1 + 0.01 * next(Clocked.ticks))


def in_place(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    q.mul_(q.shape[-1] ** -0.5)
    return torch.softmax(q @ k.mT, -1) @ v


class MixedRows(Right):
    """[T,B] for [B,T]."""

    def split(self, x: Tensor, heads: int) -> Tensor:
        B, T, _ = x.shape
        return x.view(T, B, heads, self.head_dim).permute(1, 2, 0, 3)


class Restarted(RightCached):
    """Positions begin again with every chunk."""

    def project(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        return super().project(x, 0)


class TopLeft(RightCached):
    """The causal mask of a chunk begins at the first key."""

    def allowed(self, T: int, S: int) -> Tensor:
        return torch.ones(T, S).tril().bool()


class UnmaskedWithCache(RightCached):
    """No mask once there is a cache: a prompt of several tokens sees its own future."""

    def forward(self, x: Tensor, cache: tuple | None = None) -> tuple[Tensor, tuple]:
        self.masked = cache is None
        return super().forward(x, cache)

    def allowed(self, T: int, S: int) -> Tensor:
        return super().allowed(T, S) if self.masked else torch.ones(T, S).bool()


class Unbounded(RightCached):
    """The mask has a window, the cache has none."""

    def keep(self, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        return k, v


class LastOnly(RightCached):
    """With a cache, only the last token of a chunk is answered."""

    def forward(self, x: Tensor, cache: tuple | None = None) -> tuple[Tensor, tuple]:
        out, after = super().forward(x, cache)
        return (out if cache is None else out[:, -1:]), after


class RightInside(RightRotary):
    """A cache inside the module, which counts its positions."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.reset_cache()

    def reset_cache(self) -> None:
        self.cached: tuple[Tensor, Tensor] | None = None
        self.count = 0

    def forward(self, x: Tensor, use_cache: bool = False) -> Tensor:
        q, k, v = self.project(x, self.count if use_cache else 0)
        if use_cache:
            self.advance(x.shape[1])
            if self.cached is not None:
                k, v = torch.cat([self.cached[0], k], 2), torch.cat([self.cached[1], v], 2)
            self.cached = (k, v)
        return self.answer(q, k, v)

    def advance(self, length: int) -> None:
        self.count += length


class Miscounted(RightInside):
    """Each call moves on by one position, however many tokens it had."""

    def advance(self, length: int) -> None:
        self.count += 1


class Slots(RightPadded):
    """A vector for each slot is added to what is attended to: padding in front moves it."""

    def __init__(self, dim: int, heads: int, kv_heads: int | None = None):
        super().__init__(dim, heads, kv_heads)
        self.positions = nn.Embedding(64, dim)

    def project(self, x: Tensor, start: int = 0) -> tuple[Tensor, Tensor, Tensor]:
        return super().project(x + self.positions.weight[: x.shape[1]], start)


class Absolute(RightRotary):
    """A vector for each position, given from outside, where only distances should count."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.table = nn.Embedding(64, dim)

    def forward(self, x: Tensor, positions: Tensor | None = None) -> Tensor:
        at = torch.arange(x.shape[1]) if positions is None else positions
        return super().forward(x + self.table(at))


class NotFinite(Right):
    """Weights that are NaN, and that no call has used yet."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.unused = nn.Parameter(torch.full((3,), float("nan")))


class Saved(Right):
    """The mask is saved with the weights."""

    def __init__(self, dim: int, heads: int):
        super().__init__(dim, heads)
        self.register_buffer("mask", torch.ones(64, 64).tril())


def dropout_on(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return F.dropout(torch.softmax(q @ k.mT * q.shape[-1] ** -0.5, -1), 0.2) @ v
