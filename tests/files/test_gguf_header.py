"""Headers of GGUF files: every way in which one can lie is told, before anything is allocated."""

from __future__ import annotations

import random
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import regard
from regard.errors import FileError
from regard.files.gguf_files import block_formats, read_gguf_header, read_rows
from tests.models.checkpoint import gguf_writer as gguf

KEYS: dict[str, Any] = {
    "general.architecture": "llama",
    "a.number": 7,
    "a.negative": -7,
    "a.ratio": 0.5,
    "a.truth": True,
    "texts": ["one", "né", ""],
    "numbers": [1, 2, 3],
    "ratios": [0.25, 1.5],
    "truths": [True, False],
}
TENSORS = {
    "first": ("F32", (2, 3), bytes(range(24))),
    "second": ("Q8_0", (3, 64), bytes(range(204))),
    "third": ("F16", (5,), bytes(10)),
}
HUGE = 1 << 62
KINDS = ", ".join(f"{x.name} \\({i}\\)" for i, x in block_formats().items())


def infos(**change: Any) -> list[tuple[str, tuple[int, ...], int, int]]:
    first = {"name": "first", "shape": (2, 3), "kind": 0, "offset": 0}
    return [
        (x["name"], x["shape"], x["kind"], x["offset"])
        for x in ({**first, **change}, {**first, "name": "second", "offset": 32})
    ]


def content(keys: Any = None, rows: Any = None, data: int = 64, **options: Any) -> bytes:
    made = gguf.header(KEYS if keys is None else keys, infos() if rows is None else rows, **options)
    return gguf.pad(made) + bytes(data)


def test_what_a_header_says(tmp_path: Path) -> None:
    header = read_gguf_header(gguf.write(tmp_path / "a.gguf", KEYS, TENSORS))
    assert dict(header.metadata) == KEYS
    assert [(x.name, x.format.name, x.shape, x.bytes) for x in header.tensors.values()] == [
        ("first", "F32", (2, 3), 24),
        ("second", "Q8_0", (3, 64), 204),
        ("third", "F16", (5,), 10),
    ]
    raw = (tmp_path / "a.gguf").read_bytes()
    for name, (_, _, data) in TENSORS.items():
        x = header.tensors[name]
        assert raw[x.start : x.start + x.bytes] == data
    rows = [x.copy() for _, x in read_rows(header, header.tensors["second"], 70)]
    assert np.concatenate(rows).flatten().tolist() == [*range(204)]
    assert [first for first, _ in read_rows(header, header.tensors["second"], 140)] == [0, 2]


def test_version_2_and_another_alignment(tmp_path: Path) -> None:
    path = tmp_path / "a.gguf"
    path.write_bytes(content(version=2))
    assert len(read_gguf_header(path).tensors) == 2
    rows = infos()
    rows[1] = (*rows[1][:3], 64)
    made = gguf.header({"general.alignment": 64}, rows)
    path.write_bytes(gguf.pad(made, 64) + bytes(88))
    assert read_gguf_header(path).tensors["second"].start % 64 == 0
    path.write_bytes(content({"general.alignment": 24}))
    with pytest.raises(FileError, match="alignment is 24"):
        read_gguf_header(path)


def key(raw: bytes) -> Callable[[], bytes]:
    """A header with one key, whose type and value are the given bytes."""
    return lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + gguf.string("k") + raw + bytes(8)


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing": (lambda: b"", "it begins with b''"),
    "two bytes": (lambda: b"GG", "it begins with b'GG'"),
    "a zip": (lambda: b"PK\x03\x04" + bytes(40), "it is a zip or a PyTorch pickle"),
    "only the magic": (lambda: b"GGUF", "its header ends after 4 bytes and needs at least 8"),
    "version 1": (lambda: content(version=1), "its version is 1; versions 2 and 3 are read"),
    "big-endian": (lambda: content(version=3 << 24), "it is big-endian"),
    "many tensors": (
        lambda: b"GGUF" + struct.pack("<IQQ", 3, HUGE, 0),
        f"it says that {HUGE:,} tensors follow",
    ),
    "many keys": (lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 1 << 40) + bytes(99), "keys follow"),
    "a long key": (
        lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + struct.pack("<Q", HUGE) + bytes(99),
        "a key has .* bytes; at most 1024 are allowed",
    ),
    "a long text": (key(struct.pack("<IQ", 8, HUGE)), "its header ends after"),
    "a long list": (key(struct.pack("<IIQ", 9, 4, HUGE)), "values of 'k' follow, and has 8 bytes"),
    "a long list of texts": (key(struct.pack("<IIQ", 9, 8, 1 << 33)), "values of 'k' follow"),
    "a list of lists": (key(struct.pack("<IIQ", 9, 9, 1)), "'k' has values of type 9"),
    "an unknown type": (key(struct.pack("<I", 77)), "'k' has values of type 77"),
    "not a boolean": (key(struct.pack("<IB", 7, 2)), "a boolean of 'k' is neither 0 nor 1"),
    "not UTF-8": (key(struct.pack("<I", 8) + gguf.string(b"\xff\xfe")), "the value of 'k' is not"),
    "a key twice": (
        lambda: b"GGUF" + struct.pack("<IQQ", 3, 0, 2) + 2 * (gguf.string("k") + gguf.value(1)),
        "the key 'k' is there twice",
    ),
    "a tensor twice": (
        lambda: content(rows=[("x", (2, 3), 0, 0), ("x", (2, 3), 0, 32)]),
        "the tensor 'x' is there twice",
    ),
    "an overlap": (
        lambda: content(rows=[("x", (4, 4), 0, 0), ("y", (4, 4), 0, 32)]),
        "'y' is at offset 32; it must follow the tensor before it, at 64",
    ),
    "a gap": (lambda: content(rows=[("x", (2, 3), 0, 64)]), "'x' is at offset 64"),
    "an offset beyond": (lambda: content(rows=infos(offset=HUGE)), f"at offset {HUGE}"),
    "no alignment": (lambda: content(rows=[("x", (2,), 0, 0), ("y", (2,), 0, 8)]), "at offset 8"),
    "an unknown format": (lambda: content(rows=infos(kind=99)), "'first' has the format 99"),
    "a format that is not read": (
        lambda: content(rows=infos(kind=15)),
        f"; these are read: {KINDS}",
    ),
    "no dimension": (lambda: content(rows=infos(shape=())), "'first' has 0 dimensions"),
    "many dimensions": (lambda: content(rows=infos(shape=(1,) * 9)), "'first' has 9 dimensions"),
    "a dimension of 0": (lambda: content(rows=infos(shape=(0, 3))), r"the shape \(0, 3\)"),
    "a huge shape": (lambda: content(rows=infos(shape=(HUGE, HUGE))), "which no tensor can have"),
    "part of a block": (lambda: content(rows=infos(shape=(2, 40), kind=8)), "'first' is Q8_0 with"),
    "a partial download": (lambda: content(data=40), "bytes; is it a partial download"),
    "more than the tensors": (lambda: content(data=160), "bytes follow its last tensor"),
    "an alignment of 3": (lambda: content({"general.alignment": 3}), "general.alignment is 3"),
    "a text as alignment": (lambda: content({"general.alignment": "32"}), "general.alignment is"),
    "one of several parts": (lambda: content({"split.count": 4}), "one of 4 parts, whose names"),
}


