"""Functions `attend(q, k, v, ...)`, and the user's own adapter: calls that are given a target or q,
k and v.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from regard.audit.adapters.arguments import (
    BIAS,
    SCALE,
    SINKS,
    SIZES,
    Keywords,
    Reading,
    first,
    parameters,
)
from regard.audit.adapters.projections import read
from regard.audit.subject import NEW, Ask, CannotTry, Claim, Projections, Reply, Subject
from regard.caches import Growing
from regard.errors import ArgumentError
from regard.span import Span

SIZE = 6
FARTHEST = 64
"""A given bias tells distances apart up to here."""


KNOWN = {
    "keep": "rows",
    "tokens": "padding",
    "positions": "positions",
    "memory": "memory",
    "weights": "weights",
}


class Function(Subject):
    """attend(q [B,H,T,D], k [B,G,S,D], v [B,G,S,D], ...) -> [B,H,T,D], between projections whose
    weights are known.

    q, k, v = x Wq, x Wk, x Wv, split into heads;  out = attend(q, k, v), heads joined

    Args:
        function: the code; a module without parameters is one, too.
        claim: what it says it is; sizes default to 4 heads of 6, whose scales do not coincide.
        flag: whether its own causal flag is set.
        flat: whether it takes one head, [B,T,D].

    Where the code takes a number of heads, it takes them joined, [B,T,H*D].
    """

    def __init__(
        self,
        function: Callable[..., Any],
        claim: Claim,
        *,
        name: str,
        dtype: torch.dtype = torch.float32,
        keywords: Keywords | None = None,
        reading: Reading | None = None,
        flag: bool = False,
        flat: bool = False,
    ) -> None:
        heads = 1 if flat else claim.heads or 4
        D = claim.head_dim or (claim.dim // heads if claim.dim else SIZE) or 1
        self.claim = replace(
            claim, heads=heads, kv_heads=claim.kv_heads or heads, head_dim=D, dim=heads * D
        )
        self.function, self.name, self.dtype = _ready(function, dtype), name, dtype
        self.original, self.width, self.flag, self.flat = function, heads * D, flag, flat
        known = parameters(getattr(function, "forward", function))
        self.keywords = keywords or _known(known, claim)
        count = first(SIZES["heads"], [n for n in known if len(n) > 1])
        self.joined = count is not None and not flat
        if self.joined:
            self.keywords = replace(self.keywords, fixed={**self.keywords.fixed, str(count): heads})
        self.reading = reading or Reading()
        extra = {"weights"} if self.reading.weights is not None else set()
        self.takes = self.keywords.takes | extra | {"memory"}

    @property
    def called(self) -> str:  # type: ignore[override]
        """attend(q, k, v, mask=...)."""
        layout = "B,T,D" if self.flat else "B,T,H*D" if self.joined else ",".join(self.claim.layout)
        words = [f"q [{layout}], k, v"]
        if self.keywords.mask and self.keywords.mask_form:
            words.append(f"{self.keywords.mask}={self.keywords.mask_form}")
        if self.flag:
            words.append(f"{self.keywords.causal}=True")
        return f"({', '.join(words)})"

    def ask(self, x: Tensor, ask: Ask = Ask()) -> Reply:  # noqa: B008
        """Project, call, join."""
        heads = self._heads(x.to(self.dtype))
        memory = ask.memory
        q, k, v = heads
        if memory is not None:
            memory = Growing() if memory is NEW else memory
            (k, v), _ = memory.update((k, v), Span(len(memory), x.shape[1]))
        reply = self.between(q, k, v, ask._replace(memory=None))
        return reply._replace(memory=memory)

    def between(self, q: Tensor, k: Tensor, v: Tensor, ask: Ask) -> Reply:
        """The function itself on q [B,H,T,D], k and v [B,G,S,D]; its output with heads joined,
        [B,T,H*D].
        """
        given = self.keywords.arguments(ask, q, self.dtype)
        if self.keywords.causal:
            given[self.keywords.causal] = self.flag and ask.keep is None
        if self.keywords.sinks:
            given[self.keywords.sinks] = self._sinks().to(self.dtype)  # type: ignore[union-attr]
        if self.keywords.bias:
            given[self.keywords.bias] = self.bias(q.shape[2], k.shape[2]).to(self.dtype)  # type: ignore[union-attr]
        with torch.no_grad():
            reply = self.reading.read(
                self.function(self._lay(q), self._lay(k), self._lay(v), **given)
            )
        plain = self.flat or self.joined
        out = reply.out if plain else self._lay(reply.out).transpose(1, 2).flatten(2)
        return reply._replace(out=out)

    def last(self, x: Tensor, n: int, keep: Tensor | None = None) -> Tensor:
        """The last n tokens of x as queries, all of them as keys: [B,n,H*D]."""
        q, k, v = self._heads(x.to(self.dtype))
        return self.between(q[:, :, -n:], k, v, Ask(keep)).out

    def _lay(self, x: Tensor) -> Tensor:
        if self.flat:
            return x[:, 0]
        if self.joined:
            return x.transpose(1, 2).flatten(2)
        return x.transpose(1, 2) if self.claim.layout == "BTHD" else x

    def _heads(self, x: Tensor) -> list[Tensor]:
        known = self.projections()[0]
        D = known.head_dim
        maps = [weight.to(self.dtype) for weight, _ in (known.q, known.k, known.v)]
        return [torch.unflatten(x @ w.T, -1, (-1, D)).transpose(1, 2) for w in maps]

    def projections(self) -> tuple[Projections, ...]:
        """Random maps, the same for any dtype."""
        make = torch.Generator().manual_seed(0)
        H, G, D = (
            int(n or 1) for n in (self.claim.heads, self.claim.kv_heads, self.claim.head_dim)
        )
        q, k, v = (
            torch.randn(n * D, self.width, generator=make, dtype=torch.float64) * self.width**-0.5
            for n in (H, G, G)
        )
        eye = torch.eye(H * D, dtype=torch.float64)
        sinks = self._sinks()
        return (Projections((q, None), (k, None), (v, None), (eye, None), H, G, sinks=sinks),)

    def _sinks(self) -> Tensor | None:
        """A logit for each head, where the code takes one."""
        make = torch.Generator().manual_seed(1)
        H = self.claim.heads or 1
        return torch.randn(H, generator=make, dtype=torch.float64) if self.keywords.sinks else None

    def bias(self, T: int, S: int | None = None) -> Tensor | None:
        """A bias [1,H,T,S] of the distance between the last T of S tokens and all of them, where
        the code takes one.
        """
        if not self.keywords.bias:
            return None
        S = S or T
        make = torch.Generator().manual_seed(2)
        table = torch.randn(
            self.claim.heads or 1, 2 * FARTHEST + 1, generator=make, dtype=torch.float64
        )
        gap = torch.arange(S - T, S)[:, None] - torch.arange(S)
        return table[:, gap.clamp(-FARTHEST, FARTHEST) + FARTHEST][None]

    def at(self, dtype: torch.dtype) -> Function:
        """The same function, on numbers of another dtype."""
        return self._with(dtype=dtype)

    def told(self, keywords: Keywords, reading: Reading) -> Function:
        """The same, with what was found out about its arguments and replies."""
        return self._with(keywords=keywords, reading=reading)

    def flagged(self) -> Function:
        """The same, with its causal flag set."""
        return self._with(flag=True)

    def _with(self, **changes: Any) -> Function:
        given: dict[str, Any] = {
            "claim": self.claim,
            "name": self.name,
            "dtype": self.dtype,
            "keywords": self.keywords,
            "reading": self.reading,
            "flag": self.flag,
            "flat": self.flat,
            **changes,
        }
        return Function(self.original, given.pop("claim"), **given)

    def smaller(self) -> Iterator[Subject]:
        """The same function on fewer heads and dims, smallest first."""
        H, G = self.claim.heads or 1, self.claim.kv_heads or 1
        sizes = [(1, 1), (2, 2)] if G == H else [(2, 1), (4, 2), (H, G)]
        for heads, groups in dict.fromkeys(sizes):
            for D in (1, 2, 4):
                if heads * D < self.width and heads <= H:
                    claim = replace(self.claim, heads=heads, kv_heads=groups, head_dim=D, dim=None)
                    yield self._with(claim=claim)


def _ready(function: Callable[..., Any], dtype: torch.dtype) -> Callable[..., Any]:
    """A module in evaluation mode and in this dtype; a function as it is."""
    if isinstance(function, nn.Module):
        return copy.deepcopy(function).to("cpu", dtype).eval()
    return function


def _known(known: Any, claim: Claim) -> Keywords:
    found = Keywords.of(known)
    name = first(SIZES["window"], known)
    fixed: dict[str, Any] = {name: claim.window} if name and claim.window else {}
    scale = first(SCALE, known)
    if scale in found.required:
        fixed[str(scale)] = claim.scale or (claim.head_dim or SIZE) ** -0.5
    if "enable_gqa" in known and claim.kv_heads and claim.kv_heads != claim.heads:
        fixed["enable_gqa"] = True
    biases = [n for n in known if not isinstance(known[n].default, bool)]  # a flag is no bias
    extra: dict[str, Any] = {"bias": first(BIAS, biases), "sinks": first(SINKS, known)}
    return replace(found, fixed={**found.fixed, **fixed}, memory=None, use=None, **extra)


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
