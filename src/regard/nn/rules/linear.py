"""Linear attention, retention and gated linear attention as parts of a module."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.arguments import check_number
from regard.caches import Parts
from regard.cost.recurrent import LinearSpec
from regard.cost.spec import HeadShape, Weights
from regard.errors import ArgumentError
from regard.ops.linear import gated_linear, linear_attention, retention
from regard.ops.linear.features import FeatureMap, feature_map_of
from regard.span import Positions


class Features(nn.Module):
    """Linear attention by a feature map, with its normaliser or without.

    Args:
        feature_map: a name in `regard.linear.FEATURE_MAPS`, or a function or module that keeps the
            shape.
        normalise: whether the weights are divided by their sum.
        scale: on the queries, without `normalise`.

    Raises:
        ArgumentError, ArgumentTypeError: the feature map is not known, or scale is not a finite
            number.

    >>> x = torch.ones(1, 1, 3, 2)
    >>> Features()(x[0], x, x, x, None, None, "auto")[0].flatten().tolist()
    [1.0, 1.0, 1.0, 1.0, 1.0, 1.0]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), section 3.4.
    """

    def __init__(
        self, feature_map: FeatureMap = "elu+1", *, normalise: bool = True, scale: float = 1.0
    ) -> None:
        super().__init__()
        feature_map_of(feature_map)
        check_number("scale", scale, float("-inf"), float("inf"), "finite")
        self.feature_map, self.normalise, self.scale = feature_map, normalise, scale

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B G T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B H T E"], Parts]:
        """What the queries read, and the state (S, z), or (S,) without a normaliser, behind the
        last token.
        """
        return linear_attention(
            q,
            k,
            v,
            feature_map=self.feature_map,
            normalise=self.normalise,
            scale=self.scale,
            state=state,
            k_positions=positions,
            form=form,
        )

    def spec(self, weights: Weights, shape: HeadShape) -> LinearSpec:
        """The cost of a layer with this rule."""
        return LinearSpec(weights, (), shape, normalised=self.normalise)

    def extra_repr(self) -> str:
        """The feature map, and whether it is normalised."""
        name = self.feature_map if isinstance(self.feature_map, str) else "a function"
        return f"{name}, normalise={self.normalise}"


class Retention(nn.Module):
    """Retention: each key/value head forgets at its own fixed rate.

    Args:
        groups: the key/value heads G.
        decay: gamma, one per head, from 0 to 1; None is 1 - 2^(-5-g).

    Raises:
        ArgumentError: groups is less than 1, or decay is not G numbers from 0 to 1.

    >>> x = torch.ones(1, 1, 3, 1)
    >>> Retention(1, [0.5])(x[0], x, x, x, None, None, "auto")[0].flatten().tolist()
    [1.0, 1.5, 1.75]

    Source: Sun et al. 2023 (arXiv 2307.08621), equations 6 and 8.
    """

    def __init__(self, groups: int, decay: Sequence[float] | None = None) -> None:
        super().__init__()
        if groups < 1:
            raise ArgumentError(f"Retention(groups={groups}): groups must be at least 1")
        if decay is not None:
            if len(decay) != groups:
                raise ArgumentError(
                    f"decay has {len(decay)} numbers for {groups} key/value heads; give one per "
                    "head, or None"
                )
            for g, gamma in enumerate(decay):
                if not 0 <= gamma <= 1:
                    raise ArgumentError(
                        f"decay of head {g} is {gamma}; it must be from 0, which keeps nothing, "
                        "to 1, which keeps all"
                    )
        self.decay = None if decay is None else tuple(float(gamma) for gamma in decay)

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B G T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B H T E"], Parts]:
        """What the queries read, and the state (S,) behind the last token."""
        decay = None
        if self.decay is not None:
            decay = torch.tensor(self.decay, dtype=torch.float64, device=k.device)
        return retention(q, k, v, decay=decay, state=state, k_positions=positions, form=form)

    def spec(self, weights: Weights, shape: HeadShape) -> LinearSpec:
        """The cost of a layer with this rule."""
        return LinearSpec(weights, (), shape, "retention", decayed=True)

    def extra_repr(self) -> str:
        """The decays, where they are not the paper's."""
        return "" if self.decay is None else f"decay={list(self.decay)}"


class Gated(nn.Module):
    """Gated linear attention: each token decays the state, channel by channel, by a gate of low
    rank.

    g = log sigmoid(W_2 W_1 x + b) / temperature, in fp32 or better

    Args:
        dim: the model dim M.
        groups, head_dim: G and D, whose product is the number of gates.
        rank: of the map from M to G D.
        temperature: tau: a large one keeps gates near 1, and so memory long.

    Raises:
        ArgumentError, ArgumentTypeError: a size is less than 1, or temperature is not above 0.

    >>> rule = Gated(8, 2, 3)
    >>> rule.log_decay(torch.zeros(1, 5, 8)).shape
    torch.Size([1, 2, 5, 3])

    Source: Yang et al. 2023 (arXiv 2312.06635), section 4.4.
    """

    def __init__(
        self, dim: int, groups: int, head_dim: int, *, rank: int = 16, temperature: float = 16.0
    ) -> None:
        super().__init__()
        if min(dim, groups, head_dim, rank) < 1:
            raise ArgumentError(
                f"Gated(dim={dim}, groups={groups}, head_dim={head_dim}, rank={rank}): each must "
                "be at least 1"
            )
        check_number("temperature", temperature, 0, float("inf"), "greater than 0")
        self.down = nn.Linear(dim, rank, bias=False)
        self.up = nn.Linear(rank, groups * head_dim)
        self.groups, self.temperature = groups, temperature

    def log_decay(self, x: Float[Tensor, "B T M"]) -> Float[Tensor, "B G T D"]:
        """The logarithms of the gates of tokens x, at most 0."""
        gates = self.up(self.down(x)).unflatten(-1, (self.groups, -1)).transpose(1, 2)
        wide = gates if gates.dtype == torch.float64 else gates.float()
        return F.logsigmoid(wide) / self.temperature

    def forward(
        self,
        x: Float[Tensor, "B T M"],
        q: Float[Tensor, "B H T D"],
        k: Float[Tensor, "B G T D"],
        v: Float[Tensor, "B G T E"],
        state: Parts | None,
        positions: Positions | None,
        form: str,
    ) -> tuple[Float[Tensor, "B H T E"], Parts]:
        """What the queries of tokens x read, and the state (S,) behind the last one."""
        g = self.log_decay(x)
        return gated_linear(q, k, v, g, state=state, k_positions=positions, form=form)

    def spec(self, weights: Weights, shape: HeadShape) -> LinearSpec:
        """The cost of a layer with this rule."""
        return LinearSpec(weights, (), shape, "gated linear attention", decayed=True)

    def extra_repr(self) -> str:
        """The temperature."""
        return f"temperature={self.temperature}"
