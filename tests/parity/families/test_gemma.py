"""Gemma models of transformers, saved by it and loaded here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import regard
from tests.parity.families import changes
from tests.parity.families.harness import assert_decoder, assert_differs, ids_of, saved, theirs
from tests.parity.families.published import assert_saved

D = 10
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 44,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": D,
    "max_position_embeddings": 64,
}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one key for all, biases": {"num_key_value_heads": 1, "attention_bias": True},
    "untied, linear": {
        "tie_word_embeddings": False,
        "rope_parameters": {"rope_type": "linear", "rope_theta": 1e4, "factor": 3.0},
    },
}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CHANGES)
def test_gemma(name: str, tmp_path: Path) -> None:
    model = theirs("Gemma", SMALL | CHANGES[name])
    mine = assert_decoder(model, tmp_path, start=1000 if name == "plain" else 0)
    assert_saved(mine, model, tmp_path, start=1000)


def test_the_first_name_of_the_activation(tmp_path: Path) -> None:
    """ "gelu" is the form with tanh."""
    model = theirs("Gemma", SMALL | {"hidden_act": "gelu"})
    model.config.hidden_act = "gelu"
    assert_decoder(model, tmp_path)
    assert '"gelu"' in (tmp_path / "config.json").read_text()


def test_the_embedding_is_rounded_as_theirs(tmp_path: Path) -> None:
    """In bfloat16 the factor is 6.625, not sqrt(44) = 6.633."""
    model = theirs("Gemma", SMALL)
    embed = regard.load(saved(model, tmp_path), dtype=torch.bfloat16).decoder.embed
    ids = ids_of(model)
    theirs_rounded = model.to(torch.bfloat16).model.embed_tokens(ids)
    assert torch.equal(embed(ids), theirs_rounded)
    exact = (embed.embedding(ids).double() * 44**0.5).to(torch.bfloat16)
    assert not torch.equal(exact, theirs_rounded)


def unscaled(network: Any) -> None:
    network.embed.scale = 1.0


def scaled_head(network: Any) -> None:
    """The factor on the tied matrix, and so on the logits, too."""
    network.embed.embedding.weight.data *= network.embed.scale
    network.embed.scale = 1.0


WRONG = [
    changes.without_the_one,
    changes.other_groups,
    changes.interleave,
    changes.norms_swapped,
    changes.each("scale of the model", scale=SMALL["hidden_size"] ** -0.5),
    unscaled,
    scaled_head,
    changes.activation(nn.SiLU()),
]


def test_wrong_variants_are_far(tmp_path: Path) -> None:
    model = theirs("Gemma", SMALL)
    mine = regard.load(saved(model, tmp_path))
    for change in WRONG:
        assert_differs(mine, model, change, start=1000)
    changes.assert_other_gelu(mine, model)
