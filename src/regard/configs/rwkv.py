"""The config of RWKV-4 models."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from regard.argument_checks import check_number
from regard.configs.base import ModelConfig, Raw
from regard.cost.decayed_state import channel_mix_spec, rwkv4_spec
from regard.cost.fixed_state import ShortConvolution
from regard.cost.model import LayerSpec, ModelSpec
from regard.cost.spec import HeadShape, ParameterCounts
from regard.errors import ArgumentError


@dataclass(frozen=True)
class RwkvConfig(ModelConfig):
    """The keys of RWKV-4, whose layers have a time mix and a channel mix."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    attention_hidden_size: int
    intermediate_size: int
    context_length: int = 1024
    layer_norm_epsilon: float = 1e-5
    rescale_every: int = 6
    tie_word_embeddings: bool = False

    model_types = ("rwkv",)
    family_file = "rwkv"
    renamed = {"max_position_embeddings": "context_length"}

    def __post_init__(self) -> None:
        for key, value in vars(self).items():
            if key != "rescale_every" and type(value) is int and value < 1:
                raise ArgumentError(f"{key} is {value}; it must be at least 1")
        check_number("layer_norm_epsilon", self.layer_norm_epsilon, -1e-300, math.inf, "at least 0")

    @classmethod
    def normalize_keys(cls, raw: Raw) -> dict[str, object]:
        """Return the keys with the two sizes that follow from hidden_size if they are not given."""
        keys = super().normalize_keys(raw)
        size = keys.get("hidden_size")
        if isinstance(size, int):
            for name, default in (("attention_hidden_size", size), ("intermediate_size", 4 * size)):
                if keys.get(name) is None:
                    keys[name] = default
        return keys

    def norm_eps(self, layer: int) -> float:
        """Return the epsilon of a layer's norms: larger where transformers halves the hidden states
        behind every `rescale_every`-th layer, which is the same result.
        """
        return self.layer_norm_epsilon * self._rescaled(layer)

    @property
    def last_norm_eps(self) -> float:
        """The epsilon of the last norm, for which the released code has a constant."""
        return 1e-5 * self._rescaled(self.num_hidden_layers)

    def _rescaled(self, layer: int) -> float:
        halved = layer // self.rescale_every if self.rescale_every > 0 else 0
        return float(4**halved)

    def sizes(self, name: str) -> ModelSpec:
        """Return the sizes of the decoder; the channel mix of a layer is its second mechanism."""
        M, A, F = self.hidden_size, self.attention_hidden_size, self.intermediate_size
        norm = ParameterCounts(norms=2 * M)
        shape = HeadShape(1, 1, A, A)
        time_mix = rwkv4_spec(ParameterCounts(4 * M * A, 3 * M + 2 * A), shape)
        time_mix = replace(time_mix, convolution=ShortConvolution(M, 2))
        channel_mix = channel_mix_spec(ParameterCounts(2 * M * F + M * M, 2 * M), M, F)
        layer = LayerSpec(time_mix, None, norm + norm, parallel=channel_mix)
        return ModelSpec(
            name,
            self.vocab_size,
            M,
            (layer,) * self.num_hidden_layers,
            norms=norm + norm,
            tied=self.tie_word_embeddings,
        )
