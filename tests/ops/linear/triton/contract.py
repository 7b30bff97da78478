"""The contract of the recurrences in Triton: the definition, for every mechanism.

`test_triton_interpreter.py` runs this file in a process of its own, where triton interprets the
kernels on CPU tensors; `test_gpu.py` runs it on a GPU. The device is in the environment.
"""

from __future__ import annotations

import math
import os
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.linear import delta_rule, gated_delta_rule, gated_linear, linear_attention, retention
from tests.oracles.delta import delta, delta_plain
from tests.oracles.linear import linear, plain_loop, plain_matrix
from tests.rules import GRADIENT, assert_close_rule

DEVICE = os.environ.get("REGARD_TRITON_DEVICE", "cpu")
DTYPES = (torch.float32, torch.float16)
Inputs = dict[str, Tensor]


def inputs(
    heads: tuple[int, int, int] = (2, 1, 1), T: int = 37, D: int = 5, E: int = 18, B: int = 1
) -> Inputs:
    """Keys of length 1, strengths in (0, 1), decays from none to strong, in float64; E has two
    blocks of columns, and T three chunks of the interpreter.
    """
    H, G, N = heads
    draw: Any = {"dtype": torch.float64, "generator": torch.Generator().manual_seed(0)}
    return {
        "q": torch.randn(B, H, T, D, **draw),
        "k": F.normalize(torch.randn(B, G, T, D, **draw), dim=-1),
        "v": torch.randn(B, N, T, E, **draw),
        "beta": torch.randn(B, N, T, **draw).sigmoid(),
        "g": -torch.randn(B, N, T, D, **draw).mul(2).exp(),
    }


class Mechanism(NamedTuple):
    """How to run a mechanism, by the package and by the definition.

    run(inputs, **options) -> (out, state);  exact(inputs) -> (out, state) in float64;
    plain(inputs) -> several orders of the sums in the dtype of the inputs, for H = G = N;
    names: the inputs that it reads.
    """

    run: Callable[..., tuple[Tensor, tuple[Tensor, ...]]]
    exact: Callable[[Inputs], tuple[Tensor, Tensor]]
    plain: Callable[[Inputs], list[Tensor]]
    names: tuple[str, ...]
    parts: int = 1


def scaled(c: Inputs) -> Tensor:
    return c["q"] / math.sqrt(c["q"].shape[3])


def sums(c: Inputs, g: Tensor | None, q: Tensor, k: Tensor) -> list[Tensor]:
    loops = [plain_loop(q, k, c["v"], g, ahead=x) for x in (False, True)]
    return [*loops, plain_matrix(q, k, c["v"], g)]


def normalized(c: Inputs) -> list[Tensor]:
    q, k = (F.elu(c[x]) + 1 for x in "qk")
    ones = torch.ones_like(c["v"][..., :1])
    found = sums({**c, "v": torch.cat([c["v"], ones], -1)}, None, q, k)
    return [x[..., :-1] / x[..., -1:] for x in found]


def of_delta(c: Inputs, g: Tensor | None) -> list[Tensor]:
    args = (c["q"], c["k"], c["v"], c["beta"], g)
    return [delta_plain(*args, erase_first=x)[0] for x in (False, True)]


def state_loop(k: Tensor, v: Tensor, g: Tensor | None) -> Tensor:
    """The last state as somebody would type it."""
    S = torch.zeros(*k.shape[:2], k.shape[3], v.shape[3], dtype=k.dtype)
    for t in range(k.shape[2]):
        S = S if g is None else S * g[:, :, t, :, None].exp()
        S = S + k[:, :, t, :, None] * v[:, :, t, None]
    return S


def wide(c: Inputs, g: Tensor) -> Tensor:
    return g.expand_as(c["g"])


