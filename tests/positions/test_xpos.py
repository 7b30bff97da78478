"""XPos. Numbers: computed in float64 from the formulas."""

from __future__ import annotations

import pytest
import torch

from regard.errors import ArgumentError
from regard.positions import Rotary, XPos, xpos_reach, xpos_zeta
from regard.span import Span

F64 = torch.float64


def test_zeta_and_reach():
    zeta = xpos_zeta(64)
    assert len(zeta) == 32
    assert (zeta[0], zeta[1], zeta[31]) == pytest.approx(
        (0.2857142857142857, 0.3080357142857143, 0.9776785714285714), rel=1e-15
    )
    assert xpos_reach(64, torch.float16) == 4532
    assert xpos_reach(64, torch.float32) == 36260
    for reach, finite in ((4532, True), (4533, False)):
        scale = torch.tensor(zeta[0], dtype=F64) ** (-reach / 512)
        assert bool(scale.half().isfinite()) is finite


@pytest.mark.parametrize("layout", ["half", "interleaved"])
def test_the_score_is_the_rotary_one_times_zeta_to_the_distance(layout):
    q, k = torch.randn(2, 1, 2, 6, 8, dtype=F64).unbind(0)
    far = Span(1000, 6)
    found = XPos(8, "query", layout=layout)(q, far) @ XPos(8, "key", layout=layout)(k, far).mT
    turned_q, turned_k = Rotary(8, layout=layout)(q, far), Rotary(8, layout=layout)(k, far)
    pair = [torch.arange(8) % 4, torch.arange(8) // 2][layout == "interleaved"]
    zeta = torch.tensor(xpos_zeta(8), dtype=F64)[pair]
    by_hand = torch.zeros_like(found)
    for i in range(6):
        for j in range(6):
            decay = zeta ** ((i - j) / 512)
            by_hand[..., i, j] = (turned_q[:, :, i] * turned_k[:, :, j] * decay).sum(-1)
    torch.testing.assert_close(found, by_hand, rtol=1e-11, atol=1e-11)
    moved = Span(3000, 6)
    centred = [XPos(8, role, layout=layout, center=3003) for role in ("query", "key")]
    torch.testing.assert_close(
        centred[0](q, moved) @ centred[1](k, moved).mT, found, rtol=1e-9, atol=1e-9
    )


def test_it_decays_to_the_past_and_grows_to_the_future():
    ones = torch.ones(1, 1, 1, 2, dtype=F64)
    step = {"base": 1e300}  # no rotation to speak of: only the scale
    q = XPos(2, "query", **step)
    k = XPos(2, "key", **step)
    past, here, future = (
        abs(complex(*q(ones, Span(5000, 1)).flatten().tolist()))
        * abs(complex(*k(ones, Span(5000 + d, 1)).flatten().tolist()))
        for d in (-512, 0, 512)
    )
    assert past == pytest.approx(here * 0.2857142857142857)
    assert future == pytest.approx(here / 0.2857142857142857)


def test_empty_slots_dtypes_and_compile():
    step = XPos(8, "key", center=30_000)
    x = torch.randn(1, 2, 3, 8)
    assert step(x, torch.tensor([[-1, 29_999, 30_001]])).isfinite().all()
    assert step.scale(torch.tensor([[-1]])).tolist() == [[[1.0] * 4]]
    assert step(x.half(), torch.tensor([[-1, -1, -1]])).dtype == torch.float16
    assert step(x[:, :, :0], Span(0, 0)).shape == (1, 2, 0, 8)
    assert step.state_dict() == {}
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, Span(30_000, 3)), step(x, Span(30_000, 3)))
    assert str(step) == "XPos(8, key, center=30000, layout='half')"


@pytest.mark.parametrize(
    "call, message",
    [
        (
            lambda: XPos(64, "query")(torch.ones(1, 1, 1, 64).half(), Span(4533, 1)),
            "4533 from the center 0, but in float16 the scale of XPos overflows beyond 4532",
        ),
        (
            lambda: XPos(64, "key")(torch.ones(1, 1, 1, 64), torch.tensor([[40_000]])),
            "40000 from the center 0, but in float32 the scale of XPos overflows beyond 36260",
        ),
        (
            lambda: XPos(64, "key", center=50_000)(torch.ones(1, 1, 1, 64), Span(3, 1)),
            "position 3 is 49997 from",
        ),
        (lambda: XPos(8, "value"), "role is 'value'"),
        (lambda: XPos(8, "key", layout="x"), "layout is 'x'"),
        (lambda: XPos(8, "key", gamma=0.0), "gamma is 0.0"),
        (lambda: XPos(8, "key", scale_base=-1.0), "scale_base is -1.0"),
        (lambda: XPos(7, "key"), "dim is 7"),
    ],
)
def test_bad_arguments(call, message):
    with pytest.raises(ArgumentError, match=message):
        call()


def test_at_its_reach_it_is_still_finite():
    x = torch.full((1, 1, 1, 64), 0.5, dtype=torch.float16)
    assert XPos(64, "key")(x, Span(4532, 1)).isfinite().all()
