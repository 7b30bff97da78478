"""matplotlib figures: their style, and their conversion to SVG text for a page, or to a file.

An SVG of matplotlib is adapted to a page: colours become attributes that the style of `css`
replaces on dark pages; `style` attributes, which a content security policy would block, are
removed; text stays text; and marks get tooltips. Equal data give equal bytes.

matplotlib is imported by the functions that draw, never by `import regard.view.plotting`.
"""

from __future__ import annotations

import io
import math
import re
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING

from regard import units
from regard.errors import FileError
from regard.files.atomic_write import write_user_file
from regard.language import language
from regard.text_table import display_width
from regard.untrusted_text import escape_controls
from regard.view import palette

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.colors import ListedColormap, LogNorm, Normalize
    from matplotlib.figure import Figure
    from matplotlib.text import Text


_drawing_lock = Lock()
_LONG_DECIMAL = re.compile(r"-?\d+\.\d{3,}")
FORMATS = (".svg", ".png", ".pdf")
"""Endings of files to which a figure can be written."""
SVG = "http://www.w3.org/2000/svg"
LETTER_WIDTH = 7.9
"""Approximate width of a letter of a name, in pixels."""
PAGE = 688
"""Width in pixels at which a page of the documentation shows a picture."""
NUM_SHADES = 16
"""Number of shades of a weight; each has a colour for light pages and one for dark pages."""

FONTS = (
    "system-ui,'Noto Sans','Noto Sans CJK SC','Noto Sans SC','PingFang SC','Microsoft YaHei',"
    "sans-serif"
)
"""Fonts with which a browser shows the text of an SVG, including Chinese."""

CHINESE = (
    "notosanscjk-regular",
    "notosanscjksc-regular",
    "notosanssc-regular",
    "sourcehansanssc-regular",
    "pingfang",
    "msyh",
    "simhei",
    "wqy-microhei",
)
"""Files of fonts with Chinese characters, used for PNG and PDF if one of them is installed."""


@dataclass(frozen=True)
class Drawing:
    """A figure, and the texts of its marks in order, by the gid of the artist."""

    figure: Figure
    hints: Mapping[str, Sequence[str]] = field(default_factory=dict)


def check_format(path: Path) -> None:
    """Refuse a file whose ending is not in `FORMATS`.

    >>> check_format(Path("pattern.jpg"))
    Traceback (most recent call last):
    regard.errors.FileError: pattern.jpg is no picture; its name must end in .svg, .png, .pdf
    """
    if path.suffix.lower() not in FORMATS:
        raise FileError(f"{path} is no picture; its name must end in {', '.join(FORMATS)}")


def new_figure(wide: float, high: float) -> Figure:
    """Return an empty figure of a size in pixels, in the colours of a light page."""
    from matplotlib.figure import Figure

    return Figure(figsize=(wide / 72, high / 72), dpi=72, facecolor=palette.LIGHT["card"])


def new_axes(figure: Figure, left: float, right: float, top: float, bottom: float) -> Axes:
    """Return axes with margins in pixels: a light grid, no frame, grey numbers."""
    wide, high = (72 * x for x in figure.get_size_inches())
    axes = figure.add_axes(
        (left / wide, bottom / high, (wide - left - right) / wide, (high - top - bottom) / high)
    )
    axes.set_facecolor("none")
    axes.set_axisbelow(True)
    axes.grid(axis="y", color=palette.LIGHT["line"], linewidth=1)
    axes.tick_params(length=0, pad=7, colors=palette.LIGHT["soft"], labelsize=13)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return axes


def write_at(
    figure: Figure, x: float, y: float, text: str, *, role: str = "soft", size: int = 13
) -> None:
    """Write a text that begins x pixels from the left and y pixels below the top of the figure."""
    wide, high = (72 * side for side in figure.get_size_inches())
    figure.text(
        x / wide,
        1 - y / high,
        escape_controls(text),
        color=palette.LIGHT[role],
        fontsize=size,
        fontweight="bold" if role == "ink" else "normal",
    )


def weight_colours() -> ListedColormap:
    """Return the colour map of weights from 0 to 1."""
    from matplotlib.colors import ListedColormap

    return ListedColormap(_shades("light"), name="weights")


def lowest_weight(columns: int) -> float:
    """Return 1 / (16 N), rounded up to a power of two: 1 / N is near the scale's middle."""
    return float(2.0 ** -(4 + int(math.log2(max(columns, 1)))))


