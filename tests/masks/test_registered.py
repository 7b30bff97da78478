"""Every mask of the package is compared with brute force, and keeps what its class promises: how
far it reaches, what it prints, what a file holds of it, whether it can change. A new mask without
a case fails here, and so does one whose promise is wrong.
"""

from __future__ import annotations

import importlib
import types
from collections.abc import Callable, Iterator
from typing import Any, get_args

import pytest
import torch
from torch import Tensor

from regard import masks
from regard.errors import ArgumentError
from regard.masks import MASKS, Mask, parse
from regard.masks.base import RefusalKey
from regard.masks.parse import parsable_masks
from regard.registry import is_builtin
from regard.serialization import NotSerializable, from_data, to_data
from regard.span import Span
from tests.masks.brute import BY_SLOT, CASES, B, Case, H, assert_brute_force, covered, pairs

FAR = 24
CALLS = ((Span(0, 11), Span(0, 11)), (Span(6, 4), Span(0, 10)), (Span(13, 1), Span(0, 14)))


def uncovered(cases: dict[str, Case] = CASES) -> set[str]:
    """Kinds of the package without a case."""
    own = {name for name, kind in MASKS if is_builtin(kind)}
    return own - covered(cases) - set(BY_SLOT)


def test_every_mask_has_a_case() -> None:
    assert uncovered() == set(), "write a case in tests/masks/brute.py for each of these masks"


def test_a_mask_without_a_case_is_noticed() -> None:
    without = {name: case for name, case in CASES.items() if "strided" not in covered({"": case})}
    assert uncovered(without) == {"strided"}


def test_each_exception_is_a_mask_that_cannot_have_a_case() -> None:
    for kind in BY_SLOT:
        found = MASKS.find(kind)
        table = torch.ones(1, 1, 2, 2, dtype=torch.bool)
        mask = found(table, 2) if kind == "selected" else found(table)  # type: ignore[call-arg]
        with pytest.raises(ArgumentError):
            mask.allows(torch.zeros(1, 1, 2, 1), torch.zeros(1, 1, 1, 2))


def assert_within_reach(mask: Mask, rule: Callable[[int, int, int, int], bool]) -> None:
    """No query sees an old key that the mask does not say it reaches."""
    bound = mask.reach()
    if bound.window is None:
        return
    for q in range(FAR):
        for k in range(q - bound.window + 1):
            if k >= bound.sinks:
                assert not any(rule(q, k, b, h) for b in range(B) for h in range(H)), (q, k, bound)


def assert_is_causal_from(mask: Mask, rule: Callable[[int, int, int, int], bool]) -> None:
    """From the position that the mask says, no query sees a later key."""
    first = mask.causal_from()
    for k in range(FAR if first is None else min(first, FAR), FAR):
        for q in range(k):
            assert not any(rule(q, k, b, h) for b in range(B) for h in range(H)), (q, k, first)


def assert_reads_what_it_prints(mask: Mask) -> None:
    """Text is read back as the mask, where text can name it and every mask in it."""
    named = parsable_masks()
    if all(x.kind in named or x.operands() or x.kind == "not" for x in (mask, *inside(mask))):
        again = parse(str(mask))
        assert again == mask
        assert hash(again) == hash(mask)
        assert str(again) == str(mask)


def assert_is_what_its_data_says(mask: Mask) -> None:
    """Plain data and tensors make the same mask again."""
    kept: dict[str, Tensor] = {}

    def keep(x: Tensor) -> str:
        kept[f"t{len(kept)}"] = x
        return f"t{len(kept) - 1}"

    def data(x: Any) -> dict[str, object]:
        return to_data(x, keep, data)

    def back(x: object) -> Mask:
        return from_data(MASKS, x, kept, back)

    try:
        found = data(mask)
    except NotSerializable:
        assert any(callable(getattr(x, "rule", None)) for x in (mask, *inside(mask)))
        return
    assert back(found) == mask


def assert_can_be_kept_if_static(mask: Mask) -> None:
    """A mask is static if no tensor and no function is in it."""
    tensors: list[Tensor] = []
    mask.with_tensors(lambda x: tensors.append(x) or x)
    functions = any(callable(getattr(x, "rule", None)) for x in (mask, *inside(mask)))
    assert mask.is_static == (not tensors and not functions)


