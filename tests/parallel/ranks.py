"""What the ranks of the tests do: functions that processes import."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import regard
from regard import biases, masks
from regard.caches import Cache, Fixed, Growing, Latent, Paged, Quantized, Ring
from regard.ops.softmax import Call, KernelResult
from regard.ops.softmax.reference import ReferenceKernel
from regard.parallel import Shards, attend, decode
from regard.parallel.communication import traffic
from regard.span import Span

S, H, G, D, E = 24, 4, 2, 8, 6

MASKS: dict[str, masks.Mask | None] = {
    "none": None,
    "causal": masks.Causal(),
    "window": masks.Causal() & masks.Window(5),
    "window or sinks": masks.Causal() & (masks.Window(4) | masks.Sinks(2)),
    "chunk": masks.Causal() & masks.Chunk(6),
    "prefix": masks.Prefix(9),
    "documents": masks.Causal() & masks.Document(((0, 7, 16, S), (0, 3, 20, S))),
    "padding": masks.Causal() & masks.Padding(runs=(((3, S),), ((0, 17),))),
    "dilated": masks.Causal() & masks.Dilated(3, 2),
    "strided": masks.Causal() & masks.Strided(5),
    "heads": masks.Heads([masks.Causal() & masks.Window(2 + 3 * h) for h in range(H)]),
    "function": masks.Fn(lambda q, k: (q - k) % 3 != 1),
    "nothing": masks.Causal() & ~masks.Causal(),
}

LENGTHS = {
    "even": lambda W: Shards.even(S, W),
    "zigzag": lambda W: Shards.zigzag(S, W),
    "uneven": lambda W: _uneven([5, S - 6, 1, 0][:W]),
}


def _uneven(lengths: list[int]) -> Shards:
    """Runs of these lengths; the last one takes what is left."""
    lengths[-1] += S - sum(lengths)
    found, at = [], 0
    for n in lengths:
        found.append((Span(at, n),))
        at += n
    return Shards(tuple(found))


def tensors(dtype: torch.dtype = torch.float32, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """q, k and v of the whole sequence; k and v have fewer heads, and v another width."""
    numbers = torch.Generator().manual_seed(seed)
    sizes = ((H, D), (G, D), (G, E))
    return tuple(  # type: ignore[return-value]
        torch.randn(2, n, S, d, generator=numbers, dtype=torch.float64).to(dtype) for n, d in sizes
    )


def options(name: str, dtype: torch.dtype) -> dict[str, Any]:
    """Options by name, with tensors that want gradients."""
    numbers = torch.Generator().manual_seed(5)
    if name == "plain":
        return {}
    if name == "sink":
        sink = torch.randn(H, generator=numbers, dtype=torch.float64).to(dtype)
        return {"sink": sink.requires_grad_(), "scale": 0.3}
    if name == "softcap":
        return {"softcap": 2.0}
    if name == "alibi":
        return {"bias": biases.ALiBi(H)}
    table = torch.randn(8, H, generator=numbers, dtype=torch.float64).to(dtype)
    return {"bias": biases.T5Relative(table.requires_grad_(), bidirectional=False)}


def learned(given: dict[str, Any]) -> list[Tensor]:
    """The tensors of the options that want a gradient."""
    found = [given["sink"]] if "sink" in given else []
    if "bias" in given:
        found += [x for x in given["bias"].tensors() if x.requires_grad]
    return found


def forward_and_backward(
    rank: int, cases: list[tuple[str, str, str, str, torch.dtype]]
) -> list[list[Tensor]]:
    """Output and gradients of this rank for each case, and that the same call gives the same
    bits.
    """
    found = []
    for mask, lengths, method, option, dtype in cases:
        results = []
        for _ in range(2):
            shards = LENGTHS[lengths](dist.get_world_size())
            given = options(option, dtype)
            q, k, v = (shards.take(x, rank).requires_grad_() for x in tensors(dtype))
            z = attend(
                q,
                k,
                v,
                shards=shards,
                mask=MASKS[mask],
                method=method,
                **given,  # type: ignore[arg-type]
            )
            loss = (z * shards.take(weights(dtype), rank)).sum()
            inputs = [q, k, v, *learned(given)]
            gradients = torch.autograd.grad(loss, inputs)
            results.append([z.detach(), *gradients])
        for x, y in zip(*results, strict=True):
            assert torch.equal(x, y), f"{mask}, {lengths}, {method}: two calls differ"
        found.append(results[0])
    return found


def weights(dtype: torch.dtype) -> Tensor:
    """What the loss multiplies the whole output with."""
    numbers = torch.Generator().manual_seed(9)
    return torch.randn(2, H, S, E, generator=numbers, dtype=torch.float64).to(dtype)


def mesh(rank: int, cases: list[tuple[str, str, torch.dtype]]) -> list[list[Tensor]]:
    """The method "both" on two nodes of two ranks."""
    nodes = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    across = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    groups = (nodes[rank // 2], across[rank % 2])
    found = []
    for mask, option, dtype in cases:
        shards = Shards.zigzag(S, 4)
        given = options(option, dtype)
        q, k, v = (shards.take(x, rank).requires_grad_() for x in tensors(dtype))
        z = attend(q, k, v, shards=shards, group=groups, method="both", mask=MASKS[mask], **given)
        loss = (z * shards.take(weights(dtype), rank)).sum()
        found.append([z.detach(), *torch.autograd.grad(loss, [q, k, v, *learned(given)])])
    return found


def cross_lengths(rank: int) -> list[Tensor]:
    """Queries and keys of different lengths, cut differently; some ranks hold no query."""
    W = dist.get_world_size()
    q, k, v = tensors()
    keys = Shards.zigzag(S, W)
    queries = Shards.even(5, W, start=S - 5)
    mine = queries.take(q[:, :, S - 5 :], rank)
    return [
        attend(
            mine,
            keys.take(k, rank),
            keys.take(v, rank),
            shards=keys,
            q_shards=queries,
            mask=masks.Causal(),
            method=method,
        )
        for method in ("exchange", "gather", "heads")
    ]


def decoding(rank: int, mask: str, option: str) -> Tensor:
    """Three new queries over a cache that lies on all ranks, with an empty slot."""
    W = dist.get_world_size()
    q, k, v = tensors()
    shards = Shards.even(S, W)
    positions = torch.cat([shards.positions(rank), torch.tensor([[-1]])], 1)
    pad = [torch.cat([shards.take(x, rank), torch.full_like(x[:, :, :1], 7.0)], 2) for x in (k, v)]
    with torch.no_grad():
        return decode(
            q[:, :, -3:],
            *pad,
            q_positions=Span(S - 3, 3),
            k_positions=positions,
            mask=MASKS[mask],
            **options(option, torch.float32),
        )


CACHES: dict[str, Callable[[], Cache]] = {
    "growing": Growing,
    "fixed": lambda: Fixed(S),
    "ring": lambda: Ring(9),
    "paged": lambda: Paged(3, 2 * S),
    "quantized": lambda: Quantized(8, group=4, residual=0),
    "latent": lambda: Latent(E, D - E),
}


def decoding_from_caches(rank: int) -> dict[str, tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each kind of cache: the outputs of the last four tokens, which the ranks append to their
    caches in turns, and what the cache of this rank holds in the end, with its positions.
    """
    W, found = dist.get_world_size(), {}
    x, *_ = tensors()
    (own,) = Shards.even(S - 4, W).spans(rank)
    for name, make in CACHES.items():
        cache, outs = make(), []
        memory = (x[:, :1],) if name == "latent" else (x[:, :G], x[:, H - G :] * 2)
        cache.update(tuple(y[:, :, own.start : own.stop] for y in memory), own)
        with torch.no_grad():
            for t in range(S - 4, S):
                mine = slice(t, t + (t % W == rank))
                new = tuple(y[:, :, mine] for y in memory)
                stored, at = cache.update(new, Span(t, mine.stop - t))
                if name == "latent":  # the values are the latents, the keys have rotary parts too
                    stored = stored[0], stored[0][..., :E]
                options = {"q_positions": Span(t, 1), "mask": masks.Causal() & masks.Window(8)}
                outs.append(decode(x[:, :, t : t + 1], *stored, k_positions=at, **options))
        positions = at.tensor() if isinstance(at, Span) else at
        dense = [y + torch.zeros(()) for y in stored]
        found[name] = torch.cat(outs, 2), *dense, positions.expand(2, -1).clone()
    return found


