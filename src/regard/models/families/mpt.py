"""MPT: ALiBi, LayerNorm without bias, no biases at all, one fused matrix for queries, keys and
values.

Learned positions, biases, a prefix without causal mask, norms on heads, one key for all heads and a
factor on logits, which the family's first code knew, are refused: transformers has none of them.
`alibi_bias_max` is heeded, as in that code; transformers 5.23 takes 8 whatever it says.

Source: MosaicML 2023, "Introducing MPT-7B"; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from regard import masks
from regard.arguments import check_number
from regard.biases import ALiBi
from regard.biases.alibi import alibi_slopes
from regard.errors import ArgumentError
from regard.foreign import shown
from regard.models.assembly.shared import embedding_and_head, ready_for_training, respelled
from regard.models.checkpoint.config import is_harmless
from regard.models.checkpoint.family import Family, Raw, UnknownKey, check_sizes
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, Embed, FeedForward, Fused, PreNorm
from regard.nn.linear import Linear
from regard.nn.projections import Clipped
from regard.nn.variants.parts import head_size

ATTENTION = {"alibi_bias_max": 8, "clip_qkv": None, "softmax_scale": None}
"""The keys of attn_config that shape the model, and what they are where they are not given."""
FIXED_ATTENTION: dict[str, tuple[Any, ...]] = {
    "alibi": (True,),
    "attn_type": ("multihead_attention",),
    "attn_uses_sequence_id": (False,),
    "prefix_lm": (False,),
    "qk_ln": (False,),
}
"""Keys of attn_config that are understood with these values only."""


@dataclass(frozen=True)
class Config:
    """The keys of an MPT config.json that shape the model.

    Raises:
        ArgumentError: a size is less than 1, the norms' eps is not above 0, n_heads does not divide
            d_model, or attn_config asks for what is not supported.
    """

    vocab_size: int
    d_model: int
    n_heads: int
    n_layers: int
    max_seq_len: int = 2048
    layer_norm_epsilon: float = 1e-5
    attn_config: Mapping[str, Any] = field(default_factory=dict)
    tie_word_embeddings: bool = True

    def __post_init__(self) -> None:
        check_sizes(self)
        check_number("layer_norm_epsilon", self.layer_norm_epsilon, 0, float("inf"), "above 0")
        head_size(self.d_model, self.n_heads, None)
        for key, value in self.attn_config.items():
            name, allowed = f"attn_config.{key}", FIXED_ATTENTION.get(key)
            if allowed is not None and value not in allowed:
                raise ArgumentError(f"{name} is {value!r}; only {allowed[0]!r} is supported")
            if allowed is None and key not in ATTENTION:
                raise UnknownKey(
                    ("attn_config", key), f"attn_config has the unknown key {shown(key)}"
                )
            if key == "alibi_bias_max" and value is None:
                raise ArgumentError(f"{name} is null; it must be above 0")
            if key in ATTENTION:
                check_number(name, value, 0, float("inf"), "above 0")


def plain(raw: Raw) -> dict[str, Any]:
    """The general names of sizes are understood, too; of attn_config what shapes the model is
    kept.
    """
    names = {
        "hidden_size": "d_model",
        "num_attention_heads": "n_heads",
        "num_hidden_layers": "n_layers",
    }
    found = respelled(raw, names)
    attention = found["attn_config"] = {} if (own := found.get("attn_config")) is None else own
    if isinstance(attention, Mapping):
        without = {"attn_impl", "is_encoder_decoder"}
        found["attn_config"] = {
            k: v for k, v in attention.items() if not (k in without or is_harmless(k))
        }
    return found


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    V, M = config.vocab_size, config.d_model
    embedding, head = embedding_and_head(V, M, tied=config.tie_word_embeddings)
    layers = [_block(config) for _ in range(config.n_layers)]
    return ready_for_training(Decoder(Embed(embedding), layers, _norm(config), head))


def _norm(config: Config) -> nn.LayerNorm:
    return nn.LayerNorm(config.d_model, eps=config.layer_norm_epsilon, bias=False)


def _block(config: Config) -> Block:
    M, H = config.d_model, config.n_heads
    D, own = head_size(M, H, None), ATTENTION | dict(config.attn_config)
    project = Fused(M, H, H, D, bias=False)
    if own["clip_qkv"] is not None:
        project = Clipped(M, H, H, D, limit=own["clip_qkv"], bias=False)
    # the slopes of ALiBi fall to 2^-8, and here to 2^-alibi_bias_max
    slopes = [slope ** (own["alibi_bias_max"] / 8) for slope in alibi_slopes(H)]
    attention = Attention(
        project,
        Linear(M, M, bias=False),
        mask=masks.Causal(),
        bias=ALiBi(slopes=slopes),
        scale=own["softmax_scale"],
    )
    feed_forward = FeedForward(M, 4 * M, nn.GELU(), bias=False)
    return Block(attention, feed_forward, PreNorm(_norm(config)), PreNorm(_norm(config)))


LAYER, OURS = "transformer.blocks.{}.", "layers.{}."
NAMES = {
    "transformer.wte.weight": "embed.embedding.weight",
    "transformer.norm_f.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    LAYER + "norm_1.weight": OURS + "around_attention.norm.weight",
    LAYER + "attn.Wqkv.weight": OURS + "attention.project.linear.weight",
    LAYER + "attn.out_proj.weight": OURS + "attention.output.weight",
    LAYER + "norm_2.weight": OURS + "around_feed_forward.norm.weight",
    LAYER + "ffn.up_proj.weight": OURS + "feed_forward.up.weight",
    LAYER + "ffn.down_proj.weight": OURS + "feed_forward.down.weight",
}
"""Checkpoint name -> name here; {} is the layer."""

FAMILY = Family(
    Config,
    build,
    NAMES,
    ignored=frozenset(
        {
            "embedding_fraction",
            "init_config",
            "init_device",
            "learned_pos_emb",
            "tokenizer_name",
            "verbose",
        }
    ),
    fixed={
        "expansion_ratio": (4,),
        "logit_scale": (None,),
        "no_bias": (True,),
        "norm_type": ("low_precision_layernorm", "layernorm"),
    },
    code="MPT",
    plain=plain,
    prefixes=("transformer.",),
    head="lm_head.weight",
)
