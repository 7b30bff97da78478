"""What is tiled's own: skipping, blocks, bias gradients, dropout, refusals, and memory."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.ops.softmax import tiled
from regard.ops.softmax.call import Call, make_call
from regard.ops.softmax.reference import ReferenceKernel
from regard.ops.softmax.tiled import TiledKernel, query_blocks
from tests.ops.softmax.plain import reasons_in_a_graph, refusal_of

KERNEL = TiledKernel()
refusal = partial(refusal_of, "tiled")
SMALL = TiledKernel(tiled.TileSizes(16, 4, 16 * 4 * 2 * 2))


def qkv(T: int = 40, S: int = 40, H: int = 2, D: int = 8, **kind: Any) -> list[Tensor]:
    return [torch.randn(1, H, n, D, **kind) for n in (T, S, S)]


def visited(call: Call) -> Tensor:
    """How often each pair is visited."""
    seen = torch.zeros(call.T, call.S, dtype=torch.long)
    for rows, pieces in query_blocks(call, SMALL.sizes):
        for piece in pieces:
            seen[rows, piece.columns] += 1
    return seen


@pytest.mark.parametrize(
    "mask",
    [
        masks.Full(),
        masks.Causal(),
        masks.Causal() & masks.Window(5),
        masks.Chunk(8),
        masks.Causal() & (masks.Window(3) | masks.Sinks(1)),
        ~masks.Full(),
        masks.Heads((masks.Causal(), masks.Window(2))),
    ],
    ids=str,
)
def test_what_is_visible_is_visited_once_and_empty_tiles_never(mask: masks.Mask) -> None:
    call = make_call(*qkv(), mask=mask)
    seen = visited(call)
    visible = mask.block(call.q_positions, call.k_positions).expand(1, 2, 40, 40).flatten(0, 1)
    assert torch.equal(seen[visible.any(0)], torch.ones_like(seen[visible.any(0)]))
    assert int(seen.max()) <= 1
    for rows, pieces in query_blocks(call, SMALL.sizes):
        some = [visible[:, rows, i : i + 4].any() for i in range(0, 40, 4)]
        at = {
            j
            for piece in pieces
            for j in range(piece.columns.start // 4, -(-piece.columns.stop // 4))
        }
        assert at == {i for i, any_ in enumerate(some) if any_}
        for piece in pieces:
            assert not piece.full or bool(visible[:, rows, piece.columns].all())
    assert SMALL.work(call).pairs == 2 * int(seen.sum())


def test_a_window_visits_its_band_only() -> None:
    call = make_call(*qkv(T=4096, S=4096, H=1, D=4), mask=masks.Causal() & masks.Window(256))
    assert KERNEL.work(call).pairs <= 4096 * (256 + 2 * 128 + 128)
    assert KERNEL.work(make_call(*qkv(T=4096, S=4096, H=1, D=4))).pairs == 4096**2


def test_blocks_shrink_with_many_heads() -> None:
    for H in (1, 8, 64, 512):
        call = make_call(*(torch.zeros(1, H, 600, 1) for _ in range(3)))
        area = max(
            (rows.stop - rows.start) * (p.columns.stop - p.columns.start) * H
            for rows, pieces in query_blocks(call)
            for p in pieces
        )
        assert area <= max(tiled.DEFAULT_TILE_SIZES.tile, 16 * tiled.DEFAULT_TILE_SIZES.keys * H)


def test_sums_of_biases_and_shared_tensors_get_their_gradients() -> None:
    q, k, v = qkv(dtype=torch.float64)
    table = torch.randn(8, 2, dtype=torch.float64, requires_grad=True)
    dense = torch.randn(40, 40, dtype=torch.float64, requires_grad=True)
    frozen = torch.randn(1, 1, 40, 40, dtype=torch.float64)
    slope = torch.randn(2, dtype=torch.float64, requires_grad=True)
    bias = (
        biases.T5Relative(table)
        + biases.DenseBias(dense)
        + biases.DenseBias(frozen)
        + biases.ALiBi(slopes=slope)
        + biases.DenseBias(dense * 2)
        + biases.FnBias(lambda q, k, w, unused: w[:, None, None] * (q + k), (slope, frozen))
    )
    found = []
    for kernel in (SMALL, ReferenceKernel()):
        out = kernel.run(make_call(q, k, v, bias=bias, mask=masks.Causal())).out
        found.append(
            torch.autograd.grad(
                (out * out.detach()).sum(), (table, dense, slope), retain_graph=True
            )
        )
    for a, b in zip(*found, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-11)
        assert a.abs().max() > 0.01


def test_a_bias_that_ignores_its_tensors_gives_them_nothing() -> None:
    w = torch.randn(2, requires_grad=True)
    for fn in (
        lambda q, k, w: 0.1 * (q - k).float(),
        lambda q, k, w: w.detach()[:, None, None] * (q - k),
    ):
        out = KERNEL.run(make_call(*qkv(), bias=biases.FnBias(fn, (w,)))).out
        assert torch.equal(torch.autograd.grad(out.sum(), w)[0], torch.zeros(2))


def test_dropout_is_the_same_in_both_passes() -> None:
    q, k, v = (x.requires_grad_() for x in qkv(T=5, S=9, D=2, dtype=torch.float64))

    def run(*leaves: Tensor) -> Tensor:
        torch.manual_seed(3)
        return SMALL.run(make_call(*leaves, dropout=0.4, mask=masks.Causal())).out

    assert torch.autograd.gradcheck(run, (q, k, v))
    assert torch.equal(run(q, k, v), run(q, k, v))
    again = SMALL.run(make_call(q, k, v, dropout=0.4, mask=masks.Causal())).out
    assert not torch.equal(again, run(q, k, v))


def test_dropout_drops_its_share_everywhere() -> None:
    q, k, _ = qkv(T=64, S=64, H=1)
    v = torch.eye(64)[None, None]
    kept = SMALL.run(make_call(q, k, v, dropout=0.25)).out
    whole = SMALL.run(make_call(q, k, v)).out
    dropped = (kept == 0)[0, 0]
    n = dropped.numel()
    assert abs(dropped.float().mean().item() - 0.25) < 5 * math.sqrt(0.25 * 0.75 / n)
    torch.testing.assert_close(kept[0, 0][~dropped], whole[0, 0][~dropped] / 0.75)
    tiles = dropped.view(4, 16, 16, 4).transpose(1, 2).flatten(0, 1).flatten(1)
    assert len({tuple(tile.tolist()) for tile in tiles}) == len(tiles), "two tiles have one pattern"


def test_no_graph_is_kept_where_nobody_learns() -> None:
    q, k, v = (x.requires_grad_() for x in qkv())
    for context in (torch.no_grad(), torch.inference_mode()):
        with context:
            assert KERNEL.run(make_call(q, k, v)).out.grad_fn is None
    assert KERNEL.run(make_call(*qkv())).out.grad_fn is None
    (x,) = torch.autograd.grad(KERNEL.run(make_call(q.detach(), k.detach(), v)).out.sum(), (v,))
    assert x.shape == v.shape


def test_an_input_changed_before_backward_is_found() -> None:
    q, k, v = qkv()
    w = q.clone().requires_grad_()
    x = w * 1
    out = KERNEL.run(make_call(x, k, v)).out
    x.data.add_(0)
    with torch.no_grad():
        x.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_refusals() -> None:
    q, k, v = qkv()
    bad = v.clone()
    bad[0, 0, 0, 0] = math.nan
    assert "a NaN or infinity behind a mask would leak through 0 x NaN" in refusal(q, k, bad)
    assert "tiled (nothing to compute (B 1, T 40, S 0, E 8))" in refusal(
        q, k[:, :, :0], v[:, :, :0]
    )
    assert "nothing to compute (B 1, T 0, S 40, E 8)" in refusal(q[:, :, :0], k, v)
    assert "nothing to compute (B 0, T 40, S 40, E 8)" in refusal(q[:0], k[:0], v[:0])
    with regard.Trace("pattern", missing="ignore"):
        message = refusal(q, k, v)
    assert "does not expose ['pattern']" in message
    assert "backends that can: reference" in message
    eight = q.to(torch.float8_e4m3fn)
    assert KERNEL.why_not(make_call(eight, eight, eight)) == ["no float8_e4m3fn"]


def test_a_compiled_graph_is_refused() -> None:
    assert reasons_in_a_graph(KERNEL) == [
        "reads the tiles of the mask, which is not possible in a compiled graph"
    ]


def test_it_promises_memory_that_grows_with_T_and_not_with_its_square() -> None:
    for mask in (masks.Causal(), masks.Causal() & masks.Window(256)):
        sizes = []
        for T in (8192, 16384, 32768):
            x = torch.empty(1, 1, T, 64, device="meta", requires_grad=True)
            call = Call(
                x, x, x, mask, None, 0.125, None, None, 0.0, regard.Span(0, T), regard.Span(0, T)
            )
            sizes.append(KERNEL.work(call).bytes)
        assert sizes[2] - sizes[1] == 2 * (sizes[1] - sizes[0]), "not linear"
        assert sizes[2] < 40 * 2**20
