"""A query at position -1 holds nothing: output 0, lse -inf, gradient 0, under every mask and on
every kernel.
"""

from __future__ import annotations

import inspect
import math
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import Span, masks
from regard.masks import Mask
from regard.ops.softmax.call import make_call
from regard.ops.softmax.dispatch import KERNELS
from regard.ops.softmax.kernel import Kernel
from regard.span import Positions
from tests.kernels import require_backend

B, H, G, T, S, D = 2, 4, 2, 20, 40, 8
EMPTY_ROWS = torch.zeros(B, T, dtype=torch.bool)
EMPTY_ROWS[0, :3], EMPTY_ROWS[1, 9], EMPTY_ROWS[1, 17:] = True, True, True
AT = torch.arange(S - T, S).repeat(B, 1).masked_fill(EMPTY_ROWS, -1)
HOLES = torch.arange(S).repeat(B, 1)
HOLES[0, 4:7], HOLES[1, 30] = -1, -1

MASKS: dict[str, Mask | Tensor | None] = {
    "None": None,
    "Full": masks.Full(),
    "Causal": masks.Causal(),
    "Window": masks.Window(50, ahead=45),
    "Chunk": masks.Chunk(7),
    "Prefix": masks.Prefix((5, 9)),
    "Document": masks.Document((0, 12, S)),
    "Padding": masks.Padding.right([S, 30]),
    "Sinks": masks.Sinks(3),
    "Global": masks.Global((0, 25)),
    "EarlierChunks": masks.EarlierChunks(8),
    "Dilated": masks.Dilated(30, 2),
    "BlockCausal": masks.BlockCausal(6),
    "BlockDiffusion": masks.BlockDiffusion(4, 20),
    "Neighborhood": masks.Neighborhood((4, 10), 3),
    "Strided": masks.Strided(5),
    "BigBird": masks.BigBird(8, 5),
    "Blocks": masks.Blocks(torch.ones(5, 5, dtype=torch.bool), 8),
    "Heads": masks.Heads((masks.Full(), masks.Causal(), masks.Strided(3), ~masks.Causal())),
    "Dense": masks.Dense(torch.ones(T, S, dtype=torch.bool)),
    "Selected": masks.Selected(torch.ones(1, 1, T, 5, dtype=torch.bool), 8),
    "Fn": masks.Fn(lambda q, k: (q + k) % 3 != 0, "thirds"),
    "All": masks.Window(60) & masks.Padding.right([S, 30]),
    "Any": masks.Causal() | masks.Sinks(4),
    "Not": ~masks.Causal(),
    "Not of Not": ~~masks.Sinks(6),
    "Not of Fn": ~masks.Fn(lambda q, k: k < q, "past"),
    "Not of Dense": ~masks.Dense(torch.zeros(T, S, dtype=torch.bool)),
    "~Dilated | Chunk": ~masks.Dilated(2, 3) | masks.Chunk(8),
    "bool tensor": torch.ones(1, 1, 1, S, dtype=torch.bool),
}
OF_ALL = (masks.Dense, masks.Selected)
"""Masks of all queries of the call, which cannot be asked for some of them."""
POSITIONS: dict[str, tuple[Positions, Positions, Tensor]] = {
    "stored": (AT, Span(0, S), EMPTY_ROWS),
    "one row": (AT[:1], HOLES, EMPTY_ROWS[:1].expand(B, T)),
    "holes": (AT, HOLES, EMPTY_ROWS),
    "span": (Span(-3, T), Span(0, S), (torch.arange(T) < 3).expand(B, T)),
}


def test_every_mask_is_here() -> None:
    public = {name for name, x in vars(masks).items() if inspect.isclass(x) and issubclass(x, Mask)}
    assert public - {"Mask"} <= {type(x).__name__ for x in MASKS.values()}


def inputs(
    dtype: torch.dtype = torch.float32, *, gradient: bool = False, size: float = 1.0
) -> list[Tensor]:
    draw = torch.Generator().manual_seed(3)
    sizes = ((H, T), (G, S), (G, S))
    made = [(size * torch.randn(B, h, n, D, generator=draw)).to(dtype) for h, n in sizes]
    return [x.requires_grad_(gradient) for x in made]


