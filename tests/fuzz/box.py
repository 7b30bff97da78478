"""One case in a process of its own, bounded in time and memory: what came of it, whatever it
did.
"""

from __future__ import annotations

import faulthandler
import io
import json
import os
import re
import resource
import select
import signal
import time
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import dataclass
from pathlib import Path

import torch

CPU_SECONDS = 20
"""Processor time of a case: what needs more is a hang. A valid load of another dtype may compile a
kernel first.
"""
WALL_SECONDS = 60
"""Time of a case. Generous, for a busy machine."""
IDLE_SECONDS = 5
"""How long a case may sleep without any processor time: it waits for a pipe that nobody writes."""
MEMORY = 1 << 30
"""Bytes of address space that a case may add to those of the process that it is forked from."""
LONGEST = 4000
"""Letters of an error message."""
RAW = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2066-\u2069\ufeff]")
"""What must not reach a terminal out of a file: control characters but tabs and line ends, and
direction marks.
"""

GOOD = ("loaded", "refused")


@dataclass(frozen=True)
class Outcome:
    """What a case did.

    kind: "loaded" or "refused", which are right; "foreign", an error that is not the package's;
        "hang"; "memory"; "crash"; "raw", where the message would bring control characters to a
        terminal or is too long.
    says: the error, cut.
    seconds: processor time of the case.
    """

    kind: str
    says: str
    seconds: float


def run(work: Callable[[], object], idle_seconds: int = IDLE_SECONDS) -> Outcome:
    """Fork, bound, work, and tell."""
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reader)
        found = {"kind": "crash", "says": ""}
        try:
            _bound()
            found = _told(work)
        except BaseException as error:
            found = {"kind": "foreign", "says": f"{type(error).__name__}: {error!s:.200}"}
        finally:
            os.write(writer, json.dumps(found).encode()[:60000])
            os._exit(0)
    os.close(writer)
    told, status, seconds = _wait(child, reader, idle_seconds)
    os.close(reader)
    if told:
        return Outcome(**json.loads(told), seconds=seconds)
    if status == -signal.SIGXCPU or status == -signal.SIGKILL:
        return Outcome("hang", f"killed by signal {-status}", seconds)
    return Outcome("crash", f"ended with {status}", seconds)


def _bound() -> None:
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, used + MEMORY))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_SECONDS, CPU_SECONDS + 1))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 26, 1 << 26))
    torch.set_num_threads(1)
    faulthandler.disable()  # a crash is told by the parent


def _told(work: Callable[[], object]) -> dict[str, str]:
    from regard.errors import RegardError

    heard = io.StringIO()
    try:
        with redirect_stderr(heard), redirect_stdout(heard), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            work()
    except RegardError as error:
        said = str(error)
        raw = RAW.search(said)
        if raw or len(said) > LONGEST:
            why = f"{raw[0]!r}" if raw else f"{len(said)} letters"
            return {"kind": "raw", "says": f"{why} in {said!r:.200}"}
        return {"kind": "refused", "says": said[:300]}
    except MemoryError:
        return {"kind": "memory", "says": _where("MemoryError")}
    except BaseException as error:
        said = f"{type(error).__name__}: {error!s:.200}"
        short = "not enough memory" in said or "allocate" in said
        return {"kind": "memory" if short else "foreign", "says": _where(said)}
    return {"kind": "loaded", "says": ""}


def _where(said: str) -> str:
    lines = [x.strip() for x in traceback.format_exc(limit=-4).splitlines() if "File " in x]
    places = [re.sub(r'.*/(\S+)", line (\d+).*', r"\1:\2", line) for line in lines]
    return f"{said} at {' > '.join(places)}"


def _wait(child: int, reader: int, idle_seconds: int) -> tuple[bytes, int, float]:
    told, end = b"", time.monotonic() + WALL_SECONDS
    idle, before = 0, ""
    while True:
        ready, _, _ = select.select([reader], [], [], 1.0)
        if not ready:
            now = _clock(child)
            idle, before = (idle + 1 if now == before else 0), now
            if idle >= idle_seconds or time.monotonic() > end:
                os.kill(child, signal.SIGKILL)
                break
            continue
        part = os.read(reader, 65536)
        told += part
        if not part:
            break
    _, status, usage = os.wait4(child, 0)
    return told, os.waitstatus_to_exitcode(status), usage.ru_utime + usage.ru_stime


def _clock(child: int) -> str:
    """A sleeping process's times, which stand still while it waits; a running one's differ from
    anything before.
    """
    fields = Path(f"/proc/{child}/stat").read_text().rpartition(")")[2].split()
    return f"{fields[0]} {fields[11]} {fields[12]}" if fields[0] == "S" else str(time.monotonic())
