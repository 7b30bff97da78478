"""Build a `Spec` from the name and the options of a mechanism in the catalogue, and the sizes of a
decoder from the flags of `regard cost`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from regard.argument_checks import check_value_heads, divisors
from regard.cost import decayed_state, delta_rules, factored, fixed_state, state_space
from regard.cost.fixed_state import InfiniSpec
from regard.cost.head_parts import HEAD_PARTS, HeadParts
from regard.cost.latent import LatentSpec
from regard.cost.model import DenseSpec, FeedForwardSpec, LayerSpec, ModelSpec, MoESpec
from regard.cost.selected import NSASpec
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape, ParameterCounts, Spec
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.units import plural
from regard.untrusted_text import short_repr

OPTIONS_WITHOUT_COST = frozenset(
    {"base", "scaling", "empty", "feature_map", "dropout", "temperature", "most", "normalize_keys"}
    | {"lower_bound", "max_beta", "share"}
    | {"layer", "layers", "lower_bound", "gate_cap", "seed", "period"}
)
"""Options of the catalogue that do not change the cost."""
MAX_SIZE = 1 << 40
"""The largest size that is accepted; no model has a larger one."""
MechanismOptions = Mapping[str, Any]


@dataclass(frozen=True)
class SpecBuilder:
    """A function of M, H and options that builds a mechanism's spec, and its options."""

    build: Callable[[int, int, MechanismOptions], Spec]
    required: frozenset[str] = frozenset()
    optional: frozenset[str] = frozenset()


def _head_shape(
    dim: int,
    heads: int,
    options: MechanismOptions,
    *,
    value_factor: int = 1,
    head_dim_divisor: int = 1,
) -> HeadShape:
    """Return H, G, D and E; by default, D is M / (H `head_dim_divisor`) and E D `value_factor`."""
    groups, D = options.get("groups", heads), options.get("head_dim")
    if heads % groups:
        allowed = ", ".join(map(str, divisors(heads)))
        raise ArgumentError(
            f"the number of query heads, {heads}, is not divisible by the number of key/value "
            f"heads, {groups}; give one of {allowed}",
            argument="kv_heads",
        )
    if D is None:
        if dim % (head_dim_divisor * heads):
            raise ArgumentError(
                f"dim {dim} is not divisible by {head_dim_divisor * heads}, which is needed for "
                f"{plural(heads, 'head')} of equal width; give head_dim",
                argument="heads",
            )
        D = dim // (head_dim_divisor * heads)
    value_heads = options.get("value_heads")
    if value_heads is not None:
        check_value_heads(heads, groups, value_heads)
    return HeadShape(heads, groups, D, options.get("value_dim", value_factor * D), value_heads)


def _softmax(dim: int, heads: int, options: MechanismOptions) -> Spec:
    return SoftmaxSpec.of(dim, _head_shape(dim, heads, options), window=options.get("window"))


def _mqa(dim: int, heads: int, options: MechanismOptions) -> Spec:
    return _softmax(dim, heads, {**options, "groups": 1})


def _latent(dim: int, heads: int, options: MechanismOptions) -> Spec:
    form = options.get("form", "auto")
    if form not in ("auto", "expand", "absorb"):
        raise ArgumentError(f"form is {form!r}; it must be auto, expand or absorb")
    sizes = {name: options[name] for name in ("kv_rank", "nope_dim", "rope_dim", "value_dim")}
    return LatentSpec.of(dim, heads, **sizes, q_rank=options.get("q_rank"), form=form)


def _tensor_products(dim: int, heads: int, options: MechanismOptions) -> Spec:
    D, rank = _head_shape(dim, heads, options).head_dim, options.get("rank", 2)
    q_rank = options.get("q_rank", 6)
    return factored.FactoredSpec.of_sizes(dim, heads, D, q_rank=q_rank, ranks=(rank, rank))


def _low_rank_query(dim: int, heads: int, options: MechanismOptions) -> Spec:
    return factored.low_rank_query(dim, heads, options["head_dim"], options["q_rank"])


