"""Gemma 3 models of transformers, its text and the language model of the one that sees pictures,
loaded here.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import regard
from regard.errors import FileError
from tests.parity.families import changes
from tests.parity.families.harness import (
    LENGTH,
    assert_decoder,
    assert_differs,
    assert_near,
    draw,
    ids_of,
    saved,
    transformers,
)
from tests.parity.families.published import assert_saved

W, D = 6, 8
# frequencies 4^-i / 8 and 2^-i, whose angles their fp32 holds exactly
GLOBAL, LOCAL = 256.0, 16.0
SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": D,
    "max_position_embeddings": 64,
    "sliding_window": W,
    "query_pre_attn_scalar": 3,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}
ROPE: dict[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": GLOBAL},
    "sliding_attention": {"rope_type": "default", "rope_theta": LOCAL},
}


def gemma3(change: dict[str, Any]) -> Any:
    config = transformers.Gemma3TextConfig(**SMALL | {"rope_parameters": ROPE} | change)
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForCausalLM(config).eval().requires_grad_(False)
    draw(model, 3)
    return model


CHANGES: dict[str, dict[str, Any]] = {
    "linear on global layers": {},
    "every sixth layer sees all": {
        "layer_types": None,
        "num_hidden_layers": 7,
        "rope_parameters": None,
    },
    "capped logits, biases, untied": {
        "final_logit_softcapping": 3.0,
        "attention_bias": True,
        "tie_word_embeddings": False,
    },
}


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", CHANGES)
def test_gemma3(name: str, tmp_path: Path) -> None:
    model = gemma3(CHANGES[name])
    deep = model.config.num_hidden_layers > 3
    mine = assert_decoder(model, tmp_path, start=0 if deep else 1000, length=24 if deep else LENGTH)
    assert_saved(mine, model, tmp_path)


def test_the_older_form_of_the_config(tmp_path: Path) -> None:
    """As files on the hub have it: the base of local layers at the top level, a number for the
    pattern.
    """
    model = gemma3(
        {"layer_types": ["sliding_attention", "full_attention"] * 2, "num_hidden_layers": 4}
    )
    path = saved(model, tmp_path) / "config.json"
    raw = json.loads(path.read_text())
    for key in ("rope_parameters", "layer_types", "_sliding_window_pattern"):
        del raw[key]
    raw |= {
        "rope_theta": GLOBAL,
        "rope_local_base_freq": LOCAL,
        "sliding_window_pattern": 2,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    path.write_text(json.dumps(raw))
    mine = regard.load(tmp_path)
    ids = ids_of(model)
    assert_near(mine(ids), model(input_ids=ids).logits)
    assert mine.config.windows() == (W, None, W, None)


def test_a_folder_that_sees_pictures(tmp_path: Path) -> None:
    """Its language model is read; what sees is left where it is."""
    vision = {
        "model_type": "siglip_vision_model",
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": 28,
        "patch_size": 14,
    }
    text = SMALL | {"rope_parameters": ROPE}
    config = transformers.Gemma3Config(
        text_config=text, vision_config=vision, mm_tokens_per_image=4
    )
    config._attn_implementation = "eager"
    model = transformers.Gemma3ForConditionalGeneration(config).eval().requires_grad_(False)
    draw(model, 3)
    mine = regard.load(saved(model, tmp_path))
    stored = load_file(tmp_path / "model.safetensors")
    assert any("vision_tower" in name for name in stored)
    ids = ids_of(model)
    assert_near(mine(ids), model(input_ids=ids).logits)
    again = tmp_path / "text"
    again.mkdir()
    regard.models.save.save(mine.decoder, mine.config, again)
    assert json.loads((again / "config.json").read_text())["model_type"] == "gemma3_text"
    assert torch.equal(regard.load(again)(ids), mine(ids))


REFUSED = {
    "text_config is None; it must be an object with the language model's keys": {
        "model_type": "gemma3"
    },
    "num_hidden_layers is 1000000000, and the folder has": {
        "model_type": "gemma3",
        "text_config": {"num_hidden_layers": 10**9, "sliding_window_pattern": 6},
    },
    "rope_parameters.sliding_attention has the scaling": {
        "rope_parameters": dict.fromkeys(ROPE, ROPE["full_attention"]),
    },
    "use_bidirectional_attention is True; only None or False": {
        "use_bidirectional_attention": True
    },
    "layer_types\\[1\\] is 'full_attention', and sliding_window_pattern 3": {
        "sliding_window_pattern": 3
    },
    "query_pre_attn_scalar is -1.0; it must be above 0": {"query_pre_attn_scalar": -1.0},
    "final_logit_softcapping is -2.0; it must be above 0": {"final_logit_softcapping": -2.0},
    "attn_logit_softcapping is 50.0; only None is supported": {"attn_logit_softcapping": 50.0},
    "rope_local_base_freq is -2.0; it must be above 1": {
        "rope_theta": None,
        "rope_parameters": None,
        "rope_local_base_freq": -2.0,
    },
}


def test_what_is_refused(tmp_path: Path) -> None:
    path = saved(gemma3({}), tmp_path) / "config.json"
    raw = json.loads(path.read_text())
    for message, change in REFUSED.items():
        path.write_text(json.dumps(raw | change))
        with pytest.raises(FileError, match=message):
            regard.load(tmp_path)


# Negative controls.


def norm_behind_rotary(network: Any) -> None:
    for attention in changes.attentions(network):
        for part in (attention.project.q, attention.project.k):
            part.steps = torch.nn.ModuleList(reversed(part.steps))


def norms_of_queries_and_keys_swapped(network: Any) -> None:
    for attention in changes.attentions(network):
        q, k = attention.project.q.steps, attention.project.k.steps
        q[0], k[0] = k[0], q[0]


def head_norms_without_the_one(network: Any) -> None:
    for attention in changes.attentions(network):
        for part in (attention.project.q, attention.project.k):
            part.steps[0].weight.data -= 1


LINEAR = regard.positions.LinearScaling(8.0)
WRONG = [
    changes.rotate(slice(1, 2), D, LOCAL),
    changes.rotate(slice(0, 3, 2), D, GLOBAL, scaling=LINEAR),
    changes.rotate(slice(1, 2), D, GLOBAL),
    changes.rotate(slice(0, 3, 2), D, LOCAL, scaling=LINEAR),
    norm_behind_rotary,
    norms_of_queries_and_keys_swapped,
    head_norms_without_the_one,
    changes.windows(W + 1, None, W + 1),
    changes.windows(None, W, None),
    changes.windows(W, W, W),
    changes.each("scale of the head", scale=None),
    changes.without_the_one,
    changes.other_groups,
    changes.interleave,
]


def test_wrong_variants_are_far(tmp_path: Path) -> None:
    model = gemma3({})
    mine = regard.load(saved(model, tmp_path))
    for change in WRONG:
        assert_differs(mine, model, change, start=1000)
