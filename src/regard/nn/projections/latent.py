"""Projections through latents: MLA, with one latent and rotary key per token, and its relatives."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_choice
from regard.caches import Parts
from regard.cost.factored import GroupedLatentSpec
from regard.cost.latent import Form, LatentSpec, absorbing_is_cheaper
from regard.cost.softmax import SoftmaxSpec, VisibleKeys
from regard.cost.spec import ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.nn.blocks.norms import RMSNorm
from regard.nn.explainable import (
    CallWeights,
    HeadMix,
    InputSteps,
    LayerRun,
    MechanismStep,
    MechanismSteps,
    MixTerm,
    ProjectionQuery,
)
from regard.nn.projections.heads import (
    HeadProjection,
    Projection,
    ProjectionShape,
    cache_unsafe_reason,
)
from regard.nn.weights import Linear
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
        self.heads, self.head_dim = up.heads, up.head_dim

    def forward(
        self, x: Float[Tensor, "B L M"], positions: Positions | None
    ) -> Float[Tensor, "B n L d"]:
        """Map x [B,L,M] to heads [B,n,L,d]."""
        q: Tensor = self.up(self.latent(x), positions)
        return q

    def latent(self, x: Float[Tensor, "B L M"]) -> Float[Tensor, "B L r"]:
        """Return the latents norm(W x) [B,L,r]."""
        c: Tensor = self.norm(self.down(x))
        return c

    def explain_steps(
        self, x: Tensor, positions: Positions, letter: Literal["q", "k", "v"]
    ) -> MechanismSteps:
        """Compute the heads of the latent and each step on them, for an explanation."""
        first, *others = self.up.explain_steps(self.latent(x), positions, letter)
        index, upper = "i" if letter == "q" else "j", letter.upper()
        equation = f"{letter}_{index} = W_U{upper} norm(W_D{upper} x_{index})"
        return (first._replace(equation=equation), *others)

    def extra_repr(self) -> str:
        """Return the number of heads and the head dim."""
        return self.up.extra_repr()


class LatentHeads(Projection, nn.Module):
    """What projections through latents share: queries with and without positions, and two forms."""

    has_forms = True  # an expanded and an absorbed one

    def __init__(
        self,
        dim: int,
        heads: int,
        rotary: Rotary,
        form: Form,
        *,
        kv_rank: int,
        nope_dim: int,
        value_dim: int,
        q_rank: int | None,
        bias: bool = False,
        eps: float,
        **counts: int,
    ) -> None:
        super().__init__()
        sizes = {"kv_rank": kv_rank, "nope_dim": nope_dim, "value_dim": value_dim, "q_rank": q_rank}
        for name, size in {"dim": dim, "heads": heads, **counts, **sizes}.items():
            if size is not None and size < 1:
                alternative = "; None computes queries without a latent" if name == "q_rank" else ""
                raise ArgumentError(f"{name} is {size}; it must be at least 1{alternative}")
        check_choice("form", form, get_args(Form))
        self.heads, self.rotary, self.form = heads, rotary, form
        self.kv_rank, self.nope_dim, self.value_dim = kv_rank, nope_dim, value_dim
        up = HeadProjection(dim if q_rank is None else q_rank, heads, nope_dim + rotary.dim)
        self.q: HeadProjection | LowRankProjection = (
            up if q_rank is None else LowRankProjection(dim, q_rank, up, bias=bias, eps=eps)
        )

    def up_maps(self) -> list[nn.Module]:
        """Return the maps from latents to the keys and values of heads."""
        raise NotImplementedError

    def absorbed_memory(self, memory: Parts) -> tuple[Tensor, Tensor]:
        """Return the keys and the values of the absorbed form, with a head for each latent."""
        raise NotImplementedError

    def parts(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Compute the plain part [B,H,T,d_nope] and the rotated part [B,H,T,d_rope] of queries."""
        q = self.q(x, positions)
        return q[..., : self.nope_dim], self.rotary(q[..., self.nope_dim :], positions)

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """Return the queries [B,H,T,d_nope+d_rope] of hidden states x."""
        return torch.cat(self.parts(x, positions), dim=-1)

    def select_form(self, queries: int, keys: int) -> Projection:
        """Return this projection (expanded), or its `AbsorbedLatentProjection`."""
        absorb = self.form == "absorb"
        # another layer in its place, such as torch's quantized one, may have no matrix to absorb
        if self.form == "auto" and all(isinstance(m.weight, Tensor) for m in self.up_maps()):
            absorb = absorbing_is_cheaper(
                queries,
                keys,
                kv_rank=self.kv_rank,
                nope_dim=self.nope_dim,
                value_dim=self.value_dim,
            )
        return AbsorbedLatentProjection(self) if absorb else self

    def up(self) -> tuple[Float[Tensor, "H d r"], Float[Tensor, "H E r"]]:
        """Return the matrices that expand latents, W_uk [H,d_nope,r] and W_uv [H,E,r]."""
        weights: list[object] = [m.weight for m in self.up_maps()]
        tensors = [w for w in weights if isinstance(w, Tensor)]
        if len(tensors) < len(weights):
            raise ArgumentError(
                f"the map from latents to heads is a {type(self.up_maps()[0]).__name__} without a "
                f"weight tensor, so that it cannot be absorbed; build the {type(self).__name__} "
                'with form="expand"'
            )
        heads = [torch.unflatten(w, 0, (-1, self.nope_dim + self.value_dim)) for w in tensors]
        weight = heads[0] if len(heads) == 1 else torch.cat(heads)  # [H,d_nope+E,r]
        return weight[:, : self.nope_dim], weight[:, self.nope_dim :]

    def _spec(self, weights: ParameterCounts) -> dict[str, Any]:
        """Return the weights, with the up maps counted separately, and the sizes of the cost."""
        r, n, E, shape = self.kv_rank, self.nope_dim, self.value_dim, self.shape
        separate = weights.counted_separately + r * shape.H * (n + E)
        weights = replace(weights, counted_separately=separate)
        sizes = {"kv_rank": r, "nope_dim": n, "rope_dim": self.rotary.dim, "value_dim": E}
        return {"weights": weights, "parts": shape.parts, "heads": shape.H, **sizes}

    @property
    def cache_unsafe_reason(self) -> str | None:  # type: ignore[override]
        """Why a cache must not store the rotated key; None for fixed frequencies."""
        return cache_unsafe_reason(self.rotary)


