"""`Joined`, the caches of several mechanisms in one layer as one cache."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from copy import copy
from typing import Any, ClassVar

from jaxtyping import Int
from torch import Tensor

from regard.caches.base import Cache, Contents, Parts, StaticSize, check_crop
from regard.errors import ArgumentError
from regard.span import Positions, Span
from regard.units import plural


class Joined(Cache):
    """The caches of several mechanisms that read the same tokens in one layer.

    The mechanisms update `parts`; every other operation is applied to all of them or to none.
    """

    crop_is_exact: ClassVar[bool] = False
    savable: ClassVar[bool] = False
    static_step_refusal: ClassVar[str | None] = None

    parts: tuple[Cache, ...]

    def __init__(self, parts: Sequence[Cache]) -> None:
        if not parts:
            raise ArgumentError("Joined needs at least one cache")
        self.parts = tuple(parts)

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        """Raise, because every mechanism updates its own part."""
        raise ArgumentError(
            f"a Joined cache holds {plural(len(self.parts), 'cache')}, one for each mechanism of a "
            "layer; update its parts, or give a layer with one mechanism a cache of its own"
        )

    def crop(self, length: int) -> None:
        """Remove every token at `length` or later from all parts, or from none if one refuses."""
        check_crop(length)
        for part in self.parts:
            part.fork().crop(length)  # raises what the part would raise
        for part in self.parts:
            part.crop(length)

    def contents(self) -> Contents:
        """Return the contents of all parts, with the number of the part in front of each name."""
        return {
            f"{i}.{name}": x
            for i, part in enumerate(self.parts)
            for name, x in part.contents().items()
        }

    def fill(self, contents: Mapping[str, Tensor | Span | int]) -> None:
        """Replace the contents of all parts."""
        for i, part in enumerate(self.parts):
            prefix = f"{i}."
            own = {name: x for name, x in contents.items() if name.startswith(prefix)}
            part.fill({name.removeprefix(prefix): x for name, x in own.items()})

    @property
    def settings(self) -> Mapping[str, object]:
        """Copies of the parts, so that a fork is independent."""
        return {"parts": [part.fork() for part in self.parts]}

    @property
    def bytes(self) -> int:
        """The number of bytes in all parts."""
        return sum(part.bytes for part in self.parts)

    @property
    def batch(self) -> int | None:
        """The number of batch rows; None while the cache is empty."""
        return max((part.batch for part in self.parts if part.batch is not None), default=None)

    def next(self, length: int) -> Positions:
        """Return the default positions of the next tokens, which are those of the first part."""
        return self.parts[0].next(length)

    def fork(self) -> Cache:
        """Return an independent cache with the same contents."""
        return self._with([part.fork() for part in self.parts])

    def repeated(self, rows: int, slots: int | None = None) -> Cache:
        """Return a new cache in which the only row of each part is repeated."""
        return self._with([part.repeated(rows, slots) for part in self.parts])

    def _with(self, parts: Sequence[Cache]) -> Joined:
        """Return a cache like this one with other parts."""
        other = copy(self)
        other.parts = tuple(parts)
        return other

    def select(self, rows: Int[Tensor, " rows"]) -> None:
        """Keep these batch rows of all parts, in this order."""
        self._check_rows(rows)
        for part in self.parts:
            part.select(rows)

    def reset(self) -> None:
        """Remove the contents of all parts."""
        for part in self.parts:
            part.reset()

    def mark(self) -> object:
        """Return a snapshot of all parts."""
        return [part.mark() for part in self.parts]

    def restore(self, mark: Any) -> None:
        """Undo the update of each part that came after a snapshot, if there was one."""
        for part, own in zip(self.parts, mark, strict=True):
            part.restore(own)

    def _to_static(self, size: StaticSize) -> Cache:
        return self._with([part.to_static(size) for part in self.parts])

    def __len__(self) -> int:
        """Return the largest number of slots that a part holds."""
        return max(len(part) for part in self.parts)
