"""transformers' mask functions read as rules: causal, window, chunk, documents, padding. What is
unknown stays dense.

transformers builds a mask from small closures (q_idx, kv_idx) -> bool, joined by `and` and `or`.
Each has a rule of regard's that means the same; their names and the numbers that they hold are
read, nothing is evaluated.
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
from regard.integrations.transformers.rule import NOTHING, MaskRule
from regard.integrations.transformers.support import takes_bool
from regard.masks import Causal, Chunk, Document, Full, Mask, Padding, Window
from regard.process_state import is_compiling
from regard.span import Span

Indices = Callable[..., Any]
"""A mask function of transformers: (batch_idx, head_idx, q_idx, kv_idx) -> bool."""


class Where(NamedTuple):
    """Where the queries and the keys of a forward pass stand."""

    q: Span
    k: Span

    @property
    def stop(self) -> int:
        """One past the last position."""
        return max(self.q.stop, self.k.stop)

    @property
    def longest(self) -> int:
        """The largest distance of a query from a key."""
        return max(self.q.stop - 1 - self.k.start, self.k.stop - 1 - self.q.start)


def regard_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: int | Tensor = 0,
    kv_offset: int = 0,
    mask_function: Indices = masking_utils.causal_mask_function,
    attention_mask: Tensor | None = None,
    device: torch.device | str = "cpu",
    **kwargs: Any,
) -> Tensor | None:
    """The mask of a forward pass, for transformers' `AttentionMaskInterface`: a rule, or a dense
    tensor where none fits.

    Args:
        batch_size, q_length, kv_length: B, T, S.
        q_offset, kv_offset: the first query's and the first key's position.
        mask_function: the rule as transformers writes it.
        attention_mask: [B,L], True = a token, at positions 0 to L - 1.
        kwargs: what else transformers says: `allow_is_causal_skip` (which is obeyed in a traced
            graph only), ...

    None (the module knows whether it is causal) comes from a traced graph only.

    >>> regard_mask(1, 3, 5, q_offset=2)
    MaskRule(causal)
    >>> window = masking_utils.sliding_window_causal_mask_function(2)
    >>> regard_mask(1, 3, 5, q_offset=2, mask_function=window)
    MaskRule(window(2) & causal)
    """
    given: dict[str, Any] = {
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
    if is_compiling() or torch._C._get_tracing_state() is not None:  # traced by torch.jit
        return _for_a_graph(given, kwargs)
    if decoding and isinstance(q_offset, Tensor):
        # a static cache: the step that the mask is for may be compiled, and then takes tensors only
        return _for_a_graph(given, kwargs)
    where = Where(Span(int(q_offset), q_length), Span(kv_offset, kv_length))
    rule = read(mask_function, where)
    if rule is None or (attention_mask is not None and attention_mask.ndim != 2):
        rule = _dense(given, kwargs)
    elif attention_mask is not None and rule != NOTHING:
        rule = _padded(rule, attention_mask, where)
    return MaskRule.make(rule, where.q, where.k, batch_size, device)


def read(function: Indices, where: Where) -> Mask | None:
    """The rule that a mask function of transformers' own means, at these positions; None for
    anybody else's.

    >>> print(read(masking_utils.causal_mask_function, Where(Span(0, 3), Span(0, 3))))
    causal
    """
    meaning = _MEANINGS.get(_name(function))
    return None if meaning is None else meaning(_held(function), where)


def _name(function: Indices) -> str:
    """The function of transformers that this is, or that made it; empty for anybody else's."""
    if getattr(function, "__module__", None) != masking_utils.__name__:
        return ""
    return function.__qualname__.partition(".")[0]


def _held(function: Indices) -> dict[str, Any]:
    """What a closure holds, by name."""
    cells = function.__closure__ or ()
    names = function.__code__.co_freevars
    return {name: cell.cell_contents for name, cell in zip(names, cells, strict=True)}


def _causal(_held: dict[str, Any], where: Where) -> Mask:
    # nothing lies ahead of a decoded token: kernels then need not look for what is hidden
    return Full() if where.q.start >= where.k.stop - 1 else Causal()


