"""What the keys and the tensors of a GGUF file tell of a model beside its sizes, as further keys of
config.json: one function for each architecture that has more to tell.

Source: llama.cpp, `conversion` and `src/models`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from regard.configs.base import FULL, SLIDING
from regard.configs.deepseek import SHARED, WITH_INDEXER
from regard.configs.deepseek_v4 import HASHED, RATIOS, ROUTED
from regard.configs.expert_layers import DENSE, SPARSE
from regard.configs.hybrid import LINEAR
from regard.configs.minimax import SPARSE as CHOSEN_BLOCKS
from regard.errors import FileError
from regard.files.gguf_files import GgufHeader, invalid_gguf, read_plain
from regard.positions import rope_frequencies
from regard.positions.scalings import Llama3
from regard.untrusted_text import short_repr

Config = dict[str, Any]
ROPE_FACTORS = "rope_freqs.weight"
"""The tensor of factors by which the rotary frequencies are divided, float32 [D / 2]."""
_LLAMA3_FACTORS = ((8.0, 4.0, 8192), (32.0, 4.0, 8192), (16.0, 1.0, 8192), (2.0, 32.0, 131072))
"""Factor, high_freq_factor and the length of the training: Llama 3.1, 3.2 and 4, and Step-3.5."""


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

    @property
    def layers(self) -> int:
        """The number of layers, bounded as that of a damaged file is not."""
        return min(int(self.config["num_hidden_layers"]), 1 << 16)

    def number(self, name: str, default: int | None = None) -> int:
        """Return a key that must be a number above 0, the same for all layers."""
        value = self.keys.get(name, default)
        if isinstance(value, list) and value and all(x == value[0] for x in value):
            value = value[0]
        if type(value) is not int or value < 1:
            raise self.invalid(
                f"{name} is {short_repr(value)}; it must be a number above 0, the same for all "
                "layers"
            )
        return value

    def by_layer(self, name: str) -> list[Any]:
        """Return one value for each layer, of a key that may be one for all."""
        value = self.keys.get(name)
        return value[: self.layers] if isinstance(value, list) else [value] * self.layers

    def largest(self, name: str) -> int:
        """Return the largest number that a key has for a layer; 0 without any."""
        return max((x for x in self.by_layer(name) if type(x) is int), default=0)

    def windows(self) -> list[Any]:
        """Return which layers have a window."""
        return self.by_layer("attention.sliding_window_pattern")

    def by_kind(self, name: str) -> tuple[int, int]:
        """Return a number of the layers without a window, and that of the layers with one."""
        windows, listed = self.windows(), self.by_layer(name)
        kinds = [[x for x, w in zip(listed, windows, strict=False) if bool(w) == k] for k in (0, 1)]
        numbers = len(listed) == len(windows) and all(type(x) is int and x > 0 for x in listed)
        if not numbers or any(x != of_kind[0] for of_kind in kinds for x in of_kind):
            raise self.invalid(
                f"{name} is {short_repr(self.keys.get(name))}; it must be a number above 0 for all "
                "layers without a window, and one for all with one"
            )
        full, sliding = (of_kind or listed for of_kind in kinds)
        return full[0], sliding[0]

    def routed(self) -> list[bool]:
        """Return which layers have a router."""
        names = (f"blk.{i}.ffn_gate_inp.weight" for i in range(self.layers))
        return [name in self.header.tensors for name in names]

    def has_experts(self) -> list[bool]:
        """Return which layers have experts, which a key must not contradict."""
        routed, layers = self.routed(), range(self.layers)
        first = self.keys.get("leading_dense_block_count")
        if first is not None and (type(first) is not int or routed != [i >= first for i in layers]):
            raise self.invalid(
                f"leading_dense_block_count is {short_repr(first)}, and the layers with a router "
                f"are {[i for i in layers if routed[i]][:9]}"
            )
        return routed

    def require(self, name: str, value: object) -> None:
        """Refuse another value of a key than the only one that is read."""
        if self.keys.get(name) != value:
            raise self.invalid(f"{name} is {short_repr(self.keys.get(name))}; it must be {value}")

    def invalid(self, problem: str) -> FileError:
        """Return the error for a file that cannot be read, with what is wrong."""
        return invalid_gguf(self.header.file, problem)


def llama(its: GgufKeys) -> Config:
    """Mixtral is a Llama with experts."""
    return {"model_type": "mixtral"} if its.keys.get("expert_count", 0) != 0 else {}


def gemma_scale(layers_of_27b: int) -> Callable[[GgufKeys], Config]:
    """Return the rule by which the sizes give the scale of scores: the models of 27B have another,
    and llama.cpp tells them by the number of layers.
    """

    def complete(its: GgufKeys) -> Config:
        is_27b = its.config["num_hidden_layers"] == layers_of_27b
        size = its.config["hidden_size"] // its.config["num_attention_heads"]
        return {"query_pre_attn_scalar": size if is_27b else its.config["head_dim"]}

    return complete


def modern_bert(its: GgufKeys) -> Config:
    """The layers without a window, counted from the first, and both rotary bases."""
    pattern = its.keys.get("attention.sliding_window_pattern", 3)
    if type(pattern) is int and pattern > 0:
        pattern = [i % pattern != 0 for i in range(its.layers)]
    windows = pattern if isinstance(pattern, list) else []
    bases = (("global", ""), ("local", "_swa"))
    return {
        "local_attention": its.number("attention.sliding_window"),
        "layer_types": [SLIDING if x else FULL for x in windows],
        **{f"{kind}_rope_theta": its.keys.get(f"rope.freq_base{key}") for kind, key in bases},
    }


def olmo2(its: GgufKeys) -> Config:
    """OLMo 3 is an OLMo 2 with windows."""
    return {"model_type": "olmo3"} if "attention.sliding_window" in its.keys else {}


def bert(its: GgufKeys) -> Config:
    """Only encoders have this name."""
    if its.keys.get("attention.causal", False) is not False:
        raise FileError(
            f"{its.header.file}: bert.attention.causal is not false; no such BERT is known"
        )
    return {}


def t5(its: GgufKeys) -> Config:
    """Version 1 has no gates, and scales the states before its head; newer ones have a head of
    their own.
    """
    if any(x.endswith("blk.1.attn_rel_b.weight") for x in its.header.tensors):
        raise FileError(
            f"{its.header.file}: it is a UMT5, which has a table of positions in each layer"
        )
    is_gated = "dec.blk.0.ffn_gate.weight" in its.header.tensors
    return {
        "d_kv": its.config["head_dim"],
        "feed_forward_proj": "gated-gelu" if is_gated else "relu",
        "scale_decoder_outputs": not is_gated or "output.weight" not in its.header.tensors,
    }


def exaone4(its: GgufKeys) -> Config:
    """A file without a window has none in any layer."""
    if "attention.sliding_window" in its.keys:
        return {}
    return {"layer_types": [FULL] * its.layers}


def falcon(its: GgufKeys) -> Config:
    """Two norms are of the newer layers, one key head of the older ones."""
    has_two_norms = "blk.0.attn_norm_2.weight" in its.header.tensors
    is_multi_query = its.keys.get("attention.head_count_kv") == 1
    return {"new_decoder_architecture": has_two_norms, "multi_query": is_multi_query}


def starcoder(its: GgufKeys) -> Config:
    """One key head is multi-query attention."""
    return {"multi_query": its.keys.get("attention.head_count_kv", 1) == 1}


def mpt(its: GgufKeys) -> Config:
    """ALiBi, and a bound on queries, keys and values."""
    clamp = its.keys.get("attention.clamp_kqv", 0.0)
    return {"attn_config": {"alibi": True, "clip_qkv": clamp or None}}


def gpt_oss(its: GgufKeys) -> Config:
    """What a file calls the width of experts is the family's width of networks."""
    return {"intermediate_size": its.number("expert_feed_forward_length")}


