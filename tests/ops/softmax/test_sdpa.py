"""The sdpa kernel: every recipe, forward and backward, against plain math; what it refuses; what it
holds at once.
"""

from __future__ import annotations

import itertools
import math
import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard import biases, masks
from regard.masks import EMPTY, FULL
from regard.ops.softmax import dispatch, lowering, sdpa
from regard.ops.softmax.call import Call, make_call
from regard.ops.softmax.lowering import lower_mask, merge_tiles
from regard.span import Span
from tests.ops.softmax.plain import allowed, assert_near, torch_dense
from tests.oracles.plain import plain_attention

NAN = float("nan")


@dataclass
class Case:
    """A recipe: a call, and the pieces that it must be lowered to, as (rows, [(columns, causal,
    masked)]).
    """

    mask: masks.Mask | None
    T: int
    S: int
    options: dict[str, Any] = field(default_factory=dict)
    B: int = 2
    H: int = 4
    G: int = 2
    D: int = 8
    E: int = 8
    pieces: list[Any] | None = None

    def inputs(self, dtype: torch.dtype, scale: float = 0.25) -> list[Tensor]:
        """q, k, v: randn, with one key far out, two keys that tie, and exact zeros.

        By default so small that no score can be larger than its gradient serves.
        """
        make = torch.Generator().manual_seed(self.T * 1000 + self.S)
        shapes = ((self.H, self.T, self.D), (self.G, self.S, self.D), (self.G, self.S, self.E))
        q, k, v = (torch.randn(self.B, *s, generator=make).mul(scale) for s in shapes)
        k[:, :, 3] *= 4
        k[:, :, 5] = k[:, :, 7]
        q[:, :, -1] = 0
        return [x.to(dtype) for x in (q, k, v)]

    def call(self, wants_lse: bool = True) -> Call:
        q, k, v = self.inputs(torch.float32)
        return make_call(q, k, v, mask=self.mask, **self.options, wants_lse=wants_lse)

    @property
    def bias(self) -> Tensor | None:
        bias = self.options.get("bias")
        if bias is None:
            return None
        call = self.call()
        assert call.bias is not None
        return call.bias.block(call.q_positions, call.k_positions, dtype=torch.float64)


def at(start: int, length: int) -> dict[str, Any]:
    return {"q_positions": Span(start, length)}


def whole(T: int, S: int, causal: bool, masked: bool) -> list[Any]:
    return [((0, T), [((0, S), causal, masked)])]


GENERATOR = torch.Generator().manual_seed(5)
TABLE = torch.rand(2, 4, 20, 40, generator=GENERATOR) < 0.4
TABLE[0, 1, 3] = False
SMALL_BIAS = torch.randn(4, 20, 40, generator=GENERATOR)[None]
HOLES = torch.tensor([[*range(20), -1, -1, *range(20, 30)], [-1, -1, -1, *range(29)]])
CAUSAL = masks.Causal()
LOCAL = CAUSAL & masks.Window(9)

