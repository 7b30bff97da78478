"""Caches on disk: going on after a load is going on, bitwise; damaged, foreign and forged files are
refused.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import Tensor

import regard
from regard.caches import (
    Cache,
    Cross,
    Fixed,
    Growing,
    Latent,
    Memory,
    Paged,
    Quantized,
    Ring,
    State,
    Streaming,
    load,
    save,
    save_load,
)
from regard.files import atomic_write
from regard.registry import is_builtin
from regard.span import Span, as_tensor
from tests.caches.contract import Run, Step
from tests.caches.kinds import KINDS, Kind

SAVED = {name: kind for name, kind in KINDS.items() if is_builtin(type(kind.make()))}
"""The examples whose class the package knows by name."""
RUNS: dict[str, list[Step]] = {
    "span": [9, 1, 4],
    "rows": [[[False, True, True, True, True], [True, True, False, False, False]]],
    "empty": [],
    "short": [2],
}


def bits(cache: Cache) -> dict[str, Any]:
    return {
        name: (x.dtype, tuple(x.shape), x.reshape(-1).clone().view(torch.uint8).numpy().tobytes())
        if isinstance(x, Tensor)
        else x
        for name, x in cache.contents().items()
    }


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("kind", SAVED.values(), ids=SAVED)
@pytest.mark.parametrize("run", RUNS)
def test_going_on_after_a_load_is_going_on(kind: Kind, run: str, tmp_path: Path) -> None:
    driver = Run(kind)
    for step in RUNS[run]:
        driver.feed(step)
    save(driver.cache, tmp_path / "a")
    read = load(tmp_path / "a")
    assert type(read) is type(driver.cache)
    assert read.settings == driver.cache.settings
    assert bits(read) == bits(driver.cache)
    assert (len(read), read.bytes, read.batch) == (
        len(driver.cache),
        driver.cache.bytes,
        driver.cache.batch,
    )
    for n in (1, 6, 1):
        where = driver.cache.next(n)
        new = driver.tokens(where)
        (memory, seen), (other, there) = (c.update(new, where) for c in (driver.cache, read))
        assert torch.equal(as_tensor(seen), as_tensor(there))
        assert isinstance(seen, Span) == isinstance(there, Span)
        visible = (as_tensor(seen) >= 0)[:, None, :, None]
        for a, b in zip(memory, other, strict=True):
            assert torch.equal(a.where(visible, 0), b.where(visible, 0))
    if isinstance(driver.cache, Paged):
        assert load(tmp_path / "a").pool.used <= driver.cache.pool.used


def test_kinds_that_store_no_tokens(tmp_path: Path) -> None:
    state = State()
    state.store((torch.randn(2, 3, 4), torch.randn(2, 3)), torch.tensor([[0, 1, 2], [-1, 0, 1]]))
    cross = Cross()
    cross.store((torch.randn(2, 3, 4, 5),), torch.tensor([[0, 1, 2, -1], [0, 1, 2, 3]]))
    infini, where = Memory(4), torch.tensor([[-1, 0, 1, 2, 3, 4], [0, 1, 2, 3, 4, 5]])
    infini.update((torch.randn(2, 2, 6, 8),), where)
    infini.store((torch.randn(2, 2, 8, 8), torch.randn(2, 2, 8)), where)
    infini.update((torch.randn(2, 2, 1, 8),), infini.next(1))
    cut = Ring(4, rewind=2)
    cut.update((torch.randn(1, 1, 9, 2),), Span(0, 9))
    cut.crop(7)
    for cache in (state, cross, infini, cut):
        save(cache, tmp_path / "a")
        read = load(tmp_path / "a")
        assert bits(read) == bits(cache)
        assert type(read) is type(cache)
        assert (len(read), read.batch) == (len(cache), cache.batch)
        assert torch.equal(as_tensor(read.next(1)), as_tensor(cache.next(1)))
    with pytest.raises(regard.ArgumentError, match="written once"):
        load_of(cross, tmp_path).store((torch.randn(2, 3, 4, 5),), Span(0, 4))  # type: ignore[attr-defined]


def load_of(cache: Cache, folder: Path) -> Cache:
    save(cache, folder / "b")
    return load(folder / "b")


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
def test_every_dtype_and_parts_that_share_memory(dtype: torch.dtype, tmp_path: Path) -> None:
    x = torch.randn(1, 2, 6, 4).to(dtype)
    for cache in (Growing(), Fixed(9), Quantized(4, group=2, residual=1)):
        cache.update((x, x), Span(0, 6))
        assert bits(load_of(cache, tmp_path)) == bits(cache)
    strided = x.transpose(1, 2)
    cache = Growing()
    cache.update((strided, strided[..., :2]), Span(0, 2))
    assert bits(load_of(cache, tmp_path)) == bits(cache)


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, cache = tmp_path / "a", Growing()
    cache.update((torch.ones(1, 1, 2, 2),), Span(0, 2))
    save(cache, path)
    before = path.read_bytes()
    cache.update((torch.ones(1, 1, 2, 2),), Span(2, 2))

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    for module, place in ((save_load, "save_file"), (atomic_write, "sync_to_disk")):
        with monkeypatch.context() as patch:
            patch.setattr(module, place, full)
            with pytest.raises(regard.FileError, match=r"a: cannot write the cache: .*No space"):
                save(cache, path)
        assert path.read_bytes() == before
        assert [p.name for p in tmp_path.iterdir()] == ["a"], "no temporary file is left"
    save(cache, path)
    assert len(load(path)) == 4
    with pytest.raises(regard.FileError, match="cannot write the cache"):
        save(cache, tmp_path / "no" / "folder")


class Foreign(Growing):
    """A user's own cache: load would not know it."""


