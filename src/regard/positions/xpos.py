"""XPos: a rotary embedding with which scores also decay with distance, for causal attention."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.positions.constant_tensor import ConstantTensor
from regard.positions.rotary import Layout, apply_rotary, check_layout, cos_sin, rope_frequencies
from regard.positions.scalings import check_above
from regard.process_state import is_compiling
from regard.span import Positions, Span, as_tensor


def xpos_zeta(dim: int, gamma: float = 0.4) -> list[float]:
    """Compute zeta_i = (2i + gamma d) / ((1 + gamma) d), the factor of pair i per scale_base.

    Args:
        dim: the head dim d.
        gamma: the parameter gamma.

    Returns:
        The factors, one per pair of dims.

    >>> [round(zeta, 6) for zeta in xpos_zeta(4)]
    [0.285714, 0.642857]
    """
    return [(2 * i + gamma * dim) / ((1 + gamma) * dim) for i in range(dim // 2)]


def xpos_reach(
    dim: int, dtype: torch.dtype, *, gamma: float = 0.4, scale_base: float = 512.0
) -> int:
    """Compute the largest distance |p - c| at which zeta_0^((p - c) / scale_base) is finite.

    Args:
        dim: the head dim d.
        dtype: the dtype of queries and keys.
        gamma: the parameter gamma of `xpos_zeta`.
        scale_base: the number of positions over which the scale changes by one factor zeta.

    Returns:
        The largest distance from the center, in positions.

    >>> xpos_reach(64, torch.float16), xpos_reach(64, torch.float32)
    (4532, 36260)
    """
    slope = -math.log(xpos_zeta(dim, gamma)[0])
    return math.floor(scale_base * math.log(torch.finfo(dtype).max) / slope)


class XPos(nn.Module):
    """A rotary embedding times a scale that grows with the position for queries, not for keys.

    q' = R(p) q * zeta^((p - c) / scale_base),  k' = R(p) k * zeta^(-(p - c) / scale_base)

    A score then contains zeta_i^((p_q - p_k) / scale_base): it decays with the distance to past
    keys, and **grows** with the distance to later ones, so use it with causal masks only.

    Args:
        dim: the head dim D, even.
        role: whether this module is applied to queries ("query") or to keys ("key").
        base: the base of the rotary frequencies.
        layout: which dims form a pair, as in `Rotary`.
        center: the center c, equal for queries and keys; half of the expected length is best.
        scale_base: the number of positions over which the scale changes by one factor zeta.
        gamma: the parameter gamma of `xpos_zeta`.

    Raises:
        ArgumentError: an argument is out of range; when called, a position is too far from the
            center for the dtype (`xpos_reach`).

    >>> q = XPos(4, "query")(torch.ones(1, 1, 1, 4), Span(100, 1))
    >>> k = XPos(4, "key")(torch.ones(1, 1, 1, 4), Span(100, 1))
    >>> round(float((q * k).sum()), 5)
    4.0

    Source: Sun et al. 2022 (arXiv 2212.10554), algorithm 1.
    """

    def __init__(
        self,
        dim: int,
        role: Literal["query", "key"],
        *,
        base: float = 10000.0,
        layout: Layout = "half",
        center: int = 0,
        scale_base: float = 512.0,
        gamma: float = 0.4,
    ) -> None:
        super().__init__()
        check_layout(layout)
        check_above("scale_base", scale_base)
        check_above("gamma", gamma)
        if role not in ("query", "key"):
            raise ArgumentError(f'role is {role!r}; it must be "query" or "key"')
        self.frequencies = rope_frequencies(dim, base)
        self._inv_freq = ConstantTensor(self.frequencies.inv_freq)
        self.dim, self.role, self.layout, self.center = dim, role, layout, center
        self.scale_base, self.gamma = scale_base, gamma

    def forward(
        self, x: Float[Tensor, "B H L D"], positions: Positions
    ) -> Float[Tensor, "B H L D"]:
        """Rotate and scale queries or keys x [B,H,L,D] at their positions."""
        self._check_reach(positions, x.dtype)
        dtype = torch.promote_types(x.dtype, torch.float32)
        at_cpu = x.device.type in ("cpu", "mps")
        inv_freq = self._inv_freq.tensor if at_cpu else self._inv_freq.on(x.device)
        cos, sin = cos_sin(positions, inv_freq, dtype, x.device)
        scale = self.scale(positions, x.device)[:, None].to(dtype)
        return apply_rotary(x, (cos * scale).to(x.dtype), (sin * scale).to(x.dtype), self.layout)

    def scale(
        self, positions: Positions, device: torch.device | None = None
    ) -> Float[Tensor, "B L n"]:
        """Compute the scale of each pair.

        Args:
            positions: positions [B or 1, L].
            device: the device of the result; by default that of the positions.

        Returns:
            The factors [B or 1, L, D/2] in fp64; 1 at empty slots.
        """
        p = as_tensor(positions, device)
        power = torch.where(p < 0, 0, p - self.center).to(torch.float64) / self.scale_base
        log_zeta = torch.tensor(
            xpos_zeta(self.dim, self.gamma), dtype=torch.float64, device=p.device
        ).log()
        return (power[..., None] * (log_zeta if self.role == "query" else -log_zeta)).exp()

    def _check_reach(self, positions: Positions, dtype: torch.dtype) -> None:
        """Check that no position is too far from the center for the dtype."""
        if isinstance(positions, Span):
            extremes = [positions.start, positions.stop - 1] if positions.length else []
        elif is_compiling() or not positions.numel():
            extremes = []
        else:
            used = positions[positions >= 0]
            extremes = [int(used.min()), int(used.max())] if used.numel() else []
        reach = xpos_reach(self.dim, dtype, gamma=self.gamma, scale_base=self.scale_base)
        for p in extremes:
            if p >= 0 and abs(p - self.center) > reach:
                name = str(dtype).removeprefix("torch.")
                raise ArgumentError(
                    f"position {p} is {abs(p - self.center)} from the center {self.center}, but "
                    f"in {name} the scale of XPos overflows beyond {reach}; move the center, or "
                    "use Rotary"
                )

    def extra_repr(self) -> str:
        """Return the head dim, the role, the center and the layout."""
        return f"{self.dim}, {self.role}, center={self.center}, layout={self.layout!r}"
