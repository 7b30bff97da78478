"""Every task: its splits share nothing, its answers are right by another reckoning, its words are
known.
"""

from __future__ import annotations

from dataclasses import replace
from datetime import date, datetime, timedelta

import pytest

from regard.errors import ArgumentError
from regard.train.tasks import SPLITS, TASKS, Example, Task, Vocabulary, find_task
from regard.train.tasks.recall_tasks import causal_example
from regard.train.tasks.translation_tasks import DATE_FORMATS
from tests.train.tasks.test_numbers import read_chinese, read_english

NAMES = sorted(TASKS)


def sources(task: Task, split: str, count: int = 120, seed: int = 0) -> set[tuple[str, ...]]:
    return {example.source for example in task.examples(split, count, seed)}


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("name", NAMES)
def test_splits_share_no_source(name: str) -> None:
    task = TASKS[name]
    found = {split: sources(task, split) | sources(task, split, seed=1) for split in SPLITS}
    assert not found["train"] & found["validation"]
    assert not found["train"] & found["longer"]
    longest = max(map(len, found["train"]))
    assert longest <= task.lengths[1] < min(map(len, found["longer"]))
    assert max(map(len, found["validation"])) <= task.lengths[1]


def test_the_check_of_splits_would_find_a_leak() -> None:
    task = TASKS["copy"]
    assert sources(task, "train", 300) & sources(
        task, "train", 300, seed=1
    )  # short ones come again


@pytest.mark.parametrize("name", NAMES)
def test_an_example_depends_on_its_seed_alone(name: str) -> None:
    task = TASKS[name]
    assert task.examples("train", 20, 3) == task.examples("train", 20, 3)
    assert task.examples("train", 20, 3) != task.examples("train", 20, 4)
    assert task.examples("train", 5, 3) == task.examples("train", 20, 3)[:5]


