"""What a mask that skips is worth: windows, forward and backward, against SDPA with the same mask
as a tensor.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

import regard
from regard.bench.timing import interleaved, median, ratio
from regard.masks import Causal, Window


def strided(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, W: int) -> torch.Tensor:
    """The other recipe: overlapping strided views of chunks of W, one fused call."""
    B, H, T, D = q.shape
    G, n = k.shape[1], -(-T // W)
    L = n * W
    q = F.pad(q, (0, 0, 0, L - T)).contiguous()
    k, v = (F.pad(x, (0, 0, W, L - T)).contiguous() for x in (k, v))
    qs = q.as_strided((n, B * H, W, D), (W * D, L * D, D, 1))
    ks, vs = (x.as_strided((n, B * G, 2 * W, D), (W * D, (L + W) * D, D, 1)) for x in (k, v))
    i, j = torch.arange(W)[:, None], torch.arange(2 * W)[None]
    mask = ((j - W <= i) & (j - W > i - W)).expand(n, 1, W, 2 * W).clone()
    mask[0] &= j >= W
    out = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, enable_gqa=True)
    return out.view(n, B, H, W, D).permute(1, 2, 0, 3, 4).reshape(B, H, L, D)[:, :, :T]


def row(T: int, W: int, train: bool) -> dict[str, float]:  # noqa: FBT001
    q, k, v = (torch.randn(1, n, T, 64, requires_grad=train) for n in (8, 2, 2))
    mask = Causal() & Window(W)
    dense = mask.block(regard.Span(0, T), regard.Span(0, T))
    ways = {
        "regard": lambda: regard.attend(q, k, v, mask=mask),
        "sdpa": lambda: F.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True),
        "strided": lambda: strided(q, k, v, W),
    }
    want = regard.attend(q, k, v, mask=mask, backend="reference")
    for name, way in ways.items():
        assert (way() - want).abs().max() < 1e-5, f"{name} must agree before it is timed"
    steps = {n: (lambda w=w: w().sum().backward()) for n, w in ways.items()} if train else ways
    times = interleaved(steps, rounds=9)
    return {
        "T": T,
        "W": W,
        "train": train,
        **{f"{name} ms": median(t) * 1e3 for name, t in times.items()},
        "sdpa/regard": ratio(times, "sdpa", "regard"),
        "strided/regard": ratio(times, "strided", "regard"),
    }


def main() -> list[dict[str, float]]:
    rows = []
    for T, W, train in (
        (2048, 256, False),
        (4096, 512, False),
        (2048, 256, True),
        (4096, 512, True),
    ):
        rows.append(row(T, W, train))
        if len(rows) == 1:
            print("  ".join(f"{name:>14}" for name in rows[0]))
        print("  ".join(f"{value:>14.2f}" for value in rows[-1].values()))
    return rows


if __name__ == "__main__":
    main()
