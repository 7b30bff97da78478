"""A text that is strange to a model is said to be: bytes of characters, and improbable tokens."""

from __future__ import annotations

import math

import pytest
import tokenizers
import torch

import regard
from regard.inspect.metrics.text_fit import TextFit, measure_text_fit, warn_about_text
from regard.models.families import family
from regard.models.text_encoder import TextEncoder
from regard.models.tokenizer import Tokenizer

bert = family("bert")

STRANGE = ["猫坐在垫子上", "Привет, как дела?", "안녕하세요", "Ich weiß nicht, was soll es sein"]
KNOWN = ["我打他", "我不知道他说的是什么", "The list of items", "to be or not to be", "I hit him"]


@pytest.mark.parametrize("text", STRANGE)
def test_strange_texts(text: str) -> None:
    assert measure_text_fit(regard.load("tiny"), text).warning is not None


@pytest.mark.parametrize("text", KNOWN)
def test_texts_of_its_languages(text: str) -> None:
    fit = measure_text_fit(regard.load("tiny"), text)
    assert fit.warning is None
    assert fit.partial_tokens == 0


def test_the_numbers() -> None:
    """The loss by hand, and the two limits."""
    tiny, text = regard.load("tiny"), "Return the value of x"
    ids = tiny.encode(text)[0]
    rows = torch.softmax(tiny(ids[None])[0], -1)
    losses = [-math.log(rows[i, ids[i + 1]]) for i in range(len(ids) - 1)]
    fit = measure_text_fit(tiny, text)
    assert fit.loss == pytest.approx(sum(losses) / len(losses), rel=1e-5)
    assert fit.uniform_loss == math.log(1920)
    assert measure_text_fit(tiny, text, run=False).loss is None
    assert [TextFit(8, n, None, 7.0).is_strange for n in (2, 3)] == [False, True]
    assert [TextFit(8, 0, loss, 7.0).is_strange for loss in (6.2, 6.4)] == [False, True]
    assert [TextFit(8, 0, None, 7.0, n).is_strange for n in (2, 3)] == [False, True]
    assert warn_about_text(object(), text) is None


@pytest.mark.parametrize("kind", ["WordPiece", "Unigram"])
def test_unknown_tokens_are_counted(kind: str) -> None:
    """Also of a text encoder, which predicts no tokens; a tokenizer of bytes has no such token."""
    words = {"[UNK]": 0, "the": 1, "cat": 2}
    model = (
        tokenizers.models.WordPiece(words, unk_token="[UNK]")
        if kind == "WordPiece"
        else tokenizers.models.Unigram([(word, -1.0) for word in words], unk_id=0)
    )
    backend = tokenizers.Tokenizer(model)
    backend.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    known = Tokenizer(backend)
    assert known.unknown == 0
    config = bert.config(3, 8, 1, 2, 16, 32)
    encoder = TextEncoder(bert.build(config).eval(), known, config, max_seq_length=32)
    assert measure_text_fit(encoder, "the 猫 cat 狗").unknown_tokens == 2
    assert "2 of 4 tokens" in str(warn_about_text(encoder, "the 猫 cat 狗"))
    assert warn_about_text(encoder, "the cat") is None
    assert regard.load("tiny").tokenizer.unknown is None