CASES = {
    "full": Case(None, 7, 24, pieces=whole(7, 24, False, False)),
    "full, long enough not to fold": Case(None, 40, 24, pieces=whole(40, 24, False, False)),
    "full, one query": Case(None, 1, 33, G=1, pieces=whole(1, 33, False, False)),
    "full, no groups": Case(None, 5, 24, G=4, pieces=whole(5, 24, False, False)),
    "full, B 1, H 1": Case(None, 30, 16, B=1, H=1, G=1, pieces=whole(30, 16, False, False)),
    "full at positions": Case(None, 3, 16, at(90, 3), pieces=whole(3, 16, False, False)),
    "causal square": Case(CAUSAL, 37, 37, pieces=whole(37, 37, True, False)),
    "causal, a short end": Case(CAUSAL, 5, 24, pieces=whole(5, 24, False, True)),
    "causal, past and triangle": Case(
        CAUSAL, 40, 70, pieces=[((0, 40), [((0, 30), False, False), ((30, 70), True, False)])]
    ),
    "causal, one query": Case(CAUSAL, 1, 24, pieces=whole(1, 24, False, False)),
    "causal, one query inside": Case(
        CAUSAL, 1, 24, at(17, 1), pieces=[((0, 1), [((0, 18), False, False)])]
    ),
    "causal, one query, few keys": Case(
        CAUSAL, 1, 24, at(14, 1), pieces=[((0, 1), [((0, 15), False, True)])]
    ),
    "causal, top left": Case(
        CAUSAL, 18, 40, at(0, 18), pieces=[((0, 18), [((0, 18), True, False)])]
    ),
    "causal, top left, few keys": Case(
        CAUSAL, 6, 40, at(0, 6), pieces=[((0, 6), [((0, 6), False, True)])]
    ),
    "causal, blind rows first": Case(CAUSAL, 40, 20, pieces=[((20, 40), [((0, 20), True, False)])]),
    "causal, rows beyond": Case(
        CAUSAL,
        40,
        20,
        at(-3, 40),
        pieces=[((3, 23), [((0, 20), True, False)]), ((23, 40), [((0, 20), False, False)])],
    ),
    "causal, all beyond": Case(CAUSAL, 5, 20, at(40, 5), pieces=whole(5, 20, False, False)),
    "causal, all blind": Case(CAUSAL, 5, 20, at(-7, 5), pieces=[]),
    "causal, keys from 100": Case(
        CAUSAL, 40, 40, {"k_positions": Span(100, 40)}, pieces=whole(40, 40, True, False)
    ),
    "causal, positions as tensors": Case(
        CAUSAL, 9, 24, {"k_positions": torch.arange(24)[None]}, pieces=None
    ),
    "causal, holes": Case(CAUSAL, 10, 32, {"k_positions": HOLES}),
    "full, holes": Case(None, 10, 32, {"k_positions": HOLES}),
    "causal and padding": Case(
        CAUSAL & masks.Padding.right([40, 11]), 40, 40, pieces=whole(40, 40, True, True)
    ),
    "causal and left padding": Case(
        CAUSAL & masks.Padding.left([40, 11], 40), 40, 40, pieces=whole(40, 40, True, True)
    ),
    "causal and padding, a short end": Case(CAUSAL & masks.Padding.right([40, 11]), 5, 40),
    "padding": Case(masks.Padding.right([24, 3]), 20, 24),
    "padding of one query": Case(masks.Padding.right([24, 3]), 1, 24, G=1),
    "window": Case(LOCAL, 90, 90),
    "window, one query": Case(LOCAL, 1, 90, B=8),
    "window, two queries": Case(LOCAL, 2, 90, B=8),
    "window, beyond the keys": Case(LOCAL, 12, 60, at(55, 12)),
    "sinks and window": Case(LOCAL | (CAUSAL & masks.Sinks(2)), 70, 90),
    "documents": Case(CAUSAL & masks.Document.from_lengths([30, 1, 9, 50]), 90, 90),
    "prefix": Case(CAUSAL | masks.Prefix(21), 60, 60),
    "bigbird": Case(masks.BigBird(8, 11, random=2, seed=1), 88, 88),
    "heads": Case(masks.Heads((CAUSAL, LOCAL, masks.Full(), masks.Sinks(3))), 40, 40),
    "dense": Case(masks.Dense(TABLE), 20, 40),
    "dense, two dims": Case(masks.Dense(TABLE[0, 0]), 20, 40),
    "nothing visible": Case(masks.Dense(torch.zeros(20, 40, dtype=torch.bool)), 20, 40),
    "bias": Case(None, 20, 40, {"bias": biases.DenseBias(SMALL_BIAS)}),
    "alibi and causal": Case(CAUSAL, 50, 50, {"bias": biases.ALiBi(4)}),
    "alibi and window": Case(LOCAL, 50, 50, {"bias": biases.ALiBi(4)}),
    "E > D": Case(LOCAL, 40, 40, D=5, E=12),
    "E < D": Case(CAUSAL, 40, 40, D=12, E=5),
    "E < D, full": Case(None, 20, 20, D=12, E=1),
    "scale": Case(CAUSAL, 40, 40, {"scale": -0.7}),
}


