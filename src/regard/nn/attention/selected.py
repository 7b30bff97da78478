"""Attention to the keys that a selector chooses for each query: MoBA, Quest, MSA, DSA, QSA."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import BoundedPages, Cache, Growing, Parts
from regard.caches.cross_layer import split_first_values
from regard.cost import Description
from regard.cost.latent import IndexedLatentSpec, index_parts
from regard.cost.selected import (
    BlockMaximumSelection,
    BlockSelection,
    IndexSelection,
    KeySelection,
    PageSelection,
    PooledSelection,
    SelectedSpec,
)
from regard.cost.softmax import ALL_EARLIER_KEYS
from regard.cost.spec import Spec
from regard.errors import ArgumentError
from regard.masks import Causal, Mask
from regard.nn.attention.attention import Places
from regard.nn.attention.compressed import BlockPooling
from regard.nn.mixer import Mixer, count_weights
from regard.nn.projections.heads import HeadProjection, Projection, check_adds_no_bias
from regard.nn.projections.latent import LatentProjection, LowRankProjection
from regard.ops.selection.best_blocks import (
    PageBounds,
    block_maximum_mask,
    check_block_sizes,
    check_sizes,
    closed_blocks_mask,
    moba_mask,
    quest_mask,
)
from regard.ops.selection.lightning_indexer import (
    check_topk,
    index_mask,
    index_scores,
    indexer_loss,
)
from regard.ops.selection.position_blocks import block_layout
from regard.ops.softmax import attend, attention_weights
from regard.span import Positions, Span, slot_count
from regard.tracing import tap
from regard.units import plural


class KeySelector(nn.Module):
    """Base class of the selectors, which choose the keys that each query attends to."""

    topk: int

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the parts that a cache stores for this selector, besides keys and values."""
        return ()

    @abstractmethod
    def choose(self, q: Tensor, k: Tensor, x: Tensor, memory: Parts, places: Places) -> Mask:
        """Return the mask of the keys that each query attends to."""

    @property
    @abstractmethod
    def spec(self) -> KeySelection:
        """The cost of the selection, and the number of selected keys."""

    def extra_repr(self) -> str:
        """Return the number of keys, or of blocks, per query."""
        return f"topk={self.topk}"


class EarlierChoice(KeySelector):
    """The `topk` keys that the last layer before with a selector of its own chose, in a `Decoder`.

    Source: Zhipu AI 2026 (GLM-5.2), by its code in transformers, `indexer_types`.
    """

    def __init__(self, topk: int) -> None:
        super().__init__()
        check_topk(topk)
        self.topk = topk

    def choose(self, q: Tensor, k: Tensor, x: Tensor, memory: Parts, places: Places) -> Mask:
        """Raise, because no earlier layer has chosen."""
        raise ArgumentError(
            "a layer reads the keys that an earlier one chose, and none has in this call; call "
            "the Decoder, whose first such layer must have an indexer, with passes_choice=True"
        )

    @property
    def spec(self) -> IndexSelection:
        """The number of chosen keys, for the cost: no heads score them."""
        return IndexSelection(0, 0, self.topk)


