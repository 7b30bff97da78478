"""Rules that read the whole row of a query: `CoPE` and `TopK`."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.process_state import drops_conditions
from regard.scores.base import (
    Scope,
    ScoreBlock,
    ScoreRule,
    Stage,
    along_keys,
    stable_argsort,
)
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
