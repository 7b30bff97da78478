"""Edited runs as rows of one batch: equal to runs one at a time, and less work."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard import Trace
from regard.errors import ArgumentError
from regard.inspect import ablate, patch
from regard.inspect.interventions.edited_runs import EditedRun, Stopped, run_edited
from regard.inspect.model_run import Edit, ModelRun, prepare_run
from regard.models import Model
from tests.cost.tiny import TINY
from tests.inspect.small_model import model, wide_model, wide_model_of

CLEAN, CORRUPT = torch.tensor([[5, 9, 2, 31, 9, 4]]), torch.tensor([[5, 7, 2, 31, 9, 4]])
MODELS = (
    *("llama", "gemma2", "mistral", "gpt2", "bloom", "deepseek_v2", "gemma4_text"),
    *("regard, retention", "regard, gated_delta"),
)


def flipped(position: int, length: int) -> Edit:
    """States of one position, counted from the end, with the other sign."""

    def edit(x: Tensor) -> Tensor:
        x = x.clone()
        x[:, position - length] *= -1
        return x

    return edit


def head(index: int, factor: float) -> Edit:
    return lambda z: torch.cat(
        [z[:, :index], factor * z[:, index : index + 1], z[:, index + 1 :]], 1
    )


def rows(run: ModelRun, length: int) -> list[EditedRun]:
    """Edits of heads, of states at one position, of several taps, and none."""
    names = run.taps(patterns=False)
    last = max(int(name.split(".")[1]) for name in names if name.startswith("layers."))
    states = [f"layers.{i}.{tap}" for i in range(last + 1) for tap in ("residual", "mlp", "out")]
    positions = {
        (name, p): EditedRun({name: flipped(p, length)}, p)
        for name in ["embed", *states]
        if name in names
        for p in (0, 2, length - 1)
    }
    heads = [
        EditedRun({f"layers.{i}.z": head(h, -1.0)})
        for i in (last, 0)
        for h in (0, 1)
        if f"layers.{i}.z" in names
    ]
    several: Mapping[str, Edit] = {
        "embed": flipped(1, length),
        f"layers.{last}.z": head(0, 0.0),
        "layers.0.q": torch.neg,
    }
    known = {name: edit for name, edit in several.items() if name in names}
    return [*positions.values(), *heads, EditedRun(known), EditedRun({})]


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("last_only", [True, False])
@pytest.mark.parametrize("name", [n for n in MODELS if n in TINY])
def test_rows_equal_runs_one_at_a_time(name: str, last_only: bool) -> None:
    run = prepare_run(wide_model_of(name, 0.2), CLEAN)
    runs = rows(run, 6)
    unchanged, found = run.run().output, dict(run_edited(run, runs, last_only=last_only))
    assert sorted(found) == list(range(len(runs)))
    changes = []
    for n, each in enumerate(runs):
        wanted = run.run(each.edits).output
        bound = torch.finfo(torch.float32).eps * float(wanted.abs().max())
        shown = found[n] if not last_only else found[n][:, -1:]
        wanted_part = wanted[:, -1:] if last_only else wanted
        assert float((shown - wanted_part).abs().max()) <= bound, each
        changes.append(float((wanted[:, -1] - unchanged[:, -1]).abs().max()))
    assert max(changes[:-1]) > 1e-3, "the edits change something"
    assert changes[-1] == 0.0


def test_several_padded_texts_are_rows_too() -> None:
    small = wide_model()
    run = prepare_run(small, ["the blue forest", "a creature of the verdant forest", "a"])
    length = run.run().output.shape[1]
    runs = rows(run, length)
    for n, output in run_edited(run, runs, last_only=True):
        wanted = run.run(runs[n].edits).output[:, -1]
        assert float((output[:, -1] - wanted).abs().max()) <= 1e-7 * float(wanted.abs().max())


def tokens_of_layers(small: Model, call: Callable[[], Any]) -> list[int]:
    """How many tokens each layer computes in a call."""
    seen = [0] * len(small.decoder.layers)
    handles = []
    for i, layer in enumerate(small.decoder.layers):

        def note(_: Any, inputs: Any, i: int = i) -> None:
            seen[i] += inputs[0].shape[0] * inputs[0].shape[1]

        handles.append(layer.register_forward_pre_hook(note))
    call()
    for handle in handles:
        handle.remove()
    return seen


def test_what_an_edit_does_not_reach_is_computed_once() -> None:
    small, whole = model(), 2 * 6  # the run whose values are captured, and that with all states
    heads = tokens_of_layers(small, lambda: ablate(small, CLEAN, 3))
    assert heads == [whole + 6 * 4 * (i + 1) for i in range(3)], "4 rows more in each layer"
    suffixes, cached = 6 + 5 + 4 + 3 + 2 + 1, 5
    every = tokens_of_layers(small, lambda: patch(small, CLEAN, CORRUPT, 3))
    assert every == [whole + 6 + cached + suffixes * (i + 1) for i in range(3)]
    last = tokens_of_layers(small, lambda: patch(small, CLEAN, CORRUPT, 3, positions=[-1]))
    assert last == [whole + 6 + cached + i + 1 for i in range(3)], "one token for each row"


def foreign() -> Any:
    """A small model of transformers with two query heads for each key."""
    pytest.importorskip("transformers")
    from tests.integrations.families import decoder

    return decoder("Llama", "sdpa", torch.float64)


@pytest.mark.parametrize("reads", [False, True], ids=["alone", "rows read one another"])
def test_edits_of_a_foreign_model_are_rows(reads: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where rows read one another, runs are made one at a time, and the numbers are the same."""
    network, times = foreign(), []
    if reads:
        network.model.norm.register_forward_hook(lambda _m, _x, y: y + 0.01 * y.mean(0))
    network.register_forward_pre_hook(
        lambda _m, _x, named: times.append(len(named["input_ids"])), with_kwargs=True
    )
    run = prepare_run(network, CLEAN)
    edits = [{f"model.layers.{i}.self_attn.z": head(h, 0.0)} for i in range(2) for h in range(4)]
    found = dict(run_edited(run, [EditedRun(each) for each in edits]))
    assert times == ([9, 9] + 8 * [1] if reads else [9, 9])
    for n, each in enumerate(edits):
        alone = run.run(each).output
        torch.testing.assert_close(found[n], alone, rtol=1e-12, atol=1e-12)
    assert float((found[0] - found[1]).abs().max()) > 1e-3


