"""Layers of Gated DeltaNet, as Qwen3-Next, Qwen3.5 and OLMo Hybrid have them."""

from __future__ import annotations

from torch import Tensor

from regard.configs.hybrid import GatedDeltaConfig
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import TensorRule
from regard.nn import HeadProjection, RMSNorm
from regard.nn.blocks.norms import L2Norm
from regard.nn.recurrence.delta import DeltaRule, LogDecay
from regard.nn.recurrence.projections import CausalConvolution, ConvolvedQKV, JoinedConvolution
from regard.nn.recurrence.recurrent import GateActivation, Recurrent
from regard.nn.weights import Linear


def delta_net(
    config: GatedDeltaConfig,
    convolution: CausalConvolution | JoinedConvolution | None = None,
    *,
    max_beta: float = 1.0,
    eps: float | None = None,
    gate_activation: GateActivation = "silu",
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
        gate_activation=gate_activation,
    )


def filters(parameter_name: str) -> TensorRule:
    """Return the rule of the filters of a short convolution, stored as torch's Conv1d has them."""

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
