"""Negative controls: attention that is wrong in the ways in which people get it wrong must fail the
rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tests.ops.softmax.cases import Case, make
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import assert_close_rule

SHAPE = (2, 4, 2, 19, 33, 8, 8)
Wrong = Callable[..., tuple[Tensor, Tensor]]


def scaled(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    return plain_attention(q, k, v, **{**options, "scale": 1.0})  # type: ignore[arg-type]


def scaled_by_value_dim(
    q: Tensor, k: Tensor, v: Tensor, **options: object
) -> tuple[Tensor, Tensor]:
    return plain_attention(q, k, v, **{**options, "scale": 1 / q.shape[-1]})  # type: ignore[arg-type]


def top_left(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    T, S = q.shape[2], k.shape[2]
    return plain_attention(
        q, k, v, **{**options, "visible": torch.ones(T, S, dtype=torch.bool).tril()}
    )  # type: ignore[arg-type]


def one_key_more(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    T, S = q.shape[2], k.shape[2]
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    return plain_attention(q, k, v, **{**options, "visible": (distance >= 0) & (distance < 8)})  # type: ignore[arg-type]


def tiled_heads(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    n = q.shape[1] // k.shape[1]
    return plain_attention(q, k.repeat(1, n, 1, 1), v.repeat(1, n, 1, 1), **options)  # type: ignore[arg-type]


def sink_with_a_value(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    out, lse = plain_attention(q, k, v, **options)  # type: ignore[arg-type]
    sink = options["sink"]
    assert isinstance(sink, Tensor)
    return out + torch.sigmoid(sink[:, None] - lse)[..., None] * v[:, :, :1].repeat_interleave(
        2, 1
    ), lse


def sink_forgotten(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    return plain_attention(q, k, v, **{**options, "sink": None})  # type: ignore[arg-type]


def sink_in_the_lse(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    out, lse = plain_attention(q, k, v, **options)  # type: ignore[arg-type]
    sink = options["sink"]
    assert isinstance(sink, Tensor)
    return out, torch.logaddexp(lse, sink[:, None])


def softcap_forgotten(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    return plain_attention(q, k, v, **{**options, "softcap": None})  # type: ignore[arg-type]


def softcap_after_the_bias(
    q: Tensor, k: Tensor, v: Tensor, **options: object
) -> tuple[Tensor, Tensor]:
    c, bias = options["softcap"], options["bias"]
    assert isinstance(c, float)
    assert isinstance(bias, Tensor)
    s = (q * q.shape[-1] ** -0.5) @ k.repeat_interleave(q.shape[1] // k.shape[1], 1).mT + bias
    change = c * torch.tanh(s / c) - s + bias
    return plain_attention(q, k, v, **{**options, "softcap": None, "bias": change})  # type: ignore[arg-type]


def base_two(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    out, lse = plain_attention(q, k, v, **options)  # type: ignore[arg-type]
    return out, lse / math.log(2)


def mean_of_the_blind(q: Tensor, k: Tensor, v: Tensor, **options: object) -> tuple[Tensor, Tensor]:
    out, lse = plain_attention(q, k, v, **options)  # type: ignore[arg-type]
    mean = v.mean(2, keepdim=True).repeat_interleave(q.shape[1] // v.shape[1], 1)
    return torch.where(lse.isneginf()[..., None], mean, out), lse


def lse_zero_of_the_blind(
    q: Tensor, k: Tensor, v: Tensor, **options: object
) -> tuple[Tensor, Tensor]:
    out, lse = plain_attention(q, k, v, **options)  # type: ignore[arg-type]
    return out, lse.masked_fill(lse.isneginf(), 0)


@pytest.mark.full(keep="each")
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
@pytest.mark.parametrize(
    "wrong, case",
    [
        (scaled, Case("causal", SHAPE)),
        (scaled_by_value_dim, Case("causal", SHAPE)),
        (top_left, Case("causal", SHAPE)),
        (one_key_more, Case("window", SHAPE)),
        (tiled_heads, Case("causal", SHAPE)),
        (sink_with_a_value, Case("causal", SHAPE, sink=True)),
        (sink_forgotten, Case("causal", SHAPE, sink=True)),
        (sink_in_the_lse, Case("causal", SHAPE, sink=True)),
        (softcap_forgotten, Case("causal", SHAPE, softcap=1.5)),
        (softcap_after_the_bias, Case("causal", SHAPE, softcap=1.5, bias="t5")),
        (base_two, Case("causal", SHAPE)),
        (mean_of_the_blind, Case("heads", SHAPE)),
        (lse_zero_of_the_blind, Case("heads", SHAPE)),
    ],
    ids=lambda x: getattr(x, "__name__", str(x)),
)
def test_wrong_attention_fails_the_rule(wrong: Wrong, case: Case, dtype: torch.dtype) -> None:
    low, high = make(case, dtype), make(case, torch.float64, like=dtype)
    outs, lses = zip(*several_plains(low.q, low.k, low.v, **low.plain()), strict=True)
    right = plain_attention(high.q, high.k, high.v, **high.plain())
    # computed in float64: nothing but the mistake is wrong
    out, lse = (x.to(dtype) for x in wrong(high.q, high.k, high.v, **high.plain()))

    def judge(out: Tensor, lse: Tensor) -> None:
        assert_close_rule(out, outs, right[0], what="out")
        assert_close_rule(lse, lses, right[1], what="lse")

    judge(right[0].to(dtype), right[1].to(dtype))
    with pytest.raises(AssertionError, match=r"^(out|lse) (error|-inf|NaN)"):
        judge(out, lse)


def test_masking_by_multiplication_fails() -> None:
    made = make(Case("causal", SHAPE), torch.float32)
    right = plain_attention(made.q, made.k, made.v, **made.plain())[0]
    dirty = made.v.clone()
    dirty[:, :, -1] = math.nan  # the last key: only the last query sees it
    weights = torch.where(made.visible, 1.0, 0.0)
    wrong = (weights / weights.sum(-1, keepdim=True)) @ dirty.repeat_interleave(2, 1)
    assert wrong[:, :, :-1].isnan().all()
    with pytest.raises(AssertionError, match="out NaN at"):
        assert_close_rule(wrong, right, right.double(), what="out")


def test_a_nan_made_zero_fails() -> None:
    ref = torch.tensor([1.0, math.nan], dtype=torch.float64)
    with pytest.raises(AssertionError, match="NaN at 0 places, not 1"):
        assert_close_rule(torch.tensor([1.0, 0.0]), ref.float(), ref)


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_the_rule_allows_rounding_and_little_more(dtype: torch.dtype) -> None:
    ref = torch.randn(1000, dtype=torch.float64)
    x = ref.to(dtype)
    assert_close_rule(x, x, x.double())
    with pytest.raises(AssertionError, match="error"):
        assert_close_rule(x * (1 + 32 * torch.finfo(dtype).eps), x, x.double())
