"""Benchmark problems of attention calls: softmax attention, and a latent decoding step."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from benchmarks.interfaces import MinimumWork, Outputs, PreparedCall, Problem, ProblemSizes
from regard.caches import Float8, Quantized
from regard.caches.base import Parts
from regard.cost import attention_flops
from regard.cost.latent import absorb_flops, latent_values
from regard.cost.softmax import (
    attention_bytes,
    causal_pairs,
    training_bytes,
    training_flops,
    window_pairs,
)
from regard.huge_pages import to_huge_pages
from regard.span import Span

BLOCK_BYTES = 1 << 27
"""The largest block of scores that the reference computes at once, in bytes."""


def plain_attention(problem: AttentionProblem, dtype: torch.dtype, groups: list[int]) -> Outputs:
    """Compute attention for some key/value heads, one block of queries at a time.

    softmax(q k^T / sqrt(D) + bias, -inf where masked) v; gradients are summed in fp32 or better.
    """
    s, ratio = problem.sizes, problem.sizes.H // problem.sizes.G
    outputs: dict[str, list[Tensor]] = {}
    for g in groups:
        heads = slice(g * ratio, (g + 1) * ratio)
        q = problem.q.detach()[:, heads].to(dtype)
        k, v = (x.detach()[:, g : g + 1].to(dtype) for x in (problem.k, problem.v))
        d_out = None if problem.d_out is None else problem.d_out[:, heads].to(dtype)
        step = max(1, problem.block_bytes // (s.B * ratio * s.S * dtype.itemsize))
        for name, x in _blocks(problem, q, k, v, d_out, heads, step).items():
            outputs.setdefault(name, []).append(x)
    return {name: torch.cat(parts, dim=1) for name, parts in outputs.items()}


def _blocks(
    problem: AttentionProblem,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    d_out: Tensor | None,
    heads: slice,
    step: int,
) -> dict[str, Tensor]:
    """Compute the queries of the heads of one key/value head, with gradients if asked for."""
    outs, d_q = [], []
    sums = [torch.zeros_like(x, dtype=torch.promote_types(x.dtype, torch.float32)) for x in (k, v)]
    for start in range(0, q.shape[2], step):
        rows = slice(start, min(start + step, q.shape[2]))
        inputs = [x.detach().requires_grad_(d_out is not None) for x in (q[:, :, rows], k, v)]
        with torch.set_grad_enabled(d_out is not None):
            out = _attend(problem, *inputs, rows=rows, heads=heads)
        outs.append(out.detach())
        if d_out is not None:
            d_q_rows, *d_kv = torch.autograd.grad(out, inputs, d_out[:, :, rows])
            d_q.append(d_q_rows)
            for total, part in zip(sums, d_kv, strict=True):
                total += part
    outputs = {"out": torch.cat(outs, dim=2)}
    if d_out is not None:
        d_k, d_v = (total.to(k.dtype) for total in sums)
        outputs |= {"dq": torch.cat(d_q, dim=2), "dk": d_k, "dv": d_v}
    return outputs


def _attend(
    problem: AttentionProblem, q: Tensor, k: Tensor, v: Tensor, *, rows: slice, heads: slice
) -> Tensor:
    """Compute a block of queries `[B, R, t, D]` against one key/value head `[B, 1, S, D]`."""
    scores = (q @ k.mT) * problem.sizes.D**-0.5
    if problem.sizes.softcap is not None:
        scores = problem.sizes.softcap * torch.tanh(scores / problem.sizes.softcap)
    if problem.sizes.alibi:
        scores = scores + problem.bias_rows(rows, q.dtype)[:, heads]
    visible = problem.visible_rows(rows)
    scores = scores.masked_fill(~visible, float("-inf"))
    if problem.sink is not None:  # a column without a value
        logit = problem.sink.to(q.dtype)[heads, None, None].expand(*scores.shape[:3], 1)
        scores = torch.cat((scores, logit), dim=-1)
    weights = torch.softmax(scores, dim=-1)[..., : k.shape[2]]
    # the output of a row without visible keys is 0; the softmax of such a row is NaN
    weights = torch.where(visible.any(dim=-1, keepdim=True), weights, 0)
    return weights @ v


SINK_KEYS = 4
"""The first keys that every later query sees under the pattern "sinks"."""

MAX_CHECKED_PAIRS = 1 << 29
"""The largest number of query-key pairs that the reference computes; at least one key/value head is
always computed.
"""


@dataclass(frozen=True)
class AttentionSizes(ProblemSizes):
    """The sizes of attention in which the last T of S tokens attend causally.

    Args:
        S, T: the numbers of keys and of queries; with T=None they are equal.
        window: how many keys a query sees, its own included; None for all earlier keys.
        padded: whether row b has b S / (2 B) padding tokens on the left.
        bits: the bits of the quantized cache from which keys and values are read; None for keys and
            values that are not quantized.
        pattern: what else decides which earlier keys a query sees: "documents" (8 packed texts of
            one length), "prefix" (all queries see the first eighth of the keys), "sinks" (besides
            its window, a query sees the first 4 keys), or None.
        sink: whether each head has a logit in the denominator only.
    """

    B: int
    H: int
    G: int
    D: int
    S: int
    T: int | None = None
    window: int | None = None
    alibi: bool = False
    padded: bool = False
    train: bool = False
    bits: int | Literal["fp8"] | None = None
    pattern: Literal["documents", "prefix", "sinks"] | None = None
    softcap: float | None = None
    sink: bool = False

    @property
    def document(self) -> int:
        """The tokens of a packed text."""
        return -(-self.S // 8)

    @property
    def prefix(self) -> int:
        """The keys that every query sees under the pattern "prefix"."""
        return self.S // 8

    @property
    def queries(self) -> int:
        """The number of queries, T or S."""
        return self.S if self.T is None else self.T

    @property
    def causal_only(self) -> bool:
        """Whether each query sees every earlier key, and nothing changes the scores."""
        changes = (self.window, self.pattern, self.softcap)
        return changes == (None,) * 3 and not (self.alibi or self.padded or self.sink)

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of inputs, outputs, gradients, copies in fp64, and a block of scores."""
        tensors = self.B * (2 * self.queries * self.H + 2 * self.S * self.G) * self.D
        copies = 2 if self.train else 1
        return tensors * copies * (dtype.itemsize + 8) + 5 * BLOCK_BYTES

    def problem(self, dtype: torch.dtype, device: torch.device) -> AttentionProblem:
        return AttentionProblem(self, dtype, device)

    def __str__(self) -> str:
        rest = [
            *([f"T{self.T}"] if self.T is not None else []),
            *([f"W{self.window}"] if self.window is not None else []),
            *([] if self.bits is None else ["fp8" if self.bits == "fp8" else f"{self.bits} bits"]),
            *([self.pattern] if self.pattern is not None else []),
            *([f"softcap {self.softcap:g}"] if self.softcap is not None else []),
            *(["sink"] if self.sink else []),
        ]
        return " ".join([f"B{self.B} H{self.H} G{self.G} D{self.D} S{self.S}", *rest])