def forged(
    path: Path,
    change: Callable[[dict[str, Any], dict[str, Tensor]], None],
    cache: Cache | None = None,
) -> Path:
    if cache is None:
        cache = Growing()
        cache.update(
            (torch.ones(2, 1, 3, 2), torch.ones(2, 1, 3, 4)), torch.tensor([[0, 1, 2], [-1, 0, 1]])
        )
    save(cache, path)
    with safe_open(path, framework="pt") as file:
        header = json.loads(file.metadata()["regard.cache"])
    tensors = load_file(path)
    change(header, tensors)
    if not header.pop("keep", False):
        header["tensors"] = {name: list(x.shape) for name, x in tensors.items()}
    save_file(tensors, path, metadata={"regard.cache": json.dumps(header)})
    return path


def test_a_class_that_load_would_not_know(tmp_path: Path) -> None:
    with pytest.raises(regard.ArgumentError) as error:
        save(Foreign(), tmp_path / "a")
    known, _, rest = str(error.value).partition("; ")
    said, _, names = known.partition(" knows ")
    assert said == "Foreign cannot be saved: load"
    assert {"Cross", "Evicting", "Fixed", "Growing"} <= set(names.split(", "))
    assert "_" not in names, "what other classes share is no class of its own"
    assert rest == "give the class a `kind` of its own, or save its contents() yourself"
    assert not (tmp_path / "a").exists()


def quantized() -> Cache:
    cache = Quantized(4, group=2, residual=1)
    cache.update((torch.randn(1, 2, 6, 4),) * 2, Span(0, 6))
    return cache


def latent() -> Cache:
    cache = Latent(3, 1)
    cache.update((torch.ones(1, 1, 2, 4),), Span(0, 2))
    return cache


def ring_of_rows() -> Cache:
    cache = Ring(3)
    cache.update((torch.ones(2, 2, 3, 4),) * 2, torch.tensor([[0, 1, 2], [-1, 0, 1]]))
    return cache


def paged() -> Cache:
    cache = Paged(2, 8)
    cache.update((torch.ones(2, 1, 3, 2),), torch.tensor([[0, 1, 2], [-1, 0, 1]]))
    return cache


def streaming() -> Cache:
    cache = Streaming(2, 3)
    cache.update((torch.ones(1, 2, 6, 4),) * 2, Span(0, 6))
    return cache


