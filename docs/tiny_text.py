"""The Chinese half of the text of the embedded model `tiny`, from two source packages on PyPI.

FastAPI 0.103.0 contains its documentation in Chinese (MIT licence). wordcloud 1.9.3 contains, as
an example, stories of Lu Xun's "Call to Arms" (1923), which are in the public domain. The notes of
a later editor, whose rights may last, are removed.

`python -m docs.tiny_text FASTAPI.tar.gz WORDCLOUD.tar.gz OUT` writes a folder for
`regard train`: the documentation of Python, and `COPIES` copies of the Chinese texts.
"""

from __future__ import annotations

import argparse
import re
import tarfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from regard.errors import FileError
from regard.train.corpus import TextDocument, python_documentation

FASTAPI, STORIES = "docs/zh/docs/", "examples/wc_cn/CalltoArms.txt"
"""Where the two archives contain the texts."""

COPIES = 3
"""How often the Chinese texts are written: they are short, and a stream is drawn evenly."""

SHORTEST_STORY = 500
"""Parts of the book's file with fewer characters are remarks of the web site that it came from."""

_NOT_PROSE = {"fastapi-people.md", "index.md", "external-links.md"}
"""Pages that are lists of names, or the same as another page."""

_FULL_WIDTH = {ord("　"): " ", ord("\ufeff"): None} | {
    code: chr(code - 0xFEE0) for code in range(0xFF10, 0xFF5B) if chr(code - 0xFEE0).isalnum()
}
"""The wide forms of spaces, digits and Latin letters -> the usual ones; punctuation stays wide."""


def chinese_documents(fastapi: str | Path, wordcloud: str | Path) -> list[TextDocument]:
    """Read the Chinese documents from the two source archives."""
    pages = [
        TextDocument(f"fastapi/{name.rpartition(FASTAPI)[2]}", clean_page(text))
        for name, text in _members(Path(fastapi), FASTAPI, ".md")
        if name.rpartition("/")[2] not in _NOT_PROSE
    ]
    stories = [
        TextDocument(f"stories/{number}", text)
        for _, content in _members(Path(wordcloud), STORIES, "")
        for number, text in enumerate(split_stories(content))
        if len(text) >= SHORTEST_STORY
    ]
    return [document for document in (*pages, *stories) if document.text]


def clean_page(text: str) -> str:
    """Return a page without addresses, pictures, HTML tags and included files."""
    text = re.sub(r"!\[[^]]*\]\([^)]*\)", "", text)
    text = re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r"<[^<>\n]{1,300}>", "", text)
    lines = [line.rstrip() for line in text.translate(_FULL_WIDTH).splitlines()]
    return _squeezed(line for line in lines if "{!" not in line and "://" not in line)


def split_stories(text: str) -> Iterator[str]:
    """Yield the stories of the book, without the notes behind each story and their marks."""
    lines = [line.strip() for line in text.translate(_FULL_WIDTH).splitlines()]
    lines = [line for line in lines if line]
    starts = [i - 1 for i, line in enumerate(lines) if i and re.fullmatch(r"-{4,}", line)]
    for start, stop in zip(starts, [*starts[1:], len(lines)], strict=True):
        title = lines[start].removesuffix("(1)")
        story = [title, *lines[start + 2 : stop]]
        first_note = next((i for i, line in enumerate(story[1:], 1) if _is_note(line)), len(story))
        lines_of_story = (line for line in story[:first_note] if "分节阅读" not in line)
        yield _squeezed(re.sub(r"[①-⒇]", "", line) for line in lines_of_story)


def write_folder(folder: Path, documents: Sequence[TextDocument]) -> None:
    """Write each document as a text file: Python's documentation, and copies of `documents`."""
    if folder.exists():
        raise FileError(f"{folder} exists; give the name of a new folder")
    english = [(f"english/{d.name}", d.text) for d in python_documentation()]
    chinese = [(f"chinese/{copy}/{d.name}", d.text) for copy in range(COPIES) for d in documents]
    for name, text in (*english, *chinese):
        path = folder / f"{name}.txt"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")


def _is_note(line: str) -> bool:
    """Return whether the notes of the editor begin with a line."""
    return (
        line.startswith(("【注释", "□ 注释", "□注释", "注释"))
        or re.match(r"[①-⒇]", line) is not None
    )


def _squeezed(lines: Iterator[str]) -> str:
    """Join lines, with at most one empty line between two."""
    return re.sub(r"\n{3,}", "\n\n", "\n".join(lines)).strip()


def _members(archive: Path, within: str, ending: str) -> Iterator[tuple[str, str]]:
    """Yield the names and texts of the files of an archive whose path contains a part."""
    has_text = False
    try:
        with tarfile.open(archive) as content:
            for member in sorted(content.getmembers(), key=lambda m: m.name):
                if within in member.name and member.name.endswith(ending) and member.isfile():
                    file = content.extractfile(member)
                    assert file is not None  # it is a regular file
                    has_text = True
                    yield member.name, file.read().decode("utf-8-sig")
    except (OSError, tarfile.TarError, UnicodeDecodeError) as error:
        raise FileError(f"{archive}: not a readable archive ({error})") from error
    if not has_text:
        raise FileError(f"{archive}: no {within} in this archive; is it the version named above?")


def main() -> None:
    """Write the text from the two archives that the arguments name."""
    parser = argparse.ArgumentParser(prog="python -m docs.tiny_text", description=__doc__)
    for name in ("fastapi", "wordcloud", "out"):
        parser.add_argument(name, type=Path)
    arguments = parser.parse_args()
    write_folder(arguments.out, chinese_documents(arguments.fastapi, arguments.wordcloud))


if __name__ == "__main__":
    import sys

    from regard.standard_output import run_program

    sys.exit(run_program(main))
