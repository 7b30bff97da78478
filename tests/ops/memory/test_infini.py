"""Infini-attention against the segment-by-segment loop, and the mistakes of other implementations
as controls.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import masks
from regard.memory import infini_attention
from regard.span import Span
from tests.ops.memory.plain import several
from tests.oracles import infini as oracle
from tests.rules import GRADIENT, assert_close_rule, assert_refused

UPDATES = ["linear", "delta"]


def drawn(*shape: int, scale: float = 1.0, dtype: torch.dtype = torch.float64) -> Tensor:
    return (torch.randn(*shape, dtype=torch.float64) * scale).to(dtype)


def case(
    B: int = 2, H: int = 4, G: int = 2, T: int = 11, D: int = 6, E: int = 5, **options: Any
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v = (
        drawn(B, H, T, D, **options),
        drawn(B, G, T, D, **options),
        drawn(B, G, T, E, **options),
    )
    return q, k, v, drawn(H, dtype=options.get("dtype", torch.float64))


def near(a: Tensor, b: Tensor, bound: float = 1e-12) -> bool:
    """Two roundings of fp64 sums of a few dozen terms of size 1 to 100."""
    return float((a - b).detach().abs().max()) < bound


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("empty", ["zero", "skip"])
@pytest.mark.parametrize("update", UPDATES)
@pytest.mark.parametrize("segment", [1, 4, 11, 16])
@pytest.mark.parametrize("G", [1, 2, 4])
def test_is_the_loop(G: int, segment: int, update: str, empty: str) -> None:
    q, k, v, gate = case(G=G)
    options: Any = {"update": update, "empty": empty}
    exact = oracle.infini(q, k, v, gate, segment, **options)
    for positions in (None, Span(0, 11), torch.arange(11)[None], torch.arange(11).expand(2, -1)):
        out, _ = infini_attention(
            q, k, v, gate=gate, segment=segment, positions=positions, **options
        )
        assert near(out, exact)


@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("update", UPDATES)
def test_rounds_no_worse_than_plain_math(update: str, dtype: torch.dtype, scale: float) -> None:
    q, k, v, gate = case(scale=scale, dtype=dtype)
    out, state = infini_attention(q, k, v, gate=gate, segment=4, update=update)  # type: ignore[arg-type]
    assert out.dtype == dtype
    assert state.M.dtype == state.z.dtype == torch.float32
    plain = several(q, k, v, gate, 4, update=update)
    assert_close_rule(out, plain, oracle.infini(q, k, v, gate, 4, update=update))


def test_known_mistakes_are_caught() -> None:
    """Negative controls: written before read, gate reversed, heads tiled, positions in the memory,
    no memory.
    """
    q, k, v, gate = case()
    qr, kr = drawn(2, 4, 11, 6), drawn(2, 2, 11, 6)
    rotated: Any = {"q_rotated": qr, "k_rotated": kr}
    right, _ = infini_attention(q, k, v, gate=gate, segment=4, **rotated)
    exact = oracle.infini(q, k, v, gate, 4, **rotated)
    assert near(right, exact)
    wrongs = {
        "written first": oracle.infini(q, k, v, gate, 4, retrieve_first=False, **rotated),
        "gate reversed": oracle.infini(q, k, v, -gate, 4, **rotated),
        "tiled": infini_attention(q[:, [0, 2, 1, 3]], k, v, gate=gate, segment=4)[0],
        "memory with positions": infini_attention(qr, kr, v, gate=gate, segment=4)[0],
        "local without positions": infini_attention(q, k, v, gate=gate, segment=4)[0],
        "no memory": oracle.infini(q, k, v, gate - 800, 4, **rotated),
        "other rule": oracle.infini(q, k, v, gate, 4, update="delta", **rotated),
    }
    for name, wrong in wrongs.items():
        with pytest.raises(AssertionError, match="error"):
            assert_close_rule(wrong, right, exact, what=name)


def test_a_closed_gate_is_attention_inside_segments() -> None:
    q, k, v, _ = case()
    local = regard.attend(q, k, v, mask=masks.Causal() & masks.Chunk(4))
    for value in (-math.inf, -1e4):
        out, _ = infini_attention(q, k, v, gate=torch.full((4,), value).double(), segment=4)
        assert torch.equal(out, local)
    for value in (math.inf, 1e4):
        out, _ = infini_attention(q, k, v, gate=torch.full((4,), value).double(), segment=4)
        assert out[:, :, :4].eq(0).all(), "nothing is read in the first segment"
        assert near(out, oracle.infini(q, k, v, torch.full((4,), 1e4), 4))
        out, _ = infini_attention(
            q, k, v, gate=torch.full((4,), value).double(), segment=4, empty="skip"
        )
        assert torch.equal(out[:, :, :4], local[:, :, :4])


def test_the_first_segment() -> None:
    """Paper-literal: A_dot counts 1 - sigmoid(gate). Skip: a text of one segment is plain
    attention.
    """
    q, k, v, gate = case(T=5)
    plain = regard.attend(q, k, v, mask=masks.Causal())
    zero, state = infini_attention(q, k, v, gate=gate, segment=8)
    skip, _ = infini_attention(q, k, v, gate=gate, segment=8, empty="skip")
    assert torch.equal(skip, plain)
    assert near(zero, (1 - torch.sigmoid(gate))[:, None, None] * plain)
    assert state.M.eq(0).all(), "an open segment is not in the state"
    assert state.z.eq(0).all()


@pytest.mark.parametrize("update", UPDATES)
def test_the_state_carries_over(update: Any) -> None:
    """Calls that end at borders go on from the state alone; others give the open segment's tokens
    again.
    """
    q, k, v, gate = case(T=18)
    whole, end = infini_attention(q, k, v, gate=gate, segment=4, update=update)
    for cuts in ((0, 4, 8, 12, 16, 18), (0, 8, 18), (0, 1, 3, 4, 9, 16, 17, 18)):
        parts, state = [], None
        for a, b in itertools.pairwise(cuts):
            first = a // 4 * 4
            out, state = infini_attention(
                q[:, :, a:b],
                k[:, :, first:b],
                v[:, :, first:b],
                gate=gate,
                segment=4,
                update=update,
                state=state,
                positions=Span(first, b - first),
            )
            parts.append(out)
        assert near(torch.cat(parts, 2), whole)
        assert state is not None
        assert all(near(x, y) for x, y in zip(state, end, strict=True))


def rows() -> torch.Tensor:
    """Left padding, right padding, padding in the middle, a text that begins late, gaps of whole
    segments.
    """
    return torch.tensor(
        [
            [-1, -1, -1, 0, 1, 2, 3, 4, 5, 6, 7],
            [0, 1, 2, 3, 4, 5, 6, 7, 8, -1, -1],
            [0, 1, -1, 2, 3, 4, -1, -1, 5, 6, 7],
            [5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15],
            [0, 3, 4, 50, 51, 52, 53, 54, 99, 1000, 1001],
            [-1] * 11,
        ]
    )


@pytest.mark.parametrize("empty", ["zero", "skip"])
@pytest.mark.parametrize("update", UPDATES)
def test_borders_follow_the_positions_of_each_row(update: Any, empty: Any) -> None:
    positions = rows()
    q, k, v, gate = case(B=6)
    exact = oracle.infini(
        q, k, v, gate, 3, update=update, empty=empty, positions=positions.tolist()
    )
    options: Any = {"gate": gate, "segment": 3, "update": update, "empty": empty}
    out, state = infini_attention(q, k, v, positions=positions, **options)
    assert near(out, exact)
    for x in (q, k, v):  # what stands at -1 is not looked at
        x.movedim(1, -1)[positions < 0] = math.nan
    spoilt, after = infini_attention(q, k, v, positions=positions, **options)
    assert torch.equal(out, spoilt)
    assert all(torch.equal(x, y) for x, y in zip(state, after, strict=True))
    assert out[5].eq(0).all()
    for b in range(5):  # no row hears of another
        alone, _ = infini_attention(
            q[b : b + 1], k[b : b + 1], v[b : b + 1], positions=positions[b : b + 1], **options
        )
        assert near(alone[0], out[b])


@pytest.mark.parametrize("update", UPDATES)
def test_what_comes_later_changes_nothing(update: Any) -> None:
    q, k, v, gate = case()
    out, _ = infini_attention(q, k, v, gate=gate, segment=4, update=update)
    for t in range(1, 11):
        spoilt = [x.clone() for x in (q, k, v)]
        for x in spoilt:
            x[:, :, t:] = math.nan
        other, _ = infini_attention(*spoilt, gate=gate, segment=4, update=update)
        assert near(other[:, :, :t], out[:, :, :t]), "another kernel where there are NaN"
        assert other[:, :, t:].isnan().all(), "and what is seen is not laundered"


@pytest.mark.parametrize(("update", "empty"), [("linear", "zero"), ("delta", "skip")])
def test_gradients_through_the_memory(update: Any, empty: Any) -> None:
    q, k, v, gate = case(B=1, H=2, G=1, T=4, D=2, E=1)
    positions = torch.tensor([[-1, 0, 1, 2]])

    def both(*xs: Tensor) -> tuple[Tensor, ...]:
        q, k, v, gate = xs
        options: Any = {"gate": gate, "segment": 2, "update": update, "empty": empty}
        out, (M, z) = infini_attention(q, k, v, **options)
        padded, _ = infini_attention(q, k, v, positions=positions, **options)
        return out, M, z, padded

    assert torch.autograd.gradcheck(both, tuple(x.requires_grad_() for x in (q, k, v, gate)))


def test_gradients_reach_the_tokens_of_closed_segments() -> None:
    given = case(B=1, T=11, dtype=torch.float32)

    def gradients(dtype: torch.dtype, call: Callable[..., Tensor]) -> list[Tensor]:
        xs = [x.detach().to(dtype).clone().requires_grad_() for x in given]
        call(*xs)[:, :, 8:].square().sum().backward()
        return [x.grad for x in xs if x.grad is not None]

    mine = gradients(
        torch.float32, lambda q, k, v, gate: infini_attention(q, k, v, gate=gate, segment=4)[0]
    )
    exact = gradients(torch.float64, lambda *xs: several(*xs, 4)[0])
    plains = [gradients(torch.float32, lambda *xs, n=n: several(*xs, 4)[n]) for n in range(4)]
    for x, ref, *plain in zip(mine, exact, *plains, strict=True):
        assert_close_rule(x, plain, ref, GRADIENT)
    _, k, v, _ = mine
    assert v[:, :, :8].ne(0).all(), "the last queries see segments 0 and 1 in the memory only"
    assert k[:, :, :8].ne(0).any(-1).all()


@pytest.mark.parametrize("empty", ["zero", "skip"])
@pytest.mark.parametrize("value", [-math.inf, -1e4, 0.0, 1e4, math.inf])
def test_no_gate_makes_a_nan(value: float, empty: Any) -> None:
    """Also not in the first segment, which is 0/0, nor for keys and queries so far below 0 that
    sigma is 0 in fp32.
    """
    for shift in (0.0, -300.0):
        q, k, v, _ = (x.float() for x in case())
        gate = torch.full((4,), value).requires_grad_()
        inputs = [(x + shift).requires_grad_() for x in (q, k)] + [v.requires_grad_()]
        out, _ = infini_attention(*inputs, gate=gate, segment=4, empty=empty)
        out.sum().backward()
        for x in (out, gate.grad, *(x.grad for x in inputs)):
            assert x is not None
            assert x.isfinite().all()


def test_autocast_does_not_lower_the_memory() -> None:
    q, k, v, gate = (x.float() for x in case())
    _, state = infini_attention(q, k, v, gate=gate, segment=4)
    with torch.autocast("cpu", torch.bfloat16):
        _, other = infini_attention(q, k, v, gate=gate, segment=4)
    assert torch.equal(other.M, state.M)
    assert torch.equal(other.z, state.z)


@pytest.mark.full
def test_a_compiled_graph_gives_the_same() -> None:
    q, k, v, gate = case()

    def call(q: Tensor, k: Tensor, v: Tensor, positions: Any) -> Tensor:
        return infini_attention(q, k, v, gate=gate, segment=4, update="delta", positions=positions)[
            0
        ]

    compiled = torch.compile(call, fullgraph=True, backend="eager")
    padded = torch.tensor([[-1, -1, *range(9)], [*range(3, 14)]])
    for positions in (Span(0, 11), padded):
        assert near(compiled(q, k, v, positions), call(q, k, v, positions))
    with pytest.raises(RuntimeError, match="positions skip whole segments"):
        compiled(q, k, v, torch.tensor([[*range(10), 1000], [*range(11)]]))
    # torch 2.13: an exception leaves a compiled graph without closing the graph's autocast contexts
    assert torch.autocast_decrement_nesting() == 0
    torch.clear_autocast_cache()


def test_errors() -> None:
    q, k, v, gate = case()
    M, z = torch.zeros(2, 2, 6, 5).double(), torch.zeros(2, 2, 6).double()
    cases: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"segment": 0}, regard.ArgumentError, "segment is 0; it must be 1 or more"),
        ({"segment": 2.0}, regard.ArgumentTypeError, "segment is float 2.0; it must be an int"),
        ({"update": "sum"}, regard.ArgumentError, "update is 'sum'; it must be 'linear' or"),
        ({"empty": "one"}, regard.ArgumentError, "empty is 'one'; it must be 'zero' or 'skip'"),
        ({"gate": gate[:2]}, regard.ArgumentError, "gate is (2,); it must be one logit per"),
        ({"gate": gate.long()}, regard.ArgumentTypeError, "gate is int64; it must be float64"),
        ({"q_rotated": q}, regard.ArgumentError, "k_rotated is missing; give both q_rotated and"),
        ({"k_rotated": k}, regard.ArgumentError, "q_rotated is missing; give both q_rotated and"),
        ({"q_rotated": q[:1], "k_rotated": k}, regard.ArgumentError, "q_rotated is"),
        ({"q_rotated": q, "k_rotated": k[..., :3]}, regard.ArgumentError, "k_rotated is"),
        ({"state": (M[:, :, :, :4], z)}, regard.ArgumentError, "state M is (2, 2, 6, 4); for"),
        ({"state": (M, z[:1])}, regard.ArgumentError, "state z is (1, 2, 6); for these keys and"),
        ({"state": (M, z.float())}, regard.ArgumentTypeError, "state z is float32; it must be"),
        ({"positions": Span(-3, 11)}, regard.ArgumentError, "positions are Span"),
        ({"positions": Span(0, 9)}, regard.ArgumentError, "positions is Span(start=0, length=9)"),
        ({"backend": "none"}, regard.ArgumentError, "none"),
    ]
    usual: dict[str, Any] = {"gate": gate, "segment": 4}
    assert_refused(
        (lambda change=change: infini_attention(q, k, v, **{**usual, **change}), *rest)
        for change, *rest in cases
    )
    with pytest.raises(regard.ArgumentError, match="11 queries and 4 keys; the queries are"):
        infini_attention(q, k[:, :, :4], v[:, :, :4], **usual)
