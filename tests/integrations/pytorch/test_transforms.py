"""`attend`, and modules made of it, under torch's transforms: more than the tables of
docs/pytorch.md ask (test_transform_matrix.py).
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vmap

import regard
from regard.masks import Causal, Window
from regard.nn.variants import build
from regard.process_state import is_compiling, is_exporting
from tests.rules import assert_close_rule

MASK = Causal() & Window(5)


def inputs(T: int = 6, S: int | None = None, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Seeded q [1,4,T,8], k and v [1,2,S,8]."""
    generator = torch.Generator().manual_seed(T)
    S = T if S is None else S
    return [
        torch.randn(1, heads, length, 8, generator=generator, dtype=dtype)
        for heads, length in ((4, T), (2, S), (2, S))
    ]


def masked(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return regard.attend(q, k, v, mask=MASK)


def reference(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """The definition by torch's own operations: differentiable as often as one likes."""
    T, S = q.shape[-2], k.shape[-2]
    distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
    visible = (distance >= 0) & (distance < 5)
    k, v = (x.repeat_interleave(q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return torch.softmax(scores.masked_fill(~visible, -torch.inf), -1) @ v


class Module(nn.Module):
    """`masked` as a module."""

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return masked(q, k, v)


def assert_follows(
    transform: Callable[[Callable[..., Tensor]], Any], *args: Tensor, factor: float = 3.0
) -> None:
    """A transform of `masked` is that of the definition, by the error rule."""
    found = transform(masked)(*args)
    plain, exact = transform(reference)(*args), transform(reference)(*(x.double() for x in args))
    found, plain, exact = (x if isinstance(x, tuple) else (x,) for x in (found, plain, exact))
    for x, y, z in zip(found, plain, exact, strict=True):
        assert_close_rule(x, y, z, factor)


@pytest.fixture
def fresh_dynamo() -> Iterator[None]:
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


def frames(module: Callable[..., Tensor], many: list[list[Tensor]]) -> int:
    """How many graphs `torch.compile(dynamic=True, fullgraph=True)` makes for these inputs, whose
    results are compared.
    """
    from torch._dynamo.testing import CompileCounter

    counter = CompileCounter()
    compiled = torch.compile(module, dynamic=True, fullgraph=True, backend=counter)
    for args in many:
        assert torch.allclose(compiled(*args), module(*args), atol=1e-5)
    return int(counter.frame_count)


LENGTHS = range(1, 41, 2)


@pytest.mark.full
@pytest.mark.usefixtures("fresh_dynamo")
@pytest.mark.parametrize("mask", [None, Causal(), MASK], ids=str)
@pytest.mark.parametrize("decoding", [False, True])
def test_a_graph_serves_20_lengths_with_two_recompilations(mask: Any, decoding: bool) -> None:
    many = [inputs(1 if decoding else n, n) for n in LENGTHS]
    made = frames(lambda q, k, v: regard.attend(q, k, v, mask=mask), many)
    assert 1 <= made <= 3


@pytest.mark.full
@pytest.mark.usefixtures("fresh_dynamo")
def test_a_module_and_gradients_compile_for_20_lengths() -> None:
    layer = build("gqa", 32, 4, groups=2).eval()
    assert frames(layer, [[torch.randn(2, n, 32)] for n in LENGTHS]) <= 3
    torch._dynamo.reset()
    many = [[x.requires_grad_() for x in inputs(n)] for n in LENGTHS]
    assert frames(masked, many) <= 3


@pytest.mark.full
@pytest.mark.parametrize("strict", [True, False])
def test_one_exported_program_serves_every_length(strict: bool) -> None:
    length = torch.export.Dim("length", min=1, max=4096)
    args = tuple(inputs())
    shapes = {name: {2: length} for name in "qkv"}
    program = torch.export.export(Module(), args, dynamic_shapes=shapes, strict=strict)
    for n in (1, 2, 15, 16, 33, 4096):
        other = inputs(n)
        assert torch.allclose(program.module()(*other), masked(*other), atol=1e-5)
    assert not torch.allclose(program.module()(*inputs(33)), reference(*inputs(33)).flip(2))


@pytest.mark.full
@pytest.mark.parametrize("strict", [True, False])
def test_a_module_with_rotary_and_groups_exports(strict: bool) -> None:
    layer = build("gqa", 32, 4, groups=2).eval()
    length = torch.export.Dim("length", min=1, max=4096)
    # the parameters require gradients, with which torch guarded the length (LOG.md)
    program = torch.export.export(
        layer, (torch.randn(2, 6, 32),), dynamic_shapes={"x": {1: length}}, strict=strict
    )
    with torch.no_grad():
        for n in (1, 6, 40):
            x = torch.randn(2, n, 32)
            assert torch.allclose(program.module()(x), layer(x), atol=1e-5)


@pytest.mark.full(keep=1)
def test_a_traced_module_serves_other_lengths() -> None:
    layer = build("gqa", 32, 4, groups=2).eval().requires_grad_(False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # jit.trace is deprecated, and warns of each Python number
        traced = torch.jit.trace(layer, (torch.randn(2, 6, 32),))
        assert not is_compiling()
        for n in (1, 6, 40):
            x = torch.randn(2, n, 32)
            assert torch.allclose(traced(x), layer(x), atol=1e-5)


def test_nothing_is_exported_outside_of_an_export() -> None:
    assert not is_exporting()
    seen = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(is_exporting())
            return x + 1

    torch.export.export(Spy(), (torch.ones(2),), strict=False)
    assert seen == [True]


def test_vmap_is_a_loop() -> None:
    many = [torch.stack(x) for x in zip(*(inputs(n)[:3] for n in (6, 6, 6)), strict=True)]
    loop = torch.stack([masked(*args) for args in zip(*many, strict=True)])
    assert torch.allclose(vmap(masked)(*many), loop, atol=1e-6)
    assert torch.allclose(
        vmap(masked, in_dims=(0, None, None))(many[0], many[1][0], many[2][0]),
        torch.stack([masked(q, many[1][0], many[2][0]) for q in many[0]]),
        atol=1e-6,
    )


@pytest.mark.parametrize("T", [6, 40])
def test_transforms_of_torch_func(T: int) -> None:
    q, k, v = inputs(T)
    assert_follows(lambda f: grad(lambda *x: f(*x).square().sum(), argnums=(0, 1, 2)), q, k, v)
    assert_follows(lambda f: lambda *x: jvp(f, x, tuple(torch.ones_like(y) for y in x))[1], q, k, v)
    if T == 6:
        assert_follows(lambda f: jacrev(f, argnums=(0, 2)), q, k, v)
        assert_follows(lambda f: jacfwd(f, argnums=1), q, k, v)
        assert_follows(lambda f: hessian(lambda *x: f(*x).square().sum()), q, k, v)


@pytest.mark.parametrize("T", [6, 40])
def test_a_tangent_of_forward_mode_is_not_lost(T: int) -> None:
    from torch.autograd import forward_ad

    q, k, v = inputs(T)
    with forward_ad.dual_level():
        dual = forward_ad.make_dual(q, torch.ones_like(q))
        tangent = forward_ad.unpack_dual(masked(dual, k, v)).tangent
    assert tangent is not None
    assert torch.allclose(
        tangent, jvp(lambda x: reference(x, k, v), (q,), (torch.ones_like(q),))[1], atol=1e-5
    )


def test_gradients_of_each_sample() -> None:
    layer = build("gqa", 32, 4, groups=2)
    x = torch.randn(3, 5, 32)

    def loss(parameters: dict[str, Tensor], sample: Tensor) -> Tensor:
        return functional_call(layer, parameters, (sample[None],)).square().sum()

    found = vmap(grad(loss), in_dims=(None, 0))(dict(layer.named_parameters()), x)
    for i in range(3):
        layer.zero_grad()
        layer(x[i : i + 1]).square().sum().backward()
        for name, parameter in layer.named_parameters():
            assert parameter.grad is not None
            assert torch.allclose(found[name][i], parameter.grad, atol=1e-4, rtol=1e-4), name


def test_meta_and_fake_tensors_have_shapes() -> None:
    from torch._subclasses import FakeTensorMode

    args = inputs(40)
    on_meta = masked(*(x.to("meta") for x in args))
    assert on_meta.is_meta
    assert (on_meta.shape, on_meta.dtype) == ((1, 4, 40, 8), torch.float32)
    layer = build("mla", 64, 4, q_rank=48, kv_rank=32, nope_dim=16, rope_dim=8, value_dim=16)
    assert layer.to("meta")(torch.empty(2, 40, 64, device="meta")).shape == (2, 40, 64)
    with FakeTensorMode():
        fake = regard.attend(*(torch.empty(x.shape, dtype=torch.bfloat16) for x in args), mask=MASK)
        assert (fake.shape, fake.dtype) == ((1, 4, 40, 8), torch.bfloat16)


@pytest.mark.parametrize("backend", ["cpu", "gemm", "tiled", "flex"])
def test_a_kernel_that_reads_numbers_refuses_where_there_are_none(backend: str) -> None:
    q, k, v = inputs(40)
    many = torch.stack([q, q])
    with pytest.raises(regard.KernelRefusal, match=rf"this call cannot run on {backend} \("):
        vmap(lambda x: regard.attend(x, k, v, backend=backend))(many)


def test_autocast_converts_as_torch_does() -> None:
    q, k, v = inputs(40)
    options = {"mask": Causal()}
    right = regard.attend(*(x.bfloat16() for x in (q, k, v)), **options)
    weights = regard.attention_weights(q.bfloat16(), k.bfloat16())
    with torch.autocast("cpu", torch.bfloat16):
        for args in ((q, k, v), (q.bfloat16(), k, v)):
            found = regard.attend(*args, **options)
            usual = F.scaled_dot_product_attention(*args, is_causal=True, enable_gqa=True)
            assert found.dtype == usual.dtype == torch.bfloat16
            assert torch.equal(found, right)
        assert torch.equal(regard.attention_weights(q, k), weights)
        assert regard.attend(*inputs(40, dtype=torch.float64)).dtype == torch.float64
    with pytest.raises(regard.ArgumentTypeError, match="query is bfloat16 and key is float32"):
        regard.attend(q.bfloat16(), k, v)


def test_a_symbolic_trace_keeps_attend_as_a_leaf() -> None:
    class Doubled(nn.Module):
        def forward(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
            return regard.attend(2 * q, k, v, mask=MASK, q_positions=regard.Span(0, 6)) + 1

    graph = torch.fx.symbolic_trace(Doubled())
    assert regard.attend in [node.target for node in graph.graph.nodes]
    args = inputs()
    assert torch.equal(graph(*args), Doubled()(*args))


def test_a_module_survives_what_pytorch_does_to_modules(tmp_path: Any) -> None:
    from torch.utils.checkpoint import checkpoint

    layer = build("gqa", 32, 4, groups=2)
    x = torch.randn(2, 5, 32, requires_grad=True)
    right = layer(x)
    right.square().sum().backward()
    gradient = x.grad
    assert gradient is not None
    assert torch.equal(copy.deepcopy(layer)(x), right)
    x.grad = None
    checkpoint(layer, x, use_reentrant=False).square().sum().backward()
    assert x.grad is not None
    assert torch.equal(x.grad, gradient)
    other = build("gqa", 32, 4, groups=2)
    prefixed = []
    handle = other.register_load_state_dict_pre_hook(lambda *args: prefixed.append(args[2]))
    other.load_state_dict(layer.state_dict())
    handle.remove()
    assert prefixed == [""]
    assert torch.equal(other(x), right)
