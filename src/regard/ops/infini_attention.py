"""Infini-attention, and the functions that read and write its compressive memory."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.argument_checks import (
    check_device,
    check_groups,
    check_int,
    check_positions,
    check_query_key_value,
    check_sizes,
    check_tensor,
)
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Causal, Chunk
from regard.ops.softmax import attend
from regard.process_state import is_compiling
from regard.span import Positions, Span, as_tensor, slice_positions, slot_count
from regard.units import plural

UpdateRule: TypeAlias = Literal["linear", "delta"]
"""How values are written to the memory: as they are, or their difference from what it returns."""


class CompressiveState(NamedTuple):
    """The content of a compressive memory, in fp32 (fp64 for fp64 inputs).

    Args:
        M: `[B, G, D, E]`, the sum of sigma(k)^T v over the tokens that were written.
        z: `[B, G, D]`, the sum of sigma(k).
    """

    M: Tensor
    z: Tensor


class MemoryRead(NamedTuple):
    """The result of reading a compressive memory.

    Args:
        values: `[B, H, T, E]`, the weighted mean of the stored values; 0 where nothing was stored.
        has_memory: `[B, H, T]`, whether anything was stored for the query to read.
    """

    values: Tensor
    has_memory: Tensor


def elu_plus_one(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Apply the feature map sigma(x) = elu(x) + 1: x + 1 above 0, exp(x) below.

    Args:
        x: a floating-point tensor of any shape.

    Returns:
        A tensor of the same shape and dtype.

    >>> elu_plus_one(torch.tensor([-200.0, 0.0, 2.0], dtype=torch.float64)).tolist()
    [1.3838965267367376e-87, 1.0, 3.0]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equation 7.
    """
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def empty_state(k: Tensor, v: Tensor) -> CompressiveState:
    """Return the memory of zeros before the first token, for keys and values."""
    B, G, _, D = k.shape
    dtype = state_dtype(k)
    return CompressiveState(
        torch.zeros(B, G, D, v.shape[-1], dtype=dtype, device=k.device),
        torch.zeros(B, G, D, dtype=dtype, device=k.device),
    )


def state_dtype(k: Tensor) -> torch.dtype:
    """Return the dtype of a memory, a sum over a whole sequence: fp64 for fp64 keys, else fp32."""
    return torch.float64 if k.dtype == torch.float64 else torch.float32


