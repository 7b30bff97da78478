"""The hidden state of one token as the sum of what each head and each layer has added to it.

A norm counts as a linear map, whose scale is that of one run and is not computed anew:

    norm(x) = A x + b,  A = diag(g) C / sigma(x)

C subtracts the mean (LayerNorm) or is the identity (RMSNorm). With sigma fixed, the norm of a sum
is the sum of the norms of its terms, and the direct effect of every term is defined.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field
from types import NoneType
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.inspect.model_run import ModelRun, passed_once
from regard.integrations.pytorch.watch import (
    find_stacks,
    is_norm,
    linear_maps,
    stack_prefix,
)
from regard.models.model import Model
from regard.models.seq2seq import Seq2Seq
from regard.nn.blocks.blocks import (
    Block,
    DecoderBlock,
    NormedResidual,
    OutputNorm,
    ParallelBlock,
    PostNorm,
    PreNorm,
    Residual,
    SandwichNorm,
    ScaledPreNorm,
    SharedNormBlock,
)
from regard.nn.blocks.embedding import CappedLogits
from regard.nn.blocks.mixer_block import MixerBlock, ParallelMixers, Tokenwise
from regard.nn.blocks.residual_streams import AltUpMerge, LayerInputBlock
from regard.nn.recurrence.rwkv import TwoMixerBlock
from regard.tolerance import allowed_error

_PROBE = 2.0**12
"""The size of the probes, at which the epsilon of a norm has no influence."""

KNOWN_BLOCKS = (
    *(Block, DecoderBlock, LayerInputBlock, MixerBlock, ParallelBlock, SharedNormBlock),
    TwoMixerBlock,
)
"""Blocks whose results are sums that `_decompose_blocks` makes again."""

_NUDGE = 2.0**-20
"""The relative change of states which shows how a norm rounds."""


class FrozenNorm:
    """A norm with the scale that it had for states x `[B, T, M]`, as a linear map.

    Gain, bias and centring are measured from its results for simple inputs, so that its class need
    not be known; the map is compared with the module's own result.

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", section
    "handling layer normalization".
    """

    @torch.no_grad()
    def __init__(
        self, norm: nn.Module, x: Float[Tensor, "B T M"], y: Float[Tensor, "B T M"]
    ) -> None:
        M = x.shape[-1]
        self.is_centred = False
        self.gain, self.bias = (torch.full((M,), n, dtype=torch.float64) for n in (1.0, 0.0))
        self.scale = torch.ones(*x.shape[:-1], 1, dtype=torch.float64)
        if isinstance(norm, nn.Identity):
            return
        wide = copy.deepcopy(norm).double().cpu()
        zeros = torch.zeros(M, dtype=torch.float64)
        signs = zeros + _PROBE
        signs[1::2] *= -1
        self.bias = _apply(wide, zeros)
        alternating = _apply(wide, signs) - self.bias
        # a LayerNorm makes nothing of equal entries
        ones = _apply(wide, zeros + _PROBE) - self.bias
        self.is_centred = bool(ones.abs().max() < alternating.abs().max() / 2)
        size = self._centre(signs)
        self.gain = alternating * size.square().mean().sqrt() / size
        x64, y64 = x.double().cpu(), wide(x.double().cpu()).double()
        centred = self.gain * self._centre(x64)
        wanted = y64 - self.bias
        # 1 / sigma of each position, by least squares over the M dims
        self.scale = (centred * wanted).sum(-1, keepdim=True)
        self.scale /= centred.square().sum(-1, keepdim=True)
        error = float((self(x) + self.bias - y64).abs().max())
        # Many norms compute in fp32 whatever the dtype of their input, so that y64 is rounded, too.
        # A norm of slightly longer states is the same with other roundings.
        others = [wide(x64 * (1 + n * _NUDGE)).float() for n in (1, 2, 3)]
        if not error <= allowed_error([y.float().cpu(), *others], y64):
            raise ArgumentError(
                f"{type(norm).__name__} is not a linear map with a fixed scale (the difference is "
                f"{error:.1e}); direct attribution needs a LayerNorm or an RMSNorm"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear part to terms `[..., T, M]`, in fp64."""
        return self._centre(x.double().cpu()) * self.gain * self.scale

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.is_centred else x


