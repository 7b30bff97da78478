"""When is a result right? One rule for every kernel and dtype, and no tolerance that anybody
chose.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

Result = TypeVar("Result")
aten: Any = torch.ops.aten

GRADIENT = 3.0
"""The factor for gradients."""


def assert_close_rule(
    x: Tensor, plain: Tensor | Sequence[Tensor], ref64: Tensor, factor: float = 2.0, what: str = ""
) -> None:
    """max|x - ref64| <= factor max|plain - ref64| + 2 max|ref + 0.3 - 0.3 - ref|, the last in the
    dtype of x.

    The last term is the rounding of one addition. Of few numbers it may be 0 by luck; it is then
    the distance between neighbouring numbers of the dtype at max|ref|, which is the most that two
    roundings can amount to.

    Args:
        x: what is tested.
        plain: plain math in the same dtype; better several of equal standing, such as other orders
            of the same sums: one alone may be right by luck, and in float64 it may be ref64 itself.
        ref64: the definition in float64. Infinities and NaN must stand at the same places in x and
            in ref64.
    """
    plains = [plain] if isinstance(plain, Tensor) else plain
    x64, ref = x.detach().double(), ref64.detach().double()
    for name, at in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        places = int(at(x64).sum()), int(at(ref).sum())
        assert torch.equal(at(x64), at(ref)), (
            f"{what} {name} at {places[0]} places, not {places[1]}"
        )
    seen = ref.isfinite()
    if not bool(seen.any()):
        return
    errors = []
    for other in plains:
        assert other.shape == x.shape == ref.shape, f"{what} {other.shape}, {x.shape}, {ref.shape}"
        assert other.dtype == x.dtype, f"{what} plain math in {other.dtype}, not {x.dtype}"
        errors.append((other.detach().double() - ref)[seen].abs().max().item())
    rounded = ref[seen].to(x.dtype)
    floor = 2 * (rounded + 0.3 - 0.3 - rounded).abs().max().item()
    floor = floor or spacing(rounded.abs().max())
    allowed = factor * max(errors) + floor
    error = (x64 - ref)[seen].abs().max().item()
    assert error <= allowed, (
        f"{what} error {error:.3g} above {allowed:.3g} ({factor} plain + {floor:.3g})"
    )


class _SumsBackwards(TorchDispatchMode):
    """Sum the terms of matrix products, and of sums, from the last one to the first."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in {aten.mm.default, aten.bmm.default, aten.addmm.default, aten.baddbmm.default}:
            *before, a, b = args
            args = (*before, a.flip(-1), b.flip(-2))
        elif func in {aten.mv.default, aten.dot.default}:
            args = tuple(x.flip(-1) for x in args)
        elif func in {aten.sum.default, aten.sum.dim_IntList}:
            summed = args[1] if len(args) > 1 and args[1] else range(args[0].ndim)
            args = (args[0].flip([*summed]), *args[1:])
        return func(*args, **(kwargs or {}))


def in_both_orders(compute: Callable[[], Result]) -> list[Result]:
    """The results of plain math, and of the same math with every sum from the last term to the
    first: neither is better, and one of them alone may be right by luck, which depends on the
    processor.
    """
    found = [compute()]
    with _SumsBackwards():
        found.append(compute())
    return found


def spacing(x: Tensor) -> float:
    """The distance from x, at least 0, to the next larger number of its dtype."""
    return (torch.nextafter(x, torch.full_like(x, torch.inf)) - x).item()