SMALL = lowering.BlockSizes(rows=16, keys=4)


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many pieces arise from small shapes, in every call that this kernel is asked for."""
    (kernel,) = (x for x in dispatch.KERNELS if x.name == "sdpa")
    monkeypatch.setattr(kernel, "sizes", SMALL)


def described(call: Call) -> list[Any]:
    return [
        (
            (work.rows.start, work.rows.stop),
            [
                ((p.columns.start, p.columns.stop), p.causal, p.mask is not None)
                for p in work.ranges
            ],
        )
        for work in lower_mask(call, SMALL)
    ]


def with_gradients(
    run: Callable[..., tuple[Tensor, Tensor | None]], inputs: list[Tensor]
) -> list[Any]:
    """out, lse, and the gradients of a random linear functional of both; of lse only where it is
    finite.
    """
    inputs = [x.detach().clone().requires_grad_() for x in inputs]
    out, lse = run(*inputs)
    make = torch.Generator().manual_seed(3)
    loss = (out * torch.randn(out.shape, generator=make).to(out.dtype)).sum()
    if lse is not None:
        weights = torch.randn(lse.shape, generator=make).to(lse.dtype)
        loss = loss + (lse.masked_fill(lse.isneginf(), 0) * weights).sum()
    return [out.detach(), None if lse is None else lse.detach(), *torch.autograd.grad(loss, inputs)]


def assert_right(case: Case, dtype: torch.dtype, sink: bool = False) -> None:
    """Out, lse (without a sink) and gradients by the rule; for those, torch's own dense call may be
    off as well.
    """
    inputs = case.inputs(dtype)
    inputs += [torch.linspace(-1, 2, case.H).to(dtype)] if sink else []
    seen = allowed(*inputs[:3], mask=case.mask, **case.options)
    options = {"mask": case.mask, **case.options, "backend": "sdpa"}
    meant = {"scale": case.options.get("scale"), "bias": case.bias}

    def kernel(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Any:
        if sink is None:
            return regard.attend_partial(q, k, v, **options)
        return regard.attend(q, k, v, sink=sink, **options), None

    def plain(q: Tensor, k: Tensor, v: Tensor, sink: Tensor | None = None) -> Any:
        out, lse = plain_attention(q, k, v, visible=seen, sink=sink, **meant)
        return out, lse if sink is None else None

    def torchs(q: Tensor, k: Tensor, v: Tensor) -> Any:
        return torch_dense(q, k, v, seen, **meant), None

    narrow = [x.to(torch.float32 if dtype == torch.float64 else dtype) for x in inputs]
    wide = [x.double() for x in inputs]
    got, exact, same = (
        with_gradients(f, x) for f, x in ((kernel, inputs), (plain, wide), (plain, narrow))
    )
    dense, right = (with_gradients(torchs, x[:3])[2:] for x in (narrow, wide))
    for mine, best, usual in zip(got[:2], exact[:2], same[:2], strict=True):
        if mine is not None:
            assert_near(mine, best, [usual])
    others = [
        best + (mine - right) for mine, best, right in zip(dense, exact[2:], right, strict=False)
    ]
    assert_gradients_near(got[2:], exact[2:], same[2:], others)


def assert_gradients_near(
    got: list[Tensor], exact: list[Tensor], same: list[Tensor], dense: list[Tensor]
) -> None:
    """Each by the rule, where plain math may be off, relative to the largest number, as much as in
    its worst gradient.

    One gradient alone may be hit by luck: that of a sink is one number a head.
    """
    sizes = [float(best.abs().max().clamp(min=1e-30)) for best in exact]
    worst = max(float((x - y).abs().max()) / n for x, y, n in zip(same, exact, sizes, strict=True))
    for i, (mine, best, size) in enumerate(zip(got, exact, sizes, strict=True)):
        assert_near(mine, best, [best + worst * size, *dense[i : i + 1]], factor=3)


@pytest.mark.parametrize("name", [name for name, case in CASES.items() if case.pieces is not None])
def test_a_recipe_is_what_it_says(name: str) -> None:
    assert described(CASES[name].call()) == CASES[name].pieces


@pytest.mark.full(keep=15)
@pytest.mark.parametrize("name", CASES)
def test_out_lse_and_all_gradients(name: str) -> None:
    """In fp64, where what is wrong cannot hide behind rounding; alone, and under a sink."""
    assert_right(CASES[name], torch.float64)
    if CASES[name].H > 1:  # the error of one sum is no measure of another
        assert_right(CASES[name], torch.float64, sink=True)


@pytest.mark.full(keep=15)
@pytest.mark.parametrize("name", CASES)
def test_the_one_call_without_lse(name: str) -> None:
    """attend needs no lse: where one call does, it is torch's public function. Out and gradients in
    fp64.
    """
    case = CASES[name]
    q, k, v = case.inputs(torch.float64)
    options = {"mask": case.mask, **case.options}

    def run(backend: str, *x: Tensor) -> list[Any]:
        return with_gradients(
            lambda *x: (regard.attend(*x, **options, backend=backend), None), list(x)
        )

    got, exact = run("sdpa", q, k, v), run("reference", q, k, v)
    same = run("reference", q.float(), k.float(), v.float())
    assert_near(got[0], exact[0], [same[0]])
    assert_gradients_near(got[2:], exact[2:], same[2:], [])


def test_a_wrong_window_is_caught() -> None:
    """Negative control: one key more, and one less, break the bound."""
    case = CASES["window"]
    inputs = case.inputs(torch.float32)
    seen = allowed(*inputs, mask=case.mask)
    exact, same = (
        plain_attention(*(x.to(d) for x in inputs), visible=seen)[0]
        for d in (torch.float64, torch.float32)
    )
    for size in (8, 10):
        out = regard.attend(*inputs, mask=CAUSAL & masks.Window(size), backend="sdpa")
        with pytest.raises(AssertionError, match="off by"):
            assert_near(out, exact, [same])


def test_a_stale_lse_in_backward_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: a piece's backward must be given the whole row's lse, not one that is
    off.
    """
    right = sdpa.range_gradients

    def stale(row: Any, *rest: Any) -> Any:
        q, out, lse, d_out, d_lse = row
        return right((q, out, lse + 0.01, d_out, d_lse), *rest)

    monkeypatch.setattr(sdpa, "range_gradients", stale)
    with pytest.raises(AssertionError, match="off by"):
        assert_right(CASES["window"], torch.float64)


