"""Tensors that carry a mask of regard through a transformers model in the place of a dense mask.

transformers makes a mask once for each forward pass and passes it from module to module as a
tensor. `MaskRule` is such a tensor: it has the shape, dtype and device of the dense bool mask
[B,1,T,S], but only one element of memory, and it carries the rule.

Code that expects an additive mask would read True as the number 1, so that a `MaskRule` supports
unambiguous operations only, and raises an error for every other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.masks import Full, Mask
from regard.span import Span

EMPTY_WINDOW = ~Full()
"""The mask of a window of less than one key: no query sees any key."""

_SHAPE_METHODS = {
    getattr(Tensor, name)
    for name in (
        "size",
        "stride",
        "storage_offset",
        "dim",
        "ndimension",
        "numel",
        "nelement",
        "element_size",
        "get_device",
        "__len__",
        "is_floating_point",
        "is_complex",
        "is_contiguous",
        "is_inference",
        "is_shared",
        "is_conj",
        "is_neg",
        "_is_view",
        "_is_zerotensor",
        "untyped_storage",
    )
}
"""Methods that do not read the values of a mask. Attributes do not either, except those of
`_VALUE_ATTRIBUTES`.
"""

_VALUE_ATTRIBUTES = {
    getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag")
}
"""Attributes that give access to the values of a mask, and are refused."""

_IDENTITY_FUNCTIONS = {Tensor.detach, Tensor.contiguous, Tensor.clone, torch.detach, torch.clone}
"""Functions that return the same mask."""

_VIEW_FUNCTIONS = {
    Tensor.expand,
    Tensor.unsqueeze,
    Tensor.squeeze,
    Tensor.narrow,
    torch.unsqueeze,
    torch.squeeze,
    torch.narrow,
}
"""Functions that return a part of a mask, or the same entries in another shape."""

_NOT_FUNCTIONS = {Tensor.__invert__, Tensor.bitwise_not, torch.bitwise_not}
_AND_OR_FUNCTIONS = {
    Tensor.__and__,
    Tensor.__rand__,
    Tensor.__or__,
    Tensor.__ror__,
    Tensor.bitwise_and,
    Tensor.bitwise_or,
    torch.bitwise_and,
    torch.bitwise_or,
}
_DEVICE_METHODS = {Tensor.to, Tensor.cpu, Tensor.cuda}


class BoolMask(Tensor):
    """A bool mask, True = may attend, that refuses operations meant for masks that are added to
    scores.

    >>> mask = BoolMask.of(torch.tensor([[True, False]]))
    >>> type(mask[:, 0]).__name__, (~mask).tolist(), (mask & True).dense().tolist()
    ('BoolMask', [[False, True]], [[True, False]])
    """

    @staticmethod
    def of(table: Tensor) -> BoolMask:
        """Make the mask from a dense bool tensor.

        Args:
            table: the dense mask, bool, True = may attend.

        Returns:
            The same tensor as a `BoolMask`.
        """
        return table.as_subclass(BoolMask)

    def dense(self) -> Tensor:
        """Return the entries as a plain tensor.

        Returns:
            The dense mask, a plain bool tensor.
        """
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __repr__(self, *, tensor_contents: object = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._description()})"

    def _description(self) -> str:
        return f"bool{list(self.shape)}"

    def _index(self, index: Any) -> BoolMask:
        return BoolMask.of(self.dense()[index])

    def _to_device(self, device: torch.device) -> BoolMask:
        return BoolMask.of(self.dense().to(device))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[object, ...] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        mask = args[0] if args and isinstance(args[0], BoolMask) else None
        if func in _SHAPE_METHODS or (
            getattr(func, "__name__", "") == "__get__" and func not in _VALUE_ATTRIBUTES
        ):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if mask is not None and not _holds_mask((*args[1:], *kwargs.values())):
            if func in _IDENTITY_FUNCTIONS:
                return mask
            if func in _DEVICE_METHODS:
                return mask._to_device(_device(func, mask, args[1:], kwargs))
            if func is Tensor.__getitem__:
                return mask._index(args[1])
            if func in _VIEW_FUNCTIONS:
                return BoolMask.of(func(mask.dense(), *args[1:], **kwargs))
        if func in _NOT_FUNCTIONS and mask is not None:
            return func(mask.dense())
        if func is torch.where and mask is not None and not _holds_mask(args[1:]):
            return func(mask.dense(), *args[1:], **kwargs)
        if func in _AND_OR_FUNCTIONS and all(_is_bool(x) for x in args):
            return BoolMask.of(func(*(x.dense() if isinstance(x, BoolMask) else x for x in args)))
        return _refuse(func)


class MaskRule(BoolMask):
    """The bool mask [B,1,T,S] of a rule at the positions of a call, without its entries in memory.

    Attributes:
        rule: the mask as a rule on positions.

    Indexing by slices of queries or keys gives another `MaskRule`; any other index, and `&` and
    `|`, give a dense `BoolMask`. `~` gives a plain bool tensor, True = hidden; `torch.where(mask,
    a, b)` gives a where a key is visible. Everything else is refused, above all operations on
    masks that are added to scores: arithmetic, comparisons, `masked_fill`, `cat`, another dtype.

    >>> from regard.masks import Causal
    >>> mask = MaskRule.make(Causal(), Span(0, 2), Span(0, 2))
    >>> mask.shape, mask, mask[:, :, -1:]
    (torch.Size([1, 1, 2, 2]), MaskRule(causal), MaskRule(causal))
    >>> mask[0, 0].dense().int().tolist()
    [[1, 0], [1, 1]]
    """

    rule: Mask
    q_positions: Span
    k_positions: Span

    @classmethod
    def make(
        cls,
        rule: Mask,
        q_positions: Span,
        k_positions: Span,
        batch: int = 1,
        device: torch.device | str = "cpu",
    ) -> MaskRule:
        """Make the mask of a batch.

        Args:
            device: the device that the tensor reports.

        Returns:
            A tensor of shape [batch, 1, T, S].

        Raises:
            ArgumentError: the rule does not fit the shape.
        """
        shape = (batch, 1, len(q_positions), len(k_positions))
        rule.require(*shape)
        one = torch.zeros((), dtype=torch.bool, device=device)
        mask = one.expand(shape).as_subclass(cls)
        mask.rule, mask.q_positions, mask.k_positions = rule, q_positions, k_positions
        return mask

    def dense(self) -> Tensor:
        """Evaluate the rule, and return the dense mask, bool [B,1,T,S]."""
        visible = self.rule.block(self.q_positions, self.k_positions, device=self.device)
        return visible.expand(self.shape)

    def _description(self) -> str:
        return str(self.rule)

    def _index(self, index: object) -> BoolMask:
        inside = _spans(index, self.q_positions, self.k_positions)
        if inside is None or _has_slot_rows(self.rule):
            return super()._index(index)
        return MaskRule.make(self.rule, *inside, self.shape[0], self.device)

    def _to_device(self, device: torch.device) -> MaskRule:
        return MaskRule.make(self.rule, self.q_positions, self.k_positions, self.shape[0], device)


def _spans(index: object, q: Span, k: Span) -> tuple[Span, Span] | None:
    """Return the queries and keys of mask[:, :, a:b, c:d]; None for any other index."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [x for x in index if not isinstance(x, Tensor)]:
        ellipsis_index = next(i for i, x in enumerate(index) if x is Ellipsis)
        index = (
            *index[:ellipsis_index],
            *[slice(None)] * (5 - len(index)),
            *index[ellipsis_index + 1 :],
        )
    if not all(isinstance(x, slice) for x in index) or len(index) > 4:
        return None
    index = (*index, *[slice(None)] * (4 - len(index)))
    if any(x != slice(None) for x in index[:2]):
        return None
    spans = []
    for part, span in zip(index[2:], (q, k), strict=True):
        start, stop, step = part.indices(len(span))
        if step != 1 or stop <= start:
            return None
        spans.append(Span(span.start + start, stop - start))
    return spans[0], spans[1]


