"""What a caller may give: masks of the other polarity are pointed out, positions have defaults."""

from __future__ import annotations

import warnings

import pytest
import torch

import regard
from regard import Span
from regard.ops.softmax.call import default_query_positions


def test_an_inverted_mask_is_pointed_out() -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8).unbind(0)
    drop = torch.ones(20, 20, dtype=torch.bool).triu(1)
    with pytest.warns(
        UserWarning, match=r"the mask hides from every query its own key; it may be inverted"
    ):
        wrong = regard.attend(q, k, v, mask=drop)
    right = regard.attend(q, k, v, mask=regard.masks.from_drop(drop))
    assert torch.allclose(right, regard.attend(q, k, v, mask=regard.masks.Causal()), atol=1e-6)
    assert not torch.allclose(wrong, right, atol=1e-2)


def test_a_mask_that_means_it_is_not() -> None:
    q, k, v = torch.randn(3, 1, 2, 20, 8).unbind(0)
    drop = torch.ones(20, 20, dtype=torch.bool).triu(1)
    nothing = torch.zeros(20, 20, dtype=torch.bool)  # it hides all keys, and has no polarity
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        meant = regard.attend(q, k, v, mask=regard.masks.Dense(drop))
        not_square = regard.attend(q[:, :, :1], k, v, mask=nothing[:1])
        hidden = regard.attend(q, k, v, mask=nothing)
    assert [str(one.message) for one in said] == []
    later = (q @ k.mT / 8**0.5).masked_fill(~drop, -torch.inf)[:, :, :-1].softmax(-1) @ v
    torch.testing.assert_close(meant[:, :, :-1], later)
    assert not meant[:, :, -1].any()
    assert not not_square.any()
    assert not hidden.any()


def test_queries_are_the_last_of_the_keys() -> None:
    assert default_query_positions(Span(0, 5), 2) == Span(3, 2)
    assert default_query_positions(Span(0, 2), 5) == Span(-3, 5, tokens=True)
    keys = torch.tensor([[-1, -1, 0, 1]])
    assert default_query_positions(keys, 3).tolist() == [[-1, 0, 1]]
    with pytest.raises(
        regard.ArgumentError, match=r"5 queries for 4 keys with k_positions: pass q_positions"
    ):
        default_query_positions(keys, 5)


def test_queries_are_not_put_into_empty_slots_behind_the_keys() -> None:
    source = torch.tensor([[0, 1, 2, 3], [0, 1, -1, -1]])
    assert default_query_positions(source, 4) is not None  # the queries are those tokens
    assert default_query_positions(torch.full((1, 4), -1), 2).tolist() == [[-1, -1]]
    q, kv = torch.randn(2, 1, 3, 8), torch.randn(2, 1, 4, 8)
    with pytest.raises(
        regard.ArgumentError,
        match=r"^row 1 of k_positions ends in an empty slot \(-1\). By default the last 3 of its "
        r"4 slots "
        r"are the queries, and a query in an empty slot sees nothing: pass q_positions as well$",
    ):
        regard.attend(q, kv, kv, k_positions=source)
    out = regard.attend(q, kv, kv, k_positions=source, q_positions=Span(0, 3))
    assert out.norm(dim=-1).gt(0).all()


@pytest.mark.parametrize("backend", ["sdpa", "tiled", "reference", "flex"])
def test_autocast_converts_the_inputs_and_nothing_else(backend: str) -> None:
    q, k, v = torch.randn(3, 1, 2, 32, 8).unbind(0)
    options = {"mask": regard.masks.Causal(), "backend": backend}
    plain = regard.attend(*(x.bfloat16() for x in (q, k, v)), **options)
    weights = regard.attention_weights(q.bfloat16(), k.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        assert (q @ k.mT).dtype == torch.bfloat16  # it is on
        assert torch.equal(regard.attend(q, k, v, **options), plain)
        assert torch.equal(regard.attention_weights(q, k), weights)
