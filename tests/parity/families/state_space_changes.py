"""Wrong variants of layers of Mamba-2, and of attention beside them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from regard.nn import Attention
from regard.nn.blocks.norms import JoinedHeadsRMSNorm
from regard.positions import Rotary
from tests.parity.families.changes import Change, named


def recurrences(network: nn.Module) -> list[Any]:
    """All layers with a state."""
    return [module for module in network.modules() if hasattr(module, "rule")]


def softmax_layers(network: nn.Module) -> list[Attention]:
    return [module for module in network.modules() if isinstance(module, Attention)]


def part(place: str, change: Callable[[Any], Any]) -> Change:
    """A change of one part of every layer."""

    def apply(network: Any) -> None:
        for mixer in recurrences(network):
            change(mixer.get_submodule(place) if place else mixer)

    return named(f"{change.__name__} {place}", apply)


def zero(name: str) -> Callable[[nn.Module], Any]:
    return named(f"no {name}", lambda module: getattr(module, name).data.zero_())


def swap_b_and_c(mixer: Any) -> None:
    project = mixer.project
    project.q, project.k = project.k, project.q


def reverse_filters(convolution: Any) -> None:
    convolution.weight.data = convolution.weight.data.flip(1)


def one_group_of_the_norm(mixer: Any) -> None:
    old = mixer.norm
    norm = JoinedHeadsRMSNorm(old.heads, old.head_dim, eps=old.eps)
    norm.weight = mixer.norm.weight
    mixer.norm = norm


def other_groups(mixer: Any) -> None:
    """Head h with the group h % G instead of h // (N/G)."""
    shape = mixer.heads
    N, E = shape.outputs, shape.value_dim
    order = torch.arange(N).view(shape.groups, -1).T.flatten()
    for linear in (mixer.project.v.linear, mixer.gate.linear):
        linear.weight.data = linear.weight.data.unflatten(0, (N, E))[order].flatten(0, 1)


def no_limits(rule: Any) -> None:
    rule.step_limits = (0.0, 9e9)


COMMON = (
    part("", swap_b_and_c),
    part("", one_group_of_the_norm),
    part("", other_groups),
    part("project.convolution", reverse_filters),
    part("rule", zero("skip")),
    part("rule", zero("A_log")),
    part("rule", zero("dt_bias")),
    part("rule", no_limits),
)
"""Of a model with several groups of heads, and with limits of step sizes."""


def other_scale(network: Any) -> None:
    for attention in softmax_layers(network):
        attention.scale = 0.11


def other_key_heads(network: Any) -> None:
    """Query head h with key/value head h % G."""
    for attention in softmax_layers(network):
        H, G, D, _, _ = attention.project.shape
        order = torch.tensor([h // (H // G) + G * (h % (H // G)) for h in range(H)])
        for linear, dim in ((attention.project.q.linear, 0), (attention.output, 1)):
            weight = linear.weight.data.unflatten(dim, (H, D)).index_select(dim, order)
            linear.weight.data = weight.flatten(dim, dim + 1)


def positions_removed(network: Any) -> None:
    for attention in softmax_layers(network):
        for heads in (attention.project.q, attention.project.k):
            heads.steps = nn.ModuleList(x for x in heads.steps if not isinstance(x, Rotary))


def positions_added(network: Any) -> None:
    for attention in softmax_layers(network):
        for heads in (attention.project.q, attention.project.k):
            heads.steps.append(Rotary(heads.head_dim))
