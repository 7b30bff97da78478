"""What a prompt prints of results: one short line, whatever the tensors in them."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.inspect import EffectTable, ablate, explain, measure, record
from tests.inspect.small_model import TEXT, model


def test_results_print_one_line() -> None:
    small = model()
    recording = record(small, TEXT)
    place = recording[1]
    n = place.N
    with regard.Trace("z") as trace:
        small(small.encode(TEXT))
    measured = measure(small, [TEXT])
    lines = {
        recording: f"Recording(3 places: layers.0 ... layers.2, {n} tokens)",
        place: f"Place(layers.1, 4 heads over 2, {n} queries x {n} keys, 1 step)",
        place.steps[0]: f"RecordedStep({n} queries x {n} keys, {place.steps[0].kernel})",
        place.pools[0]: f"KeyValuePool({n} keys, 2 heads)",
        recording.pooled(0, 0, 4): f"Pooled({n} x {n} weights in blocks of 4 x 4)",
        ablate(small, TEXT, layers=[0]): (
            "EffectTable(zero ablation of heads: layer x head, 1 x 4)"
        ),
        measured: f"CorpusMeasures({len(measured.values)} metrics, 1 text of {n} tokens)",
        explain(small, TEXT, layer=1, head=2, query=3, key=0): (
            "Explanation(layers.1, head 2, query 3, key 0)"
        ),
        trace: "Trace(3 taps captured, 0 edits)",
        small: "Model(llama, float32, cpu)",
    }
    assert {repr(value): line for value, line in lines.items()} == dict(
        zip(lines.values(), lines.values(), strict=True)
    )
    shown = measured._repr_html_()
    assert shown.count("<tr>") == 1 + 3 * 4
    assert f"{float(measured['entropy'][2, 3]):.4g}" in shown


def test_a_table_becomes_a_frame_of_polars() -> None:
    polars = pytest.importorskip("polars")
    values = torch.tensor([[0.5, -2.0]], dtype=torch.float64).numpy()
    table = EffectTable("a", "effect", values, "layer", "head", ("layers.0",), ("0", "1"))
    wanted = polars.DataFrame({"layer": ["layers.0"], "0": [0.5], "1": [-2.0]})
    assert table.frame("polars").equals(wanted)
    with pytest.raises(regard.errors.ArgumentError, match="pandas or polars"):
        table.frame("numpy")  # type: ignore[arg-type]
