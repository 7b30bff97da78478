"""Llama: RMS norm, rotary in halves, grouped queries, SwiGLU.

Source: Touvron et al. 2023 (arXiv 2307.09288); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from regard import masks
from regard.arguments import check_groups
from regard.errors import ArgumentError
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, Heads, RMSNorm, Separate, SwiGLU
from regard.positions import Rotary


@dataclass(frozen=True)
class Config:
    """The keys of a Llama config.json that shape the model.

    Raises:
        ArgumentError: a size is less than 1, or num_key_value_heads does not divide num_attention_heads.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    head_dim: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    max_position_embeddings: int = 2048
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if isinstance(value, int) and not isinstance(value, bool) and value < 1:
                raise ArgumentError(f"{name} is {value}; it must be at least 1")
        check_groups(self.num_attention_heads, self.num_key_value_heads)


IGNORED = frozenset({
    "architectures", "model_type", "torch_dtype", "dtype", "transformers_version", "use_cache",
    "bos_token_id", "eos_token_id", "pad_token_id", "initializer_range", "pretraining_tp",
})  # fmt: skip
"""Keys that do not shape the computation."""

FIXED = {
    "hidden_act": "silu", "attention_bias": False, "mlp_bias": False, "attention_dropout": 0.0,
    "rope_scaling": None, "rope_parameters": None,
}  # fmt: skip
"""Keys that are understood with this value only."""


def plain(raw: Mapping[str, Any]) -> dict[str, Any]:
    """A config.json with every key at its top level and no default left out.

    transformers 5 nests rope_theta in rope_parameters; older files lack head_dim, or num_key_value_heads.
    """
    nested, heads, size = (
        raw.get(key) for key in ("rope_parameters", "num_attention_heads", "hidden_size")
    )
    found = dict(raw)
    if isinstance(nested, dict) and nested.get("rope_type", "default") == "default":
        del found["rope_parameters"]
        found |= {key: value for key, value in nested.items() if key != "rope_type"}
    if isinstance(heads, int) and isinstance(size, int) and heads > 0:
        for key, value in (("num_key_value_heads", heads), ("head_dim", size // heads)):
            if found.get(key) is None:
                found[key] = value
    return found


NAMES = {
    "model.embed_tokens.weight": "embedding.weight",
    "model.norm.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    "model.layers.{}.input_layernorm.weight": "layers.{}.attention_norm.weight",
    "model.layers.{}.self_attn.q_proj.weight": "layers.{}.attention.project.q.linear.weight",
    "model.layers.{}.self_attn.k_proj.weight": "layers.{}.attention.project.k.linear.weight",
    "model.layers.{}.self_attn.v_proj.weight": "layers.{}.attention.project.v.linear.weight",
    "model.layers.{}.self_attn.o_proj.weight": "layers.{}.attention.output.weight",
    "model.layers.{}.post_attention_layernorm.weight": "layers.{}.feed_forward_norm.weight",
    "model.layers.{}.mlp.gate_proj.weight": "layers.{}.feed_forward.gate.weight",
    "model.layers.{}.mlp.up_proj.weight": "layers.{}.feed_forward.up.weight",
    "model.layers.{}.mlp.down_proj.weight": "layers.{}.feed_forward.down.weight",
}
"""Checkpoint name -> name here; {} is the layer."""


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights.

    Norms are 1; matrices are normal with standard deviation 1/sqrt(fan-in), so that scores start at a spread of about
    1 and heads tell keys apart from the first step; those that write to the residual path are 0, so that a token is not
    drowned by what untrained layers add to it, and later layers can match and copy it. The head has 0.02, and so has an
    embedding that is tied to it; one of its own has 0.5.
    """
    embedding = nn.Embedding(config.vocab_size, config.hidden_size)
    head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
    if config.tie_word_embeddings:
        head.weight = embedding.weight
    rotary = Rotary(config.head_dim, base=config.rope_theta)
    layers = [_block(config, rotary) for _ in range(config.num_hidden_layers)]
    decoder = Decoder(embedding, layers, _norm(config), head)
    for module in decoder.modules():
        if isinstance(module, (nn.Linear, nn.Embedding)):
            own = module is embedding and not config.tie_word_embeddings
            nn.init.normal_(module.weight, std=0.5 if own else 0.02)
    for block in layers:
        writes = (block.attention.output, block.feed_forward.get_submodule("down"))
        for module in block.modules():
            if isinstance(module, nn.Linear):
                std = 0.0 if module in writes else module.in_features**-0.5
                nn.init.normal_(module.weight, std=std)
    return decoder


def _norm(config: Config) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps)


def _block(config: Config, rotary: Rotary) -> Block:
    M, D, H, G = (
        config.hidden_size, config.head_dim, config.num_attention_heads, config.num_key_value_heads,
    )  # fmt: skip
    project = Separate(Heads(M, H, D, rotary), Heads(M, G, D, rotary), Heads(M, G, D))
    attention = Attention(project, nn.Linear(H * D, M, bias=False), mask=masks.Causal())
    return Block(attention, SwiGLU(M, config.intermediate_size), _norm(config), _norm(config))
