"""The course in docs/learn: both languages have the same code, output, figures and boxes; every
link leads somewhere; every command that a chapter names exists.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from docs.figures import FIGURE_FILES, READING_FILES
from tests.docs.test_docs import BLOCK
from tests.docs.test_seeds import IDS, PROGRAMS, anchors, is_command, is_whole_command

ROOT = Path(__file__).parents[2]
LEARN = ROOT / "docs" / "learn"
CHAPTERS = sorted(LEARN.glob("[0-9][0-9]-*[a-z].md"))
CHAPTERS = [p for p in CHAPTERS if ".zh-CN" not in p.name]
INDEX = LEARN / "README.md"
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\]\(([^)\s]+)\)")
BOX, CHINESE_BOX = "> **Where the note is wrong.**", "> **笔记错在哪里。**"
BOXES = re.compile(r"^> \*\*(?:Where the notes? |笔记错在哪里|几篇笔记互相矛盾)", re.MULTILINE)
INDEX_ROW = re.compile(r"^\| (\d+)\.(\d+) \|.*\| ([^|]+) \|$", re.MULTILINE)
SEEDS = ROOT / "docs" / "seeds.md"
WALKTHROUGH = ROOT / "docs" / "walkthrough.md"
EVERY_PAGE = [*ROOT.glob("*.md"), *sorted((ROOT / "docs").rglob("*.md"))]
EVERY_PAGE = [page for page in EVERY_PAGE if page.parent.name != "log"]
CHINESE = re.compile("[\u4e00-\u9fff]")


def read(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def chinese(page: Path) -> Path:
    return page.with_name(page.name.replace(".md", ".zh-CN.md"))


def code(text: str) -> list[tuple[str, str]]:
    """The blocks of a page without what is written for people: comments and docstrings."""
    return [
        (kind, re.sub(r'  # .*|^# .*\n|"""[^"]*"""', "", block, flags=re.MULTILINE))
        for kind, block in FENCE.findall(text)
    ]


def links(text: str) -> list[str]:
    """The links of a page, whatever the language of their aim."""
    found = (x.replace(".zh-CN.", ".").partition("#")[0] for x in LINK.findall(text))
    return [x.replace("images/zh/", "images/") for x in found]


def test_a_chinese_page_shows_the_chinese_figures() -> None:
    images = ROOT / "docs" / "images"
    drawn = {path.name for path in (images / "zh").iterdir()}
    assert drawn == {path.name for path in images.glob("*.svg")}
    assert drawn >= set(FIGURE_FILES)
    for page in sorted((ROOT / "docs").rglob("*.zh-CN.md")):
        shown = re.findall(r"images/([\w-]+\.svg)", read(page))
        assert [name for name in shown if name in drawn] == [], page.name


def test_figures_of_trained_models_differ_by_their_words_only() -> None:
    """They are not drawn again in Chinese, because their models would have to be trained again.
    Those that the code of a page draws are drawn in both languages.
    """
    drawn = {x for page in EVERY_PAGE for x in re.findall(r'\.to\("([\w-]+\.svg)"\)', read(page))}
    assert drawn >= {"published-induction.svg", "published-ioi.svg"}
    words = re.compile(r"(?s)<title>.*?</title>|(?<=>)[^<>]+(?=</t)|aria-label=\"[^\"]*\"")
    for path in sorted((ROOT / "docs" / "images" / "zh").iterdir()):
        if path.name in (*FIGURE_FILES, *READING_FILES, *drawn):
            continue
        both = [read(path), read(path.parents[1] / path.name)]
        assert words.sub("", both[0]) == words.sub("", both[1]), path.name
        numbers = [re.findall(r"\d\.\d{2,}", text) for text in both]
        assert numbers[0] == numbers[1], path.name
        assert re.search("[\u4e00-\u9fff]", both[0]), path.name


def differences(english: str, translated: str) -> list[str]:
    """What a translation lacks or has too much."""
    out = []
    if code(english) != code(translated):
        out.append("code")
    if sorted(links(english)) != sorted(links(translated)):
        out.append("links")
    if len(BOXES.findall(english)) != len(BOXES.findall(translated)):
        out.append("boxes")
    heads = [
        [len(x) for x in re.findall("^#+", FENCE.sub("", t), re.MULTILINE)]
        for t in (english, translated)
    ]
    if heads[0] != heads[1]:
        out.append("headings")
    return out


PAGES = [*CHAPTERS, INDEX, SEEDS, WALKTHROUGH, ROOT / "README.md"]


@pytest.mark.parametrize("page", [*CHAPTERS, INDEX, ROOT / "README.md"], ids=lambda p: p.stem)
def test_both_languages_have_the_same(page: Path) -> None:
    own = {"code", "links"} if page.parent == ROOT else set()  # tests/docs/test_readme_zh.py
    assert {*differences(read(page), read(chinese(page)))} - own == set()


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_every_paragraph_is_chinese(page: Path) -> None:
    text = FENCE.sub("", read(chinese(page)))
    prose = [x for x in text.split("\n\n") if re.search("[A-Za-z]{3,} [a-z]{3,} [a-z]{2,}", x)]
    assert [x for x in prose if not CHINESE.search(x)] == []
    plain = re.sub(r"`[^`]*`|\$[^$]*\$", "x", text)
    assert re.findall("[\u4e00-\u9fff][,;?!:]", plain) == [], "full-width marks"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_no_mark_of_emphasis_is_left_in_the_rendered_text(page: Path) -> None:
    """CommonMark does not close `*x：*y`: between a full-width mark and a letter."""
    renderer = pytest.importorskip("markdown_it").MarkdownIt("commonmark").enable("table")
    for one in (page, chinese(page)):
        rendered = renderer.render(re.sub(r"\$[^$\n]*\$", "x", FENCE.sub("", read(one))))
        assert "*" not in re.sub("<code>.*?</code>|<[^>]*>", "", rendered)


