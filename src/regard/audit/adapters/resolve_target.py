"""Import or construct the target that the user names, and choose the adapter that can call it."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from regard.audit.adapters import modules
from regard.audit.adapters.base import AuditClaims, CallInputs, TargetAdapter
from regard.audit.adapters.call_arguments import (
    ARGUMENT_NAMES,
    DEFAULT_LENGTH,
    SIZE_NAMES,
    parameters,
    query_key_value_names,
)
from regard.audit.adapters.functions import CustomAdapter, FunctionAdapter
from regard.audit.adapters.mask_formats import MaskBehavior, detect_conventions, overflows
from regard.audit.adapters.modules import ModuleAdapter
from regard.audit.adapters.projections import attribute
from regard.errors import ArgumentError, ArgumentTypeError
from regard.models import Model, Seq2Seq, TextEncoder
from regard.nn.mixer import Mixer
from regard.process_state import seeded

SIZE_FLAGS = {
    "dim": "--dim",
    "heads": "--heads",
    "kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "window": "--window",
}
ADAPTER_HINT = (
    "give an adapter: --adapter package.module:function, adapter(target, x, ...) -> output"
)


def import_target(path: str) -> Any:
    """Import the object that "package.module:name" names; the current folder is searched, too."""
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ArgumentError(
            f"{path!r} must be package.module:name, such as torch.nn:MultiheadAttention; a model's "
            "folder or GGUF file is given with --model",
            argument="target",
            value=path,
        )
    current_folder = str(Path.cwd())
    sys.path.insert(0, current_folder)
    try:
        imported: object = importlib.import_module(module)
    except Exception as error:
        raise ArgumentError(
            f"{module} cannot be imported: {type(error).__name__}: {error}; run this where "
            f"`python -c 'import {module}'` works",
            argument="target",
            value=path,
        ) from error
    finally:
        sys.path.remove(current_folder)
    for part in name.split("."):
        if not hasattr(imported, part):
            public = ", ".join(n for n in vars(imported) if not n.startswith("_"))
            raise ArgumentError(
                f"{module} has no {name}; it has {public[:300]}", argument="target", value=path
            )
        imported = getattr(imported, part)
    return imported


def construct_module(
    maker: Callable[..., nn.Module], claims: AuditClaims, options: dict[str, object]
) -> nn.Module:
    """Build a module from a class or factory, with the claimed sizes under its argument names."""
    signature_parameters = parameters(maker)
    arguments = {**_sizes(signature_parameters, claims), **options}
    missing = [
        name
        for name, p in signature_parameters.items()
        if p.default is inspect.Parameter.empty and name not in arguments
    ]
    maker_name = getattr(maker, "__name__", str(maker))
    if missing:
        flags = " ".join(_flag(name) for name in missing)
        raise ArgumentError(
            f"{maker_name}{inspect.signature(maker)} needs {', '.join(missing)}: give {flags} "
            "(dim=, heads=, options={...} in Python), or name a function without arguments that "
            "builds the module"
        )
    try:
        with seeded(0):
            module = maker(**arguments)
    except Exception as error:
        arguments_text = ", ".join(f"{name}={value!r}" for name, value in arguments.items())
        raise ArgumentError(
            f"{maker_name}({arguments_text}) raised {type(error).__name__}: {error}; give other "
            "sizes or --set name=value"
        ) from error
    if not isinstance(module, nn.Module):
        raise ArgumentTypeError(
            f"{maker_name} made {type(module).__name__}; it must be a torch.nn.Module"
        )
    return module


def _flag(name: str) -> str:
    """Return the command-line option that gives a constructor's argument of this name."""
    size = next((size for size in SIZE_FLAGS if name in SIZE_NAMES[size]), None)
    return f"--set {name}=value" if size is None else f"{SIZE_FLAGS[size]} N"


def claims_with_sizes(
    maker: Callable[..., object], claims: AuditClaims, options: dict[str, object]
) -> AuditClaims:
    """Return the claims, with missing sizes taken from the constructor's arguments and defaults.

    >>> def make(d_model, n_head=2): ...
    >>> claims = claims_with_sizes(make, AuditClaims(), {"d_model": 8})
    >>> claims.dim, claims.heads
    (8, 2)
    """
    signature_parameters = parameters(maker)
    defaults = {
        n: p.default
        for n, p in signature_parameters.items()
        if p.default is not inspect.Parameter.empty
    }
    arguments = {**defaults, **_sizes(signature_parameters, claims), **options}
    known_sizes: dict[str, Any] = {}
    for size in SIZE_FLAGS:
        if getattr(claims, size) is None:
            values = (
                arguments[name]
                for name in SIZE_NAMES[size]
                if name in arguments and name in signature_parameters
            )
            known_sizes[size] = next(
                (v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0),
                None,
            )
    sizes = {size: value for size, value in known_sizes.items() if value is not None}
    heads, groups = claims.heads or sizes.get("heads"), sizes.get("kv_heads")
    if heads and groups and heads % groups:  # the parameter has another meaning
        del sizes["kv_heads"]
    return replace(claims, **sizes)


