"""Taps: identity calls at named places in the computation, and `Trace`, which captures or edits what passes there.

A tap costs one test of an empty dictionary when nobody listens, and nothing in a compiled graph. The names are
`q k v scores pattern z out`; a model puts each at a place, so that a full name is `layers.3.pattern`. `scores` and
`pattern` exist only in the reference kernel: a fused kernel refuses a call in which somebody listens to them.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, ClassVar, Self

from regard.errors import ArgumentError

if TYPE_CHECKING:
    from torch import Tensor

NAMES = ("q", "k", "v", "scores", "pattern", "z", "out")
"""What can be tapped, in the order in which it is computed."""

_listening: dict[int, Trace] = {}  # thread -> its innermost trace; empty nearly always
_NOWHERE: AbstractContextManager[None] = nullcontext()


class Trace:
    """Capture, or edit, what passes the taps of this thread while the `with` block runs.

    Args:
        *names: what to capture: a bare name (`"pattern"`, at every place) or a full one (`"layers.0.pattern"`).
        edit: name -> function of the tensor; what it returns replaces the tensor in the computation.

    `trace[name]` is what the last call captured: by full name, or by bare name when it passed one place only.
    `trace.every(name)` has one tensor per call (one per decoded token, say). Captured tensors are detached.

    Raises:
        ArgumentError: a name is not a tap; `trace[name]` was not captured, or is ambiguous.

    >>> import torch, regard
    >>> q = k = v = torch.eye(3)[None, None]
    >>> with regard.Trace("pattern") as trace:
    ...     _ = regard.attend(q, k, v)
    >>> trace["pattern"].shape
    torch.Size([1, 1, 3, 3])
    """

    watches: ClassVar[bool] = False
    """Whether it is shown every call of attention with its result: `saw`."""

    def __init__(
        self, *names: str, edit: Mapping[str, Callable[[Tensor], Tensor]] | None = None
    ) -> None:
        self.edit = dict(edit or {})
        self.wants = frozenset(names)
        for name in (*names, *self.edit):
            if name.rpartition(".")[2] not in NAMES:
                raise ArgumentError(f"no tap is named {name!r}; the taps are {', '.join(NAMES)}")
        self._heard: dict[str, list[Tensor]] = {}
        self._places: list[str] = []
        self._outer: list[Trace | None] = []

    def __enter__(self) -> Self:
        thread = threading.get_ident()
        self._outer.append(_listening.get(thread))
        _listening[thread] = self
        return self

    def __exit__(self, *problem: object) -> None:
        thread, outer = threading.get_ident(), self._outer.pop()
        if outer is None:
            del _listening[thread]
        else:
            _listening[thread] = outer

    def __getitem__(self, name: str) -> Tensor:
        return self._heard[self._resolve(name)][-1]

    def __contains__(self, name: str) -> bool:
        return bool(self._matches(name))

    def __iter__(self) -> Iterator[str]:
        return iter(self._heard)

    def __len__(self) -> int:
        return len(self._heard)

    def every(self, name: str) -> list[Tensor]:
        """All tensors captured under a name, in the order of the calls."""
        return list(self._heard[self._resolve(name)])

    def hear(self, name: str, x: Tensor) -> Tensor:
        """Edit and capture one tensor that passes the tap `name` at the current place."""
        full = ".".join((*self._places, name))
        for key in dict.fromkeys((full, name)):
            if key in self.edit:
                x = self.edit[key](x)
        if name in self.wants or full in self.wants:
            # keys and values may be a cache's own memory, which later tokens overwrite
            heard = x.detach().clone() if name in ("k", "v") else x.detach()
            self._heard.setdefault(full, []).append(heard)
        return x

    def saw(self, call: Any, result: Any, kernel: str) -> None:
        """A kernel has run a call at the current place; a trace that `watches` is told so."""

    @property
    def where(self) -> str:
        """The current place: `layers.3`, say; empty outside of any."""
        return ".".join(self._places)

    def needs(self) -> frozenset[str]:
        """The bare names that are captured or edited."""
        return frozenset(name.rpartition(".")[2] for name in (*self.wants, *self.edit))

    def _matches(self, name: str) -> list[str]:
        if name in self._heard:
            return [name]
        return [full for full in self._heard if full.rpartition(".")[2] == name]

    def _resolve(self, name: str) -> str:
        found = self._matches(name)
        if len(found) == 1:
            return found[0]
        heard = _some(self._heard) if self._heard else "nothing"
        if not found:
            raise ArgumentError(f"{name!r} was not captured; captured: {heard}")
        raise ArgumentError(
            f"{name!r} was captured at {len(found)} places: name one of {_some(found)}"
        )


class _Place:
    """While it is entered, taps of the trace carry this name in front."""

    def __init__(self, trace: Trace, name: str) -> None:
        self._trace, self._name = trace, name

    def __enter__(self) -> None:
        self._trace._places.append(self._name)

    def __exit__(self, *problem: object) -> None:
        self._trace._places.pop()


def tap(name: str, x: Tensor) -> Tensor:
    """Return x, after showing it to the trace of this thread, if there is one."""
    if not _listening:
        return x
    trace = _here()
    return x if trace is None else trace.hear(name, x)


def place(name: str) -> AbstractContextManager[None]:
    """A context in which taps are named `name.<tap>`; it does nothing when nobody listens."""
    if not _listening:
        return _NOWHERE
    trace = _here()
    return _NOWHERE if trace is None else _Place(trace, name)


def needed() -> frozenset[str]:
    """The bare names that the trace of this thread captures or edits; empty without one."""
    if not _listening:
        return frozenset()
    trace = _here()
    return frozenset() if trace is None else trace.needs()


def watcher() -> Trace | None:
    """The trace of this thread, if it wants to see whole calls; never in a compiled graph."""
    if not _listening:
        return None
    import torch

    if torch.compiler.is_compiling():
        return None
    trace = _listening.get(threading.get_ident())
    return trace if trace is not None and trace.watches else None


def _here() -> Trace | None:
    import torch

    if (
        torch.compiler.is_compiling()
    ):  # thread numbers are opaque to the compiler: take the newest trace
        return list(_listening.values())[-1]
    return _listening.get(threading.get_ident())


def _some(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
