"""Figures of mechanisms: shared keys and values, cache bytes, and masks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Bool

from regard import units
from regard.language import translate, translate_count
from regard.view import palette, plotting
from regard.view.plotting import Drawing

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_DRAWN_HEADS = 8
"""More query heads are drawn in proportion."""
PANEL, HIGH = 236, 300


@dataclass(frozen=True)
class CachedHeads:
    """What one mechanism caches for a token in one layer: `groups` is 0 with a latent."""

    name: str
    heads: int
    groups: int
    values: int
    latent: str = ""

    @property
    def drawn(self) -> tuple[int, int]:
        """The numbers of query heads and of key/value heads in the drawing."""
        heads = min(self.heads, MAX_DRAWN_HEADS)
        return heads, max(1, round(heads * self.groups / self.heads)) if self.groups else 0


@dataclass(frozen=True)
class HeadsFigure:
    """Several mechanisms side by side: query heads above, cached keys and values below."""

    mechanisms: Sequence[CachedHeads]
    bytes_per_value: int = 2
    title: str = field(
        default_factory=lambda: translate("what a cache holds for each token of one layer")
    )

    @property
    def captions(self) -> list[str]:
        """The line below each panel: the bytes that a token takes in the cache."""
        sizes = (units.size(x.values * self.bytes_per_value) for x in self.mechanisms)
        return [translate("{size} a token", size=size) for size in sizes]

    def draw(self) -> Drawing:
        """Return the figure, with a tooltip for each panel."""
        wide = PANEL * len(self.mechanisms) + 24
        figure = plotting.new_figure(wide, HIGH)
        plotting.write_at(figure, 16, 30, self.title, role="ink", size=15)
        for i, (one, caption) in enumerate(zip(self.mechanisms, self.captions, strict=True)):
            left = 12 + i * PANEL
            axes = plotting.new_axes(figure, left, wide - left - PANEL, 52, 44)
            axes.set_axis_off()
            axes.set_xlim(0, 1)
            axes.set_ylim(0, 1)
            _panel(axes, one)
            plotting.write_at(figure, left + 12, HIGH - 18, caption)
        return Drawing(figure)


def _panel(axes: Axes, one: CachedHeads) -> None:
    """Draw one mechanism: query heads, lines, and what is cached."""
    heads, groups = one.drawn
    columns = [(h + 0.5) / heads * 0.9 + 0.05 for h in range(heads)]
    axes.text(0.05, 0.97, one.name, color=palette.LIGHT["ink"], fontsize=14, va="center")
    label = translate_count(one.heads, "query head")
    axes.text(0.05, 0.86, label, color=palette.LIGHT["soft"], fontsize=12, va="center")
    for x in columns:
        _box(axes, x, 0.74, 0.7 / heads, 0.10, "q")
    if groups:
        places = [(g + 0.5) / groups * 0.9 + 0.05 for g in range(groups)]
        for h, x in enumerate(columns):
            axes.plot((x, places[h * groups // heads]), (0.68, 0.44), color=palette.LIGHT["soft"])
        for x in places:
            _box(axes, x, 0.38, 0.7 / heads, 0.10, "k")
            _box(axes, x, 0.24, 0.7 / heads, 0.10, "v")
        heads_kept = translate_count(one.groups, "key/value head")
        below = translate("cached: {what}", what=heads_kept)
    else:
        for x in columns:
            axes.plot((x, 0.5), (0.68, 0.38), color=palette.LIGHT["soft"], linestyle=(0, (4, 3)))
        _box(axes, 0.5, 0.32, 0.7, 0.12, "s")
        below = translate("cached: {what}", what=one.latent)
    axes.text(0.05, 0.06, below, color=palette.LIGHT["soft"], fontsize=12, va="center")


def _box(axes: Axes, x: float, y: float, wide: float, high: float, role: str) -> None:
    from matplotlib.patches import Rectangle

    corner = (x - wide / 2, y - high / 2)
    axes.add_patch(Rectangle(corner, wide, high, color=palette.LIGHT[role], linewidth=0))
    text = role if role in "qkv" else translate("latent")
    axes.text(x, y, text, color="#ffffff", fontsize=11, ha="center", va="center")


@dataclass(frozen=True)
class MaskFigure:
    """The keys that each query sees, `[T, S]`: rows are queries, columns are keys."""

    visible: Bool[np.ndarray, "T S"]
    title: str
    q_start: int = 0
    k_start: int = 0

    def draw(self) -> Drawing:
        """Return the figure; visible pairs are dark."""
        rows, columns = self.visible.shape
        side = max(2.0, min(22.0, 640 / max(rows, columns)))
        wide, high = max(340.0, columns * side + 90), rows * side + 110
        figure = plotting.new_figure(wide, high)
        plotting.write_at(figure, 16, 28, self.title, role="ink", size=15)
        axes = plotting.new_axes(figure, 66, wide - 66 - columns * side, 62, 48)
        self.fill(axes, lines=side > 6)
        axes.set_ylabel(translate("query"), color=palette.LIGHT["soft"])
        axes.set_xlabel(translate("key"), color=palette.LIGHT["soft"])
        return Drawing(figure)

    def fill(self, axes: Axes, *, lines: bool = True) -> None:
        """Draw the pairs into axes, the first query at the top."""
        rows, columns = self.visible.shape
        axes.grid(visible=False)
        axes.pcolormesh(
            np.arange(columns + 1) + self.k_start - 0.5,
            np.arange(rows + 1) + self.q_start - 0.5,
            self.visible.astype(float) * 0.8,
            cmap=plotting.weight_colours(),
            vmin=0,
            vmax=1,
            edgecolors=palette.LIGHT["line"] if lines else "none",
            linewidth=1,
        )
        axes.invert_yaxis()
        axes.xaxis.tick_top()


@dataclass(frozen=True)
class MaskPanels:
    """Several masks side by side, each with its number of visible pairs."""

    masks: Sequence[MaskFigure]
    title: str

    @property
    def captions(self) -> list[str]:
        """The line below each panel: how many pairs are visible."""
        return [
            translate(
                "{n} of {all} pairs", n=f"{int(x.visible.sum()):,}", all=f"{x.visible.size:,}"
            )
            for x in self.masks
        ]

    def draw(self) -> Drawing:
        """Return the figure; rows are queries, columns are keys."""
        side, gap = 190, 34
        wide, high = len(self.masks) * (side + gap) + 20, side + 132
        figure = plotting.new_figure(wide, high)
        plotting.write_at(figure, 16, 28, self.title, role="ink", size=15)
        for i, (one, caption) in enumerate(zip(self.masks, self.captions, strict=True)):
            left = 20 + i * (side + gap)
            plotting.write_at(figure, left, 66, one.title)
            axes = plotting.new_axes(figure, left, wide - left - side, 82, 50)
            one.fill(axes)
            axes.set_xticks([])
            axes.set_yticks([])
            plotting.write_at(figure, left, high - 22, caption, size=12)
        return Drawing(figure)
