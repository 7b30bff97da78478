"""Blocks of an encoder and of a decoder whose attention tells distances by a relative bias and scales no scores, as in T5."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, cast

from torch import nn

from regard.biases import T5Relative
from regard.masks import Causal
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn import Attention, Block, CrossAttention, DecoderBlock, PreNorm
from regard.nn.project import Separate
from regard.nn.variants.parts import join, separate


class Sizes(NamedTuple):
    """Of an attention: the model dim M, the heads H, and the size of one, which need not be M / H."""

    dim: int
    heads: int
    head_dim: int

    def parts(self) -> tuple[Separate, nn.Linear]:
        """Queries, keys and values, and the output, none with a bias."""
        return separate(self.dim, self.heads, self.heads, self.head_dim), join(*self)


def stack_bias(sizes: Sizes, buckets: int, max_distance: int, *, bidirectional: bool) -> T5Relative:
    """The bias of a stack, whose layers share its table: normal with standard deviation M^-0.5.

    Raises:
        ArgumentError: as `T5Relative`.

    >>> stack_bias(Sizes(8, 2, 4), 32, 128, bidirectional=True)
    t5_relative(32 buckets, bidirectional)
    """
    table = nn.Embedding(buckets, sizes.heads).weight
    nn.init.normal_(table, std=sizes.dim**-0.5)
    return T5Relative(table, bidirectional=bidirectional, max_distance=max_distance)


def reader(
    sizes: Sizes, bias: T5Relative, feed_forward: nn.Module, norm: Callable[[], nn.Module]
) -> Block:
    """A pre-norm block of the encoder.

    >>> bias = stack_bias(Sizes(8, 2, 4), 32, 128, bidirectional=True)
    >>> reader(Sizes(8, 2, 4), bias, nn.Linear(8, 8), lambda: nn.LayerNorm(8)).attention.scale
    1.0

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1.
    """
    own = Attention(*sizes.parts(), scale=1.0, bias=bias)
    return Block(own, feed_forward, PreNorm(norm()), PreNorm(norm()))


def writer(
    sizes: Sizes, bias: T5Relative, feed_forward: nn.Module, norm: Callable[[], nn.Module]
) -> DecoderBlock:
    """A pre-norm block of the decoder; its attention to the encoder has no bias.

    >>> bias = stack_bias(Sizes(8, 2, 4), 32, 128, bidirectional=False)
    >>> writer(Sizes(8, 2, 4), bias, nn.Linear(8, 8), lambda: nn.LayerNorm(8)).attention.mask
    Causal()

    Source: Raffel et al. 2020 (arXiv 1910.10683), section 2.1.
    """
    own = Attention(*sizes.parts(), mask=Causal(), scale=1.0, bias=bias)
    cross = CrossAttention(*sizes.parts(), scale=1.0)
    return DecoderBlock(own, cross, feed_forward, *(PreNorm(norm()) for _ in range(3)))


def draw(model: EncoderDecoder, head_dim: int) -> None:
    """Fresh weights, in place, as T5's released code draws them: normal with standard deviation 1/sqrt(fan-in).

    Queries have 1/sqrt(fan-in D), in place of a scale on the scores; embedding and head have 1.

    >>> from regard.models.encoder_decoder import transformer
    >>> model = transformer(7, 64, 4, 1)
    >>> draw(model, 16)
    >>> 0.02 < model.layers[0].attention.project.q.linear.weight.std().item() < 0.05
    True
    """
    for name, part in model.named_modules():
        if isinstance(part, nn.Linear):
            size = part.in_features * (head_dim if name.endswith("project.q.linear") else 1)
            nn.init.normal_(part.weight, std=size**-0.5)
    for part in (model.head, model.embed.embedding):
        nn.init.normal_(cast("nn.Linear", part).weight)
