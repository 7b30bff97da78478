"""Build a `Spec` from the name and the options of a mechanism in the catalogue, and the sizes of a
decoder from the flags of `regard cost`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from regard.argument_checks import check_value_heads, divisors
from regard.cost import decayed_state, delta_rules, factored, fixed_state
from regard.cost.fixed_state import InfiniSpec
from regard.cost.head_parts import HEAD_PARTS
from regard.cost.latent import Form, LatentSpec
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


_HEAD_OPTIONS = frozenset({"groups", "head_dim", "value_dim", "value_heads"})


def _of_sizes(build: Callable[..., Spec], required: str = "", optional: str = "") -> SpecBuilder:
    """Return the builder that calls `build(M, H, **options)`; names are separated by spaces."""
    needed, others = frozenset(required.split()), frozenset(optional.split())

    def spec(dim: int, heads: int, options: MechanismOptions) -> Spec:
        return build(dim, heads, **{k: options[k] for k in options.keys() & (needed | others)})

    return SpecBuilder(spec, needed, others)


def _of_heads(
    build: Callable[..., Spec],
    required: str = "",
    optional: str = "",
    *,
    groups: int | None = None,
    value_factor: int = 1,
    head_dim_divisor: int = 1,
) -> SpecBuilder:
    """Return the builder that calls `build(M, shape, **other options)`; G is `groups` or H."""

    def of_sizes(dim: int, heads: int, **options: Any) -> Spec:
        sizes = {k: v for k, v in options.items() if k in _HEAD_OPTIONS}
        own = {k: v for k, v in options.items() if k not in _HEAD_OPTIONS}
        shape = _head_shape(
            dim,
            heads,
            {"groups": groups or heads, **sizes},
            value_factor=value_factor,
            head_dim_divisor=head_dim_divisor,
        )
        return build(dim, shape, **own)

    return _of_sizes(of_sizes, required, optional)


def _latent(dim: int, heads: int, *, form: Form = "auto", **sizes: Any) -> Spec:
    if form not in ("auto", "expand", "absorb"):
        raise ArgumentError(f"form is {form!r}; it must be auto, expand or absorb")
    return LatentSpec.of(dim, heads, **sizes, form=form)


def _tensor_products(dim: int, shape: HeadShape, *, rank: int = 2, q_rank: int = 6) -> Spec:
    return factored.FactoredSpec.of_sizes(
        dim, shape.heads, shape.head_dim, q_rank=q_rank, ranks=(rank, rank)
    )


def _short_convolution(dim: int, heads: int, *, kernel: int = 3) -> Spec:  # noqa: ARG001
    return delta_rules.short_convolution(dim, kernel)


def _mamba2(
    dim: int,
    heads: int,
    *,
    groups: int = 1,
    head_dim: int = 128,
    value_dim: int | None = None,
    kernel: int = 4,
) -> Spec:
    if value_dim is None:
        if 2 * dim % heads:
            raise ArgumentError(
                f"2 dim is {2 * dim}; it must be divisible by heads = {heads}, or give value_dim"
            )
        value_dim = 2 * dim // heads
    check_value_heads(groups, groups, heads)
    return decayed_state.mamba2(dim, heads, value_dim, groups, head_dim, kernel)


def _rwkv7(dim: int, heads: int, options: MechanismOptions) -> Spec:
    ranks = (
        options.get("rank", 64),
        options.get("value_rank", 32),
        options.get("gate_rank", 128),
    )
    is_first = options.get("layer", 0) == 0
    return delta_rules.rwkv7(dim, _head_shape(dim, heads, options), ranks=ranks, is_first=is_first)


def _mamba(
    dim: int,
    heads: int,  # noqa: ARG001
    *,
    inner: int | None = None,
    state: int = 16,
    kernel: int = 4,
    rank: int | None = None,
) -> Spec:
    return decayed_state.mamba(dim, inner or 2 * dim, state, kernel, rank or -(-dim // 16))


def _value_residual(dim: int, heads: int, options: MechanismOptions) -> Spec:
    spec = SoftmaxSpec.of(dim, _head_shape(dim, heads, options), window=options.get("window"))
    share = ParameterCounts(biases=0 if options.get("layer", 0) == 0 else 1)
    return replace(spec, weights=spec.weights + share)


def _narrow_kernel(
    features: Callable[[int], int], *, norms: int = 0
) -> Callable[[int, int, MechanismOptions], Spec]:
    """Return the function for Based and ReBased: D is 16 and E is M / H by default; `norms` is for
    each of the H D channels.
    """

    def spec(dim: int, heads: int, options: MechanismOptions) -> Spec:
        E = _head_shape(dim, heads, {}).head_dim if "value_dim" not in options else 1
        shape = _head_shape(dim, heads, {"head_dim": 16, "value_dim": E, **options})
        D = shape.head_dim
        return decayed_state.kernel_attention(dim, shape, features(D), norms=norms * heads * D)

    return spec


def _power(dim: int, shape: HeadShape, *, power: int = 2) -> Spec:
    features = math.comb(shape.head_dim + power - 1, power)
    return decayed_state.kernel_attention(dim, shape, features)


def _performer(dim: int, shape: HeadShape, *, features: int = 256) -> Spec:
    return decayed_state.kernel_attention(dim, shape, features)


def _cosformer(dim: int, shape: HeadShape) -> Spec:
    return decayed_state.kernel_attention(dim, shape, 2 * shape.head_dim)


_ALL_HEAD_OPTIONS = " ".join(_HEAD_OPTIONS)
_LATENT_SIZES = "kv_rank nope_dim rope_dim value_dim"
MECHANISMS: dict[str, SpecBuilder] = {
    "mha": _of_heads(SoftmaxSpec.of, "", "head_dim window"),
    "gqa": _of_heads(SoftmaxSpec.of, "groups", "head_dim window"),
    "mqa": _of_heads(SoftmaxSpec.of, "", "head_dim window", groups=1),
    "sliding_window": _of_heads(SoftmaxSpec.of, "groups window", "head_dim"),
    "mla": _of_sizes(_latent, _LATENT_SIZES, "q_rank form"),
    "tpa": _of_heads(_tensor_products, "", "head_dim rank q_rank"),
    "mfa": _of_sizes(factored.low_rank_query, "q_rank head_dim"),
    "gta": _of_heads(factored.TiedSpec.of_heads, "groups", "head_dim"),
    "grouped_latent": _of_sizes(
        partial(factored.GroupedLatentSpec.of_sizes, latents=2), _LATENT_SIZES, "latents q_rank"
    ),
    "mlra": _of_sizes(
        partial(factored.GroupedLatentSpec.of_sizes, latents=4, branches=4),
        _LATENT_SIZES,
        "latents q_rank branches",
    ),
    "linear_attention": _of_heads(fixed_state.linear_attention, "", _ALL_HEAD_OPTIONS),
    "retention": _of_heads(fixed_state.retention, "", _ALL_HEAD_OPTIONS, value_factor=2),
    "gated_linear": _of_heads(
        fixed_state.gated_linear,
        "",
        f"{_ALL_HEAD_OPTIONS} rank",
        value_factor=2,
        head_dim_divisor=2,
    ),
    "delta_net": _of_heads(fixed_state.delta_net, "", _ALL_HEAD_OPTIONS),
    "gated_delta_net": _of_heads(delta_rules.gated_delta_net, "", f"{_ALL_HEAD_OPTIONS} kernel"),
    "kimi_delta": _of_heads(
        delta_rules.kimi_delta, "", "head_dim value_dim value_heads kernel rank"
    ),
    "gated_delta_2": _of_heads(
        delta_rules.gated_delta_2, "", "head_dim value_dim value_heads kernel rank"
    ),
    "comba": _of_heads(delta_rules.comba, "", "head_dim value_dim value_heads kernel"),
    "delta_product": _of_heads(
        delta_rules.delta_product, "", "head_dim value_dim value_heads kernel writes"
    ),
    "preconditioned_delta": _of_heads(
        delta_rules.preconditioned_delta, "", "head_dim value_dim kernel rank"
    ),
    "mesa": _of_heads(delta_rules.mesa, "", "head_dim value_dim kernel"),
    "titans_linear": _of_heads(delta_rules.titans_linear, "", "head_dim value_dim kernel"),
    "short_convolution": _of_sizes(_short_convolution, "", "kernel"),
    "lightning": _of_heads(decayed_state.lightning, "", "head_dim"),
    "hgrn2": _of_heads(decayed_state.hgrn2, "", "head_dim value_dim"),
    "lightnet": _of_heads(decayed_state.lightnet, "", "head_dim value_dim"),
    "mamba2": _of_sizes(_mamba2, "", "groups head_dim value_dim kernel"),
    "rwkv4": _of_heads(decayed_state.rwkv4, "", "head_dim"),
    "rwkv6": _of_heads(decayed_state.rwkv6, "", "head_dim rank"),
    "rwkv7": SpecBuilder(
        _rwkv7, optional=frozenset({"head_dim", "rank", "value_rank", "gate_rank"})
    ),
    "mamba": _of_sizes(_mamba, "", "inner state kernel rank"),
    "value_residual": SpecBuilder(
        _value_residual, frozenset({"groups"}), frozenset({"head_dim", "window"})
    ),
    "mlstm": _of_heads(
        decayed_state.mlstm, "", "head_dim value_dim", value_factor=2, head_dim_divisor=2
    ),
    "gsa": _of_heads(decayed_state.slots, "", "groups head_dim slots"),
    "abc": _of_heads(partial(decayed_state.slots, summed=True), "", "groups head_dim slots"),
    "based": SpecBuilder(
        _narrow_kernel(lambda D: 1 + D + D * (D + 1) // 2),
        optional=frozenset({"groups", "head_dim", "value_dim"}),
    ),
    "rebased": SpecBuilder(
        _narrow_kernel(lambda D: D * (D + 1) // 2, norms=4),
        optional=frozenset({"head_dim", "value_dim"}),
    ),
    "power_attention": _of_heads(_power, "", "groups head_dim value_dim power"),
    "performer": _of_heads(_performer, "", "groups head_dim value_dim features"),
    "cosformer": _of_heads(_cosformer, "", "groups head_dim value_dim"),
    "infini": _of_heads(InfiniSpec.of, "", "groups head_dim segment"),
    "infini_delta": _of_heads(partial(InfiniSpec.of, delta=True), "", "groups head_dim segment"),
    "nsa": _of_heads(NSASpec.of, "groups", "head_dim compress stride select count window"),
    **{
        name: _of_heads(build, "", "groups head_dim", groups=1)
        if name == "shared_kv"
        else _of_heads(build, "groups", "head_dim")
        for name, build in HEAD_PARTS.items()
    },
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
