"""Random arguments for every kernel, each result compared with fp64 under the error rule:
`python -m tests.ops.cpu.fuzz --cases 1000 --seed 7`. The sanitizers watch it, too.

Every tensor has memory of its own, so that AddressSanitizer sees each number that is read or
written beside it; `odd` tensors begin where no vector would. A kernel joins by one entry of
`KERNELS`: a function that computes one random case.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.ops.cpu import launch, threads
from regard.ops.cpu.arguments import MAX_RUNS, struct_layout
from regard.ops.cpu.instruction_sets import instruction_set
from regard.ops.cpu.library import DTYPES, entry
from tests.rules import assert_close_rule

FACTOR = 4.0
"""Twice that of the error rule: with so few numbers, plain math rounds the largest one by luck."""


class Draw:
    """Random numbers and tensors of one case."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.generator = torch.Generator().manual_seed(seed)
        self.dtype = self.random.choice([*DTYPES])
        self.workers = self.random.choice((1, 1, 2, 3))

    def size(self, largest: int = 70) -> int:
        """A size: mostly a tail of vectors, sometimes several whole ones."""
        if self.random.random() < 0.3:
            return self.random.choice((16, 32, 64, 128, 256, 512))
        return self.random.randint(1, largest)

    def tensor(self, *shape: int) -> Tensor:
        """Numbers of several scales."""
        x = torch.randn(shape, generator=self.generator)
        return self.placed((x * self.random.choice((0.01, 1.0, 1.0, 30.0))).to(self.dtype))

    def placed(self, x: Tensor) -> Tensor:
        """The same numbers in memory of their own, which begins at a random number of a line."""
        start = self.random.choice((0, 0, 1, 3, 8))
        memory = torch.empty(start + x.numel(), dtype=x.dtype)
        memory[start:] = x.reshape(-1)
        return memory[start:].view(x.shape)

    def output(self, *shape: int) -> Tensor:
        """Memory for a result, with NaN in it."""
        return self.placed(torch.full(shape, float("nan"), dtype=self.dtype))

    def run(self, name: str, struct: str, *numbers: float | Tensor | None) -> None:
        """Call an entry of the dtype with the fields of its struct in order."""
        given = [
            launch.address(x, self.dtype) if isinstance(x, Tensor) else x or 0 for x in numbers
        ]
        record = struct_layout(struct).pack_numbers(*given)
        threads.run_entry(entry(name, self.dtype), record, self.workers)


def gemv(draw: Draw) -> None:
    R, M, N = draw.random.choice((1, draw.size(9))), draw.size(), draw.size()
    x, w, y = draw.tensor(R, M), draw.tensor(N, M), draw.output(R, N)
    b = draw.tensor(N) if draw.random.random() < 0.5 else None
    draw.run("gemv", "Gemv", R, M, N, x, w, b, y, draw.random.randint(1, MAX_RUNS))
    exact = F.linear(x.double(), w.double(), None if b is None else b.double())
    assert_close_rule(y, lambda: F.linear(x, w, b), exact, FACTOR)


def rms_norm(draw: Draw) -> None:
    R, M = draw.size(), draw.size()
    x, w, y = draw.tensor(R, M), draw.tensor(M), draw.output(R, M)
    eps, offset = draw.random.choice((1e-6, 1e-5, 0.1)), draw.random.choice((0.0, 1.0))
    draw.run("rms_norm", "RmsNorm", R, M, x, w, y, eps, offset)

    def norm(x: Tensor, w: Tensor) -> Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * (w + offset)

    exact = norm(x.double(), w.double())
    assert_close_rule(y, lambda: norm(x.float(), w.float()).to(x.dtype), exact, FACTOR)


def gated_product(draw: Draw) -> None:
    n = draw.size(300)
    gate, up, y = draw.tensor(n), draw.tensor(n), draw.output(n)
    draw.run("gated_product", "GatedProduct", n, gate, up, y)
    exact = gate.double() * torch.sigmoid(gate.double()) * up.double()
    assert_close_rule(y, F.silu(gate) * up, exact, FACTOR)


KERNELS: dict[str, Callable[[Draw], None]] = {
    "gemv": gemv,
    "rms_norm": rms_norm,
    "gated_product": gated_product,
}
"""The kernels that have a case."""


def run_case(name: str, seed: int) -> None:
    """Compute one case; what it raises names the case."""
    try:
        KERNELS[name](Draw(seed))
    except Exception as error:
        error.add_note(f"python -m tests.ops.cpu.fuzz --kernels {name} --cases 1 --seed {seed}")
        raise


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kernels", nargs="*", default=[*KERNELS], choices=[*KERNELS])
    parser.add_argument("--cases", type=int, default=100, help="of each kernel")
    parser.add_argument("--seed", type=int, default=0, help="of the first case")
    chosen = parser.parse_args(arguments)
    torch.set_num_threads(1)
    for name in chosen.kernels:
        for seed in range(chosen.seed, chosen.seed + chosen.cases):
            run_case(name, seed)
    print(
        f"{len(chosen.kernels)} kernels, {chosen.cases} cases each: right with {instruction_set()}"
    )


if __name__ == "__main__":
    main()
