"""One decoding step of a whole model, and the same in plain torch and as a GGUF file."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.interfaces import MinimumWork, Outputs, Problem, ProblemSizes
from regard.caches import Fixed
from regard.configs.qwen import Qwen2Config
from regard.cost import attention_flops
from regard.cost.softmax import attention_bytes
from regard.files.gguf_files import MetadataValue
from regard.files.gguf_writer import TensorToWrite, write_gguf
from regard.models.decoder import Decoder
from regard.models.families import family
from regard.span import Span
from regard.units import plural

Weights = Mapping[str, Tensor]
"""Parameters under their names in `regard.models.decoder.Decoder`."""


def last_logits(
    config: Qwen2Config,
    weights: Weights,
    ids: Tensor,
    memory: list[tuple[Tensor, Tensor]] | None,
    dtype: torch.dtype,
    angles: torch.dtype = torch.float64,
) -> Tensor:
    """Compute the logits `[B, 1, V]` of the last token in plain torch."""

    def weight(name: str) -> Tensor:
        return weights[name].detach().to(dtype)

    start = 0 if memory is None else memory[0][0].shape[2]
    x = F.embedding(ids, weights["embed.embedding.weight"].detach()).to(dtype)
    for i in range(config.num_hidden_layers):
        layer = f"layers.{i}."
        normed = _norm(x, weight(f"{layer}attention_residual.norm.weight"), config.rms_norm_eps)
        cached = None if memory is None else memory[i]
        z = _attention(config, weights, f"{layer}attention.", normed, start, cached, angles)
        x = x + z @ weight(f"{layer}attention.output.weight").T
        normed = _norm(x, weight(f"{layer}feed_forward_residual.norm.weight"), config.rms_norm_eps)
        gate = F.silu(normed @ weight(f"{layer}feed_forward.gate.weight").T)
        up = normed @ weight(f"{layer}feed_forward.up.weight").T
        x = x + (gate * up) @ weight(f"{layer}feed_forward.down.weight").T
    x = _norm(x[:, -1:], weight("norm.weight"), config.rms_norm_eps)
    return x @ weight("embed.embedding.weight").T


def _norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Apply an RMS norm, computed in fp32 or better."""
    wide = x.to(torch.promote_types(x.dtype, torch.float32))
    return weight * (wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)).to(x.dtype)


def _attention(
    config: Qwen2Config,
    weights: Weights,
    name: str,
    x: Tensor,
    start: int,
    cached: tuple[Tensor, Tensor] | None,
    angles: torch.dtype,
) -> Tensor:
    """Compute the heads `[B, T, H D]` of causal grouped-query attention with rotary positions."""
    projected = {}
    for part in "qkv":
        linear = (weights[f"{name}project.{part}.linear.{w}"] for w in ("weight", "bias"))
        w, b = (p.detach().to(x.dtype) for p in linear)
        projected[part] = torch.unflatten(x @ w.T + b, -1, (-1, config.head_dim)).transpose(1, 2)
    q, new = (
        _rotate(config, projected["q"], start, angles),
        [_rotate(config, projected["k"], start, angles), projected["v"]],
    )
    if cached is not None:
        new = [
            torch.cat((cached_part.to(x.dtype), new_part), dim=2)
            for cached_part, new_part in zip(cached, new, strict=True)
        ]
    ratio = config.num_attention_heads // config.num_key_value_heads
    k, v = (part.repeat_interleave(ratio, dim=1) for part in new)
    T, S = q.shape[2], k.shape[2]
    scores = (q @ k.mT) * config.head_dim**-0.5
    masked = torch.ones(T, S, dtype=torch.bool, device=x.device).triu(S - T + 1)
    weights_ = torch.softmax(scores.masked_fill(masked, float("-inf")), dim=-1)
    out: Tensor = (weights_ @ v).transpose(1, 2).flatten(2)
    return out


def _rotate(config: Qwen2Config, x: Tensor, start: int, dtype: torch.dtype) -> Tensor:
    """Rotate x: dims i and i + D/2 turn by position theta^(-2 i / D), in `dtype`."""
    wide = torch.promote_types(x.dtype, torch.float32)
    D = config.head_dim
    i = torch.arange(D // 2, device=x.device, dtype=dtype)
    positions = torch.arange(start, start + x.shape[2], device=x.device, dtype=dtype)
    angles = positions[:, None] * config.rope_theta ** (-2 * i / D)
    cos, sin = angles.cos().to(wide), angles.sin().to(wide)
    a, b = x.to(wide).chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)


PROMPT_TOKENS = 4
"""The length of the prompt on which peers are compared whose caches cannot be set to given values.
"""


