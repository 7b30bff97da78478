"""gpt-oss: learned attention sinks, a sliding window in every second layer, and mixtures of experts
with clipped SwiGLU. Source: OpenAI 2025 (arXiv 2508.10925), section 2.2.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from regard.configs.gpt_oss import GptOssConfig
from regard.models.assembly import llama_like
from regard.models.assembly.llama_like import MODEL_LAYER, STORED_LAYER
from regard.models.checkpoint.family import NameTable, TensorRule
from regard.nn import Block
from regard.nn.blocks.experts import MoE
from regard.nn.blocks.feed_forward import ClippedSwiGLU
from regard.nn.blocks.routers import SoftmaxRouter
from regard.positions import Rotary


def _layer(config: GptOssConfig, _: int, rotary: Rotary | None, window: int | None) -> Block:
    M, n = config.hidden_size, config.num_local_experts
    attention = llama_like.attention(config, rotary, window)
    width, limit, alpha = config.intermediate_size, config.swiglu_limit, config.swiglu_alpha
    experts = [ClippedSwiGLU(M, width, limit=limit, alpha=alpha) for _ in range(n)]
    router = SoftmaxRouter(M, n, config.num_experts_per_tok, normalize=True, bias=True)
    return llama_like.block(config, attention, MoE(router, experts))


def _stacked(*parts: str) -> TensorRule:
    """Return the rule for a tensor with some parameters of n experts: [n, in, parts * out] gives n
    matrices [out, in] for each part, [n, parts * out] biases; the columns of `parts` alternate.
    """

    def unpack(stored: Tensor, _: Sequence[torch.Size]) -> list[Tensor]:
        parts_of_experts = [stored[..., i :: len(parts)] for i in range(len(parts))]
        return [
            expert.T if expert.ndim == 2 else expert for part in parts_of_experts for expert in part
        ]

    def pack(parameters: Sequence[Tensor]) -> Tensor:
        turned = torch.stack([x.T if x.ndim == 2 else x for x in parameters])
        return torch.stack(turned.chunk(len(parts)), -1).flatten(-2)

    names = tuple(f"{EXPERTS}.*.{part}" for part in parts)
    return TensorRule(names, unpack, pack, keeps_inputs=True)


EXPERTS = MODEL_LAYER + "feed_forward.experts"
STORED, ROUTER = STORED_LAYER + "mlp.", MODEL_LAYER + "feed_forward.router.linear."
NAMES: NameTable = {
    **llama_like.EMBEDDING_AND_HEAD,
    **llama_like.ATTENTION,
    **llama_like.PRE_NORMS,
    STORED_LAYER + "self_attn.sinks": MODEL_LAYER + "attention.sink",
    STORED + "router.weight": ROUTER + "weight",
    STORED + "router.bias": ROUTER + "bias",
    STORED + "experts.gate_up_proj": _stacked("gate.weight", "up.weight"),
    STORED + "experts.gate_up_proj_bias": _stacked("gate.bias", "up.bias"),
    STORED + "experts.down_proj": _stacked("down.weight"),
    STORED + "experts.down_proj_bias": _stacked("down.bias"),
}
FAMILIES = {"gpt_oss": llama_like.family(GptOssConfig, _layer, NAMES)}
