"""Every text that a command prints, read from the source: what the catalogue must have in Chinese.

- the help of the commands: their paragraphs, options, defaults, panels and examples;
- the first argument of every `translate` and the noun of every `translate_count`;
- every string of `regard/cli` with two or more words;
- every string of the modules of `RESULTS` with two or more words;

The errors that the package raises are English.

An f-string becomes a text with placeholders: `{name}` for a variable, the number of the place for
another expression, and `{hint}` for a call of `suggest`.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import ModuleType
from typing import get_args

import benchmarks
import experiments
import regard
import regard.errors
from benchmarks import __main__ as benchmarks_program
from benchmarks.cases import CASES
from benchmarks.render import COLUMNS
from docs import block_diagrams, figures, mechanism_pages
from experiments import __main__ as experiments_program
from experiments.claim import VERDICTS, Role
from regard.audit import FAULTS
from regard.audit.run_checks import CHECKS, REPEATABLE
from regard.cli import _module
from regard.cli import app as application
from regard.cli.app import COMMANDS
from regard.configs.catalogue import GROUPS
from regard.configs.published import PUBLISHED_MODELS, SIZES_NOT_PUBLISHED
from regard.configs.reader import NOT_COUNTED
from regard.cost.evidence import QUALITY_EVIDENCE
from regard.nn.variants import VARIANTS
from regard.nn.variants.registry import equation_symbols
from regard.notation import GLOSSARY
from regard.train.tasks import TASKS
from regard.view import cost_text, layer_text

PACKAGE = Path(regard.__file__).parent
OUTSIDE = (
    *(Path(x.__file__) for x in (figures, block_diagrams, mechanism_pages)),
    *(Path(x.__file__).parent for x in (benchmarks, experiments)),
)
"""The programs outside of the package that print texts in both languages."""
RESULTS = (
    "audit",
    "inspect/explain",
    "inspect/interventions",
    "inspect/metrics",
    "models/convert",
)
"""Folders of modules that write what a command prints: all their texts."""
CODE = re.compile(r"[\w.()]+|python -.*")
"""A description that is only a call or a command."""
LATIN_ONLY = re.compile(r"[A-Za-z]{2,}[,:;.]* +[A-Za-z(]")
"""What makes a string a text: two words."""


TRANSLATED = {"translate": 0, "translate_styled": 0, "prose": 0, "indented": 0, "Phrase": 0}
TRANSLATED |= {"note": 0, "usage_error": 1}
"""Functions that take a text and its values, and the place of the text among their arguments."""
COUNTED = ("translate_count", "counted")
"""Functions that take a number and a noun."""
STEP_NAMES = ("input", "projected", "rotated")
"""Steps of q, k and v that are words; the others are names of functions, such as l2norm."""
AXES = (
    "layer",
    "head",
    "position",
    "key",
    "effect",
    "logit",
    "place",
    "query",
    "term",
    "text",
    "token",
)
"""Rows, columns and quantities of tables of effects that are single words."""
SHAPED = ("Float", "Int", "Bool", "Shaped")
"""Types of tensors, whose shape is a text."""
NOT_PRINTED = ("bold red", "bold yellow")
"""Styles."""


def help_texts() -> Iterator[str]:
    """Yield the English texts of all help pages."""
    for name, line in COMMANDS.items():
        yield line
        yield from help_page_texts(__import__(f"regard.cli.{name}", fromlist=[name]), name)
    yield from (application.ABOUT, application.EXAMPLE, application.HELP)
    yield from (application.LANG, application.LOCALE)
    for option in application._command().params:
        yield option.help or ""


def help_page_texts(module: ModuleType, name: str) -> Iterator[str]:
    """Yield the English texts of the help page of a module's command."""
    function = getattr(module, name)
    yield from application.paragraphs(function.__doc__)
    yield from filter(None, [getattr(module, "EPILOG", None)])
    for option in application.command_of(function).params:
        for attribute in ("help", "show_default", "rich_help_panel"):
            text = getattr(option, attribute, None)
            if isinstance(text, str) and re.search("[a-z]{2}", text):
                yield text


