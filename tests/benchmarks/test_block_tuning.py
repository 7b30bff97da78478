"""The choice of block sizes from measurements, with timings that are made up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import pytest
import torch

from benchmarks.block_tuning import (
    MAX_SPILLED_BYTES,
    MIN_GAIN,
    Trial,
    as_python,
    candidates,
    choose,
    launch_of,
    measure_on,
    problem_of,
    row_name,
    tune_table,
)
from regard import RegardError
from regard.ops.softmax.call import make_call
from regard.ops.softmax.triton import block_sizes
from regard.ops.softmax.triton.block_sizes import TABLE, LaunchSizes, SizesKey, try_sizes

LIMIT = 200_000
KEY = SizesKey("forward", True, 128)
OLD, NEW, THIRD = LaunchSizes(128, 64, 8, 3), LaunchSizes(64, 64, 4, 2), LaunchSizes(64, 32, 4, 2)


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


@dataclass
class Machine:
    """A GPU on which products of 64 by 32 are the fastest, and nothing else differs."""

    asked: list[SizesKey] = field(default_factory=list)

    def __call__(self, key: SizesKey, choices: Sequence[LaunchSizes]) -> list[Trial]:
        self.asked.append(key)
        if key.kind == "decode":
            return [Trial(x, why="out of resource: shared memory") for x in choices]
        return [
            Trial(x, 1e-3 if x[:2] == (64, 32) and x.warps == 8 else 2e-3, 0, 1000) for x in choices
        ]


def test_every_row_is_measured_and_written() -> None:
    machine, said = Machine(), []
    proposals = tune_table(machine, LIMIT, say=said.append)
    assert machine.asked == list(TABLE)
    assert {x.key for x in proposals} == {x for x in TABLE if x.kind != "decode"}
    assert any("decode, 2 bytes, D up to 128: none of" in line for line in said)
    for proposal in proposals:
        tried = candidates(proposal.key, TABLE[proposal.key])
        assert tried[0] == proposal.current.sizes == TABLE[proposal.key]
        assert len(set(tried)) == len(tried)
        if any(x[:2] == (64, 32) for x in tried):
            assert proposal.chosen.sizes[:2] == (64, 32)
    text = as_python(90, "a GPU", proposals)
    names = {"SizesKey": SizesKey, "LaunchSizes": LaunchSizes}
    entered = eval("{" + text + "}", names)  # as a reviewer would paste it
    assert entered == {90: {x.key: x.chosen.sizes for x in proposals}}


def test_a_measured_row_stands_before_the_table(monkeypatch: pytest.MonkeyPatch) -> None:
    key = block_sizes.key_of("forward", torch.bfloat16, 100, 128)
    assert key == KEY
    monkeypatch.setitem(block_sizes.MEASURED, 80, {KEY: NEW})
    sizes = [
        block_sizes.block_sizes("forward", torch.bfloat16, 100, 128, capability=x) for x in (80, 90)
    ]
    assert sizes == [NEW, TABLE[KEY]]
    with try_sizes(KEY, THIRD):
        assert block_sizes.block_sizes("forward", torch.float16, 128, 128, capability=80) == THIRD


def test_without_a_gpu_it_refuses() -> None:
    with pytest.raises(
        RegardError, match=r"measured on a GPU, not on cpu: run `python -m benchmarks"
    ):
        measure_on(torch.device("cpu"))
    call = problem_of(SizesKey("decode", True, 128), torch.device("meta"))
    assert (call.T, call.S, call.D, call.q.dtype) == (1, 32768, 128, torch.bfloat16)
    assert row_name(SizesKey("backward_kv", False, 64)) == "backward_kv, 4 bytes, D up to 64"


@pytest.mark.full
@pytest.mark.parametrize("kind", ["forward", "backward_q", "backward_kv", "decode"])
def test_the_tried_sizes_are_those_of_the_launch(kind: block_sizes.KernelKind) -> None:
    pytest.importorskip("triton", reason="triton is not installed: pip install 'regard[gpu]'")
    q, k = torch.zeros(1, 2, 1 if kind == "decode" else 64, 64), torch.zeros(1, 1, 64, 64)
    call = make_call(q, k, k)
    key = block_sizes.key_of(kind, torch.float32, 64, 64)
    with try_sizes(key, LaunchSizes(16, 32, 8, 4)):
        launch = launch_of(kind, call)
    assert launch.kernel.__name__ == f"attention_{kind}"
    assert (launch.options["BN"], launch.options["num_warps"], launch.options["num_stages"]) == (
        32, 8, 4,
    )  # fmt: skip
