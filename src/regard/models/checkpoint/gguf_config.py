"""The metadata of a GGUF file as the keys of a config.json: `llama.attention.head_count_kv` is
num_key_value_heads. `rope_freqs.weight` must be that of Llama 3.1 or 3.2.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from regard.errors import FileError
from regard.files.gguf_files import (
    GgufHeader,
    MetadataValue,
    invalid_gguf,
    read_plain,
)
from regard.positions import rope_frequencies
from regard.positions.scalings import Llama3
from regard.untrusted_text import short_repr

ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma")
"""The values of `general.architecture` that are read; each is also the name of a family."""

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of factors by which the rotary frequencies are divided, float32 [D / 2]."""
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3_KEYS = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

_KEYS = {
    "block_count": "num_hidden_layers",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "context_length": "max_position_embeddings",
    "rope.freq_base": "rope_theta",
}
"""Key after the architecture's name -> key of config.json."""
_REQUIRED = ("block_count", "embedding_length", "feed_forward_length", "attention.head_count")
READ_KEYS = (
    *_KEYS,
    "attention.key_length",
    "attention.value_length",
    "rope.dimension_count",
    "rope.scaling.type",
    "rope.scaling.factor",
    "rope.scaling.original_context_length",
    "rope.scaling.finetuned",
    "vocab_size",
    "expert_count",
    "expert_used_count",
)


def gguf_architecture(header: GgufHeader) -> str:
    """Return the architecture of a model, which is also the name of its family."""
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise invalid_gguf(
            header.file, f"general.type is {short_repr(kind)}; only models are read, type 'model'"
        )
    name = header.metadata.get("general.architecture")
    if name not in ARCHITECTURES:
        raise FileError(
            f"{header.file}: general.architecture is {short_repr(name)}; of GGUF files these are "
            f"read: {', '.join(ARCHITECTURES)}. Load the model's safetensors instead"
        )
    assert isinstance(name, str)
    return name


def gguf_config(header: GgufHeader, architecture: str) -> dict[str, Any]:
    """Return the metadata as the keys of a config.json."""

    def value(key: str, default: MetadataValue | None = None) -> Any:
        return header.metadata.get(f"{architecture}.{key}", default)

    if lacking := [key for key in _REQUIRED if value(key) is None]:
        raise invalid_gguf(
            header.file, f"the keys {', '.join(f'{architecture}.{k}' for k in lacking)} are missing"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise invalid_gguf(header.file, "it has no matrix token_embd.weight")
    config = {ours: value(key) for key, ours in _KEYS.items() if value(key) is not None}
    config.setdefault("num_key_value_heads", value("attention.head_count"))
    config |= {
        "model_type": architecture,
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "head_dim": _head_dim(header, value),
    }
    if architecture == "llama":
        config["attention_bias"] = "blk.0.attn_q.bias" in header.tensors
    if value("expert_count", 0) != 0:
        raise FileError(f"{header.file}: mixtures of experts in GGUF files are not read")
    scaling = _rope_scaling(header, value, config)
    return config if scaling is None else {**config, "rope_scaling": scaling}


def _head_dim(header: GgufHeader, value: Callable[..., Any]) -> int:
    heads, size = value("attention.head_count"), value("embedding_length")
    if type(heads) is not int or heads < 1 or type(size) is not int:
        raise invalid_gguf(
            header.file,
            f"attention.head_count is {short_repr(heads)} and embedding_length "
            f"{short_repr(size)}; they must be numbers, the same for all layers",
        )
    head_dim = value("attention.key_length", size // heads)
    for key in ("attention.value_length", "rope.dimension_count"):
        if value(key, head_dim) != head_dim:
            raise FileError(
                f"{header.file}: {key} is {short_repr(value(key))} and heads have {head_dim} dims; "
                "other sizes are not supported"
            )
    assert isinstance(head_dim, int)
    return head_dim


def _rope_scaling(
    header: GgufHeader, value: Callable[..., Any], config: Mapping[str, Any]
) -> dict[str, object] | None:
    kind = value("rope.scaling.type", "none")
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise FileError(
                f"{header.file}: it has {ROPE_FACTORS} and rope.scaling.type {short_repr(kind)}; "
                "both at once are not supported"
            )
        return _llama3_scaling(header, config)
    factor = value("rope.scaling.factor")
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        original = value("rope.scaling.original_context_length")
        return {
            "rope_type": "yarn",
            "factor": factor,
            "original_max_position_embeddings": original,
        }
    raise FileError(
        f"{header.file}: rope.scaling.type is {short_repr(kind)}; these are read: none, linear, "
        "yarn"
    )


def _llama3_scaling(header: GgufHeader, config: Mapping[str, Any]) -> dict[str, object]:
    """Return the rope_scaling whose frequencies the factors of the file give."""
    tensor, D = header.tensors[ROPE_FACTORS], config["head_dim"]
    if tensor.format.name == "F32" and tensor.shape == (D // 2,):
        factors = read_plain(header, tensor, torch.float32)
        base = config.get("rope_theta", 10000.0)
        plain = rope_frequencies(D, base).inv_freq
        for factor in _LLAMA3_FACTORS:
            wanted = rope_frequencies(D, base, scaling=Llama3(factor, 1.0, 4.0, 8192)).inv_freq
            # computed in fp32 by the program that wrote the file
            if torch.allclose(plain / factors.double(), wanted, rtol=1e-5, atol=0):
                return {"rope_type": "llama3", "factor": factor, **_LLAMA3_KEYS}
    raise FileError(
        f"{header.file}: {ROPE_FACTORS} is {tensor.format.name} {tensor.shape} and not one of the "
        "factors of Llama 3.1 and 3.2, 8 and 32; load the model's safetensors instead"
    )
