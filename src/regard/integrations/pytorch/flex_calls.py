"""Calls of torch's `flex_attention` as calls of this package.

Here a `mask_mod` is evaluated for all indices once, as torch does it outside of compiled graphs,
and the table is recognized as a rule (causal, window, padding, documents) where it equals one.
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict
from collections.abc import Callable
from types import FunctionType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.integrations.pytorch.module_places import open_places
from regard.integrations.pytorch.observed_call import leave_to_torch, observe_call
from regard.integrations.pytorch.torch_functions import contexts, is_observed
from regard.masks.convert import RecognizedMask, listed_blocks, recognize_mask
from regard.ops.softmax.call import Call, make_call
from regard.ops.softmax.dispatch import choose_kernel, run_on_kernel
from regard.scores import FnScore, from_score_mod
from regard.span import Span

MaskMod = Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
ScoreMod = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], Tensor]

MAX_TABLE = 1 << 28
"""The largest number of cells of a mask that are evaluated."""
MAX_CACHED = 16
"""The number of evaluated masks that are kept; the layers of a model share one or two."""
MAX_CLOSURE_DEPTH = 8
"""How deep the functions in the closure of a mask_mod may be nested for its table to be kept."""

SCORE_MOD = "its score_mod cannot be mapped over all scores by torch.vmap"
BLOCKS_DISAGREE = (
    "the blocks of its BlockMask leave out keys that its mask_mod allows, so that the result "
    "depends on the kernel"
)
TOO_LARGE = "its mask has too many cells to be evaluated"
UNUSUAL = "it asks for max_scores, or its tensors are not [B, H, T, D] of one dtype on one device"
GRAPH = "the graph is being traced"


def convert_score_mod(
    score_mod: ScoreMod | None, heads: int = 1, device: torch.device | str = "cpu"
) -> FnScore | str | None:
    """Convert the `score_mod` of a call to a score rule."""
    if score_mod is None:
        return None
    score = torch.ones((), dtype=torch.float32, device=device)
    zero = torch.zeros((), dtype=torch.int64, device=device)
    try:
        if score_mod(score, zero, zero, zero, zero) is score and score._version == 0:
            return None
        rule = from_score_mod(score_mod)
        rule.require(heads, 1, Span(0, 1), zero.device)
    except Exception as error:  # torch shows its error, if there is one
        return f"{SCORE_MOD} ({type(error).__name__})"
    return rule


class FlexResult(NamedTuple):
    """The output `[B, H, T, E]` of flex_attention, and the lse `[B, H, T]` on request."""

    out: Tensor
    lse: Tensor | None


def run_flex_call(
    tensors: tuple[Tensor, Tensor, Tensor],
    score_mod: ScoreMod | None,
    block_mask: object,
    scale: float | None,
    *,
    wants_lse: bool,
    place: str = "",
) -> FlexResult | str:
    """Run a call of flex_attention on our kernels, or return why torch must run it."""
    q, k, v = tensors
    why = _why_torch(q, k, v)
    if why is not None:
        return why
    score = convert_score_mod(score_mod, q.shape[1], q.device)
    if isinstance(score, str):
        return score
    (B, H, T), S = q.shape[:3], k.shape[2]
    recognized: RecognizedMask | str | None = None
    if block_mask is not None and not _is_empty(block_mask):
        recognized = _tables.recognize(block_mask, B, H, T, S, q.device)
        if isinstance(recognized, str):
            return recognized
    rule = recognized

    def as_call(q: Tensor, k: Tensor, v: Tensor) -> Call:
        assert not isinstance(rule, str), "refused above"
        return make_call(
            q,
            k,
            v,
            mask=None if rule is None else rule.mask,
            score=score,
            scale=scale,
            q_positions=None if rule is None else rule.q_positions,
            k_positions=Span(0, S),
            wants_lse=wants_lse,
        )

    if is_observed():
        observed = observe_call(tensors, as_call, place=place)
        if isinstance(observed, str):
            return observed
        return FlexResult(observed.z, observed.result.lse if wants_lse else None)
    kernel, call = choose_kernel(as_call(q, k, v))
    contexts.count_kernel(kernel.name)
    result = run_on_kernel(kernel, call)
    return FlexResult(result.out, result.lse if wants_lse else None)


def _why_torch(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why torch must run a call with these tensors, or None; invalid ones get its errors."""
    if torch._C._is_tracing():
        return GRAPH
    fits = q.ndim == k.ndim == v.ndim == 4 and q.dtype == k.dtype == v.dtype
    fits = fits and q.device == k.device == v.device and q.device.type == "cpu"
    fits = fits and all(type(x) in (Tensor, torch.nn.Parameter) for x in (q, k, v))
    if not fits or not q.shape[0] == k.shape[0] == v.shape[0] or k.shape[:3] != v.shape[:3]:
        return UNUSUAL
    sizes = (*q.shape, *k.shape, *v.shape)
    return UNUSUAL if 0 in sizes or q.shape[1] % k.shape[1] or q.shape[3] != k.shape[3] else None


