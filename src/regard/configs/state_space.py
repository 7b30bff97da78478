"""The config of Mamba-2, and what the configs of models with Mamba-2 layers share: the sizes of a
layer, and the limits of its step sizes.

Source of the keys: Hugging Face checkpoints, and transformers' configuration classes.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, TypeAlias

from regard.argument_checks import check_number
from regard.configs.base import ModelConfig, Raw, check_sizes
from regard.cost.fixed_state import LinearSpec
from regard.cost.model import LayerSpec, ModelSpec
from regard.cost.spec import ParameterCounts
from regard.cost.state_space import mamba2
from regard.errors import ArgumentError
from regard.files.strict_json import INFINITY
from regard.units import plural

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
    """Return the limits of step sizes as two numbers.

    >>> step_limits(NO_LIMITS)
    (0.0, inf)
    """
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
    """The sizes of a layer of Mamba-2.

    Attributes:
        dim: M, the width of the model.
        heads, head_dim: the number of value heads N and their width E.
        groups, state: the number of query and key heads G (of C and B), and their width D.
        kernel: the number of tokens of the convolution.
        bias, output_bias, conv_bias: whether the input map, the output map and the convolution
            have biases.
        normed: whether the output is normalised.

    >>> Mamba2Sizes(4096, 128, 64, 1, 128, 4).spec().state.value  # a layer of Granite 4.0 H Small
    1073920
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


@dataclass(frozen=True)
class Mamba2Config(ModelConfig):
    """The keys of Mamba-2.

    Raises:
        ArgumentError: a size is less than 1, num_heads heads of head_dim are not expand times as
            wide as the model, n_groups does not divide num_heads, or a limit is not possible.
    """

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_heads: int
    head_dim: int = 64
    expand: int = 2
    state_size: int = 128
    n_groups: int = 8
    conv_kernel: int = 4
    use_bias: bool = False
    use_conv_bias: bool = True
    layer_norm_epsilon: float = 1e-5
    residual_in_fp32: bool = True
    time_step_limit: StepLimits = NO_LIMITS
    tie_word_embeddings: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("mamba2",)
    # the released code applies the gate before the norm whatever norm_before_gate says
    ignored: ClassVar[frozenset[str]] = STEP_KEYS | {
        "chunk_size",
        "norm_before_gate",
        "rescale_prenorm_residual",
    }
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "rms_norm": (True,),
    }

    def __post_init__(self) -> None:
        check_sizes(self)
        check_number("layer_norm_epsilon", self.layer_norm_epsilon, -1e-300, math.inf, "at least 0")
        step_limits(self.time_step_limit)
        sizes = self.mixer_sizes()
        sizes.check("num_heads", "n_groups")
        check_width(self.expand, self.hidden_size, sizes, "expand, num_heads and head_dim")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys; without time_step_limit there is none."""
        return with_step_limits(raw)

    def mixer_sizes(self) -> Mamba2Sizes:
        """Return the sizes of a layer."""
        return Mamba2Sizes(
            self.hidden_size,
            self.num_heads,
            self.head_dim,
            self.n_groups,
            self.state_size,
            self.conv_kernel,
            bias=self.use_bias,
            output_bias=self.use_bias,
            conv_bias=self.use_conv_bias,
        )

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder."""
        M = self.hidden_size
        layer = LayerSpec(self.mixer_sizes().spec(), None, ParameterCounts(norms=M))
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (layer,) * self.num_hidden_layers,
            norms=ParameterCounts(norms=M),
            tied=self.tie_word_embeddings,
        )


def with_step_limits(raw: Raw) -> dict[str, Any]:
    """Return the keys without a time_step_limit that is null, which is none.

    >>> with_step_limits({"time_step_limit": None})
    {}
    """
    return {k: v for k, v in raw.items() if k != "time_step_limit" or v is not None}