class AttentionProblem(Problem):
    """An attention call with q `[B, H, T, D]`, k and v `[B, G, S, D]`.

    The outputs are "out" `[B, H, T, D]`, and in training "dq", "dk" and "dv".

    Attributes:
        quantized: keys and values as the cache stores them, if it is quantized.
        pads: the number of padding tokens of each row; padded queries have no right output.
        sink: the logit of each head `[H]`, or None.
        block_bytes, checked_pairs: the limits of the reference, see `BLOCK_BYTES` and
            `MAX_CHECKED_PAIRS`.
    """

    block_bytes: int = BLOCK_BYTES
    checked_pairs: int = MAX_CHECKED_PAIRS

    def __init__(self, sizes: AttentionSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device, self.train = sizes, dtype, device, sizes.train
        self.quantized: Parts | None = None
        generator = torch.Generator().manual_seed(0)
        B, H, G, D, S, T = sizes.B, sizes.H, sizes.G, sizes.D, sizes.S, sizes.queries
        shapes = {"q": (B, H, T, D), "k": (B, G, S, D), "v": (B, G, S, D), "d": (B, H, T, D)}
        tensors = {
            name: to_huge_pages(torch.randn(shape, generator=generator).to(device, dtype))
            for name, shape in shapes.items()
            if name != "d" or sizes.train
        }
        if sizes.bits is not None:
            self.quantized, (tensors["k"], tensors["v"]) = _quantized(
                tensors["k"], tensors["v"], sizes.bits
            )
        self.q, self.k, self.v = (tensors[name].requires_grad_(sizes.train) for name in "qkv")
        self.d_out = tensors.get("d")
        self.sink: Tensor | None = None
        if sizes.sink:
            self.sink = torch.randn(H, generator=generator).to(device, dtype)
        self.pads = [b * S // (2 * B) if sizes.padded else 0 for b in range(B)]

    @property
    def slopes(self) -> Tensor:
        """ALiBi's slope of each head `[H]`, 2^(-8 h / H) for H a power of two; 0 without ALiBi."""
        h = torch.arange(1, self.sizes.H + 1, dtype=torch.float64)
        return (2.0 ** (-8 * h / self.sizes.H)) * self.sizes.alibi

    def visible(self) -> Bool[Tensor, "b 1 T S"]:
        """Return which keys each query sees, as a dense mask."""
        return self.visible_rows(slice(0, self.sizes.queries))

    def visible_rows(self, rows: slice | Tensor) -> Bool[Tensor, "b 1 t S"]:
        """Return which keys some of the queries see."""
        S, T, W = self.sizes.S, self.sizes.queries, self.sizes.window
        i = torch.arange(S - T, S, device=self.device)[rows, None]
        j = torch.arange(S, device=self.device)[None]
        visible = j <= i
        if W is not None:
            visible = visible & (j > i - W)
        if self.sizes.pattern == "sinks":
            visible = visible | ((j < SINK_KEYS) & (j <= i))
        elif self.sizes.pattern == "prefix":
            visible = visible | (j < self.sizes.prefix)
        elif self.sizes.pattern == "documents":
            visible = visible & (i // self.sizes.document == j // self.sizes.document)
        if not any(self.pads):
            return visible[None, None]
        pads = torch.tensor(self.pads, device=self.device)[:, None, None]
        return (visible & (j >= pads) & (i >= pads))[:, None]

    def bias(self) -> Float[Tensor, "1 H T S"]:
        """Return ALiBi's bias, -slope (i - j), in the problem's dtype."""
        return self.bias_rows(slice(0, self.sizes.queries), self.dtype)

    def bias_rows(self, rows: slice, dtype: torch.dtype) -> Float[Tensor, "1 H t S"]:
        """Return ALiBi's bias for some of the queries."""
        S, T = self.sizes.S, self.sizes.queries
        i, j = torch.arange(S - T, S)[rows, None], torch.arange(S)[None]
        return (self.slopes[:, None, None] * (j - i))[None].to(self.device, dtype)

    @cached_property
    def pairs(self) -> int:
        """The number of visible query-key pairs, over all rows and heads."""
        s, T = self.sizes, self.sizes.queries
        if s.pattern is not None:
            return s.B * s.H * self._pairs_of_pattern()
        pairs_per_row = []
        for pad in self.pads:
            S, n = s.S - pad, min(T, s.S - pad)
            pairs_per_row.append(
                causal_pairs(n, S) if s.window is None else window_pairs(n, S, s.window)
            )
        return s.H * sum(pairs_per_row)

    def _pairs_of_pattern(self) -> int:
        """Return the visible pairs of one head, summed over the queries."""
        s = self.sizes
        i = torch.arange(s.S - s.queries, s.S)
        if s.pattern == "documents":
            keys = i % s.document + 1
        elif s.pattern == "prefix":
            keys = (i + 1).clamp(min=s.prefix)
        else:
            in_window = (i + 1).clamp(max=s.S if s.window is None else s.window)
            keys = in_window + (i + 1 - in_window).clamp(max=SINK_KEYS)
        return int(keys.sum())

    @property
    def work(self) -> MinimumWork:
        """The FLOPs of the visible pairs, and the bytes of every tensor, read or written once."""
        s = self.sizes
        sizes = {"B": s.B, "H": s.H, "G": s.G, "T": s.queries, "S": s.S, "D": s.D, "E": s.D}
        sizes["itemsize"] = self.dtype.itemsize
        if self.train:
            return MinimumWork(training_flops(self.pairs, s.D, s.D), training_bytes(**sizes))
        return MinimumWork(attention_flops(self.pairs, s.D, s.D), attention_bytes(**sizes))

    @cached_property
    def groups(self) -> list[int]:
        """The key/value heads that are checked: all of them, or some that are evenly spaced."""
        n = max(1, min(self.sizes.G, self.checked_pairs * self.sizes.G // max(1, self.pairs)))
        return sorted({math.floor(i * self.sizes.G / n) for i in range(n)})

    def reference(self) -> Outputs:
        return self.checked_rows(plain_attention(self, torch.float64, self.groups))

    def plain(self) -> Outputs:
        if self.dtype in (torch.float32, torch.float64):
            return {}
        return self.checked_rows(plain_attention(self, self.dtype, self.groups))

    def checked(self, outputs: Outputs) -> Outputs:
        """Return the heads that are checked, with 0 for padded queries."""
        ratio = self.sizes.H // self.sizes.G
        heads = [g * ratio + r for g in self.groups for r in range(ratio)]
        expected = {"out": self.q.shape, "dq": self.q.shape, "dk": self.k.shape, "dv": self.v.shape}
        selected = {}
        for name, x in outputs.items():
            if x.shape == expected[name]:
                x = x.detach()[:, heads if name in ("out", "dq") else self.groups]
            selected[name] = x
        return self.checked_rows(selected)

    def checked_rows(self, outputs: Outputs) -> Outputs:
        """Set the rows of padded queries to 0."""
        if not any(self.pads):
            return outputs
        is_token = torch.arange(self.sizes.S - self.sizes.queries, self.sizes.S, device=self.device)
        is_token = is_token >= torch.tensor(self.pads, device=self.device)[:, None]
        return {name: torch.where(is_token[:, None, :, None], x, 0) for name, x in outputs.items()}


def _quantized(k: Tensor, v: Tensor, bits: int | Literal["fp8"]) -> tuple[Parts, Parts]:
    """Return keys and values as a quantized or fp8 cache stores them, and dequantized."""
    S, channels = k.shape[2], k.shape[3]
    cache: Quantized | Float8 = Float8()
    if bits != "fp8":
        cache = Quantized(bits, group=min(128, channels) if bits == 8 else 32, residual=0)
    stored, _ = cache.update((k, v), Span(0, S))
    dequantized, _ = cache.update((k[:, :, :0], v[:, :, :0]), Span(S, 0))
    return stored, tuple(to_huge_pages(x.clone()) for x in dequantized)


def prepared_call(
    problem: AttentionProblem,
    attention: Callable[[], object],
    out: Callable[[Any], Tensor] = lambda result: result,
    kernel: str = "",
) -> PreparedCall:
    """Return a prepared call of attention, in training with the gradients of q, k and v."""
    if not problem.train:

        def call() -> object:
            with torch.no_grad():
                return attention()

        return PreparedCall(call, lambda result: {"out": out(result)}, kernel)
    inputs = (problem.q, problem.k, problem.v)

    def step() -> tuple[Tensor, ...]:
        z = out(attention())
        return (z, *torch.autograd.grad(z, inputs, problem.d_out))

    return PreparedCall(step, _outputs_of_training, kernel)


def _outputs_of_training(tensors: tuple[Tensor, ...]) -> Outputs:
    """Return the output and the gradients by name."""
    return dict(zip(("out", "dq", "dk", "dv"), tensors, strict=True))


@dataclass(frozen=True)
class LatentSizes(ProblemSizes):
    """The sizes of latent attention with S cached latents; the defaults are those of DeepSeek-V3.

    Args:
        S, B, H: cached tokens, batch rows, and heads.
        rank, rope: the dims of the latent and of the rotary key.
        nope, value: the dims of a head's key without rotary positions, and of its value.
    """

    S: int
    B: int = 1
    H: int = 128
    rank: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the bytes of latents, weights, and all keys and values in fp64, with scores."""
        cached = self.B * self.S * (self.rank + self.rope)
        weights = self.H * (self.nope + self.value) * self.rank
        expanded = self.B * self.S * self.H * (2 * self.nope + self.rope + 2 * self.value)
        return (cached + weights) * (dtype.itemsize + 8) + expanded * 8 // self.chunks + (1 << 28)

    @property
    def chunks(self) -> int:
        """The chunks of heads in the reference, each with about 256 MB of keys and values."""
        size = self.B * self.S * self.H * (2 * self.nope + self.rope + 2 * self.value) * 8
        return min(self.H, max(1, size >> 28))

    def problem(self, dtype: torch.dtype, device: torch.device) -> LatentProblem:
        return LatentProblem(self, dtype, device)

    def __str__(self) -> str:
        parts = f"rank {self.rank}+{self.rope} nope {self.nope} value {self.value}"
        return f"B{self.B} H{self.H} {parts} S{self.S}"


class LatentProblem(Problem):
    """A decoding step of latent attention; the output is "out" `[B, H, 1, E]`. Every latent is
    visible.

    The inputs are q_nope `[B, H, 1, d]`, q_rope `[B, H, 1, e]`, latents `[B, 1, S, r]`, rope `[B,
    1, S, e]` and the weight `[H (d + E), r]` that maps a latent to keys and values, with the rows
    of a head next to each other. `memory` `[B, 1, S, r + e]` has latents and rope in one buffer.
    """

    def __init__(self, sizes: LatentSizes, dtype: torch.dtype, device: torch.device) -> None:
        self.sizes, self.dtype, self.device = sizes, dtype, device
        generator = torch.Generator().manual_seed(0)
        s = sizes

        def normal(*shape: int) -> Tensor:
            return to_huge_pages(torch.randn(shape, generator=generator).to(device, dtype))

        self.q_nope, self.q_rope = normal(s.B, s.H, 1, s.nope), normal(s.B, s.H, 1, s.rope)
        self.memory = normal(s.B, 1, s.S, s.rank + s.rope)
        self.latents, self.rope = self.memory[..., : s.rank], self.memory[..., s.rank :]
        self.chunks = s.chunks
        self.weight = normal(s.H * (s.nope + s.value), s.rank) * s.rank**-0.5

    @property
    def scale(self) -> float:
        """The scale of the scores, 1/sqrt(d + e)."""
        return float((self.sizes.nope + self.sizes.rope) ** -0.5)

    @property
    def work(self) -> MinimumWork:
        """The FLOPs of the absorbed form, and the bytes, each read or written once."""
        s = self.sizes
        flops = s.B * absorb_flops(1, s.S, s.H, s.rank, s.nope, s.rope, s.value)
        numbers = s.B * s.S * latent_values(s.rank, s.rope) + self.weight.numel()
        heads = s.B * s.H * (s.nope + s.rope + s.value)
        return MinimumWork(flops, (numbers + heads) * self.dtype.itemsize)

    def reference(self) -> Outputs:
        return self._expand(torch.float64)

    def plain(self) -> Outputs:
        if self.dtype in (torch.float32, torch.float64):
            return {}
        return self._expand(self.dtype)

    def _expand(self, dtype: torch.dtype) -> Outputs:
        """Compute the outputs from expanded keys and values, some heads at a time."""
        s = self.sizes
        weight = torch.unflatten(self.weight, 0, (s.H, -1))
        latents, rope = self.latents.to(dtype), self.rope.to(dtype)
        outs = []
        for heads in torch.arange(s.H).chunk(self.chunks):
            w = weight[heads].to(dtype)
            k, v = (latents @ w.mT[None]).split_with_sizes(
                (s.nope, s.value), dim=-1
            )  # [B,h,S,d], [B,h,S,E]
            nope, rotated = (q[:, heads].to(dtype) for q in (self.q_nope, self.q_rope))
            scores = (nope @ k.mT + rotated @ rope.mT) * self.scale
            outs.append(torch.softmax(scores, dim=-1) @ v)
        return {"out": torch.cat(outs, dim=1)}
