"""The choice of a kernel: kernels of a user take part, and each is asked once."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.ops.softmax import Call, Kernel, KernelResult, WorkEstimate, dispatch, gemm
from regard.ops.softmax.call import make_call
from regard.ops.softmax.reference import ReferenceKernel


class Own(ReferenceKernel):
    """A user's kernel: the definition under another name, which counts what it is asked."""

    name = "own"

    def __init__(self, number: float | None, refuses: str = "") -> None:
        self.number, self.refuses = number, refuses
        self.asked: Counter[str] = Counter()

    def why_not(self, call: Call) -> list[str]:
        self.asked["why_not"] += 1
        return [self.refuses] if self.refuses else []

    def priority(self, call: Call) -> float | None:
        self.asked["priority"] += 1
        return self.number

    def run(self, call: Call) -> KernelResult:
        self.asked["run"] += 1
        return super().run(call)


@pytest.fixture(autouse=True)
def nothing_stays() -> Iterator[None]:
    yield
    assert dispatch.all_kernels() == dispatch.KERNELS


def draw(T: int = 20, S: int = 20) -> list[Tensor]:
    make = torch.Generator().manual_seed(T)
    return [torch.randn(1, 2, n, 8, generator=make) for n in (T, S, S)]


def test_a_registered_kernel_takes_part() -> None:
    q, k, v = draw()
    assert regard.plan(q, k, v).kernel == "sdpa"
    right = regard.attend(q, k, v, backend="reference")
    own = Own(85)
    with regard.register_kernel(own) as same:
        assert same is own
        assert isinstance(own, Kernel)
        plan = regard.plan(q, k, v)
        assert [x.kernel for x in plan.choices][:2] == ["own", "sdpa"]
        assert plan.kernel == "own"
        assert "> own " in str(plan)
        assert torch.equal(regard.attend(q, k, v), right)
        assert own.asked["run"] == 1
        assert regard.attend_partial(q, k, v, backend="own").out.equal(right)
    regard.attend(q, k, v)
    assert own.asked["run"] == 2, "after the block it is not asked any more"
    with pytest.raises(regard.ArgumentError, match="unknown backend 'own'"):
        regard.attend(q, k, v, backend="own")


@pytest.mark.parametrize(
    "number, refuses",
    [(79, ""), (-math.inf, ""), (None, ""), (85, "it is Monday")],
    ids=["a lower number", "the lowest number", "none", "a reason against"],
)
def test_it_is_not_chosen_where_it_says_so(number: float | None, refuses: str) -> None:
    """Negative control: its number decides, and its reasons."""
    q, k, v = draw()
    with regard.register_kernel(Own(number, refuses)) as own:
        regard.attend(q, k, v)
        plan = regard.plan(q, k, v)
        assert plan.kernel == "sdpa"
        assert plan["own"].reasons == ((refuses,) if refuses else ())
        names = [x.kernel for x in plan.choices]
        assert (names[-1] == "own") == (number is None or number < 10)
        assert own.asked["run"] == 0
        if refuses:
            with pytest.raises(
                regard.KernelRefusal, match=r"it is Monday.*backends that can: sdpa"
            ):
                regard.attend(q, k, v, backend="own")
        else:
            regard.attend(q, k, v, backend="own")
            assert own.asked["run"] == 1


def test_at_equal_numbers_the_first_is_asked_first() -> None:
    q, k, v = draw()
    with regard.register_kernel(Own(80)):
        assert [x.kernel for x in regard.plan(q, k, v).choices][:2] == ["sdpa", "own"]


def test_each_kernel_is_asked_once() -> None:
    q, k, v = draw()
    with regard.register_kernel(Own(200, "not this one")) as own:
        regard.attend(q, k, v, mask=masks.Causal())
        assert own.asked == {"priority": 1, "why_not": 1}


def test_slots_that_hold_nothing_are_emptied_before_a_kernel_that_would_read_them() -> None:
    seen: list[bool] = []

    class Looks(Own):
        def why_not(self, call: Call) -> list[str]:
            seen.append(call.k.isnan().any().item())
            return ["only looks"]

    q, k, v = draw()
    k[:, :, 3] = math.nan
    where = torch.arange(20)[None].clone()
    where[0, 3] = -1
    for selects in (True, False):
        kernel = Looks(200)
        kernel.selects = selects
        with regard.register_kernel(kernel):
            out = regard.attend(q, k, v, q_positions=torch.arange(20)[None], k_positions=where)
        assert not out.isnan().any()
    assert seen == [True, False]


@pytest.mark.parametrize("name", ["auto", "sdpa"])
def test_names_are_unique(name: str) -> None:
    own = Own(1)
    own.name = name
    with pytest.raises(regard.ArgumentError, match=f"a kernel is named '{name}' already; .*auto"):
        regard.register_kernel(own)


def test_what_is_no_kernel_is_refused() -> None:
    wrong: Any = object()
    nameless = Own(1)
    nameless.name = ""
    for kernel, word in ((wrong, "does not extend it"), (nameless, "has no name")):
        with pytest.raises(regard.ArgumentTypeError, match=word):
            regard.register_kernel(kernel)


def test_a_handle_may_be_removed_twice() -> None:
    own = Own(1)
    handle = regard.register_kernel(own)
    assert own in dispatch.all_kernels()
    handle.remove()
    handle.remove()
    assert dispatch.all_kernels() == dispatch.KERNELS


def test_the_work_of_a_registered_kernel_is_in_the_table() -> None:
    class Cheap(Own):
        def work(self, call: Call) -> WorkEstimate:
            return WorkEstimate(1, 7)

    q, k, v = draw()
    with regard.register_kernel(Cheap(None)):
        choice = regard.plan(q, k, v)["own"]
    assert choice.work == (1, 7)
    assert choice.flops == 2 * (8 + 8)


def test_the_numbers_give_the_orders_that_were_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    """What `dispatch` asked in which order before kernels brought their own numbers."""
    monkeypatch.setattr(gemm, "_measured_sizes", lambda: gemm.MEASURED["AVX512"])
    monkeypatch.setattr(gemm, "_processor_has_amx", lambda: False)

    def first(shape: tuple[int, ...], *, gradient: bool = False) -> list[str]:
        B, H, T, S, D = shape
        q = torch.zeros(B, H, T, D, requires_grad=gradient)
        k = torch.zeros(B, H, S, D)
        return [x.kernel for x in regard.plan(q, k, k, mask=masks.Causal()).choices]

    assert first((1, 1, 16, 16, 8))[:3] == ["sdpa", "tiled", "cpu"]
    assert first((1, 8, 1, 1024, 64))[:3] == ["cpu", "sdpa", "tiled"]
    assert first((1, 1, 16, 16, 8), gradient=True)[:2] == ["sdpa", "reference"]
    assert first((1, 8, 256, 256, 64), gradient=True)[:3] == ["sdpa", "gemm", "tiled"]


def test_compiled_cpu_kernels_are_not_asked_elsewhere() -> None:
    """Off the CPU generated kernels come before plain torch, and the definition is the last that
    runs: "triton" refuses every device but CUDA.
    """
    q = torch.zeros(1, 2, 300, 64, device="meta")
    call = make_call(q, q, q)
    assert [kernel.name for kernel in dispatch.kernels_by_priority(call)] == [
        "sdpa",
        "flex",
        "tiled",
        "reference",
        "triton",
    ]
    flex = next(x for x in dispatch.KERNELS if x.name == "flex")
    assert "runs on cuda and cpu, not on meta" in flex.why_not(call)
