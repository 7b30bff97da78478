"""One attention layer as numbers: its maps by head in fp64, and the norms in which an error of them counts.

Head h scores a key at distance t - s through the bilinear form that its two maps make, and writes through the product of
its value and output maps. Those two are what a conversion has to keep; the maps themselves have a gauge.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, Heads, PreNorm, Separate
from regard.nn.norms import OffsetRMSNorm, RMSNorm
from regard.positions import Rotary
from regard.positions.rotary import Layout

PROJECT = "attention.project."


class Errors(NamedTuple):
    """What a conversion loses in one layer, each relative: of the score forms, and of the value-output maps."""

    keys: float
    values: float


@dataclass(frozen=True)
class Layer:
    """The maps of one layer, in fp64. A bias is the last column, which meets a 1; gain is what the norm in front multiplies by.

    Attributes:
        q: [H, D, M+1].
        k: [G, D, M+1].
        v: [G, E, M+1].
        o: [H, M, E].
        gain: [M+1], and 1 for the bias.
        pairs: how many rotary pairs turn; the other dims of a head do not.
        layout: which dims make a pair.

    >>> from regard.nn.variants import gqa
    >>> layer = Layer.of(Block(gqa(8, 4, groups=2), nn.Linear(8, 8), *(PreNorm(RMSNorm(8)) for _ in range(2))))
    >>> layer.k.shape, layer.o.shape, layer.pairs
    (torch.Size([2, 2, 9]), torch.Size([4, 8, 2]), 1)
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gain: Tensor
    pairs: int
    layout: Layout

    @classmethod
    def of(cls, block: nn.Module) -> Layer:
        """The layer of a block of separate queries, keys and values.

        Raises:
            ArgumentError: its attention is made otherwise.
        """
        attention = separate(block)
        project = attention.project
        H, _, _, E, _ = project.shape
        rotary = next((m for m in attention.modules() if isinstance(m, Rotary)), None)
        o = attention.output.weight.detach().double().unflatten(1, (H, E)).permute(1, 0, 2)
        q, k, v = (_by_head(heads) for heads in (project.q, project.k, project.v))
        pairs = 0 if rotary is None else len(rotary.inv_freq)
        layout: Layout = "half" if rotary is None else rotary.layout
        return cls(q, k, v, o, _gain(block, o.shape[1]), pairs, layout)

    @property
    def share(self) -> int:
        """How many query heads share a key/value head."""
        return len(self.q) // len(self.k)

    def split(self, x: Float[Tensor, "n d m"]) -> tuple[Complex[Tensor, "n p m"], Tensor]:
        """Rows of heads -> the rotary pairs as complex rows a + ib, and the rows that do not turn."""
        P = self.pairs
        turned, rest = x[:, : 2 * P], x[:, 2 * P :]
        shape = (2, P) if self.layout == "half" else (P, 2)
        parts = turned.unflatten(1, shape).movedim(1 if self.layout == "half" else 2, -1)
        return torch.complex(parts[..., 0], parts[..., 1]), rest

    def join(self, z: Complex[Tensor, "n p m"], rest: Tensor) -> Float[Tensor, "n d m"]:
        """The reverse of `split`."""
        parts = torch.view_as_real(z).movedim(-1, 1 if self.layout == "half" else 2)
        return torch.cat((parts.flatten(1, 2), rest), 1)

    def pair_weights(self) -> Float[Tensor, "G p"]:
        """How much a pair of a key head counts: the norm of the queries that read it."""
        z, _ = self.split(self.q * self.gain)
        return z.abs().square().sum(-1).unflatten(0, (-1, self.share)).sum(1).sqrt()

    def rest_gram(self) -> Float[Tensor, "G r r"]:
        """Of the queries that read a key head, in the dims that do not turn."""
        _, rest = self.split(self.q * self.gain)
        return (rest @ rest.mT).unflatten(0, (-1, self.share)).sum(1)

    def value_gram(self) -> Float[Tensor, "G E E"]:
        """Of the output maps that read a value head."""
        return (self.o.mT @ self.o).unflatten(0, (-1, self.share)).sum(1)

    def key_norm(self, x: Float[Tensor, "G d m"]) -> float:
        """The Frobenius norm of the score forms that keys x make with the queries, its mean square over all turns."""
        z, rest = self.split(x * self.gain)
        turned = (self.pair_weights()[..., None] * z.abs()).square().sum()
        return float(
            (turned + (rest.mT @ self.rest_gram() @ rest).diagonal(0, 1, 2).sum())
            .clamp(min=0)
            .sqrt()
        )

    def value_norm(self, x: Float[Tensor, "G e m"]) -> float:
        """The Frobenius norm of the value-output maps that values x make with the outputs."""
        x = x * self.gain
        return float((self.value_gram() * (x @ x.mT)).sum().clamp(min=0).sqrt())

    def errors(self, k: Float[Tensor, "G d m"], v: Float[Tensor, "G e m"]) -> Errors:
        """The relative errors of residuals of keys and of values."""
        whole = self.key_norm(self.k), self.value_norm(self.v)
        return Errors(self.key_norm(k) / (whole[0] or 1), self.value_norm(v) / (whole[1] or 1))


def separate(block: nn.Module) -> Any:
    """The attention of a block, if it has separate queries, keys and values.

    Raises:
        ArgumentError: it has not.
    """
    attention: Any = getattr(block, "attention", None)
    project = getattr(attention, "project", None)
    plain = isinstance(attention, Attention) and isinstance(project, Separate)
    if not plain or not isinstance(attention.output, nn.Linear):
        name = type(attention if project is None else project).__name__
        raise ArgumentError(
            f"the attention of this model is made by {name}, not by separate maps of queries, keys and values; "
            "conversions of heads are for llama, mistral, qwen2, qwen3, olmo2, phi3, gemma, gpt_oss and regard's gqa"
        )
    return attention


def layers_of(network: Decoder) -> Iterator[tuple[str, Block]]:
    """The prefix of each block's parameters, and the block."""
    for i, block in enumerate(network.layers):
        assert isinstance(block, Block)
        yield f"layers.{i}.", block


def _by_head(heads: Heads) -> Tensor:
    """[n, d, M+1]."""
    linear = heads.linear
    weight = linear.weight.detach().double()
    bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach().double()
    return torch.cat((weight, bias[:, None]), 1).unflatten(0, (heads.heads, heads.head_dim))


def _gain(block: nn.Module, M: int) -> Tensor:
    """What the norm in front of the attention multiplies each dim by, and 1."""
    around = block.around_attention
    found = torch.ones(M + 1, dtype=torch.float64)
    if isinstance(around, PreNorm) and isinstance(around.norm, RMSNorm):
        offset = 1.0 if isinstance(around.norm, OffsetRMSNorm) else 0.0
        found[:-1] = around.norm.weight.detach().double() + offset
    return found


def stored(prefix: str, x: Float[Tensor, "n d m"], like: Heads) -> dict[str, Tensor]:
    """Maps of heads as parameters: the weight, and the bias where there is one."""
    rows = x.flatten(0, 1)
    found = {prefix + "linear.weight": rows[:, :-1].to(like.linear.weight.dtype)}
    if like.linear.bias is not None:
        found[prefix + "linear.bias"] = rows[:, -1].to(like.linear.bias.dtype)
    return found