def test_rows_that_see_nothing() -> None:
    case = CASES["causal, blind rows first"]
    q, k, v = (x.requires_grad_() for x in case.inputs(torch.float32))
    part = regard.attend_partial(q, k, v, mask=case.mask, backend="sdpa")
    assert part.out[:, :, :20].eq(0).all()
    assert part.lse[:, :, :20].isneginf().all()
    assert part.lse[:, :, 20:].isfinite().all()
    (part.out.sum() + part.lse[:, :, 20:].sum()).backward()
    assert q.grad is not None
    assert q.grad[:, :, :20].eq(0).all()
    assert q.grad[:, :, 20:-1].ne(0).any(-1).all()
    q.grad = None
    out = regard.attend(q, k, v, mask=case.mask, sink=torch.full((4,), -math.inf), backend="sdpa")
    assert torch.equal(out, part.out), "a sink of -inf is no sink"
    out.sum().backward()
    assert q.grad is not None
    assert q.grad[:, :, :20].eq(0).all()
    assert q.grad.isfinite().all()


@pytest.mark.parametrize("mask", [None, CAUSAL, LOCAL], ids=str)
def test_strided_inputs_are_bitwise_equal_to_contiguous_ones(mask: masks.Mask | None) -> None:
    q, k, v = CASES["causal square"].inputs(torch.float32)
    right = regard.attend_partial(q, k, v, mask=mask, backend="sdpa")
    views = {
        "last dim strided": lambda x: torch.stack([x, x], -1)[..., 0],
        "last two swapped": lambda x: x.mT.contiguous().mT,
        "heads and length swapped": lambda x: x.transpose(1, 2).contiguous().transpose(1, 2),
        "offset": lambda x: torch.cat([x, x], 2)[:, :, x.shape[2] :],
        "every other": lambda x: torch.stack([x, x], 3).flatten(2, 3)[:, :, ::2],
    }
    for name, view in views.items():
        part = regard.attend_partial(*(view(x) for x in (q, k, v)), mask=mask, backend="sdpa")
        assert torch.equal(part.out, right.out), name
        assert torch.equal(part.lse, right.lse), name
    k, v = (x[:1, :1].expand(2, 2, -1, -1) for x in (k, v))
    shared = regard.attend(q, k, v, mask=mask, backend="sdpa")
    copied = regard.attend(q, k.contiguous(), v.contiguous(), mask=mask, backend="sdpa")
    assert torch.equal(shared, copied)