def chosen(mask: Mask | Tensor | None) -> Mask:
    if mask is None:
        return masks.Full()
    return mask if isinstance(mask, Mask) else masks.Dense(mask)


@pytest.mark.full(keep=10)
@pytest.mark.parametrize("where", POSITIONS)
@pytest.mark.parametrize("name", MASKS)
def test_the_structure_of_a_mask(name: str, where: str) -> None:
    mask, (q, k, empty) = chosen(MASKS[name]), POSITIONS[where]
    block = mask.block(q, k).expand(B, -1, T, S)
    assert not block.transpose(1, 2)[empty].any()
    assert block.transpose(1, 2)[~empty].any()
    seen = mask.visible(q, k)
    assert seen.expand(B, -1, T).equal(block.sum(-1))
    for size in ((4, 16), (1, 1), (64, 64)):
        tiles = mask.tiles(q, k, size)
        dense = masks.Dense(block).tiles(Span(0, T), Span(0, S), size)
        assert tiles.expand(dense.shape).equal(dense), size
    if (found := mask.intervals(q)) is not None:
        lengths = (found.stops - found.starts).clamp(max=1000).sum(-1)
        assert not lengths.expand(B, -1, T).transpose(1, 2)[empty].any()


@pytest.mark.full(keep=10)
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
@pytest.mark.parametrize("where", ["holes", "span"])
@pytest.mark.parametrize("name", MASKS)
def test_output_and_lse(name: str, where: str, kernel: Kernel) -> None:
    mask, (at, k_at, empty) = MASKS[name], POSITIONS[where]
    options: dict[str, Any] = {"mask": mask, "q_positions": at, "k_positions": k_at}
    q, k, v = inputs()
    if kernel.name == "cpu":  # made for few queries
        rows = slice(6, 12)
        if isinstance(mask, OF_ALL) or name == "Not of Dense":
            pytest.skip("a mask of all queries of the call")
        q, empty = q[:, :, rows], empty[:, rows]
        options["q_positions"] = at[rows] if isinstance(at, Span) else at[:, rows]
    q = q.masked_fill(empty[:, None, :, None], math.nan)  # what an empty slot may hold
    try:
        out, lse = regard.attend_partial(q, k, v, backend=kernel.name, **options)
    except regard.KernelRefusal as refused:
        pytest.skip(str(refused))
    blind = empty[:, None].expand(lse.shape)
    assert torch.equal(out[blind], torch.zeros_like(out[blind]))
    assert lse[blind].isneginf().all()
    assert lse[~blind].isfinite().any()
    alone = regard.attend(q, k, v, backend=kernel.name, **options)
    assert torch.equal(alone[blind], torch.zeros_like(out[blind]))
    # the other rows are what they are beside tokens
    beside = chosen(mask).block(options["q_positions"], k_at)
    right = regard.attend(q.nan_to_num(), k, v, mask=masks.Dense(beside), backend="reference")
    assert torch.allclose(alone, right, atol=1e-5)


LEAST = {"cpu": 23, "sdpa": 26, "tiled": 26, "flex": 26, "gemm": 16, "reference": 26}
LEAST_GRADIENTS = {"sdpa": 26, "tiled": 26, "gemm": 16, "reference": 26}
"""How many of the masks each kernel must run, in the two tests beside this."""


@pytest.mark.parametrize("gradient", [False, True], ids=["forward", "gradients"])
@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_each_kernel_runs_its_masks(kernel: Kernel, gradient: bool) -> None:
    least = (LEAST_GRADIENTS if gradient else LEAST).get(kernel.name, 0)
    require_backend(kernel.name)
    rows = slice(6, 12) if kernel.name == "cpu" else slice(None)
    small = gradient and kernel.name == "sdpa"
    q, k, v = inputs(gradient=gradient, size=0.5 if small else 1.0)
    ran = 0
    for name, mask in MASKS.items():
        if kernel.name == "cpu" and (isinstance(mask, OF_ALL) or name == "Not of Dense"):
            continue
        options: dict[str, Any] = {"q_positions": AT[:, rows], "k_positions": Span(0, S)}
        call = make_call(q[:, :, rows], k, v, mask=mask, wants_lse=True, **options)
        ran += not kernel.why_not(call)
    assert ran >= least


