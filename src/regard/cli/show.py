"""The command `regard show`, which draws any mask with its counts."""

from __future__ import annotations

import json as json_format
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from regard.cli.options import COLOR, JSON, argument, check_files, console_of, option, usage_error
from regard.did_you_mean import suggest
from regard.language import counted, translate, translate_count
from regard.span import Span
from regard.text_table import display_width, line_width, wrap
from regard.untrusted_text import error_text, parse_integer

if TYPE_CHECKING:
    from rich.text import Text

    from regard.masks import Mask

EPILOG = 'For example: regard show "causal & window(4) | sinks(1)" --queries 12'
MAX_TOKENS = 1 << 16
"""The maximum number of queries, and of keys."""
MAX_PAIRS = 1 << 27
"""The maximum number of pairs that are evaluated for a mask without key intervals."""
MAX_FIGURE = 512
"""The maximum number of queries, and of keys, of a figure."""
CUTS = ("balanced", "zigzag", "even")
"""The ways to cut a sequence among ranks."""
MAX_WIDTH = 80
"""The maximum number of columns of a drawing."""
MAX_STRIP = 32
"""The maximum number of characters of a rank's positions."""
MAX_RANKS = 256
"""The maximum number of ranks."""
MAX_DRAWN = 4
"""The maximum number of drawings, one for each batch row and head."""


def show(
    expression: str = argument(
        "A mask: full, causal, window(W), chunk(n), prefix(n), document((0, 3, 7)), sinks(n), "
        "global((0, 1)), dilated(n, step), strided(n), blockcausal(n), neighborhood((height, "
        "width), n), bigbird(block, blocks) and others, joined by &, |, ~ and parentheses.",
        default=...,
        metavar="MASK",
    ),
    queries: int = option("Number of queries.", default=16, min=1, max=MAX_TOKENS),
    keys: int | None = option(
        "Number of keys, at positions from 0.", shown="up to the last query", min=1, max=MAX_TOKENS
    ),
    start: int | None = option(
        "Position of the first query.", shown="the last query is at the last key"
    ),
    tiles: str | None = option(
        "Also draw the tiles of this size: 16, or 16x32 for queries x keys.",
        shown="tiles are only counted",
    ),
    figure: Path | None = option(
        f"Also draw the mask, at most {MAX_FIGURE} x {MAX_FIGURE} pairs, to this .svg, .png "
        "or .pdf file.",
        "--figure",
        metavar="FILE",
    ),
    ranks: int | None = option(
        "Also cut the sequence among this number of ranks, and draw which positions each one "
        "holds (regard.parallel.Shards).",
        min=1,
        max=MAX_RANKS,
    ),
    shards: str = option(
        "How --ranks cuts the sequence: balanced, zigzag or even.", "--shards", default="balanced"
    ),
    json: bool = JSON,
    color: bool | None = COLOR,
) -> None:
    """Draw any mask: which keys each query may attend to, the number of pairs, the key intervals,
    and the tiles that a kernel skips.

    Queries are at the last positions unless --start is given, so --queries 1 --keys 16 is a
    decoding step.
    """
    from regard import masks

    mask = masks.parse(expression)
    q, k = _positions(queries, keys, start)
    size = _tile_size(tiles, queries, k.length)
    _check_cost(mask, q, k)
    numbers = figures(mask, q, k, size)
    if figure is not None:
        _draw(figure, mask, q, k)
    if ranks is not None:
        numbers["ranks"] = rank_figures(mask, q, k, ranks, shards)
    if json:
        typer.echo(json_format.dumps(numbers))
        return
    console = console_of(color)
    ascii_only = not (console.encoding or "").lower().startswith("utf")
    for line in _lines(mask, q, k, numbers, draw_tiles=tiles is not None, ascii_only=ascii_only):
        console.print(line, soft_wrap=True, highlight=False)


def _draw(path: Path, mask: Mask, q: Span, k: Span) -> None:
    """Write the figure of a mask for its first batch row and head."""
    from regard.view.charts import write
    from regard.view.heatmaps import MaskFigure

    if max(q.length, k.length) > MAX_FIGURE:
        raise usage_error(
            "--figure",
            "draws at most {MAX_FIGURE} x {MAX_FIGURE} pairs, but there are {queries} x {keys}; "
            "give fewer --queries or --keys",
            MAX_FIGURE=MAX_FIGURE,
            queries=q.length,
            keys=k.length,
        )
    check_files({}, pictures={"--figure": path})
    visible = mask.block(q, k)[0, 0].numpy()
    write(MaskFigure(visible, str(mask), q.start, k.start), path)


