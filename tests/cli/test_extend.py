"""`regard extend`: a small checkpoint in every form, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard.cli import main
from tests.cli.command import Said
from tests.models import small

TEXT = "the key of a query and the value of the key: né, 你好, over the lazy dog. " * 12


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "model").mkdir()
    return small.write(tmp_path / "model", small.model(max_position_embeddings=32))


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[str, str]:
    with pytest.raises(SystemExit) as end:
        main(["extend", *arguments])
    found = capsys.readouterr()
    assert end.value.code == 0, found.err
    return found.out, found.err


@pytest.fixture
def options(folder: Path, tmp_path: Path) -> list[str]:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, "utf-8")
    few = ["--length", "64", "--windows", "2", "--trials", "2", "--steps", "6"]
    return [str(folder), "--text", str(text), *few]


@pytest.mark.full
def test_a_checkpoint_is_read_in_every_form(
    capsys: pytest.CaptureFixture[str], options: list[str], tmp_path: Path
) -> None:
    page, chart = tmp_path / "page.html", tmp_path / "chart.svg"
    files = ("--html", str(page), "--plot", str(chart))
    out, err = run(capsys, *options, "--method", "yarn", "--method", "dynamic", *files)
    assert "trained on 32 tokens" in out
    assert out.index("\nunscaled ") < out.index("\nyarn ") < out.index("\ndynamic ")
    assert "re_rotate" in out
    assert "... yarn: 16, 32, 64 tokens, and cached decoding" in err
    assert page.read_text("utf-8").count("<svg") == 5
    assert chart.read_text("utf-8").startswith("<svg")


def test_json_has_the_figures(
    capsys: pytest.CaptureFixture[str], options: list[str], tmp_path: Path
) -> None:
    told = json.loads(run(capsys, *options, "--method", "linear", "--json")[0])
    assert list(told["methods"]) == ["unscaled", "linear"]
    assert told["lengths"] == [16, 32, 64]
    assert told["text"] == str(tmp_path / "text.txt")
    plain, scaled = (told["methods"][name]["theta"] for name in ("unscaled", "linear"))
    assert scaled == pytest.approx([theta / 2 for theta in plain], rel=1e-12)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--length", "4096"), "give a longer text, or a smaller length"),
        (("--plot", "chart.gif"), "chart.gif is no picture; its name must end in"),
        (("--html", "nowhere/page.html"), "there is no folder"),
        (("--text", "nowhere.txt"), "nowhere.txt"),
    ],
)
def test_refusals(
    folder: Path, tmp_path: Path, refused: Said, arguments: tuple[str, ...], message: str
) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT, "utf-8")
    given = arguments if "--text" in arguments else (*arguments, "--text", text)
    assert message in refused("extend", folder, *given, code=1 if "--text" in arguments else 2)


def test_without_a_tokenizer_a_text_cannot_be_read(folder: Path, refused: Said) -> None:
    (folder / "tokenizer.json").unlink()
    error = refused("extend", folder, "--text", folder / "config.json", code=1)
    assert "the model has no tokenizer" in error
