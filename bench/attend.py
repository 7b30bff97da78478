"""What `attend` adds to a bare call of torch's fused kernel: checks, the choice of a kernel, one
look for NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
import torch.nn.functional as F

import regard
from regard.bench.timing import interleaved, median, ratio
from regard.masks import Causal

CASES = [
    (T, dtype, causal, train)
    for T in (512, 1024, 2048)
    for dtype in (torch.float32, torch.bfloat16)
    for causal in (False, True)
    for train in (False, True)
]


def backward(weights: torch.Tensor | None, attention: Callable[[], torch.Tensor]) -> None:
    """A call, and its gradient if there are weights for its output."""
    out = attention()
    if weights is not None:
        out.backward(weights)


def main(
    rounds: int = 15, cases: list[tuple[int, torch.dtype, bool, bool]] = CASES
) -> list[dict[str, object]]:
    """One row for each length, dtype, mask, with and without the gradient: medians, and the ratio
    round by round.
    """
    rows: list[dict[str, object]] = []
    print(
        f"{'T':>6} {'dtype':<9}{'mask':<7}{'grad':<5}{'attend':>10}{'sdpa':>10}{'attend/sdpa':>13}"
    )
    for T, dtype, causal, train in cases:
        q, k, v = (torch.randn(1, 8, T, 64).to(dtype).requires_grad_(train) for _ in range(3))
        mask = Causal() if causal else None
        step = partial(backward, torch.randn(1, 8, T, 64).to(dtype) if train else None)
        bare = partial(F.scaled_dot_product_attention, q, k, v, is_causal=causal)
        ours = partial(regard.attend, q, k, v, mask=mask, backend="sdpa")
        assert regard.plan(q, k, v, mask=mask, backend="sdpa").kernel == "sdpa", (
            "another kernel than the one measured against"
        )
        assert torch.equal(ours(), bare()), "the same kernel on the same numbers"
        times = interleaved(
            {"attend": partial(step, ours), "sdpa": partial(step, bare)}, rounds=rounds
        )
        name, word = str(dtype).removeprefix("torch."), "causal" if causal else "full"
        a, b, share = (
            median(times["attend"]) * 1e3,
            median(times["sdpa"]) * 1e3,
            ratio(times, "attend", "sdpa"),
        )
        rows.append(
            {
                "T": T,
                "dtype": name,
                "mask": word,
                "grad": train,
                "attend_ms": a,
                "sdpa_ms": b,
                "ratio": share,
            }
        )
        print(
            f"{T:>6} "
            f"{name:<9}{word:<7}{'yes' if train else 'no':<5}{a:>8.2f}ms{b:>8.2f}ms{share:>13.3f}"
        )
    return rows


if __name__ == "__main__":
    main()
