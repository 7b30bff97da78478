"""The quantized cache: its codes against the definition, its bound, chunks, outliers, padding, what
no group can hold.
"""

from __future__ import annotations

import copy
import io
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.caches import Growing, Quantized
from regard.caches.quantization import (
    LazyDequantizedTensor,
    QuantizedAndRecent,
    _pack,
    _round_up,
    _unpack,
    dequantize,
    quantize,
)
from regard.caches.quantized import GrowingTensor
from regard.span import Positions, Span, as_tensor
from tests.rules import assert_refused

GROUP, RESIDUAL = 4, 6
FLOATS = (torch.float64, torch.float32, torch.bfloat16, torch.float16)


def tokens(
    T: int, B: int = 2, seed: int = 0, scale: float = 1.0, d: int = 8
) -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(seed)
    return tuple(scale * torch.randn(B, 3, T, d, generator=make).double() for _ in range(2))  # type: ignore[return-value]


def fed(
    cache: Quantized, parts: tuple[Tensor, ...], chunks: list[int], positions: Tensor | None = None
) -> tuple[tuple[Tensor, ...], Positions]:
    start, answer = 0, None
    for n in chunks:
        where = Span(start, n) if positions is None else positions[:, start : start + n]
        answer = cache.update(tuple(x[:, :, start : start + n] for x in parts), where)
        start += n
    assert answer is not None
    return answer


def groups(x: Tensor, axis: str, quantized: int) -> list[list[tuple[int, ...]]]:
    """The indices [b, n, slot, channel] of each group, by counting."""
    B, n, _, d = x.shape
    found = []
    for b in range(B):
        for h in range(n):
            if axis == "channel":
                for first in range(0, quantized, GROUP):
                    found += [[(b, h, first + i, c) for i in range(GROUP)] for c in range(d)]
            else:
                for slot in range(quantized):
                    found += [
                        [(b, h, slot, c + i) for i in range(GROUP)] for c in range(0, d, GROUP)
                    ]
    return found


def held_in_codes(T: int) -> int:
    return max(0, T - RESIDUAL) // GROUP * GROUP


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("bits", [8, 4, 2])
@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 300.0])
def test_the_error_is_within_half_a_step(bits: int, dtype: torch.dtype, scale: float) -> None:
    """|x - x'| <= (max - min) / (2^b - 1) / 2 per group, and the roundings of scale and result to
    the dtype.
    """
    parts = tuple(x.to(dtype) for x in tokens(21, scale=scale))
    answer, _ = fed(Quantized(bits, group=GROUP, residual=RESIDUAL), parts, [21])
    old, eps = held_in_codes(21), torch.finfo(dtype).eps
    tiny = torch.finfo(dtype).smallest_normal * eps
    worst = 0.0
    for x, y, axis in zip(parts, answer, ("channel", "token"), strict=True):
        assert torch.equal(y[:, :, old:], x[:, :, old:]), "recent tokens are as they came"
        for group in groups(x, axis, old):
            given, got = ([float(z[i]) for i in group] for z in (x, y))
            step = (max(given) - min(given)) / (2**bits - 1)
            rounding = eps * max(abs(v) for v in got) + eps * step * 2**bits + tiny
            for a, b in zip(given, got, strict=True):
                assert abs(a - b) <= step / 2 * (1 + 2 * eps) + rounding
                worst = max(worst, abs(a - b) / max(step, 1e-30))
    assert worst > 0.25, "nothing was quantized"


def test_codes_are_the_definition() -> None:
    """zero + round((x - zero) / scale) * scale, element by element, in fp64."""
    parts = tokens(13)
    cache = Quantized(4, group=GROUP, residual=RESIDUAL)
    answer, _ = fed(cache, parts, [13])
    assert cache.quantized == 4
    for x, y, axis in zip(parts, answer, ("channel", "token"), strict=True):
        for group in groups(x, axis, 4):
            given = [float(x[i]) for i in group]
            low, scale = min(given), (max(given) - min(given)) / 15
            for i, v in zip(group, given, strict=True):
                assert abs(float(y[i]) - (low + round((v - low) / scale) * scale)) < 1e-14


