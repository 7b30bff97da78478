"""The table of the recurrences' sizes, tuned with timings that are made up."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from regard.bench.block_tuning import Trial, as_python, tune
from regard.bench.recurrence_tuning import KERNELS, RECURRENCES, candidates, launches_of, problem_of
from regard.ops.linear.call import RecurrenceCall
from regard.ops.linear.triton import block_sizes
from regard.ops.linear.triton.block_sizes import (
    TABLE,
    RecurrenceSizes,
    RecurrenceSizesKey,
    chunk_sizes,
    try_recurrence_sizes,
)
from regard.ops.triton_support import launches_for

KEY = RecurrenceSizesKey("parallel", False, 256)
NEW = RecurrenceSizes(16, 32, 4, 2)


def made_up(key: RecurrenceSizesKey, choices: Sequence[RecurrenceSizes]) -> list[Trial]:
    """Two stages are the fastest, and the rows of triangular systems fit nowhere."""
    if key.kind == "solve":
        return [Trial(x, why="out of resource: shared memory") for x in choices]
    return [Trial(x, 1e-3 if x.stages == 2 else 2e-3, 0, 1000) for x in choices]


def test_every_row_is_measured_and_written() -> None:
    said: list[str] = []
    proposals = tune(made_up, 200_000, table=RECURRENCES, say=said.append)
    assert {x.key for x in proposals} == {x for x in TABLE if x.kind != "solve"}
    assert any("recurrence, solve, a decay per head, D up to 256: none of" in x for x in said)
    for proposal in proposals:
        tried = candidates(proposal.key, TABLE[proposal.key])
        assert tried[0] == proposal.current.sizes == TABLE[proposal.key][1:]
        assert len(set(tried)) == len(tried)
        assert proposal.chosen.sizes.stages == 2
    text = as_python(90, "a GPU", proposals, RECURRENCES)
    assert text.startswith("# regard.ops.linear.triton.block_sizes\n")
    names = {"RecurrenceSizesKey": RecurrenceSizesKey, "RecurrenceSizes": RecurrenceSizes}
    entered = eval("{" + text + "}", names)  # as a reviewer would paste it
    assert entered == {90: {x.key: x.chosen.sizes for x in proposals}}


def test_a_measured_row_changes_no_chunk(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(block_sizes.MEASURED, 80, {KEY: NEW})

    def sizes(capability: int, D: int = 100) -> tuple[int, ...]:
        options = {"by_channel": False, "exact": False, "D": D, "capability": capability}
        return chunk_sizes("parallel", **options)

    assert sizes(80) == (32, *NEW)
    assert sizes(90) == TABLE[KEY]
    with try_recurrence_sizes(KEY, NEW):
        assert (sizes(90), sizes(100, 256), sizes(100)) == ((64, *NEW), (32, *NEW), (64, *NEW))
    exact = chunk_sizes("parallel", by_channel=False, exact=True, D=64, capability=80)
    assert exact.chunk == 16, "rows for fp32 are not measured"


def test_the_problem_of_a_row() -> None:
    call = problem_of(RecurrenceSizesKey("states", True, 64), torch.device("meta"))
    assert (call.k.shape, call.k.dtype) == ((1, 32, 2048, 64), torch.bfloat16)
    assert call.decay_form == 2
    assert call.beta is not None


@pytest.mark.full
@pytest.mark.parametrize("kind", KERNELS)
def test_the_tried_sizes_are_those_of_the_kinds_kernels(kind: str) -> None:
    """Every kernel belongs to one kind; a row changes its own kernels only."""
    pytest.importorskip("triton", reason="triton is not installed: pip install 'regard[gpu]'")
    x, g = torch.zeros(1, 2, 128, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 128, 1)
    call = RecurrenceCall(x, x, x, torch.zeros(1, 2, 64, 64), g, g, 1.0, x.dtype, x.dtype)
    width = min(key.width for key in TABLE if key[:2] == (kind, False))
    with (
        launches_for(90),
        try_recurrence_sizes(RecurrenceSizesKey(kind, False, width), RecurrenceSizes(64, 16, 2, 1)),
    ):
        launches = launches_of(call)
    changed = {x.kernel.__name__ for x in launches if x.options["num_warps"] == 2}
    assert changed == set(KERNELS[kind])
    assert {x.kernel.__name__ for x in launches} == {y for names in KERNELS.values() for y in names}
