"""Convert transformers' mask functions into rules: causal, window, chunk, documents, padding.

transformers builds a mask from small closures (q_idx, kv_idx) -> bool, joined by `and` and `or`.
Each has an equivalent mask of regard, which is found by the name of the closure and the numbers
that it holds; no closure is called. A function that is not one of transformers' own becomes a dense
mask.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from operator import and_, or_
from typing import Any, NamedTuple

import torch
from torch import Tensor
from transformers import masking_utils

from regard import masks
from regard.integrations.transformers.mask_tensor import EMPTY_WINDOW, MaskRule
from regard.integrations.transformers.supported_models import accepts_bool_masks
from regard.masks import Causal, Chunk, Document, Full, Mask, Padding, Window
from regard.process_state import is_compiling
from regard.span import Span

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
    return masking_utils.eager_mask(**arguments, **others)


def _dense(arguments: dict[str, Any], others: dict[str, Any]) -> Mask:
    """Return the dense mask that transformers makes, even where it would leave the mask out."""
    no_skips = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    table = masking_utils.sdpa_mask(**arguments, **(others | no_skips))
    assert table is not None, "the arguments forbid leaving the mask out"
    return masks.Dense(table)
