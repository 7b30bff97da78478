"""Peak memory of mechanisms: what the process that measures them is asked, and what it answers."""

from __future__ import annotations

import json
import sys

import pytest

from regard.compare import speed_and_memory
from regard.errors import RegardError
from regard.timing import PROCESS
from tests.compare.small import MACHINE, TIMING, plan


def test_an_experiment_asks_the_program() -> None:
    found = {
        one.name: one
        for one in speed_and_memory.memory_experiments(plan("mha", "mqa").configs, TIMING, MACHINE)
    }
    assert list(found) == ["memory/mha", "memory/mqa"]
    settings = found["memory/mqa"].settings
    assert (settings["context"], settings["length"], settings["batch"]) == (20, 12, 2)
    echo = (
        "import json, sys; s = json.load(sys.stdin); print('noise'); "
        "print(json.dumps({'prefill': s['context']}))"
    )
    assert speed_and_memory.measure_peaks(settings, [sys.executable, "-c", echo]) == {"prefill": 20}
    with pytest.raises(RegardError, match="ended with exit code 3: no room; --no-memory skips"):
        speed_and_memory.measure_peaks(
            settings,
            [sys.executable, "-c", "import sys; print('no room', file=sys.stderr); sys.exit(3)"],
        )


@pytest.mark.full
def test_the_program_measures_a_prompt_and_a_step() -> None:
    """In this process: the numbers are too small to say more than that both were measured, and are
    plain.
    """
    (one,) = speed_and_memory.memory_experiments(plan("mqa").configs, TIMING, MACHINE)
    found = speed_and_memory.peaks(json.loads(json.dumps(one.settings)))
    assert set(found) == {"prefill", "training"}
    if (PROCESS / "clear_refs").exists():
        assert all(isinstance(n, int) and n >= 0 for n in found.values())
