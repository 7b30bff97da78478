"""Attention on a CPU by compiled kernels: of few queries (decoding), of many, and its gradient.

`DecodeArgs` and `PrefillArgs` hold the arguments as contiguous tensors. `decode` attends to keys
and values in full precision, of any strides; `decode_quantized` attends to keys and values that a
cache stores as codes. `join_splits` joins the results of the two functions, and `apply_sinks` adds
attention sinks.

`prefill` computes blocks of queries against packed keys and values (`csrc/prefill.cpp`).
`prefill_with_gradient` does the same for autograd; its backward pass computes the weights of the
same blocks again (`csrc/prefill_gradient.cpp`). Compiled code checks no argument: the caller has
checked sizes, dtypes and devices.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from regard import huge_pages
from regard.ops.cpu import arguments, threads
from regard.ops.cpu.arguments import struct_layout
from regard.ops.cpu.library import DTYPES, entry
from regard.ops.stored_weights import coded_memory

if TYPE_CHECKING:
    from regard.caches.quantization import QuantizedAndRecent

TILE_KEYS = 64
"""A multiple of the number of keys in a tile, `kTile` of `csrc/decode.cpp`."""

ELEMENTS_PER_THREAD = 1 << 17
"""The number of elements of keys and values from which on a thread saves more than it costs."""

SPLIT_KEYS = 512
"""The least number of keys in a split, of which there are several tiles."""

MAX_SPLITS = 32
"""The largest number of splits of the keys of a head."""


@dataclass(frozen=True, eq=False)
class DecodeArgs:
    """The arguments of decoding except keys and values: the queries, which keys each query sees,
    and the terms that are added to the scores. All tensors are contiguous; the struct `Decode` of
    `csrc/arguments.h` says what each of them is, and its shape.
    """

    q: Tensor
    scale: float
    T: int
    k_positions: Tensor
    origin: int
    starts: Tensor
    stops: Tensor
    visible: Tensor
    softcap: float
    symmetric: bool
    slopes: Tensor
    bias: Tensor
    q_positions: Tensor

    def after_slots(self, slots: int) -> DecodeArgs:
        """Return the arguments for all keys except the first `slots` ones."""
        rest = {x: getattr(self, x)[..., slots:] for x in ("k_positions", "visible", "bias")}
        rest = {name: x.contiguous() for name, x in rest.items()}
        return replace(self, origin=self.origin + slots, **rest)


class QuantizedSegment(NamedTuple):
    """The keys and values of a quantized cache, as compiled code reads them.

    Args:
        k, v: the codes as a field `Quantized` takes them, and `dtype`, that of their scales.
        slots: the number of slots that are stored as codes; the `recent` ones follow them.
        owners: the tensors that must live as long as `k` and `v` are used.
    """

    k: tuple[int, ...]
    v: tuple[int, ...]
    dtype: torch.dtype
    slots: int
    recent: tuple[Tensor, Tensor]
    owners: Sequence[Tensor]


def quantized_segment(k: Tensor, v: Tensor) -> QuantizedSegment | None:
    """Return the slots of a quantized cache that are stored as codes, or None if there are none of
    one scale per channel of keys and one per token of values.
    """
    coded = coded_memory(k, v)
    if coded is None:
        return None
    keys, values, slots = coded
    if keys.groups.scale.dtype not in DTYPES:
        return None
    parts: list[tuple[int, ...]] = []
    owners: list[Tensor] = []
    for x in (keys, values):
        codes, scale, zero = x.groups.codes, x.groups.scale, x.groups.zero
        if not is_readable(x):
            codes, scale, zero = codes.contiguous(), scale.contiguous(), zero.contiguous()
        parts.append(quantized_numbers(codes, scale, zero, x.bits))
        owners += codes, scale, zero
    dtype, recent = keys.groups.scale.dtype, (keys.recent, values.recent)
    return QuantizedSegment(parts[0], parts[1], dtype, slots, recent, owners)


def is_readable(x: QuantizedAndRecent) -> bool:
    """Return whether compiled code can read codes where they are: their last dimension is
    contiguous, and the strides of scales and zeros are equal.
    """
    groups = x.groups
    return groups.codes.stride(-1) == 1 and groups.zero.stride() == groups.scale.stride()


def quantized_numbers(codes: Tensor, scale: Tensor, zero: Tensor, bits: int) -> tuple[int, ...]:
    """Return the numbers of a field `Quantized` for the fields of `QuantizedGroups`."""
    return (
        arguments.row_address(codes, torch.uint8),
        *codes.stride()[:4],
        arguments.row_address(scale, scale.dtype),
        arguments.row_address(zero, scale.dtype),
        *scale.stride()[:4],
        codes.shape[-1] * 8 // bits,
        bits,
    )


def decode(args: DecodeArgs, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Attend to keys `[B, G, S, D]` and values `[B, G, S, E]`; return the output `[B, G, R, E]` and
    the lse `[B, G, R]` in fp32.

    Keys and values of any strides are read without a copy if their last dimension is contiguous.
    """
    k, v = arguments.with_rows(k), arguments.with_rows(v)
    fields = {"k": k, "v": v, "pages": arguments.NO_POSITIONS, "page_size": 1}
    return _run_decode(
        args, "DecodePlain", entry("decode", k.dtype), k.shape[2], v.shape[3], fields
    )


