"""Rotation: against the definition in fp64, its laws, its precision, and what a module may not
lose.
"""

from __future__ import annotations

import copy
import io
import itertools
import math
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError, ArgumentTypeError
from regard.positions import (
    DynamicNTK,
    DynamicYaRN,
    LinearScaling,
    LongRoPE,
    Rotary,
    YaRN,
    rope_frequencies,
    rotate,
)
from regard.span import Span

LAYOUTS = ("half", "interleaved")
F64 = torch.float64


def oracle(x, positions, inv_freq, layout, factor=1.0):
    """The definition: one pair at a time, in Python floats."""
    out = x.double().clone()
    n = len(inv_freq)
    for b in range(x.shape[0]):
        for t in range(x.shape[2]):
            p = int(positions[b % positions.shape[0], t])
            for i in range(n):
                c, s = math.cos(p * float(inv_freq[i])), math.sin(p * float(inv_freq[i]))
                first, second = (i, i + n) if layout == "half" else (2 * i, 2 * i + 1)
                u, v = x[b, :, t, first].double(), x[b, :, t, second].double()
                out[b, :, t, first] = factor * (u * c - v * s)
                out[b, :, t, second] = factor * (v * c + u * s)
    return out


def allowed(plain, ref, dtype):
    """2 x the error of plain math in the same dtype, plus 2 roundings of the result."""
    r = ref.to(dtype)
    return 2 * (plain.double() - ref).abs().max() + 2 * (r + 0.3 - 0.3 - r).abs().max().double()


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("dtype", [F64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("rotary_dim", [8, 4, 0])
def test_rotate_is_the_definition(layout, dtype, scale, rotary_dim):
    x = (torch.randn(2, 3, 5, 8) * scale).to(dtype)
    x[0, 0, 0, 0], x[1, 2, 3] = 0, 300.0
    positions = torch.tensor([[0, 1, 2, 255, 257], [-1, -1, 0, 4096, 131071]])
    inv_freq = rope_frequencies(8, rotary_dim=rotary_dim).inv_freq
    found = rotate(x, positions, inv_freq, layout=layout, factor=1.25)
    assert found.dtype == dtype
    assert found.shape == x.shape
    ref = oracle(x, positions, inv_freq, layout, 1.25)
    n = len(inv_freq)
    angle = positions[:, None, :, None].double() * inv_freq
    cos, sin = (1.25 * angle.cos()).to(dtype), (1.25 * angle.sin()).to(dtype)
    a, b = (
        (x[..., :n], x[..., n : 2 * n])
        if layout == "half"
        else (x[..., 0 : 2 * n : 2], x[..., 1 : 2 * n : 2])
    )
    pairs = a * cos - b * sin, b * cos + a * sin
    plain = torch.cat(pairs, -1) if layout == "half" else torch.stack(pairs, -1).flatten(-2)
    plain = torch.cat((plain, x[..., 2 * n :]), -1)
    assert (found.double() - ref).abs().max() <= allowed(plain, ref, dtype)
    assert torch.equal(found[..., 2 * n :], x[..., 2 * n :])


def test_by_hand():
    x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=F64)[None, None, None]
    inv_freq = rope_frequencies(4).inv_freq
    for layout, by_hand in (
        ("interleaved", (-1.142639663748, 1.922075596544, 2.959850667913, 4.029799501669)),
        ("half", (-1.984110648556, 1.959900667497, 2.462377902412, 4.019799668335)),
    ):
        found = rotate(x, Span(1, 1), inv_freq, layout=layout).flatten().tolist()
        assert found == pytest.approx(by_hand, rel=1e-11)
        ones = torch.ones(1, 1, 1, 4, dtype=F64)
        q, k = (rotate(ones, Span(p, 1), inv_freq, layout=layout) for p in (1, 0))
        assert float((q * k).sum()) == pytest.approx(3.08050461256961, rel=1e-14)


@given(
    shift=st.integers(0, 100_000),
    at=st.tuples(st.integers(0, 500), st.integers(0, 500)),
    pairs=st.integers(1, 8),
    layout=st.sampled_from(LAYOUTS),
    factor=st.floats(0.5, 2.0),
    seed=st.integers(0, 9),
)
def test_laws(shift, at, pairs, layout, factor, seed):
    torch.manual_seed(seed)
    q, k = torch.randn(2, 1, 1, 1, 2 * pairs, dtype=F64).unbind(0)
    inv_freq = rope_frequencies(2 * pairs).inv_freq

    def turned(x, p, **options):
        return rotate(x, Span(p, 1), inv_freq, layout=layout, **options)

    score = (turned(q, at[0]) * turned(k, at[1])).sum()
    moved = (turned(q, at[0] + shift) * turned(k, at[1] + shift)).sum()
    torch.testing.assert_close(moved, score, rtol=0, atol=1e-9)  # of the difference only
    torch.testing.assert_close(turned(q, at[0]).norm(), q.norm(), rtol=1e-13, atol=0)
    assert torch.equal(turned(q, 0), q)
    torch.testing.assert_close(
        turned(turned(q, at[0]), at[1]), turned(q, sum(at)), rtol=0, atol=1e-11
    )
    scaled = (turned(q, at[0], factor=factor) * turned(k, at[1], factor=factor)).sum()
    torch.testing.assert_close(scaled, score * factor**2, rtol=1e-12, atol=1e-12)
    order = torch.arange(2 * pairs).view(pairs, 2).T.flatten()  # 0 2 4 .. 1 3 5 ..
    other = rotate(q[..., order], Span(at[0], 1), inv_freq, layout="half")
    assert torch.equal(rotate(q, Span(at[0], 1), inv_freq, layout="interleaved")[..., order], other)


def test_interpolation_is_dividing_positions():
    x = torch.randn(1, 2, 5, 8, dtype=F64)
    slow = rope_frequencies(8, scaling=LinearScaling(4.0)).inv_freq
    assert torch.equal(
        rotate(x, torch.arange(0, 20, 4)[None], slow),
        rotate(x, Span(0, 5), rope_frequencies(8).inv_freq),
    )


def test_partial_and_proportional_turn_other_dims():
    x = torch.randn(1, 1, 3, 16, dtype=F64)
    partial, proportional = (
        Rotary(16, rotary_dim=4, proportional=p)(x, Span(5, 3)) != x for p in (False, True)
    )
    assert partial.any(dim=2).flatten().nonzero().flatten().tolist() == [0, 1, 2, 3]
    assert proportional.any(dim=2).flatten().nonzero().flatten().tolist() == [0, 1, 8, 9]
    assert torch.equal(Rotary(16, rotary_dim=0, proportional=True)(x, Span(5, 3)), x)
    assert torch.equal(
        Rotary(16, rotary_dim=16, proportional=True)(x, Span(5, 3)), Rotary(16)(x, Span(5, 3))
    )


def test_a_factor_is_a_softmax_scale_only_where_the_whole_head_turns():
    q, k = torch.randn(2, 1, 1, 1, 8, dtype=F64).unbind(0)
    for rotary_dim, same in ((8, True), (4, False)):
        inv_freq = rope_frequencies(8, rotary_dim=rotary_dim).inv_freq
        score, scaled = (
            (
                rotate(q, Span(9, 1), inv_freq, factor=f)
                * rotate(k, Span(4, 1), inv_freq, factor=f)
            ).sum()
            for f in (1.0, 1.5)
        )
        assert bool((scaled - score * 2.25).abs() < 1e-12) is same


def test_negative_control_mixed_layouts_are_caught():
    """cos and sin of one layout with the pairs of the other: neither relative, nor does it keep the
    norm.
    """
    q, k = torch.randn(2, 1, 1, 1, 16, dtype=F64).unbind(0)
    inv_freq = rope_frequencies(16).inv_freq

    def mixed(x, p):
        angle = (p * inv_freq).repeat_interleave(2)  # interleaved
        other = torch.cat((-x[..., 8:], x[..., :8]), -1)  # halves
        return x * angle.cos() + other * angle.sin()

    def scores(turned):
        return torch.stack([(turned(q, i + 3) * turned(k, i)).sum() for i in (0, 5, 10, 20, 40)])

    right = scores(lambda x, p: rotate(x, Span(p, 1), inv_freq))
    assert right.std() < 1e-12
    assert scores(mixed).std() > 0.1
    assert abs(float(mixed(q, 5).norm() / q.norm()) - 1) > 0.01
    both = [rotate(q, Span(5, 1), inv_freq, layout=layout) for layout in LAYOUTS]
    assert (both[0] - both[1]).abs().max() > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_every_position_keeps_its_own_angle(dtype):
    positions = torch.tensor([[255, 256, 257, 4095, 15962, 15963, 65519, 131070, 131071]])
    x = torch.ones(1, 1, 9, 2, dtype=dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=dtype != torch.float32):
        found = Rotary(2).to(dtype)(x, positions)
    exact = torch.stack((positions.double().cos(), positions.double().sin()))[:, 0]
    exact = torch.stack((exact[0] - exact[1], exact[0] + exact[1]), -1).to(torch.float32)
    eps = torch.finfo(dtype).eps
    assert (found[0, 0].float() - exact).abs().max() <= 2 * eps
    # negative control: positions that went through bfloat16
    rounded = positions.bfloat16().double()
    assert (rounded.cos() - positions.double().cos()).abs().max() > 0.5


def test_fp32_tables_are_rounded_once_at_any_length():
    inv_freq = rope_frequencies(64).inv_freq
    positions = torch.randint(0, 10**6, (1, 200))
    angle = positions[:, None, :, None].double() * inv_freq
    for layout in LAYOUTS:
        x = torch.zeros(1, 1, 200, 64)
        (x[..., :32] if layout == "half" else x[..., 0::2]).fill_(1)
        y = rotate(x, positions, inv_freq, layout=layout)
        cos, sin = (y[..., :32], y[..., 32:]) if layout == "half" else (y[..., 0::2], y[..., 1::2])
        assert torch.equal(cos, angle.cos().float())
        assert torch.equal(sin, angle.sin().float())


def test_a_span_is_its_tensor_and_empty_slots_are_harmless():
    rotary = Rotary(8)
    x = torch.randn(2, 3, 4, 8)
    assert torch.equal(rotary(x, Span(3, 4)), rotary(x, torch.tensor([[3, 4, 5, 6]] * 2)))
    holes = torch.tensor([[-1, -1, 0, 1], [-1, 0, 1, 2]], dtype=torch.int32)
    assert rotary(x, holes).isfinite().all()
    assert torch.equal(rotary(x, holes)[1:, :, 1:], rotary(x[1:, :, 1:], Span(0, 3)))
    assert rotary(x[:, :, :0], Span(0, 0)).shape == (2, 3, 0, 8)
    assert rotary(x[:0], Span(0, 4)).shape == (0, 3, 4, 8)
    assert rotary(x, Span(-2, 4)).isfinite().all()
    strided = torch.randn(2, 4, 3, 8).transpose(1, 2)
    assert torch.equal(rotary(strided, Span(0, 4)), rotary(strided.contiguous(), Span(0, 4)))


@pytest.mark.parametrize("layout", LAYOUTS)
def test_gradients(layout):
    x = torch.randn(1, 2, 3, 6, dtype=F64, requires_grad=True)
    inv_freq = rope_frequencies(6, rotary_dim=4).inv_freq.requires_grad_()
    positions = torch.tensor([[-1, 0, 7]])
    assert torch.autograd.gradcheck(
        lambda x, f: rotate(x, positions, f, layout=layout, factor=1.2), (x, inv_freq)
    )


@pytest.mark.full
@pytest.mark.parametrize("layout", LAYOUTS)
def test_compiles_whole(layout):
    rotary = Rotary(8, rotary_dim=6, layout=layout)
    x, positions = torch.randn(2, 2, 3, 8), torch.tensor([[0, 1, 2], [-1, 0, 1]])
    compiled = torch.compile(rotary, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x, positions), rotary(x, positions))
    torch.testing.assert_close(compiled(x, Span(5, 3)), rotary(x, Span(5, 3)))
    follow = Rotary(8, scaling=DynamicNTK(2.0, 4), length="current", layout=layout)
    whole = torch.compile(follow, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(whole(x, Span(5, 3)), follow(x, Span(5, 3)))


def test_no_cast_and_no_checkpoint_touches_the_frequencies():
    rotary = Rotary(8, scaling=YaRN(4.0, 128))
    frequencies = rotary.inv_freq.clone()
    assert rotary.state_dict() == {}
    assert not list(rotary.buffers())
    assert not list(rotary.parameters())
    assert torch.equal(frequencies, rope_frequencies(8, scaling=YaRN(4.0, 128)).inv_freq)
    with torch.device("meta"):
        on_meta = Rotary(8, scaling=YaRN(4.0, 128))
    stored = io.BytesIO()
    torch.save(rotary, stored)
    stored.seek(0)
    for other in (
        copy.deepcopy(rotary).half(),
        copy.deepcopy(rotary).to(torch.bfloat16),
        on_meta,
        copy.deepcopy(rotary).to("meta"),
        on_meta.to_empty(device="cpu"),
        torch.load(stored, weights_only=False),
    ):
        assert other.inv_freq.dtype == F64
        assert torch.equal(other.inv_freq, frequencies)
    rotary.load_state_dict({})


def test_tables_that_are_kept_do_not_go_stale():
    rotary = Rotary(8)
    x, positions = torch.randn(1, 1, 3, 8), torch.tensor([[0, 1, 2]])
    first = rotary(x, positions)
    assert rotary(x, positions).equal(first)
    assert rotary._last[1] is positions
    positions += 1
    assert torch.equal(rotary(x, positions), rotary(x, Span(1, 3)))
    assert rotary(x.double(), Span(1, 3)).dtype == F64
    with torch.inference_mode():
        inside = torch.tensor([[4, 5, 6]])
        before = rotary(x, inside)
        inside += 1
        assert not torch.equal(rotary(x, inside), before)
        rotary(x, Span(0, 3))
    leaf = x.clone().requires_grad_()
    rotary(leaf, Span(0, 3)).sum().backward()  # a table of inference mode would refuse
    assert leaf.grad.isfinite().all()
    assert copy.deepcopy(rotary)._last is None


@pytest.mark.parametrize(
    "scaling",
    [DynamicNTK(2.0, 8), DynamicYaRN(64), LongRoPE((1.0,) * 4, (1.0, 2.0, 3.0, 4.0), 8, 4.0)],
    ids=lambda s: type(s).__name__,
)
def test_which_length(scaling):
    x = torch.randn(1, 1, 12, 8, dtype=F64)
    L = scaling.original_length

    def at(length, part, start):
        inv_freq, factor, _ = rope_frequencies(8, scaling=scaling, length=length)
        return rotate(part, Span(start, part.shape[2]), inv_freq, factor=factor)

    frozen = Rotary(8, scaling=scaling, length=4 * L)
    chunks = [frozen(x[:, :, :5], Span(0, 5)), frozen(x[:, :, 5:], Span(5, 7))]
    assert torch.equal(torch.cat(chunks, 2), at(4 * L, x, 0))  # so a cache stays valid
    current = Rotary(8, scaling=scaling, length="current")
    assert torch.equal(current(x, Span(L, 12)), at(L + 12, x, L))
    positions = torch.arange(L, L + 12)[None]
    assert torch.equal(current(x, positions), at(L + 12, x, L))
    assert torch.equal(current(x[:, :, :4], Span(0, 4)), at(4, x[:, :, :4], 0))  # and back
    assert torch.equal(current(x[:, :, :0], Span(0, 0)), x[:, :, :0])
    assert current(x[:, :, :0], positions[:, :0]).shape == (1, 1, 0, 8)
    empty = current(x, torch.full((1, 12), -1))
    assert empty.isfinite().all()
    stale = current(
        x[:, :, :5], Span(L, 5)
    )  # negative control: keys turned under an earlier length
    assert (stale - current(x, Span(L, 12))[:, :, :5]).abs().max() > 1e-3 or isinstance(
        scaling, LongRoPE
    )
    with pytest.raises(ArgumentError, match=r"length is None, but .* depends on it; pass a number"):
        Rotary(8, scaling=scaling)


def test_the_factors():
    rotary = Rotary(8, scaling=YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=0.5))
    x = torch.randn(1, 1, 2, 8, dtype=F64)
    assert rotary.rotary_factor != 1
    assert rotary.softmax_factor != 1
    norm = rotary(x, Span(3, 2)).norm() / x.norm()
    assert float(norm) == pytest.approx(rotary.rotary_factor, rel=1e-14)


