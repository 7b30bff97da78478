"""ONNX files of calls of `attend`, layers and decoders, run by ONNX Runtime."""

from __future__ import annotations

import copy
import io
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.biases import T5Relative
from regard.errors import ArgumentError, ArgumentTypeError
from regard.integrations.pytorch import WithPast
from regard.masks import Causal, Chunk, Dilated, Document, Padding, Window
from regard.nn.variants import VARIANTS
from tests.integrations.pytorch.matrix.things import Thing, layer, outputs, randn
from tests.integrations.pytorch.matrix.transforms import (
    assert_follows,
    onnx_file,
    onnx_session,
    refusal,
    traced_onnx_file,
)
from tests.nn.catalogue import MIXERS, example
from tests.rules import assert_close_rule

onnx = pytest.importorskip("onnx")

LENGTH = torch.export.Dim("T", min=1, max=512)
EARLIER = torch.export.Dim("S", min=0, max=512)


class Attend(nn.Module):
    """A call of `attend` with options."""

    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return regard.attend(q, k, v, **self.options)


def qkv(T: int, S: int) -> tuple[Tensor, Tensor, Tensor]:
    """Seeded q [2,4,T,8], k and v [2,2,S,8]."""
    return randn(2, 4, T, 8), randn(2, 2, S, 8), -2 * randn(2, 2, S, 8)


def file_of(module: nn.Module, args: tuple[Tensor, ...], axis: int, *, dynamo: bool) -> io.BytesIO:
    """The file of one of the exporters; the first input has a length T, the others S."""
    if dynamo:
        dims = ({axis: LENGTH}, *({2: EARLIER} for _ in args[1:]))
        past = isinstance(module, WithPast)
        return onnx_file(module, args, (dims[0], dims[1:]) if past else dims)
    return traced_onnx_file(module, args, ((axis, "T"), *((2, "S") for _ in args[1:])))


def nodes(file: io.BytesIO) -> list[str]:
    """The operators of a file."""
    return [node.op_type for node in onnx.load_from_string(file.getvalue()).graph.node]


def assert_same_calls(
    module: nn.Module, found: Callable[..., Any], many: list[tuple[Tensor, ...]]
) -> None:
    """A file gives what the module gives in float64, by the error rule."""
    results = [[], [], []]
    wide = copy.deepcopy(module).double()
    for args in many:
        with torch.no_grad(), regard.Trace("pattern"):
            plain = outputs(module(*args))
            exact = outputs(wide(*(x.double() for x in args)))
        for group, xs in zip(results, (outputs(found(*args)), plain, exact), strict=True):
            group.append(torch.cat([x.flatten() for x in xs]))
    assert_close_rule(*(torch.cat(x) for x in results))


CALLS: dict[str, tuple[dict[str, Any], int]] = {
    "nothing is visible to the first rows": ({"mask": Causal() & ~Window(3)}, 1),
    "chunks": ({"mask": Causal() & Chunk(4)}, 1),
    "dilated": ({"mask": Causal() & Dilated(3, 2)}, 1),
    "documents": ({"mask": Causal() & Document((0, 3, 7, 600))}, 1),
    "padding": ({"mask": Causal() & Padding(runs=(((0, 60),), ((2, 5),)))}, 1),
    "T5's bias": ({"bias": T5Relative(randn(32, 4))}, 1),
    "softcap": ({"softcap": 3.0, "mask": Causal()}, 0),
    "negative scale": ({"scale": -0.7}, 1),
}
"""Calls, and how many nodes Attention the file has with opset 23."""


@pytest.mark.full
@pytest.mark.parametrize("name", CALLS)
def test_the_new_exporter_serves_all_lengths(name: str) -> None:
    options, attention = CALLS[name]
    module = Attend(**options).eval()
    file = file_of(module, qkv(6, 9), 2, dynamo=True)
    assert nodes(file).count("Attention") == attention
    many = [qkv(T, S) for T, S in ((1, 1), (1, 9), (7, 7), (20, 33))]
    assert_same_calls(module, onnx_session(file), many)


@pytest.mark.parametrize("name", CALLS)
def test_the_tracing_exporter_serves_all_lengths(name: str) -> None:
    module = Attend(**CALLS[name][0]).eval()
    file = file_of(module, qkv(6, 9), 2, dynamo=False)
    many = [qkv(T, S) for T, S in ((1, 1), (1, 9), (7, 7), (20, 33))]
    assert_same_calls(module, onnx_session(file), many)