def _is_empty(block_mask: Any) -> bool:
    """Return whether a BlockMask is the one that torch makes where none is given."""
    from torch.nn.attention.flex_attention import _LARGE_SPARSE_BLOCK_SIZE, noop_mask

    whole = (_LARGE_SPARSE_BLOCK_SIZE, _LARGE_SPARSE_BLOCK_SIZE)
    return tuple(block_mask.BLOCK_SIZE) == whole and block_mask.mask_mod is noop_mask


class _Tables:
    """The recognized tables of the last masks, by the function and by what its closure holds."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._entries: OrderedDict[object, tuple[object, RecognizedMask | str]] = OrderedDict()
        self.misses = 0
        """The number of masks that were evaluated."""

    def recognize(
        self, block_mask: Any, B: int, H: int, T: int, S: int, device: torch.device
    ) -> RecognizedMask | str:
        """Return the rule of a BlockMask for a call, or why torch must run it."""
        dependencies: list[Any] = [block_mask]
        state = _state(block_mask.mask_mod, dependencies)
        key = (id(block_mask.kv_indices), state, B, H, T, S, device)
        if state is not None:
            with self._lock:
                entry = self._entries.get(key)
            if entry is not None:
                return entry[1]
        self.misses += 1
        recognized = _evaluate(block_mask, B, H, T, S, device)
        if state is not None:
            with self._lock:
                # the objects are kept, so that no id is used again
                self._entries[key] = (dependencies, recognized)
                while len(self._entries) > MAX_CACHED:
                    self._entries.popitem(last=False)
        return recognized


_tables = _Tables()


def _state(function: Any, dependencies: list[Any], depth: int = 0) -> tuple[Any, ...] | None:
    """Return closure and defaults, on which a function may depend; None if unknown.

    Objects whose identity counts are appended to `dependencies`.
    """
    if not isinstance(function, FunctionType) or depth > MAX_CLOSURE_DEPTH:
        return None
    dependencies.append(function)
    parts: list[Any] = [id(function)]
    names = function.__code__.co_names
    try:
        values = [cell.cell_contents for cell in function.__closure__ or ()]
    except ValueError:  # a cell that is still empty
        return None
    values += function.__defaults__ or ()
    values += [function.__globals__[name] for name in names if name in function.__globals__]
    for value in values:
        if isinstance(value, Tensor):
            if value.is_inference():
                return None
            dependencies.append(value)
            parts.append((id(value), value._version))
        elif value is None or isinstance(value, (bool, int, float, str)):
            parts.append(value)
        elif value is torch:
            continue
        elif isinstance(value, (tuple, list)) and all(callable(x) for x in value):
            states = [_state(x, dependencies, depth + 1) for x in value]
            if None in states:
                return None
            parts += states
        else:
            inner = _state(value, dependencies, depth + 1)
            if inner is None:
                return None
            parts.append(inner)
    return tuple(parts)


def _evaluate(
    block_mask: Any, B: int, H: int, T: int, S: int, device: torch.device
) -> RecognizedMask | str:
    """Evaluate the function of a BlockMask for all indices, and recognize the table."""
    from torch.nn.attention.flex_attention import create_mask

    if tuple(block_mask.seq_lengths) != (T, S) or block_mask.kv_num_blocks.device != device:
        return UNUSUAL  # torch reports these errors best
    if T * S > MAX_TABLE:
        return TOO_LARGE
    with torch.no_grad():
        table = create_mask(block_mask.mask_mod, B, H, T, S, device)
        # a function that ignores the batch or the head gives an expanded table
        table = table[: 1 if table.stride(0) == 0 else B, : 1 if table.stride(1) == 0 else H]
        if table.numel() > MAX_TABLE:
            return TOO_LARGE
        if not _blocks_agree(block_mask, table):
            return BLOCKS_DISAGREE
        return recognize_mask(table, T, S)


def _blocks_agree(block_mask: Any, table: Tensor) -> bool:
    """Return whether the lists of blocks say the same as the table."""
    T, S = table.shape[-2:]
    rows, columns = block_mask.BLOCK_SIZE
    listed = listed_blocks(block_mask.kv_num_blocks, block_mask.kv_indices)
    full = torch.zeros_like(listed)
    if block_mask.full_kv_num_blocks is not None:
        full = listed_blocks(block_mask.full_kv_num_blocks, block_mask.full_kv_indices)
    if full.shape[-2:] != (-(-T // rows), -(-S // columns)):
        return False

    def blocks(x: Tensor, *, padding: bool) -> Tensor:
        sizes = (0, -S % columns, 0, -T % rows)
        x = torch.nn.functional.pad(x, sizes, value=padding)
        x = torch.unflatten(x, 3, (-1, columns))
        return torch.unflatten(x, 2, (-1, rows))  # [b,h,R,rows,C,columns]

    some: Tensor = blocks(table, padding=False).any(5).any(3)
    every: Tensor = blocks(table, padding=True).all(5).all(3)
    return not bool((some & ~(listed | full)).any() | (full & ~every).any())


class _FlexArguments(NamedTuple):
    """The arguments of torch's `flex_attention`."""

    query: Tensor
    key: Tensor
    value: Tensor
    score_mod: ScoreMod | None = None
    block_mask: Any = None
    scale: float | None = None
    enable_gqa: bool = False
    return_lse: bool = False
    kernel_options: Any = None
    return_aux: Any = None


