"""The sentences of the screen of `regard explain`: the same in every language, and complete."""

from __future__ import annotations

import re

import pytest
from rich.text import Text

from regard import masks
from regard.errors import ArgumentError
from regard.inspect import explain, random_model
from regard.inspect.explain import head_choice
from regard.inspect.explain.recorded_row import NO_PROJECTION
from regard.language import LANGUAGES, PLACEHOLDER, catalogue
from regard.view.explanation_summary import summary
from regard.view.terminal import PACKAGE, Sentences, wrap_cells

CHINESE = re.compile("[\u4e00-\u9fff]")
SENTENCES = {lang: catalogue(PACKAGE, lang) for lang in LANGUAGES}
ZH = Sentences("zh")


def test_every_language_has_the_same_keys_and_placeholders() -> None:
    en = {key: {*PLACEHOLDER.findall(x)} for key, x in SENTENCES["en"].items()}
    for sentences in SENTENCES.values():
        assert {key: {*PLACEHOLDER.findall(x)} for key, x in sentences.items()} == en
    same = [key for key, x in SENTENCES["zh"].items() if x == SENTENCES["en"][key]]
    assert {*same} == {"step.softmax"}, "nothing is left in English"
    with pytest.raises(ArgumentError, match="lang is 'fr'"):
        Sentences("fr")


def test_the_rules_and_remarks_of_the_package_are_known() -> None:
    rules = [rule for name, rule in vars(head_choice).items() if name.endswith("HEAD_RULE")]
    rules.append(head_choice.HEAD_FOR_KEY_RULE)
    assert len(rules) == 5
    assert all(CHINESE.search(ZH.translated("rule", rule)) for rule in rules)
    assert CHINESE.search(ZH.translated("note", NO_PROJECTION))
    (note,) = explain(random_model("gqa", "to be or not")).where.notes
    assert ZH.translated("note", note).startswith("权重是随机的（种子 0）")
    assert ZH.translated("note", "a remark of yours") == "a remark of yours"


MASKS = [
    masks.Causal(),
    masks.Window(4),
    masks.Chunk(4),
    masks.Prefix(3),
    masks.Strided(4),
    ~masks.Window(4),
]


@pytest.mark.parametrize("mask", MASKS, ids=str)
def test_the_reasons_of_masks_are_known(mask: masks.Mask) -> None:
    words = mask.refusal().words
    assert CHINESE.search(ZH.translated("why", words))
    assert Sentences("en").translated("why", words) == words


def test_two_reasons_are_joined() -> None:
    assert ZH.translated("why", "future and outside window 4") == "位于未来且在 window 4 之外"


@pytest.mark.parametrize(
    "name", ["t5", "retention", "bahdanau", "learned_sink", "softcap", "nsa", "sliding_window"]
)
def test_every_kind_of_mechanism_fits_one_screen(name: str) -> None:
    target = "to be or" if name == "bahdanau" else None
    found = explain(random_model(name, "to be or not to be", target=target)).as_dict()
    for lang in LANGUAGES:
        lines = summary(found, lang)
        assert max(line.cell_len for line in lines) <= 80
        assert len(lines) <= 30
        left = re.findall("[A-Za-z]{4,} [a-z]{3,} [a-z]{2,}", "\n".join(map(str, lines)))
        assert lang == "en" or not left, "no English sentence is left"


def test_values_may_have_a_style() -> None:
    line = ZH.styled("head.place_layer", n=Text("3", "bold"))
    assert str(line) == "第 3 层"
    assert [(span.start, span.end) for span in line.spans] == [(2, 3)]


def test_lines_are_broken_by_cells() -> None:
    assert wrap_cells("一个键，一个值", 6) == ["一个", "键，一", "个值"], (
        "no line begins with a mark"
    )
    assert wrap_cells("abcdefgh ij", 4) == ["abcd", "efgh", "ij"]
    assert wrap_cells("see [2,\N{NO-BREAK SPACE}6]", 6) == ["see", "[2,\N{NO-BREAK SPACE}6]"]
    assert wrap_cells("", 4) == []