def _tied(dim: int, heads: int, options: MechanismOptions) -> Spec:
    shape = _head_shape(dim, heads, options)
    return factored.TiedSpec.of_sizes(dim, heads, shape.groups, shape.head_dim)


def _latent_groups(*, latents: int, branches: int) -> SpecBuilder:
    """Return the builder of attention with several latents; the arguments are its defaults."""
    required = frozenset({"kv_rank", "nope_dim", "rope_dim", "value_dim"})

    def build(dim: int, heads: int, options: MechanismOptions) -> Spec:
        sizes = {name: options[name] for name in required}
        n, b = options.get("latents", latents), options.get("branches", branches)
        return factored.GroupedLatentSpec.of_sizes(
            dim, heads, n, **sizes, q_rank=options.get("q_rank"), branches=b
        )

    own = {"latents", "q_rank"} | ({"branches"} if branches > 1 else set())
    return SpecBuilder(build, required, frozenset(own))


def _nsa(dim: int, heads: int, options: MechanismOptions) -> Spec:
    blocks = ("compress", "stride", "select", "count", "window")
    own = {name: options[name] for name in blocks if name in options}
    return NSASpec.of(dim, _head_shape(dim, heads, options), **own)


def _linear_attention(dim: int, heads: int, options: MechanismOptions) -> Spec:
    return fixed_state.linear_attention(dim, _head_shape(dim, heads, options))


def _retention(dim: int, heads: int, options: MechanismOptions) -> Spec:
    return fixed_state.retention(dim, _head_shape(dim, heads, options, value_factor=2))


def _gated_linear(dim: int, heads: int, options: MechanismOptions) -> Spec:
    shape = _head_shape(dim, heads, options, value_factor=2, head_dim_divisor=2)
    return fixed_state.gated_linear(dim, shape, options.get("rank", 16))


def _delta_net(dim: int, heads: int, options: MechanismOptions) -> Spec:
    return fixed_state.delta_net(dim, _head_shape(dim, heads, options))


def _gated_delta_net(dim: int, heads: int, options: MechanismOptions) -> Spec:
    shape = _head_shape(dim, heads, options)
    if (kernel := options.get("kernel")) is not None:
        return state_space.convolved_gated_delta_net(dim, shape, kernel)
    return fixed_state.gated_delta_net(dim, shape)


def _convolved(
    build: Callable[[int, HeadShape, int], Spec], *, value_heads: bool = False
) -> SpecBuilder:
    """A mechanism with a short convolution over its queries, keys and values."""

    def build_spec(dim: int, heads: int, options: MechanismOptions) -> Spec:
        return build(dim, _head_shape(dim, heads, options), options.get("kernel", 4))

    return SpecBuilder(
        build_spec, optional=_CONVOLVED | ({"value_heads"} if value_heads else set())
    )


def _with_channel_gates(
    build: Callable[[int, HeadShape, int, int], Spec], *, value_heads: bool = False
) -> SpecBuilder:
    """A mechanism with a short convolution, and gates per channel through a bottleneck."""

    def build_spec(dim: int, heads: int, options: MechanismOptions) -> Spec:
        shape = _head_shape(dim, heads, options)
        rank = options.get("rank", shape.head_dim)
        return build(dim, shape, options.get("kernel", 4), rank)

    optional = _CONVOLVED | {"rank"} | ({"value_heads"} if value_heads else set())
    return SpecBuilder(build_spec, optional=optional)


def _delta_product(dim: int, heads: int, options: MechanismOptions) -> Spec:
    shape = _head_shape(dim, heads, options)
    kernel, writes = options.get("kernel", 4), options.get("writes", 2)
    return delta_rules.delta_product(dim, shape, kernel, writes)


def _short_convolution(dim: int, heads: int, options: MechanismOptions) -> Spec:  # noqa: ARG001
    return delta_rules.short_convolution(dim, options.get("kernel", 3))


def _lightning(dim: int, heads: int, options: MechanismOptions) -> Spec:
    return decayed_state.lightning(dim, _head_shape(dim, heads, options))


