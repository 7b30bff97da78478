"""Mamba-2, Jamba and Nemotron-H: decoders without positions.

The step sizes of Nemotron-H have the limits of `time_step_limit`, as in the released code;
transformers (5.23) has `time_step_min` as the smallest in prompts, and no limit in decoding.

Source: Dao and Gu 2024 (arXiv 2405.21060); Lieber et al. 2024 (arXiv 2403.19887); NVIDIA 2025
(arXiv 2504.03624).
"""

from __future__ import annotations

from torch import nn

from regard.configs.base import FULL
from regard.configs.hybrid import step_limits
from regard.configs.mamba import JambaConfig, Mamba2Config
from regard.configs.nemotron import MAMBA, MLP, NemotronHConfig
from regard.configs.rotary_decoder import Experts
from regard.models.assembly import llama_like, state_space
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import Family, NameTable, as_stored, only, stacked_rows
from regard.models.decoder import Decoder
from regard.nn import (
    Block,
    CausalConvolution,
    ExpertGroups,
    FeedForward,
    HeadProjection,
    PreNorm,
    Recurrent,
    RMSNorm,
    SigmoidRouter,
    SoftmaxRouter,
    SwiGLU,
)
from regard.nn.blocks.experts import MoE
from regard.nn.blocks.feed_forward import ReLUSquared
from regard.nn.blocks.mixer_block import MixerBlock, NarrowingRMSNorm, Tokenwise, WidePreNorm
from regard.nn.mixer import Mixer
from regard.nn.recurrence.mamba import SelectiveQKV, SelectiveScanRule
from regard.nn.weights import Linear

STORED, OURS = "backbone.layers.{}.", "layers.{}."


def _build_mamba2(config: Mamba2Config) -> Decoder:
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


MAMBA2_NAMES: NameTable = {
    "backbone.embeddings.weight": "embed.embedding.weight",
    "backbone.norm_f.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    STORED + "norm.weight": OURS + "attention_residual.norm.weight",
    **state_space.names(STORED + "mixer.", OURS + "attention."),
}


def _rename_embedding(name: str) -> str:
    """Return the present spelling of a name: the first checkpoints have `embedding`."""
    return name.replace("backbone.embedding.", "backbone.embeddings.")


def _build_jamba(config: JambaConfig) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, eps = config.hidden_size, config.rms_norm_eps
    layers = [
        Block(
            state_space.attention(config) if kind == FULL else _mamba(config),
            _jamba_feed_forward(config, i),
            *(PreNorm(RMSNorm(M, eps=eps)) for _ in range(2)),
        )
        for i, kind in enumerate(config.kinds())
    ]
    return state_space.decoder(config, layers, RMSNorm(M, eps=eps))


def _mamba(config: JambaConfig) -> Recurrent:
    """Build a layer of Mamba, with norms on queries, keys and step sizes."""
    M, N, D = config.hidden_size, config.inner_size, config.mamba_d_state
    eps, bias, rank = config.rms_norm_eps, config.mamba_proj_bias, config.mamba_dt_rank
    q, k = (HeadProjection(N, 1, D, RMSNorm(D, eps=eps)) for _ in "qk")
    v, gate = (HeadProjection(M, N, 1, bias=bias) for _ in "vg")
    convolution = CausalConvolution(N, config.mamba_d_conv, bias=config.mamba_conv_bias)
    return Recurrent(
        SelectiveQKV(q, k, v, convolution),
        SelectiveScanRule(N, D, rank, norm=RMSNorm(rank, eps=eps)),
        Linear(N, M, bias=bias),
        gate=gate,
    )


def _jamba_feed_forward(config: JambaConfig, layer: int) -> nn.Module:
    """Build the feed-forward network of a layer, or its mixture of experts."""
    M, hidden = config.hidden_size, config.intermediate_size
    if not config.is_sparse(layer):
        return SwiGLU(M, hidden)
    router = SoftmaxRouter(M, config.num_experts, config.num_experts_per_tok)
    return llama_like.mixture(M, hidden, router)


