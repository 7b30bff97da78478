"""Values carried over from the first layer: a projection whose values are a mix of its own and of
those that the first layer of the decoder computed for the same tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from regard.argument_checks import check_number
from regard.caches import Parts
from regard.caches.cross_layer import FirstValues
from regard.errors import ArgumentError
from regard.nn.explainable import InputSteps, MechanismStep, ProjectionQuery
from regard.nn.projections import HeadProjection, SeparateQKV
from regard.span import Positions


def require_first(first: FirstValues | None) -> FirstValues:
    """Return the values of the first layer that came with a call.

    >>> require_first(FirstValues()).values is None
    True
    """
    if first is None:
        raise ArgumentError(
            "a layer mixes its values with those of the first layer, and was called without them; "
            "call a Decoder, which passes them from layer to layer, or give the layer a "
            "regard.caches.cross_layer.WithFirstValues"
        )
    return first


class ValueResidualQKV(SeparateQKV):
    """A projection whose values are mixed with those of the first layer.

    v = s W_v x + (1 - s) v_1, with a learned s, and v_1 the values of the first layer; the first
    layer itself has v = W_v x

    A cache stores the mixed values, so that no layer needs earlier values of another.

    >>> q, k, v = (HeadProjection(8, heads, 2) for heads in (4, 2, 2))
    >>> project, first = ValueResidualQKV(q, k, v, is_first=False), FirstValues()
    >>> first.give(torch.ones(1, 2, 3, 2))
    >>> project.remember_carried(torch.zeros(1, 3, 8), None, first)[1].unique().tolist()
    [0.5]

    Source: Zhou et al. 2024 (arXiv 2410.17897), section 3.
    """

    def __init__(
        self,
        q: HeadProjection,
        k: HeadProjection,
        v: HeadProjection,
        *,
        is_first: bool,
        share: float = 0.5,
    ) -> None:
        super().__init__(q, k, v)
        check_number("share", share, float("-inf"), float("inf"), "finite")
        self.share = None if is_first else nn.Parameter(torch.tensor([float(share)]))

    def remember(self, x: Tensor, positions: Positions | None) -> Parts:
        """Return the keys and the values of the first layer; a later layer needs its values."""
        if self.share is not None:
            require_first(None)
        return super().remember(x, positions)

    @property
    def carries_values(self) -> bool:
        """True: the first layer gives its values, and the others read them."""
        return True

    def remember_carried(self, x: Tensor, positions: Positions | None, first: FirstValues) -> Parts:
        """Return the keys [B,G,S,D] and the mixed values [B,G,S,E]; the first layer gives its
        values to `first`.
        """
        k, v = super().remember(x, positions)
        if self.share is None:
            first.give(v)
            return k, v
        return k, self._mix(v, first)

    def _mix(self, v: Tensor, first: FirstValues) -> Tensor:
        """Return s v + (1 - s) v_1 for values v [B,G,S,E]."""
        assert self.share is not None, "a later layer has a share"
        share = self.share.to(v.dtype)
        return share * v + (1 - share) * first.take(self.v.heads, self.v.head_dim)

    def explain_inputs(self, query: ProjectionQuery) -> InputSteps:
        """Return the steps of queries, keys and values, with the mix as the last one of values."""
        steps = super().explain_inputs(query)
        if self.share is None:
            return steps
        v = self._mix(steps.v[-1].values[None], FirstValues(query.first_values))[0]
        equation = f"v_j ← {self.share.item():.3g} v_j + {1 - self.share.item():.3g} v1_j"
        return steps._replace(
            v=(*steps.v, MechanismStep("mixed with the first layer", equation, v))
        )

    def extra_repr(self) -> str:
        """Return whether this is the first layer."""
        return f"is_first={self.share is None}"
