"""The maps of each head in fp64, and `Checkpoint`, the input and output of a conversion."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, cast

import torch
from jaxtyping import Complex, Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models.decoder import Decoder
from regard.models.families import family, model_type_of
from regard.nn import Attention, Block, HeadProjection, PreNorm, SeparateQKV
from regard.nn.blocks.norms import OffsetRMSNorm, RMSNorm
from regard.nn.weights import store_weight, stored_modules
from regard.ops.stored_weights import StoredWeight
from regard.positions import Rotary
from regard.positions.rotary import Layout

PROJECT = "attention.project."


class LayerErrors(NamedTuple):
    """A layer's relative errors: of the forms W_q^T W_k, and of the maps W_o W_v."""

    keys: float
    values: float


@dataclass(frozen=True, eq=False)
class AttentionMaps:
    """The linear maps of each head of one attention layer, in fp64.

    The last column of a map is its bias, or zeros; the input of a map is [x; 1], with M + 1
    numbers.

    Attributes:
        q: query maps [H, D, M+1].
        k: key maps [G, D, M+1].
        gain: the factors [M+1] of the norm before the attention, and 1 for the bias.
        root: R [M+1, M+1] with R R^T the mean of x x^T over measured inputs x; None takes
            independent inputs of equal size, R = diag(gain).
        pairs: the number of rotary pairs; the other dims of a head are not rotated.
        layout: which dims form a pair.
    """

    q: Tensor
    k: Tensor
    v: Tensor
    o: Tensor
    gain: Tensor
    pairs: int
    layout: Layout
    root: Tensor | None = None

    @classmethod
    def of(cls, block: nn.Module, root: Tensor | None = None) -> AttentionMaps:
        """Return the maps of a block with separate queries, keys and values."""
        attention = separate_attention(block)
        project = attention.project
        H, _, _, E, _ = project.shape
        rotary = next((m for m in attention.modules() if isinstance(m, Rotary)), None)
        o = torch.unflatten(attention.output.weight.detach().double(), 1, (H, E)).permute(1, 0, 2)
        q, k, v = (_by_head(heads) for heads in (project.q, project.k, project.v))
        pairs = 0 if rotary is None else len(rotary.inv_freq)
        layout: Layout = "half" if rotary is None else rotary.layout
        return cls(q, k, v, o, _gain(block, o.shape[1]), pairs, layout, root)

    def on_inputs(self, x: Tensor) -> Tensor:
        """Return maps [..., M+1] times the root of their inputs' moments: |x R| is the root mean
        square of the map's output.
        """
        return x * self.gain if self.root is None else x @ self.root.to(x.dtype)

    @property
    def share(self) -> int:
        """The number of query heads that share a key/value head."""
        return len(self.q) // len(self.k)

    def split(self, x: Float[Tensor, "n d m"]) -> tuple[Complex[Tensor, "n p m"], Tensor]:
        """Split rows of heads into rotary pairs, complex rows a + ib, and unrotated rows."""
        P = self.pairs
        turned, rest = x[:, : 2 * P], x[:, 2 * P :]
        shape = (2, P) if self.layout == "half" else (P, 2)
        parts = torch.unflatten(turned, 1, shape).movedim(1 if self.layout == "half" else 2, -1)
        return torch.complex(parts[..., 0], parts[..., 1]), rest

    def join(self, z: Complex[Tensor, "n p m"], rest: Tensor) -> Float[Tensor, "n d m"]:
        """Join rotary pairs and unrotated rows into rows of heads: the inverse of `split`."""
        parts = torch.view_as_real(z).movedim(-1, 1 if self.layout == "half" else 2)
        return torch.cat((parts.flatten(1, 2), rest), 1)

    def pair_weights(self) -> Float[Tensor, "G p"]:
        """Return each rotary pair's weight: the norm of the queries that attend to it."""
        z, _ = self.split(self.on_inputs(self.q))
        norms: Tensor = z.abs().square().sum(-1).unflatten(0, (-1, self.share)).sum(1).sqrt()
        return norms

    def rest_gram(self) -> Float[Tensor, "G r r"]:
        """Return the queries' Gram matrix [G, r, r] in the unrotated dims."""
        _, rest = self.split(self.on_inputs(self.q))
        gram: Tensor = (rest @ rest.mT).unflatten(0, (-1, self.share)).sum(1)
        return gram

    def value_gram(self) -> Float[Tensor, "G E E"]:
        """Return the Gram matrix [G, E, E] of the output maps that are applied to a value head."""
        gram: Tensor = (self.o.mT @ self.o).unflatten(0, (-1, self.share)).sum(1)
        return gram

    def key_norm(self, x: Float[Tensor, "G d m"]) -> float:
        """Return the Frobenius norm of the forms q^T R x, a root mean square over R."""
        z, rest = self.split(self.on_inputs(x))
        turned = (self.pair_weights()[..., None] * z.abs()).square().sum()
        return float(
            (turned + (rest.mT @ self.rest_gram() @ rest).diagonal(0, 1, 2).sum())
            .clamp(min=0)
            .sqrt()
        )

    def value_norm(self, x: Float[Tensor, "G e m"]) -> float:
        """Return the Frobenius norm of the maps from values x to outputs."""
        x = self.on_inputs(x)
        return float((self.value_gram() * (x @ x.mT)).sum().clamp(min=0).sqrt())

    def errors(self, k: Float[Tensor, "G d m"], v: Float[Tensor, "G e m"]) -> LayerErrors:
        """Return the relative errors of scores and outputs for these residuals."""
        totals = self.key_norm(self.k), self.value_norm(self.v)
        return LayerErrors(
            self.key_norm(k) / (totals[0] or 1), self.value_norm(v) / (totals[1] or 1)
        )


