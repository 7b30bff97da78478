"""Conversion of weights to a form with fewer bits, and what it changes layer by layer."""

from __future__ import annotations

from typing import cast

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.language import Phrase, counted
from regard.models.checkpoint.stored_forms import may_store, weight_form
from regard.models.convert.attention_maps import Checkpoint, ConversionStep, rebuild
from regard.nn.weights import store_weight, stored_modules
from regard.units import size


def to_stored_weights(checkpoint: Checkpoint, form: str) -> ConversionStep:
    """Store the weights of linear maps, head and embedding in fewer bits, in place."""
    wanted, network = weight_form(form), checkpoint.network
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    parameters: dict[int, Tensor] = {}
    for module in network.modules():
        for name, parameter in module._parameters.items():
            if parameter is not None:
                owners.setdefault(id(parameter), []).append((module, name))
                parameters[id(parameter)] = parameter
    before = after = count = 0
    dtype: torch.dtype | None = None
    for key, weight in parameters.items():
        if not may_store(weight, owners[key]):
            continue
        wanted.check_dtype(weight.dtype)
        record = wanted.store(weight.detach(), weight.dtype)
        before, after, count = before + weight.nbytes, after + record.bytes, count + 1
        dtype = weight.dtype
        for module, _ in owners[key]:
            store_weight(module, record)
    if dtype is None:
        raise ArgumentError(
            f"no weight of this model can be stored as {form}: it has no linear map of "
            "regard.nn.Linear"
        )
    old = str(dtype).removeprefix("torch.")
    what = Phrase(
        "weights to {form}: {before} in {old} to {after}",
        form=form,
        before=size(before),
        old=old,
        after=size(after),
    )
    return ConversionStep(
        what, notes=(Phrase("{matrices} stored", matrices=counted(count, "matrix", "matrices")),)
    )


def to_dense(checkpoint: Checkpoint) -> tuple[Checkpoint, ConversionStep]:
    """Convert weights that are stored in fewer bits, and all others, to float32."""
    records = checkpoint.records()
    dense = {id(record): record.dequantize(torch.float32) for record in records.values()}
    weights = {name: x.to(torch.float32) for name, x in checkpoint.weights().items()}
    weights |= {name: dense[id(record)] for name, record in records.items()}
    what = Phrase(
        "{matrices} in fewer bits to float32", matrices=counted(len(dense), "matrix", "matrices")
    )
    return rebuild(checkpoint.config, weights), ConversionStep(what)


@torch.inference_mode()
def hidden_errors(
    before: nn.Module, after: nn.Module, ids: Int[Tensor, "N T"]
) -> tuple[float, ...]:
    """Return how much the hidden states after each layer change, relative to their norm."""
    old, new = (_hidden_states(model, ids[:1]) for model in (before, after))
    return tuple(
        float((b - a).norm() / a.norm()) if bool(a.any()) else 0.0
        for a, b in zip(old, new, strict=True)
    )


def _hidden_states(model: nn.Module, ids: Tensor) -> list[Tensor]:
    """Return the hidden states after each layer, in fp64."""
    states: list[Tensor] = []

    def keep(_module: nn.Module, _inputs: object, output: object) -> None:
        states.append(cast("Tensor", output).double())

    layers = cast("nn.ModuleList", model.layers)
    handles = [layer.register_forward_hook(keep) for layer in layers]
    try:
        model(ids)
    finally:
        for handle in handles:
            handle.remove()
    return states


def is_stored(network: nn.Module) -> bool:
    """Return whether a network has weights that are stored in fewer bits."""
    return any(True for _ in stored_modules(network))