def _sizes(
    signature_parameters: dict[str, inspect.Parameter], claims: AuditClaims
) -> dict[str, object]:
    """Return constructor arguments for the claimed sizes, and for what else it requires."""
    arguments: dict[str, object] = {}
    for size, names in SIZE_NAMES.items():
        value = getattr(claims, size)
        name = next((n for n in names if n in signature_parameters), None)
        if name is not None and value is not None:
            arguments[name] = value
    for name, p in signature_parameters.items():
        required = p.default is inspect.Parameter.empty
        if name in ARGUMENT_NAMES["output_size"] and claims.dim:
            arguments[name] = claims.dim
        elif name in ARGUMENT_NAMES["length"] and required:
            arguments[name] = DEFAULT_LENGTH
        elif name in ARGUMENT_NAMES["dropout"] and required:
            arguments[name] = 0.1  # so that dropout in evaluation mode is detected
        elif name in ("bias", "qkv_bias") and required:
            arguments[name] = False
    return arguments


def is_factory(target: object) -> bool:
    """Whether the target builds a module: a class of modules, or a function of sizes.

    >>> import torch
    >>> is_factory(nn.MultiheadAttention), is_factory(torch.softmax)
    (True, False)
    """
    if inspect.isclass(target):
        return issubclass(target, nn.Module)
    if isinstance(target, nn.Module) or not callable(target):
        return False
    signature_parameters = parameters(target)
    if query_key_value_names(signature_parameters):  # attend(q, k, v, num_heads)
        return False
    sizes = {*SIZE_NAMES["heads"], *SIZE_NAMES["dim"]} - {
        "dim",
        "H",
        "M",
    }  # these names are also arguments of other functions
    takes_sizes = bool(sizes & set(signature_parameters)) or {"dim", "heads"} <= set(
        signature_parameters
    )
    return takes_sizes or (not signature_parameters and inspect.isfunction(target))


class DtypeOverflow(Exception):
    """The code writes a number that its dtype cannot hold."""

    def __init__(self, adapter: TargetAdapter, message: str) -> None:
        super().__init__(message)
        self.adapter = adapter


