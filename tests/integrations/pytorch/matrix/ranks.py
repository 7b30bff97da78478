"""Training steps on two processes: functions that the processes import."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from regard.parallel import spawn
from tests.integrations.pytorch.matrix.things import THINGS, Thing, outputs

STEPS = 2


def train(module: nn.Module, args: tuple[Tensor, ...]) -> tuple[list[Tensor], dict[str, Tensor]]:
    """Train for some steps; return the outputs and the parameters after the last."""
    optimizer = torch.optim.SGD(module.parameters(), lr=0.05, foreach=False)
    seen = []
    for _ in range(STEPS):
        out = outputs(module(*args))[0]
        seen.append(whole(out).detach())
        out.square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return seen, {name: whole(x).detach() for name, x in module.named_parameters()}


def whole(x: Any) -> Tensor:
    """A tensor, put together from the parts of all ranks where it lies on them."""
    result: Tensor = x.full_tensor() if hasattr(x, "full_tensor") else x
    return result


def prepare(kind: str, module: nn.Module) -> nn.Module:
    """Distribute the parameters of a module."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import (
        ColwiseParallel,
        RowwiseParallel,
        parallelize_module,
    )

    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    if kind == "fsdp":
        for part in module.modules():
            if type(part).__name__ == "Block":
                fully_shard(part, mesh=mesh)
        return fully_shard(module, mesh=mesh)
    for part in list(module.modules()):
        if type(part).__name__ == "SwiGLU":
            plan = {"gate": ColwiseParallel(), "up": ColwiseParallel(), "down": RowwiseParallel()}
            parallelize_module(part, mesh, plan)
        if type(part).__name__ == "Attention":
            names = ("project.q.linear", "project.k.linear", "project.v.linear")
            columns = dict.fromkeys(names, ColwiseParallel())
            parallelize_module(part, mesh, {**columns, "output": RowwiseParallel()})
    return module


def run_all(rank: int, kind: str) -> dict[str, Any]:
    """What one rank sees, for every layer of the tables."""
    found: dict[str, Any] = {}
    for thing in THINGS:
        if thing.layer:
            x, *past = thing.inputs(6)
            if kind == "dtensor":  # each process holds some of the heads
                past = [part.chunk(dist.get_world_size(), 1)[rank] for part in past]
            found[thing.name] = train(prepare(kind, thing.make()), (x, *past))
    return found


@cache
def results(kind: str) -> list[dict[str, Any]]:
    """What both ranks see: the processes start once."""
    return spawn(run_all, 2, kind)


def assert_trains_as_one(kind: str, thing: Thing) -> None:
    """Two processes train as one does: outputs and parameters of every step."""
    outs, parameters = train(thing.make(), thing.inputs(6))
    for rank in results(kind):
        found, after = rank[thing.name]
        for x, y in zip(found, outs, strict=True):
            torch.testing.assert_close(x, y)
        assert after.keys() == parameters.keys()
        for name, x in after.items():
            torch.testing.assert_close(x, parameters[name])
    before = dict(thing.make().named_parameters())
    assert all(not torch.equal(before[name], x) for name, x in parameters.items())
