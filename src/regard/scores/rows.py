"""Score rules that read whole rows, or several heads: CoPE, top-k, talking heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.process_state import drops_conditions
from regard.scores.base import Scope, ScoreBlock, ScoreRule, Stage, along_keys, stable_argsort
from regard.span import Positions
from regard.units import plural


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

    def select_heads(self, heads: slice) -> TopK:
        """Return the same rule, which is the same for every head."""
        return self


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