def figures(mask: Mask, q: Span, k: Span, size: tuple[int, int]) -> dict[str, object]:
    """Return the numbers of a mask: pairs, keys per query, key intervals of each query, and tiles.

    Lists are indexed by batch row, head and query.
    """
    import torch

    from regard.masks import EMPTY, FULL, PARTIAL

    visible, tiles = mask.visible(q, k), mask.tiles(q, k, size)
    B, H, T = visible.shape
    intervals = mask.intervals(q)
    spans, most = None, None
    if intervals is not None:
        starts, stops = (x.clamp(k.start, k.stop).expand(B, H, -1, -1) for x in intervals)
        most = int((starts < stops).sum(-1).max())
        spans = torch.stack([starts, stops], -1).tolist()
        spans = [
            [[[x for x in line if x[0] < x[1]] for line in head] for head in row] for row in spans
        ]
    pairs = int(visible.sum())
    return {
        "mask": str(mask),
        "queries": [q.start, q.stop],
        "keys": [k.start, k.stop],
        "batch_rows": B,
        "heads": H,
        "pairs": pairs,
        "share": pairs / (B * H * T * k.length),
        "keys_per_query": {
            "min": int(visible.min()),
            "max": int(visible.max()),
            "mean": pairs / (B * H * T),
            "counts": visible.tolist(),
        },
        "most_intervals": most,
        "intervals": spans,
        "tiles": {
            "size": list(size),
            **{
                name: int((tiles == state).sum())
                for name, state in (("empty", EMPTY), ("partial", PARTIAL), ("full", FULL))
            },
        },
    }


def _lines(
    mask: Mask, q: Span, k: Span, numbers: dict[str, Any], *, draw_tiles: bool, ascii_only: bool
) -> Iterator[Text]:
    """Yield the lines of the drawing and of the counts."""
    import numpy as np
    from rich.text import Text

    from regard.view import mask_grid

    yield Text(numbers["mask"], "bold")
    yield Text()
    width = min(line_width(), MAX_WIDTH)
    cell = mask_grid.pool(q.length, k.length, width)
    B, H = numbers["batch_rows"], numbers["heads"]
    states = mask.tiles(q, k, cell).expand(B, H, -1, -1).numpy()
    counts = np.array(numbers["keys_per_query"]["counts"])
    size = tuple(numbers["tiles"]["size"])
    tiles = mask.tiles(q, k, size).expand(B, H, -1, -1).numpy() if draw_tiles else None
    places = [(b, h) for b in range(B) for h in range(H)]
    for b, h in places[:MAX_DRAWN]:
        if len(places) > 1:
            row = translate("batch row {b}", b=b) if B > 1 else ""
            head = translate("head {h}", h=h) if H > 1 else ""
            yield Text("  " + ", ".join(filter(None, [row, head])))
        yield from mask_grid.draw(
            mask_grid.Grid(states[b, h], counts[b, h], q.start, k.start, cell),
            ascii_only=ascii_only,
            width=width,
        )
        yield Text()
        if tiles is not None:
            yield from mask_grid.draw_tiles(tiles[b, h], size, ascii_only=ascii_only, width=width)
            yield Text()
    if len(places) > MAX_DRAWN:
        more = len(places) - MAX_DRAWN
        text = translate("... and {n} more batch rows and heads, counted below", n=more)
        yield from _wrapped(text)
        yield Text()
    rows = dict(_summary(numbers))
    column = max(map(display_width, rows)) + 3
    for name, text in rows.items():
        gap = " " * (column - 2 - display_width(name))
        body = wrap(text, line_width(), indent=" " * column, hang=" " * column)
        yield Text.assemble((f"  {name}{gap}", "dim"), body[column:])
    if "ranks" in numbers:
        yield Text()
        yield from _rank_lines(numbers["ranks"], k.length, ascii_only=ascii_only)


def rank_figures(mask: Mask, q: Span, k: Span, ranks: int, cut: str) -> dict[str, Any]:
    """Return the positions of each rank, its visible pairs, and the keys that others send it."""
    from regard.parallel import Shards
    from regard.parallel.shards import needed_keys

    if cut not in CUTS:
        raise usage_error(
            "--shards",
            '"{value}" is not one of {names}{hint}',
            value=error_text(cut, 60),
            names=", ".join(CUTS),
            hint=suggest(cut, CUTS),
        )
    if q != k or k.start:
        raise usage_error(
            "--ranks", "cuts one sequence of queries and keys; leave out --keys and --start"
        )
    if cut == "balanced":
        shards = Shards.balanced(k.length, ranks, mask)
    else:
        shards = (Shards.even if cut == "even" else Shards.zigzag)(k.length, ranks)
    received = [
        sum(
            stop - first
            for j in range(ranks)
            if j != i
            for _, first, stop in needed_keys(mask, shards.spans(i), shards.spans(j))
        )
        for i in range(ranks)
    ]
    return {
        "shards": cut,
        "spans": [[[x.start, x.stop] for x in spans] for spans in shards.ranks],
        "pairs": list(shards.work(mask)),
        "received_keys": received,
        "efficiency": shards.efficiency(mask),
    }


