"""The source distribution and the wheel are complete, and run where they are installed."""

from __future__ import annotations

import os
import re
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

from regard.ops.cpu.instruction_sets import instruction_set
from regard.ops.cpu.library import build_module

PROJECT = "pyproject.toml"


def run(*command: str | Path, cwd: Path) -> str:
    """What a command prints, with nothing of this process's search path."""
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTHONPATH", "PIP_CONSTRAINT")}
    done = subprocess.run(
        [str(part) for part in command],
        cwd=cwd,
        env={**clean, "NO_COLOR": "1", "COLUMNS": "80"},
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


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The two distributions, built without a network."""
    pytest.importorskip("build")
    pytest.importorskip("hatchling")
    root, folder = Path(__file__).parents[2], tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, root, cwd=folder)
    (sdist,), (wheel,) = folder.glob("*.tar.gz"), folder.glob("*.whl")
    return {"sdist": sdist, "wheel": wheel}


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


@pytest.mark.full
def test_the_source_distribution_has_every_file_of_the_repository(
    built: dict[str, Path], root: Path
) -> None:
    with tarfile.open(built["sdist"]) as file:
        names = {name.partition("/")[2] for name in file.getnames()}
    assert names - {"PKG-INFO"} == tracked(root)


@pytest.mark.full
def test_the_wheel_has_the_whole_package_and_nothing_else(
    built: dict[str, Path], root: Path
) -> None:
    with zipfile.ZipFile(built["wheel"]) as file:
        names = set(file.namelist())
    package = {name for name in names if name.startswith("regard/")}
    kernels = {name for name in package if name.startswith("regard/ops/cpu/libraries/")}
    package -= kernels
    if built["wheel"].name.endswith("-none-any.whl"):  # there was no compiler
        assert not kernels
    else:
        assert {Path(x).stem for x in kernels} == {"processor", *compiled_sets()}
    assert {f"src/{name}" for name in package} == {
        name for name in tracked(root) if name.startswith("src/")
    }
    assert {"regard/py.typed", "regard/assets/tiny/model.safetensors"} < package
    others = {name.partition("/")[2] for name in names - package - kernels}
    assert others == {"METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE"}


@pytest.mark.full
def test_the_description_has_no_link_that_an_index_cannot_follow(
    built: dict[str, Path], root: Path
) -> None:
    found = metadata(built["wheel"])
    assert found["Description-Content-Type"] == "text/markdown"
    text = str(found.get_payload())
    assert re.findall(r"\]\((?!https?://)[^)]*\)", text) == []
    assert "`docs/models.md`, checkpoints of 70 families" in text
    assert "[docs/models.md](docs/models.md)" in (root / "README.md").read_text("utf-8")
    assert set(text.split()) > {"regard.attend(q,", "Licence:"}


@pytest.mark.full
@pytest.mark.parametrize("kind", ["wheel", "sdist"])
def test_an_installed_copy_runs(kind: str, built: dict[str, Path], tmp_path: Path) -> None:
    """In an empty environment, which finds the dependencies in that of the tests."""
    venv.create(tmp_path / "env", with_pip=True)
    python = tmp_path / "env" / "bin" / "python"
    site = Path(
        run(
            python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path
        ).strip()
    )
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    options = ["--no-deps", "--no-build-isolation", "--no-index", "--ignore-installed", "--quiet"]
    run(python, "-m", "pip", "install", *options, built[kind], cwd=tmp_path)

    modules = "regard, regard.cli, regard.masks, regard.inspect"
    code = f"import {modules}; print(regard.__file__, regard.cli.__file__, regard.inspect.__file__)"
    for file in run(python, "-I", "-c", code, cwd=tmp_path).split():
        assert Path(file).is_relative_to(site), file
    regard = python.with_name("regard")
    assert "causal" in run(regard, "show", "causal & window(4)", cwd=tmp_path)
    assert "gqa" in run(regard, "describe", cwd=tmp_path)
    assert f"compiled CPU kernels: {instruction_set()}" in run(regard, "--version", cwd=tmp_path)
    page = tmp_path / "page.html"
    explained = run(regard, "explain", "a fluffy blue creature", "--html", page, cwd=tmp_path)
    assert "page.html: " in explained
    assert page.stat().st_size > 10_000


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
    for ours, theirs in (("version", "version"), ("license", "license"), ("keywords", "keywords")):
        assert citation[theirs] == table[ours], ours
    assert [x["name"] for x in citation["authors"]] == [x["name"] for x in table["authors"]]  # type: ignore[attr-defined]
    assert citation["title"].startswith(f"{table['name']}: ")


def test_what_builds_the_package_is_pinned(root: Path) -> None:
    constraints = (root / "constraints.txt").read_text("utf-8")
    for name in ("build", "hatchling"):
        assert re.search(rf"^{name}==", constraints, re.MULTILINE), name
