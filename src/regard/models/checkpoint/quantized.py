"""Quantized checkpoints: their matrices stay integers with scales where a stored form has the same
numbers, and are dequantized otherwise. `READERS` has a reader for each `quant_method`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeAlias

import torch
from torch import Tensor

from regard.errors import ArgumentError, FileError
from regard.files.safetensors_files import DEFAULT_BUFFERING, ReadBuffering, StoredTensor
from regard.files.strict_json import parse_json
from regard.models.checkpoint.float_quantized import (
    BITSANDBYTES_VALUES,
    FLOAT8,
    SCALES,
    unpack_bitsandbytes,
    unpack_fp8,
    unpack_mxfp4,
    unpack_nvfp4,
)
from regard.models.checkpoint.group_quantized import (
    IntegerCodes,
    unpack_awq,
    unpack_compressed,
    unpack_gptq,
)
from regard.models.checkpoint.tensors import CheckpointTensors, Conversion
from regard.untrusted_text import error_text, short_repr

_LARGEST_BLOCK = 1 << 14  # published files have 128
_LARGEST_STATE = 1 << 16  # bytes of the JSON text beside a matrix of bitsandbytes

Settings: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True)
class QuantizedMatrix:
    """A matrix stored as small numbers and other tensors (scales, zero points, groups), its plain
    header entry, and `unpack`: (values, *others) -> the matrix, or integers with scales.
    """

    values: str
    others: tuple[str, ...]
    plain: StoredTensor
    unpack: Callable[..., Tensor | IntegerCodes]
    unread: tuple[str, ...] = ()


@dataclass(frozen=True)
class DequantizedTensors(CheckpointTensors):
    """Checkpoint tensors in which each group of tensors of a quantized matrix appears as the
    matrix; scales, at most a sixteenth of the size, are read first.
    """

    packed: CheckpointTensors
    pairs: Mapping[str, QuantizedMatrix]
    method: str

    def read(
        self, names: Iterable[str] | None = None, buffering: ReadBuffering = DEFAULT_BUFFERING
    ) -> Iterator[tuple[str, Tensor]]:
        """Yield names and values; memory also holds the scales and one matrix."""
        chosen = self.tensors if names is None else names
        for name, value in self.read_kept(chosen, (), buffering):
            assert isinstance(value, Tensor)
            yield name, value

    def read_kept(
        self,
        names: Iterable[str],
        integer_names: Collection[str],
        buffering: ReadBuffering = DEFAULT_BUFFERING,
    ) -> Iterator[tuple[str, Tensor | IntegerCodes]]:
        """Yield names and values as `CheckpointTensors.read_kept` does."""
        chosen = list(names)
        pairs = {self.pairs[n].values: self.pairs[n] for n in chosen if n in self.pairs}
        small = {name for pair in pairs.values() for name in pair.others}
        others = dict(self.packed.read(small, buffering))
        whole = [n for n in chosen if n not in self.pairs]
        for name, tensor in self.packed.read([*whole, *pairs], buffering):
            if name not in pairs:
                yield name, tensor
                continue
            pair = pairs[name]
            try:
                value = pair.unpack(tensor, *(others.pop(n) for n in pair.others))
            except ArgumentError as error:
                place = f"{pair.plain.file}: {short_repr(name)}"
                raise FileError(f"{place}: {error_text(error)}") from error
            if isinstance(value, IntegerCodes) and pair.plain.name not in integer_names:
                value = value.dequantize()
            yield pair.plain.name, value

    def conversion(self, dense: Mapping[str, int]) -> Conversion | None:
        """Count the quantized matrices that became plain numbers of so many bytes, or None."""
        matrices = [self.pairs[name] for name in dense if name in self.pairs]
        names = [name for x in matrices for name in (x.values, *x.others)]
        before = sum(self.packed.tensors[name].bytes for name in names)
        after = sum(dense[x.plain.name] for x in matrices)
        count = len(matrices), len(self.pairs)
        return Conversion(self.method, *count, before, after) if matrices else None


def dequantized(store: CheckpointTensors, quantization_config: Any) -> CheckpointTensors:
    """Return a folder's tensors with each quantized matrix in place of its tensors."""
    if quantization_config is None:
        return store
    is_object = isinstance(quantization_config, Mapping)
    method: Any = quantization_config.get("quant_method") if is_object else None
    _check_setting(store.folder, "quant_method", method, tuple(READERS))
    pairs = READERS[method](store, quantization_config)
    if not pairs:
        raise _config_error(
            store.folder,
            f"the quant_method {method!r}, and no tensor beside it is quantized so; remove the key "
            "if the weights are plain",
        )
    hidden = {name for pair in pairs for name in (pair.values, *pair.others, *pair.unread)}
    entries = {name: x for name, x in store.tensors.items() if name not in hidden}
    for pair in pairs:
        if pair.plain.name in entries:
            raise FileError(
                f"{pair.plain.file}: {short_repr(pair.plain.name)} is stored both "
                "quantized and not quantized; keep one"
            )
        entries[pair.plain.name] = pair.plain
    total = sum(x.bytes for x in entries.values())
    by_name = {pair.plain.name: pair for pair in pairs}
    return DequantizedTensors(
        store.folder, MappingProxyType(entries), total, store.marks, store, by_name, method
    )


