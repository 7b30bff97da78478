"""Pictures of the pages that a newcomer meets first, to be looked at by a person:

    python docs/build_site.py build/site && python -m tests.docs.screenshots build/site FOLDER

Each page is photographed at the width of a phone, a tablet and a desktop, light and dark; --lang zh
takes the Chinese site. docs/images/screens has a small set, which --small writes.
"""

from __future__ import annotations

import argparse
import base64
import tempfile
from contextlib import ExitStack
from pathlib import Path

import regard
from regard.cli.app import run
from regard.inspect import record, view
from tests.view.browser import Tab, chromium

ROOT = Path(__file__).parents[2]
SIZES = {390: 844, 820: 1180, 1280: 800}
PAGES = {
    "landing": "index.html",
    "chapter-1": "learn/01-why-attention/index.html",
    "mechanism": "mechanisms/gqa/index.html",
    "table": "mechanisms/index.html",
}
SENTENCES = {
    "en": ("smollm2", "When Mary and John went to the store, John gave a drink to"),
    "zh": ("gemma3", "妈妈和爸爸去了商店，爸爸把一瓶水递给了"),
}
SMALL = (
    ("landing", 390, "light"),
    ("landing", 1280, "dark"),
    ("chapter-1", 820, "light"),
    ("mechanism", 1280, "light"),
    ("table", 390, "dark"),
    ("explain", 820, "dark"),
    ("viewer", 1280, "light"),
)
"""The pages, widths and colours of the set in the repository."""


def explained(lang: str, work: Path) -> str:
    """The address of a page that `regard explain --html` wrote."""
    name, text = SENTENCES[lang]
    page = work / "explain.html"
    assert run(["explain", text, "--model", name, "--html", str(page), "--lang", lang]) == 0
    return page.as_uri()


def viewed(lang: str, servers: ExitStack) -> str:
    """The address of a running viewer, on the text of the landing page."""
    name = f"landing{'.zh-CN' if lang == 'zh' else ''}.md"
    text = (ROOT / "docs" / name).read_text("utf-8").split("\n\n", 2)[2]
    server = view(record(regard.load("tiny"), text, keep=()), lang=lang)
    return servers.enter_context(server).url


def photograph(tab: Tab, address: str, path: Path, width: int, mode: str, *, small: bool) -> None:
    """Write a picture of a page at a width, in light or dark colours."""
    tab.resize(width, SIZES[width], mobile=width < 500)
    tab.prefers(color_scheme=mode, reduced_motion="reduce")
    tab.open(address)
    if path.name.startswith("viewer"):  # its server computes tiles when they are looked at
        tab.wait("document.querySelector('#peaks button') !== null", seconds=120)
        tab.wait("document.getElementById('inspector').dataset.shows", seconds=120)
    tab.js("new Promise(done => setTimeout(done, 1500))")
    tab.settle()
    answer = tab.call("Page.captureScreenshot", format="webp", quality=40 if small else 80)
    path.write_bytes(base64.b64decode(answer["data"]))


def main() -> None:
    """Photograph every page."""
    parser = argparse.ArgumentParser(description="Photograph the pages of a built site.")
    parser.add_argument("site", type=Path, help="folder of the built site")
    parser.add_argument("folder", type=Path, help="folder that gets the pictures")
    parser.add_argument("--lang", choices=list(SENTENCES), default="en")
    parser.add_argument("--only", help="the name of one page")
    parser.add_argument("--small", action="store_true", help="the small set, well compressed")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    names = [options.only] if options.only else [*PAGES, "explain", "viewer"]
    every = [(n, width, mode) for n in names for width in SIZES for mode in ("light", "dark")]
    if options.small:
        every = [one for one in SMALL if one[0] in names]
    root = options.site / "zh" if options.lang == "zh" else options.site
    found = {key: (root / path).resolve().as_uri() for key, path in PAGES.items()}
    with ExitStack() as stack:
        work = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        if "explain" in names:
            found["explain"] = explained(options.lang, work)
        if "viewer" in names:
            found["viewer"] = viewed(options.lang, stack)
        browser = stack.enter_context(chromium())
        for page, width, mode in every:
            tab = browser.tab()
            path = options.folder / f"{page}-{width}-{mode}.webp"
            photograph(tab, found[page], path, width, mode, small=options.small)
            print(path, path.stat().st_size)
            tab.close()


if __name__ == "__main__":
    main()
