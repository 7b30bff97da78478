"""The sliding window of each layer, from the five keys of config.json that define it.

`regard.load` and `regard cost` both read these keys here.
"""

from __future__ import annotations

from collections.abc import Sequence

from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.units import plural

FULL, SLIDING = "full_attention", "sliding_attention"


def windows(
    num_hidden_layers: int,
    *,
    sliding_window: int | None = None,
    layer_types: Sequence[str] | None = None,
    sliding_window_pattern: int | None = None,
    max_window_layers: int | None = None,
    use_sliding_window: bool | None = None,
) -> tuple[int | None, ...]:
    """Return the sliding window of each layer, or None for full attention.

    A window counts the query's own position. The first of these keys that is given decides whether
    layer i has a window: `layer_types` (layer_types[i] == "sliding_attention"),
    `sliding_window_pattern` ((i + 1) % sliding_window_pattern != 0), `max_window_layers` (i >=
    max_window_layers). Without them every layer has the window.

    Args:
        num_hidden_layers: the number of layers.
        sliding_window: the window W of the sliding layers; None is no window in any layer.
        layer_types: a name for each layer, "full_attention" or "sliding_attention".
        sliding_window_pattern: n; every n-th layer has full attention, as in Gemma 3.
        max_window_layers: the number of first layers with full attention, as in Qwen 2.
        use_sliding_window: False disables the window (Qwen 2); None for a family without this key.

    Returns:
        W or None for each layer.

    Raises:
        ArgumentError: a number is out of range, a layer type is unknown or not supported,
            layer_types has not one entry per layer, or two keys contradict each other: sliding
            layers without a window, a pattern that differs from layer_types, use_sliding_window
            without a window or against layer_types.

    >>> windows(4, sliding_window=512, sliding_window_pattern=2)
    (512, None, 512, None)
    >>> windows(3, sliding_window=4096, max_window_layers=1, use_sliding_window=False)
    (None, None, None)

    Source: the keys' meaning in Hugging Face's Gemma 3 and Qwen 2 configurations; windows: Beltagy
    et al. 2020 (arXiv 2004.05150).
    """
    _at_least("num_hidden_layers", num_hidden_layers, 1)
    _at_least("sliding_window", sliding_window, 1)
    _at_least("sliding_window_pattern", sliding_window_pattern, 1)
    _at_least("max_window_layers", max_window_layers, 0)
    if use_sliding_window and sliding_window is None:
        raise ArgumentError(
            "use_sliding_window is true and sliding_window is null; give the width of the window, "
            "or set it to false"
        )
    width = sliding_window if use_sliding_window is not False else None
    source, slides = "", [i >= (max_window_layers or 0) for i in range(num_hidden_layers)]
    if sliding_window_pattern is not None:
        source = f"sliding_window_pattern {sliding_window_pattern}"
        patterned = [(i + 1) % sliding_window_pattern != 0 for i in range(num_hidden_layers)]
        slides = patterned
    if layer_types is not None:
        source, slides = "layer_types", _slides_of_names(layer_types, num_hidden_layers)
        if sliding_window_pattern is not None:
            _check_agreement(slides, patterned, sliding_window_pattern)
    if source and any(slides) and width is None:
        why = "sliding_window is null" if sliding_window is None else "use_sliding_window is false"
        raise ArgumentError(
            f"{source} makes layer {slides.index(True)} {SLIDING!r}, and {why}; a layer that "
            "slides needs a window"
        )
    return tuple(width if slide else None for slide in slides)


def _slides_of_names(layer_types: Sequence[str], layers: int) -> list[bool]:
    """Return for each layer whether its type is "sliding_attention"."""
    if isinstance(layer_types, str) or not isinstance(layer_types, Sequence):
        raise ArgumentError(f"layer_types is {layer_types!r}; it must be a list of names")
    if len(layer_types) != layers:
        raise ArgumentError(
            f"layer_types has {plural(len(layer_types), 'entry')} and num_hidden_layers is "
            f"{layers}; give one per layer"
        )
    for i, name in enumerate(layer_types):
        if name not in (FULL, SLIDING):
            hint = suggest(name, (FULL, SLIDING), cutoff=0.8)
            raise ArgumentError(
                f"layer_types[{i}] is {name!r}; supported are {FULL!r} and {SLIDING!r}{hint}"
            )
    return [name == SLIDING for name in layer_types]


def _check_agreement(named: list[bool], patterned: list[bool], pattern: int) -> None:
    for i, (name, by_pattern) in enumerate(zip(named, patterned, strict=True)):
        if name != by_pattern:
            kinds = [SLIDING if slides else FULL for slides in (name, by_pattern)]
            raise ArgumentError(
                f"layer_types[{i}] is {kinds[0]!r}, and sliding_window_pattern {pattern} makes it "
                f"{kinds[1]!r}; remove one of the two keys"
            )


def _at_least(name: str, value: int | None, least: int) -> None:
    if value is None:
        return
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ArgumentError(f"{name} is {value!r}; it must be an integer of at least {least}")
