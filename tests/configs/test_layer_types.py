"""Windows per layer: published configs, every rule of precedence, and transformers' own layer types
for the same keys.
"""

from __future__ import annotations

import os
import re
from typing import Any

import pytest

from regard.configs.base import layer_windows
from regard.errors import ArgumentError

FULL, SLIDING = "full_attention", "sliding_attention"


def slow(layers: int, keys: dict[str, Any]) -> list[int | None]:
    """The rules one layer at a time, in the order of precedence."""
    found: list[int | None] = []
    for i in range(layers):
        if keys.get("use_sliding_window") is False:
            slides = False
        elif "layer_types" in keys:
            slides = keys["layer_types"][i].startswith("sliding")
        elif "sliding_window_pattern" in keys:
            slides = (i + 1) / keys["sliding_window_pattern"] not in range(1, layers + 1)
        else:
            slides = not i < keys.get("max_window_layers", 0)
        found.append(keys.get("sliding_window") if slides else None)
    return found


NAMES = [FULL, SLIDING] * 2
WIDTH = {"sliding_window": 8}
QWEN = WIDTH | {"use_sliding_window": True}
VOID = WIDTH | {"use_sliding_window": False}
CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "llama": (4, {}),
    "Mistral-7B-v0.1": (32, {"sliding_window": 4096}),
    "Mistral-7B-v0.3": (32, {"sliding_window": None}),
    "gemma-3-1b": (26, {"sliding_window": 512, "sliding_window_pattern": 6}),
    "every layer full": (3, {"sliding_window": 8, "sliding_window_pattern": 1}),
    "no layer full": (3, {"sliding_window": 8, "sliding_window_pattern": 4}),
    "Qwen2.5-7B": (28, QWEN | {"max_window_layers": 28, "use_sliding_window": False}),
    "Qwen2.5, sliding": (36, QWEN | {"max_window_layers": 21}),
    "more full than layers": (4, QWEN | {"max_window_layers": 9}),
    "gpt-oss-20b": (24, {"sliding_window": 128, "layer_types": [SLIDING, FULL] * 12}),
    "named, against Qwen's rule": (4, QWEN | {"max_window_layers": 3, "layer_types": NAMES}),
    "named, as the pattern": (
        4,
        {"sliding_window_pattern": 2, "layer_types": NAMES[::-1], **WIDTH},
    ),
    "named full, no window": (2, {"layer_types": [FULL, FULL]}),
    "named full, void window": (2, VOID | {"layer_types": [FULL, FULL]}),
}


@pytest.mark.parametrize("case", CASES)
def test_each_layer_by_its_rule(case: str) -> None:
    layers, keys = CASES[case]
    assert list(layer_windows(layers, **keys)) == slow(layers, keys)


@pytest.mark.parametrize("kind", ["Qwen2", "Qwen3", "Gemma2", "Gemma3Text", "GptOss"])
@pytest.mark.parametrize("window", [None, 7])
def test_as_transformers_names_layers(kind: str, window: int | None) -> None:
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    transformers = pytest.importorskip("transformers", reason="needs the transformers extra")
    keys: dict[str, Any] = {"sliding_window": 7}
    if kind.startswith("Qwen"):
        keys |= {"max_window_layers": 3, "use_sliding_window": window is not None}
    given = keys | ({"sliding_window_pattern": 5} if kind == "Gemma3Text" else {})
    theirs = getattr(transformers, f"{kind}Config")(num_hidden_layers=11, **given)
    if kind in ("Gemma2", "GptOss"):
        given["sliding_window_pattern"] = 2
    expected = [7 if name == SLIDING else None for name in theirs.layer_types]
    assert list(layer_windows(11, **given)) == expected
    if any(expected) or not kind.startswith("Qwen"):
        assert list(layer_windows(11, sliding_window=7, layer_types=theirs.layer_types)) == expected


MIXED = [FULL, SLIDING, FULL]
AGAINST = WIDTH | {"layer_types": MIXED, "sliding_window_pattern": 3}
WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "too few": ({"layer_types": [FULL]}, "layer_types has 1 entry and num_hidden_layers is 3"),
    "a string": ({"layer_types": FULL}, "layer_types is 'full_attention'; it must be a list"),
    "not a list": ({"layer_types": 3}, "layer_types is 3; it must be a list of names"),
    "misspelt": ({"layer_types": [FULL, "sliding_atention", FULL]}, "layer_types[1] is"),
    "chunked": (WIDTH | {"layer_types": ["chunked_attention"] * 3}, "; supported are 'full_attent"),
    "not a name": ({"layer_types": [FULL, FULL, [1]]}, "layer_types[2] is [1]; supported are"),
    "no width": ({"layer_types": MIXED}, "layer_types makes layer 1 'sliding_attention'"),
    "void width": (VOID | {"layer_types": MIXED}, "and use_sliding_window is false"),
    "pattern without width": ({"sliding_window_pattern": 2}, "sliding_window_pattern 2 makes"),
    "pattern against names": (AGAINST, "and sliding_window_pattern 3 makes it 'sliding_attention'"),
    "use without width": ({"use_sliding_window": True}, "use_sliding_window is true"),
    "width 0": ({"sliding_window": 0}, "sliding_window is 0; it must be an integer of at least 1"),
    "width true": ({"sliding_window": True}, "sliding_window is True; it must be an integer"),
    "width a float": ({"sliding_window": 8.0}, "sliding_window is 8.0; it must be an integer"),
    "pattern 0": ({"sliding_window_pattern": 0}, "sliding_window_pattern is 0"),
    "negative": ({"max_window_layers": -1}, "max_window_layers is -1; it must be an integer"),
}


@pytest.mark.parametrize("case", WRONG)
def test_contradictions_are_named(case: str) -> None:
    keys, message = WRONG[case]
    with pytest.raises(ArgumentError, match=re.escape(message)):
        layer_windows(3, **keys)


def test_no_layers() -> None:
    with pytest.raises(ArgumentError, match="num_hidden_layers is 0; it must be an integer of at"):
        layer_windows(0)
