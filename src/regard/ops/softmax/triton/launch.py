"""Launching the kernels, imported only where triton is installed."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from regard.ops.softmax.call import Call, Partial
from regard.ops.softmax.kernel import maximum_and_sum
from regard.ops.softmax.triton.backward_kernels import (
    attention_backward_kv,
    attention_backward_q,
    attention_backward_table,
    row_deltas,
)
from regard.ops.softmax.triton.block_sizes import (
    INTERPRETED,
    SPAN_KEYS,
    LaunchSizes,
    block_sizes,
    coded_sizes,
    split_key_dim,
)
from regard.ops.softmax.triton.call_data import (
    BiasData,
    MaskData,
    TileLists,
    mask_data,
    stored_form,
    tile_lists,
)
from regard.ops.softmax.triton.decode_kernels import attention_decode, join_spans
from regard.ops.softmax.triton.forward_kernel import attention_forward
from regard.ops.softmax.triton.scores import mark_odd_tiles
from regard.ops.stored_weights import CodedMemory, Float8Memory, PagedMemory
from regard.ops.triton_support import Launch, capability_of, interprets

LOG2E = 1.4426950408889634


class ForwardResult(NamedTuple):
    """What the forward kernel writes: output, lse, and m and l in the unit of the kernel."""

    out: Tensor
    lse: Tensor
    max_score: Tensor
    scaled_sum: Tensor


class WantedGradients(NamedTuple):
    """Which parts of a bias need a gradient."""

    slopes: bool = False
    weights: bool = False
    table: bool = False


def sizes_of(call: Call, kind: Any) -> LaunchSizes:
    """Return the block sizes of a kernel for a call."""
    if interprets():
        return INTERPRETED
    capability = capability_of(call.q.device)
    return block_sizes(kind, call.q.dtype, call.D, call.E, capability=capability)


def run_forward(call: Call, bias: BiasData) -> ForwardResult:
    """Run the forward kernels of a call, and return what they wrote."""
    launches, result = forward_launches(call, bias)
    for launch in launches:
        launch.run()
    return result._replace(out=result.out.to(call.result_dtype))


def run_decode(call: Call, bias: BiasData) -> tuple[Tensor, Tensor]:
    """Run the decoding kernels, and return the output and the lse."""
    launches, out, lse = decode_launches(call, bias)
    for launch in launches:
        launch.run()
    return out.to(call.result_dtype), lse


class KeySegment(NamedTuple):
    """Neighbouring slots of the keys and values, as one launch of the decoding kernel reads them.

    Args:
        k, v: tensors or 8-bit bytes `[B, G, slots, d]`, pages, or codes.
        tables: the page table, scales and zeros; k stands for what is missing.
    """

    k: Tensor
    v: Tensor
    first: int
    stop: int
    sizes: LaunchSizes
    tables: tuple[Tensor, ...]
    strides: tuple[int, ...]
    options: dict[str, Any]


ROWS_OF_TENSORS = {"PAGE": 0, "CODE_BITS": 0, "K_GROUP": 1, "V_GROUP": 1, "FLOAT8": 0}
"""The options of keys and values that are neither pages nor codes."""

FRACTION_BITS = {"e4m3": 3, "e5m2": 2}
"""The bits of fraction of an 8-bit floating-point number, by the name of its format."""


def key_segments(call: Call) -> list[KeySegment]:
    """Return the keys and values of a call as segments: codes and later slots, or pages."""
    sizes = sizes_of(call, "decode")
    stored = stored_form(call)
    if isinstance(stored, CodedMemory):
        recent = stored.keys.recent, stored.values.recent
        segments = [_coded_segment(stored, sizes)]
        if stored.slots < call.S:
            segments.append(_dense_segment(*recent, stored.slots, sizes))
        return segments
    if isinstance(stored, Float8Memory):
        return [_float8_segment(stored, sizes)]
    if stored is not None:
        return [_paged_segment(stored, call.S, sizes)]
    return [_dense_segment(call.k, call.v, 0, sizes)]


def _dense_segment(k: Tensor, v: Tensor, first: int, sizes: LaunchSizes) -> KeySegment:
    """Return the slots of two tensors, which are those of the call from `first` on."""
    k, v = dense_rows(k), dense_rows(v)
    strides = *_strides(k, v), 0, 0, 0, *[0] * 7
    stop = first + k.shape[2]
    return KeySegment(k, v, first, stop, sizes, (k,) * 5, strides, ROWS_OF_TENSORS)


def _paged_segment(stored: PagedMemory, S: int, sizes: LaunchSizes) -> KeySegment:
    """Return the slots of the pages of a pool."""
    k, v, table = stored.keys.pages, stored.values.pages, stored.keys.table
    k, v = (x if x.stride(3) == 1 else x.contiguous() for x in (k, v))
    rows = [n for x in (k, v) for n in (0, x.stride(2), x.stride(1))]
    strides = *rows, table.stride(0), k.stride(0), v.stride(0), *[0] * 7
    options = {**ROWS_OF_TENSORS, "PAGE": k.shape[1]}
    return KeySegment(k, v, 0, S, sizes, (table, k, k, k, k), strides, options)


def _float8_segment(stored: Float8Memory, sizes: LaunchSizes) -> KeySegment:
    """Return the slots that a cache stores as 8-bit floating-point numbers."""
    (k, k_scale, name), (v, v_scale, _) = (
        (dense_rows(x.codes), x.scale[..., 0], x.format) for x in stored
    )
    strides = *_strides(k, v), 0, 0, 0, *k_scale.stride(), *v_scale.stride(), 0
    options = {**ROWS_OF_TENSORS, "FLOAT8": FRACTION_BITS[name]}
    tables = k, k_scale, k_scale, v_scale, v_scale
    return KeySegment(k, v, 0, k.shape[2], sizes, tables, strides, options)


def _coded_segment(stored: CodedMemory, sizes: LaunchSizes) -> KeySegment:
    """Return the slots that a quantized cache stores as codes."""
    codes, scales = [], []
    for part in (stored.keys, stored.values):
        groups = part.groups
        width = groups.codes.shape[-1]
        dense = groups.codes.stride()[3:] == (width, 1)
        codes.append(groups.codes if dense else groups.codes.contiguous())
        scale, zero = groups.scale[..., 0], groups.zero[..., 0]
        if scale.stride() != zero.stride() or (part.axis == "channel" and scale.stride(3) != 1):
            scale, zero = scale.contiguous(), zero.contiguous()
        scales += [scale, zero]
    k, v = codes
    bits = stored.keys.bits
    group, v_group = (x.shape[-1] * 8 // bits for x in codes)
    strides = (
        *_strides(k, v), 0, 0, 0, *scales[0].stride()[:3], *scales[2].stride(),
    )  # fmt: skip
    own = {"CODE_BITS": bits, "K_GROUP": group, "V_GROUP": v_group}
    options = {**ROWS_OF_TENSORS, **own}
    if not interprets():
        sizes = coded_sizes(sizes, group)
    return KeySegment(k, v, 0, stored.slots, sizes, (k, *scales), strides, options)


def decode_launches(call: Call, bias: BiasData) -> tuple[list[Launch], Tensor, Tensor]:
    """Return the launches of a decoding step, and the output and lse that they will write."""
    q, data, segments = dense_rows(call.q), mask_data(call), key_segments(call)
    bounds = [_bounds_of_segment(call, data, x) for x in segments]
    spans = sum(x.shape[1] for x in bounds)
    shape = (call.B, call.H, call.T)
    part = q.new_empty(*shape, spans, call.E, dtype=torch.float32)
    part_lse = q.new_empty(*shape, spans, dtype=torch.float32)
    out = q.new_empty(*shape, call.E, dtype=torch.float32 if _widens(call) else call.result_dtype)
    lse = q.new_empty(*shape, dtype=torch.float32)
    group, first_span, launches = call.H // call.G, 0, []
    for x, bound in zip(segments, bounds, strict=True):
        lists = TileLists(bound[:, None], bound, bound)
        tensors, strides = _rule_tensors(q, data, lists, bias), _rule_strides(data, lists, bias)
        first, rest = split_key_dim(call.D)
        rows = min(2 * x.sizes.rows, max(16, triton.next_power_of_2(group * call.T)))
        options = {
            **constants(call, bias, data, x.sizes), **_resources(x.sizes), **x.options,
            "BM": rows, "BLOCK_D": first, "REST": rest,
            "SHARED_VALUES": not (x.options["CODE_BITS"] or x.options["FLOAT8"])
            and _shares_values(call, x.k, x.v, first),
        }  # fmt: skip
        row_blocks = triton.cdiv(group * call.T, rows)
        args = (
            q, x.k, x.v, part, part_lse, *tensors[:5], bound, *tensors[7:], *x.tables,
            *_strides(q), *x.strides, *strides, call.H, group, call.T, x.first, x.stop,
            spans, first_span, row_blocks, call.scale, call.softcap or 0.0,
        )  # fmt: skip
        grid = bound.shape[1], call.B * call.G * row_blocks
        launch = Launch(attention_decode, grid, args, options)
        # numbers that codes stand for are finite, so that there is nothing to look for
        careful = [] if x.options["CODE_BITS"] else with_care(launch, [], call)[1:]
        launches += [launch._replace(options={**options, "CAREFUL": False}), *careful]
        first_span += bound.shape[1]
    width = triton.next_power_of_2(spans)
    join = {"E": call.E, "BLOCK_E": options["BLOCK_E"], "BLOCK_SPANS": width}
    grid = (out[..., 0].numel(), 1)
    launches.append(Launch(join_spans, grid, (part, part_lse, out, lse, spans), join))
    return launches, out, lse


def _bounds_of_segment(call: Call, data: MaskData, segment: KeySegment) -> Tensor:
    """Return for each span of a segment the tiles that some query sees, `[b, spans, 2]`."""
    keys = segment.sizes.keys
    # the kinds of the tiles for all queries and heads: a program computes the heads of a group
    kinds = tile_lists(call, data, triton.next_power_of_2(call.T), keys).kinds.amax((1, 2))
    first, stop = segment.first // keys, triton.cdiv(segment.stop, keys)
    tiles = torch.arange(kinds.shape[1], device=kinds.device)
    kinds = kinds.masked_fill((tiles < first) | (tiles >= stop), 0)
    span_tiles = 2 if interprets() else SPAN_KEYS // keys
    bounds = span_bounds(kinds, span_tiles)
    return bounds[:, first // span_tiles : triton.cdiv(stop, span_tiles)].contiguous()


def _shares_values(call: Call, k: Tensor, v: Tensor, width: int) -> bool:
    """Return whether the values are the first channels of the keys, in the same memory."""
    same = k.data_ptr() == v.data_ptr() and k.stride() == v.stride()
    return same and call.E <= width == max(16, triton.next_power_of_2(call.E))


def span_bounds(kinds: Tensor, span_tiles: int) -> Tensor:
    """Return for each span the first tile that is not empty, and one past the last."""
    missing = -kinds.shape[1] % span_tiles
    used = torch.nn.functional.pad(kinds != 0, (0, missing)).unflatten(1, (-1, span_tiles))
    first, behind = used.int().argmax(2), used.flip(2).int().argmax(2)
    start = torch.arange(used.shape[1], device=kinds.device) * span_tiles
    last = torch.where(used.any(2), span_tiles - behind, first)
    return torch.stack([start + first, start + last], -1).to(torch.int32).contiguous()


def forward_launches(call: Call, bias: BiasData) -> tuple[list[Launch], ForwardResult]:
    """Return the launches of the forward pass, and the tensors that they will write."""
    q, k, v = (dense_rows(x) for x in (call.q, call.k, call.v))
    sizes, data = sizes_of(call, "forward"), mask_data(call)
    lists = tile_lists(call, data, sizes.rows, sizes.keys)
    widen = _widens(call)
    out_dtype = torch.float32 if widen else call.result_dtype
    out = q.new_empty(call.B, call.H, call.T, call.E, dtype=out_dtype)
    lse, max_score, scaled_sum = (
        q.new_empty(call.B, call.H, call.T, dtype=torch.float32) for _ in range(3)
    )
    blocks, tiles = lists.kinds.shape[2:]
    odd = marks_of(v, sizes.keys)
    args = (
        q, k, v, out, lse, max_score, scaled_sum,
        *_rule_tensors(q, data, lists, bias), odd,
        *_strides(q, k, v), *_rule_strides(data, lists, bias),
        call.H, call.H // call.G, call.T, call.S, blocks, tiles, call.scale, call.softcap or 0.0,
    )  # fmt: skip
    options = {**constants(call, bias, data, sizes), **_resources(sizes)}
    launch = Launch(attention_forward, (blocks, call.B * call.H), args, options)
    marks = [mark_launch(v, odd, sizes.keys)]
    return with_care(launch, marks, call), ForwardResult(out, lse, max_score, scaled_sum)


def with_care(launch: Launch, marks: list[Launch], call: Call) -> list[Launch]:
    """Return a launch, and those that compute blocks with masked odd numbers again."""
    first = launch._replace(options={**launch.options, "CAREFUL": False})
    if call.sees_everything:
        return [first]
    return [first, *marks, launch._replace(options={**launch.options, "CAREFUL": True})]


def marks_of(x: Tensor, size: int) -> Tensor:
    """Return zeros for the tiles of `size` rows of x, int32 `[B, heads, tiles]`."""
    return x.new_zeros(*x.shape[:2], -(-x.shape[2] // size), dtype=torch.int32)


def mark_launch(x: Tensor, odd: Tensor, size: int) -> Launch:
    """Return the launch that marks the tiles of x with a number that is not finite."""
    width = x.shape[3]
    options = {"WIDTH": width, "BLOCK_WIDTH": triton.next_power_of_2(width), "BLOCK": size}
    args = (x, odd, *_strides(x), x.shape[1], x.shape[2])
    return Launch(mark_odd_tiles, (odd.shape[2], x.shape[0] * x.shape[1]), args, options)


class Gradients(NamedTuple):
    """What the backward kernels write: dq, dk, dv, and buffers for each part of the bias."""

    q: Tensor
    k: Tensor
    v: Tensor
    buffers: dict[str, Tensor]


def run_backward(
    call: Call,
    bias: BiasData,
    saved: ForwardResult,
    d_out: Tensor,
    d_lse: Tensor | None,
    wanted: WantedGradients,
    *,
    of_part: bool = False,
) -> tuple[Tensor, Tensor, Tensor, BiasData]:
    """Run the backward kernels, and return dq, dk, dv and the gradients of the bias."""
    launches, matching = backward_launches(call, bias, saved, d_out, d_lse, wanted, of_part=of_part)
    for launch in launches:
        launch.run()
    d_q, d_k, d_v = (x.to(call.result_dtype) for x in matching[:3])
    return d_q, d_k, d_v, _sum_buffers(call, bias, wanted, matching.buffers)


def backward_launches(
    call: Call,
    bias: BiasData,
    saved: ForwardResult,
    d_out: Tensor,
    d_lse: Tensor | None,
    wanted: WantedGradients,
    *,
    of_part: bool = False,
) -> tuple[list[Launch], Gradients]:
    """Return the launches of the backward kernels, in their order, and what they will write."""
    q, k, v, d_out = (dense_rows(x) for x in (call.q, call.k, call.v, d_out))
    sizes, data = sizes_of(call, "backward_q"), mask_data(call)
    lists = tile_lists(call, data, sizes.rows, sizes.keys)
    blocks, tiles = lists.kinds.shape[2:]
    shared = constants(call, bias, data, sizes)
    options = {**shared, **_resources(sizes)}
    has_d_lse = d_lse is not None
    d_lse = q if d_lse is None else d_lse.to(torch.float32).contiguous()
    delta = torch.empty_like(saved.max_score)
    dtype = torch.float32 if _widens(call) else call.result_dtype
    dq, dk, dv = (q.new_empty(x.shape, dtype=dtype) for x in (call.q, call.k, call.v))
    buffers = _bias_buffers(call, bias, wanted, blocks)
    grid, launches = (blocks, call.B * call.H), []
    # rowsum(dO O) cancels too many digits of fp32, and is all that a part of the keys has
    exact = shared["PRECISE"] and not of_part
    if not exact:
        args = (saved.out.contiguous(), d_out, d_lse, delta, *_strides(d_out), call.H, call.T)
        names = {"E": call.E, "BLOCK_E": shared["BLOCK_E"], "BM": sizes.rows}
        launches.append(Launch(row_deltas, grid, args, {**names, "HAS_D_LSE": has_d_lse}))
    rows = (q, k, v, d_out, saved.max_score, saved.scaled_sum, delta)
    tensors, odd = _rule_tensors(q, data, lists, bias), marks_of(k, sizes.keys)
    strides = (*_strides(q, k, v, d_out), *_rule_strides(data, lists, bias))
    lengths, factors = (call.H, call.H // call.G, call.T, call.S), (call.scale, call.softcap or 0.0)
    args = (
        *rows, d_lse, dq, buffers["slopes"], buffers["weights"], *tensors, odd, *strides,
        *lengths, blocks, tiles, *factors,
    )  # fmt: skip
    of_bias = {
        "EXACT_SUMS": exact, "HAS_D_LSE": has_d_lse, "D_SLOPE": wanted.slopes,
        "D_WEIGHT": wanted.weights, "BUCKETS": buffers["weights"].shape[-1],
    }  # fmt: skip
    launch = Launch(attention_backward_q, grid, args, {**options, **of_bias})
    launches += with_care(launch, [mark_launch(k, odd, sizes.keys)], call)
    by_key = wanted.table and _is_per_key(call, bias)
    launches += _backward_kv_launches(
        call, bias, data, rows, (dk, dv, buffers["column"]), by_key=by_key
    )
    if wanted.table and not by_key:
        assert bias.table is not None
        b, h = bias.table.shape[:2]
        args = (
            *rows, buffers["table"], *tensors[:5], lists.kinds, *tensors[7:], *strides, call.B,
            *lengths, blocks, tiles, *factors, b, h,
        )  # fmt: skip
        options.pop("TABLE")
        launches.append(Launch(attention_backward_table, (blocks * tiles, b * h), args, options))
    return launches, Gradients(dq, dk, dv, buffers)


def _backward_kv_launches(
    call: Call,
    bias: BiasData,
    data: MaskData,
    rows: tuple[Tensor, ...],
    results: tuple[Tensor, ...],
    *,
    by_key: bool,
) -> list[Launch]:
    """Return the launches of the kernel of dk and dv."""
    sizes = sizes_of(call, "backward_kv")
    lists = tile_lists(call, data, sizes.rows, sizes.keys, transposed=True)
    tiles, blocks = lists.kinds.shape[2:]
    q, d_out = rows[0], rows[3]
    odd = marks_of(q, sizes.rows)
    args = (
        *rows, *results, *_rule_tensors(q, data, lists, bias), odd,
        *_strides(*rows[:4]), *_rule_strides(data, lists, bias),
        call.H, call.H // call.G, call.T, call.S, tiles, blocks, call.scale, call.softcap or 0.0,
    )  # fmt: skip
    options = {**constants(call, bias, data, sizes), **_resources(sizes), "D_COLUMN": by_key}
    launch = Launch(attention_backward_kv, (tiles, call.B * call.G), args, options)
    return with_care(launch, [mark_launch(x, odd, sizes.rows) for x in (q, d_out)], call)


def _is_per_key(call: Call, bias: BiasData) -> bool:
    """Return whether all queries share the rows of the bias table."""
    return bias.table is not None and bias.table.shape[2] == 1 < call.T


def _resources(sizes: LaunchSizes) -> dict[str, int]:
    """Return the options of a launch that are no argument of the kernel."""
    return {"num_warps": sizes.warps, "num_stages": sizes.stages}


def saved_of_whole(call: Call, whole: Partial) -> ForwardResult:
    """Return an output and lse over all keys as the backward kernels read them."""
    max_score, scaled_sum = maximum_and_sum(whole.lse.to(torch.float32))
    unit = 1.0 if _is_precise(call) else LOG2E
    return ForwardResult(
        whole.out.contiguous(), whole.lse, max_score.mul(unit).contiguous(), scaled_sum.contiguous()
    )


def dense_rows(x: Tensor) -> Tensor:
    """Return x, copied if not contiguous, or its rows too far apart for 32 bits in a tile."""
    dense = x.stride(-1) == 1 or x.shape[-1] == 1
    return x if dense and abs(x.stride(2)) < MAX_ROW_STRIDE else x.contiguous()


MAX_ROW_STRIDE = 2**22
"""The largest distance of rows that a kernel reads; a tile has at most 256 rows."""


def constants(call: Call, bias: BiasData, data: MaskData, sizes: LaunchSizes) -> dict[str, Any]:
    """Return the arguments for which a kernel is compiled, of a mask the number of ranges."""
    width = max(16, triton.next_power_of_2(call.D)), max(16, triton.next_power_of_2(call.E))
    distances = 0 if bias.buckets is None else bias.buckets.numel() // 2
    linear = 0 if bias.slopes is None else 1 + bias.symmetric
    return {
        "D": call.D, "E": call.E, "BLOCK_D": width[0], "BLOCK_E": width[1],
        "BM": sizes.rows, "BN": sizes.keys,
        "RANGES": data.ranges, "BITS": data.bits is not None,
        "SOFTCAP": call.softcap is not None, "LINEAR": linear, "MAX_DISTANCE": distances,
        "TABLE": bias.table is not None, "PRECISE": _is_precise(call), "WIDEN": _widens(call),
        "PRECISION": "ieee",
    }  # fmt: skip


def _is_precise(call: Call) -> bool:
    """Return whether scores and weights need all digits of fp32."""
    return call.q.dtype == torch.float32


def _widens(call: Call) -> bool:
    """Return whether a kernel computes in fp32, as the interpreter computes bf16 wrongly."""
    return interprets() and call.q.dtype == torch.bfloat16


def _rule_tensors(
    dummy: Tensor, data: MaskData, lists: TileLists, bias: BiasData
) -> tuple[Tensor, ...]:
    """Return positions, mask and bias as arguments; `dummy` stands for what is not used."""
    arguments = (
        data.q_positions, data.k_positions, data.starts, data.stops, data.bits,
        lists.counts, lists.tiles,
        None if bias.slopes is None else bias.slopes.detach().contiguous(),
        bias.buckets,
        None if bias.weights is None else bias.weights.detach().contiguous(),
        None if bias.table is None else bias.table.detach(),
    )  # fmt: skip
    return tuple(dummy if x is None else x for x in arguments)


def _strides(*tensors: Tensor) -> tuple[int, ...]:
    """Return the strides of batch, head and row of q, k and v."""
    return tuple(n for x in tensors for n in x.stride()[:3])


def _rule_strides(data: MaskData, lists: TileLists, bias: BiasData) -> tuple[int, ...]:
    """Return the strides of positions, mask, lists and bias; 0 where rows or heads share one."""
    mask = data.starts if data.bits is None else data.bits
    strides = [_shared(x, 0) * x.shape[1] for x in (data.q_positions, data.k_positions)]
    for x in (mask, lists.counts):
        b_heads, h_step = (0, 0) if x is None else (_shared(x, 0) * x.shape[1], _shared(x, 1))
        strides += [b_heads, h_step]
    strides.append(0 if data.bits is None else data.bits.shape[3])
    strides.append(0 if bias.weights is None else bias.weights.shape[1])
    table = bias.table
    if table is None:
        return (*strides, 0, 0, 0, 0)
    return (*strides, *(0 if table.shape[i] == 1 else table.stride(i) for i in range(4)))


def _shared(x: Tensor, dim: int) -> int:
    """Return 0 if all share the one entry of a dimension, else 1."""
    return int(x.shape[dim] > 1)


def _bias_buffers(
    call: Call, bias: BiasData, wanted: WantedGradients, blocks: int
) -> dict[str, Tensor]:
    """Return a buffer for each gradient of a bias, in which every program has its own numbers."""
    B, H, device = call.B, call.H, call.q.device
    unused = torch.zeros(1, dtype=torch.float32, device=device)
    buffers = dict.fromkeys(("slopes", "weights", "table", "column"), unused)
    if wanted.slopes:
        buffers["slopes"] = torch.empty(B, H, blocks, dtype=torch.float32, device=device)
    if wanted.weights:
        assert bias.weights is not None
        n = triton.next_power_of_2(bias.weights.shape[1])
        buffers["weights"] = torch.empty(B, H, blocks, n, dtype=torch.float32, device=device)
    if wanted.table:
        assert bias.table is not None
        if _is_per_key(call, bias):
            buffers["column"] = torch.empty(B, H, call.S, dtype=torch.float32, device=device)
        else:
            buffers["table"] = torch.empty(
                *bias.table.shape[:2], call.T, call.S, dtype=torch.float32, device=device
            )
    return buffers


def _sum_buffers(
    call: Call, bias: BiasData, wanted: WantedGradients, buffers: dict[str, Tensor]
) -> BiasData:
    """Return the gradients of the parts of a bias, summed over programs in their order."""
    slopes = buffers["slopes"].sum((0, 2)) if wanted.slopes else None
    weights = table = None
    if wanted.weights:
        assert bias.weights is not None
        weights = buffers["weights"].sum((0, 2))[:, : bias.weights.shape[1]]
    if wanted.table:
        assert bias.table is not None
        by_key = _is_per_key(call, bias)
        full = buffers["column"][:, :, None] if by_key else buffers["table"]
        table = full.sum_to_size(bias.table.shape).to(bias.table.dtype)
    return BiasData(slopes, weights=weights, table=table)
