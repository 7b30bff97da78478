"""A part of the matrix of docs/transformers.md anew, one architecture for each thing that a model
can ask for.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.integrations.families import regard_attention, transformers
from tests.integrations.matrix import table
from tests.integrations.matrix.cells import COLUMNS, architectures, run

EXACT = ("switch", "prefill", "padding", "dynamic", "static", "beams", "gradients")
ENCODER = ("switch", "prefill", "padding", "gradients")
SAMPLE: dict[str, tuple[str, ...]] = {
    "llama": EXACT,
    "gemma2": ("prefill", "padding", "dynamic"),  # softcaps and windows
    "gpt_oss": ("prefill", "padding", "static"),  # sinks
    "llama4_text": ("prefill", "padding", "dynamic"),  # chunks
    "deepseek_v32": ("prefill", "padding", "static", "gradients"),  # selected keys
    "minimax_m3_vl_text": ("prefill", "padding", "dynamic"),  # selected blocks
    "gemma4_text": ("prefill", "padding", "dynamic"),  # a mask that is cut
    "doge": ("prefill", "padding"),  # a mask that is taken apart
    "bamba": ("prefill", "padding", "dynamic"),  # recurrent layers between
    "t5": ("prefill", "padding", "beams", "gradients"),  # position biases
    "bert": ENCODER,
    "modernbert": ENCODER,  # windows on both sides
    "vit": ("switch", "prefill", "gradients"),
    "mpt": EXACT,
    "deepseek_v4": ("switch", "prefill", "padding", "dynamic", "beams", "gradients"),  # entries
    "deberta": ENCODER,
}
"""Architectures, and what of each is tried."""


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", SAMPLE)
def test_an_architecture_does_what_the_page_says(name: str) -> None:
    if name not in architectures():
        pytest.skip(f"transformers {transformers.__version__} has no {name}")
    row = run(name, SAMPLE[name])
    assert not row["built"], row
    found = {column: row[column][0] for column in SAMPLE[name]}
    wanted = {"mpt": "refused", "deberta": "own"}.get(name, "exact")
    assert {word for word in found.values() if word != "skip"} == {wanted}, row
    about, rows = table.read()
    if about["transformers"] == transformers.__version__:
        assert found == {column: rows[name][column][0] for column in found}


def wrong(*args: Any, **kwargs: Any) -> Any:
    """Attention without its mask."""
    return regard_attention(args[0], *args[1:4], None, **kwargs | {"is_causal": False})


def failing(*args: Any, **kwargs: Any) -> Any:
    raise TypeError("somebody else's")


@pytest.mark.parametrize(("function", "word"), [(wrong, "WRONG"), (failing, "CRASH")])
def test_the_matrix_tells_a_wrong_result_and_a_crash(
    function: Any, word: str, monkeypatch: Any
) -> None:
    monkeypatch.setitem(transformers.AttentionInterface._global_mapping, "regard", function)
    row = run("llama", ("prefill", "dynamic", "gradients"))
    assert [row[x][0] for x in ("prefill", "dynamic", "gradients")] == [word] * 3, row
    assert transformers.AttentionInterface._global_mapping["regard"] is function


def test_nothing_in_the_kept_results_is_wrong_or_crashes() -> None:
    about, rows = table.read()
    for name, row in rows.items():
        assert {*table.words(row)} <= {"exact", "own", "refused", "skip"}, row
        for column in COLUMNS:
            word, why = row.get(column, ["skip", "not tried"])
            assert bool(why) == (word in ("refused", "skip")), (name, column)
    served = [name for name, row in rows.items() if "exact" in table.words(row)]
    assert len(served) > 250
    if about["transformers"] == transformers.__version__:
        assert sorted(rows) == architectures()


def test_the_page_shows_the_kept_results() -> None:
    _, _, rest = table.PAGE.read_text("utf-8").partition(table.BEGIN)
    assert rest.partition(table.END)[0].strip() == table.markdown()


def test_a_row_is_kept_and_read_again(tmp_path: Any) -> None:
    rows = {
        "b": {"model_type": "b", "built": "no"},
        "a": {"model_type": "a", "built": "", "prefill": ["exact", ""]},
    }
    table.write(rows, tmp_path / "kept.jsonl")
    about, again = table.read(tmp_path / "kept.jsonl")
    assert again == rows
    assert (list(again), about["torch"]) == (["a", "b"], torch.__version__)
