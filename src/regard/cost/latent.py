"""Multi-head latent attention (MLA): what it caches and computes in its two forms, "expand" and
"absorb".

The functions take sizes and return exact integers; `LatentSpec` adds them up for one layer.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from regard.cost.softmax import ALL_EARLIER_KEYS, VisibleKeys, attention_flops, causal_pairs
from regard.cost.spec import ParameterCounts, Quantity, Spec

Form: TypeAlias = Literal["auto", "expand", "absorb"]
"""How queries meet the latents (`regard.nn.Latent`)."""


def latent_values(kv_rank: int, rope_dim: int) -> int:
    """Numbers that one token takes in a cache of latents: the latent, and the one rotary key that
    all heads share.

    >>> latent_values(512, 64)  # DeepSeek-V3
    576

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), table 1.
    """
    return kv_rank + rope_dim


def per_head_values(H: int, nope_dim: int, rope_dim: int, value_dim: int) -> int:
    """Numbers that one token takes where keys and values of every head are kept.

    >>> per_head_values(128, 128, 64, 128)  # DeepSeek-V3
    40960
    """
    return H * (nope_dim + rope_dim + value_dim)


def recall_flops(keys: int, H: int, kv_rank: int, nope_dim: int, value_dim: int) -> int:
    """FLOPs of expanding so many latents to keys and values of all heads: 2 S r H (d_nope + d_v).

    >>> recall_flops(1024, 128, 512, 128, 128)
    34359738368
    """
    return 2 * keys * kv_rank * H * (nope_dim + value_dim)


def expand_flops(
    queries: int, keys: int, H: int, kv_rank: int, nope_dim: int, rope_dim: int, value_dim: int
) -> int:
    """FLOPs of expanding all latents and attending with the last queries under a causal mask.

    2 S r H (d_nope + d_v) + 2 H n (d_nope + d_rope + d_v), n pairs

    >>> expand_flops(1, 1024, 128, 512, 128, 64, 128)
    34443624448
    """
    return recall_flops(keys, H, kv_rank, nope_dim, value_dim) + attention_flops(
        H * causal_pairs(queries, keys), nope_dim + rope_dim, value_dim
    )


def absorb_flops(
    queries: int, keys: int, H: int, kv_rank: int, nope_dim: int, rope_dim: int, value_dim: int
) -> int:
    """FLOPs of taking queries to the latents, attending there, and taking the result to the values
    of each head.

    2 T H r (d_nope + d_v) + 2 H n (2 r + d_rope), n pairs

    >>> absorb_flops(1, 1024, 128, 512, 128, 64, 128)
    318767104
    """
    return recall_flops(queries, H, kv_rank, nope_dim, value_dim) + attention_flops(
        H * causal_pairs(queries, keys), kv_rank + rope_dim, kv_rank
    )


def absorbing_is_cheaper(
    queries: int, keys: int, *, kv_rank: int, nope_dim: int, value_dim: int
) -> bool:
    """Whether `absorb_flops` is below `expand_flops`; the heads and the rotary dim cancel.

    r (d_nope + d_v) (S - T) > n (2 r - d_nope - d_v), n pairs: at DeepSeek-V3's sizes, up to 170
    queries against many keys

    >>> size = {"kv_rank": 512, "nope_dim": 128, "value_dim": 128}
    >>> [absorbing_is_cheaper(T, 65536, **size) for T in (1, 170, 171)]
    [True, True, False]
    >>> absorbing_is_cheaper(1, 1, **size)
    False
    """
    saved = kv_rank * (nope_dim + value_dim) * (keys - queries)
    return saved > causal_pairs(queries, keys) * (2 * kv_rank - nope_dim - value_dim)


@dataclass(frozen=True)
class LatentSpec(Spec):
    """MLA: a cache holds one latent of r values and one rotary key per token, which all heads
    share.

    The matrix that makes keys and values from latents stands `counted_separately`: "expand" applies it to every
    cached token, "absorb" applies it to the query and to the result.

    Attributes:
        heads: H.
        kv_rank: r.
        nope_dim, rope_dim: dims of a query and key head without and with rotary position.
        value_dim: E.
        form: "expand" makes keys and values of all heads from latents, "absorb" takes queries to
            the latents, and "auto" takes the one with fewer FLOPs.
        visible: the keys that a query sees.

    >>> layer = LatentSpec.of(7168, 128, 512, 128, 64, 128, q_rank=1536)  # DeepSeek-V3
    >>> layer.cached(1).values_per_token, layer.weights.matrices
    (576, 187105280)

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
        """The spec of the usual matrices and of the norms of both latents.

        Args:
            dim, heads: M and H.
            kv_rank, nope_dim, rope_dim, value_dim, form: as the attributes.
            q_rank: the size of the queries' latent; None makes queries from x.
            bias: whether the two maps down and the output have one.
        """
        query = heads * (nope_dim + rope_dim)
        queries = dim * query if q_rank is None else q_rank * (dim + query)
        up = kv_rank * heads * (nope_dim + value_dim)
        matrices = queries + dim * (kv_rank + rope_dim) + up + heads * value_dim * dim
        biases = (q_rank or 0) + kv_rank + rope_dim + dim if bias else 0
        weights = ParameterCounts(matrices, biases, kv_rank + (q_rank or 0), counted_separately=up)
        parts = ((1, latent_values(kv_rank, rope_dim)),)
        return cls(weights, parts, heads, kv_rank, nope_dim, rope_dim, value_dim, form)

    @property
    def name(self) -> str:
        """The heads, and the sizes of the latent and of the rotary key."""
        return f"MLA {self.heads} heads, latent {self.kv_rank} + {self.rope_dim}"

    @property
    def values_per_token(self) -> Quantity:
        """The latent and the rotary key."""
        numbers = latent_values(self.kv_rank, self.rope_dim)
        return Quantity(numbers, f"r + d_rope = {self.kv_rank} + {self.rope_dim}")

    @property
    def forms(self) -> tuple[str, ...]:
        """Both forms."""
        return ("expand", "absorb")

    @property
    def bounded(self) -> bool:
        """Whether there is a window."""
        return self.visible.max_tokens is not None

    def tokens(self, context: int) -> Quantity:
        """All tokens, or the last W."""
        bound = self.visible.max_tokens
        if bound is None:
            return super().tokens(context)
        return Quantity(min(context, bound), f"min(S, {bound})")

    def absorbs(self, queries: int, keys: int) -> bool:
        """Whether so many queries are taken to the latents, instead of expanding so many cached
        tokens.
        """
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
        """One token in this form."""
        return self._step(context, self.form)

    def decode_flops(self, context: int, form: str | None = None) -> int:
        """One token, in this form or in another."""
        return self._step(context, self.form if form is None else form).value

    def prefill_flops(self, context: int) -> int:
        """All tokens at once, in this form."""
        return self.flops(context, context, self.form)

    def flops(self, queries: int, keys: int, form: str) -> int:
        """FLOPs of the last queries under a causal mask, the matrices from latents to keys and
        values included.
        """
        r, nope, rope, E = self.kv_rank, self.nope_dim, self.rope_dim, self.value_dim
        if form == "auto":
            form = "absorb" if self.absorbs(queries, keys) else "expand"
        count = absorb_flops if form == "absorb" else expand_flops
        return count(queries, keys, self.heads, r, nope, rope, E)

    def _step(self, context: int, form: str) -> Quantity:
        H, r, nope, rope, E = (
            self.heads,
            self.kv_rank,
            self.nope_dim,
            self.rope_dim,
            self.value_dim,
        )
        cached, n = self.tokens(context).value, self.visible.visible_keys(context)
        up = f"2 r H (d_nope + E) = 2 x {r} x {H} x ({nope} + {E})"
        if form == "absorb" or (form == "auto" and self.absorbs(1, cached)):
            flops = recall_flops(1, H, r, nope, E) + attention_flops(H * n, r + rope, r)
            return Quantity(
                flops, f"{up} (absorption) + 2 H n (2 r + d_rope) = 2 x {H} x {n} x {2 * r + rope}"
            )
        flops = recall_flops(cached, H, r, nope, E) + attention_flops(H * n, nope + rope, E)
        scores = f"2 H n (d_nope + d_rope + E) = 2 x {H} x {n} x ({nope + rope} + {E})"
        return Quantity(flops, f"{up} x {cached} (recall) + {scores}")
