"""`ChatTemplate`: messages to the text that a model was trained on, by the template in its files.

A template is a program of unknown origin: it runs in jinja2's immutable sandbox, without loaders,
string formatting (whose widths take any memory) and powers, and with bounds: on its own length, on
what one step can produce, and on its work, which is counted in characters and in steps, so that the
same messages always pass or never.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from functools import wraps
from pathlib import Path
from threading import Lock
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.utils import Namespace
from jinja2.visitor import NodeTransformer

from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.files.gguf_files import GgufHeader
from regard.files.reading import checked_path_or_none, parse_json, read_bytes, read_text
from regard.untrusted_text import error_text, short_repr

TEMPLATE_LIMIT = 1 << 18
"""The longest template in characters; published ones have at most some 20,000."""
STEP_LIMIT = 1 << 27
"""The most characters that one step of a template may produce."""
WORK_LIMIT = 1 << 30
"""The most work of a template, in characters, where a step counts as `STEP` of them."""
STEP = 2048
_CONFIG_LIMIT = 64 << 20
_CHEAP = {"length", "count", "first", "last", "default", "d"}
_TOKENS = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token")
# tools write "no limit" as a number that no other program reads
_NO_LIMIT = re.compile(rb'("model_max_length"\s*:\s*)[0-9]{10,}')

Messages = Sequence[Mapping[str, Any]]
"""Messages of a conversation: dicts with "role", "content", and what the template knows else."""


class ChatTemplate:
    """A template that makes one text of the messages of a conversation.

    Args:
        source: the template in jinja2's language, with the functions that transformers adds.
        special_tokens: names such as "bos_token" -> the token, for the template.
        where: the file, for messages.

    Raises:
        FileError: the template is too long.

    >>> source = "{% for m in messages %}{{ m.role }}: {{ m.content }}{{ eos_token }}{% endfor %}"
    >>> template = ChatTemplate(source, {"eos_token": "</s>"})
    >>> template.render([{"role": "user", "content": "Hello"}])
    'user: Hello</s>'
    """

    def __init__(
        self, source: str, special_tokens: Mapping[str, str] | None = None, where: str = "the model"
    ) -> None:
        self.source, self.special_tokens = source, dict(special_tokens or {})
        self._where, self._lock = where, Lock()
        if len(source) > TEMPLATE_LIMIT:
            raise FileError(
                f"{where}: its chat template has {len(source)} characters; at most "
                f"{TEMPLATE_LIMIT} are read"
            )
        self._sandbox = _Sandbox()
        self._template: jinja2.Template | None = None  # compiled for the first messages

    def render(self, messages: Messages, *, answer: bool = True, **variables: Any) -> str:
        """Return the text of some messages, up to the beginning of an answer.

        Args:
            messages: dicts with "role" and "content", of values that JSON knows.
            answer: whether the beginning of an answer follows (`add_generation_prompt`).
            **variables: what the template knows else, such as tools or enable_thinking.

        Returns:
            The text, with the names of special tokens in it.

        Raises:
            ArgumentError, ArgumentTypeError: a message is not a dict with a role, or the template
                refuses the messages.
            FileError: the template is none, fails, or exceeds a bound.
        """
        context_variables = {
            "tools": None,
            "documents": None,
            **self.special_tokens,
            **variables,
            "messages": checked_messages(messages),
            "add_generation_prompt": answer,
        }
        with self._lock:
            self._sandbox.work = 0
            try:
                if self._template is None:
                    self._template = self._sandbox.from_string(self.source)
                return "".join(self._template.generate(context_variables))
            except _RefusedError as error:
                raise ArgumentError(
                    f"{self._where}: its chat template refuses these messages: "
                    f"{error_text(error, 300)}",
                    argument="messages",
                ) from None
            except Exception as error:  # a template can raise anything
                text = error_text(error, 300) or type(error).__name__
                raise FileError(
                    f"{self._where}: its chat template fails on these messages ({text}); write the "
                    "prompt as a text with the names of special tokens, and special=True"
                ) from error


def checked_messages(messages: Messages) -> list[dict[str, Any]]:
    """Return messages as plain data, which has no methods for a template to call."""
    try:
        plain: list[dict[str, Any]] = json.loads(json.dumps(list(messages), allow_nan=False))
    except (TypeError, ValueError, RecursionError) as error:
        raise ArgumentTypeError(
            f"messages hold what JSON does not know: {error_text(error, 200)}; give dicts of texts",
            argument="messages",
        ) from error
    for i, message in enumerate(plain):
        if not isinstance(message, dict) or not isinstance(message.get("role"), str):
            raise ArgumentTypeError(
                f"messages[{i}] is {short_repr(message)}; a message is a dict such as "
                '{"role": "user", "content": "Hello"}',
                argument="messages",
            )
    return plain


def read_chat_template(folder: Path) -> ChatTemplate | None:
    """Return the chat template of a model's folder, or None if it has none."""
    values: dict[str, Any] = {}
    for name in ("special_tokens_map.json", "tokenizer_config.json"):
        file = checked_path_or_none(folder, name)
        if file is not None:
            try:
                values |= parse_json(_NO_LIMIT.sub(rb"\g<1>0", read_bytes(file, _CONFIG_LIMIT)))
            except ArgumentError as error:
                raise FileError(f"{file} {error}") from None
    source = values.get("chat_template")
    if isinstance(source, list):  # several templates by name
        named = {x.get("name"): x.get("template") for x in source if isinstance(x, dict)}
        source = named.get("default")
    if (own := checked_path_or_none(folder, "chat_template.jinja")) is not None:
        source = read_text(own, 4 * TEMPLATE_LIMIT)
    if source is None:
        return None
    if not isinstance(source, str):
        raise FileError(f"{folder}: chat_template is {short_repr(source)}; it must be a text")
    tokens = {name: values.get(name) for name in _TOKENS}
    tokens = {k: x.get("content") if isinstance(x, dict) else x for k, x in tokens.items()}
    return ChatTemplate(
        source, {k: x for k, x in tokens.items() if isinstance(x, str)}, str(folder)
    )


