"""Taps and Trace: capture, edit, places, nesting, threads, errors; nothing when off; a compiled
graph stays whole.
"""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch._dynamo
from torch import Tensor, nn

import regard
from regard import masks, tracing
from regard.nn import Attention, HeadProjection, SeparateQKV
from regard.tracing import TAP_NAMES, Trace, named_scope, requested_taps
from tests.rules import assert_close_rule

CAUSAL = masks.Causal()


def attention() -> Attention:
    project = SeparateQKV(HeadProjection(8, 4, 2), HeadProjection(8, 2, 2), HeadProjection(8, 2, 2))
    return Attention(project, nn.Linear(8, 8), mask=CAUSAL)


class Two(nn.Module):
    """Attentions at places."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([attention(), attention()])

    def forward(self, x: Tensor, backend: str = "auto") -> Tensor:
        for i, layer in enumerate(self.layers):
            with named_scope(f"layers.{i}"):
                x = x + layer(x, backend=backend)
        return x


ATTENTION_TAPS = TAP_NAMES[2:9]
"""The taps of one attention module."""


def test_captures_every_name_in_the_order_computed() -> None:
    model, x = attention(), torch.randn(2, 5, 8)
    with Trace(*ATTENTION_TAPS) as trace:
        out = model(x)
    assert tuple(trace) == ATTENTION_TAPS
    assert len(trace) == len(ATTENTION_TAPS)
    shapes = {name: tuple(trace[name].shape) for name in trace}
    assert shapes == {
        "q": (2, 4, 5, 2),
        "k": (2, 2, 5, 2),
        "v": (2, 2, 5, 2),
        "scores": (2, 4, 5, 5),
        "pattern": (2, 4, 5, 5),
        "z": (2, 4, 5, 2),
        "out": (2, 5, 8),
    }
    assert torch.equal(trace["out"], out)
    assert not trace["out"].requires_grad
    assert torch.equal(
        trace["scores"].isneginf(), torch.ones(5, 5).triu(1).bool().expand(2, 4, 5, 5)
    )
    weights = regard.attention_weights(trace["q"], trace["k"], mask=CAUSAL)
    assert torch.equal(trace["pattern"], weights)
    z = trace["pattern"] @ trace["v"].repeat_interleave(2, 1)
    assert float((z - trace["z"]).abs().max()) < 1e-6


def test_what_is_captured_is_what_is_computed_without_a_trace() -> None:
    model, x = Two(), torch.randn(1, 6, 8)
    bare = model(x, backend="reference")
    with Trace(*ATTENTION_TAPS) as trace:
        traced = model(x)
    assert torch.equal(bare, traced)
    assert len(trace) == 2 * len(ATTENTION_TAPS)


def test_nothing_is_kept_when_off() -> None:
    model, x = Two(), torch.randn(1, 6, 8)
    with Trace("pattern", missing="ignore") as trace:
        pass
    model(x)
    assert len(trace) == 0
    assert "pattern" not in trace
    assert tracing._state.stack == ()
    assert requested_taps() == frozenset()
    assert named_scope("layers.0") is named_scope("layers.1"), (
        "a place costs nothing when nobody listens"
    )
    assert tracing.tap("q", x) is x


def test_places_and_names() -> None:
    model, x = Two(), torch.randn(1, 6, 8)
    with Trace("pattern", "layers.1.z") as trace:
        model(x)
    assert list(trace) == ["layers.0.pattern", "layers.1.pattern", "layers.1.z"]
    assert torch.equal(trace["z"], trace["layers.1.z"]), (
        "a bare name will do where it passed one place"
    )
    assert "pattern" in trace
    assert "layers.0.z" not in trace
    with named_scope("nowhere"), Trace("q") as trace, named_scope("a"), named_scope("b"):
        tracing.tap("q", x)
    assert list(trace) == ["a.b.q"]


def test_every_call_is_kept() -> None:
    model = attention()
    with Trace("z", "out") as trace:
        for n in (1, 2, 3):
            out = model(torch.randn(1, n, 8))
    assert [z.shape[2] for z in trace.every("z")] == [1, 2, 3]
    assert torch.equal(trace["out"], out)
    trace.every("z").clear()
    assert len(trace.every("z")) == 3, "a copy of the list"


def test_edits_change_the_computation() -> None:
    model, x = Two(), torch.randn(1, 6, 8)
    uniform = torch.full((6, 6), 1 / 6)
    edits = {"layers.0.pattern": lambda p: uniform.expand_as(p), "v": lambda v: 2 * v}
    with Trace("pattern", "v", "z", edit=edits) as trace:
        out = model(x)
    assert not torch.equal(out, model(x))
    assert torch.equal(trace["layers.0.pattern"][0, 0], uniform)
    assert not torch.equal(trace["layers.1.pattern"][0, 0], uniform)
    mixed = (trace["layers.0.v"].cumsum(2) / 6).repeat_interleave(
        2, 1
    )  # what is masked stays out, edit or not
    assert float((trace["layers.0.z"] - mixed).abs().max()) < 1e-6
    silent = {"z": torch.zeros_like}
    with Trace(edit=silent) as trace:
        assert torch.equal(model.layers[0](x), model.layers[0].output.bias.expand(1, 6, 8))
    assert len(trace) == 0


def test_an_edit_is_differentiable() -> None:
    model, x = attention(), torch.randn(1, 6, 8, requires_grad=True)
    with Trace(edit={"z": lambda z: 3 * z}):
        edited = model(x).sum()
    plain = model(x).sum()
    (a,), (b,) = torch.autograd.grad(edited, x), torch.autograd.grad(plain, x)
    assert float((a - 3 * b).abs().max()) < 1e-5


def test_every_open_trace_listens() -> None:
    model, x = attention(), torch.randn(1, 3, 8)
    with Trace("q") as outer:
        model(x)
        with Trace("k") as inner:
            model(x)
            assert requested_taps() == {"q", "k"}
        model(x)
    assert len(outer.every("q")) == 3
    assert list(inner) == ["k"]
    assert tracing._state.stack == ()


def test_edits_compose_from_the_outside_and_captures_see_what_is_used() -> None:
    model, x = attention(), torch.randn(1, 3, 8)
    with Trace("z") as bare:
        model(x)
    z = bare["z"]
    with Trace("z", edit={"z": lambda z: z + 1}) as outer:
        with Trace("z", "out", edit={"z": lambda z: 10 * z}) as inner:
            out = model(x)
        alone = model(x)
    assert torch.equal(inner["z"], 10 * (z + 1)), "outermost first"
    assert torch.equal(outer.every("z")[0], 10 * (z + 1)), "a capture sees what went on"
    assert torch.equal(outer.every("z")[1], z + 1)
    assert torch.equal(out, inner["out"])
    assert torch.equal(out, model.output((10 * (z + 1)).transpose(1, 2).flatten(2)))
    assert torch.equal(alone, model.output((z + 1).transpose(1, 2).flatten(2)))
    assert not torch.equal(10 * (z + 1), 10 * z + 1), "the other order would be seen"


def test_a_trace_names_places_from_where_it_was_opened() -> None:
    x = torch.ones(1)
    with Trace("q") as outer, named_scope("a"), Trace("q") as inner, named_scope("b"):
        tracing.tap("q", x)
        assert (outer.where, inner.where) == ("a.b", "b")
    assert (list(outer), list(inner)) == (["a.b.q"], ["b.q"])
    assert outer.where == ""
    assert tracing._state.scopes == ()


@pytest.mark.parametrize(
    "edit, kind, message",
    [
        (lambda x: x[:, :1], regard.ArgumentError, "returned (1, 1, 3, 2) of float32 on cpu"),
        (lambda x: x.double(), regard.ArgumentError, "returned (1, 4, 3, 2) of float64 on cpu"),
        (lambda x: x.to("meta"), regard.ArgumentError, "returned (1, 4, 3, 2) of float32 on meta"),
        (
            lambda x: None,
            regard.ArgumentTypeError,
            "returned NoneType at z; it must return the tensor",
        ),
        (lambda x: 0.0, regard.ArgumentTypeError, "returned float at z; it must return the tensor"),
    ],
)
def test_an_edit_gives_back_what_it_was_given(
    edit: Any, kind: type[Exception], message: str
) -> None:
    model, x = attention(), torch.randn(1, 3, 8)
    refused = pytest.raises(kind, match=re.escape(f"the edit of 'z' {message}"))
    with refused, Trace(edit={"z": edit}):
        model(x)
    assert tracing._state.stack == ()
    assert tracing._state.scopes == ()


def test_an_edit_in_place_does_not_reach_a_cache() -> None:
    model, x = attention(), torch.randn(1, 4, 8)
    model.eval()
    outs = []
    for edit in (lambda k: k.mul_(2), lambda k: 2 * k):
        cache = model.new_cache()
        with torch.no_grad(), Trace(edit={"k": edit}):
            outs.append(torch.cat([model(x[:, i : i + 1], cache=cache) for i in range(4)], 1))
    assert torch.equal(*outs)


def test_what_never_happened_is_said_when_the_trace_closes() -> None:
    model, x = Two(), torch.randn(1, 3, 8)
    zero = torch.zeros_like
    idle = Trace(edit={"layers.7.z": zero, "layers.0.z": zero})
    with pytest.raises(regard.ArgumentError) as error, torch.no_grad(), idle:
        model(x)
    said = str(error.value)
    assert said.startswith(
        "the edit of 'layers.7.z' never ran: no such tap was reached while the trace was open; "
    )
    assert "did you mean 'layers.1.z'?" in said or "did you mean 'layers.0.z'?" in said
    assert (
        "the taps reached were layers.0.q, layers.0.k, layers.0.v, layers.0.z, layers.0.out, "
        "layers.1.q" in said
    )
    with (
        pytest.raises(
            regard.ArgumentError, match="no tap was reached at all: run the model within"
        ),
        Trace(edit={"z": zero}),
    ):
        pass
    trace = Trace("layers.1.z", "scores", "q")
    trace.__enter__()
    with named_scope("layers.0"):
        tracing.tap("q", x)
    with pytest.warns(
        UserWarning, match="'layers.1.z', 'scores' was never captured: .* layers.0.q"
    ) as told:
        trace.__exit__(None)
    assert told[0].filename == __file__, "the line of the block, not of the library"
    with Trace("layers.2.z", missing="ignore"):
        model(x)
    with pytest.raises(ZeroDivisionError), Trace("out", edit={"z": zero}):
        raise ZeroDivisionError  # is not masked
    trace = Trace(edit={"z": zero})
    with trace:
        model(x)
    with (
        pytest.raises(regard.ArgumentError, match="never ran"),
        trace,
    ):  # each block is judged by itself
        pass
    with pytest.raises(regard.ArgumentError) as error:
        Trace("q", missing="never")  # type: ignore[arg-type]
    assert str(error.value) == "missing is 'never'; it must be 'warn' or 'ignore'"


def test_a_trace_is_closed_where_it_was_opened() -> None:
    trace, told = Trace("q", missing="ignore"), []
    trace.__enter__()

    def close() -> None:
        try:
            trace.__exit__(None)
        except regard.ArgumentError as error:
            told.append(str(error))

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert told == ["a Trace is closed in a thread that did not open it; use `with`"]
    trace.__exit__(None)
    assert tracing._state.stack == ()


def test_a_trace_may_be_entered_again_also_within_itself() -> None:
    model, x = attention(), torch.randn(1, 3, 8)
    trace = Trace("q")
    with trace:
        with trace:
            model(x)
        model(x)
    with trace:
        model(x)
    assert len(trace.every("q")) == 3
    assert tracing._state.stack == ()


def test_an_exception_ends_trace_and_place() -> None:
    trace = Trace("q")
    with pytest.raises(ZeroDivisionError), trace, named_scope("a"):
        raise ZeroDivisionError
    assert tracing._state.stack == ()
    with trace:
        tracing.tap("q", torch.ones(1))
    assert list(trace) == ["q"]


def test_threads_do_not_hear_one_another() -> None:
    model = attention()
    heard: dict[int, list[str]] = {}
    ready = threading.Barrier(3)

    def work(i: int) -> None:
        if i == 2:
            ready.wait()
            model(torch.randn(1, 7, 8))
            heard[i] = []
            ready.wait()
            return
        with Trace("q") as trace, named_scope(f"thread.{i}"):
            ready.wait()
            for _ in range(i + 1):
                model(torch.randn(1, i + 1, 8))
            ready.wait()
        heard[i] = [f"{name} {tuple(x.shape)}" for name in trace for x in trace.every(name)]

    threads = [threading.Thread(target=work, args=(i,)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {
        0: ["thread.0.q (1, 4, 1, 2)"],
        1: ["thread.1.q (1, 4, 2, 2)"] * 2,
        2: [],
    }
    assert tracing._state.stack == ()


@pytest.fixture
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def test_threads_that_take_turns_at_every_step(hasty: None) -> None:
    """Each thread has its own edits and places, over one shared trace; every call has the result
    that it has alone.
    """
    x, wrong = torch.arange(4.0), []
    shared = Trace("q", "k")

    def work(i: int) -> None:
        own = Trace("z", edit={f"thread.{i}.z": lambda z: z + i})
        with shared, own, named_scope(f"thread.{i}"):
            for n in range(200):
                with named_scope("inner"):
                    tracing.tap("q", x * n)
                if own.where != f"thread.{i}" or not torch.equal(tracing.tap("z", x), x + i):
                    wrong.append((i, n))
                tracing.tap("k", x)
        if list(own) != [f"thread.{i}.z"] or tracing._state.stack or tracing._state.scopes:
            wrong.append((i, -1))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    assert sorted(shared) == sorted(
        f"thread.{i}{name}" for i in range(8) for name in (".inner.q", ".k")
    )
    for i in range(8):
        found = shared.every(f"thread.{i}.inner.q")
        assert [float(y[1]) for y in found] == list(range(200))


def test_a_fused_kernel_refuses_what_it_cannot_show() -> None:
    q = torch.randn(1, 2, 20, 8)
    with Trace("z", missing="ignore"):
        assert regard.plan(q, q, q).kernel == "sdpa"
    with Trace(edit={"layers.3.pattern": lambda p: p}):
        assert regard.plan(q, q, q).kernel == "reference"
        with pytest.raises(regard.KernelRefusal, match=r"does not expose \['pattern'\]"):
            regard.attend(q, q, q, backend="sdpa")
        with named_scope("layers.3"):
            regard.attend(q, q, q)


def test_errors() -> None:
    for bad in ("patterns", "layers.0.", "layers", ""):
        for make in (lambda bad=bad: Trace(bad), lambda bad=bad: Trace(edit={bad: abs})):
            with pytest.raises(regard.ArgumentError) as error:
                make()
            assert (
                str(error.value) == f"no tap is named {bad!r}; the taps are {', '.join(TAP_NAMES)}"
            )
    trace = Trace("q", missing="ignore")
    with pytest.raises(regard.ArgumentError) as error:
        trace["q"]
    assert str(error.value) == "'q' was not captured; captured: nothing"
    with trace:
        for i in range(10):
            with named_scope(f"layers.{i}"):
                tracing.tap("q", torch.ones(1))
    with pytest.raises(regard.ArgumentError) as error:
        trace["z"]
    listed = ", ".join(f"layers.{i}.q" for i in range(8)) + ", and 2 more"
    assert str(error.value) == f"'z' was not captured; captured: {listed}"
    with pytest.raises(regard.ArgumentError) as error:
        trace.every("q")
    listed = ", ".join(repr(f"layers.{i}.q")[1:-1] for i in range(8)) + ", and 2 more"
    assert str(error.value) == f"'q' was captured at 10 places: name one of {listed}"


# Compiled.


def compiled(model: nn.Module, backend: str) -> Any:
    torch._dynamo.reset()
    return torch.compile(model, fullgraph=True, backend=backend)


def assert_near(x: Tensor, y: Tensor, exact: Tensor) -> None:
    assert_close_rule(x, y, exact)


@pytest.mark.full
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
@pytest.mark.parametrize("kernel", ["sdpa", "reference"])
def test_compiles_in_one_graph(kernel: str, compiler: str) -> None:
    model, x = Two(), torch.randn(1, 24, 8)
    run = compiled(model, compiler)
    with torch.no_grad():
        exact = Two.forward(model.double(), x.double(), "reference")
        model.float()
        assert_near(run(x, kernel), model(x, kernel), exact)
    x.requires_grad_()
    served = (
        "auto" if kernel == "sdpa" else kernel
    )  # a graph cannot see whether its gradient is right
    (mine,) = torch.autograd.grad(run(x, served).sum(), x)
    (eager,) = torch.autograd.grad(model(x, served).sum(), x)
    (exact,) = torch.autograd.grad(model.double()(x.double(), "reference").sum(), x)
    assert_close_rule(mine, eager, exact.double(), factor=3)


@pytest.mark.full
@pytest.mark.parametrize("compiler", ["eager", "aot_eager"])
def test_compiles_with_a_trace_around_it(compiler: str) -> None:
    model, x = Two(), torch.randn(1, 24, 8)
    run = compiled(model, compiler)
    with torch.no_grad():
        bare = run(x)
        with Trace("pattern", "layers.1.z") as trace:
            traced = run(x)
        with Trace("pattern", "layers.1.z") as eager:
            model(x)
        with Trace("z", edit={"z": torch.zeros_like}):
            edited = run(x)
        again = run(x)
    assert list(trace) == list(eager) == ["layers.0.pattern", "layers.1.pattern", "layers.1.z"]
    for name in trace:
        assert float((trace[name] - eager[name]).abs().max()) < 1e-6
    assert float((bare - traced).abs().max()) < 1e-5
    assert torch.equal(bare, again)
    assert not torch.equal(bare, edited)
    assert tracing._state.stack == ()


@pytest.mark.full
def test_a_compiled_graph_belongs_to_the_traces_of_its_thread() -> None:
    model, x = attention(), torch.randn(1, 4, 8)
    run, found = compiled(model, "eager"), {}
    with torch.no_grad():
        bare = run(x)
        with Trace(edit={"z": torch.zeros_like}):
            zeroed = run(x)

            def other() -> None:
                with torch.no_grad():
                    found["out"] = run(x)

            thread = threading.Thread(target=other)
            thread.start()
            thread.join()
            refused = pytest.raises(torch._dynamo.exc.Unsupported, match="the edit of 'z' returned")
            with refused, Trace(edit={"z": lambda z: z[:, :1]}):
                run(x)
    assert torch.equal(zeroed, model.output.bias.expand(1, 4, 8))
    assert torch.equal(found["out"], bare)
    assert not torch.equal(bare, zeroed)