@given(
    chunks=st.lists(st.integers(0, 9), min_size=1, max_size=8),
    bits=st.sampled_from((8, 4, 2)),
    pads=st.integers(0, 5),
)
def test_any_chunks_are_one_shot_bitwise(chunks: list[int], bits: int, pads: int) -> None:
    T = sum(chunks)
    positions = torch.stack([torch.arange(T), torch.arange(T) - pads])
    positions = positions.where(positions >= 0, -1) if pads else None
    parts = tokens(T)
    for x in parts:
        x[:, :, : min(pads, T)] += float("nan") if pads else 0.0
        x[0, :, ::5, 1] = float("inf")
    make = lambda: Quantized(bits, group=GROUP, residual=RESIDUAL)  # noqa: E731
    one, some = make(), make()
    right, where = fed(one, parts, [T], positions)
    got, there = fed(some, parts, chunks, positions)
    assert torch.equal(as_tensor(where), as_tensor(there))
    assert isinstance(there, Span) == (positions is None)
    for a, b in zip(right, got, strict=True):
        assert torch.equal(a.nan_to_num(7.0), b.nan_to_num(7.0))
        assert torch.equal(a.isnan(), b.isnan())
    for name in (
        "codes.0",
        "scale.0",
        "zero.0",
        "codes.1",
        "scale.1",
        "zero.1",
        "recent.0",
        "recent.1",
    ):
        a, b = one.contents()[name], some.contents()[name]
        assert torch.equal(torch.as_tensor(a).nan_to_num(), torch.as_tensor(b).nan_to_num()), name
    assert some.quantized == held_in_codes(T)


def test_bits_per_number() -> None:
    """KIVI: b + 32 / G with fp16 scale and zero: 3.0 (2 bits, 32), 2.25 (2, 128), 4.5 (4, 64)."""
    for bits, group, expected in (
        (2, 32, 3.0),
        (2, 128, 2.25),
        (4, 64, 4.5),
        (8, 32, 9.0),
        (4, 32, 5.0),
    ):
        k = v = torch.randn(1, 2, 256, 128, dtype=torch.float16)
        cache = Quantized(bits, group=group, residual=0)
        cache.update((k, v), Span(0, 256))
        assert cache.quantized == 256
        assert 8 * cache.bytes / (k.numel() + v.numel()) == expected == bits + 32 / group


def test_the_residual_is_the_prompts_last_part() -> None:
    """Bug class 42: a prompt in one update keeps its last tokens in full precision as well."""
    k, v = tokens(200, B=1, d=32)
    cache = Quantized(4)
    (keys, values), _ = cache.update((k, v), Span(0, 200))
    assert cache.quantized == 64  # whole groups of 32 in front of the last 128
    assert torch.equal(keys[:, :, 64:], k[:, :, 64:])
    assert torch.equal(values[:, :, 64:], v[:, :, 64:])
    for x in cache.contents().values():
        if isinstance(x, Tensor):
            assert x.untyped_storage().nbytes() <= x.numel() * x.element_size(), (
                "a view would keep the prompt"
            )


def test_nothing_is_quantized_twice() -> None:
    cache, parts = Quantized(4, group=GROUP, residual=RESIDUAL), tokens(40)
    first: dict[str, Tensor] = {}
    for t in range(40):
        cache.update(tuple(x[:, :, t : t + 1] for x in parts), Span(t, 1))
        contents = cache.contents()
        for name in ("codes.0", "codes.1"):
            new = contents[name]
            assert isinstance(new, Tensor)
            if name in first:
                assert torch.equal(new[:, :, : first[name].shape[2]], first[name])
            first[name] = new
    assert first["codes.0"].shape[2] * GROUP == held_in_codes(40) == first["codes.1"].shape[2]


def attention_error(axes: tuple[str, str], k: Tensor, v: Tensor, q: Tensor) -> float:
    cache = Quantized(4, group=GROUP, residual=0, axes=axes)
    (keys, values), _ = cache.update((k, v), Span(0, k.shape[2]))
    return float((regard.attend(q, keys, values) - regard.attend(q, k, v)).abs().max())


