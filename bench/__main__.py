"""Run the benchmarks: `python -m bench` all of them, `python -m bench startup attend memory` some.

Each prints a table; `--json FILE` keeps the numbers of all that ran. Quote ratios and medians:
machines are noisy.
"""

from __future__ import annotations

import argparse
import importlib
import json
import platform
from pathlib import Path

import torch

NAMES = ("startup", "attend", "window", "memory", "load", "page")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument(
        "names", nargs="*", metavar="NAME", help=f"of {', '.join(NAMES)}; all by default"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the numbers there")
    arguments = parser.parse_args()
    unknown = set(arguments.names) - set(NAMES)
    if unknown:
        parser.error(f"unknown: {', '.join(sorted(unknown))}; choose from {', '.join(NAMES)}")
    machine = f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}"
    print(f"{machine}, {torch.backends.cpu.get_cpu_capability()}")
    numbers = {"machine": machine}
    for name in arguments.names or NAMES:
        print(f"\n== {name}")
        numbers[name] = importlib.import_module(f"bench.{name}").main()
    if arguments.json:
        arguments.json.write_text(json.dumps(numbers, indent=1) + "\n", "utf-8")


if __name__ == "__main__":
    main()
