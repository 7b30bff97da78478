"""`regard show`: the drawing, the numbers, wrong usage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from regard.cli.app import run


def call(*arguments: str, **environment: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    every = {"ignore_unknown_options": True, "allow_extra_args": True, "help_option_names": []}

    @app.command(context_settings=every)
    def command(context: typer.Context) -> None:
        raise typer.Exit(run(["show", *context.args]))

    return CliRunner(env={"NO_COLOR": None, "FORCE_COLOR": None, **environment}).invoke(
        app, list(arguments)
    )


def figures(*arguments: str) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_page() -> None:
    result = call("causal & window(2) | sinks(1)", "--queries", "4")
    assert result.exit_code == 0
    lines = result.stdout.splitlines()
    assert lines[:2] == ["causal & window(2) | sinks(1)", ""]
    assert lines[-5:] == [
        "  positions queries 0 to 3, keys 0 to 3",
        "  pairs     9 of 16 (56.2%)",
        "  keys      1 to 3 per query, 2.25 on average",
        "  intervals at most 2 per query, so kernels need not evaluate the mask",
        "  tiles     7 empty, 0 partial, 9 full of 1 x 1: 43.8% skipped",
    ]


def test_the_figure_of_a_mask(tmp_path: Path) -> None:
    picture = tmp_path / "mask.svg"
    result = call("causal & window(2)", "--queries", "8", "--figure", str(picture))
    assert result.exit_code == 0
    assert "causal &amp; window(2)" in picture.read_text(encoding="utf-8")
    result = call("causal", "--queries", "513", "--figure", str(tmp_path / "large.svg"))
    assert result.exit_code == 2
    assert "at most 512 x 512 pairs" in result.output
    assert not (tmp_path / "large.svg").exists()


def test_numbers() -> None:
    found = figures("causal & window(8)", "--queries", "64", "--tiles", "16x32")
    assert found["mask"] == "causal & window(8)"
    assert (found["queries"], found["keys"]) == ([0, 64], [0, 64])
    assert (found["batch_rows"], found["heads"], found["pairs"]) == (1, 1, 484)
    assert found["share"] == 484 / 4096
    seen = found["keys_per_query"]
    assert (seen["min"], seen["max"], seen["mean"]) == (1, 8, 484 / 64)
    assert seen["counts"] == [[[min(q + 1, 8) for q in range(64)]]]
    assert found["most_intervals"] == 1
    assert found["intervals"] == [[[[[max(0, q - 7), q + 1]] for q in range(64)]]]
    assert found["tiles"] == {"size": [16, 32], "empty": 3, "partial": 5, "full": 0}


def test_a_decoding_step_sees_what_the_last_row_of_the_prefill_saw() -> None:
    prefill = figures("causal & window(4) | sinks(2)", "--queries", "16")
    step = figures("causal & window(4) | sinks(2)", "--queries", "1", "--keys", "16")
    assert step["queries"] == [15, 16]
    assert step["intervals"][0][0] == prefill["intervals"][0][0][-1:] == [[[0, 2], [12, 16]]]


def test_start() -> None:
    assert (
        figures("causal", "--queries", "4", "--keys", "10", "--start", "0")["pairs"]
        == 1 + 2 + 3 + 4
    )
    assert figures("causal", "--queries", "4", "--start", "6")["keys"] == [0, 10]
    assert figures("causal", "--queries", "2", "--start", "-5")["pairs"] == 0
    assert call("causal", "--queries", "2", "--start", "-5").exit_code == 0


def test_heads_and_batch_rows_are_drawn_apart() -> None:
    result = call(
        "heads((causal, causal & window(2))) & padding((((0, 3),), ((1, 4),)))", "--queries", "4"
    )
    assert result.exit_code == 0
    for title in (
        "batch row 0, head 0",
        "batch row 0, head 1",
        "batch row 1, head 0",
        "batch row 1, head 1",
    ):
        assert f"  {title}\n" in result.stdout
    assert call("heads((causal, full))", "--queries", "2").stdout.count("  head ") == 2
    assert call("prefix((1, 2, 3))", "--queries", "2").stdout.count("  batch row ") == 3
    many = call("prefix((1, 2, 3, 4, 5, 6))", "--queries", "2").stdout
    assert "  ... and 2 more batch rows and heads, counted below\n" in many
    assert figures("prefix((1, 2))", "--queries", "3")["keys_per_query"]["counts"] == [
        [[1] * 3],
        [[2] * 3],
    ]


def test_the_shards_of_ranks_are_drawn() -> None:
    result = call("causal & window(4)", "--queries", "16", "--ranks", "2", "--shards", "even")
    assert result.exit_code == 0
    assert result.stdout.splitlines()[-3:] == [
        "  2 ranks, even: mean work / most work 0.91",
        "      0 ████████········  pairs 26, keys received 0",
        "      1 ········████████  pairs 32, keys received 3",
    ]
    numbers = figures("causal", "--queries", "4096", "--ranks", "8")["ranks"]
    assert numbers["efficiency"] >= 0.95
    assert sum(numbers["pairs"]) == 4096 * 4097 // 2
    assert sum(b - a for spans in numbers["spans"] for a, b in spans) == 4096
    assert all(
        len(x) <= 80
        for x in call("causal", "--queries", "4096", "--ranks", "8").stdout.splitlines()
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (("--shards", "zigzig"), "is not one of balanced, zigzag, even"),
        (("--keys", "32"), "leave out --keys and --start"),
    ],
)
def test_shards_that_cannot_be_drawn(arguments: tuple[str, ...], message: str) -> None:
    result = call("causal", "--ranks", "2", *arguments)
    assert result.exit_code == 2
    assert message in result.stderr


def test_tiles_are_drawn_where_asked() -> None:
    assert "tiles of 4" not in call("causal").stdout
    drawn = call("causal", "--queries", "8", "--tiles", "4").stdout
    assert "  tiles of 4 queries x 4 keys: ██ full, ▒▒ partial, · empty" in drawn
    assert "  tiles     1 empty, 2 partial, 1 full of 4 x 4: 25.0% skipped\n" in drawn


def test_a_mask_without_intervals_says_so() -> None:
    assert "  intervals none: visible keys have gaps or are unknown" in call("strided(4)").stdout
    found = figures("strided(4)")
    assert found["intervals"] is None
    assert found["most_intervals"] is None


def test_colours_only_where_wanted() -> None:
    plain, colour = call("causal"), call("causal", "--color")
    assert "\x1b[" not in plain.stdout
    assert "\x1b[38;2;" in colour.stdout
    assert (
        re.sub("\x1b\\[[0-9;]*m", "", colour.stdout)
        == plain.stdout
        == call("causal", "--no-color").stdout
    )
    assert "\x1b[" not in call("causal", "--no-color", FORCE_COLOR="1").stdout


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["causal & windw(4)"], "unknown mask \"windw\"; did you mean 'window'?\n  causal"),
        (["window(0)"], "Window size is 0; it must be 1 or more"),
        (["causal", "--tiles", "4y4"], '"4y4" must be a size such as 16, or 16x32 for queries x'),
        (["causal", "--tiles", "0"], '"0" must be a size'),
        (["causal", "--tiles", "1x2x3"], '"1x2x3" must be a size'),
        (["strided(8)", "--queries", "65536"], "error: 65,536 queries x 65,536 keys are too many"),
    ],
)
def test_wrong_usage_is_exit_2(arguments: list[str], message: str) -> None:
    result = call(*arguments)
    assert result.exit_code == 2
    assert message in result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr
