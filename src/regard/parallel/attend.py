"""`regard.parallel.attend`: exact attention over a sequence on several ranks.

Four methods give the same result:

    exchange   each rank keeps its queries and receives the keys and values that they see
    gather     every rank receives all keys and values at once
    heads      tokens are exchanged so that each rank has all tokens for some heads (Ulysses)
    both       heads are exchanged inside a node, keys and values between nodes

`decode` attends over a cache whose tokens lie on several ranks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Unpack

import torch
from jaxtyping import Float
from torch import Tensor

from regard.errors import ArgumentError
from regard.ops.softmax import Partial, attend_partial, merge
from regard.ops.softmax.merge import apply_sink
from regard.parallel.communication import Group, RankGroup
from regard.parallel.exchange import (
    attend_by_heads,
    attend_by_nodes,
    exchange,
    gather,
    why_not_heads,
)
from regard.parallel.plan import cheapest_method
from regard.parallel.ranked_call import (
    METHODS,
    CallShards,
    Method,
    ParallelOptions,
    ParameterGradients,
    RankedCall,
    call_facts,
    check_call,
)
from regard.parallel.shards import Shards
from regard.sequence_scope import use_scope
from regard.span import Positions


def attend(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    *,
    shards: Shards,
    q_shards: Shards | None = None,
    group: Group | Sequence[Group] | None = None,
    method: Method = "auto",
    parameter_gradients: ParameterGradients = "whole",
    **options: Unpack[ParallelOptions],
) -> Float[Tensor, "B H T E"]:
    """Compute softmax attention of this rank's queries over the keys of all ranks, exactly.

    out_i = sum_j softmax_j(scale q_i . k_j + bias_ij) v_j over the visible keys j of every rank

    Every rank makes this call with its own part. The result is differentiable in q, k, v, sink and
    the tensors of the bias.

    Args:
        q: this rank's queries, [B, H, T, D], in the order of `q_shards.spans(rank)`.
        k, v: its keys [B, G, S, D] and values [B, G, S, E], in the order of `shards.spans(rank)`.
        shards, q_shards: which rank holds which keys, and which queries (None: the same).
        group: a process group; None is the default one. "both" takes two: the ranks of this node,
            and those of the same number inside their nodes.
        method: "exchange": each rank receives the keys and values that its queries see; "gather":
            all of them; "heads": all tokens of some heads; "both": "heads" inside a node,
            "exchange" between nodes; "auto": "both" with two groups, else "heads" if it can run and
            sends fewer bytes, else "exchange".
        parameter_gradients: the gradients of sink and bias on each rank: "whole", equal on all, or
            "share", whose sum over the ranks is the whole.
        options: mask, bias, scale, softcap, sink and backend: see `ParallelOptions`.

    Returns:
        The output of this rank's queries, [B, H, T, E].

    Raises:
        ArgumentError, ArgumentTypeError: an argument does not fit, or the ranks' calls differ.
        ParallelError: a rank has ended or did not answer in time.

    Every rank runs this code; here there is one rank, and torchrun starts more.

    >>> import torch, regard
    >>> import torch.distributed as dist
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> x, mask = torch.randn(1, 2, 16, 8), regard.masks.Causal()
    >>> shards = regard.parallel.Shards.zigzag(16, dist.get_world_size())
    >>> own = shards.take(x, dist.get_rank())  # the tokens that this rank holds
    >>> z = regard.parallel.attend(own, own, own, shards=shards, mask=mask)
    >>> torch.allclose(z, regard.attend(x, x, x, mask=mask), atol=1e-5)
    True
    >>> dist.destroy_process_group()

    Source: Liu et al. 2023 (arXiv 2310.01889); Jacobs et al. 2023 (arXiv 2309.14509); Fang and Zhao
    2024 (arXiv 2405.07719).
    """
    q_shards = shards if q_shards is None else q_shards
    if method == "both" or (isinstance(group, Sequence) and method == "auto"):
        return attend_by_nodes(q, k, v, (shards, q_shards, parameter_gradients), group, options)
    if isinstance(group, Sequence):
        raise ArgumentError(
            f"two groups were given for the method {method!r}; only the method 'both' takes two"
        )
    ranks = RankGroup(group)
    call = check_call(q, k, v, CallShards(ranks, q_shards, shards, parameter_gradients), options)
    ranks.agree("attend", call_facts(q, k, v, call, method))
    chosen = _choose_method(q, k, v, call, method)
    sink = options.get("sink")
    if sink is not None:
        sink = call.parameter(sink)
    if chosen == "heads":
        return attend_by_heads(q, k, v, call, sink)
    out, lse = (exchange if chosen == "exchange" else gather)(q, k, v, call)
    return (out if sink is None else apply_sink(out, lse, sink)).to(q.dtype)


def _choose_method(q: Tensor, k: Tensor, v: Tensor, call: RankedCall, method: Method) -> str:
    """Return the method to use; "auto" compares the plans of the methods."""
    H, G, W = q.shape[1], k.shape[1], call.ranks.world
    why = why_not_heads(H, G, W)
    if method == "heads" and why:
        raise ArgumentError(why)
    if method == "auto":
        if why or call.bias is not None:
            return "exchange"
        dims = (q.shape[3], v.shape[3])
        return cheapest_method(call.shards, call.q_shards, call.mask, (H, G), dims)
    if method not in METHODS:
        raise ArgumentError(f"method is {method!r}; it must be auto or one of {', '.join(METHODS)}")
    return method


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
