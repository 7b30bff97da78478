"""Headers of safetensors files: every way in which one can lie is told, before anything is read or
allocated.
"""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load, save
from torch import Tensor

import regard
from regard.errors import ArgumentError, FileError
from regard.files import reading
from regard.files.safetensors_files import DTYPES, identify_format, read_header
from regard.models.checkpoint.tensors import CheckpointTensors, missing_weights_error
from regard.untrusted_text import short_repr

A = {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}


def file_of(header: bytes | str | dict[str, Any], data: bytes | int = 24) -> bytes:
    raw = json.dumps(header) if isinstance(header, dict) else header
    raw = raw.encode() if isinstance(raw, str) else raw
    return struct.pack("<Q", len(raw)) + raw + (bytes(data) if isinstance(data, int) else data)


def error_of(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    with pytest.raises(FileError) as error:
        read_header(path)
    assert str(error.value).startswith(f"{path} is not a whole safetensors file (")
    return str(error.value).removeprefix(f"{path} is not a whole safetensors file ")


def samples() -> dict[str, Tensor]:
    """Tensors of every dtype that the format and torch share, with all kinds of shapes; bytes at
    random.
    """
    found = {"a scalar": torch.tensor(2.5), "nothing": torch.zeros(3, 0, 2), "né\n": torch.ones(1)}
    for name, dtype in DTYPES.items():
        raw = torch.randint(0, 256, (3, 5 * dtype.itemsize), dtype=torch.uint8)
        found[name] = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    return found


def raw_bytes(x: Tensor) -> bytes:
    return x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def test_a_header_says_what_is_stored(tmp_path: Path) -> None:
    tensors = samples()
    content = save(tensors, metadata={"format": "pt"})
    path = tmp_path / "a.safetensors"
    path.write_bytes(content)
    found = read_header(path)
    assert found.metadata == {"format": "pt"}
    assert {x.name for x in found.tensors} == set(tensors)
    end = 8 + int.from_bytes(content[:8], "little")
    for x in found.tensors:
        assert (x.dtype, x.shape) == (tensors[x.name].dtype, tuple(tensors[x.name].shape))
        assert x.start == end, "in the order of the data"
        end += x.bytes
        assert content[x.start : end] == raw_bytes(tensors[x.name])
    assert end == len(content)
    path.write_bytes(save({}))
    assert read_header(path).tensors == ()


def test_a_file_is_opened_without_waiting(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A pipe that takes the file's place would otherwise stop the process until it is written."""
    path, opened, original = tmp_path / "a", [], os.open

    def recorded(name: Any, flags: int, *mode: int) -> int:
        opened.append((name, bool(flags & os.O_NONBLOCK)))
        return original(name, flags, *mode)

    path.write_bytes(save({}))
    monkeypatch.setattr(os, "open", recorded)
    read_header(path)
    assert opened == [(path, True)]


def test_a_header_longer_than_its_file(tmp_path: Path) -> None:
    content = struct.pack("<Q", 20) + b"{" + bytes(14)  # 5 of its 20 bytes are lacking
    message = error_of(tmp_path / "a", content)
    assert message.startswith("(its header alone needs 28 bytes): it has 23 bytes")


def changed(**change: Any) -> dict[str, Any]:
    return {"a": {k: v for k, v in {**A, **change}.items() if v is not None}}


def beside(*shape: int, start: int, end: int) -> dict[str, Any]:
    """A header of two tensors, of which the second has bytes."""
    return {"a": A, "b": {"dtype": "U8", "shape": list(shape), "data_offsets": [start, end]}}


SIX = beside(6, start=24, end=30)
ONE = json.dumps(A)
LIBRARY = "is refused by safetensors: Error while deserializing header: "
"""How a message begins where the library refuses a header."""
TYPE = LIBRARY + "invalid JSON in header: invalid type: "
VALUE = LIBRARY + "invalid JSON in header: "
OFFSET = LIBRARY + "invalid offset for tensor `"
SIZE = LIBRARY + "invalid shape, data type, or offset for tensor"
OVERFLOW = LIBRARY + "overflow computing buffer size from shape"
LONG = "digits; at most 20 are read"
HEADERS: dict[str, tuple[bytes | str | dict[str, Any], str]] = {
    "no object": ("[]", "does not begin with { but with b'[]"),
    "spaces first": (' {"a":1}', "does not begin with { but with b' {\"a\":1}'"),
    "cut": ('{"a":', "is not JSON: Expecting value: line 1 column 6"),
    "two objects": ("{}{}", "is not JSON: Extra data"),
    "not UTF-8": (b'{"\xff":1}', "is not JSON: 'utf-8' codec can't decode byte 0xff"),
    "a raw control character": ('{"a\n":1}', "is not JSON: Invalid control character"),
    "a name twice": (f'{{"a":{ONE},"a":{ONE}}}', "has the key 'a' twice"),
    "a key twice": ('{"a":{"dtype":"F32","dtype":"I8"}}', "has the key 'dtype' twice"),
    "NaN": ('{"a":{"dtype":"F32","shape":[NaN]}}', "has the constant NaN, which is not JSON"),
    "-Infinity": ('{"a":-Infinity}', "has the constant -Infinity, which is not JSON"),
    "a long number": ('{"a":' + "9" * 30 + "}", "has a number of 30 " + LONG),
    "a number beyond Python's": ('{"a":' + "9" * 9999 + "}", "has a number of 9999 " + LONG),
    "deep lists": ('{"a":' + "[" * 50_000 + "]" * 50_000 + "}", "is nested too deep"),
    "deep objects": ('{"a":' * 50_000 + "1" + "}" * 50_000, "is nested too deep"),
    "metadata no object": ({"__metadata__": []}, TYPE + "sequence, expected a map"),
    "metadata of numbers": ({"__metadata__": {"a": 1}}, TYPE + "integer `1`, expected a string"),
    "no entry": ({"a": 1}, TYPE + "integer `1`"),
    "an entry that lacks": (changed(shape=None), VALUE + "missing field `shape`"),
    "an unknown dtype": (changed(dtype="F31"), VALUE + "unknown variant `F31`"),
    "a dtype of half bytes": (changed(dtype="F4", shape=[48]), "gives 'a' the dtype 'F4'; allowed"),
    "an entry that is a list": ({"a": list(A.values())}, "gives 'a' the dtype None; allowed"),
    "a dtype that is no string": (changed(dtype=["F32"]), TYPE + "sequence"),
    "a negative size": (changed(shape=[-2, -3]), VALUE + "invalid value: integer `-2`"),
    "a boolean size": (changed(shape=[True, 6]), TYPE + "boolean `true`"),
    "a fraction": (changed(shape=[2.0, 3]), TYPE + "floating point `2.0`"),
    "a text": (changed(shape="23"), TYPE + 'string "23"'),
    "one number": (changed(shape=6), TYPE + "integer `6`"),
    "offsets of text": (changed(data_offsets=["0", "24"]), TYPE + 'string "0"'),
    "negative offsets": (changed(data_offsets=[-24, 0]), VALUE + "invalid value: integer `-24`"),
    "three offsets": (changed(data_offsets=[0, 24, 24]), VALUE + "invalid length 3"),
    "backwards": (changed(data_offsets=[24, 0]), OFFSET + "a`"),
    "another size": (changed(shape=[2, 4]), SIZE),
    "another dtype": (changed(dtype="F16"), SIZE),
    # 2^32 * 2^32 is 0 in 64 bits, and 2^63 + ... wraps to 24
    "an overflow to 0": (changed(shape=[2**32, 2**32], data_offsets=[0, 0]), OVERFLOW),
    "an overflow to 24": (changed(dtype="U8", shape=[2**61 + 3, 8]), OVERFLOW),
    "nothing, but beyond count": (
        beside(0, 2**62, 2**40, start=24, end=24),
        "the shape [0, 4611686018427387904, 1099511627776], which",
    ),
    "dimensions": (changed(shape=[1] * 25 + [6]), "26 dimensions; at most 25 are allowed"),
    "a hole before": (changed(data_offsets=[1, 25]), OFFSET + "a`"),
    "a hole between": (beside(6, start=25, end=31), OFFSET + "b`"),
    "an overlap": (beside(6, start=23, end=29), OFFSET + "b`"),
    "the same data twice": ({"a": A, "b": A}, OFFSET),
    "an empty tensor inside another": (beside(0, start=8, end=8), OFFSET + "b`"),
    "a long name": ({"n" * 1025: A}, "has a name of 1025 characters; at most 1024 are allowed"),
    "half a character": (f'{{"\\ud800":{ONE}}}', "has an unpaired surrogate in '\\ud800'"),
    "control characters": ({"\x1b[2J\u202e": 1}, TYPE + "integer `1`"),
}


@pytest.mark.parametrize("name", HEADERS)
def test_headers_that_are_wrong(name: str, tmp_path: Path) -> None:
    header, says = HEADERS[name]
    said = error_of(tmp_path / "a.safetensors", file_of(header))
    assert said.startswith("(its header ")
    assert says in said
    assert said.endswith("): it is damaged; download it again, or write it again with safetensors")


def test_empty_tensors_lie_anywhere_between_others(tmp_path: Path) -> None:
    empty = {"dtype": "U8", "shape": [0], "data_offsets": [24, 24]}
    path = tmp_path / "a"
    path.write_bytes(file_of({"z": empty, **SIX, "y": empty}, 30))
    assert [x.name for x in read_header(path).tensors] == ["a", "z", "y", "b"]


def test_null_is_no_metadata_as_in_the_library(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(file_of({"__metadata__": None, "a": A}))
    assert read_header(path).metadata == {}


WHOLE = file_of({"a": A})
LENGTH = "(the length of its header alone needs 8 bytes): it has "
PARTIAL = "is it a partial download?"
TOO_LONG = "(its header has {} bytes; 2 to 100000000 are allowed): "
TRAILING = "(1 bytes follow its last tensor): it has {} bytes, {} are described; "
FILES = {
    "empty": (b"", f"{LENGTH}0 bytes; {PARTIAL}"),
    "7 bytes": (bytes(7), f"{LENGTH}7 bytes; {PARTIAL}"),
    "zeros": (bytes(100), TOO_LONG.format(0)),
    "a header with holes": (
        file_of("{}" + "\0" * 8),
        "(its header is not JSON: it has a zero byte): ",
    ),
    "a header beyond the cap": (
        struct.pack("<Q", 100_000_001) + b"{}",
        TOO_LONG.format(100_000_001),
    ),
    "a header of 2^64": (b"\xff" * 8 + b"{}", TOO_LONG.format(2**64 - 1)),
    "half a header": (
        WHOLE[:30],
        f"(its header alone needs {len(WHOLE) - 24} bytes): it has 30 bytes; {PARTIAL}",
    ),
    "half the data": (
        WHOLE[:-12],
        f"(its data ends after 12 of 24 bytes): it has {len(WHOLE) - 12} of {len(WHOLE)} bytes; ",
    ),
    "too much data": (WHOLE + b"x", TRAILING.format(len(WHOLE) + 1, len(WHOLE))),
    "data without tensors": (file_of("{}", 1), TRAILING.format(11, 10)),
    "a Git LFS pointer": (b"version https://git-lfs.github.com/spec/v1\noid", ": it is a Git LFS"),
    "a web page": (b"<!DOCTYPE html>", ": it is a web page, not the file"),
    "a web page after spaces": (b"\r\n  <html>", ": it is a web page, not the file"),
    "a zip": (b"PK\x03\x04 and so on", ": it is a zip or a PyTorch pickle"),
    "a pickle": (b"\x80\x02}q\x00.\x00\x00\x00", ": it is a pickle, which regard does not open"),
    "a gzip": (b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00", ": it is a gzip archive; unpack it"),
    "GGUF": (b"GGUF\x03\x00\x00\x00\x10\x00", ": it is a GGUF file of llama.cpp"),
    "HDF5": (b"\x89HDF\r\n\x1a\n", ": it is an HDF5 file of Keras"),
    "JSON": (b'{"error": "not found"}', ": it is JSON text, not the file"),
}


@pytest.mark.parametrize("name", FILES)
def test_files_that_are_none(name: str, tmp_path: Path) -> None:
    content, says = FILES[name]
    said = error_of(tmp_path / "a.safetensors", content)
    assert says in said
    if says.startswith(": "):
        assert said.startswith("(its first bytes are not the length of a header): it is ")


@pytest.mark.parametrize("sign", [b"<", b"\x80", b"{", b" "])
def test_a_length_may_begin_like_another_file(sign: bytes, tmp_path: Path) -> None:
    """A header of 0x180 bytes begins as a pickle does, and one of 0x13c bytes as a web page: whole
    or in part.
    """
    path = tmp_path / "a"
    content = file_of(json.dumps({"a": A}).ljust(256 + sign[0]))
    path.write_bytes(content)
    assert path.read_bytes()[:1] == sign
    assert read_header(path).tensors[0].name == "a"
    for kept in (8, 9, 60):
        said = error_of(path, content[:kept])
        assert (
            said == f"(its header alone needs {264 + sign[0]} bytes): it has {kept} bytes; is it a "
            "partial download?"
        )


def test_an_archive_whose_first_bytes_are_a_length(tmp_path: Path) -> None:
    """The first 8 bytes of a gzip are the number 559903: it is told in a file that is longer than
    that, too.
    """
    content = b"\x1f\x8b\x08\x00\x00\x00\x00\x00\x00\x03" + bytes(600_000)
    assert ": it is a gzip archive; " in error_of(tmp_path / "a", content)


def test_caps(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(file_of(SIX, 30))
    assert len(read_header(path, limit=2).tensors) == 2
    with pytest.raises(FileError, match=r"\(its header names 2 tensors; at most 1 are read\)"):
        read_header(path, limit=1)
    lists = '{"a":[' + "[]," * (1 << 21) + "[]]}"
    said = error_of(path, file_of(lists))
    assert said.startswith("(its header has 4194307 brackets and commas; at most 4194304 are read)")


SPARSE = """
import resource, sys
from pathlib import Path
from regard.errors import FileError
from regard.files.safetensors_files import read_header
path = Path(sys.argv[1])
print(read_header(path).tensors[0].bytes)
resource.setrlimit(resource.RLIMIT_AS, (1 << 37, 1 << 37))
try:
    read_header(path)
except FileError as error:
    print(error)
"""


@pytest.mark.full
def test_a_sparse_file_that_cannot_be_mapped(tmp_path: Path) -> None:
    """A terabyte that the disk does not hold, where a process may have an eighth of that."""
    size = 2**40
    path = tmp_path / "a"
    path.write_bytes(file_of({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}, 0))
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size + size)
    done = subprocess.run(
        [sys.executable, "-c", SPARSE, str(path)],
        env={**os.environ, "PYTHONPATH": str(Path(regard.__file__).parents[1])},
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    said = f"{path} has {path.stat().st_size} bytes, and there is not enough memory to map them"
    assert done.stdout.splitlines() == [str(size), said]


def test_what_the_library_forgives(tmp_path: Path) -> None:
    """The controls of our own checks: the library opens these files. Further keys of an entry
    change nothing, and are passed over by both.
    """
    path = tmp_path / "a"
    for name in (
        "a name twice",
        "dimensions",
        "a long name",
        "nothing, but beyond count",
        "a dtype of half bytes",
        "an entry that is a list",
    ):
        path.write_bytes(file_of(HEADERS[name][0]))
        with safetensors.safe_open(path, framework="numpy") as file:
            assert len(file.keys()) >= 1
        with pytest.raises(FileError):
            read_header(path)
    path.write_bytes(file_of(changed(x=1)))
    assert [x.name for x in read_header(path).tensors] == ["a"]


@pytest.mark.full
def test_a_hostile_header_costs_little_memory(tmp_path: Path) -> None:
    """As many lists as are let through to the parser: they are bounded, whatever the header's
    size.
    """
    path = tmp_path / "a"
    path.write_bytes(file_of('{"a":[' + "[]," * 200_000 + "[]]}"))
    tracemalloc.start()
    try:
        with pytest.raises(FileError, match="invalid type: sequence, expected"):
            read_header(path)
        assert tracemalloc.get_traced_memory()[1] < 30 * path.stat().st_size
    finally:
        tracemalloc.stop()


def test_json_says_what_it_is() -> None:
    assert reading.parse_json(b'{"a": {"b": [1, -2, 1.5, null, "x"]}}') == {
        "a": {"b": [1, -2, 1.5, None, "x"]}
    }
    with pytest.raises(ArgumentError, match="is a JSON list; it must be an object"):
        reading.parse_json(b"[1]")


def test_names_and_beginnings() -> None:
    assert short_repr("é" * 200) == repr("é" * 100) + "..."
    assert identify_format(b"\xef\xbb\xbf<html>").startswith("it is a web page")
    assert identify_format(b"anything") == identify_format(b"") == ""
    assert str(missing_weights_error(Path("x"), [])).startswith(
        "x/model.safetensors is missing; a model "
    )


# Any change of a valid file: an error of ours, or what the official reader makes of the same bytes.


OLD = [b"F32", b"[4,3]", b"[0,48]", b'"a"', b"shape", b"BOOL", b":"]
NEW = [b"F64", b"[4,9999999999999]", b"[48,0]", b'"b"', b"dtype", b"I8", b"[3,4]", b"F4"]
SHORT = [b"9", b"0", b"-", b"[", b"{", b'"', b",", b"e9"]


@st.composite
def changes(draw: st.DrawFn, whole: bytes) -> bytes:
    length = 8 + int.from_bytes(whole[:8], "little")
    found = bytearray(whole)
    for _ in range(draw(st.integers(1, 2))):
        start, end = draw(st.sampled_from([(0, 8), (8, length), (length, len(whole))]))
        at = draw(st.integers(min(start, len(found)), min(end, len(found))))
        match draw(st.sampled_from(["flip", "set", "cut", "take out", "put in", "word", "length"])):
            case "flip":
                bit = 1 << draw(st.integers(0, 7))
                found[at : at + 1] = bytes(x ^ bit for x in found[at : at + 1])
            case "set":
                found[at : at + 1] = draw(st.binary(min_size=1, max_size=1))
            case "cut":
                del found[at:]
            case "take out":
                del found[at : at + draw(st.integers(1, 9))]
            case "put in":
                found[at:at] = draw(st.binary(max_size=9) | st.sampled_from(SHORT))
            case "word":
                old, new = draw(st.sampled_from(OLD)), draw(st.sampled_from(NEW))
                found = bytearray(bytes(found).replace(old, new, 1))
            case _:
                said = draw(st.integers(0, 2**64 - 1) | st.integers(0, len(found)))
                found[:8] = struct.pack("<Q", said)
    # half of the time the length is made to fit again, so that changed headers get as far as they
    # can
    if draw(st.booleans()) and len(found) > 8:
        end = bytes(found).rfind(b"}", 8, 8 + length)
        found[:8] = struct.pack("<Q", max(0, end - 7))
    return bytes(found)


VALID = save(
    {
        "a": torch.arange(12.0).reshape(4, 3),
        "b": torch.tensor([True, False]),
        "c": torch.zeros(0, 5),
        "layer.0.w": torch.arange(6, dtype=torch.int16),
        "s": torch.tensor(1.5, dtype=torch.bfloat16),
    },
    metadata={"format": "pt"},
)


@pytest.fixture
def allocated(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Bytes of every tensor that is made with torch.empty."""
    found: list[int] = []
    make = torch.empty

    def count(*args: Any, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        found.append(made.nbytes)
        return made

    monkeypatch.setattr(torch, "empty", count)
    return found


@settings(max_examples=300)
@given(content=changes(VALID))
def test_any_change_is_refused_or_read_as_officially(
    content: bytes, tmp_path: Path, allocated: list[int]
) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    allocated.clear()
    found, said = None, ""
    try:
        found = dict(CheckpointTensors.open(tmp_path).read())
    except FileError as e:
        said = str(e)
    assert sum(allocated) <= len(content)
    if found is None:
        assert said.startswith(str(path))
        return
    official = load(content)  # it accepts all that we accept
    assert found.keys() == official.keys()
    for name, x in found.items():
        assert (x.dtype, x.shape) == (official[name].dtype, official[name].shape)
        assert raw_bytes(x) == raw_bytes(official[name])


def test_the_fuzzer_reaches_both_ends() -> None:
    """A negative control: among its changes are files that are read, and files that the official
    reader refuses.
    """
    seen = {"read": 0, "refused": 0}

    @settings(max_examples=300, derandomize=True, database=None)
    @given(content=changes(VALID))
    def look(content: bytes) -> None:
        try:
            safetensors.deserialize(content)
            officially = True
        except safetensors.SafetensorError:
            officially = False
        seen["read" if officially else "refused"] += 1

    look()
    assert min(seen["read"], seen["refused"]) >= 5, seen
