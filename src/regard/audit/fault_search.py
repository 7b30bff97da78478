"""Search for the fewest faults that reproduce an output of the code."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import cache
from itertools import combinations
from typing import Any

import torch
from torch import Tensor

from regard.audit.adapters.base import CheckNotPossible, Projections
from regard.audit.check_context import CheckContext, worst_mismatch
from regard.audit.reference import (
    CORRECT_ROTARY,
    FAULTY_VALUES,
    ROTARY_DIVISORS,
    AttentionVariant,
    ReferenceInputs,
    reference_attention,
)

LENGTH = 5
"""The default number of tokens of the shorter of the two searched outputs."""
FLOAT64_TOLERANCE = 1e-9
"""The largest difference of two computations in float64, relative to the largest number."""
TRIED_IN_PAIRS = {
    "rotary": (
        "mixed",
        "mixed-back",
        "heads-half",
        "heads-interleaved",
        "values-half",
        "values-interleaved",
    ),
    "scale": ("none", "twice", "model_dim", "inverted"),
    "groups": ("tiled",),
    "mask": (
        "inverted",
        "own-hidden",
        "next-seen",
        "one-more",
        "one-less",
        "unmasked",
        "zeroed",
        "after",
    ),
    "softmax": ("queries", "heads", "absent"),
    "split": ("rows",),
    "join": ("rows",),
}
"""The faults that are also searched in pairs, because they occur together in practice."""


@dataclass
class WeightInterpretation:
    """One interpretation of the code: which linear map is which, and whether it is causal."""

    maps: Projections
    causal: bool
    search_faults: bool


class FaultSearch:
    """A search for the variant of the definition that reproduces two outputs of the code."""

    def __init__(self, context: CheckContext, T: int = LENGTH) -> None:
        self.context, self.window = context, context.adapter.claims.window
        self.interpretations = list(_interpretations(context))
        self.runs = [self._run(n) for n in (T, T + 2)]
        if not all(bool(out.isfinite().all()) for _, out in self.runs):
            raise CheckNotPossible("its output is not finite")
        self.float64_outputs: dict[int, Tensor] = {}
        self.inputs_cache: dict[tuple[int, bool, int, torch.dtype, int], ReferenceInputs] = {}

    def _run(self, n: int) -> tuple[Tensor, Tensor]:
        """Call the code on n random tokens; return the tokens [2, n, M] and the output."""
        # with the factor 1.5 the scores differ clearly, and the softmax does not saturate
        x = self.context.random_tokens(2, n, turn=3) * 1.5
        return x, self.context.call(x).out

    def inputs_for(
        self, interpretation: WeightInterpretation, x: Tensor, dtype: torch.dtype, turn: int = 0
    ) -> ReferenceInputs:
        """Return the inputs of the reference for tokens x, stored by their arguments."""
        key = (id(interpretation.maps), interpretation.causal, x.shape[1], dtype, turn)
        if key not in self.inputs_cache:
            self.inputs_cache[key] = reference_inputs(self.context, interpretation, x, dtype)
        return self.inputs_cache[key]

    def reproduces(self, interpretation: WeightInterpretation, variant: AttentionVariant) -> bool:
        """Whether a variant gives both outputs by the error rule, or in float64 if faulty."""
        if all(self._matches(interpretation, variant, x, out) for x, out in self.runs):
            return True
        return bool(variant.faults) and all(
            self._matches_in_float64(interpretation, variant, n) for n in range(2)
        )

    def _matches_in_float64(
        self, interpretation: WeightInterpretation, variant: AttentionVariant, n: int
    ) -> bool:
        """Whether a variant gives the output in float64: a fault may make rounding errors large."""
        if self.context.float64_adapter is None:
            return False
        x, _ = self.runs[n]
        ref = reference_attention(self.inputs_for(interpretation, x, torch.float64), variant)
        if n not in self.float64_outputs:
            self.float64_outputs[n] = self.context.call(x, adapter=self.context.float64_adapter).out
        out = self.float64_outputs[n]
        return out.shape == ref.shape and float(
            (out - ref).abs().max()
        ) <= FLOAT64_TOLERANCE * float(ref.abs().max())

    def _matches(
        self,
        interpretation: WeightInterpretation,
        variant: AttentionVariant,
        x: Tensor,
        out: Tensor,
    ) -> bool:
        """Whether a variant gives this output by the error rule."""
        ref = reference_attention(self.inputs_for(interpretation, x, torch.float64), variant)
        if ref.shape != out.shape:
            return False
        # for a large difference the plain computations, which cost as much again, are not needed
        coarse_limit = 1e-2 * float(ref.abs().max()) + 1e-3
        if (
            out.dtype == torch.float32
            and not float((out.double() - ref).abs().max()) <= coarse_limit
        ):
            return False
        return (
            worst_mismatch(
                out, same_dtype_references(self.context, interpretation, variant, x), ref
            )
            is None
        )

    def error(self, interpretation: WeightInterpretation, variant: AttentionVariant) -> float:
        """Return the largest difference of the first output from a variant."""
        x, out = self.runs[0]
        ref = reference_attention(self.inputs_for(interpretation, x, torch.float64), variant)
        return float((out.double() - ref).abs().max()) if ref.shape == out.shape else torch.inf

    def simplest(self) -> tuple[WeightInterpretation, AttentionVariant] | None:
        """Return the first variant that gives the output: no fault, one, a scale, two; or None."""
        known = self.context.notes.get("variant")
        for n in range(3):
            for interpretation in self.interpretations:
                for variant in self._candidates(interpretation, n):
                    if (known is None or _within(variant, known)) and self.reproduces(
                        interpretation, variant
                    ):
                        return interpretation, variant
            if n == 1 and (known is None or known.scale == "fitted"):
                fitted = self.fit_scale(known)
                if fitted is not None:
                    return fitted
        return None

    def _candidates(
        self, interpretation: WeightInterpretation, n: int
    ) -> tuple[AttentionVariant, ...]:
        """Return the variants with n faults that make sense under an interpretation."""
        if n and not interpretation.search_faults:
            return ()
        maps = interpretation.maps
        return candidates(
            maps.heads,
            maps.groups,
            maps.head_dim,
            maps.bases,
            n,
            windowed=self.window is not None,
            named=maps.named,
            sinks=maps.sinks is not None,
            mapped=maps.o is not None,
            biased=self.context.adapter.bias(2) is not None,
        )

    def fit_scale(
        self, known: AttentionVariant | None
    ) -> tuple[WeightInterpretation, AttentionVariant] | None:
        """Find a variant without faults that reproduces the code's outputs with another scale."""
        for interpretation in self.interpretations:
            for variant in (
                self._candidates(interpretation, 0) if interpretation.search_faults else ()
            ):
                fitted = replace(variant, scale="fitted")
                correct_factor = interpretation.maps.head_dim**-0.5
                factor = (
                    known.factor
                    if known is not None
                    else self._factor(interpretation, fitted, correct_factor)
                )
                if self.reproduces(interpretation, replace(fitted, factor=factor)):
                    return interpretation, replace(fitted, factor=factor)
        return None

    def _factor(
        self, interpretation: WeightInterpretation, variant: AttentionVariant, correct_factor: float
    ) -> float:
        """Find the scale with the smallest error: a grid of powers, then golden-section search."""

        def error_at(power: float) -> float:
            return self.error(interpretation, replace(variant, factor=correct_factor * 2.0**power))

        grid = [n / 2 for n in range(-16, 17)]
        best = min(grid, key=error_at)
        lower, upper = best - 0.5, best + 0.5
        ratio = (5**0.5 - 1) / 2
        for _ in range(56):
            a, b = upper - ratio * (upper - lower), lower + ratio * (upper - lower)
            lower, upper = (lower, b) if error_at(a) < error_at(b) else (a, upper)
        return correct_factor * math.pow(2, (lower + upper) / 2)

    def correct_variants(
        self, interpretation: WeightInterpretation
    ) -> tuple[AttentionVariant, ...]:
        """Return the variants of attention that have none of the known faults."""
        return self._candidates(interpretation, 0)

    def nearest_correct(self) -> tuple[WeightInterpretation, AttentionVariant]:
        """Return the correct variant with the smallest error."""
        options = [
            (interpretation, variant)
            for interpretation in self.interpretations
            for variant in self._candidates(interpretation, 0)
        ]
        return min(options, key=lambda each: self.error(*each))


