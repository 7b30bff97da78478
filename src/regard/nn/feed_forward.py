"""Feed-forward layers, which a block applies to each position on its own: one network, plain or
gated, or a mixture of experts with its routers.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.arguments import check_device, check_number, check_tensor
from regard.deprecation import renamed_attribute, renamed_parameters
from regard.errors import ArgumentError
from regard.nn.linear import Linear
from regard.ops.gemv import check_map


class FeedForward(nn.Module):
    """The plain feed-forward layer: wide, a nonlinearity, and back.

    y = W_2 f(W_1 x + b_1) + b_2

    Args:
        dim: the model dim M.
        hidden: the width between, 4 M in the first Transformer.
        activation: f, a module; None is ReLU, as in the first Transformer. BERT and GPT-2 have
            `nn.GELU()`.
        bias: whether the two linear maps have one.

    >>> import torch
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
        """x [..., M] -> [..., M]."""
        parts: dict[str, Any] = self._modules  # asked directly: much quicker than `self.down`
        result: Float[Tensor, "*L M"] = parts["down"](parts["activation"](parts["up"](x)))
        return result


class GatedFeedForward(nn.Module):
    """A feed-forward layer whose width is gated: any activation makes the gate.

    y = W_down (f(W_gate x) * W_up x)

    Args:
        dim: the model dim M.
        hidden: the width between; 8/3 M keeps the parameters of a plain layer of width 4 M.
        activation: f, a module: `nn.GELU("tanh")` gives the GeGLU of Gemma, `nn.SiLU()` is
            `SwiGLU`.
        bias: whether the three linear maps have one.

    >>> import torch
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
        """x [..., M] -> [..., M]."""
        parts: dict[str, Any] = self._modules  # asked directly: much quicker than `self.down`
        result: Float[Tensor, "*L M"] = parts["down"](
            parts["activation"](parts["gate"](x)) * parts["up"](x)
        )
        return result


class SwiGLU(GatedFeedForward):
    """A gated feed-forward layer with SiLU.

    y = W_down (silu(W_gate x) * W_up x)

    Args:
        dim: the model dim M.
        hidden: the width between; 8/3 M keeps the parameters of a plain layer of width 4 M.
        bias: whether the three linear maps have one.

    >>> import torch
    >>> SwiGLU(8, 16)(torch.zeros(1, 2, 8)).abs().sum().item()
    0.0

    Source: Shazeer 2020 (arXiv 2002.05202), equation 6.
    """

    def __init__(self, dim: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__(dim, hidden, nn.SiLU(), bias=bias)


class ClippedSwiGLU(nn.Module):
    """The experts of gpt-oss: gated, both halves clipped, and the linear one moved by 1.

    y = W_down ((clip(u, -limit, limit) + 1) * g sigmoid(alpha g)) + b_down
    g = min(W_gate x + b_gate, limit),  u = W_up x + b_up

    Args:
        dim: the model dim M.
        hidden: the width between.
        limit: where the halves are clipped; the gate from above only.
        alpha: the slope within the sigmoid; 1.702 makes it near to GELU.

    Raises:
        ArgumentError: limit or alpha is not a positive number.

    >>> layer = ClippedSwiGLU(8, 16)
    >>> layer(torch.zeros(1, 2, 8)).shape
    torch.Size([1, 2, 8])

    Source: OpenAI 2025 (arXiv 2508.10925), section 2.2.
    """

    def __init__(self, dim: int, hidden: int, *, limit: float = 7.0, alpha: float = 1.702) -> None:
        super().__init__()
        for name, value in (("limit", limit), ("alpha", alpha)):
            check_number(name, value, 0, float("inf"), "a finite number above 0")
        self.limit, self.alpha = limit, alpha
        self.gate = Linear(dim, hidden)
        self.up = Linear(dim, hidden)
        self.down = Linear(hidden, dim)

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """x [..., M] -> [..., M]."""
        gate = self.gate(x).clamp(max=self.limit)
        up = self.up(x).clamp(-self.limit, self.limit)
        result: Float[Tensor, "*L M"] = self.down(
            (up + 1) * (gate * torch.sigmoid(self.alpha * gate))
        )
        return result

    def extra_repr(self) -> str:
        """The limit and the slope."""
        return f"limit={self.limit:g}, alpha={self.alpha:g}"


class Routing(NamedTuple):
    """What a router says of N tokens.

    Attributes:
        weights: what each chosen expert counts, fp32 or better, [N, k].
        experts: which experts those are, the best first, each at most once for a token, int64 [N,
            k].

    >>> Routing(torch.tensor([[0.75, 0.25]]), torch.tensor([[3, 1]])).experts.tolist()
    [[3, 1]]
    """

    weights: Float[Tensor, "N k"]
    experts: Int[Tensor, "N k"]


@dataclass(frozen=True)
class ExpertGroups:
    """Experts in groups of equal size, of which a token may use the best few.

    A group's score is the sum of its `best` highest expert scores; experts of the `kept` groups
    with the highest are allowed. Of equal groups the first are kept.

    Args:
        count: how many groups there are; expert e is in group e // (experts / count).
        topk: how many of them a token may use.
        best: how many experts speak for their group: 1 in DeepSeek-V2, 2 in DeepSeek-V3.

    Raises:
        ArgumentError: a number is less than 1, or more groups are kept than there are.

    >>> scores = torch.tensor([[0.9, 0.0, 0.5, 0.6]])
    >>> ExpertGroups(2, 1).allowed(scores).tolist(), ExpertGroups(2, 1, best=2).allowed(scores).tolist()
    ([[True, True, False, False]], [[False, False, True, True]])

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.2.2; DeepSeek-AI 2024 (arXiv 2412.19437),
    section 2.1.2.
    """

    count: int
    topk: int
    best: int = 1
    kept = renamed_attribute("topk")

    def __post_init__(self) -> None:
        if min(self.count, self.topk, self.best) < 1 or self.topk > self.count:
            raise ArgumentError(
                f"{self}: each must be at least 1, and topk at most count, {self.count}"
            )

    def allowed(self, scores: Float[Tensor, "N n"]) -> Bool[Tensor, "N n"]:
        """Scores of n experts -> which of them a token may use."""
        by_group = scores.unflatten(-1, (self.count, -1))
        groups = _stable_topk(by_group.topk(self.best).values.sum(-1), self.topk)
        kept = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, groups, 1)
        return kept[..., None].expand(by_group.shape).flatten(-2)


ExpertGroups.__init__ = renamed_parameters(kept="topk")(ExpertGroups.__init__)  # type: ignore[method-assign]


class Router(nn.Module, ABC):
    """A linear map gives each of n experts a logit; the k with the highest scores serve the token.

    Logits are computed in fp32 or better whatever the model's dtype and under autocast too, since
    rounding one may change who is chosen. Of equal scores the first experts are chosen, so that a
    choice never depends on the kernel.

    Args:
        dim: the model dim M.
        experts: how many experts there are, n.
        k: how many serve a token.
        normalise: whether the weights of a token sum to `scale`.
        bias: whether the linear map has one.
        groups: which experts may be chosen; None allows all.
        scale: a factor on the weights.

    Raises:
        ArgumentError: a size is less than 1; k is more than the experts there are, or than the kept
            groups have; the groups are not of one size, or smaller than `best`; scale is not a
            positive number.
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        k: int,
        *,
        normalise: bool = False,
        bias: bool = False,
        groups: ExpertGroups | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        if min(dim, experts, k) < 1:
            raise ArgumentError(
                f"{type(self).__name__}(dim={dim}, experts={experts}, k={k}): each must be at "
                "least 1"
            )
        _check_topk(experts, k, groups)
        check_number("scale", scale, 0, float("inf"), "a finite number above 0")
        self.experts, self.k, self.normalise = experts, k, normalise
        self.groups, self.scale = groups, scale
        self.linear = nn.Linear(dim, experts, bias=bias)

    @abstractmethod
    def forward(self, x: Float[Tensor, "N M"]) -> Routing:
        """x [N,M] -> weights [N,k] and experts [N,k]."""

    def logits(self, x: Float[Tensor, "N M"]) -> Float[Tensor, "N n"]:
        """x [N,M] -> one number per expert [N,n], in fp32 or better."""
        check_tensor("x", x)
        check_device("x", x, self.linear.weight, "the router")
        wide = torch.promote_types(x.dtype, torch.float32)
        own = self.linear.bias
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.linear.weight.to(wide), None if own is None else own.to(wide)
            check_map(x.to(wide), weight, bias)
            return F.linear(x.to(wide), weight, bias)

    def choose(self, scores: Float[Tensor, "N n"], groups_by: Float[Tensor, "N n"]) -> Tensor:
        """The k highest scores [N,n] in the groups that the scores `groups_by` allow -> experts,
        int64 [N,k].
        """
        if self.groups is not None:
            scores = scores.masked_fill(~self.groups.allowed(groups_by), -torch.inf)
        return _stable_topk(scores, self.k)

    def extra_repr(self) -> str:
        """How many experts of how many, and from which groups."""
        groups = "" if self.groups is None else f", {self.groups}"
        normalise = ", normalise" if self.normalise else ""
        scale = "" if self.scale == 1 else f", scale={self.scale:g}"
        return f"{self.k} of {self.experts}{groups}{normalise}{scale}"


