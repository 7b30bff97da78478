"""llama.cpp through llama-cpp-python: the same weights in a GGUF file, with an fp16 or fp32 cache.

Flash attention is used for fp16 only, because llama.cpp's kernel rounds to fp16 whatever the dtype
of the cache is: fp32 logits had an error of 1e-3 with flash attention, and of 1e-6 without it.
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

from regard.bench.interfaces import Peer, PreparedCall
from regard.bench.problems import ModelProblem

NEEDS = ("llama_cpp", "gguf")
BATCH = 512
"""How many tokens of the prompt are processed at once."""

MODEL_NAMES = {"embed.embedding.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
LAYER_NAMES = {
    "attention_residual.norm.weight": "attn_norm.weight",
    "feed_forward_residual.norm.weight": "ffn_norm.weight",
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
"""The name of a layer's parameter in regard, and its name after blk.<layer> in a GGUF file."""


def model(problem: ModelProblem) -> PreparedCall:
    """Prepare a decoding step after S random tokens.

    The keys and values of llama.cpp's cache cannot be set to those of the problem, so only the
    logits of the short prompt are compared with the reference.
    """
    library = importlib.import_module("llama_cpp")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_gguf(problem, path)
        is_fp16 = problem.dtype == torch.float16
        cache_type = library.GGML_TYPE_F16 if is_fp16 else library.GGML_TYPE_F32
        threads = torch.get_num_threads()
        network = library.Llama(
            str(path),
            n_ctx=problem.sizes.S + BATCH,
            n_batch=BATCH,
            n_threads=threads,
            n_threads_batch=threads,
            flash_attn=is_fp16,
            type_k=cache_type,
            type_v=cache_type,
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
        network.n_tokens = S  # remove the later tokens from the cache
        network.eval(token)

    return PreparedCall(step, lambda _: {"prompt": prompt})


def why_not(problem: ModelProblem) -> str | None:
    """Return why this adapter does not support the problem, or None."""
    if problem.device.type != "cpu":
        return "this adapter supports only a CPU"
    if problem.sizes.B != 1:
        return "this adapter supports only a batch of one row"
    if problem.dtype not in (torch.float32, torch.float16):
        return "this adapter supports only fp32 and fp16"
    return None


def write_gguf(problem: ModelProblem, path: Path) -> None:
    """Write the problem's weights as a GGUF file without a tokenizer; vectors are fp32."""
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
    for name, x in gguf_tensors(problem):
        writer.add_tensor(name, x)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_tensors(problem: ModelProblem) -> Iterator[tuple[str, object]]:
    """Yield each parameter under its name in a GGUF file, as a numpy array.

    The output head shares the embedding and has no entry.

    >>> from regard.bench.problems import ModelSizes
    >>> sizes = ModelSizes(S=4, layers=1, dim=16, inner=16, H=4, G=2, vocabulary=11)
    >>> [name for name, _ in gguf_tensors(sizes.problem(torch.float16, torch.device("cpu")))][:2]
    ['token_embd.weight', 'blk.0.attn_norm.weight']
    """
    for name, parameter in problem.decoder.named_parameters():
        if name in MODEL_NAMES:
            gguf_name = MODEL_NAMES[name]
        else:
            _, layer, name_in_layer = name.split(".", 2)
            gguf_name = f"blk.{layer}.{LAYER_NAMES[name_in_layer]}"
        x = parameter.detach()
        yield gguf_name, (x if x.ndim > 1 else x.float()).numpy()


def _logits(library: Any, network: Any, problem: ModelProblem) -> Tensor:
    """Return the logits of the last token, `[1, 1, V]`."""
    pointer = library.llama_get_logits_ith(network.ctx, -1)
    V = problem.sizes.vocabulary
    logits = torch.from_numpy(np.ctypeslib.as_array(pointer, shape=(V,)))
    return logits.to(problem.dtype).view(1, 1, V)


def file_bytes(problem: ModelProblem) -> int:
    """Return the memory in bytes of llama.cpp's copy of the weights, and of two caches."""
    return (problem.sizes.weights + 2 * problem.sizes.cached) * problem.dtype.itemsize


MODEL = Peer(
    "llama.cpp",
    "llama-cpp-python, the same weights as GGUF, flash attention for fp16.",
    model,
    needs=NEEDS,
    why_not=why_not,
    bytes=file_bytes,
)
