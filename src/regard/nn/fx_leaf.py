"""Modules as single nodes of the graphs of `torch.fx.symbolic_trace`."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.caches import Cache


def is_proxy(x: object) -> bool:
    """Return whether an input is a proxy of `torch.fx.symbolic_trace`, which has no values and no
    sizes.

    >>> is_proxy(torch.ones(2))
    False
    """
    return isinstance(x, torch.fx.Proxy)


def call_as_leaf(
    module: nn.Module,
    forward: Callable[..., object],
    x: Any,
    *args: object,
    cache: Cache | None = None,
    **options: object,
) -> Tensor:
    """Record the call of a module as one node of the graph, as torch does for its own modules."""
    tracer: Any = x.tracer
    name = type(module).__name__
    if module is tracer.root:
        raise ArgumentError(
            f"torch.fx.symbolic_trace was given a {name}, whose computation depends on sizes and "
            "positions that a symbolic trace does not have: trace a model that contains it (it is "
            "then one node), or use torch.export.export"
        )
    if cache is not None:
        raise ArgumentError(
            f"torch.fx traces a call of {name} with a cache, which a graph cannot hold: wrap the "
            "module in regard.integrations.pytorch.WithPast and use torch.export, or trace without "
            "a cache"
        )
    if type(module).forward is not forward:
        raise ArgumentError(
            f"torch.fx traces {name}.forward, which calls the forward of its base class; make it "
            "one node by a tracer whose is_leaf_module returns True for it"
        )
    path = tracer.path_of_module(module)
    node: Tensor = tracer.create_proxy("call_module", path, (x, *args), options)
    return node
