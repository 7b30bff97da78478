"""What all models of a comparison have in common: their sizes, or their number of parameters."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from regard.compare.mechanisms import Contestant, Shape, parameters
from regard.errors import ArgumentError
from regard.models.families.regard import Config

SAME = ("sizes", "parameters")
"""What all have in common: width, depth and feed-forward width; or the number of parameters."""


def same_parameters(config: Config, wanted: int) -> Config:
    """The config with the feed-forward width at which the model has as many parameters as wanted, or as near as may be.

    Args:
        config: a model's.
        wanted: how many parameters.

    Raises:
        ArgumentError: without any feed-forward layer it has too many already; or the nearest is more than 1 % away.

    >>> shape = Shape(dim=64)
    >>> wanted = parameters(Contestant("mha", "gqa", {"groups": 4}).config(shape))
    >>> found = same_parameters(Contestant("mqa", "mqa").config(shape), wanted)
    >>> found.intermediate_size > shape.width, abs(parameters(found) / wanted - 1) < 0.01
    (True, True)
    """
    one, two = (parameters(replace(config, intermediate_size=n)) for n in (1, 2))
    hidden = 1 + round((wanted - one) / (two - one))
    if hidden >= 1:
        found = replace(config, intermediate_size=hidden)
        if abs(parameters(found) - wanted) <= 0.01 * wanted:
            return found
    raise ArgumentError(
        f"{config.attention} has {one:,} parameters with a feed-forward width of 1, and each unit more has {two - one:,}: "
        f"{wanted:,} cannot be met within 1 %; give wider or more layers, or compare at the same sizes"
    )


def configs(found: Sequence[Contestant], shape: Shape, same: str = "sizes") -> dict[str, Config]:
    """The config of each mechanism by its name.

    Args:
        found: the mechanisms; with "parameters", the first is the measure of the others.
        shape: the sizes.
        same: a word of `SAME`.

    Raises:
        ArgumentError: `same` is another word; or as `same_parameters`.

    >>> from regard.compare.mechanisms import contestants
    >>> found = configs(contestants(["mha", "mqa"], Shape(dim=64)), Shape(dim=64))
    >>> [c.intermediate_size for c in found.values()]
    [192, 192]
    """
    if same not in SAME:
        raise ArgumentError(f"same is {same!r}; it must be {' or '.join(SAME)}")
    made = {one.name: one.config(shape) for one in found}
    if same == "sizes":
        return made
    wanted = parameters(next(iter(made.values())))
    return {name: same_parameters(config, wanted) for name, config in made.items()}
