"""The languages of the page: one catalogue of sentences each, and the choice of a language.

A catalogue is `strings/<language>.json`: {key: sentence}. A sentence may have placeholders,
`{name}`, which the page fills in. Every language has the same keys with the same placeholders. All
visible text of the page is in these catalogues.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from importlib import resources

from regard.errors import ArgumentError

LANGUAGES = {"en": "English", "zh": "简体中文"}
"""Language code, to the name of the language in itself."""

PLACEHOLDER = re.compile(r"\{(\w+)\}")


def catalogue(lang: str) -> dict[str, str]:
    """Return the sentences of a language, by key.

    Args:
        lang: one of `LANGUAGES`.

    Raises:
        ArgumentError: there is no such language.

    >>> catalogue("en")["cell.title"]
    'Explain one cell'
    """
    path = resources.files("regard.view.report") / "strings" / f"{check_language(lang)}.json"
    sentences: dict[str, str] = json.loads(path.read_text("utf-8"))
    return sentences


def check_language(lang: str) -> str:
    """Return the language if it has a catalogue, or raise ArgumentError.

    >>> check_language("fr")
    Traceback (most recent call last):
    regard.errors.ArgumentError: lang is 'fr'; the page is written in en (English), zh (简体中文)
    """
    if lang not in LANGUAGES:
        known = ", ".join(f"{code} ({name})" for code, name in LANGUAGES.items())
        raise ArgumentError(f"lang is {lang!r}; the page is written in {known}")
    return lang


def language_of_locale(environment: Mapping[str, str] | None = None) -> str:
    """Return the reader's language from the first of LC_ALL, LC_MESSAGES and LANG that is set.

    It is English if there is no catalogue for that language.

    Args:
        environment: environment variables; by default those of this process.

    >>> language_of_locale({"LC_ALL": "", "LANG": "zh_CN.UTF-8"})
    'zh'
    >>> language_of_locale({"LC_ALL": "C", "LANG": "zh_CN.UTF-8"})
    'en'
    """
    variables = os.environ if environment is None else environment
    locale = next(filter(None, map(variables.get, ("LC_ALL", "LC_MESSAGES", "LANG"))), "")
    code = re.split(r"[_.@-]", locale)[0].lower()
    return code if code in LANGUAGES else "en"
