"""`Mixer`, the base class of all attention mechanisms."""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Cache, rollback_on_error
from regard.caches.cross_layer import split_first_values
from regard.cost import Description, Spec
from regard.cost.spec import ParameterCounts
from regard.errors import ArgumentError
from regard.masks import Causal, Full, Mask, reach
from regard.masks.patterns import count_pairs
from regard.nn.explainable import Explainable
from regard.nn.module_calls import call_as_leaf, is_proxy
from regard.nn.recurrence.projections import CausalConvolution
from regard.nn.weights import count_parameters
from regard.process_state import (
    drops_conditions,
    is_compiling,
    is_exporting_onnx,
    values_are_readable,
)
from regard.sequence_scope import current_scope
from regard.span import Positions, Span, as_tensor

_CAUSAL = Causal()

AcrossRanks: TypeAlias = Literal["attention", "state"] | None
"""How a mechanism runs over several ranks: see `Mixer.across_ranks`."""


class Mixer(Explainable, nn.Module):
    """Base class of the modules that mix the tokens of a sequence, x [B,T,M] -> [B,T,M2].

    A subclass implements `mix`, `new_cache` and `spec`, and `check_cache` if it refuses caches.

    Attributes:
        across_ranks: how `regard.parallel.sequence` runs it: "attention": by `attend` over all
            ranks; "state": its `State` passes from rank to rank; None: refused.
    """

    across_ranks: ClassVar[AcrossRanks] = None

    recording_refusal: str | None = None
    """Why no recorded graph (ONNX, `torch.jit.trace`) serves every length; None if one does."""

    static_step_refusal: str | None = (
        "depends on lengths or on the order of the slots, which Python has to know"
    )
    """Why a step with a static cache cannot be captured as a CUDA graph; None if it can."""

    carries_values: bool = False
    """Whether it gives or reads the values of the first layer, or a choice of keys."""

    @property
    def is_causal(self) -> bool:
        """Whether no token sees a later one, by the mask."""
        return self._own_mask().causal_from() == 0

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        positions: Positions | None = None,
        cache: Cache | None = None,
        backend: str = "auto",
    ) -> Float[Tensor, "B T M2"]:
        """Mix the tokens of x and the cache, which a call that raises leaves as it was."""
        if type(x) is not Tensor and is_proxy(x):
            return call_as_leaf(self, Mixer.forward, x, positions, cache=cache, backend=backend)
        if x.ndim != 3:
            raise ArgumentError(
                f"x is {tuple(x.shape)}; it must be [batch, length, dim]"
                + (": use x[None]" if x.ndim == 2 else "")
            )
        if self.recording_refusal is not None:
            check_recorded_graph(self, self.recording_refusal)
        if (own := split_first_values(cache)[0]) is not None:
            self.check_cache(own)
        if (scope := current_scope()) is not None:
            result: Tensor = scope.run_mixer(self, x, positions, cache, backend)
            return result
        if positions is None:
            positions = Span(0, x.shape[1]) if cache is None else cache.next(x.shape[1])
        if cache is None:
            return self.mix(x, positions, cache, backend)
        self._check_later_tokens(positions, cache if own is None else own)
        if is_compiling():
            return self.mix(x, positions, cache, backend)
        with rollback_on_error(cache):
            return self.mix(x, positions, cache, backend)

    def _own_mask(self) -> Mask:
        """Return the mask of the mechanism; a recurrence is causal."""
        mask: Mask | None = getattr(self, "mask", _CAUSAL)
        return Full() if mask is None else mask

    def _check_later_tokens(self, positions: Positions, cache: Cache) -> None:
        """Check that no token of an earlier call sees one of the new tokens."""
        mask = self._own_mask()
        if (causal_from := mask.causal_from()) == 0:
            return
        following = cache.next(1)
        if isinstance(following, Span) and following.start <= 0:
            return  # the cache is empty
        names = f"this {type(self).__name__} with the mask {mask}"
        advice = "pass no cache, or all tokens that see one another in one call"
        if not values_are_readable(*(x for x in (following, positions) if isinstance(x, Tensor))):
            if causal_from is None:
                return
            raise ArgumentError(
                f"{names} sees later tokens, and a compiled graph cannot check whether those of "
                f"earlier calls do; {advice}"
            )
        new, first = as_tensor(positions).long(), as_tensor(following).long()
        new, first = (x[0] if x.ndim == 3 else x for x in (new, first))  # the order of the tokens
        if causal_from is not None and not bool(((new >= 0) & (new < causal_from)).any()):
            return
        earlier = Span(0, int(first.max()))
        is_earlier = torch.arange(earlier.length, device=first.device) < first  # [B or 1,S]
        if bool((mask.block(earlier, new) & is_earlier[:, None, :, None]).any()):
            raise ArgumentError(
                f"{names} sees later tokens, so that results of earlier calls would change; "
                f"{advice}"
            )

    @abstractmethod
    def mix(self, x: Tensor, positions: Positions, cache: Cache | None, backend: str) -> Tensor:
        """Apply the mechanism to x [B,T,M] at `positions`; return [B,T,M2]."""

    def check_cache(self, cache: Cache) -> None:
        """Raise an `ArgumentError` if this mechanism cannot use the cache."""

    @abstractmethod
    def new_cache(self) -> Cache:
        """Return an empty cache of the kind that suits this mechanism."""

    @property
    @abstractmethod
    def spec(self) -> Spec:
        """The cost of this layer, with the number of parameters that it really has."""

    def describe(self, context: int = 4096) -> Description:
        """Compute parameters, cached values and FLOPs of this layer for one decoded token."""
        return self.spec.describe(context, type(self).__name__)