def test_a_wrong_file_is_found() -> None:
    file = file_of(Attend(mask=Causal()).eval(), qkv(6, 6), 2, dynamo=False)
    with pytest.raises(AssertionError, match="error"):
        assert_same_calls(Attend(), onnx_session(file), [qkv(7, 7)])


@pytest.mark.full
def test_older_opsets_have_no_node_attention() -> None:
    module, args = Attend(mask=Causal()).eval(), qkv(6, 6)
    file = onnx_file(module, args, ({2: LENGTH},) * 3, opset=18)
    assert "Attention" not in nodes(file)
    assert "Softmax" in nodes(file)
    assert_same_calls(module, onnx_session(file), [qkv(n, n) for n in (1, 5, 40)])


@pytest.mark.full
def test_the_reference_of_onnx_agrees_about_the_node() -> None:
    from onnx.reference import ReferenceEvaluator

    module, args = Attend(mask=Causal() & Window(5)).eval(), qkv(6, 9)
    file = file_of(module, args, 2, dynamo=True)
    evaluator = ReferenceEvaluator(onnx.load_from_string(file.getvalue()))

    def found(*args: Tensor) -> Tensor:
        names = evaluator.input_names
        given = {name: x.numpy() for name, x in zip(names, args, strict=True)}
        return torch.from_numpy(evaluator.run(None, given)[0])

    assert_same_calls(module, found, [qkv(3, 9), qkv(8, 8)])


PAST = (
    *("sliding_window", "mla", "learned_sink", "streaming", "differential", "alibi", "gpt", "t5"),
    *("tpa", "mfa", "gta", "grouped_latent", "mlra"),
)
SAMPLES = (1, 2, 7, 24, 40)


def recorded(module: nn.Module, sample: int, recorder: str) -> Callable[..., Any]:
    """The graph of one of the recorders that see no conditions, for a sample of some tokens."""
    args = (randn(2, sample, 32),)
    if recorder == "torch.onnx.export":
        return onnx_session(traced_onnx_file(module, args, ((1, "T"),)))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced: Callable[..., Any] = torch.jit.trace(module, args, check_trace=False)
    return traced


def refused_by_name(name: str, recorder: str) -> bool:
    """Whether the mechanism computes by what a graph cannot hold, which its parts say."""
    module = VARIANTS[name].example()
    computes_in_python = any(getattr(x, "recording_refusal", None) for x in module.modules())
    others = ("streaming", "dynamic_mask")
    return computes_in_python or name in others or (name == "path" and "onnx" in recorder)


def with_past(name: str) -> Thing:
    """A mechanism with its past as inputs, for the lengths T and S = 2 T - 3, but not below 0."""
    module = WithPast(example(VARIANTS[name], dtype=torch.float32)).eval()

    def inputs(n: int) -> tuple[Tensor, ...]:
        S = max(2 * n - 3, 0)
        with torch.no_grad():
            past = module(randn(2, S, 32))[1:] if S else module.empty_past(randn(2, 1, 32))
        return (randn(2, n, 32), *past)

    return Thing(name, lambda: module, inputs, ((1, "T"),), layer=True)


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "dynamo"),
    # the tables try the slower exporter on more
    [*((name, False) for name in PAST), ("mla", True), ("streaming", True)],
)
def test_a_file_with_a_past_serves_the_prompt_and_every_step(name: str, *, dynamo: bool) -> None:
    thing = with_past(name)
    if name == "streaming" and not dynamo:
        with pytest.raises(ArgumentError, match="was given a StreamingAttention, whose sinks are"):
            file_of(thing.make(), thing.inputs(4), 1, dynamo=False)
        return
    file = file_of(thing.make(), thing.inputs(4), 1, dynamo=dynamo)
    assert_follows(thing, onnx_session(file), (1, 4, 19))


def test_decoding_with_a_file_is_one_pass() -> None:
    module, x = WithPast(layer()).eval(), randn(1, 9, 32)
    example_args = (x[:, :3], *module.empty_past(x))
    run = onnx_session(file_of(module, example_args, 1, dynamo=False))
    with torch.no_grad():
        whole = module.module(x)
    past, parts = module.empty_past(x), []
    for chunk in x.split([4, 1, 1, 3], 1):
        z, *past = run(chunk, *past)
        parts.append(z)
    assert torch.allclose(torch.cat(parts, 1), whole, atol=1e-5)
    assert [part.shape[2] for part in past] == [9, 9]


