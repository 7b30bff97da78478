"""Which kernel runs a call of attention, why not another, and what each costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from threading import Lock
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from regard import tracing, units
from regard.cost import attention_flops
from regard.did_you_mean import suggest
from regard.errors import ArgumentError, ArgumentTypeError, KernelRefusal
from regard.ops.cpu.instruction_sets import describe_kernels
from regard.ops.softmax.call import AttentionOptions, Call, checked_call
from regard.ops.softmax.cpu import CpuKernel
from regard.ops.softmax.definition import describe_second_derivatives
from regard.ops.softmax.flex import FlexKernel
from regard.ops.softmax.gemm import GemmKernel
from regard.ops.softmax.kernel import Kernel, KernelResult, WorkEstimate
from regard.ops.softmax.lowering import without_rule
from regard.ops.softmax.packed_call import unpackable_parts
from regard.ops.softmax.reference import ReferenceKernel
from regard.ops.softmax.sdpa import SdpaKernel
from regard.ops.softmax.tiled import TiledKernel
from regard.ops.softmax.triton.kernel import TritonKernel
from regard.span import Span, find_empty_slots

KERNELS: tuple[Kernel, ...] = (
    CpuKernel(),
    SdpaKernel(),
    TiledKernel(),
    FlexKernel(),
    GemmKernel(),
    TritonKernel(),
    ReferenceKernel(),
)
"""The kernels of this package, in the order of their registration."""

_registered: tuple[Kernel, ...] = KERNELS
_lock = Lock()


class KernelHandle:
    """A registered kernel; `remove()`, or the end of a `with` block, unregisters it."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def remove(self) -> None:
        """Unregister the kernel; a second call does nothing."""
        global _registered
        with _lock:
            _registered = tuple(x for x in _registered if x is not self.kernel)

    def __enter__(self) -> Kernel:
        return self.kernel

    def __exit__(self, *problem: object) -> None:
        self.remove()


def register_kernel(kernel: Kernel) -> KernelHandle:
    """Register one more kernel for `attend`, `attend_partial` and `plan`, in all threads.

    `backend="auto"` tries it by its `priority`; `backend=kernel.name` requests it alone.

    Args:
        kernel: an instance of a class that extends `regard.ops.softmax.Kernel`.

    Returns:
        A handle: `handle.remove()` unregisters the kernel, and so does the end of `with handle:`.

    Raises:
        ArgumentTypeError: the object is no such kernel, or has no name.
        ArgumentError: a kernel of that name is registered already, or the name is "auto".

    >>> import torch, regard
    >>> from regard.ops.softmax import Kernel, KernelResult, WorkEstimate
    >>> class Zeros(Kernel):
    ...     name, selects = "zeros", True
    ...     def why_not(self, call): return ["no gradient"] if call.has_gradient else []
    ...     def priority(self, call): return None  # only by name
    ...     def run(self, call): return KernelResult(0 * call.q[..., :1].expand(call.v.shape), None)
    ...     def work(self, call): return WorkEstimate(0, 0)
    >>> q = torch.randn(1, 2, 3, 4)
    >>> with regard.register_kernel(Zeros()):
    ...     regard.attend(q, q, q, backend="zeros").abs().sum().item()
    0.0
    """
    global _registered
    argument: object = kernel  # of any type, whatever the annotation says
    if not isinstance(argument, Kernel) or not isinstance(kernel.name, str) or not kernel.name:
        what = "has no name" if isinstance(argument, Kernel) else "does not extend it"
        raise ArgumentTypeError(
            f"the kernel is {type(kernel).__name__}, which {what}; it must be an instance of a "
            "class that extends regard.ops.softmax.Kernel, with a name"
        )
    with _lock:
        names = ["auto", *(x.name for x in _registered)]
        if kernel.name in names:
            raise ArgumentError(
                f"a kernel is named {kernel.name!r} already; the names in use are "
                f"{', '.join(names)}: choose another name"
            )
        _registered = (*_registered, kernel)
    return KernelHandle(kernel)


def all_kernels() -> tuple[Kernel, ...]:
    """Return all registered kernels, those of this package first."""
    return _registered


def kernels_by_priority(call: Call) -> list[Kernel]:
    """Return the kernels in the order of "auto", without those whose priority is None."""
    registered, ranked = _registered, []
    for i, kernel in enumerate(registered):
        priority = kernel.priority(call)
        if priority is not None:
            ranked.append((-priority, i))
    ranked.sort()
    return [registered[i] for _, i in ranked]


def run_on_kernel(kernel: Kernel, call: Call) -> KernelResult:
    """Run a call on the chosen kernel without autocast, and pass call and result to traces."""
    if tracing.is_tracing() and not call.compiling:
        with tracing.running_kernel():
            if watching := tracing.call_observers():
                return _run_observed(kernel, call, watching)
            return _run_without_autocast(kernel, call)
    return _run_without_autocast(kernel, call)


def _run_without_autocast(kernel: Kernel, call: Call) -> KernelResult:
    """Run a call on a kernel, with autocast disabled."""
    device = call.q.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return kernel.run(call)
    with torch.autocast(device, enabled=False):
        return kernel.run(call)


