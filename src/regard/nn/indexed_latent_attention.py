"""DeepSeek sparse attention on latents: multi-head latent attention whose keys a lightning indexer
selects from the latent of the queries.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.cost.latent import IndexedLatentSpec, LatentSpec
from regard.cost.softmax import ALL_EARLIER_KEYS
from regard.errors import ArgumentError
from regard.nn.latent_projection import LatentProjection, LowRankProjection
from regard.nn.mixer import count_weights
from regard.nn.projections import HeadProjection
from regard.nn.selected_attention import Indexer, SelectedAttention
from regard.span import Positions


class LatentIndexer(Indexer):
    """The lightning indexer beside latent attention: its queries are computed from the latent of
    the attention's queries, its key and its weights from x.

    c_q = norm(W_dq x);  q_j = W_j c_q;  I_ts = sum_j w_tj relu(q_tj . k_s / sqrt(d))

    Args:
        weight: a linear map [B,T,M] -> [B,T,J], computed in its own dtype.
        latent: the `LowRankProjection` of the attention's queries. Its parameters belong to the
            attention: they are neither stored nor trained with the indexer.

    >>> latent = LowRankProjection(8, 6, HeadProjection(6, 2, 3))
    >>> q, k, weight = HeadProjection(6, 4, 2), HeadProjection(8, 1, 2), nn.Linear(8, 4, bias=False)
    >>> [name for name, _ in LatentIndexer(q, k, weight, latent, topk=3).named_parameters()]
    ['q.linear.weight', 'k.linear.weight', 'weight.weight']

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2, and its published code.
    """

    def __init__(
        self,
        q: HeadProjection,
        k: HeadProjection,
        weight: nn.Linear,
        latent: LowRankProjection,
        *,
        topk: int,
    ) -> None:
        super().__init__(q, k, weight, topk=topk)
        self._latent = (latent,)  # in a tuple, because a module would be registered here, too

    def parts(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Compute the index queries from the latent, and their weights from x, as in
        `Indexer.parts`.
        """
        (latent,) = self._latent
        with torch.no_grad():  # the loss of the indexer trains only the indexer
            c = latent.norm(latent.down(x))
        q = self.q(c, positions) * self.q.head_dim**-0.5
        return q, self.weight(x.to(self.weight.weight.dtype)) * self.q.heads**-0.5


class IndexedLatentAttention(SelectedAttention):
    """Multi-head latent attention to the keys that an indexer selects (DSA).

    Args:
        output: a module [B,T,H*E] -> [B,T,M].

    >>> from regard.positions import Rotary
    >>> project = LatentProjection(8, 2, Rotary(2), kv_rank=4, nope_dim=2, value_dim=4, q_rank=6)
    >>> q, k, weight = HeadProjection(6, 4, 2), HeadProjection(8, 1, 2), nn.Linear(8, 4, bias=False)
    >>> selector = LatentIndexer(q, k, weight, project.q, topk=3)
    >>> layer = IndexedLatentAttention(project, selector, nn.Linear(8, 8))
    >>> layer(torch.zeros(1, 9, 8)).shape, layer.spec.cached(100).values_per_token
    (torch.Size([1, 9, 8]), 8)

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2.
    """

    def __init__(
        self,
        project: LatentProjection,
        selector: Indexer,
        output: nn.Module,
        *,
        scale: float | None = None,
    ) -> None:
        if not isinstance(project, LatentProjection) or not isinstance(selector, Indexer):
            raise ArgumentError(
                f"project is {type(project).__name__} and selector {type(selector).__name__}; they "
                "must be a LatentProjection and an Indexer: use SelectedAttention for others"
            )
        super().__init__(project, selector, output, scale=scale)

    @property
    def spec(self) -> IndexedLatentSpec:
        """The cost of this layer in the form "absorb"; a cache stores latents and index keys."""
        project, selector = self.project, self.selector
        assert isinstance(project, LatentProjection)
        assert isinstance(selector, Indexer)
        latent = project.spec(count_weights(self), ALL_EARLIER_KEYS)
        assert isinstance(latent, LatentSpec)
        return IndexedLatentSpec(
            latent.weights,
            (*latent.parts, (1, selector.k.head_dim)),
            latent.heads,
            latent.kv_rank,
            latent.nope_dim,
            latent.rope_dim,
            latent.value_dim,
            "absorb",
            selection=selector.spec,
        )
