"""`CheckContext`, which all checks receive: how to call the code, and compare outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from regard.audit.adapters.base import (
    NEW_CACHE,
    CallInputs,
    CallOutput,
    CheckNotApplicable,
    CheckNotPossible,
    TargetAdapter,
    influence,
)
from regard.audit.adapters.functions import FunctionAdapter
from regard.audit.adapters.mask_formats import MaskBehavior
from regard.tolerance import allowed_error

LONG_LENGTHS = (293, 149, 75, 37)
"""Lengths that no block size divides; the first that the code accepts is used."""
MAX_PARAMETERS = 500_000_000
"""The largest number of parameters of which a second copy in float64 is made."""
T = 6
"""The number of tokens with which `make_context` finds out whether the code is causal."""


class Mismatch(NamedTuple):
    """The largest difference of an output from its reference that the error rule does not allow."""

    position: tuple[int, ...]
    expected: float
    got: float
    allowed: float


def worst_mismatch(x: Tensor, plains: Sequence[Tensor], ref64: Tensor) -> Mismatch | None:
    """Return where x differs most from ref64 if the error rule does not allow it, else None.

    max|x - ref64| <= 2 max|plain - ref64| + 2 max|((ref + 0.3) - 0.3) - ref|
    """
    if x.shape != ref64.shape:
        return Mismatch((), float(ref64.numel()), float(x.numel()), 0.0)
    error = (x.double() - ref64).abs()
    # equal infinities, and NaN in both, count as equal
    same = (x.double() == ref64) | (x.isnan() & ref64.isnan())
    error = torch.where(same, 0.0, error)
    allowed = allowed_error(plains, ref64)
    worst = torch.where(error.isnan(), torch.inf, error)
    if not worst.numel() or float(worst.max()) <= allowed:
        return None
    position = position_of_largest(worst)
    return Mismatch(position, float(ref64[position]), float(x[position]), allowed)


def position_of_largest(x: Tensor) -> tuple[int, ...]:
    """Return the indices of the largest number of a tensor."""
    return tuple(int(i) for i in torch.unravel_index(x.argmax(), x.shape))


RunTarget: TypeAlias = "Callable[[TargetAdapter, Tensor], Tensor]"
"""A function (adapter, tokens) -> output; the adapter determines the dtype."""


OTHER_TEXTS = 16
"""How many other texts measure the rounding errors of a model that takes ids."""


@dataclass
class CheckContext:
    """The code under audit, and how it must be called."""

    adapter: TargetAdapter
    causal: bool
    masked: bool
    seed: int = 0
    strict: bool = False
    notes: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.float64_adapter = to_float64(self.adapter)

    @property
    def exact_adapter(self) -> TargetAdapter:
        """The adapter in float64, or that of the code's dtype where it does not run in float64."""
        return self.float64_adapter or self.adapter

    def exact_output(self, x: Tensor) -> Tensor:
        """Return the output on tokens x in float64, where the code runs in it."""
        return self.call(x, adapter=self.exact_adapter).out

    def expected_mask(self, T: int, S: int, *, causal: bool | None = None) -> Tensor:
        """Return the claimed mask of the last queries, bool [T, S]; `causal` overrides it."""
        causal = self.causal if causal is None else causal
        i, j = torch.arange(S - T, S)[:, None], torch.arange(S)
        visible = j <= i if causal else torch.ones(T, S, dtype=torch.bool)
        window = self.adapter.claims.window
        if window and causal:
            visible = visible & (j > i - window)
        return visible

    def random_tokens(self, B: int, T: int, turn: int = 0) -> Tensor:
        """Return random tokens [B, T, ...], which are different for each `turn`."""
        return self.adapter.random_tokens(B, T, self.seed * 101 + turn)

    def replace_token(self, x: Tensor, j: int) -> Tensor:
        """Return x with another token at index j."""
        other = x.clone()
        if x.is_floating_point():
            generator = torch.Generator().manual_seed(self.seed * 101 + 7 + j)
            noise = torch.randn(x[:, j].shape, generator=generator, dtype=torch.float64)
            other[:, j] = noise - x[:, j]
        else:
            other[:, j] = (x[:, j] + 1 + self.seed % 3) % self.adapter.width
        return other

    def call(
        self,
        x: Tensor,
        *,
        tokens: Tensor | None = None,
        start: int = 0,
        memory: object = None,
        weights: bool = False,
        adapter: TargetAdapter | None = None,
    ) -> CallOutput:
        """Call the code on tokens x from position `start`, with the mask that it needs."""
        adapter = adapter or self.adapter
        B, T = x.shape[:2]
        S = start + T if memory is not None else T
        keep = self.expected_mask(T, S)[None] if self.masked else None
        padding = None
        if tokens is not None:
            if "padding" in adapter.accepts:
                padding = tokens
            else:
                keep = self.expected_mask(T, S)[None] & tokens[:, None, :]
        positions = None
        if memory is not None:
            positions = torch.arange(start, start + T).expand(B, -1)
        return adapter.call(x, CallInputs(keep, padding, positions, memory, weights))

    def compare(self, x: Tensor, run: RunTarget, reference: RunTarget) -> Mismatch | None:
        """Return where `run` differs from `reference` by the error rule, else None.

        The allowed error is that of the reference in the code's dtype, on x and on inputs equal up
        to rounding, so that it does not depend on the rounding of a single run.
        """
        plains, ref = self.reference_outputs(x, reference)
        return worst_mismatch(run(self.adapter, x), plains, ref)

    def reference_outputs(self, x: Tensor, reference: RunTarget) -> tuple[list[Tensor], Tensor]:
        """Return plain computations in the code's dtype, and the reference in float64."""
        plain = reference(self.adapter, x)
        ref = (
            plain.double()
            if self.float64_adapter is None
            else reference(self.float64_adapter, x).double()
        )
        return [plain, *self._outputs_with_other_rounding(x, ref, reference)], ref

    def _outputs_with_other_rounding(
        self, x: Tensor, ref: Tensor, reference: RunTarget
    ) -> list[Tensor]:
        """Return plain computations on x with rounding errors; of ids, from other ids."""
        generators = [torch.Generator().manual_seed(turn) for turn in range(2)]
        if x.is_floating_point():
            eps = torch.finfo(self.adapter.dtype).eps
            signs = [torch.randn(x.shape, generator=g).sign().double() for g in generators]
            return [reference(self.adapter, x * (1 + eps * sign)) for sign in signs]
        if self.float64_adapter is None:
            return []
        # ids cannot be changed a little, so that several other texts stand for other rounding
        other_tokens = [
            self.random_tokens(x.shape[0], x.shape[1], turn=50 + turn)
            for turn in range(OTHER_TEXTS)
        ]
        errors = [
            reference(self.adapter, y).double() - reference(self.float64_adapter, y)
            for y in other_tokens
        ]
        # all of them at once, since a product of many rows may round more than one of few rows
        batch = torch.cat(other_tokens)
        in_batch = (
            self.call(batch).out.double() - self.call(batch, adapter=self.float64_adapter).out
        )
        errors.append(in_batch.abs().max())
        return [(ref + error).to(self.adapter.dtype) for error in errors]

    def run_cached(
        self, x: Tensor, chunks: Sequence[int], adapter: TargetAdapter
    ) -> tuple[Tensor, object]:
        """Return the output over cached chunks of these lengths, and the cache at the end."""
        if "memory" not in adapter.accepts:
            raise CheckNotApplicable("it takes no cache")
        # fills a cache inside the module with other tokens, which must not affect the result
        self.call(self.random_tokens(x.shape[0], x.shape[1], turn=8), adapter=adapter)
        memory: object = NEW_CACHE
        outs, start = [], 0
        for n in chunks:
            reply = self.call(x[:, start : start + n], start=start, memory=memory, adapter=adapter)
            memory = reply.memory
            if memory is NEW_CACHE or memory is None:
                raise CheckNotPossible("it returns no cache; give an adapter that returns one")
            outs.append(reply.out)
            start += n
        return torch.cat(outs, 1), memory


