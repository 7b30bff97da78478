"""`PackedEncoder`: an encoder's hidden states for texts in one row without padding, by weights that
are reordered once (`ops.onednn`), where `why_not_packed_encoder` has no reason.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.models.encoder import Encoder
from regard.nn.attention.attention import Attention
from regard.nn.blocks.blocks import Block, PostNorm, PreNorm, Residual
from regard.nn.blocks.feed_forward import FeedForward
from regard.nn.module_calls import why_not_as_written
from regard.nn.projections.heads import HeadProjection, SeparateQKV
from regard.nn.weights import Linear
from regard.ops.onednn import (
    PackedActivation,
    PackedLinear,
    pack_linear,
    why_not_packed,
)
from regard.ops.softmax import attend
from regard.process_state import is_compiling, is_transformed
from regard.sequence_scope import current_scope
from regard.tracing import is_tracing

SHORT = 64
"""The largest number of tokens of a text whose attention runs as batched products in fp32, which
took three quarters of the time of torch's fused kernel for texts of about 20 tokens.
"""


class TextGroup(NamedTuple):
    """Some texts of one length that stand one after another from the slot `start`."""

    start: int
    count: int  # type: ignore[assignment]
    length: int


def find_groups(lengths: Sequence[int]) -> list[TextGroup]:
    """Return the runs of texts with equal length."""
    groups, start = [], 0
    for length, run in groupby(lengths):
        count = len(list(run))
        groups.append(TextGroup(start, count, length))
        start += count * length
    return groups


@dataclass(frozen=True)
class _PackedBlock:
    """One block with packed weights.

    Attributes:
        sizes: the number of heads and the head dim of queries, keys and values.
        scale: the factor on the scores.
        activation: the activation that `up` applies; None if it is `other_activation`.
        other_activation: a module between `up` and `down`, or None.
        residuals: the residual connections around attention and feed-forward layer.
    """

    qkv: PackedLinear
    sizes: tuple[tuple[int, int], ...]
    scale: float
    output: PackedLinear
    up: PackedLinear
    down: PackedLinear
    activation: PackedActivation | None
    other_activation: nn.Module | None
    residuals: tuple[Residual, Residual]

    def run(self, x: Tensor, groups: Sequence[TextGroup], backend: str) -> Tensor:
        """Apply the block to hidden states [1, N, M]."""
        first, second = self.residuals
        z = self._attend(_input(first, x), groups, backend)
        x = _output(first, self.output(z, add=x))
        hidden = self.up(_input(second, x), activation=self.activation)
        if self.other_activation is not None:
            hidden = self.other_activation(hidden)
        return _output(second, self.down(hidden, add=x))

    def _attend(self, x: Tensor, groups: Sequence[TextGroup], backend: str) -> Tensor:
        """Attend within each text; return the heads, concatenated, [1, N, H E]."""
        parts = self.qkv(x)[0].split([n * d for n, d in self.sizes], dim=-1)
        (H, _), _, (G, E) = self.sizes
        z = x.new_empty(x.shape[1], H * E)
        for start, count, length in groups:
            rows = slice(start, start + count * length)
            q, k, v = (
                part[rows].view(count, length, n, d).transpose(1, 2)
                for part, (n, d) in zip(parts, self.sizes, strict=True)
            )
            if backend == "auto" and H == G and length <= SHORT and x.dtype == torch.float32:
                out = _attend_in_batches(q, k, v, self.scale)
            else:
                out = attend(q, k, v, scale=self.scale, backend=backend)
            z[rows].view(count, length, H, E).copy_(out.transpose(1, 2))
        return z[None]


def _attend_in_batches(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    """Attend without a mask, as three batched operations over all texts and heads [B, H, T, D]."""
    B, H = q.shape[:2]
    q, k, v = (x.reshape(B * H, *x.shape[2:]) for x in (q, k, v))
    scores = torch.baddbmm(q.new_empty(()), q, k.mT, beta=0, alpha=scale)
    return torch.bmm(scores.softmax(-1), v).view(B, H, *v.shape[1:])


def _input(residual: Residual, x: Tensor) -> Tensor:
    """Return what a sublayer gets."""
    y: Tensor = residual.norm(x) if type(residual) is PreNorm else x
    return y


def _output(residual: Residual, total: Tensor) -> Tensor:
    """Return the result of a residual connection from the sum of x and the sublayer's output."""
    y: Tensor = residual.norm(total) if type(residual) is PostNorm else total
    return y


