"""The battery over models that `regard.load` reads, and over the same models with something broken
in them.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard import masks
from regard.caches import Ring
from regard.inspect import audit
from regard.models.families import family
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder
from tests.models import small
from tests.parity.families.harness import theirs

bert = family("bert")
t5 = family("t5")


def held(found: Any) -> set[str]:
    return {check.name for check in found.passed}


LLAMA = {
    "vocab_size": 96,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}


GPT2 = {"vocab_size": 96, "n_embd": 16, "n_head": 4, "n_layer": 1, "n_positions": 40}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("kind, more", [("Mistral", {"sliding_window": 3}), ("GPT2", {})])
def test_a_folder_of_transformers(kind: str, more: dict[str, Any], tmp_path: Path) -> None:
    sizes = GPT2 if kind == "GPT2" else LLAMA
    head = "LMHeadModel" if kind == "GPT2" else "ForCausalLM"
    theirs(kind, sizes | more, head=head).save_pretrained(tmp_path)
    found = audit(regard.load(tmp_path))
    assert found.names == (), str(found)
    assert {"future", "padding", "left padding", "cache", "batch", "parameters"} <= held(found)


def test_an_encoder_has_no_fault() -> None:
    config = bert.config(60, 16, 2, 4, 24, 32)
    model = TextEncoder(bert.build(config).eval(), None, config)
    found = audit(model)
    assert found.names == (), str(found)
    assert {"batch", "padding", "left padding"} <= held(found)
    assert found.claims["causal"] is False


@pytest.mark.full
def test_an_encoder_decoder_has_no_fault() -> None:
    config = t5.config(60, 16, 8, 24, 1, 2)
    model = Seq2Seq(t5.build(config).eval(), None, config, start=0, eos_ids=[1])
    found = audit(model)
    assert found.names == (), str(found)
    assert {"future", "cache", "batch"} <= held(found)


def attentions(model: Any) -> list[Any]:
    return [m for m in model.decoder.modules() if hasattr(m, "project")]


def unmask(model: Any) -> None:
    attentions(model)[0].mask = None


def see_one_more(model: Any) -> None:
    """Queries see the next token."""

    attentions(model)[0].mask = masks.Fn(lambda q, k: k <= q + 1, name="next")


def forget(model: Any) -> None:
    """A cache that is shorter than what the mask shows."""
    for attention in attentions(model):
        attention.new_cache = lambda: Ring(3)


def spoil(model: Any) -> None:
    attentions(model)[0].output.weight[0, 0] = float("nan")


@pytest.mark.full
@pytest.mark.parametrize(
    "breaks, names",
    [(unmask, ("future-leak",)), (see_one_more, ("future-leak",)), (forget, ("cache-differs",))],
)
def test_what_is_broken_in_a_model_is_found(breaks: Any, names: tuple[str, ...]) -> None:
    model = small.model(num_hidden_layers=1)
    assert audit(model).clean
    breaks(model)
    found = audit(model, causal=True)
    assert found.names == names, str(found)


@pytest.mark.full
def test_the_length_at_which_a_cache_forgets() -> None:
    model = small.model(num_hidden_layers=1)
    forget(model)
    assert audit(model).findings[0].example == {"T": 4, "chunks": [1, 1, 1, 1], "token": 3}


def test_a_weight_that_is_nan() -> None:
    model = small.model(num_hidden_layers=1)
    spoil(model)
    found = audit(model)
    assert "parameters-not-finite" in found.names
    told = next(f for f in found.findings if f.name == "parameters-not-finite")
    assert told.sentence.startswith("1 value of 960 in ")
    assert told.sentence.endswith(" is not finite.")


def test_a_model_is_left_as_it_was() -> None:
    model = small.model(num_hidden_layers=1)
    before = {name: x.clone() for name, x in model.decoder.state_dict().items()}
    audit(model)
    assert all(torch.equal(before[name], x) for name, x in model.decoder.state_dict().items())
