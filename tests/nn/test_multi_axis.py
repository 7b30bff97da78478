"""Rotary positions with several axes: the numbers of the models, equality with one axis for text,
coordinates that decoding carries, and parity with transformers.
"""

from __future__ import annotations

import math
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from regard.caches import Cache, Growing, Paged, Quantized, Ring
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn import HeadProjection, MultiAxisAttention, MultiAxisProjection
from regard.nn.variants import gqa, mrope, rope_2d
from regard.nn.variants.projections import separate_qkv
from regard.positions import MultiAxisRotary, Rotary, multi_axis_positions, next_text_positions
from regard.span import Span
from tests.nn.catalogue import DIM, randomize, tokens
from tests.oracles import heads as oracle

TEXT_AND_IMAGES = [2, (1, 2, 3), 1, (2, 2, 2), 2]
"""19 tokens: text, an image, text, a video of 2 frames, text."""


def layer(**options: Any) -> MultiAxisAttention:
    made = randomize(mrope(DIM, 4, groups=2, **options).double(), 0)
    return cast("MultiAxisAttention", made.eval())


def run(*args: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        out: Tensor = args[0](*args[1:], **options)
    return out


def test_the_axis_of_each_frequency_in_the_models() -> None:
    chunks = MultiAxisRotary(128, sections=(16, 24, 24)).axes
    assert chunks == (0,) * 16 + (1,) * 24 + (2,) * 24
    turns = MultiAxisRotary(128, sections=(24, 20, 20), order="interleaved").axes
    assert turns == (0, 1, 2) * 20 + (0,) * 4
    assert mrope(512, 4, groups=2).project.rotary.axes == chunks
    assert mrope(512, 4, groups=2, order="interleaved").project.rotary.axes == turns


@pytest.mark.parametrize(
    "rotary",
    [
        MultiAxisRotary(16, sections=(4, 2, 2)),
        MultiAxisRotary(16, sections=(4, 2, 2), order="interleaved"),
        MultiAxisRotary(16, sections=(3, 5), own_frequencies=True),
    ],
    ids=str,
)
def test_a_rotation_by_loops(rotary: MultiAxisRotary) -> None:
    make = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 5, 16, generator=make, dtype=torch.float64)
    axes = len(rotary.sections)
    positions = torch.randint(0, 50, (1 + axes, 2, 5), generator=make)
    found = rotary(x, positions)
    for b in range(2):
        for i in range(5):
            angles = []
            for pair, axis in enumerate(rotary.axes):
                if rotary.own_frequencies:
                    place, n = pair - sum(rotary.sections[:axis]), rotary.sections[axis]
                    frequency = 10000.0 ** (-place / n)
                else:
                    frequency = 10000.0 ** (-2 * pair / 16)
                angles.append(int(positions[1 + axis, b, i]) * frequency)
            row = oracle.rotated(x[b, 1, i].tolist(), 1.0, angles)
            assert found[b, 1, i].tolist() == pytest.approx(row, abs=1e-12)
    assert found.shape == x.shape


def test_equal_axes_are_one() -> None:
    rotary, plain = MultiAxisRotary(16, sections=(4, 2, 2)), Rotary(16)
    x, p = torch.randn(2, 3, 5, 16).double(), torch.tensor([[0, 1, 2, 3, 9], [4, 5, 6, 7, 8]])
    assert torch.equal(rotary(x, p), plain(x, p))
    assert torch.allclose(rotary(x, p.expand(4, -1, -1)), plain(x, p), atol=1e-14)
    assert torch.equal(rotary(x, Span(3, 5)), plain(x, Span(3, 5)))
    other = p.expand(4, -1, -1).clone()
    other[2] += 1
    assert not torch.allclose(rotary(x, other), plain(x, p), atol=1e-3)
    text = randomize(gqa(DIM, 4, groups=2).double(), 0)
    assert torch.equal(run(layer(), tokens(9)), run(text, tokens(9)))