_GLM_FLASH = ((47, 48), 154880)
"""Layers, and tokens, of GLM-4.7-Flash, whose first files do not name the function of experts."""


def deepseek2(its: GgufKeys) -> Config:
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


def deepseek32(its: GgufKeys) -> Config:
    """A DeepSeek-V3 with an indexer."""
    return {**deepseek2(its), "model_type": "deepseek_v32"}


_GLM_52_CONTEXT = 1 << 20
"""The context of GLM-5.2, whose first files do not name the layers that have an indexer."""


def glm_dsa(its: GgufKeys) -> Config:
    """A DeepSeek-V3.2 whose files have copies of an indexer in layers that share its choice."""
    own = its.by_layer("attention.indexer.types")
    if "attention.indexer.types" not in its.keys:
        shares = its.number("context_length") >= _GLM_52_CONTEXT
        own = [i < 2 or i % 4 == 2 or not shares for i in range(len(own))]
    kinds = [WITH_INDEXER if has_indexer else SHARED for has_indexer in own]
    return {**deepseek2(its), "model_type": "glm_moe_dsa", "indexer_types": kinds}


_OF_V4 = {
    "attention.head_count_kv": 1,
    "expert_gating_func": 4,
    "expert_shared_count": 1,
    "expert_weights_norm": True,
}
"""Keys with the only values that DeepSeek-V4 has."""