def _apply(norm: nn.Module, x: Tensor) -> Tensor:
    """Return norm(x) of one vector `[M]`, in fp64."""
    result: Tensor = norm(x[None, None])
    return result[0, 0].double()


CAPTURED = ("embed", "z", "v", "out", "mlp", "residual", "logits")
"""The taps that are needed to take a hidden state apart."""


class Term(NamedTuple):
    """What a head, layer or parameter added to the hidden state: `[M]`, by key `[S, M]`."""

    name: str
    vector: Tensor


class OutputMap(NamedTuple):
    """The map from a state to logits `[V]`: y = scale head(norm(x)), or cap tanh(y / cap)."""

    norm: nn.Module
    head: nn.Module
    logits: Tensor
    cap: float | None = None
    scale: float = 1.0

    @classmethod
    def of(cls, norm: nn.Module, head: nn.Module, logits: Tensor) -> OutputMap:
        """Return the output of a model of this package with the logits `[B, T, V]`."""
        last = logits[0, -1].double().cpu()
        if not isinstance(head, CappedLogits):
            return cls(norm, head, last)
        return cls(norm, head, head.cap * torch.atanh(last / head.cap), head.cap)

    def before_cap(self, x: Tensor) -> Tensor:
        """Return the logits of normed states before a cap."""
        if isinstance(self.head, CappedLogits):
            return nn.Linear.forward(self.head, x)
        y: Tensor = self.head(x)
        return y if self.scale == 1 else y * self.scale

    def __call__(self, x: Tensor) -> Tensor:
        """Return the logits of hidden states."""
        y = self.before_cap(self.norm(x))
        return y if self.cap is None else _capped(y, self.cap)


def _capped(logits: Tensor, cap: float) -> Tensor:
    return torch.tanh(logits / cap) * cap