MECHANISMS = {
    "sums": Mechanism(
        lambda c, **o: linear_attention(
            c["q"], c["k"], c["v"], feature_map="identity", normalize=False, **o
        ),
        lambda c: linear(c["q"], c["k"], c["v"])[:2],
        lambda c: sums(c, None, c["q"], c["k"]),
        ("q", "k", "v"),
    ),
    "elu+1": Mechanism(
        lambda c, **o: linear_attention(c["q"], c["k"], c["v"], **o),
        lambda c: linear(c["q"], c["k"], c["v"], feature_map="elu+1", normalize=True)[:2],
        normalized,
        ("q", "k", "v"),
    ),
    "retention": Mechanism(
        lambda c, **o: retention(c["q"], c["k"], c["v"], **o),
        lambda c: linear(scaled(c), c["k"], c["v"], log_decay=c["g"])[:2],
        lambda c: sums(c, c["g"], scaled(c), c["k"]),
        ("q", "k", "v"),
    ),
    "gated by head": Mechanism(
        lambda c, **o: gated_linear(c["q"], c["k"], c["v"], c["g"][..., :1], **o),
        lambda c: linear(scaled(c), c["k"], c["v"], log_decay=wide(c, c["g"][..., :1]))[:2],
        lambda c: sums(c, wide(c, c["g"][..., :1]), scaled(c), c["k"]),
        ("q", "k", "v", "g"),
    ),
    "gated": Mechanism(
        lambda c, **o: gated_linear(c["q"], c["k"], c["v"], c["g"], **o),
        lambda c: linear(scaled(c), c["k"], c["v"], log_decay=c["g"])[:2],
        lambda c: sums(c, c["g"], scaled(c), c["k"]),
        ("q", "k", "v", "g"),
    ),
    "delta": Mechanism(
        lambda c, **o: delta_rule(c["q"], c["k"], c["v"], c["beta"], **o),
        lambda c: delta(c["q"], c["k"], c["v"], c["beta"])[:2],
        lambda c: of_delta(c, None),
        ("q", "k", "v", "beta"),
    ),
    "gated delta": Mechanism(
        lambda c, **o: gated_delta_rule(c["q"], c["k"], c["v"], c["beta"], c["g"][..., 0], **o),
        lambda c: delta(c["q"], c["k"], c["v"], c["beta"], c["g"][..., 0])[:2],
        lambda c: of_delta(c, c["g"][..., 0]),
        ("q", "k", "v", "beta", "g"),
    ),
    "kimi delta": Mechanism(
        lambda c, **o: gated_delta_rule(c["q"], c["k"], c["v"], c["beta"], c["g"], **o),
        lambda c: delta(c["q"], c["k"], c["v"], c["beta"], c["g"])[:2],
        lambda c: of_delta(c, c["g"]),
        ("q", "k", "v", "beta", "g"),
    ),
}
EACH = pytest.mark.parametrize("name", MECHANISMS)


def moved(c: Inputs, dtype: torch.dtype) -> Inputs:
    return {name: x.to(DEVICE, dtype) for name, x in c.items()}


def part(c: Inputs, first: int, stop: int) -> Inputs:
    return {name: x[:, :, first:stop] for name, x in c.items()}


def run_twice(name: str, c: Inputs, cut: int) -> tuple[Tensor, Tensor]:
    """The tokens before the cut, then the others from the state that these left."""
    run = MECHANISMS[name].run
    first, state = run(part(c, 0, cut), form="triton")
    second, state = run(part(c, cut, c["q"].shape[2]), form="triton", state=state)
    return torch.cat([first, second], 2), state[0]


CELLS = [(name, dtype) for name in MECHANISMS for dtype in DTYPES]
if DEVICE != "cpu":
    CELLS += [(name, torch.bfloat16) for name in MECHANISMS]


def drawn(name: str, **sizes: Any) -> Inputs:
    """The inputs of a mechanism; the decays of retention are those of its paper."""
    c = inputs(**sizes)
    if name == "retention":
        logs = [math.log(1 - 2.0 ** (-5 - n)) for n in range(c["v"].shape[1])]
        c["g"] = torch.tensor(logs).double()[None, :, None, None].expand_as(c["g"])
    return c


def plain_state(name: str, c: Inputs) -> Tensor:
    """The last state in the dtype of the inputs."""
    if "delta" in name:
        g = {"delta": None, "gated delta": c["g"][..., 0]}.get(name, c["g"])
        return delta_plain(c["k"], c["k"], c["v"], c["beta"], g)[1]
    k = F.elu(c["k"]) + 1 if name == "elu+1" else c["k"]
    g = c["g"][..., :1] if name == "gated by head" else c["g"]
    return state_loop(k, c["v"], None if name in ("sums", "elu+1") else g)


