"""Qwen3-Next and Qwen3.5: three layers of Gated DeltaNet, then one of attention with an output
gate, and dense feed-forward layers, or mixtures of experts with one for all tokens behind a gate.
Qwen4-Exp has gated streams, attention to chosen blocks and hashed n-grams besides.
Source: Qwen Team 2025, "Qwen3-Next"; Qwen Team 2026, "Qwen3.5"; the code of Qwen4-Exp in
transformers; Yang et al. 2024 (arXiv 2412.06464); Qiu et al. 2025 (arXiv 2505.06708).
"""

from __future__ import annotations

from typing import cast

from regard.configs.qwen import (
    SHARING_EXPERTS,
    Qwen3NextConfig,
    Qwen4ExpConfig,
    Qwen35Config,
    Qwen35MoeConfig,
    QwenHybridConfig,
)
from regard.errors import ArgumentError
from regard.models.assembly import building_blocks, gated_delta, llama_like
from regard.models.assembly.gated_delta import DECAY, GATE, MIXER, QKV, STORED_DELTA, STRENGTH
from regard.models.assembly.llama_like import STORED_LAYER
from regard.models.checkpoint.family import (
    Family,
    HeadRows,
    NameTable,
    as_stored,
    stacked_rows,
)
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, HeadProjection, SelectedAttention
from regard.nn.attention.compressed import BlockPooling
from regard.nn.attention.selected import PooledIndexer
from regard.nn.blocks.ngrams import HashedNGrams, NGramBlock, NGramInput
from regard.nn.blocks.residual_streams import GatedStreams, StreamGate, StreamsEmbedding
from regard.nn.mixer import Mixer
from regard.nn.projections.steps import GatedProjection
from regard.nn.recurrence.recurrent import GateActivation
from regard.positions import Rotary


def _layer(config: QwenHybridConfig, layer: int, rotary: Rotary | None, _: int | None) -> Block:
    mixer = gated_delta.delta_net(config) if rotary is None else _attention(config, rotary)
    return llama_like.block(config, mixer, llama_like.feed_forward(config, layer))


def _attention(config: QwenHybridConfig, rotary: Rotary) -> Attention:
    """Build attention with an output gate."""
    plain = llama_like.attention(config, rotary)
    gate = HeadProjection(config.hidden_size, config.num_attention_heads, config.head_dim)
    return Attention(GatedProjection(plain.project, gate), plain.output, mask=plain.mask)


