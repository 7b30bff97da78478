"""Count softmax attention: FLOPs and bytes of kernels, specs of MHA, GQA, MQA and
cross-attention.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from regard.cost.spec import CacheContents, HeadShape, ParameterCounts, Quantity, Spec
from regard.language import Phrase
from regard.units import plural


def attention_flops(pairs: int, D: int, E: int) -> int:
    """Return the FLOPs of scores and weighted sums for a number of query-key pairs.

    2 pairs D for q k^T and 2 pairs E for p v, without the softmax, as is usual.

    Args:
        pairs: the number of query-key pairs, over all batch rows and query heads.
        D: the width of a query and key head.
        E: the width of a value head.

    Returns:
        The number of FLOPs.

    >>> attention_flops(pairs=8 * 1024 * 1024, D=64, E=64)  # 8 heads, 1024 tokens, every pair
    2147483648

    Source: Dao 2023 (arXiv 2307.08691), section 4.1, for D = E.
    """
    return 2 * pairs * D + 2 * pairs * E


def training_flops(pairs: int, D: int, E: int) -> int:
    """Return the FLOPs of attention and its gradient, which computes the scores again: n (8 D + 6
    E) for n pairs. Source: Dao 2023 (arXiv 2307.08691), section 4.1: a backward pass is 2.5 times
    the forward.
    """
    return pairs * (8 * D + 6 * E)


def additive_flops(pairs: int, A: int, E: int) -> int:
    """Return the FLOPs of additive scores and of the weighted sum: A additions, 2 A and 2 E a pair,
    without tanh and softmax. Source: Bahdanau et al. 2015 (arXiv 1409.0473), appendix A.1.2.
    """
    return pairs * (3 * A + 2 * E)


def attention_bytes(
    *, B: int, H: int, G: int, T: int, S: int, D: int, E: int, itemsize: int
) -> int:
    """Return the bytes of q, k, v and out, moved once: itemsize B (T H + S G) (D + E)."""
    return itemsize * B * (T * H + S * G) * (D + E)


def training_bytes(*, B: int, H: int, G: int, T: int, S: int, D: int, E: int, itemsize: int) -> int:
    """Return the bytes with the gradient: q, k, v, out twice, and as many for dO, dq, dk, dv."""
    return 3 * attention_bytes(B=B, H=H, G=G, T=T, S=S, D=D, E=E, itemsize=itemsize)


def causal_pairs(queries: int, keys: int) -> int:
    """Return the causal pairs of the last T of S tokens: T S - T (T - 1) / 2, T at most S."""
    return queries * keys - queries * (queries - 1) // 2


def window_pairs(queries: int, keys: int, window: int) -> int:
    """Return the query-key pairs of the last T of S tokens under a causal window of W: the sum of
    min(W, i + 1), for T at most S.
    """
    first = keys - queries + 1  # keys that the first query attends to without the window
    short = max(0, min(queries, window - first))  # queries that attend to fewer than W keys
    return short * first + short * (short - 1) // 2 + (queries - short) * window


class VisibleKeys(Protocol):
    """The protocol of a mask whose cost is counted: how many keys each query may attend to."""

    @property
    def max_tokens(self) -> int | None:
        """The maximum number of tokens that a cache must store; None if it must store all."""

    def visible_keys(self, context: int) -> int:
        """Return how many keys the token at position context - 1 attends to."""

    def pairs(self, context: int) -> int:
        """Return the query-key pairs of one head over the first `context` tokens."""


@dataclass(frozen=True)
class CausalKeys:
    """The visible keys under a causal mask, with a window of W keys, the query's own included, in
    chunks of W tokens if `chunked`; or under no mask.
    """

    window: int | None = None
    causal: bool = True
    chunked: bool = False

    @property
    def max_tokens(self) -> int | None:
        """The window, beyond which tokens need not be cached."""
        return self.window

    def visible_keys(self, context: int) -> int:
        """Return the number of visible keys: all keys, the last W, or those of the chunk."""
        if self.chunked and self.window is not None:
            return (context - 1) % self.window + 1
        return context if self.window is None else min(context, self.window)

    def pairs(self, context: int) -> int:
        """Return the pairs of the whole square, of its lower triangle, of a band, or of chunks."""
        if self.chunked and self.window is not None:
            whole, rest = divmod(context, self.window)
            return whole * causal_pairs(self.window, self.window) + causal_pairs(rest, rest)
        if not self.causal:
            return context * context
        if self.window is None:
            return causal_pairs(context, context)
        return window_pairs(context, context, self.window)


@dataclass(frozen=True)
class NearbyKeys:
    """The visible keys of an encoder's layer: those up to some distance on both sides, or all."""

    distance: int | None = None

    @property
    def max_tokens(self) -> int | None:
        """The keys of a query that has w keys on each side: 2 w + 1."""
        return None if self.distance is None else 2 * self.distance + 1

    def visible_keys(self, context: int) -> int:
        """Return the number of keys of the last token, behind which there are none."""
        return context if self.distance is None else min(context, self.distance + 1)

    def pairs(self, context: int) -> int:
        """Return the pairs of the whole square, or of a band on both sides of its diagonal."""
        if self.distance is None:
            return context * context
        return 2 * window_pairs(context, context, self.distance + 1) - context


ALL_EARLIER_KEYS = CausalKeys()
"""A causal mask without a window."""