def test_outlier_channels_of_keys() -> None:
    """Bug class 42: a channel of keys that is 100 times the others does not cost the others their
    bits.

    Negative control: per token, as for values, it does, and attention is off by the size of its
    output.
    """
    (k, v), (q, _) = tokens(32), tokens(4, seed=1)
    k[..., 3] = 100 + k[..., 3]  # far off and nearly constant, as in trained models
    q[..., 3] *= 0.01
    right = attention_error(("channel", "token"), k, v, q)
    wrong = attention_error(("token", "token"), k, v, q)
    assert right < 0.35
    assert wrong > 3 * right
    lost = {}
    for axis in ("channel", "token"):
        cache = Quantized(4, group=GROUP, residual=0, axes=(axis,))
        (keys,), _ = cache.update((k,), Span(0, 32))
        lost[axis] = float((keys - k)[..., :3].abs().max())
    widest = max(float(k[i].max() - k[i].min()) for i in [(..., c) for c in range(3)])
    assert lost["channel"] <= widest / 15 / 2 + 1e-12
    assert lost["token"] > 0.5, "the other channels have lost their bits"


def test_constant_groups_are_exact() -> None:
    for dtype in FLOATS:
        for value in (0.0, -3.140625, 1e-3, 60000.0 if dtype is torch.float16 else 1e30):
            x = torch.full((1, 2, 8, 4), value).to(dtype)
            cache = Quantized(4, group=GROUP, residual=0)
            (a, b), _ = cache.update((x, x), Span(0, 8))
            assert torch.equal(a, x)
            assert torch.equal(b, x)


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("axis", ["channel", "token"])
def test_strange_numbers_are_kept_and_disturb_nobody(dtype: torch.dtype, axis: str) -> None:
    """NaN, infinities and the dtype's largest numbers come back as they are; all others as if they
    were not there.
    """
    info = torch.finfo(dtype)
    x = tokens(8, B=2)[0].to(dtype)
    places = {
        (0, 1, 2, 3): math.nan,
        (0, 2, 7, 0): math.inf,
        (1, 0, 5, 0): math.inf,
        (1, 0, 0, 1): -math.inf,
        (1, 1, 5, 2): info.max,
        (0, 0, 4, 7): info.min,
    }
    strange, plain = x.clone(), x.clone()
    for at, value in places.items():
        strange[at] = value
        lines = [i for g in groups(x, axis, 8) if at in g for i in g if i != at]
        plain[at] = x[lines[0]]  # a number that changes neither minimum nor maximum
    made = [Quantized(8, group=GROUP, residual=0, axes=(axis,)) for _ in range(2)]
    got, without = (
        c.update((y,), Span(0, 8))[0][0] for c, y in zip(made, (strange, plain), strict=True)
    )
    for at, value in places.items():
        assert float(got[at]) == value or (math.isnan(value) and math.isnan(got[at]))
        without[at] = got[at]
    assert torch.equal(got.nan_to_num(1.0), without.nan_to_num(1.0))
    assert int(got.isnan().sum()) == 1
    (later,), _ = made[0].update((x[:, :, :4],), Span(8, 4))
    assert torch.equal(later[:, :, :8].isnan(), got.isnan())
    made[0].crop(5)
    (cropped,), _ = made[0].update((x[:, :, :1],), Span(5, 1))
    assert cropped[:, :, 5:8].isfinite().all()
    whole = Quantized(8, group=GROUP, residual=0, axes=(axis,))
    whole.update((strange,), Span(0, 8))
    whole.select(torch.tensor([1, 1, 0]))
    chosen = whole.update((x[[1, 1, 0], :, :4],), Span(8, 4))[0][0]
    assert torch.equal(chosen[:, :, :8].nan_to_num(1.0), got[[1, 1, 0]].nan_to_num(1.0))


def test_a_nan_of_one_document_stays_in_it() -> None:
    """A key behind a mask, in a group with keys that are seen, changes nothing: groups do not
    leak.
    """
    (k, v), (q, _) = tokens(16), tokens(4, seed=1)
    bad_k, bad_v = k.clone(), v.clone()
    for x in (bad_k, bad_v):
        x[:, :, ::4] = float("nan")
    seen = torch.arange(16) % 4 != 0
    mask = regard.masks.Dense(seen.expand(4, -1))
    out = []
    for pair in ((k, v), (bad_k, bad_v)):
        cache = Quantized(8, group=GROUP, residual=0)
        (keys, values), _ = cache.update(pair, Span(0, 16))
        out.append(regard.attend(q, keys, values, mask=mask, backend="reference"))
    assert not out[1].isnan().any()
    assert float((out[0] - out[1]).abs().max()) < 0.1


