"""The tables of docs/pytorch.md: each cell is a test."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from tests.integrations.pytorch.matrix import table
from tests.integrations.pytorch.matrix.things import THINGS, Thing
from tests.integrations.pytorch.matrix.transforms import (
    TRANSFORMS,
    cells,
    refusal,
    run,
    transform,
)

KEPT = table.read()
QUICK = [x for x in cells() if not TRANSFORMS[x[0]].slow]
SLOW = [x for x in cells() if TRANSFORMS[x[0]].slow]


def ids(cases: list[tuple[str, Thing]]) -> list[str]:
    return [f"{name}-{thing.name}" for name, thing in cases]


@pytest.mark.full(keep=20)
@pytest.mark.parametrize(("name", "thing"), QUICK, ids=ids(QUICK))
def test_a_cell_says_what_happens(name: str, thing: Thing) -> None:
    assert run(name, thing) == KEPT[name, thing.name]


@pytest.mark.nightly(keep=20)
@pytest.mark.full
@pytest.mark.parametrize(("name", "thing"), SLOW, ids=ids(SLOW))
def test_a_slow_cell_says_what_happens(name: str, thing: Thing) -> None:
    assert run(name, thing) == KEPT[name, thing.name]


def test_no_cell_is_empty() -> None:
    assert list(KEPT) == [(name, thing.name) for name, thing in cells()]
    assert all(said == "works" or said.startswith("refused: ") for said in KEPT.values())


def test_the_page_shows_the_kept_results() -> None:
    _, _, rest = table.PAGE.read_text("utf-8").partition(table.BEGIN)
    assert rest.partition(table.END)[0].strip() == table.markdown(KEPT)


def test_results_are_kept_and_read_again(tmp_path: Path) -> None:
    table.write(KEPT, tmp_path / "kept.jsonl")
    assert table.read(tmp_path / "kept.jsonl") == KEPT


class Wrong(nn.Module):
    """Attention that forgets its mask."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v)


def test_a_wrong_result_is_no_cell() -> None:
    causal = next(x for x in THINGS if x.name == "causal")

    @transform("a wrong one")
    def wrong(thing: Thing) -> None:
        from tests.integrations.pytorch.matrix.transforms import assert_follows

        assert_follows(thing, Wrong())

    @transform("a refusal")
    def refused(thing: Thing) -> None:
        raise RuntimeError("of torch") from ArgumentError("x is wrong; pass another")

    try:
        with pytest.raises(AssertionError, match=r"error .* above"):
            run("a wrong one", causal)
        assert run("a refusal", causal) == "refused: x is wrong; pass another"
    finally:
        del TRANSFORMS["a wrong one"], TRANSFORMS["a refusal"]
    assert refusal(RuntimeError("of torch")) is None
    assert torch.is_grad_enabled()