def run_or_leave(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Compute torch's `flex_attention` on our kernels where possible, else by the original."""
    from torch.nn.attention.flex_attention import AuxOutput

    arguments = _FlexArguments(*args, **kwargs)
    aux = arguments.return_aux
    wants_lse = arguments.return_lse or (aux is not None and aux.lse)
    q, k, v = arguments.query, arguments.key, arguments.value
    invalid = (arguments.return_lse and aux is not None) or (
        not arguments.enable_gqa and q.ndim == k.ndim == 4 and q.shape[1] != k.shape[1]
    )
    places = open_places() if is_observed() else None
    place = "" if places is None else places.next_place()
    result: FlexResult | str = UNUSUAL
    if not invalid and not (aux is not None and aux.max_scores):
        result = run_flex_call(
            (q, k, v),
            arguments.score_mod,
            arguments.block_mask,
            arguments.scale,
            wants_lse=wants_lse,
            place=place,
        )
    if isinstance(result, str):
        return leave_to_torch(place, result, lambda: original(*args, **kwargs))
    if aux is not None:
        return result.out, AuxOutput(lse=result.lse, max_scores=None)
    return (result.out, result.lse) if arguments.return_lse else result.out


class _Blocks(NamedTuple):
    """The parts of a BlockMask that are read here."""

    seq_lengths: tuple[int, int]
    kv_num_blocks: Tensor
    kv_indices: Tensor
    full_kv_num_blocks: Tensor | None
    full_kv_indices: Tensor | None
    BLOCK_SIZE: tuple[int, int]
    mask_mod: MaskMod


def observe_flex_operator(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: ScoreMod,
    blocks: tuple[Any, ...],
    scale: float | None,
    *_options: Any,
    place: str,
) -> tuple[Tensor, Tensor, Tensor] | str:
    """Compute the operator of `flex_attention`, also of compiled ones, observed by traces."""
    counts, indices, full_counts, full_indices = blocks[2:6]
    mask = _Blocks(
        blocks[:2], counts, indices, full_counts, full_indices, blocks[-3:-1], blocks[-1]
    )
    result = run_flex_call((query, key, value), score_mod, mask, scale, wants_lse=True, place=place)
    if isinstance(result, str):
        return result
    assert result.lse is not None, "it was requested"
    return result.out, result.lse / math.log(2), query.new_empty(0)
