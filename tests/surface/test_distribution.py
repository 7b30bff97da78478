"""The source distribution and the wheel are complete, and run where they are installed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tomllib
import venv
import zipfile
from email import message_from_string
from email.message import Message
from pathlib import Path

import pytest
import yaml

import regard
from regard.ops.cpu.instruction_sets import instruction_set
from regard.ops.cpu.library import build_module

PROJECT = "pyproject.toml"


def run(*command: str | Path, cwd: Path, **variables: str) -> str:
    """What a command prints, with nothing of this process's search path."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, "NO_COLOR": "1", "COLUMNS": "80", **variables},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def tracked(root: Path) -> set[str]:
    """The files of the checkout that git has, or would add."""
    if not (root / ".git").exists():
        pytest.skip("this is no git checkout")
    found = run("git", "ls-files", "--cached", "--others", "--exclude-standard", cwd=root)
    return {name for name in found.splitlines() if (root / name).exists()}


def quick_compiler(folder: Path) -> str:
    """A compiler that leaves optimization out, which is most of the time that kernels take."""
    if (real := shutil.which("c++")) is None:
        return ""
    program = folder / "c++"
    program.write_text(f'#!/bin/sh\nexec {real} "$@" -O0\n', "utf-8")
    program.chmod(0o755)
    return str(program)


def distributions(folder: Path, root: Path) -> tuple[Path, Path]:
    """The source distribution, and the wheel to publish that is built of it without a network."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, root]
    compiler = quick_compiler(folder)
    published = {"CIBUILDWHEEL": "1"} if compiler else {}
    run(*command, cwd=folder, CXX=compiler, **published)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return sdist, wheel


def compiled_sets() -> set[str]:
    """The instruction sets that the compiler makes libraries for on this machine."""
    build = build_module()
    return {*build.INSTRUCTION_SETS[build.machine()]}


def metadata(wheel: Path) -> Message:
    with zipfile.ZipFile(wheel) as file:
        (name,) = (x for x in file.namelist() if x.endswith(".dist-info/METADATA"))
        return message_from_string(file.read(name).decode())


def project(root: Path) -> dict[str, object]:
    table: dict[str, object] = tomllib.loads((root / PROJECT).read_text("utf-8"))["project"]
    return table


def assert_has_every_file_of_the_repository(sdist: Path, root: Path) -> None:
    with tarfile.open(sdist) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert names - {"PKG-INFO"} == tracked(root)


def assert_has_the_whole_package_and_nothing_else(wheel: Path, root: Path) -> None:
    with zipfile.ZipFile(wheel) as file:
        names = set(file.namelist())
    package = {name for name in names if name.startswith("regard/")}
    kernels = {name for name in package if name.startswith("regard/ops/cpu/libraries/")}
    package -= kernels
    if wheel.name.endswith("-none-any.whl"):  # there was no compiler
        assert not kernels
    else:
        assert {Path(x).stem for x in kernels} == {"processor", *compiled_sets()}
    assert {f"src/{name}" for name in package} == {
        name for name in tracked(root) if name.startswith("src/")
    }
    assert {"regard/py.typed", "regard/assets/tiny/model.safetensors"} < package
    others = {name.partition("/")[2] for name in names - package - kernels}
    cards = {f"licenses/{x.relative_to(root)}" for x in root.glob("src/regard/assets/*/README.md")}
    assert cards, "the models of the wheel have cards"
    texts = {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}
    assert others == texts | cards
    assert metadata(wheel)["Version"] == regard.__version__
    assert wheel.stat().st_size <= 15e6


def assert_an_index_can_follow_every_link(wheel: Path, root: Path) -> None:
    found = metadata(wheel)
    assert found["Description-Content-Type"] == "text/markdown"
    text = str(found.get_payload())
    assert re.findall(r"\]\((?!https?://)[^)]*\)", text) == []
    assert "`docs/models.md`, checkpoints of 92 families" in text
    assert "[docs/models.md](docs/models.md)" in (root / "README.md").read_text("utf-8")
    assert set(text.split()) > {"regard.attend(q,", "Licence:"}


def assert_runs_where_it_is_installed(wheel: Path, folder: Path) -> None:
    """In an empty environment, which finds the dependencies in that of the tests."""
    venv.create(folder / "env")
    python = folder / "env" / "bin" / "python"
    site = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=folder
        ).strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ["--no-deps", "--no-index", "--ignore-installed", "--quiet"]
    run(sys.executable, "-m", "pip", "--python", python, "install", *options, wheel, cwd=folder)

    modules = "regard, regard.cli, regard.masks, regard.inspect"
    code = f"import {modules}; print(regard.__file__, regard.cli.__file__, regard.inspect.__file__)"
    for file in run(python, "-I", "-c", code, cwd=folder).split():
        assert Path(file).is_relative_to(site), file
    regard = python.with_name("regard")
    assert "causal" in run(regard, "show", "causal & window(4)", cwd=folder)
    assert "gqa" in run(regard, "describe", cwd=folder)
    assert f"compiled CPU kernels: {instruction_set()}" in run(regard, "--version", cwd=folder)
    page = folder / "page.html"
    explained = run(regard, "explain", "a fluffy blue creature", "--html", page, cwd=folder)
    assert "page.html: " in explained
    assert page.stat().st_size > 10_000


@pytest.mark.full
def test_the_distributions_are_complete_and_run(root: Path, tmp_path: Path) -> None:
    sdist, wheel = distributions(tmp_path, root)
    assert_has_every_file_of_the_repository(sdist, root)
    assert_has_the_whole_package_and_nothing_else(wheel, root)
    assert_an_index_can_follow_every_link(wheel, root)
    assert_runs_where_it_is_installed(wheel, tmp_path)


@pytest.mark.full
def test_without_a_compiler_the_wheel_is_one_of_pure_python(tmp_path: Path) -> None:
    pytest.importorskip("build")
    root, empty = Path(__file__).parents[2], tmp_path / "programs"
    empty.mkdir()
    command = ["-m", "build", "--no-isolation", "--wheel", "--outdir", tmp_path, root]
    clean = {k: v for k, v in os.environ.items() if k not in ("CXX", "CIBUILDWHEEL", "PYTHONPATH")}

    def build(**more: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [sys.executable, *map(str, command)],
            env={**clean, "PATH": str(empty), **more},
            capture_output=True,
            text=True,
            check=False,
        )

    done = build()
    assert done.returncode == 0, done.stderr
    assert (done.stdout + done.stderr).count("without compiled CPU kernels") == 1
    assert "no C++ compiler was found (c++, g++, clang++, or CXX)" in done.stdout + done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    assert wheel.name.endswith("-py3-none-any.whl")
    with zipfile.ZipFile(wheel) as file:
        assert not [x for x in file.namelist() if "libraries" in x]
    assert build(CIBUILDWHEEL="1").returncode != 0, "a published wheel has kernels"


def test_the_citation_agrees_with_the_project(root: Path) -> None:
    citation, table = yaml.safe_load((root / "CITATION.cff").read_text("utf-8")), project(root)
    assert citation["version"] == regard.__version__
    for name in ("license", "keywords"):
        assert citation[name] == table[name], name
    assert [x["name"] for x in citation["authors"]] == [x["name"] for x in table["authors"]]  # type: ignore[attr-defined]
    assert citation["title"].startswith(f"{table['name']}: ")


def test_what_builds_the_package_is_pinned(root: Path) -> None:
    constraints = (root / "constraints.txt").read_text("utf-8")
    for name in ("build", "hatchling"):
        assert re.search(rf"^{name}==", constraints, re.MULTILINE), name
