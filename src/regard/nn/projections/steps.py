"""Steps of a projection on its heads (temperatures, norms, limits, activations), and what changes
the result of attention before the output map.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_choice, check_groups, check_number, check_positive_sizes
from regard.caches import Parts
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn.blocks.norms import RMSNorm
from regard.nn.explainable import CallWeights, Explainable, HeadMix, LayerRun, MixTerm
from regard.nn.projections.heads import (
    HeadProjection,
    Projection,
    ProjectionShape,
    SeparateQKV,
    WrappedProjection,
    cache_unsafe_reason,
)
from regard.nn.weights import Linear
from regard.ops.tokenwise import clip
from regard.positions import Rotary, rotate
from regard.span import Positions, as_tensor
from regard.units import plural

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
        if self.limit * self.limit > torch.finfo(wide.dtype).max:  # which no square of a length is
            return wide.to(x.dtype)
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
        return clip(x, -self.limit, self.limit)

    def extra_repr(self) -> str:
        """Return the limit of the absolute values."""
        return f"limit={self.limit:g}"


class QueryTokens(NamedTuple):
    """What a step on the result of attention may read: states x [B,T,M] of the queries."""

    x: Tensor
    positions: Positions | None
    project: Projection

    def values(self) -> Tensor:
        """Return the values [B,G,T,E] of these tokens, as attention reads them."""
        positions = self.known_positions()
        if isinstance(self.project, SeparateQKV):  # without the keys
            v: Tensor = self.project.v(self.x, positions)
            return v
        return self.project.recall(self.project.remember(self.x, positions), positions)[1]

    def known_positions(self) -> Positions:
        """Return the positions of the queries, or refuse."""
        if self.positions is None:
            raise ArgumentError(
                "a step on the result of attention needs the positions of the queries, which this "
                "mixer does not pass; use regard.nn.Attention, which does"
            )
        return self.positions


class HeadFinish(nn.Module):
    """Base class of the steps on the result: step(z [B,H,T,E], tokens) -> [B,H',T,E]."""

    is_positional: ClassVar[bool] = False
    """Whether the step is defined only together with the rotation of the layer."""

    def heads(self, H: int) -> int:
        """Return the number of heads of the result for H heads of attention."""
        return H


class GatedProjection(WrappedProjection):
    """A projection with an output gate for every element, computed from the query's state.

    z' = z * sigmoid(gate(x))

    Args:
        project: the projection to wrap; any `Projection`.
        gate: a `HeadProjection` of x to H heads of E, which is one gate per head and channel.

    Raises:
        ArgumentError: the gate does not have the heads that attention returns.

    >>> q, k, v = (HeadProjection(8, heads, 2) for heads in (4, 2, 2))
    >>> gated = GatedProjection(SeparateQKV(q, k, v), HeadProjection(8, 4, 2))
    >>> gated.postprocess(torch.ones(1, 4, 3, 2), torch.zeros(1, 3, 8))[0, 0, 0]
    tensor([0.5000, 0.5000], grad_fn=<SelectBackward0>)

    Source: Qiu et al. 2025 (arXiv 2505.06708), section 3 (G1).
    """

    def __init__(self, project: Projection, gate: HeadProjection) -> None:
        super().__init__(project)
        H, _, _, E, _ = project.shape
        if (gate.heads, gate.head_dim) != (H, E):
            raise ArgumentError(
                f"gate is {gate.extra_repr()}; it must be {plural(H, 'head')} of {E}, as attention "
                "returns"
            )
        self.gate = gate

    def finish(self, z: Tensor, x: Tensor, positions: Positions | None) -> Tensor:
        """Multiply heads z [B,H,T,E] by the gate."""
        result: Tensor = z * self.gate(x, None).sigmoid()
        return result


class FinishedProjection(WrappedProjection):
    """A projection with steps on the result of attention, in the given order.

    z' = step_n(... step_1(z, tokens) ..., tokens), where tokens are those of the queries

    Args:
        project: the projection to wrap; any `Projection`.
        *steps: `HeadFinish` modules.

    Raises:
        ArgumentError: there is no step.

    >>> from regard.nn.variants.projections import separate_qkv
    >>> project = FinishedProjection(separate_qkv(8, 4, 2, 2), HeadGate(8, 4))
    >>> x = torch.zeros(1, 3, 8)
    >>> project.postprocess(torch.ones(1, 4, 3, 2), x)[0, 0, 0]
    tensor([0.5000, 0.5000], grad_fn=<SelectBackward0>)
    """

    def __init__(self, project: Projection, *steps: HeadFinish) -> None:
        super().__init__(project)
        if not steps:
            raise ArgumentError("FinishedProjection got no step; use the projection itself")
        self.finishes = nn.ModuleList(steps)

    def finish(self, z: Tensor, x: Tensor, positions: Positions | None) -> Tensor:
        """Run the steps; one that needs positions refuses to run without."""
        tokens = QueryTokens(x, positions, self.project)
        for step in self.finishes:
            z = step(z, tokens)
        return z

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], call_index: int, head: int, row: int
    ) -> HeadMix | None:
        """Return the mix of rows of the first step that has one, or of the wrapped projection."""
        for step in self.finishes:
            if isinstance(step, Explainable):
                return step.explain_mix(run, calls, call_index, head, row)
        return super().explain_mix(run, calls, call_index, head, row)


