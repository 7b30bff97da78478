"""`accelerate`: run attention and linear layers of a model of transformers through this package."""

from __future__ import annotations

from typing import Self

from torch import nn
from transformers import PreTrainedModel

from regard.errors import ArgumentTypeError
from regard.integrations.transformers.supported_models import IMPLEMENTATION
from regard.nn.weights import Linear


class AcceleratedModel:
    """A model of transformers that `accelerate` has changed; `remove()`, or the end of a `with`
    block, puts everything back.

    Args:
        linears: the layers whose products of few rows run through `regard.ops.gemv`.
        attention: the attention implementation that the model had before.
    """

    def __init__(self, model: PreTrainedModel, linears: list[nn.Linear], attention: str) -> None:
        self.model, self.linears, self._attention = model, linears, attention

    def remove(self) -> None:
        """Give the model back its attention and its layers; a second call does nothing."""
        if self.linears or self._attention != self.model.config._attn_implementation:
            self.model.set_attn_implementation(self._attention)
        for layer in self.linears:
            if layer.__class__ is Linear:
                object.__setattr__(layer, "__class__", nn.Linear)
        self.linears = []

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *problem: object) -> None:
        self.remove()


def accelerate(model: PreTrainedModel) -> AcceleratedModel:
    """Run the attention of a model of transformers by `regard.attend`, and its linear layers by
    `regard.nn.weights.linear`.

    A decoded token spends most of its time in linear layers. On a CPU, their products of a few rows
    read the weights at memory bandwidth in every dtype (`regard.ops.gemv`), and fp16 products of
    many rows are computed in fp32. Parameters, names, hooks and `state_dict` stay as they are; the
    results stay the same up to rounding.

    Only layers whose class is exactly `nn.Linear` change; quantized layers and layers of adapters
    keep theirs. For long texts pass a `PreallocatedCache` to `generate`, so that a step copies no
    old keys.

    Args:
        model: the model, which is changed in place.

    Returns:
        A handle: `handle.remove()` puts everything back, and so does the end of `with handle:`.

    Raises:
        ArgumentTypeError: the model is not a model of transformers.
        ArgumentError: the model computes its attention itself, so that it cannot be replaced.

    >>> import torch, transformers
    >>> config = transformers.LlamaConfig(
    ...     vocab_size=16, hidden_size=16, intermediate_size=16, num_hidden_layers=2,
    ...     num_attention_heads=4, num_key_value_heads=2, pad_token_id=0,
    ... )
    >>> model = transformers.LlamaForCausalLM(config).eval()
    >>> with accelerate(model) as accelerated:
    ...     ids = model.generate(torch.tensor([[1, 2, 3]]), max_new_tokens=2, do_sample=False)
    ...     ids.shape, len(accelerated.linears), type(model.lm_head).__module__
    (torch.Size([1, 5]), 15, 'regard.nn.weights')
    >>> type(model.lm_head).__module__
    'torch.nn.modules.linear'
    """
    if not isinstance(model, PreTrainedModel):
        raise ArgumentTypeError(
            f"model is {type(model).__name__}; it must be a model of transformers; "
            "regard.accelerate(model) serves every other module"
        )
    before = model.config._attn_implementation
    model.set_attn_implementation(IMPLEMENTATION)
    linears = [x for x in model.modules() if type(x) is nn.Linear]
    for layer in linears:
        layer.__class__ = Linear  # the layer keeps its parameters, hooks and name
    return AcceleratedModel(model, linears, before)
