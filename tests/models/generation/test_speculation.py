"""Proposed tokens change no text: with any model, cache and way of choosing, each seed gives what
it gives without; a wrong rule of acceptance is found.
"""

from __future__ import annotations

import copy
from collections import Counter
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import regard
from regard.models import Model
from regard.models.generation import DecodeSession, Sampler, SamplingParams
from regard.models.generation.speculation import (
    COSTS,
    MATCHES,
    Lookup,
    Speculation,
    SpeculativeSession,
    weight_bytes,
)
from regard.nn.variants import build
from regard.nn.weights import can_store_weight, store_weight
from regard.ops.stored_weights import Int8Weight
from regard.positions import DynamicNTK
from tests.cli.test_few_bit_models import small_model
from tests.models import small
from tests.models.generation.stacks import following, held, stack

M, H, G = 24, 4, 2
PROMPT = "the key of a query, the key of a value of the key"


def definition(ids: list[int], most: int) -> list[int]:
    """The end of the text is looked for from behind, and what follows is copied one by one."""
    for n in MATCHES:
        for stop in range(len(ids) - 1, n - 1, -1):
            if ids[stop - n : stop] == ids[-n:]:
                text = list(ids)
                for i in range(most):
                    text.append(text[stop + i])
                return text[len(ids) :]
    return []


@given(st.lists(st.integers(0, 2), max_size=60), st.lists(st.integers(1, 9), max_size=9))
def test_a_lookup_is_its_definition(ids: list[int], pieces: list[int]) -> None:
    lookup, end = Lookup(), 0
    for n in [*pieces, len(ids)]:
        end += n
        assert lookup.propose(ids[:end], n % 8) == definition(ids[:end], n % 8)


def test_a_lookup_takes_the_last_place() -> None:
    """The three last tokens occurred twice; what followed them the second time is proposed."""
    assert Lookup().propose([1, 2, 3, 7, 1, 2, 3, 8, 1, 2, 3], 2) == [8, 1]


CHOICES: list[dict[str, Any]] = [
    {},
    {"temperature": 0.6, "seed": 3},
    {"temperature": 1.0, "top_k": 5, "repetition_penalty": 1.2, "seed": 4},
    {"temperature": 0.9, "top_p": 0.8, "min_p": 0.02, "seed": 5},
    {"repetition_penalty": 1.3},
]


def few_words(model: Model) -> Model:
    """A model that writes five different tokens, so that it repeats itself, and not always."""
    model.decoder.head.weight.data[7:] = 0  # type: ignore[union-attr, operator, index]
    return model


def run(model: Model, prompt: Any = PROMPT, **options: Any) -> tuple[Any, list[str]]:
    generation = model.generate(prompt, **{"max_tokens": 30, **options})
    return generation, list(generation)


def assert_same(
    model: Model, counts: Counter[str], proposals: dict[str, Any], **options: Any
) -> None:
    """The same ids and pieces; adds what was proposed and accepted."""
    plain, pieces = run(model, **options)
    found, others = run(model, **options, **proposals)
    assert found.ids == plain.ids
    assert others == pieces
    assert found.finished == plain.finished
    assert found.read == plain.read
    counts["proposed"] += found.speculation.proposed
    counts["accepted"] += found.speculation.accepted


def model_and_draft() -> tuple[Model, Model]:
    """A model of twelve layers, of which the last ten do little, and its first two layers."""
    model, draft = (few_words(small.model(num_hidden_layers=n)) for n in (12, 2))
    for layer in model.decoder.layers[2:]:
        for parameter in layer.parameters():
            parameter.data *= 0.4
    draft.decoder.load_state_dict(model.decoder.state_dict(), strict=False)
    return model, draft


@pytest.mark.parametrize("kind", ["lookup", "draft"])
def test_each_way_of_choosing_gives_the_same_text(kind: str) -> None:
    model, counts = few_words(small.model()), Counter[str]()
    proposals: dict[str, Any] = {"speculate": "lookup"}
    if kind == "draft":
        model, proposals["draft"] = model_and_draft()
        del proposals["speculate"]
    for options in CHOICES:
        assert_same(model, counts, proposals, **options)
    assert 0 < counts["accepted"] < counts["proposed"]


@pytest.mark.full(keep=["paged"])
@pytest.mark.parametrize(
    "cache", ["growing", "fixed", "paged", "quantized", "fp8", "ring", "streaming"]
)
def test_caches_take_back_what_was_not_chosen(cache: str) -> None:
    """A state and a ring cannot be cut off; an eight-bit cache codes whole groups."""
    mixers = build("sliding_window", M, H, groups=G, window=6), build("gqa", M, H, groups=G)
    state = build("gated_delta_net", M, H)
    models = [small.model(), held(stack(*mixers)), held(stack(mixers[1], state))]
    counts = Counter[str]()
    for model in map(few_words, models):
        room = {"cache": cache, "max_context": 40 if cache in ("ring", "streaming") else 120}
        for options in CHOICES[:2]:
            assert_same(model, counts, {"speculate": "lookup"}, **room, **options)
    assert 0 < counts["accepted"] < counts["proposed"]