class SoftmaxRouter(Router):
    """Weights are a softmax of the logits, over all experts or over the chosen ones.

    l = W x + b;  C = the k experts with the highest l
    w_e = scale exp(l_e) / sum_{j in all} exp(l_j),
    or with `normalise` w_e = scale exp(l_e) / sum_{j in C} exp(l_j)

    The second is both "softmax, choose, divide by the sum" (Mixtral) and "choose, then softmax"
    (gpt-oss): the same numbers. The first is Switch's, DeepSeek-V2's, and Qwen-MoE's with
    norm_topk_prob false.

    Groups are compared by the softmax over all experts. The arguments are those of `Router`.

    >>> router = SoftmaxRouter(1, 3, 2, normalise=True)
    >>> _ = router.linear.weight.data.copy_(torch.tensor([[0.0], [3.0], [3.0]]).log1p())
    >>> weights, experts = router(torch.ones(1, 1))
    >>> experts.tolist(), weights.tolist()
    ([[1, 2]], [[0.5, 0.5]])

    Source: Shazeer et al. 2017 (arXiv 1701.06538), equations 3 to 5; Jiang et al. 2024 (arXiv
    2401.04088), section 2.1.
    """

    def forward(self, x: Float[Tensor, "N M"]) -> Routing:
        """x [N,M] -> weights [N,k] and experts [N,k]."""
        logits = self.logits(x)
        shares = logits.softmax(-1)
        # by the logits: shares that differ may round to the same number
        chosen = self.choose(logits, shares)
        if self.normalise:
            weights = logits.gather(-1, chosen).softmax(-1)
        else:
            weights = shares.gather(-1, chosen)
        return Routing(weights * self.scale, chosen)


