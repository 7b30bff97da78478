"""Steps on the result of attention before the output map (`FinishedProjection`): gates of heads and
of channels, the difference of pairs of heads, the removal of a token's own value, and the inverse
rotation of rotated values.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar, Literal, NamedTuple, TypeAlias, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.biases import Bias
from regard.caches import Parts
from regard.cost.softmax import VisibleKeys
from regard.cost.spec import ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.nn.data_bias import data_bias
from regard.nn.explainable import CallWeights, Explainable, HeadMix, LayerRun, MixTerm
from regard.nn.linear import Linear
from regard.nn.projections import (
    Projection,
    ProjectionModule,
    ProjectionShape,
    SeparateQKV,
    adjust_query,
    attention_spec,
)
from regard.positions import Rotary, rotate
from regard.span import Positions, as_tensor
from regard.units import plural


class QueryTokens(NamedTuple):
    """What a step on the result of attention may read: the tokens of the queries.

    Attributes:
        x: the hidden states [B,T,M] that the queries were computed from.
    """

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
    """Base class of the steps on the result of attention: a module called as step(z [B,H,T,E],
    tokens), which returns [B,H',T,E].
    """

    is_positional: ClassVar[bool] = False
    """Whether the step is defined only together with the rotation of the layer."""

    def heads(self, H: int) -> int:
        """Return the number of heads of the result for H heads of attention."""
        return H


class FinishedProjection(ProjectionModule):
    """A projection with steps on the result of attention, in the given order.

    z' = step_n(... step_1(z, tokens) ..., tokens), where tokens are those of the queries

    Args:
        project: the projection to wrap; any `Projection` without other forms (`HasForms`).
        *steps: `HeadFinish` modules.

    Raises:
        ArgumentError: the projection has several forms, or there is no step.

    >>> from regard.nn.variants.projections import separate_qkv
    >>> project = FinishedProjection(separate_qkv(8, 4, 2, 2), HeadGate(8, 4))
    >>> x = torch.zeros(1, 3, 8)
    >>> project.postprocess(torch.ones(1, 4, 3, 2), x)[0, 0, 0]
    tensor([0.5000, 0.5000], grad_fn=<SelectBackward0>)
    """

    def __init__(self, project: Projection, *steps: HeadFinish) -> None:
        super().__init__()
        if hasattr(type(project), "select_form"):
            raise ArgumentError(
                f"project is {type(project).__name__}, which has several forms; "
                "FinishedProjection takes a projection with one form, such as SeparateQKV (a gate "
                "for MLA is GatedProjection)"
            )
        if not steps:
            raise ArgumentError("FinishedProjection got no step; use the projection itself")
        self.project, self.finishes = project, nn.ModuleList(steps)

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """Return the queries [B,H,T,D] of the wrapped projection."""
        return self.project.query(x, positions)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the memory parts of the wrapped projection."""
        return self.project.remember(x, positions)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return the keys and values of the wrapped projection."""
        return self.project.recall(memory, positions)

    def adjust_query(self, q: Tensor, positions: Positions, k_positions: Positions) -> Tensor:
        """Adjust queries to the positions of the keys, if the wrapped projection does so.

        Args:
            q: queries [B,H,T,D].
            positions: positions of the queries.
            k_positions: positions of the keys.

        Returns:
            The adjusted queries.
        """
        return adjust_query(self.project, q, positions, k_positions)

    def data_bias(
        self, x: Tensor, q: Tensor, memory: Parts, positions: Positions, k_positions: Positions
    ) -> Bias | None:
        """Return the bias of the wrapped projection, if it computes one from tokens.

        Args:
            x, q, memory, positions, k_positions: as for `regard.nn.data_bias.HasDataBias`.

        Returns:
            The bias, or None.
        """
        return data_bias(self.project, x, q, memory, positions, k_positions)

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Run the steps without positions; a step that needs them raises an `ArgumentError`."""
        return self.postprocess_at(z, x, None)

    def postprocess_at(self, z: Tensor, x: Tensor, positions: Positions | None) -> Tensor:
        """Run the steps on the result of attention.

        Args:
            z: the result of attention [B,H,T,E].
            x: the hidden states [B,T,M] of the queries.
            positions: positions of their tokens.

        Returns:
            The heads [B,H',T,E] that the output map concatenates and projects.
        """
        tokens = QueryTokens(x, positions, self.project)
        z = self.project.postprocess(z, x)
        for step in self.finishes:
            z = step(z, tokens)
        return z

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """Return the cost of attention through this projection.

        Args:
            weights: the number of parameters of the layer, those of the steps included.
            visible: the number of keys that a query sees.

        Returns:
            The cost specification.
        """
        return attention_spec(self.project, weights, visible)

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], call_index: int, head: int, row: int
    ) -> HeadMix | None:
        """Return the combination of rows of the first step that combines heads, or that of the
        wrapped projection.
        """
        for step in self.finishes:
            if isinstance(step, Explainable):
                return step.explain_mix(run, calls, call_index, head, row)
        return super().explain_mix(run, calls, call_index, head, row)

    @property
    def shape(self) -> ProjectionShape:
        """The sizes of the wrapped projection."""
        return self.project.shape

    @property
    def cache_unsafe_reason(self) -> str | None:
        """The reason why a cache must not store the memory of the wrapped projection, or None."""
        return self.project.cache_unsafe_reason


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

    Raises:
        ArgumentError: a size is less than 1, or the activation is unknown.

    >>> HeadGate(8, 4, activation="softplus")
    HeadGate(
      4 heads, softplus
      (linear): Linear(in_features=8, out_features=4, bias=False)
    )

    Source: Qiu et al. 2025 (arXiv 2505.06708), section 4, headwise gates; softplus: the code of
    Laguna; a bias for each head: the code of Beam.
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
        if min(dim, heads, channels) < 1:
            raise ArgumentError(
                f"HeadGate(dim={dim}, heads={heads}, channels={channels}): each must be at least 1"
            )
        if activation not in get_args(GateActivation):
            raise ArgumentError(
                f"activation is {activation!r}; it must be one of "
                f"{', '.join(get_args(GateActivation))}"
            )
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

    Raises:
        ArgumentError: a size is less than 1.

    >>> from regard.span import Span
    >>> step, z = PairDifference(8, 2), torch.arange(4.0)[None, :, None, None]
    >>> tokens = QueryTokens(torch.zeros(1, 1, 8), Span(0, 1), None)
    >>> step(z, tokens).flatten().tolist()
    [-0.5, 0.5]

    Source: Microsoft 2026, "Differential Transformer V2" (code: microsoft/unilm).
    """

    def __init__(self, dim: int, heads: int) -> None:
        super().__init__()
        if min(dim, heads) < 1:
            raise ArgumentError(
                f"PairDifference(dim={dim}, heads={heads}): each must be at least 1"
            )
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
        return HeadMix(
            f"the pattern of output head {pair} is the softmax of query head {first} minus λ times "
            f"that of query head {first + 1}, λ = {factor:.4f} for this token: weights may be "
            "negative, and the row sums to 1 - λ",
            (
                MixTerm(f"head {first}", 1.0, float(rows[first].sum()), head == first),
                MixTerm(
                    f"head {first + 1}", -factor, float(rows[first + 1].sum()), head == first + 1
                ),
            ),
            rows[first] - factor * rows[first + 1],
        )


class OwnValueRemoval(HeadFinish):
    """Exclusive self-attention: the part of the result that points along the token's own value is
    removed.

    z'_h = z_h - a_h (z_h . v̂) v̂,  v̂ = v / |v| of the same token,  a_h = tanh(alpha_h), or 1

    Args:
        heads: the number of heads H.
        learned: whether a_h is learned; alpha starts at 0, which changes nothing. Otherwise a_h
            is 1, and z' is orthogonal to v.

    Raises:
        ArgumentError: heads is less than 1.

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
    """The rotation of the result back by the position of the query, for values that were rotated by
    their own positions.

    z'_i = R(-i) z_i = sum_j p_ij R(j - i) v_j, if the values are R(j) v_j

    The result then depends on distances only, so that shifting all positions changes nothing.

    Args:
        rotary: the rotary embedding of the values.

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
        moved: Tensor = rotate(z, -positions, rotary.inv_freq, layout=rotary.layout, factor=factor)
        return moved
