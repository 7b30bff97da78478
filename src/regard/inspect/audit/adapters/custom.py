"""The user's own adapter: adapter(target, x, ...) -> output, (output, weights) or (output,
cache).
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.inspect.audit.adapters.names import parameters
from regard.inspect.audit.adapters.projections import read
from regard.inspect.audit.adapters.replies import Reading
from regard.inspect.audit.subject import NEW, Ask, CannotTry, Claim, Projections, Reply, Subject

KNOWN = {
    "keep": "rows",
    "tokens": "padding",
    "positions": "positions",
    "memory": "memory",
    "weights": "weights",
}


class Custom(Subject):
    """A target behind the user's adapter, whose keyword arguments say what can be asked.

    adapter(target, x [B,T,M], *, keep [B or 1,T,S] True = may attend, tokens [B,S] False = padding,
    positions [B,T], memory (NEW at the start), weights) -> out, or (out, weights) where weights
    were asked for, or (out, memory).

    Raises:
        ArgumentError: an argument of the adapter has no meaning here.
    """

    def __init__(
        self,
        target: Any,
        adapter: Callable[..., Any],
        claim: Claim,
        width: int,
        name: str,
        dtype: torch.dtype,
    ) -> None:
        self.original, self.adapter, self.claim, self.width = target, adapter, claim, width
        self.name, self.dtype = name, dtype
        self.known = list(parameters(adapter))[2:]
        strange = [n for n in self.known if n not in KNOWN]
        if strange:
            raise ArgumentError(
                f"the adapter has an argument {strange[0]!r}; it may have x and "
                f"{', '.join(KNOWN)} behind the target"
            )
        self.called = f"adapter(target, x{''.join(', ' + n for n in self.known)})"
        takes = {KNOWN[n] for n in self.known}
        self.takes = frozenset(takes | ({"mask"} if "rows" in takes else set()))
        is_module = isinstance(target, nn.Module)
        self.target = copy.deepcopy(target).to("cpu", dtype).eval() if is_module else target

    def ask(self, x: Tensor, ask: Ask = Ask()) -> Reply:  # noqa: B008
        """Call the adapter with what it takes."""
        given = {name: getattr(ask, name) for name in self.known}
        if x.is_floating_point():
            x = x.to(self.dtype)
        with torch.no_grad():
            answer = self.adapter(self.target, x, **given)
        reply = Reading(1 if ask.weights else None).read(answer)
        memory = reply.memory
        if ask.memory is not None and memory is None and ask.memory is not NEW:
            memory = ask.memory  # changed in place
        return reply._replace(memory=memory)

    def at(self, dtype: torch.dtype) -> Custom:
        """A copy in another dtype."""
        return Custom(self.original, self.adapter, self.claim, self.width, self.name, dtype)

    def projections(self) -> tuple[Projections, ...]:
        """The maps of a module, where they have names that are known."""
        if not isinstance(self.original, nn.Module):
            raise CannotTry(f"{self.name} is no module, and so has no weights to read")
        return read(self.original, self.claim, self.width)

    def traced(self) -> tuple[nn.Module, Subject] | None:
        """The copy that runs, and this subject."""
        return (self.target, self) if isinstance(self.target, nn.Module) else None

    def state(self) -> dict[str, Tensor] | None:
        """The state dict of a module."""
        return self.original.state_dict() if isinstance(self.original, nn.Module) else None
