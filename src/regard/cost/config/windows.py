"""Which layers look through a sliding window: the keys of config.json that say so, without torch.

`regard.models.assembly.layer_types` also refuses keys that contradict one another; here the one that wins is read.
"""

from __future__ import annotations

from regard.cost.config.keys import Keys
from regard.errors import ArgumentError
from regard.foreign import shown

SLIDING = "sliding_attention"
KINDS = ("full_attention", SLIDING)


def windows(
    keys: Keys, layers: int, width: int | None, *, pattern: int | None = None, first: int = 0
) -> tuple[int | None, ...]:
    """The window of each layer, or None: by layer_types; else every layer but each `pattern`-th; else from `first` on.

    Raises:
        ArgumentError: layer_types has another length, or a kind that is not known.

    >>> windows(Keys({}, "config.json"), 4, 512, pattern=2)
    (512, None, 512, None)
    """
    kinds = keys.get("layer_types")
    if kinds is not None and not isinstance(kinds, list):
        raise ArgumentError(f"{keys.where}: layer_types is {shown(kinds)}; it must be a list")
    if kinds is not None:
        if len(kinds) != layers:
            raise ArgumentError(
                f"{keys.where}: layer_types has {len(kinds)} entries for {layers} layers"
            )
        for kind in kinds:
            if kind not in KINDS:
                raise ArgumentError(
                    f"{keys.where}: layer_types has {shown(kind)}; known are {' and '.join(KINDS)}"
                )
        if SLIDING in kinds and width is None:
            raise ArgumentError(
                f"{keys.where}: layer_types has {SLIDING!r}, and sliding_window is null"
            )
        return tuple(width if kind == SLIDING else None for kind in kinds)
    if pattern is not None:
        return tuple(width if (i + 1) % pattern else None for i in range(layers))
    return tuple(width if i >= first else None for i in range(layers))
