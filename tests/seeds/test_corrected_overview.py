"""What the overview of attention (the fourth note) gets wrong, done right.

docs/seeds.md lists each error.
"""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor

import regard
from regard.cost import attention_flops
from regard.errors import ArgumentError
from regard.masks import BigBird, Causal, Full, Global, Mask, Sinks, Strided, Window
from regard.nn.variants import gqa, mha, mqa
from regard.notation import LETTERS
from regard.span import Span
from tests.models.small import model


def draw(*shape: int, scale: float = 1.0) -> Tensor:
    return scale * torch.randn(*shape, dtype=torch.float64)


# --- the arithmetic of GPT-3


def test_attention_is_a_third_of_gpt_3() -> None:
    for M, H, D in (
        (24, 3, 8),
        (24, 4, 16),
        (96, 96, 1),
    ):  # the formula, by modules that were built
        layer = mha(M, H, head_dim=D)
        assert layer.describe().parameters.value == H * 4 * M * D
        assert sum(p.numel() for p in layer.parameters()) == H * 4 * M * D
    M, H, D, V, context, layers = 12288, 96, 128, 50257, 2048, 96
    assert 4 * M * D == 6_291_456
    one_layer = H * 4 * M * D
    assert one_layer == 603_979_776, "604 million, not 5.95 billion"
    attention = layers * one_layer
    assert attention == 57_982_058_496
    # attention and feed-forward with biases, two norms; the embeddings of tokens and positions; the
    # last norm
    block = 4 * M * M + 4 * M + 8 * M * M + 5 * M + 4 * M
    total = layers * block + V * M + context * M + 2 * M
    assert total == 174_604_259_328, "175 billion, not 17.5"
    assert round(100 * attention / 175e9, 1) == 33.1
    assert round(100 * attention / total, 1) == 33.2