def _mxfp4(store: CheckpointTensors, _: Settings) -> list[QuantizedMatrix]:
    """Read `X_blocks` and `X_scales` [..., out, in], matrices of experts, as [..., in, out]."""
    pairs, unpack = [], partial(unpack_mxfp4, turned=True)
    for name, x in store.tensors.items():
        plain = name.removesuffix("_blocks")
        if plain == name:
            continue
        scales = _beside(store, x, plain + "_scales")
        fits = len(x.shape) > 2 and x.shape[-1] == 16 and scales.shape == x.shape[:-1]
        if not fits or {x.dtype, scales.dtype} != {torch.uint8}:
            raise _mismatch_error(x, scales, "uint8 [..., G, 16] and uint8 [..., G]")
        shape = (*x.shape[:-3], 32 * x.shape[-2], x.shape[-3])
        entry = _dequantized_entry(x, plain, shape, torch.bfloat16)
        pairs.append(QuantizedMatrix(name, (scales.name,), entry, unpack))
    return pairs


def _fp8(store: CheckpointTensors, settings: Settings) -> list[QuantizedMatrix]:
    """Read matrices of 8-bit floats with factors for blocks, rows or the whole."""
    _check_setting(store.folder, "fmt", settings.get("fmt", "e4m3"), ("e4m3",))
    block = _block(store.folder, settings.get("weight_block_size"))
    return [
        _float8(store, x, block, ("_scale_inv", "_scale"))
        for x in store.tensors.values()
        if x.dtype in FLOAT8
    ]


def _block(folder: Path, sides: Any) -> tuple[int, int] | None:
    """Return the sizes of a block that a setting names."""
    if sides is None:
        return None
    known = isinstance(sides, list) and len(sides) == 2
    if not known or not all(type(x) is int and 1 <= x <= _LARGEST_BLOCK for x in sides):
        raise _config_error(
            folder, f"the size of blocks {short_repr(sides)}; it must be two numbers above 0"
        )
    return sides[0], sides[1]


