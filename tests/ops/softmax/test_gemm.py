"""The prefill kernel alone: its small products, its packing, its refusals, and what it skips."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.ops.cpu.attention import PrefillArgs, prefill
from regard.ops.softmax import gemm
from regard.ops.softmax.call import make_call
from regard.ops.softmax.gemm import GemmKernel
from regard.ops.softmax.kernel import UNREADABLE
from regard.span import Span
from tests.kernels import require_kernels
from tests.ops.softmax.plain import grid, qkv, reasons_in_a_graph, refusal_of
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import assert_close_rule

require_kernels()

KERNEL = GemmKernel()
refusal = partial(refusal_of, "gemm")
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
"""Each dtype is another kernel."""


def assert_right(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor, dense: Tensor | None = None, **options: Any
) -> None:
    """Out and lse of the kernel against the definition in float64, under the rule."""
    named = {name: options[name] for name in ("scale", "softcap", "sink") if name in options}
    right = plain_attention(
        q.double(),
        k.double(),
        v.double(),
        visible=seen,
        bias=dense,
        **{n: x.double() if isinstance(x, Tensor) else x for n, x in named.items()},
    )
    low = None if dense is None else dense.to(q.dtype)
    outs, lses = zip(*several_plains(q, k, v, visible=seen, bias=low, **named), strict=True)
    call = make_call(q, k, v, wants_lse=True, **options)
    assert KERNEL.why_not(call) == []
    out, lse, *_ = KERNEL.run(call)
    assert lse is not None
    assert_close_rule(out, list(outs), right[0], what="out")
    assert_close_rule(lse, [x.float() for x in lses], right[1], what="lse")
    blind = ~seen.expand(*q.shape[:3], k.shape[2]).any(-1)
    assert torch.equal(out[blind], torch.zeros_like(out[blind]))


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [0.1, 1.0, 6.0])
def test_several_tiles_and_blocks(dtype: torch.dtype, size: float) -> None:
    # 580 keys are three tiles and a ragged panel; 300 queries of 2 heads are three blocks
    q, k, v = qkv(T=300, S=580, dtype=dtype, size=size)
    i, j = grid(300, 580)
    assert_right(q, k, v, j <= i, mask=masks.Causal())
    assert_right(
        q,
        k,
        v,
        (j <= i) & ((i - j < 100) | (j < 3)),
        mask=masks.Causal() & (masks.Window(100) | masks.Sinks(3)),
    )


@pytest.mark.parametrize("H, G", [(1, 1), (5, 5), (7, 1), (300, 1)])
def test_groups_larger_and_smaller_than_a_block(H: int, G: int) -> None:
    q, k, v = qkv(H=H, G=G, T=3, S=20, D=4, E=4)
    i, j = grid(3, 20)
    assert_right(q, k, v, j <= i, mask=masks.Causal())


@pytest.mark.parametrize("dtype", DTYPES)
def test_absorbed_latents(dtype: torch.dtype) -> None:
    """One shared key of which the first dims are the value, one query, many heads: no copy of the
    value is needed.
    """
    q, k, _ = qkv(H=20, G=1, T=1, S=300, D=48, dtype=dtype)
    assert_right(q, k, k[..., :32], torch.ones(1, 300, dtype=torch.bool))


@pytest.mark.parametrize("dtype", DTYPES)
def test_strided_and_shared_memory(dtype: torch.dtype) -> None:
    q, k, v = qkv(B=2, T=40, S=70, dtype=dtype)
    seen = torch.ones(40, 70, dtype=torch.bool)
    swapped = q.transpose(1, 2).contiguous().transpose(1, 2)
    assert_right(swapped, k[:1].expand(2, -1, -1, -1), v, seen)
    assert_right(q, k.mT.contiguous().mT, torch.stack([v, v], -1)[..., 0], seen)
    wide = torch.full((2, 2, 200, 16), math.nan, dtype=dtype)
    wide[:, :, 50:120] = k
    assert_right(q, wide[:, :, 50:120], v, seen)


@pytest.mark.parametrize("dtype", DTYPES)
def test_left_padded_rows_and_holes(dtype: torch.dtype) -> None:
    q, k, v = qkv(B=2, T=130, S=130, dtype=dtype)
    positions = torch.stack([torch.arange(130), torch.arange(130) - 90])
    positions[1, :90] = -1
    positions[0, 70] = -1
    i, j = positions[:, None, :, None], positions[:, None, None, :]
    seen = (j <= i) & (j >= 0)
    assert_right(q, k, v, seen, mask=masks.Causal(), q_positions=positions, k_positions=positions)


@pytest.mark.parametrize("symmetric", [False, True])
def test_alibi(symmetric: bool) -> None:
    q, k, v = qkv(T=70, S=90)
    i, j = grid(70, 90)
    slopes = torch.tensor([0.5, 0.25, 0.0, 0.01])
    far = (i - j).abs() if symmetric else i - j
    bias = -slopes.double()[:, None, None] * far
    mask = torch.ones(70, 90, dtype=torch.bool) if symmetric else j <= i
    rule = None if symmetric else masks.Causal()
    assert_right(
        q, k, v, mask, bias, mask=rule, bias=biases.ALiBi(slopes=slopes, symmetric=symmetric)
    )


def test_a_wrong_mask_would_be_found() -> None:
    q, k, v = qkv()
    i, j = grid(70, 70)
    with pytest.raises(AssertionError, match="out error"):
        assert_right(q, k, v, j < i + 2, mask=masks.Causal())
    with pytest.raises(AssertionError, match="out error"):
        assert_right(q, k, v, j <= i, torch.eye(70).double() * 0.01, mask=masks.Causal())


@pytest.mark.parametrize("dtype", DTYPES)
def test_garbage_behind_a_mask_stays_there(dtype: torch.dtype) -> None:
    q, k, v = qkv(T=20, S=100, dtype=dtype)
    at = torch.arange(20)[None]
    options: dict[str, Any] = {"mask": masks.Causal(), "q_positions": at}
    right = KERNEL.run(make_call(q, k, v, **options)).out
    for garbage in (math.nan, math.inf, -math.inf):
        k[:, :, 20:] = garbage
        call = make_call(q, k, v, **options)
        assert KERNEL.why_not(call) == [], "keys behind a mask may be anything"
        assert torch.equal(KERNEL.run(call).out, right)
    v[:, :, 30] = math.nan
    reasons = KERNEL.why_not(make_call(q, k, v, **options))
    assert reasons == ["a NaN or infinity behind a mask would leak through 0 x NaN"]


def test_all_scores_minus_infinity_are_no_visible_keys_either() -> None:
    q, k, v = qkv(T=1, S=5)
    q[:], k[:] = 1, -math.inf
    out, lse, *_ = KERNEL.run(make_call(q, k, v, wants_lse=True))
    assert lse is not None
    assert torch.equal(out, torch.zeros_like(out))
    assert lse.isneginf().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("workers", [2, 3, 7])
def test_threads_share_the_work(
    monkeypatch: pytest.MonkeyPatch, workers: int, dtype: torch.dtype
) -> None:
    q, k, v = qkv(B=2, T=50, S=80, dtype=dtype)
    found = []
    for threads in (1, workers):
        monkeypatch.setattr("regard.ops.cpu.threads.thread_count", lambda n=threads: n)
        found.append(KERNEL.run(make_call(q, k, v, mask=masks.Causal(), wants_lse=True)))
    assert torch.equal(found[0].out, found[1].out), "not even in a rounding"
    assert torch.equal(found[0].lse, found[1].lse)


def one_key_each(q: Tensor, k: Tensor, v: Tensor, scale: float = 1.0, **more: Any) -> PrefillArgs:
    """Arguments in which query t sees key t only."""
    n = q.shape[2]
    at = torch.arange(n)
    options = {"softcap": 0.0, "symmetric": False, "slopes": torch.zeros(0), "out_dtype": q.dtype}
    options |= {"q_positions": at[None], "k_positions": at[None]}
    options |= {"starts": at.view(1, 1, n, 1), "stops": at.view(1, 1, n, 1) + 1}
    return PrefillArgs(q, k, v, scale, **(options | more))


@pytest.mark.parametrize("D, E", [(1, 1), (3, 70), (31, 33), (64, 64), (65, 130)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_products_of_whole_numbers_are_exact(dtype: torch.dtype, D: int, E: int) -> None:
    """Whole numbers and their sums are exact in every form of factors, so that any number of a key
    or a value that is packed in another place is found.
    """
    draw = torch.Generator().manual_seed(0)
    shapes = ((2, 4, 133, D), (2, 2, 133, D), (2, 2, 133, E))
    q, k, v = (torch.randint(-8, 9, x, generator=draw).to(dtype) for x in shapes)
    out, top, total = prefill(one_key_each(q, k, v))
    keys, values = (x.repeat_interleave(2, 1) for x in (k, v))
    assert torch.equal(out, values)
    assert torch.equal(top.double(), (q.double() * keys.double()).sum(-1))
    assert torch.equal(total, torch.ones_like(total))


@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_outside_the_tensors_is_written(dtype: torch.dtype) -> None:
    q, k, v = qkv(T=7, S=7, D=5, E=3, dtype=dtype)
    out = prefill(one_key_each(q, k, v))[0]
    around = torch.full((out.numel() + 128,), 3.0, dtype=dtype)
    inside = around[64:-64].view(out.shape)
    original = torch.empty

    def empty(shape: Any, **options: Any) -> Tensor:
        return inside if tuple(shape) == tuple(out.shape) else original(shape, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "empty", empty)
        prefill(one_key_each(q, k, v))
    assert torch.equal(inside, out)
    assert (around[:64] == 3).all()
    assert (around[-64:] == 3).all()


@pytest.mark.parametrize("x", [0.0, 1e-6, 0.3, 0.6249, 0.6251, 1.7, 9.0, 80.0, math.inf])
def test_tanh(x: float) -> None:
    """The softcap of 1 of a score is its tanh."""
    q = torch.tensor([x, -x]).view(1, 1, 2, 1)
    one = torch.ones_like(q)
    top = prefill(one_key_each(q, one, one, softcap=1.0))[1].flatten().tolist()
    for sign, found in zip((1, -1), top, strict=True):
        exact = math.tanh(float(q[0, 0, 0, 0]) * sign)
        assert abs(found - exact) <= 4 * 2**-24 * abs(exact), "four roundings"
    out = prefill(one_key_each(q * math.nan, one, one, softcap=1.0))[0]
    assert out.isnan().all()


@pytest.mark.parametrize("dtype", HALVES)
def test_results_are_rounded_as_torch_rounds(dtype: torch.dtype) -> None:
    """The mean of two values, each with the weight 1, is rounded once."""
    draw = torch.Generator().manual_seed(0)
    bits = torch.randint(-(2**15), 2**15, (1, 1, 2, 4000), generator=draw, dtype=torch.int16)
    v = bits.view(dtype)
    q = torch.zeros(1, 1, 2, 1, dtype=dtype)
    all_keys = {"starts": torch.zeros(1, 1, 1, 1).long(), "stops": torch.full((1, 1, 1, 1), 2)}
    out = prefill(one_key_each(q, q, v, **all_keys))[0]
    want = ((v[:, :, :1].float() + v[:, :, 1:].float()) * 0.5).to(dtype).expand_as(out)
    assert torch.equal(out.isnan(), want.isnan())
    seen = (want.abs() > 1e-30) & ~want.isnan()  # products of subnormal bf16 numbers are 0
    assert seen.sum() > 2000
    assert torch.equal(out[seen].view(torch.int16), want[seen].view(torch.int16))


def test_refusals(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = qkv()
    assert "gemm (no dropout)" in refusal(q, k, v, dropout=0.1)
    assert "gemm (no float64)" in refusal(q.double(), k.double(), v.double())
    assert "no bias other than ALiBi (" in refusal(q, k, v, bias=torch.zeros(70, 70))
    assert "nothing to compute (B 1, T 70, S 0, E 16)" in refusal(q, k[:, :, :0], v[:, :, :0])
    fifth = masks.Fn(lambda q, k: (q + k) % 5 != 0, "fifth")
    assert "the mask has no ranges of positions (fifth)" in refusal(q, k, v, mask=fifth)
    with regard.Trace("pattern", missing="ignore"):
        assert "does not expose ['pattern']" in refusal(q, k, v)
    meta = make_call(*(x.to("meta") for x in (q, k, v)))
    assert KERNEL.why_not(meta) == ["runs on a CPU only"]
    monkeypatch.setattr(gemm, "why_none", lambda: "no compiled kernels: no compiler")
    assert "no compiled kernels: no compiler" in refusal(q, k, v)


def test_a_compiled_graph_is_refused() -> None:
    assert reasons_in_a_graph(KERNEL) == [UNREADABLE]


def test_work_is_what_the_mask_leaves() -> None:
    x = torch.empty(1, 1, 4096, 64, device="meta")

    def pairs(mask: masks.Mask) -> int:
        span = Span(0, 4096)
        return KERNEL.work(make_call(x, x, x, mask=mask, q_positions=span, k_positions=span)).pairs

    assert pairs(masks.Full()) == 4096**2
    assert 4096**2 / 2 < pairs(masks.Causal()) < 4096**2 * 0.55
    assert pairs(masks.Causal() & masks.Window(256)) < 4096 * 600


def test_it_is_the_first_choice_where_it_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    def first(*shape: int, **options: Any) -> str:
        x = torch.zeros(1, 1, 1, 1).expand(*shape).to(options.pop("dtype", torch.bfloat16))
        return regard.plan(x, x, x, **options).kernel

    monkeypatch.setattr(gemm, "_measured_sizes", lambda: gemm.MEASURED["AVX512"])
    monkeypatch.setattr(gemm, "_processor_has_amx", lambda: False)
    assert first(1, 8, 512, 64) == "gemm"
    assert first(1, 8, 256, 64) == "sdpa"
    assert first(1, 8, 512, 64, dtype=torch.float32) == "sdpa"
    assert first(1, 16, 1024, 64, dtype=torch.float32) == "gemm"
    assert first(4, 8, 1024, 32, dtype=torch.float32) == "sdpa", "heads too narrow"
    assert first(4, 8, 1024, 80, dtype=torch.float32) == "sdpa", "half of a panel is empty"
    assert (
        first(4, 8, 1024, 32, dtype=torch.float32, mask=masks.Causal() & masks.Window(64)) == "gemm"
    )
    assert first(4, 8, 1024, 32) == "sdpa", "heads too narrow in bf16 too"
    assert first(4, 8, 196, 128) == "sdpa", "too few keys for packing them"
    keep = torch.ones(4, 1024, dtype=torch.bool)
    keep[1:, 700:] = False
    padding = masks.Padding.from_keep(keep)
    assert first(4, 8, 1024, 64, dtype=torch.float32, mask=padding) == "gemm"
    padding = masks.Padding.from_keep(keep[:, :512])
    assert first(4, 8, 512, 64, dtype=torch.float32, mask=padding) == "sdpa"
    assert first(4, 8, 512, 64, dtype=torch.float32, mask=masks.Causal() & padding) == "gemm", (
        "torch's flag is_causal does not express padding"
    )
    monkeypatch.setattr(gemm, "_measured_sizes", lambda: None)
    assert first(1, 8, 512, 64) == "sdpa"


@pytest.mark.parametrize("trained", [False, True])
def test_with_avx2_alone_torch_is_first_only_without_a_mask(
    trained: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def first(*shape: int, dtype: torch.dtype, **options: Any) -> str:
        x = torch.zeros(1, 1, 1, 1, dtype=dtype).expand(*shape).requires_grad_(trained)
        return regard.plan(x, x, x, **options).kernel

    monkeypatch.setattr(gemm, "_measured_sizes", lambda: gemm.MEASURED["AVX2"])
    monkeypatch.setattr(gemm, "_processor_has_amx", lambda: False)
    window = masks.Causal() & masks.Window(64)
    for dtype in DTYPES:
        assert first(1, 4, 256, 64, dtype=dtype, mask=masks.Causal()) == "gemm"
        assert first(1, 8, 256, 64, dtype=dtype, mask=window) == "gemm"
        assert first(1, 4, 128, 64, dtype=dtype, mask=masks.Causal()) == "sdpa", "too little"
    of_all_keys = {dtype: first(1, 8, 1024, 64, dtype=dtype) for dtype in DTYPES}
    only = {torch.float16} | ({torch.bfloat16} if trained else set())
    assert {dtype for dtype, kernel in of_all_keys.items() if kernel == "gemm"} == only
    padding = masks.Padding.right([1024, 700])
    assert first(2, 8, 1024, 64, dtype=torch.float32, mask=padding) == (
        "sdpa" if trained else "gemm"
    )
    narrow = first(1, 8, 1024, 32, dtype=torch.float32, mask=masks.Causal())
    assert narrow == ("gemm" if trained else "sdpa")


def test_beside_amx_it_is_the_first_choice_where_torch_computes_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> str:
        x = torch.zeros(1, 1, 1, 1).expand(*shape).to(dtype)
        return regard.plan(x.requires_grad_(options.pop("trained", False)), x, x, **options).kernel

    monkeypatch.setattr(gemm, "_measured_sizes", lambda: gemm.MEASURED["AVX512"])
    monkeypatch.setattr(gemm, "_processor_has_amx", lambda: True)
    window = masks.Causal() & masks.Window(64)
    for dtype in (torch.bfloat16, torch.float32):
        assert first(1, 8, 1024, 64, dtype=dtype) == "sdpa"
        assert first(1, 16, 1024, 64, dtype=dtype, mask=masks.Causal()) == "sdpa"
        assert first(1, 8, 1024, 64, dtype=dtype, mask=window) == "gemm"
        assert first(8, 8, 256, 64, dtype=dtype, mask=window) == "sdpa", "too few keys"
        assert first(1, 16, 1024, 64, dtype=dtype, softcap=30.0) == "gemm", "sdpa refuses it"
    assert first(1, 8, 1024, 64, mask=masks.Causal(), bias=biases.ALiBi(8)) == "gemm"
    assert first(1, 8, 1024, 64, mask=window, trained=True) == "gemm"
    for dtype in DTYPES:
        assert first(1, 8, 1024, 64, dtype=dtype, mask=masks.Causal(), trained=True) == "sdpa"
    assert first(1, 16, 1024, 64, dtype=torch.float16) == "sdpa"
    assert first(1, 16, 1024, 64, dtype=torch.float16, mask=window) == "gemm"