def test_padding_takes_no_part_in_a_group() -> None:
    """Garbage at -1 changes nothing, on either side; an empty group is fine; the bound holds for
    what is there.
    """
    k, v = tokens(16)
    p = torch.stack([torch.arange(16) - 5, torch.arange(16)])
    p[1, 9:] = -1
    p = p.where(p >= 0, -1)
    pad = (p < 0)[:, None, :, None]
    answers = []
    for garbage in (0.0, 1e6, float("nan")):
        cache = Quantized(4, group=GROUP, residual=0)
        (keys, values), seen = cache.update(tuple(x.masked_fill(pad, garbage) for x in (k, v)), p)
        assert torch.equal(as_tensor(seen), p)
        answers.append([x.masked_fill(pad, 0.0) for x in (keys, values)])
        assert not keys.isnan().any()
    for other in answers[1:]:
        assert all(torch.equal(a, b) for a, b in zip(answers[0], other, strict=True))
    worst = float((answers[0][0] - k.masked_fill(pad, 0.0)).abs().max())
    assert worst <= float(k.max() - k.min()) / 15 / 2 + 1e-12


def test_a_crop_within_the_residual_is_exact() -> None:
    parts = tokens(20)
    cache, whole = (Quantized(4, group=GROUP, residual=RESIDUAL) for _ in range(2))
    fed(cache, parts, [13])
    fed(whole, parts, [12])
    cache.crop(12)
    assert (len(cache), cache.next(1)) == (12, Span(12, 1))
    for c in (cache, whole):
        c.update(tuple(x[:, :, 12:] for x in parts), Span(12, 8))
    a, b = (c.update(tuple(x[:, :, :0] for x in parts), Span(20, 0))[0] for c in (cache, whole))
    assert all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


def test_a_crop_into_the_codes_leaves_holes() -> None:
    parts = tokens(30)
    cache = Quantized(4, group=GROUP, residual=RESIDUAL, axes=("channel", "exact"))
    before, _ = fed(cache, parts, [30])
    cache.crop(9)  # in the middle of the third group
    assert (len(cache), cache.quantized) == (12, 12)
    (keys, values), positions = cache.update(tuple(x[:, :, 9:12] for x in parts), Span(9, 3))
    assert as_tensor(positions).tolist() == [[*range(9), -1, -1, -1, 9, 10, 11]]
    assert torch.equal(keys[:, :, :9], before[0][:, :, :9])
    assert torch.equal(values[:, :, :9], parts[1][:, :, :9])
    assert torch.equal(keys[:, :, 12:], parts[0][:, :, 9:12])
    cache.crop(8)
    assert len(cache) == 8
    assert as_tensor(cache.next(2)).tolist() == [[8, 9]]
    cache.crop(0)
    assert len(cache) == 0
    fed(cache, parts, [30])


def test_parts_that_stay_exact() -> None:
    """Any dtype, such as the lengths that `nn.policy` remembers."""
    k, _ = tokens(16)
    lengths = torch.arange(16)[None, None, :, None].expand(2, 1, 16, 1)
    cache = Quantized(8, group=GROUP, residual=0, axes=("channel", "exact"))
    (_, held), _ = cache.update((k, lengths), Span(0, 16))
    assert torch.equal(held, lengths)
    assert held.dtype == torch.int64


def test_gradients_are_refused_not_lost() -> None:
    k, v = tokens(3)
    cache = Quantized(8, group=GROUP)
    with pytest.raises(regard.ArgumentError, match="memory 1 requires a gradient, which codes do"):
        cache.update((k, v.requires_grad_()), Span(0, 3))
    with torch.no_grad():
        cache.update((k, v), Span(0, 3))


def test_it_is_smaller_than_growing() -> None:
    parts = tuple(x.half() for x in tokens(512, d=32))
    small, large = Quantized(4), Growing()
    for cache in (small, large):
        cache.update(parts, Span(0, 512))
    assert small.bytes < 0.5 * large.bytes  # 128 of 512 tokens are as they came


