"""The configs of Mistral, Ministral 3 and Mixtral."""

from __future__ import annotations

from dataclasses import dataclass, field

from regard.configs.rotary_decoder import DecoderRecipe, Experts, GroupedQueryConfig


@dataclass(frozen=True)
class MistralConfig(GroupedQueryConfig):
    """Mistral: Llama, in the first version with a sliding window in every layer. Source: Jiang et
    al. 2023 (arXiv 2310.06825).
    """

    max_position_embeddings: int = 131072
    sliding_window: int | None = 4096

    model_types = ("mistral",)


@dataclass(frozen=True)
class Ministral3Config(MistralConfig):
    """Ministral 3, which has no window unless one is given."""

    sliding_window: int | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 1000000.0

    model_types = ("ministral3",)


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
