"""Measuring a model within an edit measures the edited model: against the same model with that edit
built in.
"""

from __future__ import annotations

import importlib
import itertools
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import Trace, masks
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import (
    Recorder,
    explain,
    head_scores,
    load,
    pool_pattern,
    record,
    repeated_ids,
    report,
    row_sums,
    save,
)
from regard.inspect.explain.random_model import random_model
from regard.models import Model
from tests.inspect.small_model import TEXT, model


def zero(x: Tensor) -> Tensor:
    """Ablation."""
    return torch.zeros_like(x)


@contextmanager
def without(m: Model, layer: int) -> Iterator[None]:
    """The same ablation by hand: attention of one layer puts out nothing but its bias."""
    output: Any = m.decoder.layers[layer].attention.output
    handle = output.register_forward_pre_hook(lambda _, args: (torch.zeros_like(args[0]),))
    yield
    handle.remove()


def near(x: dict[str, Tensor], y: dict[str, Tensor]) -> bool:
    return all(torch.allclose(x[name], y[name], atol=1e-6) for name in y)


def test_head_scores_within_an_ablation_are_those_of_the_ablated_model() -> None:
    m = model()
    ids = repeated_ids(m.config.vocab_size, 7, batch=2)
    intact = head_scores(m, ids)
    with Trace(edit={"layers.1.z": zero}):
        found = head_scores(m, ids)
    with without(m, 1):
        wanted = head_scores(m, ids)
    assert near(found, wanted)
    assert not near(found, intact), "the ablation changes the layers behind it"
    assert torch.equal(found["entropy"][:2], intact["entropy"][:2])
    assert near(head_scores(m, ids), intact), "and ends with its trace"


@pytest.mark.parametrize("name", ["q", "k", "v", "z", "out"])
def test_a_recording_holds_what_the_edited_kernel_was_given(name: str) -> None:
    m, full = model(), f"layers.1.{name}"
    with Trace(edit={full: lambda x: x + 1}), Trace("q", "k", "out") as seen:
        found = record(m, TEXT)
    assert found.sound, [str(x) for x in found.row_sums.values()]
    for layer in range(3):
        assert torch.equal(found[layer].steps[0].q, seen[f"layers.{layer}.q"])
        assert torch.equal(found[layer].pools[0].k, seen[f"layers.{layer}.k"])
    intact = record(m, TEXT)
    assert torch.equal(found.weights(0, 1), intact.weights(0, 1))
    assert not torch.equal(found.weights(2, 1), intact.weights(2, 1))


def half(p: Tensor) -> Tensor:
    """A pattern whose keys share each row alike, where the mask lets them; half of the weight is
    lost.
    """
    return (p > 0).to(p) / (p > 0).sum(-1, keepdim=True).clamp(min=1) / 2


EDITS: dict[str, Callable[[Tensor], Tensor]] = {
    "scores": lambda s: s.clamp(min=-3, max=3).roll(1, 1),
    "pattern": half,
}


