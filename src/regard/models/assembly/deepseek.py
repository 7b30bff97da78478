"""What DeepSeek-V2 and V3 share: multi-head latent attention, dense layers below mixtures of
experts, and names.

Source: DeepSeek-AI 2024 (arXiv 2405.04434); DeepSeek-AI 2024 (arXiv 2412.19437).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from regard import masks
from regard.errors import ArgumentError
from regard.models.assembly import grouped, rope
from regard.models.assembly.shared import ready_for_training
from regard.models.checkpoint.family import Raw, check_sizes
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, Embed, Latent, PreNorm, RMSNorm, SwiGLU
from regard.nn.feed_forward import Groups, MoE, Router
from regard.nn.linear import Linear
from regard.positions import Rotary
from regard.positions.rotary import Layout

OURS, THEIRS = grouped.OURS, grouped.THEIRS
PROJECT = OURS + "attention.project."
NAMES = (
    grouped.OUTSIDE
    | grouped.PRE_NORMS
    | grouped.FEED_FORWARD
    | {
        THEIRS + "self_attn.q_proj.weight": PROJECT + "q.linear.weight",
        THEIRS + "self_attn.q_a_proj.weight": PROJECT + "q.down.weight",
        THEIRS + "self_attn.q_a_proj.bias": PROJECT + "q.down.bias",
        THEIRS + "self_attn.q_a_layernorm.weight": PROJECT + "q.norm.weight",
        THEIRS + "self_attn.q_b_proj.weight": PROJECT + "q.up.linear.weight",
        THEIRS + "self_attn.kv_a_proj_with_mqa.weight": PROJECT + "kv_down.weight",
        THEIRS + "self_attn.kv_a_proj_with_mqa.bias": PROJECT + "kv_down.bias",
        THEIRS + "self_attn.kv_a_layernorm.weight": PROJECT + "kv_norm.weight",
        THEIRS + "self_attn.kv_b_proj.weight": PROJECT + "kv_up.linear.weight",
        THEIRS + "self_attn.o_proj.weight": OURS + "attention.output.weight",
        THEIRS + "self_attn.o_proj.bias": OURS + "attention.output.bias",
        THEIRS + "mlp.gate.weight": OURS + "feed_forward.router.linear.weight",
        THEIRS + "mlp.gate.e_score_correction_bias": OURS + "feed_forward.router.correction",
    }
    | {
        THEIRS + f"mlp.{where}.{part}_proj.weight": OURS + f"feed_forward.{ours}.{part}.weight"
        for where, ours in (("experts.{}", "experts.{}"), ("shared_experts", "shared"))
        for part in ("gate", "up", "down")
    }
)
"""Name in a checkpoint -> name here; {} is the layer, and the expert."""
BUFFERS = (*grouped.BUFFERS, r"model\.layers\.61\..*")
"""What else a file may hold: the layer that predicts a second token is another model behind V3's 61
layers.
"""
IGNORED = frozenset({"aux_loss_alpha", "ep_size", "seq_aux"})
"""Keys of training and of other code: the model is computed here."""
CODE = "Deepseek"
"""What the class names of the published code begin with."""
FIXED = {"hidden_act": ("silu",), "moe_layer_freq": (1,)}
"""Keys that are understood with these values only."""


@dataclass(frozen=True)
class Config:
    """The keys of config.json that both have.

    Raises:
        ArgumentError: a size is out of range, rope_scaling is not understood or follows the length,
            heads share keys, or the experts cannot be chosen as the keys say.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    moe_intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_key_value_heads: int
    kv_lora_rank: int
    q_lora_rank: int | None
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    n_routed_experts: int
    num_experts_per_tok: int
    n_shared_experts: int
    first_k_dense_replace: int
    rms_norm_eps: float = 1e-6
    rope_theta: float = 10000.0
    rope_scaling: Mapping[str, Any] | None = None
    max_position_embeddings: int = 2048
    attention_bias: bool = False
    tie_word_embeddings: bool = False

    def __post_init__(self) -> None:
        check_sizes(self, zero=("first_k_dense_replace",))
        if self.num_key_value_heads != self.num_attention_heads:
            raise ArgumentError(
                f"num_key_value_heads is {self.num_key_value_heads}, and num_attention_heads "
                f"{self.num_attention_heads}; heads share one latent, and each has its own keys: "
                "make them equal"
            )
        if self.rotary().follows:
            raise ArgumentError(
                f"rope_scaling is {dict(self.rope_scaling or {})}, which follows the length; what "
                "a latent cache keeps is "
                "rotated already: supported are yarn, linear and none"
            )
        self.router()

    def rotary(self) -> Rotary:
        """The rotary positions of every layer."""
        return rope.rotary(
            self.qk_rope_head_dim,
            self.rope_theta,
            self.rope_scaling,
            self.max_position_embeddings,
            layout=self.layout(),
        )

    def layout(self) -> Layout:
        """Which dims make a pair."""
        return "interleaved"

    def router(self) -> Router:
        """How a token chooses its experts; each family says."""
        raise NotImplementedError


