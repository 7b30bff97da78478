"""`regard.parallel.decode`: attention over a cache whose tokens lie on several ranks."""

from __future__ import annotations

from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ArgumentError
from regard.ops.softmax import Partial, attend_partial, merge
from regard.parallel.communication import Group, RankGroup
from regard.parallel.ranked_call import ParallelOptions
from regard.sequence_scope import use_scope
from regard.span import Positions


def decode(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    *,
    q_positions: Positions,
    k_positions: Positions,
    group: Group | None = None,
    **options: Unpack[ParallelOptions],
) -> Float[Tensor, "B H T E"]:
    """Compute attention of queries that every rank has, over keys of which each rank holds some.

    (out, lse) = merge over ranks of attend_partial(q, k_r, v_r)

    Each rank sends only the output and the log-sum-exp over its own keys.

    Args:
        q: the queries, [B, H, T, D], the same on every rank.
        k, v: this rank's keys [B, G, S, D] and values [B, G, S, E]; S may be 0.
        q_positions: the positions of the queries, a `Span` or int [B, T].
        k_positions: those of its keys, a `Span` or int [B, S]; -1 marks an empty slot.
        group: a process group; None means the default group.
        options: mask, bias, scale, softcap, sink and backend, as in `regard.parallel.attend`.

    Returns:
        The output of every query, [B, H, T, E], bitwise equal on every rank.

    Raises:
        ArgumentError, ArgumentTypeError: an argument does not fit, or the ranks' calls differ.
        ParallelError: a rank has ended or did not answer in time.

    Every rank runs this code, here with one rank, whose cache has keys 0 to 5:

    >>> import torch, regard
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> q, k = torch.randn(1, 4, 1, 8), torch.randn(1, 2, 6, 8)
    >>> q_at, k_at = regard.Span(5, 1), regard.Span(0, 6)
    >>> z = regard.parallel.decode(q, k, k, q_positions=q_at, k_positions=k_at)
    >>> torch.allclose(z, regard.attend(q, k, k), atol=1e-5)
    True
    >>> dist.destroy_process_group()

    Source: Shyam et al. 2024 (arXiv 2408.04093), section 4.
    """
    ranks = RankGroup(group)
    sink = options.pop("sink", None)
    inputs = (q, k, v) if sink is None else (q, k, v, sink)
    if torch.is_grad_enabled() and any(x.requires_grad for x in inputs):
        raise ArgumentError(
            "regard.parallel.decode computes no gradients; call it under torch.no_grad(), or use "
            "regard.parallel.attend"
        )
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
    wide_dtype = torch.promote_types(q.dtype, torch.float32)
    with use_scope(None):  # this rank's keys only
        part = attend_partial(q, k, v, q_positions=q_positions, k_positions=k_positions, **options)
    flat = torch.cat([part.out.to(wide_dtype).reshape(-1), part.lse.to(wide_dtype).reshape(-1)])
    received = ranks.gather("partial results", flat, [flat.numel()] * ranks.world)
    size = part.out.numel()
    parts = [
        Partial(x[:size].view(part.out.shape), x[size:].view(part.lse.shape)) for x in received
    ]
    return merge(parts, sink=sink).out.to(q.dtype)
