"""The language model of Llama 4: attention inside chunks with rotary positions in three of four
layers, queries with a temperature and no positions in the others, and mixtures of experts that read
weighted inputs.

From a folder with image input (`model_type` "llama4"), only `text_config` and the tensors of the
language model are read. The temperature counts positions of tokens; transformers counts slots, so
that its rows with padding on the left differ from the same rows alone.

Source: Meta 2025, "The Llama 4 herd", and its released code; key names as in Hugging Face
checkpoints.
"""

from __future__ import annotations

from dataclasses import replace

from torch import nn

from regard import masks
from regard.configs.llama4 import Llama4Config
from regard.models.assembly import building_blocks, llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, PreNorm, QueryTemperature, SwiGLU, WeightlessRMSNorm
from regard.nn.experts import InputWeightedMoE
from regard.nn.linear import Linear
from regard.nn.routers import LogitSigmoidRouter
from regard.positions import Rotary

Config = Llama4Config


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    layers = iter(zip(config.chunked(), config.with_experts(), strict=True))

    def block(rotary: Rotary | None, _: int | None) -> Block:
        in_chunks, has_experts = next(layers)
        network = (
            _experts(config)
            if has_experts
            else SwiGLU(config.hidden_size, config.intermediate_size_mlp)
        )
        residuals = (PreNorm(llama_like.norm(config)) for _ in range(2))
        return Block(_attention(config, rotary, in_chunks=in_chunks), network, *residuals)

    return llama_like.decoder(config, block)


def _attention(config: Config, rotary: Rotary | None, *, in_chunks: bool) -> Attention:
    M, D, H, G = (
        config.hidden_size,
        config.head_dim,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    tempered = rotary is None and config.attn_temperature_tuning
    temperature = QueryTemperature("llama4", scale=config.attn_scale, length=config.floor_scale)
    project = building_blocks.rotary_heads(
        M,
        H,
        G,
        D,
        rotary,
        q_steps=[temperature] if tempered else [],
        bias=config.attention_bias,
    )
    if rotary is not None and config.use_qk_norm:
        for part in (project.q, project.k):
            part.steps.append(WeightlessRMSNorm(eps=config.rms_norm_eps))
    causal = masks.Causal()
    mask = causal & masks.Chunk(config.attention_chunk_size) if in_chunks else causal
    return Attention(project, Linear(H * D, M, bias=config.attention_bias), mask=mask)


def _experts(config: Config) -> nn.Module:
    M, hidden = config.hidden_size, config.intermediate_size
    n = config.num_local_experts
    router = LogitSigmoidRouter(M, n, config.num_experts_per_tok)
    return InputWeightedMoE(router, [SwiGLU(M, hidden) for _ in range(n)], SwiGLU(M, hidden))


STORED, FEED_FORWARD = STORED_LAYER + "feed_forward.", MODEL_LAYER + "feed_forward."
NAMES: NameTable = {
    **llama_like.EMBEDDING_AND_HEAD,
    **llama_like.ATTENTION,
    **llama_like.PRE_NORMS,
    STORED + "router.weight": FEED_FORWARD + "router.linear.weight",
    STORED + "experts.gate_up_proj": llama_like.experts_in_one_tensor(
        "gate", "up", transposed=True
    ),
    STORED + "experts.down_proj": llama_like.experts_in_one_tensor("down", transposed=True),
    **{
        f"{STORED}{theirs}{part}_proj.weight": f"{FEED_FORWARD}{ours}{part}.weight"
        for theirs, ours in (("", ""), ("shared_expert.", "shared."))
        for part in ("gate", "up", "down")
    },
}
FAMILY = llama_like.family(Config, build, NAMES)
FAMILY = replace(
    FAMILY,
    buffers=(*FAMILY.buffers, r"(model\.)?(vision_model|multi_modal_projector)\..*"),
    rename_stored=llama_like.rename_language_model,
)