JAMBA_STORED, JAMBA_OURS = STORED_LAYER + "mamba.", MODEL_LAYER + "attention."
JAMBA_RULE = JAMBA_OURS + "rule.A_log"
JAMBA_RECURRENT: NameTable = {
    **{
        f"{JAMBA_STORED}in_proj.{end}": stacked_rows(
            f"{JAMBA_OURS}project.v.linear.{end}", f"{JAMBA_OURS}gate.linear.{end}"
        )
        for end in ("weight", "bias")
    },
    JAMBA_STORED + "conv1d.weight": state_space.filters(JAMBA_OURS + "project.convolution.weight"),
    JAMBA_STORED + "conv1d.bias": JAMBA_OURS + "project.convolution.bias",
    JAMBA_STORED + "x_proj.weight": stacked_rows(
        JAMBA_OURS + "rule.down.weight",
        JAMBA_OURS + "project.k.linear.weight",
        JAMBA_OURS + "project.q.linear.weight",
    ),
    JAMBA_STORED + "dt_proj.weight": JAMBA_OURS + "rule.up.weight",
    JAMBA_STORED + "dt_proj.bias": JAMBA_OURS + "rule.dt_bias",
    JAMBA_STORED + "A_log": JAMBA_RULE,
    JAMBA_STORED + "D": JAMBA_OURS + "rule.skip",
    JAMBA_STORED + "dt_layernorm.weight": JAMBA_OURS + "rule.norm.weight",
    JAMBA_STORED + "b_layernorm.weight": JAMBA_OURS + "project.k.steps.0.weight",
    JAMBA_STORED + "c_layernorm.weight": JAMBA_OURS + "project.q.steps.0.weight",
    JAMBA_STORED + "out_proj.weight": JAMBA_OURS + "output.weight",
    JAMBA_STORED + "out_proj.bias": JAMBA_OURS + "output.bias",
}
JAMBA_NAMES: NameTable = {
    **state_space.NORMS_AND_ENDS,
    **only(llama_like.ATTENTION, unless=JAMBA_RULE),
    **only(JAMBA_RECURRENT, requires=JAMBA_RULE),
    **state_space.FEED_FORWARD,
    **{
        name.replace("feed_forward.gate.", "feed_forward.router."): parameter
        for name, parameter in llama_like.expert_names(Experts("", stored="feed_forward")).items()
    },
}


def _build_nemotron_h(config: NemotronHConfig) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, eps = config.hidden_size, config.layer_norm_epsilon
    layers = [
        MixerBlock(_nemotron_mixer(config, kind), PreNorm(RMSNorm(M, eps=eps)))
        for kind in config.kinds()
    ]
    return state_space.decoder(config, layers, RMSNorm(M, eps=eps))


def _nemotron_mixer(config: NemotronHConfig, kind: str) -> Mixer:
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
    return Tokenwise(
        MoE(_nemotron_router(config), experts, _network(config, hidden, bias=config.mlp_bias))
    )


def _network(config: NemotronHConfig, hidden: int, *, bias: bool = False) -> FeedForward:
    return FeedForward(config.hidden_size, hidden, ReLUSquared(), bias=bias)


def _nemotron_router(config: NemotronHConfig) -> SigmoidRouter:
    groups = None if config.n_group == 1 else ExpertGroups(config.n_group, config.topk_group, 2)
    return SigmoidRouter(
        config.hidden_size,
        config.n_routed_experts,
        config.num_experts_per_tok,
        normalize=config.norm_topk_prob,
        groups=groups,
        scale=config.routed_scaling_factor,
    )


def _check_nemotron_h(config: NemotronHConfig) -> None:
    """Check the sizes of the router."""
    if "moe" in config.kinds():
        _nemotron_router(config)


MIXER, ATTENTION = STORED + "mixer.", OURS + "attention."
NETWORK, RULE = ATTENTION + "network.", ATTENTION + "rule.A_log"
_NETWORKS = {"": "", "experts.{}.": "experts.{}.", "shared_experts.": "shared."}
NEMOTRON_NAMES: NameTable = {
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
FAMILIES = {
    "mamba2": Family(
        Mamba2Config,
        _build_mamba2,
        MAMBA2_NAMES,
        prefixes=("backbone.",),
        head="lm_head.weight",
        rename_stored=_rename_embedding,
        keep_float32=state_space.FLOAT32,
    ),
    "jamba": Family(
        JambaConfig,
        _build_jamba,
        JAMBA_NAMES,
        prefixes=llama_like.PREFIXES,
        head=llama_like.HEAD,
        keep_float32=state_space.FLOAT32,
    ),
    "nemotron_h": Family(
        NemotronHConfig,
        _build_nemotron_h,
        NEMOTRON_NAMES,
        check=_check_nemotron_h,
        prefixes=("backbone.",),
        head="lm_head.weight",
        keep_float32=(*state_space.FLOAT32, "*.router.correction"),
    ),
}
