"""Adapters of libraries that the tests do not install, against stand-ins that do what their
documentation says.

A stand-in computes from what it was given, by a formula of its own: an adapter that hands over the
wrong thing is wrong.
"""

from __future__ import annotations

import ctypes
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from benchmarks.peers import llama_cpp, onnx_runtime, x_transformers
from benchmarks.problems import AttentionSizes, ModelProblem, ModelSizes
from benchmarks.problems.model import last_logits
from benchmarks.result import check_outputs
from regard.files.gguf_files import read_gguf_header, read_plain
from tests.benchmarks.small import CPU, SMALL


def softmax_rows(q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
    scores = (q.double() @ k.double().mT) / q.shape[-1] ** 0.5
    return torch.softmax(scores.masked_fill(~seen, -torch.inf), -1) @ v.double()


def put(monkeypatch: pytest.MonkeyPatch, modules: dict[str, Any]) -> None:
    for name, members in modules.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(__import__("sys").modules, name, module)


class Value:
    """OrtValue: an array that keeps its memory."""

    def __init__(self, array: np.ndarray) -> None:
        self.array = array

    @classmethod
    def ortvalue_from_numpy(cls, array: np.ndarray) -> Value:
        return cls(array)

    def numpy(self) -> np.ndarray:
        return self.array


class Binding:
    def __init__(self) -> None:
        self.inputs: dict[str, Value] = {}
        self.outputs: dict[str, Value] = {}

    def bind_ortvalue_input(self, name: str, value: Value) -> None:
        self.inputs[name] = value

    def bind_ortvalue_output(self, name: str, value: Value) -> None:
        self.outputs[name] = value


class Session:
    """GroupQueryAttention, as ContribOperators.md has it; the graph is the attributes of its one
    node.
    """

    def __init__(self, graph: dict[str, Any], options: Any, providers: list[str]) -> None:
        assert providers == ["CPUExecutionProvider"]
        assert options.intra_op_num_threads == torch.get_num_threads()
        self.node = graph

    def io_binding(self) -> Binding:
        return Binding()

    def run_with_iobinding(self, binding: Binding) -> None:
        given = {name: torch.from_numpy(x.array) for name, x in binding.inputs.items()}
        H, G = self.node["num_heads"], self.node["kv_num_heads"]
        heads = {
            name: given[name].unflatten(-1, (n, -1)).transpose(1, 2)
            for name, n in (("query", H), ("key", G), ("value", G))
        }
        total, T = int(given["total_sequence_length"]), heads["query"].shape[2]
        assert (given["seqlens_k"] == total - 1).all()
        for name in ("key", "value"):  # the present shares the memory of the past
            assert binding.outputs[f"present_{name}"] is binding.inputs[f"past_{name}"]
            given[f"past_{name}"][:, :, total - T : total] = heads[name]
        k, v = (given[f"past_{n}"].repeat_interleave(H // G, 1) for n in ("key", "value"))
        i, j = torch.arange(total - T, total)[:, None], torch.arange(total)
        window = self.node.get("local_window_size", total)
        out = softmax_rows(heads["query"], k, v, (j <= i) & (j > i - window))
        binding.outputs["output"].array[:] = out.transpose(1, 2).flatten(2).numpy()


@pytest.mark.parametrize("name", ["decode", "causal-prefill", "window-prefill"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_onnx_runtime(name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    helper = types.SimpleNamespace(
        np_dtype_to_tensor_dtype=lambda dtype: dtype.name,
        make_tensor_value_info=lambda name, kind, shape: name,
        make_node=lambda op, inputs, outputs, domain, **more: {"op": op, "domain": domain, **more},
        make_graph=lambda nodes, name, inputs, outputs: nodes[0],
        make_opsetid=lambda domain, version: (domain, version),
        make_model=lambda graph, **more: types.SimpleNamespace(SerializeToString=lambda: graph),
    )
    options = types.SimpleNamespace
    runtime = {"SessionOptions": options, "InferenceSession": Session, "OrtValue": Value}
    kinds = types.SimpleNamespace(INT32=6)
    put(monkeypatch, {"onnxruntime": runtime, "onnx": {"helper": helper, "TensorProto": kinds}})
    assert onnx_runtime.ATTENTION.missing() is None
    problem = SMALL[name].problem(dtype, CPU)
    assert isinstance(problem.sizes, AttentionSizes)  # type: ignore[attr-defined]
    way = onnx_runtime.attention(problem)  # type: ignore[arg-type]
    found = problem.checked(way.read(way.step()))
    assert check_outputs(found, problem.reference(), problem.plain()).correct


class Attend:
    """x_transformers.attend.Attend: query head h reads key/value head h % G; a bias and a mask make
    no causal flag.
    """

    def __init__(self, *, causal: bool, flash: bool) -> None:
        assert causal
        assert flash

    def __call__(
        self, q: Tensor, k: Tensor, v: Tensor, mask: Any = None, attn_bias: Any = None
    ) -> tuple[Tensor, None]:
        repeats = q.shape[1] // k.shape[1]
        k, v = k.repeat(1, repeats, 1, 1), v.repeat(1, repeats, 1, 1)
        T, S = q.shape[2], k.shape[2]
        seen = torch.ones(T, S, dtype=torch.bool).tril(S - T)
        seen = seen if mask is None else seen & mask
        scores = q @ k.mT / q.shape[-1] ** 0.5
        scores = scores if attn_bias is None else scores + attn_bias
        scores = scores.masked_fill(~seen, torch.finfo(scores.dtype).min)
        return torch.softmax(scores, -1) @ v, None


@pytest.mark.parametrize(
    "name",
    ["decode", "causal-prefill", "window-prefill", "alibi", "left-padded", "window-training"],
)
def test_x_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    put(monkeypatch, {"x_transformers": {}, "x_transformers.attend": {"Attend": Attend}})
    assert x_transformers.ATTENTION.missing() is None
    problem = SMALL[name].problem(torch.float32, CPU)
    way = x_transformers.attention(problem)  # type: ignore[arg-type]
    assert check_outputs(problem.checked(way.read(way.step())), problem.reference(), {}).correct


def tensors_of(path: str) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """The metadata of a GGUF file, and its tensors, which have no blocks."""
    header = read_gguf_header(Path(path))
    dtypes = {"F32": torch.float32, "F16": torch.float16}
    tensors = {
        name: read_plain(header, x, dtypes[x.format.name]) for name, x in header.tensors.items()
    }
    return dict(header.metadata), tensors


class Llama:
    """llama_cpp.Llama: reads tokens behind n_tokens; its weights are those of the file, under the
    file's names.
    """

    def __init__(self, path: str, **options: Any) -> None:
        assert Path(path).exists()
        assert options["flash_attn"] == (options["type_k"] == 1)  # it rounds to fp16
        assert options["type_k"] == options["type_v"]
        self.keys, self.file = tensors_of(path)
        self.n_ctx, self.ctx = options["n_ctx"], self
        self.tokens: list[int] = []
        self.n_tokens = 0

    def reset(self) -> None:
        self.n_tokens = 0

    def eval(self, tokens: list[int]) -> None:
        self.tokens = [*self.tokens[: self.n_tokens], *tokens]
        self.n_tokens = len(self.tokens)
        assert self.n_tokens <= self.n_ctx

    def logits(self, problem: ModelProblem) -> Any:
        """What its weights say of its tokens, by the definition, from the names of the file."""
        weights = {name: self.file[theirs] for name, theirs in llama_cpp.MODEL_NAMES.items()}
        for layer in range(self.keys["qwen2.block_count"]):
            for name, theirs in llama_cpp.LAYER_NAMES.items():
                weights[f"layers.{layer}.{name}"] = self.file[f"blk.{layer}.{theirs}"]
        ids = torch.tensor([self.tokens])
        return last_logits(problem.config, weights, ids, None, torch.float32).flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_llama_cpp(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = SMALL["model-decode"]
    assert isinstance(sizes, ModelSizes)
    problem = sizes.problem(dtype, CPU)
    networks: list[Llama] = []
    buffers: list[Any] = []

    def make(path: str, **options: Any) -> Llama:
        networks.append(Llama(path, **options))
        return networks[-1]

    def logits(ctx: Llama, i: int) -> Any:
        assert i == -1
        values = ctx.logits(problem).tolist()
        buffers.append((ctypes.c_float * len(values))(*values))
        return ctypes.cast(buffers[-1], ctypes.POINTER(ctypes.c_float))

    library = {"Llama": make, "llama_get_logits_ith": logits}
    library |= {"GGML_TYPE_F16": 1, "GGML_TYPE_F32": 0}
    put(monkeypatch, {"llama_cpp": library})
    assert llama_cpp.MODEL.missing() is None
    way = llama_cpp.model(problem)
    for _ in range(3):
        way.step()
    (network,) = networks
    assert network.n_tokens == sizes.S + 1  # each step takes the place of the last
    assert network.tokens[-1] == int(problem.ids)
    found = way.read(None)
    assert set(found) == {"prompt"}
    assert check_outputs(found, problem.reference(), problem.plain()).correct
    heads = [network.keys[f"qwen2.attention.head_count{end}"] for end in ("", "_kv")]
    assert heads == [sizes.H, sizes.G]
    assert network.keys["qwen2.rope.freq_base"] == 1e6
    assert {x.dtype for x in network.file.values() if x.ndim == 2} == {dtype}
