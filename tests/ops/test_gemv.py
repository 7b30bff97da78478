"""Linear maps and norms of a few rows: the compiled ones against fp64, and when they run."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard import huge_pages
from regard.nn.weights import Linear
from regard.ops import tokenwise
from regard.ops.cpu import threads
from regard.ops.tokenwise import MAX_VECTORS, gemv, rms_norm, try_gemv
from tests.kernels import require_kernels
from tests.rules import assert_close_rule

require_kernels()

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN, INF = float("nan"), float("inf")


@pytest.mark.full(keep=10)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 2, 4, 7])
@pytest.mark.parametrize("M, N", [(1, 5), (15, 300), (16, 7), (64, 33), (131, 257), (896, 129)])
@pytest.mark.parametrize("workers", [1, 3])
def test_gemv(
    dtype: torch.dtype, rows: int, M: int, N: int, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(threads, "thread_count", lambda: workers)
    make = torch.Generator().manual_seed(rows * M)
    x, w, b = (torch.randn(s, generator=make).to(dtype) for s in ((rows, M), (N, M), (N,)))
    for bias in (None, b):
        exact = F.linear(x.double(), w.double(), None if bias is None else bias.double())
        found = try_gemv(x, w, bias, only_if_faster=False, weights_per_thread=1)
        assert found is not None
        assert found.dtype == dtype
        assert_close_rule(found, F.linear(x, w, bias), exact)


def test_what_is_not_finite_stays_in_its_row() -> None:
    x, w = torch.randn(2, 40), torch.randn(6, 40)
    w[2, 3], w[4, 39], x[1, 5] = NAN, INF, NAN
    found = gemv(x, w)
    assert found[0].isnan().tolist() == [False, False, True, False, False, False]
    assert found[0, 4].isinf()
    assert found[1].isnan().all()


def test_a_view_of_rows_and_more_dims() -> None:
    x, w = torch.randn(3, 4, 50)[:, 1:2, :32], torch.randn(9, 32)
    assert gemv(x, w).shape == (3, 1, 9)
    torch.testing.assert_close(gemv(x, w), F.linear(x, w))


def test_a_wrong_weight_is_noticed() -> None:
    """Negative control: the rule sees one weight of 2,000 that is off by a hundredth."""
    x, w = torch.randn(1, 40), torch.randn(50, 40)
    wrong = w.clone()
    wrong[17, 39] *= 1.01
    with pytest.raises(AssertionError, match="above"):
        assert_close_rule(gemv(x, wrong), F.linear(x, w), F.linear(x.double(), w.double()))


def suits(x: torch.Tensor, w: torch.Tensor, b: torch.Tensor | None) -> bool:
    return try_gemv(x, w, b) is not None


def test_when_it_runs() -> None:
    x, w = torch.randn(1, 256), torch.randn(256, 256)
    assert suits(x, w, None)
    assert suits(x, w, torch.zeros(256))
    many = torch.randn(MAX_VECTORS[torch.float32] + 1, 256)
    refused = {
        "many rows": suits(many, w, None),
        "a small weight": suits(x, w[:8], None),
        "no rows": suits(x[:0], w, None),
        "a view": suits(x, w.T, None),
        "another size": suits(x[:, :-1], w, None),
        "another bias": suits(x, w, torch.zeros(255)),
        "the dtype of the bias": suits(x, w, torch.zeros(256).double()),
        "a gradient of the bias": suits(x, w, torch.zeros(256).requires_grad_()),
        "a vector": suits(x, w.flatten(), None),
        "dtypes": suits(x.half(), w, None),
        "fp64": suits(x.double(), w.double(), None),
        "a gradient": suits(x, w.clone().requires_grad_(), None),
        "a subclass": suits(x.as_subclass(_Other), w, None),
    }
    assert not any(refused.values()), refused
    assert suits(many.half(), w.half(), None), "torch is slow there"
    with torch.no_grad():
        assert suits(x, w.clone().requires_grad_(), None)
    with torch.autocast("cpu", torch.bfloat16):
        assert not suits(x, w, None)


def test_a_weight_elsewhere_is_named() -> None:
    with pytest.raises(regard.ArgumentError, match="x is on cpu and weight on meta; move one"):
        gemv(torch.randn(1, 4), torch.randn(3, 4, device="meta"))


class _Other(torch.Tensor):
    """A tensor whose numbers need not be its memory."""


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scale", [1e-3, 1.0, 100.0])
@pytest.mark.parametrize("offset", [0.0, 1.0])
def test_rms_norm(dtype: torch.dtype, scale: float, offset: float) -> None:
    make = torch.Generator().manual_seed(3)
    x = (scale * torch.randn(2, 3, 77, generator=make)).to(dtype)
    w = torch.randn(77, generator=make).to(dtype)
    wide = x.double()
    exact = wide / (wide.square().mean(-1, keepdim=True) + 1e-6).sqrt() * (w.double() + offset)
    few = rms_norm(x, w, 1e-6, offset)
    copies = 2 * tokenwise.SIZE_PER_THREAD // 77  # several threads and tasks
    many = rms_norm(x.repeat(1, copies, 1), w, 1e-6, offset)
    by_torch = rms_norm(x.clone().requires_grad_(), w, 1e-6, offset).detach()
    single = x.float() / (x.float().square().mean(-1, keepdim=True) + 1e-6).sqrt()
    plain = (single * (w.float() + offset)).to(dtype)
    assert few.shape == x.shape
    assert_close_rule(few, plain, exact)
    assert torch.equal(many, few.repeat(1, copies, 1))
    assert_close_rule(by_torch, plain, exact)


def test_norms_with_gradients_and_in_fp64() -> None:
    x, w = torch.randn(2, 5, dtype=torch.float64, requires_grad=True), torch.ones(5).double()
    assert torch.autograd.gradcheck(lambda y: rms_norm(y, w, 1e-3), x)


@pytest.mark.parametrize("size", [(3, 5), (1 << 20, 5)])
def test_pages(size: tuple[int, int]) -> None:
    """Writable, aligned to a line, and of the shape and dtype asked for; large or not."""
    for dtype in (*DTYPES, torch.uint8):
        x = huge_pages.empty(size, dtype=dtype)
        assert (x.shape, x.dtype, x.is_contiguous()) == (torch.Size(size), dtype, True)
        assert x.data_ptr() % 16 == 0
        x.fill_(1)
        assert x.sum(dtype=torch.float64) == size[0] * size[1]
    assert huge_pages.empty((2,), dtype=torch.float32, device="meta").is_meta


def test_parameters_settle() -> None:
    """Values, sharing and identity stay; small ones lie behind large ones."""
    large, small = torch.nn.Linear(1100, 1024), torch.nn.Linear(4, 4)
    both = torch.nn.ModuleList([large, torch.nn.Linear(1100, 1024, bias=False), small])
    both[1].weight = large.weight
    weight, values = large.weight, [x.detach().clone() for x in both.parameters()]
    huge_pages.module_to_huge_pages(both)
    assert both[1].weight is large.weight is weight
    assert all(map(torch.equal, both.parameters(), values))
    assert weight.data_ptr() % huge_pages.HUGE_PAGE == 0
    assert 0 < small.weight.data_ptr() - weight.data_ptr() < 6 << 20


@pytest.mark.full
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_graph_holds_an_operator_that_chooses_when_it_runs(dtype: torch.dtype) -> None:
    torch._dynamo.reset()
    held: list[list[str]] = []

    def backend(graph: torch.fx.GraphModule, example: list[torch.Tensor]) -> Any:
        held.append([str(x.target) for x in graph.graph.nodes if x.op == "call_function"])
        return aot_eager(graph, example)

    layer = Linear(256, 130).to(dtype).requires_grad_(False)
    compiled = torch.compile(layer, dynamic=True, fullgraph=True, backend=backend)
    for n in (1, 2, 3, 7):
        x = torch.randn(1, n, 256, generator=torch.Generator().manual_seed(n)).to(dtype)
        assert torch.equal(compiled(x), layer(x)), n
    assert held == [["regard.linear"]] * len(held)
    assert len(held) <= 2
    with torch.autocast("cpu", torch.bfloat16):
        compiled(torch.randn(1, 2, 256, dtype=dtype))
    assert "regard.linear" not in held[-1]
    layer.requires_grad_(True)
    compiled(x).sum().backward()
    assert layer.weight.grad is not None
    assert "regard.linear" not in held[-1]
    torch._dynamo.reset()


def test_the_operator_follows_the_rules_of_torch() -> None:
    x, w, b = torch.randn(2, 3, 200), torch.randn(130, 200), torch.randn(130)
    for bias in (None, b):
        results = torch.library.opcheck(torch.ops.regard.linear.default, (x, w, bias))
        assert set(results.values()) == {"SUCCESS"}


def test_torch_counts_the_flops_of_a_linear_map() -> None:
    layer, x = Linear(256, 130).requires_grad_(False), torch.randn(1, 2, 256)
    for run in (layer, lambda x: torch.ops.regard.linear(x, layer.weight, None)):
        with FlopCounterMode(display=False) as counter:
            run(x)
        assert counter.get_total_flops() == 2 * 2 * 256 * 130
    with FlopCounterMode(display=False):
        assert gemv(x, layer.weight).shape == (1, 2, 130)


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_a_result_is_rounded_to_nearest(dtype: torch.dtype) -> None:
    """The product of two 16-bit numbers is exact in fp32, so that one rounding remains."""
    w = torch.randn(300, 1, generator=torch.Generator().manual_seed(2)).to(dtype)
    w[:3, 0] = torch.tensor([NAN, INF, -INF])
    x = torch.tensor([[1.7]]).to(dtype)
    exact = (w.float() * x.float()).view(1, -1)
    torch.testing.assert_close(gemv(x, w), exact.to(dtype), rtol=0, atol=0, equal_nan=True)