@pytest.mark.parametrize("name", NAMES)
def test_every_length_comes_and_every_word_is_known(name: str) -> None:
    task = TASKS[name]
    shortest, trained, longest = task.lengths
    for split, low, high in (("train", shortest, trained), ("longer", trained + 1, longest)):
        examples = task.examples(split, 160)
        lengths = [e.length for e in examples]
        for part in range(4):  # of the range of lengths, each quarter has its share
            start, stop = (low + (high + 1 - low) * k // 4 for k in (part, part + 1))
            assert sum(start <= n < stop for n in lengths) > 8, (split, start, stop)
        for example in examples:
            task.vocabulary.encode(example.source)
            task.vocabulary.encode(word for word in example.target if word)
            assert task.kind == "seq2seq" or len(example.target) == example.length


def listed(words: tuple[str, ...], read) -> list[int]:
    numbers: list[list[str]] = [[]]
    for word in words:
        if word == ",":
            numbers.append([])
        else:
            numbers[-1].append(word)
    return [read(number) for number in numbers]


def test_translations_are_of_the_same_numbers() -> None:
    for split in SPLITS:
        for e in TASKS["translate"].examples(split, 60):
            assert listed(e.source, read_english) == listed(e.target, read_chinese)
        for e in TASKS["translate-back"].examples(split, 60):
            assert listed(e.source, read_chinese) == listed(e.target, read_english)


def read_date(text: str) -> date:
    """A date by the standard library's reader, after what it does not know has been taken away."""
    words = text.replace("the ", "").replace("of ", "")
    for ending in ("st", "nd", "rd", "th"):
        for digit in "0123456789":
            words = words.replace(f"{digit}{ending}", digit)
    for form in (
        "%d %B %Y",
        "%B %d, %Y",
        "%d %B, %Y",
        "%b %d %Y",
        "%d-%b-%Y",
        "%a, %d %b %Y",
        "%A, %B %d, %Y",
        "%A, %d %B %Y",
        "%m/%d/%Y",
        "%d.%m.%Y",
        "%Y/%m/%d",
        "%Y%m%d",
        "%Y %B %d",
    ):
        try:
            return datetime.strptime(words, form).date()
        except ValueError:
            continue
    raise AssertionError(f"{text!r} is not a date")


def test_dates_are_the_days_that_they_say() -> None:
    for split in SPLITS:
        for e in TASKS["dates"].examples(split, 60):
            text = "".join(e.source)
            day = read_date(text)
            assert "".join(e.target) == day.isoformat()
            weekdays = [
                w for w in ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"] if text.startswith(w)
            ]
            assert weekdays in ([], [f"{day:%a}"]), text


def test_no_two_dates_are_written_alike() -> None:
    days = [date(2024, 1, 1) + timedelta(days=n) for n in range(366)] + [
        date(1999, 1, 11),
        date(1999, 11, 1),
    ]
    written = {(form(day)): day for form in DATE_FORMATS for day in days}
    for form in DATE_FORMATS:
        for day in days:
            assert written[form(day)] == day, form(day)


def test_copies_are_copies() -> None:
    for split in SPLITS:
        assert all(e.source == e.target for e in TASKS["copy"].examples(split, 100))


def asked(e: Example) -> list[tuple[int, str]]:
    return [(i, word) for i, word in enumerate(e.target) if word]


def test_induction_asks_for_what_followed_before() -> None:
    for split in SPLITS:
        for e in TASKS["induction"].examples(split, 100):
            assert asked(e)
            for i, word in asked(e):
                before = e.source.index(e.source[i])
                assert before < i
                assert e.source[before + 1] == word
                if i + 1 < e.length:
                    assert e.source[i + 1] == word


def test_recall_asks_for_the_value_of_the_key() -> None:
    for split in SPLITS:
        for e in TASKS["mqar"].examples(split, 100):
            pairs: dict[str, str] = {}
            for key, value in zip(e.source[::2], e.source[1::2], strict=False):
                if not (key.startswith("k") and value.startswith("v")) or key in pairs:
                    break
                pairs[key] = value
            said = [(e.source[i], word) for i, word in asked(e)]
            assert all(pairs[key] == word for key, word in said)
            assert len(said) >= len(pairs)
            first, n = [key for key, _ in said], len(pairs)
            assert all(
                len(set(part)) == len(part)
                for part in (first[i : i + n] for i in range(0, len(first), n))
            )
            assert e.target[-1], "a row ends with an answer"


def test_the_passkey_is_the_one_that_was_told() -> None:
    depths = []
    for split in SPLITS:
        for e in TASKS["passkey"].examples(split, 100):
            text = " ".join(e.source)
            told = text.index("the pass key is ") + len("the pass key is ")
            key = text[told:].split()[:5]
            assert [word for _, word in asked(e)] == key
            assert asked(e)[-1][0] == e.length - 1
            depths.append(told / len(text))
    assert min(depths) < 0.2
    assert max(depths) > 0.6


def test_a_row_asks_where_it_is_told_to() -> None:
    assert causal_example(list("abcab"), {3, 4}) == Example(tuple("abca"), ("", "", "a", "b"))


def test_a_source_is_read_as_a_person_writes_it() -> None:
    assert TASKS["translate"].tokenize(" forty two,seven ") == ("forty", "two", ",", "seven")
    assert TASKS["translate-back"].tokenize("四十二") == ("四", "十", "二")
    with pytest.raises(ArgumentError, match=r"'fourty' is not a word .*; did you mean 'forty' or"):
        TASKS["translate"].tokenize("fourty two")
    with pytest.raises(ArgumentError, match=r"the text ' ' has no words; give at least one"):
        TASKS["translate"].tokenize(" ")


def test_where_a_source_belongs() -> None:
    copy = TASKS["copy"]
    assert copy.split_of(()) is None
    assert copy.split_of(("a",) * 41) is None
    assert copy.split_of(("a",) * 21) == "longer"
    held = sum(
        copy.split_of((a, b, c)) == "validation"
        for a in "abcdefg"
        for b in "hijklmn"
        for c in "opqrstu"
    )
    assert 15 < held < 60  # a tenth of 343


def test_what_is_wrong_is_refused() -> None:
    copy = TASKS["copy"]
    with pytest.raises(ArgumentError, match="split is 'test'; it must be one of train, validation"):
        copy.examples("test", 1)
    with pytest.raises(ArgumentError, match="count is 0; it must be 1 or more"):
        copy.examples("train", 0)
    with pytest.raises(ArgumentError, match="kind is 'text'; it must be one of seq2seq, causal"):
        replace(copy, kind="text")  # type: ignore[arg-type]
    for lengths in ((0, 2, 3), (3, 2, 4), (1, 2, 2)):
        with pytest.raises(ArgumentError, match=r"lengths are .*; they must be 1 <= shortest"):
            replace(copy, lengths=lengths)
    with pytest.raises(ArgumentError, match="there is no task 'tranlsate'; did you mean"):
        find_task("tranlsate")
    with pytest.raises(ArgumentError, match=r"there is no task 'x'; choose translate, .*, passkey"):
        find_task("x")


def test_a_vocabulary_is_a_numbering() -> None:
    vocabulary = Vocabulary(tuple("abcdefghijklmnop"))
    assert len(vocabulary) == 19
    for word in vocabulary.words:
        assert vocabulary.decode(vocabulary.encode([word])) == [word]
    assert vocabulary.decode([1, 3, 0, 4, 2, 5]) == ["a", "b"]
    with pytest.raises(ArgumentError, match=r"'<eos>' is not a word .*; it has a, b, .* and 4"):
        vocabulary.encode(["<eos>"])
    for outside in (-1, 19):
        with pytest.raises(
            ArgumentError, match=rf"id {outside} is outside the vocabulary; allowed is \[0, 19\)"
        ):
            vocabulary.decode([outside])
    with pytest.raises(ArgumentError, match="vocabulary or are special tokens: <pad>, a"):
        Vocabulary(("a", "<pad>", "a", "b"))
    with pytest.raises(ArgumentError, match="has the empty string as a word"):
        Vocabulary(("",))
