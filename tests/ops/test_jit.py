"""What CPU kernels are compiled from."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

import regard

FOLDER = Path(regard.__file__).parent / "ops" / "jit"
TAKEN = re.compile(r"^from regard\.ops\.jit\.(\w+) import", re.MULTILINE)
NAMES = [f.stem for f in sorted(FOLDER.glob("*.py")) if TAKEN.search(f.read_text("utf-8"))]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_compiled_in_is_part_of_the_file(name: str) -> None:
    """Numba compiles a function anew when its own file changes, not when a file does that it takes functions from."""
    text = (FOLDER / f"{name}.py").read_text("utf-8")
    below = sorted(set(TAKEN.findall(text)))
    stamp = hashlib.sha256(b"".join((FOLDER / f"{x}.py").read_bytes() for x in below)).hexdigest()
    assert f'BUILT_UPON = "{stamp[:16]}"' in text, f"{below} changed: BUILT_UPON = {stamp[:16]!r}"


def test_all_that_take_something_are_known() -> None:
    assert {"decode", "prefill", "tile", "tile_quantised"} <= set(NAMES)
