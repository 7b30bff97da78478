"""Runs of pytest over mutants, in a copy of the tree: the checkout is never changed.

A run is a fork of this process, which has imported what no mutant changes: the half of the time.
"""

from __future__ import annotations

import importlib
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NoReturn

from tests.mutants import Mutant
from tests.mutants.named_tests import VARIABLE

KILLED, SURVIVED = "killed", "survived"
KILLED_BY_FULL = "killed by the full selection"
NOT_APPLIED, NOT_RUN = "cannot be applied", "no test ran"
ELSEWHERE = "runs on other processors"
EQUIVALENT = "equivalent"
TIMED_OUT = 124
IMPORTED_BEFORE = ("numpy", "torch._inductor", "beartype", "safetensors")
"""What takes long to import and is no plugin of pytest."""
KERNEL_SOURCES = Path("src/regard/ops/cpu/csrc")
"""The folder of the C++ sources, which are compiled again for a mutant in them."""
COMPILED = ("src/regard/ops/cpu/libraries", "build/kernels")
"""What git ignores and a copy needs: the CPU kernels, and the objects that they are linked from."""


@dataclass(frozen=True)
class Verdict:
    """What became of a mutant: why is the test that failed, or the reason."""

    status: str
    why: str = ""
    seconds: float = 0.0
    digest: str = ""


def copy_tree(root: Path, copy: Path) -> None:
    """Copy what git has or would add, with the times of the files."""
    listed = ["git", "-C", str(root), "ls-files", "-z", "-c", "-o", "--exclude-standard"]
    names = subprocess.run(listed, check=True, capture_output=True).stdout
    for name in filter(None, names.decode().split("\0")):
        if (root / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(root / name, copy / name)
    for name in COMPILED:
        if (root / name).is_dir():
            shutil.copytree(root / name, copy / name)


def compile_kernels(copy: Path) -> str:
    """Compile the CPU kernels of a copy, of which git has only the sources; "" or what failed."""
    script = copy / KERNEL_SOURCES / "build.py"
    done = subprocess.run([sys.executable, script], capture_output=True, text=True, check=False)
    return "" if done.returncode == 0 else done.stderr[-500:]


def run_tests(
    copy: Path, tests: Iterable[str], options: Sequence[str], limit: float
) -> tuple[int, str]:
    """The exit status of pytest in a copy, and the tests that failed."""
    names, log = [*dict.fromkeys(tests)], copy.parent / "log"
    child = os.fork()
    if child == 0:
        _run_pytest(copy, names, options, log)
    end, status = time.monotonic() + limit, None
    while status is None and time.monotonic() < end:
        done, code = os.waitpid(child, os.WNOHANG)
        status = os.waitstatus_to_exitcode(code) if done else time.sleep(0.1)
    if status is None:
        os.killpg(child, signal.SIGKILL)  # its children, too
        os.waitpid(child, 0)
        return TIMED_OUT, f"not finished after {limit:.0f} s"
    output = log.read_text("utf-8", errors="replace")
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return status, ", ".join(failed) or output[-500:]


def _run_pytest(copy: Path, names: list[str], options: Sequence[str], log: Path) -> NoReturn:
    """Become a process that runs pytest in a copy, as if it had been started there."""
    status = 70
    try:
        os.setsid()
        os.chdir(copy)
        with log.open("wb") as file, Path(os.devnull).open("rb") as nothing:
            os.dup2(nothing.fileno(), 0)
            os.dup2(file.fileno(), 1)
            os.dup2(file.fileno(), 2)
        sys.dont_write_bytecode = False  # the copy is compiled once
        os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
        os.environ |= {"PYTHONPATH": str(copy / "src"), VARIABLE: "\n".join(names)}
        sys.path[:0] = [str(copy), str(copy / "src")]
        for name in [x for x in sys.modules if x.partition(".")[0] in ("tests", "regard")]:
            del sys.modules[name]  # those of the copy take their place
        plugins = ["-p", "tests.mutants.named_tests", "-p", "no:cacheprovider"]
        brief = ["-n", "0", "-q", "-rfE", "--tb=no", "--assert=plain"]
        files = dict.fromkeys(name.partition("::")[0] for name in names)
        import pytest

        status = int(pytest.main([*plugins, *brief, *options, *files]))
        sys.stdout.flush()
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(status)


class MutantRuns:
    """Judges mutants one after the other in one copy."""

    def __init__(self, root: Path, copy: Path, limit: float) -> None:
        self.root, self.copy, self.limit = root, copy, limit
        self.changes = 0
        copy_tree(root, copy)
        compile_kernels(copy)
        os.environ["OMP_NUM_THREADS"] = "1"  # a process with threads cannot be forked
        for name in IMPORTED_BEFORE:
            importlib.import_module(name)

    def failing_tests(self, mutants: Iterable[Mutant]) -> str:
        """Those of the mutants' tests that fail without a mutant; "" if there are none."""
        tests = [test for mutant in mutants for test in mutant.tests]
        status, failed = run_tests(self.copy, tests, [], 60 * self.limit)
        return "" if status == 0 else failed

    def judge(self, mutant: Mutant, *, full: bool) -> Verdict:
        """Run the quick selection of a mutant's tests and, if full, all of them if it survives."""
        digest = mutant.digest(self.root)
        if mutant.equivalent:
            return Verdict(EQUIVALENT, mutant.equivalent, 0.0, digest)
        if why := mutant.why_not(self.root):
            return Verdict(NOT_APPLIED, why, 0.0, digest)
        if mutant.compiled_for:
            from regard.ops.cpu.instruction_sets import instruction_set

            if not instruction_set().startswith(mutant.compiled_for):
                return Verdict(ELSEWHERE, f"here are kernels of {instruction_set()}", 0.0, digest)
        path = mutant.source(self.copy)
        text, times = path.read_text("utf-8"), path.stat()
        path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
        # Python knows compiled files by time and size: no two versions may share both
        self.changes += 1
        os.utime(path, (times.st_atime, int(times.st_mtime) + self.changes))
        start, compiled = time.monotonic(), self.copy / KERNEL_SOURCES in path.parents
        try:
            if compiled and (why := compile_kernels(self.copy)):
                return Verdict(NOT_APPLIED, why, 0.0, digest)
            status, why = self._verdict(mutant, full=full)
        finally:
            path.write_text(text, "utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
            if compiled:
                compile_kernels(self.copy)
        return Verdict(status, why, round(time.monotonic() - start, 1), digest)

    def _verdict(self, mutant: Mutant, *, full: bool) -> tuple[str, str]:
        code, failed = run_tests(self.copy, mutant.tests, ["-x"], self.limit)
        if code in (0, 5) and full:
            code, failed = run_tests(self.copy, mutant.tests, ["-x", "--full"], 4 * self.limit)
            if code in (1, 2, TIMED_OUT):
                return KILLED_BY_FULL, failed
        if code in (0, 5):
            return (SURVIVED, "") if code == 0 else (NOT_RUN, "")
        return (KILLED if code in (1, 2, TIMED_OUT) else NOT_RUN), failed
