"""Runs of pytest over mutants, in a copy of the tree: the checkout is never changed."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from tests.mutants import Mutant
from tests.mutants.named_tests import VARIABLE

KILLED, SURVIVED = "killed", "survived"
KILLED_BY_FULL = "killed by the full selection"
NOT_APPLIED, NOT_RUN = "cannot be applied", "no test ran"
EQUIVALENT = "equivalent"


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


def run_tests(
    copy: Path, tests: Iterable[str], options: Sequence[str], limit: float
) -> tuple[int, str]:
    """The exit status of pytest in a copy, and the tests that failed (124: the time is over)."""
    names = [*dict.fromkeys(tests)]
    files = dict.fromkeys(name.partition("::")[0] for name in names)
    environment = os.environ | {"PYTHONPATH": str(copy / "src"), VARIABLE: "\n".join(names)}
    plugin = ["-p", "tests.mutants.named_tests", "-p", "no:cacheprovider"]
    command = [sys.executable, "-m", "pytest", *plugin, "-n", "0", "-q", "-rfE", *options, *files]
    process = subprocess.Popen(
        command,
        cwd=copy,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
    )
    try:
        output = process.communicate(timeout=limit)[0].decode(errors="replace")
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, 9)  # its children, too
        process.communicate()
        return 124, f"not finished after {limit:.0f} s"
    failed = re.findall(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    return process.returncode, ", ".join(failed) or output[-500:]


class MutantRuns:
    """Judges mutants one after the other in one copy."""

    def __init__(self, root: Path, copy: Path, limit: float) -> None:
        self.root, self.copy, self.limit = root, copy, limit
        self.changes = 0
        copy_tree(root, copy)

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
        path = mutant.source(self.copy)
        text, times = path.read_text("utf-8"), path.stat()
        path.write_text(text.replace(mutant.old, mutant.new), "utf-8")
        # Python knows compiled files by time and size: no two versions may share both
        self.changes += 1
        os.utime(path, (times.st_atime, int(times.st_mtime) + self.changes))
        start = time.monotonic()
        try:
            status, why = self._verdict(mutant, full=full)
        finally:
            path.write_text(text, "utf-8")
            os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
        return Verdict(status, why, round(time.monotonic() - start, 1), digest)

    def _verdict(self, mutant: Mutant, *, full: bool) -> tuple[str, str]:
        code, failed = run_tests(self.copy, mutant.tests, ["-x"], self.limit)
        if code in (0, 5) and full:
            code, failed = run_tests(self.copy, mutant.tests, ["-x", "--full"], 4 * self.limit)
            if code in (1, 2, 124):
                return KILLED_BY_FULL, failed
        if code in (0, 5):
            return (SURVIVED, "") if code == 0 else (NOT_RUN, "")
        return (KILLED if code in (1, 2, 124) else NOT_RUN), failed
