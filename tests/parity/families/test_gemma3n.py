"""Gemma 3n of transformers, saved by it and loaded here: streams, embeddings for layers, a low-rank
branch, sparse activations, shared keys and values; wrong ones must be far.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

import regard
from regard.errors import ArgumentError
from regard.inspect import explain, record
from regard.masks import Causal
from regard.models.families import family
from regard.models.model import Model
from regard.nn.blocks.feed_forward import GaussianTopK
from regard.positions import Rotary
from tests.parity.families.cases import Case, parity_tests
from tests.parity.families.changes import put, swap, zeros
from tests.parity.families.harness import assert_refused, saved, without

gemma3n_text = family("gemma3n_text")

H, G, D, W = 6, 2, 8, 9
KINDS = ["sliding_attention", "full_attention"] * 3
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": [40] * 6,
    "num_hidden_layers": 6,
    "num_attention_heads": H,
    "num_key_value_heads": G,
    "head_dim": D,
    "sliding_window": W,
    "layer_types": KINDS,
    "max_position_embeddings": 4096,
    "vocab_size_per_layer_input": 90,  # some ids have no row of their own
    "hidden_size_per_layer_input": 10,
    "altup_num_inputs": 3,
    "num_kv_shared_layers": 2,
    "laurel_rank": 5,
    "activation_sparsity_pattern": [0.8, 0.5, 0.0, 0.0, 0.0, 0.0],
    "pad_token_id": 0,
}


def other_embedding_of_the_layer(network: Any) -> None:
    for block in network.layers:
        block.index = (block.index + 1) % len(network.layers)


def row_of_any_id(network: Any) -> None:
    """An id without a row of its own reads row 1."""
    network.embed.layer_embedding.weight.data[0] = network.embed.layer_embedding.weight.data[1]


def prediction_transposed(network: Any) -> None:
    for block in network.layers:
        weight = block.altup.prediction.weight
        weight.data = weight.data.unflatten(0, (3, 3)).transpose(0, 1).flatten(0, 1)


def one_base(network: Any) -> None:
    for block in network.layers:
        block.attention.project.q.steps[-1] = Rotary(D, 1e4)


GEMMA3N = Case(
    "Gemma3n",
    SMALL,
    (
        zeros("embed.to_streams.*.weight"),
        other_embedding_of_the_layer,
        row_of_any_id,
        zeros("layers.*.laurel.right.weight"),
        zeros("layers.*.altup.correction.weight"),
        prediction_transposed,
        put("layers.[01].feed_forward", activation=nn.GELU("tanh")),
        put("layers.0.feed_forward.activation", sparsity=0.9),
        put("layers.[0-3].attention.project.v", steps=nn.ModuleList()),
        put("", memory_from=(None, None, None, None, 3, 2)),
        put("", memory_from=(None, None, None, None, 0, 1), _lenders=frozenset({0, 1})),
        put("layers.4.attention", mask=Causal()),
        one_base,
        put("head", cap=1.0),
        swap("layers.*.attention_residual", "norm", "after"),
    ),
    start=1000,
    kind="TextConfig",
)
CASES: dict[str, Case] = {
    "gemma3n": GEMMA3N,
    "no scale, nothing shared, biases, two streams": GEMMA3N._replace(
        keys=SMALL
        | {
            "altup_correct_scale": False,
            "num_kv_shared_layers": 0,
            "attention_bias": True,
            "altup_num_inputs": 2,
            "activation_sparsity_pattern": [0.0] * 6,
        },
        wrong=(),
    ),
}


test_every_family, test_wrong_variants_are_far = parity_tests(CASES, keep=1, keep_wrong=1)


def test_the_language_model_of_a_folder_with_pictures(tmp_path: Path) -> None:
    """Other names, towers that are not read, and maps of layers that share those of others."""
    _, mine = GEMMA3N.load(tmp_path)
    file, config = tmp_path / "model.safetensors", tmp_path / "config.json"
    stored, raw = load_file(file), json.loads(config.read_text())
    renamed = {n.replace("model.", "model.language_model.", 1): x for n, x in stored.items()}
    renamed["model.vision_tower.a.weight"] = torch.zeros(2)
    renamed["model.embed_audio.b.weight"] = torch.zeros(2)
    for part in ("k_proj", "v_proj", "k_norm"):
        renamed[f"model.language_model.layers.5.self_attn.{part}.weight"] = torch.zeros(2, 2)
    save_file(renamed, file)
    outer = {"model_type": "gemma3n", "vision_config": {}, "audio_config": {}, "audio_token_id": 4}
    config.write_text(json.dumps(outer | {"text_config": raw}))
    whole = regard.load(tmp_path, kind=Model)
    ids = torch.tensor([[3, 95, 5, 6]])
    assert whole(ids).equal(mine(ids))
    lacking = "model.language_model.layers.3.self_attn.k_proj.weight"
    message = r"layers\.3\.self_attn\.k_proj\.weight"
    assert_refused(tmp_path, message, without(renamed, lacking))


def test_what_cannot_be_represented_is_refused(tmp_path: Path) -> None:
    saved(GEMMA3N.model(), tmp_path)
    for change, message in (
        ({"altup_active_idx": 1}, "altup_active_idx is 1; only 0"),
        ({"activation_sparsity_pattern": [0.5]}, "has length 1, and num_hidden_layers is 6"),
        ({"activation_sparsity_pattern": [1.0] * 6}, "activation_sparsity_pattern"),
        ({"num_kv_shared_layers": 5}, "no layer before 1 has the kind 'full_attention'"),
    ):
        assert_refused(tmp_path, message, **change)
    with pytest.raises(ArgumentError, match="sparsity"):
        GaussianTopK(1.0, nn.ReLU())


def test_generating_recording_and_explaining() -> None:
    tokenizer = regard.load("tiny").tokenizer
    sizes = SMALL | {"vocab_size": tokenizer.vocab_size, "intermediate_size": 40}
    sizes = {k: v for k, v in sizes.items() if k != "pad_token_id"}
    patterns = {k: tuple(sizes.pop(k)) for k in ("layer_types", "activation_sparsity_pattern")}
    network = gemma3n_text.build(config := gemma3n_text.config(**sizes, **patterns)).eval()
    make = torch.Generator().manual_seed(5)
    for parameter in network.parameters():
        parameter.data.normal_(generator=make).mul_(parameter.shape[-1] ** -0.5)
    model = Model(network.requires_grad_(False), tokenizer, config, eos_ids=[])
    text = "to be or not to be that is"
    assert "".join(model.generate(text, max_tokens=4))
    found = record(model, text)
    assert found.sound
    assert len(found.places) == 6
    for layer in (1, 4):
        assert explain(model, text, layer=layer, head=2).check < 1e-3
