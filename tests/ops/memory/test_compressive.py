"""The rules of the memory: what is read, what is written, and what the literature found out about
both.
"""

from __future__ import annotations

import math

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from regard.memory import CompressiveState, elu_plus_one, retrieve, write
from regard.ops.infini_attention import empty_state
from tests.oracles import infini as oracle
from tests.rules import assert_close_rule

SCALES = [0.1, 1.0, 5.0]


def drawn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


def empty(k: Tensor, v: Tensor) -> CompressiveState:
    return empty_state(k, v)


def by_hand(q: Tensor, segments: list[tuple[Tensor, Tensor]], update: str) -> Tensor:
    """What q [B,H,T,D] reads behind these segments, from the loops."""
    k, v = segments[0]
    (B, H, T, D), (G, E) = q.shape, (k.shape[1], v.shape[3])
    out = torch.zeros(B, H, T, E, dtype=torch.float64)
    for b in range(B):
        for h in range(H):
            store, g = oracle.Store(D, E), h // (H // G)
            for keys, values in segments:
                store.write(keys[b, g].double().tolist(), values[b, g].double().tolist(), update)
            for t in range(T):
                out[b, h, t] = torch.tensor(
                    store.read(q[b, h, t].double().tolist()), dtype=torch.float64
                )
    return out


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("update", ["linear", "delta"])
def test_what_is_read_is_the_definition(scale: float, dtype: torch.dtype, update: str) -> None:
    q = drawn(2, 4, 3, 6, scale=scale, dtype=dtype)
    segments = [
        (drawn(2, 2, n, 6, scale=scale, dtype=dtype), drawn(2, 2, n, 5, dtype=dtype))
        for n in (4, 3, 1, 5)
    ]
    state = empty(*segments[0])
    plain_M, plain_z = (x.to(q.dtype) for x in state)
    for k, v in segments:
        f = F.elu(k) + 1
        u = v
        if update == "delta" and bool(plain_z.any()):
            u = v - f @ plain_M / (f @ plain_z[..., None])
        plain_M, plain_z = plain_M + f.transpose(-1, -2) @ u, plain_z + f.sum(2)
        state = write(k, v, state, update)
    assert (
        state.M.dtype
        == state.z.dtype
        == (torch.float64 if dtype == torch.float64 else torch.float32)
    )
    f = (F.elu(q) + 1).unflatten(1, (2, 2))
    plain = f @ plain_M[:, :, None] / (f @ plain_z[:, :, None, :, None])
    read = retrieve(q, state)
    assert bool(read.has_memory.all())
    assert_close_rule(read.values.to(dtype), plain.flatten(1, 2), by_hand(q, segments, update))


def test_wrong_rules_are_caught() -> None:
    """Negative controls: updates exchanged, heads tiled in place of repeated, no denominator."""
    q, k, v = drawn(1, 4, 3, 6), drawn(1, 2, 5, 6), drawn(1, 2, 5, 4)
    segments = [(k, v), (drawn(1, 2, 5, 6), drawn(1, 2, 5, 4))]
    state = empty(k, v)
    for pair in segments:
        state = write(*pair, state)
    right, exact = retrieve(q, state).values, by_hand(q, segments, "linear")
    assert float((right - exact).abs().max()) < 1e-13
    tiled = retrieve(q[:, [0, 2, 1, 3]], state).values
    bare = elu_plus_one(q).unflatten(1, (2, 2)) @ state.M[:, :, None]
    for wrong in (by_hand(q, segments, "delta"), tiled, bare.flatten(1, 2)):
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(wrong, right, exact)


def test_sigma_keeps_what_is_small() -> None:
    x = torch.tensor([-80.0, -30.0, -17.0, -1e-3, 0.0, 1e-3, 30.0])
    exact = torch.tensor([oracle.sigma(float(y)) for y in x.double()], dtype=torch.float64)
    assert float(((elu_plus_one(x).double() - exact) / exact).abs().max()) < 2e-7 * 80, (
        "rounding of the argument"
    )
    assert (F.elu(x) + 1)[:3].tolist()[:2] == [0.0, 0.0], "expm1(x) + 1 rounds it away"


