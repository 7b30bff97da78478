"""Jamba: Mamba in most layers and attention without positions in a few, each with a SwiGLU or a
mixture of experts.

Source: Lieber et al. 2024 (arXiv 2403.19887); key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from torch import nn

from regard.configs.base import FULL
from regard.configs.state_space_hybrids import JambaConfig
from regard.models.assembly import llama_like, state_space
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import Family, NameTable, only, stacked_rows
from regard.models.decoder import Decoder
from regard.nn import (
    Block,
    CausalConvolution,
    HeadProjection,
    PreNorm,
    Recurrent,
    RMSNorm,
    SoftmaxRouter,
    SwiGLU,
)
from regard.nn.linear import Linear
from regard.nn.selective_scan import SelectiveQKV, SelectiveScanRule

Config = JambaConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    M, eps = config.hidden_size, config.rms_norm_eps
    layers = [
        Block(
            state_space.attention(config) if kind == FULL else mamba(config),
            feed_forward(config, i),
            *(PreNorm(RMSNorm(M, eps=eps)) for _ in range(2)),
        )
        for i, kind in enumerate(config.kinds())
    ]
    return state_space.decoder(config, layers, RMSNorm(M, eps=eps))


def mamba(config: Config) -> Recurrent:
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


def feed_forward(config: Config, layer: int) -> nn.Module:
    """Build the feed-forward network of a layer, or its mixture of experts."""
    M, hidden = config.hidden_size, config.intermediate_size
    if not config.is_sparse(layer):
        return SwiGLU(M, hidden)
    router = SoftmaxRouter(M, config.num_experts, config.num_experts_per_tok)
    return llama_like.mixture(M, hidden, router)


STORED, OURS = STORED_LAYER + "mamba.", MODEL_LAYER + "attention."
RULE = OURS + "rule.A_log"
RECURRENT: NameTable = {
    **{
        f"{STORED}in_proj.{end}": stacked_rows(
            f"{OURS}project.v.linear.{end}", f"{OURS}gate.linear.{end}"
        )
        for end in ("weight", "bias")
    },
    STORED + "conv1d.weight": state_space.filters(OURS + "project.convolution.weight"),
    STORED + "conv1d.bias": OURS + "project.convolution.bias",
    STORED + "x_proj.weight": stacked_rows(
        OURS + "rule.down.weight",
        OURS + "project.k.linear.weight",
        OURS + "project.q.linear.weight",
    ),
    STORED + "dt_proj.weight": OURS + "rule.up.weight",
    STORED + "dt_proj.bias": OURS + "rule.dt_bias",
    STORED + "A_log": RULE,
    STORED + "D": OURS + "rule.skip",
    STORED + "dt_layernorm.weight": OURS + "rule.norm.weight",
    STORED + "b_layernorm.weight": OURS + "project.k.steps.0.weight",
    STORED + "c_layernorm.weight": OURS + "project.q.steps.0.weight",
    STORED + "out_proj.weight": OURS + "output.weight",
    STORED + "out_proj.bias": OURS + "output.bias",
}
NAMES: NameTable = {
    **state_space.NORMS_AND_ENDS,
    **only(llama_like.ATTENTION, unless=RULE),
    **only(RECURRENT, requires=RULE),
    **state_space.FEED_FORWARD,
    STORED_LAYER + "feed_forward.router.weight": MODEL_LAYER + "feed_forward.router.linear.weight",
    **llama_like.expert_names("feed_forward.experts", "gate_proj", "up_proj", "down_proj"),
}
FAMILY = Family(
    Config,
    build,
    NAMES,
    prefixes=llama_like.PREFIXES,
    head=llama_like.HEAD,
    keep_float32=state_space.FLOAT32,
)