def _rank_lines(numbers: dict[str, Any], S: int, *, ascii_only: bool) -> Iterator[Text]:
    """Yield a line for each rank: the positions that it holds, its pairs and received keys."""
    from rich.text import Text

    from regard.view import mask_grid

    width = -(-S // MAX_STRIP)  # positions of one character
    own, other = ("#", ".") if ascii_only else ("█", "·")
    yield from _wrapped(
        translate(
            "{ranks}, {shards}: mean work / most work {efficiency}",
            ranks=translate_count(len(numbers["spans"]), "rank"),
            shards=numbers["shards"],
            efficiency=f"{numbers['efficiency']:.2f}",
        )
    )
    rows = zip(numbers["spans"], numbers["pairs"], numbers["received_keys"], strict=True)
    for rank, (spans, pairs, received) in enumerate(rows):
        is_own_cell = [any(a < i + width and i < b for a, b in spans) for i in range(0, S, width)]
        line = Text.assemble((f"  {rank:>5} ", mask_grid.style("q")))
        for is_own in is_own_cell:
            line.append(own if is_own else other, mask_grid.style("k") if is_own else "dim")
        line.append("  ")
        text = translate(
            "pairs {pairs}, keys received {received}", pairs=f"{pairs:,}", received=f"{received:,}"
        )
        if len(line.plain) + display_width(text) > line_width():
            yield line
            line = Text(" " * 8)
        yield line.append(text)


def _wrapped(text: str) -> Iterator[Text]:
    """Yield a sentence within the width of the terminal."""
    from rich.text import Text

    yield Text(wrap(text, line_width(), indent="  ", hang="  "))


def _summary(numbers: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield the counts as pairs of a title and a sentence."""
    q, k, keys_per_query, tiles = (
        numbers[name] for name in ("queries", "keys", "keys_per_query", "tiles")
    )
    T, S = q[1] - q[0], k[1] - k[0]
    all_pairs = numbers["batch_rows"] * numbers["heads"] * T * S
    yield (
        translate("positions"),
        translate(
            "queries {first} to {last}, keys {low} to {high}",
            first=q[0],
            last=q[1] - 1,
            low=k[0],
            high=k[1] - 1,
        ),
    )
    yield (
        translate("pairs"),
        translate(
            "{pairs} of {all} ({share})",
            pairs=f"{numbers['pairs']:,}",
            all=f"{all_pairs:,}",
            share=f"{numbers['share']:.1%}",
        ),
    )
    yield (
        translate("keys"),
        translate(
            "{least} to {most} per query, {mean} on average",
            least=keys_per_query["min"],
            most=keys_per_query["max"],
            mean=f"{keys_per_query['mean']:.4g}",
        ),
    )
    most_intervals = numbers["most_intervals"]
    yield (
        translate("intervals"),
        translate("none: visible keys have gaps or are unknown; kernels use tiles")
        if most_intervals is None
        else translate(
            "at most {n} per query, so kernels need not evaluate the mask", n=most_intervals
        ),
    )
    total = sum(tiles[name] for name in ("empty", "partial", "full"))
    yield (
        translate("tiles"),
        translate(
            "{empty} empty, {partial} partial, {full} full of {rows} x {columns}: {share} skipped",
            empty=f"{tiles['empty']:,}",
            partial=f"{tiles['partial']:,}",
            full=f"{tiles['full']:,}",
            rows=tiles["size"][0],
            columns=tiles["size"][1],
            share=f"{tiles['empty'] / total:.1%}",
        ),
    )


def _positions(queries: int, keys: int | None, start: int | None) -> tuple[Span, Span]:
    if start is None:
        keys = queries if keys is None else keys
        return Span(keys - queries, queries), Span(0, keys)
    return Span(start, queries), Span(0, max(start + queries, 1) if keys is None else keys)


def _tile_size(text: str | None, T: int, S: int) -> tuple[int, int]:
    """Return the requested tile size, or about four tiles per side of at most 128."""
    if text is None:
        side = min(128, 1 << max(0, (max(T, S) // 4).bit_length() - 1))
        return side, side
    sides = [parse_integer(part) or 0 for part in text.lower().split("x")]
    if len(sides) > 2 or min(sides) < 1:
        raise usage_error(
            "--tiles",
            '"{value}" must be a size such as 16, or 16x32 for queries x keys',
            value=error_text(text, 60),
        )
    return sides[0], sides[-1]


def _check_cost(mask: Mask, q: Span, k: Span) -> None:
    if q.length * k.length > MAX_PAIRS and mask.intervals(q[:1]) is None:
        raise usage_error(
            None,
            "{queries} x {keys} are too many: a mask without key intervals is evaluated pair by "
            "pair, for at most {MAX_PAIRS:,} pairs; give fewer --queries or --keys",
            queries=counted(q.length, "query"),
            keys=counted(k.length, "key"),
            MAX_PAIRS=MAX_PAIRS,
        )
