"""The architectures of GGUF files, and their metadata as the keys of a config.json:
`llama.attention.head_count_kv` is num_key_value_heads.

A key becomes the first of its names in `_KEYS` that the config class of the family has. What
llama.cpp's code knows of an architecture and its files do not say is in `ARCHITECTURES`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import torch

from regard.configs import config_class
from regard.errors import FileError
from regard.files.gguf_files import GgufHeader, MetadataValue, invalid_gguf, read_plain
from regard.positions import rope_frequencies
from regard.positions.scalings import Llama3
from regard.untrusted_text import short_repr

Config = dict[str, Any]


@dataclass(frozen=True)
class Architecture:
    """What an architecture of llama.cpp is here.

    Attributes:
        model_type: the family with the same weights.
        constants: keys of config.json that its files do not have.
        complete: (keys of config.json, header) -> further keys.
        pairs: whether the rows of queries and keys are in the order of interleaved rotary
            positions, and in the family's checkpoints in halves.
        fused_heads: whether `attn_qkv` has all queries, all keys and all values, and in the
            family's checkpoints the heads of each key head one after the other.
        norm_offset: what was added to the weights of norms.
        joined: end of a stored name -> the tensors whose rows it has, one after the other.
        transposed: parts of the stored names of matrices that the family stores as [in, out].
        reads: further keys that `complete` reads.
        alternatives: part of a stored name -> a tensor of its layer, and whether that must be there
            for the name to be meant; two names of the family are one in the file.
        gating: the number of the function that makes weights of experts: 1 softmax, 2 sigmoid.
    """

    model_type: str
    constants: Mapping[str, object] = field(default_factory=dict)
    complete: Callable[[Config, GgufHeader], Config] = lambda config, header: {}
    pairs: bool = False
    fused_heads: bool = False
    norm_offset: int = 0
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    transposed: tuple[str, ...] = ()
    reads: tuple[str, ...] = ()
    alternatives: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    gating: int = 1


def _llama(_: Config, header: GgufHeader) -> Config:
    experts = header.metadata.get("llama.expert_count", 0)
    return {"model_type": "mixtral"} if experts != 0 else {}


def _gemma_scale(layers_of_27b: int) -> Callable[[Config, GgufHeader], Config]:
    """Return the rule by which the sizes give the scale of scores: the models of 27B have another,
    and llama.cpp tells them by the number of layers.
    """

    def complete(config: Config, _: GgufHeader) -> Config:
        is_27b = config["num_hidden_layers"] == layers_of_27b
        size = config["hidden_size"] // config["num_attention_heads"]
        return {"query_pre_attn_scalar": size if is_27b else config["head_dim"]}

    return complete


def _olmo2(_: Config, header: GgufHeader) -> Config:
    return {"model_type": "olmo3"} if "olmo2.attention.sliding_window" in header.metadata else {}


def _bert(_: Config, header: GgufHeader) -> Config:
    if header.metadata.get("bert.attention.causal", False) is not False:
        raise FileError(f"{header.file}: bert.attention.causal is not false; no such BERT is known")
    return {}


def _exaone4(config: Config, header: GgufHeader) -> Config:
    if "exaone4.attention.sliding_window" in header.metadata:
        return {}
    return {"layer_types": ["full_attention"] * min(config["num_hidden_layers"], 1 << 16)}


def _falcon(_: Config, header: GgufHeader) -> Config:
    has_two_norms = "blk.0.attn_norm_2.weight" in header.tensors
    return {
        "new_decoder_architecture": has_two_norms,
        "multi_query": header.metadata.get("falcon.attention.head_count_kv") == 1,
    }


def _starcoder(_: Config, header: GgufHeader) -> Config:
    return {"multi_query": header.metadata.get("starcoder.attention.head_count_kv", 1) == 1}


def _mpt(_: Config, header: GgufHeader) -> Config:
    clamp = header.metadata.get("mpt.attention.clamp_kqv", 0.0)
    return {"attn_config": {"alibi": True, "clip_qkv": clamp or None}}


ARCHITECTURES: Mapping[str, Architecture] = {
    "arcee": Architecture("arcee", pairs=True),
    "bert": Architecture("bert", complete=_bert, reads=("attention.causal", "pooling_type")),
    "bloom": Architecture("bloom", fused_heads=True),
    "cohere2": Architecture("cohere2"),
    "command-r": Architecture("cohere"),
    "ernie4_5": Architecture("ernie4_5"),
    "exaone4": Architecture("exaone4", complete=_exaone4),
    "falcon": Architecture(
        "falcon",
        complete=_falcon,
        fused_heads=True,
        alternatives={
            "input_layernorm": ("attn_norm_2.weight", False),
            "ln_mlp": ("attn_norm_2.weight", True),
        },
    ),
    "gemma": Architecture("gemma", norm_offset=1),
    "gemma2": Architecture("gemma2", complete=_gemma_scale(46), norm_offset=1),
    "gemma3": Architecture("gemma3_text", complete=_gemma_scale(62), norm_offset=1),
    "glm4": Architecture("glm4"),
    "gpt2": Architecture("gpt2", transposed=("c_attn", "c_fc", "c_proj")),
    "gptneox": Architecture("gpt_neox", fused_heads=True),
    "granite": Architecture("granite", pairs=True),
    "granitemoe": Architecture(
        "granitemoe",
        pairs=True,
        joined={
            "block_sparse_moe.input_linear.weight": (
                "blk.{}.ffn_gate_exps.weight",
                "blk.{}.ffn_up_exps.weight",
            )
        },
    ),
    "llama": Architecture("llama", complete=_llama, pairs=True),
    "minimax-m2": Architecture("minimax_m2", gating=2),
    "mpt": Architecture("mpt", complete=_mpt, reads=("attention.clamp_kqv",)),
    "nemotron": Architecture("nemotron", norm_offset=1),
    "olmo": Architecture("olmo", pairs=True),
    "olmo2": Architecture("olmo2", complete=_olmo2),
    "olmoe": Architecture("olmoe"),
    "phi2": Architecture("phi"),
    "phi3": Architecture("phi3"),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", {"norm_topk_prob": True}),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", {"no_rope_layer_interval": 4}, pairs=True),
    "stablelm": Architecture("stablelm"),
    "starcoder": Architecture(
        "gpt_bigcode", complete=_starcoder, reads=("attention.head_count_kv",)
    ),
    "starcoder2": Architecture("starcoder2"),
}
"""The values of `general.architecture` that are read."""

_KEYS: Mapping[str, tuple[str, ...]] = {
    "block_count": ("num_hidden_layers", "n_layer", "n_layers"),
    "embedding_length": ("hidden_size", "n_embd", "d_model"),
    "feed_forward_length": ("intermediate_size", "n_inner", "ffn_hidden_size"),
    "context_length": ("max_position_embeddings", "n_positions", "max_seq_len"),
    "attention.head_count": ("num_attention_heads", "n_head", "n_heads"),
    "attention.head_count_kv": ("num_key_value_heads", "num_kv_heads"),
    "attention.layer_norm_rms_epsilon": ("rms_norm_eps", "norm_eps"),
    "attention.layer_norm_epsilon": (
        "layer_norm_eps",
        "layer_norm_epsilon",
        "norm_epsilon",
        "norm_eps",
    ),
    "attention.sliding_window": ("sliding_window",),
    "attention.clamp_kqv": ("clip_qkv",),
    "attention.scale": ("attention_multiplier",),
    "attn_logit_softcapping": ("attn_logit_softcapping",),
    "final_logit_softcapping": ("final_logit_softcapping",),
    "embedding_scale": ("embedding_multiplier",),
    "residual_scale": ("residual_multiplier",),
    "logit_scale": ("logits_scaling", "logit_scale"),
    "expert_count": ("num_experts", "num_local_experts"),
    "expert_used_count": ("num_experts_per_tok",),
    "expert_feed_forward_length": ("moe_intermediate_size", "intermediate_size"),
    "expert_shared_feed_forward_length": ("shared_expert_intermediate_size",),
    "expert_weights_norm": ("norm_topk_prob",),
    "rope.freq_base": ("rope_theta", "rotary_emb_base"),
    "rope.freq_base_swa": ("rope_local_base_freq",),
    "token_type_count": ("type_vocab_size",),
    "use_parallel_residual": ("use_parallel_residual",),
}
"""Key after the architecture's name -> its possible names in config.json."""
_REQUIRED = ("block_count", "embedding_length", "attention.head_count")
_READ = frozenset(
    {
        "attention.key_length",
        "attention.value_length",
        "attention.sliding_window_pattern",
        "rope.dimension_count",
        "rope.scaling.attn_factor",
        "rope.scaling.factor",
        "rope.scaling.finetuned",
        "rope.scaling.original_context_length",
        "rope.scaling.type",
        "rope.scaling.yarn_beta_fast",
        "rope.scaling.yarn_beta_slow",
        "tensor_data_layout",
        "vocab_size",
    }
)
"""Further keys that are read, and those that say nothing of the network."""
_BIASES: Mapping[str, tuple[str, ...]] = {
    "attention_bias": ("attn_q.bias", "attn_qkv.bias"),
    "attention_out_bias": ("attn_output.bias",),
    "bias": ("attn_qkv.bias",),
    "mlp_bias": ("ffn_up.bias",),
    "use_bias": ("attn_output.bias",),
    "use_qkv_bias": ("attn_q.bias",),
}
"""Key of config.json -> the tensors of the first layer that show it."""

ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of factors by which the rotary frequencies are divided, float32 [D / 2]."""
LONG_FACTORS = ("rope_factors_short.weight", "rope_factors_long.weight")
"""The same for texts within, and beyond, the length of the training: LongRoPE."""
_LLAMA3_FACTORS = (8.0, 32.0)
_LLAMA3_KEYS = {
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}


def gguf_architecture(header: GgufHeader) -> str:
    """Return the name of a model's architecture, a key of `ARCHITECTURES`."""
    kind = header.metadata.get("general.type", "model")
    if kind != "model":
        raise invalid_gguf(
            header.file, f"general.type is {short_repr(kind)}; only models are read, type 'model'"
        )
    name = header.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise FileError(
            f"{header.file}: general.architecture is {short_repr(name)}; of GGUF files these are "
            f"read: {', '.join(ARCHITECTURES)}. Load the model's safetensors instead"
        )
    return name