def assert_copies(mask: Mask) -> None:
    """Over copies of its tensors the mask says the same, and the caller's tensors are out of it."""
    copy = mask.with_tensors(torch.clone)
    assert mask.with_tensors(lambda x: x) is mask
    assert (copy is mask) == (copy == mask)
    for q, k in CALLS:
        assert copy.block(q, k).equal(mask.block(q, k))


def assert_is_cut_by_heads(mask: Mask) -> None:
    """The mask of some heads says what the whole says of them."""
    q, k = CALLS[0]
    whole = mask.block(q, k).expand(B, H, -1, -1)
    for h in range(H):
        found = mask.select_heads(slice(h, h + 1)).block(q, k)
        assert found.shape[1] == 1
        assert found.expand(B, -1, -1, -1).equal(whole[:, h : h + 1])


def assert_near_misses_differ(mask: Mask) -> None:
    """What a wrong kernel may have computed instead is another mask, and prints as another."""
    for other in mask.near_misses():
        assert str(other) != str(mask)
        assert any(not other.block(q, k).equal(mask.block(q, k)) for q, k in CALLS)


def inside(mask: Mask) -> Iterator[Mask]:
    """The masks in a mask, at any depth."""
    for x in mask.members():
        yield x
        yield from inside(x)


def assert_mask(case: Case) -> None:
    """Everything that a mask promises holds: of the mask, of its opposite, and joined to others."""
    mask, rule = case
    for q, k in CALLS:
        assert_brute_force(mask, rule, q, k, sizes=((3, 4), (1, 1)))
    q, k = CALLS[1]
    assert_brute_force(~mask, lambda q, k, b, h: not rule(q, k, b, h), q, k)
    causal, sinks = masks.Causal(), masks.Sinks(2)
    assert_brute_force(mask & causal, lambda q, k, b, h: rule(q, k, b, h) and k <= q, q, k)
    assert_brute_force(sinks | mask, lambda q, k, b, h: rule(q, k, b, h) or k < 2, q, k)
    assert_within_reach(mask, rule)
    assert_within_reach(mask & causal, lambda q, k, b, h: rule(q, k, b, h) and k <= q)
    assert_within_reach(sinks | mask, lambda q, k, b, h: rule(q, k, b, h) or k < 2)
    assert_is_causal_from(mask, rule)
    assert_is_causal_from(mask & causal, lambda q, k, b, h: rule(q, k, b, h) and k <= q)
    assert_is_causal_from(sinks | mask, lambda q, k, b, h: rule(q, k, b, h) or k < 2)
    assert_reads_what_it_prints(mask)
    assert_is_what_its_data_says(mask)
    assert_can_be_kept_if_static(mask)
    assert_copies(mask)
    assert_is_cut_by_heads(mask)
    assert_near_misses_differ(mask)
    assert mask.refusal().key in get_args(RefusalKey)
    assert mask.refusal().words


@pytest.mark.parametrize("name", CASES)
def test_what_a_mask_promises_holds(name: str) -> None:
    assert_mask(CASES[name])


@pytest.mark.parametrize("name", CASES)
def test_allows_is_the_rule(name: str) -> None:
    mask, rule = CASES[name]
    q, k = torch.arange(9).view(1, 1, 9, 1), torch.arange(12).view(1, 1, 1, 12)
    found = mask.allows(q, k).expand(B, H, 9, 12)
    assert found.tolist() == pairs(rule, Span(0, 9), Span(0, 12))


WORDS = {
    "causal": ("future", "future", "causal"),
    "window(3)": ("outside window 3", "outside", "window(3)"),
    "window(3, ahead=1)": ("outside window 3, 1 ahead", "outside", "window(3, ahead=1)"),
    "chunk(4)": ("other chunk of 4", "chunk", "chunk(4)"),
    "dilated(2, 3)": ("outside the steps of dilated(2, 3)", "outside", "dilated(2, 3)"),
    "dilated(2, 3, ahead=1)": (
        "outside the steps of dilated(2, 3, ahead=1)",
        "outside",
        "dilated(2, 3, ahead=1)",
    ),
    "blockcausal(4)": ("later block of 4", "future", "blockcausal(4)"),
    "blockdiffusion(2, 5)": (
        "outside the blocks of blockdiffusion(2, 5)",
        "outside",
        "blockdiffusion(2, 5)",
    ),
    "neighborhood((4, 4), 3)": (
        "outside neighborhood((4, 4), 3)",
        "outside",
        "neighborhood((4, 4), 3)",
    ),
    "sinks(4)": ("after the first 4", "outside", "sinks(4)"),
    "global((1,))": ("not global", "outside", "global((1,))"),
    "strided(4)": ("outside strided(4)", "outside", "strided(4)"),
    "document((0, 3))": ("other document", "document", "document((0, 3))"),
    "padding((((0, 2),),))": ("padding", "padding", "padding((((0, 2),),))"),
    "~window(3)": ("inside window 3", "inside", "window(3)"),
    "~strided(4)": ("inside strided(4)", "inside", "strided(4)"),
    "~causal": ("inside causal", "inside", "causal"),
}


