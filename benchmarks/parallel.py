"""Cases of attention over several ranks, for `python -m benchmarks parallel`.

The ranks of a peer are processes that wait for commands. They stay until the case ends, so that the
peers are timed in turns. Beside the time of a call, each rank counts its processor time, the bytes
that it sends, and its memory.
"""

from __future__ import annotations

import ctypes
import importlib
import statistics
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from threading import Thread
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.attention import AttentionProblem, AttentionSizes
from benchmarks.interfaces import SIZES, Case, Outputs, Peer, PreparedCall
from regard.cost.softmax import causal_pairs, window_pairs
from regard.errors import ParallelError, RegardError
from regard.masks import Causal, Document, Mask, Window
from regard.ops.softmax import Partial, attend, attend_partial, merge
from regard.parallel import Shards, spawn
from regard.parallel import attend as attend_over_ranks
from regard.parallel.communication import traffic
from regard.span import Span
from regard.timing import peak_bytes_on, wait_for
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
    """The sizes of causal attention over several ranks, perhaps of packed documents."""

    W: int = 4
    documents: bool = False

    def problem(self, dtype: torch.dtype, device: torch.device) -> ParallelProblem:
        return ParallelProblem(self, dtype, device)

    def __str__(self) -> str:
        packed = ", documents" if self.documents else ""
        return f"{plural(self.W, 'rank')} {super().__str__()}{packed}"


class ParallelProblem(AttentionProblem):
    """Attention over a sequence that lies on several ranks."""

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
        return {"out": self._outputs(torch.float64)}

    def plain(self) -> Outputs:
        return {} if self.dtype == torch.float32 else {"out": self._outputs(self.dtype)}

    def checked(self, outputs: Outputs) -> Outputs:
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
        """The bound of a rank's memory: 1.3 (q + k + v + out) / W, and two blocks of k and v."""
        blocks = self.k.nbytes + self.v.nbytes
        return int((1.3 * (2 * self.q.nbytes + blocks) + 2 * blocks) / self.sizes.W)


@dataclass(frozen=True, eq=False)
class RankInputs:
    """What one rank holds: q, k, v `[B, heads, n, D]`, and its group (None is the default)."""

    q: Tensor
    k: Tensor
    v: Tensor
    shards: Shards
    mask: Mask
    rank: int
    group: dist.ProcessGroup | None = None


RankStep: TypeAlias = Callable[[RankInputs], Tensor]
"""A function that computes the output of the rank's queries, `[B, H, n, D]`."""


def regard_parallel(inputs: RankInputs) -> Tensor:
    """Compute the output with `regard.parallel.attend`."""
    x = inputs
    return attend_over_ranks(x.q, x.k, x.v, shards=x.shards, mask=x.mask, group=x.group)


def one_process(inputs: RankInputs) -> Tensor:
    """Compute `regard.attend` over all tokens, on the only rank."""
    return attend(inputs.q, inputs.k, inputs.v, mask=inputs.mask)


def forwarding_ring(inputs: RankInputs) -> Tensor:
    """Send all keys and values around a ring, whether or not the next queries see them."""
    x, W = inputs, inputs.shards.world
    block = torch.stack([x.k, x.v])
    parts = {span: list[Partial]() for span in x.shards.spans(x.rank)}
    for step in range(W):
        source, works = (x.rank - step) % W, []
        received = torch.empty_like(block)
        if step + 1 < W:
            traffic.add("ring", block)
            operations = [
                dist.P2POp(dist.isend, block, group=x.group, group_peer=(x.rank + 1) % W),
                dist.P2POp(dist.irecv, received, group=x.group, group_peer=(x.rank - 1) % W),
            ]
            works = dist.batch_isend_irecv(operations)
        for q_span, q in _rows(x.q, x.shards.spans(x.rank)):
            for k_span, kv in _rows(block, x.shards.spans(source)):
                if x.mask.count(q_span, k_span):
                    k, v = kv
                    part = attend_partial(
                        q, k, v, mask=x.mask, q_positions=q_span, k_positions=k_span
                    )
                    parts[q_span].append(part)
        for work in works:
            work.wait()
        block = received
    return torch.cat([merge(of_span).out for of_span in parts.values()], 2)


def all_gather(inputs: RankInputs) -> Tensor:
    """Gather all keys and values on every rank, then attend to them."""
    x, W = inputs, inputs.shards.world
    block = torch.stack([x.k, x.v])
    blocks = [torch.empty_like(block) for _ in range(W)]
    traffic.add("all-gather", block.expand(W - 1, *block.shape))
    dist.all_gather(blocks, block, group=x.group)
    k, v = x.shards.join(blocks, 3)
    every = Span(0, k.shape[2])
    outs = [
        attend(q, k, v, mask=x.mask, q_positions=span, k_positions=every)
        for span, q in _rows(x.q, x.shards.spans(x.rank))
    ]
    return torch.cat(outs, 2)