def _hgrn2(dim: int, heads: int, options: MechanismOptions) -> Spec:
    return decayed_state.hgrn2(dim, _head_shape(dim, heads, options))


def _lightnet(dim: int, heads: int, options: MechanismOptions) -> Spec:
    return decayed_state.lightnet(dim, _head_shape(dim, heads, options))


def _mamba2(dim: int, heads: int, options: MechanismOptions) -> Spec:
    G, D = options.get("groups", 1), options.get("head_dim", 128)
    E = options.get("value_dim")
    if E is None:
        if 2 * dim % heads:
            raise ArgumentError(
                f"2 dim is {2 * dim}; it must be divisible by heads = {heads}, or give value_dim"
            )
        E = 2 * dim // heads
    check_value_heads(G, G, heads)
    shape = HeadShape(G, G, D, E, heads)
    return decayed_state.mamba2(dim, shape, options.get("kernel", 4))


def _rwkv4(dim: int, heads: int, options: MechanismOptions) -> Spec:
    return decayed_state.rwkv4(dim, _head_shape(dim, heads, options))


def _rwkv6(dim: int, heads: int, options: MechanismOptions) -> Spec:
    return decayed_state.rwkv6(dim, _head_shape(dim, heads, options), options.get("rank", 64))


def _rwkv7(dim: int, heads: int, options: MechanismOptions) -> Spec:
    ranks = (
        options.get("rank", 64),
        options.get("value_rank", 32),
        options.get("gate_rank", 128),
    )
    is_first = options.get("layer", 0) == 0
    return delta_rules.rwkv7(dim, _head_shape(dim, heads, options), ranks=ranks, is_first=is_first)


