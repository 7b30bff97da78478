"""What each mask accepts, refuses, prints, and holds about batch rows, heads and slots."""

from __future__ import annotations

import copy
import pickle
import re
from collections.abc import Callable

import pytest
import torch

from regard import masks
from regard.errors import ArgumentError, ArgumentTypeError
from regard.masks import (
    And,
    BigBird,
    BlockCausal,
    BlockDiffusion,
    Blocks,
    Causal,
    Chunk,
    Dense,
    Dilated,
    Document,
    EarlierChunks,
    Fn,
    Full,
    Global,
    Heads,
    Mask,
    Neighborhood,
    Not,
    Or,
    Padding,
    Prefix,
    Sinks,
    Strided,
    Window,
)
from regard.span import Span
from tests.masks.brute import CASES

BOOL = torch.ones(2, 3, dtype=torch.bool)

REFUSED: list[tuple[Callable[[], object], type, str]] = [
    (lambda: Window(0), ArgumentError, "Window size is 0; it must be 1 or more: a query always"),
    (lambda: Window(2.0), ArgumentTypeError, "Window size is float 2.0; it must be an int, 1 or"),
    (lambda: Window(True), ArgumentTypeError, "Window size is bool True; it must be an int, 1 or"),
    (lambda: Window(2, ahead=-1), ArgumentError, "Window ahead is -1; it must be 0 or more: 0 is"),
    (lambda: Chunk(0), ArgumentError, "Chunk size is 0; it must be 1 or more"),
    (lambda: Dilated(0, 1), ArgumentError, "Dilated size is 0; it must be 1 or more"),
    (lambda: Dilated(1, 0), ArgumentError, "Dilated step is 0; it must be 1 or more: 1 is a plain"),
    (lambda: Dilated(1, 1, ahead=-1), ArgumentError, "Dilated ahead is -1; it must be 0 or more"),
    (lambda: BlockCausal(0), ArgumentError, "BlockCausal size is 0; it must be 1 or more: 1 is"),
    (lambda: BlockDiffusion(0, 4), ArgumentError, "BlockDiffusion size is 0; it must be 1 or more"),
    (lambda: BlockDiffusion(4, 0), ArgumentError, "BlockDiffusion length is 0; it must be 1 or"),
    (lambda: Neighborhood((4, 0), 1), ArgumentError, "Neighborhood shape[1] is 0; it must be 1 or"),
    (lambda: Neighborhood(4.0, 1), ArgumentTypeError, "Neighborhood shape is float 4.0; it must"),
    (lambda: Neighborhood((2, 2, 2, 2), 1), ArgumentError, "Neighborhood shape is (2, 2, 2, 2)"),
    (lambda: Neighborhood((), 1), ArgumentError, "Neighborhood shape is (); it must have 1, 2 or"),
    (lambda: Neighborhood((1 << 31, 1 << 31), 1), ArgumentError, "Neighborhood shape is"),
    (lambda: Neighborhood((4, 4), (3, 3, 3)), ArgumentError, "Neighborhood kernel_size is"),
    (lambda: Neighborhood((4, 4), 3, is_causal=(True,)), ArgumentError, "Neighborhood is_causal"),
    (lambda: Neighborhood(4, 3, is_causal=1), ArgumentTypeError, "Neighborhood is_causal is 1; it"),
    (lambda: Neighborhood((4, 4), 2, stride=(1, 3)), ArgumentError, "Neighborhood stride is 3 in"),
    (lambda: Neighborhood((9, 4), 3, dilation=2), ArgumentError, "Neighborhood kernel_size 3"),
    (lambda: Prefix(-1), ArgumentError, "Prefix length is -1; it must be 0 or more"),
    (lambda: Prefix((2, -1)), ArgumentError, "Prefix length[1] is -1; it must be 0 or more"),
    (lambda: Prefix(()), ArgumentError, "Prefix got no batch rows; give at least one"),
    (lambda: Prefix("3"), ArgumentTypeError, "Prefix length is str '3'; it must be a sequence of"),
    (lambda: Document((3,)), ArgumentError, "Document bounds is (3,); it must be the increasing"),
    (lambda: Document((0, 5, 3)), ArgumentError, "Document bounds is (0, 5, 3); it must be the"),
    (lambda: Document(((0, 2), (0, -1))), ArgumentError, "Document bounds[1] is -1; it must be 0"),
    (lambda: Document.from_lengths([2, -1]), ArgumentError, "Document lengths[1] is -1; it must"),
    (lambda: Padding(()), ArgumentError, "Padding got no batch rows; give at least one"),
    (lambda: Padding((((0, 3), (2, 5)),)), ArgumentError, "Padding runs[0] is ((0, 3), (2, 5));"),
    (lambda: Padding((((0, 3, 4),),)), ArgumentError, "Padding runs[0] is ((0, 3, 4),); it must"),
    (lambda: Padding.right([2, -1]), ArgumentError, "Padding lengths[1] is -1; it must be 0 or"),
    (lambda: Padding.left([2, 5], 4), ArgumentError, "Padding lengths has 5, which exceeds total"),
    (lambda: Padding.left([2], -4), ArgumentError, "Padding total is -4; it must be 0 or more"),
    (lambda: Padding.from_keep(BOOL.long()), ArgumentTypeError, "keep is int64; it must be bool"),
    (lambda: Padding.from_keep(BOOL[0]), ArgumentError, "keep is (3,); it must be [batch, keys]"),
    (lambda: Sinks(-1), ArgumentError, "Sinks n is -1; it must be 0 or more"),
    (lambda: Global((1, -1)), ArgumentError, "Global positions[1] is -1; it must be 0 or more"),
    (lambda: Global(3), ArgumentTypeError, "Global positions is int 3; it must be a sequence of"),
    (lambda: Strided(0), ArgumentError, "Strided stride is 0; it must be 1 or more"),
    (lambda: Strided(4, fixed=0), ArgumentError, "Strided fixed is 0; it must be 1 or more"),
    (lambda: Strided(4, fixed=5), ArgumentError, "Strided stride is 4; it must be 5 or more: a"),
    (lambda: BigBird(0, 4), ArgumentError, "BigBird block size is 0; it must be 1 or more"),
    (lambda: BigBird(4, 0), ArgumentError, "BigBird blocks is 0; it must be 1 or more"),
    (lambda: BigBird(4, 4, window=2), ArgumentError, "BigBird window is 2; it must be odd, so"),
    (lambda: BigBird(4, 4, random=-1), ArgumentError, "BigBird random is -1; it must be 0 or more"),
    (lambda: BigBird(4, 4, seed=-1), ArgumentError, "BigBird seed is -1; it must be 0 or more"),
    (lambda: Blocks(BOOL, 0), ArgumentError, "Blocks size is 0; it must be 1 or more"),
    (lambda: Blocks(BOOL.int(), 2), ArgumentTypeError, "Blocks table is torch.int32; it must be a"),
    (lambda: Blocks([[True]], 2), ArgumentTypeError, "Blocks table is list; it must be a bool"),
    (lambda: Blocks(BOOL[None], 2), ArgumentError, "Blocks table is (1, 2, 3); it must be"),
    (lambda: Heads(()), ArgumentError, "Heads got no masks; give one mask per query head"),
    (lambda: Heads((Causal(), BOOL)), ArgumentTypeError, "Heads masks[1] is Tensor; it takes"),
    (lambda: Dense(BOOL.long()), ArgumentTypeError, "mask is int64; it must be bool, True = may"),
    (lambda: Dense(BOOL.to(torch.uint8)), ArgumentTypeError, "mask is uint8; it must be bool"),
    (lambda: Dense(BOOL.float()), ArgumentTypeError, "mask is float32; it must be bool, True ="),
    (lambda: Dense([[True]]), ArgumentTypeError, "mask is list; it must be a bool tensor"),
    (lambda: Dense(BOOL[None]), ArgumentError, "mask is (1, 2, 3); it must be [queries, keys] or"),
    (lambda: Dense(BOOL[0]), ArgumentError, "mask is (3,); it must be [queries, keys] or"),
    (
        lambda: Dense(BOOL).allows(torch.tensor([0]), torch.tensor([0])),
        ArgumentError,
        "a Dense mask is indexed by the slots of one call, not by positions",
    ),
    (lambda: Fn("causal"), ArgumentTypeError, "Fn rule is str; it must be a function of q and k"),
    (
        lambda: Fn(lambda q, k: q - k, "difference").count(Span(0, 2), Span(0, 2)),
        ArgumentTypeError,
        "Fn difference returned torch.int64; it must return a bool tensor, True = may attend",
    ),
    (
        lambda: Fn(lambda q, k: True).count(Span(0, 2), Span(0, 2)),
        ArgumentTypeError,
        "Fn fn returned bool; it must return a bool tensor, True = may attend",
    ),
    (lambda: And(()), ArgumentError, "And got no masks; give at least one"),
    (lambda: Or((Causal(), 3)), ArgumentTypeError, "Or got int; it takes masks of regard.masks"),
    (lambda: Not(True), ArgumentTypeError, "Not got bool; it takes a mask of regard.masks"),
    (lambda: Causal().tiles(Span(0, 2), Span(0, 2), (0, 4)), ArgumentError, "tile size is (0, 4)"),
    (lambda: Prefix((1, 2, 3)).require(2, 1, 4, 4), ArgumentError, "Prefix holds 3 batch rows"),
    (
        lambda: (Causal() & Document(((0, 1), (0, 2)))).require(3, 1, 4, 4),
        ArgumentError,
        "Document holds 2 batch rows, but the call has batch 3; give one entry per batch row",
    ),
    (
        lambda: (Causal() | Padding.right([1, 2])).require(1, 1, 4, 4),
        ArgumentError,
        "Padding holds 2 batch rows, but the call has batch 1; give one entry per batch row",
    ),
    (
        lambda: (~Heads((Causal(), Full()))).require(1, 3, 4, 4),
        ArgumentError,
        "Heads holds 2 masks, but the call has 3 query heads; give one mask per head",
    ),
    (lambda: Heads((Prefix((1, 2)),)).require(3, 1, 4, 4), ArgumentError, "Prefix holds 2 batch"),
    (
        lambda: Blocks(BOOL[None, None], 2).require(1, 1, 4, 16),
        ArgumentError,
        "Blocks covers 3 blocks of 2 = 6 positions, but there are 16 keys; give 8 blocks",
    ),
    (
        lambda: Blocks(BOOL.expand(1, 2, 2, 3), 2).require(1, 4, 4, 6),
        ArgumentError,
        "Blocks holds 2 heads, but the call has 4; give one table per head, or one for all",
    ),
    (
        lambda: Blocks(BOOL.expand(2, 1, 2, 3), 2).require(3, 4, 4, 6),
        ArgumentError,
        "Blocks holds 2 batch rows, but the call has batch 3; give one entry per batch row",
    ),
    (lambda: BigBird(8, 2).require(1, 1, 4, 17), ArgumentError, "BigBird covers 2 blocks of 8 ="),
    (lambda: BlockDiffusion(4, 8).require(1, 1, 4, 17), ArgumentError, "BlockDiffusion covers two"),
    (
        lambda: (Neighborhood((2, 4), 2) | Causal()).require(1, 1, 4, 9),
        ArgumentError,
        "Neighborhood has a grid of 2 x 4 = 8 positions, but there are 9 keys",
    ),
    (lambda: EarlierChunks(2, 3, 2), ArgumentError, "EarlierChunks first is 3 and last is 2; last"),
    (lambda: EarlierChunks(2, 0), ArgumentError, "EarlierChunks first is 0; it must be 1 or more"),
    (lambda: Dense(BOOL).require(1, 1, 3, 3), ArgumentError, "mask is (2, 3); it must be (3, 3)"),
    (lambda: Dense(BOOL).require(2, 4, 5, 3), ArgumentError, "mask is (2, 3); it must be (5, 3)"),
    (
        lambda: Dense(BOOL.expand(2, 1, 2, 3)).require(3, 1, 2, 3),
        ArgumentError,
        "mask is (2, 1, 2, 3); it must be (2, 3) or [3 or 1, 1 or 1, 2 or 1, 3]",
    ),
]


