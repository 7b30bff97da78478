"""Wrong variants that several families have: each must be told apart from the right one."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterator
from operator import attrgetter
from typing import Any

import torch
from torch import nn

from regard.biases import ALiBi
from regard.masks import Causal, Window
from regard.nn import Attention, CausalConvolution, Recurrent
from regard.nn.blocks.norms import OffsetRMSNorm
from regard.nn.projections.fused import FusedQKV
from regard.nn.recurrence.delta import ChannelLogDecay, LogDecay
from regard.positions import Rotary
from tests.parity.families.harness import distance, ids_of

Change = Callable[[Any], Any]


def named(name: str, change: Change) -> Change:
    change.__name__ = name
    return change


def on(place: str, name: str, change: Callable[[Any], Any]) -> Change:
    """A change of every module at a place: a pattern of names, in which `*` is any number."""
    pattern = re.compile(place.replace(".", r"\.").replace("*", r"\d+"))

    def apply(network: nn.Module) -> None:
        found = [module for at, module in network.named_modules() if pattern.fullmatch(at)]
        assert found, f"nothing is at {place}"
        for module in found:
            change(module)

    return named(f"{place} {name}", apply)


def put(place: str, **values: Any) -> Change:
    """Attributes of every module at a place, changed."""

    def change(module: Any) -> None:
        for key, value in values.items():
            setattr(module, key, value)

    return on(place, ", ".join(f"{key} = {value}" for key, value in values.items()), change)


def zeros(place: str) -> Change:
    """A parameter of every module at a place is 0."""
    front, _, name = place.rpartition(".")
    return on(front, f"{name} = 0", lambda module: getattr(module, name).data.zero_())


def swap(place: str, *names: str) -> Change:
    """Two attributes of every module at a place, exchanged."""

    def change(module: Any) -> None:
        values = [attrgetter(name)(module) for name in names]
        for name, value in zip(names, reversed(values), strict=True):
            front, _, last = name.rpartition(".")
            setattr(attrgetter(front)(module) if front else module, last, value)

    return on(place, f"swapped {names}", change)


def drop(place: str, kind: type[nn.Module]) -> Change:
    """No steps of a kind in the heads at a place."""

    def change(heads: Any) -> None:
        heads.steps = nn.ModuleList(x for x in heads.steps if not isinstance(x, kind))

    return on(place, f"without {kind.__name__}", change)


def attentions(network: Any) -> list[Any]:
    return [block.attention for block in network.layers]


def rotaries(network: nn.Module) -> Iterator[Rotary]:
    return (module for module in network.modules() if isinstance(module, Rotary))


def interleave(network: Any) -> None:
    for rotary in rotaries(network):
        rotary.layout, rotary._last = "interleaved", None


def halves(network: Any) -> None:
    for rotary in rotaries(network):
        rotary.layout, rotary._last = "half", None


def rotate(layers: slice, *arguments: Any, first: bool = False, **options: Any) -> Change:
    """Other rotary positions in some layers, whether heads are fused or not; `first` where norms
    stand behind them.
    """

    def change(network: Any) -> None:
        for attention in attentions(network)[layers]:
            project, made = attention.project, Rotary(*arguments, **options)
            parts = [project] if isinstance(project, FusedQKV) else [project.q, project.k]
            for part in parts:
                part.steps[0 if first else -1] = made

    return named(f"rotary {arguments} {options}", change)


def each(name: str, **values: Any) -> Change:
    """Attributes of every attention, changed."""

    def change(network: Any) -> None:
        for attention in attentions(network):
            for key, value in values.items():
                setattr(attention, key, value)

    return named(name, change)


def windows(*sizes: int | None) -> Change:
    """Other windows, layer by layer."""

    def change(network: Any) -> None:
        for attention, size in zip(attentions(network), sizes, strict=True):
            attention.mask = Causal() if size is None else Causal() & Window(size)

    return named(f"windows {sizes}", change)


def no_decay(network: nn.Module) -> None:
    for decay in network.modules():
        if isinstance(decay, (LogDecay, ChannelLogDecay)):
            decay.A_log.data.fill_(-30.0)


def no_convolution(network: nn.Module) -> None:
    """Filters that read the present token only."""
    for convolution in network.modules():
        if isinstance(convolution, CausalConvolution):
            convolution.weight.data[:, :-1] = 0


def slopes(name: str, values: Any) -> Change:
    return each(name, bias=ALiBi(slopes=values))


def no_bias(network: Any) -> None:
    each("no bias", bias=None)(network)


def without_the_one(network: Any) -> None:
    """Norms that multiply with w, not with 1 + w."""
    for module in network.modules():
        if isinstance(module, OffsetRMSNorm):
            module.weight.data -= 1


def norms_swapped(network: Any) -> None:
    for block in network.layers:
        paths = (block.attention_residual, block.feed_forward_residual)
        paths[0].norm, paths[1].norm = paths[1].norm, paths[0].norm


def reorder(attention: Any, order: Any) -> None:
    """The rows of a fused matrix, read in another order."""
    old = attention.project
    attention.project = FusedQKV(
        old.linear.in_features,
        old.heads,
        old.groups,
        old.head_dim,
        order=order,
        steps=tuple(old.steps),
        bias=old.linear.bias is not None,
    )
    attention.project.linear = old.linear


def head_by_head(network: Any) -> None:
    """[q k v] of each head read as [all q | all k | all v], or the reverse."""
    for attention in attentions(network):
        reorder(attention, "parts" if attention.project.order == "heads" else "heads")


def keys_for_values(network: Any) -> None:
    """The rows of keys and of values exchanged, in a matrix [all q | all k | all v]."""
    for attention in attentions(network):
        linear = attention.project.linear
        for x in (linear.weight, linear.bias):
            if x is not None:
                q, k, v = x.data.chunk(3)
                x.data = torch.cat([q, v, k])


def activation(made: nn.Module) -> Change:
    def change(network: Any) -> None:
        for block in network.layers:
            block.feed_forward.activation = made

    return named(str(made), change)


def recurrences(network: nn.Module) -> list[Any]:
    """All layers with a state."""
    return [module for module in network.modules() if isinstance(module, Recurrent)]


def softmax_layers(network: nn.Module) -> list[Any]:
    return [module for module in network.modules() if isinstance(module, Attention)]


def other_groups(network: Any) -> None:
    """Query head h with key/value head h % G."""
    for attention in softmax_layers(network):
        H, G, D, _, _ = attention.project.shape
        order = torch.tensor([h // (H // G) + G * (h % (H // G)) for h in range(H)])
        for linear, dim in ((attention.project.q.linear, 0), (attention.output, 1)):
            weight = linear.weight.data.unflatten(dim, (H, D)).index_select(dim, order)
            linear.weight.data = weight.flatten(dim, dim + 1)


def assert_other_gelu(mine: Any, model: Any) -> None:
    """The two forms of GELU differ by 5e-4 at most: more than the bound allows, though not a
    hundred times as much.
    """
    ids = ids_of(model)
    exact = model(input_ids=ids, use_cache=False).logits
    network = copy.deepcopy(mine.decoder)
    erf = network.layers[0].feed_forward.activation.approximate == "none"
    activation(nn.GELU("tanh" if erf else "none"))(network)
    assert distance(network(ids), exact) > 3
