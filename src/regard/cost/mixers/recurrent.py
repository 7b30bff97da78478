"""Mechanisms that keep a state in place of tokens, as the catalogue builds them: linear attention to gated delta rule."""

from __future__ import annotations

from dataclasses import dataclass

from regard.cost.delta import delta_flops, delta_state
from regard.cost.linear import linear_flops, linear_state
from regard.cost.mixers.heads import Heads
from regard.cost.mixers.weights import Memory, Weights


@dataclass(frozen=True)
class Recurrent:
    """A state of fixed size, and as many FLOPs for each token.

    Prefill is counted step by step as well: chunks compute more, of matrix products that run faster.

    >>> layer = Recurrent("linear attention", Weights(4096), state=576, step=1000)
    >>> layer.memory(10) == layer.memory(10**6), layer.prefill_flops(50)
    (True, 50000)
    """

    name: str
    weights: Weights
    state: int
    step: int

    @property
    def mapped(self) -> int:
        """All matrices."""
        return self.weights.matrices

    def memory(self, context: int) -> Memory:
        """The state."""
        return Memory(state=self.state, bounded=True)

    def read(self, context: int) -> Memory:
        """The state."""
        return self.memory(context)

    def decode_flops(self, context: int) -> int:
        """One step."""
        return self.step

    def prefill_flops(self, context: int) -> int:
        """A step for each token."""
        return context * self.step


def linear_attention(heads: Heads) -> Recurrent:
    """Linear attention with elu + 1 and a normaliser.

    >>> linear_attention(Heads(32, 4, 2, 8, 8)).state
    144

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236).
    """
    H, G, D, E = _sizes(heads)
    return Recurrent(
        f"linear attention, {H}/{G} heads of {D} x {E}", heads.weights,
        linear_state(G, D, E, normalised=True), linear_flops(H, G, D, E, normalised=True),
    )  # fmt: skip


def retention(heads: Heads) -> Recurrent:
    """Retention: an output gate, and a norm with weight and bias per head.

    >>> retention(Heads(32, 4, 4, 8, 16)).state
    512

    Source: Sun et al. 2023 (arXiv 2307.08621).
    """
    H, G, D, E = _sizes(heads)
    gate = Weights(heads.dim * H * E, norms=2 * H * E)
    return Recurrent(
        f"retention, {H}/{G} heads of {D} x {E}", heads.weights + gate,
        linear_state(G, D, E), linear_flops(H, G, D, E, decayed=True),
    )  # fmt: skip


def gated_linear(heads: Heads, rank: int = 16) -> Recurrent:
    """Gated linear attention: decays through a bottleneck, an output gate with bias, and one norm for all heads.

    >>> gated_linear(Heads(32, 4, 4, 4, 8), rank=3).weights.total
    4304

    Source: Yang et al. 2023 (arXiv 2312.06635).
    """
    H, G, D, E = _sizes(heads)
    decay = Weights(rank * (heads.dim + G * D), G * D)
    gate = Weights(heads.dim * H * E, H * E, 2 * E)
    return Recurrent(
        f"gated linear attention, {H}/{G} heads of {D} x {E}", heads.weights + decay + gate,
        linear_state(G, D, E), linear_flops(H, G, D, E, decayed=True),
    )  # fmt: skip


def delta_net(heads: Heads) -> Recurrent:
    """DeltaNet: a strength per key/value head, and one norm for all heads.

    >>> delta_net(Heads(32, 4, 4, 8, 8)).weights.total
    4232

    Source: Yang et al. 2024 (arXiv 2406.06484).
    """
    H, G, D, E = _sizes(heads)
    return Recurrent(
        f"delta rule, {H}/{G} heads of {D} x {E}",
        heads.weights + Weights(heads.dim * G, norms=E),
        delta_state(G, D, E), delta_flops(H, G, D, E),
    )  # fmt: skip


def gated_delta_net(heads: Heads) -> Recurrent:
    """Gated DeltaNet: strength and decay per key/value head, an output gate, and one norm for all heads.

    >>> gated_delta_net(Heads(32, 4, 4, 8, 8)).weights.total
    5392

    Source: Yang et al. 2024 (arXiv 2412.06464).
    """
    H, G, D, E = _sizes(heads)
    gates = Weights(2 * heads.dim * G + heads.dim * H * E, 2 * G, E)
    return Recurrent(
        f"gated delta rule, {H}/{G} heads of {D} x {E}", heads.weights + gates,
        delta_state(G, D, E), delta_flops(H, G, D, E, gated=True),
    )  # fmt: skip


def _sizes(heads: Heads) -> tuple[int, int, int, int]:
    return heads.heads, heads.groups, heads.head_dim, heads.value_dim
