"""The sentences of the one screen of `regard explain`, from the catalogues of this package.

Every language has the same keys with the same placeholders. A sentence with a count has its
singular and its plural, with a bar between them; a language without a plural has one form.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rich.text import Text

from regard.language import PLACEHOLDER, catalogue, check_language

PACKAGE = "regard.view"
"""The package whose catalogues (strings/<lang>.json) have the sentences."""


class Sentences:
    """The sentences in one language.

    Args:
        lang: "en" or "zh".

    Raises:
        ArgumentError: there is no such language.

    >>> Sentences("en").count("head", 1), Sentences("zh").count("head", 2)
    ('1 head', '2 个头')
    """

    def __init__(self, lang: str) -> None:
        self.lang = check_language(lang)
        self._sentences: Mapping[str, str] = catalogue(PACKAGE, lang)

    def __call__(self, key: str, /, **values: str) -> str:
        """Return a sentence with its placeholders filled in."""
        return PLACEHOLDER.sub(lambda match: values[match[1]], self._sentences[key])

    def styled(self, key: str, /, **values: str | Text) -> Text:
        """Return a sentence as styled text; values may bring their own style."""
        text = Text()
        # a split by a pattern with one group has its placeholders at the odd places
        for n, part in enumerate(PLACEHOLDER.split(self._sentences[key])):
            text.append(values[part] if n % 2 else part)
        return text

    def named(self, group: str, name: str) -> str:
        """Return the sentence of a name within a group; the name itself if it has none."""
        return self._sentences.get(f"{group}.{name}", name)

    def count(self, noun: str, n: int) -> str:
        """Return a count with its noun."""
        one, _, many = self._sentences[f"count.{noun}"].partition("|")
        return (many if many and n != 1 else one).replace("{n}", f"{n:,}")

    def translated(self, group: str, english: str) -> str:
        """Return a text that other parts of the package made in English.

        >>> Sentences("zh").translated("why", "outside window 4")
        '在 window 4 之外'
        """
        for key, sentence in catalogue(PACKAGE, "en").items():
            if key.startswith(f"{group}.") and (values := _values(sentence, english)) is not None:
                if key == "why.and":
                    values = {name: self.translated(group, x) for name, x in values.items()}
                return self(key, **values)
        return english


def _values(sentence: str, text: str) -> dict[str, str] | None:
    """Return the values of the placeholders with which a sentence is the text; None if none are.

    >>> _values("a {x} c", "a b c"), _values("a {x}", "b")
    ({'x': 'b'}, None)
    """
    parts = PLACEHOLDER.split(sentence)
    pattern = "".join(f"(?P<{x}>.+)" if n % 2 else re.escape(x) for n, x in enumerate(parts))
    match = re.fullmatch(pattern, text)
    return None if match is None else match.groupdict()
