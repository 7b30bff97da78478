"""Attention of other libraries: torch's SDPA and FlexAttention, x-transformers, ONNX Runtime.

The inputs of ONNX Runtime's GroupQueryAttention (domain com.microsoft) are query `[B, T, H D]`, key
and value `[B, T, G D]` of the new tokens, past_key and past_value `[B, G, P, D]`, seqlens_k `[B]`
(the number of tokens minus 1) and total_sequence_length. If the output present_key shares the
memory of past_key, nothing is copied.
"""

from __future__ import annotations

import importlib
import shutil
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention import flex_attention as torch_flex

from benchmarks.attention import SINK_KEYS, AttentionProblem, LatentProblem, prepared_call
from benchmarks.interfaces import Peer, PreparedCall


def sdpa(problem: AttentionProblem) -> PreparedCall:
    """Prepare SDPA with `enable_gqa`; one query sees every key and needs no mask."""
    options = {**_sdpa_options(problem), "enable_gqa": problem.sizes.G != problem.sizes.H}
    q, k, v = problem.q, problem.k, problem.v
    return prepared_call(problem, partial(F.scaled_dot_product_attention, q, k, v, **options))


def pinned(problem: AttentionProblem, backend: SDPBackend) -> PreparedCall:
    """Prepare SDPA that may run one of its kernels only."""
    call = sdpa(problem)

    def step() -> object:
        with sdpa_kernel([backend]):
            return call.step()

    return call._replace(step=step, kernel=backend.name.lower())


def why_not_pinned(problem: AttentionProblem, backend: SDPBackend) -> str | None:
    """Return why a kernel of SDPA cannot run the problem, or None."""
    if "attn_mask" in _sdpa_options(problem) and backend != SDPBackend.EFFICIENT_ATTENTION:
        return "takes no dense mask"
    return why_not_everything(problem)


def why_not_everything(problem: AttentionProblem) -> str | None:
    """Return why SDPA cannot compute the scores of the problem, or None."""
    s = problem.sizes
    return "has neither softcap nor sink" if s.softcap is not None or s.sink else None


