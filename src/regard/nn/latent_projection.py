"""Multi-head latent attention (MLA): a cache stores one latent and one rotary key per token, from
which every head computes its keys and values.
"""

from __future__ import annotations

from dataclasses import replace
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Parts
from regard.cost.latent import Form, LatentSpec, absorbing_is_cheaper
from regard.cost.softmax import SoftmaxSpec, VisibleKeys
from regard.cost.spec import ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.nn.explainable import InputSteps, MechanismStep, ProjectionQuery
from regard.nn.linear import Linear
from regard.nn.norms import RMSNorm
from regard.nn.projections import (
    HeadProjection,
    Projection,
    ProjectionShape,
    cache_unsafe_reason,
)
from regard.positions import Rotary
from regard.span import Positions
from regard.units import plural


class LowRankProjection(nn.Module):
    """A projection to heads through a low-rank latent: up(norm(W x)).

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), equations 37 and 38.
    """

    def __init__(
        self, dim: int, rank: int, up: HeadProjection, *, bias: bool = False, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.down, self.norm, self.up = Linear(dim, rank, bias=bias), RMSNorm(rank, eps=eps), up

    def forward(
        self, x: Float[Tensor, "B L M"], positions: Positions | None
    ) -> Float[Tensor, "B n L d"]:
        """Map x [B,L,M] to heads [B,n,L,d]."""
        q: Tensor = self.up(self.norm(self.down(x)), positions)
        return q


class LatentProjection(Projection, nn.Module):
    """The projection of multi-head latent attention (MLA): queries, keys and values through
    low-rank latents. A cache stores the latent and the rotary key of each token.

    c_q = norm(W_dq x);  [q_c; q_r]_h = W_uq,h c_q;  q_h = [q_c; R_t q_r]_h
    [c; k_r] = W_dkv x;  stored: m = [norm(c); R_s k_r], r + d_rope values in one head
    [k_c; v]_h = W_ukv,h norm(c);  k_h = [k_c,h; R_s k_r], the rotary key shared by all heads

    There are two forms, equal in exact arithmetic. "expand" computes the equations above: the
    latents become keys and values of each head. "absorb" multiplies the queries by the key map W_uk
    instead. The stored latents then serve as the single key/value head of all query heads, without
    a copy. With attention weights p_hs,

    q_h^T k_h = [W_uk,h^T q_c; R_t q_r]_h^T m,  z_h = W_uv,h sum_s p_hs norm(c_s)

    Args:
        dim: the model dim M.
        heads: the number of heads H.
        rotary: the rotary embedding of the rotary part of queries and keys; its dim is d_rope.
            DeepSeek's checkpoints use the layout "interleaved".
        kv_rank: the size r of the latent of keys and values.
        nope_dim: the dims of a query and key head without rotary positions, d_nope.
        value_dim: the size of a value head, E.
        q_rank: the size of the latent of queries; None computes queries directly from x, as in
            DeepSeek-V2-Lite.
        bias: whether the two maps to the latents have a bias.
        eps: the epsilon of the two norms.
        form: "expand", "absorb" or "auto", which selects the form with fewer FLOPs: absorb for few
            queries against many keys, expand for a prompt.

    Raises:
        ArgumentError: a size is less than 1, eps is negative, or the form is unknown.

    >>> from regard.span import Span
    >>> rotary = Rotary(4, layout="interleaved")
    >>> project = LatentProjection(32, 4, rotary, kv_rank=16, nope_dim=8, value_dim=8, q_rank=24)
    >>> (memory,) = project.remember(torch.zeros(1, 5, 32), Span(0, 5))
    >>> memory.shape, [x.shape[1] for x in project.recall((memory,), Span(0, 5))]
    (torch.Size([1, 1, 5, 20]), [4, 4])
    >>> type(project.select_form(1, 5)).__name__
    'AbsorbedLatentProjection'

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), equations 37 to 47, and section 2.1.2 on
    absorption.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        rotary: Rotary,
        *,
        kv_rank: int,
        nope_dim: int,
        value_dim: int,
        q_rank: int | None = None,
        bias: bool = False,
        eps: float = 1e-6,
        form: Form = "auto",
    ) -> None:
        super().__init__()
        sizes = {"dim": dim, "heads": heads, "kv_rank": kv_rank, "nope_dim": nope_dim}
        sizes |= {"value_dim": value_dim, **({} if q_rank is None else {"q_rank": q_rank})}
        for name, size in sizes.items():
            if size < 1:
                alternative = "; None computes queries without a latent" if name == "q_rank" else ""
                raise ArgumentError(f"{name} is {size}; it must be at least 1{alternative}")
        if form not in get_args(Form):
            raise ArgumentError(f"form is {form!r}; it must be one of {', '.join(get_args(Form))}")
        self.heads, self.rotary, self.form = heads, rotary, form
        self.kv_rank, self.nope_dim, self.value_dim = kv_rank, nope_dim, value_dim
        up = HeadProjection(dim if q_rank is None else q_rank, heads, nope_dim + rotary.dim)
        self.q = up if q_rank is None else LowRankProjection(dim, q_rank, up, bias=bias, eps=eps)
        self.kv_down = Linear(dim, kv_rank + rotary.dim, bias=bias)
        self.kv_norm = RMSNorm(kv_rank, eps=eps)
        self.kv_up = HeadProjection(kv_rank, heads, nope_dim + value_dim)
        self.kv_up.linear.reads_whole_weight = True  # `up` reads it for every absorbed query

    def parts(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Compute the two parts of the queries.

        Args:
            x: hidden states [B,T,M].
            positions: positions of their tokens.

        Returns:
            The part without positions [B,H,T,d_nope], and the rotated part [B,H,T,d_rope].
        """
        q = self.q(x, positions)
        return q[..., : self.nope_dim], self.rotary(q[..., self.nope_dim :], positions)

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """Return the queries [B,H,T,d_nope+d_rope] of hidden states x."""
        return torch.cat(self.parts(x, positions), dim=-1)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return one part [B,1,S,r+d_rope]: the normalised latent and the rotated key."""
        c, rotated = self.kv_down(x).split((self.kv_rank, self.rotary.dim), dim=-1)
        rotated = self.rotary(rotated[:, None], positions)
        return (torch.cat((self.kv_norm(c)[:, None], rotated), dim=-1),)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return the expanded keys [B,H,S,d_nope+d_rope] and values [B,H,S,E]."""
        c, rotated = memory[0].split_with_sizes((self.kv_rank, self.rotary.dim), dim=-1)
        nope, v = self.kv_up(c[:, 0], positions).split((self.nope_dim, self.value_dim), dim=-1)
        return torch.cat((nope, rotated.expand(-1, self.heads, -1, -1)), dim=-1), v

    @property
    def has_forms(self) -> bool:
        """True: there are an expanded and an absorbed form."""
        return True

    def select_form(self, queries: int, keys: int) -> Projection:
        """Return the form for a number of queries and keys.

        Args:
            queries: the number of queries T.
            keys: the number of keys S in memory.

        Returns:
            This projection (expanded), or its `AbsorbedLatentProjection`.
        """
        absorb = self.form == "absorb"
        # another layer in its place, such as torch's quantised one, may have no matrix to absorb
        if self.form == "auto" and isinstance(self.kv_up.linear.weight, Tensor):
            absorb = absorbing_is_cheaper(
                queries,
                keys,
                kv_rank=self.kv_rank,
                nope_dim=self.nope_dim,
                value_dim=self.value_dim,
            )
        return AbsorbedLatentProjection(self) if absorb else self

    def up(self) -> tuple[Float[Tensor, "H d r"], Float[Tensor, "H E r"]]:
        """Return the two parts of the matrix that expands latents: that of keys and that of values.

        Returns:
            The views W_uk [H,d_nope,r] and W_uv [H,E,r].

        Raises:
            ArgumentError: `kv_up.linear` was replaced by a layer without a weight tensor.
        """
        weight: object = self.kv_up.linear.weight
        if not isinstance(weight, Tensor):
            raise ArgumentError(
                f"kv_up.linear is a {type(self.kv_up.linear).__name__} without a weight tensor, so "
                'that it cannot be absorbed; build the LatentProjection with form="expand"'
            )
        weight = torch.unflatten(weight, 0, (self.heads, -1))
        return weight[:, : self.nope_dim], weight[:, self.nope_dim :]

    @property
    def shape(self) -> ProjectionShape:
        """H heads of d_nope + d_rope and of E; a cache stores r + d_rope values per token."""
        H, D = self.heads, self.nope_dim + self.rotary.dim
        return ProjectionShape(H, H, D, self.value_dim, (self.kv_rank + self.rotary.dim,))

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """Return the cost of attention through this projection.

        Args:
            weights: the number of parameters of the layer.
            visible: the number of keys that a query sees.

        Returns:
            The cost specification, which counts the cheaper form.
        """
        return LatentSpec(
            replace(
                weights,
                counted_separately=weights.counted_separately
                + self.kv_rank * self.heads * (self.nope_dim + self.value_dim),
            ),
            self.shape.parts,
            self.heads,
            self.kv_rank,
            self.nope_dim,
            self.rotary.dim,
            self.value_dim,
            self.form,
            visible,
        )

    @property
    def scale(self) -> float:
        """The factor on the scores: 1/sqrt(d_nope + d_rope) times the rotary's softmax factor
        (`mscale_all_dim` of a YaRN scaling).
        """
        return float(self.shape.D**-0.5 * self.rotary.softmax_factor)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of queries, keys and values through their latents. The head dim of the
        recorded keys decides whether they are those of the expanded or of the absorbed form.
        """
        x, positions, r, n = query.x, query.positions, self.kv_rank, self.nope_dim
        nope, rotated_query = (part[0] for part in self.parts(x, positions))
        q = (
            MechanismStep(
                "projected", "q_i = [q_C; q_R] = W_UQ norm(W_DQ x_i)", self.q(x, positions)[0]
            ),
            MechanismStep("rotated", "q_R ← R(p) q_R", torch.cat((nope, rotated_query), -1)),
        )
        c, k_r = self.kv_down(query.memory).split((r, self.rotary.dim), -1)
        latent = self.kv_norm(c)
        rotated = self.rotary(k_r[:, None], query.k_positions)[:, 0]
        remembered = torch.cat((latent, rotated), -1)
        k = (
            MechanismStep("latent", "c_j = W_DKV x_j, and k_R", torch.cat((c, k_r), -1)),
            MechanismStep(
                "remembered", "m_j = [norm(c_j); R(p) k_R], which a cache stores", remembered
            ),
        )
        if query.head_dim == r + self.rotary.dim != n + self.rotary.dim:
            w_k, _ = self.up()
            absorbed = torch.cat((torch.einsum("htd,hdr->htr", nope, w_k), rotated_query), -1)
            equation = "q_i ← [W_UKᵀ q_C; q_R], a query for the latents"
            v = MechanismStep("latent", "v_j = norm(c_j), expanded by W_UV after the mix", latent)
            return InputSteps(
                (*q, MechanismStep("absorbed", equation, absorbed)), k, (v,), self.rotary, r
            )
        up = self.kv_up(latent, query.k_positions)[0]
        keys = torch.cat((up[..., :n], rotated.expand(self.heads, -1, -1)), -1)
        return InputSteps(
            q,
            (*k, MechanismStep("expanded", "k_j = [W_UK c_j; k_R]", keys)),
            (MechanismStep("expanded", "v_j = W_UV c_j", up[..., n:]),),
            self.rotary,
            n,
        )

    @property
    def cache_unsafe_reason(self) -> str | None:  # type: ignore[override]
        """The reason why a cache must not store the rotated key; None unless the rotary frequencies
        follow the length.
        """
        return cache_unsafe_reason(self.rotary)

    def extra_repr(self) -> str:
        """Return the heads, their dims, the rank and the form."""
        sizes = f"{self.nope_dim}+{self.rotary.dim} and {self.value_dim}"
        return (
            f"{plural(self.heads, 'head')} of {sizes}, kv_rank={self.kv_rank}, form={self.form!r}"
        )


class AbsorbedLatentProjection(Projection):
    """The absorbed form of a `LatentProjection`: the queries are multiplied by the key map, and the
    stored latents serve as the single key/value head of all query heads.

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1.2.
    """

    def __init__(self, latent: LatentProjection) -> None:
        self.latent = latent

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """Return the absorbed queries [B,H,T,r+d_rope]."""
        nope, rotated_query = self.latent.parts(x, positions)
        w_k, _ = self.latent.up()
        return torch.cat((torch.einsum("bhtd,hdr->bhtr", nope, w_k), rotated_query), dim=-1)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the same memory as the expanded form, so that both can share a cache."""
        return self.latent.remember(x, positions)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return the memory as keys [B,1,S,r+d_rope], and a view of its latents as values
        [B,1,S,r].
        """
        return memory[0], memory[0][..., : self.latent.kv_rank]

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Expand the weighted mean of the latents [B,H,T,r] to heads [B,H,T,E]."""
        _, w_v = self.latent.up()
        return torch.einsum("bhtr,her->bhte", z, w_v)

    @property
    def shape(self) -> ProjectionShape:
        """H query heads, and one key and value head."""
        r, memory = self.latent.kv_rank, self.latent.shape.memory
        return ProjectionShape(self.latent.heads, 1, memory[0], r, memory)

    @property
    def cache_unsafe_reason(self) -> str | None:  # type: ignore[override]
        """The reason why a cache must not store the memory of the `LatentProjection`, or None."""
        return self.latent.cache_unsafe_reason


class NaiveLatentProjection(LatentProjection):
    """A `LatentProjection` whose cache stores the expanded keys and values of all heads:
    H (d_nope + d_rope + E) values per token.

    It follows the equations literally, as many implementations do, and serves for comparison. It
    has no absorbed form. The arguments are those of `LatentProjection`.
    """

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the expanded keys [B,H,S,d_nope+d_rope] and values [B,H,S,E]."""
        return super().recall(super().remember(x, positions), positions)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return keys and values as they were stored."""
        k, v = memory
        return k, v

    @property
    def has_forms(self) -> bool:
        """False: there is only one form."""
        return False

    def select_form(self, queries: int, keys: int) -> Projection:
        """Return this projection, which has only one form."""
        return self

    @property
    def shape(self) -> ProjectionShape:
        """The sizes of the expanded form; a cache stores the keys and values of all heads."""
        H, _, D, E, _ = super().shape
        return ProjectionShape(H, H, D, E, (H * D, H * E))

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """Return the cost of attention with cached keys and values of all heads, as in multi-head
        attention.
        """
        return SoftmaxSpec(weights, self.shape.parts, self.shape.heads, visible)
