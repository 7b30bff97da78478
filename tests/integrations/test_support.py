"""A model class that does not take its attention from `AttentionInterface` is refused, or says once
that it never calls us.
"""

from __future__ import annotations

import importlib
import warnings
from typing import Any

import pytest
import torch

from regard import ArgumentError
from tests.integrations.families import ENDS, SIZES, WIDE, architectures, tokens, transformers

support = importlib.import_module("regard.integrations.transformers.supported_models")
SMALL = {
    "vocab_size": 48,
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "intermediate_size": 24,
}
REFUSED: dict[str, tuple[str, dict[str, Any], str]] = {
    "Mpt": (
        "MptForCausalLM",
        {"vocab_size": 48, "d_model": 32, "n_heads": 4, "n_layers": 1},
        "computes its attention itself",
    ),
    "Bloom": (
        "BloomForCausalLM",
        {"vocab_size": 48, "hidden_size": 32, "n_layer": 1, "n_head": 4},
        "computes its attention itself",
    ),
    "Longformer": (
        "LongformerModel",
        SMALL | {"attention_window": [4]},
        "computes its attention itself",
    ),
    "Falcon": ("FalconModel", SMALL, "from a table of names"),
    "SamVision": (
        "SamVisionModel",
        SMALL | {"image_size": 16, "patch_size": 4},
        "from a table of names",
    ),
}
SILENT: dict[str, tuple[str, dict[str, Any]]] = {
    "Deberta": ("DebertaModel", SMALL),
    "DebertaV2": ("DebertaV2Model", SMALL),
    "OpenAIGPT": ("OpenAIGPTLMHeadModel", WIDE),
    "XLNet": (
        "XLNetLMHeadModel",
        {"vocab_size": 48, "d_model": 32, "n_layer": 1, "n_head": 4, "d_inner": 24},
    ),
    "FNet": ("FNetModel", {x: SMALL[x] for x in SMALL if x != "num_attention_heads"}),
    "Funnel": (
        "FunnelBaseModel",
        {
            "vocab_size": 48,
            "d_model": 32,
            "n_head": 4,
            "d_head": 8,
            "d_inner": 24,
            "block_sizes": [1, 1],
        },
    ),
}


class MyLlama(transformers.LlamaModel):
    """A class of a user's own."""


class MyMpt(transformers.MptModel):
    """A class of a user's own, of an architecture that is refused."""


def config(name: str, settings: dict[str, Any], **more: Any) -> Any:
    return getattr(transformers, f"{name}Config")(**(ENDS | settings), **more)


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_would_misread_our_masks_is_refused_when_it_is_built(name: str) -> None:
    cls, settings, why = REFUSED[name]
    given = config(name, settings, attn_implementation="regard")
    message = (
        rf"{name}\w* (computes its attention itself|chooses its attention class from a "
        rf"table of names) .*use 'eager'.*architectures\(\).*docs/transformers\.md"
    )
    with pytest.raises(ArgumentError, match=message) as raised:
        getattr(transformers, cls)(given)
    assert why in str(raised.value)


@pytest.mark.parametrize("name", ["Mpt", "Longformer", "Falcon"])
def test_it_is_refused_when_it_is_switched_and_stays_as_it_was(name: str) -> None:
    cls, settings, _ = REFUSED[name]
    model = getattr(transformers, cls)(config(name, settings, attn_implementation="eager")).eval()
    with pytest.raises(ArgumentError, match=f"{name}Model"):
        model.set_attn_implementation("regard")
    assert {x.config._attn_implementation for x in model.modules() if hasattr(x, "config")} == {
        "eager"
    }
    with torch.no_grad():
        assert model(tokens(1, 8))[0].isfinite().all()


def test_from_config_and_from_pretrained_refuse_it(tmp_path: Any) -> None:
    given = config("Mpt", REFUSED["Mpt"][1])
    transformers.MptForCausalLM(given).save_pretrained(tmp_path)
    for build in (
        lambda: transformers.AutoModelForCausalLM.from_config(given, attn_implementation="regard"),
        lambda: transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path, attn_implementation="regard"
        ),
    ):
        with pytest.raises(ArgumentError, match="MptModel computes its attention itself"):
            build()
    again = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, attn_implementation="eager")
    assert again.config._attn_implementation == "eager"


