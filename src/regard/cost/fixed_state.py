"""Count what mechanisms with a state of fixed size store and compute, exactly, for one token of the
recurrent form; the chunked form has more FLOPs, which run faster.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, field

from regard.cost.softmax import attention_flops, causal_pairs
from regard.cost.spec import (
    NO_QUANTITY,
    CacheContents,
    HeadShape,
    ParameterCounts,
    Quantity,
    Spec,
    SteadySpec,
)
from regard.units import plural


def linear_state(
    groups: int, D: int, E: int, *, normalized: bool = False, value_heads: int | None = None
) -> int:
    """Return the number of values of the state, which does not depend on the length: D E for the
    matrix S of each value head (of each key/value head if `value_heads` is None), and D for a
    normalizer z of each key head. Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equations
    18 and 19.
    """
    states = groups if value_heads is None else value_heads
    return states * D * E + (groups * D if normalized else 0)


def linear_flops(
    heads: int,
    groups: int,
    D: int,
    E: int,
    *,
    normalized: bool = False,
    decayed: bool = False,
    value_heads: int | None = None,
) -> int:
    """Return the FLOPs of one token in the recurrent form: a read S^T q is 2 D E, a write 2 D E, a
    decay D E, reading a normalizer 2 D + E, writing it D; feature maps are not counted. N value
    heads make N writes and max(H, N) reads. Source: arXiv 2006.16236, section 3.4; decay: arXiv
    2307.08621, equation 6.
    """
    read = 2 * D * E + (2 * D + E if normalized else 0)
    write = 2 * D * E + (D * E if decayed else 0)
    states = groups if value_heads is None else value_heads
    return max(heads, states) * read + states * write + (groups * D if normalized else 0)


def matrix_state(shape: HeadShape) -> Quantity:
    """Return the number of values of the state S, which does not depend on the length: D E per
    value head. Source: Yang et al. 2024 (arXiv 2406.06484), section 2.2.
    """
    N, D, E = shape.states, shape.head_dim, shape.value_dim
    return Quantity(N * D * E, f"{shape.states_letter} D E = {N} x {D} x {E}")


def delta_flops(heads: int, groups: int, D: int, E: int, *, gated: bool = False) -> int:
    """Return the FLOPs of one token: a read S^T q is 2 D E; a correction is S^T k (2 D E), u = beta
    (v - S^T k) (2 E) and k u^T (2 D E); a decay is D E. Source: arXiv 2406.06484, equation 2; arXiv
    2412.06464, equation 10.
    """
    return heads * 2 * D * E + groups * (4 * D * E + 2 * E + (D * E if gated else 0))


@dataclass(frozen=True)
class ShortConvolution:
    """A causal convolution of c channels with k taps, one at every `dilation`-th token; its weights
    count as matrices, because a token multiplies each of them once.
    """

    channels: int = 0
    kernel: int = 1
    dilation: int = 1

    @property
    def past(self) -> int:
        """The number of cached values: the inputs of every channel that the taps still reach."""
        return self.channels * (self.kernel - 1) * self.dilation


@dataclass(frozen=True)
class RecurrentSpec(SteadySpec):
    """A mechanism with a state of fixed size and the same FLOPs for each token."""

    shape: HeadShape
    mechanism: str = ""
    convolution: ShortConvolution = field(default=ShortConvolution(), kw_only=True)

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads."""
        H, G, D, E = self._sizes
        N = self.shape.states
        return f"{self.mechanism}, {H}/{G}{f'/{N}' * (N != G)} heads of {D} x {E}"

    @property
    @abstractmethod
    def _own_state(self) -> Quantity:
        """The number of values of the state without the past inputs of a convolution."""

    @property
    def state(self) -> Quantity:
        """The number of values of the state, and of a convolution's past inputs."""
        own, c, k = self._own_state, self.convolution.channels, self.convolution.kernel
        if not (past := self.convolution.past):
            return own
        formulas = filter(None, (own.formula, f"c (k - 1) = {c} x {k - 1}"))
        return Quantity(own.value + past, " + ".join(formulas))

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        """H, G, the number of rows of the state, which is D or in `LinearSpec` F, and E."""
        return self.shape.sizes

    @property
    def query_heads(self) -> int:
        """The number of heads of the result."""
        return self.shape.outputs

    def cache_shares(self, cards: int) -> int:
        """Return into how many parts cards divide the state: at most one for each value head."""
        return min(cards, self.shape.states)


