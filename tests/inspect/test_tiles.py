"""The accuracy bar: every tile of 2048 tokens in fp32 is a dense softmax in fp64, to 1e-6; and what
is empty is skipped.
"""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import Tensor

from regard import biases, masks
from regard.caches import Ring
from regard.errors import ArgumentError
from regard.inspect import Recorder, Recording, iterate_tiles, pool_pattern
from regard.inspect.record.recorded_place import Place
from regard.nn.variants import VARIANTS
from regard.span import Span
from tests.inspect.recorded import recorded_call
from tests.nn.catalogue import example, tokens

T, SIZE, BAR, GAP = 2048, 256, 1e-6, 37
HEADS = {"mha": (2, 2), "gqa": (4, 2), "mqa": (4, 1)}
CUTS = (0, 300, 301, 1500, T)


def rule(name: str, q: Tensor, k: Tensor) -> Tensor:
    """A mask by arithmetic on positions [T,1] and [1,S], with no help of `regard.masks`."""
    back = q - k
    document = (
        sum((x >= cut).long() for x in (q,) for cut in CUTS),
        sum((k >= cut).long() for cut in CUTS),
    )
    return {
        "causal": back >= 0,
        "window": (back >= 0) & (back < 200),
        "prefix": (back >= 0) | (k < 500),
        "document": (back >= 0) & (document[0] == document[1]),
        "bidirectional": back == back,
    }[name]


MASKS = {
    "causal": masks.Causal(),
    "window": masks.Causal() & masks.Window(200),
    "prefix": masks.Causal() | masks.Prefix(500),
    "document": masks.Causal() & masks.Document(CUTS),
    "bidirectional": None,
}
EXTRAS = ("none", "alibi", "softcap", "sink", "left padding")


def recorded(
    H: int, G: int, mask: str, extra: str, D: int = 32
) -> tuple[Recording, Tensor, Tensor, dict[str, Any]]:
    make = torch.Generator().manual_seed(H + G)
    q, k = torch.randn(1, H, T, D, generator=make), torch.randn(1, G, T, D, generator=make)
    options: dict[str, Any] = {}
    if extra == "alibi":
        both = mask in ("prefix", "bidirectional")
        options["bias"] = biases.ALiBi(slopes=[2.0**-i for i in range(1, H + 1)], symmetric=both)
    elif extra == "softcap":
        options["softcap"] = 2.0
    elif extra == "sink":
        options["sink"] = torch.linspace(-1, 2, H)
    elif extra == "left padding":
        at = torch.arange(T)[None] - GAP
        options |= {"q_positions": at.clamp(min=-1), "k_positions": at.clamp(min=-1)}
    return recorded_call(q, k, k[..., :8], keep=(), mask=MASKS[mask], **options), q, k, options


