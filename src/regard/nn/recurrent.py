"""Recurrent mechanisms as modules: linear attention, retention, gated linear attention and the
delta rules.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.arguments import check_number
from regard.caches import Cache, Parts, State
from regard.cost import Spec
from regard.cost.recurrent import DeltaSpec, LinearSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.explain import EffectiveRow, LayerRun, Link, effective_row
from regard.nn.mixer import Mixer, count_weights
from regard.nn.projections import Heads, Projection
from regard.ops.linear import gated_linear, linear_attention, retention
from regard.ops.linear.delta_rule import delta_rule, gated_delta_rule
from regard.ops.linear.features import FeatureMap, feature_map_of
from regard.span import Positions, Span
from regard.tap import tap


@runtime_checkable
class Rule(Protocol):
    """How a recurrence writes a token into its state and reads it. Its gates are made of x, by
    parts of its own.
    """

    def __call__(
        self,
        x: Tensor,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Tensor, Parts]:
        """x [B,T,M], q [B,H,T,D], k [B,G,T,D], v [B,G,T,E] -> what the queries read [B,H,T,E], and
        the new state.
        """

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> Spec:
        """The cost of a layer with this rule, from its parameters and the sizes of its heads."""


class Recurrent(Mixer):
    """project -> rule -> norm -> gate -> output.

    q, k, v = project(x);  z, state = rule(x, q, k, v, state);  z' = norm(z) * silu(gate(x));
    out = output(z', heads joined)

    Args:
        project: a `Projection`: query heads H, key/value heads G and every step on a head are its
            matter.
        rule: a module that is a `Rule`.
        output: a module [B,T,H*E] -> [B,T,M].
        norm: None, or a module on the last dim of each head.
        gate: None, or `Heads` that make H heads of E: the output gate, made of the token that asks.

    Raises:
        ArgumentError: the gate does not fit the heads.

    >>> import torch
    >>> from regard.nn.projections import Separate
    >>> from regard.nn.recurrent import Delta
    >>> project = Separate(Heads(8, 4, 2), Heads(8, 2, 2), Heads(8, 2, 2))
    >>> mixer = Recurrent(project, Delta(8, 2), nn.Linear(8, 8))
    >>> cache = mixer.new_cache()
    >>> mixer(torch.zeros(1, 5, 8), cache=cache).shape, cache.bytes
    (torch.Size([1, 5, 8]), 32)

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4; norm and gate: Sun et al.
    2023 (arXiv 2307.08621), equation 8.
    """

    def __init__(
        self,
        project: Projection,
        rule: Rule,
        output: nn.Module,
        *,
        norm: nn.Module | None = None,
        gate: Heads | None = None,
    ) -> None:
        super().__init__()
        H, _, _, E, _ = project.shape
        if gate is not None and (gate.heads, gate.head_dim) != (H, E):
            raise ArgumentError(
                f"gate is {gate.extra_repr()}; it must be {H} heads of {E}, as the rule gives"
            )
        self.project, self.rule, self.output = project, rule, output
        self.norm, self.gate = norm, gate

    def check_cache(self, cache: Cache) -> None:
        """Refuse a cache of tokens.

        Raises:
            ArgumentTypeError: the cache is not a `regard.caches.State`.
        """
        if not isinstance(cache, State):
            raise ArgumentTypeError(
                f"the cache is {type(cache).__name__}; a recurrence needs a State: use new_cache()"
            )

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Mix x [B,T,M] with the state that the cache holds; backend is the form of the op
        ("reference" is "recurrent").
        """
        assert cache is None or isinstance(cache, State)
        q = tap("q", self.project.query(x, positions))
        k, v = self.project.recall(self.project.remember(x, positions), positions)
        k, v = tap("k", k), tap("v", v)
        form = "recurrent" if backend == "reference" else backend
        before = None if cache is None else cache.state
        z, after = self.rule(x, q, k, v, before, positions, form)
        if cache is not None:
            cache.store(after, positions)
        z = tap("z", self._finished(z, x, positions))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def _finished(self, z: Tensor, x: Tensor, positions: Positions) -> Tensor:
        """What the rule gave [B,H,T,E], normed and gated."""
        z = self.project.postprocess(z, x)
        z = z if self.norm is None else self.norm(z)
        return z if self.gate is None else z * F.silu(self.gate(x, positions))

    def explain_row(self, run: LayerRun, head: int, row: int) -> EffectiveRow:
        """The row of the matrix that the rule applies to the values, and its state around the
        query: whatever a rule does with queries, keys, gates and decays, it is linear in the
        values.
        """
        T, group = run.q.shape[2], run.group(head)

        def read(v: Tensor, n: int = T, rule: Rule = self.rule) -> tuple[Tensor, Parts]:
            q, k = run.q[:, :, :n], run.k[:, :, :n]
            return rule(run.x[:, :n], q, k, v[:, :, :n], None, Span(0, n), "auto")

        whole, _ = read(run.v)
        z = self._finished(whole, run.x, Span(0, T))
        weights = effective_row(lambda unit: read(unit)[0], run.v, head, row)
        seen = torch.arange(T) <= row
        dots = (run.k[0, group].double() @ run.q[0, head, row].double()).cpu()
        scores, scale = [Link("dot", "", dots)], run.q.shape[-1] ** -0.5
        if isinstance(self.rule, Features):
            plain = Features(self.rule.feature_map, normalise=False)
            raw = effective_row(lambda unit: read(unit, rule=plain)[0], run.v, head, row)
            scores.append(Link("unnormalised", "a_ij = φ(q_i) · φ(k_j)", raw))
            scale = 1.0 if self.rule.normalise else self.rule.scale
        else:
            scores.append(Link("scaled", "", scale * dots))
        scores.append(Link("effective", "", weights.masked_fill(~seen, -torch.inf)))
        _, behind = read(run.v, row + 1)
        before = read(run.v, row)[1] if row else tuple(torch.zeros_like(x) for x in behind)
        return EffectiveRow(
            "linear",
            tuple(scores),
            weights.masked_fill(~seen, 0.0),
            whole[0, head, row],
            scale,
            state=(
                tuple(part[0, group] for part in behind),
                tuple(part[0, group] for part in before),
            ),
            checks={"z of the recurrence": float((z - run.z).abs().max())},
        )

    def new_cache(self) -> State:
        """An empty cache: a new text begins with a new one, or with `reset()`."""
        return State()

    @property
    def spec(self) -> Spec:
        """The cost of this layer: that of its rule."""
        return self.rule.spec(count_weights(self), self.project.shape.heads)


class Features(nn.Module):
    """Linear attention by a feature map, with its normaliser or without.

    Args:
        feature_map: a name in `regard.linear.FEATURE_MAPS`, or a function or module that keeps the
            shape.
        normalise: whether the weights are divided by their sum.
        scale: on the queries, without `normalise`.

    Raises:
        ArgumentError, ArgumentTypeError: the feature map is not known, or scale is not a finite
            number.

    >>> x = torch.ones(1, 1, 3, 2)
    >>> Features()(x[0], x, x, x, None, None, "auto")[0].flatten().tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4.
    """

    def __init__(
        self, feature_map: FeatureMap = "elu+1", *, normalise: bool = True, scale: float = 1.0
    ) -> None:
        super().__init__()
        feature_map_of(feature_map)
        check_number("scale", scale, float("-inf"), float("inf"), "finite")
        self.feature_map, self.normalise, self.scale = feature_map, normalise, scale

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B G T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B H T E"], Parts]:
        """What the queries read, and the state (S, z), or (S,) without a normaliser, behind the
        last token.
        """
        return linear_attention(
            q,
            k,
            v,
            feature_map=self.feature_map,
            normalise=self.normalise,
            scale=self.scale,
            state=state,
            k_positions=positions,
            form=form,
        )

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> LinearSpec:
        """The cost of a layer with this rule."""
        return LinearSpec(weights, (), shape, normalised=self.normalise)

    def extra_repr(self) -> str:
        """The feature map, and whether it is normalised."""
        name = self.feature_map if isinstance(self.feature_map, str) else "a function"
        return f"{name}, normalise={self.normalise}"


class Retention(nn.Module):
    """Retention: each key/value head forgets at its own fixed rate.

    Args:
        groups: the key/value heads G.
        decay: gamma, one per head, from 0 to 1; None is 1 - 2^(-5-g).

    Raises:
        ArgumentError: groups is less than 1, or decay is not G numbers from 0 to 1.

    >>> x = torch.ones(1, 1, 3, 1)
    >>> Retention(1, [0.5])(x[0], x, x, x, None, None, "auto")[0].flatten().tolist()
    [1.0, 1.5, 1.75]

    Source: Sun et al. 2023 (arXiv 2307.08621), equations 6 and 8.
    """

    def __init__(self, groups: int, decay: Sequence[float] | None = None) -> None:
        super().__init__()
        if groups < 1:
            raise ArgumentError(f"Retention(groups={groups}): groups must be at least 1")
        if decay is not None:
            if len(decay) != groups:
                raise ArgumentError(
                    f"decay has {len(decay)} numbers for {groups} key/value heads; give one per "
                    "head, or None"
                )
            for g, gamma in enumerate(decay):
                if not 0 <= gamma <= 1:
                    raise ArgumentError(
                        f"decay of head {g} is {gamma}; it must be from 0, which keeps nothing, "
                        "to 1, which keeps all"
                    )
        self.decay = None if decay is None else tuple(float(gamma) for gamma in decay)

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B G T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B H T E"], Parts]:
        """What the queries read, and the state (S,) behind the last token."""
        decay = None
        if self.decay is not None:
            decay = torch.tensor(self.decay, dtype=torch.float64, device=k.device)
        return retention(q, k, v, decay=decay, state=state, k_positions=positions, form=form)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> LinearSpec:
        """The cost of a layer with this rule."""
        return LinearSpec(weights, (), shape, "retention", decayed=True)

    def extra_repr(self) -> str:
        """The decays, where they are not the paper's."""
        return "" if self.decay is None else f"decay={list(self.decay)}"


class Gated(nn.Module):
    """Gated linear attention: each token decays the state, channel by channel, by a gate of low
    rank.

    g = log sigmoid(W_2 W_1 x + b) / temperature, in fp32 or better

    Args:
        dim: the model dim M.
        groups, head_dim: G and D, whose product is the number of gates.
        rank: of the map from M to G D.
        temperature: tau: a large one keeps gates near 1, and so memory long.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, or temperature is not above 0.

    >>> rule = Gated(8, 2, 3)
    >>> rule.log_decay(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 2, 5, 3])

    Source: Yang et al. 2023 (arXiv 2312.06635), section 4.4.
    """

    def __init__(
        self, dim: int, groups: int, head_dim: int, *, rank: int = 16, temperature: float = 16.0
    ) -> None:
        super().__init__()
        if min(dim, groups, head_dim, rank) < 1:
            raise ArgumentError(
                f"Gated(dim={dim}, groups={groups}, head_dim={head_dim}, rank={rank}): each must "
                "be at least 1"
            )
        check_number("temperature", temperature, 0, float("inf"), "greater than 0")
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, groups * head_dim)
        self.groups, self.temperature = groups, temperature

    def log_decay(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B G T D"]:
        """The logarithms of the gates of tokens x, at most 0."""
        gates = torch.unflatten(self.up(self.down(x)), -1, (self.groups, -1)).transpose(1, 2)
        wide = gates if gates.dtype == torch.float64 else gates.float()
        return F.logsigmoid(wide) / self.temperature

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B G T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B H T E"], Parts]:
        """What the queries of tokens x read, and the state (S,) behind the last one."""
        g = self.log_decay(x)
        return gated_linear(q, k, v, g, state=state, k_positions=positions, form=form)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> LinearSpec:
        """The cost of a layer with this rule."""
        return LinearSpec(weights, (), shape, "gated linear attention", decayed=True)

    def extra_repr(self) -> str:
        """The temperature."""
        return f"temperature={self.temperature}"


class Decay(nn.Module):
    """How much of the state a token leaves, as a logarithm per head, made of the token.

    g = -exp(rate) softplus(W x + shift), in fp32 or better

    The start is that of Mamba-2: exp(rate) is drawn from 1 to 16, softplus(shift) from 0.001 to 0.1
    on a log scale, so that heads begin with memories of different length.

    Args:
        dim: the model dim M.
        groups: the key/value heads G.

    Raises:
        ArgumentError: a size is less than 1.

    >>> bool((Decay(8, 2)(torch.randn(1, 5, 8)) <= 0).all())
    True

    Source: Yang et al. 2024 (arXiv 2412.06464), section 3.4; Dao and Gu 2024 (arXiv 2405.21060),
    listing 2.
    """

    def __init__(self, dim: int, groups: int) -> None:
        super().__init__()
        _check_sizes("Decay", dim, groups)
        self.linear = nn.Linear(dim, groups, bias=False)
        self.rate = nn.Parameter(torch.empty(groups).uniform_(1, 16).log())
        step = torch.empty(groups).uniform_(math.log(0.001), math.log(0.1)).exp()
        self.shift = nn.Parameter(step + torch.log(-torch.expm1(-step)))  # softplus(shift) = step

    def forward(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B G T"]:
        """The log decays of tokens x, at most 0."""
        step = F.softplus(_wide(self.linear(x)) + _wide(self.shift))
        return (-_wide(self.rate).exp() * step).transpose(1, 2)


class Delta(nn.Module):
    """The delta rule with strengths beta = most sigmoid(W x), and with decays if there is a part
    that makes them.

    Args:
        dim: the model dim M.
        groups: the key/value heads G.
        decay: None, or a module [B,T,M] -> log decays [B,G,T], such as `Decay`.
        most: the greatest strength, from 0 to 2: above 1 a step can turn what stands under a key to
            its negative.

    Raises:
        ArgumentError: a size is less than 1, or most is not above 0 and at most 2.

    >>> x, k = torch.zeros(1, 3, 8), torch.eye(3)[None, None]
    >>> z, (S,) = Delta(8, 1)(x, k, k, k, None, None, "auto")
    >>> S[0, 0].diagonal().tolist()  # half of each value is written
    [0.5, 0.5, 0.5]

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3; most = 2: Grazzi et al. 2024 (arXiv
    2411.12537), section 4.
    """

    def __init__(
        self, dim: int, groups: int, *, decay: nn.Module | None = None, most: float = 1.0
    ) -> None:
        super().__init__()
        _check_sizes("Delta", dim, groups)
        check_number("most", most, 0, math.nextafter(2, 3), "greater than 0 and at most 2")
        self.strength = nn.Linear(dim, groups, bias=False)
        self.decay, self.most = decay, most

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B G T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B H T E"], Parts]:
        """What the queries of tokens x read, and the state (S,) behind the last one."""
        beta = self.most * _wide(self.strength(x)).sigmoid().transpose(1, 2)
        if self.decay is None:
            return delta_rule(q, k, v, beta, state=state, k_positions=positions, form=form)
        g = self.decay(x)
        return gated_delta_rule(q, k, v, beta, g, state=state, k_positions=positions, form=form)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> DeltaSpec:
        """The cost of a layer with this rule."""
        return DeltaSpec(weights, (), shape, gated=self.decay is not None)

    def extra_repr(self) -> str:
        """The greatest strength."""
        return f"most={self.most}"


def _wide(x: Tensor) -> Tensor:
    """In fp32 or better."""
    return x if x.dtype == torch.float64 else x.float()


def _check_sizes(name: str, dim: int, groups: int) -> None:
    if min(dim, groups) < 1:
        raise ArgumentError(f"{name}(dim={dim}, groups={groups}): each must be at least 1")


class Swish(nn.Module):
    """x sigmoid(x), number by number.

    >>> Swish()(torch.zeros(3)).tolist()
    [0.0, 0.0, 0.0]

    Source: Ramachandran et al. 2017 (arXiv 1710.05941), equation 1 with beta 1.
    """

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """The same for every position."""
        return F.silu(x)


class UnitLength(nn.Module):
    """Divide by the length of the last dimension: x / sqrt(sum(x^2) + eps), computed in fp32 or
    better.

    Args:
        eps: added to the square of the length, so that 0 stays 0.

    Raises:
        ArgumentError: eps is negative.

    >>> UnitLength(eps=0.0)(torch.tensor([3.0, 4.0])).tolist()
    [0.6000000238418579, 0.800000011920929]

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3.
    """

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        if not eps >= 0:
            raise ArgumentError(f"UnitLength(eps={eps}): eps must be at least 0")
        self.eps = eps

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """The same for every position."""
        wide = x if x.dtype in (torch.float32, torch.float64) else x.float()
        return (wide * torch.rsqrt(wide.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        """The number added."""
        return f"eps={self.eps}"