def test_inputs_are_left_as_they_are() -> None:
    inputs = CASES["window"].inputs(torch.float32)
    before = [x.clone() for x in inputs]
    regard.attend_partial(*inputs, mask=LOCAL, backend="sdpa")
    assert all(torch.equal(x, y) for x, y in zip(inputs, before, strict=True))


@pytest.mark.parametrize("mask", [None, CAUSAL], ids=str)
def test_half_scores_do_not_overflow(mask: masks.Mask | None) -> None:
    """q . k of 7.8e5 is far above fp16's 65504, and so is each term: the query is scaled first, in
    fp32.
    """
    make = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 20, 64, generator=make) for _ in range(3))
    q, k = q.sign() * 250, k.sign() * 250
    q[..., :32], k[..., :32] = 250, 250
    assert float((q @ k.mT).abs().max()) > 7.8e5
    q, k, v = q.half(), k.half(), v.half()
    seen = allowed(q, k, v, mask=mask)
    exact = plain_attention(q.double(), k.double(), v.double(), visible=seen)[0]
    usual = plain_attention(q.float(), k.float(), v.float(), visible=seen)[0].half()
    for backend in ("sdpa", "reference"):
        assert_near(regard.attend(q, k, v, mask=mask, backend=backend), exact, [usual])


# What it refuses.