class SigmoidRouter(Router):
    """Each expert has a score of its own; a correction per expert takes part in the choice alone.

    s = sigmoid(W x);  C = the k experts with the highest s + correction
    w_e = scale s_e,  or with `normalise`  scale s_e / (sum_{j in C} s_j + 1e-20)

    The correction is not trained by gradient: it is raised for experts that are used too little,
    and so is a parameter without a gradient. Loaders and optimisers should keep it in fp32.

    Groups are compared by their corrected scores. The arguments are those of `Router`.

    >>> router = SigmoidRouter(1, 2, 1)
    >>> _ = router.linear.weight.data.copy_(torch.tensor([[0.0], [1.0]]))
    >>> _ = router.correction.data.copy_(torch.tensor([1.0, 0.0]))
    >>> weights, experts = router(torch.ones(1, 1))
    >>> experts.tolist(), weights.tolist()
    ([[0]], [[0.5]])

    Source: DeepSeek-AI 2024 (arXiv 2412.19437), equations 13 to 16.
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        k: int,
        *,
        normalise: bool = False,
        bias: bool = False,
        groups: ExpertGroups | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__(
            dim, experts, k, normalise=normalise, bias=bias, groups=groups, scale=scale
        )
        self.correction = nn.Parameter(torch.zeros(experts), requires_grad=False)

    def forward(self, x: Float[Tensor, "N M"]) -> Routing:
        """x [N,M] -> weights [N,k] and experts [N,k]."""
        scores = self.logits(x).sigmoid()
        corrected = scores.detach() + self.correction.detach()
        chosen = self.choose(corrected, corrected)
        weights = scores.gather(-1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(weights * self.scale, chosen)


def _check_topk(experts: int, k: int, groups: ExpertGroups | None) -> None:
    if groups is None:
        if k > experts:
            raise ArgumentError(f"k is {k}; there are {experts} experts to choose from")
        return
    size, rest = divmod(experts, groups.count)
    if rest or groups.best > size:
        raise ArgumentError(
            f"{experts} experts cannot be in {groups}: groups are of one size, and that is at "
            "least best"
        )
    if k > groups.topk * size:
        raise ArgumentError(
            f"k is {k}; {groups} allows {groups.topk * size} of the {experts} experts to a token"
        )


def _stable_topk(scores: Tensor, k: int) -> Tensor:
    """The places of the k largest, of equal ones the first (`topk` gives any); a NaN counts as the
    largest.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


