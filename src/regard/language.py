"""The reader's language, and catalogues of texts: JSON files {key: text} in a folder `strings` for
each language, where commands have English sentences as keys; the package's errors are English.
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
from typing import Self

from regard.errors import ArgumentError
from regard.units import plural

LANGUAGES = {"en": "English", "zh": "简体中文"}
"""Language code, to the name of the language in itself."""
PLACEHOLDER = re.compile(r"\{(\w+)(?:[!:][^{}]*)?\}")
"""A placeholder of a text; its format, after a colon, belongs to the placeholder."""

_language: ContextVar[str] = ContextVar("language", default="en")
_added: list[Path] = []
"""The folders of `add_texts`."""


class Phrase(str):
    """An English text of a catalogue, with its values, so that it can be translated."""

    __slots__ = ("template", "values")
    template: str
    values: Mapping[str, object]

    def __new__(cls, template: str, /, **values: object) -> Self:
        """Return the text with its placeholders filled; it keeps template and values."""
        phrase = super().__new__(cls, template.format(**values) if values else template)
        phrase.template, phrase.values = template, values
        return phrase


def counted(n: int, noun: str, nouns: str | None = None) -> Phrase:
    """Return a count with its noun as a phrase: in English what `units.plural` returns."""
    phrase = Phrase(plural(n, noun, nouns))
    phrase.template, phrase.values = f"{{n}} {noun}", {"n": f"{n:,}"}
    return phrase


def check_language(lang: str) -> str:
    """Return the language if there are catalogues for it."""
    if lang not in LANGUAGES:
        known = ", ".join(f"{code} ({name})" for code, name in LANGUAGES.items())
        raise ArgumentError(f"lang is {lang!r}; it must be one of {known}")
    return lang


def language_of_locale(environment: Mapping[str, str] | None = None) -> str:
    """Return the language of the first of LC_ALL, LC_MESSAGES and LANG; English by default."""
    variables = os.environ if environment is None else environment
    locale = next(filter(None, map(variables.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    code = re.split(r"[_.@-]", locale)[0].lower()
    return code if code in LANGUAGES else "en"


def language() -> str:
    """Return the language of printed texts: English, except within `use_language`."""
    return _language.get()


@contextmanager
def use_language(lang: str) -> Iterator[None]:
    """Print texts in a language within the block."""
    token = _language.set(check_language(lang))
    try:
        yield
    finally:
        _language.reset(token)


@cache
def catalogue(package: str, lang: str) -> Mapping[str, str]:
    """Return the texts of a package in a language, by key."""
    return _read(resources.files(package) / "strings", lang)


def add_texts(folder: Path) -> None:
    """Let `translate` also find the texts of a program that stands outside of the package."""
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
    """Return a text in the current language, with its placeholders filled."""
    template, fields = (text.template, text.values) if isinstance(text, Phrase) else (text, values)
    translated = _texts().get(template)
    if translated is None and isinstance(text, Phrase):
        return str(text)
    filled = {k: translate(v) if isinstance(v, Phrase) else v for k, v in fields.items()}
    return (translated or template).format(**filled) if filled else translated or template


def translate_count(n: int, noun: str, nouns: str | None = None) -> str:
    """Return a count with its noun in the current language, as `units.plural` does in English."""
    return translate(counted(n, noun, nouns))


def _texts() -> Mapping[str, str]:
    """Return the texts of the current language; English ones are their own keys."""
    return {} if language() == "en" else _all_texts(language(), *_added)


@cache
def _all_texts(lang: str, *added: Path) -> Mapping[str, str]:
    """Return the texts of the commands and of the added folders."""
    texts = dict(catalogue("regard", lang))
    for folder in added:
        texts |= _read(folder, lang)
    return texts