def test_stop_strings_prefixes_and_the_last_slot() -> None:
    model, counts = few_words(small.model()), Counter[str]()
    whole = run(model)[0]
    stop = whole.text[len(whole.text) // 2 :][:3]
    assert_same(model, counts, {"speculate": "lookup"}, stop=stop)
    prefix = model.cache_prefix("the key of")
    for prompt in (" a query, the key of", ""):
        assert_same(model, counts, {"speculate": "lookup"}, prompt=prompt, prefix=prefix)
    for n in (1, 2, 7, 20):
        ids = len(model.encode(PROMPT)[0])
        room = {"cache": "fixed", "max_context": ids + n, "max_tokens": n}
        assert_same(model, counts, {"speculate": "lookup"}, **room)
    assert counts["accepted"]


def test_a_pass_reads_several_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    model, passes = few_words(small.model()), []
    forward = model.decoder.forward

    def counted(ids: Tensor, *others: Any, **options: Any) -> Tensor:
        passes.append(ids.shape[1])
        return forward(ids, *others, **options)

    monkeypatch.setattr(model.decoder, "forward", counted)
    found, _ = run(model, speculate="lookup", max_tokens=50)
    counts = found.speculation
    assert len(passes) - 1 == len(found.ids) - 1 - counts.accepted
    assert sum(n > 1 for n in passes[1:]) == counts.passes
    assert len(passes) < 0.7 * len(found.ids)


# ---- distributions


class Chain(DecodeSession):
    """A session of a model whose next token depends on the last one alone, by a table [V, V]."""

    def __init__(self, table: Tensor) -> None:
        self.table, self.device, self._prefix, self._caches = table, torch.device("cpu"), None, []
        self._decoder = small_model().decoder  # its size is all that is read of it

    def append(self, ids: Tensor) -> Tensor:  # type: ignore[override]
        return self.table[ids[0, -1:]]

    def read(self, ids: Tensor) -> Tensor:
        return self.table[ids]

    def crop(self, length: int) -> None:
        pass


class ChainDraft:
    """Draws from another table, with a copy of the model's sampler or with numbers of its own."""

    cost = 0.0

    def __init__(self, table: Tensor, sampler: Sampler) -> None:
        self.table, self.sampler = table, sampler

    def propose(self, ids: list[int], most: int) -> list[int]:
        sampler, found = self.sampler.copy(), [ids[-1]]
        while len(found) <= most:
            found += sampler(self.table[[found[-1]]])
        return found[1:]


def chi_square(p: Tensor, q: Tensor, draws: int, *, wrong: bool = False) -> tuple[float, float]:
    """How far the transitions of a chain of draws are from p, in standard deviations, and the share
    of proposals that were accepted. wrong: a rejected token is drawn from p again, not from what
    the proposals leave of it.
    """
    V = len(p)
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), [[0]], V)
    session = SpeculativeSession(Chain(p), [0], 2 * draws, ChainDraft(q, sampler))
    own = torch.Generator().manual_seed(2)
    chances, proposed = p.softmax(1), q.softmax(1)
    token, pairs = 0, torch.zeros(V, V)
    for _ in range(draws):
        logits = session.append(torch.tensor([[token]]))
        (chosen,) = sampler(logits)
        if wrong:
            guess = int(torch.multinomial(proposed[token], 1, generator=own))
            u = float(torch.rand((), generator=own))
            if u < float(chances[token, guess] / proposed[token, guess]):
                chosen = guess
        pairs[token, chosen] += 1
        token = chosen
    expected = pairs.sum(1, keepdim=True) * chances
    freedom = V * (V - 1)
    statistic = float(((pairs - expected) ** 2 / expected).sum())
    counts = session.speculation
    return (statistic - freedom) / (2 * freedom) ** 0.5, counts.accepted / max(1, counts.proposed)


def tables() -> tuple[Tensor, Tensor]:
    make = torch.Generator().manual_seed(7)
    p = torch.randn(6, 6, generator=make)
    return p, p + torch.randn(6, 6, generator=make)


