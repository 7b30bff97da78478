"""Dense masks read as rules: every form that models build, what is nearly one, and what is
remembered.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from regard import masks
from regard.integrations.pytorch.torch_calls import RecognizedMaskCache
from regard.masks import Causal, Dense, Mask, Window
from regard.masks.convert import RecognizedMask, recognize_mask
from regard.span import Span

B, T, S = 2, 7, 11


def band(T: int, S: int, start: int, size: int | None = None) -> Tensor:
    """Causal, and within a window of `size` keys, with the first query at `start`."""
    q = torch.arange(start, start + T)[:, None]
    k = torch.arange(S)
    seen = k <= q
    return seen if size is None else seen & (q - k < size)


def keep(*lengths: tuple[int, int]) -> Tensor:
    """Rows [B, 1, 1, S] whose tokens stand from the first to the second number."""
    k = torch.arange(S)
    return torch.stack([(k >= a) & (k < b) for a, b in lengths])[:, None, None]


CASES: dict[str, tuple[Tensor, Mask | None, int | None]] = {
    "all": (torch.ones(T, S, dtype=torch.bool), None, None),
    "causal, aligned at the last key": (band(T, S, S - T), Causal(), S - T),
    "causal, aligned at the first key": (band(T, S, 0), Causal(), 0),
    "causal, in the middle": (band(T, S, 2), Causal(), 2),
    "window": (band(T, S, S - T, 3), Causal() & Window(3), S - T),
    "window, aligned at the first key": (band(T, S, 0, 3), Causal() & Window(3), 0),
    "one row for each of the batch": (band(T, S, 4).expand(B, 1, T, S), Causal(), 4),
    "the same for every head": (band(T, S, 4).repeat(B, 3, 1, 1), Causal(), 4),
}


@pytest.mark.parametrize("name", CASES)
def test_a_mask_that_is_a_rule_is_recognized(name: str) -> None:
    table, rule, start = CASES[name]
    for mask in (table, torch.where(table, 0.0, -torch.inf)):
        found = recognize_mask(mask, T, S)
        assert str(found.mask) == str(rule)
        assert found.bias is None
        assert not found.uniform_rows
        if start is not None:
            assert isinstance(found.q_positions, Span)
            assert found.q_positions.start == start


@pytest.mark.parametrize("side", ["left", "right", "both"])
@pytest.mark.parametrize("rule", ["padding", "causal", "window"])
def test_padding_is_recognized_alone_and_with_a_rule(side: str, rule: str) -> None:
    rows = {"left": ((0, S), (3, S)), "right": ((0, S), (0, 8)), "both": ((1, 9), (4, S))}[side]
    table = keep(*rows).expand(B, 1, T, S)
    if rule != "padding":
        table = table & band(T, S, S - T, 3 if rule == "window" else None)
    found = recognize_mask(table, T, S)
    assert found.mask is not None
    assert not any(isinstance(term, Dense) for term in found.mask.terms())
    assert_equal(found, table)


def assert_equal(found: RecognizedMask, table: Tensor) -> None:
    """The rule, written out, is the table."""
    assert found.mask is not None
    written = found.mask.block(found.q_positions, Span(0, table.shape[-1]))
    shape = torch.broadcast_shapes(written.shape, table.shape)
    assert torch.equal(written.expand(shape), table.expand(shape))


@pytest.mark.parametrize("name", [name for name in CASES if name != "all"])
def test_one_element_that_differs_leaves_it_dense_or_exact(name: str) -> None:
    table = CASES[name][0]
    for i in range(0, table.numel(), 5):
        changed = table.clone().contiguous()
        changed.view(-1)[i] ^= True
        found = recognize_mask(changed, T, S)
        assert_equal(found, changed)


def test_heads_have_rules_of_their_own() -> None:
    table = torch.stack([band(T, S, 4), band(T, S, 4, 2)])[None]
    found = recognize_mask(table, T, S)
    assert found.mask == masks.Heads((Causal(), Causal() & Window(2)))
    assert_equal(found, table)
    table[0, 1, 3, 0] = True
    found = recognize_mask(table, T, S)
    assert isinstance(found.mask, Dense)
    assert torch.equal(found.mask.table, table)


def test_numbers_that_hide_nothing_are_a_bias() -> None:
    hidden = ~band(T, S, 4)
    bias = torch.randn(B, 3, T, S)
    found = recognize_mask(bias.masked_fill(hidden, -torch.inf), T, S)
    assert str(found.mask) == "causal"
    assert found.bias is not None
    assert torch.equal(found.bias, bias.masked_fill(hidden, 0))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_a_row_that_a_finite_number_hides_is_uniform_in_torch(dtype: torch.dtype) -> None:
    lowest = torch.finfo(dtype).min
    table = band(T, S, 0)
    table[2] = False
    assert recognize_mask(torch.where(table, 0.0, lowest).to(dtype), T, S).uniform_rows
    assert not recognize_mask(torch.where(table, 0.0, -torch.inf).to(dtype), T, S).uniform_rows
    table[2] = True
    assert not recognize_mask(torch.where(table, 0.0, lowest).to(dtype), T, S).uniform_rows


def test_a_mask_is_looked_through_once_until_it_changes() -> None:
    cache = RecognizedMaskCache()
    table = band(T, S, 4)
    first = cache.recognize(table, T, S)
    assert cache.recognize(table, T, S) is first
    assert cache.recognize(table[None, None], T, S).mask is not None
    assert cache.misses == 2  # another shape is another question
    table[0, 0] = False
    changed = cache.recognize(table, T, S)
    assert cache.misses == 3
    assert isinstance(changed.mask, Dense)


def test_memory_that_is_used_again_is_looked_through_again() -> None:
    cache = RecognizedMaskCache(size=4)
    for size in range(1, 6):
        for _ in range(3):
            table = band(T, S, S - T, size).clone()  # freed at once, and likely at the same address
            found = cache.recognize(table, T, S)
            assert str(found.mask) == str(masks.Causal() & masks.Window(size))
            del table, found


def test_a_tensor_of_inference_mode_is_never_remembered() -> None:
    cache = RecognizedMaskCache()
    with torch.inference_mode():
        table = band(T, S, 4)
        cache.recognize(table, T, S)
        table[0, 0] = False
        assert isinstance(cache.recognize(table, T, S).mask, Dense)
    assert cache.misses == 2


@pytest.mark.parametrize("row", [0, 70, 199])
def test_one_wrong_element_of_a_long_mask_is_found(row: int) -> None:
    """Rows are compared some at a time, and the last ones first."""
    for window in (None, 90):
        mask = torch.ones(200, 200, dtype=torch.bool).tril()
        mask = mask if window is None else mask.triu(1 - window)
        assert not isinstance(recognize_mask(mask, 200, 200).mask, Dense)
        mask[row, max(row - 1, 0)] = False
        found = recognize_mask(mask, 200, 200)
        assert_equal(found, mask)
        # the last query of a causal mask may be the only one that is past a window of one key
        is_rule = (row, window) == (199, None)
        assert str(found.mask) == "causal & (window(1) | sinks(198))" if is_rule else True
        assert isinstance(found.mask, Dense) != is_rule


@pytest.mark.parametrize(
    "rule", ["prefix(3) | causal", "window(2, ahead=1)", "document((0, 2, 7))"]
)
def test_what_else_a_tensor_may_be(rule: str) -> None:
    """One recognizer serves tensors and `BlockMask`; its own tests are in tests/masks."""
    mask = masks.parse(rule)
    table = mask.block(Span(0, T), Span(0, T))
    found = recognize_mask(table, T, T)
    assert not isinstance(found.mask, Dense)
    assert_equal(RecognizedMask(found.mask, found.q_positions), table[..., :T])


@pytest.mark.parametrize(
    ("first", "last", "rule"),
    [
        (0, 6, "causal"),
        (2, 6, "causal & window(5)"),
        (0, 10, "None"),
        (10, 10, "causal & window(1)"),
    ],
)
def test_one_query_that_sees_a_range_of_keys(first: int, last: int, rule: str) -> None:
    """A step of decoding with a preallocated cache, whose last slots are empty."""
    table = torch.zeros(1, 1, 1, S, dtype=torch.bool)
    table[..., first : last + 1] = True
    for mask in (table, torch.where(table, 0.0, -torch.inf), table.mT.contiguous().mT):
        found = recognize_mask(mask, 1, S)
        assert str(found.mask) == rule
        if rule != "None":
            assert found.q_positions == Span(last, 1)
            assert_equal(found, table)
    for i in range(first + 1, last):
        changed = table.clone()
        changed[..., i] = False
        assert_equal(recognize_mask(changed, 1, S), changed)
    assert isinstance(recognize_mask(table & False, 1, S).mask, Dense)
