"""docs/seeds.md leaves out no id of the seed notes, and everything that it names exists."""

from __future__ import annotations

import ast
import importlib
import re
import shlex
from collections import Counter
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from typer.exceptions import TyperException

from benchmarks.__main__ import benchmarks
from benchmarks.cases import CASES, GROUPS
from experiments import CLAIMS
from experiments.__main__ import experiments
from regard.cli.app import COMMANDS, command_of, load, run
from tests.docs import seed_places

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs" / "seeds.md"
TEXT = PAGE.read_text(encoding="utf-8")

LAST = {
    "S1": 31,
    "S2": 25,
    "S3": 36,
    "S4": 28,
    "S5": 26,
    "E1": 11,
    "E2": 12,
    "E3": 7,
    "E4": 14,
    "E5": 11,
}
"""The last id of each part of the checklist of the seed notes: S1.1 to S1.31, and so on."""
IDS = [f"{part}.{i}" for part, last in LAST.items() for i in range(1, last + 1)]
IDS += [f"X{i}" for i in range(1, 6)]

OUTSIDE: dict[str, tuple[Callable[..., None], set[str]]] = {
    "experiments": (experiments, {*CLAIMS, "all", "ID"}),
    "benchmarks": (benchmarks, {*CASES, *GROUPS, "CASE"}),
}
"""A program outside of the package: its command, and the names of what it measures."""
PROGRAMS = ("regard ", *(f"python -m {name} " for name in OUTSIDE))

OPEN = re.compile(r"open \(issue ([4-7])\): \w")
FACT = "This is a fact, not code: "
ROW = re.compile(r"^\| ([SEX]\d+(?:\.\d+)?) \|(.*)\|$", re.MULTILINE)
LINK = re.compile(r"\[[^\]]+\]\(([^)\s]+)\)")


class Row(NamedTuple):
    """A line of the page: its id, what is in it, and the cell that shows it."""

    id: str
    text: str
    shown: str


class Named(NamedTuple):
    """What a piece of text names, by kind."""

    tests: list[str]
    modules: list[str]
    commands: list[str]
    links: list[str]


def rows(text: str) -> list[Row]:
    found = []
    for match in ROW.finditer(text):
        cells = re.split(r"(?<!\\)\|", match[2])
        found.append(Row(match[1], match[2], cells[-1].strip()))
    return found


def named(text: str) -> Named:
    out = Named([], [], [], [])
    for code in re.findall(r"`([^`]+)`", text):
        code = code.replace("\\|", "|")
        if code.startswith("tests/") and "::" in code:
            out.tests.append(code)
        elif re.fullmatch(r"regard(\.\w+)*", code):
            out.modules.append(code)
        elif code.startswith(PROGRAMS):
            out.commands.append(code)
        elif code.startswith("python -m "):
            out.modules.append(code.removeprefix("python -m "))
    out.links.extend(LINK.findall(text))
    return out


def done(row: Row) -> bool:
    """It names a test, a command or a page, or it is a fact that stands on this page."""
    shown = named(row.shown)
    evidence = bool(shown.tests or shown.commands or shown.links)
    return evidence or (row.id[0] == "E" and row.text.strip().startswith(FACT))


def complaints(text: str, ids: list[str]) -> Iterator[str]:
    """What is wrong with the ids of a page and with what stands behind them."""
    found = rows(text)
    counts = Counter(row.id for row in found)
    yield from (f"{i} is there {counts[i]} times" for i in ids if counts[i] != 1)
    yield from (f"{i} is no id" for i in counts if i not in ids)
    for row in found:
        if re.search(r"\bopen\b", row.shown) and not OPEN.search(row.shown):
            yield f"{row.id} does not say which later issue closes it, or what is missing"
        elif not done(row) and not OPEN.search(row.shown):
            yield f"{row.id} is shown by nothing"


@cache
def functions(path: Path) -> frozenset[str]:
    tree = ast.parse(path.read_text(encoding="utf-8"))
    return frozenset(node.name for node in tree.body if isinstance(node, ast.FunctionDef))