@dataclass(frozen=True)
class LinearSpec(RecurrentSpec):
    """Linear attention with F features (D by default), with or without normalizer and decay."""

    mechanism: str = "linear attention"
    normalized: bool = False
    decayed: bool = False
    features: int | None = None

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        H, G, D, E = super()._sizes
        return H, G, D if self.features is None else self.features, E

    @property
    def _letter(self) -> str:
        """The letter of the number of rows of the state: D, or F with more features."""
        return "D" if self.features is None else "F"

    @property
    def _own_state(self) -> Quantity:
        """The number of values of the state matrices, and of the normalizer if there is one."""
        (_, G, D, E), N, d = self._sizes, self.shape.states, self._letter
        value = linear_state(G, D, E, normalized=self.normalized, value_heads=N)
        if self.normalized and N != G:
            return Quantity(value, f"N {d} E + G {d} = {N} x {D} x {E} + {G} x {D}")
        each = f"({E} + 1)" if self.normalized else f"{E}"
        letters = f"{self.shape.states_letter} {d} {'(E + 1)' if self.normalized else 'E'}"
        return Quantity(value, f"{letters} = {N} x {D} x {each}")

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of a read per query head and a write per key/value head."""
        (H, G, D, E), N, d = self._sizes, self.shape.states, self._letter
        flops = linear_flops(
            H, G, D, E, normalized=self.normalized, decayed=self.decayed, value_heads=N
        )
        read = f"2 {d} E + 2 {d} + E" if self.normalized else f"2 {d} E"
        write = f"3 {d} E" if self.decayed else f"2 {d} E"
        writes = f"{N} x ({write}{f' + {d}' * (self.normalized and N == G)})"
        writes += f" + {G} x {d}" * (self.normalized and N != G)
        return Quantity(flops, f"{self.shape.outputs} x ({read}) + {writes}, {d} = {D}, E = {E}")


@dataclass(frozen=True)
class DeltaSpec(RecurrentSpec):
    """The delta rule, with or without a decay of the state."""

    mechanism: str = "delta rule"
    gated: bool = False

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads."""
        plain = self.mechanism == "delta rule"
        return f"gated {super().name}" if self.gated and plain else super().name

    @property
    def _own_state(self) -> Quantity:
        """The number of values of the state matrices of all key/value heads."""
        return matrix_state(self.shape)

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of one read per query head and one correction per key/value head."""
        (_, _, D, E), O, N = self._sizes, self.shape.outputs, self.shape.states
        decay = " + D E" if self.gated else ""
        formula = f"{O} x 2 D E + {N} x (4 D E + 2 E{decay}), D = {D}, E = {E}"
        return Quantity(delta_flops(O, N, D, E, gated=self.gated), formula)


@dataclass(frozen=True)
class CountedSpec(RecurrentSpec):
    """A recurrence whose state (without a convolution's) and FLOPs per token were counted."""

    values: Quantity = NO_QUANTITY
    work: Quantity = NO_QUANTITY

    @property
    def _own_state(self) -> Quantity:
        """The number of values of the state that was counted."""
        return self.values

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of one token."""
        return self.work


@dataclass(frozen=True)
class ConvolutionSpec(RecurrentSpec):
    """A short convolution between two gates, which keeps nothing but the last few tokens."""

    @property
    def name(self) -> str:
        """The name of the mechanism, with its sizes."""
        c, k = self.convolution.channels, self.convolution.kernel
        return f"short convolution, {plural(c, 'channel')} over {plural(k, 'token')}"

    @property
    def _own_state(self) -> Quantity:
        """Nothing: only the past tokens that the filters reach are kept."""
        return NO_QUANTITY

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of the two gates; the filters count as a matrix."""
        return Quantity(2 * self.convolution.channels, f"2 c = 2 x {self.convolution.channels}")


def linear_attention(dim: int, shape: HeadShape) -> LinearSpec:
    """Return the spec of linear attention with the feature map elu + 1 and a normalizer. Source:
    Katharopoulos et al. 2020 (arXiv 2006.16236).
    """
    return LinearSpec(shape.maps(dim), (), shape, normalized=True)


def retention(dim: int, shape: HeadShape) -> LinearSpec:
    """Return the spec of retention, with an output gate and a norm with weight and bias per head.
    Source: Sun et al. 2023 (arXiv 2307.08621).
    """
    gates = shape.outputs * shape.value_dim
    weights = shape.maps(dim) + ParameterCounts(dim * gates, norms=2 * gates)
    return LinearSpec(weights, (), shape, "retention", decayed=True)


def gated_linear(dim: int, shape: HeadShape, rank: int = 16) -> LinearSpec:
    """Return the spec of gated linear attention: decays computed through a bottleneck of size
    `rank`, an output gate with bias, and one norm that all heads share. Source: Yang et al. 2023
    (arXiv 2312.06635).
    """
    decays, gates = shape.states * shape.head_dim, shape.outputs * shape.value_dim
    decay = ParameterCounts(rank * (dim + decays), decays)
    gate = ParameterCounts(dim * gates, gates, 2 * shape.value_dim)
    weights = shape.maps(dim) + decay + gate
    return LinearSpec(weights, (), shape, "gated linear attention", decayed=True)


def delta_net(dim: int, shape: HeadShape) -> DeltaSpec:
    """Return the spec of DeltaNet, with one beta per key/value head and one norm that all heads
    share. Source: Yang et al. 2024 (arXiv 2406.06484).
    """
    weights = shape.maps(dim) + ParameterCounts(dim * shape.states, norms=shape.value_dim)
    return DeltaSpec(weights, (), shape)


def infini_state(groups: int, D: int, E: int, layers: int = 1) -> int:
    """Return the number of values in the compressive memory M and z, D (E + 1) per key/value head.

    Args:
        groups: G, the number of key/value heads.
        D: the width of a key head.
        E: the width of a value head.
        layers: the number of layers.

    Returns:
        The number of values of all layers.

    >>> infini_state(groups=8, D=128, E=128, layers=12)  # the paper's model: "1.6M (114x)"
    1585152

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), tables 1 and 2.
    """
    return layers * groups * D * (E + 1)


def infini_flops(
    heads: int, groups: int, local_keys: int, D: int, E: int, *, delta: bool = False
) -> int:
    """Return the FLOPs of one token after its projections: local softmax attention, one memory read
    per query head, and one memory write per key/value head.

    A read computes sigma(q) M and sigma(q) z: 2 D (E + 1); a write adds sigma(k)^T v and sigma(k):
    2 D E + D. Under the delta rule, every key reads the memory too.

    Args:
        heads: H, the number of query heads.
        groups: G, the number of key/value heads.
        local_keys: the number of keys of the local segment that the token attends to.
        D: the width of a key head.
        E: the width of a value head.
        delta: whether the memory is updated by the delta rule.

    Returns:
        The number of FLOPs of one layer.

    >>> infini_flops(heads=2, groups=1, local_keys=10, D=4, E=4)
    436

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), equations 4 to 9.
    """
    read, write = 2 * D * (E + 1), 2 * D * E + D
    reads = heads + (groups if delta else 0)
    return attention_flops(heads * local_keys, D, E) + reads * read + groups * write


def segment_cache(groups: int, D: int, E: int, tokens: int, layers: int = 1) -> int:
    """Return the number of cached key and value elements of `tokens` earlier tokens, as
    Transformer-XL caches them: (D + E) G N l. Source: Dai et al. 2019 (arXiv 1901.02860); the
    comparison: arXiv 2404.07143, tables 1 and 2.
    """
    return layers * groups * (D + E) * tokens


def memorizing_cache(groups: int, D: int, E: int, tokens: int, memory: int, layers: int = 1) -> int:
    """Return `segment_cache` plus the keys and values of a large memory in one layer, as the
    Memorizing Transformer caches them. Source: Wu et al. 2022 (arXiv 2203.08913); the comparison:
    arXiv 2404.07143, tables 1 and 2.
    """
    return segment_cache(groups, D, E, tokens, layers) + segment_cache(groups, D, E, memory)


def memory_token_values(dim: int, tokens: int, layers: int = 1) -> int:
    """Return the number of values of the memory tokens that RMT reads and writes in each layer: 2 M
    p l. Source: Bulatov et al. 2022 (arXiv 2207.06881); the comparison: arXiv 2404.07143, tables 1
    and 2.
    """
    return 2 * dim * tokens * layers


@dataclass(frozen=True)
class InfiniSpec(Spec):
    """Infini-attention: softmax attention inside a segment, and a memory of G D (E + 1) values for
    all earlier segments.

    Attributes:
        segment: N, the tokens of a segment; only the open segment is cached token by token.
        delta: whether the memory is updated by the delta rule, which writes only the part of
            a value that the memory does not predict yet.

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), table 2.
    """

    shape: HeadShape
    segment: int
    delta: bool = False

    @classmethod
    def of(
        cls, dim: int, shape: HeadShape, segment: int = 2048, *, delta: bool = False
    ) -> InfiniSpec:
        """Return the spec with the usual four projection matrices and one gate per query head."""
        weights = shape.maps(dim) + ParameterCounts(biases=shape.heads)
        return cls(weights, shape.parts, shape, segment, delta)

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads and its segment length."""
        return f"Infini, {self.shape.label}, segment {self.segment:,}"

    @property
    def bounded(self) -> bool:
        """True: a full segment is moved into the memory, so that the cache stays bounded."""
        return True

    @property
    def state(self) -> Quantity:
        """The number of values of the compressive memory."""
        G, D, E = self.shape.groups, self.shape.head_dim, self.shape.value_dim
        return Quantity(infini_state(G, D, E), f"G D (E + 1) = {G} x {D} x ({E} + 1)")

    def tokens(self, context: int) -> Quantity:
        """Return how many tokens of the open segment are cached; none right after a segment is
        full.
        """
        N = self.segment
        return Quantity(context % N, f"S mod N = {context} mod {N}: the open segment")

    def read(self, context: int) -> CacheContents:
        """Return the part of the cache that the last token reads: the segment up to itself, and the
        memory.
        """
        return CacheContents(self.parts, self._keys_read(context), self.state.value, bounded=True)

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of softmax in the segment, memory reads and a memory write."""
        H, G, D, E = self.shape.sizes
        n, reads = self._keys_read(context), f"({H} + {G})" if self.delta else f"{H}"
        return Quantity(
            infini_flops(H, G, n, D, E, delta=self.delta),
            f"2 H n (D + E) = 2 x {H} x {n} x ({D} + {E}) + {reads} x 2 D (E + 1) (reads) "
            f"+ {G} x (2 D E + D) (writes)",
        )

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of all tokens: pairs in segments, memory reads and writes."""
        H, G, D, E = self.shape.sizes
        whole, rest = divmod(context, self.segment)
        pairs = whole * causal_pairs(self.segment, self.segment) + causal_pairs(rest, rest)
        memory = infini_flops(H, G, 0, D, E, delta=self.delta)
        return attention_flops(H * pairs, D, E) + context * memory

    def _keys_read(self, context: int) -> int:
        """Return how many keys of the segment the last token attends to."""
        return (context - 1) % self.segment + 1