@pytest.mark.nightly(keep=20)
@pytest.mark.full(keep=["trace-gqa", "trace-longformer", "export-mlra"])
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize(
    "recorder", ["torch.jit.trace", "torch.onnx.export"], ids=["trace", "export"]
)
def test_a_recorded_graph_serves_every_length_or_is_refused(recorder: str, name: str) -> None:
    """Whatever the length of the sample is; recurrences once returned as many rows as it had."""
    module = example(MIXERS[name], dtype=torch.float32).requires_grad_(requires_grad=False)
    if refused_by_name(name, recorder):
        for sample in SAMPLES:
            with pytest.raises(ArgumentError, match=rf"{recorder}.* was given a \w+, wh"):
                recorded(module, sample, recorder)
        return
    many = [randn(2, n, 32) for n in (1, 2, 3, 41, 64 if name == "bigbird" else 300)]
    plain = [module(x, backend="reference") for x in many]
    exact = [copy.deepcopy(module).double()(x.double()) for x in many]
    for sample in SAMPLES:
        run = recorded(module, sample, recorder)
        with torch.jit.optimized_execution(should_optimize=False):
            found = [outputs(run(x))[0] for x in many]
        assert [x.shape for x in found] == [x.shape for x in exact]
        joined = (torch.cat(xs, 1) for xs in (found, plain, exact))
        assert_close_rule(*joined, what=f"a sample of {sample}")


@pytest.mark.full
def test_the_new_exporter_passes_the_refusal_on() -> None:
    pytest.importorskip("onnxscript")
    with pytest.raises(Exception, match="was given a Recurrent") as caught:
        onnx_file(VARIANTS["retention"].example().eval(), (randn(2, 6, 32),), ({1: LENGTH},))
    assert "splits the sequence into chunks" in str(refusal(caught.value))


def test_additive_attention_is_refused() -> None:
    class Both(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.part = VARIANTS["bahdanau"].example()

        def forward(self, x: Tensor, memory: Tensor) -> Tensor:
            out: Tensor = self.part(x, memory=memory)
            return out

    with pytest.raises(ArgumentError, match="was given a AdditiveAttention"):
        traced_onnx_file(Both(), (randn(2, 6, 32), randn(2, 5, 32)), ((1, "T"), (1, "S")))


@pytest.mark.full
def test_the_new_exporter_keeps_no_length_of_a_selection() -> None:
    module = example(VARIANTS["top_k"], dtype=torch.float32)
    run = onnx_session(file_of(module, (randn(2, 2, 32),), 1, dynamo=True))
    assert_same_calls(module, run, [(randn(2, n, 32),) for n in (1, 9, 40)])


# WithPast


def test_with_past_is_the_module_with_a_cache() -> None:
    module, x = layer(), randn(2, 9, 32)
    step, cache = WithPast(module), module.new_cache()
    past = step.empty_past(x)
    assert [tuple(part.shape) for part in past] == [(2, 2, 0, 8)] * 2
    with torch.no_grad():
        first = step(x[:, :5])
        for chunk in x.split([5, 1, 3], 1):
            z, *past = step(chunk, *past)
            assert torch.equal(z, module(chunk, None, cache))
        assert torch.equal(first[0], module(x[:, :5]))
    assert [part.shape[2] for part in past] == [9, 9]


@pytest.mark.parametrize(
    ("name", "cache"), [("retention", "State"), ("infini", "Memory"), ("cross_attention", "Cross")]
)
def test_with_past_refuses_what_stores_no_tokens(name: str, cache: str) -> None:
    with pytest.raises(ArgumentError, match=rf"stores its past in a {cache}; WithPast takes"):
        WithPast(VARIANTS[name].example())


def test_with_past_refuses_other_modules_and_pasts() -> None:
    with pytest.raises(ArgumentTypeError, match=r"a Linear, which has neither new_cache\(\) nor"):
        WithPast(nn.Linear(2, 2))
    model = regard.load("tiny").decoder
    step, ids = WithPast(model), torch.tensor([[1, 2]])
    past = step.empty_past(ids)
    assert len(past) == 2 * len(model.layers)
    with pytest.raises(ArgumentError, match=re.escape("past has 3 tensors for 4 layers; it must")):
        step(ids, *past[:3])
    with pytest.raises(ArgumentError, match="does not fit the contents of the cache"):
        step(ids, *past[:4])