def test_packing_and_rounding_up() -> None:
    for bits in (8, 4, 2):
        code = torch.randint(2**bits, (3, 5, 16), dtype=torch.uint8)
        packed = _pack(code, bits)
        assert packed.shape == (3, 5, 16 * bits // 8)
        assert torch.equal(_unpack(packed, bits), code)
    assert _pack(torch.tensor([1, 2], dtype=torch.uint8), 4).tolist() == [0x21]
    for dtype in FLOATS:
        x = torch.cat([torch.randn(200).double().abs(), torch.tensor([0.0, 1.0, 3.3e-7]).double()])
        up = _round_up(x, dtype).double()
        assert (up >= x).all()
        assert (
            (up - x) <= torch.finfo(dtype).eps * x.clamp(min=torch.finfo(dtype).smallest_normal)
        ).all()


def test_rounding_the_scale_down_would_break_the_bound() -> None:
    """Negative control: with the scale rounded to nearest, bf16's largest code does not reach the
    maximum.
    """
    x = tokens(64)[0].bfloat16()
    made = quantize(x, torch.ones(1, 64, dtype=torch.bool), "channel", bits=8, group=64)
    lines = x.transpose(-1, -2)[:, :, None]
    span = (lines.amax(-1, keepdim=True).double() - lines.amin(-1, keepdim=True).double()) / 255
    nearest = made._replace(scale=span.bfloat16())
    reach = [
        float(
            (c.zero.double() + 255 * c.scale.double() - lines.amax(-1, keepdim=True).double()).min()
        )
        for c in (made, nearest)
    ]
    assert reach[0] >= -1e-12
    assert reach[1] < -1e-3
    assert dequantize(made, "channel", (2, 3, 64, 8), bits=8).dtype == torch.bfloat16


def held_by(cache: Quantized) -> list[int]:
    """Where the memory of codes, scales, zeros and recent slots of both parts lies."""
    held = cache.contents()
    names = [f"{name}.{i}" for name in ("codes", "scale", "zero", "recent") for i in (0, 1)]
    return [held[name].untyped_storage().data_ptr() for name in names]  # type: ignore[union-attr]


def test_a_step_copies_no_more_than_is_new() -> None:
    """Codes stay where they are but when they have grown by a quarter, recent slots but when a
    group leaves them.
    """
    parts = tokens(900, d=4)
    cache = Quantized(8, group=GROUP, residual=RESIDUAL)
    fed(cache, parts, [400])
    moved_codes, moved_recent, before = 0, 0, held_by(cache)
    for t in range(400, 900):
        cache.update(tuple(x[:, :, t : t + 1] for x in parts), Span(t, 1))
        now = held_by(cache)
        moved_codes += now[:6] != before[:6]
        moved_recent += now[6:] != before[6:]
        before = now
    assert moved_codes <= 5  # of 500 steps: room for a quarter more each time
    assert moved_recent <= 1 + 2 * 500 // GROUP  # left behind by a group, and then given room
    whole = Quantized(8, group=GROUP, residual=RESIDUAL)
    right, _ = fed(whole, parts, [900])
    found, _ = cache.update(tuple(x[:, :, :0] for x in parts), Span(900, 0))
    assert all(torch.equal(a, b) for a, b in zip(found, right, strict=True))


def test_an_update_taken_back_is_written_over() -> None:
    """Slots are written in place: what a refused call wrote behind the others is not seen by what
    follows.
    """
    parts = tokens(60)
    cache, right = (Quantized(8, group=GROUP, residual=RESIDUAL) for _ in range(2))
    for t in range(59):
        mark = cache.mark()
        cache.update(tuple(7 - x[:, :, t : t + 1] for x in parts), Span(t, 1))
        cache.restore(mark)
        cache.update(tuple(x[:, :, t : t + 1] for x in parts), Span(t, 1))
    fed(right, parts, [59])
    last = tuple(x[:, :, 59:] for x in parts)
    for a, b in zip(
        cache.update(last, Span(59, 1))[0], right.update(last, Span(59, 1))[0], strict=True
    ):
        assert torch.equal(a, b)


def test_appended_memory_that_may_not_be_written() -> None:
    """Where a gradient is recorded, or torch forbids it, new slots make a new memory; the old one
    keeps its values.
    """
    x = torch.ones(1, 1, 2, 3, 1, requires_grad=True)
    held = GrowingTensor(torch.zeros(1, 1, 1, 3, 1)).append(x).append(2 * x)
    held.view.sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, torch.full_like(x, 3.0))
    with torch.inference_mode():
        before = GrowingTensor(torch.zeros(1, 1, 1, 3, 1)).append(torch.ones(1, 1, 1, 3, 1), room=9)
    after = before.append(torch.ones(1, 1, 1, 3, 1))
    assert after.view.untyped_storage().data_ptr() != before.view.untyped_storage().data_ptr()
    assert after.view[0, 0, :, 0, 0].tolist() == [0, 1, 1]
    inner = GrowingTensor(torch.zeros(1, 1, 1, 3, 1), inner=True).append(torch.ones(1, 1, 4, 3, 1))
    assert inner.view.stride(2) == 1
    assert inner.cut(2).append(torch.full((1, 1, 1, 3, 1), 5.0)).view[0, 0, :, 2, 0].tolist() == [
        0,
        1,
        5,
    ]


