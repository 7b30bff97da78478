"""The audit of recordings: it finds and names what was planted, and says nothing of what is
sound.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.inspect import Recorder, Recording, row_sums
from regard.inspect.record.recorded_place import Place, RecordedStep
from regard.ops.softmax import dispatch
from regard.ops.softmax.call import Call, make_call
from regard.ops.softmax.dispatch import KERNELS
from regard.ops.softmax.kernel import Kernel, KernelResult, WorkEstimate
from regard.span import Span
from tests.inspect.recorded import recorded_call

C = masks.Causal()
LN2 = math.log(2)
SIZES = [
    (1, 40, 4, 2, 16),
    (33, 33, 4, 4, 24),
    (1, 200, 2, 1, 32),
    (1, 1, 1, 1, 4),
    (3, 3, 1, 1, 64),
]
RULES: dict[str, dict[str, Any]] = {
    "full": {},
    "window": {"mask": C & masks.Window(20)},
    "alibi": {"mask": C, "bias": True},
    "softcap": {"mask": C, "softcap": 3.0},
    "sink": {"mask": C, "sink": True},
}


def given(H: int, dtype: torch.dtype, **options: Any) -> dict[str, Any]:
    """Options with a bias and a sink for so many heads."""
    made = {"bias": lambda: biases.ALiBi(H), "sink": lambda: torch.randn(H).to(dtype)}
    return {name: made[name]() if x is True else x for name, x in options.items()}


def place(dtype: torch.dtype = torch.float32, T: int = 40, S: int = 40, **options: Any) -> Place:
    q, k = torch.randn(2, 4, T, 16).to(dtype), torch.randn(2, 2, S, 16).to(dtype)
    v = torch.randn(2, 2, S, 12).to(dtype)
    return recorded_call(q, k, v, **given(4, dtype, **options))[0]


def changed(x: Place, **change: Any) -> Place:
    """The place with something else said of its step, or with other keys or values."""
    pool = {name: change.pop(name) for name in ("k", "v") if name in change}
    pools = (replace(x.pools[0], **pool),)
    return replace(x, pools=pools, steps=(replace(x.steps[0], **change),))


# flex is slow to start: the test of all kernels, in test_recorder.py, has it; triton needs a GPU
WATCHED = {kernel.name: kernel for kernel in KERNELS if kernel.name not in ("flex", "triton")}
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


def sound_calls(name: str, dtype: torch.dtype) -> Iterator[tuple[str, Any]]:
    """What a call is, and (q, k, v) with its options, for each size and spread."""
    for T, S, H, G, D in SIZES:
        for spread in (0.3, 4.0):
            options = given(H, dtype, **RULES[name])
            q = (spread * torch.randn(2, H, T, D)).to(dtype)
            k, v = (spread * torch.randn(2, 2, G, S, D)).to(dtype).unbind(0)
            yield f"{(T, S, H, G, D)} x{spread}", ((q, k, v), options)


def refusal(kernel: str, inputs: Any, options: dict[str, Any]) -> list[str]:
    return WATCHED[kernel].why_not(replace(make_call(*inputs, **options), wants_lse=True))


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize("kernel", WATCHED)
def test_a_sound_record_is_never_flagged(kernel: str, name: str, dtype: torch.dtype) -> None:
    ran, why = 0, set()
    for what, (inputs, options) in sound_calls(name, dtype):
        if refused := refusal(kernel, inputs, options):
            why |= {*refused}
            continue
        found = row_sums(recorded_call(*inputs, backend=kernel, **options)[0])
        assert found.sound, f"{kernel} {what}: {found}"
        assert found.rows == found.of == inputs[0].shape[2]
        ran += 1
    if not ran:
        pytest.skip(f"{kernel}: {'; '.join(sorted(why))}")


ALL = {"mask": C & masks.Window(8), "softcap": 2.0, "bias": True, "sink": True}
CAUSAL = {"mask": C}
Fault = Callable[[Place, RecordedStep], dict[str, Any]]
FAULTS: dict[str, tuple[dict[str, Any], Fault, str]] = {
    "zero lse": (ALL, lambda p, s: {"lse": s.lse * 0}, "the lse is 0 everywhere"),
    "log2": (ALL, lambda p, s: {"lse": s.lse / LN2}, "a log of base 2"),
    "times ln 2": (ALL, lambda p, s: {"lse": s.lse * LN2}, "multiplied by ln 2"),
    "plus ln 2": (ALL, lambda p, s: {"lse": s.lse + LN2}, "0.6931, which is ln 2"),
    "a constant": (ALL, lambda p, s: {"lse": s.lse - 0.25}, "wrong by the constant -0.25:"),
    "sink in lse": (ALL, lambda p, s: {"lse": s.denominator.float()}, "the lse includes the sink"),
    "scale of 1/sqrt(D)": (CAUSAL, lambda p, s: {"scale": 1.0}, "1/sqrt(D) (0.25, not 1)"),
    "scale left out": (
        CAUSAL | {"scale": 1.0}, lambda p, s: {"scale": 0.25}, "was not applied (1, not 0.25)",
    ),
    "scale twice": (
        CAUSAL | {"scale": 0.04}, lambda p, s: {"scale": 0.2}, "applied twice (0.04, not 0.2)",
    ),
    "another scale": (
        CAUSAL | {"scale": 0.33}, lambda p, s: {"scale": 0.2}, "the scale was 0.33, not 0.2",
    ),
    "no softcap": (CAUSAL, lambda p, s: {"softcap": 5.0}, "the softcap was not applied"),
    "no bias": (CAUSAL, lambda p, s: {"bias": biases.ALiBi(4)}, "the bias was not added"),
    "no sink": (
        CAUSAL, lambda p, s: {"sink": torch.tensor([0.5, 1.0, 2.0, -1.0])}, "the sink was left out",
    ),
    "no mask": ({}, lambda p, s: {"mask": C}, "the mask was not applied: masked keys"),
    "no window": (
        CAUSAL, lambda p, s: {"mask": C & masks.Window(5)}, "mask window(5) was not applied",
    ),
    "window one off": (
        {"mask": C & masks.Window(9)}, lambda p, s: {"mask": C & masks.Window(8)},
        "window(8) was taken as window(9)",
    ),
    "wrong v": (ALL, lambda p, s: {"v": p.v.roll(1, 2)}, "not the weighted sum of the recorded"),
    "no output": (
        CAUSAL, lambda p, s: {"out": torch.zeros_like(s.out)}, "the output is zero everywhere",
    ),
    "one stale key": (
        ALL, lambda p, s: {"k": p.k.index_copy(2, torch.tensor([30]), p.k[:, :, :1])},
        "not those that the kernel used, first in row 30",
    ),
    "wrong group": (CAUSAL, lambda p, s: {"k": p.k.flip(1)}, "the kernel used, first in row 0"),
    "nan": (
        CAUSAL, lambda p, s: {"lse": s.lse.index_fill(2, torch.tensor([7]), math.nan)},
        "NaN although nothing visible is NaN (row 7)",
    ),
}  # fmt: skip


@pytest.mark.full(keep=14)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FAULTS)
def test_every_planted_fault_is_found_and_named(name: str, dtype: torch.dtype) -> None:
    options, fault, words = FAULTS[name]
    sound = place(dtype, **options)
    assert row_sums(sound).sound
    found = row_sums(changed(sound, **fault(sound, sound.steps[0])))
    assert not found.sound, name
    assert any(words in said for said in found.findings), (name, found.findings)


def test_a_mistake_that_explains_lse_and_output_is_said_once() -> None:
    found = row_sums(changed(place(mask=C), softcap=5.0))
    assert len(found.findings) == 1
    assert "factor e^" in found.findings[0]


def test_a_row_that_sees_nothing() -> None:
    """torch's own kernel says lse 0 there; such an lse, and any output but 0, are found."""
    keep = torch.ones(2, 1, 40, 40).bool()
    keep[:, :, 3] = False
    sound = place(mask=masks.Dense(keep))
    assert row_sums(sound).sound
    step = sound.steps[0]
    lse = step.lse.masked_fill(step.lse.isneginf(), 0)
    found = row_sums(changed(sound, lse=lse))
    assert found.findings[0] == "a row that sees no key has the lse 0 (row 3); it must be -inf"
    out = step.out.index_fill(2, torch.tensor([3]), 1.0)
    assert row_sums(changed(sound, out=out)).findings == (
        "a row that sees no key has an output other than 0",
    )


