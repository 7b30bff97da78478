"""What a prompt prints of results: one short line, whatever the tensors in them."""

from __future__ import annotations

import pytest
import torch

import regard
from regard import inspect
from regard.inspect import EffectTable, ablate, explain, measure, record
from tests.inspect.small_model import TEXT, model


def results() -> list[object]:
    """One object of each public class of `regard.inspect` that holds a result."""
    small = model()
    ids = small.encode(TEXT)
    recording, explanation = record(small, TEXT), explain(small, TEXT, layer=1, head=2)
    circuits = inspect.head_circuits(small, 1, 1)
    x = torch.arange(40.0).view(20, 2)
    fault = inspect.Finding("future-leak", "error", "Query 0 sees key 1. " * 9, {}, 0.0, 0.5, "it")
    place = recording[1]
    return [
        recording, place, explanation, explanation.scores[0], circuits, circuits.ov, fault,
        measure(small, [TEXT]), measure(place), ablate(small, TEXT, layers=[0]),
        inspect.Audit("f", "f(x)", (fault, fault)),
        inspect.strongest_head(small, ids, 3),
        inspect.EdgeRuns(small, ids, ids.flip(1)),
        inspect.find_circuit(small, ids, ids.flip(1), threshold=0.9),
        inspect.Edge("embed", "logits", 1 / 3), inspect.OverviewRecorder(), inspect.Recorder(),
        inspect.PretokenizedInput(small.decoder, ((1, 2), ("a", "b"))), inspect.Receiver(),
        inspect.probe(x, (x[:, 0] > 20).long()), inspect.row_sums(place),
        recording.pooled(0, 0, 4), inspect.keys_for(place),
        next(iter(inspect.iterate_tiles(place))), recording.top(1, 0, 3, 2),
    ]  # fmt: skip


def test_no_result_prints_its_tensors() -> None:
    shown = {type(result): repr(result) for result in results()}
    for kind, line in shown.items():
        assert kind.__name__ in line
        assert "\n" not in line, line
        assert len(line) <= 200, line
        assert "tensor(" not in line, line
    classes = {getattr(inspect, name) for name in inspect.__all__}
    public = {each for each in classes if isinstance(each, type)}
    assert public - {*shown} == {inspect.SparseAutoencoder, inspect.RecordingOptions}


def test_a_table_becomes_a_frame_of_polars() -> None:
    polars = pytest.importorskip("polars")
    values = torch.tensor([[0.5, -2.0]], dtype=torch.float64).numpy()
    table = EffectTable("a", "effect", values, "layer", "head", ("layers.0",), ("0", "1"))
    wanted = polars.DataFrame({"layer": ["layers.0"], "0": [0.5], "1": [-2.0]})
    assert table.frame("polars").equals(wanted)
    with pytest.raises(regard.errors.ArgumentError, match="pandas or polars"):
        table.frame("numpy")  # type: ignore[arg-type]
