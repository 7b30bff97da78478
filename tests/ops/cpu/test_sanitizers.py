"""The kernels under AddressSanitizer and UndefinedBehaviorSanitizer, in processes of their own.

The kernels of a copy of the package are compiled with both. What they read or write outside of a
tensor, what overflows and what is misaligned ends the process with a report.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import regard
from regard.ops.cpu.instruction_sets import instruction_set
from tests.kernels import require_kernels
from tests.ops.cpu import fuzz
from tests.ops.cpu.compiled import BUILD, compiler, run

require_kernels()

PACKAGE, ROOT = Path(regard.__file__).parent, Path(__file__).parents[3]


FILES = [f"tests/models/test_compiled_step_{x}.py" for x in ("experts", "quantized", "stored")]
"""Tests of what a step reads that `fuzz` does not draw; it draws the arguments of every kernel."""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    """Variables of a process that loads the kernels with sanitizers."""
    libraries = [_runtime("libasan.so"), _runtime("libubsan.so")]
    source = tmp_path_factory.mktemp("sanitized")
    left_out = shutil.ignore_patterns("__pycache__", "libraries")
    shutil.copytree(PACKAGE, source / "regard", ignore=left_out)
    BUILD.build(only=(instruction_set(),), sanitize=True, into=source / "regard/ops/cpu/libraries")
    clean = {k: v for k, v in os.environ.items() if k not in ("PYTEST_ADDOPTS", "COV_CORE_SOURCE")}
    return clean | {
        "PYTHONPATH": f"{source}{os.pathsep}{ROOT}",
        "LD_PRELOAD": " ".join(libraries),
        # Python and torch leave memory to the end of the process
        "ASAN_OPTIONS": "detect_leaks=0",
        "UBSAN_OPTIONS": "print_stacktrace=1",
        "OMP_NUM_THREADS": "1",
    }


def _runtime(name: str) -> str:
    """The path of a sanitizer's library; without it the test is skipped."""
    path = run(*compiler(), f"-print-file-name={name}").strip()
    if not Path(path).is_absolute():
        pytest.skip(f"the compiler {' '.join(compiler())} has no {name}")
    return path


def python(environment: dict[str, str], *command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, *command],
        env=environment,
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
        timeout=1200,
    )


@pytest.mark.full
@pytest.mark.parametrize("cases", ["8", pytest.param("50", marks=pytest.mark.nightly)])
def test_random_arguments(environment: dict[str, str], cases: str) -> None:
    done = python(environment, "-m", "tests.ops.cpu.fuzz", "--cases", cases)
    assert done.returncode == 0, done.stderr[-3000:]
    assert f"{len(fuzz.KERNELS)} kernels, {cases} cases each: right with" in done.stdout


@pytest.mark.full
def test_steps(environment: dict[str, str]) -> None:
    """The quick run of some files, in one process, whose children load the same kernels."""
    # a report is written to the descriptor, which pytest would catch and lose as the process ends
    options = ["-q", "-n", "0", "-p", "no:cacheprovider", "--tb=short", "--capture=sys"]
    done = python(environment, "-m", "pytest", *options, *FILES)
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert " passed" in done.stdout


OUTSIDE = """
import torch, regard
from tests.ops.cpu import fuzz
print(regard.__file__)
draw = fuzz.Draw(0)
draw.dtype, draw.workers = torch.float32, 1
x, w, y = (torch.ones(n) for n in (70, 70, 70))
draw.run("rms_norm", "RmsNorm", 1, {M}, x, w, y, 1e-6, 0.0)
"""


@pytest.mark.full
def test_a_number_outside_is_reported(environment: dict[str, str]) -> None:
    """A negative control: a struct says one number more than the tensors have."""
    assert python(environment, "-c", OUTSIDE.format(M=70)).returncode == 0
    done = python(environment, "-c", OUTSIDE.format(M=71))
    assert done.returncode != 0
    assert "heap-buffer-overflow" in done.stderr
    assert "rms_norm" in done.stderr
    assert not done.stdout.startswith(str(PACKAGE)), "the copy was not imported"