def split_count(S: int) -> int:
    """Return the number of splits into which S keys are divided: tasks of several tiles.

    It depends on nothing else, so that a sum has one order whatever the batch and the number of
    threads.

    >>> split_count(300), split_count(4485), split_count(100_000)
    (1, 8, 32)
    """
    return min(max(S // SPLIT_KEYS, 1), MAX_SPLITS)


def decode_quantized(args: DecodeArgs, segment: QuantizedSegment, E: int) -> tuple[Tensor, Tensor]:
    """Attend to the slots of a segment that are stored as codes; return the output `[B, G, R, E]`
    and the lse `[B, G, R]` in fp32, where E is the dimension of the values.
    """
    function = entry("decode_quantized", segment.dtype)
    fields = {"k": segment.k, "v": segment.v}
    return _run_decode(args, "DecodeQuantized", function, segment.slots, E, fields)


def _run_decode(
    args: DecodeArgs, struct: str, function: int, S: int, E: int, fields: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    """Run a kernel at an address in one or more threads, and return the output and the lse."""
    B, G, R, D = args.q.shape
    P, work = split_count(S), B * G * S * (D + E)
    workers = min(threads.thread_count(), max(1, work // ELEMENTS_PER_THREAD))
    out = arguments.empty(B * G, P, R, E, dtype=torch.float32)
    lse = arguments.empty(B, G, P, R, dtype=torch.float32)
    packed = struct_layout(struct).pack(**vars(args), S=S, out=out, lse=lse, **fields)
    threads.run_entry(function, packed, workers)
    return out[:, 0].view(B, G, R, E), lse[:, :, 0]


def join_splits(outs: Iterable[Tensor], lses: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """Join two or more results over disjoint keys, out `[B, G, R, E]` and lse `[B, G, R]`, into
    one, in fp64.
    """
    out, lse = torch.stack(list(outs)).double(), torch.stack(list(lses)).double()
    joined = lse.logsumexp(0)
    share = (lse - joined.masked_fill(joined == -math.inf, 0)).exp()[..., None]
    # a part that adds nothing may hold NaN
    return torch.where(share == 0, 0, out * share).sum(0).float(), joined.float()


def apply_sinks(out: Tensor, lse: Tensor, sink: Tensor, T: int) -> Tensor:
    """Return the output `[B, G, R, E]` with exp(sink) added to each softmax denominator: times
    sigmoid(lse - sink), in fp64; a row that sees no key keeps its output of 0. Of T queries, row r
    of key/value head g belongs to head g H/G + r // T.
    """
    logits = sink.detach().double().view(1, out.shape[1], -1, 1)  # [1,G,H/G,1]
    share = (lse.double().view(*lse.shape[:2], -1, T) - logits).sigmoid().view(lse.shape)
    share = share.masked_fill(lse == -math.inf, 1)
    return out * share.float()[..., None]


@dataclass(frozen=True, eq=False)
class PrefillArgs:
    """The arguments of prefill: queries, keys and values of any strides, which keys each query
    sees, and the terms that are added to the scores. The struct `Prefill` of `csrc/arguments.h`
    says what each of them is, and its shape; `out_dtype` is the dtype of the output, that of q or
    fp32.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    scale: float
    softcap: float
    symmetric: bool
    slopes: Tensor
    q_positions: Tensor
    k_positions: Tensor
    starts: Tensor
    stops: Tensor
    out_dtype: torch.dtype


def prefill(args: PrefillArgs) -> tuple[Tensor, Tensor, Tensor]:
    """Compute attention without a gradient: the output `[B, H, T, E]` in `args.out_dtype`, and for
    each query in fp32 `[B, H, T]` the largest score m (0 if it sees no key) and the sum of
    e^(s - m) over its scores s.
    """
    *rows, E = *args.q.shape[:3], args.v.shape[3]
    out = arguments.empty(*rows, E, dtype=args.out_dtype)
    max_score, scaled_sum = (arguments.empty(*rows, dtype=torch.float32) for _ in range(2))
    results = {"max_score": max_score, "scaled_sum": scaled_sum}
    _run("prefill", "PrefillForward", args, out=arguments.address(out, out.dtype), **results)
    return out, max_score, scaled_sum


Gradients: TypeAlias = Callable[
    [tuple[Tensor, ...], Tensor | None, Tensor | None], tuple[Tensor | None, ...]
]
"""(q, k, v), the gradient of the output and that of the lse -> the gradients of q, k and v."""


def prefill_with_gradient(
    args: PrefillArgs, differentiable_gradients: Gradients
) -> tuple[Tensor, Tensor]:
    """Compute the output `[B, H, T, E]` and the lse `[B, H, T]`, which autograd can differentiate
    by q, k and v, without saved scores. `differentiable_gradients` serves `create_graph=True`.
    """
    results: tuple[Tensor, Tensor] = _PrefillFunction.apply(  # type: ignore[no-untyped-call]
        args, differentiable_gradients, args.q, args.k, args.v
    )
    return results


class _PrefillFunction(torch.autograd.Function):
    """Autograd function of `prefill`, for the gradients of q, k and v."""

    @staticmethod
    def forward(
        ctx: Any,
        args: PrefillArgs,
        differentiable_gradients: Gradients,
        q: Tensor,
        k: Tensor,
        v: Tensor,
    ) -> tuple[Tensor, Tensor]:
        out, top, total = prefill(args)
        ctx.differentiable_gradients = differentiable_gradients
        ctx.save_for_backward(q, k, v, out, top, total)
        # ctx.save_for_backward holds q, k and v already; these arguments hold their shapes only
        ctx.args = replace(args, **{x: getattr(args, x).detach().to("meta") for x in "qkv"})
        ctx.set_materialize_grads(False)
        return out, top + total.log()

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Any, ...]:
        q, k, v, out, top, total = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            return None, None, *ctx.differentiable_gradients((q, k, v), d_out, d_lse)
        args = replace(ctx.args, q=q.detach(), k=k.detach(), v=v.detach())
        d_out = torch.zeros_like(out) if d_out is None else d_out
        d_lse = torch.zeros_like(top) if d_lse is None else d_lse
        with torch.autocast("cpu", enabled=False):
            return None, None, *prefill_gradient(args, out, (top, total), d_out, d_lse)


def prefill_gradient(
    args: PrefillArgs,
    out: Tensor,
    saved: tuple[Tensor, Tensor],
    d_out: Tensor,
    d_lse: Tensor,
    *,
    dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the gradients of q, k and v in a dtype, that of q (None) or fp32, from the output and
    the two `saved` numbers of each query that `prefill` returned.
    """
    dtype = dtype or args.q.dtype
    grads = [arguments.empty(*x.shape, dtype=dtype) for x in (args.q, args.k, args.v)]
    d_out = arguments.with_rows(d_out)
    top, total, d_lse = (x.detach().contiguous() for x in (*saved, d_lse))
    results = {
        "out": arguments.with_rows(out),
        "d_out": d_out,
        "d_out_is_wide": d_out.dtype == torch.float32,
        "max_score": top,
        "scaled_sum": total,
        "d_lse": d_lse,
        "results_are_wide": dtype == torch.float32,
        **{f"d_{x}": arguments.address(y, dtype) for x, y in zip("qkv", grads, strict=True)},
    }
    args = replace(args, out_dtype=out.dtype)
    _run("prefill_gradient", "PrefillGradient", args, **results)
    d_q, d_k, d_v = grads
    return d_q, d_k, d_v


def _run(name: str, struct: str, args: PrefillArgs, **results: Any) -> None:
    """Call an entry with the arguments of `args` and of its own, and with the memory it needs."""
    layout, function = struct_layout(struct), entry(name, args.q.dtype)
    (B, H, T, D), (_, G, S, E) = args.q.shape, args.v.shape
    values = {**vars(args), **{x: arguments.with_rows(getattr(args, x)) for x in "qkv"}}
    is_wide = values.pop("out_dtype") == torch.float32
    for x in ("slopes", "q_positions", "k_positions", "starts", "stops"):
        values[x] = values[x].contiguous()
    record = layout.pack(
        **values,
        **results,
        **dict(zip("BHGTSDE", (B, H, G, T, S, D, E), strict=True)),
        threads=(workers := threads.thread_count()),
        is_wide=is_wide,
        bytes=0,
        memory=0,
    )
    threads.run_entry(function, record, 1)  # without memory it says how much it needs
    memory = huge_pages.empty((record[layout.place("bytes")],), dtype=torch.uint8)
    record[layout.place("memory")] = arguments.address(memory, torch.uint8)
    threads.run_entry(function, record, workers)
