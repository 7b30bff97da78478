"""`regard.accelerate`: every call means what torch means by it, and nothing else of torch
changes.
"""

from __future__ import annotations

import copy
import math
import pickle
import subprocess
import sys
import threading
import types
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.backends.debugging import aot_eager
from torch.utils.flop_counter import FlopCounterMode

import regard
from regard.errors import ArgumentTypeError
from regard.inspect import watch
from regard.integrations.pytorch.torch_calls import as_attn_mask, mask_cache
from regard.ops.softmax import gemm
from tests.kernels import require_kernels
from tests.rules import GRADIENT, assert_close_rule

ORIGINAL = F.scaled_dot_product_attention


def plain(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, *, causal: bool, scale: float | None
) -> Tensor:
    """The equation in torch's documentation, in the dtype of q."""
    H, T, S = q.shape[1], q.shape[2], k.shape[2]
    k, v = (x.repeat_interleave(H // x.shape[1], 1) for x in (k, v))
    scores = q @ k.mT * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(~torch.ones(T, S, dtype=torch.bool).tril(), -torch.inf)
    if mask is not None and mask.dtype == torch.bool:
        scores = scores.masked_fill(~mask, -torch.inf)
    elif mask is not None:
        scores = scores + mask.to(scores.dtype)
    weights = scores.float().softmax(-1) if scores.dtype != torch.float64 else scores.softmax(-1)
    return weights.nan_to_num(0).to(v.dtype) @ v


def make_masks(B: int, H: int, T: int, S: int) -> dict[str, Tensor | None]:
    triangle = torch.ones(T, S, dtype=torch.bool).tril(S - T)
    tokens = torch.arange(S) < torch.tensor([S, S - 3])[:, None]
    empty = triangle.clone()
    empty[T // 2] = False
    return {
        "none": None,
        "triangle": triangle,
        "triangle of floats": torch.where(triangle, 0.0, -torch.inf),
        "padding": tokens[:, None, None],
        "padding and triangle": (tokens[:, None, None] & triangle),
        "window": triangle & torch.ones(T, S, dtype=torch.bool).triu(S - T - 2),
        "bias": torch.randn(B, H, T, S),
        "bias and triangle": torch.randn(1, H, T, S).masked_fill(~triangle, -torch.inf),
        "a row that sees nothing": empty,
        "heads differ": torch.rand(B, H, T, S) < 0.6,
        "three dimensions": torch.rand(H, T, S) < 0.8,
    }


NAMES = list(make_masks(2, 4, 3, 5))
SHAPES = [(4, 4, 9, 9), (4, 2, 5, 12), (4, 1, 1, 12), (4, 4, 12, 7)]


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_a_mask_means_what_torch_means_by_it(
    name: str, shape: tuple[int, int, int, int], dtype: torch.dtype
) -> None:
    H, G, T, S = shape
    q, k, v = (torch.randn(2, n, m, 16, dtype=dtype) for n, m in ((H, T), (G, S), (G, S)))
    mask = make_masks(2, H, T, S)[name]
    if mask is not None and mask.is_floating_point():
        mask = mask.to(dtype)
    assert_same(q, k, v, mask=mask)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("scale", [None, 0.3])
def test_is_causal_is_aligned_at_the_first_key(
    shape: tuple[int, int, int, int], scale: float | None
) -> None:
    H, G, T, S = shape
    q, k, v = (torch.randn(2, n, m, 8) for n, m in ((H, T), (G, S), (G, S)))
    assert_same(q, k, v, causal=True, scale=scale)


def assert_same(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    mask: Tensor | None = None,
    causal: bool = False,
    scale: float | None = None,
    is_torch_right: bool = True,
) -> None:
    """The call is taken, and is as near to the equation in float64 as torch's own result."""
    gqa = q.shape[1] != k.shape[1]
    options = {"attn_mask": mask, "is_causal": causal, "scale": scale, "enable_gqa": gqa}
    usual = ORIGINAL(q, k, v, **options)
    with regard.accelerate(always=True) as calls:
        z = F.scaled_dot_product_attention(q, k, v, **options)
    assert sum(calls.taken.values()) == 1, str(calls)
    assert z.dtype == usual.dtype
    exact = plain(q.double(), k.double(), v.double(), mask, causal=causal, scale=scale)
    same = plain(q, k, v, mask, causal=causal, scale=scale)
    if q.dtype == torch.float64:
        torch.testing.assert_close(z, exact, rtol=1e-12, atol=1e-12)
    else:
        assert_close_rule(z, [usual, same] if is_torch_right else same, exact)
    assert torch.allclose(usual.double(), exact, atol=0.1) is is_torch_right


def test_another_alignment_would_be_noticed() -> None:
    q, k = torch.randn(1, 2, 3, 8), torch.randn(1, 2, 6, 8)
    with regard.accelerate(always=True):
        z = F.scaled_dot_product_attention(q, k, k, is_causal=True)
    last = regard.attend(q, k, k, mask=regard.masks.Causal())
    assert not torch.allclose(z, last)


def test_what_is_hidden_never_shows_and_what_is_seen_is_never_lost() -> None:
    q, k, v = torch.randn(3, 1, 2, 6, 8).unbind(0)
    mask = torch.ones(6, 6, dtype=torch.bool).tril()
    v[:, :, 5] = torch.nan
    with regard.accelerate(always=True):
        z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
    assert z[:, :, :5].isfinite().all()
    assert z[:, :, 5].isnan().all()


def lowest(dtype: torch.dtype) -> Tensor:
    """A mask that hides a row by the lowest number."""
    mask = torch.zeros(4, 4, dtype=dtype)
    mask[1] = torch.finfo(dtype).min
    return mask


SMALL = torch.randn(1, 2, 4, 8)
VISIBLE = {"attn_mask": torch.ones(4, 4, dtype=torch.bool), "is_causal": True}
LEFT: dict[str, tuple[Tensor, dict[str, Any], str]] = {
    "dropout": (SMALL, {"dropout_p": 0.5}, "dropout"),
    "small": (SMALL, {}, "it is small"),
    "a mask beside is_causal": (SMALL, VISIBLE, ""),
    "three dimensions": (torch.randn(2, 4, 8), {}, "four dimensions"),
    **{
        f"a row hidden by a finite number, {dtype}": (
            SMALL.to(dtype),
            {"attn_mask": lowest(dtype)},
            "the mean of the values",
        )
        for dtype in (torch.float32, torch.bfloat16)
    },
}


@pytest.mark.parametrize("name", LEFT)
def test_what_is_left_to_torch_is_counted_with_its_reason(name: str) -> None:
    q, options, why = LEFT[name]
    torch.manual_seed(0)
    usual = ORIGINAL(q, q, q, **options)
    torch.manual_seed(0)
    with regard.accelerate(always=name != "small") as calls:
        z = F.scaled_dot_product_attention(q, q, q, **options)
    assert torch.equal(z, usual)
    assert not calls.taken
    assert any(why in reason for reason in calls.left), str(calls)
    assert str(calls).startswith("calls that ran in regard: 0; in torch: 1")


ONLY_IN_TORCH: list[dict[str, Any]] = [
    *({"scale": scale} for scale in (0.0, -0.0, math.inf, math.nan)),
    *({name: 0} for name in ("B", "H", "T", "D", "E")),
]


@pytest.mark.parametrize("given", ONLY_IN_TORCH, ids=str)
def test_what_has_a_meaning_in_torch_only_is_left_to_it(given: dict[str, Any]) -> None:
    B, H, T, D, E = (({"B": 1, "H": 2, "T": 3, "D": 8, "E": 8} | given)[x] for x in "BHTDE")
    q, k, v = (torch.randn(B, H, n, m) for n, m in ((T, D), (5, D), (5, E)))
    scale = given.get("scale")
    usual = ORIGINAL(q, k, v, scale=scale)
    with regard.accelerate(always=True) as calls:
        z = F.scaled_dot_product_attention(q, k, v, scale=scale)
    with watch(nn.Identity()), regard.Trace("z", missing="ignore"):
        watched = F.scaled_dot_product_attention(q, k, v, scale=scale)
    for x in (z, watched):
        torch.testing.assert_close(x, usual, rtol=0, atol=0, equal_nan=True)
    assert "meaning in torch only" in str(calls)


def test_faults_of_torch_are_not_shared() -> None:
    q, k, v = torch.randn(3, 1, 2, 17, 8).unbind(0)
    assert_same(q, k, v, causal=True, scale=-0.5, is_torch_right=False)
    assert_same(q.double(), k.double(), v.double(), mask=torch.randn(17, 17), is_torch_right=False)
    assert_same(q, k, v, scale=True)


def test_torch_says_what_does_not_fit() -> None:
    q, k, mask = SMALL, torch.randn(1, 2, 4, 7), torch.ones(4, 5, dtype=torch.bool)
    for keys, visible in ((k, None), (q, mask)):
        with regard.accelerate(always=True), pytest.raises(RuntimeError):
            F.scaled_dot_product_attention(q, keys, keys, attn_mask=visible)


def test_gradients_are_torch_s() -> None:
    mask = torch.ones(9, 9, dtype=torch.bool).tril()
    exact = [torch.randn(2, 3, 9, 8, dtype=torch.float64, requires_grad=True) for _ in range(3)]
    plain(*exact, mask, causal=False, scale=None).square().sum().backward()
    grads = []
    for always in (False, True):
        q, k, v = (x.detach().float().requires_grad_() for x in exact)
        with regard.accelerate(always=always) as calls:
            z = F.scaled_dot_product_attention(q, k, v, attn_mask=mask)
        assert bool(calls.taken) is always  # without `always` this call is small
        z.square().sum().backward()
        grads.append([x.grad for x in (q, k, v)])
    for usual, found, reference in zip(*grads, exact, strict=True):
        assert reference.grad is not None
        assert_close_rule(found, usual, reference.grad, factor=GRADIENT)


def test_a_function_imported_by_name_is_replaced_and_put_back() -> None:
    module = types.ModuleType("somebody_elses_model")
    module.attention = ORIGINAL  # type: ignore[attr-defined]
    sys.modules[module.__name__] = module
    q = torch.randn(1, 2, 4, 8)
    try:
        with regard.accelerate(always=True) as calls:
            module.attention(q, q, q)
        assert sum(calls.taken.values()) == 1
        assert module.attention is ORIGINAL
    finally:
        del sys.modules[module.__name__]
    assert F.scaled_dot_product_attention is ORIGINAL


def test_an_error_inside_leaves_torch_as_it_was() -> None:
    with pytest.raises(ZeroDivisionError), regard.accelerate():
        raise ZeroDivisionError
    assert F.scaled_dot_product_attention is ORIGINAL


def test_another_thread_stays_with_torch_and_contexts_nest() -> None:
    q = torch.randn(1, 2, 4, 8)

    def call() -> None:
        F.scaled_dot_product_attention(q, q, q)

    with regard.accelerate(always=True) as outer:
        thread = threading.Thread(target=call)
        thread.start()
        thread.join()
        assert not outer.taken
        with regard.accelerate() as inner:
            call()
        assert not inner.taken  # it is small
        call()
    assert sum(outer.taken.values()) == 1
    assert outer.left["it is small"] == 1


def test_attend_inside_is_not_counted() -> None:
    q = torch.randn(1, 2, 16, 8)
    with regard.accelerate(always=True) as calls:
        regard.attend(q, q, q, backend="sdpa")
    assert not calls.taken
    assert not calls.left


def test_long_decoding_leaves_torch_without_being_asked() -> None:
    require_kernels()
    q, k, v = torch.randn(1, 8, 1, 64), *torch.randn(2, 1, 2, 4096, 64).unbind(0)
    with torch.no_grad(), regard.accelerate() as calls:
        z = F.scaled_dot_product_attention(q, k, v, enable_gqa=True)
    assert dict(calls.taken) == {"cpu": 1}
    exact = plain(q.double(), k.double(), v.double(), None, causal=False, scale=None)
    assert_close_rule(z, ORIGINAL(q, k, v, enable_gqa=True), exact)


def counts(q: Tensor, k: Tensor, **options: Any) -> tuple[dict[str, int], dict[str, int]]:
    """Where one call ran without `always`, and whether its result is torch's."""
    with torch.no_grad(), regard.accelerate() as calls:
        z = F.scaled_dot_product_attention(q, k, k, **options)
    usual = ORIGINAL(q, k, k, **options)
    assert torch.allclose(z.float(), usual.float(), atol=0.02, rtol=0.02)
    return dict(calls.taken), dict(calls.left)


def test_only_calls_that_pay_are_taken() -> None:
    require_kernels()
    torch.manual_seed(0)
    q, k = torch.randn(1, 8, 1, 64), torch.randn(1, 8, 8192, 64)
    half = {"q": q.bfloat16(), "k": k.bfloat16()}
    assert counts(q, k) == ({}, {"torch is as fast for these sizes": 1}), "no heads to share"
    assert counts(**half) == ({"cpu": 1}, {})
    assert counts(q, k[:, :2], enable_gqa=True) == ({"cpu": 1}, {})
    assert counts(q, k[:, :2, :2048], enable_gqa=True) == ({}, {"it is small": 1})
    assert counts(half["q"], half["k"][:, :, :256]) == ({}, {"it is small": 1})


def test_a_bias_is_not_read_and_padding_is_left_to_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gemm, "_measured_sizes", lambda: gemm.MEASURED["AVX512"])
    monkeypatch.setattr(gemm, "_processor_has_amx", lambda: False)
    torch.manual_seed(0)
    q = torch.randn(4, 8, 384, 64)
    bias = torch.randn(1, 8, 384, 384)
    why = "its mask is a bias of many queries, for which torch is as fast"
    misses = mask_cache.misses
    assert counts(q, q, attn_mask=bias) == ({}, {why: 1})
    assert mask_cache.misses == misses
    keep = torch.arange(384) < torch.tensor([100, 384, 200, 300])[:, None]
    as_fast = ({}, {"torch is as fast for these sizes": 1})
    assert counts(q, q, attn_mask=keep[:, None, None]) == as_fast
    visible = torch.ones(384, 384, dtype=torch.bool)
    assert counts(q, q, attn_mask=visible) == ({"sdpa": 1}, {}), "a mask that hides nothing"


def test_a_half_precision_fused_layer_without_a_mask_is_left_to_torch() -> None:
    torch.manual_seed(0)
    mha = nn.MultiheadAttention(64, 2, batch_first=True).eval()
    x = torch.randn(1, 1536, 64)
    with torch.no_grad():
        for dtype, taken in ((torch.float32, True), (torch.bfloat16, False)):
            module, y = mha.to(dtype), x.to(dtype)
            usual = module(y, y, y, need_weights=False)[0]
            with regard.accelerate(always=taken) as calls:
                z = module(y, y, y, need_weights=False)[0]
            assert torch.allclose(z.float(), usual.float(), atol=0.02)
            assert bool(calls.taken) is taken
            assert bool(calls.left) is not taken


@contextmanager
def slow_path() -> Iterator[None]:
    """Let torch compute encoders without its fused inference path."""
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(True)


def encoder(layers: int, **options: Any) -> nn.TransformerEncoder:
    layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, **options)
    return nn.TransformerEncoder(layer, layers, enable_nested_tensor=False).eval()


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("gelu", [False, True])
@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize(
    "masks",
    [(), ("mask",), ("padding",), ("mask", "padding"), ("bias",), ("biases", "float padding")],
    ids=" and ".join,
)
def test_an_encoder_of_torch_s(masks: tuple[str, ...], gelu: bool, norm_first: bool) -> None:
    activation = "gelu" if gelu else "relu"
    model = encoder(2, norm_first=norm_first, activation=activation)
    for weight in model.parameters():  # biases and norms, too
        nn.init.normal_(weight, std=0.2)
    x = torch.randn(2, 12, 32)
    later, padded = torch.ones(12, 12).triu(1).bool(), torch.arange(12) >= torch.tensor([[12], [9]])
    hidden = torch.randn(8, 12, 12).masked_fill(later, -torch.inf)
    options: dict[str, Tensor] = {}
    for name in masks:
        # torch's fused path would hide every key where a float mask is not 0
        options |= {
            "mask": {"mask": later},
            "padding": {"src_key_padding_mask": padded},
            "bias": {"mask": hidden[0]},
            "biases": {"mask": hidden},
            "float padding": {"src_key_padding_mask": torch.randn(2, 12).masked_fill(padded, -9)},
        }[name]
    with torch.no_grad():
        with slow_path():
            usual = model(x, **options)
        with regard.accelerate(always=True) as calls:
            z = model(x, **options)
        with regard.accelerate() as small_calls:
            small = model(x, **options)
        exact = copy.deepcopy(model).double()
        exact_options = {k: m if m.dtype == torch.bool else m.double() for k, m in options.items()}
        with slow_path():
            reference = exact(x.double(), **exact_options)
    assert sum(calls.taken.values()) == 2, str(calls)
    assert sum(small_calls.left.values()) == 2, str(small_calls)
    kept = ~padded if "padding" in masks else torch.ones(2, 12, dtype=torch.bool)
    for out in (z, small):
        assert_close_rule(out[kept], usual[kept], reference[kept])


@pytest.mark.parametrize("weights", [False, True])
def test_multihead_attention_over_another_sequence(weights: bool) -> None:
    module = nn.MultiheadAttention(32, 4, kdim=16, vdim=24, add_bias_kv=True, add_zero_attn=True)
    q, k, v = torch.randn(5, 2, 32), torch.randn(7, 2, 16), torch.randn(7, 2, 24)
    module.eval()
    usual, seen = module(q, k, v, need_weights=weights)
    with regard.accelerate(always=True) as calls:
        z, found = module(q, k, v, need_weights=weights)
    assert bool(calls.taken) is not weights  # with weights, torch calls no attention function
    exact = copy.deepcopy(module).double()(q.double(), k.double(), v.double())[0]
    assert_close_rule(z, usual, exact)
    assert (found is None) is (seen is None)


def test_a_model_is_accelerated_for_good_copied_and_pickled() -> None:
    model = encoder(1)
    x = torch.randn(2, 6, 32)
    with torch.no_grad():
        usual = model(x)
        assert regard.accelerate(model, always=True) is model
        regard.accelerate(model)
        assert len(model._forward_pre_hooks) == 1
        for same in (model, copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
            with regard.accelerate() as calls:
                z = same(x)
            assert sum(calls.taken.values()) == 1
            torch.testing.assert_close(z, usual)
        with pytest.raises((RuntimeError, AssertionError)):
            model(torch.randn(2, 6, 31))
        with regard.accelerate() as calls:
            F.scaled_dot_product_attention(*torch.randn(3, 1, 2, 4, 8).unbind(0))
        assert not calls.taken  # the failed pass has ended


def run(*arguments: str) -> str:
    """What Python prints in another process."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


UNPICKLED = """
import pickle, sys, torch
import torch.nn.functional as F
model = pickle.load(open(sys.argv[1], "rb"))
model(torch.randn(2, 6, 32))
(hook,) = model._forward_pre_hooks.values()
print(sum(hook.calls.taken.values()))
"""


@pytest.mark.full
def test_a_pickled_model_is_accelerated_in_another_process(tmp_path: Path) -> None:
    model = encoder(1)
    file = tmp_path / "model"
    file.write_bytes(pickle.dumps(regard.accelerate(model, always=True)))
    assert run("-c", UNPICKLED, str(file)).strip() == "1"


def test_only_a_module_can_be_accelerated() -> None:
    with pytest.raises(ArgumentTypeError, match=r"model is str; it must be an nn\.Module"):
        regard.accelerate("model")  # type: ignore[call-overload]


def operators_in_graphs(held: list[list[str]]) -> Callable[..., Any]:
    """A backend of `torch.compile` that notes which operators of this package each graph holds."""

    def backend(graph: torch.fx.GraphModule, example: list[Tensor]) -> Any:
        names = [str(node.target) for node in graph.graph.nodes]
        held.append([name for name in names if name.startswith("regard.")])
        return aot_eager(graph, example)

    return backend


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("mask", ["none", "causal", "bool", "float"])
def test_a_compiled_function_is_accelerated_while_a_context_is_open(mask: str) -> None:
    """Without compiled kernels a graph keeps torch's operation."""
    require_kernels()
    torch._dynamo.reset()
    q, k, v = torch.randn(3, 1, 4, 40, 16, generator=torch.Generator().manual_seed(0)).unbind(0)
    visible = torch.ones(40, 40, dtype=torch.bool).tril().triu(-5)
    dense = {"bool": visible, "float": torch.where(visible, 0.0, -torch.inf)}.get(mask)
    options = {"attn_mask": dense, "is_causal": mask == "causal"}

    def function(*args: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(*args, **options) * 2

    held: list[list[str]] = []
    compiled = torch.compile(function, fullgraph=True, backend=operators_in_graphs(held))
    usual = compiled(q, k, v)
    assert held == [[]]
    with regard.accelerate(always=True) as calls:
        found = [compiled(q, k, v) for _ in range(3)]
    assert held[1:] == [["regard.torch_attention"]]
    assert sum(calls.taken.values()) == 3
    for z in found:
        torch.testing.assert_close(z, usual)
    assert torch.equal(compiled(q, k, v), usual)
    assert len(held) == 2
    with regard.accelerate():
        compiled(q, k, v)
    assert held[-1] == [], "a small call is torch's"
    torch._dynamo.reset()


class Attends(nn.Module):
    """torch's attention as a module."""

    def forward(self, q: Tensor, k: Tensor) -> Tensor:
        return F.scaled_dot_product_attention(q, k, k)


@pytest.mark.full
def test_a_compiled_model_is_accelerated() -> None:
    torch._dynamo.reset()
    held: list[list[str]] = []
    model = regard.accelerate(Attends(), always=True)
    compiled = torch.compile(model, fullgraph=True, backend=operators_in_graphs(held))
    q, k = torch.randn(2, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    with torch.no_grad():
        torch.testing.assert_close(compiled(q, k), Attends()(q, k))
    assert held == [["regard.torch_attention"]]
    z = compiled(q.requires_grad_(), k)
    assert held[-1] == [], "gradients are torch's"
    z.sum().backward()
    assert q.grad is not None
    plain = torch.compile(Attends(), fullgraph=True, backend=operators_in_graphs(held))
    plain(q.detach(), k)
    assert held[-1] == [], "another model is not accelerated"
    torch._dynamo.reset()


def test_the_operator_of_torchs_function_follows_the_rules() -> None:
    q, k = torch.randn(2, 1, 2, 16, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    arguments = (q, k, k, None, True, None, False, True)
    results = torch.library.opcheck(torch.ops.regard.torch_attention.default, arguments)
    assert set(results.values()) == {"SUCCESS"}
    with FlopCounterMode(display=False) as counter:
        torch.ops.regard.torch_attention(*arguments)
    assert counter.get_total_flops() == 2 * 2 * 16 * 16 * (8 + 8)


FIRST_COMPILED_INSIDE = """
import sys
import torch
import torch.nn.functional as F
import regard

def function(q):
    return F.scaled_dot_product_attention(q, q, q) * 2

q = torch.randn(1, 2, 32, 8)
assert "torch._dynamo" not in sys.modules
original = torch.compile
with regard.accelerate(always=True) as calls:
    graphs = []

    def backend(graph, example):
        graphs.append([str(node.target) for node in graph.graph.nodes])
        return graph.forward

    z = torch.compile(function, fullgraph=True, backend=backend)(q)
assert "regard.torch_attention" in graphs[0], graphs
assert sum(calls.taken.values()) == 1, calls
assert torch.compile is original
kept = regard.accelerate(torch.nn.Linear(8, 8))  # torch's functions stay replaced while it lives
import torch._dynamo.trace_rules
torch._dynamo.trace_rules.get_torch_obj_rule_map.cache_clear()
torch._dynamo.trace_rules.get_torch_obj_rule_map()  # found under their names: the replacements

class Model(torch.nn.Module):
    def forward(self, q):
        return function(q)

torch.testing.assert_close(torch.export.export(Model(), (q,), strict=True).module()(q), z)
torch._dynamo.reset()
after = torch.compile(function, fullgraph=True, backend="aot_eager")(q)
torch.testing.assert_close(z, after)
"""


@pytest.mark.full
def test_a_process_may_compile_for_the_first_time_while_a_context_is_open() -> None:
    """torch.compile finds its rules for torch's functions by their names, once."""
    assert run("-W", "error::UserWarning", "-c", FIRST_COMPILED_INSIDE) == ""


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
def test_a_nested_batch_is_counted_as_a_call_of_torch() -> None:
    layer = nn.TransformerEncoderLayer(16, 2, 32, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=True).eval()
    x, padding = torch.randn(2, 6, 16), torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    with torch.no_grad():
        plain = model(x, src_key_padding_mask=padding)
        with regard.accelerate(always=True) as calls:
            z = model(x, src_key_padding_mask=padding)
    assert torch.equal(z, plain)
    assert not calls.taken
    reason = "its input is a nested tensor, as nn.TransformerEncoder makes it of a padded batch"
    assert dict(calls.left) == {reason: 2}


def test_the_bool_masks_of_modules_hide_where_they_are_true() -> None:
    hidden = torch.tensor([[False, True]])
    assert as_attn_mask(None, 0) is None
    assert torch.equal(as_attn_mask(hidden, 0), ~hidden)  # type: ignore[arg-type]
    assert torch.equal(as_attn_mask(hidden, 1), ~hidden[:, None, None])  # type: ignore[arg-type]
