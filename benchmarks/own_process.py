"""A peer that computes in a process of its own.

Threads of another library slow down the others in the same process. CTranslate2 starts its threads
with the OpenMP library that torch has loaded; with more threads than processors, that library lets
all of them sleep between two operations, which costs torch's operations 15 % (LOG.md). A crash in
another process does not end the run, either.
"""

from __future__ import annotations

import gc
import io
import os
import pickle
import subprocess
import sys
import weakref
from collections.abc import Callable, Mapping
from functools import partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from pkgutil import resolve_name
from types import FunctionType
from typing import Any

import torch

from benchmarks.interfaces import Peer, PreparedCall, ProblemSizes
from regard.errors import RegardError
from regard.freed_memory import give_back_freed_memory
from regard.timing.measurement import wait_until_idle

PREPARE, STEP, READ, SETTLE = "prepare", "step", "read", "settle"
"""The requests to the process."""

ALLOCATOR = {"MALLOC_MMAP_THRESHOLD_": str(32 << 20), "MALLOC_TRIM_THRESHOLD_": str(1 << 30)}
"""Environment variables with which glibc keeps freed memory, as in a process that has run for a
while. Otherwise a step of CTranslate2, which copies its cache, takes half as long again.
"""

_CODE = "import sys; from benchmarks.own_process import serve; serve(int(sys.argv[1]))"


class PeerProcess:
    """A process in which a peer solves a problem. It ends when this object is deleted.

    Args:
        peer: the peer, which the process gets as a pickle.
        sizes: the sizes of the problem, which the process creates again.
        dtype, device: the dtype and the device of the problem.

    Raises:
        RegardError: from `request`, if the peer raises an error or its process ends.
    """

    def __init__(
        self, peer: Peer[Any], sizes: ProblemSizes, dtype: torch.dtype, device: torch.device
    ) -> None:
        self._name = peer.name
        self._connection, other = Pipe()
        path = os.pathsep.join(filter(None, sys.path))
        self._process = subprocess.Popen(  # noqa: S603 (our own code, by the path of this Python)
            [sys.executable, "-c", _CODE, str(other.fileno())],
            pass_fds=[other.fileno()],
            stdout=2,  # the figures are on standard output
            start_new_session=True,  # Ctrl-C is for the run, which keeps its complete rounds
            env={**os.environ, **ALLOCATOR, "PYTHONPATH": path},
        )
        other.close()
        weakref.finalize(self, _end, self._connection, self._process)
        self.kernel: str = self.request(
            PREPARE, (peer, sizes, dtype, str(device), torch.get_num_threads())
        )

    def request(self, name: str, value: object = None) -> Any:
        """Send a request to the process, and return its answer."""
        try:
            self._connection.send_bytes(_pickled((name, value)))
            answer, error = pickle.loads(self._connection.recv_bytes())  # noqa: S301 (from our own process)
        except (EOFError, OSError):
            code = self._process.wait()
            raise RegardError(f"the process of {self._name} ended with exit code {code}") from None
        if error:
            raise RegardError(f"{self._name} failed in its process: {error}")
        return answer


def prepare_in_own_process(
    peer: Peer[Any], sizes: ProblemSizes, dtype: torch.dtype, device: torch.device
) -> PreparedCall:
    """Prepare a peer in a process of its own, with as many threads as torch has here.

    Args:
        peer: the peer; it has no figures of its own.
        sizes: the sizes of the problem.
        dtype, device: the dtype and the device of the problem.

    Returns:
        The call; a step takes as much longer as a message to another process and back.

    Raises:
        RegardError: the peer raises an error, or its process ends.

    >>> from benchmarks.peers.regard_kernels import ATTENTION
    >>> from benchmarks.problems import AttentionSizes
    >>> sizes = AttentionSizes(1, 2, 1, 8, 4)
    >>> call = prepare_in_own_process(ATTENTION, sizes, torch.float32, torch.device("cpu"))
    >>> call.read(call.step())["out"].shape
    torch.Size([1, 2, 4, 8])
    """
    process = PeerProcess(peer, sizes, dtype, device)
    return PreparedCall(
        partial(process.request, STEP),
        lambda _: process.request(READ),
        process.kernel,
        settle=partial(process.request, SETTLE),
    )


def serve(descriptor: int) -> None:
    """Answer the requests of a `PeerProcess`, until it closes its end.

    Args:
        descriptor: the file descriptor of this end.
    """
    with Connection(descriptor) as connection:
        answers: Mapping[str, Callable[[Any], object]] = _Answers().by_name
        while True:
            try:
                name, value = pickle.loads(connection.recv_bytes())  # noqa: S301 (from our own process)
            except EOFError:
                return
            try:
                answer, error = answers[name](value), ""
            except Exception as problem:  # other libraries may raise anything
                first_line = (str(problem).strip() or "no message").splitlines()[0]
                answer, error = None, f"{type(problem).__name__}: {first_line}"
            connection.send_bytes(_pickled((answer, error)))


class _Answers:
    """What the process of a peer does upon each request."""

    def __init__(self) -> None:
        self.by_name = {
            PREPARE: self._prepare,
            STEP: self._step,
            READ: lambda _: self._call.read(self._result),
            SETTLE: lambda _: wait_until_idle(),
        }

    def _prepare(self, value: Any) -> str:
        peer, sizes, dtype, device, threads = value
        torch.set_num_threads(threads)
        call: PreparedCall = peer.prepare(sizes.problem(dtype, torch.device(device)))
        self._call = call
        gc.collect()
        give_back_freed_memory()
        return call.kernel

    def _step(self, _: object) -> None:
        self._result = self._call.step()


class _Pickler(pickle.Pickler):
    """Writes a function of a module as its name, also where it is wrapped."""

    def reducer_override(self, value: Any) -> Any:
        if isinstance(value, FunctionType) and value is not resolve_name:
            return resolve_name, (f"{value.__module__}:{value.__qualname__}",)
        return NotImplemented


def _pickled(value: object) -> bytes:
    with io.BytesIO() as memory:
        _Pickler(memory).dump(value)
        return memory.getvalue()


def _end(connection: Connection, process: subprocess.Popen[bytes]) -> None:
    """Close the connection, upon which the process ends."""
    connection.close()
    try:
        process.wait(5)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
