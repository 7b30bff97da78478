"""`attend`, and modules made of it, under torch's transforms: more than the tables of
docs/pytorch.md ask (test_transform_matrix.py).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap

import regard
from regard.masks import Causal, Window
from regard.nn.variants import build
from regard.process_state import is_exporting
from tests.oracles.plain import plain_attention
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
    return plain_attention(q, k, v, visible=visible)[0]


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


def test_nothing_is_exported_outside_of_an_export() -> None:
    assert not is_exporting()
    seen = []

    class Spy(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(is_exporting())
            return x + 1

    torch.export.export(Spy(), (torch.ones(2),), strict=False)
    assert seen == [True]


@pytest.mark.parametrize("T", [6, 40])
def test_transforms_of_torch_func(T: int) -> None:
    q, k, v = inputs(T)
    assert_follows(lambda f: grad(lambda *x: f(*x).square().sum(), argnums=(0, 1, 2)), q, k, v)
    assert_follows(lambda f: lambda *x: jvp(f, x, tuple(torch.ones_like(y) for y in x))[1], q, k, v)
    if T == 6:
        assert_follows(lambda f: jacrev(f, argnums=(0, 2)), q, k, v)
        assert_follows(lambda f: jacfwd(f, argnums=1), q, k, v)
        assert_follows(lambda f: hessian(lambda *x: f(*x).square().sum()), q, k, v)


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
