"""Projections of a recurrence: more value heads, a short convolution, or a token shift."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Literal, NamedTuple, TypeAlias, cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_choice, check_positive_sizes, check_value_heads
from regard.caches import Parts
from regard.cost.fixed_state import ShortConvolution
from regard.errors import ArgumentError
from regard.nn.explainable import (
    InputSteps,
    MechanismStep,
    MechanismSteps,
    ProjectionQuery,
    first_rotary,
    projection_step,
    run_steps,
)
from regard.nn.projections.heads import (
    HeadProjection,
    Projection,
    ProjectionShape,
    SeparateQKV,
    run_on_heads,
)
from regard.ops.linear.short_convolution import Activation, short_convolution
from regard.ops.tokenwise import check_linear_map
from regard.span import Positions


class CausalConvolution(nn.Module):
    """A causal convolution over the last few tokens, whose state is the inputs of (n - 1) d tokens.

    y_t = activation(bias + sum_{i < n} weight[:, n - 1 - i] * x_{t - i d})

    Args:
        channels: the number of channels c.
        kernel: the number of tokens n of a filter, the present one included.
        bias: whether each channel has a bias.
        activation: "silu" for x sigmoid(x), or None.
        dilation: d, the number of tokens from one to the next that a filter reads.

    Raises:
        ArgumentError: a size is less than 1, or the activation is unknown.

    >>> convolution = CausalConvolution(3, 4)
    >>> y, state = convolution(torch.ones(1, 5, 3), None, None)
    >>> last, state = convolution(torch.ones(1, 1, 3), state, None)
    >>> y.shape, [tuple(part.shape) for part in state], torch.equal(last[:, 0], y[:, 4])
    (torch.Size([1, 5, 3]), [(1, 3, 3)], True)

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3; Gu and Dao 2023 (arXiv 2312.00752),
    section 3.4.
    """

    def __init__(
        self,
        channels: int,
        kernel: int,
        *,
        bias: bool = False,
        activation: Activation = "silu",
        dilation: int = 1,
    ) -> None:
        super().__init__()
        check_positive_sizes(
            "CausalConvolution", channels=channels, kernel=kernel, dilation=dilation
        )
        check_choice("activation", activation, ("silu", None))
        bound = kernel**-0.5  # the initial values of torch.nn.Conv1d
        self.weight = nn.Parameter(torch.empty(channels, kernel).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None
        self.activation, self.dilation = activation, dilation

    def forward(
        self, x: Float[Tensor, "B T c"], state: Parts | None, positions: Positions | None
    ) -> tuple[Float[Tensor, "B T c"], Parts]:
        """Convolve the tokens of a call.

        Args:
            x: the channels of the tokens [B,T,c].
            state: the state after the tokens before; None at the start of a text.
            positions: positions of the tokens; slots at -1 are empty.

        Returns:
            The convolved channels [B,T,c], and the state after the last token.
        """
        return _convolve(self, x, state, positions)

    @property
    def cost(self) -> ShortConvolution:
        """The sizes of the convolution, for the cost of a layer."""
        channels, kernel = self.weight.shape
        return ShortConvolution(channels, kernel, self.dilation)

    def extra_repr(self) -> str:
        """Return the sizes and the activation."""
        channels, kernel = self.weight.shape
        dilation = "" if self.dilation == 1 else f", dilation={self.dilation}"
        return f"{channels} channels, kernel={kernel}, activation={self.activation!r}{dilation}"


class JoinedConvolution(nn.Module):
    """Causal convolutions of neighbouring channels as one, for checkpoints with own filters."""

    bias = None

    def __init__(self, parts: Sequence[CausalConvolution]) -> None:
        super().__init__()
        kinds = {(x.weight.shape[1], x.dilation, x.activation, x.bias is None) for x in parts}
        if len(kinds) != 1 or not next(iter(kinds))[-1]:
            raise ArgumentError(
                f"parts are {list(parts)}; they must have the same kernel, dilation and "
                "activation, and no bias"
            )
        self.parts = nn.ModuleList(parts)
        self.activation, self.dilation = parts[0].activation, parts[0].dilation

    @property
    def weight(self) -> Float[Tensor, "c n"]:
        """The filters of all channels."""
        return torch.cat([cast("CausalConvolution", part).weight for part in self.parts])

    def forward(
        self, x: Float[Tensor, "B T c"], state: Parts | None, positions: Positions | None
    ) -> tuple[Float[Tensor, "B T c"], Parts]:
        """Convolve the tokens of a call, with the channels of all parts one after another."""
        return _convolve(self, x, state, positions)

    @property
    def cost(self) -> ShortConvolution:
        """The sizes of the convolution, for the cost of a layer."""
        channels, kernel = self.weight.shape
        return ShortConvolution(channels, kernel, self.dilation)


def _convolve(
    convolution: CausalConvolution | JoinedConvolution,
    x: Tensor,
    state: Parts | None,
    positions: Positions | None,
) -> tuple[Tensor, Parts]:
    """Convolve the tokens of a call with the filters of a module."""
    weight: Tensor = convolution.weight
    bias: Tensor | None = convolution.bias
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # the maps before it gave x another dtype than that of the filters
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    activation, dilation = convolution.activation, convolution.dilation
    if dilation > 1:  # zeros between what a filter reads
        taps = weight
        weight = taps.new_zeros(len(taps), (taps.shape[1] - 1) * dilation + 1)
        weight[:, ::dilation] = taps
    return short_convolution(
        x, weight, bias, activation=activation, state=state, positions=positions
    )


ChannelOrder: TypeAlias = Literal["qkv", "vkq"]
"""The order of the channels of queries, keys and values in a convolution."""


class GroupedValueQKV(SeparateQKV):
    """A projection of a recurrence: value head h has a state, and key head h // (N/G).

    Args:
        q: a `HeadProjection` to H query heads.
        k: a `HeadProjection` to G key heads; G divides H.
        v: a `HeadProjection` to N value heads; G divides N, and of H and N one divides the other.
        key_transform: as for `SeparateQKV`.

    Raises:
        ArgumentError: the numbers of heads do not fit together, or q and k differ in head dim.

    >>> q, k, v = (HeadProjection(8, heads, 2) for heads in (2, 2, 4))
    >>> GroupedValueQKV(q, k, v).shape.memory, GroupedValueQKV(q, k, v).value_heads
    ((4, 8), 4)

    Source: the library flash-linear-attention, grouped value attention; Qwen3-Next.
    """

    def _check_heads(self, q: HeadProjection, k: HeadProjection, v: HeadProjection) -> None:
        """Raise unless the numbers of heads fit together, and q and k have one head dim."""
        check_value_heads(q.heads, k.heads, v.heads)
        if q.head_dim != k.head_dim:
            raise ArgumentError(
                f"q is {q.extra_repr()}, k is {k.extra_repr()}; they must have the same head dim"
            )

    @property
    def value_heads(self) -> int:
        """N, the number of value heads."""
        return self.v.heads

    @property
    def shape(self) -> ProjectionShape:
        """H, G, D and E; a recurrence stores none of the G D + N E values of a token."""
        memory = (self.k.heads * self.k.head_dim, self.v.heads * self.v.head_dim)
        return super().shape._replace(memory=memory)


class StatefulQKV(GroupedValueQKV, ABC):
    """Base class of projections of a recurrence with a state: `project` and `cost` are missing."""

    @abstractmethod
    def project(self, x: Tensor, positions: Positions | None, state: Parts | None) -> ProjectedQKV:
        """Compute the queries, keys and values of tokens, with the state of the projection."""

    @property
    @abstractmethod
    def cost(self) -> ShortConvolution:
        """The sizes of the convolution that has the state."""

    def query(self, x: Tensor, positions: Positions | None) -> Tensor:
        """Return the queries [B,H,T,D] of the tokens x at the start of a text."""
        return self.project(x, positions, None).q

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the keys [B,G,S,D] and the values [B,N,S,E] at the start of a text."""
        return self.project(x, positions, None)[1:3]


