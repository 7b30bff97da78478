"""Checkpoints whose matrices are stored as small numbers with a scale per block (MXFP4 and block
FP8), read as if they were plain.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch
from jaxtyping import Float, Float8e4m3fn, Float32, UInt8
from torch import Tensor

from regard.errors import ArgumentError, ArgumentTypeError, FileError
from regard.files.safetensors_header import StoredTensor
from regard.files.safetensors_reader import DEFAULT_BUFFERING, ReadBuffering
from regard.models.checkpoint.store import Store
from regard.untrusted_text import short_repr

E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""What the three low bits of an MXFP4 number stand for; the fourth is the sign."""

PIECE = 2**16
"""Bytes that are unpacked at a time, so that what is needed beside the result stays small."""
_LARGEST_BLOCK = 1 << 14  # published files have 128


def unpack_mxfp4(
    blocks: UInt8[Tensor, "*b G 16"],
    scales: UInt8[Tensor, "*b G"],
    dtype: torch.dtype = torch.float32,
    *,
    piece: int = PIECE,
) -> Float[Tensor, "*b n"]:
    """Weights in blocks of 32 four-bit numbers that share a power of two, as `openai/gpt-oss` files
    hold their experts.

    w[g 32 + 2 i + h] = 2^(scales[g] - 127) * e2m1(nibble h of blocks[g, i]),  the low nibble first

    blocks [..., G, 16] and scales [..., G] give [..., G * 32]. Every value is exact in float32, and
    in bfloat16 too; a scale of 255 is the format's NaN.

    Args:
        blocks: two numbers a byte.
        scales: an exponent per block, biased by 127.
        dtype: of the result; float16 has too little range and is refused.
        piece: bytes of `blocks` that are unpacked at a time, a multiple of 16.

    Raises:
        ArgumentError: blocks are not [..., G, 16], or scales do not go with them.
        ArgumentTypeError: they are not uint8, or the dtype cannot hold the values.

    >>> blocks = torch.full((1, 16), 0x92, dtype=torch.uint8)
    >>> unpack_mxfp4(blocks, torch.tensor([128], dtype=torch.uint8))[:4]
    tensor([ 2., -1.,  2., -1.])

    Source: Open Compute Project 2023, OCP Microscaling Formats (MX) Specification 1.0, sections
    5.3.3, 5.4.1 and 6.3.
    """
    _check_bytes("blocks", blocks)
    _check_bytes("scales", scales)
    if blocks.ndim < 2 or blocks.shape[-1] != 16 or blocks.shape[:-1] != scales.shape:
        raise ArgumentError(
            f"blocks are {tuple(blocks.shape)} and scales {tuple(scales.shape)}; they must be "
            "[..., G, 16] and [..., G]"
        )
    if dtype not in (torch.float32, torch.float64, torch.bfloat16):
        raise ArgumentTypeError(
            f"dtype is {dtype}; it must be float32, float64 or bfloat16: others cannot hold "
            "scales from 2^-127 to 2^127"
        )
    values = torch.tensor([*E2M1, *(-x for x in E2M1)], device=blocks.device)
    # what each byte holds, as one number of eight bytes: that many times faster to look up than two
    # of four
    pairs = torch.stack((values.repeat(16), values.repeat_interleave(16)), -1).view(torch.int64)
    exponents = torch.arange(256, device=blocks.device)
    powers = (exponents.double() - 127).exp2().masked_fill(exponents == 255, torch.nan).float()
    out = torch.empty(scales.numel(), 32, dtype=dtype, device=blocks.device)
    flat, factors, step = blocks.flatten(), powers[scales.flatten().int(), None], piece // 16
    for i in range(0, scales.numel(), step):
        numbers = pairs[:, 0].index_select(0, flat[16 * i : 16 * (i + step)].int())
        out[i : i + step] = numbers.view(torch.float32).view(-1, 32) * factors[i : i + step]
    return out.reshape(*blocks.shape[:-2], 32 * blocks.shape[-2])


