"""What CPU kernels are compiled from."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import numpy as np
import pytest

import regard

FOLDER = Path(regard.__file__).parent / "ops" / "jit"
TAKEN = re.compile(r"^from regard\.ops\.jit\.(\w+) import", re.MULTILINE)
NAMES = [f.stem for f in sorted(FOLDER.glob("*.py")) if TAKEN.search(f.read_text("utf-8"))]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_compiled_in_is_part_of_the_file(name: str) -> None:
    """Numba compiles a function anew when its own file changes, not when a file does that it takes
    functions from.
    """
    text = (FOLDER / f"{name}.py").read_text("utf-8")
    below = sorted(set(TAKEN.findall(text)))
    stamp = hashlib.sha256(b"".join((FOLDER / f"{x}.py").read_bytes() for x in below)).hexdigest()
    assert f'BUILT_UPON = "{stamp[:16]}"' in text, f"{below} changed: BUILT_UPON = {stamp[:16]!r}"


def test_all_that_take_something_are_known() -> None:
    assert {"decode", "prefill", "tile", "tile_quantised"} <= set(NAMES)


def test_nothing_is_taken_in_another_way() -> None:
    """A module that is taken whole, and its functions from there, would be compiled in without
    being part of a stamp.
    """
    for file in FOLDER.glob("*.py"):
        other = re.findall(
            r"^(?:from regard\.ops\.jit import|import regard\.ops\.jit).*",
            file.read_text("utf-8"),
            re.MULTILINE,
        )
        assert not other, f"{file.name}: {other}"


@pytest.mark.parametrize("count", [0, 1, 15, 16, 17, 48, 61])
def test_the_largest_of_a_line(count: int) -> None:
    numba = pytest.importorskip("numba")
    from regard.ops.jit.largest import largest, largest_size

    @numba.njit
    def both(x, at, n):  # type: ignore[no-untyped-def]
        return largest(x, at, n), largest_size(x, at, n)

    x = np.random.default_rng(count).standard_normal((2, 64)).astype(np.float32) - 2
    x[:, :3] = 99, np.inf, -np.inf  # in front of where it begins
    for odd in (None, np.nan, -np.inf):
        if odd is not None and count:
            x[1, 3 + count // 2] = odd
        line = x[1, 3 : 3 + count]
        seen = line[~np.isnan(line)]
        found = both(x, 64 + 3, count)
        assert found[0] == max(seen, default=-np.inf)
        assert found[1] == max(abs(seen), default=0)


def test_no_instruction_is_named_for_another_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """LLVM ends the process where code names an instruction that it must not use."""
    config = pytest.importorskip("numba").core.config
    from llvmlite import binding

    from regard.ops.jit.features import has

    monkeypatch.setattr(binding, "get_host_cpu_features", lambda: {"avx2": True, "avx512f": False})
    assert has("avx2")
    assert not has("avx512f")
    for name in ("CPU_NAME", "CPU_FEATURES"):
        with monkeypatch.context() as told:
            told.setattr(config, name, "generic")
            assert not has("avx2")
            told.setattr(config, name, "host")
            assert has("avx2")
    monkeypatch.setattr(config, "ENABLE_AVX", 0)
    assert not has("avx2")