def resolve_target(
    target: Any,
    claims: AuditClaims,
    *,
    user_adapter: str | Callable[..., object] | None = None,
    options: dict[str, object] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[TargetAdapter, dict[str, MaskBehavior]]:
    """Import or construct the target, and find the adapter that can call it."""
    name = target if isinstance(target, str) else target_name(target)
    target = import_target(target) if isinstance(target, str) else target
    adapter_function = (
        import_target(user_adapter) if isinstance(user_adapter, str) else user_adapter
    )
    rebuild = None
    if is_factory(target):
        factory, given_options, given_claims = target, dict(options or {}), claims
        target = construct_module(factory, claims, given_options)
        claims = claims_with_sizes(factory, claims, given_options)
        other_options = _options_without_sizes(factory, given_options)

        def rebuild(dim: int, heads: int, groups: int) -> nn.Module:
            small = replace(given_claims, dim=dim, heads=heads, kv_heads=groups, head_dim=None)
            return construct_module(factory, small, other_options)

    elif options:
        raise ArgumentError(
            f"options {', '.join(options)} were given, but {name} is not a class or a function "
            "that builds a module; leave them out"
        )
    if isinstance(target, (Model, TextEncoder, Seq2Seq)):
        return modules.model_adapter(target, claims, name, dtype), {}
    if not callable(target):
        raise ArgumentTypeError(
            f"{name} is {type(target).__name__}; it must be a module, a class or a function"
        )
    if adapter_function is not None:
        width = _width(target, claims, name)
        adapter = CustomAdapter(target, adapter_function, claims, width, name, dtype)
        return _require_call_works(adapter), {}
    if isinstance(target, nn.Module) and (
        isinstance(target, Mixer) or any(True for _ in target.parameters())
    ):
        return _adapt_module(target, claims, name, dtype, rebuild)
    return _adapt_function(target, claims, name, dtype)


def _adapt_module(
    module: nn.Module,
    claims: AuditClaims,
    name: str,
    dtype: torch.dtype,
    rebuild: Callable[[int, int, int], nn.Module] | None,
) -> tuple[TargetAdapter, dict[str, MaskBehavior]]:
    """Return the adapter of a module, and what its masks do."""
    width = _width(module, claims, name)
    if isinstance(module, Mixer):
        return _require_call_works(modules.MixerAdapter(module, claims, width, name, dtype)), {}
    sizes: dict[str, Any] = {
        size: getattr(claims, size) or attribute(list(module.modules()), SIZE_NAMES[size])
        for size in ("heads", "kv_heads", "head_dim")
    }
    if sizes["heads"] and sizes["kv_heads"] and sizes["heads"] % sizes["kv_heads"]:
        sizes["kv_heads"] = claims.kv_heads  # the attribute has another meaning
    claims = replace(claims, dim=width, **sizes)
    adapter = ModuleAdapter(module, claims, width, name=name, dtype=dtype, rebuild=rebuild)
    _require_call_works(adapter)
    return detect_conventions(adapter)


def _adapt_function(
    function: Callable[..., object], claims: AuditClaims, name: str, dtype: torch.dtype
) -> tuple[TargetAdapter, dict[str, MaskBehavior]]:
    """Return the adapter of attend(q, k, v), of several heads or one, and its masks."""
    signature_parameters = parameters(getattr(function, "forward", function))
    if query_key_value_names(signature_parameters) is None:
        raise ArgumentTypeError(
            f"{name}({', '.join(signature_parameters)}) is neither a function attend(q, k, v, ...) "
            f"nor a module with parameters; {ADAPTER_HINT}"
        )
    adapter = FunctionAdapter(function, claims, name=name, dtype=dtype)
    try:
        _require_call_works(adapter)
    except ArgumentError:
        if claims.heads not in (None, 1):
            raise
        adapter = FunctionAdapter(function, claims, name=name, dtype=dtype, single_head=True)
        _require_call_works(adapter)
    return detect_conventions(adapter)


def _require_call_works(adapter: TargetAdapter) -> TargetAdapter:
    """Return the adapter if a plain call gives [B, T, N] for tokens [B, T, M]."""
    x = adapter.random_tokens(2, 5, 0)
    try:
        out = adapter.call(x, CallInputs()).out
    except Exception as error:
        if overflows(error):
            raise DtypeOverflow(adapter, str(error)) from error
        raise ArgumentError(
            f"{adapter.name} called as {adapter.called} on {_shape(x)} raised "
            f"{type(error).__name__}: {error}; {ADAPTER_HINT}"
        ) from error
    if out.ndim != 3 or out.shape[:2] != x.shape[:2]:
        raise ArgumentError(
            f"{adapter.name} called as {adapter.called} on {_shape(x)} gives {_shape(out)}; "
            f"it must give one vector for each token, [2, 5, ...]; {ADAPTER_HINT}"
        )
    return adapter


def _width(target: object, claims: AuditClaims, name: str) -> int:
    """Return the model dimension: a claim, an attribute, or the first linear map's input."""
    if claims.dim:
        return claims.dim
    if isinstance(target, nn.Module):
        width = attribute([target], SIZE_NAMES["dim"])
        if width:
            return width
        for child in target.modules():
            if isinstance(getattr(child, "in_features", None), int):
                return int(child.in_features)  # type: ignore[arg-type]
            weight = getattr(child, "in_proj_weight", None)
            if isinstance(weight, Tensor):
                return weight.shape[1]
    raise ArgumentError(
        f"the model dim of {name} is not known; give it with --dim (dim=... in Python)"
    )


def _options_without_sizes(
    maker: Callable[..., object], options: dict[str, object]
) -> dict[str, object]:
    """Return the constructor's options that are not sizes, to build smaller modules with."""
    sizes = {name for size in ("dim", "heads", "kv_heads", "head_dim") for name in SIZE_NAMES[size]}
    sizes |= set(ARGUMENT_NAMES["output_size"])
    return {
        name: value for name, value in options.items() if name not in sizes & set(parameters(maker))
    }


def target_name(target: object) -> str:
    """Return the name of a target: `__name__`, or the name of its class."""
    return getattr(target, "__name__", type(target).__name__)


def _shape(x: Tensor) -> str:
    """Return the shape of a tensor as text."""
    return str(list(x.shape))
