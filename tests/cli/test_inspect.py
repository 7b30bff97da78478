"""The command `regard inspect`: every task, its files, and what it refuses."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.cli.inspect import OPTIONS, TASKS
from regard.inspect import (
    ablate,
    attribute,
    attribute_answer,
    compare,
    composition_scores,
    find_circuit,
    knockout,
    logit_lens,
    patch,
    record,
    rollout,
    taps,
)
from regard.inspect.interventions import edited_runs
from regard.models import TextEncoder
from tests.cli.command import Said
from tests.models.small import named_model

TEXT, OTHER = "to be or not to", "to do or not to"


def printed(said: Said, *arguments: str) -> str:
    return said("inspect", *arguments)


@pytest.mark.full
def test_every_task_prints_what_the_function_returns(said: Said) -> None:
    model = regard.load("tiny")
    wanted = {
        ("ablate", TEXT, "--answer", " be", "--method", "mean"): ablate(
            model, TEXT, " be", method="mean"
        ),
        ("patch", TEXT, "--corrupt", OTHER): patch(model, TEXT, OTHER),
        ("attribute", TEXT, "--answer", " be", "--versus", " do"): attribute(
            model, TEXT, (" be", " do")
        ),
        ("attribute", TEXT, "--answer", " be that", "--whole"): attribute_answer(
            model, TEXT, " be that"
        ),
        ("patch", TEXT, "--corrupt", OTHER, "--what", "edges", "--receiver=layers.2:1:q"): patch(
            model, TEXT, OTHER, what="edges", receiver=("layers.2", 1, "q")
        ),
        ("knockout", TEXT, "--keys", "1,2", "--window", "2", "--heads", "0,-1"): knockout(
            model, TEXT, keys=[1, 2], window=2, heads=[0, -1]
        ),
        ("circuit", TEXT, "--corrupt", OTHER, "--threshold", "0.5"): find_circuit(
            model, TEXT, OTHER, threshold=0.5
        ),
        ("weights", "--what", "v"): composition_scores(model, "v"),
        ("lens", TEXT): logit_lens(model, TEXT),
        ("rollout", TEXT): rollout(model, TEXT),
        ("compare", TEXT, "--other", OTHER): compare(record(model, TEXT), record(model, OTHER)),
    }
    for arguments, table in wanted.items():
        assert printed(said, *arguments).rstrip("\n") == table.text(10)
        data = json.loads(printed(said, *arguments, "--json"))
        assert data == json.loads(json.dumps(table.as_dict()))
    assert printed(said, "taps").split() == list(taps(model))
    measured = json.loads(printed(said, "measure", TEXT, "a b a b", "--json"))
    assert len(measured["heads"]) == 32
    assert "induction" in printed(said, "measure", TEXT, "a b a b", "--metric", "induction")
    assert (
        set(TASKS) == {arguments[0] for arguments in wanted} | {"taps", "measure"} == set(OPTIONS)
    )


def test_tables_and_maps_are_written(tmp_path: Path, said: Said) -> None:
    for name in ("t.csv", "t.json", "t.npy"):
        printed(said, "rollout", TEXT, "--out", str(tmp_path / name))
        assert (tmp_path / name).stat().st_size > 20
    pytest.importorskip("matplotlib")
    printed(said, "lens", TEXT, "--out", str(tmp_path / "lens.svg"))
    assert "logit lens" in (tmp_path / "lens.svg").read_text()
    printed(said, "measure", TEXT, "--out", str(tmp_path / "heads.csv"))
    assert len((tmp_path / "heads.csv").read_text().splitlines()) == 33


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["ablat", TEXT], "did you mean 'ablate'"),
        (["ablate"], "ablate got 0 texts"),
        (["ablate", TEXT, TEXT], "ablate got 2 texts"),
        (["ablate", TEXT, "--corrupt", OTHER], "does not apply to ablate"),
        (["ablate", TEXT, "--versus", " be"], "give both"),
        (["patch", TEXT], "patch needs it"),
        (["patch", TEXT, "--corrupt", OTHER, "--what", "paths", "--receiver", "x"], "is not LAYER"),
        (["knockout", TEXT], "positions of keys"),
        (["circuit", TEXT], "circuit needs it: another text"),
        (["weights", "--what", "x"], "is not copying, q, k or v"),
        (["attribute", TEXT, "--whole"], "give --answer"),
        (["measure", TEXT, "--metric", "entrpy"], "did you mean 'entropy'"),
        (["rollout", TEXT, "--out", "no folder/x.svg"], "there is no folder"),
    ],
)
def test_what_is_refused(arguments: list[str], says: str, refused: Said) -> None:
    assert says in refused("inspect", *arguments)


def test_a_creature_reads_fluffy(said: Said) -> None:
    """The example of docs/explain.md: in a trained model of sentences."""
    text = "a fluffy blue creature roamed the verdant forest"
    named_model("minilm", TextEncoder)
    out = said("explain", text, "--model", "minilm", "--query", "creature")
    assert "▶ creature (token 4) reads ◆ fluffy (token 2)" in out


def test_chosen_cells_are_printed_as_they_are_measured(said: Said) -> None:
    chosen = ("--layers", "1,layers.3", "--heads", "-1")
    table = ablate(regard.load("tiny"), TEXT, layers=[1, "layers.3"], heads=[-1])
    lines = printed(said, "ablate", TEXT, *chosen, "--lines").splitlines()
    assert [json.loads(line) for line in lines] == table.records()
    some = json.loads(
        printed(said, "patch", TEXT, "--corrupt", OTHER, "--positions=1,-1", "--json")
    )
    assert [some["rows"][0], len(some["columns"])] == ["embed", 2]
    wrong = said("inspect", "ablate", TEXT, "--heads", "a", code=2)
    assert "is no integer" in wrong


def test_ctrl_c_prints_what_was_measured(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    outputs = edited_runs.run_edited

    def interrupted(*arguments: Any, **options: Any) -> Iterator[tuple[int, Any]]:
        yield from itertools.islice(outputs(*arguments, **options), 2)
        raise KeyboardInterrupt

    monkeypatch.setattr(edited_runs, "run_edited", interrupted)
    shown = said("inspect", "ablate", TEXT, "--json", code=130)
    data = json.loads(shown)
    assert data["notes"] == ["stopped after 2 of 32 numbers"]
    assert sum(x is not None for row in data["values"] for x in row) == 2
