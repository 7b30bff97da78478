"""Build the documentation site: docs/ in both languages, and the reference of the API.

    python -m pip install -c constraints.txt '.[docs]'
    python docs/build_site.py site
    python -m http.server --directory site

The English site is written to the folder, the Chinese one to its subfolder zh/. Zensical makes the
pages (Material for MkDocs, whose successor it is, only gets security fixes, and MkDocs 1 is not
maintained), and mkdocstrings the reference. Every page is copied to a folder first, where its links
get the addresses of the site; docs/ itself can be read without a build.
"""

from __future__ import annotations

import argparse
import ast
import html
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
CHINESE = ".zh-CN.md"
SCRIPTS = ("figure_numbers.js", "interactive.js", "sortable_tables.js")
"""The scripts of every page: the numbers of docs/interactive.json, the figures that a reader can
change, and tables in an element of the class "sortable"."""
STYLE = "site.css"
LANDING = "docs/landing.md"
"""The first page of the site; links to README, the first page of the repository, lead there."""
UNSEARCHED = ("project/changelog/", "project/log/", "source/")
"""Pages that search leaves out: histories, and listings of files."""
INLINE = re.compile(
    r"(?P<start>!?\[(?:[^\[\]]|\[[^\]]*\])*\]\()(?P<link>[^)\s]+)(?P<end>\))"  # a link or a picture
    r"|(?P<ticks>`+)(?!`).*?(?<!`)(?P=ticks)(?!`)"  # code
    r"|\$\$(?P<block>[^$]+)\$\$|(?<![\w$])\$(?P<math>[^\s$](?:[^$\n]*[^\s$])?)\$(?![\w$])"
    r"|\]\[",  # would begin a link to a heading
    re.DOTALL,
)
BOX = re.compile(
    r"^> \*\*(Where the notes? [^*]*|笔记错在哪里|几篇笔记互相矛盾)[.。]\*\* ?(.*(?:\n>.*)*)",
    re.MULTILINE,
)
"""A box of the course, which is an admonition on the site."""
ALONE = re.compile(r"^!\[((?:[^\[\]]|\[[^\]]*\])*)\]\([^)\s]+\)$", re.MULTILINE)
"""A picture that is a paragraph: its description is also its caption."""
SWITCH = re.compile(r"^(?:\*\*English\*\* · .*|\[English\].*)\n\n", re.MULTILINE)
"""The line of languages of the landing page: on the site, the header has it."""
WIDE_PAGE = "---\nhide:\n  - navigation\n  - toc\n---\n\n"
FENCE = re.compile(r"^(```|~~~).*?^\1[ ]*$", re.MULTILINE | re.DOTALL)
SCHEME = re.compile(r"[a-z]+:")


@dataclass(frozen=True)
class Section:
    """One group of pages in the navigation, with its title in both languages."""

    english: str
    chinese: str
    pages: tuple[str, ...]
    """Files of the repository; a pattern with * stands for the files that match it, in order."""


SECTIONS = (
    Section("Start", "开始", (LANDING,)),
    Section(
        "Learn",
        "学习",
        ("docs/learn/README.md", "docs/learn/[0-9]*.md", "docs/walkthrough.md", "docs/seeds.md"),
    ),
    Section(
        "Choose",
        "选择",
        (
            "docs/which-attention.md",
            "docs/catalogue.md",
            "docs/mechanisms.md",
            "docs/cost.md",
            "docs/compare.md",
            "docs/claims.md",
            "docs/field.md",
        ),
    ),
    Section(
        "Guides",
        "指南",
        (
            "docs/tour.md",
            "docs/command-line.md",
            "docs/models.md",
            "docs/weights.md",
            "docs/serve.md",
            "docs/transformers.md",
            "docs/pytorch.md",
            "docs/scores.md",
            "docs/convert.md",
            "docs/extend.md",
            "docs/audit.md",
            "docs/parallel.md",
            "docs/cpu.md",
            "docs/gpu.md",
        ),
    ),
    Section(
        "See", "观察", ("docs/explain.md", "docs/view.md", "docs/research.md", "docs/published.md")
    ),
    Section("Benchmarks", "性能", ("docs/benchmarks.md",)),
    Section(
        "Project",
        "项目",
        (
            "docs/reliability.md",
            "DESIGN.md",
            "CONTRIBUTING.md",
            "docs/dependencies.md",
            "CHANGELOG.md",
            "LOG.md",
            "SECURITY.md",
        ),
    ),
)


