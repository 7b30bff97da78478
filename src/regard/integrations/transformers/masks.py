"""Masks of transformers: its mask functions as rules, and tensors that carry a rule through a
model.

transformers builds a mask from small closures (q_idx, kv_idx) -> bool, joined by `and` and `or`.
Each has an equivalent mask of regard, which is found by the name of the closure and the numbers
that it holds; no closure is called. A function that is not one of transformers' own becomes a dense
mask.

transformers makes a mask once for each forward pass and passes it from module to module as a
tensor. `MaskRule` is such a tensor: it has the shape, dtype and device of the dense bool mask
[B,1,T,S], but only one element of memory, and it carries the rule. Code that expects an additive
mask would read True as the number 1, so that a `MaskRule` supports unambiguous operations only, and
raises an error for every other one.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple, NoReturn

import torch
from torch import Tensor
from transformers import masking_utils

from regard import masks
from regard.errors import ArgumentError
from regard.integrations.transformers.supported_models import accepts_bool_masks
from regard.masks import Causal, Chunk, Document, Full, Mask, Padding, Window
from regard.process_state import is_compiling
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
        if inside is None or self.rule.by_slot:
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


EXTENDED = ("deepseek_v4", "t5gemma2_decoder")
"""Models that append an additive mask of further keys to this one, so that it must be additive."""
MaskFunction = Callable[..., object]
"""A mask function of transformers: (batch_idx, head_idx, q_idx, kv_idx) -> bool."""


class MaskPositions(NamedTuple):
    """The positions of the queries and of the keys of a forward pass."""

    q: Span
    k: Span

    @property
    def stop(self) -> int:
        """One past the last position of a query or key."""
        return max(self.q.stop, self.k.stop)

    @property
    def largest_distance(self) -> int:
        """The largest distance between a query and a key."""
        return max(self.q.stop - 1 - self.k.start, self.k.stop - 1 - self.q.start)


def regard_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: MaskFunction = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: object,
) -> Tensor | None:
    """Make the mask of a forward pass, as transformers' `AttentionMaskInterface` calls it.

    Args:
        batch_size: the number of rows B.
        q_length: the number of queries T.
        q_offset: the position of the first query.
        kv_offset: the position of the first key.
        mask_function: the mask as a function (batch_idx, head_idx, q_idx, kv_idx) -> bool.
        attention_mask: [B, L], True = a token, at positions 0 to L - 1.
        kwargs: other arguments of transformers. `allow_is_causal_skip` is applied in a traced graph
            only.

    Returns:
        A `MaskRule`, which holds a dense mask if no rule fits. In a traced graph a plain tensor, or
        None if the module itself knows whether it is causal.

    >>> regard_mask(1, 3, 5, q_offset=2)
    MaskRule(causal)
    >>> window = masking_utils.sliding_window_causal_mask_function(2)
    >>> regard_mask(1, 3, 5, q_offset=2, mask_function=window)
    MaskRule(window(2) & causal)
    """
    arguments: dict[str, object] = {
        "batch_size": batch_size,
        "q_length": q_length,
        "kv_length": kv_length,
        "q_offset": q_offset,
        "kv_offset": kv_offset,
        "mask_function": mask_function,
        "attention_mask": attention_mask,
        "device": device,
    }
    if getattr(kwargs.get("config"), "model_type", None) in EXTENDED:
        return _additive(arguments, kwargs)
    decoding = q_length == 1 and not kwargs.get("allow_is_causal_skip", True)
    if is_compiling():
        return _plain_mask_for_graph(arguments, kwargs)
    if decoding and isinstance(q_offset, Tensor):
        # with a static cache the decoding step may be compiled, so that it accepts tensors only
        return _plain_mask_for_graph(arguments, kwargs)
    positions = MaskPositions(Span(int(q_offset), q_length), Span(kv_offset, kv_length))
    rule = rule_of(mask_function, positions)
    if rule is None or (attention_mask is not None and attention_mask.ndim != 2):
        rule = _dense(arguments, kwargs)
    elif attention_mask is not None and rule != EMPTY_WINDOW:
        rule = _with_padding(rule, attention_mask, positions)
    return MaskRule.make(rule, positions.q, positions.k, batch_size, device)


def rule_of(function: MaskFunction, positions: MaskPositions) -> Mask | None:
    """Return the rule of a transformers mask function at these positions, or None."""
    convert = _RULES.get(_name(function))
    return None if convert is None else convert(_closure_values(function), positions)


def _name(function: MaskFunction) -> str:
    """Return the name of the function of transformers that this is, or that made it; else ""."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return ""
    return function.__qualname__.partition(".")[0]


def _closure_values(function: MaskFunction) -> dict[str, Any]:
    """Return the values that a closure holds, by name."""
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _causal(_values: dict[str, object], positions: MaskPositions) -> Mask:
    # no key comes after a decoded token: without a mask, kernels do not test for hidden keys
    return Full() if positions.q.start >= positions.k.stop - 1 else Causal()