def folded(problem: AttentionProblem) -> PreparedCall:
    """Prepare SDPA with the heads of a group as queries of one head: each key is read once."""
    s = problem.sizes
    q = problem.q.detach().view(s.B, s.G, s.H // s.G, s.D)
    call = partial(F.scaled_dot_product_attention, q, problem.k, problem.v)
    return prepared_call(problem, call, lambda out: out.view(problem.q.shape))


def why_not_folded(problem: AttentionProblem) -> str | None:
    """Return why the queries of the problem cannot be folded, or None."""
    s = problem.sizes
    if s.queries == 1 and s.G < s.H and s.causal_only and not s.train:
        return None
    return "only one query that sees every key can be folded"


def chunked(problem: AttentionProblem) -> PreparedCall:
    """Prepare a window as one fused call: chunks of W queries, each with a view of 2 W keys."""
    s = problem.sizes
    assert s.window is not None, "`why_not_chunked` refuses other problems"
    B, H, G, D, T, W = s.B, s.H, s.G, s.D, s.S, s.window
    n = -(-T // W)
    L = n * W
    i, j = torch.arange(W)[:, None], torch.arange(2 * W)[None]
    mask = ((j - W <= i) & (j - W > i - W)).expand(n, 1, W, 2 * W).clone()
    mask[0] &= j >= W
    mask = mask.to(problem.device)

    def call() -> Tensor:
        q = F.pad(problem.q, (0, 0, 0, L - T)).contiguous()
        k, v = (F.pad(x, (0, 0, W, L - T)).contiguous() for x in (problem.k, problem.v))
        qs = q.as_strided((n, B * H, W, D), (W * D, L * D, D, 1))
        ks, vs = (x.as_strided((n, B * G, 2 * W, D), (W * D, (L + W) * D, D, 1)) for x in (k, v))
        out = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, enable_gqa=G != H)
        return out.view(n, B, H, W, D).permute(1, 2, 0, 3, 4).reshape(B, H, L, D)[:, :, :T]

    return prepared_call(problem, call)


def why_not_chunked(problem: AttentionProblem) -> str | None:
    """Return why the problem cannot be split into chunks, or None."""
    s = problem.sizes
    if s.window is not None and s.queries == s.S and replace(s, window=None).causal_only:
        return None
    return "only a causal window without padding or bias can be split into chunks"


def absorbed(problem: LatentProblem) -> PreparedCall:
    """Prepare latent attention in the absorbed form, which torch's fused kernel supports."""
    s = problem.sizes
    w_k, w_v = torch.unflatten(problem.weight, 0, (s.H, -1)).split_with_sizes(
        (s.nope, s.value), dim=1
    )
    memory = problem.memory

    def step() -> Tensor:
        with torch.no_grad():
            q = torch.einsum("bhtd,hdr->bhtr", problem.q_nope, w_k)
            q = torch.cat((q, problem.q_rope), dim=-1).transpose(1, 2)
            # keys also as values, so that the fused kernel supports the call; the columns after
            # the rank are removed
            z = F.scaled_dot_product_attention(q, memory, memory, scale=problem.scale)
            return torch.einsum("bthr,her->bhte", z[..., : s.rank], w_v)

    return PreparedCall(step, lambda out: {"out": out})


def _sdpa_options(problem: AttentionProblem) -> dict[str, Any]:
    """Return the causal flag if it is the mask, else a dense mask; float with a bias."""
    s = problem.sizes
    if s.causal_only and s.queries == 1:
        return {}
    if s.causal_only and s.queries == s.S:
        return {"is_causal": True}
    visible = problem.visible()
    if s.alibi:
        return {"attn_mask": problem.bias().masked_fill(~visible, float("-inf"))}
    return {"attn_mask": visible}


def mask_bytes(problem: AttentionProblem) -> int:
    """Return the bytes of a dense mask, which torch converts to numbers; a bias has H."""
    s = problem.sizes
    pairs = s.queries * s.S * (s.B if s.padded else 1)
    if s.alibi:
        return 3 * s.H * pairs * problem.dtype.itemsize
    masked = s.window or s.padded or s.pattern
    return pairs * (2 + problem.dtype.itemsize) if masked else 0


SDPA = Peer(
    "torch SDPA",
    "F.scaled_dot_product_attention, enable_gqa.",
    sdpa,
    why_not=why_not_everything,
    bytes=mask_bytes,
)
FLASH, CUDNN, EFFICIENT = (
    Peer(
        f"torch SDPA {name}",
        f"SDPA that may run its {name} kernel only.",
        partial(pinned, backend=backend),
        devices=("cuda",),
        why_not=partial(why_not_pinned, backend=backend),
        bytes=mask_bytes,
    )
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
    )
)
FOLDED = Peer(
    "torch SDPA folded", "SDPA with the groups folded into queries.", folded, why_not=why_not_folded
)
CHUNKED = Peer(
    "torch SDPA in chunks", "SDPA over strided views of a window.", chunked, why_not=why_not_chunked
)
ABSORBED = Peer("torch SDPA absorbed", "SDPA over latents, the absorbed form by hand.", absorbed)


COMPILERS = ("c++", "g++", "clang++")


