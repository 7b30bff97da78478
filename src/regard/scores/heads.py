"""`TalkingHeads`: heads whose scores, or whose weights, are mixed with those of the other heads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError
from regard.scores.base import Scope, ScoreBlock, ScoreRule, Stage
from regard.units import plural


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
