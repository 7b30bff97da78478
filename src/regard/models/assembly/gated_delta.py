"""Parts and checkpoint names of Qwen3-Next and Qwen3.5: layers of Gated DeltaNet, layers of
attention with an output gate, and norms with weight 1 + w.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from torch import Tensor, nn

from regard import masks
from regard.configs.gated_delta_hybrids import (
    GatedDeltaConfig,
    QwenHybridConfig,
    QwenHybridMoeConfig,
)
from regard.models.assembly import building_blocks, llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import (
    Family,
    HeadRows,
    NameTable,
    TensorRule,
    as_stored,
    stacked_rows,
)
from regard.models.decoder import Decoder
from regard.nn import (
    Attention,
    Block,
    HeadProjection,
    MoE,
    OffsetRMSNorm,
    PreNorm,
    RMSNorm,
    SoftmaxRouter,
    SwiGLU,
)
from regard.nn.delta_rules import DeltaRule, LogDecay
from regard.nn.feed_forward import GatedSharedExpert
from regard.nn.head_finishes import GatedProjection
from regard.nn.linear import Linear
from regard.nn.norms import L2Norm
from regard.nn.recurrent import Recurrent
from regard.nn.recurrent_projections import CausalConvolution, ConvolvedQKV, JoinedConvolution
from regard.positions import Rotary


def decoder(config: QwenHybridConfig, feed_forward: Callable[[], nn.Module]) -> Decoder:
    """Build a decoder with initial weights."""

    def block(rotary: Rotary | None, _: int | None) -> Block:
        mixer = delta_net(config) if rotary is None else attention(config, rotary)
        return Block(mixer, feed_forward(), *(PreNorm(norm(config)) for _ in range(2)))

    return llama_like.decoder(config, block, final_norm=norm(config))


def norm(config: QwenHybridConfig, dim: int | None = None) -> OffsetRMSNorm:
    """Build a norm of the model dim, or of another dim, with the config's eps."""
    return OffsetRMSNorm(config.hidden_size if dim is None else dim, eps=config.rms_norm_eps)


def attention(config: QwenHybridConfig, rotary: Rotary) -> Attention:
    """Build causal attention with a norm on each head of queries and keys, and an output gate."""
    M, H, D = config.hidden_size, config.num_attention_heads, config.head_dim
    project = building_blocks.rotary_heads(
        M,
        H,
        config.num_key_value_heads,
        D,
        rotary,
        q_steps=[norm(config, D)],
        k_steps=[norm(config, D)],
    )
    gated = GatedProjection(project, HeadProjection(M, H, D))
    return Attention(gated, Linear(H * D, M, bias=False), mask=masks.Causal())


def delta_net(
    config: GatedDeltaConfig,
    convolution: CausalConvolution | JoinedConvolution | None = None,
    *,
    max_beta: float = 1.0,
    eps: float | None = None,
) -> Recurrent:
    """Build a layer of Gated DeltaNet, with a short convolution over queries, keys and values."""
    M, G, N = config.hidden_size, config.linear_num_key_heads, config.linear_num_value_heads
    D, E = config.linear_key_head_dim, config.linear_value_head_dim
    if convolution is None:
        convolution = CausalConvolution(2 * G * D + N * E, config.linear_conv_kernel_dim)
    project = ConvolvedQKV(
        HeadProjection(M, G, D, L2Norm()),
        HeadProjection(M, G, D, L2Norm()),
        HeadProjection(M, N, E),
        convolution,
    )
    return Recurrent(
        project,
        DeltaRule(M, N, decay=LogDecay(M, N), max_beta=max_beta),
        Linear(N * E, M, bias=False),
        norm=RMSNorm(E, eps=config.rms_norm_eps if eps is None else eps),
        gate=HeadProjection(M, N, E),
    )


def mixture(config: QwenHybridMoeConfig, *, normalise: bool) -> MoE:
    """Build a mixture of experts with an expert for all tokens behind a gate."""
    M = config.hidden_size
    router = SoftmaxRouter(M, config.num_experts, config.num_experts_per_tok, normalise=normalise)
    shared = GatedSharedExpert(M, SwiGLU(M, config.shared_expert_intermediate_size))
    return llama_like.mixture(M, config.moe_intermediate_size, router, shared)