def deepseek4(its: GgufKeys) -> Config:
    """The kinds of the layers, and one bound on the activations of all experts."""
    ratios, hashed = its.by_layer("attention.compress_ratios"), its.keys.get("hash_layer_count", -1)
    limits = [its.by_layer("swiglu_clamp_exp")]
    if "swiglu_clamp_shexp" in its.keys:
        limits.append(its.by_layer("swiglu_clamp_shexp"))
    wrong = next((key for key, value in _OF_V4.items() if its.keys.get(key) != value), None)
    if any(x not in RATIOS for x in ratios):
        wrong = "attention.compress_ratios"
    if type(hashed) is not int or hashed < 0:
        wrong = "hash_layer_count"
    if any(not isinstance(x, float) or x != limits[0][0] for x in itertools.chain(*limits)):
        wrong = "swiglu_clamp_exp"
    if wrong is not None:
        raise its.invalid(f"{wrong} is {short_repr(its.keys.get(wrong))}, which is not read")
    return {
        "qk_rope_head_dim": its.number("rope.dimension_count"),
        "layer_types": [RATIOS[x] for x in ratios],
        "mlp_layer_types": [HASHED if i < hashed else ROUTED for i in range(len(ratios))],
        "swiglu_limit": limits[0][0],
    }


def kimi_linear(its: GgufKeys) -> Config:
    """Latent attention in the layers that have key heads, and the sizes of the delta rule."""
    rope, heads = its.number("rope.dimension_count"), its.config["num_attention_heads"]
    kinds = its.by_layer("attention.head_count_kv")
    return {
        "num_key_value_heads": heads,
        "qk_rope_head_dim": rope,
        "qk_nope_head_dim": its.number("attention.key_length_mla") - rope,
        "v_head_dim": its.number("attention.value_length_mla"),
        "layer_types": [FULL if x else LINEAR for x in kinds],
        "linear_num_heads": heads,
        "linear_head_dim": its.number("kda.head_dim"),
    }


def ernie_moe(its: GgufKeys) -> Config:
    """All layers behind the first dense ones have experts."""
    return {"moe_layer_end_index": its.config["num_hidden_layers"] - 1}


def lfm2(its: GgufKeys) -> Config:
    """A layer without key heads is a convolution."""
    heads = its.by_layer("attention.head_count_kv")
    return {
        "num_key_value_heads": its.largest("attention.head_count_kv"),
        "layer_types": [FULL if x else "conv" for x in heads],
        "block_auto_adjust_ff_dim": False,
    }