class IndexHeads(KeySelector):
    """Base class of the selectors with heads of their own, of which a cache stores one key."""

    def __init__(self, q: HeadProjection, k: HeadProjection) -> None:
        super().__init__()
        self.q, self.k = q, k

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the index keys [B,1,S,d]."""
        return (self.k(x, positions),)


class MoBA(KeySelector):
    """The selector of mixture of block attention: its own block, and the past blocks whose mean key
    has the largest product with the query (`regard.ops.selection.moba_mask`).

    Source: Lu et al. 2025 (arXiv 2502.13189), section 2.2.
    """

    def __init__(self, size: int, topk: int) -> None:
        super().__init__()
        check_sizes("MoBA", size, topk, "block")
        self.size, self.topk = size, topk

    def choose(self, q: Tensor, k: Tensor, x: Tensor, memory: Parts, places: Places) -> Mask:
        """Return the mask of the chosen blocks."""
        return moba_mask(q, k, size=self.size, topk=self.topk, **places._asdict())

    @property
    def spec(self) -> BlockSelection:
        """The block size and the number of blocks, for the cost."""
        return BlockSelection(self.size, self.topk)

    def extra_repr(self) -> str:
        """Return the block size and the number of blocks."""
        return f"blocks of {self.size}, topk={self.topk}"


class Indexer(IndexHeads):
    """The lightning indexer of DeepSeek-V3.2: the topk keys by scores of small heads.

    I_ts = sum_j w_tj relu(q_tj . k_s / sqrt(d)),  w_t = W_w x_t / sqrt(J)

    No gradient passes through the choice, so `indexer_losses` trains the indexer. A cache stores
    its one key of dim d beside the memory of the projection.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2, and its published code.
    """

    def __init__(
        self, q: HeadProjection, k: HeadProjection, weight: nn.Linear, *, topk: int
    ) -> None:
        super().__init__(q, k)
        check_topk(topk)
        if k.heads != 1 or q.head_dim != k.head_dim or weight.out_features != q.heads:
            raise ArgumentError(
                f"index q is {q.extra_repr()}, k is {k.extra_repr()}, weight has "
                f"out_features={weight.out_features}; k must be 1 head of {q.head_dim}, and weight "
                f"must have out_features={q.heads}"
            )
        self.weight, self.topk = weight, topk

    def parts(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Compute the index queries and their weights."""
        q = self.q(x, positions) * self.q.head_dim**-0.5
        return q, self.weight(x) * self.q.heads**-0.5

    def choose(self, q: Tensor, k: Tensor, x: Tensor, memory: Parts, places: Places) -> Mask:
        """Return the mask of the chosen keys."""
        with torch.no_grad():
            index_q, weight = self.parts(x, places.q_positions)
        return index_mask(index_q, memory[0], weight, topk=self.topk, **places._asdict())

    @property
    def spec(self) -> IndexSelection:
        """The sizes of the index heads and the number of chosen keys, for the cost."""
        return IndexSelection(self.q.heads, self.q.head_dim, self.topk)


class SelectedAttention(Mixer):
    """Softmax attention to the keys that a selector chooses in each call.

    mask = choose(q, k, x);  z = postprocess(attend(q, k, v, mask), x);
    out = output(heads of z concatenated)

    Args:
        project: any `Projection`, also one that stores latents, such as `LatentProjection`.
        selector: a `KeySelector`, such as `MoBA` or `Indexer`.
        output: a module [B,T,H*E] -> [B,T,M].
        scale: the factor on the scores; None is 1/sqrt(D).
        passes_choice: whether later layers of a `Decoder` may read the choice (`EarlierChoice`).

    >>> from regard.nn.variants.projections import separate_qkv
    >>> layer = SelectedAttention(separate_qkv(8, 4, 2, 2), MoBA(4, 2), nn.Linear(8, 8))
    >>> layer(torch.zeros(1, 9, 8)).shape
    torch.Size([1, 9, 8])
    """

    recording_refusal = "chooses keys in ways that depend on the length"

    def __init__(
        self,
        project: Projection,
        selector: KeySelector,
        output: nn.Module,
        *,
        scale: float | None = None,
        passes_choice: bool = False,
    ) -> None:
        check_adds_no_bias(project, "SelectedAttention")
        self._check_parts(project, selector)
        super().__init__()
        self.project, self.selector, self.output, self.scale = project, selector, output, scale
        # whether the layer gives its choice of keys to later ones, or reads one
        self.carries_values = passes_choice or isinstance(selector, EarlierChoice)

    @staticmethod
    def _check_parts(project: Projection, selector: KeySelector) -> None:
        """Check that the projection and the selector are those of a subclass."""

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] to the chosen tokens among its own and those in the cache."""
        cache, carried = split_first_values(cache)
        memory, k_positions = self.project.remember(x, positions), positions
        n = len(memory)
        memory = (*memory, *self.selector.remember(x, positions))
        if cache is not None:
            if self.project.cache_unsafe_reason:
                raise ArgumentError(f"a cache was given, but {self.project.cache_unsafe_reason}")
            memory, k_positions = cache.update(memory, positions)
        project = self.project.select_form(x.shape[1], slot_count(k_positions))
        q = project.adjust_query(project.query(x, positions), positions, k_positions)
        q = tap("q", q)
        k, v = project.recall(memory[:n], k_positions)
        k, v = tap("k", k), tap("v", v)
        chosen_by = self.selector_memory(memory[n:], cache)
        places = Places(positions, k_positions)
        mask = carried.choice if carried is not None else None
        if mask is None or not isinstance(self.selector, EarlierChoice):
            mask = self.selector.choose(q, k, x, chosen_by, places)
        if carried is not None:
            carried.choice = mask
        z = attend(q, k, v, mask=mask, scale=self._scale, backend=backend, **places._asdict())
        z = tap("z", project.postprocess_at(z, x, positions))
        return tap("out", self.output(z.transpose(1, 2).flatten(2)))

    def selector_memory(self, memory: Parts, cache: Cache | None) -> Parts:
        """Return what the selector chooses by, beside queries and keys.

        Args:
            memory: the stored parts of the selector.
            cache: the cache, which may hold more for the selector.

        Returns:
            The parts that `choose` gets, here those that are stored for each token.
        """
        return memory

    @property
    def _scale(self) -> float:
        """The factor on the scores."""
        # The scale uses the head dim of the definition: the selected form may have a longer one.
        return self.project.shape.D**-0.5 if self.scale is None else self.scale

    def new_cache(self) -> Cache:
        """Return an empty cache that stores all tokens, since any token may be chosen later."""
        return Growing()

    @property
    def spec(self) -> Spec:
        """The cost of this layer; a cache stores all keys and values, and the selector's parts."""
        shape, selection = self.project.shape, self.selector.spec
        selector_parts = ((1, selection.values_per_token),) if selection.values_per_token else ()
        return SelectedSpec(
            count_weights(self), (*shape.parts, *selector_parts), shape.heads, selection
        )

    def describe(self, context: int = 4096) -> Description:
        """Compute the figures of `Mixer.describe`, under the name of the selector."""
        return self.spec.describe(context, type(self.selector).__name__)


