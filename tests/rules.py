"""When is a result right? One rule for every kernel and dtype, and no tolerance that anybody chose."""

from __future__ import annotations

import torch
from torch import Tensor

GRADIENT = 3.0
"""The factor for gradients."""


def assert_close_rule(
    x: Tensor, plain: Tensor, ref64: Tensor, factor: float = 2.0, what: str = ""
) -> None:
    """max|x - ref64| <= factor max|plain - ref64| + 2 max|ref + 0.3 - 0.3 - ref|, the last in the dtype of x.

    x: what is tested; plain: plain math in the same dtype; ref64: the definition in float64. Infinities and NaN must
    stand at the same places in x and in ref64.
    """
    assert x.shape == ref64.shape == plain.shape, f"{what} shapes {x.shape}, {plain.shape}, {ref64.shape}"
    x64, plain64, ref = x.detach().double(), plain.detach().double(), ref64.detach().double()
    assert plain.dtype == x.dtype, f"{what} plain math in {plain.dtype}, tested {x.dtype}"
    for name, at in (("NaN", torch.isnan), ("inf", torch.isposinf), ("-inf", torch.isneginf)):
        assert torch.equal(at(x64), at(ref)), f"{what} {name} at {int(at(x64).sum())} places, not {int(at(ref).sum())}"
    seen = ref.isfinite()
    if not bool(seen.any()):
        return
    rounded = ref[seen].to(x.dtype)
    floor = 2 * (rounded + 0.3 - 0.3 - rounded).abs().max().item()
    allowed = factor * (plain64 - ref)[seen].abs().max().item() + floor
    error = (x64 - ref)[seen].abs().max().item()
    assert error <= allowed, f"{what} error {error:.3g} above {allowed:.3g} ({factor} plain + {floor:.3g})"