X = torch.zeros(2, 1, 3, 8)
F = rope_frequencies(8).inv_freq


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: rotate(X, Span(0, 3), F, layout="neox"), ArgumentError, "layout is 'neox'; it"),
        (lambda: rotate(X[0], Span(0, 3), F), ArgumentError, r"x has 3 dimensions, \(1, 3, 8\)"),
        (lambda: rotate(X.long(), Span(0, 3), F), ArgumentTypeError, "x is int64; it must be"),
        (lambda: rotate([1.0], Span(0, 3), F), ArgumentTypeError, r"x is list; it must be a torch"),
        (lambda: rotate(X, Span(0, 3), F[None]), ArgumentError, r"inv_freq is \(1, 4\); it must"),
        (lambda: rotate(X, Span(0, 3), torch.ones(5)), ArgumentError, r"inv_freq is \(5,\); it"),
        (lambda: rotate(X, Span(0, 4), F), ArgumentError, "positions is Span.* but there are 3"),
        (lambda: rotate(X, torch.zeros(2, 3), F), ArgumentTypeError, "positions is float32"),
        (lambda: rotate(X, torch.zeros(3, 3).long(), F), ArgumentError, r"positions is \(3, 3\)"),
        (lambda: rotate(X, None, F), ArgumentTypeError, "positions is NoneType"),
        (lambda: rotate(X, Span(0, 3), F, factor=math.inf), ArgumentError, "factor is inf; it"),
        (lambda: Rotary(8)(X[..., :6], Span(0, 3)), ArgumentError, "inv_freq is|x has head dim 6"),
        (lambda: Rotary(4)(X, Span(0, 3)), ArgumentError, "x has head dim 8; it must be 4, the"),
        (lambda: Rotary(8, layout="gptj"), ArgumentError, "layout is 'gptj'"),
        (lambda: Rotary(8, length="max"), ArgumentError, "length is 'max'; it must be a number or"),
        (lambda: Rotary(8, scaling="yarn"), ArgumentTypeError, "scaling is str"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


class Overtaken(Rotary):
    """Another thread asks for another table between any two looks at the one that is kept."""

    others: Iterator[Any] = itertools.repeat(None)

    @property
    def _last(self) -> Any:
        return next(self.others)

    @_last.setter
    def _last(self, entry: Any) -> None:
        self.__dict__["stored"] = entry


def test_another_thread_may_change_the_table_between_two_looks() -> None:
    x, rotary = torch.randn(1, 1, 3, 8), Overtaken(8)
    entries = []
    for start in (0, 100):
        rotary(x, Span(start, 3))
        entries.append(rotary.__dict__["stored"])
    right = Rotary(8)(x, Span(0, 3))
    for first in range(2):
        rotary.others = itertools.cycle(entries[first:] + entries[:first])
        for _ in range(2):
            assert torch.equal(rotary(x, Span(0, 3)), right)
