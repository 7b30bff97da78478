"""Adapters for regard's own mechanisms, and for models that `regard.load` reads."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from regard.audit.adapters.base import (
    NEW_CACHE,
    CallInputs,
    CallOutput,
    CheckNotApplicable,
    CheckNotPossible,
    Projections,
    TargetAdapter,
)
from regard.audit.claims import AuditClaims
from regard.masks import Mask
from regard.models import Model, Seq2Seq, TextEncoder
from regard.nn.mixer import Mixer
from regard.nn.projections import HeadProjection, SeparateQKV


class MixerAdapter(TargetAdapter):
    """Call a `Mixer`: module(x, positions, cache). Padding has position -1."""

    called = "module(x, positions, cache)"

    def __init__(
        self, module: Mixer, claims: AuditClaims, width: int, name: str, dtype: torch.dtype
    ) -> None:
        self.original, self.claims, self.width, self.name, self.dtype = (
            module,
            claims,
            width,
            name,
            dtype,
        )
        self.module = copy.deepcopy(module).to("cpu", dtype).eval()
        self.accepts = frozenset({"padding", "positions", "memory"})

    def call(self, x: Tensor, inputs: CallInputs = CallInputs()) -> CallOutput:  # noqa: B008
        """Call the module on a whole sequence, or on one chunk with a cache."""
        cache = self.module.new_cache() if inputs.memory is NEW_CACHE else inputs.memory
        with torch.no_grad():
            out = self.module(x.to(self.dtype), _positions_with_padding(inputs), cache)
        return CallOutput(out, None, cache)

    def projections(self) -> tuple[Projections, ...]:
        """Return the maps of attention with separate projections for queries, keys and values."""
        project, out = getattr(self.module, "project", None), getattr(self.module, "output", None)
        if not isinstance(project, SeparateQKV) or not isinstance(out, nn.Linear):
            raise CheckNotPossible(
                "its equation or its projections are not those of plain attention"
            )
        qkv_maps = (project.q, project.k, project.v)
        if project.shape.D != project.shape.E or not all(
            isinstance(m, HeadProjection) for m in qkv_maps
        ):
            raise CheckNotPossible("its values have another size than its keys")
        linear = (*(m.linear for m in qkv_maps), out)
        q, k, v, o = (
            (m.weight.detach(), None if m.bias is None else m.bias.detach()) for m in linear
        )
        return (Projections(q, k, v, o, project.shape.H, project.shape.G),)

    def declared_mask(self, T: int) -> Tensor | None:
        """Evaluate the module's mask on T tokens."""
        mask, positions = getattr(self.module, "mask", None), torch.arange(T)
        if not isinstance(mask, Mask):
            return None
        visible = mask.allows(positions.view(1, 1, T, 1), positions.view(1, 1, 1, T)).broadcast_to(
            1, -1, T, T
        )
        if visible.shape[1] > 1:
            raise CheckNotPossible("its mask differs by head")
        return visible[0, 0]

    def to_dtype(self, dtype: torch.dtype) -> MixerAdapter:
        """Return an adapter for a copy in another dtype."""
        return MixerAdapter(self.original, self.claims, self.width, self.name, dtype)

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the module's state dict."""
        return self.original.state_dict()

    def cache_size(self, memory: Any) -> int:
        """Return the bytes of the cache, which are proportional to its elements."""
        return int(memory.bytes)


