"""Every kind of cache under a whole model: what it gives equals one pass, what it holds is bounded,
what it refuses.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.caches import make_full_cache
from regard.masks import Causal, Sinks, Window
from regard.models import Model
from regard.models.decoder import Decoder
from regard.models.generation import CacheConfig, DecodeSession
from regard.models.generation.decode_session import pad_left
from regard.nn import SinusoidalPositions, StreamingAttention
from regard.nn.variants import build
from regard.positions import DynamicNTK, LongRoPE
from tests.models import small
from tests.models.generation.stacks import G, H, M, exact, following, kinds, read_in_pieces, stack
from tests.rules import assert_close_rule

PIECES = [14, 4, 1, 1, 9, *[1] * 7]
LENGTH = sum(PIECES)
ENDS = torch.tensor(PIECES).cumsum(0) - 1
KEEP = [
    CacheConfig(),
    CacheConfig("fixed", LENGTH),
    CacheConfig("paged", LENGTH),
    CacheConfig("quantized", LENGTH),
]


@pytest.fixture(scope="module")
def model() -> Model:
    return small.model()


def assert_equal(found: Tensor, right: Decoder, ids: Tensor, ends: Tensor = ENDS) -> None:
    assert_close_rule(found, lambda: right(ids)[:, ends], exact(right, ids)[:, ends])


@pytest.mark.parametrize("room", KEEP, ids=str)
def test_a_cache_that_keeps_all_equals_one_pass(model: Model, room: CacheConfig) -> None:
    """Quantized, too: fewer than its 128 recent tokens are held as they came."""
    ids = torch.randint(0, 300, (2, LENGTH))
    context = DecodeSession(model.decoder, room, rows=2)
    assert_equal(read_in_pieces(context, ids, PIECES), model.decoder, ids)
    assert kinds(context.caches) == [room.cache.capitalize()] * 2


@pytest.mark.parametrize("chunk", [None, 1, 7, 8, 999])
def test_chunks_of_a_prompt_change_nothing(model: Model, chunk: int | None) -> None:
    ids = torch.randint(0, 300, (2, 29))
    context = DecodeSession(model.decoder)
    found = context.append(ids, chunk=chunk)[:, None]
    assert_equal(found, model.decoder, ids, torch.tensor([28]))
    assert {len(cache) for cache in context.caches} == {29}


def by_hand(decoder: Decoder, change: object) -> Decoder:
    """A deep copy, in which every layer's attention is changed."""
    twin = copy.deepcopy(decoder)
    for layer in twin.layers:
        layer.attention = change(layer.attention)  # type: ignore[operator]
    return twin


def windowed(size: int, sinks: int = 0) -> object:
    def change(attention: nn.Module) -> nn.Module:
        attention.mask = Causal() & (Window(size) | Sinks(sinks) if sinks else Window(size))
        return attention

    return change


@pytest.mark.parametrize("pieces", [PIECES, [LENGTH], [1] * LENGTH], ids=["ragged", "one", "steps"])
def test_a_ring_is_a_model_with_a_window(model: Model, pieces: list[int]) -> None:
    ids, ends = torch.randint(0, 300, (2, LENGTH)), torch.tensor(pieces).cumsum(0) - 1
    context = DecodeSession(model.decoder, CacheConfig("ring", 10))
    found = read_in_pieces(context, ids, pieces)
    assert_equal(found, by_hand(model.decoder, windowed(10)), ids, ends)
    assert kinds(context.caches) == ["Ring"] * 2
    with pytest.raises(AssertionError):  # negative control: a window of another size
        assert_equal(found, by_hand(model.decoder, windowed(11)), ids, ends)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("pieces", [PIECES, [LENGTH], [1] * LENGTH], ids=["ragged", "one", "steps"])
def test_streaming_keeps_distances_inside_the_cache(model: Model, pieces: list[int]) -> None:
    def change(x: nn.Module) -> nn.Module:
        return StreamingAttention(x.project, x.output, sinks=4, recent=8)

    ids, ends = torch.randint(0, 300, (2, LENGTH)), torch.tensor(pieces).cumsum(0) - 1
    context = DecodeSession(model.decoder, CacheConfig("streaming", 12))
    found = read_in_pieces(context, ids, pieces)
    assert_equal(found, by_hand(model.decoder, change), ids, ends)
    assert kinds(context.caches) == ["Streaming"] * 2
    with pytest.raises(AssertionError):  # negative control: true distances
        assert_equal(found, by_hand(model.decoder, windowed(8, 4)), ids, ends)


