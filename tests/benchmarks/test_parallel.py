"""Attention over ranks in `python -m benchmarks`: right outputs, and the figures of each peer."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from benchmarks import CASES, Ceilings, TimingBudget, measure
from benchmarks.cases import GROUPS
from benchmarks.parallel_cases import PARALLEL, PEERS, ParallelSizes
from benchmarks.render import parallel_table
from regard.parallel import plan
from tests.benchmarks.small import CPU

S, W = 96, 2
SIZES = {
    "parallel-causal": ParallelSizes(B=1, H=4, G=2, D=16, S=S, W=W),
    "parallel-window": ParallelSizes(B=1, H=4, G=2, D=16, S=S, W=W, window=9),
    "parallel-documents": ParallelSizes(B=1, H=4, G=2, D=16, S=S, W=W, documents=True),
}


@pytest.mark.full
@pytest.mark.parametrize("name", SIZES)
def test_every_peer_is_right_and_reports_its_figures(name: str) -> None:
    sizes, budget = SIZES[name], TimingBudget(rounds=1, sample=0.0)
    result = measure(CASES[name], sizes, torch.float32, CPU, budget=budget, ceilings=Ceilings(1e9))
    rows = {row.peer: row for row in result.rows}
    assert rows.pop("ring-flash-attention").status in ("missing", "unable")
    assert [row.status for row in rows.values()] == ["timed"] * 4
    problem = sizes.problem(torch.float32, CPU)
    every = (W - 1) * (problem.k.nbytes + problem.v.nbytes)
    planned = plan(problem.shards, problem.mask, heads=(4, 2), dims=(16, 16))
    figures = {peer: row.figures for peer, row in rows.items()}
    ours = figures["regard.parallel"]
    assert ours is not None
    assert ours["sent_bytes"] == sum(planned[planned.method].sent)
    assert ours["sent_of_all"] == ours["sent_bytes"] / every
    assert ours["rank_bytes_bound"] == problem.rank_bytes_bound
    for peer in ("forwarding ring", "all-gather"):
        assert figures[peer] is not None
        assert figures[peer]["sent_bytes"] == every
    assert figures["one process"] is not None
    assert figures["one process"]["sent_bytes"] == 0
    lines = parallel_table([result]).splitlines()
    assert len(lines) == 5
    assert [line.split()[2] for line in lines[1:]] == [
        "regard.parallel",
        "one",
        "forwarding",
        "all-gather",
    ]


def test_the_reference_of_documents_hides_other_documents() -> None:
    problem = SIZES["parallel-documents"].problem(torch.float32, CPU)
    visible = problem.visible_rows(slice(0, S))[0, 0]
    at = torch.arange(S)
    assert torch.equal(visible, problem.mask.block(at[None], at[None])[0, 0])


def test_the_group_has_every_case_and_sizes_can_be_changed() -> None:
    assert GROUPS["parallel"] == tuple(case.name for case in PARALLEL)
    sizes = PARALLEL[1].sizes["default"]
    assert isinstance(sizes, ParallelSizes)
    assert (sizes.S, sizes.window, sizes.W) == (65536, 512, 4)
    assert sizes.resized(length=128) == replace(sizes, S=128)


def test_what_cannot_run_is_named() -> None:
    problem = SIZES["parallel-causal"].problem(torch.float32, CPU)
    ours, one, ring, gather, flash = PEERS
    assert {peer.why_not(problem) for peer in (ours, one, ring, gather)} == {None}
    assert flash.why_not(problem) == "runs on GPUs only"
    problem.device = torch.device("cuda")
    if torch.cuda.device_count() < W:
        assert f"needs {W} GPUs" in str(ours.why_not(problem))
    problem = SIZES["parallel-window"].problem(torch.float32, CPU)
    problem.device = torch.device("cuda")
    assert flash.why_not(problem) == "its zigzag ring is causal only"
