"""The reference of the public API that `api_reference` writes is complete and has no gaps."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

import regard
from tests.surface import api_reference
from tests.surface.api_reference import Entry

pytestmark = pytest.mark.full  # it imports every module of the package


@pytest.fixture(scope="module")
def entries() -> dict[str, Entry]:
    return {entry.name: entry for entry in api_reference.entries()}


def test_every_public_name_is_in_it(entries: dict[str, Entry]) -> None:
    assert len(entries) > 900
    for name in regard.__all__:
        assert f"regard.{name}" in entries, name
    known = {name.rpartition(".")[2] for name in entries}
    for module in api_reference.modules():
        assert [name for name in api_reference.exports(module) if name not in known] == []


def test_every_entry_has_a_docstring(entries: dict[str, Entry]) -> None:
    assert [name for name, entry in entries.items() if not entry.docstring] == []


def test_signatures_are_readable(entries: dict[str, Entry]) -> None:
    assert [name for name, entry in entries.items() if " at 0x" in entry.signature] == []
    assert [name for name, entry in entries.items() if "ForwardRef" in entry.signature] == []
    assert "backend: str = 'auto'" in entries["regard.attend"].signature


def test_attributes_and_constants_have_their_docstrings(entries: dict[str, Entry]) -> None:
    assert entries["regard.EMPTY"].docstring.startswith("The position")
    assert entries["regard.EMPTY"].signature == " = -1"
    assert "name" in entries["regard.caches.Cache.kind"].docstring


def test_the_command_writes_a_page(tmp_path: Path, root: Path) -> None:
    page = tmp_path / "reference.md"
    command = [sys.executable, "-m", "tests.surface.api_reference"]
    subprocess.run([*command, str(page)], check=True, cwd=root)
    text = page.read_text(encoding="utf-8")
    assert "\n### regard.attend\n\n```python\nattend(q: Float[Tensor, 'B H T D']," in text
    assert subprocess.run(command, cwd=root, capture_output=True, check=False).returncode != 0
