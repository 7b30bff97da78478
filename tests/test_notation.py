"""The glossary: every word has one sentence, one place, and no second name in the same table."""

from __future__ import annotations

import re
import subprocess
import sys

from regard.notation import GLOSSARY, LETTERS, WORDS, table


def test_words_are_in_order_and_each_has_one_sentence() -> None:
    assert list(WORDS) == sorted(WORDS, key=str.lower)
    sentence = re.compile(r"\w.*[^.]\.")
    unclear = {name for name, x in GLOSSARY.items() if not sentence.fullmatch(x.meaning)}
    assert unclear == set()


def test_a_word_is_no_synonym_of_another() -> None:
    """What two entries name, a reader would look for in both."""
    doubled = {
        (name, other)
        for name, entry in WORDS.items()
        for other in entry.synonyms
        if other in WORDS and other != name
    }
    assert doubled == set()
    assert len(GLOSSARY) == len(LETTERS) + len(WORDS), "a letter is no word"


def test_the_command_prints_every_entry() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "regard.notation"], capture_output=True, text=True, check=True
    )
    assert done.stdout == table() + "\n"
    assert [line.split()[0] for line in done.stdout.splitlines()] == [
        name.split()[0] for name in GLOSSARY
    ]
