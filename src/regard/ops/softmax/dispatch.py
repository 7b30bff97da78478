"""The choice of a kernel: the first with no reason against, or the one asked for, which may
refuse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from regard import tap
from regard.errors import ArgumentError, KernelRefusal
from regard.ops.softmax.call import Call, Kernel, Result
from regard.ops.softmax.cpu import Cpu, much
from regard.ops.softmax.flex import Flex
from regard.ops.softmax.gemm import Gemm, pays
from regard.ops.softmax.reference import Reference
from regard.ops.softmax.sdpa import Sdpa
from regard.ops.softmax.tiled import Tiled
from regard.process import is_compiling
from regard.span import Span, vacant
from regard.suggest import suggest

KERNELS: tuple[Kernel, ...] = (Cpu(), Sdpa(), Tiled(), Flex(), Gemm(), Reference())
"""In the order in which `backend="auto"` asks them on a CPU, where Flex holds every score."""

_SHORT = sorted(KERNELS, key=lambda kernel: {"sdpa": 0, "tiled": 1}.get(kernel.name, 2))
"""The same for little memory: Numba takes a second to import, and need not be."""

_LONG = sorted(KERNELS, key=lambda kernel: {"cpu": 0, "gemm": 1}.get(kernel.name, 2))
"""The same where Gemm pays."""

_LEARNING = sorted(
    KERNELS, key=lambda kernel: {"sdpa": 0, "gemm": 1, "tiled": 2}.get(kernel.name, 3)
)
"""The same with a gradient, where Sdpa may refuse large scores: then compiled products are next."""

_FEW = sorted(KERNELS, key=lambda kernel: {"sdpa": 0, "reference": 1}.get(kernel.name, 2))
"""The same for few products, where it is the number of operations that costs."""

FEW = 2**24
"""Up to so many products B H T S (D + E) with a gradient, the definition is faster than its tiles:
measured on one thread.
"""


def order(call: Call) -> Sequence[Kernel]:
    """The kernels in the order in which they are asked: off the CPU, generated ones come before
    plain torch.
    """
    if call.q.device.type == "cpu":
        if call.has_gradient and not pays(call):
            few = call.B * call.H * call.T * call.S * (call.D + call.E) < FEW
            return _FEW if few else _LEARNING
        return _LONG if pays(call) else KERNELS if much(call) else _SHORT
    return sorted(KERNELS, key=lambda kernel: kernel.name in ("tiled", "reference"))


def run(call: Call, backend: str = "auto") -> Result:
    """Run a call on the chosen kernel, in the dtypes that it came with: no kernel is at the mercy
    of autocast.
    """
    kernel = _that_selects(call, backend)
    if kernel is None:
        call = without_garbage(call)
        kernel = choose(call, backend)
    device = call.q.device.type
    if watching := tap.watchers():
        return _shown(kernel, call, watching)
    if not torch.is_autocast_enabled(device):
        return kernel.run(call)
    with torch.autocast(device, enabled=False):
        return kernel.run(call)


def _shown(kernel: Kernel, call: Call, watching: Sequence[tap.Trace]) -> Result:
    """Run the kernel that was chosen for the call without an observer, with its lse, and show both
    to the observers.
    """
    asked, name = replace(call, wants_lse=True), kernel.name
    with torch.autocast(call.q.device.type, enabled=False):
        if kernel.why_not(asked):  # it gives no lse here: its output stays, the lse is another's
            other = choose(asked)
            name = f"{name}, lse by {other.name}"
            result = Result(kernel.run(call).out, other.run(asked).lse)
        else:
            result = kernel.run(asked)
    for watcher in watching:
        watcher.saw(call, result, name)
    return result


def _that_selects(call: Call, backend: str) -> Kernel | None:
    """The first kernel, if it can run the call and never looks at what is masked: then nobody has
    to look for NaN there.
    """
    asked = order(call)[:1] if backend == "auto" else [x for x in KERNELS if x.name == backend]
    return next((x for x in asked if x.selects and not x.why_not(call)), None)


def choose(call: Call, backend: str = "auto") -> Kernel:
    """The kernel of that name, or the first that can run the call.

    Raises:
        ArgumentError: there is no kernel of that name.
        KernelRefusal: the kernel asked for cannot run the call, or none can; the message has every
            reason.
    """
    asked = [kernel for kernel in order(call) if backend in ("auto", kernel.name)]
    if not asked:
        raise ArgumentError(_unknown(backend))
    refusals: dict[str, list[str]] = {}
    for kernel in asked:
        refusals[kernel.name] = kernel.why_not(call)
        if not refusals[kernel.name]:
            return kernel
    reasons = "; ".join(f"{name} ({', '.join(why)})" for name, why in refusals.items())
    able = [x.name for x in KERNELS if x.name not in refusals and not x.why_not(call)]
    hint = f"backends that can: {', '.join(able)}" if able else "no other backend can"
    raise KernelRefusal(f"this call cannot run on {reasons}; {hint}")


def without_garbage(call: Call) -> Call:
    """Slots that hold nothing may hold anything: empty them, so that no kernel multiplies a NaN by
    0.
    """
    compiling = is_compiling()
    changes = {}
    for names, positions in ((("k", "v"), call.k_positions), (("q",), call.q_positions)):
        if (isinstance(positions, Span) and positions.all_tokens) or (
            not compiling and call.finite
        ):
            continue
        if (empty := vacant(positions, call.q.device)) is not None:
            for name in names:
                changes[name] = getattr(call, name).masked_fill(empty[:, None, :, None], 0)
    return replace(call, **changes) if changes else call


def _unknown(backend: str) -> str:
    names = ["auto", *(kernel.name for kernel in KERNELS)]
    hint = suggest(backend, names)
    return f"unknown backend {backend!r}; it must be one of {', '.join(names)}{hint}"
