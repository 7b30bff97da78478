"""Feed-forward layers, plain or gated, and their activations."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_number
from regard.nn.module_calls import is_plain, is_proxy
from regard.nn.weights import Linear
from regard.ops.tokenwise import clip, silu_product


class FeedForward(nn.Module):
    """The feed-forward layer of a Transformer: up, a nonlinearity, and down.

    y = W_2 f(W_1 x + b_1) + b_2

    Args:
        dim: the model dim M.
        hidden: the hidden size, 4 M in the first Transformer.
        activation: the module f; None is ReLU. BERT and GPT-2 use `nn.GELU()`.
        bias: whether the two linear maps have a bias.

    >>> layer = FeedForward(8, 32, nn.GELU())
    >>> layer(torch.zeros(1, 2, 8)).shape, layer.up.out_features
    (torch.Size([1, 2, 8]), 32)

    Source: Vaswani et al. 2017 (arXiv 1706.03762), equation 2.
    """

    def __init__(
        self, dim: int, hidden: int, activation: nn.Module | None = None, *, bias: bool = True
    ) -> None:
        super().__init__()
        self.up = Linear(dim, hidden, bias=bias)
        self.activation = activation if activation is not None else nn.ReLU()
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """Map hidden states [..., M] to [..., M]."""
        parts: dict[str, Any] = self._modules  # much faster than `self.down`
        result: Float[Tensor, "*L M"] = parts["down"](parts["activation"](parts["up"](x)))
        return result


class ReLUSquared(nn.Module):
    """The squared ReLU, max(x, 0)^2.

    Source: So et al. 2021 (arXiv 2109.08668), section 4.
    """

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """Compute max(x, 0)^2 of each number."""
        return F.relu(x).square()


class XIELU(nn.Module):
    """An activation whose slope grows linearly, with two learned curvatures.

    f(x) = a_p x^2 + beta x for x > 0,  a_n (exp(min(x, eps)) - 1 - x) + beta x otherwise
    a_p = softplus(alpha_p),  a_n = beta + softplus(alpha_n)

    beta = 1/2 and eps = -1e-6 are stored with the weights and not trained.

    >>> [round(y, 4) for y in XIELU()(torch.tensor([-1.0, 0.0, 1.0])).tolist()]
    [-0.2057, -0.0, 1.3]

    Source: Huang and Schlag 2024 (arXiv 2411.13010), equation 6; the code of Apertus.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alpha_p = nn.Parameter(torch.tensor([0.8]).expm1().log())
        self.alpha_n = nn.Parameter(torch.tensor([0.3]).expm1().log())
        self.beta = nn.Parameter(torch.tensor(0.5), requires_grad=False)
        self.eps = nn.Parameter(torch.tensor(-1e-6), requires_grad=False)

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """Compute f of each number."""
        left = (torch.expm1(x.minimum(self.eps)) - x) * (self.beta + F.softplus(self.alpha_n))
        return torch.where(x > 0, F.softplus(self.alpha_p) * x * x, left) + self.beta * x


class GatedFeedForward(nn.Module):
    """A gated feed-forward layer (GLU) with any activation.

    y = W_down (f(W_gate x) * W_up x)

    Args:
        dim: the model dim M.
        hidden: the hidden size; 8/3 M keeps the number of parameters of a plain layer of size 4 M.
        activation: the module f: `nn.GELU("tanh")` gives the GeGLU of Gemma.
        bias: whether the three linear maps have a bias.

    >>> GatedFeedForward(8, 16, nn.GELU("tanh"))(torch.zeros(1, 2, 8)).abs().sum().item()
    0.0

    Source: Shazeer 2020 (arXiv 2002.05202), section 2, equations 5 and 6.
    """

    def __init__(self, dim: int, hidden: int, activation: nn.Module, *, bias: bool = False) -> None:
        super().__init__()
        self.gate = Linear(dim, hidden, bias=bias)
        self.up = Linear(dim, hidden, bias=bias)
        self.activation = activation
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """Map hidden states [..., M] to [..., M]."""
        parts: dict[str, Any] = self._modules  # much faster than `self.down`
        gate, up, activation = parts["gate"](x), parts["up"](x), parts["activation"]
        if is_plain(activation, nn.SiLU) and not is_proxy(x):
            hidden = silu_product(gate, up)
        else:
            hidden = activation(gate) * up
        result: Float[Tensor, "*L M"] = parts["down"](hidden)
        return result


