"""Models that mix layers with softmax attention and layers with a state of fixed size: the kinds of
their layers, and the keys of Gated DeltaNet and of Mamba-2.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeAlias

from regard.configs.base import FULL, Raw, check_length
from regard.configs.rope import RopeSettings
from regard.configs.rotary_decoder import GroupedQueryConfig
from regard.cost.decayed_state import mamba2
from regard.cost.delta_rules import gated_delta_net
from regard.cost.fixed_state import LinearSpec
from regard.cost.spec import HeadShape, Spec
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.files.reading import INFINITY
from regard.units import plural

LINEAR = "linear_attention"
"""The kind of a layer with a state of fixed size, as transformers names it."""
LAYER_NAMES = {"attention": FULL, "mamba": LINEAR, FULL: FULL, LINEAR: LINEAR}
"""Name of a kind in config.json -> its name here."""
Names: TypeAlias = tuple[str, ...] | None


def named_kinds(names: Sequence[str], layers: int, key: str = "layer_types") -> tuple[str, ...]:
    """Return the kind of each layer from the names in config.json."""
    check_layer_names(key, names, layers, LAYER_NAMES)
    return tuple(LAYER_NAMES[name] for name in names)


def check_layer_names(
    key: str, names: Sequence[str], layers: int, allowed: Collection[str]
) -> None:
    """Check that every layer has a known name."""
    check_length(key, names, layers)
    for i, name in enumerate(names):
        if name not in allowed:
            raise ArgumentError(
                f"{key}[{i}] is {name!r}; supported are {', '.join(allowed)}"
                f"{suggest(name, allowed, cutoff=0.8)}"
            )


@dataclass(frozen=True)
class HybridConfig(GroupedQueryConfig):
    """A model whose layers are of two kinds, `full_attention` and `linear_attention`."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.kinds()

    def kinds(self) -> tuple[str, ...]:
        """Return the kinds of `layer_types`, or the usual ones without that key."""
        names = getattr(self, "layer_types", None)
        return self.usual_kinds() if names is None else named_kinds(names, self.num_hidden_layers)

    @abstractmethod
    def usual_kinds(self) -> tuple[str, ...]:
        """Return the kind of each layer where no key names them."""

    def ropes(self) -> tuple[RopeSettings | None, ...]:
        """Return the rotary settings of each layer with attention; None for the others."""
        return tuple(self.rope if kind == FULL else None for kind in self.kinds())

    @abstractmethod
    def recurrent(self) -> Spec:
        """Return the sizes of the mechanism of a layer with a state of fixed size."""

    def mixer(self, layer: int, window: int | None) -> Spec:
        """Return the sizes of the mechanism of a layer."""
        return self.attention(window) if self.kinds()[layer] == FULL else self.recurrent()


