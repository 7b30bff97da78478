"""The bytes of stored forms, against real files."""

from __future__ import annotations

import inspect
from fractions import Fraction

import pytest
import torch

from regard.configs.published import PUBLISHED_MODELS
from regard.cost import model_of
from regard.cost.stored_forms import STORED_FORMS, stored_as
from regard.errors import ArgumentError
from regard.ops.stored_weights import Int4Weight, Int8Weight

GB, GIB = 1e9, 2.0**30
FILES = [  # sizes as the pages of the files give them
    ("llama-3.1-70b", "q8_0", 74.98 * GB),  # bartowski, GGUF of Llama-3.1-70B
    ("llama-3.1-70b", "q6_k", 57.89 * GB),
    ("llama-3.1-70b", "q5_k_m", 49.95 * GB),
    ("llama-3.1-70b", "q4_k_m", 42.52 * GB),
    ("llama-3.1-70b", "q4_0", 37.22 * GIB),  # ollama, pull request 6279: "model size"
    ("llama-3.1-8b", "q8_0", 8.54 * GB),
    ("llama-3.1-8b", "q5_k_m", 5.73 * GB),
    ("llama-3.1-8b", "q4_k_m", 4.92 * GB),
    ("qwen2.5-72b", "q4_k_m", 47.42 * GB),  # its rows of 29,568 take no blocks of 256
    ("qwen2.5-7b", "q4_k_m", 4.68 * GB),
    ("gemma-2-9b", "q4_k_m", 5.76 * GB),
    ("mistral-7b-v0.3", "q4_k_m", 4.37 * GB),
    ("kimi-k2", "q8_0", 1016.623 * GIB),  # ikawrakow/ik_llama.cpp, pull request 616: "model size"
    ("llama-3.1-8b", "awq", 5.73 * GB),  # hugging-quants
    ("llama-3.1-70b", "awq", 39.77 * GB),
    ("gpt-oss-20b", "mxfp4", 13.76 * GB),  # openai
    ("gpt-oss-120b", "mxfp4", 65.25 * GB),
    ("kimi-k2-thinking", "int4_experts", 594 * GB),  # moonshotai
]


@pytest.mark.parametrize(("model", "form", "size"), FILES, ids=lambda x: str(x))
def test_within_a_hundredth_of_a_real_file(model: str, form: str, size: float) -> None:
    assert stored_as(model_of(model), form).bytes == pytest.approx(size, rel=0.01)


def test_codes_without_scales_are_far_from_a_file() -> None:
    """A negative control: what `--dtype int4` counts is no file."""
    assert model_of("llama-3.1-70b").parameters / 2 < 0.9 * 39.77 * GB


@pytest.mark.parametrize("kind", [Int8Weight, Int4Weight])
def test_our_own_forms_are_those_that_load_makes(kind: type[Int8Weight | Int4Weight]) -> None:
    matrix = torch.randn(64, 1024)  # whole groups of 128
    bits = Fraction(8 * kind.quantize(matrix).bytes, matrix.numel())
    size = stored_as(model_of("llama-3-8b"), kind.form)
    assert size.bits_of("feed-forward") == size.bits_of("embedding") == size.bits_of("head") == bits
    assert size.bits_of("norms") == 16


def test_a_token_reads_the_parts_in_their_bits() -> None:
    from regard.cost import CostReport, Setting

    model = model_of("gpt-oss-20b")
    assert model.stored is not None, "it is released so"
    assert model.stored.bits_of("experts") == 4.25
    assert model.stored.bits_of("attention") == model.stored.bits_of("head") == 16
    assert CostReport(model, Setting()).weight_bytes == model.stored.bytes


def test_the_help_names_every_form() -> None:
    from regard.cli.cost import cost

    (weights,) = (x for n, x in inspect.signature(cost).parameters.items() if n == "weights")
    assert all(form in weights.default.help for form in STORED_FORMS)


def test_a_config_that_names_the_form_counts_the_same() -> None:
    """Two counts that share no code: from the sizes, and tensor by tensor of the built network."""
    from regard.models.checkpoint.stored_sizes import stored_size

    raw = {**PUBLISHED_MODELS["llama-3.2-1b"].config}
    awq = {"quant_method": "awq", "bits": 4, "group_size": 128, "version": "gemm"}
    counted = stored_size(raw | {"quantization_config": awq}, "here").bytes
    assert stored_as(model_of("llama-3.2-1b"), "awq").bytes == pytest.approx(counted, rel=1e-3)


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="q4_k_m") as raised:
        stored_as(model_of("gpt2"), "q4_k_n")
    assert raised.value.argument == "weights"
    with pytest.raises(ArgumentError, match="stores experts, and gpt2 has none"):
        stored_as(model_of("gpt2"), "mxfp4")
    assert {"awq", "fp8"} < set(STORED_FORMS)
