"""The kernels without Python, compiled by other compilers and for other processors, which an
emulator runs: `driver.cpp` compares them with loops in double.
"""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from regard.ops.cpu.instruction_sets import INSTRUCTION_SETS, SOURCES
from tests.ops.cpu.compiled import BUILD, compiler, run, tool
from tests.ops.cpu.test_library import usable

DRIVER = Path(__file__).with_name("driver.cpp")
KERNELS = [x for x in sorted(SOURCES.glob("*.cpp")) if x.stem not in ("processor", "stamp")]
PRINTED = "f32: 0 failures\nbf16: 0 failures\nfp16: 0 failures\n"


def driver(command: list[str], flags: list[str], folder: Path) -> Path:
    """The driver and the kernels as a program."""
    program = folder / "driver"
    run(*command, *BUILD.FLAGS, *flags, "-I", SOURCES, DRIVER, *KERNELS, "-o", program)
    return program


@pytest.mark.full
@pytest.mark.parametrize("name", BUILD.INSTRUCTION_SETS["x86_64"])
@pytest.mark.parametrize("other", ["", "clang++", "g++-11"], ids=["default", "clang", "gcc 11"])
def test_this_processor(name: str, other: str, tmp_path: Path) -> None:
    if name not in usable():
        pytest.skip(f"no {name} on this machine")
    command = [tool(other)] if other else compiler()
    assert run(driver(command, BUILD.INSTRUCTION_SETS["x86_64"][name], tmp_path)) == PRINTED


ARM = {
    "gcc": ("aarch64-linux-gnu-g++", []),
    "clang": ("clang++", ["--target=aarch64-linux-gnu"]),
}


@pytest.mark.full
@pytest.mark.parametrize("compiled_by", ARM)
def test_arm(compiled_by: str, tmp_path: Path) -> None:
    """A static program of another processor in an emulator."""
    tool("aarch64-linux-gnu-g++")  # whose libraries clang needs, too
    emulator, (name, options) = tool("qemu-aarch64-static", "qemu-aarch64"), ARM[compiled_by]
    flags = [*BUILD.INSTRUCTION_SETS["aarch64"]["armv8"], "-static", *options]
    assert run(emulator, driver([tool(name)], flags, tmp_path)) == PRINTED


def test_a_wrong_number_is_noticed(tmp_path: Path) -> None:
    """A negative control: silu of another sign."""
    (source,) = (x for x in KERNELS if "REGARD_ENTRIES(gated_product," in x.read_text("utf-8"))
    text, wrong = source.read_text("utf-8"), tmp_path / source.name
    assert "(not_negative ? x : x * e)" in text
    wrong.write_text(text.replace("(not_negative ? x : x * e)", "(not_negative ? x : -x * e)"))
    program = tmp_path / "driver"
    others = [x for x in KERNELS if x != source]
    flags = next(iter(BUILD.INSTRUCTION_SETS[BUILD.machine()].values()))
    options = [*BUILD.FLAGS, *flags, "-I", SOURCES]
    run(*compiler(), *options, DRIVER, wrong, *others, "-o", program)
    with pytest.raises(AssertionError, match="gated_product_f32: number"):
        run(program, env={**os.environ})


def test_the_sets_of_both_machines_have_names() -> None:
    assert {x for sets in BUILD.INSTRUCTION_SETS.values() for x in sets} == {*INSTRUCTION_SETS}