@torch.no_grad()
def input_roots(
    network: Decoder, ids: Int[Tensor, "N T"] | None
) -> list[Float[Tensor, "m m"] | None]:
    """Measure for each layer the root of the second moments [M+1, M+1] of what its attention reads.

    States of trained models are far from independent: a few directions have most of their size. A
    ten-thousandth of the mean moment is added to every direction, so that none counts as unused.
    """
    if ids is None:
        return [None] * len(network.layers)
    sums: list[Any] = [0.0] * len(network.layers)

    def add(i: int, x: Tensor) -> None:
        rows = x.detach().double().flatten(0, 1)
        rows = torch.cat([rows, rows.new_ones(len(rows), 1)], 1)
        sums[i] = sums[i] + rows.mT @ rows

    handles = [
        cast("Any", layer).attention.register_forward_pre_hook(
            lambda _, inputs, i=i: add(i, inputs[0])
        )
        for i, layer in enumerate(network.layers)
    ]
    try:
        for row in ids:
            network.hidden(row[None])
    finally:
        for handle in handles:
            handle.remove()
    factors: list[Float[Tensor, "m m"] | None] = []
    for total in sums:
        moments = total / ids.numel()
        ridge = (
            1e-4
            * moments.diagonal().mean()
            * torch.eye(len(moments), dtype=moments.dtype, device=moments.device)
        )
        values, vectors = torch.linalg.eigh(moments + ridge)
        factors.append(vectors * values.clamp(min=0).sqrt())
    return factors


def separate_attention(block: nn.Module) -> Any:
    """Return the attention of a block if it has separate maps of queries, keys and values."""
    attention: Any = getattr(block, "attention", None)
    project = getattr(attention, "project", None)
    plain = isinstance(attention, Attention) and isinstance(project, SeparateQKV)
    if not plain or not isinstance(attention.output, nn.Linear):
        name = type(attention if project is None else project).__name__
        raise ArgumentError(
            f"the attention of this model uses {name}, not separate maps of queries, keys and "
            "values; conversions of heads are for llama, mistral, qwen2, qwen3, olmo2, phi3, "
            "gemma, gpt_oss and regard's gqa"
        )
    return attention


def layers_of(network: Decoder) -> Iterator[tuple[str, Block]]:
    """Yield the prefix of each block's parameters, and the block."""
    for i, block in enumerate(network.layers):
        assert isinstance(block, Block)
        yield f"layers.{i}.", block


def _by_head(heads: HeadProjection) -> Tensor:
    """Return the map of heads as [n, d, M+1], with the bias as the last column."""
    linear = heads.linear
    weight = linear.weight.detach().double()
    bias = weight.new_zeros(len(weight)) if linear.bias is None else linear.bias.detach().double()
    both = torch.cat((weight, bias[:, None]), 1)
    by_head: Tensor = both.unflatten(0, (heads.heads, heads.head_dim))
    return by_head