def unmasked(edit: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
    """An edit that leaves masked keys as they are."""
    return lambda x: torch.where(x.isneginf() | (x == 0), x, edit(x))


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("name", EDITS)
@pytest.mark.parametrize("how", ["whole", "chunks", "ring", "padded"])
def test_edited_scores_and_patterns_are_recorded_as_they_were_used(name: str, how: str) -> None:
    m = model()
    options: dict[str, Any] = {
        "whole": {},
        "chunks": {"chunk": 3},
        "ring": {"tokens": 5, "cache": "ring", "max_context": 8},
        "padded": {},
    }[how]
    text: Any = [TEXT, "the forest"] if how == "padded" else TEXT
    edit = EDITS[name]
    if how == "ring":  # its slots stand in another order: rows are compared sorted
        edit = unmasked(edit)
    with Trace("pattern", edit={f"layers.0.{name}": edit}) as seen:
        found = record(m, text, **options)
    place = found[0]
    assert {step.edited for step in place.steps} == {(name,)}
    assert all(step.edited == () for step in found[1].steps)
    rows = [slice(place.first_row(n), place.first_row(n) + x.T) for n, x in enumerate(place.steps)]
    steps = zip(seen.every("layers.0.pattern"), place.steps, rows, strict=True)
    for (used, step, row), b in itertools.product(steps, range(place.B)):
        mine = found.weights(0, 2, row, batch=b)[:, step.columns]
        order = used[b, 2].double()
        if how == "ring":
            mine, order = mine.sort(-1).values, order.sort(-1).values
        order = order[:, -len(step.columns) :]
        if how != "ring":
            visible = step.mask.block(step.q_positions, step.k_positions)
            order = order.masked_fill(~visible[b if how == "padded" else 0, 0], 0)
        assert torch.allclose(mine, order, atol=1e-6)
    assert place.name == "layers.0"
    assert found.row_sums["layers.0"].sound, str(found.row_sums["layers.0"])
    blocks, whole = pool_pattern(place, 4, batch=0).head(2), found.weights(0, 2)[:4]
    mean = whole.sum() / (whole > 0).any(1).sum().clamp(min=1)
    assert torch.allclose(blocks.mass[0].sum(), mean, atol=1e-9)


def test_a_wrong_edited_pattern_is_found_by_the_audit() -> None:
    q = torch.randn(1, 2, 6, 4)
    with Trace(edit={"pattern": half}), Recorder() as recorder:
        regard.attend(q, q, q, mask=masks.Causal())
    place = recorder.recording()[0]
    assert row_sums(place).sound
    assert place.steps[0].pattern is not None
    place.steps[0].pattern[0, 1, 3, 0] += 0.1
    found = row_sums(place)
    assert not found.sound
    assert "the output is not the weighted sum" in found.findings[0]


def test_what_a_masked_key_is_given_is_left_out_as_the_kernel_does() -> None:
    q = torch.randn(1, 1, 5, 4)
    flat = Trace("z", edit={"pattern": lambda p: torch.full_like(p, 0.2)}, missing="ignore")
    with flat, Recorder() as recorder:
        out = regard.attend(q, q, q, mask=masks.Causal())
    found = recorder.recording()
    weights = found.weights(0, 0)
    assert torch.allclose(weights, 0.2 * torch.ones(5, 5, dtype=torch.float64).tril())
    assert torch.allclose(out[0, 0].double(), weights @ q[0, 0].double(), atol=1e-6)
    assert found.sound


def test_an_edited_recording_goes_through_a_file(tmp_path: Path) -> None:
    with Trace(edit={"layers.1.scores": EDITS["scores"], "layers.2.pattern": half}):
        found = record(model(), TEXT, chunk=4)
    save(found, tmp_path / "run.safetensors")
    again = load(tmp_path / "run.safetensors")
    for layer in range(3):
        assert again[layer].steps[1].edited == found[layer].steps[1].edited
        assert torch.equal(again.weights(layer, 3), found.weights(layer, 3))
        assert torch.equal(again.scores(layer, 3), found.scores(layer, 3))


def test_explanations_and_pages_are_of_the_edited_model_or_refused() -> None:
    m = model()
    intact = explain(m, TEXT, layer=2, head=1)
    with Trace(edit={"layers.1.z": zero}):
        found = explain(m, TEXT, layer=2, head=1)
    with without(m, 1):
        wanted = explain(m, TEXT, layer=2, head=1)
    assert abs(found.weights - wanted.weights).max() < 1e-6
    assert abs(found.weights - intact.weights).max() > 1e-3
    assert found.checks["the network without an observer"] == 0
    assert found.notes == intact.notes
    with Trace(edit={"layers.2.q": lambda q: 2 * q}):
        found = explain(m, TEXT, layer=2, head=1)
    assert "edits q at layers.2: the inputs of the kernel are edited" in found.notes[-1]
    for name in ("scores", "pattern"):
        with Trace(edit={f"layers.2.{name}": lambda x: x.clone()}, missing="ignore"):
            with pytest.raises(ArgumentError) as error:
                explain(m, TEXT, layer=2)
            explain(m, TEXT, layer=1)
        assert f"edits {name} at layers.2: an explanation computes both" in str(error.value)
    branches = random_model("nsa", "a b c d e f g h i j k l m n o p")
    with (
        Trace(edit={"layers.0.window.pattern": half}),
        pytest.raises(ArgumentError, match=r"edits pattern at layers\.0"),
    ):
        explain(branches, head=0)
    with Trace(edit={"layers.2.pattern": half}):
        recording = record(m, TEXT)
    with pytest.raises(ArgumentError, match=r"pattern of layers\.2 were edited .* a page computes"):
        report(recording)
    with Trace(edit={"layers.1.z": zero}):
        page = report(record(m, TEXT))
    with without(m, 1):
        other = report(record(m, TEXT))
    assert (page["arrays"]["p2.mass"] == other["arrays"]["p2.mass"]).all()


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda m: record(m, TEXT, head=[0]), "record.. has no argument 'head'; did .* 'heads'"),
        (lambda m: record(m, TEXT, plaecs=["layers.0"]), "'plaecs'; did you mean 'places'"),
        (lambda m: Recorder(edit={}), "argument 'edit'. It has places, heads, rows, keep"),
        (lambda m: regard.inspect.audit(lambda q, k, v: q, caussal=True), "did you mean 'causal'"),
        (lambda m: m.generate("a", temprature=1.0), "did you mean 'temperature'"),
    ],
)
def test_unknown_names_are_refused_with_a_hint(call: Callable[[Model], Any], message: str) -> None:
    with pytest.raises(ArgumentTypeError, match=message):
        call(model())


