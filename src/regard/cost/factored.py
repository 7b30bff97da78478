"""Count attention to keys and values that a cache stores in fewer values than one key and one value
per head: factors of tensor products, tied keys, and several latents.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from regard.cost.latent import Form, LatentSpec, latent_weights
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts, Quantity
from regard.units import plural


def product_flops(keys: int, heads: int, dim: int, rank: int) -> int:
    """Return the FLOPs of the products of stored factors of some keys: 2 S R H D."""
    return 2 * keys * rank * heads * dim


@dataclass(frozen=True)
class FactoredSpec(SoftmaxSpec):
    """Tensor product attention (TPA): a cache stores the two factors of keys and of values, of R
    products each. Source: Zhang et al. 2025 (arXiv 2501.06425), table 1.
    """

    ranks: tuple[int, int] = field(kw_only=True)

    @classmethod
    def of_sizes(
        cls, dim: int, heads: int, head_dim: int, *, q_rank: int | None, ranks: tuple[int, int]
    ) -> FactoredSpec:
        """Return the spec with the matrices of the factors and of the output."""
        sizes = heads + head_dim
        queries = heads * head_dim if q_rank is None else q_rank * sizes
        matrices = dim * (queries + sum(ranks) * sizes + heads * head_dim)
        parts = tuple((1, rank * sizes) for rank in ranks)
        shape = HeadShape(heads, heads, head_dim, head_dim)
        return cls(ParameterCounts(matrices), parts, shape, ranks=ranks)

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads and its ranks."""
        heads = plural(self.shape.heads, "head")
        return f"TPA {heads} of {self.shape.head_dim}, ranks {self.ranks}"

    def step(self, context: int) -> Quantity:
        """Return the FLOPs of a query: the products of visible keys and values, and attention."""
        attention, n = super().step(context), self.visible_keys(context)
        H, D, E = self.shape.heads, self.shape.head_dim, self.shape.value_dim
        R_k, R_v = self.ranks
        products = product_flops(n, H, D, R_k) + product_flops(n, H, E, R_v)
        formula = f"2 H n (R_k D + R_v E) = 2 x {H} x {n} x ({R_k * D + R_v * E}) (products)"
        return Quantity(attention.value + products, f"{formula} + {attention.formula}")

    def prefill_flops(self, context: int) -> int:
        """Return the FLOPs of attention over all pairs, and of the products of all tokens."""
        H, D, E = self.shape.heads, self.shape.head_dim, self.shape.value_dim
        products = product_flops(context, H, D, self.ranks[0])
        products += product_flops(context, H, E, self.ranks[1])
        return super().prefill_flops(context) + products


@dataclass(frozen=True)
class TiedSpec(SoftmaxSpec):
    """Grouped-tied attention (GTA): a cache stores the values of G heads, and one rotated half of a
    key. Source: Zadouri et al. 2025 (arXiv 2505.21487), table 1.
    """

    @classmethod
    def of_heads(cls, dim: int, shape: HeadShape) -> TiedSpec:
        """Return the spec with the matrices of queries, values, the rotated half and the output."""
        H, G, D, half = shape.heads, shape.groups, shape.head_dim, shape.head_dim // 2
        matrices = dim * (2 * H * D + G * D + half)
        return cls(ParameterCounts(matrices), ((1, G * D), (1, half)), shape)

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads."""
        s = self.shape
        return f"GTA {s.label.partition(' ')[2]}"


def low_rank_query(dim: int, heads: int, head_dim: int, q_rank: int) -> SoftmaxSpec:
    """Return the spec of multi-matrix factorization attention (MFA): one key/value head, and
    queries through a latent of `q_rank` values with a norm. Source: Hu et al. 2024 (arXiv
    2412.19255), section 3.2.
    """
    shape = HeadShape(heads, 1, head_dim, head_dim)
    matrices = q_rank * (dim + heads * head_dim) + dim * (2 + heads) * head_dim
    weights = ParameterCounts(matrices, norms=q_rank)
    return SoftmaxSpec(weights, shape.parts, shape)


@dataclass(frozen=True)
class GroupedLatentSpec(LatentSpec):
    """Latent attention with n latents of `kv_rank` values per token, each read by some heads, or by
    all heads in branches that are added. Source: Zadouri et al. 2025 (arXiv 2505.21487), section
    3.3.2.
    """

    latents: int = field(kw_only=True)

    @classmethod
    def of_sizes(
        cls,
        dim: int,
        heads: int,
        latents: int,
        kv_rank: int,
        nope_dim: int,
        rope_dim: int,
        value_dim: int,
        *,
        q_rank: int | None = None,
        branches: int = 1,
        form: Form = "auto",
    ) -> GroupedLatentSpec:
        """Return the spec with the usual matrices and the norms of all latents."""
        widths = (kv_rank, nope_dim, rope_dim, value_dim)
        weights = latent_weights(dim, heads, *widths, q_rank, latents=latents, branches=branches)
        parts = ((1, latents * kv_rank), (1, rope_dim))
        return cls(weights, parts, branches * heads, *widths, form, latents=latents)

    @property
    def name(self) -> str:
        """The name of the mechanism, with its heads and its latents."""
        n = self.latents
        heads = plural(self.heads, "head")
        return f"latents {n} x {self.kv_rank} + {self.rope_dim}, {heads}"

    @property
    def values_per_token(self) -> Quantity:
        """The values of all latents and of the rotary key."""
        n, r, rope = self.latents, self.kv_rank, self.rope_dim
        return Quantity(n * r + rope, f"n r + d_rope = {n} x {r} + {rope}")
