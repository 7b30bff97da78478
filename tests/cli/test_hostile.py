"""Hostile words on the command line: refused soon and briefly, and nothing in them reaches the
terminal as a command.
"""

from __future__ import annotations

import re
from types import SimpleNamespace

import pytest
import typer

from regard.cli import explain as command
from regard.cli.app import MAX_MESSAGE, run
from regard.inspect.model_run import ModelRun
from tests.cli.command import Said
from tests.fuzz.box import RAW

WORDS = {
    "controls": "a\x1b[2Jb\x9b0m",
    "direction": "a\u202eb",
    "long": "x" * 1_000_000,
    "long controls": "\x1b" * 300_000,
    "digits": "9" * 5000,
    "other digits": "\u00b2",
    "half letters": "a\udcffb",
}
PLACES = {
    "place": ("explain", "x", "--place", "@"),
    "call": ("explain", "x", "--attention", "nsa", "--call", "@"),
    "query": ("explain", "x", "--attention", "mqa", "--query", "@"),
    "option": ("explain", "x", "--attention", "mqa", "--set", "@"),
    "mechanism": ("describe", "@"),
    "mask": ("show", "@"),
    "size": ("show", "window(@)"),
    "tiles": ("show", "causal", "--tiles", "@"),
    "figure": ("explain", "x", "--figure", "@"),
    "command": ("@",),
    "flag": ("show", "--@"),
}


@pytest.mark.full(keep=["mechanism", "mask", "flag"])
@pytest.mark.parametrize("place", PLACES)
def test_hostile_words(
    place: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "100")
    for name, word in WORDS.items():
        assert run([x.replace("@", word) for x in PLACES[place]]) in (1, 2), name
        said = capsys.readouterr()
        assert said.out == ""
        # the colours of typer's own box are no command of the word's
        plain = re.sub(r"\x1b\[[0-9;]*m", "", said.err)
        assert not RAW.search(plain), (name, plain[:300])
        assert "Traceback" not in plain
        assert 20 < len(plain) < 2 * MAX_MESSAGE, (name, len(plain))


@pytest.mark.parametrize(
    "expression, message",
    [
        ("window(10^20)", "a mask is expected here"),
        ("window(10**20)", "a mask is expected here"),
        (f"window({10**20})", f"the number is larger than {1 << 53}"),
        ("window(" + "9" * 5000 + ")", "not a mask expression"),
        ("heads((" + "causal," * 5000 + "))", "more than 512 masks"),
        ("causal" + " & window(3)" * 513, "more than 512 masks|nested deeper than 50"),
        ("~" * 5000 + "causal", "nested deeper than 50|too deep|not a mask expression"),
        ("(" * 5000 + "causal" + ")" * 5000, "not a mask expression"),
        ("window(" + "(" * 190 + "1" + ",)" * 190 + ")", "nested deeper than 50"),
        ("causal & " * 10_000 + "causal", "the expression has 90006 characters; at most 65536"),
    ],
)
def test_hostile_masks(expression: str, message: str, refused: Said) -> None:
    error = refused("show", expression)
    assert re.search(message, error), error[:500]
    assert len(error) < 2 * MAX_MESSAGE


def _reading(tokens: int) -> ModelRun:
    """What `_check_length` looks at."""
    return SimpleNamespace(sequences={"text": SimpleNamespace(ids=range(tokens))})  # type: ignore[return-value]


@pytest.mark.full
def test_explain_takes_16384_tokens_and_no_more(
    refused: Said,
) -> None:
    assert command.MAX_TOKENS == 16_384
    check = getattr(command._check_length, "__wrapped__", command._check_length)
    check(_reading(16_384))
    with pytest.raises(typer.BadParameter, match="the text has 16,385 tokens, and every pair of"):
        check(_reading(16_385))
    for more in ((), ("--attention", "mqa")):
        error = refused("explain", "to be " * 20_000, *more)
        assert "every pair of them is computed; the limit is 16,384 tokens" in error