def dense(
    q: Tensor, k: Tensor, mask: str, extra: str, head: int, n: int, rows: slice = slice(0, T)
) -> Tensor:
    """Rows of the pattern of a head in fp64, by plain softmax."""
    at = torch.arange(T) - (GAP if extra == "left padding" else 0)
    s = q[0, head, rows].double() @ k[0, head // n].double().T / math.sqrt(q.shape[3])
    if extra == "softcap":
        s = 2.0 * torch.tanh(s / 2.0)
    if extra == "alibi":
        far = at[rows, None] - at
        s = s - 2.0 ** -(head + 1) * (far.abs() if mask in ("prefix", "bidirectional") else far)
    at = torch.where(at < 0, -1, at)
    seen = rule(mask, at[rows, None], at[None]) & (at >= 0) & (at[rows, None] >= 0)
    s = s.masked_fill(~seen, -math.inf)
    top = s.amax(1, keepdim=True).clamp(min=-1e9)
    e = torch.exp(s - top)
    total = e.sum(1, keepdim=True)
    if extra == "sink":
        total = total + torch.exp(torch.linspace(-1, 2, q.shape[1])[head].double() - top)
    return torch.where(total > 0, e / total, 0)


def assert_right(found: Recording, head: int, right: Tensor, bar: float = BAR) -> None:
    """Every tile that is walked over, and zero where none is."""
    left = right.clone()
    for tile in iterate_tiles(found[0], SIZE, heads=slice(head, head + 1)):
        at = tile.rows, tile.columns
        assert float((tile.weights[0] - right[at]).abs().max()) <= bar
        left[at] = 0
    assert float(left.abs().max()) == 0


def heads_of(mask: str, extra: str) -> tuple[int, int]:
    """Every kind of heads in its turn."""
    return list(HEADS.values())[(list(MASKS).index(mask) + EXTRAS.index(extra)) % 3]


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("extra", EXTRAS)
@pytest.mark.parametrize("mask", MASKS)
def test_rows_of_every_mask_with_every_addition(mask: str, extra: str) -> None:
    """Whole rows of tiles, the ragged ones at the edges of windows, documents and padding among
    them.
    """
    H, G = heads_of(mask, extra)
    found, q, k, _ = recorded(H, G, mask, extra)
    for head, start in ((0, 0), (H - 1, 290), (H - 1, 1490), (H - 1, T - 32)):
        rows = slice(start, start + 32)
        right = dense(q, k, mask, extra, head, H // G, rows)
        for tile in iterate_tiles(found[0], (32, SIZE), heads=slice(head, head + 1), rows=rows):
            assert float((tile.weights[0] - right[:, tile.columns]).abs().max()) <= BAR
            right[:, tile.columns] = 0
        assert float(right.abs().max()) == 0


@pytest.mark.parametrize("form", ["expand", "absorb"])
def test_latent_attention_in_both_forms(form: str) -> None:
    """MLA: the keys of all heads, or the latents; the pattern is that of the formula written out on
    the weights.
    """
    module = example(VARIANTS["mla"], dtype=torch.float32)
    module.project.form = form
    x = 0.1 * tokens(T, B=1, dtype=torch.float32)
    with torch.no_grad(), Recorder(keep=()) as recorder:
        module(x)
    found, latent = recorder.recording(), module.project
    assert found[0].key_kind == {"expand": "keys", "absorb": "latents"}[form]
    assert len(found[0].pools[0].groups) == (latent.heads if form == "expand" else 1)
    head, d = 1, latent.nope_dim
    with torch.no_grad():
        wide = example(VARIANTS["mla"]).project
        at = Span(0, T)
        q = wide.query(x.double(), at)[0, head]
        k, _ = wide.recall(wide.remember(x.double(), at), at)
    future = torch.ones(T, T).triu(1).bool()
    s = (q @ k[0, head].T * (d + wide.rotary.dim) ** -0.5).masked_fill(future, -math.inf)
    right = s.softmax(1)
    worst = max(
        float((tile.weights[0] - right[tile.rows, tile.columns]).abs().max())
        for tile in iterate_tiles(found[0], SIZE, heads=slice(head, head + 1))
    )
    # projections in fp32 are another q and k: the bar is for the softmax of what was recorded
    assert worst <= 1e-4
    place = found[0]
    q = place.steps[0].q[0, head].double()
    own = place.k[0, place.pools[0].group_index(head, place.H)].double()
    s = (q @ own.T * place.steps[0].scale).masked_fill(future, -math.inf)
    # the stored log-sum-exp is a number of fp32: a weight is as far off as its last bit
    last_bit = torch.finfo(torch.float32).eps * float(place.steps[0].lse[0, head].abs().max())
    assert_right(found, head, s.softmax(1), max(BAR, last_bit))


def test_empty_tiles_are_not_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    found, *_ = recorded(2, 2, "window", "none")
    place, blocks, real = found[0], [], Place.block

    def counted(self: Place, rows: slice, columns: slice, *rest: Any, **more: Any) -> Any:
        blocks.append((rows.start // SIZE, columns.start // SIZE))
        return real(self, rows, columns, *rest, **more)

    monkeypatch.setattr(Place, "block", counted)
    tiles = list(iterate_tiles(place, SIZE))
    n = T // SIZE
    assert blocks == [(i, j) for i in range(n) for j in range(n) if i - 1 <= j <= i]
    assert len(tiles) == len(blocks)
    assert tiles[0].weights.shape == (2, SIZE, SIZE)


def test_ragged_tiles_ranges_of_rows_and_columns_out_of_order() -> None:
    """Decode steps out of a ring, whose keys are no blocks of columns: the tiles make up the
    pattern all the same.
    """
    module, x, cache = example(VARIANTS["sliding_window"]), tokens(23), Ring(6)
    with torch.no_grad(), Recorder() as recorder:
        for start, stop in [(0, 9), *((i, i + 1) for i in range(9, 23))]:
            module(x[:, start:stop], cache=cache)
    found = recorder.recording()
    for size in (1, 2, 5, (3, 7), 64):
        for batch in (0, 1):
            whole = torch.zeros(4, 23, 23, dtype=torch.float64)
            for tile in iterate_tiles(found[0], size, batch=batch):
                whole[:, tile.rows, tile.columns] = tile.weights
            for h in range(4):
                assert float((whole[h] - found.weights(0, h, batch=batch)).abs().max()) <= 1e-14
    some = list(iterate_tiles(found[0], 4, rows=slice(5, 12)))
    assert {tile.rows.start for tile in some} == {5, 9}
    assert max(tile.rows.stop for tile in some) == 12


@pytest.mark.parametrize(
    "call, message",
    [
        (lambda p: next(iterate_tiles(p, 0)), "size is 0; a tile has at least 1 row and 1 column"),
        (lambda p: next(iterate_tiles(p, (4, -1))), "size is (4, -1); a tile has at least 1 row"),
        (lambda p: next(iterate_tiles(p, batch=1)), "batch is 1;  has batch rows 0 to 0"),
        (lambda p: pool_pattern(p, (0, 4)), "size is (0, 4); a block has at least 1 row"),
        (lambda p: pool_pattern(p, 2).coarser(0), "times is 0; it must be at least 1"),
    ],
)
def test_what_makes_no_tiles_is_refused(call: Any, message: str) -> None:
    with pytest.raises(ArgumentError) as caught:
        call(recorded_call(torch.randn(1, 1, 4, 4))[0])
    assert message in str(caught.value)


def test_negative_control_the_bar_is_above_rounding_and_below_a_mistake() -> None:
    found, q, k, _ = recorded(2, 2, "causal", "none")
    right = dense(q, k, "window", "none", 1, 1)
    with pytest.raises(AssertionError):
        assert_right(found, 1, right)
