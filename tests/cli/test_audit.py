"""`regard audit`: exit codes, the table, JSON, wrong usage."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest
import typer
from typer.testing import CliRunner, Result

from regard.audit import FAULTS
from regard.audit.run_checks import CHECKS, REPEATABLE
from regard.cli.app import run
from regard.cli.audit import audit
from regard.inspect import save
from tests.audit.test_recordings import planted, recorded
from tests.cli.command import Said
from tests.models import small

FAULTY_CODE = "tests.audit.faulty_code"
SIZES = ("--dim", "16", "--heads", "4")


def call(*arguments: str) -> Result:
    app = typer.Typer(pretty_exceptions_enable=False)
    app.command()(audit)
    return CliRunner(env={"NO_COLOR": None, "FORCE_COLOR": None}).invoke(app, list(arguments))


def told(*arguments: str) -> dict[str, Any]:
    result = call(*arguments, "--json")
    assert result.exit_code in (0, 1, 3), result.output
    found = json.loads(result.stdout)
    assert found["clean"] == (result.exit_code != 1)
    return found


def names(found: dict[str, Any]) -> list[str]:
    return [finding["name"] for finding in found["findings"]]


def test_right_code_exits_with_0() -> None:
    result = call("torch.nn:MultiheadAttention", *SIZES)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("torch.nn:MultiheadAttention, called forward(query, key, value")
    assert re.search(
        r"^0 faults, 17 checks passed, 0 could not be made, 6 do not apply$",
        result.stdout,
        re.MULTILINE,
    )
    assert re.search(r"cache size +no window is claimed", result.stdout)


def test_faults_exit_with_1_and_are_shown() -> None:
    result = call(f"{FAULTY_CODE}.steps:OneMore", *SIZES, "--causal", "--window", "4")
    assert result.exit_code == 1
    lines = [" ".join(line.split()) for line in result.stdout.splitlines()]
    assert "error window-off-by-one" in lines
    assert "Query 4 sees key 0: 5 keys with its own; the window is 4, its own included." in lines
    assert "smallest input T 5, query 4, heads 1, head_dim 1" in lines
    assert "expected 4" in lines
    assert "got 5" in lines
    assert any(line.startswith("look at < against <=") for line in lines)
    assert lines[-1].startswith("1 fault, ")


UNKNOWN = "tests.audit.test_calls:Unknown"


def test_a_check_that_could_not_be_made_exits_with_3() -> None:
    result = call(UNKNOWN, *SIZES)
    assert result.exit_code == 3, result.output
    assert "The audit did not pass, because of the checks that could not be made" in result.stdout
    assert re.search(r"definition +its projections were read", result.stdout)
    assert call(UNKNOWN, *SIZES, "--allow-untried").exit_code == 0
    # faults stay faults
    assert call(f"{FAULTY_CODE}.masks:SeedOne", *SIZES, "--allow-untried").exit_code == 1


def test_checks_and_kinds_of_faults_have_chinese_names(said: Said) -> None:
    chinese = said("audit", UNKNOWN, *SIZES, "--lang", "zh", code=3)
    assert re.search(r"^ 定义 +", chinese, re.MULTILINE)
    names_of_checks = {check.name for check in (REPEATABLE, *CHECKS)}
    assert not [x for x in names_of_checks if re.search(rf"^ *{x}  ", chinese, re.MULTILINE)]
    faulty = (f"{FAULTY_CODE}.steps:OneMore", *SIZES, "--window", "4", "--lang", "zh")
    wrong = said("audit", *faulty, code=1)
    assert "\n错误 " in wrong


@pytest.mark.full
def test_sizes_may_be_said_by_set() -> None:
    sizes = ("--set", "dim=64", "--set", "heads=4")
    assert call("tests.audit.test_calls:Bare", *sizes).exit_code == 0
    found = told("tests.audit.test_calls:Bare", *sizes, "--set", "scale=0.2")
    assert names(found) == ["scale-wrong"]


def test_json() -> None:
    found = told(f"{FAULTY_CODE}.masks:SeedOne", *SIZES)
    assert names(found) == ["mask-polarity"]
    assert found["target"] == f"{FAULTY_CODE}.masks:SeedOne"
    assert found["seed"] == 0
    first = found["findings"][0]
    assert set(first) == {
        "name",
        "severity",
        "sentence",
        "example",
        "expected",
        "got",
        "look_at",
    }
    assert {entry["name"] for entry in found["not_tried"]} >= {"masks", "cache"}
    assert all(entry["why"] for entry in found["not_tried"])


def test_options_reach_the_audit() -> None:
    assert names(told(f"{FAULTY_CODE}.steps:Tiled", *SIZES, "--kv-heads", "2")) == [
        "gqa-head-order"
    ]
    assert names(told(f"{FAULTY_CODE}.masks:added", "--mask", "keep")) == ["mask-added"]
    assert names(told(f"{FAULTY_CODE}.base:attend", "--strict")) == ["garbage-leak"]
    assert names(told(f"{FAULTY_CODE}.steps:half_precision", "--rotary")) == ["rotary-precision"]
    assert (
        names(told(f"{FAULTY_CODE}.calls:Saved", *SIZES, "--accept", "cache-in-state-dict")) == []
    )
    found = told(
        f"{FAULTY_CODE}.steps:late_scale", "--heads", "2", "--head-dim", "16", "--dtype", "float16"
    )
    assert names(found) == ["softmax-overflow"]
    sized = told(
        "torch.nn:MultiheadAttention", "--set", "embed_dim=8", "--set", "num_heads=2", "--seed", "3"
    )
    assert (names(sized), sized["seed"]) == ([], 3)


def test_a_model(tmp_path: Path) -> None:
    folder = small.write(tmp_path, small.model(num_hidden_layers=1))
    found = told("--model", str(folder))
    assert names(found) == []
    assert found["target"] == str(folder)
    assert {"cache", "future", "left padding"} <= {check["name"] for check in found["passed"]}


def test_the_list_of_faults() -> None:
    assert set(json.loads(call("--list", "--json").stdout)) == set(FAULTS)
    shown = call("--list")
    assert shown.exit_code == 0
    assert all(name in shown.stdout for name in FAULTS)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((), "give either package.module:name or --model with a folder"),
        (("a:b", "--model", "tiny"), "give either package.module:name or --model with a folder"),
        (("no_such_module_here:F",), "cannot be imported"),
        (("torch.nn:MultiheadAttention",), "give --dim N --heads N"),
        (("torch.nn:MultiheadAttention", *SIZES, "--set", "bias"), "must be name=value"),
        ((f"{FAULTY_CODE}.base:halves", "--rotary", "--adapter", "a:b"), "are two ways to call"),
        (("--model", "no-such-folder"), "no-such-folder"),
    ],
)
def test_wrong_usage_exits_with_2(arguments: tuple[str, ...], message: str, refused: Said) -> None:
    assert message in refused("audit", *arguments)


def test_it_is_a_command(said: Said) -> None:
    shown = said("audit", "--help")
    assert "For example: regard audit torch.nn:MultiheadAttention" in shown
    assert run(["audit", "torch.nn:MultiheadAttention", *SIZES]) == 0
    assert run(["audit", f"{FAULTY_CODE}.steps:Unscaled", *SIZES]) == 1


def test_a_recording_is_audited_from_its_file(said: Said, tmp_path: Path) -> None:
    good, bad = tmp_path / "good.safetensors", tmp_path / "bad.safetensors"
    save(recorded(), good)
    save(planted(scale=lambda x: 2 * x), bad)
    assert json.loads(said("audit", good, "--json"))["target"] == str(good)
    text = said("audit", bad, code=1)
    assert "weights-sum" in text
    assert "the scale was" in text
    assert "各行之和不为 1" in said("audit", bad, "--lang", "zh", code=1)
    assert "heads is 2, which is about a call" in said("audit", good, "--heads", 2, code=2)
