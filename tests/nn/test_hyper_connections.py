"""The parts of DeepSeek-V4 that no other family has, against loops in fp64: streams, a table of
experts, the rotation of the last dims, and the output in groups.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.nn import InverseRotary, MoE, SigmoidRouter, SwiGLU
from regard.nn.blocks.residual_streams import HyperConnection, StreamsMerge, sinkhorn
from regard.nn.blocks.routers import HashRouter
from regard.nn.projections.factored import GroupedOutput
from regard.nn.projections.steps import QueryTokens
from regard.positions import Rotary, TrailingRotary, rope_frequencies
from regard.span import Span

M, N, EPS = 5, 3, 1e-3


def connection(iterations: int = 3) -> HyperConnection:
    torch.manual_seed(1)
    made = HyperConnection(nn.Identity(), M, N, iterations=iterations, eps=EPS, norm_eps=0.1)
    for p in made.parameters():
        nn.init.normal_(p, std=0.5)
    return made.double()


def numbers(mixes: Any, x: list[float]) -> list[float]:
    """What one token's streams decide, before any function: scale W norm(x) + base."""
    size = math.sqrt(sum(v * v for v in x) / len(x) + mixes.eps)
    rows, found = mixes.linear.weight.tolist(), []
    kinds = [kind for kind, count in enumerate(mixes.sizes) for _ in range(count)]
    for row, base, kind in zip(rows, mixes.base.tolist(), kinds, strict=True):
        product = sum(w * v / size for w, v in zip(row, x, strict=True))
        found.append(product * mixes.scale[kind].item() + base)
    return found


def sigmoid(x: float) -> float:
    return 1 / (1 + math.exp(-x))


def oracle(path: Any, x: list[float], sublayer: Any) -> list[float]:
    streams = [x[i * M : (i + 1) * M] for i in range(N)]
    found = numbers(path.mixes, x)
    read = [sigmoid(a) + EPS for a in found[:N]]
    write = [2 * sigmoid(b) for b in found[N : 2 * N]]
    square = [found[2 * N + i * N : 2 * N + (i + 1) * N] for i in range(N)]
    powers = [[math.exp(v) for v in row] for row in square]
    square = [[v / sum(row) + EPS for v in row] for row in powers]
    for step in range(2 * path.iterations - 1):
        if step % 2:
            square = [[v / (sum(row) + EPS) for v in row] for row in square]
        else:
            sums = [sum(row[j] for row in square) + EPS for j in range(N)]
            square = [[v / sums[j] for j, v in enumerate(row)] for row in square]
    y = sublayer([sum(read[i] * streams[i][m] for i in range(N)) for m in range(M)])
    return [
        write[i] * y[m] + sum(square[j][i] * streams[j][m] for j in range(N))
        for i in range(N)
        for m in range(M)
    ]


def test_streams_are_those_of_loops() -> None:
    path, x = connection(), torch.randn(2, 4, N * M, dtype=torch.float64)
    found = path(x, lambda y: 3 * y.sin())
    want = [
        [oracle(path, row.tolist(), lambda y: [3 * math.sin(v) for v in y]) for row in rows]
        for rows in x
    ]
    assert torch.allclose(found, torch.tensor(want, dtype=torch.float64), atol=1e-12)
    other = torch.tensor([[oracle(connection(2), x[0, 0].tolist(), lambda y: y)]]).double()
    assert not torch.allclose(found[:1, :1], other, atol=1e-4), "negative control"
    merge = StreamsMerge(nn.Identity(), M, N, eps=EPS, norm_eps=0.1).double()
    read = [sigmoid(a) + EPS for a in numbers(merge.mixes, x[0, 0].tolist())]
    streams = x[0, 0].view(N, M)
    assert torch.allclose(merge(x)[0, 0], sum(r * s for r, s in zip(read, streams, strict=True)))


def test_the_mix_of_streams_is_doubly_stochastic() -> None:
    """After many divisions rows and columns sum to 1, so that the streams neither grow nor fade."""
    square = sinkhorn(torch.rand(4, N, N, dtype=torch.float64) + 0.1, 60, 0.0)
    for dim in (-1, -2):
        assert torch.allclose(square.sum(dim), torch.ones(4, N, dtype=torch.float64), atol=1e-8)


def test_gradients_of_a_connection() -> None:
    path, x = connection(2), torch.randn(1, 2, N * M, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *_: Tensor) -> Tensor:
        return path(x, torch.tanh)

    assert torch.autograd.gradcheck(run, (x, *path.parameters()))


def test_a_table_chooses_and_scores_weigh() -> None:
    torch.manual_seed(2)
    router = HashRouter(M, 6, 2, vocabulary=7, normalize=True, scale=1.5, scoring="sqrtsoftplus")
    router.table.data = torch.rand(7, 6).argsort(-1)[:, :2]
    x, ids = torch.randn(4, M), torch.tensor([6, 0, 3, 3])
    weights, experts = router(x, ids)
    for row, token in enumerate(ids.tolist()):
        chosen = router.table[token].tolist()
        logits = (router.linear.weight @ x[row]).tolist()
        scores = [math.sqrt(math.log1p(math.exp(logits[e]))) for e in chosen]
        want = [1.5 * s / sum(scores) for s in scores]
        assert experts[row].tolist() == chosen
        assert weights[row].tolist() == pytest.approx(want, rel=1e-5)
    moe = MoE(router, [SwiGLU(M, 4) for _ in range(6)])
    found = moe(x[None], ids[None])
    assert not torch.allclose(found, moe(x[None], ids.flip(0)[None])), "negative control"
    with pytest.raises(ArgumentError, match="chooses experts by token ids, and got none"):
        moe(x[None])
    with pytest.raises(ArgumentError, match="scoring is 'relu'"):
        SigmoidRouter(M, 6, 2, scoring="relu")  # type: ignore[arg-type]


def test_the_last_dims_are_rotated_and_turned_back() -> None:
    torch.manual_seed(3)
    rotary = Rotary(4, layout="interleaved")
    step, x = TrailingRotary(rotary), torch.randn(1, 2, 3, 7, dtype=torch.float64)
    found = step(x, Span(5, 3))
    assert torch.equal(found[..., :3], x[..., :3])
    for t in range(3):
        for pair, frequency in enumerate(rope_frequencies(4).inv_freq.tolist()):
            a, b = x[0, 1, t, 3 + 2 * pair : 5 + 2 * pair].tolist()
            c, s = math.cos((5 + t) * frequency), math.sin((5 + t) * frequency)
            pair_found = found[0, 1, t, 3 + 2 * pair : 5 + 2 * pair].tolist()
            assert pair_found == pytest.approx([a * c - b * s, b * c + a * s])
    tokens = QueryTokens(torch.zeros(1, 3, M), Span(5, 3), None)
    assert torch.allclose(InverseRotary(rotary)(found, tokens), x)


def test_output_in_groups_is_a_matrix_with_zeros() -> None:
    torch.manual_seed(4)
    output, z = GroupedOutput(12, M, 3, 2).double(), torch.randn(2, 4, 12, dtype=torch.float64)
    first = torch.block_diag(*(part.weight for part in output.groups))  # type: ignore[arg-type]
    assert torch.allclose(output(z), z @ (output.down.weight @ first).T)


def test_dropout_applies_to_what_is_added() -> None:
    path = connection().train()
    path.dropout = nn.Dropout(1.0)
    x = torch.randn(1, 2, N * M, dtype=torch.float64)
    assert torch.allclose(path(x, lambda y: 7 * y), path(x, torch.zeros_like))
