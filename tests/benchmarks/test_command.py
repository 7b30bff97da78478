"""`python -m benchmarks`: a whole run at small sizes, its JSON and its chart, the list, and what is
refused.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from benchmarks import CASES, Case, Ceilings, Peer, PreparedCall, regard_peers
from benchmarks.__main__ import main
from benchmarks.cases import GPU, GROUPS
from benchmarks.programs import find_browser
from benchmarks.render import ratio_chart
from benchmarks.result import CaseResult, PeerResult
from regard.errors import RegardError
from regard.view import charts
from tests.benchmarks.small import SMALL

COMPILED = ("torch FlexAttention", "regard flex")


@pytest.fixture(autouse=True)
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every size is small, the compiled peer is left out, and ceilings are quick."""
    for name, case in list(CASES.items()):
        peers = tuple(one for one in case.peers if one.name not in COMPILED)
        sizes = dict.fromkeys(case.sizes, SMALL[name])
        monkeypatch.setitem(
            CASES, name, Case(case.name, case.description, sizes, (torch.float32,), peers)
        )
    quick = Ceilings(4e10, {torch.float32: 2e11})
    monkeypatch.setattr(Ceilings, "measure", lambda dtypes, device: quick)
    monkeypatch.setenv("COLUMNS", "1000")
    monkeypatch.setenv("NO_COLOR", "1")


