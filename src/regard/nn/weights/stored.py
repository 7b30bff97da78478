"""Modules whose weight is stored in fewer bits: linear maps, heads and embeddings.

`store_weight(module, record)` replaces the parameter `weight`; reading `module.weight` dequantizes
the matrix, and `state_dict` names what is stored.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn

from regard.errors import ArgumentError, ArgumentTypeError
from regard.freed_memory import give_back_freed_memory
from regard.huge_pages import HUGE_PAGE, HugePageBlock, aligned_bytes
from regard.nn.weights.linear import Linear
from regard.ops.stored_weights import StoredWeight


class StoredWeightMixin(nn.Module):
    """The part of a module that replaces its parameter `weight` by a `StoredWeight`."""

    stored_weight: StoredWeight

    @property
    def weight(self) -> Tensor:
        """The weight [N, M], dequantized each time it is read, in the dtype of the computation."""
        return self.stored_weight.dequantize()

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Any:  # noqa: FBT001, FBT002
        """Move the record to the device and dtype of `fn`; what is stored keeps its dtypes."""
        stored = self.stored_weight
        probe = fn(torch.empty(0, dtype=stored.dtype, device=stored.device))
        self.stored_weight = stored.to(probe.device, probe.dtype)
        return super()._apply(fn, recurse)  # type: ignore[no-untyped-call]

    def _save_to_state_dict(
        self,
        destination: dict[str, Any],
        prefix: str,
        keep_vars: bool,  # noqa: FBT001
    ) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        for name, tensor in self.stored_weight.tensors().items():
            destination[f"{prefix}weight.{name}"] = tensor

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,  # noqa: FBT001
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        mine = {name: f"{prefix}weight.{name}" for name in self.stored_weight.tensors()}
        loaded = {name: state_dict[key] for name, key in mine.items() if key in state_dict}
        missing_keys += [key for name, key in mine.items() if name not in loaded]
        for name, own in self.stored_weight.tensors().items():
            new = loaded.get(name)
            if new is not None and (new.shape != own.shape or new.dtype != own.dtype):
                error_msgs.append(
                    f"{mine[name]} is {new.dtype} {tuple(new.shape)}; it must be {own.dtype} "
                    f"{tuple(own.shape)}"
                )
            elif new is not None:  # copies of the model share the old record
                changed: Any = {name: new.detach().to(own.device, copy=True)}
                self.stored_weight = replace(self.stored_weight, **changed)  # type: ignore[type-var]
        others = {key: x for key, x in state_dict.items() if key not in mine.values()}
        super()._load_from_state_dict(
            others, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs
        )

    def extra_repr(self) -> str:
        """Return the sizes of the module and the form of its weight."""
        return f"{super().extra_repr()}, weight={self.stored_weight.form}"


class StoredEmbedding(StoredWeightMixin, nn.Embedding):  # type: ignore[override]
    """An `nn.Embedding` whose weight is a `StoredWeight`; the rows of the ids are dequantized."""

    def forward(self, input: Tensor) -> Tensor:
        """Return the rows [..., M] of ids [...]."""
        return self.stored_weight.gather(input)


def can_store_weight(module: nn.Module) -> bool:
    """Return whether a module computes with a stored weight: a `Linear`, a plain embedding."""
    if isinstance(module, Linear):
        return not module.reads_whole_weight
    return type(module) is nn.Embedding and module.max_norm is None


def store_weight(module: nn.Module, record: StoredWeight) -> None:
    """Replace the parameter `weight` of a module by a record, in place."""
    if not can_store_weight(module):
        raise ArgumentTypeError(
            f"module is {type(module).__name__}; only a regard.nn.Linear or an nn.Embedding whose "
            "matrix is not read as a whole can have a stored weight"
        )
    shape = torch.Size(module._parameters["weight"].shape)  # type: ignore[union-attr]
    if record.shape != shape:
        raise ArgumentError(f"the record is {tuple(record.shape)} and the weight {tuple(shape)}")
    del module._parameters["weight"]
    module.__class__ = _stored_class(type(module))  # type: ignore[arg-type]
    module.stored_weight = record  # type: ignore[assignment]


@cache
def _stored_class(plain: type[nn.Module]) -> type[nn.Module]:
    """Return the class of a module with a stored weight, named as the plain class."""
    if plain is nn.Embedding:
        return StoredEmbedding
    return type(plain.__name__, (StoredWeightMixin, plain), {"__module__": plain.__module__})


def plain_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that a module had before its weight was stored; its class otherwise."""
    own = type(module)
    first, *others = own.__bases__
    if first is StoredWeightMixin and len(others) == 1 and _stored_class(others[0]) is own:
        return others[0]
    return own


LARGEST_MOVED = 16 * HUGE_PAGE
"""The size in bytes from which a tensor stays where it is, since a copy needs memory."""

FREED_BYTES = 1 << 24
"""How many bytes of small tensors may be freed before they are given back."""


def stored_to_huge_pages(network: nn.Module) -> None:
    """Move the stored weights of a network together into huge pages (`regard.load`)."""
    owners: dict[int, list[StoredWeightMixin]] = {}
    for module in network.modules():
        if isinstance(module, StoredWeightMixin) and _is_movable(module.stored_weight):
            owners.setdefault(id(module.stored_weight), []).append(module)
    records = [modules[0].stored_weight for modules in owners.values()]
    block = HugePageBlock(aligned_bytes(x for y in records for x in y.tensors().values()))
    del records
    freed = 0
    for modules in owners.values():
        freed += modules[0].stored_weight.bytes
        copied = modules[0].stored_weight.map(block.copy)
        for module in modules:
            module.stored_weight = copied
        if freed > FREED_BYTES:
            give_back_freed_memory()  # otherwise all small weights are in memory twice
            freed = 0


def _is_movable(record: StoredWeight) -> bool:
    """Return whether the tensors of a record are moved into huge pages."""
    return all(
        x.is_cpu and type(x) is Tensor and x.nbytes < LARGEST_MOVED
        for x in record.tensors().values()
    )


def weight_tensors(network: nn.Module) -> Iterator[Tensor]:
    """Yield the parameters of a network, then the stored tensors of its records, each once."""
    yield from network.parameters()
    for record in {id(record): record for _, record in stored_modules(network)}.values():
        yield from record.tensors().values()


def count_parameters(network: nn.Module) -> int:
    """Return the number of parameters of a network, with those that are stored in fewer bits."""
    records = {id(record): record for _, record in stored_modules(network)}.values()
    return sum(p.numel() for p in network.parameters()) + sum(x.shape.numel() for x in records)


def device_of(network: nn.Module) -> torch.device:
    """Return the device of a network's weights; one without weights computes where its input is."""
    first = next(weight_tensors(network), None)
    return torch.device("cpu") if first is None else first.device


def stored_modules(network: nn.Module) -> Iterator[tuple[str, StoredWeight]]:
    """Yield the name of each parameter in fewer bits, and its record, which may be shared."""
    for name, module in network.named_modules(remove_duplicate=False):
        if isinstance(module, StoredWeightMixin):
            yield f"{name}.weight" if name else "weight", module.stored_weight
