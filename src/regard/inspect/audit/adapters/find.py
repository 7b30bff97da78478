"""Which way of calling fits a target: ours, the user's, a function of q, k, v, or a module."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect.audit.adapters import ours
from regard.inspect.audit.adapters.calibrate import Heard, calibrated, overflows
from regard.inspect.audit.adapters.construct import claimed, constructed, imported, is_factory
from regard.inspect.audit.adapters.custom import Custom
from regard.inspect.audit.adapters.functions import Function
from regard.inspect.audit.adapters.modules import Module
from regard.inspect.audit.adapters.names import OUTPUT_SIZE, SIZES, parameters, triple
from regard.inspect.audit.adapters.projections import attribute
from regard.inspect.audit.subject import Ask, Claim, Subject
from regard.models import Model, Seq2Seq, TextEncoder
from regard.nn.mixer import Mixer


class ValueOverflow(Exception):
    """The code writes a number that its dtype cannot hold."""

    def __init__(self, subject: Subject, said: str) -> None:
        super().__init__(said)
        self.subject = subject


OTHERS = "name an adapter: --adapter package.module:function, adapter(target, x, ...) -> output"


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

    >>> find(nn.MultiheadAttention(8, 2, batch_first=True), Claim())[0].called
    'forward(query, key, value, attn_mask=[T,S], True = hidden, key_padding_mask=[B,S], True = hidden)'
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
