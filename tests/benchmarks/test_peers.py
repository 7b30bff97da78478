"""Every peer that is installed gives the right answer at small sizes, in every dtype of its cases;
what each refuses; and adapters of libraries that the tests do not install, against stand-ins.

A stand-in does what the documentation of its library says. It computes from what it was given, by a
formula of its own: an adapter that hands over the wrong thing is wrong.
"""

from __future__ import annotations

import ctypes
import re
import types
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import flex_attention

import regard
from benchmarks import CASES, Case, Peer
from benchmarks import attention_peers as peers
from benchmarks.attention import AttentionProblem, AttentionSizes
from benchmarks.cases import GROUPS, MODELS
from benchmarks.engines import ENGINES
from benchmarks.model import LAYER_NAMES, MODEL_NAMES, ModelProblem, last_logits
from benchmarks.parallel import PARALLEL, PEERS, ParallelSizes
from benchmarks.programs import DRAW_PAGE, find_browser
from benchmarks.regard_peers import KERNELS
from benchmarks.render import parallel_table
from benchmarks.result import check_outputs
from regard.files.gguf_files import read_gguf_header, read_plain
from regard.parallel import plan
from tests.benchmarks.small import CPU, MODEL, SMALL, run_peers

LLAMA_CPP = ENGINES[0]
SLOW = (peers.FLEX, *(x for x in KERNELS if x.name == "regard flex"))
"""Peers that are compiled for seconds; torch's runs below as it stands."""
PAIRS = [
    pytest.param(case, peer, id=f"{case.name}-{peer.name}")
    for case in CASES.values()
    if case not in (*MODELS, *PARALLEL)  # in test_public_models.py, and below
    for peer in case.peers
    if peer not in SLOW and peer.missing() is None
]


def assert_right(problem: Any, peer: Peer[Any]) -> None:
    """The outputs are right, twice: a step leaves everything as it was."""
    call = peer.prepare(problem)
    for _ in range(2):
        outputs = problem.checked(call.read(call.step()))
        check = check_outputs(outputs, problem.reference(), problem.plain())
        assert check.correct, check.why
    assert peer.extra_bytes(problem) >= 0


def small(name: str, dtype: torch.dtype = torch.float32) -> Any:
    return SMALL[name].problem(dtype, CPU)


def attention(dtype: torch.dtype = torch.float32, S: int = 8, **options: Any) -> AttentionProblem:
    return AttentionSizes(B=2, H=2, G=1, D=4, S=S, **options).problem(dtype, CPU)


@pytest.mark.full(keep=3)
@pytest.mark.parametrize(("case", "peer"), PAIRS)
def test_an_installed_peer_is_right(case: Case, peer: Peer[Any]) -> None:
    reasons = []
    for dtype in case.dtypes:
        problem = small(case.name, dtype)
        reasons.append(peer.refusal(problem))
        if reasons[-1] is None:
            assert_right(problem, peer)
    if peer is case.peers[0] and (case is not DRAW_PAGE or find_browser() is not None):
        assert set(reasons) == {None}, "ours solves every case"


def test_ours_are_first_and_names_are_unique() -> None:
    for name, case in CASES.items():
        assert case.name == name
        assert re.match(r"regard\b", case.peers[0].name), case.peers[0].name
        assert len({peer.name for peer in case.peers}) == len(case.peers)
        assert set(case.sizes) == {"small", "default", "paper"}


@pytest.mark.full(keep=2)
@pytest.mark.parametrize(
    "name", ["decode", "causal-prefill", "window-prefill", "alibi", "left-padded"]
)
def test_flex_attention_as_it_stands(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "_compiled_flex", lambda: flex_attention)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that it is not compiled
        assert_right(small(name), peers.FLEX)


def test_every_kernel_of_regard_is_a_peer_and_says_why_it_refuses() -> None:
    q = torch.randn(1, 1, 2, 4)
    names = {f"regard {choice.kernel}" for choice in regard.plan(q, q, q).choices}
    assert {peer.name for peer in KERNELS} == names
    problem = attention(torch.float64, train=True)
    reasons = {peer.name: peer.refusal(problem) for peer in KERNELS}
    assert reasons["regard reference"] is None
    assert "float64" in (reasons["regard cpu"] or "")


@pytest.mark.parametrize("window", [1, 5, 19, 40])
def test_a_window_in_chunks_is_the_window(window: int) -> None:
    problem = AttentionSizes(B=2, H=4, G=2, D=8, S=19, window=window).problem(torch.float32, CPU)
    assert peers.CHUNKED.refusal(problem) is None
    assert_right(problem, peers.CHUNKED)


NO_FOLD, NO_CHUNKS = "only one query that sees every key", "only a causal window"