def reference_inputs(
    context: CheckContext, interpretation: WeightInterpretation, x: Tensor, dtype: torch.dtype
) -> ReferenceInputs:
    """Return the inputs of the reference for tokens x in this dtype."""
    claims, T = context.adapter.claims, x.shape[1]
    declared = context.adapter.declared_mask(T)
    keep = (
        context.expected_mask(T, T, causal=interpretation.causal) if declared is None else declared
    )
    bias = context.adapter.bias(T)
    softcap = context.notes.get("softcap")
    return ReferenceInputs(
        x.to(dtype), interpretation.maps, keep, claims.scale, claims.window, bias, softcap=softcap
    )


def same_dtype_references(
    context: CheckContext,
    interpretation: WeightInterpretation,
    variant: AttentionVariant,
    x: Tensor,
) -> list[Tensor]:
    """Return references of equal standing: plain, rows reversed, angles in float32."""
    dtype = context.adapter.dtype
    outputs = [reference_attention(reference_inputs(context, interpretation, x, dtype), variant)]
    outputs.append(
        reference_attention(
            reference_inputs(context, interpretation, x.flip(0), dtype), variant
        ).flip(0)
    )
    if variant.rotary != "none":
        outputs.append(
            reference_attention(
                replace(reference_inputs(context, interpretation, x, dtype), rounded=True), variant
            )
        )
    return outputs


