"""A page of the documentation as a Jupyter notebook: its Python blocks become cells with code, and
all else becomes cells with text.

    python -m tests.docs.notebooks docs/research.md research.ipynb --run

writes the notebook with the results of its cells; without `--run`, or from `notebook_of`, it has
none. Only running it needs nbclient, nbformat and ipykernel.

    python -m tests.docs.notebooks --course

writes the notebooks of the course, docs/learn/notebooks, without results.
"""

from __future__ import annotations

import argparse
import json
import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

BLOCK = re.compile(r"^```python\n(.*?)^```$", re.MULTILINE | re.DOTALL)
PRINTED = re.compile(r"^(```python\n.*?^```$)\n\n```text\n.*?^```$", re.MULTILINE | re.DOTALL)
"""A Python block of the course and what it prints, which a notebook prints itself."""
ROOT = Path(__file__).parents[2]
COURSE = ROOT / "docs" / "learn"
CHAPTERS = ("02-dot-products-and-softmax", "05-heads", "08-cache", "12-reading-a-model")
"""The chapters of the course that are notebooks too."""
LINK = re.compile(r"(\]\()(?![a-z]+:|#|/)([^)\s#]+)")
"""The beginning of a link, and its target if that is a file beside the page."""


def notebook_of(text: str) -> dict[str, Any]:
    """Return the notebook of a page in the format 4.5 of Jupyter, without results.

    Args:
        text: the page, in Markdown.

    >>> cells = notebook_of("# Title\\n\\n```python\\nx = 1\\n```\\n\\nText.\\n")["cells"]
    >>> [(cell["cell_type"], cell["source"]) for cell in cells]
    [('markdown', '# Title'), ('code', 'x = 1'), ('markdown', 'Text.')]
    """
    cells: list[dict[str, Any]] = []

    def add(kind: str, source: str) -> None:
        if source := source.strip("\n"):
            more: dict[str, Any] = (
                {"execution_count": None, "outputs": []} if kind == "code" else {}
            )
            name = f"cell-{len(cells)}"
            cells.append({"cell_type": kind, "id": name, "metadata": {}, "source": source} | more)

    # a split by a pattern with one group has the code at the odd places
    for n, part in enumerate(BLOCK.split(text)):
        add("code" if n % 2 else "markdown", part)
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    metadata = {"kernelspec": kernel, "language_info": {"name": "python"}}
    return {"cells": cells, "metadata": metadata, "nbformat": 4, "nbformat_minor": 5}


def moved(text: str, page: Path, notebook: Path) -> str:
    """Return a page whose links to files hold where the notebook is.

    >>> moved("![x](images/a.svg) [b](b.md#c) [d](#e)", Path("docs/a.md"), Path("a.ipynb"))
    '![x](docs/images/a.svg) [b](docs/b.md#c) [d](#e)'
    """

    def link(match: re.Match[str]) -> str:
        target = os.path.relpath(page.resolve().parent / match[2], notebook.resolve().parent)
        return match[1] + Path(target).as_posix()

    code = re.compile(r"(^```.*?^```$|`[^`\n]*`)", re.MULTILINE | re.DOTALL)
    parts = code.split(text)
    return "".join(part if n % 2 else LINK.sub(link, part) for n, part in enumerate(parts))


def executed(notebook: dict[str, Any], folder: Path, seconds: int = 600) -> dict[str, Any]:
    """Run a notebook from its first cell to its last, and return it with the results.

    Args:
        notebook: the notebook.
        folder: the folder in which its cells run.
        seconds: how long one cell may take.

    Raises:
        nbclient.exceptions.CellExecutionError: a cell raised an error.
    """
    import nbformat
    from nbclient import NotebookClient

    found = nbformat.from_dict(notebook)  # type: ignore[no-untyped-call]
    nbformat.validate(found)
    client = NotebookClient(
        found, timeout=seconds, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    result: dict[str, Any] = client.execute()
    return result


def course() -> dict[Path, str]:
    """Return the notebooks of the course, without results: each file and what is in it."""
    made = {}
    for chapter in CHAPTERS:
        for page in (COURSE / f"{chapter}.md", COURSE / f"{chapter}.zh-CN.md"):
            target = COURSE / "notebooks" / f"{page.name.removesuffix('.md')}.ipynb"
            text = PRINTED.sub(r"\1", moved(page.read_text("utf-8"), page, target))
            made[target] = as_file(notebook_of(text))
    return made


def as_file(notebook: dict[str, Any]) -> str:
    """Return a notebook as the text of its file."""
    return json.dumps(notebook, ensure_ascii=False, indent=1) + "\n"


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the notebook of a page."""
    parser = argparse.ArgumentParser(prog="python -m tests.docs.notebooks", description=__doc__)
    parser.add_argument("page", type=Path, nargs="?", help="the page, in Markdown")
    parser.add_argument("notebook", type=Path, nargs="?", help="the .ipynb file to write")
    parser.add_argument("--course", action="store_true", help="write the notebooks of the course")
    parser.add_argument("--run", action="store_true", help="run the cells, and keep their results")
    asked = parser.parse_args(arguments)
    if asked.course:
        for path, text in course().items():
            path.parent.mkdir(exist_ok=True)
            path.write_text(text, "utf-8")
        return
    if asked.page is None or asked.notebook is None:
        parser.error("give a page and the file to write, or --course")
    text = moved(asked.page.read_text("utf-8"), asked.page, asked.notebook)
    notebook = notebook_of(text)
    if asked.run:
        notebook = executed(notebook, asked.notebook.resolve().parent)
    asked.notebook.write_text(as_file(notebook), "utf-8")


if __name__ == "__main__":
    main()
