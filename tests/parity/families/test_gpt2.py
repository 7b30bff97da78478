"""GPT-2 models of transformers, saved by it and loaded here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError
from regard.span import Span
from tests.parity.families import changes
from tests.parity.families.harness import (
    LENGTH,
    assert_decoder,
    assert_differs,
    ids_of,
    saved,
    theirs,
)
from tests.parity.families.published import assert_saved

P = 48
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "n_embd": 36,
    "n_head": 3,
    "n_layer": 2,
    "n_positions": P,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
CHANGES: dict[str, dict[str, Any]] = {
    "plain": {},
    "scale by layer, untied, wide": {
        "scale_attn_by_inverse_layer_idx": True,
        "n_inner": 50,
        "tie_word_embeddings": False,
    },
    "no scale, relu": {"scale_attn_weights": False, "activation_function": "relu"},
    "erf": {"activation_function": "gelu", "n_head": 6},
}


def gpt2(name: str = "plain") -> Any:
    return theirs("GPT2", SMALL | CHANGES[name], head="LMHeadModel")


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CHANGES)
def test_gpt2(name: str, tmp_path: Path) -> None:
    model = gpt2(name)
    mine = assert_decoder(model, tmp_path)
    assert_saved(mine, model, tmp_path)
    if name == "erf":
        changes.assert_other_gelu(mine, model)


def test_another_order_of_rounding_is_the_same_model(tmp_path: Path) -> None:
    model = theirs("GPT2", SMALL | {"reorder_and_upcast_attn": True}, head="LMHeadModel")
    assert_decoder(model, tmp_path)


def test_names_of_the_hub(tmp_path: Path) -> None:
    """Without the prefix, and with the masks that older versions stored."""
    model = gpt2()
    ids = ids_of(model)
    exact = regard.load(saved(model, tmp_path))(ids)
    file = tmp_path / "model.safetensors"
    tensors = {k.removeprefix("transformer."): v for k, v in load_file(file).items()}
    for i in range(2):
        tensors[f"h.{i}.attn.bias"] = torch.ones(P, P).tril()[None, None]
        tensors[f"h.{i}.attn.masked_bias"] = torch.tensor(-1e4)
    file.unlink()
    save_file(tensors, file)
    assert torch.equal(regard.load(tmp_path)(ids), exact)


def test_there_are_no_positions_beyond_the_last(tmp_path: Path) -> None:
    mine = regard.load(saved(gpt2(), tmp_path))
    with pytest.raises(
        ArgumentError, match=f"position {P} has no vector: .* positions 0 to {P - 1}"
    ):
        mine(torch.full((1, P + 1), 3))
    caches = mine.new_caches()
    mine(torch.full((1, P), 3), caches=caches)
    with pytest.raises(ArgumentError, match=f"position {P} has no vector"):
        mine(torch.full((1, 1), 3), caches=caches)
    assert [len(cache) for cache in caches] == [P, P]


# Negative controls.


def untransposed(network: Any) -> None:
    """The square matrix [in, out] taken for [out, in]."""
    for attention in changes.attentions(network):
        attention.output.weight.data = attention.output.weight.data.T


def later_positions(network: Any) -> None:
    table = network.embed.positional.weight
    table.data = table.data.roll(-1, 0)


class Backwards(nn.Module):
    """Positions counted from the end."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, positions: Any) -> Tensor:
        found: Tensor = self.inner(Span(0, LENGTH))
        return found.flip(1)


def backwards(network: Any) -> None:
    network.embed.positional = Backwards(network.embed.positional)


def not_by_layer(network: Any) -> None:
    for attention in changes.attentions(network):
        attention.scale = 12**-0.5


def layers_from_zero(network: Any) -> None:
    for i, attention in enumerate(changes.attentions(network)):
        attention.scale = 12**-0.5 / max(i, 1)


WRONG = [
    untransposed,
    later_positions,
    backwards,
    changes.head_by_head,
    changes.keys_for_values,
    changes.norms_swapped,
    changes.each("no scale", scale=1.0),
    changes.each("scale of the model", scale=6.0**-1),
    changes.activation(nn.SiLU()),
]


def test_wrong_variants_are_far(tmp_path: Path) -> None:
    model = gpt2()
    mine = regard.load(saved(model, tmp_path))
    for change in WRONG:
        assert_differs(mine, model, change)
    changes.assert_other_gelu(mine, model)


def test_a_wrong_scale_by_layer_is_far(tmp_path: Path) -> None:
    model = gpt2("scale by layer, untied, wide")
    mine = regard.load(saved(model, tmp_path))
    for change in (not_by_layer, layers_from_zero):
        assert_differs(mine, model, change)
