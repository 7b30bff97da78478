"""ALiBi. Numbers: computed in float64 from the formulas."""

from __future__ import annotations

import pytest
import torch

from regard.biases import ALiBi, alibi_slopes
from regard.errors import ArgumentError, ArgumentTypeError
from regard.span import Span

F64 = torch.float64
HEADS = (1, 2, 3, 8, 12, 20, 40, 71, 112)


def test_slopes():
    assert alibi_slopes(8) == tuple(2.0**-h for h in range(1, 9))
    assert sum(alibi_slopes(8)) == 0.99609375
    assert alibi_slopes(16) == tuple(2 ** (-h / 2) for h in range(1, 17))
    twelve = alibi_slopes(12)
    assert twelve[:8] == alibi_slopes(8)
    assert twelve[8:] == pytest.approx(
        (0.7071067811865476, 0.3535533905932738, 0.1767766952966369, 0.08838834764831845), rel=1e-15
    )
    assert sum(twelve) == pytest.approx(2.3219189647247767, rel=1e-15)
    forty = alibi_slopes(40)
    assert forty[:32] == pytest.approx([2 ** (-h / 4) for h in range(1, 33)], rel=1e-15)
    assert forty[32:] == pytest.approx([2 ** (-h / 8) for h in range(1, 17, 2)], rel=1e-14)
    assert sum(forty) == pytest.approx(9.58724279196824, rel=1e-14)
    assert alibi_slopes(112)[:64] == pytest.approx([2 ** (-h / 8) for h in range(1, 65)], rel=1e-15)
    assert all(len(alibi_slopes(n)) == n for n in HEADS)


@pytest.mark.parametrize("n", HEADS)
def test_slopes_of_bloom_and_mpt(n):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from transformers.models.bloom.modeling_bloom import build_alibi_tensor
    from transformers.models.mpt.modeling_mpt import build_mpt_alibi_tensor

    ours = torch.tensor(alibi_slopes(n), dtype=F64)
    bloom = build_alibi_tensor(torch.ones(1, 2), n, torch.float32)[:, 0, 1].double()
    mpt = -build_mpt_alibi_tensor(n, 2)[:, 0, 0].double()
    torch.testing.assert_close(ours, bloom, rtol=1e-6, atol=0)
    torch.testing.assert_close(ours, mpt, rtol=1e-6, atol=0)


@pytest.mark.parametrize("symmetric", [False, True])
def test_the_definition(symmetric):
    bias = ALiBi(3, symmetric=symmetric)
    q, k = torch.tensor([[4, 5], [-1, 9]]), torch.tensor([[0, 4, 7], [-1, -1, 3]])
    for dtype in (torch.float32, F64):
        found = bias.block(q, k, dtype=dtype)
        assert found.shape == (2, 3, 2, 3)
        assert found.dtype == dtype
        for b in range(2):
            for h, m in enumerate(alibi_slopes(3)):
                for i in range(2):
                    for j in range(3):
                        distance = int(q[b, i] - k[b, j])
                        expected = -m * (abs(distance) if symmetric else distance)
                        assert float(found[b, h, i, j]) == pytest.approx(
                            expected, rel=2 * torch.finfo(dtype).eps
                        )


def test_far_positions_stay_distinct_in_fp32_and_blocks_are_parts():
    bias = ALiBi(slopes=(1.0,))
    far = bias.block(Span(131071, 1), Span(0, 131072))[0, 0, 0]
    assert torch.equal(far, torch.arange(131072.0) - 131071)
    whole = ALiBi(4).block(Span(3, 5), Span(0, 8))
    part = ALiBi(4).block(Span(3, 5), Span(0, 8), slice(1, 4), slice(2, None))
    assert torch.equal(part, whole[:, :, 1:4, 2:])
    assert torch.equal(whole, ALiBi(4).block(torch.arange(3, 8)[None], torch.arange(8)[None]))
    assert ALiBi(4).block(Span(0, 0), Span(0, 3)).shape == (1, 4, 0, 3)
    half = ALiBi(1).block(Span(300, 1), Span(0, 3), dtype=torch.bfloat16)
    assert half.dtype == torch.bfloat16
    assert (
        half.flatten().tolist()
        == torch.tensor([-300 / 256, -299 / 256, -298 / 256]).bfloat16().tolist()
    )


def test_learned_slopes():
    slopes = torch.tensor([0.5, 0.25], dtype=F64, requires_grad=True)
    bias = ALiBi(slopes=slopes)
    assert bias.tensors() == (slopes,)
    assert ALiBi(2).tensors() == ()
    assert torch.autograd.gradcheck(
        lambda m: bias.with_tensors([m]).block(Span(2, 3), Span(0, 4), dtype=F64), (slopes,)
    )
    half = ALiBi(slopes=slopes.detach().bfloat16()).block(Span(1000, 1), Span(0, 2))
    assert half[0, 0, 0].tolist() == [-500.0, -499.5]


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: ALiBi(), ArgumentError, r"ALiBi\(heads=None, slopes=None\): give one of the two"),
        (lambda: ALiBi(2, (1.0, 2.0)), ArgumentError, r"ALiBi\(heads=2, slopes=given\)"),
        (lambda: ALiBi(0), ArgumentError, "heads is 0; it must be at least 1"),
        (lambda: alibi_slopes(0), ArgumentError, "heads is 0"),
        (lambda: ALiBi(slopes=torch.ones(2, 1)), ArgumentError, r"slopes is \(2, 1\); it must"),
        (lambda: ALiBi(slopes=torch.ones(2).long()), ArgumentTypeError, "slopes is a tensor of"),
        (lambda: ALiBi(slopes=[1.0, float("nan")]), ArgumentError, r"slopes\[1\] is nan; it"),
        (lambda: ALiBi(8).require(1, 12, 4, 4), ArgumentError, r"alibi\(8\) has 8 heads and"),
        (
            lambda: ALiBi(slopes=torch.ones(2)).require(1, 3, 4, 4),
            ArgumentError,
            r"alibi\(2 slopes\) has 2 heads",
        ),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
