"""The cross entropy that is computed chunk by chunk, against fp64 and against torch's."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models.families import family
from regard.train.losses import linear_cross_entropy, next_token_loss
from tests.rules import GRADIENT, assert_close_rule

llama = family("llama")

CONFIG = llama.config(19, 8, 12, 1, 2, 1, 4)


def values(N: int, M: int, V: int, scale: float, dtype: torch.dtype) -> tuple[Tensor, ...]:
    generator = torch.Generator().manual_seed(N + V)
    x, w = torch.randn(N, M, generator=generator), torch.randn(V, M, generator=generator)
    b, targets = torch.randn(V, generator=generator), torch.randint(V, (N,), generator=generator)
    return *(y.to(dtype).requires_grad_() for y in (x * scale, w, b)), targets


def plain(x: Tensor, w: Tensor, b: Tensor | None, targets: Tensor) -> Tensor:
    logits = F.linear(x, w, b)
    return F.cross_entropy(logits.to(torch.promote_types(logits.dtype, torch.float32)), targets)


def with_gradients(function: Any, x: Tensor, w: Tensor, b: Tensor, targets: Tensor) -> list[Tensor]:
    loss = function(x, w, b, targets)
    return [loss.detach(), *torch.autograd.grad(loss, (x, w, b))]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("scale", [0.01, 1.0, 20.0])
@pytest.mark.parametrize(("N", "M", "V"), [(1, 3, 2), (37, 16, 50)])
@pytest.mark.parametrize("rows", [None, 1, 8])
def test_equals_fp64(
    dtype: torch.dtype, scale: float, N: int, M: int, V: int, rows: int | None
) -> None:
    given = values(N, M, V, scale, dtype)
    exact = with_gradients(
        plain, *(x.detach().double().requires_grad_() for x in given[:3]), given[3]
    )
    simple = with_gradients(plain, *given)
    got = with_gradients(
        lambda x, w, b, y: linear_cross_entropy(x, w, y, bias=b, chunk_rows=rows), *given
    )
    for i, name in enumerate(("loss", "x", "weight", "bias")):
        factor = GRADIENT if i else 2.0
        assert_close_rule(got[i], simple[i], exact[i], factor, f"{name}: ")
    if N > 1:  # negative control: targets of other rows
        other = with_gradients(plain, *given[:3], given[3].roll(1))
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(other[1], simple[1], exact[1], GRADIENT)


def test_the_chunks_hold_few_logits() -> None:
    """No tensor of all logits is made, in either pass."""
    sizes: list[int] = []

    class Sizes(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(
            self, op: Any, types: Any, args: Any = (), kwargs: Any = None
        ) -> Any:
            out = op(*args, **(kwargs or {}))
            sizes.extend(x.numel() for x in (out,) if isinstance(x, Tensor))
            return out

    x, w, b, targets = values(64, 4, 300, 1.0, torch.float32)
    with Sizes():
        linear_cross_entropy(x, w, targets, bias=b, chunk_rows=8).backward()
    assert 8 * 300 <= max(sizes) < 64 * 300
    assert x.grad is not None


def test_a_decoder_trains_with_it() -> None:
    """`next_token_loss` gives the loss and the gradients of torch's cross entropy of the logits,
    also under autocast; a hook on the head is called.
    """
    torch.manual_seed(0)
    model = llama.build(CONFIG).train()
    rows = torch.randint(19, (3, 7))

    def reference(network: nn.Module, inputs: Tensor) -> Tensor:
        logits = network(inputs[:, :-1])
        wide = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return F.cross_entropy(wide.flatten(0, 1), inputs[:, 1:].flatten())

    def results(function: Any, network: nn.Module) -> list[Tensor]:
        loss = function(network, rows)
        return [loss.detach(), *torch.autograd.grad(loss, tuple(network.parameters()))]

    exact = results(reference, copy.deepcopy(model).double())
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            got, simple = results(next_token_loss, model), results(reference, model)
        for x, y, z in zip(got, simple, exact, strict=True):
            assert_close_rule(x, y, z, GRADIENT)
    calls: list[int] = []
    assert isinstance(model.head, nn.Linear)
    hook = model.head.register_forward_hook(lambda *_: calls.append(1))
    next_token_loss(model, rows)
    hook.remove()
    assert calls == [1]
    with torch.no_grad():
        assert not next_token_loss(model, rows).requires_grad


def test_refusals() -> None:
    x, w, b, targets = values(3, 4, 5, 1.0, torch.float32)
    cases = [
        (lambda: linear_cross_entropy(x, w, targets + 5), r"must be in \[0, 5\)"),
        (lambda: linear_cross_entropy(x, w, targets[:2]), r"targets are \(2,\)"),
        (lambda: linear_cross_entropy(x[:0], w, targets[:0]), "at least one row"),
        (lambda: linear_cross_entropy(x[:, :2], w, targets), "its last dimension must be 4"),
        (lambda: linear_cross_entropy(x, w, targets, bias=b[:2]), r"bias is \(2,\)"),
    ]
    for call, message in cases:
        with pytest.raises(ArgumentError, match=message):
            call()