def run(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> tuple[str, str]:
    found_code = main(arguments)
    found = capsys.readouterr()
    assert found_code == code, found.err
    return found.out, found.err


UNGROUPED = [name for name in CASES if not any(name in group for group in GROUPS.values())]
QUICK = ("--rounds", "2", "--seconds", "0.05")


@pytest.mark.full
def test_all_cases(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file, picture = tmp_path / "found.json", tmp_path / "found.svg"
    out, err = run(capsys, *QUICK, "--json", str(file), "--plot", str(picture))
    assert "ceilings: reading 40.0 GB/s, float32 products 200 GFLOP/s" in out
    told = json.loads(file.read_text("utf-8"))
    assert [case["case"] for case in told["cases"]] == UNGROUPED
    for case in told["cases"]:
        status = {row["peer"]: row["status"] for row in case["rows"]}
        first = CASES[case["case"]].peers[0]
        if case["case"] != "draw-page" or find_browser() is not None:
            assert status[first.name] == "timed"
        assert set(status.values()) <= {"timed", "missing", "unable"}
        assert f"{case['case']}: " in out
        assert f"... {case['case']}, " in err
    assert told["machine"]["torch"] == torch.__version__
    assert not told["interrupted"]
    svg = picture.read_text("utf-8")
    assert svg.startswith("<svg")
    assert "mla-decode, float32" in svg
    assert "transformers eager" in svg


def test_the_same_results_give_the_same_chart(tmp_path: Path) -> None:
    rows = [
        PeerResult("regard", "timed", seconds=0.01, ratio=1.0),
        PeerResult("x", "timed", seconds=0.1, ratio=10.0),
    ]
    found = CaseResult("demo", "", "B1", torch.float32, "cpu").with_rows(
        [*rows, PeerResult("y", "missing")]
    )
    for name in ("a.svg", "b.svg"):
        charts.write(ratio_chart([found], "A title"), tmp_path / name)
    first, second = ((tmp_path / name).read_text("utf-8") for name in ("a.svg", "b.svg"))
    assert first == second
    for words in ("A title", "demo, float32: regard", "10.00x, 100 ms"):
        assert words in first
    assert ">y<" not in first


@pytest.mark.full
def test_json_on_stdout_is_alone_there(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = (
        "decode",
        "--dtype",
        "float32",
        "--dtype",
        "bfloat16",
        "--length",
        "9",
        "--batch",
        "1",
    )
    out, err = run(capsys, *arguments, *QUICK, "--peer", "torch SDPA", "--json", "-")
    told = json.loads(out)
    assert [case["dtype"] for case in told["cases"]] == ["float32", "bfloat16"]
    assert {case["sizes"] for case in told["cases"]} == {"B1 H4 G2 D8 S9 T1"}
    assert [row["peer"] for row in told["cases"][0]["rows"]] == ["regard", "torch SDPA"]
    assert "ceilings:" in err


def test_memory_is_asked_for_by_peer(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[dict[str, Any]] = []

    def in_child(function: str, settings: dict[str, Any], *, advice: str) -> int:
        assert function == "benchmarks.cases:peer_peak_bytes"
        assert "--memory" in advice
        asked.append(settings)
        return 7_000_000

    monkeypatch.setattr("benchmarks.__main__.call_in_subprocess", in_child)
    arguments = ("decode", "--peer", "torch SDPA", "--length", "9", "--memory", "--json", "-")
    told = json.loads(run(capsys, *arguments, *QUICK)[0])
    assert [row["peak_bytes"] for row in told["cases"][0]["rows"]] == [7_000_000, 7_000_000]
    assert [one["peer"] for one in asked] == ["regard", "torch SDPA"]
    common = {"case": "decode", "size": "default", "length": 9, "batch": None, "dtype": "float32"}
    assert common.items() <= asked[0].items()


def test_the_list_names_what_is_missing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    absent: Peer[Any] = Peer(
        "elsewhere", "Not here.", regard_peers.attention, needs=("no_such_module",)
    )
    case = CASES["decode"]
    with_absent = Case(case.name, case.description, case.sizes, case.dtypes, (*case.peers, absent))
    monkeypatch.setitem(CASES, "decode", with_absent)
    out, _ = run(capsys, "--list")
    for name in UNGROUPED:
        assert name in out
        assert all(peer.name in out for peer in CASES[name].peers)
    (line,) = [line for line in out.splitlines() if "elsewhere" in line]
    assert "missing: no module no_such_module" in line
    assert line.endswith("decode")


@pytest.mark.full
def test_the_group_of_models_ends_with_one_table(capsys: pytest.CaptureFixture[str]) -> None:
    listed, _ = run(capsys, "models", "--list")
    assert all(name in listed for name in GROUPS["models"])
    assert "causal-prefill" not in listed
    out, _ = run(capsys, "nanogpt", "torch-encoder", "decode", *QUICK)
    table = out.rpartition("\n\n")[2].splitlines()
    assert table[0].split()[:4] == ["model", "dtype", "torch", "regard"]
    assert [line.split()[:2] for line in table[1:]] == [
        ["nanogpt", "float32"],
        ["torch-encoder", "float32"],
    ]
    assert all("1 call left to torch because it is small" in line for line in table[1:])


def test_cases_for_a_gpu_are_listed_and_refused_by_name(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for case in GPU:
        monkeypatch.setitem(CASES, case.name, case)
    listed, _ = run(capsys, "gpu", "--list")
    assert all(case.name in listed for case in GPU)
    assert "gpu-causal" not in run(capsys, "--list")[0], "only if they are asked for"
    if not torch.cuda.is_available():
        _, err = run(capsys, "gpu-decode", code=2)
        assert "gpu-decode is measured on cuda only; choose it with" in " ".join(err.split())
        _, err = run(capsys, "gpu", "--device", "cuda", code=2)
        assert "torch finds no CUDA device" in err
        _, err = run(capsys, "--tune", "rows.txt", code=2)
        assert "torch finds no CUDA device; block sizes are measured on" in " ".join(err.split())
        assert not Path("rows.txt").exists()


def wrong(problem: Any) -> PreparedCall:
    way = regard_peers.attention(problem)
    return PreparedCall(way.step, lambda found: {"out": -way.read(found)["out"]})


def test_a_wrong_answer_is_exit_code_1(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    case = CASES["decode"]
    peers = (case.peers[0], Peer("wrong", "", wrong))
    monkeypatch.setitem(CASES, "decode", Case(case.name, "", case.sizes, case.dtypes, peers))
    out, _ = run(capsys, "decode", *QUICK, code=1)
    assert "wrong: out has an error of" in out


def test_a_case_that_does_not_fit_is_exit_code_1(capsys: pytest.CaptureFixture[str]) -> None:
    out, _ = run(capsys, "decode", *QUICK, "--length", str(1 << 40), code=1)
    assert "refused: decode needs" in out


def test_an_interrupt_prints_what_there_is(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(problem: Any) -> PreparedCall:
        raise KeyboardInterrupt

    case = CASES["alibi"]
    peers = (Peer("regard", "", stopped),)
    monkeypatch.setitem(CASES, "alibi", Case(case.name, "", case.sizes, case.dtypes, peers))
    out, _ = run(capsys, "decode", "alibi", *QUICK, "--peer", "regard", "--json", "-", code=130)
    told = json.loads(out)
    assert told["interrupted"]
    assert [one["case"] for one in told["cases"]] == ["decode"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("decod",), "did you mean 'decode'?"),
        (("--size", "smal"), "did you mean 'small'?"),
        (("--dtype", "fp8"), "'fp8' is not one of the dtypes float32, bfloat16, float16"),
        (("--peer", "torch SDP"), "did you mean 'torch SDPA'?"),
        (("--device", "tpu"), "'tpu' is not one of the devices cpu, cuda"),
        (("--rounds", "0"), "--rounds"),
        (("--length", "0"), "--length"),
        (("--threads", "0"), "--threads"),
        (("--plot", "chart.gif"), "chart.gif is no picture; its name must end in"),
        (("--plot", "no/folder/chart.svg"), "there is no folder 'no/folder'"),
        (("--json", "no/folder/found.json"), "there is no folder 'no/folder'"),
    ],
)
def test_wrong_usage(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in run(capsys, *arguments, code=2)[1]


def test_no_gpu_is_wrong_usage(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch finds no CUDA device" in run(capsys, "--device", "cuda", code=2)[1]


def test_a_chart_needs_something_to_draw() -> None:
    empty = CaseResult("demo", "", "B1", torch.float32, "cpu")
    with pytest.raises(RegardError, match="no peer was timed"):
        ratio_chart([empty], "nothing")
