"""Attention over ranks equals attention in one process: every mask, method, length, option and
gradient.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import cache, partial
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.ops.softmax import Partial
from regard.parallel import Shards, spawn
from regard.span import Span
from tests.parallel import ranks
from tests.parallel.ranks import LENGTHS, MASKS, G, H, S
from tests.rules import GRADIENT, assert_close_rule, in_orders

Case = tuple[str, str, str, str, torch.dtype]

METHODS = ("exchange", "gather", "heads")


def plain_cases(turn: int, methods: Sequence[str] = METHODS) -> list[Case]:
    """Each mask with one of the lengths and every method; the three turns together are all
    combinations.
    """
    return [
        (mask, tuple(LENGTHS)[(i + turn) % 3], method, "plain", torch.float32)
        for i, mask in enumerate(x for x in MASKS if x != "function")
        for method in methods
    ]


OPTIONS: list[Case] = [
    (mask, "zigzag", method, option, dtype)
    for mask, option in (
        ("causal", "sink"),
        ("window", "alibi"),
        ("prefix", "t5"),
        ("none", "softcap"),
    )
    for method in METHODS
    for dtype in (torch.float32, torch.bfloat16)
]


@cache
def references(
    mask: str, option: str, dtype: torch.dtype
) -> tuple[list[list[Tensor]], list[Tensor]]:
    """What one process computes in the dtype, in several orders, and what is exact: neither the
    method nor the lengths of the ranks matter.
    """
    plain = [
        result
        for parts in (1, 3)
        for result in in_orders(partial(expected, mask, option, dtype, dtype, parts))
    ]
    return plain, expected(mask, option, dtype, torch.float64)


def expected(
    mask: str, option: str, given_in: torch.dtype, dtype: torch.dtype, parts: int = 1
) -> list[Tensor]:
    """Output and gradients of one process, in a dtype; over all keys, or joined from parts."""
    given = _converted(ranks.options(option, given_in), dtype)
    q, k, v = (x.to(dtype).requires_grad_() for x in ranks.tensors(given_in))
    if parts == 1:
        z = regard.attend(q, k, v, mask=MASKS[mask], backend="reference", **given)
    else:
        T, S, some = q.shape[2], k.shape[2], given.copy()
        sink, joined, at = some.pop("sink", None), [], 0
        for key, value in zip(k.tensor_split(parts, 2), v.tensor_split(parts, 2), strict=True):
            n = key.shape[2]
            where = {"q_positions": Span(S - T, T), "k_positions": Span(at, n)}
            options = some | where | {"mask": MASKS[mask], "backend": "reference"}
            joined.append(regard.attend_partial(q, key, value, **options))
            at += n
        z = regard.merge(joined, sink=sink).out.to(dtype)
    loss = (z * ranks.weights(given_in).to(dtype)).sum()
    return [z.detach(), *torch.autograd.grad(loss, [q, k, v, *ranks.learned(given)])]


def _converted(given: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    found = dict(given)
    if "sink" in found:
        found["sink"] = found["sink"].detach().to(dtype).requires_grad_()
    if "bias" in found and found["bias"].tensors():
        tensors = [x.detach().to(dtype).requires_grad_() for x in found["bias"].tensors()]
        found["bias"] = found["bias"].with_tensors(tensors)
    return found


def assert_results(case: Case, found: Sequence[Sequence[Tensor]], shards: Shards) -> None:
    """Every rank's output and gradients against one process."""
    mask, _, _, option, dtype = case
    plain, exact = references(mask, option, dtype)
    for i, (*usual, reference) in enumerate(zip(*plain, exact, strict=True)):
        factor = 2.0 if i == 0 else GRADIENT
        what = f"{case}, result {i}"
        if i < 4:
            x = shards.join([rank[i] for rank in found])
            assert_close_rule(x, usual, reference, factor=factor, what=what)
        else:  # a parameter's gradient, the same on every rank
            for rank in found:
                assert torch.equal(rank[i], found[0][i]), what
            assert_close_rule(found[0][i], usual, reference, factor=factor, what=what)


def assert_all(cases: list[Case], W: int) -> None:
    """Run the cases on W ranks, and compare each with one process."""
    results = spawn(ranks.forward_and_backward, W, cases)
    for n, case in enumerate(cases):
        assert_results(case, [rank[n] for rank in results], LENGTHS[case[1]](W))


@pytest.mark.nightly(keep=2)
@pytest.mark.full(keep=1)
@pytest.mark.parametrize("turn", range(3))
@pytest.mark.parametrize("W", [2, 4])
def test_masks_methods_and_lengths(W: int, turn: int) -> None:
    assert_all(plain_cases(turn), W)


@pytest.mark.full
def test_sinks_biases_and_softcaps_in_two_dtypes() -> None:
    assert_all(OPTIONS, 2)


@pytest.mark.full
def test_three_ranks_without_heads() -> None:
    assert_all(plain_cases(0, METHODS[:2]), 3)


def test_heads_are_bitwise_equal_to_one_process() -> None:
    cases: list[Case] = [("causal", "zigzag", "heads", "plain", torch.float32)]
    results = spawn(ranks.forward_and_backward, 2, cases)
    q, k, v = (x.requires_grad_() for x in ranks.tensors())  # as the ranks have it
    z = LENGTHS["zigzag"](2).join([rank[0][0] for rank in results])
    halves = [
        regard.attend(q[:, h : h + 2], k[:, g : g + 1], v[:, g : g + 1], mask=regard.masks.Causal())
        for h, g in ((0, 0), (2, 1))
    ]
    assert torch.equal(z, torch.cat(halves, 1))


