"""Subjects made of regard's own mechanisms and of models that `regard.load` reads."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor, nn

from regard.audit.subject import (
    NEW,
    Ask,
    CannotTry,
    Claim,
    NotApplicable,
    Projections,
    Reply,
    Subject,
)
from regard.masks import Mask
from regard.models import Model, Seq2Seq, TextEncoder
from regard.nn.mixer import Mixer
from regard.nn.projections import Heads, Separate


class OurMixer(Subject):
    """A `Mixer`: module(x, positions, cache); padding stands at position -1."""

    called = "module(x, positions, cache)"

    def __init__(
        self, module: Mixer, claim: Claim, width: int, name: str, dtype: torch.dtype
    ) -> None:
        self.original, self.claim, self.width, self.name, self.dtype = (
            module,
            claim,
            width,
            name,
            dtype,
        )
        self.module = copy.deepcopy(module).to("cpu", dtype).eval()
        self.takes = frozenset({"padding", "positions", "memory"})

    def ask(self, x: Tensor, ask: Ask = Ask()) -> Reply:  # noqa: B008
        """One pass, or one chunk."""
        cache = self.module.new_cache() if ask.memory is NEW else ask.memory
        with torch.no_grad():
            out = self.module(x.to(self.dtype), _places(ask), cache)
        return Reply(out, None, cache)

    def projections(self) -> tuple[Projections, ...]:
        """The maps of attention whose queries, keys and values are projected apart."""
        project, out = getattr(self.module, "project", None), getattr(self.module, "output", None)
        if not isinstance(project, Separate) or not isinstance(out, nn.Linear):
            raise CannotTry("it has another equation, or other projections, than plain attention")
        made = (project.q, project.k, project.v)
        if project.shape.D != project.shape.E or not all(isinstance(m, Heads) for m in made):
            raise CannotTry("its values have another size than its keys")
        linear = (*(m.linear for m in made), out)
        q, k, v, o = (
            (m.weight.detach(), None if m.bias is None else m.bias.detach()) for m in linear
        )
        return (Projections(q, k, v, o, project.shape.H, project.shape.G),)

    def shown(self, T: int) -> Tensor | None:
        """The rule of its mask on T tokens."""
        mask, at = getattr(self.module, "mask", None), torch.arange(T)
        if not isinstance(mask, Mask):
            return None
        found = mask.allows(at.view(1, 1, T, 1), at.view(1, 1, 1, T)).broadcast_to(1, -1, T, T)
        if found.shape[1] > 1:
            raise CannotTry("its mask differs by head")
        return found[0, 0]

    def at(self, dtype: torch.dtype) -> OurMixer:
        """A copy in another dtype."""
        return OurMixer(self.original, self.claim, self.width, self.name, dtype)

    def state(self) -> dict[str, Tensor]:
        """Its state dict."""
        return self.original.state_dict()

    def held(self, memory: Any) -> int:
        """Bytes, which grow as numbers do."""
        return int(memory.bytes)


class _Ids(Subject):
    """Ids in, logits or states out; `width` is the size of the vocabulary."""

    def __init__(
        self, model: Any, network: nn.Module, claim: Claim, name: str, dtype: torch.dtype
    ) -> None:
        self.model, self.original = model, network
        self.claim, self.name, self.dtype = claim, name, dtype
        self.width = int(model.config.vocab_size)
        self.network = copy.deepcopy(network).to("cpu", dtype).eval()
        self.takes = self.abilities

    abilities: frozenset[str] = frozenset({"padding", "positions"})

    def projections(self) -> tuple[Projections, ...]:
        """A model has several layers."""
        raise NotApplicable("the definition is of one attention layer, and a model has more steps")

    def at(self, dtype: torch.dtype) -> Subject:
        """A copy in another dtype."""
        return type(self)(self.model, self.original, self.claim, self.name, dtype)

    def inputs(self, B: int, T: int, seed: int) -> Tensor:
        """Ids [B,T], a seed for each row."""
        made = (torch.Generator().manual_seed(seed * 1000 + b) for b in range(B))
        return torch.stack([torch.randint(self.width, (T,), generator=g) for g in made])

    def state(self) -> dict[str, Tensor]:
        """Its state dict."""
        return self.original.state_dict()


class Decoder(_Ids):
    """A `Model`: ids -> logits."""

    called = "model.forward(ids, positions, caches)"
    abilities = frozenset({"padding", "positions", "memory"})

    def ask(self, x: Tensor, ask: Ask = Ask()) -> Reply:  # noqa: B008
        """Logits [B,T,V]."""
        network: Any = self.network
        caches = network.new_caches() if ask.memory is NEW else ask.memory
        with torch.no_grad():
            return Reply(network(x, _places(ask), caches), None, caches)

    @property
    def reach(self) -> int | None:
        """The shortest window of a layer."""
        masks = [getattr(m, "mask", None) for m in self.network.modules()]
        found = [mask.reach().tokens for mask in masks if isinstance(mask, Mask)]
        return min((n for n in found if n), default=None)

    def held(self, memory: Any) -> int:
        """Bytes of all layers."""
        return sum(cache.bytes for cache in memory)


class Encoder(_Ids):
    """A `TextEncoder`: ids -> states."""

    called = "model.hidden(ids, positions)"

    def ask(self, x: Tensor, ask: Ask = Ask()) -> Reply:  # noqa: B008
        """States [B,T,M]."""
        network: Any = self.network
        with torch.no_grad():
            return Reply(network(x, _places(ask)))


class Translator(_Ids):
    """A `Seq2Seq`: target ids -> logits, over one fixed source."""

    called = "model.forward(source, ids)"
    abilities = frozenset({"memory"})

    def ask(self, x: Tensor, ask: Ask = Ask()) -> Reply:  # noqa: B008
        """Logits [B,T,V]; the cache keeps the source."""
        network: Any = self.network
        source = (torch.arange(6) * 7 % self.width).expand(x.shape[0], -1)
        with torch.no_grad():
            if ask.memory is None:
                return Reply(network(source, x))
            caches = network.new_caches() if ask.memory is NEW else ask.memory
            memory = network.run_encoder(source) if ask.memory is NEW else None
            return Reply(network.run_decoder(x, caches, memory=memory), None, caches)


def model(
    found: Model | TextEncoder | Seq2Seq, claim: Claim, name: str, dtype: torch.dtype
) -> Subject:
    """The subject of a loaded model."""
    if isinstance(found, Model):
        return Decoder(found, found.decoder, claim, name, dtype)
    kind = Encoder if isinstance(found, TextEncoder) else Translator
    return kind(found, found.network, claim, name, dtype)


def _places(ask: Ask) -> Tensor | None:
    """Positions, -1 where there is padding."""
    if ask.tokens is None:
        return ask.positions
    count = ask.tokens.long().cumsum(1) - 1
    return count.masked_fill(~ask.tokens, -1)
