"""Count what Infini-attention stores and computes, and what the mechanisms that its paper compares
it with store.

The functions take sizes and return exact integers; `InfiniSpec` combines them for one layer.
"""

from __future__ import annotations

from dataclasses import dataclass

from regard.cost.softmax import attention_flops, causal_pairs
from regard.cost.spec import CacheContents, HeadShape, ParameterCounts, Quantity, Spec
from regard.deprecation import renamed_parameters


def infini_state(groups: int, D: int, E: int, layers: int = 1) -> int:
    """Return the number of values in the compressive memory, M and z, which does not depend on the
    length: D (E + 1) per key/value head and layer.

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


@renamed_parameters(seen="local_keys")
def infini_flops(
    heads: int, groups: int, local_keys: int, D: int, E: int, *, delta: bool = False
) -> int:
    """Return the FLOPs of one token after its projections: local softmax attention over
    `local_keys` keys, one memory read per query head, and one memory write per key/value head.

    A read computes sigma(q) M and sigma(q) z: 2 D (E + 1). A write adds sigma(k)^T v to M and
    sigma(k) to z: 2 D E + D. Under the delta rule, every key reads the memory too.

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
    Transformer-XL caches them: (D + E) G N l.

    >>> segment_cache(8, 128, 128, 2048, 12)  # the paper: "50M (3.7x)"
    50331648

    Source: Dai et al. 2019 (arXiv 1901.02860); the comparison: arXiv 2404.07143, tables 1 and 2.
    """
    return layers * groups * (D + E) * tokens


def memorizing_cache(groups: int, D: int, E: int, tokens: int, memory: int, layers: int = 1) -> int:
    """Return `segment_cache` plus the keys and values of a large memory in one layer, as the
    Memorizing Transformer caches them.

    >>> memorizing_cache(8, 128, 128, 2048, 65000, 12)  # the paper: "183M", where 65K means 65,000
    183451648

    Source: Wu et al. 2022 (arXiv 2203.08913); the comparison: arXiv 2404.07143, tables 1 and 2.
    """
    return segment_cache(groups, D, E, tokens, layers) + segment_cache(groups, D, E, memory)


def memory_token_values(dim: int, tokens: int, layers: int = 1) -> int:
    """Return the number of values of the memory tokens that RMT reads and writes in each layer: 2 M
    p l.

    >>> memory_token_values(1024, 100, 12)  # the paper: "2.5M (73x)"
    2457600

    Source: Bulatov et al. 2022 (arXiv 2207.06881); the comparison: arXiv 2404.07143, tables 1 and
    2.
    """
    return 2 * dim * tokens * layers


@dataclass(frozen=True)
class InfiniSpec(Spec):
    """Infini-attention: softmax attention inside a segment, and a memory of G D (E + 1) values for
    all earlier segments.

    Attributes:
        shape: H, G, D and E.
        segment: N, the tokens of a segment; only the open segment is cached token by token.
        delta: whether the memory is updated by the delta rule, which writes only the part of
            a value that the memory does not predict yet.

    >>> layer = InfiniSpec.of(1024, HeadShape(8, 8, 128, 128), segment=2048)
    >>> 12 * layer.state.value  # the paper's model: "1.6M (114x)"
    1585152

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), table 2.
    """

    shape: HeadShape
    segment: int
    delta: bool = False

    @classmethod
    def of(cls, dim: int, shape: HeadShape, segment: int, *, delta: bool = False) -> InfiniSpec:
        """Return the spec with the usual four projection matrices and one gate per query head."""
        weights = shape.maps(dim) + ParameterCounts(biases=shape.heads)
        return cls(weights, shape.parts, shape, segment, delta)

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads and its segment length."""
        return f"Infini, {self.shape.label}, segment {self.segment:,}"

    @property
    def bounded(self) -> bool:
        """True: a full segment is moved into the memory, so the cache does not grow without
        bound.
        """
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
        """Return the FLOPs of softmax attention inside the segment, memory reads and a memory
        write.
        """
        H, G, D, E = self._sizes
        n, reads = self._keys_read(context), f"({H} + {G})" if self.delta else f"{H}"
        return Quantity(
            infini_flops(H, G, n, D, E, delta=self.delta),
            f"2 H n (D + E) = 2 x {H} x {n} x ({D} + {E}) + {reads} x 2 D (E + 1) (reads) "
            f"+ {G} x (2 D E + D) (writes)",
        )

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of all tokens: pairs inside the segments, and memory reads and
        writes.
        """
        H, G, D, E = self._sizes
        whole, rest = divmod(context, self.segment)
        pairs = whole * causal_pairs(self.segment, self.segment) + causal_pairs(rest, rest)
        memory = infini_flops(H, G, 0, D, E, delta=self.delta)
        return attention_flops(H * pairs, D, E) + context * memory

    def _keys_read(self, context: int) -> int:
        """Return how many keys of the segment the last token attends to."""
        return (context - 1) % self.segment + 1

    @property
    def _sizes(self) -> tuple[int, int, int, int]:
        return self.shape.heads, self.shape.groups, self.shape.head_dim, self.shape.value_dim
