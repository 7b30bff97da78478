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
from typing import Any, Literal, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.inspect.model_run import ModelRun
from regard.integrations.pytorch.module_taps import (
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
)
from regard.nn.blocks.embedding import CappedLogits
from regard.nn.blocks.mixer_block import MixerBlock
from regard.tolerance import allowed_error

_PROBE = 2.0**12
"""The size of the probes, at which the epsilon of a norm has no influence."""

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


CAPTURED = ("embed", "z", "v", "out", "mlp", "norm", "residual", "logits")
"""The taps that are needed to take a hidden state apart."""


class Term(NamedTuple):
    """What a head, layer or parameter added to the hidden state: `[M]`, by key `[S, M]`."""

    name: str
    vector: Tensor


class OutputMap(NamedTuple):
    """The map from a state to logits `[V]`: head(norm(x)), or cap tanh(head(norm(x)) / cap)."""

    norm: nn.Module
    head: nn.Module
    logits: Tensor
    cap: float | None = None

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
        return y

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
    taps: Mapping[str, Tensor]
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


def decompose(run: ModelRun, position: int, *, by_key: bool = False) -> Decomposition:
    """Run a model once, and take the hidden state of one token before the last norm apart."""
    captured = (*CAPTURED, "pattern") if by_key else CAPTURED
    if isinstance(run.model, nn.Module):
        return _decompose_module(run, run.model, position, captured, by_key=by_key)
    if not isinstance(run.model, (Model, Seq2Seq)):
        raise ArgumentError(
            f"a {type(run.model).__name__} has no logits of a next token; direct attribution and "
            "the logit lens need a decoder, or an encoder-decoder: measure its vector with ablate, "
            "patch, or attribute(method='integrated_gradients')"
        )
    trace = run.run(capture=captured).trace
    terms = ResidualTerms(position, {name: trace[name] for name in trace}, by_key)
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
    terms.add(states[0], terms.vector_of(states[0]))
    for i, block in enumerate(blocks):
        place = f"{prefix}layers.{i}"
        assert isinstance(block, (Block, DecoderBlock))
        for sublayer in _attention_layers(block, place):
            _add_attention(terms, sublayer)
        if not isinstance(block, MixerBlock):
            _add_feed_forward(terms, place, block)
        states.append(f"{place}.residual")
    is_post_norm = any(isinstance(block.feed_forward_residual, PostNorm) for block in blocks)
    return Decomposition(terms, output, tuple(states), is_post_norm)


class _AttentionLayer(NamedTuple):
    """An attention layer of a block, with its residual connection."""

    place: str
    attention: nn.Module
    residual: Residual
    norm: str


def _attention_layers(block: Block | DecoderBlock, place: str) -> list[_AttentionLayer]:
    """Return the attention layers of a block, in the order of the computation."""
    norm = f"{place}.attention.norm"
    if isinstance(block, Block):
        return [_AttentionLayer(place, block.attention, block.attention_residual, norm)]
    own, cross = f"{place}.attention", f"{place}.cross"
    return [
        _AttentionLayer(own, block.attention, block.attention_residual, norm),
        _AttentionLayer(cross, block.cross, block.cross_residual, f"{cross}.norm"),
    ]


def _unchanged(x: Tensor) -> Tensor:
    return x


def _frozen(norm: nn.Module, x: Tensor) -> FrozenNorm:
    with torch.no_grad():
        return FrozenNorm(norm, x, norm(x))


def _term_norm(residual: Residual, raw: Tensor) -> FrozenNorm | None:
    """Return the norm that a residual connection applies to what it adds; None if none."""
    if isinstance(residual, OutputNorm):
        return _frozen(residual.norm, raw)
    if isinstance(residual, SandwichNorm):
        return _frozen(residual.after, raw)
    return None


def _on_output(residual: Residual, norm: FrozenNorm | None) -> Callable[[Tensor], Tensor]:
    """Return the norm or factor of a sublayer's output as a linear function of `[..., M]`."""
    if isinstance(residual, ScaledPreNorm):
        return lambda x: x * residual.scale
    if isinstance(residual, NormedResidual):
        return lambda x: x * residual.beta
    return _unchanged if norm is None else _through(norm)


def _through(norm: FrozenNorm) -> Callable[[Tensor], Tensor]:
    """Return the linear part of a norm of one state as a function of vectors `[..., M]`."""
    return lambda x: norm(x if x.ndim > 1 else x[None]).reshape(x.shape)


