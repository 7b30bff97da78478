"""The contract of the Triton kernels: the definition, under every mask and option.

`test_triton_interpreter.py` runs this file in a process of its own, where triton interprets the
kernels on CPU tensors; `test_gpu.py` runs it on a GPU. The device is in the environment.
"""

from __future__ import annotations

import math
import os
from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import regard
from regard import Span, biases, masks
from regard.caches import Float8, Paged, Quantized
from regard.caches.float8 import from_float8
from regard.ops.softmax.attend import part_gradients
from regard.ops.softmax.call import make_call
from regard.ops.softmax.kernel import Kernel, KernelResult
from regard.ops.softmax.reference import ReferenceKernel
from regard.ops.softmax.triton.kernel import TritonKernel, is_decoding
from tests.ops.softmax.cases import CONTRACT, Case, Made, make
from tests.ops.softmax.test_contract import answers, assert_gradients, gradient_answers, gradients
from tests.ops.softmax.test_cpu_quantized import meant
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import GRADIENT, assert_close_rule, in_orders

DEVICE = os.environ.get("REGARD_TRITON_DEVICE", "cpu")
KERNEL = TritonKernel()
DTYPES = (torch.float32, torch.float16)


def moved(made: Made) -> Made:
    """The same call with its tensors on the device; gradients reach the leaves on the CPU."""
    sink = None if made.sink is None else made.sink.to(DEVICE)
    options = {**made.options, "sink": sink}
    return replace(
        made,
        q=made.q.to(DEVICE),
        k=made.k.to(DEVICE),
        v=made.v.to(DEVICE),
        sink=sink,
        options=options,
    )


def run(made: Made, **more: Any) -> KernelResult:
    call = moved(made).call(wants_lse=True, **more)
    assert KERNEL.why_not(call) == []
    result = KERNEL.run(call)
    assert result.lse is not None
    return KernelResult(result.out.cpu(), result.lse.cpu())


def assert_forward(result: KernelResult, case: Case, dtype: torch.dtype) -> None:
    outs, lses, right = answers(case, dtype)
    assert result.out.dtype == dtype
    assert result.lse is not None
    assert result.lse.dtype == torch.float32
    assert_close_rule(result.out, outs, right[0], what="out")
    assert_close_rule(result.lse, [x.to(torch.float32) for x in lses], right[1], what="lse")


def ids(cells: list[tuple[Case, torch.dtype]]) -> list[str]:
    return [f"{case}-{str(dtype).removeprefix('torch.')}" for case, dtype in cells]