@pytest.mark.full
def test_a_hundred_thousand_draws_have_the_distribution_of_the_model() -> None:
    """Each of a thousand rows draws a hundred times, after a draft that uses its random numbers."""
    p, q = (x[:1].expand(1000, -1) for x in tables())
    sampler = Sampler(SamplingParams(temperature=1.0, seed=1), [[0]] * 1000, 6)
    chances, proposed = p[0].softmax(0), q[0].softmax(0)
    right, wrong, equal = torch.zeros(6), torch.zeros(6), 0
    for _ in range(100):
        guesses, tokens = (torch.tensor(x(y)) for x, y in ((sampler.copy(), q), (sampler, p)))
        equal += int((guesses == tokens).sum())
        right += tokens.bincount(minlength=6)
        # negative control: after a rejection the token is drawn from p again
        guesses = torch.multinomial(proposed, 1000, replacement=True)
        keep = torch.rand(1000) < (chances / proposed)[guesses]
        wrong += torch.where(keep, guesses, tokens).bincount(minlength=6)
    expected = 100_000 * chances
    far, too_far = (float(((x - expected) ** 2 / expected).sum()) for x in (right, wrong))
    assert far < 20.5  # 1 of 1000 with 5 degrees of freedom
    assert too_far > 1000
    distance = float((chances - proposed).abs().sum()) / 2
    assert (1 - distance) / (1 + distance) < equal / 100_000 <= 1 - distance


def test_draws_have_the_distribution_and_a_wrong_rule_has_not() -> None:
    p, q = tables()
    assert abs(chi_square(p, q, 2000)[0]) < 4
    assert chi_square(p, q, 2000, wrong=True)[0] > 8  # negative control


# ---- how many tokens are proposed


def test_passes_cost_what_their_weights_do() -> None:
    model = small_model().decoder
    assert weight_bytes(model) == 4
    assert weight_bytes(model.bfloat16()) == 2
    few = copy.deepcopy(small_model().decoder)
    for module in few.modules():
        if can_store_weight(module):
            store_weight(module, Int8Weight.quantize(module.weight, dtype=torch.float32))
    assert weight_bytes(few) == 1


@pytest.mark.parametrize("size", COSTS)
def test_proposals_that_are_wrong_cost_little_and_right_ones_become_long(size: int) -> None:
    bad, lost, passes = Speculation(0.0, size), 0.0, 0
    for n in range(1, 400):
        if k := bad.length():
            bad.learn(k, 0)
            lost, passes = lost + COSTS[size][k] - 1, passes + 1
        assert lost <= 1.001 + 0.01 * n
    assert passes > 3, "it is tried again"
    good = Speculation(0.0, size)
    lengths = []
    for _ in range(20):
        lengths.append(good.length())
        good.learn(lengths[-1], lengths[-1])
    assert lengths[-1] == len(COSTS[size]) - 1
    assert Speculation(1.0, size).length() == 0, "a draft as slow as the model never pays"


# ---- refusals


def test_what_cannot_be_exact_is_refused_by_name() -> None:
    model = small.model()
    lookup: dict[str, Any] = {"speculate": "lookup"}
    other = small.model(vocab_size=310)
    longer = held(following(DynamicNTK(2.0, 12)))
    state = Model(stack(build("gated_delta_net", M, H)), model.tokenizer, model.config)
    cases: list[tuple[Any, str]] = [
        (lambda: model.generate([PROMPT, PROMPT], **lookup), "speculate proposes .* 2 prompts"),
        (lambda: model.generate(PROMPT, draft=model, cuda_graph=True), "three ways"),
        (lambda: model.generate(PROMPT, draft=model, **lookup), "three ways"),
        (lambda: model.generate(PROMPT, speculate="ngram"), 'speculate is .*"lookup" or None'),
        (lambda: model.generate(PROMPT, draft=other), "draft has other tokens"),
        (lambda: model.generate(PROMPT, draft=state), "draft has a layer whose cache"),
        (lambda: longer.generate(PROMPT, **lookup), "speculate takes back tokens"),
        (
            lambda: model.generate(PROMPT, cache="h2o", max_context=32, **lookup),
            "layer 0, Evicting, chooses tokens by each query",
        ),
    ]
    for call, words in cases:
        with pytest.raises(regard.ArgumentError, match=words):
            call()


@pytest.mark.full
def test_smollm2_writes_the_same_and_reads_less_often() -> None:
    """A trained model that repeats a text, on one thread and with its compiled steps."""
    model = small.named_model("smollm2", Model)
    colours = "red, green, blue, yellow, red, green, blue, yellow, red, green,"
    options = {"prompt": colours, "max_tokens": 32}
    counts = Counter[str]()
    assert_same(model, counts, {"speculate": "lookup"}, **options)
    assert_same(model, counts, {"speculate": "lookup"}, temperature=0.5, seed=2, **options)
    assert counts["accepted"] > 24
