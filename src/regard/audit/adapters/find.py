"""Import or construct the target that a user names, and find the way of calling that fits it."""

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

from regard.audit.adapters import ours
from regard.audit.adapters.arguments import (
    CONTEXT,
    DROPOUT,
    LENGTH,
    OUTPUT_SIZE,
    SIZES,
    parameters,
    triple,
)
from regard.audit.adapters.calibrate import Heard, calibrated, overflows
from regard.audit.adapters.functions import Custom, Function
from regard.audit.adapters.modules import Module
from regard.audit.adapters.projections import attribute
from regard.audit.subject import Ask, Claim, Subject
from regard.errors import ArgumentError, ArgumentTypeError
from regard.models import Model, Seq2Seq, TextEncoder
from regard.nn.mixer import Mixer
from regard.process_state import seeded

FLAGS = {
    "dim": "--dim",
    "heads": "--heads",
    "kv_heads": "--kv-heads",
    "head_dim": "--head-dim",
    "window": "--window",
}
OTHERS = "name an adapter: --adapter package.module:function, adapter(target, x, ...) -> output"


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


class ValueOverflow(Exception):
    """The code writes a number that its dtype cannot hold."""

    def __init__(self, subject: Subject, said: str) -> None:
        super().__init__(said)
        self.subject = subject


def find(
    target: Any,
    claim: Claim,
    *,
    adapter: str | Callable[..., Any] | None = None,
    options: dict[str, Any] | None = None,
    dtype: torch.dtype = torch.float32,
) -> tuple[Subject, dict[str, Heard]]:
    """The target behind a way to call it, and what its masks were found to do.

    Raises:
        ArgumentError, ArgumentTypeError: the target is nothing that can be called, or no way of
            calling works.

    >>> found = find(nn.MultiheadAttention(8, 2, batch_first=True), Claim())[0].called
    >>> found.partition(", attn_mask")[0]
    'forward(query, key, value'
    """
    name = target if isinstance(target, str) else named(target)
    target = imported(target) if isinstance(target, str) else target
    adapter = imported(adapter) if isinstance(adapter, str) else adapter
    remake = None
    if is_factory(target):
        make, given, said = target, dict(options or {}), claim
        target = constructed(make, claim, given)
        claim = claimed(make, claim, given)
        sized = _sized(make, given)

        def remake(dim: int, heads: int, groups: int) -> nn.Module:
            small = replace(said, dim=dim, heads=heads, kv_heads=groups, head_dim=None)
            return constructed(make, small, sized)

    elif options:
        raise ArgumentError(
            f"options {', '.join(options)} are of a constructor, and {name} is none"
        )
    if isinstance(target, (Model, TextEncoder, Seq2Seq)):
        return ours.model(target, claim, name, dtype), {}
    if not callable(target):
        raise ArgumentTypeError(
            f"{name} is {type(target).__name__}; it must be a module, a class or a function"
        )
    if adapter is not None:
        return _checked(
            Custom(target, adapter, claim, _width(target, claim, name), name, dtype)
        ), {}
    if isinstance(target, nn.Module) and (
        isinstance(target, Mixer) or any(True for _ in target.parameters())
    ):
        return _module(target, claim, name, dtype, remake)
    return _function(target, claim, name, dtype)


def _module(
    module: nn.Module, claim: Claim, name: str, dtype: torch.dtype, remake: Any
) -> tuple[Subject, dict[str, Heard]]:
    width = _width(module, claim, name)
    if isinstance(module, Mixer):
        return _checked(ours.OurMixer(module, claim, width, name, dtype)), {}
    found: dict[str, Any] = {
        size: getattr(claim, size) or attribute(list(module.modules()), SIZES[size])
        for size in ("heads", "kv_heads", "head_dim")
    }
    if found["heads"] and found["kv_heads"] and found["heads"] % found["kv_heads"]:
        found["kv_heads"] = claim.kv_heads  # an attribute that counts something else
    claim = replace(claim, dim=width, **found)
    subject = Module(module, claim, width, name=name, dtype=dtype, remake=remake)
    _checked(subject)
    return calibrated(subject)


def _function(
    function: Callable[..., Any], claim: Claim, name: str, dtype: torch.dtype
) -> tuple[Subject, dict[str, Heard]]:
    """attend(q, k, v): with heads first, else with one head."""
    known = parameters(getattr(function, "forward", function))
    if triple(known) is None:
        raise ArgumentTypeError(
            f"{name}({', '.join(known)}) is no attend(q, k, v, ...) and no module with "
            f"parameters; {OTHERS}"
        )
    subject = Function(function, claim, name=name, dtype=dtype)
    try:
        _checked(subject)
    except ArgumentError:
        if claim.heads not in (None, 1):
            raise
        subject = Function(function, claim, name=name, dtype=dtype, flat=True)
        _checked(subject)
    return calibrated(subject)


def _checked(subject: Subject) -> Subject:
    """The subject, if a plain call gives [B,T,N] for tokens [B,T,M].

    Raises:
        ArgumentError: it raises, or gives something else.
    """
    x = subject.inputs(2, 5, 0)
    try:
        out = subject.ask(x, Ask()).out
    except Exception as error:
        if overflows(error):
            raise ValueOverflow(subject, str(error)) from error
        raise ArgumentError(
            f"{subject.name} called as {subject.called} on {_shape(x)} raised "
            f"{type(error).__name__}: {error}; {OTHERS}"
        ) from error
    if out.ndim != 3 or out.shape[:2] != x.shape[:2]:
        raise ArgumentError(
            f"{subject.name} called as {subject.called} on {_shape(x)} gives {_shape(out)}; "
            f"it must give one vector for each token, [2, 5, ...]; {OTHERS}"
        )
    return subject


def _width(target: Any, claim: Claim, name: str) -> int:
    """M: as claimed, or as the module says, or as its first linear map takes."""
    if claim.dim:
        return claim.dim
    if isinstance(target, nn.Module):
        found = attribute([target], SIZES["dim"])
        if found:
            return found
        for child in target.modules():
            if isinstance(getattr(child, "in_features", None), int):
                return int(child.in_features)  # type: ignore[arg-type]
            weight = getattr(child, "in_proj_weight", None)
            if isinstance(weight, Tensor):
                return weight.shape[1]
    raise ArgumentError(
        f"the model dim of {name} is not known; say it with --dim (dim=... in Python)"
    )


def _sized(make: Callable[..., Any], given: dict[str, Any]) -> dict[str, Any]:
    """The options that say no size: a smaller module is made without the others."""
    sizes = {name for size in ("dim", "heads", "kv_heads", "head_dim") for name in SIZES[size]}
    sizes |= set(OUTPUT_SIZE)
    return {
        name: value for name, value in given.items() if name not in sizes & set(parameters(make))
    }


def named(target: Any) -> str:
    """What a target is called."""
    return getattr(target, "__name__", type(target).__name__)


def _shape(x: Tensor) -> str:
    return str(list(x.shape))