def packed_memory() -> tuple[LazyDequantizedTensor, Tensor]:
    """A part in codes, and the same as numbers."""
    parts = tuple(x.float() for x in tokens(21))
    cache = Quantized(8, group=GROUP, residual=RESIDUAL)
    (keys, _), _ = fed(cache, parts, [21])
    assert isinstance(keys, LazyDequantizedTensor)
    return keys, cache.fork().update(tuple(x[:, :, :0] for x in parts), Span(21, 0))[0][0].clone()


def test_memory_in_codes_is_a_tensor() -> None:
    """Its shape, dtype and device are known without making a number; everything else sees the
    numbers.
    """
    keys, right = packed_memory()
    assert (keys.shape, keys.dtype, keys.device, keys.ndim) == (
        right.shape,
        right.dtype,
        right.device,
        4,
    )
    assert (keys.stride(), keys.numel(), keys.requires_grad) == (
        right.stride(),
        right.numel(),
        False,
    )
    assert keys.is_floating_point()
    assert repr(keys) == "LazyDequantizedTensor((2, 3, 21, 8), torch.float32, stored as codes)"
    assert keys.coded is not None
    uses = (
        lambda x: x * 2,
        lambda x: x[:, :, 3:, :2],
        lambda x: torch.cat([x, x]),
        lambda x: x.sum(),
        lambda x: x.double(),
        lambda x: torch.from_numpy(x.numpy()),
        lambda x: torch.tensor(x.tolist()),
        lambda x: copy.deepcopy(x),
        lambda x: x.detach(),
        lambda x: torch.nn.functional.linear(x, torch.ones(2, 8)),
        lambda x: x.transpose(1, 2).flatten(2),
        lambda x: x.clone(),
    )
    for use in uses:
        keys, right = packed_memory()
        found = use(keys)
        assert type(found) is Tensor
        assert torch.equal(found, use(right))
        assert keys.coded is None
        assert repr(keys).endswith("((2, 3, 21, 8), torch.float32, dequantized)")
    keys, right = packed_memory()
    assert keys.data_ptr() == keys.numbers().data_ptr() == keys.untyped_storage().data_ptr()
    keys.mul_(3)  # is not lost, as it would be if the numbers were made again
    assert torch.equal(keys[:1], 3 * right[:1])
    into = io.BytesIO()
    torch.save(keys, into)
    assert into.tell() > 4 * right.numel()


def test_gradients_pass_memory_in_codes() -> None:
    keys, right = packed_memory()
    found = []
    for k in (keys, right):
        q = torch.ones(2, 3, 1, 8, requires_grad=True)
        (q @ k.transpose(-1, -2)).square().sum().backward()
        found.append(q.grad)
    assert found[0] is not None
    assert torch.equal(found[0], found[1])


