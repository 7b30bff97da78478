"""ONNX Runtime's GroupQueryAttention (domain com.microsoft), on its CPU provider.

The inputs are query `[B, T, H D]`, key and value `[B, T, G D]` of the new tokens, past_key and
past_value `[B, G, P, D]`, seqlens_k `[B]` (the number of tokens minus 1) and total_sequence_length.
If the output present_key shares the memory of past_key, nothing is copied.
"""

from __future__ import annotations

import importlib

import numpy as np
import torch
from torch import Tensor

from benchmarks.interfaces import Peer, PreparedCall
from benchmarks.problems import AttentionProblem

NEEDS = ("onnxruntime", "onnx")
DOMAIN, OPSET, IR = "com.microsoft", 20, 10
_NUMPY = {torch.float32: np.float32, torch.float16: np.float16}


def attention(problem: AttentionProblem) -> PreparedCall:
    """Prepare attention of the last T of S tokens to a cache; all tensors are bound in advance."""
    runtime = importlib.import_module("onnxruntime")
    s, T = problem.sizes, problem.sizes.queries
    options = runtime.SessionOptions()
    options.intra_op_num_threads = torch.get_num_threads()
    session = runtime.InferenceSession(_graph(problem), options, providers=["CPUExecutionProvider"])
    past_length = s.S - T
    k, v = problem.k.detach(), problem.v.detach()
    feeds = {
        "query": _rows(problem.q.detach()),
        "key": _rows(k[:, :, past_length:]),
        "value": _rows(v[:, :, past_length:]),
        "past_key": _array(k),
        "past_value": _array(v),
        "seqlens_k": np.full((s.B,), s.S - 1, np.int32),
        "total_sequence_length": np.array(s.S, np.int32),
    }
    binding = session.io_binding()
    values = {name: runtime.OrtValue.ortvalue_from_numpy(x) for name, x in feeds.items()}
    for name, value in values.items():
        binding.bind_ortvalue_input(name, value)
    out = runtime.OrtValue.ortvalue_from_numpy(np.zeros((s.B, T, s.H * s.D), _NUMPY[problem.dtype]))
    binding.bind_ortvalue_output("output", out)
    for name in ("key", "value"):
        binding.bind_ortvalue_output(f"present_{name}", values[f"past_{name}"])

    def read(_: object) -> dict[str, Tensor]:
        z = torch.from_numpy(out.numpy().copy())
        return {"out": z.view(s.B, T, s.H, s.D).transpose(1, 2)}

    return PreparedCall(lambda: session.run_with_iobinding(binding), read)


def why_not(problem: AttentionProblem) -> str | None:
    """Return why the operator or its CPU provider does not support the problem, or None."""
    s = problem.sizes
    for refused, reason in (
        (problem.device.type != "cpu", "this adapter supports only a CPU"),
        (problem.train, "has no gradient"),
        (
            problem.dtype not in _NUMPY,
            f"its CPU provider has no {str(problem.dtype).removeprefix('torch.')}",
        ),
        (s.alibi, "has no ALiBi"),
        (s.padded, "pads on the right only"),
    ):
        if refused:
            return reason
    return None


def _graph(problem: AttentionProblem) -> bytes:
    """Return a serialised ONNX model whose only node is GroupQueryAttention."""
    onnx = importlib.import_module("onnx")
    helper, s = onnx.helper, problem.sizes
    names = (
        "query",
        "key",
        "value",
        "past_key",
        "past_value",
        "seqlens_k",
        "total_sequence_length",
    )
    kind = helper.np_dtype_to_tensor_dtype(np.dtype(_NUMPY[problem.dtype]))
    ranks = (3, 3, 3, 4, 4, 1, 0)
    kinds = (*(kind,) * 5, onnx.TensorProto.INT32, onnx.TensorProto.INT32)
    inputs = [
        helper.make_tensor_value_info(name, kind, [None] * rank)
        for name, kind, rank in zip(names, kinds, ranks, strict=True)
    ]
    results = ("output", "present_key", "present_value")
    outputs = [
        helper.make_tensor_value_info(name, kind, [None] * rank)
        for name, rank in zip(results, (3, 4, 4), strict=True)
    ]
    window = {} if s.window is None else {"local_window_size": s.window}
    node = helper.make_node(
        "GroupQueryAttention",
        names,
        results,
        domain=DOMAIN,
        num_heads=s.H,
        kv_num_heads=s.G,
        scale=s.D**-0.5,
        **window,
    )
    graph = helper.make_graph([node], "attention", inputs, outputs)
    imports = [helper.make_opsetid("", OPSET), helper.make_opsetid(DOMAIN, 1)]
    model = helper.make_model(graph, opset_imports=imports, ir_version=IR)
    serialized: bytes = model.SerializeToString()
    return serialized


def _rows(x: Tensor) -> object:
    """Return `[B, n, T, D]` as a numpy array `[B, T, n D]`."""
    return _array(x.transpose(1, 2).flatten(2))


def _array(x: Tensor) -> object:
    """Return a copy of a tensor as a numpy array."""
    return x.contiguous().clone().numpy()


def copied_bytes(problem: AttentionProblem) -> int:
    """Return the memory in bytes of ONNX Runtime's own buffers for keys and values."""
    return 3 * (problem.k.numel() + problem.v.numel()) * problem.dtype.itemsize


ATTENTION = Peer(
    "ONNX Runtime",
    "com.microsoft GroupQueryAttention, shared cache buffers.",
    attention,
    needs=NEEDS,
    why_not=why_not,
    bytes=copied_bytes,
)