def data_texts() -> Iterator[str]:
    """Yield the texts that stand in tables of the package, and the end of a sentence."""
    yield "."
    yield from (*cost_text.TITLES, NOT_COUNTED)
    yield from (x.finding for x in QUALITY_EVIDENCE.values())
    yield from SIZES_NOT_PUBLISHED.values()
    yield from (model.note for model in PUBLISHED_MODELS.values() if model.note)
    for entry in VARIANTS.values():
        yield from (entry.summary, entry.users, entry.choose, entry.avoid)
        yield from entry.option_meanings.values()
        yield from equation_symbols(entry).values()
    for group in GROUPS:
        yield from (f"{group.family} attention", group.title)
    yield from STEP_NAMES
    yield from (*AXES, *_module.PLACE_TITLES)
    yield from (name for name, _ in block_diagrams.HEAD)
    yield from (entry.meaning for entry in GLOSSARY.values())
    yield from (text for fault in FAULTS.values() for text in (fault.summary, fault.look_at))
    yield from (check.name for check in (REPEATABLE, *CHECKS))
    yield from ("precision", "output")  # checks of rotary functions and of recordings
    yield from (task.description for task in TASKS.values())
    titles = (*layer_text.HEADS, *layer_text.TITLES.values(), *layer_text.HEAD_TITLES.values())
    yield from (title for title in titles if title)


def _files(*places: str | Path) -> Iterator[Path]:
    for place in places:
        path = PACKAGE / place
        yield from sorted(path.rglob("*.py")) if path.is_dir() else [path]


@cache
def _parsed(path: Path) -> ast.Module:
    """Return the tree of a source file; every kind of text reads the same trees."""
    return ast.parse(path.read_text("utf-8"))


def outside_texts() -> Iterator[str]:
    """Yield the texts of the programs outside of the package, whose Chinese stands beside them."""
    yield from (text for text, _ in translated_calls(*OUTSIDE))
    yield from (*figures.ANIMALS, *figures.FOODS)
    yield from (*VERDICTS, *get_args(Role), "yes", "no")
    yield from help_page_texts(experiments_program, "experiments")
    for path in _files(OUTSIDE[-1]):
        if path.name != "__main__.py":  # its other texts are the help of its options
            yield from _texts(_parsed(path))
    yield from help_page_texts(benchmarks_program, "benchmarks")
    yield from ("cases", "peers of these cases", "devices", "sizes", "dtypes")
    yield from filter(None, (case.description for case in CASES.values()))
    peers = {peer.description for case in CASES.values() for peer in case.peers}
    yield from (text for text in sorted(peers) if not CODE.fullmatch(text))
    yield from filter(None, COLUMNS)


