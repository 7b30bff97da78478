"""What this machine can do, and peak memory: what is allocated counts, here and in a process of its
own.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from regard.errors import RegardError
from regard.timing import (
    ALLOCATOR,
    PROCESS,
    Ceilings,
    call_in_subprocess,
    peak_bytes,
    peak_bytes_on,
    resident_bytes,
    torch_threads,
)

MIB = 1 << 20
IS_REPORTED = (PROCESS / "clear_refs").exists()


def test_ceilings_are_measured() -> None:
    rates = {"rounds": 1, "read_bytes": MIB, "side": 64}
    ceilings = Ceilings.measure([torch.float32, torch.bfloat16], torch.device("cpu"), **rates)
    assert ceilings.read > 1e7
    assert set(ceilings.gemm) == {torch.float32, torch.bfloat16}


def test_threads_are_given_back() -> None:
    before, inside = torch.get_num_threads(), []

    def fail() -> None:
        with torch_threads(before + 1):
            inside.append(torch.get_num_threads())
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert inside == [before + 1]
    assert torch.get_num_threads() == before


@pytest.mark.full
@pytest.mark.skipif(not IS_REPORTED, reason="this system does not report it")
def test_what_is_allocated_is_the_peak() -> None:
    """Also when it is freed again, and when as much was used and freed before; what was there
    before does not count. The allocator of the new process is that of a measurement.
    """
    code = (
        "from regard.timing import peak_bytes\n"
        f"work = lambda: len(bytearray({64 * MIB}))\nwork()\nprint(peak_bytes(work))\n"
        f"before = bytearray({64 * MIB})\nprint(peak_bytes(lambda: None))"
    )
    environment = {**os.environ, **ALLOCATOR}
    printed = subprocess.check_output([sys.executable, "-c", code], env=environment, text=True)
    used, unused = map(int, printed.split())
    # Linux adds up pages in batches, so that a count is some hundred KiB behind
    assert 63 * MIB <= used < 68 * MIB
    assert unused < 4 * MIB


def test_a_system_that_does_not_report_memory(tmp_path: Path) -> None:
    assert resident_bytes(process=tmp_path / "none") is None
    assert peak_bytes(lambda: None, tmp_path / "none") is None
    assert peak_bytes_on(torch.device("meta"), lambda: None) is None


def test_a_function_is_called_in_another_process() -> None:
    assert call_in_subprocess("builtins:sorted", [3, 1, 2]) == [1, 2, 3]
    noisy = [sys.executable, "-c", "print('noise'); print(7)"]
    assert call_in_subprocess("any:thing", {}, command=noisy) == 7
    failing = [sys.executable, "-c", "import sys; print('no room', file=sys.stderr); sys.exit(3)"]
    for advice, end in (("try less", "; try less"), ("", "")):
        with pytest.raises(RegardError, match=f"ended with exit code 3: no room{end}$"):
            call_in_subprocess("any:thing", {}, advice=advice, command=failing)
