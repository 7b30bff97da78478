"""Decoding over a cache whose tokens lie on several ranks: one (out, lse) of each rank travels."""

from __future__ import annotations

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from regard.ops.softmax import Partial, attend_partial, merge
from regard.parallel.attend import Options
from regard.parallel.exchange import Group, Ranks
from regard.span import Positions


def decode(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    *,
    q_positions: Positions,
    k_positions: Positions,
    group: Group | None = None,
    **options: Unpack[Options],
) -> Float[Tensor, "B H T E"]:
    """Attention of queries that every rank has over keys of which each rank holds some.

    (out, lse) = merge over ranks of attend_partial(q, k_r, v_r)

    Args:
        q: the same on every rank.
        k, v: the tokens in this rank's cache; it may be empty.
        q_positions: where the queries stand.
        k_positions: where this rank's tokens stand, -1 = an empty slot.
        group: a process group; None is the default one.
        options: as in `regard.parallel.attend`.

    Returns:
        The output of every query, the same on every rank, bit for bit.

    Raises:
        ArgumentError, ArgumentTypeError: an argument does not fit, or the ranks make different
            calls.
        ParallelError: a rank ended or is late.

    Source: Shyam et al. 2024 (arXiv 2408.04093), section 4.
    """
    ranks = Ranks(group)
    sink = options.pop("sink", None)
    ranks.agree(
        "decode",
        {
            "the queries": (tuple(q.shape), q.dtype),
            "the key/value heads": (k.shape[1], v.shape[3]),
            "the mask": options.get("mask"),
            "the bias": options.get("bias"),
            "the options": [options.get(name) for name in ("scale", "softcap", "backend")],
        },
    )
    wide = torch.promote_types(q.dtype, torch.float32)
    part = attend_partial(q, k, v, q_positions=q_positions, k_positions=k_positions, **options)
    line = torch.cat([part.out.to(wide).reshape(-1), part.lse.to(wide).reshape(-1)])
    every = ranks.gather("partial results", line, [line.numel()] * ranks.world)
    size = part.out.numel()
    parts = [Partial(x[:size].view(part.out.shape), x[size:].view(part.lse.shape)) for x in every]
    return merge(parts, sink=sink).out.to(q.dtype)