def translated_calls(*places: str | Path) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the text of every call of `TRANSLATED` with the names of its values, and `{n} noun` of
    every call of `COUNTED`, in the package or in these places.
    """
    for path in _files(*(places or ["."])):
        source = path.read_text("utf-8")
        if (
            not any(name in source for name in (*TRANSLATED, *COUNTED))
            or path.name == "language.py"
        ):
            continue
        for node in ast.walk(_parsed(path)):
            if not isinstance(node, ast.Call) or not isinstance(node.func, ast.Name):
                continue
            if node.func.id in TRANSLATED:
                names = tuple(str(keyword.arg) for keyword in node.keywords)
                for text in filter(None, _choices(node.args[TRANSLATED[node.func.id]])):
                    yield text, names
            elif node.func.id in COUNTED and isinstance(node.args[1], ast.Constant):
                yield f"{{n}} {node.args[1].value}", ("n",)


def _choices(node: ast.AST) -> Iterator[str]:
    """Yield the strings of `"a" if ... else "b"`."""
    if isinstance(node, ast.IfExp):
        yield from (*_choices(node.body), *_choices(node.orelse))
    elif isinstance(node, ast.Constant):
        yield str(node.value)


def command_strings() -> Iterator[str]:
    """Yield the texts in the modules of the commands."""
    for path in _files("cli"):
        yield from _texts(_parsed(path))


def result_texts() -> Iterator[str]:
    """Yield the texts in the modules of `RESULTS`: titles, quantities, remarks, reasons."""
    for path in _files(*RESULTS):
        yield from _texts(_parsed(path))


def _texts(tree: ast.AST) -> Iterator[str]:
    documents = set()
    for node in ast.walk(tree):
        body = getattr(node, "body", None)
        for statement in body if isinstance(body, list) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                documents.add(statement.value)
    waiting: list[ast.AST] = [tree]
    while waiting:
        node = waiting.pop()
        counted = _counted_noun(node)
        if counted is not None:
            yield counted
        text = _text(node)
        if text is None:
            waiting += _children(node)
            continue
        if node in documents:
            continue
        waiting += _expressions(node)
        if text not in NOT_PRINTED and LATIN_ONLY.search(re.sub(r"\{\w+\}", " ", text)):
            yield text


def _children(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the parts of an expression or a statement that can have texts: no annotation, no type
    (the shape of a tensor is a string), no message of an assertion, and no list of names.
    """
    if isinstance(node, ast.Assert) or _is_error(node):
        return
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "_words":
        return
    if isinstance(node, ast.Subscript) and getattr(node.value, "id", "") in SHAPED:
        return
    if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "cast":
        yield from node.args[1:]
        return
    skipped = (getattr(node, name, None) for name in ("annotation", "returns"))
    left_out = [part for part in skipped if part is not None]
    yield from (part for part in ast.iter_child_nodes(node) if part not in left_out)


def _is_error(node: ast.AST) -> bool:
    """Whether an expression makes an error of the package, whose message is English, or a statement
    collects the parts of one in a variable `reasons`.
    """
    if isinstance(node, ast.Assign):
        return getattr(node.targets[0], "id", "") in ("reason", "reasons")
    name = getattr(node.func, "id", "") if isinstance(node, ast.Call) else ""
    return hasattr(regard.errors, name)


def _counted_noun(node: ast.AST) -> str | None:
    """Return `{n} noun` of a call `plural(n, "noun")`."""
    if isinstance(node, ast.Call) and len(node.args) > 1 and isinstance(node.args[1], ast.Constant):
        name = getattr(node.func, "attr", getattr(node.func, "id", ""))
        if name == "plural":
            return f"{{n}} {node.args[1].value}"
    return None


def _parts(node: ast.AST) -> list[ast.AST] | None:
    """Return the parts of a string expression: constants, and expressions that are put into it."""
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return [node]
    if isinstance(node, ast.JoinedStr):
        return [
            part.value if isinstance(part, ast.FormattedValue) else part for part in node.values
        ]
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        left, right = _parts(node.left), _parts(node.right)
        if left is None and right is None:
            return None
        return [*(left or [node.left]), *(right or [node.right])]
    return None


def _text(node: ast.AST) -> str | None:
    parts = _parts(node)
    if parts is None:
        return None
    text, names = "", []
    for part in parts:
        if isinstance(part, ast.Constant) and isinstance(part.value, str):
            text += part.value
            continue
        name = part.id if isinstance(part, ast.Name) else str(len(names) + 1)
        if isinstance(part, ast.Call) and getattr(part.func, "id", "") == "suggest":
            name = "hint"
        names.append(name if name not in names else str(len(names) + 1))
        text += f"{{{names[-1]}}}"
    return text


def _expressions(node: ast.AST) -> list[ast.AST]:
    constants = (part for part in _parts(node) or () if not isinstance(part, ast.Constant))
    return list(constants)