ATTENTION: NameTable = {
    STORED_LAYER + "self_attn.q_proj.weight": HeadRows(
        (MIXER + "project.project.q.linear.weight", MIXER + "project.gate.linear.weight"),
        MIXER + "project.project.q",
    ),
    STORED_LAYER + "self_attn.k_proj.weight": MIXER + "project.project.k.linear.weight",
    STORED_LAYER + "self_attn.v_proj.weight": MIXER + "project.project.v.linear.weight",
    STORED_LAYER + "self_attn.q_norm.weight": MIXER + "project.project.q.steps.0.weight",
    STORED_LAYER + "self_attn.k_norm.weight": MIXER + "project.project.k.steps.0.weight",
    STORED_LAYER + "self_attn.o_proj.weight": as_stored(
        MIXER + "output.weight", requires=MIXER + "project.gate.linear.weight"
    ),
}
"""The matrix of the queries also has the rows of the gate, head by head."""
DELTA: NameTable = {
    STORED_DELTA + "conv1d.weight": gated_delta.filters(MIXER + "project.convolution.weight"),
    STORED_DELTA + "A_log": MIXER + "rule.decay.A_log",
    STORED_DELTA + "dt_bias": MIXER + "rule.decay.dt_bias",
    STORED_DELTA + "norm.weight": MIXER + "norm.weight",
    STORED_DELTA + "out_proj.weight": as_stored(MIXER + "output.weight", requires=STRENGTH),
}
"""What Qwen3-Next and Qwen3.5 store alike of a layer of Gated DeltaNet."""
FUSED_EXPERTS = llama_like.stacked_experts(STORED_LAYER + "mlp.")
"""Further names of experts, with all matrices in one tensor, as in Qwen3.5."""
SEPARATE_MAPS: NameTable = {
    STORED_DELTA + "in_proj_qkv.weight": stacked_rows(*QKV),
    STORED_DELTA + "in_proj_z.weight": GATE,
    STORED_DELTA + "in_proj_b.weight": STRENGTH,
    STORED_DELTA + "in_proj_a.weight": DECAY,
}
"""The maps of Gated DeltaNet as Qwen3.5 stores them."""
PARTS: NameTable = {
    **llama_like.EMBEDDING_AND_HEAD,
    **llama_like.PRE_NORMS,
    **ATTENTION,
    **DELTA,
}
"""Everything but the maps of Gated DeltaNet and the feed-forward layers."""
KEYS = MIXER + "project.k"
JOINED_MAPS: NameTable = {
    STORED_DELTA + "in_proj_qkvz.weight": HeadRows((*QKV, GATE), KEYS),
    STORED_DELTA + "in_proj_ba.weight": HeadRows((STRENGTH, DECAY), KEYS),
}
"""The maps of Gated DeltaNet as Qwen3-Next stores them: key head by key head."""
EXPERTS = llama_like.expert_names(SHARING_EXPERTS)


def _build_streams(config: Qwen4ExpConfig) -> Decoder:
    """Build the decoder of Qwen4-Exp, with initial weights."""
    embedding, head = llama_like.embedding_and_head(config)
    M, n, rank, eps = config.hidden_size, config.hc_count, config.hc_lowrank, config.rms_norm_eps
    rotaries = llama_like.rotary_modules(config)
    layers: list[Block] = []
    for i, rotary in enumerate(rotaries):
        mixer: Mixer
        if rotary is None:
            mixer = gated_delta.delta_net(
                config, gate_activation=cast("GateActivation", config.output_gate_type)
            )
        else:
            mixer = _indexed_attention(config, rotary)
        streams = (GatedStreams(M, n, rank, eps=eps) for _ in range(2))
        experts = llama_like.feed_forward(config, i)
        sizes = config.ngrams(i)
        if sizes is None:
            layers.append(Block(mixer, experts, *streams))
            continue
        grams = NGramInput(
            HashedNGrams(sizes),
            M,
            n,
            kernel=config.ple_conv_kernel_size,
            dilation=config.ngram_size,
            eps=eps,
        )
        layers.append(NGramBlock(grams, mixer, experts, *streams))
    merge = StreamGate(M, n, rank, eps=eps)
    decoder = Decoder(StreamsEmbedding(embedding, n), layers, merge, head)
    return building_blocks.initialize_weights(decoder)


def _indexed_attention(config: Qwen4ExpConfig, rotary: Rotary) -> SelectedAttention:
    """Build attention to chosen blocks, with an output gate; index heads rotate as many dims."""
    plain = _attention(config, rotary)
    M, J, d = config.hidden_size, config.indexer_n_heads, config.indexer_head_dim
    share = config.head_dim * config.partial_rotary_factor / d
    turned = building_blocks.rotary_module(config.rope._replace(head_dim=d, partial=share))
    block = config.indexer_compress_ratio
    pooling = BlockPooling(M, d, block, llama_like.norm(config, d), turned, gated=False)
    indexer = PooledIndexer(
        HeadProjection(M, J, d, llama_like.norm(config, d), turned),
        pooling,
        None,
        topk=config.indexer_budget // block,
    )
    return SelectedAttention(plain.project, indexer, plain.output)


