"""Attention of Longformer as transformers computes it, against `longformer`."""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.masks import Global, Window
from regard.nn.variants import longformer
from tests.parity import layers
from tests.parity.encoders import SIZES, H, M, names, parts, paths
from tests.parity.families.changes import put
from tests.parity.layers import Change, assert_far, assert_near, capture, copy_weights

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
