"""plan: the table, its numbers, the reasons, and that it says what attend then does."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.ops.softmax import dispatch, gemm

CAUSAL = masks.Causal()


def qkv(
    T: int = 64, S: int = 64, B: int = 1, H: int = 2, G: int = 2, D: int = 8, E: int = 8
) -> list[Tensor]:
    return [torch.zeros(B, H, T, D), torch.zeros(B, G, S, D), torch.zeros(B, G, S, E)]


SHORT = ["sdpa", "tiled", "cpu", "flex", "gemm", "reference", "triton"]
"""The order for little memory."""


def test_names_every_kernel_in_the_order_asked() -> None:
    plan = regard.plan(*qkv())
    assert isinstance(plan, regard.Plan)
    assert [choice.kernel for choice in plan.choices] == SHORT
    assert plan["sdpa"].kernel == "sdpa"
    with pytest.raises(KeyError):
        plan["flash"]


def test_the_table() -> None:
    with regard.Trace("pattern", missing="ignore"):
        lines = str(regard.plan(*qkv(), mask=CAUSAL)).splitlines()
    assert lines[0] == "attend B=1 H=2 G=2 T=64 S=64 D=8 E=8 float32 on cpu, mask causal"
    assert lines[1] == "  kernel      extra memory    FLOPs  skipped  why not"
    table = {line[2:13].strip(): line for line in lines[2:-1]}
    assert list(table) == SHORT
    # 2 heads x 64 x 64 pairs: 8192 x 2 x (8 + 8) FLOPs; scores and weights of 4 bytes
    assert table["reference"] == "> reference       64.0 KiB    262 k     0.0%"
    blank = f"{'-':>13}{'-':>9}{'-':>9}"
    assert table["sdpa"] == f"  {'sdpa':<11}{blank}  does not expose ['pattern']"
    plan = str(regard.plan(*qkv(), mask=CAUSAL)).splitlines()
    assert plan[-1].startswith("compiled CPU kernels: ")
    # the triangle of 64: 2080 of 4096 pairs
    assert "> sdpa                 0 B    133 k    49.2%" in plan


def test_a_note_says_how_second_derivatives_are_computed() -> None:
    q, k, v = qkv()
    assert regard.plan(q, k, v).notes == ()
    trained = regard.plan(q.requires_grad_(), k, v)
    # 2 heads x 64 x 64 scores of 4 bytes
    note = (
        "second derivatives are computed by the definition, which holds all scores in memory "
        "(32.0 KiB)"
    )
    assert trained.notes == (note,)
    assert str(trained).splitlines()[-2] == note
    with torch.no_grad():
        assert regard.plan(q, k, v).notes == ()
    dropped = regard.plan(q, k, v, dropout=0.5).notes
    assert dropped == (
        "second derivatives are refused with dropout, whose random numbers cannot be repeated",
    )
    x = torch.empty(1, 8, 16384, 8, device="meta", requires_grad=True)
    assert regard.plan(x, x, x).notes == (
        "second derivatives are refused with 8.00 GiB of scores; the limit is 4.00 GiB",
    )


def test_a_note_says_what_a_graph_cannot_hold() -> None:
    fifth = masks.Fn(lambda q, k: (q + k) % 5 != 0, "fifth")
    plan = regard.plan(*qkv(), mask=CAUSAL & fifth)
    note = (
        "in a compiled graph torch's operations run it: a graph cannot hold the function in fifth"
    )
    assert plan.notes == (note,)
    assert note in str(plan)


def test_pairs_flops_and_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_measured_sizes", lambda: None)  # the choice is not the subject
    T, D, E = 1024, 16, 4
    q, k, v = qkv(T, T, H=4, G=2, D=D, E=E)
    every = 4 * T * T

    def sdpa(**options: Any) -> Any:
        plan = regard.plan(q, k, v, **options)
        assert plan.kernel == "sdpa"
        assert plan.flops == every * 2 * (D + E)
        choice = plan["sdpa"]
        assert choice.work is not None
        assert choice.flops == choice.work.pairs * 2 * (D + E)
        assert choice.skipped == plan.flops - choice.flops
        assert plan["reference"].work is not None
        assert plan["reference"].work.pairs == every
        return choice.work

    assert sdpa() == (every, 0)
    assert sdpa(mask=CAUSAL) == (4 * T * (T + 1) // 2, 0)
    # window 100 in blocks of 256 rows and tiles of 128 keys: 2, then 3 tiles
    window = sdpa(mask=CAUSAL & masks.Window(100))
    assert window.pairs == 4 * 256 * 128 * (2 + 3 + 3 + 3)
    assert window.bytes == 256 * 128 * 3 * 4
    dense = sdpa(mask=masks.Dense(torch.ones(T, T, dtype=torch.bool).tril()))
    # blocks of 256 rows see 2, 4, 6, 8 tiles
    assert dense.pairs == 4 * 256 * 128 * (2 + 4 + 6 + 8)
    assert dense.bytes <= 256 * T * 4


@pytest.mark.parametrize(
    "options", [{}, {"mask": CAUSAL}, {"softcap": 30.0}, {"dropout": 0.5}], ids=str
)
def test_it_says_what_attend_does(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []
    for kernel in dispatch.KERNELS:

        def run(call: Any, kernel: Any = kernel, right: Any = kernel.run) -> Any:
            ran.append(kernel.name)
            return right(call)

        monkeypatch.setattr(kernel, "run", run, raising=False)
    q, k, v = (torch.randn_like(x) for x in qkv())
    plan = regard.plan(q, k, v, **options)
    assert ran == [], "plan computes nothing"
    regard.attend(q, k, v, **options)
    assert ran == [plan.kernel]
    refused = [choice.kernel for choice in plan.choices if choice.reasons]
    assert all(
        choice.work is None and choice.flops == 0 for choice in plan.choices if choice.reasons
    )
    for name in refused:
        with pytest.raises(regard.KernelRefusal):
            regard.attend(q, k, v, **options, backend=name)
    assert ran == [plan.kernel]


def test_an_explicit_backend_is_kept_or_refuses_with_reasons() -> None:
    q, k, v = qkv()
    assert regard.plan(q, k, v, backend="reference").kernel == "reference"
    assert regard.plan(q, k, v, backend="sdpa").kernel == "sdpa"
    with pytest.raises(regard.KernelRefusal) as refusal:
        regard.plan(q, k, v, softcap=30.0, dropout=0.1, backend="sdpa")
    reasons = (
        "this call cannot run on sdpa (no softcap, no dropout on the weights in its fused "
        "kernel); backends that can: "
    )
    assert str(refusal.value).startswith(reasons)
    assert str(refusal.value).endswith("reference")
    assert isinstance(refusal.value, NotImplementedError)
    with pytest.raises(regard.ArgumentError) as error:
        regard.plan(q, k, v, backend="sdap")
    names = ", ".join(["auto", *(kernel.name for kernel in dispatch.KERNELS)])
    assert (
        str(error.value)
        == f"unknown backend 'sdap'; it must be one of {names}; did you mean 'sdpa'?"
    )
    with pytest.raises(
        regard.ArgumentError, match=r"unknown backend 7; it must be one of auto, [a-z, ]+$"
    ):
        regard.plan(q, k, v, backend=7)  # type: ignore[arg-type]


def test_when_nobody_can_the_message_has_every_reason() -> None:
    q, k, v = qkv(2**15, 2**15)
    with regard.Trace("pattern", missing="ignore"), pytest.raises(regard.KernelRefusal) as refusal:
        regard.attend(q, k, v)
    text = str(refusal.value)
    assert text.startswith("this call cannot run on ")
    assert "sdpa (does not expose ['pattern'])" in text
    assert (
        "reference (would allocate 8.00 GiB for scores (1, 2, 32768, 32768); limit 4.00 GiB: "
        "regard.attention_weights" in text
    )
    assert text.endswith("; no other backend can")


def test_empty_calls() -> None:
    for sizes in ({"T": 0}, {"S": 0}, {"B": 0}):
        plan = regard.plan(*qkv(**sizes), q_positions=None)
        assert plan.flops == 0
        assert plan.kernel == "reference"
        assert "0.0%" in str(plan)