def is_test(node: str) -> bool:
    path, _, name = node.partition("::")
    file = ROOT / path
    good = file.is_file() and file.name.startswith("test_") and name.startswith("test_")
    return good and name in functions(file)


def imports(name: str) -> bool:
    """Every step of a dotted name is a module or an attribute of what is in front of it."""
    head, *rest = name.split(".")
    value: object = importlib.import_module(head)
    for part in rest:
        head = f"{head}.{part}"
        try:
            value = getattr(value, part)
        except AttributeError:
            try:
                value = importlib.import_module(head)
            except ImportError:
                return False
    return True


def anchors(page: Path) -> set[str]:
    titles = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def is_page(link: str) -> bool:
    if link.startswith("https://"):
        return True
    path, _, anchor = link.partition("#")
    page = (PAGE.parent / path).resolve() if path else PAGE
    return page.is_file() and (not anchor or anchor in anchors(page))


def is_command(line: str) -> bool:
    """Known, and every option that is named is one of its own."""
    if line.startswith("python -m "):
        return is_whole_command(line)
    name, *rest = shlex.split(line)[1:]
    if name not in COMMANDS:
        return False
    params = load(name).params
    options = {o for p in params for o in (*p.opts, *p.secondary_opts)} | {"--help"}
    return options.issuperset(word for word in rest if word.startswith("-"))


def is_whole_command(line: str) -> bool:
    """A command that reads every word of the line and needs no more; what a program outside of the
    package measures has a known name.
    """
    name, *rest = shlex.split(line.removeprefix("python -m ").removeprefix("regard "))
    if name.startswith("--") or rest == ["--help"]:
        return True
    if line.startswith("regard ") and not is_command(line):
        return False
    function, known = OUTSIDE.get(name, (None, set[str]()))
    command = load(name) if function is None else command_of(function)
    parser = command.make_parser(command.context_class(command, info_name=name))
    try:
        given, unread, _ = parser.parse_args(rest)
    except TyperException:
        return False
    if function is not None:
        names = given.get(command.params[0].name) or ()
        return not unread and known.issuperset(name.strip("[].") for name in names)
    return not unread and all(given.get(p.name) for p in command.params if p.required)


EVERYTHING = named("\n".join(row.text for row in rows(TEXT)))
COMMAND_LINES = sorted(set(EVERYTHING.commands))


def test_every_id_is_there_once_and_is_shown_or_open() -> None:
    assert len(IDS) == 146 + 55 + 5
    assert list(complaints(TEXT, IDS)) == []


def test_nothing_is_open() -> None:
    assert [row.id for row in rows(TEXT) if OPEN.search(row.text)] == []


@pytest.mark.parametrize(
    ("names", "exists"),
    [
        (EVERYTHING.tests, is_test),
        (EVERYTHING.modules, imports),
        (EVERYTHING.commands, is_command),
        (named(TEXT).links, is_page),
    ],
    ids=["tests", "modules", "commands", "links"],
)
def test_what_is_named_exists(names: list[str], exists: Callable[[str], bool]) -> None:
    assert len(names) > 10
    assert [name for name in names if not exists(name)] == []


