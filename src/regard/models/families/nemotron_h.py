"""Nemotron-H: layers of Mamba-2, of attention without positions, and of feed-forward networks, each
a block of its own.

The step sizes of Mamba-2 have the limits of `time_step_limit`, in prompts and in decoding, as in
the released code. Transformers' class (5.23) has `time_step_min` as the smallest in prompts, and no
limit in decoding.

Source: NVIDIA 2025 (arXiv 2504.03624); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from regard.configs.base import FULL
from regard.configs.state_space import step_limits
from regard.configs.state_space_hybrids import MAMBA, MLP, NemotronHConfig
from regard.models.assembly import state_space
from regard.models.checkpoint.family import Family, NameTable, as_stored, only
from regard.models.decoder import Decoder
from regard.nn import (
    ExpertGroups,
    FeedForward,
    PreNorm,
    RMSNorm,
    SigmoidRouter,
)
from regard.nn.experts import MoE
from regard.nn.feed_forward import ReLUSquared
from regard.nn.mixer import Mixer
from regard.nn.mixer_block import MixerBlock, Tokenwise

Config = NemotronHConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, eps = config.hidden_size, config.layer_norm_epsilon
    layers = [
        MixerBlock(mixer(config, kind), PreNorm(RMSNorm(M, eps=eps))) for kind in config.kinds()
    ]
    return state_space.decoder(config, layers, RMSNorm(M, eps=eps))


def mixer(config: Config, kind: str) -> Mixer:
    """Build the one sublayer of a layer of this kind."""
    if kind == MAMBA:
        return state_space.mixer(
            config.mixer_sizes(),
            eps=config.layer_norm_epsilon,
            step_limits=step_limits(config.time_step_limit),
        )
    if kind == FULL:
        return state_space.attention(config)
    if kind == MLP:
        return Tokenwise(_network(config, config.intermediate_size, bias=config.mlp_bias))
    experts = [
        _network(config, config.moe_intermediate_size) for _ in range(config.n_routed_experts)
    ]
    hidden = config.moe_shared_expert_intermediate_size
    return Tokenwise(MoE(_router(config), experts, _network(config, hidden, bias=config.mlp_bias)))


def _network(config: Config, hidden: int, *, bias: bool = False) -> FeedForward:
    return FeedForward(config.hidden_size, hidden, ReLUSquared(), bias=bias)


def _router(config: Config) -> SigmoidRouter:
    groups = None if config.n_group == 1 else ExpertGroups(config.n_group, config.topk_group, 2)
    return SigmoidRouter(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        normalise=config.norm_topk_prob,
        groups=groups,
        scale=config.routed_scaling_factor,
    )


def check(config: Config) -> None:
    """Check the sizes of the router."""
    if "moe" in config.kinds():
        _router(config)


STORED, OURS = "backbone.layers.{}.", "layers.{}."
MIXER, ATTENTION = STORED + "mixer.", OURS + "attention."
NETWORK, RULE = ATTENTION + "network.", ATTENTION + "rule.A_log"
_NETWORKS = {"": "", "experts.{}.": "experts.{}.", "shared_experts.": "shared."}
NAMES: NameTable = {
    "backbone.embeddings.weight": "embed.embedding.weight",
    "backbone.norm_f.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    STORED + "norm.weight": OURS + "attention_residual.norm.weight",
    **only(state_space.names(MIXER, ATTENTION), requires=RULE),
    MIXER + "q_proj.weight": as_stored(ATTENTION + "project.q.linear.weight", unless=RULE),
    MIXER + "k_proj.weight": as_stored(ATTENTION + "project.k.linear.weight", unless=RULE),
    MIXER + "v_proj.weight": as_stored(ATTENTION + "project.v.linear.weight", unless=RULE),
    MIXER + "o_proj.weight": as_stored(ATTENTION + "output.weight", unless=RULE),
    MIXER + "gate.weight": NETWORK + "router.linear.weight",
    MIXER + "gate.e_score_correction_bias": NETWORK + "router.correction",
    **{
        f"{MIXER}{theirs}{part}_proj.{end}": f"{NETWORK}{ours}{part}.{end}"
        for theirs, ours in _NETWORKS.items()
        for part in ("up", "down")
        for end in ("weight", "bias")
    },
}
FAMILY = Family(
    Config,
    build,
    NAMES,
    check=check,
    prefixes=("backbone.",),
    head="lm_head.weight",
    keep_float32=(*state_space.FLOAT32, "*.router.correction"),
)
