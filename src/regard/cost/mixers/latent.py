"""Multi-head latent attention in a model: parameters, the latent that is kept, and both forms."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, TypeAlias

from regard.cost.latent import absorb_flops, absorbing_is_cheaper, expand_flops
from regard.cost.mixers.weights import Memory, Weights

Form: TypeAlias = Literal["auto", "expand", "absorb"]
"""How queries meet the latents (`regard.nn.Latent`)."""


@dataclass(frozen=True)
class Latent:
    """MLA: one latent of r numbers and one rotary key per token, for all heads.

    Attributes:
        dim, heads: M and H.
        kv_rank: r.
        nope_dim, rope_dim: dims of a query and key head without and with rotary position.
        value_dim: E.
        q_rank: of the queries' latent; None is without.
        bias: whether the two maps down and the output have one.
        form: "expand" makes keys and values of all heads from latents, "absorb" takes queries to the latents, "auto" does
            what computes less.

    >>> layer = Latent(7168, 128, 512, 128, 64, 128, q_rank=1536)  # DeepSeek-V3
    >>> layer.memory(1).per_token, layer.weights.matrices
    (576, 187105280)

    Source: DeepSeek-AI 2024 (arXiv 2405.04434), section 2.1.
    """

    dim: int
    heads: int
    kv_rank: int
    nope_dim: int
    rope_dim: int
    value_dim: int
    q_rank: int | None = None
    bias: bool = False
    form: Form = "auto"

    @property
    def name(self) -> str:
        """The latent's size says most."""
        return f"MLA {self.heads} heads, latent {self.kv_rank} + {self.rope_dim}"

    @property
    def weights(self) -> Weights:
        """Maps down and up, the output, and the norms of both latents."""
        biases = 0
        if self.bias:
            biases = (self.q_rank or 0) + self.kv_rank + self.rope_dim + self.dim
        return Weights(self.mapped + self._recalling, biases, self.kv_rank + (self.q_rank or 0))

    @property
    def _recalling(self) -> int:
        """Numbers of the matrix that makes keys and values of latents: how often it is met depends on the form."""
        return self.kv_rank * self.heads * (self.nope_dim + self.value_dim)

    @property
    def mapped(self) -> int:
        """Queries, the map down to the latent, and the output."""
        query = self.heads * (self.nope_dim + self.rope_dim)
        asked = self.dim * query if self.q_rank is None else self.q_rank * (self.dim + query)
        kept = self.dim * (self.kv_rank + self.rope_dim)
        return asked + kept + self.heads * self.value_dim * self.dim

    def memory(self, context: int) -> Memory:
        """Latents and rotary keys, side by side."""
        return Memory(((1, self.kv_rank + self.rope_dim),), context)

    def read(self, context: int) -> Memory:
        """All of it."""
        return self.memory(context)

    def decode_flops(self, context: int) -> int:
        """One token in this form."""
        return self.flops(1, context, self.form)

    def prefill_flops(self, context: int) -> int:
        """All tokens in this form."""
        return self.flops(context, context, self.form)

    def flops(self, queries: int, keys: int, form: Form) -> int:
        """FLOPs of the last queries, the matrices that make keys and values of latents included."""
        r, nope, rope, E = self.kv_rank, self.nope_dim, self.rope_dim, self.value_dim
        if form == "auto":
            cheaper = absorbing_is_cheaper(queries, keys, kv_rank=r, nope_dim=nope, value_dim=E)
            form = "absorb" if cheaper else "expand"
        count = absorb_flops if form == "absorb" else expand_flops
        return count(queries, keys, self.heads, r, nope, rope, E)