class Faulty(Kernel):
    """The reference, but for one mistake: the recorder sees a call, and a kernel that does
    something else.
    """

    name, selects = "faulty", False

    def __init__(self, mistake: Callable[[Call], Call]) -> None:
        self.mistake = mistake

    def why_not(self, call: Call) -> list[str]:
        return []

    def priority(self, call: Call) -> float | None:
        return 100

    def run(self, call: Call) -> KernelResult:
        return KERNELS[-1].run(self.mistake(call))

    def work(self, call: Call) -> WorkEstimate:
        return KERNELS[-1].work(call)


def only(kernel: Faulty, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no other kernel be asked."""
    monkeypatch.setattr(dispatch, "_registered", (kernel,))


def test_a_stale_cache_while_tokens_are_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that does not see the newest key, as with a cache that is written too late."""

    def late(call: Call) -> Call:
        last = call.S - call.T or call.S
        k, v = call.k[:, :, :last], call.v[:, :, :last]
        return replace(call, k=k, v=v, k_positions=Span(0, last))

    only(Faulty(late), monkeypatch)
    k = torch.randn(1, 2, 12, 8)
    with Recorder() as recorder:
        for stop in range(6, 13):
            start = 0 if stop == 6 else stop - 1
            regard.attend(k[:, :, start:stop], k[:, :, :stop], k[:, :, :stop], mask=C)
    found = row_sums(recorder.recording()[0])
    words = ("not those that the kernel used, first in row 6", "newest keys were not used")
    assert any(word in x for x in found.findings for word in words), found.findings
    (said,) = row_sums(recorded_call(k[:, :, 6:], k, mask=C)[0]).findings
    assert said.startswith("the newest keys were not used: the cache is stale")


def test_long_runs_are_sampled_and_the_report_says_so() -> None:
    x = place(T=300, S=300, mask=C)
    found = row_sums(x, cells=2**15)
    assert 1 < found.rows < found.of == 300
    assert f"{found.rows} of 300 rows checked: sound" in str(found)
    last = x.steps[0].lse.clone()
    last[:, :, -1] += 0.1
    # the last row is always among them
    assert not row_sums(changed(x, lse=last), cells=2**15).sound


def test_without_values_or_output_only_the_sums_are_judged() -> None:
    q = torch.randn(1, 2, 20, 8)
    for keep in ((), ("v",), ("out",)):
        found = row_sums(recorded_call(q, keep=keep)[0])
        assert (found.output, found.output_allowed) == (None, None)
        assert found.sound
        assert "outputs" not in str(found)


def test_numbers_behind_a_mask_do_not_matter() -> None:
    q, k = torch.randn(2, 2, 2, 20, 8).unbind(0)
    k[0, :, 15:] = torch.inf
    v = k.clone()
    v[1, :, 4] = torch.nan  # this one is seen: nothing is asked of the outputs that it reaches
    at = torch.tensor([[*range(15), *[-1] * 5], [*range(20)]])
    k = k.masked_fill(~k.isfinite(), 1e30)
    found = row_sums(recorded_call(q, k, v, mask=C, q_positions=at, k_positions=at)[0])
    assert found.sound, str(found)


def test_every_part_of_a_recording_is_audited() -> None:
    found = regard.inspect.record(regard.load("tiny"), "to be or not to be")
    assert list(found.row_sums) == list(found.places)
    assert found.sound
    broken = {**found.places, "layers.1": changed(found["layers.1"], scale=1.0)}
    assert not replace(found, places=broken).sound
    assert Recording({}).sound


def test_an_output_that_is_nan_is_found() -> None:
    x = place(mask=C)
    assert x.steps[0].out is not None
    out = x.steps[0].out.index_fill(2, torch.tensor([7]), math.nan)
    (found,) = row_sums(changed(x, out=out)).findings
    assert "output" in found


def test_the_rule_is_that_of_the_tests() -> None:
    """The bound is no looser than twice plain math, two roundings of the result, and two of the
    summed terms.
    """
    x = place(mask=C)
    found, step = row_sums(x), x.steps[0]
    keys = x.keys(step).repeat_interleave(2, 1)
    seen = torch.ones(40, 40).tril().bool()

    def lse(dtype: torch.dtype) -> Tensor:
        s = (step.q.to(dtype) * step.scale) @ keys.to(dtype).mT
        return s.masked_fill(~seen, -math.inf).logsumexp(-1)

    true = lse(torch.float64)
    terms = (step.scale * step.q.abs() @ keys.abs().mT).masked_fill(~seen, 0)
    size = terms.max() + true.abs().max()
    eps = torch.finfo(torch.float32).eps
    assert found.residual == pytest.approx(float((step.lse - true).abs().max()), abs=1e-12)
    assert found.allowed <= 2 * 6 * eps * true.abs().max() + 4 * eps * size
    assert found.residual <= found.allowed < 1e-4
