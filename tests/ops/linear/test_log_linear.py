"""Log-linear attention: the levels of its tree, value heads, chunks and rows of other lengths
against sums over pairs, and what a wrong tree would give. `test_decayed_sums` has the rest.
"""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.linear import log_linear
from regard.ops.linear import log_linear as tree
from tests.ops.linear.mechanisms import assert_same
from tests.oracles import decayed

FORMS = ("recurrent", "chunk", "parallel")


def case(T: int, L: int, H: int = 4, G: int = 2, N: int = 4, B: int = 1) -> dict[str, Tensor]:
    draw: Any = {"dtype": torch.float64}
    return {
        "q": torch.randn(B, H, T, 3, **draw),
        "k": torch.randn(B, G, T, 3, **draw),
        "v": torch.randn(B, N, T, 2, **draw),
        "log_decay": -torch.rand(B, N, T, 1, **draw),
        "level_weights": torch.rand(B, N, T, L, **draw) + 0.1,
    }


def upto(c: dict[str, Tensor], first: int, stop: int) -> dict[str, Tensor]:
    return {name: x[:, :, first:stop] for name, x in c.items()}


def exact(c: dict[str, Tensor]) -> Tensor:
    B, N, T = c["v"].shape[:3]
    rows = [
        decayed.log_linear(*(x[b, h // (N // x.shape[1])] for x in c.values()), range(T))
        for b in range(B)
        for h in range(N)
    ]
    return torch.stack(rows).unflatten(0, (B, N))


def in_parts(
    c: dict[str, Tensor], sizes: list[int], **options: Any
) -> tuple[Tensor, tuple[Tensor, ...]]:
    out, state, start = [], None, 0
    for n in sizes:
        part, state = log_linear(**upto(c, start, start + n), state=state, **options)
        out.append(part)
        start += n
    assert state is not None
    return torch.cat(out, 2), state


def test_the_levels_of_the_paper() -> None:
    assert decayed.fenwick_levels(7) == [3, 3, 3, 3, 2, 2, 1, 0]
    n = torch.tensor(7)
    assert tree.fenwick_levels(n, torch.arange(8), 16).tolist() == [3, 3, 3, 3, 2, 2, 1, 0]
    assert tree.fenwick_levels(n, torch.arange(8), 3).tolist() == [2, 2, 2, 2, 2, 2, 1, 0]
    for t in range(70):
        levels = tree.fenwick_levels(torch.tensor(t), torch.arange(t + 1), 16)
        assert levels.tolist() == decayed.fenwick_levels(t)
        assert sum(2 ** (level - 1) for level in set(levels.tolist()) - {0}) == t


@pytest.mark.parametrize("L", [1, 2, 3, 8])
@pytest.mark.parametrize(("H", "G", "N"), [(2, 2, 4), (4, 2, 4), (1, 1, 1)])
def test_heads_and_levels_in_every_form_and_split(H: int, G: int, N: int, L: int) -> None:
    """37 tokens are more than 1, 2 and 4 levels have buckets for, and fewer than 8 have."""
    c = case(37, L, H, G, N)
    right = exact(c)
    found, (S, n) = log_linear(**c, form="recurrent")
    assert_same(found, right)
    for chunk in (1, 4, 5, 64):
        for sizes in ([37], [5, 32], [1, 1, 8, 27], [16, 21], [32, 0, 5]):
            out, state = in_parts(c, sizes, form="chunk", chunk=chunk)
            assert_same(out, right)
            assert_same(state[0], S)
            assert torch.equal(state[1], n)


def test_rows_of_other_lengths_go_on_as_each_alone() -> None:
    c, T = case(23, 4, B=2), 23
    positions = torch.stack([torch.arange(T), torch.arange(T) - 9]).clamp(min=-1)
    positions[1, 15] = -1
    rows = [{name: x[b : b + 1, :, positions[b] >= 0] for name, x in c.items()} for b in (0, 1)]
    for form, then in itertools.product(FORMS, FORMS):
        first = log_linear(**c, form=form, chunk=4, k_positions=positions)
        again = log_linear(**c, form=then, chunk=8, k_positions=positions, state=first[1])
        for b, row in enumerate(rows):
            twice = {name: torch.cat([x, x], 2) for name, x in row.items()}
            both = [x[0][b : b + 1, :, positions[b] >= 0] for x in (first, again)]
            assert_same(torch.cat(both, 2), exact(twice))
            assert_same(again[1][0][b : b + 1], log_linear(**twice)[1][0])


def test_a_state_has_one_size_and_counts_beyond_its_levels() -> None:
    """The number of tokens stays below 2^L, and the tree goes on as with the whole number."""
    c = case(100, 4, 1, 1, 1)
    out, (S, n) = in_parts(c, [3] * 33 + [1])
    assert S.shape == (1, 1, 4, 3, 2)
    assert int(n) == 8 + 100 % 8
    assert_same(out, exact(c))


def one_bit_off(n: Tensor, m: Tensor, levels: int) -> Tensor:
    """The bits of tokens that are counted from 1."""
    return tree_levels(n + 1, m + 1, levels)


def without_decay(S: Tensor, decay: Tensor, n: Tensor, m: Tensor) -> Tensor:
    """What joins a higher level does not decay on the way."""
    moved = tree.fenwick_levels(n, m, S.shape[3])[:, None, None, :, None, None] > 0
    return torch.where(moved, merge(S, torch.ones_like(decay), n, m), merge(S, decay, n, m))


tree_levels, merge = tree.fenwick_levels, tree._decay_and_merge


@pytest.mark.parametrize(
    ("name", "wrong"), [("fenwick_levels", one_bit_off), ("_decay_and_merge", without_decay)]
)
def test_a_wrong_tree_is_caught(name: str, wrong: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    c = case(20, 6)
    right = exact(c)
    monkeypatch.setattr(tree, name, wrong)
    for form in ("recurrent", "chunk"):
        out = in_parts(c, [9, 5, 6], form=form, chunk=4)[0]
        assert float((out - right).abs().max()) > 1e-3, form


def test_what_is_refused() -> None:
    c = case(5, 3)
    with pytest.raises(ArgumentError, match="q has 4 heads, k 1 and v 2; log_linear needs as many"):
        log_linear(**{**c, "k": c["k"][:, :1], "v": c["v"][:, :2]})
    with pytest.raises(ArgumentError, match=r"level_weights is \(1, 2, 5, 3\); it must be \(1, 4,"):
        log_linear(**{**c, "level_weights": c["level_weights"][:, :2]})
    for n in (0, 25):
        weights = torch.ones(1, 4, 5, n, dtype=torch.float64)
        with pytest.raises(ArgumentError, match=f"has {n} levels; it must have 1 to 24"):
            log_linear(**{**c, "level_weights": weights})
    with pytest.raises(ArgumentError, match=r"it must be \(S, n\)"):
        log_linear(**c, state=(torch.zeros(1, 4, 3, 3, 2, dtype=torch.float64),))
