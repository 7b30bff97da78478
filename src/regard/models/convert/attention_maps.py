"""A decoder as conversions see it: the maps of each attention layer by head, in fp64."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Complex, Float
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models.decoder import Decoder
from regard.models.families import family, model_type_of
from regard.nn import Attention, Block, Heads, PreNorm, Separate
from regard.nn.norms import OffsetRMSNorm, RMSNorm
from regard.positions import Rotary
from regard.positions.rotary import Layout

PROJECT = "attention.project."


class LayerErrors(NamedTuple):
    """What a conversion loses in one layer, each relative: of the score forms, and of the
    value-output maps.
    """

    keys: float
    values: float


@dataclass(frozen=True)
class AttentionMaps:
    """The maps of one layer, in fp64. A bias is the last column, which meets a 1; gain is what the
    norm in front multiplies by.

    Attributes:
        q: [H, D, M+1].
        k: [G, D, M+1].
        v: [G, E, M+1].
        o: [H, M, E].
        gain: [M+1], and 1 for the bias.
        pairs: how many rotary pairs turn; the other dims of a head do not.
        layout: which dims make a pair.

    >>> from regard.nn.variants import gqa
    >>> norms = [PreNorm(RMSNorm(8)) for _ in range(2)]
    >>> layer = AttentionMaps.of(Block(gqa(8, 4, groups=2), nn.Linear(8, 8), *norms))
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
    def of(cls, block: nn.Module) -> AttentionMaps:
        """The layer of a block of separate queries, keys and values.

        Raises:
            ArgumentError: its attention is made otherwise.
        """
        attention = separate_attention(block)
        project = attention.project
        H, _, _, E, _ = project.shape
        rotary = next((m for m in attention.modules() if isinstance(m, Rotary)), None)
        o = torch.unflatten(attention.output.weight.detach().double(), 1, (H, E)).permute(1, 0, 2)
        q, k, v = (_by_head(heads) for heads in (project.q, project.k, project.v))
        pairs = 0 if rotary is None else len(rotary.inv_freq)
        layout: Layout = "half" if rotary is None else rotary.layout
        return cls(q, k, v, o, _gain(block, o.shape[1]), pairs, layout)

    @property
    def share(self) -> int:
        """How many query heads share a key/value head."""
        return len(self.q) // len(self.k)

    def split(self, x: Float[Tensor, "n d m"]) -> tuple[Complex[Tensor, "n p m"], Tensor]:
        """Rows of heads -> the rotary pairs as complex rows a + ib, and the rows that do not
        turn.
        """
        P = self.pairs
        turned, rest = x[:, : 2 * P], x[:, 2 * P :]
        shape = (2, P) if self.layout == "half" else (P, 2)
        parts = torch.unflatten(turned, 1, shape).movedim(1 if self.layout == "half" else 2, -1)
        return torch.complex(parts[..., 0], parts[..., 1]), rest

    def join(self, z: Complex[Tensor, "n p m"], rest: Tensor) -> Float[Tensor, "n d m"]:
        """The reverse of `split`."""
        parts = torch.view_as_real(z).movedim(-1, 1 if self.layout == "half" else 2)
        return torch.cat((parts.flatten(1, 2), rest), 1)

    def pair_weights(self) -> Float[Tensor, "G p"]:
        """How much a pair of a key head counts: the norm of the queries that read it."""
        z, _ = self.split(self.q * self.gain)
        norms: Tensor = z.abs().square().sum(-1).unflatten(0, (-1, self.share)).sum(1).sqrt()
        return norms

    def rest_gram(self) -> Float[Tensor, "G r r"]:
        """Of the queries that read a key head, in the dims that do not turn."""
        _, rest = self.split(self.q * self.gain)
        gram: Tensor = (rest @ rest.mT).unflatten(0, (-1, self.share)).sum(1)
        return gram

    def value_gram(self) -> Float[Tensor, "G E E"]:
        """Of the output maps that read a value head."""
        gram: Tensor = (self.o.mT @ self.o).unflatten(0, (-1, self.share)).sum(1)
        return gram

    def key_norm(self, x: Float[Tensor, "G d m"]) -> float:
        """The Frobenius norm of the score forms that keys x make with the queries, its mean square
        over all turns.
        """
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

    def errors(self, k: Float[Tensor, "G d m"], v: Float[Tensor, "G e m"]) -> LayerErrors:
        """The relative errors of residuals of keys and of values."""
        whole = self.key_norm(self.k), self.value_norm(self.v)
        return LayerErrors(self.key_norm(k) / (whole[0] or 1), self.value_norm(v) / (whole[1] or 1))


