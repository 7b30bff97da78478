"""The audit of rotary functions: norms, distances and precision."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.audit.adapters.base import AuditClaims, moved_function, to_device
from regard.audit.adapters.call_arguments import parameters
from regard.audit.adapters.resolve_target import import_target
from regard.audit.findings import Audit, Finding, NotTried, PassedCheck, finding, root_causes
from regard.audit.reference import rotate
from regard.errors import ArgumentError
from regard.language import Phrase

LENGTH, KEY_DISTANCE, FAR_POSITION = 41, 3, 1000
START_POSITIONS = (0, 5, 10, 20, 37)


def audit_rotary(
    target: str | Callable[..., object],
    claims: AuditClaims,
    *,
    dtype: torch.dtype,
    seed: int,
    reported_claims: dict[str, object],
) -> Audit:
    """Check rotate(x [B,H,T,D]), with or without positions, against the definition."""
    name = target if isinstance(target, str) else getattr(target, "__name__", type(target).__name__)
    function: Any = import_target(target) if isinstance(target, str) else target
    run_function = moved_function(
        to_device(function) if isinstance(function, nn.Module) else function
    )
    H, D = claims.heads or 2, claims.head_dim or 8
    second = list(parameters(getattr(function, "forward", function)).values())[1:2]
    takes_positions, takes_start = bool(second), bool(second) and isinstance(second[0].default, int)

    def run(x: Tensor, start: int = 0) -> Tensor:
        positions = start if takes_start else torch.arange(start, start + x.shape[2])
        with torch.no_grad():
            out: Any = run_function(x, positions) if takes_positions else run_function(x)
        result: Tensor = out
        return result

    x = _equal_vectors(H, D, seed)
    try:
        out = run(x.to(dtype))
    except Exception as error:
        raise ArgumentError(
            f"{name} on {list(x.shape)} raised {type(error).__name__}: {error}"
        ) from error
    if not isinstance(out, Tensor) or out.shape != x.shape:
        raise ArgumentError(f"{name} must give a tensor of its input's shape, {list(x.shape)}")
    findings = _check_relative(x, out.double(), dtype)
    passed, skipped = [], []
    if not findings:
        what = "the product of a query and a key depends on their distance alone"
        passed.append(PassedCheck("relative", what))
    if not takes_positions:
        skipped.append(NotTried("precision", "it takes no positions"))
    elif rounded := _check_precision(run, D, seed):
        findings += rounded
    else:
        what = "vectors in bfloat16 are rotated by accurate angles at far positions"
        passed.append(PassedCheck("precision", what))
    called = "rotate(x, positions)" if takes_positions else "rotate(x)"
    return Audit(
        name,
        called,
        tuple(root_causes(findings)),
        tuple(passed),
        tuple(skipped),
        seed=seed,
        claims=reported_claims,
    )


def _equal_vectors(H: int, D: int, seed: int) -> Tensor:
    """Return vectors [1, H, T, D], equal at every position: q in head 0, k in the last."""
    generator = torch.Generator().manual_seed(seed)
    return (
        torch.randn(1, H, 1, D, generator=generator, dtype=torch.float64)
        .expand(-1, -1, LENGTH, -1)
        .clone()
    )


def _check_relative(x: Tensor, out: Tensor, dtype: torch.dtype) -> list[Finding]:
    """Check that q at i + 3 times k at i, and q at i times itself, are the same for all i."""
    q, k = out[0, 0], out[0, -1]
    cross_products, self_products = (
        torch.stack([q[i + n] @ other[i] for i in START_POSITIONS])
        for n, other in ((KEY_DISTANCE, k), (0, q))
    )
    # each product sums D terms of vectors whose angles have a rounding error for each position
    size = float(x[0, :, 0].norm(dim=-1).max()) ** 2
    allowed = 4 * LENGTH * torch.finfo(dtype).eps * size
    deviations = torch.stack([(p - p[0]).abs() for p in (cross_products, self_products)])
    if float(deviations.max()) <= allowed:
        return []
    kind, n = (int(i) for i in (deviations > allowed).nonzero()[0])
    products, distance = ((cross_products, KEY_DISTANCE), (self_products, 0))[kind]
    ratio = out.norm(dim=-1) / x.norm(dim=-1)
    sentence = Phrase(
        "q at i + {distance} times k at i is {products_text} for i = {starts_text}; norms are "
        "multiplied by {low:.4g} to {high:.4g}.",
        distance=distance,
        products_text=", ".join(f"{float(p):.4g}" for p in products),
        starts_text=", ".join(map(str, START_POSITIONS)),
        low=float(ratio.min()),
        high=float(ratio.max()),
    )
    tolerance = torch.finfo(dtype).eps ** 0.5 * float(x.abs().max())
    mixed_rotations = [rotate(x, 10000.0, layout, 2) for layout in ("mixed", "mixed-back")]
    mixed = any(float((out - each).abs().max()) <= tolerance for each in mixed_rotations)
    name = "rotary-mixed" if mixed else "rotary-not-relative"
    example = {"T": START_POSITIONS[n] + distance + 1, "i": START_POSITIONS[n]}
    return [finding(name, sentence, example, float(products[0]), float(products[n]))]


def _check_precision(run: Callable[..., Tensor], D: int, seed: int) -> list[Finding]:
    """Check bfloat16 at a far position, where rounded angles are wrong by whole turns."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(1, 1, 1, D, generator=generator, dtype=torch.float64).bfloat16()
    exact, got = run(x.double(), FAR_POSITION + 1).double(), run(x, FAR_POSITION + 1).double()
    rounded = exact.bfloat16().double()
    # the rounding error of a product and a sum is a few units of the largest number
    allowed = 8 * float((rounded - exact).abs().max()) + 4 * 2**-8 * float(x.double().abs().max())
    errors = (got - exact).abs()
    if float(errors.max()) <= allowed:
        return []
    c = int(errors.flatten().argmax())
    sentence = Phrase(
        "In bfloat16, position {position} is rotated by another angle than in float64.",
        position=FAR_POSITION + 1,
    )
    example = {"T": 1, "position": FAR_POSITION + 1, "feature": c}
    numbers = (float(x.flatten()[c]) for x in (exact, got))
    return [finding("rotary-precision", sentence, example, *numbers)]
