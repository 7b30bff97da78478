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
from tests.integrations.families import SIZES, architectures, tokens, transformers
from tests.integrations.matrix.cells import class_of
from tests.integrations.matrix.tiny import tiny

support = importlib.import_module("regard.integrations.transformers.supported_models")
ITSELF, BY_NAME = "computes its attention itself", "from a table of names"
REFUSED = {
    "mpt": ITSELF,
    "bloom": ITSELF,
    "longformer": ITSELF,
    "falcon": BY_NAME,
    "sam_vision_model": BY_NAME,
}
SILENT = ("deberta", "deberta-v2", "openai-gpt", "xlnet", "fnet", "funnel")


class MyLlama(transformers.LlamaModel):
    """A class of a user's own."""


class MyMpt(transformers.MptModel):
    """A class of a user's own, of an architecture that is refused."""


def config(model_type: str, attention: str | None = None) -> Any:
    made = tiny(transformers.CONFIG_MAPPING[model_type], model_type)
    made._attn_implementation = attention
    return made


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", REFUSED)
def test_a_class_that_would_misread_our_masks_is_refused_when_it_is_built(name: str) -> None:
    _, kind = class_of(name)
    message = (
        rf"{kind.__name__[:3]}\w* (computes its attention itself|chooses its attention class from "
        r"a table of names) .*use 'eager'.*architectures\(\).*docs/transformers\.md"
    )
    with pytest.raises(ArgumentError, match=message) as raised:
        kind(config(name, "regard"))
    assert REFUSED[name] in str(raised.value)


@pytest.mark.parametrize("name", ["mpt", "longformer", "falcon"])
def test_it_is_refused_when_it_is_switched_and_stays_as_it_was(name: str) -> None:
    model = class_of(name)[1](config(name, "eager")).eval()
    with pytest.raises(ArgumentError, match=f"(?i){name}"):
        model.set_attn_implementation("regard")
    assert {x.config._attn_implementation for x in model.modules() if hasattr(x, "config")} == {
        "eager"
    }
    with torch.no_grad():
        assert model(tokens(1, 8))[0].isfinite().all()


def test_from_config_and_from_pretrained_refuse_it(tmp_path: Any) -> None:
    given = config("mpt")
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
    _, kind = class_of(name)
    torch.manual_seed(0)
    message = rf"{kind.__name__[:3]}\w* never calls .*eager.*nothing in it runs through regard"
    with pytest.warns(UserWarning, match=message) as told:
        model = kind(config(name, "regard")).eval()
    assert len(told) == 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.manual_seed(0)
        plain = kind(config(name, "eager")).eval()
        kind(config(name, "regard"))
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
    model = transformers.MptModel(config("mpt", "eager"))
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
        MyMpt(config("mpt", "regard"))


def test_a_class_without_source_is_judged_by_its_masks_alone() -> None:
    unseen = type("Unseen", (transformers.MptModel,), {"__module__": "nowhere"})
    assert support.attention_usage(unseen) is None
    model = unseen(config("mpt", "regard"))
    with pytest.raises(ArgumentError, match="the model does not support bool masks"):
        model(tokens(1, 5))
