"""Colours: one per role, the same on every page, and distinguishable with colour-vision
deficiencies. No number is shown by colour alone.

Roles: q queries, k keys, v values, s scores and weights, z outputs of heads. The hues follow Okabe
and Ito 2008. Ramps change in lightness throughout, so that they can be read in grey as well.
"""

from __future__ import annotations

from collections.abc import Sequence

Rgb = tuple[int, int, int]

TERMINAL = {"q": "#3a8fdc", "k": "#dd6b20", "v": "#1b9e77", "s": "#a96bd8", "z": "#b08a1e"}
"""Colours of middle lightness, readable on dark and on light terminals."""

LIGHT = {
    "page": "#fbfbf9",
    "card": "#ffffff",
    "ink": "#1b1d23",
    "soft": "#5c6270",
    "line": "#dfe1e6",
    "hint": "#f1f2f5",
    "q": "#0063a8",
    "k": "#b44600",
    "v": "#00745a",
    "s": "#7a3ea6",
    "z": "#806000",
    "good": "#00745a",
    "bad": "#b3261e",
}
DARK = {
    "page": "#14161b",
    "card": "#1b1e25",
    "ink": "#e8eaef",
    "soft": "#a0a7b5",
    "line": "#333846",
    "hint": "#242833",
    "q": "#74b9f5",
    "k": "#ffa06b",
    "v": "#56d3ab",
    "s": "#cda4f6",
    "z": "#e5c662",
    "good": "#56d3ab",
    "bad": "#ff8f87",
}
"""CSS colours of the page, by name."""

WEIGHTS: dict[str, tuple[Rgb, ...]] = {
    "light": ((247, 245, 250), (205, 184, 226), (140, 90, 184), (74, 25, 120), (35, 6, 66)),
    "dark": ((30, 29, 38), (74, 52, 108), (132, 88, 184), (196, 158, 238), (250, 240, 255)),
}
"""Colours from weight 0 to weight 1."""

SIGNED: dict[str, tuple[Rgb, ...]] = {
    "light": ((127, 59, 8), (224, 130, 20), (247, 247, 245), (67, 147, 195), (5, 48, 97)),
    "dark": ((255, 190, 130), (190, 100, 30), (32, 34, 42), (50, 120, 190), (165, 215, 255)),
}
"""Colours from the most negative value (orange) through zero to the most positive (blue)."""


def ramp(stops: Sequence[Rgb], t: float) -> Rgb:
    """Return the colour at t in 0..1 (clipped) along evenly spaced stops."""
    x = min(max(t, 0.0), 1.0) * (len(stops) - 1)
    i = min(int(x), len(stops) - 2)
    low, high = stops[i], stops[i + 1]
    r, g, b = (round(a + (c - a) * (x - i)) for a, c in zip(low, high, strict=True))
    return r, g, b


def css(*, switch: bool = False) -> str:
    """Return the page's colours as CSS variables, for light and dark pages."""
    light, dark = (";".join(f"--{n}:{c}" for n, c in names.items()) for names in (LIGHT, DARK))
    if switch:
        dark = f"color-scheme:dark;{dark}"
        return (
            f":root{{color-scheme:light;{light}}}\n"
            f"@media (prefers-color-scheme:dark){{:root:not([data-theme]){{{dark}}}}}\n"
            f':root[data-theme="dark"]{{{dark}}}\n'
        )
    return (
        f":root{{color-scheme:light dark;{light}}}\n"
        f"@media (prefers-color-scheme:dark){{:root{{{dark}}}}}\n"
    )
