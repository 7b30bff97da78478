"""Attention to compressed tokens: one entry for each block, beside a window of whole tokens
(HCA and CSA of DeepSeek-V4).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_positive_sizes
from regard.caches import Cache, Compressed, Parts
from regard.caches.state import compact_slots
from regard.cost.compressed import CompressedSpec
from regard.errors import ArgumentError
from regard.masks import Causal, Mask, Window
from regard.nn.attention.attention import Attention
from regard.nn.explainable import InputSteps, ProjectionQuery
from regard.nn.mixer import Mixer, count_weights
from regard.nn.projections.heads import Projection
from regard.nn.projections.latent import LowRankProjection
from regard.nn.weights import Linear
from regard.ops.selection.lightning_indexer import check_topk, index_mask
from regard.ops.selection.position_blocks import BlockLayout, block_layout
from regard.ops.softmax import attend_partial, merge
from regard.span import EMPTY, Positions, Span, as_tensor, slot_count
from regard.tracing import named_scope, requested_taps, tap
from regard.units import plural


class BlockPooling(nn.Module):
    """A network that pools the tokens of each block into one entry, channel by channel.

    y_t = W_y x_t;  z_t = W_z x_t + b_(t mod m);  entry_i = steps(sum_t softmax_t(z_t) * y_t)

    t runs over the tokens of block i. With overlap, y and z have two halves, and t runs over the
    first halves of block i - 1 and the second halves of block i. Steps see the position i m.

    Args:
        dim: M, the size of hidden states.
        width: d, the size of an entry.
        block: m, the number of positions per block.
        *steps: modules called as step(entries [B,1,N,d], positions), such as a norm and a rotary.
        overlap: whether an entry also pools the block before its own.
        gated: whether tokens have weights; without them an entry is their mean.
        norm: a module on the contents y, or None.

    Source: DeepSeek-AI 2026, DeepSeek-V4, by its code in transformers.
    """

    def __init__(
        self,
        dim: int,
        width: int,
        block: int,
        *steps: nn.Module,
        overlap: bool = False,
        gated: bool = True,
        norm: nn.Module | None = None,
    ) -> None:
        super().__init__()
        check_positive_sizes("BlockPooling", dim=dim, width=width, block=block)
        self.width, self.block, self.overlap, self.gated = width, block, overlap, gated
        rows = 2 * width if overlap else width
        self.content, self.norm = Linear(dim, rows, bias=False), norm
        if gated:
            self.gate = Linear(dim, rows, bias=False)
            self.places = nn.Parameter(torch.zeros(block, rows))
        self.steps = nn.ModuleList(steps)

    def remember(self, x: Float[Tensor, "B T M"]) -> Parts:
        """Compute what entries are pooled from.

        Args:
            x: hidden states [B,T,M].

        Returns:
            The contents and the gates, if there are any, [B,1,T,d], or [B,1,T,2d] with overlap.
        """
        y = self.content(x)[:, None]
        y = y if self.norm is None else self.norm(y)
        return (y, self.gate(x)[:, None]) if self.gated else (y,)

    def forward(self, tokens: Parts, layout: BlockLayout) -> Float[Tensor, "B 1 N d"]:
        """Pool what `remember` returned into an entry for each block of the layout [B,1,N,d]."""
        y, *gates = (layout.to_blocks(part) for part in tokens)  # [B,1,N,m,d or 2d]
        occupied = layout.occupied.unflatten(1, (layout.blocks, self.block))[:, None, ..., None]
        z = gates[0] + self.places.to(y.dtype) if gates else torch.zeros_like(y)
        z = torch.where(occupied, z, float("-inf"))
        if self.overlap:
            before = (0, 0, 0, 0, 1, -1)  # moves each block to the next one
            d = self.width
            y = torch.cat([F.pad(y[..., :d], before), y[..., d:]], 3)  # [B,1,N,2m,d]
            z = torch.cat([F.pad(z[..., :d], before, value=float("-inf")), z[..., d:]], 3)
        z = z.to(torch.promote_types(z.dtype, torch.float32))
        # a block without tokens has no entry; any finite number keeps NaN out of its gradient
        z = z.masked_fill((z == float("-inf")).all(3, keepdim=True), 0)
        entries = (y * z.softmax(3).to(y.dtype)).sum(3)
        for step in self.steps:
            entries = step(entries, layout.block_numbers * self.block)
        return entries

    def extra_repr(self) -> str:
        """Return the sizes of blocks and entries."""
        overlap = ", overlap=True" if self.overlap else ""
        mean = "" if self.gated else ", gated=False"
        return f"blocks of {self.block} to {self.width}{overlap}{mean}"


class EntryIndexer(nn.Module):
    """A lightning indexer that chooses entries of closed blocks, by one pooled key of each.

    I_ti = sum_j w_tj relu(q_tj . e_i / sqrt(d)),  w_t = W_w x_t / sqrt(J)

    Args:
        q: a projection of hidden states to J index queries of size d.
        pooling: the `BlockPooling` of index keys.
        weight: a linear map M -> J.
        topk: the number of entries per query.
        latent: the low-rank projection of the attention whose latents `q` reads in place of hidden
            states; it is not stored with the indexer.

    Source: DeepSeek-AI 2026, DeepSeek-V4, by its code in transformers.
    """

    def __init__(
        self,
        q: nn.Module,
        pooling: BlockPooling,
        weight: nn.Linear,
        *,
        topk: int,
        latent: LowRankProjection | None = None,
    ) -> None:
        super().__init__()
        check_topk(topk)
        self.q, self.pooling, self.weight, self.topk = q, pooling, weight, topk
        self._latent = (latent,)  # in a tuple, because a module would be registered here, too

    def choose(self, x: Tensor, positions: Positions, keys: Tensor, places: EntryPlaces) -> Mask:
        """Choose entries for each query.

        Args:
            x: hidden states [B,T,M] of the queries.
            positions: their positions.
            keys: the pooled index keys [B,1,C,d].
            places: the positions of queries and entries, in blocks.

        Returns:
            The mask of the chosen entries.
        """
        if self.topk >= keys.shape[2]:
            return Causal()  # every entry
        (latent,) = self._latent
        with torch.no_grad():
            read = x if latent is None else latent.latent(x)
            q = self.q(read, positions) * self.pooling.width**-0.5
            weight = self.weight(x)
        options: Any = {"q_positions": places.queries, "k_positions": places.entries}
        return index_mask(q, keys, weight * weight.shape[-1] ** -0.5, topk=self.topk, **options)

    def extra_repr(self) -> str:
        """Return the number of entries per query."""
        return f"topk={self.topk}"


class EntryPlaces(NamedTuple):
    """Positions in blocks: a query at t stands at the last block that is closed for it, floor((t +
    1) / m) - 1, and an entry at the number of its block.
    """

    queries: Positions
    entries: Positions


def last_closed_block(positions: Positions, block: int) -> Positions:
    """Return the number of the last block that each query sees, -1 if there is none."""
    if isinstance(positions, Span) and positions.length == 1 and positions.start >= 0:
        return Span((positions.start + 1) // block - 1, 1)
    numbers = (as_tensor(positions) + 1).div(block, rounding_mode="floor") - 1
    return numbers.clamp(min=EMPTY)


class CompressedAttention(Attention):
    """Softmax attention to the last tokens and to one entry for each closed block before.

    z = softmax over the window's keys and the visible entries, in one sum with the sink

    A query at position t sees the entries of the blocks before floor((t + 1) / m), or those that an
    indexer chooses among them. An entry is key and value, like the tokens of the window.

    Args:
        project: a `Projection` whose memory is its keys and values, such as `SharedKeyValue`.
        pooling: the `BlockPooling` of the entries, to the head dim.
        output: a module [B,T,H*E] -> [B,T,M].
        window: how many last tokens a query sees, its own included.
        indexer: an `EntryIndexer`, or None: every entry is seen.
        scale, sink: as in `Attention`.

    Raises:
        ArgumentError: the sizes of the parts do not fit one another.

    >>> from regard.nn import HeadProjection, SharedKeyValue
    >>> project = SharedKeyValue(HeadProjection(8, 2, 4), HeadProjection(8, 1, 4))
    >>> pooling = BlockPooling(8, 4, 3)
    >>> layer = CompressedAttention(project, pooling, nn.Linear(8, 8), window=2)
    >>> layer(torch.zeros(1, 9, 8)).shape
    torch.Size([1, 9, 8])

    Source: DeepSeek-AI 2026, DeepSeek-V4, by its code in transformers.
    """

    across_ranks = None
    recording_refusal = "splits the keys into blocks, whose number depends on the length"
    static_step_refusal = Mixer.static_step_refusal

    def __init__(
        self,
        project: Projection,
        pooling: BlockPooling,
        output: nn.Module,
        *,
        window: int,
        indexer: EntryIndexer | None = None,
        scale: float | None = None,
        sink: nn.Parameter | None = None,
    ) -> None:
        _, G, D, _, memory = project.shape
        if G != 1 or memory != (D,) or pooling.width != D:
            raise ArgumentError(
                f"project has {plural(G, 'key head')} and stores {memory} per token, and entries "
                f"have width {pooling.width}; keys and values must be one stored vector of "
                f"{D}, as in SharedKeyValue, and entries as wide"
            )
        index = pooling if indexer is None else indexer.pooling
        if index.block != pooling.block or not (index.gated and pooling.gated):
            raise ArgumentError(
                f"the indexer has {index.extra_repr()}, and the entries {pooling.extra_repr()}; "
                "both must have the same blocks, and gates"
            )
        super().__init__(project, output, mask=Causal() & Window(window), scale=scale, sink=sink)
        self.pooling, self.indexer, self.window = pooling, indexer, window

    @property
    def poolings(self) -> tuple[BlockPooling, ...]:
        """The networks that make entries, and index keys if there is an indexer."""
        return (self.pooling,) if self.indexer is None else (self.pooling, self.indexer.pooling)

    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Attend from x [B,T,M] to the window, and to entries of its own and of the cache."""
        if not requested_taps().isdisjoint(("scores", "pattern")):
            raise ArgumentError(
                f"a trace asks for scores or patterns of a {type(self).__name__}, which has no "
                "single call: the window and the entries are joined by their sums; record the run, "
                "or trace q, k, v and z"
            )
        project = self.project
        q = tap("q", project.query(x, positions))
        recent, recent_positions = project.remember(x, positions), positions
        tokens: Parts = tuple(part for pooling in self.poolings for part in pooling.remember(x))
        if cache is None:
            entries, numbers = self._pool(tokens, positions, 0)
        else:
            assert isinstance(cache, Compressed)  # check_cache
            closed = cache.open.closed
            recent, recent_positions = cache.recent.update(recent, positions)
            entries, numbers = self._pool(*cache.open.update(tokens, positions), closed)
            cache.open.store((), positions)
            entries, numbers = cache.entries.update(entries, numbers)
        rules: Any = {"scale": self.scale, "backend": backend}
        with named_scope("window"):
            k, v = project.recall(recent, recent_positions)
            places: Any = {"q_positions": positions, "k_positions": recent_positions}
            parts = [attend_partial(q, tap("k", k), tap("v", v), mask=self.mask, **places, **rules)]
        if slot_count(numbers):
            block_places = EntryPlaces(last_closed_block(positions, self.pooling.block), numbers)
            mask: Mask = Causal()
            if self.indexer is not None:
                mask = self.indexer.choose(x, positions, entries[1], block_places)
            with named_scope("compressed"):
                k = entries[0]
                places = {"q_positions": block_places.queries, "k_positions": block_places.entries}
                parts.append(
                    attend_partial(q, tap("k", k), tap("v", k), mask=mask, **places, **rules)
                )
        z = project.postprocess_at(merge(parts, sink=self.sink).out, x, positions)
        return tap("out", self.output(tap("z", z).transpose(1, 2).flatten(2)))

    def _pool(
        self, tokens: Parts, positions: Positions, closed: int | Tensor
    ) -> tuple[Parts, Positions]:
        """Return the entries of the blocks that these tokens close, and the blocks' numbers; for
        `closed` blocks, of all rows or of each [B or 1,1], there are entries already.
        """
        m = self.pooling.block
        layout = block_layout(positions, m, tokens[0].device)
        pairs = (tokens[i : i + 2] for i in range(0, len(tokens), 2))
        pooled = tuple(p(pair, layout) for p, pair in zip(self.poolings, pairs, strict=True))
        if isinstance(positions, Span) and isinstance(closed, int) and positions.start >= 0:
            first, stop = positions.start // m, positions.stop // m
            new = Span(max(first, closed), max(0, stop - max(first, closed)))
            start = new.start - first
            return tuple(x[:, :, start : start + new.length] for x in pooled), new
        numbers = layout.block_numbers  # [B or 1,N]
        end = as_tensor(positions, numbers.device).amax(1, keepdim=True) + 1
        new_here = (numbers >= closed) & (numbers < end // m) & (layout.token_counts > 0)
        return compact_slots(pooled, numbers, new_here, layout.blocks)

    def check_cache(self, cache: Cache) -> None:
        """Raise if the cache is none of this layer's blocks and window."""
        mine = self.new_cache()
        if not isinstance(cache, Compressed) or cache.settings != mine.settings:
            own = f" with {dict(cache.settings)}" if isinstance(cache, Compressed) else ""
            raise ArgumentError(
                f"the cache is {type(cache).__name__}{own}; {type(self).__name__} needs a "
                f"Compressed cache with {dict(mine.settings)}: use new_cache()"
            )

    def new_cache(self) -> Cache:
        """Return an empty cache of entries, of the open block, and of the window."""
        return Compressed(self.pooling.block, self.window, int(self.pooling.overlap))

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of the queries, and of keys and values where these are tokens."""
        steps = super().explain_inputs(query)
        if query.branch != "compressed":
            return steps
        return InputSteps(steps.q, rotary=steps.rotary, keys_are_blocks=True)

    @property
    def spec(self) -> CompressedSpec:
        """The cost of this layer, whose cache grows by one entry per block."""
        H, _, D, _, _ = self.project.shape
        index = self.indexer
        return CompressedSpec(
            count_weights(self),
            ((1, D),),
            heads=H,
            head_dim=D,
            block=self.pooling.block,
            window=self.window,
            overlap=self.pooling.overlap,
            index_dim=0 if index is None else index.pooling.width,
            index_heads=0 if index is None else index.weight.out_features,
            topk=None if index is None else index.topk,
        )

    def extra_repr(self) -> str:
        """Return the mask of the window."""
        return f"window={self.window}"
