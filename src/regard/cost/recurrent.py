"""Count what mechanisms with a state of fixed size store and compute: linear attention, retention,
gated linear attention and the delta rule.

The functions take sizes and return exact integers for one token of the recurrent form. A prompt
counts as its tokens one after another. The chunked form, which kernels use for prompts, has more
FLOPs, but as matrix products that run faster.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass

from regard.cost.spec import HeadShape, ParameterCounts, Quantity, Spec


def linear_state(
    groups: int, D: int, E: int, *, normalised: bool = False, value_heads: int | None = None
) -> int:
    """Return the number of values of the state, which does not depend on the length: D E for the
    matrix S of each value head (of each key/value head if `value_heads` is None), and D for a
    normaliser z of each key head.

    >>> linear_state(groups=8, D=64, E=64), linear_state(groups=8, D=64, E=64, normalised=True)
    (32768, 33280)
    >>> linear_state(groups=4, D=64, E=64, normalised=True, value_heads=8)
    33024

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations 18 and 19.
    """
    states = groups if value_heads is None else value_heads
    return states * D * E + (groups * D if normalised else 0)


def linear_flops(
    heads: int,
    groups: int,
    D: int,
    E: int,
    *,
    normalised: bool = False,
    decayed: bool = False,
    value_heads: int | None = None,
) -> int:
    """Return the FLOPs of one token after its projections in the recurrent form: one read per query
    head, and one write per key/value head. With N value heads, there are N writes and max(H, N)
    reads, and one normaliser per key head.

    A read is S^T q: 2 D E. A write computes k v^T and adds it to S: 2 D E. A decay multiplies the
    state: D E. Reading a normaliser is z . q and a division: 2 D + E; writing it is D additions.
    Feature maps are not counted.

    >>> sizes = {"heads": 2, "groups": 1, "D": 4, "E": 4}
    >>> linear_flops(**sizes), linear_flops(**sizes, normalised=True)
    (96, 124)
    >>> linear_flops(**sizes, decayed=True)
    112

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4; decay: Sun et al. 2023 (arXiv
    2307.08621), equation 6.
    """
    read = 2 * D * E + (2 * D + E if normalised else 0)
    write = 2 * D * E + (D * E if decayed else 0)
    states = groups if value_heads is None else value_heads
    return max(heads, states) * read + states * write + (groups * D if normalised else 0)


def delta_state(groups: int, D: int, E: int) -> int:
    """Return the number of values of the state S, which does not depend on the length: D E per
    key/value head.

    >>> delta_state(groups=16, D=128, E=128)
    262144

    Source: Yang et al. 2024 (arXiv 2406.06484), section 2.2.
    """
    return groups * D * E


def delta_flops(heads: int, groups: int, D: int, E: int, *, gated: bool = False) -> int:
    """Return the FLOPs of one token after its projections in the recurrent form: one read per query
    head, and one correction per key/value head.

    A read is S^T q: 2 D E. A correction computes S^T k (2 D E) and u = beta (v - S^T k) (2 E), and
    adds k u^T to S (2 D E). A decay multiplies the state: D E.

    >>> sizes = {"heads": 2, "groups": 1, "D": 4, "E": 4}
    >>> delta_flops(**sizes), delta_flops(**sizes, gated=True)
    (136, 152)

    Source: Yang et al. 2024 (arXiv 2406.06484), equation 2; with decay: arXiv 2412.06464, equation
    10.
    """
    return heads * 2 * D * E + groups * (4 * D * E + 2 * E + (D * E if gated else 0))


@dataclass(frozen=True)
class RecurrentSpec(Spec):
    """A mechanism with a state of fixed size and the same FLOPs for each token.

    Attributes:
        shape: H, G, D and E, and N if there are more value heads than key heads.
    """

    shape: HeadShape

    @property
    def bounded(self) -> bool:
        """True, because no keys and values are cached."""
        return True

    @abstractmethod
    def token(self) -> Quantity:
        """Return the FLOPs of one token, which do not depend on the context."""

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of one token, without linear maps."""
        return self.token()

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of `context` steps, one for each token."""
        return context * self.token().value

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        return self.shape.heads, self.shape.groups, self.shape.head_dim, self.shape.value_dim

    @property
    def _states(self) -> str:
        """The letter and the formula of the number of states: G, or N with more value heads."""
        return "G" if self.shape.states == self.shape.groups else "N"

    def _label(self, mechanism: str) -> str:
        H, G, D, E = self._sizes
        heads = f"{H}/{G}" if self._states == "G" else f"{H}/{G}/{self.shape.states}"
        return f"{mechanism}, {heads} heads of {D} x {E}"


@dataclass(frozen=True)
class LinearSpec(RecurrentSpec):
    """Linear attention, with or without a normaliser, and with or without a decay of the state.

    Attributes:
        mechanism: the name of the mechanism.
        normalised: whether the state has a normaliser.
        decayed: whether each token decays the state.

    >>> layer = linear_attention(32, HeadShape(4, 2, 8, 8))
    >>> layer.state.value, layer.cached(10) == layer.cached(10**6), layer.weights.total
    (144, True, 3072)
    """

    mechanism: str = "linear attention"
    normalised: bool = False
    decayed: bool = False

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads."""
        return self._label(self.mechanism)

    @property
    def state(self) -> Quantity:
        """The number of values of the state matrices, and of the normaliser if there is one."""
        (_, G, D, E), N = self._sizes, self.shape.states
        value = linear_state(G, D, E, normalised=self.normalised, value_heads=N)
        if self.normalised and N != G:
            return Quantity(value, f"N D E + G D = {N} x {D} x {E} + {G} x {D}")
        each = f"({E} + 1)" if self.normalised else f"{E}"
        letters = f"{self._states} D {'(E + 1)' if self.normalised else 'E'}"
        return Quantity(value, f"{letters} = {N} x {D} x {each}")

    def token(self) -> Quantity:
        """Return the FLOPs of one read per query head and one write per key/value head, without
        feature maps.
        """
        (H, G, D, E), N = self._sizes, self.shape.states
        flops = linear_flops(
            H, G, D, E, normalised=self.normalised, decayed=self.decayed, value_heads=N
        )
        read = "2 D E + 2 D + E" if self.normalised else "2 D E"
        write = "3 D E" if self.decayed else "2 D E"
        writes = f"{N} x ({write}{' + D' * (self.normalised and N == G)})"
        writes += f" + {G} x D" * (self.normalised and N != G)
        return Quantity(flops, f"{self.shape.outputs} x ({read}) + {writes}, D = {D}, E = {E}")


