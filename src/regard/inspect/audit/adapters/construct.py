"""From what the user named to something to call: import it, construct it, choose a convention."""

from __future__ import annotations

import importlib
import inspect
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.audit.adapters.names import (
    CONTEXT,
    DROPOUT,
    LENGTH,
    OUTPUT_SIZE,
    SIZES,
    parameters,
    triple,
)
from regard.inspect.audit.subject import Claim
from regard.process import seeded


def imported(path: str) -> Any:
    """What "package.module:name" names; the folder of the process is looked in, too.

    Raises:
        ArgumentError: it is not of this form, the module cannot be imported, or it has no such
            name.

    >>> imported("torch.nn:MultiheadAttention").__name__
    'MultiheadAttention'
    """
    module, colon, name = path.partition(":")
    if not colon or not module or not name:
        raise ArgumentError(
            f"{path!r} must be package.module:name, such as torch.nn:MultiheadAttention"
        )
    here = str(Path.cwd())
    sys.path.insert(0, here)
    try:
        found: Any = importlib.import_module(module)
    except Exception as error:
        raise ArgumentError(
            f"{module} cannot be imported: {type(error).__name__}: {error}; run the audit where "
            f"`python -c 'import {module}'` works"
        ) from error
    finally:
        sys.path.remove(here)
    for part in name.split("."):
        if not hasattr(found, part):
            public = ", ".join(n for n in vars(found) if not n.startswith("_"))
            raise ArgumentError(f"{module} has no {name}; it has {public[:300]}")
        found = getattr(found, part)
    return found


def constructed(make: Callable[..., nn.Module], claim: Claim, options: dict[str, Any]) -> nn.Module:
    """The module of a class or factory, with the claim's sizes under the names that its signature
    has.

    Raises:
        ArgumentError: it needs an argument that nothing says, or refuses what it was given.

    >>> constructed(nn.MultiheadAttention, Claim(dim=8, heads=2), {}).num_heads
    2
    """
    known = parameters(make)
    given = {**_sizes(known, claim), **options}
    missing = [
        name
        for name, p in known.items()
        if p.default is inspect.Parameter.empty and name not in given
    ]
    label = getattr(make, "__name__", str(make))
    if missing:
        flags = " ".join(_flag(name) for name in missing)
        raise ArgumentError(
            f"{label}{inspect.signature(make)} needs {', '.join(missing)}: say {flags} "
            "(dim=, heads=, options={...} in Python), or name a function without arguments that "
            "builds the module"
        )
    try:
        with seeded(0):
            made = make(**given)
    except Exception as error:
        said = ", ".join(f"{name}={value!r}" for name, value in given.items())
        raise ArgumentError(
            f"{label}({said}) raised {type(error).__name__}: {error}; give other sizes or --set "
            "name=value"
        ) from error
    if not isinstance(made, nn.Module):
        raise ArgumentTypeError(f"{label} made {type(made).__name__}; it must be a torch.nn.Module")
    return made


FLAGS = {
    "dim": "--dim",
    "heads": "--heads",
    "kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "window": "--window",
}


def _flag(name: str) -> str:
    """The option of the command that gives a constructor's argument of this name."""
    size = next((size for size in FLAGS if name in SIZES[size]), None)
    return f"--set {name}=value" if size is None else f"{FLAGS[size]} N"


def claimed(make: Callable[..., Any], claim: Claim, options: dict[str, Any]) -> Claim:
    """The claim, with the sizes that the constructor's arguments and defaults say and that the
    claim does not.

    >>> def make(d_model, n_head=2): ...
    >>> found = claimed(make, Claim(), {"d_model": 8})
    >>> found.dim, found.heads
    (8, 2)
    """
    known = parameters(make)
    defaults = {n: p.default for n, p in known.items() if p.default is not inspect.Parameter.empty}
    given = {**defaults, **_sizes(known, claim), **options}
    found: dict[str, Any] = {}
    for size in FLAGS:
        if getattr(claim, size) is None:
            values = (given[name] for name in SIZES[size] if name in given and name in known)
            found[size] = next(
                (v for v in values if isinstance(v, int) and not isinstance(v, bool) and v > 0),
                None,
            )
    sizes = {size: value for size, value in found.items() if value is not None}
    heads, groups = claim.heads or sizes.get("heads"), sizes.get("kv_heads")
    if heads and groups and heads % groups:  # it counts something else
        del sizes["kv_heads"]
    return replace(claim, **sizes)


def _sizes(known: dict[str, inspect.Parameter], claim: Claim) -> dict[str, Any]:
    """Arguments for the sizes that are claimed, and for what a constructor wants besides."""
    given: dict[str, Any] = {}
    for size, names in SIZES.items():
        value = getattr(claim, size)
        name = next((n for n in names if n in known), None)
        if name is not None and value is not None:
            given[name] = value
    for name, p in known.items():
        wanted = p.default is inspect.Parameter.empty
        if name in OUTPUT_SIZE and claim.dim:
            given[name] = claim.dim
        elif name in LENGTH and wanted:
            given[name] = CONTEXT
        elif name in DROPOUT and wanted:
            given[name] = 0.1  # so that dropout that stays on is seen
        elif name in ("bias", "qkv_bias") and wanted:
            given[name] = False
    return given


def is_factory(target: Any) -> bool:
    """Whether it builds a module: a class of modules, or a function of sizes.

    >>> import torch
    >>> is_factory(nn.MultiheadAttention), is_factory(torch.softmax)
    (True, False)
    """
    if inspect.isclass(target):
        return issubclass(target, nn.Module)
    if isinstance(target, nn.Module) or not callable(target):
        return False
    known = parameters(target)
    if triple(known):  # attend(q, k, v, num_heads)
        return False
    sizes = {*SIZES["heads"], *SIZES["dim"]} - {
        "dim",
        "H",
        "M",
    }  # these are arguments of other functions, too
    sized = bool(sizes & set(known)) or {"dim", "heads"} <= set(known)
    return sized or (not known and inspect.isfunction(target))