@dataclass(frozen=True)
class ModelSizes(ProblemSizes):
    """The sizes of a model with S tokens in the cache; the defaults are those of Qwen2-0.5B.

    Args:
        bits: 8 or 4: matrices of whole codes times a power of two, which every format of these bits
            holds exactly; or None.
    """

    S: int
    B: int = 1
    layers: int = 24
    dim: int = 896
    inner: int = 4864
    H: int = 14
    G: int = 2
    vocabulary: int = 151_936
    bits: int | None = None

    @property
    def head_dim(self) -> int:
        """The dim of a head."""
        return self.dim // self.H

    @property
    def weights(self) -> int:
        """The number of parameters that a step reads; the output head is the embedding."""
        attention = self.dim * (2 * self.H + 2 * self.G) * self.head_dim
        return self.layers * (attention + 3 * self.dim * self.inner) + self.vocabulary * self.dim

    @property
    def cached(self) -> int:
        """The number of elements in the caches of all layers."""
        return self.layers * self.B * self.S * 2 * self.G * self.head_dim

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of the model in fp32, its largest matrix in fp64, and some caches."""
        largest = max(self.vocabulary, self.inner) * self.dim
        return self.weights * (dtype.itemsize + 4) + 8 * largest + 4 * self.cached * dtype.itemsize

    def config(self) -> Qwen2Config:
        """Return the config of a checkpoint of these sizes."""
        return Qwen2Config(
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
        return ModelProblem(self, dtype, device)

    def __str__(self) -> str:
        heads = f"H{self.H} G{self.G} D{self.head_dim}"
        size = f"{plural(self.layers, 'layer')} M{self.dim} {heads} vocabulary {self.vocabulary}"
        form = "" if self.bits is None else f", weights of {self.bits} bits"
        return f"B{self.B} {size} S{self.S}{form}"


class ModelProblem(Problem):
    """A decoding step of a model with random weights.

    The outputs are "logits" `[B, 1, V]` after S cached tokens, and "prompt", the last logits of a
    short prompt. The cached keys make the weights uneven, so that the logits depend on them.
    """

    def __init__(self, sizes: ModelSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        generator = torch.Generator().manual_seed(0)
        self.config = sizes.config()
        network = family("qwen2").build(self.config)
        assert isinstance(network, Decoder)
        decoder = initialize_weights(network, generator)
        if sizes.bits is not None:
            round_to_codes(decoder, sizes.bits)
        self.decoder = decoder.to(device, dtype).eval()
        vocabulary = sizes.vocabulary
        self.ids = torch.randint(vocabulary, (sizes.B, 1), generator=generator).to(device)
        self.prompt = torch.randint(vocabulary, (1, PROMPT_TOKENS), generator=generator).to(device)

    def memory(self, layer: int) -> tuple[Tensor, Tensor]:
        """Generate the random cache of a layer; each call generates it anew."""
        s = self.sizes
        generator = torch.Generator().manual_seed(1 + layer)
        values = 3 * torch.randn(2, s.B, s.G, s.S, s.head_dim, generator=generator)
        k, v = values.to(self.device, self.dtype).unbind(0)
        return k, v

    def caches(self, dtype: torch.dtype) -> list[Fixed]:
        """Create filled caches for the decoder, with room for one more token."""
        caches = [Fixed(self.sizes.S + 1) for _ in range(self.sizes.layers)]
        for layer, cache in enumerate(caches):
            k, v = self.memory(layer)
            cache.update((k.to(dtype), v.to(dtype)), Span(0, self.sizes.S))
        return caches

    @property
    def work(self) -> MinimumWork:
        """The minimum work: every matrix and every element of the caches is read once."""
        s = self.sizes
        heads = {"H": s.H, "G": s.G, "T": 1, "S": s.S + 1, "D": s.head_dim, "E": s.head_dim}
        pairs = s.B * s.H * (s.S + 1)
        flops = 2 * s.B * s.weights + s.layers * attention_flops(pairs, s.head_dim, s.head_dim)
        moved = s.layers * attention_bytes(B=s.B, **heads, itemsize=self.dtype.itemsize)
        weight_bytes = (
            s.weights * self.dtype.itemsize if s.bits is None else s.weights * s.bits // 8
        )
        return MinimumWork(flops, weight_bytes + moved)

    def reference(self) -> Outputs:
        return self._answer(torch.float64 if self.dtype == torch.float32 else torch.float32)

    def plain(self) -> Outputs:
        if self.dtype == torch.float32:
            return self._answer(torch.float32, angles=torch.float32)
        return self._answer(self.dtype)

    def _answer(self, dtype: torch.dtype, angles: torch.dtype = torch.float64) -> Outputs:
        """Compute the outputs in plain torch."""
        weights = dict(self.decoder.named_parameters())
        memory = [self.memory(layer) for layer in range(self.sizes.layers)]
        return {
            "logits": last_logits(self.config, weights, self.ids, memory, dtype, angles),
            "prompt": last_logits(self.config, weights, self.prompt, None, dtype, angles),
        }

    def hugging_face_config(self) -> dict[str, Any]:
        """Return the config with the keys of Hugging Face."""
        return asdict(self.config)


def initialize_weights(decoder: Decoder, generator: torch.Generator) -> Decoder:
    """Fill every matrix with random numbers of 1/sqrt(fan-in), and biases with 0.1."""
    for parameter in decoder.parameters():
        with torch.no_grad():
            if parameter.ndim > 1:
                nn.init.normal_(parameter, std=parameter.shape[-1] ** -0.5, generator=generator)
    for module in decoder.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.normal_(module.bias, std=0.1, generator=generator)
    return decoder


def round_to_codes(decoder: nn.Module, bits: int) -> None:
    """Round every matrix to whole codes times a power of two, in place.

    The codes of 32 neighbouring inputs contain the smallest and the largest one, -127 and 127 or -8
    and 7, so that quantization by the largest number of a group finds the same scale.

    >>> decoder = nn.ModuleList([nn.Linear(32, 1, bias=False)])
    >>> round_to_codes(decoder, 4)
    >>> codes = decoder[0].weight / (decoder[0].weight.max() / 7)
    >>> codes.min().item(), bool((codes == codes.round()).all())
    (-8.0, True)
    """
    least, most, spread = (-127, 127, 40.0) if bits == 8 else (-8, 7, 2.5)
    for parameter in decoder.parameters():
        if parameter.ndim < 2:
            continue
        with torch.no_grad():
            codes = (parameter * (spread * parameter.shape[-1] ** 0.5)).round_().clamp_(least, most)
            codes[:, ::32], codes[:, 1::32] = least, most
            size = float(codes.square().mean().sqrt()) * parameter.shape[-1] ** 0.5
            parameter.copy_(codes * 2.0 ** -round(math.log2(size)))


# the same model as a GGUF file

MODEL_NAMES = {"embed.embedding.weight": "token_embd.weight", "norm.weight": "output_norm.weight"}
LAYER_NAMES = {
    "attention_residual.norm.weight": "attn_norm.weight",
    "feed_forward_residual.norm.weight": "ffn_norm.weight",
    "attention.project.q.linear.weight": "attn_q.weight",
    "attention.project.k.linear.weight": "attn_k.weight",
    "attention.project.v.linear.weight": "attn_v.weight",
    "attention.project.q.linear.bias": "attn_q.bias",
    "attention.project.k.linear.bias": "attn_k.bias",
    "attention.project.v.linear.bias": "attn_v.bias",
    "attention.output.weight": "attn_output.weight",
    "feed_forward.gate.weight": "ffn_gate.weight",
    "feed_forward.up.weight": "ffn_up.weight",
    "feed_forward.down.weight": "ffn_down.weight",
}
"""The name of a layer's parameter in regard, and its name after blk.<layer> in a GGUF file."""