@dataclass(eq=False)
class ResidualTerms:
    """The terms of the hidden state of one token before the last norm; of heads also by key."""

    position: int
    taps: dict[str, Tensor]
    by_key: bool
    terms: list[Term] = field(default_factory=list)

    def vector_of(self, name: str) -> Tensor:
        """Return a captured tensor `[..., M]` at the token, in fp64."""
        return self.taps[name][0, self.position].double().cpu()

    def state(self, name: str) -> Tensor:
        """Return captured states `[1, 1, M]` of the token, in their own dtype."""
        i = self.position % self.taps[name].shape[1]
        return self.taps[name][:1, i : i + 1]

    def add(self, name: str, vector: Tensor) -> None:
        """Add one term under a name."""
        self.terms.append(Term(name, vector))

    def total(self) -> Tensor:
        """Return the sum of the terms `[1, 1, M]`, in fp64."""
        each_term = [x.vector if x.vector.ndim == 1 else x.vector.sum(0) for x in self.terms]
        return torch.stack(each_term).sum(0)[None, None]

    def scale(self, factor: float) -> None:
        """Multiply the terms so far by a factor."""
        if factor != 1:
            self.terms = [Term(each.name, factor * each.vector) for each in self.terms]

    def add_heads(self, place: str, output: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        """Add the term of each head of a place, and that of the bias of its output map."""
        z = self.taps[f"{place}.z"][:1, :, self.position].double().cpu()
        wide = copy.deepcopy(output).double().cpu()
        bias = wide(torch.zeros(1, 1, z.shape[1] * z.shape[2], dtype=torch.float64))[0, 0]
        parts = self._by_key(place, z) if self.by_key else z[0][:, None]
        for h, part in enumerate(parts):
            joined = torch.zeros(len(part), z.shape[1], z.shape[2], dtype=torch.float64)
            joined[:, h] = part
            vectors = wide(joined.flatten(1)[None])[0] - bias
            self.add(f"{place}.head.{h}", change(vectors if self.by_key else vectors[0]))
        if bool(bias.any()):
            self.add(f"{place}.bias", change(bias))

    def _by_key(self, place: str, z: Tensor) -> Tensor:
        """Return the terms p_ij v_j of the output of each head, `[H, S, E]`."""
        if f"{place}.pattern" not in self.taps:
            raise ArgumentError(f"{place} has no pattern, so that it has no terms by key")
        p = self.taps[f"{place}.pattern"][0, :, self.position].double().cpu()
        v = self.taps[f"{place}.v"][0].double().cpu()
        if v.shape[0] != p.shape[0]:
            v = v.repeat_interleave(p.shape[0] // v.shape[0], 0)
        terms = p[..., None] * v
        total, dtype = terms.sum(1), self.taps[f"{place}.z"].dtype
        # in two orders of the sums, because in fp64 one of them may be the reference itself
        orders = ((p, v), (p.flip(-1), v.flip(-2)))
        plains = [(a.to(dtype)[:, None] @ b.to(dtype))[:, 0] for a, b in orders]
        if total.shape != z[0].shape or not _agrees(z[0], total, *plains):
            raise ArgumentError(
                f"the output of the heads of {place} is not the sum of weights times values, "
                "because a later step changes it (a gate, a map or a norm); leave by_key out"
            )
        # the rounding of the kernel, spread over the keys by their weights
        return terms + p[..., None] * (z[0] - total)[:, None] / p.sum(-1)[:, None, None]


def _agrees(x: Tensor, reference: Tensor, *plains: Tensor) -> bool:
    """Return whether x equals the reference under the error rule."""
    error = float((x.double().cpu() - reference).abs().max())
    return error <= allowed_error([plain.cpu() for plain in plains], reference)


class Decomposition(NamedTuple):
    """A hidden state in terms, and the way from it to the logits.

    Args:
        states: names of the taps with the states between the blocks, in order: the first enters the
            first block, and the last is the state before the last norm.
        is_post_norm: whether the blocks normalize their own results.
    """

    terms: ResidualTerms
    output: OutputMap
    states: tuple[str, ...]
    is_post_norm: bool = False


def decompose(
    run: ModelRun,
    position: int,
    *,
    by_key: bool = False,
    taps: Mapping[str, Tensor] | None = None,
) -> Decomposition:
    """Run a model once, and take the hidden state of one token before the last norm apart; a model
    of this package, of which the captured `taps` are known, does not run.
    """
    captured = (*CAPTURED, "pattern") if by_key else CAPTURED
    if isinstance(run.model, nn.Module):
        return _decompose_module(run, run.model, position, captured, by_key=by_key)
    if not isinstance(run.model, (Model, Seq2Seq)):
        raise ArgumentError(
            f"a {type(run.model).__name__} has no logits of a next token; direct attribution and "
            "the logit lens need a decoder, or an encoder-decoder: measure its vector with ablate, "
            "patch, or attribute(method='integrated_gradients')"
        )
    known = passed_once(run.run(capture=captured).trace) if taps is None else dict(taps)
    terms = ResidualTerms(position, known, by_key)
    if isinstance(run.model, Seq2Seq):
        network = run.model.network
        output = OutputMap.of(network.norm, network.head, terms.taps["logits"])
        return _decompose_blocks(network.layers, "decoder.", output, terms)
    decoder = run.model.decoder
    output = OutputMap.of(decoder.norm, decoder.require_head(), terms.taps["logits"])
    return _decompose_blocks(decoder.layers, "", output, terms)


def _decompose_blocks(
    blocks: nn.ModuleList, prefix: str, output: OutputMap, terms: ResidualTerms
) -> Decomposition:
    """Take the state of a decoder of this package apart, with self- and cross-attention."""
    states = [f"{prefix}embed"]
    for_layers = terms.vector_of(states[0])
    if isinstance(blocks[0], LayerInputBlock) and isinstance(output.norm, AltUpMerge):
        # states [B, T, M + L P] with the embeddings for the layers; the norm reads the first M dims
        output, sizes = output._replace(norm=output.norm.norm), blocks[0].sizes
        for_layers = for_layers[sizes.dim :]
        wide = [name for name in terms.taps if name.endswith(("embed", ".residual"))]
        terms.taps |= {name: terms.taps[name][..., : sizes.dim] for name in wide}
    terms.add(states[0], terms.vector_of(states[0]))
    for i, block in enumerate(blocks):
        place = f"{prefix}layers.{i}"
        assert isinstance(block, (Block, DecoderBlock))
        if type(block) not in KNOWN_BLOCKS:
            raise ArgumentError(
                f"{place} is of the class {type(block).__name__}, which keeps more in its "
                "residual stream than one sum of the outputs of its attention and its feed-forward "
                "layer; ablate and patch measure the model all the same"
            )
        for sublayer in _sublayers(block, place):
            _add_terms(terms, sublayer)
        if isinstance(block, LayerInputBlock):
            if block.layer_input is not None:
                _add_layer_input(terms, place, block, for_layers)
            terms.scale(float(block.scale))
        states.append(f"{place}.residual")
    is_post_norm = any(isinstance(block.feed_forward_residual, PostNorm) for block in blocks)
    return Decomposition(terms, output, tuple(states), is_post_norm)


def _add_layer_input(
    terms: ResidualTerms, place: str, block: LayerInputBlock, for_layers: Tensor
) -> None:
    """Add what a block computes from its state and the embedding `[L P]` for the layers."""
    P, x = block.sizes.layer_dim, terms.state("embed")
    own = for_layers[block.index * P : (block.index + 1) * P][None, None]
    assert block.layer_input is not None
    with torch.no_grad():
        added = block.layer_input(terms.total().to(x), own.to(x))
    terms.add(f"{place}.layer_input", added[0, 0].double().cpu())


class _Sublayer(NamedTuple):
    """A sublayer of a block: the tap of what it adds, its residual connection (None adds it as it
    is) with the name of its norm, and the place of its heads ("" without heads).
    """

    whole: str
    module: nn.Module
    residual: Residual | None
    norm: str
    factor: float = 1.0
    heads_at: str = ""


def _sublayers(block: Block | DecoderBlock, place: str) -> list[_Sublayer]:
    """Return the sublayers of a block, in the order of the computation."""

    def attention(
        prefix: str, module: nn.Module, around: Residual, norm: str, factor: float = 1.0
    ) -> _Sublayer:
        whole = f"{prefix}.mlp" if isinstance(module, Tokenwise) else f"{prefix}.out"
        return _Sublayer(whole, module, around, norm, factor, prefix)

    mixers, around, norm = block.attention, block.attention_residual, f"{place}.attention.norm"
    if isinstance(block, DecoderBlock):
        own, cross = f"{place}.attention", f"{place}.cross"
        sublayers = [
            attention(own, mixers, around, norm),
            attention(cross, block.cross, block.cross_residual, f"{cross}.norm"),
        ]
    elif isinstance(mixers, ParallelMixers) and type(around) in (PreNorm, ScaledPreNorm):
        each = enumerate(zip(mixers.mixers, mixers.out_scales, strict=True))
        sublayers = [attention(f"{place}.mixers.{i}", m, around, norm, f) for i, (m, f) in each]
    else:
        sublayers = [attention(place, mixers, around, norm)]
    if isinstance(block, MixerBlock):
        return sublayers
    path = None if isinstance(block, ParallelBlock) else block.feed_forward_residual
    return [*sublayers, _Sublayer(f"{place}.mlp", block.feed_forward, path, f"{place}.mlp.norm")]


def freeze(norm: nn.Module, x: Tensor) -> FrozenNorm:
    """Return a norm with the scale that it has for states."""
    with torch.no_grad():
        return FrozenNorm(norm, x, norm(x))


def _term_norm(residual: Residual | None, raw: Tensor) -> FrozenNorm | None:
    """Return the norm that a residual connection applies to what it adds; None if none."""
    if isinstance(residual, OutputNorm):
        return freeze(residual.norm, raw)
    if isinstance(residual, SandwichNorm):
        return freeze(residual.after, raw)
    return None


def _on_output(
    residual: Residual | None, norm: FrozenNorm | None, factor: float
) -> Callable[[Tensor], Tensor]:
    """Return the norm or factor of a sublayer's output as a linear function of `[..., M]`."""
    if isinstance(residual, ScaledPreNorm):
        factor = factor * residual.scale
    if isinstance(residual, NormedResidual):
        factor = residual.beta
    return (lambda x: x * factor) if norm is None else _through(norm)


def _through(norm: FrozenNorm) -> Callable[[Tensor], Tensor]:
    """Return the linear part of a norm of one state as a function of vectors `[..., M]`."""
    return lambda x: norm(x if x.ndim > 1 else x[None]).reshape(x.shape)


def _add_terms(terms: ResidualTerms, layer: _Sublayer) -> None:
    """Add the terms of one sublayer of one of our blocks: of its heads, if it has any."""
    place, residual, whole = layer.heads_at, layer.residual, layer.whole
    output = getattr(layer.module, "output", None)
    if whole not in terms.taps:
        raise ArgumentError(
            f"{type(layer.module).__name__} at {place} passes no tap 'out', so that what it "
            "adds is not known; ablate and patch measure the model all the same"
        )
    norm = _term_norm(residual, terms.state(whole))
    if isinstance(residual, NormedResidual):
        _norm_stream(terms, residual.norm, f"{layer.norm}.bias", residual.alpha)
    elif not isinstance(residual, (PreNorm, PostNorm, OutputNorm, SandwichNorm, NoneType)):
        raise ArgumentError(
            f"{place} adds by {type(residual).__name__}, which is not "
            "known here; ablate and patch can still replace what it adds"
        )
    change = _on_output(residual, norm, layer.factor)
    if place and isinstance(output, nn.Module) and f"{place}.z" in terms.taps:
        terms.add_heads(place, output, change)
    else:  # a mechanism without heads is one term
        terms.add(whole, change(terms.vector_of(whole)))
    if norm is not None and bool(norm.bias.any()):
        terms.add(f"{layer.norm}.bias", norm.bias)
    if isinstance(residual, PostNorm):
        _norm_stream(terms, residual.norm, f"{layer.norm}.bias")


def _norm_stream(terms: ResidualTerms, norm: nn.Module, name: str, factor: float = 1.0) -> None:
    """Pass the sum of the terms through a norm with its scale for this sum, times a factor."""
    parameter = next(norm.parameters(), None)
    frozen = freeze(norm, terms.total() if parameter is None else terms.total().to(parameter))
    change = _through(frozen)
    terms.terms = [Term(each.name, factor * change(each.vector)) for each in terms.terms]
    if bool(frozen.bias.any()):
        terms.add(name, factor * frozen.bias)


class _ModuleCall(NamedTuple):
    """A module that ran, with its input and its result."""

    module: nn.Module
    x: Tensor
    y: Tensor


class _ModuleCalls(NamedTuple):
    """The linear maps and the norms of a run."""

    maps: list[_ModuleCall]
    norms: list[_ModuleCall]


def _decompose_module(
    run: ModelRun, model: nn.Module, position: int, captured: tuple[str, ...], *, by_key: bool
) -> Decomposition:
    """Take the state of a module apart whose blocks add outputs of sublayers or their norms.

    What was added is compared with the captured states.
    """
    calls = _ModuleCalls([], [])

    def noting(into: list[_ModuleCall]) -> Callable[[nn.Module, tuple[Any, ...], Any], None]:
        def note(module: nn.Module, inputs: tuple[Any, ...], y: Any) -> None:
            if inputs and isinstance(inputs[0], Tensor) and isinstance(y, Tensor):
                # a copy, because a block may add to y in place
                into.append(_ModuleCall(module, inputs[0].detach(), y.detach().clone()))

        return note

    with ExitStack() as stack:
        for module in linear_maps(model).values():
            stack.callback(module.register_forward_hook(noting(calls.maps)).remove)
        for module in filter(is_norm, model.modules()):
            stack.callback(module.register_forward_hook(noting(calls.norms)).remove)
        taps = passed_once(run.run(capture=captured).trace)
    stacks = find_stacks(model)
    if len(stacks) != 1 or "logits" not in taps or "embed" not in taps:
        raise ArgumentError(
            f"{type(model).__name__} has {len(stacks)} stacks of blocks and "
            f"{'' if 'logits' in taps else 'no '}logits; direct attribution and the logit lens "
            "need one stack of blocks, and logits"
        )
    terms, prefix = ResidualTerms(position, taps, by_key), stack_prefix(stacks[0])
    states = ["embed"]
    terms.add("embed", terms.vector_of("embed"))
    for name in stacks[0].blocks:
        block = f"{prefix}.{name}"
        _add_block(terms, block, states[-1], calls)
        states.append(f"{block}.residual")
    return Decomposition(terms, _output_of(model, taps, states[-1], calls), tuple(states))


def _output_of(
    model: nn.Module, taps: Mapping[str, Tensor], last: str, calls: _ModuleCalls
) -> OutputMap:
    """Return how a foreign module computes its logits from the state that leaves its last block."""
    logits, name = taps["logits"], type(model).__name__
    cap = getattr(getattr(model, "config", None), "final_logit_softcapping", None)
    scale = 1.0
    head = _first_equal(calls.maps, "y", logits)
    if head is not None:
        cap = None
    for call in calls.maps if head is None else ():
        if call.y.shape != logits.shape:
            continue
        if cap is not None and torch.equal(_capped(call.y, cap), logits):
            head = call
            break
        factors = _factors(logits, call.y)
        if factors is not None:
            head, cap, scale = call, None, factors[0]
            break
    if head is None:
        raise ArgumentError(
            f"the logits of {name} are not the result of one of its linear maps, nor that times a "
            "factor or with the cap of its config; does another layer compute them? ablate and "
            "patch measure them all the same"
        )
    norm, read = None, head.x
    if not (read.shape == taps[last].shape and torch.equal(read, taps[last])):
        norm = _first_equal(calls.norms, "y", read)
        read = read if norm is None else norm.x
    if not (read.shape == taps[last].shape and torch.equal(read, taps[last])):
        raise ArgumentError(
            f"the head of {name} does not read {last}, or a norm of it: something else changes the "
            "hidden states in between; ablate and patch measure the model all the same"
        )
    last_norm = nn.Identity() if norm is None else norm.module
    return OutputMap(last_norm, head.module, scale * head.y[0, -1].double().cpu(), cap, scale)


class _ForeignSublayer(NamedTuple):
    """What a sublayer of a foreign module adds: y, which `output` made, or a norm of y."""

    name: str
    y: Tensor
    norm: _ModuleCall | None
    output: nn.Module | None = None

    @property
    def added(self) -> Tensor:
        """What the block adds to its input."""
        return self.y if self.norm is None else self.norm.y


def _add_block(terms: ResidualTerms, block: str, entering: str, calls: _ModuleCalls) -> None:
    """Add the terms of one block of a foreign module, after a check of their sum."""
    taps = terms.taps
    places = [n.removesuffix(".z") for n in taps if n.startswith(f"{block}.") and n.endswith(".z")]
    if not places:
        raise ArgumentError(
            f"{block} passed no tap 'z': its attention is written out, or is no attention at all; "
            "see regard.inspect.record, which says why"
        )
    sublayers = []
    for place in places:
        # [B,H,T,E] -> [B,T,H E]
        call = _first_equal(calls.maps, "x", taps[f"{place}.z"].transpose(1, 2).flatten(2))
        if call is None:
            raise ArgumentError(f"no linear map reads the joined heads of {place}")
        norm = _first_equal(calls.norms, "x", call.y)
        sublayers.append(_ForeignSublayer(place, call.y, norm, call.module))
    if (mlp := taps.get(f"{block}.mlp")) is not None:
        norm = _first_equal(calls.norms, "x", mlp)
        sublayers.append(_ForeignSublayer(f"{block}.mlp", mlp, norm))
    x, y = taps[entering], taps[f"{block}.residual"]
    sublayers = [each._replace(y=each.y.view_as(x)) for each in sublayers]  # some join B and T
    steps = _steps_of(y, x, sublayers, calls.norms)
    if steps is None:
        # the last norm made what leaves the block
        last = next((c for c in calls.norms if c.x.shape == y.shape and torch.equal(c.y, y)), None)
        steps = None if last is None else _steps_of(last.x, x, sublayers, calls.norms)
        if steps is None:
            raise ArgumentError(
                f"what leaves {block} is not its input plus multiples of the outputs of its "
                "attention and its feed-forward layer, or of norms of them, nor a norm of such a "
                "sum: another part adds to the residual stream, or changes it; ablate and patch "
                "measure the model all the same"
            )
        assert last is not None
        steps.append(_Step([], [1.0], last.module))
    i = terms.position % x.shape[1]
    for step in steps:
        terms.scale(step.factors[0])
        for each, factor in zip(step.sublayers, step.factors[1:], strict=True):
            _add_sublayer(terms, each, factor, i)
        if step.norm is not None:
            _norm_stream(terms, step.norm, f"{block}.norm.bias")


class _Step(NamedTuple):
    """A part of a block: factors of the stream and of sublayers, and a norm of their sum."""

    sublayers: list[_ForeignSublayer]
    factors: list[float]
    norm: nn.Module | None = None


def _steps_of(
    y: Tensor, x: Tensor, sublayers: list[_ForeignSublayer], norms: list[_ModuleCall]
) -> list[_Step] | None:
    """Find how a block makes y of x: by one sum, or by sums of which a norm is taken."""
    factors = _factors(y, x, *(each.added for each in sublayers))
    if factors is not None:
        return [_Step(sublayers, factors)]
    for n in range(1, len(sublayers)):
        first, rest = sublayers[:n], sublayers[n:]
        for call in norms:
            if call.x.shape != x.shape or call.y.shape != x.shape:
                continue
            after = _factors(y, call.y, *(each.added for each in rest))
            before = None if after is None else _factors(call.x, x, *(s.added for s in first))
            if after is not None and before is not None:
                return [_Step(first, before, call.module), _Step(rest, after)]
    return None


def _factors(y: Tensor, *parts: Tensor) -> list[float] | None:
    """Return the factors with which parts add up to y under the error rule, or None: ones where
    they do, else those of least squares.
    """
    wide = torch.stack([part.double().cpu().flatten() for part in parts], 1)
    reference = y.double().cpu().flatten()
    ones = torch.ones(len(parts), dtype=torch.float64)
    fitted = torch.linalg.lstsq(wide, reference[:, None], driver="gelsd").solution[:, 0]
    for factors in (ones, fitted):
        plain = sum(part * float(c) for part, c in zip(parts, factors, strict=True))
        assert isinstance(plain, Tensor), "there are parts"
        if _agrees(y, (wide @ factors).view_as(y), plain):
            return [float(c) for c in factors]
    return None


def _add_sublayer(terms: ResidualTerms, part: _ForeignSublayer, factor: float, i: int) -> None:
    """Add the terms of a sublayer of a foreign block at token i, with a norm and a factor."""
    norm = part.norm
    frozen = None if norm is None else freeze(norm.module, norm.x[:1, i : i + 1])

    def change(x: Tensor) -> Tensor:
        return factor * (x if frozen is None else _through(frozen)(x))

    if part.output is None:
        terms.add(part.name, change(part.y[0, i].double().cpu()))
    else:
        terms.add_heads(part.name, part.output, change)
    if frozen is not None and bool(frozen.bias.any()):
        terms.add(f"{part.name}.norm.bias", factor * frozen.bias)


def _first_equal(
    calls: list[_ModuleCall], side: Literal["x", "y"], x: Tensor
) -> _ModuleCall | None:
    """Return the first call whose input x, or result y, is this tensor."""
    for call in calls:
        own: Tensor = getattr(call, side)
        if own.shape == x.shape and torch.equal(own, x):
            return call
    return None
