"""The kernels without Python, compiled by other compilers and for other processors, which an
emulator runs: `driver.cpp` compares them with loops in double.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from regard.ops.cpu.instruction_sets import INSTRUCTION_SETS, SOURCES
from tests.ops.cpu.compiled import BUILD, compiler, run, tool
from tests.ops.cpu.test_library import usable

DRIVER = Path(__file__).with_name("driver.cpp")
PRINTED = "f32: 0 failures\nbf16: 0 failures\nfp16: 0 failures\n"


def driver(command: list[str], flags: list[str], folder: Path, sources: Path = SOURCES) -> Path:
    """The driver and the kernels as a program."""
    program = folder / "driver"
    units = [x for x in sorted(sources.glob("*.cpp")) if x.stem not in ("processor", "stamp")]
    run(*command, *BUILD.FLAGS, *flags, "-I", sources, DRIVER, *units, "-o", program)
    return program


@pytest.mark.full
@pytest.mark.parametrize("name", BUILD.INSTRUCTION_SETS["x86_64"])
@pytest.mark.parametrize("other", ["", "clang++", "g++-11"], ids=["default", "clang", "gcc 11"])
def test_this_processor(name: str, other: str, tmp_path: Path) -> None:
    if name not in usable():
        pytest.skip(f"no {name} on this machine")
    command = [tool(other)] if other else compiler()
    assert run(driver(command, BUILD.INSTRUCTION_SETS["x86_64"][name], tmp_path)) == PRINTED


ARM = {"gcc": ("aarch64-linux-gnu-g++", []), "clang": ("clang++", ["--target=aarch64-linux-gnu"])}


@pytest.mark.full
@pytest.mark.parametrize("compiled_by", ARM)
def test_arm(compiled_by: str, tmp_path: Path) -> None:
    """A static program of another processor in an emulator."""
    tool("aarch64-linux-gnu-g++")  # whose libraries clang needs, too
    emulator, (name, options) = tool("qemu-aarch64-static", "qemu-aarch64"), ARM[compiled_by]
    flags = [*BUILD.INSTRUCTION_SETS["aarch64"]["armv8"], "-static", *options]
    assert run(emulator, driver([tool(name)], flags, tmp_path)) == PRINTED


def test_a_wrong_number_is_noticed(tmp_path: Path) -> None:
    """A negative control: silu of another sign, in a copy of the sources."""
    copy = tmp_path / "csrc"
    shutil.copytree(SOURCES, copy)
    header = copy / "activations.h"
    text, right = header.read_text("utf-8"), "x >= vf{} ? x : x * e"
    assert text.count(right) == 1
    header.write_text(text.replace(right, "x >= vf{} ? x : -x * e"))
    flags = next(iter(BUILD.INSTRUCTION_SETS[BUILD.machine()].values()))
    with pytest.raises(AssertionError, match="gated_product_f32: number"):
        run(driver(compiler(), flags, tmp_path, copy))


def test_the_sets_of_both_machines_have_names() -> None:
    assert {x for sets in BUILD.INSTRUCTION_SETS.values() for x in sets} == {*INSTRUCTION_SETS}