@pytest.mark.parametrize("text", WORDS)
def test_words_of_a_refusal(text: str) -> None:
    assert parse(text).refusal() == WORDS[text]


def test_words_of_masks_that_the_caller_gave() -> None:
    table = torch.ones(1, 1, 2, 2, dtype=torch.bool)
    assert masks.Dense(table).refusal()[:2] == ("not allowed by the given matrix", "given")
    assert masks.Selected(table, 2).refusal()[:2] == ("not selected", "selected")
    rule = masks.Fn(lambda q, k: k <= q, "past")
    assert rule.refusal() == ("not allowed by the given function", "given", "past")


def test_what_speaks_of_slots() -> None:
    dense = masks.Dense(torch.ones(2, 2).bool())
    assert all(
        mask.by_slot
        for mask in (dense, ~dense, masks.Causal() & dense, masks.Heads((masks.Full(), ~dense)))
    )
    assert not any(case.mask.by_slot for case in CASES.values())


def test_tables_of_slots_are_cut_by_heads() -> None:
    table = torch.tensor([[[[True, False]], [[False, True]]]])
    q, k = Span(1, 1), Span(0, 2)
    for mask in (masks.Dense(table), masks.Selected(table, 1)):
        assert mask.select_heads(slice(1, 2)).block(q, k).equal(mask.block(q, k)[:, 1:])
        one = type(mask)(table[:, :1], *([1] if mask.kind == "selected" else []))
        assert one.select_heads(slice(1, 2)) is one


def test_numbers_beyond_64_bits_are_refused() -> None:
    with pytest.raises(ArgumentError, match=r"it must be at most .* positions have 64 bits"):
        masks.Window(1 << 63)


def test_a_function_for_another_shape_is_refused() -> None:
    with pytest.raises(ArgumentError, match="a shape that broadcasts to"):
        masks.Fn(lambda q, k: torch.ones(3, 3).bool()).block(Span(0, 2), Span(0, 5))


@pytest.fixture
def toys() -> Iterator[types.ModuleType]:
    """The toy masks, which are entered while a test runs only."""
    with MASKS.temporary():
        yield importlib.reload(importlib.import_module("tests.masks.toys"))


def test_right_toys_pass(toys: types.ModuleType) -> None:
    for case in toys.RIGHT.values():
        assert_mask(case)


@pytest.mark.parametrize(
    "promise",
    [
        "rule",
        "intervals",
        "tiles",
        "reach",
        "causal from",
        "data",
        "static",
        "copies",
        "text",
        "near misses",
        "words",
        "heads",
    ],
)
def test_a_mask_that_breaks_a_promise_is_caught(promise: str, toys: types.ModuleType) -> None:
    with pytest.raises(AssertionError):
        assert_mask(toys.WRONG[promise])


def test_every_wrong_toy_is_tried(toys: types.ModuleType) -> None:
    assert len(toys.WRONG) == 12


def test_a_toy_is_known_by_name_and_forgotten_again(toys: types.ModuleType) -> None:
    assert parse("causal & stripes(3)") == masks.Causal() & toys.Stripes(3)
    MASKS.remove(toys.Stripes)
    with pytest.raises(ArgumentError, match='unknown mask "stripes"'):
        parse("stripes(3)")


def test_an_error_of_a_users_class_shows_the_place(toys: types.ModuleType) -> None:
    with pytest.raises(ArgumentError, match="picky: only odd numbers\\n  causal & picky"):
        parse("causal & picky(2)")
    assert parse("picky(3)") == toys.Picky(3)