@pytest.mark.full(keep=10)
@pytest.mark.parametrize("case", BAD)
def test_every_lie_is_told(case: str, tmp_path: Path) -> None:
    make, says = BAD[case]
    path = tmp_path / "a.gguf"
    path.write_bytes(make())
    tracemalloc.start()
    with pytest.raises(FileError, match=says) as error:
        read_gguf_header(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert str(error.value).startswith(f"{path} is not a GGUF file that can be read: ")
    assert peak < 4 << 20


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    raw = gguf.write(tmp_path / "a.gguf", KEYS, TENSORS).read_bytes()
    end = len(raw) - 22  # what is behind the last tensor is padding
    for size in (*range(0, 400, 7), end - 1):
        (tmp_path / "b.gguf").write_bytes(raw[:size])
        with pytest.raises(FileError):
            read_gguf_header(tmp_path / "b.gguf")
    (tmp_path / "b.gguf").write_bytes(raw[:end])
    assert len(read_gguf_header(tmp_path / "b.gguf").tensors) == 3


@pytest.mark.full
def test_damaged_bytes_end_in_a_refusal_or_a_header(tmp_path: Path) -> None:
    raw = gguf.write(tmp_path / "a.gguf", KEYS, TENSORS).read_bytes()
    chooser = random.Random(0)
    refused = 0
    for _ in range(1500):
        changed = bytearray(raw)
        for _ in range(chooser.randint(1, 3)):
            changed[chooser.randrange(500)] = chooser.choice(
                (0, 1, 127, 255, chooser.randrange(256))
            )
        (tmp_path / "b.gguf").write_bytes(changed)
        try:
            read_gguf_header(tmp_path / "b.gguf")
        except FileError:
            refused += 1
    assert refused > 300


def write_parts(folder: Path, **change: Any) -> list[Path]:
    """One model in two files, as llama-gguf-split writes it."""
    paths = []
    for i, name in enumerate(TENSORS):
        if name == "third":
            break
        keys = {"split.no": i, "split.count": 2, "split.tensors.count": 2, **change}
        path = folder / f"m-{i + 1:05}-of-00002.gguf"
        paths.append(gguf.write(path, keys if i else KEYS | keys, {name: TENSORS[name]}))
    return paths


def test_a_file_in_parts(tmp_path: Path) -> None:
    paths = write_parts(tmp_path)
    for path in paths:  # any part means the whole
        header = read_gguf_header(path)
        assert header.file == paths[0]
        assert header.metadata["a.ratio"] == 0.5
        assert [x.file for x in header.tensors.values()] == paths
        ((_, rows),) = read_rows(header, header.tensors["second"])
        assert bytes(rows.reshape(-1)) == TENSORS["second"][2]
    paths[1].unlink()
    with pytest.raises(FileError, match=r"1 are missing: 'm-00002-of-00002\.gguf'"):
        read_gguf_header(paths[0])
    for change in ({"split.no": 0}, {"split.tensors.count": 3}, {"split.count": 3}):
        with pytest.raises(FileError, match="part"):
            read_gguf_header(write_parts(tmp_path, **change)[0])


def test_a_file_that_changes_is_refused(tmp_path: Path) -> None:
    path = gguf.write(tmp_path / "a.gguf", KEYS, TENSORS)
    header = read_gguf_header(path)
    path.write_bytes(path.read_bytes() + b" ")
    with pytest.raises(FileError, match="was changed after its header was read; load it again"):
        list(read_rows(header, header.tensors["first"]))


def test_other_files_with_the_name(tmp_path: Path) -> None:
    (tmp_path / "a.gguf").write_text("{}")
    with pytest.raises(FileError, match="not a GGUF file that can be read: it begins"):
        regard.load(tmp_path)