class ConvolvedQKV(StatefulQKV):
    """A projection with a short causal convolution, whose inputs are its state.

    [q; k; v] = convolution([W_q x; W_k x; W_v x]), then the steps of each head

    Args:
        q, k, v: as for `GroupedValueQKV`; the steps on heads follow the convolution.
        convolution: a `CausalConvolution` or `JoinedConvolution` over all channels.
        value_gate: a `HeadProjection` of x, whose sigmoid multiplies the values; or None.
        order: the order of the channels in the convolution: "qkv", or "vkq" as in Mamba-2.

    Raises:
        ArgumentError: the heads, the convolution or the gate do not fit, or a projection has a
            module before its split.

    >>> q, k, v = (HeadProjection(8, heads, 2) for heads in (2, 2, 4))
    >>> project = ConvolvedQKV(q, k, v, CausalConvolution(16, 4))
    >>> inputs = project.project(torch.zeros(1, 5, 8), None, None)
    >>> inputs.v.shape, [tuple(part.shape) for part in inputs.state]
    (torch.Size([1, 4, 5, 2]), [(1, 3, 16)])

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3; Qwen3-Next; Kimi Linear.
    """

    def __init__(
        self,
        q: HeadProjection,
        k: HeadProjection,
        v: HeadProjection,
        convolution: CausalConvolution | JoinedConvolution,
        *,
        value_gate: HeadProjection | None = None,
        order: ChannelOrder = "qkv",
    ) -> None:
        super().__init__(q, k, v)
        check_choice("order", order, ("qkv", "vkq"))
        self.order = order
        for name, part in {"q": q, "k": k, "v": v}.items():
            if not isinstance(part.flat, torch.nn.Identity):
                raise ArgumentError(
                    f"{name} has a {type(part.flat).__name__} before its split into heads, where "
                    "the convolution runs; give it as a step on heads"
                )
        channels = sum(part.heads * part.head_dim for part in (q, k, v))
        if convolution.weight.shape[0] != channels:
            raise ArgumentError(
                f"the convolution has {convolution.weight.shape[0]} channels; q, k and v have "
                f"{channels} together"
            )
        if value_gate is not None and (value_gate.heads, value_gate.head_dim) != (
            v.heads,
            v.head_dim,
        ):
            raise ArgumentError(
                f"value_gate is {value_gate.extra_repr()}; it must be {v.extra_repr()}, as v is"
            )
        self.convolution, self.value_gate = convolution, value_gate

    @property
    def cost(self) -> ShortConvolution:
        """The sizes of the convolution."""
        return self.convolution.cost

    def project(self, x: Tensor, positions: Positions | None, state: Parts | None) -> ProjectedQKV:
        """Compute the queries, keys and values of tokens, with the state of the convolution."""
        y, state = self.convolution(self._channels(x), state, positions)
        heads = zip((self.q, self.k, self.v), self._split(y), strict=True)
        q, k, v = (run_on_heads(part.steps, own, positions) for part, own in heads)
        if self.value_gate is not None:
            v = v * self.value_gate(x, positions).sigmoid()
        return ProjectedQKV(q, k, v, state)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of queries, keys and values: linear map, convolution, steps on heads."""
        parts: dict[Literal["q", "k", "v"], HeadProjection] = {
            "q": self.q,
            "k": self.k,
            "v": self.v,
        }
        y = self._channels(query.x)
        convolved, _ = self.convolution(y, None, query.positions)
        function = self.convolution.activation or ""
        steps: list[MechanismSteps] = []
        before_after = zip(self._split(y), self._split(convolved), strict=True)
        for (letter, part), (before, after) in zip(parts.items(), before_after, strict=True):
            i = "i" if letter == "q" else "j"
            equation = f"{letter}_{i} ← {function}(sum_l c_l * {letter}_{{{i}-l}})"
            first = (
                projection_step(letter, before[0], part.linear),
                MechanismStep("convolved", equation, after[0]),
            )
            steps.append(run_steps(part.steps, first, query.positions, letter))
        q, k, v = steps
        if self.value_gate is not None:
            gated = v[-1].values * self.value_gate(query.x, query.positions)[0].sigmoid()
            v = (*v, MechanismStep("gated", "v_j ← sigmoid(W x_j) * v_j", gated))
        return InputSteps(q, k, v, first_rotary(self.q.steps))

    def _channels(self, x: Tensor) -> Tensor:
        """Return the inputs of the convolution [B,T,c] for tokens x [B,T,M]."""
        return torch.cat([self._part(letter).linear(x) for letter in self.order], -1)

    def _split(self, y: Tensor) -> list[Tensor]:
        """Split channels [B,T,c] into the heads of queries, keys and values."""
        parts = [self._part(letter) for letter in self.order]
        split = y.split([part.heads * part.head_dim for part in parts], -1)
        heads = {
            letter: own.unflatten(-1, (part.heads, part.head_dim)).transpose(1, 2)  # [B,n,T,d]
            for letter, part, own in zip(self.order, parts, split, strict=True)
        }
        return [heads[letter] for letter in "qkv"]

    def _part(self, letter: str) -> HeadProjection:
        """Return the projection of the queries, keys or values."""
        return {"q": self.q, "k": self.k, "v": self.v}[letter]


class TokenShiftQKV(StatefulQKV):
    """A projection of a mix of each token with the one before it, its state, as in RWKV.

    q_t = W_q (c_q x_t + (1 - c_q) x_{t-1}), and likewise k and v, with c per channel

    Source: Peng et al. 2023 (arXiv 2305.13048), equations 11 to 13.
    """

    def __init__(self, q: HeadProjection, k: HeadProjection, v: HeadProjection) -> None:
        super().__init__(q, k, v)
        # channels start with shares of the present token from 0 to 1
        share = torch.linspace(0, 1, q.linear.in_features)
        self.mix_q, self.mix_k, self.mix_v = (torch.nn.Parameter(share.clone()) for _ in "qkv")

    def project(self, x: Tensor, positions: Positions | None, state: Parts | None) -> ProjectedQKV:
        """Compute the queries, keys and values of tokens, with the last token as the state."""
        before, state = token_before(x, self.mix_q, state, positions)
        mixes = (self.mix_q, self.mix_k, self.mix_v)
        parts = zip((self.q, self.k, self.v), mixes, strict=True)
        q, k, v = (part(x * c + before * (1 - c), positions) for part, c in parts)
        return ProjectedQKV(q, k, v, state)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the queries, keys and values, each as one step."""
        q, k, v, _ = self.project(query.x, query.positions, None)

        def step(letter: str, i: str, heads: Tensor) -> MechanismSteps:
            equation = f"{letter}_{i} ← W (c * x_{i} + (1 - c) * x_{{{i}-1}})"
            return (MechanismStep("mixed with the token before", equation, heads[0]),)

        return InputSteps(step("q", "i", q), step("k", "j", k), step("v", "j", v))

    @property
    def cost(self) -> ShortConvolution:
        """The sizes of the state: one past token of M channels."""
        return ShortConvolution(self.mix_q.shape[0], 2)


def token_before(
    x: Tensor, mix: Tensor, state: Parts | None, positions: Positions | None
) -> tuple[Tensor, Parts]:
    """Return the token before each token (a token shift), and the state after the last one.

    Source: Peng et al. 2023 (arXiv 2305.13048), section 3.1.
    """
    if x.device != mix.device or not torch.is_autocast_enabled(mix.device.type):
        check_linear_map(x, mix[None], None)
    # a filter that returns the token before, [1, 0], made on the device
    shift = torch.arange(1, -1, -1, dtype=x.dtype, device=x.device).expand(x.shape[-1], 2)
    return short_convolution(x, shift, None, activation=None, state=state, positions=positions)


class ProjectedQKV(NamedTuple):
    """The queries, keys and values of some tokens, and the state of their projection."""

    q: Tensor
    k: Tensor
    v: Tensor
    state: Parts


def project_tokens(
    project: Projection, x: Tensor, positions: Positions, state: Parts | None
) -> ProjectedQKV:
    """Compute queries, keys and values with a projection that may have a state."""
    if isinstance(project, StatefulQKV):
        return project.project(x, positions, state)
    q = project.query(x, positions)
    k, v = project.recall(project.remember(x, positions), positions)
    return ProjectedQKV(q, k, v, ())
