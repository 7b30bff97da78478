"""The compiled decode kernel: what the contract tests do not reach: tiles, parts, threads, forks,
memory, its exponential.
"""

from __future__ import annotations

import multiprocessing
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.ops.cpu import arguments, attention, threads
from regard.ops.softmax import cpu
from regard.ops.softmax.call import Call, make_call
from regard.span import Span
from tests.kernels import require_kernels
from tests.ops.softmax.plain import meaning
from tests.oracles.plain import plain_attention, several_plains
from tests.rules import assert_close_rule

require_kernels()

KERNEL = cpu.CpuKernel()
DTYPES = [torch.float32, torch.bfloat16, torch.float16]
NAN, INF = float("nan"), float("inf")


def inputs(
    S: int,
    *,
    B: int = 2,
    H: int = 6,
    G: int = 2,
    T: int = 1,
    D: int = 40,
    E: int = 24,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> list[Tensor]:
    make = torch.Generator().manual_seed(seed)
    shapes = ((B, H, T, D), (B, G, S, D), (B, G, S, E))
    return [torch.randn(shape, generator=make).to(dtype) for shape in shapes]


def assert_right(call: Call, what: str) -> None:
    """out and lse against fp64 math over the mask and bias written out."""
    q, k, v = call.q, call.k, call.v
    exact = plain_attention(q.double(), k.double(), v.double(), **meaning(call))
    outs, lses = zip(*several_plains(q, k, v, **meaning(call)), strict=True)
    found = KERNEL.run(call)
    assert found.lse is not None
    assert_close_rule(found.out, list(outs), exact[0], what=what)
    assert_close_rule(found.lse, [x.float() for x in lses], exact[1], what=f"lse, {what}")


NUMBERS = torch.Generator().manual_seed(0)
RECIPES: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": masks.Causal()},
    "window": {"mask": masks.Causal() & masks.Window(70)},
    "window and sinks": {"mask": masks.Causal() & (masks.Window(70) | masks.Sinks(3))},
    "heads": {"mask": masks.Heads([masks.Causal() & masks.Window(5 + 30 * h) for h in range(6)])},
    "no structure": {"mask": masks.Causal() & masks.Fn(lambda q, k: (q - k) % 3 != 1)},
    "alibi": {"mask": masks.Causal(), "bias": biases.ALiBi(6)},
    "alibi both ways": {"bias": biases.ALiBi(6, symmetric=True)},
    "learned bias": {"bias": biases.T5Relative(torch.randn(32, 6, generator=NUMBERS))},
    "softcap": {"softcap": 3.0, "mask": masks.Causal()},
    "sink": {"sink": torch.randn(6, generator=NUMBERS)},
    "scale": {"scale": -0.3},
}


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("T, H, G", [(1, 6, 2), (3, 6, 6), (16, 6, 3), (2, 6, 1)])
def test_recipes(recipe: str, dtype: torch.dtype, T: int, H: int, G: int) -> None:
    """Rows of 1, 2, 3, 4 and more; 333 keys are five tiles and a part of one."""
    options = RECIPES[recipe]
    q, k, v = inputs(333, T=T, H=H, G=G, dtype=dtype)
    k[:, :, 3] *= 4
    call = make_call(q, k, v, **options, wants_lse=True)
    assert KERNEL.why_not(call) == []
    assert_right(call, recipe)


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_of_a_batch_have_their_own_lengths_and_holes(dtype: torch.dtype) -> None:
    """What stands in a hole is NaN, and is not read."""
    q, k, v = inputs(200, dtype=dtype)
    where = torch.stack([torch.arange(200), torch.arange(200).roll(60) - 37])
    where[0, 150:] = -1
    where = where.clamp(min=-1)
    for x in (k, v):
        x.masked_fill_((where < 0)[:, None, :, None], NAN)
    options: dict[str, Any] = {
        "mask": masks.Causal() & masks.Window(100),
        "k_positions": where,
        "q_positions": torch.tensor([[149], [162]]),
    }
    found = regard.attend(q, k, v, **options, backend="cpu")
    clean = [x.nan_to_num(0.0) for x in (k, v)]
    assert torch.equal(found, regard.attend(q, *clean, **options, backend="cpu"))
    call = make_call(q, *clean, **options, wants_lse=True)
    assert_right(call, "holes")


