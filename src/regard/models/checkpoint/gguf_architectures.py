"""The architectures of GGUF files: what llama.cpp's code and its converter know of each, and its
files do not say.

Source: llama.cpp, `conversion`, `src/models`, and the library `gguf`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from regard.models.assembly.gated_delta import GATE, QKV, STORED_DELTA
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint import gguf_completions as completions
from regard.models.checkpoint.family import NameTable, TensorRule, reshaped, stacked_rows
from regard.models.checkpoint.gguf_completions import Config, GgufKeys


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
        library: the name in the library of an architecture with the same names of tensors, if it
            does not know this one.
        file_names: stored name -> name in the file, of tensors that the library does not name.
        joined: end of a stored name -> the tensors of which it is made, if the file has them.
        reads: further keys that `complete` reads.
        alternatives: part of a stored name -> a tensor of its layer, and whether that must be there
            for the name to be meant; two names of the family are one in the file.
        numbers: end of a stored name -> the key with its number for each layer, and its shape.
        unused: tensors that no code reads.
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
    library: str | None = None
    file_names: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, JoinedTensors] = field(default_factory=dict)
    reads: tuple[str, ...] = ()
    alternatives: Mapping[str, tuple[str, bool]] = field(default_factory=dict)
    numbers: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    unused: tuple[str, ...] = ()
    gating: int = 1


def _joined_latent(key_rows: Tensor, value_rows: Tensor) -> Tensor:
    """Return the matrix of keys and values [H (D + E), rank] from [H, rank, D] and [H, E, rank]."""
    of_heads = [key_rows.mT, value_rows]
    return torch.cat(of_heads, 1).flatten(0, 1)


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
_HYBRID = STORED_LAYER + "mamba."


def _mamba_names(stored: str) -> NameTable:
    """Return the entries of the layers of Mamba."""
    return {
        stored + "A_log": _negative_exponential(_MIXER + "rule.A_log"),
        stored + "conv1d.weight": _MIXER + "project.convolution.weight",
    }


def _mamba2_names(stored: str, mixer: str = _MIXER) -> NameTable:
    """Return the entries of the layers of Mamba-2."""
    return {
        stored + "A_log": _negative_exponential(mixer + "rule.A_log", 1),
        stored + "D": reshaped(mixer + "rule.skip", -1, 1),
        stored + "conv1d.weight": mixer + "project.convolution.weight",
    }


def _streams(name: str) -> TensorRule:
    """Return the rule of the maps between streams, which the file has in one tensor [n, M, M]."""
    return TensorRule(
        (name,), lambda stored, _: list(stored), lambda parts: torch.stack(list(parts))
    )


_FUSED_EXPERTS: NameTable = {
    f"{STORED_LAYER}experts.{{}}.gate_up_proj.weight": stacked_rows(
        *(f"{MODEL_LAYER}feed_forward.experts.{{}}.{part}.weight" for part in ("gate", "up"))
    ),
    f"{STORED_LAYER}experts.{{}}.down_proj.weight": (
        f"{MODEL_LAYER}feed_forward.experts.{{}}.down.weight"
    ),
}
_FLAT_NORM = JoinedTensors(("blk.{}.ssm_norm.weight",), torch.flatten)
_NETWORKS: NameTable = {
    f"{STORED_LAYER}mlp.{theirs}{part}_proj.weight": (
        f"{MODEL_LAYER}feed_forward.{ours}{part}.weight"
    )
    for theirs, ours in (("", ""), ("shared_experts.", "shared."))
    for part in ("gate", "up", "down")
}
"""A dense network, and the one beside a mixture of experts, as matrices of their own."""
_NEMOTRON: NameTable = {
    f"{STORED_LAYER}mlp.experts.{{}}.{part}_proj.weight": (
        f"{MODEL_LAYER}attention.network.experts.{{}}.{part}.weight"
    )
    for part in ("up", "down")
}
_LATENT = {
    "self_attn.kv_b_proj.weight": JoinedTensors(
        ("blk.{}.attn_k_b.weight", "blk.{}.attn_v_b.weight"), _joined_latent
    )
}
_KIMI = {
    # llama.cpp's tools write some of these sizes of 1, and leave out others
    **{
        f"self_attn.{part}_conv1d.weight": JoinedTensors(
            (f"blk.{{}}.ssm_conv1d_{part}.weight",), lambda x: x.reshape(-1, 1, x.shape[-1])
        )
        for part in "qkv"
    },
    "self_attn.A_log": JoinedTensors(("blk.{}.ssm_a",), torch.flatten),
}
_CONVOLUTION: NameTable = {
    STORED_LAYER + "conv.conv.weight": _MIXER + "convolution.weight",
}
_DEEPSEEK2_READS = (
    *("attention.key_length_mla", "attention.value_length_mla", "expert_gating_func"),
    *("expert_group_count", "expert_group_used_count", "attention.head_count_kv"),
)
_EXPERT_READS = ("expert_weights_norm", "leading_dense_block_count")
_V4 = "layers.{}."
_V4_PARTS = {
    "attn.attn_sink": "attn_sinks.weight",
    "attn.wq_a.weight": "attn_q_a.weight",
    "attn.q_norm.weight": "attn_q_a_norm.weight",
    "attn.wq_b.weight": "attn_q_b.weight",
    "attn.wkv.weight": "attn_kv.weight",
    "attn.kv_norm.weight": "attn_kv_a_norm.weight",
    "attn.wo_b.weight": "attn_output_b.weight",
    "attn.indexer.wq_b.weight": "indexer.attn_q_b.weight",
    "attn.indexer.weights_proj.weight": "indexer.proj.weight",
    **{
        f"attn.{theirs}compressor.{part}": f"{file}_compressor_{name}.weight"
        for theirs, file in (("", "attn"), ("indexer.", "indexer"))
        for part, name in (
            *(("wkv.weight", "kv"), ("wgate.weight", "gate")),
            *(("ape", "ape"), ("norm.weight", "norm")),
        )
    },
    "ffn.gate.weight": "ffn_gate_inp.weight",
    "ffn.gate.bias": "exp_probs_b.bias",
    "ffn.gate.tid2eid": "ffn_gate_tid2eid.weight",
    **{
        f"ffn.{theirs}.{w}.weight": f"ffn_{part}_{file}.weight"
        for theirs, file in (("experts.{}", "exps"), ("shared_experts", "shexp"))
        for w, part in (("w1", "gate"), ("w2", "down"), ("w3", "up"))
    },
    **{f"{part}_norm.weight": f"{part}_norm.weight" for part in ("attn", "ffn")},
    **{
        name: f"{name}.weight"
        for part in ("attn", "ffn")
        for name in (f"hc_{part}_fn", f"hc_{part}_base", f"hc_{part}_scale")
    },
}
_V4_NAMES = {
    "embed.weight": "token_embd.weight",
    "norm.weight": "output_norm.weight",
    "head.weight": "output.weight",
    **{f"hc_head_{part}": f"output_hc_{part}.weight" for part in ("fn", "base", "scale")},
    **{_V4 + theirs: f"blk.{{}}.{name}" for theirs, name in _V4_PARTS.items()},
}

ARCHITECTURES: Mapping[str, Architecture] = {
    "apertus": Architecture(
        "apertus",
        numbers={
            f"mlp.act_fn.{name}": (f"xielu.{name}", (1,) if "alpha" in name else ())
            for name in ("alpha_p", "alpha_n", "beta", "eps")
        },
    ),
    "arcee": Architecture("arcee", pairs=True),
    "bert": Architecture(
        "bert", complete=completions.bert, reads=("attention.causal", "pooling_type")
    ),
    "bloom": Architecture("bloom", fused_heads=True),
    "chatglm": Architecture("glm"),
    "cohere2": Architecture("cohere2"),
    "command-r": Architecture("cohere"),
    "deepseek2": Architecture(
        "deepseek_v2",
        complete=completions.deepseek2,
        joined=_LATENT,
        reads=_DEEPSEEK2_READS,
    ),
    "deepseek32": Architecture(
        "deepseek_v32",
        complete=completions.deepseek32,
        library="glm-dsa",
        joined=_LATENT,
        reads=_DEEPSEEK2_READS,
    ),
    "deepseek4": Architecture(
        "deepseek_v4",
        complete=completions.deepseek4,
        library="deepseek2",
        file_names=_V4_NAMES,
        joined={
            "attn.wo_a.weight": JoinedTensors(
                ("blk.{}.attn_output_a.weight",), lambda x: x.flatten(0, -2)
            )
        },
        reads=(
            *("attention.compress_ratios", "attention.head_count_kv", "expert_gating_func"),
            *("expert_shared_count", "expert_weights_norm", "feed_forward_length"),
            *("hash_layer_count", "swiglu_clamp_shexp"),
        ),
    ),
    "ernie4_5": Architecture("ernie4_5"),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        complete=completions.ernie_moe,
        names={
            STORED_LAYER + "mlp.moe_statics.e_score_correction_bias": (
                MODEL_LAYER + "feed_forward.router.correction"
            )
        },
        reads=("expert_shared_feed_forward_length",),  # of the code before experts had their own
    ),
    "exaone4": Architecture("exaone4", complete=completions.exaone4),
    "exaone-moe": Architecture(
        "exaone_moe",
        complete=completions.exaone4,
        gating=2,
        reads=("expert_shared_feed_forward_length",),
    ),
    "falcon": Architecture(
        "falcon",
        complete=completions.falcon,
        fused_heads=True,
        alternatives={
            "input_layernorm": ("attn_norm_2.weight", False),
            "ln_mlp": ("attn_norm_2.weight", True),
        },
    ),
    "falcon-h1": Architecture(
        "falcon_h1",
        {"mamba_norm_before_gate": False},
        completions.mamba2_sizes,
        names=_mamba2_names(_HYBRID, MODEL_LAYER + "attention.mixers.1."),
        file_names={STORED_LAYER + "pre_ff_layernorm.weight": "blk.{}.ffn_norm"},
        joined={"mamba.norm.weight": _FLAT_NORM},
    ),
    "gemma": Architecture("gemma", norm_offset=1),
    "gemma2": Architecture("gemma2", complete=completions.gemma_scale(46), norm_offset=1),
    "gemma3": Architecture("gemma3_text", complete=completions.gemma_scale(62), norm_offset=1),
    "gemma3n": Architecture(
        "gemma3n_text",
        complete=completions.gemma3n,
        names={
            "model.altup_projections.weight": _streams("embed.to_streams.*.weight"),
            "model.altup_unembed_projections.weight": _streams("norm.from_streams.*.weight"),
        },
        reads=("activation_sparsity_scale", "altup.active_idx"),
    ),
    "gemma4": Architecture(
        "gemma4_text",
        complete=completions.gemma4,
        names=_FUSED_EXPERTS,
        file_names={
            STORED_LAYER + "router.scale": "blk.{}.ffn_gate_inp.scale",
            STORED_LAYER + "router.per_expert_scale": "blk.{}.ffn_down_exps.scale",
        },
        reads=(
            *("attention.head_count_kv", "attention.key_length_swa", "attention.value_length_swa"),
            *("expert_count", "expert_used_count", "feed_forward_length"),
            *("rope.dimension_count_swa", "rope.freq_base", "rope.freq_base_swa"),
        ),
    ),
    "glm-dsa": Architecture(
        "glm_moe_dsa",
        complete=completions.glm_dsa,
        joined=_LATENT,
        reads=(*_DEEPSEEK2_READS, "attention.indexer.types"),
    ),
    "glm4": Architecture("glm4"),
    "glm4moe": Architecture("glm4_moe", gating=2),
    "gpt-oss": Architecture("gpt_oss", complete=completions.gpt_oss, names=_EXPERTS),
    "gpt2": Architecture("gpt2", names=_GPT2),
    "gptneox": Architecture("gpt_neox", fused_heads=True),
    "granite": Architecture("granite", pairs=True),
    "granite_swa": Architecture(
        "granite_swa",
        complete=completions.granite_swa,
        pairs=True,
        library="granite",
        file_names={STORED_LAYER + "self_attn.sinks": "blk.{}.attn_sinks.weight"},
        reads=("attention.rope_pattern",),
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {"position_embedding_type": "nope"},
        completions.granite_hybrid,
        pairs=True,
        names={**_mamba2_names(_HYBRID), **_EXPERTS, **_NETWORKS},
        joined={"mamba.norm.weight": _FLAT_NORM},
        reads=("attention.head_count_kv", "expert_shared_feed_forward_length"),
    ),
    "granitemoe": Architecture("granitemoe", pairs=True, names=_EXPERTS),
    "hunyuan-dense": Architecture("hunyuan_v1_dense"),
    "hy_v3": Architecture(
        "hy_v3",
        complete=completions.hy_v3,
        gating=2,
        library="exaone-moe",
        reads=(*_EXPERT_READS, "expert_shared_feed_forward_length"),
    ),
    "jamba": Architecture(
        "jamba",
        complete=completions.jamba,
        names=_mamba_names(_HYBRID),
        reads=("attention.head_count_kv",),
    ),
    "kimi-linear": Architecture(
        "kimi_linear",
        complete=completions.kimi_linear,
        gating=2,
        names={
            STORED_LAYER + "self_attn.A_log": _negative_exponential(_MIXER + "rule.decay.A_log"),
        },
        joined={**_LATENT, **_KIMI},
        reads=(
            *("attention.head_count_kv", "attention.key_length_mla", "attention.value_length_mla"),
            *("kda.head_dim", "rope.freq_base"),
        ),
    ),
    "lfm2": Architecture("lfm2", complete=completions.lfm2, names=_CONVOLUTION),
    "lfm2moe": Architecture("lfm2_moe", complete=completions.lfm2, names=_CONVOLUTION, gating=2),
    "llama": Architecture("llama", complete=completions.llama, pairs=True),
    "llama4": Architecture(
        "llama4_text",
        {"attention_chunk_size": 8192, "no_rope_layer_interval": 4},
        completions.llama4,
        names=_EXPERTS,
        reads=("expert_swa",),
    ),
    "mamba": Architecture("mamba", complete=completions.mamba, names=_mamba_names(_BACKBONE)),
    "mamba2": Architecture(
        "mamba2",
        complete=completions.mamba2,
        names=_mamba2_names(_BACKBONE),
        joined={"mixer.norm.weight": _FLAT_NORM},
        reads=("ssm.time_step_rank",),
    ),
    "minimax-01": Architecture(
        "minimax",
        complete=completions.minimax,
        library="minimax-m2",
        file_names={
            f"{STORED_LAYER}self_attn.{theirs}.weight": f"blk.{{}}.{name}.weight"
            for theirs, name in (
                *(("qkv_proj", "attn_qkv"), ("norm", "attn_norm_2")),
                *(("output_gate", "attn_gate"), ("out_proj", "attn_output")),
            )
        },
        alternatives={
            "o_proj": ("attn_gate.weight", False),
            "out_proj": ("attn_gate.weight", True),
        },
        reads=("full_attention_interval", "residual_scale"),
    ),
    "mimo2": Architecture(
        "mimo_v2_flash",
        complete=completions.mimo2,
        gating=2,
        reads=("leading_dense_block_count", "rope.freq_base_swa"),
    ),
    "minimax-m2": Architecture("minimax_m2", gating=2),
    "minimax-m3": Architecture(
        "minimax_m3_vl_text",
        complete=completions.minimax_m3,
        gating=2,
        norm_offset=1,
        library="exaone-moe",
        names={**_EXPERTS, **_NETWORKS},
        file_names={
            f"{STORED_LAYER}self_attn.{name}.weight": f"blk.{{}}.{name}.weight"
            for name in (f"indexer.{part}_{kind}" for part in "qk" for kind in ("proj", "norm"))
        },
        reads=(*_EXPERT_READS, "expert_shared_count"),
    ),
    "mistral3": Architecture("ministral3", pairs=True),
    "modern-bert": Architecture(
        "modernbert",
        complete=completions.modern_bert,
        reads=(
            *("attention.causal", "attention.sliding_window", "pooling_type"),
            *("rope.freq_base", "rope.freq_base_swa"),
        ),
    ),
    "mpt": Architecture("mpt", complete=completions.mpt, reads=("attention.clamp_kqv",)),
    "nemotron": Architecture("nemotron", norm_offset=1),
    **{
        name: Architecture(
            "nemotron_h",
            complete=completions.nemotron_h,
            gating=2,
            names={**_mamba2_names(_BACKBONE), **_NEMOTRON},
            joined={"mixer.norm.weight": _FLAT_NORM},
            reads=(
                *("attention.head_count_kv", "expert_shared_feed_forward_length"),
                *("expert_shared_count", "feed_forward_length"),
            ),
        )
        for name in ("nemotron_h", "nemotron_h_moe")
    },
    "olmo": Architecture("olmo", pairs=True),
    "olmo2": Architecture("olmo2", complete=completions.olmo2),
    "olmoe": Architecture("olmoe"),
    "phi2": Architecture("phi"),
    "phi3": Architecture("phi3"),
    "phimoe": Architecture(
        "phimoe", {"lm_head_bias": True}, completions.phimoe, reads=("expert_used_count",)
    ),
    "qwen2": Architecture("qwen2"),
    "qwen2moe": Architecture("qwen2_moe"),
    "qwen3": Architecture("qwen3"),
    "qwen3moe": Architecture("qwen3_moe", {"norm_topk_prob": True}),
    "qwen35": Architecture(
        "qwen3_5_text",
        complete=completions.qwen_hybrid,
        tiled_values=True,
        gated_queries=True,
        norm_offset=1,
        names=_DELTA,
    ),
    "qwen35moe": Architecture(
        "qwen3_5_moe_text",
        complete=completions.qwen_hybrid,
        tiled_values=True,
        gated_queries=True,
        norm_offset=1,
        names={**_DELTA, **_EXPERTS},
    ),
    "qwen3next": Architecture(
        "qwen3_next",
        {"norm_topk_prob": True},
        completions.qwen_hybrid,
        gated_queries=True,
        norm_offset=1,
        names=_DELTA,
    ),
    "seed_oss": Architecture("seed_oss"),
    "smollm3": Architecture("smollm3", {"no_rope_layer_interval": 4}, pairs=True),
    "stablelm": Architecture("stablelm"),
    "starcoder": Architecture(
        "gpt_bigcode", complete=completions.starcoder, reads=("attention.head_count_kv",)
    ),
    "starcoder2": Architecture("starcoder2"),
    "step35": Architecture(
        "step3p5",
        complete=completions.step35,
        gating=2,
        norm_offset=1,
        names=_EXPERTS,
        reads=(
            *_EXPERT_READS,
            *("attention.head_count", "moe_every_n_layers", "rope.freq_base_swa"),
            *("swiglu_clamp_exp", "swiglu_clamp_shexp"),
        ),
    ),
    "t5": Architecture(
        "t5",
        complete=completions.t5,
        alternatives={
            "wi": ("ffn_gate.weight", False),
            "wi_1": ("ffn_gate.weight", True),
        },
        unused=("dec.blk.0.cross_attn_rel_b.weight",),
    ),
}
"""The values of `general.architecture` that are read."""
REFUSED = {
    "mistral4": "the file lacks the temperature of queries, which the model has",
    "t5encoder": "it is the encoder of a T5 alone, and T5 is loaded with its decoder",
}
"""Architectures of llama.cpp that families here resemble -> why they are not read."""
