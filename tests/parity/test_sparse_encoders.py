"""Sparse attention of BigBird and Longformer as transformers computes it: BigBird in full, in
blocks, in training and in evaluation.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from regard import biases
from regard.masks import BigBird, Blocks, Global, Window
from regard.nn.variants import bigbird, longformer
from tests.parity import layers
from tests.parity.families.changes import put
from tests.parity.layers import Change, assert_far, assert_near, capture, copy_weights

M, H = 24, 3
SIZES = {
    "vocab_size": 8,
    "hidden_size": M,
    "num_attention_heads": H,
    "intermediate_size": 16,
    "num_hidden_layers": layers.LAYERS,
    "max_position_embeddings": 80,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}


def paths(layer: int) -> tuple[str, str]:
    """What attention is given, and its output projection, before residual and norm."""
    where = f"encoder.layer.{layer}.attention"
    return f"{where}.self", f"{where}.output.dense"


def parts(theirs: Any, layer: int) -> nn.Module:
    inlet, outlet = (theirs.get_submodule(path) for path in paths(layer))
    return nn.ModuleDict({"self": inlet, "dense": outlet})


def names(kinds: dict[str, str]) -> dict[str, str]:
    """self.query<ending>.weight -> <ours>.q.linear.weight and so on, and the output."""
    made = {
        f"self.{name}{ending}.{end}": f"{ours}.{name[0]}.linear.{end}"
        for ending, ours in kinds.items()
        for name in ("query", "key", "value")
        for end in ("weight", "bias")
    }
    return made | {f"dense.{end}": f"output.{end}" for end in ("weight", "bias")}


BLOCK, BLOCKS, RANDOM = 2, 16, 2
SLOTS = BLOCK * BLOCKS


class Big:
    """A layer of their BigBird and ours."""

    def __init__(self, kind: str, **options: Any) -> None:
        config = SIZES | {
            "attention_type": kind,
            "block_size": BLOCK,
            "num_random_blocks": RANDOM,
            "use_bias": True,
        }
        self.theirs = layers.model("BigBird", config)
        given = {"block": BLOCK, "blocks": BLOCKS, "random": RANDOM, "bias": True} | options
        self.ours: Any = copy_weights(
            parts(self.theirs, 0), bigbird(M, H, **given), names({"": "project"})
        )

    def run(self, B: int = 2, T: int = SLOTS, **call: Any) -> tuple[Tensor, Tensor]:
        return capture(self.theirs, *paths(0), inputs_embeds=torch.randn(B, T, M), **call)

    def draws(self, monkeypatch: pytest.MonkeyPatch) -> list[Any]:
        """The random blocks of each head that their layer is about to take, [head][row - 1, r]."""
        layer, seen = self.theirs.get_submodule(paths(0)[0]), []
        draw = layer._bigbird_block_rand_mask_with_head

        def listen(*given: Any, **named: Any) -> Any:
            seen[:] = draw(*given, **named)
            return list(seen)

        monkeypatch.setattr(layer, "_bigbird_block_rand_mask_with_head", listen)
        return seen


def by_hand(draws: list[Any]) -> Tensor:
    """Which block sees which, head by head: neighbours, first and last, and those drawn."""
    table = torch.zeros(1, H, BLOCKS, BLOCKS, dtype=torch.bool)
    for h in range(H):
        for i in range(BLOCKS):
            everything = range(BLOCKS) if i in (0, BLOCKS - 1) else (0, i - 1, i, i + 1, BLOCKS - 1)
            drawn = [] if i in (0, BLOCKS - 1) else [int(b) for b in draws[h][i - 1]]
            for j in (*everything, *drawn):
                table[0, h, i, j] = True
    return table


@pytest.mark.parametrize("is_causal", [False, True])
def test_bigbird_is_full_attention_under_its_mask(is_causal: bool) -> None:
    """Their full attention, given our mask as numbers to add; one row is padded on the left."""
    pair = Big("original_full", is_causal=is_causal)
    positions = torch.arange(SLOTS) - torch.tensor([0, 5])[:, None]
    positions = positions.clamp(min=-1)
    seen = pair.ours.mask.allows(positions[:, None, :, None], positions[:, None, None])
    seen = seen & (positions >= 0)[:, None, None]
    x, y = pair.run(attention_mask=torch.where(seen, 0.0, torch.finfo().min))
    keep = positions >= 0
    x = x.masked_fill(~keep[..., None], math.nan)
    assert_near(pair.ours(x, positions)[keep], y[keep])
    visible = pair.ours.mask.table[2:-2].sum(1)
    assert (visible < 5 + RANDOM).all() if is_causal else (visible == 5 + RANDOM).all()


def test_bigbird_in_training_is_the_definition_with_the_blocks_drawn(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    pair = Big("block_sparse")
    pair.theirs.train()
    draws = pair.draws(monkeypatch)
    x, y = pair.run()
    table = by_hand(draws)
    middle = table[0, :, 2:-2].sum(-1)
    assert (middle == 5 + RANDOM).all(), "drawn outside of window and globals, none twice"
    assert not torch.equal(table[0, 0], table[0, 1])
    pair.ours.mask = Blocks(table, BLOCK)
    assert_near(pair.ours(x), y)
    pair.ours.mask = Blocks(table.flip(1), BLOCK)
    assert_far(pair.ours(x), y)
    pair.ours.mask = BigBird(BLOCK, BLOCKS, random=0)
    assert_far(pair.ours(x), y)


def test_bigbird_in_evaluation_counts_the_first_block_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Theirs draws no blocks outside of training: all are block 0, which is global already and so
    is counted 1 + r times.

    That is no attention over a set of keys. It equals the definition without random blocks once
    log(1 + r) is added to the scores of block 0, and differs from the definition with our random
    blocks and with none.
    """
    pair = Big("block_sparse")
    draws = pair.draws(monkeypatch)
    x, y = pair.run()
    assert all((np.asarray(drawn) == 0).all() for drawn in draws)
    assert_far(pair.ours(x), y)
    pair.ours.mask = BigBird(BLOCK, BLOCKS, random=0)
    assert_far(pair.ours(x), y)
    pair.ours.bias = biases.DenseBias(torch.zeros(SLOTS, SLOTS))
    pair.ours.bias.tensor[BLOCK:-BLOCK, :BLOCK] = math.log(1 + RANDOM)
    assert_near(pair.ours(x), y)


