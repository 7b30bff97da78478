"""`watch`, `record` and `Trace` on modules that know nothing of this package."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import Recorder, Recording, record, watch
from regard.integrations.pytorch import override
from tests.inspect.interventions.test_other_modules import Stacked
from tests.rules import assert_close_rule


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class GPT(nn.Module):
    """A small GPT with one joined projection, as researchers write it."""

    class Block(nn.Module):
        def __init__(self, width: int, heads: int) -> None:
            super().__init__()
            self.heads = heads
            self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
            self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
            wide = 4 * width
            self.mlp = nn.Sequential(nn.Linear(width, wide), nn.GELU(), nn.Linear(wide, width))

        def forward(self, x: Tensor) -> Tensor:
            parts = self.qkv(self.norm_1(x)).chunk(3, dim=-1)
            q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in parts)
            z = F.scaled_dot_product_attention(q, k, v, is_causal=True)
            x = x + self.out(z.transpose(1, 2).flatten(2))
            return x + self.mlp(self.norm_2(x))

    def __init__(self, vocabulary: int = 32, width: int = 16, heads: int = 2) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(vocabulary, width), nn.Linear(width, vocabulary)
        self.blocks = nn.ModuleList([self.Block(width, heads) for _ in range(2)])

    def forward(self, ids: Tensor) -> Tensor:
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def recorded(
    model: nn.Module, *inputs: Any, labels: Any = None, **arguments: Any
) -> tuple[Recording, Tensor, Tensor]:
    """Record a run, whose outputs are those of a plain one; return both outputs, too."""
    outputs: list[Any] = []
    with torch.no_grad():
        plain = model(*inputs, **arguments)
    handle = model.register_forward_hook(lambda _m, _i, out: outputs.append(out))
    try:
        found = record(model, *inputs, labels=labels, **arguments)
    finally:
        handle.remove()
    out, plain = (x[0] if isinstance(x, tuple) else x for x in (outputs[0], plain))
    assert_near(out, plain)
    return found, out, plain


def sizes_of(found: Recording) -> dict[str, tuple[int, int]]:
    """Queries and keys of every place."""
    return {name: (place.T, place.N) for name, place in found.places.items()}


def assert_near(x: Tensor, plain: Tensor) -> None:
    """Two runs in fp32 differ by rounding only, at the same places NaN."""
    assert torch.equal(x.isnan(), plain.isnan())
    scale = plain.nan_to_num(0).abs().max()
    assert (x - plain).nan_to_num(0).abs().max() <= 1e-5 * scale


def patterns_of(found: Recording, place: str) -> Tensor:
    """Every pattern of a place `[B, H, T, N]`."""
    at = found[place]
    return at.block(slice(0, at.T), slice(0, at.N)).weights


def encoder(**options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(16, 4, 32, batch_first=True, **options)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=not options).eval()


PADDED = torch.arange(7) >= torch.tensor([7, 5])[:, None]
"""Padding of two texts: True = hidden."""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors:UserWarning")
@pytest.mark.parametrize("padding", [None, PADDED], ids=["full", "padded"])
@pytest.mark.parametrize("norm_first", [False, True])
def test_an_encoder_of_torch(padding: Tensor | None, norm_first: bool) -> None:
    model = encoder(**({"norm_first": True} if norm_first else {}))
    found, *_ = recorded(model, torch.randn(2, 7, 16), src_key_padding_mask=padding)
    assert list(found.places) == ["layers.0.self_attn", "layers.1.self_attn"]
    assert found.sound, [str(x) for x in found.row_sums.values()]
    assert found.unrecorded == ()
    weights = patterns_of(found, "layers.1.self_attn")
    if padding is not None:
        assert weights[1, :, :5, 5:].abs().max() == 0
        assert str(found[0].steps[0].mask).startswith("padding")


def test_a_pair_has_three_kinds_of_attention() -> None:
    model = nn.Transformer(16, 2, 1, 1, 32, batch_first=True).eval()
    words, frames = [f"word {i}" for i in range(5)], [f"frame {i}" for i in range(9)]
    causal = nn.Transformer.generate_square_subsequent_mask(5)
    given = torch.randn(2, 9, 16), torch.randn(2, 5, 16)
    found, *_ = recorded(model, *given, tgt_mask=causal, labels=(words, frames))
    assert sizes_of(found) == {
        "encoder.layers.0.self_attn": (9, 9),
        "decoder.layers.0.self_attn": (5, 5),
        "decoder.layers.0.multihead_attn": (5, 9),
    }
    assert str(found["decoder.layers.0.self_attn"].steps[0].mask) == "causal"
    labels = [found.labels(name) for name in found.places]
    expected = [(frames, frames), (words, words), (words, frames)]
    assert [tuple(map(list, both)) for both in labels] == expected
    assert found.sound


def test_a_model_of_text() -> None:
    model, ids = GPT().eval(), torch.arange(9).remainder(5)[None]
    found, *_ = recorded(model, ids)
    assert list(found.places) == ["blocks.0", "blocks.1"]
    assert found.metadata["model"] == "GPT"
    # the exact pattern from the definition, in fp64
    attention = model.blocks[0]
    x = attention.norm_1(model.embed(ids))
    q, k, _ = (p.unflatten(-1, (2, -1)).transpose(1, 2) for p in attention.qkv(x).chunk(3, -1))
    later = torch.ones(9, 9, dtype=torch.bool).triu(1)
    scores = (q.double() @ k.double().mT / math.sqrt(8)).masked_fill(later, -torch.inf)
    assert (patterns_of(found, "blocks.0") - scores.softmax(-1)).abs().max() < 1e-6
    assert torch.equal(found[0].steps[0].q, q)
    assert torch.equal(found[0].k, k)


def test_lists_with_empty_entries_and_a_block_that_runs_twice() -> None:
    model, ids = Stacked(again=True).eval(), torch.arange(10).view(2, 5)
    with torch.no_grad():
        plain = model(ids).logits
        with watch(model), Recorder() as recorder:
            out = model(ids).logits
    assert_near(out, plain)
    found = recorder.recording()
    assert found.sound
    assert list(found.places) == ["layers.0", "layers.2", "layers.0.part2"]
    with watch(model), regard.Trace("residual", "mlp", "norm") as trace, torch.no_grad():
        model(ids)
    taps = [f"layers.{i}.{tap}" for i in (0, 2) for tap in ("mlp", "norms.0.norm", "residual")]
    assert {*taps} <= {*trace}


FORMS: list[dict[str, Any]] = [
    {},
    {"need_weights": False},
    {"average_attn_weights": False},
    {"key_padding_mask": True},
    {"key_padding_mask": True, "need_weights": False},
    {"attn_mask": 2},
    {"attn_mask": 3, "average_attn_weights": False},
    {"attn_mask": 3, "key_padding_mask": True},
    {"attn_mask": "float"},
    {"attn_mask": 2, "is_causal": True, "need_weights": False},
    {"attn_mask": 2, "is_causal": True},
]
MODULES: list[dict[str, Any]] = [
    {"batch_first": True},
    {"batch_first": False},
    {"batch_first": True, "add_bias_kv": True},
    {"batch_first": True, "add_zero_attn": True},
    {"batch_first": True, "kdim": 12, "vdim": 10},
]


def multi_head_inputs(
    options: dict[str, Any], form: dict[str, Any], kind: str
) -> tuple[list[Tensor], dict[str, Any]]:
    """The inputs and keyword arguments of a call of `nn.MultiheadAttention` with 4 heads."""
    B, T, S = 2, 5, 5 if kind == "self" or form.get("is_causal") else 7
    x = torch.randn(B, T, 16)
    inputs = [x, *(torch.randn(B, S, options.get(name, 16)) for name in ("kdim", "vdim"))]
    inputs = [x, x, x] if kind == "self" else inputs
    given = dict(form)
    if given.get("key_padding_mask"):
        given["key_padding_mask"] = torch.arange(S) >= torch.tensor([S, S - 2])[:, None]
    dense = torch.ones(T, S, dtype=torch.bool).triu(1)
    masks = {3: dense.expand(B * 4, T, S), "float": torch.randn(T, S), 2: dense}
    if "attn_mask" in given:
        given["attn_mask"] = masks[given["attn_mask"]]
    if kind == "unbatched":
        inputs = [x[0] for x in inputs]
        for name in ("key_padding_mask", "attn_mask"):
            if isinstance(given.get(name), Tensor):
                mask = given[name]
                first = name == "key_padding_mask"
                given[name] = mask[0] if first else mask[:4] if mask.ndim == 3 else mask
    elif not options["batch_first"]:
        inputs = [x.transpose(0, 1) for x in inputs]
        inputs = [inputs[0]] * 3 if kind == "self" else inputs
    return inputs, given


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("form", FORMS, ids=str)
@pytest.mark.parametrize("options", MODULES, ids=lambda x: "-".join(x))
@pytest.mark.parametrize("kind", ["self", "cross", "unbatched"])
@pytest.mark.parametrize("grad", [True, False], ids=["slow", "fused"])
def test_every_form_of_multi_head_attention(
    form: dict[str, Any], options: dict[str, Any], kind: str, grad: bool
) -> None:
    if kind == "self" and "kdim" in options:
        pytest.skip("self-attention has keys as wide as its queries")
    model = nn.MultiheadAttention(16, 4, **options).eval()
    inputs, given = multi_head_inputs(options, form, kind)
    with torch.set_grad_enabled(grad):
        z, weights = model(*inputs, **given)
        with watch(model) as seen, Recorder() as recorder:
            out, theirs = model(*inputs, **given)
    assert_near(out, z)
    assert (weights is None) == (theirs is None)
    if weights is not None:
        assert weights.shape == theirs.shape
        assert_near(theirs, weights)
    assert (seen.observed, seen.unrecorded) == (1, {})
    found = recorder.recording()
    assert found.sound
    if weights is not None:  # what the module returns is the recorded pattern
        exact = patterns_of(found, "")
        exact = exact if kind != "unbatched" else exact[0]
        heads = form.get("average_attn_weights") is False
        assert (theirs - (exact if heads else exact.mean(-3))).abs().max() < 1e-6


@pytest.mark.parametrize("grad", [True, False], ids=["slow", "fused"])
@pytest.mark.parametrize("need_weights", [True, False])
def test_a_row_that_sees_nothing_is_what_torch_makes_of_it(grad: bool, need_weights: bool) -> None:
    model, x = nn.MultiheadAttention(16, 4, batch_first=True).eval(), torch.randn(2, 5, 16)
    hidden = torch.zeros(2, 5, dtype=torch.bool)
    hidden[1] = True
    options = {"key_padding_mask": hidden, "need_weights": need_weights}
    with torch.set_grad_enabled(grad):
        z, weights = model(x, x, x, **options)
        with watch(model), Recorder() as recorder:
            out, theirs = model(x, x, x, **options)
    assert_near(out, z)
    if need_weights:
        assert_near(theirs, weights)
    assert recorder.recording()[0].steps[0].lse[1].isneginf().all()


def attention_with(change: Callable[[Tensor], Tensor]) -> Callable[..., Tensor]:
    """Causal attention whose pattern is changed, written by hand."""

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        later = torch.ones(q.shape[2], k.shape[2], dtype=torch.bool).triu(1)
        scores = (q @ k.mT / math.sqrt(q.shape[-1])).masked_fill(later, -torch.inf)
        return change(scores.softmax(-1)) @ v

    return attention


class TestTrace:
    """Captures and edits, by the path of the module."""

    def test_an_edit_equals_the_same_change_by_hand(self, monkeypatch: pytest.MonkeyPatch) -> None:
        model, ids = GPT().eval(), torch.arange(9)[None]

        def halve_first(p: Tensor) -> Tensor:
            return torch.cat([p[:, :1] / 2, p[:, 1:]], 1)

        attention = model.blocks[1]
        with watch(model), regard.Trace(edit={"blocks.1.pattern": halve_first}):
            edited = model(ids)
        calls: list[int] = []

        def by_hand(q: Tensor, k: Tensor, v: Tensor, **_: Any) -> Tensor:
            calls.append(1)
            return attention_with(halve_first if len(calls) == 2 else torch.clone)(q, k, v)

        monkeypatch.setattr(F, "scaled_dot_product_attention", by_hand)
        expected = model(ids)
        assert len(calls) == 2
        assert attention is model.blocks[1]
        assert (edited - expected).abs().max() < 1e-6

    @pytest.mark.parametrize("tap", ["q", "k", "v", "scores", "z"])
    def test_every_tap_can_be_edited(self, tap: str) -> None:
        model, ids = GPT().eval(), torch.arange(9)[None]
        plain = model(ids)
        with watch(model), regard.Trace(edit={f"blocks.0.{tap}": lambda x: 1.5 * x}):
            edited = model(ids)
        assert (edited - plain).abs().max() > 1e-4
        assert torch.equal(model(ids), plain)

    def test_gradients_pass_an_edit(self) -> None:
        model, ids = GPT().eval(), torch.arange(5)[None]
        scale = torch.tensor(1.0, requires_grad=True)
        with watch(model), regard.Trace(edit={"blocks.0.z": lambda z: scale * z}):
            model(ids).square().sum().backward()
        assert scale.grad is not None
        assert scale.grad.abs() > 0

    def test_a_learned_float_mask_keeps_its_gradient(self) -> None:
        class Biased(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.bias = nn.Parameter(torch.zeros(1, 2, 6, 6))

            def forward(self, x: Tensor) -> Tensor:
                return F.scaled_dot_product_attention(x, x, x, attn_mask=self.bias)

        model, x = Biased(), torch.randn(1, 2, 6, 4)
        model(x).square().sum().backward()
        want = model.bias.grad
        assert want is not None
        model.bias.grad = None
        with watch(model), Recorder():
            model(x).square().sum().backward()
        assert model.bias.grad is not None
        assert (model.bias.grad - want).abs().max() < 1e-5

    def test_within_accelerate_both_see_every_call(self) -> None:
        model, ids = GPT().eval(), torch.arange(9)[None]
        with torch.no_grad():
            plain = model(ids)
            with regard.accelerate() as calls, watch(model) as seen, Recorder() as recorder:
                out = model(ids)
        assert_near(out, plain)
        assert sum(calls.taken.values()) == seen.observed == 2
        assert list(recorder.recording().places) == ["blocks.0", "blocks.1"]
        with torch.no_grad(), regard.accelerate(), regard.Trace("pattern") as trace:
            model(ids)  # without `watch` there are no names, but no call is missed
        assert len(trace.every("pattern")) == 2

    def test_torch_is_as_it_was_afterwards(self) -> None:
        model, before = GPT(), F.scaled_dot_product_attention
        with watch(model):
            # an accelerated model that still lives elsewhere has replaced it already
            assert F.scaled_dot_product_attention is override._attention
        assert F.scaled_dot_product_attention is before
        assert not any(m._forward_hooks or m._forward_pre_hooks for m in model.modules())

    def test_without_a_trace_nothing_changes(self) -> None:
        model, ids = GPT().eval(), torch.arange(9)[None]
        with watch(model) as seen:
            assert torch.equal(model(ids), model(ids))
        assert seen.observed == 0


class Calls(nn.Module):
    """A module that calls a function on its inputs."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *inputs: Tensor) -> Any:
        return self.function(*inputs)