def test_a_query_far_below_zero_reads_the_same_mean() -> None:
    """elu(q) + 1 is 0 in fp32 below -104: 0/0 in plain math; the weights of the dims stay what they
    are.
    """
    q, k, v = drawn(1, 1, 2, 4), drawn(1, 1, 6, 4), drawn(1, 1, 6, 3)
    near = retrieve(q - 20, write(k, v, empty(k, v))).values
    low = [x.float() for x in (q, k, v)]
    state = write(*low[1:], empty(*low[1:]))
    far = retrieve((q - 400).float(), state)
    assert bool(far.has_memory.all())
    assert float((far.values.double() - near).abs().max()) < 1e-3  # q - 400 keeps 5 digits
    f = F.elu(q.float() - 400) + 1
    assert bool((f @ state.M / (f @ state.z[..., None])).isnan().all()), "negative control"


def test_what_is_not_written_is_not_looked_at() -> None:
    k, v, q = drawn(2, 1, 4, 3), drawn(2, 1, 4, 3), drawn(2, 1, 4, 3)
    where = torch.tensor([[True, False, True, True], [False, False, True, True]])
    for update in ("linear", "delta"):
        state = write(drawn(2, 1, 2, 3), drawn(2, 1, 2, 3), empty(k, v))
        mine = write(k, v, state, update, where)
        spoilt_k, spoilt_v, spoilt_q = (x.clone() for x in (k, v, q))
        for x in (spoilt_k, spoilt_v, spoilt_q):
            x.movedim(1, -1)[~where] = math.nan
        for x in (spoilt_k, spoilt_v, spoilt_q):
            x.requires_grad_()
        spoilt = write(spoilt_k, spoilt_v, state, update, where)
        assert all(torch.equal(a, b) for a, b in zip(mine, spoilt, strict=True))
        read = retrieve(spoilt_q, spoilt, where)
        assert torch.equal(read.has_memory[:, 0], where)
        assert torch.equal(read.values[where[:, None]], retrieve(q, mine).values[where[:, None]])
        assert read.values[~where[:, None]].eq(0).all()
        read.values.sum().backward()
        for x in (spoilt_k, spoilt_v, spoilt_q):
            assert x.grad is not None
            assert x.grad.isfinite().all()
            assert x.grad[~where[:, None]].eq(0).all()
        for b in range(2):
            alone = write(
                k[b : b + 1, :, where[b]],
                v[b : b + 1, :, where[b]],
                CompressiveState(*(x[b : b + 1] for x in state)),
                update,
            )
            assert float((alone.M - mine.M[b]).abs().max()) < 1e-13


def test_the_same_binding_again() -> None:
    """Linear reads v for ever; delta leaves M as it is, but z grows: v / 2 from the second write
    on.
    """
    k, v = drawn(1, 1, 1, 8), drawn(1, 1, 1, 5)
    for update, factors in (("linear", [1, 1, 1, 1]), ("delta", [1, 0.5, 0.5, 0.5])):
        state, first = empty(k, v), None
        for n, factor in enumerate(factors):
            state = write(k, v, state, update)
            read = retrieve(k, state).values
            assert float((read - factor * v).abs().max()) < 1e-14, (update, n)
            first = state if first is None else first
            if update == "delta" and n == 1:
                assert float((state.M - first.M).abs().max()) < 1e-14
                assert float((state.z - 2 * first.z).abs().max()) < 1e-14


@pytest.mark.parametrize("update", ["linear", "delta"])
def test_gradients(update: str) -> None:
    q, k, v = drawn(1, 2, 2, 3), drawn(1, 1, 3, 3), drawn(1, 1, 3, 2)
    M, z = drawn(1, 1, 3, 2), drawn(1, 1, 3).abs() + 0.5

    def both(q: Tensor, k: Tensor, v: Tensor, M: Tensor, z: Tensor) -> Tensor:
        return retrieve(q, write(k, v, CompressiveState(M, z), update)).values

    inputs = tuple(x.requires_grad_() for x in (q, k, v, M, z))
    assert torch.autograd.gradcheck(both, inputs)


def test_the_state_does_not_overflow_in_half_precision() -> None:
    """The sum of features of 64 segments passes 65504, the largest number of fp16."""
    k, v = (
        drawn(1, 1, 256, 4, scale=30, dtype=torch.float16),
        drawn(1, 1, 256, 4, dtype=torch.float16),
    )
    state = empty(k, v)
    for _ in range(64):
        state = write(k, v, state)
    assert bool((state.z > 65504).any())
    read = retrieve(k, state)
    assert bool(read.values.isfinite().all())
    once = retrieve(k, write(k, v, empty(k, v))).values
    assert float((read.values - once).abs().max()) < 1e-4
