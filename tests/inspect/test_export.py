"""Recordings in the formats of other tools, in notebooks, and beside each other."""

from __future__ import annotations

import csv
import html
import importlib
import json
import math
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.errors import ArgumentError, FileError
from regard.inspect import Recording, compare, export, record
from tests.inspect.small_model import TEXT, model


def recorded() -> Recording:
    return record(model(), TEXT)


def test_numpy_and_npz(tmp_path: Path) -> None:
    recording = recorded()
    arrays = export(recording, "numpy")
    with np.load(export(recording, tmp_path / "r.npz"), allow_pickle=False) as stored:
        assert set(stored) == set(arrays) == set(recording.places)
        for name, weights in arrays.items():
            assert np.array_equal(stored[name], weights)
            for head in range(4):
                assert np.array_equal(weights[head], recording.weights(name, head).numpy())


def test_csv(tmp_path: Path) -> None:
    recording = recorded()
    with export(recording, tmp_path / "r.csv").open(encoding="utf-8") as stream:
        rows = list(csv.DictReader(stream))
    T = recording[0].T
    assert len(rows) == 3 * 4 * T * (T + 1) // 2, "masked weights are left out"
    for row in rows[:: len(rows) // 17]:
        i, j = int(row["query"]), int(row["key"])
        exact = recording.weights(row["place"], int(row["head"]))[i, j].item()
        assert abs(float(row["weight"]) - exact) < 1e-8
        assert (row["query_token"], row["key_token"]) == (recording.pieces[i], recording.pieces[j])


def test_the_arguments_of_other_viewers() -> None:
    recording = recorded()
    theirs = export(recording, "bertviz")
    assert len(theirs["attention"]) == 3
    T = len(theirs["tokens"])
    assert all(x.shape == (1, 4, T, T) and x.dtype == torch.float32 for x in theirs["attention"])
    assert torch.equal(theirs["attention"][1][0, 2], recording.weights(1, 2).float())
    theirs = export(recording, "circuitsvis", layer=1)
    assert theirs["attention"].shape == (4, T, T)
    assert theirs["attention_head_names"][3] == "layers.1 head 3"
    assert theirs["tokens"] == list(recording.pieces)
    generated = record(model(), TEXT, tokens=2, rows=1)
    with pytest.raises(ArgumentError, match="bertviz draws layers of self-attention"):
        export(generated, "bertviz")
    with pytest.raises(ArgumentError, match="CircuitsVis draws self-attention"):
        export(generated, "circuitsvis")


def recorded_pair() -> Recording:
    from tests.inspect.interventions.test_kinds_of_models import KINDS

    return record(
        KINDS["an encoder-decoder"]().model, "the blue forest", target="a creature roamed"
    )


def test_the_three_attentions_of_an_encoder_decoder() -> None:
    recording = recorded_pair()
    theirs = export(recording, "bertviz")
    assert set(theirs) == {
        *("encoder_attention", "decoder_attention", "cross_attention"),
        *("encoder_tokens", "decoder_tokens"),
    }
    T, S = len(theirs["decoder_tokens"]), len(theirs["encoder_tokens"])
    assert T != S
    for kind, size in (("encoder", (S, S)), ("decoder", (T, T)), ("cross", (T, S))):
        names = [x for x in recording.places if x.startswith("encoder") == (kind == "encoder")]
        names = [x for x in names if (".cross" in x) == (kind == "cross")]
        assert len(theirs[f"{kind}_attention"]) == len(names)
        for name, x in zip(names, theirs[f"{kind}_attention"], strict=True):
            assert x.shape[-2:] == size
            assert torch.equal(x[0, 1], recording.weights(name, 1).float())


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_bertviz_draws_an_encoder_decoder() -> None:
    viewer: Any = pytest.importorskip("bertviz")
    recording = recorded_pair()
    page = viewer.head_view(**export(recording, "bertviz"), html_action="return").data
    for name in recording.places:
        assert drawn_in(page, "attn", recording.weights(name, 1).float().tolist()), name


# bertviz reads its own script from a file that it does not close
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_bertviz_draws_the_weights() -> None:
    viewer: Any = pytest.importorskip("bertviz")
    recording = recorded()
    theirs = export(recording, "bertviz")
    for draw in (viewer.head_view, viewer.model_view):
        page = draw(**theirs, html_action="return").data
        assert drawn_in(page, "attn", recording.weights(1, 2).float().tolist())
        assert not drawn_in(page, "attn", recording.weights(1, 2).T.float().tolist())
        assert all(json.dumps(piece) in page for piece in theirs["tokens"])


def test_circuitsvis_draws_the_weights() -> None:
    viewer: Any = pytest.importorskip("circuitsvis")
    attention: Any = importlib.import_module(f"{viewer.__name__}.attention")
    recording = recorded()
    theirs = export(recording, "circuitsvis", layer=1)
    page = str(attention.attention_heads(**theirs))
    assert drawn_in(page, "attention", recording.weights(1, 2).float().tolist())
    assert not drawn_in(page, "attention", recording.weights(0, 2).float().tolist())
    assert all(json.dumps(piece) in page for piece in theirs["tokens"])


def drawn_in(page: str, name: str, pattern: list[list[float]]) -> bool:
    """Whether the page contains a pattern in a value `"name": [...]`, up to the rounding of its
    text to 7 digits.
    """
    found, decoder = [], json.JSONDecoder()
    for start in re.finditer(rf'"{name}": *(?=\[)', page):
        values: list[Any] = [decoder.raw_decode(page, start.end())[0]]
        while values and np.ndim(values[0]) != 2:
            values = [each for value in values for each in value]
        found += [value for value in values if np.shape(value) == np.shape(pattern)]
    return any(np.allclose(value, pattern, rtol=0, atol=1e-7) for value in found)


def test_pictures(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    recording = recorded()
    assert export(recording, tmp_path / "r.png", layer=1, head=2).read_bytes()[1:4] == b"PNG"
    drawn = export(recording, tmp_path / "r.svg", layer=1, head=2).read_text()
    weight = recording.weights(1, 2)[3, 1].item()
    assert f"{recording.pieces[3]} ← {recording.pieces[1]}: {weight:.4f}" in html.unescape(drawn)


def test_refused_formats(tmp_path: Path) -> None:
    with pytest.raises(FileError, match="did you mean 'bertviz'"):
        export(recorded(), "bertvis")
    long = record(model(max_position_embeddings=600), torch.ones(1, 520, dtype=torch.int64))
    with pytest.raises(ArgumentError, match="a picture shows 512 x 512 at most"):
        export(long, tmp_path / "r.png")


def test_two_recordings_beside_each_other() -> None:
    a, b = recorded(), record(model(seed=1), TEXT)
    table = compare(a, b)
    for layer, head in ((0, 0), (2, 3)):
        total = 0.0
        both = (x.weights(layer, head).tolist() for x in (a, b))
        for p, r in zip(*both, strict=True):
            for x, y in zip(p, r, strict=True):
                middle = (x + y) / 2
                total += sum(w / 2 * math.log2(w / middle) for w in (x, y) if w)
        assert abs(table.values[layer, head] - total / a[0].T) < 1e-6
    assert float(compare(a, a).values.max()) == 0
    other = record(model(), "the blue forest")
    with pytest.raises(ArgumentError, match="runs with equally many tokens"):
        compare(a, other)
    with pytest.raises(ArgumentError, match="no place in common"):
        compare(a, Recording({"x": a[0]}))
