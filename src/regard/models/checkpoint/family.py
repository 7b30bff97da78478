"""`Family`: the builder, the name table and other properties of a model family (`model_type`)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import nn
from torch.overrides import TorchFunctionMode

from regard.configs.base import ModelConfig, Raw
from regard.models.checkpoint.name_tables import NameTable


def tie_absent_head(config: Any, raw: Raw, stored: Collection[str]) -> Any:
    """Tie the head to the embedding if it is not stored, unless config.json says otherwise."""
    if "lm_head.weight" in stored or raw.get("tie_word_embeddings") is False:
        return config
    return replace(config, tie_word_embeddings=True)


def _accept(config: Any) -> None:
    """Accept every config: its class has checked it completely."""


@dataclass(frozen=True)
class Family:
    """A model family: everything about a Hugging Face `model_type` except the parts of its network.

    Attributes:
        config: the config class, with the keys of config.json that change the network.
        build: config -> network with initial weights.
        names: the name table: stored name -> parameter name or `TensorRule`; {} is a layer number.
        complete_config: (config, raw config.json, stored names of the table) -> config with what
            only the stored tensors show, such as a tied head.
        prefixes: prefixes of stored names, such as "transformer.", that are missing where a base
            model was saved without its head.
        head: the stored name of the head's matrix, which a base model may lack; None if it may not.
        buffers: patterns (`re.fullmatch`) of stored tensors that are not weights.
        rename_stored: an older spelling of a stored name -> the spelling of the table.
        keep_float32: patterns (`*`) of parameters that a narrower dtype would damage; they stay in
            float32 or better.
        check: raises for a config that only the parts of the network can refuse, such as numbers of
            a rotary scaling; it is called before weights are read or downloaded.
        architecture: the kind of network: "decoder", "encoder" or "encoder-decoder".
    """

    config: type[ModelConfig]
    build: Callable[[Any], nn.Module]
    names: NameTable
    complete_config: Callable[[Any, Raw, Collection[str]], Any] = tie_absent_head
    prefixes: tuple[str, ...] = ()
    head: str | None = None
    buffers: tuple[str, ...] = ()
    rename_stored: Callable[[str], str] = str
    keep_float32: tuple[str, ...] = ()
    check: Callable[[Any], object] = _accept
    architecture: str = "decoder"

    def build_empty(self, config: ModelConfig) -> nn.Module:
        """Build the network of a config on the device "meta": parameters have sizes and no values.

        Initial values are not drawn, because that would take most of the time: 0.2 of 0.25 seconds
        for 24 layers.

        >>> from regard.models.families import llama
        >>> network = llama.FAMILY.build_empty(llama.Config(9, 8, 8, 1, 2, 1, 4))
        >>> network.head.weight.device.type, tuple(network.head.weight.shape)
        ('meta', (9, 8))
        """
        with torch.device("meta"), _NoInitialValues():
            return self.build(config)

    def dtype_of(self, parameter_name: str, dtype: torch.dtype) -> torch.dtype:
        """Return the dtype of one parameter in a network of this dtype."""
        keeps = any(fnmatchcase(parameter_name, pattern) for pattern in self.keep_float32)
        return torch.promote_types(dtype, torch.float32) if keeps else dtype


class _NoInitialValues(TorchFunctionMode):
    """A context in which the functions of `torch.nn.init` skip tensors on the device "meta"."""

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        keywords = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor = args[0] if args else keywords["tensor"]
            if tensor.is_meta:
                return tensor
        return func(*args, **keywords)
