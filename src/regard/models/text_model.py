"""The base class of `Model`, `TextEncoder` and `Seq2Seq`: tokenizer, device, dtype, saving."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Any, Self, overload

import torch
from jaxtyping import Int
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.models.checkpoint.tensors import Conversion
from regard.models.save import save_model, write_files
from regard.models.tokenizer import Tokenizer
from regard.nn.weights import device_of, stored_modules
from regard.span import Positions, as_tensor
from regard.tracing import list_taps


class TextModel:
    """A network with its config, and with its tokenizer if there is one.

    `Model`, `TextEncoder` and `Seq2Seq` derive from it. All three are callable, and all three have
    `forward`, `encode`, `decode`, `device`, `dtype` and `save`.

    Args:
    Attributes:
        newly_initialized: names of weights that the checkpoint lacked and was allowed to lack. They
            have random values and are not trained.
        ignored: keys of config.json, tensors and files that the checkpoint has and that were not
            used; see `regard.load`.
        converted: how many quantized matrices of the checkpoint became plain numbers, with their
            bytes before and after; None if none did.
    """

    converted: Conversion | None = None

    def __init__(
        self,
        network: nn.Module,
        tokenizer: Tokenizer | None,
        config: Any,
        newly_initialized: Collection[str] = (),
        ignored: Collection[str] = (),
    ) -> None:
        self._network, self._tokenizer, self.config = network, tokenizer, config
        self.newly_initialized, self.ignored = tuple(newly_initialized), tuple(ignored)

    def __repr__(self) -> str:
        kind = next(iter(getattr(type(self.config), "model_types", ())), type(self.config).__name__)
        dtype = str(self.dtype).removeprefix("torch.")
        return f"{type(self).__name__}({kind}, {dtype}, {self.device})"

    @property
    def device(self) -> torch.device:
        """The device of the network's weights; `encode` creates ids there."""
        return device_of(self._network)

    def to(self, device: torch.device | str) -> Self:
        """Move the weights to a device, and return the model itself; `forward`, generation and
        recordings then compute there.
        """
        self._network.to(device)
        return self

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the network's weights, which is that of its first floating-point weight; for
        weights that are stored in fewer bits, the dtype in which they are multiplied.
        """
        for _, record in stored_modules(self._network):
            return record.dtype
        floats = (p.dtype for p in self._network.parameters() if p.is_floating_point())
        return next(floats, torch.get_default_dtype())

    @property
    def has_tokenizer(self) -> bool:
        """Whether the model has a tokenizer, so that it accepts texts."""
        return self._tokenizer is not None

    @property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer, which converts text to ids and ids to text."""
        if self._tokenizer is None:
            raise FileError(
                "this model has no tokenizer: its folder holds no tokenizer.json; give ids instead "
                "of texts, or add the file (transformers converts a tokenizer.model or vocab.txt: "
                "save_pretrained of a fast tokenizer)"
            )
        return self._tokenizer

    @overload
    def decode(
        self, ids: Sequence[int], *, skip_special_tokens: bool = ..., positions: None = ...
    ) -> str: ...

    @overload
    def decode(
        self,
        ids: Int[Tensor, " T"] | Int[Tensor, "B T"],
        *,
        skip_special_tokens: bool = ...,
        positions: Positions | None = ...,
    ) -> str | list[str]: ...

    def decode(
        self,
        ids: Sequence[int] | Tensor,
        *,
        skip_special_tokens: bool = False,
        positions: Positions | None = None,
    ) -> str | list[str]:
        """Convert token ids to text."""
        tokenizer = self.tokenizer
        if not isinstance(ids, Tensor):
            return tokenizer.decode(ids, skip_special=skip_special_tokens)
        if ids.ndim not in (1, 2):
            raise ArgumentError(f"ids are {tuple(ids.shape)}; they must be [T] or [batch, T]")
        batch = ids if ids.ndim == 2 else ids[None]
        is_token = torch.ones(batch.shape, dtype=torch.bool, device="cpu")
        if positions is not None:
            is_token = (as_tensor(positions, torch.device("cpu")) >= 0).expand(batch.shape)
        texts = [
            tokenizer.decode(row[mask].tolist(), skip_special=skip_special_tokens)
            for row, mask in zip(batch.cpu(), is_token, strict=True)
        ]
        return texts if ids.ndim == 2 else texts[0]

    def save(self, folder: str | Path) -> Path:
        """Write a complete folder, or none, that `regard.load` and transformers read."""
        return save_model(
            self._network,
            self.config,
            Path(folder),
            dtype=self.dtype,
            tokenizer=self._tokenizer,
            files=self._files(),
        )

    def write_text_files(self, folder: Path) -> None:
        """Write what `save` writes beside weights and config into a folder that exists."""
        write_files(folder, self._tokenizer, self._files())

    def taps(self, *, patterns: bool = True) -> tuple[str, ...]:
        """List the taps of the model for `regard.Trace`, by a run on two tokens."""
        return list_taps(self._example_run(), patterns=patterns)

    def _example_run(self) -> Callable[[], object]:
        """Return a function that runs the network on two tokens."""
        raise ArgumentTypeError(
            f"a {type(self).__name__} has no run; use Model, TextEncoder, Seq2Seq"
        )

    def _files(self) -> Mapping[str, object]:
        """Return the contents of further JSON files to save: path in the folder to content."""
        return {}


def as_text_list(texts: str | Sequence[str], name: str = "texts") -> list[str]:
    """Return one text, or several, as a list."""
    text_list = [texts] if isinstance(texts, str) else list(texts)
    if not text_list:
        raise ArgumentError(f"{name} is empty; give at least one text")
    for i, text in enumerate(text_list):
        if not isinstance(text, str):
            raise ArgumentTypeError(f"{name}[{i}] is {type(text).__name__}; it must be str")
    return text_list


def pad_right(
    rows: Sequence[Sequence[int]], device: torch.device | None = None
) -> tuple[Int[Tensor, "B S"], Int[Tensor, "B S"]]:
    """Stack rows of different length into one tensor, with zeros after the shorter ones."""
    longest = max(map(len, rows))
    sizes = torch.tensor([len(row) for row in rows], device=device)[:, None]
    padded = [[*row, *[0] * (longest - len(row))] for row in rows]
    ids = torch.tensor(padded, dtype=torch.int64, device=device)
    slots = torch.arange(longest, device=device)[None]
    return ids, slots.where(slots < sizes, -1)
