"""From what a check asks to the keyword arguments that the code knows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor

from regard.inspect.audit.adapters.names import (
    CAUSAL,
    MASK,
    MEMORY,
    PADDING,
    POSITIONS,
    START,
    USE,
    WEIGHTS,
    first,
)
from regard.inspect.audit.subject import NEW, Ask


@dataclass(frozen=True)
class Form:
    """How a mask is written.

    Attributes:
        shape: "TS", "BTS", "B1TS", or "BS" for one that speaks of keys alone.
        kind: "keep" (True = may attend), "block" (True = may not), "ones" (1.0 = may attend), or
            "additive" (0 and the lowest number of the dtype, as transformers writes it).

    >>> Form("TS", "block").write(torch.tensor([[[True, False]]]), torch.float32)
    tensor([[False,  True]])
    """

    shape: str
    kind: str

    def write(self, keep: Tensor, dtype: torch.dtype) -> Tensor:
        """A mask bool [B,T,S] (or [B,S]) in this form."""
        if self.kind == "block":
            mask = ~keep
        elif self.kind == "additive":
            mask = torch.zeros(keep.shape, dtype=dtype).masked_fill(~keep, torch.finfo(dtype).min)
        else:
            mask = keep if self.kind == "keep" else keep.to(dtype)
        if self.shape == "TS":
            return mask[0]
        return mask[:, None] if self.shape == "B1TS" else mask

    @property
    def rows(self) -> bool:
        """Whether it may differ between rows of the batch."""
        return self.shape != "TS"

    def __str__(self) -> str:
        means = {"keep": "True = may attend", "block": "True = hidden", "ones": "1 = may attend"}
        shape = {"TS": "T,S", "BTS": "B,T,S", "B1TS": "B,1,T,S", "BS": "B,S"}[self.shape]
        return f"[{shape}], {means.get(self.kind, '0 and finfo.min, added')}"


@dataclass(frozen=True)
class Keywords:
    """The arguments that a callable knows, by role; None where it has none.

    Attributes:
        mask, padding, positions, start, memory, use, weights, causal, bias, sinks: names of
            parameters.
        mask_form, padding_form: how masks are written; None: not found out, so that none can be
            given.
        fixed: arguments that are always given.
    """

    mask: str | None = None
    padding: str | None = None
    positions: str | None = None
    start: str | None = None
    memory: str | None = None
    use: str | None = None
    weights: str | None = None
    causal: str | None = None
    bias: str | None = None
    sinks: str | None = None
    mask_form: Form | None = None
    padding_form: Form | None = None
    fixed: dict[str, Any] = field(default_factory=dict)
    required: frozenset[str] = frozenset()

    @staticmethod
    def of(known: Mapping[str, Parameter]) -> Keywords:
        """Roles by the names of parameters."""
        roles = {
            "mask": MASK,
            "padding": PADDING,
            "positions": POSITIONS,
            "start": START,
            "memory": MEMORY,
            "use": USE,
            "weights": WEIGHTS,
            "causal": CAUSAL,
        }
        required = frozenset(name for name, p in known.items() if p.default is Parameter.empty)
        found: dict[str, Any] = {role: first(names, known) for role, names in roles.items()}
        return Keywords(**found, required=required)

    def arguments(self, ask: Ask, x: Tensor, dtype: torch.dtype) -> dict[str, Any]:
        """The keyword arguments that say what is asked."""
        given = dict(self.fixed)
        if ask.keep is not None and self.mask and self.mask_form:
            given[self.mask] = self.mask_form.write(ask.keep, dtype)
        if ask.tokens is not None and self.padding and self.padding_form:
            given[self.padding] = self.padding_form.write(ask.tokens, dtype)
        if self.weights:
            given[self.weights] = ask.weights
        for name in (self.mask, self.memory):
            if name in self.required and name not in given:
                given[str(name)] = None
        return {**given, **self._places(ask, x), **self._memory(ask)}

    def _places(self, ask: Ask, x: Tensor) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if ask.positions is None:
            if self.start in self.required:
                given[str(self.start)] = 0
            if self.positions in self.required:
                given[str(self.positions)] = torch.arange(x.shape[1]).expand(x.shape[0], -1)
            return given
        if self.positions:  # gpt-fast's input_pos is [T]
            one = self.positions == "input_pos"
            given[self.positions] = ask.positions[0] if one else ask.positions
        if self.start:
            given[self.start] = int(ask.positions[0, 0])
        return given

    def _memory(self, ask: Ask) -> dict[str, Any]:
        given: dict[str, Any] = {}
        if ask.memory is not None:
            if self.use:
                given[self.use] = True
            if self.memory and ask.memory is not NEW:
                given[self.memory] = ask.memory
        elif self.use:
            given[self.use] = False
        return given

    @property
    def takes(self) -> frozenset[str]:
        """What of `Ask` reaches the code."""
        found = {
            "mask": self.mask and self.mask_form,
            "rows": self.mask and self.mask_form and self.mask_form.rows,
            "padding": self.padding and self.padding_form,
            "positions": self.positions,
        }
        return frozenset(name for name, has in found.items() if has)
