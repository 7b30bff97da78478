"""Which library a process loads: by its processor, by REGARD_CPU_ISA, or none, with the reason."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard.ops.cpu.instruction_sets import (
    FOLDER,
    INSTRUCTION_SETS,
    NONE,
    VARIABLE,
)
from tests.kernels import require_kernels
from tests.ops.cpu.compiled import BUILD, run

PACKAGE = Path(regard.__file__).parent
ROOT = Path(__file__).parents[3]


def usable() -> list[str]:
    """The sets that this machine can use, as the message about a wrong one lists them."""
    done = child("from regard.ops.cpu.instruction_sets import instruction_set as f; f()", "wrong")
    assert done.returncode == 1
    return done.stderr.strip().rpartition("it can be ")[2].split(", ")


def child(code: str, isa: str | None, source: Path = PACKAGE) -> subprocess.CompletedProcess[str]:
    environment = {k: v for k, v in os.environ.items() if k != VARIABLE}
    environment |= {"PYTHONPATH": f"{source.parent}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1"}
    if isa is not None:
        environment[VARIABLE] = isa
    return subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=False
    )


def said(code: str, isa: str | None, source: Path = PACKAGE) -> list[str]:
    """The lines that a process prints under a value of the variable."""
    done = child(code, isa, source)
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


ASK = """
from regard.ops.cpu import instruction_sets as sets
print(sets.instruction_set())
print(sets.why_none())
"""


def test_the_best_set_is_taken_unless_another_is_named() -> None:
    sets = usable()
    assert sets[-1] == NONE
    assert sets[:-1] == [x for x in INSTRUCTION_SETS if x in sets], "the fastest first"
    assert said(ASK, None)[0] == sets[0]
    assert said(ASK, f" {sets[0]} ")[0] == sets[0]
    for name in sets[:-1]:
        assert said(ASK, name) == [name, "None"]
    assert said(ASK, NONE) == [NONE, f"no compiled kernels: {VARIABLE}={NONE}"]


def test_an_unknown_set_is_refused() -> None:
    done = child(ASK, "x86-64-v9")
    assert done.returncode == 1
    last = done.stderr.splitlines()[-1]
    assert f"KernelLibraryError: {VARIABLE} is 'x86-64-v9'; on this machine it can be" in last


def test_the_command_says_what_runs() -> None:
    tell = "from regard.cli import main; main(['--version'])"
    assert said(tell, NONE)[1] == "compiled CPU kernels: none (REGARD_CPU_ISA=none)"
    for name in usable()[:-1]:
        assert said(tell, name)[1] == f"compiled CPU kernels: {name}"


PLAN = """
import regard, torch
q = torch.ones(1, 2, 4, 8)
print(regard.plan(q, q, q).compiled, regard.plan(*[q.to("meta")] * 3).compiled, sep="|")
"""


@pytest.mark.full
def test_a_plan_says_what_runs() -> None:
    assert said(PLAN, NONE)[-1] == "compiled CPU kernels: none (REGARD_CPU_ISA=none)|"


COMPUTE = """
import sys, torch
from tests.ops.cpu import fuzz
fuzz.assert_cases(["--cases", "12"])
"""


@pytest.mark.full
@pytest.mark.parametrize("name", INSTRUCTION_SETS)
def test_every_set_computes_every_kernel(name: str) -> None:
    """Within the error rule, which `fuzz` applies to random arguments of each entry."""
    if name not in usable():
        pytest.skip(f"no {name} on this machine")
    assert said(COMPUTE, name)[-1].endswith(f"right with {name}")


@pytest.mark.full
def test_without_kernels_everything_is_computed_by_torch() -> None:
    code = """