@dataclass(frozen=True)
class Site:
    """The pages of one language."""

    language: str
    """Its code, as browsers write it: "en" or "zh"."""
    pages: dict[str, str]
    """The address of each file of the repository in the staged folder: docs/cost.md is cost.md."""
    titles: dict[str, str]
    """The title of each page in the navigation, by file."""

    @property
    def other(self) -> str:
        """The way from the root of this site to the root of the other language's."""
        return "zh/" if self.language == "en" else "../"


def expand(patterns: tuple[str, ...]) -> Iterator[str]:
    """The English files that the patterns of a section name, in order; what lacks is left out."""
    for pattern in patterns:
        for path in sorted(ROOT.glob(pattern)):
            if not path.name.endswith(CHINESE):
                yield path.relative_to(ROOT).as_posix()


def translation(source: str) -> str:
    """The file that has the same page in Chinese."""
    return source.removesuffix(".md") + CHINESE


def address(source: str) -> str:
    """Where a page stands in the site: docs/learn/README.md is learn/index.md."""
    if source in (LANDING, translation(LANDING)):
        return "index.md"
    page = source.removesuffix(CHINESE).removesuffix(".md").removeprefix("docs/")
    parts = page.split("/")
    if parts[-1] == "README":
        parts[-1] = "index"
    elif "/" not in source:
        parts = ["project", parts[-1].lower()]
    return "/".join(parts) + ".md"


def title(source: str) -> str:
    """The first heading of a page, without marks of code and what follows its colon."""
    text = (ROOT / source).read_text(encoding="utf-8")
    heading = re.search(r"^# (.+)$", text, re.MULTILINE)
    if heading is None:
        raise SystemExit(f"{source} has no heading of the first level: the navigation needs one")
    return re.split(r"[:：](?= |[^ ])", heading[1].replace("`", ""))[0].strip()


def site(language: str) -> Site:
    """The pages of a language; where a Chinese page lacks, the Chinese site has the English one."""
    pages, titles = {}, {}
    for section in SECTIONS:
        for source in expand(section.pages):
            if language == "zh" and (ROOT / translation(source)).is_file():
                source = translation(source)
            elif language == "zh" and section.english == "Project":
                continue  # for contributors, in English: links lead to the English site
            pages[source] = address(source)
            titles[source] = title(source)
    return Site(language, pages, titles)


def relative(target: str, page: str) -> str:
    """The way from a staged page to a staged file."""
    return os.path.relpath(target, Path(page).parent)


def as_url(page: str) -> str:
    """The address of a page in the built site: cost.md is cost/, index.md is its folder."""
    return re.sub(r"(^|/)index\.md$", r"\1", page).removesuffix(".md") + (
        "" if page.endswith("index.md") else "/"
    )


