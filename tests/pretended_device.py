"""A CUDA device without a GPU: tensors that say they are on "cuda" and hold their numbers in host
memory.

Every operation on them runs on the CPU, so that results can be compared. What would make the
program wait for a real device raises `HiddenRead`: a number that Python reads (`item`, `tolist`,
`bool`), a result whose size depends on numbers (`nonzero`, a bool index), and a copy between the
host and the device.

    with pretended_cuda() as device:
        x = device.put(torch.ones(2))     # the one way in, for inputs and weights
        y = x + 1                         # y.device.type == "cuda"
        y.sum().item()                    # raises HiddenRead
        device.get(y)                     # the one way out
"""

from __future__ import annotations

import ctypes
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

import regard
from regard.caches.lazy_tensor import LazyTensor
from regard.ops.softmax.call import Call
from regard.ops.softmax.kernel import Kernel, KernelResult, WorkEstimate
from regard.ops.softmax.reference import ReferenceKernel

_PACKAGE = Path(regard.__file__).parent
_aten = torch.ops.aten
_READS = {
    _aten._local_scalar_dense.default: "a number is read",
    _aten.item.default: "a number is read",
    _aten.equal.default: "a comparison is read",
    _aten.is_nonzero.default: "a condition is read",
    _aten.nonzero.default: "a size depends on numbers",
    _aten.masked_select.default: "a size depends on numbers",
    _aten.unique_consecutive.default: "a size depends on numbers",
    _aten._unique2.default: "a size depends on numbers",
    _aten.unique_dim.default: "a size depends on numbers",
    _aten.bincount.default: "a size depends on numbers",
    _aten.repeat_interleave.Tensor: "a size depends on numbers",
}
_INDEXING = (_aten.index.Tensor, _aten.index_put.default, _aten.index_put_.default)


class HiddenRead(RuntimeError):
    """The program would wait for the device here."""


class PretendedTensor(Tensor):
    """A tensor that says it is on "cuda", with its numbers in `host`."""

    host: Tensor

    @staticmethod
    def __new__(cls, host: Tensor) -> Self:
        result = Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls,
            host.shape,
            strides=host.stride(),
            storage_offset=host.storage_offset(),
            dtype=host.dtype,
            device=torch.device("cuda", 0),
        )
        result.host = host
        return result  # type: ignore[no-any-return]

    __torch_function__ = torch._C._disabled_torch_function_impl

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PretendedTensor({self.host!r})"

    @property
    def data(self) -> Tensor:  # type: ignore[override]
        return PretendedTensor(self.host.detach())

    @data.setter
    def data(self, x: PretendedTensor) -> None:
        self.host = x.host

    def data_ptr(self) -> int:
        return self.host.data_ptr()

    def tolist(self) -> Any:
        return self.cpu().tolist()

    def numpy(self, *, force: bool = False) -> Any:
        raise TypeError("a tensor on a CUDA device cannot become an array: use .cpu() first")

    def __deepcopy__(self, memo: dict[int, object]) -> PretendedTensor:
        return PretendedTensor(self.host.clone())

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise HiddenRead(f"{func} runs on a pretended tensor outside of pretended_cuda()")


class Operation(NamedTuple):
    """One recorded operation: what runs, on which tensors of the host, and what it made."""

    func: Any
    args: Any
    kwargs: Any
    out: Any


