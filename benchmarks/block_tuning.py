"""`python -m benchmarks --tune`: measuring the block sizes of Triton kernels on a device.

For each row of the table several sizes are compiled and timed in turns. Sizes that spill registers
or need more shared memory than the device has are left out, and the row changes only if another one
is clearly faster, so that noise changes nothing. The result is Python text for a reviewer, who
enters it in `MEASURED` of the file that the text names; no program reads it. There is a table for
attention, and one for recurrences.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F

from regard.errors import RegardError
from regard.masks import Causal
from regard.ops.linear.call import RecurrenceCall
from regard.ops.linear.triton.block_sizes import TABLE as RECURRENCE_TABLE
from regard.ops.linear.triton.block_sizes import (
    ChunkSizes,
    RecurrenceSizes,
    RecurrenceSizesKey,
    try_recurrence_sizes,
)
from regard.ops.softmax.call import Call, make_call
from regard.ops.softmax.triton.block_sizes import (
    TABLE,
    KernelKind,
    LaunchSizes,
    SizesKey,
    try_sizes,
)
from regard.ops.triton_support import Launch, has_triton
from regard.timing import interleaved, median, wait_for
from regard.units import plural

MIN_GAIN = 0.03
"""The share of time by which sizes must be faster than those of the table to replace them."""

MAX_SPILLED_BYTES = 40
"""The largest number of bytes that a program may spill."""


RowKey: TypeAlias = SizesKey | RecurrenceSizesKey
"""The row of a table."""
RowSizes: TypeAlias = LaunchSizes | RecurrenceSizes
"""The sizes that are tried for a row."""


class Trial(NamedTuple):
    """What was measured of one choice of sizes."""

    sizes: RowSizes
    seconds: float | None = None
    spilled: int = 0
    shared: int = 0
    why: str = ""


class Proposal(NamedTuple):
    """The row of a table that a reviewer may enter; `chosen` are the proposed sizes."""

    key: RowKey
    current: Trial
    chosen: Trial
    trials: tuple[Trial, ...]


Measure = Callable[[Any, Sequence[Any]], list[Trial]]
"""Runs the kernels of a row with each of some sizes on a device."""


class TunedTable(NamedTuple):
    """A table of block sizes, and how its rows are measured.

    Args:
        module: the module whose `MEASURED` has the rows.
        rows: the rows, with the sizes that they have now.
        candidates: returns the sizes that are tried for a row, those of the table first.
        launches: returns a function that prepares the kernels of a row on a device: from sizes, the
            launches that must run before, and those that are timed.
    """

    module: str
    rows: Mapping[Any, Any]
    candidates: Callable[[Any, Any], list[Any]]
    launches: Callable[[Any, torch.device], Callable[[Any], tuple[list[Launch], list[Launch]]]]
    row_name: Callable[[Any], str]


def candidates(key: SizesKey, current: LaunchSizes) -> list[LaunchSizes]:
    """Return the sizes that are tried: those of the row, then those of half to twice as much."""
    decodes = key.kind == "decode"
    rows = (16,) if decodes else (16, 32, 64, 128) if key.half else (16, 32, 64)
    keys = (16, 32, 64, 128)
    stages = (1, 2, 3, 4) if decodes else (1, 2, 3)
    sizes = [
        LaunchSizes(m, n, warps, s)
        for m in rows
        if current.rows <= 2 * m <= 4 * current.rows
        for n in keys
        if current.keys <= 2 * n <= 4 * current.keys
        for warps in (4, 8)
        for s in stages
        # a tile of scores per thread, and tiles of keys and values that can fit
        if 1024 <= m * n * (8 if decodes else 1) <= 16384 and n * key.width * s <= 65536
    ]
    return [current, *(x for x in sizes if x != current)]


def choose(trials: Sequence[Trial], shared_limit: int) -> Trial:
    """Return the trial whose sizes the table should have."""
    allowed = [
        x
        for x in trials
        if x.seconds is not None and x.spilled <= MAX_SPILLED_BYTES and x.shared <= shared_limit
    ]
    if not allowed:
        raise RegardError(
            f"none of {plural(len(trials), 'choice')} of block sizes ran within "
            f"{shared_limit} bytes of shared memory and {MAX_SPILLED_BYTES} spilled bytes; keep "
            "the row of the table"
        )
    first, best = trials[0], min(allowed, key=lambda x: x.seconds or 0.0)
    if first not in allowed:
        return best
    assert first.seconds is not None
    assert best.seconds is not None
    return best if best.seconds < (1 - MIN_GAIN) * first.seconds else first


def tune_table(
    measure: Measure,
    shared_limit: int,
    *,
    table: TunedTable | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> list[Proposal]:
    """Measure the rows of the table, and choose sizes for each."""
    table, proposals = table or ATTENTION, []
    for key, current in table.rows.items():
        sizes, name = table.candidates(key, current), table.row_name(key)
        say(f"{name}: {plural(len(sizes), 'choice')} of block sizes")
        trials = measure(key, sizes)
        try:
            chosen = choose(trials, shared_limit)
        except RegardError as error:
            say(f"{name}: {error}")
            continue
        proposals.append(Proposal(key, trials[0], chosen, tuple(trials)))
    return proposals


def row_name(key: SizesKey) -> str:
    """Return the words for a row."""
    return f"{key.kind}, {2 if key.half else 4} bytes, D up to {key.width}"


def as_python(
    capability: int,
    device: str,
    proposals: Sequence[Proposal],
    table: TunedTable | None = None,
) -> str:
    """Return proposals as the entry of `MEASURED`, with what was measured beside each row."""
    lines = [f"# {(table or ATTENTION).module}"]
    lines.append(
        f"# python -m benchmarks --tune on {device}; times of the new row and of the old one"
    )
    lines.append(f"{capability}: {{")
    for key, current, chosen, _ in proposals:
        row, name = ", ".join(map(str, chosen.sizes)), type(chosen.sizes).__name__
        where = ", ".join(f'"{x}"' if isinstance(x, str) else str(x) for x in key)
        old = "none" if current.seconds is None else f"{1e3 * current.seconds:.3g} ms"
        assert chosen.seconds is not None
        lines.append(
            f"    {type(key).__name__}({where}): {name}({row}),"
            f"  # {1e3 * chosen.seconds:.3g} ms, {old}; spills {chosen.spilled} bytes"
        )
    return "\n".join([*lines, "},"])


def problem_of(key: SizesKey, device: torch.device) -> Call:
    """Return a causal call that a row of the table is measured with."""
    dtype = torch.bfloat16 if key.half else torch.float32
    decodes = key.kind == "decode"
    D, E = (576, 512) if key.width == 576 else (key.width, key.width)
    H, G, T = (128 if key.width == 576 else 32), (1 if key.width == 576 else 4), 1
    S = 32768 if decodes else 4096 if key.half else 2048
    T = 1 if decodes else S
    draw = torch.Generator().manual_seed(0)
    sizes = ((1, H, T, D), (1, G, S, D), (1, G, S, E))
    q, k, v = (torch.randn(x, generator=draw).to(device, dtype) for x in sizes)
    return make_call(q, k, v, mask=Causal())


def launch_of(kind: KernelKind, call: Call) -> Launch:
    """Return the launch of a kernel for a call, with the sizes that are tried at the moment."""
    from regard.ops.softmax.triton.call_data import BiasData
    from regard.ops.softmax.triton.launch import (
        WantedGradients,
        backward_launches,
        decode_launches,
        forward_launches,
    )

    if kind == "decode":
        return decode_launches(call, BiasData())[0][0]
    launches, result = forward_launches(call, BiasData())
    if kind != "forward":
        d_out = torch.randn_like(result.out)
        launches, _ = backward_launches(call, BiasData(), result, d_out, None, WantedGradients())
    (launch,) = (
        x
        for x in launches
        if x.kernel.__name__ == f"attention_{kind}" and not x.options.get("CAREFUL")
    )
    return launch


def _launches_of_row(
    key: SizesKey, device: torch.device
) -> Callable[[LaunchSizes], tuple[list[Launch], list[Launch]]]:
    """Return a function that prepares the kernel of a row of attention's table."""
    call = problem_of(key, device)

    def prepared(sizes: LaunchSizes) -> tuple[list[Launch], list[Launch]]:
        with try_sizes(key, sizes):
            return [], [launch_of(key.kind, call)]

    return prepared


