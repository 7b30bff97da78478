"""What a caller may give for a mask, a bias or positions, and what the defaults are."""

from __future__ import annotations

import warnings
from dataclasses import fields

from torch import Tensor

from regard import biases, masks
from regard.biases import Bias
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Mask
from regard.process import is_compiling
from regard.span import EMPTY, Positions, Span, count


def last(keys: Positions, T: int) -> Positions:
    """The default query positions: the last T of the keys' ones (bottom-right alignment).

    Raises:
        ArgumentError: there are not so many keys at stored positions; or fewer queries than keys, and a row of keys that ends
            in empty slots, in which its queries would stand.

    >>> last(Span(0, 5), 2), last(Span(0, 2), 3)
    (Span(start=3, length=2), Span(start=-1, length=3, tokens=True))
    """
    if isinstance(keys, Span):
        return Span(keys.stop - T, T, tokens=keys.stop < T)
    if keys.shape[1] < T:
        raise ArgumentError(
            f"{T} queries for {keys.shape[1]} keys at given k_positions: give q_positions as well"
        )
    if 0 < T < keys.shape[1] and not is_compiling():
        _check_ends(keys, T)
    return keys[:, keys.shape[1] - T :]


def _check_ends(keys: Tensor, T: int) -> None:
    """The last tokens of a row stand at its end, so that they may be the queries."""
    ends = (keys[:, -1] <= EMPTY) & (keys > EMPTY).any(1)
    if bool(ends.any()):
        raise ArgumentError(
            f"k_positions of row {int(ends.nonzero()[0])} end in an empty slot (-1), and {T} queries for {keys.shape[1]} keys "
            "would stand there by default, where a query sees nothing: give q_positions as well"
        )


def as_mask(mask: Mask | Tensor | None) -> Mask:
    """None is Full(), a bool tensor is Dense(tensor)."""
    if mask is None:
        return masks.Full()
    if isinstance(mask, Mask):
        return mask
    if isinstance(mask, Tensor):
        if mask.is_floating_point():
            raise ArgumentTypeError(
                f"mask is {str(mask.dtype).removeprefix('torch.')}; a mask is bool, True = may attend: "
                "use regard.masks.from_additive(mask), or pass it as bias="
            )
        dense = masks.Dense(mask)
        _warn_if_inverted(mask)
        return dense
    raise ArgumentTypeError(_no_mask(mask))


def _no_mask(given: object) -> str:
    if isinstance(given, type):
        return f"mask is the class {given.__name__}; make one: {given.__name__}(...)"
    return f"mask is {type(given).__name__}; it must be a regard.masks mask, a bool tensor or None"


def check_rules(
    mask: Mask, bias: Bias | None, sizes: tuple[int, int], q: Positions, k: Positions
) -> None:
    """What a caller's own function or class says is for as many rows of the batch and heads as the call has.

    Ours know these sizes (`require`). Of others one pair is asked for: most kernels would take another size for a batch to
    broadcast to, and compiled ones for the last row or head.

    Raises:
        ArgumentError: it is for another number of them.
    """
    if count(q) == 0 or count(k) == 0:
        return
    one = slice(0, 1)
    for name, rule in (("mask", mask), ("bias", bias)):
        if rule is None or not _foreign(rule):
            continue
        found = tuple(rule.block(q, k, one, one).shape[:2])
        if any(n not in (1, size) for n, size in zip(found, sizes, strict=True)):
            raise ArgumentError(
                f"{name} {rule} is for batch {found[0]} and {found[1]} heads, but the call has batch {sizes[0]} and "
                f"{sizes[1]} heads; it must give 1 or as many of each"
            )


_FAMILIAR = "_familiar"
"""Where a rule that was looked through remembers it: a model asks with the same one for every layer and token."""


def _foreign(rule: Mask | Bias) -> bool:
    """Whether a function or class of the caller is in it."""
    if _FAMILIAR in rule.__dict__:
        return False
    if isinstance(rule, (masks.Fn, biases.Fn)) or not type(rule).__module__.startswith("regard."):
        return True
    values = [getattr(rule, x.name) for x in fields(rule)]
    inner = [y for x in values for y in (x if isinstance(x, tuple) else (x,))]
    found = any(_foreign(x) for x in inner if isinstance(x, (Mask, Bias)))
    if not found and not is_compiling():
        rule.__dict__[_FAMILIAR] = True
    return found


def as_bias(bias: Bias | Tensor | None) -> Bias | None:
    """A float tensor is Dense(tensor)."""
    if bias is None or isinstance(bias, Bias):
        return bias
    if isinstance(bias, Tensor):
        return biases.Dense(bias)
    raise ArgumentTypeError(
        f"bias is {type(bias).__name__}; it must be a regard.biases bias, a float tensor or None"
    )


def _warn_if_inverted(mask: Tensor) -> None:
    """A square mask that hides every query's own key is nearly always one of the other polarity."""
    square = mask.shape[-1] == mask.shape[-2] > 1
    if is_compiling() or not square:
        return
    if not bool(mask.diagonal(dim1=-2, dim2=-1).any()) and bool(mask.any()):
        warnings.warn(
            "mask hides each query's own key: is it inverted? True = may attend; "
            "regard.masks.from_drop(mask) takes a mask with True = drop, and a mask that means it is regard.masks.Dense(mask)",
            stacklevel=5,
        )
