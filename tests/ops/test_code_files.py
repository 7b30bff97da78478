"""Compiled entries in files: what is loaded without Numba, and what is refused."""

from __future__ import annotations

import json
import os
import re
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
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
    code_files._say_that_nothing_is_kept.cache_clear()
    with pytest.warns(RuntimeWarning, match="no folder keeps compiled code"):
        assert not CodeFile(*NAME).save(b"", "")
    assert not CodeFile(*NAME).save(b"", "")  # which is said once


HOSTILE: dict[str, Callable[[Path], object]] = {
    "file for all": lambda path: path.chmod(0o666),
    "folder for all": lambda path: path.parent.chmod(0o777),
    "folder above for all": lambda path: path.parents[1].chmod(0o777),
    "pipe": lambda path: (path.unlink(), os.mkfifo(path)),
    "no object": lambda path: path.write_bytes(b"[]\n" + path.read_bytes()),
    "deep": lambda path: path.write_bytes(b"[" * 100_000 + b"\n"),
    "no name": lambda path: path.write_bytes(
        re.sub(rb'"symbol": "[^"]*"', b'"symbol": 5', path.read_bytes(), count=1)
    ),
}


@pytest.mark.parametrize("change", HOSTILE)
def test_a_file_that_others_may_write_or_that_is_none_is_not_loaded(
    change: str, stored: tuple[CodeFile, Path]
) -> None:
    own, path = stored
    HOSTILE[change](path)
    assert own.load() is None


def test_a_file_of_another_user_is_not_loaded(
    stored: tuple[CodeFile, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, path = stored
    ours = Path.stat

    def of_another(self: Path, **options: bool) -> os.stat_result:
        state = list(ours(self, **options))
        state[stat.ST_UID] += 77 * (self == path)
        return os.stat_result(state)

    monkeypatch.setattr(Path, "stat", of_another)
    assert own.load() is None


WITHOUT_F16C = """
import torch, regard
from regard.ops.stored_linear import plan_linear, stored_linear
from regard.ops.stored_weights import Int4Weight, Int8Weight
from regard.nn.weights.linear import linear
x = torch.randn(1, 4, 1, 64).half()
k = torch.randn(1, 2, 4096, 64).half()
print(regard.plan(x, k, k))
print(regard.attend(x, k, k).isfinite().all(), linear(x[0, 0], torch.randn(256, 64).half()).dtype)
for form in (Int8Weight, Int4Weight):
    w = form.quantize(torch.randn(64, 128))
    print(stored_linear(torch.ones(1, 128), w).isfinite().all(), plan_linear(torch.ones(1, 128), w))
"""


@pytest.mark.full
@pytest.mark.parametrize("setting", ["NUMBA_CPU_NAME=generic", "NUMBA_CPU_FEATURES=-f16c"])
def test_a_processor_without_float16_runs_torch_and_says_so(setting: str, tmp_path: Path) -> None:
    name, _, value = setting.partition("=")
    made = subprocess.run(
        [sys.executable, "-c", WITHOUT_F16C],
        env=os.environ | {name: value, "NUMBA_CACHE_DIR": str(tmp_path)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert made.returncode == 0, made.stderr
    assert "no float16 without F16C" in made.stdout
    assert made.stdout.count("tensor(True)") == 3
    assert made.stdout.count("dequantized panels") == 2


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