def weight_scale(columns: int) -> LogNorm:
    """Return the logarithmic colour scale from `lowest_weight`, which it clips to, to 1."""
    from matplotlib.colors import LogNorm

    return LogNorm(lowest_weight(columns), 1, clip=True)


def linear_scale() -> Normalize:
    """Return the linear colour scale from 0 to 1, for weights that are compared by eye."""
    from matplotlib.colors import Normalize

    return Normalize(0, 1, clip=True)


def power_of_two(x: float) -> str:
    """Return a power of two as text."""
    exponent = round(math.log2(x))
    return "2" + str(exponent).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def signed_colours() -> ListedColormap:
    """Return the colour map from negative (orange) through 0 to positive (blue)."""
    from matplotlib.colors import ListedColormap

    return ListedColormap(_signed_shades("light"), name="signed")


def css() -> str:
    """Return the style that adapts the charts of a page to dark pages."""
    pairs = {palette.LIGHT[name]: palette.DARK[name] for name in palette.LIGHT}
    pairs |= dict(zip(_shades("light"), _shades("dark"), strict=True))
    pairs |= dict(zip(_signed_shades("light"), _signed_shades("dark"), strict=True))
    rules = "".join(
        f'.chart [{what}="{light}"]{{{what}:{dark}}}'
        for light, dark in pairs.items()
        for what in ("fill", "stroke")
    )
    return f"@media (prefers-color-scheme:dark){{{rules}}}\n"


def svg(drawing: Drawing, title: str, *, alone: bool = True) -> str:
    """Return a figure as SVG text."""
    drawing.figure.patch.set_visible(alone)
    text = io.StringIO()
    with _settings(drawing.figure, title):
        drawing.figure.savefig(text, format="svg", metadata={"Date": None})
    root = ET.fromstring(text.getvalue())  # noqa: S314 (matplotlib wrote it just now)
    root = _plain(root)
    _hint(root, drawing.hints)
    _drop_ids(root)
    wide, high = (round(72 * x) for x in drawing.figure.get_size_inches())
    root.attrib = {
        "class": "chart",
        "xmlns": SVG,
        "viewBox": f"0 0 {wide} {high}",
        "width": str(wide),
        "height": str(high),
        "role": "img",
        "aria-label": escape_controls(title),
        "font-family": FONTS,
        "stroke-linejoin": "round",
    }
    if alone:
        style = ET.Element("style")
        style.text = css()
        root.insert(0, style)
    return ET.tostring(root, encoding="unicode")


def write(drawing: Drawing, path: Path, title: str) -> int:
    """Write a figure to a file; its ending determines the format."""
    check_format(path)
    kind = path.suffix.lower()
    with write_user_file(path) as place:
        if kind == ".svg":
            place.write_text(svg(drawing, title) + "\n", "utf-8")
        else:
            nothing = {".pdf": {"CreationDate": None}, ".png": {"Software": None}}[kind]
            fonts = _chinese_fonts() if _is_wide(drawing.figure) else ()
            if _is_wide(drawing.figure) and not fonts and language() == "zh":
                raise FileError(
                    f"{path}: no font with Chinese characters is installed, so that its labels "
                    "would be boxes; install one (fonts-noto-cjk), write a .svg, or use --lang en"
                )
            with _settings(drawing.figure, title, fonts=fonts):
                drawing.figure.savefig(place, format=kind[1:], dpi=144, metadata=nothing)
    return path.stat().st_size


@contextmanager
def _settings(figure: Figure, title: str, fonts: Sequence[str] = ()) -> Iterator[None]:
    """Set matplotlib's parameters so that equal figures give equal files.

    Identifiers follow from the title, which differs within a page; dollar signs are no mathematics.
    The parameters belong to the process, so that threads wait for each other.
    """
    from matplotlib import rc_context

    for text in _texts(figure):
        wide = display_width(text.get_text()) > len(text.get_text())
        text.set_parse_math(False)
        text.set_fontfamily(["DejaVu Sans", *(fonts if wide else ())])
        if wide and fonts:  # the font file has only the normal weight
            text.set_fontweight("normal")
    settings = rc_context(
        {
            "svg.fonttype": "none",
            "svg.hashsalt": f"regard {title}",
            "font.family": ["DejaVu Sans", *fonts],
            "text.parse_math": False,
            "path.simplify": False,
        }
    )
    with _drawing_lock, settings, _unwarned(figure):
        yield


