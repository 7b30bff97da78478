"""The docstring of a constructor of the catalogue, composed of what its entry and the sets of
options say.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Mapping
from inspect import Parameter
from textwrap import wrap

WIDTH = 84
"""Columns of a composed docstring, as `help` shows it behind its indentation."""


def described_options(docstring: str) -> dict[str, str]:
    """Return the meanings of the arguments that stand below `Args:`.

    >>> described_options("One.\\n\\nArgs:\\n    a: the first\\n        size.\\n    b: a name.")
    {'a': 'the first size.', 'b': 'a name.'}
    """
    arguments = docstring.partition("Args:\n")[2].partition("\n\n")[0]
    one_line = re.sub(r"\n {8,}", " ", arguments)  # later lines of a meaning are indented further
    pairs = (line.strip().partition(": ") for line in one_line.splitlines())
    return {name: meaning for name, _, meaning in pairs}


def help_text(
    docstring: str,
    name: str,
    signature: inspect.Signature,
    meanings: Mapping[str, str],
    *,
    equation: str,
    source: str,
    shapes: str,
    example: Mapping[str, object],
) -> str:
    """Return the docstring of a constructor: what its entry says, with the equation, the shapes,
    all arguments, the errors, an example and the source.
    """
    prose, _, runnable = re.sub(r"Args:\n( +.*\n?)+\n*", "", docstring).partition(">>>")
    summary, *remarks = prose.strip().split("\n\n")
    arguments = [_filled(f"{n}: {meanings[n]}") for n in signature.parameters]
    errors = _filled(f"ArgumentError, ArgumentTypeError: {_errors(signature.parameters)}")
    return "\n\n".join(
        [
            summary,
            _filled(equation),
            shapes,
            *remarks,
            "\n".join(["Args:", *arguments]),
            "Returns:\n    The module.",
            f"Raises:\n{errors}",
            f">>>{runnable}".strip() if runnable else _example(name, shapes, example),
            "\n".join(wrap(f"Source: {source.rstrip('.')}.", WIDTH)),
        ]
    )


def _filled(text: str) -> str:
    """Return a text in indented lines, of which the later ones are indented further."""
    lines = wrap(text, WIDTH - 8, break_long_words=False, break_on_hyphens=False)
    return "\n        ".join([f"    {lines[0]}", *lines[1:]])


def _errors(parameters: Mapping[str, Parameter]) -> str:
    """Return when a constructor refuses its arguments."""
    cases = ["an option is unknown or missing", "a size is less than 1 or not what its line says"]
    if "groups" in parameters:
        cases.append("groups does not divide heads")
    if "head_dim" in parameters and parameters["head_dim"].default is None:
        cases.append("head_dim is None and not a whole number")
    return f"{', '.join(cases[:-1])}, or {cases[-1]}."


def _example(name: str, shapes: str, options: Mapping[str, object]) -> str:
    """Return an example that builds the small module of the catalogue and calls it."""
    arguments = "".join(f", {option}={value!r}" for option, value in options.items())
    memory = ", memory=torch.zeros(1, 6, 32)" if "memory" in shapes else ""
    return (
        f">>> import torch\n>>> layer = {name}(32, 4{arguments})\n"
        f">>> layer(torch.zeros(1, 5, 32){memory}).shape\ntorch.Size([1, 5, 32])"
    )