SHAPES = [
    ((6, 8), (9, 8), (9, 4)),
    ((3, 6, 8), (3, 9, 8), (3, 9, 4)),
    ((2, 3, 2, 6, 8), (2, 3, 2, 9, 8), (2, 3, 2, 9, 4)),
    ((2, 4, 6, 8), (1, 4, 9, 8), (1, 4, 9, 8)),
    ((2, 4, 6, 8), (2, 1, 9, 8), (2, 1, 9, 8)),
]


@pytest.mark.parametrize("shapes", SHAPES, ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_tensors_of_any_shape(shapes: Any, masked: bool) -> None:
    q, k, v = (torch.randn(shape) for shape in shapes)
    mask = torch.rand(6, 9) < 0.7 if masked else None
    model = Calls(lambda *x: F.scaled_dot_product_attention(*x, mask))
    found, out, plain = recorded(model, q, k, v)
    exact = model(q.double(), k.double(), v.double())
    assert out.shape == plain.shape
    assert_close_rule(out, [plain, plain.roll(1, 0).roll(-1, 0)], exact)
    assert found.sound


CAUSAL = torch.ones(7, 7, dtype=torch.bool).tril()
DOCUMENTS = torch.arange(7)[:, None].ge(3) == torch.arange(7).ge(3)
NOISE = torch.randn(7, 7, generator=torch.Generator().manual_seed(1))
MASKS = {
    "causal": CAUSAL,
    "causal & window(3)": CAUSAL.triu(-2),
    "causal & document((0, 3, 7))": CAUSAL & DOCUMENTS,
    "document((0, 3, 7))": DOCUMENTS,
    "dense(1x1x7x7)": NOISE < 0.3,
    "full": NOISE,
}


@pytest.mark.parametrize("name", MASKS)
def test_a_mask_is_recorded_as_its_rule(name: str) -> None:
    mask, x = MASKS[name], torch.randn(2, 2, 7, 8)
    found, *_ = recorded(Calls(lambda x: F.scaled_dot_product_attention(x, x, x, mask)), x)
    step = found[0].steps[0]
    assert str(step.mask) == name
    assert (step.bias is not None) == mask.is_floating_point()
    assert found.sound


def test_grouped_heads_and_more_queries_than_keys() -> None:
    q, k = torch.randn(2, 4, 9, 8), torch.randn(2, 2, 5, 8)
    mask = torch.ones(9, 5, dtype=torch.bool).tril(-4)
    for given in (mask, torch.randn(9, 5), None):
        options = {"attn_mask": given, "enable_gqa": True}
        model = Calls(lambda q, k, x=options: F.scaled_dot_product_attention(q, k, k, **x))
        found, *_ = recorded(model, q, k)
        assert (found[0].H, found[0].G) == (4, 2)
        assert found.sound, str(found.row_sums)


def test_a_cache_of_keys_makes_one_place_with_steps() -> None:
    class Decoder(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.memory = torch.randn(1, 2, 6, 8)
            self.keys = torch.zeros(1, 2, 0, 8)

        def forward(self, x: Tensor) -> Tensor:
            self.keys = torch.cat([self.keys, x], 2)
            z = F.scaled_dot_product_attention(x, self.keys, self.keys, is_causal=x.shape[2] > 1)
            return F.scaled_dot_product_attention(z, self.memory, self.memory)

    model = Decoder()
    with torch.no_grad(), watch(model), Recorder() as recorder:
        for T in (4, 1, 1):
            model(torch.randn(1, 2, T, 8))
    found = recorder.recording()
    steps = {name: [step.T for step in place.steps] for name, place in found.places.items()}
    assert steps == {"": [4, 1, 1], "call2": [4, 1, 1]}
    assert found[""].k.shape[2] == found["call2"].k.shape[2] == 6
    assert found.sound


def test_dropout_uses_the_random_numbers_of_torch() -> None:
    model = Calls(lambda x: F.scaled_dot_product_attention(x, x, x, dropout_p=0.5))
    x = torch.randn(1, 2, 6, 8)
    torch.manual_seed(3)
    plain = model(x)
    torch.manual_seed(3)
    with watch(model), Recorder() as recorder:
        out = model(x)
    assert_near(out, plain)
    step = recorder.recording()[0].steps[0]
    assert step.dropout == 0.5
    assert step.kernel.startswith("torch, lse by ")
    refused = pytest.raises(ArgumentError, match="it has dropout, so that its scores and weights")
    with refused, regard.Trace("pattern", missing="ignore"):
        record(model, x)


_held = F.scaled_dot_product_attention
HELD: dict[str, Callable[..., Tensor]] = {
    "a closure": lambda x, held=_held: held(x, x, x),
    "torch.ops": lambda x: torch.ops.aten.scaled_dot_product_attention(x, x, x),
}


@pytest.mark.parametrize("name", HELD)
def test_a_function_that_is_held_elsewhere_is_seen(name: str) -> None:
    found, *_ = recorded(Calls(HELD[name]), torch.randn(1, 2, 20, 8))
    assert len(found) == 1


WRITTEN_OUT = nn.Sequential(nn.Identity(), Calls(lambda x: (x @ x.mT).softmax(-1) @ x))
DROPPED = nn.MultiheadAttention(16, 4, dropout=0.5, batch_first=True)
UNRECORDED: dict[str, tuple[nn.Module, list[Tensor], str]] = {
    "none": (
        nn.Linear(2, 2),
        [torch.zeros(1, 2)],
        r"no softmax attention .* it made no call of F\.scaled_dot_product_attention, nn\.Multi",
    ),
    "written out": (WRITTEN_OUT, [torch.zeros(1, 2, 6, 8)], r"softmax of shape \(1, 2, 6, 6\)"),
    "dropout": (DROPPED, [torch.zeros(1, 5, 16)] * 3, r"after dropout; call model\.eval"),
}


class TestRefusals:
    """Nothing is missed silently."""

    @pytest.mark.parametrize("name", UNRECORDED)
    def test_models_that_cannot_be_recorded(self, name: str) -> None:
        model, inputs, message = UNRECORDED[name]
        with pytest.raises(ArgumentError, match=message):
            record(model, *inputs)

    def test_calls_that_cannot_be_recorded_are_listed(self) -> None:
        lowest = torch.full((6, 6), torch.finfo(torch.float32).min)

        def both(x: Tensor) -> Tensor:
            x = F.scaled_dot_product_attention(x, x, x)
            return F.scaled_dot_product_attention(x, x, x, lowest)

        found, *_ = recorded(nn.Sequential(Calls(both)), torch.randn(1, 2, 6, 8))
        assert list(found.places) == ["0"]
        (call,) = found.unrecorded
        assert (call.place, call.count) == ("0.call2", 1)
        assert "the mean of the values in rows that its mask hides" in call.reason
        data = regard.inspect.report(found)
        assert data["meta"]["sources"][0]["metadata"]["not recorded"] == "0.call2"

    @pytest.mark.parametrize("kind", ["CaiT", "CaiT, class", "XCiT"])
    def test_attention_that_is_written_out_beside_recorded_one(self, kind: str) -> None:
        """Talking heads mix weights, class attention has one query, cross-covariance attends over
        channels; a router is none of them, and an empty place of a list of modules is skipped.
        """

        class Attend(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.mix = nn.Linear(2, 2)

            def forward(self, x: Tensor) -> Tensor:
                heads = x.unflatten(-1, (2, 4)).transpose(1, 2)  # [B,H,N,D]
                if kind == "XCiT":
                    normed = nn.functional.normalize(heads.mT, dim=-1)  # [B,H,D,N]
                    z = ((normed @ normed.mT).softmax(-1) @ heads.mT).mT
                elif kind == "CaiT, class":
                    first = (heads[:, :, :1] @ heads.mT).softmax(dim=-1) @ heads  # [B,H,1,D]
                    z = torch.cat([first, heads[:, :, 1:]], 2)
                else:
                    weights = (heads @ heads.mT).softmax(-1)
                    z = self.mix(weights.movedim(1, -1)).movedim(-1, 1) @ heads
                return z.transpose(1, 2).flatten(2)

        class Model(nn.Module):
            def __init__(self, written_out: bool) -> None:
                super().__init__()
                attention = Attend() if written_out else None
                self.blocks = nn.ModuleList([attention, None])
                self.router = nn.Linear(8, 3)
                self.token_only = Calls(F.scaled_dot_product_attention)

            def forward(self, x: Tensor) -> Tensor:
                for block in self.blocks:
                    x = x if block is None else x + block(x)
                x = x * self.router(x).softmax(-1)[..., :1]
                heads = x[:, None]
                return self.token_only(heads, heads, heads)

        found, *_ = recorded(Model(written_out=True), torch.randn(1, 5, 8))
        assert list(found.places) == ["token_only"]
        assert not found.sound
        (call,) = found.unrecorded
        assert (call.place, call.count) == ("blocks.0", 1)
        assert "its attention may be written out" in call.reason
        plain, *_ = recorded(Model(written_out=False), torch.randn(1, 5, 8))
        assert plain.sound

    def test_what_is_no_module(self) -> None:
        refused = pytest.raises(ArgumentTypeError, match=r"model is str; it must be an nn\.Module")
        with refused, watch("model"):  # type: ignore[arg-type]
            pass

    @pytest.mark.parametrize(
        "labels, kind, message",
        [
            (["a"] * 3, ArgumentError, "which fit no place; the places have so many queries"),
            ({"decoder": ["a"] * 9}, ArgumentError, "'decoder', which is the beginning of no"),
            ({"blocks.0": ["a"] * 3}, ArgumentError, "labels of blocks.0 are 3 texts for queries"),
            ((["a"] * 9, ["b"] * 9), ArgumentError, "give a mapping from the names of places"),
            ("abcdefghi", ArgumentTypeError, "labels are str; they must be texts, or a pair"),
            ([1] * 9, ArgumentTypeError, "a label is int; labels must be texts"),
        ],
    )
    def test_labels_that_fit_nothing(
        self, labels: Any, kind: type[Exception], message: str
    ) -> None:
        with pytest.raises(kind, match=message):
            record(GPT(), torch.arange(9)[None], labels=labels)


def test_labels_by_place_are_kept_in_a_file(tmp_path: Any) -> None:
    words = [f"w{i}" for i in range(9)]
    model, ids = GPT().eval(), torch.arange(9)[None]
    found = record(model, ids, rows=2, labels={"blocks": words, "blocks.1": (words, words[::-1])})
    assert found.labels("blocks.0") == (tuple(words[-2:]), tuple(words))
    assert found.labels("blocks.1")[1] == tuple(words[::-1])
    path = tmp_path / "run.safetensors"
    regard.inspect.save(found, path)
    again = regard.inspect.load(path)
    assert again.labels("blocks.1") == found.labels("blocks.1")


def test_calls_of_attend_in_a_module_are_recorded_once() -> None:
    class Mixed(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return F.scaled_dot_product_attention(regard.attend(x, x, x), x, x)

    q = torch.randn(1, 2, 20, 8)
    assert regard.plan(q, q, q).kernel == "sdpa"  # it calls torch's function, too
    found, *_ = recorded(nn.Sequential(Mixed()), q)
    assert list(found.places) == ["", "0"]
    assert found.unrecorded == ()


@pytest.mark.full
def test_a_compiled_model_runs_uncompiled() -> None:
    model, ids = GPT().eval(), torch.arange(9)[None]
    compiled = torch.compile(model, backend="eager")
    found = record(compiled, ids)
    assert list(found.places) == ["blocks.0", "blocks.1"]


@pytest.mark.full
def test_transformers_under_sdpa() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config = transformers.LlamaConfig(**sizes, num_attention_heads=4, attn_implementation="sdpa")
    model = transformers.LlamaForCausalLM(config).eval()
    ids = torch.randint(0, 64, (2, 9))
    keep = torch.ones_like(ids)
    keep[0, :3] = 0
    with torch.no_grad():
        plain = model(ids, attention_mask=keep).logits
    found = record(model, ids, attention_mask=keep, tokens=3)
    names = ["model.layers.0.self_attn", "model.layers.1.self_attn"]
    assert list(found.places) == names
    assert [step.T for step in found[0].steps] == [9, 1, 1]
    assert found.sound
    assert found.ids is not None
    assert found.ids.shape == (2, 12)
    with torch.no_grad(), watch(model), Recorder():
        out = model(ids, attention_mask=keep).logits
    assert_near(out[1], plain[1])
    model.set_attn_implementation("eager")
    with pytest.raises(ArgumentError, match="computes its attention with 'eager', so that nothing"):
        record(model, ids)