def _float8(
    store: CheckpointTensors,
    x: StoredTensor,
    block: tuple[int, int] | None,
    suffixes: tuple[str, ...],
) -> QuantizedMatrix:
    """Read a matrix of 8-bit floats; without blocks its factors are one, one for each row, or one
    for each group of a row.
    """
    base = x.name.removesuffix(".weight")
    scales = _beside(store, x, *(x.name + end for end in suffixes))
    grid: Any = scales.shape
    wanted = "a matrix and one factor, or one for each row"
    if len(x.shape) == 2 and block is not None:
        sizes = tuple(-(-size // side) for size, side in zip(x.shape, block, strict=True))
        wanted = f"a matrix and factors {sizes}"
        fits = grid == sizes
    elif len(x.shape) == 2:
        grid = (1, 1) if math.prod(grid) == 1 else grid if len(grid) == 2 else (*grid, 1)
        fits = grid == (1, 1) or (len(grid) == 2 and grid[0] == x.shape[0] and grid[1] > 0)
        fits = fits and x.shape[1] % grid[1] == 0
        block = (-(-x.shape[0] // grid[0]), x.shape[1] // grid[1]) if fits else None
    else:
        fits = False
    if not fits or scales.dtype not in SCALES:
        raise _mismatch_error(x, scales, wanted)
    plain = _dequantized_entry(x, x.name, x.shape, torch.float32)
    unread = _present(store, f"{base}.input_scale", f"{base}.activation_scale")
    unpack = partial(_unpack_float8, grid=grid, block=block)
    return QuantizedMatrix(x.name, (scales.name,), plain, unpack, unread)


def _unpack_float8(
    values: Tensor, scales: Tensor, *, grid: Any, block: tuple[int, int] | None
) -> Tensor:
    assert block is not None  # it was checked
    return unpack_fp8(values, scales.reshape(grid), block=block)


def _gptq_or_awq(store: CheckpointTensors, settings: Settings) -> list[QuantizedMatrix]:
    """Read `X.qweight`, `X.qzeros` and `X.scales`, and in GPTQ `X.g_idx`."""
    is_gptq, folder = settings["quant_method"] == "gptq", store.folder
    bits = settings.get("bits", settings.get("w_bit"))
    _check_setting(folder, "bits", bits, (4, 8) if is_gptq else (4,))
    layout = settings.get("checkpoint_format", settings.get("format", "gptq"))
    layout = str(layout if is_gptq else settings.get("version", "gemm")).lower()
    _check_setting(folder, "layout", layout, ("gptq", "gptq_v2") if is_gptq else ("gemm",))
    sym, desc_act = settings.get("sym"), settings.get("desc_act")
    for name, value in (("sym", sym), ("desc_act", desc_act)):
        _check_setting(folder, name, value, (True, False, None))
    _check_setting(folder, "dynamic", settings.get("dynamic") or None, (None,))
    group_size = settings.get("group_size", settings.get("q_group_size"))
    matrices = []
    for name, x in store.tensors.items():
        base = name.removesuffix(".qweight")
        if base == name:
            continue
        zeros, scales = (_beside(store, x, f"{base}.{part}") for part in ("qzeros", "scales"))
        names: tuple[str, ...] = (zeros.name, scales.name)
        unpack: Callable[..., IntegerCodes] = unpack_awq
        per_word, outputs = 32 // bits, scales.shape[-1] if scales.shape else 0
        if x.dtype != torch.int32 or zeros.dtype != torch.int32 or len(x.shape) != 2:
            raise _mismatch_error(x, zeros, "matrices of int32")
        if is_gptq:
            groups = _beside(store, x, f"{base}.g_idx")
            inputs, names = x.shape[0] * per_word, (*names, groups.name)
            unpack = partial(
                unpack_gptq,
                bits=bits,
                zero_offset=int(layout == "gptq"),
                symmetric=bool(sym),
                ordered=desc_act is False,
            )
            fits = x.shape[1] == outputs and groups.shape == (inputs,)
        else:
            inputs = x.shape[0]
            fits = x.shape[1] * per_word == outputs
        if not fits or zeros.shape != (scales.shape[0], outputs // per_word):
            raise _mismatch_error(x, scales, "a packed matrix and the scales of its outputs")
        groups_told = -(-inputs // group_size) if _is_count(group_size) else scales.shape[0]
        if groups_told != scales.shape[0]:
            raise _mismatch_error(x, scales, f"of {groups_told} groups of {group_size} inputs")
        plain = _dequantized_entry(x, f"{base}.weight", (outputs, inputs), torch.float32)
        matrices.append(QuantizedMatrix(name, names, plain, unpack))
    return matrices


def _is_count(value: object) -> bool:
    """Return whether a setting is a whole number above 0; -1 is one group for all inputs."""
    return type(value) is int and value > 0


_COMPRESSED = (
    *("pack-quantized", "int-quantized", "float-quantized", "naive-quantized"),
    *("nvfp4-pack-quantized", "mxfp4-pack-quantized", "mxfp8-quantized"),
)
"""The formats of compressed-tensors that are read."""


def _compressed(store: CheckpointTensors, settings: Settings) -> list[QuantizedMatrix]:
    """Read the matrices of compressed-tensors by the dtype of their numbers: words of integers,
    int8, 8-bit floats, and bytes of two 4-bit floats.
    """
    bits, block = _compressed_settings(store.folder, settings)
    matrices = []
    for name, x in store.tensors.items():
        base, _, end = name.rpartition(".")
        if (end, x.dtype) == ("weight_packed", torch.uint8):
            matrices.append(_compressed_floats(store, x, base))
        elif end == "weight" and x.dtype in FLOAT8:
            matrices.append(_float8(store, x, block, ("_scale",)))
        elif (end, x.dtype) in (("weight_packed", torch.int32), ("weight", torch.int8)):
            matrices.append(_compressed_integers(store, x, base, bits))
    return matrices


def _compressed_settings(folder: Path, settings: Settings) -> tuple[int, tuple[int, int] | None]:
    """Return the bits of packed integers, and the block of 8-bit floats."""
    layout, groups = settings.get("format"), settings.get("config_groups")
    for name in ("transform_config", "sparsity_config", "kv_cache_scheme"):
        value = settings.get(name)
        if value and not (isinstance(value, Mapping) and value.get("format") == "dense"):
            raise _config_error(folder, f"{name} {short_repr(value)}; it is not supported")
    values = list(groups.values()) if isinstance(groups, Mapping) else []
    values = [x if isinstance(x, Mapping) else {} for x in values]
    for name in (layout, *(x["format"] for x in values if x.get("format"))):
        _check_setting(folder, "format", name, _COMPRESSED)
    weights = [x.get("weights") if isinstance(x.get("weights"), Mapping) else {} for x in values]
    bits = {x.get("num_bits") for x in weights if x.get("type", "int") == "int"}
    if not weights or len(bits) > 1 or not bits <= {4, 8}:
        raise _config_error(
            folder, f"config_groups {short_repr(groups)}; integers of 4 or of 8 bits are supported"
        )
    blocks = {str(x.get("block_structure")): x.get("block_structure") for x in weights}
    if len(blocks) > 1:
        raise _config_error(folder, f"the sizes of blocks {sorted(blocks)}; one is supported")
    return next(iter(bits), 8), _block(folder, *blocks.values())


def _compressed_integers(
    store: CheckpointTensors, x: StoredTensor, base: str, bits: int
) -> QuantizedMatrix:
    scales = _beside(store, x, f"{base}.weight_scale")
    packed = x.dtype == torch.int32
    if len(x.shape) != 2 or scales.shape[:1] not in ((x.shape[0],), (1,), ()):
        raise _mismatch_error(x, scales, "a matrix and scales [outputs, groups]")
    shape = (x.shape[0], x.shape[1] * (32 // bits if packed else 1))
    parts = ("weight_zero_point", "weight_g_idx", "weight_shape")
    there = {part: f"{base}.{part}" for part in parts if f"{base}.{part}" in store.tensors}
    unpack = partial(_unpack_compressed, parts=tuple(there), shape=shape, bits=bits)
    plain = _dequantized_entry(x, f"{base}.weight", shape, torch.float32)
    unread = _present(store, f"{base}.input_scale", f"{base}.input_zero_point")
    return QuantizedMatrix(x.name, (scales.name, *there.values()), plain, unpack, unread)


def _unpack_compressed(
    values: Tensor,
    scales: Tensor,
    *others: Tensor,
    parts: tuple[str, ...],
    shape: tuple[int, int],
    bits: int,
) -> IntegerCodes:
    there = dict(zip(parts, others, strict=True))
    stored_shape = there.pop("weight_shape", None)
    if stored_shape is not None and tuple(stored_shape.tolist()) != shape:
        raise ArgumentError(
            f"weight_shape is {stored_shape.tolist()}; the packed numbers are {shape}"
        )
    if scales.numel() == 1:  # one scale for the whole matrix
        scales = scales.reshape(1, 1).expand(len(values), 1)
    zeros = there.get("weight_zero_point")
    if zeros is not None and zeros.numel() == 1 and zeros.dtype == torch.int8:
        zeros = zeros.reshape(1, 1).expand(len(values), 1)
    return unpack_compressed(values, scales, zeros, there.get("weight_g_idx"), bits=bits)


def _compressed_floats(store: CheckpointTensors, x: StoredTensor, base: str) -> QuantizedMatrix:
    """Read a matrix of 4-bit floats: MXFP4 where scales are bytes, and otherwise NVFP4."""
    scales = _beside(store, x, f"{base}.weight_scale")
    width = 32 if scales.dtype == torch.uint8 else 16
    names: tuple[str, ...] = (scales.name,)
    unpack: Callable[..., Tensor | IntegerCodes] = _small_floats
    if width == 16:
        names = (scales.name, _beside(store, x, f"{base}.weight_global_scale").name)
        unpack = unpack_nvfp4
    fits = len(x.shape) == 2 and scales.shape == (x.shape[0], 2 * x.shape[1] // width)
    if not fits or (width == 16 and scales.dtype != torch.float8_e4m3fn):
        raise _mismatch_error(x, scales, "bytes, and a scale for each 16 or 32 inputs")
    shape = (x.shape[0], 2 * x.shape[1])
    plain = _dequantized_entry(x, f"{base}.weight", shape, torch.float32)
    unread = _present(store, f"{base}.input_global_scale")
    return QuantizedMatrix(x.name, names, plain, unpack, unread)


def _small_floats(packed: Tensor, scales: Tensor) -> IntegerCodes:
    return unpack_mxfp4(torch.unflatten(packed, 1, (-1, 16)), scales)


def _bitsandbytes(store: CheckpointTensors, settings: Settings) -> list[QuantizedMatrix]:
    """Read int8 (`X.weight`, `X.SCB`) and 4 bits (`X.weight`, `X.weight.absmax` and others)."""
    states = [name for name in store.tensors if _STATE in name]
    matrices = [_four_bits(store, settings, name, state) for name, state in store.read(states)]
    for name, x in store.tensors.items():
        base = name.removesuffix(".weight")
        if x.dtype != torch.int8 or base == name:
            continue
        scales = _beside(store, x, f"{base}.SCB")
        if len(x.shape) != 2 or scales.shape != x.shape[:1] or scales.dtype != torch.float32:
            raise _mismatch_error(x, scales, "a matrix and a float32 number for each row")
        names = (scales.name, *_present(store, f"{base}.weight_format"))
        plain = _dequantized_entry(x, name, x.shape, torch.float32)
        matrices.append(QuantizedMatrix(name, names, plain, _eight_bits))
    return matrices


_STATE = ".quant_state.bitsandbytes__"
_STATE_KEYS = {"quant_type", "blocksize", "dtype", "shape"}
_NESTED_KEYS = {"nested_blocksize", "nested_dtype", "nested_offset"}


def _four_bits(
    store: CheckpointTensors, settings: Settings, name: str, text: Tensor
) -> QuantizedMatrix:
    """Read a matrix of 4-bit codes by the JSON text beside it."""
    weight, _, kind = name.rpartition(_STATE)
    entry = store.tensors[name]
    x, absmax, table = (
        _beside(store, entry, weight + end) for end in ("", ".absmax", ".quant_map")
    )
    if text.dtype != torch.uint8 or text.numel() > _LARGEST_STATE:
        raise _mismatch_error(x, entry, "bytes, and a JSON text as uint8")
    try:
        state = parse_json(bytes(text.flatten().tolist()))
    except ArgumentError as error:
        raise FileError(f"{x.file}: {short_repr(name)} {error_text(error)}") from error
    nested = absmax.dtype == torch.uint8
    if state.keys() != _STATE_KEYS | (_NESTED_KEYS if nested else set()):
        raise FileError(
            f"{x.file}: {short_repr(name)} has the keys {sorted(state)}; it must have "
            f"{sorted(_STATE_KEYS)}, and those of nested factors where absmax is uint8"
        )
    quant_type = settings.get("bnb_4bit_quant_type", kind)
    shape, sizes = state["shape"], [state["blocksize"], state.get("nested_blocksize", 1)]
    if kind not in BITSANDBYTES_VALUES or not state["quant_type"] == kind == quant_type:
        raise FileError(
            f"{x.file}: {short_repr(name)} is {short_repr(state['quant_type'])}, and "
            f"quantization_config says {short_repr(quant_type)}; both must be nf4, or fp4"
        )
    if not isinstance(shape, list) or not all(_is_count(size) for size in [*shape, *sizes]):
        raise FileError(f"{x.file}: {short_repr(name)} has the sizes {short_repr([shape, *sizes])}")
    names = [absmax.name, table.name]
    if nested:
        suffixes = (".nested_absmax", ".nested_quant_map")
        names += [_beside(store, x, weight + end).name for end in suffixes]
    plain = _dequantized_entry(x, weight, tuple(shape), torch.float32)
    return QuantizedMatrix(x.name, tuple(names), plain, partial(_unpack_four_bits, state), (name,))


def _unpack_four_bits(
    state: Mapping[str, Any], packed: Tensor, absmax: Tensor, table: Tensor, *nested: Tensor
) -> Tensor:
    known = torch.tensor(BITSANDBYTES_VALUES[state["quant_type"]], device="cpu")
    if table.shape != known.shape or float((table.float() - known).abs().max()) > 1e-6:
        raise ArgumentError(f"quant_map differs from the values of {state['quant_type']}")
    if nested:
        factors, values = nested
        blocks = factors.float().repeat_interleave(state["nested_blocksize"])[: absmax.numel()]
        absmax = values.float()[absmax.int()] * blocks + state["nested_offset"]
    packed = packed.contiguous().view(torch.uint8).flatten()
    shape = tuple(state["shape"])
    return unpack_bitsandbytes(packed, absmax, table, shape, block=state["blocksize"])


def _eight_bits(codes: Tensor, scales: Tensor, layout: Tensor | None = None) -> IntegerCodes:
    if layout is not None and int(layout) != 0:
        raise ArgumentError(
            f"weight_format is {int(layout)}, an order of a GPU; it must be 0, row by row"
        )
    return IntegerCodes(8, codes, scales[:, None] / 127)


READERS: Mapping[str, Callable[[CheckpointTensors, Settings], list[QuantizedMatrix]]] = {
    "mxfp4": _mxfp4,
    "fp8": _fp8,
    "fbgemm_fp8": _fp8,
    "gptq": _gptq_or_awq,
    "awq": _gptq_or_awq,
    "compressed-tensors": _compressed,
    "bitsandbytes": _bitsandbytes,
}
"""`quant_method` -> the reader of a folder's quantized matrices."""


def _beside(store: CheckpointTensors, values: StoredTensor, *names: str) -> StoredTensor:
    """Return the first tensor of these names, which belongs to a quantized matrix."""
    present = next((name for name in names if name in store.tensors), None)
    if present is None:
        raise FileError(
            f"{values.file}: {short_repr(values.name)} is quantized, and its scales "
            f"{short_repr(names[0])} are missing; is a shard missing?"
        )
    return store.tensors[present]


def _present(store: CheckpointTensors, *names: str) -> tuple[str, ...]:
    return tuple(name for name in names if name in store.tensors)


def _dequantized_entry(
    values: StoredTensor, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> StoredTensor:
    return replace(
        values, name=name, shape=shape, dtype=dtype, bytes=math.prod(shape) * dtype.itemsize
    )


def _mismatch_error(values: StoredTensor, scales: StoredTensor, wanted: str) -> FileError:
    pair = [f"{short_repr(x.name)} is {x.dtype} {x.shape}" for x in (values, scales)]
    return FileError(f"{values.file}: {' and '.join(pair)}; they must be {wanted}")


def _check_setting(folder: Path, name: str, value: Any, allowed: tuple[object, ...]) -> None:
    if not any(type(value) is type(x) and value == x for x in allowed):
        names = ", ".join(map(repr, allowed))
        raise _config_error(folder, f"the {name} {short_repr(value)}; supported: {names}")


def _config_error(folder: Path, problem: str) -> FileError:
    return FileError(f"{folder / 'config.json'}: quantization_config has {problem}")