def _unwarned(figure: Figure) -> AbstractContextManager[None]:
    """Suppress warnings about characters that matplotlib's font lacks; readers have fonts."""
    from matplotlib.font_manager import findfont, get_font

    own = get_font(findfont("DejaVu Sans"))
    letters = {letter for text in _texts(figure) for letter in text.get_text()}
    if all(own.get_char_index(ord(letter)) for letter in letters if letter.isprintable()):
        return nullcontext()
    from regard.process_state import ignore_warnings

    return ignore_warnings()


def _texts(figure: Figure) -> list[Text]:
    """Return every text of a figure."""
    from matplotlib.text import Text

    return [one for one in figure.findobj(Text) if isinstance(one, Text)]


def _is_wide(figure: Figure) -> bool:
    """Return whether a text of a figure has Chinese or other wide characters."""
    return any(display_width(text.get_text()) > len(text.get_text()) for text in _texts(figure))


@cache
def _chinese_fonts() -> tuple[str, ...]:
    """Return the first installed font with Chinese characters, if there is one."""
    from matplotlib.font_manager import findSystemFonts, fontManager, get_font

    there = {Path(path).stem.lower(): path for path in findSystemFonts()}
    for name in CHINESE:
        if name in there:
            fontManager.addfont(there[name])
            return (get_font(there[name]).family_name,)
    return ()


def _shades(theme: str) -> list[str]:
    return _colours(palette.WEIGHTS[theme], NUM_SHADES)


def _signed_shades(theme: str) -> list[str]:
    # an odd number, so that 0 has the colour in the middle
    return _colours(palette.SIGNED[theme], NUM_SHADES + 1)


def _colours(stops: Sequence[palette.Rgb], count: int) -> list[str]:
    colours = (palette.ramp(stops, i / (count - 1)) for i in range(count))
    return ["#{:02x}{:02x}{:02x}".format(*rgb) for rgb in colours]


def _plain(element: ET.Element) -> ET.Element:
    """Return an element without namespaces, metadata, styles and clip paths.

    A shape that is used several times takes the colours of each use.
    """
    result = ET.Element(element.tag.partition("}")[2])
    result.text, result.tail = element.text, element.tail
    for name, value in element.attrib.items():
        if name == "style":
            result.attrib |= _attributes(value)
        elif name != "clip-path" and not value.startswith("rotate(-0 "):
            result.set(name.rpartition("}")[2], _short(value))
    for child in map(_plain, element):
        if child.tag not in ("metadata", "style", "clipPath"):
            result.append(child)
        if result.tag == "defs":
            child.attrib = {k: v for k, v in child.attrib.items() if k not in ("fill", "stroke")}
    return result


def _short(value: str) -> str:
    """Return an attribute in one line, with coordinates rounded to a hundredth of a pixel."""
    text = " ".join(value.split())
    return _LONG_DECIMAL.sub(lambda match: f"{float(match[0]):.2f}".rstrip("0").rstrip("."), text)


def _attributes(style: str) -> dict[str, str]:
    """Return the declarations of a style as attributes, which have the same names in SVG."""
    pairs = (one.partition(":") for one in style.split(";") if one.strip())
    attributes = {name.strip(): value.strip() for name, _, value in pairs}
    # the root element sets it once
    attributes.pop("font-family", None)
    return attributes


def _hint(root: ET.Element, hints: Mapping[str, Sequence[str]]) -> None:
    """Add a tooltip to every mark; marks are uses of a shape, or shapes of their own."""
    for group in list(root.iter("g")):
        texts = hints.get(group.get("id", ""))
        if texts is None:
            continue
        marks = [*group.iter("use")] or list(group.findall("path"))
        for mark, text in zip(marks, texts, strict=True):
            title = ET.SubElement(mark, "title")
            title.text = escape_controls(text)


def _drop_ids(root: ET.Element) -> None:
    """Remove the identifiers that are not referred to, because two charts may share a page."""
    values = [value for element in root.iter() for value in element.attrib.values()]
    used = {value[1:] for value in values if value.startswith("#")}
    used |= {value[5:-1] for value in values if value.startswith("url(#")}
    for element in root.iter():
        if element.get("id", "") not in used:
            element.attrib.pop("id", None)


UNITS = {
    "share": r"^share|比例|占比",
    "seconds": r"\bseconds\b|(?<![毫微每])秒",
    "bytes": r"\bbytes\b|字节",
    "FLOPs": r"\bFLOPs\b",
}
"""Each unit with the words for it in the name of an axis, in every language of figures."""
TOKENS = re.compile("token|词元")
"""The words for a number of tokens, likewise."""


