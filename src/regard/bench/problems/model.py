"""One decoding step of a whole model with random weights, and the same model in plain torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from regard.bench.interfaces import Outputs, Problem, Sizes, Work
from regard.caches import Fixed
from regard.cost import attention_flops
from regard.cost.softmax import attention_bytes
from regard.models.decoder import Decoder
from regard.models.families import qwen2
from regard.span import Span

Weights = Mapping[str, Tensor]
"""Parameters under the names of our decoder."""


def last_logits(
    config: qwen2.Config,
    weights: Weights,
    ids: Tensor,
    memory: list[tuple[Tensor, Tensor]] | None,
    dtype: torch.dtype,
) -> Tensor:
    """Logits [B,1,V] behind the last of ids [B,T], which follow the turned keys and values
    [B,G,S,D] of each layer.

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
    """The heads side by side [B,T,H D]: a bias on q, k and v, rotary halves, grouped heads,
    causal.
    """
    made = {}
    for part in "qkv":
        linear = (weights[f"{name}project.{part}.linear.{w}"] for w in ("weight", "bias"))
        w, b = (p.detach().to(x.dtype) for p in linear)
        made[part] = torch.unflatten(x @ w.T + b, -1, (-1, config.head_dim)).transpose(1, 2)
    q, new = _turn(config, made["q"], start), [_turn(config, made["k"], start), made["v"]]
    if old is not None:
        new = [torch.cat((o.to(x.dtype), n), dim=2) for o, n in zip(old, new, strict=True)]
    ratio = config.num_attention_heads // config.num_key_value_heads
    k, v = (part.repeat_interleave(ratio, dim=1) for part in new)
    T, S = q.shape[2], k.shape[2]
    scores = (q @ k.mT) * config.head_dim**-0.5
    hidden = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
    weights_ = torch.softmax(scores.masked_fill(hidden, float("-inf")), dim=-1)
    out: Tensor = (weights_ @ v).transpose(1, 2).flatten(2)
    return out


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


PROMPT = 4
"""Tokens of a short text, on which a peer is checked whose cache cannot be given numbers."""


@dataclass(frozen=True)
class ModelSizes(Sizes):
    """The shape of Qwen2-0.5B, if not said otherwise, with S tokens in the cache.

    >>> print(ModelSizes(S=8192))
    B1 24 layers M896 H14 G2 D64 vocabulary 151936 S8192
    """

    S: int
    B: int = 1
    layers: int = 24
    dim: int = 896
    inner: int = 4864
    H: int = 14
    G: int = 2
    vocabulary: int = 151_936

    def resized(self, *, length: int | None = None, batch: int | None = None) -> ModelSizes:
        """The same with another S, or B."""
        return replace(self, S=length or self.S, B=batch or self.B)

    @property
    def head_dim(self) -> int:
        """The dim of a head."""
        return self.dim // self.H

    @property
    def weights(self) -> int:
        """Numbers that a step reads: all matrices; the head is the embedding."""
        attention = self.dim * (2 * self.H + 2 * self.G) * self.head_dim
        return self.layers * (attention + 3 * self.dim * self.inner) + self.vocabulary * self.dim

    @property
    def cached(self) -> int:
        """Numbers in the caches of all layers."""
        return self.layers * self.B * self.S * 2 * self.G * self.head_dim

    def bytes(self, dtype: torch.dtype) -> int:
        """The model while it is made in fp32, its largest matrix in fp64, and a few caches."""
        largest = max(self.vocabulary, self.inner) * self.dim
        return self.weights * (dtype.itemsize + 4) + 8 * largest + 4 * self.cached * dtype.itemsize

    def config(self) -> qwen2.Config:
        """Return the config of a checkpoint of this shape."""
        return qwen2.Config(
            vocab_size=self.vocabulary,
            hidden_size=self.dim,
            intermediate_size=self.inner,
            num_hidden_layers=self.layers,
            num_attention_heads=self.H,
            num_key_value_heads=self.G,
            head_dim=self.head_dim,
            rope_theta=1e6,
            max_position_embeddings=max(32768, self.S + 1),
            tie_word_embeddings=True,
        )

    def problem(self, dtype: torch.dtype, device: torch.device) -> ModelProblem:
        """Random weights and a random cache, the same for a size each time."""
        return ModelProblem(self, dtype, device)

    def __str__(self) -> str:
        heads = f"H{self.H} G{self.G} D{self.head_dim}"
        size = f"{self.layers} layers M{self.dim} {heads} vocabulary {self.vocabulary}"
        return f"B{self.B} {size} S{self.S}"