def gguf_chat_template(header: GgufHeader) -> ChatTemplate | None:
    """Return the chat template of a GGUF file, or of the folder of the file, or None."""
    source = header.metadata.get("tokenizer.chat_template")
    if not isinstance(source, str):
        return read_chat_template(header.file.parent)
    tokens = header.metadata.get("tokenizer.ggml.tokens")
    names: dict[str, str] = {}
    for name in _TOKENS:
        key = name.replace("pad", "padding").replace("unk", "unknown")
        index = header.metadata.get(f"tokenizer.ggml.{key}_id")
        if isinstance(tokens, list) and isinstance(index, int) and 0 <= index < len(tokens):
            names[name] = str(tokens[index])
    return ChatTemplate(source, names, str(header.file))


class _RefusedError(Exception):
    """What a template raises with raise_exception: the messages are not as it wants them."""


class _Sandbox(ImmutableSandboxedEnvironment):
    """The sandbox, with the filters and functions that transformers adds, and with bounds."""

    intercepted_binops = frozenset({"+", "*", "%", "**"})

    def __init__(self) -> None:
        self.work = 0
        super().__init__(
            trim_blocks=True,
            lstrip_blocks=True,
            extensions=[_Generation, loopcontrols],
            finalize=self._printed,
        )
        del self.globals["lipsum"]
        self.globals |= {
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
            "dict": lambda *args, **kwargs: dict(*args, **kwargs),
            "namespace": _Namespace,
        }
        self.filters |= {"tojson": _tojson}
        del self.filters["format"]
        self.filters = {
            name: f if name in _CHEAP else self._counted(f) for name, f in self.filters.items()
        }

    def spend(self, amount: int, step: int = STEP) -> None:
        """Count a step that produces at most so many characters."""
        self.work += step + amount
        if amount > STEP_LIMIT or self.work > WORK_LIMIT:
            raise jinja2.TemplateError("it does more work than a chat template needs")

    def size(self, value: object) -> int:
        """Return about how many characters a value has when it is printed."""
        if isinstance(value, (str, bytes)):
            return len(value)
        if isinstance(value, (list, tuple, set, dict)):
            self.spend(0, 16)
            parts = (*value, *value.values()) if isinstance(value, dict) else value
            return 1 + sum(map(self.size, parts))
        return 1

    def count(self, *values: object) -> None:
        """Count a call: it can produce no more than the product of the sizes of its arguments."""
        product = 1
        for value in values:
            product *= max(1, abs(value) if isinstance(value, int) else self.size(value))
        self.spend(product)

    def call(self, context: Any, obj: Any, /, *args: Any, **kwargs: Any) -> Any:
        """Call a function or a method."""
        own = getattr(obj, "__self__", None)
        if own is not self:
            self.count(own, *args, *kwargs.values())
        return super().call(context, obj, *args, **kwargs)

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Compute an operator, where it costs no more than is left of the bound."""
        if operator == "**" or (operator == "%" and isinstance(left, str)):
            raise jinja2.TemplateError("powers and string formatting are not available")
        if operator == "+":
            self.spend(self.size(left) + self.size(right))
        elif isinstance(left, int) and isinstance(right, int):
            self.spend(left.bit_length() * right.bit_length())
        else:
            self.count(left, right)
        return super().call_binop(context, operator, left, right)

    def wrap_str_format(self, value: Any) -> None:
        """Refuse the methods `format` and `format_map`, which the sandbox otherwise wraps."""
        if super().wrap_str_format(value) is not None:
            raise jinja2.TemplateError("powers and string formatting are not available")

    def join_texts(self, *parts: Any) -> str:
        """Join the operands of `~`."""
        self.spend(sum(map(self.size, parts)))
        return "".join(map(str, parts))

    def _printed(self, value: Any) -> Any:
        self.spend(self.size(value))
        return value

    def _counted(self, function: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(function)
        def call(*args: Any, **kwargs: Any) -> Any:
            self.count(*args, *kwargs.values())
            return function(*args, **kwargs)

        return call

    def _generate(self, source: nodes.Template, *args: Any, **kwargs: Any) -> str:
        """Compile a template whose loops and macros count their steps."""
        return super()._generate(_CountSteps().visit(source), *args, **kwargs)


class _CountSteps(NodeTransformer):
    """Lets every pass of a loop, and every call of a macro, count itself and its own text; and `~`
    join through the sandbox.
    """

    def visit_For(self, node: Any) -> Any:  # noqa: N802  (a name of jinja2's)
        self.generic_visit(node)
        text = sum(len(x.data) for part in node.body for x in _texts(part))
        call = _call("spend", [nodes.Const(text)], node.lineno)
        node.body.insert(0, nodes.ExprStmt(call, lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_For  # noqa: N815

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        return _call("join_texts", node.nodes, node.lineno)


def _texts(node: nodes.Node) -> list[nodes.TemplateData]:
    own = [node] if isinstance(node, nodes.TemplateData) else []
    return [*own, *node.find_all(nodes.TemplateData)]


def _call(name: str, arguments: list[Any], lineno: int) -> nodes.Call:
    return nodes.Call(
        nodes.EnvironmentAttribute(name, lineno=lineno), arguments, [], None, None, lineno=lineno
    )


class _Generation(Extension):
    """The block {% generation %}, which marks answers for training and changes no text."""

    tags = {"generation"}

    def parse(self, parser: Any) -> Any:
        """Return what the block contains."""
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Namespace(Namespace):
    """A namespace without underscored names, through which a template could leave the sandbox."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        for name in dict(*args, **kwargs):
            _Namespace._check(name)
        super().__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _Namespace._check(name)
        super().__setitem__(name, value)

    @staticmethod
    def _check(name: object) -> None:
        if str(name).startswith("_"):
            raise jinja2.TemplateError("a name in a namespace begins with an underscore")


def _raise_exception(message: object) -> None:
    raise _RefusedError(str(message))


def _strftime_now(form: str) -> str:
    if len(form) > 200 or re.search(r"[0-9]{3}", form):
        raise jinja2.TemplateError("a date is asked for with a width")
    return datetime.now().astimezone().strftime(form)


def _tojson(value: Any, **options: Any) -> str:
    # jinja2's own filter escapes characters for HTML
    return json.dumps(value, **{"ensure_ascii": False, **options})