@pytest.mark.full
def test_a_part_that_is_refused_refuses_the_whole_and_a_part_that_is_not_named_does_not() -> None:
    small = {
        "hidden_size": 32,
        "intermediate_size": 24,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
    }
    vision = small | {"image_size": 16, "patch_size": 8}
    given = transformers.LlavaConfig(
        vision_config=transformers.CLIPVisionConfig(**vision),
        text_config=transformers.XGLMConfig(
            vocab_size=48, d_model=32, attention_heads=4, ffn_dim=24, num_layers=1
        ),
        image_token_index=47,
    )
    given._attn_implementation = {"vision_config": "regard", "text_config": "eager"}
    model = transformers.LlavaForConditionalGeneration(given)
    assert model.model.vision_tower.config._attn_implementation == "regard"
    assert model.model.language_model.config._attn_implementation == "eager"
    for name in ("regard", {"text_config": "regard"}):
        with pytest.raises(ArgumentError, match="XGLMModel computes its attention itself"):
            model.set_attn_implementation(name)
        assert model.model.language_model.config._attn_implementation == "eager"


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", SILENT)
def test_a_class_that_never_calls_us_says_so_once(name: str, monkeypatch: Any) -> None:
    monkeypatch.setattr(support, "_warned", {})
    cls, settings = SILENT[name]
    given = config(name, settings, attn_implementation="regard")
    torch.manual_seed(0)
    with pytest.warns(
        UserWarning, match=rf"{name}\w* never calls .*eager.*nothing in it runs through regard"
    ) as told:
        model = getattr(transformers, cls)(given).eval()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        plain = getattr(transformers, cls)(
            config(name, settings, attn_implementation="eager")
        ).eval()
        getattr(transformers, cls)(given)
    with torch.no_grad():
        assert torch.equal(model(tokens(2, 6))[0], plain(tokens(2, 6))[0])


def test_what_is_served_is_built_and_switched_in_silence() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        given = transformers.LlamaConfig(**SIZES, attn_implementation="regard")
        model = transformers.LlamaForCausalLM(given)
        model.set_attn_implementation("eager")
        model.set_attn_implementation("regard")
        model.set_attn_implementation({"": "eager"})
    assert model.config._attn_implementation == "eager"


def test_other_implementations_pass_through_the_guard() -> None:
    model = transformers.MptModel(config("Mpt", REFUSED["Mpt"][1], attn_implementation="eager"))
    model.set_attn_implementation("eager")
    support.wrap_model_methods()  # a second time wraps nothing
    assert not hasattr(
        transformers.PreTrainedModel.set_attn_implementation.__wrapped__, "__wrapped__"
    )


def test_the_list_of_what_works() -> None:
    found = architectures()
    assert len(found) > 250
    assert {"llama", "gemma3_text", "gpt2", "bert", "t5", "whisper", "vit", "deepseek_v3"} <= set(
        found
    )
    assert not {"mpt", "bloom", "longformer", "deberta", "xlnet", "falcon", "gptj"} & set(found)


def test_masks_of_recurrent_layers_are_no_attention_masks() -> None:
    from transformers.models.mamba2.modeling_mamba2 import Mamba2Model

    assert support.attention_usage(Mamba2Model) == (False, False, False, False)


def test_a_class_of_ones_own_is_judged_by_what_it_inherits() -> None:
    assert support.attention_usage(MyLlama).interface
    assert not support.attention_usage(MyMpt).interface
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        MyLlama(transformers.LlamaConfig(**SIZES, attn_implementation="regard"))
    with pytest.raises(ArgumentError, match="MyMpt computes its attention itself"):
        MyMpt(config("Mpt", REFUSED["Mpt"][1], attn_implementation="regard"))


def test_a_class_without_source_is_judged_by_its_masks_alone() -> None:
    unseen = type("Unseen", (transformers.MptModel,), {"__module__": "nowhere"})
    assert support.attention_usage(unseen) is None
    model = unseen(config("Mpt", REFUSED["Mpt"][1], attn_implementation="regard"))
    with pytest.raises(ArgumentError, match="the model does not support bool masks"):
        model(tokens(1, 5))
