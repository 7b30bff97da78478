"""One decoding step of multi-head latent attention, from queries and latents to the heads."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from torch import Tensor

from regard.bench.interfaces import MinimumWork, Outputs, Problem, ProblemSizes
from regard.cost.latent import absorb_flops, latent_values
from regard.huge_pages import to_huge_pages


@dataclass(frozen=True)
class LatentSizes(ProblemSizes):
    """The sizes of latent attention with S cached latents; the defaults are those of DeepSeek-V3.

    Args:
        S, B, H: cached tokens, batch rows, and heads.
        rank, rope: the dims of the latent and of the rotary key.
        nope, value: the dims of a head's key without rotary positions, and of its value.

    >>> print(LatentSizes(S=8192))
    B1 H128 rank 512+64 nope 128 value 128 S8192
    """

    S: int
    B: int = 1
    H: int = 128
    rank: int = 512
    rope: int = 64
    nope: int = 128
    value: int = 128

    def resized(self, *, length: int | None = None, batch: int | None = None) -> LatentSizes:
        """Return the sizes with another S or B."""
        return replace(self, S=length or self.S, B=batch or self.B)

    def bytes(self, dtype: torch.dtype) -> int:
        """Return the memory in bytes of latents, weights, and all keys and values in fp64, with the
        scores.
        """
        cached = self.B * self.S * (self.rank + self.rope)
        weights = self.H * (self.nope + self.value) * self.rank
        expanded = self.B * self.S * self.H * (2 * self.nope + self.rope + 2 * self.value)
        return (cached + weights) * (dtype.itemsize + 8) + expanded * 8 // self.chunks + (1 << 28)

    @property
    def chunks(self) -> int:
        """The number of chunks of heads in the reference; each chunk has keys and values of about
        256 MB.
        """
        size = self.B * self.S * self.H * (2 * self.nope + self.rope + 2 * self.value) * 8
        return min(self.H, max(1, size >> 28))

    def problem(self, dtype: torch.dtype, device: torch.device) -> LatentProblem:
        """Return a problem of these sizes, with the same random inputs each time."""
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

    Args:
        sizes: the sizes.
        dtype, device: the dtype and the device of the inputs.

    >>> sizes = LatentSizes(S=5, H=2, rank=8, rope=2, nope=4, value=4)
    >>> problem = sizes.problem(torch.float32, torch.device("cpu"))
    >>> problem.reference()["out"].shape
    torch.Size([1, 2, 1, 4])
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
        """The FLOPs of the absorbed form, and the bytes of the latents, the weights, the queries
        and the outputs, each read or written once.
        """
        s = self.sizes
        flops = s.B * absorb_flops(1, s.S, s.H, s.rank, s.nope, s.rope, s.value)
        numbers = s.B * s.S * latent_values(s.rank, s.rope) + self.weight.numel()
        heads = s.B * s.H * (s.nope + s.rope + s.value)
        return MinimumWork(flops, (numbers + heads) * self.dtype.itemsize)

    def reference(self) -> Outputs:
        """Return the outputs, computed in fp64 from the keys and values of every head."""
        return self._expand(torch.float64)

    def plain(self) -> Outputs:
        """Return the outputs, computed in the problem's dtype; {} in fp32 and fp64, where the
        allowed error does not depend on them.
        """
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
