"""Which calls of torch's attention function run here, and how they become a `Call`.

The sizes below which torch is as fast were measured by `python -m benchmarks models`
(docs/benchmarks.md).
"""

from __future__ import annotations

import math
import threading
from collections import OrderedDict

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef

from regard.masks import Causal, Dense, Full, Mask, Padding
from regard.masks.convert import RecognizedMask, recognize_mask, unexpanded
from regard.ops.softmax.call import Call, make_call
from regard.process_state import is_compiling
from regard.span import Span

MAX_CACHED_MASKS = 32
"""The number of recognized tensors in the cache; a model has one or two kinds of mask per step."""


class RecognizedMaskCache:
    """A cache of recognized masks by storage and version."""

    def __init__(self, size: int = MAX_CACHED_MASKS) -> None:
        self._size = size
        self._lock = threading.Lock()
        self._entries: OrderedDict[tuple[object, ...], tuple[StorageWeakRef, RecognizedMask]] = (
            OrderedDict()
        )
        self.misses = 0
        """The number of masks that were not in the cache."""

    def recognize(self, mask: Tensor, T: int, S: int) -> RecognizedMask:
        """Return `recognize_mask` of these arguments, computed once for an unchanged tensor."""
        if mask.is_inference():  # inference tensors have no version counter
            self.misses += 1
            return recognize_mask(mask, T, S)
        storage = mask.untyped_storage()
        key = (
            storage._cdata,
            mask.storage_offset(),
            mask._version,
            mask.dtype,
            tuple(mask.shape),
            mask.stride(),
            T,
            S,
        )
        with self._lock:
            entry = self._entries.get(key)
        if entry is not None and not entry[0].expired():
            return entry[1]
        recognized = recognize_mask(mask, T, S)
        self.misses += 1
        with self._lock:
            self._entries[key] = (StorageWeakRef(storage), recognized)
            while len(self._entries) > self._size:
                self._entries.popitem(last=False)
        return recognized


FAST_KERNELS = ("cpu", "gemm")
"""The kernels that are faster than torch, so that a call for which one is chosen runs here."""

MIN_DECODE_PRODUCTS = {torch.float32: 1 << 22, torch.bfloat16: 1 << 19, torch.float16: 1 << 19}
"""The smallest B H T S (D + E), by dtype, of calls with few queries (`FEW_QUERIES`) that run here.

With these products torch takes about 150 microseconds on 2 threads, three times what the checks and
the choice of the kernel take here. torch converts each half-precision key for every query head.
"""

MIN_UNGROUPED_NUMBERS = 1 << 24
"""The smallest number of elements of keys and values in fp32 for which a call with one query row
per key/value head runs here: torch then reads them once as well, and only memory sets the pace.
"""

LEAST_PRODUCTS = min(MIN_DECODE_PRODUCTS.values())
"""Calls with fewer products than these run in torch, whatever their dtype."""

MIN_PRODUCTS = 1 << 28
"""Calls with more queries than `FEW_QUERIES` and B H T S (D + E) below this run in torch."""

MIN_RANGE_KEYS = 1024
"""The smallest number of keys for which skipping ranges of them saves more than splitting takes."""

FEW_QUERIES = 16
"""The largest number of query rows per key/value head for which reading the keys and values takes
most of the time of a call; with more rows the matrix products do.
"""

SMALL = "it is small"
NOT_ON_CPU = "it is not on a CPU"
TORCH_AS_FAST = "torch is as fast for these sizes"
BIAS = "its mask is a bias of many queries, for which torch is as fast"
NOT_MASKED_ATTENTION = (
    "its arguments are invalid or have a meaning in torch only (a scale of 0, an empty tensor), or "
    "torch gives the mean of the values in rows that its mask hides"
)

MASK_DTYPES = frozenset({torch.bool, torch.float32})
"""The dtypes of masks that torch takes for queries of any dtype; it also takes that of the queries.
"""

mask_cache = RecognizedMaskCache()
"""The recognized masks of this process, shared by all models."""


def is_small(q: Tensor, k: Tensor) -> bool:
    """Return whether torch is certainly as fast for queries and keys of these sizes."""
    products = q.numel() * k.shape[-2] * 2
    return products < MIN_PRODUCTS and (products < LEAST_PRODUCTS or q.shape[-2] > FEW_QUERIES)


def reason_for_torch(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout: float, *, always: bool
) -> str | None:
    """Return why torch runs a call, judging by types and sizes alone; None if it need not."""
    if is_compiling() or torch._C._is_tracing():
        return "the graph is being traced"
    if not all(type(x) in (Tensor, nn.Parameter) for x in (q, k, v)):
        return "its tensors are of another class"
    if dropout > 0:
        return "it has dropout, which must use torch's random numbers"
    if q.device.type != "cpu":
        return NOT_ON_CPU
    if q.ndim != 4 or k.ndim != 4 or v.ndim != 4:
        return "its tensors do not have the four dimensions [B, H, T, D]"
    if not always and (why := _too_small(q, k, v)):
        return why
    if mask is None:
        return None
    if mask.requires_grad:
        return "its mask requires a gradient"
    if q.shape[2] > FEW_QUERIES and not always and _is_bias(mask):
        return BIAS
    return None


