"""The input embedding of a speech encoder: convolutions of log-mel features, and positions."""

from __future__ import annotations

import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_positions
from regard.errors import ArgumentError, ArgumentTypeError
from regard.span import Positions, Span, find_empty_slots


class LogMelEmbedding(nn.Module):
    """The input embedding of Whisper's encoder: two convolutions over time, and positions.

    x = gelu(conv2(gelu(conv1(features)))) + P[position]

    Both convolutions have three columns; the second takes every other frame, so that L frames
    become (L + 1) // 2 states.

    Args:
        positional: a module from positions [B, S] to vectors [B or 1, S, M].

    >>> import torch
    >>> from regard.positions import LearnedPositions
    >>> LogMelEmbedding(80, 8, LearnedPositions(1500, 8))(torch.zeros(1, 80, 9)).shape
    torch.Size([1, 5, 8])

    Source: Radford et al. 2022 (arXiv 2212.04356), section 2.2.
    """

    def __init__(self, bins: int, dim: int, positional: nn.Module) -> None:
        super().__init__()
        self.bins = bins
        self.conv1 = nn.Conv1d(bins, dim, 3, padding=1)
        self.conv2 = nn.Conv1d(dim, dim, 3, stride=2, padding=1)
        self.positional = positional

    @staticmethod
    def states(features: Float[Tensor, "B F L"]) -> int:
        """Return the number of states that become of features [B, F, L]: (L + 1) // 2."""
        return (features.shape[-1] + 1) // 2

    def forward(
        self,
        features: Float[Tensor, "B F L"],
        positions: Positions | None = None,
    ) -> Float[Tensor, "B S M"]:
        """Embed log-mel features as encoder states."""
        if not isinstance(features, Tensor) or not features.is_floating_point():
            got = getattr(features, "dtype", type(features).__name__)
            raise ArgumentTypeError(
                f"features are {got}; they must be floating-point log-mel features "
                "[batch, bins, frames]"
            )
        if features.ndim != 3 or features.shape[1] != self.bins or not features.shape[2]:
            raise ArgumentError(
                f"features are {tuple(features.shape)}; they must be [batch, {self.bins}, frames], "
                "with at least one frame"
            )
        S = self.states(features)
        positions = Span(0, S) if positions is None else positions
        check_positions("positions", positions, features.shape[0], S)
        x = F.gelu(self.conv2(F.gelu(self.conv1(features)))).mT
        if (empty := find_empty_slots(positions, x.device)) is not None:
            x = x.masked_fill(empty[..., None], 0)
        out: Tensor = x + self.positional(positions).to(x)
        return out