def test_errors() -> None:
    k, v = tokens(3)
    cases = [
        (lambda: Quantized(3), "bits is 3; it must be 8, 4 or 2"),
        (lambda: Quantized(4, group=3), "group is 3; it must be a multiple of 2, since 2 codes of"),
        (lambda: Quantized(8, group=0), "group is 0; it must be a multiple of 1, since 1 codes of"),
        (lambda: Quantized(8, residual=-1), "residual is -1; it must be 0 or more"),
        (lambda: Quantized(axes=()), 'axes are (); name "channel", "token" or "exact" for each'),
        (lambda: Quantized(axes=("row",)), 'axes are (\'row\',); name "channel", "token" or'),
        (lambda: Quantized().update((k,), Span(0, 3)), "memory has 1 part for axes"),
        (lambda: Quantized(4, group=6).update((k, v), Span(0, 3)), "memory 1 has 8 channels"),
        (lambda: Quantized(4).update((k, v[..., :3]), Span(0, 3)), "memory 1 has 3 channels"),
        (lambda: Quantized().fill({"positions": Span(0, 3), "recent.0": k}), "codes of 0 parts"),
    ]
    assert_refused(cases)
    with pytest.raises(regard.ArgumentTypeError, match=r"memory 1 is torch\.int64; only floating"):
        Quantized().update((k, torch.ones(2, 3, 3, 8, dtype=torch.int64)), Span(0, 3))
    cache = Quantized(4, group=GROUP, residual=0)
    cache.update(tokens(8), Span(0, 8))
    for name in ("scale.1", "codes.0", "zero.0", "odd.1"):
        wrong_contents = dict(cache.contents())
        wrong_contents[name] = torch.ones(2, 3, 5, 1, 1)
        with pytest.raises(regard.ArgumentError, match="codes and scales of part"):
            Quantized(4, group=GROUP, residual=0).fill(wrong_contents)


def test_codes_of_other_sizes_or_dtypes_are_refused() -> None:
    """A kernel reads codes by their address: what does not fit is refused where it comes in."""
    x, seen = torch.randn(1, 2, 8, 4), torch.ones(1, 8, dtype=torch.bool)
    made = quantize(x, seen, "channel", bits=8, group=8)
    assert LazyDequantizedTensor.of(QuantizedAndRecent(made, "channel", 8, x)).shape == (
        1,
        2,
        16,
        4,
    )
    for wrong, message in (
        (made._replace(codes=made.codes[:, :1]), "not ((1, 2, 1, 4, 8), (1, 2, 1, 4, 1)) for 8"),
        (made._replace(zero=made.zero[:, :, :, :2]), "codes and scales of the memory are"),
        (made._replace(codes=made.codes.float()), "codes of the memory are torch.float32"),
        (made._replace(scale=made.scale.half()), "with scales torch.float16"),
        (made._replace(zero=made.zero.to("meta")), "codes of the memory are not all on cpu"),
    ):
        with pytest.raises(regard.ArgumentError) as error:
            LazyDequantizedTensor.of(QuantizedAndRecent(wrong, "channel", 8, x))
        assert message in str(error.value)


def test_exceptions_behind_their_slots_are_refused() -> None:
    cache = Quantized(bits=8, group=4, residual=4)
    x = torch.randn(1, 2, 12, 4)
    x[0, 0, 0, 0] = math.inf
    cache.update((x, x), Span(0, 12))
    held = dict(cache.contents())
    held["odd_at.0"] = torch.full_like(held["odd_at.0"], 10**6)
    with pytest.raises(regard.ArgumentError, match=r"outliers at 1000000 to 1000000; 8 slots of 2"):
        Quantized(bits=8, group=4, residual=4).fill(held)


@pytest.mark.full
def test_keys_and_values_of_two_memories_are_opened() -> None:
    """Codes of another number of slots: one loop over both would read behind the shorter ones."""
    x, seen = torch.randn(1, 2, 16, 8), torch.ones(1, 16, dtype=torch.bool)
    q = torch.randn(1, 2, 1, 8)

    def packed(axis: str, slots: int) -> LazyDequantizedTensor:
        made = quantize(x[:, :, :slots], seen[:, :slots], axis, bits=8, group=8)
        return LazyDequantizedTensor.of(QuantizedAndRecent(made, axis, 8, x[:, :, slots:]))

    k, v = packed("channel", 16), packed("token", 8)
    with torch.no_grad():
        out = regard.attend(q, k, v, backend="cpu")
        right = regard.attend(q, k.numbers(), v.numbers(), backend="reference")
    assert torch.allclose(out, right, atol=1e-6)
