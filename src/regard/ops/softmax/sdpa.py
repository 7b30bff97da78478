"""The kernel "sdpa": torch's scaled_dot_product_attention.

For a mask that torch does not support, it is called for ranges of keys (`lowering`).
"""

from __future__ import annotations

import math
from dataclasses import replace
from threading import Lock
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import scaled_dot_product_attention

from regard import masks
from regard.ops.softmax.call import SMALL_SCORE_BOUND, Call, Partial
from regard.ops.softmax.definition import differentiable_gradients
from regard.ops.softmax.kernel import Kernel, KernelResult, WorkEstimate
from regard.ops.softmax.lowering import (
    ALL,
    BLOCK_QUERIES,
    DEFAULT_BLOCK_SIZES,
    MIN_KEYS,
    BlockSizes,
    KeyRange,
    QueryBlock,
    lower_mask,
)
from regard.ops.softmax.merge import apply_sink, merge
from regard.process_state import (
    differentiates_forward,
    drops_conditions,
    is_compiling,
    is_exporting_onnx,
    is_tracing_onnx,
    values_are_readable,
)
from regard.span import Span
from regard.units import plural


def ensure_contiguous(x: Tensor) -> Tensor:
    """Return x, copied if its last dimension is not contiguous, as torch's fused kernel needs."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def pad_to_equal_dim(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Append zero columns to q and k, or to v, until D and E are equal."""
    missing = v.shape[-1] - q.shape[-1]
    if missing > 0:
        q, k = F.pad(q, (0, missing)), F.pad(k, (0, missing))
    elif missing < 0:
        v = k if _is_prefix_of_keys(v, k) else F.pad(v, (0, -missing))
    return q, k, v


def _is_prefix_of_keys(v: Tensor, k: Tensor) -> bool:
    """Return whether the values are the first numbers of their keys in memory, as in MLA."""
    requires_grad = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    return (
        not requires_grad
        and type(k) is type(v) is Tensor
        and not is_compiling()
        and values_are_readable(k, v)
        and v.data_ptr() == k.data_ptr()
        and v.shape[:3] == k.shape[:3]
        and v.stride() == k.stride()
    )


MAX_FOLDED_QUERIES = 32
"""Up to so many queries, the heads of a group are rows of a product, reading keys once."""

_CPU_OP_SCHEMA = (
    "aten::_scaled_dot_product_flash_attention_for_cpu(Tensor query, Tensor key, Tensor value, "
    "float dropout_p=0., bool is_causal=False, *, Tensor? attn_mask=None, float? scale=None) -> "
    "(Tensor output, Tensor logsumexp)"
)


