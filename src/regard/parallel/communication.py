"""Messages between ranks: the only module that sends them through `torch.distributed`.

Every failure becomes one error that names the rank, the step and the call. torch does not check
sizes or dtypes of messages, so every call begins with `RankGroup.agree`, which compares what the
ranks are about to do.
"""

from __future__ import annotations

import datetime as dt
import hashlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from regard.errors import ArgumentError, ParallelError

Group = dist.ProcessGroup
TORCHRUN_TIMEOUT = dt.timedelta(minutes=10)
"""The time after which a rank that torchrun started stops waiting for another."""
R = TypeVar("R")


@dataclass
class Traffic:
    """The number of bytes that this rank has sent, for each kind of call."""

    sent: dict[str, int] = field(default_factory=dict)

    def add(self, call: str, x: Tensor) -> None:
        """Count a tensor that is sent to another rank."""
        self.sent[call] = self.sent.get(call, 0) + x.numel() * x.element_size()

    def clear(self) -> None:
        """Set all counts to zero."""
        self.sent.clear()


traffic = Traffic()
"""The bytes that this process has sent since it began, or since `traffic.clear()`."""


def join_torchrun(command: str) -> None:
    """Join the process group of torchrun's environment variables, if this process has none."""
    missing = [name for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR") if name not in os.environ]
    if missing:
        raise ArgumentError(
            f"the environment has no {', '.join(missing)}: --parallel needs processes that "
            "torchrun starts, such as torchrun --standalone --nproc-per-node 4 -m regard "
            f"{command} ... --parallel context",
            argument="parallel",
        )
    if not dist.is_initialized():
        dist.init_process_group("gloo", timeout=TORCHRUN_TIMEOUT)


class RankGroup:
    """The ranks of a process group, and the messages between them."""

    def __init__(self, group: Group | None = None) -> None:
        if not dist.is_available() or not dist.is_initialized():
            raise ArgumentError(
                "torch.distributed is not initialized in this process; call "
                "torch.distributed.init_process_group(), or run under torchrun"
            )
        self.group = group
        self.rank, self.world = dist.get_rank(group), dist.get_world_size(group)
        if self.rank < 0:
            raise ArgumentError("this process is not a member of the given group")

    def agree(self, call: str, facts: Mapping[str, object]) -> None:
        """Check that every rank makes the same call, before one can wait for another forever."""
        if self.world == 1:
            return
        texts_of_facts = {"call": call, **{name: str(x) for name, x in facts.items()}}
        digest = hashlib.blake2b(repr(texts_of_facts).encode(), digest_size=8).digest()
        mine = torch.tensor([int.from_bytes(digest, "little", signed=True)], device=self._device())
        digests = [torch.empty_like(mine) for _ in range(self.world)]
        self._run(call, "handshake", lambda: dist.all_gather(digests, mine, group=self.group))
        if all(int(x) == int(mine) for x in digests):
            return
        texts: list[dict[str, str] | None] = [None] * self.world
        self._run(
            call,
            "handshake",
            lambda: dist.all_gather_object(texts, texts_of_facts, group=self.group),
        )
        raise ArgumentError(_difference([x or {} for x in texts]))

    def send_receive(
        self, call: str, step: int, send: Tensor | None, to: int, buffer: Tensor | None, source: int
    ) -> PendingMessage:
        """Start sending a tensor to one rank and receiving one from another."""
        operations = []
        if send is not None and send.numel():
            traffic.add(call, send)
            operations.append(dist.P2POp(dist.isend, send, group=self.group, group_peer=to))
        if buffer is not None and buffer.numel():
            operations.append(dist.P2POp(dist.irecv, buffer, group=self.group, group_peer=source))
        works = (
            self._run(call, f"step {step}", lambda: dist.batch_isend_irecv(operations))
            if operations
            else []
        )
        return PendingMessage(self, call, step, works, buffer, send)

    def all_to_all(
        self, call: str, parts: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> list[Tensor]:
        """Send one tensor to each rank and receive one from each."""
        received = list(buffers)
        received[self.rank].copy_(parts[self.rank])
        messages = []
        for step in range(1, self.world):
            to, source = (self.rank + step) % self.world, (self.rank - step) % self.world
            messages.append(
                self.send_receive(call, step, parts[to].contiguous(), to, received[source], source)
            )
        for message in messages:
            message.wait()
        return received

    def sum(self, call: str, x: Tensor) -> Tensor:
        """Return the sum of a tensor over all ranks in fp32 or wider, bitwise equal on each."""
        if self.world == 1:
            return x
        wide = x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()
        gathered = [torch.empty_like(wide) for _ in range(self.world)]
        traffic.add(call, wide)
        self._run(call, "sum", lambda: dist.all_gather(gathered, wide, group=self.group))
        return torch.stack(gathered).sum(0).to(x.dtype)

    def gather(self, call: str, x: Tensor, sizes: Sequence[int]) -> list[Tensor]:
        """Return the flattened tensors of all ranks; that of rank r has sizes[r] elements."""
        parts = [x.reshape(-1).contiguous()] * self.world
        return self.all_to_all(call, parts, [x.new_empty(n) for n in sizes])

    def send_object(self, call: str, value: object, to: int) -> None:
        """Send a small picklable object, such as the shapes of the tensors that follow it."""
        self._run(
            call,
            "header",
            lambda: dist.send_object_list([value], group=self.group, group_dst=to),
        )

    def receive_object(self, call: str, source: int) -> object:
        """Receive the object that a rank sends by `send_object`."""
        values: list[object] = [None]
        self._run(
            call,
            "header",
            lambda: dist.recv_object_list(values, group=self.group, group_src=source),
        )
        return values[0]

    def _device(self) -> torch.device:
        """Return the device on which the group's backend can exchange tensors."""
        backend = dist.get_backend(self.group)
        return torch.device("cuda" if backend == "nccl" else "cpu")

    def _run(self, call: str, stage: str, function: Callable[[], R]) -> R:
        """Run a function of torch.distributed and turn its errors into `ParallelError`."""
        try:
            return function()
        except (RuntimeError, ValueError) as error:
            raise self.failure(call, stage, error) from error

    def failure(self, call: str, stage: str, error: Exception) -> ParallelError:
        """Make the error for a message that failed at a stage of a call, such as "step 2"."""
        text = str(error).strip().splitlines() or [type(error).__name__]
        return ParallelError(
            f"rank {self.rank} of {self.world}: {call} failed at its {stage}: {text[0]}; another "
            "rank has ended, did not answer in time, or made another call. Nothing was retried: "
            "start all ranks again"
        )


@dataclass(eq=False)
class PendingMessage:
    """The messages of one step, which may still be on their way."""

    ranks: RankGroup
    call: str
    step: int
    works: Sequence[dist.Work]
    received: Tensor | None
    sent: Tensor | None
    """The sent tensor, which is kept alive until it has been sent."""

    def wait(self) -> Tensor | None:
        """Wait until sending and receiving have ended; return the received tensor, or None."""
        for work in self.works:
            try:
                work.wait()
            except (RuntimeError, ValueError) as error:
                raise self.ranks.failure(self.call, f"step {self.step}", error) from error
        self.sent = None
        return self.received


def _difference(texts: Sequence[Mapping[str, str]]) -> str:
    """Describe the first fact in which the ranks differ."""
    for name in texts[0]:
        values = [x.get(name, "nothing") for x in texts]
        if len(set(values)) > 1:
            common = max(set(values), key=values.count)
            differing = [
                f"{value} on rank {r}" for r, value in enumerate(values) if value != common
            ]
            return (
                f"the ranks differ in {name}: {common} on most, but {', '.join(differing)}; every "
                "rank must make the same call"
            )
    return "the ranks make different calls"
