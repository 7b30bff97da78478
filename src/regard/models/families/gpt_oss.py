"""gpt-oss: learned attention sinks, a sliding window in every second layer, and mixtures of experts
with clipped SwiGLU.

Source: OpenAI 2025 (arXiv 2508.10925), section 2.2; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from regard import masks
from regard.configs.llama import GptOssConfig
from regard.models.assembly import building_blocks, llama_like
from regard.models.checkpoint.family import NameTable, TensorRule
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, PreNorm
from regard.nn.experts import MoE
from regard.nn.feed_forward import ClippedSwiGLU
from regard.nn.linear import Linear
from regard.nn.routers import SoftmaxRouter
from regard.positions import Rotary

Config = GptOssConfig


def build(config: Config) -> Decoder:
    """Build the decoder of a config, with initial weights."""
    return llama_like.decoder(config, lambda rotary, window: _block(config, rotary, window))


def _block(config: Config, rotary: Rotary | None, window: int | None) -> Block:
    M, D, H, G = (
        config.hidden_size,
        config.head_dim,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    attention = Attention(
        building_blocks.rotary_heads(M, H, G, D, rotary, bias=config.attention_bias),
        Linear(H * D, M, bias=config.attention_bias),
        mask=masks.Causal() if window is None else masks.Causal() & masks.Window(window),
        sink=nn.Parameter(torch.zeros(H)),
    )
    n = config.num_local_experts
    clip = {"limit": config.swiglu_limit, "alpha": config.swiglu_alpha}
    experts = [ClippedSwiGLU(M, config.intermediate_size, **clip) for _ in range(n)]
    router = SoftmaxRouter(M, n, config.num_experts_per_tok, normalise=True, bias=True)
    residuals = (PreNorm(llama_like.norm(config)) for _ in range(2))
    return Block(attention, MoE(router, experts), *residuals)


def _stacked(*parts: str) -> TensorRule:
    """Return the rule for a tensor that stores some parameters of all n experts.

    With several `parts`, the stored columns alternate between them. A stored [n, in, parts * out]
    gives n matrices [out, in] for each part; a stored [n, parts * out] gives n biases [out].
    """

    def unpack(stored: Tensor, _: Sequence[torch.Size]) -> list[Tensor]:
        parts_of_experts = [stored[..., i :: len(parts)] for i in range(len(parts))]
        return [
            expert.T if expert.ndim == 2 else expert for part in parts_of_experts for expert in part
        ]

    def pack(parameters: Sequence[Tensor]) -> Tensor:
        turned = torch.stack([x.T if x.ndim == 2 else x for x in parameters])
        return torch.stack(turned.chunk(len(parts)), -1).flatten(-2)

    return TensorRule(tuple(f"{EXPERTS}.*.{part}" for part in parts), unpack, pack)


EXPERTS = llama_like.MODEL_LAYER + "feed_forward.experts"
STORED = llama_like.STORED_LAYER + "mlp."
NAMES: NameTable = (
    llama_like.EMBEDDING_AND_HEAD
    | llama_like.ATTENTION
    | llama_like.PRE_NORMS
    | {
        llama_like.STORED_LAYER + "self_attn.sinks": llama_like.MODEL_LAYER + "attention.sink",
        STORED + "router.weight": llama_like.MODEL_LAYER + "feed_forward.router.linear.weight",
        STORED + "router.bias": llama_like.MODEL_LAYER + "feed_forward.router.linear.bias",
        STORED + "experts.gate_up_proj": _stacked("gate.weight", "up.weight"),
        STORED + "experts.gate_up_proj_bias": _stacked("gate.bias", "up.bias"),
        STORED + "experts.down_proj": _stacked("down.weight"),
        STORED + "experts.down_proj_bias": _stacked("down.bias"),
    }
)

FAMILY = llama_like.family(Config, build, NAMES)