@pytest.mark.parametrize(
    "make, kind, message", REFUSED, ids=[message[:50] for *_, message in REFUSED]
)
def test_bad_values_are_refused_with_what_is_allowed(
    make: Callable[[], object], kind: type, message: str
) -> None:
    with pytest.raises(kind, match=f"^{re.escape(message)}"):
        make()


def test_what_serves_a_call_is_accepted() -> None:
    for mask in (
        Full(),
        Prefix((1, 2)),
        Prefix((3,)),
        Document((0, 4)),
        Padding.right([4, 4]),
        Heads((Causal(), Full(), Full())),
        Dense(torch.ones(4, 6).bool()),
        Dense(torch.ones(2, 1, 1, 6).bool()),
        Dense(torch.ones(1, 3, 4, 6).bool()),
        Blocks(torch.ones(2, 3, 1, 1).bool(), 6),
        BigBird(2, 3),
        Fn(lambda q, k: k <= q),
    ):
        mask.require(2, 3, 4, 6)
        assert mask.block(Span(2, 4), Span(0, 6)).expand(2, 3, 4, 6).dtype == torch.bool


def test_dense_speaks_of_slots() -> None:
    x = torch.rand(2, 3, 5, 7) < 0.5
    for table in (x, x[:1], x[:, :1], x[:, :, :1], x[0, 0]):
        mask = Dense(table)
        whole = table if table.ndim == 4 else table[None, None]
        for q, k in ((Span(9, 5), Span(0, 7)), (Span(0, 5), torch.arange(7).flip(0)[None])):
            assert mask.block(q, k).equal(whole.expand(-1, -1, 5, 7))
            cut = mask.block(q, k, slice(1, 3), slice(4, None))
            assert cut.equal(whole.expand(-1, -1, 5, 7)[:, :, 1:3, 4:])
            assert mask.visible(q, k).equal(whole.expand(-1, -1, 5, 7).sum(-1))
        holes = torch.tensor([[0, -1, 2, 3, -1, 5, 6]])
        assert not mask.block(Span(0, 5), holes)[..., [1, 4]].any()
        both = (mask & Causal()).block(Span(2, 5), Span(0, 7))
        assert both.equal(whole.expand(-1, -1, 5, 7) & torch.ones(5, 7).tril(2).bool())
        assert (~mask).block(Span(2, 5), Span(0, 7)).equal(~whole.expand(-1, -1, 5, 7))
        cell = whole.expand(-1, -1, 5, 7)[:, :, 2:4, 3:6].flatten(2)
        state = cell.any(-1).to(torch.int8) + cell.all(-1).to(torch.int8)
        assert mask.tiles(Span(2, 5), Span(0, 7), (2, 3))[..., 1, 1].equal(state)
    one = Dense(torch.ones(1, 1, 1, 4, dtype=torch.bool))
    assert one.block(Span(3, 1), Span(0, 4), slice(0, 1)).shape == (1, 1, 1, 4)
    assert one.intervals(torch.tensor([[0]])) is None


