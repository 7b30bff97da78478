"""Rules in which a score depends on itself, its head and its place, or the number of keys."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from regard.argument_checks import check_number
from regard.errors import ArgumentError, ArgumentTypeError
from regard.process_state import is_compiling
from regard.scores.base import PairRule, Scope, ScoreBlock, ScoreRule
from regard.span import Positions, Span
from regard.units import plural


@dataclass(frozen=True, eq=False, repr=False)
class FnScore(PairRule):
    """A rule given by a function: s'_ij = fn(s_ij, b, h, q_i, k_j, *parameters).

    The function is called with whole tensors that broadcast, also for hidden pairs: it consists of
    elementwise operations and lookups such as `table[h, q - k]`.

    Args:
        fn: a function of the scores `[B, H, t, s]`, batch rows `[B, 1, 1, 1]`, query heads `[1, H,
            1, 1]`, positions `[B or 1, 1, t, 1]` and `[B or 1, 1, 1, s]`, and the parameters; it
            returns scores.
        parameters: tensors that are passed to `fn` and that receive gradients.
        slots: whether it gets indices in the call instead of positions.
        name: the text of the rule in messages.

    Raises:
        ArgumentTypeError: an argument or the result has a wrong type.
        ArgumentError: the result has another shape, or the function reads a tensor with a gradient.

    >>> import torch, regard
    >>> x, width = torch.randn(1, 2, 5, 8), torch.tensor([0.5, 0.1])
    >>> near = regard.scores.FnScore(lambda s, b, h, q, k, w: s - w[h] * (q - k) ** 2, (width,))
    >>> regard.attend(x, x, x, score=near).shape
    torch.Size([1, 2, 5, 8])

    Source: `score_mod` of FlexAttention, Dong et al. 2024 (arXiv 2412.05496), section 3.1.
    """

    kind: ClassVar[str] = "fn"

    fn: Callable[..., Tensor]
    parameters: tuple[Tensor, ...] = ()
    slots: bool = False
    name: str = ""

    def __post_init__(self) -> None:
        if not callable(self.fn):
            raise ArgumentTypeError(
                f"fn is {type(self.fn).__name__}; it must be a function fn(score, b, h, q, k, ...)"
            )
        for i, x in enumerate(self.parameters):
            if not isinstance(x, Tensor):
                raise ArgumentTypeError(
                    f"parameters[{i}] is {type(x).__name__}; it must be a tensor"
                )
        object.__setattr__(self, "parameters", tuple(self.parameters))

    @property
    def by_slot(self) -> bool:
        """Whether the function is given indices in the call instead of positions."""
        return self.slots

    def pair(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Call the function and check its result."""
        out = self.fn(s, b, h, q, k, *self.parameters)
        if not isinstance(out, Tensor) or not out.is_floating_point():
            got = out.dtype if isinstance(out, Tensor) else type(out).__name__
            raise ArgumentTypeError(f"{self} returned {got}; it must return a float tensor")
        if out.shape != s.shape:
            raise ArgumentError(
                f"{self} returned {tuple(out.shape)} for scores {tuple(s.shape)}; it must return "
                "one number per score: use elementwise operations"
            )
        return out.to(s.dtype)

    def tensors(self) -> tuple[Tensor, ...]:
        """Return the parameters of the function."""
        return self.parameters

    def with_tensors(self, tensors: Sequence[Tensor]) -> FnScore:
        """Return the same function with other parameters."""
        self._check_count(tensors, len(self.parameters))
        return replace(self, parameters=tuple(tensors))

    def require(self, H: int, D: int, q_positions: Positions, device: torch.device) -> None:
        """Call the function on one pair, to find tensors with a gradient that are no parameters."""
        if is_compiling() or device.type == "meta":
            return
        constant = replace(self, parameters=tuple(x.detach() for x in self.parameters))
        score = torch.zeros(1, 1, 1, 1, dtype=torch.float32, device=device)
        with torch.enable_grad():
            out = constant.pair(score, *(score.long(),) * 4)
        if out.requires_grad:
            raise ArgumentError(
                f"{self} reads a tensor that requires a gradient and is not among its parameters; "
                "pass it as parameters=(tensor,), which fn receives as its last arguments"
            )

    def __str__(self) -> str:
        return f"fn({self.name or getattr(self.fn, '__name__', type(self.fn).__name__)})"


