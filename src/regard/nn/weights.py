"""Linear maps that are fast on a CPU, and modules whose weight is stored in fewer bits."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any, Literal, TypeAlias, get_args

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_choice
from regard.errors import ArgumentError, ArgumentTypeError
from regard.freed_memory import give_back_freed_memory
from regard.huge_pages import HUGE_PAGE, HugePageBlock, aligned_bytes, empty_like
from regard.nn.module_calls import call_as_leaf, is_proxy
from regard.ops.onednn import onednn_linear
from regard.ops.stored_linear import stored_linear
from regard.ops.stored_weights import StoredWeight
from regard.ops.tokenwise import (
    check_linear_map,
    compiled_kernel_applies,
    multiplies_in_fp32,
    try_gemv,
)

FP32_MATMUL_ROWS = 16
"""The least number of rows of x whose products are computed in fp32 where torch is slow."""
Fp32Product: TypeAlias = Literal["torch", "onednn"]
"""Which library multiplies fp32 matrices with many rows on a CPU."""
CONVERTED_BLOCK = 1 << 21
"""How many elements of a weight are converted to fp32 at a time: 8 MiB in fp32. From 32 MiB
on the C library asks the operating system for new memory each time, which takes longer than a
product of few rows.
"""
LARGE_RESULT = 1 << 25
"""The size in bytes from which the C library asks the operating system for new memory each time."""


def linear(
    x: Float[Tensor, "*L M"],
    weight: Float[Tensor, "N M"],
    bias: Float[Tensor, " N"] | None = None,
    *,
    block: int = CONVERTED_BLOCK,
) -> Float[Tensor, "*L N"]:
    """Compute y = W x + b.

    On a CPU, `regard.ops.tokenwise` computes a few rows. From `FP32_MATMUL_ROWS` rows on, a weight
    in fp16, or in bf16 on a processor without instructions for it, is converted to fp32 block by
    block, because torch is slow there (LOG.md).
    """
    y = try_gemv(x, weight, bias)
    return _linear_by_matmul(x, weight, bias, block) if y is None else y


def _linear_by_matmul(
    x: Tensor, weight: Tensor, bias: Tensor | None, block: int, product: Fp32Product = "torch"
) -> Tensor:
    """Compute W x + b by matrix products; by oneDNN only where `product` says so."""
    check_linear_map(x, weight, bias)
    if product == "onednn" and (y := onednn_linear(x, weight, bias)) is not None:
        return y
    rows = x.numel() // max(1, x.shape[-1])
    # the dtype first: a graph would be specialized on the number of rows
    if not multiplies_in_fp32(x) or rows < FP32_MATMUL_ROWS:
        return _torch_linear(x, weight, bias)
    x32 = x.float()
    step = max(1, block // max(1, weight.shape[1]))
    biases = torch.split(bias, step) if bias is not None else [None] * -(-weight.shape[0] // step)
    parts = []
    for w, b in zip(torch.split(weight, step), biases, strict=True):
        w32, b32 = w.float(), b if b is None else b.float()
        y = onednn_linear(x32, w32, b32)
        parts.append((F.linear(x32, w32, b32) if y is None else y).to(x.dtype))
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _torch_linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """Compute W x + b by torch's product, a large result in huge pages."""
    shape = (*x.shape[:-1], weight.shape[0])
    if (
        # first, because torch.compile would specialize the graph on the sizes below
        not compiled_kernel_applies(x, weight)
        or (bias is not None and not compiled_kernel_applies(bias, weight))
        or prod(shape) * x.itemsize < LARGE_RESULT
        or torch._C._len_torch_dispatch_stack() > 0
    ):
        return F.linear(x, weight, bias)
    out = empty_like(x, (prod(shape[:-1]), shape[-1]))
    rows = x.reshape(out.shape[0], x.shape[-1])
    if bias is None:
        torch.mm(rows, weight.t(), out=out)
    else:
        torch.addmm(bias, rows, weight.t(), out=out)
    return out.view(shape)


_NOT_QUANTIZED = (
    "torch.ao.quantization finds layers by their exact class, so that it leaves a regard.nn.Linear "
    "as it is: quantize regard.integrations.pytorch.with_torch_linears(model) instead"
)


