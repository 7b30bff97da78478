"""The kernels without Python, compiled by other compilers and for other processors, which an
emulator runs: `driver.cpp` compares them with loops in double.
"""

from __future__ import annotations

import os
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from regard.ops.cpu.instruction_sets import INSTRUCTION_SETS, SOURCES
from tests.ops.cpu.compiled import BUILD, compiler, run, tool
from tests.ops.cpu.test_library import usable

DRIVER, OBJECTS = Path(__file__).with_name("driver.cpp"), Path("build/kernels").absolute()
PRINTED = "f32: 0 failures\nbf16: 0 failures\nfp16: 0 failures\n"


def driver(command: list[str], flags: list[str], folder: Path, sources: Path = SOURCES) -> Path:
    """The driver and the kernels as a program; objects of the same sources are kept."""
    program, line = folder / "driver", [*command, *BUILD.FLAGS, "-O1", *flags, "-I", str(SOURCES)]
    units = [x for x in sorted(sources.glob("*.cpp")) if x.stem not in ("processor", "stamp")]
    OBJECTS.mkdir(parents=True, exist_ok=True)
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        made = [*pool.map(lambda unit: BUILD.object_of(unit, line, OBJECTS), [DRIVER, *units])]
    run(*command, *flags, *made, "-o", program)
    return program


COMPILERS = {"x86-64-v3": "g++-11", "x86-64-v4": "", "x86-64-v4-bf16": "clang++"}
"""One of three compilers for each set, the default one where there is no name: what the sets share
sees all of them, and `test_every_set_computes_every_kernel` each set with the default one.
"""


@pytest.mark.full
@pytest.mark.parametrize(("name", "other"), COMPILERS.items())
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


@pytest.mark.nightly
@pytest.mark.full
def test_a_wrong_number_is_noticed(tmp_path: Path) -> None:
    """A negative control: a product with twice its gate, in a copy of one source."""
    copy = tmp_path / "csrc"
    shutil.copytree(SOURCES, copy)
    source = copy / "linear.cpp"
    text, right = source.read_text("utf-8"), "silu(load(gate + i))"
    assert text.count(right) == 1
    source.write_text(text.replace(right, f"2.0f * {right}"))
    flags = next(iter(BUILD.INSTRUCTION_SETS[BUILD.machine()].values()))  # every processor has them
    with pytest.raises(AssertionError, match="gated_product_f32: number"):
        run(driver(compiler(), flags, tmp_path, copy))


def test_every_set_has_a_name_and_a_compiler() -> None:
    assert COMPILERS.keys() == BUILD.INSTRUCTION_SETS["x86_64"].keys()
    assert {x for sets in BUILD.INSTRUCTION_SETS.values() for x in sets} == {*INSTRUCTION_SETS}