@dataclass(frozen=True, eq=False, repr=False)
class SoftClamp(PairRule):
    """A smooth bound on the scores: s'_ij = c tanh(s_ij / c).

    `attend(..., softcap=c)` bounds the scores before a bias is added, this rule with it.

    Args:
        cap: the bound c, greater than 0.

    Raises:
        ArgumentError, ArgumentTypeError: the bound is not a number greater than 0.

    >>> zero = torch.zeros(1, 1, 1, 1, dtype=torch.int64)
    >>> round(SoftClamp(2.0).pair(torch.full((1, 1, 1, 1), 100.0), zero, zero, zero, zero).item())
    2

    Source: Gemma Team 2024 (arXiv 2408.00118), section 2.
    """

    cap: float

    def __post_init__(self) -> None:
        _check_positive("cap", self.cap)

    def pair(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return c tanh(s / c)."""
        return self.cap * torch.tanh(s / self.cap)

    def select_heads(self, heads: slice) -> SoftClamp:
        """Return the same rule, which is the same for every head."""
        return self


@dataclass(frozen=True, eq=False, repr=False)
class Temperature(PairRule):
    """A divisor of the scores: s'_ij = s_ij / tau, by head, or by the position of the query.

    Args:
        tau: a number above 0; a float tensor `[H]`; or a float tensor `[1 or H, N]` by positions.

    Raises:
        ArgumentError, ArgumentTypeError: tau does not fit, also in a call.

    >>> import torch, regard
    >>> q = torch.randn(1, 2, 5, 8)
    >>> by_head = regard.scores.Temperature(torch.tensor([0.5, 2.0]))
    >>> regard.attend(q, q, q, score=by_head).shape
    torch.Size([1, 2, 5, 8])

    Source: Hinton et al. 2015 (arXiv 1503.02531), section 2; Henry et al. 2020 (arXiv 2010.04245),
    section 3.
    """

    tau: float | Tensor

    def __post_init__(self) -> None:
        if not isinstance(self.tau, Tensor):
            _check_positive("tau", self.tau)
            return
        if not self.tau.is_floating_point():
            raise ArgumentTypeError(f"tau is {self.tau.dtype}; use .float()")
        if self.tau.ndim not in (1, 2):
            raise ArgumentError(
                f"tau is {tuple(self.tau.shape)}; it must be [H], or [1 or H, positions]"
            )

    def divisor(self, h: Tensor, q: Tensor, dtype: torch.dtype) -> Tensor | float:
        """Return tau for heads and query positions, which broadcast.

        Args:
            h, q: indices of query heads, and positions of queries.
            dtype: the dtype of the result.

        Returns:
            A number, or a tensor that broadcasts like `h` and `q`.
        """
        if not isinstance(self.tau, Tensor):
            return self.tau
        tau = self.tau.to(h.device, dtype)
        if tau.ndim == 1:
            return tau[h]
        # an empty slot has the position -1; its row sees nothing
        return tau[h if tau.shape[0] > 1 else torch.zeros_like(h), q.clamp(min=0)]

    def pair(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return each score divided by its temperature."""
        return s / self.divisor(h, q, s.dtype)

    def select_heads(self, heads: slice) -> Temperature:
        """Return the rule with the numbers of these heads."""
        if not isinstance(self.tau, Tensor) or (self.tau.ndim == 2 and self.tau.shape[0] == 1):
            return self
        return replace(self, tau=self.tau[heads])

    def require(self, H: int, D: int, q_positions: Positions, device: torch.device) -> None:
        """Check the number of heads, and that there is a number for every query position."""
        super().require(H, D, q_positions, device)
        if isinstance(self.tau, Tensor) and self.tau.ndim == 2 and not is_compiling():
            if isinstance(q_positions, Span):
                last = q_positions.stop - 1
            else:
                last = int(q_positions.max()) if q_positions.numel() else -1
            if last >= self.tau.shape[1]:
                raise ArgumentError(
                    f"{self} has {plural(self.tau.shape[1], 'position')} and a query has the "
                    f"position {last}; give a number for every position"
                )

    def _heads(self) -> int | None:
        if not isinstance(self.tau, Tensor) or (self.tau.ndim == 2 and self.tau.shape[0] == 1):
            return None
        return self.tau.shape[0]


@dataclass(frozen=True, eq=False, repr=False)
class ScalableSoftmax(ScoreRule):
    """Scalable-Softmax: scores grow with the number of keys, so that attention does not fade.

    s'_ij = a ln(n_i) s_ij, where n_i is the number of keys that query i sees

    With a = 1 / ln n, rows of n keys are those of a softmax.

    Args:
        a: a number other than 0, or a float tensor `[H]` that may require a gradient.

    Raises:
        ArgumentError, ArgumentTypeError: `a` is neither; in a call, H differs.

    >>> import torch, regard
    >>> q = torch.randn(1, 2, 5, 8)
    >>> rule = regard.scores.ScalableSoftmax(torch.tensor([0.43, 0.5]))
    >>> regard.attend(q, q, q, mask=regard.masks.Causal(), score=rule).shape
    torch.Size([1, 2, 5, 8])

    Source: Nakanishi 2025 (arXiv 2501.19399), equation 2.
    """

    scope: ClassVar[Scope] = "pair"

    a: float | Tensor = 0.43

    def __post_init__(self) -> None:
        if not isinstance(self.a, Tensor):
            check_number("a", self.a, float("-inf"), float("inf"), "a finite number")
        elif not self.a.is_floating_point():
            raise ArgumentTypeError(f"a is {self.a.dtype}; use .float()")
        elif self.a.ndim != 1:
            raise ArgumentError(f"a is {tuple(self.a.shape)}; it must be [H]")

    @property
    def needs_count(self) -> bool:
        """The scores depend on the number of visible keys."""
        return True

    def change_scores(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Return the scores times a ln(n_i)."""
        assert block.key_count is not None, "given because of `needs_count`"
        a = self.a
        if isinstance(a, Tensor):
            a = a.to(s.device, s.dtype)[block.h]
        return s * (a * block.key_count.clamp(min=1).to(s.dtype).log())

    def select_heads(self, heads: slice) -> ScalableSoftmax:
        """Return the rule with the numbers of these heads."""
        return ScalableSoftmax(self.a[heads]) if isinstance(self.a, Tensor) else self

    def _heads(self) -> int | None:
        return len(self.a) if isinstance(self.a, Tensor) else None


def _check_positive(name: str, x: float | None) -> None:
    check_number(name, x, 0, float("inf"), "a number greater than 0")
    if x is None:
        raise ArgumentTypeError(f"{name} is None; it must be a number greater than 0")
