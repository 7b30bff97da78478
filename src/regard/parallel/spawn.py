"""Processes on this machine: `spawn` runs a function on W ranks, for examples, tests and
benchmarks.
"""

from __future__ import annotations

import contextlib
import datetime as dt
import multiprocessing
import tempfile
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from regard.errors import ArgumentError, ParallelError

TIMEOUT = 60.0
"""Seconds after which a rank that waits for another gives up."""


def spawn(function: Callable[..., Any], W: int, *args: Any, timeout: float = TIMEOUT) -> list[Any]:
    """Run function(rank, *args) in W processes that form a group of torch.distributed (gloo).

    Each process has one thread. The function must be importable: a function of a module, not one
    that is defined in another function or typed at a prompt.

    Args:
        function: called with the rank and the arguments; what it returns must be picklable, and
            its tensors detached.
        W: the number of ranks.
        args: handed on to every rank.
        timeout: seconds that a rank waits for another.

    Returns:
        What each rank returned.

    Raises:
        ArgumentError: W is below 1.
        ParallelError: a rank raised or ended; the message has the rank and its traceback.
    """
    if W < 1:
        raise ArgumentError(f"W is {W}; it must be at least 1")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torch.distributed", "regard.parallel"])
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        pipes, processes = [], []
        for rank in range(W):
            receiver, sender = context.Pipe()
            process = context.Process(
                target=_rank, args=(function, rank, W, store, timeout, sender, args), daemon=True
            )
            process.start()
            sender.close()
            pipes.append(receiver)
            processes.append(process)
        found = [_result(rank, pipe) for rank, pipe in enumerate(pipes)]
        for process in processes:
            process.join()
    failed = [(rank, text) for rank, (text, _) in enumerate(found) if text]
    if failed:
        # a rank that fails makes others fail: the cause is the one that is no failed message
        first = next((x for x in failed if not any(y in x[1] for y in _MESSAGES)), failed[0])
        raise ParallelError(f"rank {first[0]} of {W} failed:\n{first[1]}")
    return [value for _, value in found]


_MESSAGES = ("ParallelError", "gloo", "monitoredBarrier")
"""What stands in the traceback of a rank that waited for another in vain."""


def _result(rank: int, pipe: Connection) -> tuple[str, Any]:
    try:
        result: tuple[str, Any] = pipe.recv()
        if not result[0]:
            pipe.send(None)
        return result
    except EOFError:
        return f"rank {rank} ended without a word", None


def _rank(
    function: Callable[..., Any],
    rank: int,
    W: int,
    store: str,
    timeout: float,
    pipe: Connection,
    args: tuple[Any, ...],
) -> None:
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
            pipe.recv()  # tensors lie in memory that ends with this process: wait for the caller
    except BaseException:
        pipe.send((traceback.format_exc(), None))  # and end at once, which the other ranks notice