def _add_attention(terms: ResidualTerms, layer: _AttentionLayer) -> None:
    """Add the terms of the heads of one attention layer of one of our blocks."""
    place, residual = layer.place, layer.residual
    output = getattr(layer.attention, "output", None)
    if not isinstance(output, nn.Module) or f"{place}.z" not in terms.taps:
        raise ArgumentError(
            f"{type(layer.attention).__name__} at {place} has no heads with an output map, so that "
            "its output cannot be split; ablate and patch can still replace it"
        )
    norm = _term_norm(residual, terms.state(f"{place}.out"))
    if isinstance(residual, NormedResidual):
        _norm_stream(terms, residual.norm, f"{layer.norm}.bias", residual.alpha)
    elif not isinstance(residual, (PreNorm, PostNorm, OutputNorm, SandwichNorm)):
        raise ArgumentError(f"{place} adds by {type(residual).__name__}, which is not known here")
    terms.add_heads(place, output, _on_output(residual, norm))
    if norm is not None and bool(norm.bias.any()):
        terms.add(f"{layer.norm}.bias", norm.bias)
    if isinstance(residual, PostNorm):
        _norm_stream(terms, residual.norm, f"{layer.norm}.bias")


def _add_feed_forward(terms: ResidualTerms, place: str, block: Block | DecoderBlock) -> None:
    """Add the term of the feed-forward layer of one of our blocks."""
    residual, raw = block.feed_forward_residual, terms.state(f"{place}.mlp")
    if isinstance(block, ParallelBlock):
        terms.add(f"{place}.mlp", raw[0, 0].double().cpu())
        return
    norm = _term_norm(residual, raw)
    if isinstance(residual, NormedResidual):
        _norm_stream(terms, residual.norm, f"{place}.mlp.norm.bias", residual.alpha)
    terms.add(f"{place}.mlp", _on_output(residual, norm)(raw[0, 0].double().cpu()))
    if norm is not None and bool(norm.bias.any()):
        terms.add(f"{place}.mlp.norm.bias", norm.bias)
    if isinstance(residual, PostNorm):
        _norm_stream(terms, residual.norm, f"{place}.mlp.norm.bias")


def _norm_stream(terms: ResidualTerms, norm: nn.Module, name: str, factor: float = 1.0) -> None:
    """Pass the sum of the terms through a norm with its scale for this sum, times a factor."""
    total = torch.stack(
        [each.vector if each.vector.ndim == 1 else each.vector.sum(0) for each in terms.terms]
    ).sum(0)
    parameter = next(norm.parameters(), None)
    x = total[None, None] if parameter is None else total[None, None].to(parameter)
    frozen = _frozen(norm, x)
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
                into.append(_ModuleCall(module, inputs[0].detach(), y.detach()))

        return note

    with ExitStack() as stack:
        for module in linear_maps(model).values():
            stack.callback(module.register_forward_hook(noting(calls.maps)).remove)
        for module in filter(is_norm, model.modules()):
            stack.callback(module.register_forward_hook(noting(calls.norms)).remove)
        trace = run.run(capture=captured).trace
    taps = {name: trace[name] for name in trace}
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
    head = _first_equal(calls.maps, "y", logits)
    if head is not None:
        cap = None
    elif cap is not None:
        head = next(
            (
                call
                for call in calls.maps
                if call.y.shape == logits.shape and torch.equal(_capped(call.y, cap), logits)
            ),
            None,
        )
    if head is None:
        raise ArgumentError(
            f"the logits of {name} are not the result of one of its linear maps, nor that with the "
            "cap of its config (they may be scaled); load the checkpoint with regard.load"
        )
    norm = _first_equal(calls.norms, "y", head.x)
    read = head.x if norm is None else norm.x
    if not (read.shape == taps[last].shape and torch.equal(read, taps[last])):
        raise ArgumentError(
            f"the head of {name} does not read {last}, or a norm of it: something else changes the "
            "hidden states in between; load the checkpoint with regard.load"
        )
    last_norm = nn.Identity() if norm is None else norm.module
    return OutputMap(last_norm, head.module, head.y[0, -1].double().cpu(), cap)


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
    total = x.double().cpu() + sum(each.added.double().cpu() for each in sublayers)
    plain = x
    for each in sublayers:
        plain = plain + each.added
    if not _agrees(y, total, plain):
        raise ArgumentError(
            f"{block} does not add the outputs of its attention and its feed-forward layer, or "
            "norms of them, to its input (it may scale them, or norm the sum, or add another "
            "part); load the checkpoint with regard.load, which knows the residual connections of "
            "its families"
        )
    i = terms.position % x.shape[1]
    for each in sublayers:
        norm = each.norm
        frozen = None if norm is None else _frozen(norm.module, norm.x[:1, i : i + 1])
        change = _unchanged if frozen is None else _through(frozen)
        if each.output is None:
            terms.add(each.name, change(each.y[0, i].double().cpu()))
        else:
            terms.add_heads(each.name, each.output, change)
        if frozen is not None and bool(frozen.bias.any()):
            terms.add(f"{each.name}.norm.bias", frozen.bias)


def _first_equal(
    calls: list[_ModuleCall], side: Literal["x", "y"], x: Tensor
) -> _ModuleCall | None:
    """Return the first call whose input x, or result y, is this tensor."""
    for call in calls:
        own: Tensor = getattr(call, side)
        if own.shape == x.shape and torch.equal(own, x):
            return call
    return None