FORGED: dict[str, tuple[Callable[[Any, Any], Any], str, Callable[[], Cache] | None]] = {
    "unknown class": (lambda h, t: h.update({"class": "os.system"}), "the class 'os.system'", None),
    "a protocol": (lambda h, t: h.update({"class": "Cache"}), "the class 'Cache' is unknown", None),
    "missing": (lambda h, t: (h.update(keep=True), t.pop("memory.1")), "lists 'memory.1' as", None),
    "unexpected": (
        lambda h, t: (h.update(keep=True), t.update(x=torch.ones(1))),
        "lists 'x' as None, and the file holds [1]; save it again",
        None,
    ),
    "another shape": (
        lambda h, t: (h.update(keep=True), t.update({"memory.0": torch.ones(2, 1, 3, 9)})),
        "lists 'memory.0' as [2, 1, 3, 2], and the file holds [2, 1, 3, 9]; save it again",
        None,
    ),
    "a name it does not know": (
        lambda h, t: t.update(x=torch.ones(2)),
        "do not form a Growing: x is unexpected; save it again",
        None,
    ),
    "a gap": (
        lambda h, t: t.update({"memory.3": t.pop("memory.1")}),
        "do not form a Growing: memory.3 is unexpected",
        None,
    ),
    "no positions": (lambda h, t: t.pop("positions"), "do not form a Growing: memory.0 is", None),
    "fewer positions": (
        lambda h, t: t.update(positions=torch.zeros(2, 2, dtype=torch.int64)),
        "memory.0 is (2, 1, 3, 2) for 2 positions; it must be [batch, heads, slots, dim]",
        None,
    ),
    "another batch": (
        lambda h, t: t.update(positions=torch.zeros(3, 3, dtype=torch.int64)),
        "its tensors have batch sizes [2, 3]; all must have one batch size, or 1",
        None,
    ),
    "positions that are no integers": (
        lambda h, t: t.update(positions=torch.zeros(2, 3)),
        "positions are torch.float32 (2, 3); they must be integers [batch, slots]",
        None,
    ),
    "another format": (lambda h, t: h.update(format=2), "has format 2; this version reads 1", None),
    "no class": (lambda h, t: h.pop("class"), "the header of its cache has None as class", None),
    "settings that are none": (lambda h, t: h.update(settings=[1]), "has [1] as settings", None),
    "spans that are none": (
        lambda h, t: h.update(spans={"positions": [0, 1.5]}),
        "has the span [0, 1.5] of 'positions'; it must be a start and a length",
        None,
    ),
    "spans of one": (lambda h, t: h.update(spans={"positions": [0]}), "has the span [0] of", None),
    "a setting it does not know": (
        lambda h, t: h["settings"].update(capacity=3),
        "do not form a Growing: ",
        None,
    ),
    "a setting it refuses": (
        lambda h, t: h["settings"].update(bits=7),
        "do not form a Quantized: bits is 7; it must be 8, 4 or 2; save it again",
        quantized,
    ),
    "other groups": (
        lambda h, t: h["settings"].update(group=4),
        "do not form a Quantized: codes and scales of part 0 are",
        quantized,
    ),
    "expanded keys": (
        lambda h, t: t.update({"memory.0": torch.ones(1, 2, 2, 4)}),
        "a Latent cache takes one part",
        latent,
    ),
    "a fraction of a slot": (
        lambda h, t: h["settings"].update(recent=3.0),
        "has 3.0 as 'recent'; it must be an integer",
        streaming,
    ),
    "a truth for a number": (
        lambda h, t: h["settings"].update(sinks=True),
        "has True as 'sinks'; it must be an integer",
        streaming,
    ),
    "another ring": (
        lambda h, t: h["settings"].update(recent=7),
        (
            "memory.0 has 5 slots, and the settings {'sinks': 2, 'recent': 7, 'rewind': 0} make 9; "
            "save it again"
        ),
        streaming,
    ),
    "a ring's lost tokens": (
        lambda h, t: t.update(lost=torch.zeros(2, 1)),
        "lost is torch.float32; it must be integers",
        ring_of_rows,
    ),
    "slots that hold nothing": (
        lambda h, t: t.update(positions=torch.tensor([[0, 1, -1], [0, 1, -1]])),
        "positions is (2, 3) in the file, but (2, 2) in the loaded cache",
        paged,
    ),
    "a span beyond all positions": (
        lambda h, t: h.update(spans={"positions": [0, 1 << 40]}),
        "has the span [0, 1099511627776] of 'positions'; it must be",
        latent,
    ),
    "a negative length": (
        lambda h, t: h.update(spans={"positions": [0, -2]}),
        "has the span [0, -2] of 'positions'; it must be",
        latent,
    ),
}


@pytest.mark.parametrize("name", FORGED)
def test_a_forged_file_is_refused(name: str, tmp_path: Path) -> None:
    change, message, make = FORGED[name]
    path = forged(tmp_path / "a", change, None if make is None else make())
    with pytest.raises(regard.FileError) as error:
        load(path)
    assert str(error.value).startswith(str(path))
    assert message in str(error.value)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.uint8])
