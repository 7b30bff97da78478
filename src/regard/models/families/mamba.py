"""Mamba, Mamba-2, Jamba and Nemotron-H: decoders without positions.

The step sizes of Nemotron-H have the limits of `time_step_limit`, as in the released code;
transformers (5.23) has `time_step_min` as the smallest in prompts, and no limit in decoding.

Source: Gu and Dao 2023 (arXiv 2312.00752); Dao and Gu 2024 (arXiv 2405.21060); Lieber et al.
2024 (arXiv 2403.19887); NVIDIA 2025 (arXiv 2504.03624).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from torch import nn

from regard.configs.base import FULL
from regard.configs.hybrid import step_limits
from regard.configs.mamba import FalconMambaConfig, JambaConfig, Mamba2Config, MambaConfig
from regard.configs.nemotron import MAMBA, MLP, NemotronHConfig
from regard.configs.rotary_decoder import Experts
from regard.models.assembly import llama_like, state_space
from regard.models.assembly.gated_delta import filters
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
from regard.nn.recurrence.decays import SelectiveQKV, SelectiveScanRule
from regard.nn.weights import Linear

STORED, OURS = "backbone.layers.{}.", "layers.{}."


def _build_mamba2(config: Mamba2Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return _stack(
        config,
        lambda: state_space.mixer(
            config.mixer_sizes(),
            eps=config.layer_norm_epsilon,
            step_limits=step_limits(config.time_step_limit),
        ),
    )


def _build_mamba(config: MambaConfig) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    sizes = (config.hidden_size, config.expand * config.hidden_size, config.state_size)
    norm = None
    if isinstance(config, FalconMambaConfig):
        norm = partial(llama_like.bare_rms, eps=config.mixer_rms_eps)
    return _stack(
        config,
        lambda: _mamba(
            *sizes,
            config.conv_kernel,
            config.time_step_rank,
            bias=config.use_bias,
            conv_bias=config.use_conv_bias,
            norm=norm,
        ),
    )


def _stack(config: MambaConfig | Mamba2Config, mixer: Callable[[], Mixer]) -> Decoder:
    """Build a decoder of blocks of one mechanism, with a residual stream in fp32 or not."""
    M, eps, wide = config.hidden_size, config.layer_norm_epsilon, config.residual_in_fp32
    residual, last = (WidePreNorm, NarrowingRMSNorm) if wide else (PreNorm, RMSNorm)
    layers = [
        MixerBlock(mixer(), residual(RMSNorm(M, eps=eps))) for _ in range(config.num_hidden_layers)
    ]
    return state_space.decoder(config, layers, last(M, eps=eps))


BACKBONE: NameTable = {
    "backbone.embeddings.weight": "embed.embedding.weight",
    "backbone.norm_f.weight": "norm.weight",
    "lm_head.weight": "head.weight",
    STORED + "norm.weight": OURS + "attention_residual.norm.weight",
}
MAMBA2_NAMES: NameTable = {
    **BACKBONE,
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
            state_space.attention(config) if kind == FULL else _jamba_mixer(config),
            _jamba_feed_forward(config, i),
            *(PreNorm(RMSNorm(M, eps=eps)) for _ in range(2)),
        )
        for i, kind in enumerate(config.kinds())
    ]
    return state_space.decoder(config, layers, RMSNorm(M, eps=eps))


def _jamba_mixer(config: JambaConfig) -> Recurrent:
    return _mamba(
        config.hidden_size,
        config.inner_size,
        config.mamba_d_state,
        config.mamba_d_conv,
        config.mamba_dt_rank,
        bias=config.mamba_proj_bias,
        conv_bias=config.mamba_conv_bias,
        norm=partial(RMSNorm, eps=config.rms_norm_eps),
    )


def _mamba(
    dim: int,
    inner: int,
    state: int,
    kernel: int,
    rank: int,
    *,
    bias: bool,
    conv_bias: bool,
    norm: Callable[[int], nn.Module] | None,
) -> Recurrent:
    """Build a layer of Mamba, with norms on queries, keys and step sizes or without."""
    q, k = (HeadProjection(inner, 1, state, *([norm(state)] if norm else ())) for _ in "qk")
    v, gate = (HeadProjection(dim, inner, 1, bias=bias) for _ in "vg")
    convolution = CausalConvolution(inner, kernel, bias=conv_bias)
    return Recurrent(
        SelectiveQKV(q, k, v, convolution),
        SelectiveScanRule(inner, state, rank, norm=norm(rank) if norm else None),
        Linear(inner, dim, bias=bias),
        gate=gate,
    )


def _jamba_feed_forward(config: JambaConfig, layer: int) -> nn.Module:
    """Build the feed-forward network of a layer, or its mixture of experts."""
    M, hidden = config.hidden_size, config.intermediate_size
    if not config.is_sparse(layer):
        return SwiGLU(M, hidden)
    router = SoftmaxRouter(M, config.num_experts, config.num_experts_per_tok)
    return llama_like.mixture(M, hidden, router)


def _mamba_names(stored: str, ours: str) -> NameTable:
    """Return the table entries of a layer of Mamba."""
    return {
        **{
            f"{stored}in_proj.{end}": stacked_rows(
                f"{ours}project.v.linear.{end}", f"{ours}gate.linear.{end}"
            )
            for end in ("weight", "bias")
        },
        stored + "conv1d.weight": filters(ours + "project.convolution.weight"),
        stored + "conv1d.bias": ours + "project.convolution.bias",
        stored + "x_proj.weight": stacked_rows(
            ours + "rule.down.weight",
            ours + "project.k.linear.weight",
            ours + "project.q.linear.weight",
        ),
        stored + "dt_proj.weight": ours + "rule.up.weight",
        stored + "dt_proj.bias": ours + "rule.dt_bias",
        stored + "A_log": ours + "rule.A_log",
        stored + "D": ours + "rule.skip",
        stored + "dt_layernorm.weight": ours + "rule.norm.weight",
        stored + "b_layernorm.weight": ours + "project.k.steps.0.weight",
        stored + "c_layernorm.weight": ours + "project.q.steps.0.weight",
        stored + "out_proj.weight": ours + "output.weight",
        stored + "out_proj.bias": ours + "output.bias",
    }


MAMBA_NAMES: NameTable = {**BACKBONE, **_mamba_names(STORED + "mixer.", OURS + "attention.")}
JAMBA_RULE = MODEL_LAYER + "attention.rule.A_log"
JAMBA_RECURRENT = _mamba_names(STORED_LAYER + "mamba.", MODEL_LAYER + "attention.")
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
    **BACKBONE,
    **only(state_space.names(MIXER, ATTENTION), requires=RULE),
    **{
        f"{MIXER}{x}_proj.weight": as_stored(f"{ATTENTION}project.{x}.linear.weight", unless=RULE)
        for x in "qkv"
    },
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
FAMILIES: dict[str, Family] = {
    name: Family(
        kind,
        build,
        names,
        prefixes=("backbone.",),
        head="lm_head.weight",
        rename_stored=_rename_embedding,
        keep_float32=state_space.FLOAT32,
    )
    for name, kind, build, names in (
        ("mamba", MambaConfig, _build_mamba, MAMBA_NAMES),
        ("falcon_mamba", FalconMambaConfig, _build_mamba, MAMBA_NAMES),
        ("mamba2", Mamba2Config, _build_mamba2, MAMBA2_NAMES),
    )
} | {
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