GateActivation: TypeAlias = Literal["sigmoid", "softplus"]
"""The function of a gate: sigmoid gives factors between 0 and 1, softplus factors above 0."""


class HeadGate(HeadFinish):
    """A gate on the result of attention, computed from the hidden state of the query.

    z'_h = z_h f(W x + b)_h, with one number for each head, or one for each of its channels

    Args:
        dim: the model dim M.
        heads: the number of heads H.
        channels: the number of channels E that have a gate each; 1 is one gate for the head.
        activation: the function f: "sigmoid" or "softplus".
        bias: whether each head has a learned bias, which starts at 0.

    >>> HeadGate(8, 4, activation="softplus")
    HeadGate(
      4 heads, softplus
      (linear): Linear(in_features=8, out_features=4, bias=False)
    )

    Source: Qiu et al. 2025 (arXiv 2505.06708), section 4; the code of Laguna, of Beam.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        channels: int = 1,
        *,
        activation: GateActivation = "sigmoid",
        bias: bool = False,
    ) -> None:
        super().__init__()
        check_positive_sizes("HeadGate", dim=dim, heads=heads, channels=channels)
        check_choice("activation", activation, get_args(GateActivation))
        self.head_count, self.channels, self.activation = heads, channels, activation
        self.linear = Linear(dim, heads * channels, bias=False)
        self.bias = nn.Parameter(torch.zeros(heads)) if bias else None

    def forward(self, z: Tensor, tokens: QueryTokens) -> Tensor:
        """Multiply the heads z [B,H,T,E] by their gates."""
        gate = self.linear(tokens.x).unflatten(-1, (self.head_count, self.channels)).transpose(1, 2)
        if self.bias is not None:
            gate = gate + self.bias[:, None, None]
        result: Tensor = z * (gate.sigmoid() if self.activation == "sigmoid" else F.softplus(gate))
        return result

    def extra_repr(self) -> str:
        """Return the number of heads, of channels with a gate each, and the activation."""
        channels = "" if self.channels == 1 else f" of {self.channels}"
        return f"{plural(self.head_count, 'head')}{channels}, {self.activation}"


class PairDifference(Explainable, HeadFinish):
    """The difference of each two neighbouring heads, with a weight that depends on the token.

    z'_h = z_{2h} - sigmoid(W x)_h z_{2h+1}

    Args:
        dim: the model dim M.
        heads: the number H of heads of the result; attention has 2 H.

    >>> from regard.span import Span
    >>> step, z = PairDifference(8, 2), torch.arange(4.0)[None, :, None, None]
    >>> tokens = QueryTokens(torch.zeros(1, 1, 8), Span(0, 1), None)
    >>> step(z, tokens).flatten().tolist()
    [-0.5, 0.5]

    Source: Microsoft 2026, "Differential Transformer V2" (code: microsoft/unilm).
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        check_positive_sizes("PairDifference", dim=dim, heads=heads)
        self.linear = Linear(dim, heads, bias=False)

    def heads(self, H: int) -> int:
        """Return H / 2, because two heads of attention become one."""
        return H // 2

    def factor(self, x: Tensor) -> Tensor:
        """Compute the weight of the second head of each pair.

        Args:
            x: hidden states [B,T,M].

        Returns:
            The weights [B,H,T,1], between 0 and 1.
        """
        factor: Tensor = self.linear(x).sigmoid().transpose(1, 2)[..., None]
        return factor

    def forward(self, z: Tensor, tokens: QueryTokens) -> Tensor:
        """Return the differences [B,H,T,E] of heads z [B,2H,T,E]."""
        return z[:, 0::2] - self.factor(tokens.x) * z[:, 1::2]

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], call_index: int, head: int, row: int
    ) -> HeadMix:
        """Return the difference of the two attention patterns as a mix of two rows."""
        pair, first = head // 2, head - head % 2
        factor = float(self.factor(run.x)[0, pair, row, 0])
        rows = calls[call_index].by_position(run.k.shape[2])
        text = (
            f"the pattern of output head {pair} is the softmax of query head {first} minus λ times "
            f"that of query head {first + 1}, λ = {factor:.4f} for this token: weights may be "
            "negative, and the row sums to 1 - λ"
        )
        return _difference(text, rows, (first, first + 1), factor, head)


