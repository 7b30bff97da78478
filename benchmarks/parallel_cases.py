"""Cases of attention over several ranks, for `python -m benchmarks parallel`.

The ranks of a peer are processes that wait for commands. They stay until the case ends, so that the
peers are timed in turns. Beside the time of a call, each rank counts its processor time, the bytes
that it sends, and its memory.
"""

from __future__ import annotations

import ctypes
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.interfaces import Case, Outputs, Peer, PreparedCall
from benchmarks.peers import ranks
from benchmarks.problems import AttentionProblem, AttentionSizes
from regard.cost.softmax import causal_pairs, window_pairs
from regard.errors import ParallelError, RegardError
from regard.masks import Causal, Document, Mask, Window
from regard.parallel import Shards, spawn
from regard.parallel.communication import traffic
from regard.timing.measurement import peak_bytes
from regard.units import plural

TIMEOUT = 300.0
"""The seconds after which a rank stops waiting for another; the first call may compile kernels."""

DOCUMENT_SHARES = (0.0, 0.08, 0.37, 0.42, 0.78)
"""Where the packed documents begin, as shares of the length."""


M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3
"""The parameters of glibc's mallopt that `measurement.ALLOCATOR` sets by the environment."""

CHECKED_QUERIES = 128
"""The number of queries whose outputs are compared with the definition."""


@dataclass(frozen=True)
class ParallelSizes(AttentionSizes):
    """The sizes of causal attention over several ranks.

    Args:
        W: the number of ranks.
        documents: whether the sequence holds packed documents, which do not see one another.

    >>> print(ParallelSizes(B=1, H=8, G=2, D=64, S=8192, window=512))
    4 ranks B1 H8 G2 D64 S8192 W512
    """

    W: int = 4
    documents: bool = False

    def problem(self, dtype: torch.dtype, device: torch.device) -> ParallelProblem:
        """Return a problem of these sizes, with the same random inputs each time."""
        return ParallelProblem(self, dtype, device)

    def __str__(self) -> str:
        packed = ", documents" if self.documents else ""
        return f"{plural(self.W, 'rank')} {super().__str__()}{packed}"


