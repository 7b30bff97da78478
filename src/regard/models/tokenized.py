"""What the models that read whole texts share: a tokenizer that may be absent, and rows of ids of
different length.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.models.tokenizer import Tokenizer


class Tokenized:
    """A network, its config, and a tokenizer that is refused by name where it is missing.

    Attributes:
        config: the frozen config of its family.
        fresh: stored names that were missing, and allowed to be: such weights are not trained.
        ignored: what the folder holds and nobody looked at: keys of config.json, tensors, files;
            see `regard.load`.

    >>> Tokenized(nn.Identity(), None, config=None).tokenizer
    Traceback (most recent call last):
    regard.errors.FileError: this model has no tokenizer: its folder holds no
    tokenizer.json; give ids instead of texts
    """

    def __init__(
        self,
        network: nn.Module,
        tokenizer: Tokenizer | None,
        config: Any,
        fresh: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> None:
        self._network, self._tokenizer = network, tokenizer
        self.config, self.fresh, self.ignored = config, tuple(fresh), tuple(ignored)

    @property
    def device(self) -> torch.device:
        """Where the network is; ids of texts are made there."""
        parameter = next(self._network.parameters(), None)
        return torch.device("cpu") if parameter is None else parameter.device

    @property
    def tokenizer(self) -> Tokenizer:
        """Text <-> ids.

        Raises:
            FileError: the folder had no tokenizer.json.
        """
        if self._tokenizer is None:
            raise FileError(
                "this model has no tokenizer: its folder holds no tokenizer.json; give ids "
                "instead of texts"
            )
        return self._tokenizer


def several(texts: str | Sequence[str], what: str = "texts") -> list[str]:
    """One text, or several, as a list.

    Raises:
        ArgumentError: there is none.
        ArgumentTypeError: one is no str.

    >>> several("one"), several(["one", "two"])
    (['one'], ['one', 'two'])
    """
    found = [texts] if isinstance(texts, str) else list(texts)
    if not found:
        raise ArgumentError(f"{what} is empty; give at least one text")
    for i, text in enumerate(found):
        if not isinstance(text, str):
            raise ArgumentTypeError(f"{what}[{i}] is {type(text).__name__}; it must be str")
    return found


def beside(
    rows: Sequence[Sequence[int]], device: torch.device | None = None
) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B S"]]:
    """Rows of numbers as one tensor, 0 behind the shorter ones; and the positions, which are -1
    there.

    >>> beside([[5, 6, 7], [8]])[0].tolist(), beside([[5, 6, 7], [8]])[1].tolist()
    ([[5, 6, 7], [8, 0, 0]], [[0, 1, 2], [0, -1, -1]])
    """
    longest = max(map(len, rows))
    sizes = torch.tensor([len(row) for row in rows], device=device)[:, None]
    padded = [[*row, *[0] * (longest - len(row))] for row in rows]
    ids = torch.tensor(padded, dtype=torch.int64, device=device)
    slots = torch.arange(longest, device=device)[None]
    return ids, slots.where(slots < sizes, -1)
