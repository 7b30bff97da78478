"""The compiled decode kernel over codes: against numbers made from them by loops, and without a
copy of them on the way.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import biases, masks
from regard.caches import Growing, Quantized, quantization
from regard.nn import Attention, HeadProjection, SeparateQKV
from regard.ops.cpu import arguments, attention, threads
from regard.ops.softmax import cpu
from regard.ops.softmax.call import Call, make_call
from regard.span import Positions, Span
from tests.kernels import require_kernels
from tests.ops.softmax.plain import meaning
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import assert_close_rule

require_kernels()

KERNEL = cpu.CpuKernel()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


@pytest.fixture
def opened(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The axes of all parts that are widened while the test runs."""
    axes: list[str] = []
    right = quantization.dequantize

    def count(made: Any, axis: Any, shape: Any, *, bits: int) -> Tensor:
        axes.append(axis)
        return right(made, axis, shape, bits=bits)

    monkeypatch.setattr(quantization, "dequantize", count)
    return axes


def tokens(
    S: int,
    *,
    B: int = 2,
    G: int = 2,
    D: int = 40,
    E: int = 24,
    dtype: torch.dtype = torch.float32,
    scale: float = 1.0,
) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(S)
    return tuple((scale * torch.randn(B, G, S, d, generator=make)).to(dtype) for d in (D, E))  # type: ignore[return-value]


def query(
    T: int, H: int = 6, B: int = 2, D: int = 40, dtype: torch.dtype = torch.float32
) -> Tensor:
    return torch.randn(B, H, T, D, generator=torch.Generator().manual_seed(1)).to(dtype)


def filled(cache: Quantized, k: Tensor, v: Tensor, positions: Positions | None = None) -> list[Any]:
    """All but the last token at once, then that one; keys, values and positions as the cache
    answers them.
    """
    S = k.shape[2]
    for at in (slice(0, S - 1), slice(S - 1, S)):
        where = Span(at.start, at.stop - at.start) if positions is None else positions[:, at]  # type: ignore[index]
        (keys, values), seen = cache.update((k[:, :, at], v[:, :, at]), where)
    return [keys, values, seen]


