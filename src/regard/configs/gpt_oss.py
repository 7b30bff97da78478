"""The config of gpt-oss models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from regard.argument_checks import check_number
from regard.configs.base import Raw
from regard.configs.rope import normalize_rope
from regard.configs.rotary_decoder import DecoderRecipe, Experts, GroupedQueryConfig
from regard.cost.model import FeedForwardSpec, MoESpec
from regard.errors import ArgumentError

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
"""The rotary scaling of gpt-oss if config.json has none."""


@dataclass(frozen=True)
class GptOssConfig(GroupedQueryConfig):
    """The keys of gpt-oss: sinks, windows in every second layer, and mixtures of experts."""

    head_dim: int = 64
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    sliding_window: int | None = 128
    layer_types: tuple[str, ...] | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling: Mapping[str, object] | None = field(default_factory=lambda: dict(YARN))
    max_position_embeddings: int = 131072
    attention_bias: bool = True
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    model_types = ("gpt_oss",)
    family_file = "gpt_oss"
    recipe = DecoderRecipe(
        window_pattern=2,
        sinks=True,
        experts=Experts("num_local_experts"),
    )
    ignored = frozenset({"initial_context_length"})

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("swiglu_limit", "swiglu_alpha"):
            check_number(name, getattr(self, name), 0, float("inf"), "a finite number above 0")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with transformers' rotary scaling, also from experts_per_token."""
        keys = normalize_rope(raw)
        if keys["rope_scaling"] is None:
            scaling = raw.get("rope_scaling") or raw.get("rope_parameters")
            keys["rope_scaling"] = {"rope_type": "default"} if scaling else dict(YARN)
        old_value, new_value = keys.pop("experts_per_token", None), keys.get("num_experts_per_tok")
        if old_value is not None and new_value not in (None, old_value):
            raise ArgumentError(
                f"experts_per_token is {old_value} and num_experts_per_tok is {new_value}; they "
                "mean the same: keep one"
            )
        return keys if old_value is None else keys | {"num_experts_per_tok": old_value}

    def windows(self) -> tuple[int | None, ...]:
        """Return the windows of `layer_types`, or else one in layers 0, 2, 4, ..."""
        if self.layer_types is None and self.sliding_window is None:
            return (None,) * self.num_hidden_layers
        return super().windows()

    def feed_forward(self, layer: int) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts that have biases, as its router has."""
        experts = super().feed_forward(layer)
        assert isinstance(experts, MoESpec)
        with_bias = replace(experts.expert, bias=True)
        return replace(experts, expert=with_bias, router_bias=self.num_local_experts)