def groups(n_group: int | None, topk_group: int | None, best: int) -> Groups:
    """The groups of a config.

    Raises:
        ArgumentError: one of the two keys is missing, or they contradict each other.

    >>> groups(8, 4, 2)
    Groups(count=8, kept=4, best=2)
    """
    if n_group is None or topk_group is None:
        raise ArgumentError(f"n_group is {n_group} and topk_group {topk_group}; groups need both")
    return Groups(n_group, topk_group, best)


def plain(raw: Raw) -> dict[str, Any]:
    """Older files lack num_key_value_heads; newer ones name two sums of other keys, which are
    checked.

    Raises:
        ArgumentError: head_dim or qk_head_dim contradicts qk_rope_head_dim and qk_nope_head_dim.
    """
    found = rope.plain(raw)
    if found.get("num_key_value_heads") is None:
        found["num_key_value_heads"] = found.get("num_attention_heads")
    nope, turned = found.get("qk_nope_head_dim"), found.get("qk_rope_head_dim")
    if isinstance(nope, int) and isinstance(turned, int):
        for key, allowed in (("head_dim", turned), ("qk_head_dim", nope + turned)):
            said = found.pop(key, None)
            if said not in (None, allowed):
                raise ArgumentError(
                    f"{key} is {said}, and the two parts of a query head, {nope} + {turned}, make "
                    f"it {allowed}"
                )
    return found


def decoder(config: Config) -> Decoder:
    """A decoder with fresh weights: the first layers dense, the others with experts."""
    embedding = nn.Embedding(config.vocab_size, config.hidden_size)
    head = Linear(config.hidden_size, config.vocab_size, bias=False)
    if config.tie_word_embeddings:
        head.weight = embedding.weight
    rotary = config.rotary()
    layers = [_block(config, rotary, layer) for layer in range(config.num_hidden_layers)]
    return ready_for_training(Decoder(Embed(embedding), layers, _norm(config), head))


def _block(config: Config, rotary: Rotary, layer: int) -> Block:
    M, H, E = config.hidden_size, config.num_attention_heads, config.v_head_dim
    project = Latent(
        M,
        H,
        rotary,
        kv_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        value_dim=E,
        q_rank=config.q_lora_rank,
        bias=config.attention_bias,
    )
    output = Linear(H * E, M, bias=config.attention_bias)
    attention = Attention(project, output, mask=masks.Causal(), scale=project.scale)
    feed_forward: nn.Module = SwiGLU(M, config.intermediate_size)
    if layer >= config.first_k_dense_replace:
        width = config.moe_intermediate_size
        experts = [SwiGLU(M, width) for _ in range(config.n_routed_experts)]
        feed_forward = MoE(config.router(), experts, SwiGLU(M, width * config.n_shared_experts))
    return Block(attention, feed_forward, PreNorm(_norm(config)), PreNorm(_norm(config)))


def _norm(config: Config) -> RMSNorm:
    return RMSNorm(config.hidden_size, eps=config.rms_norm_eps)
