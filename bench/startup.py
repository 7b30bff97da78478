"""How long it takes to start: `import regard` without torch, `regard --help`, and `regard cost
gpt3`.

The aims, on an idle machine: 60 ms, 300 ms and 600 ms, the last two with the start of Python. The
tests look at what is imported, and so at no clock.
"""

from __future__ import annotations

import shutil
import statistics
import subprocess
import sys
import time

INSIDE = "import time; t = time.perf_counter(); import regard; print(time.perf_counter() - t)"


def main(rounds: int = 15) -> dict[str, float]:
    command = shutil.which("regard")
    if command is None:
        raise SystemExit(
            "the command regard is not installed: python -m pip install -c constraints.txt ."
        )
    inside, whole, cost, bare = [], [], [], []
    for _ in range(rounds):
        inside.append(float(run([sys.executable, "-c", INSIDE])[0]))
        bare.append(run([sys.executable, "-c", "pass"])[1])
        whole.append(run([command, "--help"])[1])
        cost.append(run([command, "cost", "gpt3", "--json"])[1])
    numbers = {
        "import regard, ms (inside the process)": statistics.median(inside) * 1e3,
        "regard --help, ms (whole process)": statistics.median(whole) * 1e3,
        "regard cost gpt3, ms (whole process)": statistics.median(cost) * 1e3,
        "python -c pass, ms (whole process)": statistics.median(bare) * 1e3,
    }
    for name, value in numbers.items():
        print(f"{name:<42}{value:8.1f}")
    return numbers


def run(command: list[str]) -> tuple[str, float]:
    start = time.perf_counter()
    out = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    return out, time.perf_counter() - start


if __name__ == "__main__":
    main()
