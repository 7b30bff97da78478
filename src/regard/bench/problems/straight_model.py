"""A Qwen2 read off its definition, in any dtype: what whole models, ours too, are held against.

Source: Yang et al. 2024 (arXiv 2407.10671), section 2.2.1, and the papers on its parts.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.models.families import qwen2

Weights = Mapping[str, Tensor]
"""Parameters under the names of our decoder."""


def last_logits(
    config: qwen2.Config,
    weights: Weights,
    ids: Tensor,
    memory: list[tuple[Tensor, Tensor]] | None,
    dtype: torch.dtype,
) -> Tensor:
    """Logits [B,1,V] behind the last of ids [B,T], which follow the turned keys and values [B,G,S,D] of each layer.

    Weights are converted one at a time.
    """

    def weight(name: str) -> Tensor:
        return weights[name].detach().to(dtype)

    start = 0 if memory is None else memory[0][0].shape[2]
    x = F.embedding(ids, weights["embed.embedding.weight"].detach()).to(dtype)
    for i in range(config.num_hidden_layers):
        layer = f"layers.{i}."
        normed = _norm(x, weight(f"{layer}around_attention.norm.weight"), config.rms_norm_eps)
        old = None if memory is None else memory[i]
        z = _attention(config, weights, f"{layer}attention.", normed, start, old)
        x = x + z @ weight(f"{layer}attention.output.weight").T
        normed = _norm(x, weight(f"{layer}around_feed_forward.norm.weight"), config.rms_norm_eps)
        gate = F.silu(normed @ weight(f"{layer}feed_forward.gate.weight").T)
        up = normed @ weight(f"{layer}feed_forward.up.weight").T
        x = x + (gate * up) @ weight(f"{layer}feed_forward.down.weight").T
    x = _norm(x[:, -1:], weight("norm.weight"), config.rms_norm_eps)
    return x @ weight("embed.embedding.weight").T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _attention(
    config: qwen2.Config,
    weights: Weights,
    name: str,
    x: Tensor,
    start: int,
    old: tuple[Tensor, Tensor] | None,
) -> Tensor:
    """The heads side by side [B,T,H D]: a bias on q, k and v, rotary halves, grouped heads, causal."""
    made = {}
    for part in "qkv":
        linear = (weights[f"{name}project.{part}.linear.{w}"] for w in ("weight", "bias"))
        w, b = (p.detach().to(x.dtype) for p in linear)
        made[part] = (x @ w.T + b).unflatten(-1, (-1, config.head_dim)).transpose(1, 2)
    q, new = _turn(config, made["q"], start), [_turn(config, made["k"], start), made["v"]]
    if old is not None:
        new = [torch.cat((o.to(x.dtype), n), dim=2) for o, n in zip(old, new, strict=True)]
    ratio = config.num_attention_heads // config.num_key_value_heads
    k, v = (part.repeat_interleave(ratio, dim=1) for part in new)
    T, S = q.shape[2], k.shape[2]
    scores = (q @ k.mT) * config.head_dim**-0.5
    hidden = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
    weights_ = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    return (weights_ @ v).transpose(1, 2).flatten(2)


def _turn(config: qwen2.Config, x: Tensor, start: int) -> Tensor:
    """Rotary positions: dim i turns with dim i + D/2 by position theta^(-2 i / D)."""
    wide = torch.promote_types(x.dtype, torch.float32)
    D = config.head_dim
    i = torch.arange(D // 2, device=x.device, dtype=torch.float64)
    positions = torch.arange(start, start + x.shape[2], device=x.device, dtype=torch.float64)
    angles = positions[:, None] * config.rope_theta ** (-2 * i / D)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
