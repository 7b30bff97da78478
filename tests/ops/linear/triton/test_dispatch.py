"""Which form of a recurrence runs on a CUDA device, asked with tensors that stand for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard.errors import KernelRefusal
from regard.linear import delta_rule, mlstm
from regard.ops.linear.call import RecurrenceCall
from regard.ops.linear.linear_recurrence import choose_form, plan_form
from regard.ops.linear.triton import kernel


def cuda_call(
    dtype: torch.dtype = torch.bfloat16, T: int = 100, D: int = 64, **options: Any
) -> RecurrenceCall:
    """A call on a CUDA device that is not there."""
    with FakeTensorMode():
        q, k, v = (torch.empty(2, n, T, D, dtype=dtype, device="cuda") for n in (4, 2, 2))
        state = torch.empty(2, 2, D, D, device="cuda")
    return RecurrenceCall(q, k, v, state, dtype=dtype, **options)


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "has_triton", lambda: True)
    monkeypatch.setattr(kernel, "interprets", lambda: False)
    monkeypatch.setattr(kernel, "values_are_readable", lambda *tensors: True)


@pytest.mark.usefixtures("installed")
def test_many_tokens_run_in_triton_and_few_one_by_one() -> None:
    assert choose_form(cuda_call(), "auto") == "triton"
    assert str(plan_form(cuda_call(), "auto")) == "triton"
    few = plan_form(cuda_call(T=8), "auto")
    assert str(few) == "recurrent\n  not triton: at most 8 tokens are computed one by one"
    assert choose_form(cuda_call(T=9), "auto") == "triton"
    for form in ("chunk", "parallel", "recurrent"):
        assert choose_form(cuda_call(), form) == form
    assert plan_form(cuda_call(), "chunk").reasons == ('form is "chunk"',)


@pytest.mark.usefixtures("installed")
def test_what_it_refuses() -> None:
    why = kernel.why_not
    assert why(cuda_call()) == []
    assert why(cuda_call(torch.float64)) == ["no float64"]
    assert why(cuda_call(D=300)) == ["more than 256 key channels or features (D 300)"]
    assert why(cuda_call(T=0)) == ["nothing to compute (B 2, T 0, D 64, E 64)"]
    assert choose_form(cuda_call(torch.float64), "auto") == "chunk"
    assert plan_form(cuda_call(D=300), "auto").reasons == tuple(why(cuda_call(D=300)))
    with pytest.raises(KernelRefusal, match="cannot run this recurrence: no float64; pass form"):
        choose_form(cuda_call(torch.float64), "triton")


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "has_triton", lambda: False)
    plan = plan_form(cuda_call(), "auto")
    assert plan.form == "chunk"
    assert plan.reasons[0] == "triton is not installed: pip install 'regard[gpu]'"


@pytest.mark.usefixtures("installed")
def test_a_tensor_without_values_and_a_graph_are_left_to_torch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(kernel, "values_are_readable", lambda *tensors: False)
    assert "not inside a transform" in kernel.why_not(cuda_call())[0]
    monkeypatch.setattr(kernel, "is_compiling", lambda: True)
    assert kernel.why_not(cuda_call()) == ["not inside a compiled graph"]


@pytest.mark.skipif(kernel.interprets(), reason="triton interprets kernels in this process")
def test_a_cpu_refuses_the_form_by_name() -> None:
    k = torch.ones(1, 1, 20, 4)
    with pytest.raises(KernelRefusal, match="runs on cuda, not on cpu"):
        delta_rule(k, k, k, torch.ones(1, 1, 20), form="triton")
    call = RecurrenceCall(k, k, k, torch.zeros(1, 1, 4, 4))
    assert plan_form(call, "auto").form == "chunk"
    assert choose_form(call, "auto") == "auto"


def test_a_mechanism_without_these_kernels_has_no_such_form() -> None:
    k, gate = torch.ones(1, 1, 20, 4), torch.zeros(1, 1, 20)
    with pytest.raises(ValueError, match=r"must be one of auto, recurrent, chunk, parallel$"):
        mlstm(k, k, k, gate, gate, form="triton")
