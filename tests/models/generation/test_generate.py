"""Decoder, model and generation: cached = uncached, seeds, streaming, what stays untouched,
errors.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import regard
from regard.models.decoder import Decoder
from regard.models.model import Model
from tests.models import small

PROMPT = "the quick né 你好"


@pytest.fixture(scope="module")
def model() -> Model:
    return small.model()


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


def test_ids_are_a_prompt_wherever_a_text_is(model: Model) -> None:
    texts = [PROMPT, "the key"]
    rows = [model.encode(text) for text in texts]
    one = rows[0][0]
    forms = [rows[0], one, rows[0].to(torch.int32), one.tolist(), tuple(one.tolist())]
    batch = model.generate(texts, max_tokens=4)
    list(batch)
    for form in forms:
        generation = model.generate(form, max_tokens=4)
        assert ("".join(generation), generation.ids) == (batch.rows[0].text, batch.rows[0].ids)
        both = model.generate([form, texts[1]], max_tokens=4)
        list(both)
        assert [row.ids for row in both.rows] == [row.ids for row in batch.rows]
        assert both.rows[0].prompt == PROMPT
        assert model.cache_prefix(form).ids == tuple(rows[0][0].tolist())
    prefix = model.cache_prefix(rows[0][:, :3])
    rest = model.generate(rows[0][0, 3:], prefix=prefix, max_tokens=4)
    assert "".join(rest) == batch.rows[0].text
    beams = [model.beam_search(prompt, beams=2, max_tokens=3) for prompt in (PROMPT, rows[0])]
    assert beams[0] == beams[1]


def test_ids_are_generated_without_a_tokenizer(model: Model) -> None:
    bare = Model(model.decoder, None, model.config)
    prompt = model.encode(PROMPT)
    wanted = model.generate(prompt, max_tokens=4)
    list(wanted)
    generation = bare.generate(prompt, max_tokens=4)
    assert list(generation) == []
    assert (generation.ids, generation.text, generation.finished) == (wanted.ids, "", "length")
    beams = [made.beam_search(prompt, max_tokens=3)[0].ids for made in (bare, model)]
    assert beams[0] == beams[1]
    for call in (lambda: bare.generate("the"), lambda: bare.generate(prompt, stop="x")):
        with pytest.raises(regard.FileError, match="no tokenizer"):
            call()


@pytest.mark.parametrize(
    ("prompt", "words"),
    [
        (5, "the prompt is int"),
        (b"ab", "the prompt is bytes"),
        ([1, True], r"prompt\[1\] is bool"),
        ([[1, 2.0]], r"prompt\[1\] is float"),
        ([1.5], "the prompt is float"),
        ({"a": 1}, "the prompt is dict"),
        (torch.tensor([1.0]), "a tensor of torch.float32"),
        (torch.tensor([True]), "a tensor of torch.bool"),
        (torch.ones(2, 3, dtype=torch.int64), r"a tensor \[2, 3\].*list of prompts"),
        (torch.tensor(3), r"a tensor \[\]"),
        ([300], "token id 300"),
        (torch.tensor([[-1, 3]]), "token id -1"),
        (torch.ones(1, 0, dtype=torch.int64), "the prompt has no ids"),
        ([[1], []], "the prompt has no ids"),
    ],
    ids=str,
)
def test_what_is_no_prompt(model: Model, prompt: Any, words: str) -> None:
    with pytest.raises((regard.ArgumentError, regard.ArgumentTypeError), match=words):
        model.generate(prompt)


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


def ending(model: Model, *ends: int) -> Model:
    """The same model, which ends a text at other ids."""
    return Model(model.decoder, model.tokenizer, model.config, eos_ids=ends)


def test_it_stops_at_an_id_that_ends_a_text(model: Model) -> None:
    free = model.generate(PROMPT, max_tokens=9)
    list(free)
    assert free.finished == "length"
    for n in (0, 4):
        end = free.ids[n]
        assert end not in free.ids[:n]
        generation = ending(model, end, 299).generate(PROMPT, max_tokens=9)
        assert generation.finished is None
        text = "".join(generation)
        assert (generation.ids, generation.finished) == (free.ids[:n], "end")
        assert text == generation.text == model.tokenizer.decode(free.ids[:n])


def test_stop_strings_end_the_text_wherever_tokens_are_cut(model: Model) -> None:
    options: dict[str, Any] = {"max_tokens": 20, "temperature": 2.0, "seed": 4}
    whole = model.generate(PROMPT, **options)
    free = "".join(whole)
    for a, b in ((5, 6), (7, 12), (len(free) - 2, len(free))):
        stop = free[a:b]
        generation = model.generate(PROMPT, stop=["�x", stop], **options)
        shown = ""
        for piece in generation:
            assert piece
            shown += piece
            assert stop not in shown
        assert shown == generation.text == free[: free.find(stop)]
        assert generation.finished == "stop"
        assert model.tokenizer.decode(generation.ids).startswith(shown + stop[:1])
    generation = model.generate(PROMPT, stop=free[-1] + "�", **options)
    assert "".join(generation) == free, "a beginning at the end is given out"
    assert generation.finished == whole.finished


CACHES: list[dict[str, Any]] = [
    *({}, {"chunk": 3}, {"chunk": None}, {"max_context": 40}),
    *({"cache": "fixed"}, {"cache": "quantized"}, {"cache": "fixed", "max_context": 99}),
    {"cache": "paged", "chunk": 2},
    *({"cache": name, "max_context": 40} for name in ("ring", "streaming")),
]


@pytest.mark.parametrize("options", CACHES, ids=str)
def test_caches_and_chunks_write_what_passes_without_a_cache_write(
    model: Model, options: dict[str, Any]
) -> None:
    prompt = model.encode(PROMPT)
    ids = prompt
    for _ in range(6):
        ids = torch.cat([ids, model(ids)[:, -1].argmax(1, keepdim=True)], 1)
    generation = model.generate(PROMPT, max_tokens=6, **options)
    list(generation)
    assert generation.ids == ids[0, prompt.shape[1] :].tolist()
    assert generation.cache == options.get("cache", "growing")
    assert 0 < generation.prefill_seconds < generation.seconds


def test_it_goes_on_without_end(model: Model) -> None:
    for cache in ("ring", "streaming"):
        options = {"cache": cache, "max_context": 6}
        generation = model.generate("the quick brown fox", max_tokens=32, **options)
        assert len(list(generation)) > 10
        assert len(generation.ids) == 32
        assert generation.cache_bytes == 2 * 6 * 2 * 20 * 4


def test_a_nan_is_told_and_no_token(model: Model) -> None:
    broken = small.model()
    broken.decoder.norm.weight.data[3] = float("nan")
    with pytest.raises(regard.ArgumentError, match="the largest logit of row 0 is nan"):
        list(broken.generate(PROMPT))


def test_no_tokens_asked_for(model: Model) -> None:
    generation = model.generate(PROMPT, max_tokens=0)
    assert list(generation) == []
    assert (generation.text, generation.ids) == ("", [])
    assert generation.cache_bytes == generation.tokens_per_second == 0


def test_taps_have_the_places_of_layers(model: Model) -> None:
    with regard.Trace("layers.1.pattern", "q") as trace:
        model(model.encode(PROMPT))
    assert list(trace) == ["layers.0.q", "layers.1.q", "layers.1.pattern"]


REFUSED: dict[str, tuple[dict[str, Any], type[Exception]]] = {
    "the text '' has no tokens": ({"prompt": ""}, regard.ArgumentError),
    "text '' has no tokens; give at least": ({"prompt": ["the", ""]}, regard.ArgumentError),
    "prompts is empty; give at least one prompt": ({"prompt": []}, regard.ArgumentError),
    "max_tokens is -1; it must be 0 or more": ({"max_tokens": -1}, regard.ArgumentError),
    "chunk is 0; it must be 1 or more": ({"chunk": 0}, regard.ArgumentError),
    "temperature is -0.5; it must be 0 or more": ({"temperature": -0.5}, regard.ArgumentError),
    "temperature is nan; it must be 0": ({"temperature": float("nan")}, regard.ArgumentError),
    "top_k is 0; it must be at least 1, or None": ({"top_k": 0}, regard.ArgumentError),
    "top_k is 301; it must be 1 to 300, or None": ({"top_k": 301}, regard.ArgumentError),
    "temperature is bool; it must be a number": ({"temperature": True}, regard.ArgumentTypeError),
    "max_tokens is float; it must be an int": ({"max_tokens": 2.0}, regard.ArgumentTypeError),
    "chunk is float; it must be an int": ({"chunk": 2.0}, regard.ArgumentTypeError),
    "has no argument 'topk'; did you mean 'top_k'": ({"topk": 3}, regard.ArgumentTypeError),
}


@pytest.mark.parametrize("message", REFUSED)
def test_what_generate_refuses(model: Model, message: str) -> None:
    options, kind = REFUSED[message]
    with pytest.raises(kind, match=message) as error:
        model.generate(**{"prompt": PROMPT} | options)
    assert error.type is kind


def test_a_text_that_does_not_fit(model: Model) -> None:
    most = model.encode("the quick brown").shape[1]
    message = f"the prompt has {most} tokens and max_tokens is 9: {most + 9} are more than "
    message += f"max_context 10; ask for at most {10 - most}, raise max_context, or use"
    with pytest.raises(regard.ArgumentError, match=message):
        model.generate(["the", "the quick brown"], max_tokens=9, max_context=10)


@pytest.mark.parametrize(
    ("ids", "layers", "message"),
    [
        ([[1, 2], [3, 300]], None, r"token id 300 at \[1, 1\] lies outside \[0, 300\)"),
        ([[-1]], None, r"token id -1 at \[0, 0\] lies outside"),
        ([1, 2], None, r"ids are \(2,\); they must be \[batch, length\]: use ids\[None\]"),
        ([[1]], 1, "1 cache for 2 layers; give one per layer"),
    ],
)
def test_what_a_model_refuses(model: Model, ids: Any, layers: int | None, message: str) -> None:
    caches = None if layers is None else model.new_caches()[:layers]
    with pytest.raises(regard.ArgumentError, match=message):
        model(torch.tensor(ids), caches=caches)


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
