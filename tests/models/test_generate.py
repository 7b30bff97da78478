"""Decoder, model and generation: cached = uncached, seeds, streaming, what stays untouched, errors."""

from __future__ import annotations

import pytest
import torch

import regard
from regard.models.decoder import Decoder
from regard.models.generate import pick
from regard.models.model import Model
from regard.span import Span
from tests.models import small

PROMPT = "the quick né 你好"


@pytest.fixture(scope="module")
def model() -> Model:
    return small.model()


def near(x: torch.Tensor, y: torch.Tensor) -> None:
    assert float((x - y).abs().max()) <= 1e-5 * float(y.abs().max())


def test_cached_logits_are_the_uncached_ones(model: Model) -> None:
    ids = torch.randint(0, 300, (2, 41))
    whole = model(ids)
    for chunks in ([41], [1] * 41, [17, 1, 1, 20, 2], [40, 1]):
        caches, parts, start = model.new_caches(), [], 0
        for n in chunks:
            parts.append(model(ids[:, start : start + n], caches=caches))
            start += n
        near(torch.cat(parts, 1), whole)
        assert {len(cache) for cache in caches} == {41}
        assert sum(cache.bytes for cache in caches) == 2 * 2 * 41 * 2 * (10 + 10) * 4
    for backend in ("sdpa", "reference"):
        near(model(ids, backend=backend), whole)


def test_a_stale_position_is_caught(model: Model) -> None:
    """Negative control: positions that begin anew behind a cache."""
    ids = torch.randint(0, 300, (1, 20))
    caches = model.new_caches()
    model(ids[:, :10], caches=caches)
    wrong = model(ids[:, 10:], Span(0, 10), caches)
    with pytest.raises(AssertionError):
        near(wrong, model(ids)[:, 10:])


def test_greedy_is_the_argmax_of_the_whole_pass(model: Model) -> None:
    generation = model.generate(PROMPT, max_tokens=12)
    text = "".join(generation)
    ids = model.encode(PROMPT)
    for token in generation.ids:
        logits = model(ids)[0, -1]
        assert float(logits[token]) >= float(logits.max()) - 1e-4
        ids = torch.cat([ids, torch.tensor([[token]])], 1)
    assert len(generation.ids) == 12
    assert generation.text == text
    assert generation.cache_bytes == 2 * (ids.shape[1] - 1) * 2 * 20 * 4
    assert generation.seconds > 0
    assert generation.tokens_per_second == 12 / generation.seconds


@pytest.mark.parametrize("temperature", [0.0, 1.0, 3.0])
def test_streamed_text_is_the_text_of_the_ids(model: Model, temperature: float) -> None:
    for seed in range(2):
        generation = model.generate(PROMPT, max_tokens=16, temperature=temperature, seed=seed)
        pieces = list(generation)
        assert all(pieces), "no empty piece"
        assert "".join(pieces) == generation.text == model.tokenizer.decode(generation.ids)
        assert list(generation) == [], "it can be iterated once"


def test_seeds(model: Model) -> None:
    def sample(seed: int) -> list[int]:
        generation = model.generate(PROMPT, max_tokens=10, temperature=2.0, seed=seed)
        list(generation)
        return generation.ids

    torch.manual_seed(5)
    state = torch.get_rng_state()
    first = sample(3)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is not touched"
    torch.manual_seed(6)
    assert sample(3) == first
    assert len({tuple(sample(seed)) for seed in range(3)}) == 3


def test_two_generations_at_a_time_do_not_meet(model: Model) -> None:
    alone = "".join(model.generate(PROMPT, max_tokens=8, temperature=1.0, seed=1))
    a = model.generate(PROMPT, max_tokens=8, temperature=1.0, seed=1)
    b = model.generate("the key", max_tokens=8, temperature=1.0, seed=2)
    text = ""
    for piece in a:
        text += piece
        next(b, None)
    assert text == alone


