"""A reference of the whole public API, made from signatures and docstrings.

The public API is what stands in `__all__` of `regard` and of its public packages, with the public
methods and attributes of its classes. `entries` lists it; `markdown` writes it as one page, so that
somebody can read it from end to end:

    python -m tests.surface.api_reference reference.md
"""

from __future__ import annotations

import ast
import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from pathlib import Path
from types import ModuleType
from typing import Any, ForwardRef

import regard


@dataclass(frozen=True)
class Entry:
    """One name of the reference: a module, a class, a function, a method, or a constant."""

    name: str
    """Its full public name, such as `regard.masks.Window`."""
    signature: str
    """Its arguments and what it returns, or the value of a constant."""
    docstring: str
    """Its docstring without indentation; "" if it has none."""
    depth: int
    """1 for a module, 2 for what a module exports, 3 for what belongs to a class."""


def modules() -> list[ModuleType]:
    """The modules that `regard` exports, and every other one that has `__all__`."""
    found = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # modules with old names warn
        names = [info.name for info in pkgutil.walk_packages(regard.__path__, "regard.")]
        for name in ["regard", *names]:
            if any(part.startswith("_") for part in name.split(".")):
                continue
            try:
                module = importlib.import_module(name)
            except ImportError as error:
                if error.name not in ("triton", "lm_eval", "sentence_transformers"):  # optional
                    raise
                continue
            if hasattr(module, "__all__") or name.removeprefix("regard.") in regard.__all__:
                found.append(module)
    return found


def exports(module: ModuleType) -> list[str]:
    """The public names of a module: its `__all__`, or what it defines itself."""
    if hasattr(module, "__all__"):
        return list(module.__all__)
    own = [n for n, x in vars(module).items() if getattr(x, "__module__", "") == module.__name__]
    return [name for name in own if not name.startswith("_")]


def entries() -> list[Entry]:
    """The whole public API in the order of the reference; a name is entered at its first place."""
    done: set[int] = set()
    found = []
    for module in modules():
        found.append(Entry(module.__name__, "", inspect.getdoc(module) or "", 1))
        for name in exports(module):
            value = getattr(module, name)
            if isinstance(value, ModuleType) or (callable(value) and id(value) in done):
                continue
            done.add(id(value))
            found.extend(_of_value(f"{module.__name__}.{name}", value, module))
    return found


def _of_value(name: str, value: object, module: ModuleType) -> Iterator[Entry]:
    if not callable(value) or not getattr(value, "__module__", "").startswith("regard"):
        text = "" if callable(value) else f" = {_short(_default(value))}"
        yield Entry(name, text, _docstring_of_constant(module, name.rpartition(".")[2]), 2)
        return
    yield Entry(name, _signature(value), _docstring(value), 2)
    if isinstance(value, type):
        for attribute, text in _attributes(value):
            yield Entry(f"{name}.{attribute}", "", text, 3)
        for member, inner in vars(value).items():
            if not member.startswith("_") and member != "forward":
                yield from _of_member(f"{name}.{member}", inner, value)


def _of_member(name: str, value: object, owner: type) -> Iterator[Entry]:
    member = name.rpartition(".")[2]
    if isinstance(value, property | cached_property):
        yield Entry(name, "", _docstring(getattr(value, "fget", None) or value.func), 3)  # type: ignore[union-attr]
    elif isinstance(value, staticmethod | classmethod) or inspect.isfunction(value):
        function = getattr(value, "__func__", value)
        text = _docstring(function)
        if text or not any(hasattr(base, member) for base in owner.__mro__[1:]):
            yield Entry(name, _signature(function), text, 3)


def _docstring(value: object) -> str:
    text = getattr(value, "__doc__", None) or ""
    if dataclasses.is_dataclass(value) and text.startswith(f"{value.__name__}("):  # type: ignore[union-attr]
        return ""  # what `dataclass` writes where there is none
    return inspect.cleandoc(text)


