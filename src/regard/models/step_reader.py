"""`ModelReader`: a decoder as the data of the compiled step, or the reason why not; only exactly
the known classes count, as a subclass may compute something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar, cast

import torch
from torch import Tensor, nn

from regard.biases import ALiBi
from regard.nn import (
    Attention,
    Block,
    FeedForward,
    FusedQKV,
    GatedFeedForward,
    HeadProjection,
    MoE,
    OffsetRMSNorm,
    OutputNorm,
    ParallelBlock,
    PreNorm,
    RMSNorm,
    SandwichNorm,
    ScaledPreNorm,
    SeparateQKV,
    SharedNormBlock,
    SigmoidRouter,
    SoftmaxRouter,
    SwiGLU,
)
from regard.nn.blocks.blocks import Residual
from regard.nn.blocks.embedding import CappedLogits, ScaledLogits
from regard.nn.blocks.feed_forward import ClippedSwiGLU, GatedSharedExpert, ReLUSquared
from regard.nn.blocks.norms import OffsetLayerNorm
from regard.nn.blocks.routers import Router
from regard.nn.module_calls import why_not_as_written
from regard.nn.projections.fused import ClippedQKV
from regard.nn.projections.steps import Clip
from regard.nn.weights.linear import Linear
from regard.nn.weights.stored import plain_class
from regard.ops.decode_step import (
    ACTIVATIONS,
    GATED_ACTIVATIONS,
    HeadBlocks,
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

_RESIDUALS: tuple[type[Residual], ...] = (PreNorm, SandwichNorm, OutputNorm, ScaledPreNorm)
_HEADS = (nn.Linear, Linear, CappedLogits, ScaledLogits)
_GATED = (GatedFeedForward, SwiGLU, ClippedSwiGLU)


class Unsupported(Exception):
    """The compiled step does not support a part of a decoder; the text says which and why."""


class _Heads(NamedTuple):
    """What a projection gives to the fields of `StepLayer`, and its rotary."""

    H: int
    G: int
    D: int
    E: int
    q: StepMap
    k: StepMap
    v: StepMap
    q_norm: StepNorm | None
    k_norm: StepNorm | None
    rotary: Rotary | None
    q_flat: StepNorm | None = None
    k_flat: StepNorm | None = None
    blocks: tuple[HeadBlocks, HeadBlocks, HeadBlocks] | None = None
    clip: float = 0.0


class ModelReader:
    """Reads a decoder as data.

    Attributes:
        masks, rotaries: the different masks and rotary modules of the layers, to which the numbers
            in `StepLayer` refer.
        cap: the cap on the logits; None: none.
        max_rows: the largest number of rows for which compiled code is faster than torch.
    """

    def __init__(self, decoder: Decoder) -> None:
        # the decoder itself and its embedding are called as modules in any case
        called = {decoder, *decoder.embed.modules()}
        for module in decoder.modules():
            if module not in called:
                _check_calls(module)
        head: nn.Linear = _checked("the head", decoder.head, *_HEADS)
        self.cap = head.cap if isinstance(head, CappedLogits) else None
        scale = float(head.scale) if isinstance(head, ScaledLogits) else 1.0
        self.dtype: torch.dtype
        self.width: int
        weight = _weight_of(head)
        if weight is None:
            raise Unsupported("the weight of the head is computed when it is read")
        self.dtype, self.width = weight.dtype, weight.shape[-1]
        self.max_rows = max(MAX_STORED_VECTORS, *MAX_VECTORS.values())
        if self.dtype not in MAX_VECTORS:
            raise Unsupported(f"the weights are {self.dtype}")
        self.head = self._map(head, allowed=_HEADS)
        self.norm = None if type(decoder.norm) is nn.Identity else self._norm(decoder.norm)
        self.masks: list[Any] = []
        self.rotaries: list[Rotary] = []
        self.layers = tuple(self._layer(i, layer) for i, layer in enumerate(decoder.layers))
        if not self.layers:
            raise Unsupported("there is no layer")
        networks = (layer.network for layer in self.layers)
        maps = (x.experts[0].up if isinstance(x, StepMixture) else x.up for x in networks)
        largest = max(up.weight.shape.numel() for up in maps)
        if largest < MIN_WEIGHT_SIZE:
            raise Unsupported(
                f"its matrices have at most {plural(largest, 'element')}, so that there is little "
                "to gain"
            )
        self.model = StepModel(self.layers, self.norm, self.head, scale)

    def _layer(self, i: int, block: nn.Module) -> StepLayer:
        """Read one block, and add its number to the reason if it is not supported."""
        try:
            return self._read_layer(block)
        except Unsupported as reason:
            raise Unsupported(f"layer {i}: {reason}") from None

    def _read_layer(self, block: nn.Module) -> StepLayer:
        block = _checked("the layer", block, Block, ParallelBlock, SharedNormBlock)
        attention = _checked("the mechanism", block.attention, Attention)
        heads, parallel = self._projection(attention), type(block) is not Block
        before, after, ff_before, ff_after = self._paths(block)
        network = self._feed_forward(block.feed_forward)
        if isinstance(network, StepMixture) and (
            parallel or (ff_before is not None and ff_before.kind != "rms")
        ):
            raise Unsupported(
                "the feed-forward layer is a MoE, and its input is not the result of an RMS norm "
                "after the attention"
            )
        slopes, symmetric = _alibi(attention.bias, heads.H)
        scale = attention._default_scale if attention.scale is None else attention.scale
        rotary = heads.rotary
        return StepLayer(
            H=heads.H,
            G=heads.G,
            D=heads.D,
            E=heads.E,
            q=heads.q,
            k=heads.k,
            v=heads.v,
            q_norm=heads.q_norm,
            k_norm=heads.k_norm,
            q_flat=heads.q_flat,
            k_flat=heads.k_flat,
            blocks=heads.blocks,
            clip=heads.clip,
            before=before,
            after=after,
            ff_before=ff_before,
            ff_after=ff_after,
            out=self._map(attention.output, self.width, heads.H * heads.E),
            network=network,
            scale=float(scale),
            softcap=float(attention.softcap or 0.0),
            rotary=None if rotary is None else _index_of(rotary, self.rotaries),
            mask=_index_of(attention.mask, self.masks),
            sink=self._sink(attention, heads.H),
            slopes=slopes,
            symmetric=symmetric,
            parallel=parallel,
        )

    def _paths(self, block: Block) -> tuple[StepNorm | None, ...]:
        """Read the residual connections of a block: the norm before the attention, the one on its
        result, and those of the feed-forward layer.
        """
        first, second = block.attention_residual, block.feed_forward_residual
        if type(block) is Block:
            return *self._residual(first), *self._residual(second)
        # with one norm for both, the second path does nothing
        path = first if type(block) is SharedNormBlock else second
        return *self._residual(first, PreNorm), *self._residual(path, PreNorm)

    def _projection(self, attention: Attention) -> _Heads:
        """Read the projection of an attention layer, and check the parts that must be plain."""
        if attention.score is not None:
            raise Unsupported("the attention has a score rule")
        if attention.mask is None:
            raise Unsupported("the attention has no mask")
        if attention.dropout and attention.training:
            raise Unsupported("the attention has dropout in training mode")
        project = _checked("the projection", attention.project, SeparateQKV, FusedQKV, ClippedQKV)
        _check_methods(project, "query", "remember", "recall", "postprocess")
        heads = (
            self._fused(project)
            if isinstance(project, FusedQKV)
            else self._separate(cast("SeparateQKV", project))
        )
        if heads.H // heads.G > MAX_ROWS:
            raise Unsupported(f"more than {MAX_ROWS} query heads use one key/value head")
        return heads

    def _separate(self, project: SeparateQKV) -> _Heads:
        """Read a projection with a linear map for each of queries, keys and values."""
        if project.key_transform is not None or project.cache_unsafe_reason:
            raise Unsupported("the keys change when they are read")
        q, k, v = project.q, project.k, project.v
        for part in (q, k, v):
            _checked("a projection of heads", part, HeadProjection)
        q_norm, rotary = self._steps(q.steps, q.head_dim)
        k_norm, k_rotary = self._steps(k.steps, k.head_dim)
        if rotary is not k_rotary or len(v.steps):
            raise Unsupported("queries, keys and values have other steps than a rotary")
        clip = _clip(q.flat, k.flat, v.flat)
        return _Heads(
            H=q.heads,
            G=k.heads,
            D=q.head_dim,
            E=v.head_dim,
            q=self._map(q.linear, q.heads * q.head_dim),
            k=self._map(k.linear, k.heads * k.head_dim),
            v=self._map(v.linear, v.heads * v.head_dim),
            q_norm=q_norm,
            k_norm=k_norm,
            q_flat=None if clip else self._flat(q),
            k_flat=None if clip else self._flat(k),
            rotary=rotary,
            clip=clip,
        )

    def _fused(self, project: FusedQKV) -> _Heads:
        """Read a projection with one matrix, whose rows may be in any of its orders."""
        _check_methods(project, "_heads", "_run_steps")
        H, G, D = project.heads, project.groups, project.head_dim
        norm, rotary = self._steps(project.steps, D)
        whole = self._map(project.linear, (H + 2 * G) * D)
        R = H // G
        blocks = (HeadBlocks(0, R, R + 2), HeadBlocks(R, 1, R + 2), HeadBlocks(R + 1, 1, R + 2))
        if project.order == "parts":
            blocks = (HeadBlocks(0, H, H), HeadBlocks(H, G, G), HeadBlocks(H + G, G, G))
        return _Heads(
            H=H,
            G=G,
            D=D,
            E=D,
            q=whole,
            k=whole,
            v=whole,
            q_norm=norm,
            k_norm=norm,
            rotary=rotary,
            blocks=blocks,
            clip=float(project.limit) if isinstance(project, ClippedQKV) else 0.0,
        )

    def _flat(self, heads: HeadProjection) -> StepNorm | None:
        """Read the norm over all heads of queries or of keys."""
        if type(heads.flat) is nn.Identity:
            return None
        flat = _checked("the norm over all heads", heads.flat, RMSNorm, OffsetRMSNorm)
        return self._norm(flat, heads.heads * heads.head_dim)

    def _sink(self, attention: Attention, H: int) -> Tensor | None:
        """Read the sinks of an attention layer with H heads."""
        if attention.sink is None:
            return None
        sink = self._tensor(attention.sink, "the sink")
        if sink.shape != (H,):
            raise Unsupported("the sink has another size than the heads")
        return sink

    def _steps(
        self, modules: nn.ModuleList, head_dim: int
    ) -> tuple[StepNorm | None, Rotary | None]:
        """Read the steps on heads: a norm, a rotation, both in this order, or none."""
        steps = list(modules)
        norm = self._norm(steps.pop(0), head_dim) if steps and _is_norm(steps[0]) else None
        rotary: Rotary | None = None
        if steps and type(steps[0]) is Rotary:
            rotary = _checked("a step", steps.pop(0), Rotary)
        if steps:
            raise Unsupported(f"the heads have a step {type(steps[0]).__name__}")
        if rotary is not None and (rotary.follows_length or rotary.dim != head_dim):
            raise Unsupported("the rotary frequencies follow the length")
        return norm, rotary

    def _feed_forward(self, module: nn.Module) -> StepNetwork | StepMixture:
        """Read a feed-forward layer: one network, or a mixture of experts."""
        if plain_class(module) is not MoE:
            return self._network("the feed-forward layer", module, *_GATED, FeedForward)
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
        if len({x.up.weight.shape[0] for x in experts}) > 1:
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
            normalize=router.normalize,
            scale=float(router.scale),
            correction=self._correction(router),
            groups=(0, 0, 0) if groups is None else (groups.count, groups.topk, groups.best),
            shared=None if shared is None else self._network("the shared expert", shared),
            shared_gate=shared_gate,
        )

    def _network(self, name: str, module: nn.Module, *allowed: type[nn.Module]) -> StepNetwork:
        """Read the maps and the activation of a network; by default one with a gate."""
        network: Any = _checked(name, module, *(allowed or _GATED))
        if isinstance(network, FeedForward):
            F = network.up.out_features
            activation = _activation(network.activation)
            return StepNetwork(
                None, self._map(network.up, F), self._map(network.down, self.width, F), activation
            )
        F = network.gate.out_features
        gate, up = self._map(network.gate, F), self._map(network.up, F)
        down = self._map(network.down, self.width, F)
        if isinstance(network, ClippedSwiGLU):
            limit, alpha = float(network.limit), float(network.alpha)
            return StepNetwork(gate, up, down, "clipped_silu", limit, alpha)
        return StepNetwork(gate, up, down, _activation(network.activation, GATED_ACTIVATIONS))

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

    def _residual(
        self, residual: nn.Module, *allowed: type[Residual]
    ) -> tuple[StepNorm | None, StepNorm | None]:
        """Read a residual connection: the norms before and after, or the factor."""
        residual = _checked("the residual connection", residual, *(allowed or _RESIDUALS))
        if residual.dropout.p and residual.training:
            raise Unsupported("the residual connection has dropout in training mode")
        norm = self._norm(residual.norm)
        if type(residual) is OutputNorm:
            return None, norm
        if isinstance(residual, ScaledPreNorm):
            return norm, StepNorm(None, 0.0, float(residual.scale), kind="scale")
        return norm, self._norm(residual.after) if isinstance(residual, SandwichNorm) else None

    def _norm(self, norm: nn.Module, size: int | None = None) -> StepNorm:
        """Read a norm of the model dim, or of another size."""
        norm = _checked("a norm", norm, RMSNorm, OffsetRMSNorm, nn.LayerNorm, OffsetLayerNorm)
        expected = (self.width if size is None else size,)
        if isinstance(norm, nn.LayerNorm):
            return self._layer_norm(norm, expected)
        rms = cast("RMSNorm", norm)
        weight = self._tensor(rms._parameters.get("weight"), "the weight of a norm")
        if weight.shape != expected:
            raise Unsupported("a norm has another size than its input")
        return StepNorm(weight, float(rms.eps), 1.0 if type(rms) is OffsetRMSNorm else 0.0)

    def _layer_norm(self, norm: nn.LayerNorm, expected: tuple[int]) -> StepNorm:
        """Read a LayerNorm, which may have neither weight nor bias."""
        if tuple(norm.normalized_shape) != expected:
            raise Unsupported("a norm has another size than its input")
        parts: list[Tensor | None] = []
        for name in ("weight", "bias"):
            stored = norm._parameters.get(name)
            if stored is None and name in norm._parameters:
                parts.append(None)
                continue
            part = self._tensor(stored, f"the {name} of a norm")
            if part.shape != expected:
                raise Unsupported("a norm has another size than its input")
            parts.append(part)
        offset = 1.0 if type(norm) is OffsetLayerNorm else 0.0
        return StepNorm(parts[0], float(norm.eps), offset, parts[1], "layer")

    def _map(
        self,
        linear: nn.Module,
        N: int | None = None,
        M: int | None = None,
        allowed: Sequence[type[nn.Linear]] = (nn.Linear, Linear),
    ) -> StepMap:
        """Read a linear map from M to N; from the model dim, or to any size, by default."""
        linear = _checked("a linear map", linear, *allowed)
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
    if (reason := why_not_as_written(module)) is not None:
        raise Unsupported(reason)


def _check_methods(module: nn.Module, *names: str) -> None:
    """Raise if a method of a module was replaced."""
    for name in names:
        if name in module.__dict__:
            raise Unsupported(f"the {name} of a {type(module).__name__} was replaced")


def _checked(name: str, module: object, *allowed: type[Part]) -> Part:
    """Return a module whose class is exactly one of these: a subclass may differ."""
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
    """Return the parameter `weight` or its record; None where it is computed when read."""
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


def _clip(*flat: nn.Module) -> float:
    """Return the limit to which queries, keys and values are clipped; 0 if they are not."""
    limits = {float(x.limit) if type(x) is Clip else 0.0 for x in flat}
    if limits == {0.0}:
        _checked("the norm over all heads of values", flat[2], nn.Identity)
    elif len(limits) > 1:
        raise Unsupported("queries, keys and values are clipped to different limits")
    return float(limits.pop())


def _activation(module: nn.Module, allowed: Sequence[str] = ACTIVATIONS) -> str:
    """Return the name of an activation among those of `regard.ops.decode_step` in `allowed`."""
    name = _ACTIVATION_NAMES.get(type(module))
    if type(module) is nn.GELU:
        name = "gelu_tanh" if getattr(module, "approximate", None) == "tanh" else "gelu"
    if name is None or name not in allowed:
        raise Unsupported(f"the activation is {module}")
    return name


_ACTIVATION_NAMES = {nn.SiLU: "silu", nn.ReLU: "relu", ReLUSquared: "relu_squared"}
