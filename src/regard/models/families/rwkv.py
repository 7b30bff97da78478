"""RWKV-4: a decayed mean of the values in each channel, then a feed-forward layer that reads the
token before. Source: Peng et al. 2023 (arXiv 2305.13048).
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import replace

from torch import nn

from regard.configs.base import Raw
from regard.configs.rwkv import RwkvConfig
from regard.models.assembly.building_blocks import embedding_and_head, initialize_weights
from regard.models.checkpoint.family import Family, NameTable, reshaped, weight_and_bias
from regard.models.decoder import Decoder
from regard.nn import HeadProjection, InputEmbedding, PreNorm, Recurrent
from regard.nn.recurrence.decays import RWKV4Rule
from regard.nn.recurrence.projections import TokenShiftQKV
from regard.nn.recurrence.rwkv import ChannelMix, TwoMixerBlock
from regard.nn.weights import Linear


def build(config: RwkvConfig) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M = config.hidden_size
    embedding, head = embedding_and_head(config.vocab_size, M, tied=config.tie_word_embeddings)

    def norm(layer: int) -> nn.LayerNorm:
        return nn.LayerNorm(M, eps=config.norm_eps(layer))

    last = nn.LayerNorm(M, eps=config.last_norm_eps)

    layers = [
        TwoMixerBlock(
            time_mix(config),
            ChannelMix(M, config.intermediate_size),
            PreNorm(norm(i)),
            PreNorm(norm(i)),
        )
        for i in range(config.num_hidden_layers)
    ]
    embed = InputEmbedding(embedding, norm=norm(0))
    return initialize_weights(Decoder(embed, layers, last, head))


def time_mix(config: RwkvConfig) -> Recurrent:
    """Build the recurrence of a layer, as one head."""
    M, A = config.hidden_size, config.attention_hidden_size
    project = TokenShiftQKV(*(HeadProjection(M, 1, A) for _ in "qkv"))
    return Recurrent(project, RWKV4Rule(1, A), Linear(A, M, bias=False))


def complete_config(config: RwkvConfig, raw: Raw, stored: Collection[str]) -> RwkvConfig:
    """Tie the head to the embedding if it is not stored, unless config.json says otherwise."""
    if "head.weight" in stored or raw.get("tie_word_embeddings") is False:
        return config
    return replace(config, tie_word_embeddings=True)


STORED, OURS = "rwkv.blocks.{}.", "layers.{}."
NAMES: NameTable = {
    "rwkv.embeddings.weight": "embed.embedding.weight",
    **weight_and_bias("rwkv.blocks.0.pre_ln", "embed.norm"),
    **weight_and_bias(STORED + "ln1", OURS + "attention_residual.norm"),
    **weight_and_bias(STORED + "ln2", OURS + "feed_forward_residual.norm"),
    **weight_and_bias("rwkv.ln_out", "norm"),
    "head.weight": "head.weight",
    STORED + "attention.time_decay": reshaped(OURS + "attention.rule.decay", -1),
    STORED + "attention.time_first": reshaped(OURS + "attention.rule.bonus", -1),
    STORED + "attention.output.weight": OURS + "attention.output.weight",
    **{
        f"{STORED}attention.{name}.weight": f"{OURS}attention.project.{letter}.linear.weight"
        for letter, name in (("q", "receptance"), ("k", "key"), ("v", "value"))
    },
    **{
        f"{STORED}attention.time_mix_{name}": reshaped(f"{OURS}attention.project.mix_{x}", 1, 1, -1)
        for x, name in (("q", "receptance"), ("k", "key"), ("v", "value"))
    },
    STORED + "feed_forward.time_mix_key": reshaped(OURS + "feed_forward.mix_k", 1, 1, -1),
    STORED + "feed_forward.time_mix_receptance": reshaped(OURS + "feed_forward.mix_r", 1, 1, -1),
    STORED + "feed_forward.key.weight": OURS + "feed_forward.up.weight",
    STORED + "feed_forward.receptance.weight": OURS + "feed_forward.receptance.weight",
    STORED + "feed_forward.value.weight": OURS + "feed_forward.down.weight",
}
FAMILIES = {
    "rwkv": Family(
        RwkvConfig,
        build,
        NAMES,
        complete_config=complete_config,
        prefixes=("rwkv.",),
        head="head.weight",
        keep_float32=("*.rule.decay", "*.rule.bonus"),
    ),
}
