"""The language model of Llama 4: attention inside chunks with rotary positions in three of four
layers, queries with a temperature and no positions in the others, and mixtures of experts.

The temperature counts positions of tokens; transformers counts slots, so that its rows with padding
on the left differ from the same rows alone. Source: Meta 2025, "The Llama 4 herd", and its code.
"""

from __future__ import annotations

from torch import nn

from regard import masks
from regard.configs.llama import Llama4Config
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable
from regard.nn import Attention, Block, QueryTemperature, SeparateQKV, SwiGLU, WeightlessRMSNorm
from regard.nn.blocks.experts import InputWeightedMoE
from regard.nn.blocks.routers import LogitSigmoidRouter
from regard.positions import Rotary


def _layer(config: Llama4Config, index: int, rotary: Rotary | None, _: int | None) -> Block:
    M = config.hidden_size
    mixer = _attention(config, rotary, in_chunks=config.chunked()[index])
    if config.with_experts()[index]:
        return llama_like.block(config, mixer, _experts(config))
    return llama_like.block(config, mixer, SwiGLU(M, config.intermediate_size_mlp))


def _attention(config: Llama4Config, rotary: Rotary | None, *, in_chunks: bool) -> Attention:
    tempered = rotary is None and config.attn_temperature_tuning
    temperature = QueryTemperature("llama4", scale=config.attn_scale, length=config.floor_scale)
    mixer = llama_like.attention(
        config,
        rotary,
        q_steps=[temperature] if tempered else [],
        mask=masks.Chunk(config.attention_chunk_size) if in_chunks else None,
    )
    if rotary is not None and config.use_qk_norm:
        assert isinstance(mixer.project, SeparateQKV)
        for part in (mixer.project.q, mixer.project.k):
            part.steps.append(WeightlessRMSNorm(eps=config.rms_norm_eps))
    return mixer


def _experts(config: Llama4Config) -> nn.Module:
    M, hidden = config.hidden_size, config.intermediate_size
    n = config.num_local_experts
    router = LogitSigmoidRouter(M, n, config.num_experts_per_tok)
    return InputWeightedMoE(router, [SwiGLU(M, hidden) for _ in range(n)], SwiGLU(M, hidden))


STORED, FEED_FORWARD = STORED_LAYER + "feed_forward.", MODEL_LAYER + "feed_forward."
_NAMES: NameTable = {
    **llama_like.EMBEDDING_AND_HEAD,
    **llama_like.ATTENTION,
    **llama_like.PRE_NORMS,
    STORED + "router.weight": FEED_FORWARD + "router.linear.weight",
    **llama_like.stacked_experts(STORED, transposed=True),
    **{
        f"{STORED}{theirs}{part}_proj.weight": f"{FEED_FORWARD}{ours}{part}.weight"
        for theirs, ours in (("", ""), ("shared_expert.", "shared."))
        for part in ("gate", "up", "down")
    },
}
FAMILIES = {"llama4_text": llama_like.family(Llama4Config, _layer, _NAMES)}
