"""The model of a short training script, in plain torch, with the weights of a problem."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.problems import ModelProblem


class NanoGptStyle(nn.Module):
    """The model as a short training script writes it: one product for q, k and v, torch's attention
    function and norms, logits in one tensor.

    Args:
        problem: the problem, whose weights are copied.
        fused: whether attention is torch's function; otherwise it is written out.
    """

    def __init__(self, problem: ModelProblem, *, fused: bool = True) -> None:
        super().__init__()
        config, weights = problem.config, dict(problem.decoder.named_parameters())
        self.heads, self.groups = config.num_attention_heads, config.num_key_value_heads
        self.head_dim, self.eps, self.fused = config.head_dim, config.rms_norm_eps, fused

        def copied(*names: str) -> nn.Parameter:
            return nn.Parameter(torch.cat([weights[name].detach() for name in names]).clone())

        self.wte, self.norm = copied("embed.embedding.weight"), copied("norm.weight")
        self.layers = nn.ModuleList()
        for i in range(config.num_hidden_layers):
            layer_name = f"layers.{i}."
            parts = [f"{layer_name}attention.project.{x}.linear." for x in "qkv"]
            layer = nn.ParameterDict(
                {
                    "qkv": copied(*(f"{x}weight" for x in parts)),
                    "bias": copied(*(f"{x}bias" for x in parts)),
                    "out": copied(f"{layer_name}attention.output.weight"),
                    "gate": copied(f"{layer_name}feed_forward.gate.weight"),
                    "up": copied(f"{layer_name}feed_forward.up.weight"),
                    "down": copied(f"{layer_name}feed_forward.down.weight"),
                    "norm_1": copied(f"{layer_name}attention_residual.norm.weight"),
                    "norm_2": copied(f"{layer_name}feed_forward_residual.norm.weight"),
                }
            )
            self.layers.append(layer)
        half = self.head_dim // 2
        frequencies = config.rope_theta ** (-torch.arange(half, dtype=torch.float64) / half)
        angles = torch.arange(problem.sizes.S, dtype=torch.float64)[:, None] * frequencies
        self.register_buffer("cos", angles.cos().to(problem.device, self.wte.dtype))
        self.register_buffer("sin", angles.sin().to(problem.device, self.wte.dtype))
        if not fused:  # the reference computes in fp64 with tables of fp64
            self.cos, self.sin = angles.cos().to(problem.device), angles.sin().to(problem.device)

    @property
    def compared(self) -> tuple[nn.Parameter, nn.Parameter]:
        """The parameters whose gradients are compared: the embedding, and the first map down."""
        layer = self.layers[0]
        assert isinstance(layer, nn.ParameterDict)
        return self.wte, layer["down"]

    def loss(self, rows: Tensor) -> Tensor:
        """Return the mean cross entropy of the next token of rows `[B, S + 1]`."""
        x = F.embedding(rows[:, :-1], self.wte)
        for w in self.layers:
            assert isinstance(w, nn.ParameterDict)
            q, k, v = self._heads(F.linear(self._norm(x, w["norm_1"]), w["qkv"], w["bias"]))
            z = self._attention(self._rotate(q), self._rotate(k), v)
            x = x + F.linear(z.transpose(1, 2).flatten(2), w["out"])
            y = self._norm(x, w["norm_2"])
            x = x + F.linear(F.silu(F.linear(y, w["gate"])) * F.linear(y, w["up"]), w["down"])
        logits = F.linear(self._norm(x, self.norm), self.wte)
        wide = torch.promote_types(logits.dtype, torch.float32)
        return F.cross_entropy(logits.to(wide).flatten(0, 1), rows[:, 1:].flatten())

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)

    def _heads(self, x: Tensor) -> tuple[Tensor, ...]:
        """Return q, k and v `[B, heads, T, D]`."""
        D = self.head_dim
        parts = x.split((self.heads * D, self.groups * D, self.groups * D), dim=-1)
        return tuple(torch.unflatten(part, -1, (-1, D)).transpose(1, 2) for part in parts)

    def _rotate(self, x: Tensor) -> Tensor:
        cos, sin = self.cos.to(x.dtype), self.sin.to(x.dtype)
        a, b = x.chunk(2, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)

    def _attention(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        v = v.to(q.dtype)
        if self.fused:
            return F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        ratio = self.heads // self.groups
        k, v = (x.repeat_interleave(ratio, dim=1) for x in (k, v))
        scores = (q @ k.mT) * self.head_dim**-0.5
        hidden = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
        out: Tensor = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1) @ v
        return out
