"""What reading a checkpoint costs: `Store.read` against reading the file's bytes in one piece, and
the memory it takes.

The checkpoint has the shapes of Qwen2-0.5B, 24 layers in fp16, 0.99 GB of random numbers in a
temporary folder. Times are medians of runs in turns, each in a fresh process, with the file in the
page cache; memory is the peak of a fresh process, less what it had before it read.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

from regard.bench.timing import median, ratio
from regard.models.checkpoint.store import Store

VOCABULARY, WIDTH, INNER, LAYERS, KEYS = 151_936, 896, 4_864, 24, 128

PEAK = """
import sys
from pathlib import Path
from regard.models.checkpoint.store import Store
def most():
    lines = open("/proc/self/status")
    return next(int(x.split()[1]) for x in lines if x.startswith("VmHWM")) * 1024
store, before = Store.open(Path(sys.argv[1])), most()
kept = dict(store.read())
print((most() - before) / store.bytes)
"""


def shapes() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "model.embed_tokens.weight", (VOCABULARY, WIDTH)
    for i in range(LAYERS):
        layer = f"model.layers.{i}"
        for norm in ("input_layernorm", "post_attention_layernorm"):
            yield f"{layer}.{norm}.weight", (WIDTH,)
        for name, rows in (("q", WIDTH), ("k", KEYS), ("v", KEYS)):
            yield f"{layer}.self_attn.{name}_proj.weight", (rows, WIDTH)
            yield f"{layer}.self_attn.{name}_proj.bias", (rows,)
        yield f"{layer}.self_attn.o_proj.weight", (WIDTH, WIDTH)
        yield f"{layer}.mlp.gate_proj.weight", (INNER, WIDTH)
        yield f"{layer}.mlp.up_proj.weight", (INNER, WIDTH)
        yield f"{layer}.mlp.down_proj.weight", (WIDTH, INNER)
    yield "model.norm.weight", (WIDTH,)


def plain(path: Path) -> torch.Tensor:
    """The bytes of a file in fresh memory: what no reader that copies can beat by much."""
    found = torch.empty(path.stat().st_size, dtype=torch.uint8)
    place, done = found.numpy().data, 0
    with path.open("rb", buffering=0) as file:
        while got := file.readinto(place[done:]):
            done += got
    return found


def fresh(case: Callable[[], object]) -> float:
    """Seconds of a case in a process of its own: memory that was used before need not be faulted in
    again.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        start = time.perf_counter()
        kept = case()
        os.write(writer, repr(time.perf_counter() - start).encode())
        os._exit(kept is None)
    os.close(writer)
    os.waitpid(child, 0)
    with os.fdopen(reader, encoding="ascii") as file:
        return float(file.read())


def main(rounds: int = 15) -> dict[str, float]:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        path = folder / "model.safetensors"
        save_file({n: torch.randn(s, dtype=torch.float16) for n, s in shapes()}, path)
        cases: dict[str, Callable[[], object]] = {
            "bytes in one piece": lambda: plain(path),
            "Store.read": lambda: dict(Store.open(folder).read()),
            "load_file, then a copy": lambda: {n: x.clone() for n, x in load_file(path).items()},
        }
        times: dict[str, list[float]] = {what: [] for what in cases}
        for round_ in range(rounds):
            for what in list(cases) if round_ % 2 else list(cases)[::-1]:
                times[what].append(fresh(cases[what]))
        command = [sys.executable, "-c", PEAK, name]
        peak = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    for what, seconds in times.items():
        against = ratio(times, what, "bytes in one piece")
        print(f"{what:<24}{median(seconds):8.3f} s{against:8.2f} of the bytes' time")
    print(f"{'memory of Store.read':<24}{float(peak):8.3f} of the checkpoint")
    return {
        "Store.read against its bytes": ratio(times, "Store.read", "bytes in one piece"),
        "peak memory against the checkpoint": float(peak),
    }


if __name__ == "__main__":
    main()
