"""Routers of mixtures of experts: which experts compute a token, and with which weights."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias, TypedDict, Unpack, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.argument_checks import (
    check_choice,
    check_device,
    check_number,
    check_positive_sizes,
    check_tensor,
)
from regard.errors import ArgumentError
from regard.ops.tokenwise import check_linear_map
from regard.units import plural


class Routing(NamedTuple):
    """The weights [N,k] and distinct experts [N,k] that a router chose, the best first."""

    weights: Float[Tensor, "N k"]
    experts: Int[Tensor, "N k"]


@dataclass(frozen=True)
class ExpertGroups:
    """Group-limited routing: a token may use the experts of the `topk` groups whose `best` highest
    scores have the largest sums; of equal groups the first are taken.

    Args:
        count: the number of groups; expert e is in group e // (experts / count).
        topk: how many groups a token may use.
        best: how many scores make up that of a group: 1 in DeepSeek-V2, 2 in DeepSeek-V3.

    Raises:
        ArgumentError: a number is less than 1, or topk is larger than count.

    >>> scores = torch.tensor([[0.9, 0.0, 0.5, 0.6]])
    >>> ExpertGroups(2, 1, best=2).allowed(scores).tolist()
    [[False, False, True, True]]

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.2.2; DeepSeek-AI 2024 (arXiv 2412.19437),
    section 2.1.2.
    """

    count: int
    topk: int
    best: int = 1

    def __post_init__(self) -> None:
        if min(self.count, self.topk, self.best) < 1 or self.topk > self.count:
            raise ArgumentError(
                f"{self}: each must be at least 1, and topk at most count, {self.count}"
            )

    def allowed(self, scores: Float[Tensor, "N n"]) -> Bool[Tensor, "N n"]:
        """Return which experts a token may use.

        Args:
            scores: the scores of the experts [N,n].

        Returns:
            Whether each expert is in one of the token's best groups [N,n].
        """
        by_group = scores.unflatten(-1, (self.count, -1))  # [N,n] -> [N,groups,n / groups]
        groups = _stable_topk(by_group.topk(self.best).values.sum(-1), self.topk)

        is_allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, groups, 1)
        return is_allowed[..., None].expand(by_group.shape).flatten(-2)


class RouterOptions(TypedDict, total=False):
    """The options of a `Router`."""

    normalize: bool
    bias: bool
    groups: ExpertGroups | None
    scale: float


Scoring: TypeAlias = Literal["sigmoid", "sqrtsoftplus"]
"""The function from logits to scores: s = sigmoid(l), or s = sqrt(ln(1 + exp(l)))."""


class ScoreOptions(RouterOptions, total=False):
    """The options of a `ScoreRouter`."""

    eps: float
    scoring: Scoring


class Router(nn.Module, ABC):
    """Base class of routers: a linear map computes a logit for each of n experts, and the k experts
    with the highest scores are chosen.

    Logits are computed in fp32 or better, also under autocast, because rounding can change the
    choice. Of equal scores the first are chosen.

    Args:
        dim: the model dim M.
        experts: the number of experts n.
        k: how many experts are chosen per token.
        normalize: whether the weights of a token sum to `scale`.
        bias: whether the linear map has a bias.
        groups: restricts the choice to the best groups of experts; None allows all.
        scale: a factor on the weights.

    Raises:
        ArgumentError: a size, k, the groups or the scale do not fit the experts.
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        k: int,
        *,
        normalize: bool = False,
        bias: bool = False,
        groups: ExpertGroups | None = None,
        scale: float = 1.0,
    ) -> None:
        super().__init__()
        check_positive_sizes(type(self).__name__, dim=dim, experts=experts, k=k)
        _check_topk(experts, k, groups)
        check_number("scale", scale, 0, float("inf"), "a finite number above 0")
        self.experts, self.k, self.normalize = experts, k, normalize
        self.groups, self.scale = groups, scale
        self.linear = nn.Linear(dim, experts, bias=bias)

    @abstractmethod
    def forward(self, x: Float[Tensor, "N M"]) -> Routing:
        """Choose experts for tokens.

        Args:
            x: hidden states [N,M].

        Returns:
            The weights [N,k] and the indices of the chosen experts [N,k].
        """

    def logits(self, x: Float[Tensor, "N M"]) -> Float[Tensor, "N n"]:
        """Compute the logits of the experts, in fp32 or better.

        Args:
            x: hidden states [N,M].

        Returns:
            The logits [N,n].
        """
        check_tensor("x", x)
        check_device("x", x, self.linear.weight, "the router")
        dtype = torch.promote_types(x.dtype, torch.float32)
        bias: Tensor | None = self.linear.bias
        with torch.autocast(x.device.type, enabled=False):
            weight, bias = self.linear.weight.to(dtype), None if bias is None else bias.to(dtype)
            check_linear_map(x.to(dtype), weight, bias)
            return F.linear(x.to(dtype), weight, bias)

    def choose(self, scores: Float[Tensor, "N n"], groups_by: Float[Tensor, "N n"]) -> Tensor:
        """Choose the k experts with the highest scores.

        Args:
            scores: the scores of the experts [N,n].
            groups_by: the scores [N,n] by which groups of experts are compared.

        Returns:
            The indices of the chosen experts [N,k], int64.
        """
        if self.groups is not None:
            scores = scores.masked_fill(~self.groups.allowed(groups_by), -torch.inf)
        return _stable_topk(scores, self.k)

    def extra_repr(self) -> str:
        """Return the numbers of chosen and all experts, the groups, `normalize` and the factor."""
        groups = "" if self.groups is None else f", {self.groups}"
        normalize = ", normalize" if self.normalize else ""
        scale = "" if self.scale == 1 else f", scale={self.scale:g}"
        return f"{self.k} of {self.experts}{groups}{normalize}{scale}"


