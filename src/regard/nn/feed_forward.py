"""Feed-forward layers, which a block applies to each position separately: a single network, plain
or gated, or a mixture of experts (MoE) with its router.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from regard.argument_checks import check_device, check_number, check_tensor
from regard.errors import ArgumentError
from regard.nn.as_written import is_plain
from regard.nn.fx_leaf import is_proxy
from regard.nn.linear import Linear
from regard.nn.stacked_experts import StackedExperts
from regard.ops.gated_product import silu_product
from regard.ops.gemv import check_linear_map
from regard.units import plural


class FeedForward(nn.Module):
    """The feed-forward layer of a Transformer: a linear map up, a nonlinearity, and a linear map
    down.

    y = W_2 f(W_1 x + b_1) + b_2

    Args:
        dim: the model dim M.
        hidden: the hidden size, 4 M in the first Transformer.
        activation: the module f; None is ReLU, as in the first Transformer. BERT and GPT-2 use
            `nn.GELU()`.
        bias: whether the two linear maps have a bias.

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
        """Map hidden states [..., M] to [..., M]."""
        parts: dict[str, Any] = self._modules  # much faster than `self.down`
        result: Float[Tensor, "*L M"] = parts["down"](parts["activation"](parts["up"](x)))
        return result


class ReLUSquared(nn.Module):
    """The squared ReLU, max(x, 0)^2.

    >>> ReLUSquared()(torch.tensor([-2.0, 3.0])).tolist()
    [0.0, 9.0]

    Source: So et al. 2021 (arXiv 2109.08668), section 4.
    """

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """Compute max(x, 0)^2 of each number."""
        return F.relu(x).square()


class GatedFeedForward(nn.Module):
    """A gated feed-forward layer (GLU) with any activation.

    y = W_down (f(W_gate x) * W_up x)

    Args:
        dim: the model dim M.
        hidden: the hidden size; 8/3 M keeps the number of parameters of a plain layer of size 4 M.
        activation: the module f: `nn.GELU("tanh")` gives the GeGLU of Gemma, `nn.SiLU()` gives
            `SwiGLU`.
        bias: whether the three linear maps have a bias.

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
        dim: the model dim M.
        hidden: the hidden size; 8/3 M keeps the number of parameters of a plain layer of size 4 M.
        bias: whether the three linear maps have a bias.

    >>> import torch
    >>> SwiGLU(8, 16)(torch.zeros(1, 2, 8)).abs().sum().item()
    0.0

    Source: Shazeer 2020 (arXiv 2002.05202), equation 6.
    """

    def __init__(self, dim: int, hidden: int, *, bias: bool = False) -> None:
        super().__init__(dim, hidden, nn.SiLU(), bias=bias)


