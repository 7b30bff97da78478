"""Dense, functions, sums, and what all biases share."""

from __future__ import annotations

import pytest
import torch

from regard.biases import (
    BIASES,
    FIRE,
    ALiBi,
    Bias,
    DenseBias,
    FnBias,
    ForgetBias,
    Kerple,
    RelativeLogits,
    Sum,
    T5Relative,
)
from regard.errors import ArgumentError, ArgumentTypeError
from regard.registry import is_builtin
from regard.serialization import from_data
from regard.span import Span
from regard.units import plural
from tests.rules import assert_close_rule

F64 = torch.float64
Q, K = Span(3, 4), Span(0, 7)
TABLE = torch.randn(32, 3, generator=torch.Generator().manual_seed(1))


def slope(q, k, w):
    return w[:, None, None] * (q - k)


def squares(q, k):
    return (k * 1.0).square().expand(-1, -1, q.shape[2], -1)


def constant(q, k):
    return 1.0


def short(q, k):
    return torch.zeros(1, 1, 3, 7)


def every():
    return [
        ALiBi(3),
        ALiBi(slopes=torch.randn(3)),
        T5Relative(TABLE),
        DenseBias(torch.randn(4, 7)),
        DenseBias(torch.randn(2, 3, 4, 7)),
        DenseBias(torch.randn(1, 3, 1, 7)),
        FnBias(slope, (torch.randn(3),)),
        FnBias(squares),
        Kerple(torch.randn(3), torch.randn(3)),
        FIRE(*(torch.randn(n) for n in ((1,), (1,), (5,), (5,), (3, 5), (3,)))),
        ForgetBias(torch.randn(2, 3, 4), torch.randn(2, 1, 7)),
        RelativeLogits(torch.randn(2, 3, 4, 5), 1),
        RelativeLogits(torch.randn(1, 1, 7, 9), 4, True, "zero"),
        RelativeLogits(torch.randn(2, 1, 4, 8), 4, False, "clip", 4, 12),
        ALiBi(3) + DenseBias(torch.randn(2, 1, 4, 7)) + T5Relative(TABLE),
    ]


def uncovered(cases):
    """The biases of the package that no case has."""
    terms = [term for bias in cases for term in (bias, *getattr(bias, "terms", ()))]
    return {name for name, kind in BIASES if is_builtin(kind)} - {term.kind for term in terms}


def test_every_bias_has_a_case():
    assert uncovered(every()) == set()
    assert uncovered(every()[2:]) == set()  # the sum has one, too
    assert uncovered([*every()[2:8], *every()[8:-1]]) == {"alibi", "sum"}


@pytest.mark.parametrize("n", range(15))
def test_every_block_is_a_part_of_the_whole(n):
    bias = every()[n]
    bias.require(2, 3, 4, 7)
    whole = bias.block(Q, K)
    b, h, t, s = whole.shape
    assert b in (1, 2)
    assert h in (1, 3)
    assert (t, s) == (4, 7)
    assert whole.dtype == torch.float32
    exact = bias.block(Q, K, dtype=F64)
    assert exact.dtype == F64
    for rows in (slice(None), slice(1, 3), slice(3, 3), slice(2, 9)):
        for columns in (slice(None), slice(0, 5), slice(6, None)):
            block, part = bias.block(Q, K, rows, columns), whole[:, :, rows, columns]
            if isinstance(bias, FIRE):  # a matrix product, whose order depends on its sizes
                assert_close_rule(block, part, exact[:, :, rows, columns])
            else:
                assert torch.equal(block, part)
    assert torch.equal(bias.block(Q.tensor(), K.tensor()), whole)
    holes = torch.tensor([[-1, -1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5, -1]])
    assert bias.block(holes[:, 3:], holes).isfinite().all()


@pytest.mark.parametrize("n", range(15))
def test_every_bias_takes_other_tensors(n):
    bias = every()[n]
    others = [torch.randn_like(x) for x in bias.tensors()]
    other = bias.with_tensors(others)
    assert type(other) is type(bias)
    assert all(a is b for a, b in zip(other.tensors(), others, strict=True))
    assert (other == bias) is (not others)
    back = other.with_tensors(bias.tensors())
    assert back == bias
    assert hash(back) == hash(bias)
    assert torch.equal(back.block(Q, K), bias.block(Q, K))
    given = plural(len(others), "tensor")
    with pytest.raises(ArgumentError, match=f"has {given} and got {len(others) + 1}"):
        bias.with_tensors([*others, torch.ones(3)])


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("n", range(15))
def test_every_bias_compiles_whole(n):
    bias = every()[n]

    def scored(x, q_positions):
        return x + bias.block(q_positions, K) + bias.block(Q, K)

    x = torch.randn(2, 3, 4, 7)
    torch._dynamo.reset()  # each bias recompiles the same function
    compiled = torch.compile(scored, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, Q.tensor()), scored(x, Q.tensor()))


