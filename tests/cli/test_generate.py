"""`regard generate`: text to stdout, figures to stderr or JSON."""

from __future__ import annotations

import json

import pytest

import regard
from regard.cli.app import run
from tests.inspect.stand_in import model

PROMPT = "a fluffy"


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(regard, "load", lambda source: model(), raising=False)
    monkeypatch.setenv("COLUMNS", "200")


def continued(**options: float) -> str:
    return "".join(model().generate(PROMPT, **options))  # type: ignore[arg-type]


@pytest.mark.parametrize("more", [[], ["--no-stream"]])
def test_the_prompt_and_its_continuation_are_printed(
    more: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", PROMPT, "--max-tokens", "5", *more]) == 0
    captured = capsys.readouterr()
    assert captured.out == PROMPT + continued(max_tokens=5) + "\n"
    # 2 (k and v) x 3 layers x 2 heads x 8 dims x 4 bytes, for the prompt and all new tokens but the last
    held = model().encode(PROMPT).shape[1] + 5 - 1
    assert captured.err.startswith("5 tokens, ")
    assert captured.err.endswith(f" tokens/s, cache {2 * 3 * 2 * 8 * 4 * held:,} bytes\n")


def test_json_has_text_ids_and_figures(capsys: pytest.CaptureFixture[str]) -> None:
    options = {"max_tokens": 6, "temperature": 0.9, "top_k": 20, "seed": 3}
    flags = [
        text
        for name, value in options.items()
        for text in (f"--{name.replace('_', '-')}", str(value))
    ]
    assert run(["generate", PROMPT, "--json", *flags]) == 0
    captured = capsys.readouterr()
    found = json.loads(captured.out)
    assert found["text"] == continued(**options)
    assert found["prompt"] == PROMPT
    assert len(found["ids"]) == found["tokens"] == 6
    assert found["tokens_per_second"] > 0
    assert captured.err == ""


def test_seeds_differ_and_repeat(capsys: pytest.CaptureFixture[str]) -> None:
    texts = []
    for seed in ("1", "1", "2"):
        assert (
            run(["generate", PROMPT, "--max-tokens", "8", "--temperature", "1.5", "--seed", seed])
            == 0
        )
        texts.append(capsys.readouterr().out)
    assert texts[0] == texts[1] != texts[2]


def test_no_new_tokens_is_the_prompt(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", PROMPT, "--max-tokens", "0"]) == 0
    assert capsys.readouterr().out == PROMPT + "\n"


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([""], "the text '' has no tokens"),
        ([PROMPT, "--top-k", "100000"], "top_k is 100000; it must be 1 to"),
        ([PROMPT, "--top-k", "0"], "Invalid value for '--top-k'"),
        ([PROMPT, "--temperature", "-1"], "Invalid value for '--temperature'"),
        ([PROMPT, "--temperature", "nan"], "Invalid value for '--temperature'"),
        ([PROMPT, "--max-tokens", "-1"], "Invalid value for '--max-tokens'"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(["generate", *arguments]) == 2
    captured = capsys.readouterr()
    assert message in " ".join(captured.err.replace("│", " ").split())
    assert captured.out == ""


def test_help_has_an_example_that_runs(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["generate", "--help"]) == 0
    out = " ".join(capsys.readouterr().out.split())
    assert 'regard generate "Return the" --max-tokens 40 --temperature 0.8 --seed 1' in out
    assert (
        run(["generate", "Return the", "--max-tokens", "40", "--temperature", "0.8", "--seed", "1"])
        == 0
    )
