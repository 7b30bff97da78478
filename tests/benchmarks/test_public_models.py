"""Models of public libraries under `regard.accelerate`: equal outputs, the number of calls that are
taken, and what is said of a library that is not installed.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import regard
from benchmarks import CASES, Case, Peer, PreparedCall
from benchmarks.cases import GROUPS, MODELS
from benchmarks.public_models import (
    ACCELERATED,
    PLAIN,
    BuiltModel,
    PublicModelProblem,
    PublicModelSizes,
    accelerated,
    accelerated_peers,
    plain,
)
from benchmarks.render import accelerated_table
from benchmarks.result import CaseResult, PeerResult, check_outputs
from regard.units import plural
from tests.benchmarks.small import CPU, run_peers

CALLS = {
    "torch-transformer": 3,  # of the encoder, and two of the decoder
    "torch-encoder-nested": 0,
    "whisper-decode": 2,  # of the decoder itself, and cross-attention
    "timm-swin": 2,
    "diffusers-unet": 14,
}
"""The attention calls of one step at the size "small", where it is not one."""

pytestmark = pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")

NOT_TAKEN = {"torch-encoder-nested"}
"""The cases whose attention `accelerate` cannot run: torch's nested tensors."""


def problem_of(case: Case, dtype: torch.dtype) -> PublicModelProblem:
    problem = case.sizes["small"].problem(dtype, CPU)
    assert isinstance(problem, PublicModelProblem)
    return problem


def skip_if_missing(case: Case) -> None:
    if (reason := case.peers[0].missing()) is not None:
        pytest.skip(reason)


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_a_model_gives_the_same_numbers_with_every_call_taken(case: Case) -> None:
    skip_if_missing(case)
    for dtype in case.dtypes:
        problem = problem_of(case, dtype)
        reference, usual = problem.reference()["out"], problem.step()
        with regard.accelerate(always=True) as calls:
            first = problem.step()
        assert torch.equal(problem.step(), usual), "a step leaves everything as it was"
        verdict = check_outputs({"out": first}, {"out": reference}, problem.plain())
        assert verdict.correct, verdict.why
        taken = 0 if case.name in NOT_TAKEN else CALLS.get(case.name, 1)
        assert sum(calls.taken.values()) == taken, str(calls)
        wrong = {"out": first * 1.05}
        assert not check_outputs(wrong, {"out": reference}, problem.plain()).correct


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("case", MODELS, ids=lambda case: case.name)
def test_both_peers_are_right_and_small_calls_are_left(case: Case) -> None:
    skip_if_missing(case)
    problem = problem_of(case, torch.float32)
    reference = problem.reference()
    for prepare in (accelerated, plain):
        call = prepare(problem)
        for _ in range(2):
            assert check_outputs(call.read(call.step()), reference, {}).correct
    kernel = accelerated(problem).kernel
    if case.name in NOT_TAKEN:
        assert kernel is not None
        assert "because its input is a nested tensor" in kernel
    else:
        count = CALLS.get(case.name, 1)
        assert kernel == f"{plural(count, 'call')} left to torch because it is small"


def test_at_least_twelve_models_of_four_libraries() -> None:
    assert len(MODELS) >= 20
    assert {case.peers[0].needs for case in MODELS} == {
        (),
        ("transformers",),
        ("timm",),
        ("diffusers",),
    }
    assert GROUPS["models"] == tuple(case.name for case in MODELS)
    assert set(GROUPS["models"]) <= set(CASES)
    for case in MODELS:
        assert [peer.name for peer in case.peers] == [ACCELERATED, PLAIN]
        assert case.dtypes == (torch.float32, torch.bfloat16)


def never_built(sizes: PublicModelSizes) -> BuiltModel:
    raise AssertionError("the model of a missing library is built")


def test_a_missing_library_is_reported_and_its_model_is_not_built() -> None:
    sizes = PublicModelSizes(never_built, "no widths", 1)
    result = run_peers(*accelerated_peers("no_such_module"), sizes=sizes)
    assert [(row.status, row.why) for row in result.rows] == [
        ("missing", "no module no_such_module")
    ] * 2
    assert not result.failed
    assert "missing: no module no_such_module" in accelerated_table([result]).splitlines()[1]


def test_a_wrong_model_is_not_timed() -> None:
    """A peer that changes the output is found, so that the check is one."""
    layer = nn.Linear(4, 4)
    x = torch.ones(1, 4)
    sizes = PublicModelSizes(
        lambda _: BuiltModel(layer, lambda dtype: lambda: layer(x.to(dtype))), "a map", 1
    )

    def shifted(problem: PublicModelProblem) -> PreparedCall:
        return PreparedCall(problem.step, lambda out: {"out": out + 1})

    wrong: Peer[Any] = Peer("shifted", "Adds 1.", shifted)
    result = run_peers(*accelerated_peers(), wrong, sizes=sizes)
    assert [row.status for row in result.rows] == ["timed", "timed", "wrong"]
    ours, torch_row, _ = result.rows
    assert ours.ratio == 1.0
    assert ours.kernel == "no attention call was seen"
    assert torch_row.ratio_quartiles is not None
    low, high = torch_row.ratio_quartiles
    assert torch_row.ratio is not None
    assert low <= torch_row.ratio <= high


def test_the_table_has_one_line_for_each_model_and_dtype() -> None:
    rows = (
        PeerResult(ACCELERATED, "timed", kernel="cpu 1", seconds=0.010, ratio=1.0),
        PeerResult(PLAIN, "timed", seconds=0.050, ratio=5.0, ratio_quartiles=(4.9, 5.1)),
    )
    timed = CaseResult("llama", "", "", torch.bfloat16, "cpu", rows=rows)
    other = CaseResult("decode", "", "", torch.float32, "cpu", rows=(PeerResult("regard", "x"),))
    assert accelerated_table([other]) == ""
    head, line = accelerated_table([other, timed]).splitlines()
    assert head.split()[:4] == ["model", "dtype", "torch", "regard"]
    times = ["50.0", "ms", "10.0", "ms", "5.00", "4.90", "..", "5.10"]
    assert line.split() == ["llama", "bfloat16", *times, "cpu", "1"]