def test_numbers_compare_by_value_and_tensors_by_identity():
    assert ALiBi(8) == ALiBi(8)
    assert hash(ALiBi(8)) == hash(ALiBi(8))
    assert ALiBi(8) != ALiBi(8, symmetric=True)
    assert ALiBi(8) != 8
    assert ALiBi(slopes=[1.0, 0.5]) == ALiBi(slopes=(1.0, 0.5))
    x = torch.zeros(4, 7)
    assert DenseBias(x) == DenseBias(x) != DenseBias(x.clone())
    assert FnBias(slope, (x,)) == FnBias(slope, (x,)) != FnBias(slope, (x.clone(),))
    assert ALiBi(8) + DenseBias(x) == ALiBi(8) + DenseBias(x)
    assert (
        len({ALiBi(8), ALiBi(8), DenseBias(x), DenseBias(x), T5Relative(TABLE), T5Relative(TABLE)})
        == 3
    )


def test_sums():
    a, b, c = ALiBi(3), DenseBias(torch.randn(4, 7)), FnBias(slope, (torch.randn(3),))
    total = (a + b) + (c + a)
    assert isinstance(total, Sum)
    assert total.terms == (a, b, c, a)
    by_hand = a.block(Q, K) + b.block(Q, K) + c.block(Q, K) + a.block(Q, K)
    torch.testing.assert_close(total.block(Q, K), by_hand)
    assert [*map(id, total.tensors())] == [id(b.tensor), id(c.parameters[0])]
    with pytest.raises(ArgumentError, match=r"alibi\(3\) has 3 heads and the query has 4"):
        total.require(1, 4, 4, 7)
    with pytest.raises(TypeError, match="unsupported operand"):
        a + 1


def test_dense_speaks_of_slots():
    x = torch.arange(28.0).view(4, 7)
    assert torch.equal(DenseBias(x).block(Span(900, 4), Span(500, 7))[0, 0], x)
    row = DenseBias(x[None, None, :1])
    assert torch.equal(row.block(Q, K, slice(2, 4))[0, 0], x[:1].expand(2, -1))
    x.requires_grad_()
    DenseBias(x).block(Q, K, slice(1, 2), slice(0, 3), dtype=F64).sum().backward()
    assert x.grad.sum() == 3
    assert x.grad[1, :3].sum() == 3


def test_which_biases_speak_of_slots():
    slots = DenseBias(torch.zeros(4, 7))
    assert slots.by_slot
    assert (ALiBi(3) + slots).by_slot
    assert not any(
        x.by_slot for x in (ALiBi(3), T5Relative(TABLE), FnBias(squares), ALiBi(3) + ALiBi(3))
    )


def test_a_bias_without_a_rule():
    class Nothing(Bias):
        pass

    with pytest.raises(NotImplementedError):
        Nothing().block(Q, K)
    BIASES.remove(Nothing)


def test_sums_of_what_is_no_bias():
    with pytest.raises(ArgumentError, match="a sum of biases has no terms; give at least one"):
        Sum(())
    with pytest.raises(
        ArgumentTypeError, match="a sum of biases has a term of type int; every term must be a Bias"
    ):
        Sum((ALiBi(3), 1))


@pytest.mark.parametrize(
    "shape, fits",
    [
        ((4, 7), True),
        ((1, 1, 4, 7), True),
        ((2, 3, 4, 7), True),
        ((2, 1, 1, 7), True),
        ((4, 1), False),
        ((1, 7), False),
        ((1, 1, 4, 1), False),
        ((3, 3, 4, 7), False),
        ((2, 2, 4, 7), False),
    ],
)
def test_which_dense_shapes_serve_a_call(shape, fits):
    bias = DenseBias(torch.zeros(shape))
    if fits:
        bias.require(2, 3, 4, 7)
        return
    with pytest.raises(
        ArgumentError, match=r"it must be \(4, 7\) or \(2 or 1, 3 or 1, 4 or 1, 7\)"
    ):
        bias.require(2, 3, 4, 7)


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: DenseBias(torch.zeros(2, 4, 7)), ArgumentError, r"bias has 3 dimensions, \(2"),
        (lambda: DenseBias(torch.zeros(4, 7).bool()), ArgumentTypeError, "bias is bool; it must"),
        (lambda: DenseBias([[0.0]]), ArgumentTypeError, "bias is list"),
        (lambda: FnBias(3), ArgumentTypeError, r"fn is int; it must be a function fn\(q, k, ...\)"),
        (lambda: FnBias(slope, (1.0,)), ArgumentTypeError, r"parameters\[0\] is float; it must"),
        (
            lambda: FnBias(lambda q, k: q - k).block(Q, K),
            ArgumentTypeError,
            "returned torch.int64; it must return a float tensor",
        ),
        (lambda: FnBias(constant).block(Q, K), ArgumentTypeError, "returned float; it must"),
        (
            lambda: FnBias(lambda q, k: (q - k)[0] * 1.0).block(Q, K),
            ArgumentError,
            r"returned \(1, 4, 7\) for positions",
        ),
        (lambda: FnBias(short).block(Q, K), ArgumentError, r"returned \(1, 1, 3, 7\)"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()


def test_the_names_of_biases_in_files() -> None:
    assert (DenseBias.kind, FnBias.kind) == ("dense", "fn")
    table = torch.ones(2, 3)
    saved = from_data(BIASES, {"dense": "t0"}, {"t0": table}, lambda x: x)
    assert saved == DenseBias(table)
