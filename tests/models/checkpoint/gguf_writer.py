"""Writes small GGUF files from the format's specification, and quantizes and dequantizes blocks by
plain loops. Nothing here is shared with the reader.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

NUMBER = {"F32": 0, "F16": 1, "Q4_0": 2, "Q4_1": 3, "Q5_0": 6, "Q5_1": 7, "Q8_0": 8} | {
    "Q4_K": 12,
    "Q5_K": 13,
    "Q6_K": 14,
    "BF16": 30,
}
BLOCK = {"Q4_0": (32, 18), "Q5_0": (32, 22), "Q8_0": (32, 34)} | {
    "Q4_1": (32, 20),
    "Q5_1": (32, 24),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
    "Q6_K": (256, 210),
}
"""Numbers and bytes of a block."""


def string(text: str | bytes) -> bytes:
    raw = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(raw)) + raw


def value(x: Any) -> bytes:
    """The type of a value, and the value: uint32, float32, bool, string, or an array of these."""
    if isinstance(x, bool):
        return struct.pack("<I?", 7, x)
    if isinstance(x, int):
        return struct.pack("<II", 4, x) if 0 <= x < 2**32 else struct.pack("<Iq", 11, x)
    if isinstance(x, float):
        return struct.pack("<If", 6, x)
    if isinstance(x, str):
        return struct.pack("<I", 8) + string(x)
    items = [value(item) for item in x]
    return (
        struct.pack("<I", 9)
        + items[0][:4]
        + struct.pack("<Q", len(x))
        + b"".join(item[4:] for item in items)
    )


def header(
    metadata: Mapping[str, Any],
    infos: Sequence[tuple[str, Sequence[int], int, int]],
    version: int = 3,
) -> bytes:
    """The header; an info is a name, a shape, the number of a format, and an offset."""
    out = b"GGUF" + struct.pack("<IQQ", version, len(infos), len(metadata))
    out += b"".join(string(key) + value(x) for key, x in metadata.items())
    for name, shape, kind, offset in infos:
        out += string(name) + struct.pack("<I", len(shape))
        out += b"".join(struct.pack("<Q", size) for size in reversed(shape))
        out += struct.pack("<IQ", kind, offset)
    return out


def pad(raw: bytes, to: int = 32) -> bytes:
    return raw + bytes(-len(raw) % to)


def write(
    path: Path,
    metadata: Mapping[str, Any],
    tensors: Mapping[str, tuple[str, tuple[int, ...], bytes]],
) -> Path:
    """Write a file; a tensor is a format, a shape and its bytes."""
    infos, data = [], b""
    for name, (kind, shape, raw) in tensors.items():
        infos.append((name, shape, NUMBER[kind], len(data)))
        data += pad(raw)
    path.write_bytes(pad(header(metadata, infos)) + data)
    return path


def encode(kind: str, x: Tensor) -> bytes:
    """The bytes of a tensor; a block format gets random codes and factors, near the size of x."""
    if kind == "F32":
        return x.float().numpy().tobytes()
    if kind == "F16":
        return x.half().numpy().tobytes()
    if kind == "BF16":
        return x.bfloat16().view(torch.int16).numpy().tobytes()
    return random_blocks(kind, x.shape[0], x.shape[1], float(x.std())).tobytes()


def random_blocks(kind: str, rows: int, columns: int, size: float = 1.0) -> Any:
    """Blocks [rows, bytes] of random codes whose numbers have about the given size."""
    numbers, count = BLOCK[kind]
    random = np.random.default_rng(rows * 1000 + columns)
    raw = random.integers(0, 256, (rows, columns // numbers, count), dtype=np.uint8)
    largest = {"Q4_0": 8, "Q4_1": 8, "Q5_0": 16, "Q5_1": 16, "Q8_0": 127} | {
        "Q4_K": 900,
        "Q5_K": 1800,
        "Q6_K": 4000,
    }
    factor = random.normal(size=(*raw.shape[:2], 2)) * 2 * size / largest[kind]
    pair = (0, 2)
    places = {"Q6_K": (208,), "Q4_K": pair, "Q5_K": pair, "Q4_1": pair, "Q5_1": pair}.get(
        kind, (0,)
    )
    for i, place in enumerate(places):
        grown = np.abs(factor[..., i]) * (6 if i else 1)  # so that means are near zero
        if kind.endswith("_1"):  # the minimum, about minus the middle code times the factor
            grown = -largest[kind] * np.abs(factor[..., 0]) if i else grown
        half = (grown if len(places) > 1 else factor[..., i]).astype("<f2")
        raw[..., place : place + 2] = half.view(np.uint8).reshape(*half.shape, 2)
    return raw.reshape(rows, -1)


def half(raw: bytes) -> float:
    return float(struct.unpack("<e", raw)[0])


def signed(byte: int) -> int:
    return byte - 256 if byte > 127 else byte


def numbers_of(kind: str, raw: Any) -> Tensor:
    """Dequantize blocks [rows, bytes] in fp64, one number at a time."""
    rows = []
    for row in np.asarray(raw):
        size = BLOCK[kind][1]
        blocks = [bytes(row[i : i + size]) for i in range(0, len(row), size)]
        rows.append([x for block in blocks for x in ORACLE[kind](block)])
    return torch.tensor(rows, dtype=torch.float64)


def q8_0(b: bytes) -> list[float]:
    return [half(b[:2]) * signed(b[2 + i]) for i in range(32)]


def q4_0(b: bytes) -> list[float]:
    out = [0.0] * 32
    for i in range(16):
        out[i] = half(b[:2]) * ((b[2 + i] & 15) - 8)
        out[i + 16] = half(b[:2]) * ((b[2 + i] >> 4) - 8)
    return out


def q5_0(b: bytes) -> list[float]:
    out = [0.0] * 32
    fifth = struct.unpack("<I", b[2:6])[0]
    for i in range(16):
        low, high = b[6 + i] & 15, b[6 + i] >> 4
        out[i] = half(b[:2]) * (low + 16 * (fifth >> i & 1) - 16)
        out[i + 16] = half(b[:2]) * (high + 16 * (fifth >> (i + 16) & 1) - 16)
    return out


def q4_1(b: bytes) -> list[float]:
    codes = [x & 15 for x in b[4:]] + [x >> 4 for x in b[4:]]
    return [half(b[:2]) * code + half(b[2:4]) for code in codes]


def q5_1(b: bytes) -> list[float]:
    fifth = struct.unpack("<I", b[4:8])[0]
    low = [x & 15 for x in b[8:]] + [x >> 4 for x in b[8:]]
    codes = [code + 16 * (fifth >> i & 1) for i, code in enumerate(low)]
    return [half(b[:2]) * code + half(b[2:4]) for code in codes]


def group(b: bytes, g: int) -> tuple[int, int]:
    """The 6-bit factor and minimum of group g of Q4_K and Q5_K."""
    s = b[4:16]
    if g < 4:
        return s[g] & 63, s[g + 4] & 63
    return (s[g + 4] & 15) + 16 * (s[g - 4] >> 6), (s[g + 4] >> 4) + 16 * (s[g] >> 6)


def q4_k(b: bytes) -> list[float]:
    d, least, out = half(b[:2]), half(b[2:4]), []
    for g in range(8):
        s, m = group(b, g)
        for i in range(32):
            byte = b[16 + 32 * (g // 2) + i]
            out.append(d * s * (byte >> 4 if g % 2 else byte & 15) - least * m)
    return out


def q5_k(b: bytes) -> list[float]:
    d, least, out = half(b[:2]), half(b[2:4]), []
    for g in range(8):
        s, m = group(b, g)
        for i in range(32):
            byte = b[48 + 32 * (g // 2) + i]
            code = (byte >> 4 if g % 2 else byte & 15) + 16 * (b[16 + i] >> g & 1)
            out.append(d * s * code - least * m)
    return out


def q6_k(b: bytes) -> list[float]:
    d, out = half(b[208:]), [0.0] * 256
    for part in range(2):
        low, high = b[64 * part :], b[128 + 32 * part :]
        for i in range(32):
            codes = (
                (low[i] & 15) | (high[i] & 3) << 4,
                (low[i + 32] & 15) | (high[i] >> 2 & 3) << 4,
                low[i] >> 4 | (high[i] >> 4 & 3) << 4,
                low[i + 32] >> 4 | (high[i] >> 6 & 3) << 4,
            )
            for j, code in enumerate(codes):
                place = 128 * part + 32 * j + i
                out[place] = d * signed(b[192 + place // 16]) * (code - 32)
    return out


ORACLE = {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1, "Q5_0": q5_0, "Q5_1": q5_1} | {
    "Q4_K": q4_k,
    "Q5_K": q5_k,
    "Q6_K": q6_k,
}

LAYER = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def name_in_file(name: str) -> str:
    """The name of a tensor of Hugging Face's checkpoints in a GGUF file."""
    whole = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
    stem, end = name.rsplit(".", 1)
    if stem in whole:
        return f"{whole[stem]}.{end}"
    _, _, layer, part = stem.split(".", 3)
    return f"blk.{layer}.{LAYER[part]}.{end}"


def interleave(x: Tensor, heads: int) -> Tensor:
    """Rows of queries or keys in the order of llama.cpp: of a head, 0, D/2, 1, D/2 + 1, ..."""
    size = len(x) // heads
    order = [
        h * size + j * size // 2 + i
        for h in range(heads)
        for i in range(size // 2)
        for j in range(2)
    ]
    return x[order]


def metadata_of(config: Any, architecture: str) -> dict[str, Any]:
    """The keys of a model, as llama.cpp's converter writes them."""
    keys = {
        "block_count": config.num_hidden_layers,
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "attention.key_length": config.head_dim,
        "attention.value_length": config.head_dim,
        "rope.freq_base": config.rope_theta,
    }
    general = {"general.architecture": architecture, "general.name": "tiny", "general.file_type": 1}
    return {**general, **{f"{architecture}.{k}": v for k, v in keys.items()}}
