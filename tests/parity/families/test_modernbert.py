"""ModernBERT of transformers, saved by it and loaded here: states, logits, padding, both rotary
bases and windows on both sides.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from regard.errors import FileError
from regard.masks import Causal, Window
from regard.models.save import save
from regard.models.text_encoder import TextEncoder
from regard.positions import Rotary
from tests.parity.families.harness import assert_far, assert_near, saved, theirs, transformers

LENGTH = 30
SMALL: dict[str, Any] = {
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
CASES: dict[str, dict[str, Any]] = {
    "released": {},
    "odd window": {"local_attention": 9},
    "other layers": {
        "layer_types": ["sliding_attention", "full_attention"] * 2 + ["full_attention"]
    },
    "biases": {
        "norm_bias": True,
        "attention_bias": True,
        "mlp_bias": True,
        "classifier_bias": True,
        "norm_eps": 1e-3,
    },
    "other activations, own head": {
        "hidden_activation": "silu",
        "classifier_activation": "relu",
        "decoder_bias": False,
        "tie_word_embeddings": False,
    },
}


def ids_of(rows: int = 3) -> Tensor:
    make = torch.Generator().manual_seed(7)
    return torch.randint(6, 96, (rows, LENGTH), generator=make)


def both(case: str, folder: Path, head: str = "ForMaskedLM") -> tuple[Any, TextEncoder]:
    model = theirs("ModernBert", SMALL | CASES[case], head=head)
    return model, regard.load(saved(model, folder), kind=TextEncoder)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("case", CASES)
def test_states_logits_and_saving(case: str, tmp_path: Path) -> None:
    model, mine = both(case, tmp_path)
    ids = ids_of()
    exact = model(input_ids=ids)
    states = mine.hidden(ids)
    assert_near(states, model.model(input_ids=ids).last_hidden_state)
    assert_near(mine.network.logits(states), exact.logits)
    copied = tmp_path / "again"
    copied.mkdir()
    save(mine.network, mine.config, copied)
    again = transformers.ModernBertForMaskedLM.from_pretrained(copied, attn_implementation="eager")
    assert torch.equal(again.eval()(input_ids=ids).logits, exact.logits)


def test_padding_on_either_side_changes_nothing(tmp_path: Path) -> None:
    model, mine = both("released", tmp_path)
    ids = ids_of(1)[:, :21]
    exact = model.model(input_ids=ids).last_hidden_state
    pad, empty = torch.full((1, 4), 1), torch.full((1, 4), -1)
    at = torch.arange(21)[None]
    assert_near(mine.hidden(torch.cat([ids, pad], 1), torch.cat([at, empty], 1))[:, :21], exact)
    assert_near(mine.hidden(torch.cat([pad, ids], 1), torch.cat([empty, at], 1))[:, 4:], exact)


def test_the_base_model_and_older_files(tmp_path: Path) -> None:
    """The released config.json has a period and two bases at the top level."""
    model, mine = both("released", tmp_path, head="Model")
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
    file.write_text(json.dumps(raw | old | new | {"global_attn_every_n_layers": 2}))
    with pytest.raises(FileError, match="layer_types is not what global_attn_every_n_layers 2"):
        regard.load(tmp_path)
    scaled = {"full_attention": {"rope_type": "linear", "factor": 2.0, "rope_theta": 1e4}}
    file.write_text(json.dumps(raw | {"rope_parameters": scaled}))
    with pytest.raises(FileError, match="modernbert supports only rope_theta"):
        regard.load(tmp_path)


def test_loading_is_strict(tmp_path: Path) -> None:
    both("released", tmp_path)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    # the classifier of a sequence is another head
    save_file(stored | {"classifier.weight": torch.zeros(2, 36)}, file)
    with pytest.raises(FileError, match=r"classifier\.weight"):
        regard.load(tmp_path)
    save_file({n: x for n, x in stored.items() if "layers.2.mlp.Wi" not in n}, file)
    with pytest.raises(FileError, match=r"model\.layers\.2\.mlp\.Wi\.weight"):
        regard.load(tmp_path)
    # the first layer has no norm, so that a stored one has no place
    save_file(stored | {"model.layers.0.attn_norm.weight": torch.ones(36)}, file)
    with pytest.raises(FileError, match=r"model\.layers\.0\.attn_norm\.weight"):
        regard.load(tmp_path)


# Negative controls: what must be told apart.


def windows(make: Callable[[], Any]) -> Callable[[Any], None]:
    def change(network: Any) -> None:
        for block in network.encoder.layers:
            if block.attention.mask is not None:
                block.attention.mask = make()

    return change


def rotated(local: float, full: float) -> Callable[[Any], None]:
    def change(network: Any) -> None:
        for block in network.encoder.layers:
            base = full if block.attention.mask is None else local
            for part in (block.attention.project.q, block.attention.project.k):
                part.steps[-1] = Rotary(6, base)

    return change


def interleaved(network: Any) -> None:
    for module in network.modules():
        if isinstance(module, Rotary):
            module.layout, module._last = "interleaved", None


def gate_swapped(network: Any) -> None:
    for block in network.encoder.layers:
        feed = block.feed_forward
        feed.gate, feed.up = feed.up, feed.gate


def norm_in_front(network: Any) -> None:
    network.encoder.layers[0].attention_residual.norm = nn.LayerNorm(36).requires_grad_(False)


def no_last_norm(network: Any) -> None:
    network.encoder.norm = nn.Identity()


def keys_for_values(network: Any) -> None:
    for block in network.encoder.layers:
        project = block.attention.project
        project.k.linear, project.v.linear = project.v.linear, project.k.linear


WRONG: dict[str, Callable[[Any], None]] = {
    "one key less": windows(lambda: Window(4, ahead=3)),
    "half the window": windows(lambda: Window(8, ahead=0)),
    "causal": windows(lambda: Causal() & Window(5)),
    "no window": windows(lambda: None),
    "one base": rotated(1e4, 1e4),
    "bases swapped": rotated(1.6e5, 1e4),
    "interleaved": interleaved,
    "gate swapped": gate_swapped,
    "norm in front": norm_in_front,
    "no last norm": no_last_norm,
    "keys for values": keys_for_values,
}


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, TextEncoder]:
    return both("released", tmp_path_factory.mktemp("modernbert"), "Model")


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("name", WRONG)
def test_wrong_variants_are_far(name: str, right: tuple[Any, TextEncoder]) -> None:
    model, mine = right
    ids = ids_of()
    exact = model(input_ids=ids).last_hidden_state
    network = copy.deepcopy(mine.network)
    assert_near(network.encoder(ids), exact)
    if name == "one base":  # "bases swapped" has the right ones the other way round
        rotated(1e4, 1.6e5)(network)
        assert_near(network.encoder(ids), exact)
    WRONG[name](network)
    assert_far(network.encoder(ids), exact)