def separate_attention(block: nn.Module) -> Any:
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
            f"the attention of this model is made by {name}, not by separate maps of queries, "
            "keys and values; "
            "conversions of heads are for llama, mistral, qwen2, qwen3, olmo2, phi3, gemma, "
            "gpt_oss and regard's gqa"
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
    both = torch.cat((weight, bias[:, None]), 1)
    by_head: Tensor = both.unflatten(0, (heads.heads, heads.head_dim))
    return by_head


def _gain(block: nn.Module, M: int) -> Tensor:
    """What the norm in front of the attention multiplies each dim by, and 1."""
    around = block.around_attention
    found = torch.ones(M + 1, dtype=torch.float64)
    if isinstance(around, PreNorm) and isinstance(around.norm, RMSNorm):
        offset = 1.0 if isinstance(around.norm, OffsetRMSNorm) else 0.0
        found[:-1] = around.norm.weight.detach().double() + offset
    return found


def head_parameters(prefix: str, x: Float[Tensor, "n d m"], like: Heads) -> dict[str, Tensor]:
    """Maps of heads as parameters: the weight, and the bias where there is one."""
    rows = x.flatten(0, 1)
    found = {prefix + "linear.weight": rows[:, :-1].to(like.linear.weight.dtype)}
    if like.linear.bias is not None:
        found[prefix + "linear.bias"] = rows[:, -1].to(like.linear.bias.dtype)
    return found


@dataclass(frozen=True)
class Checkpoint:
    """What a conversion takes, and what it gives.

    Attributes:
        network: the decoder.
        config: the frozen config of its family.
    """

    network: Decoder
    config: Any

    @property
    def model_type(self) -> str:
        """The family."""
        return model_type_of(self.config)

    def weights(self) -> dict[str, Tensor]:
        """Every parameter by name; a shared one under each of its names."""
        named = self.network.named_parameters(remove_duplicate=False)
        return {name: parameter.detach() for name, parameter in named}


@dataclass(frozen=True)
class ConversionStep:
    """What one conversion did.

    Attributes:
        what: in words.
        layers: what it lost in each layer; empty where weights did not change.
        curve: rank -> relative error, the root mean square over layers, where there was a rank to
            choose.
        notes: what to know about the result.
    """

    what: str
    layers: tuple[LayerErrors, ...] = ()
    curve: Mapping[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def rebuild(config: Any, weights: Mapping[str, Tensor]) -> Checkpoint:
    """The model of a config with these weights: no memory is taken for any other.

    Args:
        config: of a family.
        weights: every parameter of its model by name, each on its own or as another model's: they
            are not copied.
    """
    found = family(model_type_of(config))
    assert found is not None
    network = found.build_empty(config)
    before: list[nn.Parameter] = []  # held, so that no id is given twice
    made: dict[int, nn.Parameter] = {}
    lost = set(weights) - {name for name, _ in network.named_parameters(remove_duplicate=False)}
    assert not lost, f"the model has no place for {sorted(lost)[:5]}"
    for prefix, module in network.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            before.append(parameter)
            if id(parameter) not in made:
                value = weights[f"{prefix}.{name}" if prefix else name]
                assert value.shape == parameter.shape, (prefix, name, value.shape, parameter.shape)
                made[id(parameter)] = nn.Parameter(value.contiguous(), requires_grad=False)
            module._parameters[name] = made[id(parameter)]
    return Checkpoint(cast("Decoder", network.eval()), config)


def matrix_sqrt(
    gram: Float[Tensor, "*b d d"],
) -> tuple[Float[Tensor, "*b d d"], Float[Tensor, "*b d d"]]:
    """S with S^2 = gram, symmetric, and its pseudo-inverse: what rounding made of a 0 stays 0.

    >>> root, inverse = matrix_sqrt(torch.tensor([[4.0, 0.0], [0.0, 0.0]], dtype=torch.float64))
    >>> root.tolist(), inverse.tolist()
    ([[2.0, 0.0], [0.0, 0.0]], [[0.5, 0.0], [0.0, 0.0]])
    """
    if not gram.shape[-1]:
        return gram, gram
    values, vectors = torch.linalg.eigh(gram)
    least = values[..., -1:].clamp(min=0) * gram.shape[-1] * torch.finfo(gram.dtype).eps
    real = values > least
    roots = torch.where(real, values, 0).sqrt()
    inverse = torch.where(real, 1 / torch.where(real, roots, 1), 0)
    return vectors * roots[..., None, :] @ vectors.mT, vectors * inverse[..., None, :] @ vectors.mT
