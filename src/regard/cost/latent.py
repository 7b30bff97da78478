"""Count what latent attention (MLA) caches and computes in the forms "expand" and "absorb"."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal, TypeAlias

from regard.cost.selected import IndexSelection, indexer_flops
from regard.cost.softmax import ALL_EARLIER_KEYS, VisibleKeys, attention_flops, causal_pairs
from regard.cost.spec import CacheContents, ParameterCounts, Quantity, Spec
from regard.language import Phrase, counted

Form: TypeAlias = Literal["auto", "expand", "absorb"]
"""How queries attend to the latents: "expand" makes keys and values of them, "absorb" multiplies
queries by the expanding matrices, and "auto" takes the form with fewer FLOPs.
"""


def latent_values(kv_rank: int, rope_dim: int) -> int:
    """Return the values cached per token by MLA: the latent, and the one rotary key that all heads
    share. Source: DeepSeek-AI 2024 (arXiv 2405.04434), table 1.
    """
    return kv_rank + rope_dim


def latent_expansion_flops(keys: int, H: int, kv_rank: int, nope_dim: int, value_dim: int) -> int:
    """Return the FLOPs of expanding S latents to all heads: 2 S r H (d_nope + d_v)."""
    return 2 * keys * kv_rank * H * (nope_dim + value_dim)


def expand_flops(
    queries: int, keys: int, H: int, kv_rank: int, nope_dim: int, rope_dim: int, value_dim: int
) -> int:
    """Return the FLOPs of the form "expand" with n causal pairs: 2 S r H (d_nope + d_v) + 2 H n
    (d_nope + d_rope + d_v).
    """
    return latent_expansion_flops(keys, H, kv_rank, nope_dim, value_dim) + attention_flops(
        H * causal_pairs(queries, keys), nope_dim + rope_dim, value_dim
    )


def absorb_flops(
    queries: int, keys: int, H: int, kv_rank: int, nope_dim: int, rope_dim: int, value_dim: int
) -> int:
    """Return the FLOPs of the form "absorb" with n causal pairs: 2 T H r (d_nope + d_v) + 2 H n (2
    r + d_rope).
    """
    return latent_expansion_flops(queries, H, kv_rank, nope_dim, value_dim) + attention_flops(
        H * causal_pairs(queries, keys), kv_rank + rope_dim, kv_rank
    )


def absorbing_is_cheaper(
    queries: int, keys: int, *, kv_rank: int, nope_dim: int, value_dim: int
) -> bool:
    """Return whether r (d_nope + d_v) (S - T) > n (2 r - d_nope - d_v) for n causal pairs, that is
    absorb_flops < expand_flops: for up to 170 queries at the sizes of DeepSeek-V3.
    """
    saved = kv_rank * (nope_dim + value_dim) * (keys - queries)
    return saved > causal_pairs(queries, keys) * (2 * kv_rank - nope_dim - value_dim)


def latent_weights(
    dim: int,
    heads: int,
    kv_rank: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
    q_rank: int | None,
    *,
    latents: int = 1,
    branches: int = 1,
) -> ParameterCounts:
    """Return the parameters of the usual matrices, and of the norms of all latents; the matrix that
    expands latents is counted separately.
    """
    query = heads * (nope_dim + rope_dim)
    queries = dim * query if q_rank is None else q_rank * (dim + query)
    up = kv_rank * branches * heads * (nope_dim + value_dim)
    matrices = queries + dim * (latents * kv_rank + rope_dim) + up + heads * value_dim * dim
    norms = latents * kv_rank + (q_rank or 0)
    return ParameterCounts(matrices, norms=norms, counted_separately=up)


@dataclass(frozen=True)
class LatentSpec(Spec):
    """Multi-head latent attention (MLA): a cache stores one latent of r values and one rotary key
    per token, which all heads share.

    The matrix that expands latents to keys and values is `counted_separately`: "expand" applies it
    to every cached token, "absorb" applies it to the query and to the result.

    Attributes:
        heads: H.
        kv_rank: r, the size of the latent.
        nope_dim, rope_dim: widths of a query and key head without and with rotary position.
        value_dim: E.

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1.
    """

    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    form: Form = "auto"
    visible: VisibleKeys = ALL_EARLIER_KEYS

    @classmethod
    def of(
        cls,
        dim: int,
        heads: int,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        q_rank: int | None = None,
        *,
        bias: bool = False,
        form: Form = "auto",
    ) -> LatentSpec:
        """Return the spec with the usual matrices and the norms of both latents."""
        sizes = (heads, kv_rank, nope_dim, rope_dim, value_dim)
        weights = latent_weights(dim, *sizes, q_rank)
        if bias:
            weights += ParameterCounts(biases=(q_rank or 0) + kv_rank + rope_dim + dim)
        return cls(weights, ((1, latent_values(kv_rank, rope_dim)),), *sizes, form)

    @property
    def sizes(self) -> tuple[int, int, int, int, int]:
        """H, r, d_nope, d_rope and E."""
        return self.heads, self.kv_rank, self.nope_dim, self.rope_dim, self.value_dim

    @property
    def query_heads(self) -> int:
        """The number of query heads H."""
        return self.heads

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads and the sizes of latent and rotary key."""
        return Phrase(
            "{name} {heads}, latent {rank} + {rope}",
            name="MLA",
            heads=counted(self.heads, "head"),
            rank=self.kv_rank,
            rope=self.rope_dim,
        )

    @property
    def values_per_token(self) -> Quantity:
        """The values of the latent and of the rotary key."""
        numbers = latent_values(self.kv_rank, self.rope_dim)
        return Quantity(numbers, f"r + d_rope = {self.kv_rank} + {self.rope_dim}")

    @property
    def forms(self) -> tuple[str, ...]:
        """The two equivalent forms, "expand" and "absorb"."""
        return ("expand", "absorb")

    @property
    def bounded(self) -> bool:
        """Whether there is a window, beyond which cached tokens are dropped."""
        return self.visible.max_tokens is not None

    def tokens(self, context: int) -> Quantity:
        """Return how many tokens are cached: all tokens, or the last W."""
        bound = self.visible.max_tokens
        if bound is None:
            return super().tokens(context)
        return Quantity(min(context, bound), f"min(S, {bound})")

    def absorbs(self, queries: int, keys: int) -> bool:
        """Return whether `queries` against `keys` are computed in the form "absorb"."""
        if self.form == "auto":
            return absorbing_is_cheaper(
                queries,
                keys,
                kv_rank=self.kv_rank,
                nope_dim=self.nope_dim,
                value_dim=self.value_dim,
            )
        return self.form == "absorb"

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of one token in the form of this spec."""
        return self._step(context, self.form)

    def decode_flops(self, context: int, form: str | None = None) -> int:
        """Return the FLOPs of one token in the form of this spec, or in `form`."""
        return self._step(context, self.form if form is None else form).value

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of all tokens at once, in the form of this spec."""
        return self.flops(context, context, self.form)

    def flops(self, queries: int, keys: int, form: str) -> int:
        """Return the FLOPs of the last `queries` of `keys` tokens under a causal mask, the matrices
        that expand latents included.
        """
        if form == "auto":
            form = "absorb" if self.absorbs(queries, keys) else "expand"
        count = absorb_flops if form == "absorb" else expand_flops
        return count(queries, keys, *self.sizes)

    def _step(self, context: int, form: str) -> Quantity:
        H, r, nope, rope, E = self.sizes
        cached, n = self.tokens(context).value, self.visible.visible_keys(context)
        up = f"2 r H (d_nope + E) = 2 x {r} x {H} x ({nope} + {E})"
        if form == "absorb" or (form == "auto" and self.absorbs(1, cached)):
            flops = latent_expansion_flops(1, H, r, nope, E) + attention_flops(H * n, r + rope, r)
            scores = f"2 H n (2 r + d_rope) = 2 x {H} x {n} x {2 * r + rope}"
            return Quantity(flops, f"{up} (absorption) + {scores}")
        flops = latent_expansion_flops(cached, H, r, nope, E)
        flops += attention_flops(H * n, nope + rope, E)
        scores = f"2 H n (d_nope + d_rope + E) = 2 x {H} x {n} x ({nope + rope} + {E})"
        return Quantity(flops, f"{up} x {cached} (expansion) + {scores}")


