"""Recognize the rule behind a dense mask: a tensor [T, S] that is causal, a window or padding.

Most models build a tensor of booleans, or of 0 and -inf, and pass it to every layer. A kernel that
knows the rule skips the hidden keys, whereas it would have to read every element of the tensor. A
recognized mask equals the tensor element by element: the rule is evaluated and compared with it.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from regard.masks import Causal, Dense, Document, Mask, Padding, Window
from regard.span import Span

MAX_CACHED_MASKS = 32
"""The number of recognized tensors in the cache; a model has one or two kinds of mask per step."""

COMPARED_ROWS = 64
"""The number of rows of a mask that are compared with a rule at once."""


@dataclass(frozen=True)
class RecognizedMask:
    """The meaning of a dense mask in a call with T queries and S keys.

    Attributes:
        mask: the rule; `Dense` if no rule fits; None if every query sees every key.
        q_positions: the positions of the queries; the keys are at 0..S-1.
        bias: what a float mask adds to the scores, or None.
        uniform_rows: True if the mask hides every key of a row, and by a finite number such as
            finfo.min instead of -inf. torch then returns the mean of all values, which no rule
            expresses, so that torch must run such a call.
    """

    mask: Mask | None
    q_positions: Span
    bias: Tensor | None = None
    uniform_rows: bool = False


def recognize_mask(mask: Tensor, B: int, T: int, S: int) -> RecognizedMask:
    """Find the rule behind a mask in torch's convention.

    Args:
        mask: bool, True = may attend, or floats that are added to the scores; any shape that
            broadcasts to [B, H, T, S].
        B: the number of rows of the batch.
        T: the number of queries.
        S: the number of keys.

    Returns:
        The rule, the positions of the queries, and what a float mask adds to the scores.

    >>> recognized = recognize_mask(torch.ones(3, 5, dtype=torch.bool).tril(2), 1, 3, 5)
    >>> print(recognized.mask, recognized.q_positions)
    causal Span(start=2, length=3)
    """
    mask = mask.detach()
    mask = mask[(None,) * (4 - mask.ndim)]
    mask = mask.expand(*mask.shape[:2], T, S)
    if mask.dtype == torch.bool:
        return _rule(mask, B, T, S)
    lowest = mask <= torch.finfo(mask.dtype).min / 2
    recognized = _rule(~lowest, B, T, S)
    bias = None if bool((lowest | (mask == 0)).all()) else mask.masked_fill(lowest, 0)
    finite = (lowest & (mask > -torch.inf)).any(-1)
    return replace(recognized, bias=bias, uniform_rows=bool((lowest.all(-1) & finite).any()))


class RecognizedMaskCache:
    """A cache of recognized masks by storage and version, since the layers of a model share one
    tensor.
    """

    def __init__(self, size: int = MAX_CACHED_MASKS) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[object, ...], tuple[StorageWeakRef, RecognizedMask]] = (
            OrderedDict()
        )
        self.misses = 0
        """The number of masks that were not in the cache."""

    def recognize(self, mask: Tensor, B: int, T: int, S: int) -> RecognizedMask:
        """Return `recognize_mask` of these arguments, computed once for a tensor that does not
        change.
        """
        if mask.is_inference():  # inference tensors have no version counter
            self.misses += 1
            return recognize_mask(mask, B, T, S)
        storage = mask.untyped_storage()
        key = (
            storage._cdata,
            mask.storage_offset(),
            mask._version,
            mask.dtype,
            tuple(mask.shape),
            mask.stride(),
            B,
            T,
            S,
        )
        with self._lock:
            entry = self._entries.get(key)
        if entry is not None and not entry[0].expired():
            return entry[1]
        recognized = recognize_mask(mask, B, T, S)
        self.misses += 1
        with self._lock:
            self._entries[key] = (StorageWeakRef(storage), recognized)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        return recognized


def _rule(visible: Tensor, B: int, T: int, S: int) -> RecognizedMask:
    """Return the first candidate rule that equals a bool mask [B or 1, H or 1, T, S]."""
    end_aligned = Span(S - T, T, tokens=S < T)
    if T and S and _same_for_heads(visible):
        if bool(visible.all()):
            return RecognizedMask(None, end_aligned)
        visible = visible[:, :1]
        for rule, start in _candidates(visible[:, 0], B, T, S):
            positions = Span(start, T, tokens=start < 0)
            if _equals(rule, positions, visible):
                return RecognizedMask(rule, positions)
    return RecognizedMask(Dense(visible), end_aligned)


def _equals(rule: Mask, positions: Span, visible: Tensor) -> bool:
    """Whether a rule gives a mask [B or 1, 1, T, S], compared some rows at a time.

    The last rows are compared first, where most rules differ, and a few rows fit into the caches of
    the processor.
    """
    T, S = visible.shape[-2:]
    for start in reversed(range(0, T, COMPARED_ROWS)):
        rows = slice(start, min(start + COMPARED_ROWS, T))
        block = rule.block(positions, Span(0, S), rows, device=visible.device)
        if not torch.equal(*torch.broadcast_tensors(block, visible[:, :, rows])):
            return False
    return True


def _same_for_heads(visible: Tensor) -> bool:
    """Whether the mask is the same for every head."""
    if visible.shape[1] == 1 or visible.stride(1) == 0:
        return True
    return torch.equal(visible, visible[:, :1].expand_as(visible))


def _candidates(visible: Tensor, B: int, T: int, S: int) -> Iterator[tuple[Mask, int]]:
    """Yield the rules that a mask [B or 1, T, S] may be, each with the position of the first
    query.
    """
    keys = visible.any(1)  # [B or 1, S]: which keys some query sees
    visible_columns = keys[0].nonzero()
    if not len(visible_columns):
        return
    padding = None if bool(keys.all()) else Padding.from_keep(keys.expand(B, S))
    if padding is not None:
        yield padding, S - T
    # the last query has the longest past: the first key that it sees in any row of the batch
    # bounds a window
    seen_by_last_query = visible[:, -1].any(0).nonzero()
    first_visible = int(seen_by_last_query[0]) if len(seen_by_last_query) else S
    last = visible[0, -1].nonzero()
    last_query_start = int(last[-1]) - (T - 1) if len(last) else S - T
    for start in dict.fromkeys((S - T, 0, last_query_start)):
        rules: list[Mask] = [Causal()]
        size = start + T - first_visible
        if 1 <= size < S:
            rules.append(Causal() & Window(size))
        for rule in rules:
            yield rule, start
            if padding is not None:
                yield rule & padding, start
    if T == S and (documents := _documents(visible)) is not None:
        yield documents, 0
        yield Causal() & documents, 0


def _documents(visible: Tensor) -> Document | None:
    """Return the documents that begin at the first visible keys of the rows, or None if there is
    only one, or if the rows of the batch differ.
    """
    first = visible[0].to(torch.uint8).argmax(-1)
    bounds = first.unique().tolist()
    if len(bounds) < 2 or bounds[0] != 0 or bool((first.diff() < 0).any()):
        return None
    return Document((*bounds, visible.shape[-1]))
