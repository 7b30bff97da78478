"""`ModelReader`: a decoder as the data of the compiled step, or the reason why it is not supported.

A class is recognised only if it is exactly the one that the loops compute, because a subclass may
compute something else.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeVar, cast

import torch
from torch import Tensor, nn

from regard.biases import ALiBi
from regard.nn import (
    Attention,
    Block,
    GatedFeedForward,
    HeadProjection,
    MoE,
    OffsetRMSNorm,
    OutputNorm,
    PreNorm,
    RMSNorm,
    SandwichNorm,
    SeparateQKV,
    SigmoidRouter,
    SoftmaxRouter,
    SwiGLU,
)
from regard.nn.blocks import Residual
from regard.nn.embedding import CappedLogits
from regard.nn.feed_forward import ClippedSwiGLU, GatedSharedExpert, Router
from regard.nn.linear import Linear
from regard.nn.stored import plain_class
from regard.ops.decode_step import (
    StepLayer,
    StepMap,
    StepMixture,
    StepModel,
    StepNetwork,
    StepNorm,
)
from regard.ops.gemv import MAX_VECTORS, MIN_WEIGHT_SIZE
from regard.ops.softmax.cpu import MAX_ROWS
from regard.ops.stored_linear import MAX_VECTORS as MAX_STORED_VECTORS
from regard.ops.stored_weights import StoredWeight
from regard.positions import Rotary
from regard.units import plural

if TYPE_CHECKING:
    from regard.models.decoder import Decoder

Part = TypeVar("Part", bound=nn.Module)

_RESIDUALS: tuple[type[Residual], ...] = (PreNorm, SandwichNorm, OutputNorm)


class Unsupported(Exception):
    """The compiled step does not support a part of a decoder; the text says which and why."""


class ModelReader:
    """Reads a decoder as data.

    Args:
        decoder: the network.

    Attributes:
        model: the decoder as data.
        layers: its layers.
        dtype, width: the dtype of the weights, and the model dim.
        masks, rotaries: the different masks and rotary modules of the layers, to which the numbers
            in `StepLayer` refer.
        cap: the cap on the logits; None: none.
        max_rows: the largest number of rows for which compiled code is faster than torch.

    Raises:
        Unsupported: at the first part that the compiled step does not support.
    """

    def __init__(self, decoder: Decoder) -> None:
        # the decoder itself and its embedding are called as modules in any case
        called = {decoder, *decoder.embed.modules()}
        for module in decoder.modules():
            if module not in called:
                _check_calls(module)
        head: nn.Linear = _checked("the head", decoder.head, nn.Linear, Linear, CappedLogits)
        self.cap = head.cap if isinstance(head, CappedLogits) else None
        self.dtype: torch.dtype
        self.width: int
        weight = _weight_of(head)
        if weight is None:
            raise Unsupported("the weight of the head is computed when it is read")
        self.dtype, self.width = weight.dtype, weight.shape[-1]
        self.max_rows = max(MAX_STORED_VECTORS, *MAX_VECTORS.values())
        if self.dtype not in MAX_VECTORS:
            raise Unsupported(f"the weights are {self.dtype}")
        self.head = self._map(head)
        self.norm = None if type(decoder.norm) is nn.Identity else self._norm(decoder.norm)
        self.masks: list[Any] = []
        self.rotaries: list[Rotary] = []
        self.layers = tuple(self._layer(i, layer) for i, layer in enumerate(decoder.layers))
        if not self.layers:
            raise Unsupported("there is no layer")
        networks = (layer.network for layer in self.layers)
        gates = (x.experts[0].gate if isinstance(x, StepMixture) else x.gate for x in networks)
        largest = max(gate.weight.shape.numel() for gate in gates)
        if largest < MIN_WEIGHT_SIZE:
            raise Unsupported(
                f"its matrices have at most {plural(largest, 'element')}, so that there is little "
                "to gain"
            )
        self.model = StepModel(self.layers, self.norm, self.head)

    def _layer(self, i: int, block: nn.Module) -> StepLayer:
        """Read one block, and add its number to the reason if it is not supported."""
        try:
            return self._read_layer(block)
        except Unsupported as reason:
            raise Unsupported(f"layer {i}: {reason}") from None

    def _read_layer(self, block: nn.Module) -> StepLayer:
        block = _checked("the layer", block, Block)
        attention = _checked("the mechanism", block.attention, Attention)
        project = self._projection(attention)
        q, k, v = project.q, project.k, project.v
        q_norm, rotary = self._steps(q)
        k_norm, k_rotary = self._steps(k)
        if rotary is not k_rotary or len(v.steps):
            raise Unsupported("queries, keys and values have other steps than a rotary")
        before, after = self._residual(block.attention_residual)
        ff_before, ff_after = self._residual(block.feed_forward_residual)
        slopes, symmetric = _alibi(attention.bias, q.heads)
        scale = attention._default_scale if attention.scale is None else attention.scale
        return StepLayer(
            H=q.heads,
            G=k.heads,
            D=q.head_dim,
            E=v.head_dim,
            q=self._map(q.linear, q.heads * q.head_dim),
            k=self._map(k.linear, k.heads * k.head_dim),
            v=self._map(v.linear, v.heads * v.head_dim),
            out=self._map(attention.output, self.width, q.heads * v.head_dim),
            network=self._feed_forward(block.feed_forward),
            before=before,
            after=after,
            ff_before=ff_before,
            ff_after=ff_after,
            q_norm=q_norm,
            k_norm=k_norm,
            scale=float(scale),
            softcap=float(attention.softcap or 0.0),
            rotary=None if rotary is None else _index_of(rotary, self.rotaries),
            mask=_index_of(attention.mask, self.masks),
            sink=self._sink(attention, q.heads),
            slopes=slopes,
            symmetric=symmetric,
        )

    def _projection(self, attention: Attention) -> SeparateQKV:
        """Read the parts of an attention layer that must be plain; return its projection."""
        if attention.score is not None:
            raise Unsupported("the attention has a score rule")
        if attention.mask is None:
            raise Unsupported("the attention has no mask")
        if attention.dropout and attention.training:
            raise Unsupported("the attention has dropout in training mode")
        project = _checked("the projection", attention.project, SeparateQKV)
        if project.key_transform is not None or project.cache_unsafe_reason:
            raise Unsupported("the keys change when they are read")
        if project.q.heads // project.k.heads > MAX_ROWS:
            raise Unsupported(f"more than {MAX_ROWS} query heads use one key/value head")
        for part in (project.q, project.k, project.v):
            _checked("a projection of heads", part, HeadProjection)
            _checked("the norm over all heads", part.flat, nn.Identity)
        return project

    def _sink(self, attention: Attention, H: int) -> Tensor | None:
        """Read the sinks of an attention layer with H heads."""
        if attention.sink is None:
            return None
        sink = self._tensor(attention.sink, "the sink")
        if sink.shape != (H,):
            raise Unsupported("the sink has another size than the heads")
        return sink

    def _steps(self, heads: HeadProjection) -> tuple[StepNorm | None, Rotary | None]:
        """Read the steps on heads: a norm, a rotation, both in this order, or none."""
        steps = list(heads.steps)
        norm = self._norm(steps.pop(0), heads.head_dim) if steps and _is_norm(steps[0]) else None
        rotary: Rotary | None = None
        if steps and type(steps[0]) is Rotary:
            rotary = _checked("a step", steps.pop(0), Rotary)
        if steps:
            raise Unsupported(f"the heads have a step {type(steps[0]).__name__}")
        if rotary is not None and (rotary.follows_length or rotary.dim != heads.head_dim):
            raise Unsupported("the rotary frequencies follow the length")
        return norm, rotary

    def _feed_forward(self, module: nn.Module) -> StepNetwork | StepMixture:
        """Read a feed-forward layer: one network, or a mixture of experts."""
        if plain_class(module) is not MoE:
            return self._network("the feed-forward layer", module)
        mixture = cast("MoE", module)
        _check_methods(mixture, "weighted_expert")
        router = _checked("the router", mixture.router, SoftmaxRouter, SigmoidRouter)
        _check_methods(router, "logits", "choose")
        n, k, groups = router.experts, router.k, router.groups
        if not 0 < k <= n == len(mixture.experts):
            raise Unsupported(
                f"the router chooses {k} of {n}, and there are "
                f"{plural(len(mixture.experts), 'expert')}"
            )
        experts = tuple(self._network("an expert", x) for x in mixture.experts)
        if len({x.gate.weight.shape[0] for x in experts}) > 1:
            raise Unsupported("experts have different numbers of hidden units")
        if groups is not None and (n % groups.count or groups.best > n // groups.count):
            raise Unsupported(f"{plural(n, 'expert')} cannot be in {groups}")
        shared: nn.Module | None = mixture.shared
        shared_gate: StepMap | None = None
        if isinstance(shared, GatedSharedExpert):
            gated = _checked("the shared expert", shared, GatedSharedExpert)
            shared, shared_gate = gated.expert, self._map(gated.gate, 1)
        return StepMixture(
            router=self._map(router.linear, n),
            experts=experts,
            k=k,
            sigmoid=type(router) is SigmoidRouter,
            normalise=router.normalise,
            scale=float(router.scale),
            correction=self._correction(router),
            groups=(0, 0, 0) if groups is None else (groups.count, groups.topk, groups.best),
            shared=None if shared is None else self._network("the shared expert", shared),
            shared_gate=shared_gate,
        )

    def _network(self, name: str, module: nn.Module) -> StepNetwork:
        """Read the maps and the activation of a gated network."""
        network: Any = _checked(name, module, GatedFeedForward, SwiGLU, ClippedSwiGLU)
        F = network.gate.out_features
        gate, up = self._map(network.gate, F), self._map(network.up, F)
        down = self._map(network.down, self.width, F)
        if isinstance(network, ClippedSwiGLU):
            limit, alpha = float(network.limit), float(network.alpha)
            return StepNetwork(gate, up, down, "clipped_silu", limit, alpha)
        return StepNetwork(gate, up, down, _activation(network.activation))

    def _correction(self, router: Router) -> Tensor | None:
        """Read what a router adds to the scores of its experts."""
        if not isinstance(router, SigmoidRouter):
            return None
        stored = router._parameters.get("correction")
        wide = stored is not None and stored.dtype == torch.float32
        correction = self._tensor(stored, "the correction", torch.float32 if wide else None)
        if correction.shape != (router.experts,):
            raise Unsupported("the correction has another size than the experts")
        return correction

    def _residual(self, residual: nn.Module) -> tuple[StepNorm | None, StepNorm | None]:
        """Read a residual connection: the norm before the sublayer, and the one on its result."""
        residual = _checked("the residual connection", residual, *_RESIDUALS)
        if residual.dropout.p and residual.training:
            raise Unsupported("the residual connection has dropout in training mode")
        norm = self._norm(residual.norm)
        if type(residual) is OutputNorm:
            return None, norm
        return norm, self._norm(residual.after) if isinstance(residual, SandwichNorm) else None

    def _norm(self, norm: nn.Module, size: int | None = None) -> StepNorm:
        """Read an RMS norm of the model dim, or of another size."""
        norm = _checked("a norm", norm, RMSNorm, OffsetRMSNorm)
        weight = self._tensor(norm._parameters.get("weight"), "the weight of a norm")
        if weight.shape != (self.width if size is None else size,):
            raise Unsupported("a norm has another size than its input")
        return StepNorm(weight, float(norm.eps), 1.0 if type(norm) is OffsetRMSNorm else 0.0)

    def _map(self, linear: nn.Module, N: int | None = None, M: int | None = None) -> StepMap:
        """Read a linear map from M to N; from the model dim, or to any size, by default."""
        linear = _checked("a linear map", linear, nn.Linear, Linear, CappedLogits)
        if "bias" not in linear._parameters:
            raise Unsupported("a linear map has a parametrization")
        weight = _weight_of(linear)
        if isinstance(weight, StoredWeight):
            weight = self._record(weight)
        else:
            weight = self._tensor(weight, "a weight")
            self.max_rows = min(self.max_rows, MAX_VECTORS[self.dtype])
        bias: Tensor | None = linear._parameters["bias"]
        if len(weight.shape) != 2 or weight.shape[1] != (self.width if M is None else M):
            raise Unsupported("a linear map has another size than its input")
        if N is not None and weight.shape[0] != N:
            raise Unsupported("a linear map has another size than its output")
        if bias is not None:
            bias = self._tensor(bias, "a bias")
            if bias.shape != weight.shape[:1]:
                raise Unsupported("a bias has another size than its linear map")
        return StepMap(weight, bias)

    def _record(self, weight: StoredWeight) -> StoredWeight:
        """Check that compiled code can read a weight that is stored in fewer bits."""
        if weight.dtype != self.dtype:
            raise Unsupported(
                f"a weight that is stored as {weight.form} computes in {weight.dtype}; it must be "
                f"{self.dtype}, like the head"
            )
        weight = weight.map(lambda x: x)  # its addresses are those of now
        if weight.matrix_struct is None:
            raise Unsupported(
                f"a tensor of a weight that is stored as {weight.form} is not plain, contiguous "
                "and on a CPU"
            )
        self.max_rows = min(self.max_rows, MAX_STORED_VECTORS)
        return weight

    def _tensor(self, x: Tensor | None, name: str, dtype: torch.dtype | None = None) -> Tensor:
        """Check that compiled code can read a parameter of a dtype; None is that of the head."""
        if x is None:
            raise Unsupported(f"{name} is computed when it is read (a parametrization)")
        if type(x) not in (Tensor, nn.Parameter):
            raise Unsupported(f"{name} is {type(x).__name__}")
        if (
            x.dtype != (dtype or self.dtype)
            or not x.is_cpu
            or not x.is_contiguous()
            or not x.numel()
        ):
            raise Unsupported(
                f"{name} is {x.dtype} on {x.device}; it must be {self.dtype}, like the head, "
                "contiguous, and on a CPU"
            )
        return x


def _check_calls(module: nn.Module) -> None:
    """Raise if a hook listens to the calls of a module, or if they were replaced."""
    if module._forward_hooks or module._forward_pre_hooks:
        raise Unsupported(f"{type(module).__name__} has a hook")
    if "forward" in module.__dict__:
        raise Unsupported(f"the forward of a {type(module).__name__} was replaced")


def _check_methods(module: nn.Module, *names: str) -> None:
    """Raise if a method of a module was replaced."""
    for name in names:
        if name in module.__dict__:
            raise Unsupported(f"the {name} of a {type(module).__name__} was replaced")


def _checked(name: str, module: object, *allowed: type[Part]) -> Part:
    """Return a module whose class is exactly one of these, or raise: a subclass may compute
    something else.
    """
    if not isinstance(module, nn.Module) or plain_class(module) not in allowed:
        raise Unsupported(f"{name} is {type(module).__name__}")
    return cast("Part", module)


def _alibi(bias: object, H: int) -> tuple[Tensor | None, bool]:
    """Return the slopes of ALiBi, and whether it is symmetric; other biases are not supported."""
    if bias is None:
        return None, False
    if type(bias) is not ALiBi:
        raise Unsupported(f"the attention has a bias, {type(bias).__name__}")
    if isinstance(bias.slopes, Tensor):
        raise Unsupported("the slopes of ALiBi are a tensor, which may change")
    slopes = bias.slopes_on(torch.device("cpu"), torch.float32).detach().contiguous()
    if slopes.shape != (H,):
        raise Unsupported(f"ALiBi has {plural(len(slopes), 'slope')} for {plural(H, 'head')}")
    return slopes, bias.symmetric


def _weight_of(linear: nn.Module) -> Tensor | StoredWeight | None:
    """Return the parameter `weight` or the record in its place; None where it is computed when it
    is read.
    """
    if "weight" in linear._parameters:
        return linear._parameters["weight"]
    record = linear.__dict__.get("stored_weight")
    return record if isinstance(record, StoredWeight) else None


def _is_norm(step: nn.Module) -> bool:
    return type(step) in (RMSNorm, OffsetRMSNorm)


def _index_of(x: object, known: list[Any]) -> int:
    """Return the index of an object in a list, to which it is added if it is not there."""
    for i, y in enumerate(known):
        if y is x or (type(y) is type(x) and not isinstance(x, nn.Module) and y == x):
            return i
    known.append(x)
    return len(known) - 1


def _activation(module: nn.Module) -> str:
    """Return the name of an activation in `regard.ops.decode_step.ACTIVATIONS`."""
    if type(module) is nn.SiLU:
        return "silu"
    if type(module) is nn.ReLU:
        return "relu"
    if type(module) is nn.GELU and getattr(module, "approximate", None) == "tanh":
        return "gelu_tanh"
    raise Unsupported(f"the activation is {module}")
