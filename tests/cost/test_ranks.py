"""Costs over several ranks: closed forms equal the plan of `regard.parallel`, and sums by hand."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

from regard.cli import main
from regard.cost import CostReport, Setting, machine_of, model_of
from regard.cost.mechanisms import Sizes
from regard.cost.ranks import METHODS, RanksReport
from regard.errors import ArgumentError
from regard.masks import Causal, Window
from regard.parallel import Shards, plan

H100 = machine_of("h100-sxm")


def small(context: int = 4096, *, window: int | None = None, batch: int = 1) -> CostReport:
    """Two layers with 16 query heads and 4 key/value heads of 32."""
    options = {"groups": 4, "head_dim": 32, **({} if window is None else {"window": window})}
    sizes = Sizes(layers=2, dim=512, heads=16, ff=1024, vocab=1000, options=options)
    return CostReport(sizes.model(), Setting(context, batch))


@pytest.mark.parametrize("W", [2, 4, 8])
@pytest.mark.parametrize("method", ["exchange", "gather", "heads"])
def test_bytes_equal_those_of_the_plan_of_a_call(method: str, W: int) -> None:
    report = small(batch=2)
    call = plan(
        Shards.zigzag(4096, W),
        Causal(),
        heads=(16, 4),
        dims=(32, 32),
        dtype=torch.bfloat16,
        batch=2,
    )
    estimate = RanksReport(report, H100, W).estimate(method)
    assert estimate.sent == 2 * max(call[method].sent)  # two layers
    assert estimate.why_not == call[method].why_not == ""


def test_a_window_moves_its_edges_only() -> None:
    call = plan(
        Shards.zigzag(4096, 8),
        Causal() & Window(64),
        heads=(16, 4),
        dims=(32, 32),
        dtype=torch.bfloat16,
    )
    estimate = RanksReport(small(window=64), H100, 8).estimate("exchange")
    assert estimate.sent == 2 * max(call["exchange"].sent)


def test_tensor_parallelism_by_hand() -> None:
    W, S, M = 4, 4096, 512
    report = small(S)
    estimate = RanksReport(report, H100, W).estimate("tensor")
    ring = 2 * (W - 1) * S * M * 2 // W  # bytes that one rank sends for one sum in bf16
    assert estimate.sent == 2 * 2 * ring  # two sums in each of two layers
    assert estimate.tensor_ranks == W
    assert estimate.memory == -(-report.weight_bytes // W) + report.kv_bytes // W


def test_one_rank_is_one_process() -> None:
    report = small()
    result = RanksReport(report, H100, 1)
    rate = H100.rate("bf16")
    for estimate in result.estimates[:4]:
        assert estimate.sent == estimate.token_sent == 0
        assert estimate.memory == report.weight_bytes + report.kv_bytes
        assert estimate.prefill_seconds == pytest.approx(
            max(report.prefill_flops / rate, report.prefill_bytes() / H100.bandwidth), rel=0.01
        )
    assert "cannot be cut into groups" in result.estimate("tensor x exchange").why_not


def test_communication_that_overlaps_takes_no_time_until_it_is_longer() -> None:
    report = CostReport(model_of("llama-3-8b"), Setting(1 << 20))
    fast = RanksReport(report, H100, 8, link=1e15).estimate("exchange").prefill_seconds
    hidden = RanksReport(report, H100, 8, link=450e9).estimate("exchange").prefill_seconds
    slow = RanksReport(report, H100, 8, link=1e9).estimate("exchange").prefill_seconds
    assert fast == hidden < slow
    gathered = RanksReport(report, H100, 8, link=450e9).estimate("gather").prefill_seconds
    assert gathered > hidden


def test_a_latent_cache_is_not_cut_by_tensor_parallelism() -> None:
    report = CostReport(model_of("deepseek-v3"), Setting(1 << 17))
    tensor = RanksReport(report, H100, 64).estimate("tensor")
    assert tensor.memory == -(-report.weight_bytes // 64) + report.kv_bytes


def test_the_best_method_fits() -> None:
    report = CostReport(model_of("llama-3-70b"), Setting(1 << 20))
    result = RanksReport(report, H100, 64)
    verdicts = [result.fit(x) for x in result.estimates]
    assert verdicts == [*["does not fit"] * 3, "fits", "fits"]
    assert result.best == "tensor x exchange"
    assert RanksReport(report, replace(H100, memory=1 << 30), 64).best is None


def test_refusals() -> None:
    report = small()
    with pytest.raises(ArgumentError, match="bandwidth between ranks of epyc-9654 is not known"):
        RanksReport(report, machine_of("epyc-9654"), 2)
    with pytest.raises(ArgumentError, match="cannot be cut into two runs"):
        RanksReport(small(8), H100, 8)
    with pytest.raises(ArgumentError, match="it must be at least 1"):
        RanksReport(report, H100, 0)
    retention = Sizes(layers=1, dim=64, heads=4, vocab=10, ff=8, attention="retention").model()
    with pytest.raises(ArgumentError, match="over several ranks is not known"):
        RanksReport(CostReport(retention, Setting(64)), H100, 2)


def run(*arguments: str) -> int:
    """The exit status of `regard` with these arguments."""
    with pytest.raises(SystemExit) as end:
        main(list(arguments))
    assert isinstance(end.value.code, int)
    return end.value.code


def test_the_command_prints_every_method(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["cost", "llama-3-70b", "--context", "1M", "--machine", "h100-sxm", "--ranks", "64"]
    assert run(*arguments) == 0
    assert ">  tensor x exchange, 2 share a matrix" in capsys.readouterr().out
    assert run(*arguments, "--json") == 0
    printed = json.loads(capsys.readouterr().out)
    assert list(printed["methods"]) == list(METHODS)
    assert printed["best"] == "tensor x exchange"
    assert run(*arguments, "--json", "--method", "tensor") == 0
    assert list(json.loads(capsys.readouterr().out)["methods"]) == ["tensor"]


@pytest.mark.parametrize(
    "extra, words",
    [
        (["--ranks", "4"], "'--ranks': needs a --machine"),
        (["--link", "1e9"], "belong to --ranks"),
        (["--ranks", "4", "--machine", "h100-sxm", "--sweep", "context=1k..2k"], "leave out --vs"),
        (["--ranks", "4", "--machine", "h100-sxm", "--method", "ring"], "is not one of exchange"),
    ],
)
def test_options_that_do_not_fit_are_refused(
    extra: list[str],
    words: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("COLUMNS", "300")
    assert run("cost", "llama-3-8b", *extra) == 2
    assert words in capsys.readouterr().err
