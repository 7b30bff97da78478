"""`with_torch_linears`: give a model torch's own linear layers, for tools that want them."""

from __future__ import annotations

from torch import nn

from regard.nn import Linear


def with_torch_linears(module: nn.Module) -> nn.Module:
    """Replace each `regard.nn.Linear` of a module by a `torch.nn.Linear` with the same parameters.

    Tools that find layers by their exact class, such as `torch.ao.quantization.quantize_dynamic`,
    pass over `regard.nn.Linear`, because it is a subclass. The results stay the same up to
    rounding, but without the compiled product of few rows (`regard.ops.gemv`) until the tool
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
