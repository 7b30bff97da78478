"""Feature maps phi of linear attention, which replaces exp(q . k) by phi(q) . phi(k)."""

from __future__ import annotations

from collections.abc import Callable
from typing import TypeAlias

from jaxtyping import Float
from torch import Tensor, where

from regard.errors import ArgumentError, ArgumentTypeError
from regard.ops.memory.compressive import elu_plus_one

FeatureMap: TypeAlias = str | Callable[[Tensor], Tensor]
"""The name of a feature map in `FEATURE_MAPS`, or a function `[B, n, T, D]` -> `[B, n, T, F]`
that maps each token separately.
"""


def identity(x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L D"]:
    """Return x itself; with negative features the sum of the weights may be 0."""
    return x


def relu(x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L D"]:
    """Return the elementwise maximum of x and 0."""
    return x.relu()


def squared_relu(x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L D"]:
    """Return the square of max(x, 0) elementwise."""
    return x.relu().square()


def exponential(x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L D"]:
    """Return exp(x) elementwise; in fp32 it is infinite for x above 88."""
    return x.exp()


def softmax(x: Float[Tensor, "*L D"]) -> Float[Tensor, "*L D"]:
    """Return exp(x_d) / sum_d exp(x_d), over the channels of one token."""
    return x.softmax(-1)


FEATURE_MAPS: dict[str, Callable[[Tensor], Tensor]] = {
    "elu+1": elu_plus_one,
    "exp": exponential,
    "identity": identity,
    "relu": relu,
    "relu^2": squared_relu,
    "softmax": softmax,
}
"""The feature maps by name. Sources: elu+1 Katharopoulos et al. 2020 (arXiv 2006.16236),
equation 7; relu Choromanski et al. 2021 (arXiv 2009.14794), section 2.4; softmax Zhang et
al. 2024 (arXiv 2402.04347), section 4.1; the others are common practice.
"""


def feature_map_of(feature_map: FeatureMap) -> Callable[[Tensor], Tensor]:
    """Return the feature map of a name, or the given function itself.

    Raises:
        ArgumentError, ArgumentTypeError: no feature map has this name, or the argument is neither a
            name nor a function.

    >>> import torch
    >>> feature_map_of("relu")(torch.tensor([-1.0, 2.0])).tolist()
    [0.0, 2.0]
    """
    if isinstance(feature_map, str):
        if feature_map not in FEATURE_MAPS:
            known = ", ".join(FEATURE_MAPS)
            raise ArgumentError(
                f"feature_map is {feature_map!r}; it must be one of {known}, or a function of a "
                "tensor"
            )
        return FEATURE_MAPS[feature_map]
    if not callable(feature_map):
        raise ArgumentTypeError(
            f"feature_map is {type(feature_map).__name__}; it must be a name "
            f"({', '.join(FEATURE_MAPS)}) or a function"
        )
    return feature_map


def normalised_query_features(
    feature_map: FeatureMap, q: Float[Tensor, "*L D"]
) -> Float[Tensor, "*L F"]:
    """Return the features of queries for normalised linear attention; those of "exp" and "elu+1"
    are divided by a factor per query, so that they neither underflow nor overflow.

    The normalised output does not depend on these factors, because numerator and denominator
    contain the same factor.

    >>> import torch
    >>> normalised_query_features("exp", torch.tensor([-1000.0, -1001.0])).tolist()
    [1.0, 0.3678794503211975]
    """
    if feature_map == "exp":
        return (q - q.detach().amax(-1, keepdim=True)).exp()
    if feature_map == "elu+1":
        maximum = q.detach().amax(-1, keepdim=True).clamp(max=0)
        return where(q > 0, q + 1, (q.clamp(max=0) - maximum).exp())
    return feature_map_of(feature_map)(q)