def indexer_losses(
    layer: SelectedAttention,
    x: Float[Tensor, "B T M"],
    positions: Positions | None = None,
    *,
    chosen: bool = True,
) -> Float[Tensor, "B T"]:
    """Compute the loss of a layer's indexer, for each query of sequences without a cache.

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), equations 3 and 4.
    """
    selector = layer.selector
    if not isinstance(selector, Indexer):
        raise ArgumentError(
            f"the layer's selector is {type(selector).__name__}; only an Indexer has a loss"
        )
    positions = Span(0, x.shape[1]) if positions is None else positions
    x = x.detach()
    (key,) = selector.remember(x, positions)
    with torch.no_grad():
        q, places = layer.project.query(x, positions), Places(positions, positions)
        k, _ = layer.project.recall(layer.project.remember(x, positions), positions)
        mask = selector.choose(q, k, x, (key,), places) if chosen else Causal()
        pattern = attention_weights(q, k, mask=mask, scale=layer._scale, **places._asdict())
        visible = mask.block(positions, positions, device=x.device)[:, 0].expand(len(x), -1, -1)
    index_q, weight = selector.parts(x, positions)
    return indexer_loss(index_scores(index_q, key, weight), pattern, visible)


class Quest(KeySelector):
    """The selector of Quest: its own page, and the past pages with the largest bound.

    u_i = sum_d max(q_d low_id, q_d high_id) for page i, whose keys have numbers from low to high

    Source: Tang et al. 2024 (arXiv 2406.10774), section 3.3.
    """

    def __init__(self, size: int, topk: int) -> None:
        super().__init__()
        check_sizes("Quest", size, topk, "page")
        self.size, self.topk = size, topk

    def choose(self, q: Tensor, k: Tensor, x: Tensor, memory: Parts, places: Places) -> Mask:
        """Return the mask of the chosen pages; `memory` may hold the bounds of all pages."""
        bounds = PageBounds(*memory) if memory else None
        return quest_mask(q, k, size=self.size, topk=self.topk, bounds=bounds, **places._asdict())

    @property
    def spec(self) -> PageSelection:
        """The page size and the number of pages, for the cost."""
        return PageSelection(self.size, self.topk)

    def extra_repr(self) -> str:
        """Return the page size and the number of pages."""
        return f"pages of {self.size}, topk={self.topk}"


