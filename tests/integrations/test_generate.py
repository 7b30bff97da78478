"""`generate()` under "regard": the tokens of eager attention, whatever the cache and the search,
past several windows.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.integrations.families import (
    DECODERS,
    SEQ2SEQ,
    WINDOW,
    PreallocatedCache,
    decoder,
    keep,
    other,
    tokens,
    transformers,
)
from tests.rules import assert_close_rule

PROMPT, NEW = 7, 2 * WINDOW + 3
FEW = ["Llama", "Gemma3", "GptOss"]
# the penalty keeps small random models from saying one word for ever
GREEDY = {"max_new_tokens": NEW, "do_sample": False, "repetition_penalty": 1.5}
CACHES: dict[str, Callable[[Any], dict[str, Any]]] = {
    "dynamic": lambda config: {},
    "static": lambda config: {"cache_implementation": "static"},
    "preallocated": lambda config: {"past_key_values": PreallocatedCache(config)},
    "of a length": lambda config: {"past_key_values": PreallocatedCache(config, PROMPT + NEW)},
}


@functools.cache
def kept(name: str, attention: str) -> Any:
    make = decoder if name in DECODERS else other
    return make(name, attention).requires_grad_(requires_grad=False)


def generate(name: str, attention: str, rows: int = 3, **given: Any) -> Tensor:
    """New tokens after prompts of different lengths, padded on the left."""
    torch.manual_seed(11)  # for sampling
    lengths = [PROMPT, 4, 6][:rows]
    given = {**GREEDY, "pad_token_id": 0} | given
    return kept(name, attention).generate(
        tokens(3, PROMPT)[:rows], attention_mask=keep(lengths, PROMPT, "left"), **given
    )


@functools.cache
def greedy(name: str) -> Tensor:
    return generate(name, "eager")


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", DECODERS)
def test_greedy_tokens_are_the_same_with_every_cache(name: str) -> None:
    for kind, cache in CACHES.items():
        found = generate(name, "regard", **cache(kept(name, "regard").config))
        assert torch.equal(found, greedy(name)), kind
    assert greedy(name).shape == (3, PROMPT + NEW)
    assert greedy(name)[:, PROMPT:].unique().numel() > 4


def test_other_weights_give_other_tokens() -> None:
    model = decoder("Mistral", "regard")
    model.config.sliding_window = WINDOW - 1
    found = model.generate(
        tokens(3, PROMPT),
        attention_mask=keep([PROMPT, 4, 6], PROMPT, "left"),
        **GREEDY,
        past_key_values=PreallocatedCache(model.config),
    )
    assert not torch.equal(found, greedy("Mistral"))


SEARCHES: dict[str, dict[str, Any]] = {
    "beams": {"num_beams": 3},
    "sampling": {"do_sample": True, "temperature": 1.3, "top_k": 20},
    "sampled beams": {"num_beams": 2, "do_sample": True, "num_return_sequences": 2},
    "no cache": {"use_cache": False},
}


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("search", SEARCHES)
@pytest.mark.parametrize("name", FEW)
def test_every_search_finds_the_same_tokens(name: str, search: str) -> None:
    given = SEARCHES[search]
    wanted = generate(name, "eager", **given)
    caches = ["dynamic"] if search == "no cache" else ["dynamic", "static", "preallocated"]
    for kind in caches:
        found = generate(name, "regard", **given, **CACHES[kind](kept(name, "regard").config))
        assert torch.equal(found, wanted), kind


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("cache", ["dynamic", "preallocated"])
@pytest.mark.parametrize("name", FEW)
def test_speculation_takes_tokens_back(name: str, cache: str) -> None:
    wanted = greedy(name)[:1]
    for how in ({"prompt_lookup_num_tokens": 3}, {"assistant_model": kept("Llama", "regard")}):
        more = CACHES[cache](kept(name, "regard").config)
        assert torch.equal(generate(name, "regard", rows=1, **how, **more), wanted), how


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", SEQ2SEQ)
def test_an_encoder_and_a_decoder_generate(name: str) -> None:
    model, eager = kept(name, "regard"), kept(name, "eager")
    given = {"attention_mask": keep([9, 5], 9, "right"), "max_new_tokens": 10, "do_sample": False}
    for beams in (1, 3):
        wanted = eager.generate(tokens(2, 9), num_beams=beams, **given)
        caches = [{}, {"past_key_values": both(PreallocatedCache(model.config), model.config)}]
        for cache in caches:
            found = model.generate(tokens(2, 9), num_beams=beams, **given, **cache)
            assert torch.equal(found, wanted)
        assert wanted.shape[1] > 5


def both(mine: PreallocatedCache, config: Any) -> Any:
    return transformers.EncoderDecoderCache(mine, PreallocatedCache(config))


@pytest.mark.full(keep=6)
@pytest.mark.parametrize("name", DECODERS)
def test_chunks_and_steps_have_the_logits_of_one_pass(name: str) -> None:
    chunks = (5, 1, 1, 3, 1, 2, 6, 1)
    ids = tokens(2, sum(chunks))
    with torch.no_grad():
        exact = decoder(name, "eager", torch.float64)(ids, use_cache=False).logits
        plain = [kept(name, "eager")(ids, use_cache=False).logits]
        for cache in (
            transformers.DynamicCache(config=kept(name, "regard").config),
            PreallocatedCache(kept(name, "regard").config),
        ):
            theirs = transformers.DynamicCache(config=kept(name, "eager").config)
            mine, same = (
                torch.cat(
                    [
                        kept(name, kind)(x, past_key_values=held).logits
                        for x in ids.split(chunks, 1)
                    ],
                    1,
                )
                for kind, held in (("regard", cache), ("eager", theirs))
            )
            assert_close_rule(mine, [*plain, same], exact, what=name)
            assert cache.get_seq_length() == sum(chunks)