def to_float64(adapter: TargetAdapter) -> TargetAdapter | None:
    """Return the adapter in float64; None if the code does not run in float64 or is too large."""
    state = adapter.state_tensors()
    if state and sum(x.numel() for x in state.values()) > MAX_PARAMETERS:
        return None
    try:
        float64_adapter = adapter.to_dtype(torch.float64)
        out = float64_adapter.call(adapter.random_tokens(1, 3, 0)).out
    except Exception:  # code that runs in some dtypes only has no fault
        return None
    return float64_adapter if out.dtype == torch.float64 else None


def make_context(
    adapter: TargetAdapter, mask_behavior: dict[str, MaskBehavior], seed: int, *, strict: bool
) -> CheckContext:
    """Find out whether the code is causal and whether its mask must be passed, and make the
    context.

    Without a claim, a call without a mask decides: no dependence on later tokens is causal; full
    dependence is causal with a mask argument or flag, else bidirectional; the rest is "unclear".
    """
    claimed_causal = adapter.claims.causal
    unmasked_context = CheckContext(adapter, causal=False, masked=False, seed=seed, strict=strict)
    visible = influence(
        lambda x: unmasked_context.exact_adapter.call(x).out,
        unmasked_context.random_tokens(1, T),
        unmasked_context.replace_token,
    ).visible
    later, earlier = torch.ones(T, T).triu(1).bool(), torch.ones(T, T).tril(-1).bool()
    everything = bool(visible[later].all()) and bool(visible[earlier].all())
    takes_mask = "mask" in adapter.accepts
    notes: dict[str, Any] = {"mask_behavior": mask_behavior}
    if (
        isinstance(adapter, FunctionAdapter)
        and adapter.keywords.causal
        and claimed_causal is not False
    ):
        notes["flag"] = adapter.with_causal_flag()
    triangular = not bool(visible[later].any())
    if claimed_causal is None and not everything and not triangular:
        notes["unclear"] = True
    causal = (
        claimed_causal
        if claimed_causal is not None
        else triangular or (everything and (takes_mask or "flag" in notes))
    )
    masked = causal and takes_mask and bool(visible[later].any())
    if causal and not masked and "flag" in notes and bool(visible[later].any()):
        adapter = notes["flag"]
    return CheckContext(
        adapter, causal=bool(causal), masked=masked, seed=seed, strict=strict, notes=notes
    )


def with_adapter(context: CheckContext, adapter: TargetAdapter) -> CheckContext:
    """Return the same context with another adapter."""
    notes = {name: value for name, value in context.notes.items() if name != "flag"}
    return replace(context, adapter=adapter, notes=notes)