@pytest.mark.parametrize("name, dtype", CELLS, ids=lambda x: str(x).removeprefix("torch."))
def test_it_is_the_definition_and_so_are_its_gradients(name: str, dtype: torch.dtype) -> None:
    """A state goes from one call to the next, and its gradient back."""
    mechanism, c = MECHANISMS[name], drawn(name)
    rounded = {key: x.to(dtype).double() for key, x in c.items()}
    leaves = {key: x.requires_grad_() for key, x in moved(c, dtype).items()}
    out, state = run_twice(name, leaves, 18)
    if name == "retention":
        rounded["g"] = c["g"]
    right, last = mechanism.exact(rounded)
    draw = torch.Generator().manual_seed(1)
    weight = torch.randn(out.shape, dtype=torch.float64, generator=draw).to(dtype)
    outs: list[list[Tensor]] = []
    gradients: list[list[tuple[Tensor, ...]]] = []
    for of_dtype in (dtype, torch.float64):
        x = {key: x.to(of_dtype).requires_grad_() for key, x in rounded.items()}
        heads = {key: y if key == "q" else y.repeat_interleave(2, 1) for key, y in x.items()}
        outs.append(mechanism.plain(heads))
        used = [x[key] for key in mechanism.names]
        totals = [(y * weight.to(of_dtype)).sum() for y in outs[-1]]
        gradients.append([torch.autograd.grad(y, used, retain_graph=True) for y in totals])
    assert out.dtype == dtype
    assert_close_rule(out.cpu(), outs[0], right, what="out")
    plain = plain_state(name, {key: x.to(dtype) for key, x in rounded.items()}).float()
    assert state.dtype == torch.float32
    assert_close_rule(state.cpu(), plain, last, what="state")
    used = [leaves[key] for key in mechanism.names]
    found = torch.autograd.grad((out * weight.to(DEVICE)).sum(), used)
    for i, key in enumerate(mechanism.names):
        usual = [x[i] for x in gradients[0]]
        assert_close_rule(found[i].cpu(), usual, gradients[1][0][i], GRADIENT, what=key)


@EACH
def test_several_value_heads_read_one_key_head(name: str) -> None:
    """The form token by token, in float64, is the definition here; two queries and four states."""
    c, run = drawn(name, heads=(2, 1, 4), T=20), MECHANISMS[name].run
    leaves = {key: x.requires_grad_() for key, x in moved(c, torch.float32).items()}
    out, state = run(leaves, form="triton")
    names = MECHANISMS[name].names
    found = [out, state[0], *torch.autograd.grad(out.square().sum(), [leaves[x] for x in names])]
    several = []
    # plain math in three orders of the key channels, because one order may be right by luck; the
    # first channel keeps its place, from which decays of a head are taken
    D = c["k"].shape[3]
    draws = [torch.Generator().manual_seed(seed) for seed in (1, 2)]
    orders = [torch.arange(D)] + [
        F.pad(1 + torch.randperm(D - 1, generator=x), (1, 0)) for x in draws
    ]
    plain_runs = [(torch.float32, form, x) for form in ("recurrent", "chunk") for x in orders]
    for dtype, form, order in (*plain_runs, (torch.float64, "chunk", orders[0])):
        x = {key: y.float().to(dtype) for key, y in c.items()}
        x = {key: y[..., order] if key in ("q", "k", "g") else y for key, y in x.items()}
        x = {key: y.detach().clone().requires_grad_() for key, y in x.items()}
        out, state = run(x, form=form, chunk=16)
        grads = torch.autograd.grad(out.square().sum(), [x[key] for key in names])
        back = order.argsort()
        several.append(
            [
                out,
                state[0][:, :, back],
                *(
                    y[..., back] if key in ("q", "k", "g") else y
                    for key, y in zip(names, grads, strict=True)
                ),
            ]
        )
    *plain, right = several
    for i, what in enumerate(("out", "state", *names)):
        usual = [x[i] for x in plain]
        assert_close_rule(found[i].cpu(), usual, right[i], GRADIENT if i > 1 else 2.0, what)


