"""`DecoderReader`: a decoder as the fields of the compiled step, or the reason why not; only
exactly the known classes count, as a subclass may compute something else.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

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
from regard.nn.module_calls import why_not_as_written
from regard.nn.projections.fused import ClippedQKV
from regard.nn.projections.steps import Clip
from regard.nn.weights import Linear, plain_class
from regard.ops.cpu import arguments
from regard.ops.cpu.step import ACTIVATIONS, NORM_KINDS, Fields, StepLayer
from regard.ops.softmax.cpu import MAX_ROWS
from regard.ops.stored_linear import MAX_VECTORS as MAX_STORED_VECTORS
from regard.ops.stored_weights import StoredWeight
from regard.ops.tokenwise import MAX_VECTORS, MIN_WEIGHT_SIZE
from regard.positions import Rotary
from regard.units import plural

if TYPE_CHECKING:
    from regard.models.decoder import Decoder

Part = TypeVar("Part", bound=nn.Module)

_RESIDUALS: tuple[type[Residual], ...] = (PreNorm, SandwichNorm, OutputNorm, ScaledPreNorm)
_HEADS = (nn.Linear, Linear, CappedLogits, ScaledLogits)
_BLOCKS = (Block, ParallelBlock, SharedNormBlock)
_NORMS = (RMSNorm, OffsetRMSNorm, nn.LayerNorm, OffsetLayerNorm)
_NETWORKS = (GatedFeedForward, SwiGLU, ClippedSwiGLU, FeedForward)


class Unsupported(Exception):
    """The compiled step does not support a part of a decoder; the text says which and why."""


class DecoderReader:
    """Reads a decoder as the fields of the structs of `regard.ops.cpu.step`.

    Attributes:
        fields, layers: the fields of the model and of its layers.
        masks, rotaries: the different masks and rotary modules of the layers, to which the numbers
            in `StepLayer` refer.
        dtype, width, V: the dtype of the weights, the model dim, and the number of logits.
        cap: the cap on the logits; None: none.
        max_rows: the largest number of rows for which compiled code is faster than torch.
    """

    def __init__(self, decoder: Decoder) -> None:
        embedding = set(decoder.embed.modules())  # is called as a module in any case
        called = (x for x in decoder.modules() if x not in embedding)
        if (reason := why_not_as_written(*called)) is not None:
            raise Unsupported(reason)
        head: nn.Linear = _checked("the head", decoder.head, *_HEADS)
        self.cap = head.cap if isinstance(head, CappedLogits) else None
        self.dtype: torch.dtype
        self.width: int
        weight = _weight_of(head)
        if weight is None:
            raise Unsupported("the weight of the head is computed when it is read")
        self.dtype, (self.V, self.width) = weight.dtype, weight.shape
        self.max_rows = max(MAX_STORED_VECTORS, *MAX_VECTORS.values())
        if self.dtype not in MAX_VECTORS:
            raise Unsupported(f"the weights are {self.dtype}")
        norm = None if type(decoder.norm) is nn.Identity else self._norm(decoder.norm)
        scale = _factor(head.scale) if isinstance(head, ScaledLogits) else None
        head_map = self._map(head, allowed=_HEADS)
        self.fields: Fields = {"norm": norm, "scale": scale, "head_map": head_map}
        self.masks: list[Any] = []
        self.rotaries: list[Rotary] = []
        self._largest = 0
        self.layers = tuple(self._layer(i, layer) for i, layer in enumerate(decoder.layers))
        if not self.layers:
            raise Unsupported("there is no layer")
        if self._largest < MIN_WEIGHT_SIZE:
            raise Unsupported(
                f"its matrices have at most {plural(self._largest, 'element')}, so that there is "
                "little to gain"
            )

    def _layer(self, i: int, block: nn.Module) -> StepLayer:
        """Read one block, and add its number to the reason if it is not supported."""
        try:
            return self._read_layer(_checked("the layer", block, *_BLOCKS))
        except Unsupported as reason:
            raise Unsupported(f"layer {i}: {reason}") from None

    def _read_layer(self, block: Block) -> StepLayer:
        attention = _checked("the mechanism", block.attention, Attention)
        heads, rotary = self._heads(attention)
        (H, D), (G, own), (values, E) = ((heads[x]["n"], heads[x]["size"]) for x in "qkv")
        if (values, own) != (G, D) or H % G:
            raise Unsupported("queries, keys and values have other heads")
        if H // G > MAX_ROWS:
            raise Unsupported(f"more than {MAX_ROWS} query heads use one key/value head")
        scale, sink = attention.scale, attention.sink
        call = {
            "scale": float(attention._default_scale if scale is None else scale),
            "softcap": float(attention.softcap or 0.0),
            **_alibi(attention.bias, H),
        }
        network, experts = self._feed_forward(block.feed_forward)
        fields = {
            **heads,
            **self._paths(block),
            "parallel": type(block) is not Block,
            "out": self._map(attention.output, self.width, H * E),
            "sink": None if sink is None else self._tensor(sink, "the sink", (H,), "the heads"),
            "attention": call,
            "codes": call,
            ("mixture" if experts else "network"): network,
        }
        number = None if rotary is None else _index_of(rotary, self.rotaries)
        return StepLayer(fields, experts, _index_of(attention.mask, self.masks), number)

    # ---- norms

    def _paths(self, block: Block) -> dict[str, Fields | None]:
        """Read the residual connections of a block."""
        first, second = block.attention_residual, block.feed_forward_residual
        kinds = _RESIDUALS if type(block) is Block else (PreNorm,)
        if type(block) is SharedNormBlock:  # with one norm for both, the second path does nothing
            second = first
        before, after = self._residual(first, *kinds)
        ff_before, ff_after = self._residual(second, *kinds)
        return {"before": before, "after": after, "ff_before": ff_before, "ff_after": ff_after}

    def _residual(
        self, residual: nn.Module, *allowed: type[Residual]
    ) -> tuple[Fields | None, Fields | None]:
        """Read a residual connection: the norms before and after, or the factor."""
        residual = _checked("the residual connection", residual, *allowed)
        if residual.dropout.p and residual.training:
            raise Unsupported("the residual connection has dropout in training mode")
        norm = self._norm(residual.norm)
        if type(residual) is OutputNorm:
            return None, norm
        if isinstance(residual, ScaledPreNorm):
            return norm, _factor(residual.scale)
        return norm, self._norm(residual.after) if isinstance(residual, SandwichNorm) else None

    def _norm(self, norm: nn.Module, size: int | None = None) -> Fields:
        """Read a norm of the model dim, or of another size."""
        module: Any = _checked("a norm", norm, *_NORMS)
        kind = "layer" if isinstance(module, nn.LayerNorm) else "rms"
        expected = (self.width if size is None else size,)
        parts: dict[str, Tensor | None] = {"w": None, "b": None}
        for name, label in (("w", "weight"), ("b", "bias"))[: 1 + (kind == "layer")]:
            x = module._parameters.get(label)
            if kind == "rms" or x is not None or label not in module._parameters:
                parts[name] = self._tensor(x, f"the {label} of a norm", expected, "its input")
        if kind == "layer" and tuple(module.normalized_shape) != expected:
            raise Unsupported("a norm has another size than its input")
        offset = float(type(module) in (OffsetRMSNorm, OffsetLayerNorm))
        numbers = {"kind": NORM_KINDS.index(kind), "eps": float(module.eps), "offset": offset}
        return {**parts, **numbers}

    # ---- attention

    def _heads(self, attention: Attention) -> tuple[dict[str, Any], Rotary | None]:
        """Read the projection of an attention layer, and check the parts that must be plain."""
        if attention.score is not None:
            raise Unsupported("the attention has a score rule")
        if attention.mask is None:
            raise Unsupported("the attention has no mask")
        if attention.dropout and attention.training:
            raise Unsupported("the attention has dropout in training mode")
        project = _checked("the projection", attention.project, SeparateQKV, FusedQKV, ClippedQKV)
        if isinstance(project, FusedQKV):
            return self._fused(project)
        return self._separate(cast("SeparateQKV", project))

    def _separate(self, project: SeparateQKV) -> tuple[dict[str, Any], Rotary | None]:
        """Read a projection with a linear map for each of queries, keys and values."""
        if project.key_transform is not None or project.cache_unsafe_reason:
            raise Unsupported("the keys change when they are read")
        parts = {"q": project.q, "k": project.k, "v": project.v}
        for part in parts.values():
            _checked("a projection of heads", part, HeadProjection)
        clip = _clip(*(x.flat for x in parts.values()))
        fields: dict[str, Any] = {"clip": clip}
        rotaries = []
        for name, x in parts.items():
            n, size = x.heads, x.head_dim
            norm, rotary = self._steps(x.steps, size)
            rotaries.append(rotary)
            fields[name] = {"n": n, "size": size, "run": n, "norm": norm}
            fields[name]["map"] = self._map(x.linear, n * size)
            if not clip and type(x.flat) is not nn.Identity:
                flat = _checked("the norm over all heads", x.flat, RMSNorm, OffsetRMSNorm)
                fields[name]["flat"] = self._norm(flat, n * size)
        if rotaries[0] is not rotaries[1] or len(project.v.steps):
            raise Unsupported("queries, keys and values have other steps than a rotary")
        return fields, rotaries[0]

    def _fused(self, project: FusedQKV) -> tuple[dict[str, Any], Rotary | None]:
        """Read a projection with one matrix, whose rows may be in any of its orders."""
        H, G, D = project.heads, project.groups, project.head_dim
        norm, rotary = self._steps(project.steps, D)
        whole, R = self._map(project.linear, (H + 2 * G) * D), H // G
        # for queries, keys and values: `n`, `first`, `run` and `step` of the struct `StepHeads`
        places = ((H, 0, R, R + 2), (G, R, 1, R + 2), (G, R + 1, 1, R + 2))
        if project.order == "parts":
            places = ((H, 0, H, H), (G, H, G, G), (G, H + G, G, G))
        fields: dict[str, Any] = {}
        for name, place in zip("qkv", places, strict=True):
            numbers = dict(zip(("n", "first", "run", "step"), place, strict=True))
            own = None if name == "v" else norm
            fields[name] = {**numbers, "size": D, "map": whole, "norm": own}
        fields["clip"] = float(project.limit) if isinstance(project, ClippedQKV) else 0.0
        return fields, rotary

    def _steps(self, modules: nn.ModuleList, head_dim: int) -> tuple[Fields | None, Rotary | None]:
        """Read the steps on heads: a norm, a rotation, both in this order, or none."""
        steps, rotary = list(modules), None
        norm = None
        if steps and type(steps[0]) in (RMSNorm, OffsetRMSNorm):
            norm = self._norm(steps.pop(0), head_dim)
        if steps and type(steps[0]) is Rotary:
            rotary = _checked("a step", steps.pop(0), Rotary)
        if steps:
            raise Unsupported(f"the heads have a step {type(steps[0]).__name__}")
        if rotary is not None and (rotary.follows_length or rotary.dim != head_dim):
            raise Unsupported("the rotary frequencies follow the length")
        return norm, rotary

    # ---- networks

    def _feed_forward(self, module: nn.Module) -> tuple[Fields, tuple[Fields, ...]]:
        """Read a feed-forward layer: the fields of one network, or of a mixture and its experts."""
        if plain_class(module) is not MoE:
            return self._network("the feed-forward layer", module), ()
        mixture = cast("MoE", module)
        router: Any = _checked("the router", mixture.router, SoftmaxRouter, SigmoidRouter)
        n, k, groups = router.experts, router.k, router.groups
        if not 0 < k <= n == len(mixture.experts):
            raise Unsupported(
                f"the router chooses {k} of {n}, and there are "
                f"{plural(len(mixture.experts), 'expert')}"
            )
        experts = tuple(self._network("an expert", x) for x in mixture.experts)
        if len({x["F"] for x in experts}) > 1:
            raise Unsupported("experts have different numbers of hidden units")
        if groups is not None and (n % groups.count or groups.best > n // groups.count):
            raise Unsupported(f"{plural(n, 'expert')} cannot be in {groups}")
        shared: nn.Module | None = mixture.shared
        fields: dict[str, Any] = {"n": n, "k": k, "router": self._map(router.linear, n)}
        fields |= {"normalize": router.normalize, "scale": float(router.scale)}
        if groups is not None:
            fields |= {"groups": groups.count, "group_topk": groups.topk, "group_best": groups.best}
        if isinstance(router, SigmoidRouter):
            correction: Tensor | None = router._parameters.get("correction")
            wide = correction is not None and correction.dtype == torch.float32
            own = "the correction", (n,), "the experts", torch.float32 if wide else self.dtype
            correction = self._tensor(correction, *own)
            fields |= {"sigmoid": True, "correction": correction, "wide_correction": wide}
        if isinstance(shared, GatedSharedExpert):
            gated = _checked("the shared expert", shared, GatedSharedExpert)
            shared, fields["shared_weight"] = gated.expert, self._map(gated.gate, 1)
        if shared is not None:
            fields["shared"] = self._network("the shared expert", shared)
        return fields, experts

    def _network(self, name: str, module: nn.Module) -> Fields:
        """Read the maps and the activation of a network, with a gate or without."""
        network: Any = _checked(name, module, *_NETWORKS)
        F = network.up.out_features
        self._largest = max(self._largest, F * self.width)
        fields: dict[str, Any] = {"F": F, "up": self._map(network.up, F)}
        fields["down"] = self._map(network.down, self.width, F)
        if not isinstance(network, FeedForward):
            fields["gate"] = self._map(network.gate, F)
        if not isinstance(network, ClippedSwiGLU):
            return {**fields, "activation": _activation(network.activation)}
        if network.offset != 1:
            raise Unsupported(f"{network} adds {network.offset:g} to its linear half, not 1")
        if network.after:
            raise Unsupported(f"{network} clips its gate after the activation, not before")
        fields |= {"limit": float(network.limit), "alpha": float(network.alpha)}
        return {**fields, "activation": ACTIVATIONS.index("clipped_silu")}

    # ---- tensors

    def _map(
        self,
        linear: nn.Module,
        N: int | None = None,
        M: int | None = None,
        allowed: Sequence[type[nn.Linear]] = (nn.Linear, Linear),
    ) -> Fields:
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
        sizes = (weight.shape[0] if N is None else N, self.width if M is None else M)
        if tuple(weight.shape) != sizes:
            raise Unsupported("a linear map has another size than its input or output")
        bias: Tensor | None = linear._parameters["bias"]
        if bias is not None:
            bias = self._tensor(bias, "a bias", weight.shape[:1], "its linear map")
        return {"stored" if isinstance(weight, StoredWeight) else "w": weight, "b": bias}

    def _record(self, weight: StoredWeight) -> StoredWeight:
        """Check that compiled code can read a weight that is stored in fewer bits."""
        if weight.dtype != self.dtype:
            raise Unsupported(
                f"a weight that is stored as {weight.form} computes in {weight.dtype}; it must be "
                f"{self.dtype}, like the head"
            )
        weight = weight.map(Tensor.detach)  # its addresses are those of now
        if weight.matrix_struct is None:
            raise Unsupported(
                f"a tensor of a weight that is stored as {weight.form} is not plain, contiguous "
                "and on a CPU"
            )
        self.max_rows = min(self.max_rows, MAX_STORED_VECTORS)
        return weight

    def _tensor(
        self,
        x: Tensor | None,
        name: str,
        shape: Sequence[int] | None = None,
        other: str = "",
        dtype: torch.dtype | None = None,
    ) -> Tensor:
        """Return the memory of a parameter that compiled code can read, which stays where it is.

        Args:
            x, name: the parameter, and its name in an error.
            shape, other: the shape, and of what it is the size in an error; None: any.
            dtype: the dtype; None is that of the head.
        """
        if x is None:
            raise Unsupported(f"{name} is computed when it is read (a parametrization)")
        if type(x) not in (Tensor, nn.Parameter):
            raise Unsupported(f"{name} is {type(x).__name__}")
        is_readable = x.is_cpu and x.is_contiguous() and x.numel() > 0
        if x.dtype != (dtype or self.dtype) or not is_readable:
            raise Unsupported(
                f"{name} is {x.dtype} on {x.device}; it must be {self.dtype}, like the head, "
                "contiguous, and on a CPU"
            )
        if shape is not None and tuple(x.shape) != tuple(shape):
            raise Unsupported(f"{name} has another size than {other}")
        return x.detach()


def _factor(scale: float) -> Fields:
    """Return a factor in the place of a norm."""
    return {"kind": NORM_KINDS.index("scale"), "offset": float(scale)}


def _checked(name: str, module: object, *allowed: type[Part]) -> Part:
    """Return a module whose class is exactly one of these: a subclass may differ."""
    if not isinstance(module, nn.Module) or plain_class(module) not in allowed:
        raise Unsupported(f"{name} is {type(module).__name__}")
    return cast("Part", module)


def _alibi(bias: object, H: int) -> Fields:
    """Return the slopes of ALiBi, and whether it is symmetric; other biases are not supported."""
    if bias is None:
        return {"slopes": arguments.NO_SLOPES}
    if type(bias) is not ALiBi:
        raise Unsupported(f"the attention has a bias, {type(bias).__name__}")
    if isinstance(bias.slopes, Tensor):
        raise Unsupported("the slopes of ALiBi are a tensor, which may change")
    slopes = bias.slopes_on(torch.device("cpu"), torch.float32).detach().contiguous()
    if slopes.shape != (H,):
        raise Unsupported(f"ALiBi has {plural(len(slopes), 'slope')} for {plural(H, 'head')}")
    return {"slopes": slopes, "symmetric": bias.symmetric}


def _weight_of(linear: nn.Module) -> Tensor | StoredWeight | None:
    """Return the parameter `weight` or its record; None where it is computed when read."""
    if "weight" in linear._parameters:
        return linear._parameters["weight"]
    record = linear.__dict__.get("stored_weight")
    return record if isinstance(record, StoredWeight) else None


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


def _activation(module: nn.Module) -> int:
    """Return the number of an activation in `ACTIVATIONS`."""
    name = _ACTIVATION_NAMES.get(type(module))
    if type(module) is nn.GELU:
        name = "gelu_tanh" if getattr(module, "approximate", None) == "tanh" else "gelu"
    if name is None:
        raise Unsupported(f"the activation is {module}")
    return ACTIVATIONS.index(name)


_ACTIVATION_NAMES = {nn.SiLU: "silu", nn.ReLU: "relu", ReLUSquared: "relu_squared"}
