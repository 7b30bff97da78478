"""Parsing of mask expressions such as `causal & window(4)`, the text that `print(mask)` writes."""

from __future__ import annotations

import ast
import re

from regard.did_you_mean import suggest
from regard.errors import ArgumentError, RegardError
from regard.masks.base import MASKS, Mask
from regard.units import plural
from regard.untrusted_text import error_text, escape_controls


def parsable_masks() -> dict[str, type[Mask]]:
    """Return the classes that an expression can contain, by name: those with plain fields."""
    return {
        name: kind
        for name, kind in MASKS
        if kind.has_text and "__dataclass_fields__" in kind.__dict__
    }


MAX_NUMBER = 1 << 53
"""The largest number that an expression may contain; positions are smaller."""
MAX_TEXT_LENGTH = 1 << 16
"""The largest number of characters of an expression."""
MAX_MASKS = 1 << 9
"""The largest number of masks in an expression; the work grows with it."""
_CONTEXT_CHARACTERS = 80  # shown before and after an error
MAX_DEPTH = 50
"""The deepest nesting of an expression, so that untrusted text cannot exhaust the stack."""
MAX_PARSER_RETRIES = 8
"""How often an expression is parsed again after CPython's parser failed by itself."""


def parse(text: str) -> Mask:
    """Parse an expression of masks, numbers, tuples, `&`, `|`, `~` and parentheses.

    Nothing is executed. `~` binds most tightly, then `&`, then `|`; case does not matter.

    Args:
        text: the expression.

    Returns:
        The mask.

    Raises:
        ArgumentError: the text is no such expression; the message marks the column.

    >>> parse("causal & window(4) | sinks(1)")
    Or(masks=(And(masks=(Causal(), Window(size=4, ahead=None))), Sinks(n=1)))
    >>> parse("causal & windw(4)")
    Traceback (most recent call last):
    regard.errors.ArgumentError: unknown mask "windw"; did you mean 'window'? ...
    """
    if not text.strip():
        raise _error("the expression is empty", text, None)
    text = text.strip()
    if len(text) > MAX_TEXT_LENGTH:
        raise _error(
            f"the expression has {len(text)} characters; at most {MAX_TEXT_LENGTH} are allowed",
            text,
            None,
        )
    try:  # `global` is a Python keyword; `Global` has the same length
        tree = _syntax_tree(re.sub(r"\bglobal\b", "Global", text))
    except (SyntaxError, ValueError, RecursionError, MemoryError) as problem:
        reason = getattr(problem, "msg", None) or "the expression is nested too deep"
        raise _error(
            f"not a mask expression: {error_text(reason)}", text, _column(problem, text)
        ) from None
    return _ExpressionReader(text).mask(tree.body, 0)


def _syntax_tree(text: str) -> ast.Expression:
    """Parse an expression, again if another thread disturbed CPython's parser (issue 106905)."""
    for _ in range(MAX_PARSER_RETRIES):
        try:
            return ast.parse(text, mode="eval")
        except SystemError:
            continue
    return ast.parse(text, mode="eval")