def numbers(cache: Quantized, part: int, axis: str) -> Tensor:
    """The memory that codes stand for, in fp64, number by number."""
    held = cache.contents()
    codes, scale, zero, recent = (
        held[f"{name}.{part}"] for name in ("codes", "scale", "zero", "recent")
    )
    assert isinstance(codes, Tensor)
    assert isinstance(recent, Tensor)
    bits, per = cache.bits, 8 // cache.bits
    group = codes.shape[-1] * per
    old = codes.shape[2] * (group if axis == "channel" else 1)
    B, n, _, d = recent.shape
    listed, scales, zeros = codes.tolist(), scale.tolist(), zero.tolist()  # type: ignore[union-attr]
    found = torch.empty(B, n, old + recent.shape[2], d, dtype=torch.float64)
    found[:, :, old:] = recent
    for b in range(B):
        for h in range(n):
            for s in range(old):
                for c in range(d):
                    slot, row, line = (
                        (s % group, s // group, c)
                        if axis == "channel"
                        else (c % group, s, c // group)
                    )
                    byte = listed[b][h][row][line][slot // per]
                    code = byte // 2 ** (bits * (slot % per)) % 2**bits
                    found[b, h, s, c] = (
                        zeros[b][h][row][line][0] + code * scales[b][h][row][line][0]
                    )
    return found


def meant(cache: Quantized) -> list[Tensor]:
    """Keys and values that codes stand for."""
    return [numbers(cache, i, axis) for i, axis in enumerate(("channel", "token"))]


def assert_right(wide: list[Tensor], calls: Call | list[Call], what: str) -> None:
    """out and lse of codes against fp64 math over the numbers they stand for; plain math has them
    rounded to the dtype.

    Several calls are held to the rule together: of few numbers, plain math may be right by luck.
    """
    found, exact, plains = [], [], []
    for call in calls if isinstance(calls, list) else [calls]:
        assert attention.quantized_segment(call.k, call.v) is not None
        found.append(KERNEL.run(call))
        exact.append(plain_attention(call.q.double(), *wide, **meaning(call)))
        rounded = (x.to(call.q.dtype) for x in wide)
        plains.append(several_plains(call.q, *rounded, **meaning(call)))
    for i, name in enumerate(("out", "lse")):
        got = torch.cat([x[i] for x in found if x[i] is not None], 1)
        others = [
            torch.cat([x[i] for x in same], 1).to(got.dtype) for same in zip(*plains, strict=True)
        ]
        assert_close_rule(got, others, torch.cat([x[i] for x in exact], 1), what=f"{name}, {what}")


NUMBERS = torch.Generator().manual_seed(0)
RECIPES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": masks.Causal()},
    "window and sinks": {"mask": masks.Causal() & (masks.Window(150) | masks.Sinks(3))},
    "heads": {"mask": masks.Heads([masks.Causal() & masks.Window(5 + 60 * h) for h in range(6)])},
    "no structure": {"mask": masks.Causal() & masks.Fn(lambda q, k: (q - k) % 3 != 1)},
    "alibi": {"mask": masks.Causal(), "bias": biases.ALiBi(6)},
    "learned bias": {"bias": biases.T5Relative(torch.randn(32, 6, generator=NUMBERS))},
    "softcap, sink, scale": {
        "softcap": 3.0,
        "sink": torch.randn(6, generator=NUMBERS),
        "scale": -0.3,
    },
}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
def test_recipes(recipe: str, dtype: torch.dtype, opened: list[str]) -> None:
    for bits, T, residual in ((8, 1, 10), (4, 3, 70), (2, 16, 0)):
        cache = Quantized(bits, residual=residual)
        keys, values, seen = filled(cache, *tokens(203, dtype=dtype))
        given = make_call(
            query(T, dtype=dtype), keys, values, k_positions=seen, wants_lse=True, **RECIPES[recipe]
        )
        assert_right(meant(cache), given, f"{recipe}, {bits} bits")
    assert opened == []


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("group, D, E", [(4, 8, 8), (16, 24, 16), (64, 20, 64), (96, 9, 96)])
def test_groups(bits: int, group: int, D: int, E: int) -> None:
    """Groups that fill the registers of a loop, that do not, and that leave something over."""
    cache = Quantized(bits, group=group, residual=5)
    keys, values, _ = filled(cache, *tokens(200, B=1, D=D, E=E))
    wide = meant(cache)
    rows = (2, 4, 6, 10, 14)  # heads of 2 groups: 1 to 7 rows
    calls = [make_call(query(1, H, B=1, D=D), keys, values, wants_lse=True) for H in rows]
    assert_right(wide, calls, f"{bits} bits, groups of {group}")


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("scale", [1e-3, 30.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_scales(dtype: torch.dtype, scale: float) -> None:
    cache = Quantized(8, residual=10)
    k, v = tokens(203, dtype=dtype, scale=scale)
    k[..., 3] += 100  # an outlier channel
    keys, values, _ = filled(cache, k, v)
    assert_right(
        meant(cache),
        make_call(query(8, dtype=dtype), keys, values, wants_lse=True),
        f"scale {scale}",
    )


@pytest.mark.full
def test_another_number_is_noticed() -> None:
    """Negative control: codes of one channel that mean a step more, or a zero that is left out."""
    for name in ("zero.0", "zero.1", "scale.0", "scale.1"):
        cache = Quantized(4, residual=10)
        filled(cache, *tokens(203))
        held = dict(cache.contents())
        wrong = Quantized(4, residual=10)
        wrong.fill({**held, name: 1.01 * held[name]})  # type: ignore[dict-item]
        (keys, values), _ = wrong.update(tuple(x[:, :, :0] for x in tokens(203)), Span(203, 0))
        with pytest.raises(AssertionError, match="above"):
            assert_right(meant(cache), make_call(query(1), keys, values, wants_lse=True), name)


def test_slots_that_hold_nothing(opened: list[str]) -> None:
    """Left padding of another length in each row, holes, and a row that sees nothing; NaN and
    garbage there.
    """
    for garbage in (float("nan"), 1e30):
        k, v = tokens(203)
        positions = torch.arange(203).expand(2, -1) - torch.tensor([[0], [70]])
        positions = positions.where((positions >= 0) & (torch.arange(203) % 7 != 3), -1)
        empty = (positions < 0)[:, None, :, None]
        cache = Quantized(8, residual=10)
        keys, values, seen = filled(
            cache, *(x.masked_fill(empty, garbage) for x in (k, v)), positions
        )  # type: ignore[arg-type]
        clean = [x.masked_fill(empty, 0.0) for x in (k, v)]
        right = Quantized(8, residual=10)
        filled(right, *clean, positions)  # type: ignore[arg-type]
        at = torch.tensor([[202, -1], [132, 133]])
        given = make_call(
            query(2),
            keys,
            values,
            mask=masks.Causal(),
            q_positions=at,
            k_positions=seen,
            wants_lse=True,
        )
        assert_right(meant(right), given, "padded")
        assert not KERNEL.run(given).out[0, :, 1].any()
    assert opened == []


@pytest.mark.full
def test_threads_and_memory_in_any_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts for several threads, rows that were chosen, a fork, and codes that lie otherwise."""
    S = 1600
    assert 2 * S * (64 + 64) >= 3 * attention.ELEMENTS_PER_THREAD, "work for 3 threads"
    k, v = tokens(S, B=1, D=64, E=64)
    cache = Quantized(4, residual=20)
    filled(cache, k, v)
    none = tuple(x[:, :, :0] for x in (k, v))
    (keys, values), _ = cache.update(none, Span(S, 0))
    given = make_call(query(1, B=1, D=64), keys, values, wants_lse=True)
    wide, out = meant(cache), []
    for workers in (3, 1):
        monkeypatch.setattr(threads, "thread_count", lambda n=workers: n)
        assert_right(wide, given, f"{workers} threads")
        out.append(KERNEL.run(given).out)
    held = dict(cache.contents())
    for name, x in held.items():
        if isinstance(x, Tensor) and x.ndim == 5:
            held[name] = x.transpose(1, 4).contiguous().transpose(1, 4)
    other = Quantized(4, residual=20)
    other.fill(held)
    forked = cache.fork()
    cache.select(torch.tensor([0, 0]))
    for c in (other, forked, cache):
        B = c.batch
        assert B is not None
        (a, b), _ = c.update(tuple(x.expand(B, -1, -1, -1) for x in none), Span(S, 0))
        found = KERNEL.run(make_call(given.q.expand(B, -1, -1, -1), a, b)).out
        assert torch.equal(found, out[1].expand(B, -1, -1, -1))


def test_a_decode_step_widens_nothing(opened: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Through a module: codes are read as codes, by every step, and what comes out is what the
    numbers give.
    """
    monkeypatch.setattr(cpu, "MIN_ELEMENTS", 0)
    torch.manual_seed(0)
    project = SeparateQKV(
        HeadProjection(32, 4, 16), HeadProjection(32, 2, 16), HeadProjection(32, 2, 16)
    )
    module, x = Attention(project, nn.Linear(64, 32), mask=masks.Causal()), torch.randn(2, 90, 32)
    with torch.no_grad():
        module.eval()
        cache, plain = Quantized(8, group=16, residual=8), Growing()
        module(x[:, :60], cache=cache)
        module(x[:, :60], cache=plain)
        opened.clear()
        far = 0.0
        for t in range(60, 90):
            near = module(x[:, t : t + 1], cache=cache, backend="auto" if t % 2 else "cpu")
            far = max(far, float((near - module(x[:, t : t + 1], cache=plain)).abs().max()))
        assert opened == []
        assert cache.quantized == 80
        assert 0 < far < 0.01
        copied = cache.fork()
        last = module(x[:, :1], cache=cache)
        same = module(x[:, :1], cache=copied, backend="reference")
        assert sorted(opened) == ["channel", "token"]
        assert float((last - same).abs().max()) < 1e-6


def unusual() -> dict[str, Callable[[], tuple[Quantized, Tensor, Tensor]]]:
    k, v = tokens(100)
    odd = k.clone()
    odd[0, 1, 3, 5] = float("inf")
    return {
        "an infinity": lambda: (Quantized(8, residual=10), odd, v),
        "keys per token": lambda: (
            Quantized(8, group=8, residual=10, axes=("token", "token")),
            k,
            v,
        ),
        "values per channel": lambda: (
            Quantized(8, residual=10, axes=("channel", "channel")),
            k,
            v,
        ),
        "exact values": lambda: (Quantized(8, residual=10, axes=("channel", "exact")), k, v),
    }


@pytest.mark.parametrize("name", unusual())
def test_what_is_not_read_as_codes_is_widened(name: str, opened: list[str]) -> None:
    cache, k, v = unusual()[name]()
    keys, values, _ = filled(cache, k, v)
    q = query(1)
    found = regard.attend(q, keys, values, mask=masks.Causal() & masks.Window(90), backend="cpu")
    assert opened
    right = regard.attend(
        q, keys.clone(), values.clone(), mask=masks.Causal() & masks.Window(90), backend="cpu"
    )
    assert torch.equal(found, right)


def random_codes(bits: int, *shape: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Codes of lines [..., group], packed into bytes, with scales and zeros; numbers of about 1."""
    packed = torch.randint(0, 256, (*shape[:-1], shape[-1] * bits // 8), dtype=torch.uint8)
    scale = (torch.rand(*shape[:-1], 1) + 0.5) / 2 ** (bits - 1)
    zero = torch.randn(*shape[:-1], 1) - 1
    return packed, scale.to(dtype), zero.to(dtype)


def numbers_of(codes: tuple[Tensor, Tensor, Tensor], bits: int) -> Tensor:
    """The numbers of codes in fp64, with the lines as their last dimension."""
    packed, scale, zero = codes
    shifts = torch.arange(0, 8, bits)
    code = (packed[..., None].long() >> shifts & 2**bits - 1).flatten(-2)
    return zero.double() + code * scale.double()


@pytest.mark.full(keep=8)
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("rows", [1, 4, 5, 7])
@pytest.mark.parametrize("group, D", [(4, 8), (32, 64), (64, 510), (96, 576)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_codes_of_every_form(bits: int, rows: int, group: int, D: int, dtype: torch.dtype) -> None:
    """Random codes through the kernel by itself, against fp64. Scales of 16 bits let it round the
    weights of 8-bit codes to 16 bits, too.
    """
    S, E = 4 * group, 2 * group
    k = random_codes(bits, 1, 1, S // group, D, group, dtype=dtype)
    v = random_codes(bits, 1, 1, S, E // group, group, dtype=dtype)
    q = torch.randn(1, 1, rows, D) / D**0.5
    nothing = arguments.NO_POSITIONS, 0
    args = attention.DecodeArgs(
        q,
        1.0,
        rows,
        *nothing,
        torch.zeros(1, 1, 1, 1, dtype=torch.int64),
        torch.full((1, 1, 1, 1), S, dtype=torch.int64),
        arguments.NO_VISIBLE,
        0.0,
        symmetric=False,
        slopes=arguments.NO_SLOPES,
        bias=arguments.NO_BIAS,
        q_positions=torch.full((1, rows), S),
    )
    numbers = [attention.quantized_numbers(*x, bits) for x in (k, v)]
    segment = attention.QuantizedSegment(*numbers, dtype, S, (q, q), (*k, *v))
    out, lse = attention.decode_quantized(args, segment, E)
    keys = numbers_of(k, bits).transpose(-1, -2).reshape(S, D)
    values = numbers_of(v, bits).reshape(S, E)
    scores = q[0, 0].double() @ keys.T
    bound = 1e-5 if dtype == torch.float32 or bits < 8 else 3e-4
    assert (lse[0, 0] - scores.logsumexp(-1)).abs().max() < bound * (1 + scores.abs().max())
    exact = scores.softmax(-1) @ values
    assert (out[0, 0] - exact).abs().max() < bound * (1 + scores.abs().max())


def scores_of(q: Tensor, codes: Tensor, scale: Tensor, zero: Tensor, bits: int) -> Tensor:
    """The scores `[R, n]` of rows of q `[R, D]` with a group of n keys: codes `[D, n bits / 8]`,
    scales and zeros `[D]`. The lse of a row that sees a single key is its score.
    """
    R, n = len(q), codes.shape[1] * 8 // bits
    values = torch.zeros(1, 1, n, 1, 1, dtype=torch.uint8)
    of_values = torch.ones(1, 1, n, 1, 1, dtype=scale.dtype)
    keys = (codes[None, None, None], *(x[None, None, None, :, None] for x in (scale, zero)))
    segment = attention.QuantizedSegment(
        attention.quantized_numbers(*keys, bits),
        attention.quantized_numbers(values, of_values, of_values, 8),
        scale.dtype,
        n,
        (q[:0], q[:0]),
        (*keys, values, of_values),
    )
    found = torch.empty(R, n)
    for c in range(n):
        visible = torch.zeros(1, 1, 1, n, dtype=torch.bool)
        visible[..., c] = True
        args = attention.DecodeArgs(
            q=q[None, None].contiguous(),
            scale=1.0,
            T=R,
            k_positions=arguments.NO_POSITIONS,
            origin=0,
            starts=arguments.NO_RANGES,
            stops=arguments.NO_RANGES,
            visible=visible,
            softcap=0.0,
            symmetric=False,
            slopes=arguments.NO_SLOPES,
            bias=arguments.NO_BIAS,
            q_positions=torch.zeros(1, R, dtype=torch.int64),
        )
        found[:, c] = attention.decode_quantized(args, segment, 1)[1][0, 0]
    return found


def draw_lines(R: int, D: int, n: int, bits: int, dtype: torch.dtype) -> tuple[Tensor, ...]:
    """Rows of q, codes, scales and zeros that are no neighbours in memory; and the keys in fp64."""
    make = torch.Generator().manual_seed(n)
    codes = torch.randint(0, 256, (D, n * bits // 8 + 3), generator=make, dtype=torch.uint8)
    codes = codes[:, 2:-1]
    scale, zero = (torch.randn(D, 3, generator=make).to(dtype)[:, 1] for _ in range(2))
    code = (codes[..., None].int() >> torch.arange(0, 8, bits)) % 2**bits
    keys = zero.double()[:, None] + code.reshape(D, n) * scale.double()[:, None]
    return torch.randn(R, D, generator=make), codes, scale, zero, keys


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("rows", [1, 3, 8])
@pytest.mark.parametrize("bits, n", [(8, 5), (8, 96), (4, 2), (4, 96), (2, 4), (2, 32), (2, 72)])
def test_sums_of_lines(rows: int, bits: int, n: int, dtype: torch.dtype) -> None:
    """Each loop over the codes against fp64, in an odd number of lines."""
    q, codes, scale, zero, keys = draw_lines(rows, 37, n, bits, dtype)
    bound = 2e-6 if dtype == torch.float32 else 2**-14
    error = scores_of(q, codes, scale, zero, bits) - q.double() @ keys
    assert error.abs().max() < bound * (q.abs().double() @ keys.abs()).max()


@pytest.mark.parametrize("rows, n, D", [(4, 32, 2), (4, 64, 128), (8, 96, 38), (4, 128, 256)])
def test_sums_in_whole_numbers(rows: int, n: int, D: int) -> None:
    """Of scales in 16 bits weights are off by half of what a whole number of 16 bits is worth, and
    no more; one that is not finite shows.
    """
    q, codes, scale, zero, keys = draw_lines(rows, D, n, 8, torch.bfloat16)
    q = q * torch.logspace(-6, 0, D)
    half = (q * scale.float()).abs().amax(1).double() / 32767 / 2
    bound = half[:, None] * (codes.double() - 128).abs().sum(0)
    rounding = 2e-6 * (q.abs().double() @ keys.abs())
    error = (scores_of(q, codes, scale, zero, 8) - q.double() @ keys).abs()
    assert (error <= bound + rounding).all()
    q[1, D // 2] = float("nan")
    found = scores_of(q, codes, scale, zero, 8)
    assert found[1].isnan().all()
    assert found[[0, 2, 3]].isfinite().all()


@pytest.mark.parametrize("D", [510, 576])
def test_the_largest_sums_of_whole_numbers_do_not_wrap(D: int) -> None:
    """Every weight and every code at its end: 576 such lines would leave 32 bits, and are summed
    another way.
    """
    scale, zero = (torch.full((D,), x).bfloat16() for x in (1.0, 0.0))
    for code in (0, 255):
        codes = torch.full((D, 64), code, dtype=torch.uint8)
        found = scores_of(torch.ones(4, D), codes, scale, zero, 8)
        assert torch.allclose(found, torch.tensor(float(code * D)), atol=0.02 * D)


def coded(axis: quantization.Axis, *, slots: int = 16, kind: torch.dtype = torch.float32) -> Any:
    """What a quantized cache answers, by hand: 8 bits, groups of 8, and two recent slots."""
    rows, lines = (slots // 8, 8) if axis == "channel" else (slots, 1)
    codes = torch.zeros(1, 2, rows, lines, 8, dtype=torch.uint8)
    scale, zero = (x((1, 2, rows, lines, 1), dtype=kind) for x in (torch.ones, torch.zeros))
    none = torch.zeros(1, 0)
    made = quantization.QuantizedGroups(codes, scale, zero, none.long(), none)
    recent = torch.zeros(1, 2, 2, 8, dtype=kind)
    wide: Any = torch.zeros(1, 2, slots + 2, 8)
    wide.coded = quantization.QuantizedAndRecent(made, axis, 8, recent)
    return wide


def test_which_codes_one_loop_reads() -> None:
    found = attention.quantized_segment(coded("channel"), coded("token"))
    assert found is not None
    assert (found.slots, found.dtype) == (16, torch.float32)
    half = coded("token", kind=torch.float16)
    assert attention.quantized_segment(coded("channel"), half) is None, "two dtypes of scales"
    longer = coded("token", slots=24)
    assert attention.quantized_segment(coded("channel"), longer) is None, "of two memories"
    assert attention.quantized_segment(coded("token"), coded("channel")) is None


def test_scales_and_zeros_are_read_by_the_same_steps() -> None:
    """A zero that was filled in by hand may lie otherwise than its scale."""
    keys = coded("channel")
    zero = torch.randn(8, 2, 2, 1).permute(3, 1, 2, 0)[..., None]
    keys.coded = keys.coded._replace(groups=keys.coded.groups._replace(zero=zero))
    found = attention.quantized_segment(keys, coded("token"))
    assert found is not None
    _, scale, read = found.owners[:3]
    assert torch.equal(read, zero)
    assert scale.stride() == read.stride()
    assert found.k[5:7] == (scale.data_ptr(), read.data_ptr())