class QuestAttention(SelectedAttention):
    """Softmax attention to the pages that `Quest` chooses, with a cache of their bounds.

    All keys stay in the cache; a step reads the bounds and the chosen pages.

    Args:
        project: any `Projection`; if it changes stored keys, bounds are computed in every call.
        selector: a `Quest`.
        output: a module [B,T,H*E] -> [B,T,M].
        scale: the factor on the scores; None is 1/sqrt(D).

    Raises:
        ArgumentError: the selector is no `Quest`, the projection has several forms, or a cache has
            pages of another size.

    >>> from regard.nn.variants.projections import separate_qkv
    >>> layer = QuestAttention(separate_qkv(8, 4, 2, 2), Quest(4, 2), nn.Linear(8, 8))
    >>> cache = layer.new_cache()
    >>> layer(torch.zeros(1, 9, 8), cache=cache).shape, cache.bytes  # 9 tokens, 3 pages
    (torch.Size([1, 9, 8]), 384)

    Source: Tang et al. 2024 (arXiv 2406.10774), section 3.
    """

    @staticmethod
    def _check_parts(project: Projection, selector: KeySelector) -> None:
        """Check that the selector is a `Quest`, and that keys have one form."""
        if not isinstance(selector, Quest):
            raise ArgumentError(
                f"selector is {type(selector).__name__}; QuestAttention needs a Quest: use "
                "SelectedAttention for others"
            )
        if project.has_forms:
            raise ArgumentError(
                f"{type(project).__name__} has several forms, whose keys have other bounds, so "
                "that the pages would depend on the number of queries; Quest needs keys per head"
            )

    def check_cache(self, cache: Cache) -> None:
        """Raise if the cache has pages of another size than the selector."""
        size = self._quest.size
        if isinstance(cache, BoundedPages) and cache.size != size:
            raise ArgumentError(
                f"the cache has pages of {plural(cache.size, 'position')}, and the selector of "
                f"{size}; use new_cache()"
            )

    def selector_memory(self, memory: Parts, cache: Cache | None) -> Parts:
        """Return the bounds of the pages where the cache has them; else what it stored."""
        if isinstance(cache, BoundedPages) and self._stores_keys:
            return cache.bounds() or ()
        return memory

    def new_cache(self) -> Cache:
        """Return an empty cache of all tokens, with the bounds of pages if they are those of stored
        keys.
        """
        return BoundedPages(self._quest.size) if self._stores_keys else Growing()

    @property
    def _quest(self) -> Quest:
        """The selector of this layer, whose class the constructor has checked."""
        assert isinstance(self.selector, Quest)
        return self.selector

    @property
    def _stores_keys(self) -> bool:
        """Whether the first part of the memory is the keys as attention uses them."""
        shape = self.project.shape
        whole = shape.memory == (shape.G * shape.D, shape.G * shape.E)
        return whole and getattr(self.project, "key_transform", None) is None


class BlockMaximum(IndexHeads):
    """The selector of MSA: its own block, the local blocks before it, and the past blocks with the
    largest best score of index heads (`regard.ops.selection.block_maximum_mask`).

    s_ji = max over the keys s of block i of q'_jt . k'_s,  q' = norm(W_q x), k' = norm(W_k x)

    Index head j chooses for the query heads j H/J to (j + 1) H/J - 1. No gradient passes through
    the choice, so that index heads are not trained. A cache stores one index key.

    Source: MiniMax 2026 (MiniMax-M3), by its code in transformers, `MiniMaxM3VLIndexer`.
    """

    def __init__(
        self,
        q: HeadProjection,
        k: HeadProjection,
        *,
        heads: int,
        size: int,
        topk: int,
        local: int = 1,
    ) -> None:
        super().__init__(q, k)
        check_block_sizes(size, topk, local)
        if k.heads != 1 or q.head_dim != k.head_dim or heads < 1 or heads % q.heads:
            raise ArgumentError(
                f"index q is {q.extra_repr()}, k is {k.extra_repr()}, for "
                f"{plural(heads, 'query head')}; k must be 1 head of {q.head_dim}, and the index "
                "heads must divide the query heads"
            )
        self.heads, self.size, self.topk, self.local = heads, size, topk, local

    def choose(self, q: Tensor, k: Tensor, x: Tensor, memory: Parts, places: Places) -> Mask:
        """Return the mask of the chosen blocks."""
        with torch.no_grad():
            queries = self.q(x, places.q_positions)
        sizes: Any = {"size": self.size, "topk": self.topk, "local": self.local}
        return block_maximum_mask(queries, memory[0], heads=self.heads, **sizes, **places._asdict())

    @property
    def spec(self) -> BlockMaximumSelection:
        """The sizes of the index heads and of the blocks, for the cost."""
        blocks = max(self.topk, self.local)
        return BlockMaximumSelection(self.q.heads, self.q.head_dim, self.size, blocks)

    def extra_repr(self) -> str:
        """Return the sizes of the blocks."""
        return f"blocks of {self.size}, topk={self.topk}, local={self.local}"


