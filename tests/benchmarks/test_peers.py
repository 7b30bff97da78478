"""Every peer that is installed gives the right answer at small sizes, in every dtype of its cases;
and what each refuses.
"""

from __future__ import annotations

import re
import warnings
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch.nn.attention.flex_attention import flex_attention

import regard
from benchmarks import CASES, Case, Peer
from benchmarks.model_cases import MODELS
from benchmarks.parallel_cases import PARALLEL
from benchmarks.peers import (
    llama_cpp,
    onnx_runtime,
    regard_kernels,
    torch_flex,
    torch_sdpa,
    x_transformers,
)
from benchmarks.problems import AttentionSizes, ModelSizes
from benchmarks.program_cases import DRAW_PAGE, find_browser
from benchmarks.result import check_outputs
from tests.benchmarks.small import CPU, SMALL

FLEX = next(peer for peer in regard_kernels.KERNELS if peer.name == "regard flex")
SLOW = (torch_flex.ATTENTION, FLEX)  # compiled for seconds; below torch's runs as it stands
PAIRS = [
    pytest.param(case, peer, id=f"{case.name}-{peer.name}")
    for case in CASES.values()
    if case not in (*MODELS, *PARALLEL)  # in test_public_models.py and test_parallel.py
    for peer in case.peers
    if peer not in SLOW and peer.missing() is None
]


def solve(case: Case, peer: Peer[Any], dtype: torch.dtype) -> str | None:
    """What the peer refuses, or nothing if it is right; else this fails."""
    problem = SMALL[case.name].problem(dtype, CPU)
    why = peer.why_not(problem)
    if why is None:
        way = peer.prepare(problem)
        first, second = (problem.checked(way.read(way.step())) for _ in range(2))
        for found in (first, second):  # a step leaves everything as it was
            verdict = check_outputs(found, problem.reference(), problem.plain())
            assert verdict.correct, verdict.why
        assert peer.bytes(problem) >= 0
    return why


@pytest.mark.full(keep=3)
@pytest.mark.parametrize(("case", "peer"), PAIRS)
def test_an_installed_peer_is_right(case: Case, peer: Peer[Any]) -> None:
    reasons = {solve(case, peer, dtype) for dtype in case.dtypes}
    if peer is case.peers[0] and (case is not DRAW_PAGE or find_browser() is not None):
        assert reasons == {None}, "ours solves every case"


def test_ours_are_first_and_names_are_unique() -> None:
    for name, case in CASES.items():
        assert case.name == name
        assert re.match(r"regard\b", case.peers[0].name), case.peers[0].name
        assert len({peer.name for peer in case.peers}) == len(case.peers)
        assert set(case.sizes) == {"small", "default", "paper"}


@pytest.mark.full(keep=2)
@pytest.mark.parametrize(
    "name", ["decode", "causal-prefill", "window-prefill", "alibi", "left-padded"]
)
def test_flex_attention_as_it_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_flex, "_compiled", lambda: flex_attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is not compiled
        assert solve(CASES[name], torch_flex.ATTENTION, torch.float32) is None


def test_flex_attention_has_no_gradient_and_needs_a_compiler() -> None:
    train = SMALL["training-step"].problem(torch.float32, CPU)
    assert torch_flex.why_not(train) == "has no gradient on a CPU"
    decode = SMALL["decode"].problem(torch.float32, CPU)
    assert torch_flex.why_not(decode, ("no-such-compiler",)) == "needs a C++ compiler"


def test_every_kernel_of_regard_is_a_peer() -> None:
    q = torch.randn(1, 1, 2, 4)
    names = {f"regard {choice.kernel}" for choice in regard.plan(q, q, q).choices}
    assert {peer.name for peer in regard_kernels.KERNELS} == names


def test_a_kernel_that_refuses_says_why() -> None:
    sizes = AttentionSizes(B=1, H=2, G=1, D=4, S=8, train=True)
    problem = sizes.problem(torch.float64, CPU)
    reasons = {peer.name: peer.why_not(problem) for peer in regard_kernels.KERNELS}
    assert reasons["regard reference"] is None
    assert "float64" in (reasons["regard cpu"] or "")


@pytest.mark.parametrize("window", [1, 5, 19, 40])
def test_a_window_in_chunks_is_the_window(window: int) -> None:
    problem = AttentionSizes(B=2, H=4, G=2, D=8, S=19, window=window).problem(torch.float32, CPU)
    assert torch_sdpa.why_not_chunked(problem) is None
    found = torch_sdpa.chunked(problem)
    verdict = check_outputs(found.read(found.step()), problem.reference(), problem.plain())
    assert verdict.correct, verdict.why
    for name in ("causal-prefill", "decode", "alibi", "left-padded"):
        assert torch_sdpa.why_not_chunked(SMALL[name].problem(torch.float32, CPU)) is not None


def test_folding_is_for_one_query_that_sees_all() -> None:
    assert torch_sdpa.why_not_folded(SMALL["decode"].problem(torch.float32, CPU)) is None
    for name in ("causal-prefill", "alibi", "left-padded", "training-step"):
        assert torch_sdpa.why_not_folded(SMALL[name].problem(torch.float32, CPU)) is not None


@pytest.mark.parametrize(
    ("sizes", "dtype", "why"),
    [
        ({}, torch.float32, None),
        ({"window": 4}, torch.float16, None),
        ({}, torch.bfloat16, "its CPU provider has no bfloat16"),
        ({"train": True}, torch.float32, "has no gradient"),
        ({"alibi": True}, torch.float32, "has no ALiBi"),
        ({"padded": True}, torch.float32, "pads on the right only"),
    ],
)
def test_what_onnx_runtime_refuses(
    sizes: dict[str, Any], dtype: torch.dtype, why: str | None
) -> None:
    problem = AttentionSizes(B=2, H=2, G=1, D=4, S=8, **sizes).problem(dtype, CPU)
    assert onnx_runtime.why_not(problem) == why


def test_what_llama_cpp_refuses() -> None:
    sizes = SMALL["model-decode"]
    assert isinstance(sizes, ModelSizes)
    assert llama_cpp.why_not(sizes.problem(torch.float16, CPU)) is None
    bf16, batch = sizes.problem(torch.bfloat16, CPU), replace(sizes, B=2)
    assert llama_cpp.why_not(bf16) == "this adapter supports only fp32 and fp16"
    assert (
        llama_cpp.why_not(batch.problem(torch.float16, CPU))
        == "this adapter supports only a batch of one row"
    )


@pytest.mark.parametrize(
    "peer", [x_transformers.ATTENTION, onnx_runtime.ATTENTION], ids=lambda peer: peer.name
)
def test_memory_of_a_peer_grows_with_the_problem(peer: Peer[Any]) -> None:
    short, long = (
        AttentionSizes(B=1, H=2, G=1, D=4, S=S, window=3).problem(torch.float32, CPU)
        for S in (8, 64)
    )
    assert 0 < peer.bytes(short) < peer.bytes(long)
