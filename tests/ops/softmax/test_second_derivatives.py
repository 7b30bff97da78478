"""Second derivatives of every kernel with a gradient, against the definition in fp64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.autograd import gradgradcheck

import regard
from regard.biases import ALiBi
from regard.masks import Causal, Window
from tests.kernels import require_backend
from tests.rules import assert_close_rule

KERNELS = ("tiled", "gemm", "sdpa")


def inputs(T: int, S: int) -> tuple[Tensor, ...]:
    """Seeded q [1,4,T,16], k and v [1,2,S,16], with scores so small that no kernel refuses."""
    generator = torch.Generator().manual_seed(7)
    q = 0.3 * torch.randn(1, 4, T, 16, generator=generator)
    k, v = torch.randn(2, 1, 2, S, 16, generator=generator).unbind(0)
    return q, 0.3 * k, v


def derivatives(tensors: tuple[Tensor, ...], **options: Any) -> list[Tensor]:
    """The gradients of sum z^2, and the gradients of the sum of their squares."""
    leaves = tuple(x.detach().requires_grad_() for x in tensors)
    if "sink" in options:
        options["sink"] = options["sink"].to(leaves[0].dtype)
    z = regard.attend(*leaves, **options)
    first = torch.autograd.grad(z.square().sum(), leaves, create_graph=True)
    total = torch.stack([x.square().sum() for x in first]).sum()
    second = torch.autograd.grad(total, leaves)
    return [*first, *second]


@pytest.mark.full(keep=9)
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("mask", [None, Causal(), Causal() & Window(9)], ids=str)
@pytest.mark.parametrize("extra", ["nothing", "sink", "ALiBi"])
def test_they_follow_the_definition(kernel: str, mask: Any, extra: str) -> None:
    require_backend(kernel)
    options: dict[str, Any] = {"mask": mask}
    if extra == "sink":
        options["sink"] = torch.tensor([0.1, -0.4, 1.0, 0.0])
    if extra == "ALiBi":
        options["bias"] = ALiBi(slopes=(0.05, 0.02, 0.01, 0.0))
    tensors = inputs(48, 64)
    found = derivatives(tensors, backend=kernel, **options)
    plain = derivatives(tensors, backend="reference", **options)
    exact = derivatives(tuple(x.double() for x in tensors), backend="reference", **options)
    for x, y, z in zip(found, plain, exact, strict=True):
        assert x.abs().max() > 0
        assert_close_rule(x, y, z, 3.0)


@pytest.mark.full
def test_one_tensor_may_be_query_key_and_value() -> None:
    x = inputs(18, 18)[1][:, :1, :, :4].double().requires_grad_()
    assert gradgradcheck(lambda x: regard.attend(x, x, x, backend="tiled"), (x,))


@pytest.mark.full
def test_dropout_and_too_many_scores_are_refused() -> None:
    q, k, v = (x.requires_grad_() for x in inputs(48, 48))
    out = regard.attend(q, k, v, dropout=0.5, backend="tiled")
    with pytest.raises(regard.KernelRefusal, match="no second derivative of attention with drop"):
        torch.autograd.grad(out.sum(), q, create_graph=True)
    long = torch.zeros(1, 1, 2**15 + 1, 2, requires_grad=True)
    out = regard.attend(long, long.detach(), long.detach(), mask=Window(2), backend="tiled")
    with pytest.raises(regard.KernelRefusal, match=r"with 4.00 GiB of scores; the limit is 4.00"):
        torch.autograd.grad(out.sum(), long, create_graph=True)
