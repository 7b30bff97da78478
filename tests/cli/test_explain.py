"""`regard explain`: pages, JSON, choices and refusals."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import regard
from regard.cli.app import run
from regard.inspect import strongest_head
from tests.inspect.stand_in import TEXT, model


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small random model under the name of the embedded one."""
    monkeypatch.setattr(regard, "load", lambda source, **_: model(), raising=False)
    monkeypatch.setenv("COLUMNS", "200")  # messages on one line


def test_a_text_gives_a_page_of_80_columns(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", TEXT]) == 0
    out = capsys.readouterr().out
    assert "━━ 9 next token" in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80
    choice = strongest_head(model(), model().encode(TEXT), -1)
    assert f"layer {choice.layer}, head {choice.head} " in out
    assert "chosen: the head that looks hardest at one other token" in " ".join(out.split())


def test_color_can_be_forced(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", TEXT, "--color"]) == 0
    assert "\x1b[38;2;" in capsys.readouterr().out
    assert run(["explain", TEXT, "--no-color"]) == 0
    assert "\x1b" not in capsys.readouterr().out


def test_json_has_the_numbers_of_what_was_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["--layer", "1", "--head", "-1", "--query", "creature", "--json"]
    assert run(["explain", TEXT, *asked]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["layer"], found["head"], found["group"]) == (1, 3, 1)
    assert found["model"] == "tiny"
    assert found["chosen_by"] == ""
    expected = regard.inspect.explain(model(), TEXT, layer=1, head=3, query="creature").as_dict()
    assert found == {**expected, "model": "tiny"}


def test_half_a_choice_is_completed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", TEXT, "--layer", "2", "--query", "-2", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    choice = strongest_head(model(), model().encode(TEXT), -2, layer=2)
    assert (found["layer"], found["head"]) == (2, choice.head)
    assert found["query"] == found["sizes"]["T"] - 2
    assert found["chosen_by"] == choice.rule


def test_html_is_written_where_it_was_asked_for_and_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["explain", TEXT, "--html", "a page.html"]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("a page.html: ")
    assert [file.name for file in tmp_path.iterdir()] == ["a page.html"]
    text = (tmp_path / "a page.html").read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert run(["explain", TEXT, "--html", "b.html", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema"] == 1
    assert captured.err.startswith("b.html: ")


def test_every_head_can_be_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", TEXT, "--list"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 3 * 4
    assert sum(line.startswith("▶") for line in lines) == 1
    assert run(["explain", TEXT, "--list", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert [(row["layer"], row["head"]) for row in found["heads"][:5]] == [
        (0, 0),
        (0, 1),
        (0, 2),
        (0, 3),
        (1, 0),
    ]
    choice = strongest_head(model(), model().encode(TEXT), -1)
    best = max(found["heads"], key=lambda row: row["weight"])
    assert (best["layer"], best["head"]) == (choice.layer, choice.head)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([""], "the text '' has no tokens"),
        (["xy", "--layer", "7"], "layer is 7; there are 3 layers: it must be 0 to 2"),
        (
            ["xy", "--layer", "7", "--head", "0"],
            "layer is 7; there are 3 layers: it must be 0 to 2",
        ),
        (["xy", "--layer", "0", "--head", "4"], "head is 4; there are 4 heads: it must be 0 to 3"),
        (["xy", "--query", "9"], "query is 9; there are 2 tokens: it must be 0 to 1"),
        (["xy", "--query", "owl"], "query is 'owl', which does not occur in the text"),
        (["x" * 600], "the text has 600 tokens; at most 512 are explained in one piece"),
        (["xy", "--layer", "one"], "Invalid value for '--layer'"),
        (["xy", "--html", "."], "is a folder; give the name of a file"),
        (["xy", "--html", "no/page.html"], "there is no folder 'no'; make it first"),
        ([], "Missing argument"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["explain", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.replace("│", " ").split())
    assert "Traceback" not in captured.err
    assert captured.out == ""


def test_a_bad_target_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, **_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(regard, "load", refuse, raising=False)
    assert run(["explain", "xy", "--html", str(tmp_path)]) == 2


def test_help_has_an_example_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["explain", "--help"]) == 0
    out = capsys.readouterr().out
    assert (
        'regard explain "a fluffy blue creature roamed the verdant forest" --query creature'
        in " ".join(out.split())
    )
    assert run(["explain", TEXT, "--query", "creature"]) == 0