class PooledIndexer(KeySelector):
    """The indexer of QSA and of DSA on pools: the best closed blocks by one pooled key of each, and
    the tokens behind the last closed block (`regard.ops.selection.closed_blocks_mask`).

    I_ti = sum_j w_tj relu(q_tj . e_i / sqrt(d));  w_t = W_w x_t / sqrt(J), or 1 without a weight

    No gradient passes through the choice, so that the indexer is not trained. A cache stores what
    keys are pooled from, because blocks become tokens again.

    Args:
        q: the index queries, J heads of size d.
        pooling: the `BlockPooling` of index keys to size d.
        weight: a linear map M -> J, or None.
        topk: the number of closed blocks per query.

    Source: Qwen Team 2026 (Qwen4-Exp) and Zhipu AI 2026 (GLM-5.3-Flash), by their code in
    transformers.
    """

    def __init__(
        self, q: HeadProjection, pooling: BlockPooling, weight: nn.Linear | None, *, topk: int
    ) -> None:
        super().__init__()
        check_topk(topk)
        out = q.heads if weight is None else weight.out_features
        if q.head_dim != pooling.width or out != q.heads:
            raise ArgumentError(
                f"index q is {q.extra_repr()}, the pooling has {pooling.extra_repr()}, weight has "
                f"out_features={out}; keys must be as wide as queries, and weight must have "
                f"out_features={q.heads}"
            )
        self.q, self.pooling, self.weight, self.topk = q, pooling, weight, topk

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        """Return the contents of index keys, and their gates beside them, [B,1,S,d or 2d]."""
        return (torch.cat(self.pooling.remember(x), -1),)

    def choose(self, q: Tensor, k: Tensor, x: Tensor, memory: Parts, places: Places) -> Mask:
        """Return the mask of the chosen blocks and of the tokens behind them."""
        with torch.no_grad():
            layout = block_layout(places.k_positions, self.pooling.block, x.device)
            keys = self.pooling(memory[0].split(self.pooling.width, -1), layout)
            queries = self.q(x, places.q_positions) * self.q.head_dim**-0.5
            w = x.new_ones(*x.shape[:2], self.q.heads)
            if self.weight is not None:
                w = self.weight(x) * self.q.heads**-0.5
        return closed_blocks_mask(
            queries, keys, w, layout, topk=self.topk, q_positions=places.q_positions
        )

    @property
    def spec(self) -> PooledSelection:
        """The sizes of the index heads and of the blocks, for the cost."""
        stored = self.q.head_dim * (2 if self.pooling.gated else 1)
        return PooledSelection(self.q.heads, self.q.head_dim, self.pooling.block, self.topk, stored)


class LatentIndexer(Indexer):
    """The lightning indexer whose queries come from the latent of latent attention.

    c_q = norm(W_dq x);  q_j = W_j c_q;  I_ts = sum_j w_tj relu(q_tj . k_s / sqrt(d))

    The `latent` projection belongs to the attention, and is not stored with the indexer.

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
        """Compute the index queries from the latent, and their weights from x."""
        (latent,) = self._latent
        with torch.no_grad():  # the loss of the indexer trains only the indexer
            c = latent.latent(x)
        q = self.q(c, positions) * self.q.head_dim**-0.5
        return q, self.weight(x.to(self.weight.weight.dtype)) * self.q.heads**-0.5


class IndexedLatentAttention(SelectedAttention):
    """Multi-head latent attention to the keys that an indexer selects (DSA).

    Source: DeepSeek-AI 2025 (DeepSeek-V3.2-Exp), section 2.
    """

    @staticmethod
    def _check_parts(project: Projection, selector: KeySelector) -> None:
        """Check that the projection and the selector are those of latent attention."""
        if not isinstance(project, LatentProjection) or not isinstance(
            selector, (Indexer, EarlierChoice)
        ):
            raise ArgumentError(
                f"project is {type(project).__name__} and selector {type(selector).__name__}; they "
                "must be a LatentProjection and an Indexer or an EarlierChoice: use "
                "SelectedAttention for others"
            )

    @property
    def spec(self) -> IndexedLatentSpec:
        """The cost of this layer in the form "absorb"; a cache stores latents and index keys."""
        project, selector = self.project, self.selector
        assert isinstance(project, LatentProjection)
        assert isinstance(selector, (Indexer, EarlierChoice))
        latent = project.spec(count_weights(self), ALL_EARLIER_KEYS)
        parts = (*latent.parts, *index_parts(selector.spec))
        own = {"parts": parts, "form": "absorb", "selection": selector.spec}
        return IndexedLatentSpec(**{**vars(latent), **own})
