"""The formulas of softmax attention and of states, counted product by product and pair by pair."""

from __future__ import annotations

import pytest

from regard.cost.fixed_state import ShortConvolution, delta_flops, linear_flops, linear_state
from regard.cost.report import KVFormat, bits_per_value
from regard.cost.softmax import (
    CausalKeys,
    CrossSpec,
    NearbyKeys,
    SoftmaxSpec,
    additive_flops,
    attention_bytes,
    attention_flops,
    causal_pairs,
    training_bytes,
    training_flops,
    window_pairs,
)
from regard.cost.spec import CacheContents, HeadShape

D, E, PAIRS = 3, 5, 7


def product(*sizes: int) -> int:
    """A multiplication and an addition for each number."""
    found = 2
    for n in sizes:
        found *= n
    return found


def test_work_is_that_of_the_products() -> None:
    scores, values = product(PAIRS, D), product(PAIRS, E)
    assert attention_flops(PAIRS, D, E) == scores + values
    # backward: the scores again, and the gradients of v, of the weights, of q and of k
    assert training_flops(PAIRS, D, E) == (scores + values) + (scores + 2 * values + 2 * scores)
    # q + k, tanh, and w times that; the mean of the values
    assert additive_flops(PAIRS, D, E) == PAIRS * (D + D + D) + values


def test_bytes_are_those_of_inputs_and_result() -> None:
    sizes = {"B": 2, "H": 4, "G": 2, "T": 3, "S": 7, "D": D, "E": E}
    q, k, v, out = (2 * n for n in (4 * 3 * D, 2 * 7 * D, 2 * 7 * E, 4 * 3 * E))
    assert attention_bytes(**sizes, itemsize=2) == 2 * (q + k + v + out)
    # backward reads all of them and the gradient of the result, and writes three gradients
    assert training_bytes(**sizes, itemsize=2) == 3 * 2 * (q + k + v + out)


@pytest.mark.parametrize("keys", [1, 2, 5, 9])
def test_pairs_are_counted(keys: int) -> None:
    def count(sees: object, queries: int = keys) -> int:
        pairs = ((i + keys - queries, j) for i in range(queries) for j in range(keys))
        return sum(sees(i, j) for i, j in pairs)  # type: ignore[operator]

    assert causal_pairs(keys, keys) == count(lambda i, j: j <= i)
    assert causal_pairs(1, keys) == keys
    for size in (1, 2, 4, 20):
        in_window = count(lambda i, j, W=size: 0 <= i - j < W)
        assert window_pairs(keys, keys, size) == CausalKeys(size).pairs(keys) == in_window
        chunked = CausalKeys(size, chunked=True)
        assert chunked.pairs(keys) == count(lambda i, j, W=size: j <= i and i // W == j // W)
        assert chunked.visible_keys(keys) == count(
            lambda i, j, W=size: j <= i and i // W == j // W, 1
        )
        near = NearbyKeys(size)
        assert near.pairs(keys) == count(lambda i, j, W=size: abs(i - j) <= W)


def test_biases_are_those_of_each_map() -> None:
    shape, dim = HeadShape(4, 2, D, E), 11
    plain, biased = (SoftmaxSpec.of(dim, shape, bias=bias).weights for bias in (False, True))
    assert biased.biases - plain.biases == 4 * D + 2 * D + 2 * E
    both = SoftmaxSpec.of(dim, shape, bias=True, output_bias=True).weights
    assert both.biases - biased.biases == dim


def test_keys_of_a_source_are_made_once_for_each_token() -> None:
    spec = CrossSpec.of(11, HeadShape(4, 2, D, E))
    assert spec.prefill_flops(6) == product(6, 11, 2 * D) + product(6, 11, 2 * E)


def test_states_are_read_and_written() -> None:
    read, write = product(D, E), product(D, E)
    assert linear_state(2, D, E) == 2 * D * E
    assert linear_state(2, D, E, normalized=True) == 2 * (D * E + D)
    assert linear_flops(4, 2, D, E) == 4 * read + 2 * write
    assert linear_flops(4, 2, D, E, decayed=True) == 4 * read + 2 * (write + D * E)
    # the value that the key finds, its difference from v times beta, and the write
    assert delta_flops(4, 2, D, E) == 4 * read + 2 * (product(D, E) + 2 * E + write)
    assert delta_flops(4, 2, D, E, gated=True) == delta_flops(4, 2, D, E) + 2 * D * E
    assert ShortConvolution(6, 4).past == 6 * 3


def test_codes_and_their_two_numbers_for_each_group() -> None:
    assert bits_per_value(4, 32) == 4 + (16 + 16) / 32
    form = KVFormat("int4", residual=8, group=4)
    cached = CacheContents(((1, 4), (1, 4)), 21)
    # 12 tokens are whole groups before the last 8; the 9 others stay in 16 bits
    assert form.total_bytes(cached) == 12 * 8 * (4 + 32 / 4) / 8 + 9 * 8 * 2
    state = CacheContents(state=5)
    assert form.total_bytes(state) == 5 * 4
