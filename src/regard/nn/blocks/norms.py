"""Normalization layers: RMS norm, RMS norm with an offset weight, and group norm per head."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_device, check_tensor
from regard.errors import ArgumentError
from regard.nn.module_calls import call_as_leaf, is_proxy
from regard.ops.tokenwise import rms_norm
from regard.units import plural


class RMSNorm(nn.Module):
    """Root mean square normalization with a learned weight.

    y = x / sqrt(mean(x^2) + eps) * weight, computed in fp32 or better

    Args:
        dim: the size of the last dimension.
        eps: added to the mean square.

    Raises:
        ArgumentError: dim is less than 1, or eps is negative.

    >>> RMSNorm(4, eps=0.0)(torch.tensor([3.0, 4.0, 0.0, 0.0])).tolist()
    [1.2000000476837158, 1.600000023841858, 0.0, 0.0]

    Source: Zhang and Sennrich 2019 (arXiv 1910.07467), equation 4.
    """

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__()
        if dim < 1 or not eps >= 0:
            raise ArgumentError(
                f"RMSNorm({dim}, eps={eps}): dim must be at least 1 and eps at least 0"
            )
        self.weight = nn.Parameter(torch.ones(dim))
        self.eps = eps

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """Normalize x [..., dim].

        Args:
            x: a tensor [..., dim].
            positions: ignored; a `HeadProjection` passes them to its steps.

        Returns:
            The normalized tensor [..., dim].
        """
        if type(x) is not Tensor and is_proxy(x):
            return call_as_leaf(self, RMSNorm.forward, x)
        # Reading the dictionary is faster than `self.weight`, which only a parametrization needs.
        weight = self._parameters.get("weight")
        if weight is None:
            weight = self.weight
        return rms_norm(x, weight, self.eps)

    def extra_repr(self) -> str:
        """Return the dimension and the epsilon."""
        return f"{self.weight.shape[0]}, eps={self.eps}"


class OffsetRMSNorm(RMSNorm):
    """An `RMSNorm` whose factor is 1 + weight, so that weight decay pulls the factor to 1.

    y = x / sqrt(mean(x^2) + eps) * (1 + weight), computed in fp32 or better

    Args:
        dim, eps: as for `RMSNorm`.

    >>> OffsetRMSNorm(4, eps=0.0)(torch.tensor([3.0, 4.0, 0.0, 0.0])).tolist()
    [1.2000000476837158, 1.600000023841858, 0.0, 0.0]

    Source: the code released with Gemma (arXiv 2403.08295).
    """

    def __init__(self, dim: int, *, eps: float = 1e-6) -> None:
        super().__init__(dim, eps=eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """Normalize x [..., dim]; positions are ignored."""
        if type(x) is not Tensor and is_proxy(x):
            return call_as_leaf(self, OffsetRMSNorm.forward, x)
        # Reading the dictionary is faster than `self.weight`, which only a parametrization needs.
        weight = self._parameters.get("weight")
        if weight is None:
            weight = self.weight
        return rms_norm(x, weight, self.eps, 1.0)


class OffsetLayerNorm(nn.LayerNorm):
    """A LayerNorm whose factor is 1 + weight.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * (1 + weight) + bias

    Source: NVIDIA's Megatron-LM, "layernorm1p"; Parmar et al. 2024 (arXiv 2402.16819).
    """

    def __init__(self, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__(dim, eps=eps)
        nn.init.zeros_(self.weight)

    def forward(self, x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L D"]:
        """Return x [..., dim], normalized."""
        return F.layer_norm(x, self.normalized_shape, self.weight + 1, self.bias, self.eps)


class HeadNorm(nn.Module):
    """Group norm with one group per head, and a weight and a bias per channel.

    y = (x - mean(x)) / sqrt(mean((x - mean(x))^2) + eps) * weight + bias,
    over the last dimension, in fp32 or better

    Args:
        heads: the number of heads H.
        dim: the size of one head E.
        eps: added to the variance.

    Raises:
        ArgumentError: a size is less than 1, or eps is negative.

    >>> HeadNorm(1, 2, eps=0.0)(torch.tensor([3.0, 7.0])[None, None, None]).flatten().tolist()
    [-1.0, 1.0]

    Source: Wu and He 2018 (arXiv 1803.08494), equation 7; on heads: Sun et al. 2023 (arXiv
    2307.08621), equation 8.
    """

    def __init__(self, heads: int, dim: int, *, eps: float = 1e-5) -> None:
        super().__init__()
        if heads < 1 or dim < 1 or not eps >= 0:
            raise ArgumentError(
                f"HeadNorm({heads}, {dim}, eps={eps}): heads and dim must be at least 1 and eps "
                "at least 0"
            )
        self.weight = nn.Parameter(torch.ones(heads, dim))
        self.bias = nn.Parameter(torch.zeros(heads, dim))
        self.eps = eps

    def forward(
        self, x: Float[Tensor, "B H T E"], positions: object = None
    ) -> Float[Tensor, "B H T E"]:
        """Normalize each head of each token separately.

        Args:
            x: heads [B,H,T,E].
            positions: ignored; a `HeadProjection` passes them to its steps.

        Returns:
            The normalized heads [B,H,T,E].

        Raises:
            ArgumentError, ArgumentTypeError: x is no float tensor of these heads and this dim.
        """
        check_tensor("x", x)
        check_device("x", x, self.weight, "weight")
        heads, dim = self.weight.shape
        if x.ndim != 4 or (x.shape[1], x.shape[3]) != (heads, dim):
            raise ArgumentError(
                f"x is {tuple(x.shape)}; this norm needs [batch, {heads}, length, {dim}]"
            )
        dtype = torch.promote_types(x.dtype, torch.float32)
        y = F.layer_norm(x.to(dtype), x.shape[-1:], eps=self.eps)
        weight, bias = (p.to(dtype)[:, None] for p in (self.weight, self.bias))
        return (y * weight + bias).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the number of heads, their size and the epsilon."""
        heads, dim = self.weight.shape
        return f"{plural(heads, 'head')} of {dim}, eps={self.eps}"


