"""BLOOM models of transformers, saved by it and loaded here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import regard
from regard.biases.alibi import alibi_slopes
from regard.nn import PreNorm
from regard.nn.blocks.blocks import NormedResidual
from tests.parity.families import changes
from tests.parity.families.harness import assert_decoder, assert_differs, ids_of, saved, theirs
from tests.parity.families.published import assert_saved

H = 6
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "n_head": H,
    "n_layer": 2,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "normed path, three heads": {"apply_residual_connection_post_layernorm": True, "n_head": 3},
    "untied, four heads": {"tie_word_embeddings": False, "n_head": 4},
}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CHANGES)
def test_bloom(name: str, tmp_path: Path) -> None:
    model = theirs("Bloom", SMALL | CHANGES[name])
    mine = assert_decoder(model, tmp_path)
    assert_saved(mine, model, tmp_path)


def test_the_hubs_form(tmp_path: Path) -> None:
    """Names without the prefix, and older names of sizes."""
    model = theirs("Bloom", SMALL)
    ids = ids_of(model)
    exact = regard.load(saved(model, tmp_path))(ids)
    file = tmp_path / "model.safetensors"
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    file.unlink()
    save_file(tensors, file)
    path = tmp_path / "config.json"
    raw = json.loads(path.read_text())
    raw["n_embed"], raw["num_attention_heads"] = raw.pop("hidden_size"), raw.pop("n_head")
    path.write_text(json.dumps(raw))
    assert torch.equal(regard.load(tmp_path)(ids), exact)


# Negative controls.


def without_the_norm_of_the_embedding(network: Any) -> None:
    network.embed.norm = nn.Identity()


def other_paths(network: Any) -> None:
    for block in network.layers:
        for name in ("attention_residual", "feed_forward_residual"):
            old = getattr(block, name)
            other = PreNorm if isinstance(old, NormedResidual) else NormedResidual
            setattr(block, name, other(old.norm))


WRONG = [
    changes.head_by_head,
    without_the_norm_of_the_embedding,
    other_paths,
    changes.no_bias,
    changes.slopes("slopes from 2^0", [2.0**-h for h in range(H)]),
    changes.slopes("slopes 2^(-8h/6)", [2.0 ** (-8 * (h + 1) / H) for h in range(H)]),
    changes.slopes("slopes sorted", sorted(alibi_slopes(H), reverse=True)),
    changes.norms_swapped,
    changes.activation(nn.SiLU()),
]


def test_wrong_variants_are_far(tmp_path: Path) -> None:
    model = theirs("Bloom", SMALL)
    mine = regard.load(saved(model, tmp_path))
    for change in WRONG:
        assert_differs(mine, model, change)
    changes.assert_other_gelu(mine, model)


def test_a_path_without_norm_is_far_where_it_has_one(tmp_path: Path) -> None:
    model = theirs("Bloom", SMALL | CHANGES["normed path, three heads"])
    assert_differs(regard.load(saved(model, tmp_path)), model, other_paths)
