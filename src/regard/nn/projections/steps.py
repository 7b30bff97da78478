"""Steps on the heads of a `HeadProjection`: temperatures, norms, limits, activations."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_choice, check_number, check_positive_sizes
from regard.errors import ArgumentError, ArgumentTypeError
from regard.span import Positions, as_tensor

TemperatureForm: TypeAlias = Literal["llama4", "ministral3", "inkling", "beam", "mistral_large4"]
"""How the factor of a query grows with its position; see `QueryTemperature`."""

_FACTORS: dict[str, Callable[[Tensor, float, float], Tensor]] = {
    "llama4": lambda i, a, n: 1 + a * torch.log1p(torch.floor((i + 1) / n)),
    "ministral3": lambda i, a, n: 1 + a * torch.log1p(torch.floor(i / n)),
    "inkling": lambda i, a, n: 1 + a * torch.log(torch.clamp((i + 1) / n, min=1)),
    "beam": lambda i, a, n: torch.exp(a * torch.log1p((i + 1) / n)),
}


class QueryTemperature(nn.Module):
    """A factor on queries that grows with their position, for a sharp softmax.

    q'_i = tau(i) q_i, with i the position of the token, from 0

    - "llama4": tau = 1 + a ln(1 + floor((i + 1) / n))
    - "ministral3": tau = 1 + a ln(1 + floor(i / n))
    - "inkling": tau = 1 + a ln(max(1, (i + 1) / n))
    - "beam": tau = exp(a ln(1 + (i + 1) / n))
    - "mistral_large4": tau_h = a_h ln(i + 1) + b_h, learned, which starts at 1

    The position is that of the token, so that padding changes nothing. The factor is in fp64.

    Args:
        form: one of these names.
        scale, length: the numbers a and n; "mistral_large4" ignores them.
        heads: the number of query heads, which "mistral_large4" needs.

    Raises:
        ArgumentError: an argument is out of range, or heads is missing.

    >>> from regard.span import Span
    >>> step = QueryTemperature("llama4", scale=0.1, length=8192)
    >>> factors = step.factors(torch.tensor([[8190, 8191, 131071]]))
    >>> [round(x, 10) for x in factors.flatten().tolist()]
    [1.0, 1.0693147181, 1.2833213344]

    Source: the code of these models in transformers; Nakanishi 2025 (arXiv 2501.19399).
    """

    def __init__(
        self,
        form: TemperatureForm = "llama4",
        *,
        scale: float = 0.1,
        length: float = 8192,
        heads: int | None = None,
    ) -> None:
        super().__init__()
        check_choice("form", form, get_args(TemperatureForm))
        check_number("scale", scale, -math.inf, math.inf, "finite")
        check_number("length", length, 0, math.inf, "above 0")
        if form == "mistral_large4" and (heads is None or heads < 1):
            raise ArgumentError(
                f"heads is {heads}; the form mistral_large4 has factors for each query head, so "
                "give their number"
            )
        self.form, self.scale, self.length = form, scale, length
        is_learned = form == "mistral_large4" and heads is not None
        self.slope = nn.Parameter(torch.zeros(heads or 0)) if is_learned else None
        self.offset = nn.Parameter(torch.ones(heads or 0)) if is_learned else None

    def factors(self, positions: Positions, device: torch.device | None = None) -> Tensor:
        """Compute the factors of queries.

        Args:
            positions: a `Span`, or integers [B or 1, L]; a slot without a token counts as 0.
            device: the device of the result.

        Returns:
            The factors in fp64, [B or 1, 1, L, 1], or [B or 1, H, L, 1] for learned ones.
        """
        i = as_tensor(positions, device).to(torch.float64).clamp(min=0)[:, None, :, None]
        if self.slope is None or self.offset is None:
            return _FACTORS[self.form](i, self.scale, self.length)
        slope, offset = (x.to(torch.float64)[:, None, None] for x in (self.slope, self.offset))
        return slope * torch.log1p(i) + offset

    def forward(self, q: Tensor, positions: Positions) -> Tensor:
        """Multiply queries [B,H,L,D] by the factors of their positions."""
        if positions is None:
            raise ArgumentTypeError(
                "a QueryTemperature got no positions; pass those of the queries"
            )
        return q * self.factors(positions, q.device).to(q.dtype)

    def extra_repr(self) -> str:
        """Return the form and its numbers."""
        if self.slope is not None:
            return f"{self.form!r}, heads={len(self.slope)}"
        return f"{self.form!r}, scale={self.scale:g}, length={self.length:g}"


class WeightlessRMSNorm(nn.Module):
    """Root mean square normalization without a learned weight.

    y = x / sqrt(mean(x^2) + eps), computed in fp32 or better

    Args:
        eps: added to the mean square.

    >>> WeightlessRMSNorm(eps=0.0)(torch.tensor([3.0, 4.0, 0.0, 0.0])).tolist()
    [1.2000000476837158, 1.600000023841858, 0.0, 0.0]

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4, with weights of 1.
    """

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        if not eps >= 0:
            raise ArgumentError(f"eps is {eps}; it must be at least 0")
        self.eps = eps

    def forward(self, x: Tensor, positions: object = None) -> Tensor:
        """Normalize x [..., D]; positions are ignored."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        return (wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the number that is added to the mean square."""
        return f"eps={self.eps}"


