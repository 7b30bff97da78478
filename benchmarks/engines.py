"""Engines for language models on a CPU that read files: llama.cpp, OpenVINO (through the GGUF
reader of OpenVINO GenAI), ONNX Runtime GenAI and CTranslate2.

Their caches cannot be set to given values, so only the logits of the short prompt are compared with
the reference. llama.cpp uses flash attention for fp16 only, because its kernel rounds to fp16
whatever the dtype of the cache is: fp32 logits had an error of 1e-3 with flash attention, and of
1e-6 without it. Its weights of few bits are repacked for the processor, as is its default, if a
process of its own survives a prompt with them: llama-cpp-python 0.3.36 ends in a segmentation fault
on a virtual processor with AMX.
"""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import tokenizers
import torch
from torch import Tensor

from benchmarks.interfaces import FP16, FP32, Peer, PreparedCall, name_of
from benchmarks.model import ModelProblem, write_model
from regard.errors import RegardError
from regard.files.gguf_files import MetadataValue
from regard.models.save import save
from regard.process_state import ignore_warnings

BATCH = 512
"""How many tokens of the prompt are processed at once."""


def llama_cpp(problem: ModelProblem) -> PreparedCall:
    """Prepare a decoding step of llama.cpp after S random tokens."""
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
    pointer = library.llama_get_logits_ith(network.ctx, -1)
    prompt = _prompt_logits(
        problem, np.ctypeslib.as_array(pointer, shape=(problem.sizes.vocabulary,))
    )
    network.reset()
    network.eval(_text(problem))
    S, token = problem.sizes.S, problem.ids[0].tolist()

    def step() -> None:
        network.n_tokens = S  # remove the later tokens from the cache
        network.eval(token)

    kernel = "repacked" if repacks else "not repacked"
    return PreparedCall(step, lambda _: prompt, "" if problem.sizes.bits is None else kernel)


TRIAL = """
import sys
import llama_cpp
network = llama_cpp.Llama(sys.argv[1], n_ctx=64, use_mmap=False, verbose=False)
network.eval(list(range(8)))
"""
"""What a process of its own runs, to see whether llama.cpp survives a prompt."""


def survives_a_prompt(path: Path) -> bool:
    """Return whether llama.cpp can read a prompt with the weights of a file on this processor."""
    trial = subprocess.run(  # noqa: S603
        [sys.executable, "-c", TRIAL, str(path)], capture_output=True, check=False
    )
    return trial.returncode >= 0


def without_repacking(library: Any) -> AbstractContextManager[Any]:
    """Return a context in which llama.cpp loads weights without repacking them."""
    functions = library.llama_cpp
    params = functions.llama_model_default_params()
    params.use_extra_bufts = False
    return mock.patch.object(functions, "llama_model_default_params", return_value=params)


def file_bytes(problem: ModelProblem) -> int:
    """Return the memory in bytes of llama.cpp's copy of the weights, and of two caches."""
    return (problem.sizes.weights + 2 * problem.sizes.cached) * problem.dtype.itemsize


_PRECISIONS = {torch.bfloat16: ("bf16", "bf16"), torch.float16: ("f32", "f16")}
"""Dtype -> OpenVINO's precision of the computation, without fp16 on a CPU, and of the cache."""


def _text(problem: ModelProblem) -> list[int]:
    """Return the S random tokens before the step."""
    generator = torch.Generator().manual_seed(0)
    V, S = problem.sizes.vocabulary, problem.sizes.S
    return torch.randint(V, (S,), generator=generator).tolist()


def _tokens(problem: ModelProblem) -> list[str]:
    """Return names of tokens, which the engines need to read a model."""
    return [f"t{i}" for i in range(problem.sizes.vocabulary)]


def _prompt_logits(problem: ModelProblem, logits: Any) -> dict[str, Tensor]:
    """Return the logits of the last token of the prompt as the problem's output."""
    last = torch.from_numpy(np.array(logits, dtype=np.float32)).flatten()
    V = problem.sizes.vocabulary
    return {"prompt": last[-V:].to(problem.dtype).view(1, 1, V)}


