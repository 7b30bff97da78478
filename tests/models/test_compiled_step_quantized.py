"""The compiled step with caches that keep older tokens in few bits."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from regard import masks
from regard.caches import Cache, Quantized
from regard.models.decoder import Decoder
from regard.models.generation.decode_session import pad_left
from regard.span import Span
from tests.kernels import require_kernels
from tests.models.step_models import (
    CACHES,
    DTYPES,
    V,
    assert_same_bits,
    assert_same_contents,
    decode,
    full_caches,
    llama,
    prompted,
    step,
    why_not,
)
from tests.rules import assert_close_rule

require_kernels()

BITS = ("8 bits", "4 bits", "2 bits")
IDS = torch.randint(V, (2, 40), generator=torch.Generator().manual_seed(1))


@pytest.mark.full(keep=["4 bits-bfloat16-12"])
@pytest.mark.parametrize("prompt", [3, 12])
@pytest.mark.parametrize("dtype", DTYPES, ids=lambda x: str(x).removeprefix("torch."))
@pytest.mark.parametrize("bits", BITS)
def test_all_bits_are_those_of_the_modules(bits: str, dtype: torch.dtype, prompt: int) -> None:
    """Many groups are filled on the way, the first of them by a compiled step, too; sinks join the
    codes and the recent slots.
    """
    parts = {"H": 8, "G": 4, "activation": nn.ReLU(), "bias": True, "sink": True}
    decoder = llama(**parts).to(dtype)  # type: ignore[arg-type]
    caches, _ = assert_same_bits(decoder, IDS, prompt, kind=bits)
    assert all(cache.quantized > 20 for cache in caches)  # type: ignore[attr-defined]


@pytest.mark.full(keep=["8 bits"])
@pytest.mark.parametrize("bits", BITS)
def test_the_step_equals_the_definition(bits: str, steps: list[int]) -> None:
    """A window, and rows with padding, whose positions are tensors."""
    decoder = llama(mask=masks.Causal() & masks.Window(17), seed=2)
    rows = [[5, 6, 7, 8, 9, 10, 3, 4, 5, 6, 7, 8], [11, 12], [13, 14, 15]]
    ids, positions = pad_left(rows)
    assert isinstance(positions, Tensor)
    ids = torch.cat([ids, torch.randint(V, (3, 20), generator=torch.Generator().manual_seed(3))], 1)
    found, _ = decode(decoder, ids, 12, kind=bits, positions=positions)
    assert len(steps) == 20
    runs = [
        decode(model, ids, 12, kind=bits, positions=positions, backend="reference")[0]
        for model in (decoder, llama(mask=masks.Causal() & masks.Window(17), seed=2).double())
    ]
    assert_close_rule(found, *runs)


def test_many_keys_are_divided_into_splits() -> None:
    decoder = llama(H=8, G=4, activation=nn.ReLU(), bias=True).to(torch.bfloat16)  # type: ignore[arg-type]
    ids = torch.randint(V, (2, 1204), generator=torch.Generator().manual_seed(4))
    assert_same_bits(decoder, ids, 1200, kind="8 bits")


def test_other_codes_fail() -> None:
    """Negative control: the keys of one more group are rounded."""
    decoder = llama(seed=5)
    whole, _ = decode(decoder, IDS, 12, kind="2 bits")
    finer, _ = decode(decoder, IDS, 12, kind="4 bits")
    assert not torch.allclose(whole, finer, rtol=1e-3, atol=1e-3)


def test_a_step_is_undone_and_cropped_and_forked(steps: list[int]) -> None:
    """What a step does in the buffers of a cache stays apart from its forks and snapshots."""
    decoder = llama(seed=6)
    _, caches = decode(decoder, IDS, 12, kind="4 bits")
    count, token = len(steps), torch.tensor([[1], [2]])
    marks, forks = [cache.mark() for cache in caches], [cache.fork() for cache in caches]
    _, untouched = decode(decoder, IDS, 12, kind="4 bits")
    with torch.inference_mode():
        first = step(decoder, token, caches)
        for cache, mark in zip(caches, marks, strict=True):
            cache.restore(mark)
        assert_same_contents(caches, untouched)
        assert torch.equal(step(decoder, token, caches), first)
        assert_same_contents(forks, untouched)
        assert torch.equal(step(decoder, token, forks), first)
        for cache in caches:
            cache.crop(40)
        assert torch.equal(step(decoder, token, caches), first)
    assert len(steps) == count + 28 + 4


def test_asking_changes_nothing() -> None:
    """`why_not` opens slots that nobody fills, also where a group becomes full."""
    decoder = llama(seed=7)
    caches, others = full_caches(decoder, "4 bits"), full_caches(decoder, "4 bits")
    with torch.inference_mode():
        for t in range(20):
            step(decoder, IDS[:, t : t + 1], caches)
            step(decoder, IDS[:, t : t + 1], others)
            assert why_not(decoder, caches, 2) == []
            assert why_not(decoder, caches, 2) == []
            assert_same_contents(caches, others)


def _cache_of(cache: Quantized) -> Callable[[Decoder], list[Cache]]:
    def prompt(decoder: Decoder) -> list[Cache]:
        caches: list[Cache] = [Quantized(**cache.settings) for _ in decoder.layers]  # type: ignore[arg-type]
        with torch.inference_mode():
            step(decoder, IDS[:, :12], caches)
        return caches

    return prompt


def _outlier(decoder: Decoder) -> list[Cache]:
    caches = full_caches(decoder, "4 bits")
    memory = torch.randn(2, 2, 12, 32)
    memory[0, 0, 0, 0] = torch.inf
    for cache in caches:
        cache.update((memory, memory), Span(0, 12))
    return caches


REFUSED: dict[str, tuple[Callable[[Decoder], list[Cache]], str]] = {
    "outlier": (_outlier, "opens no slot"),
    "axes": (
        _cache_of(Quantized(8, group=4, residual=1, axes=("token", "token"))),
        "other parts than keys and values",
    ),
    "exact": (_cache_of(Quantized(8, group=4, axes=("exact", "token"))), "opens no slot"),
    "no recent slot": (_cache_of(Quantized(8, group=1, residual=0)), "opens no slot"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_left_to_the_modules(case: str, steps: list[int]) -> None:
    decoder = llama(seed=8)
    make, reason = REFUSED[case]
    caches = make(decoder)
    with torch.inference_mode():
        (said,) = why_not(decoder, caches, 2)
        step(decoder, IDS[:, 12:13], caches)
    assert reason in said
    assert steps == []


def test_a_fresh_cache_is_not_asked_for_codes() -> None:
    decoder = llama()
    caches = prompted(decoder, "8 bits")
    slot = caches[0].open_slot(Span(3, 1))
    assert slot is not None
    assert slot.coded is None
    assert set(BITS) < set(CACHES)