class MoE(nn.Module):
    """The experts that a router chose for a token, weighted and summed, beside an expert that
    serves all.

    y = sum_{e in C(x)} w_e(x) expert_e(x)  (+ shared(x))

    Tokens are gathered per expert: an expert computes its own tokens alone, and one that nobody
    chose computes nothing. A token's sum runs over its experts in ascending order, in fp32 or
    better, whatever the batch and the device. Which experts are used is read from the device once a
    call, so that a compiled graph breaks there.

    Args:
        router: a `Router` over as many experts as there are.
        experts: feed-forward modules [n,M] -> [n,M], such as `SwiGLU` or `ClippedSwiGLU`.
        shared: a feed-forward module for every token, or None.

    Raises:
        ArgumentError: the router chooses among another number of experts.

    >>> from regard.nn.feed_forward import SwiGLU
    >>> from regard.nn.feed_forward import SoftmaxRouter
    >>> moe = MoE(SoftmaxRouter(8, 4, 2), [SwiGLU(8, 16) for _ in range(4)], SwiGLU(8, 16))
    >>> moe(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Source: Shazeer et al. 2017 (arXiv 1701.06538), equation 1; shared: DeepSeek-AI 2024 (arXiv
    2401.06066), equation 9.
    """

    def __init__(
        self, router: Router, experts: Sequence[nn.Module], shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        if router.experts != len(experts):
            raise ArgumentError(
                f"the router chooses among {router.experts} experts, and there are {len(experts)}"
            )
        self.router, self.experts, self.shared = router, nn.ModuleList(experts), shared

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """x [..., M] -> [..., M]."""
        rows = x.reshape(-1, x.shape[-1])
        y = torch.zeros_like(rows, dtype=torch.promote_types(x.dtype, torch.float32))
        for expert, tokens, weights in _tokens_by_expert(*self.router(rows)):
            if tokens is None:
                y = y + self.experts[expert](rows) * weights
            else:
                # a token stands there once: its sum has the order of this loop on every device
                y.index_add_(0, tokens, (self.experts[expert](rows[tokens]) * weights).to(y.dtype))
        if self.shared is not None:
            y = y + self.shared(rows)
        return y.to(x.dtype).reshape(x.shape)


def _tokens_by_expert(
    weights: Tensor, experts: Tensor
) -> Iterator[tuple[int, Tensor | None, Tensor]]:
    """Of a routing, the experts that are used in ascending order, their tokens [n], None for all,
    and weights [n,1].
    """
    k = experts.shape[1]
    if len(experts) == 1:  # decoding: there is nothing to gather
        for expert, slot in sorted(zip(experts[0].tolist(), range(k), strict=True)):
            yield expert, None, weights[:, slot, None]
        return
    order = experts.flatten().argsort(stable=True)
    used, counts = torch.unique_consecutive(experts.flatten()[order], return_counts=True)
    sizes = counts.tolist()
    tokens, shares = (order // k).split(sizes), weights.flatten()[order, None].split(sizes)
    yield from zip(used.tolist(), tokens, shares, strict=True)
