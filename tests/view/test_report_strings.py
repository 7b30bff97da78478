"""The page's languages: the same keys and placeholders in every catalogue, and no sentence anywhere
else.
"""

from __future__ import annotations

import re
from importlib import resources

import pytest

from regard.errors import ArgumentError
from regard.language import LANGUAGES, PLACEHOLDER, check_language, language_of_locale
from regard.view.page import catalogue

SCRIPTS = {
    file.name: file.read_text("utf-8")
    for file in resources.files("regard.view.page").iterdir()
    if file.name.endswith(".js")
}
KEY = r"[a-z]+\.[a-z_0-9]+"
OTHERS = [lang for lang in LANGUAGES if lang != "en"]


def placeholders(sentence: str) -> list[str]:
    return sorted(set(PLACEHOLDER.findall(sentence)))


@pytest.mark.parametrize("lang", OTHERS)
def test_catalogues_have_the_same_keys_and_placeholders(lang: str) -> None:
    en, other = catalogue("en"), catalogue(lang)
    assert sorted(en) == sorted(other)
    assert {key: placeholders(x) for key, x in en.items()} == {
        key: placeholders(x) for key, x in other.items()
    }


def test_chinese_is_written_in_chinese() -> None:
    """A sentence of several English words that is the same in both was forgotten; half-width marks
    stand beside no Chinese.
    """
    en, zh = catalogue("en"), catalogue("zh")
    same = [key for key, x in zh.items() if x == en[key] and len(re.findall("[A-Za-z]{3,}", x)) > 1]
    assert same == []
    assert [
        x for x in zh.values() if re.search(r"[\u4e00-\u9fff][,:;?!]|[,:;?!][\u4e00-\u9fff]", x)
    ] == []


@pytest.mark.parametrize("name", sorted(SCRIPTS))
def test_every_key_that_a_script_names_has_a_sentence(name: str) -> None:
    named = re.findall(rf'"({KEY})"', SCRIPTS[name])
    groups = {key.partition(".")[0] for key in catalogue("en")}
    missing = [x for x in named if x.partition(".")[0] in groups and x not in catalogue("en")]
    assert [x for x in missing if not x.endswith(".js")] == []


def test_no_sentence_is_forgotten_in_the_catalogue() -> None:
    """Every key is named by a script, whole or by its beginning (`cell.step_${n}`)."""
    text = "\n".join(SCRIPTS.values())
    beginnings = tuple(re.findall(r"`([a-z]+\.[a-z_]*)\$\{", text))
    unused = [x for x in catalogue("en") if f'"{x}"' not in text and not x.startswith(beginnings)]
    groups = {"about", "cost", "metric", "stat", "step", "why"}  # named by data
    unused = [x for x in unused if not x.endswith("_title")]  # named by the key before it
    assert [x for x in unused if x.partition(".")[0] not in groups] == []


def test_the_language_of_a_locale() -> None:
    assert language_of_locale({}) == "en"
    assert language_of_locale({"LANG": "zh_CN.UTF-8"}) == "zh"
    assert language_of_locale({"LANG": "zh-Hans"}) == "zh"
    assert language_of_locale({"LANG": "de_DE.UTF-8"}) == "en"
    assert language_of_locale({"LC_ALL": "en_GB.UTF-8", "LANG": "zh_CN"}) == "en"
    assert language_of_locale({"LC_ALL": "", "LC_MESSAGES": "zh_TW", "LANG": "en_GB"}) == "zh"


def test_the_locale_of_this_process(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("LC_ALL", "LC_MESSAGES"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    assert language_of_locale() == "zh"


def test_a_language_that_there_is_not() -> None:
    with pytest.raises(ArgumentError) as caught:
        check_language("fr")
    assert str(caught.value) == "lang is 'fr'; it must be one of en (English), zh (简体中文)"
    with pytest.raises(ArgumentError, match="lang is 'xx'"):
        catalogue("xx")


def test_the_checks_would_find_an_offender() -> None:
    assert placeholders("{a} of {b}") == ["a", "b"] != placeholders("{a}")
    assert re.findall(rf'"({KEY})"', 't("cell.nowhere")') == ["cell.nowhere"]
