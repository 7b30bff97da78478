"""Linear recurrences as modules: linear attention, retention, gated linear attention and the delta
rules. They keep a state of fixed size instead of a cache of tokens.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import ClassVar, Literal, Protocol, TypeAlias, runtime_checkable

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_number
from regard.caches import Cache, Parts, State
from regard.cost import Spec
from regard.cost.fixed_state import DeltaSpec, LinearSpec, RecurrentSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError
from regard.masks import Document
from regard.nn.data_bias import refuse_data_bias
from regard.nn.explainable import EffectiveRow, LayerRun, MechanismStep, effective_row
from regard.nn.mixer import AcrossRanks, Mixer, check_is_state, count_weights
from regard.nn.packed_documents import over_documents
from regard.nn.projections import HeadProjection, Projection
from regard.nn.recurrent_projections import GroupedValueQKV, StatefulQKV, project_tokens
from regard.ops.linear.delta_rules import delta_rule, gated_delta_rule
from regard.ops.linear.linear_attention import (
    FeatureMap,
    feature_map_of,
    gated_linear,
    linear_attention,
    retention,
)
from regard.positions.constant_tensor import ConstantTensor
from regard.span import Positions, Span
from regard.tracing import tap
from regard.units import plural

GateActivation: TypeAlias = Literal["silu", "sigmoid"]
"""The function of an output gate."""
_GATE_ACTIVATIONS: dict[str, Callable[[Tensor], Tensor]] = {
    "silu": F.silu,
    "sigmoid": torch.sigmoid,
}


@runtime_checkable
class RecurrenceRule(Protocol):
    """Interface of the rule of a recurrence, which writes tokens into the state and reads the state
    with queries. The rule computes gates and decays from x by parameters of its own.
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
        """Run the recurrence over the tokens of a call."""

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> Spec:
        """Return the cost of a layer with this rule, from its parameters and the sizes of its
        heads.
        """