def test_streaming_without_rotary_heads_stands_at_true_positions() -> None:
    decoder = stack(build("causal", M, H), build("alibi", M, H), positional=SinusoidalPositions(M))
    ids = torch.randint(0, 300, (2, LENGTH))
    found = read_in_pieces(DecodeSession(decoder, CacheConfig("streaming", 12)), ids, PIECES)
    assert_equal(found, by_hand(decoder, windowed(8, 4)), ids)


@pytest.mark.parametrize("room", [CacheConfig("ring", 6), CacheConfig("streaming", 6)], ids=str)
def test_what_forgets_is_bounded_and_leaves_the_model_alone(
    model: Model, room: CacheConfig
) -> None:
    masks = [layer.attention.mask for layer in model.decoder.layers]
    context = DecodeSession(model.decoder, room)
    context.append(torch.randint(0, 300, (1, 40)))
    size = context.bytes
    assert size == 2 * 6 * 2 * (10 + 10) * 4
    for _ in range(20):
        context.append(torch.randint(0, 300, (1, 1)))
    assert context.bytes == size
    assert [layer.attention.mask for layer in model.decoder.layers] == masks
    twin = context._decoder
    pairs = zip(twin.parameters(), model.decoder.parameters(), strict=True)
    assert all(a is b for a, b in pairs), "no weight is copied"
    assert twin.layers[0].attention is not model.decoder.layers[0].attention


def test_eight_bits_are_smaller_and_near(model: Model) -> None:
    ids = torch.randint(0, 300, (1, 400))
    right = model(ids)[:, -1]
    exactly, coded = (
        DecodeSession(model.decoder),
        DecodeSession(model.decoder, CacheConfig("quantized")),
    )
    exactly.append(ids[:, :-1], chunk=64)
    coded.append(ids[:, :-1], chunk=64)
    a, b = exactly.append(ids[:, -1:]), coded.append(ids[:, -1:])
    assert float((a - right).abs().max()) < 1e-5 * float(right.abs().max())
    error = float((b - right).abs().max()) / float(right.abs().max())
    assert 1e-5 < error < 0.1
    assert coded.bytes < 0.7 * exactly.bytes


def mixed() -> Decoder:
    """A full layer, one with a window of its own, a recurrence, latents."""
    return stack(
        build("gqa", M, H, groups=G),
        build("sliding_window", M, H, groups=G, window=6),
        build("gated_delta_net", M, H),
        build("mla", M, H, kv_rank=12, nope_dim=6, rope_dim=4, value_dim=6),
    )


@pytest.mark.full(keep=3)
@pytest.mark.parametrize(
    "room, wanted",
    [
        (CacheConfig(), ["Growing", "Ring", "State", "Growing"]),
        (CacheConfig("fixed", LENGTH), ["Fixed", "Ring", "State", "Fixed"]),
        (CacheConfig("paged", LENGTH), ["Paged", "Ring", "State", "Paged"]),
        (CacheConfig("quantized", LENGTH), ["Quantized", "Ring", "State", "Quantized"]),
        (CacheConfig("ring", LENGTH), ["Ring", "Ring", "State", "Ring"]),
        (CacheConfig("streaming", LENGTH), ["Streaming", "Ring", "State", "Streaming"]),
    ],
    ids=str,
)
def test_layers_with_a_memory_of_their_own_keep_it(room: CacheConfig, wanted: list[str]) -> None:
    decoder, ids = mixed(), torch.randint(0, 300, (2, LENGTH))
    context = DecodeSession(decoder, room, rows=2)
    found = read_in_pieces(context, ids, PIECES)
    assert kinds(context.caches) == wanted
    assert_equal(found, decoder, ids)


SCALINGS = [DynamicNTK(2.0, 12), LongRoPE((1.0, 1.1, 1.3, 1.7), (2.0, 3.0, 5.0, 9.0), 12, 4.0)]


@pytest.mark.parametrize("scaling", SCALINGS, ids=["dynamic", "longrope"])
def test_frequencies_that_follow_the_length_equal_one_pass_at_each(scaling: object) -> None:
    decoder, ids = following(scaling), torch.randint(0, 300, (2, 22))  # type: ignore[arg-type]
    context = DecodeSession(decoder)
    logits, n = context.append(ids[:, :9], chunk=4), 9
    assert_equal(logits[:, None], decoder, ids[:, :n], torch.tensor([n - 1]))
    for n in range(10, 23):
        logits = context.append(ids[:, n - 1 : n])
        assert_equal(logits[:, None], decoder, ids[:, :n], torch.tensor([n - 1]))
    assert context._prefix is not None
    assert context._prefix.reruns == (1 if isinstance(scaling, LongRoPE) else 10)
    context.select(torch.tensor([1, 1, 0]))
    more = torch.randint(0, 300, (3, 1))
    whole = torch.cat([ids[[1, 1, 0]], more], 1)
    assert_equal(context.append(more)[:, None], decoder, whole, torch.tensor([22]))


