"""Damaged files, chosen by the coverage that they reach: `python -m tests.fuzz.guided`.

atheris (libFuzzer) counts the branches of regard that a case takes, and goes on from the cases that
reached new ones. A case is a recipe: a reader of `targets`, one of its files, and the seeds of the
damage that is done to it in turn, so that the kept corpus, a line a case, stays small and readable.
Each case may take 2 seconds of the processor and 200 MiB above its files, and may raise the
package's own errors only. `--keep` writes the corpus again, `--json` the counts, which
docs/reliability.md shows.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime as dt
import faulthandler
import io
import json
import os
import random
import re
import resource
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

CORPUS = Path(__file__).with_name("corpus.txt")
SECONDS = 2.0
MEMORY = 200 << 20
MAX_SEEDS = 6
"""Damages of one file in turn."""


def encode(target: int, file: int, seeds: list[int]) -> bytes:
    """A recipe as bytes: a target, a file, and four bytes for each seed."""
    return bytes([target, file]) + b"".join(seed.to_bytes(4, "little") for seed in seeds)


def decode(data: bytes) -> tuple[int, int, list[int]]:
    """The recipe of any bytes."""
    padded = data + bytes(2)
    whole = range(2, len(data) - 3, 4)
    seeds = [int.from_bytes(data[at : at + 4], "little") for at in whole]
    return padded[0], padded[1], seeds[:MAX_SEEDS]


def mutate(data: bytes, _size: int, seed: int) -> bytes:
    """A recipe near another: one damage more, less or other, or another file."""
    draw = random.Random(seed)
    target, file, seeds = decode(data)
    how = draw.random()
    if how < 0.15:
        target, file, seeds = draw.randrange(256), draw.randrange(256), []
    elif how < 0.3:
        file, seeds = draw.randrange(256), []
    elif how < 0.6:
        seeds = seeds[:-1]
    return encode(target, file, [*seeds[: MAX_SEEDS - 1], draw.getrandbits(32)])


def read_corpus(names: list[str]) -> list[bytes]:
    """The kept recipes; a target that is gone is left out."""
    lines = CORPUS.read_text("utf-8").splitlines() if CORPUS.exists() else []
    found = []
    for line in lines:
        name, file, *seeds = line.split("|")
        if name in names:
            found.append(encode(names.index(name), int(file), [int(seed, 16) for seed in seeds]))
    return found


def write_corpus(names: list[str], cases: list[bytes]) -> None:
    """Write recipes, sorted, a line each."""
    lines = set()
    for data in cases:
        target, file, seeds = decode(data)
        parts = [names[target % len(names)], str(file), *(f"{seed:x}" for seed in seeds)]
        lines.add("|".join(parts))
    CORPUS.write_text("".join(f"{line}\n" for line in sorted(lines)), "utf-8")


class Fuzzer:
    """Runs recipes in this process, and counts what came of them."""

    def __init__(self, root: Path, only: str) -> None:
        from tests.fuzz import targets

        self.targets = list(targets.whole(root / "whole", only))
        self.names = [name for name, _, _ in self.targets]
        self.case, self.now = root / "case", root / "now"
        self.counts: Counter[str] = Counter()
        self.bad: dict[str, str] = {}
        self.slowest = 0.0

    def run(self, data: bytes) -> None:
        """One recipe: damage a file, read it, and note what should not be."""
        from regard.errors import RegardError
        from tests.fuzz import box, mutations, targets

        number, file_number, seeds = decode(data)
        name, target, source = self.targets[number % len(self.targets)]
        recipe = "|".join([name, str(file_number), *(f"{x:x}" for x in seeds)])
        self.now.write_text(recipe)  # if the process dies, this is why
        targets.copy(source, self.case)
        files = target.files or tuple(
            str(p.relative_to(source)) for p in sorted(source.rglob("*")) if p.is_file()
        )
        file = self.case / files[file_number % len(files)]
        for seed in seeds:
            draw = random.Random(seed)
            try:
                if mutations.change(file, draw) != "content":
                    break
            except Exception:  # what was damaged before cannot always be damaged again
                break
            if target.sealed and draw.random() < 0.7:
                mutations.seal(file.parent)
        kind, said, begin = "loaded", "", time.process_time()
        allowed = MEMORY + sum(
            p.stat().st_blocks * 512 for p in self.case.rglob("*") if p.is_file()
        )
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (used + allowed, resource.RLIM_INFINITY))
        heard = io.StringIO()
        try:
            with (
                contextlib.redirect_stderr(heard),
                contextlib.redirect_stdout(heard),
                warnings.catch_warnings(),
            ):
                warnings.simplefilter("ignore")
                target.read(self.case)
        except RegardError as error:
            kind, said = "refused", str(error)
            if box.RAW.search(said) or len(said) > box.LONGEST:
                kind = "raw"
        except MemoryError:
            kind, said = "memory", box._where("MemoryError")
        except Exception as error:
            text = f"{type(error).__name__}: {error!s:.200}"
            short = "not enough memory" in text or "allocate" in text
            kind, said = "memory" if short else "foreign", box._where(text)
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY,) * 2)
        seconds = time.process_time() - begin
        self.slowest = max(self.slowest, seconds)
        if kind in box.GOOD and seconds > SECONDS:
            kind, said = "slow", f"{seconds:.1f} s"
        self.counts[kind] += 1
        # one report for each place of the code
        place = f"{kind} {name.split()[0]} {said.rpartition(' at ')[2] if kind != 'slow' else ''}"
        if kind not in box.GOOD and place not in self.bad:
            self.bad[place] = f"{recipe}: {kind}: {said:.400}"
            print(f"FOUND {self.bad[place]!r}", file=sys.__stderr__, flush=True)


def child(root: Path, limit: str, only: str, seed: int) -> None:
    """Fuzz in this process, until libFuzzer ends it; the counts are written every few seconds."""
    import atheris

    with atheris.instrument_imports(include=["regard"], enable_loader_override=False):
        from tests.fuzz import targets  # noqa: F401  (imports all of regard that reads files)
    fuzzer = Fuzzer(root, only)
    kept = root / "corpus"
    kept.mkdir()
    given = read_corpus(fuzzer.names) or [encode(n, 0, []) for n in range(len(fuzzer.names))]
    for number, data in enumerate(given):
        (kept / f"{number:06d}").write_bytes(data)
    told, known = time.monotonic(), 0

    def one(data: bytes) -> None:
        nonlocal told, known
        fuzzer.run(data)
        if time.monotonic() - told > 2 or len(fuzzer.bad) > known:
            told, known = time.monotonic(), len(fuzzer.bad)
            facts = dict(fuzzer.counts), list(fuzzer.bad.values()), fuzzer.slowest, fuzzer.names
            (root / "facts.new").write_text(json.dumps(facts))
            (root / "facts.new").replace(root / "facts.json")

    options = [
        limit,
        f"-seed={seed}",
        "-max_len=26",
        "-timeout=120",
        "-rss_limit_mb=0",
        "-handle_segv=0",  # faulthandler says which line of Python
    ]
    options += ["-len_control=0", "-print_final_stats=1", f"-artifact_prefix={root}/"]
    faulthandler.enable()
    atheris.Setup(["guided", *options, str(kept)], one, custom_mutator=mutate)
    atheris.Fuzz()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=int, default=120)
    parser.add_argument("--cases", type=int, help="so many cases, instead of a time")
    parser.add_argument(
        "--seed", type=int, default=0, help="what the cases depend on; 0 draws one (default)"
    )
    parser.add_argument("--only", default="", help="a part of the name of targets")
    parser.add_argument("--keep", action="store_true", help="write the corpus again")
    parser.add_argument("--json", type=Path, help="where the counts are written")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.child:
        limit = f"-max_total_time={given.seconds}"
        if given.cases is not None:
            limit = f"-runs={given.cases}"
        child(given.child, limit, given.only, given.seed)
        return
    with tempfile.TemporaryDirectory(dir="/dev/shm" if Path("/dev/shm").is_dir() else None) as root:
        command = [sys.executable, "-m", "tests.fuzz.guided", "--child", root]
        command += ["--seconds", str(given.seconds), "--only", given.only]
        command += ["--seed", str(given.seed)]
        if given.cases is not None:
            command += ["--cases", str(given.cases)]
        fixed = {"OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0"}
        done = subprocess.run(command, env=os.environ | fixed, stderr=subprocess.PIPE, text=True)
        facts = _facts(Path(root), done, keep=given.keep)
    print(json.dumps(facts, indent=1))
    if given.json:
        given.json.write_text(json.dumps(facts, indent=1) + "\n", "utf-8")
    sys.exit(1 if facts["found"] else 0)


def _facts(root: Path, done: subprocess.CompletedProcess[str], *, keep: bool) -> dict[str, Any]:
    """What a run did; a process that died is something that was found."""
    if not (root / "facts.json").exists():
        sys.exit(done.stderr[-3000:])
    counts, bad, slowest, names = json.loads((root / "facts.json").read_text())
    if done.returncode:
        recipe = (root / "now").read_text()
        bad.append(f"{recipe}: ended with {done.returncode}: {done.stderr[-1500:]}")
    cases = [path.read_bytes() for path in sorted((root / "corpus").iterdir())]
    covered = re.findall(r"cov: (\d+) ft: (\d+)", done.stderr)
    if keep:
        write_corpus(names, cases)
    return {
        "date": f"{dt.date.today()}",
        "cases": sum(counts.values()),
        "counts": counts,
        "readers": len(names),
        "branches": int(covered[-1][0]) if covered else 0,
        "corpus": len(cases),
        "slowest_seconds": round(slowest, 2),
        "found": bad,
    }


if __name__ == "__main__":
    main()
