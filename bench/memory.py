"""Peak memory of one attention call per length, measured in a child process: `python
bench/memory.py`.

Each cell runs in its own process. The peak is what the process's resident set grew by, from where
it stood with the inputs made and every library warm; the output and the gradients are "tensors",
the rest is what the kernel held.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from pathlib import Path

MIB = 2**20


def measure(
    kernel: str, mask: str, T: int, heads: int, dim: int, *, backward: bool
) -> dict[str, float]:
    """Run one cell in this process."""
    import torch

    import regard

    torch.set_num_threads(1)
    rule = regard.masks.parse(mask)

    def run(*tensors: torch.Tensor) -> torch.Tensor:
        out = regard.attend(*tensors, mask=rule, backend=kernel)
        if backward:
            out.backward(tensors[0].detach())
        return out

    run(*(torch.randn(1, heads, 512, dim).requires_grad_(backward) for _ in range(3)))
    inputs = [torch.randn(1, heads, T, dim).requires_grad_(backward) for _ in range(3)]
    forget_peak()
    before = peak()
    start = time.perf_counter()
    out = run(*inputs)
    seconds = time.perf_counter() - start
    grown, own = peak() - before, out.nbytes + backward * sum(x.nbytes for x in inputs)
    return {"seconds": seconds, "tensors_mib": own / MIB, "extra_mib": (grown - own) / MIB}


def peak() -> int:
    """The largest resident set since `forget_peak`, in bytes (Linux)."""
    status = Path("/proc/self/status").read_text(encoding="ascii")
    line = next(x for x in status.splitlines() if x.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


def forget_peak() -> None:
    """Let the kernel count the peak from now on."""
    Path("/proc/self/clear_refs").write_text("5", encoding="ascii")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kernels", nargs="+", default=["tiled", "sdpa", "reference"])
    parser.add_argument("--masks", nargs="+", default=["causal", "causal & window(256)"])
    parser.add_argument("--lengths", nargs="+", type=int, default=[4096, 8192, 16384, 32768])
    parser.add_argument("--heads", type=int, default=1)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--json", type=Path, help="also write the figures here")
    parser.add_argument("--cell", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.cell:
        print(json.dumps(measure(**json.loads(options.cell))))
        return
    rows = []
    print(
        f"{'kernel':<11}{'mask':<22}{'pass':<10}{'T':>7}"
        f"{'seconds':>9}{'extra MiB':>11}{'tensors MiB':>13}"
    )
    for kernel in options.kernels:
        for mask in options.masks:
            for backward in (False, True):
                for T in options.lengths:
                    cell = {
                        "kernel": kernel,
                        "mask": mask,
                        "T": T,
                        "heads": options.heads,
                        "dim": options.dim,
                        "backward": backward,
                    }
                    row = {**cell, **child(cell)}
                    rows.append(row)
                    print(line(row), flush=True)
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


def child(cell: dict[str, object]) -> dict[str, object]:
    """One cell in a process of its own."""
    command = [sys.executable, __file__, "--cell", json.dumps(cell)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        return {"error": done.stderr.strip().splitlines()[-1]}
    return json.loads(done.stdout.splitlines()[-1])


def line(row: dict[str, object]) -> str:
    where = "backward" if row["backward"] else "forward"
    start = f"{row['kernel']:<11}{row['mask']:<22}{where:<10}{row['T']:>7}"
    if "error" in row:
        return f"{start}  {row['error']}"[:160]
    return f"{start}{row['seconds']:>9.2f}{row['extra_mib']:>11.1f}{row['tensors_mib']:>13.1f}"


if __name__ == "__main__":
    main()
