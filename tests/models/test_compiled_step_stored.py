"""The compiled step of decoders whose weights are stored in fewer bits, against their modules and
against the dequantized matrices in fp64.
"""

from __future__ import annotations

import itertools
import pickle
from dataclasses import replace

import pytest
import torch
from torch import nn

from regard import huge_pages
from regard.models.compiled_step import PreparedDecoder
from regard.models.decoder import Decoder
from regard.nn.weights import (
    Linear,
    stored_modules,
    stored_to_huge_pages,
)
from regard.ops import tokenwise
from regard.ops.stored_linear import MAX_VECTORS, stored_linear
from regard.ops.stored_weights import HalfWeight, Int4Weight, Int8Weight
from tests.kernels import require_kernels
from tests.models.step_models import (
    DTYPES,
    KINDS,
    M,
    Store,
    V,
    assert_equals_modules,
    assert_leaves_step,
    assert_same_bits,
    decode,
    full_caches,
    in_double,
    in_few_bits,
    llama,
    why_not,
)
from tests.rules import assert_close_rule

require_kernels()

STORE: dict[str, Store] = {
    "int8": Int8Weight.quantize,
    "int8-32": lambda w: Int8Weight.quantize(w, group=32),
    "int4": Int4Weight.quantize,
    "int4-64": lambda w: Int4Weight.quantize(w, group=64),
    "float16": lambda w: HalfWeight.round(w, torch.float16),
    "bfloat16": lambda w: HalfWeight.round(w, torch.bfloat16),
}
CASES = [(form, dtype) for form in list(STORE)[:4] for dtype in DTYPES]
CASES += [("float16", torch.float32), ("bfloat16", torch.float32)]
IDS = torch.randint(V, (2, 13), generator=torch.Generator().manual_seed(1))


@pytest.mark.full(keep=["bfloat16-qwen2", "float32-llama"])
@pytest.mark.parametrize("kind", ["llama", "qwen2", "gemma2", "window"])
@pytest.mark.parametrize(("form", "dtype"), CASES, ids=lambda x: str(x).removeprefix("torch."))
def test_the_step_equals_the_modules(form: str, dtype: torch.dtype, kind: str) -> None:
    """Sizes that no group divides (136 hidden units, heads of 24), biases, and a tied head."""
    decoder = in_few_bits(llama(**KINDS[kind]).to(dtype), STORE[form])  # type: ignore[arg-type]
    assert_equals_modules(decoder, IDS, 9)


@pytest.mark.full(keep=["bfloat16-1", "float32-3"])
@pytest.mark.parametrize("rows", [1, 3, MAX_VECTORS])
@pytest.mark.parametrize(("form", "dtype"), CASES, ids=lambda x: str(x).removeprefix("torch."))
def test_all_bits_are_those_of_the_modules(form: str, dtype: torch.dtype, rows: int) -> None:
    """The same loops compute both. The activation is a ReLU, as SiLU of torch rounds otherwise."""
    parts = {"H": 8, "G": 4, "activation": nn.ReLU(), "bias": True}
    decoder = in_few_bits(llama(**parts).to(dtype), STORE[form])  # type: ignore[arg-type]
    ids = torch.randint(V, (rows, 12), generator=torch.Generator().manual_seed(2))
    assert_same_bits(decoder, ids, 9)


@pytest.mark.parametrize("threads", [1, 2])
def test_stored_and_plain_layers_mix(threads: int) -> None:
    before = torch.get_num_threads()
    most = tokenwise.MAX_VECTORS[torch.float32]
    forms = (STORE["int4"], None, STORE["int8"], STORE["int8-32"], STORE["float16"])
    decoder = in_few_bits(llama(bias=True, layers=3), *forms)
    assert {x.form for _, x in stored_modules(decoder)} == {"int4", "int8", "half"}
    try:
        torch.set_num_threads(threads)
        caches = assert_equals_modules(decoder, IDS, 9)
    finally:
        torch.set_num_threads(before)
    with torch.inference_mode():
        (said,) = why_not(decoder, caches, most + 1)
    assert f"{most + 1} rows" in said
    assert f"more than {most}" in said


@pytest.mark.parametrize("rows", [1, 3])
def test_forms_of_one_phase_pack_their_vectors_anew(rows: int) -> None:
    """Loops of 4-bit and of 8-bit codes order bf16 vectors differently; both read the same ones."""
    decoder = llama(H=8, G=4, activation=nn.ReLU(), bias=True).to(torch.bfloat16)  # type: ignore[arg-type]
    decoder = in_few_bits(decoder, STORE["int8"], STORE["int4"], STORE["int8-32"])
    ids = torch.randint(V, (rows, 12), generator=torch.Generator().manual_seed(3))
    assert_same_bits(decoder, ids, 9)


def test_another_weight_fails_the_rule() -> None:
    """Negative controls: nibbles in another order, and scales of the next group."""
    decoder = in_few_bits(llama(), STORE["int4-64"])
    plain, _ = decode(decoder, IDS, 9, backend="reference")
    exact, _ = decode(in_double(decoder), IDS, 9, backend="reference")
    down = decoder.layers[1].feed_forward.down
    record = down.stored_weight
    codes = ((record.codes & 15) << 4) | (record.codes >> 4)
    for wrong in (replace(record, codes=codes), replace(record, scales=record.scales.roll(1, -1))):
        down.stored_weight = wrong
        found, _ = decode(decoder, IDS, 9)
        with pytest.raises(AssertionError):
            assert_close_rule(found, plain, exact)
    down.stored_weight = record
    found, _ = decode(decoder, IDS, 9)
    assert_close_rule(found, plain, exact)


