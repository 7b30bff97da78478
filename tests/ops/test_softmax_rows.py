"""The softmax of a row of prefill, and its gradient, against numpy in fp64: queries, keys and
values are chosen so that the results are the numbers of the row.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from regard.ops.cpu.attention import PrefillArgs, prefill, prefill_gradient
from tests.kernels import require_kernels

require_kernels()

UNBOUNDED = 1 << 62


def row(n: int, seed: int = 0) -> Tensor:
    """Return a row of random scores."""
    return torch.randn(n, generator=torch.Generator().manual_seed(seed))


def attention_of(scores: Tensor, ranges: list[Any], *, T: int = 1, **more: Any) -> PrefillArgs:
    """Arguments in which the score of each of T queries and key j is scores[j], and value j has a 1
    in dimension j. A query sees the keys within its ranges, `[T, n]` starts and stops.
    """
    S = len(scores)
    starts, stops = (torch.as_tensor(x).view(1, 1, T, -1) for x in ranges)
    options: dict[str, Any] = {"scale": 1.0, "softcap": 0.0, "symmetric": False}
    options |= {"slopes": torch.zeros(0), "q_positions": torch.zeros(1, T).long()}
    options |= {"k_positions": torch.arange(S)[None], "out_dtype": torch.float32}
    q, k, v = torch.ones(1, 1, T, 1), scores.view(1, 1, S, 1), torch.eye(S).view(1, 1, S, S)
    return PrefillArgs(q, k, v, **{"starts": starts, "stops": stops, **options, **more})


def of_all(scores: Tensor, **more: Any) -> tuple[Tensor, ...]:
    return prefill(attention_of(scores, [[0], [UNBOUNDED]], **more))


@pytest.mark.parametrize("n", [64, 130, 300])
def test_the_largest_score_is_found_in_every_place(n: int) -> None:
    s = row(n)
    for place in range(n):
        here = s.clone()
        here[place] = 9
        assert of_all(here)[1] == 9
        here[place] = math.nan  # ignored
        assert of_all(here)[1] == s[torch.arange(n) != place].max()
    out, top, total = of_all(torch.full_like(s, -math.inf))
    assert (out.any(), top, total) == (False, 0, 0), "no key is visible"
    assert of_all(torch.full_like(s, math.nan))[0].isnan().all()


def weights_of(scores: Tensor) -> np.ndarray:
    """The weight e^s of each score s up to 0, from a query that sees it and a score of 0 only."""
    T = len(scores)
    at = torch.arange(1, T + 1)
    starts = torch.stack([torch.zeros_like(at), at], 1)
    args = attention_of(torch.cat([torch.zeros(1), scores]), [starts, starts + 1], T=T)
    out, _, total = prefill(args)
    return out[0, 0].double().numpy()[at - 1, at] * total[0, 0].double().numpy()


def test_weights_are_accurate_to_one_rounding_over_their_whole_range() -> None:
    s = -torch.linspace(0, 86.9, 2000)
    exact = np.exp(s.double().numpy())
    error = np.abs(weights_of(s) - exact) / np.spacing(exact.astype(np.float32))
    assert error.max() < 1.5 + 1, "two more roundings are those of the division by the total"
    total = of_all(s)[2].item()
    assert abs(total - exact.sum()) < 1e-6 * exact.sum()


def test_small_weights_are_zero_and_nan_stays() -> None:
    s = torch.tensor([-math.inf, -87.5, -1e30, -3.0, math.nan])
    found = weights_of(s)
    assert found[:3].tolist() == [0, 0, 0]
    assert found[3] == pytest.approx(math.exp(-3), rel=1e-6)
    assert np.isnan(found[4])
    assert of_all(s)[2].isnan()


@pytest.mark.parametrize("scale", [0.125, 0.1, 1 / 3, 7.3])
def test_the_weight_of_the_largest_score_is_exactly_one(scale: float) -> None:
    for seed in range(50):
        s = row(64, seed) * 30
        out, top, total = of_all(s, scale=scale)
        assert top == np.float32(scale) * s.max()
        assert out[0, 0, 0, s.argmax()] == 1 / total.flatten()


@pytest.mark.parametrize(
    ("starts", "stops"),
    [
        *(([x], [y]) for x, y in ((0, UNBOUNDED), (3, 20), (-5, 4), (7, 7), (9, 2), (500, 900))),
        ([3, 70], [20, 99]),
        ([0, 40, 90], [64, 40, 200]),
    ],
)
def test_what_lies_outside_of_the_ranges_is_hidden(starts: list[int], stops: list[int]) -> None:
    positions = np.arange(130)
    positions[::7] = -1  # empty slots
    inside = np.zeros(130, bool)
    for start, stop in zip(starts, stops, strict=True):
        inside |= (max(start, 0) <= positions) & (positions < stop)
    args = attention_of(
        torch.zeros(130), [starts, stops], k_positions=torch.from_numpy(positions)[None]
    )
    out, _, total = prefill(args)
    assert total == inside.sum()
    np.testing.assert_array_equal(out.flatten() > 0, inside)


@pytest.mark.parametrize("shared", ["starts", "stops"])
def test_a_bound_may_be_shared_by_all_queries(shared: str) -> None:
    at = torch.arange(300)
    one = torch.tensor([0 if shared == "starts" else UNBOUNDED]).view(1, 1, 1, 1)
    args = attention_of(torch.zeros(300), [at, at + 1], T=300, **{shared: one})
    seen = at[:, None] >= at if shared == "starts" else at[:, None] <= at
    out, _, total = prefill(args)
    assert torch.equal(total[0, 0], seen.sum(-1).float())
    assert torch.equal(out[0, 0] > 0, seen)


def gradient_of(args: PrefillArgs, d_out: Tensor, d_lse: float) -> tuple[Tensor, ...]:
    out, *saved = prefill(args)
    return prefill_gradient(
        args, out, (saved[0], saved[1]), d_out, torch.full_like(saved[0], d_lse)
    )


def test_the_gradient_of_a_row() -> None:
    s, d = row(130), row(130, 1)
    s[5] = -math.inf
    args = attention_of(s, [[0], [UNBOUNDED]], scale=0.3)
    _, d_k, d_v = gradient_of(args, d.view(1, 1, 1, 130), 0.7)
    scores = 0.3 * s.double()
    p = scores.softmax(0)
    wanted = p * (d.double() - (p @ d.double()) + 0.7)
    torch.testing.assert_close(d_k.flatten().double(), 0.3 * wanted, rtol=4e-6, atol=1e-8)
    torch.testing.assert_close(
        d_v[0, 0].double(), p[:, None] * d.double(), rtol=2e-6, atol=0, check_dtype=False
    )


def test_a_masked_key_with_nan_gets_no_gradient() -> None:
    s = row(130)
    args = attention_of(s, [[0], [100]])
    out, *saved = prefill(args)
    args.k[0, 0, 105:110] = math.nan
    args.v[0, 0, 110:] = math.nan
    d_out = row(130, 1).view(1, 1, 1, 130)
    _, d_k, _ = prefill_gradient(args, out, (saved[0], saved[1]), d_out, saved[0])
    assert d_k[0, 0, :100].isfinite().all()
    assert not d_k[0, 0, 100:].any()


@pytest.mark.parametrize("scale", [0.125, 0.1, 1 / 3, 7.3])
def test_a_weight_of_one_leaves_the_gradient_of_the_lse(scale: float) -> None:
    s, alone = row(50) * 30, 0.7
    at = torch.arange(50)
    args = attention_of(s, [at, at + 1], T=50, scale=scale)
    d_q, d_k, _ = gradient_of(args, torch.randn(1, 1, 50, 50), alone)
    assert torch.equal(d_q.flatten(), (torch.tensor(alone) * s) * scale)
    assert torch.equal(d_k.flatten(), torch.full((50,), alone) * scale)
