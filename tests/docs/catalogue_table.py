"""Section 1 of docs/catalogue.md, made from the package: what is built, group by group.

python -m tests.docs.catalogue_table      # writes the section of both languages
"""

from __future__ import annotations

from pathlib import Path

from regard.configs.catalogue import GROUPS
from regard.language import translate, use_language

PAGES = {
    language: Path(__file__).parents[2] / "docs" / name
    for language, name in (("en", "catalogue.md"), ("zh", "catalogue.zh-CN.md"))
}
HEADS = {"en": "| name | what it is |", "zh": "| 名称 | 是什么 |"}


def built(language: str) -> str:
    """The tables of the section, as the page has them."""
    with use_language(language):
        blocks = []
        for group in GROUPS:
            kind, title = translate(f"{group.family} attention"), translate(group.title)
            heading = translate("{kind}: {title}", kind=kind, title=title)
            rows = [f"| `{name}` | {translate(x)} |" for name, x in group.summaries().items()]
            heading = heading[0].upper() + heading[1:]
            blocks.append("\n".join([f"### {heading}", "", HEADS[language], "|---|---|", *rows]))
    return "\n\n".join(blocks)


def split(language: str) -> tuple[str, str, str]:
    """The page before its first section's tables, these tables, and the rest."""
    text = PAGES[language].read_text(encoding="utf-8")
    before, title, after = text.partition("\n## 1. ")
    name, _, after = after.partition("\n\n")
    tables, rest, end = after.partition("\n\n## 2. ")
    return f"{before}{title}{name}\n\n", tables, rest + end


if __name__ == "__main__":
    for language, path in PAGES.items():
        before, _, after = split(language)
        path.write_text(before + built(language) + after, encoding="utf-8")
