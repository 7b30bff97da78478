"""The documentation site: every page of docs/ is in it, and a browser that walks it meets no dead
link, no error and no other host.
"""

from __future__ import annotations

import functools
import http.server
import importlib.util
import json
import re
import shutil
import sys
import threading
from collections.abc import Iterator
from html.parser import HTMLParser
from inspect import signature
from pathlib import Path
from types import ModuleType
from urllib.parse import unquote, urljoin, urlparse

import pytest

from regard.nn import variants
from tests.surface.api_reference import modules
from tests.view.browser import CHROMIUM, WHY_NOT, Browser, BrowserError, chromium

ROOT = Path(__file__).parents[2]


@functools.cache
def builder() -> ModuleType:
    """docs/build_site.py as a module."""
    spec = importlib.util.spec_from_file_location("build_site", ROOT / "docs" / "build_site.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["build_site"] = module  # dataclasses look their module up by its name
    spec.loader.exec_module(module)
    return module


def test_the_reference_has_the_public_modules_without_importing_them() -> None:
    assert builder().public_modules() == sorted(module.__name__ for module in modules())


@pytest.mark.full
def test_the_reference_has_the_constructors_as_python_shows_them() -> None:
    griffe = pytest.importorskip("griffe")
    extensions = griffe.load_extensions(str(ROOT / "docs" / "griffe_extensions.py"))
    loader = griffe.GriffeLoader(search_paths=[ROOT / "src"], extensions=extensions)
    package = loader.load("regard")
    loader.resolve_aliases(implicit=False)
    gqa = package["nn.variants"].members["gqa"]
    assert gqa.is_exported
    assert [each.name for each in gqa.parameters] == list(signature(variants.gqa).parameters)
    assert "groups: the key/value heads G" in gqa.docstring.value
    assert "```pycon" in gqa.docstring.value


def test_every_page_of_docs_is_in_the_navigation() -> None:
    pages = {p.relative_to(ROOT).as_posix() for p in (ROOT / "docs").rglob("*.md")}
    pages -= {x for x in pages if x.startswith("docs/log/")}  # experiments: read in the repository
    english, chinese = (builder().site(language).pages for language in ("en", "zh"))
    assert pages - set(english) - set(chinese) == set()
    assert {page for page in english if page.endswith(".zh-CN.md")} == set()
    assert len(english) > 20


def test_links_get_the_addresses_of_the_site(tmp_path: Path) -> None:
    make = builder()
    stage = make.Stage(tmp_path, make.site("en"), make.site("zh"))
    rewritten = stage.rewrite(
        "[a](cost.md#several-ranks) [b](../README.zh-CN.md) [c](https://arxiv.org/abs/1706.03762)"
        " [d](#set-up) [e](../LICENSE) `x[a](docs/cost.md)` p['a']['b']\n\n"
        "```\n[f](docs/cost.md)\n```\n",
        "docs/landing.md",
    )
    assert "[a](cost.md#several-ranks) [b](./zh/)" in rewritten
    assert "[c](https://arxiv.org/abs/1706.03762) [d](#set-up) [e](source/LICENSE.md)" in rewritten
    assert r"`x[a](docs/cost.md)` p['a']\['b']" in rewritten
    assert "```\n[f](docs/cost.md)\n```" in rewritten
    pytest.importorskip("latex2mathml")
    text = stage.rewrite("from $5 to $6, `$x$`, $x_j$ and $$p = 1$$", "docs/landing.md")
    assert text.startswith("from $5 to $6, `$x$`, <math")
    assert text.count("<msub><mi>x</mi><mi>j</mi></msub>") == 1
    assert text.count('display="block"') == 1
    chinese = make.Stage(tmp_path, make.site("zh"), make.site("en"))
    text = chinese.rewrite("[a](view.md) [b](../DESIGN.md)", "docs/view.zh-CN.md")
    assert text == "[a](./../view/) [b](./../project/design/)"


def test_a_link_to_a_missing_file_stops_the_build(tmp_path: Path) -> None:
    make = builder()
    stage = make.Stage(tmp_path, make.site("en"), make.site("zh"))
    with pytest.raises(SystemExit, match=r"links to nowhere\.md"):
        stage.rewrite("[a](nowhere.md)", "docs/landing.md")


@pytest.mark.parametrize(
    ("page", "families"), [("landing.md", "{} families"), ("landing.zh-CN.md", "{} 个")]
)
def test_the_landing_page_has_the_numbers_of_the_package(page: str, families: str) -> None:
    text = (ROOT / "docs" / page).read_text("utf-8")
    numbers = re.findall(r"^\*\*(\d[\d.]*)", text, re.MULTILINE)
    chapters = {path.name[:2] for path in (ROOT / "docs" / "learn").glob("[0-9]*.md")}
    assert numbers[:1] + numbers[2:3] == [str(len(variants.VARIANTS)), str(len(chapters))]
    compared = (ROOT / "docs" / page.replace("landing", "field")).read_text("utf-8")
    assert families.format(numbers[1]) in compared
    assert f"4 bits {numbers[3]} of llama.cpp" in (ROOT / "LOG.md").read_text("utf-8")


class Links(HTMLParser):
    """The addresses that a page of the site refers to, and the names of its own places."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.places: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        for name, value in attrs:
            if name in ("id", "name") and value:
                self.places.add(value)
            elif name in ("href", "src") and value:
                self.links.append(value)


TABLE = """<!doctype html><meta charset="utf-8"><div class="sortable"><table>
<thead><tr><th>name</th><th>MiB</th></tr></thead>
<tbody><tr><td>b</td><td>16</td></tr><tr><td>c</td><td>–</td></tr><tr><td>a</td><td>9.5</td></tr>
<tr><td>d</td><td>128</td></tr></tbody></table></div><script src="sortable_tables.js"></script>"""


@pytest.mark.full
def test_a_click_on_the_head_of_a_column_sorts_a_table(tmp_path: Path) -> None:
    if CHROMIUM is None:
        pytest.skip(WHY_NOT)
    script = builder().SCRIPTS[-1]
    shutil.copyfile(ROOT / "docs" / script, tmp_path / script)
    (tmp_path / "index.html").write_text(TABLE, encoding="utf-8")
    names = "[...document.querySelectorAll('td:first-child')].map(x => x.innerText).join('')"
    with chromium() as running:
        tab = running.tab()
        tab.open((tmp_path / "index.html").as_uri())
        assert tab.js(names) == "bcad"
        for column, order in ((1, "abcd"), (1, "dcba"), (2, "abdc"), (2, "dbac")):
            tab.click(f"th:nth-child({column})")  # a dash is no number, and stays at the end
            assert tab.js(names) == order
        assert tab.js("document.querySelector('[aria-sort]').innerText") == "MiB"
        assert tab.errors == []


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("zensical")
    pytest.importorskip("mkdocstrings")
    folder: Path = tmp_path_factory.mktemp("docs") / "site"
    builder().main([str(folder)])
    return folder


def dead_links(folder: Path) -> list[str]:
    """Links from one page of a built site to a file or a place that does not exist.

    The site lies in a folder of its host, above which no link may lead.
    """
    pages = {
        "/" + path.relative_to(folder).as_posix().removesuffix("index.html"): Links(
            path.read_text(encoding="utf-8")
        )
        for path in folder.rglob("*.html")
        if path.name != "404.html"  # its links begin at the root of a host that nobody knows yet
    }
    dead = []
    for address, page in pages.items():
        for link in page.links:
            target = urlparse(urljoin(f"http://site/folder{address}", link))
            if target.netloc != "site" or target.scheme != "http":
                continue
            path, place = unquote(target.path), unquote(target.fragment)
            path = path.removeprefix("/folder")
            if not target.path.startswith("/folder/"):
                known = False
            elif path in pages:
                known = not place or place.startswith("__") or place in pages[path].places
            else:
                known = (folder / path.lstrip("/")).is_file()
            if not known:
                dead.append(f"{address} -> {link}")
    return dead


@pytest.mark.full
def test_no_link_of_the_site_is_dead(built: Path) -> None:
    assert dead_links(built) == []
    assert len(list(built.rglob("index.html"))) > 60
    chinese = (built / "zh/api/index.html").read_text(encoding="utf-8")
    names = builder().public_modules()
    assert all(f'href="../../api/{name}/"' in chinese for name in names)
    for page in ("mechanisms", "zh/mechanisms"):  # its tables can be sorted
        text = (built / page / "index.html").read_text(encoding="utf-8")
        assert text.count('class="sortable"') == 2
        assert builder().SCRIPTS[-1] in text


@pytest.mark.full
def test_dead_links_would_be_found(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "index.html").write_text(
        '<a href="a/#here">1</a><a href="a/#gone">2</a><a href="../a/">above the site</a>'
    )
    (tmp_path / "a" / "index.html").write_text('<p id="here"></p><img src="../none.png">')
    assert dead_links(tmp_path) == ["/ -> a/#gone", "/ -> ../a/", "/a/ -> ../none.png"]


@pytest.fixture(scope="module")
def host(built: Path) -> Iterator[str]:
    class Quiet(http.server.SimpleHTTPRequestHandler):
        def log_message(self, format: str, *args: object) -> None: ...

    handler = functools.partial(Quiet, directory=str(built))
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        thread = threading.Thread(target=server.serve_forever, daemon=True)
        thread.start()
        yield f"http://127.0.0.1:{server.server_address[1]}"
        server.shutdown()
        thread.join()


@pytest.fixture(scope="module")
def browser(built: Path) -> Iterator[Browser]:
    if CHROMIUM is None:
        pytest.skip(WHY_NOT)
    with chromium() as running:
        yield running


@pytest.mark.full
def test_a_walk_through_every_page_meets_no_error_and_no_other_host(
    built: Path, host: str, browser: Browser
) -> None:
    """Every English page that somebody wrote, and every eighth of those that are made from one
    template or are its translation: they have the same scripts and figures.
    """
    tab = browser.tab()
    walked = 0
    pages = sorted(built.rglob("index.html"))
    alike = [
        path
        for folder in ("api", "mechanisms", "source", "zh")
        for path in pages
        if path.is_relative_to(built / folder)
    ]
    for path in sorted({*pages} - {*alike}) + alike[::8]:
        address = f"{host}/{path.relative_to(built).as_posix().removesuffix('index.html')}"
        tab.open(address)
        assert tab.js("document.querySelector('article h1').innerText.length") > 0, address
        walked += 1
    assert tab.errors == []
    assert {f"{u.scheme}://{u.netloc}" for u in map(urlparse, tab.requests)} - {"data://"} == {host}
    assert walked > 36
    tab.close()


@pytest.mark.full
def test_nothing_is_wider_than_a_phone(built: Path, host: str, browser: Browser) -> None:
    """A long formula, a table or a figure scrolls in itself, and never moves the page."""
    tab = browser.tab(400, 800)
    pages = ["", *(f"learn/{path.name}/" for path in sorted((built / "learn").glob("[0-9]*")))]
    for page in [f"{language}{page}" for language in ("", "zh/") for page in pages]:
        tab.open(f"{host}/{page}")
        width = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert tab.js(width) <= 0, page
    assert len(pages) == 13
    tab.open(f"{host}/zh/learn/02-dot-products-and-softmax/")
    assert tab.js("getComputedStyle(document.querySelector('.formula')).overflowX") == "auto"
    tab.close()


@pytest.mark.full
@pytest.mark.parametrize(("site", "word"), [("", "neighborhood"), ("zh/", "掩码")])
def test_the_search_finds_a_word(host: str, browser: Browser, site: str, word: str) -> None:
    tab = browser.tab()
    tab.open(f"{host}/{site}")
    tab.click(".md-search__button")
    dialog = """[...document.querySelectorAll("div")].find(x => x.shadowRoot)?.shadowRoot"""
    tab.wait(f"{dialog}?.querySelector('dialog[open] input') === {dialog}?.activeElement")
    found = f"""[...({dialog}.querySelectorAll("[role=listbox] a"))].some(
        link => link.innerText.toLowerCase().includes({json.dumps(word)}))"""
    for _ in range(20):  # what is typed before the index has loaded is forgotten
        tab.js(f"{dialog}?.querySelector('input')?.select()")
        tab.type(word)
        try:
            tab.wait(found, seconds=2)
            break
        except BrowserError:
            continue
    tab.wait(found, seconds=1)
    assert tab.errors == []
    tab.close()


QUERIES = {
    "": {
        "how do I install": "",
        "GQA": "learn/09-gqa-mqa-mla/",
        "grouped query attention": "learn/09-gqa-mqa-mla/",
        "what is softmax": "learn/02-dot-products-and-softmax/",
        "why divide by the square root": "learn/03-queries-keys-values/",
        "kv cache": "learn/08-cache/",
        "rotary position embedding": "learn/07-positions/",
        "which attention should I use": "which-attention/",
        "price of a model": "cost/",
        "quantization": "weights/",
    },
    "zh/": {
        "如何安装": "",
        "根号": "learn/03-queries-keys-values/",
        "分组查询注意力": "learn/09-gqa-mqa-mla/",
        "什么是掩码": "learn/04-masks/",
        "KV缓存": "learn/08-cache/",
        "旋转位置编码": "learn/07-positions/",
        "滑动窗口": "learn/10-windows-sparse-linear/",
        "用哪种注意力": "which-attention/",
        "多头": "learn/05-heads/",
        "量化": "weights/",
    },
}
"""What is asked, and the page that must be among the first three."""
ASK = """async queries => {
  const { base, search } = JSON.parse(document.getElementById("__config").textContent);
  const worker = new Worker(new URL(search, location));
  const told = () => new Promise(done => { worker.onmessage = event => done(event.data); });
  const index = await (await fetch(new URL("search.json", new URL(base + "/", location)))).json();
  worker.postMessage({ type: 0, data: index });
  await told();
  const answers = [];
  const filter = { input: { type: "operator", data: { operator: "and", operands: [] } } };
  for (const input of queries) {
    worker.postMessage({ type: 2, data: { input, filter } });
    const found = (await told()).data.items.map(x => index.items[x.id].location.split("#")[0]);
    answers.push([...new Set(found)].slice(0, 3));
  }
  worker.terminate();
  return answers;
}"""


@pytest.mark.full
@pytest.mark.parametrize("language", QUERIES, ids=["en", "zh"])
def test_the_search_leads_to_the_right_page(host: str, browser: Browser, language: str) -> None:
    """The search program of the built site is asked, with the site's own index."""
    tab = browser.tab()
    tab.open(f"{host}/{language}")
    queries = QUERIES[language]
    answers = tab.js(f"({ASK})({json.dumps([*queries, 'zzqxv'])})")
    found = dict(zip(queries, answers, strict=False))
    assert {q: found[q] for q, page in queries.items() if page not in found[q]} == {}
    assert answers[-1] == []  # a word that no page has
    assert tab.errors == []
    tab.close()


@pytest.mark.full
def test_the_search_leaves_histories_and_listings_out(built: Path) -> None:
    for index in (built / "search.json", built / "zh" / "search.json"):
        pages = {x["location"] for x in json.loads(index.read_text("utf-8"))["items"]}
        assert len(pages) > 100
        assert not [page for page in pages if page.startswith(builder().UNSEARCHED)]
        assert not any("docs/log" in page or "tests/" in page for page in pages)


@pytest.mark.full
def test_the_dark_mode_of_the_system_and_the_other_language(host: str, browser: Browser) -> None:
    tab = browser.tab()
    for mode, scheme in (("light", "default"), ("dark", "slate"), ("light", "default")):
        tab.prefers(color_scheme=mode)
        tab.open(f"{host}/")
        tab.wait(f"document.body.dataset.mdColorScheme === '{scheme}'")
        # pictures have the colours of the page, whatever the system prefers
        assert tab.js("getComputedStyle(document.body).colorScheme") == mode
    assert tab.js("document.documentElement.lang") == "en"
    other = tab.js("document.querySelector('.md-select__link[hreflang=zh]').href")
    assert other == f"{host}/zh/"
    tab.open(other)
    assert tab.js("document.documentElement.lang") == "zh"
    tab.close()
