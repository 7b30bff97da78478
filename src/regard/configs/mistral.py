"""The configs of Mistral, Ministral 3 and Mixtral."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import ClassVar

from regard.configs.base import Raw
from regard.configs.rope import temperature
from regard.configs.rotary_decoder import (
    DecoderRecipe,
    Experts,
    GroupedQueryConfig,
    language_model,
)
from regard.errors import ArgumentError


@dataclass(frozen=True)
class MistralConfig(GroupedQueryConfig):
    """Mistral: Llama, in the first version with a sliding window in every layer. Source: Jiang et
    al. 2023 (arXiv 2310.06825).
    """

    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

    model_types: ClassVar[tuple[str, ...]] = ("mistral",)


BETA = "llama_4_scaling_beta"
LANGUAGES = ("ministral3", "mistral")
"""The language models of `mistral3`, which also reads images; `Mistral4Config` reads a third."""
PICTURES = frozenset(
    {
        "image_token_index",
        "image_token_id",
        "multimodal_projector_bias",
        "projector_hidden_act",
        "spatial_merge_size",
        "text_config",
        "vision_config",
        "vision_feature_layer",
    }
)
"""Keys of a model that also reads images."""
YARN: Mapping[str, object] = {
    "rope_type": "yarn",
    "rope_theta": 1000000.0,
    "factor": 16.0,
    "original_max_position_embeddings": 16384,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale_all_dim": 1.0,
    "mscale": 1.0,
    BETA: 0.1,
}
"""The rotary settings of a Ministral 3 whose config.json has none."""


@dataclass(frozen=True)
class Ministral3Config(MistralConfig):
    """Ministral 3: Mistral without a window, whose queries have a temperature that grows with the
    position. It also reads Mistral Small 3.1 and 3.2, without that temperature. Source: Mistral AI
    2025, "Introducing Mistral 3".
    """

    sliding_window: int | None = None
    max_position_embeddings: int = 262144
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1000000.0

    model_types = ("ministral3", "mistral3")
    recipe = DecoderRecipe(temperature="temperature")
    towers = "vision_tower multi_modal_projector"
    rope_keys = (BETA, "max_position_embeddings")
    absent_rope = YARN

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys of the language model."""
        if raw.get("model_type") == "mistral3":
            raw = language_model(raw, PICTURES)
            if (kind := raw.get("model_type")) not in LANGUAGES:
                raise ArgumentError(
                    f"text_config.model_type is {kind!r}; of mistral3, only the language models "
                    f"{', '.join(LANGUAGES)} and mistral4 are supported"
                )
            if kind == "mistral":
                raw = {"sliding_window": MistralConfig.sliding_window, **raw}
                if raw.get("rope_scaling") is None and raw.get("rope_parameters") is None:
                    raw["rope_scaling"] = {"rope_type": "default"}
        return super().normalize_keys(raw)

    @property
    def temperature(self) -> tuple[float, float] | None:
        """The factor and the length of the temperature; None without that factor."""
        return temperature(self.rope_scaling)


MIXTRAL_EXPERTS = Experts("num_local_experts", stored="block_sparse_moe", parts=("w1", "w3", "w2"))
"""A mixture of experts under the names of the makers' code."""


@dataclass(frozen=True)
class MixtralConfig(MistralConfig):
    """Mixtral: Mistral whose feed-forward layers are mixtures of experts. Source: Jiang et al. 2024
    (arXiv 2401.04088).
    """

    rms_norm_eps: float = 1e-5
    rope_theta: float = 1000000.0
    sliding_window: int | None = None
    num_local_experts: int = field(kw_only=True)
    num_experts_per_tok: int = field(kw_only=True)

    model_types = ("mixtral",)
    recipe = DecoderRecipe(experts=MIXTRAL_EXPERTS)
