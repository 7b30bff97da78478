"""Every mask that transformers makes, as the rule that is read from it: equal to the dense one,
entry by entry.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import ArgumentError, ArgumentTypeError
from regard.masks import Causal, Dense, Document, Full, Window
from regard.span import Span
from tests.integrations.families import (
    BoolMask,
    MaskRule,
    regard_attention,
    regard_mask,
    transformers,
)

made = transformers.masking_utils
B = 2
# queries, keys, first query, first key
PLACES = {
    "prompt": (7, 7, 0, 0),
    "decode": (1, 8, 7, 0),
    "chunk": (3, 10, 7, 0),
    "sliding decode": (1, 4, 9, 6),
    "sliding chunk": (3, 6, 9, 6),
    "static prompt": (5, 12, 0, 0),
    "static decode": (1, 12, 5, 0),
}
FUNCTIONS = {
    "causal": made.causal_mask_function,
    "bidirectional": made.bidirectional_mask_function,
    "window": made.sliding_window_causal_mask_function(4),
    "wide window": made.sliding_window_causal_mask_function(40),
    "both ways": made.sliding_window_bidirectional_mask_function(3),
    "chunk": made.chunked_causal_mask_function(5, torch.zeros(B, dtype=torch.int64)),
    "late chunk": made.chunked_causal_mask_function(5, torch.tensor([2, 0])),
    "wide chunk": made.chunked_causal_mask_function(50, torch.zeros(B, dtype=torch.int64)),
    "causal or window": made.or_masks(made.causal_mask_function, made.sliding_window_overlay(2)),
}
LENGTH = max(q + at for q, _, at, _ in PLACES.values())


def row(*shown: int, length: int = LENGTH) -> Tensor:
    return torch.tensor([i in shown for i in range(length)])


PADDINGS = {
    "none": None,
    "all tokens": torch.ones(B, LENGTH, dtype=torch.bool),
    "left": torch.stack([row(*range(2, LENGTH)), row(*range(LENGTH))]),
    "right": torch.stack([row(*range(5)), row(*range(LENGTH))]),
    "holes": torch.stack([row(0, 3, 4, 8, 11), row(1, 2, 5, 9)]),
    "an empty row": torch.stack([row(), row(*range(LENGTH))]),
}


def both(function: Any, place: str, keep: Tensor | None, **more: Any) -> tuple[Any, Tensor]:
    q, k, first, start = PLACES[place]
    if keep is not None:
        keep = keep[:, : first + q]  # transformers' 2-D mask ends with the last query
    given = dict(
        batch_size=B,
        q_length=q,
        kv_length=k,
        q_offset=first,
        kv_offset=start,
        mask_function=function,
        attention_mask=keep,
        **more,
    )
    dense = made.sdpa_mask(**(given | {"allow_is_causal_skip": False}))
    return regard_mask(**given), dense


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("name", FUNCTIONS)
def test_the_rule_is_the_dense_mask(name: str, place: str) -> None:
    for padding, keep in PADDINGS.items():
        mask, dense = both(FUNCTIONS[name], place, keep)
        assert isinstance(mask, MaskRule), padding
        assert not isinstance(mask.rule, Dense), padding
        assert mask.shape == dense.shape
        assert torch.equal(mask.dense(), dense), padding


@pytest.mark.parametrize("inner", ["causal", "window", "both ways"])
def test_packed_sequences_are_documents(inner: str) -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3], [5, 6, 7, 8, 9, 10, 0]])
    ids = made.find_packed_sequence_indices(positions)
    function = made.packed_sequence_compatibility_function(FUNCTIONS[inner], positions, ids)
    mask, dense = both(function, "prompt", None)
    assert isinstance(mask, MaskRule)
    assert Document(((0, 3, 7), (0, 6, 7))) in mask.rule.terms()
    assert torch.equal(mask.dense(), dense)
    unpacked, _ = both(FUNCTIONS[inner], "prompt", None)
    assert not torch.equal(unpacked.dense(), dense)


def test_a_packed_chunk_starts_with_its_document_and_stays_dense() -> None:
    positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3]] * 2)
    ids = made.find_packed_sequence_indices(positions)
    chunk = made.chunked_causal_mask_function(2, torch.zeros(B, dtype=torch.int64))
    function = made.packed_sequence_compatibility_function(chunk, positions, ids)
    mask, dense = both(function, "prompt", None)
    assert isinstance(mask.rule, Dense)
    assert torch.equal(mask.dense(), dense)


def test_what_is_unknown_stays_dense() -> None:
    blocks = torch.tensor([[-1, 0, 0, 0, -1, 1, 1]] * B)
    overlay = made.or_masks(made.causal_mask_function, made.blockwise_overlay(blocks))

    def even(batch: Any, head: Any, q: Any, k: Any) -> Any:
        return k % 2 == 0

    for function, vmap in (
        (overlay, False),
        (made.and_masks(made.causal_mask_function, even), True),
    ):
        for keep in (None, PADDINGS["left"]):
            mask, dense = both(function, "prompt", keep, use_vmap=vmap)
            assert isinstance(mask.rule, Dense)
            assert torch.equal(mask.dense(), dense)


def test_what_hides_nothing_is_left_out() -> None:
    """A kernel takes its fast way where it knows that there is nothing to skip."""
    cases = {
        ("window", "prompt"): Window(4) & Causal(),
        ("wide window", "prompt"): Causal(),
        ("wide chunk", "prompt"): Causal(),
        ("causal", "decode"): Full(),
        ("window", "sliding decode"): Full(),
        ("causal", "static decode"): Causal(),
    }
    for (name, place), rule in cases.items():
        for padding in ("none", "all tokens"):
            mask, _ = both(FUNCTIONS[name], place, PADDINGS[padding])
            assert mask.rule == rule, (name, place, mask)
            assert (mask.q_positions, mask.k_positions) == places(place)


def places(place: str) -> tuple[Span, Span]:
    q, k, first, start = PLACES[place]
    return Span(first, q), Span(start, k)


@pytest.mark.parametrize("name", ["Llama", "DeepseekV4"])
def test_a_step_on_a_static_cache_takes_the_tensor_that_its_model_expects(name: str) -> None:
    """It may be compiled, with the mask as its argument, where no rule guards it: bool where the
    class knows sdpa.
    """
    config = getattr(transformers, f"{name}Config")()
    getattr(transformers, f"{name}Model")  # its module is read
    mask = regard_mask(
        B,
        1,
        12,
        q_offset=torch.tensor(5),
        allow_is_causal_skip=False,
        mask_function=FUNCTIONS["causal"],
        config=config,
        dtype=torch.float32,
    )
    assert type(mask) is Tensor
    low = torch.finfo(torch.float32).min
    entries = [True] * 6 + [False] * 6 if name == "Llama" else [0.0] * 6 + [low] * 6
    assert mask.tolist() == [[[entries]]] * B


@pytest.mark.parametrize("size", [0, -1])
def test_a_window_of_nothing_is_refused_where_it_is_used(size: int) -> None:
    """`Qwen2MoeConfig()` makes such a mask, and none of its layers takes it."""
    q, k = torch.randn(B, 2, 7, 4), torch.randn(B, 2, 7, 4)
    functions = {
        "window": made.sliding_window_causal_mask_function(size),
        "both ways": made.sliding_window_bidirectional_mask_function(size),
        "chunk": made.chunked_causal_mask_function(size, torch.zeros(B, dtype=torch.int64)),
    }
    if size == 0:  # a window of 0 on both sides holds the query's own key
        same = regard_mask(B, 7, 7, mask_function=functions.pop("both ways"))
        assert torch.equal(same.dense()[0, 0], torch.eye(7, dtype=torch.bool))
    for function in functions.values():
        for keep in (None, PADDINGS["left"][:, :7]):
            mask = regard_mask(B, 7, 7, mask_function=function, attention_mask=keep)
            assert not mask.dense().any()
            with pytest.raises(
                ArgumentError, match=r"window or chunk of less than one key.*to None"
            ):
                regard_attention(torch.nn.Module(), q, k, k, mask)


def rule() -> MaskRule:
    return MaskRule.make(Causal(), Span(2, 3), Span(0, 5), batch=B)


def test_a_rule_costs_one_element() -> None:
    huge = MaskRule.make(Causal(), Span(0, 1 << 30), Span(0, 1 << 30), batch=4)
    assert huge.shape == (4, 1, 1 << 30, 1 << 30)
    with torch._C.DisableTorchFunctionSubclass():
        assert huge.untyped_storage().nbytes() == 1


def test_what_has_one_meaning_for_bool_masks_is_done() -> None:
    mask, dense = rule(), rule().dense()
    assert dense.tolist() == [[[[j <= i + 2 for j in range(5)] for i in range(3)]]] * B
    assert mask.contiguous() is mask.detach() is mask.clone() is mask
    assert (mask.ndim, mask.dtype, len(mask), mask.size(-1)) == (4, torch.bool, B, 5)
    assert "MaskRule(causal)" in repr(mask)
    other = torch.arange(15).view(1, 1, 3, 5) % 2 == 0
    for done, wanted in (
        (mask & other, dense & other),
        (other | mask, dense | other),
        (mask & mask, dense),
        (mask[:, 0], dense[:, 0]),
        (mask[1:], dense[1:]),
        (mask[:, :, 1], dense[:, :, 1]),
        (mask[torch.tensor([1, 0])], dense),
        (mask.expand(B, 4, 3, 5), dense.expand(B, 4, 3, 5)),
        (mask[:, 0].unsqueeze(1), dense),
    ):
        assert type(done) is BoolMask
        assert torch.equal(done.dense(), wanted)
    assert torch.equal(torch.where(mask, 1.0, 2.0), 2.0 - dense.float())
    assert type(~mask) is Tensor
    assert torch.equal(~mask, ~dense)
    assert torch.equal(~mask[:, 0], ~dense[:, 0])


def test_queries_and_keys_that_are_left_out_leave_a_rule() -> None:
    mask, dense = rule(), rule().dense()
    for part in (
        (slice(None), slice(None), slice(-1, None), slice(None)),
        (slice(None), slice(None), slice(None), slice(0, 4)),
        (Ellipsis, slice(1, 5)),
        (slice(None), slice(None), slice(1, 3)),
    ):
        found = mask[part]
        assert isinstance(found, MaskRule)
        assert torch.equal(found.dense(), dense[part])
    assert (mask[..., 1:].q_positions, mask[..., 1:].k_positions) == (Span(2, 3), Span(1, 4))
    table = MaskRule.make(Dense(dense), Span(2, 3), Span(0, 5), batch=B)
    for index in ((Ellipsis, slice(1, 5)), (slice(None), slice(None), slice(None, None, 2))):
        found = table[index]
        assert not isinstance(found, MaskRule)
        assert torch.equal(found.dense(), dense[index])


scores = torch.zeros(B, 1, 3, 5)
FOREIGN = {
    "add": (
        lambda m: scores + m,
        lambda m: m + scores,
        lambda m: torch.add(scores, m),
        lambda m: scores.clone().add_(m),
    ),
    "mul|rsub|sub": (lambda m: m * 2, lambda m: 1.0 - m, lambda m: m - 1),
    "masked_fill": (
        lambda m: scores.masked_fill(m, 1.0),
        lambda m: m.masked_fill(scores > 0, 0),
        lambda m: scores.clone().masked_fill_(m, 1.0),
    ),
    "cat|stack": (
        lambda m: torch.cat([m, scores], -1),
        lambda m: torch.cat([scores, m]),
        lambda m: torch.stack([m, m]),
    ),
    "lt|gt|eq|ne": (lambda m: m < 0, lambda m: m > 0, lambda m: m == 0, lambda m: m != 0),
    "where": (lambda m: scores.where(m, 1.0), lambda m: torch.where(scores > 0, m, m)),
    "converts a bool mask to torch": (
        lambda m: m.to(torch.bool),
        lambda m: m.to(torch.float32),
        lambda m: m.to(dtype=torch.int64),
        lambda m: m.to(scores),
        lambda m: m.to("cpu", torch.bool),
    ),
    "bool|int|float|long|type_as": (
        lambda m: m.bool(),
        lambda m: m.int(),
        lambda m: m.float(),
        lambda m: m.long(),
        lambda m: m.type_as(scores),
    ),
    "getitem": (lambda m: scores[m],),
    "setitem": (lambda m: m.__setitem__(0, True), lambda m: scores.clone().__setitem__(m, 1.0)),
    "sum|all|any|min": (lambda m: m.sum(), lambda m: m.all(), lambda m: m.any(), lambda m: m.min()),
    "pad": (lambda m: torch.nn.functional.pad(m, (0, 1)),),
    "logical_not": (lambda m: m.logical_not(),),
    "and|or": (lambda m: m & scores.long(), lambda m: m | 1),
    "tolist|unbind|numpy": (lambda m: m.tolist(), lambda m: m.numpy(), list),
    "mT|data": (lambda m: m.mT, lambda m: m.data),
    "scaled_dot_product": (
        lambda m: torch.nn.functional.scaled_dot_product_attention(
            *[torch.zeros(B, 1, 3, 4)] * 1, *[torch.zeros(B, 1, 5, 4)] * 2, attn_mask=m
        ),
    ),
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("kind", ["rule", "dense"])
def test_what_could_be_meant_for_an_additive_mask_is_refused(name: str, kind: str) -> None:
    mask = rule() if kind == "rule" else BoolMask.of(rule().dense())
    for wrong in FOREIGN[name]:
        with pytest.raises(ArgumentError, match=f"({name}).*the model does not support bool masks"):
            wrong(mask)


def test_a_rule_must_fit_its_batch() -> None:
    with pytest.raises(ArgumentError, match="Document"):
        MaskRule.make(Document(((0, 2), (0, 2), (0, 2))), Span(0, 2), Span(0, 2), batch=B)


def test_a_mask_of_another_kind_is_refused() -> None:

    q = torch.randn(1, 2, 3, 4)
    with pytest.raises(ArgumentTypeError, match="attention_mask is str; it must be a tensor"):
        regard_attention(torch.nn.Module(), q, q, q, "causal")
    with pytest.raises(ArgumentError, match=r"attention_mask is \(1, 3\) for 3 queries and 3 keys"):
        regard_attention(torch.nn.Module(), q, q, q, torch.ones(1, 3, dtype=torch.bool))


SMALL = {
    "causal": made.causal_mask_function,
    "window": made.sliding_window_causal_mask_function(3),
    "window alone": made.sliding_window_overlay(3),
    "both ways": made.sliding_window_bidirectional_mask_function(3),
    "chunk": made.chunked_overlay(3, torch.zeros(1, dtype=torch.int64)),
    "bidirectional": made.bidirectional_mask_function,
}


@pytest.mark.parametrize("name", SMALL)
def test_the_rule_is_the_dense_mask_at_every_edge(name: str) -> None:
    """All small places around the sizes at which a rule hides nothing, and a row of tokens that
    ends before its keys.
    """
    for q, k, first in itertools.product((1, 2, 4), range(1, 7), range(5)):
        for keep in (None, torch.ones(1, first + q, dtype=torch.bool)):
            given: dict[str, Any] = {
                "batch_size": 1,
                "q_length": q,
                "kv_length": k,
                "q_offset": first,
                "mask_function": SMALL[name],
                "attention_mask": keep,
            }
            rule = regard_mask(**given)
            dense = made.sdpa_mask(**given, allow_is_causal_skip=False)
            assert torch.equal(rule.dense().expand_as(dense), dense), (q, k, first)
