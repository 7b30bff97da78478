"""Projections that cache fewer values than a key and a value per head, such as TPA, MFA, GTA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_groups, check_positive_sizes
from regard.caches import Parts
from regard.cost.factored import FactoredSpec
from regard.cost.softmax import VisibleKeys
from regard.cost.spec import ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.nn.blocks.norms import RMSNorm
from regard.nn.explainable import (
    InputSteps,
    MechanismStep,
    MechanismSteps,
    ProjectionQuery,
    first_rotary,
    projection_step,
    run_steps,
)
from regard.nn.projections.heads import (
    HeadProjection,
    Projection,
    ProjectionShape,
    cache_unsafe_reason,
    run_on_heads,
)
from regard.nn.projections.latent import LowRankProjection
from regard.nn.weights import Linear
from regard.positions import Rotary
from regard.span import Positions
from regard.units import plural


class TensorProductHeads(nn.Module):
    """Heads that are sums of products of two factors, both linear in x.

    head_h = 1/R sum_r a_rh b_r, with a = W_A x [R,H] and b = rotary(W_B x) [R,D]

    Source: Zhang et al. 2025 (arXiv 2501.06425), equations 3.1 to 3.3; its code divides by R.
    """

    def __init__(
        self, dim: int, heads: int, head_dim: int, rank: int, rotary: Rotary | None = None
    ) -> None:
        super().__init__()
        check_positive_sizes(
            "TensorProductHeads", dim=dim, heads=heads, head_dim=head_dim, rank=rank
        )
        self.heads, self.head_dim, self.rank = heads, head_dim, rank
        self.a = Linear(dim, rank * heads, bias=False)
        self.b = HeadProjection(dim, rank, head_dim, *([] if rotary is None else [rotary]))

    @property
    def values(self) -> int:
        """The number of values of both factors of a token, R (H + D)."""
        return self.rank * (self.heads + self.head_dim)

    def factors(
        self, x: Float[Tensor, "B L M"], positions: Positions | None
    ) -> Float[Tensor, "B 1 L F"]:
        """Compute both factors, as one part that a cache stores."""
        b = self.b(x, positions).transpose(1, 2).flatten(2)  # [B,R,L,D] -> [B,L,R D]
        return torch.cat((self.a(x), b), dim=-1)[:, None]

    def multiply(self, factors: Float[Tensor, "B 1 L F"]) -> Float[Tensor, "B n L d"]:
        """Multiply stored factors to heads."""
        R, H, D = self.rank, self.heads, self.head_dim
        a, b = factors[:, 0].split_with_sizes((R * H, R * D), dim=-1)
        a, b = torch.unflatten(a, -1, (R, H)), torch.unflatten(b, -1, (R, D))
        return (a.transpose(-2, -1) @ b).transpose(1, 2) / R  # [B,L,H,D] -> [B,H,L,D]

    def forward(
        self, x: Float[Tensor, "B L M"], positions: Positions | None
    ) -> Float[Tensor, "B n L d"]:
        """Compute the heads [B,n,L,d] of hidden states [B,L,M]."""
        return self.multiply(self.factors(x, positions))

    def explain_steps(
        self, x: Tensor, positions: Positions, letter: Literal["q", "k", "v"]
    ) -> MechanismSteps:
        """Compute the factors and their product, for an explanation."""
        index, R = "i" if letter == "q" else "j", self.rank
        factors = self.factors(x, positions)
        product = self.multiply(factors)[0]
        name = f"{letter}_{index}"
        return (
            MechanismStep("factors", f"a_r and b_r of {name}, linear in x_{index}", factors[0]),
            MechanismStep("product", f"{name} = 1/{R} sum_r a_r b_r, in every head", product),
        )

    def extra_repr(self) -> str:
        """Return the number of heads, the head dim and the rank."""
        return f"{plural(self.heads, 'head')} of {self.head_dim}, rank={self.rank}"


class TensorProductProjection(Projection, nn.Module):
    """The projection of tensor product attention (TPA), of which a cache stores factors.

    k_h = 1/R sum_r a_rh R_s b_r, and q_h and v_h likewise, v without rotation; stored: all a_rh and
    the rotated b_r of k and v, (R_k + R_v)(H + D) values

    Source: Zhang et al. 2025 (arXiv 2501.06425), section 3.
    """

    def __init__(
        self, q: TensorProductHeads | HeadProjection, k: TensorProductHeads, v: TensorProductHeads
    ) -> None:
        super().__init__()
        if not q.heads == k.heads == v.heads or q.head_dim != k.head_dim:
            raise ArgumentError(
                f"q is {q.extra_repr()}, k is {k.extra_repr()}, v is {v.extra_repr()}; all must "
                "have the same number of heads, and q and k the same head dim"
            )
        self.q, self.k, self.v = q, k, v
        self.cache_unsafe_reason = cache_unsafe_reason(k.b)

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the factors of the keys and those of the values, each in one head."""
        return self.k.factors(x, positions), self.v.factors(x, positions)

    def recall(self, memory: Parts, positions: Positions | None) -> tuple[Tensor, Tensor]:
        """Return the products of the stored factors: keys [B,H,S,D] and values [B,H,S,E]."""
        k, v = memory
        return self.k.multiply(k), self.v.multiply(v)

    @property
    def shape(self) -> ProjectionShape:
        """H heads of D and of E; a cache stores R_k (H + D) + R_v (H + E) values per token."""
        H, D, E = self.q.heads, self.k.head_dim, self.v.head_dim
        return ProjectionShape(H, H, D, E, (self.k.values, self.v.values))

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """Return the cost of attention through this projection."""
        R = (self.k.rank, self.v.rank)
        parts = tuple((1, size) for size in self.shape.memory)
        return FactoredSpec(weights, parts, self.shape.heads, visible, ranks=R)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the factors and the products of queries, keys and values."""
        steps = self.k.b.steps
        return InputSteps(
            self.q.explain_steps(query.x, query.positions, "q"),
            self.k.explain_steps(query.memory, query.k_positions, "k"),
            self.v.explain_steps(query.memory, query.k_positions, "v"),
            steps[0] if len(steps) and isinstance(steps[0], Rotary) else None,
        )


class LowRankMap(nn.Module):
    """A linear map through a smaller space, with a norm there: W_up norm(W_down x)."""

    def __init__(self, dim: int, rank: int, out: int, *, eps: float | None = 1e-6) -> None:
        super().__init__()
        self.down, self.up = Linear(dim, rank, bias=False), Linear(rank, out, bias=False)
        self.norm: nn.Module = nn.Identity() if eps is None else RMSNorm(rank, eps=eps)

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L N"]:
        """Map x [..., M] to [..., N]."""
        y: Tensor = self.up(self.norm(self.down(x)))
        return y


class LowRankHeads(HeadProjection):
    """A `HeadProjection` through a smaller space: W_up norm(W_down x), split into heads.

    Source: Hu et al. 2024 (arXiv 2412.19255), section 3.2.
    """

    linear: LowRankMap  # type: ignore[assignment]  # instead of one matrix

    def __init__(
        self,
        dim: int,
        heads: int,
        head_dim: int,
        *steps: nn.Module,
        rank: int,
        eps: float | None = 1e-6,
    ) -> None:
        super().__init__(dim, heads, head_dim, *steps)
        if rank < 1:
            raise ArgumentError(f"rank is {rank}; it must be at least 1")
        self.linear = LowRankMap(dim, rank, heads * head_dim, eps=eps)


class TiedProjection(Projection, nn.Module):
    """The projection of grouped-tied attention (GTA): half a key is half its value.

    v_g = W_v,g x;  k_g = [first half of v_g; R_s W_r x];  q_h = [W_q,h x; R_t W_q',h x]; stored:
    v_g of each group and the rotated half, G D + D/2 values

    Source: Zadouri et al. 2025 (arXiv 2505.21487), section 3.3.1.
    """

    def __init__(
        self, q: HeadProjection, v: HeadProjection, rotated: HeadProjection, rotary: Rotary
    ) -> None:
        super().__init__()
        check_groups(q.heads, v.heads)
        D, half = q.head_dim, rotated.head_dim
        if v.head_dim != D or rotated.heads != 1 or 2 * half != D or rotary.dim != half:
            raise ArgumentError(
                f"q is {q.extra_repr()}, v is {v.extra_repr()}, rotated is "
                f"{rotated.extra_repr()}, rotary has dim {rotary.dim}; q and v must have the same "
                "even head dim, and rotated and rotary half of it in one head"
            )
        self.q, self.v, self.rotated, self.rotary = q, v, rotated, rotary
        self.half_dim = half
        self.cache_unsafe_reason = cache_unsafe_reason(rotary)

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """Return the queries [B,H,T,D], whose second half is rotated."""
        return self._rotate_half(self.q(x, positions), positions)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the values in one head [B,1,S,G*D], and the rotated half [B,1,S,D/2]."""
        v = self.v(x, positions).transpose(1, 2).flatten(2)  # [B,G,S,D] -> [B,S,G D]
        return v[:, None], self.rotary(self.rotated(x, positions), positions)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return the keys [B,G,S,D], joined from both parts, and the values [B,G,S,D]."""
        v, rotated = memory
        v = torch.unflatten(v[:, 0], -1, (-1, self.v.head_dim)).transpose(1, 2)
        shared = rotated.expand(-1, v.shape[1], -1, -1)
        first = v[..., : self.half_dim]
        return torch.cat((first, shared), dim=-1), v

    @property
    def shape(self) -> ProjectionShape:
        """H query heads and G key/value heads of D; a cache stores G D + D/2 values per token."""
        G, D = self.v.heads, self.v.head_dim
        return ProjectionShape(self.q.heads, G, D, D, (G * D, self.half_dim))

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of queries and keys, joined from value and rotated half."""
        q = projection_step("q", self.q(query.x, query.positions)[0], self.q.linear)
        rotated_query = self._rotate_half(q.values[None], query.positions)[0]
        v = projection_step("v", self.v(query.memory, query.k_positions)[0], self.v.linear)
        k = projection_step(
            "k", self.rotated(query.memory, query.k_positions)[0], self.rotated.linear
        )
        (half,) = run_steps([self.rotary], (k,), query.k_positions, "k")[1:]
        memory = self.remember(query.memory, query.k_positions)
        joined = self.recall(memory, query.k_positions)[0][0]
        return InputSteps(
            (q, MechanismStep("rotated", "second half of q_i ← R(p) of it", rotated_query)),
            (k, half, MechanismStep("tied", "k_j = [first half of v_j; R(p) k_R]", joined)),
            (v,),
            self.rotary,
        )

    def _rotate_half(self, q: Tensor, positions: Positions) -> Tensor:
        """Rotate the second half of heads [B,n,L,D]."""
        return torch.cat(
            (q[..., : self.half_dim], self.rotary(q[..., self.half_dim :], positions)), dim=-1
        )


class KeysAsValues(Projection, nn.Module):
    """A projection whose values are the projected keys, with steps of their own.

    y = W_k x;  k = key steps(y);  v = value steps(y)

    A cache stores both, because the steps on keys, such as a rotation, change them.

    Args:
        q: a `HeadProjection` to H query heads of D.
        k: a `HeadProjection` to G key heads of D, with the steps on keys.
        value_steps: modules called as step(y [B,G,S,D], positions).

    Raises:
        ArgumentError: G does not divide H, or q and k differ in head dim.

    >>> project = KeysAsValues(HeadProjection(8, 4, 2), HeadProjection(8, 2, 2))
    >>> k, v = project.remember(torch.randn(1, 3, 8), None)
    >>> torch.equal(k, v), project.shape.memory
    (True, (4, 4))

    Source: the code of Gemma 4 in transformers (`attention_k_eq_v`).
    """

    def __init__(
        self, q: HeadProjection, k: HeadProjection, *, value_steps: Sequence[nn.Module] = ()
    ) -> None:
        super().__init__()
        _check_heads(q, k)
        self.q, self.k, self.value_steps = q, k, nn.ModuleList(value_steps)
        self.cache_unsafe_reason = cache_unsafe_reason(k)

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the keys and the values [B,G,S,D], from one linear map."""
        y = self._heads(x)
        steps = self.k.steps, self.value_steps
        return tuple(run_on_heads(own, y, positions) for own in steps)

    def _heads(self, x: Tensor) -> Tensor:
        """Return the projected keys [B,G,S,D] before any step."""
        y: Tensor = self.k.flat(self.k.linear(x))
        return torch.unflatten(y, -1, (self.k.heads, self.k.head_dim)).transpose(1, 2)  # [B,G,S,D]

    @property
    def shape(self) -> ProjectionShape:
        """H, G and D, with E = D; a cache stores 2 G D values per token."""
        G, D = self.k.heads, self.k.head_dim
        return ProjectionShape(self.q.heads, G, D, D, (G * D, G * D))

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of queries, keys and values, which start from projected keys."""
        first = projection_step("k", self._heads(query.memory)[0], self.k.linear)
        first = first._replace(equation=f"v_{first.equation.partition('_')[2]}, the projected key")
        return InputSteps(
            self.q.explain_steps(query.x, query.positions, "q"),
            self.k.explain_steps(query.memory, query.k_positions, "k"),
            run_steps(self.value_steps, (first,), query.k_positions, "v"),
            first_rotary(self.q.steps),
        )


class SharedKeyValue(Projection, nn.Module):
    """A projection with one vector per group that is key and value, which a cache stores once.

    k = v = steps(W_kv x)

    If a step rotates it, `InverseRotary` on the result makes it depend on distances only.

    Args:
        q: a `HeadProjection` to H query heads of D, or a low-rank projection with one.
        kv: a `HeadProjection` to G heads of D.

    Raises:
        ArgumentError: G does not divide H, or q and kv differ in head dim.

    >>> SharedKeyValue(HeadProjection(8, 4, 2), HeadProjection(8, 1, 2)).shape.memory
    (2,)

    Source: the code of DeepSeek-V4 in transformers.
    """

    def __init__(self, q: HeadProjection | LowRankProjection, kv: HeadProjection) -> None:
        super().__init__()
        _check_heads(q, kv)
        self.q, self.kv = q, kv
        self.cache_unsafe_reason = cache_unsafe_reason(kv)

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the vectors [B,G,S,D] that are keys and values."""
        return (self.kv(x, positions),)

    @property
    def shape(self) -> ProjectionShape:
        """H, G and D, with E = D; a cache stores G D values per token."""
        G, D = self.kv.heads, self.kv.head_dim
        return ProjectionShape(self.q.heads, G, D, D, (G * D,))

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of queries, and the same steps for keys and for values."""
        kv, memory, k_positions = self.kv, query.memory, query.k_positions
        return InputSteps(
            self.q.explain_steps(query.x, query.positions, "q"),
            kv.explain_steps(memory, k_positions, "k"),
            kv.explain_steps(memory, k_positions, "v"),
            first_rotary(kv.steps),
        )


class GroupedOutput(nn.Module):
    """An output map in two steps: each group of heads to a small vector, and these to the state.

    y = W [A_1 z_1; ...; A_g z_g], where z_i are the concatenated heads of group i

    Args:
        width: H E, the size of all heads together.
        dim: the model dim M.
        groups: the number g of groups, which divides the width.
        rank: the size of a group's small vector.

    Source: the code of DeepSeek-V4 in transformers.
    """

    def __init__(self, width: int, dim: int, groups: int, rank: int) -> None:
        super().__init__()
        check_groups(width, groups)
        self.groups = nn.ModuleList(
            Linear(width // groups, rank, bias=False) for _ in range(groups)
        )
        self.down = Linear(groups * rank, dim, bias=False)

    def forward(self, z: Float[Tensor, "B T HE"]) -> Float[Tensor, "B T M"]:
        """Map the concatenated heads [B,T,H*E] to hidden states [B,T,M]."""
        parts = zip(self.groups, z.chunk(len(self.groups), -1), strict=True)
        y: Tensor = self.down(torch.cat([part(x) for part, x in parts], -1))
        return y


def _check_heads(q: HeadProjection | LowRankProjection, k: HeadProjection) -> None:
    """Check that the heads of queries and keys fit one another."""
    check_groups(q.heads, k.heads)
    if q.head_dim != k.head_dim:
        raise ArgumentError(
            f"q is {q.extra_repr()} and k is {k.extra_repr()}; they must have the same head dim"
        )