def qwen_hybrid(its: GgufKeys) -> Config:
    """The sizes of Gated DeltaNet, and which layers have it."""
    heads = its.number("ssm.time_step_rank")
    inner = its.number("ssm.inner_size")
    if inner % heads:
        raise its.invalid(f"ssm.inner_size {inner} is not divisible by {heads}")
    further: Config = {"linear_value_head_dim": inner // heads}
    if "attention.recurrent_layers" in its.keys:
        kinds = its.by_layer("attention.recurrent_layers")
        further["layer_types"] = [LINEAR if x else FULL for x in kinds]
    return further


def _expert_layers(its: GgufKeys) -> Config:
    """The kind of network of each layer: a mixture of experts, or a dense one."""
    return {"mlp_layer_types": [SPARSE if x else DENSE for x in its.has_experts()]}


def _windows(its: GgufKeys, shares: Sequence[float], scaling: Config | None = None) -> Config:
    """Which layers have a window, and what rotates without one and with one."""
    base = its.keys.get("rope.freq_base", 10000.0)
    bases = (base, its.keys.get("rope.freq_base_swa", base))
    kinds = ((FULL, scaling or {"rope_type": "default"}), (SLIDING, {"rope_type": "default"}))
    return {
        "layer_types": [SLIDING if x else FULL for x in its.windows()],
        "rope_parameters": {
            kind: {**settings, "rope_theta": its_base, "partial_rotary_factor": share}
            for (kind, settings), its_base, share in zip(kinds, bases, shares, strict=True)
        },
    }


def mimo2(its: GgufKeys) -> Config:
    """Layers with a window have twice as many key heads; the makers see one key more in it than the
    number that llama.cpp's converter writes, which are the keys before the query.
    """
    D = its.config["head_dim"]
    share = its.number("rope.dimension_count", D) / D
    full, sliding = its.by_kind("attention.head_count_kv")
    windows = its.windows()
    groups = full if False in map(bool, windows) else sliding // 2
    if True in map(bool, windows) and sliding != 2 * groups:
        raise its.invalid(
            f"layers with a window have {sliding} key heads; with {full} in the others there must "
            "be twice as many"
        )
    return {
        **_expert_layers(its),
        **_windows(its, (share, share)),
        "num_key_value_heads": groups,
        "v_head_dim": its.number("attention.value_length", D),
        "sliding_window": its.number("attention.sliding_window") + 1,
        "attention_value_scale": its.keys.get("attention.value_scale", 1.0),
    }


def step35(its: GgufKeys) -> Config:
    """Layers without a window rotate half of what the file says; its factors on frequencies are
    computed as if they rotated all, and the makers' scaling is meant.
    """
    D, base = its.config["head_dim"], its.keys.get("rope.freq_base", 10000.0)
    share = its.number("rope.dimension_count", D) / D
    heads, of_window = its.by_kind("attention.head_count")
    has_factors = ROPE_FACTORS in its.header.tensors
    scaling = llama3_scaling(its.header, base, D) if has_factors else None
    its.require("expert_weights_norm", True)
    its.require("moe_every_n_layers", 1)
    return {
        **_expert_layers(its),
        **_windows(its, (share / 2, share), scaling),
        "num_attention_heads": heads,
        "num_sliding_attention_heads": of_window,
        "num_key_value_heads": its.number("attention.head_count_kv"),
        "moe_router_scaling_factor": its.keys.get("expert_weights_scale", 1.0),
        **{
            name: its.by_layer(key) if key in its.keys else None
            for name, key in (
                ("swiglu_limits", "swiglu_clamp_exp"),
                ("swiglu_limits_shared", "swiglu_clamp_shexp"),
            )
        },
    }


def hy_v3(its: GgufKeys) -> Config:
    """The experts for all tokens are one, as wide as so many."""
    its.require("expert_weights_norm", True)
    width = its.number("expert_feed_forward_length")
    shared = its.number("expert_shared_feed_forward_length", width)
    if shared % width:
        raise its.invalid(
            f"expert_shared_feed_forward_length is {shared}, which is no multiple of "
            f"expert_feed_forward_length, {width}"
        )
    return {
        **_expert_layers(its),
        "num_shared_experts": shared // width,
        "router_scaling_factor": its.keys.get("expert_weights_scale", 1.0),
    }


def minimax_m3(its: GgufKeys) -> Config:
    """Layers with experts have index heads, too; the activation is written in llama.cpp's code."""
    its.require("expert_weights_norm", True)
    width = its.number("expert_feed_forward_length")
    return {
        **_expert_layers(its),
        "layer_types": [CHOSEN_BLOCKS if x else FULL for x in its.has_experts()],
        "intermediate_size": width,
        "dense_intermediate_size": its.number("feed_forward_length"),
        "shared_intermediate_size": width * its.number("expert_shared_count"),
        "routed_scaling_factor": its.keys.get("expert_weights_scale", 1.0),
    }


def minimax(its: GgufKeys) -> Config:
    """Attention in every eighth layer, if the file names no others, and one factor on what each
    part of a layer is added to.
    """
    interval = its.number("full_attention_interval", 8)
    linear = its.by_layer("attention.recurrent_layers")
    kinds = [(i + 1) % interval != 0 if x is None else x for i, x in enumerate(linear)]
    return {
        "layer_types": [LINEAR if x else FULL for x in kinds],
        **{
            f"{part}_alpha_factor": its.keys.get("residual_scale")
            for part in ("full_attn", "linear_attn", "mlp")
        },
    }


def mamba(its: GgufKeys) -> Config:
    """Falcon Mamba has norms on the parts of its state."""
    return {
        "model_type": "falcon_mamba" if its.keys.get("ssm.dt_b_c_rms", False) else "mamba",
        "expand": _times(its),
    }


def mamba2(its: GgufKeys) -> Config:
    """The heads, and how much wider than the model they are."""
    heads, D = _state_heads(its)
    return {"head_dim": D, "num_heads": heads, "expand": _times(its)}


def mamba2_sizes(its: GgufKeys) -> Config:
    """The sizes of the layers of Mamba-2 in models that have attention, too."""
    return {"mamba_d_head": _state_heads(its)[1], "mamba_d_ssm": its.number("ssm.inner_size")}


def _state_heads(its: GgufKeys) -> tuple[int, int]:
    """The number of heads of Mamba-2, and their size."""
    heads = its.number("ssm.time_step_rank")
    return heads, its.number("ssm.inner_size") // heads


def _attention_and(other: str, its: GgufKeys) -> Config:
    """Attention in the layers that have key heads, and another mechanism in the others."""
    heads = its.by_layer("attention.head_count_kv")
    return {
        "num_key_value_heads": its.largest("attention.head_count_kv"),
        "layer_types": ["attention" if x else other for x in heads],
    }


def granite_swa(its: GgufKeys) -> Config:
    """One rotary base for the layers that have positions; a file without a list has them in all."""
    base, rotates = its.keys.get("rope.freq_base", 10000.0), its.by_layer("attention.rope_pattern")
    return {"layer_rope_theta": [0.0 if x is False else base for x in rotates]}


def granite_hybrid(its: GgufKeys) -> Config:
    """Granite 4.0 H. The converter writes Bamba's files with the same name, and reorders the rows
    of whole heads, of which Bamba rotates a half, so that they compute something else.
    """
    if its.keys.get("rope.scaling.finetuned", False):
        raise FileError(
            f"{its.header.file}: rope.scaling.finetuned is true, as in files of Bamba, whose rows "
            "llama.cpp's converter reorders wrongly; load the model's safetensors instead"
        )
    width = "expert_shared_feed_forward_length"
    dense = its.keys.get(width, its.keys.get("feed_forward_length"))
    return {
        **mamba2_sizes(its),
        **_attention_and("mamba", its),
        "mamba_expand": _times(its),
        "shared_intermediate_size": dense,
        "num_local_experts": its.keys.get("expert_count", 0),
        "num_experts_per_tok": its.keys.get("expert_used_count", 0),
    }


def jamba(its: GgufKeys) -> Config:
    """Which layers have attention and experts, as periods."""
    heads = its.by_layer("attention.head_count_kv")
    return {
        "num_key_value_heads": its.largest("attention.head_count_kv"),
        "mamba_expand": _times(its),
        **_period(its, "attn_layer", [bool(x) for x in heads]),
        **_period(its, "expert_layer", its.routed()),
    }


def _period(its: GgufKeys, name: str, chosen: Sequence[bool]) -> Config:
    """Return the period and the offset of the chosen layers."""
    places = [i for i, x in enumerate(chosen) if x]
    offset = places[0] if places else 0
    period = places[1] - offset if len(places) > 1 else max(len(chosen), 1)
    if places and places != list(range(offset, len(chosen), period)):
        raise its.invalid(f"{name}s are {places[:9]}, which have no period")
    return {f"{name}_period": period, f"{name}_offset": offset}


def nemotron_h(its: GgufKeys) -> Config:
    """What each layer is: attention has key heads, a network a width, and Mamba-2 neither."""
    heads, widths = its.by_layer("attention.head_count_kv"), its.by_layer("feed_forward_length")
    network = "moe" if its.keys.get("expert_count", 0) else "mlp"
    blocks = [
        "attention" if G else network if width else "mamba"
        for G, width in zip(heads, widths, strict=False)
    ]
    count, D = _state_heads(its)
    return {
        "num_key_value_heads": its.largest("attention.head_count_kv"),
        "intermediate_size": its.largest("feed_forward_length"),
        "layers_block_type": blocks,
        "mamba_num_heads": count,
        "mamba_head_dim": D,
        "moe_shared_expert_intermediate_size": its.keys.get("expert_shared_feed_forward_length"),
    }


def llama4(its: GgufKeys) -> Config:
    """Only the model of 128 experts has no norm on its heads, as llama.cpp knows it."""
    step = its.number("interleave_moe_layer_step", 1)
    chunked = its.keys.get("expert_swa", True) is not False
    return {
        "use_qk_norm": its.keys.get("expert_count") != 128,
        "intermediate_size": its.number("expert_feed_forward_length"),
        "intermediate_size_mlp": its.number("feed_forward_length"),
        "interleave_moe_layer_step": step,
        "layer_types": None if chunked else [FULL] * its.layers,
    }


def gemma3n(its: GgufKeys) -> Config:
    """The shares of zeros, of which a file has the quantiles of the normal distribution."""
    low_rank = its.header.tensors.get("blk.0.laurel_l.weight")
    further: Config = {
        "laurel_rank": low_rank.shape[0] if low_rank is not None else None,
        "vocab_size_per_layer_input": _rows(its, "per_layer_token_embd.weight"),
    }
    if its.keys.get("altup.active_idx", 0) != 0:
        raise its.invalid("altup.active_idx is not 0")
    if "activation_sparsity_scale" in its.keys:
        scales = its.by_layer("activation_sparsity_scale")
        if not all(isinstance(x, float) for x in scales):
            raise its.invalid("activation_sparsity_scale has other than numbers")
        # rounded as the makers wrote them; the file has them in fp32
        shares = [round((1 + math.erf(x / math.sqrt(2))) / 2, 6) for x in scales]
        further["activation_sparsity_pattern"] = shares
    return further


def gemma4(its: GgufKeys) -> Config:
    """The heads of layers with a window and without, and the bases of their rotary positions."""
    windows = its.windows()
    full = next((i for i, x in enumerate(windows) if not x), 0)
    groups, widths = its.by_layer("attention.head_count_kv"), its.by_layer("feed_forward_length")
    of_window = next((G for G, x in zip(groups, windows, strict=False) if x), groups[:1])
    has_values = f"blk.{full}.attn_v.weight" in its.header.tensors
    # frequencies are divided by factors: 1, or one so large that the dims do not rotate
    share = _rotating_share(its)
    bases = {key: its.keys.get(f"rope.freq_base{key}") for key in ("", "_swa")}
    experts = (
        {}
        if its.keys.get("expert_count", 0) == 0
        else {
            "enable_moe_block": True,
            "num_experts": its.number("expert_count"),
            "top_k_experts": its.number("expert_used_count"),
            "moe_intermediate_size": its.number("expert_feed_forward_length"),
        }
    )
    return {
        "global_head_dim": its.number("attention.key_length"),
        "head_dim": its.number("attention.key_length_swa"),
        "num_key_value_heads": of_window,
        "num_global_key_value_heads": groups[full] if full < len(groups) else None,
        "attention_k_eq_v": not has_values,
        "intermediate_size": widths[0] if widths else None,
        "use_double_wide_mlp": any(x != widths[0] for x in widths),
        "vocab_size_per_layer_input": _rows(its, "per_layer_token_embd.weight"),
        "rope_parameters": {
            "full_attention": {
                "rope_type": "proportional",
                "partial_rotary_factor": share,
                "rope_theta": bases[""] or 1000000.0,
            },
            "sliding_attention": {"rope_type": "default", "rope_theta": bases["_swa"] or 10000.0},
        },
        **experts,
    }


def _rotating_share(its: GgufKeys) -> float:
    """Return the share of the dims of a head that rotate in layers without a window."""
    tensor = its.header.tensors.get(ROPE_FACTORS)
    if tensor is None:
        return 1.0
    factors = read_plain(its.header, tensor, torch.float32) if tensor.format.name == "F32" else None
    if factors is None or not ((factors == 1) | (factors > 1e20)).all():
        raise its.invalid("rope_freqs.weight has other factors than 1 and 1e30")
    return int((factors == 1).sum()) / factors.numel()


def _rows(its: GgufKeys, name: str) -> int | None:
    """Return the rows of a tensor, or None if the file does not have it."""
    tensor = its.header.tensors.get(name)
    return None if tensor is None else tensor.shape[0]


def phimoe(its: GgufKeys) -> Config:
    """Its router is defined for two experts alone."""
    if (active := its.keys.get("expert_used_count")) != 2:
        raise its.invalid(f"expert_used_count is {short_repr(active)}, and must be 2")
    return {}


def _times(its: GgufKeys) -> int:
    """Return how many times as wide as the model the layers of Mamba are."""
    inner, size = its.number("ssm.inner_size"), its.config["hidden_size"]
    if inner % size:
        raise its.invalid(
            f"ssm.inner_size is {inner}, which is no multiple of embedding_length, {size}"
        )
    return int(inner // size)


def llama3_scaling(header: GgufHeader, base: float, head_dim: int) -> Config:
    """Return the rope_scaling whose frequencies the factors of the file give."""
    tensor = header.tensors[ROPE_FACTORS]
    if tensor.format.name == "F32" and tensor.shape == (head_dim // 2,):
        factors = read_plain(header, tensor, torch.float32)
        plain = rope_frequencies(head_dim, base).inv_freq
        for factor, high, length in _LLAMA3_FACTORS:
            scaling = Llama3(factor, 1.0, high, length)
            wanted = rope_frequencies(head_dim, base, scaling=scaling).inv_freq
            # computed in fp32 by the program that wrote the file
            if torch.allclose(plain / factors.double(), wanted, rtol=1e-5, atol=0):
                return {
                    "rope_type": "llama3",
                    "factor": factor,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": high,
                    "original_max_position_embeddings": length,
                }
    raise FileError(
        f"{header.file}: {ROPE_FACTORS} is {tensor.format.name} {tensor.shape} and not one of the "
        "factors of Llama 3.1, 3.2 and 4 and of Step-3.5, which are 8, 32, 16 and 2; load the "
        "model's safetensors instead"
    )
