"""Modules: forward(x, ...) and forward(query, key, value, ...)."""

from __future__ import annotations

import copy
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.audit.adapters.arguments import (
    NEW_CACHE,
    RESET,
    Keywords,
    Reading,
    first,
    items,
    pair,
    parameters,
    triple,
)
from regard.audit.adapters.projections import read
from regard.audit.subject import NEW, Ask, CannotTry, Claim, Projections, Reply, Subject, numbers
from regard.errors import ArgumentTypeError

INSIDE = "inside the module"
"""As a cache: the module keeps it itself."""


class Module(Subject):
    """A module called with tokens [B,T,M], once or as query, key and value.

    Args:
        module: the code; a copy in evaluation mode is what runs.
        claim: what it says it is.
        width: M.
        keywords: the arguments that it knows; None reads them from its signature.
        remake: makes the same module with other sizes, (dim, heads, kv_heads) -> module, where it
            can be made.
    """

    relative = True  # a layer that is given positions and hidden states: rotary and its like

    def __init__(
        self,
        module: nn.Module,
        claim: Claim,
        width: int,
        *,
        name: str,
        dtype: torch.dtype = torch.float32,
        keywords: Keywords | None = None,
        reading: Reading | None = None,
        remake: Callable[[int, int, int], nn.Module] | None = None,
    ) -> None:
        known = parameters(module.forward)
        self.original, self.claim, self.width, self.name, self.dtype = (
            module,
            claim,
            width,
            name,
            dtype,
        )
        self.module = _copy(module).to("cpu", dtype).eval()
        self.three = triple(known)
        self.pair = None if self.three else pair(known)
        self.keywords = keywords or Keywords.of(known)
        self.remake = remake
        self.batch_first = bool(getattr(module, "batch_first", True))
        self.reading = reading or Reading()
        self.takes = self.keywords.takes | self._keeps()

    @property
    def called(self) -> str:  # type: ignore[override]
        """forward(x, mask=...)."""
        words = [", ".join(self.three or self.pair or ("x",))]
        for name, form in (
            (self.keywords.mask, self.keywords.mask_form),
            (self.keywords.padding, self.keywords.padding_form),
        ):
            if name and form:
                words.append(f"{name}={form}")
        return f"forward({', '.join(words)})"

    def ask(self, x: Tensor, ask: Ask = Ask()) -> Reply:  # noqa: B008
        """Call forward, and read what it gives."""
        x = x.to(self.dtype)
        if ask.memory is NEW:
            ask = ask._replace(memory=self._new())
        given = self.keywords.arguments(ask, x, self.dtype)
        if self.pair is not None:
            return self._one_by_one(x, given)
        tokens = x if self.batch_first else x.transpose(0, 1)
        with torch.no_grad():
            answer = self.module(*[tokens] * (3 if self.three else 1), **given)
        reply = self.reading.read(answer)
        out = reply.out if self.batch_first else reply.out.transpose(0, 1)
        memory = reply.memory
        if ask.memory is not None and memory is None:  # changed in place
            memory = ask.memory
        return Reply(out, reply.weights, memory)

    def _one_by_one(self, x: Tensor, given: dict[str, Any]) -> Reply:
        """Each token once as the query [B,1,M] or [B,M], all tokens as keys; weights [B,1,T,S],
        where there are any.
        """
        outs, rows = [], []
        for t in range(x.shape[1]):
            query = x[:, t : t + 1]
            with torch.no_grad():
                try:
                    answer = self.module(query, x, **given)
                    parts = self._parts(answer, x)
                except (RuntimeError, IndexError, ArgumentTypeError):
                    parts = self._parts(self.module(query[:, 0], x, **given), x)
            outs.append(parts[0])
            rows.append(parts[1])
        weights = None if rows[0] is None else torch.cat([r for r in rows if r is not None], 1)
        return Reply(torch.cat(outs, 1), None if weights is None else weights[:, None])

    def _parts(self, answer: Any, x: Tensor) -> tuple[Tensor, Tensor | None]:
        """The context [B,1,N] and the weights [B,1,S] of one query: weights have no other dim than
        the length.
        """
        B, S = x.shape[:2]
        parts = [part for part in items(answer) if isinstance(part, Tensor)]
        weights = [
            p for p in parts if p.numel() == B * S and (self.width != S or p is not parts[0])
        ]
        contexts = [p for p in parts if not any(p is w for w in weights)]
        if not contexts or contexts[0].numel() % B:
            raise ArgumentTypeError(
                "no context [B, M] is among what the code returned: give an adapter"
            )
        return contexts[0].reshape(B, 1, -1), weights[0].reshape(B, 1, S) if weights else None

    def at(self, dtype: torch.dtype) -> Module:
        """A copy in another dtype."""
        return self._with(self.original, dtype=dtype)

    def told(self, keywords: Keywords, reading: Reading) -> Module:
        """The same, with what was found out about its arguments and replies."""
        return self._with(self.original, keywords=keywords, reading=reading)

    def _with(self, module: nn.Module, **changes: Any) -> Module:
        given: dict[str, Any] = {
            "claim": self.claim,
            "width": self.width,
            "name": self.name,
            "dtype": self.dtype,
            "keywords": self.keywords,
            "reading": self.reading,
            "remake": self.remake,
            **changes,
        }
        return Module(module, given.pop("claim"), given.pop("width"), **given)

    def projections(self) -> tuple[Projections, ...]:
        """Its maps, where they have names that are known."""
        if self.pair is not None:
            raise CannotTry("it takes one query and all keys, and so has no self-attention")
        return read(self.original, self.claim, self.width)

    def traced(self) -> tuple[nn.Module, Subject]:
        """The copy that runs, and this subject."""
        return self.module, self

    def smaller(self) -> Iterator[Subject]:
        """Modules of fewer heads and dims, smallest first."""
        H, G = self.claim.heads, self.claim.groups
        if self.remake is None or not H or not G:
            return
        for heads, groups in dict.fromkeys([(1, 1), (2, min(G, 2) if G == H else 1), (H, G)]):
            for d in (1, 2, 4, 8):
                if heads * d >= self.width or (groups == heads) != (G == H):
                    continue
                claim = replace(
                    self.claim, dim=heads * d, heads=heads, kv_heads=groups, head_dim=None
                )
                try:
                    made = self.remake(heads * d, heads, groups)
                    yield self._with(made, claim=claim, width=heads * d, remake=None)
                except Exception:  # noqa: S112  # a size that it refuses is no finding
                    continue

    def state(self) -> dict[str, Tensor]:
        """Its state dict."""
        return self.original.state_dict()

    def held(self, memory: Any) -> int:
        """Numbers in the cache, or in what the module keeps besides parameters."""
        return numbers(memory) if memory is not INSIDE else _kept(self.module)

    def _new(self) -> Any:
        maker, reset = first(NEW_CACHE, dir(self.module)), first(RESET, dir(self.module))
        if self.keywords.memory and maker:
            return getattr(self.module, maker)()
        if self.keywords.memory and type(self.module).__module__.startswith("transformers."):
            return sys.modules["transformers"].DynamicCache()
        if reset and not self.keywords.memory:
            getattr(self.module, reset)()
            return INSIDE
        if self.addressed:
            return INSIDE
        return NEW

    @property
    def addressed(self) -> bool:
        """Whether positions address a cache that the module keeps: what it writes first, it
        reads.
        """
        known = self.keywords
        if not (known.start or known.positions) or known.memory:
            return False
        kept = [
            (name, value)
            for child in self.module.modules()
            for name, value in {**dict(child.named_buffers(recurse=False)), **vars(child)}.items()
        ]
        return any(
            isinstance(value, Tensor)
            and value.ndim >= 3
            and ("cache" in name or "past" in name)
            and not any(word in name for word in ("cos", "sin", "freq", "rope", "mask"))
            for name, value in kept
        )

    def _keeps(self) -> frozenset[str]:
        has_reset = first(RESET, dir(self.module)) is not None
        can = self.keywords.memory or (self.keywords.use and has_reset) or self.addressed
        shows = {"weights"} if self.reading.weights is not None else set()
        return frozenset({"memory"} if can else ()) | frozenset(shows)


def _copy(module: nn.Module) -> nn.Module:
    try:
        return copy.deepcopy(module)
    except (RuntimeError, TypeError, NotImplementedError):  # it holds what has no copy
        return module


def _kept(module: nn.Module) -> int:
    """Numbers in buffers and plain attributes of a module and its children."""
    found = sum(b.numel() for b in module.buffers())
    for child in module.modules():
        plain = {k: v for k, v in vars(child).items() if not k.startswith("_")}
        found += numbers({k: v for k, v in plain.items() if not isinstance(v, nn.Module)})
    return found