class OwnValueRemoval(HeadFinish):
    """Exclusive self-attention: the part along the token's own value is removed.

    z'_h = z_h - a_h (z_h . v̂) v̂,  v̂ = v / |v| of the same token,  a_h = tanh(alpha_h), or 1

    Args:
        heads: the number of heads H.
        learned: whether a_h is learned, from alpha = 0, which changes nothing; or it is 1.

    >>> OwnValueRemoval(4, learned=True).alpha.shape
    torch.Size([4])

    Source: XSA 2026 (arXiv 2603.09078); the learned weight: the code of NeoMME.
    """

    def __init__(self, heads: int, *, learned: bool = False) -> None:
        super().__init__()
        if heads < 1:
            raise ArgumentError(f"heads is {heads}; it must be at least 1")
        self.head_count = heads
        self.alpha = nn.Parameter(torch.zeros(heads)) if learned else None

    def forward(self, z: Tensor, tokens: QueryTokens) -> Tensor:
        """Remove the own value from heads z [B,H,T,E]."""
        v = tokens.values()
        # fp32 or better: squares of fp16 values overflow
        wide = torch.promote_types(v.dtype, torch.float32)
        unit = F.normalize(v.to(wide), dim=-1)[:, :, None]  # [B,G,1,T,E]
        grouped = z.to(wide).unflatten(1, (unit.shape[1], -1))  # [B,G,H/G,T,E]
        part = (grouped * unit).sum(-1, keepdim=True) * unit
        if self.alpha is not None:
            part = (
                part * self.alpha.to(wide).tanh().unflatten(0, grouped.shape[1:3])[..., None, None]
            )
        # a slot without a token has no meaning, and its garbage must not become an error
        result: Tensor = (grouped - part).flatten(1, 2).to(z.dtype)
        return result


class InverseRotary(HeadFinish):
    """The rotation of the result back by the position of the query, for rotated values.

    z'_i = R(-i) z_i = sum_j p_ij R(j - i) v_j, if the values are R(j) v_j

    Args:
        rotary: the rotary embedding of the values, or of their last dims.

    >>> InverseRotary(Rotary(4)).is_positional
    True

    Source: the code of DeepSeek-V4 in transformers.
    """

    is_positional: ClassVar[bool] = True

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        if rotary.follows_length:
            raise ArgumentError(
                f"{rotary} follows the length of each call; give it a fixed length=<number>, so "
                "that values and results are rotated alike"
            )
        self.rotary = rotary

    def forward(self, z: Tensor, tokens: QueryTokens) -> Tensor:
        """Rotate heads z [B,H,T,E] back."""
        positions = as_tensor(tokens.known_positions(), z.device)
        rotary = self.rotary
        # the factor on cos and sin was applied to the values already; a rotation back divides by it
        factor = 1 / rotary.rotary_factor
        first = z.shape[-1] - rotary.dim
        last = z[..., first:] if first else z
        last = rotate(last, -positions, rotary.inv_freq, layout=rotary.layout, factor=factor)
        return torch.cat((z[..., :first], last), -1) if first else last