def _gain(block: nn.Module, M: int) -> Tensor:
    """Return the factors [M] of the norm before the attention, and 1 for the bias."""
    residual = block.attention_residual
    gain = torch.ones(M + 1, dtype=torch.float64, device="cpu")
    if isinstance(residual, PreNorm) and isinstance(residual.norm, RMSNorm):
        offset = 1.0 if isinstance(residual.norm, OffsetRMSNorm) else 0.0
        gain[:-1] = residual.norm.weight.detach().double() + offset
    return gain


def head_parameters(
    prefix: str, x: Float[Tensor, "n d m"], like: HeadProjection
) -> dict[str, Tensor]:
    """Return maps of heads as named parameters: the weight, and the bias if there is one."""
    rows = x.flatten(0, 1)
    parameters = {prefix + "linear.weight": rows[:, :-1].to(like.linear.weight.dtype)}
    if like.linear.bias is not None:
        parameters[prefix + "linear.bias"] = rows[:, -1].to(like.linear.bias.dtype)
    return parameters


@dataclass(frozen=True)
class Checkpoint:
    """A decoder and its config: the input and the result of a conversion.

    Args:
        network: the decoder.
        config: the frozen config of its family.
    """

    network: Decoder
    config: Any

    @property
    def model_type(self) -> str:
        """The `model_type` of the checkpoint's family."""
        return model_type_of(self.config)

    def weights(self) -> dict[str, Tensor]:
        """Return all parameters by name; a shared one appears under each of its names.

        Returns:
            Name -> parameter, detached. Weights that are stored in fewer bits are not among them.
        """
        named = self.network.named_parameters(remove_duplicate=False)
        return {name: parameter.detach() for name, parameter in named}

    def records(self) -> dict[str, StoredWeight]:
        """Return the weights that are stored in fewer bits.

        Returns:
            The stored weights, by the names of their parameters.
        """
        return dict(stored_modules(self.network))


@dataclass(frozen=True)
class ConversionStep:
    """A description of one conversion, with its errors.

    Args:
        what: a description.
        layers: the errors of each layer; empty if no weight changed.
        curve: rank -> relative error, a root mean square over layers; empty without ranks.
        notes: remarks on the result.
    """

    what: str
    layers: tuple[LayerErrors, ...] = ()
    curve: Mapping[int, float] = field(default_factory=dict)
    notes: tuple[str, ...] = ()


def rebuild(
    config: Any,
    weights: Mapping[str, Tensor],
    records: Mapping[str, StoredWeight] | None = None,
) -> Checkpoint:
    """Build the network of a config with the given weights, without other memory."""
    its_family = family(model_type_of(config))
    network = its_family.build_empty(config)
    old_parameters: list[nn.Parameter] = []  # kept alive, so that ids stay unique
    new_parameters: dict[int, nn.Parameter] = {}
    unknown = set(weights) - {name for name, _ in network.named_parameters(remove_duplicate=False)}
    assert not unknown, f"the network has no parameters {sorted(unknown)[:5]}"
    for prefix, module in network.named_modules():
        for name, parameter in list(module._parameters.items()):
            if parameter is None:
                continue
            old_parameters.append(parameter)
            full_name = f"{prefix}.{name}" if prefix else name
            if records is not None and full_name in records:
                store_weight(module, records[full_name])
                continue
            if id(parameter) not in new_parameters:
                value = weights[full_name]
                assert value.shape == parameter.shape, (prefix, name, value.shape, parameter.shape)
                new_parameters[id(parameter)] = nn.Parameter(
                    value.contiguous(), requires_grad=False
                )
            module._parameters[name] = new_parameters[id(parameter)]
    return Checkpoint(cast("Decoder", network.eval()), config)


def matrix_sqrt(
    gram: Float[Tensor, "*b d d"],
) -> tuple[Float[Tensor, "*b d d"], Float[Tensor, "*b d d"]]:
    """Return the symmetric square root S of a Gram matrix, S^2 = gram, and its pseudo-inverse;
    eigenvalues of the size of the rounding error count as 0.
    """
    if not gram.shape[-1]:
        return gram, gram
    values, vectors = torch.linalg.eigh(gram)
    least = values[..., -1:].clamp(min=0) * gram.shape[-1] * torch.finfo(gram.dtype).eps
    real = values > least
    square_roots = torch.where(real, values, 0).sqrt()
    inverse = torch.where(real, 1 / torch.where(real, square_roots, 1), 0)
    return vectors * square_roots[..., None, :] @ vectors.mT, vectors * inverse[
        ..., None, :
    ] @ vectors.mT
