"""Which query, layer and head are looked at."""

from __future__ import annotations

import pytest
import tokenizers
import torch

import regard
from regard import Trace
from regard.errors import ArgumentError
from regard.inspect import find_query, strongest_head, strongest_keys
from regard.inspect.explain.head_choice import (
    FIRST_HEAD_RULE,
    HEAD_FOR_KEY_RULE,
    HEAD_RULE,
    NEAR_HEAD_RULE,
    Choice,
    choose_head,
    name_mover,
    striking_query,
    strongest_keys_of_run,
)
from regard.inspect.explain.random_model import random_model
from regard.inspect.model_run import Word, find_words, prepare_run, pretokenized, token_sequence
from regard.models import Model, TextEncoder
from regard.models.tokenizer import END_OF_TEXT, Tokenizer
from tests.inspect.small_model import TEXT, model
from tests.models import small
from tests.models.small import named_model


def text_upto(query: int, text: str = TEXT) -> str:
    m = model()
    return m.tokenizer.decode(m.encode(text)[0, : query + 1].tolist())


@pytest.mark.parametrize("word", ["a", "fluffy", "creature", "the", "forest"])
def test_a_word_is_its_last_token(word: str) -> None:
    i = find_query(model(), TEXT, word)
    assert text_upto(i).endswith(word)
    assert not text_upto(i - 1).endswith(word) or i == 0


def test_the_last_occurrence_counts_and_whole_words_win() -> None:
    text = "the forest, then the sea"
    assert text_upto(find_query(model(), text, "the"), text) == "the forest, then the"
    assert text_upto(find_query(model(), text, "fores"), text).startswith("the fores")


def test_words_of_several_bytes_a_letter_are_found() -> None:
    text = "né 你好 🎉 fin"
    for word in ("né", "你好", "🎉", "fin"):
        i = find_query(model(), text, word)
        assert text_upto(i, text).endswith(word)
        assert word not in text_upto(i - 1, text)


def test_a_word_is_found_behind_tokens_that_the_tokenizer_adds() -> None:
    own = small.model()
    backend = tokenizers.Tokenizer.from_str(own.tokenizer._backend.to_str())
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single=f"{END_OF_TEXT} $A", special_tokens=[(END_OF_TEXT, 0)]
    )
    made = Model(own.decoder, Tokenizer(backend), own.config)
    text = "the key of a query"
    for word in text.split():
        ids = made.encode(text)[0, : find_query(made, text, word) + 1]
        shown = made.tokenizer.decode(ids.tolist())
        assert shown.endswith(word)
        assert shown.startswith(END_OF_TEXT)


def test_an_index_counts_from_either_end() -> None:
    T = model().encode(TEXT).shape[1]
    assert find_query(model(), TEXT, 0) == 0
    assert find_query(model(), TEXT, -1) == T - 1
    assert find_query(model(), TEXT, -T) == 0


def test_a_missing_word_is_refused_with_the_words_there_are() -> None:
    with pytest.raises(ArgumentError, match=r"query is 'four', .* its words: one, two, three"):
        find_query(model(), "one two one three", "four")
    with pytest.raises(ArgumentError, match="query is '', which does not occur"):
        find_query(model(), "one", "")


def captured(m: Model | None = None) -> torch.Tensor:
    """Patterns [layers, H, T, T]."""
    m = m or model()
    with torch.inference_mode(), Trace("pattern") as trace:
        m.forward(m.encode(TEXT), backend="reference")
    return torch.stack([trace[f"layers.{n}.pattern"][0] for n in range(3)])


def assert_largest(weights: torch.Tensor, layer: int, head: int) -> None:
    """Or a tie."""
    assert weights[layer, head] == pytest.approx(weights.max().item(), abs=1e-6)


def test_the_strongest_head_is_the_one_with_the_largest_weight() -> None:
    m, patterns, misled = model(), captured(), 0
    for query in range(2, patterns.shape[-1]):
        rows = patterns[:, :, query].reshape(12, -1).tolist()
        others = [[p if j not in (0, query) else -1.0 for j, p in enumerate(row)] for row in rows]
        tops = [max(row) for row in others]
        weights, keys = strongest_keys(m, m.encode(TEXT), query)
        # two fp32 kernels
        assert weights.flatten().tolist() == pytest.approx(tops, rel=1e-4, abs=1e-9)
        assert keys.flatten().tolist() == [row.index(max(row)) for row in others]
        far = [max(p for j, p in enumerate(row) if j != query - 1) for row in others]
        tops = far if query > 2 else tops
        choice = strongest_head(m, m.encode(TEXT), query)
        assert_largest(torch.tensor(tops).view(3, 4), choice.layer, choice.head)
        assert choice.rule == (HEAD_RULE if query > 2 else NEAR_HEAD_RULE)
        row = others[choice.layer * 4 + choice.head]
        counted = row if query == 2 else [*row[: query - 1], -1.0, *row[query:]]
        assert counted[choice.key] == max(counted)
        everywhere = [max(row) for row in rows]
        misled += everywhere.index(max(everywhere)) != tops.index(max(tops))
    assert misled > 0, "negative control: with the first token and neighbours it is another"