@pytest.mark.parametrize(
    "line", [x for x in COMMAND_LINES if re.match(r"regard (show|describe) .*[a-z]", x)]
)
def test_a_small_command_runs_as_it_is_written(
    line: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(shlex.split(line)[1:]) == 0
    assert capsys.readouterr().out.strip()


def test_files_of_data_exist() -> None:
    paths = re.findall(r"`(tests/[\w/.]+)`", TEXT)
    assert len(paths) >= 2
    assert all((ROOT / path).is_file() for path in paths)


def test_every_test_of_the_seeds_errors_is_on_the_page() -> None:
    for path in sorted((ROOT / "tests" / "seeds").glob("test_*.py")):
        for name in functions(path):
            if name.startswith("test_"):
                assert f"{path.relative_to(ROOT).as_posix()}::{name}`" in TEXT, name


def test_every_item_is_in_a_section_of_the_course_in_both_languages() -> None:
    """The section exists, has the item's own words, and is the same one in both languages."""
    found = seed_places.items()
    assert [item.id for item in found] == IDS[:146]
    assert [item.id for item in found if seed_places.common_place(item, "zh") is None] == []
    assert seed_places.english_rows() in TEXT
    assert seed_places.chinese_rows() in seed_places.CHINESE_PAGE.read_text("utf-8")


@pytest.mark.parametrize(
    ("chapter", "words"),
    [
        (3, {"en": "no such words", "zh": "regard layer"}),
        (3, {"en": "regard layer", "zh": "没有这些字"}),
        (4, {"en": "`[PAD]`", "zh": "**近路。**"}),  # two sections
        (5, {"en": "`[PAD]`", "zh": "`[PAD]`"}),  # another chapter
    ],
)
def test_an_item_without_its_words_or_in_two_sections_is_found(
    chapter: int, words: dict[str, str]
) -> None:
    assert seed_places.common_place(seed_places.Item("S1.1", chapter, words), "en") is None


GOOD = """
| id | what | where | shown by |
|---|---|---|---|
| S1.1 | a | `regard.attend` | `tests/docs/test_seeds.py::test_files_of_data_exist` |
| S1.2 | b | none yet | open (issue 4): all of it |
| E1.1 | This is a fact, not code: b | this line |
"""


@pytest.mark.parametrize(
    ("old", "new", "complaint"),
    [
        ("", "", None),
        ("| S1.2 |", "| S1.1 |", "S1.1 is there 2 times; S1.2 is there 0 times"),
        ("| S1.2 |", "| S1.3 |", "S1.2 is there 0 times; S1.3 is no id"),
        (
            "`tests/docs/test_seeds.py::test_files_of_data_exist`",
            "done",
            "S1.1 is shown by nothing",
        ),
        (
            "`tests/docs/test_seeds.py::test_files_of_data_exist`",
            "`softmax(q k)`",
            "S1.1 is shown by nothing",
        ),
        ("issue 4", "issue 3", "S1.2 does not say which later issue closes it, or what is missing"),
        (": all of it", "", "S1.2 does not say which later issue closes it, or what is missing"),
        ("a fact, not code: b", "b", "E1.1 is shown by nothing"),
        (
            "b | none yet | open (issue 4): all of it",
            "a fact, not code: b | - | this line",
            "S1.2 is shown by nothing",
        ),
    ],
)
def test_a_page_that_lacks_something_is_found(old: str, new: str, complaint: str | None) -> None:
    text = GOOD.replace(old, new) if old else GOOD
    assert "; ".join(complaints(text, ["S1.1", "S1.2", "E1.1"])) == (complaint or "")


def test_what_does_not_exist_is_found() -> None:
    mine = "tests/docs/test_seeds.py"
    assert is_test(f"{mine}::test_files_of_data_exist")
    for node in (
        f"{mine}::test_nothing",
        f"{mine}::complaints",
        "tests/rules.py::test_x",
        "tests/no.py::test_x",
    ):
        assert not is_test(node)
    assert imports("regard.nn.variants.mha")
    assert not imports("regard.nn.variants.mhaa")
    assert not imports("regard.nothing")
    assert is_page("walkthrough.md#8-hiding-the-future")
    assert not is_page("walkthrough.md#8-hiding-the-past")
    assert not is_page("nowhere.md")
    assert is_command('regard show "causal | sinks(1)" --queries 12')
    assert not is_command("regard show causal --rows 12")
    assert not is_command("regard teach mha")
    assert is_command("python -m experiments scale order --seed 1")
    assert not is_command("python -m experiments scales")
    assert not is_command("python -m experiments scale --quality")
    assert is_command("python -m benchmarks decode --size small --json -")
    assert not is_command("python -m benchmarks decod")