def unpack_fp8(
    weight: Float8e4m3fn[Tensor, "N K"],
    scale_inv: Float32[Tensor, "n k"],
    dtype: torch.dtype = torch.float32,
    *,
    block: int = 128,
) -> Float[Tensor, "N K"]:
    """A matrix of eight-bit floats with a factor for each square block, as DeepSeek-V3 files hold
    theirs.

    w[i, j] = float(weight[i, j]) * scale_inv[i // block, j // block]

    The product is made in float32 and rounded once.

    weight [N,K] and scale_inv [ceil(N / block), ceil(K / block)] give [N,K]. (The name is the
    files': the inverse of what the weight was multiplied by, and so a factor here.)

    Args:
        weight: the matrix, float8_e4m3fn.
        scale_inv: the factors.
        dtype: of the result.
        block: rows and columns of a block.

    Raises:
        ArgumentError: there is not one factor for each block, or block is less than 1.
        ArgumentTypeError: weight is not float8_e4m3fn, scale_inv not float32, or the dtype no plain
            one.

    >>> unpack_fp8(torch.ones(2, 2).to(torch.float8_e4m3fn), torch.tensor([[2.0, 3.0]]), block=2)
    Traceback (most recent call last):
    regard.errors.ArgumentError: scale_inv is (1, 2); a weight of (2, 2) in blocks of 2 x 2
    has (1, 1)
    >>> unpack_fp8(torch.ones(2, 4).to(torch.float8_e4m3fn), torch.tensor([[2.0, 3.0]]), block=2)[0]
    tensor([2., 2., 3., 3.])

    Source: DeepSeek-AI 2024 (arXiv 2412.19437), section 3.3.2.
    """
    if block < 1:
        raise ArgumentError(f"block is {block}; it must be at least 1")
    if weight.dtype != torch.float8_e4m3fn or scale_inv.dtype != torch.float32:
        raise ArgumentTypeError(
            f"weight is {weight.dtype} and scale_inv {scale_inv.dtype}; they must be "
            "float8_e4m3fn and float32"
        )
    if dtype not in (torch.float16, torch.bfloat16, torch.float32, torch.float64):
        raise ArgumentTypeError(
            f"dtype is {dtype}; it must be float16, bfloat16, float32 or float64"
        )
    wanted = tuple(-(-size // block) for size in weight.shape)
    if tuple(scale_inv.shape) != wanted:
        raise ArgumentError(
            f"scale_inv is {tuple(scale_inv.shape)}; a weight of {tuple(weight.shape)} in blocks "
            "of "
            f"{block} x {block} has {wanted}"
        )
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    for i, row in enumerate(scale_inv):
        rows = slice(i * block, (i + 1) * block)
        out[rows] = weight[rows].float() * row.repeat_interleave(block)[: weight.shape[1]]
    return out


def _check_bytes(name: str, x: Tensor) -> None:
    if x.dtype != torch.uint8:
        raise ArgumentTypeError(f"{name} are {x.dtype}; they must be uint8")


@dataclass(frozen=True)
class Pair:
    """A matrix that is stored as small numbers and their scales.

    Attributes:
        values, scales: the names of the two tensors.
        plain: what they stand for: its name, dtype and shape.
        unpack: (values, scales) -> that.
    """

    values: str
    scales: str
    plain: StoredTensor
    unpack: Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Unpacked(Store):
    """A store in which each pair of tensors is the one that they stand for, unpacked when it is
    read.

    Scales are read first: they are a sixteenth of what they belong to, or less.

    Attributes:
        packed: what the files hold.
        pairs: by the name of the plain tensor.
    """

    packed: Store
    pairs: Mapping[str, Pair]

    def read(
        self, names: Iterable[str] | None = None, buffering: ReadBuffering = DEFAULT_BUFFERING
    ) -> Iterator[tuple[str, Tensor]]:
        """As `Store.read`; the memory in use is also that of the scales, and of one plain
        tensor.
        """
        chosen = list(self.tensors if names is None else names)
        pairs = {self.pairs[n].values: self.pairs[n] for n in chosen if n in self.pairs}
        scales = dict(self.packed.read([pair.scales for pair in pairs.values()], buffering))
        whole = [n for n in chosen if n not in self.pairs]
        for name, tensor in self.packed.read([*whole, *pairs], buffering):
            if name in pairs:
                pair = pairs[name]
                yield pair.plain.name, pair.unpack(tensor, scales.pop(pair.scales))
            else:
                yield name, tensor


def unpacked(store: Store, said: Any) -> Store:
    """The store of a folder, with the block formats that its config.json names taken apart.

    "mxfp4" (gpt-oss) is `X_blocks` and `X_scales`, which are X: [..., in, out], where blocks are
    along `in`; "fp8" (DeepSeek-V3) is `X.weight` and `X.weight_scale_inv`.

    Args:
        store: the tensors of the folder.
        said: `quantization_config` of its config.json; None is a plain checkpoint.

    Raises:
        FileError: the method or a key of it is not understood; tensors do not make pairs, or not of
            fitting shapes.

    >>> store = Store(Path("folder"), {}, 0, {})
    >>> unpacked(store, None) is store
    True
    >>> unpacked(store, {"quant_method": "gptq"})
    Traceback (most recent call last):
    regard.errors.FileError: folder/config.json: quantization_config has the quant_method 'gptq';
    supported are 'mxfp4' and 'fp8': take a plain checkpoint
    """
    if said is None:
        return store
    method = said.get("quant_method") if isinstance(said, Mapping) else None
    if method == "mxfp4":
        pairs = _mxfp4(store)
    elif method == "fp8":
        pairs = _fp8(store, _block(store.folder, said))
    else:
        raise _config(
            store.folder,
            f"the quant_method {short_repr(method)}; supported are 'mxfp4' and 'fp8': take a plain "
            "checkpoint",
        )
    hidden = {name for pair in pairs for name in (pair.values, pair.scales)}
    found = {name: x for name, x in store.tensors.items() if name not in hidden}
    for pair in pairs:
        if pair.plain.name in found:
            raise FileError(
                f"{pair.plain.file}: {short_repr(pair.plain.name)} is stored plain, and packed "
                "too; "
                "keep one"
            )
        found[pair.plain.name] = pair.plain
    total = sum(x.bytes for x in found.values())
    by_name = {pair.plain.name: pair for pair in pairs}
    return Unpacked(store.folder, MappingProxyType(found), total, store.marks, store, by_name)


def _mxfp4(store: Store) -> list[Pair]:
    pairs = []
    for name, x in store.tensors.items():
        plain = name.removesuffix("_blocks")
        if plain == name:
            continue
        scales = _scales(store, x, plain + "_scales")
        fits = len(x.shape) > 2 and x.shape[-1] == 16 and scales.shape == x.shape[:-1]
        if not fits or {x.dtype, scales.dtype} != {torch.uint8}:
            raise _misfit(x, scales, "uint8 [..., G, 16] and uint8 [..., G]")
        shape = (*x.shape[:-3], 32 * x.shape[-2], x.shape[-3])
        pairs.append(Pair(name, scales.name, _plain(x, plain, shape, torch.bfloat16), _transposed))
    return pairs


def _transposed(blocks: Tensor, scales: Tensor) -> Tensor:
    # bfloat16 holds every value exactly
    return unpack_mxfp4(blocks, scales, torch.bfloat16).mT


def _fp8(store: Store, block: int) -> list[Pair]:
    pairs = []
    for name, x in store.tensors.items():
        if x.dtype != torch.float8_e4m3fn:
            continue
        scales = _scales(store, x, name + "_scale_inv")
        wanted = tuple(-(-size // block) for size in x.shape)
        if len(x.shape) != 2 or scales.shape != wanted or scales.dtype != torch.float32:
            raise _misfit(x, scales, f"a matrix and float32 {wanted}")
        plain = _plain(x, name, x.shape, torch.float32)
        pairs.append(Pair(name, scales.name, plain, partial(unpack_fp8, block=block)))
    return pairs


def _block(folder: Path, said: Mapping[str, Any]) -> int:
    """The side of a block."""
    fmt, sides = said.get("fmt", "e4m3"), said.get("weight_block_size")
    if fmt != "e4m3":
        raise _config(folder, f"the fmt {short_repr(fmt)}; supported is 'e4m3'")
    side = sides[0] if isinstance(sides, list) and len(sides) == 2 else None
    if type(side) is not int or not 1 <= side <= _LARGEST_BLOCK or sides != [side, side]:
        raise _config(
            folder, f"the weight_block_size {short_repr(sides)}; supported are square blocks"
        )
    return side


def _scales(store: Store, values: StoredTensor, name: str) -> StoredTensor:
    if name not in store.tensors:
        raise FileError(
            f"{values.file}: {short_repr(values.name)} is packed, and its scales "
            f"{short_repr(name)} are "
            "missing; "
            "is a shard missing?"
        )
    return store.tensors[name]


def _plain(
    values: StoredTensor, name: str, shape: tuple[int, ...], dtype: torch.dtype
) -> StoredTensor:
    return replace(
        values, name=name, shape=shape, dtype=dtype, bytes=math.prod(shape) * dtype.itemsize
    )


def _misfit(values: StoredTensor, scales: StoredTensor, wanted: str) -> FileError:
    said = [f"{short_repr(x.name)} is {x.dtype} {x.shape}" for x in (values, scales)]
    return FileError(f"{values.file}: {' and '.join(said)}; they must be {wanted}")


def _config(folder: Path, problem: str) -> FileError:
    return FileError(f"{folder / 'config.json'}: quantization_config has {problem}")
