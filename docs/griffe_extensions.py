"""Extensions of griffe for the reference: the examples (`>>>`) of docstrings are code blocks, and
the constructors of the catalogue have the signatures and docstrings that Python gives them.
"""

from __future__ import annotations

import inspect
import re
from typing import Any

import griffe

EXAMPLE = re.compile(r"^(?P<indent>[ ]*)>>> .*(?:\n(?P=indent).*\S.*)*", re.MULTILINE)


def fenced(docstring: str) -> str:
    """Put every example into a code block; an example ends at the next empty line.

    >>> fenced("One.\\n\\n>>> 1 + 1\\n2")
    'One.\\n\\n```pycon\\n>>> 1 + 1\\n2\\n```'
    """

    def block(match: re.Match[str]) -> str:
        indent = match["indent"]
        return f"{indent}```pycon\n{match[0]}\n{indent}```"

    return EXAMPLE.sub(block, docstring)


class DoctestFences(griffe.Extension):
    """Changes each docstring when griffe has read it."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Fence the examples of one module, class, function or attribute."""
        if obj.docstring is not None:
            obj.docstring.value = fenced(inspect.cleandoc(obj.docstring.value))


class CatalogueConstructors(griffe.Extension):
    """Replaces what stands in the source of an entry by what its decorator makes of it."""

    def on_package(self, *, pkg: griffe.Module, **_: Any) -> None:
        """Change the constructors of `regard.nn.variants`, and list them as exported."""
        if pkg.name != "regard":
            return
        from regard.nn import variants

        exports: list[Any] = list(variants.__all__)  # type: ignore[attr-defined]
        pkg["nn.variants"].exports = exports
        for entry in variants.VARIANTS.values():
            module = entry.build.__module__.removeprefix("regard.")
            function = pkg[f"{module}.{entry.name}"]
            text = fenced(inspect.getdoc(entry.build) or "")
            function.docstring = griffe.Docstring(text, parent=function)
            function.parameters = griffe.Parameters(
                *map(_parameter, inspect.signature(entry.build).parameters.values())
            )


def _parameter(parameter: inspect.Parameter) -> griffe.Parameter:
    """Return a parameter as griffe has it."""
    required = parameter.default is inspect.Parameter.empty
    only = parameter.kind is inspect.Parameter.KEYWORD_ONLY
    kinds = griffe.ParameterKind
    return griffe.Parameter(
        parameter.name,
        annotation=inspect.formatannotation(parameter.annotation),
        kind=kinds.keyword_only if only else kinds.positional_or_keyword,
        default=None if required else repr(parameter.default),
    )