def _openvino(problem: ModelProblem) -> PreparedCall:
    """Prepare a decoding step of OpenVINO, whose cache grows by a token at each step."""
    genai, openvino = (importlib.import_module(name) for name in ("openvino_genai", "openvino"))
    precision, cache = _PRECISIONS.get(problem.dtype, ("f32", "f32"))
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": precision,
        "KV_CACHE_PRECISION": cache,
        "PERFORMANCE_HINT": "LATENCY",
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.gguf"
        write_model(problem, path, _byte_level_keys(problem))
        saved = path.with_name("openvino_model.xml")
        try:
            genai.LLMPipeline(str(path), "CPU", enable_save_ov_model=True)
        except RuntimeError:  # version 2026.4 saves the model and then fails to compile it itself
            if not saved.exists():
                raise
        model = openvino.Core().read_model(str(saved))
        request = openvino.Core().compile_model(model, "CPU", settings).create_infer_request()
    names = {name for inner in model.inputs for name in inner.names}

    def run(ids: list[int], past: int) -> Any:
        inputs = {
            "input_ids": np.array([ids], dtype=np.int64),
            "attention_mask": np.ones((1, past + len(ids)), dtype=np.int64),
            "position_ids": np.arange(past, past + len(ids), dtype=np.int64)[None],
            "beam_idx": np.zeros(1, dtype=np.int32),
        }
        known = {name: x for name, x in inputs.items() if name in names}
        return request.infer(known, share_inputs=True)["logits"]

    prompt = _prompt_logits(problem, run(problem.prompt[0].tolist(), 0))
    request.reset_state()
    run(_text(problem), 0)
    past, token = [problem.sizes.S], problem.ids[0].tolist()

    def step() -> None:
        run(token, past[0])
        past[0] += 1

    return PreparedCall(step, lambda _: prompt)


def _byte_level_keys(problem: ModelProblem) -> dict[str, MetadataValue]:
    """Return the keys of a tokenizer, without which OpenVINO GenAI reads no file."""
    V = problem.sizes.vocabulary
    keys: dict[str, MetadataValue] = {
        "model": "gpt2",
        "pre": "qwen2",
        "tokens": _tokens(problem),
        "token_type": [1] * V,
        "merges": ["t 1"],
        "bos_token_id": V - 1,
        "eos_token_id": V - 1,
        "padding_token_id": V - 1,
    }
    ours = {f"tokenizer.ggml.{key}": value for key, value in keys.items()}
    return {**ours, "tokenizer.chat_template": "{{ messages }}"}


def _hugging_face_folder(problem: ModelProblem, folder: Path) -> Path:
    """Write the model as a Hugging Face folder with a tokenizer of one word for each token."""
    folder.mkdir()
    save(problem.decoder, problem.config, folder, dtype=problem.dtype)
    config = json.loads((folder / "config.json").read_text("utf-8"))
    V = problem.sizes.vocabulary
    config |= {
        "architectures": ["Qwen2ForCausalLM"],
        "hidden_act": "silu",
        "bos_token_id": V - 1,
        "eos_token_id": V - 1,
    }
    (folder / "config.json").write_text(json.dumps(config), "utf-8")
    words = {name: i for i, name in enumerate(_tokens(problem))}
    model = tokenizers.models.WordLevel(words, unk_token="t0")  # noqa: S106 (a word, no secret)
    tokenizers.Tokenizer(model).save(str(folder / "tokenizer.json"))
    names = {"tokenizer_class": "PreTrainedTokenizerFast", "unk_token": "t0"}
    names |= {f"{kind}_token": f"t{V - 1}" for kind in ("bos", "eos", "pad")}
    (folder / "tokenizer_config.json").write_text(json.dumps(names), "utf-8")
    return folder


def _onnx_runtime_genai(problem: ModelProblem) -> PreparedCall:
    """Prepare a step of ONNX Runtime GenAI, whose generator goes back to S tokens each time."""
    genai = importlib.import_module("onnxruntime_genai")
    folder = tempfile.TemporaryDirectory()
    source = _hugging_face_folder(problem, Path(folder.name) / "source")
    out = Path(folder.name) / "model"
    precision = "fp32" if problem.sizes.bits is None else f"int{problem.sizes.bits}"
    command = [sys.executable, "-m", "onnxruntime_genai.models.builder"]
    command += ["-i", str(source), "-o", str(out), "-p", precision, "-e", "cpu", "-c", folder.name]
    command += ["--extra_options", "int4_block_size=32"] if precision == "int4" else []
    built = subprocess.run(command, check=False, capture_output=True, text=True)  # noqa: S603 (the package's builder)
    if built.returncode:
        last_line = (built.stderr.strip() or "no output").splitlines()[-1]
        raise RegardError(
            f"the model builder of ONNX Runtime GenAI ended with exit code {built.returncode}: "
            f"{last_line}"
        )
    settings = out / "genai_config.json"
    config = json.loads(settings.read_text("utf-8"))
    options = config["model"]["decoder"].setdefault("session_options", {})
    options["intra_op_num_threads"] = torch.get_num_threads()
    settings.write_text(json.dumps(config), "utf-8")
    model = genai.Model(str(out))

    def generator() -> Any:
        search = genai.GeneratorParams(model)
        search.set_search_options(max_length=problem.sizes.S + 64, do_sample=False)
        return genai.Generator(model, search)

    first = generator()
    first.append_tokens(problem.prompt.numpy().astype(np.int32))
    prompt = _prompt_logits(problem, first.get_output("logits"))
    second, token = generator(), problem.ids.numpy().astype(np.int32)
    second.append_tokens(np.array([_text(problem)], dtype=np.int32))

    def step() -> None:
        second.append_tokens(token)
        second.rewind_to(problem.sizes.S)

    return PreparedCall(step, lambda _: prompt, owner=folder)