def test_what_is_split_into_heads_is_the_width_of_the_model() -> None:
    shape = mha(12288 // 16, 96).project.shape
    assert (shape.H, shape.D) == (96, 128 // 16)
    assert shape.H * shape.D == 12288 // 16
    # 128 is a head already: it cannot be split into 96 once more
    with pytest.raises(ArgumentError, match="dim 128 is not divisible by 96 heads; give head_dim"):
        mha(128, 96)
    assert "head_dim" in LETTERS["D"].synonyms


# --- along which axis the sum is 1


def test_rows_sum_to_1_and_columns_do_not() -> None:
    q, k = draw(1, 2, 7, 8, scale=2), draw(1, 2, 9, 8, scale=2)
    weights = regard.attention_weights(q, k)[0]
    for h in range(2):
        rows = [math.fsum(row) for row in weights[h].tolist()]
        columns = [math.fsum(column) for column in weights[h].T.tolist()]
        assert max(abs(x - 1) for x in rows) < 1e-14
        assert max(abs(x - 1) for x in columns) > 0.3
        # the picture with keys down and queries across has its sums of 1 in the columns
        turned = [math.fsum(column) for column in zip(*weights[h].T.tolist(), strict=True)]
        assert max(abs(x - 1) for x in turned) < 1e-14
    with regard.Trace("scores") as trace:
        regard.attend(q, k, k)
    by_column = torch.softmax(trace["scores"][0], -2)
    assert float((by_column - weights).abs().max()) > 0.3


def test_two_weights_of_a_row_cannot_both_be_near_1() -> None:
    for scale in (0.1, 1, 10, 100):
        weights = regard.attention_weights(draw(1, 4, 64, 8, scale=scale), draw(1, 4, 64, 8))
        first, second = weights.topk(2).values.unbind(-1)
        assert bool((first + second <= 1 + 1e-14).all())
        assert float(second.max()) <= 0.5


# --- where the mask acts, and the own key


def test_the_mask_comes_before_the_softmax_and_leaves_the_own_key() -> None:
    q, k = draw(1, 1, 6, 8), draw(1, 1, 6, 8)
    allowed = torch.ones(6, 6, dtype=torch.bool).tril()
    before = regard.attention_weights(q, k, mask=Causal())[0, 0]
    after = regard.attention_weights(q, k)[0, 0].masked_fill(~allowed, 0)
    assert float((before.sum(-1) - 1).abs().max()) < 1e-14
    assert float(after.sum(-1)[:-1].max()) < 0.99, "a mask behind the softmax leaves less than 1"
    six = Span(0, 6)
    assert Causal().visible(six, six).flatten().tolist() == [1, 2, 3, 4, 5, 6]
    others = Causal() & ~Window(1)
    assert others.visible(six, six).flatten().tolist() == [0, 1, 2, 3, 4, 5]
    assert not regard.attend(q, k, k, mask=others)[0, 0, 0].any(), "the first row would be empty"


# --- what multi-query attention saves


@pytest.mark.parametrize("H", [4, 16])
def test_multi_query_attention_saves_cache_and_not_scores(H: int) -> None:
    many, one = (
        make(256, H, head_dim=32) for make in (lambda *a, **o: gqa(*a, groups=H, **o), mqa)
    )
    a, b = many.describe(4096), one.describe(4096)
    assert a.kv_per_token.value == H * b.kv_per_token.value
    assert a.cached_values == H * b.cached_values
    for layer in (many, one):  # the FLOPs of one more key do not know how many groups there are
        longer = (
            layer.describe(4097).flops_per_token.value - layer.describe(4096).flops_per_token.value
        )
        assert longer == attention_flops(H, 32, 32)
    saved = 2 * 2 * 256 * (H - 1) * 32  # of k and v: what is not projected
    assert a.flops_per_token.value - b.flops_per_token.value == saved
    plans = [
        regard.plan(torch.zeros(1, H, 64, 32), *[torch.zeros(1, G, 64, 32)] * 2) for G in (H, 1)
    ]
    assert plans[0].flops == plans[1].flops == H * 64 * 64 * 2 * 64, "n^2 per head in prefill"


# --- how sparse patterns grow


def pairs(mask: Mask, n: int) -> int:
    return mask.count(Span(0, n), Span(0, n))


def growth(make: object, sizes: tuple[int, ...] = (1024, 2048, 4096)) -> list[float]:
    """The exponents between one length and the next."""
    assert callable(make)
    counts = [pairs(make(n), n) for n in sizes]
    return [
        math.log(b / a) / math.log(n / m)
        for a, b, m, n in zip(counts, counts[1:], sizes, sizes[1:], strict=False)
    ]


@pytest.mark.parametrize(
    ("make", "exponent", "within"),
    [
        (lambda n: Full(), 2.0, 1e-12),
        (lambda n: Causal(), 2.0, 1e-3),
        (lambda n: Window(257, ahead=256) | Global((0, 1, 2, 3)), 1.0, 0.2),
        (lambda n: Causal() & (Window(256) | Sinks(4)), 1.0, 0.15),
        (lambda n: Causal() & Strided(math.isqrt(n)), 1.5, 0.03),
    ],
    ids=["full", "causal", "Longformer", "sinks and window", "Sparse Transformer"],
)
def test_the_exponent_of_a_pattern(make: object, exponent: float, within: float) -> None:
    assert growth(make) == pytest.approx([exponent] * 2, abs=within)


def test_bigbird_is_linear() -> None:
    counts = [pairs(BigBird(16, n // 16, random=2), n) for n in (512, 1024, 2048)]
    assert counts[2] / counts[1] == pytest.approx(2, abs=0.05)
    # per block of 16: 2 global, 3 in the window, 2 random, of 16 keys each
    assert counts[2] / 2048 == pytest.approx((2 + 3 + 2) * 16, rel=0.05 + 2 * 16 * 2048 / counts[2])


# --- parallel in training, one after the other in generation


def test_training_is_one_pass_and_generation_one_pass_per_token() -> None:
    net = model()
    calls: list[int] = []
    hook = net.decoder.layers[0].register_forward_hook(lambda m, x, y: calls.append(x[0].shape[1]))
    net(torch.randint(0, 300, (1, 24)))
    assert calls == [24]
    calls.clear()
    list(net.generate("the key of", max_tokens=5))
    hook.remove()
    prompt = net.encode("the key of").shape[1]
    assert calls == [prompt, 1, 1, 1, 1], "each token waits for the one in front of it"


# --- one wide head or several


@pytest.mark.parametrize("heads", [1, 2, 8, 16])
def test_heads_cost_no_more_and_no_less_than_one_wide_head(heads: int) -> None:
    wide, split = mha(256, 1).describe(1024), mha(256, heads).describe(1024)
    assert split.parameters.value == wide.parameters.value == 4 * 256 * 256
    assert split.flops_per_token.value == wide.flops_per_token.value
    assert split.kv_per_token.value == wide.kv_per_token.value
    n = 1024
    assert attention_flops(heads * n * n, 256 // heads, 256 // heads) == 4 * n * n * 256
    # what differs is the number of distributions
    with regard.Trace("pattern") as trace:
        mha(256, heads)(torch.randn(1, 3, 256))
    assert trace["pattern"].shape[1] == heads
