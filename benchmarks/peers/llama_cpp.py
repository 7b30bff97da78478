"""llama.cpp through llama-cpp-python: the same weights in a GGUF file, with an fp16 or fp32 cache.

Flash attention is used for fp16 only, because llama.cpp's kernel rounds to fp16 whatever the dtype
of the cache is: fp32 logits had an error of 1e-3 with flash attention, and of 1e-6 without it.

Weights of few bits are repacked for the processor, as is llama.cpp's default, if a process of its
own survives a prompt with them: llama-cpp-python 0.3.36 ends in a segmentation fault on a virtual
processor with AMX.
"""

from __future__ import annotations

import importlib
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch
from torch import Tensor

from benchmarks.interfaces import Peer, PreparedCall
from benchmarks.problems import ModelProblem
from regard.files.gguf_files import MetadataValue
from regard.files.gguf_writer import TensorToWrite, write_gguf

NEEDS = ("llama_cpp",)
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
        write_model(problem, path)
        is_fp16 = problem.dtype != torch.float32
        cache_type = library.GGML_TYPE_F16 if is_fp16 else library.GGML_TYPE_F32
        threads = torch.get_num_threads()
        repacks = problem.sizes.bits is None or survives_a_prompt(path)
        with nullcontext() if repacks else without_repacking(library):
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

    kernel = "repacked" if repacks else "not repacked"
    return PreparedCall(
        step, lambda _: {"prompt": prompt}, "" if problem.sizes.bits is None else kernel
    )


TRIAL = """
import sys
import llama_cpp
network = llama_cpp.Llama(sys.argv[1], n_ctx=64, use_mmap=False, verbose=False)
network.eval(list(range(8)))
"""
"""What a process of its own runs, to see whether llama.cpp survives a prompt."""


def survives_a_prompt(path: Path) -> bool:
    """Return whether llama.cpp can read a prompt with the weights of a GGUF file on this processor.

    Args:
        path: the file.

    Returns:
        False if a signal ended the process that tried.
    """
    trial = subprocess.run(  # noqa: S603
        [sys.executable, "-c", TRIAL, str(path)], capture_output=True, check=False
    )
    return trial.returncode >= 0


def without_repacking(library: Any) -> AbstractContextManager[Any]:
    """Return a context in which llama.cpp loads weights without repacking them for the processor.

    Args:
        library: the package llama_cpp, whose class Llama has no argument for it.

    Returns:
        The context.
    """
    functions = library.llama_cpp
    params = functions.llama_model_default_params()
    params.use_extra_bufts = False
    return mock.patch.object(functions, "llama_model_default_params", return_value=params)


def why_not(problem: ModelProblem) -> str | None:
    """Return why this adapter does not support the problem, or None."""
    if problem.device.type != "cpu":
        return "this adapter supports only a CPU"
    if problem.sizes.B != 1:
        return "this adapter supports only a batch of one row"
    if problem.sizes.bits is None and problem.dtype not in (torch.float32, torch.float16):
        return "this adapter supports only fp32 and fp16"
    return None


def write_model(
    problem: ModelProblem, path: Path, tokenizer: Mapping[str, MetadataValue] | None = None
) -> None:
    """Write the problem's weights as a GGUF file; vectors are fp32.

    Args:
        problem: the problem; with `bits`, matrices are written as Q8_0 or Q4_0, which have the same
            numbers.
        path: the file.
        tokenizer: the keys of a tokenizer; None is none.
    """
    config = problem.config
    sizes: dict[str, MetadataValue] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "vocab_size": config.vocab_size,
    }
    metadata: dict[str, MetadataValue] = {
        "general.architecture": "qwen2",
        "general.name": "model",
        "general.file_type": _FILE_TYPES[_format(problem)],
    }
    metadata |= {f"qwen2.{key}": value for key, value in sizes.items()}
    metadata |= {"tokenizer.ggml.model": "none"} if tokenizer is None else tokenizer
    write_gguf(path, metadata, list(gguf_tensors(problem)))


_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
"""Format of the matrices -> `general.file_type`."""


def _format(problem: ModelProblem) -> str:
    """Return the format of the problem's matrices in a GGUF file."""
    plain = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[problem.dtype]
    return plain if problem.sizes.bits is None else f"Q{problem.sizes.bits}_0"


def gguf_tensors(problem: ModelProblem) -> Iterator[TensorToWrite]:
    """Yield each parameter under its name in a GGUF file, with its format.

    The output head shares the embedding and has no entry.

    >>> from benchmarks.problems import ModelSizes
    >>> sizes = ModelSizes(S=4, layers=1, dim=16, inner=16, H=4, G=2, vocabulary=11)
    >>> problem = sizes.problem(torch.float16, torch.device("cpu"))
    >>> [(x.name, x.format) for x in gguf_tensors(problem)][:2]
    [('token_embd.weight', 'F16'), ('blk.0.attn_norm.weight', 'F32')]
    """
    form = _format(problem)
    for name, parameter in problem.decoder.named_parameters():
        if name in MODEL_NAMES:
            gguf_name = MODEL_NAMES[name]
        else:
            _, layer, name_in_layer = name.split(".", 2)
            gguf_name = f"blk.{layer}.{LAYER_NAMES[name_in_layer]}"
        yield TensorToWrite(gguf_name, parameter.detach(), form if parameter.ndim > 1 else "F32")


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
    own_process=True,
)