import torch, regard
from regard.nn.weights import linear
from regard.ops.tokenwise import try_gemv
from regard.ops.tokenwise import silu_product
from regard.ops.tokenwise import rms_norm
x, w = torch.randn(1, 512), torch.randn(512, 512)
linear(x, w, None), rms_norm(x, w[0], 1e-6), silu_product(w, w)
print(try_gemv(x, w, None) is None)
print("".join(regard.load("tiny").generate("Return the", max_tokens=4)))
"""
    assert said(code, NONE)[0] == "True"
    assert said(code, NONE)[1:] == said(code, None)[1:]


@pytest.fixture
def copy(tmp_path: Path) -> Path:
    """The package without its libraries."""
    left_out = shutil.ignore_patterns("__pycache__", "libraries")
    shutil.copytree(PACKAGE, tmp_path / "regard", ignore=left_out)
    return tmp_path / "regard"


@pytest.mark.full
def test_without_libraries_there_is_a_reason(copy: Path) -> None:
    name, why = said(ASK, None, copy)
    assert name == NONE
    assert why.endswith("installed without compiled kernels, where no C++ compiler worked")
    assert "it can be none" in child(ASK, "x86-64-v3", copy).stderr
    twice = "from regard.ops.cpu.library import has_kernels; has_kernels(), has_kernels()"
    assert child(twice, None, copy).stderr.count("UserWarning: no compiled kernels: ") == 1
    assert child(twice, NONE, copy).stderr == ""


@pytest.mark.full
def test_libraries_of_another_machine_are_not_used(copy: Path) -> None:
    folder = copy / "ops/cpu/libraries"
    folder.mkdir()
    for name in ("processor", *INSTRUCTION_SETS):
        (folder / f"{name}.so").write_bytes(b"\x7fELF of another machine")
    name, why = said(ASK, None, copy)
    assert name == NONE
    assert why.endswith("this processor has no instruction set for which kernels were compiled")


@pytest.mark.full
def test_a_library_of_other_sources_is_refused(copy: Path) -> None:
    require_kernels()
    shutil.copytree(FOLDER, copy / "ops/cpu/libraries")
    code = "from regard.ops.cpu.library import library; print(library())"
    assert "CDLL" in said(code, None, copy)[0]
    with (copy / "ops/cpu/csrc/norm.h").open("a") as file:
        file.write("// changed\n")
    done = child(code, None, copy)
    assert "KernelLibraryError: the compiled CPU kernels are not of the C++ sources" in done.stderr
    assert "make kernels" in done.stderr


def test_a_process_imports_no_torch_to_say_what_runs() -> None:
    code = "import sys, regard.ops.cpu.instruction_sets; print('torch' in sys.modules)"
    assert said(code, None) == ["False"]


def test_an_installation_compiles_the_sets_of_its_processor_a_wheel_all_and_others_the_named(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    require_kernels()
    monkeypatch.setattr(BUILD, "compiler", lambda: ["c++"])
    monkeypatch.setattr(BUILD, "object_of", lambda *_: tmp_path)
    monkeypatch.setattr(BUILD, "_link", lambda target, *_: FOLDER / target.name)
    monkeypatch.setattr(BUILD, "machine", lambda: "x86_64")
    every = ["processor", "x86-64-v3", "x86-64-v4", "x86-64-v4-bf16"]
    assert [x.stem for x in BUILD.build(every=True, into=tmp_path)] == every
    own = [x.stem for x in BUILD.build(into=tmp_path)]
    assert own == [x for x in every if x == "processor" or x in usable()]
    named = [x.stem for x in BUILD.build(only=("x86-64-v4",), into=tmp_path)]
    assert named == ["processor", "x86-64-v4"]
    monkeypatch.setattr(BUILD, "_link", lambda *_: Path(__file__))  # no library: not to be asked
    assert len(BUILD.build(into=tmp_path)) == len(every)


def test_what_the_compiler_refuses_is_shown(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("CXX", f"{sys.executable} -c 'raise SystemExit(\"cannot\")'")
    with pytest.raises(
        BUILD.CompilationError, match=r"(?s)processor.cpp.*cannot|linear.cpp.*cannot"
    ):
        BUILD.build(into=tmp_path)
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(BUILD.NoCompilerError, match="no C\\+\\+ compiler was found"):
        BUILD.build(into=tmp_path)


def test_libraries_need_nothing_but_libc() -> None:
    """No symbol of libstdc++, so that a wheel runs with the one that torch loads, or none."""
    require_kernels()
    from tests.ops.cpu.compiled import tool

    for path in sorted(FOLDER.glob("*.so")):
        needed = [
            x.split()[-1] for x in run(tool("objdump"), "-p", path).splitlines() if "NEEDED" in x
        ]
        assert {*needed} <= {"libc.so.6", "libm.so.6"}, path.name
