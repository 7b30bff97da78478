"""`spawn` runs a function on W ranks on this machine, for examples, tests and benchmarks."""

from __future__ import annotations

import contextlib
import datetime as dt
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path

from regard.errors import ArgumentError, ParallelError

TIMEOUT = 60.0
"""The number of seconds after which a rank stops waiting for another."""

PRELOADED = ("torch.distributed", "regard.parallel")
"""The modules that the process from which the ranks are forked imports once for all of them."""


def spawn(
    function: Callable[..., object], W: int, *args: object, timeout: float = TIMEOUT
) -> list[object]:
    """Run function(rank, *args) in W processes that form a torch.distributed group (gloo).

    Each process has one thread. The function must be importable: a function of a module, not one
    that is defined inside another function or in an interactive session.

    Args:
        function: called with the rank and the arguments; its result must be picklable, and
            tensors in it must be detached.
        W: the number of ranks.
        args: further arguments, the same for every rank.
        timeout: the number of seconds that a rank waits for another.

    Returns:
        The result of each rank, in the order of the ranks.

    Raises:
        ArgumentError: W is below 1.
        ParallelError: a rank raised an error or ended; the message has the rank and its traceback.

    >>> spawn(pow, 2, 3)  # pow(rank, 3) on two ranks
    [0, 1]
    """
    if W < 1:
        raise ArgumentError(f"W is {W}; it must be at least 1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED])
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(W):
            receiver, sender = context.Pipe()
            process = context.Process(
                target=_run_rank,
                args=(function, rank, W, store, timeout, sender, args),
                daemon=True,
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        results = [_result(rank, pipe) for rank, pipe in enumerate(pipes)]
        for process in processes:
            process.join()
    failed = [(rank, text) for rank, (text, _) in enumerate(results) if text]
    if failed:
        # when one rank fails, messages of the other ranks fail, too: report the first error that is
        # not about a message
        cause = next(
            (x for x in failed if not any(y in x[1] for y in _MESSAGE_ERROR_WORDS)), failed[0]
        )
        raise ParallelError(f"rank {cause[0]} of {W} failed:\n{cause[1]}")
    return [value for _, value in results]


_MESSAGE_ERROR_WORDS = ("ParallelError", "gloo", "monitoredBarrier")
"""Words in the traceback of a rank that failed because another rank did not answer."""


def _result(rank: int, pipe: Connection) -> tuple[str, object]:
    """Read the error text and the result of a rank from its pipe."""
    try:
        result: tuple[str, object] = pipe.recv()
        if not result[0]:
            pipe.send(None)
        return result
    except EOFError:
        return f"rank {rank} ended without an error message", None


def _run_rank(
    function: Callable[..., object],
    rank: int,
    W: int,
    store: str,
    timeout: float,
    pipe: Connection,
    args: tuple[object, ...],
) -> None:
    """Run one rank: join the group, call the function, and send its result through the pipe."""
    import torch
    import torch.distributed as dist
    from torch._C._distributed_c10d import FileStore

    torch.set_num_threads(1)
    try:
        dist.init_process_group(
            "gloo",
            store=FileStore(store, W),
            rank=rank,
            world_size=W,
            timeout=dt.timedelta(seconds=timeout),
        )
        value = function(rank, *args)
        dist.barrier()
        dist.destroy_process_group()
        pipe.send(("", value))
        with contextlib.suppress(EOFError):
            pipe.recv()  # shared tensors end with this process: wait until the caller has read them
    except BaseException:
        # after this the process ends, so that the calls of other ranks fail, too
        pipe.send((traceback.format_exc(), None))
