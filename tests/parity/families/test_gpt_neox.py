"""GPT-NeoX models of transformers, saved by it and loaded here."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import regard
from regard.errors import FileError
from regard.nn import Block, ParallelBlock
from tests.parity.families import changes
from tests.parity.families.harness import assert_decoder, assert_differs, ids_of, saved, theirs
from tests.parity.families.published import assert_saved

D = 16
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 48,
    "intermediate_size": 50,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "max_position_embeddings": 64,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "rotary_pct": 0.5,
}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "one after the other, no biases": {
        "use_parallel_residual": False,
        "attention_bias": False,
        "hidden_act": "gelu_fast",
    },
    "tied, all of it turns, linear": {
        "tie_word_embeddings": True,
        "rotary_pct": 1.0,
        "rotary_emb_base": 500,
        "rope_scaling": {"rope_type": "linear", "factor": 3.0},
    },
}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CHANGES)
def test_gpt_neox(name: str, tmp_path: Path) -> None:
    model = theirs("GPTNeoX", SMALL | CHANGES[name])
    mine = assert_decoder(model, tmp_path, start=1000 if name == "plain" else 0)
    assert_saved(mine, model, tmp_path, start=1000)
    kind = Block if "one after" in name else ParallelBlock
    assert all(type(block) is kind for block in mine.decoder.layers)


def test_names_of_older_and_newer_files(tmp_path: Path) -> None:
    """With the masks and frequencies that older versions stored, and with the head's newer name."""
    model = theirs("GPTNeoX", SMALL)
    ids = ids_of(model)
    exact = regard.load(saved(model, tmp_path))(ids)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors.pop("embed_out.weight")
    for i in range(2):
        front = f"gpt_neox.layers.{i}.attention."
        tensors[front + "bias"] = torch.ones(64, 64, dtype=torch.bool).tril()[None, None]
        tensors[front + "masked_bias"] = torch.tensor(-1e9)
        tensors[front + "rotary_emb.inv_freq"] = torch.ones(3)
    file.unlink()
    save_file(tensors, file)
    assert torch.equal(regard.load(tmp_path)(ids), exact)
    del tensors["lm_head.weight"]
    file.unlink()
    save_file(tensors, file)
    with pytest.raises(FileError, match=r"1 missing \['embed_out.weight'\]"):
        regard.load(tmp_path)


def test_older_and_newer_keys(tmp_path: Path) -> None:
    """transformers 4 wrote both names of the base and of the part that turns; they must agree."""
    model = theirs("GPTNeoX", SMALL)
    path = saved(model, tmp_path) / "config.json"
    config = regard.load(tmp_path).config
    raw = {k: v for k, v in json.loads(path.read_text()).items() if k != "rope_parameters"}
    both = {
        "rotary_pct": 0.5,
        "partial_rotary_factor": 0.5,
        "rotary_emb_base": 10000,
        "rope_theta": 1e4,
    }
    path.write_text(json.dumps(raw | both))
    assert regard.load(tmp_path).config == config
    path.write_text(json.dumps(raw | both | {"rope_theta": 500.0}))
    with pytest.raises(FileError, match="rotary_emb_base is 10000 and rope_theta is 500"):
        regard.load(tmp_path)
    path.write_text(json.dumps(raw))
    assert regard.load(tmp_path).config.rotary_pct == 0.25


# Negative controls.


def one_after_the_other(network: Any) -> None:
    for i, block in enumerate(network.layers):
        parts = (
            block.attention,
            block.feed_forward,
            block.attention_residual,
            block.feed_forward_residual,
        )
        network.layers[i] = Block(*parts)


def one_norm(network: Any) -> None:
    """Both sublayers behind the first norm, as in GPT-J."""
    for block in network.layers:
        block.feed_forward_residual.norm = block.attention_residual.norm


EVERY = slice(None)
WRONG = [
    changes.head_by_head,
    changes.rotate(EVERY, D),
    changes.rotate(EVERY, D, rotary_dim=4),
    changes.rotate(EVERY, D, rotary_dim=8, layout="interleaved"),
    changes.rotate(EVERY, D, 500.0, rotary_dim=8),
    one_after_the_other,
    one_norm,
    changes.norms_swapped,
    changes.activation(nn.SiLU()),
    changes.each("scale of the model", scale=48**-0.5),
]


def test_wrong_variants_are_far(tmp_path: Path) -> None:
    model = theirs("GPTNeoX", SMALL)
    mine = regard.load(saved(model, tmp_path))
    for change in WRONG:
        assert_differs(mine, model, change, start=1000)
    changes.assert_other_gelu(mine, model)