class ModelProblem(Problem):
    """The answer is "logits" [B,1,V] of one token behind S others, and "prompt", the last logits of
    a short text.

    Keys and values of the S tokens are random, with a spread at which weights are uneven: then the
    logits depend on which keys were seen. Peers share the decoder's parameters where they can.

    >>> sizes = ModelSizes(S=4, layers=1, dim=16, inner=16, H=4, G=2, vocabulary=11)
    >>> problem = sizes.problem(torch.float32, torch.device("cpu"))
    >>> {name: tuple(x.shape) for name, x in problem.reference().items()}
    {'logits': (1, 1, 11), 'prompt': (1, 1, 11)}
    """

    def __init__(self, sizes: ModelSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        generator = torch.Generator().manual_seed(0)
        self.config = sizes.config()
        self.decoder = spread(qwen2.build(self.config), generator).to(device, dtype).eval()
        vocabulary = sizes.vocabulary
        self.ids = torch.randint(vocabulary, (sizes.B, 1), generator=generator).to(device)
        self.prompt = torch.randint(vocabulary, (1, PROMPT), generator=generator).to(device)

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """Turned keys and values [B,G,S,D] of a layer, made anew: each peer has them in its own
        cache only.
        """
        s = self.sizes
        generator = torch.Generator().manual_seed(1 + layer)
        made = 3 * torch.randn(2, s.B, s.G, s.S, s.head_dim, generator=generator)
        k, v = made.to(self.device, self.dtype).unbind(0)
        return k, v

    def caches(self, dtype: torch.dtype) -> list[Fixed]:
        """Filled caches for a decoder, with room for one token more."""
        caches = [Fixed(self.sizes.S + 1) for _ in range(self.sizes.layers)]
        for layer, cache in enumerate(caches):
            k, v = self.memory(layer)
            cache.update((k.to(dtype), v.to(dtype)), Span(0, self.sizes.S))
        return caches

    @property
    def work(self) -> Work:
        """Every matrix and every cached number once."""
        s = self.sizes
        heads = {"H": s.H, "G": s.G, "T": 1, "S": s.S + 1, "D": s.head_dim, "E": s.head_dim}
        pairs = s.B * s.H * (s.S + 1)
        flops = 2 * s.B * s.weights + s.layers * attention_flops(pairs, s.head_dim, s.head_dim)
        moved = s.layers * attention_bytes(B=s.B, **heads, itemsize=self.dtype.itemsize)
        return Work(flops, s.weights * self.dtype.itemsize + moved)

    def reference(self) -> Outputs:
        """By the definition in fp64, or fp32 for half types."""
        return self._answer(torch.float64 if self.dtype == torch.float32 else torch.float32)

    def plain(self) -> Outputs:
        """The same in the problem's dtype; nothing where the rule does not ask for it."""
        return {} if self.dtype == torch.float32 else self._answer(self.dtype)

    def _answer(self, dtype: torch.dtype) -> Outputs:
        weights = dict(self.decoder.named_parameters())
        memory = [self.memory(layer) for layer in range(self.sizes.layers)]
        return {
            "logits": last_logits(self.config, weights, self.ids, memory, dtype),
            "prompt": last_logits(self.config, weights, self.prompt, None, dtype),
        }

    def foreign(self) -> dict[str, Any]:
        """The config in Hugging Face's words."""
        return asdict(self.config)


def spread(decoder: Decoder, generator: torch.Generator) -> Decoder:
    """Give every matrix random numbers of spread 1/sqrt(fan-in), and biases some too: no layer is
    silent.
    """
    for parameter in decoder.parameters():
        with torch.no_grad():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    for module in decoder.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.1, generator=generator)
    return decoder