def test_changed_records_are_used(steps: list[int]) -> None:
    """Numbers in place, memory, and whole records: the next step sees each change."""
    decoder = in_few_bits(llama(), STORE["int8"])
    up, seen = decoder.layers[0].feed_forward.up, []

    def double_scales() -> None:
        up.stored_weight.scales.mul_(2)

    def other_memory() -> None:
        up.stored_weight.codes.data = up.stored_weight.codes.flip(0)

    def other_record() -> None:
        up.stored_weight = replace(up.stored_weight, codes=-up.stored_weight.codes)

    def plain_again() -> None:
        weight = up.weight
        up.__class__ = Linear
        del up.stored_weight
        up.weight = nn.Parameter(weight * 0.5, requires_grad=False)

    for change in (None, double_scales, other_memory, other_record, plain_again):
        if change is not None:
            change()
        found, _ = decode(decoder, IDS, 12)
        exact, _ = decode(in_double(decoder), IDS, 12, backend="reference")
        torch.testing.assert_close(found, exact.float(), rtol=1e-4, atol=1e-4)
        seen.append(found)
    assert len(steps) == 5
    assert not any(torch.equal(x, y) for x, y in itertools.pairwise(seen))


def _other_dtype(decoder: Decoder) -> None:
    up = decoder.layers[1].feed_forward.up
    up.stored_weight = replace(up.stored_weight, dtype=torch.bfloat16)


def _strided(decoder: Decoder) -> None:
    up = decoder.layers[1].feed_forward.up
    twice = up.stored_weight.codes.repeat_interleave(2, 0)
    up.stored_weight = replace(up.stored_weight, codes=twice[::2])


def _subclass(decoder: Decoder) -> None:
    up = decoder.layers[1].feed_forward.up
    up.__class__ = type("Other", (type(up),), {})


REFUSED = {
    "dtype": (_other_dtype, "stored as int8 computes in torch.bfloat16"),
    "strides": (_strided, "is not plain, contiguous and on a CPU"),
    "subclass": (_subclass, "a linear map is Other"),
    "rows": (lambda _: None, f"more than {MAX_VECTORS}"),
}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("case", REFUSED)
def test_what_leaves_the_step_and_why(case: str) -> None:
    rows = MAX_VECTORS + 1 if case == "rows" else 1
    assert_leaves_step(in_few_bits(llama(), STORE["int8"]), *REFUSED[case], rows)


def test_a_record_that_was_pickled_has_addresses_of_its_own() -> None:
    record = Int8Weight.quantize(torch.randn(5, M, generator=torch.Generator().manual_seed(3)))
    x = torch.randn(1, M, generator=torch.Generator().manual_seed(4))
    y = stored_linear(x, record)
    assert record.matrix_struct is not None
    again = pickle.loads(pickle.dumps(record))
    assert "_last_layout" not in vars(again)
    assert "matrix_struct" not in vars(again)
    assert again.layout != record.layout
    assert torch.equal(stored_linear(x, again), y)


def test_a_tensor_of_a_record_that_gets_other_memory() -> None:
    record = Int8Weight.quantize(torch.randn(5, M, generator=torch.Generator().manual_seed(3)))
    for x in torch.randn(2, M), torch.randn(40, M):  # compiled loops; torch's product
        stored_linear(x, record)
        record.codes.data = record.codes.flip(0).clone()
        exact = x.double() @ record.dequantize().double().T
        torch.testing.assert_close(stored_linear(x, record), exact.float(), rtol=1e-4, atol=1e-4)


def test_small_records_move_together_and_one_is_pickled_alone() -> None:
    decoder = in_few_bits(llama(layers=48), STORE["int8"])
    before, _ = decode(decoder, IDS, 9)
    stored_to_huge_pages(decoder)
    records = [x for _, x in stored_modules(decoder)]
    assert sum(x.bytes for x in records) > huge_pages.HUGE_PAGE_THRESHOLD
    places = {x.codes.data_ptr() for x in records if isinstance(x, Int8Weight)}
    assert max(places) - min(places) < sum(x.bytes + 256 for x in records)
    assert decoder.head.stored_weight is decoder.embed.embedding.stored_weight
    found, _ = decode(decoder, IDS, 9)
    assert torch.equal(found, before)
    assert len(pickle.dumps(records[0])) < records[0].bytes + 4000
    layers = torch.nn.Sequential(nn.ReLU())
    stored_to_huge_pages(layers)  # nothing to move


@pytest.mark.full(keep=3)
@pytest.mark.parametrize(("form", "dtype"), [(None, torch.float32), *CASES], ids=str)
def test_tokens_of_one_row_have_the_bits_of_single_steps(
    form: str | None, dtype: torch.dtype, steps: list[int]
) -> None:
    """Generation verifies proposed tokens so, and takes back wrong ones; only products with 16-bit
    floats divide their sums by the number of vectors.
    """
    decoder = llama(**KINDS["llama"]).to(dtype)  # type: ignore[arg-type]
    if form is not None:
        in_few_bits(decoder, STORE[form])
    ids = torch.randint(V, (1, 17), generator=torch.Generator().manual_seed(4))
    single, _ = decode(decoder, ids, 9)
    prepared, caches = PreparedDecoder(decoder), full_caches(decoder, "growing")
    with torch.inference_mode():
        decoder(ids[:, :9], None, caches)
        for T in range(2, 9):
            prepared((ids[:, 9 : 9 + T] + 1) % V, None, caches)
            for cache in caches:
                cache.crop(9)
            found = prepared(ids[:, 9 : 9 + T], None, caches)
            for cache in caches:
                cache.crop(9)
            if form in ("float16", "bfloat16"):
                assert float((found - single[:, :T]).abs().max()) < 1e-5 * float(single.abs().max())
            else:
                assert torch.equal(found, single[:, :T])
    assert len(steps) == 8 + 14
