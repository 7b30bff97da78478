"""The catalogue of what the commands print: every text has its Chinese, with the same placeholders,
and no sentence stands in it that nothing prints.
"""

from __future__ import annotations

import copy
import json
import pickle
import re
from collections import Counter
from pathlib import Path

import pytest

import benchmarks
import experiments
import regard
from docs import figures
from regard.language import (
    LANGUAGES,
    PLACEHOLDER,
    Phrase,
    catalogue,
    counted,
    translate,
    translate_count,
    use_language,
)
from tests.surface import printed_texts

STRINGS = tuple(
    Path(module.__file__).parent for module in (regard, figures, benchmarks, experiments)
)
"""The folders with texts: of the package, and of the programs outside of it."""
KINDS = {
    "help": printed_texts.help_texts,
    "commands": printed_texts.command_strings,
    "results": printed_texts.result_texts,
    "tables": printed_texts.data_texts,
    "calls": lambda: (text for text, _ in printed_texts.translated_calls()),
    "outside": printed_texts.outside_texts,
}


def chinese_of(kind: str) -> dict[str, str]:
    """The Chinese of the package; for the programs outside of it also what stands beside them."""
    folders = STRINGS if kind == "outside" else STRINGS[:1]
    files = (file for folder in folders for file in sorted(folder.glob("strings/zh/*.json")))
    return {key: x for file in files for key, x in json.loads(file.read_text("utf-8")).items()}


ALL = chinese_of("outside")


@pytest.fixture(scope="module")
def texts_by_kind() -> dict[str, list[str]]:
    """The English texts of each kind."""
    return {kind: list(dict.fromkeys(texts())) for kind, texts in KINDS.items()}


@pytest.mark.full
@pytest.mark.parametrize("kind", KINDS)
def test_every_text_that_a_command_prints_has_its_chinese(
    kind: str, texts_by_kind: dict[str, list[str]]
) -> None:
    texts = texts_by_kind[kind]
    assert len(texts) > 50
    chinese = chinese_of(kind)
    assert [text for text in texts if text not in chinese] == []


@pytest.mark.full
def test_no_text_of_the_catalogue_is_unused(texts_by_kind: dict[str, list[str]]) -> None:
    outside = set(texts_by_kind["outside"])
    used = {x for kind, texts in texts_by_kind.items() if kind != "outside" for x in texts}
    chinese = catalogue("regard", "zh")
    assert [text for text in chinese if text not in used] == []
    assert [text for text in ALL if text not in chinese and text not in outside] == []


def test_placeholders_are_the_same_in_both_languages() -> None:
    wrong = {
        text: chinese
        for text, chinese in ALL.items()
        if sorted(set(PLACEHOLDER.findall(text))) != sorted(set(PLACEHOLDER.findall(chinese)))
    }
    assert wrong == {}


@pytest.mark.full
def test_every_call_gives_each_placeholder_its_value() -> None:
    wrong = {
        text: names
        for places in ((), printed_texts.OUTSIDE)
        for text, names in printed_texts.translated_calls(*places)
        if sorted(set(PLACEHOLDER.findall(text))) != sorted(names)
    }
    assert wrong == {}


def test_each_text_stands_in_one_file_only() -> None:
    files = [file for folder in STRINGS for file in sorted(folder.glob("strings/zh/*.json"))]
    assert len(files) > 3
    counts = Counter(key for file in files for key in json.loads(file.read_text("utf-8")))
    assert [key for key, n in counts.items() if n > 1] == []


def test_chinese_is_written_in_chinese() -> None:
    """A sentence of several English words was forgotten; half-width marks stand beside no Chinese,
    and flags, names and examples are the same in both.
    """
    zh = ALL
    is_sentence = re.compile(r"[a-z]{3,} [a-z]{2,} [a-z]{2,}")
    forgotten = [x for key, x in zh.items() if x == key and is_sentence.search(x)]
    assert forgotten == []
    half_width = re.compile(r"[\u4e00-\u9fff][,:;?!]|[,;?!][\u4e00-\u9fff]")
    sizes = re.compile(r"[\[(][^\])]*[\])]")  # the shape of a tensor, such as [批, 头]
    examples = {x for key, x in zh.items() if re.search("[\u4e00-\u9fff]", key)}
    found = [x for x in zh.values() if half_width.search(sizes.sub("", x)) and x not in examples]
    assert found == []
    flags = {key: set(re.findall(r"--[a-z]\w*(?:-\w+)*", key)) for key in zh}
    assert {
        key: zh[key] for key, names in flags.items() if not all(x in zh[key] for x in names)
    } == {}


def test_a_phrase_is_translated_with_what_is_in_it() -> None:
    """Also after a copy; a value that is no phrase stays as it is, although it is a word."""
    inner = Phrase("{heads}: best accuracy", heads=counted(2, "head"))
    phrase = Phrase("part of {name}", name=inner)
    for one in (phrase, copy.deepcopy(phrase), pickle.loads(pickle.dumps(phrase))):
        assert one == translate(one) == "part of 2 heads: best accuracy"
        with use_language("zh"):
            assert translate(one) == "对 2 个头：最好的准确率的贡献"
    with use_language("zh"):
        assert translate(Phrase("logit of {names}", names="query")) == "query 的 logit"
        assert translate("logit of {names}", names="query") == "query 的 logit"


def test_counts_in_both_languages() -> None:
    assert (translate_count(1, "query"), translate_count(2, "query")) == ("1 query", "2 queries")
    with use_language("zh"):
        assert translate_count(2, "query") == "2 个查询"
    assert translate("parameters") == "parameters"


def test_an_unknown_text_stays_english() -> None:
    """This is the negative control of the tests above: the catalogue is asked, and lacks it."""
    with use_language("zh"):
        assert translate("no such text {n}", n=3) == "no such text 3"
    assert "no such text {n}" not in catalogue("regard", "zh")
    assert set(LANGUAGES) == {"en", "zh"}
