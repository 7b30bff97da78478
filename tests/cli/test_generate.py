"""`regard generate`: text to stdout, figures to stderr or JSON."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import regard
from regard.cli.app import run
from regard.units import size
from regard.untrusted_text import MULTILINE, escape_controls
from tests.cli.command import Said
from tests.inspect.small_model import model

PROMPT = "a fluffy"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regard, "load", lambda source, **_: model(), raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def continued(**options: float) -> str:
    return continued_of(PROMPT, **options)


def continued_of(prompt: str, **options: float) -> str:
    return "".join(model().generate(prompt, **options))  # type: ignore[call-overload]


@pytest.mark.parametrize("more", [[], ["--no-stream"]])
def test_the_prompt_and_its_continuation_are_printed(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", PROMPT, "--max-tokens", "5", *more]) == 0
    captured = capsys.readouterr()
    assert captured.out == PROMPT + continued(max_tokens=5) + "\n"
    # 2 (k and v) x 3 layers x 2 heads x 8 dims x 4 bytes, for the prompt and all new tokens but the
    # last
    held = model().encode(PROMPT).shape[1] + 5 - 1
    read = model().encode(PROMPT).shape[1]
    speeds = (
        rf"5 tokens, prompt of {read} at [0-9,.]+ tokens/s, decoding at [0-9,.]+ tokens/s, "
        rf"growing cache "
    )
    assert re.match(speeds, captured.err), captured.err
    cached = size(2 * 3 * 2 * 8 * 4 * held)
    assert captured.err.endswith(f" tokens/s, growing cache of {cached}\n")


def test_weights_are_stored_in_the_given_form(
    said: Said, refused: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[object] = []

    def load(source: str, **options: object) -> regard.models.Model:
        asked.append(options["weights"])
        return model()

    monkeypatch.setattr(regard, "load", load, raising=False)
    one = ("generate", PROMPT, "--max-tokens", "1")
    said(*one, "--weights", "int8")
    said(*one)
    assert asked == ["int8", None]
    monkeypatch.undo()
    assert "it must be one of int8, int4, float16" in refused(*one, "--weights", "int3")


def test_json_has_text_ids_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"max_tokens": 6, "temperature": 0.9, "top_k": 20, "seed": 3}
    assert run(["generate", PROMPT, "--json", *flags(options)]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["text"] == continued(**options)
    assert found["prompt"] == PROMPT
    assert len(found["ids"]) == found["tokens"] == 6
    assert found["tokens_per_second"] > 0
    assert found["finished"] == "length"
    assert found["cache"] == "growing"
    assert found["cache_bytes"] > 0
    assert 0 < found["prefill_seconds"] < found["seconds"]
    assert found["prompt_tokens"] == model().encode(PROMPT).shape[1]
    read, wrote = (found[f"{kind}_tokens_per_second"] for kind in ("prefill", "decode"))
    assert read == pytest.approx(found["prompt_tokens"] / found["prefill_seconds"], rel=0.2)
    assert wrote == pytest.approx(5 / found["decode_seconds"], rel=0.2), (
        "the first comes out of the prompt's pass"
    )
    assert found["prefill_seconds"] + found["decode_seconds"] <= found["seconds"] + 1e-4
    assert captured.err == ""


def test_one_token_has_no_decoding_speed(capsys: pytest.CaptureFixture[str], said: Said) -> None:
    assert run(["generate", PROMPT, "--max-tokens", "1"]) == 0
    assert "tokens/s, no token was decoded after the first, growing" in capsys.readouterr().err
    found = json.loads(said("generate", PROMPT, "--max-tokens", "1", "--json"))
    assert found["decode_tokens_per_second"] is None
    assert found["decode_seconds"] == 0


OPTIONS = {
    "max_tokens": 7,
    "temperature": 1.4,
    "top_k": 80,
    "top_p": 0.9,
    "min_p": 0.01,
    "seed": 5,
    "repetition_penalty": 1.2,
    "stop": ["zz", "e"],
    "chunk": 2,
    "max_context": 30,
    "cache": "ring",
}


def flags(options: dict[str, Any]) -> list[str]:
    return [
        text
        for name, value in options.items()
        for one in (value if isinstance(value, list) else [value])
        for text in (f"--{name.replace('_', '-')}", str(one))
    ]


@pytest.mark.full
def test_every_option_does_what_its_argument_does(said: Said) -> None:
    """Each alone, and all together."""
    for options in (*({name: value} for name, value in OPTIONS.items()), OPTIONS):
        given = {"max_tokens": 7, **options}
        if options == {"cache": "ring"}:
            given["max_context"] = 30
        if options.keys() & {"top_k", "top_p", "min_p", "seed"}:
            given["temperature"] = OPTIONS["temperature"]  # of the tokens that are drawn
        found = json.loads(said("generate", PROMPT, "--json", *flags(given)))
        right = model().generate(PROMPT, **given)
        assert found["text"] == "".join(right)
        assert (found["finished"], found["cache"]) == (
            right.finished,
            given.get("cache", "growing"),
        )


def test_several_prompts_are_one_batch(capsys: pytest.CaptureFixture[str], said: Said) -> None:
    prompts = [PROMPT, "the", "blue forest of a creature"]
    texts = [continued_of(prompt, max_tokens=4) for prompt in prompts]
    assert run(["generate", *prompts, "--max-tokens", "4"]) == 0
    captured = capsys.readouterr()
    # what a terminal would obey is shown: "\r" would write over the line
    joined = (escape_controls(a + b, keep=MULTILINE) for a, b in zip(prompts, texts, strict=True))
    assert captured.out == "\n---\n".join(joined) + "\n"
    assert captured.err.startswith("12 tokens, ")
    found = json.loads(said("generate", *prompts, "--max-tokens", "4", "--json"))
    assert [row["text"] for row in found["rows"]] == texts
    assert [row["prompt"] for row in found["rows"]] == prompts
    assert found["tokens"] == 12
    assert said("generate", *prompts, "--max-tokens", "0") == "\n---\n".join(prompts) + "\n"


def test_a_prompt_from_a_file(tmp_path: Path, said: Said, refused: Said) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text(PROMPT, "utf-8")
    shown = said("generate", "--prompt-file", file, "--max-tokens", "3")
    assert shown == PROMPT + continued(max_tokens=3) + "\n"
    file.write_bytes(b"\xff\xfe")
    for given in (file, tmp_path / "none.txt"):
        error = refused("generate", "--prompt-file", given)
        assert "Invalid value for '--prompt-file'" in error


def test_a_prompt_from_standard_input_is_bounded(
    monkeypatch: pytest.MonkeyPatch, said: Said
) -> None:
    class Endless:
        def read(self, size: int) -> bytes:
            raise OSError(f"asked for {size} bytes")

    monkeypatch.setattr("sys.stdin", SimpleNamespace(buffer=Endless()))
    assert "asked for 67108865 bytes" in said("generate", "--prompt-file", "-", code=2)


def test_beams(capsys: pytest.CaptureFixture[str], said: Said) -> None:
    found = model().beam_search(PROMPT, beams=3, max_tokens=4, length_penalty=0.5)
    given = ["generate", PROMPT, "--beams", "3", "--max-tokens", "4", "--length-penalty", "0.5"]
    assert run(given) == 0
    captured = capsys.readouterr()
    assert captured.out == PROMPT + found[0].text + "\n"
    assert captured.err.startswith(f"{len(found[0].ids)} tokens, score {found[0].score:.3f}, ")
    told = json.loads(said(*given, "--json"))
    assert [beam["text"] for beam in told["beams"]] == [x.text for x in found]
    assert (told["text"], told["score"]) == (found[0].text, found[0].score)
    assert told["cache_bytes"] > 0
    assert told["prompt_tokens"] == model().encode(PROMPT).shape[1] - 1, (
        "the search begins with the last"
    )
    assert told["steps"] >= told["tokens"]
    seconds = told["steps"] / told["decode_tokens_per_second"]  # those of the JSON are rounded
    assert seconds == pytest.approx(told["decode_seconds"], rel=0.01, abs=1e-4)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([""], "the text '' has no tokens"),
        ([PROMPT, "--top-k", "5"], "'--top-k': has no effect at temperature 0"),
        ([PROMPT, "--beams", "2", "--min-p", "0.1"], "'--min-p': has no effect"),
        ([PROMPT, "--seed", "-1"], "'--seed': seed is -1; it must be an int from 0 to 4294967295"),
        ([PROMPT, "--temperature", "nan"], "'--temperature'"),
        ([PROMPT, "--top-p", "0"], "above 0"),
        ([PROMPT, "--stop", ""], "'--stop': a stop string is empty"),
        ([PROMPT, "the", "--beams", "2"], "takes one prompt"),
        ([PROMPT, "--beams", "2", "--temperature", "1"], "beam search takes no sampler"),
        ([PROMPT, "--cache", "ring"], "needs max_context"),
        ([PROMPT, "--prompt-file", "x"], "'PROMPT': give either a prompt or --prompt-file"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    arguments: list[str], message: str, refused: Said
) -> None:
    """That the right option is blamed: tests/surface/test_command_line.py."""
    assert message in refused("generate", *arguments)


def test_beams_are_refused_a_sampler_before_a_model_is_read(refused: Said) -> None:
    given = (PROMPT, "--beams", "2", "--temperature", "1", "--model", "/no")
    assert "beam search takes no sampler" in refused("generate", *given)


def test_help_has_an_example_that_runs(said: Said) -> None:
    out = " ".join(said("generate", "--help").split())
    assert 'regard generate "Return the" --max-tokens 40 --temperature 0.8 --seed 1' in out
    said("generate", "Return the", "--max-tokens", "40", "--temperature", "0.8", "--seed", "1")


def test_no_prompt_and_no_text_moves_the_cursor(tmp_path: Path, said: Said) -> None:
    file = tmp_path / "prompt.txt"
    file.write_text("a\x1b[2J\u202eb\tc\nd", "utf-8")
    nothing = ("generate", "--prompt-file", file, "--max-tokens", "0")
    assert said(*nothing) == "a‹1B›[2J‹202E›b\tc\nd\n"
    assert json.loads(said(*nothing, "--json"))["prompt"] == "a\x1b[2J\u202eb\tc\nd"
