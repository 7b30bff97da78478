"""Which layers read the keys and values of an earlier one, and a decoder in which they do."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

from regard.errors import ArgumentError
from regard.models.decoder import Decoder
from regard.nn import Block
from regard.nn.attention.attention import Attention
from regard.nn.attention.cross import without_own_memory
from regard.units import plural


def cross_layer(layers: int, every: int) -> tuple[int | None, ...]:
    """Return the pattern of CLA: every n-th layer stores keys and values, which the layers up to
    the next one read. Source: Brandon et al. 2024 (arXiv 2405.12981), section 3.
    """
    if min(layers, every) < 1:
        raise ArgumentError(f"layers is {layers} and every {every}; both must be at least 1")
    return tuple(i - i % every if i % every else None for i in range(layers))


def you_only_cache_once(layers: int) -> tuple[int | None, ...]:
    """Return the pattern of YOCO: the first layer of the upper half stores the only global keys and
    values, which later layers read. Source: Sun et al. 2024 (arXiv 2405.05254), section 2.
    """
    if layers < 2:
        raise ArgumentError(f"layers is {layers}; it must be at least 2")
    half = layers // 2
    return tuple(half if i > half else None for i in range(layers))


def last_layers(kinds: Sequence[str], shared: int) -> tuple[int | None, ...]:
    """Return the pattern of Gemma 3n and 4: each of the last layers reads the last layer of its
    kind that stores keys and values, as `num_kv_shared_layers` of the published code.
    """
    first = len(kinds) - shared
    if not 0 <= shared < max(1, len(kinds)):
        raise ArgumentError(
            f"shared is {shared} for {plural(len(kinds), 'layer')}; it must be at least 0 and less"
        )
    stored = {kind: i for i, kind in enumerate(kinds[:first])}
    missing = [kind for kind in kinds[first:] if kind not in stored]
    if missing:
        raise ArgumentError(
            f"no layer before {first} has the kind {missing[0]!r}, which a later layer shares; "
            "share fewer layers"
        )
    return tuple(stored[kind] if i >= first else None for i, kind in enumerate(kinds))


def share_memory(decoder: Decoder, memory_from: Sequence[int | None]) -> Decoder:
    """Return a decoder whose layers read earlier layers' keys and values, without key and value
    maps. Source: Brandon et al. 2024 (arXiv 2405.12981).
    """
    layers = [cast("Block", layer) for layer in decoder.layers]
    shared = Decoder(decoder.embed, layers, decoder.norm, decoder.head, memory_from)
    for i, source in enumerate(shared.memory_from):
        if source is None:
            continue
        own, other = (shared.layers[n].get_submodule("attention") for n in (i, source))
        if not isinstance(own, Attention) or not isinstance(other, Attention):
            raise ArgumentError(
                f"layer {i} is {type(own).__name__} and reads layer {source}, which is "
                f"{type(other).__name__}; both must be softmax attention with SeparateQKV"
            )
        reader = without_own_memory(own)
        _, G, D, E, _ = reader.project.shape
        _, G2, D2, E2, _ = other.project.shape
        if (G, D, E) != (G2, D2, E2):
            raise ArgumentError(
                f"layer {i} has (groups, key dim, value dim) = {(G, D, E)}, and layer {source} has "
                f"{(G2, D2, E2)}; both must be the same"
            )
        shared.layers[i].attention = reader
    return shared