def _ctranslate2(problem: ModelProblem) -> PreparedCall:
    """Prepare a decoding step of CTranslate2 after a prompt whose state it keeps."""
    library = importlib.import_module("ctranslate2")
    folder = tempfile.TemporaryDirectory()
    source = _hugging_face_folder(problem, Path(folder.name) / "source")
    whole = problem.sizes.bits is None
    with ignore_warnings():
        converter = library.converters.TransformersConverter(str(source))
        converted = converter.convert(str(Path(folder.name) / "converted"))
    model = library.Generator(
        converted,
        compute_type="float32" if whole else "int8_float32",
        intra_threads=torch.get_num_threads(),
    )
    prompt = [[f"t{i}" for i in problem.prompt[0].tolist()]]
    logits = model.forward_batch(prompt).to(library.DataType.float32)
    checked = _prompt_logits(problem, np.array(logits)[0, -1])
    text, token = [f"t{i}" for i in _text(problem)], [f"t{int(problem.ids)}"]

    def step() -> object:
        return model.generate_batch(
            [token],
            max_length=1,
            static_prompt=text,
            cache_static_prompt=True,
            include_prompt_in_result=False,
        )

    return PreparedCall(step, lambda _: checked, owner=folder)


def why_not(
    dtypes: tuple[torch.dtype, ...], bits: tuple[int, ...], problem: ModelProblem
) -> str | None:
    """Return why an engine cannot decode with the problem's batch and weights, or None."""
    sizes = problem.sizes
    if sizes.B != 1:
        return "this adapter supports only a batch of one row"
    if sizes.bits is None and problem.dtype not in dtypes:
        return f"this adapter has no {name_of(problem.dtype)}"
    if sizes.bits is not None and sizes.bits not in bits:
        return f"this adapter has no weights of {sizes.bits} bits"
    return None


def engine_bytes(problem: ModelProblem) -> int:
    """Return the memory in bytes of an engine's copy of the weights in fp32, and of two caches."""
    return problem.sizes.weights * 8 + 2 * problem.sizes.cached * problem.dtype.itemsize


ENGINES = tuple(
    Peer(
        name,
        description,
        prepare,
        needs,
        devices=("cpu",),
        why_not=partial(why_not, dtypes, bits),
        bytes=file_bytes if prepare is llama_cpp else engine_bytes,
        own_process=True,
    )
    for name, description, prepare, needs, dtypes, bits in (
        (
            "llama.cpp",
            "llama-cpp-python, the same weights as GGUF, flash attention for fp16.",
            llama_cpp,
            ("llama_cpp",),
            (FP32, FP16),
            (8, 4),
        ),
        (
            "OpenVINO",
            "The same weights as GGUF, read by OpenVINO GenAI; the cache grows at each step.",
            _openvino,
            ("openvino", "openvino_genai"),
            (FP16,),  # what its reader of GGUF files takes
            (8, 4),
        ),
        (
            "ONNX Runtime GenAI",
            "The model builder of ONNX Runtime GenAI, from a Hugging Face folder.",
            _onnx_runtime_genai,
            ("onnxruntime_genai", "transformers", "onnx", "onnx_ir"),
            (FP32,),
            (4,),
        ),
        (
            "CTranslate2",
            "A converted folder; the state of the prompt is kept between steps.",
            _ctranslate2,
            ("ctranslate2", "transformers"),
            (FP32,),
            (8,),
        ),
    )
)