@EACH
def test_empty_slots_write_nothing_and_a_row_is_the_same_alone(name: str) -> None:
    T, run = 21, MECHANISMS[name].run
    c = moved(drawn(name, T=T, B=2), torch.float32)
    positions = torch.stack([torch.arange(T), torch.arange(T)])
    positions[0, :4], positions[0, 4:] = -1, torch.arange(T - 4)  # left
    positions[1, [2, 9, 10, 19, 20]] = -1  # inside and right
    empty = (positions < 0).to(DEVICE)
    for x in c.values():
        x.transpose(1, 2)[empty] = math.nan
    leaves = {key: x.requires_grad_() for key, x in c.items()}
    out, state = run(leaves, form="triton", k_positions=positions.to(DEVICE))
    assert out.isfinite().all()
    assert out.transpose(1, 2)[empty].eq(0).all()
    used = [leaves[key] for key in MECHANISMS[name].names]
    for x in torch.autograd.grad(out.sum() + state[0].sum(), used):
        assert x.isfinite().all()
        assert x.transpose(1, 2)[empty].eq(0).all()
    row = {key: x[1:].detach() for key, x in c.items()}
    alone, last = run(row, form="triton", k_positions=positions[1:].to(DEVICE))
    assert torch.equal(alone, out[1:])
    assert torch.equal(last[0], state[0][1:])
    dense = {key: x[:, :, ~empty[1]] for key, x in row.items()}
    right, last = run(dense, form="recurrent")
    torch.testing.assert_close(alone[:, :, ~empty[1]], right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[0][1:], last[0], rtol=1e-5, atol=1e-5)


ODD = [
    (name, where, bad)
    for name in ("gated by head", "gated", "gated delta", "kimi delta")
    for where, bad in zip("qkvbg", (math.inf, math.nan, math.inf, math.nan, math.nan), strict=True)
    if where in "".join(MECHANISMS[name].names) and (where != "b" or "delta" in name)
]


@pytest.mark.parametrize("name, where, bad", ODD)
def test_what_is_not_finite_reaches_later_tokens_only(name: str, where: str, bad: float) -> None:
    run, c = MECHANISMS[name].run, drawn(name, heads=(2, 2, 2), T=24, E=3)
    c["beta" if where == "b" else where][0, 1, 20].view(-1)[:1] = bad
    right, last = run(moved(c, torch.float32), form="chunk", chunk=16)
    leaves = {key: x.requires_grad_() for key, x in moved(c, torch.float32).items()}
    out, state = run(leaves, form="triton")
    assert out.isnan().any()
    assert torch.equal(out.isnan(), right.isnan())
    assert torch.equal(state[0].isnan(), last[0].isnan())
    torch.testing.assert_close(out, right, rtol=1e-4, atol=1e-5, equal_nan=True)
    used = [leaves[key] for key in MECHANISMS[name].names]
    first = torch.autograd.grad(out[:, :, :20].sum(), used)
    assert all(x.isfinite().all() for x in first)


@pytest.mark.parametrize("name", ["gated", "delta", "gated delta", "kimi delta"])
@pytest.mark.parametrize("size", [3.0, 1e3, 1e20])
def test_a_large_later_token_changes_no_bit_of_an_earlier_one(name: str, size: float) -> None:
    """Nor of its gradients: token 20 is in the middle of a chunk, and what follows overflows."""
    found = []
    for large in (False, True):
        c = moved(drawn(name, T=60, D=16), torch.float32)
        if large:
            c["k"][:, :, 20:] = size
            c["q"][:, :, 20:] = size
        leaves = {key: x.requires_grad_() for key, x in c.items()}
        out = MECHANISMS[name].run(leaves, form="triton")[0][:, :, :20]
        used = [leaves[key] for key in MECHANISMS[name].names]
        grads = torch.autograd.grad(out.sum(), used)
        found.append([out, *(x[:, :, :20] for x in grads)])
    for ordinary, same in zip(*found, strict=True):
        assert torch.equal(ordinary, same)