@cache
def _tree(path: str) -> ast.Module:
    return ast.parse(Path(path).read_text(encoding="utf-8"))


def _attribute_docstrings(body: list[ast.stmt]) -> dict[str, str]:
    """Attributes -> the strings that follow their assignments."""
    found = {}
    for statement, after in pairwise(body):
        target = (
            statement.target
            if isinstance(statement, ast.AnnAssign)
            else statement.targets[0]
            if isinstance(statement, ast.Assign)
            else None
        )
        text = after.value if isinstance(after, ast.Expr) else None
        names = target.elts if isinstance(target, ast.Tuple) else [target]
        if isinstance(text, ast.Constant):
            cleaned = inspect.cleandoc(str(text.value))
            found |= {name.id: cleaned for name in names if isinstance(name, ast.Name)}
    return found


def _docstring_of_constant(module: ModuleType, name: str) -> str:
    """The docstring of a module's constant, where it is defined."""
    below = [m for n, m in sorted(sys.modules.items()) if n.startswith(f"{module.__name__}.")]
    value = getattr(module, name)  # a package may import it only now
    for home in [module, *below, *sys.modules.values()]:
        if home.__name__.startswith("regard") and vars(home).get(name) is value:
            found = _attribute_docstrings(_tree(str(home.__file__)).body)
            if name in found:
                return found[name]
    return ""


def _attributes(cls: type) -> Iterator[tuple[str, str]]:
    """The public attributes of a class that have a docstring, in the order of the source."""
    home = sys.modules[cls.__module__]
    for node in ast.walk(_tree(str(home.__file__))):
        if isinstance(node, ast.ClassDef) and node.name == cls.__name__:
            for name, text in _attribute_docstrings(node.body).items():
                if not name.startswith("_"):
                    yield name, text


def _short(text: str, longest: int = 300) -> str:
    text = re.sub(r"<(\w+ \w+) at 0x[0-9a-f]+>", r"<\1>", text)  # no addresses
    return text if len(text) <= longest else text[:longest] + " ..."


def _signature(value: object) -> str:
    try:
        signature = inspect.signature(value)  # type: ignore[arg-type]
    except (TypeError, ValueError):
        return ""
    parameters = [
        x.replace(annotation=_Text(_type(x.annotation)), default=_Text(_default(x.default)))
        for x in signature.parameters.values()
    ]
    returns = _Text(_type(signature.return_annotation))
    return str(inspect.Signature(parameters, return_annotation=returns))


class _Text(str):
    """A text that `repr` shows without quotes; the empty one stands for "not given"."""

    __slots__ = ()

    def __new__(cls, text: str) -> Any:
        return super().__new__(cls, text) if text else inspect.Parameter.empty

    __repr__ = str.__str__


def _type(annotation: object) -> str:
    """An annotation as the source has it, where it is a string there."""
    if annotation is inspect.Parameter.empty:
        return ""
    if isinstance(annotation, ForwardRef):
        return annotation.__forward_arg__.strip('"')
    return (
        annotation.strip('"')
        if isinstance(annotation, str)
        else inspect.formatannotation(annotation)
    )


def _default(value: object) -> str:
    """A default value; functions and objects without a readable `repr` are "..."."""
    if value is inspect.Parameter.empty:
        return ""
    text = repr(value)
    return "..." if text.startswith("<") else text


def markdown() -> str:
    """The reference as one page."""
    lines = [f"# regard {regard.__version__}: the public API", ""]
    for entry in entries():
        title = f"{'#' * (entry.depth + 1)} {entry.name}"
        lines += [title, ""]
        if entry.signature:
            lines += ["```python", entry.name.rpartition(".")[2] + entry.signature, "```", ""]
        lines += [entry.docstring, ""]
    return "\n".join(lines)


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: python -m tests.surface.api_reference FILE")
    Path(sys.argv[1]).write_text(markdown(), encoding="utf-8")
