"""`Trace` captures or edits intermediate tensors of attention at named points, called taps.

A tap is an identity call in the computation. A model adds a scope to the name of a tap, so that a
full name is `layers.3.pattern`:

    embed                  the hidden states that enter the first block
    layers.3.attention.norm, layers.3.mlp.norm      the output of a norm
    layers.3.q k v scores pattern z out             the steps of attention
    layers.3.mlp           the output of the feed-forward layer
    layers.3.residual      the hidden states that leave the block
    norm, logits           the output of the last norm, and of the head

`scores` and `pattern` exist only in the reference kernel: a fused kernel refuses a call if a trace
requests them. `model.taps()` lists the names of a model.

Each thread has a stack of open traces, and every tap passes through the whole stack: first all
edits, those of the outermost trace first, then all captures. So a function that measures a model
inside an edit measures the edited model. Without an open trace, a tap costs one check of an empty
stack, and nothing in a compiled graph.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, ClassVar, Literal, Self, get_args

from regard.did_you_mean import close_matches
from regard.errors import ArgumentError, ArgumentTypeError

if TYPE_CHECKING:
    from torch import Tensor

TAP_NAMES = (
    "embed",
    "norm",
    "q",
    "k",
    "v",
    "scores",
    "pattern",
    "z",
    "out",
    "mlp",
    "residual",
    "logits",
)
"""The names of the taps, in the order of computation."""

OnMissing = Literal["warn", "ignore"]
"""The reaction of a trace to a requested capture for which no tap was reached."""

_NO_SCOPE: AbstractContextManager[None] = nullcontext()


class _ThreadState(threading.local):
    """The open traces of one thread, the outermost first, its current scopes, and the number of
    kernels that run, one within the other.
    """

    def __init__(self) -> None:
        # set for each thread, because the compiler does not guard class attributes
        self.stack: tuple[ActiveTrace, ...] = ()
        self.scopes: tuple[str, ...] = ()
        self.kernels = 0


_state = _ThreadState()


class ActiveTrace:
    """A trace while one thread has it open; names of scopes begin where it was opened.

    Attributes:
        trace: the trace.
        depth: the number of scopes that were open before it.
        times: how often it was entered while it was open.
        passed: the full names of the taps that were reached.
        done: the names of edits and captures that were executed.
    """

    def __init__(self, trace: Trace, depth: int) -> None:
        self.trace, self.depth, self.times = trace, depth, 1
        self.passed: dict[str, None] = {}
        self.done: dict[str, None] = {}

    def full(self, *names: str) -> str:
        """Return the full name of a tap in the current scope, or in a scope within it."""
        return ".".join((*_state.scopes[self.depth :], *names))

    def edits(self, *names: str) -> list[str]:
        """Return the names under which the trace edits a tap in the current scope, or in a scope
        within it.
        """
        return self.trace._edited.keys_of(self.full(*names), names[-1])


class Trace:
    """Capture or edit tensors at the taps of this thread while the `with` block runs.

    Traces may be nested. The edits of all of them apply, those of the outermost trace first, and
    every capture contains the tensor after all edits.

    `trace[name]` is the last captured tensor, by its full name, or by its bare name if one scope
    captured it; `trace.every(name)` returns one tensor per call (for example, per decoded token).

    Args:
        *names: the taps to capture: a bare name (`"pattern"`), a full one (`"layers.0.pattern"`),
            or a pattern of full names with * and ? (`"layers.*.z"`).
        edit: functions by such names, from a tensor to its replacement of the same shape, dtype and
            device. Keys and values are copies, since a cache may own the originals.
        missing: "warn" or "ignore" a name that was never captured when the block ends; an edit that
            was never executed is always an error.
        gradients: whether captured tensors stay part of the graph of autograd, for `gradient(name)`
            after `backward()`. Run the model without `torch.no_grad()`.

    Raises:
        ArgumentError: a name is not a tap; `trace[name]` was not captured, or is ambiguous; an edit
            returned another shape, dtype or device, or was never executed.
        ArgumentTypeError: an edit did not return a tensor.

    >>> import torch, regard
    >>> q = k = v = torch.eye(3)[None, None]
    >>> with regard.Trace("pattern") as trace:
    ...     _ = regard.attend(q, k, v)
    >>> trace["pattern"].shape
    torch.Size([1, 1, 3, 3])
    """

    observes_calls: ClassVar[bool] = False
    """Whether `on_attention_call` is called with every attention call and its result."""

    def __init__(
        self,
        *names: str,
        edit: Mapping[str, Callable[[Tensor], Tensor]] | None = None,
        missing: OnMissing = "warn",
        gradients: bool = False,
    ) -> None:
        self.edit = dict(edit or {})
        self.wants = names
        self.gradients = gradients
        for name in (*names, *self.edit):
            if not _bare_names(name):
                raise ArgumentError(
                    f"no tap is named {name!r}; the taps are {', '.join(TAP_NAMES)}"
                )
        self._edited = _NameSet(self.edit)
        if missing not in get_args(OnMissing):
            raise ArgumentError(f"missing is {missing!r}; it must be 'warn' or 'ignore'")
        self.missing = missing
        self._captured: dict[str, list[Tensor]] = {}

    def __repr__(self) -> str:
        captured = f"{len(self._captured)} taps captured" if self._captured else "nothing captured"
        return f"{type(self).__name__}({captured}, {len(self.edit)} edits)"

    @property
    def wants(self) -> frozenset[str]:
        """The names of the taps to capture."""
        return self._wants

    @wants.setter
    def wants(self, names: Iterable[str]) -> None:
        self._wants = frozenset(names)
        self._wanted = _NameSet(self._wants)

    def __enter__(self) -> Self:
        opening = self._opening()
        if opening is None:
            _state.stack = (*_state.stack, ActiveTrace(self, len(_state.scopes)))
        else:
            opening.times += 1
        return self

    def __exit__(self, kind: type[BaseException] | None, *problem: object) -> None:
        opening = self._opening()
        if opening is None:
            raise ArgumentError("a Trace is closed in a thread that did not open it; use `with`")
        opening.times -= 1
        if opening.times:
            return
        _state.stack = tuple(each for each in _state.stack if each is not opening)
        if kind is None:  # do not hide an exception of the block
            self._finish(opening)

    def __getitem__(self, name: str) -> Tensor:
        return self._captured[self._resolve(name)][-1]

    def __contains__(self, name: str) -> bool:
        return bool(self._matches(name))

    def __iter__(self) -> Iterator[str]:
        return iter(list(self._captured))  # a copy, since another thread may capture more

    def __len__(self) -> int:
        return len(self._captured)

    def every(self, name: str) -> list[Tensor]:
        """Return all tensors that were captured under a name.

        Args:
            name: the full name of a tap, or its bare name if one scope captured it.

        Returns:
            The tensors in the order of the calls.
        """
        return list(self._captured[self._resolve(name)])

    def on_attention_call(self, call: object, result: object, kernel: str) -> None:
        """Receive an attention call after a kernel has run it, if `observes_calls` is True.

        Args:
            call: the checked call, a `regard.ops.softmax.call.Call`.
            result: the result of the kernel.
            kernel: the name of the kernel.
        """

    @property
    def where(self) -> str:
        """The current scope, such as `layers.3`; empty outside any scope, or if the trace is
        not open.
        """
        opening = self._opening()
        return "" if opening is None else ".".join(_state.scopes[opening.depth :])

    def needs(self) -> frozenset[str]:
        """Return the bare names of the taps that are captured or edited.

        Returns:
            The names.
        """
        names = (*self.wants, *self.edit)
        return frozenset(bare for name in names for bare in _bare_names(name))

    def _opening(self) -> ActiveTrace | None:
        """Return the entry of this trace in the stack of this thread, or None."""
        for opening in _state.stack:
            if opening.trace is self:
                return opening
        return None

    def gradient(self, name: str) -> Tensor:
        """Return the gradient of a captured tensor, of its last call, after `backward()`.

        Args:
            name: as in `every`.

        Returns:
            The gradient, of the shape of the tensor.

        Raises:
            ArgumentError: there was no `gradients=True`, no capture, or no gradient.

        >>> import torch
        >>> with Trace("z", gradients=True) as trace:
        ...     y = tap("z", torch.ones(2)) * 3
        >>> y.sum().backward()
        >>> trace.gradient("z")
        tensor([3., 3.])
        """
        x = self[name]
        if not self.gradients:
            raise ArgumentError(
                f"the gradient of {name!r} was not kept; open the trace with gradients=True"
            )
        if x.grad is None:
            raise ArgumentError(
                f"no gradient has reached {name!r}; run the model with autograd (not under "
                "torch.no_grad), and call backward() on a number that depends on this tensor"
            )
        return x.grad

    def _capture(self, opening: ActiveTrace, name: str, x: Tensor) -> Tensor:
        """Store the tensor at a tap if the trace requests it; return the tensor to compute with."""
        full = opening.full(name)
        opening.passed[full] = None
        keys = self._wanted.keys_of(full, name)
        if not keys:
            return x
        if self.gradients:
            captured = x = _with_gradient(x)
        else:
            # keys and values may be a cache's own buffers, which later tokens overwrite
            captured = x.detach().clone() if name in ("k", "v") else x.detach()
        self._captured.setdefault(full, []).append(captured)
        for key in keys:
            opening.done[key] = None
        return x

    def _finish(self, opening: ActiveTrace) -> None:
        """Raise for edits that were never executed, and warn about captures that are missing."""
        unused = [name for name in self.edit if name not in opening.done]
        if unused:
            raise ArgumentError(
                f"the edit of {_quoted(unused)} never ran: no such tap was reached while the trace "
                f"was open; {_passed_taps(opening, unused)}"
            )
        missing = sorted(name for name in self.wants if name not in opening.done)
        if missing and self.missing == "warn":
            warnings.warn(
                f"{_quoted(missing)} was never captured: no such tap was reached while the trace "
                f"was open; {_passed_taps(opening, missing)}",
                stacklevel=3,
            )

    def _matches(self, name: str) -> list[str]:
        if name in self._captured:
            return [name]
        return [full for full in list(self._captured) if full.rpartition(".")[2] == name]

    def _resolve(self, name: str) -> str:
        matches = self._matches(name)
        if len(matches) == 1:
            return matches[0]
        captured = _shortened(self._captured) if self._captured else "nothing"
        if not matches:
            raise ArgumentError(f"{name!r} was not captured; captured: {captured}")
        raise ArgumentError(
            f"{name!r} was captured at {len(matches)} places: name one of {_shortened(matches)}"
        )


class _NamedScope:
    """Context manager that prefixes the names of taps in this thread."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __enter__(self) -> None:
        _state.scopes = (*_state.scopes, self._name)

    def __exit__(self, *problem: object) -> None:
        _state.scopes = _state.scopes[:-1]


