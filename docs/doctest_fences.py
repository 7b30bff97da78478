"""An extension of griffe: the examples (`>>>`) of docstrings are code blocks in the reference."""

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
