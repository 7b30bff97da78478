"""Score rules: of single scores, of the number of keys, of whole rows, and of several heads."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

import torch
from torch import Tensor

from regard.argument_checks import check_number
from regard.errors import ArgumentError, ArgumentTypeError
from regard.process_state import drops_conditions, is_compiling
from regard.scores.base import (
    PairRule,
    Scope,
    ScoreBlock,
    ScoreRule,
    Stage,
    along_keys,
    stable_argsort,
)
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
    def by_slot(self) -> bool:  # type: ignore[override]
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

    is_same_for_heads: ClassVar[bool] = True

    cap: float

    def __post_init__(self) -> None:
        _check_positive("cap", self.cap)

    def pair(self, s: Tensor, b: Tensor, h: Tensor, q: Tensor, k: Tensor) -> Tensor:
        """Return c tanh(s / c)."""
        return self.cap * torch.tanh(s / self.cap)


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
    needs_count: ClassVar[bool] = True

    a: float | Tensor = 0.43

    def __post_init__(self) -> None:
        if not isinstance(self.a, Tensor):
            check_number("a", self.a, float("-inf"), float("inf"), "a finite number")
        elif not self.a.is_floating_point():
            raise ArgumentTypeError(f"a is {self.a.dtype}; use .float()")
        elif self.a.ndim != 1:
            raise ArgumentError(f"a is {tuple(self.a.shape)}; it must be [H]")

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


@dataclass(frozen=True, eq=False, repr=False)
class CoPE(ScoreRule):
    """Contextual position encoding: a query counts keys by gates, and adds an embedding.

    g_ij = sigmoid(s_ij),  p_ij = min(sum of g_il over visible keys l from j on, N - 1)
    s'_ij = s_ij + q_i . e[p_ij]

    "From j on" compares positions, then slots. Embeddings are interpolated between integers. The
    scores are those after scale, softcap, bias and earlier rules; the query is not scaled.

    Args:
        embedding: float `[N, D]` or `[H, N, D]`: one vector per number from 0 to N - 1.

    Raises:
        ArgumentError, ArgumentTypeError: the tensor does not fit, also in a call.

    >>> import torch, regard
    >>> q = torch.randn(1, 2, 5, 8)
    >>> rule = regard.scores.CoPE(torch.randn(4, 8))
    >>> regard.attend(q, q, q, mask=regard.masks.Causal(), score=rule).shape
    torch.Size([1, 2, 5, 8])

    Source: Golovneva et al. 2024 (arXiv 2405.18719), equations 3 to 6.
    """

    scope: ClassVar[Scope] = "row"

    embedding: Tensor

    def __post_init__(self) -> None:
        x = self.embedding
        if not isinstance(x, Tensor) or not x.is_floating_point():
            got = x.dtype if isinstance(x, Tensor) else type(x).__name__
            raise ArgumentTypeError(f"embedding is {got}; it must be a float tensor")
        if x.ndim not in (2, 3) or 0 in x.shape:
            raise ArgumentError(f"embedding is {tuple(x.shape)}; it must be [N, D] or [H, N, D]")

    def change_scores(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Add to each score the product of query and embedding."""
        table = self.embedding.to(s.device, s.dtype)
        table = table if table.ndim == 3 else table[None]
        sees_nothing = ~block.visible.any(-1, keepdim=True)  # 0 times a NaN there would be NaN
        query = block.query.to(s.dtype).masked_fill(sees_nothing, 0)
        logits = query @ table.transpose(-1, -2)  # [B,H,t,N]
        order = stable_argsort(block.k)
        gates = torch.where(block.visible, torch.sigmoid(s), 0)
        count = along_keys(gates, order).flip(-1).cumsum(-1).flip(-1)
        number = along_keys(count, stable_argsort(order)).clamp(max=table.shape[1] - 1)
        place = number.detach()
        place = torch.where(place.isnan(), 0, place)  # as an index; `share` keeps the NaN
        low, high = place.floor(), place.ceil()
        share = number - low
        at_low, at_high = (logits.gather(-1, n.long()) for n in (low, high))
        return s + at_low * (1 - share) + at_high * share

    def require(self, H: int, D: int, q_positions: Positions, device: torch.device) -> None:
        """Check the number of heads and the length of the vectors."""
        super().require(H, D, q_positions, device)
        if self.embedding.shape[-1] != D:
            raise ArgumentError(
                f"{self} has vectors of {plural(self.embedding.shape[-1], 'number')}, and those of "
                f"the query have {D}; they are multiplied, so give vectors of {D}"
            )

    def select_heads(self, heads: slice) -> CoPE:
        """Return the rule with the vectors of these heads."""
        return self if self.embedding.ndim == 2 else CoPE(self.embedding[heads])

    def _heads(self) -> int | None:
        return None if self.embedding.ndim == 2 else self.embedding.shape[0]


