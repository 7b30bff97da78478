"""The prefill kernel alone: its small products, its packing, its refusals, and what it skips."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.errors import KernelRefusal
from regard.ops.jit import matmul
from regard.ops.jit.amx import CONFIGURATION_BYTES, configure_tiles, restore_tiles
from regard.ops.jit.compile import njit_fastmath
from regard.ops.jit.exp_tanh import tanh
from regard.ops.jit.half_precision import from_float32
from regard.ops.jit.prefill import prefill
from regard.ops.jit.softmax_rows import weigh_scores
from regard.ops.softmax import gemm
from regard.ops.softmax.call import make_call
from regard.ops.softmax.gemm import GemmKernel
from regard.ops.softmax.kernel import UNREADABLE
from regard.span import Span
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import assert_close_rule

KERNEL = GemmKernel()
HALVES = (torch.bfloat16, torch.float16)
DTYPES = (torch.float32, *HALVES)
"""Three compilations: each dtype is another kernel."""


def qkv(
    B: int = 1,
    H: int = 4,
    G: int = 2,
    T: int = 70,
    S: int = 70,
    D: int = 16,
    E: int = 16,
    *,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    size: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    draw = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, E))
    q, k, v = (torch.randn(shape, generator=draw) for shape in shapes)
    return (q * size).to(dtype), (k * size).to(dtype), v.to(dtype)


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


def grid(T: int, S: int) -> tuple[Tensor, Tensor]:
    """Positions of queries, bottom right, and of keys."""
    return torch.arange(S - T, S)[:, None], torch.arange(S)[None]


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


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("D, E", [(1, 1), (3, 70), (65, 64), (33, 130)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_dims_that_divide_nothing(D: int, E: int, dtype: torch.dtype) -> None:
    q, k, v = qkv(H=6, G=2, T=9, S=67, D=D, E=E, dtype=dtype)
    assert_right(q, k, v, torch.ones(9, 67, dtype=torch.bool))


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


@pytest.mark.parametrize("softcap", [0.3, 4.0, 50.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_softcap(dtype: torch.dtype, softcap: float) -> None:
    q, k, v = qkv(dtype=dtype, size=2.0)
    i, j = grid(70, 70)
    assert_right(
        q, k, v, j <= i, mask=masks.Causal(), softcap=softcap, sink=torch.randn(4).to(dtype)
    )


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


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_visible_and_not_finite_shows(dtype: torch.dtype, value: float) -> None:
    for where in range(3):
        tensors = qkv(T=20, S=20, dtype=dtype)
        tensors[where][0, 0, 3, 1] = value
        out = KERNEL.run(make_call(*tensors)).out
        assert not out[0, 0].isfinite().all()
        assert out[0, 2:].isfinite().all(), "other heads have nothing to do with it"


def test_all_scores_minus_infinity_are_no_visible_keys_either() -> None:
    q, k, v = qkv(T=1, S=5)
    q[:], k[:] = 1, -math.inf
    out, lse, *_ = KERNEL.run(make_call(q, k, v, wants_lse=True))
    assert lse is not None
    assert torch.equal(out, torch.zeros_like(out))
    assert lse.isneginf().all()


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_threads_share_the_work(monkeypatch: pytest.MonkeyPatch, workers: int) -> None:
    q, k, v = qkv(B=2, T=50, S=80)
    right = KERNEL.run(make_call(q, k, v, mask=masks.Causal())).out
    monkeypatch.setattr("regard.ops.jit.openmp.thread_count", lambda: workers)
    found = KERNEL.run(make_call(q, k, v, mask=masks.Causal())).out
    torch.testing.assert_close(found, right, rtol=1e-6, atol=1e-6)


def packed(x: Tensor, each: int, *, values: bool = False) -> Tensor:
    """Panels of keys [panels,D,PANEL], or of values [panels,S,PANEL], from plain loops; S and D are
    not padded up.
    """
    S, D = x.shape
    inner, across = (S, D) if values else (D, S)
    out = torch.zeros(
        -(-across // matmul.PANEL_COLUMNS),
        -(-inner // each),
        matmul.PANEL_COLUMNS,
        each,
        dtype=x.dtype,
    )
    for s in range(S):
        for d in range(D):
            i, j = (s, d) if values else (d, s)
            out[j // matmul.PANEL_COLUMNS, i // each, j % matmul.PANEL_COLUMNS, i % each] = x[s, d]
    return out.flatten()


@pytest.mark.parametrize("each", [1, 2])
def test_packing(each: int) -> None:
    x = torch.randn(matmul.PANEL_COLUMNS, matmul.PANEL_COLUMNS + 3)
    D = x.shape[1] + x.shape[1] % each
    keys = torch.zeros(matmul.PANEL_COLUMNS * D)
    matmul.pack_keys(
        (x.flatten().numpy(), 0, x.shape[1], np.int8(0)),
        (0, len(x)),
        x.shape[1],
        each,
        keys.numpy(),
        0,
    )
    assert torch.equal(keys, packed(x, each))
    values = torch.zeros(2 * len(x) * matmul.PANEL_COLUMNS)
    matmul.pack_values(
        (x.flatten().numpy(), 0, x.shape[1], np.int8(0)),
        (0, len(x)),
        x.shape[1],
        each,
        values.numpy(),
        0,
        len(x) * matmul.PANEL_COLUMNS,
    )
    assert torch.equal(values, packed(x, each, values=True))


@pytest.mark.parametrize("x", [0.0, 1e-6, 0.3, 0.6249, 0.6251, 1.7, 9.0, 80.0, math.inf])
def test_tanh(x: float) -> None:
    for sign in (1, -1):
        found = tanh(np.float32(sign * x))
        exact = math.tanh(float(np.float32(sign * x)))
        assert abs(found - exact) <= 4 * 2**-24 * abs(exact), "four roundings"
    assert math.isnan(tanh(np.float32(math.nan)))


def test_bits_of_halves_are_rounded_as_torch_rounds() -> None:
    draw = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31 - 1, (4000,), generator=draw, dtype=torch.int32)
    x = torch.cat([x.view(torch.float32), torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan])])
    for dtype, tag in ((torch.bfloat16, np.int8(0)), (torch.float16, np.int16(0))):
        like = torch.zeros(1, dtype=torch.int16).view(torch.uint16).numpy()
        found = [int(_narrow(value, tag, like)) for value in x.numpy()]
        again = torch.tensor(found, dtype=torch.int32).to(torch.int16).view(dtype)
        want = x.to(dtype)
        assert torch.equal(again.isnan(), want.isnan())
        seen = ~want.isnan()
        assert torch.equal(again[seen].view(torch.int16), want[seen].view(torch.int16))


@njit_fastmath
def _narrow(x: Any, tag: Any, like: Any) -> Any:
    return from_float32(x, tag, like)


def refusal(*tensors: Tensor, **options: Any) -> str:
    with pytest.raises(KernelRefusal) as caught:
        regard.attend(*tensors, backend="gemm", **options)
    return str(caught.value)


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
    monkeypatch.setattr(gemm, "has_numba", lambda: False)
    assert "Numba is not installed: pip install numba" in refusal(q, k, v)


def test_a_compiled_graph_is_refused() -> None:
    reasons: list[str] = []

    @torch.compile(backend="eager", fullgraph=True)
    def ask(q: Tensor) -> Tensor:
        reasons.extend(KERNEL.why_not(make_call(q, q, q)))
        return q + 1

    ask(torch.randn(1, 1, 20, 4))
    assert reasons == [UNREADABLE]


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

    monkeypatch.setattr(gemm, "_processor_suits", lambda: True)
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
    monkeypatch.setattr(gemm, "_processor_suits", lambda: False)
    assert first(1, 8, 512, 64) == "sdpa"


def test_beside_amx_it_is_the_first_choice_where_torch_computes_more(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def first(*shape: int, dtype: torch.dtype = torch.bfloat16, **options: Any) -> str:
        x = torch.zeros(1, 1, 1, 1).expand(*shape).to(dtype)
        return regard.plan(x.requires_grad_(options.pop("trained", False)), x, x, **options).kernel

    monkeypatch.setattr(gemm, "_processor_suits", lambda: True)
    monkeypatch.setattr(gemm, "_processor_has_amx", lambda: True)
    monkeypatch.setattr(gemm, "_processor_has_float16_amx", lambda: False)
    window = masks.Causal() & masks.Window(64)
    for dtype in (torch.bfloat16, torch.float32):
        assert first(1, 8, 1024, 64, dtype=dtype) == "sdpa"
        assert first(1, 16, 1024, 64, dtype=dtype, mask=masks.Causal()) == "sdpa"
        assert first(1, 8, 1024, 64, dtype=dtype, mask=window) == "gemm"
        assert first(8, 8, 256, 64, dtype=dtype, mask=window) == "sdpa", "too few keys"
        assert first(1, 16, 1024, 64, dtype=dtype, softcap=30.0) == "gemm", "sdpa refuses it"
    assert first(1, 8, 1024, 64, mask=masks.Causal(), bias=biases.ALiBi(8)) == "gemm"
    assert first(1, 8, 1024, 64, mask=masks.Causal(), trained=True) == "gemm"
    assert first(8, 8, 256, 64, mask=masks.Causal(), trained=True) == "sdpa", "too few rows"
    assert first(1, 8, 1024, 64, dtype=torch.float32, trained=True) == "sdpa"
    assert first(1, 16, 1024, 64, dtype=torch.float16) == "gemm", "torch has no AMX for it"
    assert first(8, 8, 256, 64, dtype=torch.float16) == "sdpa", "too few keys"
    monkeypatch.setattr(gemm, "_processor_has_float16_amx", lambda: True)
    assert first(1, 16, 1024, 64, dtype=torch.float16) == "sdpa"


FORMS = {"tiles": matmul.BF16_TILES, "pairs": matmul.BF16_PAIRS, "float32": matmul.FP32_FACTORS}
"""The forms in which bfloat16 numbers are multiplied; a process has some of them."""


def form_or_skip(form: str) -> matmul.Factors:
    """Return a form of factors, and skip the test where this process cannot multiply it."""
    if FORMS[form] not in matmul.bfloat16_factors():
        pytest.skip(f"this process cannot multiply bfloat16 numbers as {form}")
    return FORMS[form]


@pytest.mark.full(keep=["tiles"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_of_factors_is_right(form: str) -> None:
    """The same call with each form that this processor has: with AMX all three run."""
    factors = form_or_skip(form)
    # 3 heads of 85 queries are 255 rows, which fill no tile, and 150 keys end within a panel
    for D, E in ((33, 70), (64, 32)):
        q, k, v = qkv(H=3, G=1, T=85, S=150, D=D, E=E, dtype=torch.bfloat16)
        i, j = grid(85, 150)
        seen = (j <= i) & (i - j < 40)
        right, right_lse = plain_attention(q.double(), k.double(), v.double(), visible=seen)[:2]
        outs, lses = zip(*several_plains(q, k, v, visible=seen), strict=True)
        args = gemm.prefill_args(make_call(q, k, v, mask=masks.Causal() & masks.Window(40)))
        out, top, total = prefill(replace(args, factors=factors))
        assert_close_rule(out, list(outs), right, what="out")
        assert_close_rule(top + total.log(), [x.float() for x in lses], right_lse, what="lse")
        wrong = prefill(replace(args, factors=factors, k=k.roll(1, 2)))[0]
        with pytest.raises(AssertionError, match="out error"):
            assert_close_rule(wrong, list(outs), right, what="out")


@pytest.mark.parametrize("form", FORMS)
def test_a_product_of_whole_numbers_is_exact(form: str) -> None:
    """Whole numbers up to 8 and their sums are exact in every form, and rows of c that do not
    belong to the product keep what they held.
    """
    factors = form_or_skip(form)
    depth, columns, draw = 2 * factors.depth, matmul.PANEL_COLUMNS, torch.Generator().manual_seed(0)
    a = torch.randint(-8, 9, (factors.rows, depth), generator=draw)
    b = torch.randint(-8, 9, (depth, columns), generator=draw)
    c = torch.randint(-8, 9, (factors.rows + 1, columns), generator=draw).float()

    def stored(x: Tensor) -> Any:
        half = factors.each == 2
        flat = (x.bfloat16() if half else x.float()).contiguous().flatten()
        return (flat.view(torch.int16) if half else flat).numpy().view(factors.dtype)

    pairs = b.view(-1, factors.each, columns).mT
    found = c.clone().flatten().numpy()
    memory = np.zeros(2 * CONFIGURATION_BYTES, np.uint8)
    multiply_once(stored(a), stored(pairs), depth, found, columns, memory)
    right = c.double()
    right[:-1] = 2 * (a.double() @ b.double())
    assert torch.equal(torch.from_numpy(found).view_as(c).double(), right)
    assert not memory[:CONFIGURATION_BYTES].any(), "before, the thread had configured no tiles"


@njit_fastmath
def multiply_once(a, b, depth, c, columns, memory):  # type: ignore[no-untyped-def]
    """Compute c = a b and then c += a b, and leave the tiles as they were."""
    configure_tiles(a, memory)
    matmul.matmul(a, 0, depth, b, 0, depth, c, 0, columns)
    matmul.matmul_add(a, 0, depth, b, 0, depth, c, 0, columns)
    restore_tiles(a, memory)


@njit_fastmath
def configure_twice(a, outer, inner):  # type: ignore[no-untyped-def]
    """Configure tiles within a part that has configured them already."""
    configure_tiles(a, outer)
    configure_tiles(a, inner)
    restore_tiles(a, inner)
    restore_tiles(a, outer)


def test_tiles_are_given_back_as_they_were() -> None:
    form_or_skip("tiles")
    outer, inner, after = (np.zeros(2 * CONFIGURATION_BYTES, np.uint8) for _ in range(3))
    a = np.zeros(1, np.int16)
    configure_twice(a, outer, inner)
    configure_twice(a, after, after.copy())
    own = slice(CONFIGURATION_BYTES, None)
    assert not outer[:CONFIGURATION_BYTES].any()
    assert np.array_equal(inner[:CONFIGURATION_BYTES], outer[own]), "what the outer part had loaded"
    assert not after[:CONFIGURATION_BYTES].any(), "nothing is left of the first time"


def test_the_exponentials_of_a_row() -> None:
    draw = np.random.default_rng(0)
    edges = [0, -86.99, -87.01, -88, -1e30, -math.inf]
    x = np.concatenate([-draw.exponential(10, 1018), edges]).astype(np.float32)
    out = np.empty_like(x)
    total = weights_of(x.copy(), np.float32(0), out)
    right = np.where(x >= -87, np.exp(x.astype(np.float64)), 0)
    assert (np.abs(out - right) <= 2 * 2.0**-24 * right).all(), "two roundings"
    assert abs(total - right.sum()) <= 64 * 2.0**-24 * right.sum()
    x[5] = math.nan
    assert math.isnan(weights_of(x.copy(), np.float32(0), out))
    assert np.isnan(out).tolist() == np.isnan(x).tolist()
    if matmul.HAS_BF16_DOT:
        weights_of(x.copy(), np.float32(0), halves := np.empty(1024, np.uint16))
        rounded = torch.from_numpy(out).bfloat16()
        found = torch.from_numpy(halves.view(np.int16)).view(torch.bfloat16)
        torch.testing.assert_close(found, rounded, rtol=0, atol=0, equal_nan=True)


@njit_fastmath
def weights_of(x, base, out):  # type: ignore[no-untyped-def]
    return weigh_scores(x, out, x.shape[0], np.float32(1), base)