def test_only_theirs_changes_with_the_mode() -> None:
    pair = Big("block_sparse")
    embeds = torch.randn(1, SLOTS, M)
    seen = [
        capture(pair.theirs.train(mode), *paths(0), inputs_embeds=embeds) for mode in (True, False)
    ]
    assert_near(seen[0][0], seen[1][0])
    assert_far(seen[0][1], seen[1][1])
    x = seen[0][0]
    assert torch.equal(pair.ours.train()(x), pair.ours.eval()(x))


def mask(**change: Any) -> Change:
    def swap(ours: Any) -> None:
        given = {"window": 3, "random": RANDOM, "seed": 0} | change
        ours.mask = BigBird(BLOCK, BLOCKS, **given)

    swap.__name__ = str(change)
    return swap


def first_block_only(ours: Any) -> None:
    """No last block for all."""
    table = ours.mask.table.clone()
    table[1:-2, -1] = False
    ours.mask = Blocks(table, BLOCK)


WRONG_BLOCKS = (mask(seed=1), mask(window=5), mask(random=1), mask(causal=True), first_block_only)


@pytest.mark.parametrize("change", WRONG_BLOCKS, ids=lambda f: f.__name__)
def test_a_wrong_bigbird_is_far(change: Change) -> None:
    pair = Big("original_full")
    at = torch.arange(SLOTS)
    seen = pair.ours.mask.allows(at[None, None, :, None], at[None, None, None])
    x, y = pair.run(attention_mask=torch.where(seen, 0.0, torch.finfo().min).expand(2, 1, -1, -1))
    assert_near(pair.ours(x), y)
    other = copy.deepcopy(pair.ours)
    change(other)
    assert_far(other(x), y)