class SdpaKernel(Kernel):
    """The kernel "sdpa": torch's scaled_dot_product_attention, with the lse on a CPU."""

    name = "sdpa"

    def __init__(self, sizes: BlockSizes = DEFAULT_BLOCK_SIZES) -> None:
        self.sizes = sizes

    def why_not(self, call: Call) -> list[str]:
        """Refuse softcap, dropout, learned biases, taps, large scores, and an lse torch lacks."""
        reasons = [
            *(["no softcap"] if call.softcap is not None else []),
            *(["no dropout on the weights in its fused kernel"] if call.dropout else []),
            *([f"does not expose {sorted(call.needs)}"] if call.needs else []),
        ]
        if not (call.readable or call.compiling) and differentiates_forward():
            reasons.append("no derivative in forward mode")
        if call.bias is not None and any(x.requires_grad for x in call.bias.tensors()):
            reasons.append("no gradient for a bias")
        if not call.compiling and (call.S < MIN_KEYS or 0 in (call.B, call.T, call.E)):
            reasons.append(
                f"fewer than {plural(MIN_KEYS, 'key')}, or nothing to compute "
                f"({_describe_sizes(call)})"
            )
        if (call.wants_lse or call.sink is not None) and call.q.device.type == "cuda":
            reasons += no_lse_reasons(call.q.device)
        if reasons:  # before a question that reads tensors
            return reasons
        if call.readable and not call.all_finite(*inputs_to_check(call)):
            return ["a NaN or infinity behind a mask would leak through 0 x NaN"]
        if call.has_gradient and (too_large := _large_score_reasons(call)):
            return too_large
        if call.wants_lse or call.sink is not None:
            if is_exporting_onnx():
                return ["no lse: ONNX's node Attention returns none"]
            return no_lse_reasons(call.q.device)
        return []

    def priority(self, call: Call) -> float | None:
        """Return 80, the usual choice; 30 on a GPU where flash attention does not serve a call."""
        return 30 if call.q.device.type == "cuda" and not _is_flash_call(call) else 80

    def describe(self, call: Call) -> str:
        """Return which of torch's kernels runs the call on a GPU; "" on a CPU, which has one."""
        if call.q.device.type != "cuda":
            return ""
        first = cuda_backends(call.q.dtype, masked=not _is_flash_call(call))[0]
        return f"sdpa asks torch for its {first.replace('_', ' ').lower()} kernel, never for cuDNN"

    def run(self, call: Call) -> KernelResult:
        """Split the mask into key ranges and attend to each."""
        q, k, v = pad_to_equal_dim(*(ensure_contiguous(x) for x in (call.q, call.k, call.v)))
        # torch writes -inf above the diagonal before it scales; a negative scale would make it +inf
        q, scale = (q, call.scale) if call.scale > 0 else (-q, -call.scale)
        blocks = lower_mask(call, self.sizes)
        # torch's operator has no second derivative on a CPU, and `BlockwiseSdpa` has
        twice = call.has_gradient and call.q.is_cpu
        if _is_one_range(blocks, call.T) and not (call.wants_lse or call.sink is not None or twice):
            out = attend_range(q, k, v, blocks[0].ranges[0], scale)
            return KernelResult(out if call.E >= call.D else out[..., : call.E], None)
        if call.has_gradient:
            out, lse = BlockwiseSdpa.apply(q, k, v, scale, blocks, call)  # type: ignore[no-untyped-call]
        else:
            out, lse = attend_blocks(q, k, v, scale, blocks)
        out = out if call.E >= call.D else out[..., : call.E]
        return KernelResult(out if call.sink is None else apply_sink(out, lse, call.sink), lse)

    def part_gradients(
        self, call: Call, whole: Partial, d_out: Tensor, d_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of some of the keys; see `attend.part_gradients`."""
        q, k, v = pad_to_equal_dim(
            *(ensure_contiguous(x.detach()) for x in (call.q, call.k, call.v))
        )
        sign = 1.0 if call.scale > 0 else -1.0  # as in `run`
        out, d_out = (F.pad(x.to(q.dtype), (0, q.shape[-1] - call.E)) for x in (whole.out, d_out))
        row = (q * sign, out, whole.lse, d_out, d_lse)
        blocks = lower_mask(call, self.sizes)
        d_q, d_k, d_v = sum_range_gradients(row, k, v, abs(call.scale), blocks)
        # `why_not` refuses a bias with a gradient
        d_bias = (None for _ in call.bias_tensors)
        return d_q[..., : call.D] * sign, d_k[..., : call.D], d_v[..., : call.E], *d_bias

    def work(self, call: Call) -> WorkEstimate:
        """Return the pairs of the key ranges, and the bytes of the largest additive mask."""
        ranges = [
            (rows, key_range)
            for rows, ranges in lower_mask(call, self.sizes)
            for key_range in ranges
        ]
        pairs = sum(_count_pairs(rows, key_range, call.T) for rows, key_range in ranges)
        masked = [(rows, key_range) for rows, key_range in ranges if key_range.mask is not None]
        if not masked:
            return WorkEstimate(call.B * call.H * pairs, 0)
        _, largest = max(masked, key=lambda x: len(range(*x[0].indices(call.T))) * x[1].size)
        mask = make_mask(largest)
        return WorkEstimate(call.B * call.H * pairs, 0 if mask is None else mask.nbytes)


def inputs_to_check(call: Call) -> str:
    """Return the inputs, and only those, of which a masked NaN could reach the results."""
    if call.sees_everything:
        return ""
    if not isinstance(call.mask, masks.Causal):
        return "kvq"
    # with the causal flag torch selects scores but multiplies masked values by 0; the gradient
    # multiplies keys as well
    square = isinstance(call.q_positions, Span) and call.q_positions == call.k_positions
    return "v" if square and not call.has_gradient else "kv"


def _large_score_reasons(call: Call) -> list[str]:
    """Return a reason if torch's gradient on a CPU may be inaccurate, from a rounded lse."""
    if not call.q.is_cpu:
        return []
    if not call.readable:
        return ["its gradient is accurate for small scores only, and they cannot be read here"]
    bound = call.score_bound
    if call.bias is not None and bound <= SMALL_SCORE_BOUND:
        bound += _largest_bias_of_any_row(call)
    if bound <= SMALL_SCORE_BOUND:
        return []
    return [
        (
            f"its gradient is accurate for scores up to {SMALL_SCORE_BOUND:.0f}; here they may "
            f"reach {bound:.3g}"
        )
    ]


def _largest_bias_of_any_row(call: Call) -> float:
    """Return the largest absolute value, over all rows, of the largest visible bias of a row."""
    assert call.bias is not None
    result, positions = 0.0, (call.q_positions, call.k_positions)
    for start in range(0, call.T, BLOCK_QUERIES):
        rows = slice(start, min(start + BLOCK_QUERIES, call.T))
        bias = call.bias.block(*positions, rows, dtype=call.score_dtype, device=call.q.device)
        visible = call.mask.block(*positions, rows, device=call.q.device)
        largest = bias.detach().masked_fill(~visible, -math.inf).amax(-1)
        result = max(result, largest.masked_fill(largest.isneginf(), 0).abs().amax().item())
    return result


def no_lse_reasons(device: torch.device) -> list[str]:
    """Return why torch gives no lse on this device, or an empty list if it does."""
    if device.type != "cpu":
        return [f"returns no lse on {device.type}"]
    schema = str(torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default._schema)
    return (
        []
        if schema == _CPU_OP_SCHEMA
        else ["no lse: this version of torch has another signature of its private CPU operator"]
    )


def _is_flash_call(call: Call) -> bool:
    """Return whether torch's flash attention on a GPU serves a call, without reading a tensor."""
    q, k = call.q_positions, call.k_positions
    triangle = isinstance(call.mask, masks.Causal) and isinstance(q, Span) and q == k
    triangle = triangle and isinstance(k, Span) and k.start >= 0
    return (
        call.q.dtype in (torch.bfloat16, torch.float16)
        and max(call.D, call.E) <= MAX_FLASH_DIM
        and not (call.wants_lse or call.dropout)
        and (call.bias, call.softcap, call.sink) == (None, None, None)
        and (call.sees_everything or triangle)
    )


MAX_FLASH_DIM = 256
"""The largest head dimension of torch's flash attention on a GPU."""


def cuda_backends(dtype: torch.dtype, *, masked: bool) -> tuple[str, ...]:
    """Return the names of torch's kernels for a call on a GPU, in order. cuDNN, torch's own choice,
    reads a float32 mask wrongly (pytorch#191612) and gave NaN gradients (pytorch#196678).
    """
    if dtype == torch.float64:
        return ("MATH",)
    others = ("EFFICIENT_ATTENTION", "MATH")
    return others if masked or dtype == torch.float32 else ("FLASH_ATTENTION", *others)


_backend_lock = Lock()
"""Held while torch's switches of kernels are set, because they belong to the whole process."""


def attend_range_on_cuda(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool
) -> Tensor:
    """Compute attention on a GPU with the kernel of torch that is named for it.

    The mask is converted to the dtype of the queries. A row that sees nothing, whose softmax is
    undefined, is computed without a mask and then set to 0.
    """
    grouped = q.shape[1] != k.shape[1]
    blind = None
    if mask is not None:
        blind = (mask == -math.inf).all(-1, keepdim=True)
        mask = mask.masked_fill(blind, 0).to(q.dtype)
        mask = mask.expand(-1, -1, q.shape[2], -1)
    names = cuda_backends(q.dtype, masked=mask is not None)
    chosen = [getattr(SDPBackend, name) for name in names]
    with _backend_lock, sdpa_kernel(chosen, set_priority=True):
        out = scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=causal, scale=scale, enable_gqa=grouped
        )
    return out if blind is None else out.masked_fill(blind, 0)


