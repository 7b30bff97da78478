"""Training on the compiled products: gradients against the definition, what they may not touch, and
what they cost.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.errors import KernelRefusal
from regard.ops.cpu import attention
from regard.ops.softmax import gemm
from regard.ops.softmax.call import make_call
from regard.ops.softmax.gemm import GemmKernel
from regard.span import Span
from tests.kernels import require_kernels
from tests.ops.softmax.plain import grid, qkv
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import GRADIENT, assert_close_rule

require_kernels()

KERNEL = GemmKernel()
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
LEAKS = "a NaN or infinity behind a mask would leak through 0 x NaN"


def loss_of(out: Tensor, lse: Tensor) -> Tensor:
    """A number that every output and every lse moves differently."""
    draw = torch.Generator().manual_seed(1)
    d_out = torch.randn(out.shape, generator=draw).bfloat16().to(out.dtype)
    d_lse = torch.randn(lse.shape, generator=draw).bfloat16().to(lse.dtype)
    loss = (out * d_out).sum().to(lse.dtype)
    seen = ~lse.isneginf()
    return loss + (lse[seen] * d_lse[seen]).sum()


def leaves_of(*tensors: Tensor | None, dtype: torch.dtype | None = None) -> list[Tensor]:
    given = [x for x in tensors if x is not None]
    return [x.detach().to(dtype or x.dtype).clone().requires_grad_() for x in given]


def found_by_kernel(tensors: Sequence[Tensor], **options: Any) -> tuple[Tensor, ...]:
    """Gradients of q, k, v and a sink, by the kernel."""
    sink = options.pop("sink", None)
    q, k, v, *rest = leaves = leaves_of(*tensors, sink)
    call = make_call(q, k, v, wants_lse=True, sink=rest[0] if rest else None, **options)
    assert KERNEL.why_not(call) == []
    out, lse, *_ = KERNEL.run(call)
    assert lse is not None
    return torch.autograd.grad(loss_of(out, lse), leaves)


def assert_right(
    tensors: Sequence[Tensor],
    seen: Tensor,
    dense: Tensor | None = None,
    **options: Any,
) -> None:
    """Every gradient of the kernel against that of the definition in float64, under the rule."""
    found = found_by_kernel(tensors, **options)
    named = {name: options[name] for name in ("scale", "softcap") if name in options}

    def plain(dtype: torch.dtype, n: int) -> list[tuple[Tensor, ...]]:
        q, k, v, *rest = leaves = leaves_of(*tensors, options.get("sink"), dtype=dtype)
        bias = None if dense is None else dense.to(dtype)
        more = {**named, "sink": rest[0] if rest else None, "visible": seen, "bias": bias}
        pairs = several_plains(q, k, v, n=n, **more) if n else [plain_attention(q, k, v, **more)]
        losses = [loss_of(out, lse) for out, lse in pairs]
        return [torch.autograd.grad(loss, leaves, retain_graph=True) for loss in losses]

    usual, (right,) = plain(tensors[0].dtype, 4), plain(torch.float64, 0)
    for i, name in enumerate(["q", "k", "v", "sink"][: len(found)]):
        assert found[i].is_contiguous()
        assert_close_rule(
            found[i], [g[i] for g in usual], right[i], GRADIENT, what=f"gradient of {name}"
        )
    blind = ~seen.expand(*tensors[0].shape[:3], tensors[1].shape[2]).any(-1)
    assert torch.equal(found[0][blind], torch.zeros_like(found[0][blind]))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.1, 1.0, 6.0])
def test_several_tiles_and_blocks(dtype: torch.dtype, size: float) -> None:
    # 580 keys are ten panels, the last a ragged one; 300 queries of 2 heads are three blocks
    tensors = qkv(T=300, S=580, dtype=dtype, size=size)
    i, j = grid(300, 580)
    assert_right(tensors, j <= i, mask=masks.Causal())
    seen = (j <= i) & ((i - j < 100) | (j < 3))
    assert_right(
        tensors,
        seen,
        mask=masks.Causal() & (masks.Window(100) | masks.Sinks(3)),
        sink=torch.randn(4).to(dtype),
    )


TABLE = torch.tensor([[1, 0, 0, 0], [0, 1, 0, 0], [1, 0, 1, 0], [1, 1, 0, 1]]).bool()
RULES: dict[str, tuple[masks.Mask, Callable[[Tensor, Tensor], Tensor]]] = {
    "full": (masks.Full(), lambda i, j: (i >= 0) & (j >= 0)),
    "document": (
        masks.Causal() & masks.Document.from_lengths([130, 1, 169]),
        lambda i, j: (j <= i) & (((i < 130) & (j < 130)) | ((i == 130) & (j == 130)) | (j > 130)),
    ),
    "prefix": (masks.Causal() | masks.Prefix(150), lambda i, j: (j <= i) | (j < 150)),
    "chunk": (masks.Causal() & masks.Chunk(90), lambda i, j: (j <= i) & (i // 90 == j // 90)),
    "blocks": (masks.Blocks(TABLE, 80), lambda i, j: TABLE[i // 80, j // 80]),
    "future": (~masks.Causal(), lambda i, j: j > i),
    "nothing": (masks.Window(5) & ~masks.Window(5), lambda i, j: (i < 0) & (j < 0)),
}


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_masks(name: str, dtype: torch.dtype) -> None:
    mask, rule = RULES[name]
    assert_right(qkv(T=300, S=300, dtype=dtype), rule(*grid(300, 300)), mask=mask)


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("D, E", [(1, 1), (3, 70), (65, 64), (33, 130)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dims_that_divide_nothing(D: int, E: int, dtype: torch.dtype) -> None:
    i, j = grid(9, 67)
    assert_right(qkv(H=6, G=2, T=9, S=67, D=D, E=E, dtype=dtype), j <= i, mask=masks.Causal())


@pytest.mark.parametrize("H, G, T, S", [(1, 1, 1, 1), (5, 5, 3, 20), (7, 1, 3, 20), (300, 1, 2, 9)])
def test_groups_larger_and_smaller_than_a_block(H: int, G: int, T: int, S: int) -> None:
    i, j = grid(T, S)
    assert_right(qkv(B=2, H=H, G=G, T=T, S=S, D=4, E=4), j <= i, mask=masks.Causal())


@pytest.mark.parametrize("symmetric", [False, True])
@pytest.mark.parametrize("softcap", [None, 2.0])
def test_alibi(symmetric: bool, softcap: float | None) -> None:
    i, j = grid(70, 90)
    slopes = torch.tensor([0.5, 0.25, 0.0, 0.01])
    bias = -slopes.double()[:, None, None] * ((i - j).abs() if symmetric else i - j)
    made = biases.ALiBi(slopes=slopes, symmetric=symmetric)
    assert_right(qkv(T=70, S=90), j <= i, bias, mask=masks.Causal(), bias=made, softcap=softcap)


@pytest.mark.parametrize("dtype", DTYPES)
def test_left_padded_rows_and_holes(dtype: torch.dtype) -> None:
    positions = torch.stack([torch.arange(130), torch.arange(130) - 90])
    positions[1, :90] = -1
    positions[0, 70] = -1
    i, j = positions[:, None, :, None], positions[:, None, None, :]
    tensors = qkv(B=2, T=130, S=130, dtype=dtype)
    assert_right(
        tensors,
        (j <= i) & (j >= 0),
        mask=masks.Causal(),
        q_positions=positions,
        k_positions=positions,
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_shared_memory(dtype: torch.dtype) -> None:
    q, k, v = qkv(B=2, T=40, S=70, dtype=dtype)
    i, j = grid(40, 70)
    mask, seen = masks.Causal(), j <= i
    right = found_by_kernel([q, k, v], mask=mask)
    q, k, v = leaves_of(q, k, v)
    swapped = q.transpose(1, 2).contiguous().transpose(1, 2)
    wide = torch.cat([torch.full_like(k, math.nan), k, k], 2)[:, :, 70:140]
    call = make_call(swapped, wide, v.mT.contiguous().mT, mask=mask, wants_lse=True)
    out, lse, *_ = KERNEL.run(call)
    assert lse is not None
    found = torch.autograd.grad(loss_of(out, lse), (q, k, v))
    assert all(torch.equal(x, y) for x, y in zip(found, right, strict=True))
    one = k[:1].detach().expand(2, -1, -1, -1)
    assert_right([q, one, v], seen, mask=mask)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_of_the_lse_alone(dtype: torch.dtype) -> None:
    tensors, (i, j) = qkv(dtype=dtype), grid(70, 70)
    q, k, v = leaves_of(*tensors)
    lse = KERNEL.run(make_call(q, k, v, mask=masks.Causal(), wants_lse=True)).lse
    assert lse is not None
    found = torch.autograd.grad(lse.sum(), (q, k, v))
    assert torch.equal(found[2], torch.zeros_like(v))

    def plain(dtype: torch.dtype) -> tuple[Tensor, ...]:
        x = leaves_of(*tensors, dtype=dtype)
        return torch.autograd.grad(plain_attention(*x, visible=j <= i)[1].sum(), x[:2])

    for mine, usual, exact in zip(found[:2], plain(dtype), plain(torch.float64), strict=True):
        assert_close_rule(mine, usual, exact, GRADIENT)


def test_only_a_sink_learns() -> None:
    q, k, v = qkv()
    sink = torch.randn(4).requires_grad_()
    out = KERNEL.run(make_call(q, k, v, mask=masks.Causal(), sink=sink)).out
    (found,) = torch.autograd.grad(out.square().sum(), sink)
    wide = sink.detach().double().requires_grad_()
    i, j = grid(70, 70)
    right = plain_attention(q.double(), k.double(), v.double(), visible=j <= i, sink=wide)[0]
    (exact,) = torch.autograd.grad(right.square().sum(), wide)
    (usual,) = torch.autograd.grad(
        plain_attention(q, k, v, visible=j <= i, sink=sink)[0].square().sum(), sink
    )
    assert_close_rule(found, usual, exact, GRADIENT)


def test_central_differences() -> None:
    """The slope along eight directions, from values of the definition alone: autograd has no part
    in it.
    """
    tensors = qkv(T=9, S=12, D=5, E=3)
    i, j = grid(9, 12)
    seen = (j <= i) & (i - j < 6)
    found = found_by_kernel(tensors, mask=masks.Causal() & masks.Window(6))
    draw, h = torch.Generator().manual_seed(2), 1e-5

    def loss(step: float, way: list[Tensor]) -> float:
        moved = [x.double() + step * d for x, d in zip(tensors, way, strict=True)]
        return loss_of(*plain_attention(*moved, visible=seen)).item()

    for _ in range(8):
        way = [torch.randn(x.shape, generator=draw, dtype=torch.float64) for x in tensors]
        slope = (loss(h, way) - loss(-h, way)) / (2 * h)
        terms = [(g.double() * d).flatten() for g, d in zip(found, way, strict=True)]
        size = torch.cat(terms).abs().sum().item()
        assert abs(torch.cat(terms).sum().item() - slope) <= 16 * 2**-24 * size, (
            "some roundings of fp32"
        )


def test_a_wrong_gradient_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors, (i, j) = qkv(), grid(70, 70)
    with pytest.raises(AssertionError, match="gradient of q error"):
        assert_right(tensors, j < i + 2, mask=masks.Causal())
    real = attention.prefill_gradient

    def without_the_shift(args: Any, out: Tensor, *rest: Any) -> Any:
        return real(args, torch.zeros_like(out), *rest)

    monkeypatch.setattr(attention, "prefill_gradient", without_the_shift)
    with pytest.raises(AssertionError, match="gradient of q error"):
        assert_right(tensors, j <= i, mask=masks.Causal())


@pytest.mark.parametrize("workers", [2, 3, 7])
@pytest.mark.parametrize("H, G", [(4, 1), (6, 3)])
def test_threads_share_the_work(
    monkeypatch: pytest.MonkeyPatch, workers: int, H: int, G: int
) -> None:
    tensors, (i, j) = qkv(H=H, G=G, T=200, S=200), grid(200, 200)
    monkeypatch.setattr("regard.ops.cpu.threads.thread_count", lambda: workers)
    assert_right(tensors, j <= i, mask=masks.Causal())
    first = found_by_kernel(tensors, mask=masks.Causal())
    monkeypatch.setattr("regard.ops.cpu.threads.thread_count", lambda: 1)
    alone = found_by_kernel(tensors, mask=masks.Causal())
    assert all(torch.equal(x, y) for x, y in zip(first, alone, strict=True))


def test_the_gradient_of_a_blind_row_may_be_anything() -> None:
    tensors = qkv(T=20, S=100)
    at = torch.arange(20)[None] - 6  # six queries stand before the first key
    options: dict[str, Any] = {"mask": masks.Causal(), "q_positions": at}
    found = []
    for garbage in (0.0, math.nan, math.inf):
        q, k, v = leaves_of(*tensors)
        out, lse, *_ = KERNEL.run(make_call(q, k, v, wants_lse=True, **options))
        assert lse is not None
        d_out, d_lse = torch.randn_like(out).fill_(0.5), torch.ones_like(lse)
        d_out[:, :, :6], d_lse[:, :, :6] = garbage, garbage
        found.append(torch.autograd.grad((out, lse), (q, k, v), (d_out, d_lse)))
    for other in found[1:]:
        assert all(torch.equal(x, y) for x, y in zip(other, found[0], strict=True))
    assert found[0][1][:, :, :14].abs().amin() > 0, "keys that are seen learn"


@pytest.mark.parametrize("dtype", DTYPES)
def test_panels_that_nobody_sees_are_not_multiplied(dtype: torch.dtype) -> None:
    q, k, v = qkv(T=100, S=400, dtype=dtype)
    mask = masks.Causal() & masks.Window(40)
    call = make_call(q, k, v, mask=mask)
    out, top, total = attention.prefill(gemm.prefill_args(call))
    rest = (out, (top, total), out, torch.zeros_like(top))
    right = attention.prefill_gradient(gemm.prefill_args(call), *rest)

    def with_nan(first: int, last: int) -> tuple[Tensor, ...]:
        k_bad, v_bad = k.clone(), v.clone()
        k_bad[:, :, first:last], v_bad[:, :, first:last] = math.nan, math.nan
        bad = gemm.prefill_args(make_call(q, k_bad, v_bad, mask=mask))
        return attention.prefill_gradient(bad, *rest)

    # queries 300 to 399 see keys 261 to 399; 256 is where a panel begins
    assert all(torch.equal(x, y) for x, y in zip(with_nan(0, 256), right, strict=True))
    assert with_nan(256, 258)[0].isnan().any(), "one that is seen in part would be found"


@pytest.mark.parametrize("which", [0, 1, 2])
def test_garbage_behind_a_mask_is_refused_and_served_by_others(which: int) -> None:
    tensors = qkv(T=30, S=30)
    tensors[which][:, :, 12 if which == 0 else 25] = math.nan
    q, k, v = leaves_of(*tensors)
    call = make_call(q, k, v, mask=masks.Causal())
    assert KERNEL.why_not(call) == [LEAKS]
    with torch.no_grad():
        without = make_call(q, k, v, mask=masks.Causal())
        assert KERNEL.why_not(without) == ([LEAKS] if which == 2 else [])
    assert KERNEL.why_not(make_call(q, k, v)) == [], "what everybody sees may be anything"
    assert regard.attend(q, k, v, mask=masks.Causal())[:, :, :12].isfinite().all()


def test_visible_nan_shows_in_the_gradient() -> None:
    for which in range(3):
        tensors = qkv(T=20, S=20)
        tensors[which][0, 0, 3, 1] = math.nan
        found = found_by_kernel(tensors)
        assert found[0][0, 0].isnan().any()
        assert found[1][0, 0].isnan().all(-1).any()
        assert found[0][0, 2:].isfinite().all(), "other heads have nothing to do with it"


def test_refusals() -> None:
    q, k, v = leaves_of(*qkv())
    slopes = torch.ones(4, requires_grad=True)
    bias = biases.ALiBi(slopes=slopes)
    with pytest.raises(KernelRefusal, match=r"gemm \(no gradient for a bias\)"):
        regard.attend(q, k, v, bias=bias, backend="gemm")
    with torch.no_grad():
        regard.attend(q, k, v, bias=bias, backend="gemm")
    out = regard.attend(q, k, v, mask=masks.Causal(), backend="gemm")
    (found,) = torch.autograd.grad(out.square().sum(), q, create_graph=True)
    assert found.grad_fn is not None, "tests/ops/softmax/test_second_derivatives.py compares it"


def test_autocast_converts_its_inputs_and_nothing_inside() -> None:
    q, k, v = leaves_of(*qkv())
    halves = [x.detach().bfloat16().requires_grad_() for x in (q, k, v)]
    out, lse = regard.attend_partial(*halves, mask=masks.Causal(), backend="gemm")
    right = torch.autograd.grad(loss_of(out, lse), halves)
    with torch.autocast("cpu", torch.bfloat16):
        out, lse = regard.attend_partial(q, k, v, mask=masks.Causal(), backend="gemm")
        found = torch.autograd.grad(loss_of(out, lse), (q, k, v))
    assert all(torch.equal(x, y.float()) for x, y in zip(found, right, strict=True))


def cost(n: int, mask: masks.Mask) -> tuple[int, int]:
    """Pairs and bytes of a training call of n tokens."""
    q, k = (torch.empty(1, h, n, 64, device="meta", requires_grad=True) for h in (4, 1))
    work = KERNEL.work(
        make_call(q, k, k, mask=mask, q_positions=Span(0, n), k_positions=Span(0, n))
    )
    return work.pairs, work.bytes


def test_work_is_linear_in_the_length_of_a_window() -> None:
    window = masks.Causal() & (masks.Window(128) | masks.Sinks(4))
    (few, small), (many, large) = cost(1024, window), cost(4096, window)
    assert many <= 4.4 * few, "the first window is shorter"
    assert large <= 4 * small
    assert many <= 4 * 4096 * (128 + 5 * 64), (
        "a window, a panel at each of its ends, one of sinks, a block"
    )
    assert cost(4096, masks.Causal())[0] > 15 * cost(1024, masks.Causal())[0], "not so without one"


def test_it_trains_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(*shape: int, dtype: torch.dtype = torch.float32, **options: Any) -> str:
        x = torch.zeros(1, 1, 1, 1, dtype=dtype).expand(*shape).requires_grad_()
        return regard.plan(x, x, x, **options).kernel

    monkeypatch.setattr(gemm, "_measured_sizes", lambda: gemm.MEASURED["AVX512"])
    monkeypatch.setattr(gemm, "_processor_has_amx", lambda: False)
    window = masks.Causal() & masks.Window(64)
    assert first(1, 8, 512, 64) == "gemm"
    assert first(1, 8, 256, 64) == "sdpa", "too little of it"
    assert first(8, 8, 256, 64) == "sdpa", "rows too short"
    assert first(8, 8, 256, 64, dtype=torch.bfloat16) == "gemm"
    padded = masks.Causal() & masks.Padding.right([512] * 3 + [300])
    assert first(4, 8, 512, 32, mask=masks.Causal()) == "sdpa", "heads too narrow"
    assert first(4, 8, 512, 32, mask=padded) == "sdpa", "torch leaves out as much"
    assert first(4, 8, 512, 32, mask=window) == "gemm"
    monkeypatch.setattr(gemm, "_measured_sizes", lambda: None)
    assert first(1, 8, 512, 64) == "sdpa"