@pytest.mark.parametrize("make", [lambda: Streaming(2, 3), lambda: Ring(4)])
def test_positions_of_another_integer_dtype(
    make: Callable[[], Cache], dtype: torch.dtype, tmp_path: Path
) -> None:
    """A ring goes on in whole numbers of 64 bits: what has 32 goes on likewise, and fewer are
    refused.
    """
    cache = make()
    held, step = torch.randn(2, 1, 6, 4), torch.randn(2, 1, 1, 4)
    cache.update((held, held), torch.tensor([[0, 1, 2, 3, 4, 5], [-1, -1, 0, 1, 2, 3]]))
    names = [name for name in ("positions", "lost") if name in cache.contents()]
    path = forged(tmp_path / "a", lambda h, t: t.update({n: t[n].to(dtype) for n in names}), cache)
    if dtype is not torch.int32:
        with pytest.raises(regard.FileError, match=f"positions are {dtype}|lost is {dtype}"):
            load(path)
        return
    again = load(path)
    for p in ([[6], [4]], [[7], [5]]):
        given, expected = (c.update((step, step), torch.tensor(p)) for c in (again, cache))
        assert torch.equal(given[1], expected[1])
        assert all(torch.equal(a, b) for a, b in zip(given[0], expected[0], strict=True))


def test_the_forger_forges_nothing_by_itself(tmp_path: Path) -> None:
    """The controls fail for their change alone."""
    for make in (None, quantized, latent, streaming):
        path = forged(tmp_path / "a", lambda h, t: None, None if make is None else make())
        assert len(load(path)) > 0


def test_a_pool_that_is_too_small_for_the_file(tmp_path: Path) -> None:
    cache = Paged(2, 4)
    cache.update((torch.ones(1, 1, 6, 2),), Span(0, 6))
    path = forged(tmp_path / "a", lambda h, t: h["settings"].update(pages=2), cache)
    with pytest.raises(regard.FileError, match="needs 3 pages of 2 tokens, but 2 of the pool's 2"):
        load(path)


def test_files_that_are_no_caches(tmp_path: Path) -> None:
    path = tmp_path / "a"
    with pytest.raises(regard.FileError, match=r"a is missing; save\(cache, path\) writes one$"):
        load(path)
    path.write_bytes(b"\x80\x04K\x01.")
    with pytest.raises(regard.FileError, match="is not a whole safetensors file"):
        load(path)
    save_file({"x": torch.ones(1)}, path)
    with pytest.raises(regard.FileError, match=r"holds no cache: its header has no"):
        load(path)
    save_file({"x": torch.ones(1)}, path, metadata={"regard.cache": "["})
    with pytest.raises(regard.FileError, match=r"the header of its cache is not JSON: Expecting"):
        load(path)
    cache = Growing()
    cache.update((torch.ones(1, 1, 9, 9),), Span(0, 9))
    save(cache, path)
    whole = path.read_bytes()
    for n in (0, 7, 60, len(whole) - 1):  # cut off anywhere
        path.write_bytes(whole[:n])
        with pytest.raises(regard.FileError, match="is not a whole safetensors file"):
            load(path)
    with pytest.raises(regard.FileError):
        load(tmp_path)


def test_files_that_would_hang_or_fill_the_memory(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(regard.FileError, match="pipe is a named pipe; it must be a regular file"):
        load(tmp_path / "pipe")
    for raw, message in (
        ("[" * 200, "is nested too deep"),
        ('{"class": "Growing", "class": "Fixed"}', "has the key 'class' twice"),
    ):
        save_file({"x": torch.ones(1)}, tmp_path / "a", metadata={"regard.cache": raw})
        with pytest.raises(regard.FileError, match=message):
            load(tmp_path / "a")
    cache = Fixed(9)
    cache.update((torch.ones(1, 2, 6, 4),), Span(0, 6))
    path = forged(tmp_path / "a", lambda h, t: h["settings"].update(capacity=300_000_000), cache)
    with pytest.raises(regard.FileError, match="has 300000000 as 'capacity'; it must be an"):
        load(path)
    path = forged(tmp_path / "a", lambda h, t: h["settings"].update(capacity=1000), cache)
    with pytest.raises(regard.FileError, match=r"reserve 32,000 bytes, more than 31,999; to allow"):
        load(path, max_bytes=31_999)
    assert load(path, max_bytes=32_000).settings == {"capacity": 1000}
    path = forged(tmp_path / "a", lambda h, t: h["spans"].update(positions=[2**62, 6]), cache)
    with pytest.raises(regard.FileError, match=r"has the span \[4611686018427387904, 6\] of"):
        load(path)
