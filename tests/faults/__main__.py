"""Writers that are killed, interrupted, or run out of disk: `python -m tests.faults --cases 100`.

Each case forks a process that writes over something old, and stops it: by SIGKILL at a random file
operation or a random moment, by Ctrl-C once or twice within 10 ms, by a full disk at a random file
operation or byte. Afterwards what stands under the name is whole, old or new; the same command then
succeeds, or refuses to overwrite what is new, and leaves nothing else behind. `--json` writes the
counts, which docs/reliability.md shows.
"""

from __future__ import annotations

import argparse
import datetime as dt
import errno
import json
import os
import random
import resource
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from regard.errors import RegardError
from regard.files.atomic_write import WRITING_PREFIX
from regard.standard_output import run_program
from tests.faults.writers import NEW, NOTHING, OLD, WRITERS, Writer

FAULTS = ("kill", "disk full", "Ctrl-C", "Ctrl-C twice")
CHANGES = ("os.rename", "os.mkdir", "os.remove", "os.rmdir", "os.chmod", "os.truncate")
WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
SECONDS = 120
"""No case takes so long, on a busy machine neither."""


def watch(act: Callable[[str], None]) -> None:
    """Call a function before each operation of this process that changes a file here."""
    here = str(Path.cwd())

    def hook(event: str, given: tuple[object, ...]) -> None:
        if event == "open":
            changes = isinstance(given[2], int) and given[2] & WRITES
        else:
            changes = event in CHANGES
        if changes and str(given[0]).startswith((here, "out", "run", "page", ".writing")):
            act(event)

    sys.addaudithook(hook)