def test_rows_of_different_length_and_rows_that_leave() -> None:
    rows = [list(range(1, 15)), [5], [7, 8, 9, 10, 11]]
    ids, positions = pad_left(rows)
    assert isinstance(positions, Tensor)
    for decoder in (mixed(), following(SCALINGS[0])):  # type: ignore[arg-type]
        context = DecodeSession(decoder)
        logits = context.append(ids, positions, chunk=4)
        texts = [list(row) for row in rows]
        for step, kept in enumerate(([0, 1, 2], [0, 1, 2], [2, 0], [0])):
            if len(kept) < len(texts):
                texts = [texts[i] for i in kept]
                context.select(torch.tensor(kept))
                logits = logits[torch.tensor(kept)]
            for i, text in enumerate(texts):
                alone = torch.tensor([text])
                assert_equal(logits[i][None, None], decoder, alone, torch.tensor([-1]))
            for text in texts:
                text.append(30 + step)
            logits = context.append(torch.tensor([[30 + step]] * len(texts)))


def test_a_fork_is_a_context_of_its_own(model: Model) -> None:
    ids = torch.randint(0, 300, (1, 21))
    for room in (
        CacheConfig(),
        CacheConfig("fixed", 40),
        CacheConfig("paged", 40),
        CacheConfig("ring", 40),
        CacheConfig("quantized"),
    ):
        context = DecodeSession(model.decoder, room)
        context.append(ids)
        size, fork = context.bytes, context.fork(rows=3)
        more = torch.randint(0, 300, (3, 19))
        for part in more.split([7, 1, 11], 1):
            logits = fork.append(part)
        assert_equal(
            logits[:, None],
            model.decoder,
            torch.cat([ids.expand(3, -1), more], 1),
            torch.tensor([-1]),
        )
        assert context.bytes == size
        again = context.append(more[:1])
        assert_close_rule(
            again, logits[:1], exact(model.decoder, torch.cat([ids, more[:1]], 1))[:, -1]
        )


def test_rows_of_a_paged_fork_share_the_pages_of_the_prompt(model: Model) -> None:
    context = DecodeSession(model.decoder, CacheConfig("paged", 64))
    context.append(torch.randint(0, 300, (1, 48)))
    one, many = context.bytes, context.fork(rows=5)
    assert many.bytes == one
    many.append(torch.randint(0, 300, (5, 1)))
    assert many.bytes == one // 3 * (3 + 5)


def test_rooms_that_a_model_cannot_have() -> None:
    with pytest.raises(regard.ArgumentError, match="cache is 'fixed', but this model"):
        DecodeSession(following(SCALINGS[0]), CacheConfig("fixed", 30))  # type: ignore[arg-type]
    far = stack(build("longformer", M, H, window=4, is_causal=True))
    with pytest.raises(regard.ArgumentError, match="layer 0 is Longformer, which keeps every"):
        DecodeSession(far, CacheConfig("ring", 30))
    with pytest.raises(regard.ArgumentError, match="Longformer stores more than keys and values"):
        DecodeSession(far, CacheConfig("quantized", 30))


def test_errors_of_rooms() -> None:
    cases = [
        (("rings", 8), "cache is 'rings'; it must be growing, fixed, quantized, fp8, paged"),
        (("ring", None), "cache='ring' needs max_context, the number of tokens that it keeps"),
        (("growing", 0), "max_context is 0; it must be at least 1 for cache='growing'"),
        (("streaming", 4), "max_context is 4; it must be at least 5 for cache='streaming'"),
    ]
    for given, message in cases:
        with pytest.raises(regard.ArgumentError) as error:
            CacheConfig(*given)
        assert str(error.value).startswith(message)
    with pytest.raises(regard.ArgumentError, match="has 3 tokens and max_tokens is 6: 9 are more"):
        CacheConfig("fixed", 8).check(3, 6)
    with pytest.raises(regard.ArgumentError, match="are more than max_context 8; shorten"):
        CacheConfig("growing", 8).check(9, 1)
    CacheConfig("fixed", 8).check(3, 5)
    CacheConfig("ring", 8).check(100, 100)
    with pytest.raises(regard.ArgumentError, match='unknown cache "ring"; did you mean'):
        make_full_cache("ring")
    with pytest.raises(regard.ArgumentError, match="a fixed cache needs slots, the largest"):
        make_full_cache("fixed")