def test_dense_as_mask_mod() -> None:
    from torch.nn.attention.flex_attention import create_mask

    x = torch.rand(2, 3, 5, 7) < 0.5
    for table in (x, x[:1], x[:, :1], x[:, :, :1], x[0, 0]):
        mask = (Dense(table) | Sinks(1)) & ~Heads((Dense(~table), Causal(), Full()))
        q, k = Span(2, 5), Span(0, 7)
        found = create_mask(mask.mask_mod(q, k), 2, 3, 5, 7, device="cpu")
        assert found.equal(mask.block(q, k).expand(2, 3, 5, 7))


def test_equal_fields_are_equal_masks() -> None:
    assert Causal() & Window(4) == Causal() & Window(4)
    assert hash(Causal() & Window(4)) == hash(Causal() & Window(4))
    assert Window(4) != Window(5)
    assert Window(4) != Chunk(4)
    assert Causal() != "causal"
    assert Global([3, 1, 3]) == Global((1, 3))
    assert Prefix([1, 2]) == Prefix(torch.tensor([1, 2]))
    assert BigBird(2, 4, seed=1) != BigBird(2, 4, seed=2)
    assert Dense(BOOL) == Dense(BOOL)
    assert Dense(BOOL) != Dense(BOOL.clone())
    assert len({Causal(), Causal(), Full(), ~Causal(), ~Causal()}) == 3


