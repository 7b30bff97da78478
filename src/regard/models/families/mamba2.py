"""Mamba-2: layers of Mamba-2 without attention and without feed-forward layers.

Source: Dao and Gu 2024 (arXiv 2405.21060); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.state_space import Mamba2Config, step_limits
from regard.models.assembly import state_space
from regard.models.checkpoint.family import Family, NameTable
from regard.models.decoder import Decoder
from regard.nn import PreNorm, RMSNorm
from regard.nn.mixer_block import MixerBlock, NarrowingRMSNorm, WidePreNorm

Config = Mamba2Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, eps = config.hidden_size, config.layer_norm_epsilon
    residual = WidePreNorm if config.residual_in_fp32 else PreNorm
    last = NarrowingRMSNorm if config.residual_in_fp32 else RMSNorm
    layers = [
        MixerBlock(
            state_space.mixer(
                config.mixer_sizes(), eps=eps, step_limits=step_limits(config.time_step_limit)
            ),
            residual(RMSNorm(M, eps=eps)),
        )
        for _ in range(config.num_hidden_layers)
    ]
    return state_space.decoder(config, layers, last(M, eps=eps))


STORED, OURS = "backbone.layers.{}.", "layers.{}."
NAMES: NameTable = {
    "backbone.embeddings.weight": "embed.embedding.weight",
    "backbone.norm_f.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    STORED + "norm.weight": OURS + "attention_residual.norm.weight",
    **state_space.names(STORED + "mixer.", OURS + "attention."),
}


def rename_stored(name: str) -> str:
    """Return the present spelling of a name: the first checkpoints have `embedding`."""
    return name.replace("backbone.embedding.", "backbone.embeddings.")


FAMILY = Family(
    Config,
    build,
    NAMES,
    prefixes=("backbone.",),
    head="lm_head.weight",
    rename_stored=rename_stored,
    keep_float32=state_space.FLOAT32,
)
