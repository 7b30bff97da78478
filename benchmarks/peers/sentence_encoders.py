"""Sentence vectors: regard's `TextEncoder.embed`, and the same weights in transformers, ONNX
Runtime, OpenVINO and CTranslate2, with padded batches of texts of similar length.
"""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.interfaces import Peer, PreparedCall
from benchmarks.problems.sentences import SentenceProblem, sorted_batches
from regard.process_state import ignore_warnings

BATCH = 32
"""How many texts the other engines read at once; of 8, 32 and 64 it was the fastest for most."""
_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

States = Callable[[Tensor, Tensor], Tensor]
"""A function from ids and attention mask [B, S] to hidden states [B, S, M]."""


def _ours(problem: SentenceProblem) -> PreparedCall:
    """Return the call of `embed`, in packed rows."""
    return PreparedCall(
        lambda: problem.model.embed(problem.texts),
        lambda y: {"vectors": y},
        problem.model.why_not_packed() or "packed rows",
    )


def _padded(states: States, problem: SentenceProblem) -> PreparedCall:
    """Return the call that tokenises, computes states of padded batches, and pools them."""

    def step() -> Tensor:
        rows = [ids for ids, _ in problem.model.tokenizer.encode_pairs(problem.texts)]
        vectors = torch.empty(len(rows), problem.sizes.dim, dtype=problem.dtype)
        with torch.no_grad():
            for part, ids, mask in sorted_batches(rows, BATCH):
                x = states(ids, mask).float() * mask[..., None]
                mean = x.sum(1) / mask.sum(1, keepdim=True)
                vectors[part] = F.normalize(mean, dim=-1).to(problem.dtype)
        return vectors

    return PreparedCall(step, lambda y: {"vectors": y})


def _transformers_model(problem: SentenceProblem, folder: str) -> Any:
    """Return the model of transformers with the problem's weights."""
    library = importlib.import_module("transformers")
    problem.model.save(Path(folder) / "model")
    model = library.BertModel.from_pretrained(
        Path(folder) / "model", attn_implementation="sdpa", dtype=problem.dtype
    )
    return model.eval()


def _transformers(problem: SentenceProblem) -> PreparedCall:
    """Prepare transformers with torch's SDPA."""
    with tempfile.TemporaryDirectory() as folder, ignore_warnings():
        model = _transformers_model(problem, folder)

    def states(ids: Tensor, mask: Tensor) -> Tensor:
        result: Tensor = model(input_ids=ids, attention_mask=mask).last_hidden_state
        return result

    return _padded(states, problem)


class _StatesOnly(nn.Module):
    """A model of transformers that returns its last hidden states."""

    def __init__(self, model: Any) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor, mask: Tensor) -> Tensor:
        """Compute the hidden states [B, S, M] of ids and attention mask [B, S]."""
        states: Tensor = self.model(input_ids=ids, attention_mask=mask).last_hidden_state
        return states


def _onnx_file(problem: SentenceProblem, folder: str) -> Path:
    """Write the model as an ONNX file in fp32, with free sizes of batch and length."""
    path = Path(folder) / "model.onnx"
    model = _StatesOnly(_transformers_model(problem, folder).float())
    ids = torch.ones(2, 8, dtype=torch.int64)
    free = {0: "batch", 1: "length"}
    with ignore_warnings():
        torch.onnx.export(
            model,
            (ids, ids),
            str(path),
            input_names=["ids", "mask"],
            output_names=["states"],
            dynamic_axes={"ids": free, "mask": free, "states": free},
            opset_version=17,
            dynamo=False,
        )
    return path


def _onnx_runtime(problem: SentenceProblem) -> PreparedCall:
    """Prepare a session of ONNX Runtime, which fuses what it can."""
    runtime = importlib.import_module("onnxruntime")
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    with tempfile.TemporaryDirectory() as folder:
        path = _onnx_file(problem, folder)
        session = runtime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])

    def states(ids: Tensor, mask: Tensor) -> Tensor:
        return torch.from_numpy(session.run(None, {"ids": ids.numpy(), "mask": mask.numpy()})[0])

    return _padded(states, problem)


