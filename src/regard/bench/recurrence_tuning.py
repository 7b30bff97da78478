"""The table of block sizes of the recurrences, as `regard bench --tune` measures it."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from regard.bench.block_tuning import TunedTable
from regard.ops.linear.call import RecurrenceCall
from regard.ops.linear.triton.block_sizes import (
    TABLE,
    ChunkSizes,
    RecurrenceSizes,
    RecurrenceSizesKey,
    try_recurrence_sizes,
)
from regard.ops.triton_support import Launch

KERNELS = {
    "states": ("chunk_states", "write_nans", "gradients_of_states"),
    "parallel": ("chunk_outputs", "gradients_of_updates"),
    "gradients": ("gradients_of_inputs", "gradients_of_corrections", "gradients_of_system"),
    "solve": ("solve_chunk",),
}
"""Kind -> the kernels whose sizes its rows have."""


def candidates(key: RecurrenceSizesKey, current: ChunkSizes) -> list[RecurrenceSizes]:
    """Return the sizes that are tried for a row: those of the table first, then those with at most
    twice and at least half as many channels and columns.

    >>> key = RecurrenceSizesKey("states", False, 128)
    >>> candidates(key, TABLE[key])[0], len(candidates(key, TABLE[key]))
    (RecurrenceSizes(channels=64, columns=32, warps=8, stages=2), 18)
    """
    first = RecurrenceSizes(*current[1:])
    # the kernels that pass a state read all channels
    channels = (first.channels,) if key.kind == "states" else (16, 32, 64)
    sizes = [
        RecurrenceSizes(n, m, warps, stages)
        for n in channels
        if first.channels <= 2 * n <= 4 * first.channels
        for m in (16, 32, 64)
        if first.columns <= 2 * m <= 4 * first.columns
        for warps in (4, 8)
        for stages in (1, 2, 3)
    ]
    return [first, *(x for x in sizes if x != first)]


def problem_of(key: RecurrenceSizesKey, device: torch.device) -> RecurrenceCall:
    """Return a gated delta rule with which a row of the table is measured.

    Args:
        key: the row.
        device: the device.

    Returns:
        The recurrence, on random inputs of 2048 tokens and 32 heads.
    """
    B, N, T, D = 1, 32, 2048, key.width
    draw = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=draw)

    q, v, k = drawn(B, N, T, D), drawn(B, N, T, D), F.normalize(drawn(B, N, T, D), dim=-1)
    beta = drawn(B, N, T, 1).sigmoid()
    log_decay = -drawn(B, N, T, D if key.by_channel else 1).exp() / 10
    halves = (x.to(device, torch.bfloat16) for x in (q, k, v, beta, log_decay))
    q, k, v, beta, log_decay = halves
    state = torch.zeros(B, N, D, D, device=device)
    half = torch.bfloat16
    return RecurrenceCall(q, k, v, state, beta, log_decay, D**-0.5, half, half)


def launches_of(call: RecurrenceCall) -> list[Launch]:
    """Return the launches of both passes of a recurrence, in their order, with the sizes that are
    tried at the moment.
    """
    from regard.ops.linear.triton.launch import backward_launches, forward_launches

    forward, buffers = forward_launches(call)
    d_out = torch.randn_like(buffers.out)
    backward, _ = backward_launches(call, buffers, d_out, torch.zeros_like(call.state))
    return [*forward, *backward]


def _launches_of_row(
    key: RecurrenceSizesKey, device: torch.device
) -> Callable[[RecurrenceSizes], tuple[list[Launch], list[Launch]]]:
    """Return a function that prepares the kernels of a row: all run once, for their inputs are the
    results of others, and those of the row's kind are timed.
    """
    call = problem_of(key, device)

    def prepared(sizes: RecurrenceSizes) -> tuple[list[Launch], list[Launch]]:
        with try_recurrence_sizes(key, sizes):
            launches = launches_of(call)
        return launches, [x for x in launches if x.kernel.__name__ in KERNELS[key.kind]]

    return prepared


def row_name(key: RecurrenceSizesKey) -> str:
    """Return the words for a row.

    >>> row_name(RecurrenceSizesKey("solve", True, 256))
    'recurrence, solve, a decay per channel, D up to 256'
    """
    decay = "channel" if key.by_channel else "head"
    return f"recurrence, {key.kind}, a decay per {decay}, D up to {key.width}"


RECURRENCES = TunedTable(
    "regard.ops.linear.triton.block_sizes", TABLE, candidates, _launches_of_row, row_name
)
"""The table of the kernels of recurrences."""