@pytest.mark.parametrize("name", ["gated by head", "gated", "gated delta", "kimi delta"])
def test_a_decay_to_0_is_a_new_start(name: str) -> None:
    run, c = MECHANISMS[name].run, moved(drawn(name, T=37), torch.float32)
    c["g"][:, :, [17, 18]] = -math.inf
    leaves = {key: x.requires_grad_() for key, x in c.items()}
    out, state = run(leaves, form="triton")
    fresh, last = run(part(c, 18, 37), form="recurrent")
    torch.testing.assert_close(out[:, :, 18:], fresh, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(state[0], last[0], rtol=1e-5, atol=1e-5)
    used = [leaves[key] for key in MECHANISMS[name].names]
    grads = torch.autograd.grad(out[:, :, 18:].sum() + state[0].sum(), used)
    assert all(x.isfinite().all() for x in grads)
    assert all(x[:, :, :18].eq(0).all() for x in grads[1:3])


@pytest.mark.parametrize("name", ["gated by head", "gated", "gated delta", "kimi delta"])
def test_a_weak_decay_behind_a_strong_one_keeps_its_digits(name: str) -> None:
    mechanism, c = MECHANISMS[name], drawn(name, heads=(1, 1, 1), T=32, E=6)
    c["g"][:] = -1e-3
    c["g"][:, :, :8] = -2000.0
    c = moved(c, torch.float32)
    here = {key: x.cpu() for key, x in c.items()}
    right = mechanism.exact({key: x.double() for key, x in here.items()})[0]
    out, _ = mechanism.run(c, form="triton")
    assert_close_rule(out.cpu(), mechanism.plain(here), right)


WRONG: dict[str, Callable[[Inputs], Inputs]] = {
    "another decay": lambda c: {**c, "g": c["g"].roll(1, 2)},
    "beta on the value alone": lambda c: {**c, "beta": torch.ones_like(c["beta"])},
    "another head": lambda c: {**c, "k": c["k"].roll(1, 1)},
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_call_is_far(wrong: str) -> None:
    """The negative control."""
    mechanism, c = MECHANISMS["kimi delta"], drawn("kimi delta", heads=(2, 2, 2), T=20)
    here = {key: x.float() for key, x in c.items()}
    right = mechanism.exact({key: x.double() for key, x in here.items()})[0]
    out, _ = mechanism.run(moved(WRONG[wrong](c), torch.float32), form="triton")
    with pytest.raises(AssertionError, match="error"):
        assert_close_rule(out.cpu(), mechanism.plain(here), right)


def test_gradients_have_the_same_digits_in_every_run() -> None:
    found = []
    for _ in range(2):
        c = moved(drawn("kimi delta", T=20), torch.float32)
        leaves = [x.requires_grad_() for x in c.values()]
        out, state = MECHANISMS["kimi delta"].run(c, form="triton")
        found.append(torch.autograd.grad(out.square().sum() + state[0].sum(), leaves))
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


@pytest.mark.parametrize("name", ["gated", "gated delta"])
def test_second_derivatives_are_those_of_the_definition(name: str) -> None:
    found = []
    for form in ("triton", "chunk"):
        c = moved(drawn(name, T=18, E=3), torch.float32)
        leaves = [c[key].requires_grad_() for key in MECHANISMS[name].names]
        out, _ = MECHANISMS[name].run(c, form=form, chunk=16)
        first = torch.autograd.grad(out.square().sum(), leaves, create_graph=True)
        total = torch.stack([x.square().sum() for x in first]).sum()
        found.append(torch.autograd.grad(total, leaves))
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-3, atol=1e-3)


def test_bfloat16_is_computed_in_fp32_and_rounded_once() -> None:
    """The interpreter rounds to bf16 wrongly, so that there the result is rounded by torch."""
    c = moved(drawn("gated delta", T=20), torch.bfloat16)
    out, state = MECHANISMS["gated delta"].run(c, form="triton")
    assert out.dtype == torch.bfloat16
    exact, last = MECHANISMS["gated delta"].run(c, form="chunk")
    assert state[0].dtype == torch.float32
    if DEVICE == "cpu":
        torch.testing.assert_close(state[0], last[0], rtol=1e-5, atol=1e-5)
        assert (out == exact).float().mean() > 0.99


def test_the_gradient_of_a_decay_by_head_reaches_its_parameter() -> None:
    """The decays of retention are one number for all tokens and rows of the batch."""
    found = []
    for form in ("triton", "recurrent"):
        c = moved(drawn("retention", heads=(2, 2, 2), T=20), torch.float32)
        decay = torch.tensor([0.9, 0.7], device=DEVICE, requires_grad=True)
        out, _ = retention(c["q"], c["k"], c["v"], decay=decay, form=form)
        found.append(torch.autograd.grad(out.square().sum(), decay)[0])
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-4)