def _window(held: dict[str, Any], where: Where) -> Mask:
    size = held["sliding_window"]
    if size < 1:
        return NOTHING
    # as wide as all that is there: no window, and no tiles to look for
    return Full() if where.q.stop - where.k.start <= size else Window(size)


def _both_ways(held: dict[str, Any], where: Where) -> Mask:
    size = held["sliding_window"]
    if size < 0:
        return NOTHING
    return Full() if where.longest <= size else Window(size + 1, ahead=size)


def _chunk(held: dict[str, Any], where: Where) -> Mask:
    size = held["chunk_size"]
    if size < 1:
        return NOTHING
    # each row counts its chunks from its first token
    first = [padding % size for padding in held["left_padding"].tolist()]
    if not any(first):
        return Full() if where.stop <= size else Chunk(size)
    inside = [(*range(x, where.stop, size), max(where.stop, x)) for x in first]
    return Document(tuple((0, *bounds) if bounds[0] else bounds for bounds in inside))


def _packed(held: dict[str, Any], _where: Where) -> Mask:
    ids = held["packed_sequence_mask"]
    starts = [(x.nonzero()[:, 0] + 1).tolist() for x in ids.diff(dim=1)]
    return Document(tuple((0, *found, ids.shape[1]) for found in starts))


def _every(held: dict[str, Any], where: Where) -> Mask | None:
    functions = held["mask_functions"]
    packed = "packed_sequence_mask_function" in map(_name, functions)
    parts = []
    for function in functions:
        if packed and _name(function) == "remap_positions_for_packed_sequence":
            # positions that count from each document's start: within one, their differences are
            # those of the slots
            function = _held(function)["mask_function"]
            if not _by_difference(function):
                return None
        parts.append(read(function, where))
    if None in parts:
        return None
    found = [part for part in parts if part is not None and not isinstance(part, Full)]
    if NOTHING in found:
        return NOTHING
    return reduce(and_, found or [Full()])


def _some(held: dict[str, Any], where: Where) -> Mask | None:
    parts = [read(function, where) for function in held["mask_functions"]]
    return None if None in parts else reduce(or_, [part for part in parts if part is not None])


def _by_difference(function: Indices) -> bool:
    """The rule looks at q_idx - kv_idx only."""
    if _name(function) in ("and_masks", "or_masks"):
        return all(map(_by_difference, _held(function)["mask_functions"]))
    return _name(function) in _BY_DIFFERENCE


_MEANINGS: dict[str, Callable[[dict[str, Any], Where], Mask | None]] = {
    "causal_mask_function": _causal,
    "bidirectional_mask_function": lambda _held, _where: Full(),
    "sliding_window_overlay": _window,
    "sliding_window_bidirectional_overlay": _both_ways,
    "chunked_overlay": _chunk,
    "packed_sequence_mask_function": _packed,
    "and_masks": _every,
    "or_masks": _some,
}
_BY_DIFFERENCE = (
    "causal_mask_function",
    "bidirectional_mask_function",
    "sliding_window_overlay",
    "sliding_window_bidirectional_overlay",
)


def _padded(rule: Mask, keep: Tensor, where: Where) -> Mask:
    """The rule for tokens only; keep [B,L] is True at positions that hold one."""
    seen = keep[:, where.k.start : where.k.stop]
    causal = any(isinstance(term, Causal) for term in rule.terms())
    # slots behind the last token, of a static cache, are hidden by the triangle already
    needed = min(where.q.stop, where.k.stop) if causal else where.k.stop
    if where.k.start + seen.shape[1] >= needed and bool(seen.all()):
        return rule
    padding = Padding.from_keep(keep.bool())
    return padding if isinstance(rule, Full) else rule & padding


def _for_a_graph(given: dict[str, Any], others: dict[str, Any]) -> Tensor | None:
    """The plain tensor that the model's own code expects: a graph keeps no rule, and nothing guards
    a tensor in it.
    """
    if takes_bool(others.get("config")):
        return masking_utils.sdpa_mask(**given, **others)
    return masking_utils.eager_mask(**given, **others)


def _dense(given: dict[str, Any], others: dict[str, Any]) -> Mask:
    """The mask as transformers makes it, never left out."""
    never = {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
    table = masking_utils.sdpa_mask(**given, **(others | never))
    assert table is not None, "nothing allowed it to be left out"
    return masks.Dense(table)