class ParallelProblem(AttentionProblem):
    """Attention over a sequence that lies on several ranks.

    Attributes:
        mask: the mask.
        shards: which rank holds which tokens.
    """

    sizes: ParallelSizes

    def __init__(self, sizes: ParallelSizes, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__(sizes, dtype, device)
        self.starts = sorted({int(sizes.S * x) for x in DOCUMENT_SHARES[: 5 * sizes.documents]})
        self.mask: Mask = Causal()
        if sizes.window is not None:
            self.mask = self.mask & Window(sizes.window)
        if sizes.documents:
            self.mask = self.mask & Document(((*self.starts, sizes.S),))
        self.shards = Shards.balanced(sizes.S, sizes.W, self.mask)

    @property
    def pairs(self) -> int:
        """The number of visible query-key pairs, over all rows and heads."""
        if not self.starts:
            return super().pairs
        lengths = [b - a for a, b in pairwise([*self.starts, self.sizes.S])]
        window = self.sizes.window
        if window is None:
            visible = sum(causal_pairs(n, n) for n in lengths)
        else:
            visible = sum(window_pairs(n, n, window) for n in lengths)
        return self.sizes.B * self.sizes.H * visible

    @property
    def checked_queries(self) -> Tensor:
        """The queries that are checked: some that are evenly spaced, the first and the last."""
        return torch.linspace(0, self.sizes.S - 1, min(self.sizes.S, CHECKED_QUERIES)).long()

    def reference(self) -> Outputs:
        """Return the outputs of the checked queries, computed in fp64."""
        return {"out": self._outputs(torch.float64)}

    def plain(self) -> Outputs:
        """Return the same in the problem's dtype; {} in fp32, whose allowed error does not depend
        on them.
        """
        return {} if self.dtype == torch.float32 else {"out": self._outputs(self.dtype)}

    def checked(self, outputs: Outputs) -> Outputs:
        """Return the outputs of the queries that are checked."""
        return {name: x[:, :, self.checked_queries] for name, x in outputs.items()}

    def _outputs(self, dtype: torch.dtype) -> Tensor:
        """Compute softmax(q k^T / sqrt(D), -inf where masked) v for the checked queries."""
        rows, outs = self.checked_queries.to(self.device), []
        visible = self.visible_rows(rows)
        for q, k, v in zip(
            self.q[:, :, rows].to(dtype).chunk(self.sizes.G, 1),
            self.k.to(dtype).split(1, 1),
            self.v.to(dtype).split(1, 1),
            strict=True,
        ):
            scores = (q @ k.mT * self.sizes.D**-0.5).masked_fill(~visible, float("-inf"))
            outs.append(torch.softmax(scores, -1) @ v)
        return torch.cat(outs, 1)

    def visible_rows(self, rows: slice | Tensor) -> Tensor:
        """Return which keys some of the queries see, `[1, 1, t, S]`."""
        visible = super().visible_rows(rows)
        if not self.starts:
            return visible
        positions = torch.arange(self.sizes.S, device=self.device)
        document = torch.searchsorted(
            torch.tensor(self.starts, device=self.device), positions, right=True
        )
        return visible & (document[rows, None] == document[None])

    @property
    def rank_bytes_bound(self) -> int:
        """The most memory that a rank should need: 1.3 (q + k + v + out) / W, and two blocks of
        keys and values.
        """
        blocks = self.k.nbytes + self.v.nbytes
        return int((1.3 * (2 * self.q.nbytes + blocks) + 2 * blocks) / self.sizes.W)


class RankPool:
    """Processes that compute one peer's attention at each command.

    Args:
        step: the function of the peer.
        problem: the problem.
        shards: which rank holds which tokens.
    """

    def __init__(self, step: ranks.RankStep, problem: ParallelProblem, shards: Shards) -> None:
        pairs = [Pipe() for _ in range(shards.world)]
        self._pipes = [mine for mine, _ in pairs]
        self._failure: list[RegardError] = []
        tensors = tuple(x.cpu() for x in (problem.q, problem.k, problem.v))
        arguments = ([theirs for _, theirs in pairs], step, tensors, shards, problem.mask)
        self._thread = Thread(target=self._run, args=(*arguments, problem.device.type), daemon=True)
        self._thread.start()
        self.cpu_seconds: list[float] = []
        self.sent_bytes = 0

    def _run(self, *args: Any) -> None:
        """Start the ranks and wait for their end."""
        try:
            spawn(serve, len(self._pipes), *args, timeout=TIMEOUT)
        except RegardError as error:
            self._failure.append(error)

    def send_command(self, command: str) -> list[Any]:
        """Send a command to all ranks and return their answers."""
        for pipe in self._pipes:
            pipe.send(command)
        answers = []
        for pipe in self._pipes:
            while not pipe.poll(1.0):
                if not self._thread.is_alive():
                    raise self._failure[0] if self._failure else ParallelError("a rank has ended")
            answers.append(pipe.recv())
        return answers

    def step(self) -> None:
        """Run one call on all ranks, and keep its figures."""
        answers = self.send_command("step")
        self.cpu_seconds.append(sum(seconds for seconds, _ in answers))
        self.sent_bytes = sum(sent for _, sent in answers)

    def close(self) -> None:
        """End the processes; a second call does nothing."""
        for pipe in self._pipes:
            if self._thread.is_alive():
                pipe.send("end")
        self._thread.join()


def serve(
    rank: int,
    pipes: Sequence[Connection],
    step: ranks.RankStep,
    tensors: Sequence[Tensor],
    shards: Shards,
    mask: Mask,
    device: str,
) -> None:
    """Answer commands on one rank until "end".

    Args:
        rank: the number of the rank.
        pipes: the pipe of each rank.
        step: the function of the peer.
        tensors: q, k and v of the whole sequence.
        shards: which rank holds which tokens.
        mask: the mask.
        device: "cpu" or "cuda"; with the latter each rank has the GPU of its number, and messages
            travel by NCCL.
    """
    group = None
    if device == "cuda":
        torch.cuda.set_device(rank)
        group = dist.new_group(backend="nccl")
    q, k, v = (shards.take(x, rank).to(device) for x in tensors)
    inputs, out = ranks.RankInputs(q, k, v, shards, mask, rank, group), tensors[0][:0]
    with torch.no_grad():
        while (command := pipes[rank].recv()) != "end":
            if command == "step":
                traffic.clear()
                start = time.process_time()
                out = step(inputs)
                if device == "cuda":
                    torch.cuda.synchronize()
                seconds = time.process_time() - start
                pipes[rank].send((seconds, sum(traffic.sent.values())))
            elif command == "out":
                pipes[rank].send(out.cpu())
            else:
                out = tensors[0][:0]
                own_bytes = inputs.q.nbytes + inputs.k.nbytes + inputs.v.nbytes
                rise = _peak_bytes(partial(step, inputs), device)
                pipes[rank].send(None if rise is None else own_bytes + rise)


def _peak_bytes(call: Callable[[], object], device: str) -> int | None:
    """Return how far a call raises the memory of this rank."""
    if device == "cuda":
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        call()
        return torch.cuda.max_memory_allocated() - before
    try:  # glibc returns freed tensors to the system, so that they are not counted
        library = ctypes.CDLL(None)
        for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
            library.mallopt(parameter, 1 << 16)
        library.malloc_trim(0)
    except (AttributeError, OSError):  # another C library
        return None
    call()
    return peak_bytes(call)


def _prepare(
    step: ranks.RankStep, problem: ParallelProblem, *, alone: bool = False
) -> PreparedCall:
    """Start the ranks of a peer, and return the call that runs all of them once."""
    shards = Shards.even(problem.sizes.S, 1) if alone else problem.shards
    if step is ranks.ring_flash_attention:
        shards = Shards.zigzag(problem.sizes.S, problem.sizes.W)
    pool = RankPool(step, problem, shards)
    weakref.finalize(problem, pool.close)

    def read(_: object) -> Outputs:
        return {"out": shards.join(pool.send_command("out")).to(problem.device)}

    def figures() -> Mapping[str, float]:
        memory = pool.send_command("memory")
        full = (shards.world - 1) * (problem.k.nbytes + problem.v.nbytes)
        return {
            "cpu_seconds": statistics.median(pool.cpu_seconds),
            "sent_bytes": pool.sent_bytes,
            **({"sent_of_all": pool.sent_bytes / full} if full else {}),
            **({} if None in memory else {"rank_bytes": max(memory)}),
            **({} if alone else {"rank_bytes_bound": problem.rank_bytes_bound}),
        }

    return PreparedCall(pool.step, read, figures=figures)


def _why_not(problem: ParallelProblem) -> str | None:
    """Return why the ranks of a problem cannot run here, or None."""
    if problem.device.type == "cuda" and torch.cuda.device_count() < problem.sizes.W:
        return f"needs {problem.sizes.W} GPUs; there are {torch.cuda.device_count()}"
    return None


def _why_not_ring_flash_attention(problem: ParallelProblem) -> str | None:
    """Return why ring-flash-attention cannot run a problem, or None."""
    if problem.device.type != "cuda":
        return "runs on GPUs only"
    if problem.sizes.window is not None or problem.sizes.documents:
        return "its zigzag ring is causal only"
    return _why_not(problem)


PEERS: tuple[Peer[Any], ...] = (
    Peer(
        "regard.parallel",
        "regard.parallel.attend.",
        partial(_prepare, ranks.regard_parallel),
        why_not=_why_not,
    ),
    Peer(
        "one process",
        "regard.attend in one process with one thread.",
        partial(_prepare, ranks.one_process, alone=True),
    ),
    Peer(
        "forwarding ring",
        "Every rank forwards the block that it has received.",
        partial(_prepare, ranks.forwarding_ring),
        why_not=_why_not,
    ),
    Peer(
        "all-gather",
        "Every rank gathers all keys and values.",
        partial(_prepare, ranks.all_gather),
        why_not=_why_not,
    ),
    Peer(
        "ring-flash-attention",
        "zigzag_ring_flash_attn_func.",
        partial(_prepare, ranks.ring_flash_attention),
        needs=("ring_flash_attn",),
        why_not=_why_not_ring_flash_attention,
    ),
)


def _case(name: str, description: str, lengths: tuple[int, int, int], **options: Any) -> Case:
    """Return a case at three lengths."""
    sizes = ParallelSizes(B=1, H=8, G=2, D=64, S=lengths[0], **options)
    named = zip(("small", "default", "paper"), lengths, strict=True)
    return Case(
        name,
        description,
        {size: replace(sizes, S=S) for size, S in named},
        (torch.float32,),
        PEERS,
    )


PARALLEL = (
    _case(
        "parallel-causal",
        "A sequence that lies on several ranks, under a causal mask.",
        (1024, 16384, 65536),
    ),
    _case(
        "parallel-window",
        "A sequence that lies on several ranks, under a sliding window.",
        (2048, 65536, 262_144),
        window=512,
    ),
    _case(
        "parallel-documents",
        "Five packed documents that lie on several ranks.",
        (1024, 16384, 65536),
        documents=True,
    ),
)
"""The cases of the group `parallel`."""