class JoinedHeadsRMSNorm(RMSNorm):
    """An `RMSNorm` of all heads of a token together, or of groups of neighbouring heads.

    y = x / sqrt(mean(x^2) + eps) * weight, over the H E channels of a token, in fp32 or better

    Source: MiniMax 2025 (arXiv 2501.08313), figure 4; in groups: Dao and Gu 2024 (arXiv
    2405.21060), section 7.3.
    """

    def __init__(self, heads: int, head_dim: int, *, groups: int = 1, eps: float = 1e-6) -> None:
        if groups < 1 or heads % groups:
            raise ArgumentError(
                f"groups is {groups}; it must be at least 1 and divide the number of heads, {heads}"
            )
        super().__init__(heads * head_dim, eps=eps)
        self.heads, self.head_dim, self.groups = heads, head_dim, groups

    def forward(
        self, x: Float[Tensor, "B H T E"], positions: object = None
    ) -> Float[Tensor, "B H T E"]:
        """Normalize the joined heads of each token."""
        if x.ndim != 4 or (x.shape[1], x.shape[3]) != (self.heads, self.head_dim):
            raise ArgumentError(
                f"x is {tuple(x.shape)}; this norm needs [batch, {self.heads}, length, "
                f"{self.head_dim}]"
            )
        joined = x.transpose(1, 2).flatten(2)  # [B,H,T,E] -> [B,T,H E]
        if self.groups == 1:
            joined = super().forward(joined)
        else:
            wide = joined.to(torch.promote_types(x.dtype, torch.float32))
            grouped = wide.unflatten(2, (self.groups, -1))  # [B,T,groups,H E / groups]
            grouped = grouped * torch.rsqrt(grouped.square().mean(-1, keepdim=True) + self.eps)
            joined = (grouped.flatten(2) * self.weight).to(x.dtype)
        heads: Tensor = joined.unflatten(2, (self.heads, self.head_dim))
        return heads.transpose(1, 2)

    def extra_repr(self) -> str:
        """Return the number of heads, their size and the epsilon."""
        return f"{plural(self.heads, 'head')} of {self.head_dim}, eps={self.eps}"


class L2Norm(nn.Module):
    """L2 normalization of the last dimension: x / sqrt(sum(x^2) + eps), computed in fp32 or better.

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3.
    """

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        if not eps >= 0:
            raise ArgumentError(f"L2Norm(eps={eps}): eps must be at least 0")
        self.eps = eps

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """Normalize x [..., D]; positions are ignored."""
        x32 = x if x.dtype in (torch.float32, torch.float64) else x.float()
        return (x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the epsilon of the norm."""
        return f"eps={self.eps}"