WINDOWS, GLOBALS, LENGTH = (4, 8), (0, 7, 8, 20), 26


class Long:
    """A layer of their Longformer and ours."""

    def __init__(self, layer: int, positions: tuple[int, ...] = GLOBALS) -> None:
        self.theirs = layers.model("Longformer", SIZES | {"attention_window": list(WINDOWS)})
        self.layer, self.positions = layer, positions
        made = longformer(M, H, window=WINDOWS[layer], positions=positions)
        named = names({"": "local_project", "_global": "global_project"})
        self.ours: Any = copy_weights(parts(self.theirs, layer), made, named)

    def run(self, positions: Tensor, keep: Tensor) -> tuple[Tensor, Tensor]:
        """Their slots behind the text, which make it a multiple of the window, cut off."""
        which = torch.isin(positions, torch.tensor(self.positions)) & keep
        x, y = capture(
            self.theirs,
            *paths(self.layer),
            inputs_embeds=torch.randn(*keep.shape, M),
            attention_mask=keep.long(),
            global_attention_mask=which.long(),
        )
        assert x.shape[1] % max(WINDOWS) == 0
        return x[:, : keep.shape[1]], y[:, : keep.shape[1]]

    def whole(self) -> tuple[Tensor, Tensor]:
        positions = torch.arange(LENGTH).expand(2, -1)
        return self.run(positions, positions >= 0)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("positions", [GLOBALS, (0,), (25, 3), ()], ids=str)
def test_longformer(layer: int, positions: tuple[int, ...]) -> None:
    pair = Long(layer, positions)
    assert 3 * WINDOWS[layer] < LENGTH
    assert LENGTH % max(WINDOWS)
    x, y = pair.whole()
    for backend in ("auto", "reference"):
        assert_near(pair.ours(x, backend=backend), y)
    assert_near(pair.ours(x, torch.arange(LENGTH)[None]), y)


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("side", ["left", "right"])
def test_longformer_with_padding(layer: int, side: str) -> None:
    """Rows of all, 17 and 1 tokens, whose global tokens stand at other slots; NaN in our padding
    reaches nothing.
    """
    slots, lengths = torch.arange(LENGTH), torch.tensor([LENGTH, 17, 1])[:, None]
    first = LENGTH - lengths if side == "left" else torch.zeros_like(lengths)
    positions = slots - first
    positions = torch.where((positions >= 0) & (positions < lengths), positions, -1)
    keep, pair = positions >= 0, Long(layer)
    x, y = pair.run(positions, keep)
    x = x.masked_fill(~keep[..., None], math.nan)
    assert_near(pair.ours(x, positions)[keep], y[keep])


def no_global_projections(ours: Any) -> None:
    ours.global_project = ours.local_project


def own_queries_only(ours: Any) -> None:
    """Global queries on the keys of the others."""
    ours.global_project.k = ours.local_project.k


def global_keys_for_all(ours: Any) -> None:
    """And the other way about: global keys, where others look at everything."""
    ours.local_project.k = ours.global_project.k


def global_one_late(ours: Any) -> None:
    ours.globals = Global(tuple(p + 1 for p in GLOBALS))
    ours.mask = Window(3, ahead=2) | ours.globals


WRONG = (
    put("", mask=Window(4, ahead=3) | Global(GLOBALS)),
    put("", mask=Window(5, ahead=4) | Global(GLOBALS)),
    put("", mask=Window(3, ahead=1) | Global(GLOBALS)),
    no_global_projections,
    own_queries_only,
    global_keys_for_all,
    put("", mask=Window(3, ahead=2)),
    global_one_late,
)


@pytest.mark.parametrize("change", WRONG)
def test_a_wrong_longformer_is_far(change: Change) -> None:
    pair = Long(0)
    x, y = pair.whole()
    assert_near(pair.ours(x), y)
    other = copy.deepcopy(pair.ours)
    change(other)
    assert_far(other(x), y)