class Recurrent(Mixer):
    """A linear recurrence as a mechanism: projection, recurrence rule, norm, gate and output map.

    q, k, v = project(x);  z, state = rule(x, q, k, v, state);  z' = norm(z) * f(gate(x));
    out = output(heads of z' concatenated)

    Args:
        project: a `Projection` to H query heads and G key/value heads, with every step on a head;
            a `GroupedValueQKV` has N value heads, and the result then O = max(H, N) heads instead
            of H; a `StatefulQKV` has a state of its own, which follows that of the rule.
        rule: a module with the interface of `RecurrenceRule`.
        output: a module [B,T,H*E] -> [B,T,M].
        norm: a module on heads [B,H,T,E] that normalises the last dim; None applies none.
        gate: the output gate, a `HeadProjection` of x to H heads of E; None applies none.
        gate_activation: f, "silu" or "sigmoid".
        gate_before_norm: whether z' = norm(z * f(gate(x))) instead, as in Mamba-2.
        documents: the documents of packed text, by position: each starts with an empty state, and
            nothing passes from one to the next. None is one document. It may be replaced between
            calls.

    Raises:
        ArgumentError: the gate does not have the heads that the rule returns, or its activation is
            unknown; in a call, documents have another number of batch rows.

    >>> import torch
    >>> from regard.nn.linear_recurrence import DeltaRule
    >>> from regard.nn.variants.projections import separate_qkv
    >>> mixer = Recurrent(separate_qkv(8, 4, 2, 2), DeltaRule(8, 2), nn.Linear(8, 8))
    >>> cache = mixer.new_cache()
    >>> mixer(torch.zeros(1, 5, 8), cache=cache).shape, cache.bytes
    (torch.Size([1, 5, 8]), 32)

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4; norm and gate: Sun et al.
    2023 (arXiv 2307.08621), equation 8.
    """

    across_ranks: ClassVar[AcrossRanks] = "state"

    recording_refusal = "splits the sequence into chunks, whose number depends on its length"

    def __init__(
        self,
        project: Projection,
        rule: RecurrenceRule,
        output: nn.Module,
        *,
        norm: nn.Module | None = None,
        gate: HeadProjection | None = None,
        gate_activation: GateActivation = "silu",
        gate_before_norm: bool = False,
        documents: Document | None = None,
    ) -> None:
        refuse_data_bias(project, "Recurrent")
        super().__init__()
        value_heads = project.value_heads if isinstance(project, GroupedValueQKV) else None
        self.heads = replace(project.shape.heads, value_heads=value_heads)
        outputs, E = self.heads.outputs, self.heads.value_dim
        if gate is not None and (gate.heads, gate.head_dim) != (outputs, E):
            raise ArgumentError(
                f"gate is {gate.extra_repr()}; it must be {plural(outputs, 'head')} of {E}, as the "
                "rule returns"
            )
        self.project, self.rule, self.output = project, rule, output
        if gate_activation not in _GATE_ACTIVATIONS:
            raise ArgumentError(
                f"gate_activation is {gate_activation!r}; it must be one of "
                f"{', '.join(_GATE_ACTIVATIONS)}"
            )
        self.norm, self.gate, self.documents = norm, gate, documents
        self.gate_activation, self.gate_before_norm = gate_activation, gate_before_norm
        self.explain_refusal = getattr(rule, "explain_refusal", None)

    def check_cache(self, cache: Cache) -> None:
        """Check that the cache is a `State`, not a cache of tokens.

        Raises:
            ArgumentTypeError: the cache is not a `regard.caches.State`.
        """
        check_is_state(cache)

    @property
    def static_step_refusal(self) -> str | None:
        """The reason of the rule, if it has one."""
        return getattr(self.rule, "static_step_refusal", None)

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Run the recurrence over x [B,T,M] from the state in the cache. `backend` is the form of
        the recurrence; "reference" means "recurrent".
        """
        assert cache is None or isinstance(cache, State)
        form = "recurrent" if backend == "reference" else backend
        before = None if cache is None else cache.state
        ruled, past = None, None
        if before is not None and isinstance(self.project, StatefulQKV):
            ruled, past = before[:-1], before[-1:]
        elif before is not None:
            ruled = before

        def project(
            part: tuple[Tensor, ...], positions: Positions, state: Parts | None
        ) -> tuple[tuple[Tensor, ...], Parts]:
            q, k, v, state = project_tokens(self.project, part[0], positions, state)
            return (q, k, v), state

        (q, k, v), past = over_documents(self.documents, project, (x,), positions, past)
        q, k, v = tap("q", q), tap("k", k), tap("v", v)
        z, after = self._recur((x, q, k, v), ruled, positions, form)
        if cache is not None:
            cache.store((*after, *past), positions)
        z = tap("z", self._norm_and_gate(z, x, positions))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def _recur(
        self,
        inputs: tuple[Tensor, ...],
        state: Parts | None,
        positions: Positions,
        form: str,
        rule: RecurrenceRule | None = None,
    ) -> tuple[Tensor, Parts]:
        """Run the rule over x, q, k and v, in every document from an empty state."""
        rule = self.rule if rule is None else rule

        def run(
            part: tuple[Tensor, ...], positions: Positions, state: Parts | None
        ) -> tuple[tuple[Tensor, ...], Parts]:
            x, q, k, v = part
            z, state = rule(x, q, k, v, state, positions, form)
            return (z,), state

        (z,), state = over_documents(self.documents, run, inputs, positions, state)
        return z, state

    def _norm_and_gate(self, z: Tensor, x: Tensor, positions: Positions) -> Tensor:
        """Apply the norm and the output gate to heads z [B,H,T,E]."""
        z = self.project.postprocess(z, x)
        factor: Tensor | None = None
        if self.gate is not None:
            factor = _GATE_ACTIVATIONS[self.gate_activation](self.gate(x, positions))
        if factor is not None and self.gate_before_norm:
            z = z * factor
        z = z if self.norm is None else self.norm(z)
        return z if factor is None or self.gate_before_norm else z * factor

    def explain_row(self, run: LayerRun, head: int, row: int) -> EffectiveRow:
        """Return the coefficients that the rule gives to the values, with the state before and
        after the query. They exist for every rule that is linear in the values and has one row for
        all channels of a head; the others say so in `explain_refusal`.
        """
        T, outputs = run.q.shape[2], self.heads.outputs
        query, key = (head // (outputs // x.shape[1]) for x in (run.q, run.k))

        def run_rule(
            v: Tensor, n: int = T, rule: RecurrenceRule = self.rule
        ) -> tuple[Tensor, Parts]:
            inputs = tuple(tensor[..., :n, :] for tensor in (run.x, run.q, run.k, v))
            return self._recur(inputs, None, Span(0, n), "auto", rule)

        result, _ = run_rule(run.v)
        z = self._norm_and_gate(result, run.x, Span(0, T))
        weights = effective_row(lambda unit: run_rule(unit)[0], run.v, head, row)
        is_visible = torch.arange(T, device="cpu") <= row
        written = getattr(self.rule, "written_keys", None)
        keys = run.k if written is None else written(run.k)
        dots = (keys[0, key].double() @ run.q[0, query, row].double()).cpu()
        own_scale = getattr(self.rule, "scale", None)
        scale = run.q.shape[-1] ** -0.5 if own_scale is None else float(own_scale)
        scores = [MechanismStep("dot", "", dots)]
        if isinstance(self.rule, LinearAttentionRule):
            unnormalised = self.rule.unnormalised()
            raw = effective_row(lambda unit: run_rule(unit, rule=unnormalised)[0], run.v, head, row)
            scores.append(MechanismStep("unnormalised", "a_ij = φ(q_i) · φ(k_j)", raw))
            scale = 1.0 if self.rule.normalise else self.rule.scale
        else:
            scores.append(MechanismStep("scaled", "", scale * dots))
        scores.append(MechanismStep("effective", "", weights.masked_fill(~is_visible, -torch.inf)))
        _, after = run_rule(run.v, row + 1)
        before = run_rule(run.v, row)[1] if row else tuple(torch.zeros_like(x) for x in after)
        return EffectiveRow(
            "linear",
            tuple(scores),
            weights.masked_fill(~is_visible, 0.0),
            result[0, head, row],
            scale,
            # a normaliser has G heads, whereas S has one for each value head
            state=(
                tuple(part[0, head // (outputs // part.shape[1])] for part in after),
                tuple(part[0, head // (outputs // part.shape[1])] for part in before),
            ),
            checks={"z of the recurrence": float((z - run.z).abs().max())},
        )

    def new_cache(self) -> State:
        """Return an empty cache. Use a new one for each text, or call its `reset()`."""
        return State()

    @property
    def spec(self) -> Spec:
        """The cost of this layer, according to its rule."""
        spec = self.rule.spec(count_weights(self), self.heads)
        if isinstance(self.project, StatefulQKV) and isinstance(spec, RecurrentSpec):
            spec = replace(spec, convolution=self.project.cost)
        return spec


class LinearAttentionRule(nn.Module):
    """Linear attention with a feature map, with or without a normaliser.

    Args:
        feature_map: a name in `regard.linear.FEATURE_MAPS`, or a function or module that keeps the
            shape.
        normalise: whether the weights are divided by their sum.
        scale: the factor on the queries; used without `normalise`.

    Raises:
        ArgumentError, ArgumentTypeError: the feature map is unknown, or scale is not a finite
            number.

    >>> x = torch.ones(1, 1, 3, 2)
    >>> LinearAttentionRule()(x[0], x, x, x, None, None, "auto")[0].flatten().tolist()
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
        v: Float[Tensor, "B N T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B O T E"], Parts]:
        """Return the results [B,max(H,N),T,E] and the state after the last token: (S, z), or (S,)
        without a normaliser.
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

    def unnormalised(self) -> LinearAttentionRule:
        """Return this rule without the division by the sum of the weights."""
        return LinearAttentionRule(self.feature_map, normalise=False)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> LinearSpec:
        """Return the cost of a layer with this rule."""
        count = getattr(self.feature_map, "feature_count", None)
        features = None if count is None else count(shape.head_dim)
        return LinearSpec(weights, (), shape, normalised=self.normalise, features=features)

    def extra_repr(self) -> str:
        """Return the feature map, and whether the weights are normalised."""
        name = self.feature_map if isinstance(self.feature_map, str) else "a function"
        return f"{name}, normalise={self.normalise}"


class RetentionRule(nn.Module):
    """Retention: the state of each key/value head decays at a fixed rate.

    Args:
        groups: the key/value heads G; with more value heads than key heads, the value heads N.
        decay: the decay gamma per token of each head, from 0 to 1; None is 1 - 2^(-5-g).
        scale: the factor on the queries; None is 1/sqrt(D).

    Raises:
        ArgumentError: groups is less than 1, or decay is not G numbers from 0 to 1.

    >>> x = torch.ones(1, 1, 3, 1)
    >>> RetentionRule(1, [0.5])(x[0], x, x, x, None, None, "auto")[0].flatten().tolist()
    [1.0, 1.5, 1.75]

    Source: Sun et al. 2023 (arXiv 2307.08621), equations 6 and 8.
    """

    def __init__(
        self, groups: int, decay: Sequence[float] | None = None, *, scale: float | None = None
    ) -> None:
        super().__init__()
        check_number("scale", scale, float("-inf"), float("inf"), "finite")
        if groups < 1:
            raise ArgumentError(f"RetentionRule(groups={groups}): groups must be at least 1")
        if decay is not None:
            if len(decay) != groups:
                raise ArgumentError(
                    f"decay has length {len(decay)}; it must have one number for each of the "
                    f"{plural(groups, 'key/value head')}, or be None"
                )
            for g, gamma in enumerate(decay):
                if not 0 <= gamma <= 1:
                    raise ArgumentError(
                        f"decay of head {g} is {gamma}; it must be from 0 (forget at once) to 1 "
                        "(never forget)"
                    )
        self.decay = decay
        self.scale = scale

    @property
    def decay(self) -> tuple[float, ...] | None:
        """The decay factor of each key/value head; None is 1 - 2^(-5-g)."""
        return self._decay

    @decay.setter
    def decay(self, decay: Sequence[float] | None) -> None:
        self._decay = None if decay is None else tuple(float(gamma) for gamma in decay)
        self._decay_tensor = ConstantTensor(
            torch.tensor(self._decay or (), dtype=torch.float64, device="cpu")
        )

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B N T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B O T E"], Parts]:
        """Return the results [B,max(H,N),T,E] and the state (S,) after the last token."""
        decay = None
        if self.decay is not None:
            decay = self._decay_tensor.on(k.device)
        return retention(
            q,
            k,
            v,
            decay=decay,
            scale=self.scale,
            state=state,
            k_positions=positions,
            form=form,
        )

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> LinearSpec:
        """Return the cost of a layer with this rule."""
        return LinearSpec(weights, (), shape, "retention", decayed=True)

    def extra_repr(self) -> str:
        """Return the decays, if they are not those of the paper."""
        return "" if self.decay is None else f"decay={list(self.decay)}"


class GatedLinearRule(nn.Module):
    """Gated linear attention: each token decays every channel of the state by a gate, which a
    low-rank map computes from the token.

    g = log sigmoid(W_2 W_1 x + b) / temperature, in fp32 or better

    Args:
        dim: the model dim M.
        groups: the key/value heads G; with more value heads than key heads, the value heads N.
        head_dim: the head dim D; there are G D gates per token.
        rank: the rank of the map from M to G D.
        temperature: a larger temperature keeps gates closer to 1, so that the state decays more
            slowly.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, or temperature is not above 0.

    >>> rule = GatedLinearRule(8, 2, 3)
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
                f"GatedLinearRule(dim={dim}, groups={groups}, head_dim={head_dim}, rank={rank}): "
                "each must be at least 1"
            )
        check_number("temperature", temperature, 0, float("inf"), "greater than 0")
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, groups * head_dim)
        self.groups, self.temperature = groups, temperature

    def log_decay(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B G T D"]:
        """Return the logarithms of the gates [B,G,T,D] for tokens x [B,T,M]; they are at most 0."""
        gates = torch.unflatten(self.up(self.down(x)), -1, (self.groups, -1)).transpose(1, 2)
        return F.logsigmoid(_at_least_float32(gates)) / self.temperature

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B N T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B O T E"], Parts]:
        """Return the results [B,max(H,N),T,E] and the state (S,) after the last token."""
        g = self.log_decay(x)
        return gated_linear(q, k, v, g, state=state, k_positions=positions, form=form)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> LinearSpec:
        """Return the cost of a layer with this rule."""
        return LinearSpec(weights, (), shape, "gated linear attention", decayed=True)

    def extra_repr(self) -> str:
        """Return the temperature of the gates."""
        return f"temperature={self.temperature}"


class LogDecay(nn.Module):
    """The logarithm of the decay of the state, one number per token and head, computed from the
    token.

    g = -exp(A_log) softplus(W x + dt_bias), in fp32 or better

    The initial values are those of Mamba-2: exp(A_log) is uniform between 1 and 16,
    softplus(dt_bias) log-uniform between 0.001 and 0.1, so that heads start with memories of
    different lengths.

    Args:
        dim: the model dim M.
        groups: the key/value heads G; with more value heads than key heads, the value heads N.

    Raises:
        ArgumentError: a size is less than 1.

    >>> bool((LogDecay(8, 2)(torch.randn(1, 5, 8)) <= 0).all())
    True

    Source: Yang et al. 2024 (arXiv 2412.06464), section 3.4; Dao and Gu 2024 (arXiv 2405.21060),
    listing 2.
    """

    def __init__(self, dim: int, groups: int) -> None:
        super().__init__()
        _check_sizes("LogDecay", dim, groups)
        self.linear = nn.Linear(dim, groups, bias=False)
        self.A_log = nn.Parameter(torch.empty(groups).uniform_(1, 16).log())
        step = torch.empty(groups).uniform_(math.log(0.001), math.log(0.1)).exp()
        # This is the inverse of softplus: softplus(dt_bias) = step.
        self.dt_bias = nn.Parameter(step + torch.log(-torch.expm1(-step)))

    def forward(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B G T"]:
        """Return the log decays [B,G,T] of tokens x [B,T,M]; they are at most 0."""
        step = F.softplus(_at_least_float32(self.linear(x)) + _at_least_float32(self.dt_bias))
        return (-_at_least_float32(self.A_log).exp() * step).transpose(1, 2)


class DeltaRule(nn.Module):
    """The delta rule: a token replaces a share beta = max_beta sigmoid(W x) of the value that the
    state returns for its key. With `decay` it is the gated delta rule.

    Args:
        dim: the model dim M.
        groups: the key/value heads G; with more value heads than key heads, the value heads N.
        decay: a module [B,T,M] -> log decays [B,G,T], such as `LogDecay`; None applies none.
        max_beta: the upper bound of beta, above 0 and at most 2. Above 1, a token can reverse the
            sign of the value that the state returns for its key (negative eigenvalues).

    Raises:
        ArgumentError: a size is less than 1, or max_beta is not above 0 and at most 2.

    >>> x, k = torch.zeros(1, 3, 8), torch.eye(3)[None, None]
    >>> z, (S,) = DeltaRule(8, 1)(x, k, k, k, None, None, "auto")
    >>> S[0, 0].diagonal().tolist()  # half of each value is written
    [0.5, 0.5, 0.5]

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3; max_beta = 2: Grazzi et al. 2024
    (arXiv 2411.12537), section 4.
    """

    def __init__(
        self, dim: int, groups: int, *, decay: nn.Module | None = None, max_beta: float = 1.0
    ) -> None:
        super().__init__()
        _check_sizes("DeltaRule", dim, groups)
        check_number("max_beta", max_beta, 0, math.nextafter(2, 3), "greater than 0 and at most 2")
        self.beta_proj = nn.Linear(dim, groups, bias=False)
        self.decay, self.max_beta = decay, max_beta

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B N T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B O T E"], Parts]:
        """Return the results [B,max(H,N),T,E] and the state (S,) after the last token."""
        beta = self.max_beta * _at_least_float32(self.beta_proj(x)).sigmoid().transpose(1, 2)
        if self.decay is None:
            return delta_rule(q, k, v, beta, state=state, k_positions=positions, form=form)
        g = self.decay(x)
        return gated_delta_rule(q, k, v, beta, g, state=state, k_positions=positions, form=form)

    def spec(self, weights: ParameterCounts, shape: HeadShape) -> DeltaSpec:
        """Return the cost of a layer with this rule."""
        return DeltaSpec(weights, (), shape, gated=self.decay is not None)

    def extra_repr(self) -> str:
        """Return the upper bound of beta."""
        return f"max_beta={self.max_beta}"


def _at_least_float32(x: Tensor) -> Tensor:
    """Convert a tensor to float32, unless it is float64."""
    return x if x.dtype == torch.float64 else x.float()


def _check_sizes(name: str, dim: int, groups: int) -> None:
    """Check that both sizes are at least 1."""
    if min(dim, groups) < 1:
        raise ArgumentError(f"{name}(dim={dim}, groups={groups}): each must be at least 1")


class Swish(nn.Module):
    """The activation x sigmoid(x), as a step on heads.

    >>> Swish()(torch.zeros(3)).tolist()
    [0.0, 0.0, 0.0]

    Source: Ramachandran et al. 2017 (arXiv 1710.05941), equation 1 with beta 1.
    """

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """Apply the activation to x [..., D]; positions are ignored."""
        return F.silu(x)


class L2Norm(nn.Module):
    """L2 normalisation of the last dimension: x / sqrt(sum(x^2) + eps), computed in fp32 or better.

    Args:
        eps: added to the squared norm, so that a zero vector stays zero.

    Raises:
        ArgumentError: eps is negative.

    >>> L2Norm(eps=0.0)(torch.tensor([3.0, 4.0])).tolist()
    [0.6000000238418579, 0.800000011920929]

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3.
    """

    def __init__(self, *, eps: float = 1e-6) -> None:
        super().__init__()
        if not eps >= 0:
            raise ArgumentError(f"L2Norm(eps={eps}): eps must be at least 0")
        self.eps = eps

    def forward(self, x: Float[Tensor, "*L D"], positions: object = None) -> Float[Tensor, "*L D"]:
        """Normalise x [..., D]; positions are ignored."""
        x32 = x if x.dtype in (torch.float32, torch.float64) else x.float()
        return (x32 * torch.rsqrt(x32.square().sum(-1, keepdim=True) + self.eps)).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the epsilon of the norm."""
        return f"eps={self.eps}"
