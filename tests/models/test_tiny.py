"""The embedded model: what it is, that it writes English, and that its heads do what the page says
they do.
"""

from __future__ import annotations

import json
import pydoc_data.topics
import re
from functools import cache
from pathlib import Path

import pytest
import torch

import regard
from regard.inspect import head_scores, repeated_ids
from regard.models import Model
from regard.models.families import family


@cache
def tiny() -> Model:
    return regard.load("tiny")


@pytest.fixture
def folder(root: Path) -> Path:
    return root / "src" / "regard" / "assets" / "tiny"


def test_its_size_is_what_we_say(folder: Path) -> None:
    config = tiny().config
    assert 2e6 <= sum(p.numel() for p in tiny().decoder.parameters()) <= 6e6
    assert (folder / "model.safetensors").stat().st_size <= 12e6
    assert config.num_hidden_layers >= 3
    assert 2 <= config.num_key_value_heads < config.num_attention_heads
    assert tiny().tokenizer.vocab_size == config.vocab_size


def test_its_log_and_command_come_with_it(folder: Path) -> None:
    assert (folder / "command.txt").read_text("utf-8").startswith("regard train python-docs --out ")
    header, *rows = (folder / "train.csv").read_text("utf-8").splitlines()
    assert header == "step,loss,validation,lr,grad_norm,tokens,tokens_per_second"
    first, last = (float(row.split(",")[1]) for row in (rows[0], rows[-1]))
    assert last < first / 1.5
    assert json.loads((folder / "config.json").read_text("utf-8"))["model_type"] == "llama"


@pytest.mark.full
def test_it_writes_english() -> None:
    known = set(re.findall(r"[a-z]+", " ".join(pydoc_data.topics.topics.values()).lower()))
    text = " ".join(
        "".join(tiny().generate(prompt, max_tokens=60, temperature=0.7, top_k=40, seed=seed))
        for seed, prompt in enumerate(("Return the", "The list of", "If the value is not"))
    )
    words = re.findall(r"[A-Za-z]{2,}", text)
    share = sum(word.lower() in known for word in words) / len(words)
    assert len(words) > 60
    assert share > 0.8, text


def test_it_continues_what_it_has_learnt_better_than_noise() -> None:
    ids = tiny().encode("Return True if the object is an instance of the class.")
    shuffled = ids[:, torch.randperm(ids.shape[1], generator=torch.Generator().manual_seed(0))]
    assert loss(tiny(), ids) < loss(tiny(), shuffled) - 1


def scores(model: Model) -> dict[str, torch.Tensor]:
    """Scores of all heads on random tokens of the whole vocabulary, said twice."""
    return head_scores(model, repeated_ids(model.config.vocab_size, 64))


def test_it_has_a_previous_token_head() -> None:
    assert scores(tiny())["previous_token"].max() > 0.8


def test_it_has_an_induction_head_behind_the_previous_token_head() -> None:
    """The later head finds what the earlier one wrote: which token stood in front (Olsson et al.
    2022).
    """
    found = scores(tiny())
    assert found["induction"].max() > 0.5
    (first, _), (second, _) = (
        divmod(int(found[name].argmax()), found[name].shape[1])
        for name in ("previous_token", "induction")
    )
    assert first < second


def test_it_copies_what_it_has_seen_once() -> None:
    """Random tokens said twice: the second time it knows what comes, though no text ever said
    it.
    """
    ids = repeated_ids(tiny().config.vocab_size, 64)
    losses = token_losses(tiny(), ids)
    assert losses[:, 64:].mean() < losses[:, :62].mean() - 2, "two nats, and more"


def test_without_the_previous_token_head_it_copies_no_more() -> None:
    """Its pattern made uniform over the past, and nothing else changed: cause, not coincidence."""
    ids, found = repeated_ids(tiny().config.vocab_size, 64), scores(tiny())
    layer, head = divmod(int(found["previous_token"].argmax()), found["previous_token"].shape[1])

    def blur(pattern: torch.Tensor) -> torch.Tensor:
        pattern = pattern.clone()
        past = torch.ones_like(pattern[:, head]).tril()
        pattern[:, head] = past / past.sum(-1, keepdim=True)
        return pattern

    with regard.Trace(edit={f"layers.{layer}.pattern": blur}):
        losses = token_losses(tiny(), ids)
    assert losses[:, 64:].mean() > token_losses(tiny(), ids)[:, 64:].mean() + 2


def test_an_untrained_twin_has_none() -> None:
    decoder = family("llama").build(tiny().config).requires_grad_(False)
    twin = Model(decoder, tiny().tokenizer, tiny().config)
    found = scores(twin)
    assert found["previous_token"].max() < 0.2
    assert found["induction"].max() < 0.1


def token_losses(model: Model, ids: torch.Tensor) -> torch.Tensor:
    logits = model(ids)[:, :-1]
    return -logits.log_softmax(-1).gather(2, ids[:, 1:, None])[..., 0]


def loss(model: Model, ids: torch.Tensor) -> float:
    return float(token_losses(model, ids).mean())
