"""What compiled products read: tensors as flat memory, masks as ranges of positions, numbers of a score."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard import masks
from regard.biases import ALiBi
from regard.masks.intervals import FAR
from regard.ops.softmax.call import Call
from regard.span import Positions, as_tensor, part


def up(n: int, step: int) -> int:
    """The least multiple of a step that is not below n.

    >>> up(70, 64)
    128
    """
    return -(-n // step) * step


def together(call: Call) -> int:
    """How many factors stand together: two bfloat16s, where the processor multiplies those."""
    from regard.ops.jit.product import PAIRS

    return 2 if call.q.dtype == torch.bfloat16 and PAIRS else 1


def numbers(x: Tensor) -> Any:
    """The memory of a contiguous tensor as a flat array, of the bits if they are 16."""
    flat = x.detach().view(-1)
    return flat.numpy() if x.dtype == torch.float32 else flat.view(torch.uint16).numpy()


def memory(x: Tensor) -> tuple[Any, ...]:
    """A tensor [B,a,b,d] as its flat memory, its first three steps, and how its bits are meant; d is contiguous."""
    from regard.ops.jit.bits import BF16, FP16

    x = x.detach()
    x = x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()
    steps = x.stride()
    length = x.shape[-1] + sum((n - 1) * step for n, step in zip(x.shape[:-1], steps[:-1], strict=True))  # fmt: skip
    tag = FP16 if x.dtype == torch.float16 else BF16
    return numbers(x.as_strided((length,), (1,))), *steps[:3], tag


def where(positions: Positions) -> Tensor:
    """Positions [b,L], int64."""
    return as_tensor(positions).long()


def ranges(call: Call, rows: slice) -> tuple[Tensor, Tensor] | None:
    """Starts and stops [b,h,t,n] of the ranges of positions that queries see, or None."""
    q, first = part(call.q_positions, rows), torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    if call.sees_everything:
        return first, torch.full((1, 1, 1, 1), FAR)
    if isinstance(call.mask, masks.Causal):
        return first, where(q)[:, None, :, None] + 1
    return call.mask.intervals(q)


def mask_of(call: Call) -> tuple[Any, ...]:
    """Positions of the keys; least, largest and whether all are there, of each panel; ranges of the queries."""
    from regard.ops.jit.product import PANEL

    keys = where(call.k_positions)
    padded = torch.full((keys.shape[0], up(call.S, PANEL)), -1)
    padded[:, : call.S] = keys
    panels = padded.unflatten(1, (-1, PANEL))
    there = panels >= 0
    least = panels.masked_fill(~there, FAR).amin(-1)
    bounds = torch.stack([least, panels.amax(-1), there.all(-1).long()], -1)
    found = ranges(call, slice(0, call.T))
    assert found is not None, "why_not refuses these"
    starts, stops = (x.expand(*(max(n, 1) for n in x.shape)).contiguous().numpy() for x in found)
    return padded.numpy(), bounds.numpy(), starts, stops


def extra_of(call: Call) -> tuple[Any, ...]:
    """Scale, softcap, ALiBi's slopes, and where the queries stand."""
    q = where(call.q_positions).contiguous().numpy()
    cap, symmetric, slopes = np.float32(call.softcap or 0), False, torch.empty(0)
    if isinstance(call.bias, ALiBi):
        symmetric = call.bias.symmetric
        slopes = call.bias.slopes_on(torch.device("cpu"), torch.float32).detach()
    return np.float32(call.scale), cap, symmetric, slopes.contiguous().numpy(), q