class _ModelAdapter(TargetAdapter):
    """Base class of adapters for models, which map ids to logits or hidden states.

    `width` is the size of the vocabulary, and `abilities` the inputs that the model accepts.
    """

    def __init__(
        self, model: Any, network: nn.Module, claims: AuditClaims, name: str, dtype: torch.dtype
    ) -> None:
        self.model, self.original = model, network
        self.claims, self.name, self.dtype = claims, name, dtype
        self.width = int(model.config.vocab_size)
        self.network = copy.deepcopy(network).to("cpu", dtype).eval()
        self.accepts = self.abilities

    abilities: frozenset[str] = frozenset({"padding", "positions"})

    def projections(self) -> tuple[Projections, ...]:
        """Raise `CheckNotApplicable`, because a model has several layers."""
        raise CheckNotApplicable(
            "the definition describes one attention layer, and a model has more steps"
        )

    def to_dtype(self, dtype: torch.dtype) -> TargetAdapter:
        """Return an adapter for a copy in another dtype."""
        return type(self)(self.model, self.original, self.claims, self.name, dtype)

    def random_tokens(self, B: int, T: int, seed: int) -> Tensor:
        """Return random ids [B, T], with a seed for each row."""
        generators = (torch.Generator().manual_seed(seed * 1000 + b) for b in range(B))
        return torch.stack([torch.randint(self.width, (T,), generator=g) for g in generators])

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the network's state dict."""
        return self.original.state_dict()


class DecoderAdapter(_ModelAdapter):
    """Call a `Model`, which maps ids to logits."""

    called = "model.forward(ids, positions, caches)"
    abilities = frozenset({"padding", "positions", "memory"})

    def call(self, x: Tensor, inputs: CallInputs = CallInputs()) -> CallOutput:  # noqa: B008
        """Return the logits [B, T, V]."""
        network: Any = self.network
        caches = network.new_caches() if inputs.memory is NEW_CACHE else inputs.memory
        with torch.no_grad():
            return CallOutput(network(x, _positions_with_padding(inputs), caches), None, caches)

    @property
    def cache_window(self) -> int | None:
        """The shortest window of all layers, or None."""
        masks = [getattr(m, "mask", None) for m in self.network.modules()]
        windows = [mask.reach().tokens for mask in masks if isinstance(mask, Mask)]
        return min((n for n in windows if n), default=None)

    def cache_size(self, memory: Any) -> int:
        """Return the bytes of the caches of all layers."""
        return sum(cache.bytes for cache in memory)


class EncoderAdapter(_ModelAdapter):
    """Call a `TextEncoder`, which maps ids to hidden states."""

    called = "model.hidden(ids, positions)"

    def call(self, x: Tensor, inputs: CallInputs = CallInputs()) -> CallOutput:  # noqa: B008
        """Return the hidden states [B, T, M]."""
        network: Any = self.network
        with torch.no_grad():
            return CallOutput(network(x, _positions_with_padding(inputs)))


class Seq2SeqAdapter(_ModelAdapter):
    """Call a `Seq2Seq`, which maps target ids to logits, with one fixed source text."""

    called = "model.forward(source, ids)"
    abilities = frozenset({"memory"})

    def call(self, x: Tensor, inputs: CallInputs = CallInputs()) -> CallOutput:  # noqa: B008
        """Return the logits [B, T, V]; the source is encoded once for each cache."""
        network: Any = self.network
        source = (torch.arange(6) * 7 % self.width).expand(x.shape[0], -1)
        with torch.no_grad():
            if inputs.memory is None:
                return CallOutput(network(source, x))
            caches = network.new_caches() if inputs.memory is NEW_CACHE else inputs.memory
            memory = network.run_encoder(source) if inputs.memory is NEW_CACHE else None
            return CallOutput(network.run_decoder(x, caches, memory=memory), None, caches)


def model_adapter(
    loaded: Model | TextEncoder | Seq2Seq, claims: AuditClaims, name: str, dtype: torch.dtype
) -> TargetAdapter:
    """Return the adapter of a loaded model."""
    if isinstance(loaded, Model):
        return DecoderAdapter(loaded, loaded.decoder, claims, name, dtype)
    kind = EncoderAdapter if isinstance(loaded, TextEncoder) else Seq2SeqAdapter
    return kind(loaded, loaded.network, claims, name, dtype)


def _positions_with_padding(inputs: CallInputs) -> Tensor | None:
    """Return the positions of the tokens, with -1 for padding."""
    if inputs.tokens is None:
        return inputs.positions
    count = inputs.tokens.long().cumsum(1) - 1
    return count.masked_fill(~inputs.tokens, -1)
