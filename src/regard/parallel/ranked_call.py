"""One checked call of attention over several ranks, its options, and the attention of one block.

Every rank makes the same call with its part; `call_facts` lists what must be equal.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, TypeAlias, TypedDict

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from regard.argument_checks import check_query_key_value
from regard.biases import Bias
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Full, Mask, Selected
from regard.ops.softmax import Partial, attend_partial
from regard.ops.softmax.attend import part_gradients
from regard.parallel.communication import RankGroup
from regard.parallel.shards import Shards
from regard.sequence_scope import use_scope
from regard.span import Span
from regard.units import plural

Method = Literal["auto", "exchange", "gather", "heads", "both"]


ParameterGradients = Literal["whole", "share"]


METHODS: tuple[Method, ...] = ("exchange", "gather", "heads", "both")


Block: TypeAlias = tuple[int, int, int]
"""A run of keys on one rank: (index of the rank's span, first position, one past the last)."""


class ParallelOptions(TypedDict, total=False):
    """The options of `regard.parallel.attend` and `decode` besides q, k, v and shards.

    Attributes:
        mask, bias: computed from positions, such as `Causal()`; a dense tensor is refused.
        scale, softcap: as in `regard.attend`.
        sink: one sink logit for each query head, [H], the same on every rank.
        backend: the name of the kernel that each rank uses.
    """

    mask: Mask | None
    bias: Bias | None
    scale: float | None
    softcap: float | None
    sink: Tensor | None
    backend: str


@dataclass(frozen=True)
class RankedCall:
    """One checked call.

    Which gradients of sink and bias a rank gets is as in `attend`.
    """

    ranks: Any
    q_shards: Shards
    shards: Shards
    mask: Mask
    bias: Bias | None
    options: dict[str, Any]
    parameter_gradients: ParameterGradients = "whole"

    def parameter(self, x: Tensor, ranks: RankGroup | None = None) -> Tensor:
        """Return a tensor that is equal on all ranks, with the gradient that the caller wants."""
        if self.parameter_gradients == "share":
            return x
        shared: Tensor = _SharedParameter.apply(x, ranks or self.ranks)  # type: ignore[no-untyped-call]
        return shared

    @property
    def queries(self) -> tuple[Span, ...]:
        """The spans of the queries that this rank holds."""
        return self.q_shards.spans(self.ranks.rank)


@dataclass(frozen=True)
class RankNumber:
    """The number of this rank and of all ranks, without a process group."""

    rank: int
    world: int


@dataclass(frozen=True)
class CallShards:
    """The ranks of a call, the shards of its queries and keys, and the gradients that it wants."""

    ranks: RankGroup | RankNumber
    q_shards: Shards
    shards: Shards
    parameter_gradients: ParameterGradients


def check_call(
    q: Tensor, k: Tensor, v: Tensor, call_shards: CallShards, options: ParallelOptions
) -> RankedCall:
    """Check the arguments of a call on this rank."""
    check_query_key_value(q, k, v)
    ranks = call_shards.ranks
    for name, shards, x in (("q", call_shards.q_shards, q), ("k", call_shards.shards, k)):
        if not isinstance(shards, Shards):
            raise ArgumentTypeError(
                f"the shards of {name} are {type(shards).__name__}; they must be Shards, for "
                "example Shards.even(S, W)"
            )
        if shards.world != ranks.world:
            raise ArgumentError(
                f"the shards of {name} are for {plural(shards.world, 'rank')}, but the group has "
                f"{ranks.world}; make shards for {ranks.world}"
            )
        if x.shape[2] != shards.count(ranks.rank):
            raise ArgumentError(
                f"{name} has {plural(x.shape[2], 'token')} on rank {ranks.rank}, but its shard has "
                f"{shards.count(ranks.rank)}; give shards.take({name}, {ranks.rank}). "
                f"The shards are {shards}"
            )
    unknown = set(options) - set(ParallelOptions.__annotations__)
    if unknown:
        raise ArgumentTypeError(
            f"regard.parallel.attend has no argument {', '.join(sorted(unknown))}; its options are "
            f"{', '.join(ParallelOptions.__annotations__)}"
        )
    if call_shards.parameter_gradients not in ("whole", "share"):
        raise ArgumentError(
            f"parameter_gradients is {call_shards.parameter_gradients!r}; it must be 'whole' or "
            "'share'"
        )
    mask, bias = options.get("mask"), options.get("bias")
    for name, rule, kind in (("mask", mask, Mask), ("bias", bias, Bias)):
        if rule is not None and (not isinstance(rule, kind) or _depends_on_slots(rule)):
            raise ArgumentTypeError(
                f"{name} is {rule if isinstance(rule, kind) else type(rule).__name__}, which "
                "depends on the indices of one call's tensors, which differ between ranks; give a "
                f"{name} that is computed from positions"
            )
    names = ("scale", "softcap", "backend")
    return RankedCall(
        ranks,
        call_shards.q_shards,
        call_shards.shards,
        Full() if mask is None else mask,
        bias,
        {name: options[name] for name in names if name in options},  # type: ignore[literal-required]
        call_shards.parameter_gradients,
    )


def _depends_on_slots(rule: Mask | Bias) -> bool:
    """Whether a mask or bias depends on tensor indices instead of positions."""
    if rule.by_slot or isinstance(rule, Selected):
        return True
    return isinstance(rule, Mask) and any(map(_depends_on_slots, rule.members()))


def call_facts(q: Tensor, k: Tensor, v: Tensor, call: RankedCall, method: str) -> dict[str, object]:
    """Return the facts that must be equal on all ranks, by name."""
    sizes = [(x.shape[0], x.shape[1], x.shape[3]) for x in (q, k, v)]
    return {
        "the sizes [B, heads, dim] of q, k and v": sizes,
        "the dtypes": [x.dtype for x in (q, k, v)],
        "the shards of the keys": call.shards.ranks,
        "the shards of the queries": call.q_shards.ranks,
        "the mask": call.mask,
        "the bias": call.bias,
        "the options": sorted(call.options.items()),
        "the method": method,
        "parameter_gradients": call.parameter_gradients,
        "which of q, k and v want a gradient": [
            torch.is_grad_enabled() and x.requires_grad for x in (q, k, v)
        ],
    }


class _SharedParameter(torch.autograd.Function):
    """Mark a tensor that is equal on all ranks, whose gradient is summed over them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, ranks: RankGroup) -> Tensor:
        ctx.ranks = ranks
        return x.view_as(x)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return ctx.ranks.sum("parameters", gradient), None


def query_rows(spans: tuple[Span, ...]) -> list[tuple[slice, Span]]:
    """Return each span of queries with its rows in the rank's tensors."""
    rows, start = [], 0
    for span in spans:
        rows.append((slice(start, start + len(span)), span))
        start += len(span)
    return rows


def block_span(block: Block) -> Span:
    """Return the positions of a block as a `Span`."""
    return Span(block[1], block[2] - block[1])


def attend_block(
    call: RankedCall,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    span: Span,
    block: Block,
    bias: Bias | None,
) -> Partial:
    """Compute attention of one span of queries over one block of keys: (out, lse)."""
    with use_scope(None):  # the block itself is computed on this rank
        return attend_partial(
            q, k, v, bias=bias, out_dtype=_part_dtype(call, q), **_block_options(call, span, block)
        )


def block_gradients(
    call: RankedCall,
    inputs: tuple[Tensor, ...],
    span: Span,
    block: Block,
    whole: Partial,
    gradients: tuple[Tensor, Tensor | None],
) -> tuple[Tensor | None, ...]:
    """Compute the gradients of one block of keys from the output and lse over all blocks.

    `inputs` are q, k, v and the tensors of the bias; `gradients` those of output and lse.
    """
    q, k, v, *tensors = inputs
    learned = [x.detach().requires_grad_() for x in tensors]
    bias = None if call.bias is None else call.bias.with_tensors(learned)
    with use_scope(None):
        return part_gradients(
            q,
            k,
            v,
            whole,
            gradients,
            bias=bias,
            out_dtype=_part_dtype(call, q),
            **_block_options(call, span, block),
        )


def _block_options(call: RankedCall, span: Span, block: Block) -> dict[str, Any]:
    """Return the options of the attention of a span of queries over a block of keys."""
    positions = {"q_positions": span, "k_positions": block_span(block)}
    return {"mask": call.mask, **positions, **call.options}


UNROUNDED_BACKENDS = ("auto", "cpu", "gemm", "tiled", "reference")
"""The backends that leave the parts of a half-precision call in fp32, on a CPU."""


def _part_dtype(call: RankedCall, q: Tensor) -> torch.dtype:
    """Return the dtype in which the parts leave a kernel."""
    unrounded = q.is_cpu and call.options.get("backend", "auto") in UNROUNDED_BACKENDS
    return torch.promote_types(q.dtype, torch.float32) if unrounded else q.dtype


def shared_bias(call: RankedCall, ranks: RankGroup) -> Bias | None:
    """Return the bias, if wanted with tensors whose gradients are summed over the ranks."""
    if call.bias is None:
        return None
    return call.bias.with_tensors([call.parameter(x, ranks) for x in call.bias.tensors()])