class PackedEncoder:
    """An `Encoder` with packed copies of its weights for rows of many texts, made at the first call
    and when an address or version counter changes; a change through `.data` that keeps the address
    is not seen.
    """

    def __init__(self, encoder: Encoder) -> None:
        self._encoder = weakref.ref(encoder)
        self._made_from: tuple[tuple[int, int], ...] = ()
        self._blocks: list[_PackedBlock] = []

    def __call__(
        self,
        ids: Int[Tensor, "1 N"],
        lengths: Sequence[int],
        segments: Int[Tensor, "1 N"] | None = None,
        *,
        backend: str = "auto",
    ) -> Float[Tensor, "1 N M"]:
        """Compute the states of texts that stand one after another, equal to each alone."""
        if ids.ndim != 2 or ids.shape[0] != 1 or sum(lengths) != ids.shape[1] or min(lengths) < 1:
            raise ArgumentError(
                f"ids are {tuple(ids.shape)} and the lengths add up to {sum(lengths)}; ids are one "
                "row [1, N] of texts with at least one token each, N in all"
            )
        encoder = self._encoder()
        reason = "it was deleted" if encoder is None else why_not_packed_encoder(encoder)
        if encoder is None or reason is not None:
            raise ArgumentError(f"this encoder cannot be packed: {reason}; call the encoder itself")
        self._pack_if_changed(encoder)
        positions = torch.cat([torch.arange(length, device="cpu") for length in lengths])[None]
        x = encoder.embed(ids, positions, segments)
        groups = find_groups(lengths)
        for block in self._blocks:
            x = block.run(x, groups, backend)
        states: Tensor = encoder.norm(x)
        return states

    def _pack_if_changed(self, encoder: Encoder) -> None:
        """Pack all weights unless the copies are of the present ones."""
        present = tuple(
            (p.data_ptr(), 0 if p.is_inference() else p._version) for p in encoder.parameters()
        )
        if present != self._made_from or len(self._blocks) != len(encoder.layers):
            self._blocks = [_pack_block(block) for block in encoder.layers]
            self._made_from = present


def _pack_block(block: nn.Module) -> _PackedBlock:
    """Pack the weights of a block that `_why_not_block` accepted."""
    assert isinstance(block, Block)
    attention, feed_forward = block.attention, block.feed_forward
    assert isinstance(attention, Attention)
    assert isinstance(feed_forward, FeedForward)
    assert isinstance(attention.output, nn.Linear)
    heads = _head_projections(attention)
    weight = torch.cat([part.linear.weight for part in heads])
    biases = [part.linear.bias for part in heads]
    bias = None
    if any(b is not None for b in biases):
        bias = torch.cat(
            [
                part.linear.weight.new_zeros(part.linear.out_features) if b is None else b
                for part, b in zip(heads, biases, strict=True)
            ]
        )
    activation = _activation_name(feed_forward.activation)
    maps = (attention.output, feed_forward.up, feed_forward.down)
    output, up, down = (pack_linear(m.weight.detach(), _detached(m.bias)) for m in maps)
    return _PackedBlock(
        pack_linear(weight.detach(), _detached(bias)),
        tuple((part.heads, part.head_dim) for part in heads),
        attention.project.shape.D**-0.5 if attention.scale is None else attention.scale,
        output,
        up,
        down,
        activation,
        None if activation else feed_forward.activation,
        (block.attention_residual, block.feed_forward_residual),
    )


def _detached(x: Tensor | None) -> Tensor | None:
    return None if x is None else x.detach()


def _head_projections(attention: Attention) -> tuple[HeadProjection, ...]:
    """Return the maps to queries, keys and values."""
    project = attention.project
    assert isinstance(project, SeparateQKV)
    return project.q, project.k, project.v


