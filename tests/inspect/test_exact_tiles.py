"""Tiles of a pattern against the pattern itself, pooled in loops in fp64: every level, ragged
edges, twelve masks, shared keys, sinks, softcap, biases, decoded tokens.
"""

from __future__ import annotations

import threading
import time
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.inspect import Recording
from regard.inspect.record.tiles import pool_pattern
from regard.inspect.report.page_rules import split_by_pool
from regard.inspect.tile_server import exact_tiles
from regard.inspect.tile_server.exact_tiles import HeadTiles, TileData
from regard.inspect.tile_server.head_overviews import (
    METRICS,
    HeadOverview,
    OverviewRecorder,
    head_overview,
)
from regard.inspect.tile_server.page_answers import (
    HEADER,
    column_weights,
    describe_cell,
    describe_column,
    describe_row,
    encode_overview,
    encode_tile,
    encode_weights,
    row_weights,
)
from regard.inspect.tile_server.session import KeptResults, ViewSession
from tests.inspect.recorded import recorded_call

LENGTH = 700  # three tiles of level 0, the last one ragged
SPARSE = (torch.arange(LENGTH)[:, None] * 7 + torch.arange(LENGTH) * 3) % 5 < 2
SPARSE[:, 0] = True
CASES: dict[str, dict[str, Any]] = {
    "causal": {"mask": masks.Causal()},
    "everything": {},
    "window": {"mask": masks.Causal() & masks.Window(100)},
    "two-sided window": {"mask": masks.Window(33)},
    "prefix": {"mask": masks.Causal() | masks.Prefix(200)},
    "sinks and window": {"mask": masks.Causal() & (masks.Window(64) | masks.Sinks(4))},
    "chunks": {"mask": masks.Causal() & masks.Chunk(150)},
    "documents": {"mask": masks.Causal() & masks.Document((300, 400))},
    "dilated": {"mask": masks.Causal() & masks.Dilated(2, 90)},
    "dense": {"mask": masks.Causal() & masks.Dense(SPARSE)},
    "heads": {"mask": masks.Heads((masks.Causal(), masks.Causal() & masks.Window(50)) * 2)},
    "rows without keys": {"mask": ~masks.Window(20) & masks.Causal()},
    "softcap and sink": {"mask": masks.Causal(), "softcap": 3.0, "sink": torch.randn(4)},
    "alibi": {"mask": masks.Causal(), "bias": biases.ALiBi(4)},
}


def recorded(name: str, length: int = LENGTH, scale: float = 1.5) -> Recording:
    draw = torch.Generator().manual_seed(len(name))
    q, k, v = (torch.randn(1, heads, length, 16, generator=draw) for heads in (4, 2, 2))
    return recorded_call(scale * q, k, v, **CASES[name])


def causal(length: int) -> Recording:
    """One head of a few dims."""
    q, k = torch.randn(2, 1, 1, length, 4, generator=torch.Generator().manual_seed(length))
    return recorded_call(q, k, keep=(), mask=masks.Causal())


def defined(weights: Tensor, visible: Tensor, size: int) -> tuple[Tensor, Tensor]:
    """Mass and maximum of blocks in fp64, by numpy; -1 where nothing is visible."""
    rows, columns = (np.arange(0, n, size) for n in weights.shape)

    def reduced(operation: np.ufunc, x: Tensor) -> np.ndarray:
        return operation.reduceat(operation.reduceat(x.numpy(), rows, 0), columns, 1)

    seeing = np.add.reduceat(visible.any(1).numpy().astype(np.float64), rows)
    mass = reduced(np.add, weights) / np.maximum(seeing, 1)[:, None]
    some = reduced(np.logical_or, visible)
    most = reduced(np.maximum, weights)
    return tuple(torch.from_numpy(np.where(some, x, -1.0)) for x in (mass, most))


