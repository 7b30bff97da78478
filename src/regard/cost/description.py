"""What one layer of a mechanism keeps and computes: figures, each beside the formula that gave it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Figure:
    """A number and how it comes about.

    >>> print(Figure(2048, "2 G D = 2 x 8 x 128"))
    2,048 = 2 G D = 2 x 8 x 128
    """

    value: int
    formula: str

    def __str__(self) -> str:
        return f"{self.value:,}" if not self.formula else f"{self.value:,} = {self.formula}"


@dataclass(frozen=True)
class Description:
    """The cost of one layer at a context of `context` tokens, batch 1. A multiplication and an addition are two FLOPs.

    Attributes:
        name: the mechanism.
        context: how many tokens stand in front of and at the one that is computed.
        parameters: of the layer.
        kv_per_token: numbers that a cache keeps for one token; 0 if nothing is kept by token.
        kv_tokens: how many tokens it keeps at this context.
        state: numbers kept whatever the length.
        flops_per_token: of one decoded token at this context, projections included.

    >>> kv = Figure(32, "2 G D = 2 x 2 x 8")
    >>> layer = Description("gqa", 100, Figure(0, ""), kv, Figure(100, "S"), Figure(0, ""), Figure(0, ""))
    >>> layer.kept
    3200
    """

    name: str
    context: int
    parameters: Figure
    kv_per_token: Figure
    kv_tokens: Figure
    state: Figure
    flops_per_token: Figure

    @property
    def kept(self) -> int:
        """Numbers that a cache holds at this context."""
        return self.kv_per_token.value * self.kv_tokens.value + self.state.value

    def __str__(self) -> str:
        rows = (
            ("parameters", self.parameters),
            ("cache numbers per token", self.kv_per_token),
            ("tokens kept", self.kv_tokens),
            ("state numbers", self.state),
            ("FLOPs per decoded token", self.flops_per_token),
        )
        lines = [f"{label:<26}{figure}" for label, figure in rows]
        return "\n".join([f"{self.name}, context {self.context:,}", *lines])