@dataclass(frozen=True)
class GatedDeltaConfig(HybridConfig):
    """The keys of layers of Gated DeltaNet between layers of attention."""

    linear_conv_kernel_dim: int = 4
    linear_key_head_dim: int = 128
    linear_value_head_dim: int = 128
    linear_num_key_heads: int = 16
    linear_num_value_heads: int = 32
    layer_types: Names = None

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of Gated DeltaNet."""
        keys = self.linear_num_key_heads
        D, E = self.linear_key_head_dim, self.linear_value_head_dim
        shape = HeadShape(keys, keys, D, E, self.linear_num_value_heads)
        return gated_delta_net(self.hidden_size, shape, self.linear_conv_kernel_dim)


StepLimits: TypeAlias = tuple[float | Mapping[str, object], ...]
"""The smallest and the largest step size, as config.json has them."""
NO_LIMITS: StepLimits = (0.0, INFINITY)
STEP_KEYS = frozenset(
    {
        "time_step_floor",
        "time_step_init_scheme",
        "time_step_max",
        "time_step_min",
        "time_step_rank",
        "time_step_scale",
    }
)
"""Keys of initial step sizes, which a checkpoint replaces. Mamba-2 has no rank of step sizes."""


def step_limits(stored: StepLimits, key: str = "time_step_limit") -> tuple[float, float]:
    """Return the limits of step sizes as two numbers."""
    numbers = [math.inf if x == INFINITY else x for x in stored]
    if len(numbers) == 2 and all(isinstance(x, (int, float)) for x in numbers):
        smallest, largest = (float(x) for x in numbers if isinstance(x, (int, float)))
        if 0 <= smallest <= largest:
            return smallest, largest
    raise ArgumentError(
        f"{key} is {list(stored)}; it must be two numbers, at least 0, the smaller one first"
    )


@dataclass(frozen=True)
class Mamba2Sizes:
    """The sizes of a layer of Mamba-2: M, N value heads of width E, G query and key heads (C and B)
    of width D, and the tokens of the convolution.
    """

    dim: int
    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int
    bias: bool = False
    output_bias: bool = False
    conv_bias: bool = True
    normed: bool = True

    def check(self, heads_key: str, groups_key: str) -> None:
        """Check that the groups divide the heads."""
        if self.heads % self.groups:
            raise ArgumentError(
                f"{groups_key} is {self.groups}; it must divide {heads_key}, which is {self.heads}"
            )

    def spec(self) -> LinearSpec:
        """Return the cost of the layer."""
        return mamba2(
            self.dim,
            self.heads,
            self.head_dim,
            self.groups,
            self.state,
            self.kernel,
            bias=self.bias,
            output_bias=self.output_bias,
            conv_bias=self.conv_bias,
            norm=self.normed,
        )


def check_width(expand: float, dim: int, sizes: Mamba2Sizes, names: str) -> None:
    """Check that the heads are together as wide as `expand` says."""
    if sizes.heads * sizes.head_dim != int(expand * dim):
        raise ArgumentError(
            f"{names}: {plural(sizes.heads, 'head')} of {sizes.head_dim} are "
            f"{sizes.heads * sizes.head_dim} channels, and {expand} times hidden_size {dim} is "
            f"{int(expand * dim)}; they must be equal"
        )


def with_step_limits(raw: Raw) -> dict[str, Any]:
    """Return the keys without a time_step_limit that is null, which is none."""
    return {k: v for k, v in raw.items() if k != "time_step_limit" or v is not None}


@dataclass(frozen=True)
class Mamba2Keys(GroupedQueryConfig):
    """The keys of the layers of Mamba-2 in Bamba, Granite 4.0 H and Falcon-H1."""

    rms_norm_eps: float = 1e-5
    mamba_n_heads: int = 128
    mamba_d_head: int = field(kw_only=True)
    mamba_n_groups: int = 1
    mamba_d_state: int = 256
    mamba_d_conv: int = 4
    mamba_expand: int = 2
    mamba_conv_bias: bool = True
    mamba_proj_bias: bool = False
    time_step_limit: StepLimits = NO_LIMITS

    ignored = frozenset({"mamba_chunk_size", "num_logits_to_keep"})

    def __post_init__(self) -> None:
        super().__post_init__()
        step_limits(self.time_step_limit)
        self.mixer_sizes().check("mamba_n_heads", "mamba_n_groups")
        self.check_mixer_width()

    def check_mixer_width(self) -> None:
        """Raise unless the heads are together mamba_expand times as wide as the model."""
        names = "mamba_expand, mamba_n_heads and mamba_d_head"
        check_width(self.mamba_expand, self.hidden_size, self.mixer_sizes(), names)

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama; a mamba_d_head of "auto" follows from the width."""
        keys = super().normalize_keys(with_step_limits(raw))
        heads = keys.get("mamba_n_heads", cls.mamba_n_heads)
        width = cls.mixer_width(keys)
        if keys.get("mamba_d_head") in (None, "auto"):
            keys.pop("mamba_d_head", None)
            if isinstance(heads, int) and isinstance(width, int) and heads > 0:
                keys["mamba_d_head"] = width // heads
        return keys

    @classmethod
    def mixer_width(cls, keys: Raw) -> object:
        """Return the width of a layer of Mamba-2, from the keys of config.json."""
        expand, dim = keys.get("mamba_expand", cls.mamba_expand), keys.get("hidden_size")
        return expand * dim if isinstance(expand, int) and isinstance(dim, int) else None

    def mixer_sizes(self) -> Mamba2Sizes:
        """Return the sizes of a layer of Mamba-2."""
        return Mamba2Sizes(
            self.hidden_size,
            self.mamba_n_heads,
            self.mamba_d_head,
            self.mamba_n_groups,
            self.mamba_d_state,
            self.mamba_d_conv,
            bias=self.mamba_proj_bias,
            output_bias=self.mamba_proj_bias,
            conv_bias=self.mamba_conv_bias,
        )

    def recurrent(self) -> Spec:
        """Return the sizes of a layer of Mamba-2."""
        return self.mixer_sizes().spec()
