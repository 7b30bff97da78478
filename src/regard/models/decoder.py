"""`Decoder`, the network of a decoder-only model: embedding, blocks, norm and head."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.caches import Cache, CrossLayer, rollback_on_error
from regard.caches.cross_layer import FirstValues, LendingCache, WithFirstValues
from regard.errors import ArgumentError
from regard.nn import Block, InputEmbedding
from regard.nn.blocks.blocks import TokenIdBlock
from regard.nn.blocks.embedding import without_empty_slots
from regard.nn.mixer import Mixer
from regard.nn.module_calls import call_as_leaf, is_proxy
from regard.process_state import is_compiling
from regard.sequence_scope import current_scope
from regard.span import Positions, Span
from regard.tracing import is_tracing, named_scope, tap
from regard.units import plural


class Decoder(nn.Module):
    """A decoder-only network: ids -> embedding -> blocks -> norm -> head -> logits.

    Args:
        head: a module [B, T, M] -> [B, T, V], which may share the embedding's weight. None, as in a
            base model that was saved alone, gives hidden states only.
        memory_from: for each layer the number of the earlier layer whose keys and values it reads
            (`regard.models.assembly.shared_memory`), or None if it stores its own; () is None for
            all. A reading layer gets what the earlier one saw in the same call.

    Layers that carry values (`regard.nn.variants.value_residual`, `rwkv7`) get those that the first
    of them computed in the same call.

    Raises:
        ArgumentError: `memory_from` has not one entry for each layer, or an entry does not name an
            earlier layer that stores its own. When called: ids are not [B, T] or outside the
            vocabulary, caches are not one per layer, or logits are asked for and there is no head.
    """

    def __init__(
        self,
        embed: InputEmbedding,
        layers: Sequence[Block],
        norm: nn.Module,
        head: nn.Module | None,
        memory_from: Sequence[int | None] = (),
    ) -> None:
        super().__init__()
        self.embed, self.layers = embed, nn.ModuleList(layers)
        self.norm, self.head = norm, head
        self.memory_from = _check_memory_from(memory_from, len(layers))
        self._lenders = frozenset(i for i in self.memory_from if i is not None)
        self._id_readers = frozenset(
            i for i, layer in enumerate(layers) if isinstance(layer, TokenIdBlock)
        )
        self._carriers = frozenset(i for i, layer in enumerate(layers) if _carries_values(layer))

    def forward(
        self,
        ids: Int[Tensor, "B T"],
        positions: Positions | None = None,
        caches: Sequence[Cache] | None = None,
        backend: str = "auto",
        last: int | None = None,
    ) -> Float[Tensor, "B n V"]:
        """Compute logits for the token after each given token."""
        if type(ids) is not Tensor and is_proxy(ids):
            return call_as_leaf(
                self,
                Decoder.forward,
                ids,
                positions,
                cache=None if caches is None else caches[0],
                backend=backend,
                last=last,
            )
        return self._run(ids, positions, caches, backend, last, self.require_head())

    def hidden(
        self,
        ids: Int[Tensor, "B T"],
        positions: Positions | None = None,
        caches: Sequence[Cache] | None = None,
        *,
        backend: str = "auto",
        last: int | None = None,
    ) -> Float[Tensor, "B n M"]:
        """Compute the hidden states after the last norm, from which the head computes logits."""
        return self._run(ids, positions, caches, backend, last, None)

    def require_head(self) -> nn.Module:
        """Return the head, or refuse a base model."""
        if self.head is None:
            raise ArgumentError(
                "this model has no head: a base model was saved alone, and config.json ties no "
                "head to its embedding; hidden(ids) gives its states; for logits and text load the "
                "checkpoint of the language model"
            )
        return self.head

    def _run(
        self,
        ids: Tensor,
        positions: Positions | None,
        caches: Sequence[Cache] | None,
        backend: str,
        last: int | None,
        head: nn.Module | None,
    ) -> Tensor:
        if caches is not None and len(caches) != len(self.layers):
            raise ArgumentError(
                f"{plural(len(caches), 'cache')} for {plural(len(self.layers), 'layer')}; give one "
                "per layer"
            )
        if positions is None:
            positions = caches[0].next(ids.shape[-1]) if caches else Span(0, ids.shape[-1])
        if not caches or is_compiling():
            return self._forward(ids, positions, caches, backend, last, head)
        with rollback_on_error(
            *caches, layers=True
        ):  # if a later layer raises, earlier caches are restored
            return self._forward(ids, positions, caches, backend, last, head)

    def _forward(
        self,
        ids: Tensor,
        positions: Positions,
        caches: Sequence[Cache] | None,
        backend: str,
        last: int | None,
        head: nn.Module | None,
    ) -> Tensor:
        x, is_traced = self.embed(ids, positions), is_tracing()
        x = tap("embed", x) if is_traced else x
        known_ids = {"ids": without_empty_slots(ids, positions)} if self._id_readers else {}
        lent: dict[int, LendingCache] = {}
        first = FirstValues()
        if self.shares_between_layers and current_scope() is not None:
            raise ArgumentError(
                "this decoder shares keys and values between layers, which does not run over "
                "several ranks; close regard.parallel.sequence"
            )
        for i, layer in enumerate(self.layers):
            cache = caches[i] if caches is not None else None
            if self._lenders:
                cache = self._shared_cache(i, cache, lent)
            if i in self._carriers:
                cache = WithFirstValues(cache, first)
            own = known_ids if i in self._id_readers else {}
            if not is_traced:
                x = layer(x, positions, cache, backend=backend, **own)
                continue
            with named_scope(f"layers.{i}"):
                x = layer(x, positions, cache, backend=backend, **own)
        x = x if last is None or last >= x.shape[1] else x[:, -last:]
        x = cast("Tensor", self.norm(x))
        if is_traced and not isinstance(self.norm, nn.Identity):
            x = tap("norm", x)
        if head is None:
            return x
        logits: Tensor = head(x)
        return tap("logits", logits) if is_traced else logits

    def _shared_cache(
        self, i: int, cache: Cache | None, lent: dict[int, LendingCache]
    ) -> Cache | None:
        """Return the cache of layer i with the memory of the earlier layer that it reads, or with a
        record for the layers that read it.
        """
        source = self.memory_from[i]
        if source is None:
            if i not in self._lenders:
                return cache
            lent[i] = LendingCache(cache)
            return lent[i]
        shared, states = CrossLayer() if cache is None else cache, lent[source].returned
        if not isinstance(shared, CrossLayer) or states is None:
            raise ArgumentError(
                f"layer {i} reads the memory of layer {source}, but its cache is a "
                f"{type(shared).__name__}, or layer {source} stores none; use new_caches()"
            )
        shared.lend(*states)
        return shared

    @property
    def shares_between_layers(self) -> bool:
        """Whether a layer gets keys, values or states of an earlier one beside its input."""
        return bool(self._lenders or self._carriers)

    @property
    def reads_ids(self) -> bool:
        """Whether a layer reads the token ids beside its input."""
        return bool(self._id_readers)

    def new_caches(self) -> list[Cache]:
        """Create an empty cache for each layer, of the kind that suits its attention."""
        return [cast("Block", layer).new_cache() for layer in self.layers]


def _carries_values(layer: nn.Module) -> bool:
    """Return whether the mechanism of a block gives or reads the values of the first layer."""
    mixer = getattr(layer, "attention", None)
    return isinstance(mixer, Mixer) and mixer.carries_values


def _check_memory_from(memory_from: Sequence[int | None], layers: int) -> tuple[int | None, ...]:
    """Return for each layer the layer whose memory it reads, after a check."""
    sources = tuple(memory_from) or (None,) * layers
    if len(sources) != layers:
        raise ArgumentError(
            f"memory_from has length {len(sources)} for {plural(layers, 'layer')}; give one entry "
            "per layer"
        )
    for i, source in enumerate(sources):
        if source is not None and not (0 <= source < i and sources[source] is None):
            raise ArgumentError(
                f"layer {i} reads the memory of layer {source}; it must be an earlier layer that "
                "stores its own"
            )
    return sources


def check_ids(ids: Tensor, vocabulary: int, positions: Positions | None = None) -> None:
    """Check that every id is in [0, vocabulary), unless its position is padding."""
    outside = (ids < 0) | (ids >= vocabulary)
    if isinstance(positions, Tensor):
        outside = outside & (positions >= 0)
    if bool(outside.any()):
        where = outside.nonzero()[0].tolist()
        raise ArgumentError(
            f"token id {int(ids[tuple(where)])} at {where} lies outside [0, {vocabulary}); "
            "was it produced by another tokenizer?"
        )