def is_link(page: Path, link: str) -> bool:
    if link.startswith("https://"):
        return True
    path, _, anchor = link.partition("#")
    target = (page.parent / path).resolve() if path else page
    return target.is_file() and (not anchor or anchor in anchors(target))


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.stem)
def test_links_lead_somewhere_and_stay_in_their_language(page: Path) -> None:
    for one in (page, chinese(page)):
        assert [x for x in LINK.findall(read(one)) if not is_link(one, x)] == []
    for link in LINK.findall(read(chinese(page))):
        aim = (page.parent / link.partition("#")[0]).resolve()
        english = link.endswith(".md") or ".md#" in link
        if english and ".zh-CN" not in link and chinese(aim).is_file():
            assert f"[English]({link})" in read(chinese(page)), f"{link} exists in Chinese"


@pytest.mark.parametrize("page", CHAPTERS, ids=lambda p: p.stem)
def test_a_chapter_has_its_parts(page: Path) -> None:
    for one, parts in (
        (page, ("*Grown from:*", "**The idea.**", "## Try it", "**Question.**", "**Answer.**")),
        (chinese(page), ("*来源*：", "**本章要点。**", "## 动手试试", "**问题。**", "**答案。**")),
    ):
        text = read(one)
        assert [part for part in parts if text.count(part) != 1] == []
        assert "](../images/" in text, "a picture"
        assert len(BLOCK.findall(text)) >= 3
        assert not re.search(r"\b(" + "|".join(map(re.escape, IDS)) + r")\b", text), "an id"


def command_lines(text: str) -> list[str]:
    """The lines of the shell blocks of a page that call one of the programs."""
    lines = []
    for kind, block in FENCE.findall(text):
        for line in block.replace("\\\n", " ").splitlines() if kind == "sh" else ():
            words = shlex.split(line.removeprefix("$ "), comments=True)
            for part in shlex.join(words).split(" '&&' "):
                if part.startswith(PROGRAMS):
                    lines.append(re.split(r" '[|>;]' ", part)[0])
    return lines


@pytest.mark.parametrize("page", EVERY_PAGE, ids=lambda page: page.name)
def test_commands_exist(page: Path) -> None:
    text = read(page)
    program = r"(?:regard [a-z]+|python -m (?:experiments|benchmarks))"
    named = re.findall(rf"`({program} [^`]*)`", FENCE.sub("", text))
    assert [line for line in named if not is_command(line.replace("\\|", "|"))] == []
    assert [line for line in command_lines(text) if not is_whole_command(line)] == []


def test_a_command_with_a_wrong_option_or_argument_is_found() -> None:
    page = "```sh\nregard show --out x   # no such option\npip install x && regard convert a\n```"
    lines = command_lines(page)
    assert len(lines) == 2
    assert not any(map(is_whole_command, lines))
    assert is_whole_command("regard convert a b --to gqa")


@pytest.mark.parametrize("page", [SEEDS, chinese(SEEDS)], ids=lambda p: p.name)
def test_every_box_is_in_the_index_and_every_error_in_a_box(page: Path) -> None:
    rows = INDEX_ROW.findall(read(page))
    listed = [(int(chapter), int(place)) for chapter, place, _ in rows]
    boxes = [
        (number, place)
        for number, chapter in enumerate(CHAPTERS, 1)
        for place in range(1, len(BOXES.findall(read(chapter))) + 1)
    ]
    assert listed == boxes
    named = {i for _, _, ids in rows for i in ids.split(", ")}
    assert {i for i in IDS if i[0] in "EX"} <= named <= set(IDS)


def test_the_chinese_index_has_every_error_once() -> None:
    found = re.findall(r"^\| ([EX]\d+(?:\.\d+)?) \|", read(chinese(SEEDS)), re.MULTILINE)
    assert found == [i for i in IDS if i[0] in "EX"]


def test_the_index_lists_the_chapters_in_order() -> None:
    listed = [x for x in LINK.findall(read(INDEX)) if re.match(r"\d\d-", x)]
    assert list(dict.fromkeys(listed)) == [p.name for p in CHAPTERS]
    assert len(CHAPTERS) == 12


def test_a_translation_that_lacks_something_is_found() -> None:
    page = CHAPTERS[0]
    text, translated = read(page), read(chinese(page))
    changes = {
        "code": ("torch.manual_seed(0)", "torch.manual_seed(1)"),
        "links": ("../images/zh/translate-accuracy.svg", "../images/zh/heads.svg"),
        "boxes": (CHINESE_BOX, ">"),
        "headings": ("\n## ", "\n### "),
    }
    for what, (old, new) in changes.items():
        assert differences(text, translated.replace(old, new, 1)) == [what]
