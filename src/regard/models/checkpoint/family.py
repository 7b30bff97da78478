"""What a model family says about itself: its config, its builder and its names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from regard.errors import ArgumentError
from regard.models.checkpoint.names import Names

Raw: TypeAlias = Mapping[str, Any]
"""A config.json as it was parsed."""


def untouched(raw: Raw) -> dict[str, Any]:
    """A config that needs no other spelling."""
    return dict(raw)


def tie_absent_head(config: Any, raw: Raw, stored: Collection[str]) -> Any:
    """A head that is not stored is the embedding, unless config.json says that it is not."""
    if "lm_head.weight" in stored or raw.get("tie_word_embeddings") is False:
        return config
    return replace(config, tie_word_embeddings=True)


@dataclass(frozen=True)
class Family:
    """One `model_type` of Hugging Face: everything about it that is not in the parts of its model.

    Attributes:
        config: a frozen dataclass with the keys of config.json that shape the model.
        build: config -> model, with fresh weights.
        names: the name table: name in a checkpoint -> name here, or a `Rule`; {} is a layer's number.
        ignored: keys of config.json that do not shape the computation, beside those of every family.
        fixed: keys that are understood with these values only.
        plain: raw config.json -> the same with the config's own keys: older and newer spellings, and defaults that
            depend on other keys. It raises `ArgumentError` for contradictions.
        settle: (config, raw, names stored) -> config: what only the stored tensors tell, such as a tied head.
        prefixes: what may stand in front of all names, or be missing there: "transformer.".
        buffers: patterns (`re.fullmatch`) of stored tensors that are no weights.
        respell: a stored name -> the one of the table, for older spellings.
        exact: patterns (`*`) of parameters here that a narrower dtype would spoil: they stay in float32 or better.
        text: what a user holds: "decoder", "encoder" or "encoder-decoder".
    """

    config: type[Any]
    build: Callable[[Any], nn.Module]
    names: Names
    ignored: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    plain: Callable[[Raw], dict[str, Any]] = untouched
    settle: Callable[[Any, Raw, Collection[str]], Any] = tie_absent_head
    prefixes: tuple[str, ...] = ()
    buffers: tuple[str, ...] = ()
    respell: Callable[[str], str] = str
    exact: tuple[str, ...] = ()
    text: str = "decoder"

    def dtype_of(self, ours: str, dtype: torch.dtype) -> torch.dtype:
        """The dtype of one parameter in a model of this dtype."""
        stays = any(fnmatchcase(ours, pattern) for pattern in self.exact)
        return torch.promote_types(dtype, torch.float32) if stays else dtype


def check_sizes(config: Any, *, zero: Collection[str] = ()) -> None:
    """Every whole number of a config is at least 1, or 0 where it may be.

    Raises:
        ArgumentError: one is not.
    """
    for name, value in vars(config).items():
        least = 0 if name in zero else 1
        if isinstance(value, int) and not isinstance(value, bool) and value < least:
            raise ArgumentError(f"{name} is {value}; it must be at least {least}")


def check_code(raw: Raw, prefix: str) -> None:
    """An `auto_map` names the code that a family was made from, and no other: published files still carry it.

    Nothing of it is run. The family lists `auto_map` among its ignored keys.

    Args:
        raw: the config.json.
        prefix: what the names of that code's classes begin with.

    Raises:
        ArgumentError: a class has another name.

    >>> check_code({"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}}, "Phi3")
    """
    said = raw.get("auto_map")
    for name in said.values() if isinstance(said, Mapping) else [] if said is None else [said]:
        if not str(name).rpartition(".")[2].startswith(prefix):
            raise ArgumentError(
                f"auto_map names {name!r}, which is not the published code of {raw.get('model_type')} and is never run; "
                "use a checkpoint of the family's own code"
            )
