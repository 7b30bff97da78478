"""Adapters for functions attend(q, k, v, ...) and for code that the user's own adapter calls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from inspect import Parameter
from typing import Any

import torch
from torch import Tensor, nn

from regard.audit.adapters.base import (
    NEW_CACHE,
    AuditClaims,
    CallInputs,
    CallOutput,
    CheckNotPossible,
    Projections,
    TargetAdapter,
    is_moved,
    moved_function,
    run_on,
    to_device,
)
from regard.audit.adapters.call_arguments import (
    ARGUMENT_NAMES,
    SIZE_NAMES,
    CallKeywords,
    OutputFormat,
    first_known,
    parameters,
    query_key_value_names,
    token_arguments,
)
from regard.audit.adapters.projections import read_projections
from regard.caches import Growing
from regard.errors import ArgumentError
from regard.language import Phrase
from regard.span import Span

DEFAULT_HEAD_DIM = 6
MAX_BIAS_DISTANCE = 64
"""The largest distance that the random bias distinguishes."""


ADAPTER_KEYWORDS = {
    "keep": "rows",
    "tokens": "padding",
    "positions": "positions",
    "memory": "memory",
    "weights": "weights",
}
"""The keyword arguments of a user's adapter, with the names of `TargetAdapter.accepts`."""


