"""ONNX files of calls of `attend`, layers and decoders, run by ONNX Runtime."""

from __future__ import annotations

import copy
import io
import re
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
from tests.nn.catalogue import example
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
LAYERS = (
    *("longformer", "packed", "prefix_lm", "chunked", "bigbird", "softcap", "gated"),
    *("exclusive", "shared_kv", "mrope", "position_temperature"),
    *("cable", "deberta", "fire", "forgetting", "kerple"),
    *("relative_logits", "selective", "shaw", "signed_softmax", "transformer_xl"),
)
REMAPPED = ("dual_chunk", "lm_infinite")
"""Mechanisms of several calls with other rotations."""
SCORED = ("sigmoid_attention", "relu_attention", "entmax", "scalable_softmax")
"""Mechanisms with a score rule."""
NOT_WRITTEN = ("softpick", "stick_breaking", "talking_heads", "top_k", "cope", "path")
"""Score rules with operations that the tracing exporter of torch cannot write."""


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


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("name", [*(x for x in LAYERS if x != "longformer"), *SCORED])
def test_layers_without_a_past(name: str) -> None:
    module = example(VARIANTS[name], dtype=torch.float32)
    thing = Thing(name, lambda: module, lambda n: (randn(2, n, 32),), ((1, "T"),), layer=True)
    file = file_of(module, thing.inputs(6), 1, dynamo=False)
    assert_follows(thing, onnx_session(file), (1, 6, 19, 40))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", NOT_WRITTEN)
def test_operations_that_cannot_be_written_raise_an_error(name: str) -> None:
    module = example(VARIANTS[name], dtype=torch.float32).eval()
    with pytest.raises((RuntimeError, ArgumentError)):
        file_of(module, (randn(2, 6, 32),), 1, dynamo=False)


REFUSED = (
    *("infini", "infini_delta", "longformer", "nsa", "moba", "dsa", "quest", "msa"),
    *("h2o", "tova", "snapkv", "key_norm", "keydiff", "adakv", "expected_attention"),
    *(name for name, entry in VARIANTS.items() if entry.family == "linear"),
)


@pytest.mark.parametrize("name", REFUSED)
def test_what_depends_on_the_length_is_refused(name: str) -> None:
    module = VARIANTS[name].example()
    message = rf"was given a {type(module).__name__}, which .*: the file would be wrong"
    with pytest.raises(ArgumentError, match=message):
        traced_onnx_file(module, (randn(2, 6, 32),), ((1, "T"),))


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


def test_a_selection_by_a_bias_of_the_tokens_is_refused() -> None:
    module = VARIANTS["dynamic_mask"].example()
    with pytest.raises(ArgumentError, match="was given a DynamicMaskProjection, which selects"):
        traced_onnx_file(module, (randn(2, 6, 32),), ((1, "T"),))


@pytest.mark.full
@pytest.mark.parametrize("name", REMAPPED)
def test_parts_with_other_rotations(name: str) -> None:
    module = example(VARIANTS[name], dtype=torch.float32)
    wide = copy.deepcopy(module).double()
    run = onnx_session(traced_onnx_file(module, (randn(2, 8, 32),), ((1, "T"),)))
    for n in (1, 4, 19):
        x = randn(2, n, 32)
        with torch.no_grad():
            assert_close_rule(run(x)[0], [module(x)], wide(x.double()), what=name)


def test_the_catalogue_is_served_or_refused() -> None:
    """Every mechanism is in a test of this file or of the tables, or cannot cache."""
    named = {*PAST, *LAYERS, *REMAPPED, *SCORED, *NOT_WRITTEN, *REFUSED}
    named |= {"gqa", "bahdanau", "dynamic_mask"}
    alike = {  # the same class with another option
        "cross_attention", "luong", "local_global", "dilated", "sparse_strided", "sparse_fixed",
        "weightless", "single_head", "causal", "mha", "mha_per_head", "mqa", "qk_norm",
        "qk_norm_after_rotary", "qk_norm_flat",
        "nope", "irope", "head_gate", "softplus_gate", "biased_gate", "differential_v2",
        "value_norm", "value_residual", "keys_as_values", "clip_qkv", "l2_clip", "ngpt", "rope_2d",
        "self_extend", "rerope",
    }  # fmt: skip
    assert set(VARIANTS) == named | alike


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
