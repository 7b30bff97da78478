"""What a mask that skips is worth: windows, forward and backward, against SDPA with the same mask as a tensor."""

from __future__ import annotations

import torch
import torch.nn.functional as F

import regard
from bench.timing import interleaved, median, ratio
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


def main() -> list[dict[str, float]]:
    rows = []
    print(
        f"{'T':>6}{'W':>6}{'grad':>6}{'regard':>10}{'sdpa':>10}{'strided':>10}{'sdpa/ours':>11}{'strided/ours':>14}"
    )
    for T, W, train in (
        (2048, 256, False),
        (4096, 512, False),
        (2048, 256, True),
        (4096, 512, True),
    ):
        q, k, v = (torch.randn(1, n, T, 64, requires_grad=train) for n in (8, 2, 2))
        mask = Causal() & Window(W)
        dense = mask.block(regard.Span(0, T), regard.Span(0, T))

        def step(out: torch.Tensor, train: bool = train) -> None:
            if train:
                out.sum().backward()

        cases = {
            "regard": lambda: step(regard.attend(q, k, v, mask=mask)),
            "sdpa": lambda: step(
                F.scaled_dot_product_attention(q, k, v, attn_mask=dense, enable_gqa=True)
            ),
            "strided": lambda: step(strided(q, k, v, W)),
        }
        want = regard.attend(q, k, v, mask=mask, backend="reference")
        for other in (regard.attend(q, k, v, mask=mask), strided(q, k, v, W)):
            assert (other - want).abs().max() < 1e-5, (
                "the alternatives must agree before they are timed"
            )
        times = interleaved(cases, rounds=9)
        row = {"T": T, "W": W, "train": train, **{n: median(t) * 1e3 for n, t in times.items()}}
        row["sdpa/regard"], row["strided/regard"] = (
            ratio(times, n, "regard") for n in ("sdpa", "strided")
        )
        rows.append(row)
        print(
            f"{T:>6}{W:>6}{'yes' if train else 'no':>6}{row['regard']:>9.1f}m{row['sdpa']:>9.1f}m{row['strided']:>9.1f}m"
            f"{row['sdpa/regard']:>11.2f}{row['strided/regard']:>14.2f}"
        )
    return rows


if __name__ == "__main__":
    main()
