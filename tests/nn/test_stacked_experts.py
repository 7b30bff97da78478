"""Experts in stacks: on a device, few tokens run from them without a read, with the numbers of the
experts one after another.
"""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError
from regard.nn import (
    ClippedSwiGLU,
    FeedForward,
    MoE,
    SigmoidRouter,
    SoftmaxRouter,
    SwiGLU,
    stack_experts,
)
from regard.nn.blocks.experts import InputWeightedMoE
from regard.nn.blocks.routers import LogitSigmoidRouter
from regard.nn.weights import store_weight
from regard.ops.stored_weights import Int8Weight
from tests.pretended_device import HiddenRead, pretended_cuda
from tests.rules import assert_close_rule

M, N, HIDDEN = 40, 8, 24
MIXTURES: dict[str, Callable[[], MoE]] = {
    "gated, shared": lambda: MoE(
        SoftmaxRouter(M, N, 3), [SwiGLU(M, HIDDEN) for _ in range(N)], SwiGLU(M, 20)
    ),
    "clipped, biases": lambda: MoE(
        SoftmaxRouter(M, N, 2, normalize=True), [ClippedSwiGLU(M, HIDDEN) for _ in range(N)]
    ),
    "plain": lambda: MoE(
        SigmoidRouter(M, N, 4), [FeedForward(M, HIDDEN, nn.GELU()) for _ in range(N)]
    ),
    "weights of inputs": lambda: InputWeightedMoE(
        LogitSigmoidRouter(M, N, 1), [SwiGLU(M, HIDDEN) for _ in range(N)], SwiGLU(M, HIDDEN)
    ),
}


def drawn(name: str, dtype: torch.dtype = torch.float32) -> MoE:
    torch.manual_seed(0)
    moe = MIXTURES[name]()
    for p in moe.parameters():
        nn.init.normal_(p)
    return moe.to(dtype).eval()


def in_other_orders(moe: MoE, x: Tensor) -> list[Tensor]:
    """What a mixture computes where the sums over its inputs, or over hidden units, run backwards,
    and where they run along a matrix product of torch.
    """
    backwards, hidden = (copy.deepcopy(moe) for _ in range(2))
    for name, p in backwards.named_parameters():
        if name.endswith(("up.weight", "gate.weight", "router.linear.weight")):
            p.copy_(p.flip(1))
    for name, p in hidden.named_parameters():
        if "down.weight" in name:
            p.copy_(p.flip(1))
        elif "router" not in name and "down" not in name:
            p.copy_(p.flip(0))
    many = x.repeat(20, 1, 1)  # no longer a few rows
    return [backwards(x.flip(-1)), hidden(x), moe(many)[: len(x)]]