def _has_slot_rows(rule: Mask) -> bool:
    """Whether the rule is a dense table, whose rows are slots of the call and not positions."""
    return rule.by_slot


def _holds_mask(x: object) -> bool:
    if isinstance(x, (list, tuple)):
        return any(map(_holds_mask, x))
    return isinstance(x, BoolMask)


def _is_bool(x: object) -> bool:
    return isinstance(x, bool) or (isinstance(x, Tensor) and x.dtype == torch.bool)


def _device(
    func: Callable[..., Any], mask: Tensor, args: tuple[object, ...], kwargs: Mapping[str, object]
) -> torch.device:
    """Return the device of mask.to(...), mask.cpu() or mask.cuda(); refuse any dtype, even bool."""
    requested = [x.dtype if isinstance(x, Tensor) else x for x in (*args, *kwargs.values())]
    dtype = next((x for x in requested if isinstance(x, torch.dtype)), None)
    if dtype is not None:
        raise ArgumentError(
            f"the model converts a bool mask to {dtype}, as if its numbers were added to scores; "
            f"{_ADVICE}"
        )
    moved: Tensor = func(torch.empty((), dtype=torch.bool, device=mask.device), *args, **kwargs)
    return moved.device


_ADVICE = (
    "the model does not support bool masks, True = may attend: "
    'use model.set_attn_implementation("eager")'
)


def _refuse(func: Callable[..., object]) -> NoReturn:
    """Raise the error for an operation that a mask does not support."""
    # for an attribute, func is the __get__ of its descriptor
    named = func.__self__ if getattr(func, "__name__", "") == "__get__" else func  # type: ignore[attr-defined]
    name = getattr(named, "__name__", str(named)).strip("_")
    raise ArgumentError(
        f"{name} was called on an attention mask of regard; it could interpret True and False "
        f"in another sense; {_ADVICE}"
    )
