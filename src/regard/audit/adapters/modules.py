"""The adapters for modules, and for regard's own mechanisms and models."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn

from regard.audit.adapters.base import (
    NEW_CACHE,
    AuditClaims,
    CallInputs,
    CallOutput,
    CheckNotApplicable,
    CheckNotPossible,
    Projections,
    TargetAdapter,
    count_elements,
    is_moved,
    placed,
    run_on,
    to_checks,
    to_run_device,
)
from regard.audit.adapters.call_arguments import (
    ARGUMENT_NAMES,
    CallKeywords,
    OutputFormat,
    first_known,
    output_parts,
    parameters,
    query_key_value_names,
    query_keys_names,
    token_arguments,
)
from regard.audit.adapters.projections import read_projections
from regard.errors import ArgumentTypeError
from regard.masks import Mask
from regard.models import Model, Seq2Seq, TextEncoder
from regard.models.decoder import Decoder
from regard.models.encoder_decoder import EncoderDecoder
from regard.nn.mixer import Mixer
from regard.nn.projections.heads import HeadProjection, SeparateQKV

CACHE_IN_MODULE = "inside the module"
"""The value of `CallInputs.memory` for a cache that the module itself holds."""


class ModuleAdapter(TargetAdapter):
    """Call a module with tokens x [B, T, M].

    That is forward(x), forward(x, x, x), or for each token t forward(x_t, x), as the module takes.
    """

    relative = (
        True  # a layer that takes positions is expected to use a relative scheme, such as rotary
    )

    def __init__(
        self,
        module: nn.Module,
        claims: AuditClaims,
        width: int,
        *,
        name: str,
        dtype: torch.dtype = torch.float32,
        keywords: CallKeywords | None = None,
        output_format: OutputFormat | None = None,
        rebuild: Callable[[int, int, int], nn.Module] | None = None,
    ) -> None:
        known = parameters(module.forward)
        self.original, self.claims, self.width, self.name, self.dtype = (
            module,
            claims,
            width,
            name,
            dtype,
        )
        self.module = placed(_copy(module).to("cpu", dtype).eval())
        self.query_key_value = query_key_value_names(known)
        self.query_keys = None if self.query_key_value else query_keys_names(known)
        self.known = known
        self.token_names = self.query_key_value or self.query_keys or tuple(known)[:1]
        self.keywords = keywords or CallKeywords.of(known)
        self.rebuild = rebuild
        self.batch_first = bool(getattr(module, "batch_first", True))
        self.output_format = output_format or OutputFormat()
        if keywords is None:
            self.keywords = self._with_container()
        self.accepts = self.keywords.accepts | self._accepted_cache_and_weights()

    @property
    def called(self) -> str:  # type: ignore[override]
        """The arguments of a call, such as "forward(x, mask=...)"."""
        words = [", ".join(self.token_names if len(self.token_names) > 1 else ("x",))]
        for name, mask_format in (
            (self.keywords.mask, self.keywords.mask_format),
            (self.keywords.padding, self.keywords.padding_format),
        ):
            if name and mask_format:
                words.append(f"{name}={mask_format}")
        return f"forward({', '.join(words)})"

    def call(self, x: Tensor, inputs: CallInputs = CallInputs()) -> CallOutput:  # noqa: B008
        """Call forward, and interpret what it returns."""
        x = x.to(self.dtype)
        if inputs.memory is NEW_CACHE:
            inputs = inputs._replace(memory=self._make_cache())
        arguments = self.keywords.arguments(inputs, x, self.dtype)
        if self.query_keys is not None:
            return self._call_per_query(x, arguments)
        tokens = x if self.batch_first else x.transpose(0, 1)
        with torch.no_grad():
            result = self._run(self.module, [tokens] * len(self.token_names) or [tokens], arguments)
        reply = self.output_format.read(result)
        out = reply.out if self.batch_first else reply.out.transpose(0, 1)
        memory = reply.memory
        if inputs.memory is not None and memory is None:  # the cache was changed in place
            memory = inputs.memory
        return CallOutput(out, reply.weights, memory)

    def _run(
        self, module: nn.Module, tokens: Sequence[Tensor], arguments: Mapping[str, object]
    ) -> object:
        """Run forward on the tokens of `token_names`."""
        if not self.token_names:  # forward(*args)
            return module(*tokens, **arguments)
        named = dict(zip(self.token_names, tokens, strict=True))
        positional, by_name = token_arguments(self.known, named)
        return module(*positional, **by_name, **arguments)

    def _call_per_query(self, x: Tensor, arguments: dict[str, object]) -> CallOutput:
        """Call forward(query, keys) with each token as the query [B,1,M] or [B,M]."""
        outs, rows = [], []
        for t in range(x.shape[1]):
            query = x[:, t : t + 1]
            with torch.no_grad():
                try:
                    result = self._run(self.module, (query, x), arguments)
                    parts = self._parts(result, x)
                except (RuntimeError, IndexError, ArgumentTypeError):
                    result = self._run(self.module, (query[:, 0], x), arguments)
                    parts = self._parts(result, x)
            outs.append(parts[0])
            rows.append(parts[1])
        weights = None if rows[0] is None else torch.cat([r for r in rows if r is not None], 1)
        return CallOutput(torch.cat(outs, 1), None if weights is None else weights[:, None])

    def _parts(self, result: object, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """Return one query's context [B,1,N], and weights [B,1,S] or None, by their sizes."""
        B, S = x.shape[:2]
        parts = [part for part in output_parts(result) if isinstance(part, Tensor)]
        weights = [
            p for p in parts if p.numel() == B * S and (self.width != S or p is not parts[0])
        ]
        contexts = [p for p in parts if not any(p is w for w in weights)]
        if not contexts or contexts[0].numel() % B:
            raise ArgumentTypeError(
                "the code returned no context vector [B, M]; give an adapter that returns one"
            )
        return contexts[0].reshape(B, 1, -1), weights[0].reshape(B, 1, S) if weights else None

    def untried_arguments(self) -> tuple[str, ...]:
        """Return the names of the parameters that no call so far has passed."""
        return self.keywords.untried(self.known, self.token_names)

    def to_dtype(self, dtype: torch.dtype) -> ModuleAdapter:
        """Return an adapter for a copy in another dtype."""
        return self._copy_with(self.original, dtype=dtype)

    def with_conventions(
        self, keywords: CallKeywords, output_format: OutputFormat
    ) -> ModuleAdapter:
        """Return the adapter with other argument names and another output format."""
        return self._copy_with(self.original, keywords=keywords, output_format=output_format)

    def _copy_with(self, module: nn.Module, **changes: object) -> ModuleAdapter:
        """Return a new adapter for a module with some arguments changed."""
        arguments: dict[str, Any] = {
            "claims": self.claims,
            "width": self.width,
            "name": self.name,
            "dtype": self.dtype,
            "keywords": self.keywords,
            "output_format": self.output_format,
            "rebuild": self.rebuild,
            **changes,
        }
        return ModuleAdapter(module, arguments.pop("claims"), arguments.pop("width"), **arguments)

    def projections(self) -> tuple[Projections, ...]:
        """Read the module's maps from its parameters."""
        if self.query_keys is not None:
            raise CheckNotPossible(
                "it takes one query and all keys, so that it has no self-attention"
            )
        return read_projections(self.original, self.claims, self.width)

    def traced_module(self) -> tuple[nn.Module, TargetAdapter]:
        """Return the copy of the module that runs (on the CPU, with equal operations) and this
        adapter.
        """
        if not is_moved():
            return self.module, self
        with run_on(None):
            on_cpu = self._copy_with(self.original)
        return on_cpu.module, on_cpu

    def smaller_versions(self) -> Iterator[TargetAdapter]:
        """Yield modules with fewer heads and features, smallest first."""
        H, G = self.claims.heads, self.claims.groups
        if self.rebuild is None or not H or not G:
            return
        for heads, groups in dict.fromkeys([(1, 1), (2, min(G, 2) if G == H else 1), (H, G)]):
            for d in (1, 2, 4, 8):
                if heads * d >= self.width or (groups == heads) != (G == H):
                    continue
                claims = replace(
                    self.claims, dim=heads * d, heads=heads, kv_heads=groups, head_dim=None
                )
                try:
                    module = self.rebuild(heads * d, heads, groups)
                    yield self._copy_with(module, claims=claims, width=heads * d, rebuild=None)
                except Exception:  # noqa: S112  # the module refuses this size, which is not a fault
                    continue

    def state_tensors(self) -> dict[str, Tensor]:
        """Return the module's state dict."""
        return self.original.state_dict()

    def cache_size(self, memory: object) -> int:
        """Count the elements of the cache, or of the state of a module that holds it."""
        return (
            count_elements(memory)
            if memory is not CACHE_IN_MODULE
            else _stored_elements(self.module)
        )

    def _make_cache(self) -> object:
        """Make an empty cache, or reset the module's; `NEW_CACHE` if the module makes it."""
        maker, reset = (
            first_known(ARGUMENT_NAMES["new_cache"], dir(self.module)),
            first_known(ARGUMENT_NAMES["reset_cache"], dir(self.module)),
        )
        if self.keywords.memory and maker:
            return getattr(self.module, maker)()
        if self.keywords.memory and type(self.module).__module__.startswith("transformers."):
            return sys.modules["transformers"].DynamicCache()
        if reset and not self.keywords.memory:
            getattr(self.module, reset)()
            return CACHE_IN_MODULE
        if self.keywords.container is not None:
            return self.keywords.container()
        if self.positions_index_cache:
            return CACHE_IN_MODULE
        return NEW_CACHE

    def _with_container(self) -> CallKeywords:
        """Return the keywords with the parameter whose empty dictionary or list a call fills with
        tensors, whatever its name: a cache that the caller holds.
        """
        maker = first_known(ARGUMENT_NAMES["new_cache"], dir(self.module))
        if maker or type(self.module).__module__.startswith(("transformers.", "torch.")):
            return self.keywords
        x = self.random_tokens(1, 2, 0).to(self.dtype)
        tokens = [x if self.batch_first else x.transpose(0, 1)] * max(len(self.token_names), 1)
        free = (n for n in self.keywords.may_hold_cache(self.known) if n not in self.token_names)
        for name in free:
            for container in (dict, list):
                probed = replace(self.keywords, memory=name, passed=set())
                cache: Any = container()
                arguments = probed.arguments(CallInputs(memory=cache), x, self.dtype)
                with torch.no_grad(), suppress(Exception):  # refusing a container is no fault
                    self._run(_copy(self.module), tokens, arguments)
                if count_elements(cache):
                    return replace(probed, container=container)
        return self.keywords

    @cached_property
    def positions_index_cache(self) -> bool:
        """Whether positions are indices into a cache that the module holds."""
        keywords = self.keywords
        return (
            bool(keywords.start or keywords.positions)
            and not keywords.memory
            and bool(self.written_tensors)
        )

    @cached_property
    def written_tensors(self) -> frozenset[str]:
        """The stored tensors that a call at position 0 overwrites by the tokens, as a cache."""
        stored = []
        for seed in (0, 1):
            module = _copy(self.module)
            if module is self.module:  # nothing may be written into the code itself
                return frozenset()
            names = [n for n, x in _stored_tensors(module).items() if x.ndim >= 3]
            x = self.random_tokens(1, 3, seed).to(self.dtype)
            inputs = CallInputs(positions=torch.arange(3)[None], memory=CACHE_IN_MODULE)
            tokens = x if self.batch_first else x.transpose(0, 1)
            try:
                arguments = replace(self.keywords, passed=set()).arguments(inputs, x, self.dtype)
                with torch.no_grad():
                    self._run(module, [tokens] * max(len(self.token_names), 1), arguments)
            except Exception:  # the code takes no such call, which is not a fault
                return frozenset()
            after = _stored_tensors(module)
            stored.append({n: after[n] for n in names if n in after})
        one, other = stored
        return frozenset(n for n in one if n in other and not torch.equal(one[n], other[n]))

    def _accepted_cache_and_weights(self) -> frozenset[str]:
        """Return "memory" if a cache can be used, and "weights" if weights are returned."""
        has_reset = first_known(ARGUMENT_NAMES["reset_cache"], dir(self.module)) is not None
        has_cache = (
            self.keywords.memory or (self.keywords.use and has_reset) or self.positions_index_cache
        )
        weights = {"weights"} if self.output_format.weights is not None else set()
        return frozenset({"memory"} if has_cache else ()) | frozenset(weights)


