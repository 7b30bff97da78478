"""When is a result right? One rule for every kernel and dtype, and no tolerance that anybody
chose. When is a call refused? With a type of error, and words of its message.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from regard.errors import ArgumentError

Result, Part = TypeVar("Result"), TypeVar("Part")
Order = Callable[[Tensor, int], Tensor]
Plain = Tensor | Iterable[Tensor] | Callable[[], Tensor]
aten: Any = torch.ops.aten

PRODUCTS = {getattr(aten, x).default for x in ("mm", "bmm", "addmm", "baddbmm", "mv", "dot")}
SUMS = {aten.sum.default, aten.sum.dim_IntList, aten.mean.default, aten.mean.dim}

GRADIENT = 3.0
"""The factor for gradients."""


def assert_refused(cases: Iterable[tuple[Any, ...]]) -> None:
    """Each case is (call, words), or (call, type of the error, words), words of its message."""
    for call, *kind, words in cases:
        with pytest.raises(kind[0] if kind else ArgumentError) as error:
            call()
        assert words in str(error.value)


def assert_close_rule(
    x: Tensor, plain: Plain, ref64: Tensor, factor: float = 2.0, what: str = ""
) -> None:
    """max|x - ref64| <= factor max|plain - ref64| + 2 max|ref + 0.3 - 0.3 - ref|, the last in the
    dtype of x.

    The last term is the rounding of one addition. Of few numbers it may be 0 by luck; it is then
    the distance between neighbouring numbers of the dtype at max|ref|, which is the most that two
    roundings can amount to.

    Args:
        x: what is tested.
        plain: plain math in the same dtype: a function that computes it, which is run in several
            orders of its sums (`in_orders`), or its results. One result alone may be right by luck,
            and in float64 it may be ref64 itself. The largest error counts, and an order is only
            computed where those before it allow too little.
        ref64: the definition in float64. Infinities and NaN must stand at the same places in x and
            in ref64.
    """
    x64, ref = x.detach().double(), ref64.detach().double()
    for name, at in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        places = int(at(x64).sum()), int(at(ref).sum())
        assert torch.equal(at(x64), at(ref)), (
            f"{what} {name} at {places[0]} places, not {places[1]}"
        )
    seen = ref.isfinite()
    if not bool(seen.any()):
        return
    rounded = ref[seen].to(x.dtype)
    floor = 2 * (rounded + 0.3 - 0.3 - rounded).abs().max().item()
    floor = floor or spacing(rounded.abs().max())
    error, largest = (x64 - ref)[seen].abs().max().item(), 0.0
    for other in _results(plain):
        assert other.shape == x.shape == ref.shape, f"{what} {other.shape}, {x.shape}, {ref.shape}"
        assert other.dtype == x.dtype, f"{what} plain math in {other.dtype}, not {x.dtype}"
        largest = max(largest, (other.detach().double() - ref)[seen].abs().max().item())
        allowed = factor * largest + floor
        if error <= allowed:
            return
    raise AssertionError(
        f"{what} error {error:.3g} above {allowed:.3g} ({factor} plain + {floor:.3g})"
    )


def _results(plain: Plain) -> Iterable[Tensor]:
    if isinstance(plain, Tensor):
        return [plain]
    return in_orders(plain) if callable(plain) else plain


def _natural(x: Tensor, dim: int) -> Tensor:
    return x


def _backwards(x: Tensor, dim: int) -> Tensor:
    return x.flip(dim)


def _even_first(x: Tensor, dim: int) -> Tensor:
    places = torch.arange(x.shape[dim], device=x.device)
    return x.index_select(dim, torch.cat([places[::2], places[1::2]]))


ORDERS = (_natural, _backwards, _even_first)
"""Orders of the terms of a sum: as they stand, from the last to the first, and those at even places
before those at odd places.
"""


class _SumsInOrder(TorchDispatchMode):
    """Sum the terms of matrix products, of sums and of means in another order."""

    def __init__(self, order: Order) -> None:
        super().__init__()
        self._order = order

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs, order = kwargs or {}, self._order
        with self:  # in inference mode `linear`, `matmul` and their like come here whole
            found = func.decompose(*args, **kwargs)
        if found is not NotImplemented:
            return found
        if func in PRODUCTS:
            *before, a, b = args
            args = (*before, order(a, -1), order(b, -1 if b.ndim == 1 else -2))
        elif func in SUMS:
            x, *rest = args
            for dim in (rest and rest[0]) or range(x.ndim):
                x = order(x, dim)
            args = (x, *rest)
        return func(*args, **kwargs)


class InOrders(Sequence[Result]):
    """The results of plain math with its sums in several orders, of which none is better. Each is
    computed when somebody asks for it.
    """

    def __init__(self, compute: Callable[[Order], Result]) -> None:
        self._compute = functools.cache(compute)

    def __len__(self) -> int:
        return len(ORDERS)

    def __getitem__(self, place: Any) -> Any:
        return self._compute(ORDERS[place])

    def each(self, part: Callable[[Result], Part]) -> InOrders[Part]:
        """A part of every result, which is also taken when somebody asks for it."""
        return InOrders(lambda order: part(self._compute(order)))


def in_orders(compute: Callable[[], Result]) -> InOrders[Result]:
    """Plain math in several orders of its sums: one alone may be right by luck, which depends on
    the processor. What it reads must not change before its last result was asked for.
    """

    def run(order: Order) -> Result:
        with contextlib.nullcontext() if order is _natural else _SumsInOrder(order):
            return compute()

    return InOrders(run)


def spacing(x: Tensor) -> float:
    """The distance from x, at least 0, to the next larger number of its dtype."""
    return (torch.nextafter(x, torch.full_like(x, torch.inf)) - x).item()