def _openvino(problem: SentenceProblem) -> PreparedCall:
    """Prepare OpenVINO on a CPU in the precision of the problem."""
    openvino = importlib.import_module("openvino")
    precision = "f32" if problem.dtype == torch.float32 else "bf16"
    settings = {
        "INFERENCE_NUM_THREADS": torch.get_num_threads(),
        "INFERENCE_PRECISION_HINT": precision,
        "PERFORMANCE_HINT": "LATENCY",
    }
    with tempfile.TemporaryDirectory() as folder:
        core = openvino.Core()
        model = core.read_model(str(_onnx_file(problem, folder)))
        request = core.compile_model(model, "CPU", settings).create_infer_request()

    def states(ids: Tensor, mask: Tensor) -> Tensor:
        out = request.infer([ids.numpy(), mask.numpy()], share_inputs=True)
        return torch.from_numpy(out[0])

    return _padded(states, problem)


def _ctranslate2(problem: SentenceProblem) -> PreparedCall:
    """Prepare an encoder of CTranslate2."""
    library = importlib.import_module("ctranslate2")
    folder = tempfile.TemporaryDirectory()
    config = problem.model.save(Path(folder.name) / "model") / "config.json"
    # the converter reads a key that transformers no longer writes
    keys = {"position_embedding_type": "absolute", **json.loads(config.read_text("utf-8"))}
    config.write_text(json.dumps(keys), "utf-8")
    names = {
        "unk_token": "[UNK]",
        "pad_token": "[PAD]",
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    (config.parent / "tokenizer_config.json").write_text(json.dumps(names), "utf-8")
    converter = library.converters.TransformersConverter(str(Path(folder.name) / "model"))
    converted = converter.convert(str(Path(folder.name) / "converted"))
    encoder = library.Encoder(
        converted,
        compute_type=_NAMES[problem.dtype],
        intra_threads=torch.get_num_threads(),
    )

    def states(ids: Tensor, mask: Tensor) -> Tensor:
        lengths = library.StorageView.from_array(mask.sum(1).numpy().astype(np.int32))
        view = library.StorageView.from_array(ids.numpy().astype(np.int32))
        out = encoder.forward_batch(view, lengths).last_hidden_state
        return torch.from_numpy(np.array(out.to(library.DataType.float32)))

    call = _padded(states, problem)
    return PreparedCall(partial(_keep, folder, call.step), call.read)


def _keep(_: object, step: Callable[[], object]) -> object:
    """Run a step whose model is in a folder that must not be deleted before."""
    return step()


def _why_not(dtypes: tuple[torch.dtype, ...], problem: SentenceProblem) -> str | None:
    """Return why a peer does not support the problem, or None."""
    if problem.device.type != "cpu":
        return "this adapter supports only a CPU"
    if problem.dtype not in dtypes:
        return f"this adapter has no {str(problem.dtype).removeprefix('torch.')}"
    return None


def _peer(
    name: str,
    description: str,
    prepare: Callable[[SentenceProblem], PreparedCall],
    *needs: str,
    dtypes: tuple[torch.dtype, ...] = tuple(_NAMES),
    own_process: bool = True,
) -> Peer[SentenceProblem]:
    why_not = partial(_why_not, dtypes)
    return Peer(name, description, prepare, needs, why_not, own_process=own_process)


SENTENCES: tuple[Peer[SentenceProblem], ...] = (
    _peer("regard", "TextEncoder.embed: packed rows without padding.", _ours, own_process=False),
    _peer(
        "transformers",
        "BertModel with torch's SDPA.",
        _transformers,
        "transformers",
        own_process=False,
    ),
    _peer(
        "ONNX Runtime",
        "The exported BertModel, in fp32.",
        _onnx_runtime,
        "onnxruntime",
        "onnx",
        "transformers",
        dtypes=(torch.float32,),
    ),
    _peer("OpenVINO", "The exported BertModel.", _openvino, "openvino", "onnx", "transformers"),
    _peer("CTranslate2", "The converted BertModel.", _ctranslate2, "ctranslate2", "transformers"),
)
