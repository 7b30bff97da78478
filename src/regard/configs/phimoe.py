"""`PhimoeConfig`: the keys of the config.json of Phi-3.5-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import ClassVar

from regard.argument_checks import check_number
from regard.configs.base import Raw, layer_windows
from regard.configs.layer_norm_decoders import LayerNormDecoderConfig
from regard.configs.llama import check_experts
from regard.configs.rope import RopeSettings
from regard.cost.model import DenseSpec, FeedForwardSpec, ModelSpec, MoESpec
from regard.cost.spec import ParameterCounts
from regard.errors import ArgumentError

ROPES = ("rope_scaling", "rope_parameters")
MSCALES = ("short_mscale", "long_mscale")


@dataclass(frozen=True)
class PhimoeConfig(LayerNormDecoderConfig):
    """The keys of Phi-3.5-MoE: LayerNorms, and two experts for each token, whose weights are each a
    softmax over the experts with nearly the same score.

    Attributes:
        router_jitter_noise: the tolerance of that softmax. It acts in inference, too.

    Raises:
        ArgumentError: as in `LayerNormDecoderConfig`; there are fewer than two experts, the
            tolerance is below 0, or the two factors of LongRoPE differ or are missing.
    """

    rms_norm_eps: float = 1e-5  # of LayerNorms, in spite of its name
    rope_theta: float = 1000000.0
    max_position_embeddings: int = 131072
    original_max_position_embeddings: int | None = None
    sliding_window: int | None = None
    num_local_experts: int = field(kw_only=True)
    router_jitter_noise: float = 0.01
    attention_bias: bool = False
    lm_head_bias: bool = False

    model_types: ClassVar[tuple[str, ...]] = ("phimoe",)
    code: ClassVar[str | None] = "PhiMoE"
    ignored: ClassVar[frozenset[str]] = frozenset({"input_jitter_noise"})  # in training only
    fixed: ClassVar[Mapping[str, tuple[object, ...]]] = {
        "hidden_act": ("silu",),
        "num_experts_per_tok": (2,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_experts("num_local_experts", self.num_local_experts, 2)
        noise = self.router_jitter_noise
        check_number("router_jitter_noise", noise, -1e-300, float("inf"), "at least 0")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for other decoders; the two factors of LongRoPE, which only this
        family has, stay in rope_scaling.
        """
        factors: dict[str, object] = {}
        keys = dict(raw)
        for name in ROPES:
            if isinstance(scaling := keys.get(name), Mapping):
                factors |= {key: scaling[key] for key in MSCALES if key in scaling}
                keys[name] = {key: x for key, x in scaling.items() if key not in MSCALES}
        keys = super().normalize_keys(keys)
        scaling = keys.get("rope_scaling")
        if isinstance(scaling, Mapping):
            keys["rope_scaling"] = {**scaling, **factors}
        return keys

    @property
    def eps(self) -> float:
        """The eps of the norms."""
        return self.rms_norm_eps

    @property
    def rope(self) -> RopeSettings:
        """The rotary settings, in which the two factors of LongRoPE are its `attention_factor`."""
        settings, scaling = super().rope, dict(self.rope_scaling or {})
        if not scaling:
            return settings
        short, long = (scaling.pop(key, None) for key in MSCALES)
        if scaling.get("rope_type") != "longrope" or short is None or short != long:
            raise ArgumentError(
                f"rope_scaling has rope_type {scaling.get('rope_type')!r}, short_mscale {short!r} "
                f"and long_mscale {long!r}; phimoe supports longrope with two equal factors, or no "
                "scaling"
            )
        scaling["attention_factor"] = short
        original = self.original_max_position_embeddings
        return settings._replace(scaling=scaling, original=original)

    @property
    def biases(self) -> tuple[bool, bool]:
        """Whether queries, keys and values have biases, and whether the output map has one."""
        return self.attention_bias, self.attention_bias

    def windows(self) -> tuple[int | None, ...]:
        """Return the same window for all layers, or None for all."""
        return layer_windows(self.num_hidden_layers, sliding_window=self.sliding_window)

    def feed_forward(self) -> FeedForwardSpec:
        """Return the sizes of a mixture of experts, of which each token uses two."""
        expert = DenseSpec(self.hidden_size, self.intermediate_size)
        return MoESpec(expert, self.num_local_experts, 2)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder; biases of the head count as biases."""
        model = super().sizes(name)
        head = ParameterCounts(biases=self.vocab_size if self.lm_head_bias else 0)
        return replace(model, norms=model.norms + head)