def retrieve(
    q: Float[Tensor, "B H T D"],
    state: tuple[Float[Tensor, "B G D E"], Float[Tensor, "B G D"]],
    where: Bool[Tensor, "#B T"] | None = None,
) -> MemoryRead:
    """Read from the memory the mean of the stored values, weighted by sigma(q) . sigma(k).

    A = sigma(q) M / (sigma(q) z), with sigma(x) = elu(x) + 1

    Query head h reads memory h // (H/G). Where nothing was stored the output is 0 rather than 0/0.

    Args:
        q: queries `[B, H, T, D]` without position encoding.
        state: M `[B, G, D, E]` and z `[B, G, D]`.
        where: bool `[B or 1, T]`, which queries read the memory; the others get 0. None: all.

    Returns:
        The values that were read, and for which queries anything was stored.

    Raises:
        ArgumentError, ArgumentTypeError: sizes, dtypes or devices do not agree.

    >>> k, v = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 3)
    >>> state = write(k, v, empty_state(k, v))
    >>> torch.allclose(retrieve(k, state).values, v)
    True

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), equation 7.
    """
    M, z = state
    mask_size = {} if where is None else {"where": (where, "#B T")}
    sizes = check_sizes(q=(q, "B H T D"), M=(M, "B G D E"), z=(z, "B G D"), **mask_size)
    check_groups(sizes["H"], sizes["G"])
    _check_dtypes(state, where, q=q)
    q = q.to(M.dtype) if where is None else torch.where(_as_row_mask(where), q, 0).to(M.dtype)
    # The features are multiplied by exp(-largest), so that they do not underflow for a query far
    # below 0. Numerator and denominator contain this factor, so that it cancels.
    largest = q.detach().amax(-1, keepdim=True).clamp(max=0)
    features = torch.where(q > 0, q + 1, (q.clamp(max=0) - largest).exp())
    G, shape = M.shape[1], (q.shape[1] // M.shape[1], q.shape[2])
    grouped = torch.unflatten(features, 1, (G, shape[0])).flatten(2, 3)  # [B,G,(H/G)*T,D]
    total = torch.unflatten(grouped @ z.unsqueeze(-1), 2, shape).flatten(1, 2)  # [B,H,T,1]
    mixed = torch.unflatten(grouped @ M, 2, shape).flatten(1, 2)  # [B,H,T,E]
    is_zero = total == 0 if where is None else (total == 0) | ~_as_row_mask(where)
    values = torch.where(is_zero, 0, mixed / total.masked_fill(is_zero, 1))
    return MemoryRead(values, ~is_zero.squeeze(-1))


def write(
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    state: tuple[Float[Tensor, "B G D E"], Float[Tensor, "B G D"]],
    update: UpdateRule = "linear",
    where: Bool[Tensor, "#B S"] | None = None,
) -> CompressiveState:
    """Add the keys and values of one segment to the memory.

    M' = M + sigma(k)^T u,  z' = z + sum_t sigma(k_t)
    u = v, or with update="delta" v - sigma(k) M / (sigma(k) z)

    With "delta" all keys read the memory before the segment. What is stored already leaves M
    unchanged, but z grows: after v was written twice, a read returns v / 2.

    Args:
        k: keys `[B, G, S, D]` without position encoding.
        v: values `[B, G, S, E]`.
        state: M `[B, G, D, E]` and z `[B, G, D]`; they are not changed.
        update: the update rule, "linear" or "delta".
        where: bool `[B or 1, S]`, which keys and values are written. None: all.

    Returns:
        The memory with the segment added.

    Raises:
        ArgumentError, ArgumentTypeError: sizes, dtypes or devices do not agree.

    >>> k, v = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 3)
    >>> once = write(k, v, empty_state(k, v), "delta")
    >>> retrieve(k, write(k, v, once, "delta")).values.flatten().tolist()
    [0.5, 0.5, 0.5]

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), equations 8 (linear) and 9 (delta).
    """
    M, z = state
    mask_size = {} if where is None else {"where": (where, "#B S")}
    check_sizes(k=(k, "B G S D"), v=(v, "B G S E"), M=(M, "B G D E"), z=(z, "B G D"), **mask_size)
    _check_dtypes(state, where, k=k, v=v)
    if where is not None:
        k, v = torch.where(_as_row_mask(where), k, 0), torch.where(_as_row_mask(where), v, 0)
    k, v = k.to(M.dtype), v.to(M.dtype)
    features = elu_plus_one(k)
    if update == "delta":
        v = v - retrieve(k, state).values
    if where is not None:
        features = torch.where(_as_row_mask(where), features, 0)
    return CompressiveState(M + features.transpose(-1, -2) @ v, z + features.sum(2))


def _check_dtypes(state: tuple[Tensor, Tensor], where: Tensor | None, **tokens: Tensor) -> None:
    """Check that the tokens have one float dtype, the memory its `state_dtype`, `where` bool."""
    (name, first), *others = tokens.items()
    check_tensor(name, first)
    for other, x in others:
        if x.dtype != first.dtype:
            raise ArgumentTypeError(
                f"{name} is {first.dtype} and {other} is {x.dtype}; both must have one dtype: "
                "convert one with .to()"
            )
    for other, x in zip(("M", "z"), state, strict=True):
        if x.dtype != state_dtype(first):
            raise ArgumentTypeError(
                f"{other} is {x.dtype} for tokens of {first.dtype}; it must be "
                f"{state_dtype(first)}, as regard.memory.write returns it"
            )
    if where is not None and where.dtype != torch.bool:
        raise ArgumentTypeError(
            f"where is {where.dtype}; it must be bool, with True = a token: use where.bool()"
        )


def _as_row_mask(where: Tensor) -> Tensor:
    """Reshape a mask `[B, L]` to `[B, 1, L, 1]`."""
    return where[:, None, :, None]


class InfiniSegment(NamedTuple):
    """The queries and keys of a call that belong to one segment.

    Args:
        queries, keys: ranges of the call that contain those of the segment.
        query_mask, write_mask: bool `[B or 1, t]`, `[B or 1, s]`: which of them are; None: all.
        closed: whether its last position or a later one is in the call, so that it is written.
    """

    queries: slice
    keys: slice
    query_mask: Tensor | None
    write_mask: Tensor | None
    closed: bool


def segments_of_call(
    positions: Positions, T: int, size: int, device: torch.device | None = None
) -> Iterator[InfiniSegment]:
    """Yield the segments of a call in order, given the positions of its keys; its queries are those
    of the last T keys, and position p is in segment p // size.
    """
    if slot_count(positions) == 0:
        return
    compiling = is_compiling()
    if isinstance(positions, Span) and (size <= T or not compiling):
        yield from _span_segments(positions, T, size)
    # A span with fewer queries than positions in a segment is also handled here, so that one
    # compiled graph serves it wherever the segment border is.
    elif compiling:
        yield from _graph_segments(as_tensor(positions, device), T, size)
    else:
        yield from _row_segments(as_tensor(positions), T, size)


def _span_segments(keys: Span, T: int, size: int) -> Iterator[InfiniSegment]:
    """Yield the segments for one run of positions in all rows, without reading a tensor."""
    earlier_keys, first_segment = keys.length - T, keys.start // size
    segment_count = (keys.stop - 1) // size - first_segment + 1
    for i in range(segment_count):
        first = 0 if i == 0 else (first_segment + i) * size - keys.start
        last = (
            keys.length if i == segment_count - 1 else (first_segment + i + 1) * size - keys.start
        )
        queries = slice(max(first - earlier_keys, 0), max(last - earlier_keys, 0))
        yield InfiniSegment(
            queries, slice(first, last), None, None, i < segment_count - 1 or keys.stop % size == 0
        )


def _row_segments(positions: Tensor, T: int, size: int) -> Iterator[InfiniSegment]:
    """Yield the segments for positions that differ between rows, with masks of slots."""
    numbers, first_open = _segment_numbers(positions, size)
    earlier_keys = positions.shape[1] - T
    for number in torch.unique(numbers[positions >= 0]).tolist():
        inside = (numbers == number) & (positions >= 0)
        slots = inside.any(0).nonzero()
        keys = slice(int(slots[0]), int(slots[-1]) + 1)
        queries = slice(max(keys.start - earlier_keys, 0), max(keys.stop - earlier_keys, 0))
        writes = inside[:, keys] & (number < first_open)
        yield InfiniSegment(
            queries, keys, inside[:, earlier_keys:][:, queries], writes, bool(writes.any())
        )


def _graph_segments(positions: Tensor, T: int, size: int) -> Iterator[InfiniSegment]:
    """Yield the segments in a graph: as many as T positions can touch, with all slots."""
    numbers, first_open = _segment_numbers(positions, size)
    used = positions >= 0
    first = numbers.masked_fill(~used, torch.iinfo(numbers.dtype).max).amin(1, keepdim=True)
    earlier_keys, segment_count = positions.shape[1] - T, -(-T // size) + 1
    fits = torch.where(used, numbers - first < segment_count, True).all()
    torch._assert_async(
        fits, "the positions skip whole segments; call this function without torch.compile"
    )
    for index in range(segment_count):
        inside = (numbers == first + index) & used
        yield InfiniSegment(
            slice(0, T),
            slice(0, positions.shape[1]),
            inside[:, earlier_keys:],
            inside & (numbers < first_open),
            closed=True,
        )


def _segment_numbers(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Return the segment number of every slot `[B, S]`, and each row's first open one."""
    last = positions.amax(1, keepdim=True).clamp(min=-1)
    return positions.div(size, rounding_mode="floor"), (last + 1).div(size, rounding_mode="floor")


EmptyMemoryRule: TypeAlias = Literal["zero", "skip"]
"""The output of an empty memory: a gated sum with 0, or the local attention alone."""


def infini_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    *,
    gate: Float[Tensor, " H"],
    segment: int,
    q_rotated: Float[Tensor, "B H T D"] | None = None,
    k_rotated: Float[Tensor, "B G S D"] | None = None,
    update: UpdateRule = "linear",
    empty: EmptyMemoryRule = "zero",
    state: tuple[Float[Tensor, "B G D E"], Float[Tensor, "B G D"]] | None = None,
    positions: Positions | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "B H T E"], CompressiveState]:
    """Compute Infini-attention: softmax in segments of N positions, and a memory of the rest.

    A_dot = softmax(q_rotated k_rotated^T / sqrt(D)) v, causal, over the keys of the same segment
    A_mem = sigma(q) M / (sigma(q) z),  sigma = elu + 1, over all earlier segments
    out = sigmoid(gate_h) A_mem + (1 - sigmoid(gate_h)) A_dot

    A segment is written after its queries have read the memory: M, z = write(k, v, (M, z), update).
    The state is the memory of all closed segments, whose last position is in a call. The next call
    must pass the keys and values of an open segment again; `regard.caches.Memory` stores them.

    In the first segment A_mem is 0/0. With `empty="zero"` it is then 0, so that equation 10 holds.
    With "skip" the gate has no effect: one segment gets ordinary attention.

    Args:
        q: queries `[B, H, T, D]` without position encoding.
        k: keys `[B, G, S, D]` without position encoding, S >= T.
        v: values `[B, G, S, E]`.
        gate: one logit per head `[H]`; 0 weights A_mem and A_dot equally, -inf gives A_dot alone.
        segment: N, the number of positions in a segment.
        q_rotated, k_rotated: with position encoding, for A_dot; None: q and k.
        update: the update rule of the memory, "linear" or "delta".
        empty: the output while the memory is empty, "zero" or "skip".
        state: M `[B, G, D, E]` and z `[B, G, D]` of an earlier call; None: empty.
        positions: of the keys, a `Span` or integers `[B or 1, S]`; default 0 to S - 1. Slots at -1
            are empty. A later call must continue those of earlier ones.
        backend: the kernel of the softmax attention, as in `regard.attend`.

    Returns:
        The output `[B, H, T, E]` in the dtype of q, and the memory after the last closed segment.

    Raises:
        ArgumentError, ArgumentTypeError: an argument is invalid.
        KernelRefusal: the requested backend cannot compute the local attention.

    >>> q, k, v = torch.randn(3, 1, 2, 10, 8).unbind(0)
    >>> out, state = infini_attention(q, k, v, gate=torch.zeros(2), segment=4)
    >>> out.shape, state.M.shape, state.z.shape
    (torch.Size([1, 2, 10, 8]), torch.Size([1, 2, 8, 8]), torch.Size([1, 2, 8]))

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), equations 4 to 10, with sqrt(D).
    """
    positions = Span(0, k.shape[2]) if positions is None else positions
    _check_tensors(q, k, v, gate, state, positions)
    check_options(segment, update, empty)
    q_rotated, k_rotated = _rotated_or_plain(q, k, q_rotated, k_rotated)
    T = q.shape[2]
    local = attend(
        q_rotated,
        k_rotated,
        v,
        mask=Causal() & Chunk(segment),
        k_positions=positions,
        q_positions=slice_positions(positions, slice(k.shape[2] - T, None)),
        backend=backend,
    )
    memory = empty_state(k, v) if state is None else CompressiveState(*state)
    with torch.autocast(q.device.type, enabled=False):
        read, memory = _read_and_write_segments(
            q, k, v, memory, update, list(segments_of_call(positions, T, segment, q.device))
        )
        mixed = _gate_outputs(gate.to(read.values.dtype), read, local, empty)
    return mixed.to(local.dtype), memory


def _read_and_write_segments(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    state: CompressiveState,
    update: UpdateRule,
    segments: list[InfiniSegment],
) -> tuple[MemoryRead, CompressiveState]:
    """Process the segments in order: queries read the memory, then keys are written."""
    reads = []
    for segment in segments:
        if segment.queries.stop > segment.queries.start:
            reads.append((segment, retrieve(q[:, :, segment.queries], state, segment.query_mask)))
        if segment.closed:
            keys, values = k[:, :, segment.keys], v[:, :, segment.keys]
            state = write(keys, values, state, update, segment.write_mask)
    return _collect_reads(q, state, reads), state


def _collect_reads(
    q: Tensor, state: CompressiveState, reads: list[tuple[InfiniSegment, MemoryRead]]
) -> MemoryRead:
    """Join the reads of all segments, by concatenation or by their masks."""
    if reads and all(segment.query_mask is None for segment, _ in reads):
        return MemoryRead(
            *(torch.cat(xs, 2) for xs in zip(*(read for _, read in reads), strict=True))
        )
    values = state.M.new_zeros(*q.shape[:3], state.M.shape[-1])
    has_memory = torch.zeros(q.shape[:3], dtype=torch.bool, device=q.device)
    for segment, read in reads:
        assert segment.query_mask is not None, "either all segments have masks, or none has"
        slots, belongs = segment.queries, segment.query_mask[:, None]
        values[:, :, slots] = torch.where(belongs[..., None], read.values, values[:, :, slots])
        has_memory[:, :, slots] = torch.where(belongs, read.has_memory, has_memory[:, :, slots])
    return MemoryRead(values, has_memory)


def _gate_outputs(gate: Tensor, read: MemoryRead, local: Tensor, empty: EmptyMemoryRule) -> Tensor:
    """Return sigmoid(gate) A_mem + sigmoid(-gate) A_dot, without a loss of digits."""
    local_weight = torch.sigmoid(-gate)[:, None, None]
    if empty == "skip":
        local_weight = torch.where(read.has_memory[..., None], local_weight, 1)
    return torch.sigmoid(gate)[:, None, None] * read.values + local_weight * local.to(
        read.values.dtype
    )


def _rotated_or_plain(
    q: Tensor, k: Tensor, q_rotated: Tensor | None, k_rotated: Tensor | None
) -> tuple[Tensor, Tensor]:
    """Return the queries and keys for the local attention: rotated, or q and k."""
    if q_rotated is None and k_rotated is None:
        return q, k
    if q_rotated is None or k_rotated is None:
        name = "q_rotated" if q_rotated is None else "k_rotated"
        raise ArgumentError(f"{name} is missing; give both q_rotated and k_rotated, or neither")
    for name, x, like in (("q_rotated", q_rotated, q), ("k_rotated", k_rotated, k)):
        if x.shape != like.shape:
            raise ArgumentError(
                f"{name} is {tuple(x.shape)}; it must have the shape of {name[0]}, "
                f"{tuple(like.shape)}"
            )
    return q_rotated, k_rotated


def check_options(segment: int, update: str, empty: str) -> None:
    """Check that a segment has at least one position and that the two options are valid."""
    check_int("segment", segment, 1)
    for name, value, allowed in (
        ("update", update, ("linear", "delta")),
        ("empty", empty, ("zero", "skip")),
    ):
        if value not in allowed:
            raise ArgumentError(f"{name} is {value!r}; it must be {allowed[0]!r} or {allowed[1]!r}")


def _check_tensors(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    state: tuple[Tensor, Tensor] | None,
    positions: Positions,
) -> None:
    """Check the sizes, dtypes and devices of the tensors, and the positions."""
    check_query_key_value(q, k, v)
    (B, H, T, D), (_, G, S, E) = q.shape, v.shape
    if S < T:
        raise ArgumentError(
            f"{plural(T, 'query')} and {plural(S, 'key')}; the queries are the last slots of the "
            "keys, so there must be at least as many keys"
        )
    check_tensor("gate", gate)
    if tuple(gate.shape) != (H,):
        raise ArgumentError(f"gate is {tuple(gate.shape)}; it must be one logit per head, ({H},)")
    check_device("gate", gate, q)
    check_positions("positions", positions, B, S)
    if isinstance(positions, Span) and positions.start < 0:
        raise ArgumentError(f"positions are {positions}; a segment begins at position 0 or later")
    if state is None:
        return
    for name, x, shape in (("M", state[0], (B, G, D, E)), ("z", state[1], (B, G, D))):
        if tuple(x.shape) != shape:
            raise ArgumentError(
                f"state {name} is {tuple(x.shape)}; for these keys and values it must be {shape}"
            )
        if x.dtype != state_dtype(k):
            raise ArgumentTypeError(
                f"state {name} is {str(x.dtype)[6:]}; it must be {str(state_dtype(k))[6:]}, as an "
                "earlier call returned it"
            )
        check_device(f"state {name}", x, q)
