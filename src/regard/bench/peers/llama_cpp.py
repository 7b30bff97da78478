"""llama.cpp through llama-cpp-python: the same weights in a GGUF file, an fp16 or fp32 cache, flash
attention for fp16.

Its flash attention rounds to fp16 whatever the cache holds: fp32 logits were off by 1e-3 with it,
and by 1e-6 without.
"""

from __future__ import annotations

import importlib
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from regard.bench.interfaces import Peer, Way
from regard.bench.problems import ModelProblem

NEEDS = ("llama_cpp", "gguf")
BATCH = 512
"""Tokens that are read at once."""

OUTSIDE = {"embed.embedding.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
LAYER = {
    "around_attention.norm.weight": "attn_norm.weight",
    "around_feed_forward.norm.weight": "ffn_norm.weight",
    "attention.project.q.linear.weight": "attn_q.weight",
    "attention.project.k.linear.weight": "attn_k.weight",
    "attention.project.v.linear.weight": "attn_v.weight",
    "attention.project.q.linear.bias": "attn_q.bias",
    "attention.project.k.linear.bias": "attn_k.bias",
    "attention.project.v.linear.bias": "attn_v.bias",
    "attention.output.weight": "attn_output.weight",
    "feed_forward.gate.weight": "ffn_gate.weight",
    "feed_forward.up.weight": "ffn_up.weight",
    "feed_forward.down.weight": "ffn_down.weight",
}
"""A parameter of a layer here -> its name behind blk.<layer> in a GGUF file."""


def model(problem: ModelProblem) -> Way:
    """One token behind S others that it read itself: it is checked on the prompt, whose numbers are
    no cache's.
    """
    library = importlib.import_module("llama_cpp")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write(problem, path)
        short = problem.dtype == torch.float16
        kind = library.GGML_TYPE_F16 if short else library.GGML_TYPE_F32
        threads = torch.get_num_threads()
        network = library.Llama(
            str(path),
            n_ctx=problem.sizes.S + BATCH,
            n_batch=BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=short,
            type_k=kind,
            type_v=kind,
            use_mmap=False,
            verbose=False,
        )
    network.eval(problem.prompt[0].tolist())
    prompt = _logits(library, network, problem).clone()
    network.reset()
    S = problem.sizes.S
    text = torch.randint(problem.sizes.vocabulary, (S,), generator=torch.Generator().manual_seed(0))
    network.eval(text.tolist())
    token = problem.ids[0].tolist()

    def step() -> None:
        network.n_tokens = S  # what is behind it in the cache is dropped
        network.eval(token)

    return Way(step, lambda _: {"prompt": prompt})


def why_not(problem: ModelProblem) -> str | None:
    """What this adapter does not write or read."""
    if problem.device.type != "cpu":
        return "this adapter runs on a CPU"
    if problem.sizes.B != 1:
        return "this adapter decodes one row"
    if problem.dtype not in (torch.float32, torch.float16):
        return "this adapter writes fp32 and fp16"
    return None


def write(problem: ModelProblem, path: Path) -> None:
    """The problem's weights as a GGUF file without a tokenizer; vectors are fp32, as llama.cpp
    wants them.
    """
    gguf = importlib.import_module("gguf")
    config = problem.config
    writer = gguf.GGUFWriter(str(path), "qwen2")
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_hidden_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_attention_heads)
    writer.add_head_count_kv(config.num_key_value_heads)
    writer.add_rope_freq_base(config.rope_theta)
    writer.add_layer_norm_rms_eps(config.rms_norm_eps)
    writer.add_vocab_size(config.vocab_size)
    writer.add_tokenizer_model("none")
    for name, x in named(problem):
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def named(problem: ModelProblem) -> Iterator[tuple[str, Any]]:
    """Each parameter under its name in a GGUF file, as an array; the head is the embedding and has
    no entry.

    >>> from regard.bench.problems import ModelSizes
    >>> sizes = ModelSizes(S=4, layers=1, dim=16, inner=16, H=4, G=2, vocabulary=11)
    >>> [name for name, _ in named(sizes.problem(torch.float16, torch.device("cpu")))][:2]
    ['token_embd.weight', 'blk.0.attn_norm.weight']
    """
    for name, parameter in problem.decoder.named_parameters():
        if name in OUTSIDE:
            theirs = OUTSIDE[name]
        else:
            _, layer, rest = name.split(".", 2)
            theirs = f"blk.{layer}.{LAYER[rest]}"
        x = parameter.detach()
        yield theirs, (x if x.ndim > 1 else x.float()).numpy()


def _logits(library: Any, network: Any, problem: ModelProblem) -> Tensor:
    """The logits of the last token that was read, [1,1,V]."""
    pointer = library.llama_get_logits_ith(network.ctx, -1)
    V = problem.sizes.vocabulary
    found = torch.from_numpy(np.ctypeslib.as_array(pointer, shape=(V,)))
    return found.to(problem.dtype).view(1, 1, V)


def file_bytes(problem: ModelProblem) -> int:
    """Its own weights, and a cache."""
    return (problem.sizes.weights + 2 * problem.sizes.cached) * problem.dtype.itemsize


MODEL = Peer(
    "llama.cpp",
    "llama-cpp-python, the same weights as GGUF, flash attention for fp16.",
    model,
    needs=NEEDS,
    why_not=why_not,
    bytes=file_bytes,
)