class AbsorbedLatentProjection(Projection):
    """The absorbed form: queries are multiplied by the key map, and latents are key/value heads.

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1.2.
    """

    def __init__(self, project: LatentHeads) -> None:
        self.project = project

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """Return the absorbed queries [B,H,T,r+d_rope]."""
        nope, rotated = self.project.parts(x, positions)
        w_k, _ = self.project.up()
        return torch.cat((torch.einsum("bhtd,hdr->bhtr", nope, w_k), rotated), dim=-1)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the same memory as the expanded form, so that both can share a cache."""
        return self.project.remember(x, positions)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return latents and rotary keys as keys [B,n,S,r+d_rope], latents as values [B,n,S,r]."""
        return self.project.absorbed_memory(memory)

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Expand the weighted means of the latents [B,H,T,r] to heads [B,H,T,E]."""
        _, w_v = self.project.up()
        return self.project.postprocess(torch.einsum("bhtr,her->bhte", z, w_v), x)

    @property
    def shape(self) -> ProjectionShape:
        """H query heads, and one key and value head for each latent."""
        r, own = self.project.kv_rank, self.project.shape
        G = len(self.project.up_maps())
        return ProjectionShape(own.H, G, r + self.project.rotary.dim, r, own.memory)

    @property
    def cache_unsafe_reason(self) -> str | None:  # type: ignore[override]
        """The reason why a cache must not store the memory of the projection, or None."""
        return self.project.cache_unsafe_reason


class LatentProjection(LatentHeads):
    """The projection of multi-head latent attention (MLA), through low-rank latents.

    c_q = norm(W_dq x);  [q_c; q_r]_h = W_uq,h c_q;  q_h = [q_c; R_t q_r]_h
    [c; k_r] = W_dkv x;  stored: m = [norm(c); R_s k_r], r + d_rope values in one head
    [k_c; v]_h = W_ukv,h norm(c);  k_h = [k_c,h; R_s k_r], the rotary key shared by all heads

    There are two forms, equal in exact arithmetic: "expand" computes these equations, "absorb"
    multiplies the queries by W_uk, so that the stored latents are the only key/value head:

    q_h^T k_h = [W_uk,h^T q_c; R_t q_r]_h^T m,  z_h = W_uv,h sum_s p_hs norm(c_s)

    Args:
        dim: the model dim M.
        heads: the number of heads H.
        rotary: the rotary embedding, of d_rope dims; DeepSeek's layout is "interleaved".
        kv_rank: the size r of the latent of keys and values.
        nope_dim: the dims of a query and key head without rotary positions, d_nope.
        value_dim: the size of a value head, E.
        q_rank: the size of the latent of queries; None: none, as in DeepSeek-V2-Lite.
        bias: whether the two maps to the latents have a bias.
        eps: the epsilon of the two norms.
        form: "expand", "absorb" or "auto", the one with fewer FLOPs.

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

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), equations 37 to 47, and section 2.1.2.
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
        sizes: Any = {"kv_rank": kv_rank, "nope_dim": nope_dim, "value_dim": value_dim}
        super().__init__(dim, heads, rotary, form, **sizes, q_rank=q_rank, bias=bias, eps=eps)
        self.kv_down = Linear(dim, kv_rank + rotary.dim, bias=bias)
        self.kv_norm = RMSNorm(kv_rank, eps=eps)
        self.kv_up = HeadProjection(kv_rank, heads, nope_dim + value_dim)
        self.kv_up.linear.reads_whole_weight = True  # `up` reads it for every absorbed query

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return one part [B,1,S,r+d_rope]: the normalized latent and the rotated key."""
        c, rotated = self.kv_down(x).split((self.kv_rank, self.rotary.dim), dim=-1)
        rotated = self.rotary(rotated[:, None], positions)
        return (torch.cat((self.kv_norm(c)[:, None], rotated), dim=-1),)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return the expanded keys [B,H,S,d_nope+d_rope] and values [B,H,S,E]."""
        c, rotated = memory[0].split_with_sizes((self.kv_rank, self.rotary.dim), dim=-1)
        nope, v = self.kv_up(c[:, 0], positions).split((self.nope_dim, self.value_dim), dim=-1)
        return torch.cat((nope, rotated.expand(-1, self.heads, -1, -1)), dim=-1), v

    def up_maps(self) -> list[nn.Module]:
        """Return the map from the latent to the keys and values of all heads."""
        return [self.kv_up.linear]

    def absorbed_memory(self, memory: Parts) -> tuple[Tensor, Tensor]:
        """Return the memory as keys [B,1,S,r+d_rope], and its latents as values [B,1,S,r]."""
        return memory[0], memory[0][..., : self.kv_rank]

    @property
    def shape(self) -> ProjectionShape:
        """H heads of d_nope + d_rope and of E; a cache stores r + d_rope values per token."""
        H, D = self.heads, self.nope_dim + self.rotary.dim
        return ProjectionShape(H, H, D, self.value_dim, (self.kv_rank + self.rotary.dim,))

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """Return the cost of attention through this projection, in the cheaper form."""
        return LatentSpec(**self._spec(weights), form=self.form, visible=visible)

    @property
    def scale(self) -> float:
        """The factor on the scores: 1/sqrt(d_nope + d_rope) times the rotary's softmax factor."""
        return float(self.shape.D**-0.5 * self.rotary.softmax_factor)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps through the latents, in the form of the recorded head dim."""
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
                (*q, MechanismStep("absorbed", equation, absorbed)), k, (v,), self.rotary
            )
        up = self.kv_up(latent, query.k_positions)[0]
        keys = torch.cat((up[..., :n], rotated.expand(self.heads, -1, -1)), -1)
        return InputSteps(
            q,
            (*k, MechanismStep("expanded", "k_j = [W_UK c_j; k_R]", keys)),
            (MechanismStep("expanded", "v_j = W_UV c_j", up[..., n:]),),
            self.rotary,
        )

    def extra_repr(self) -> str:
        """Return the heads, their dims, the rank and the form."""
        sizes = f"{self.nope_dim}+{self.rotary.dim} and {self.value_dim}"
        return (
            f"{plural(self.heads, 'head')} of {sizes}, kv_rank={self.kv_rank}, form={self.form!r}"
        )


class NaiveLatentProjection(LatentProjection):
    """A `LatentProjection` that caches expanded keys and values, for comparison."""

    has_forms = False

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the expanded keys [B,H,S,d_nope+d_rope] and values [B,H,S,E]."""
        return super().recall(super().remember(x, positions), positions)

    recall = Projection.recall

    def select_form(self, queries: int, keys: int) -> Projection:
        """Return this projection, which has only one form."""
        return self

    @property
    def shape(self) -> ProjectionShape:
        """The sizes of the expanded form; a cache stores the keys and values of all heads."""
        H, _, D, E, _ = super().shape
        return ProjectionShape(H, H, D, E, (H * D, H * E))

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """Return the cost of attention with cached keys and values of all heads."""
        return SoftmaxSpec(weights, self.shape.parts, self.shape.heads, visible)


