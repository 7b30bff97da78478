"""The standard projections and output maps, from which the entries of the catalogue start."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

from regard.argument_checks import resolve_head_dim
from regard.errors import ArgumentError
from regard.masks import Causal, Mask
from regard.nn.attention.attention import Attention
from regard.nn.projections.heads import HeadProjection, Projection, SeparateQKV
from regard.nn.recurrence.projections import CausalConvolution, ConvolvedQKV, GroupedValueQKV
from regard.nn.variants.options import Valued
from regard.nn.weights import Linear
from regard.positions import Rotary
from regard.positions.rotary import Layout


def separate_qkv(
    dim: int,
    heads: int,
    groups: int,
    head_dim: int,
    *steps: nn.Module,
    value_dim: int | None = None,
    bias: bool = False,
) -> SeparateQKV:
    """Build separate projections to queries, keys and values, with steps on heads."""
    return SeparateQKV(
        HeadProjection(dim, heads, head_dim, *steps, bias=bias),
        HeadProjection(dim, groups, head_dim, *steps, bias=bias),
        HeadProjection(dim, groups, value_dim or head_dim, bias=bias),
    )


def output_projection(dim: int, heads: int, value_dim: int, *, bias: bool = False) -> nn.Linear:
    """Build the output map [B,T,H*E] -> [B,T,M]."""
    return Linear(heads * value_dim, dim, bias=bias)


CAUSAL = Causal()


class Start:
    """The sizes and maps of grouped-query attention, from which most entries start.

    Without groups there are H, without a head dim it is M / H, without a value dim it is the head
    dim, and without a base there are no rotary positions.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        groups: int | None = None,
        head_dim: int | None = None,
        base: float | None = None,
        layout: Layout = "half",
        bias: bool = False,
        value_dim: int | None = None,
    ) -> None:
        self.dim, self.heads, self.bias = dim, heads, bias
        self.groups = heads if groups is None else groups
        self.D = resolve_head_dim(dim, heads, head_dim)
        self.E = self.D if value_dim is None else value_dim
        self.rotary: tuple[Rotary, ...] = (
            () if base is None else (Rotary(self.D, base, layout=layout),)
        )

    def q(self, *steps: nn.Module) -> HeadProjection:
        """Return the map to query heads, with these steps on each."""
        return HeadProjection(self.dim, self.heads, self.D, *steps, bias=self.bias)

    def kv(self, *steps: nn.Module) -> HeadProjection:
        """Return the map to key heads or to value heads, with these steps on each."""
        return HeadProjection(self.dim, self.groups, self.D, *steps, bias=self.bias)

    def maps(self) -> tuple[HeadProjection, HeadProjection, HeadProjection]:
        """Return the maps to queries, keys and values; the first two rotate if there is a base."""
        return self.q(*self.rotary), self.kv(*self.rotary), self.kv()

    def qkv(self) -> SeparateQKV:
        """Return the three maps as one projection, with values of size E."""
        q, k = self.q(*self.rotary), self.kv(*self.rotary)
        return SeparateQKV(q, k, HeadProjection(self.dim, self.groups, self.E, bias=self.bias))

    def output(self) -> nn.Linear:
        """Return the map from the heads to the model dim."""
        return output_projection(self.dim, self.heads, self.E, bias=self.bias)

    def attention(
        self, project: Projection | None = None, *, mask: Mask | None = CAUSAL, **parts: Any
    ) -> Attention:
        """Return softmax attention, by default causal and with `qkv()`."""
        project = self.qkv() if project is None else project
        return Attention(project, self.output(), mask=mask, **parts)


class ValueHeadStart(Start):
    """The sizes and maps of a recurrence with N value heads, each with a state."""

    def __init__(
        self, dim: int, heads: int, *, value_heads: int | None = None, **sizes: Any
    ) -> None:
        super().__init__(dim, heads, **sizes)
        self.value_heads = self.groups if value_heads is None else value_heads
        self.outputs = max(heads, self.value_heads)

    def values(self, *steps: nn.Module) -> HeadProjection:
        """Return the map to value heads, with these steps on each."""
        return HeadProjection(self.dim, self.value_heads, self.E, *steps)

    def separate(self, *steps: nn.Module, value_steps: Sequence[nn.Module] = ()) -> GroupedValueQKV:
        """Return the three maps, with steps on queries and keys and others on values."""
        return GroupedValueQKV(self.q(*steps), self.kv(*steps), self.values(*value_steps))

    def convolved(self, kernel: int, *steps: nn.Module) -> ConvolvedQKV:
        """Return the maps with a short convolution and swish, then steps on queries and keys."""
        q, k, v = self.q(*steps), self.kv(*steps), self.values()
        channels = (self.heads + self.groups) * self.D + self.value_heads * self.E
        return ConvolvedQKV(q, k, v, CausalConvolution(channels, kernel))

    def gate(self, *, bias: bool = False) -> HeadProjection:
        """Return the map to the output gates."""
        return HeadProjection(self.dim, self.outputs, self.E, bias=bias)

    def output(self) -> nn.Linear:
        """Return the map from the heads to the model dim."""
        return output_projection(self.dim, self.outputs, self.E)


def set_half_heads(dim: int, heads: int, options: Valued) -> None:
    """Set the sizes that are None: keys of M / 2H, half as wide as usual, and values of 2 D."""
    D = options["head_dim"]
    if D is None:
        if heads < 1 or dim % (2 * heads):
            raise ArgumentError(
                f"dim is {dim}; it must be divisible by 2 * heads = {2 * heads}, or give head_dim, "
                "which is dim / (2 heads) in the paper",
                argument="dim",
            )
        D = options["head_dim"] = dim // (2 * heads)
    if options["value_dim"] is None:
        options["value_dim"] = 2 * D


def is_first_layer(layer: int) -> bool:
    """Return whether the index of a layer is that of the first one; raise below 0."""
    if layer < 0:
        raise ArgumentError(f"layer is {layer}; it must be at least 0", argument="layer")
    return layer == 0


def is_last_of_period(layer: int, every: int) -> bool:
    """Return whether a layer is the last of a period of n layers; raise for bad numbers."""
    if layer < 0 or every < 1:
        raise ArgumentError(
            f"layer is {layer} and every is {every}; layer must be at least 0, and every at "
            "least 1",
            argument="layer",
        )
    return (layer + 1) % every == 0
