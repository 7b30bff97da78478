"""Peak memory: what is allocated is seen, here and in the process that measures a peer."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.cases import peer_peak_bytes
from regard.errors import RegardError
from regard.timing.measurement import (
    ALLOCATOR,
    PROCESS,
    call_in_subprocess,
    peak_bytes,
    resident_bytes,
)

MIB = 1 << 20
TELLS = (PROCESS / "clear_refs").exists()


def fresh(code: str) -> list[int]:
    """What a new process prints, with the allocator as it is measured with."""
    done = subprocess.run(
        [sys.executable, "-c", f"from regard.timing.measurement import peak_bytes\n{code}"],
        env={**os.environ, **ALLOCATOR},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(n) for n in done.stdout.split()]


@pytest.mark.full
@pytest.mark.skipif(not TELLS, reason="this system does not tell")
def test_what_is_allocated_is_the_peak() -> None:
    """Also when it is freed again, and when as much was used and freed before; what was held before
    does not count.
    """
    used, held = fresh(
        f"work = lambda: len(bytearray({64 * MIB}))\nwork()\nprint(peak_bytes(work))\n"
        f"held = bytearray({64 * MIB})\nprint(peak_bytes(lambda: None))"
    )
    # Linux adds up pages in batches, so that a count is some hundred KiB behind
    assert 63 * MIB <= used < 68 * MIB
    assert held < 4 * MIB


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    assert resident_bytes(process=tmp_path / "none") is None
    assert peak_bytes(lambda: None, tmp_path / "none") is None


def test_a_function_is_called_in_another_process() -> None:
    assert call_in_subprocess("builtins:sorted", [3, 1, 2]) == [1, 2, 3]
    noisy = [sys.executable, "-c", "print('noise'); print(7)"]
    assert call_in_subprocess("any:thing", {}, command=noisy) == 7
    failing = [sys.executable, "-c", "import sys; print('no room', file=sys.stderr); sys.exit(3)"]
    with pytest.raises(RegardError, match=r"ended with exit code 3: no room; try less$"):
        call_in_subprocess("any:thing", {}, advice="try less", command=failing)
    with pytest.raises(RegardError, match=r"ended with exit code 3: no room$"):
        call_in_subprocess("any:thing", {}, command=failing)


@pytest.mark.full
@pytest.mark.skipif(not TELLS, reason="this system does not tell")
def test_the_kernel_that_holds_every_score_takes_more_than_the_tiled_one() -> None:
    settings = {"case": "kernels", "size": "small", "length": 2048, "batch": None}
    settings |= {"dtype": "float32", "threads": 1}
    whole, tiled = (
        call_in_subprocess(
            "benchmarks.cases:peer_peak_bytes", {**settings, "peer": f"regard {name}"}
        )
        for name in ("reference", "tiled")
    )
    scores = 4 * 2048**2
    assert whole > scores > tiled > 0


def test_a_peer_is_found_by_its_names() -> None:
    settings = {"case": "kernels", "size": "small", "length": 16, "batch": None}
    found = peer_peak_bytes(
        {**settings, "dtype": "float32", "threads": 1, "peer": "regard reference"}
    )
    assert found is None or found >= 0


def test_work_of_other_processes_is_not_counted() -> None:
    settings = {"case": "startup", "size": "small", "length": None, "batch": None}
    peer = {"dtype": "float32", "threads": 1, "peer": "python"}
    assert peer_peak_bytes({**settings, **peer}) is None
