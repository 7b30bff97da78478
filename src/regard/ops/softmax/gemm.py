"""The kernel "gemm": prefill and its gradient on a CPU, over the visible tiles of a mask."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache, partial

import torch
from torch import Tensor

from regard import masks
from regard.biases import ALiBi
from regard.masks import Causal, Full, Mask, Padding
from regard.masks.tiling import UNBOUNDED
from regard.ops.cpu import arguments
from regard.ops.cpu.attention import PrefillArgs, prefill, prefill_gradient, prefill_with_gradient
from regard.ops.cpu.instruction_sets import why_none
from regard.ops.cpu.library import why_not_dtype
from regard.ops.softmax.call import Call, Partial
from regard.ops.softmax.definition import differentiable_gradients
from regard.ops.softmax.kernel import (
    UNREADABLE,
    Kernel,
    KernelResult,
    WorkEstimate,
    maximum_and_sum,
)
from regard.ops.softmax.merge import apply_sink
from regard.ops.softmax.packed_call import unpackable_parts
from regard.span import as_tensor, slice_positions


@dataclass(frozen=True)
class MeasuredSizes:
    """From which sizes this kernel was measured to be faster than torch's on a kind of processor.

    Attributes:
        products: the fewest products B H T S (D + E) without a gradient.
        head_products: dtype -> the fewest products H/G T S (D + E) per key/value head, which repay
            packing.
        skipping_products: the same for masks of which this kernel skips hidden pairs, and torch's
            computes them.
        training_products: dtype -> the fewest products with a gradient, in which torch's kernel is
            slower compared with this one.
        training_length: dtype -> the fewest rows H/G T, and keys S, in calls with a gradient, which
            packs keys three times.
        head_dims: dtype -> the smallest D + E where torch's kernel skips as many pairs.
        training_head_dims: the same for calls with a gradient.
        whole_panels: whether fp32 heads must fill whole panels of 64, too.
        causal: the dtypes in which it is faster only if a mask hides keys.
        training_causal: the same for calls with a gradient.
    """

    products: int
    head_products: Mapping[torch.dtype, int]
    skipping_products: Mapping[torch.dtype, int]
    training_products: Mapping[torch.dtype, int]
    training_length: Mapping[torch.dtype, int]
    head_dims: Mapping[torch.dtype, int]
    training_head_dims: Mapping[torch.dtype, int]
    whole_panels: bool
    causal: frozenset[torch.dtype] = frozenset()
    training_causal: frozenset[torch.dtype] = frozenset()


def _by_dtype(fp32: int, bf16: int, fp16: int) -> dict[torch.dtype, int]:
    """Return a size for each dtype."""
    return {torch.float32: fp32, torch.bfloat16: bf16, torch.float16: fp16}


MEASURED = {
    "AVX512": MeasuredSizes(
        products=2**28,
        head_products=_by_dtype(2**27, 2**24, 2**24),
        skipping_products=_by_dtype(2**25, 2**24, 2**24),
        training_products=_by_dtype(2**28, 2**28, 2**26),
        training_length=_by_dtype(512, 128, 128),
        head_dims=_by_dtype(128, 128, 0),
        training_head_dims=_by_dtype(128, 128, 0),
        whole_panels=True,
    ),
    "AVX2": MeasuredSizes(
        products=2**25,
        head_products=_by_dtype(2**23, 2**23, 2**21),
        skipping_products=_by_dtype(2**22, 2**22, 2**21),
        training_products=_by_dtype(2**25, 2**25, 2**25),
        training_length=_by_dtype(256, 256, 256),
        head_dims=_by_dtype(128, 64, 0),
        training_head_dims=_by_dtype(0, 0, 0),
        whole_panels=False,
        causal=frozenset({torch.float32, torch.bfloat16}),
        training_causal=frozenset({torch.float32}),
    ),
}
"""What torch says of the processor's instructions -> what was measured with them (LOG.md)."""