class GroupedLatentProjection(LatentHeads):
    """The projection of latent attention with n latents per token and b branches.

    [c_1; ...; c_n; k_r] = W_dkv x;  stored: norm(c_i) of r values each, and R_s k_r
    [k_c; v]_jh = W_ukv,jh norm(c_i) for branch j and head h, with i = (j H + h) // (b H / n)
    k_jh = [k_c,jh; R_s k_r];  z_h = 1/sqrt(b) sum_j softmax(q_h k_jh^T scale) v_jh

    With one branch, latent i serves H / n heads (grouped latent attention); with n branches, every
    latent serves all heads (MLRA-4); with one latent it is MLA, with its two forms.

    Source: Zadouri et al. 2025 (arXiv 2505.21487), section 3.3.2; branches: Liu et al. 2026 (arXiv
    2603.02188), and its published code.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        rotary: Rotary,
        *,
        latents: int,
        branches: int = 1,
        kv_rank: int,
        nope_dim: int,
        value_dim: int,
        q_rank: int | None = None,
        eps: float = 1e-6,
        form: Form = "auto",
    ) -> None:
        sizes: Any = {"kv_rank": kv_rank, "nope_dim": nope_dim, "value_dim": value_dim}
        sizes |= {"latents": latents, "branches": branches}
        super().__init__(dim, heads, rotary, form, **sizes, q_rank=q_rank, eps=eps)
        if latents % branches or (branches * heads) % latents:
            raise ArgumentError(
                f"latents is {latents} for {branches} x {plural(heads, 'head')}; "
                "branches must divide latents, and latents must divide branches * heads"
            )
        self.latents, self.branches = latents, branches
        self.kv_down = Linear(dim, latents * kv_rank + rotary.dim, bias=False)
        self.kv_norms = nn.ModuleList(RMSNorm(kv_rank, eps=eps) for _ in range(latents))
        each = branches * heads // latents * (nope_dim + value_dim)
        self.kv_ups = nn.ModuleList(Linear(kv_rank, each, bias=False) for _ in range(latents))

    def parts(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Compute the two parts of the queries, repeated for the branches."""
        nope, rotated = super().parts(x, positions)
        if self.branches == 1:
            return nope, rotated
        return nope.repeat(1, self.branches, 1, 1), rotated.repeat(1, self.branches, 1, 1)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the latents in one head [B,1,S,n*r], and the rotated key [B,1,S,d_rope]."""
        c, rotated = self.kv_down(x).split((self.latents * self.kv_rank, self.rotary.dim), dim=-1)
        c = torch.unflatten(c, -1, (self.latents, self.kv_rank)).unbind(-2)  # n times [B,S,r]
        normed = [norm(y) for norm, y in zip(self.kv_norms, c, strict=True)]
        return torch.cat(normed, dim=-1)[:, None], self.rotary(rotated[:, None], positions)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return the expanded keys [B,bH,S,d_nope+d_rope] and values [B,bH,S,E]."""
        c, rotated = self.latents_of(memory), memory[1]
        width = self.nope_dim + self.value_dim
        up = [torch.unflatten(m(c[:, i]), -1, (-1, width)) for i, m in enumerate(self.kv_ups)]
        heads = torch.cat(up, dim=2).transpose(1, 2)  # [B,S,bH,d_nope+E] -> [B,bH,S,d_nope+E]
        nope, v = heads.split((self.nope_dim, self.value_dim), dim=-1)
        rotated = rotated.expand(-1, self.branches * self.heads, -1, -1)
        return torch.cat((nope, rotated), dim=-1), v

    def latents_of(self, memory: Parts) -> Float[Tensor, "B n S r"]:
        """Return the stored latents, each in a head of its own."""
        return torch.unflatten(memory[0][:, 0], -1, (self.latents, -1)).transpose(1, 2)

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Add the branches: [B,bH,T,E] -> [B,H,T,E], times 1/sqrt(b)."""
        if self.branches == 1:
            return z
        total: Tensor = torch.unflatten(z, 1, (self.branches, self.heads)).sum(1)  # [B,H,T,E]
        return total * float(self.branches**-0.5)

    def up_maps(self) -> list[nn.Module]:
        """Return the map of each latent to the heads that it serves."""
        return list(self.kv_ups)

    def absorbed_memory(self, memory: Parts) -> tuple[Tensor, Tensor]:
        """Return keys [B,n,S,r+d_rope], joined, and the latents as values [B,n,S,r]."""
        c, rotated = self.latents_of(memory), memory[1]
        return torch.cat((c, rotated.expand(-1, c.shape[1], -1, -1)), dim=-1), c

    @property
    def shape(self) -> ProjectionShape:
        """b H heads of d_nope + d_rope and of E; a cache stores n r + d_rope values per token."""
        H, D = self.branches * self.heads, self.nope_dim + self.rotary.dim
        memory = (self.latents * self.kv_rank, self.rotary.dim)
        return ProjectionShape(H, H, D, self.value_dim, memory)

    @property
    def scale(self) -> float:
        """The factor on the scores, 1/sqrt(d_nope + d_rope)."""
        return float(self.shape.D**-0.5)

    def spec(self, weights: ParameterCounts, visible: VisibleKeys) -> Spec:
        """Return the cost of attention through this projection, in the cheaper form."""
        own: Any = {"form": self.form, "visible": visible, "latents": self.latents}
        return GroupedLatentSpec(**self._spec(weights), **own)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps through the latents, in the form of the recorded head dim."""
        x, positions, r, n = query.x, query.positions, self.kv_rank, self.nope_dim
        nope, rotated = self.parts(x, positions)
        q = MechanismStep(
            "rotated",
            "q_i = [q_C; R(p) q_R], once for each branch",
            torch.cat((nope, rotated), -1)[0],
        )
        memory = self.remember(query.memory, query.k_positions)
        latent = MechanismStep(
            "latent", "norm(c_j) of each latent, which a cache stores", memory[0][0]
        )
        if query.head_dim == r + self.rotary.dim != n + self.rotary.dim:
            form = AbsorbedLatentProjection(self)
            k, v = form.recall(memory, query.k_positions)
            absorbed = form.query(x, positions)[0]
            equation = "q_i ← [W_UKᵀ q_C; q_R], a query for the latents"
            key = MechanismStep("remembered", "m_j = [norm(c_j); R(p) k_R]", k[0])
            value = MechanismStep("latent", "v_j = norm(c_j), expanded by W_UV after the mix", v[0])
            steps = (q, MechanismStep("absorbed", equation, absorbed))
            return InputSteps(steps, (latent, key), (value,), self.rotary)
        k, v = self.recall(memory, query.k_positions)
        key = MechanismStep("expanded", "k_j = [W_UK c_j; R(p) k_R]", k[0])
        value = MechanismStep("expanded", "v_j = W_UV c_j", v[0])
        return InputSteps((q,), (latent, key), (latent, value), self.rotary)

    def explain_mix(
        self, run: LayerRun, calls: Sequence[CallWeights], call_index: int, head: int, row: int
    ) -> HeadMix | None:
        """Return the sum of the branches as a mix of rows with separate values; None with one."""
        if self.branches == 1:
            return None
        weights, H = calls[call_index].weights, self.heads
        terms = tuple(
            MixTerm(f"head {h}", self.branches**-0.5, float(weights[h].sum()), h == head)
            for h in range(head % H, self.branches * H, H)
        )
        return HeadMix(
            f"the sum of {self.branches} branches with separate keys and values, each times "
            f"1/sqrt({self.branches}); a weight is a share of its branch, not of the total",
            terms,
            None,
        )

    def extra_repr(self) -> str:
        """Return the heads, their dims, the latents and the form."""
        sizes = f"{self.nope_dim}+{self.rotary.dim} and {self.value_dim}"
        return (
            f"{plural(self.heads, 'head')} of {sizes}, latents={self.latents} of {self.kv_rank}, "
            f"branches={self.branches}, form={self.form!r}"
        )