def _window(values: dict[str, Any], positions: MaskPositions) -> Mask:
    size = values["sliding_window"]
    if size < 1:
        return EMPTY_WINDOW
    # a window that covers all keys hides nothing
    return Full() if positions.q.stop - positions.k.start <= size else Window(size)


def _bidirectional_window(values: dict[str, Any], positions: MaskPositions) -> Mask:
    size = values["sliding_window"]
    if size < 0:
        return EMPTY_WINDOW
    return Full() if positions.largest_distance <= size else Window(size + 1, ahead=size)


def _chunk(values: dict[str, Any], positions: MaskPositions) -> Mask:
    size = values["chunk_size"]
    if size < 1:
        return EMPTY_WINDOW
    # the chunks of each row begin at its first token
    first = [padding % size for padding in values["left_padding"].tolist()]
    if not any(first):
        return Full() if positions.stop <= size else Chunk(size)
    bounds_of_rows = [(*range(x, positions.stop, size), max(positions.stop, x)) for x in first]
    return Document(tuple((0, *bounds) if bounds[0] else bounds for bounds in bounds_of_rows))


def _packed_sequences(values: dict[str, Any], _positions: MaskPositions) -> Mask:
    ids = values["packed_sequence_mask"]
    starts = [(x.nonzero()[:, 0] + 1).tolist() for x in ids.diff(dim=1)]
    return Document(tuple((0, *starts_of_row, ids.shape[1]) for starts_of_row in starts))


def _all_of(values: dict[str, Any], positions: MaskPositions) -> Mask | None:
    functions = values["mask_functions"]
    packed = "packed_sequence_mask_function" in map(_name, functions)
    rules = []
    for function in functions:
        if packed and _name(function) == "remap_positions_for_packed_sequence":
            # here positions count from the start of each document; the difference of two
            # positions in one document equals that of their slots
            function = _closure_values(function)["mask_function"]
            if not _depends_on_distance(function):
                return None
        rules.append(rule_of(function, positions))
    if None in rules:
        return None
    restricting = [part for part in rules if part is not None and not isinstance(part, Full)]
    if EMPTY_WINDOW in restricting:
        return EMPTY_WINDOW
    return reduce(and_, restricting or [Full()])


def _any_of(values: dict[str, Any], positions: MaskPositions) -> Mask | None:
    rules = [rule_of(function, positions) for function in values["mask_functions"]]
    return None if None in rules else reduce(or_, [part for part in rules if part is not None])


def _depends_on_distance(function: MaskFunction) -> bool:
    """Whether the function depends on q_idx - kv_idx only."""
    if _name(function) in ("and_masks", "or_masks"):
        return all(map(_depends_on_distance, _closure_values(function)["mask_functions"]))
    return _name(function) in _DISTANCE_FUNCTIONS


_RULES: dict[str, Callable[[dict[str, object], MaskPositions], Mask | None]] = {
    "causal_mask_function": _causal,
    "bidirectional_mask_function": lambda _values, _positions: Full(),
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _bidirectional_window,
    "chunked_overlay": _chunk,
    "packed_sequence_mask_function": _packed_sequences,
    "and_masks": _all_of,
    "or_masks": _any_of,
}
_DISTANCE_FUNCTIONS = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
)


def _with_padding(rule: Mask, keep: Tensor, positions: MaskPositions) -> Mask:
    """Hide the keys that are padding; keep [B, L] is True at positions that hold a token."""
    tokens = keep[:, positions.k.start : positions.k.stop]
    causal = any(isinstance(term, Causal) for term in rule.terms())
    # slots of a static cache after the last token are hidden by the causal mask already
    needed = min(positions.q.stop, positions.k.stop) if causal else positions.k.stop
    if positions.k.start + tokens.shape[1] >= needed and bool(tokens.all()):
        return rule
    padding = Padding.from_keep(keep.bool())
    return padding if isinstance(rule, Full) else rule & padding


def _plain_mask_for_graph(arguments: dict[str, Any], others: dict[str, Any]) -> Tensor | None:
    """Make the plain tensor of the model's own code, since graphs hold no rules."""
    if accepts_bool_masks(others.get("config")):
        return masking_utils.sdpa_mask(**arguments, **others)
    return _additive(arguments, others)


def _additive(arguments: dict[str, Any], others: dict[str, Any]) -> Tensor:
    """Make the mask that is added to scores, as eager attention reads it."""
    mask: Tensor = masking_utils.eager_mask(**arguments, **others)
    return mask


def _dense(arguments: dict[str, Any], others: dict[str, Any]) -> Mask:
    """Return the dense mask that transformers makes, even where it would leave the mask out."""
    no_skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    table = masking_utils.sdpa_mask(**arguments, **(others | no_skips))
    assert table is not None, "the arguments forbid leaving the mask out"
    return masks.Dense(table)