class Stage:
    """The folder from which one language is built: its pages with the addresses of the site."""

    def __init__(self, folder: Path, mine: Site, theirs: Site) -> None:
        self.folder = folder / "docs"
        self.mine = mine
        self.theirs = theirs
        self._files: dict[str, str] = {}  # other files that pages link to, with their addresses

    def write(self) -> None:
        """Copy every page, and every file that one of them links to."""
        sys.path.insert(0, str(ROOT))  # a program in docs/ does not find the folder itself
        from docs import mechanism_pages

        for source, page in self.mine.pages.items():
            text = (ROOT / source).read_text(encoding="utf-8")
            if page == "index.md":
                text = WIDE_PAGE + SWITCH.sub("", text, count=1)
            text = self.rewrite(text, source)
            if source in mechanism_pages.LINKED:
                text = mechanism_pages.link_names(text)
            self._put(page, text)
        for page, text in mechanism_pages.pages(self.mine.language):
            self._put(page, text)
        for name in (*SCRIPTS[1:], STYLE):
            shutil.copyfile(ROOT / "docs" / name, self.folder / name)
        self._put(SCRIPTS[0], figure_numbers())
        for source, page in self._files.items():
            path = ROOT / source
            if page.endswith(".md"):
                self._put(page, as_listing(path, source))
            else:
                (self.folder / page).parent.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(path, self.folder / page)

    def _put(self, page: str, text: str) -> None:
        (self.folder / page).parent.mkdir(parents=True, exist_ok=True)
        (self.folder / page).write_text(text, encoding="utf-8")

    def rewrite(self, text: str, source: str) -> str:
        """The page with every link to a file changed to where the site has that file."""
        parts, end = [], 0
        for fence in FENCE.finditer(text):
            parts += [self._links(text[end : fence.start()], source), fence[0]]
            end = fence.end()
        return "".join([*parts, self._links(text[end:], source)])

    def _links(self, text: str, source: str) -> str:
        def changed(match: re.Match[str]) -> str:
            if match["link"]:
                return match["start"] + self._target(match["link"], source) + match["end"]
            if formula := match["block"] or match["math"]:
                return as_mathml(formula, block=bool(match["block"]))
            # `x[a][b]` outside code is text: no page of ours has links of that form
            return match[0] if match["ticks"] else r"]\["

        return INLINE.sub(changed, ALONE.sub(_captioned, BOX.sub(_admonition, text)))

    def _target(self, link: str, source: str) -> str:
        path, _, anchor = link.partition("#")
        if not path or SCHEME.match(link):
            return link
        target = os.path.normpath(Path(source).parent / path)
        if target in ("README.md", translation("README.md")):
            target = target.replace("README", LANDING.removesuffix(".md"))
        if not (ROOT / target).exists():
            raise SystemExit(f"{source} links to {link}, and there is no {target}")
        suffix = f"#{anchor}" if anchor else ""
        page = self.mine.pages[source]
        if target in self.mine.pages:
            return relative(self.mine.pages[target], page) + suffix
        if target in self.theirs.pages:  # the other language's site
            up = relative(".", page)  # Zensical adds the step from the file to its address
            return f"{up}/{self.mine.other}{as_url(self.theirs.pages[target])}{suffix}"
        return relative(self._file(target), page) + suffix

    def _file(self, target: str) -> str:
        """Where a file that is no page stands: pictures as they are, texts as a page of code."""
        path = ROOT / target
        if path.is_dir():
            raise SystemExit(f"a page links to the folder {target}: link to a file in it")
        picture = path.suffix in (".png", ".svg", ".jsonl", ".ipynb", ".html")
        plain = target.removeprefix("docs/") if picture else f"source/{target}.md"
        return self._files.setdefault(target, plain)


def _admonition(box: re.Match[str]) -> str:
    lines = [line.removeprefix(">").strip() for line in box[2].splitlines()]
    return "\n".join([f'!!! warning "{box[1]}"', "", *(f"    {line}" for line in lines)])


def _captioned(picture: re.Match[str]) -> str:
    return (
        f'{picture[0]}\n<span class="caption" aria-hidden="true">{html.escape(picture[1])}</span>'
    )


def as_mathml(formula: str, *, block: bool) -> str:
    """A formula of LaTeX as MathML, which browsers draw themselves."""
    from latex2mathml.converter import convert

    math: str = convert(formula.strip(), display="block" if block else "inline")
    return f'<div class="formula">{math}</div>' if block else math


def figure_numbers() -> str:
    """The numbers of the figures as a script: a page that is opened from a file reads no JSON."""
    numbers = (ROOT / "docs" / "interactive.json").read_text("utf-8").strip()
    return f"globalThis.regardData = {numbers};\n"


