"""What an audit needs to know of the code: `AuditClaims`, and `TargetAdapter`, which calls it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only

from regard.errors import ArgumentError
from regard.language import Phrase


@dataclass(frozen=True)
class AuditClaims:
    """The properties that attention code is claimed to have. A property that is None is inferred
    from the code, or not checked.

    Args:
        dim: the model dimension M.
        kv_heads: the number of key/value heads G.
        head_dim: the features of one head D.
        causal: True if no token may depend on a later one; None infers it from the code's results
            without a mask.
        window: the number of keys that a query sees, its own included.
        scale: the factor on the scores; None means 1/sqrt(D).
        mask: the meaning of a mask: "keep" (True = may attend), "block" (True = hidden) or
            "additive". None accepts any convention that works; for
            `nn.MultiheadAttention` and modules with its argument names it means "block".
        layout: the order of a function's arguments, "BHTD" or "BTHD".

    Raises:
        ArgumentError: a size is below 1, a convention is unknown, or kv_heads does not divide
            heads.

    >>> AuditClaims(heads=4).groups
    4
    """

    dim: int | None = None
    heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    causal: bool | None = None
    window: int | None = None
    scale: float | None = None
    mask: str | None = None
    layout: str = "BHTD"

    def __post_init__(self) -> None:
        for name in ("dim", "heads", "kv_heads", "head_dim", "window"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or value < 1):
                raise ArgumentError(
                    f"{name} is {value!r}; it must be an integer of at least 1",
                    argument=name,
                    value=value,
                )
        for name, allowed in (
            ("mask", (None, "keep", "block", "additive")),
            ("layout", ("BHTD", "BTHD")),
        ):
            if getattr(self, name) not in allowed:
                words = ", ".join(str(a) for a in allowed)
                raise ArgumentError(
                    f"{name} is {getattr(self, name)!r}; it must be one of {words}", argument=name
                )
        if self.heads and self.kv_heads and self.heads % self.kv_heads:
            raise ArgumentError(
                f"heads is {self.heads} and kv_heads is {self.kv_heads}; kv_heads must divide "
                "heads",
                argument="kv_heads",
            )

    @property
    def groups(self) -> int | None:
        """The number of key/value heads G; H if it is not claimed."""
        return self.kv_heads or self.heads


NEW_CACHE = object()
"""The value of `CallInputs.memory` that asks for a new, empty cache."""


class CallInputs(NamedTuple):
    """The inputs of one call, besides the tokens."""

    keep: Tensor | None = None
    tokens: Tensor | None = None
    positions: Tensor | None = None
    memory: Any = None
    weights: bool = False


class CallOutput(NamedTuple):
    """The result of one call; adapters of users may return it, too.

    Args:
        out: the output, [B, T, N].
        weights: the attention weights, [B, H or 1, T, S], or None.
        memory: the cache to give to the next call, or None.
    """

    out: Tensor
    weights: Tensor | None = None
    memory: Any = None


class CheckNotPossible(Exception):
    """A check could not be made, as the message explains, so that a fault may remain."""


class CheckNotApplicable(CheckNotPossible):
    """A check has nothing to test: the code takes no cache or mask, or no window is claimed."""


LinearMap: TypeAlias = tuple[Tensor, Tensor | None]
"""The weight [out, in] and the bias [out] of a linear map."""


@dataclass(frozen=True, eq=False)
class Projections:
    """The linear maps of an attention module, as read from its parameters."""

    q: LinearMap
    k: LinearMap
    v: LinearMap
    o: LinearMap | None
    heads: int
    groups: int
    bases: tuple[float, ...] = (10000.0,)
    named: bool = True
    sinks: Tensor | None = None
    norm: tuple[Tensor, Tensor, float] | None = None
    search_faults: bool = True

    @property
    def head_dim(self) -> int:
        """The features of one head D."""
        return self.q[0].shape[0] // self.heads


class TargetAdapter(ABC):
    """Base class of the adapters: each calls one kind of attention code."""

    name: str
    called: str
    claims: AuditClaims
    accepts: frozenset[str]
    dtype: torch.dtype
    width: int
    relative = False

    @abstractmethod
    def call(self, x: Tensor, inputs: CallInputs = CallInputs()) -> CallOutput:  # noqa: B008  # a NamedTuple is immutable
        """Call the code on tokens x [B, T, M] or ids [B, T]."""

    def untried_arguments(self) -> tuple[str, ...] | None:
        """Return the parameters that no call has passed; None if the adapter decides."""
        return None

    @abstractmethod
    def to_dtype(self, dtype: torch.dtype) -> TargetAdapter:
        """Return an adapter for the same code and weights in another dtype."""

    def random_tokens(self, B: int, T: int, seed: int) -> Tensor:
        """Return normal random tokens [B, T, M] in float64, with a seed for each row."""
        rows = []
        for b in range(B):
            generator = torch.Generator().manual_seed(seed * 1000 + b)
            rows.append(torch.randn(T, self.width, generator=generator, dtype=torch.float64))
        return torch.stack(rows)

    def projections(self) -> tuple[Projections, ...]:
        """Return interpretations of the linear maps: several if a fused map is ambiguous."""
        raise CheckNotPossible(Phrase("the linear maps of {name} cannot be read", name=self.name))

    def declared_mask(self, T: int) -> Tensor | None:
        """Return the mask that the code declares, bool [T, T], or None if it declares none."""
        del T
        return None

    def bias(self, T: int) -> Tensor | None:
        """Return the bias [1, H, T, T] that is passed to every call of T tokens, or None."""
        del T
        return None

    def traced_module(self) -> tuple[nn.Module, TargetAdapter] | None:
        """Return the module whose operations can be recorded, and an adapter for it."""
        return None

    def smaller_versions(self) -> Iterator[TargetAdapter]:
        """Yield the code with fewer heads and features, smallest first, if its sizes vary."""
        yield from ()

    @property
    def cache_window(self) -> int | None:
        """The window beyond which caches are tested: the claimed one, or None."""
        return self.claims.window

    def state_tensors(self) -> dict[str, Tensor] | None:
        """Return the tensors that the code would save, or None if it saves nothing."""
        return None

    def cache_size(self, memory: object) -> int:
        """Return the number of elements in a cache."""
        return count_elements(memory)


def count_elements(x: object, visited_ids: set[int] | None = None) -> int:
    """Count the elements of all tensors inside x: in lists, tuples, sets, dictionaries and
    attributes.

    >>> count_elements({"k": [torch.ones(2, 3)], "v": torch.ones(4)})
    10
    """
    visited_ids = set() if visited_ids is None else visited_ids
    if id(x) in visited_ids or isinstance(x, (str, bytes, int, float, nn.Parameter)):
        return 0
    visited_ids.add(id(x))
    if isinstance(x, Tensor):
        return x.numel()
    if isinstance(x, dict):
        return sum(count_elements(value, visited_ids) for value in x.values())
    if isinstance(x, (list, tuple, set)):
        return sum(count_elements(value, visited_ids) for value in x)
    attributes = getattr(x, "__dict__", None)
    return count_elements(attributes, visited_ids) if isinstance(attributes, dict) else 0


M = TypeVar("M", bound=nn.Module)

_CPU = torch.device("cpu")
_device: ContextVar[torch.device] = ContextVar("device", default=_CPU)


@contextmanager
def run_on(device: torch.device | str | None) -> Iterator[None]:
    """Run audited code on a device in the block; None is the CPU."""
    token = _device.set(_CPU if device is None else torch.device(device))
    try:
        yield
    finally:
        _device.reset(token)


def is_moved() -> bool:
    """Return whether audited code runs on another device than the CPU."""
    return _device.get() != _CPU


def to_run_device(x: Any) -> Any:
    """Return the tensors in x on the device where audited code runs."""
    return _moved(x, _device.get())


def to_checks(x: Any) -> Any:
    """Return the tensors in x on the CPU, where the checks compute."""
    return _moved(x, _CPU)


def placed(module: M) -> M:
    """Move a module to the device of audited code; its calls take and return CPU tensors.

    A cache that is an object of its own stays where the module made it.
    """
    device = _device.get()
    to_device(module)
    if device == _CPU:
        return module

    def before(_: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        return _moved(args, device), _moved(kwargs, device)

    module.register_forward_pre_hook(before, with_kwargs=True)
    module.register_forward_hook(lambda _, __, result: to_checks(result))
    return module


def to_device(module: M) -> M:
    """Move a module to the device where audited code runs, and return it."""
    return module.to(_device.get())


def moved_function(function: Callable[..., object]) -> Callable[..., object]:
    """Return a function that runs on the device, with CPU tensors in and out."""
    device = _device.get()
    if device == _CPU:
        return function

    def run(*args: object, **kwargs: object) -> object:
        return to_checks(function(*_moved(args, device), **_moved(kwargs, device)))

    return run


def _moved(x: Any, device: torch.device) -> Any:
    return tree_map_only(Tensor, lambda y: y.to(device), x)


class Influence(NamedTuple):
    """How much each output changes when each token is replaced."""

    amount: Tensor
    threshold: float

    @property
    def visible(self) -> Tensor:
        """Whether token j reaches output i, bool [T, S]. NaN counts as a change."""
        return ~(self.amount <= self.threshold)

    def strongest(self, where: Tensor) -> tuple[int, int, float]:
        """Return the first influenced output in `where`, its strongest token, and the amount."""
        amounts = torch.where(where & self.visible, self.amount, 0.0)
        i = int((amounts > 0).any(1).to(torch.int64).argmax())
        j = int(amounts[i].argmax())
        return i, j, float(amounts[i, j])


def influence(
    run: Callable[[Tensor], Tensor],
    x: Tensor,
    changed: Callable[[Tensor, int], Tensor],
    tokens: Sequence[int] | None = None,
) -> Influence:
    """Measure the influence of each token: run on x, and on x with each token replaced.

    A change counts above sqrt(eps) times the largest output: more than rounding, and less than
    any weight of a softmax over moderate scores.
    """
    base = run(x)
    columns = []
    for j in range(x.shape[1]) if tokens is None else tokens:
        other = run(changed(x, j))
        difference = (other - base).abs().double()
        # NaN in both outputs does not show that the token has an influence
        difference = torch.where(other.isnan() & base.isnan(), 0.0, difference)
        columns.append(difference.transpose(0, 1).flatten(1).amax(1))
    finite = base[base.isfinite()]
    scale = float(finite.abs().max()) if finite.numel() else 1.0
    return Influence(torch.stack(columns, 1), scale * torch.finfo(base.dtype).eps ** 0.5)
