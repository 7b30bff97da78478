"""What keeps the package's words plain: one list of findings for each rule, read from the source.

`tests/surface/test_plain_words.py` asserts that the lists are empty. The rules are: class names are
unique; docstrings are sentences; public functions have `Args:` and `Returns:`; counts get their
plural from `regard.units.plural`; words of the former private vocabulary do not come back.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import pkgutil
import re
import warnings
from collections import defaultdict
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import benchmarks
import experiments
import regard

PACKAGE = Path(regard.__file__).parent
OUTSIDE = [Path(x.__file__).parent for x in (benchmarks, experiments)]

PRIVATE_NAMES = frozenset(
    {
        "aimed",
        "ask",
        "at",
        "contestant",
        "elsewhere",
        "ends",
        "facing",
        "found",
        "fresh",
        "front",
        "given",
        "glyphs",
        "heal",
        "held",
        "judged",
        "kept",
        "late",
        "lesson",
        "made",
        "much",
        "near",
        "newer",
        "older",
        "pays",
        "price",
        "pupil",
        "roots",
        "said",
        "seen",
        "settled",
        "specimen",
        "stale",
        "suspect",
        "told",
        "who",
    }
)
"""Names of variables, parameters, attributes and functions that do not say what they hold."""

OPTIONS = {("cli", "heal")}
"""Options of commands, which keep their names: `--heal`."""

PRIVATE_PHRASES = (
    r"\btold\b",
    r"\belsewhere\b",
    r"\bis not (its|our) business\b",
    r"\blies ahead\b",
    r"\bmet by a token\b",
    r"\bnumbers per token kept\b",
    r"\bof all (memory|keys)\b,",
    r"\bnobody\b",
    r"\bsomebody\b",
    r"\bhas to be told\b",
    r"\bthe house\b",
    r"\bis at home\b",
    r"\ball alike\b",
    r"\bbehaves? well\b",
)
"""Phrases that a stranger has to read twice, as patterns for docstrings, comments and messages."""

COUNTED = (
    "layers|heads|tokens|keys|queries|threads|files|ranks|checks|rows|columns|steps|tensors|"
    "pages|masks|values|weights|models|blocks|parameters|sentences|calls|runs|names|kernels|"
    "experts|caches|tiles|processes|cores|claims|tasks|words|numbers|batches|chunks|entries|"
    "patterns|prompts|positions|shards|spans|warnings|cells|cases|mechanisms"
)
ALWAYS_PLURAL = {
    ("caches/quantized.py", "values"),  # sizes of a tensor
    ("cli/convert.py", "tokens"),  # windows x tokens
    ("cli/convert.py", "values"),  # the errors of values
    ("compare/context_extension.py", "tokens"),  # several lengths
    ("compare/mechanisms.py", "parameters"),
    ("compare/mechanisms.py", "tokens"),  # 4 sinks
    ("compare/render.py", "tokens"),  # a list of contexts
    ("cost/fixed_state.py", "heads"),  # H/G heads
    ("cost/spec.py", "heads"),  # H/G heads
    ("cost/roofline.py", "cores"),  # of known machines
    ("masks/patterns.py", "columns"),  # "at least"
    ("models/convert/latent_attention.py", "values"),
    ("train/checkpoints.py", "names"),  # a verb
}
"""Where a noun follows a number that is never 1, or no number."""

_COUNT = re.compile(rf"\}} ({COUNTED})\b(?!/s)")


def sources() -> list[Path]:
    return [path for folder in (PACKAGE, *OUTSIDE) for path in sorted(folder.rglob("*.py"))]


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def where(path: Path, node: ast.AST) -> str:
    return f"{short(path)}:{getattr(node, 'lineno', 1)}"


def short(path: Path) -> str:
    """The path of a source in its package."""
    folders = (PACKAGE, *(x.parent for x in OUTSIDE))
    return next((str(path.relative_to(x)) for x in folders if path.is_relative_to(x)), str(path))


def class_names_used_twice() -> dict[str, list[str]]:
    """Every class name that more than one module defines, with the modules."""
    homes: dict[str, list[str]] = defaultdict(list)
    for path in sources():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.ClassDef) and not node.name.startswith("_"):
                homes[node.name].append(where(path, node))
    return {name: places for name, places in homes.items() if len(places) > 1}


def docstrings(path: Path) -> Iterator[tuple[ast.AST, str]]:
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text is not None:
                yield node, text


def poor_docstrings() -> list[str]:
    """Docstrings of fewer than five words, or that begin with "Of" or "As"."""
    poor = []
    for path in sources():
        for node, text in docstrings(path):
            words = text.split(">>>")[0].split()
            if len(words) < 5 or words[0] in {"Of", "As"}:
                poor.append(f"{where(path, node)}: {' '.join(words[:8])}")
    return poor


@cache
def public_functions() -> dict[str, object]:
    """Public functions and methods of the package by full name, without overriding methods."""
    functions: dict[str, object] = {}
    modules = ["regard", "regard.linear", "regard.memory"]
    modules += [m.name for m in pkgutil.walk_packages(regard.__path__, "regard.") if m.ispkg]
    for module_name in modules:
        module = importlib.import_module(module_name)
        for name in getattr(module, "__all__", ()):
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                value = getattr(module, name)
            if not getattr(value, "__module__", "").startswith("regard"):
                continue
            if inspect.isfunction(value):
                functions[f"{value.__module__}.{value.__qualname__}"] = value
            elif inspect.isclass(value):
                functions[f"{value.__module__}.{value.__qualname__}"] = value
                for method_name, member in vars(value).items():
                    method = (
                        member.__func__
                        if isinstance(member, classmethod | staticmethod)
                        else member
                    )
                    inherited = any(hasattr(base, method_name) for base in value.__mro__[1:])
                    if method_name.startswith("_") or inherited or not inspect.isfunction(method):
                        continue
                    functions[f"{method.__module__}.{method.__qualname__}"] = method
    return functions


def missing_sections() -> list[str]:
    """Public functions without `Args:` or `Returns:`, and public classes without `Args:`."""
    missing = []
    for name, value in sorted(public_functions().items()):
        text = inspect.getdoc(value) or ""
        path = Path(inspect.getsourcefile(value) or "").resolve()  # type: ignore[arg-type]
        place = f"{short(path)}: {name}"
        if not text.strip():
            missing.append(f"{place}: no docstring")
            continue
        if inspect.isclass(value):
            if "Args:" not in text and _constructor_parameters(value):
                missing.append(f"{place}: class without Args")
            continue
        signature = inspect.signature(value)  # type: ignore[arg-type]
        parameters = [p for p in signature.parameters if p not in {"self", "cls"}]
        if parameters and "Args:" not in text:
            missing.append(f"{place}: without Args")
        if signature.return_annotation not in {None, "None", "NoReturn", "Never"} and not re.search(
            r"^(Returns|Yields):", text, re.MULTILINE
        ):
            missing.append(f"{place}: without Returns")
    return missing


def _constructor_parameters(cls: type) -> list[str]:
    own = "__init__" in vars(cls) or "__dataclass_fields__" in vars(cls)
    if not own or issubclass(cls, BaseException):
        return []
    try:
        return [p for p in inspect.signature(cls).parameters if p not in {"args", "kwargs"}]
    except (TypeError, ValueError):
        return []


def name_of(node: ast.AST) -> str | None:
    """The name that a node defines or assigns, if it does."""
    if isinstance(node, ast.FunctionDef | ast.ClassDef):
        return node.name
    if isinstance(node, ast.arg):
        return node.arg
    if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
        return node.id
    if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
        return node.attr
    return None


def private_names() -> list[str]:
    """Definitions, parameters, attributes and local variables with a name of `PRIVATE_NAMES`."""
    hits = []
    for path in sources():
        for node in ast.walk(parsed(path)):
            if (path.parent.name, name_of(node)) in OPTIONS:
                continue
            name = name_of(node)
            if name is not None and name.strip("_").lower() in PRIVATE_NAMES:
                hits.append(f"{where(path, node)}: {name}")
    return hits


def private_phrases() -> list[str]:
    """Lines of docstrings, comments and messages that match one of `PRIVATE_PHRASES`."""
    pattern = re.compile("|".join(PRIVATE_PHRASES), re.IGNORECASE)
    hits = []
    for path in sources():
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if match := pattern.search(line):
                hits.append(f"{short(path)}:{number}: {match[0]}")
    return hits


def counts_without_plural() -> list[str]:
    """Formatted strings in which a plural noun follows a number, whatever the number is."""
    hits = []
    for path in sources():
        for node in ast.walk(parsed(path)):
            if isinstance(node, ast.JoinedStr):
                text = "".join(
                    str(part.value) if isinstance(part, ast.Constant) else "{}"
                    for part in node.values
                )
                file = short(path)
                hits += [
                    f"{where(path, node)}: {{}} {noun}"
                    for noun in _COUNT.findall(text)
                    if (file, noun) not in ALWAYS_PLURAL
                ]
    return hits


RULES = {
    "class names that are used twice": lambda: [
        f"{name}: {places}" for name, places in class_names_used_twice().items()
    ],
    "docstrings that are short or begin with Of or As": poor_docstrings,
    "public functions without sections": missing_sections,
    "names that do not say what they hold": private_names,
    "phrases": private_phrases,
    "counts without plural()": counts_without_plural,
}