def _mamba(dim: int, heads: int, options: MechanismOptions) -> Spec:  # noqa: ARG001
    inner = options.get("inner", 2 * dim)
    rank = options.get("rank", -(-dim // 16))
    return state_space.mamba(dim, inner, options.get("state", 16), options.get("kernel", 4), rank)


def _value_residual(dim: int, heads: int, options: MechanismOptions) -> Spec:
    spec = SoftmaxSpec.of(dim, _head_shape(dim, heads, options), window=options.get("window"))
    share = ParameterCounts(biases=0 if options.get("layer", 0) == 0 else 1)
    return replace(spec, weights=spec.weights + share)


def _mlstm(dim: int, heads: int, options: MechanismOptions) -> Spec:
    shape = _head_shape(dim, heads, options, value_factor=2, head_dim_divisor=2)
    return decayed_state.mlstm(dim, shape)


def _slots(*, summed: bool) -> SpecBuilder:
    def build(dim: int, heads: int, options: MechanismOptions) -> Spec:
        count = options.get("slots", 64)
        return decayed_state.slots(dim, _head_shape(dim, heads, options), count, summed=summed)

    return SpecBuilder(build, optional=frozenset({"groups", "head_dim", "slots"}))


def _narrow_kernel(dim: int, heads: int, options: MechanismOptions) -> HeadShape:
    """Return the heads of Based and ReBased: D is 16 and E is M / H by default."""
    E = _head_shape(dim, heads, {}).head_dim if "value_dim" not in options else 1
    return _head_shape(dim, heads, {"head_dim": 16, "value_dim": E, **options})


def _based(dim: int, heads: int, options: MechanismOptions) -> Spec:
    shape = _narrow_kernel(dim, heads, options)
    D = shape.head_dim
    return decayed_state.kernel_attention(dim, shape, 1 + D + D * (D + 1) // 2)


def _rebased(dim: int, heads: int, options: MechanismOptions) -> Spec:
    shape = _narrow_kernel(dim, heads, options)
    D = shape.head_dim
    return decayed_state.kernel_attention(dim, shape, D * (D + 1) // 2, norms=4 * heads * D)


def _power(dim: int, heads: int, options: MechanismOptions) -> Spec:
    shape, power = _head_shape(dim, heads, options), options.get("power", 2)
    features = math.comb(shape.head_dim + power - 1, power)
    return decayed_state.kernel_attention(dim, shape, features)


def _performer(dim: int, heads: int, options: MechanismOptions) -> Spec:
    shape = _head_shape(dim, heads, options)
    return decayed_state.kernel_attention(dim, shape, options.get("features", 256))


def _cosformer(dim: int, heads: int, options: MechanismOptions) -> Spec:
    shape = _head_shape(dim, heads, options)
    return decayed_state.kernel_attention(dim, shape, 2 * shape.head_dim)


def _infini(*, delta: bool) -> SpecBuilder:
    def build(dim: int, heads: int, options: MechanismOptions) -> Spec:
        segment = options.get("segment", 2048)
        return InfiniSpec.of(dim, _head_shape(dim, heads, options), segment, delta=delta)

    return SpecBuilder(build, optional=frozenset({"groups", "head_dim", "segment"}))


_CONVOLVED = frozenset({"head_dim", "value_dim", "kernel"})


def _head_parts(build: HeadParts, *, shared: bool = False) -> SpecBuilder:
    """Return the builder of a mechanism of `HEAD_PARTS`; `shared` vectors are 1 by default."""

    def spec(dim: int, heads: int, options: MechanismOptions) -> Spec:
        default = {"groups": 1} if shared else {}
        return build(dim, _head_shape(dim, heads, {**default, **options}))

    sizes = frozenset({"head_dim"})
    if shared:
        return SpecBuilder(spec, optional=sizes | {"groups"})
    return SpecBuilder(spec, frozenset({"groups"}), sizes)


_SIZES = frozenset({"groups", "head_dim", "value_dim", "value_heads"})
MECHANISMS: dict[str, SpecBuilder] = {
    "mha": SpecBuilder(_softmax, optional=frozenset({"head_dim", "window"})),
    "gqa": SpecBuilder(_softmax, frozenset({"groups"}), frozenset({"head_dim", "window"})),
    "mqa": SpecBuilder(_mqa, optional=frozenset({"head_dim", "window"})),
    "sliding_window": SpecBuilder(
        _softmax, frozenset({"groups", "window"}), frozenset({"head_dim"})
    ),
    "mla": SpecBuilder(
        _latent,
        frozenset({"kv_rank", "nope_dim", "rope_dim", "value_dim"}),
        frozenset({"q_rank", "form"}),
    ),
    "tpa": SpecBuilder(_tensor_products, optional=frozenset({"head_dim", "rank", "q_rank"})),
    "mfa": SpecBuilder(_low_rank_query, frozenset({"q_rank", "head_dim"})),
    "gta": SpecBuilder(_tied, frozenset({"groups"}), frozenset({"head_dim"})),
    "grouped_latent": _latent_groups(latents=2, branches=1),
    "mlra": _latent_groups(latents=4, branches=4),
    "linear_attention": SpecBuilder(_linear_attention, optional=_SIZES),
    "retention": SpecBuilder(_retention, optional=_SIZES),
    "gated_linear": SpecBuilder(_gated_linear, optional=_SIZES | {"rank"}),
    "delta_net": SpecBuilder(_delta_net, optional=_SIZES),
    "gated_delta_net": SpecBuilder(_gated_delta_net, optional=_SIZES | {"kernel"}),
    "kimi_delta": _with_channel_gates(delta_rules.kimi_delta, value_heads=True),
    "gated_delta_2": _with_channel_gates(delta_rules.gated_delta_2, value_heads=True),
    "comba": _convolved(delta_rules.comba, value_heads=True),
    "delta_product": SpecBuilder(_delta_product, optional=_CONVOLVED | {"value_heads", "writes"}),
    "preconditioned_delta": _with_channel_gates(delta_rules.preconditioned_delta),
    "mesa": _convolved(delta_rules.mesa),
    "titans_linear": _convolved(delta_rules.titans_linear),
    "short_convolution": SpecBuilder(_short_convolution, optional=frozenset({"kernel"})),
    "lightning": SpecBuilder(_lightning, optional=frozenset({"head_dim"})),
    "hgrn2": SpecBuilder(_hgrn2, optional=frozenset({"head_dim", "value_dim"})),
    "lightnet": SpecBuilder(_lightnet, optional=frozenset({"head_dim", "value_dim"})),
    "mamba2": SpecBuilder(
        _mamba2, optional=frozenset({"groups", "head_dim", "value_dim", "kernel"})
    ),
    "rwkv4": SpecBuilder(_rwkv4, optional=frozenset({"head_dim"})),
    "rwkv6": SpecBuilder(_rwkv6, optional=frozenset({"head_dim", "rank"})),
    "rwkv7": SpecBuilder(
        _rwkv7, optional=frozenset({"head_dim", "rank", "value_rank", "gate_rank"})
    ),
    "mamba": SpecBuilder(_mamba, optional=frozenset({"inner", "state", "kernel", "rank"})),
    "value_residual": SpecBuilder(
        _value_residual, frozenset({"groups"}), frozenset({"head_dim", "window"})
    ),
    "mlstm": SpecBuilder(_mlstm, optional=frozenset({"head_dim", "value_dim"})),
    "gsa": _slots(summed=False),
    "abc": _slots(summed=True),
    "based": SpecBuilder(_based, optional=frozenset({"groups", "head_dim", "value_dim"})),
    "rebased": SpecBuilder(_rebased, optional=frozenset({"head_dim", "value_dim"})),
    "power_attention": SpecBuilder(
        _power, optional=frozenset({"groups", "head_dim", "value_dim", "power"})
    ),
    "performer": SpecBuilder(
        _performer, optional=frozenset({"groups", "head_dim", "value_dim", "features"})
    ),
    "cosformer": SpecBuilder(_cosformer, optional=frozenset({"groups", "head_dim", "value_dim"})),
    "infini": _infini(delta=False),
    "infini_delta": _infini(delta=True),
    "nsa": SpecBuilder(
        _nsa,
        frozenset({"groups"}),
        frozenset({"head_dim", "compress", "stride", "select", "count", "window"}),
    ),
    **{name: _head_parts(build, shared=name == "shared_kv") for name, build in HEAD_PARTS.items()},
}
"""The mechanisms that can be counted, by their names in the catalogue."""


def mechanism_spec(name: str, dim: int, heads: int, options: MechanismOptions) -> Spec:
    """Return the spec of one layer of a mechanism."""
    if name not in MECHANISMS:
        hint = suggest(name, MECHANISMS, cutoff=0.5, otherwise=".")
        raise ArgumentError(
            f"the cost of attention {short_repr(name)} cannot be counted{hint} It can for "
            f"{', '.join(MECHANISMS)}; regard describe NAME prints the cost of one layer of any "
            "mechanism",
            argument="attention",
        )
    builder, given_options = MECHANISMS[name], {k: v for k, v in options.items() if v is not None}
    if missing := sorted(builder.required - given_options.keys()):
        raise ArgumentError(
            f"attention {name!r} needs a value for {', '.join(missing)}; give it",
            argument="attention",
        )
    if extra := sorted(
        given_options.keys() - builder.required - builder.optional - OPTIONS_WITHOUT_COST
    ):
        takes = ", ".join(sorted(builder.required | builder.optional))
        raise ArgumentError(
            f"attention {name!r} has no option {', '.join(extra)}; its options are {takes}; leave "
            "out the others, or choose another mechanism",
            argument="option",
        )
    for key, value in given_options.items():
        if (
            key not in OPTIONS_WITHOUT_COST
            and key != "form"
            and not (isinstance(value, int) and 1 <= value <= MAX_SIZE)
        ):
            raise ArgumentError(
                f"{key} is {short_repr(value)}; it must be an integer of at least 1 and at most "
                f"{MAX_SIZE}",
                argument=key,
            )
    return builder.build(dim, heads, given_options)


MECHANISMS_WITH_WINDOW = tuple(
    name for name, builder in MECHANISMS.items() if "window" in builder.optional and name != "nsa"
)
"""Mechanisms whose layers may alternate between a window and full attention."""


@dataclass(frozen=True)
class Sizes:
    """The sizes of a decoder, given one by one.

    Attributes:
        dim: M, the width of the model.
        attention: a name in `MECHANISMS`; None is MHA, GQA or MQA, according to the number of
            key/value heads.
        options: options of the mechanism: groups, head_dim, window, kv_rank and so on.
        global_every: with a window, every n-th layer has full attention.
        ff: F, the hidden width of the feed-forward layers; None is 4 M.
        experts: the number of experts; None is a dense model.
        expert_ff: the hidden width of an expert; None is `ff`.
    """

    layers: int
    dim: int
    heads: int
    attention: str | None = None
    options: dict[str, object] = field(default_factory=dict)
    global_every: int | None = None
    ff: int | None = None
    gated: bool = True
    vocab: int = 32000
    tied: bool = False
    experts: int | None = None
    active: int | None = None
    expert_ff: int | None = None
    shared: int | None = None
    dense_layers: int | None = None

    def __post_init__(self) -> None:
        for name in (
            "layers",
            "dim",
            "heads",
            "vocab",
            "ff",
            "experts",
            "active",
            "expert_ff",
            "shared",
            "global_every",
        ):
            value = getattr(self, name)
            if value is not None and value < 1:
                raise ArgumentError(f"{name} is {value}; it must be at least 1")
        if self.dense_layers is not None and self.dense_layers < 0:
            raise ArgumentError(
                f"dense_layers is {self.dense_layers}; it must be at least 0",
                argument="dense_layers",
            )
        if self.global_every is not None and self.options.get("window") is None:
            raise ArgumentError("--global-every needs a window: give --window too")
        if (self.experts is None) != (self.active is None):
            raise ArgumentError("--experts and --active belong together: give both, or neither")
        if self.experts is None and any((self.expert_ff, self.shared, self.dense_layers)):
            raise ArgumentError(
                "--expert-ff, --shared and --dense-layers need experts: give --experts and "
                "--active too"
            )
        if self.experts is not None and self.active is not None and self.active > self.experts:
            raise ArgumentError(
                f"--active is {self.active}, but --experts is {self.experts}; a token cannot use "
                "more experts than there are; give a smaller --active"
            )

    def model(self, name: str = "flags") -> ModelSpec:
        """Return the model of these sizes."""
        windowed_spec = self._spec(self.options)
        full_spec = windowed_spec
        if self.global_every is not None:
            full_spec = self._spec({**self.options, "window": None})
        norms, layers = ParameterCounts(norms=2 * self.dim), []
        for i in range(self.layers):
            is_global = self.global_every is not None and (i + 1) % self.global_every == 0
            layers.append(
                LayerSpec(full_spec if is_global else windowed_spec, self._feed_forward(i), norms)
            )
        return ModelSpec(
            name,
            self.vocab,
            self.dim,
            tuple(layers),
            norms=ParameterCounts(norms=self.dim),
            tied=self.tied,
        )

    def _spec(self, options: dict[str, object]) -> Spec:
        mechanism = self.attention
        if mechanism is None:
            groups = options.get("groups")
            mechanism = "mha" if groups in (None, self.heads) else "gqa"
            options = {k: v for k, v in options.items() if k != "groups" or mechanism == "gqa"}
        if self.global_every is not None and mechanism not in MECHANISMS_WITH_WINDOW:
            raise ArgumentError(
                f"--global-every needs one of {', '.join(MECHANISMS_WITH_WINDOW)}; --attention is "
                f"{mechanism!r}: choose one of these, or leave --global-every out"
            )
        return mechanism_spec(mechanism, self.dim, self.heads, options)

    def _feed_forward(self, layer: int) -> FeedForwardSpec:
        ff = 4 * self.dim if self.ff is None else self.ff
        if self.experts is None or self.active is None or layer < (self.dense_layers or 0):
            return DenseSpec(self.dim, ff, self.gated)
        width = self.expert_ff or ff
        shared = (
            None if self.shared is None else DenseSpec(self.dim, width * self.shared, self.gated)
        )
        return MoESpec(DenseSpec(self.dim, width, self.gated), self.experts, self.active, shared)
