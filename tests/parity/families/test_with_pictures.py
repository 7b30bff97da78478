"""Models that also see, of transformers, saved by it: their language model is read, what sees is
left where it is, and the language model alone can be saved.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from safetensors.torch import load_file

import regard
from regard.configs.reader import parse, sizes_config
from regard.errors import ArgumentError
from regard.models.families import family
from regard.models.model import Model
from regard.models.save import save
from tests.parity.families import (
    test_deepseek,
    test_gated_delta_hybrids,
    test_gemma,
    test_gemma4,
    test_llama4,
    test_qwen4_exp,
    test_step,
)
from tests.parity.families.harness import assert_near, ids_of, saved, theirs
from tests.parity.families.test_llama_relatives import HEAD_DIM, MINISTRAL, SIZES

SIGHT: dict[str, Any] = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "image_size": 28,
    "patch_size": 14,
}
QWEN_SIGHT = {
    "depth": 1,
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_heads": 2,
    "out_hidden_size": 36,
    "num_position_embeddings": 4,
    "deepstack_visual_indexes": [],
}
AXES = {
    "rope_type": "default",
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.25,
    "mrope_section": [1, 1, 0],
    "mrope_interleaved": True,
}
QWEN = {name: case.keys for name, case in test_gated_delta_hybrids.CASES.items()}


class Seeing(NamedTuple):
    """A class of transformers, the keys of its text, of what sees, the text's name, and a part of
    the names of tensors that are not read.
    """

    name: str
    text: dict[str, Any]
    sight: dict[str, Any]
    saved_as: str
    tower: str = "vision_tower"
    keys: dict[str, Any] = {}


KIMI = Seeing(
    "Kimi_K25",
    {"model_type": "deepseek_v3", **test_deepseek.SMALL},
    {
        **{k: v for k, v in SIGHT.items() if k != "image_size"},
        **dict.fromkeys(("pos_emb_height", "pos_emb_width", "pos_emb_time"), 2),
    },
    "deepseek_v3",
    keys={"tie_word_embeddings": False, "projection_hidden_size": 16},
)
PIXTRAL = SIGHT | {"model_type": "pixtral", "head_dim": 8}
CASES = {
    "gemma3": Seeing(
        "Gemma3", test_gemma.THIRD, SIGHT, "gemma3_text", keys={"mm_tokens_per_image": 4}
    ),
    "gemma4": Seeing(
        "Gemma4",
        test_gemma4.SMALL,
        SIGHT | {"head_dim": 8, "num_key_value_heads": 2, "global_head_dim": 8},
        "gemma4_text",
    ),
    "llama4": Seeing(
        "Llama4",
        test_llama4.SIZES,
        SIGHT
        | dict.fromkeys(("vision_output_dim", "projector_input_dim", "projector_output_dim"), 16),
        "llama4_text",
        "vision_model",
    ),
    "ministral3": Seeing(
        "Mistral3",
        {"model_type": "ministral3", **SIZES, **HEAD_DIM, "rope_parameters": MINISTRAL},
        PIXTRAL,
        "ministral3",
    ),
    "mistral small 3.1": Seeing(
        "Mistral3",
        {"model_type": "mistral", **SIZES, **HEAD_DIM, "sliding_window": None},
        PIXTRAL,
        "ministral3",
    ),
    "mistral small 4": Seeing(
        "Mistral3",
        {
            "model_type": "mistral4",
            **test_deepseek.SMALL,
            "rope_parameters": test_deepseek.YARN | {"llama_4_scaling_beta": 0.1},
        },
        PIXTRAL,
        "mistral4",
    ),
    "kimi k2.5": KIMI,
    "kimi k2.5, tied": KIMI._replace(keys={"projection_hidden_size": 16}),
    "step3p7": Seeing("Step3p7", test_step.TEXT, SIGHT, "step3p5", "vision_model"),
    "qwen3_5": Seeing(
        "Qwen3_5",
        QWEN["qwen3_5_text"] | {"rope_parameters": AXES},
        QWEN_SIGHT,
        "qwen3_5_text",
        "visual",
    ),
    "qwen3_5_moe": Seeing(
        "Qwen3_5Moe",
        QWEN["qwen3_5_moe_text"] | {"rope_parameters": AXES},
        QWEN_SIGHT,
        "qwen3_5_moe_text",
        "visual",
    ),
    "qwen4_exp": Seeing("Qwen4Exp", test_qwen4_exp.SIZES, QWEN_SIGHT, "qwen4_exp_text", "visual"),
}


@pytest.mark.full(keep=["gemma3", "ministral3"])
@pytest.mark.parametrize("name", CASES)
def test_the_language_model_of_a_folder_that_sees(name: str, tmp_path: Path) -> None:
    case = CASES[name]
    keys = {"text_config": case.text, "vision_config": case.sight, **case.keys}
    model = theirs(case.name, keys, head="ForConditionalGeneration")
    mine = regard.load(saved(model, tmp_path), kind=Model)
    assert any(case.tower in stored for stored in load_file(tmp_path / "model.safetensors"))
    raw = json.loads((tmp_path / "config.json").read_text())
    assert sizes_config(raw).model_types[0] == case.saved_as
    ids = ids_of(model, length=12)  # fewer roundings: theirs cannot run all experts in fp64
    assert_near(mine(ids), model(input_ids=ids, use_cache=False).logits)
    again = tmp_path / "text"
    again.mkdir()
    save(mine.decoder, mine.config, again)
    assert json.loads((again / "config.json").read_text())["model_type"] == case.saved_as
    assert torch.equal(regard.load(again, kind=Model)(ids), mine(ids))


def test_another_language_model_is_refused_by_name() -> None:
    raw = {"model_type": "mistral3", "text_config": {"model_type": "mistral5", **SIZES}}
    with pytest.raises(ArgumentError, match="'mistral5'"):
        parse(family("mistral3").config, raw)