ATTENTION = TunedTable(
    "regard.ops.softmax.triton.block_sizes", TABLE, candidates, _launches_of_row, row_name
)
"""The table of the kernels of softmax attention."""


def measure_on(device: torch.device, *, table: TunedTable = ATTENTION, rounds: int = 5) -> Measure:
    """Return a function that measures block sizes on a GPU."""
    if device.type != "cuda":
        raise RegardError(
            f"block sizes are measured on a GPU, not on {device.type}: run "
            "`python -m benchmarks --tune FILE` where torch finds a CUDA device"
        )
    if not has_triton():
        raise RegardError("triton is not installed: pip install 'regard[gpu]'")

    def measure(key: RowKey, choices: Sequence[RowSizes]) -> list[Trial]:
        prepared, trials, launches = table.launches(key, device), {}, {}
        for sizes in choices:
            try:
                before, timed_launches = prepared(sizes)
                for launch in before:
                    launch.run()
                compiled = [launch.run() for launch in timed_launches]
                torch.cuda.synchronize(device)
            except Exception as error:  # triton raises errors of many types; each is a result
                first = (str(error).strip() or type(error).__name__).splitlines()[0]
                trials[sizes] = Trial(sizes, why=first[:120])
                continue
            # triton counts registers of 4 bytes
            spilled = 4 * max(int(x.n_spills) for x in compiled)
            shared = max(int(x.metadata.shared) for x in compiled)
            trials[sizes] = Trial(sizes, None, spilled, shared)
            launches[sizes] = timed_launches
        for sizes, seconds in timed(launches, device, rounds).items():
            trials[sizes] = trials[sizes]._replace(seconds=seconds)
        return [trials[x] for x in choices]

    return measure