class SoftmaxRouter(Router):
    """A router whose weights are a softmax of the logits, over all experts or over the chosen ones.

    l = W x + b;  C = the k experts with the highest l
    w_e = scale exp(l_e) / sum_{j in all} exp(l_j),
    or with `normalize` w_e = scale exp(l_e) / sum_{j in C} exp(l_j)

    With `normalize` it serves Mixtral and gpt-oss; without, Switch, DeepSeek-V2 and Qwen-MoE with
    norm_topk_prob false.

    Groups are compared by the softmax over all experts. The other arguments are those of `Router`.

    Args:
        corrected: whether experts are chosen by their softmax plus a correction, as in ERNIE 4.5.

    >>> router = SoftmaxRouter(1, 3, 2, normalize=True)
    >>> _ = router.linear.weight.data.copy_(torch.tensor([[0.0], [3.0], [3.0]]).log1p())
    >>> weights, experts = router(torch.ones(1, 1))
    >>> experts.tolist(), weights.tolist()
    ([[1, 2]], [[0.5, 0.5]])

    Source: Shazeer et al. 2017 (arXiv 1701.06538), equations 3 to 5; Jiang et al. 2024 (arXiv
    2401.04088), section 2.1.
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        k: int,
        *,
        corrected: bool = False,
        **options: Unpack[RouterOptions],
    ) -> None:
        super().__init__(dim, experts, k, **options)
        correction = nn.Parameter(torch.zeros(experts), requires_grad=False) if corrected else None
        self.correction = correction

    def forward(self, x: Float[Tensor, "N M"]) -> Routing:
        """Choose experts for tokens x [N,M]; return weights [N,k] and indices [N,k]."""
        logits = self.logits(x)
        shares = logits.softmax(-1)
        # Compare logits, because different shares may round to the same number.
        scores = logits if self.correction is None else shares.detach() + self.correction.detach()
        chosen = self.choose(scores, shares)
        if self.normalize:
            weights = logits.gather(-1, chosen).softmax(-1)
        else:
            weights = shares.gather(-1, chosen)
        return Routing(weights * self.scale, chosen)


class ScaledSoftmaxRouter(SoftmaxRouter):
    """A softmax router of normalized inputs, with a factor for each input and each expert.

    l = W (g * x / rms(x)) / sqrt(M);  C = the k experts with the highest l
    w_e = s_e exp(l_e) / sum_{j in C} exp(l_j)

    Source: Gemma Team 2026, the released code of Gemma 4.
    """

    def __init__(self, dim: int, experts: int, k: int, *, eps: float) -> None:
        super().__init__(dim, experts, k, normalize=True)
        self.eps = eps
        self.input_scale = nn.Parameter(torch.ones(dim))
        self.expert_scale = nn.Parameter(torch.ones(experts))

    def forward(self, x: Float[Tensor, "N M"]) -> Routing:
        """Choose experts for tokens x [N,M]; return weights [N,k] and indices [N,k]."""
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        wide = wide * (wide.square().mean(-1, keepdim=True) + self.eps).rsqrt()
        weights, chosen = super().forward(wide * (self.input_scale * x.shape[-1] ** -0.5))
        return Routing(weights * self.expert_scale[chosen], chosen)


class ScoreRouter(Router, ABC):
    """Base class of routers with a score per expert, by which chosen experts are weighed.

    s = f(W x);  w_e = scale s_e,  or with `normalize`  scale s_e / (sum_{j in C} s_j + eps)
    """

    def __init__(
        self,
        dim: int,
        experts: int,
        k: int,
        *,
        eps: float = 1e-20,
        scoring: Scoring = "sigmoid",
        **options: Unpack[RouterOptions],
    ) -> None:
        super().__init__(dim, experts, k, **options)
        check_choice("scoring", scoring, get_args(Scoring))
        self.eps, self.scoring = eps, scoring

    def scores(self, x: Float[Tensor, "N M"]) -> Float[Tensor, "N n"]:
        """Return the scores of all experts [N,n] for tokens x [N,M]."""
        logits = self.logits(x)
        return logits.sigmoid() if self.scoring == "sigmoid" else F.softplus(logits).sqrt()

    def weigh(self, scores: Float[Tensor, "N n"], chosen: Int[Tensor, "N k"]) -> Routing:
        """Return the weights of the chosen experts [N,k], from their scores."""
        weights = scores.gather(-1, chosen)
        if self.normalize:
            weights = weights / (weights.sum(-1, keepdim=True) + self.eps)
        return Routing(weights * self.scale, chosen)


class SigmoidRouter(ScoreRouter):
    """A router with a sigmoid score per expert, and a correction that affects the choice alone.

    s = f(W x);  C = the k experts with the highest s + correction
    w_e = scale s_e,  or with `normalize`  scale s_e / (sum_{j in C} s_j + eps)

    Training raises the correction of experts that are chosen too rarely, without a gradient; it
    should stay in fp32. Groups are compared by their corrected scores.

    Args:
        dim, experts, k, normalize, bias, groups, scale: as for `Router`.
        eps: added to the sum, which it keeps from being 0.
        scoring: the function f: "sigmoid", or "sqrtsoftplus", sqrt(ln(1 + exp(.))).

    >>> router = SigmoidRouter(1, 2, 1)
    >>> _ = router.linear.weight.data.copy_(torch.tensor([[0.0], [1.0]]))
    >>> _ = router.correction.data.copy_(torch.tensor([1.0, 0.0]))
    >>> weights, experts = router(torch.ones(1, 1))
    >>> experts.tolist(), weights.tolist()
    ([[0]], [[0.5]])

    Source: DeepSeek-AI 2024 (arXiv 2412.19437), equations 13 to 16.
    """

    def __init__(self, dim: int, experts: int, k: int, **options: Unpack[ScoreOptions]) -> None:
        super().__init__(dim, experts, k, **options)
        self.correction = nn.Parameter(torch.zeros(experts), requires_grad=False)

    def forward(self, x: Float[Tensor, "N M"]) -> Routing:
        """Choose experts for tokens x [N,M]; return weights [N,k] and indices [N,k]."""
        scores = self.scores(x)
        corrected = scores.detach() + self.correction.detach()
        return self.weigh(scores, self.choose(corrected, corrected))


class HashRouter(ScoreRouter):
    """A router whose table names the experts of each token id; scores only weigh them.

    C = table[id];  s = f(W x);  w_e as in `SigmoidRouter`

    Args:
        dim, experts, k, eps, scoring: as for `SigmoidRouter`, and the options of `Router`.
        vocabulary: the number of token ids.

    >>> router = HashRouter(1, 4, 2, vocabulary=3)
    >>> router(torch.ones(1, 1), torch.tensor([1])).experts.tolist()
    [[2, 3]]

    Source: Roller et al. 2021 (arXiv 2106.04426), section 3; the code of DeepSeek-V4 in
    transformers.
    """

    def __init__(
        self, dim: int, experts: int, k: int, *, vocabulary: int, **options: Unpack[ScoreOptions]
    ) -> None:
        super().__init__(dim, experts, k, **options)
        check_positive_sizes("HashRouter", vocabulary=vocabulary)
        rows = torch.arange(vocabulary * k).view(vocabulary, k) % experts
        self.table = nn.Parameter(rows, requires_grad=False)

    def forward(self, x: Float[Tensor, "N M"], ids: Int[Tensor, " N"] | None = None) -> Routing:
        """Look up the experts of token ids [N], and weigh them by the tokens x [N,M]."""
        if ids is None:
            raise ArgumentError(
                "this router chooses experts by token ids, and got none; call the whole decoder, "
                "or give a layer ids=..."
            )
        return self.weigh(self.scores(x), self.table[ids])


def _check_topk(experts: int, k: int, groups: ExpertGroups | None) -> None:
    """Check that k experts can be chosen from this number of experts in these groups."""
    if groups is None:
        if k > experts:
            raise ArgumentError(f"k is {k}; it must be at most the number of experts, {experts}")
        return
    size, rest = divmod(experts, groups.count)
    if rest or groups.best > size:
        raise ArgumentError(
            f"{plural(experts, 'expert')} cannot be in {groups}: groups must have equal sizes, "
            "each at least best"
        )
    if k > groups.topk * size:
        raise ArgumentError(
            f"k is {k}; {groups} allows a token at most {groups.topk * size} of {experts}"
        )


def _stable_topk(scores: Tensor, k: int) -> Tensor:
    """Return the indices of the k largest scores, of equal ones the first; a NaN is the largest."""
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


class SparseMixerRouter(Router):
    """A router that chooses the best expert twice; a weight is a softmax over near scores.

    e_1 = argmax s;  N_1 = {e: (s_max - s_e) / max(|s_e|, s_max) <= 2 tolerance}
    w_1 = exp(s_e1) / sum_{e in N_1} exp(s_e);  the second in the same way without e_1

    The estimate of gradients with which SparseMixer trains is not built.

    Source: Liu et al. 2024 (arXiv 2409.12136), section 3, and the released code.
    """

    def __init__(self, dim: int, experts: int, *, tolerance: float) -> None:
        super().__init__(dim, experts, 2)
        check_number("tolerance", tolerance, -1e-300, float("inf"), "at least 0")
        self.tolerance = tolerance

    def forward(self, x: Float[Tensor, "N M"]) -> Routing:
        """Choose two experts for tokens x [N,M]; return weights [N,2] and indices [N,2]."""
        scores = self.logits(x)
        chosen = self.choose(scores, scores)  # the second is the best without the first
        left, weights = scores, []
        for expert in chosen.split(1, -1):
            best = left.gather(-1, expert)
            # a score that is left out is at -inf, which is far, whatever it is divided by
            distance = (best - left) / torch.maximum(scores.abs(), best)
            near_scores = left.masked_fill(distance > 2 * self.tolerance, -torch.inf)
            weights.append(near_scores.softmax(-1).gather(-1, expert))
            left = left.scatter(-1, expert, -torch.inf)
        return Routing(torch.cat(weights, -1), chosen)

    def extra_repr(self) -> str:
        """Return the numbers of chosen and all experts, and the tolerance."""
        return f"{super().extra_repr()}, tolerance={self.tolerance:g}"


class LogitSigmoidRouter(Router):
    """A router that chooses by logits, and whose weights are their sigmoids.

    l = W x + b;  C = the k experts with the highest l;  w_e = scale sigmoid(l_e)

    Source: the code of Llama 4 in transformers, 2025.
    """

    def __init__(self, dim: int, experts: int, k: int, *, scale: float = 1.0) -> None:
        super().__init__(dim, experts, k, scale=scale)

    def forward(self, x: Float[Tensor, "N M"]) -> Routing:
        """Choose experts for tokens x [N,M]; return weights [N,k] and indices [N,k]."""
        logits = self.logits(x)
        chosen = self.choose(logits, logits)
        return Routing(logits.gather(-1, chosen).sigmoid() * self.scale, chosen)
