"""Compiled entries in files: what is loaded without Numba, and what is refused."""

from __future__ import annotations

import json
import os
import struct
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("numba", reason="Numba compiles what is loaded here")
from regard.ops.jit import code_files
from regard.ops.jit.code_files import CodeFile
from regard.ops.jit.object_code import UnsupportedObject, load_object

pytestmark = pytest.mark.skipif(not code_files.machine(), reason="only x86-64 Linux has code files")

NAME = ("rms_norm_loops", "entry_address", (torch.float32,))


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[CodeFile, Path]:
    """The file of an entry in a folder of its own."""
    from regard.ops.jit import rms_norm_loops

    rms_norm_loops.entry_address(torch.float32)
    own = CodeFile(*NAME)
    code = next(
        path.read_bytes()
        for folder in code_files._folders()
        if (path := folder / own.name).is_file()
    )
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    (tmp_path / "regard").mkdir()
    path = tmp_path / "regard" / own.name
    path.write_bytes(code)
    return own, path


OWN_PROCESS = """
import sys, torch
from regard.ops.gemv import gemv
from regard.ops.rms_norm import rms_norm
x, w = torch.tensor([[3.0, 4.0, 0.0, 0.0]]), torch.ones(4)
print(rms_norm(x, w, 0.0).tolist(), gemv(torch.ones(1, 3), torch.eye(3)).tolist())
print([name for name in ("numba", "llvmlite") if name in sys.modules])
import numba
print(numba.njit(lambda x: [x, x])(2), gemv(torch.ones(1, 3).half(), torch.eye(3).half()).tolist())
"""


@pytest.mark.full
def test_a_process_runs_code_from_files_without_numba(tmp_path: Path) -> None:
    """The second process imports Numba only when it is asked to, and Numba then works as usual."""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(tmp_path)}

    def run() -> list[str]:
        made = subprocess.run(
            [sys.executable, "-c", OWN_PROCESS],
            env=environment,
            capture_output=True,
            text=True,
            check=True,
        )
        return made.stdout.splitlines()

    first, second = run(), run()
    assert first[0] == "[[1.2000000476837158, 1.600000023841858, 0.0, 0.0]] [[1.0, 1.0, 1.0]]"
    assert first[1] == "['numba', 'llvmlite']"
    assert first[2] == "[2, 2] [[1.0, 1.0, 1.0]]"
    assert second == [first[0], "[]", first[2]]


def test_a_file_for_something_else_is_not_loaded(stored: tuple[CodeFile, Path]) -> None:
    """Negative controls: other sources, another machine, damaged code, and no file at all."""
    own, path = stored
    data = path.read_bytes()
    assert own.load()
    header, _, code = data.partition(b"\n")
    for part in ("machine", "stamp"):
        changed = json.loads(header)
        changed["key"][part] = "other"
        path.write_bytes(json.dumps(changed).encode() + b"\n" + code)
        assert own.load() is None
    for damaged in (data[:-1], data[:-1] + bytes([data[-1] ^ 1]), header, b""):
        path.write_bytes(damaged)
        assert own.load() is None
    path.unlink()
    assert own.load() is None


def test_a_file_is_written_in_one_piece(stored: tuple[CodeFile, Path]) -> None:
    own, path = stored
    header, _, code = path.read_bytes().partition(b"\n")
    path.unlink()
    assert own.save(code, json.loads(header)["symbol"])
    assert [x.name for x in path.parent.iterdir()] == [own.name]
    assert own.load()


def test_where_no_folder_can_be_written_nothing_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path / "file"))
    assert not CodeFile(*NAME).save(b"", "")


def test_what_the_loader_does_not_know_is_refused(stored: tuple[CodeFile, Path]) -> None:
    _, path = stored
    header, _, code = path.read_bytes().partition(b"\n")
    symbol = json.loads(header)["symbol"]
    assert load_object(code, code_files._address_of).addresses[symbol]

    def nothing(name: str) -> int:
        raise UnsupportedObject(f"an unknown symbol {name}")

    with pytest.raises(UnsupportedObject, match="an unknown symbol"):
        load_object(code, nothing)
    with pytest.raises(UnsupportedObject, match="no address of the symbol"):
        load_object(code, lambda name: 0)
    with pytest.raises(UnsupportedObject, match="a damaged object file"):
        load_object(code[:200], code_files._address_of)
    for place, value in ((4, 1), (16, 2), (18, 183)):  # 32 bits, a program, another processor
        other = bytearray(code)
        other[place] = value
        with pytest.raises(UnsupportedObject, match="not an object file for x86-64"):
            load_object(bytes(other), code_files._address_of)
    with pytest.raises(UnsupportedObject, match="a relocation of type 99"):
        load_object(_with_relocation(code, 99), code_files._address_of)
    with pytest.raises(UnsupportedObject, match="an unknown symbol no_such_function"):
        code_files._address_of("no_such_function")
    with pytest.raises(UnsupportedObject, match="Numba has no module"):
        code_files._extension("numba.no_such_module")


def _with_relocation(code: bytes, kind: int) -> bytes:
    """Return an object file whose first relocation of code has another type."""
    changed = bytearray(code)
    (start,) = struct.unpack_from("<Q", code, 40)
    size, count = struct.unpack_from("<HH", code, 58)
    for i in range(count):
        _, section, _, _, offset, _, _, _, _, _ = struct.unpack_from(
            "<IIQQQQIIQQ", code, start + i * size
        )
        if section == 4:
            struct.pack_into("<I", changed, offset + 8, kind)
            return bytes(changed)
    raise AssertionError("no relocations")
