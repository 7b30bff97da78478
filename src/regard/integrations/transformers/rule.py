"""A mask of regard's that travels through a transformers model in the place of a dense one.

transformers makes a mask once a forward pass and hands it from module to module as a tensor.
`MaskRule` is such a tensor: it has the shape, dtype and device of the dense bool mask [B,1,T,S],
but a single element of memory, and carries the rule.

Code that was written for the masks of eager attention, which are added to scores, would read True
as the number 1. So a mask does only what has one meaning, and that for bool masks alone: it tells
its shape, moves to a device, gives parts of itself, and takes `~`, `&`, `|` and the first place of
`torch.where`, which no float mask does. Everything else is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NoReturn

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.masks import Full, Mask
from regard.span import Span

NOTHING = ~Full()
"""The rule of a window of less than one key: no query sees any key."""

_SHAPE = {
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
"""What is asked about a mask without looking at its values; so are its attributes, but for those of
`_VALUES`.
"""

_VALUES = {getattr(Tensor, name).__get__ for name in ("T", "mT", "H", "mH", "data", "real", "imag")}

_SAME = {Tensor.detach, Tensor.contiguous, Tensor.clone, torch.detach, torch.clone}
"""What gives the same mask again."""

_PARTS = {
    Tensor.expand,
    Tensor.unsqueeze,
    Tensor.squeeze,
    Tensor.narrow,
    torch.unsqueeze,
    torch.squeeze,
    torch.narrow,
}
"""What gives a part of a mask, or the same entries in another shape."""

_OPPOSITE = {Tensor.__invert__, Tensor.bitwise_not, torch.bitwise_not}
_JOINED = {
    Tensor.__and__,
    Tensor.__rand__,
    Tensor.__or__,
    Tensor.__ror__,
    Tensor.bitwise_and,
    Tensor.bitwise_or,
    torch.bitwise_and,
    torch.bitwise_or,
}
_DEVICES = {Tensor.to, Tensor.cpu, Tensor.cuda}


class BoolMask(Tensor):
    """A bool mask, True = may attend, that refuses whatever would be done with a mask that is added
    to scores.

    >>> mask = BoolMask.of(torch.tensor([[True, False]]))
    >>> type(mask[:, 0]).__name__, (~mask).tolist(), (mask & True).dense().tolist()
    ('BoolMask', [[False, True]], [[True, False]])
    """

    @staticmethod
    def of(table: Tensor) -> BoolMask:
        """The mask of a dense bool tensor."""
        return table.as_subclass(BoolMask)

    def dense(self) -> Tensor:
        """The entries, as a plain bool tensor."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor)

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"{type(self).__name__}({self._shown()})"

    def _shown(self) -> str:
        return f"bool{list(self.shape)}"

    def _part(self, index: Any) -> BoolMask:
        return BoolMask.of(self.dense()[index])

    def _moved(self, device: torch.device) -> BoolMask:
        return BoolMask.of(self.dense().to(device))

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        mask = args[0] if args and isinstance(args[0], BoolMask) else None
        if func in _SHAPE or (getattr(func, "__name__", "") == "__get__" and func not in _VALUES):
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if mask is not None and not _holds_mask((*args[1:], *kwargs.values())):
            if func in _SAME:
                return mask
            if func in _DEVICES:
                return mask._moved(_device(func, mask, args[1:], kwargs))
            if func is Tensor.__getitem__:
                return mask._part(args[1])
            if func in _PARTS:
                return BoolMask.of(func(mask.dense(), *args[1:], **kwargs))
        if func in _OPPOSITE and mask is not None:
            return func(mask.dense())
        if func is torch.where and mask is not None and not _holds_mask(args[1:]):
            return func(mask.dense(), *args[1:], **kwargs)
        if func in _JOINED and all(_is_bool(x) for x in args):
            return BoolMask.of(func(*(x.dense() if isinstance(x, BoolMask) else x for x in args)))
        return _refuse(func)


