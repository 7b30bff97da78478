"""Peak memory: what is allocated is seen, in this process and in the one that measures
mechanisms.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from regard.compare import memory, peak
from regard.compare.memory import ALLOCATOR
from regard.errors import RegardError
from tests.compare.small import MACHINE, TIMING, plan

MIB = 1 << 20


def fresh(code: str) -> list[int]:
    """What a new process prints, with the allocator as it is measured with."""
    done = subprocess.run(
        [sys.executable, "-c", f"from regard.compare.peak import peak\n{code}"],
        env={**os.environ, **ALLOCATOR},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return [int(n) for n in done.stdout.split()]


@pytest.mark.full
@pytest.mark.skipif(not peak.CLEAR.exists(), reason="this system does not tell")
def test_what_is_allocated_is_the_peak() -> None:
    """Also when it is freed again, and when as much was used and freed before; what was held before
    does not count.
    """
    used, held = fresh(
        f"work = lambda: len(bytearray({64 * MIB}))\nwork()\nprint(peak(work))\n"
        f"held = bytearray({64 * MIB})\nprint(peak(lambda: None))"
    )
    # Linux adds up pages in batches, so that a count is some hundred KiB behind
    assert 63 * MIB <= used < 68 * MIB
    assert held < 4 * MIB


def test_a_system_that_does_not_tell(tmp_path: Path) -> None:
    none = tmp_path / "none"
    assert peak.resident(status=none) is None
    assert peak.peak(lambda: None, status=none) is None
    assert peak.peak(lambda: None, clear=none / "none") is None


def test_an_experiment_asks_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    found = {
        one.name: one for one in memory.experiments(plan("mha", "mqa").configs, TIMING, MACHINE)
    }
    assert list(found) == ["memory/mha", "memory/mqa"]
    settings = found["memory/mqa"].settings
    assert (settings["context"], settings["length"], settings["batch"]) == (20, 12, 2)
    echo = (
        "import json, sys; s = json.load(sys.stdin); print('noise'); "
        "print(json.dumps({'prefill': s['context']}))"
    )
    assert memory.measure(settings, [sys.executable, "-c", echo]) == {"prefill": 20}
    with pytest.raises(RegardError, match="ended with 3: no room; --no-memory goes without it"):
        memory.measure(
            settings,
            [sys.executable, "-c", "import sys; print('no room', file=sys.stderr); sys.exit(3)"],
        )


def test_the_program_measures_a_prompt_and_a_step() -> None:
    """In this process: the numbers are too small to say more than that both were measured, and are
    plain.
    """
    (one,) = memory.experiments(plan("mqa").configs, TIMING, MACHINE)
    found = peak.run(json.loads(json.dumps(one.settings)))
    assert set(found) == {"prefill", "training"}
    if peak.CLEAR.exists():
        assert all(isinstance(n, int) and n >= 0 for n in found.values())
