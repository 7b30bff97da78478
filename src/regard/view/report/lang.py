"""The languages of the page: one catalogue of sentences each, and which of them a reader gets.

A catalogue is `strings/<language>.json`: {key: sentence}. A sentence may hold placeholders,
`{name}`, that the page fills in; every language has the same keys with the same placeholders.
Nothing that a reader reads stands anywhere else.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib import resources

from regard.errors import ArgumentError

LANGUAGES = {"en": "English", "zh": "简体中文"}
"""Code -> what its readers call it."""

PLACEHOLDER = re.compile(r"\{(\w+)\}")


def catalogue(lang: str) -> dict[str, str]:
    """The sentences of a language, by key.

    Args:
        lang: one of `LANGUAGES`.

    Raises:
        ArgumentError: there is no such language.

    >>> catalogue("en")["cell.title"]
    'Explain one cell'
    """
    found = resources.files("regard.view.report") / "strings" / f"{check_language(lang)}.json"
    sentences: dict[str, str] = json.loads(found.read_text("utf-8"))
    return sentences


def check_language(lang: str) -> str:
    """The language, if there is a catalogue for it; else ArgumentError.

    >>> check_language("fr")
    Traceback (most recent call last):
    regard.errors.ArgumentError: lang is 'fr'; the page is written in en (English), zh (简体中文)
    """
    if lang not in LANGUAGES:
        known = ", ".join(f"{code} ({name})" for code, name in LANGUAGES.items())
        raise ArgumentError(f"lang is {lang!r}; the page is written in {known}")
    return lang


def language_of_locale(environment: Mapping[str, str] | None = None) -> str:
    """The language of a reader: that of the first of LC_ALL, LC_MESSAGES and LANG that is set;
    English where it is not ours.

    Args:
        environment: the variables; by default those of this process.

    >>> language_of_locale({"LC_ALL": "", "LANG": "zh_CN.UTF-8"})
    'zh'
    >>> language_of_locale({"LC_ALL": "C", "LANG": "zh_CN.UTF-8"})
    'en'
    """
    variables = os.environ if environment is None else environment
    said = next(filter(None, map(variables.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    code = re.split(r"[_.@-]", said)[0].lower()
    return code if code in LANGUAGES else "en"