def assert_close(found: Tensor, expected: Tensor, scores: float) -> None:
    """Equal up to fp32 products: relative to each weight, times the size of the scores."""
    allowed = 2**-21 * (1 + scores) * expected.abs() + 1e-9
    assert found.shape == expected.shape
    assert bool(((found.double() - expected).abs() <= allowed).all())


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", CASES)
def test_every_tile_equals_the_pooled_pattern(name: str) -> None:
    recording = recorded(name)
    for head in (0, 3):
        weights = recording.weights(0, head)
        scores = recording.scores(0, head)
        visible = ~scores.isneginf()
        largest = float(scores.masked_fill(~visible, 0).abs().max())
        tiles = HeadTiles(recording[0], head)
        assert tiles.top_level == 2
        assert torch.equal(tiles.keys_seen, visible.sum(1).double())
        for level in range(3):
            size = 1 << level
            mass, most = defined(weights, visible, size)
            n = -(-LENGTH // (256 << level))
            for i in range(n):
                for j in range(n):
                    cells = slice(256 * i, 256 * (i + 1)), slice(256 * j, 256 * (j + 1))
                    tile, where = tiles.tile(level, i, j), tiles.range(level, i, j)
                    assert_close(tile.mass, mass[cells], largest)
                    assert_close(tile.max, most[cells], largest)
                    part = visible[where.r0 : where.r1, where.c0 : where.c1]
                    assert (tile.visible is None) == bool(part.all())
                    if tiles.is_empty(where):
                        assert not bool(part.any())
                    for peak in tile.peaks:
                        weight = float(weights[peak.row, peak.column])
                        assert peak.weight == pytest.approx(weight, rel=1e-4)


@pytest.mark.parametrize("name", ["causal", "softcap and sink", "dense"])
def test_coarse_tiles_become_exact_and_rows_sum_to_one(name: str) -> None:
    recording = recorded(name)
    session = ViewSession(recording)
    tiles = session.head(0, 2)
    fine = tiles.tile(0, 1, 0)
    for depth in (1, 2):
        mass, most, _ = exact_tiles.coarser_blocks(tiles, fine, 0, (1, 0), depth)
        expected = defined(
            recording.weights(0, 2, slice(256, 512), slice(0, 256)),
            ~recording.scores(0, 2, slice(256, 512), slice(0, 256)).isneginf(),
            1 << depth,
        )
        assert_close(mass, expected[0], 30.0)
        assert_close(most, expected[1], 30.0)
    whole = session.tile(0, 2, 2, 0, 0)
    assert whole is not None
    assert whole.computed == 1
    sums = whole.mass.clamp(min=0).sum(1)
    step = recording[0].steps[0]
    sink = 0 if step.sink is None else torch.exp(step.sink[2] - step.denominator[0, 2])
    expected_sums = recording.weights(0, 2).sum(1)
    blocks = torch.stack([expected_sums[a : a + 4].mean() for a in range(0, LENGTH, 4)])
    assert float((sums.double() - blocks).abs().max()) < 1e-5
    assert float((expected_sums + sink - 1).abs().max()) < 1e-5
    session.close()


def test_a_coarse_tile_is_a_labelled_preview_until_its_parts_are_exact() -> None:
    """At 9,000 tokens the top level is 6: parts of level 5 arrive one after another."""
    length = 9_000
    draw = torch.Generator().manual_seed(0)
    q, k = (0.5 * torch.randn(1, 1, length, 4, generator=draw) for _ in range(2))
    q[..., 0] = k[..., 0] = 0
    q[0, 0, 7_345, 0] = k[0, 0, 2_321, 0] = 12.0  # the needle; no sampled row sees it
    session = ViewSession(recorded_call(q, k, keep=(), mask=masks.Causal()))
    tiles = session.head(0, 0)
    level = tiles.top_level
    with session:  # while a request is answered, the thread behind waits
        first = session.tile(0, 0, level, 0, 0)
        assert first is not None
        assert first.computed == 0
        assert first.sampled == 1
        assert float(first.max[7_345 >> level, 2_321 >> level]) < 0.5
    shares = [0.0]
    for _ in range(3000):
        found = session.tile(0, 0, level, 0, 0)
        assert found is not None
        assert found.computed >= shares[-1]
        shares.append(found.computed)
        if found.computed == 1:
            break
        time.sleep(0.02)
    assert shares[-1] == 1
    assert float(found.max[7_345 >> level, 2_321 >> level]) > 0.9
    assert (found.peaks[0].row, found.peaks[0].column) == (7_345, 2_321)
    direct = tiles.tile(level, 0, 0)
    assert float((found.max - direct.max).abs().max()) < 1e-6
    assert float((found.mass - direct.mass).abs().max()) < 1e-6
    assert session.pending == 0
    session.close()


def test_a_preview_has_exact_rows() -> None:
    recording = recorded("causal")
    tiles = HeadTiles(recording[0], 1)
    preview = tiles.preview(2, 0, 0)
    weights = recording.weights(0, 1)
    for block in (0, 50, 174):
        row = min(4 * block + 2, LENGTH - 1)
        sums = [float(weights[row, c : c + 4].sum()) for c in range(0, LENGTH, 4)]
        found = preview.mass[block].clamp(min=0).tolist()
        assert found == pytest.approx(sums, rel=1e-4, abs=1e-9)
    assert preview.sampled == 1
    assert preview.computed == 0


def test_tiles_of_decoded_tokens_and_of_caches() -> None:
    """A place of several steps: the prompt, and one row for each generated token."""
    model = regard.load("tiny")
    recording = regard.inspect.record(model, "to be or not to be that is", tokens=4)
    place = split_by_pool(recording[1])[0]
    tile = HeadTiles(place, 5).tile(0, 0, 0)
    expected = recording.weights(1, 5)
    visible = ~recording.scores(1, 5).isneginf()
    assert torch.equal(tile.max >= 0, visible)
    assert float((tile.max.clamp(min=0).double() - expected).abs().max()) < 1e-6


def test_rows_columns_and_cells_are_those_of_the_recording() -> None:
    recording = recorded("softcap and sink")
    tiles = HeadTiles(recording[0], 3)
    weights = recording.weights(0, 3)
    row = describe_row(tiles, 400)
    best = weights[400].topk(20)
    assert [x["j"] for x in row["top"]] == best.indices.tolist()
    assert [x["weight"] for x in row["top"]] == pytest.approx(best.values.tolist(), rel=1e-9)
    assert row["seen"] == 401
    assert row["others"] == 381
    assert row["sum"] + row["sink"] == pytest.approx(1, abs=1e-5)
    assert row["rest"] == pytest.approx(float(weights[400].sum() - best.values.sum()), abs=1e-6)
    assert row["cumulative"][0][1] == pytest.approx(float(best.values[0]), rel=1e-5)
    assert sum(row["distance"]) == pytest.approx(row["sum"], rel=1e-6)
    column = describe_column(tiles, 100)
    readers = weights[:, 100].topk(20)
    assert [x["i"] for x in column["top"]] == readers.indices.tolist()
    assert column["seen"] == LENGTH - 100
    assert column["sum"] == pytest.approx(float(weights[:, 100].sum()), rel=1e-5)
    cell = describe_cell(tiles, 400, 100)
    assert cell["weight"] == float(weights[400, 100])
    assert cell["score"] == float(recording.scores(0, 3)[400, 100])
    assert sum(cell["products"]) == pytest.approx(cell["dot"])
    assert cell["reasons"] == []
    assert describe_cell(tiles, 100, 400)["reasons"] == [{"why": "future", "mask": "causal"}]
    assert torch.equal(row_weights(tiles, 100) >= 0, torch.arange(LENGTH) <= 100)
    assert torch.equal(column_weights(tiles, 100) >= 0, torch.arange(LENGTH) >= 100)


def decode(data: bytes) -> list[Tensor]:
    """The planes of an answer, read back as the page reads them."""
    magic, kind, _, rows, columns, peaks, planes, *_ = HEADER.unpack(data[: HEADER.size])
    assert magic == b"RGT1"
    start = HEADER.size + (16 * peaks + 4 * rows if kind == 1 else 0)
    read = torch.frombuffer(bytearray(data[start:]), dtype=torch.float32)
    return list(read.view(planes, rows, columns))


def test_bytes_keep_every_weight() -> None:
    """A weight of 1e-30 beside one of 1 is no 0; a masked cell and NaN are neither."""
    weights = torch.tensor([[-1.0, 1.0, 1e-30], [float("nan"), 7.6e-6, 0.25]])
    tile = TileData(weights, 2 * weights, None, torch.ones(2), ())
    for found, expected in (
        (decode(encode_tile(tile, 1)), [weights, 2 * weights]),
        (decode(encode_tile(replace(tile, max=weights), 0)), [weights]),
        (decode(encode_overview(HeadOverview(tile, (1.0, 2.0), 0.5))[8:]), [weights, 2 * weights]),
        (decode(encode_weights(weights[0])), [weights[:1]]),
    ):
        assert len(found) == len(expected)
        for plane, wanted in zip(found, expected, strict=True):
            torch.testing.assert_close(plane, wanted, rtol=0, atol=0, equal_nan=True)


def test_the_most_notable_weight_is_far_from_its_query() -> None:
    """The first key, the neighbours and masked cells do not count, and the rows are the sampled
    ones.
    """
    q, k = 2 * torch.randn(2, 1, 1, 60, 4, generator=torch.Generator().manual_seed(1))
    q[0, 0, :, 0] = k[0, 0, :1, 0] = 9.0  # a sink
    recording = recorded_call(q, k, keep=(), mask=masks.Causal())
    overview = head_overview(HeadTiles(recording[0], 0))
    weights = recording.weights(0, 0)
    far = torch.stack([row.index_fill(0, torch.tensor([0]), 0) for row in weights])
    for i in range(60):
        far[i, max(0, i - 8) :] = 0
    row, column = divmod(int(far.argmax()), 60)
    (peak,) = overview.blocks.peaks
    assert (peak.row, peak.column) == (row, column)
    assert peak.weight == pytest.approx(float(weights[row, column]), rel=1e-6)
    assert overview.notable == pytest.approx(float(far.amax(1).mean()), rel=1e-6)


def test_a_row_that_is_no_number_is_not_masked() -> None:
    """It is NaN in the tile, in the list and in the overview; other rows keep their peaks."""
    q, k = torch.randn(2, 1, 1, 40, 4, generator=torch.Generator().manual_seed(3))
    q[0, 0, 7] = torch.nan
    tiles = HeadTiles(recorded_call(q, k, keep=(), mask=masks.Causal())[0], 0)
    tile, overview = tiles.tile(0, 0, 0), head_overview(tiles)
    for found in (tile.max, row_weights(tiles, 7)[None], overview.blocks.max):
        row = found[7 if len(found) > 1 else 0]
        assert bool(row[:8].isnan().all())
        assert bool((row[8:] == -1).all())
    assert describe_row(tiles, 7)["seen"] == 8
    assert describe_column(tiles, 2)["seen"] == 38
    assert describe_cell(tiles, 7, 2)["seen"] == 8
    assert tile.peaks
    assert all(peak.row != 7 for peak in tile.peaks)
    assert all(np.isnan(overview.metrics))


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", [name for name in CASES if name not in ("documents", "dense")])
def test_the_metrics_of_an_overview_are_those_of_measure(name: str) -> None:
    """Of a short text, every row is sampled; of a long one, the rows that `rows` names."""
    short = recorded(name, 48)
    for head in (0, 3):
        found = head_overview(HeadTiles(short[0], head)).metrics
        measured = regard.inspect.measure(short[0])
        expected = [float(measured[metric][head]) for metric in METRICS]
        assert found == pytest.approx(expected, rel=1e-5, abs=1e-6, nan_ok=True)
        row = describe_row(HeadTiles(short[0], head), 47)
        weights = short.weights(0, head)[47]
        sink = (1 - weights.sum()) * ("sink" in CASES[name])
        entropy = torch.special.entr(torch.cat([weights, sink[None]])).sum()
        assert row["entropy"] == pytest.approx(float(entropy), rel=1e-4, abs=1e-6)
        assert row["sink"] == pytest.approx(float(sink), abs=1e-6)
    long = recorded(name)
    rows = (torch.arange(64) + 1) * LENGTH // 64 - 1
    found = dict(zip(METRICS, head_overview(HeadTiles(long[0], 1)).metrics, strict=True))
    weights = long.weights(0, 1)[rows]
    sinks = weights[rows >= 4, :4].sum(1).mean()
    previous = weights[torch.arange(64), rows - 1].mean()
    away = (weights * (rows[:, None] - torch.arange(LENGTH))).sum(1).mean()
    local = (weights * ((rows[:, None] - torch.arange(LENGTH)).abs() < 32)).sum(1).mean()
    expected = {"sink": sinks, "previous_token": previous, "distance": away, "local": local}
    for metric, value in expected.items():
        assert found[metric] == pytest.approx(float(value), rel=1e-4, abs=1e-6), metric
    # 700 keys in 64 blocks at most: each has 11, the last one less
    blocks = torch.stack([part.sum(1) for part in weights.split(11, 1)], 1)
    assert_close(head_overview(HeadTiles(long[0], 1)).blocks.mass.clamp(min=0), blocks, 30.0)


def test_overviews_of_all_heads_are_made_while_the_model_runs() -> None:
    model = regard.load("tiny")
    counts: list[int] = []
    with OverviewRecorder(counts.append) as reducer:
        recording = regard.inspect.record(model, "to be or not to be", heads=[2], keep=())
    overviews = reducer.overviews
    assert counts == list(range(1, 33))
    assert len(overviews) == 32
    assert len(recording[0].heads) == 1, "the heads that are not opened are not kept"
    made = overviews.heads["layers.1", 2]
    later = head_overview(HeadTiles(recording[1], 2))
    assert torch.equal(made.blocks.max, later.blocks.max)
    assert made.metrics == later.metrics
    weights = recording.weights(1, 2)
    assert float((made.blocks.max.clamp(min=0).double() - weights).abs().max()) < 1e-6


def test_the_comparison_would_find_a_wrong_tile() -> None:
    recording = recorded("causal")
    weights, visible = recording.weights(0, 0), ~recording.scores(0, 0).isneginf()
    mass, _ = defined(weights, visible, 2)
    shifted = HeadTiles(recording[0], 1).tile(1, 0, 0)  # another head
    with pytest.raises(AssertionError):
        assert_close(shifted.mass, mass[:256, :256], 30.0)
    blocks = pool_pattern(recording[0], 2, heads=slice(0, 1)).mass[0]
    assert torch.allclose(blocks, mass.clamp(min=0), atol=1e-9)


def test_a_row_is_computed_once_for_the_tokens_and_the_inspector(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = ViewSession(causal(40))
    tiles, calls = session.head(0, 0), []
    weights = HeadTiles.weights

    def counted(*arguments: Any) -> Any:
        calls.append(arguments[1:])
        return weights(*arguments)

    monkeypatch.setattr(HeadTiles, "weights", counted)
    first = row_weights(tiles, 30)
    assert describe_row(tiles, 30)["sum"] == pytest.approx(1, abs=1e-5)
    assert describe_cell(tiles, 30, 3)["rank"] == 1 + int((first > float(first[3])).sum())
    column_weights(tiles, 2)
    assert describe_column(tiles, 2)["seen"] == 38
    assert len(calls) == 2, "one row and one column"
    for i in range(20):
        row_weights(tiles, i)
    row_weights(tiles, 30)
    assert len(calls) == 23, "the oldest are dropped"


def test_a_result_is_computed_once_for_two_threads() -> None:
    kept, begun, go = KeptResults[int](limit=2), threading.Event(), threading.Event()
    made: list[int] = []

    def slow() -> int:
        begun.set()
        go.wait(20)
        made.append(1)
        return 7

    found: list[int] = []
    threads = [threading.Thread(target=lambda: found.append(kept.get("a", slow))) for _ in range(3)]
    threads[0].start()
    assert begun.wait(20)
    for thread in threads[1:]:
        thread.start()
    go.set()
    for thread in threads:
        thread.join(20)
    assert (found, made) == ([7] * 3, [1])

    def fail() -> int:
        raise ValueError("no")

    with pytest.raises(ValueError, match="no"):
        kept.get("b", fail)
    assert kept.get("b", lambda: 8) == 8, "a failure is not kept"


@pytest.mark.full
def test_the_first_picture_is_there_before_one_asks() -> None:
    for length, exact in ((40, True), (5000, False)):
        session = ViewSession(causal(length))
        session.prepare()
        assert session.pending == 0, "no exact part is computed before a browser asks"
        assert session.head(0, 0).top_level == (0 if exact else 5)
        top = session.head(0, 0).top_level
        assert list(session._cache) == [(0, 0, top, 0, 0)]
        tile = session.tile(0, 0, top, 0, 0)
        assert tile is not None
        assert (tile.computed == 1) == exact
        session.close()


def test_a_session_may_be_closed_while_its_thread_is_started(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = ViewSession(causal(40))
    errors: list[RuntimeError] = []

    def close() -> None:
        try:
            session.close()
        except RuntimeError as error:
            errors.append(error)

    class SlowToStart(threading.Thread):
        def start(self) -> None:
            closing.start()
            closing.join(0.2)  # the time of a busy machine between making a thread and starting it
            super().start()

    closing = threading.Thread(target=close)
    monkeypatch.setattr("regard.inspect.tile_server.session.threading.Thread", SlowToStart)
    session.prepare()
    closing.join(20)
    worker = session._worker
    assert not errors
    assert worker is not None
    assert not worker.is_alive()
