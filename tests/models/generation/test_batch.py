"""Several prompts at once: a row is what its prompt alone gives, whoever its neighbours are."""

from __future__ import annotations

from typing import Any

import pytest

import regard
from regard.models import BatchGeneration, Model
from regard.nn.variants import build
from regard.positions import DynamicNTK
from tests.models import small
from tests.models.generation.stacks import G, H, M, following, held, stack

PROMPTS = ["the quick né 你好", "a", "the key of a query, the lazy dog", "the key", "the key"]


@pytest.fixture(scope="module")
def model() -> Model:
    return small.model()


def alone(
    model: Model, prompts: list[str], **options: Any
) -> list[tuple[list[int], str, str | None]]:
    found, seed = [], options.pop("seed", 0)
    for row, prompt in enumerate(prompts):
        generation = model.generate(prompt, seed=seed + row, **options)
        list(generation)
        found.append((generation.ids, generation.text, generation.finished))
    return found


def together(
    model: Model, prompts: list[str], **options: Any
) -> list[tuple[list[int], str, str | None]]:
    batch = model.generate(prompts, **options)
    assert isinstance(batch, BatchGeneration)
    texts = [""] * len(prompts)
    for row, piece in batch:
        assert piece
        texts[row] += piece
    assert [row.prompt for row in batch.rows] == prompts
    assert texts == [row.text for row in batch.rows]
    return [(row.ids, row.text, row.finished) for row in batch.rows]


@pytest.mark.full(keep=2)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"chunk": 2},
        {"temperature": 1.3, "top_p": 0.95, "seed": 7},
        {"temperature": 1.0, "repetition_penalty": 1.5, "top_k": 30, "seed": 1},
        {"cache": "fixed"},
        {"cache": "paged"},
        {"cache": "ring", "max_context": 9},
        {"cache": "streaming", "max_context": 9},
    ],
    ids=str,
)
def test_a_row_is_its_prompt_alone(model: Model, options: dict[str, Any]) -> None:
    given = {"max_tokens": 7, **options}
    assert together(model, PROMPTS, **given) == alone(model, PROMPTS, **given)


@pytest.mark.full
def test_rows_that_finish_leave_the_others_alone() -> None:
    """Ends and stop strings at different lengths, for every kind of layer."""
    mixed = stack(
        build("gqa", M, H, groups=G),
        build("sliding_window", M, H, groups=G, window=5),
        build("retention", M, H),
        build("mla", M, H, kv_rank=12, nope_dim=6, rope_dim=4, value_dim=6),
    )
    for decoder in (mixed, following(DynamicNTK(2.0, 8), layers=1)):
        first = held(decoder)
        free = alone(first, PROMPTS[:4], max_tokens=7, temperature=1.0)
        ends = [free[0][0][3], free[2][0][5], free[1][0][0]]
        made = Model(decoder, first.tokenizer, first.config, eos_ids=ends)
        options = {"max_tokens": 7, "temperature": 1.0, "stop": free[3][1][3:5]}
        found = together(made, PROMPTS[:4], **options)
        assert found == alone(made, PROMPTS[:4], **options)
        assert len({len(ids) for ids, _, _ in found}) > 2
        assert {"end", "stop"} <= {finished for _, _, finished in found}


def test_the_order_of_rows_is_only_an_order(model: Model) -> None:
    texts = [text for _, text, _ in together(model, PROMPTS, max_tokens=6)]
    assert [text for _, text, _ in together(model, PROMPTS[::-1], max_tokens=6)] == texts[::-1]
    assert texts[3] == texts[4], "equal prompts, greedily"
    hot = [text for _, text, _ in together(model, PROMPTS, max_tokens=6, temperature=2.0)]
    assert hot[3] != hot[4], "with seeds of their own"


def test_a_neighbour_that_is_seen_is_found(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Negative control: padding that is given positions."""
    from regard.models.generation import generate as module

    right = together(model, PROMPTS[:3], max_tokens=12)
    padded = module.pad_left
    monkeypatch.setattr(module, "pad_left", lambda rows, start=0: (padded(rows, start)[0], None))
    assert together(model, PROMPTS[:3], max_tokens=12) != right


def test_figures_of_a_batch(model: Model) -> None:
    batch = model.generate(PROMPTS[:2], max_tokens=5)
    assert (batch.cache_bytes, batch.seconds, batch.tokens_per_second) == (0, 0.0, 0.0)
    list(batch)
    longest = max(model.encode(prompt).shape[1] for prompt in PROMPTS[:2])
    # 2 rows x 2 layers x (k and v) x 2 heads x 10 dims x 4 bytes, padding included
    assert batch.cache_bytes == 2 * (longest + 4) * 2 * 2 * 2 * 10 * 4
    assert batch.tokens_per_second == 10 / batch.seconds
    assert 0 < batch.prefill_seconds < batch.seconds
    read = sum(model.encode(prompt).shape[1] for prompt in PROMPTS[:2])
    assert batch.prompt_tokens == read, "padding is not read"
    assert batch.prefill_tokens_per_second == read / batch.prefill_seconds
    assert 0 < batch.decode_seconds < batch.seconds - batch.prefill_seconds
    assert batch.decode_tokens_per_second == 2 * 4 / batch.decode_seconds, "4 steps of 2 rows"
    assert list(batch) == [], "it can be iterated once"


def test_no_tokens_asked_for(model: Model) -> None:
    batch = model.generate(PROMPTS, max_tokens=0)
    assert list(batch) == []
    assert {row.finished for row in batch.rows} == {"length"}
    assert (batch.prefill_tokens_per_second, batch.decode_tokens_per_second) == (0, 0)


def test_two_speeds_are_of_two_clocks(model: Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """A prompt that takes 100 s and steps of 1 s: one speed over both would say nothing of
    either.
    """
    from regard.models.generation import generate as module

    now = [0.0]
    monkeypatch.setattr(module.time, "perf_counter", lambda: now[0])

    class Slow(module.DecodeSession):
        def append(self, ids: Any, *rest: Any, **more: Any) -> Any:
            now[0] += 100.0 if ids.shape[1] > 1 else 1.0
            return super().append(ids, *rest, **more)

    monkeypatch.setattr(module, "DecodeSession", Slow)
    generation = model.generate(PROMPTS[0], max_tokens=5)
    list(generation)
    read = model.encode(PROMPTS[0]).shape[1]
    assert (generation.prefill_seconds, generation.decode_seconds, generation.seconds) == (
        100,
        4,
        104,
    )
    assert generation.prefill_tokens_per_second == read / 100
    assert generation.decode_tokens_per_second == 1.0
    assert generation.tokens_per_second == 5 / 104


def test_a_nan_names_its_row(model: Model) -> None:
    broken = small.model()
    token = broken.tokenizer.encode("é")[-1]
    broken.decoder.embed.embedding.weight.data[token] = float("nan")
    with pytest.raises(regard.ArgumentError, match="the largest logit of row 1 is nan"):
        list(broken.generate(["the quick", "the é"]))
