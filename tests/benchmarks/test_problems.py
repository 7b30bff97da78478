"""The right answers, against loops; what is checked of large problems; work and memory."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from benchmarks.attention import AttentionProblem, AttentionSizes, LatentProblem, LatentSizes
from benchmarks.model import ModelSizes
from benchmarks.parallel import ParallelProblem, ParallelSizes
from benchmarks.programs import ProgramSizes
from benchmarks.public_models import PublicModelSizes
from benchmarks.sentences import SentenceSizes
from tests.benchmarks.small import CPU, HEADS, SMALL

DOUBLE = 1e-12


def loops(problem: AttentionProblem) -> Tensor:
    """Each query, each key it may see, one number at a time."""
    s, T = problem.sizes, problem.sizes.queries
    q, k, v = (x.detach().double() for x in (problem.q, problem.k, problem.v))
    out = torch.zeros(s.B, s.H, T, s.D, dtype=torch.float64)
    for b in range(s.B):
        first = b * s.S // (2 * s.B) if s.padded else 0
        for h in range(s.H):
            g, slope = h // (s.H // s.G), 2.0 ** (-8 * (h + 1) / s.H) if s.alibi else 0.0
            for t in range(T):
                i = s.S - T + t
                low = first if s.window is None else max(first, i - s.window + 1)
                if isinstance(problem, ParallelProblem) and problem.starts:
                    low = max(low, *(start for start in problem.starts if start <= i), 0)
                keys = list(range(low, i + 1)) if i >= first else []
                if s.pattern == "documents":  # 8 of 2 tokens
                    keys = [j for j in keys if j // 2 == i // 2]
                elif s.pattern == "prefix":
                    keys = sorted({*keys, *range(2)})
                elif s.pattern == "sinks":
                    keys = sorted({*keys, *range(min(4, i + 1))})
                scores = [float(q[b, h, t] @ k[b, g, j]) / math.sqrt(s.D) for j in keys]
                if s.softcap is not None:
                    scores = [s.softcap * math.tanh(x / s.softcap) for x in scores]
                scores = [x - slope * (i - j) for x, j in zip(scores, keys, strict=True)]
                total = sum(map(math.exp, scores))
                if problem.sink is not None:
                    total += math.exp(float(problem.sink[h]))
                for j, x in zip(keys, scores, strict=True):
                    out[b, h, t] += math.exp(x) / total * v[b, g, j]
    return out


NEW_ON_A_GPU = ("gpu-documents", "gpu-prefix", "gpu-sinks", "gpu-everything")
"""The cases for a GPU that differ from those for a CPU in more than their sizes."""
ATTENTION = [
    name
    for name, sizes in SMALL.items()
    if isinstance(sizes, AttentionSizes) and (name[:4] != "gpu-" or name in NEW_ON_A_GPU)
]


@pytest.mark.full(keep=10)
@pytest.mark.parametrize("name", ATTENTION)
@pytest.mark.parametrize("block", [1, 1 << 27], ids=["row by row", "at once"])
def test_the_reference_is_the_definition(name: str, block: int) -> None:
    problem = SMALL[name].problem(torch.float32, CPU)
    assert isinstance(problem, AttentionProblem)
    problem.block_bytes = block
    want = loops(problem)
    assert (problem.reference()["out"] - want).abs().max() < DOUBLE * want.abs().max() * 10


@pytest.mark.parametrize("name", ["training-step", "window-training"])
def test_gradients_are_those_of_differences(name: str) -> None:
    problem = SMALL[name].problem(torch.float64, CPU)
    assert isinstance(problem, AttentionProblem)
    found, step = problem.reference(), 1e-5
    assert problem.d_out is not None
    for which, x in (("dq", problem.q), ("dk", problem.k), ("dv", problem.v)):
        for at in ((0, 0, 3, 1), (1, 1, 10, 7)):
            sides = []
            for sign in (1, -1):
                with torch.no_grad():
                    x[at] += sign * step
                sides.append(float((problem.reference()["out"] * problem.d_out).sum()))
                with torch.no_grad():
                    x[at] -= sign * step
            slope = (sides[0] - sides[1]) / (2 * step)
            assert float(found[which][at]) == pytest.approx(slope, rel=1e-6, abs=1e-8)


@pytest.mark.parametrize("name", ATTENTION)
def test_pairs_are_those_of_the_dense_mask(name: str) -> None:
    problem = SMALL[name].problem(torch.float32, CPU)
    assert isinstance(problem, AttentionProblem)
    s = problem.sizes
    seen = int(problem.visible().expand(s.B, s.H, -1, -1).sum())
    assert problem.pairs == seen
    flops, moved = problem.work
    assert flops == seen * s.D * (14 if s.train else 4)
    assert moved == 4 * s.B * 2 * s.D * (s.queries * s.H + s.S * s.G) * (3 if s.train else 1)


def test_a_large_problem_is_checked_on_some_heads() -> None:
    sizes = AttentionSizes(B=1, H=8, G=4, D=8, S=19, train=True)
    whole = sizes.problem(torch.float32, CPU)
    assert whole.groups == [0, 1, 2, 3]
    half = sizes.problem(torch.float32, CPU)
    half.checked_pairs = whole.pairs // 2
    assert half.groups == [0, 2]
    every, some = whole.reference(), half.reference()
    assert torch.equal(some["out"], every["out"][:, [0, 1, 4, 5]])
    for name in ("dk", "dv"):
        assert torch.equal(some[name], every[name][:, [0, 2]])
    part = half.checked({"out": half.q, "dq": half.q, "dk": half.k})
    assert torch.equal(part["dq"], half.q.detach()[:, [0, 1, 4, 5]])
    assert torch.equal(part["dk"], half.k.detach()[:, [0, 2]])
    assert half.checked({"out": half.q[0]})["out"].ndim == 3  # a wrong shape is left for the rule


def test_queries_that_are_padding_have_no_right_answer() -> None:
    problem = SMALL["left-padded"].problem(torch.float32, CPU)
    assert isinstance(problem, AttentionProblem)
    out = torch.full_like(problem.q, float("nan"))
    kept = problem.checked({"out": out})["out"]
    for b, pad in enumerate(problem.pads):
        assert not kept[b, :, :pad].any()
        assert kept[b, :, pad:].isnan().all()
    assert problem.pads == [0, 3, 6, 9]


def test_latents_by_loops() -> None:
    sizes = LatentSizes(S=5, B=1, H=2, rank=4, rope=2, nope=3, value=2)
    problem = sizes.problem(torch.float64, CPU)
    weight = problem.weight.view(2, 5, 4)
    out = problem.reference()["out"]
    for h in range(2):
        scores = []
        for j in range(5):
            key = weight[h, :3] @ problem.latents[0, 0, j]
            s = problem.q_nope[0, h, 0] @ key + problem.q_rope[0, h, 0] @ problem.rope[0, 0, j]
            scores.append(math.exp(float(s) / math.sqrt(5)))
        values = [weight[h, 3:] @ problem.latents[0, 0, j] for j in range(5)]
        want = sum(p / sum(scores) * v for p, v in zip(scores, values, strict=True))
        assert isinstance(want, Tensor)
        assert (out[0, h, 0] - want).abs().max() < DOUBLE


def test_heads_of_latents_are_expanded_some_at_a_time() -> None:
    problem = SMALL["mla-decode"].problem(torch.float64, CPU)
    assert isinstance(problem, LatentProblem)
    whole = problem.reference()["out"]
    assert problem.chunks == 1
    problem.chunks = 3
    assert torch.equal(problem.reference()["out"], whole)


def test_latent_work_is_that_of_absorption() -> None:
    flops, moved = LatentSizes(8192).problem(torch.bfloat16, CPU).work
    assert flops == 2 * 128 * 512 * 256 + 128 * 8192 * 2 * (576 + 512)
    assert moved == 2 * (8192 * 576 + 128 * 256 * 512 + 128 * (192 + 128))


def test_a_models_weights_are_counted() -> None:
    sizes = SMALL["model-decode"]
    assert isinstance(sizes, ModelSizes)
    problem = sizes.problem(torch.float32, CPU)
    matrices = sum(p.numel() for p in problem.decoder.parameters() if p.ndim > 1)
    assert sizes.weights == matrices
    k, v = problem.memory(1)
    assert sizes.cached == 2 * (k.numel() + v.numel())
    # Qwen2-0.5B has 494,032,768 parameters; biases and norms are no matrices
    assert ModelSizes(1).weights == 494_032_768 - 24 * (896 + 2 * 128) - 49 * 896


def test_the_model_hears_its_cache() -> None:
    """A check on logits that do not depend on the keys would prove nothing."""
    sizes = SMALL["model-decode"]
    assert isinstance(sizes, ModelSizes)
    whole = sizes.problem(torch.float32, CPU).reference()["logits"]
    short = replace(sizes, S=sizes.S - 1).problem(torch.float32, CPU).reference()["logits"]
    assert (whole - short).abs().max() > 0.01 * whole.abs().max()


@pytest.mark.parametrize(
    "name",
    [name for name, x in SMALL.items() if not isinstance(x, ProgramSizes | PublicModelSizes)],
)
def test_sizes_give_way_to_options(name: str) -> None:
    sizes = SMALL[name]
    changed = sizes.resized(length=11, batch=3)
    if isinstance(sizes, SentenceSizes):  # its texts have lengths of their own
        assert str(changed).startswith("3 texts")
    else:
        assert "S11" in str(changed)
        assert "B3" in str(changed)
    assert sizes.resized() == sizes
    assert changed.bytes(torch.float32) > 0


@pytest.mark.full(keep=10)
@pytest.mark.parametrize(
    "name", [name for name, x in SMALL.items() if not isinstance(x, PublicModelSizes)]
)
def test_the_numbers_are_the_same_each_time(name: str) -> None:
    sizes = SMALL[name]
    first, second = (sizes.problem(torch.float32, CPU).reference() for _ in range(2))
    assert all(torch.equal(first[key], second[key]) for key in first)


def test_more_tokens_need_more_memory() -> None:
    for sizes in (AttentionSizes(**HEADS, S=10), LatentSizes(10), ModelSizes(10)):
        assert sizes.resized(length=1 << 22).bytes(torch.float32) > sizes.bytes(torch.float32)


def test_the_reference_of_documents_hides_other_documents() -> None:
    sizes = ParallelSizes(B=1, H=4, G=2, D=16, S=96, W=2, documents=True)
    problem = sizes.problem(torch.float32, CPU)
    places = torch.arange(96)
    visible = problem.visible_rows(slice(0, 96))[0, 0]
    assert torch.equal(visible, problem.mask.block(places[None], places[None])[0, 0])