class FunctionAdapter(TargetAdapter):
    """Call attend(q [B,H,T,D], k [B,G,S,D], v [B,G,S,D], ...) -> [B,H,T,D] with projected tokens.

    q, k, v = x Wq, x Wk, x Wv, split into heads;  out = attend(q, k, v), heads joined

    The projections are random and known. If the function takes the number of heads as an argument,
    it is called with joined heads, [B, T, H*D].
    """

    def __init__(
        self,
        function: Callable[..., object],
        claims: AuditClaims,
        *,
        name: str,
        dtype: torch.dtype = torch.float32,
        keywords: CallKeywords | None = None,
        output_format: OutputFormat | None = None,
        causal_flag: bool = False,
        single_head: bool = False,
    ) -> None:
        heads = 1 if single_head else claims.heads or 4
        D = claims.head_dim or (claims.dim // heads if claims.dim else DEFAULT_HEAD_DIM) or 1
        self.claims = replace(
            claims, heads=heads, kv_heads=claims.kv_heads or heads, head_dim=D, dim=heads * D
        )
        self.function, self.name, self.dtype = _for_evaluation(function, dtype), name, dtype
        self.original, self.width, self.causal_flag, self.single_head = (
            function,
            heads * D,
            causal_flag,
            single_head,
        )
        self.known = known = parameters(getattr(function, "forward", function))
        self.token_names = query_key_value_names(known) or ()
        self.keywords = keywords or _function_keywords(known, claims)
        count = first_known(SIZE_NAMES["heads"], [n for n in known if len(n) > 1])
        self.heads_joined = count is not None and not single_head
        if self.heads_joined:
            self.keywords = replace(self.keywords, fixed={**self.keywords.fixed, str(count): heads})
        self.output_format = output_format or OutputFormat()
        extra = {"weights"} if self.output_format.weights is not None else set()
        self.accepts = self.keywords.accepts | extra | {"memory"}

    @property
    def called(self) -> str:  # type: ignore[override]
        """The arguments of a call, such as "(q [B,H,T,D], k, v, mask=...)"."""
        layout = (
            "B,T,D"
            if self.single_head
            else "B,T,H*D"
            if self.heads_joined
            else ",".join(self.claims.layout)
        )
        words = [f"q [{layout}], k, v"]
        if self.keywords.mask and self.keywords.mask_format:
            words.append(f"{self.keywords.mask}={self.keywords.mask_format}")
        if self.causal_flag:
            words.append(f"{self.keywords.causal}=True")
        return f"({', '.join(words)})"

    def call(self, x: Tensor, inputs: CallInputs = CallInputs()) -> CallOutput:  # noqa: B008
        """Project the tokens, call the function, and join the heads."""
        heads = self.project_heads(x.to(self.dtype))
        memory = inputs.memory
        q, k, v = heads
        if memory is not None:
            memory = Growing() if memory is NEW_CACHE else memory
            (k, v), _ = memory.update((k, v), Span(len(memory), x.shape[1]))
        reply = self.call_function(q, k, v, inputs._replace(memory=None))
        return reply._replace(memory=memory)

    def call_function(self, q: Tensor, k: Tensor, v: Tensor, inputs: CallInputs) -> CallOutput:
        """Call the function on q [B,H,T,D] and k, v [B,G,S,D]; return [B, T, H*D]."""
        arguments = self.keywords.arguments(inputs, q, self.dtype)
        if self.keywords.causal:
            arguments[self.keywords.causal] = self.causal_flag and inputs.keep is None
        if self.keywords.sinks:
            arguments[self.keywords.sinks] = self._sinks().to(self.dtype)  # type: ignore[union-attr]
        if self.keywords.bias:
            arguments[self.keywords.bias] = self.bias(q.shape[2], k.shape[2]).to(self.dtype)  # type: ignore[union-attr]
        self.keywords.passed.update(arguments)
        named = dict(zip(self.token_names, map(self._to_layout, (q, k, v)), strict=True))
        tokens, by_name = token_arguments(self.known, named)
        with torch.no_grad():
            result = moved_function(self.function)(*tokens, **by_name, **arguments)
            reply = self.output_format.read(result)
        has_joined_heads = self.single_head or self.heads_joined
        out = (
            reply.out if has_joined_heads else self._to_layout(reply.out).transpose(1, 2).flatten(2)
        )
        return reply._replace(out=out)

    def call_last_queries(self, x: Tensor, n: int, keep: Tensor | None = None) -> Tensor:
        """Attend from the last n tokens of x to all tokens: [B, n, H*D]."""
        q, k, v = self.project_heads(x.to(self.dtype))
        return self.call_function(q[:, :, -n:], k, v, CallInputs(keep)).out

    def _to_layout(self, x: Tensor) -> Tensor:
        """Rearrange [B, H, T, D] for the layout of the function."""
        if self.single_head:
            return x[:, 0]
        if self.heads_joined:
            return x.transpose(1, 2).flatten(2)
        return x.transpose(1, 2) if self.claims.layout == "BTHD" else x

    def project_heads(self, x: Tensor) -> list[Tensor]:
        """Return q, k and v of tokens x, each [B, heads, T, D]."""
        known = self.projections()[0]
        D = known.head_dim
        maps = [weight.to(self.dtype) for weight, _ in (known.q, known.k, known.v)]
        return [torch.unflatten(x @ w.T, -1, (-1, D)).transpose(1, 2) for w in maps]

    def projections(self) -> tuple[Projections, ...]:
        """Return random maps, the same for every dtype."""
        generator = torch.Generator().manual_seed(0)
        H, G, D = (
            int(n or 1) for n in (self.claims.heads, self.claims.kv_heads, self.claims.head_dim)
        )
        q, k, v = (
            torch.randn(n * D, self.width, generator=generator, dtype=torch.float64)
            * self.width**-0.5
            for n in (H, G, G)
        )
        eye = torch.eye(H * D, dtype=torch.float64)
        sinks = self._sinks()
        return (Projections((q, None), (k, None), (v, None), (eye, None), H, G, sinks=sinks),)

    def _sinks(self) -> Tensor | None:
        """Return one sink logit for each head if the code takes sinks, else None."""
        generator = torch.Generator().manual_seed(1)
        H = self.claims.heads or 1
        return (
            torch.randn(H, generator=generator, dtype=torch.float64)
            if self.keywords.sinks
            else None
        )

    def bias(self, T: int, S: int | None = None) -> Tensor | None:
        """Return a random bias [1,H,T,S] by distance for the last tokens; None if not taken."""
        if not self.keywords.bias:
            return None
        S = S or T
        generator = torch.Generator().manual_seed(2)
        table = torch.randn(
            self.claims.heads or 1,
            2 * MAX_BIAS_DISTANCE + 1,
            generator=generator,
            dtype=torch.float64,
        )
        distance = torch.arange(S - T, S)[:, None] - torch.arange(S)
        return table[:, distance.clamp(-MAX_BIAS_DISTANCE, MAX_BIAS_DISTANCE) + MAX_BIAS_DISTANCE][
            None
        ]

    def untried_arguments(self) -> tuple[str, ...]:
        """Return the names of the parameters that no call so far has passed."""
        return self.keywords.untried(self.known, self.token_names)

    def to_dtype(self, dtype: torch.dtype) -> FunctionAdapter:
        """Return an adapter for the same function in another dtype."""
        return self._copy_with(dtype=dtype)

    def with_conventions(
        self, keywords: CallKeywords, output_format: OutputFormat
    ) -> FunctionAdapter:
        """Return the adapter with other argument names and another output format."""
        return self._copy_with(keywords=keywords, output_format=output_format)

    def with_causal_flag(self) -> FunctionAdapter:
        """Return the adapter with the function's causal flag set."""
        return self._copy_with(causal_flag=True)

    def _copy_with(self, **changes: object) -> FunctionAdapter:
        """Return a new adapter with some arguments changed."""
        arguments: dict[str, Any] = {
            "claims": self.claims,
            "name": self.name,
            "dtype": self.dtype,
            "keywords": self.keywords,
            "output_format": self.output_format,
            "causal_flag": self.causal_flag,
            "single_head": self.single_head,
            **changes,
        }
        return FunctionAdapter(self.original, arguments.pop("claims"), **arguments)

    def smaller_versions(self) -> Iterator[TargetAdapter]:
        """Yield the same function with fewer heads and features, smallest first."""
        H, G = self.claims.heads or 1, self.claims.kv_heads or 1
        sizes = [(1, 1), (2, 2)] if G == H else [(2, 1), (4, 2), (H, G)]
        for heads, groups in dict.fromkeys(sizes):
            for D in (1, 2, 4):
                if heads * D < self.width and heads <= H:
                    claims = replace(
                        self.claims, heads=heads, kv_heads=groups, head_dim=D, dim=None
                    )
                    yield self._copy_with(claims=claims)


def _for_evaluation(function: Callable[..., object], dtype: torch.dtype) -> Callable[..., object]:
    """Return a copy of a module in evaluation mode and this dtype; return a function unchanged."""
    if isinstance(function, nn.Module):
        return copy.deepcopy(function).to("cpu", dtype).eval()
    return function


def _function_keywords(
    signature_parameters: Mapping[str, Parameter], claims: AuditClaims
) -> CallKeywords:
    """Return the names of a function's arguments by role, with values for those it requires."""
    keywords = CallKeywords.of(signature_parameters)
    name = first_known(SIZE_NAMES["window"], signature_parameters)
    fixed: dict[str, object] = {name: claims.window} if name and claims.window else {}
    scale = first_known(ARGUMENT_NAMES["scale"], signature_parameters)
    if scale in keywords.required:
        fixed[str(scale)] = claims.scale or (claims.head_dim or DEFAULT_HEAD_DIM) ** -0.5
    if "enable_gqa" in signature_parameters and claims.kv_heads and claims.kv_heads != claims.heads:
        fixed["enable_gqa"] = True
    biases = [
        n for n in signature_parameters if not isinstance(signature_parameters[n].default, bool)
    ]  # bias=True is a flag, not a bias on the scores
    return replace(
        keywords,
        fixed={**keywords.fixed, **fixed},
        memory=None,
        use=None,
        bias=first_known(ARGUMENT_NAMES["bias"], biases),
        sinks=first_known(ARGUMENT_NAMES["sinks"], signature_parameters),
    )


class CustomAdapter(TargetAdapter):
    """Call the target through an adapter function of the user.

    The function has the form adapter(target, x, *, keep, tokens, positions, memory, weights). It
    may leave out any keyword argument; checks that need the argument are then not made:

        target: the code under audit.
        x: the tokens, [B, T, M].
        keep: a mask, bool [B or 1, T, S], True = may attend, or None.
        tokens: a padding mask, bool [B, S], False = padding, or None.
        positions: the positions of the tokens, int [B, T], or None.
        memory: the cache; `NEW_CACHE` asks for a new one, None for a call without a cache.
        weights: True asks for the attention weights.

    It returns the output [B, T, N]; (output, weights) if weights is True; or (output, memory) if
    there is a cache.
    """

    def __init__(
        self,
        target: Any,
        user_adapter: Callable[..., object],
        claims: AuditClaims,
        width: int,
        name: str,
        dtype: torch.dtype,
    ) -> None:
        self.original, self.user_adapter, self.claims, self.width = (
            target,
            user_adapter,
            claims,
            width,
        )
        self.name, self.dtype = name, dtype
        self.known = list(parameters(user_adapter))[2:]
        unknown = [n for n in self.known if n not in ADAPTER_KEYWORDS]
        if unknown:
            raise ArgumentError(
                f"the adapter has an argument {unknown[0]!r}; after the target it may have x and "
                f"{', '.join(ADAPTER_KEYWORDS)}"
            )
        self.called = f"adapter(target, x{''.join(', ' + n for n in self.known)})"
        takes = {ADAPTER_KEYWORDS[n] for n in self.known}
        self.accepts = frozenset(takes | ({"mask"} if "rows" in takes else set()))
        is_module = isinstance(target, nn.Module)
        self.target = target
        if is_module:  # the user's adapter gets tensors of its device, and the module no hooks
            self.target = to_device(copy.deepcopy(target).to("cpu", dtype).eval())
        self._run = moved_function(user_adapter)

    def call(self, x: Tensor, inputs: CallInputs = CallInputs()) -> CallOutput:  # noqa: B008
        """Call the user's adapter with the arguments that it takes."""
        arguments = {name: getattr(inputs, name) for name in self.known}
        if x.is_floating_point():
            x = x.to(self.dtype)
        with torch.no_grad():
            result = self._run(self.target, x, **arguments)
        reply = OutputFormat(1 if inputs.weights else None).read(result)
        memory = reply.memory
        if inputs.memory is not None and memory is None and inputs.memory is not NEW_CACHE:
            memory = inputs.memory  # the cache was changed in place
        return reply._replace(memory=memory)

    def to_dtype(self, dtype: torch.dtype) -> CustomAdapter:
        """Return an adapter for a copy in another dtype."""
        return CustomAdapter(
            self.original, self.user_adapter, self.claims, self.width, self.name, dtype
        )

    def projections(self) -> tuple[Projections, ...]:
        """Read the maps of a module from its parameters."""
        if not isinstance(self.original, nn.Module):
            raise CheckNotPossible(
                Phrase("{name} is not a module, so that it has no weights to read", name=self.name)
            )
        return read_projections(self.original, self.claims, self.width)

    def traced_module(self) -> tuple[nn.Module, TargetAdapter] | None:
        """Return the copy of the module that runs (on the CPU, with equal operations) and this
        adapter.
        """
        if not isinstance(self.target, nn.Module):
            return None
        if not is_moved():
            return self.target, self
        with run_on(None):
            on_cpu = self.to_dtype(self.dtype)
        return on_cpu.target, on_cpu

    def state_tensors(self) -> dict[str, Tensor] | None:
        """Return the state dict of a module."""
        return self.original.state_dict() if isinstance(self.original, nn.Module) else None
