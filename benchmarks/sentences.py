"""Sentence vectors of texts of unequal length, packed or padded, through a random BERT."""

from __future__ import annotations

import importlib
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.interfaces import (
    BF16,
    FP32,
    MinimumWork,
    Outputs,
    Peer,
    PreparedCall,
    Problem,
    ProblemSizes,
    name_of,
)
from regard.configs.bert import BertConfig
from regard.models.encoder import HeadedEncoder
from regard.models.families import family
from regard.models.text_encoder import TextEncoder
from regard.models.tokenizer import Tokenizer
from regard.process_state import ignore_warnings, seeded
from regard.units import plural

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]")
CHECKED_TEXTS = 32
"""How many texts are compared with the reference, which reads each of them alone."""


@dataclass(frozen=True)
class SentenceSizes(ProblemSizes):
    """The sizes of an encoder and of its texts; the defaults are those of all-MiniLM-L6-v2.

    The lengths of the texts are log-normal, with a median of 18 words.
    """

    texts: int
    layers: int = 6
    dim: int = 384
    inner: int = 1536
    H: int = 12
    vocabulary: int = 30_522

    def resized(self, *, length: int | None = None, batch: int | None = None) -> SentenceSizes:
        return replace(self, texts=batch or self.texts)

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the memory of the weights, four times, and of a batch of states in fp64."""
        layer = 4 * self.dim**2 + 2 * self.dim * self.inner
        return 16 * (self.layers * layer + self.vocabulary * self.dim) + (64 << 20)

    def config(self) -> BertConfig:
        """Return the config of a BERT of these sizes."""
        return BertConfig(self.vocabulary, self.dim, self.layers, self.H, self.inner, 512)

    def problem(self, dtype: torch.dtype, device: torch.device) -> SentenceProblem:
        return SentenceProblem(self, dtype, device)

    def __str__(self) -> str:
        return f"{plural(self.texts, 'text')}, {plural(self.layers, 'layer')} M{self.dim} H{self.H}"


class SentenceProblem(Problem):
    """Texts whose normalized mean vectors are computed, "vectors" `[N, M]`.

    Each peer tokenizes them in the measured time, in random order of their lengths.
    """

    def __init__(self, sizes: SentenceSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        with seeded(0):
            network = family("bert").build(sizes.config()).eval().requires_grad_(False)
            assert isinstance(network, HeadedEncoder)
            for parameter in network.parameters():
                if parameter.ndim > 1:
                    parameter.normal_(std=parameter.shape[-1] ** -0.5)
            words = (18 * torch.randn(sizes.texts).mul(0.5).exp()).long().clamp(1, 400)
            self.texts = [
                " ".join(f"w{i}" for i in torch.randint(len(SPECIAL), sizes.vocabulary, (int(n),)))
                for n in words
            ]
        self.model = TextEncoder(
            network.to(device, dtype), _tokenizer(sizes.vocabulary), sizes.config()
        )
        self.tokens = int(words.sum()) + 2 * sizes.texts

    @property
    def work(self) -> MinimumWork:
        """The products with the weights, once for each token, and the bytes of the weights."""
        s = self.sizes
        weights = s.layers * (4 * s.dim**2 + 2 * s.dim * s.inner)
        return MinimumWork(2 * self.tokens * weights, weights * self.dtype.itemsize)

    def reference(self) -> Outputs:
        return self._alone(torch.float64)

    def plain(self) -> Outputs:
        return self._alone(self.dtype)

    def checked(self, outputs: Outputs) -> Outputs:
        return {"vectors": outputs["vectors"][:CHECKED_TEXTS]}

    @torch.no_grad()
    def _alone(self, dtype: torch.dtype) -> Outputs:
        with seeded(0):
            network = family("bert").build(self.sizes.config()).eval()
        network.load_state_dict(self.model.network.state_dict())
        network.to(dtype)
        vectors = []
        for text in self.texts[:CHECKED_TEXTS]:
            ids, positions, segments = self.model.encode(text)
            vectors.append(self.model.pool(network(ids, positions, segments), positions))
        return {"vectors": torch.cat(vectors)}


def _tokenizer(vocabulary: int) -> Tokenizer:
    """Return a tokenizer for which every word w<id> is one token, with [CLS] and [SEP]."""
    names = {name: i for i, name in enumerate(SPECIAL)}
    names |= {f"w{i}": i for i in range(len(SPECIAL), vocabulary)}
    backend = tokenizers.Tokenizer(tokenizers.models.WordLevel(names, "[UNK]"))
    backend.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    backend.decoder = tokenizers.decoders.WordPiece()
    backend.post_processor = tokenizers.processors.TemplateProcessing(
        single="[CLS] $A [SEP]", special_tokens=[("[CLS]", 2), ("[SEP]", 3)]
    )
    backend.add_special_tokens(list(SPECIAL))
    return Tokenizer(backend)


def sorted_batches(rows: list[list[int]], size: int) -> list[tuple[list[int], Tensor, Tensor]]:
    """Return padded batches of texts of similar length, for peers that read padded batches."""
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    batches = []
    for start in range(0, len(order), size):
        part = order[start : start + size]
        ids = torch.zeros(len(part), len(rows[part[-1]]), dtype=torch.int64)
        mask = torch.zeros_like(ids)
        for j, i in enumerate(part):
            ids[j, : len(rows[i])] = torch.tensor(rows[i])
            mask[j, : len(rows[i])] = 1
        batches.append((part, ids, mask))
    return batches


BATCH = 32
"""How many texts the other engines read at once; of 8, 32 and 64 it was the fastest for most."""

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
    """Return the call that tokenizes, computes states of padded batches, and pools them."""

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
        compute_type=name_of(problem.dtype),
        intra_threads=torch.get_num_threads(),
    )

    def states(ids: Tensor, mask: Tensor) -> Tensor:
        lengths = library.StorageView.from_array(mask.sum(1).numpy().astype(np.int32))
        view = library.StorageView.from_array(ids.numpy().astype(np.int32))
        out = encoder.forward_batch(view, lengths).last_hidden_state
        return torch.from_numpy(np.array(out.to(library.DataType.float32)))

    return _padded(states, problem)._replace(owner=folder)


SENTENCES: tuple[Peer[SentenceProblem], ...] = tuple(
    Peer(
        name,
        description,
        prepare,
        needs,
        devices=("cpu",),
        dtypes=(FP32,) if name == "ONNX Runtime" else (FP32, BF16),
        own_process=name not in ("regard", "transformers"),
    )
    for name, description, prepare, needs in (
        ("regard", "TextEncoder.embed: packed rows without padding.", _ours, ()),
        ("transformers", "BertModel with torch's SDPA.", _transformers, ("transformers",)),
        (
            "ONNX Runtime",
            "The exported BertModel, in fp32.",
            _onnx_runtime,
            ("onnxruntime", "onnx", "transformers"),
        ),
        (
            "OpenVINO",
            "The exported BertModel.",
            _openvino,
            ("openvino", "onnx", "transformers"),
        ),
        (
            "CTranslate2",
            "The converted BertModel.",
            _ctranslate2,
            ("ctranslate2", "transformers"),
        ),
    )
)
