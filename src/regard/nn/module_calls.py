"""Whether a module computes what its class says, and calls as nodes of `torch.fx` graphs.

Faster code may take a module's place only if nothing (a hook, another `forward`, another
`nn.Module.__call__`) observes or replaces it.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.modules import module as torch_module

from regard.errors import ArgumentError

if TYPE_CHECKING:
    from regard.caches import Cache


CALLS = ("__call__", "_wrapped_call_impl", "_call_impl", "__getattr__", "forward")
"""The methods by which torch calls a module."""


def why_not_as_written(*modules: nn.Module) -> str | None:
    """Return why a call of modules may do something else than the code of their classes, or
    None.
    """
    if torch_module._has_any_global_hook():
        return "a global module hook is registered"
    for module in modules:
        name = type(module).__name__
        if module._forward_hooks or module._forward_pre_hooks:
            return f"{name} has a hook"
        for method in module.__dict__:
            if callable(getattr(type(module), method, None)):
                return f"the {method} of a {name} was replaced"
    kinds = dict.fromkeys(
        x for kind in dict.fromkeys(map(type, modules)) for x in kind.__mro__[:-1]
    )
    patched = next((x for kind in kinds for x in _patched_methods(kind)), None)
    return None if patched is None else f"{patched} was replaced"


def is_plain(module: nn.Module, kind: type[nn.Module]) -> bool:
    """Return whether a module is exactly of a class of `_FIRST_FORWARDS`, and unchanged."""
    return (
        type(module) is kind
        and not (module._forward_hooks or module._forward_pre_hooks)
        and kind.forward is _FIRST_FORWARDS.get(kind)
        and nn.Module.__call__ is _FIRST_CALL
        and "forward" not in module.__dict__
        and not torch_module._has_any_global_hook()
    )


def methods_of(kind: type) -> list[str]:
    """Return the names of the methods and properties that a class itself defines."""
    is_ours = kind.__module__.startswith("regard.")
    return [
        name
        for name, member in vars(kind).items()
        if name in CALLS
        or (is_ours and name[:2] != "__" and isinstance(member, FunctionType | property))
    ]


def _patched_methods(kind: type) -> Iterator[str]:
    """Yield the methods of a class of this package or of torch that another file defines."""
    home = getattr(sys.modules.get(kind.__module__), "__file__", None)
    if home is None or not kind.__module__.startswith(("regard.", "torch.")):
        return
    for name in methods_of(kind):
        member = vars(kind)[name]
        method = member.fget if isinstance(member, property) else member
        if not isinstance(method, FunctionType) or method.__code__.co_filename != home:
            yield f"{kind.__name__}.{name}"


_FIRST_CALL = nn.Module.__call__
_FIRST_FORWARDS: dict[type, object] = {
    kind: kind.forward for kind in (nn.Identity, nn.SiLU) if not any(_patched_methods(kind))
}
"""The forward of each class that `is_plain` knows; torch.compile cannot call a cached function."""


def is_proxy(x: object) -> bool:
    """Return whether an input is a proxy of `torch.fx.symbolic_trace`, without values."""
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