def ring_flash_attention(inputs: RankInputs) -> Tensor:
    """Compute ring-flash-attention's zigzag ring, whose layout is `[B, n, heads, D]`."""
    function = importlib.import_module("ring_flash_attn").zigzag_ring_flash_attn_func
    q, k, v = (x.transpose(1, 2).contiguous() for x in (inputs.q, inputs.k, inputs.v))
    out: Tensor = function(q, k, v, causal=True, group=inputs.group)
    return out.transpose(1, 2)


def _rows(x: Tensor, spans: tuple[Span, ...]) -> list[tuple[Span, Tensor]]:
    """Return each span with its tokens, which lie along the last dimension but one of x."""
    return list(zip(spans, x.split([len(span) for span in spans], -2), strict=True))


RANK_STEPS: dict[str, RankStep] = {
    "regard.parallel": regard_parallel,
    "one process": one_process,
    "forwarding ring": forwarding_ring,
    "all-gather": all_gather,
    "ring-flash-attention": ring_flash_attention,
}
"""The function of each peer."""


class RankPool:
    """Processes that compute the attention of a peer of `RANK_STEPS` at each command."""

    def __init__(self, name: str, problem: ParallelProblem, shards: Shards) -> None:
        pairs = [Pipe() for _ in range(shards.world)]
        self._pipes = [mine for mine, _ in pairs]
        self._failure: list[RegardError] = []
        tensors = tuple(x.cpu() for x in (problem.q, problem.k, problem.v))
        arguments = ([theirs for _, theirs in pairs], name, tensors, shards, problem.mask)
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
    name: str,
    tensors: Sequence[Tensor],
    shards: Shards,
    mask: Mask,
    device: str,
) -> None:
    """Answer commands on one rank until "end"."""
    step, group = RANK_STEPS[name], None
    if device == "cuda":
        torch.cuda.set_device(rank)
        group = dist.new_group(backend="nccl")
    q, k, v = (shards.take(x, rank).to(device) for x in tensors)
    inputs, out = RankInputs(q, k, v, shards, mask, rank, group), tensors[0][:0]
    with torch.no_grad():
        while (command := pipes[rank].recv()) != "end":
            if command == "step":
                traffic.clear()
                start = time.process_time()
                out = step(inputs)
                wait_for(torch.device(device))
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
    if device == "cpu":
        try:  # glibc returns freed tensors to the system, so that they are not counted
            library = ctypes.CDLL(None)
            for parameter in (M_TRIM_THRESHOLD, M_MMAP_THRESHOLD):
                library.mallopt(parameter, 1 << 16)
            library.malloc_trim(0)
        except (AttributeError, OSError):  # another C library
            return None
        call()
    return peak_bytes_on(torch.device(device), call)


def _prepare(
    name: str, problem: ParallelProblem, *, alone: bool = False, zigzag: bool = False
) -> PreparedCall:
    """Start the ranks of a peer, and return the call that runs all of them once."""
    shards = Shards.even(problem.sizes.S, 1) if alone else problem.shards
    if zigzag:
        shards = Shards.zigzag(problem.sizes.S, problem.sizes.W)
    pool = RankPool(name, problem, shards)
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


def _why_not(problem: ParallelProblem, *, alone: bool = False, zigzag: bool = False) -> str | None:
    """Return why the ranks of a problem cannot run here, or None."""
    sizes, gpus = problem.sizes, torch.cuda.device_count()
    if zigzag and (sizes.window is not None or sizes.documents):
        return "its zigzag ring is causal only"
    if not alone and problem.device.type == "cuda" and gpus < sizes.W:
        return f"needs {sizes.W} GPUs; there are {gpus}"
    return None


PEERS: tuple[Peer[Any], ...] = tuple(
    Peer(
        name,
        description,
        partial(_prepare, name, **options),
        ("ring_flash_attn",) if "zigzag" in options else (),
        ("cuda",) if "zigzag" in options else ("cpu", "cuda"),
        why_not=partial(_why_not, **options),
    )
    for name, description, options in (
        ("regard.parallel", "regard.parallel.attend.", dict[str, Any]()),
        ("one process", "regard.attend in one process with one thread.", {"alone": True}),
        ("forwarding ring", "Every rank forwards the block that it has received.", {}),
        ("all-gather", "Every rank gathers all keys and values.", {}),
        ("ring-flash-attention", "zigzag_ring_flash_attn_func.", {"zigzag": True}),
    )
)

PARALLEL = tuple(
    Case(
        name,
        description,
        {size: ParallelSizes(B=1, H=8, G=2, D=64, S=S, **options) for size, S in lengths},
        (torch.float32,),
        PEERS,
    )
    for name, description, lengths, options in (
        (
            "parallel-causal",
            "A sequence that lies on several ranks, under a causal mask.",
            zip(SIZES, (1024, 16384, 65536), strict=True),
            {},
        ),
        (
            "parallel-window",
            "A sequence that lies on several ranks, under a sliding window.",
            zip(SIZES, (2048, 65536, 262_144), strict=True),
            {"window": 512},
        ),
        (
            "parallel-documents",
            "Five packed documents that lie on several ranks.",
            zip(SIZES, (1024, 16384, 65536), strict=True),
            {"documents": True},
        ),
    )
)
"""The cases of the group `parallel`."""
