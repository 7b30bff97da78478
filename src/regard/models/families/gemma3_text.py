"""Gemma 3, its text: a norm on each head in place of the cap, windows in five layers of six, and
two rotary bases.

A folder of the model that also sees pictures (`model_type` "gemma3") is read, too: its
`text_config`, and of its tensors those of the language model.

Source: Gemma Team 2025 (arXiv 2503.19786); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from regard.arguments import check_number
from regard.cost import layer_types
from regard.cost.layer_types import FULL, SLIDING
from regard.errors import ArgumentError
from regard.models.assembly import gemmas, grouped, rope
from regard.models.checkpoint.family import Family, Raw
from regard.models.decoder import Decoder
from regard.positions import Rotary

PATTERN = 6
"""Every sixth layer sees everything, unless config.json says otherwise."""
SIZES = {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4}
"""What a `text_config` leaves out where it is as here."""
PICTURES = {
    "text_config",
    "vision_config",
    "mm_tokens_per_image",
    "boi_token_index",
    "eoi_token_index",
    "image_token_index",
    "boi_token_id",
    "eoi_token_id",
    "image_token_id",
}
"""Keys of a model that also sees pictures."""


@dataclass(frozen=True)
class Config(gemmas.WindowedConfig):
    """The keys of a Gemma 3 config.json that shape the model.

    Raises:
        ArgumentError: rope_local_base_freq is not above 1; or as
            `regard.models.assembly.gemmas.WindowedConfig`.
    """

    max_position_embeddings: int = 131072
    rope_theta: float = 1000000.0
    rope_local_base_freq: float = 10000.0

    def __post_init__(self) -> None:
        super().__post_init__()
        base = self.rope_local_base_freq
        check_number("rope_local_base_freq", base, 1, float("inf"), "above 1")
        self.local_rotary()

    def local_rotary(self) -> Rotary:
        """The rotary positions of layers with a window; those of the others are `rotary`."""
        return rope.rotary(
            self.head_dim, self.rope_local_base_freq, None, self.max_position_embeddings
        )

    def windows(self) -> tuple[int | None, ...]:
        """What `layer_types` say, or a window in five layers of six."""
        return layer_types.windows(
            self.num_hidden_layers,
            sliding_window=self.sliding_window,
            layer_types=self.layer_types,
            sliding_window_pattern=PATTERN if self.layer_types is None else None,
        )


def plain(raw: Raw) -> dict[str, Any]:
    """One form for the rotary bases of both kinds of layers, and for which layers are of which
    kind.
    """
    if raw.get("model_type") == "gemma3":
        raw = _text(raw)
    found = rope.plain({"head_dim": 256, **raw}, layered=True)
    both = found.pop("rope_parameters")
    full, sliding = both[FULL], both[SLIDING]
    if sliding["rope_scaling"] is not None:
        raise ArgumentError(
            f"rope_parameters.{SLIDING} is scaled, {sliding['rope_scaling']}; only {FULL} may be "
            "in gemma3_text"
        )
    for key, value in (("rope_theta", full), ("rope_local_base_freq", sliding)):
        if "rope_theta" in value:
            found[key] = value["rope_theta"]
    found["rope_scaling"] = full["rope_scaling"]
    pattern, layers = found.pop("sliding_window_pattern", None), found.get("num_hidden_layers")
    if pattern is not None and isinstance(layers, int):
        given, width = found.get("layer_types"), found.get("sliding_window", Config.sliding_window)
        spans = layer_types.windows(
            layers, sliding_window=width, layer_types=given, sliding_window_pattern=pattern
        )
        found["layer_types"] = [FULL if span is None else SLIDING for span in spans]
    return found


def _text(raw: Raw) -> dict[str, Any]:
    """The config of the language model in that of one that also sees pictures."""
    text = raw.get("text_config")
    if not isinstance(text, Mapping):
        raise ArgumentError(
            f"text_config is {text!r}; a gemma3 has the language model's keys there"
        )
    rest = {key: value for key, value in raw.items() if key not in PICTURES}
    return SIZES | rest | dict(text)


def respell(name: str) -> str:
    """The name of a tensor of the language model, from a model that also sees pictures.

    >>> respell("language_model.model.norm.weight"), respell("model.language_model.norm.weight")
    ('model.norm.weight', 'model.norm.weight')
    """
    name = re.sub(r"^model\.language_model\.", "model.", name)
    return name.removeprefix("language_model.")


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    everywhere, local = config.rotary(), config.local_rotary()
    mixers = [
        gemmas.attention(
            config,
            everywhere if window is None else local,
            window,
            scale=config.query_pre_attn_scalar**-0.5,
            head_norms=True,
        )
        for window in config.windows()
    ]
    layers = [gemmas.sandwich(config, mixer) for mixer in mixers]
    return gemmas.decoder(config, layers, config.final_logit_softcapping)


FAMILY = Family(
    Config,
    build,
    gemmas.NAMES,
    ignored=frozenset({"_sliding_window_pattern"}),
    fixed={
        "attn_logit_softcapping": (None,),
        "hidden_act": ("gelu_pytorch_tanh",),
        "hidden_activation": ("gelu_pytorch_tanh",),
        "use_bidirectional_attention": (None, False),
    },
    plain=plain,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=(*grouped.BUFFERS, r"(model\.)?(vision_tower|multi_modal_projector)\..*"),
    respell=respell,
)