def tap(name: str, x: Tensor) -> Tensor:
    """Pass a tensor through the open traces of this thread: apply edits, then capture it.

    Args:
        name: one of `TAP_NAMES`.
        x: the tensor.

    Returns:
        The tensor after all edits; `x` itself if no trace is open.

    >>> import torch
    >>> with Trace("z", edit={"z": lambda z: 2 * z}) as trace:
    ...     _ = tap("z", torch.ones(2))
    >>> trace["z"]
    tensor([2., 2.])
    """
    stack = _state.stack
    if not stack:
        return x
    for opening in stack:
        for key in opening.edits(name):
            x = _apply_edit(opening, key, name, x)
    for opening in stack:
        x = opening.trace._capture(opening, name, x)
    return x


def is_tracing() -> bool:
    """Return whether a trace is open in this thread; modules with several taps check it once."""
    return bool(_state.stack)


class _RunningKernel:
    """Context manager that marks the operations of a kernel in this thread."""

    def __enter__(self) -> None:
        _state.kernels += 1

    def __exit__(self, *problem: object) -> None:
        _state.kernels -= 1


_RUNNING_KERNEL = _RunningKernel()


def running_kernel() -> AbstractContextManager[None]:
    """Return a context manager for the run of a kernel; without a trace it does nothing."""
    return _RUNNING_KERNEL if _state.stack else _NO_SCOPE


