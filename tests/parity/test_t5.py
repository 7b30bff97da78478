"""Attention of T5 as transformers computes it: encoder, decoder and cross-attention, against `t5`
and `cross_attention`.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from regard.biases import T5Relative
from regard.nn.variants import cross_attention, t5
from regard.span import Span
from tests.parity import layers
from tests.parity.families.changes import put
from tests.parity.layers import Change, assert_far, assert_near, capture, copy_weights

M, H, D = 24, 3, 10
NAMES = {
    "q.weight": "project.q.linear.weight",
    "k.weight": "project.k.linear.weight",
    "v.weight": "project.v.linear.weight",
    "o.weight": "output.weight",
}
TABLE = {"relative_attention_bias.weight": "bias_tensors.0"}
SIZES = {
    "vocab_size": 8,
    "d_model": M,
    "d_kv": D,
    "d_ff": 16,
    "num_layers": layers.LAYERS,
    "num_heads": H,
}
SMALL = {"relative_attention_num_buckets": 8, "relative_attention_max_distance": 20}
LENGTH, MEMORY = 40, 29
ENCODER, DECODER, CROSS = (
    "encoder.block.0.layer.0.SelfAttention",
    "decoder.block.0.layer.0.SelfAttention",
    "decoder.block.0.layer.1.EncDecAttention",
)


class T5:
    """Their model, and ours for its three kinds of attention."""

    def __init__(self, **change: Any) -> None:
        self.theirs = layers.model("T5", SIZES | SMALL | change)
        config = self.theirs.config
        buckets = {
            "buckets": config.relative_attention_num_buckets,
            "max_distance": config.relative_attention_max_distance,
        }
        self.ours: dict[str, Any] = {}
        for where, both in ((ENCODER, True), (DECODER, False)):
            made = t5(M, H, head_dim=D, bidirectional=both, **buckets)
            self.ours[where] = self.copy(where, made, NAMES | TABLE)
        cross = cross_attention(M, H, head_dim=D)
        cross.scale = 1.0
        self.ours[CROSS] = self.copy(CROSS, cross, NAMES)

    def copy(self, where: str, made: Any, names: dict[str, str]) -> Any:
        return copy_weights(self.theirs.get_submodule(where), made, names)

    def run(self, where: str, text: Tensor, words: Tensor, **call: Any) -> tuple[Tensor, Tensor]:
        return capture(
            self.theirs, where, where, inputs_embeds=text, decoder_inputs_embeds=words, **call
        )

    def memory(self, text: Tensor, words: Tensor, **call: Any) -> Tensor:
        """What the encoder gave, which cross-attention reads."""
        return capture(
            self.theirs,
            "encoder.block.0",
            "encoder",
            inputs_embeds=text,
            decoder_inputs_embeds=words,
            **call,
        )[1]


@pytest.fixture(scope="module")
def small() -> T5:
    return T5()


def texts(B: int = 2) -> tuple[Tensor, Tensor]:
    return torch.randn(B, MEMORY, M), torch.randn(B, LENGTH, M)


def left(lengths: tuple[int, ...], T: int) -> tuple[Tensor, Tensor]:
    """Which slots are real, and their positions."""
    keep = torch.arange(T) >= T - torch.tensor(lengths)[:, None]
    return keep, torch.where(keep, keep.long().cumsum(1) - 1, -1)


@pytest.mark.parametrize("where", [ENCODER, DECODER])
def test_self_attention(small: T5, where: str) -> None:
    """At lengths behind the last bucket."""
    x, y = small.run(where, *texts(), use_cache=False)
    for backend in ("auto", "reference"):
        assert_near(small.ours[where](x, backend=backend), y)
    assert_near(small.ours[where](x, Span(1000, x.shape[1])), y)


def test_buckets_as_released() -> None:
    """32 of them up to 128, and a text of 150: some distances sit on a bound (16, 32 and 64 both
    ways).
    """
    made = T5(relative_attention_num_buckets=32, relative_attention_max_distance=128)
    long = torch.randn(1, 150, M)
    for where in (ENCODER, DECODER):
        x, y = made.run(where, long, long, use_cache=False)
        assert_near(made.ours[where](x), y)


def test_the_second_layer_uses_the_table_of_the_first(small: T5) -> None:
    where = ENCODER.replace("block.0", "block.1")
    made = t5(M, H, head_dim=D, bidirectional=True, buckets=8, max_distance=20)
    state = small.theirs.get_submodule(where).state_dict()
    assert set(state) == set(NAMES)
    table = small.theirs.get_submodule(ENCODER).relative_attention_bias.weight
    made.load_state_dict({NAMES[n]: w for n, w in state.items()} | {"bias_tensors.0": table})
    x, y = small.run(where, *texts(), use_cache=False)
    assert_near(made.requires_grad_(False)(x), y)


def test_cross_attention(small: T5) -> None:
    text, words = texts()
    x, y = small.run(CROSS, text, words, use_cache=False)
    assert_near(small.ours[CROSS](x, memory=small.memory(text, words)), y)


@pytest.mark.parametrize("where", [DECODER, CROSS])
def test_chunks_and_decoding(small: T5, where: str) -> None:
    text, words = texts()
    ours, memory = small.ours[where], small.memory(text, words)
    whole_x, whole = small.run(where, text, words, use_cache=False)
    transformers = layers.transformers
    theirs_cache = transformers.EncoderDecoderCache(
        transformers.DynamicCache(), transformers.DynamicCache()
    )
    cache, both, start = ours.new_cache(), ours.new_cache(), 0
    for n in (5, 19, 1, 1, 11, 1, 1, 1):
        at = slice(start, start + n)
        x, y = small.run(where, text, words[:, at], past_key_values=theirs_cache, use_cache=True)
        given = {"memory": memory} if where == CROSS and not start else {}
        assert_near(ours(x, cache=both, **given), y)
        assert_near(ours(whole_x[:, at], cache=cache, **given), whole[:, at])
        start += n
    assert start == LENGTH


def test_left_padding(small: T5) -> None:
    """On both sides; NaN in our padding reaches nothing."""
    (keep, at), (kept, there) = left((LENGTH, 17, 1), LENGTH), left((9, MEMORY, 1), MEMORY)
    text, words = texts(3)
    call = {
        "attention_mask": kept.long(),
        "decoder_attention_mask": keep.long(),
        "use_cache": False,
    }
    memory = small.memory(text, words, **call).masked_fill(~kept[..., None], math.nan)
    for where, real, positions in ((ENCODER, kept, there), (DECODER, keep, at), (CROSS, keep, at)):
        x, y = small.run(where, text, words, **call)
        x = x.masked_fill(~real[..., None], math.nan)
        given = {"memory": memory, "memory_positions": there} if where == CROSS else {}
        assert_near(small.ours[where](x, positions, **given)[real], y[real])
    ours, half = small.ours[DECODER], LENGTH // 2
    x, y = small.run(DECODER, text, words, **call)
    cache = ours.new_cache()
    ours(x[:, :half], at[:, :half], cache)
    for t in range(half, LENGTH):
        z = ours(x[:, t : t + 1], at[:, t : t + 1], cache)
        assert_near(z[:, 0][keep[:, t]], y[:, t][keep[:, t]])


# Negative controls: what must be told apart.


def table(ours: Any) -> Tensor:
    return ours.bias_tensors[0]


def other_direction(ours: Any) -> None:
    """The encoder's buckets in the decoder, and the other way about; the mask stays."""
    ours.bias = T5Relative(table(ours), bidirectional=not ours.bias.bidirectional, max_distance=20)


