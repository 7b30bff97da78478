"""A prompt read once: every continuation is what the whole prompt gives, and none sees another."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.models import Model
from regard.positions import DynamicNTK
from tests.models import small
from tests.models.generation.stacks import exact, following, held
from tests.rules import assert_close_rule

PROMPT, MORE = "the quick brown fox", " jumps over 你好"


@pytest.fixture(scope="module")
def model() -> Model:
    return small.model()


def whole(model: Model, ids: tuple[int, ...], n: int) -> list[int]:
    """The likeliest tokens behind ids, by passes without a cache."""
    now = torch.tensor([ids])
    for _ in range(n):
        now = torch.cat([now, model(now)[:, -1].argmax(1, keepdim=True)], 1)
    return now[0, len(ids) :].tolist()


ROOMS = [
    {},
    {"max_context": 60},
    {"cache": "fixed", "max_context": 60},
    {"cache": "paged", "max_context": 60},
    {"cache": "ring", "max_context": 60},
    {"cache": "quantized", "chunk": 4},
]


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_continuations_are_those_of_the_whole_prompt(model: Model, room: dict[str, Any]) -> None:
    read = model.cache_prefix(PROMPT, **room)
    assert read.ids == tuple(model.tokenizer.encode(PROMPT))
    ref64 = exact(model.decoder, torch.tensor([read.ids]))[:, -1]
    assert_close_rule(read.logits[None], model(torch.tensor([read.ids]))[:, -1], ref64)
    size = read.cache_bytes
    texts = [MORE, "", ", the lazy dog", MORE]
    running = [model.generate(text, prefix=read, max_tokens=5) for text in texts]
    for _ in range(5):  # all of them at a time
        for generation in running:
            next(generation, None)
    for text, generation in zip(texts, running, strict=True):
        list(generation)
        ids = (*read.ids, *model.tokenizer.encode(text))
        assert generation.ids == whole(model, ids, 5)
    assert read.cache_bytes == size > 0
    assert read.seconds > 0
    assert "".join(model.generate("", prefix=read, max_tokens=5)) == running[1].text


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("room", ROOMS, ids=str)
def test_a_batch_of_continuations(model: Model, room: dict[str, Any]) -> None:
    read, texts = model.cache_prefix(PROMPT, **room), [MORE, "", "a", " the key of a query"]
    batch = model.generate(texts, prefix=read, max_tokens=6)
    list(batch)
    for text, row in zip(texts, batch.rows, strict=True):
        assert row.ids == whole(model, (*read.ids, *model.tokenizer.encode(text)), 6)
    sampled = model.generate(["", ""], prefix=read, max_tokens=6, temperature=1.5, seed=3)
    list(sampled)
    for i, row in enumerate(sampled.rows):
        one = model.generate("", prefix=read, max_tokens=6, temperature=1.5, seed=3 + i)
        assert row.text == "".join(one)


def test_a_reading_reads_on(model: Model) -> None:
    first = model.cache_prefix("the quick")
    second = model.cache_prefix(" brown fox", prefix=first)
    assert second.ids == (*first.ids, *model.tokenizer.encode(" brown fox"))
    a = model.generate("", prefix=second, max_tokens=6)
    list(a)
    assert a.ids == whole(model, second.ids, 6)
    b = model.generate("", prefix=first, max_tokens=6)
    list(b)
    assert b.ids == whole(model, first.ids, 6)


def test_the_penalty_sees_what_was_read(model: Model) -> None:
    read = model.cache_prefix(PROMPT)
    options = {"max_tokens": 6, "repetition_penalty": 3.0}
    ids = (*read.ids, *model.tokenizer.encode(MORE))
    if tuple(model.tokenizer.encode(PROMPT + MORE)) == ids:
        right = "".join(model.generate(PROMPT + MORE, **options))
        assert "".join(model.generate(MORE, prefix=read, **options)) == right
    assert "".join(model.generate("", prefix=read, **options)) == "".join(
        model.generate(PROMPT, **options)
    )


def test_frequencies_that_follow_the_length() -> None:
    made = held(following(DynamicNTK(2.0, 10)))
    read = made.cache_prefix("the quick")
    assert len(read.ids) < 10
    for text in (" brown", ""):
        generation = made.generate(text, prefix=read, max_tokens=10)
        list(generation)
        assert generation.ids == whole(made, (*read.ids, *made.tokenizer.encode(text)), 10)
    batch = made.generate([" brown fox jumps", "a"], prefix=read, max_tokens=6)
    list(batch)
    for text, row in zip((" brown fox jumps", "a"), batch.rows, strict=True):
        assert row.ids == whole(made, (*read.ids, *made.tokenizer.encode(text)), 6)


def test_a_border_inside_a_word_has_other_tokens(model: Model) -> None:
    """What the docstring says: ids are joined, not texts."""
    read = model.cache_prefix("the qu")
    assert (*read.ids, *model.tokenizer.encode("ick")) != tuple(model.tokenizer.encode("the quick"))


def test_errors(model: Model) -> None:
    read = model.cache_prefix(PROMPT, max_context=20)
    cases = [
        (lambda: model.cache_prefix(""), "the text '' has no tokens; give at least one character"),
        (
            lambda: model.cache_prefix("", prefix=read),
            "the prompt '' has no tokens",
        ),
        (lambda: model.cache_prefix(PROMPT, cache="paged"), "cache='paged' needs max_context"),
        (lambda: model.cache_prefix(PROMPT, max_context=2), "are more than max_context 2; shorten"),
        (lambda: model.generate("a", prefix=read, max_tokens=20), "are more than max_context 20;"),
        (lambda: model.generate("a", prefix=read, cache="fixed"), "prefix has its own caches,"),
        (lambda: model.cache_prefix("a", prefix=read, max_context=99), "prefix has its own"),
        (lambda: small.model().generate("a", prefix=read), "prefix was read by another model;"),
    ]
    for call, message in cases:
        with pytest.raises(regard.ArgumentError) as error:
            call()
        assert message in str(error.value)
