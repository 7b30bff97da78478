"""Pages of the documentation as notebooks: whole, valid, and executed."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.docs.notebooks import CHAPTERS, COURSE, course, executed, main, moved, notebook_of
from tests.docs.test_docs import PAGES, ROOT, blocks, same_output

VIEW = "application/vnd.jupyter.widget-view+json"


def test_every_page_becomes_a_valid_notebook() -> None:
    nbformat: Any = pytest.importorskip("nbformat")
    for page in PAGES:
        text = page.read_text("utf-8")
        notebook = notebook_of(text)
        nbformat.validate(nbformat.from_dict(notebook))
        cells = {"code": "", "markdown": ""}
        for cell in notebook["cells"]:
            cells[cell["cell_type"]] += f"{cell['source']}\n"
        assert cells["code"] == "".join(code for _, code, _ in blocks(text)), page.name
        assert "```python" not in cells["markdown"], page.name


def test_links_hold_where_the_notebook_is(tmp_path: Path) -> None:
    page = ROOT / "docs" / "research.md"
    text = moved(page.read_text("utf-8"), page, tmp_path / "research.ipynb")
    images = [part.partition(")")[0] for part in text.split("](")[1:]]
    files = [name for name in images if not name.startswith(("http", "#"))]
    assert len(files) > 5
    assert all((tmp_path / name.partition("#")[0]).resolve().is_file() for name in files)
    assert moved("`[a](b.md)`", page, tmp_path / "x.ipynb") == "`[a](b.md)`", "code is kept"


def test_the_command_writes_a_notebook_without_results(tmp_path: Path) -> None:
    page, notebook = tmp_path / "page.md", tmp_path / "page.ipynb"
    page.write_text("# Titel\n\n```python\n1 + 1\n```\n", "utf-8")
    main([str(page), str(notebook)])
    cells = json.loads(notebook.read_text("utf-8"))["cells"]
    assert [(cell["cell_type"], cell["source"]) for cell in cells] == [
        ("markdown", "# Titel"),
        ("code", "1 + 1"),
    ]


def results(notebook: dict[str, Any]) -> list[dict[str, Any]]:
    """What the cells of an executed notebook show, beside printed text."""
    shown = [output for cell in notebook["cells"] for output in cell.get("outputs", ())]
    return [output["data"] for output in shown if "data" in output]


@pytest.mark.full
def test_the_page_of_a_researchers_day_is_executed(tmp_path: Path) -> None:
    for name in ("anywidget", "ipykernel", "nbclient", "pandas"):
        pytest.importorskip(name)
    target = tmp_path / "research.ipynb"
    command = ["-m", "tests.docs.notebooks", "docs/research.md", str(target), "--run"]
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-2000:]
    notebook = json.loads(target.read_text("utf-8"))
    shown = results(notebook)
    assert [data for data in shown if VIEW in data], "the recording is a widget"
    frames = ["".join(data["text/html"]) for data in shown if "text/html" in data]
    assert [text for text in frames if 'class="dataframe"' in text], "a table is a data frame"
    state = notebook["metadata"]["widgets"]["application/vnd.jupyter.widget-state+json"]["state"]
    pages = [x["state"]["page"] for x in state.values() if "page" in x["state"]]
    assert all(page.startswith("<!doctype html>") for page in pages)
    assert len(pages) == 2, "that of the recording, and that which the page moves"


def test_the_notebooks_of_the_course_are_those_of_its_pages() -> None:
    """`python -m tests.docs.notebooks --course` writes them again."""
    made = course()
    assert len(made) == 2 * len(CHAPTERS)
    for path, text in made.items():
        assert path.read_text("utf-8") == text, path.name
    assert set(made) == set((COURSE / "notebooks").iterdir())


@pytest.mark.full
@pytest.mark.parametrize("chapter", CHAPTERS)
def test_a_chapter_is_executed_and_prints_what_its_page_shows(chapter: str, tmp_path: Path) -> None:
    for name in ("ipykernel", "nbclient", "nbformat"):
        pytest.importorskip(name)
    notebook = json.loads((COURSE / "notebooks" / f"{chapter}.ipynb").read_text("utf-8"))
    cells = [x for x in executed(notebook, tmp_path)["cells"] if x["cell_type"] == "code"]
    shown = blocks((COURSE / f"{chapter}.md").read_text("utf-8"))
    assert len(cells) == len(shown) > 2
    for cell, (_, _, text) in zip(cells, shown, strict=True):
        printed = "".join(x["text"] for x in cell["outputs"] if x.get("name") == "stdout")
        assert not text or same_output(printed, text), cell["source"]


@pytest.mark.full
def test_a_cell_that_fails_is_an_error(tmp_path: Path) -> None:
    pytest.importorskip("ipykernel")
    errors: Any = pytest.importorskip("nbclient.exceptions")
    page = tmp_path / "page.md"
    page.write_text("```python\nx = 1\nassert x == 2, 'not two'\n```\n", "utf-8")
    command = ["-m", "tests.docs.notebooks", str(page), str(tmp_path / "page.ipynb"), "--run"]
    ran = subprocess.run([sys.executable, *command], cwd=ROOT, capture_output=True, text=True)
    assert ran.returncode == 1
    assert errors.CellExecutionError.__name__ in ran.stderr
    assert "not two" in ran.stderr
    assert not (tmp_path / "page.ipynb").exists()
