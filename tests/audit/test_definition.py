"""The definition against loops in float64, and each of its faults told from the right one."""

from __future__ import annotations

import itertools
import math
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.audit.adapters.base import Projections
from regard.audit.check_context import worst_mismatch
from regard.audit.fault_search import candidates
from regard.audit.reference import (
    FAULTY_VALUES,
    AttentionVariant,
    ReferenceInputs,
    alibi_slopes,
    reference_attention,
)
from regard.tolerance import allowed_error
from tests.oracles.oracle import softmax_attention

H, G, D, M, T = 4, 2, 4, 12, 5
W = 3


def maps(heads: int = H, groups: int = G) -> Projections:
    make = torch.Generator().manual_seed(0)
    q, k, v, o = (
        torch.randn(n, m, generator=make, dtype=torch.float64) * m**-0.5
        for n, m in ((heads * D, M), (groups * D, M), (groups * D, M), (M, heads * D))
    )
    bias = torch.randn(M, generator=make, dtype=torch.float64)
    return Projections((q, None), (k, None), (v, None), (o, bias), heads, groups)


def turned(x: list[float], position: int, layout: str) -> list[float]:
    """x rotated pair by pair."""
    out = list(x)
    for i in range(D // 2):
        a, b = (i, i + D // 2) if layout == "half" else (2 * i, 2 * i + 1)
        angle = position * 10000.0 ** (-2 * i / D)
        out[a] = x[a] * math.cos(angle) - x[b] * math.sin(angle)
        out[b] = x[b] * math.cos(angle) + x[a] * math.sin(angle)
    return out


def by_loops(x: Tensor, m: Projections, layout: str, window: int | None) -> Tensor:
    q, k, v = ((x @ w.T).unflatten(-1, (-1, D)).transpose(1, 2) for w, _ in (m.q, m.k, m.v))
    if layout != "none":
        for y, i in itertools.product((q, k), range(T)):
            for b, h in itertools.product(range(len(y)), range(y.shape[1])):
                y[b, h, i] = torch.tensor(turned(y[b, h, i].tolist(), i, layout), dtype=y.dtype)

    def sees(b: int, h: int, i: int, j: int) -> bool:
        return j <= i and (window is None or i - j < window)

    z = softmax_attention(q, k, v, visible=sees).out
    return z.transpose(1, 2).flatten(2) @ m.o[0].T + m.o[1]


def tokens() -> Tensor:
    return (
        torch.randn(2, T, M, generator=torch.Generator().manual_seed(1), dtype=torch.float64) * 1.5
    )


def keep(window: int | None = None) -> Tensor:
    i, j = torch.arange(T)[:, None], torch.arange(T)
    return (j <= i) & (i - j < (window or T))


@pytest.mark.parametrize("window", [None, W])
@pytest.mark.parametrize("layout", ["none", "half", "interleaved"])
def test_the_right_steps_are_the_definition(layout: str, window: int | None) -> None:
    x, m = tokens(), maps()
    out = reference_attention(
        ReferenceInputs(x, m, keep(window), None, window), AttentionVariant(rotary=layout)
    )
    expected = by_loops(x, m, layout, window)
    assert float((out - expected).abs().max()) <= 1e-12 * float(expected.abs().max())


FAULTS = [(name, value) for name, values in FAULTY_VALUES.items() for value in values]


def given(m: Projections, dtype: torch.dtype = torch.float64) -> ReferenceInputs:
    make = torch.Generator().manual_seed(3)
    bias = torch.randn(1, H, T, T, generator=make, dtype=torch.float64)
    return ReferenceInputs(tokens().to(dtype), m, keep(W), None, W, bias)


def steps(field: str, value: str) -> AttentionVariant:
    return AttentionVariant(**{field: value, **({"factor": 0.3} if value == "fitted" else {})})


def test_each_fault_is_another_function() -> None:
    """Beyond the error rule in float32: from the right steps, and from every other single fault."""
    for G in (H, 2):
        m = maps(groups=G)
        # queries and keys have as many heads where their roles are exchanged
        tried = [(f, v) for f, v in FAULTS if (f == "roles") == (G == H) and f != "sink"]
        numbers, plain = given(m), given(m, torch.float32)
        rights = [
            AttentionVariant(),
            AttentionVariant(rotary="half"),
            AttentionVariant(rotary="interleaved"),
            AttentionVariant(bias="alibi"),
        ]
        ways = {(f, v): steps(f, v) for f, v in tried if (f, v) != ("output", "absent")}
        ways |= {right: right for right in rights}
        refs = {
            way: (reference_attention(numbers, each), reference_attention(plain, each))
            for way, each in ways.items()
        }
        for f, v in tried:
            wrong = steps(f, v)
            assert wrong.faults == (f,)
            mine = reference_attention(plain, wrong)
            for other, (ref, ours) in refs.items():
                far = other == (f, v) or worst_mismatch(mine, [ours], ref) is not None
                same = {(f, v), other} == {("mask", "own-hidden-zero"), ("mask", "own-hidden")}
                assert far or same, ((f, v), other)
            if (f, v) in refs:
                assert worst_mismatch(mine, [mine], refs[f, v][0]) is None


def test_a_sink_whose_share_is_given_back_does_nothing() -> None:
    m = replace(maps(), sinks=torch.randn(H, generator=torch.Generator().manual_seed(4)))
    right, wrong = (
        reference_attention(given(m), each)
        for each in (AttentionVariant(), AttentionVariant(sink="renormalized"))
    )
    without = reference_attention(given(maps()), AttentionVariant())
    assert float((wrong - without).abs().max()) < 1e-12
    assert float((right - without).abs().max()) > 0.1


def test_candidates_begin_with_the_fewest_faults() -> None:
    def found(n: int, **changes: Any) -> tuple[AttentionVariant, ...]:
        sizes = {"heads": H, "groups": G, "head_dim": D, "bases": (10000.0,), "n": n, **changes}
        return candidates(**sizes)

    for n in range(3):
        assert {len(s.faults) for s in found(n)} == {n}
    assert found(0)[0] == AttentionVariant()
    # one key/value head for all: their order says nothing
    assert all(s.groups == "adjacent" for s in found(1, groups=1))
    masks = {s.mask for s in found(1)}
    assert masks.isdisjoint({"one-more", "one-less"})
    assert {"one-more", "one-less"} <= {s.mask for s in found(1, windowed=True)}
    # a fused map does not say which part is which
    assert any(s.roles != "named" for s in found(1))
    assert all(s.roles == "named" for s in found(1, named=False))


def test_slopes_are_those_of_the_paper() -> None:
    """Press, Smith and Lewis, section 3: 2^-1 to 2^-8 for 8 heads; 12 heads take every second one
    of 16 besides.
    """
    assert alibi_slopes(8).tolist() == [2.0**-n for n in range(1, 9)]
    assert alibi_slopes(12).tolist() == [2.0**-n for n in range(1, 9)] + [
        2.0**-0.5,
        2.0**-1.5,
        2.0**-2.5,
        2.0**-3.5,
    ]


def test_the_rule() -> None:
    ref = torch.tensor([1.0, float("inf"), float("nan")], dtype=torch.float64)
    x = ref.float()
    assert worst_mismatch(x, [x], ref) is None
    assert worst_mismatch(torch.tensor([1.0, 2.0, float("nan")]), [x], ref).position == (1,)
    assert worst_mismatch(
        torch.tensor([float("nan"), float("inf"), float("nan")]), [x], ref
    ).position == (0,)
    assert worst_mismatch(torch.ones(2), [x], ref) is not None
    plain = torch.tensor([1.25, float("inf"), float("nan")])
    rounding = 2 * abs(float((torch.ones(1) + 0.3 - 0.3 - 1).double()))
    assert allowed_error([x, plain], ref) == 0.5 + rounding
    assert worst_mismatch(torch.tensor([1.5, float("inf"), float("nan")]), [plain], ref) is None
    assert (
        worst_mismatch(torch.tensor([1.6, float("inf"), float("nan")]), [plain], ref).expected
        == 1.0
    )