def _activation_name(activation: nn.Module) -> PackedActivation | None:
    """Return the name of an activation that a packed product can apply, or None."""
    if type(activation) is nn.GELU:
        return "gelu" if activation.approximate == "none" else "gelu_tanh"
    if type(activation) is nn.ReLU:
        return "relu"
    return "silu" if type(activation) is nn.SiLU else None


def why_not_packed_encoder(encoder: Encoder) -> str | None:
    """Return why a `PackedEncoder` cannot compute what the encoder computes now, or None."""
    blocks = (
        f"block {i} {why}"
        for i, block in enumerate(encoder.layers)
        if (why := _why_not_block(block)) is not None
    )
    return next(chain(_reasons_of_this_moment(), _reasons_of_modules(encoder), blocks), None)


def _reasons_of_this_moment() -> Iterator[str]:
    """Yield what in this thread wants every call to run as it is written."""
    conditions = (
        (torch.is_grad_enabled(), "gradients are enabled: use torch.no_grad()"),
        (is_tracing(), "a trace is open, and packed products pass no taps"),
        (current_scope() is not None, "the sequence is divided over ranks"),
        (is_compiling() or is_transformed(), "a graph or a transform of torch.func is open"),
        (torch.is_autocast_enabled("cpu"), "autocast is on"),
        (torch._C._len_torch_dispatch_stack() > 0, "a dispatch mode observes torch's operations"),
    )
    return (reason for applies, reason in conditions if applies)


def _reasons_of_modules(encoder: Encoder) -> Iterator[str]:
    """Yield which module has a hook or a replaced forward, which packed products do not call."""
    for name, module in encoder.named_modules():
        if (reason := why_not_as_written(module)) is not None:
            yield f"{name or 'the encoder'}: {reason}"


def _why_not_block(block: nn.Module) -> str | None:
    """Return why a block cannot be packed, or None if it can."""
    if type(block) is not Block:
        return f"is a {type(block).__name__}, not a Block"
    residuals = (block.attention_residual, block.feed_forward_residual)
    if any(type(r) not in (PostNorm, PreNorm) for r in residuals):
        return "has a residual connection that is neither PostNorm nor PreNorm"
    if any(r.training and r.dropout.p for r in residuals):
        return "is in training, with dropout"
    feed_forward = block.feed_forward
    if type(feed_forward) is not FeedForward:
        return f"has the feed-forward layer {type(feed_forward).__name__}, not FeedForward"
    return _why_not_attention(block.attention) or _why_not_maps(
        block.attention.output, feed_forward.up, feed_forward.down
    )


def _why_not_attention(attention: nn.Module) -> str | None:
    """Return why an attention layer cannot be packed, or None if it can."""
    if type(attention) is not Attention or type(attention.project) is not SeparateQKV:
        return "has another attention than Attention with SeparateQKV"
    if attention.training and attention.dropout:
        return "is in training, with dropout"
    names = ("mask", "bias", "score", "softcap", "sink")
    set_names = [name for name in names if getattr(attention, name) is not None]
    if set_names:
        return f"has attention with {set_names[0]}"
    heads = _head_projections(attention)
    if any(type(part) is not HeadProjection or len(part.steps) for part in heads):
        return "has steps on its heads"
    if attention.project.key_transform is not None or any(
        type(part.flat) is not nn.Identity for part in heads
    ):
        return "has a norm or a transform of its keys"
    if any(part.linear.out_features != part.heads * part.head_dim for part in heads):
        return "has heads on other ranks"
    return _why_not_maps(*(part.linear for part in heads))


def _why_not_maps(*maps: nn.Module) -> str | None:
    """Return why one of the linear maps cannot be packed, or None if all can."""
    for module in maps:
        if type(module) not in (Linear, nn.Linear) or "weight" not in module._parameters:
            return f"has a {type(module).__name__} as a linear map"
        if getattr(module, "stored_weight", None) is not None:
            return "has a quantized linear map"
        assert isinstance(module, nn.Linear)
        reason = why_not_packed(module.weight, module.bias)
        if reason is not None:
            return f"has a linear map that cannot be packed: {reason}"
    return None