MAX_TRAINING_SCORE = 500.0
"""The largest |scale q . k| for gradients, which are inaccurate where a weight is nearly 1."""

MIN_ROWS = 64
"""The fewest rows H/G T per key/value head for which packing keys and values pays."""

MIN_FULL_ROWS, MIN_FULL_KEYS = 128, 256
"""The smallest numbers of rows H/G T and of keys S where both kernels compute the same pairs."""

MIN_KEYS_WITH_AMX = 512
"""The fewest keys to be the first choice beside AMX, where torch's kernel is faster."""


class GemmKernel(Kernel):
    """The kernel "gemm": blocks of queries against packed keys and values, in compiled C++.

    With AVX512-BF16, bfloat16 is multiplied as it is, with sums and softmax in fp32 and weights
    rounded to bfloat16, as in torch's kernel; otherwise it is converted to fp32.
    """

    name = "gemm"
    wide_output = True

    def why_not(self, call: Call) -> list[str]:
        """Refuse other devices, dropout, taps, masks without ranges, most biases, and graphs."""
        learns = torch.is_grad_enabled() and any(x.requires_grad for x in call.bias_tensors)
        reasons = [
            *(["runs on a CPU only"] if call.q.device.type != "cpu" else []),
            *(["no dropout"] if call.dropout else []),
            *([f"does not expose {sorted(call.needs)}"] if call.needs else []),
            *([reason] if (reason := why_not_dtype(call.q.dtype)) is not None else []),
            *(
                [f"no bias other than ALiBi ({call.bias})"]
                if not isinstance(call.bias, ALiBi | None)
                else []
            ),
            *(["no gradient for a bias"] if learns else []),
        ]
        if call.compiling:  # a question about sizes would specialize the graph
            return [*reasons, *(unpackable_parts(call) or [UNREADABLE])]
        if 0 in (call.B, call.T, call.S, call.D, call.E):
            reasons.append(f"nothing to compute (B {call.B}, T {call.T}, S {call.S}, E {call.E})")
        if not call.readable and not call.q.is_meta:
            reasons.append(UNREADABLE)
        elif not reasons and (none := why_none()) is not None:
            reasons.append(none)
        elif not reasons and visible_position_ranges(call, slice(0, 1)) is None:
            reasons.append(f"the mask has no ranges of positions ({call.mask})")
        elif (
            not reasons
            and not call.sees_everything
            and not call.all_finite(*_inputs_to_check(call))
        ):
            reasons.append("a NaN or infinity behind a mask would leak through 0 x NaN")
        elif not reasons and call.has_gradient and call.score_bound > MAX_TRAINING_SCORE:
            reasons.append(
                f"its gradient is accurate for scores up to {MAX_TRAINING_SCORE:.0f}; here they "
                f"may reach {call.score_bound:.3g}"
            )
        return reasons

    def priority(self, call: Call) -> float | None:
        """Return 90 where it was measured to be faster than torch's kernel; else 70 or 30."""
        if not (call.readable and call.q.is_cpu):
            return None
        return 90 if prefer_gemm(call) else 70 if call.has_gradient else 30

    def run(self, call: Call) -> KernelResult:
        """Compute the output, with a gradient if an input requires one."""
        args = prefill_args(call)
        if call.has_gradient:
            # the call without its tensors, which autograd saves
            shapes = {name: getattr(call, name).detach().to("meta") for name in "qkv"}
            gradients = partial(differentiable_gradients, replace(call, sink=None, **shapes))
            out, lse = prefill_with_gradient(args, gradients)
        else:
            out, max_score, scaled_sum = prefill(args)
            lse = max_score + scaled_sum.log()
        z = out if call.sink is None else apply_sink(out, lse, call.sink)
        return KernelResult(z, lse if call.wants_lse else None)

    def part_gradients(
        self, call: Call, whole: Partial, d_out: Tensor, d_lse: Tensor | None
    ) -> tuple[Tensor | None, ...]:
        """Compute the gradients of some of the keys; see `attend.part_gradients`."""
        saved = maximum_and_sum(whole.lse)
        d_lse = torch.zeros_like(whole.lse) if d_lse is None else d_lse
        args = prefill_args(call)
        grads = prefill_gradient(args, whole.out, saved, d_out, d_lse, dtype=args.out_dtype)
        # `why_not` refuses a bias with a gradient
        return *grads, *(None for _ in call.bias_tensors)

    def work(self, call: Call) -> WorkEstimate:
        """Return the pairs in the panels of keys that some query sees, and the bytes of packing."""
        # a block and a panel with AVX-512 (`kMaxBlockRows`, `kPanel`); other panels are narrower
        block_rows, panel = 258, 64
        step, pairs = max(1, block_rows // (call.H // call.G)), 0
        for start in range(0, call.T, step):
            block = slice(start, min(start + step, call.T))
            visible = call.mask.tile_row(call.q_positions, call.k_positions, block, panel) > 0
            sizes = torch.full_like(visible[0, 0], panel, dtype=torch.int64)
            sizes[-1:] = call.S - panel * (len(sizes) - 1)
            heads = (visible * sizes).sum(-1).expand(call.B, call.H).sum()
            pairs += (block.stop - block.start) * int(heads)
        item_size = 2 if call.q.dtype == torch.bfloat16 else 4
        kv_heads, length, dims = call.B * call.G, _round_up(call.S, panel), call.D + call.E
        packed_bytes = kv_heads * length * (call.D + _round_up(call.E, panel)) * item_size
        block_bytes = block_rows * (call.D + 2 * 256 + _round_up(call.E, panel)) * 4
        if call.has_gradient:  # keys twice, values once, and the sums of both gradients
            packed_bytes = (
                kv_heads * length * ((dims + _round_up(call.D, panel)) * item_size + dims * 4)
            )
            block_bytes = block_rows * (
                2 * dims * item_size + _round_up(call.D, panel) * 4 + 2 * panel * 4
            )
        return WorkEstimate(pairs, packed_bytes + block_bytes + 2 * call.B * call.H * call.T * 4)


def prefer_gemm(call: Call) -> bool:
    """Return whether this kernel was measured to be faster on a processor like this."""
    rows, sizes = call.H // call.G * call.T, _measured_sizes()
    if rows < MIN_ROWS or call.compiling or sizes is None:
        return False
    if call.q.dtype not in sizes.head_products:
        return False
    if _processor_has_amx() and not _prefer_beside_amx(call):
        return False
    prefer = _prefer_in_training if call.has_gradient else _prefer_forward
    return prefer(call, rows, sizes)


def _prefer_beside_amx(call: Call) -> bool:
    """Return whether the kernel may be preferred where torch's multiplies with AMX, which this one
    does not: only for calls of which torch's computes more pairs, or that it refuses, because they
    have a softcap or a bias. It was not measured there.
    """
    has_rule = call.softcap is not None or call.bias is not None
    skips = _skips_pairs(call.mask) or _is_padded_causal(call.mask)
    return call.S >= MIN_KEYS_WITH_AMX and (has_rule or skips)


def _prefer_forward(call: Call, rows: int, sizes: MeasuredSizes) -> bool:
    """Return whether the kernel was measured to be faster than torch's without a gradient."""
    dtype, per_head = call.q.dtype, rows * call.S * (call.D + call.E)
    if call.B * call.G * per_head < sizes.products:
        return False
    if _skips_pairs(call.mask) or _is_padded_causal(call.mask):
        return per_head >= sizes.skipping_products[dtype]
    if rows < MIN_FULL_ROWS or call.S < MIN_FULL_KEYS:
        return False
    if not _head_dims_suit(call, sizes.head_dims[dtype], whole_panels=sizes.whole_panels):
        return False
    # torch's kernel reads a mask for padding, and computes the pairs that it hides
    hides_padding = any(isinstance(term, Padding) for term in call.mask.terms())
    if dtype in sizes.causal and not (hides_padding or _is_causal(call.mask)):
        return False
    return per_head * (2 if hides_padding else 1) >= sizes.head_products[dtype]


def _prefer_in_training(call: Call, rows: int, sizes: MeasuredSizes) -> bool:
    """Return whether the kernel and its gradient were measured to be faster than torch's."""
    dtype = call.q.dtype
    products = call.B * call.H * call.T * call.S * (call.D + call.E)
    if products < sizes.training_products[dtype]:
        return False
    if min(rows, call.S) < sizes.training_length[dtype]:
        return False
    if _skips_pairs(call.mask):
        return True
    if dtype in sizes.training_causal and not _is_causal(call.mask):
        return False
    least = sizes.training_head_dims[dtype]
    return _head_dims_suit(call, least, whole_panels=sizes.whole_panels)


def _skips_pairs(mask: Mask) -> bool:
    """Return whether the mask hides pairs that torch's kernel, beyond is_causal, computes."""
    return not all(isinstance(term, Full | Causal | Padding) for term in mask.terms())


def _is_causal(mask: Mask) -> bool:
    """Return whether one term of a mask is causal."""
    return any(isinstance(term, Causal) for term in mask.terms())


def _is_padded_causal(mask: Mask) -> bool:
    """Return whether a mask is causal with more terms, which is_causal cannot express."""
    return len(mask.terms()) > 1 and _is_causal(mask)


def _head_dims_suit(call: Call, least: int, *, whole_panels: bool) -> bool:
    """Return whether the heads have the least D + E, and in fp32 fill panels if they must."""
    fills = not whole_panels or call.q.dtype != torch.float32 or call.E % 64 == 0
    return fills and least <= call.D + call.E


def _inputs_to_check(call: Call) -> str:
    """Return the inputs of which a masked NaN would reach the results by a product with 0."""
    return "kvq" if call.has_gradient else "v"


@cache
def _measured_sizes() -> MeasuredSizes | None:
    """Return what was measured on processors like this; None if nothing was."""
    return MEASURED.get(torch.backends.cpu.get_cpu_capability())


@cache
def _processor_has_amx() -> bool:
    """Return whether the processor has AMX, with which torch multiplies bfloat16 numbers."""
    amx = getattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    return bool(amx())


def _round_up(n: int, step: int) -> int:
    """Return the smallest multiple of `step` that is at least `n`."""
    return -(-n // step) * step


def visible_position_ranges(call: Call, rows: slice) -> tuple[Tensor, Tensor] | None:
    """Return the ranges of positions `[b, h, t, n]` that queries see, or None."""
    positions, zero = (
        slice_positions(call.q_positions, rows),
        arguments.full((1, 1, 1, 1), 0, dtype=torch.int64),
    )
    if call.sees_everything:
        return zero, arguments.full((1, 1, 1, 1), UNBOUNDED, dtype=torch.int64)
    if isinstance(call.mask, masks.Causal):
        return zero, as_tensor(positions).long()[:, None, :, None] + 1
    return call.mask.intervals(positions)


def prefill_args(call: Call) -> PrefillArgs:
    """Convert a call to the arguments of the compiled prefill loops."""
    ranges = visible_position_ranges(call, slice(0, call.T))
    assert ranges is not None, "why_not refuses masks without ranges"
    symmetric, slopes = False, arguments.NO_SLOPES
    if isinstance(call.bias, ALiBi):
        symmetric = call.bias.symmetric
        slopes = call.bias.slopes_on(torch.device("cpu"), torch.float32).detach()
    return PrefillArgs(
        call.q,
        call.k,
        call.v,
        call.scale,
        call.softcap or 0.0,
        symmetric,
        slopes,
        as_tensor(call.q_positions).long(),
        as_tensor(call.k_positions).long(),
        *ranges,
        call.result_dtype,
    )