def unit_in(words: str) -> str:
    """Return the unit that the name of an axis contains, or "" for none.

    >>> [unit_in(words) for words in ("cache, bytes", "share correct", "milliseconds", "nats")]
    ['bytes', 'share', '', '']
    >>> unit_in("缓存，字节")
    'bytes'
    """
    return next((unit for unit, name in UNITS.items() if re.search(name, words)), "")


def value_formatter(unit: str) -> Callable[[float], str]:
    """Return the function that formats a value of a unit in a tooltip."""
    known: dict[str, Callable[[float], str]] = {
        "bytes": units.size,
        "seconds": units.seconds,
        "FLOPs": lambda x: units.count(x, "FLOP"),
        "share": lambda x: f"{100 * x:.4g} %",
    }
    return known.get(unit, format_number)


def format_number(x: float) -> str:
    """Format a number without a unit in few characters.

    >>> format_number(0.25), format_number(4096), format_number(12345678.0)
    ('0.25', '4096', '1.2e7')
    """
    if abs(x) < 1e5:
        return f"{x:.4g}" if x != int(x) else f"{x:.0f}"
    return f"{x:.2g}".replace("e+0", "e").replace("e+", "e")


def tick_formatter(unit: str, *, tokens: bool) -> Callable[[float], str]:
    """Return the function that formats a round value of a unit beside an axis."""

    def words(x: float) -> str:
        if unit == "share":
            return f"{100 * x:g} %"
        if unit == "ratio":
            return f"{x:g}x"
        if unit == "FLOPs" and x > 0:
            step = min(int(math.log10(x) + 1e-9) // 3, 6)
            return f"{x / 1000**step:g} {('', 'k', 'M', 'G', 'T', 'P', 'E')[step]}".rstrip()
        if unit == "bytes" and x >= 1:
            step = min(int(math.log2(x) + 1e-9) // 10, 5)
            return f"{x / 1024**step:g} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[step]}"
        if unit == "seconds" and x > 0:
            scale, name = next(
                ((s, n) for s, n in ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs")) if x >= 0.999 * s),
                (1e-9, "ns"),
            )
            return f"{x / scale:.4g} {name}"
        if tokens and x == int(x):
            return units.tokens(int(x))
        return format_number(x)

    return words


def set_scale(
    axes: Axes,
    name: str,
    values: Sequence[float],
    unit: str,
    *,
    log: bool,
    room: float = 0.04,
    tokens: bool = False,
    most: int = 9,
) -> None:
    """Set the limits of an axis, with a margin around the values, and round tick values."""
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    low, high = min(values), max(values)
    if log:
        (axes.set_xscale if name == "x" else axes.set_yscale)("log")
        wide = max((math.log(high) - math.log(low)) * room, 0.12)
        low, high = low * math.exp(-wide), high * math.exp(wide)
    else:
        wide = (high - low) * room or max(abs(high) * 0.05, 0.05)
        low, high = low - wide, high + wide
    (axes.set_xlim if name == "x" else axes.set_ylim)(low, high)
    axis = axes.xaxis if name == "x" else axes.yaxis
    words = tick_formatter(unit, tokens=tokens)
    axis.set_major_locator(FixedLocator(round_ticks(low, high, values, unit, log=log, most=most)))
    axis.set_major_formatter(FuncFormatter(lambda x, _: words(x)))
    axis.set_minor_locator(NullLocator())


def round_ticks(
    low: float, high: float, values: Sequence[float], unit: str, *, log: bool, most: int
) -> list[float]:
    """Return at most `most` round ticks within the limits, as matplotlib proposes them."""
    from matplotlib.ticker import Locator, LogLocator, MaxNLocator

    whole = all(v == int(v) for v in values)
    plain = MaxNLocator(6, steps=[1, 2, 5, 10], integer=whole and unit != "share")
    locators: list[Locator] = []
    if log and (unit == "bytes" or all(v > 0 and math.log2(v) % 1 == 0 for v in values)):
        locators = [LogLocator(2, numticks=most)]
    elif log:
        locators = [LogLocator(10, subs, numticks=most) for subs in ((1.0,), (1.0, 2.0, 5.0))]
    candidates = [
        [float(t) for t in locator.tick_values(low, high) if low <= t <= high]
        for locator in (*locators, plain)
    ]
    # prefer powers to linear steps, unless there are too few of them
    few = min(3, len({*values}))
    return max(
        (t for t in candidates[:-1] if few <= len(t) <= most), key=len, default=candidates[-1]
    )