def write_model(
    problem: ModelProblem, path: Path, tokenizer: Mapping[str, MetadataValue] | None = None
) -> None:
    """Write the problem's weights as a GGUF file; vectors are fp32."""
    config = problem.config
    sizes: dict[str, MetadataValue] = {
        "context_length": config.max_position_embeddings,
        "embedding_length": config.hidden_size,
        "block_count": config.num_hidden_layers,
        "feed_forward_length": config.intermediate_size,
        "attention.head_count": config.num_attention_heads,
        "attention.head_count_kv": config.num_key_value_heads,
        "attention.layer_norm_rms_epsilon": config.rms_norm_eps,
        "rope.freq_base": config.rope_theta,
        "vocab_size": config.vocab_size,
    }
    metadata: dict[str, MetadataValue] = {
        "general.architecture": "qwen2",
        "general.name": "model",
        "general.file_type": _FILE_TYPES[_format(problem)],
    }
    metadata |= {f"qwen2.{key}": value for key, value in sizes.items()}
    metadata |= {"tokenizer.ggml.model": "none"} if tokenizer is None else tokenizer
    write_gguf(path, metadata, list(gguf_tensors(problem)))


_FILE_TYPES = {"F32": 0, "F16": 1, "Q4_0": 2, "Q8_0": 7, "BF16": 32}
"""Format of the matrices -> `general.file_type`."""


def _format(problem: ModelProblem) -> str:
    """Return the format of the problem's matrices in a GGUF file."""
    plain = {torch.float32: "F32", torch.float16: "F16", torch.bfloat16: "BF16"}[problem.dtype]
    return plain if problem.sizes.bits is None else f"Q{problem.sizes.bits}_0"


def gguf_tensors(problem: ModelProblem) -> Iterator[TensorToWrite]:
    """Yield each parameter under its name in a GGUF file; the head shares the embedding."""
    form = _format(problem)
    for name, parameter in problem.decoder.named_parameters():
        if name in MODEL_NAMES:
            gguf_name = MODEL_NAMES[name]
        else:
            _, layer, name_in_layer = name.split(".", 2)
            gguf_name = f"blk.{layer}.{LAYER_NAMES[name_in_layer]}"
        yield TensorToWrite(gguf_name, parameter.detach(), form if parameter.ndim > 1 else "F32")
