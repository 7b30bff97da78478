"""Modules for other tools: with caches as tensors that go in and come out (`WithPast`), and with
torch's own linear layers (`with_torch_linears`).
"""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from regard.caches import Cache, Cross, Growing, State
from regard.errors import ArgumentError, ArgumentTypeError
from regard.nn import Linear
from regard.nn.module_calls import call_as_leaf, is_proxy
from regard.span import Span
from regard.units import plural


class WithPast(nn.Module):
    """A layer or a decoder that takes the cached tensors of the earlier tokens as inputs, and
    returns those of all tokens beside its output.

    out, present = module(x, caches that hold past);  present = past and the new tokens

    No Python object holds a state, so that `torch.export`, `torch.jit.trace` and
    `torch.onnx.export` make one program for the prompt (past of length 0) and for every later step.
    Past and present hold the parts of the first layer's cache (for most mechanisms keys and values,
    `[B, G, S, D]`), then those of the second layer, and so on. They grow by the new tokens in every
    call, even where a window would let a cache forget. No token is padding.

    Args:
        module: a module with `new_cache()`, such as `regard.nn.Attention`, or with `new_caches()`,
            such as the `decoder` of a loaded model.

    Raises:
        ArgumentTypeError: the module has neither method.
        ArgumentError: a layer keeps something other than tokens, such as the state of a recurrence;
            when called, past does not fit the layers.

    >>> import torch
    >>> from regard.nn.variants import build
    >>> step = WithPast(build("gqa", 32, 4, groups=2))
    >>> past = step.empty_past(torch.randn(1, 1, 32))
    >>> z, *present = step(torch.randn(1, 5, 32), *past)
    >>> z, *present = step(torch.randn(1, 1, 32), *present)
    >>> z.shape, [tuple(x.shape) for x in present]
    (torch.Size([1, 1, 32]), [(1, 2, 6, 8), (1, 2, 6, 8)])
    """

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self._is_stack = hasattr(module, "new_caches")
        if not (self._is_stack or hasattr(module, "new_cache")):
            raise ArgumentTypeError(
                f"WithPast was given a {type(module).__name__}, which has neither new_cache() nor "
                "new_caches(); pass a layer such as regard.nn.Attention, or the decoder of a model"
            )
        self.module: Any = module
        for i, cache in enumerate(self._new_caches()):
            if isinstance(cache, (State, Cross)) or not isinstance(cache, Cache):
                raise ArgumentError(
                    f"layer {i} of the {type(module).__name__} stores its past in a "
                    f"{type(cache).__name__}; WithPast takes mechanisms whose caches store tokens: "
                    "for others write a module that fills and reads the cache by "
                    "cache.fill(contents) and cache.contents()"
                )

    # torch.onnx.export(dynamo=False) appends the defaults of further arguments to the past
    def forward(self, x: Tensor, *past: Tensor) -> tuple[Tensor, ...]:
        """Run the module on T new tokens, which stand behind those of the past.

        Args:
            x: what the module takes: hidden states `[B, T, M]`, or token ids `[B, T]`.
            *past: the cached tensors of the S tokens at positions 0 to S - 1, each `[B, n, S, d]`,
                in the order in which a call returns them; none of them is the same as S = 0.

        Returns:
            The output of the module, and the cached tensors of all S + T tokens.
        """
        if type(x) is not Tensor and is_proxy(x):
            node: Any = call_as_leaf(self, WithPast.forward, x, *past)
            return node  # type: ignore[no-any-return]
        length = past[0].shape[2] if past else 0
        caches = _filled(past, Span(0, length), len(self._new_caches()))
        positions = Span(length, x.shape[1])
        out = self.module(x, positions, caches if self._is_stack else caches[0])
        return out, *(part for cache in caches for part in _parts(cache))

    def empty_past(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return the past of the first call: tensors `[B, n, 0, d]`.

        Args:
            x: an input of one or more tokens, on which the module is run once to learn the sizes.

        Returns:
            The tensors, in the order in which a call takes them.
        """
        _, *present = self(x)
        return tuple(part[:, :, :0].detach() for part in present)

    def _new_caches(self) -> list[Cache]:
        """Return an empty cache for each layer."""
        caches: list[Cache] = (
            self.module.new_caches() if self._is_stack else [self.module.new_cache()]
        )
        return caches


def _filled(past: tuple[Tensor, ...], positions: Span, layers: int) -> list[Cache]:
    """Return one cache for each layer, which holds that layer's part of the past."""
    if len(past) % max(1, layers):
        raise ArgumentError(
            f"past has {plural(len(past), 'tensor')} for {plural(layers, 'layer')}; it must have "
            "as many for each layer as a call returns behind the output"
        )
    size, caches = len(past) // max(1, layers), []
    for i in range(layers):
        parts = past[i * size : (i + 1) * size]
        cache = Growing()
        if parts:
            cache.update(parts, positions)
        caches.append(cache)
    return list(caches)


def _parts(cache: Cache) -> list[Tensor]:
    """Return the tensors of a cache without their positions."""
    return [
        x for name, x in cache.contents().items() if name != "positions" and isinstance(x, Tensor)
    ]


def with_torch_linears(module: nn.Module) -> nn.Module:
    """Replace each `regard.nn.Linear` of a module by a `torch.nn.Linear` with the same parameters.

    Tools that find layers by their exact class, such as `torch.ao.quantization.quantize_dynamic`,
    pass over `regard.nn.Linear`, because it is a subclass. The results stay the same up to
    rounding, but without the compiled product of few rows (`regard.ops.tokenwise`) until the tool
    replaces the layers by its own. Subclasses of `regard.nn.Linear` keep their class.

    Args:
        module: the module, which is changed in place.

    Returns:
        The module; a new layer if the module is itself a `regard.nn.Linear`.

    >>> import torch
    >>> from regard.nn.variants import build
    >>> layer = with_torch_linears(build("gqa", 32, 4, groups=2))
    >>> type(layer.output) is torch.nn.Linear
    True
    """
    if type(module) is Linear:
        return _torch_linear(module)
    # named_children would pass over the second name of a layer that two names share
    for name, child in module._modules.items():
        if child is not None:
            setattr(module, name, with_torch_linears(child))
    return module


def _torch_linear(module: Linear) -> nn.Linear:
    """Return a layer of torch that shares the parameters, the mode and the hooks."""
    # on "meta" no values are drawn for parameters that are replaced
    layer = nn.Linear(
        module.in_features, module.out_features, bias=module.bias is not None, device="meta"
    )
    layer.__dict__.update(module.__dict__)
    return layer