def test_the_key_of_a_head_is_that_of_its_group() -> None:
    """Heads 0 and 1 read one key, also where transformers repeats it for each head."""
    network = foreign()
    for receiver_tap in ("k", "q"):
        tables = [
            patch(network, CLEAN, CORRUPT, (3, 4), what="paths",
                  receiver=("model.layers.1.self_attn", h, receiver_tap))
            for h in range(3)
        ]  # fmt: skip
        shared = receiver_tap == "k"
        assert np.array_equal(tables[0].values, tables[1].values) == shared
        assert not np.array_equal(tables[0].values, tables[2].values)
        note = "the heads 0 to 1 of model.layers.1.self_attn read one k, so that it changes"
        assert any(note in str(x) for x in tables[1].notes) == shared


def test_a_trace_of_the_caller_sees_runs_as_they_are() -> None:
    small, shapes = model(), []

    def note(z: Tensor) -> Tensor:
        shapes.append(tuple(z.shape))
        return 0 * z

    with Trace(edit={"layers.0.z": note}):
        inside = ablate(small, CLEAN, 3, layers=[1]).values
    assert set(shapes) == {(1, 4, 6, 8)}
    assert np.abs(inside - ablate(small, CLEAN, 3, layers=[1]).values).max() > 1e-4


def test_chosen_layers_heads_and_positions_are_parts_of_the_table() -> None:
    small = wide_model()
    every = patch(small, CLEAN, CORRUPT, 3)
    part = patch(small, CLEAN, CORRUPT, 3, layers=["embed", -1], positions=[1, -1])
    columns = every.columns[1], every.columns[5]
    assert (part.rows, part.columns) == (("embed", "layers.2"), columns)
    assert np.allclose(part.values, every.values[[0, 3]][:, [1, 5]], rtol=0, atol=1e-7)
    for what in ("heads", "paths"):
        whole = patch(small, CLEAN, CORRUPT, 3, what=what)  # type: ignore[arg-type]
        part = patch(small, CLEAN, CORRUPT, 3, what=what, layers=[1], heads=[-1, 0])  # type: ignore[arg-type]
        assert (part.rows, part.columns) == (("layers.1",), ("3", "0"))
        assert np.allclose(part.values, whole.values[[1]][:, [3, 0]], rtol=0, atol=1e-7)
    with pytest.raises(ArgumentError, match="heads do not apply to what='residual'"):
        patch(small, CLEAN, CORRUPT, 3, heads=[0])
    with pytest.raises(ArgumentError, match="positions do not apply to what='heads'"):
        patch(small, CLEAN, CORRUPT, 3, what="heads", positions=[0])
    with pytest.raises(ArgumentError, match="positions is 6; there are 6 tokens"):
        patch(small, CLEAN, CORRUPT, 3, positions=[6])


def test_ctrl_c_keeps_what_was_measured() -> None:
    small = regard.load("tiny")
    seen = []

    def stop(done: int, total: int, cell: dict[str, Any]) -> None:
        seen.append(cell)
        if done == 3:
            assert total == 8
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt) as stopped:
        ablate(small, "to be or not to", layers=[1], report=stop)
    assert isinstance(stopped.value, Stopped)
    table = stopped.value.table
    assert table.records() == seen
    assert len(seen) == 3
    assert table.notes == ("stopped after 3 of 8 numbers",)