def test_limits_of_temperature_and_top_k() -> None:
    logits, make = torch.randn(50), torch.Generator().manual_seed(0)
    best = int(logits.argmax())
    assert pick(logits, 0.0, None, make) == best
    assert pick(logits, 1e-30, None, make) == best
    assert pick(logits, 1e-45, None, make) == best
    assert pick(logits * 1e4, 1e-38, 7, make) == best
    assert {pick(logits, 5.0, 1, make) for _ in range(20)} == {best}
    top = set(logits.topk(3).indices.tolist())
    assert {pick(logits, 5.0, 3, make) for _ in range(100)} == top
    picked = (
        torch.tensor([pick(logits, 1.0, None, make) for _ in range(4000)]).bincount(minlength=50)
        / 4000
    )
    assert float((picked - logits.softmax(0)).abs().sum()) < 0.15, "samples follow the softmax"


def test_it_stops_at_the_end_of_text(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    end = model.tokenizer.end_of_text
    assert end is not None
    tokens = iter([70, 71, end, 72])
    monkeypatch.setattr("regard.models.generate.pick", lambda *_: next(tokens))
    generation = model.generate(PROMPT, max_tokens=9)
    list(generation)
    assert generation.ids == [70, 71]


def test_no_tokens_asked_for(model: Model) -> None:
    generation = model.generate(PROMPT, max_tokens=0)
    assert list(generation) == []
    assert (
        generation.text,
        generation.ids,
        generation.cache_bytes,
        generation.tokens_per_second,
    ) == ("", [], 0, 0.0)


def test_taps_have_the_places_of_layers(model: Model) -> None:
    with regard.Trace("layers.1.pattern", "q") as trace:
        model(model.encode(PROMPT))
    assert list(trace) == ["layers.0.q", "layers.1.q", "layers.1.pattern"]


def test_errors(model: Model) -> None:
    cases = [
        (lambda: model.generate(""), "the text '' has no tokens; give at least one character"),
        (lambda: model.generate(PROMPT, max_tokens=-1), "max_tokens is -1; it must be 0 or more"),
        (
            lambda: model.generate(PROMPT, temperature=-0.5),
            "temperature is -0.5; it must be 0 or more",
        ),
        (
            lambda: model.generate(PROMPT, temperature=float("nan")),
            "temperature is nan; it must be 0 or more",
        ),
        (lambda: model.generate(PROMPT, top_k=0), "top_k is 0; it must be 1 to 300, or None"),
        (lambda: model.generate(PROMPT, top_k=301), "top_k is 301; it must be 1 to 300, or None"),
        (
            lambda: model(torch.tensor([[1, 2], [3, 300]])),
            "token id 300 at [1, 1] lies outside [0, 300); was it made by another tokenizer?",
        ),
        (
            lambda: model(torch.tensor([[-1]])),
            "token id -1 at [0, 0] lies outside [0, 300); was it made by another tokenizer?",
        ),
        (
            lambda: model(torch.tensor([1, 2])),
            "ids are (2,); they must be [batch, length]: use ids[None]",
        ),
        (
            lambda: model(torch.tensor([[1]]), caches=model.new_caches()[:1]),
            "1 caches for 2 layers; give one per layer",
        ),
    ]
    for call, message in cases:
        with pytest.raises(regard.ArgumentError) as error:
            call()
        assert str(error.value) == message
    with pytest.raises(regard.ArgumentTypeError) as type_error:
        model.generate(PROMPT, temperature=True)
    assert str(type_error.value) == "temperature is bool; it must be a number, 0 or more"


def test_a_refused_call_leaves_the_caches_as_they_were(model: Model) -> None:
    caches = model.new_caches()
    model(torch.tensor([[1, 2, 3]]), caches=caches)
    for ids in (torch.tensor([[300]]), torch.tensor([1])):
        with pytest.raises(regard.ArgumentError):
            model(ids, caches=caches)
    with pytest.raises(regard.KernelRefusal):
        model(torch.tensor([[4]]), caches=caches, backend="sdpa")
    assert {len(cache) for cache in caches[1:]} == {3}
    assert isinstance(model.decoder, Decoder)
