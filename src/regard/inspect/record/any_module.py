"""Run any `nn.Module`, and record the calls of torch's attention functions that it makes."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.record.recorder import Recorder
from regard.inspect.record.recording import UnrecordedCall
from regard.integrations.pytorch.module_places import ModulePlaces
from regard.integrations.pytorch.watch import watch

LOOKED_FOR = (
    "it made no call of F.scaled_dot_product_attention, nn.MultiheadAttention, "
    "nn.TransformerEncoderLayer, flex_attention or regard.attend"
)
RECORDED_IMPLEMENTATIONS = ("regard", "sdpa", "flex_attention")
"""The attention implementations of transformers that can be recorded."""


class SeenCalls(NamedTuple):
    """What a run of a module showed about its attention calls.

    Args:
        places: what was watched.
    """

    places: ModulePlaces

    def unrecorded_calls(self) -> tuple[UnrecordedCall, ...]:
        """Return the calls that could not be recorded."""
        return tuple(
            UnrecordedCall(place, why, n) for (place, why), n in self.places.unrecorded.items()
        )

    def nothing_recorded(self) -> str:
        """Say why the recording is empty, and what may be done."""
        if self.places.unrecorded:
            return "these calls could not be recorded: " + "; ".join(
                f"{place or 'the model itself'}: {why}" for place, why in self.places.unrecorded
            )
        if not self.places.written_out:
            return LOOKED_FOR
        place, shape = next(iter(self.places.written_out.items()))
        return (
            f"{LOOKED_FOR}; {place or 'the model itself'} computed a softmax of shape {shape}, so "
            "that its attention may be written out: call F.scaled_dot_product_attention there"
        )


def run_module(
    model: nn.Module, inputs: Sequence[object], arguments: Mapping[str, object], recorder: Recorder
) -> tuple[SeenCalls, dict[str, Any]]:
    """Run a module once, or generate with a transformers model, while a recorder is open."""
    named = dict(arguments)
    first = inputs[0] if len(inputs) == 1 else None
    if isinstance(first, Mapping) and not named.keys() - {"tokens"}:
        inputs, named = (), {**first, **named}
    run: Callable[..., object] = model
    if is_transformers_model(model):
        inputs, named, run = _transformers_run(model, inputs, named)
    # not inference mode: tables that a module computes once would be useless in training
    with ExitStack() as stack:
        stack.enter_context(torch.no_grad())
        places = stack.enter_context(watch(model))
        stack.enter_context(recorder)
        result = run(*inputs, **named)
    ids = named.get("input_ids")
    if run is not model:
        ids = result
    return SeenCalls(places), {"ids": ids.cpu() if isinstance(ids, Tensor) else None}


def is_transformers_model(model: nn.Module) -> bool:
    """Return whether a module has a config of transformers that names an implementation."""
    return getattr(getattr(model, "config", None), "_attn_implementation", None) is not None


def _transformers_run(
    model: nn.Module, inputs: Sequence[object], named: dict[str, object]
) -> tuple[Sequence[object], dict[str, object], Callable[..., object]]:
    """Return how to run a transformers model: its inputs, its keyword arguments and the function
    to call.
    """
    _check_attention_implementation(model)
    config: object = getattr(model, "config", None)
    if any(not isinstance(x, Tensor) for x in inputs):
        raise ArgumentTypeError(
            "text must be ids [B,T], or a mapping of the model's arguments, for a transformers "
            "model"
        )
    has_layer_index = any(getattr(m, "layer_idx", None) is not None for m in model.modules())
    if getattr(config, "is_encoder_decoder", False) or not has_layer_index:
        from regard.integrations.transformers import name_taps

        name_taps(model)  # the layers have no index, or two layers have the same index
    if inputs:
        named = {getattr(model, "main_input_name", "input_ids"): inputs[0], **named}
        inputs = inputs[1:]
    tokens = named.pop("tokens", 0)
    if not tokens:
        return inputs, named, model
    # the types of nn.Module know no method of this name
    generate: Callable[..., object] = getattr(model, "generate")  # noqa: B009
    return inputs, {**named, "max_new_tokens": tokens, "do_sample": False}, generate


def _check_attention_implementation(model: nn.Module) -> None:
    """Check that the attention of a transformers model can be recorded, and warn of parts where
    it cannot.
    """
    # for each config: the first module that has it, and its attention implementation
    used: dict[int, tuple[str, str]] = {}
    for name, module in model.named_modules():
        config = getattr(module, "config", None)
        implementation = getattr(config, "_attn_implementation", None)
        if implementation is not None:
            used.setdefault(id(config), (name or type(model).__name__, str(implementation)))
    others = {
        name: implementation
        for name, implementation in used.values()
        if implementation not in RECORDED_IMPLEMENTATIONS
    }
    if len(others) == len(used):
        from regard.integrations.transformers.supported_models import ways_to_record

        implementations = " and ".join(dict.fromkeys(map(repr, others.values())))
        raise ArgumentError(
            f"{type(model).__name__} computes its attention with {implementations}, so that "
            f"nothing would be recorded; {ways_to_record(model)}"
        )
    parts = {
        name: implementation
        for name, implementation in others.items()
        if name != type(model).__name__
    }
    if parts:
        descriptions = ", ".join(
            f"{name} ({implementation!r})" for name, implementation in parts.items()
        )
        warnings.warn(
            f"parts of {type(model).__name__} do not compute their attention with regard or sdpa, "
            f"and are not recorded: {descriptions}; "
            'model.set_attn_implementation("regard") sets all parts',
            stacklevel=5,
        )