class MaskRule(BoolMask):
    """The dense bool mask [B,1,T,S] of a rule at the positions of a call, True = may attend, not
    yet made.

    rule: the mask; q_positions, k_positions: where the queries and the keys stand.

    A part of it in which whole queries or keys are left out is a rule again; other parts, and what
    `&` and `|` give, are made dense. `~` gives a plain bool tensor, True = hidden;
    `torch.where(mask, a, b)` gives a where a key may be seen. Everything else is refused, above all
    what is done with a mask that is added to scores: arithmetic, comparisons, `masked_fill`, `cat`,
    another dtype.

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
        """The mask of a batch.

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
        """The dense mask, bool [B,1,T,S]."""
        found = self.rule.block(self.q_positions, self.k_positions, device=self.device)
        return found.expand(self.shape)

    def _shown(self) -> str:
        return str(self.rule)

    def _part(self, index: Any) -> BoolMask:
        inside = _spans(index, self.q_positions, self.k_positions)
        if inside is None or _of_slots(self.rule):
            return super()._part(index)
        return MaskRule.make(self.rule, *inside, self.shape[0], self.device)

    def _moved(self, device: torch.device) -> MaskRule:
        return MaskRule.make(self.rule, self.q_positions, self.k_positions, self.shape[0], device)


def _spans(index: Any, q: Span, k: Span) -> tuple[Span, Span] | None:
    """The queries and keys of mask[:, :, a:b, c:d]; None for any other index."""
    index = index if isinstance(index, tuple) else (index,)
    if Ellipsis in [x for x in index if not isinstance(x, Tensor)]:
        at = next(i for i, x in enumerate(index) if x is Ellipsis)
        index = (*index[:at], *[slice(None)] * (5 - len(index)), *index[at + 1 :])
    if not all(isinstance(x, slice) for x in index) or len(index) > 4:
        return None
    index = (*index, *[slice(None)] * (4 - len(index)))
    if any(x != slice(None) for x in index[:2]):
        return None
    found = []
    for part, span in zip(index[2:], (q, k), strict=True):
        start, stop, step = part.indices(len(span))
        if step != 1 or stop <= start:
            return None
        found.append(Span(span.start + start, stop - start))
    return found[0], found[1]


def _of_slots(rule: Mask) -> bool:
    """A dense table: its rows are the slots of the call, not positions."""
    return rule.by_slot


def _holds_mask(x: Any) -> bool:
    if isinstance(x, (list, tuple)):
        return any(map(_holds_mask, x))
    return isinstance(x, BoolMask)


def _is_bool(x: Any) -> bool:
    return isinstance(x, bool) or (isinstance(x, Tensor) and x.dtype == torch.bool)


def _device(
    func: Callable[..., Any], mask: Tensor, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> torch.device:
    """Where mask.to(...), mask.cpu() or mask.cuda() moves it; another dtype is refused, even
    bool.
    """
    given = [x.dtype if isinstance(x, Tensor) else x for x in (*args, *kwargs.values())]
    wanted = next((x for x in given if isinstance(x, torch.dtype)), None)
    if wanted is not None:
        raise ArgumentError(
            f"a mask of True and False is wanted as {wanted}, as if it held numbers that are "
            f"added to scores; {_ADVICE}"
        )
    moved: Tensor = func(torch.empty((), dtype=torch.bool, device=mask.device), *args, **kwargs)
    return moved.device


_ADVICE = (
    "the model does not know bool masks, True = may attend: "
    'use model.set_attn_implementation("eager")'
)


def _refuse(func: Callable[..., Any]) -> NoReturn:
    # an attribute comes as the __get__ of its descriptor
    named = func.__self__ if getattr(func, "__name__", "") == "__get__" else func  # type: ignore[attr-defined]
    name = getattr(named, "__name__", str(named)).strip("_")
    raise ArgumentError(
        f"{name} was tried on an attention mask of regard's, which could read its True and False "
        "in another sense than "
        f"meant; {_ADVICE}"
    )