class L2Clip(nn.Module):
    """A limit on the length of each vector: longer ones are scaled to it.

    y = u min(1, c / |u|), u = s * x, computed in fp32 or better

    Args:
        limit, factors: c > 0, and heads and head dim of learned factors s, from 1, or None.

    Raises:
        ArgumentError: limit is not above 0, or a size is less than 1.

    >>> L2Clip(1.0)(torch.tensor([[3.0, 4.0], [0.3, 0.4]])).tolist()
    [[0.6000000238418579, 0.800000011920929], [0.30000001192092896, 0.4000000059604645]]

    Source: the code of Inkling 2 in transformers.
    """

    def __init__(self, limit: float, *, factors: tuple[int, int] | None = None) -> None:
        super().__init__()
        check_number("limit", limit, 0, math.inf, "above 0; leave the step out for no limit")
        if factors is not None and min(factors) < 1:
            raise ArgumentError(
                f"factors is {factors}; it must be (heads, head dim), or None for no factors"
            )
        self.limit = limit
        self.weight = None if factors is None else nn.Parameter(torch.ones(factors))

    def forward(self, x: Tensor, positions: object = None) -> Tensor:
        """Limit the lengths of x [..., D], or of heads [B,H,L,D]; positions are ignored."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        if self.weight is not None:
            wide = wide * self.weight.to(wide.dtype)[:, None]
        # the square of the length, at least that of the limit, has a gradient at 0
        square = wide.square().sum(-1, keepdim=True).clamp(min=self.limit**2)
        return (wide * (self.limit * square.rsqrt())).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the limit, and the sizes of the learned factors."""
        sizes = "" if self.weight is None else f", factors={tuple(self.weight.shape)}"
        return f"limit={self.limit:g}{sizes}"


class UnitNorm(nn.Module):
    """The normalization of nGPT: vectors of length 1, with a learned factor per channel.

    y = s * x / |x|, computed in fp32 or better; s = weight * initial / stored

    Args:
        heads: the number of heads n.
        dim: the size of a head d.
        initial, stored: the values at which each factor s and each weight start.

    Raises:
        ArgumentError: a size is less than 1, or initial or stored is not above 0.

    >>> UnitNorm(1, 2)(torch.tensor([[[[3.0, 4.0]]]])).tolist()
    [[[[0.6000000238418579, 0.800000011920929]]]]

    Source: Loshchilov et al. 2024 (arXiv 2410.01131), equations 15 and 16, section 2.5.
    """

    def __init__(self, heads: int, dim: int, *, initial: float = 1.0, stored: float = 1.0) -> None:
        super().__init__()
        check_positive_sizes("UnitNorm", heads=heads, dim=dim)
        check_number("initial", initial, 0, math.inf, "above 0")
        check_number("stored", stored, 0, math.inf, "above 0")
        self.ratio = initial / stored
        self.weight = nn.Parameter(torch.full((heads, dim), float(stored)))

    def forward(self, x: Tensor, positions: object = None) -> Tensor:
        """Normalize heads x [B,n,L,d]; positions are ignored."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        unit = F.normalize(wide, dim=-1)
        return (unit * (self.weight.to(wide.dtype) * self.ratio)[:, None]).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the heads and their size."""
        return f"{self.weight.shape[0]}, {self.weight.shape[1]}"


class Swish(nn.Module):
    """The activation x sigmoid(x), as a step on heads.

    Source: Ramachandran et al. 2017 (arXiv 1710.05941), equation 1 with beta 1.
    """

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """Apply the activation to x [..., D]; positions are ignored."""
        return F.silu(x)


class Clip(nn.Module):
    """Clip numbers to [-limit, limit], as a step of a `HeadProjection`.

    Source: Groeneveld et al. 2024 (arXiv 2402.00838): `clip_qkv` of the released code.
    """

    def __init__(self, limit: float) -> None:
        super().__init__()
        check_number("limit", limit, 0, float("inf"), "above 0")
        self.limit = limit

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """Clip x [..., D]; positions are ignored."""
        return x.clamp(-self.limit, self.limit)

    def extra_repr(self) -> str:
        """Return the limit of the absolute values."""
        return f"limit={self.limit:g}"
