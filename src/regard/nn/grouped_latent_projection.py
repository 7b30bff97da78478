"""Latent attention with several latents per token: each latent serves some of the heads (grouped
latent attention), or all heads in branches whose results are added (MLRA).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import get_args

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Parts
from regard.cost.factored import GroupedLatentSpec
from regard.cost.latent import Form, absorbing_is_cheaper
from regard.cost.softmax import VisibleKeys
from regard.cost.spec import ParameterCounts, Spec
from regard.errors import ArgumentError
from regard.nn.explainable import (
    CallWeights,
    HeadMix,
    InputSteps,
    LayerRun,
    MechanismStep,
    MixTerm,
    ProjectionQuery,
)
from regard.nn.latent_projection import LowRankProjection
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


class GroupedLatentProjection(Projection, nn.Module):
    """The projection of latent attention with n latents per token and b branches. A cache stores
    the latents and one rotary key.

    [c_1; ...; c_n; k_r] = W_dkv x;  stored: norm(c_i) of r values each, and R_s k_r
    [k_c; v]_jh = W_ukv,jh norm(c_i) for branch j and head h, with i = (j H + h) // (b H / n)
    k_jh = [k_c,jh; R_s k_r];  z_h = 1/sqrt(b) sum_j softmax(q_h k_jh^T scale) v_jh

    With n latents and one branch, latent i serves H / n heads (grouped latent attention). With n
    branches, every latent serves all heads (MLRA-4). With one latent it is MLA. As there, the form
    "expand" computes keys and values of each head, and "absorb" multiplies the queries by the key
    map; the n latents then serve as key/value heads.

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
        super().__init__()
        sizes = {"dim": dim, "heads": heads, "latents": latents, "branches": branches}
        sizes |= {"kv_rank": kv_rank, "nope_dim": nope_dim, "value_dim": value_dim}
        for name, size in {**sizes, **({} if q_rank is None else {"q_rank": q_rank})}.items():
            if size < 1:
                raise ArgumentError(f"{name} is {size}; it must be at least 1")
        if latents % branches or (branches * heads) % latents:
            raise ArgumentError(
                f"latents is {latents} for {branches} x {plural(heads, 'head')}; "
                "branches must divide latents, and latents must divide branches * heads"
            )
        if form not in get_args(Form):
            raise ArgumentError(f"form is {form!r}; it must be one of {', '.join(get_args(Form))}")
        self.heads, self.rotary, self.form = heads, rotary, form
        self.latents, self.branches = latents, branches
        self.kv_rank, self.nope_dim, self.value_dim = kv_rank, nope_dim, value_dim
        up = HeadProjection(dim if q_rank is None else q_rank, heads, nope_dim + rotary.dim)
        self.q = up if q_rank is None else LowRankProjection(dim, q_rank, up, eps=eps)
        self.kv_down = Linear(dim, latents * kv_rank + rotary.dim, bias=False)
        self.kv_norms = nn.ModuleList(RMSNorm(kv_rank, eps=eps) for _ in range(latents))
        each = branches * heads // latents * (nope_dim + value_dim)
        self.kv_ups = nn.ModuleList(Linear(kv_rank, each, bias=False) for _ in range(latents))
        self.cache_unsafe_reason = cache_unsafe_reason(rotary)

    def parts(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Compute the two parts of the queries, repeated for the branches."""
        q = self.q(x, positions)
        nope, rotated = q[..., : self.nope_dim], self.rotary(q[..., self.nope_dim :], positions)
        if self.branches == 1:
            return nope, rotated
        return nope.repeat(1, self.branches, 1, 1), rotated.repeat(1, self.branches, 1, 1)

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """Return the queries [B,bH,T,d_nope+d_rope] of hidden states x."""
        return torch.cat(self.parts(x, positions), dim=-1)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the normalised latents in one head [B,1,S,n*r], and the rotated key
        [B,1,S,d_rope].
        """
        c, rotated = self.kv_down(x).split((self.latents * self.kv_rank, self.rotary.dim), dim=-1)
        c = torch.unflatten(c, -1, (self.latents, self.kv_rank)).unbind(-2)
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
        total: Tensor = torch.unflatten(z, 1, (self.branches, self.heads)).sum(1)
        return total * float(self.branches**-0.5)

    @property
    def has_forms(self) -> bool:
        """True: there are an expanded and an absorbed form."""
        return True

    def select_form(self, queries: int, keys: int) -> Projection:
        """Return the form for a number of queries and keys."""
        absorb = self.form == "absorb"
        # another layer in its place, such as torch's quantised one, may have no matrix to absorb
        if self.form == "auto" and all(isinstance(m.weight, Tensor) for m in self.kv_ups):
            absorb = absorbing_is_cheaper(
                queries,
                keys,
                kv_rank=self.kv_rank,
                nope_dim=self.nope_dim,
                value_dim=self.value_dim,
            )
        return AbsorbedGroupedLatents(self) if absorb else self

    def up(self) -> tuple[Float[Tensor, "H d r"], Float[Tensor, "H E r"]]:
        """Return both parts of the matrices that expand latents, for all heads and branches."""
        weights: list[object] = [m.weight for m in self.kv_ups]
        tensors = [w for w in weights if isinstance(w, Tensor)]
        if len(tensors) < self.latents:
            raise ArgumentError(
                f"kv_ups has a {type(self.kv_ups[0]).__name__} without a weight tensor, so that it "
                'cannot be absorbed; build the GroupedLatentProjection with form="expand"'
            )
        width = self.nope_dim + self.value_dim
        weight = torch.cat([torch.unflatten(w, 0, (-1, width)) for w in tensors])
        return weight[:, : self.nope_dim], weight[:, self.nope_dim :]

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
        """Return the cost of attention through this projection."""
        H = self.branches * self.heads
        separate = self.kv_rank * H * (self.nope_dim + self.value_dim)
        return GroupedLatentSpec(
            replace(weights, counted_separately=weights.counted_separately + separate),
            self.shape.parts,
            H,
            self.kv_rank,
            self.nope_dim,
            self.rotary.dim,
            self.value_dim,
            self.form,
            visible,
            latents=self.latents,
        )

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of queries, keys and values through their latents, in the form whose
        head dim the recorded keys have.
        """
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
            form = AbsorbedGroupedLatents(self)
            k, v = form.recall(memory, query.k_positions)
            absorbed = form.query(x, positions)[0]
            equation = "q_i ← [W_UKᵀ q_C; q_R], a query for the latents"
            key = MechanismStep("remembered", "m_j = [norm(c_j); R(p) k_R]", k[0])
            value = MechanismStep("latent", "v_j = norm(c_j), expanded by W_UV after the mix", v[0])
            steps = (q, MechanismStep("absorbed", equation, absorbed))
            return InputSteps(steps, (latent, key), (value,), self.rotary, r)
        k, v = self.recall(memory, query.k_positions)
        key = MechanismStep("expanded", "k_j = [W_UK c_j; R(p) k_R]", k[0])
        value = MechanismStep("expanded", "v_j = W_UV c_j", v[0])
        return InputSteps((q,), (latent, key), (latent, value), self.rotary, n)

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


class AbsorbedGroupedLatents(Projection):
    """The absorbed form of a `GroupedLatentProjection`: the queries are multiplied by the key map,
    and each stored latent is the key/value head of the heads that it serves.

    Source: Zadouri et al. 2025 (arXiv 2505.21487), section 3.3.2.
    """

    def __init__(self, project: GroupedLatentProjection) -> None:
        self.project = project

    def query(self, x: Tensor, positions: Positions) -> Tensor:
        """Return the absorbed queries [B,bH,T,r+d_rope]."""
        nope, rotated = self.project.parts(x, positions)
        w_k, _ = self.project.up()
        return torch.cat((torch.einsum("bhtd,hdr->bhtr", nope, w_k), rotated), dim=-1)

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the same memory as the expanded form, so that both can share a cache."""
        return self.project.remember(x, positions)

    def recall(self, memory: Parts, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return keys [B,n,S,r+d_rope], joined from both parts, and the latents as values
        [B,n,S,r].
        """
        c, rotated = self.project.latents_of(memory), memory[1]
        return torch.cat((c, rotated.expand(-1, c.shape[1], -1, -1)), dim=-1), c

    def postprocess(self, z: Tensor, x: Tensor) -> Tensor:
        """Expand the weighted means of the latents [B,bH,T,r] and add the branches: [B,H,T,E]."""
        _, w_v = self.project.up()
        return self.project.postprocess(torch.einsum("bhtr,her->bhte", z, w_v), x)

    @property
    def shape(self) -> ProjectionShape:
        """b H query heads, and one key and value head for each latent."""
        project = self.project
        H, r, D = project.branches * project.heads, project.kv_rank, project.rotary.dim
        return ProjectionShape(H, project.latents, r + D, r, project.shape.memory)

    @property
    def cache_unsafe_reason(self) -> str | None:  # type: ignore[override]
        """The reason why a cache must not store the memory of the projection, or None."""
        return self.project.cache_unsafe_reason