def _copy(module: nn.Module) -> nn.Module:
    """Return a copy of the module, or the module itself if it cannot be copied."""
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError, NotImplementedError):  # a part of it cannot be copied
        return module


def _stored_tensors(module: nn.Module) -> dict[str, Tensor]:
    """Return the buffers and tensor attributes of a module and its children by their names."""
    return {
        f"{path}.{name}".lstrip("."): value
        for path, child in module.named_modules()
        for name, value in {**dict(child.named_buffers(recurse=False)), **vars(child)}.items()
        if isinstance(value, Tensor)
    }


def _stored_elements(module: nn.Module) -> int:
    """Count the elements in the buffers and plain attributes of a module and its children."""
    total = sum(b.numel() for b in module.buffers())
    for child in module.modules():
        attributes = {k: v for k, v in vars(child).items() if not k.startswith("_")}
        total += count_elements(
            {k: v for k, v in attributes.items() if not isinstance(v, nn.Module)}
        )
    return total


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
        self.module = placed(copy.deepcopy(module).to("cpu", dtype).eval())
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
            (m.weight.detach().cpu(), None if m.bias is None else m.bias.detach().cpu())
            for m in linear
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
    """Base class of adapters for models, which map ids to logits or hidden states."""

    def __init__(
        self,
        model: Model | TextEncoder | Seq2Seq,
        network: nn.Module,
        claims: AuditClaims,
        name: str,
        dtype: torch.dtype,
    ) -> None:
        self.model, self.original = model, network
        self.claims, self.name, self.dtype = claims, name, dtype
        self.width = int(model.config.vocab_size)
        self.network = placed(copy.deepcopy(network).to("cpu", dtype).eval())
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
    network: Decoder
    abilities = frozenset({"padding", "positions", "memory"})

    def call(self, x: Tensor, inputs: CallInputs = CallInputs()) -> CallOutput:  # noqa: B008
        """Return the logits [B, T, V]."""
        network = self.network
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
        network = self.network
        with torch.no_grad():
            return CallOutput(network(x, _positions_with_padding(inputs)))


class Seq2SeqAdapter(_ModelAdapter):
    """Call a `Seq2Seq`, which maps target ids to logits, with one fixed source text."""

    called = "model.forward(source, ids)"
    network: EncoderDecoder
    abilities = frozenset({"memory"})

    def call(self, x: Tensor, inputs: CallInputs = CallInputs()) -> CallOutput:  # noqa: B008
        """Return the logits [B, T, V]; the source is encoded once for each cache."""
        network = self.network
        source = (torch.arange(6) * 7 % self.width).expand(x.shape[0], -1)
        with torch.no_grad():
            if inputs.memory is None:
                return CallOutput(network(source, x))
            caches = network.new_caches() if inputs.memory is NEW_CACHE else inputs.memory
            source, x = to_run_device((source, x))
            memory = network.run_encoder(source) if inputs.memory is NEW_CACHE else None
            logits = to_checks(network.run_decoder(x, caches, memory=memory))
            return CallOutput(logits, None, caches)


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