@dataclass(frozen=True)
class SoftmaxSpec(Spec):
    """Softmax attention of H query heads and G key/value heads: MHA, GQA and MQA, under any mask.

    The matrices have M H D + M G (D + E) + H E M values. A cache stores G (D + E) values per token,
    of the last W tokens if there is a window. A token that attends to n keys takes 2 H n (D + E)
    FLOPs.

    Source: Vaswani et al. 2017 (arXiv 1706.03762); groups: Ainslie et al. 2023 (arXiv 2305.13245).
    """

    shape: HeadShape
    visible: VisibleKeys = ALL_EARLIER_KEYS

    @classmethod
    def of(
        cls,
        dim: int,
        shape: HeadShape,
        *,
        bias: bool = False,
        output_bias: bool = False,
        norms: int = 0,
        extra: int = 0,
        window: int | None = None,
        causal: bool = True,
    ) -> SoftmaxSpec:
        """Return the spec with the usual four projection matrices."""
        H, G, D, E = shape.heads, shape.groups, shape.head_dim, shape.value_dim
        biases = (H * D + G * (D + E) if bias else 0) + (dim if output_bias else 0)
        weights = shape.maps(dim) + ParameterCounts(biases=biases + extra, norms=norms)
        return cls(weights, shape.parts if causal else (), shape, CausalKeys(window, causal))

    @property
    def query_heads(self) -> int:
        """The number of query heads H."""
        return self.shape.heads

    @property
    def window(self) -> int | None:
        """The maximum number of tokens that a cache stores; None if there is no limit."""
        return self.visible.max_tokens

    @property
    def name(self) -> str:
        """MHA, GQA or MQA, with the heads and the window."""
        label = self.shape.label
        if self.window is None:
            return label
        chunked = isinstance(self.visible, CausalKeys) and self.visible.chunked
        return Phrase(
            "{label}, chunks of {window:,}" if chunked else "{label}, window {window:,}",
            label=label,
            window=self.window,
        )

    @property
    def bounded(self) -> bool:
        """Whether there is a window, beyond which tokens are dropped."""
        return self.window is not None

    def tokens(self, context: int) -> Quantity:
        """Return how many tokens are cached: all tokens, or the last W."""
        if self.window is None:
            return super().tokens(context)
        return Quantity(min(context, self.window), f"min(S, {self.window})")

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of attention from one query."""
        (H, _, D, E), n = self.shape.sizes, self.visible_keys(context)
        formula = f"2 H n (D + E) = 2 x {H} x {n} x ({D} + {E})"
        return Quantity(attention_flops(H * n, D, E), formula)

    def visible_keys(self, context: int) -> int:
        """Return how many keys the token at position context - 1 attends to."""
        return self.visible.visible_keys(context)

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of attention over all pairs that the mask allows."""
        pairs = self.shape.heads * self.visible.pairs(context)
        return attention_flops(pairs, self.shape.head_dim, self.shape.value_dim)


@dataclass(frozen=True)
class SharedKeysSpec(SoftmaxSpec):
    """Softmax attention to the keys and values of an earlier layer, which that layer caches.
    Source: Brandon et al. 2024 (arXiv 2405.12981); Gemma 3n.
    """

    @property
    def name(self) -> str:
        """The heads and the window, and that the keys are those of another layer."""
        return f"{super().name}, keys of an earlier layer"

    @property
    def values_per_token(self) -> Quantity:
        """Zero, because the earlier layer caches the keys and values."""
        return Quantity(0, "cached by an earlier layer")

    def cached(self, context: int) -> CacheContents:
        """Return an empty cache, because the earlier layer has the keys and values."""
        return CacheContents()

    def read(self, context: int) -> CacheContents:
        """Return the keys and values of the earlier layer."""
        return CacheContents(self.shape.parts, self.tokens(context).value)


@dataclass(frozen=True)
class CrossSpec(Spec):
    """Softmax attention to the keys and values of another sequence, whose matrices are
    `counted_separately`, as a decoded token does not use them. Source: Vaswani et al. 2017 (arXiv
    1706.03762), section 3.2.3.
    """

    shape: HeadShape

    _maps = "matrices of the query"

    @classmethod
    def of(cls, dim: int, shape: HeadShape) -> CrossSpec:
        """Return the spec with the usual four projection matrices."""
        return cls(
            shape.maps(dim) + ParameterCounts(counted_separately=shape.key_maps(dim)),
            shape.parts,
            shape,
        )

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads."""
        return f"cross-attention, {self.shape.label}"

    def tokens(self, context: int) -> Quantity:
        """Return the number of tokens of the source, which is as long as the context."""
        return Quantity(context, "S, the length of the source")

    def cached(self, context: int) -> CacheContents:
        """Return the cached keys and values of the source sequence."""
        return CacheContents(self.parts, context, bounded=True, from_source=True)

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of attention from one query to the whole source."""
        H, D, E = self.shape.heads, self.shape.head_dim, self.shape.value_dim
        flops = attention_flops(H * context, D, E)
        return Quantity(flops, f"2 H S (D + E) = 2 x {H} x {context} x ({D} + {E})")

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of computing the keys and values of the source."""
        return 2 * context * self.weights.counted_separately


@dataclass(frozen=True)
class AdditiveSpec(CrossSpec):
    """Additive attention from a decoder's state to the states of an encoder; D is A, the hidden
    width of the score network. Source: Bahdanau et al. 2015 (arXiv 1409.0473), appendix A.1.2.
    """

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads and its score width."""
        return f"additive, {plural(self.shape.heads, 'head')} of {self.shape.head_dim}"

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of attention from one query to all states of the encoder."""
        H, A, E = self.shape.heads, self.shape.head_dim, self.shape.value_dim
        formula = f"H S (3 A + 2 E) = {H} x {context} x (3 x {A} + 2 x {E})"
        return Quantity(additive_flops(H * context, A, E), formula)
