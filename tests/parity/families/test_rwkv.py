"""RWKV-4 of transformers, saved by it and loaded here; wrong variants must be far."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from regard.models.save import save
from tests.parity.families.changes import norms_swapped
from tests.parity.families.harness import (
    assert_decoder,
    assert_differs,
    ids_of,
    saved,
    theirs,
    transformers,
)
from tests.parity.families.state_space_changes import part, zero

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 24,
    "num_hidden_layers": 3,
    "attention_hidden_size": 20,
    "intermediate_size": 28,
    "context_length": 64,
    "rescale_every": 2,
    "layer_norm_epsilon": 1e-2,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}


def shares_exchanged(network: Any) -> None:
    """The share of the token before for that of the present one."""
    for block in network.layers:
        for mix in (block.attention.project.mix_k, block.feed_forward.mix_k):
            mix.data.copy_(1 - mix.data)


def one_epsilon(network: Any) -> None:
    """As without `rescale_every`."""
    for norm in (network.norm, *(b.attention_residual.norm for b in network.layers)):
        norm.eps = 1e-2


def no_norm_of_the_embedding(network: Any) -> None:
    network.embed.norm.weight.data.fill_(1)


def no_gate(network: Any) -> None:
    for block in network.layers:
        block.feed_forward.receptance.weight.data.zero_()


WRONG = (
    part("rule", zero("decay")),
    part("rule", zero("bonus")),
    shares_exchanged,
    one_epsilon,
    no_norm_of_the_embedding,
    no_gate,
    norms_swapped,
)


def test_rwkv(tmp_path: Path) -> None:
    model = theirs("Rwkv", SIZES)
    mine = assert_decoder(model, tmp_path)
    first, second = tmp_path / "first", tmp_path / "second"
    for folder in (first, second):
        folder.mkdir()
    save(mine.decoder, mine.config, first)
    again = regard.load(first)
    save(again.decoder, again.config, second)
    for name in ("config.json", "model.safetensors"):
        assert (first / name).read_bytes() == (second / name).read_bytes(), name
    # the model above has halved its own weights by now
    fresh, read = theirs("Rwkv", SIZES), transformers.RwkvForCausalLM.from_pretrained(first)
    ids = ids_of(model)
    assert torch.equal(*(m.eval()(input_ids=ids, use_cache=False).logits for m in (fresh, read)))


def test_wrong_variants_are_far(tmp_path: Path) -> None:
    model = theirs("Rwkv", SIZES)
    mine = regard.load(saved(model, tmp_path))
    for change in WRONG:
        assert_differs(mine, model, change)


def test_a_token_cannot_be_taken_back(tmp_path: Path) -> None:
    mine = regard.load(saved(theirs("Rwkv", SIZES), tmp_path))
    caches = mine.new_caches()
    mine(torch.arange(3, 7)[None], None, caches)
    with pytest.raises(regard.ArgumentError, match="a part of the sum cannot be removed"):
        caches[0].crop(2)
