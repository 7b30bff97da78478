"""Quantized checkpoints: their matrices stay integers with scales where a stored form has the same
numbers, and are dequantized otherwise. `READERS` has a reader for each `quant_method`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor

from regard.errors import ArgumentError, FileError
from regard.files.reading import parse_json
from regard.files.safetensors_files import DEFAULT_BUFFERING, ReadBuffering, StoredTensor
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
from regard.models.checkpoint.quantization_settings import (
    Settings,
    block_size,
    check_keys,
    check_method,
    check_setting,
    compressed_weights,
    config_error,
    either,
    is_count,
)
from regard.models.checkpoint.tensors import CheckpointTensors, Conversion
from regard.untrusted_text import error_text, short_repr

_LARGEST_STATE = 1 << 16  # bytes of the JSON text beside a matrix of bitsandbytes
_ACTIVATIONS = frozenset(
    {
        *("input_scale", "activation_scale", "input_zero_point", "input_global_scale"),
        *("output_scale", "output_zero_point", "q_scale", "k_scale", "v_scale", "prob_scale"),
        *("k_zero_point", "v_zero_point"),
    }
)
"""The last words of tensors about rounding activations, keys and values, which is not done here."""


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
    check_method(store.folder, method)
    check_keys(store.folder, method, quantization_config)
    pairs = READERS[method](store, quantization_config)
    if not pairs:
        raise config_error(
            store.folder,
            f"the quant_method {method!r}, and no tensor beside it is quantized so; remove the key "
            "if the weights are plain",
        )
    hidden = {name for pair in pairs for name in (pair.values, *pair.others, *pair.unread)}
    hidden |= _about_activations(store, pairs)
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


def _about_activations(store: CheckpointTensors, pairs: Collection[QuantizedMatrix]) -> set[str]:
    """Return the tensors about activations of quantized linear maps, and of their modules."""
    linear = {pair.plain.name.removesuffix(".weight") for pair in pairs}
    owners = linear | {name.rpartition(".")[0] for name in linear}
    parts = ((name, *name.rpartition(".")[::2]) for name in store.tensors)
    return {name for name, owner, end in parts if end in _ACTIVATIONS and owner in owners}


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
        pairs.append(_matrix(x, (scales,), plain, shape, unpack, dtype=torch.bfloat16))
    return pairs


def _fp8(store: CheckpointTensors, settings: Settings) -> list[QuantizedMatrix]:
    """Read matrices of 8-bit floats with factors for blocks, rows or the whole, and DeepSeek-V4's
    experts of 4-bit floats: `X.weight`, two of int8, and `X.scale`, a power of two for 32.
    """
    block = block_size(store.folder, settings.get("weight_block_size"))
    matrices = []
    for x in store.tensors.values():
        beside = f"{x.name.removesuffix('.weight')}.scale"
        if x.dtype in FLOAT8 and x.name != beside:
            names = (f"{x.name}_scale_inv", f"{x.name}_scale", beside)
            matrices.append(_float8(store, x, block, names))
        elif x.dtype == torch.int8 and beside in store.tensors:
            scales, (rows, columns) = store.tensors[beside], x.shape
            if scales.dtype != torch.float8_e8m0fnu or scales.shape != (rows, columns // 16):
                raise _mismatch_error(x, scales, "int8 [N, K / 2] and float8_e8m0fnu [N, K / 32]")
            shape, unpack = (rows, 2 * columns), _unpack_float4
            matrices.append(_matrix(x, (scales,), x.name, shape, unpack, dtype=torch.bfloat16))
    return matrices


def _unpack_float4(values: Tensor, scales: Tensor) -> IntegerCodes:
    blocks = values.view(torch.uint8).unflatten(-1, (-1, 16))
    return unpack_mxfp4(blocks, scales.view(torch.uint8))


def _float8(
    store: CheckpointTensors,
    x: StoredTensor,
    block: tuple[int, int] | None,
    names: tuple[str, ...],
) -> QuantizedMatrix:
    """Read a matrix of 8-bit floats; without blocks its factors are one, one for each row, or one
    for each group of a row.
    """
    scales = _beside(store, x, *names)
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
    unpack = partial(_unpack_float8, grid=grid, block=block)
    return _matrix(x, (scales,), x.name, x.shape, unpack)


def _unpack_float8(
    values: Tensor, scales: Tensor, *, grid: Any, block: tuple[int, int] | None
) -> Tensor:
    assert block is not None  # it was checked
    return unpack_fp8(values, scales.reshape(grid), block=block)


def _gptq_or_awq(store: CheckpointTensors, settings: Settings) -> list[QuantizedMatrix]:
    """Read `X.qweight`, `X.qzeros` and `X.scales`, and in GPTQ `X.g_idx`."""
    is_gptq, folder = settings["quant_method"] == "gptq", store.folder
    bits = either(folder, settings, "bits", "w_bit")
    check_setting(folder, "bits", bits, (4, 8) if is_gptq else (4,))
    names = ("checkpoint_format", "format") if is_gptq else ("version", "format")
    layout = str(either(folder, settings, *names, default="gptq" if is_gptq else "gemm")).lower()
    layout = "llm-awq" if settings.get("backend") == "llm-awq" else layout
    check_setting(folder, "layout", layout, ("gptq", "gptq_v2") if is_gptq else ("gemm",))
    sym, desc_act = settings.get("sym"), settings.get("desc_act")
    group_size = either(folder, settings, "group_size", "q_group_size")
    matrices = []
    for name, x in store.tensors.items():
        base = name.removesuffix(".qweight")
        if base == name:
            continue
        zeros, scales = (_beside(store, x, f"{base}.{part}") for part in ("qzeros", "scales"))
        others: tuple[StoredTensor, ...] = (zeros, scales)
        unpack: Callable[..., IntegerCodes] = unpack_awq
        per_word, outputs = 32 // bits, scales.shape[-1] if scales.shape else 0
        if x.dtype != torch.int32 or zeros.dtype != torch.int32 or len(x.shape) != 2:
            raise _mismatch_error(x, zeros, "matrices of int32")
        if is_gptq:
            groups = _beside(store, x, f"{base}.g_idx")
            inputs, others = x.shape[0] * per_word, (*others, groups)
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
        groups_told = -(-inputs // group_size) if is_count(group_size) else scales.shape[0]
        if groups_told != scales.shape[0]:
            raise _mismatch_error(x, scales, f"of {groups_told} groups of {group_size} inputs")
        matrices.append(_matrix(x, others, f"{base}.weight", (outputs, inputs), unpack))
    return matrices


def _compressed(store: CheckpointTensors, settings: Settings) -> list[QuantizedMatrix]:
    """Read the matrices of compressed-tensors by the dtype of their numbers: words of integers,
    int8, 8-bit floats, and bytes of two 4-bit floats.
    """
    weights = compressed_weights(store.folder, settings)
    schemes: dict[tuple[str, Any], list[Settings]] = {}
    for scheme in weights:
        key = scheme.get("type") or "int", scheme.get("num_bits")
        schemes.setdefault(key, []).append(scheme)
    bits = next((n for kind, n in schemes if kind == "int"), 8)
    eighths = schemes.get(("float", 8), [])
    blocks = {str(x.get("block_structure")): x.get("block_structure") for x in eighths}
    if len(blocks) > 1:
        raise config_error(store.folder, f"the sizes of blocks {sorted(blocks)}; one is supported")
    block = block_size(store.folder, next(iter(blocks.values()), None))
    matrices = []
    for name, x in store.tensors.items():
        base, _, end = name.rpartition(".")
        if (end, x.dtype) == ("weight_packed", torch.uint8):
            stored = "float", 4
        elif end == "weight" and x.dtype in FLOAT8:
            stored = "float", 8
        elif (end, x.dtype) in (("weight_packed", torch.int32), ("weight", torch.int8)):
            stored = "int", bits
        else:
            continue
        if stored not in schemes:
            known = " and ".join(f"{kind} of {n} bits" for kind, n in schemes)
            raise FileError(
                f"{x.file}: {short_repr(name)} is {x.dtype}, {stored[0]} of {stored[1]} bits, and "
                f"config_groups in config.json has {known}; are the two from one model?"
            )
        if stored[0] == "int":
            matrices.append(_compressed_integers(store, x, base, bits, schemes[stored]))
        elif stored[1] == 8:
            matrices.append(_float8(store, x, block, (f"{x.name}_scale",)))
        else:
            matrices.append(_compressed_floats(store, x, base))
    return matrices


def _compressed_integers(
    store: CheckpointTensors, x: StoredTensor, base: str, bits: int, schemes: list[Settings]
) -> QuantizedMatrix:
    scales = _beside(store, x, f"{base}.weight_scale")
    packed = x.dtype == torch.int32
    if len(x.shape) != 2 or scales.shape[:1] not in ((x.shape[0],), (1,), ()):
        raise _mismatch_error(x, scales, "a matrix and scales [outputs, groups]")
    shape = (x.shape[0], x.shape[1] * (32 // bits if packed else 1))
    parts = ("weight_zero_point", "weight_g_idx", "weight_shape")
    entries = {part: store.tensors.get(f"{base}.{part}") for part in parts}
    there = {part: entry for part, entry in entries.items() if entry is not None}
    groups = scales.shape[1] if len(scales.shape) > 1 else 1
    if not any(_fits(scheme, groups, there, shape[1]) for scheme in schemes):
        has = ", ".join(("weight_scale", *there))
        raise FileError(
            f"{x.file}: {short_repr(base)} has {groups} groups for {shape[1]} inputs and {has}, "
            f"which contradicts config_groups in config.json: {short_repr(schemes)}"
        )
    symmetric = all(scheme.get("symmetric") for scheme in schemes)
    unpack = partial(
        _unpack_compressed, parts=tuple(there), shape=shape, bits=bits, symmetric=symmetric
    )
    return _matrix(x, (scales, *there.values()), f"{base}.weight", shape, unpack)


def _fits(scheme: Settings, groups: int, parts: Collection[str], inputs: int) -> bool:
    """Return whether a matrix may be stored as a group of config.json says."""
    size: Any = scheme.get("group_size")
    expected = -(-inputs // size) if is_count(size) else 1
    unknown = scheme.get("strategy") == "group" and not is_count(size)
    zeros = scheme.get("symmetric") is not False or "weight_zero_point" in parts
    order = scheme.get("actorder") not in ("group", "dynamic") or "weight_g_idx" in parts
    return (unknown or groups == expected) and zeros and order


def _unpack_compressed(
    values: Tensor,
    scales: Tensor,
    *others: Tensor,
    parts: tuple[str, ...],
    shape: tuple[int, int],
    bits: int,
    symmetric: bool,
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
    codes = unpack_compressed(values, scales, zeros, there.get("weight_g_idx"), bits=bits)
    middle = 2 ** (bits - 1) if values.dtype == torch.int32 else 0
    if symmetric and codes.zeros is not None and bool((codes.zeros != middle).any()):
        raise ArgumentError("symmetric is true, and weight_zero_point has others than 0")
    return codes


def _compressed_floats(store: CheckpointTensors, x: StoredTensor, base: str) -> QuantizedMatrix:
    """Read a matrix of 4-bit floats: MXFP4 where scales are bytes, and otherwise NVFP4."""
    scales = _beside(store, x, f"{base}.weight_scale")
    width = 32 if scales.dtype == torch.uint8 else 16
    others: tuple[StoredTensor, ...] = (scales,)
    unpack: Callable[..., Tensor | IntegerCodes] = _small_floats
    if width == 16:
        others = (scales, _beside(store, x, f"{base}.weight_global_scale"))
        unpack = unpack_nvfp4
    fits = len(x.shape) == 2 and scales.shape == (x.shape[0], 2 * x.shape[1] // width)
    if not fits or (width == 16 and scales.dtype != torch.float8_e4m3fn):
        raise _mismatch_error(x, scales, "bytes, and a scale for each 16 or 32 inputs")
    return _matrix(x, others, f"{base}.weight", (x.shape[0], 2 * x.shape[1]), unpack)


def _small_floats(packed: Tensor, scales: Tensor) -> IntegerCodes:
    return unpack_mxfp4(torch.unflatten(packed, 1, (-1, 16)), scales)


def _bitsandbytes(store: CheckpointTensors, settings: Settings) -> list[QuantizedMatrix]:
    """Read int8 (`X.weight`, `X.SCB`) and 4 bits (`X.weight`, `X.weight.absmax` and others)."""
    loads = ("load_in_4bit", "load_in_8bit")
    four, eight = (either(store.folder, settings, x, f"_{x}", default=False) for x in loads)
    states = [name for name in store.tensors if _STATE in name]
    matrices = [_four_bits(store, settings, name, state) for name, state in store.read(states)]
    for name, x in store.tensors.items():
        base = name.removesuffix(".weight")
        if x.dtype != torch.int8 or base == name:
            continue
        scales = _beside(store, x, f"{base}.SCB")
        if len(x.shape) != 2 or scales.shape != x.shape[:1] or scales.dtype != torch.float32:
            raise _mismatch_error(x, scales, "a matrix and a float32 number for each row")
        layout = store.tensors.get(f"{base}.weight_format")
        others = (scales,) if layout is None else (scales, layout)
        matrices.append(_matrix(x, others, name, x.shape, _eight_bits))
    if (four or eight) and ((states and not four) or (len(matrices) > len(states) and not eight)):
        raise config_error(
            store.folder,
            f"load_in_4bit {four} and load_in_8bit {eight}, and the tensors have "
            f"{len(states)} matrices of 4 bits and {len(matrices) - len(states)} of 8",
        )
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
    double = settings.get("bnb_4bit_use_double_quant")
    if double not in (nested, None):
        raise config_error(
            store.folder,
            f"bnb_4bit_use_double_quant {double}, and {short_repr(absmax.name)} is {absmax.dtype}",
        )
    quant_type = settings.get("bnb_4bit_quant_type", kind)
    shape, sizes = state["shape"], [state["blocksize"], state.get("nested_blocksize", 1)]
    if kind not in BITSANDBYTES_VALUES or not state["quant_type"] == kind == quant_type:
        raise FileError(
            f"{x.file}: {short_repr(name)} is {short_repr(state['quant_type'])}, and "
            f"quantization_config says {short_repr(quant_type)}; both must be nf4, or fp4"
        )
    if not isinstance(shape, list) or not all(is_count(size) for size in [*shape, *sizes]):
        raise FileError(f"{x.file}: {short_repr(name)} has the sizes {short_repr([shape, *sizes])}")
    others = [absmax, table]
    if nested:
        suffixes = (".nested_absmax", ".nested_quant_map")
        others += [_beside(store, x, weight + end) for end in suffixes]
    unpack = partial(_unpack_four_bits, state)
    return _matrix(x, others, weight, tuple(shape), unpack, unread=(name,))


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


def _matrix(
    values: StoredTensor,
    others: Sequence[StoredTensor],
    name: str,
    shape: tuple[int, ...],
    unpack: Callable[..., Tensor | IntegerCodes],
    *,
    dtype: torch.dtype = torch.float32,
    unread: tuple[str, ...] = (),
) -> QuantizedMatrix:
    """Return a quantized matrix, which is stored plain under a name in a shape and a dtype."""
    size = math.prod(shape) * dtype.itemsize
    plain = replace(values, name=name, shape=shape, dtype=dtype, bytes=size)
    return QuantizedMatrix(values.name, tuple(x.name for x in others), plain, unpack, unread)


def _mismatch_error(values: StoredTensor, scales: StoredTensor, wanted: str) -> FileError:
    pair = [f"{short_repr(x.name)} is {x.dtype} {x.shape}" for x in (values, scales)]
    return FileError(f"{values.file}: {' and '.join(pair)}; they must be {wanted}")
