"""`plan`: which kernel `attend` would run, why not another, and what each costs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Unpack

from jaxtyping import Float
from torch import Tensor

from regard import units
from regard.cost import attention_flops
from regard.ops.cpu.instruction_sets import describe_kernels
from regard.ops.softmax.call import AttentionOptions, Call, checked_call
from regard.ops.softmax.definition import describe_second_derivatives
from regard.ops.softmax.dispatch import (
    all_kernels,
    ask_about_rule,
    choose_kernel,
    kernels_by_priority,
    zero_empty_slots,
)
from regard.ops.softmax.kernel import Kernel, WorkEstimate
from regard.ops.softmax.packed_call import unpackable_parts
from regard.ops.softmax.score_rules import without_rule


@dataclass(frozen=True)
class KernelChoice:
    """Whether one kernel can run a call, and its cost.

    The `work`, `flops` and `skipped` ones (of masked pairs) are None or 0 if it cannot run.
    """

    kernel: str
    reasons: tuple[str, ...]
    work: WorkEstimate | None
    flops: int
    skipped: int


@dataclass(frozen=True)
class Plan:
    """The kernel that `attend` would run, and the cost of every kernel, printed as a table.

    `plan[name]` returns the `KernelChoice` of one kernel.

    Args:
        kernel: the name of the kernel that would run.
        choices: one entry per kernel, in the order of "auto", then those that run by name only.
        flops: the FLOPs of computing every query-key pair, 2 B H T S (D + E).
        title: one line that describes the call.
        notes: sentences on the call as a whole, such as on second derivatives.
        compiled: on a CPU, the instruction set of the compiled kernels, or why there are none.
    """

    kernel: str
    choices: tuple[KernelChoice, ...]
    flops: int
    title: str
    notes: tuple[str, ...] = ()
    compiled: str = ""

    def __getitem__(self, kernel: str) -> KernelChoice:
        return {choice.kernel: choice for choice in self.choices}[kernel]

    def __str__(self) -> str:
        lines = [
            self.title,
            f"{'':2}{'kernel':<11}{'extra memory':>13}{'FLOPs':>9}{'skipped':>9}  why not",
        ]
        for choice in self.choices:
            mark = "> " if choice.kernel == self.kernel else "  "
            if choice.work is None:
                lines.append(
                    f"{mark}{choice.kernel:<11}{'-':>13}{'-':>9}{'-':>9}  "
                    f"{'; '.join(choice.reasons)}"
                )
                continue
            share = choice.skipped / self.flops if self.flops else 0.0
            memory, flops = units.size(choice.work.bytes), units.count(choice.flops)
            lines.append(f"{mark}{choice.kernel:<11}{memory:>13}{flops:>9}{share:>9.1%}")
        return "\n".join([*lines, *self.notes, *filter(None, [self.compiled])])


def plan(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    *,
    backend: str = "auto",
    **options: Unpack[AttentionOptions],
) -> Plan:
    """Report which kernel `attend` would run, why others cannot, and what each costs.

    FLOPs are 2 (D + E) for each query-key pair that a kernel computes; `skipped` are those that it
    leaves out because of the mask. Notes say how a compiled graph and second derivatives differ.

    Args:
        q: queries `[B, H, T, D]`.
        k: keys `[B, G, S, D]`; G divides H.
        v: values `[B, G, S, E]`.
        backend: the name of a kernel, or "auto", as in `attend`.
        **options: `mask`, `bias`, `score`, `scale`, `softcap`, `sink`, `dropout`, `q_positions` and
            `k_positions`, as in `attend`.

    Returns:
        A `Plan`: the chosen kernel and one `KernelChoice` per kernel.

    Raises:
        ArgumentError, ArgumentTypeError, KernelRefusal: as in `attend`.

    >>> import torch, regard
    >>> q = torch.randn(1, 8, 1024, 64)
    >>> regard.plan(q, q, q, mask=regard.masks.Causal(), backend="tiled").kernel
    'tiled'
    """
    call = checked_call(q, k, v, options)
    # first: the questions that follow may make numbers of the codes or pages of a cache
    chosen, served = choose_kernel(call, backend)
    notes = _notes(call, chosen, served)
    call = zero_empty_slots(call)
    all_pairs = call.B * call.H * call.T * call.S
    total = attention_flops(all_pairs, call.D, call.E)
    choices, plain = [], without_rule(call)
    tried = kernels_by_priority(call)
    for kernel in (*tried, *(x for x in all_kernels() if x not in tried)):
        if call.score is None:
            reasons, served = kernel.why_not(call), call
        else:
            reasons, served = ask_about_rule(kernel, call, plain)
        work = None if reasons else kernel.work(served)
        flops = 0 if work is None else attention_flops(work.pairs, call.D, call.E)
        choices.append(
            KernelChoice(kernel.name, tuple(reasons), work, flops, total - flops if work else 0)
        )
    sizes = " ".join(f"{name}={getattr(call, name)}" for name in "BHGTSDE")
    dtype = str(q.dtype).removeprefix("torch.")
    title = f"attend {sizes} {dtype} on {q.device.type}, mask {call.mask}"
    title += "" if call.score is None else f", score {call.score}"
    compiled = describe_kernels() if q.is_cpu else ""
    return Plan(chosen.name, tuple(choices), total, title, notes, compiled)


def _notes(call: Call, kernel: Kernel, served: Call) -> tuple[str, ...]:
    """Return the notes of a plan: first what the kernel that would run says of the call."""
    notes = [text] if (text := kernel.describe(served)) else []
    notes += [describe_second_derivatives(call)] if call.has_gradient else []
    if unheld := unpackable_parts(call):
        notes.append(f"in a compiled graph torch's operations run it: {'; '.join(unheld)}")
    return tuple(notes)
