"""The rules of the command line, for every command of the registry: usage, sentences, widths,
suggestions, both languages, and readers that leave.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard.cli import COMMANDS, main
from regard.cli.app import _command, language_of_arguments, load, speak_of_flags
from regard.language import use_language
from regard.text_table import display_width

NAMES = sorted(COMMANDS)
WIDTH = 60
CHINESE = re.compile(r"[\u4e00-\u9fff\uff00-\uffef]")
PACKAGE = Path(regard.__file__).parent
ROOT = Path(__file__).parents[2]
PROGRAMS = [
    "regard",
    *sorted(
        f"regard.{path.relative_to(PACKAGE).with_suffix('').as_posix().replace('/', '.')}"
        for path in PACKAGE.rglob("*.py")
        if path.name != "__main__.py" and 'if __name__ == "__main__":' in path.read_text("utf-8")
    ),
]
"""Everything that `python -m` runs."""
PRINTED = {
    "audit": ["--list"],
    "bench": ["--list"],
    "compare": ["--list"],
    "cost": ["llama-3-8b", "--machine", "h100-sxm"],
    "describe": ["mla"],
    "layer": ["mha", "--dim", "32", "--heads", "2"],
    "show": ["causal & window(4) | sinks(1)", "--queries", "50", "--tiles", "8", "--ranks", "2"],
}
"""Commands that print much within a second, and their arguments; the others print what their own
tests check.
"""
MORE_COSTS = (
    ["cost", "--list"],
    ["cost", "llama-3-8b", "--vs", "gpt2", "--machine", "l4"],
    ["cost", "--mechanisms", "mha,gqa:8,mla", "--dim", "4096", "--machine", "h100-sxm"],
    ["cost", "gemma-3-4b", "--ranks", "4", "--machine", "h100-sxm"],
    ["cost", "mistral-7b", "--sweep", "context=1k..64k", "--machine", "l4"],
    ["describe"],
)


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A terminal of 60 columns without colours, in English."""
    monkeypatch.setenv("COLUMNS", str(WIDTH))
    monkeypatch.setenv("NO_COLOR", "1")
    for name in ("LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "en_US.UTF-8")


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main(arguments)
    assert end.value.code == code
    found = capsys.readouterr()
    return found.out if code == 0 else found.err


def too_wide(text: str) -> list[str]:
    """The lines that are wider than the terminal; a single long word cannot be broken."""
    lines = (line for line in text.splitlines() if display_width(line) > WIDTH)
    return [line for line in lines if max(map(display_width, line.split())) < WIDTH - 30]


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", NAMES)
def test_usage_lines_follow_the_convention(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    usage = " ".join(said(capsys, name, "--help").partition("\n\n")[0].split())
    word = r"(?:[A-Z|]+|\[[A-Z|]+\])(?:\.\.\.)?"
    assert re.fullmatch(rf"Usage: regard {name} \[OPTIONS\](?: {word})*", usage), usage


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", NAMES)
def test_options_are_described_in_sentences(name: str) -> None:
    with use_language("en"):
        options = load(name).params
    assert {option.name for option in options} >= {"lang"}
    for option in options:
        assert option.help.endswith("."), option.name
        assert re.match(r"[A-Z0-9-]|[a-z_]+( --\w+ \w+)?: |GiB", option.help), option.name


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize("name", [*NAMES, None])
def test_help_fits_the_terminal_in_both_languages(
    name: str | None, lang: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [name] if name else []
    page = said(capsys, *arguments, "--lang", lang, "--help")
    assert too_wide(page) == []
    assert bool(CHINESE.search(page)) == (lang == "zh")
    if lang == "zh":
        with use_language("zh"):
            options = (load(name) if name else _command()).params
        assert [option.help for option in options if not CHINESE.search(option.help or "")] == []


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", NAMES)
def test_a_mistyped_option_is_suggested_before_anything_else(
    name: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Although arguments are missing or wrong, too."""
    error = said(capsys, name, "--lagn", "zh", code=2)
    assert "error: No such option: --lagn; did you mean --lang" in error
    assert "没有选项 --lagn；您要写的是不是 --lang" in said(
        capsys, name, "--lang", "zh", "--lagn", code=2
    ).replace("\n", "")


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_language_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = " ".join(said(capsys, name, "--lang", "fr", code=2).split())
    assert "--lang: lang is 'fr'; it must be one of en (English), zh" in error


@pytest.mark.parametrize("lang", ["en", "zh"])
@pytest.mark.parametrize(
    "arguments", [*([k, *v] for k, v in PRINTED.items()), *MORE_COSTS], ids=" ".join
)
@pytest.mark.full(keep=3)
def test_output_fits_the_terminal_in_both_languages(
    arguments: list[str], lang: str, capsys: pytest.CaptureFixture[str]
) -> None:
    out = said(capsys, *arguments, "--lang", lang)
    assert too_wide(out) == []
    assert bool(CHINESE.search(out)) == (lang == "zh")


def test_what_is_printed_is_a_list_of_commands() -> None:
    assert set(PRINTED) < set(COMMANDS)


def test_json_is_the_same_in_both_languages(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments in (["cost", "gpt2", "--json"], ["describe", "mla", "--json"]):
        assert said(capsys, *arguments, "--lang", "zh") == said(capsys, *arguments)


def test_the_language_of_a_command(monkeypatch: pytest.MonkeyPatch) -> None:
    assert language_of_arguments(["cost", "gpt2"]) == "en"
    assert language_of_arguments(["cost", "--lang", "zh"]) == "zh"
    assert language_of_arguments(["generate", "--", "--lang", "zh"]) == "en"
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert language_of_arguments(["cost"]) == "zh"
    assert language_of_arguments(["cost", "--lang=en"]) == "en"
    assert language_of_arguments(["cost", "--lang"]) == "zh"


def test_errors_speak_of_flags(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    target = str(tmp_path / "out")
    error = said(capsys, "convert", "tiny", target, code=2)
    assert "give --to, --kv-heads, --rotary-layout, --context, --dtype or --weights" in " ".join(
        error.split()
    )
    assert "error: --rank is 9999; it must be 2" in said(
        capsys, "convert", "tiny", target, "--to", "mla", "--rank", "9999", code=2
    )
    flags = {"rank": "--rank", "kv_heads": "--kv-heads", "context": "--context"}
    assert speak_of_flags("write context=1k..1M", flags) == "write context=1k..1M"
    assert speak_of_flags("gqa:rank=1 and a rank", flags) == "gqa:rank=1 and a rank"


def test_a_mistyped_model_comes_before_options_that_do_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = " ".join(said(capsys, "cost", "lama-3-8b", "--layers", "3", code=2).split())
    assert "did you mean 'llama-3-8b'" in error


@pytest.mark.full(keep=["regard.notation"])  # it starts without torch
@pytest.mark.parametrize("program", [*PROGRAMS, "experiments"])
@pytest.mark.skipif(os.name == "nt", reason="pipes close differently there")
def test_a_reader_that_leaves_is_no_failure(program: str) -> None:
    arguments = {"regard": ["--help"], "regard.train.chinese_text": ["--help"]}
    arguments["experiments"] = ["--list"]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-m", program, *arguments.get(program, [])],
        env={**os.environ, "PYTHONPATH": f"{PACKAGE.parent}{os.pathsep}{ROOT}"},
        stdout=writer,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
        timeout=120,
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")


def test_every_program_ends_in_the_same_way() -> None:
    for program in PROGRAMS[1:]:
        path = PACKAGE.parent / f"{program.replace('.', '/')}.py"
        assert "run_program(" in path.read_text("utf-8").partition('if __name__ == "__main__":')[2]


def test_completion_knows_commands_and_options(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, n, found in (("regard sh", "1", "show"), ("regard cost --mach", "2", "--machine")):
        monkeypatch.setenv("_REGARD_COMPLETE", "complete_bash")
        monkeypatch.setenv("COMP_WORDS", words)
        monkeypatch.setenv("COMP_CWORD", n)
        assert said(capsys).split() == [found]
