"""Names for the attention calls of a model that knows nothing of this package.

A call is named by the path of the module in which it is made, as in `model.named_modules()`. The
second and every further call within one forward pass of the same module has a number:
`decoder.0.call2`.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn

COMPILED_PREFIX = "_orig_mod."
"""The part of a module's path that `torch.compile` adds."""


class _ReadKeys(NamedTuple):
    """The keys that the last call at a place has read, and the position after its last query."""

    k: Tensor
    stop: int


class ModulePlaces:
    """The places of the attention calls of one model, while one thread runs it.

    Attributes:
        observed: the number of calls that were passed to the open traces.
        unrecorded: the number of calls that could not be, by place and reason.
        written_out: the number of softmaxes that were computed outside of any attention function,
            by the path of the module and their shape: attention may be written out there.
    """

    def __init__(self, model: nn.Module) -> None:
        self.observed = 0
        self.unrecorded: Counter[tuple[str, str]] = Counter()
        self.written_out: Counter[tuple[str, tuple[int, ...]]] = Counter()
        self.model = model
        self._thread = threading.get_ident()
        self._running: list[tuple[str, list[int]]] = []
        self._last_keys: dict[str, _ReadKeys] = {}
        self._inside = 0

    @contextmanager
    def hooks(self) -> Iterator[None]:
        """Follow in this thread which module runs, by hooks that are removed at the end."""
        with ExitStack() as stack:
            for name, module in self.model.named_modules():
                enter = partial(self.enter, name.replace(COMPILED_PREFIX, ""))
                stack.callback(module.register_forward_pre_hook(enter, prepend=True).remove)
                stack.callback(module.register_forward_hook(self.leave, always_call=True).remove)
            yield

    def enter(self, path: str, *_of_hook: object) -> None:
        """Note that the forward pass of a module begins; other threads are ignored."""
        if threading.get_ident() == self._thread:
            self._running.append((path, [0]))

    def leave(self, *_of_hook: object) -> None:
        """Note that the forward pass of the innermost module ends, even if it failed."""
        if threading.get_ident() == self._thread and self._running:
            self._running.pop()

    @property
    def here(self) -> str:
        """The path of the module that runs; "" for the model itself."""
        return self._running[-1][0] if self._running else ""

    def next_place(self) -> str:
        """Return the name of the attention call that is made now, and count the call."""
        path, calls = self._running[-1] if self._running else ("", [0])
        calls[0] += 1
        return path if calls[0] == 1 else f"{path}.call{calls[0]}".lstrip(".")

    @contextmanager
    def inside_call(self) -> Iterator[None]:
        """Mark operations that belong to a call which is already observed or listed."""
        self._inside += 1
        try:
            yield
        finally:
            self._inside -= 1

    @property
    def is_inside_call(self) -> bool:
        """Whether operations belong to a call which is already observed or listed."""
        return self._inside > 0

    def first_position(self, place: str, k: Tensor, T: int) -> int:
        """Return the position of the first query of a call whose mask does not say it.

        It continues a call with the same tensor of keys (cross-attention), or with these keys and a
        new one for each query (a cache). Otherwise a single query is aligned with the last key, and
        several begin at 0.
        """
        S, last = k.shape[2], self._last_keys.get(place)
        start = S - 1 if T == 1 else 0
        if last is not None and _continues(last.k, k, T):
            start = last.stop
        self._last_keys[place] = _ReadKeys(k.detach(), start + T)
        return start


def _continues(last: Tensor, k: Tensor, T: int) -> bool:
    """Return whether keys are those of the last call, or begin with them."""
    if k.shape == last.shape:
        return k.data_ptr() == last.data_ptr() and k.stride() == last.stride()
    earlier, n = last.shape[2], k.shape[2]
    same = (*k.shape[:2], k.shape[3], k.dtype) == (*last.shape[:2], last.shape[3], last.dtype)
    return same and n == earlier + T and torch.equal(k[:, :, :earlier].detach(), last)


class _OpenPlaces(threading.local):
    """The models that this thread watches, the innermost last."""

    def __init__(self) -> None:
        self.stack: list[ModulePlaces] = []


_open = _OpenPlaces()


def open_places() -> ModulePlaces | None:
    """Return the places of the model that this thread watches, or None."""
    return _open.stack[-1] if _open.stack else None


@contextmanager
def opened(places: ModulePlaces) -> Iterator[None]:
    """Make these places the ones of this thread."""
    _open.stack.append(places)
    try:
        yield
    finally:
        _open.stack.remove(places)
