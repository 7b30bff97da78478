"""The language of what a person reads: which one it is, and the catalogues of texts.

There is one form of catalogue: a folder `strings` with a JSON file, or a folder of JSON files, for
each language, {key: text}. A text may have placeholders, `{name}`. A page has a catalogue for each
language, and its keys are short names, because its scripts name them. The commands have English
sentences in their code, and these are the keys of `regard/strings/zh/*.json`, so that the code
stays readable: `translate("parameters")`.

The functions of the package raise errors in English, because programs and their authors read them.
A command prints an error through `translate_message`, which finds the sentence of the catalogue by
its fixed words, and translates it. `tests/surface/test_language.py` finds every text that has no
Chinese.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from functools import cache
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path
from typing import NamedTuple

from regard.errors import ArgumentError
from regard.units import plural

LANGUAGES = {"en": "English", "zh": "简体中文"}
"""Language code, to the name of the language in itself."""
PLACEHOLDER = re.compile(r"\{(\w+)(?:[!:][^{}]*)?\}")
"""A placeholder of a text; its format, after a colon, belongs to the placeholder."""
MIN_FIXED = 7
"""The least number of fixed letters by which a finished message is recognised."""
HINT = "hint"
"""The placeholder of a suggestion such as "; did you mean 'window'?", or of a full stop."""

_language: ContextVar[str] = ContextVar("language", default="en")
_added: list[Path] = []
"""The folders of `add_texts`."""
_SUGGESTION = re.compile(r"(?:; did|\. Did) you mean ((?:(?!\?).)+)\?", re.DOTALL)
_MARK = "\x01"
"""Stands for the suggestion while a message is translated."""


def check_language(lang: str) -> str:
    """Return the language if there are catalogues for it.

    Args:
        lang: one of `LANGUAGES`.

    Returns:
        The same text.

    Raises:
        ArgumentError: there is no such language.

    >>> check_language("fr")
    Traceback (most recent call last):
    regard.errors.ArgumentError: lang is 'fr'; it must be one of en (English), zh (简体中文)
    """
    if lang not in LANGUAGES:
        known = ", ".join(f"{code} ({name})" for code, name in LANGUAGES.items())
        raise ArgumentError(f"lang is {lang!r}; it must be one of {known}")
    return lang


def language_of_locale(environment: Mapping[str, str] | None = None) -> str:
    """Return the reader's language from the first of LC_ALL, LC_MESSAGES and LANG that is set.

    It is English if there is no catalogue for that language.

    Args:
        environment: environment variables; by default those of this process.

    Returns:
        One of `LANGUAGES`.

    >>> language_of_locale({"LC_ALL": "", "LANG": "zh_CN.UTF-8"})
    'zh'
    >>> language_of_locale({"LC_ALL": "C", "LANG": "zh_CN.UTF-8"})
    'en'
    """
    variables = os.environ if environment is None else environment
    locale = next(filter(None, map(variables.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    code = re.split(r"[_.@-]", locale)[0].lower()
    return code if code in LANGUAGES else "en"


def language() -> str:
    """Return the language of printed texts: English, except within `use_language`.

    >>> language()
    'en'
    """
    return _language.get()


@contextmanager
def use_language(lang: str) -> Iterator[None]:
    """Print texts in a language within the block.

    Args:
        lang: one of `LANGUAGES`.

    Yields:
        None.

    Raises:
        ArgumentError: there is no such language.

    >>> with use_language("zh"):
    ...     translate("parameters")
    '参数'
    """
    token = _language.set(check_language(lang))
    try:
        yield
    finally:
        _language.reset(token)


@cache
def catalogue(package: str, lang: str) -> Mapping[str, str]:
    """Return the texts of a package in a language, by key.

    Args:
        package: a package with a folder `strings`: `<lang>.json`, or a folder `<lang>` of such
            files.
        lang: one of `LANGUAGES`.

    Raises:
        ArgumentError: there is no such language.

    >>> catalogue("regard.view.report", "en")["cell.title"]
    'Explain one cell'
    """
    return _read(resources.files(package) / "strings", lang)


def add_texts(folder: Path) -> None:
    """Let `translate` also find the texts of a program that stands outside of the package.

    Args:
        folder: a folder such as `strings` of a package, see `catalogue`.
    """
    if folder not in _added:
        _added.append(folder)


def _read(folder: Traversable, lang: str) -> dict[str, str]:
    """Return the texts of a folder `strings` in a language."""
    files = [folder / f"{check_language(lang)}.json"]
    if not files[0].is_file():
        files = sorted((folder / lang).iterdir(), key=lambda file: file.name)
    texts: dict[str, str] = {}
    for file in files:
        texts |= json.loads(file.read_text("utf-8"))
    return texts


def translate(text: str, /, **values: object) -> str:
    """Return a text in the current language, with its placeholders filled.

    Args:
        text: the English text; it must be in the catalogue.
        values: the value of each placeholder, already in the current language.

    Returns:
        The English text if the catalogue lacks it, which is a failing test.

    >>> translate("weights and cache are {fit}", fit="8 GiB")
    'weights and cache are 8 GiB'
    >>> with use_language("zh"):
    ...     translate("weights and cache are {fit}", fit="8 GiB")
    '权重和缓存共 8 GiB'
    """
    if language() != "en":
        text = _texts().get(text, text)
    return text.format(**values) if values else text


def translate_count(n: int, noun: str, nouns: str | None = None) -> str:
    """Return a count with its noun in the current language, as `units.plural` does in English.

    Args:
        n: how many.
        noun: the English singular.
        nouns: the English plural, if it is not regular.

    >>> translate_count(2, "token")
    '2 tokens'
    >>> with use_language("zh"):
    ...     translate_count(2, "token")
    '2 个词元'
    """
    if language() != "en" and (counted := _texts().get(f"{{n}} {noun}")) is not None:
        return counted.format(n=f"{n:,}")
    return plural(n, noun, nouns)


def translate_message(message: str) -> str:
    """Return a finished English message, such as that of an error, in the current language.

    The texts of the catalogue are compared by their fixed words. What stands in the place of a
    placeholder is translated in the same way. A message that the catalogue lacks is returned
    unchanged.

    Args:
        message: an English message.

    >>> with use_language("zh"):
    ...     translate_message("'9q' is not a number of tokens; write for example 4096, 8k or 1M")
    "'9q' 不是词元数；请写成例如 4096、8k 或 1M"
    """
    if language() == "en":
        return message
    suggestion = _SUGGESTION.search(message)
    if suggestion is not None:
        message = message[: suggestion.start()] + _MARK + message[suggestion.end() :]
    translated = _translate_fixed(message)
    if translated == message:
        translated = "\n".join(map(_translate_fixed, message.split("\n")))
    if suggestion is not None:
        names = suggestion[1].replace(" or ", " 或 ")
        translated = translated.replace(_MARK, f"；您要写的是不是 {names}？").replace("？。", "？")
    return translated


class _Pattern(NamedTuple):
    """A text of the catalogue as a pattern of finished messages."""

    weight: int  # characters that are fixed: the pattern with the most is the right one
    fixed: tuple[str, ...]  # what a message must contain, which is quicker to see
    pattern: str
    names: tuple[str, ...]
    text: str


def _texts() -> Mapping[str, str]:
    """Return the texts of the commands and of the added folders in the current language."""
    return _all_texts(language(), *_added)


@cache
def _all_texts(lang: str, *added: Path) -> Mapping[str, str]:
    texts = dict(catalogue("regard", lang))
    for folder in added:
        texts |= _read(folder, lang)
    return texts


def _translate_fixed(message: str) -> str:
    texts = _texts()
    if message in texts or not re.search("[a-z]{2}", message):
        return texts.get(message, message)
    for _, fixed, pattern, names, text in _patterns(language(), *_added):
        if not all(part in message for part in fixed):
            continue
        match = re.fullmatch(pattern, message, re.DOTALL)
        if match is not None:
            values = {
                name: _translate_fixed(value) if value != message else value
                for name, value in zip(names, match.groups(), strict=True)
            }
            if values.get(HINT) == ".":
                values[HINT] = "。"
            return _fill(text, values)
    return message


def _fill(text: str, values: Mapping[str, str]) -> str:
    return PLACEHOLDER.sub(lambda match: values.get(match[1], match[0]), text)


@cache
def _patterns(lang: str, *added: Path) -> list[_Pattern]:
    """Return the texts with placeholders, those with the most fixed characters first."""
    patterns: list[_Pattern] = []
    for key, text in _all_texts(lang, *added).items():
        parts = PLACEHOLDER.split(key)
        if len(parts) == 1:
            continue
        names, fixed = parts[1::2], parts[::2]
        if len(set(names)) < len(names):
            continue
        counted = re.fullmatch(r"\{n\} ([\w/ -]+)", key)
        if counted is not None:  # a count, in the singular or the plural
            noun = counted[1]
            plural_end = "(?:y|ies)" if noun.endswith("y") else "(?:s|es)?"
            source = rf"([\d,]+) {re.escape(noun.removesuffix('y'))}{plural_end}"
        else:
            source = re.escape(fixed[0]) + "".join(
                (rf"(\.|{_MARK}|)" if name == HINT else "(.*?)") + re.escape(text)
                for name, text in zip(names, fixed[1:], strict=True)
            )
        weight = sum(len(re.sub(r"\W", "", part)) for part in fixed)
        if weight < MIN_FIXED and counted is None:
            continue
        needed = () if counted is not None else tuple(fixed)
        patterns.append(_Pattern(weight, needed, source, tuple(names), text))
    return sorted(patterns, key=lambda one: -one.weight)
