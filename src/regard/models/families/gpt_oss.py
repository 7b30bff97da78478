"""gpt-oss: learned sinks, every second layer local, and clipped SwiGLU experts of which each token
uses a few.

Source: OpenAI 2025 (arXiv 2508.10925), section 2.2; key names as in Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from regard import masks
from regard.arguments import check_number
from regard.cost import layer_types
from regard.errors import ArgumentError
from regard.models.assembly import grouped, rope
from regard.models.checkpoint.family import Family, Raw
from regard.models.checkpoint.names import Names, Rule
from regard.models.decoder import Decoder
from regard.nn import Attention, Block, PreNorm
from regard.nn.feed_forward import ClippedSwiGLU, MoE, SoftmaxRouter
from regard.nn.linear import Linear
from regard.positions import Rotary

YARN = {
    "rope_type": "yarn",
    "factor": 32.0,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
"""The scaling of a file that names none."""


@dataclass(frozen=True)
class Config(grouped.Config):
    """The keys of a gpt-oss config.json that shape the model.

    Raises:
        ArgumentError: as `regard.models.assembly.grouped.Config`; a token uses more experts than
            there are; or a number of the experts is not above 0.
    """

    head_dim: int = 64
    num_local_experts: int = 128
    num_experts_per_tok: int = 4
    sliding_window: int | None = 128
    layer_types: tuple[str, ...] | None = None
    rms_norm_eps: float = 1e-5
    rope_theta: float = 150000.0
    rope_scaling: Mapping[str, Any] | None = field(default_factory=lambda: dict(YARN))
    max_position_embeddings: int = 131072
    attention_bias: bool = True
    swiglu_limit: float = 7.0
    swiglu_alpha: float = 1.702

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in ("swiglu_limit", "swiglu_alpha"):
            check_number(name, getattr(self, name), 0, float("inf"), "a finite number above 0")
        if self.num_experts_per_tok > self.num_local_experts:
            raise ArgumentError(
                f"num_experts_per_tok is {self.num_experts_per_tok}, and num_local_experts "
                f"{self.num_local_experts}"
            )

    def windows(self) -> tuple[int | None, ...]:
        """By layer_types; if there are none, layers 0, 2, 4, ... are local."""
        pattern = None if self.layer_types is not None or self.sliding_window is None else 2
        return layer_types.windows(
            self.num_hidden_layers,
            sliding_window=self.sliding_window,
            layer_types=self.layer_types,
            sliding_window_pattern=pattern,
        )


def plain(raw: Raw) -> dict[str, Any]:
    """Files that say nothing of rotary scaling, or null, have the usual one, as transformers reads
    them.

    experts_per_token is an older num_experts_per_tok.
    """
    found = rope.plain(raw)
    if found["rope_scaling"] is None:
        said = raw.get("rope_scaling") or raw.get("rope_parameters")
        found["rope_scaling"] = {"rope_type": "default"} if said else dict(YARN)
    older, newer = found.pop("experts_per_token", None), found.get("num_experts_per_tok")
    if older is not None and newer not in (None, older):
        raise ArgumentError(
            f"experts_per_token is {older} and num_experts_per_tok is {newer}; they mean the "
            "same: keep one"
        )
    return found if older is None else found | {"num_experts_per_tok": older}


def build(config: Config) -> Decoder:
    """The decoder of a config, with fresh weights."""
    return grouped.decoder(config, lambda rotary, window: _block(config, rotary, window))


def _block(config: Config, rotary: Rotary, window: int | None) -> Block:
    M, D, H, G = (
        config.hidden_size,
        config.head_dim,
        config.num_attention_heads,
        config.num_key_value_heads,
    )
    attention = Attention(
        rope.heads(M, H, G, D, rotary, bias=config.attention_bias),
        Linear(H * D, M, bias=config.attention_bias),
        mask=masks.Causal() if window is None else masks.Causal() & masks.Window(window),
        sink=nn.Parameter(torch.zeros(H)),
    )
    n = config.num_local_experts
    clip = {"limit": config.swiglu_limit, "alpha": config.swiglu_alpha}
    experts = [ClippedSwiGLU(M, config.intermediate_size, **clip) for _ in range(n)]
    router = SoftmaxRouter(M, n, config.num_experts_per_tok, normalise=True, bias=True)
    paths = (PreNorm(grouped.norm(config)) for _ in range(2))
    return Block(attention, MoE(router, experts), *paths)


def _stacked(*parts: str) -> Rule:
    """Parts of all experts in one tensor, whose last dimension takes them in turns; matrices are
    [in, out].

    Stored [n, in, p * out] or [n, p * out] -> p times n of [out, in] or [out].
    """

    def take(stored: Tensor, _: Sequence[torch.Size]) -> list[Tensor]:
        turns = [stored[..., i :: len(parts)] for i in range(len(parts))]
        return [expert.T if expert.ndim == 2 else expert for part in turns for expert in part]

    def give(found: Sequence[Tensor]) -> Tensor:
        turned = torch.stack([x.T if x.ndim == 2 else x for x in found])
        return torch.stack(turned.chunk(len(parts)), -1).flatten(-2)

    return Rule(tuple(f"{EXPERTS}.*.{part}" for part in parts), take, give)


EXPERTS = grouped.OURS + "feed_forward.experts"
STORED = grouped.THEIRS + "mlp."
NAMES: Names = (
    grouped.OUTSIDE
    | grouped.ATTENTION
    | grouped.PRE_NORMS
    | {
        grouped.THEIRS + "self_attn.sinks": grouped.OURS + "attention.sink",
        STORED + "router.weight": grouped.OURS + "feed_forward.router.linear.weight",
        STORED + "router.bias": grouped.OURS + "feed_forward.router.linear.bias",
        STORED + "experts.gate_up_proj": _stacked("gate.weight", "up.weight"),
        STORED + "experts.gate_up_proj_bias": _stacked("gate.bias", "up.bias"),
        STORED + "experts.down_proj": _stacked("down.weight"),
        STORED + "experts.down_proj_bias": _stacked("down.bias"),
    }
)

FAMILY = Family(
    Config,
    build,
    NAMES,
    ignored=frozenset({"initial_context_length"}),
    fixed={"hidden_act": ("silu",)},
    plain=plain,
    prefixes=grouped.PREFIXES,
    head=grouped.HEAD,
    buffers=grouped.BUFFERS,
)