def index_parts(selection: IndexSelection) -> tuple[tuple[int, int], ...]:
    """Return the part of a cache for index keys; none if the choice is that of another layer."""
    return ((1, selection.head_dim),) if selection.head_dim else ()


@dataclass(frozen=True)
class IndexedLatentSpec(LatentSpec):
    """DeepSeek sparse attention (DSA) on latents: an indexer of J heads of width d scores all
    earlier tokens, and a query attends to the `topk` latents with the highest scores; with J = 0,
    to those that an earlier layer chose.

    A cache stores one index key per token beside the latent. Attention is computed in the form
    "absorb", because the queries of a prompt select different latents.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2.
    """

    selection: IndexSelection = field(kw_only=True)

    @classmethod
    def from_latent(
        cls, latent: LatentSpec, dim: int, q_rank: int, selection: IndexSelection
    ) -> IndexedLatentSpec:
        """Return the spec of latent attention with an indexer."""
        J, d = selection.heads, selection.head_dim
        indexer = ParameterCounts(q_rank * J * d + dim * d + dim * J, norms=2 * d)
        parts = (*latent.parts, *index_parts(selection))
        weights = latent.weights + indexer
        return cls(weights, parts, *latent.sizes, "absorb", selection=selection)

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads, the sizes of the latent, and the selection."""
        return f"{super().name}, {self.selection.topk:,} selected keys"

    @property
    def values_per_token(self) -> Quantity:
        """The values of the latent, of the rotary key and of the index key."""
        d = self.selection.head_dim
        numbers = latent_values(self.kv_rank, self.rope_dim) + d
        formula = f"r + d_rope + d_index = {self.kv_rank} + {self.rope_dim} + {d}"
        return Quantity(numbers, formula)

    @property
    def forms(self) -> tuple[str, ...]:
        """Empty, because only the form "absorb" is counted."""
        return ()

    def read(self, context: int) -> CacheContents:
        """Return the selected latents, and the index keys of all tokens."""
        latent, *index = self.parts
        read = self.selection.tokens(context).value
        others = tuple(CacheContents((part,), context) for part in index)
        return CacheContents((latent,), read, others=others)

    def decode_flops(self, context: int, form: str | None = None) -> int:
        """Return the FLOPs of one token; there is only one form."""
        return self.step(context).value

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of absorption, attention to selected latents, and index scores."""
        H, r, rope = self.heads, self.kv_rank, self.rope_dim
        read = self.selection.tokens(context).value
        scores = self.selection.flops(context, H, r)
        flops = latent_expansion_flops(1, H, r, self.nope_dim, self.value_dim)
        flops += attention_flops(H * read, r + rope, r) + scores.value
        up = f"2 r H (d_nope + E) = 2 x {r} x {H} x ({self.nope_dim} + {self.value_dim})"
        attention = f"2 H n (2 r + d_rope) = 2 x {H} x {read} x {2 * r + rope}"
        return Quantity(flops, f"{up} (absorption) + {attention} + {scores.formula}")

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of absorption, selected pairs, and index scores of all pairs."""
        H, r, J, d = self.heads, self.kv_rank, self.selection.heads, self.selection.head_dim
        absorption = latent_expansion_flops(context, H, r, self.nope_dim, self.value_dim)
        attention = attention_flops(H * self.selection.pairs(context), r + self.rope_dim, r)
        return absorption + attention + indexer_flops(causal_pairs(context, context), J, d)
