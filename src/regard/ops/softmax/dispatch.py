"""The choice of a kernel, made once for each call: every kernel says how early it wants to be asked
(`priority`), and the first one that has no reason against the call (`why_not`) runs it. A backend
that is asked for by name runs it or refuses with its reasons.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from threading import Lock

import torch

from regard import tracing
from regard.did_you_mean import suggest
from regard.errors import ArgumentError, ArgumentTypeError, KernelRefusal
from regard.ops.softmax.call import Call, Kernel, Result
from regard.ops.softmax.cpu import Cpu
from regard.ops.softmax.flex import Flex
from regard.ops.softmax.gemm import Gemm
from regard.ops.softmax.reference import Reference
from regard.ops.softmax.sdpa import Sdpa
from regard.ops.softmax.tiled import Tiled
from regard.span import Span, find_empty_slots

KERNELS: tuple[Kernel, ...] = (Cpu(), Sdpa(), Tiled(), Flex(), Gemm(), Reference())
"""The kernels of this package."""

_registered: tuple[Kernel, ...] = KERNELS
_lock = Lock()


class KernelHandle:
    """A registered kernel; `remove`, or the end of a `with` block, takes it out again."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel

    def remove(self) -> None:
        """Take the kernel out; a second time does nothing."""
        global _registered
        with _lock:
            _registered = tuple(x for x in _registered if x is not self.kernel)

    def __enter__(self) -> Kernel:
        return self.kernel

    def __exit__(self, *problem: object) -> None:
        self.remove()


def register_kernel(kernel: Kernel) -> KernelHandle:
    """Let `attend`, `attend_partial` and `plan` use one more kernel, in all threads.

    `backend="auto"` asks it where its `priority` says, and `backend=kernel.name` asks it alone.
    `regard.ops.softmax.Kernel` says what it must offer, and `Call`, `Result` and `Work` beside it
    are what it is given and what it gives back.

    Args:
        kernel: an object with `name`, `selects`, `why_not(call)`, `priority(call)`, `run(call)` and
            `work(call)`.

    Returns:
        A handle: `handle.remove()` takes the kernel out, and so does the end of `with handle:`.

    Raises:
        ArgumentTypeError: something that a kernel must have is missing.
        ArgumentError: there is a kernel of that name already, or the name is "auto".

    >>> import torch, regard
    >>> from regard.ops.softmax import Result, Work
    >>> class Zeros:
    ...     name, selects = "zeros", True
    ...     def why_not(self, call): return ["no gradient"] if call.has_gradient else []
    ...     def priority(self, call): return None  # only if it is asked for
    ...     def run(self, call): return Result(call.q.new_zeros(*call.q.shape[:3], call.E), None)
    ...     def work(self, call): return Work(0, 0)
    >>> q = torch.randn(1, 2, 3, 4)
    >>> with regard.register_kernel(Zeros()):
    ...     regard.attend(q, q, q, backend="zeros").abs().sum().item()
    0.0
    """
    global _registered
    missing = [
        word
        for word in ("name", "selects", "why_not", "priority", "run", "work")
        if not hasattr(kernel, word)
    ]
    if missing or not isinstance(kernel.name, str):
        what = f"has no {', '.join(missing)}" if missing else "has a name that is no string"
        raise ArgumentTypeError(
            f"the kernel is {type(kernel).__name__}, which {what}; it must offer what "
            "regard.ops.softmax.Kernel says"
        )
    with _lock:
        names = ["auto", *(x.name for x in _registered)]
        if kernel.name in names:
            raise ArgumentError(
                f"a kernel is named {kernel.name!r} already; the names in use are "
                f"{', '.join(names)}: give it another one"
            )
        _registered = (*_registered, kernel)
    return KernelHandle(kernel)


def kernels() -> tuple[Kernel, ...]:
    """All kernels: those of this package, then those that were registered, in that order."""
    return _registered


