"""Beam search against all texts there are, against transformers, against greedy, and over every
kind of model.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.models import EncoderDecoder, Model, RecurrentEncoderDecoder, recurrent, transformer
from regard.models.generation import (
    CacheConfig,
    GenerationOptions,
    Hypothesis,
    SamplingParams,
    beam_search,
    beam_search_text,
    greedy,
)
from regard.nn.blocks.rnn import DecoderState
from tests.models import small


class Book:
    """A made-up model: the logits behind a text are a row of a table; what it keeps is the text of
    each row.
    """

    def __init__(self, vocabulary: int, first: Sequence[int], *, seed: int = 0) -> None:
        make = torch.Generator().manual_seed(seed)
        self.table = 1.5 * torch.randn(997, vocabulary, generator=make, dtype=torch.float64)
        self.texts: list[tuple[int, ...]] = [() for _ in first]

    def logits(self, text: tuple[int, ...]) -> Tensor:
        number = 7
        for token in text:
            number = (31 * number + token + 1) % 997
        return self.table[number]

    def step(self, ids: Tensor) -> Tensor:
        pairs = zip(self.texts, ids[:, 0].tolist(), strict=True)
        self.texts = [(*text, token) for text, token in pairs]
        return torch.stack([self.logits(text) for text in self.texts])[:, None]

    def reorder(self, rows: Tensor) -> None:
        self.texts = [self.texts[row] for row in rows.tolist()]

    def all_texts(
        self, first: int, ends: Sequence[int], limit: int, penalty: float
    ) -> list[Hypothesis]:
        """Every text up to the limit that ends there or by itself, best first."""
        found = []
        for n in range(1, limit + 1):
            for ids in itertools.product(range(self.table.shape[1]), repeat=n):
                ended = ids[-1] in ends
                if any(token in ends for token in ids[:-1]) or (n < limit and not ended):
                    continue
                total = 0.0
                for i, token in enumerate(ids):
                    row = self.logits((first, *ids[:i])).tolist()
                    total += row[token] - math.log(math.fsum(math.exp(x) for x in row))
                found.append(Hypothesis(ids[:-1] if ended else ids, total / n**penalty, ended))
        return sorted(found, key=lambda hypothesis: -hypothesis.score)


def run(book: Book, first: list[int], **options: float) -> list[list[Hypothesis]]:
    return beam_search(book.step, torch.tensor(first), reorder=book.reorder, **options)  # type: ignore[arg-type]


@pytest.mark.parametrize("penalty", [0.0, 1.0, 2.5, -0.7])
@pytest.mark.parametrize("ends", [(2,), (0, 3), ()])
def test_enough_beams_find_the_best_of_all_texts(penalty: float, ends: tuple[int, ...]) -> None:
    first, limit = [1, 3], 4
    book = Book(4, first)
    found = run(book, first, end=ends, limit=limit, beams=4**limit, length_penalty=penalty)
    for start, row in zip(first, found, strict=True):
        wanted = book.all_texts(start, ends, limit, penalty)
        assert [(x.ids, x.ended) for x in row] == [(x.ids, x.ended) for x in wanted]
        assert max(abs(x.score - y.score) for x, y in zip(row, wanted, strict=True)) < 1e-12


def test_a_longer_text_may_still_win_where_length_is_favoured() -> None:
    """After two steps both finished texts are better than what goes on is now: ln 0.12 / 2^2
    against ln 0.09 / 2^2. At the limit it is divided by 4^2.
    """
    logits = torch.tensor([0.4, 0.3, 0.3], dtype=torch.float64).log()
    (found,) = beam_search(
        lambda ids: logits.expand(len(ids), 1, 3),
        torch.tensor([1]),
        end=0,
        limit=4,
        reorder=lambda rows: None,
        beams=2,
        length_penalty=2.0,
    )
    assert found[0].score == pytest.approx(math.log(0.3**3 * 0.4) / 4**2)
    assert (len(found[0].ids), found[0].ended) == (3, True)


def test_few_beams_are_ordered_true_scores() -> None:
    book = Book(6, [1], seed=4)
    right = {x.ids: x for x in book.all_texts(1, (2,), 4, 1.0)}
    (found,) = run(book, [1], end=2, limit=4, beams=3)
    assert [x.score for x in found] == sorted((x.score for x in found), reverse=True)
    assert len({x.ids for x in found}) == 3
    for x in found:
        assert abs(x.score - right[x.ids].score) < 1e-12
        assert x.ended == right[x.ids].ended


def test_rows_do_not_meet() -> None:
    first = [0, 1, 4, 5]
    together = run(Book(6, first), first, end=2, limit=6, beams=3)
    for start, row in zip(first, together, strict=True):
        assert run(Book(6, [start]), [start], end=2, limit=6, beams=3) == [row]


def test_a_step_that_is_not_reordered_is_found() -> None:
    """Negative control: rows that keep another row's text give other scores."""
    book = Book(5, [1])
    wanted = run(book, [1], end=2, limit=5, beams=3)
    lazy = Book(5, [1])

    def grow_only(rows: Tensor) -> None:
        lazy.texts = (lazy.texts * 3)[:3]

    found = beam_search(lazy.step, torch.tensor([1]), end=2, limit=5, beams=3, reorder=grow_only)
    assert [x.ids for x in found[0]] != [x.ids for x in wanted[0]]