class PretendedDevice(TorchDispatchMode):
    """The dispatch mode of `pretended_cuda`.

    Attributes:
        reads_allowed: whether `HiddenRead` is not raised, as while a prompt is read.
        found: the list that takes the reads instead of `HiddenRead`, or None.
        recording: the list that takes every operation, or None. While it is there, no copy from the
            host is allowed, even one that is queued: a captured graph would repeat it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.reads_allowed = False
        self.found: list[str] | None = None
        self.recording: list[Operation] | None = None
        self._written: list[tuple[Tensor, Tensor]] = []
        self.copies: list[int] | None = None

    def put(self, x: Any) -> Any:
        """Return tensors, lists or dictionaries of them on the device."""
        return tree_map_only(Tensor, _wrap, x)

    def get(self, x: Any) -> Any:
        """Return the numbers of tensors of the device, on the host."""
        return tree_map_only(PretendedTensor, lambda y: y.host, x)

    def put_module(self, module: nn.Module) -> None:
        """Move a module to the device, as a user does."""
        with self.reads():
            module.to("cuda")

    @contextmanager
    def reads(self) -> Iterator[None]:
        """Allow reads in the block."""
        before, self.reads_allowed = self.reads_allowed, True
        try:
            yield
        finally:
            self.reads_allowed = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        leaves = _leaves((args, kwargs))
        if any(isinstance(x, LazyTensor) for x in leaves):
            with self:  # what they compute runs on the device, too
                args, kwargs = tree_map_only(LazyTensor, LazyTensor.numbers, (args, kwargs))
            leaves = _leaves((args, kwargs))
        args, kwargs, device = _without_device(args, dict(kwargs or {}))
        pretended = [x for x in leaves if type(x) is PretendedTensor]
        goes_to_cuda = device is not None and device.type == "cuda"
        if not pretended and not goes_to_cuda:
            return func(*args, **kwargs)
        if not self.reads_allowed:
            self._refuse_reads(func, args, kwargs, device)
        host_args, host_kwargs = _on_host(args), _on_host(kwargs)
        if self.recording is not None:
            self._written += [(x, x.clone()) for x in _overwritten(func, host_args, host_kwargs)]
        out = func(*host_args, **host_kwargs)
        if self.recording is not None:
            self.recording.append(Operation(func, host_args, host_kwargs, out))
        if device is not None and not goes_to_cuda:
            if self.copies is not None and isinstance(out, Tensor):
                self.copies.append(out.numel())
            return out
        known = {id(x.host): x for x in pretended}

        def back(x: Any) -> Any:
            if not isinstance(x, Tensor):
                return x
            return known[id(x)] if id(x) in known else _wrap(x)

        return _each(back, out)

    def _refuse_reads(self, func: Any, args: Any, kwargs: Any, device: torch.device | None) -> None:
        """Raise `HiddenRead` if a real device would be waited for."""
        tensors = [x for x in _leaves((args, kwargs)) if isinstance(x, Tensor)]
        on_device = [type(x) is PretendedTensor for x in tensors]
        if func in _READS and any(on_device):
            self._refuse(f"{_READS[func]}: {func}")
        elif func in _INDEXING and any(on_device):
            indices = [x for x in args[1] if x is not None]
            if any(x.dtype in (torch.bool, torch.uint8) for x in indices):
                self._refuse(f"a size depends on numbers: {func} with a bool index")
            elif any(type(x) is not PretendedTensor for x in (args[0], *indices)):
                self._refuse(f"a copy from the host: {func}")
        elif device is not None and any(x != (device.type == "cuda") for x in on_device):
            queued = device.type == "cuda" and _non_blocking(func, args, kwargs)
            if queued and self.recording is None:
                return  # a small copy to the device is queued, without a wait
            self._refuse(f"a copy between host and device: {func}")
        elif any(on_device) and any(
            x.ndim and not known for x, known in zip(tensors, on_device, strict=True)
        ):
            self._refuse(f"tensors of two devices: {func}")

    def capture(self, run: Callable[[], Any]) -> tuple[Callable[[], None], Any]:
        """Record the operations of a function and take back what they wrote, as a capture, which
        runs nothing.

        Returns:
            A function that runs the same operations again, in the same memory and without the
            Python code that started them; and the result, whose numbers that function replaces.
        """
        self.recording, self._written = [], []
        try:
            result = run()
            operations = self.recording
        finally:
            self.recording = None
        for x, before in reversed(self._written):
            x.copy_(before)

        def replay() -> None:
            for func, args, kwargs, out in operations:
                again = func(*args, **kwargs)
                for old, new in zip(_leaves(out), _leaves(again), strict=True):
                    if isinstance(old, Tensor) and old.data_ptr() != new.data_ptr():
                        old.copy_(new)

        return replay, result

    def _refuse(self, text: str) -> None:
        if self.found is None:
            raise HiddenRead(text)
        stack = [x for x in traceback.extract_stack() if _PACKAGE in Path(x.filename).parents]
        where = " < ".join(f"{Path(x.filename).name}:{x.lineno} {x.name}" for x in stack[:-5:-1])
        self.found.append(f"{text} at {where}")


def _overwritten(func: Any, args: Any, kwargs: Any) -> list[Tensor]:
    """Return the tensors that an operation writes to."""
    written = []
    for i, argument in enumerate(func._schema.arguments):
        if argument.alias_info is not None and argument.alias_info.is_write:
            x = args[i] if i < len(args) else kwargs.get(argument.name)
            written += [x] if isinstance(x, Tensor) else []
    return written


def _non_blocking(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether a copy is queued and not waited for."""
    names = [x.name for x in func._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    return bool(given.get("non_blocking"))


class SelectingKernel(Kernel):
    """A kernel that stands for those of a GPU: by the definition, without a read by Python."""

    name, selects = "selecting", True

    def __init__(self, device: PretendedDevice) -> None:
        self._device = device

    def why_not(self, call: Call) -> list[str]:
        """Refuse nothing."""
        return []

    def why_not_score(self, call: Call) -> list[str]:
        """Refuse nothing."""
        return []

    def priority(self, call: Call) -> float | None:
        """Return 100 on the device."""
        return 100 if call.q.device.type == "cuda" else None

    def work(self, call: Call) -> WorkEstimate:
        """Return the work of all pairs."""
        return WorkEstimate(call.B * call.H * call.T * call.S, 0)

    def run(self, call: Call) -> KernelResult:
        """Run the reference, which may look at its inputs."""
        with self._device.reads():
            return ReferenceKernel().run(call)


def _without_device(args: Any, kwargs: dict[str, Any]) -> tuple[Any, Any, torch.device | None]:
    """Return arguments that name the CPU instead of the device, and that device."""
    found = next((x for x in (*args, *kwargs.values()) if isinstance(x, torch.device)), None)
    if found is None or found.type == "cpu":
        return args, kwargs, found
    # torch asks the guard for the index of "cuda", and that of "meta" answers with its own device
    found = torch.device("cuda", 0)
    host = torch.device("cpu")
    swapped = tuple(host if isinstance(x, torch.device) else x for x in args)
    return (
        swapped,
        {k: host if isinstance(x, torch.device) else x for k, x in kwargs.items()},
        found,
    )


def _set_device_guard() -> None:
    """Give torch a guard of CUDA devices that does nothing, as that of the device "meta" does.

    Some functions of torch set the current device before any dispatch mode sees them. A build of
    torch with CUDA has such a guard for machines without a GPU, which `FakeTensorMode` asks for;
    a build without CUDA has none, and its entry in torch's table is empty.
    """
    table_type = ctypes.c_void_p * (_META + 1)
    libc10 = ctypes.CDLL(str(next((Path(torch.__file__).parent / "lib").glob("*c10.*"))))
    table = table_type.in_dll(libc10, "_ZN3c104impl26device_guard_impl_registryE")
    if table[_CUDA] is None:
        table[_CUDA] = table[_META]
    else:
        torch._C._ensureCUDADeviceGuardSet()


_CUDA, _META = 1, 14
"""The numbers of these devices in torch (c10/core/DeviceType.h)."""


def _wrap(x: Tensor) -> Tensor:
    return x if type(x) is PretendedTensor else PretendedTensor(x.detach())


def _leaves(x: Any) -> list[Any]:
    found: list[Any] = []
    _each(found.append, x)
    return found


def _on_host(x: Any) -> Any:
    return _each(lambda y: y.host if type(y) is PretendedTensor else y, x)


def _each(change: Callable[[Any], Any], x: Any) -> Any:
    """What an operation takes or returns, changed: faster than `tree_map`, which knows more."""
    if isinstance(x, (tuple, list)):
        return type(x)([_each(change, y) for y in x])
    if isinstance(x, dict):
        return {key: _each(change, y) for key, y in x.items()}
    return change(x)


@contextmanager
def pretended_cuda() -> Iterator[PretendedDevice]:
    """Run the block with a pretended CUDA device, which refuses every hidden read."""
    lazy_init: Callable[[], None] = torch.cuda._lazy_init
    only_cpu = torch._C._only_lift_cpu_tensors()
    synchronize = torch.cuda.synchronize
    torch.cuda._lazy_init = lambda: None  # torch must not look for a driver
    torch.cuda.synchronize = lambda device=None: None
    torch._C._set_only_lift_cpu_tensors(True)
    # `Module.to` then makes new parameters: `.data` of one cannot become another class of tensor
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    _set_device_guard()
    try:
        with PretendedDevice() as device:
            yield device
    finally:
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
        torch._C._set_only_lift_cpu_tensors(only_cpu)
        torch.cuda._lazy_init = lazy_init
        torch.cuda.synchronize = synchronize
