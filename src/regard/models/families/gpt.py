"""GPT-2, GPT-BigCode, GPT-J, GPT-Neo and GPT-NeoX: decoders with LayerNorms and feed-forward layers
without a gate. Source: Radford et al. 2019, "Language Models are Unsupervised Multitask Learners";
Ben Allal et al. 2023 (arXiv 2301.03988); Wang and Komatsuzaki 2021, "GPT-J-6B"; Black et al. 2021,
"GPT-Neo"; Black et al. 2022 (arXiv 2204.06745).
"""

from __future__ import annotations

from collections.abc import Sequence

from torch import nn

from regard import masks
from regard.argument_checks import resolve_head_dim
from regard.configs.gpt import (
    GPT2Config,
    GPTBigCodeConfig,
    GPTJConfig,
    GPTNeoConfig,
    GPTNeoXConfig,
)
from regard.models.assembly import building_blocks
from regard.models.assembly.building_blocks import (
    activation,
    embedding_and_head,
    initialize_weights,
)
from regard.models.checkpoint.family import (
    Family,
    NameTable,
    TensorRule,
    transposed,
    weight_and_bias,
    weights_and_biases,
)
from regard.models.decoder import Decoder
from regard.nn import (
    Attention,
    Block,
    FeedForward,
    FusedQKV,
    InputEmbedding,
    ParallelBlock,
    PreNorm,
    SharedNormBlock,
)
from regard.nn.variants.projections import separate_qkv
from regard.nn.weights import Linear
from regard.positions import LearnedPositions, Rotary


def _norms(dim: int, eps: float, count: int = 2) -> list[PreNorm]:
    return [PreNorm(nn.LayerNorm(dim, eps=eps)) for _ in range(count)]


def _decoder(
    config: GPT2Config | GPTNeoConfig | GPTNeoXConfig,
    dim: int,
    layers: Sequence[Block],
    eps: float,
    positions: int | None = None,
) -> Decoder:
    """Build a decoder with a last norm, and with learned positions if there are any."""
    embedding, head = embedding_and_head(config.vocab_size, dim, tied=config.tie_word_embeddings)
    learned = None if positions is None else LearnedPositions(positions, dim)
    embed, last = InputEmbedding(embedding, learned), nn.LayerNorm(dim, eps=eps)
    return initialize_weights(Decoder(embed, layers, last, head))


def _build_gpt2(config: GPT2Config) -> Decoder:
    layers = [_gpt2_block(config, i) for i in range(config.n_layer)]
    return _decoder(config, config.n_embd, layers, config.layer_norm_epsilon, config.n_positions)


def _gpt2_block(config: GPT2Config, layer: int) -> Block:
    M, H = config.n_embd, config.n_head
    D = resolve_head_dim(M, H, None)
    if isinstance(config, GPTBigCodeConfig) and config.multi_query:
        project = FusedQKV(M, H, 1, D, order="parts")
    else:
        by_head = isinstance(config, GPTBigCodeConfig)
        project = FusedQKV(M, H, H, D, order="heads" if by_head else "parts")
    scale = D**-0.5 if config.scale_attn_weights else 1.0
    if config.scale_attn_by_inverse_layer_idx:
        scale /= layer + 1
    attention = Attention(project, Linear(M, M), mask=masks.Causal(), scale=scale)
    feed_forward = FeedForward(M, config.hidden, activation(config.activation_function))
    return Block(attention, feed_forward, *_norms(M, config.layer_norm_epsilon))


def _build_gpt_neo(config: GPTNeoConfig) -> Decoder:
    layers = [_gpt_neo_block(config, window) for window in config.windows()]
    positions = config.max_position_embeddings
    return _decoder(config, config.hidden_size, layers, config.layer_norm_epsilon, positions)


def _gpt_neo_block(config: GPTNeoConfig, window: int | None) -> Block:
    M, H = config.hidden_size, config.num_heads
    D = resolve_head_dim(M, H, None)
    mask = masks.Causal() if window is None else masks.Causal() & masks.Window(window)
    attention = Attention(separate_qkv(M, H, H, D), Linear(M, M), mask=mask, scale=1.0)
    feed_forward = FeedForward(M, config.hidden, activation(config.activation_function))
    return Block(attention, feed_forward, *_norms(M, config.layer_norm_epsilon))


def _build_gptj(config: GPTJConfig) -> Decoder:
    M, V = config.n_embd, config.vocab_size
    rotary = building_blocks.rotary_module(config.rope)
    layers = [_gptj_block(config, rotary) for _ in range(config.n_layer)]
    embed, last = InputEmbedding(nn.Embedding(V, M)), nn.LayerNorm(M, eps=config.layer_norm_epsilon)
    return initialize_weights(Decoder(embed, layers, last, Linear(M, V)))