class SwiGLU(GatedFeedForward):
    """A gated feed-forward layer with SiLU.

    y = W_down (silu(W_gate x) * W_up x)

    Args:
        dim, hidden, bias: as for `GatedFeedForward`.

    >>> SwiGLU(8, 16)(torch.zeros(1, 2, 8)).abs().sum().item()
    0.0

    Source: Shazeer 2020 (arXiv 2002.05202), equation 6.
    """

    def __init__(self, dim: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__(dim, hidden, nn.SiLU(), bias=bias)


class ClippedSwiGLU(nn.Module):
    """A gated layer with clipped halves, as in gpt-oss, which adds 1 to the linear one.

    y = W_down ((clip(u, -limit, limit) + offset) * g sigmoid(alpha g)) + b_down
    g = min(W_gate x + b_gate, limit),  u = W_up x + b_up

    Args:
        dim: the model dim M.
        hidden: the hidden size.
        limit: the clipping limit; the gate is clipped from above only.
        alpha: the factor inside the sigmoid; 1.702 approximates GELU, and 1 is SiLU.
        offset: added to the linear half; 0 in DeepSeek-V4.
        after: whether the gate is clipped after its activation, as in Step-3.7, not before.
        bias: whether the three linear maps have a bias.

    Raises:
        ArgumentError: limit or alpha is not a positive number.

    >>> layer = ClippedSwiGLU(8, 16)
    >>> layer(torch.zeros(1, 2, 8)).shape
    torch.Size([1, 2, 8])

    Source: OpenAI 2025 (arXiv 2508.10925), section 2.2; the code of DeepSeek-V4 in transformers.
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        limit: float = 7.0,
        alpha: float = 1.702,
        offset: float = 1.0,
        after: bool = False,
        bias: bool = True,
    ) -> None:
        super().__init__()
        for name, value in (("limit", limit), ("alpha", alpha)):
            check_number(name, value, 0, float("inf"), "a finite number above 0")
        self.limit, self.alpha, self.offset, self.after = limit, alpha, offset, after
        self.gate, self.up = (Linear(dim, hidden, bias=bias) for _ in range(2))
        self.down = Linear(hidden, dim, bias=bias)

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """Map hidden states [..., M] to [..., M]."""
        gate = self.gate(x)
        gate = gate if self.after else clip(gate, -math.inf, self.limit)
        up = clip(self.up(x), -self.limit, self.limit)
        active = gate * torch.sigmoid(self.alpha * gate)
        active = clip(active, -math.inf, self.limit) if self.after else active
        result: Float[Tensor, "*L M"] = self.down((up + self.offset) * active)
        return result

    def extra_repr(self) -> str:
        """Return the clipping limit, the factor inside the sigmoid, and what is not usual."""
        offset = f", offset={self.offset:g}" * (self.offset != 1)
        after = ", after=True" * self.after
        return f"limit={self.limit:g}, alpha={self.alpha:g}{offset}{after}"


class GatedSharedExpert(nn.Module):
    """The expert for all tokens of Qwen2-MoE, which each token weighs by a gate.

    y = sigmoid(w . x) expert(x)

    Source: Qwen Team 2024 (arXiv 2407.10671), section 2.2.2, and its released code.
    """

    def __init__(self, dim: int, expert: nn.Module) -> None:
        super().__init__()
        self.expert, self.gate = expert, Linear(dim, 1, bias=False)

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """Map hidden states [..., M] to [..., M]."""
        result: Float[Tensor, "*L M"] = torch.sigmoid(self.gate(x)) * self.expert(x)
        return result


class GaussianTopK(nn.Module):
    """An activation that keeps the inputs of a token above a quantile of their normal distribution.

    y = f(max(0, x - mean(x) - z std(x))),  z = Phi^-1(sparsity)

    Source: Gemma 3n, `activation_sparsity_pattern` of its released code; You et al. 2025 (arXiv
    2506.06644), section 3.
    """

    def __init__(self, sparsity: float, activation: nn.Module) -> None:
        super().__init__()
        check_number("sparsity", sparsity, 0, 1, "above 0 and below 1")
        self.sparsity, self.activation = sparsity, activation

    def forward(self, x: Float[Tensor, "*L F"]) -> Float[Tensor, "*L F"]:
        """Return the activations [..., F] of inputs [..., F]."""
        deviations = NormalDist().inv_cdf(self.sparsity)
        cutoff = x.mean(-1, keepdim=True) + deviations * x.std(-1, keepdim=True, unbiased=False)
        y: Tensor = self.activation(torch.relu(x - cutoff))
        return y

    def extra_repr(self) -> str:
        """Return the share of zeros."""
        return f"{self.sparsity:g}"
