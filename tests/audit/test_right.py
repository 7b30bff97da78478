"""Right code, ours and others', is found to have no fault."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import regard
from regard.inspect import audit
from regard.nn.variants import VARIANTS
from tests.audit.faulty_code import base, calls, steps

SIZES = {"dim": 16, "heads": 4}
GROUPED = {**SIZES, "kv_heads": 2}
WINDOW = {**SIZES, "causal": True, "window": 4}
# what it is -> the code, how it is audited, and checks that must have been made
RIGHT: dict[str, tuple[Any, dict[str, Any], str]] = {
    "sdpa": (
        F.scaled_dot_product_attention,
        {},
        "future, definition, left padding, mask rows, cache",
    ),
    "sdpa, grouped": (F.scaled_dot_product_attention, {"heads": 4, "kv_heads": 2}, "definition"),
    "sdpa, bidirectional": (F.scaled_dot_product_attention, {"causal": False}, "definition, batch"),
    "sdpa, float16": (
        F.scaled_dot_product_attention,
        {"dtype": torch.float16, "heads": 2, "head_dim": 16},
        "large scores, cache",
    ),
    "sdpa, bfloat16": (
        F.scaled_dot_product_attention,
        {"dtype": torch.bfloat16},
        "definition, cache",
    ),
    "attend": (
        regard.attend,
        {"heads": 4, "kv_heads": 2, "strict": True},
        "garbage, empty rows, definition, cache",
    ),
    "nn.MultiheadAttention": (
        nn.MultiheadAttention(16, 4),
        {},
        "masks, weights, definition, left padding, empty rows",
    ),
    "nn.MultiheadAttention, dropout": (
        nn.MultiheadAttention,
        {**SIZES, "options": {"dropout": 0.1}},
        "weights, definition",
    ),
    "by hand": (base.Right, {**GROUPED, "causal": True}, "future, definition"),
    "by hand, window": (base.Right, {**GROUPED, "causal": True, "window": 3}, "window, definition"),
    "by hand, rotary": (base.RightRotary, GROUPED, "definition"),
    "by hand, cache": (base.RightCached, GROUPED, "cache, definition"),
    "by hand, window and cache": (
        base.RightCached,
        WINDOW,
        "window, cache, cache size, definition",
    ),
    "by hand, padding": (
        base.RightPadded,
        GROUPED,
        "masks, padding, left padding, empty rows, mask rows, definition",
    ),
    "by hand, cache inside": (calls.RightInside, SIZES, "cache, definition"),
    "by hand, function": (
        base.attend,
        {"heads": 4, "kv_heads": 2},
        "weights, mask rows, empty rows, definition",
    ),
    "GPT-2's": (base.RightGPT, SIZES, "definition, future, state dict"),
    "rotary": (base.halves, {"adapter": "rotary"}, "relative"),
    "rotary with positions": (steps.rotated, {"adapter": "rotary"}, "relative, precision"),
    "tiny": (lambda: regard.load("tiny"), {}, "future, padding, left padding, cache, parameters"),
}


@pytest.mark.full(keep=["sdpa, bfloat16", "by hand, window and cache"])
@pytest.mark.parametrize("name", RIGHT)
def test_right_code_has_no_fault(name: str) -> None:
    target, options, made = RIGHT[name]
    found = audit(target() if name == "tiny" else target, **options)
    assert found.names == (), str(found)
    missing = set(made.split(", ")) - {check.name for check in found.passed}
    assert missing == set(), str(found)


def test_rows_that_nothing_claims_are_told_and_are_no_fault() -> None:
    """With batch_first, inference takes a fused path that gives NaN there (pytorch #41508); all
    else is right.
    """
    found = audit(nn.MultiheadAttention(16, 4, batch_first=True))
    assert found.exit_code == 0, str(found)
    assert {"definition", "left padding", "masks", "weights"} <= {c.name for c in found.passed}
    why = {skipped.name: skipped.why for skipped in found.not_tried}
    assert "no result is claimed for such rows (--strict)" in why["empty rows"]
    claimed = audit(nn.MultiheadAttention(16, 4, batch_first=True), strict=True)
    assert claimed.names == ("empty-row", "garbage-leak")


OURS = (
    "gqa",
    "mqa",
    "mla",
    "sliding_window",
    "prefix_lm",
    "alibi",
    "retention",
    "gated_delta_net",
    "longformer",
)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", OURS)
def test_mechanisms_of_the_catalogue_have_no_fault(name: str) -> None:
    entry = VARIANTS[name]
    found = audit(entry.example(), dim=32, causal=entry.causal, strict=name in ("gqa", "mla"))
    assert found.names == (), str(found)
    held = {check.name for check in found.passed}
    assert {"repeatable", "batch", "padding", "left padding"} <= held
    if entry.causal:
        assert {"future", "cache"} <= held


def test_what_shows_some_later_tokens_is_not_judged_without_a_claim() -> None:
    found = audit(VARIANTS["prefix_lm"].example(), dim=32)
    assert found.clean
    why = {skipped.name: skipped.why for skipped in found.not_tried}
    assert "give --causal or --bidirectional" in why["future"]
    claimed = audit(VARIANTS["prefix_lm"].example(), dim=32, causal=True)
    assert claimed.names == ("future-leak",)


@pytest.mark.parametrize("seed", (1,))
@pytest.mark.parametrize(
    "name", ["sdpa", "nn.MultiheadAttention", "by hand, window and cache", "sdpa, float16"]
)
def test_no_seed_finds_what_is_not_there(name: str, seed: int) -> None:
    target, options, _ = RIGHT[name]
    assert audit(target, **options, seed=seed).names == ()


def test_a_scale_that_is_claimed_is_right() -> None:
    def unscaled(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return torch.softmax(q @ k.mT, -1) @ v

    assert audit(unscaled).names == ("scale-missing",)
    assert audit(unscaled, scale=1.0).clean


def test_blocking_masks_are_right_when_claimed() -> None:
    def blocking(q: Any, k: Any, v: Any, mask: Any = None) -> torch.Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        return torch.softmax(scores if mask is None else scores.masked_fill(mask, -1e9), -1) @ v

    assert audit(blocking).names == ("mask-polarity",)
    assert audit(blocking, mask="block").clean


def transposed(function: Callable[..., Any]) -> Callable[..., Any]:
    def attend(q: Any, k: Any, v: Any, mask: Any = None) -> Any:
        q, k, v = (x.transpose(1, 2) for x in (q, k, v))
        return function(q, k, v, attn_mask=mask).transpose(1, 2)

    return attend


def test_the_other_layout() -> None:
    attend = transposed(F.scaled_dot_product_attention)
    found = audit(attend, heads=2, head_dim=4, layout="BTHD")
    assert found.clean, str(found)
    assert "q [B,T,H,D]" in found.called
    assert not audit(attend, heads=2, head_dim=4).clean
