"""The reference is the definition: held against loops, and at the edges where kernels go wrong."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import masks
from regard.ops.softmax import reference
from regard.ops.softmax.call import Call, make_call
from regard.ops.softmax.reference import ReferenceKernel
from regard.span import Span
from tests.ops.softmax.cases import ORACLE, Case, make
from tests.oracles.oracle import softmax_attention
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import assert_close_rule


def run(*tensors: Tensor, **options: Any) -> tuple[Tensor, Tensor]:
    out, lse, *_ = ReferenceKernel().run(make_call(*tensors, wants_lse=True, **options))
    assert lse is not None
    return out, lse


def qkv(B: int = 1, H: int = 2, T: int = 5, S: int = 7, D: int = 4, **kind: Any) -> list[Tensor]:
    return [torch.randn(B, H, n, D, **kind) for n in (T, S, S)]


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("case", ORACLE, ids=str)
def test_equals_the_loops(case: Case) -> None:
    made = make(case, torch.float64)
    visible, bias = made.visible, made.bias
    wide = None if bias is None else bias.expand(visible.shape).tolist()
    at = visible.tolist()
    answer = softmax_attention(
        made.q,
        made.k,
        made.v,
        visible=lambda b, h, i, j: at[b][h][i][j],
        bias=lambda b, h, i, j: 0.0 if wide is None else wide[b][h][i][j],
        scale=case.scale,
        softcap=case.softcap,
        sink=made.sink,
    )
    out, lse, *_ = ReferenceKernel().run(made.call(wants_lse=True))
    assert lse is not None
    outs, lses = zip(*several_plains(made.q, made.k, made.v, **made.plain()), strict=True)
    assert_close_rule(out, outs, answer.out, what="out")
    assert_close_rule(lse, lses, answer.lse, what="lse")
    assert torch.equal(out[~visible.any(-1)], torch.zeros_like(out[~visible.any(-1)]))


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("case", ORACLE, ids=str)
def test_pattern_equals_the_loops(case: Case) -> None:
    made = make(case, torch.float64)
    bias = None if made.bias is None else made.bias.expand(made.visible.shape)
    answer = softmax_attention(
        made.q,
        made.k,
        made.v,
        visible=lambda b, h, i, j: bool(made.visible[b, h, i, j]),
        bias=lambda b, h, i, j: 0.0 if bias is None else bias[b, h, i, j].item(),
        scale=case.scale,
        softcap=case.softcap,
        sink=made.sink,
    )
    from regard import Trace

    with Trace("pattern") as trace:
        ReferenceKernel().run(made.call())
    pattern = trace["pattern"]
    torch.testing.assert_close(pattern, answer.pattern, rtol=1e-12, atol=1e-14)
    assert torch.equal(pattern[~made.visible], torch.zeros_like(pattern[~made.visible]))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    "case",
    [
        Case("none", (1, 2, 1, 3, 4, 2, 3)),
        Case("window", (1, 2, 2, 3, 4, 2, 2), sink=True, softcap=1.3),
        Case("causal", (2, 2, 1, 4, 3, 2, 2), bias="t5", scale=-0.8),
        Case("prefix", (1, 2, 1, 3, 4, 2, 2), bias="dense", positions="rows"),
    ],
    ids=str,
)
def test_gradients_are_derivatives(case: Case) -> None:
    made = make(case, torch.float64, gradient=True)
    see = made.visible.any(-1)

    def both(*leaves: Tensor) -> tuple[Tensor, Tensor]:
        again = _with_leaves(made.call(wants_lse=True), leaves)
        out, lse, *_ = ReferenceKernel().run(again)
        assert lse is not None
        return out, lse[see]

    assert torch.autograd.gradcheck(both, made.leaves)
    assert torch.autograd.gradgradcheck(lambda *x: both(*x)[0], made.leaves)


def _with_leaves(call: Call, leaves: tuple[Tensor, ...]) -> Call:
    from dataclasses import replace

    q, k, v, *rest = leaves
    sink = rest.pop(0) if call.sink is not None else None
    bias = call.bias.with_tensors(rest) if call.bias is not None else None
    return replace(call, q=q, k=k, v=v, sink=sink, bias=bias)


def test_rows_that_see_nothing() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(T=6, S=4))
    out, lse = run(q, k, v, mask=masks.Causal())  # queries at -2 .. 3
    assert torch.equal(out[:, :, :2], torch.zeros(1, 2, 2, 4))
    assert lse[:, :, :2].isneginf().all()
    assert lse[:, :, 2:].isfinite().all()
    (out.sum() + lse[:, :, 2:].sum()).backward()
    assert q.grad is not None
    assert torch.equal(q.grad[:, :, :2], torch.zeros(1, 2, 2, 4))
    assert all(x.grad is not None and x.grad.isfinite().all() for x in (q, k, v))
    gradient = torch.autograd.grad(
        run(q, k, v, mask=masks.Causal())[1][:, :, :2].sum(), (q, k), allow_unused=True
    )
    assert all(g is None or torch.equal(g, torch.zeros_like(g)) for g in gradient)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_a_visible_nan_reaches_what_sees_it_and_nothing_else(where: str) -> None:
    tensors = dict(zip("qkv", qkv(T=7, S=7), strict=True))
    clean, _ = run(*tensors.values(), mask=masks.Causal())
    tensors[where] = tensors[where].clone()
    tensors[where][0, 0, 3, 1] = math.nan
    out, lse = run(*tensors.values(), mask=masks.Causal())
    hit = torch.zeros(1, 2, 7, 4, dtype=torch.bool)
    if where == "q":
        hit[0, 0, 3] = True
    elif where == "k":
        hit[0, 0, 3:] = True
    else:
        hit[0, 0, 3:, 1] = True
    assert torch.equal(out.isnan(), hit)
    assert torch.equal(out[~hit], clean[~hit])
    assert torch.equal(lse.isnan(), hit[..., 0] if where != "v" else torch.zeros_like(hit[..., 0]))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_visible_infinity_in_v_stays_one(sign: int) -> None:
    q, k, v = qkv(T=5, S=5)
    v[0, 1, 2, 0] = sign * math.inf
    out, _ = run(q, k, v, mask=masks.Causal())
    assert torch.equal(out[0, 1, 2:, 0], torch.full((3,), sign * math.inf))
    assert out[0, 1, :2].isfinite().all()
    v[0, 1, 4, 0] = -sign * math.inf
    assert run(q, k, v, mask=masks.Causal())[0][0, 1, 4, 0].isnan()


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("garbage", [math.nan, math.inf, -math.inf, 3e38, -1e30])
@pytest.mark.parametrize("where", ["k", "v", "kv"])
@pytest.mark.parametrize("by", ["causal", "positions", "dense"])
def test_what_is_masked_changes_nothing(garbage: float, where: str, by: str) -> None:
    q, k, v = qkv(T=4, S=7)
    bad = [5, 6] if by != "positions" else [0, 3]
    options: dict[str, Any] = {}
    if by == "causal":
        options = {"mask": masks.Causal(), "q_positions": Span(1, 4)}
    elif by == "positions":
        options = {
            "k_positions": torch.tensor([[-1, 0, 1, -1, 2, 3, 4]]),
            "q_positions": Span(1, 4),
        }
    else:
        table = torch.ones(4, 7, dtype=torch.bool)
        table[:, bad] = False
        options = {"mask": table}
    dirty = {"k": k.clone(), "v": v.clone()}
    for name in where:
        dirty[name][:, :, bad] = garbage
    results = []
    for keys, values in ((k, v), (dirty["k"], dirty["v"])):
        leaves = [x.clone().requires_grad_() for x in (q, keys, values)]
        out, lse = run(*leaves, **options)
        gradients = torch.autograd.grad((out * out.detach()).sum() + lse.sum(), leaves)
        assert torch.equal(gradients[1][:, :, bad], torch.zeros(1, 2, 2, 4))
        assert torch.equal(gradients[2][:, :, bad], torch.zeros(1, 2, 2, 4))
        results.append((out, lse, *gradients))
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other)


def test_no_keys_no_queries_no_rows() -> None:
    for shape, S in (((2, 2, 3, 4), 0), ((2, 2, 0, 4), 5), ((0, 2, 3, 4), 5), ((2, 2, 0, 4), 0)):
        q = torch.randn(shape, requires_grad=True)
        k = torch.randn(shape[0], 1, S, 4, requires_grad=True)
        out, lse = run(q, k, k, q_positions=Span(0, shape[2]))
        assert torch.equal(out, torch.zeros(shape))
        assert torch.equal(lse, torch.full(shape[:3], 0.0 if S else -math.inf))
        out.sum().backward()
        assert torch.equal(q.grad if q.grad is not None else torch.zeros(shape), torch.zeros(shape))


@pytest.mark.parametrize("view", ["bthd", "cache", "expanded", "strided", "offset"])
def test_views_give_the_same_bits(view: str) -> None:
    x = torch.randn(2, 3, 12, 8)
    if view == "bthd":
        x = torch.randn(2, 12, 3, 8).transpose(1, 2)
    elif view == "cache":
        x = torch.randn(2, 3, 40, 8)[:, :, 5:17]
    elif view == "expanded":
        x = torch.randn(2, 1, 12, 8).expand(2, 3, 12, 8)
    elif view == "strided":
        x = torch.randn(2, 3, 12, 16)[..., ::2]
    elif view == "offset":
        x = torch.randn(2 * 3 * 12 * 8 + 1)[1:].view(2, 3, 12, 8)
    out, lse = run(x, x, x, mask=masks.Causal())
    y = x.clone(memory_format=torch.contiguous_format)
    again, lse_again = run(y, y, y, mask=masks.Causal())
    assert torch.equal(out, again)
    assert torch.equal(lse, lse_again)


def test_fp16_scores_above_its_range() -> None:
    q = torch.full((1, 1, 4, 64), 60.0, dtype=torch.float16)
    k = q * torch.tensor([1, 2, -1, 4], dtype=torch.float16)[:, None]  # q.k up to 921600 > 65504
    v = torch.eye(4, dtype=torch.float16)[None, None]
    out, lse = run(q, k, v)
    assert torch.equal(out[0, 0], torch.tensor([0, 0, 0, 1.0], dtype=torch.float16).expand(4, 4))
    assert torch.equal(lse, torch.full((1, 1, 4), 115200.0))


@pytest.mark.parametrize("value", ["one hot", "ties", "zeros", "denormals", "huge negatives"])
def test_adversarial_scores(value: str) -> None:
    q, k, v = qkv(S=6, T=6)
    if value == "one hot":
        k[:, :, 2] = q[:, :, 2] * 1e4
    elif value == "ties":
        k[:] = k[:, :, :1]
    elif value == "zeros":
        k.zero_()
    elif value == "denormals":
        k.fill_(1e-40)
    else:
        q.fill_(-1e15)
        k.fill_(1e15)
    out, lse = run(q, k, v)
    right = plain_attention(q.double(), k.double(), v.double())
    outs, lses = zip(*several_plains(q, k, v), strict=True)
    assert_close_rule(out, outs, right[0])
    assert_close_rule(lse, lses, right[1])
    if value in ("ties", "zeros", "denormals"):
        torch.testing.assert_close(
            out, v.mean(2, keepdim=True).expand_as(out), rtol=1e-6, atol=1e-6
        )


def test_rows_in_blocks_are_the_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    made = make(Case("sinks", (2, 4, 2, 19, 33, 8, 8), sink=True), torch.float32)
    whole = ReferenceKernel().run(made.call(wants_lse=True))
    monkeypatch.setattr(reference, "BLOCK_BYTES", 2 * 4 * 33 * 4 * 5)  # five rows
    parts = ReferenceKernel().run(made.call(wants_lse=True))
    assert whole.lse is not None
    assert parts.lse is not None
    torch.testing.assert_close(parts.out, whole.out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(parts.lse, whole.lse, rtol=1e-6, atol=1e-6)


def test_what_it_will_not_hold() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(T=32, S=64))
    call = make_call(q, k, v)
    assert ReferenceKernel().why_not(call) == []
    long = [x.requires_grad_() for x in qkv(T=2**15, S=2**14, D=1)]
    assert ReferenceKernel().why_not(make_call(*long)) == []  # 4 GiB, and no byte more
    long = [x.requires_grad_() for x in qkv(T=2**15, S=2**15, D=1)]
    (reason,) = ReferenceKernel().why_not(make_call(*long))
    assert reason == (
        "would allocate 8.00 GiB for scores (1, 2, 32768, 32768); limit 4.00 GiB: "
        "regard.attention_weights gives any block of them"
    )
    with torch.no_grad():
        assert ReferenceKernel().why_not(make_call(*long)) == []
    assert ReferenceKernel().work(call) == (2 * 32 * 64, 2 * 2 * 32 * 64 * 4)


def test_dropout_scales_what_it_keeps() -> None:
    q, k, _ = qkv(H=1, T=400, S=50)
    v = torch.eye(50)[None, None]
    kept, _ = run(q, k, v, dropout=0.25)
    pattern, _ = run(q, k, v)
    dropped = kept == 0
    assert abs(dropped.float().mean().item() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / 20000)
    torch.testing.assert_close(kept[~dropped], pattern[~dropped] / 0.75)
