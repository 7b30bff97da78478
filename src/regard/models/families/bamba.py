"""Bamba: Mamba-2 in most layers and attention in a few, each with a SwiGLU.

Source: IBM, Princeton, CMU and UIUC 2024, "Bamba: Inference-Efficient Hybrid Mamba2 Model"; key
names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.state_space_hybrids import BambaConfig
from regard.models.assembly import llama_like, state_space
from regard.models.checkpoint.family import NameTable
from regard.models.decoder import Decoder
from regard.nn import Block, PreNorm, SwiGLU
from regard.nn.mixer import Mixer
from regard.positions import Rotary

Config = BambaConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""

    def block(mixer: Mixer) -> Block:
        feed_forward = SwiGLU(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
        return Block(mixer, feed_forward, *(PreNorm(llama_like.norm(config)) for _ in range(2)))

    def attention(rotary: Rotary | None, window: int | None) -> Block:
        bias, output_bias = config.biases
        return block(
            llama_like.attention(config, rotary, window, bias=bias, output_bias=output_bias)
        )

    layer = state_space.by_kind(config, attention, lambda: block(state_space.hybrid_mixer(config)))
    return llama_like.decoder(config, layer)


NAMES: NameTable = {
    **state_space.NORMS_AND_ENDS,
    **state_space.hybrid_names(llama_like.ATTENTION),
    **state_space.FEED_FORWARD,
}
FAMILY = state_space.family(Config, build, NAMES)
