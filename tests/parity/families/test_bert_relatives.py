"""RoBERTa, XLM-RoBERTa, CamemBERT, DistilBERT and ModernBERT of transformers, saved by it and
loaded here; wrong variants of each must be far.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import regard
from regard.masks import Causal, Window
from regard.models.save import save
from regard.models.text_encoder import TextEncoder
from regard.positions import Rotary
from tests.parity.families import changes
from tests.parity.families.changes import Change, put, swap
from tests.parity.families.harness import (
    assert_far,
    assert_near,
    assert_refused,
    saved,
    theirs,
    transformers,
    without,
)

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
MODERN: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 5,  # layers 0 and 3 are global
    "num_attention_heads": 6,
    "max_position_embeddings": 64,
    "local_attention": 8,
    "pad_token_id": 1,
    "bos_token_id": 0,
    "eos_token_id": 2,
    "cls_token_id": 0,
    "sep_token_id": 2,
}


def windows(make: Callable[[], Any]) -> Change:
    def change(network: Any) -> None:
        for block in network.encoder.layers:
            if block.attention.mask is not None:
                block.attention.mask = make()

    return change


def rotated(local: float, full: float) -> Change:
    def change(network: Any) -> None:
        for block in network.encoder.layers:
            base = full if block.attention.mask is None else local
            for part in (block.attention.project.q, block.attention.project.k):
                part.steps[-1] = Rotary(6, base)

    return change


def shifted(network: Any) -> None:
    network.encoder.embed.positional.offset -= 1


def rolled(network: Any) -> None:
    table = network.encoder.embed.positional.weight
    table.data = table.data.roll(1, 0)


class Case(NamedTuple):
    """A family: its name in transformers, the keys of its config, and its wrong variants."""

    name: str
    keys: dict[str, Any]
    wrong: dict[str, Change] = {}


EVERY: dict[str, Change] = {
    "norms swapped": swap(
        "encoder.layers.*", "attention_residual.norm", "feed_forward_residual.norm"
    ),
    "another activation": put("encoder.layers.*.feed_forward", activation=nn.Tanh()),
}
WRONG = EVERY | {"shifted": shifted}
CASES: dict[str, Case] = {
    "roberta": Case("Roberta", SIZES, WRONG),
    "xlm-roberta": Case("XLMRoberta", SIZES, WRONG),
    "camembert": Case("Camembert", SIZES, WRONG),
    "roberta, other padding": Case("Roberta", SIZES | {"pad_token_id": 5}, WRONG),
    "distilbert": Case("DistilBert", DISTIL, EVERY | {"shifted": rolled}),
    "modernbert": Case(
        "ModernBert",
        MODERN,
        {
            "one key less": windows(lambda: Window(4, ahead=3)),
            "half the window": windows(lambda: Window(8, ahead=0)),
            "causal": windows(lambda: Causal() & Window(5)),
            "no window": windows(lambda: None),
            "one base": rotated(1e4, 1e4),
            "bases swapped": rotated(1.6e5, 1e4),
            "interleaved": changes.interleave,
            "gate swapped": swap("encoder.layers.*.feed_forward", "gate", "up"),
            "norm in front": put(
                "encoder.layers.0.attention_residual", norm=nn.LayerNorm(36).requires_grad_(False)
            ),
            "no last norm": put("encoder", norm=nn.Identity()),
            "keys for values": swap("encoder.layers.*.attention.project", "k.linear", "v.linear"),
        },
    ),
    "modernbert, odd window": Case("ModernBert", MODERN | {"local_attention": 9}),
    "modernbert, other layers": Case(
        "ModernBert",
        MODERN | {"layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]},
    ),
    "modernbert, biases": Case(
        "ModernBert",
        MODERN
        | {
            "norm_bias": True,
            "attention_bias": True,
            "mlp_bias": True,
            "classifier_bias": True,
            "norm_eps": 0.001,
        },
    ),
    "modernbert, other activations, own head": Case(
        "ModernBert",
        MODERN
        | {
            "hidden_activation": "silu",
            "classifier_activation": "relu",
            "decoder_bias": False,
            "tie_word_embeddings": False,
        },
    ),
}


def ids_of(rows: int = 3) -> Tensor:
    make = torch.Generator().manual_seed(7)
    return torch.randint(6, 96, (rows, LENGTH), generator=make)


def both(case: str, folder: Path, head: str = "ForMaskedLM") -> tuple[Any, TextEncoder]:
    model = theirs(CASES[case].name, CASES[case].keys, head=head)
    return model, regard.load(saved(model, folder), kind=TextEncoder)


@pytest.mark.full(keep=["roberta", "modernbert"])
@pytest.mark.parametrize("case", CASES)
def test_states_logits_and_saving(case: str, tmp_path: Path) -> None:
    model, mine = both(case, tmp_path)
    ids = ids_of()
    exact = model(input_ids=ids)
    states = mine.hidden(ids)
    assert_near(states, model.base_model(input_ids=ids).last_hidden_state)
    assert_near(mine.network.logits(states), exact.logits)
    copied = tmp_path / "again"
    copied.mkdir()
    save(mine.network, mine.config, copied)
    kind = getattr(transformers, type(model).__name__)
    again = kind.from_pretrained(copied, attn_implementation="eager").eval()
    assert torch.equal(again(input_ids=ids).logits, exact.logits)


@pytest.mark.full(keep=["roberta", "modernbert"])
@pytest.mark.parametrize("case", CASES)
def test_padding_changes_nothing(case: str, tmp_path: Path) -> None:
    """Theirs has a mask and padding ids on the right; ours has positions, on either side."""
    model, mine = both(case, tmp_path)
    n = 21 if "modern" in case else 11
    pad = 0 if "distil" in case else mine.config.pad_token_id
    ids, empty = ids_of(1)[:, :n], torch.full((1, 4), -1)
    padding, at = torch.full((1, 4), pad), torch.arange(n)[None]
    padded, mask = torch.cat([ids, padding], 1), torch.tensor([[1] * n + [0] * 4])
    exact = model.base_model(input_ids=padded, attention_mask=mask).last_hidden_state[:, :n]
    assert_near(mine.hidden(padded, torch.cat([at, empty], 1))[:, :n], exact)
    left = torch.cat([padding, ids], 1)
    assert_near(mine.hidden(left, torch.cat([empty, at], 1))[:, 4:], exact)
    assert_near(model.base_model(input_ids=ids).last_hidden_state, exact)


@pytest.mark.full(keep=["roberta", "modernbert"])
@pytest.mark.parametrize("case", [name for name, case in CASES.items() if case.wrong])
def test_wrong_variants_are_far(case: str, tmp_path: Path) -> None:
    model, mine = both(case, tmp_path, "Model")
    ids = ids_of()
    exact = model(input_ids=ids).last_hidden_state
    assert_near(mine.network.encoder(ids), exact)
    for change in CASES[case].wrong.values():
        network = copy.deepcopy(mine.network)
        change(network)
        assert_far(network.encoder(ids), exact)
    if "modern" in case:  # the negative control of those with other bases
        network = copy.deepcopy(mine.network)
        rotated(1e4, 1.6e5)(network)
        assert_near(network.encoder(ids), exact)


def test_without_rows_for_positions(tmp_path: Path) -> None:
    folder = saved(theirs("Roberta", SIZES, head="Model"), tmp_path)
    assert_refused(folder, "of which 40 rows in front are unused", pad_token_id=39)


def test_the_base_model_and_older_files(tmp_path: Path) -> None:
    """The released config.json has a period and two bases at the top level."""
    model, mine = both("modernbert", tmp_path, head="Model")
    ids = ids_of()
    exact = model(input_ids=ids).last_hidden_state
    assert mine.network.head is None
    assert_near(mine.hidden(ids), exact)
    file = tmp_path / "config.json"
    raw = json.loads(file.read_text())
    new = {key: raw.pop(key) for key in ("layer_types", "rope_parameters")}
    old = {
        "global_attn_every_n_layers": 3,
        "global_rope_theta": 160000.0,
        "local_rope_theta": 10000.0,
        "layer_norm_eps": 1e-5,
        "position_embedding_type": "absolute",
    }
    file.write_text(json.dumps(raw | old))
    assert regard.load(tmp_path, kind=TextEncoder).hidden(ids).equal(mine.hidden(ids))
    message = "layer_types is not what global_attn_every_n_layers 2"
    assert_refused(tmp_path, message, **new | {"global_attn_every_n_layers": 2})
    scaled = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    file.write_text(json.dumps(raw))
    assert_refused(tmp_path, "modernbert supports only rope_theta", rope_parameters=scaled)


def test_loading_modernbert_is_strict(tmp_path: Path) -> None:
    both("modernbert", tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    # the classifier of a sequence is another head
    more = {"classifier.weight": torch.zeros(2, 36)}
    assert_refused(tmp_path, r"classifier\.weight", stored | more)
    part = "layers.2.mlp.Wi"
    assert_refused(tmp_path, r"model\.layers\.2\.mlp\.Wi\.weight", without(stored, part))
    # the first layer has no norm, so that a stored one has no place
    more = {"model.layers.0.attn_norm.weight": torch.ones(36)}
    assert_refused(tmp_path, r"model\.layers\.0\.attn_norm\.weight", stored | more)