@pytest.mark.parametrize(
    ("peer", "problem", "why"),
    [
        (peers.FOLDED, small("decode"), None),
        *(
            (peers.FOLDED, small(x), NO_FOLD)
            for x in ("causal-prefill", "alibi", "left-padded", "training-step")
        ),
        *(
            (peers.CHUNKED, small(x), NO_CHUNKS)
            for x in ("causal-prefill", "decode", "alibi", "left-padded")
        ),
        (peers.FLEX, small("training-step"), "has no gradient on a CPU"),
        (peers.FLEX, attention(sink=True), "returns no output with a sink"),
        (peers.FLASH, small("decode"), "runs on cuda only"),
        (peers.SDPA, attention(softcap=1.0), "has neither softcap nor sink"),
        (peers.ONNX_RUNTIME, attention(), None),
        (peers.ONNX_RUNTIME, attention(torch.float16, window=4), None),
        (peers.ONNX_RUNTIME, attention(torch.bfloat16), "has no bfloat16"),
        (peers.ONNX_RUNTIME, attention(train=True), "has no gradient"),
        (peers.ONNX_RUNTIME, attention(alibi=True), "has no ALiBi"),
        (peers.ONNX_RUNTIME, attention(padded=True), "pads on the right only"),
        (LLAMA_CPP, small("model-decode", torch.float16), None),
        (LLAMA_CPP, small("model-decode", torch.bfloat16), "this adapter has no bfloat16"),
        (LLAMA_CPP, MODEL.resized(batch=2).problem(torch.float16, CPU), "a batch of one row"),
        (ENGINES[2], small("model-decode-int8"), "no weights of 8 bits"),
    ],
    ids=lambda x: x.name if isinstance(x, Peer) else "",
)
def test_what_a_peer_refuses(peer: Peer[Any], problem: Any, why: str | None) -> None:
    refusal = peer.refusal(problem)
    assert refusal is None if why is None else why in (refusal or "")


def test_flex_attention_needs_a_compiler() -> None:
    assert peers.why_not_flex(small("decode"), ("no-such-compiler",)) == "needs a C++ compiler"


@pytest.mark.parametrize("peer", [peers.X_TRANSFORMERS, peers.ONNX_RUNTIME], ids=lambda x: x.name)
def test_memory_of_a_peer_grows_with_the_problem(peer: Peer[Any]) -> None:
    short, long = (peer.extra_bytes(attention(window=3, S=S)) for S in (8, 64))
    assert 0 < short < long


# several ranks

RANKS: dict[str, dict[str, Any]] = {
    "parallel-causal": {},
    "parallel-window": {"window": 9},
    "parallel-documents": {"documents": True},
}


def ranks(name: str) -> ParallelSizes:
    return ParallelSizes(B=1, H=4, G=2, D=16, S=96, W=2, **RANKS[name])


@pytest.mark.full
@pytest.mark.parametrize("name", RANKS)
def test_every_peer_on_ranks_is_right_and_reports_its_figures(name: str) -> None:
    result = run_peers(*CASES[name].peers, sizes=ranks(name), budget={"rounds": 1})
    rows = {row.peer: row for row in result.rows}
    assert rows.pop("ring-flash-attention").status in ("missing", "unable")
    assert [row.status for row in rows.values()] == ["timed"] * 4
    problem = ranks(name).problem(torch.float32, CPU)
    every = problem.k.nbytes + problem.v.nbytes  # one rank sends to one other
    planned = plan(problem.shards, problem.mask, heads=(4, 2), dims=(16, 16))
    figures = {peer: row.figures or {} for peer, row in rows.items()}
    ours = figures["regard.parallel"]
    assert ours["sent_bytes"] == sum(planned[planned.method].sent)
    assert ours["sent_of_all"] == ours["sent_bytes"] / every
    assert ours["rank_bytes_bound"] == problem.rank_bytes_bound
    sent = [figures[x]["sent_bytes"] for x in ("forwarding ring", "all-gather", "one process")]
    assert sent == [every, every, 0]
    lines = parallel_table([result]).splitlines()
    assert [line.split()[2] for line in lines[1:]] == [name.split()[0] for name in rows]


def test_what_ranks_refuse() -> None:
    assert GROUPS["parallel"] == tuple(case.name for case in PARALLEL)
    problem = ranks("parallel-window").problem(torch.float32, CPU)
    *ours, flash = PEERS
    assert {peer.refusal(problem) for peer in ours} == {None}
    assert flash.refusal(problem) == "runs on cuda only"
    problem.device = torch.device("cuda")
    assert flash.refusal(problem) == "its zigzag ring is causal only"
    if torch.cuda.device_count() < 2:
        assert "needs 2 GPUs" in str(ours[0].refusal(problem))


# stand-ins


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
    assert peers.ONNX_RUNTIME.missing() is None
    assert_right(small(name, dtype), peers.ONNX_RUNTIME)


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
    assert peers.X_TRANSFORMERS.missing() is None
    assert_right(small(name), peers.X_TRANSFORMERS)


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
        weights = {name: self.file[theirs] for name, theirs in MODEL_NAMES.items()}
        for layer in range(self.keys["qwen2.block_count"]):
            for name, theirs in LAYER_NAMES.items():
                weights[f"layers.{layer}.{name}"] = self.file[f"blk.{layer}.{theirs}"]
        ids = torch.tensor([self.tokens])
        return last_logits(problem.config, weights, ids, None, torch.float32).flatten()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_llama_cpp(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = MODEL.problem(dtype, CPU)
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
    assert LLAMA_CPP.missing() is None
    assert_right(problem, LLAMA_CPP)
    (network,) = networks
    assert network.n_tokens == MODEL.S + 1  # each step takes the place of the last
    assert network.tokens[-1] == int(problem.ids)
    heads = [network.keys[f"qwen2.attention.head_count{end}"] for end in ("", "_kv")]
    assert heads == [MODEL.H, MODEL.G]
    assert network.keys["qwen2.rope.freq_base"] == 1e6
    assert {x.dtype for x in network.file.values() if x.ndim == 2} == {dtype}