def _is_bias(mask: Tensor) -> bool:
    """Whether the last row of a float mask has other numbers than 0 and a mask's least.

    One row is read, because a model such as T5 adds a new bias in every layer.
    """
    if not mask.is_floating_point() or not mask.numel():
        return False
    row = mask.detach()[(0,) * (mask.ndim - 2) + (-1,) * min(1, mask.ndim - 1)]
    return not bool(((row == 0) | (row <= torch.finfo(row.dtype).min / 2)).all())


def _too_small(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Return why a call of these sizes takes no less time here; None if it may."""
    B, H, T, D = q.shape
    products = B * H * T * k.shape[2] * (D + v.shape[3])
    rows = T * (H // max(1, k.shape[1]))
    if rows > FEW_QUERIES:
        return SMALL if products < MIN_PRODUCTS else None
    if products < MIN_DECODE_PRODUCTS.get(q.dtype, MIN_PRODUCTS):
        return SMALL
    numbers = k.numel() + v.numel()
    if rows == 1 and q.dtype == torch.float32 and numbers < MIN_UNGROUPED_NUMBERS:
        return TORCH_AS_FAST
    return None


def as_call(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    *,
    is_causal: bool,
    scale: float | None,
    grouped: bool,
) -> Call | None:
    """Turn the arguments of torch's function into a `Call`, or return None if torch must run it.

    Torch must run invalid arguments (its errors are best), empty tensors, scales such as 0 and NaN,
    and masks with `RecognizedMask.uniform_rows`.
    """
    B, H, T, S = q.shape[0], q.shape[1], q.shape[2], k.shape[2]
    if scale is not None:
        scale = float(scale)  # torch takes a bool, too
        if scale == 0 or not math.isfinite(scale):
            return None
    fits = k.shape[:3] == v.shape[:3] and q.shape[3] == k.shape[3] and q.dtype == k.dtype == v.dtype
    batch = k.shape[0] == B and (k.shape[1] == H or (grouped and H % max(1, k.shape[1]) == 0))
    if not fits or not batch or (is_causal and mask is not None):
        return None
    if 0 in (*q.shape, S, v.shape[3]):
        return None
    rule: Mask | None = None
    bias = None
    positions: Span | None = None
    if is_causal:
        rule, positions = Causal(), Span(0, T)
    elif mask is not None:
        if not _broadcasts(mask, (B, H, T, S)) or mask.dtype not in MASK_DTYPES | {q.dtype}:
            return None
        recognized = mask_cache.recognize(mask, T, S)
        if recognized.uniform_rows:
            return None
        rule, positions, bias = recognized.mask, recognized.q_positions, recognized.bias
    return make_call(
        q,
        k,
        v,
        mask=rule,
        bias=bias,
        scale=scale,
        q_positions=positions,
        k_positions=Span(0, S),
    )


def _broadcasts(mask: Tensor, shape: tuple[int, ...]) -> bool:
    """Whether a mask has a shape that torch accepts."""
    if mask.ndim > 4:
        return False
    sizes = shape[4 - mask.ndim :]
    return all(n in (1, size) for n, size in zip(mask.shape, sizes, strict=True))


def as_attn_mask(mask: Tensor | None, mask_type: int | None) -> Tensor | None:
    """Turn a mask of torch's fused inference paths into that of the public function.

    Modules convert bool to 0 and -inf before, so that it has the dtype of a mask that is added.
    """
    if mask is None:
        return None
    if not mask.is_floating_point():
        mask = mask == 0
    return mask[:, None, None] if mask_type == 1 else mask


def adds_to_scores(mask: Tensor | None) -> bool:
    """Whether a mask of `F.scaled_dot_product_attention` has other numbers than 0 and -inf."""
    if mask is None or not mask.is_floating_point():
        return False
    mask = unexpanded(mask)
    return not bool(((mask == 0) | mask.isneginf()).all())


def skips_more_than_torch(call: Call) -> bool:
    """Whether torch's kernel, called for ranges of keys, is faster than with the dense mask.

    It is if the mask hides nothing, or ranges of many keys; not for padding, a call for each row.
    """
    if call.bias is not None or isinstance(call.mask, Dense):
        return False
    terms = call.mask.terms()
    if all(isinstance(term, Full) for term in terms):
        return True
    return call.S >= MIN_RANGE_KEYS and not all(isinstance(x, Full | Padding) for x in terms)
