"""Multi-head latent attention (MLA): one latent and one rotary key per token, from which every head
makes its keys and values.
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
from regard.nn.explain import Explainable, InputSteps, Link, ProjectionQuery
from regard.nn.linear import Linear
from regard.nn.norms import RMSNorm
from regard.nn.projections import Heads, Projection, ProjectionShape, cache_unsafe_reason
from regard.positions import Rotary
from regard.span import Positions


class LowRank(nn.Module):
    """Heads from a latent: up(norm(W x)).

    Args:
        dim: the model dim M.
        rank: the size of the latent.
        up: `Heads` from the latent.
        bias: whether the map down has one.
        eps: of the norm.

    >>> import torch
    >>> LowRank(8, 4, Heads(4, 2, 3))(torch.zeros(1, 5, 8), None).shape
    torch.Size([1, 2, 5, 3])

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), equations 37 and 38.
    """

    def __init__(
        self, dim: int, rank: int, up: Heads, *, bias: bool = False, eps: float = 1e-6
    ) -> None:
        super().__init__()
        self.down, self.norm, self.up = Linear(dim, rank, bias=bias), RMSNorm(rank, eps=eps), up

    def forward(
        self, x: Float[Tensor, "B L M"], positions: Positions | None
    ) -> Float[Tensor, "B n L d"]:
        """x [B,L,M] -> heads [B,n,L,d]."""
        q: Tensor = self.up(self.norm(self.down(x)), positions)
        return q


class Latent(Explainable, nn.Module):
    """Queries, keys and values through low-rank latents; a cache keeps the latent and the rotary
    key of a token.

    c_q = norm(W_dq x);  [q_c; q_r]_h = W_uq,h c_q;  q_h = [q_c; R_t q_r]_h
    [c; k_r] = W_dkv x;  remembered: m = [norm(c); R_s k_r], r + d_rope numbers, one head
    [k_c; v]_h = W_ukv,h norm(c);  k_h = [k_c,h; R_s k_r], the rotary key shared by all heads

    Two forms, equal in exact arithmetic. "expand" is the above: all latents become keys and values
    of each head. "absorb" takes the queries to the latents, which then are the one key and value
    head of all queries, without a copy: q_h^T k_h = [W_uk,h^T q_c; R_t q_r]_h^T m, and z_h = W_uv,h
    sum_s p_hs norm(c_s).

    Args:
        dim, heads: the model dim M and the heads H.
        rotary: turns the rotary part of queries and keys; its dim is d_rope. DeepSeek's checkpoints
            are "interleaved".
        kv_rank: the size r of the latent.
        nope_dim: dims of a query and key head that are not turned, d_nope.
        value_dim: dims of a value head, E.
        q_rank: the size of the queries' latent; None makes queries from x, as in DeepSeek-V2-Lite.
        bias: whether the two maps down have one.
        eps: of the two norms.
        form: "auto" takes the cheaper by FLOPs: absorb for few queries against many keys, expand
            for a prompt.

    Raises:
        ArgumentError: a size is less than 1, the form is unknown, or the norms refuse eps.

    >>> from regard.span import Span
    >>> rotary = Rotary(4, layout="interleaved")
    >>> latent = Latent(32, 4, rotary, kv_rank=16, nope_dim=8, value_dim=8, q_rank=24)
    >>> (memory,) = latent.remember(torch.zeros(1, 5, 32), Span(0, 5))
    >>> memory.shape, [x.shape[1] for x in latent.recall((memory,), Span(0, 5))]
    (torch.Size([1, 1, 5, 20]), [4, 4])
    >>> type(latent.select_form(1, 5)).__name__
    'Absorbed'

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
                free = "; None makes queries without a latent" if name == "q_rank" else ""
                raise ArgumentError(f"{name} is {size}; it must be at least 1{free}")
        if form not in get_args(Form):
            raise ArgumentError(f"form is {form!r}; it is one of {', '.join(get_args(Form))}")
        self.heads, self.rotary, self.form = heads, rotary, form
        self.kv_rank, self.nope_dim, self.value_dim = kv_rank, nope_dim, value_dim
        up = Heads(dim if q_rank is None else q_rank, heads, nope_dim + rotary.dim)
        self.q = up if q_rank is None else LowRank(dim, q_rank, up, bias=bias, eps=eps)
        self.kv_down = Linear(dim, kv_rank + rotary.dim, bias=bias)
        self.kv_norm = RMSNorm(kv_rank, eps=eps)
        self.kv_up = Heads(kv_rank, heads, nope_dim + value_dim)

    def parts(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """x [B,T,M] -> the parts of a query: without position [B,H,T,d_nope], and turned
        [B,H,T,d_rope].
        """
        q = self.q(x, positions)
        return q[..., : self.nope_dim], self.rotary(q[..., self.nope_dim :], positions)

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """q [B,H,T,d_nope+d_rope]."""
        return torch.cat(self.parts(x, positions), dim=-1)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """One part [B,1,S,r+d_rope]: the latent behind its norm, and the turned key."""
        c, turned = self.kv_down(x).split((self.kv_rank, self.rotary.dim), dim=-1)
        turned = self.rotary(turned[:, None], positions)
        return (torch.cat((self.kv_norm(c)[:, None], turned), dim=-1),)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """k [B,H,S,d_nope+d_rope] and v [B,H,S,E]."""
        c, turned = memory[0].split_with_sizes((self.kv_rank, self.rotary.dim), dim=-1)
        nope, v = self.kv_up(c[:, 0], positions).split((self.nope_dim, self.value_dim), dim=-1)
        return torch.cat((nope, turned.expand(-1, self.heads, -1, -1)), dim=-1), v

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Heads as attention gave them."""
        return z

    def select_form(self, queries: int, keys: int) -> Projection:
        """The form for so many queries against so many keys."""
        absorb = self.form == "absorb"
        if self.form == "auto":
            absorb = absorbing_is_cheaper(
                queries,
                keys,
                kv_rank=self.kv_rank,
                nope_dim=self.nope_dim,
                value_dim=self.value_dim,
            )
        return Absorbed(self) if absorb else self

    def up(self) -> tuple[Float[Tensor, "H d r"], Float[Tensor, "H E r"]]:
        """W_uk [H,d_nope,r] and W_uv [H,E,r]: views of the one matrix, which has the rows of a head
        side by side.
        """
        weight = torch.unflatten(self.kv_up.linear.weight, 0, (self.heads, -1))
        return weight[:, : self.nope_dim], weight[:, self.nope_dim :]

    @property
    def shape(self) -> ProjectionShape:
        """H heads of d_nope + d_rope and of E; a token takes r + d_rope numbers."""
        H, D = self.heads, self.nope_dim + self.rotary.dim
        return ProjectionShape(H, H, D, self.value_dim, (self.kv_rank + self.rotary.dim,))

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """The cost of attention through this projection, by its sizes."""
        return LatentSpec(
            replace(
                weights,
                counted_separately=weights.counted_separately + self.kv_up.linear.weight.numel(),
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
        """1/sqrt(d_nope + d_rope), times what the rotary's scaling wants of the softmax:
        `mscale_all_dim` acts here only.
        """
        return float(self.shape.D**-0.5 * self.rotary.softmax_factor)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Queries and keys through their latents: expanded, or the queries absorbed, as the size of
        the recorded keys says.
        """
        x, positions, r, n = query.x, query.positions, self.kv_rank, self.nope_dim
        nope, turned = (part[0] for part in self.parts(x, positions))
        q = (
            Link("projected", "q_i = [q_C; q_R] = W_UQ norm(W_DQ x_i)", self.q(x, positions)[0]),
            Link("rotated", "q_R ← R(p) q_R", torch.cat((nope, turned), -1)),
        )
        c, k_r = self.kv_down(query.memory).split((r, self.rotary.dim), -1)
        latent = self.kv_norm(c)
        rotated = self.rotary(k_r[:, None], query.k_positions)[:, 0]
        remembered = torch.cat((latent, rotated), -1)
        k = (
            Link("latent", "c_j = W_DKV x_j, and k_R", torch.cat((c, k_r), -1)),
            Link("remembered", "m_j = [norm(c_j); R(p) k_R]: what a cache keeps", remembered),
        )
        if query.head_dim == r + self.rotary.dim != n + self.rotary.dim:
            w_k, _ = self.up()
            absorbed = torch.cat((torch.einsum("htd,hdr->htr", nope, w_k), turned), -1)
            how = "q_i ← [W_UKᵀ q_C; q_R]: the query comes to the latents"
            v = Link("latent", "v_j = norm(c_j), expanded by W_UV after the mix", latent)
            return InputSteps((*q, Link("absorbed", how, absorbed)), k, (v,), self.rotary, r)
        up = self.kv_up(latent, query.k_positions)[0]
        keys = torch.cat((up[..., :n], rotated.expand(self.heads, -1, -1)), -1)
        return InputSteps(
            q,
            (*k, Link("expanded", "k_j = [W_UK c_j; k_R]", keys)),
            (Link("expanded", "v_j = W_UV c_j", up[..., n:]),),
            self.rotary,
            n,
        )

    @property
    def cache_unsafe_reason(self) -> str | None:
        """A rotary that follows the length makes the remembered key stale."""
        return cache_unsafe_reason(self.rotary)

    def extra_repr(self) -> str:
        """The heads, the rank and the form."""
        sizes = f"{self.nope_dim}+{self.rotary.dim} and {self.value_dim}"
        return f"{self.heads} heads of {sizes}, kv_rank={self.kv_rank}, form={self.form!r}"


class Absorbed:
    """The absorbed form of a `Latent`: its queries taken to the latents, which are key and value of
    all heads.

    >>> latent = Latent(32, 4, Rotary(4), kv_rank=16, nope_dim=8, value_dim=8)
    >>> Absorbed(latent).shape
    ProjectionShape(H=4, G=1, D=20, E=16, memory=(20,))

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1.2.
    """

    def __init__(self, latent: Latent) -> None:
        self.latent = latent

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """q [B,H,T,r+d_rope]."""
        nope, turned = self.latent.parts(x, positions)
        w_k, _ = self.latent.up()
        return torch.cat((torch.einsum("bhtd,hdr->bhtr", nope, w_k), turned), dim=-1)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """As the latent: all forms share their caches."""
        return self.latent.remember(x, positions)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """k [B,1,S,r+d_rope] is the memory, and v [B,1,S,r] a view of it."""
        return memory[0], memory[0][..., : self.latent.kv_rank]

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """The mean latents [B,H,T,r] -> the heads [B,H,T,E]."""
        _, w_v = self.latent.up()
        return torch.einsum("bhtr,her->bhte", z, w_v)

    @property
    def shape(self) -> ProjectionShape:
        """H query heads, and one key and value head."""
        r, memory = self.latent.kv_rank, self.latent.shape.memory
        return ProjectionShape(self.latent.heads, 1, memory[0], r, memory)

    @property
    def cache_unsafe_reason(self) -> str | None:
        """As the latent's."""
        return self.latent.cache_unsafe_reason


class Naive(Latent):
    """A `Latent` that remembers what it would recall: keys and values of all heads, H (d_nope +
    d_rope + E) numbers.

    The equations read literally, and what many implementations keep. It is here for comparison; its
    form is always its own.

    >>> Naive(32, 4, Rotary(4), kv_rank=16, nope_dim=8, value_dim=8).shape.memory
    (48, 32)
    """

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """k [B,H,S,d_nope+d_rope] and v [B,H,S,E]."""
        return super().recall(super().remember(x, positions), positions)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Keys and values, as remembered."""
        k, v = memory
        return k, v

    def select_form(self, queries: int, keys: int) -> Projection:
        """Itself."""
        return self

    @property
    def shape(self) -> ProjectionShape:
        """As the latent's, but for what a token takes."""
        H, _, D, E, _ = super().shape
        return ProjectionShape(H, H, D, E, (H * D, H * E))

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """The cost of attention with cached keys and values of all heads: that of multi-head
        attention.
        """
        return SoftmaxSpec(weights, self.shape.parts, self.shape.heads, visible)
