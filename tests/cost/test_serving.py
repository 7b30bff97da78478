"""Sequences that share a prefix, cards that divide a model, and experts that stay with the host,
against sums by hand.
"""

from __future__ import annotations

import json

import pytest

from regard.cli.app import run
from regard.cost import CostReport, Setting, machine_of, model_of
from regard.cost.roofline import (
    LINKS,
    Machine,
    largest_batch,
    memory_fit,
    ring_bytes,
    roofline_bounds,
)
from regard.errors import ArgumentError

LLAMA = model_of("llama-3-70b")


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    """Run `regard cost`; return what it writes, with single spaces."""
    assert run(["cost", *arguments]) == code
    streams = capsys.readouterr()
    return " ".join((streams.err if code else streams.out).split())


def test_a_shared_prefix_is_stored_computed_and_read_once() -> None:
    own, shared, batch = Setting(8192, 16), Setting(8192, 16, shared_prefix=6144), 16
    alone, together = CostReport(LLAMA, own), CostReport(LLAMA, shared)
    token = 327_680
    assert alone.kv_bytes - together.kv_bytes == (batch - 1) * 6144 * token
    prefix = CostReport(LLAMA, Setting(6144))
    head = 2 * LLAMA.vocab * LLAMA.dim
    saved = (batch - 1) * (prefix.prefill_flops - head)
    assert alone.prefill_flops - together.prefill_flops == saved
    assert alone.decode_bytes() - together.decode_bytes() == (batch - 1) * 6144 * token
    assert together.prompt_tokens == 6144 + batch * 2048
    one = CostReport(LLAMA, Setting(8192, 1, shared_prefix=6144))
    assert one.kv_bytes == CostReport(LLAMA, Setting(8192)).kv_bytes


def test_windows_and_states_share_nothing() -> None:
    """Their contents depend on the last tokens, which each sequence has of its own."""
    model = model_of("gemma-3-1b")
    own, shared = (CostReport(model, Setting(4096, 8, shared_prefix=n)).kv_bytes for n in (0, 2048))
    in_layers_with_all = 4 * 2 * 256 * 2  # layers, keys and values, width, bytes
    assert own - shared == 7 * 2048 * in_layers_with_all
    state = model_of("qwen3-next-80b-a3b")
    a, b = (CostReport(state, Setting(4096, 8, shared_prefix=n)) for n in (0, 2048))
    assert a.kv_bytes - b.kv_bytes == 7 * 2048 * a.kv_growth


def test_heads_are_divided_and_latents_are_not() -> None:
    latents = CostReport(model_of("deepseek-v3"), Setting(32768, 8))
    heads = CostReport(LLAMA, Setting(32768, 8))
    for cards in (2, 4, 8):
        held = heads.held_bytes(cards) - -(-heads.weight_bytes // cards)
        assert held == heads.kv_bytes // cards
        held = latents.held_bytes(cards) - -(-latents.weight_bytes // cards)
        assert held == latents.kv_bytes, "whole on every card"
    # 16 cards: two of them hold the same of 8 key/value heads
    held = heads.held_bytes(16) - -(-heads.weight_bytes // 16)
    assert held == heads.kv_bytes // 8
    machine = machine_of("8xh200-sxm")
    apart = largest_batch(latents, machine, by_sequence=True)
    together = largest_batch(latents, machine)
    assert apart is not None
    assert together is not None
    assert 5 * together < apart < 8 * together


def test_times_of_several_cards() -> None:
    report = CostReport(LLAMA, Setting(4096, 4))
    one, eight = (
        roofline_bounds(report, machine_of(x))["decode"] for x in ("h100-sxm", "8xh100-sxm")
    )
    sums = 80 * 2 * ring_bytes(4 * 8192 * 2, 8) / LINKS["h100-sxm"][0]
    assert ring_bytes(8, 8) == 14
    assert eight.seconds == pytest.approx(one.seconds / 8 + sums, rel=1e-3)
    unknown = roofline_bounds(report, machine_of("2xrtx-4090"))["decode"]
    assert unknown.messages == 0, "and the page says that they are not counted"
    with pytest.raises(ArgumentError, match="not known"):
        machine_of("0xh100-sxm")


def test_experts_of_the_host() -> None:
    report = CostReport(model_of("gpt-oss-120b"), Setting(4096))
    machine = machine_of("rtx-4090")
    away = Machine(**{**vars(machine), "host": 64e9})
    assert memory_fit(report, machine).verdict == "does not fit"
    assert memory_fit(report, away).verdict == "fits"
    bound = roofline_bounds(report, away)["decode"]
    # 36 layers, 4 of 128 experts, three matrices of 2,880 x 2,880 in 4.25 bits
    experts = 36 * 4 * 3 * 2880 * 2880 * 4.25 / 8
    assert bound.host == pytest.approx(experts / 64e9, rel=1e-6)
    assert bound.by == "host"


def test_on_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    page = said(capsys, "deepseek-v3", "--machine", "8xh200-sxm", "--context", "32k")
    assert "tensor parallel: each of 8 cards" in page
    assert "data parallel attention" in page
    page = said(capsys, "llama-3-8b", "--machine", "2xrtx-4090")
    assert "messages between cards are not counted" in page
    more = ["--batch", "8", "--shared-prefix", "2k", "--json"]
    told = json.loads(said(capsys, "llama-3-8b", *more))
    assert told["shared_prefix"] == 2048
    assert told["kv_bytes"] == 131072 * (8 * 4096 - 7 * 2048)
    draft = ["--machine", "h100-sxm", "--draft", "llama-3-8b", "--json"]
    told = json.loads(said(capsys, "llama-3-70b", "--dtype", "int4", *draft))
    assert told["speculation"]["tokens_a_pass"] == pytest.approx(3.3616)
    assert told["roofline"]["decode"]["reached"]["same_machine"] is False
    step = ["--train", "--zero", "3", "--machine", "8xh100-sxm", "--seq", "8k"]
    page = said(capsys, "llama-3-8b", *step)
    assert "8 cards with 1 sequence of 8,192 tokens each" in page
    assert "not counted:" in page
    (told,) = json.loads(said(capsys, "llama-3-8b", *step, "--json"))
    assert told["cards"] == 8
    assert told["fit"] == "fits"


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--draft", "llama-3-8b"], "needs a --machine"),
        (["--accepted", "0.5"], "belong to --draft"),
        (["--optimizer", "sgd"], "belong to --train"),
        (["--machine", "3xh100-sxm"], "cannot divide 32 heads"),
        (["--shared-prefix", "8k", "--context", "4k"], "shorter than the context of"),
        (["--machine", "8xh100-sxm", "--ranks", "8"], "without a number"),
    ],
)
def test_wrong_usage(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in said(capsys, "llama-3-8b", *arguments, code=2)
