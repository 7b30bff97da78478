"""How much of a text a model keeps while it writes, and how: the kind of cache, and the most
tokens.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass

from torch import nn

from regard.caches import CACHES, Cache, Growing, Latent, LayerSize
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.masks import Causal, Mask
from regard.models.decoder import Decoder
from regard.nn import Attention, StreamingAttention
from regard.nn.dynamic_rotary import PerRowRotary


@dataclass(frozen=True)
class Room:
    """The cache of the layers that keep everything; layers with a window or a state of their own
    keep what they have.

    ===========  ===========================================  =========================
    cache        what it keeps                                            behind max_context tokens
    ===========  ===========================================  =========================
    "growing"    everything, appended                                     refuses before it starts
    "fixed"      everything, allocated once                               refuses before it starts
    "paged"      everything, in pages that rows share                     refuses before it starts
    "quantised"  everything, 8 bits but for the last 128: not exact       refuses before it starts
    "ring"       the last max_context tokens: the layers get that window  goes on without end
    "streaming"  the first 4 tokens and the last max_context - 4          goes on without end
    ===========  ===========================================  =========================

    A cache of your own has the name that its class says, as `kind`.

    "ring" and "streaming" change what the model computes from there on, in every chunking alike: a
    layer whose mask has no bound gets one (`narrow`).

    Args:
        cache: the kind.
        max_context: the most tokens of a row, prompt and continuation together; None is no bound.

    Raises:
        ArgumentError: the kind is unknown, max_context is too small, or a kind that forgets has
            none.

    >>> Room("ring", 256).forgets
    True

    Source: "streaming" is Xiao et al. 2024 (arXiv 2309.17453).
    """

    cache: str = "growing"
    max_context: int | None = None

    def __post_init__(self) -> None:
        kinds = dict(sorted(CACHES, key=lambda entry: entry[1].evicts))
        if self.cache not in kinds:
            hint = suggest(self.cache, kinds)
            raise ArgumentError(f"cache is {self.cache!r}; it must be {', '.join(kinds)}{hint}")
        least = self.kind.min_context
        if self.max_context is None:
            if self.forgets:
                raise ArgumentError(
                    f"cache={self.cache!r} needs max_context: how many tokens it keeps"
                )
        elif self.max_context < least:
            raise ArgumentError(
                f"max_context is {self.max_context}; it must be at least {least} for "
                f"cache={self.cache!r}"
            )

    @property
    def kind(self) -> type[Cache]:
        """The class of the cache."""
        return CACHES.find(self.cache)

    @property
    def forgets(self) -> bool:
        """Whether old tokens are forgotten."""
        return self.kind.evicts

    @property
    def narrowing(self) -> Mask | None:
        """What a layer that keeps everything may still see; None changes no mask."""
        return None if self.max_context is None else self.kind.narrowing_mask(self.max_context)

    def check(self, held: int, new: int) -> None:
        """See that there is room for a prompt of so many tokens, and so many new ones.

        Raises:
            ArgumentError: there is not.
        """
        most = self.max_context
        if most is not None and not self.forgets and held + new > most:
            rest = f"ask for at most {most - held}" if held < most else "shorten the prompt"
            raise ArgumentError(
                f"the prompt has {held} tokens and max_tokens is {new}: {held + new} are more "
                f"than max_context {most}; "
                f'{rest}, raise max_context, or let the model forget: cache="ring" or "streaming"'
            )

    def sized(self, held: int, new: int) -> Room:
        """This room, checked for so many tokens; a kind that is allocated once, and was given no
        bound, has just their room.

        Raises:
            ArgumentError: as `check`.
        """
        self.check(held, new)
        if self.max_context is None and self.kind.needs_slots:
            return Room(self.cache, max(1, held + new))
        return self

    def caches(self, decoder: Decoder, rows: int = 1) -> list[Cache]:
        """An empty cache for each layer of a decoder that `narrow` has given, for so many rows."""
        found = decoder.new_caches()
        if self == Room() or self.narrowing is not None:
            return found
        return [
            self._made(layer, rows) if isinstance(cache, (Growing, Latent)) else cache
            for cache, layer in zip(found, decoder.layers, strict=True)
        ]

    def fork(self, cache: Cache, rows: int = 1) -> Cache:
        """A cache with the row of another, so many times; a paged one has pages of its own, which
        its rows share.
        """
        return cache.repeated(rows, self.max_context)

    def narrow(self, decoder: Decoder) -> Decoder:
        """The decoder as it computes with this room: itself, or a twin with the same parameters and
        narrower masks.

        "ring" adds `Window(max_context)` to the mask of every layer that keeps everything.
        "streaming" makes it a `StreamingAttention` where its heads are rotary, so that distances
        stay inside the cache; else it adds `Window(max_context - 4) | Sinks(4)`, at the true
        positions.

        Raises:
            ArgumentError: a layer keeps everything and has no mask to narrow; or the rotary follows
                the length, and the cache is not "growing".
        """
        if self.cache != "growing" and follows_length(decoder):
            raise ArgumentError(
                f"cache is {self.cache!r}, but this model's rotary frequencies follow the length, "
                "and its prefix is run "
                'again when they change; only cache="growing" can do that'
            )
        more = self.narrowing
        if more is None:
            return decoder
        shared = {id(x): x for x in (*decoder.parameters(), *decoder.buffers())}
        twin = copy.deepcopy(decoder, shared)
        for i, layer in enumerate(twin.layers):
            if not isinstance(layer.get_submodule("attention").new_cache(), (Growing, Latent)):  # type: ignore[operator]
                continue
            if not isinstance(layer.attention, Attention):
                raise ArgumentError(
                    f"layer {i} is {type(layer.attention).__name__}, which keeps everything and "
                    "has no mask to narrow; "
                    f"cache={self.cache!r} cannot serve this model: choose one of "
                    f"{', '.join(name for name, kind in CACHES if not kind.evicts)}"
                )
            layer.attention = _narrowed(layer.attention, more)
        return twin

    def _made(self, layer: nn.Module, rows: int) -> Cache:
        """The cache of a layer that keeps everything."""
        if not self.kind.needs_widths:
            return self.kind.for_layer(LayerSize(self.max_context, rows))
        mixer = layer.get_submodule("attention")
        shape = mixer.project.shape if isinstance(mixer, Attention) else None
        if shape is None or len(shape.memory) > 2:
            raise ArgumentError(
                f"{type(mixer).__name__} remembers more than keys and values; choose another "
                f"cache than {self.cache!r}"
            )
        widths = [size // (shape.G if len(shape.memory) > 1 else 1) for size in shape.memory]
        return self.kind.for_layer(LayerSize(self.max_context, rows, tuple(widths)))


def _narrowed(attention: Attention, more: Mask) -> Attention:
    """The attention with one more mask, or with positions that stay inside the cache."""
    bound = more.reach()
    if bound.sinks and attention.mask == Causal() and attention.bias is None:
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
            pass  # its heads do not end with one rotary: distances cannot be kept inside
    attention.mask = more if attention.mask is None else attention.mask & more
    return attention


def follows_length(decoder: nn.Module) -> bool:
    """Whether frequencies of a rotary follow the length of the text, so that cached keys go
    stale.
    """
    return any(isinstance(module, PerRowRotary) for module in decoder.modules())
