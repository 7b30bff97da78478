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
import torch

import regard
from regard.cli import main
from regard.cli.app import COMMANDS, _command, language_of_arguments, load, run
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
        if path.parent.name != "csrc"  # an installer runs it before there is a package
    ),
]
"""Everything that `python -m` runs."""
PRINTED = {
    "audit": ["--list"],
    "compare": ["--list"],
    "cost": ["llama-3-8b", "--machine", "h100-sxm"],
    "describe": ["mla"],
    "layer": ["mha", "--dim", "32", "--heads", "2"],
    "show": ["causal & window(4) | sinks(1)", "--queries", "50", "--tiles", "8", "--ranks", "2"],
}
"""Commands that print much within a second, and their arguments; the others print what their own
tests check.
"""
WRONG_ARGUMENTS = {
    "audit torch.nn:Nope": "TARGET",
    "audit nope": "TARGET",
    "compare nothing": "MECHANISM",
    "cost lama-3-8b": "MODEL",
    "describe nothing": "NAME",
    "explain": "TEXT",
    "inspect nope abc": "TASK",
    "inspect ablate": "TEXT",
    "layer nothing": "MECHANISM",
    "show nope": "MASK",
}
"""Command lines with a wrong argument that is no option, and its name in the usage line."""
WRONG = (
    *WRONG_ARGUMENTS,
    *(
        f"audit torch.nn:MultiheadAttention --dim 64 --heads 4 {x}"
        for x in (
            "--accept nope",
            "--adapter nope",
            "--device nope",
            "--dtype nope",
            "--kv-heads 3",
            "--layout nope",
            "--mask nope",
            "--revision x",
            "--set nope",
            "--window 0",
        )
    ),
    "compare mha --csv no/x.csv",
    "compare mha --device nope",
    "compare mha --heads 4 --dim 30",
    "compare mha --like llama-3-8b --dim 64",
    "compare --like lama-3-8b",
    "compare mha --quality --task nope",
    "compare mha --same nope",
    "compare mha --task mqar",
    "compare sinks --window 2",
    "convert tiny no-such-out --context 4",
    "convert tiny no-such-out --dtype nope",
    "convert tiny no-such-out --kv-heads 3",
    "convert tiny no-such-out --kv-heads 2 --revision x",
    "convert tiny no-such-out --kv-heads 2 --text no-such-file",
    "convert tiny no-such-out --to mla --rank 9999",
    "convert tiny no-such-out --rotary-layout nope",
    "convert tiny no-such-out --context 4096 --scaling nope",
    "convert tiny no-such-out --weights nope",
    "cost llama-3-8b --context 9q",
    "cost llama-3-8b --dtype nope",
    "cost llama-3-8b --html x.html",
    "cost llama-3-8b --machine h10",
    "cost llama-3-8b --machine h100-sxm --ranks 2 --method nope",
    "cost llama-3-8b --mechanisms mha:0",
    "cost llama-3-8b --revision x",
    "cost llama-3-8b --sweep bad",
    "cost llama-3-8b --vs lama-3-8b",
    "cost --dim 512 --layers 2 --heads 3",
    "cost --dim 512 --layers 2 --heads 8 --kv-heads 3",
    "cost --dim 512 --layers 2 --heads 8 --attention nothing",
    "cost --dim 512 --layers 2 --heads 8 --window 0",
    "cost --dim 512 --layers 2 --heads 8 --attention mla --set kv_rank=x",
    "describe gqa --set nope=3",
    "describe gqa --set groups=3",
    "describe mha --dim 10 --heads 3",
    "describe mha --figure x.txt",
    "explain abc --attention nothing",
    "explain abc --attention gqa --set groups=3",
    "explain abc --call 9",
    "explain abc --device nope",
    "explain abc --head 99",
    "explain abc --key nope",
    "explain abc --layer 99",
    "explain --module nope",
    "explain abc --place nope",
    "explain abc --query nope",
    "explain abc --set groups=3",
    "explain abc --target x",
    "extend tiny --device nope",
    "extend tiny --text README.md --length 4",
    "extend tiny --text README.md --method nope",
    "chat tiny --device nope",
    "chat tiny --dtype nope",
    "chat tiny --max-tokens 0",
    "chat tiny --repetition-penalty 0",
    "chat tiny --revision x",
    "chat tiny --top-p 0",
    "chat tiny --weights int3",
    "generate --messages no-such-file abc",
    "generate one --ids",
    "generate abc --beams 2 --cuda-graph",
    "generate abc --beams 2 --length-penalty nan",
    "generate abc --beams 2 --repetition-penalty 2",
    "generate abc --beams 2 --stop x",
    "generate abc --beams 2 --temperature 0.5",
    "generate abc def --beams 2",
    "generate abc --cache nope",
    "generate abc --cuda-graph",
    "generate abc --device nope",
    "generate abc --dtype nope",
    "generate abc --max-context 2",
    "generate abc --parallel context",
    "generate abc --repetition-penalty 0",
    "generate abc --revision x",
    "generate abc --top-k 100000",
    "generate abc --top-k 0",
    "generate abc --top-p 0",
    "generate abc --weights int3",
    "generate --prompt-file no-such-file",
    "inspect ablate abc --answer xyzzy",
    "inspect ablate abc --device nope",
    "inspect ablate abc --method nope",
    "inspect ablate abc --versus b",
    "inspect attribute abc --method integrated_gradients --steps 0",
    "inspect lens abc --seed 3",
    "inspect measure abc --metric nope",
    "inspect patch abc --corrupt abcdefgh",
    "inspect patch abc --corrupt abd --what nope",
    "inspect patch abc --corrupt abd --what paths --receiver layers.1:99:k",
    "inspect patch abc --corrupt abd --what paths --receiver x",
    "inspect rollout abc --method flow --query 99",
    "inspect taps abc --out x.csv",
    "layer gqa --set groups=3",
    "layer mha gqa --set groups=1",
    "layer mha --device nope",
    "layer mha --dim 10 --heads 3",
    "layer mha --figure x.svg --head 99",
    "layer mha --mask nope",
    "show causal --figure x.txt",
    "show causal --ranks 2 --shards nope",
    "show causal --tiles x",
    "train --out no-such-out --attention nothing",
    "train --out no-such-out --device nope",
    "train --out no-such-out --dim 30",
    "train --out no-such-out --dtype nope",
    "train --out no-such-out --heads 4 --kv-heads 3",
    "train --out no-such-out --model lstm",
    "train --out no-such-out --model lstm --task nope",
    "view tiny abc --device nope",
    "view tiny abc --head 99",
    "view tiny abc --host 0.0.0.0",
    "view tiny abc --layer 99",
)
"""Command lines in which the last option is wrong, or what `WRONG_ARGUMENTS` says."""
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
    assert "没有选项 --lagn；你要写的是不是 --lang" in said(
        capsys, name, "--lang", "zh", "--lagn", code=2
    ).replace("\n", "")


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", NAMES)
def test_an_unknown_language_is_refused(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    error = " ".join(said(capsys, name, "--lang", "fr", code=2).split())
    assert "'--lang': lang is 'fr'; it must be one of en (English), zh" in error


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


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("line", WRONG)
def test_an_error_blames_exactly_the_wrong_option(
    line: str, root: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the library says is English in both languages; what the command says is Chinese."""
    monkeypatch.setenv("COLUMNS", "9999")
    monkeypatch.chdir(root)
    words = line.split()
    place = WRONG_ARGUMENTS.get(line) or next(x for x in reversed(words) if x[:2] == "--")
    reasons = []
    for lang, frame in (("en", "error: Invalid value for '{}': "), ("zh", "错误：'{}' 的值无效：")):
        error = said(capsys, *words, "--lang", lang, code=2)
        assert frame.format(place) in error
        reasons.append(error.partition(frame.format(place))[2])
    english, chinese = reasons
    assert chinese == english or re.search("[a-z]{3,} [a-z]{2,} [a-z]{2,} ", chinese) is None


def test_every_command_is_asked_for_something_wrong() -> None:
    assert {line.split()[0] for line in WRONG} == set(COMMANDS)


def test_a_mistyped_model_comes_before_options_that_do_not_fit(
    capsys: pytest.CaptureFixture[str],
) -> None:
    error = " ".join(said(capsys, "cost", "lama-3-8b", "--layers", "3", code=2).split())
    assert "did you mean 'llama-3-8b'" in error


def test_a_warning_is_a_note_without_a_line_of_code() -> None:
    program = (
        "import warnings; from regard.cli import main\n"
        "try: main(['--help'])\n"
        "except SystemExit: warnings.warn('two things are slow', stacklevel=1)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(PACKAGE.parent), "LC_ALL": "C"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stderr == "note: two things are slow\n"


@pytest.mark.full(keep=["regard.notation"])  # it starts without torch
@pytest.mark.parametrize("program", [*PROGRAMS, "docs.tiny_text", "benchmarks", "experiments"])
@pytest.mark.skipif(os.name == "nt", reason="pipes close differently there")
def test_a_reader_that_leaves_is_no_failure(program: str) -> None:
    if program == "regard.integrations.lm_eval":
        pytest.importorskip("lm_eval", reason="pip install lm_eval")
    arguments = {"regard": ["--help"], "docs.tiny_text": ["--help"]}
    arguments |= {name: ["--list"] for name in ("benchmarks", "experiments")}
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


@pytest.mark.parametrize(
    "error",
    [
        MemoryError("Unable to allocate 5. TiB for an array"),
        RuntimeError("DefaultCPUAllocator: can't allocate memory: you tried to allocate 5 bytes"),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 5.00 GiB"),
    ],
)
def test_refused_memory_is_one_line(error: Exception, capsys: pytest.CaptureFixture[str]) -> None:
    class Command:
        def main(self, **_: object) -> int:
            raise error

    assert run([], Command) == 1
    assert " ".join(capsys.readouterr().err.split()) == f"error: not enough memory: {error}"


def test_another_fault_is_not_taken_for_refused_memory() -> None:
    class Command:
        def main(self, **_: object) -> int:
            raise RuntimeError("a fault")

    with pytest.raises(RuntimeError, match="a fault"):
        run([], Command)