def flex(problem: AttentionProblem) -> PreparedCall:
    """Prepare compiled FlexAttention. The first call compiles it, which is not timed."""
    s, T = problem.sizes, problem.sizes.queries
    offset, pads = s.S - T, torch.tensor(problem.pads, device=problem.device)

    def visible(b: Tensor, _: Tensor, i: Tensor, j: Tensor) -> Tensor:
        i = i + offset
        allowed = i >= j
        if s.window is not None:
            allowed = allowed & (i - j < s.window)
        if s.pattern == "sinks":
            allowed = allowed | ((j < SINK_KEYS) & (i >= j))
        elif s.pattern == "prefix":
            allowed = allowed | (j < s.prefix)
        elif s.pattern == "documents":
            allowed = allowed & (i // s.document == j // s.document)
        return allowed & (j >= pads[b]) & (i >= pads[b]) if s.padded else allowed

    blocks = None
    if T > 1:
        B = s.B if s.padded else None
        blocks = torch_flex.create_block_mask(visible, B, None, T, s.S, device=problem.device.type)
    options: dict[str, object] = {"block_mask": blocks, "enable_gqa": s.G != s.H}
    if s.alibi or s.softcap is not None:
        slopes = problem.slopes.to(problem.device, torch.float32)

        def change_score(score: Tensor, _: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
            if s.softcap is not None:
                score = s.softcap * torch.tanh(score / s.softcap)
            return score + slopes[h] * (j - i - offset) if s.alibi else score

        options["score_mod"] = change_score
    call = _compiled_flex()
    return prepared_call(problem, lambda: call(problem.q, problem.k, problem.v, **options))


def _compiled_flex() -> Callable[..., object]:
    """Return torch's flex_attention in compiled form."""
    # after a number of compilations torch runs the function uncompiled, with a warning: reset the
    # compiler for each case
    torch.compiler.reset()
    compiled: Callable[..., object] = torch.compile(torch_flex.flex_attention, dynamic=False)
    return compiled


def why_not_flex(problem: AttentionProblem, compilers: Sequence[str] = COMPILERS) -> str | None:
    """Return why FlexAttention does not support the problem, or None."""
    if problem.sizes.sink:
        return "returns no output with a sink"
    if problem.device.type != "cpu":
        return None
    if problem.train:
        return "has no gradient on a CPU"
    if not any(map(shutil.which, compilers)):
        return "needs a C++ compiler"
    return None


FLEX = Peer("torch FlexAttention", "torch.compile(flex_attention).", flex, why_not=why_not_flex)


def x_transformers(problem: AttentionProblem) -> PreparedCall:
    """Prepare `Attend`, whose head h attends to h % G, so that heads are reordered."""
    s = problem.sizes
    module = importlib.import_module("x_transformers.attend").Attend(causal=True, flash=True)
    order = torch.arange(s.H, device=problem.device).view(s.G, -1).T.flatten()
    options: dict[str, object] = {}
    if s.window is not None or s.padded:
        visible = problem.visible()
        options["mask"] = visible | ~visible.any(dim=-1, keepdim=True)
    if s.alibi:
        options["attn_bias"] = problem.bias()[:, order]
    # in training the reordering is part of the call, since gradients are taken for the problem's q
    q = None if problem.train else problem.q[:, order].contiguous()

    def call() -> Tensor:
        out: Tensor = module(
            _ordered(problem, order) if q is None else q, problem.k, problem.v, **options
        )[0]
        return out

    inverse = order.argsort()
    return prepared_call(problem, call, lambda out: out[:, inverse])


def _ordered(problem: AttentionProblem, order: Tensor) -> Tensor:
    """Return the queries with their heads in the order of x-transformers."""
    return problem.q[:, order] if problem.sizes.G < problem.sizes.H else problem.q


def repeated_bytes(problem: AttentionProblem) -> int:
    """Return the memory in bytes of the keys and values of every head, and of the mask."""
    s = problem.sizes
    mask = s.B * s.H * s.queries * s.S * 8 if s.window or s.padded or s.alibi else 0
    return 2 * s.B * s.H * s.S * s.D * problem.dtype.itemsize + mask


X_TRANSFORMERS = Peer(
    "x-transformers",
    "x_transformers.attend.Attend, flash.",
    x_transformers,
    needs=("x_transformers",),
    bytes=repeated_bytes,
)


DOMAIN, OPSET, IR = "com.microsoft", 20, 10
_NUMPY = {torch.float32: np.float32, torch.float16: np.float16}


def onnx_runtime(problem: AttentionProblem) -> PreparedCall:
    """Prepare GroupQueryAttention of the last T of S tokens; all tensors are bound in advance."""
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


def why_not_onnx_runtime(problem: AttentionProblem) -> str | None:
    """Return why the operator does not support the problem, or None."""
    s = problem.sizes
    refused = {
        "has no gradient": problem.train,
        "has no ALiBi": s.alibi,
        "pads on the right only": s.padded,
    }
    return next((reason for reason, is_so in refused.items() if is_so), None)


def _graph(problem: AttentionProblem) -> bytes:
    """Return a serialized ONNX model whose only node is GroupQueryAttention."""
    onnx = importlib.import_module("onnx")
    helper, s = onnx.helper, problem.sizes
    names = ["query", "key", "value", "past_key", "past_value"]
    names += ["seqlens_k", "total_sequence_length"]
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


ONNX_RUNTIME = Peer(
    "ONNX Runtime",
    "com.microsoft GroupQueryAttention, shared cache buffers.",
    onnx_runtime,
    needs=("onnxruntime", "onnx"),
    devices=("cpu",),
    dtypes=tuple(_NUMPY),  # what its CPU provider has
    why_not=why_not_onnx_runtime,
    bytes=copied_bytes,
)