def check_recorded_graph(module: nn.Module, refusal: str) -> None:
    """Raise if this thread records a graph, which would be wrong for other lengths."""
    if drops_conditions():
        recorder = "torch.onnx.export" if is_exporting_onnx() else "torch.jit.trace"
        raise ArgumentError(
            f"{recorder} was given a {type(module).__name__}, which {refusal}: the result would be "
            "wrong for other lengths without an error; use torch.export.export, which checks the "
            "lengths, or a mechanism that docs/pytorch.md lists for ONNX"
        )


def count_weights(module: nn.Module, *counted_separately: nn.Module | None) -> ParameterCounts:
    """Count the parameters of a module by kind."""
    total = count_parameters(module)
    norms = sum(
        p.numel()
        for part in module.modules()
        if "Norm" in type(part).__name__
        for p in part.parameters(recurse=False)
    )
    matrices = _count_matrix_weights(module)
    separate = sum(_count_matrix_weights(part) for part in counted_separately if part is not None)
    return ParameterCounts(matrices, total - matrices - norms, norms, separate)


def _count_matrix_weights(module: nn.Module) -> int:
    """Count the weights of the linear maps and short convolutions of a module."""
    kinds = (nn.Linear, CausalConvolution)
    # a stored weight would be dequantized to be read
    weights = (
        getattr(part, "stored_weight", None) or part.weight
        for part in module.modules()
        if isinstance(part, kinds)
    )
    return sum(weight.shape.numel() for weight in weights)


@dataclass(frozen=True)
class MaskVisibility:
    """The number of keys that a mask lets each query see (`regard.cost.softmax.VisibleKeys`)."""

    mask: Mask | None
    keeps_all: bool = False

    @property
    def max_tokens(self) -> int | None:
        """The largest number of tokens that a cache needs to store; None if there is no limit."""
        return None if self.keeps_all else reach(self.mask).tokens

    def visible_keys(self, context: int) -> int:
        """Return how many keys the token at context - 1 sees, in the head that sees most."""
        mask = self.mask if self.mask is not None else Full()
        return int(mask.visible(Span(context - 1, 1), Span(0, context)).max())

    def pairs(self, context: int) -> int:
        """Return the number of visible query-key pairs, in the head that has the most."""
        return count_pairs(Full() if self.mask is None else self.mask, context)