def filters(parameter_name: str) -> TensorRule:
    """Return the rule of the filters of a short convolution, stored as torch's Conv1d has them.

    >>> import torch
    >>> filters("w").pack([torch.zeros(6, 4)]).shape
    torch.Size([6, 1, 4])
    """

    def unpack(stored: Tensor, _: object) -> tuple[Tensor]:
        return (stored.squeeze(1),)

    return TensorRule((parameter_name,), unpack, lambda parts: parts[0].unsqueeze(1))


MIXER = MODEL_LAYER + "attention."
STORED_DELTA = STORED_LAYER + "linear_attn."
QKV = tuple(MIXER + f"project.{part}.linear.weight" for part in "qkv")
GATE = MIXER + "gate.linear.weight"
STRENGTH, DECAY = MIXER + "rule.beta_proj.weight", MIXER + "rule.decay.linear.weight"
DECAYS = ("*.decay.A_log", "*.decay.dt_bias")
"""Parameters of decays, which a narrower dtype would damage."""
ATTENTION: NameTable = {
    STORED_LAYER + "self_attn.q_proj.weight": HeadRows(
        (MIXER + "project.project.q.linear.weight", MIXER + "project.gate.linear.weight"),
        MIXER + "project.project.q",
    ),
    STORED_LAYER + "self_attn.k_proj.weight": MIXER + "project.project.k.linear.weight",
    STORED_LAYER + "self_attn.v_proj.weight": MIXER + "project.project.v.linear.weight",
    STORED_LAYER + "self_attn.q_norm.weight": MIXER + "project.project.q.steps.0.weight",
    STORED_LAYER + "self_attn.k_norm.weight": MIXER + "project.project.k.steps.0.weight",
    STORED_LAYER + "self_attn.o_proj.weight": as_stored(
        MIXER + "output.weight", requires=MIXER + "project.gate.linear.weight"
    ),
}
"""The matrix of the queries also has the rows of the gate, head by head."""
DELTA: NameTable = {
    STORED_DELTA + "conv1d.weight": filters(MIXER + "project.convolution.weight"),
    STORED_DELTA + "A_log": MIXER + "rule.decay.A_log",
    STORED_DELTA + "dt_bias": MIXER + "rule.decay.dt_bias",
    STORED_DELTA + "norm.weight": MIXER + "norm.weight",
    STORED_DELTA + "out_proj.weight": as_stored(MIXER + "output.weight", requires=STRENGTH),
}
"""What Qwen3-Next and Qwen3.5 store alike of a layer of Gated DeltaNet."""
SHARED = MODEL_LAYER + "feed_forward.shared."
EXPERTS: NameTable = (
    llama_like.EXPERTS
    | {
        STORED_LAYER + f"mlp.shared_expert.{part}_proj.weight": f"{SHARED}expert.{part}.weight"
        for part in ("gate", "up", "down")
    }
    | {STORED_LAYER + "mlp.shared_expert_gate.weight": SHARED + "gate.weight"}
)
FUSED_EXPERTS: NameTable = {
    STORED_LAYER + "mlp.experts.gate_up_proj": llama_like.experts_in_one_tensor("gate", "up"),
    STORED_LAYER + "mlp.experts.down_proj": llama_like.experts_in_one_tensor("down"),
}
"""Further names of the experts: the matrices of all of them in one tensor, as Qwen3.5 is
published.
"""
SEPARATE_MAPS: NameTable = {
    STORED_DELTA + "in_proj_qkv.weight": stacked_rows(*QKV),
    STORED_DELTA + "in_proj_z.weight": GATE,
    STORED_DELTA + "in_proj_b.weight": STRENGTH,
    STORED_DELTA + "in_proj_a.weight": DECAY,
}
"""The maps of Gated DeltaNet as Qwen3.5 stores them."""
PARTS: NameTable = {
    **llama_like.EMBEDDING_AND_HEAD,
    **llama_like.PRE_NORMS,
    **ATTENTION,
    **DELTA,
}
"""Everything but the maps of Gated DeltaNet and the feed-forward layers."""


def family(
    config: type[QwenHybridConfig], build: Callable[[Any], Decoder], names: NameTable
) -> Family:
    """Return a family of these models. The layer for a second token (`mtp`) and the encoder of
    images (`visual`) are not loaded.
    """
    return replace(
        llama_like.family(config, build, names),
        buffers=(*llama_like.BUFFERS, r"mtp\..*", r"(model\.)?visual\..*"),
        rename_stored=llama_like.rename_language_model,
        keep_float32=DECAYS,
    )
