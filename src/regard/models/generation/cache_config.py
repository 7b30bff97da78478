"""`CacheConfig`: the kind of key/value cache in text generation, and its largest context."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import cast

from torch import nn

from regard.caches import CACHES, BoundedPages, Cache, Evicting, Growing, Latent, LayerSize
from regard.caches.bounded_pages import PAGE_SIZE
from regard.caches.joined import Joined
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.masks import Causal, Mask
from regard.models.decoder import Decoder
from regard.nn import Attention, EvictingAttention, QuestAttention, StreamingAttention
from regard.nn.attention.selected import Quest
from regard.nn.projections.dynamic_rotary import PerRowRotary
from regard.units import plural


@dataclass(frozen=True)
class CacheConfig:
    """The kind of cache of the layers that keep every token, and the largest context.

    Layers with a window or a recurrent state keep their own cache.

    ====================  ================================================  =======================
    cache                 stored tokens                                     beyond max_context
    ====================  ================================================  =======================
    "growing"             every token, appended                             raises at the beginning
    "fixed"               every token, allocated once                       raises at the beginning
    "paged"               every token, in pages that rows can share         raises at the beginning
    "quantized"           every token, 8 bits except the last 128: inexact  raises at the beginning
    "fp8"                 every token, 8-bit floats: inexact                raises at the beginning
    "ring"                the last max_context tokens (a sliding window)    continues without limit
    "streaming"           the first 4 tokens, the last max_context - 4      continues without limit
    "h2o"                 those with most attention so far, and the newest  continues without limit
    "tova"                those to which the last query attends most        continues without limit
    "snapkv"              those to which the last queries attend most       continues without limit
    "key_norm"            those whose keys have the smallest norm           continues without limit
    "keydiff"             those whose keys differ most from the mean        continues without limit
    "adakv"               as "snapkv"; the heads of a layer share a budget  continues without limit
    "pyramidkv"           as "snapkv", with more in lower layers            continues without limit
    "expected_attention"  those that should count for the next queries      continues without limit
    "quest"               every token; a query reads pages that may match   continues without limit
    ====================  ================================================  =======================

    To use your own cache class, give its `kind`.

    Those from "h2o" to "expected_attention" evict an eighth of max_context tokens for each
    key/value head (`regard.caches.eviction`) when they are held. Up to then the result is that of
    "growing"; with "pyramidkv", whose mean over layers max_context is, up to the smallest budget.

    "quest" loses nothing: each query head reads max_context / 16 pages of 16 tokens, and may miss
    the best one (`regard.nn.QuestAttention`).

    "ring" and "streaming" give a layer with an unbounded mask a bounded one (see `restrict`).

    Args:
        cache: the kind of cache.
        max_context: the largest number of tokens of a row, prompt and continuation together; None
            is no limit.

    Raises:
        ArgumentError: the kind is unknown, or max_context is too small or missing.

    >>> CacheConfig("ring", 256).forgets
    True

    Source: "streaming" is Xiao et al. 2024 (arXiv 2309.17453).
    """

    cache: str = "growing"
    max_context: int | None = None

    def __post_init__(self) -> None:
        kinds = dict(sorted(CACHES, key=lambda entry: entry[1].evicts))
        if self.cache not in kinds:
            hint = suggest(self.cache, kinds)
            raise ArgumentError(
                f"cache is {self.cache!r}; it must be {', '.join(kinds)}{hint}", argument="cache"
            )
        least = self.kind.min_context
        if self.max_context is None:
            if self.forgets:
                raise ArgumentError(
                    f"cache={self.cache!r} needs max_context, the number of tokens that it keeps",
                    argument="cache",
                )
        elif self.max_context < least:
            raise ArgumentError(
                f"max_context is {self.max_context}; it must be at least {least} for "
                f"cache={self.cache!r}",
                argument="max_context",
            )

    @property
    def kind(self) -> type[Cache]:
        """The class of the selected cache."""
        return CACHES.find(self.cache)

    @property
    def forgets(self) -> bool:
        """Whether the cache drops old tokens."""
        return self.kind.evicts

    @property
    def _chooses(self) -> bool:
        """Whether attention chooses tokens, so that layers need another mechanism."""
        return issubclass(self.kind, Evicting | BoundedPages)

    @property
    def extra_mask(self) -> Mask | None:
        """The mask that bounds layers that keep every token; None changes no mask."""
        return None if self.max_context is None else self.kind.narrowing_mask(self.max_context)

    def check(self, prompt_tokens: int, new_tokens: int) -> None:
        """Check that a prompt and its continuation fit into max_context.

        Args:
            prompt_tokens: the number of tokens of the prompt.
            new_tokens: the largest number of new tokens.

        Raises:
            ArgumentError: they do not fit, and the cache does not drop old tokens.
        """
        limit, total = self.max_context, prompt_tokens + new_tokens
        if limit is not None and not self.forgets and total > limit:
            advice = (
                f"ask for at most {limit - prompt_tokens}"
                if prompt_tokens < limit
                else "shorten the prompt"
            )
            raise ArgumentError(
                f"the prompt has {plural(prompt_tokens, 'token')} and max_tokens is {new_tokens}: "
                f"{total} are more than max_context {limit}; {advice}, raise max_context, or use a "
                'cache that drops old tokens: cache="ring" or "streaming"',
                argument="max_context",
                value=limit,
            )

    def with_capacity(self, prompt_tokens: int, new_tokens: int) -> CacheConfig:
        """Return this configuration, checked, with enough slots for a kind that needs a number.

        Args:
            prompt_tokens: the number of tokens of the prompt.
            new_tokens: the largest number of new tokens.

        Returns:
            The configuration for a generation of this length.

        Raises:
            ArgumentError: as in `check`.
        """
        self.check(prompt_tokens, new_tokens)
        if self.max_context is None and self.kind.needs_slots:
            return CacheConfig(self.cache, max(1, prompt_tokens + new_tokens))
        return self

    def new_caches(self, decoder: Decoder, rows: int = 1) -> list[Cache]:
        """Create an empty cache for each layer of a decoder.

        Args:
            decoder: the result of `restrict`.
            rows: the largest number of rows of the batch.

        Returns:
            One cache per layer.
        """
        own_caches = decoder.new_caches()
        if self == CacheConfig() or self.extra_mask is not None or self._chooses:
            return own_caches
        return [
            self._layer_cache(layer, rows) if isinstance(cache, (Growing, Latent)) else cache
            for cache, layer in zip(own_caches, decoder.layers, strict=True)
        ]

    def fork_cache(self, cache: Cache, rows: int = 1) -> Cache:
        """Copy a cache of one row to several rows; rows of a paged cache share their pages.

        Args:
            cache: a cache of one row, which stays as it is.
            rows: how many rows the copy has.

        Returns:
            The copy.
        """
        return cache.repeated(rows, self.max_context)

    def restrict(self, decoder: Decoder) -> Decoder:
        """Return the decoder with the masks that this cache needs.

        It is the decoder itself, or a copy with the same parameters. "ring" adds
        `Window(max_context)` to the mask of every layer that keeps every token. "streaming" makes
        such a layer a `StreamingAttention` where its heads end with a rotary step, so that
        distances stay inside the cache; otherwise it adds `Window(max_context - 4) | Sinks(4)`, at
        the true positions.

        Args:
            decoder: the decoder of a model.

        Returns:
            The decoder to run with these caches.

        Raises:
            ArgumentError: a layer keeps every token and has no mask to restrict, or several caches;
                or the rotary frequencies depend on the length, and the cache is not "growing".
        """
        if self.cache != "growing" and has_dynamic_rotary(decoder):
            raise ArgumentError(
                f"cache is {self.cache!r}, but this model's rotary frequencies depend on the "
                "length, "
                'so that cached keys become invalid when it changes; only cache="growing" supports '
                "that",
                argument="cache",
            )
        self._check_joined(decoder)
        extra_mask, chooses = self.extra_mask, self._chooses
        if extra_mask is None and not chooses:
            return decoder
        if chooses and any(source is not None for source in decoder.memory_from):
            raise ArgumentError(
                f"cache={self.cache!r} chooses tokens by the attention of one layer, but layers of "
                'this model share their keys; choose "ring" or a cache that keeps every token',
                argument="cache",
            )
        shared = {id(x): x for x in (*decoder.parameters(), *decoder.buffers())}
        restricted = copy.deepcopy(decoder, shared)
        keep_all = [
            i
            for i, layer in enumerate(restricted.layers)
            if isinstance(layer.get_submodule("attention").new_cache(), (Growing, Latent))  # type: ignore[operator]
        ]
        for n, i in enumerate(keep_all):
            layer = restricted.layers[i]
            if not isinstance(layer.attention, Attention):
                raise ArgumentError(
                    f"layer {i} is {type(layer.attention).__name__}, which keeps every token and "
                    f"has no mask to restrict; cache={self.cache!r} cannot serve this model: "
                    f"choose one of {', '.join(name for name, kind in CACHES if not kind.evicts)}"
                )
            if extra_mask is None:
                layer.attention = self._choosing(i, layer.attention, n, len(keep_all))
                continue
            # readers of another layer's keys need them as they are, at their own positions
            shares = i in restricted.memory_from
            layer.attention = _with_mask(layer.attention, extra_mask, in_place=shares)
        for i, source in enumerate(restricted.memory_from):
            if source is None:
                continue
            before, now, reader = (
                cast("Attention", network.layers[n].get_submodule("attention"))
                for network, n in ((decoder, source), (restricted, source), (restricted, i))
            )
            if extra_mask is not None and now.mask != before.mask:
                reader.mask = extra_mask if reader.mask is None else reader.mask & extra_mask
        return restricted

    def _check_joined(self, decoder: Decoder) -> None:
        """Raise if a layer has several mechanisms and the cache is not the default."""
        for i, cache in enumerate(decoder.new_caches() if self.cache != "growing" else ()):
            if isinstance(cache, Joined):
                raise ArgumentError(
                    f"layer {i} has {plural(len(cache.parts), 'mechanism')} with a cache each, "
                    f'which cache={self.cache!r} does not support; only cache="growing" does'
                )

    def _choosing(
        self, i: int, attention: Attention, number: int, layers: int
    ) -> EvictingAttention | QuestAttention:
        """Return layer i's attention with this rule; it is the `number`-th that can have it."""
        assert self.max_context is not None, "the constructor requires it"
        plain = type(attention) is Attention and attention.mask == Causal()
        if not plain or attention.bias is not None or attention.score is not None:
            raise ArgumentError(
                f"layer {i} is {type(attention).__name__} with mask {attention.mask}, bias "
                f"{attention.bias} and score {attention.score}; cache={self.cache!r} chooses "
                'tokens of causal attention without bias or score rule only; choose "ring"'
            )
        if issubclass(self.kind, BoundedPages):
            if attention.softcap is not None or attention.sink is not None:
                raise ArgumentError(
                    f"layer {i} has softcap={attention.softcap} and a learned sink: "
                    f"{attention.sink is not None}; cache={self.cache!r} serves attention without "
                    'both; choose "ring"'
                )
            quest = Quest(PAGE_SIZE, self.max_context // PAGE_SIZE)
            return QuestAttention(
                attention.project, quest, attention.output, scale=attention.scale
            ).train(attention.training)
        kind = cast("type[Evicting]", self.kind)
        interval = max(1, self.max_context // 8)
        budget = self.max_context - interval
        return EvictingAttention(
            attention.project,
            attention.output,
            rule=kind.rule_for(budget),
            budget=kind.layer_budget(budget, number, layers),
            interval=interval,
            scale=attention.scale,
            softcap=attention.softcap,
            sink=attention.sink,
        ).train(attention.training)

    def _layer_cache(self, layer: nn.Module, rows: int) -> Cache:
        """Create the cache of a layer that keeps every token, for so many rows."""
        if not self.kind.needs_widths:
            return self.kind.for_layer(LayerSize(self.max_context, rows))
        mixer = layer.get_submodule("attention")
        parts = mixer.project.shape.parts if isinstance(mixer, Attention) else ((0, 0),) * 3
        if len(parts) > 2:
            raise ArgumentError(
                f"{type(mixer).__name__} stores more than keys and values, which "
                f"cache={self.cache!r} does not support; choose another one"
            )
        widths = [width for _, width in parts]
        return self.kind.for_layer(LayerSize(self.max_context, rows, tuple(widths)))


def _with_mask(attention: Attention, mask: Mask, *, in_place: bool = False) -> Attention:
    """Add a mask to the attention, or if possible and not `in_place`, make it streaming."""
    bound = mask.reach()
    if not in_place and bound.sinks and attention.mask == Causal() and attention.bias is None:
        try:
            return StreamingAttention(
                attention.project,  # type: ignore[arg-type]
                attention.output,
                sinks=bound.sinks,
                recent=bound.window,  # type: ignore[arg-type]
                scale=attention.scale,
                softcap=attention.softcap,
                sink=attention.sink,
            ).train(attention.training)
        except (ArgumentError, TypeError):
            # the heads do not end with one rotary step, so distances cannot stay inside the cache
            pass
    attention.mask = mask if attention.mask is None else attention.mask & mask
    return attention


def has_dynamic_rotary(decoder: nn.Module) -> bool:
    """Whether rotary frequencies depend on the length, so that cached keys become outdated."""
    return any(isinstance(module, PerRowRotary) for module in decoder.modules())