def _interpretations(context: CheckContext) -> Iterator[WeightInterpretation]:
    """Yield every interpretation of the maps; if causality is not claimed, also as causal code."""
    causalities = (
        {context.causal, True} if context.adapter.claims.causal is None else {context.causal}
    )
    for maps in context.adapter.projections():
        for causal in sorted(causalities):
            yield WeightInterpretation(maps, causal, search_faults=maps.search_faults)


def _within(variant: AttentionVariant, known: AttentionVariant) -> bool:
    """Whether `known`, which explained a larger example, has all faults of the variant."""
    return all(getattr(variant, f) == getattr(known, f) for f in variant.faults)


@cache
def candidates(
    heads: int,
    groups: int,
    head_dim: int,
    bases: tuple[float, ...],
    n: int,
    *,
    windowed: bool = False,
    named: bool = True,
    sinks: bool = False,
    mapped: bool = True,
    biased: bool = False,
) -> tuple[AttentionVariant, ...]:
    """Return the variants with n faults, with every correct rotary and bias for each."""
    correct_variants = list(_correct_variants(head_dim, bases))
    conditions = {
        "windowed": windowed,
        "named": named,
        "sinks": sinks,
        "mapped": mapped,
        "biased": biased,
    }
    table = TRIED_IN_PAIRS if n > 1 else FAULTY_VALUES
    faults = [
        (name, value)
        for name, values in table.items()
        for value in values
        if _has_effect(name, value, heads, groups, head_dim)
        and all(conditions[need] for need in _NEEDS.get(value, _NEEDS.get(name, ())))
    ]
    variants = []
    for combination in combinations(faults, n):
        changes: dict[str, Any] = dict(combination)
        if len(changes) < n:  # two faults of the same step
            continue
        bases_without_fault = correct_variants
        if n > 1:  # partial rotary and ALiBi are searched with one fault only
            bases_without_fault = [
                r for r in correct_variants if r.rotary_divisor == 1 and r.bias == "none"
            ]
        if "rotary" in changes:
            bases_without_fault = list(
                dict.fromkeys(
                    AttentionVariant(base=r.base, rotary_divisor=r.rotary_divisor)
                    for r in bases_without_fault
                    if r.rotary != "none"
                )
            )
        if "bias" in changes:
            bases_without_fault = [AttentionVariant()]
        variants += [replace(base, **changes) for base in bases_without_fault]
    return tuple(variants)


_NEEDS: dict[str, tuple[str, ...]] = {
    "one-more": ("windowed",),
    "one-less": ("windowed",),
    "roles": ("named",),
    "sink": ("sinks",),
    "output": ("mapped",),
    "given-negated": ("biased",),
}
"""The conditions of `candidates` under which a field or a faulty value is tried."""


def _correct_variants(head_dim: int, bases: tuple[float, ...]) -> Iterator[AttentionVariant]:
    """Yield the variants without a fault."""
    yield AttentionVariant()
    parts = [n for n in (1, *ROTARY_DIVISORS) if head_dim % (2 * n) == 0]
    for layout in CORRECT_ROTARY[1:]:
        yield from (
            AttentionVariant(rotary=layout, base=b, rotary_divisor=n) for n in parts for b in bases
        )
    yield AttentionVariant(bias="alibi")


def _has_effect(name: str, value: str, heads: int, groups: int, head_dim: int) -> bool:
    """Whether a fault changes anything for these sizes."""
    if value == "fitted":
        return False
    if name == "roles":
        return value == "keys-values" or groups == heads
    if name == "groups":
        return 1 < groups < heads
    if name in ("split", "join") or value == "heads":
        return heads > 1
    if name == "rotary":
        mixed_layouts = "mixed" in value or value.startswith("each")
        return head_dim % 2 == 0 and (head_dim > 2 or not mixed_layouts)
    return True