@pytest.mark.parametrize("S", [300, 64 * 90 + 5])
def test_batch_and_threads_change_no_bit(S: int, monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(S, B=3)
    options: dict[str, Any] = {"mask": masks.Causal() & masks.Window(3000), "wants_lse": True}
    whole = make_call(q, k, v, **options)
    assert_right(whole, f"{S} keys")
    split_count = attention.split_count
    right, splits = KERNEL.run(whole), split_count(S)
    assert splits == {300: 1, 64 * 90 + 5: 11}[S]
    for workers in (1, 2, 5):
        monkeypatch.setattr(threads, "thread_count", lambda workers=workers: workers)
        for rows in (slice(0, 1), slice(1, 3)):
            found = KERNEL.run(make_call(q[rows], k[rows], v[rows], **options))
            assert torch.equal(found.out, right.out[rows])
            assert torch.equal(found.lse, right.lse[rows])
    if splits > 1:  # the broken form: another division
        monkeypatch.setattr(attention, "split_count", lambda keys: split_count(keys) - 1)
        assert not torch.equal(KERNEL.run(whole).lse, right.lse)


def test_memory_is_read_where_it_lies() -> None:
    """A view of a longer buffer is not copied; one whose last dim is not contiguous is."""
    q, _, _ = inputs(1)
    buffer = torch.randn(2, 2, 500, 64)
    k, v = buffer[:, :, 100:300, :40], buffer[:, :, 100:300, 40:]
    assert arguments.with_rows(k).data_ptr() == k.data_ptr()
    call = make_call(q, k, v, wants_lse=True)
    assert_right(call, "a view")
    turned = torch.randn(2, 2, 40, 200).transpose(2, 3)
    copy = arguments.with_rows(turned)
    assert torch.equal(copy, turned)
    assert copy.is_contiguous()
    call = make_call(q, turned, v, wants_lse=True)
    assert_right(call, "transposed")


def _child(queue: Any, q: Tensor, k: Tensor, v: Tensor) -> None:
    torch.set_num_threads(1)
    threads.thread_count = lambda: 2  # type: ignore[assignment]  # this process is ours
    queue.put(regard.attend(q, k, v, backend="cpu").numpy())


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_after_a_fork(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "thread_count", lambda: 2)
    q, k, v = inputs(2 * attention.ELEMENTS_PER_THREAD // 128, B=1)  # work for two threads
    here = regard.attend(q, k, v, backend="cpu")  # the parent's threads are there now
    context = multiprocessing.get_context("fork")
    queue = context.Queue()
    child = context.Process(target=_child, args=(queue, q, k, v))
    child.start()
    assert np.array_equal(queue.get(timeout=60), here.numpy())
    child.join(60)
    assert child.exitcode == 0


def test_threads_of_our_own_where_torch_has_no_team(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "thread_count", lambda: 3)
    q, k, v = inputs(3 * attention.ELEMENTS_PER_THREAD // 128, B=1)  # work for three threads
    with_team = regard.attend(q, k, v, backend="cpu")
    monkeypatch.setattr(threads, "torch_openmp", lambda: None)
    assert torch.equal(regard.attend(q, k, v, backend="cpu"), with_team)


def test_an_exception_of_a_part_is_raised() -> None:
    def work(part: int, parts: int) -> None:
        if part == 1:
            raise ValueError("part 1")

    with pytest.raises(ValueError, match="part 1"):
        threads.ThreadPool().run(work, 3)


def test_weights_over_the_whole_range_of_the_exponential() -> None:
    """Beside a key of score 0, the weight of a key is e^x: exact to some roundings of fp32, 0 where
    fp32 has no normal numbers, and NaN for NaN.
    """
    x = torch.cat([torch.linspace(-90, 0, 4001), -torch.logspace(-30, 2, 401)])
    q, k = torch.ones(1, 1, 1, 1), torch.zeros(len(x), 1, 2, 1)
    k[:, 0, 1, 0] = x
    v = torch.tensor([0.0, 1.0]).view(1, 1, 2, 1).expand(len(x), 1, 2, 1)
    q = q.expand(len(x), 1, 1, 1)
    found = regard.attend(q, k, v, mask=masks.Full(), scale=1.0, backend="cpu").flatten()
    exact = x.double().exp() / (1 + x.double().exp())
    is_normal = x >= -87
    assert ((found / exact - 1).abs()[is_normal] < 4 * torch.finfo(torch.float32).eps).all()
    assert not found[x < -87.5].any()
    k[0, 0, 1, 0] = NAN
    k[1] = NAN  # no score of the row is a number
    found = regard.attend(q, k, v, mask=masks.Full(), scale=1.0, backend="cpu").flatten()
    assert found.isnan().nonzero().flatten().tolist() == [0, 1]


def test_what_it_refuses(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k, v = inputs(100)
    assert regard.plan(q, k, v).kernel == "sdpa", "it can, and there is little to read"
    assert regard.plan(*inputs(1100)).kernel == "cpu"
    cases: list[tuple[str, dict[str, Any]]] = [
        ("has no gradient", {"q": q.clone().requires_grad_()}),
        ("no dropout", {"dropout": 0.5}),
        ("no float64", {"q": q.double(), "k": k.double(), "v": v.double()}),
        (
            "17 queries, and 51 rows (H/G T) per key/value head; the limits are 16 and 64",
            {"q": torch.randn(2, 6, 17, 40)},
        ),
        ("nothing to compute", {"k": k[:, :, :0], "v": v[:, :, :0]}),
    ]
    for reason, change in cases:
        call = make_call(**{"q": q, "k": k, "v": v, **change})
        assert KERNEL.why_not(call) == [reason]
    with regard.Trace("pattern", missing="ignore"):
        assert regard.plan(q, k, v)["cpu"].reasons == ("does not expose ['pattern']",)
    monkeypatch.setattr(cpu, "why_none", lambda: "no compiled kernels: no compiler")
    assert KERNEL.why_not(make_call(q, k, v)) == ["no compiled kernels: no compiler"]
    with pytest.raises(regard.KernelRefusal, match="no compiled kernels"):
        regard.attend(q, k, v, backend="cpu")
    assert regard.plan(*inputs(1100)).kernel == "sdpa", "and somebody else serves"


def test_a_compiled_graph_leaves_it_out() -> None:
    q, k, v = inputs(100)
    compiled = torch.compile(
        lambda *x: regard.attend(*x, mask=masks.Causal()), fullgraph=True, backend="eager"
    )
    assert torch.allclose(compiled(q, k, v), regard.attend(q, k, v, mask=masks.Causal()), atol=1e-5)


def test_work_counts_the_tiles_that_are_visited() -> None:
    q, k, v = inputs(640, H=4, G=2)
    call = make_call(q, k, v, mask=masks.Causal() & (masks.Window(65) | masks.Sinks(1)))
    assert KERNEL.work(call).pairs == 2 * 4 * (64 + 2 * 64)
    assert KERNEL.work(make_call(q, k[:, :, :70], v[:, :, :70])).pairs == 2 * 4 * 70


def test_a_rule_of_numbers_is_asked_once_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every layer of a model asks for the same; a rule with a tensor or a function may change, and
    is asked each time.
    """
    asked: list[masks.Mask] = []
    intervals = masks.Mask.intervals

    def counted(mask: masks.Mask, q: Tensor) -> Any:
        asked.append(mask)
        return intervals(mask, q)

    monkeypatch.setattr(masks.Mask, "intervals", counted)
    cpu._cached_intervals.cache_clear()
    q, (k, v) = torch.randn(1, 2, 1, 8), torch.randn(2, 1, 2, 30, 8)
    where = torch.arange(30).flip(0)[None]

    def layers(make: Callable[[], masks.Mask], at: int) -> int:
        asked.clear()
        options = {"q_positions": Span(at, 1), "k_positions": where}
        found = [regard.attend(q, k, v, mask=make(), backend="cpu", **options) for _ in range(3)]  # type: ignore[arg-type]
        count = sum(str(mask) == str(make()) for mask in asked)
        right = regard.attend(q, k, v, mask=make(), backend="reference", **options)  # type: ignore[arg-type]
        assert all(torch.allclose(x, right, atol=1e-5) for x in found)
        return count

    assert layers(lambda: masks.Causal() & (masks.Window(5) | masks.Sinks(2)), 20) == 1
    assert layers(lambda: masks.Causal() & (masks.Window(5) | masks.Sinks(2)), 20) == 0
    assert layers(lambda: masks.Causal() & (masks.Window(5) | masks.Sinks(2)), 21) == 1
    assert layers(lambda: masks.Causal() & masks.Heads([masks.Window(3), masks.Window(9)]), 21) == 1
    blocks = masks.Causal() & masks.Blocks(torch.ones(10, 10, dtype=torch.bool).tril(), 4)
    assert layers(lambda: blocks, 21) == 3
    assert layers(lambda: masks.Causal() & masks.Fn(lambda q, k: (q - k) % 3 == 0), 21) == 3