def gguf_config(header: GgufHeader, architecture: str) -> tuple[Config, list[str]]:
    """Return the metadata as the keys of a config.json, and the keys that are not understood."""
    its = ARCHITECTURES[architecture]
    prefix = f"{architecture}."
    entries = {
        k.removeprefix(prefix): x for k, x in header.metadata.items() if k.startswith(prefix)
    }
    if lacking := [key for key in _REQUIRED if key not in entries]:
        raise invalid_gguf(
            header.file, f"the keys {', '.join(prefix + k for k in lacking)} are missing"
        )
    embedding = header.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise invalid_gguf(header.file, "it has no matrix token_embd.weight")
    heads, size = entries["attention.head_count"], entries["embedding_length"]
    if type(heads) is not int or heads < 1 or type(size) is not int:
        raise invalid_gguf(
            header.file,
            f"attention.head_count is {short_repr(heads)} and embedding_length "
            f"{short_repr(size)}; they must be numbers, the same for all layers",
        )
    entries.setdefault("attention.head_count_kv", heads)
    head_dim = entries.get("attention.key_length", size // heads)
    if type(head_dim) is not int or head_dim < 1:
        raise invalid_gguf(header.file, f"attention.key_length is {short_repr(head_dim)}")
    first = {"head_dim": head_dim, "num_hidden_layers": entries["block_count"]}
    first |= {"hidden_size": size, "num_attention_heads": heads}
    if type(entries["block_count"]) is not int or entries["block_count"] < 1:
        raise invalid_gguf(header.file, f"block_count is {short_repr(entries['block_count'])}")
    further = its.complete(first, header)
    model_type = further.get("model_type", its.model_type)
    names = _names_of(model_type)
    config: Config = {"model_type": model_type}
    # as in llama.cpp, a file that does not speak of windows has none
    if "sliding_window" in names and "use_sliding_window" not in names:
        config["sliding_window"] = None
    unknown: list[str] = []
    for key, value in entries.items():
        ours = next((name for name in _KEYS.get(key, ()) if name in names), None)
        if ours is not None:
            config[ours] = value
        elif key not in (*its.reads, *_READ) and not _says_nothing(its, key, value, entries):
            unknown.append(prefix + key)
    config |= {k: x for k, x in {**its.constants, **further}.items() if k in {*names, "model_type"}}
    facts: Config = {
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in header.tensors,
        "head_dim": head_dim,
        "rope_scaling": _rope_scaling(header, entries, config, head_dim),
    }
    facts |= {
        key: any(f"blk.0.{name}" in header.tensors for name in tensors)
        for key, tensors in _BIASES.items()
    }
    config |= {k: x for k, x in facts.items() if k in names and x is not None}
    config |= _rotary_dims(header, entries, names, head_dim) | _layer_types(entries, names)
    if "original_max_position_embeddings" in names and LONG_FACTORS[0] in header.tensors:
        original = entries.get("rope.scaling.original_context_length")
        config["original_max_position_embeddings"] = original
    return config, unknown


def _names_of(model_type: str) -> frozenset[str]:
    """Return the keys of config.json that a family has."""
    cls = config_class(model_type)
    assert cls is not None
    return frozenset(x.name for x in fields(cls))


def _says_nothing(
    its: Architecture, key: str, value: MetadataValue, entries: Mapping[str, MetadataValue]
) -> bool:
    """Return whether a key has the value that every model without a name for it has."""
    usual: Mapping[str, object] = {
        "attention.causal": True,
        "attention.clamp_kqv": 0.0,
        "attention.head_count_kv": entries["attention.head_count"],
        "attention.layer_norm_epsilon": 1e-5,
        "attention.max_alibi_bias": 8.0,
        "expert_count": 0,
        "expert_gating_func": its.gating,
        "expert_used_count": 0,
        "expert_weights_scale": 1.0,
        "feed_forward_length": 4 * int(str(entries["embedding_length"])),
        "use_parallel_residual": True,
    }
    return key == "context_length" or (key in usual and value == usual[key])


def _layer_types(entries: Mapping[str, MetadataValue], names: frozenset[str]) -> Config:
    """Return which layers have windows, if the file says so."""
    pattern = entries.get("attention.sliding_window_pattern")
    if pattern is None or "layer_types" not in names:
        return {}
    layers = entries["block_count"]
    if type(pattern) is int and type(layers) is int and pattern > 0 and 0 < layers < 1 << 16:
        pattern = [(i + 1) % pattern != 0 for i in range(layers)]
    windows = pattern if isinstance(pattern, list) else []
    return {"layer_types": ["sliding_attention" if x else "full_attention" for x in windows]}


def _rotary_dims(
    header: GgufHeader, entries: Mapping[str, Any], names: frozenset[str], head_dim: int
) -> Config:
    """Return the part of a head that rotates, where the family has such a key."""
    if entries.get("attention.value_length", head_dim) != head_dim:
        raise FileError(
            f"{header.file}: attention.value_length is "
            f"{short_repr(entries['attention.value_length'])} and heads have {head_dim} dims; "
            "other sizes are not supported"
        )
    dims = entries.get("rope.dimension_count", head_dim)
    partial = next((x for x in ("partial_rotary_factor", "rotary_pct") if x in names), None)
    if partial is not None and type(dims) is int and 0 < dims <= head_dim:
        return {partial: dims / head_dim}
    if dims != head_dim and names & {"rope_theta", "rotary_emb_base"}:
        raise FileError(
            f"{header.file}: rope.dimension_count is {short_repr(dims)} and heads have {head_dim} "
            "dims; other sizes are not supported"
        )
    return {}


def _rope_scaling(
    header: GgufHeader, entries: Mapping[str, Any], config: Config, head_dim: int
) -> dict[str, object] | None:
    kind = entries.get("rope.scaling.type", "none")
    if ROPE_FACTORS in header.tensors:
        if kind != "none":
            raise FileError(
                f"{header.file}: it has {ROPE_FACTORS} and rope.scaling.type {short_repr(kind)}; "
                "both at once are not supported"
            )
        return _llama3_scaling(header, config, head_dim)
    factor = entries.get("rope.scaling.factor")
    original = entries.get("rope.scaling.original_context_length")
    if all(name in header.tensors for name in LONG_FACTORS):
        tensors = [header.tensors[name] for name in LONG_FACTORS]
        if any(x.format.name != "F32" or x.shape != tensors[0].shape for x in tensors):
            raise invalid_gguf(
                header.file, f"{' and '.join(LONG_FACTORS)} are not alike, or not F32"
            )
        short, long = (read_plain(header, x, torch.float32).flatten().tolist() for x in tensors)
        return {"rope_type": "longrope", "short_factor": short, "long_factor": long} | {
            "attention_factor": entries.get("rope.scaling.attn_factor")
        }
    if kind == "none":
        return None
    if kind == "linear":
        return {"rope_type": "linear", "factor": factor}
    if kind == "yarn":
        scaling = {"rope_type": "yarn", "factor": factor}
        scaling["original_max_position_embeddings"] = original
        for name in ("beta_fast", "beta_slow"):
            if (value := entries.get(f"rope.scaling.yarn_{name}")) is not None:
                scaling[name] = value
        return scaling
    raise FileError(
        f"{header.file}: rope.scaling.type is {short_repr(kind)}; these are read: none, linear, "
        "yarn"
    )


def _llama3_scaling(header: GgufHeader, config: Config, head_dim: int) -> dict[str, object]:
    """Return the rope_scaling whose frequencies the factors of the file give."""
    tensor = header.tensors[ROPE_FACTORS]
    if tensor.format.name == "F32" and tensor.shape == (head_dim // 2,):
        factors = read_plain(header, tensor, torch.float32)
        base = config.get("rope_theta", 10000.0)
        plain = rope_frequencies(head_dim, base).inv_freq
        for factor in _LLAMA3_FACTORS:
            scaling = Llama3(factor, 1.0, 4.0, 8192)
            wanted = rope_frequencies(head_dim, base, scaling=scaling).inv_freq
            # computed in fp32 by the program that wrote the file
            if torch.allclose(plain / factors.double(), wanted, rtol=1e-5, atol=0):
                return {"rope_type": "llama3", "factor": factor, **_LLAMA3_KEYS}
    raise FileError(
        f"{header.file}: {ROPE_FACTORS} is {tensor.format.name} {tensor.shape} and not one of the "
        "factors of Llama 3.1 and 3.2, 8 and 32; load the model's safetensors instead"
    )