@dataclass(frozen=True, eq=False, repr=False)
class TopK(ScoreRule):
    """Keep the k largest scores of each row; the softmax runs over these keys only.

    s'_ij = s_ij if s_ij is among the k largest visible scores of row i, else -inf

    Of equal scores, the one with the smaller position is kept.

    Args:
        k: the number of keys to keep, at least 1.

    Raises:
        ArgumentError, ArgumentTypeError: k is not an integer of at least 1.

    >>> import torch, regard
    >>> q = torch.randn(1, 1, 3, 8)
    >>> (regard.attention_weights(q, q, score=regard.scores.TopK(2)) > 0).sum(-1).tolist()
    [[[2, 2, 2]]]

    Source: Zhao et al. 2019 (arXiv 1912.11637), equation 3.
    """

    stages: ClassVar[tuple[Stage, ...]] = ("selection",)
    scope: ClassVar[Scope] = "row"
    is_same_for_heads: ClassVar[bool] = True

    k: int

    def __post_init__(self) -> None:
        if not isinstance(self.k, int) or isinstance(self.k, bool):
            raise ArgumentTypeError(f"k is {type(self.k).__name__}; it must be an integer")
        if self.k < 1:
            raise ArgumentError(f"k is {self.k}; it must be at least 1")

    def change_scores(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Return the scores with -inf in place of those that are not kept."""
        if not drops_conditions() and self.k >= s.shape[-1]:
            return s
        order = stable_argsort(block.k)
        x = along_keys(s.detach().masked_fill(~block.visible, -torch.inf), order)
        largest = stable_argsort(x, descending=True)[..., : self.k]
        # torch.jit.trace cannot write a scatter of the number True
        ones = torch.ones_like(largest, dtype=torch.bool)
        is_largest = torch.zeros_like(x, dtype=torch.bool).scatter(-1, largest, ones)
        return s.masked_fill(~along_keys(is_largest, stable_argsort(order)), -torch.inf)


@dataclass(frozen=True, eq=False, repr=False)
class TalkingHeads(ScoreRule):
    """Talking-heads attention: mixes the heads' scores before the softmax, or weights after it.

    s'_hij = sum_g before[h, g] s_gij,  p = softmax(s'),  p'_hij = sum_g after[h, g] p_gij

    Row h of a matrix gives head h. The sums run over the heads g that may see the key, and a head
    never gets weight on a hidden key. Rows of p' need not sum to 1.

    Args:
        before: float `[H, H]`, or None: scores are not mixed.
        after: float `[H, H]`, or None: weights are not mixed.

    Raises:
        ArgumentError, ArgumentTypeError: both are None, or a matrix does not fit.

    >>> import torch, regard
    >>> q = torch.randn(1, 4, 5, 8)
    >>> rule = regard.scores.TalkingHeads(before=torch.randn(4, 4), after=torch.eye(4))
    >>> regard.attend(q, q, q, score=rule).shape
    torch.Size([1, 4, 5, 8])

    Source: Shazeer et al. 2020 (arXiv 2003.02436), section 3.
    """

    scope: ClassVar[Scope] = "heads"

    before: Tensor | None = None
    after: Tensor | None = None

    def __post_init__(self) -> None:
        if self.before is None and self.after is None:
            raise ArgumentError("TalkingHeads got no matrix; give before, after or both")
        for name, x in (("before", self.before), ("after", self.after)):
            if x is None:
                continue
            if not isinstance(x, Tensor) or not x.is_floating_point():
                got = x.dtype if isinstance(x, Tensor) else type(x).__name__
                raise ArgumentTypeError(f"{name} is {got}; it must be a float tensor [H, H]")
            if x.ndim != 2 or x.shape[0] != x.shape[1]:
                raise ArgumentError(
                    f"{name} is {tuple(x.shape)}; it must be [H, H], a row for each mixed head"
                )
        if self._heads() is None:
            raise ArgumentError(
                f"before is {_sizes(self.before)} and after is {_sizes(self.after)}; both must be "
                "[H, H] for the same H"
            )

    @property
    def stages(self) -> tuple[Stage, ...]:  # type: ignore[override]
        """The scores, the weights, or both."""
        mixed: tuple[tuple[Stage, Tensor | None], ...] = (
            ("scores", self.before),
            ("pattern", self.after),
        )
        return tuple(stage for stage, x in mixed if x is not None)

    def change_scores(self, s: Tensor, block: ScoreBlock) -> Tensor:
        """Mix the scores of the heads that may see the key."""
        if self.before is None:
            return s
        return _mix(self.before, torch.where(block.visible, s, 0))

    def change_pattern(self, p: Tensor, block: ScoreBlock) -> Tensor:
        """Mix the weights of the heads."""
        return p if self.after is None else _mix(self.after, p)

    def _heads(self) -> int | None:
        # int: while torch.jit traces, sizes are tensors, of which no two are the same in a set
        sizes = {int(x.shape[0]) for x in (self.before, self.after) if x is not None}
        return sizes.pop() if len(sizes) == 1 else None

    def __str__(self) -> str:
        names = [name for name in ("before", "after") if getattr(self, name) is not None]
        return f"talkingheads({plural(self._heads() or 0, 'head')}, {' and '.join(names)})"


def _mix(matrix: Tensor, x: Tensor) -> Tensor:
    """Return sum_g matrix[h, g] x[:, g] for x `[B, H, t, s]`."""
    mixed: Tensor = torch.einsum("hg,bgts->bhts", matrix.to(x.device, x.dtype), x)
    return mixed


def _sizes(x: Tensor | None) -> str:
    return "None" if x is None else "x".join(map(str, x.shape))
