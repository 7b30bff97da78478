"""Samplers against their definition in Python loops, against transformers' processors, and at their
limits.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers.generation import logits_process as theirs

import regard
from regard.models.generation import Sampler, SamplingParams, distribution
from tests.rules import assert_close_rule

SETTINGS = [
    SamplingParams(temperature=1.0),
    SamplingParams(temperature=0.3),
    SamplingParams(temperature=2.5, top_k=1),
    SamplingParams(temperature=1.0, top_k=7),
    SamplingParams(temperature=1.0, top_p=0.5),
    SamplingParams(temperature=1.7, top_p=0.93),
    SamplingParams(temperature=1.0, top_p=1e-9),
    SamplingParams(temperature=1.0, min_p=0.0),
    SamplingParams(temperature=1.0, min_p=0.2),
    SamplingParams(temperature=1.0, min_p=1.0),
    SamplingParams(temperature=0.8, repetition_penalty=1.6),
    SamplingParams(temperature=0.8, repetition_penalty=0.4),
    SamplingParams(temperature=0.9, top_k=9, top_p=0.8, min_p=0.05, repetition_penalty=1.3),
    SamplingParams(temperature=0.0, repetition_penalty=1.9),
]


def definition(logits: list[float], how: SamplingParams, seen: list[bool]) -> list[float]:
    """One row, step by step."""
    x = []
    for value, was in zip(logits, seen, strict=True):
        if was:
            value = value * how.repetition_penalty if value < 0 else value / how.repetition_penalty
        x.append(value)
    order = sorted(range(len(x)), key=lambda i: (-x[i], i))
    if how.temperature == 0:
        return [float(i == order[0]) for i in range(len(x))]
    x = [value / how.temperature for value in x]
    kept = [i for i in order if x[i] > -math.inf][: how.top_k]
    if how.top_p is not None and how.top_p < 1:
        weights = [math.exp(x[i] - x[order[0]]) for i in kept]
        total, before, chosen = math.fsum(weights), 0.0, []
        for i, weight in zip(kept, weights, strict=True):
            if before / total >= how.top_p:
                break
            chosen.append(i)
            before += weight
        kept = chosen
    if how.min_p is not None:
        kept = [i for i in kept if math.exp(x[i] - x[order[0]]) >= how.min_p]
    weights = {i: math.exp(x[i] - x[order[0]]) for i in kept}
    total = math.fsum(weights.values())
    return [weights.get(i, 0.0) / total for i in range(len(x))]


def of_rows(logits: Tensor, how: SamplingParams, seen: Tensor) -> Tensor:
    rows = zip(logits.tolist(), seen.tolist(), strict=True)
    return torch.tensor([definition(x, how, was) for x, was in rows], dtype=torch.float64)


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("how", SETTINGS, ids=str)
@pytest.mark.parametrize("scale", [0.01, 1.0, 8.0])
def test_a_distribution_is_its_definition(how: SamplingParams, scale: float) -> None:
    logits = scale * torch.randn(5, 40, dtype=torch.float64)
    logits[1, 3:9] = -math.inf
    logits[2] += 700
    seen = torch.rand(5, 40) < 0.4
    wanted = of_rows(logits, how, seen)
    found = distribution(logits, how, seen)
    assert float((found - wanted).abs().max()) < 1e-12 * max(1, scale)
    assert torch.equal(found > 0, wanted > 0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_half_precision_is_computed_in_fp32(dtype: torch.dtype) -> None:
    logits = (4 * torch.randn(6, 50)).to(dtype)
    none = torch.zeros(6, 50, dtype=torch.bool)
    how = SamplingParams(temperature=0.7)
    found = distribution(logits, how)
    assert found.dtype == torch.float32
    plain = (logits.float() / 0.7).softmax(1)
    assert_close_rule(found, plain, of_rows(logits.double(), how, none))


def test_a_step_that_is_left_out_is_found() -> None:
    """Negative control: each setting differs from plain softmax."""
    logits, none = torch.randn(5, 40, dtype=torch.float64), torch.zeros(5, 40, dtype=torch.bool)
    for how in SETTINGS[1:6]:
        assert float((logits.softmax(1) - of_rows(logits, how, none)).abs().max()) > 1e-3


def warped(logits: Tensor, *processors: object, ids: Tensor | None = None) -> Tensor:
    for processor in processors:
        logits = processor(ids, logits)  # type: ignore[operator]
    return logits.softmax(1)


def test_each_step_is_transformers_processor() -> None:
    logits = 3 * torch.randn(4, 200)
    ids = torch.randint(0, 200, (4, 30))
    seen = torch.zeros(4, 200, dtype=torch.bool).scatter(1, ids, value=True)
    pairs = [
        (SamplingParams(temperature=0.6), [theirs.TemperatureLogitsWarper(0.6)]),
        (SamplingParams(temperature=1.0, top_k=11), [theirs.TopKLogitsWarper(11)]),
        (SamplingParams(temperature=1.0, top_p=0.77), [theirs.TopPLogitsWarper(0.77)]),
        (SamplingParams(temperature=1.0, min_p=0.07), [theirs.MinPLogitsWarper(0.07)]),
        (
            SamplingParams(temperature=1.0, repetition_penalty=1.4),
            [theirs.RepetitionPenaltyLogitsProcessor(1.4)],
        ),
        (
            SamplingParams(
                temperature=1.8, top_k=90, top_p=0.9, min_p=0.02, repetition_penalty=1.2
            ),
            [
                theirs.RepetitionPenaltyLogitsProcessor(1.2),
                theirs.TemperatureLogitsWarper(1.8),
                theirs.TopKLogitsWarper(90),
                theirs.TopPLogitsWarper(0.9),
                theirs.MinPLogitsWarper(0.02),
            ],
        ),
    ]
    for how, processors in pairs:
        found, right = distribution(logits, how, seen), warped(logits, *processors, ids=ids)
        assert torch.equal(found > 0, right > 0), how
        assert_close_rule(found, right, of_rows(logits.double(), how, seen), what=str(how))


def test_ties_at_the_border_keep_exactly_k_where_transformers_keeps_all() -> None:
    logits = torch.tensor([[0.0, 2.0, 1.0, 1.0, 2.0, 1.0]])
    found = distribution(logits, SamplingParams(temperature=1.0, top_k=4))
    assert (found > 0).tolist() == [[False, True, True, True, True, False]]
    right = warped(logits, theirs.TopKLogitsWarper(4))
    assert (right > 0).tolist() == [[False, True, True, True, True, True]]
    flat = torch.zeros(1, 8)
    assert distribution(flat, SamplingParams(temperature=1.0, top_k=3))[
        0
    ].nonzero().flatten().tolist() == [0, 1, 2]
    assert distribution(flat, SamplingParams(temperature=1.0, top_p=0.3))[
        0
    ].nonzero().flatten().tolist() == [0, 1, 2]
    assert distribution(flat, SamplingParams())[0].tolist() == [1.0] + [0.0] * 7


@pytest.mark.parametrize("tokens", [4, 8, 1024, 2048])
def test_a_nucleus_ends_where_its_sum_is_reached_exactly(tokens: int) -> None:
    """Equal chances of a power of two are exact: the token that makes the sum top_p is the last,
    also among equals.
    """
    flat = torch.zeros(1, tokens)
    for share in (0.25, 0.5, 0.75):
        kept = (
            distribution(flat, SamplingParams(temperature=1.0, top_p=share))[0].nonzero().flatten()
        )
        assert kept.tolist() == list(range(int(share * tokens)))


def test_limits_that_leave_everything() -> None:
    """A tail that rounding loses beside 1 is not cut off by top_p=1, nor by min_p=0 or as many as
    there are.
    """
    logits = torch.tensor([[0.0, -40.0, -80.0]])
    for how in ({"top_p": 1.0}, {"min_p": 0.0}, {"top_k": 3}):
        found = distribution(logits, SamplingParams(temperature=1.0, **how))
        assert torch.equal(found, logits.softmax(1))
        assert found.gt(0).all()


def test_min_p_keeps_what_reaches_it_exactly() -> None:
    logits = torch.tensor([[0.0, 0.0, -1.0, -2.0]], dtype=torch.float64)
    least = math.exp(-1.0)
    assert float(logits.exp()[0, 2]) == least
    found = distribution(logits, SamplingParams(temperature=1.0, min_p=least))
    assert (found > 0).tolist() == [[True, True, True, False]]


def test_a_tiny_temperature_tells_neighbours_apart() -> None:
    near = torch.tensor([[1.0, 1.0 + 2**-23]])
    assert distribution(near, SamplingParams(temperature=1e-30)).tolist() == [[0.0, 1.0]]


def test_a_nucleus_of_more_than_a_thousand_tokens() -> None:
    """The shortcut over the likeliest 1024 gives way to a full sort."""
    logits = torch.randn(2, 3000, dtype=torch.float64)
    logits[1, 5] = 30
    how, none = SamplingParams(temperature=1.0, top_p=0.95), torch.zeros(2, 3000, dtype=torch.bool)
    found, wanted = distribution(logits, how), of_rows(logits, how, none)
    assert torch.equal(found > 0, wanted > 0)
    assert (found > 0).sum(1).tolist()[1] == 1 < 1024 < (found > 0).sum(1).tolist()[0]


@given(
    st.lists(st.floats(-50, 50), min_size=1, max_size=12),
    st.floats(0.01, 9),
    st.integers(1, 12),
    st.floats(0.001, 1),
    st.floats(0, 1),
)
def test_something_always_stays(
    row: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    how = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    found = distribution(torch.tensor([row], dtype=torch.float64), how)[0]
    best = row.index(max(row))
    assert float(found[best]) == float(found.max()) > 0
    assert 1 <= int((found > 0).sum()) <= top_k
    assert abs(float(found.sum()) - 1) < 1e-12


@pytest.mark.parametrize("temperature", [1e-30, 1e-45, 1e-300])
def test_a_tiny_temperature_is_the_likeliest_token(temperature: float) -> None:
    for logits in (torch.randn(3, 50), 1e4 * torch.randn(3, 50)):
        found = distribution(logits, SamplingParams(temperature=temperature))
        assert torch.equal(found.argmax(1), logits.argmax(1))
        assert torch.equal(found.max(1).values, torch.ones(3))


def test_draws_follow_the_distribution_and_rows_do_not_meet() -> None:
    logits = torch.randn(2, 30)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=5), [[0], [0]], 30)
    draws = torch.tensor([sampler(logits) for _ in range(2500)])
    for row in range(2):
        share = draws[:, row].bincount(minlength=30) / 2500
        assert float((share - logits[row].softmax(0)).abs().sum()) < 0.2
    alone = Sampler(SamplingParams(temperature=1.0, seed=6), [[0]], 30)
    assert [alone(logits[1:])[0] for _ in range(50)] == draws[:50, 1].tolist()


def test_rows_that_are_kept_keep_their_generator_and_what_they_saw() -> None:
    how = SamplingParams(temperature=1.5, repetition_penalty=3.0, seed=1)
    logits = torch.randn(20, 3, 12)
    whole, part = (Sampler(how, [[1], [2], [3, 4]], 12) for _ in range(2))
    for step in range(20):
        right = whole(logits[step])
        if step == 7:
            part.select([2, 0])
        if step < 7:
            assert part(logits[step]) == right
        else:
            assert part(logits[step][[2, 0]]) == [right[2], right[0]]


def test_the_penalty_counts_prompt_and_draws() -> None:
    logits = torch.tensor([[4.0, 3.9, 3.8, -1.0]])
    sampler = Sampler(SamplingParams(repetition_penalty=1.5), [[0]], 4)
    assert [sampler(logits)[0] for _ in range(3)] == [1, 2, 0]


def test_logits_that_are_no_numbers_are_refused() -> None:
    for bad, word in ((math.nan, "nan"), (math.inf, "inf")):
        logits = torch.randn(3, 5)
        logits[1, 2] = bad
        for how in (
            SamplingParams(),
            SamplingParams(temperature=1.0),
            SamplingParams(repetition_penalty=2.0),
        ):
            with pytest.raises(
                regard.ArgumentError, match=f"largest logit of row 1 is {word}, and no token"
            ):
                Sampler(how, [[0]] * 3, 5)(logits)
    with pytest.raises(regard.ArgumentError, match="largest logit of row 0 is -inf"):
        distribution(torch.full((1, 4), -math.inf), SamplingParams(temperature=1.0))


def test_errors() -> None:
    cases = [
        ({"temperature": -0.5}, "temperature is -0.5; it must be 0 or more"),
        ({"temperature": math.nan}, "temperature is nan; it must be 0 or more"),
        ({"top_k": 0}, "top_k is 0; it must be at least 1, or None"),
        ({"top_p": 0.0}, "top_p is 0.0; it must be above 0 and at most 1, or None"),
        ({"top_p": 1.1}, "top_p is 1.1; it must be above 0 and at most 1, or None"),
        ({"min_p": -0.1}, "min_p is -0.1; it must be 0 to 1, or None"),
        ({"min_p": 2}, "min_p is 2; it must be 0 to 1, or None"),
        ({"repetition_penalty": 0}, "repetition_penalty is 0; it must be above 0"),
        ({"seed": -1}, "seed is -1; it must be an int from 0 to 4294967295"),
        ({"seed": 2**32}, "seed is 4294967296; it must be an int from 0 to 4294967295"),
        ({"repetition_penalty": math.inf}, "repetition_penalty is inf; it must be above 0"),
    ]
    for change, message in cases:
        with pytest.raises(regard.ArgumentError) as error:
            SamplingParams(**change)
        assert str(error.value) == message
    for name, value in (("top_k", 2.0), ("seed", "1"), ("top_k", True)):
        with pytest.raises(regard.ArgumentTypeError, match=f"{name} is .*; it must be an int"):
            SamplingParams(**{name: value})
    with pytest.raises(regard.ArgumentError, match="top_k is 9; it must be 1 to 5, or None"):
        Sampler(SamplingParams(top_k=9), [[0]], 5)