def in_child(writer: Writer, begin: Callable[[], None], log: Path) -> int:
    """Fork a process that writes, and return its number."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # until the writer begins
    child = os.fork()
    if child:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        return child
    code = 1
    with suppress(KeyboardInterrupt):  # one that came when the writer had ended
        try:
            signal.signal(signal.SIGINT, signal.default_int_handler)
            heard = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(heard, 1)
            os.dup2(heard, 2)
            begin()
            code = run_program(lambda: _written(writer))
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _written(writer: Writer) -> int:
    try:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
        code = writer.write()
        return code if isinstance(code, int) else 0
    except RegardError as error:
        print(error, file=sys.stderr)
        return 1


def end(child: int, writer: Writer) -> tuple[int, float]:
    """Wait for a process, as negative numbers signals; a server is interrupted when its file is
    new.
    """
    begin = time.monotonic()
    served = False
    while time.monotonic() < begin + SECONDS:
        done, status, _ = os.wait4(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status), time.monotonic() - begin
        if writer.serves and not served:
            with suppress(Exception):  # it is not there yet
                served = writer.found() == NEW and not being_written()
            if served:
                os.kill(child, signal.SIGINT)
        time.sleep(0.002)
    os.kill(child, signal.SIGKILL)
    os.wait4(child, 0)
    return -1000, SECONDS


def being_written() -> list[str]:
    """Return the temporary files and folders here."""
    return [str(p) for p in Path().rglob("*") if p.name.startswith((WRITING_PREFIX, "tmp"))]


def _is_done(writer: Writer, code: int) -> bool:
    """Whether a writer ended as it does without a fault: a server may be interrupted before it
    listens.
    """
    return code == 0 or (writer.serves and code == 130)


def measure(writer: Writer, log: Path) -> tuple[int, float]:
    """Number of file operations of a whole run, and its seconds."""
    counted = Path("..", "operations").resolve()
    counted.write_bytes(b"")

    def begin() -> None:
        place = os.open(counted, os.O_WRONLY | os.O_APPEND)

        def note(_: str) -> None:
            os.write(place, b"x")

        watch(note)

    code, seconds = end(in_child(writer, begin, log), writer)
    assert _is_done(writer, code), log.read_text()
    return counted.stat().st_size, seconds


def disturb(
    writer: Writer, fault: str, whole: tuple[int, float], log: Path, draw: random.Random
) -> int:
    """Run a writer with a fault, and return its exit code."""
    operations, seconds = whole
    at = draw.randint(1, operations)
    moment = draw.uniform(0, 1.1 * seconds)
    by_operation = draw.random() < 0.5
    count = 0

    def act(event: str) -> None:
        nonlocal count
        count += 1
        if count == at:
            if event in ("os.remove", "os.rmdir", "os.chmod") and fault == "disk full":
                return  # these need no space
            if fault == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def begin() -> None:
        if fault == "disk full" and not by_operation:
            signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
            size = draw.choice((0, 1, 40, 300, 2000, 20_000, 200_000))
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        elif by_operation and fault in ("kill", "disk full"):
            watch(act)

    if fault == "disk full":  # the log is not on that disk
        log.unlink(missing_ok=True)
        os.mkfifo(log)
        return _with_pipe(writer, begin, log)
    child = in_child(writer, begin, log)
    if not (fault == "kill" and by_operation):
        _signal(child, fault, moment, draw)
    return end(child, writer)[0]


def _with_pipe(writer: Writer, begin: Callable[[], None], log: Path) -> int:
    """Read what a process says through a pipe, which no limit of files touches."""
    reader = os.open(log, os.O_RDONLY | os.O_NONBLOCK)
    code = end(in_child(writer, begin, log), writer)[0]
    said = os.read(reader, 1 << 16)
    os.close(reader)
    log.unlink()
    log.write_bytes(said)
    return code


def _signal(child: int, fault: str, moment: float, draw: random.Random) -> None:
    time.sleep(moment)
    number = signal.SIGKILL if fault == "kill" else signal.SIGINT
    for _ in range(2 if fault == "Ctrl-C twice" else 1):
        os.kill(child, number)
        time.sleep(draw.uniform(0, 0.01))


def case(
    name: str, fault: str, whole: tuple[int, float], folder: Path, draw: random.Random
) -> tuple[str, list[str]]:
    """One fault: what stood there afterwards, and everything that was not as it should be."""
    writer, log = WRITERS[name], folder / "log"
    place = folder / f"{name.replace(' ', '')}-{draw.getrandbits(40):x}"
    place.mkdir()
    os.chdir(place)
    writer.before()
    bad = []
    code = disturb(writer, fault, whole, log, draw)
    said = log.read_text(errors="replace")
    allowed = {
        "kill": (0, -signal.SIGKILL),
        "disk full": (0, 1),
        "Ctrl-C": (0, 130),
        "Ctrl-C twice": (0, 130, -signal.SIGINT),
    }
    if code not in allowed[fault] and not _is_done(writer, code):
        bad.append(f"ended with {code}: {said[-600:]!r}")
    # Python itself reports, and loses, an interrupt of a finalizer
    if "Traceback" in said and "Exception ignored in" not in said:
        bad.append(f"a traceback: {said[-1500:]}")
    try:
        found = writer.found()
    except Exception as error:
        found = "torn"
        bad.append(f"what stands there is torn: {type(error).__name__}: {error}")
    if fault == "disk full" and code == 0 and found != NEW:
        bad.append(f"it ended with 0 and wrote nothing: {said[-300:]!r}")
    if writer.serves:  # else the next run would be interrupted before it writes
        Path("run.safetensors").unlink(missing_ok=True)
    code, _ = end(in_child(writer, lambda: None, log), writer)
    if found == NEW and writer.never_overwrites:
        if code != 1 or "never overwrites" not in log.read_text():
            bad.append(f"the next run, which has nothing to do, ended with {code}")
    elif not _is_done(writer, code):
        bad.append(f"the next run ended with {code}: {log.read_text()[-600:]!r}")
    elif (now := writer.found()) != NEW:
        bad.append(f"the next run left what is {now}")
    if left := being_written():
        bad.append(f"left behind: {left}")
    os.chdir(folder)
    return found, bad


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--cases",
        type=int,
        default=10,
        help="of each writer that is killed; a third of it of each other fault",
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", default="", help="a writer")
    parser.add_argument("--json", type=Path, help="where the counts are written")
    given = parser.parse_args()
    out = given.json and given.json.resolve()
    torch.set_num_threads(1)
    failures = 0
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root).resolve()
        for name, writer in WRITERS.items():
            if given.only not in name:
                continue
            whole = _prepared(name, writer, folder)
            for fault in FAULTS:
                found: Counter[str] = Counter()
                wrong = 0
                for number in range(given.cases if fault == "kill" else -(-given.cases // 3)):
                    draw = random.Random(f"{given.seed} {number} {name} {fault}")
                    there, bad = case(name, fault, whole, folder, draw)
                    found[there] += 1
                    wrong += bool(bad)
                    for line in bad:
                        print(f"{name}, {fault}, case {number}: {line}", flush=True)
                failures += wrong
                counts = {kind: found[kind] for kind in (NOTHING, OLD, NEW, "torn")}
                rows.append({"writer": name, "fault": fault, "wrong": wrong, **counts})
                print(f"{name}, {fault}: {counts}, {wrong} wrong", flush=True)
    print(f"{sum(_cases(row) for row in rows)} cases, {failures} wrong")
    if out:
        _store(out, rows)
    os.chdir("/")
    sys.exit(1 if failures else 0)


def _cases(row: dict[str, Any]) -> int:
    """Number of cases of a row."""
    return sum(row[kind] for kind in (NOTHING, OLD, NEW, "torn"))


def _store(path: Path, rows: list[dict[str, Any]]) -> None:
    """Write the counts; those of writers that were not run stay."""
    before = json.loads(path.read_text("utf-8"))["rows"] if path.exists() else []
    run = {row["writer"] for row in rows}
    rows = [row for row in before if row["writer"] not in run] + rows
    order = list(WRITERS)
    rows.sort(key=lambda row: (order.index(row["writer"]), FAULTS.index(row["fault"])))
    path.write_text(json.dumps({"date": f"{dt.date.today()}", "rows": rows}, indent=1) + "\n")


def _prepared(name: str, writer: Writer, folder: Path) -> tuple[int, float]:
    """A whole run, so that imports and compiled parts are there, and the numbers of a second."""
    whole = (0, 0.0)
    for turn in range(2):
        place = folder / f"{name.replace(' ', '')}-whole-{turn}"
        place.mkdir()
        os.chdir(place)
        writer.before()
        if turn == 0 and not writer.serves:
            with _silence():
                writer.write()
        else:
            whole = measure(writer, folder / "log")
    return whole


class _silence:  # noqa: N801
    """Output of a block goes nowhere."""

    def __enter__(self) -> None:
        sys.stdout.flush()
        self._before = os.dup(1), os.dup(2)
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, 1)
        os.dup2(nowhere, 2)

    def __exit__(self, *problem: object) -> None:
        sys.stdout.flush()
        os.dup2(self._before[0], 1)
        os.dup2(self._before[1], 2)


if __name__ == "__main__":
    main()