def _check_streams(config: Qwen4ExpConfig) -> None:
    """Check what `llama_like.check` does, and that index heads have all rotated dims."""
    llama_like.check(config)
    rotated = int(config.head_dim * config.partial_rotary_factor)
    if rotated > config.indexer_head_dim:
        raise ArgumentError(
            f"indexer_head_dim is {config.indexer_head_dim}; it must be at least the number of "
            f"rotated dims of a head, {rotated}"
        )


INDEXER, SELECTOR = STORED_LAYER + "self_attn.indexer.", MIXER + "selector."
PLE, GRAMS = STORED_LAYER + "ple.", llama_like.MODEL_LAYER + "grams."
STREAMS = {
    "hc_norm": "norm.norm",
    "input_mix_weight_down": "norm.down",
    "input_mix_weight_up": "norm.up",
    "block_inject_weight": "write",
}
"""Stored name of a part of gated streams -> its name in the network."""
NUMBERS = {
    "layer_multipliers": "multipliers",
    "ngram_heads_vocab_sizes": "table_rows",
    "ngram_heads_offsets": "first_rows",
}
"""Stored name of the whole numbers of n-grams -> their name in the network."""
STREAMED: NameTable = {
    **{k: v for k, v in llama_like.EMBEDDING_AND_HEAD.items() if "norm" not in k},
    **ATTENTION,
    **DELTA,
    **SEPARATE_MAPS,
    **EXPERTS,
    **FUSED_EXPERTS,
    INDEXER + "index_qk_proj.weight": stacked_rows(
        SELECTOR + "q.linear.weight", SELECTOR + "pooling.content.weight"
    ),
    INDEXER + "q_layernorm.weight": SELECTOR + "q.steps.0.weight",
    INDEXER + "k_layernorm.weight": SELECTOR + "pooling.steps.0.weight",
    **{
        f"{STORED_LAYER}{theirs}_hyper_connection.{part}.weight": (
            f"{llama_like.MODEL_LAYER}{ours}_residual.{own}.weight"
        )
        for theirs, ours in (("attn", "attention"), ("mlp", "feed_forward"))
        for part, own in STREAMS.items()
    },
    **{
        f"model.hyper_connection_mixer.{part}.weight": f"{own}.weight"
        for part, own in STREAMS.items()
        if part != "block_inject_weight"
    },
    **{
        f"{PLE}{theirs}.weight": f"{GRAMS}{ours}.weight"
        for theirs, ours in (
            ("ple_embedding.ngram_embedding.shard_{}", "grams.embedding.parts.{}"),
            ("key_proj", "key"),
            ("value_proj", "value"),
            ("norm_key", "key_norm"),
            ("norm_query", "query_norm"),
            ("norm_conv", "value_norm"),
        )
    },
    **{f"{PLE}ple_embedding.{theirs}": f"{GRAMS}grams.{ours}" for theirs, ours in NUMBERS.items()},
    PLE + "conv1d.weight": gated_delta.filters(GRAMS + "convolution.weight"),
}


def _family(config: type[QwenHybridConfig], names: NameTable) -> Family:
    """Return a family of these models."""
    return llama_like.family(config, _layer, names, keep_float32=gated_delta.DECAYS)


FAMILIES = {
    "qwen3_next": _family(Qwen3NextConfig, {**PARTS, **EXPERTS, **JOINED_MAPS}),
    "qwen3_5_text": _family(Qwen35Config, {**PARTS, **SEPARATE_MAPS, **llama_like.FEED_FORWARD}),
    "qwen3_5_moe_text": _family(
        Qwen35MoeConfig, {**PARTS, **SEPARATE_MAPS, **EXPERTS, **FUSED_EXPERTS}
    ),
    "qwen4_exp_text": llama_like.family(
        Qwen4ExpConfig,
        None,
        STREAMED,
        keep_float32=gated_delta.DECAYS,
        keep_int64=tuple(f"*.grams.{name}" for name in NUMBERS.values()),
        build=_build_streams,
        check=_check_streams,
    ),
}