class DifferentialProjection(SeparateQKV):
    """The projection of differential attention, of two patterns over the same values.

    z_h = (1 - l0) norm((softmax(q1 k1^T / sqrt(D)) - l softmax(q2 k2^T / sqrt(D))) v),
    l = exp(a1 . b1) - exp(a2 . b2) + l0,  l0 = 0.8 - 0.6 exp(-0.3 depth)

    l and l0 are lambda and lambda_init; a1, b1, a2 and b2 are lambda_q1, lambda_k1, lambda_q2 and
    lambda_k2. The 2 H query and 2 G key heads are those of the first pattern, then of the second.

    Args:
        q: a `HeadProjection` to 2 H heads of D.
        k: a `HeadProjection` to 2 G heads of D.
        v: a `HeadProjection` to G heads of E.
        depth: the index of the layer, from 0, which determines l0.

    Raises:
        ArgumentError: the heads do not fit one another, or depth is negative.

    >>> q, k, v = HeadProjection(8, 4, 2), HeadProjection(8, 2, 2), HeadProjection(8, 1, 4)
    >>> DifferentialProjection(q, k, v).shape
    ProjectionShape(H=4, G=2, D=2, E=4, memory=(4, 4))

    Source: Ye et al. 2024 (arXiv 2410.05258), equations 1 to 3.
    """

    def __init__(
        self, q: HeadProjection, k: HeadProjection, v: HeadProjection, *, depth: int = 0
    ) -> None:
        nn.Module.__init__(self)
        if q.heads % 2 or k.heads != 2 * v.heads or q.head_dim != k.head_dim or depth < 0:
            raise ArgumentError(
                f"q is {q.extra_repr()}, k is {k.extra_repr()}, v is {v.extra_repr()}, "
                f"depth is {depth}; q must have an even number of heads, k must have twice the "
                "heads of v and the head dim of q, and depth must be at least 0"
            )
        check_groups(q.heads // 2, v.heads)
        self.q, self.k, self.v, self.key_transform = q, k, v, None
        self.cache_unsafe_reason = cache_unsafe_reason(k)
        self.lambda_init = 0.8 - 0.6 * math.exp(-0.3 * depth)
        self.a1, self.b1, self.a2, self.b2 = (
            nn.Parameter(0.1 * torch.randn(q.head_dim)) for _ in range(4)
        )
        self.norm = RMSNorm(v.head_dim, eps=1e-5)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the keys of both patterns [B,2G,S,D], and the values twice [B,2G,S,E]."""
        k, v = super().recall(memory, positions)
        return k, v.repeat(1, 2, 1, 1)

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Subtract the second pattern's heads and normalize: [B,2H,T,E] -> [B,H,T,E]."""
        first, second = z.chunk(2, dim=1)
        out: Tensor = self.norm(first - self.lambda_full.to(z.dtype) * second)
        return out * (1 - self.lambda_init)

    @property
    def lambda_full(self) -> Tensor:
        """The factor l of the second pattern, a scalar tensor."""
        return (self.a1 @ self.b1).exp() - (self.a2 @ self.b2).exp() + self.lambda_init

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], call_index: int, head: int, row: int
    ) -> HeadMix:
        """Return the difference of the two attention patterns as a mix of two rows."""
        H, factor = run.q.shape[1] // 2, float(self.lambda_full)
        first, second = head % H, head % H + H
        rows = calls[call_index].by_position(run.k.shape[2])
        text = (
            f"the pattern of output head {first} is the first softmax minus λ times the second, "
            f"λ = {factor:.4f}: weights may be negative, and the row sums to 1 - λ; a norm and the "
            "factor 1 - λ₀ follow"
        )
        return _difference(text, rows, (first, second), factor, head)

    @property
    def shape(self) -> ProjectionShape:
        """The sizes: a cache stores 2 G D + G E values per token."""
        D, G, E = self.k.head_dim, self.v.heads, self.v.head_dim
        return ProjectionShape(self.q.heads, 2 * G, D, E, (2 * G * D, G * E))


def _difference(
    text: str, rows: Tensor, pair: tuple[int, int], factor: float, head: int
) -> HeadMix:
    """Return the mix of one row of weights minus `factor` times another one of `rows` [H,S]."""
    terms = tuple(
        MixTerm(f"head {h}", share, float(rows[h].sum()), head == h)
        for h, share in zip(pair, (1.0, -factor), strict=True)
    )
    return HeadMix(text, terms, rows[pair[0]] - factor * rows[pair[1]])