@pytest.mark.full
def test_heads_inside_nodes_and_exchange_between_them() -> None:
    cases = [("causal", "sink", torch.float32), ("window", "t5", torch.float32)]
    results = spawn(ranks.mesh, 4, cases)
    for n, (mask, option, dtype) in enumerate(cases):
        case: Case = (mask, "zigzag", "both", option, dtype)
        assert_results(case, [rank[n] for rank in results], Shards.zigzag(S, 4))


def test_queries_and_keys_of_different_lengths() -> None:
    W = 4
    q, k, v = ranks.tensors()
    queries = Shards.even(5, W, start=S - 5)
    usual = regard.attend(q[:, :, -5:], k, v, mask=regard.masks.Causal())
    exact = regard.attend(*(x.double() for x in (q[:, :, -5:], k, v)), mask=regard.masks.Causal())
    results = spawn(ranks.cross_lengths, W)
    for n in range(3):
        assert_close_rule(queries.join([rank[n] for rank in results]), usual, exact)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("mask, option", [("causal", "sink"), ("window", "alibi")])
def test_decoding_over_a_cache_on_several_ranks(mask: str, option: str) -> None:
    given = ranks.options(option, torch.float32)
    q, k, v = ranks.tensors()
    options = {
        "mask": MASKS[mask],
        "q_positions": Span(S - 3, 3),
        **_converted(given, torch.float32),
    }
    usual = regard.attend(q[:, :, -3:], k, v, **options)
    options = {**options, **_converted(given, torch.float64)}
    exact = regard.attend(*(x.double() for x in (q[:, :, -3:], k, v)), **options)
    results = spawn(ranks.decoding, 3, mask, option)
    for z in results:
        assert torch.equal(z, results[0])
    assert_close_rule(results[0].detach(), usual.detach(), exact.detach())


def test_decoding_over_caches_of_every_kind() -> None:
    results = spawn(ranks.decoding_from_caches, 2)
    x, *_ = ranks.tensors()
    for name in ranks.CACHES:
        z = results[0][name][0]
        assert torch.equal(z, results[1][name][0]), name
        k, v, positions = (
            torch.cat([rank[name][i] for rank in results], 2 if i < 3 else 1) for i in (1, 2, 3)
        )
        assert {S - 4, S - 3, S - 2, S - 1} <= set(positions[0].tolist()), name
        options = {"mask": regard.masks.Causal() & regard.masks.Window(8)}
        options |= {"q_positions": Span(S - 1, 1), "k_positions": positions}
        usual = regard.attend(x[:, :, -1:], k, v, **options)
        exact = regard.attend(*(y.double() for y in (x[:, :, -1:], k, v)), **options)
        assert_close_rule(z[:, :, -1:], usual, exact, what=name)
        if name != "quantized":  # the other caches hold what was stored
            k, v = x[:, :G], x[:, H - G :] * 2
            if name == "latent":
                k, v = x[:, :1], x[:, :1, :, : ranks.E]
            parts = x[:, :, -4:], k, v
            options = {"mask": options["mask"], "q_positions": Span(S - 4, 4)}
            usual = regard.attend(*parts, **options)
            exact = regard.attend(*(y.double() for y in parts), **options)
            assert_close_rule(z, usual, exact, what=name)


def joined(change: str) -> Tensor:
    """What the exchange computes, in one process, with one thing wrong."""
    q, k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in ranks.tensors())
    shards, causal = Shards.even(S, 4), regard.masks.Causal()
    parts = []
    for rank in range(4):
        mine = shards.take(q, rank)
        (span,) = shards.spans(rank)
        if change == "shifted by one":
            span = Span(span.start + 1, len(span))
        blocks = []
        for source in range(rank + 1):
            if change == "a step is dropped" and source == rank - 1:
                continue
            part = regard.attend_partial(
                mine,
                shards.take(k, source),
                shards.take(v, source),
                mask=causal,
                q_positions=span,
                k_positions=shards.spans(source)[0],
            )
            lse = part.lse / math.log(2) if change == "base 2" else part.lse
            out = part.out
            if change == "joined in bf16":
                out, lse = out.bfloat16(), lse.bfloat16()
            blocks.append(Partial(out, lse))
        parts.append(regard.merge(blocks).out.float())
    return shards.join(parts)


@pytest.mark.parametrize(
    "change", ["", "shifted by one", "a step is dropped", "base 2", "joined in bf16"]
)
def test_what_is_joined_wrongly_is_noticed(change: str) -> None:
    q, k, v = ranks.tensors()
    usual = regard.attend(q, k, v, mask=regard.masks.Causal())
    reference = references("causal", "plain", torch.float32)[1][0]
    if not change:
        assert_close_rule(joined(change), usual, reference)
        return
    with pytest.raises(AssertionError):
        assert_close_rule(joined(change), usual, reference)


def test_group_sizes_are_those_of_the_tests() -> None:
    assert (H, G) == (4, 2)  # W = 4 has more ranks than key/value heads