def bytes_sent(rank: int, cases: list[tuple[str, str, str]]) -> list[int]:
    """What this rank really sends in a forward pass."""
    found = []
    for mask, lengths, method in cases:
        shards = LENGTHS[lengths](dist.get_world_size())
        q, k, v = (shards.take(x, rank) for x in tensors())
        traffic.clear()
        with torch.no_grad():
            attend(q, k, v, shards=shards, mask=MASKS[mask], method=method)  # type: ignore[arg-type]
        found.append(sum(traffic.sent.values()))
    return found


class Deadly(ReferenceKernel):
    """A kernel that kills rank 1 when it computes."""

    name = "deadly"

    def priority(self, call: object) -> None:
        """Run only by name."""

    def run(self, call: Call) -> KernelResult:
        """Compute the call, or die."""
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().run(call)


def fault_in_a_step(rank: int, folder: Path, kind: str) -> None:
    """Rank 1 is killed after the handshake, or it is late; what the others are told is written."""
    shards = Shards.even(S, dist.get_world_size())
    q, k, v = (shards.take(x, rank) for x in tensors())
    if kind == "late" and rank == 1:
        time.sleep(8)
    try:
        with regard.register_kernel(Deadly()):
            backend = "deadly" if kind == "killed" else "auto"
            attend(q, k, v, shards=shards, backend=backend, method="exchange")
    except regard.RegardError as error:
        (folder / str(rank)).write_text(f"{type(error).__name__}: {error}")
        raise


def fault(rank: int, kind: str) -> str:
    """One rank does something else; what each rank is told."""
    shards = Shards.even(S, dist.get_world_size())
    q, k, v = (shards.take(x, rank) for x in tensors())
    given: dict[str, Any] = {"mask": masks.Causal()}
    if rank == 1:
        if kind == "mask":
            given["mask"] = masks.Causal() & masks.Window(3)
        elif kind == "dtype":
            q, k, v = (x.double() for x in (q, k, v))
        elif kind == "shards":
            shards = Shards.zigzag(S, dist.get_world_size())
        elif kind == "option":
            given["scale"] = 0.5
        elif kind == "ends":
            raise SystemExit(3)
    try:
        if kind == "order" and rank == 1:
            decode(q, k, v, q_positions=Span(0, 3), k_positions=Span(0, 3))
        attend(q, k, v, shards=shards, **given)
    except regard.RegardError as error:
        return f"{type(error).__name__}: {error}"
    return ""
