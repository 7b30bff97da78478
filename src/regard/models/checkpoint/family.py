"""What a model family says about itself: its config, its builder and its names."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from typing import Any, TypeAlias

import torch
from torch import nn

from regard.errors import ArgumentError
from regard.foreign import shown
from regard.models.checkpoint.names import Names

Raw: TypeAlias = Mapping[str, Any]
"""A config.json as it was parsed."""


class UnknownKey(ArgumentError):
    """A key of config.json that its family does not know: the one kind of key that a caller may
    have passed over.

    Attributes:
        path: the key, behind those of the objects that it stands in.

    >>> raise UnknownKey(("rope_scaling", "fator"), "rope_scaling has the unknown key 'fator'")
    Traceback (most recent call last):
    regard.models.checkpoint.family.UnknownKey: rope_scaling has the unknown key 'fator'. If it changes nothing that is \
computed, pass it over: regard.load(folder, ignore=('rope_scaling.fator',)), or --ignore 'rope_scaling.fator'
    """

    def __init__(self, path: tuple[str, ...], reason: str) -> None:
        self.path = path
        name = shown(self.key)
        super().__init__(
            f"{reason}{'' if reason.endswith('?') else '.'} If it changes nothing that is "
            "computed, pass it over: "
            f"regard.load(folder, ignore=({name},)), or --ignore {name}"
        )

    @property
    def key(self) -> str:
        """The path with dots, as `ignore` names it."""
        return ".".join(self.path)


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
        names: the name table: name in a checkpoint -> name here, or a `Rule`; {} is a layer's
            number.
        ignored: keys of config.json that do not shape the computation, beside those of every
            family.
        fixed: keys that are understood with these values only.
        code: what the class names of the family's published code begin with: an `auto_map` that
            names only such classes asks for what is computed here anyway. Nothing of it is run.
        plain: raw config.json -> the same with the config's own keys: older and newer spellings,
            and defaults that depend on other keys. It raises `ArgumentError` for contradictions.
        settle: (config, raw, names of the table that are stored) -> config: what only the stored
            tensors tell, such as a tied head.
        prefixes: what stands in front of the names of a model with a head, and is missing where the
            base model alone was saved: "transformer.".
        head: the name of the head's matrix, without which a base model gives states and no logits;
            None where the head is no part of what may be missing.
        buffers: patterns (`re.fullmatch`) of stored tensors that are no weights.
        respell: a stored name -> the one of the table, for older spellings.
        exact: patterns (`*`) of parameters here that a narrower dtype would spoil: they stay in
            float32 or better.
        text: what a user holds: "decoder", "encoder" or "encoder-decoder".
    """

    config: type[Any]
    build: Callable[[Any], nn.Module]
    names: Names
    ignored: frozenset[str] = frozenset()
    fixed: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    code: str | None = None
    plain: Callable[[Raw], dict[str, Any]] = untouched
    settle: Callable[[Any, Raw, Collection[str]], Any] = tie_absent_head
    prefixes: tuple[str, ...] = ()
    head: str | None = None
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


PREPARES_INPUTS = frozenset(
    {
        "AutoFeatureExtractor",
        "AutoImageProcessor",
        "AutoProcessor",
        "AutoTokenizer",
        "AutoVideoProcessor",
    }
)
"""Entries of an `auto_map` that name no network: they make ids or pixels, before anything here is
computed.
"""


def check_code(family: Family, raw: Raw) -> None:
    """An `auto_map` may name tokenizers, and the published code that the family was made from;
    nothing of it is run.

    Args:
        family: with the beginning of its classes' names.
        raw: the config.json.

    Raises:
        UnknownKey: it names another class for the network, which may compute something else than
            the family does.

    >>> phi = Family(object, lambda _: nn.Identity(), {}, code="Phi3")
    >>> check_code(phi, {"auto_map": {"AutoConfig": "configuration_phi3.Phi3Config"}})
    >>> check_code(phi, {"auto_map": {"AutoTokenizer": ["mine.Tokenizer", None]}})
    """
    said = raw.get("auto_map")
    if said is None:
        return
    named = said if isinstance(said, Mapping) else {"": said}
    for role, name in named.items():
        if role in PREPARES_INPUTS:
            continue
        if family.code is None:
            raise UnknownKey(
                ("auto_map",),
                "auto_map asks for code that comes with the checkpoint, which is never run and "
                "may compute something "
                "else; use a checkpoint of the family's own code",
            )
        if not str(name).rpartition(".")[2].startswith(family.code):
            raise UnknownKey(
                ("auto_map",),
                f"auto_map names {shown(str(name))}, which is not the published code of "
                f"{raw.get('model_type')} and is never "
                "run; use a checkpoint of the family's own code",
            )