class ClippedSwiGLU(nn.Module):
    """The expert network of gpt-oss: a gated layer whose two halves are clipped, with 1 added to
    the linear half.

    y = W_down ((clip(u, -limit, limit) + 1) * g sigmoid(alpha g)) + b_down
    g = min(W_gate x + b_gate, limit),  u = W_up x + b_up

    Args:
        dim: the model dim M.
        hidden: the hidden size.
        limit: the clipping limit; the gate is clipped from above only.
        alpha: the factor inside the sigmoid; 1.702 approximates GELU.

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
        """Map hidden states [..., M] to [..., M]."""
        gate = self.gate(x).clamp(max=self.limit)
        up = self.up(x).clamp(-self.limit, self.limit)
        result: Float[Tensor, "*L M"] = self.down(
            (up + 1) * (gate * torch.sigmoid(self.alpha * gate))
        )
        return result

    def extra_repr(self) -> str:
        """Return the clipping limit and the factor inside the sigmoid."""
        return f"limit={self.limit:g}, alpha={self.alpha:g}"


class GatedSharedExpert(nn.Module):
    """The expert for all tokens of Qwen2-MoE, which each token weighs by a gate.

    y = sigmoid(w . x) expert(x)

    Args:
        expert: a feed-forward module [n,M] -> [n,M].

    >>> shared = GatedSharedExpert(8, SwiGLU(8, 16))
    >>> shared(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Source: Qwen Team 2024 (arXiv 2407.10671), section 2.2.2, and its released code.
    """

    def __init__(self, dim: int, expert: nn.Module) -> None:
        super().__init__()
        self.expert, self.gate = expert, Linear(dim, 1, bias=False)

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """Map hidden states [..., M] to [..., M]."""
        result: Float[Tensor, "*L M"] = torch.sigmoid(self.gate(x)) * self.expert(x)
        return result


class Routing(NamedTuple):
    """The choice of a router for N tokens.

    Attributes:
        weights: the weight of each chosen expert [N,k], in fp32 or better.
        experts: the indices of the chosen experts [N,k], int64, the best first and without
            repetition.

    >>> Routing(torch.tensor([[0.75, 0.25]]), torch.tensor([[3, 1]])).experts.tolist()
    [[3, 1]]
    """

    weights: Float[Tensor, "N k"]
    experts: Int[Tensor, "N k"]


@dataclass(frozen=True)
class ExpertGroups:
    """Group-limited routing: experts are in groups of equal size, and a token may use the best
    groups only.

    The score of a group is the sum of its `best` highest expert scores. A token may use the experts
    of the `topk` groups with the highest scores; of groups with equal scores the first are taken.

    Args:
        count: the number of groups; expert e is in group e // (experts / count).
        topk: how many groups a token may use.
        best: how many of a group's highest expert scores make up its score: 1 in DeepSeek-V2, 2 in
            DeepSeek-V3.

    Raises:
        ArgumentError: a number is less than 1, or topk is larger than count.

    >>> scores = torch.tensor([[0.9, 0.0, 0.5, 0.6]])
    >>> ExpertGroups(2, 1).allowed(scores).tolist()
    [[True, True, False, False]]
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
        by_group = scores.unflatten(-1, (self.count, -1))
        groups = _stable_topk(by_group.topk(self.best).values.sum(-1), self.topk)

        is_allowed = torch.zeros_like(by_group[..., 0], dtype=torch.bool).scatter(-1, groups, 1)
        return is_allowed[..., None].expand(by_group.shape).flatten(-2)


class Router(nn.Module, ABC):
    """Base class of routers: a linear map computes a logit for each of n experts, and the k experts
    with the highest scores are chosen.

    Logits are computed in fp32 or better, whatever the model's dtype and also under autocast,
    because rounding can change the choice. Of experts with equal scores the first are chosen, so
    that the choice does not depend on the kernel.

    Args:
        dim: the model dim M.
        experts: the number of experts n.
        k: how many experts are chosen per token.
        normalise: whether the weights of a token sum to `scale`.
        bias: whether the linear map has a bias.
        groups: restricts the choice to the best groups of experts; None allows all.
        scale: a factor on the weights.

    Raises:
        ArgumentError: a size is less than 1; k is larger than the number of allowed experts; the
            groups are not of equal size, or smaller than `best`; scale is not a positive number.
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
        """Choose experts for tokens."""

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
        """Return the numbers of chosen and all experts, the groups, `normalise` and the factor."""
        groups = "" if self.groups is None else f", {self.groups}"
        normalise = ", normalise" if self.normalise else ""
        scale = "" if self.scale == 1 else f", scale={self.scale:g}"
        return f"{self.k} of {self.experts}{groups}{normalise}{scale}"


class SoftmaxRouter(Router):
    """A router whose weights are a softmax of the logits, over all experts or over the chosen ones.

    l = W x + b;  C = the k experts with the highest l
    w_e = scale exp(l_e) / sum_{j in all} exp(l_j),
    or with `normalise` w_e = scale exp(l_e) / sum_{j in C} exp(l_j)

    With `normalise` this is both "softmax, choose, divide by the sum" (Mixtral) and "choose, then
    softmax" (gpt-oss), which give the same numbers. Without it, it is the router of Switch, of
    DeepSeek-V2, and of Qwen-MoE with norm_topk_prob false.

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
        """Choose experts for tokens x [N,M]; return weights [N,k] and indices [N,k]."""
        logits = self.logits(x)
        shares = logits.softmax(-1)
        # Compare logits, because different shares may round to the same number.
        chosen = self.choose(logits, shares)
        if self.normalise:
            weights = logits.gather(-1, chosen).softmax(-1)
        else:
            weights = shares.gather(-1, chosen)
        return Routing(weights * self.scale, chosen)


class SigmoidRouter(Router):
    """A router with a sigmoid score per expert, and a correction per expert that affects the choice
    but not the weights.

    s = sigmoid(W x);  C = the k experts with the highest s + correction
    w_e = scale s_e,  or with `normalise`  scale s_e / (sum_{j in C} s_j + 1e-20)

    The correction balances the load: training raises it for experts that are chosen too rarely,
    without a gradient. It is a parameter with requires_grad=False, and should stay in fp32.

    Groups are compared by their corrected scores.

    Args:
        dim: the model dim M.
        experts: the number of experts n.
        k: how many experts are chosen per token.
        normalise: whether the weights of a token sum to `scale`.
        bias: whether the linear map has a bias.
        groups: restricts the choice to the best groups of experts; None allows all.
        scale: a factor on the weights.

    Raises:
        ArgumentError: an argument does not suit `Router`.

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
        """Choose experts for tokens x [N,M]; return weights [N,k] and indices [N,k]."""
        scores = self.logits(x).sigmoid()
        corrected = scores.detach() + self.correction.detach()
        chosen = self.choose(corrected, corrected)
        weights = scores.gather(-1, chosen)
        if self.normalise:
            weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
        return Routing(weights * self.scale, chosen)


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
    """Return the indices of the k largest scores. Of equal scores the first are returned, unlike
    `torch.topk`; a NaN counts as the largest.
    """
    return scores.sort(dim=-1, descending=True, stable=True).indices[..., :k]


class MoE(nn.Module):
    """A mixture of experts: the weighted sum of the expert networks that a router chooses for each
    token, plus an optional expert for all tokens.

    y = sum_{e in C(x)} w_e(x) expert_e(x)  (+ shared(x))

    Tokens are gathered by expert: an expert computes only its own tokens, and an expert without
    tokens computes nothing. The sum for a token runs over its experts in ascending order, in fp32
    or better, whatever the batch and the device. The indices of the chosen experts are copied to
    the CPU once per call, which causes a graph break under torch.compile. After
    `regard.nn.stack_experts`, few tokens on another device are computed without that copy.

    Args:
        router: a `Router` for this number of experts.
        experts: feed-forward modules [n,M] -> [n,M], such as `SwiGLU` or `ClippedSwiGLU`.
        shared: a feed-forward module that is applied to every token, or None.

    Raises:
        ArgumentError: the router is for another number of experts.

    >>> from regard.nn.feed_forward import SwiGLU
    >>> from regard.nn.feed_forward import SoftmaxRouter
    >>> moe = MoE(SoftmaxRouter(8, 4, 2), [SwiGLU(8, 16) for _ in range(4)], SwiGLU(8, 16))
    >>> moe(torch.zeros(1, 3, 8)).shape
    torch.Size([1, 3, 8])

    Source: Shazeer et al. 2017 (arXiv 1701.06538), equation 1; shared: DeepSeek-AI 2024 (arXiv
    2401.06066), equation 9.
    """

    stacked: StackedExperts | None = None
    """The stacks of `stack_experts`, or None."""

    @property
    def static_step_refusal(self) -> str | None:
        """Why a step cannot be captured as a CUDA graph, as words that follow the name of the
        class; None if it can.
        """
        if self.stacked is not None:
            return None
        return (
            "reads which experts were chosen, because each is a module of its own; "
            "regard.nn.stack_experts(model.decoder) stacks them"
        )

    def __init__(
        self, router: Router, experts: Sequence[nn.Module], shared: nn.Module | None = None
    ) -> None:
        super().__init__()
        if router.experts != len(experts):
            raise ArgumentError(
                f"the router is for {plural(router.experts, 'expert')}, but experts has "
                f"{len(experts)}"
            )
        self.router, self.experts, self.shared = router, nn.ModuleList(experts), shared

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L M"]:
        """Map hidden states [..., M] to [..., M]."""
        rows = x.reshape(-1, x.shape[-1])
        y = torch.zeros_like(rows, dtype=torch.promote_types(x.dtype, torch.float32))
        shares, chosen = self.router(rows)
        stacked = self.stacked
        if stacked is not None and stacked.serve(self.experts, rows, chosen.numel()):
            for added in self._from_stacks(stacked, rows, shares, chosen):
                y = y + added
        else:
            y = self._one_by_one(y, rows, shares, chosen)
        if self.shared is not None:
            y = y + self.shared(rows)
        return y.to(x.dtype).reshape(x.shape)

    def _apply(self, fn: Any, recurse: bool = True) -> MoE:  # noqa: FBT001, FBT002  (torch's own)
        """Move or convert the parameters, which are then in no stack."""
        self.stacked = None
        result: MoE = super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        return result

    def _one_by_one(self, y: Tensor, rows: Tensor, shares: Tensor, chosen: Tensor) -> Tensor:
        """Add to y what the chosen experts, one after another, compute for their tokens."""
        groups = _tokens_by_expert(shares, chosen, len(self.experts))
        for i, tokens, weights in groups:
            expert = self.experts[i]
            if tokens is None:
                y = y + self.weighted_expert(expert, rows, weights)
            else:
                # A token occurs once per expert, so every device adds in the order of this loop.
                added = self.weighted_expert(expert, rows[tokens], weights)
                y.index_add_(0, tokens, added.to(y.dtype))
        return y

    def _from_stacks(
        self, stacked: StackedExperts, rows: Tensor, shares: Tensor, chosen: Tensor
    ) -> Iterator[Tensor]:
        """Yield what the first expert of each token adds to it, then the second, in ascending
        order, without a read.
        """
        chosen, order = chosen.sort(-1)
        k, weights = chosen.shape[1], shares.gather(-1, order).flatten()[:, None]
        each = rows[:, None].expand(-1, k, -1).flatten(0, 1)  # [N*k,M]
        added = self.weighted_expert(partial(stacked.run, experts=chosen.flatten()), each, weights)
        yield from added.unflatten(0, (-1, k)).unbind(1)

    def weighted_expert(
        self,
        expert: Callable[[Tensor], Tensor],
        rows: Float[Tensor, "n M"],
        weights: Float[Tensor, "n 1"],
    ) -> Float[Tensor, "n M"]:
        """Compute what an expert adds to its tokens: w expert(x).

        Args:
            expert: the network of the expert.
            rows: the hidden states x of its tokens [n,M].
            weights: their weights w [n,1].

        Returns:
            What is added to the tokens [n,M].
        """
        result: Float[Tensor, "n M"] = expert(rows) * weights
        return result


def stack_experts(module: nn.Module) -> int:
    """Lay the experts of every mixture of a module into stacks, so that few tokens run on a device
    without waiting for it.

    The parameters keep their values and their identity, and become views of one tensor for each
    matrix of the experts. No memory is added, except for one such tensor while it is made. Call it
    after the module was moved to its device: `to` and its relatives end the stacks. What replaces
    or observes a linear map ends their use; call it again after other changes of an expert, such as
    of its activation.

    Args:
        module: a module with `regard.nn.MoE` layers, such as a decoder.

    Returns:
        The number of mixtures.

    Raises:
        ArgumentError: the experts of a mixture are not alike, have parameters outside of linear
            maps, or store a weight in fewer bits; its name is in the message.

    >>> from regard.nn import MoE, SoftmaxRouter, SwiGLU
    >>> moe = MoE(SoftmaxRouter(8, 4, 2), [SwiGLU(8, 16) for _ in range(4)])
    >>> stack_experts(nn.Sequential(moe, nn.ReLU()))
    1
    """
    mixtures = {name: x for name, x in module.named_modules() if isinstance(x, MoE)}
    for name, x in mixtures.items():
        try:
            x.stacked = StackedExperts(x.experts)
        except ArgumentError as error:
            raise ArgumentError(f"{name or 'the module'}: {error}") from None
    return len(mixtures)


def _tokens_by_expert(
    weights: Tensor, experts: Tensor, count: int
) -> Iterator[tuple[int, Tensor | None, Tensor]]:
    """Yield each used one of `count` experts in ascending order, the indices of its tokens [n]
    (None for all tokens), and their weights [n,1].
    """
    k = experts.shape[1]
    if len(experts) == 1:  # one token, as in decoding: nothing to gather
        for expert, slot in sorted(zip(experts[0].tolist(), range(k), strict=True)):
            yield expert, None, weights[:, slot, None]
        return
    chosen, order = experts.flatten().sort(stable=True)
    tokens, shares = order // k, weights.flatten()[order, None]
    # one read for all experts, because each read waits for the device
    stops = torch.searchsorted(chosen, torch.arange(count, device=chosen.device), right=True)
    start = 0
    for expert, stop in enumerate(stops.tolist()):
        if start < stop:
            yield expert, tokens[start:stop], shares[start:stop]
        start = stop