def tokens(count: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.randn(count, 1, M, generator=torch.Generator().manual_seed(1)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.full(keep=3)
def test_few_tokens_read_nothing(name: str, rows: int, dtype: torch.dtype) -> None:
    """Against the same mixture in fp64; plain math is what CPU and device compute one expert
    after another, in several orders of the sums.
    """
    x = tokens(16 * rows, dtype)
    with torch.no_grad():
        plains = [drawn(name, dtype)(x), *in_other_orders(drawn(name, dtype), x)]
        exact = drawn(name, dtype).double()(x.double())
        with pretended_cuda() as device:
            moe = drawn(name, dtype)
            device.put_module(moe)
            with device.reads():
                plains += [device.get(moe(device.put(y))) for y in (x, x.flip(0))]
            plains[-1] = plains[-1].flip(0)
            before = {n: (id(p), device.get(p).clone()) for n, p in moe.named_parameters()}
            assert stack_experts(moe) == 1
            found = torch.cat([device.get(moe(device.put(y))) for y in x.split(rows)])
            for n, p in moe.named_parameters():
                assert id(p) == before[n][0], "the parameters stay the same objects"
                assert torch.equal(device.get(p), before[n][1])
    assert_close_rule(found, plains, exact)


def test_a_wrong_expert_is_far() -> None:
    """The negative control: two experts are exchanged in the stacks."""
    x = tokens(2)
    with torch.no_grad():
        plain, exact = drawn("plain")(x), drawn("plain").double()(x.double())
        with pretended_cuda() as device:
            moe = drawn("plain")
            device.put_module(moe)
            stack_experts(moe)
            assert moe.stacked is not None
            for stack in (
                x.stack[0] for x in moe.stacked._network.modules() if hasattr(x, "stack")
            ):
                stack.copy_(stack.flip(0))
            found = device.get(moe(device.put(x)))
    with pytest.raises(AssertionError, match="error"):
        assert_close_rule(found, plain, exact)


def run_on_device(
    change: Callable[[MoE], object], rows: int = 2, *, gradient: bool = False
) -> None:
    with pretended_cuda() as device, torch.set_grad_enabled(gradient):
        moe = drawn("plain")
        device.put_module(moe)
        stack_experts(moe)
        change(moe)
        moe(device.put(tokens(rows)))


def _replaced(moe: MoE) -> None:
    with pretended_cuda() as device:
        moe.experts[3].up.weight = nn.Parameter(device.put(torch.zeros(HIDDEN, M)))


READS: dict[str, Callable[[], None]] = {
    "many tokens": lambda: run_on_device(lambda moe: None, rows=3),
    "a gradient": lambda: run_on_device(lambda moe: None, gradient=True),
    "a parameter was replaced": lambda: run_on_device(_replaced),
    "a hook": lambda: run_on_device(
        lambda moe: moe.experts[0].register_forward_hook(lambda *_: None)
    ),
    "a hook of a map": lambda: run_on_device(
        lambda moe: moe.experts[7].down.register_forward_hook(lambda *_: None)
    ),
    "a map was replaced": lambda: run_on_device(
        lambda moe: setattr(moe.experts[2], "up", nn.Identity())
    ),
    "no stacks": lambda: run_on_device(lambda moe: setattr(moe, "stacked", None)),
}


@pytest.mark.parametrize("case", READS)
def test_what_the_stacks_do_not_serve_is_read(case: str) -> None:
    with pytest.raises(HiddenRead):
        READS[case]()


def test_on_a_cpu_nothing_changes() -> None:
    moe, x = drawn("gated, shared"), tokens(2)
    with torch.no_grad():
        before = moe(x)
        assert stack_experts(moe) == 1
        assert torch.equal(moe(x), before)
    moe.to(torch.bfloat16)
    assert moe.stacked is None, "the parameters have left the stacks"


def test_copies_and_trained_parameters() -> None:
    moe = drawn("clipped, biases")
    stack_experts(moe)
    assert copy.deepcopy(moe).stacked is None
    out = moe(tokens(2)).sum()
    out.backward()
    with torch.no_grad():
        for p in moe.parameters():
            if p.grad is not None:
                p.sub_(p.grad)
    assert moe.stacked is not None
    weight = moe.experts[2].up.weight
    stack = moe.stacked._network.get_submodule("up").stack[0]
    assert weight.data_ptr() == stack[2].data_ptr(), "a step of training changes the stack, too"
    assert torch.equal(weight, stack[2])


def _unlike() -> MoE:
    experts = [SwiGLU(M, HIDDEN) for _ in range(N - 1)]
    return MoE(SoftmaxRouter(M, N, 2), [*experts, SwiGLU(M, HIDDEN + 1)])


def _with_norms() -> MoE:
    return MoE(
        SoftmaxRouter(M, N, 2), [nn.Sequential(nn.LayerNorm(M), nn.Linear(M, M)) for _ in range(N)]
    )


def _stored() -> nn.Module:
    model = nn.Sequential(MoE(SoftmaxRouter(32, 4, 2), [SwiGLU(32, 64) for _ in range(4)]))
    for expert in model[0].requires_grad_(False).experts:
        store_weight(expert.up, Int8Weight.quantize(expert.up.weight))
    return model


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (_unlike, "the module: 8 experts have 2 forms; only experts of one form"),
        (_with_norms, r"the module: expert 0 has parameters \['0.weight', '0.bias'\] beside"),
        (_stored, "0: expert 0 has a weight of fewer bits, which is no matrix to be stacked"),
    ],
)
def test_experts_that_cannot_be_stacked(make: Callable[[], nn.Module], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        stack_experts(make())
    assert issubclass(ArgumentError, regard.RegardError)