class _ExpressionReader:
    """Builds a mask from a syntax tree, and raises at the column of an unknown node."""

    def __init__(self, text: str) -> None:
        self.text, self.masks, self.known = text, 0, parsable_masks()

    def mask(self, node: ast.expr, depth: int) -> Mask:
        """Build a mask from a node."""
        if depth > MAX_DEPTH:
            raise self.error(f"the expression is nested deeper than {MAX_DEPTH} levels", node)
        if isinstance(node, ast.BinOp) and isinstance(node.op, (ast.BitAnd, ast.BitOr)):
            left, right = self.mask(node.left, depth + 1), self.mask(node.right, depth + 1)
            return left & right if isinstance(node.op, ast.BitAnd) else left | right
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert):
            return ~self.mask(node.operand, depth + 1)
        if isinstance(node, ast.Name):
            return self.make(node, node, [], {}, depth)
        if isinstance(node, ast.Call) and isinstance(node.func, ast.Name):
            return self.make(
                node, node.func, node.args, {x.arg: x.value for x in node.keywords}, depth
            )
        raise self.error("a mask is expected here", node)

    def make(
        self,
        node: ast.expr,
        name: ast.Name,
        arguments: list[ast.expr],
        keywords: dict[str | None, ast.expr],
        depth: int,
    ) -> Mask:
        """Build a mask from a call of a known class."""
        self.masks += 1
        if self.masks > MAX_MASKS:
            raise self.error(f"the expression has more than {plural(MAX_MASKS, 'mask')}", node)
        word = name.id.lower()
        if word not in self.known:
            hint = suggest(word, self.known, most=2, cutoff=0.5)
            raise self.error(f'unknown mask "{error_text(name.id, 60)}"{hint}', name)
        if None in keywords:
            raise self.error("** is not allowed", node)
        values = [self.value(x, depth + 1) for x in arguments]
        named = {str(key): self.value(x, depth + 1) for key, x in keywords.items()}
        try:
            return self.known[word](*values, **named)
        except TypeError as problem:
            if isinstance(problem, RegardError):
                raise self.error(str(problem), node) from None
            reason = (
                str(problem).split(".__init__() ")[-1].replace("positional argument", "argument")
            )
            raise self.error(f"{word}: {error_text(reason)}", node) from None
        except RegardError as problem:
            raise self.error(str(problem), node) from None
        except ValueError as problem:  # raised by a class outside this package
            raise self.error(f"{word}: {error_text(problem)}", node) from None

    def value(self, node: ast.expr, depth: int) -> object:
        """Return the number, True, False, None, tuple of values, or mask of a node."""
        if depth > MAX_DEPTH:
            raise self.error(f"the expression is nested deeper than {MAX_DEPTH} levels", node)
        if isinstance(node, ast.Constant) and (
            node.value is None or type(node.value) in (int, bool)
        ):
            if isinstance(node.value, int) and node.value > MAX_NUMBER:
                raise self.error(f"the number is larger than {MAX_NUMBER}", node)
            return node.value
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub):
            inner = self.value(node.operand, depth + 1)
            if type(inner) is int:
                return -inner
        if isinstance(node, (ast.Tuple, ast.List)):
            return tuple(self.value(x, depth + 1) for x in node.elts)
        if isinstance(node, (ast.Name, ast.Call, ast.BinOp)) or (
            isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Invert)
        ):
            return self.mask(node, depth + 1)
        raise self.error("only whole numbers, tuples and masks are allowed here", node)

    def error(self, problem: str, node: ast.expr) -> ArgumentError:
        """Return the error for a node, with its column."""
        # ast counts columns in UTF-8 bytes
        column = len(self.text.encode()[: node.col_offset].decode(errors="ignore"))
        return _error(problem, self.text, column if node.lineno == 1 else None)


def _column(problem: Exception, text: str) -> int | None:
    """Return the column of a syntax error, that of the end if it ends early, or None."""
    offset, line = getattr(problem, "offset", None), getattr(problem, "lineno", 1)
    return (
        None
        if offset is None or line != 1 or "\n" in text
        else len(text)
        if offset < 1
        else offset - 1
    )


def _error(problem: str, text: str, column: int | None) -> ArgumentError:
    """Return the error for an expression, with a mark at the column and the known names."""
    place = ""
    if column is not None:
        line = text.splitlines()[0] if text else ""
        first = max(0, column - _CONTEXT_CHARACTERS)
        before, after = (
            escape_controls(line[first:column]),
            escape_controls(line[column : column + _CONTEXT_CHARACTERS]),
        )
        place = f"\n  {before}{after}\n  {' ' * len(before)}^ column {column + 1}"
    return ArgumentError(
        f"{problem}{place}\n  known masks: {', '.join(parsable_masks())}; joined by & | ~ and "
        "parentheses, for example: causal & window(4) | sinks(1)",
        argument="expression",
        value=text,
    )
