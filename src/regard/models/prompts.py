"""Prompts: texts, ids and messages, and the ids that a model reads for them.

Names of special tokens in a text, or in the messages of a conversation, are ordinary text unless
`special=True` is given; only the text of the chat template itself always has special tokens.
"""

from __future__ import annotations

import json
import re
import warnings
from collections.abc import Mapping, Sequence
from typing import Any, Protocol, TypeAlias, cast

import torch
from jaxtyping import Int
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.models.chat_template import ChatTemplate, Messages, checked_messages
from regard.models.decoder import Decoder, check_ids
from regard.models.tokenizer import Tokenizer
from regard.untrusted_text import short_repr

Prompt: TypeAlias = str | Sequence[int] | Tensor | Messages
"""A text; its ids, as a list or tuple of ints, or an integer tensor [T] or [1, T]; or the messages
of a conversation, dicts with "role" and "content".
"""


class LanguageModel(Protocol):
    """The parts of a model that generation uses; `regard.models.Model` has them."""

    config: Any
    """The config of the model's family, with vocab_size."""
    decoder: Decoder
    """The network: ids [B, T] -> logits [B, T, V]."""
    eos_ids: frozenset[int]
    """The ids that end a text."""

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer; without one it takes ids and gives ids."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which converts text to ids and ids to text."""
        ...

    @property
    def chat_template(self) -> ChatTemplate:
        """The template that makes a text of messages; an error if the model has none."""
        ...

    def encode(self, text: str | Messages, *, special: bool | None = None) -> Int[Tensor, "1 T"]:
        """Convert a text to ids [1, T], with the special tokens that the tokenizer adds."""
        ...


def encode_prompt(
    model: LanguageModel,
    prompt: Prompt,
    before: Sequence[int] | None = None,
    *,
    special: bool | None = None,
) -> list[int]:
    """Convert a prompt to ids: a text gets special tokens unless it continues the ids before it,
    and messages contain them.
    """
    if is_messages(prompt):
        ids = model.encode(cast("Messages", prompt), special=special)[0].tolist()
        if list(before or ()) != ids[: len(before or ())]:
            raise ArgumentError(
                "these messages do not begin with the prefix: read the same messages with "
                "cache_prefix, or leave prefix out",
                argument="prefix",
            )
        ids = ids[len(before or ()) :]
    elif isinstance(prompt, str):
        if before is None:
            ids = model.encode(prompt, special=special)[0].tolist()
        else:
            ids = encode_text(model.tokenizer, prompt, special=special, after=before)
    else:
        ids = _ids_of(prompt)
        if not ids and before is None:
            raise ArgumentError("the prompt has no ids; give at least one")
    check_ids(torch.tensor([ids], dtype=torch.int64, device="cpu"), model.config.vocab_size)
    return ids


def encode_rows(model: LanguageModel, prompts: Any) -> list[list[int]]:
    """Convert one prompt, or several, to a list of ids for each."""
    rows = [prompts] if is_single_prompt(prompts) else prompts
    return [encode_prompt(model, row) for row in rows]


def encode_text(
    tokenizer: Tokenizer,
    text: str,
    *,
    special: bool | None,
    template: bool = False,
    after: Sequence[int] = (),
) -> list[int]:
    """Convert a text to ids; a special token's name in it is ordinary text unless `special`."""
    if special is None:
        warn_about_names(tokenizer, text)
    return tokenizer.encode(text, special=bool(special), template=template, after=after)


def encode_messages(
    tokenizer: Tokenizer, template: ChatTemplate, messages: Messages, *, special: bool | None
) -> list[int]:
    """Convert messages to ids through a chat template."""
    plain = checked_messages(messages)
    written = json.dumps(plain, ensure_ascii=False)
    if special is None:
        warn_about_names(tokenizer, written)
    names = [] if special else tokenizer.special_names(written)
    if not names:
        return tokenizer.encode(template.render(plain), special=True)
    # a mark around each name shows in the rendered text that it came with a message
    mark = next(chr(i) for i in range(0xE000, 0xF900) if chr(i) not in written)
    either = "|".join(re.escape(x) for x in sorted(names, key=len, reverse=True))
    text = template.render(_replace(plain, re.compile(either), mark))
    ids: list[int] = []
    for i, piece in enumerate(re.split(f"{mark}({either}){mark}|{mark}", text)):
        if piece:
            ids += tokenizer.encode(piece, special=i % 2 == 0, after=ids)
    return ids


def _replace(value: Any, names: re.Pattern[str], mark: str) -> Any:
    """Return messages with a mark before and after each name in their texts."""
    if isinstance(value, dict):
        return {key: _replace(x, names, mark) for key, x in value.items()}
    if isinstance(value, list):
        return [_replace(x, names, mark) for x in value]
    if isinstance(value, str):
        return names.sub(lambda name: f"{mark}{name[0]}{mark}", value)
    return value


def warn_about_names(tokenizer: Tokenizer, text: str) -> None:
    """Warn, once for each tokenizer, that a text contains the name of a special token."""
    if not tokenizer.has_warned and (names := tokenizer.special_names(text)):
        tokenizer.has_warned = True
        warnings.warn(
            f"the prompt contains {short_repr(names[0])}, the name of a special token, and it is "
            "read as ordinary text; special=True (--special) reads such names as the tokens, and "
            "special=False (--no-special) says that this is meant",
            stacklevel=9,
        )


def is_messages(prompt: object) -> bool:
    """Return whether a prompt is a conversation: a list or tuple of dicts."""
    return (
        isinstance(prompt, (list, tuple))
        and bool(prompt)
        and all(isinstance(message, Mapping) for message in prompt)
    )


def is_single_prompt(prompt: object) -> bool:
    """Return whether an argument is one prompt, and not a list or tuple of prompts."""
    if not isinstance(prompt, (list, tuple)):
        return True
    return bool(prompt) and all(isinstance(part, (int, Mapping)) for part in prompt)


def _ids_of(prompt: object) -> list[int]:
    """Return the ids of a prompt that is no text."""
    advice = "a prompt is a text, a list of int ids, or an integer tensor [T] or [1, T] of ids"
    if isinstance(prompt, Tensor):
        if prompt.is_floating_point() or prompt.is_complex() or prompt.dtype == torch.bool:
            raise ArgumentTypeError(f"the prompt is a tensor of {prompt.dtype}; {advice}")
        if prompt.ndim not in (1, 2) or (prompt.ndim == 2 and len(prompt) != 1):
            raise ArgumentError(
                f"the prompt is a tensor {list(prompt.shape)}; {advice}; for a batch give a list "
                "of prompts, each without padding"
            )
        return [int(i) for i in prompt.flatten().tolist()]
    if not isinstance(prompt, (list, tuple)):
        raise ArgumentTypeError(f"the prompt is {type(prompt).__name__}; {advice}")
    for i, index in enumerate(prompt):
        if type(index) is not int:
            raise ArgumentTypeError(f"prompt[{i}] is {type(index).__name__}; {advice}")
    return list(prompt)
