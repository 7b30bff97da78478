"""Recordings on disk: what is read back is bit for bit what was saved, and hostile files are
refused with a reason.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

import regard
from regard import biases, masks
from regard.caches import Quantized, Ring
from regard.errors import ArgumentError, FileError
from regard.inspect import Recorder, Recording, load, record, save
from regard.inspect.record import recording_file
from regard.inspect.record.recording_file import bias_from, mask_from
from regard.nn.variants import VARIANTS
from regard.span import Span
from tests.inspect.recorded import recorded_call
from tests.nn.catalogue import example, tokens

TABLE = torch.rand(6, 9, generator=torch.Generator().manual_seed(0)) < 0.7
MASKS: dict[str, Any] = {
    "none": None,
    "text": masks.Causal() & masks.Window(4) | masks.Sinks(1),
    "padding": masks.Causal() & masks.Padding((((0, 9),), ((2, 9),))),
    "dense": masks.Dense(TABLE),
    "tree": (masks.Causal() & ~masks.Dense(TABLE)) | masks.Window(2),
    "blocks": masks.Causal() & masks.Blocks(torch.ones(5, 5).tril().bool(), 2),
    "selected": masks.Selected(torch.ones(1, 1, 6, 5).bool(), 2, torch.zeros(1, dtype=torch.int64)),
    "heads": masks.Heads((masks.Causal(), masks.Full(), masks.Dense(TABLE), masks.Window(3))),
    "function": masks.Fn(lambda q, k: (k % 2 == 0) & (k <= q), "even keys"),
}
BIASES: dict[str, Any] = {
    "none": None,
    "alibi": biases.ALiBi(4),
    "learned alibi": biases.ALiBi(slopes=torch.tensor([0.1, 0.2, 0.3, 0.4]), symmetric=True),
    "t5": biases.T5Relative(
        torch.randn(8, 4, generator=torch.Generator().manual_seed(1)), bidirectional=False
    ),
    "dense": biases.DenseBias(torch.randn(1, 1, 6, 9, generator=torch.Generator().manual_seed(2))),
    "sum": biases.ALiBi(4) + biases.DenseBias(torch.ones(6, 9)),
    "function": biases.FnBias(lambda q, k: -0.1 * (q - k).abs().double()),
}


def there_and_back(found: Recording, folder: Path) -> Recording:
    save(found, folder / "run.safetensors")
    assert len(list(folder.iterdir())) == 1, "nothing is left beside it"
    return load(folder / "run.safetensors")


def assert_same(a: Recording, b: Recording) -> None:
    """Every number and word."""
    assert list(a.places) == list(b.places)
    assert (a.pieces, a.metadata, a.source_pieces) == (b.pieces, b.metadata, b.source_pieces)
    for name, place in a.places.items():
        other = b[name]
        for field in ("H", "heads", "N", "key_kind"):
            assert getattr(place, field) == getattr(other, field)
        for h, batch in itertools.product(place.heads, range(place.B)):
            assert torch.equal(a.weights(name, h, batch=batch), b.weights(name, h, batch=batch))
            assert torch.equal(a.scores(name, h, batch=batch), b.scores(name, h, batch=batch))
        for x, y in zip(place.steps, other.steps, strict=True):
            for field in ("kernel", "first", "token", "dropout", "pool"):
                assert getattr(x, field) == getattr(y, field)
            assert torch.equal(x.q, y.q)
            assert (x.out is None) == (y.out is None)
    assert a.sound == b.sound


def call(mask: Any = None, bias: Any = None, **options: Any) -> Recording:
    make = torch.Generator().manual_seed(3)
    q, k = torch.randn(2, 4, 6, 8, generator=make), torch.randn(2, 2, 9, 8, generator=make)
    found = recorded_call(q, k, mask=mask, bias=bias, **options)
    return replace(found, pieces=("a", "b"), metadata={"note": "by hand"})


@pytest.mark.parametrize("name", MASKS)
def test_every_mask(name: str, tmp_path: Path) -> None:
    found = call(MASKS[name])
    again = there_and_back(found, tmp_path)
    assert_same(found, again)
    mask = again[0].steps[0].mask
    if name in ("none", "text", "padding"):
        assert mask == found[0].steps[0].mask  # as a rule, not as a table
    elif name != "function":  # of the caller's, it is written out: no file runs code
        assert str(mask) == str(found[0].steps[0].mask)


@pytest.mark.parametrize("name", BIASES)
def test_every_bias(name: str, tmp_path: Path) -> None:
    found = call(masks.Causal(), BIASES[name], softcap=3.0, sink=torch.randn(4), scale=0.3)
    assert_same(found, there_and_back(found, tmp_path))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_every_dtype(dtype: torch.dtype, tmp_path: Path) -> None:
    found = recorded_call(torch.randn(1, 2, 5, 4).to(dtype))
    again = there_and_back(found, tmp_path)
    assert_same(found, again)
    assert again[0].k.dtype == dtype


@pytest.mark.parametrize("name", ["sliding_window", "mla", "gqa"])
def test_steps_rings_latents_and_quantized_caches(name: str, tmp_path: Path) -> None:
    kinds = {"sliding_window": Ring(6), "gqa": Quantized(4, group=4, residual=4)}
    module, x = example(VARIANTS[name], dtype=torch.float32), tokens(12, dtype=torch.float32)
    cache = kinds.get(name, module.new_cache())
    with torch.no_grad(), Recorder(heads=[1, 2], keep=("out",)) as recorder:
        for start, stop in [(0, 7), *((i, i + 1) for i in range(7, 12))]:
            module(x[:, start:stop], cache=cache)
    found = recorder.recording()
    again = there_and_back(found, tmp_path)
    assert_same(found, again)
    assert torch.equal(again[0].row_positions, found[0].row_positions)


def test_a_run_of_a_model_with_its_tokens(tmp_path: Path) -> None:
    found = record(regard.load("tiny"), "to be or not to be", tokens=3, rows=2)
    again = there_and_back(found, tmp_path)
    assert_same(found, again)
    assert again.ids is not None
    assert torch.equal(again.ids, found.ids)
    assert again.labels(0) == found.labels(0)


def test_masks_that_all_steps_share_are_written_once(tmp_path: Path) -> None:
    table = masks.Dense(torch.ones(1, 1, 1, 999).bool())
    k = torch.randn(1, 1, 999, 2)
    with Recorder() as recorder:
        for i in range(30):
            regard.attend(k[:, :, :1], k, k, mask=table, q_positions=Span(999 + i, 1))
    save(recorder.recording(), tmp_path / "x")
    with safe_open(tmp_path / "x", framework="pt") as file:
        bools = [n for n in file.keys() if file.get_tensor(n).dtype == torch.bool]  # noqa: SIM118
    assert len(bools) == 1


Change = Callable[[dict[str, Any], dict[str, torch.Tensor]], object]


def nested(depth: int) -> dict[str, Any]:
    mask: dict[str, Any] = {"text": "causal"}
    for _ in range(depth):
        mask = {"not": mask}
    return mask


def place(**change: Any) -> Change:
    return lambda d, t: d["places"][0].update(change)


def pool(**change: Any) -> Change:
    return lambda d, t: d["places"][0]["pools"][0].update(change)


def step(**change: Any) -> Change:
    return lambda d, t: d["places"][0]["steps"][0].update(change)


def tensor(name: str, *shape: int, dtype: torch.dtype = torch.float32) -> Change:
    """Another tensor in the place of q or lse of the first step, or of k of the first pool."""
    part = "pools" if name == "k" else "steps"
    return lambda d, t: t.update({d["places"][0][part][0][name]: torch.zeros(shape, dtype=dtype)})


def biased(bias: dict[str, Any], *shape: int) -> Change:
    """A bias that refers to a tensor "z"."""
    return lambda d, t: (t.update(z=torch.ones(shape)), step(bias=bias)(d, t))


T5 = {"t5": "z", "bidirectional": True, "max_distance": 2**60}
SCALE = "scale, softcap or dropout of step 0"
HOSTILE: dict[str, tuple[Change, str]] = {
    "format": (lambda d, t: d.update(format=9), "has format 9; this version reads format 3"),
    "no places": (lambda d, t: d.pop("places"), "'places'"),
    "places no list": (lambda d, t: d.update(places=3), "do not form a recording"),
    "two of a name": (lambda d, t: d["places"].append(d["places"][0]), "have the same name"),
    "name of controls": (place(name="a\x1b[2J"), r"'a\x1b[2J' is not a name"),
    "name that turns": (place(name="a\u202eb"), r"'a\u202eb' is not a name"),
    "name without end": (place(name="x" * 1_000_000), f"'{'x' * 100}'... is not a name"),
    "bias bounds": (biased(T5, 32, 4), "max_distance is 1152921504606846976; it must be at most"),
    "no steps": (place(steps=[]), "has no steps, pools or heads"),
    "heads": (place(heads=[0, 9]), "(0, 9); they must be increasing and from 0 to 3"),
    "H": (place(H="4"), "'4' is not an integer"),
    "no heads": (place(H=0), "has 0 heads and 9 columns"),
    "G": (pool(G=3), "has 4 heads, which is not a multiple of 3 key/value heads"),
    "groups": (pool(groups=[0]), "are not those that its query heads read"),
    "N": (place(N=10**9), "has 1,000,000,000 columns, but fewer keys"),
    "k": (tensor("k", 2, 2, 3, 8), "k of  is torch.float32 (2, 2, 3, 8)"),
    "ints": (tensor("q", 2, 4, 6, 8, dtype=torch.int64), "q of step 0 of  is torch.int64"),
    "q": (tensor("q", 2, 4, 6), "q of step 0"),
    "lse": (tensor("lse", 2, 4, 5), "lse of step 0"),
    "no tensor": (step(q="999"), "'999'"),
    "columns": (step(columns=[3, 9]), "are from 3 to 11; they must be from 0 to 8"),
    "pool": (step(pool=1), "refers to pool 1; there are 1"),
    "first": (step(first=-1), "first of step 0 of  is -1"),
    "token": (step(token=True), "True is not an integer"),
    "positions": (step(q_positions=[0, 5]), "and 9 keys, but positions of 5 and 9"),
    "long": (step(q_positions=[0, 2**60]), "a span of 1,152,921,504,606,846,976 positions"),
    "span": (step(k_positions=[0.5, 9]), "0.5 is not an integer"),
    "scale": (step(scale="1e999"), SCALE),
    "softcap": (step(softcap=-1), SCALE),
    "mask code": (step(mask={"text": "__import__('os')"}), "unknown mask"),
    "mask deep": (step(mask=nested(60)), "a mask is nested deeper than 50"),
    "mask shape": (step(mask={"heads": [{"text": "causal"}]}), "1 mask, but the call has 4"),
    "mask none": (step(mask={}), "a mask with [] is unknown"),
    "bias": (step(bias={"sum": []}), "a sum of biases has no terms"),
    "bias none": (step(bias={"sum": [None]}), "has a term of type NoneType"),
    "bias unknown": (step(bias={"tisa": 1}), "a bias with ['tisa'] is unknown"),
    "bias heads": (biased({"alibi": "z", "symmetric": False}, 3), "3 heads and the query has 4"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_a_file_whose_parts_do_not_fit_is_refused(name: str, tmp_path: Path) -> None:
    change, message = HOSTILE[name]
    path = tmp_path / "run.safetensors"
    save(call(masks.Causal()), path)
    with safe_open(path, framework="pt") as file:
        data = json.loads(file.metadata()["regard.recording"])
        held = {n: file.get_tensor(n) for n in file.keys()}  # noqa: SIM118
    change(data, held)
    save_file(held, path, metadata={"regard.recording": json.dumps(data)})
    with pytest.raises(FileError) as caught:
        load(path)
    assert message in str(caught.value), str(caught.value)
    assert str(path) in str(caught.value)


def test_files_that_are_no_recordings(tmp_path: Path) -> None:
    path = tmp_path / "x.safetensors"
    twice = {"regard.recording": '{"format": 1, "format": 1}'}
    for header, message in ((None, "no 'regard.recording'"), (twice, "the key 'format' twice")):
        save_file({"a": torch.zeros(1)}, path, metadata=header)
        with pytest.raises(FileError, match=message):
            load(path)
    save(call(), path)
    path.write_bytes(path.read_bytes()[:-5])
    with pytest.raises(FileError, match="partial download"):
        load(path)
    path.write_bytes(b"\x80\x04pickle")
    with pytest.raises(FileError, match="pickle"):
        load(path)
    with pytest.raises(FileError, match="missing"):
        load(tmp_path / "none")


def test_what_cannot_be_written_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "x.safetensors"
    save(call(), path)
    before = path.read_bytes()

    def full(*args: object, **kwargs: object) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(recording_file, "save_file", full)
    with pytest.raises(FileError, match="cannot write the recording: no space left"):
        save(call(), path)
    assert path.read_bytes() == before
    assert [x.name for x in tmp_path.iterdir()] == [path.name]
    with pytest.raises(FileError, match="cannot write the recording"):
        save(call(), tmp_path / "no" / "such" / "folder")


def test_rules_nested_too_deep_are_refused() -> None:
    bias: dict[str, Any] = {"sum": [None]}
    for _ in range(60):
        bias = {"sum": [bias]}
    with pytest.raises(ArgumentError, match="a bias is nested deeper than 50"):
        bias_from(bias, {})
    with pytest.raises(ArgumentError, match="a mask is nested deeper than 50"):
        mask_from(nested(60), {})
