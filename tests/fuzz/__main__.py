"""Thousands of damaged files: `python -m tests.fuzz --cases 5000 --seed 0`. Prints what was not as
it should be.
"""

from __future__ import annotations

import argparse
import math
import random
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from tests.fuzz import box, mutations, targets


def cases(
    root: Path, count: int, seed: int, only: str = ""
) -> Iterator[tuple[int, str, str, box.Outcome]]:
    """Number, target's name, what was damaged, and the outcome of each case, targets in turn."""
    chosen = [
        (name, target, folder) for name, target, folder in targets.whole(root / "whole", only)
    ]
    for number in range(count):
        name, target, source = chosen[number % len(chosen)]
        yield (
            number,
            name,
            *case(root / "case", name, target, source, random.Random(f"{seed} {number} {name}")),
        )


def case(
    folder: Path, name: str, target: targets.Target, source: Path, draw: random.Random
) -> tuple[str, box.Outcome]:
    """One damaged copy of whole files: what was damaged, and the outcome."""
    targets.copy(source, folder)
    files = target.files or tuple(
        str(p.relative_to(folder)) for p in sorted(folder.rglob("*")) if p.is_file()
    )
    file = folder / draw.choice(files)
    done = mutations.change(file, draw)
    if target.sealed and done == "content" and draw.random() < 0.7:
        mutations.seal(file.parent)
    return f"{file.relative_to(folder)} {done}", box.run(lambda: target.read(folder))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cases", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="")
    parser.add_argument(
        "--seconds", type=float, default=math.inf, help="start no case after so long"
    )
    given = parser.parse_args()
    kinds: Counter[str] = Counter()
    bad: Counter[str] = Counter()
    slowest = 0.0
    end = time.monotonic() + given.seconds
    with tempfile.TemporaryDirectory() as root:
        for number, name, done, found in cases(Path(root), given.cases, given.seed, given.only):
            kinds[found.kind] += 1
            slowest = max(slowest, found.seconds)
            if found.kind not in box.GOOD:
                bad[f"{name.split()[0]}: {found.kind}"] += 1
                print(
                    f"{number} {name}: {done}: {found.kind} {found.seconds:.1f} s "
                    f"{found.says!r:.330}",
                    flush=True,
                )
            if time.monotonic() > end:
                break
    print(f"{kinds.total()} cases: {dict(kinds)}; slowest {slowest:.1f} s")
    for what, n in sorted(bad.items()):
        print(f"  {what}: {n}")
    sys.exit(1 if bad else 0)


if __name__ == "__main__":
    main()
