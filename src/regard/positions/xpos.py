"""XPos: rotary positions whose scores also decay with distance. Causal attention only."""

from __future__ import annotations

import math
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.positions.rotary import Layout, apply_rotary, check_layout, cos_sin, rope_frequencies
from regard.positions.scalings import check_above
from regard.process import is_compiling
from regard.span import Positions, Span, as_tensor


def xpos_zeta(dim: int, gamma: float = 0.4) -> list[float]:
    """zeta_i = (2i + gamma d) / ((1 + gamma) d), one per pair; it decays one pair's score per
    position.

    >>> [round(zeta, 6) for zeta in xpos_zeta(4)]
    [0.285714, 0.642857]
    """
    return [(2 * i + gamma * dim) / ((1 + gamma) * dim) for i in range(dim // 2)]


def xpos_reach(
    dim: int, dtype: torch.dtype, *, gamma: float = 0.4, scale_base: float = 512.0
) -> int:
    """The largest |position - center| whose scale zeta_0^((p - c) / scale_base) does not overflow
    the dtype.

    >>> xpos_reach(64, torch.float16), xpos_reach(64, torch.float32)
    (4532, 36260)
    """
    slope = -math.log(xpos_zeta(dim, gamma)[0])
    return math.floor(scale_base * math.log(torch.finfo(dtype).max) / slope)


class XPos(nn.Module):
    """Rotary, times a scale that grows with the position on one side and shrinks on the other.

    q' = R(p) q * zeta^((p - c) / scale_base),  k' = R(p) k * zeta^(-(p - c) / scale_base), so that
    a score holds zeta_i^((p_q - p_k) / scale_base): it decays with distance to the past, and
    **grows** towards the future: causal only.

    Args:
        dim: the head dim D, even.
        role: "query" or "key": which of the two scales.
        base, layout: as in `Rotary`.
        center: c; the same for queries and keys. Half the length you expect doubles the reach.
        scale_base, gamma: above, and `xpos_zeta`.

    Raises:
        ArgumentError: an argument is out of range; when called, a position is too far from the
            center for the dtype (`xpos_reach`: 4532 in fp16, 36260 in fp32 and bf16 for D = 64).
            Positions in a tensor are read for it; they are not checked while compiling.

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
        self.dim, self.role, self.layout, self.center = dim, role, layout, center
        self.scale_base, self.gamma = scale_base, gamma

    def forward(
        self, x: Float[Tensor, "B H L D"], positions: Positions
    ) -> Float[Tensor, "B H L D"]:
        """Turn and scale x [B,H,L,D]."""
        self._check_reach(positions, x.dtype)
        dtype = torch.promote_types(x.dtype, torch.float32)
        cos, sin = cos_sin(positions, self.frequencies.inv_freq, dtype, x.device)
        scale = self.scale(positions, x.device)[:, None].to(dtype)
        return apply_rotary(x, (cos * scale).to(x.dtype), (sin * scale).to(x.dtype), self.layout)

    def scale(
        self, positions: Positions, device: torch.device | None = None
    ) -> Float[Tensor, "B L n"]:
        """What each pair is multiplied by, fp64 [B or 1, L, D/2]; 1 at empty slots."""
        p = as_tensor(positions, device)
        power = torch.where(p < 0, 0, p - self.center).to(torch.float64) / self.scale_base
        log_zeta = torch.tensor(
            xpos_zeta(self.dim, self.gamma), dtype=torch.float64, device=p.device
        ).log()
        return (power[..., None] * (log_zeta if self.role == "query" else -log_zeta)).exp()

    def _check_reach(self, positions: Positions, dtype: torch.dtype) -> None:
        if isinstance(positions, Span):
            ends = [positions.start, positions.stop - 1] if positions.length else []
        elif is_compiling() or not positions.numel():
            ends = []
        else:
            full = positions[positions >= 0]
            ends = [int(full.min()), int(full.max())] if full.numel() else []
        reach = xpos_reach(self.dim, dtype, gamma=self.gamma, scale_base=self.scale_base)
        for p in ends:
            if p >= 0 and abs(p - self.center) > reach:
                name = str(dtype).removeprefix("torch.")
                raise ArgumentError(
                    f"position {p} is {abs(p - self.center)} from the center {self.center}; XPos "
                    f"reaches {reach} in "
                    f"{name} before its scale overflows: move the center, or use Rotary"
                )

    def extra_repr(self) -> str:
        """Dim, role and center."""
        return f"{self.dim}, {self.role}, center={self.center}, layout={self.layout!r}"
