"""Published speeds against the bounds, and what a report promises against other publications."""

from __future__ import annotations

import pytest

from regard.configs.measured_speeds import MEASUREMENTS, Measurement, kind_of, reached
from regard.cost import CostReport, Setting, machine_of, model_of
from regard.cost.roofline import Machine, roofline_bounds
from regard.cost.speculation import Speculation
from regard.cost.stored_forms import with_weights

GPT_FAST = "meta-pytorch/gpt-fast, README"  # A100, limited to 330 W of 400
FIRST = "XiongjieDai/GPU-Benchmarks-on-LLM-Inference, LLaMA 2 (December 2023)"
OTHERS = [  # none of them is in the table of the package
    Measurement("a100-80gb", "llama-2-7b", "bf16", "decode", 100, 104.9, GPT_FAST),
    Measurement("a100-80gb", "llama-2-7b", "int8", "decode", 100, 155.58, GPT_FAST),
    Measurement("a100-80gb", "llama-2-7b", "int4", "decode", 100, 196.80, GPT_FAST),
    Measurement("a100-80gb", "llama-2-70b", "int8", "decode", 100, 19.13, GPT_FAST),
    Measurement("a100-80gb", "llama-2-7b", "q4_0", "decode", 256, 136.24, FIRST),
    Measurement("h100-pcie", "llama-2-7b", "fp16", "decode", 256, 83.32, FIRST),
    Measurement("rtx-4090", "llama-2-7b", "q4_0", "decode", 256, 149.37, FIRST),
    Measurement("rtx-4090", "llama-2-7b", "fp16", "decode", 256, 60.78, FIRST),
    Measurement("rtx-3090", "llama-2-7b", "fp16", "decode", 256, 51.85, FIRST),
    Measurement("rtx-a6000", "llama-2-70b", "q4_0", "decode", 256, 15.18, FIRST),
    Measurement("rtx-4090", "llama-2-13b", "awq", "decode", 96, 96.74, "AutoAWQ 0.1.6, README"),
]


def test_no_measurement_exceeds_its_bound() -> None:
    assert {x.work for x in MEASUREMENTS} == {"prefill", "decode"}
    for one in (*MEASUREMENTS, *OTHERS):
        assert 0.05 < one.share < 1, one


@pytest.mark.parametrize("one", OTHERS, ids=lambda x: f"{x.machine}-{x.model}-{x.weights}")
def test_what_a_report_promises_holds_for_other_publications(one: Measurement) -> None:
    """Within a fifth of the range, which has one or two engines for most cards."""
    found = reached(one.report, machine_of(one.machine), "decode")
    assert found is not None
    assert found.low / 1.2 < one.share < found.high * 1.2


def test_the_bound_alone_promises_too_much_of_four_bits() -> None:
    """A negative control: in 4 bits an A100 is three times slower than its bound."""
    (four,) = (x for x in OTHERS if x.model == "llama-2-7b" and x.weights == "int4")
    assert four.share < 0.4
    bound = roofline_bounds(four.report, machine_of("a100-80gb"))["decode"]
    assert 1 / bound.seconds > 2.5 * four.tokens_per_second


def test_where_there_is_no_measurement() -> None:
    report = CostReport(model_of("llama-3-8b"), Setting())
    found = reached(report, machine_of("gaudi-3"), "decode")
    assert found is not None
    assert not found.same_machine
    given = Machine("the given machine", 1e12, {"fp32": 1e12}, 0, "")
    assert reached(report, given, "decode") is None
    assert reached(report, machine_of("8xh100-sxm"), "decode") is None, "those are of one card"
    mixture = with_weights(model_of("mixtral-8x7b"), "q8_0")
    assert kind_of(CostReport(mixture, Setting())) == "8-bit experts"
    assert reached(CostReport(mixture, Setting()), machine_of("l4"), "decode") is None


def test_speculative_decoding_is_a_bound() -> None:
    """gpt-fast measured 48.4 tokens a second of Llama-2-70B with Llama-2-7B as its draft."""
    large, small = (
        CostReport(model_of(x), Setting(100, dtype="int4")) for x in ("llama-2-70b", "llama-2-7b")
    )
    machine = machine_of("a100-80gb")
    alone = roofline_bounds(large, machine)["decode"].seconds
    with_draft = Speculation(large, small, 5, 0.8)
    assert with_draft.tokens_a_pass == pytest.approx((1 - 0.8**6) / 0.2)
    assert 1 / with_draft.seconds(machine) > 48.4
    assert with_draft.seconds(machine) < alone < Speculation(large, small, 5, 0.0).seconds(machine)