def order(call: Call) -> list[Kernel]:
    """The kernels in the order in which `backend="auto"` asks them; those that are never chosen by
    themselves are left out.
    """
    every, asked = _registered, []
    for i, kernel in enumerate(every):
        number = kernel.priority(call)
        if number is not None:
            asked.append((-number, i))
    asked.sort()
    return [every[i] for _, i in asked]


def run(call: Call, backend: str = "auto") -> Result:
    """Run a call on the chosen kernel, in the dtypes that it came with: no kernel is at the mercy
    of autocast.
    """
    return run_on(*decide(call, backend))


def run_on(kernel: Kernel, call: Call) -> Result:
    """Run a call on the kernel that `decide` gave for it, and show it to the open traces."""
    if watching := tracing.call_observers():
        return _shown(kernel, call, watching)
    device = call.q.device.type
    if not torch.is_autocast_enabled(device):
        return kernel.run(call)
    with torch.autocast(device, enabled=False):
        return kernel.run(call)


def _shown(kernel: Kernel, call: Call, watching: Sequence[tracing.Trace]) -> Result:
    """Run the kernel that was chosen for the call without an observer, with its lse, and show both
    to the observers.
    """
    asked, name = replace(call, wants_lse=True), kernel.name
    with torch.autocast(call.q.device.type, enabled=False):
        if kernel.why_not(asked):  # it gives no lse here: its output stays, the lse is another's
            other, asked = decide(asked)
            name = f"{name}, lse by {other.name}"
            result = Result(kernel.run(call).out, other.run(asked).lse)
        else:
            result = kernel.run(asked)
    for watcher in watching:
        watcher.on_attention_call(call, result, name)
    return result


def decide(call: Call, backend: str = "auto") -> tuple[Kernel, Call]:
    """The kernel of that name, or the first that can run the call; and the call as it takes it.

    A kernel that `selects` never looks at what is masked, so it takes the call as it is. For every
    other one the slots that hold nothing are emptied first, once.

    Raises:
        ArgumentError: there is no kernel of that name.
        KernelRefusal: the kernel asked for cannot run the call, or none can; the message has every
            reason.
    """
    if backend == "auto":
        asked = order(call)
    else:
        asked = [kernel for kernel in _registered if kernel.name == backend]
        if not asked:
            raise ArgumentError(_unknown(backend))
    refusals: dict[str, list[str]] = {}
    emptied = False
    for kernel in asked:
        if not (kernel.selects or emptied):
            call, emptied = without_garbage(call), True
        reasons = kernel.why_not(call)
        if not reasons:
            return kernel, call
        refusals[kernel.name] = reasons
    raise KernelRefusal(_refusal(call, refusals))


def _refusal(call: Call, refusals: dict[str, list[str]]) -> str:
    reasons = "; ".join(f"{name} ({', '.join(why)})" for name, why in refusals.items())
    able = [x.name for x in _registered if x.name not in refusals and not x.why_not(call)]
    hint = f"backends that can: {', '.join(able)}" if able else "no other backend can"
    return f"this call cannot run on {reasons}; {hint}"


def without_garbage(call: Call) -> Call:
    """Slots that hold nothing may hold anything: empty them, so that no kernel multiplies a NaN by
    0.
    """
    changes = {}
    for names, positions in ((("k", "v"), call.k_positions), (("q",), call.q_positions)):
        if (isinstance(positions, Span) and positions.all_tokens) or (
            not call.compiling and call.finite
        ):
            continue
        if (empty := find_empty_slots(positions, call.q.device)) is not None:
            for name in names:
                changes[name] = getattr(call, name).masked_fill(empty[:, None, :, None], 0)
    return replace(call, **changes) if changes else call


def _unknown(backend: str) -> str:
    names = ["auto", *(kernel.name for kernel in _registered)]
    hint = suggest(backend, names)
    return f"unknown backend {backend!r}; it must be one of {', '.join(names)}{hint}"