class Linear(nn.Linear):
    """A `torch.nn.Linear` that is computed by `regard.nn.weights.linear`.

    Args:
        in_features: the input size M.
        out_features: the output size N.
        bias: whether there is a bias.

    >>> Linear(3, 2)(torch.zeros(1, 3)).shape
    torch.Size([1, 2])
    """

    stored_weight: StoredWeight | None = None
    """The weight in a form with fewer bits (`regard.nn.weights.store_weight`), or None."""
    fp32_product: Fp32Product = "torch"
    """What multiplies many fp32 vectors on a CPU; see `set_fp32_product`."""
    reads_whole_weight = False
    """Whether another module reads the whole matrix, so that it must be stored as it is."""

    def __setattr__(self, name: str, value: Tensor | nn.Module) -> None:
        # torch.ao.quantization sets this attribute on every module that it visits
        if name == "qconfig":
            warnings.warn(_NOT_QUANTIZED, stacklevel=2)
        super().__setattr__(name, value)

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L N"]:
        """Map x [..., M] to [..., N]."""
        # Reading the dictionary takes a fifth of the time of `self.weight`.
        parameters = self._parameters
        weight: Tensor | None = parameters.get("weight")
        bias: Tensor | None = parameters.get("bias")
        stored = self.stored_weight
        if weight is None and stored is not None and not is_proxy(x):
            return stored_linear(x, stored, bias)
        # A parametrization (torch.nn.utils.parametrize) computes them when they are read.
        if weight is None or "bias" not in parameters:
            weight, bias = self.weight, self.bias
        y = try_gemv(x, weight, bias)
        if y is None and is_proxy(x):
            # a subclass may call this method, so that its node would be the whole subclass
            if type(self) is not Linear:
                return F.linear(x, weight, bias)
            y = call_as_leaf(self, Linear.forward, x)
        if y is not None:
            return y
        return _linear_by_matmul(x, weight, bias, CONVERTED_BLOCK, self.fp32_product)


def set_fp32_product(module: nn.Module, product: Fp32Product) -> None:
    """Choose what computes y = W x + b for many fp32 vectors on a CPU in a module.

    oneDNN is up to twice as fast on processors of AMD (LOG.md). It is not the default, since its
    sums have up to three times the error of torch's, and the rounding of a row depends on the
    number of rows. Small maps, few vectors, gradients, compiled graphs and other devices are not
    affected.

    Args:
        module: a model or a layer; each `regard.nn.Linear` in it keeps the choice.
        product: "onednn", or "torch" for the default.

    Raises:
        ArgumentError: the product is unknown, or the module contains no `regard.nn.Linear`.

    >>> model = nn.Sequential(Linear(256, 256))
    >>> set_fp32_product(model, "onednn")
    >>> model[0].fp32_product
    'onednn'

    Source: oneDNN developer guide, "Matrix Multiplication".
    """
    check_choice("product", product, get_args(Fp32Product))
    linears = [x for x in module.modules() if isinstance(x, Linear)]
    if not linears:
        raise ArgumentError(
            f"{type(module).__name__} contains no regard.nn.Linear, so that there is no product to "
            "choose; pass a model or a layer of regard"
        )
    for linear in linears:
        linear.fp32_product = product


class ScaledLinear(Linear):
    """A linear map with a factor on its result: y = scale (W x + b).

    Source: Yang et al. 2022 (arXiv 2203.03466), where widths have such factors; Falcon-H1.
    """

    def __init__(self, dim: int, out: int, *, scale: float, bias: bool = False) -> None:
        super().__init__(dim, out, bias=bias)
        self.scale = scale

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L N"]:
        """Return y [..., N] of x [..., M]."""
        return super().forward(x) * self.scale

    def extra_repr(self) -> str:
        """Return the sizes and the factor."""
        return f"{super().extra_repr()}, scale={self.scale:g}"


def scaled_map(linear: Linear, scale: float) -> Linear:
    """Return a linear map of the same sizes with a factor on its result; the map itself for 1."""
    if scale == 1:
        return linear
    bias = linear.bias is not None
    return ScaledLinear(linear.in_features, linear.out_features, scale=scale, bias=bias)


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