@pytest.mark.parametrize(
    ("select", "message"),
    [
        ({"heads": [0, 9]}, r"heads \[9\] were not recorded: no selected place has them"),
        ({"places": ["layers.0", "layers.9"]}, r"no calls at the places \['layers.9'\]; the"),
        ({"heads": {"layers.1": [0], 7: [1]}}, r"no calls at the places \[7\]; the places that"),
        ({"heads": {"layers.1": [8]}}, "no attention was recorded: the run of Model called no"),
    ],
)
def test_a_selection_that_does_not_exist_is_told(select: Any, message: str) -> None:
    m = model()
    with pytest.raises(ArgumentError, match=message):
        record(m, TEXT, **select)
    told = pytest.warns(UserWarning, match="there were no calls|were not recorded")
    with told, Recorder(**select):
        m.forward(m.encode(TEXT))


def test_a_recorder_of_nothing_says_so() -> None:
    q = torch.randn(1, 2, 6, 4)
    told = pytest.warns(UserWarning, match="regard's softmax attention was never called")
    with told, Recorder():
        torch.nn.functional.scaled_dot_product_attention(q, q, q)


SIDE = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1}
SIDE |= {"num_attention_heads": 2}


def test_a_transformers_model_that_computes_its_attention_itself_is_named() -> None:
    transformers = pytest.importorskip("transformers")
    importlib.import_module("regard.integrations.transformers")
    sizes = SIDE | {"vocab_size": 64, "num_hidden_layers": 2}
    llama = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes)).eval()
    ids = torch.arange(6)[None]
    llama.set_attn_implementation("eager")
    ways = ('attn_implementation="sdpa"', 'attn_implementation("regard")', "regard.load")
    for name, possible in {"Llama": ways, "Mpt": ways[2:], "DebertaV2": ()}.items():
        config = getattr(transformers, f"{name}Config")(
            **sizes | ({"d_model": 16, "n_heads": 2, "n_layers": 1} if name == "Mpt" else {})
        )
        network = getattr(transformers, f"{name}Model")(config).eval()
        if name == "Llama":
            network.set_attn_implementation("eager")
        with pytest.raises(ArgumentError, match="with 'eager', so that nothing") as error:
            record(network, ids)
        assert [way for way in ways if way in str(error.value)] == [*possible]
    told = pytest.warns(UserWarning, match="transformers model must have attn_implementation")
    with told, Recorder():
        llama(ids)
    llama.set_attn_implementation("regard")
    intact = record(llama, ids)
    with Trace(edit={"layers.0.z": zero}):
        found = record(llama, ids)
    assert list(found.places) == ["layers.0", "layers.1"]
    assert torch.equal(found.weights(0, 0), intact.weights(0, 0))
    assert not torch.equal(found.weights(1, 0), intact.weights(1, 0))


def test_a_part_that_computes_its_attention_elsewhere_is_told() -> None:
    transformers = pytest.importorskip("transformers")
    importlib.import_module("regard.integrations.transformers")
    text = SIDE | {"vocab_size": 64, "max_position_embeddings": 16}
    image = SIDE | {"image_size": 8, "patch_size": 4}
    config = transformers.CLIPConfig(text_config=text, vision_config=image)
    clip = transformers.CLIPModel(config).eval()
    clip.set_attn_implementation({"text_config": "regard", "vision_config": "eager", "": "regard"})
    given = {"input_ids": torch.arange(4)[None], "pixel_values": torch.zeros(1, 3, 8, 8)}
    told = r"parts of CLIPModel do not compute .* not recorded: vision_model \('eager'\)"
    with pytest.warns(UserWarning, match=told):
        found = record(clip, given)
    assert found.places
    assert all("vision" not in name for name in found.places)


def in_threads(work: Callable[[int], None]) -> None:
    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def test_threads_that_record_within_edits_of_their_own(switching: None) -> None:
    """Each thread scales its own values; recordings and outputs are those of one thread alone."""
    q = torch.randn(1, 2, 8, 4)
    wrong: list[object] = []
    done: list[int] = []

    def work(i: int) -> None:
        want = regard.attend(q, q, (i + 1) * q, backend="reference")
        for _ in range(20):
            edit = Trace(edit={"pattern": lambda p: (i + 1) * p})
            with edit, Recorder(keep=("out",)) as recorder:
                regard.attend(q, q, q)
            step = recorder.recording()[0].steps[0]
            assert step.pattern is not None
            if not torch.allclose(step.pattern.sum(-1), torch.full((1, 2, 8), i + 1.0)):
                wrong.append((i, "pattern"))
            if step.out is None or not torch.allclose(step.out, want, atol=1e-5):
                wrong.append((i, "out"))
        done.append(i)

    in_threads(work)
    assert (wrong, sorted(done)) == ([], [0, 1, 2, 3])


def test_threads_that_share_a_recorder(switching: None) -> None:
    """Every call of every thread is recorded, whole."""
    q = torch.randn(1, 2, 8, 4)
    recorder = Recorder()

    def work(i: int) -> None:
        with recorder:
            for _ in range(10):
                regard.attend(q, q, q)

    in_threads(work)
    found = recorder.recording()
    assert len(found.places) == 40
    assert all(place.T == place.N == 8 for place in found.places.values())
    assert found.sound


@pytest.fixture
def switching() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    with warnings.catch_warnings():
        yield
    sys.setswitchinterval(usual)
