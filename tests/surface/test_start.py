"""What starts without torch, and how fast: proved in fresh processes, without the hooks of this one."""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest

import regard

PACKAGE = Path(regard.__file__).parent
HEAVY = ("torch", "numba", "transformers", "tokenizers", "safetensors", "matplotlib")


def fresh(code: str, *flags: str) -> str:
    """What a new Python prints that finds the same regard and nothing of the test's own setting."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(PACKAGE.parent),
        "NO_COLOR": "1",
        "COLUMNS": "80",
    }
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str) -> set[str]:
    """The heavy modules that a new process holds after running the code."""
    tail = f"import sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    return set(json.loads(fresh(f"{code}\n{tail}").splitlines()[-1]))


HELP = """
import contextlib
from regard.cli import main
with contextlib.suppress(SystemExit):
    main(["--help"])
"""


@pytest.mark.parametrize(
    "code",
    [
        "import regard",
        "import regard.span, regard.errors, regard.tap, regard.arguments, regard.notation",
        "import regard.view",
        "import regard.cost",
        "import regard; dir(regard); regard.Span(0, 3); regard.ArgumentError; regard.Trace",
        HELP,
    ],
)
def test_starts_without_torch(code: str) -> None:
    assert loaded(code) == set()


def test_every_module_of_view_and_cost_starts_without_torch() -> None:
    names = [
        "regard." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for folder in ("view", "cost")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
    ]
    assert names
    assert loaded("import " + ", ".join(n.removesuffix(".__init__") for n in names)) == set()


def test_the_test_would_see_torch() -> None:
    assert "torch" in loaded("import regard; regard.attend")


def test_help_imports_no_command_module() -> None:
    out = fresh(HELP + "import sys; print([m for m in sys.modules if m.startswith('regard.cli.')])")
    assert out.splitlines()[-1] == "['regard.cli.app']"


def times(code: str, *, runs: int = 7) -> list[float]:
    """Seconds that the code took inside each of several new processes, the first (cold) one left out."""
    timed = (
        "import time, sys\nstart = time.perf_counter()\n"
        f"{code}\nprint('\\n', time.perf_counter() - start)"
    )
    return [float(fresh(timed).splitlines()[-1]) for _ in range(runs + 1)][1:]


# The fastest of several runs is what the code costs; the rest is what else the machine was doing.
def test_import_takes_less_than_60_ms() -> None:
    taken = times("import regard")
    assert min(taken) < 0.060, (min(taken), statistics.median(taken))


def test_help_takes_less_than_300_ms_with_the_start_of_python() -> None:
    command = "[sys.executable, '-m', 'regard', '--help']"
    taken = times(
        f"import subprocess\nsubprocess.run({command}, stdout=subprocess.DEVNULL, check=True)"
    )
    assert min(taken) < 0.300, (min(taken), statistics.median(taken))


def test_a_default_device_is_kept_under_pytest() -> None:
    """The poisoned `torch.empty` of conftest.py must not hide from `with torch.device`."""
    import torch

    with torch.device("meta"):
        assert torch.nn.Linear(4, 4).weight.is_meta