def _gptj_block(config: GPTJConfig, rotary: Rotary) -> Block:
    M, H = config.n_embd, config.n_head
    project = building_blocks.rotary_heads(M, H, H, M // H, rotary)
    attention = Attention(project, Linear(M, M, bias=False), mask=masks.Causal())
    feed_forward = FeedForward(M, config.hidden, activation(config.activation_function))
    return SharedNormBlock(attention, feed_forward, *_norms(M, config.layer_norm_epsilon, 1))


def _build_gpt_neox(config: GPTNeoXConfig) -> Decoder:
    rotary = building_blocks.rotary_module(config.rope)
    layers = [_gpt_neox_block(config, rotary) for _ in range(config.num_hidden_layers)]
    return _decoder(config, config.hidden_size, layers, config.layer_norm_eps)


def _gpt_neox_block(config: GPTNeoXConfig, rotary: Rotary) -> Block:
    M, H, bias = config.hidden_size, config.num_attention_heads, config.attention_bias
    project = FusedQKV(M, H, H, M // H, order="heads", steps=[rotary], bias=bias)
    attention = Attention(project, Linear(M, M, bias=bias), mask=masks.Causal())
    feed_forward = FeedForward(M, config.intermediate_size, activation(config.hidden_act))
    kind = ParallelBlock if config.use_parallel_residual else Block
    return kind(attention, feed_forward, *_norms(M, config.layer_norm_eps))


STORED_LAYER, MODEL_LAYER = "transformer.h.{}.", "layers.{}."
NORMS_AND_NETWORK = {
    "ln_1": "attention_residual.norm",
    "ln_2": "feed_forward_residual.norm",
    "mlp.c_fc": "feed_forward.up",
    "mlp.c_proj": "feed_forward.down",
}
BIG_CODE_PARTS = NORMS_AND_NETWORK | {
    "attn.c_attn": "attention.project.linear",
    "attn.c_proj": "attention.output",
}
EMBEDDINGS_AND_HEAD = {
    "transformer.wte.weight": "embed.embedding.weight",
    "transformer.wpe.weight": "embed.positional.weight",
    **weight_and_bias("transformer.ln_f", "norm"),
    "lm_head.weight": "head.weight",
}
BIG_CODE_NAMES = EMBEDDINGS_AND_HEAD | weights_and_biases(BIG_CODE_PARTS, STORED_LAYER, MODEL_LAYER)
GPT2_NAMES: dict[str, str | TensorRule] = {
    name: transposed(parameter)
    if name.startswith(STORED_LAYER) and ".ln_" not in name and name.endswith("weight")
    else parameter
    for name, parameter in BIG_CODE_NAMES.items()
}
"""Matrices are stored as [in, out]."""
GPT_NEO_NAMES = {
    **EMBEDDINGS_AND_HEAD,
    **weights_and_biases(
        NORMS_AND_NETWORK | {"attn.attention.out_proj": "attention.output"},
        STORED_LAYER,
        MODEL_LAYER,
    ),
    **{
        f"{STORED_LAYER}attn.attention.{part}_proj.weight": f"{MODEL_LAYER}attention.project.{part}"
        ".linear.weight"
        for part in "qkv"
    },
}
GPTJ_PARTS = {
    "ln_1": "attention_residual.norm",
    "mlp.fc_in": "feed_forward.up",
    "mlp.fc_out": "feed_forward.down",
}
GPTJ_NAMES: NameTable = {
    **EMBEDDINGS_AND_HEAD,
    **weight_and_bias("lm_head", "head"),
    **weights_and_biases(GPTJ_PARTS, STORED_LAYER, MODEL_LAYER),
    **{
        f"{STORED_LAYER}attn.{part}_proj.weight": f"{MODEL_LAYER}attention.project.{part}"
        ".linear.weight"
        for part in "qkv"
    },
    STORED_LAYER + "attn.out_proj.weight": MODEL_LAYER + "attention.output.weight",
}
NEOX_PARTS = {
    "input_layernorm": "attention_residual.norm",
    "attention.query_key_value": "attention.project.linear",
    "attention.dense": "attention.output",
    "post_attention_layernorm": "feed_forward_residual.norm",
    "mlp.dense_h_to_4h": "feed_forward.up",
    "mlp.dense_4h_to_h": "feed_forward.down",
}
NEOX_NAMES = {
    "gpt_neox.embed_in.weight": "embed.embedding.weight",
    **weight_and_bias("gpt_neox.final_layer_norm", "norm"),
    "embed_out.weight": "head.weight",
    **weights_and_biases(NEOX_PARTS, "gpt_neox.layers.{}.", MODEL_LAYER),
}
FAMILIES = {
    "gpt2": Family(
        GPT2Config,
        _build_gpt2,
        GPT2_NAMES,
        prefixes=("transformer.",),
        head="lm_head.weight",
        buffers=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    ),
    "gpt_bigcode": Family(
        GPTBigCodeConfig,
        _build_gpt2,
        BIG_CODE_NAMES,
        prefixes=("transformer.",),
        head="lm_head.weight",
        buffers=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias)",),
    ),
    "gpt_neo": Family(
        GPTNeoConfig,
        _build_gpt_neo,
        GPT_NEO_NAMES,
        prefixes=("transformer.",),
        head="lm_head.weight",
        buffers=(r"(transformer\.)?h\.\d+\.attn\.attention\.(bias|masked_bias)",),
    ),
    "gptj": Family(
        GPTJConfig,
        _build_gptj,
        GPTJ_NAMES,
        # the head has its own matrix and biases, and is never tied to the embedding
        complete_config=lambda config, _raw, _stored: config,
        check=lambda config: building_blocks.rotary_module(config.rope),
        prefixes=("transformer.",),
        buffers=(r"(transformer\.)?h\.\d+\.attn\.(bias|masked_bias|embed_positions)",),
    ),
    "gpt_neox": Family(
        GPTNeoXConfig,
        _build_gpt_neox,
        NEOX_NAMES,
        # a missing head is not tied to the embedding, unless config.json ties it
        complete_config=lambda config, _raw, _stored: config,
        check=lambda config: building_blocks.rotary_module(config.rope),
        prefixes=("gpt_neox.",),
        head="embed_out.weight",
        buffers=(r"(gpt_neox\.)?layers\.\d+\.attention\.(bias|masked_bias|rotary_emb\.inv_freq)",),
        rename_stored=lambda name: "embed_out.weight" if name == "lm_head.weight" else name,
    ),
}
