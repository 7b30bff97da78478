"""The kernel "cpu": decoding on a CPU by compiled loops that read each key once."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from regard import masks
from regard.biases import ALiBi, Bias
from regard.masks.tiling import UNBOUNDED
from regard.ops.cpu import arguments
from regard.ops.cpu.attention import (
    TILE_KEYS,
    DecodeArgs,
    apply_sinks,
    decode,
    decode_quantized,
    join_splits,
    quantized_segment,
)
from regard.ops.cpu.instruction_sets import why_none
from regard.ops.cpu.library import why_not_dtype
from regard.ops.softmax.call import Call
from regard.ops.softmax.kernel import UNREADABLE, Kernel, KernelResult, WorkEstimate
from regard.ops.softmax.packed_call import unpackable_parts
from regard.span import Positions, Span, find_empty_slots
from regard.units import plural

_START_AT_ZERO, _STOP_NOWHERE = (
    arguments.constant((1, 1, 1, 1), x, dtype=torch.int64) for x in (0, UNBOUNDED)
)


def decode_args(call: Call) -> DecodeArgs:
    """Convert a call to the arguments of the compiled decode loops."""
    q_positions, k_positions = call.q_positions, call.k_positions
    positions, causal_stops = causal_positions(q_positions)
    key_positions, origin = arguments.NO_POSITIONS, 0
    if isinstance(k_positions, Span):
        origin = k_positions.start
    else:
        key_positions = k_positions.long().contiguous()
    q = call.q.float()
    all_tokens = isinstance(q_positions, Span) and q_positions.start >= 0
    empty_queries = None if all_tokens else find_empty_slots(q_positions)
    if empty_queries is not None:  # an empty slot may hold NaN
        q = q.masked_fill(empty_queries[:, None, :, None], 0)
    q = q.reshape(call.B, call.G, call.H // call.G * call.T, call.D).contiguous()
    if isinstance(call.mask, masks.Causal):
        starts, stops, visible = _START_AT_ZERO, causal_stops, arguments.NO_VISIBLE
    else:
        starts, stops, visible = _visibility_arguments(call, empty_queries)
    symmetric, slopes, bias = (
        _NO_BIAS_ARGUMENTS if call.bias is None else _bias_arguments(call, call.bias)
    )
    return DecodeArgs(
        q,
        call.scale,
        call.T,
        key_positions,
        origin,
        starts,
        stops,
        visible,
        call.softcap or 0.0,
        symmetric,
        slopes,
        bias,
        positions,
    )


@lru_cache(maxsize=8)
def _span_positions(positions: Span) -> tuple[Tensor, Tensor]:
    """Return the positions `[1, T]` of a span, and the causal ends `[1, 1, T, 1]`, cached."""
    tensor, stops = (arguments.arange(positions.start + i, positions.stop + i) for i in (0, 1))
    return tensor[None], stops[None, None, :, None]


@lru_cache(maxsize=16)
def _cached_intervals(mask: masks.Mask, positions: Span) -> tuple[Tensor, ...] | None:
    """Return the intervals of a mask without tensors, cached for all layers of a model."""
    with torch.inference_mode(mode=False):
        intervals = mask.intervals(positions)
        return None if intervals is None else tuple(x.contiguous() for x in intervals)


def _visibility_arguments(call: Call, empty: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
    """Return the ranges that each query sees as starts and stops, or a dense block."""
    if isinstance(call.mask, masks.Full):
        stops = (
            _STOP_NOWHERE if empty is None else torch.where(empty, 0, UNBOUNDED)[:, None, :, None]
        )
        return _START_AT_ZERO, stops.contiguous(), arguments.NO_VISIBLE
    ranges = visible_ranges(call.mask, call.q_positions)
    if ranges is None:
        dense = call.mask.block(call.q_positions, call.k_positions, device="cpu")
        return arguments.NO_RANGES, arguments.NO_RANGES, dense.contiguous()
    return *ranges, arguments.NO_VISIBLE


def visible_ranges(mask: masks.Mask, q_positions: Positions) -> tuple[Tensor, Tensor] | None:
    """Return the ranges of positions that each query sees, as the compiled loops take them."""
    if isinstance(mask, masks.Causal):
        return _START_AT_ZERO, causal_positions(q_positions)[1]
    if isinstance(q_positions, Span) and mask.is_static:
        intervals = _cached_intervals(mask, q_positions)
    else:
        intervals = mask.intervals(q_positions)
    if intervals is None:
        return None
    starts, stops = (x.contiguous() for x in intervals)
    return starts, stops


def causal_positions(q_positions: Positions) -> tuple[Tensor, Tensor]:
    """Return the positions of queries, int64 `[b, T]`, and their causal ends `[b, 1, T, 1]`."""
    if isinstance(q_positions, Span):
        return _span_positions(q_positions)
    positions = q_positions.long().contiguous()
    return positions, (positions[:, None, :, None] + 1).contiguous()


_NO_BIAS_ARGUMENTS = False, arguments.NO_SLOPES, arguments.NO_BIAS


def _bias_arguments(call: Call, bias: Bias) -> tuple[bool, Tensor, Tensor]:
    """Return whether ALiBi is symmetric, its slopes, and any other bias as a table."""
    if isinstance(bias, ALiBi):
        slopes = bias.slopes_on(torch.device("cpu"), torch.float32).detach()
        return bias.symmetric, slopes.contiguous(), arguments.NO_BIAS
    table = bias.block(call.q_positions, call.k_positions, dtype=torch.float32)
    return False, arguments.NO_SLOPES, table.detach().contiguous()


MAX_QUERIES, MAX_ROWS = 16, 64
"""The most queries T, and rows H/G T per key/value head; beyond, matrix products are faster."""

MIN_ELEMENTS = 1 << 17
"""The fewest elements of keys and values for which "auto" tries this kernel first."""


class CpuKernel(Kernel):
    """The kernel "cpu": one pass over the keys with an online softmax, for few queries."""

    name = "cpu"
    selects = True
    wide_output = True

    def why_not(self, call: Call) -> list[str]:
        """Refuse other devices, gradients, dropout, taps, many queries, and graphs."""
        reasons = [
            *(["runs on a CPU only"] if call.q.device.type != "cpu" else []),
            *(["has no gradient"] if call.has_gradient else []),
            *(["no dropout"] if call.dropout else []),
            *([f"does not expose {sorted(call.needs)}"] if call.needs else []),
            *([reason] if (reason := why_not_dtype(call.q.dtype)) is not None else []),
        ]
        if call.compiling:  # a question about sizes would specialize the graph
            return [*reasons, *(unpackable_parts(call) or [UNREADABLE])]
        rows = call.H // call.G * call.T
        if call.T > MAX_QUERIES or rows > MAX_ROWS:
            reasons.append(
                f"{plural(call.T, 'query')}, and {plural(rows, 'row')} (H/G T) per key/value head; "
                f"the limits are {MAX_QUERIES} and {MAX_ROWS}"
            )
        if 0 in (call.B, call.T, call.S, call.D, call.E):
            reasons.append("nothing to compute")
        if not call.readable and not call.q.is_meta:
            reasons.append(UNREADABLE)
        elif not reasons and (none := why_none()) is not None:
            reasons.append(none)
        return reasons

    def priority(self, call: Call) -> float | None:
        """Return 100 where reading keys and values dominates, else 50."""
        if not (call.readable and call.q.is_cpu):
            return None
        is_large = call.k.numel() + call.v.numel() >= MIN_ELEMENTS and not call.has_gradient
        return 100 if is_large else 50

    def run(self, call: Call) -> KernelResult:
        """Attend to the keys, or to the codes and the recent slots of a quantized cache."""
        args, results, coded_slots = decode_args(call), [], 0
        k, v = call.k, call.v
        if (segment := quantized_segment(k, v)) is not None:
            coded_slots, (k, v) = segment.slots, segment.recent
            results.append(decode_quantized(args, segment, call.E))
            args = args.after_slots(coded_slots)
        if coded_slots < call.S:
            results.append(decode(args, k, v))
        out, lse = results[0] if len(results) == 1 else join_splits(*zip(*results, strict=True))
        if call.sink is not None:
            out = apply_sinks(out, lse, call.sink, call.T)
        z = out.reshape(call.B, call.H, call.T, call.E)
        sums = lse.reshape(call.B, call.H, call.T)
        return KernelResult(z.to(call.result_dtype), sums if call.wants_lse else None)

    def work(self, call: Call) -> WorkEstimate:
        """Return the pairs in the tiles of keys that some query sees, and the result's bytes."""
        B, H, G, S, R = call.B, call.H, call.G, call.S, call.H // call.G * call.T
        tiles = call.mask.tile_row(call.q_positions, call.k_positions, slice(0, call.T), TILE_KEYS)
        visible = torch.unflatten((tiles > 0).expand(B, H, -1), 1, (G, H // G)).any(2)
        sizes = torch.full_like(visible[0, 0], TILE_KEYS, dtype=torch.int64)
        sizes[-1:] = S - TILE_KEYS * (len(sizes) - 1)
        return WorkEstimate(R * int((visible * sizes).sum()), 4 * B * G * R * (call.E + 1))