@dataclass(frozen=True)
class DeltaSpec(RecurrentSpec):
    """The delta rule, with or without a decay of the state.

    Attributes:
        gated: whether each token decays the state.
    """

    gated: bool = False

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads."""
        return self._label("gated delta rule" if self.gated else "delta rule")

    @property
    def state(self) -> Quantity:
        """The number of values of the state matrices of all key/value heads."""
        (_, _, D, E), N = self._sizes, self.shape.states
        return Quantity(delta_state(N, D, E), f"{self._states} D E = {N} x {D} x {E}")

    def token(self) -> Quantity:
        """Return the FLOPs of one read per query head and one correction per key/value head."""
        (_, _, D, E), O, N = self._sizes, self.shape.outputs, self.shape.states
        decay = " + D E" if self.gated else ""
        formula = f"{O} x 2 D E + {N} x (4 D E + 2 E{decay}), D = {D}, E = {E}"
        return Quantity(delta_flops(O, N, D, E, gated=self.gated), formula)


def linear_attention(dim: int, shape: HeadShape) -> LinearSpec:
    """Return the spec of linear attention with the feature map elu + 1 and a normaliser.

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236).
    """
    return LinearSpec(shape.maps(dim), (), shape, normalised=True)


def retention(dim: int, shape: HeadShape) -> LinearSpec:
    """Return the spec of retention, with an output gate and a norm with weight and bias per head.

    >>> retention(32, HeadShape(4, 4, 8, 16)).state.value
    512

    Source: Sun et al. 2023 (arXiv 2307.08621).
    """
    gates = shape.outputs * shape.value_dim
    weights = shape.maps(dim) + ParameterCounts(dim * gates, norms=2 * gates)
    return LinearSpec(weights, (), shape, "retention", decayed=True)


def gated_linear(dim: int, shape: HeadShape, rank: int = 16) -> LinearSpec:
    """Return the spec of gated linear attention: decays computed through a bottleneck of size
    `rank`, an output gate with bias, and one norm that all heads share.

    >>> gated_linear(32, HeadShape(4, 4, 4, 8), rank=3).weights.total
    4304

    Source: Yang et al. 2023 (arXiv 2312.06635).
    """
    decays, gates = shape.states * shape.head_dim, shape.outputs * shape.value_dim
    decay = ParameterCounts(rank * (dim + decays), decays)
    gate = ParameterCounts(dim * gates, gates, 2 * shape.value_dim)
    weights = shape.maps(dim) + decay + gate
    return LinearSpec(weights, (), shape, "gated linear attention", decayed=True)


def delta_net(dim: int, shape: HeadShape) -> DeltaSpec:
    """Return the spec of DeltaNet, with one beta per key/value head and one norm that all heads
    share.

    >>> delta_net(32, HeadShape(4, 4, 8, 8)).weights.total
    4232

    Source: Yang et al. 2024 (arXiv 2406.06484).
    """
    weights = shape.maps(dim) + ParameterCounts(dim * shape.states, norms=shape.value_dim)
    return DeltaSpec(weights, (), shape)


def gated_delta_net(dim: int, shape: HeadShape) -> DeltaSpec:
    """Return the spec of Gated DeltaNet, with one beta and one decay per key/value head, an output
    gate, and one norm that all heads share.

    >>> gated_delta_net(32, HeadShape(4, 4, 8, 8)).weights.total
    5392

    Source: Yang et al. 2024 (arXiv 2412.06464).
    """
    gates = dim * (2 * shape.states + shape.outputs * shape.value_dim)
    weights = shape.maps(dim) + ParameterCounts(gates, 2 * shape.states, shape.value_dim)
    return DeltaSpec(weights, (), shape, gated=True)