def shared_memory_limit(device: torch.device) -> int:
    """Return the bytes of shared memory that a program may have on a GPU, as triton asks for it."""
    from triton.runtime import driver

    return int(driver.active.utils.get_device_properties(device.index)["max_shared_mem"])


def timed(
    launches: Mapping[RowSizes, Sequence[Launch]], device: torch.device, rounds: int
) -> dict[RowSizes, float]:
    """Return the median seconds of launches that are timed in turns."""
    names = {str(i): sizes for i, sizes in enumerate(launches)}
    times = interleaved(
        {name: partial(_run_all, launches[sizes]) for name, sizes in names.items()},
        rounds=rounds,
        synchronize=partial(wait_for, device),
    )
    return {sizes: median(times[name]) for name, sizes in names.items()}


def _run_all(launches: Sequence[Launch]) -> None:
    """Run launches in their order."""
    for launch in launches:
        launch.run()


RECURRENCE_KERNELS = {
    "states": ("chunk_states", "write_nans", "gradients_of_states"),
    "parallel": ("chunk_outputs", "gradients_of_updates"),
    "gradients": ("gradients_of_inputs", "gradients_of_corrections", "gradients_of_system"),
    "solve": ("solve_chunk",),
}
"""Kind -> the kernels whose sizes its rows have."""


def recurrence_candidates(key: RecurrenceSizesKey, current: ChunkSizes) -> list[RecurrenceSizes]:
    """Return the sizes that are tried: those of the row, then those of half to twice as much."""
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


def recurrence_of(key: RecurrenceSizesKey, device: torch.device) -> RecurrenceCall:
    """Return a gated delta rule with which a row of the table is measured."""
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
    """Return the launches of both passes of a recurrence with the sizes that are tried now."""
    from regard.ops.linear.triton.launch import backward_launches, forward_launches

    forward, buffers = forward_launches(call)
    d_out = torch.randn_like(buffers.out)
    backward, _ = backward_launches(call, buffers, d_out, torch.zeros_like(call.state))
    return [*forward, *backward]


def _launches_of_recurrence(
    key: RecurrenceSizesKey, device: torch.device
) -> Callable[[RecurrenceSizes], tuple[list[Launch], list[Launch]]]:
    """Return a function that prepares a row's kernels: all run once, and the row's are timed."""
    call = recurrence_of(key, device)

    def prepared(sizes: RecurrenceSizes) -> tuple[list[Launch], list[Launch]]:
        with try_recurrence_sizes(key, sizes):
            launches = launches_of(call)
        return launches, [x for x in launches if x.kernel.__name__ in RECURRENCE_KERNELS[key.kind]]

    return prepared


def recurrence_name(key: RecurrenceSizesKey) -> str:
    """Return the words for a row."""
    decay = "channel" if key.by_channel else "head"
    return f"recurrence, {key.kind}, a decay per {decay}, D up to {key.width}"


RECURRENCES = TunedTable(
    "regard.ops.linear.triton.block_sizes",
    RECURRENCE_TABLE,
    recurrence_candidates,
    _launches_of_recurrence,
    recurrence_name,
)
"""The table of the kernels of recurrences."""