def is_running_kernel() -> bool:
    """Return whether this thread runs a kernel while a trace is open, so that an operation of torch
    belongs to an attention call that the trace knows already.
    """
    return _state.kernels > 0


def named_scope(name: str) -> AbstractContextManager[None]:
    """Return a context manager in which taps are named `name.<tap>`, if a trace is open.

    Args:
        name: the name of the scope, such as `layers.3`.

    Returns:
        The context manager.

    >>> import torch
    >>> with Trace("z") as trace, named_scope("layers.3"):
    ...     _ = tap("z", torch.ones(2))
    >>> list(trace)
    ['layers.3.z']
    """
    return _NamedScope(name) if _state.stack else _NO_SCOPE


def list_taps(run: Callable[[], object], *, patterns: bool = True) -> tuple[str, ...]:
    """Run a function, and return the full names of the taps that it passes.

    Args:
        run: runs a model once.
        patterns: whether `scores` and `pattern` are requested, from the reference kernel. A
            mechanism without a pattern is run again without this request.

    Returns:
        The names, in the order of the computation.

    >>> import torch
    >>> list_taps(lambda: tap("z", torch.ones(2)))
    ('z',)
    """
    import torch

    names = [name for name in TAP_NAMES if patterns or name not in ("scores", "pattern")]
    try:
        with torch.no_grad(), Trace(*names, missing="ignore") as trace:
            run()
    except ArgumentError:
        if not patterns:
            raise
        return list_taps(run, patterns=False)
    return tuple(trace)