def test_positions_of_a_text_with_images() -> None:
    found = multi_axis_positions([TEXT_AND_IMAGES, [3]])
    assert found.shape == (4, 2, 19)
    order, t, h, w = found[:, 0].tolist()
    assert order == list(range(19))
    assert t == [0, 1, *[2] * 6, 5, *[6] * 4, *[7] * 4, 8, 9]
    assert h == [0, 1, 2, 2, 2, 3, 3, 3, 5, 6, 6, 7, 7, 6, 6, 7, 7, 8, 9]
    assert w == [0, 1, 2, 3, 4, 2, 3, 4, 5, 6, 7, 6, 7, 6, 7, 6, 7, 8, 9]
    assert found[:, 1].tolist() == [[-1] * 16 + [0, 1, 2]] * 4
    right = multi_axis_positions([[3], [1]], padding="right")
    assert right[:, 1].tolist() == [[0, -1, -1]] * 4
    assert next_text_positions(found, 2)[:, 0].tolist() == [[19, 20], *[[10, 11]] * 3]
    assert next_text_positions(found, 2)[:, 1].tolist() == [[3, 4]] * 4
    assert next_text_positions(found[:, :, :0], 2)[:, 0].tolist() == [[0, 1]] * 4


CACHES: dict[str, Any] = {
    "own": lambda made: made.new_cache(),
    "growing": lambda made: Growing(),
    "paged": lambda made: Paged(page_size=3, pages=20),
    "ring": lambda made: Ring(30),
    "quantized": lambda made: Quantized(8, residual=30, axes=("token",) * 3),
}


@pytest.mark.parametrize("kind", CACHES)
@pytest.mark.parametrize("order", ["chunks", "interleaved"])
def test_decoding_carries_the_coordinate(kind: str, order: str) -> None:
    """An error of released code: text after an image continues from the number of tokens."""
    made, x = layer(order=order), tokens(24)
    rows = [TEXT_AND_IMAGES, [1, (1, 4, 4)]]
    prompt = multi_axis_positions(rows)
    rest = next_text_positions(prompt, 5)
    whole = run(made, x, torch.cat([prompt, rest], 2))
    for sizes in ([19], [2, 6, 11], [8, 11]):
        cache: Cache = CACHES[kind](made)
        out = []
        for part, p in zip(x[:, :19].split(sizes, 1), prompt.split(sizes, 2), strict=True):
            out.append(run(made, part, p, cache))
        for sizes_of_text in (1, 3, 1):
            done = sum(o.shape[1] for o in out)
            out.append(run(made, x[:, done : done + sizes_of_text], None, cache))
        assert float((torch.cat(out, 1) - whole)[0].abs().max()) < 1e-10
        assert float((torch.cat(out, 1) - whole)[1, 2:].abs().max()) < 1e-10
    # negative control: coordinates that continue the number of tokens are another function
    counted = torch.arange(19, 24).expand(4, 2, -1)
    wrong = run(made, x, torch.cat([prompt, counted], 2))
    assert float((wrong - whole)[:, 19:].abs().max()) > 1e-3


def test_a_fork_and_selected_rows_carry_it_too() -> None:
    made, x = layer(), tokens(22)
    prompt = multi_axis_positions([TEXT_AND_IMAGES, [19]])
    cache = made.new_cache()
    run(made, x[:, :19], prompt, cache)
    fork = cache.fork()
    fork.reorder(torch.tensor([1, 0]))
    whole = run(made, x, torch.cat([prompt, next_text_positions(prompt, 3)], 2))
    assert float((run(made, x[:, 19:], None, cache) - whole[:, 19:]).abs().max()) < 1e-10
    found = run(made, x[:, 19:].flip(0), None, fork)
    assert float((found.flip(0) - whole[:, 19:]).abs().max()) < 1e-10


def test_2d_positions() -> None:
    made = randomize(rope_2d(DIM, 4, groups=2).double(), 0)
    x = tokens(6)
    p = multi_axis_positions([[(1, 2, 3)]])[[0, 2, 3]]
    out = run(made, x, p)
    moved = p.clone()
    moved[1] += 7
    moved[2] += 4
    assert torch.allclose(run(made, x, moved), out, atol=1e-10), "only differences matter"
    swapped = run(made, x, p[[0, 2, 1]])
    assert not torch.allclose(swapped, out, atol=1e-3)
    rotary = made.project.rotary
    assert rotary.inv_freq.tolist() == [1.0, 0.01, 1.0, 0.01]


