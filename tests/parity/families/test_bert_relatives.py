"""RoBERTa, XLM-RoBERTa, CamemBERT and DistilBERT of transformers, saved by it and loaded here;
wrong variants of each must be far.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import FileError
from regard.models.save import save
from regard.models.text_encoder import TextEncoder
from tests.parity.families.harness import assert_far, assert_near, saved, theirs, transformers

LENGTH, PAD = 30, 1
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 40,
    "type_vocab_size": 1,
    "pad_token_id": PAD,
}
DISTIL: dict[str, Any] = {
    "vocab_size": 96,
    "dim": 36,
    "hidden_dim": 48,
    "n_layers": 2,
    "n_heads": 6,
    "max_position_embeddings": 40,
}
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "roberta": ("Roberta", SIZES),
    "xlm-roberta": ("XLMRoberta", SIZES),
    "camembert": ("Camembert", SIZES),
    "roberta, other padding": ("Roberta", SIZES | {"pad_token_id": 5}),
    "distilbert": ("DistilBert", DISTIL),
}


def ids_of(rows: int = 3) -> Tensor:
    make = torch.Generator().manual_seed(7)
    return torch.randint(6, 96, (rows, LENGTH), generator=make)


def both(case: str, folder: Path, head: str) -> tuple[Any, TextEncoder]:
    name, sizes = CASES[case]
    model = theirs(name, sizes, head=head)
    return model, regard.load(saved(model, folder), kind=TextEncoder)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_states_and_logits(case: str, tmp_path: Path) -> None:
    model, mine = both(case, tmp_path, "ForMaskedLM")
    ids = ids_of()
    exact = model(input_ids=ids, output_hidden_states=True)
    states = mine.hidden(ids)
    assert_near(states, exact.hidden_states[-1])
    assert_near(mine.network.logits(states), exact.logits)
    copied = tmp_path / "again"
    copied.mkdir()
    save(mine.network, mine.config, copied)
    kind = getattr(transformers, type(model).__name__)
    again = kind.from_pretrained(copied, attn_implementation="eager").eval()
    assert torch.equal(again(input_ids=ids).logits, model(input_ids=ids).logits)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_padding_changes_nothing(case: str, tmp_path: Path) -> None:
    """Theirs has a mask and padding ids on the right; ours has positions, on either side."""
    model, mine = both(case, tmp_path, "ForMaskedLM")
    ids, pad = ids_of(1)[:, :11], mine.config.pad_token_id if "distil" not in case else 0
    padded = torch.cat([ids, torch.full((1, 4), pad)], 1)
    mask = torch.tensor([[1] * 11 + [0] * 4])
    exact = model(input_ids=padded, attention_mask=mask, output_hidden_states=True)
    positions = torch.tensor([[*range(11), -1, -1, -1, -1]])
    assert_near(mine.hidden(padded, positions)[:, :11], exact.hidden_states[-1][:, :11])
    left = torch.cat([torch.full((1, 4), pad), ids], 1)
    at = torch.tensor([[-1, -1, -1, -1, *range(11)]])
    assert_near(mine.hidden(left, at)[:, 4:], exact.hidden_states[-1][:, :11])


def shifted(network: Any) -> None:
    network.encoder.embed.positional.offset -= 1


def norms_swapped(network: Any) -> None:
    for block in network.encoder.layers:
        first, second = block.attention_residual, block.feed_forward_residual
        first.norm, second.norm = second.norm, first.norm


def tanh_gelu(network: Any) -> None:
    for block in network.encoder.layers:
        block.feed_forward.activation = nn.Tanh()


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("change", [shifted, norms_swapped, tanh_gelu])
def test_wrong_variants_are_far(case: str, change: Callable[[Any], None], tmp_path: Path) -> None:
    model, mine = both(case, tmp_path, "Model")
    ids = ids_of()
    exact = model(input_ids=ids).last_hidden_state
    network = copy.deepcopy(mine.network)
    if change is shifted and "distil" in case:
        table = network.encoder.embed.positional.weight
        table.data = table.data.roll(1, 0)
    else:
        change(network)
    assert_near(mine.network.encoder(ids), exact)
    assert_far(network.encoder(ids), exact)


def test_without_rows_for_positions(tmp_path: Path) -> None:
    name, sizes = CASES["roberta"]
    folder = saved(theirs(name, sizes, head="Model"), tmp_path)
    text = (folder / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"pad_token_id": 1', '"pad_token_id": 39'))
    with pytest.raises(FileError, match="of which 40 rows in front are unused"):
        regard.load(folder)