@pytest.mark.parametrize("seed", range(6))
def test_one_beam_is_greedy(seed: int) -> None:
    first = [0, 1, 3]
    book, other = Book(5, first, seed=seed), Book(5, first, seed=seed)
    rows = greedy(other.step, torch.tensor(first), end=2, limit=7).tolist()
    found = run(book, first, end=2, limit=7, beams=1, length_penalty=1.0)
    for row, (best,) in zip(rows, found, strict=True):
        assert best.ids == tuple(row[: row.index(2)] if 2 in row else row)
        assert best.ended == (2 in row)


def test_equal_scores_go_to_the_lower_ids() -> None:
    def flat(ids: Tensor) -> Tensor:
        return torch.zeros(*ids.shape, 5)

    (found,) = beam_search(
        flat, torch.tensor([0]), end=4, limit=2, beams=3, reorder=lambda rows: None
    )
    assert [x.ids for x in found] == [(0, 0), (0, 1), (0, 2)]


@pytest.fixture(scope="module")
def model() -> Model:
    return small.model()


@pytest.fixture(scope="module")
def theirs(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Any:
    from transformers import AutoModelForCausalLM

    folder = small.write(tmp_path_factory.mktemp("llama"), model)
    return AutoModelForCausalLM.from_pretrained(folder).eval()


def test_transformers_finds_the_same(model: Model, theirs: Any) -> None:
    endless = Model(model.decoder, model.tokenizer, model.config, eos_ids=())
    prompt, ended = model.encode("the quick brown"), []
    for beams, penalty, several in ((2, 0.0, 1), (4, -0.5, 1), (3, 1.0, 2), (5, 2.0, 1)):
        likely = endless.beam_search("the quick brown", beams=beams, max_tokens=7)
        ends = [x.ids[2] for x in likely[:several]]  # which do come
        right = theirs.generate(
            prompt,
            attention_mask=torch.ones_like(prompt),
            num_beams=beams,
            num_return_sequences=beams,
            max_new_tokens=7,
            do_sample=False,
            early_stopping="never",
            length_penalty=penalty,
            eos_token_id=ends,
            pad_token_id=ends[0],
            output_scores=True,
            return_dict_in_generate=True,
        )
        made = Model(model.decoder, model.tokenizer, model.config, eos_ids=ends)
        found = made.beam_search(
            "the quick brown", beams=beams, max_tokens=7, length_penalty=penalty
        )
        for x, row in zip(found, right.sequences, strict=True):
            ids = row[prompt.shape[1] :].tolist()
            n = next((i for i, token in enumerate(ids) if token in ends), len(ids))
            assert x.ids == tuple(ids[:n])
        scores = torch.tensor([x.score for x in found])
        error = float((scores - right.sequences_scores).abs().max())
        assert error < 1e-5 * float(scores.abs().max())
        ended += [x.ended for x in found]
    assert {*ended} == {True, False}


def score(logits: Tensor, ids: tuple[int, ...], penalty: float) -> float:
    """Of one pass without a cache: logits [T,V] for the tokens ids."""
    p = logits.double().log_softmax(1)[torch.arange(len(ids)), list(ids)]
    return float(p.sum()) / len(ids) ** penalty


@pytest.mark.parametrize(
    "room",
    [CacheConfig(), CacheConfig("fixed"), CacheConfig("paged"), CacheConfig("paged", 64)],
    ids=str,
)
def test_scores_are_those_of_a_pass_without_a_cache(model: Model, room: CacheConfig) -> None:
    made = Model(model.decoder, model.tokenizer, model.config, eos_ids=())
    done = beam_search_text(
        made,
        "the key of",
        GenerationOptions(9, chunk=2, cache_config=room),
        beams=4,
        length_penalty=0.5,
    )
    prompt = model.encode("the key of")
    for x in done.completions:
        whole = torch.cat([prompt, torch.tensor([x.ids])], 1)
        right = score(model(whole)[0, prompt.shape[1] - 1 : -1], x.ids, 0.5)
        assert abs(x.score - right) < 1e-5 * abs(right)
        assert x.text == model.tokenizer.decode(x.ids)
    assert len({x.ids for x in done.completions}) == 4
    assert done.seconds > 0
    assert done.cache_bytes > 0


def test_one_beam_of_a_model_is_its_greedy_text(model: Model) -> None:
    (found,) = model.beam_search("the quick", beams=1, max_tokens=9)
    generation = model.generate("the quick", max_tokens=9)
    assert found.text == "".join(generation)
    assert list(found.ids) == generation.ids
    one = model.tokenizer.encode("t")
    assert len(one) == 1, "a prompt of one token has nothing to read in front of the search"
    assert model.beam_search("t", beams=1, max_tokens=3)[0].text == "".join(
        model.generate("t", max_tokens=3)
    )


Keeps = tuple[Callable[[Tensor], Tensor], Callable[[Tensor], None]]


def of_transformer(model: EncoderDecoder, source: Tensor, where: Tensor) -> Keeps:
    caches = model.new_caches()
    memory = {"memory": model.encoder(source, where), "memory_positions": where}

    def step(ids: Tensor) -> Tensor:
        given = dict(memory)
        memory.clear()
        return model.run_decoder(ids, caches, **given)

    def reorder(rows: Tensor) -> None:
        for pair in caches:
            for cache in pair:
                cache.select(rows)

    return step, reorder


def of_recurrent(model: RecurrentEncoderDecoder, source: Tensor, where: Tensor) -> Keeps:
    carried = model.begin(model.run_encoder(source, where))

    def step(ids: Tensor) -> Tensor:
        nonlocal carried
        logits, carried = model.step(ids, carried)
        return logits

    def reorder(rows: Tensor) -> None:
        nonlocal carried
        hidden, cross = carried
        if cross is not None:
            cross.select(rows)
        carried = DecoderState(tuple(x[:, rows] for x in hidden), cross)

    return step, reorder


@pytest.mark.parametrize("kind", ["transformer", "none", "bahdanau", "luong"])
def test_models_that_read_a_source(kind: str) -> None:
    """Every beam's score is that of its text in one pass that is taught it, and the best beats the
    greedy text.
    """
    torch.manual_seed(2)
    if kind == "transformer":
        model: Any = transformer(9, 16, 4, 2).eval().double()
    else:
        model = recurrent(9, 8, 16, attention=None if kind == "none" else kind).eval().double()
    with torch.no_grad():
        for x in model.parameters():
            x.mul_(2.0)
    source = torch.tensor([[3, 4, 5, 6], [7, 8, 0, 0]])
    where = torch.tensor([[0, 1, 2, 3], [0, 1, -1, -1]])
    make = of_transformer if kind == "transformer" else of_recurrent
    first, ends = torch.tensor([1, 1]), 2

    def found(beams: int) -> list[list[Hypothesis]]:
        step, reorder = make(model, source, where)
        return beam_search(
            step, first, end=ends, limit=6, reorder=reorder, beams=beams, length_penalty=0.0
        )

    beams, greedy_ = found(5), found(1)
    for row in range(2):
        assert beams[row][0].score >= greedy_[row][0].score - 1e-12
        for x in beams[row]:
            ids = (*x.ids, *([ends] if x.ended else []))
            target = torch.tensor([[1, *ids[:-1]]])
            logits = model(source[row : row + 1], target, where[row : row + 1])[0].detach()
            assert abs(x.score - score(logits, ids, 0.0)) < 1e-9


def test_errors(model: Model) -> None:
    def step(ids: Tensor) -> Tensor:
        return torch.full((*ids.shape, 4), torch.nan)

    given = {"end": 1, "limit": 3, "reorder": lambda rows: None}
    first = torch.tensor([0])
    cases = [
        ({"limit": 0}, first, "limit is 0; it must be at least 1"),
        ({"beams": 0}, first, "beams is 0; it must be at least 1"),
        ({"length_penalty": math.nan}, first, "length_penalty is nan; it must be finite"),
        ({}, first[None], r"first is \(1, 1\); it must be one id per row, \[batch\]"),
        ({}, first, "the largest logit of row 0 is nan"),
    ]
    for change, ids, message in cases:
        with pytest.raises(regard.ArgumentError, match=message):
            beam_search(step, ids, **given | change)
    for name, options in {
        "stop": GenerationOptions(stop="x"),
        "temperature": GenerationOptions(sampling=SamplingParams(temperature=1.0)),
        "top_k": GenerationOptions(sampling=SamplingParams(top_k=5)),
        "top_p": GenerationOptions(sampling=SamplingParams(top_p=0.5)),
        "min_p": GenerationOptions(sampling=SamplingParams(min_p=0.1)),
        "repetition_penalty": GenerationOptions(sampling=SamplingParams(repetition_penalty=2.0)),
    }.items():
        with pytest.raises(regard.ArgumentError, match=f"takes no sampler .* leave out {name}$"):
            beam_search_text(model, "the", options)
    with pytest.raises(regard.ArgumentError, match="limit is 0; it must be at least 1"):
        model.beam_search("the", max_tokens=0)
    with pytest.raises(regard.ArgumentError, match="are more than max_context 3"):
        model.beam_search("the", max_tokens=8, max_context=3)
