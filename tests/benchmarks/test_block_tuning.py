"""The choice of block sizes from measurements, with timings that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from benchmarks.block_tuning import (
    ATTENTION,
    MAX_SPILLED_BYTES,
    MIN_GAIN,
    RECURRENCE_KERNELS,
    RECURRENCES,
    Trial,
    TunedTable,
    as_python,
    choose,
    launch_of,
    launches_of,
    measure_on,
    problem_of,
    recurrence_of,
    tune_table,
)
from regard import RegardError
from regard.ops.linear.call import RecurrenceCall
from regard.ops.linear.triton import block_sizes as recurrence_sizes
from regard.ops.linear.triton.block_sizes import (
    RecurrenceSizes,
    RecurrenceSizesKey,
    chunk_sizes,
    try_recurrence_sizes,
)
from regard.ops.softmax.call import make_call
from regard.ops.softmax.triton import block_sizes
from regard.ops.softmax.triton.block_sizes import LaunchSizes, SizesKey, try_sizes
from regard.ops.triton_support import has_triton, launches_for

LIMIT = 200_000
KEY = SizesKey("forward", True, 128)
OLD, NEW, THIRD = LaunchSizes(128, 64, 8, 3), LaunchSizes(64, 64, 4, 2), LaunchSizes(64, 32, 4, 2)
needs_triton = pytest.mark.skipif(
    not has_triton(), reason="triton is not installed: pip install 'regard[gpu]'"
)


@pytest.mark.parametrize(
    "trials, right",
    [
        ([Trial(OLD, 1.0), Trial(NEW, 0.5)], NEW),
        ([Trial(OLD, 1.0), Trial(NEW, 1 - MIN_GAIN)], OLD),  # within the noise
        ([Trial(OLD, 1.0), Trial(NEW, 0.9 - MIN_GAIN), Trial(THIRD, 0.9 - MIN_GAIN)], NEW),
        ([Trial(OLD, 1.0), Trial(NEW, 0.5, spilled=MAX_SPILLED_BYTES + 4)], OLD),
        ([Trial(OLD, 1.0), Trial(NEW, 0.5, spilled=MAX_SPILLED_BYTES)], NEW),
        ([Trial(OLD, 1.0), Trial(NEW, 0.5, shared=LIMIT + 1)], OLD),
        ([Trial(OLD, 1.0), Trial(NEW, why="out of resource")], OLD),
        ([Trial(OLD, 1.0, spilled=500), Trial(NEW, 2.0), Trial(THIRD, 1.5)], THIRD),
        ([Trial(OLD, why="no room"), Trial(NEW, 2.0)], NEW),
    ],
)
def test_the_choice(trials: list[Trial], right: LaunchSizes) -> None:
    assert choose(trials, LIMIT).sizes == right


def test_nothing_is_proposed_where_nothing_runs() -> None:
    with pytest.raises(RegardError, match=r"none of 2 choices of block sizes ran .* keep the row"):
        choose([Trial(OLD, why="no"), Trial(NEW, 1.0, spilled=400)], LIMIT)


@pytest.mark.parametrize(
    ("table", "refused", "row"),
    [
        (ATTENTION, "decode", "decode, 2 bytes, D up to 128: none of"),
        (RECURRENCES, "solve", "recurrence, solve, a decay per head, D up to 256: none of"),
    ],
)
def test_every_row_is_measured_and_written(table: TunedTable, refused: str, row: str) -> None:
    """On a GPU on which two stages are the fastest, and one kind of kernels fits nowhere."""
    asked, said = [], list[str]()

    def measure(key: Any, choices: Sequence[Any]) -> list[Trial]:
        asked.append(key)
        if key.kind == refused:
            return [Trial(x, why="out of resource: shared memory") for x in choices]
        return [Trial(x, 1e-3 if x.stages == 2 else 2e-3, 0, 1000) for x in choices]

    proposals = tune_table(measure, LIMIT, table=table, say=said.append)
    assert asked == list(table.rows)
    assert {x.key for x in proposals} == {x for x in table.rows if x.kind != refused}
    assert any(row in line for line in said)
    for proposal in proposals:
        tried = table.candidates(proposal.key, table.rows[proposal.key])
        assert tried[0] == proposal.current.sizes
        assert tuple(tried[0]) == tuple(table.rows[proposal.key])[-4:]
        assert len(set(tried)) == len(tried)
        assert proposal.chosen.sizes.stages == 2
    text = as_python(90, "a GPU", proposals, table)
    assert text.startswith(f"# {table.module}\n")
    names = (SizesKey, LaunchSizes, RecurrenceSizesKey, RecurrenceSizes)
    entered = eval("{" + text + "}", {x.__name__: x for x in names})  # as a reviewer would paste it
    assert entered == {90: {x.key: x.chosen.sizes for x in proposals}}


def test_a_measured_row_stands_before_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    key = block_sizes.key_of("forward", torch.bfloat16, 100, 128)
    assert key == KEY
    monkeypatch.setitem(block_sizes.MEASURED, 80, {KEY: NEW})
    sizes = [
        block_sizes.block_sizes("forward", torch.bfloat16, 100, 128, capability=x) for x in (80, 90)
    ]
    assert sizes == [NEW, ATTENTION.rows[KEY]]
    with try_sizes(KEY, THIRD):
        assert block_sizes.block_sizes("forward", torch.float16, 128, 128, capability=80) == THIRD


def test_a_measured_row_changes_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    key, new = RecurrenceSizesKey("parallel", False, 256), RecurrenceSizes(16, 32, 4, 2)
    monkeypatch.setitem(recurrence_sizes.MEASURED, 80, {key: new})

    def sizes(capability: int, D: int = 100) -> tuple[int, ...]:
        options = {"by_channel": False, "exact": False, "D": D, "capability": capability}
        return chunk_sizes("parallel", **options)

    assert sizes(80) == (32, *new)
    assert sizes(90) == RECURRENCES.rows[key]
    with try_recurrence_sizes(key, new):
        assert (sizes(90), sizes(100, 256), sizes(100)) == ((64, *new), (32, *new), (64, *new))
    exact = chunk_sizes("parallel", by_channel=False, exact=True, D=64, capability=80)
    assert exact.chunk == 16, "rows for fp32 are not measured"


def test_the_problems_of_rows_and_no_gpu() -> None:
    with pytest.raises(RegardError, match="measured on a GPU, not on cpu: run `python -m"):
        measure_on(torch.device("cpu"))
    call = problem_of(SizesKey("decode", True, 128), torch.device("meta"))
    assert (call.T, call.S, call.D, call.q.dtype) == (1, 32768, 128, torch.bfloat16)
    recurrence = recurrence_of(RecurrenceSizesKey("states", True, 64), torch.device("meta"))
    assert (recurrence.k.shape, recurrence.k.dtype) == ((1, 32, 2048, 64), torch.bfloat16)
    assert recurrence.decay_form == 2
    assert recurrence.beta is not None


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("kind", ["forward", "backward_q", "backward_kv", "decode"])
def test_the_tried_sizes_are_those_of_the_launch(kind: block_sizes.KernelKind) -> None:
    q, k = torch.zeros(1, 2, 1 if kind == "decode" else 64, 64), torch.zeros(1, 1, 64, 64)
    key = block_sizes.key_of(kind, torch.float32, 64, 64)
    with try_sizes(key, LaunchSizes(16, 32, 8, 4)):
        launch = launch_of(kind, make_call(q, k, k))
    assert launch.kernel.__name__ == f"attention_{kind}"
    names = ("BN", "num_warps", "num_stages")
    assert [launch.options[name] for name in names] == [32, 8, 4]


@needs_triton
@pytest.mark.full
@pytest.mark.parametrize("kind", RECURRENCE_KERNELS)
def test_the_tried_sizes_are_those_of_the_kinds_kernels(kind: str) -> None:
    """Every kernel belongs to one kind; a row changes its own kernels only."""
    x, g = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 128, 1)
    call = RecurrenceCall(x, x, x, torch.zeros(1, 2, 64, 64), g, g, 1.0, x.dtype, x.dtype)
    width = min(key.width for key in RECURRENCES.rows if key[:2] == (kind, False))
    key = RecurrenceSizesKey(kind, False, width)  # type: ignore[arg-type]
    with launches_for(90), try_recurrence_sizes(key, RecurrenceSizes(64, 16, 2, 1)):
        launches = launches_of(call)
    changed = {x.kernel.__name__ for x in launches if x.options["num_warps"] == 2}
    assert changed == set(RECURRENCE_KERNELS[kind])
    every = {name for names in RECURRENCE_KERNELS.values() for name in names}
    assert {x.kernel.__name__ for x in launches} == every