LANGUAGES = {".py": "python", ".toml": "toml", ".sh": "sh", ".json": "json"}


def as_listing(path: Path, source: str) -> str:
    """A text file of the repository as a page with its code."""
    text = path.read_text(encoding="utf-8")
    ticks = max((len(m) for m in re.findall("`+", text)), default=0)
    fence = "`" * max(3, ticks + 1)
    return f"# {source}\n\n{fence}{LANGUAGES.get(path.suffix, 'text')}\n{text}\n{fence}\n"


def public_modules() -> list[str]:
    """The names of the modules with `__all__`, and of those that `regard` exports.

    The sources are read and not imported: the site is built without the extras of the package.
    """
    exported = exports(ROOT / "src" / "regard" / "__init__.py")
    names = []
    for path in (ROOT / "src" / "regard").rglob("*.py"):
        parts = path.relative_to(ROOT / "src").with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        private = any(part.startswith("_") for part in name.split("."))
        if not private and (exports(path) or name.removeprefix("regard.") in exported):
            names.append(name)
    return sorted(names)


def exports(path: Path) -> list[str]:
    """The names in the `__all__` of a source, if it has one."""
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "__all__":
            return [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
    return []


def reference(folder: Path) -> list[dict[str, str]]:
    """Write one page for each public module; return their entries in the navigation."""
    entries = []
    for module in public_modules():
        page = f"api/{module}.md"
        (folder / page).parent.mkdir(parents=True, exist_ok=True)
        (folder / page).write_text(f"# {module}\n\n::: {module}\n", "utf-8")
        entries.append({module: page})
    return entries


def reference_links(folder: Path) -> list[dict[str, str]]:
    """Write the Chinese page that leads to the reference, which is English; return its entry."""
    (folder / "api").mkdir(parents=True, exist_ok=True)
    links = [f'- <a href="../../api/{module}/">{module}</a>' for module in public_modules()]
    text = ["# API", "", "API 参考由代码中的文档字符串生成，只有英文：", "", *links, ""]
    (folder / "api" / "index.md").write_text("\n".join(text), "utf-8")
    return [{"API": "api/index.md"}]


def configuration(stage: Stage, api: list[dict[str, str]]) -> dict[str, Any]:
    """The configuration of Zensical for one language."""
    english = stage.mine.language == "en"
    nav: list[Any] = []
    for section in SECTIONS:
        entries = [
            {stage.mine.titles[source]: stage.mine.pages[source]}
            for english_source in expand(section.pages)
            for source in (translation(english_source), english_source)
            if source in stage.mine.pages
        ]
        if entries:
            nav.append({section.english if english else section.chinese: entries})
    if api:
        nav.insert(-1, {"API": api})
    toggle = ("dark", "light") if english else ("深色", "浅色")
    words = "Switch to {} mode" if english else "切换到{}模式"
    system = "Switch to the mode of the system" if english else "跟随系统的模式"
    return {
        "site_name": "regard",
        "site_description": "Every attention mechanism, exact, fast and visible"
        if english
        else "让每一种注意力机制都精确、快速、可见",
        "nav": nav,
        "theme": {
            "name": "material",
            "language": stage.mine.language,
            "font": False,
            "features": [
                "content.code.copy",
                "navigation.footer",
                "navigation.indexes",
                "navigation.path",
                "navigation.tabs",
                "navigation.top",
                "search.highlight",
                "toc.follow",
            ],
            "palette": [
                {
                    "media": "(prefers-color-scheme)",
                    "toggle": {"icon": "lucide/sun-moon", "name": words.format(toggle[1])},
                },
                {
                    "media": "(prefers-color-scheme: light)",
                    "scheme": "default",
                    "toggle": {"icon": "lucide/sun", "name": words.format(toggle[0])},
                },
                {
                    "media": "(prefers-color-scheme: dark)",
                    "scheme": "slate",
                    "toggle": {"icon": "lucide/moon", "name": system},
                },
            ],
        },
        "extra_css": [STYLE],
        "extra": {
            "generator": False,
            "alternate": [
                {"name": "English", "link": "./" if english else "../", "lang": "en"},
                {"name": "简体中文", "link": "./zh/" if english else "./", "lang": "zh"},
            ],
        },
        "extra_javascript": list(SCRIPTS),
        "plugins": {
            "search": {},
            "mkdocstrings": {
                "handlers": {
                    "python": {
                        "paths": [str(ROOT / "src")],
                        "options": {
                            "docstring_style": "google",
                            "extensions": [str(ROOT / "docs" / "griffe_extensions.py")],
                            # tests/surface checks docstrings: `a, b: text` describes two arguments
                            "docstring_options": {"warnings": False},
                            "docstring_section_style": "list",
                            "show_source": False,
                            "show_root_heading": False,
                            "show_root_toc_entry": False,
                            "show_symbol_type_heading": True,
                            "members_order": "__all__",
                            "filters": ["!^_"],
                            "separate_signature": True,
                            "show_signature_annotations": True,
                            "signature_crossrefs": True,
                            "heading_level": 2,
                        },
                    }
                }
            },
        },
        "markdown_extensions": [
            "attr_list",
            "md_in_html",
            "tables",
            "admonition",
            {
                "toc": {
                    "permalink": True,
                    "slugify": {"object": "pymdownx.slugs.slugify", "kwds": {"case": "lower"}},
                }
            },
            {"pymdownx.highlight": {"pygments_lang_class": True}},
            "pymdownx.superfences",
        ],
    }


def build(language: str, work: Path, *, api: bool) -> Path:
    """Build the site of one language in a folder; return the folder with its pages."""
    mine, theirs = site(language), site("zh" if language == "en" else "en")
    folder = work / language
    stage = Stage(folder, mine, theirs)
    stage.write()
    write = reference if language == "en" else reference_links
    entries = write(stage.folder) if api else []
    config = folder / "mkdocs.yml"  # JSON is YAML
    config.write_text(json.dumps(configuration(stage, entries), ensure_ascii=False), "utf-8")
    command = [sys.executable, "-m", "zensical", "build", "--strict", "--config-file", str(config)]
    subprocess.run(command, cwd=folder, check=True)  # noqa: S603
    prepare_search(folder / "site")
    return folder / "site"


def prepare_search(folder: Path) -> None:
    """Leave histories and listings out of the index of a built site, give the reference its full
    names, and let the search program read questions (docs/search_words.js).
    """
    index = folder / "search.json"
    content = json.loads(index.read_text("utf-8"))
    kept = [x for x in content["items"] if not x["location"].startswith(UNSEARCHED)]
    for item in kept:
        name = item["location"].partition("#")[2]
        if item["location"].startswith("api/") and name.startswith("regard."):
            item["title"] = name
    index.write_text(json.dumps(content | {"items": kept}, ensure_ascii=False), "utf-8")
    (worker,) = (folder / "assets" / "javascripts" / "workers").glob("search.*.js")
    words = (ROOT / "docs" / "search_words.js").read_text("utf-8")
    worker.write_text(f"{worker.read_text('utf-8')}\n{words}", "utf-8")


def main(arguments: list[str] | None = None) -> None:
    """Build both languages into a folder, which must be new or empty."""
    parser = argparse.ArgumentParser(description="Build the documentation site in both languages.")
    parser.add_argument(
        "folder", type=Path, help="folder that gets the site; it must be new or empty"
    )
    parser.add_argument("--no-api", action="store_true", help="leave the API reference out")
    options = parser.parse_args(arguments)
    if options.folder.exists() and any(options.folder.iterdir()):
        parser.error(f"{options.folder} is not empty: name a new folder, or empty it")
    with tempfile.TemporaryDirectory() as work:
        english = build("en", Path(work), api=not options.no_api)
        chinese = build("zh", Path(work), api=not options.no_api)
        shutil.copytree(english, options.folder, dirs_exist_ok=True)
        shutil.copytree(chinese, options.folder / "zh")


if __name__ == "__main__":
    main()