def reasons(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> list[str]:
    return sdpa.SdpaKernel().why_not(make_call(q, k, v, **options))


@pytest.mark.parametrize("bad", [NAN, math.inf, -math.inf, 1e38])
@pytest.mark.parametrize("at", [0, 9, 15, 600])
def test_a_bad_key_stays_behind_the_triangle(bad: float, at: int) -> None:
    q, k, v = (torch.randn(1, 2, 16 if at < 16 else 700, 8) for _ in range(3))
    clean = regard.attend(q, k, v, mask=CAUSAL, backend="sdpa")
    k[:, :, at] = bad
    out = regard.attend(q, k, v, mask=CAUSAL, backend="sdpa")
    assert torch.equal(out[:, :, :at], clean[:, :, :at])
    if math.isnan(bad):
        assert out[:, :, at:].isnan().any(-1).all()


def test_refusals() -> None:
    q, k, v = Case(None, 16, 16).inputs(torch.float32)
    learned = biases.DenseBias(torch.zeros(16, 16, requires_grad=True))
    leak = ["a NaN or infinity behind a mask would leak through 0 x NaN"]
    assert reasons(q, k, v) == []
    assert reasons(q, k, v, softcap=30.0) == ["no softcap"]
    assert reasons(q, k, v, dropout=0.5) == ["no dropout on the weights in its fused kernel"]
    assert reasons(q, k, v, bias=learned) == ["no gradient for a bias"]
    assert reasons(q, k, v, softcap=30.0, dropout=0.5) == [
        "no softcap",
        "no dropout on the weights in its fused kernel",
    ]
    short = "fewer than 16 keys, or nothing to compute (B 2, T 16, S 15, E 8)"
    assert reasons(q, k[:, :, 1:], v[:, :, 1:]) == [short]
    assert reasons(q[:, :, :0], k, v) == [short.replace("T 16, S 15", "T 0, S 16")]
    assert reasons(q[:0], k[:0], v[:0]) == [short.replace("B 2, T 16, S 15", "B 0, T 16, S 16")]
    assert reasons(q, k, v[..., :0]) == [short.replace("S 15, E 8", "S 16, E 0")]
    with regard.Trace("pattern", "scores", "z", missing="ignore"):
        assert reasons(q, k, v) == ["does not expose ['pattern', 'scores']"]
    for x in (k, v):
        for bad in (NAN, math.inf):
            x[0, 0, 9, 2] = bad
            assert reasons(q, k, v) == []  # visible to everybody: it must reach everybody
            # the causal flag selects scores: a bad key is only multiplied by the gradient
            assert reasons(q, k, v, mask=CAUSAL) == ([] if x is k else leak)
            assert reasons(q.clone().requires_grad_(), k, v, mask=CAUSAL) == leak
            assert reasons(q, k, v, mask=LOCAL) == leak
        x[0, 0, 9, 2] = 0
    q[0, 0, 9, 2] = NAN
    assert reasons(q, k, v, mask=CAUSAL) == []
    assert reasons(q, k, v, mask=LOCAL) == leak


def test_another_schema_of_the_private_op_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = Case(None, 16, 16).inputs(torch.float32)
    monkeypatch.setattr(sdpa, "_CPU_OP_SCHEMA", "another")
    why = ["no lse: this version of torch has another signature of its private CPU operator"]
    assert reasons(q, k, v) == []
    assert reasons(q, k, v, wants_lse=True) == why
    assert reasons(q, k, v, sink=torch.zeros(4)) == why
    assert sdpa.no_lse_reasons(torch.device("cuda")) == ["returns no lse on cuda"]
    with pytest.raises(regard.KernelRefusal, match="another signature of its private CPU operator"):
        regard.attend_partial(q, k, v, backend="sdpa")


# NaN that is visible stays visible.

DTYPES = [torch.float32, torch.float64, torch.bfloat16, torch.float16]


@pytest.mark.parametrize("dtype", DTYPES)
def test_torch_launders_nan_on_short_inputs(dtype: torch.dtype) -> None:
    """Control: why fewer than 16 keys are refused. If this fails, torch was mended, and MIN_KEYS
    may go.
    """
    q, k, v = torch.randn(3, 1, 1, 3, 8).to(dtype)  # fewer than the lanes of fp64 with AVX2
    q[0, 0, 1] = NAN
    assert F.scaled_dot_product_attention(q, k, v)[0, 0, 1].eq(0).all()
    assert regard.attend(q, k, v)[0, 0, 1].isnan().all()


@pytest.mark.full(keep=9)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T", [1, 2, 4, 15, 16, 17, 40])
def test_a_query_with_nan_gives_nan(T: int, dtype: torch.dtype) -> None:
    """Wherever it stands among the keys: before them, at the first of them, inside, beyond."""
    _, k, v = Case(None, 1, 20, B=1, H=1, G=1).inputs(dtype)
    q = torch.randn(1, 1, T, 8).to(dtype)
    row = T // 2
    q[0, 0, row, 3] = NAN
    for mask in (None, CAUSAL):
        for start in (-T, -T + 1, -row, -row + 1, 0, 3, 20 - T, 19, 25):
            at = Span(start, T, tokens=True)
            part = regard.attend_partial(q, k, v, mask=mask, q_positions=at, backend="sdpa")
            sees = mask is None or start + row >= 0
            assert bool(part.out[0, 0, row].isnan().all()) == sees, (mask, start)
            assert bool(part.lse[0, 0, row].isnan()) == sees
            others = torch.arange(T) != row
            assert part.out[0, 0, others].isfinite().all()
            out = regard.attend(q, k, v, mask=mask, q_positions=at, backend="sdpa")
            assert torch.equal(out.isnan(), part.out.isnan())


# Memory, and the runs of tiles.


def test_masks_of_pieces_are_made_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    alive: list[weakref.ref[Tensor]] = []
    most, total = 0, 0

    def counted(*args: Any) -> Tensor:
        nonlocal most, total
        mask = right(*args)
        alive.append(weakref.ref(mask))
        total += 1
        most = max(most, sum(ref() is not None for ref in alive))
        return mask

    right = lowering.additive_mask
    monkeypatch.setattr(lowering, "additive_mask", counted)
    q, k, v = (x.requires_grad_() for x in CASES["window"].inputs(torch.float32))
    out = regard.attend(q, k, v, mask=LOCAL, backend="sdpa")
    assert total == 6, "one piece for each block of 16 rows"
    out.sum().backward()
    assert total == 12, "and again for the gradient"
    assert most <= 2  # the new one, and the one that it is about to replace
    assert sum(ref() is not None for ref in alive) == 0


def test_work_of_a_window_grows_with_T_not_with_its_square() -> None:
    def pairs(T: int) -> int:
        q = torch.zeros(1, 1, T, 2)
        return sdpa.SdpaKernel(SMALL).work(make_call(q, q, q, mask=LOCAL)).pairs

    assert pairs(640) - pairs(320) == pairs(320) - pairs(160) + (pairs(320) - pairs(160))
    assert pairs(320) < 320 * 320 / 8


@given(state=st.lists(st.sampled_from([EMPTY, 1, FULL]), max_size=24), long=st.integers(1, 6))
def test_runs_by_brute_force(state: list[int], long: int) -> None:
    found = merge_tiles(state, long)
    kinds: list[bool | None] = [None] * len(state)
    for start, stop, full in found:
        assert start < stop
        for i in range(start, stop):
            assert kinds[i] is None, "pieces are disjoint"
            kinds[i] = full
    for i, one in enumerate(state):
        assert (kinds[i] is None) == (one == EMPTY), (
            "what is visible is visited, what is empty is not"
        )
        left, right = i, i
        while left > 0 and state[left - 1] == FULL:
            left -= 1
        while right < len(state) and state[right] == FULL:
            right += 1
        beside = 1 in (*state[max(left - 1, 0) : left], *state[right : right + 1])
        assert (kinds[i] is True) == (one == FULL and (right - left >= long or not beside))
    assert found == sorted(found)
    for (_, stop, a), (start, _, b) in itertools.pairwise(found):
        assert stop < start or a or b, "neighbours under a mask are one piece"


def test_values_that_begin_their_keys_are_not_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """As absorbed MLA has them; the same bits as from a copy. Others, and those with a gradient,
    are padded.
    """
    padded: list[Tensor] = []
    pad = sdpa.F.pad
    monkeypatch.setattr(sdpa.F, "pad", lambda x, by: padded.append(x) or pad(x, by))
    memory, q = torch.randn(2, 1, 70, 24), torch.randn(2, 6, 3, 24)
    values = memory[..., :16]
    found = regard.attend(q, memory, values, mask=masks.Causal(), backend="sdpa")
    assert padded == []
    assert torch.equal(
        found, regard.attend(q, memory, values.clone(), mask=masks.Causal(), backend="sdpa")
    )
    assert len(padded) == 1
    for others in (memory[..., 8:], memory.flip(2)[..., :16], memory[:, :, :, :16] + 0):
        right = regard.attend(q, memory, others, mask=masks.Causal(), backend="reference")
        assert torch.allclose(
            regard.attend(q, memory, others, mask=masks.Causal(), backend="sdpa"), right, atol=1e-5
        )
    assert len(padded) == 4
    q, memory, values = q / 2, memory / 2, values / 2  # scores that its gradient serves
    learned = memory.clone().requires_grad_()
    regard.attend(q, learned, learned[..., :16].detach(), backend="sdpa").sum().backward()
    assert len(padded) == 5
    assert learned.grad is not None
    other = memory.clone().requires_grad_()
    regard.attend(q, other, values.clone(), backend="reference").sum().backward()
    assert torch.allclose(learned.grad, other.grad, atol=1e-4)