def test_a_layer_or_head_that_is_given_is_kept() -> None:
    m = model()
    row = captured()[:, :, -1].clone()
    row[..., 0], row[..., -2:] = -1, -1
    largest = row.amax(-1)
    assert_largest(largest[1:2], 0, strongest_head(m, m.encode(TEXT), -1, layer=1).head)
    assert strongest_head(m, m.encode(TEXT), -1, layer=-1).layer == 2
    assert_largest(largest[:, 2:3], strongest_head(m, m.encode(TEXT), -1, head=2).layer, 0)


def test_a_single_token_has_no_other_to_look_at() -> None:
    m = model()
    choice = strongest_head(m, m.encode("a"), 0)
    assert (choice.layer, choice.head) == (0, 0)
    assert choice.rule == "the first head: there is no other token"
    assert strongest_head(m, m.encode("a"), 0, layer=2, head=1).head == 1


def test_a_key_that_is_given_chooses_the_head() -> None:
    m, patterns = model(), captured()
    read = prepare_run(m, TEXT)
    for key in (0, 3, 5):
        choice = choose_head(read, 6, key=key)
        assert_largest(patterns[:, :, 6, key], choice.layer, choice.head)
        assert choice.rule == HEAD_FOR_KEY_RULE
    assert choose_head(read, 3, key=6).rule == "the first head: no head has weight on the key"


def test_neighbours_on_both_sides_are_left_out() -> None:
    """Of a network that sees both ways, a head that looks at the next token is no finding."""
    m = model(seed=1, sharp=12.0)
    for layer in m.decoder.layers:
        layer.attention.mask = None
    patterns, differ = captured(m), 0
    for query in range(1, 7):
        rows = patterns[:, :, query].clone()
        rows[..., 0] = rows[..., query] = -1
        near = rows.amax(-1)
        rows[..., query - 1 : query + 2] = -1
        choice = strongest_head(m, m.encode(TEXT), query)
        assert_largest(rows.amax(-1), choice.layer, choice.head)
        differ += near[choice.layer, choice.head] < near.max() - 1e-3
    assert differ > 0, "negative control: with the neighbours it is another head"


def test_a_mechanism_without_a_softmax_has_no_heads_to_compare() -> None:
    read = random_model("retention", TEXT)
    assert choose_head(read, 3, layer=-1, head=2) == Choice(1, 2, FIRST_HEAD_RULE)
    assert choose_head(read, 3, place="layers.1") == Choice(1, 0, FIRST_HEAD_RULE)
    with pytest.raises(ArgumentError, match="Recurrent ran no softmax for query 3"):
        strongest_keys_of_run(read, 3)


def test_tokens_are_joined_to_whole_words() -> None:
    tiny = regard.load("tiny")
    for text, expected in {
        "The verdant forest, isn't it?": ["The", "verdant", "forest", ",", "isn't", "it", "?"],
        "你好 🎉": ["你", "好", "🎉"],
    }.items():
        tokens = token_sequence(tiny, tiny.encode(text), text)
        words = find_words(tokens)
        assert len(tokens.ids) > len(words)
        assert "".join(w.text for w in words) == "".join(expected)
        assert [w.stop for w in words[:-1]] == [w.start for w in words[1:]]
        if text.isascii():
            assert [w.text for w in words] == expected
    assert find_words(pretokenized((5, 6), ("a", "b"))) == (Word(0, 1, "a"), Word(1, 2, "b"))


def test_without_a_word_to_move_there_is_no_name_mover() -> None:
    run = prepare_run(regard.load("tiny"), "one two three one two", last=1)
    assert name_mover(run, 0) is None, "only the last token predicts what follows the text"


@pytest.mark.full
def test_the_head_that_moves_the_name_is_chosen() -> None:
    text = "When Mary and John went to the store, John gave a drink to"
    run = prepare_run(named_model("smollm2", Model), text, last=1)
    choice = name_mover(run, len(run.tokens.ids) - 1)
    assert (choice.layer, choice.head, choice.key) == (23, 0, 1)
    assert "·Mary (92.3%)" in choice.rule
    assert choose_head(run, 13).head != 0, "negative control: by weights it is another head"


def test_of_an_encoder_the_query_with_the_largest_weight_is_chosen() -> None:
    text = "a fluffy blue creature roamed the verdant forest"
    run = prepare_run(named_model("minilm", TextEncoder), text)
    query = striking_query(run)
    assert query == 7
    weights = [strongest_keys_of_run(run, i)[0].max().item() for i in (4, query)]
    assert weights[1] > weights[0], "negative control: another word reads less"
