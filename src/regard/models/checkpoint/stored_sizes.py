"""The sizes of weights as files hold them (codes, scales, zero points, what stays wide), from a
config.json or the header of a GGUF file.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import nn

from regard.configs import quantization_settings, read_as
from regard.configs.base import Raw
from regard.configs.reader import read_sizes, sizes_config
from regard.cost.model import ModelSpec, StoredSize
from regard.errors import ArgumentError
from regard.models.checkpoint.family import TensorBinding, bind_names
from regard.models.checkpoint.gguf import GgufModel
from regard.models.checkpoint.stored_forms import FORMS, METHOD, may_store
from regard.models.families import family
from regard.nn import Linear
from regard.ops.stored_weights import GROUPS, INT4_BLOCK
from regard.untrusted_text import short_repr

EXPERTS = re.compile(r"(?<!shared_)experts\b")
"""What the names of the tensors of experts contain."""


@dataclass(frozen=True)
class StoredMatrix:
    """A matrix [N, K] of a linear map under its name in a checkpoint; one tensor may hold several.

    Attributes:
        name: the name without ".weight".
        count: how many matrices the tensor holds, such as those of all experts.
        is_linear: whether it is a linear map, which most methods quantize; otherwise an embedding,
            a router, or the experts in one tensor.
        is_storable: whether this package can store it in fewer bits.
    """

    name: str
    count: int
    rows: int
    columns: int
    is_head: bool
    is_linear: bool
    is_storable: bool

    @property
    def numbers(self) -> int:
        """How many numbers the tensor has."""
        return self.count * self.rows * self.columns


ByteCount: TypeAlias = Callable[[StoredMatrix], int | None]
"""The bytes of all tensors in which a method stores a matrix; None if it stays as it is."""


def stored_size(raw: Raw, where: str) -> StoredSize:
    """Return the size of a quantized checkpoint's weights, from its config.json: GPTQ, AWQ
    ("gemm"), "fp8" in blocks, "mxfp4", compressed-tensors, bitsandbytes (without the JSON of its
    4-bit matrices), and this package's.
    """
    settings = quantization_settings(raw)
    settings = settings if isinstance(settings, Mapping) else {}
    try:
        form, count = METHODS[_setting(settings, "quant_method", tuple(METHODS))](settings)
        its_family = family(str(read_as(raw)))
        config = sizes_config(raw)
        network = its_family.build_empty(config)
        dtype = _wide_dtype(raw)
        sizes = _Sizes()
        for name, binding in _stored_once(network, bind_names(network, its_family.names)):
            wide, numbers = 0, 0
            for parameter_name in binding.parameters:
                p = network.get_parameter(parameter_name)
                wide += p.numel() * its_family.dtype_of(parameter_name, dtype).itemsize
                numbers += p.numel()
            matrix = _matrix(network, name, binding, its_family.head)
            stored = None if matrix is None else count(matrix)
            part = _part_of(network, name, binding, matrix)
            sizes.add(part, numbers, wide if stored is None else stored)
    except ArgumentError as error:
        raise ArgumentError(
            f"{where}: the stored size of the weights cannot be counted: {error}. Give --dtype, in "
            "which all weights are then counted"
        ) from error
    return sizes.total(form)


def gguf_sizes(path: Path) -> ModelSpec:
    """Return the sizes of the model in a GGUF file, whose weights count as the file stores them."""
    gguf = GgufModel.open(path)
    sizes, formats = _Sizes(), Counter[str]()
    for name, tensor in gguf.header.tensors.items():
        part = "embedding" if name.startswith("token_embd.") else ""
        sizes.add(part, torch.Size(tensor.shape).numel(), tensor.bytes)
        formats[tensor.format.name] += tensor.bytes
    model = read_sizes(gguf.config, path.stem, str(path))
    plain = {"F32": "fp32", "BF16": "bf16"}
    form = f"GGUF: {', '.join(name for name, _ in formats.most_common())}"
    dtype = plain.get(formats.most_common(1)[0][0], "fp16")
    return replace(model, dtype=dtype, stored=sizes.total(form))


class _Sizes:
    """The numbers and bytes of each part, summed."""

    def __init__(self) -> None:
        self.numbers, self.bytes = Counter[str](), Counter[str]()

    def add(self, part: str, numbers: int, size: int) -> None:
        """Add the numbers and bytes of one tensor to its part."""
        self.numbers[part] += numbers
        self.bytes[part] += size

    def total(self, form: str) -> StoredSize:
        """Return the bytes of all parts, and the bits that each part takes for a number."""
        bits = {part: Fraction(8 * self.bytes[part], n) for part, n in self.numbers.items()}
        return StoredSize(form, self.bytes.total(), tuple(sorted(bits.items())))


def _wide_dtype(raw: Raw) -> torch.dtype:
    """Return the dtype of the weights that stay as they are."""
    name = str(raw.get("dtype") or raw.get("torch_dtype") or "bfloat16").removeprefix("torch.")
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype) or not dtype.is_floating_point:
        raise ArgumentError(f"dtype is {short_repr(name)}, which is no floating-point dtype")
    return dtype


def _stored_once(
    network: nn.Module, bindings: Mapping[str, TensorBinding]
) -> Iterator[tuple[str, TensorBinding]]:
    """Yield the tensors of a checkpoint; a shared parameter has its first name only."""
    counted_ids = set[int]()
    for name, binding in bindings.items():
        ids = {id(network.get_parameter(parameter)) for parameter in binding.parameters}
        if not ids & counted_ids:
            yield name, binding
        counted_ids |= ids


def _owners(network: nn.Module, binding: TensorBinding) -> list[nn.Module]:
    return [network.get_submodule(name.rpartition(".")[0]) for name in binding.parameters]


def _part_of(
    network: nn.Module, name: str, binding: TensorBinding, matrix: StoredMatrix | None
) -> str:
    """Return the part of a model of which a token reads only some numbers, or ""."""
    if matrix is not None and EXPERTS.search(name):
        return "experts"
    if any(isinstance(owner, nn.Embedding) for owner in _owners(network, binding)):
        return "embedding"
    return ""


def _matrix(
    network: nn.Module, name: str, binding: TensorBinding, head: str | None
) -> StoredMatrix | None:
    """Return the matrix that a stored tensor holds, or None if it holds something else."""
    parts = [network.get_parameter(parameter) for parameter in binding.parameters]
    if any(p.ndim != 2 for p in parts) or len({p.shape[1] for p in parts}) != 1:
        return None
    owners = _owners(network, binding)
    packed = binding.rule.pack([p.detach() for p in parts])
    linear = all(isinstance(owner, Linear) for owner in owners) and packed.ndim == 2
    count = packed.shape[0] if packed.ndim == 3 else 1
    columns = parts[0].shape[1]
    return StoredMatrix(
        name.removesuffix(".weight"),
        count,
        packed.numel() // columns // count,
        columns,
        name == head or name == "lm_head.weight",
        linear,
        all(may_store(p, [(o, "weight")]) for p, o in zip(parts, owners, strict=True)),
    )


def _groups(columns: int, size: int) -> int:
    """Return the number of groups of inputs; a size of -1 is one group."""
    return 1 if size < 0 else -(-columns // size)


def _setting(
    settings: Mapping[str, Any], name: str, allowed: tuple[object, ...], default: object = None
) -> Any:
    """Return a setting that must have one of the allowed values."""
    value = settings.get(name, default)
    if value not in allowed or isinstance(value, bool) != isinstance(allowed[0], bool):
        raise ArgumentError(
            f"{name} is {short_repr(value)}; known are {', '.join(map(repr, allowed))}"
        )
    return value


def _is_skipped(name: str, patterns: object) -> bool:
    """Return whether one of the patterns of `modules_to_not_convert` means a module: its beginning
    or its end, or a regular expression for its beginning.
    """
    key = "modules_to_not_convert"
    return any(
        name.endswith(x) or _matches(rf"(?:{x})(?:(?<=\.)|(?=\.|$))", name, x, key)
        for x in _names(patterns, key)
    )


def _names(value: object, key: str) -> list[str]:
    """Return a setting that is a list of names; a missing one has none."""
    if value is None:
        return []
    if not isinstance(value, list) or not all(isinstance(x, str) for x in value):
        raise ArgumentError(f"{key} is {short_repr(value)}, no list of names")
    return value


def _matches(expression: str, name: str, written: str, key: str) -> bool:
    """Return whether a name begins with a regular expression that a file has written."""
    if re.search(r"\)[*+{]", written):  # a repeated group may take time without a bound
        raise ArgumentError(f"{key} has {short_repr(written)}; repeat no group")
    try:
        return re.match(expression, name) is not None
    except (re.error, RecursionError, OverflowError) as error:
        raise ArgumentError(
            f"{key} has {short_repr(written)}, no regular expression: {error}"
        ) from None


def _linear_maps(
    settings: Mapping[str, Any], key: str, size: Callable[[StoredMatrix], int]
) -> ByteCount:
    """Return the count of a method that stores linear maps, without the head unless `lm_head` is
    set, and without the modules that a key names.
    """

    def count(matrix: StoredMatrix) -> int | None:
        if _is_skipped(matrix.name, settings.get(key)):
            return None
        if EXPERTS.search(matrix.name) and not matrix.is_linear:
            raise ArgumentError(
                f"{matrix.name} holds all experts in one tensor, and how "
                f"{settings['quant_method']} stores it is not known"
            )
        if not matrix.is_linear or (matrix.is_head and not settings.get("lm_head")):
            return None
        return size(matrix)

    return count


def _group_size(settings: Mapping[str, Any]) -> int:
    size = settings.get("group_size", settings.get("q_group_size", 128))
    if type(size) is not int or not (size == -1 or size > 0):
        raise ArgumentError(f"group_size is {short_repr(size)}; it must be -1, or above 0")
    return size


def _awq(settings: Mapping[str, Any]) -> tuple[str, ByteCount]:
    bits = int(_setting(settings, "bits", (4,), settings.get("w_bit")))
    group = _group_size(settings)
    _setting({"version": str(settings.get("version", "gemm")).lower()}, "version", ("gemm",))

    def size(m: StoredMatrix) -> int:  # qweight, qzeros, and scales in fp16
        return m.numbers * bits // 8 + _groups(m.columns, group) * m.rows * (bits + 16) // 8

    form = f"awq, {bits} bits in groups of {group}"
    return form, _linear_maps(settings, "modules_to_not_convert", size)


def _gptq(settings: Mapping[str, Any]) -> tuple[str, ByteCount]:
    bits, group = int(_setting(settings, "bits", (4, 2, 3, 8))), _group_size(settings)
    _setting(settings, "checkpoint_format", ("gptq", "gptq_v2"), "gptq")
    if settings.get("dynamic"):
        raise ArgumentError(f"dynamic is {short_repr(settings['dynamic'])}, which is not known")

    def size(m: StoredMatrix) -> int:  # qweight, qzeros, scales in fp16, and g_idx in int32
        factors = _groups(m.columns, group) * m.rows * (bits + 16) // 8
        return m.numbers * bits // 8 + factors + 4 * m.columns

    form = f"gptq, {bits} bits in groups of {group}"
    inside = settings.get("modules_in_block_to_quantize")
    count = _linear_maps(settings, "modules_to_not_convert", size)
    if inside is None:
        return form, count
    parts = (
        [x if isinstance(x, list) else [x] for x in inside] if isinstance(inside, list) else [[0]]
    )
    names = tuple(x for part in parts for x in part)
    if not all(isinstance(x, str) for x in names):
        raise ArgumentError(
            f"modules_in_block_to_quantize is {short_repr(inside)}; it must be lists of names"
        )
    return form, lambda m: count(m) if m.name.endswith(names) else None


def _fp8(settings: Mapping[str, Any]) -> tuple[str, ByteCount]:
    sides = settings.get("weight_block_size")
    if sides is None:  # one factor for each row, or one for all
        by_row = settings["quant_method"] != "fp8"
        whole = lambda m: m.numbers + 4 * m.count * (m.rows if by_row else 1)  # noqa: E731
        form = "fp8 by rows" if by_row else "fp8 by matrices"
        return form, _linear_maps(settings, "modules_to_not_convert", whole)
    if not isinstance(sides, list) or [type(x) is int and x > 0 for x in sides] != [True, True]:
        raise ArgumentError(f"weight_block_size is {short_repr(sides)}; known are two sizes")
    a, b = (int(side) for side in sides)

    def size(m: StoredMatrix) -> int:  # one byte each, and a factor in fp32 for each block
        return m.numbers + 4 * m.count * -(-m.rows // a) * -(-m.columns // b)

    form = f"fp8 in blocks of {a} x {b}"
    return form, _linear_maps(settings, "modules_to_not_convert", size)


def _mxfp4(settings: Mapping[str, Any]) -> tuple[str, ByteCount]:
    def count(m: StoredMatrix) -> int | None:  # 16 bytes and one exponent for 32 inputs
        is_expert = EXPERTS.search(m.name) is not None
        if not is_expert or _is_skipped(m.name, settings.get("modules_to_not_convert")):
            return None
        return 17 * m.count * m.rows * -(-m.columns // 32)

    return "mxfp4 experts", count


def _bitsandbytes(settings: Mapping[str, Any]) -> tuple[str, ByteCount]:
    skipped = "llm_int8_skip_modules"
    if settings.get("load_in_8bit"):  # codes, a factor in fp32 for each output, and one flag
        size_8 = lambda m: m.numbers + 4 * m.rows + 1  # noqa: E731
        return "bitsandbytes int8", _linear_maps(settings, skipped, size_8)
    _setting(settings, "load_in_4bit", (True,), default=False)
    kind = _setting(settings, "bnb_4bit_quant_type", ("nf4", "fp4"), "fp4")
    double = bool(settings.get("bnb_4bit_use_double_quant"))

    def size_4(m: StoredMatrix) -> int:
        blocks = -(-m.numbers // 64)
        # the 16 values of the codes; factors in fp32, or in bytes with factors of their own
        factors = blocks + 4 * -(-blocks // 256) + 4 * 256 if double else 4 * blocks
        return -(-m.numbers // 2) + factors + 4 * 16

    form = f"bitsandbytes {kind}{', double quantization' if double else ''}"
    return form, _linear_maps(settings, skipped, size_4)


def _compressed_tensors(settings: Mapping[str, Any]) -> tuple[str, ByteCount]:
    layouts = ("pack-quantized", "int-quantized", "float-quantized")
    layout = _setting(settings, "format", layouts)
    groups = settings.get("config_groups")
    values = list(groups.values()) if isinstance(groups, Mapping) else []
    if len(values) != 1 or not isinstance(values[0], Mapping):
        raise ArgumentError(f"config_groups is {short_repr(groups)}; known is one group")
    weights, inputs = values[0].get("weights"), values[0].get("input_activations")
    if not isinstance(weights, Mapping) or values[0].get("targets") != ["Linear"]:
        raise ArgumentError(f"the group is {short_repr(values[0])}; known are weights of 'Linear'")
    bits = int(_setting(weights, "num_bits", (4, 8) if layout == "pack-quantized" else (8,)))
    strategy = _setting(weights, "strategy", ("group", "channel", "tensor"))
    size = _group_size(weights) if strategy == "group" else -1
    has_zeros, has_order = weights.get("symmetric") is False, weights.get("actorder") == "group"
    static = isinstance(inputs, Mapping) and not inputs.get("dynamic")

    def matrix_size(m: StoredMatrix) -> int:
        factors = 1 if strategy == "tensor" else m.rows * _groups(m.columns, size)
        total = factors * _SCALE_BYTES + (_SCALE_BYTES if static else 0)
        if layout != "pack-quantized":
            return total + m.numbers + (factors if has_zeros else 0)
        total += 4 * m.rows * -(-m.columns * bits // 32) + 16  # the codes, and the shape
        zeros = 4 * -(-m.rows * bits // 32) * _groups(m.columns, size) if has_zeros else 0
        return total + zeros + (4 * m.columns if has_order else 0)

    def count(m: StoredMatrix) -> int | None:
        ignored = _names(settings.get("ignore"), "ignore")
        patterns = [x.removeprefix("re:") for x in ignored if x.startswith("re:")]
        is_ignored = m.name in ignored or any(_matches(x, m.name, x, "ignore") for x in patterns)
        return None if is_ignored or not m.is_linear else matrix_size(m)

    return f"compressed-tensors {layout}, {bits} bits", count


_SCALE_BYTES = 2
"""The bytes of a scale of compressed-tensors, which has the dtype of the model."""


def _regard(settings: Mapping[str, Any]) -> tuple[str, ByteCount]:
    form = _setting(settings, "weights", tuple(name for name in FORMS if "int" in name))

    def count(m: StoredMatrix) -> int | None:
        if not m.is_storable:
            return None
        group = next((g for g in reversed(GROUPS) if m.columns % g == 0), GROUPS[0])
        if form == "int8":
            width = -(-m.columns // group) * group
            return m.rows * (width + 2 * width // group)
        width = -(-m.columns // INT4_BLOCK) * INT4_BLOCK
        return m.rows * (width // 2 + 4 * width // group)

    return f"{form} of regard", count


METHODS: Mapping[str, Callable[[Mapping[str, Any]], tuple[str, ByteCount]]] = {
    "awq": _awq,
    "bitsandbytes": _bitsandbytes,
    "compressed-tensors": _compressed_tensors,
    "fbgemm_fp8": _fp8,
    "fp8": _fp8,
    "gptq": _gptq,
    "mxfp4": _mxfp4,
    METHOD: _regard,
}
"""`quant_method` -> (quantization_config) -> the name of the form, and the bytes of a matrix."""
