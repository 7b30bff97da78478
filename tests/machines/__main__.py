"""`python -m tests.machines`: runs the suite as on other machines, and writes their table."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from tests.machines import COMMANDS, EXIT, ROWS, Row
from tests.mutants import ROOT, commit
from tests.mutants.runs import COMPILED, compile_kernels, copy_tree

ASK = """
import json, platform, torch
from regard.ops.cpu.instruction_sets import describe_kernels
for_cuda = torch.version.cuda is not None and not torch.cuda.is_available()
print(json.dumps([platform.python_version(), torch.__version__, for_cuda, describe_kernels()]))
"""
"""What an interpreter says of itself, in the environment of a row."""

Result = dict[str, Any]


def main(arguments: list[str]) -> int:
    """Run the rows that are asked for; 0 if nothing failed."""
    parser = argparse.ArgumentParser(prog="python -m tests.machines", description=__doc__)
    parser.add_argument("rows", nargs="*", help="beginnings of the names of rows")
    parser.add_argument("--list", action="store_true", help="print the rows and run nothing")
    parser.add_argument("--brief", action="store_true", help="fewer tests for each row")
    parser.add_argument(
        "--tests", action="append", metavar="FILE", help="these tests instead; repeatable"
    )
    parser.add_argument("--ci", action="store_true", help="four rows, with fewer tests")
    parser.add_argument(
        "--python", action="append", default=[], metavar="FILE", help="an interpreter; repeatable"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the table is stored")
    parser.add_argument("--limit", type=float, default=3600, help="seconds for each row")
    options = parser.parse_args(arguments)
    rows = {
        name: row
        for name, row in ROWS.items()
        if (row.ci or not options.ci) and name.startswith(tuple(options.rows) or "")
    }
    if not rows:
        parser.error(f"no row begins with {' or '.join(options.rows)}; --list names them")

    def chosen(row: Row) -> tuple[str, ...]:
        if options.tests:
            return tuple(options.tests)
        return row.brief if options.ci or options.brief else row.all_tests

    if options.list:
        for name, row in rows.items():
            print(f"{name}: {' '.join(chosen(row))} ({', '.join(row.why)})")
        return 0
    if not (ROOT / COMPILED[0]).is_dir():  # git has only the sources
        compile_kernels(ROOT)
    found = json.loads(options.json.read_text("utf-8")) if _is_file(options.json) else {}
    stored = found.get("rows", {})
    failed = []
    for name, row in rows.items():
        result = run_row(row, chosen(row), [sys.executable, *options.python], options.limit)
        figures = ", ".join(f"{key} {x}" for key, x in result.items() if x not in ("", []))
        print(f"{name}: {figures}", flush=True)
        failed += [name] * bool(result["failures"])
        stored[name] = result
        if options.json:
            text = json.dumps(table(stored), indent=1, ensure_ascii=False)
            options.json.write_text(text + "\n", "utf-8")
    print(f"{len(rows)} rows, {len(failed)} with failures" + "".join(f"\n  {x}" for x in failed))
    return int(bool(failed))


def table(stored: dict[str, Result]) -> Result:
    """The results in the order of the rows, with how many rows passed."""
    kept = {name: stored[name] for name in ROWS if name in stored}
    failed = sum(bool(x["failures"]) for x in kept.values())
    absent = sum(bool(x["not_here"]) for x in kept.values())
    counts = {"rows passed": len(kept) - failed - absent, "rows failed": failed}
    counts |= {"rows not possible here": absent, "rows not run": len(ROWS) - len(kept)}
    return {"date": max((x["date"] for x in kept.values()), default=""), **counts, "rows": kept}


def _is_file(path: Path | None) -> bool:
    """Whether there is such a file."""
    return path is not None and path.is_file()


def run_row(row: Row, tests: Sequence[str], pythons: Sequence[str], limit: float) -> Result:
    """What became of one row: its figures, or in `not_here` why this machine cannot make it."""
    start = time.monotonic()
    result = {
        "date": datetime.now(UTC).strftime("%Y-%m-%d"),
        "commit": commit(),
        "tests": " ".join(tests),
        "not_here": "",
        "failures": [],
    }
    with tempfile.TemporaryDirectory(prefix="machines-") as made:
        place = Path(made)
        try:
            machine = _Machine(row, pythons, place)
        except LookupError as missing:
            return result | {"not_here": missing.args[0]}
        except RuntimeError as failure:
            return result | {"failures": [failure.args[0]]}
        try:
            result |= machine.facts | machine.run_commands() | machine.run_tests(tests, limit)
            result["failures"] = [*result.pop("commands_failed"), *result.pop("tests_failed")]
        finally:
            machine.make_writable()
    return result | {"seconds": round(time.monotonic() - start)}


class _Machine:
    """A copy of the checkout, and how a process is started there as the row says."""

    def __init__(self, row: Row, pythons: Sequence[str], place: Path) -> None:
        self.row, self.place = row, place
        self.copy, self.home, self.out = place / row.folder, place / "home", place / "out"
        copy_tree(ROOT, self.copy)
        for folder in (self.home, self.out, self.out / "tmp"):
            folder.mkdir()
        self.prefix = ["sh", "-c", f'umask {row.umask:03o}; exec "$@"', "sh"]
        if row.cores:
            cores = sorted(os.sched_getaffinity(0))[: row.cores]
            self.prefix += [_program("taskset"), "-c", ",".join(map(str, cores))]
        if row.read_only:
            if os.getuid() == 0:  # who can write every file, with these rights
                lost = "-dac_override,-dac_read_search"
                rights = [f"--bounding-set={lost}", f"--inh-caps={lost}"]
                self.prefix += [_program("setpriv"), *rights]
            for path in (self.home, self.copy, *self.copy.rglob("*")):
                path.chmod(path.stat().st_mode & ~0o222)
        self.python, self.facts = self._choose(pythons)

    def _choose(self, pythons: Sequence[str]) -> tuple[str, Result]:
        """The first interpreter that fits the row, and what it says of itself."""
        reasons = []
        for python in pythons:
            done = self.start([python, "-c", ASK], self.out)
            if "KernelLibraryError: " in done.stderr:
                reasons.append(done.stderr.rpartition("KernelLibraryError: ")[2].strip())
                continue
            if done.returncode:
                raise RuntimeError(f"{python} cannot import regard: {done.stderr[-500:]}")
            version, torch, for_cuda, kernels = json.loads(done.stdout)
            if self.row.version and not version.startswith(f"{self.row.version}."):
                reasons.append(f"Python {version}")
            elif self.row.cuda and not for_cuda:
                reasons.append(f"torch {torch}")
            else:
                facts = {"python": version, "torch": torch, "kernels": kernels.rpartition(": ")[2]}
                return python, facts | {"locale": self._locale()}
        raise LookupError("; ".join(dict.fromkeys(reasons)))

    def _locale(self) -> str:
        """Whether the C library has the locale of the row; "" if it names none."""
        name = self.row.environment.get("LC_ALL", "")
        if name in ("", "C"):
            return name
        known = subprocess.run(["locale", "-a"], capture_output=True, text=True, check=False).stdout
        there = name.replace("-", "").lower() in known.lower().split()
        return name if there else f"{name}, which the C library lacks"

    def start(
        self, command: Sequence[str], folder: Path, limit: float = 900, **more: str
    ) -> subprocess.CompletedProcess[str]:
        """Run a command on this machine; at the limit it is ended with its children, as 124."""
        kept = ("PATH", "VIRTUAL_ENV", "LD_LIBRARY_PATH", "SSL_CERT_FILE")
        environment: Mapping[str, str] = {
            **{name: os.environ[name] for name in kept if name in os.environ},
            "HOME": str(self.home),
            "TMPDIR": str(self.out / "tmp"),
            "PYTHONPATH": str(self.copy / "src"),
            **self.row.environment,
            **more,
        }
        with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as err:
            child = subprocess.Popen(
                [*self.prefix, *command],
                cwd=folder,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )
            try:
                status = child.wait(limit)
            except subprocess.TimeoutExpired:
                os.killpg(child.pid, 9)
                child.wait()
                status = 124
            out.seek(0)
            err.seek(0)
            return subprocess.CompletedProcess([*command], status, out.read(), err.read())

    def run_commands(self) -> Result:
        """Run the commands, whose environment nobody pins."""
        failed = []
        for given in COMMANDS:
            words = [x.replace("{out}", str(self.out)) for x in given]
            done = self.start([self.python, "-m", "regard", *words], self.out)
            right = done.returncode in EXIT.get(given[0], (0,)) and done.stdout.strip()
            if right and "--json" in given:
                json.loads(done.stdout)
            if not right or "Traceback" in done.stderr:
                failed.append(f"regard {given[0]}: {done.returncode} {done.stderr[-300:]}")
        passed = len(COMMANDS) - len(failed)
        return {"commands": f"{passed} of {len(COMMANDS)}", "commands_failed": failed}

    def run_tests(self, tests: Sequence[str], limit: float) -> Result:
        """Run the row's tests, and read the last line of pytest."""
        brief = ["-q", "-rfE", "--tb=short", "--color=no", "-p", "no:cacheprovider"]
        done = self.start([self.python, "-m", "pytest", *brief, *tests], self.copy, limit)
        said = done.stdout
        names = re.findall(r"^(?:FAILED|ERROR) (\S+(?:\[.*?\])?)", said, re.MULTILINE)
        counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        last = [x for x in said.splitlines() if re.search(r"\d+ (passed|failed|error)", x)]
        for number, word in re.findall(r"(\d+) (\w+)", last[-1] if last else ""):
            word = "failed" if word.startswith("error") else word
            counts[word] = counts.get(word, 0) + int(number)
        if done.returncode and not names:
            names = [f"pytest ended with {done.returncode}: {(said + done.stderr)[-500:]}"]
        if names:
            (ROOT / "build").mkdir(exist_ok=True)
            (ROOT / "build/machines.log").write_text(said, "utf-8")
        figures = {word: counts[word] for word in ("passed", "failed", "skipped")}
        return figures | {"tests_failed": names}

    def make_writable(self) -> None:
        """Give back the rights that the folder's end needs."""
        if self.row.read_only:
            for path in (self.home, self.copy, *self.copy.rglob("*")):
                path.chmod(path.stat().st_mode | 0o200)


def _program(name: str) -> str:
    """The path of a program that a row needs."""
    path = shutil.which(name)
    if path is None:
        raise LookupError(f"this machine has no {name}")
    return path


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