def test_parity_with_qwen() -> None:
    """The tables of transformers, with the same coordinates."""
    two = pytest.importorskip("transformers.models.qwen2_vl.modeling_qwen2_vl")
    three = pytest.importorskip("transformers.models.qwen3_vl.modeling_qwen3_vl")
    positions = multi_axis_positions([TEXT_AND_IMAGES])
    make = torch.Generator().manual_seed(0)
    q = torch.randn(1, 2, 19, 128, generator=make)
    frequencies = 10000.0 ** (-torch.arange(0, 128, 2).double() / 128)
    angles = positions[1:, :, :, None].double() * frequencies
    found = []
    for code, name, section in (
        (two, "Qwen2VLRotaryEmbedding", (16, 24, 24)),
        (three, "Qwen3VLTextRotaryEmbedding", (24, 20, 20)),
    ):
        sizes = SimpleNamespace(mrope_section=section)
        recompose = getattr(code, name).recomposition_frequencies
        cos, sin = (recompose(sizes, y.clone().float()) for y in (angles.cos(), angles.sin()))
        found.append(code.apply_rotary_pos_emb(q, q, cos, sin)[0])
    mine = MultiAxisRotary(128, sections=(16, 24, 24))(q, positions)
    assert float((found[0] - mine).abs().max()) < 1e-5
    mine = MultiAxisRotary(128, sections=(24, 20, 20), order="interleaved")(q, positions)
    assert float((found[1] - mine).abs().max()) < 1e-5
    wrong = MultiAxisRotary(128, sections=(24, 20, 20))(q, positions)
    assert float((found[1] - wrong).abs().max()) > 1e-2


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: MultiAxisRotary(16, sections=(4, 2)), r"sections are \(4, 2\); they must be at"),
        (lambda: MultiAxisRotary(8, sections=(4, 0)), "they must be at least 1 and add up to 4"),
        (
            lambda: MultiAxisRotary(8, sections=(2, 2), order=cast("Any", "mixed")),
            "order is 'mixed'; it must be chunks or interleaved",
        ),
        (
            lambda: MultiAxisRotary(8, sections=(2, 2), order="interleaved", own_frequencies=True),
            "own_frequencies needs the order chunks",
        ),
        (lambda: MultiAxisRotary(8, sections=(1, 3), order="interleaved"), "has room for at most"),
        (lambda: multi_axis_positions([]), "got no rows; give the parts of at least one"),
        (lambda: multi_axis_positions([[-1]]), "a part of a row is -1; its numbers must not be"),
        (lambda: multi_axis_positions([[(0, 1, 1)]]), "its numbers must not be negative or 0"),
        (lambda: multi_axis_positions([[1]], padding=cast("Any", "top")), "padding is 'top'; it"),
        (lambda: next_text_positions(torch.zeros(2, 3)), r"they must be \[1 \+ axes, batch"),
        (
            lambda: MultiAxisRotary(8, sections=(2, 2))(
                torch.zeros(1, 1, 3, 8), torch.zeros(4, 1, 3)
            ),
            r"positions are \(4, 1, 3\); they must be \[batch, heads, length, 8\] and \[3, batch",
        ),
        (
            lambda: MultiAxisRotary(8, sections=(2, 2))(
                torch.zeros(2, 1, 3, 8), torch.zeros(3, 3, 3)
            ),
            r"for x \(2, 1, 3, 8\) they must be \[3, 2 or 1, 3\]",
        ),
        (
            lambda: MultiAxisProjection(*(HeadProjection(8, 2, 4, Rotary(4)) for _ in range(3))),
            "both must be the same MultiAxisRotary object",
        ),
    ],
)
def test_what_is_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        make()


def test_wrong_types_are_refused() -> None:
    with pytest.raises(ArgumentTypeError, match="a part of a row is 'x'; it must be a number of"):
        multi_axis_positions([cast("Any", ["x"])])
    with pytest.raises(ArgumentTypeError, match="project is SeparateQKV; it must be a"):
        MultiAxisAttention(cast("Any", separate_qkv(8, 4, 2, 2)), torch.nn.Identity())
    assert math.isfinite(layer().describe(9).cached_values)