@pytest.mark.full(keep=10)
@pytest.mark.parametrize("backend", LEAST_GRADIENTS)
@pytest.mark.parametrize("name", MASKS)
def test_gradients(name: str, backend: str) -> None:
    # the gradient of sdpa is right for small scores
    q, k, v = inputs(gradient=True, size=0.5 if backend == "sdpa" else 1.0)
    options: dict[str, Any] = {"mask": MASKS[name], "q_positions": AT, "k_positions": Span(0, S)}
    try:
        out, lse = regard.attend_partial(q, k, v, backend=backend, **options)
    except regard.KernelRefusal as refused:
        pytest.skip(str(refused))
    blind = EMPTY_ROWS[:, None].expand(lse.shape)
    # whatever is asked of the empty rows, they give nothing on
    only = torch.autograd.grad(
        (out[blind].sum() + lse[blind].masked_fill(lse[blind].isneginf(), 0).sum()),
        (q, k, v),
        retain_graph=True,
    )
    assert all(torch.equal(g, torch.zeros_like(g)) for g in only)
    (d_q,) = torch.autograd.grad(out.square().sum(), (q,))
    assert torch.equal(d_q[blind], torch.zeros_like(d_q[blind]))
    assert d_q[~blind].ne(0).any()


@pytest.mark.full(keep=10)
@pytest.mark.parametrize("name", MASKS)
def test_weights_and_plan(name: str) -> None:
    q, k, v = inputs()
    options: dict[str, Any] = {"mask": MASKS[name], "q_positions": AT, "k_positions": HOLES}
    p = regard.attention_weights(q, k, **options).transpose(1, 2)
    assert torch.equal(p[EMPTY_ROWS], torch.zeros_like(p[EMPTY_ROWS]))
    nothing = regard.plan(q, k, v, **options | {"q_positions": torch.full((1, T), -1)})
    work = nothing["tiled"].work
    assert work is not None
    assert work.pairs == 0


@pytest.mark.full
def test_in_a_compiled_graph() -> None:
    q, k, v = inputs()
    run = torch.compile(regard.attend, backend="aot_eager")
    for mask in (None, masks.Prefix(4), ~masks.Causal()):
        out = run(q, k, v, mask=mask, q_positions=AT, k_positions=Span(0, S))
        assert torch.equal(
            out.transpose(1, 2)[EMPTY_ROWS], torch.zeros(int(EMPTY_ROWS.sum()), H, D)
        )
        assert out.transpose(1, 2)[~EMPTY_ROWS].ne(0).any()


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("backend", ["auto", "sdpa", "tiled", "gemm", "flex", "reference"])
def test_more_queries_than_keys_are_tokens(backend: str) -> None:
    """No position was given, and nobody said that a query is empty: a decoder's queries over a
    short source.
    """
    q, k, v = inputs()
    k, v = k[:, :, :17], v[:, :, :17]
    masked = torch.ones(T, 17, dtype=torch.bool)
    served: list[Mask | None] = [None, masks.Padding.right([17, 16]), masks.Prefix(17)]
    served += [masks.Dense(masked)] * (backend != "gemm")  # which takes ranges of positions
    for mask in served:
        out = regard.attend(q, k, v, mask=mask, backend=backend)
        right = regard.attend(q, k, v, mask=mask, q_positions=Span(0, T), backend="reference")
        assert torch.allclose(out, right, atol=1e-5)
    blind = regard.attend(q, k, v, mask=masks.Causal(), backend=backend)
    assert torch.equal(blind[:, :, : T - 17], torch.zeros(B, H, T - 17, D))


def test_a_rule_that_forgets_the_empty_queries_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("regard.masks.base.find_empty_slots", lambda *_: None)
    with pytest.raises(AssertionError):
        test_the_structure_of_a_mask("Full", "stored")
    with pytest.raises(AssertionError):
        test_output_and_lse("Not", "stored", next(x for x in KERNELS if x.name == "reference"))