def _run_observed(kernel: Kernel, call: Call, watching: Sequence[tracing.Trace]) -> KernelResult:
    """Run a call that open traces observe; another kernel computes a missing lse."""
    call_with_lse, name = replace(call, wants_lse=True), kernel.name
    with torch.autocast(call.q.device.type, enabled=False):
        if call.score is not None or call.original is not None:
            result, name = _run_with_pattern(kernel, call)
            call = call.original or call
        elif kernel.why_not(call_with_lse):
            # it cannot return the lse of this call: another kernel computes the lse
            other, call_with_lse = choose_kernel(call_with_lse)
            name = f"{name}, lse by {other.name}"
            result = KernelResult(kernel.run(call).out, other.run(call_with_lse).lse)
        else:
            result = kernel.run(call_with_lse)
    for watcher in watching:
        watcher.on_attention_call(call, result, name)
    return result


def _run_with_pattern(kernel: Kernel, call: Call) -> tuple[KernelResult, str]:
    """Run a call with a rule on a kernel that gives scores and weights; return its name."""
    whole = replace(call.original or call, needs=call.needs | {"scores", "pattern"})
    if call.original is None and not kernel.why_not(whole):
        return kernel.run(whole), kernel.name
    other, whole = choose_kernel(whole)
    result = other.run(whole)._replace(out=kernel.run(call).out)
    return result, f"{kernel.name}, weights by {other.name}"


def choose_kernel(call: Call, backend: str = "auto") -> tuple[Kernel, Call]:
    """Return the kernel by name, or the first that can run the call, and the call for it."""
    if backend == "auto":
        candidates = kernels_by_priority(call)
    else:
        candidates = [kernel for kernel in _registered if kernel.name == backend]
        if not candidates:
            raise ArgumentError(_unknown_backend_message(backend))
    if call.score is not None:
        return _choose_for_rule(call, candidates)
    refusals: dict[str, list[str]] = {}
    emptied = False
    for kernel in candidates:
        if not (kernel.selects or emptied):
            call, emptied = zero_empty_slots(call), True
        reasons = why_not_dtype(kernel, call) or kernel.why_not(call)
        if not reasons:
            return kernel, call
        refusals[kernel.name] = reasons
    raise KernelRefusal(_refusal_message(call, refusals))


def why_not_dtype(kernel: Kernel, call: Call) -> list[str]:
    """Return the reason of a kernel against the dtype of the output, if the call asks for one."""
    if call.out_dtype is None or kernel.wide_output:
        return []
    return [f"rounds its output to {str(call.q.dtype).removeprefix('torch.')}"]


def _choose_for_rule(call: Call, candidates: Sequence[Kernel]) -> tuple[Kernel, Call]:
    """Return the first kernel that can run a call with a score rule, and the call to run."""
    call = zero_empty_slots(call)
    plain, refusals = without_rule(call), {}
    for kernel in candidates:
        reasons, served = ask_about_rule(kernel, call, plain)
        reasons = why_not_dtype(kernel, call) or reasons
        if not reasons:
            return kernel, served
        refusals[kernel.name] = reasons
    raise KernelRefusal(_refusal_message(call, refusals))


def ask_about_rule(kernel: Kernel, call: Call, plain: Call | None) -> tuple[list[str], Call]:
    """Return the reasons against a call with a score rule, and the call, perhaps without rule."""
    reasons = kernel.why_not_score(call)
    if reasons is not None:
        return [*reasons, *kernel.why_not(call)], call
    if plain is None:
        return [f"no score rule ({call.score})"], call
    return kernel.why_not(plain), plain


def _refusal_message(call: Call, refusals: dict[str, list[str]]) -> str:
    """Return the message of a `KernelRefusal`: reasons, and the backends that can run the call."""
    reasons = "; ".join(f"{name} ({', '.join(why)})" for name, why in refusals.items())
    others = [x for x in _registered if x.name not in refusals]
    if call.score is None:
        able = [x.name for x in others if not (why_not_dtype(x, call) or x.why_not(call))]
    else:
        plain = without_rule(call)
        able = [x.name for x in others if not ask_about_rule(x, call, plain)[0]]
    hint = f"backends that can: {', '.join(able)}" if able else "no other backend can"
    return f"this call cannot run on {reasons}; {hint}"


def zero_empty_slots(call: Call) -> Call:
    """Replace q, k and v in empty slots by 0, because 0 times NaN is NaN."""
    changes = {}
    for names, positions in ((("k", "v"), call.k_positions), (("q",), call.q_positions)):
        if (isinstance(positions, Span) and positions.all_tokens) or (
            # on another device, the question costs more than the selection
            call.readable and call.q.is_cpu and call.finite
        ):
            continue
        if (empty := find_empty_slots(positions, call.q.device)) is not None:
            for name in names:
                changes[name] = getattr(call, name).masked_fill(empty[:, None, :, None], 0)
    return replace(call, **changes) if changes else call


def _unknown_backend_message(backend: str) -> str:
    """Return the error message for a backend name that is not registered."""
    names = ["auto", *(kernel.name for kernel in _registered)]
    hint = suggest(backend, names)
    return f"unknown backend {backend!r}; it must be one of {', '.join(names)}{hint}"


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
