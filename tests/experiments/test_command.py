"""`python -m experiments`: the list, a run in every form, what is kept, and what is refused."""

from __future__ import annotations

import csv
import json
from dataclasses import replace
from pathlib import Path

import pytest

from experiments import CLAIMS
from experiments.__main__ import main

QUICK = ("minus-infinity", "decode-mask")


@pytest.fixture(autouse=True)
def english(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LC_ALL", "C")


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    found_code = main(arguments)
    found = capsys.readouterr()
    assert found_code == code, found.err
    return found.out, found.err


def test_the_list_has_every_claim(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "--list")
    for name, claim in CLAIMS.items():
        assert f"  {name} " in out
        assert claim.statement in out


def test_the_language(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "decode-mask", "--lang", "zh")
    assert out.startswith("decode-mask：有限制地成立")


def test_claims_are_run_told_and_written(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    page, table = tmp_path / "claims.html", tmp_path / "claims.csv"
    out, err = run(
        capsys, *QUICK, "--html", str(page), "--csv", str(table), "--out", str(tmp_path / "kept")
    )
    assert "minus-infinity: holds with limits\n" in out
    assert "2 claims: 0 hold, 2 hold with limits, 0 undecided, 0 do not hold; " in out
    assert "budget 1, seed 0" in out
    assert "... claim decode-mask (2/2)" in err
    text = page.read_text("utf-8")
    assert text.count("<section>") == 2
    assert text.count("<svg") == 2
    assert "<script" not in text
    lines = list(csv.DictReader(table.read_text("utf-8").splitlines()))
    assert {line["claim"] for line in lines} == {"minus-infinity", "decode-mask"}
    assert {line["answer"] for line in lines if line["role"] == "claim"} == {"yes"}
    again, _ = run(capsys, *QUICK, "--out", str(tmp_path / "kept"))
    assert again.count("(reused from an earlier run)") == 2


def test_json_has_the_numbers_and_the_bounds(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, *QUICK, "--json", "--seed", "3")
    told = json.loads(out)
    assert told["seed"] == 3
    assert [one["id"] for one in told["claims"]] == ["minus-infinity", "decode-mask"]
    for one in told["claims"]:
        assert one["verdict"] == "holds with limits"
        assert all(check["answer"] == "yes" for check in one["checks"] if check["role"] == "claim")
        assert one["numbers"]
    assert told["machine"]["torch"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("scaled",), "'ID': there is no claim 'scaled'; did you mean 'scale'"),
        (("scale", "--budget", "0"), "'--budget': budget is 0.0; it must be above 0"),
        (("scale", "--html", "nowhere/page.html"), "'--html': nowhere/page.html: there is no"),
        (("--budget", "2"), "'ID': give the id of a claim"),
        (("scale", "--seed", "-1"), "'--seed'"),
        (("scale", "--threads", "0"), "'--threads'"),
        (("scale", "--quality"), "No such option: --quality"),
    ],
)
def test_wrong_usage(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    arguments: tuple[str, ...],
    message: str,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert message in run(capsys, *arguments, code=2)[1]


def test_an_interrupt_tells_what_is_done(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stop(budget: float, seed: int) -> dict[str, float]:
        raise KeyboardInterrupt

    monkeypatch.setitem(CLAIMS, "decode-mask", replace(CLAIMS["decode-mask"], measure=stop))
    out, _ = run(capsys, *QUICK, "--json", code=130)
    told = json.loads(out)
    assert told["interrupted"] is True
    assert [one["id"] for one in told["claims"]] == ["minus-infinity"]
