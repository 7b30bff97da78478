"""The configs of Falcon and Falcon-H1."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

from regard.argument_checks import check_groups, resolve_head_dim
from regard.configs.base import Raw
from regard.configs.hybrid import Mamba2Keys, Mamba2Sizes
from regard.configs.layer_norm import LayerNormConfig, LayerNormRecipe
from regard.configs.llama import LlamaConfig
from regard.configs.rope import RopeSettings, normalize_rope
from regard.configs.rotary_decoder import SILU
from regard.cost.model import ModelSpec
from regard.errors import ArgumentError
from regard.units import plural


@dataclass(frozen=True)
class FalconConfig(LayerNormConfig):
    """The keys of Falcon: parallel sublayers, and one key and value for all query heads (7B) or for
    groups of them (40B, 180B, 11B).
    """

    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_kv_heads: int | None = None
    ffn_hidden_size: int | None = None
    layer_norm_epsilon: float = 1e-5
    activation: str = "gelu"
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, object] | None = None
    max_position_embeddings: int = 2048
    bias: bool = False
    multi_query: bool = True
    new_decoder_architecture: bool = False
    num_ln_in_parallel_attn: int | None = None
    tie_word_embeddings: bool = True

    model_types = ("falcon",)
    family_file = "falcon"
    renamed = {
        "n_head": "num_attention_heads",
        "n_layer": "num_hidden_layers",
        "n_head_kv": "num_kv_heads",
    }
    recipe = LayerNormRecipe(
        activation="activation",
        width="ffn_hidden_size",
        rows="groups",
        qkv_bias="bias",
        output_bias="bias",
        ff_bias="bias",
    )
    code = "Falcon"
    ignored = frozenset({"ff_factor"})
    fixed = {
        "alibi": (False,),
        "apply_residual_connection_post_layernorm": (False,),
        "parallel_attn": (True,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        check_groups(self.num_attention_heads, self.groups)
        if self.num_ln_in_parallel_attn not in (None, 1, 2):
            raise ArgumentError(
                f"num_ln_in_parallel_attn is {self.num_ln_in_parallel_attn}; it must be 1 or 2"
            )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys under Falcon's present names; rotary settings may be nested."""
        return normalize_rope(super().normalize_keys(raw))

    @property
    def groups(self) -> int:
        """The key/value heads G: `num_kv_heads` only in the new architecture, else 1 or all."""
        if self.new_decoder_architecture and self.num_kv_heads is not None:
            return self.num_kv_heads
        alone = self.multi_query and not self.new_decoder_architecture
        return 1 if alone else self.num_attention_heads

    @property
    def parallel_norms(self) -> int:
        """The norms in front of parallel sublayers: 2 at most in the new architecture."""
        return (self.num_ln_in_parallel_attn or 2) if self.new_decoder_architecture else 1

    @property
    def rope(self) -> RopeSettings:
        """The settings of the rotary positions of every layer."""
        D = resolve_head_dim(self.hidden_size, self.num_attention_heads, None)
        return RopeSettings(D, self.rope_theta, self.rope_scaling, self.max_position_embeddings)


@dataclass(frozen=True)
class FalconH1Config(Mamba2Keys):
    """The keys of Falcon-H1: attention and Mamba-2 beside each other in every layer, with a factor
    on the result of most linear maps.
    """

    max_position_embeddings: int = 8192
    mamba_d_ssm: int | None = 1024
    mamba_norm_before_gate: bool = True
    mamba_rms_norm: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    projectors_bias: bool = False
    embedding_multiplier: float = 1.0
    lm_head_multiplier: float = 1.0
    attention_in_multiplier: float = 1.0
    attention_out_multiplier: float = 1.0
    key_multiplier: float = 1.0
    ssm_in_multiplier: float = 1.0
    ssm_out_multiplier: float = 1.0
    ssm_multipliers: tuple[float, ...] = (1.0,) * 5
    mlp_multipliers: tuple[float, ...] = (1.0,) * 2

    model_types = ("falcon_h1",)
    family_file = "falcon"
    recipe = replace(
        LlamaConfig.recipe,
        embedding_scale="embedding_multiplier",
        logit_scale="lm_head_multiplier",
        score_scale="score_scale",
    )
    ignored = Mamba2Keys.ignored | {"mlp_expansion_factor"}
    fixed = {
        **SILU,
        "attn_layer_indices": (None,),
        "mamba_use_mlp": (True,),
    }

    def __post_init__(self) -> None:
        super().__post_init__()
        for name, count in (("ssm_multipliers", 5), ("mlp_multipliers", 2)):
            if len(getattr(self, name)) != count:
                raise ArgumentError(
                    f"{name} has {plural(len(getattr(self, name)), 'number')}; it must have {count}"
                )

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys as for Llama and Mamba-2; a list of factors that is null is all 1."""
        lists = ("ssm_multipliers", "mlp_multipliers")
        return super().normalize_keys(
            {k: v for k, v in raw.items() if k not in lists or v is not None}
        )

    @classmethod
    def mixer_width(cls, keys: Raw) -> object:
        """Return mamba_d_ssm, or the width by mamba_expand if that is null."""
        width = keys.get("mamba_d_ssm", cls.mamba_d_ssm)
        return super().mixer_width(keys) if width is None else width

    def check_mixer_width(self) -> None:
        """Raise unless the heads are together as wide as mamba_d_ssm says."""
        if self.mamba_d_ssm is None:
            super().check_mixer_width()
        elif self.mamba_n_heads * self.mamba_d_head != self.mamba_d_ssm:
            raise ArgumentError(
                f"mamba_d_ssm is {self.mamba_d_ssm}, and {plural(self.mamba_n_heads, 'head')} of "
                f"{self.mamba_d_head} are {self.mamba_n_heads * self.mamba_d_head} channels; they "
                "must be equal"
            )

    def mixer_sizes(self) -> Mamba2Sizes:
        """Return the sizes of the Mamba-2 of a layer."""
        return replace(
            super().mixer_sizes(), output_bias=self.projectors_bias, normed=self.mamba_rms_norm
        )

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder, with both mechanisms in every layer."""
        model, state = super().sizes(name), self.mixer_sizes().spec()
        return replace(model, layers=tuple(replace(x, parallel=state) for x in model.layers))

    @property
    def score_scale(self) -> float:
        """The factor on the scores, with that on the keys."""
        return float(self.head_dim**-0.5 * self.key_multiplier)
