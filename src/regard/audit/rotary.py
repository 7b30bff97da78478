"""Rotary functions alone, rotate(x) or rotate(x, positions): norms, distances, precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from regard.audit.adapters.arguments import parameters
from regard.audit.adapters.find import imported
from regard.audit.definition import rotated
from regard.audit.findings import Audit, Checked, Finding, NotTried, causes, finding
from regard.audit.subject import Claim
from regard.errors import ArgumentError

LENGTH, APART, FAR = 41, 3, 1000
STARTS = (0, 5, 10, 20, 37)


def audited(
    target: str | Callable[..., Any],
    claim: Claim,
    *,
    dtype: torch.dtype,
    seed: int,
    said: dict[str, Any],
) -> Audit:
    """Hold rotate(x [B,H,T,D]) or rotate(x, positions) -> [B,H,T,D] against what a rotation is."""
    name = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
    rotate: Any = imported(target) if isinstance(target, str) else target
    H, D = claim.heads or 2, claim.head_dim or 8
    second = list(parameters(getattr(rotate, "forward", rotate)).values())[1:2]
    placed, counted = bool(second), bool(second) and isinstance(second[0].default, int)

    def run(x: Tensor, start: int = 0) -> Tensor:
        where = start if counted else torch.arange(start, start + x.shape[2])
        with torch.no_grad():
            out: Tensor = rotate(x, where) if placed else rotate(x)
        return out

    x = _vectors(H, D, seed)
    try:
        out = run(x.to(dtype))
    except Exception as error:
        raise ArgumentError(
            f"{name} on {list(x.shape)} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(out, Tensor) or out.shape != x.shape:
        raise ArgumentError(f"{name} must give a tensor of its input's shape, {list(x.shape)}")
    findings = _relative(x, out.double(), dtype)
    held = [] if findings else [Checked("relative", "products depend on distance alone")]
    skipped = [] if placed else [NotTried("precision", "it takes no positions")]
    if placed:
        rounded = _precise(run, D, seed)
        findings += rounded
        held += (
            [] if rounded else [Checked("precision", "far positions are told apart in bfloat16")]
        )
    called = "rotate(x, positions)" if placed else "rotate(x)"
    return Audit(
        name, called, tuple(causes(findings)), tuple(held), tuple(skipped), seed=seed, claims=said
    )


def _vectors(H: int, D: int, seed: int) -> Tensor:
    """The same q (head 0) and k (the others) at every position."""
    make = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, H, 1, D, generator=make, dtype=torch.float64)
        .expand(-1, -1, LENGTH, -1)
        .clone()
    )


def _relative(x: Tensor, out: Tensor, dtype: torch.dtype) -> list[Finding]:
    """q at i + 3 against k at i, and q against itself, for several i: the same, whatever i is."""
    q, k = out[0, 0], out[0, -1]
    apart, own = (
        torch.stack([q[i + n] @ other[i] for i in STARTS]) for n, other in ((APART, k), (0, q))
    )
    # each product is a sum of D terms, of vectors whose angles carry a rounding for each position
    size = float(x[0, :, 0].norm(dim=-1).max()) ** 2
    allowed = 4 * LENGTH * torch.finfo(dtype).eps * size
    off = torch.stack([(p - p[0]).abs() for p in (apart, own)])
    if float(off.max()) <= allowed:
        return []
    which, n = (int(i) for i in (off > allowed).nonzero()[0])
    products, distance = ((apart, APART), (own, 0))[which]
    words, starts = ", ".join(f"{float(p):.4g}" for p in products), ", ".join(map(str, STARTS))
    ratio = out.norm(dim=-1) / x.norm(dim=-1)
    sentence = (
        f"q at i + {distance} times k at i is {words} for i = {starts}; norms change by "
        f"{float(ratio.min()):.4g} to {float(ratio.max()):.4g}."
    )
    least = torch.finfo(dtype).eps ** 0.5 * float(x.abs().max())
    like = [rotated(x, 10000.0, layout, 2) for layout in ("mixed", "mixed-back")]
    mixed = any(float((out - each).abs().max()) <= least for each in like)
    name = "rotary-mixed" if mixed else "rotary-not-relative"
    i = STARTS[n]
    return [
        finding(
            name, sentence, {"T": i + distance + 1, "i": i}, float(products[0]), float(products[n])
        )
    ]


def _precise(run: Callable[..., Tensor], D: int, seed: int) -> list[Finding]:
    """bfloat16 vectors at far positions: rounding angles to bfloat16 moves them by whole turns."""
    make = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 1, 1, D, generator=make, dtype=torch.float64).bfloat16()
    exact, got = run(x.double(), FAR + 1).double(), run(x, FAR + 1).double()
    plain = exact.bfloat16().double()
    # a product and a sum of rounded numbers: a few roundings of the largest, not whole angles
    allowed = 8 * float((plain - exact).abs().max()) + 4 * 2**-8 * float(x.double().abs().max())
    off = (got - exact).abs()
    if float(off.max()) <= allowed:
        return []
    c = int(off.flatten().argmax())
    sentence = f"In bfloat16, position {FAR + 1} is rotated by another angle than in float64."
    return [
        finding(
            "rotary-precision",
            sentence,
            {"T": 1, "position": FAR + 1, "feature": c},
            float(exact.flatten()[c]),
            float(got.flatten()[c]),
        )
    ]
