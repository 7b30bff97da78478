"""One entry per cache that stores tokens: the contract suite runs over them. A new cache joins by
one entry.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from regard import masks
from regard.caches import (
    BoundedPages,
    Cache,
    Fixed,
    Float8,
    Growing,
    Latent,
    Paged,
    Parts,
    Quantized,
    Ring,
    Streaming,
)
from regard.caches.ring import RingBase
from regard.caches.static import StaticForm
from regard.masks import Mask
from regard.registry import is_builtin

W = 4
"""The window of all examples."""


@dataclass(frozen=True)
class Kind:
    """An example of a cache, and what it promises.

    Attributes:
        name: of the example.
        make: an empty one.
        mask: the mask that it serves exactly.
        sees: the same rule in plain Python: (query position, key position) -> whether it may be
            seen.
        shapes: heads and dim of each part that it stores.
        recall: the parts -> keys and values, one head or several each.
        bound: how far attention over what it answers may be from attention over everything, for
            tokens randn.
        rewind: how many of the last tokens a crop can always take back; None is all.
        held: bytes held when every one of B rows has seen n tokens without padding, in float64.
        slots: how many slots, padding included, it takes.
        in_order: whether it refuses positions that do not lie behind those held.
    """

    name: str
    make: Callable[[], Cache]
    mask: Mask
    sees: Callable[[int, int], bool]
    shapes: tuple[tuple[int, int], ...] = ((1, 2), (1, 2))
    recall: Callable[[Parts], tuple] = lambda memory: memory  # type: ignore[assignment,return-value,type-arg]
    bound: float = 1e-12
    rewind: int | None = None
    held: Callable[[int, int], int] | None = None
    slots: int = 10**6
    in_order: bool = False

    @property
    def token(self) -> int:
        """Bytes of a token in float64."""
        return sum(n * d for n, d in self.shapes) * 8


CAUSAL = masks.Causal()
WINDOW = CAUSAL & masks.Window(W)


def _causal(q: int, k: int) -> bool:
    return k <= q


def _sinks(n: int) -> Callable[[int, int], bool]:
    return lambda q, k: k <= q and (k in range(n) or k in range(q - W + 1, q + 1))


TOKEN = 32  # 4 numbers of 8 bytes


def _quantized(B: int, n: int) -> int:
    """Groups of 4, and at least 3 tokens as they came: 2 bytes a key, 2 a value, scales and zeros
    of 8 bytes.
    """
    old = max(0, n - 3) // 4 * 4
    return B * ((n - old) * TOKEN + old * (2 + 2 + 16) + old // 4 * 2 * 16)


class GrowingRing(Ring):
    """A ring that begins with one slot, as one of 257 positions begins with 256."""

    min_slots = 1


class GrowingStreaming(Streaming):
    """The same with sinks."""

    min_slots = 1


def _ring(
    name: str,
    make: Callable[[], Cache],
    slots: Callable[[int], int],
    sinks: int = 0,
    rewind: int = 0,
) -> Kind:
    """A ring that holds so many slots a row after n tokens."""
    return Kind(
        name,
        make,
        CAUSAL & (masks.Window(W) | masks.Sinks(sinks)) if sinks else WINDOW,
        _sinks(sinks),
        rewind=rewind + 1,
        held=lambda B, n: B * slots(n) * TOKEN,
        in_order=True,
    )


KINDS = {
    kind.name: kind
    for kind in (
        Kind("growing", Growing, CAUSAL, _causal, held=lambda B, n: B * n * TOKEN),
        Kind(
            "bounded pages",
            lambda: BoundedPages(3),
            CAUSAL,
            _causal,
            held=lambda B, n: B * n * TOKEN,  # bounds are computed when a layer asks for them
        ),
        Kind(
            "fixed", lambda: Fixed(60), CAUSAL, _causal, held=lambda B, n: B * 60 * TOKEN, slots=60
        ),
        _ring("ring", lambda: Ring(W), lambda n: W),
        _ring("ring, rewind", lambda: Ring(W, rewind=3), lambda n: W + 3, rewind=3),
        _ring("streaming", lambda: Streaming(2, W), lambda n: 2 + W, sinks=2),
        _ring(
            "streaming, rewind",
            lambda: Streaming(3, W, rewind=2),
            lambda n: 3 + W + 2,
            sinks=3,
            rewind=2,
        ),
        _ring(
            "ring that grows",
            lambda: GrowingRing(W, rewind=3),
            lambda n: min(W + 3, 1 << (n - 1).bit_length()),
            rewind=3,
        ),
        _ring(
            "streaming that grows",
            lambda: GrowingStreaming(3, W, rewind=2),
            lambda n: min(3 + W + 2, max(4, 1 << (n - 1).bit_length())),
            sinks=3,
            rewind=2,
        ),
        Kind(
            "paged",
            lambda: Paged(3, 80),
            CAUSAL,
            _causal,
            held=lambda B, n: B * -(-n // 3) * 3 * TOKEN,
        ),
        Kind(
            "quantized",
            lambda: Quantized(8, group=4, residual=3),
            CAUSAL,
            _causal,
            bound=0.1,
            held=_quantized,  # a number is off by at most (max - min) / 510: 0.01 for tokens randn
        ),
        Kind(
            "fp8",
            Float8,
            CAUSAL,
            _causal,
            bound=0.6,  # numbers are off by a sixteenth of themselves, here up to 4
            held=lambda B, n: B * n * (2 + 2 + 8 + 8),  # codes, and scales of 8 bytes
        ),
        Kind(
            "latent",
            lambda: Latent(3, 2),
            CAUSAL,
            _causal,
            shapes=((1, 5),),
            recall=lambda m: (m[0], m[0][..., :3]),
            held=lambda B, n: B * n * 40,
        ),
        Kind(
            "latent, fixed",
            lambda: Latent(3, 2, capacity=60),
            CAUSAL,
            _causal,
            shapes=((1, 5),),
            recall=lambda m: (m[0], m[0][..., :3]),
            held=lambda B, n: B * 60 * 40,
            slots=60,
        ),
    )
}

NO_TOKENS = {
    "Cache": "the protocol",
    "State": "a recurrence's state: nothing by token",
    "Memory": "a recurrence's state and the tokens of the open segment, which its module alone "
    "can read",
    "Compressed": "a window, an open block and entries, which its module alone can read",
    "Cross": "the other sequence, stored once",
    **dict.fromkeys(
        (
            "Evicting",
            "HeavyHitterCache",
            "LastQueryCache",
            "ObservedWindowCache",
            "SmallKeyNormCache",
            "KeyDifferenceCache",
            "AdaptiveHeadCache",
            "PyramidCache",
            "ExpectedAttentionCache",
        ),
        "the tokens that a rule leaves, which its module alone can read",
    ),
    **dict.fromkeys(
        ("StaticSlots", "StaticState"),
        "the static form of another cache, which takes single tokens (test_static.py)",
    ),
    "ForwardingCache": "the base class of those that keep their contents in another cache",
    "CrossLayer": "the memory of an earlier layer, which is lent for one call",
    "Joined": "the caches of several mechanisms in one layer, which update their parts",
    "LendingCache": "another cache, for the length of one call",
    "WithFirstValues": "another cache for one call, with the values of the first layer",
}
"""Public caches that are not in the suite, and why."""


def builtin_caches() -> list[type[Cache]]:
    """All cache classes of the package, the base class first."""
    found, left = [], [Cache]
    while left:
        kind = left.pop()
        left += kind.__subclasses__()
        if is_builtin(kind):
            found.append(kind)
    return found


def stored() -> set[str]:
    """The classes of caches of the package that store tokens."""
    public = {x.__name__ for x in builtin_caches() if x not in (Cache, RingBase, StaticForm)}
    return {name for name in public if not name.startswith("_")} - set(NO_TOKENS)