def attend_range(q: Tensor, k: Tensor, v: Tensor, key_range: KeyRange, scale: float) -> Tensor:
    """Compute attention over one key range with torch's public function."""
    k, v, mask = select_range(k, key_range), select_range(v, key_range), make_mask(key_range)
    if is_exporting_onnx():
        return _attend_range_in_onnx(q, k, v, mask, scale, causal=key_range.causal)
    if q.device.type == "cuda":
        return attend_range_on_cuda(q, k, v, mask, scale, causal=key_range.causal)
    (B, H, T, _), G = q.shape, k.shape[1]
    folded = _can_fold_heads(q, k, key_range, mask)
    if folded:
        q = q.reshape(B, G, H // G * T, -1)
    # in a graph the comparison alone is symbolic, which the operator does not accept
    grouped = True if q.shape[1] != G else False  # noqa: SIM210
    out = scaled_dot_product_attention(
        q, k, v, attn_mask=mask, is_causal=key_range.causal, scale=scale, enable_gqa=grouped
    )
    return out.reshape(B, H, T, -1) if folded else out


def _attend_range_in_onnx(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scale: float, *, causal: bool
) -> Tensor:
    """Compute attention for an ONNX file, by the node Attention (opset 23) or by products."""
    H, G = q.shape[1], k.shape[1]
    grouped = True if H != G else False  # noqa: SIM210  (see `attend_range`)
    if grouped and is_tracing_onnx():
        k, v = (x[:, :, None].expand(-1, -1, H // G, -1, -1).flatten(1, 2) for x in (k, v))
        grouped = False
    # for older opsets the exporters multiply q and k by sqrt(scale), which rounds once more
    out = scaled_dot_product_attention(
        q * scale, k, v, attn_mask=mask, is_causal=causal, scale=1.0, enable_gqa=grouped
    )
    return out if mask is None else out.masked_fill(mask.amax(-1, keepdim=True) == -math.inf, 0)


def select_range(x: Tensor, key_range: KeyRange) -> Tensor:
    """Return the keys or values of a key range."""
    return x if key_range.size == x.shape[2] else x[:, :, key_range.columns]


def attend_blocks(
    q: Tensor, k: Tensor, v: Tensor, scale: float, blocks: list[QueryBlock]
) -> tuple[Tensor, Tensor]:
    """Attend to all key ranges -> out `[B, H, T, D]`, lse `[B, H, T]`."""
    if _is_one_range(blocks, q.shape[2]):
        return attend_range_with_lse(q, k, v, blocks[0].ranges[0], scale)
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse_dtype = torch.float64 if q.dtype == torch.float64 else torch.float32
    lse = torch.full(q.shape[:3], -math.inf, dtype=lse_dtype, device=q.device)
    for rows, ranges in blocks:
        parts = [
            attend_range_with_lse(q[:, :, rows], k, v, key_range, scale) for key_range in ranges
        ]
        if parts:
            one = parts[0] if len(parts) == 1 else merge([Partial(*part) for part in parts])
            out[:, :, rows], lse[:, :, rows] = one
    return out, lse


class BlockwiseSdpa(torch.autograd.Function):
    """Autograd function for the output and lse of all key ranges.

    torch's backward runs for each range with the output and lse of all; their sum is the gradient.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        scale: float,
        blocks: list[QueryBlock],
        call: Call,
    ) -> tuple[Tensor, Tensor]:
        """Attend to all key ranges, and save what the backward pass needs."""
        out, lse = attend_blocks(q, k, v, scale, blocks)
        ctx.save_for_backward(q, k, v, out, lse)
        # autograd saves q, k and v; the saved call holds their shapes only
        q, k, v = (x.detach().to("meta") for x in (q, k, v))
        ctx.call = replace(call, q=q, k=k, v=v, scale=scale, sink=None)
        ctx.scale, ctx.blocks = scale, blocks
        ctx.set_materialize_grads(False)
        return out, lse

    @staticmethod
    def backward(ctx: Any, d_out: Tensor | None, d_lse: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return the gradients of q, k and v, by the definition if they must be differentiable."""
        q, k, v, out, lse = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph=True
            grads = differentiable_gradients(ctx.call, (q, k, v), d_out, d_lse)
            return *grads[:3], None, None, None
        d_out = torch.zeros_like(out) if d_out is None else d_out
        grads = sum_range_gradients((q, out, lse, d_out, d_lse), k, v, ctx.scale, ctx.blocks)
        return *(x.to(q.dtype) for x in grads), None, None, None


def sum_range_gradients(
    row: tuple[Tensor | None, ...], k: Tensor, v: Tensor, scale: float, blocks: list[QueryBlock]
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v, summed over all key ranges in the dtype of the lse."""
    q, out, lse, d_out, d_lse = row
    assert q is not None
    assert lse is not None
    d_q, d_k, d_v = (torch.zeros_like(x, dtype=lse.dtype) for x in (q, k, v))
    # a row that sees no key gets the lse 0: all its weights are then exp(-inf - 0) = 0
    lse = lse.masked_fill(lse.isneginf(), 0)
    for rows, ranges in blocks:
        row_tensors = tuple(
            None if x is None else x[:, :, rows] for x in (q, out, lse, d_out, d_lse)
        )
        for key_range in ranges:
            g_q, g_k, g_v = range_gradients(row_tensors, k, v, key_range, scale)
            d_q[:, :, rows] += g_q
            d_k[:, :, key_range.columns] += g_k
            d_v[:, :, key_range.columns] += g_v
    return d_q, d_k, d_v


def attend_range_with_lse(
    q: Tensor, k: Tensor, v: Tensor, key_range: KeyRange, scale: float
) -> tuple[Tensor, Tensor]:
    """Return output and lse over one key range, -inf for a row without a visible key."""
    k, v, mask = select_range(k, key_range), select_range(v, key_range), make_mask(key_range)
    (B, H, T, _), G = q.shape, k.shape[1]
    if _can_fold_heads(q, k, key_range, mask):
        q = q.reshape(B, G, H // G * T, -1)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    out, lse = op(q, k, v, 0.0, key_range.causal, attn_mask=mask, scale=scale)
    out, lse = out.reshape(B, H, T, -1), lse.reshape(B, H, T)
    return out, lse if mask is None else lse.masked_fill(
        _fully_masked_rows(mask, key_range), -math.inf
    )


def range_gradients(
    row: tuple[Tensor | None, ...], k: Tensor, v: Tensor, key_range: KeyRange, scale: float
) -> tuple[Tensor, ...]:
    """Return the gradients of one key range, given the output and lse of the whole row.

    d score = p (dO . v - dO . O + d lse), the last term as one more value column of ones.
    """
    q, out, lse, d_out, d_lse = row
    assert q is not None
    assert out is not None
    assert lse is not None
    assert d_out is not None
    k, v, mask = select_range(k, key_range), select_range(v, key_range), make_mask(key_range)
    op = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    if d_lse is None:
        gradients: tuple[Tensor, ...] = op(
            d_out, q, k, v, out, lse, 0.0, key_range.causal, attn_mask=mask, scale=scale
        )
        return gradients
    d_out = torch.cat([d_out, d_lse.unsqueeze(-1).to(d_out.dtype)], -1)
    q, k, out = (F.pad(x, (0, 1)) for x in (q, k, out))
    v = F.pad(v, (0, 1), value=1.0)
    grads = op(d_out, q, k, v, out, lse, 0.0, key_range.causal, attn_mask=mask, scale=scale)
    return tuple(g[..., :-1] for g in grads)


def make_mask(key_range: KeyRange) -> Tensor | None:
    """Return the additive mask of a key range, or None if it has none."""
    return None if key_range.mask is None else key_range.mask()


def _fully_masked_rows(mask: Tensor, key_range: KeyRange) -> Tensor:
    """Return the rows `[B or 1, H or 1, t or 1]` that see no key, also under the triangle."""
    hidden = mask.isneginf()
    return hidden[:, :, 0].cumprod(-1).bool() if key_range.causal else hidden.all(-1)


def _can_fold_heads(q: Tensor, k: Tensor, key_range: KeyRange, mask: Tensor | None) -> bool:
    """Return whether the query heads of a group can be rows of one head under one mask."""
    one_mask = mask is None or (mask.shape[1] == 1 and mask.shape[2] == 1)
    if drops_conditions():
        return False
    limit = 1 if is_compiling() else MAX_FOLDED_QUERIES  # a graph must not specialize on a length
    return q.shape[1] != k.shape[1] and q.shape[2] <= limit and not key_range.causal and one_mask


def _describe_sizes(call: Call) -> str:
    """Return the sizes of a call for a message, without numbers while torch.compile is tracing."""
    if call.compiling:  # a number in a message would specialize the graph on it
        return "in a graph"
    return f"B {call.B}, T {call.T}, S {call.S}, E {call.E}"


def _is_one_range(blocks: list[QueryBlock], length: int) -> bool:
    """Return whether one key range serves all queries."""
    if len(blocks) != 1 or len(blocks[0].ranges) != 1:
        return False
    rows = blocks[0].rows
    return rows == ALL or (rows.start, rows.stop) == (0, length)


def _count_pairs(rows: slice, key_range: KeyRange, length: int) -> int:
    """Return the number of query-key pairs of a block and a key range."""
    queries = len(range(*rows.indices(length)))
    return queries * (queries + 1) // 2 if key_range.causal else queries * key_range.size