PRINTED: list[tuple[Mask, str]] = [
    (Causal() & Window(4) | Sinks(1), "causal & window(4) | sinks(1)"),
    (Causal() & (Window(4) | Sinks(1)), "causal & (window(4) | sinks(1))"),
    (~Causal() & Full(), "~causal & full"),
    (~(Causal() & Full()), "~(causal & full)"),
    (~~Causal(), "~~causal"),
    (Full() | (Causal() | Sinks(1)), "full | causal | sinks(1)"),
    (Document.from_lengths([[3, 2], [5]]), "document(((0, 3, 5), (0, 5)))"),
    (Heads((Causal(), Window(2) | Full())), "heads((causal, window(2) | full))"),
    (Heads((Causal(),)), "heads((causal,))"),
    (Dilated(2, 3, ahead=1) | BlockCausal(4), "dilated(2, 3, ahead=1) | blockcausal(4)"),
    (Neighborhood([4, 6], (3, 3), dilation=(1, 2)), "neighborhood((4, 6), 3, dilation=(1, 2))"),
    (Dilated(2, 3) & Chunk(4) & Prefix((1, 2)), "dilated(2, 3) & chunk(4) & prefix((1, 2))"),
]


@pytest.mark.parametrize("mask, text", PRINTED, ids=[text for _, text in PRINTED])
def test_prints_what_parse_reads(mask: Mask, text: str) -> None:
    assert str(mask) == text
    assert masks.parse(text) == mask