def other_distance(ours: Any) -> None:
    ours.bias = T5Relative(table(ours), bidirectional=ours.bias.bidirectional, max_distance=30)


def table_transposed(ours: Any) -> None:
    """Buckets and heads laid out the other way."""
    ours.bias_tensors[0].data = table(ours).flatten().view(H, -1).T.contiguous()


def mirrored(ours: Any) -> None:
    """Query minus key."""
    n = table(ours).shape[0] // 2
    ours.bias_tensors[0].data = table(ours).roll(n, 0)


WRONG: list[tuple[str, Change]] = [
    *(
        (ENCODER, c)
        for c in (other_direction, other_distance, put("", scale=None), table_transposed, mirrored)
    ),
    *(
        (DECODER, c)
        for c in (
            other_direction,
            other_distance,
            put("", scale=None),
            table_transposed,
            put("", bias=None, bias_tensors=nn.ParameterList()),
        )
    ),
]


@pytest.mark.parametrize(
    "where, change", WRONG, ids=lambda x: x[:7] if isinstance(x, str) else x.__name__
)
def test_a_wrong_variant_is_far(small: T5, where: str, change: Change) -> None:
    x, y = small.run(where, *texts(), use_cache=False)
    assert_near(small.ours[where](x), y)
    ours = copy.deepcopy(small.ours[where])
    change(ours)
    assert_far(ours(x), y)


def test_a_wrong_cross_attention_is_far(small: T5) -> None:
    """Scaled, without its last token of memory, over the queries, and with the decoder's relative
    bias.
    """
    text, words = texts()
    x, y = small.run(CROSS, text, words, use_cache=False)
    memory, right = small.memory(text, words), small.ours[CROSS]
    assert_far(right(x, memory=memory[:, :-1]), y)
    assert_far(right(x, memory=x), y)
    for change in ({"scale": None}, {"bias": small.ours[DECODER].bias}):
        wrong = cross_attention(M, H, head_dim=D).requires_grad_(False)
        wrong.load_state_dict(right.state_dict())
        vars(wrong).update({"scale": 1.0} | change)
        assert_far(wrong(x, memory=memory), y)
