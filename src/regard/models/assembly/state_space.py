"""Layers of Mamba-2, as several families have them: the module, and its checkpoint names."""

from __future__ import annotations

import math

from regard.configs.state_space import Mamba2Sizes
from regard.models.checkpoint.family import NameTable, TensorRule, stacked_rows
from regard.nn import CausalConvolution, ConvolvedQKV, HeadProjection, Recurrent
from regard.nn.decay_rules import Mamba2Rule
from regard.nn.linear import Linear
from regard.nn.norms import JoinedHeadsRMSNorm

FLOAT32 = ("*.rule.A_log", "*.rule.dt_bias", "*.rule.skip")
"""Parameters of the recurrence that stay in float32 or better: an error of a decay grows with the
number of tokens.
"""


def mixer(
    sizes: Mamba2Sizes,
    *,
    eps: float,
    step_limits: tuple[float, float] = (0.0, math.inf),
    gate_before_norm: bool = True,
) -> Recurrent:
    """Build a layer of Mamba-2 with initial weights.

    Args:
        sizes: its sizes.
        eps: the epsilon of its norm, whose mean is over each group of heads.
        step_limits: the smallest and the largest step size.
        gate_before_norm: whether the gate multiplies before the norm.
    """
    M, N, E = sizes.dim, sizes.heads, sizes.head_dim
    q, k = (HeadProjection(M, sizes.groups, sizes.state, bias=sizes.bias) for _ in "qk")
    v, gate = (HeadProjection(M, N, E, bias=sizes.bias) for _ in "vg")
    channels = N * E + 2 * sizes.groups * sizes.state
    convolution = CausalConvolution(channels, sizes.kernel, bias=sizes.conv_bias)
    norm = JoinedHeadsRMSNorm(N, E, groups=sizes.groups, eps=eps) if sizes.normed else None
    return Recurrent(
        ConvolvedQKV(q, k, v, convolution, order="vkq"),
        Mamba2Rule(M, N, bias=sizes.bias, step_limits=step_limits),
        Linear(N * E, M, bias=sizes.output_bias),
        norm=norm,
        gate=gate,
        gate_before_norm=gate_before_norm,
    )


def names(stored: str, ours: str) -> NameTable:
    """Return the table entries of a layer of Mamba-2.

    Args:
        stored, ours: what stands before the stored names, and before the names in the network.

    >>> table = names("mixer.", "attention.")
    >>> table["mixer.D"]
    'attention.rule.skip'
    """
    parts = ("gate", "project.v", "project.k", "project.q", "rule")
    taps = ours + "project.convolution."
    table: dict[str, str | TensorRule] = {
        f"{stored}in_proj.{end}": stacked_rows(*(f"{ours}{part}.linear.{end}" for part in parts))
        for end in ("weight", "bias")
    }
    return table | {
        stored + "A_log": ours + "rule.A_log",
        stored + "D": ours + "rule.skip",
        stored + "dt_bias": ours + "rule.dt_bias",
        stored + "conv1d.weight": filters(taps + "weight"),
        stored + "conv1d.bias": taps + "bias",
        stored + "norm.weight": ours + "norm.weight",
        stored + "out_proj.weight": ours + "output.weight",
        stored + "out_proj.bias": ours + "output.bias",
    }


def filters(parameter_name: str) -> TensorRule:
    """Return the rule of the filters of a convolution, which are stored as [channels, 1, kernel].

    >>> import torch
    >>> filters("w").pack([torch.zeros(3, 4)]).shape
    torch.Size([3, 1, 4])
    """
    return TensorRule(
        (parameter_name,), lambda stored, _: (stored[:, 0],), lambda parts: parts[0][:, None]
    )