def requested_taps() -> frozenset[str]:
    """Return the bare names of taps that open traces of this thread capture or edit."""
    requested: frozenset[str] = frozenset()
    for opening in _state.stack:
        requested = requested | opening.trace.needs()
    return requested


def is_edited(*names: str) -> bool:
    """Return whether an open trace of this thread edits a tap in the current scope or within it.

    Args:
        *names: names of inner scopes, and last the name of the tap.
    """
    return any(opening.edits(*names) for opening in _state.stack)


def call_observers() -> list[Trace]:
    """Return the open traces of this thread that observe whole calls; none in a compiled graph."""
    if not _state.stack:
        return []
    from regard.process_state import is_compiling

    if is_compiling():
        return []
    return [opening.trace for opening in _state.stack if opening.trace.observes_calls]


class _ParentScope:
    """Context manager that leaves the innermost scope of this thread for a while."""

    def __enter__(self) -> None:
        self._scopes = _state.scopes
        _state.scopes = self._scopes[:-1]

    def __exit__(self, *problem: object) -> None:
        _state.scopes = self._scopes


def parent_scope() -> AbstractContextManager[None]:
    """Return a context manager in which taps are named as outside of the innermost scope.

    >>> import torch
    >>> with Trace("z") as trace, named_scope("layers.3"), named_scope("mlp"), parent_scope():
    ...     _ = tap("z", torch.ones(2))
    >>> list(trace)
    ['layers.3.z']
    """
    return _ParentScope() if _state.stack else _NO_SCOPE


class _NameSet:
    """Names of taps: bare ones, full ones, and patterns of full ones."""

    def __init__(self, names: Iterable[str]) -> None:
        self._exact = frozenset(name for name in names if not _is_pattern(name))
        self._patterns = tuple(name for name in names if _is_pattern(name))

    def keys_of(self, full: str, bare: str) -> list[str]:
        """Return the names of this set that mean a tap."""
        keys = [key for key in dict.fromkeys((full, bare)) if key in self._exact]
        return keys + [each for each in self._patterns if fnmatchcase(full, each)]


def _is_pattern(name: str) -> bool:
    return "*" in name or "?" in name


def _bare_names(name: str) -> list[str]:
    """Return the taps that a name or a pattern may mean."""
    last = name.rpartition(".")[2]
    if not _is_pattern(last):
        return [last] if last in TAP_NAMES else []
    return [bare for bare in TAP_NAMES if fnmatchcase(bare, last)]


def _with_gradient(x: Tensor) -> Tensor:
    """Return x so that autograd keeps its gradient: x itself if it has a history, else a leaf."""
    import torch

    if not torch.is_grad_enabled() or not x.is_floating_point():
        return x
    if not x.requires_grad:
        return x.detach().requires_grad_()
    x.retain_grad()
    return x


def _apply_edit(opening: ActiveTrace, key: str, name: str, x: Tensor) -> Tensor:
    """Apply an edit to x, and check that the result has its shape, dtype and device."""
    import torch

    # an edit in place must not change the buffers of a cache
    edited = opening.trace.edit[key](x.clone() if name in ("k", "v") else x)
    if not isinstance(edited, torch.Tensor):
        raise ArgumentTypeError(
            f"the edit of {key!r} returned {type(edited).__name__} at {opening.full(name)}; it "
            "must return the tensor that takes the place of its argument"
        )
    if edited.shape != x.shape or edited.dtype != x.dtype or edited.device != x.device:
        raise ArgumentError(
            f"the edit of {key!r} returned {_describe(edited)} at {opening.full(name)}; it must "
            f"return a tensor like its argument, {_describe(x)}"
        )
    opening.done[key] = None
    return edited


def _describe(x: Tensor) -> str:
    """Return shape, dtype and device in words."""
    return f"{tuple(x.shape)} of {str(x.dtype).removeprefix('torch.')} on {x.device}"


def _quoted(names: list[str]) -> str:
    return ", ".join(map(repr, names))


def _passed_taps(opening: ActiveTrace, names: list[str]) -> str:
    """Return a hint with the taps that were reached, and those most like the requested."""
    if not opening.passed:
        return (
            "no tap was reached at all: run the model within the `with` block, in the same thread"
        )
    matches = [close for name in names for close in close_matches(name, opening.passed)]
    hint = f"did you mean {matches[0]!r}? " if matches else ""
    return f"{hint}the taps reached were {_shortened(opening.passed, 16)}"


def _shortened(names: Iterable[str], most: int = 8) -> str:
    names = list(names)
    more = f", and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
