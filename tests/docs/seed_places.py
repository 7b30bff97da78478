"""Where the course shows each of the 146 items of the seed notes, in both languages.

seed_items.txt has a line for each item: its chapter, and words of it in the English and in the
Chinese chapter. `python -m tests.docs.seed_places` writes the lists of both pages.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).parents[2]
LEARN = ROOT / "docs" / "learn"
ENGLISH_PAGE = ROOT / "docs" / "seeds.md"
ENGLISH_TITLE, ENGLISH_NEXT = "# The sections of the course, and what they show\n", "# Part A"
CHINESE_PAGE = ROOT / "docs" / "seeds.zh-CN.md"
TITLE, NEXT = "# 笔记讲到的每一件事，在教程的哪一节\n", "# 笔记错在哪里\n"
FENCE = re.compile(r"^```.*?^```$", re.MULTILINE | re.DOTALL)


class Item(NamedTuple):
    """One item of the notes, with its words in a chapter of each language."""

    id: str
    chapter: int
    words: dict[str, str]


class Place(NamedTuple):
    """A section of a chapter: its file, its count from 0, its title."""

    path: Path
    section: int
    title: str


def items() -> list[Item]:
    """The items in the order of the notes."""
    lines = Path(__file__).with_name("seed_items.txt").read_text("utf-8").splitlines()
    found = []
    for line in lines:
        head, english, chinese = line.split(" | ")
        name, chapter = head.split()
        found.append(Item(name, int(chapter), {"en": english, "zh": chinese}))
    return found


def sections(path: Path) -> list[tuple[str, str]]:
    """The title and the text of each section, without spaces that follow one another."""
    text = path.read_text("utf-8")
    text = re.sub("(?m)^> ?", "", text)  # a box is text of its section
    hidden = FENCE.sub(lambda match: re.sub("(?m)^#", "%", match[0]), text)
    parts = re.split(r"^#+ (.+)$", hidden, flags=re.MULTILINE)[1:]
    return [
        (title.strip(), " ".join(body.split()))
        for title, body in zip(parts[::2], parts[1::2], strict=True)
    ]


def places(item: Item, language: str) -> list[Place]:
    """Every section of its chapter that has the item's words."""
    ending = "md" if language == "en" else "zh-CN.md"
    paths = LEARN.glob(f"{item.chapter:02d}-*.{ending}")
    (path,) = (x for x in paths if (".zh-CN" in x.name) == (language == "zh"))
    words = " ".join(item.words[language].split())
    return [
        Place(path, i, title)
        for i, (title, text) in enumerate(sections(path))
        if words in text or words in title
    ]


def common_place(item: Item, language: str) -> Place | None:
    """The first section that has the words of both languages, whose sections are the same."""
    both = [{place.section: place for place in places(item, lang)} for lang in ("en", "zh")]
    shared = sorted(both[0].keys() & both[1].keys())
    return both[language == "zh"][shared[0]] if shared else None


def anchor(title: str) -> str:
    """The address of a heading."""
    return re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-")


def chinese_rows() -> str:
    """The table of the Chinese page."""
    rows = ["| 编号 | 原话或例子 | 章节 |", "|---|---|---|"]
    for item in items():
        place = common_place(item, "zh")
        assert place is not None, item
        words = re.sub(r"[*`|]|\]\(|https://", "", item.words["zh"])
        link = f"learn/{place.path.name}#{anchor(place.title)}"
        title = re.sub("[`*]", "", place.title)
        rows.append(f"| {item.id} | {words} | [{title}]({link}) |")
    return "\n".join(rows)


def english_rows() -> str:
    """The table of the English page: the sections, with the items that each shows."""
    shown: dict[tuple[int, int], tuple[str, list[str]]] = {}
    for item in items():
        place = common_place(item, "en")
        assert place is not None, item
        link = f"[{place.title}](learn/{place.path.name}#{anchor(place.title)})"
        shown.setdefault((item.chapter, place.section), (link, []))[1].append(item.id)
    rows = [
        f"| {key[0]} | {link} | {', '.join(names)} |"
        for key, (link, names) in sorted(shown.items())
    ]
    return "\n".join(["| chapter | section | lines |", "|---|---|---|", *rows])


def write(page: Path, title: str, following: str, note: str, rows: str) -> None:
    """Write the table of a page, in front of the section that follows."""
    text = page.read_text("utf-8")
    before, _, rest = text.partition(title if title in text else following)
    after = rest.partition(following)[2] if title in text else rest
    page.write_text(f"{before}{title}\n{note}\n\n{rows}\n\n{following}{after}", encoding="utf-8")


if __name__ == "__main__":
    note = "每一行是笔记里的一件事，和它在教程里的出处；测试检查每一节都在，而且有这些字。"
    write(CHINESE_PAGE, TITLE, NEXT, note, chinese_rows())
    note = "A test looks for words of each line in its section, in both languages."
    write(ENGLISH_PAGE, ENGLISH_TITLE, ENGLISH_NEXT, note, english_rows())
