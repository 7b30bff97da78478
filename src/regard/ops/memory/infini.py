"""Infini-attention: softmax attention inside a segment, and a compressive memory of the earlier
segments.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor

from regard.argument_checks import (
    check_device,
    check_positions,
    check_query_key_value,
    check_tensor,
)
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import Causal, Chunk
from regard.masks.base import check_int
from regard.ops.memory.compressive import (
    Compressed,
    Read,
    Update,
    nothing,
    retrieve,
    state_dtype,
    write,
)
from regard.ops.softmax import attend
from regard.process_state import is_compiling
from regard.span import Positions, Span, as_tensor, slice_positions, slot_count


class Piece(NamedTuple):
    """One segment, as far as a call has it.

    queries: the slots of the call's queries among which those of the segment are.
    keys: the same for keys.
    q_in: [B or 1, t], which of these queries belong to it; None is all.
    k_in: [B or 1, s], which of these keys are to be written; None is all.
    closed: whether there may be anything to write: the segment's last position, or a later one, has
        been seen.
    """

    queries: slice
    keys: slice
    q_in: Tensor | None
    k_in: Tensor | None
    closed: bool


def pieces(
    positions: Positions, T: int, size: int, device: torch.device | None = None
) -> Iterator[Piece]:
    """The segments of a call whose keys stand at `positions`, and whose queries are the last T of
    them, in order.

    Position p belongs to segment p // size; segment s is closed when position (s + 1) size - 1 or a
    later one of its row has been seen.

    >>> [(piece.queries, piece.keys, piece.closed) for piece in pieces(Span(4, 6), 3, 4)]
    [(slice(0, 1, None), slice(0, 4, None), True), (slice(1, 3, None), slice(4, 6, None), False)]
    """
    if slot_count(positions) == 0:
        return
    compiling = is_compiling()
    if isinstance(positions, Span) and (size <= T or not compiling):
        yield from _of_a_span(positions, T, size)
    # also a few tokens at a span: its graph serves them in front of a border, across and behind it
    elif compiling:
        yield from _of_a_graph(as_tensor(positions, device), T, size)
    else:
        yield from _of_rows(as_tensor(positions), T, size)


def _of_a_span(keys: Span, T: int, size: int) -> Iterator[Piece]:
    """All rows alike: slices, and nothing to read."""
    held, base = keys.length - T, keys.start // size
    n = (keys.stop - 1) // size - base + 1
    for i in range(n):
        first = 0 if i == 0 else (base + i) * size - keys.start
        last = keys.length if i == n - 1 else (base + i + 1) * size - keys.start
        queries = slice(max(first - held, 0), max(last - held, 0))
        yield Piece(queries, slice(first, last), None, None, i < n - 1 or keys.stop % size == 0)


def _of_rows(positions: Tensor, T: int, size: int) -> Iterator[Piece]:
    """Rows whose borders differ: the slots between the first and the last one of any row, and which
    of them it is.
    """
    segment, open_ = _segments(positions, size)
    held = positions.shape[1] - T
    for s in torch.unique(segment[positions >= 0]).tolist():
        inside = (segment == s) & (positions >= 0)
        slots = inside.any(0).nonzero()
        keys = slice(int(slots[0]), int(slots[-1]) + 1)
        queries = slice(max(keys.start - held, 0), max(keys.stop - held, 0))
        writes = inside[:, keys] & (s < open_)
        yield Piece(queries, keys, inside[:, held:][:, queries], writes, bool(writes.any()))


def _of_a_graph(positions: Tensor, T: int, size: int) -> Iterator[Piece]:
    """As rows, in a compiled graph, which reads no tensor: as many segments as T tokens without a
    gap can touch.
    """
    segment, open_ = _segments(positions, size)
    used = positions >= 0
    first = segment.masked_fill(~used, torch.iinfo(segment.dtype).max).amin(1, keepdim=True)
    held, most = positions.shape[1] - T, -(-T // size) + 1
    fits = torch.where(used, segment - first < most, True).all()
    torch._assert_async(
        fits, "positions have gaps of whole segments; call it without torch.compile"
    )
    for n in range(most):
        inside = (segment == first + n) & used
        yield Piece(
            slice(0, T),
            slice(0, positions.shape[1]),
            inside[:, held:],
            inside & (segment < open_),
            closed=True,
        )


def _segments(positions: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """The segment of every slot [B,S], and the first segment of each row that is not closed
    [B,1].
    """
    last = positions.amax(1, keepdim=True).clamp(min=-1)
    return positions.div(size, rounding_mode="floor"), (last + 1).div(size, rounding_mode="floor")


Empty: TypeAlias = Literal["zero", "skip"]
"""What the gate does while there is no memory: it takes its share from local attention, or it is
left out.
"""


def infini_attention(
    q: Float[Tensor, "B H T D"],
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    *,
    gate: Float[Tensor, " H"],
    segment: int,
    q_rotated: Float[Tensor, "B H T D"] | None = None,
    k_rotated: Float[Tensor, "B G S D"] | None = None,
    update: Update = "linear",
    empty: Empty = "zero",
    state: tuple[Float[Tensor, "B G D E"], Float[Tensor, "B G D"]] | None = None,
    positions: Positions | None = None,
    backend: str = "auto",
) -> tuple[Float[Tensor, "B H T E"], Compressed]:
    """Softmax attention inside segments of N positions, mixed with what a memory holds of all
    segments before.

    A_dot = softmax(q_rotated k_rotated^T / sqrt(D), causal, k // N == q // N) v
    A_mem = sigma(q) M / sigma(q) z,  sigma = elu + 1, of the segments in front of the query's own
    out = sigmoid(gate_h) A_mem + (1 - sigmoid(gate_h)) A_dot
    and behind every segment, when its queries have read:  M, z = write(k, v, (M, z), update)

    The state is the memory of all closed segments; a segment is closed when its last position has
    been seen. What a call leaves of an open segment is not in it: give those keys and values again,
    in front of the next ones. Queries are the last T slots. `regard.caches.Memory` holds both.
    Slots at position -1 are not written, and read 0.

    **Empty memory.** In the first segment A_mem is 0/0. `empty="zero"` makes it 0, as equation 10
    then reads: A_dot counts 1 - sigmoid(gate). It is the default, because the equation has one rule
    for every token. `empty="skip"` leaves the gate out until there is a memory: a text of one
    segment is then ordinary attention whatever the gate, which is what a model that was trained
    without memory needs.

    Args:
        q, k, v: without position encoding; S >= T.
        gate: one logit per head; -inf closes it: local attention. 0 is half and half.
        segment: N, how many positions a segment has.
        q_rotated, k_rotated: the same queries and keys with position encoding, for A_dot; None is
            without.
        update: "linear" or "delta".
        empty: "zero" or "skip".
        state: M and z behind an earlier call; None is nothing yet.
        positions: of the keys, a `Span` or [B or 1, S]; default 0 to S-1. Later calls go on behind
            earlier ones.
        backend: of the softmax.

    Raises:
        ArgumentError, ArgumentTypeError: an argument does not fit; raised before anything is
            computed.
        KernelRefusal: the backend asked for cannot run the local attention.

    >>> q, k, v = torch.randn(3, 1, 2, 10, 8).unbind(0)
    >>> out, state = infini_attention(q, k, v, gate=torch.zeros(2), segment=4)
    >>> out.shape, state.M.shape, state.z.shape
    (torch.Size([1, 2, 10, 8]), torch.Size([1, 2, 8, 8]), torch.Size([1, 2, 8]))

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), equations 4 to 10; equation 6 prints
    sqrt(d_model) for sqrt(D).
    """
    positions = Span(0, k.shape[2]) if positions is None else positions
    _check(q, k, v, gate, state, positions)
    check_options(segment, update, empty)
    q_rotated, k_rotated = _rotated(q, k, q_rotated, k_rotated)
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
    memory = nothing(k, v) if state is None else Compressed(*state)
    with torch.autocast(q.device.type, enabled=False):
        read, memory = _through(
            q, k, v, memory, update, list(pieces(positions, T, segment, q.device))
        )
        mixed = _mix(gate.to(read.values.dtype), read, local, empty)
    return mixed.to(local.dtype), memory


def _through(
    q: Tensor, k: Tensor, v: Tensor, state: Compressed, update: Update, plan: list[Piece]
) -> tuple[Read, Compressed]:
    """Segment by segment: the queries read, then the keys are written."""
    reads = []
    for piece in plan:
        if piece.queries.stop > piece.queries.start:
            reads.append((piece, retrieve(q[:, :, piece.queries], state, piece.q_in)))
        if piece.closed:
            keys, values = k[:, :, piece.keys], v[:, :, piece.keys]
            state = write(keys, values, state, update, piece.k_in)
    return _in_place(q, state, reads), state


def _in_place(q: Tensor, state: Compressed, reads: list[tuple[Piece, Read]]) -> Read:
    """What was read, one segment behind the other, or, where rows differ, each at the slots of its
    queries.
    """
    if reads and all(piece.q_in is None for piece, _ in reads):
        return Read(*(torch.cat(xs, 2) for xs in zip(*(read for _, read in reads), strict=True)))
    values = state.M.new_zeros(*q.shape[:3], state.M.shape[-1])
    found = torch.zeros(q.shape[:3], dtype=torch.bool, device=q.device)
    for piece, read in reads:
        assert piece.q_in is not None, "rows are alike in all segments, or in none"
        t, mine = piece.queries, piece.q_in[:, None]
        values[:, :, t] = torch.where(mine[..., None], read.values, values[:, :, t])
        found[:, :, t] = torch.where(mine, read.found, found[:, :, t])
    return Read(values, found)


def _mix(gate: Tensor, read: Read, local: Tensor, empty: Empty) -> Tensor:
    """sigmoid(gate) A_mem + sigmoid(-gate) A_dot, the second one so that it is exact where it is
    small.
    """
    rest = torch.sigmoid(-gate)[:, None, None]
    if empty == "skip":
        rest = torch.where(read.found[..., None], rest, 1)
    return torch.sigmoid(gate)[:, None, None] * read.values + rest * local.to(read.values.dtype)


def _rotated(
    q: Tensor, k: Tensor, q_rotated: Tensor | None, k_rotated: Tensor | None
) -> tuple[Tensor, Tensor]:
    if q_rotated is None and k_rotated is None:
        return q, k
    if q_rotated is None or k_rotated is None:
        name = "q_rotated" if q_rotated is None else "k_rotated"
        raise ArgumentError(f"{name} is missing; give both q_rotated and k_rotated, or neither")
    for name, x, like in (("q_rotated", q_rotated, q), ("k_rotated", k_rotated, k)):
        if x.shape != like.shape:
            raise ArgumentError(
                f"{name} is {tuple(x.shape)}; it must be as {name[0]}, {tuple(like.shape)}"
            )
    return q_rotated, k_rotated


def check_options(segment: int, update: str, empty: str) -> None:
    """A segment has at least one position, and the two words are known."""
    check_int("segment", segment, 1)
    for name, given, allowed in (
        ("update", update, ("linear", "delta")),
        ("empty", empty, ("zero", "skip")),
    ):
        if given not in allowed:
            raise ArgumentError(f"{name} is {given!r}; it must be {allowed[0]!r} or {allowed[1]!r}")


def _check(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    gate: Tensor,
    state: tuple[Tensor, Tensor] | None,
    positions: Positions,
) -> None:
    check_query_key_value(q, k, v)
    (B, H, T, D), (_, G, S, E) = q.shape, v.shape
    if S < T:
        raise ArgumentError(f"{T} queries and {S} keys; queries are the last slots of the keys")
    check_tensor("gate", gate)
    if tuple(gate.shape) != (H,):
        raise ArgumentError(f"gate is {tuple(gate.shape)}; it holds one logit per head, ({H},)")
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
                f"state {name} is {str(x.dtype)[6:]}; it must be {str(state_dtype(k))[6:]}, as a "
                "call returned it"
            )
        check_device(f"state {name}", x, q)
