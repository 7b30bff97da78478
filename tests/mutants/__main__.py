"""`python -m tests.mutants`: says of each mutant whether its tests notice it."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import os
import sys
import tempfile
from collections import Counter
from dataclasses import asdict
from pathlib import Path

from tests.mutants import ROOT, Mutant, commit, read_mutants
from tests.mutants.runs import (
    ELSEWHERE,
    EQUIVALENT,
    KILLED,
    KILLED_BY_FULL,
    SURVIVED,
    MutantRuns,
    Verdict,
)


def main(arguments: list[str]) -> int:
    """Run the mutants that are asked for; 0 if each is killed or equivalent."""
    parser = argparse.ArgumentParser(prog="python -m tests.mutants", description=__doc__)
    parser.add_argument("names", nargs="*", help="beginnings of names, such as caches.ring")
    parser.add_argument("--list", action="store_true", help="print the mutants and run nothing")
    parser.add_argument("--package", help="those of one table, such as caches")
    parser.add_argument("--full", action="store_true", help="all tests for those that survive")
    parser.add_argument("--json", type=Path, metavar="FILE", help="where the results are stored")
    parser.add_argument(
        "--changed",
        action="store_true",
        help="those that FILE has no killed result of, or whose file or tests were changed since",
    )
    parser.add_argument("--trust", action="store_true", help="the tests pass without a mutant")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each mutant")
    parser.add_argument("--folder", type=Path, default=Path(__file__).parent, help="the tables")
    options = parser.parse_args(arguments)
    if options.changed and options.json is None:
        parser.error("--changed needs --json FILE")
    stored = read_results(options.json)
    mutants = [x for x in read_mutants(options.folder) if is_wanted(x, options, stored)]
    if options.list:
        for mutant in mutants:
            print(f"{mutant.name}  {mutant.why_not(ROOT) or mutant.file}")
        return 0
    os.nice(10)
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        runs = MutantRuns(ROOT, Path(folder) / "tree", options.limit)
        runnable = [x for x in mutants if not x.equivalent and not x.why_not(ROOT)]
        if runnable and not options.trust and (failed := runs.failing_tests(runnable)):
            print(f"these tests fail without a mutant: {failed}")
            return 2
        for mutant in mutants:
            verdict = runs.judge(mutant, full=options.full)
            stored[mutant.name] = verdict
            seconds = f"{verdict.seconds:.0f} s"
            print(f"{mutant.name}: {verdict.status}, {seconds} {verdict.why}", flush=True)
            if options.json:
                write_results(options.json, stored)
    return report([stored[mutant.name] for mutant in mutants])


def is_wanted(mutant: Mutant, options: argparse.Namespace, stored: dict[str, Verdict]) -> bool:
    """Whether the command line asks for a mutant."""
    if options.package not in (None, mutant.package):
        return False
    if options.names and not mutant.name.startswith(tuple(options.names)):
        return False
    verdict = stored.get(mutant.name)
    if not options.changed or verdict is None:
        return True
    done = verdict.status in (KILLED, EQUIVALENT) or (
        verdict.status == (KILLED_BY_FULL if options.full else SURVIVED)
    )
    return not done or verdict.digest != mutant.digest(ROOT)


def read_results(path: Path | None) -> dict[str, Verdict]:
    """The stored results by the names of the mutants."""
    if path is None or not path.exists():
        return {}
    rows = json.loads(path.read_text("utf-8"))["rows"]
    return {name: Verdict(**x) for name, x in rows.items()}


def write_results(path: Path, stored: dict[str, Verdict]) -> None:
    """Write the results and how many mutants have each; docs/reliability.md shows the counts."""
    counts = Counter(x.status for x in stored.values())
    facts = {"date": f"{dt.date.today()}", "commit": commit(), "mutants": len(stored), **counts}
    rows = {name: asdict(x) for name, x in sorted(stored.items())}
    path.write_text(json.dumps({**facts, "rows": rows}, indent=1) + "\n", "utf-8")


def report(verdicts: list[Verdict]) -> int:
    """Print how many mutants each verdict has."""
    counts = Counter(verdict.status for verdict in verdicts)
    print(", ".join(f"{n} {status}" for status, n in counts.most_common()) or "no mutant")
    return int(any(counts.keys() - {KILLED, KILLED_BY_FULL, EQUIVALENT, ELSEWHERE}))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
