"""The architectures of GGUF files: what llama.cpp's code and its converter know of each, and its
files do not say.

Source: llama.cpp, `conversion`, `src/models`, and the library `gguf`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from regard.configs.base import FULL
from regard.configs.hybrid import LINEAR
from regard.errors import FileError
from regard.files.gguf_files import GgufHeader, invalid_gguf
from regard.models.assembly.gated_delta import GATE, QKV, STORED_DELTA
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable, TensorRule, reshaped, stacked_rows
from regard.untrusted_text import short_repr

Config = dict[str, Any]


@dataclass(frozen=True)
class GgufKeys:
    """What a file says of its model.

    Attributes:
        config: the sizes that every model has, as keys of config.json.
        keys: the keys of the architecture, without its name: "attention.head_count" and so on.
    """

    config: Config
    keys: Mapping[str, Any]
    header: GgufHeader

    def number(self, name: str, default: int | None = None) -> int:
        """Return a key that must be a number above 0, the same for all layers."""
        value = self.keys.get(name, default)
        if isinstance(value, list) and value and all(x == value[0] for x in value):
            value = value[0]
        if type(value) is not int or value < 1:
            raise invalid_gguf(
                self.header.file,
                f"{name} is {short_repr(value)}; it must be a number above 0, the same for all "
                "layers",
            )
        return value

    def by_layer(self, name: str) -> list[Any]:
        """Return one value for each layer, of a key that may be one for all."""
        value, layers = self.keys.get(name), min(self.config["num_hidden_layers"], 1 << 16)
        return value[:layers] if isinstance(value, list) else [value] * layers


class JoinedTensors(NamedTuple):
    """The tensors of a layer {} of which a stored tensor is made, and how."""

    files: tuple[str, ...]
    make: Callable[..., Tensor]


@dataclass(frozen=True)
class Architecture:
    """What an architecture of llama.cpp is here.

    Attributes:
        model_type: the family with the same weights.
        constants: keys of config.json that its files do not have.
        complete: what a file says -> further keys of config.json.
        pairs: whether the rows of queries and keys are in the order of interleaved rotary
            positions, and in the family's checkpoints in halves.
        fused_heads: whether `attn_qkv` has all queries, all keys and all values, and in the
            family's checkpoints the heads of each key head one after the other.
        tiled_values: whether value head i of a layer of Gated DeltaNet uses key head i % G, and in
            the family's checkpoints i // (N / G).
        gated_queries: whether `attn_q` has the rows of each head's gate behind those of its query.
        norm_offset: what was added to the weights of norms.
        names: entries of the family's name table for tensors in the layout of the file, in place of
            those for the same parameters.
        joined: end of a stored name -> the tensors of which it is made, if the file has them.
        reads: further keys that `complete` reads.
        alternatives: part of a stored name -> a tensor of its layer, and whether that must be there
            for the name to be meant; two names of the family are one in the file.
        gating: the number of the function that makes weights of experts: 1 softmax, 2 sigmoid.
    """

    model_type: str
    constants: Mapping[str, object] = field(default_factory=dict)
    complete: Callable[[GgufKeys], Config] = lambda its: {}
    pairs: bool = False
    fused_heads: bool = False
    tiled_values: bool = False
    gated_queries: bool = False
    norm_offset: int = 0
    names: NameTable = field(default_factory=dict)
    joined: Mapping[str, JoinedTensors] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    alternatives: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    gating: int = 1


def _llama(its: GgufKeys) -> Config:
    return {"model_type": "mixtral"} if its.keys.get("expert_count", 0) != 0 else {}


def _gemma_scale(layers_of_27b: int) -> Callable[[GgufKeys], Config]:
    """Return the rule by which the sizes give the scale of scores: the models of 27B have another,
    and llama.cpp tells them by the number of layers.
    """

    def complete(its: GgufKeys) -> Config:
        is_27b = its.config["num_hidden_layers"] == layers_of_27b
        size = its.config["hidden_size"] // its.config["num_attention_heads"]
        return {"query_pre_attn_scalar": size if is_27b else its.config["head_dim"]}

    return complete


def _olmo2(its: GgufKeys) -> Config:
    return {"model_type": "olmo3"} if "attention.sliding_window" in its.keys else {}


def _bert(its: GgufKeys) -> Config:
    if its.keys.get("attention.causal", False) is not False:
        raise FileError(
            f"{its.header.file}: bert.attention.causal is not false; no such BERT is known"
        )
    return {}


def _exaone4(its: GgufKeys) -> Config:
    if "attention.sliding_window" in its.keys:
        return {}
    return {"layer_types": ["full_attention"] * min(its.config["num_hidden_layers"], 1 << 16)}


def _falcon(its: GgufKeys) -> Config:
    has_two_norms = "blk.0.attn_norm_2.weight" in its.header.tensors
    is_multi_query = its.keys.get("attention.head_count_kv") == 1
    return {"new_decoder_architecture": has_two_norms, "multi_query": is_multi_query}


def _starcoder(its: GgufKeys) -> Config:
    return {"multi_query": its.keys.get("attention.head_count_kv", 1) == 1}


def _mpt(its: GgufKeys) -> Config:
    clamp = its.keys.get("attention.clamp_kqv", 0.0)
    return {"attn_config": {"alibi": True, "clip_qkv": clamp or None}}


def _gpt_oss(its: GgufKeys) -> Config:
    """The width of experts; without a scaling there is none, and not that of the family."""
    width = its.number("expert_feed_forward_length")
    none = "rope.scaling.type" not in its.keys
    return {"intermediate_size": width} | (
        {"rope_scaling": {"rope_type": "default"}} if none else {}
    )


_GLM_FLASH = ((47, 48), 154880)
"""Layers, and tokens, of GLM-4.7-Flash, whose first files do not name the function of experts."""


def _deepseek2(its: GgufKeys) -> Config:
    """The sizes of the heads, which newer files store beside those of the latent; sigmoid scores of
    experts make it a DeepSeek-V3.
    """
    rope = its.number("rope.dimension_count")
    whole = "_mla" if "attention.key_length_mla" in its.keys else ""
    key = its.number(f"attention.key_length{whole}")
    layers, tokens = _GLM_FLASH
    is_flash = its.config["num_hidden_layers"] in layers and its.config["vocab_size"] == tokens
    groups = its.keys.get("expert_group_count", 1)
    further: Config = {
        "num_key_value_heads": its.config["num_attention_heads"],
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": key - rope,
        "v_head_dim": its.number(f"attention.value_length{whole}"),
        "q_lora_rank": its.keys.get("attention.q_lora_rank"),
        "n_group": groups,
        "topk_group": its.keys.get("expert_group_used_count", 1),
        "first_k_dense_replace": its.keys.get("leading_dense_block_count", 0),
        "routed_scaling_factor": its.keys.get("expert_weights_scale", 1.0),
    }
    gating = its.keys.get("expert_gating_func", 2 if is_flash else 1)
    if gating == 2:
        norm = its.keys.get("expert_weights_norm", False)
        return {"model_type": "deepseek_v3", "norm_topk_prob": norm, **further}
    if gating != 1:
        raise FileError(
            f"{its.header.file}: expert_gating_func is {short_repr(gating)}; "
            "read are 1 (softmax) and 2 (sigmoid)"
        )
    return {"topk_method": "greedy" if groups == 1 else "group_limited_greedy", **further}


def _joined_latent(key_rows: Tensor, value_rows: Tensor) -> Tensor:
    """Return the matrix of keys and values [H (D + E), rank] from [H, rank, D] and [H, E, rank]."""
    of_heads = [key_rows.mT, value_rows]
    return torch.cat(of_heads, 1).flatten(0, 1)


def _ministral3(its: GgufKeys) -> Config:
    """Mistral Small has neither a scaling nor a temperature."""
    none = "rope.scaling.type" not in its.keys
    return {"rope_scaling": {"rope_type": "default"}} if none else {}


def _ernie_moe(its: GgufKeys) -> Config:
    return {"moe_layer_end_index": its.config["num_hidden_layers"] - 1}


def _lfm2(its: GgufKeys) -> Config:
    """A layer without key heads is a convolution."""
    heads = its.by_layer("attention.head_count_kv")
    return {
        "num_key_value_heads": max((x for x in heads if type(x) is int), default=0),
        "layer_types": [FULL if x else "conv" for x in heads],
        "block_auto_adjust_ff_dim": False,
    }


def _qwen_hybrid(its: GgufKeys) -> Config:
    """The sizes of Gated DeltaNet, and which layers have it."""
    heads = its.number("ssm.time_step_rank")
    inner = its.number("ssm.inner_size")
    if inner % heads:
        raise invalid_gguf(its.header.file, f"ssm.inner_size {inner} is not divisible by {heads}")
    further: Config = {"linear_value_head_dim": inner // heads}
    if "attention.recurrent_layers" in its.keys:
        kinds = its.by_layer("attention.recurrent_layers")
        further["layer_types"] = [LINEAR if x else FULL for x in kinds]
    return further


def _mamba(its: GgufKeys) -> Config:
    return {
        "model_type": "falcon_mamba" if its.keys.get("ssm.dt_b_c_rms", False) else "mamba",
        "expand": _times(its),
    }


def _mamba2(its: GgufKeys) -> Config:
    heads = its.number("ssm.time_step_rank")
    inner = its.number("ssm.inner_size")
    return {"head_dim": inner // heads, "num_heads": heads, "expand": _times(its)}


def _times(its: GgufKeys) -> int:
    """Return how many times as wide as the model the layers of Mamba are."""
    inner, size = its.number("ssm.inner_size"), its.config["hidden_size"]
    if inner % size:
        raise invalid_gguf(
            its.header.file,
            f"ssm.inner_size is {inner}, which is no multiple of embedding_length, {size}",
        )
    return int(inner // size)


def _negative_exponential(parameter_name: str, *more: int) -> TensorRule:
    """Return the rule of the logarithm of a decay, A_log, of which the file has -exp(A_log)."""

    def unpack(stored: Tensor, sizes: Sequence[torch.Size]) -> list[Tensor]:
        return [(-stored).log().reshape(sizes[0])]

    return TensorRule(
        (parameter_name,), unpack, lambda parts: parts[0].reshape(*parts[0].shape, *more)
    )


_EXPERTS: NameTable = {
    f"{STORED_LAYER}mlp.experts.{{}}.{part}_proj.{end}": (
        f"{MODEL_LAYER}feed_forward.experts.{{}}.{part}.{end}"
    )
    for part in ("gate", "up", "down")
    for end in ("weight", "bias")
}
"""Experts as matrices of their own, of families that store all in one tensor."""
_GPT2_LAYER = "transformer.h.{}."
_GPT2: NameTable = {
    _GPT2_LAYER + "attn.c_attn.weight": MODEL_LAYER + "attention.project.linear.weight",
    _GPT2_LAYER + "attn.c_proj.weight": MODEL_LAYER + "attention.output.weight",
    _GPT2_LAYER + "mlp.c_fc.weight": MODEL_LAYER + "feed_forward.up.weight",
    _GPT2_LAYER + "mlp.c_proj.weight": MODEL_LAYER + "feed_forward.down.weight",
}
_MIXER = MODEL_LAYER + "attention."
_DELTA: NameTable = {
    STORED_DELTA + "A_log": _negative_exponential(_MIXER + "rule.decay.A_log"),
    STORED_DELTA + "conv1d.weight": _MIXER + "project.convolution.weight",
    STORED_DELTA + "in_proj_qkv.weight": stacked_rows(*QKV),
    STORED_DELTA + "in_proj_z.weight": GATE,
    STORED_LAYER + "self_attn.q_proj.weight": stacked_rows(
        _MIXER + "project.project.q.linear.weight", _MIXER + "project.gate.linear.weight"
    ),
}
_BACKBONE = "backbone.layers.{}.mixer."
_MAMBA: NameTable = {
    _BACKBONE + "A_log": _negative_exponential(_MIXER + "rule.A_log"),
    _BACKBONE + "conv1d.weight": _MIXER + "project.convolution.weight",
}
_MAMBA2: NameTable = {
    _BACKBONE + "A_log": _negative_exponential(_MIXER + "rule.A_log", 1),
    _BACKBONE + "D": reshaped(_MIXER + "rule.skip", -1, 1),
    _BACKBONE + "conv1d.weight": _MIXER + "project.convolution.weight",
}
_CONVOLUTION: NameTable = {
    STORED_LAYER + "conv.conv.weight": _MIXER + "convolution.weight",
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "arcee": Architecture("arcee", pairs=True),
    "bert": Architecture("bert", complete=_bert, reads=("attention.causal", "pooling_type")),
    "bloom": Architecture("bloom", fused_heads=True),
    "cohere2": Architecture("cohere2"),
    "command-r": Architecture("cohere"),
    "deepseek2": Architecture(
        "deepseek_v2",
        complete=_deepseek2,
        joined={
            "self_attn.kv_b_proj.weight": JoinedTensors(
                ("blk.{}.attn_k_b.weight", "blk.{}.attn_v_b.weight"), _joined_latent
            )
        },
        reads=(
            *("attention.key_length_mla", "attention.value_length_mla", "expert_gating_func"),
            *("expert_group_count", "expert_group_used_count", "attention.head_count_kv"),
        ),
    ),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        complete=_ernie_moe,
        names={
            STORED_LAYER + "mlp.moe_statics.e_score_correction_bias": (
                MODEL_LAYER + "feed_forward.router.correction"
            )
        },
        reads=("expert_shared_feed_forward_length",),  # of the code before experts had their own
    ),
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
    "glm4moe": Architecture("glm4_moe", gating=2),
    "gpt-oss": Architecture("gpt_oss", complete=_gpt_oss, names=_EXPERTS),
    "gpt2": Architecture("gpt2", names=_GPT2),
    "gptneox": Architecture("gpt_neox", fused_heads=True),
    "granite": Architecture("granite", pairs=True),
    "granitemoe": Architecture("granitemoe", pairs=True, names=_EXPERTS),
    "lfm2": Architecture("lfm2", complete=_lfm2, names=_CONVOLUTION),
    "lfm2moe": Architecture("lfm2_moe", complete=_lfm2, names=_CONVOLUTION, gating=2),
    "llama": Architecture("llama", complete=_llama, pairs=True),
    "mamba": Architecture("mamba", complete=_mamba, names=_MAMBA),
    "mamba2": Architecture(
        "mamba2",
        complete=_mamba2,
        names=_MAMBA2,
        joined={"mixer.norm.weight": JoinedTensors(("blk.{}.ssm_norm.weight",), torch.flatten)},
        reads=("ssm.time_step_rank",),
    ),
    "minimax-m2": Architecture("minimax_m2", gating=2),
    "mistral3": Architecture("ministral3", complete=_ministral3, pairs=True),
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
    "qwen35": Architecture(
        "qwen3_5_text",
        complete=_qwen_hybrid,
        tiled_values=True,
        gated_queries=True,
        norm_offset=1,
        names=_DELTA,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        complete=_qwen_hybrid,
        tiled_values=True,
        gated_queries=True,
        norm_offset=1,
        names={**_DELTA, **_EXPERTS},
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        {"norm_topk_prob": True},
        _qwen_hybrid,
        gated_queries=True,
        norm_offset=1,
        names=_DELTA,
    ),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", {"no_rope_layer_interval": 4}, pairs=True),
    "stablelm": Architecture("stablelm"),
    "starcoder": Architecture(
        "gpt_bigcode", complete=_starcoder, reads=("attention.head_count_kv",)
    ),
    "starcoder2": Architecture("starcoder2"),
}
"""The values of `general.architecture` that are read."""