TRAINED = [(case, DTYPES[i // 2 % 2]) for i, case in enumerate(CONTRACT) if case.bias or i % 2]
WIDE_HEADS = Case("window", shape=(1, 2, 1, 18, 20, 136, 24), softcap=3.0)
"""Heads of which the kernels do not keep a block in registers."""
TRAINED.append((WIDE_HEADS, torch.float32))
FORWARD = [(x, DTYPES[i // 2 % 2]) for i, x in enumerate(CONTRACT) if not (x.bias or i % 2)]
if DEVICE != "cpu":  # a GPU takes no second for a case
    dtypes = (*DTYPES, torch.bfloat16)
    TRAINED = FORWARD = [(x, dtype) for x in (*CONTRACT, WIDE_HEADS) for dtype in dtypes]


@pytest.mark.parametrize("case, dtype", FORWARD, ids=ids(FORWARD))
def test_forward(case: Case, dtype: torch.dtype) -> None:
    made = make(case, dtype)
    result = run(made)
    assert_forward(result, case, dtype)
    blind = ~made.visible.any(-1)
    assert torch.equal(result.out[blind], torch.zeros_like(result.out[blind]))


@pytest.mark.parametrize("case, dtype", TRAINED, ids=ids(TRAINED))
def test_gradients(case: Case, dtype: torch.dtype) -> None:
    made = make(case, dtype, gradient=True)
    result = run(made)
    assert result.lse is not None
    assert_forward(result, case, dtype)
    assert_gradients(made, case, dtype, result.out, result.lse)


def decoding(case: Case, i: int) -> Case:
    """The case with one query, or a few."""
    B, H, G, T, S, D, E = case.shape
    return replace(case, shape=(B, H, G, min(T, 5 if i % 2 else 1), S, D, E))


DECODED = [(decoding(x, i), DTYPES[i // 2 % 2]) for i, x in enumerate(CONTRACT) if i % 3 == 0]


@pytest.mark.parametrize("case, dtype", DECODED, ids=ids(DECODED))
def test_decoding(case: Case, dtype: torch.dtype) -> None:
    """Split keys with packed heads; in the interpreter a span has one tile of 16 keys."""
    made = make(case, dtype)
    result = run(made)
    assert is_decoding(moved(made).call())
    assert_forward(result, case, dtype)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_decoding_passes_on_what_is_not_finite(where: str) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, n, 16, generator=draw) for h, n in ((4, 1), (2, 40), (2, 40)))
    {"q": q[0, 0, 0], "k": k[0, 0, 30], "v": v[0, 0, 30]}[where][3] = math.nan
    v[0, 1, 20:36, 2] = math.inf
    k[:, :, :10] = v[:, :, :10] = math.nan  # outside of the window
    mask = masks.Causal() & masks.Window(15)
    right = ReferenceKernel().run(make_call(q, k, v, mask=mask, wants_lse=True))
    found = KERNEL.run(make_call(*(x.to(DEVICE) for x in (q, k, v)), mask=mask, wants_lse=True))
    out = found.out.cpu()
    assert right.out.isnan().any()
    assert torch.equal(out.isnan(), right.out.isnan())
    assert torch.equal(out.isinf(), right.out.isinf())
    seen = right.out.isfinite()
    torch.testing.assert_close(out[seen], right.out[seen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("queries", [1, 2])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_latents_decode_for_all_heads(dtype: torch.dtype, queries: int) -> None:
    """The sizes of DeepSeek-V3 but for the heads: the values are channels of the keys, and the
    rows of 24 heads and 2 queries need two blocks.
    """
    draw = torch.Generator().manual_seed(0)
    q = torch.randn(2, 24, queries, 576, generator=draw).to(dtype)
    latents = torch.randn(2, 1, 37, 576, generator=draw).to(dtype)
    latents[0, :, :5] = math.nan
    positions = torch.arange(37).repeat(2, 1)
    positions[0, :5] = -1

    def run(kernel: Kernel, of_dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        device = DEVICE if kernel is KERNEL else "cpu"
        x, keys = (y.to(device, of_dtype) for y in (q, latents))
        values = keys[..., :512] if kernel is KERNEL else keys[..., :512].clone()
        call = make_call(
            x, keys, values, mask=masks.Causal(), scale=0.1, wants_lse=True,
            k_positions=positions.to(device),
        )  # fmt: skip
        assert is_decoding(call)
        result = kernel.run(call)
        assert result.lse is not None
        return result.out.cpu(), result.lse.cpu()

    found, right = run(KERNEL, dtype), run(ReferenceKernel(), torch.float64)
    plain = in_orders(partial(run, ReferenceKernel(), dtype))
    for i, what in enumerate(("out", "lse")):
        assert_close_rule(found[i], plain.each(itemgetter(i)), right[i], what=what)


class Stored(NamedTuple):
    """A decoding call whose keys and values are codes or pages."""

    dtype: torch.dtype = torch.float32
    queries: int = 1
    heads: int = 4
    D: int = 16
    E: int = 32
    bits: int = 8
    group: int = 16
    residual: int = 5
    page: int = 4
    options: dict[str, Any] = {}

    def __str__(self) -> str:
        word = str(self.options.get("mask", "full")) + " cap" * ("softcap" in self.options)
        sizes = f"{self.bits} bits, groups of {self.group}, pages of {self.page}, T{self.queries}"
        return f"{sizes} D{self.D} E{self.E} {self.dtype} {word}".replace("torch.", "")


SLOTS = 53
SINKS = {"mask": masks.Causal() & (masks.Window(21) | masks.Sinks(3))}
CAPPED = {"mask": masks.Causal(), "softcap": 3.0, "bias": biases.ALiBi(4), "scale": 0.4}
HALF, WIDE = torch.float16, torch.bfloat16


def stored_input(case: Stored) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """q, k, v, and positions: row 1 begins with 9 empty slots, which hold garbage."""
    draw = torch.Generator().manual_seed(5)
    sizes = ((case.heads, case.queries, case.D), (2, SLOTS, case.D), (2, SLOTS, case.E))
    q, k, v = (torch.randn(2, *x, generator=draw).to(DEVICE, case.dtype) for x in sizes)
    positions = torch.arange(SLOTS).expand(2, -1) - torch.tensor([[0], [9]])
    k[1, :, :9] = v[1, :, :9] = math.nan
    return q, k, v, positions.clamp(min=-1).to(DEVICE)


def stored_call(case: Stored, k: Tensor, v: Tensor, positions: Tensor) -> Any:
    last = positions[:, -case.queries :]
    q = stored_input(case)[0][: positions.shape[0]]
    return make_call(
        q, k, v, q_positions=last, k_positions=positions, wants_lse=True, **case.options
    )


def assert_stored(call: Any, k: Tensor, v: Tensor) -> None:
    """The call is right for keys and values `[B, G, S, d]` in fp64 on the CPU."""
    q, queries, keys = (x.cpu() for x in (call.q, call.q_positions, call.k_positions))
    visible = call.mask.block(queries, keys)
    options = {"visible": visible, "scale": call.scale, "softcap": call.softcap}
    if call.bias is not None:
        options["bias"] = call.bias.block(queries, keys, dtype=torch.float64)
    assert KERNEL.why_not(call) == []
    assert is_decoding(call)
    found = KERNEL.run(call)
    right = plain_attention(q.double(), k, v, **options)
    plains = several_plains(q, k.to(q.dtype), v.to(q.dtype), **options)
    for i, what in enumerate(("out", "lse")):
        x = found[i].cpu()
        assert_close_rule(x, [y[i].to(x.dtype) for y in plains], right[i], what=what)


CODED = [
    Stored(),
    Stored(bits=4, group=32, dtype=HALF, queries=3, options=SINKS),
    Stored(bits=2, D=20, E=24, group=4, options=CAPPED),
    Stored(bits=8, D=24, E=16, group=20, residual=0, dtype=HALF, options=CAPPED),
    Stored(bits=4, dtype=WIDE, options=SINKS),
    Stored(bits=2, dtype=HALF, heads=20, queries=2),
]


@pytest.mark.parametrize("case", CODED, ids=str)
def test_decoding_reads_codes(case: Stored) -> None:
    _, k, v, positions = stored_input(case)
    cache = Quantized(case.bits, group=case.group, residual=case.residual)
    keys, values = cache.update((k, v), positions)[0]
    assert "codes of" in KERNEL.describe(stored_call(case, keys, values, positions))
    assert_stored(stored_call(case, keys, values, positions), *meant(cache))
    assert keys.coded is not None, "nothing was dequantized"
    assert values.coded is not None


@pytest.mark.parametrize("name", ["zero.0", "scale.0", "codes.0", "zero.1", "scale.1", "codes.1"])
def test_another_code_is_far(name: str) -> None:
    """The negative control: one part of what is stored differs."""
    case = Stored(bits=4)
    _, k, v, positions = stored_input(case)
    cache = Quantized(case.bits, group=case.group, residual=case.residual)
    cache.update((k, v), positions)
    right, held = meant(cache), dict(cache.contents())
    x = held[name]
    assert isinstance(x, Tensor)
    cache.fill({**held, name: x ^ 16 if name.startswith("codes") else x * 1.01})
    keys, values = cache.update(tuple(x[:, :, :0] for x in (k, v)), positions[:, :0])[0]
    with pytest.raises(AssertionError, match="error"):
        assert_stored(stored_call(case, keys, values, positions), *right)


FLOAT8 = [
    ("e4m3", Stored()),
    ("e5m2", Stored(dtype=HALF, queries=3, options=SINKS)),
    ("e4m3", Stored(dtype=HALF, D=20, E=24, options=CAPPED)),
    ("e4m3", Stored(dtype=WIDE, options=SINKS)),
    ("e5m2", Stored(dtype=WIDE, heads=20, queries=2)),
    ("e4m3", Stored(D=288, E=272, queries=2)),
]


def float8_numbers(cache: Float8) -> list[Tensor]:
    """Keys and values that the stored numbers stand for, in fp64 on the CPU; 0 in empty slots."""
    held = cache.contents()
    pairs = [(held[f"codes.{i}"], held[f"scale.{i}"]) for i in (0, 1)]
    wide = [from_float8(x.cpu(), s.cpu().double(), cache.format) for x, s in pairs]
    return [x.nan_to_num() for x in wide]


@pytest.mark.parametrize("format, case", FLOAT8, ids=str)
def test_decoding_reads_8_bit_floats(format: str, case: Stored) -> None:
    _, k, v, positions = stored_input(case)
    k, v = k * 10 ** torch.randn(2, 2, SLOTS, 1).to(k) * 0.1, v * 30
    cache = Float8(format)
    keys, values = cache.update((k, v), positions)[0]
    assert f"as {format}" in KERNEL.describe(stored_call(case, keys, values, positions))
    assert_stored(stored_call(case, keys, values, positions), *float8_numbers(cache))
    assert keys.float8 is not None, "no number was computed"
    assert values.float8 is not None


@pytest.mark.parametrize("format", ["e4m3", "e5m2"])
@pytest.mark.parametrize("dtype", [*DTYPES, WIDE], ids=str)
def test_every_code_of_8_bits_is_read_as_its_number(dtype: torch.dtype, format: str) -> None:
    """One key for each code, which alone is seen by its row: the output is its number."""
    codes = torch.arange(256, dtype=torch.uint8).view(256, 1, 1, 1).repeat(1, 1, 2, 16).to(DEVICE)
    scale = (2.0 ** (torch.arange(256) % 9 - 4)).view(256, 1, 1, 1).repeat(1, 1, 2, 1)
    scale = scale.to(DEVICE, dtype)
    cache = Float8(format)
    zero, one = torch.zeros_like(codes), torch.ones_like(scale)
    cache.fill(
        {
            "codes.0": zero,
            "codes.1": codes,
            "scale.0": one,
            "scale.1": scale,
            "positions": Span(0, 2),
        }
    )
    empty = torch.zeros(256, 1, 0, 16, device=DEVICE, dtype=dtype)
    memory, _ = cache.update((empty, empty), Span(2, 0))
    q = torch.zeros(256, 1, 1, 16, device=DEVICE, dtype=dtype)
    call = make_call(q, *memory, mask=masks.Causal() & masks.Window(1))
    found, right = KERNEL.run(call).out.cpu(), from_float8(codes, scale, format)[:, :, :1].cpu()
    assert memory[1].float8 is not None
    assert torch.equal(found.isnan(), right.isnan())
    assert torch.equal(found.nan_to_num(7.0), right.nan_to_num(7.0))


@pytest.mark.parametrize("name", ["scale.0", "codes.0", "scale.1", "codes.1"])
def test_another_8_bit_float_is_far(name: str) -> None:
    """The negative control: one part of what is stored differs."""
    case = Stored()
    _, k, v, positions = stored_input(case)
    cache = Float8()
    cache.update((k, v), positions)
    right, held = float8_numbers(cache), dict(cache.contents())
    x = held[name]
    assert isinstance(x, Tensor)
    cache.fill({**held, name: x & 0xF8 if name.startswith("codes") else x * 2})
    keys, values = cache.update(tuple(x[:, :, :0] for x in (k, v)), positions[:, :0])[0]
    with pytest.raises(AssertionError, match="error"):
        assert_stored(stored_call(case, keys, values, positions), *right)


PAGED = [
    Stored(),
    Stored(page=16, dtype=HALF, queries=3, options=SINKS),
    Stored(page=5, D=20, E=24, options=CAPPED),
    Stored(page=64, dtype=WIDE, options=SINKS),
    Stored(page=1, dtype=HALF, heads=20, queries=2),
]


@pytest.mark.parametrize("case", PAGED, ids=str)
def test_decoding_reads_pages(case: Stored) -> None:
    """Two chunks, a fork that shares pages, and NaN in every slot that no row has."""
    _, k, v, positions = stored_input(case)
    cache = Paged(case.page, pages=4 * SLOTS)
    half = SLOTS // 2
    cache.update((k[:, :, :half], v[:, :, :half]), positions[:, :half])
    fork = cache.fork()
    fork.update((v[:, :, half:, :1].expand_as(k[:, :, half:]), v[:, :, half:]), positions[:, half:])
    cache.update((k[:, :, half:], v[:, :, half:]), positions[:, half:])
    owned = {slot for x in (cache, fork) for slot in owned_slots(x)}
    for x in cache.pool.parts:
        free = [i for i in range(x.shape[0] * x.shape[1]) if i not in owned]
        x.view(-1, *x.shape[2:])[free] = math.nan
    (keys, values), places = cache.lazy_memory()
    call = stored_call(case, keys, values, places)
    assert "in pages of" in KERNEL.describe(call)
    n = (positions >= 0).sum(1).tolist()
    numbers = [torch.zeros(2, 2, places.shape[1], x.shape[3], dtype=torch.float64) for x in (k, v)]
    for row, length in enumerate(n):
        for x, held in zip((k, v), numbers, strict=True):
            held[row, :, :length] = x[row, :, SLOTS - length :].double().cpu()
    call = replace(
        call, q_positions=torch.stack([places[i, : n[i]][-case.queries :] for i in (0, 1)])
    )
    assert_stored(call, *numbers)
    assert keys.paged is not None, "nothing was gathered"
    assert values.paged is not None


def test_a_plan_says_in_which_form_a_cache_is_read() -> None:
    """With positions as tensors, for which other kernels look at the numbers."""
    case = Stored()
    q, k, v, positions = stored_input(case)
    cache = Paged(4, pages=40)
    cache.update((k, v), positions)
    memory, places = cache.lazy_memory()
    plan = regard.plan(
        q, *memory, q_positions=places[:, 43:44], k_positions=places, backend="triton"
    )
    assert "in pages of 4 slots" in plan.notes[0]


def owned_slots(cache: Paged) -> list[int]:
    """The pool's numbers of the slots that the rows of a cache hold."""
    size, lengths = cache.pool.page_size, cache._table.lengths
    return [
        row[i // size] * size + i % size
        for row, length in zip(cache.table, lengths, strict=True)
        for i in range(length)
    ]


def test_another_page_is_far() -> None:
    """The negative control: two pages of a row are exchanged."""
    case = Stored(page=16, options=SINKS)
    _, k, v, positions = stored_input(case)
    positions = positions[:1]
    cache = Paged(16, pages=8)
    cache.update((k[:1], v[:1]), positions)
    keys, values = cache.lazy_memory()[0]
    table = keys.paged.table
    table[0, 0], table[0, 1] = int(table[0, 1]), int(table[0, 0])
    with pytest.raises(AssertionError, match="error"):
        assert_stored(
            stored_call(case, keys, values, positions), *(x[:1].double().cpu() for x in (k, v))
        )


@pytest.mark.parametrize("kind", ["pages", "codes", "fp8"])
def test_a_row_of_a_cache_decodes_to_the_same_digits_in_every_batch(kind: str) -> None:
    case = Stored(options=SINKS, bits=4, page=8)
    _, k, v, _ = stored_input(case)
    k, v = k.nan_to_num(), v.nan_to_num()
    positions = torch.arange(SLOTS, device=DEVICE).expand(2, -1)
    caches = {
        "pages": lambda: Paged(8, pages=40),
        "codes": lambda: Quantized(4, group=16, residual=5),
        "fp8": Float8,
    }
    found = []
    for rows in (slice(0, 2), slice(1, 2)):
        cache = caches[kind]()
        memory = cache.update((k[rows], v[rows]), positions[rows])[0]
        if isinstance(cache, Paged):
            memory = cache.lazy_memory()[0]
        q = stored_input(case)[0][rows]
        last = positions[rows, -1:]
        call = make_call(q, *memory, q_positions=last, k_positions=positions[rows], **SINKS)
        found.append(KERNEL.run(call).out)
    assert torch.equal(found[0][1:], found[1])


def test_a_row_decodes_to_the_same_digits_in_every_batch() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (
        torch.randn(3, h, n, 16, generator=draw).to(DEVICE) for h, n in ((4, 1), (2, 70), (2, 70))
    )
    whole = regard.attend(q, k, v, backend="triton")
    for i in range(3):
        row = slice(i, i + 1)
        assert torch.equal(whole[row], regard.attend(q[row], k[row], v[row], backend="triton"))


@pytest.mark.parametrize("case", [Case("window", sink=True), Case("fn"), Case("none")], ids=str)
def test_bfloat16(case: Case) -> None:
    """In the interpreter the kernels compute in fp32 what they load, so that this tests launches
    and conversions; on a GPU it tests the arithmetic.
    """
    assert_forward(run(make(case, torch.bfloat16)), case, torch.bfloat16)


@pytest.mark.parametrize(
    "wrong",
    [
        {"mask": masks.Causal() & masks.Window(8)},
        {"mask": masks.Window(7)},
        {"softcap": 2.0},
        {"sink": None},
        {"scale": 0.3},
        {"bias": biases.ALiBi(4)},
    ],
    ids=str,
)
def test_a_wrong_call_is_far(wrong: dict[str, Any]) -> None:
    """The negative control: the rule tells every option from its neighbour."""
    case = Case("window", sink=True)
    made = make(case, torch.float32)
    made.options.update(wrong)
    if "sink" in wrong:
        made.sink = None
    with pytest.raises(AssertionError, match="error"):
        assert_forward(run(made), case, torch.float32)


def test_a_wrong_gradient_is_far() -> None:
    case = Case("window", bias="alibi")
    made = make(case, torch.float32, gradient=True)
    result = run(made)
    assert result.lse is not None
    found = gradients(made, result.out, result.lse)
    several, right = gradient_answers(replace(case, mask="causal"), torch.float32)
    for i in range(4):
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(found[i], [g[i] for g in several], right[i], GRADIENT)


SEEN = masks.Causal() & masks.Window(8)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=str)
@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_numbers_that_are_not_finite_reach_who_sees_them(where: str, bad: float) -> None:
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 2, 40, n, generator=draw) for n in (16, 16, 24))
    {"q": q, "k": k, "v": v}[where][0, 0, 20, 3] = bad
    v[0, 0, 30, 3] = -math.inf if where == "v" else 0.0
    right = ReferenceKernel().run(make_call(q, k, v, mask=SEEN, wants_lse=True))
    on_device = (x.to(DEVICE) for x in (q, k, v))
    found = KERNEL.run(make_call(*on_device, mask=SEEN, wants_lse=True))
    out = found.out.cpu()
    assert not right.out.isfinite().all() or (where, bad) == ("q", -math.inf)
    assert torch.equal(out.isnan(), right.out.isnan())
    assert torch.equal(out.isinf(), right.out.isinf())
    seen = right.out.isfinite()
    torch.testing.assert_close(out[seen], right.out[seen], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("where", ["q", "k", "v"])
def test_garbage_behind_a_mask_has_no_gradient(where: str) -> None:
    draw = torch.Generator().manual_seed(1)
    q, k, v = (torch.randn(1, 2, 24, 16, generator=draw) for _ in range(3))
    queries = torch.arange(24)[None].clone()
    keys = queries.clone()
    queries[:, 20:] = keys[:, 20:] = -1
    found = []
    for garbage in (0.0, math.nan):
        leaves = [x.clone() for x in (q, k, v)]
        leaves["qkv".index(where)][:, :, 20:] = garbage
        leaves = [x.to(DEVICE).requires_grad_() for x in leaves]
        positions = {"q_positions": queries.to(DEVICE), "k_positions": keys.to(DEVICE)}
        call = make_call(*leaves, mask=masks.Causal(), wants_lse=True, **positions)
        out = KERNEL.run(call).out
        grads = torch.autograd.grad(out[:, :, :20].pow(2).sum(), leaves)
        found.append((out[:, :, :20], *grads))
    for clean, dirty in zip(*found, strict=True):
        assert torch.equal(clean, dirty)


def inputs(B: int = 2) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    return [
        torch.randn(B, h, n, 16, generator=draw).to(DEVICE) for h, n in ((4, 20), (2, 37), (2, 37))
    ]


def test_a_row_is_the_same_alone_and_in_a_batch() -> None:
    q, k, v = inputs()
    whole = KERNEL.run(make_call(q, k, v, mask=SEEN)).out
    alone = KERNEL.run(make_call(q[1:], k[1:], v[1:], mask=SEEN)).out
    assert torch.equal(whole[1:], alone)


def test_gradients_are_the_same_in_every_run() -> None:
    found = []
    for _ in range(2):
        leaves = [x.requires_grad_() for x in inputs()]
        table = torch.randn(8, 4, generator=torch.Generator().manual_seed(4)).to(DEVICE)
        t5 = biases.T5Relative(table.requires_grad_(), max_distance=16)
        slopes = torch.tensor([0.5, 0.1, 0.2, 0.3], device=DEVICE, requires_grad=True)
        bias = t5 + biases.ALiBi(slopes=slopes)
        out = KERNEL.run(make_call(*leaves, mask=SEEN, bias=bias)).out
        found.append(torch.autograd.grad(out.pow(2).sum(), (*leaves, table, slopes)))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_gradients_of_parts_are_those_of_the_whole() -> None:
    q, k, v = (x.requires_grad_() for x in inputs())
    queries, keys = torch.arange(17, 37)[None], torch.arange(37)[None]
    options: dict[str, Any] = {"mask": SEEN, "softcap": 3.0, "backend": "triton"}
    draw = torch.Generator().manual_seed(5)
    d_out = torch.randn(2, 4, 20, 16, generator=draw).to(DEVICE)
    d_lse = torch.randn(2, 4, 20, generator=draw).to(DEVICE)
    positions = {"q_positions": queries.to(DEVICE)}
    whole = regard.attend_partial(q, k, v, **positions, k_positions=keys.to(DEVICE), **options)
    right = torch.autograd.grad((whole.out * d_out).sum() + (whole.lse * d_lse).sum(), (q, k, v))
    halves, d_q = [], torch.zeros_like(q)
    whole = regard.ops.softmax.call.Partial(*(x.detach() for x in whole))
    for part in (slice(0, 19), slice(19, 37)):
        of_part = {**positions, "k_positions": keys[:, part].to(DEVICE), **options}
        g = part_gradients(q, k[:, :, part], v[:, :, part], whole, (d_out, d_lse), **of_part)
        d_q += g[0]
        halves.append(g[1:])
    joined = [torch.cat(x, 2) for x in zip(*halves, strict=True)]
    for a, b in zip((d_q, *joined), right, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


def test_parts_in_fp32_join_to_the_whole() -> None:
    q, k, v = (x.half() for x in inputs())
    queries = torch.arange(17, 37, device=DEVICE)[None]
    keys = torch.arange(37, device=DEVICE)[None]
    parts = [
        regard.attend_partial(
            q, k[:, :, x], v[:, :, x], mask=SEEN, q_positions=queries, k_positions=keys[:, x],
            out_dtype=torch.float32, backend="triton",
        )
        for x in (slice(0, 19), slice(19, 37))
    ]  # fmt: skip
    assert parts[0].out.dtype == torch.float32
    whole = regard.attend(q, k, v, mask=SEEN, backend="triton")
    torch.testing.assert_close(regard.merge(parts).out.half(), whole, rtol=2e-3, atol=2e-3)


def test_second_derivatives_are_those_of_the_definition() -> None:
    found = []
    for backend in ("triton", "reference"):
        leaves = [x.requires_grad_() for x in inputs(1)]
        out = regard.attend(*leaves, mask=SEEN, backend=backend)
        first = torch.autograd.grad(out.pow(2).sum(), leaves, create_graph=True)
        found.append(torch.autograd.grad(sum(x.pow(2).sum() for x in first), leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)