def test_prints_what_cannot_be_text() -> None:
    assert str(Causal() & Dense(BOOL)) == "causal & dense(2x3)"
    assert repr(Dense(BOOL)) == "Dense(bool[2, 3])"
    assert str(Blocks(BOOL, 4)) == "blocks(2x3, 4)"
    assert str(Fn(lambda q, k: k <= q, "mine")) == "mine"


def test_terms_are_what_and_joins() -> None:
    a, b, c = Causal(), Window(3), Sinks(1)
    assert (a & b & c).terms() == (a, b, c)
    assert (a & (b & c)).terms() == (a, b, c)
    assert (a | b).terms() == (a | b,)
    assert a.terms() == (a,)
    assert ((a | b) | c).masks == (a | (b | c)).masks == (a, b, c)


def test_document_from_lengths_of_zero() -> None:
    mask = Causal() & Document.from_lengths([2, 0, 1])
    assert mask.visible(Span(0, 4), Span(0, 4)).tolist() == [[[1, 2, 1, 0]]]


COMPILED = (
    "documents per row",
    "padding with holes",
    "causal bigbird",
    "blocks per row and head",
    "heads",
)


@pytest.mark.full
@pytest.mark.parametrize("name", COMPILED)
def test_compiles_in_one_graph(name: str) -> None:
    mask = Causal() & (CASES[name].mask | Sinks(1))
    torch._dynamo.reset()  # or the cases count as recompilations of one
    compiled = torch.compile(lambda q, k: mask.block(q, k), fullgraph=True, backend="eager")
    stored = torch.arange(8)[None]
    for q, k in ((stored, stored), (Span(2, 6), Span(0, 8))):
        assert compiled(q, k).equal(mask.block(q, k))


def test_masks_are_copied_and_pickled() -> None:
    for case in CASES.values():
        copied = copy.deepcopy(case.mask)
        assert copied.block(Span(0, 9), Span(0, 9)).equal(case.mask.block(Span(0, 9), Span(0, 9)))
    mask = Causal() & BigBird(2, 5) | Padding.right([3])
    again = pickle.loads(pickle.dumps(mask))
    assert again == mask
    assert again.block(Span(0, 9), Span(0, 9)).equal(mask.block(Span(0, 9), Span(0, 9)))
