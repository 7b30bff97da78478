"""regard: what a user calls, with the kernel that it chooses."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.bench.interfaces import Peer, Way
from regard.bench.problems import AttentionProblem, LatentProblem, ModelProblem, way
from regard.biases import ALiBi
from regard.masks import Causal, Window
from regard.ops.softmax import attend, plan
from regard.pages import settle


def attention(problem: AttentionProblem, backend: str = "auto") -> Way:
    """`regard.attend` with the kernel that it chooses, or with one kernel."""
    options = {**_options(problem), "backend": backend}
    kernel = plan(problem.q, problem.k, problem.v, **options).kernel
    return way(problem, lambda: attend(problem.q, problem.k, problem.v, **options), kernel=kernel)


def refusal(problem: AttentionProblem, backend: str) -> str | None:
    """Why a kernel does not take the problem, or None."""
    choice = plan(problem.q, problem.k, problem.v, **_options(problem))[backend]
    return "; ".join(choice.reasons) or None


def kernel_bytes(problem: AttentionProblem, backend: str) -> int:
    """The memory that a kernel says it takes beyond its inputs and outputs."""
    work = plan(problem.q, problem.k, problem.v, **_options(problem))[backend].work
    return 0 if work is None else work.bytes


def _options(problem: AttentionProblem) -> dict[str, Any]:
    """The mask, the bias and the positions of a problem."""
    sizes = problem.sizes
    options: dict[str, Any] = {}
    if sizes.queries > 1:
        options["mask"] = Causal() if sizes.window is None else Causal() & Window(sizes.window)
    if sizes.alibi:
        options["bias"] = ALiBi(sizes.H)
    if any(problem.pads):
        positions = _positions(problem)
        options |= {"k_positions": positions, "q_positions": positions[:, -sizes.queries :]}
    return options


def codes(problem: AttentionProblem) -> Way:
    """`regard.attend` over keys and values as a `Quantised` cache gives them."""
    assert problem.coded is not None, "`no_codes` has looked"
    keys, values = problem.coded
    return Way(lambda: attend(problem.q, keys, values), lambda out: {"out": out}, "cpu")


def no_codes(problem: AttentionProblem) -> str | None:
    """Only where a cache holds codes."""
    return "nothing is in codes" if problem.coded is None else None


def _positions(problem: AttentionProblem) -> Tensor:
    """0, 1, ... from each row's first token, -1 in front of it."""
    pads = torch.tensor(problem.pads, device=problem.device)[:, None]
    return (torch.arange(problem.sizes.S, device=problem.device)[None] - pads).clamp(min=-1)


def latent(problem: LatentProblem) -> Way:
    """The absorbed form, as `nn.Latent` has it: queries taken to the latents, `attend`, heads from
    the mean latents.
    """
    s = problem.sizes
    w_k, w_v = torch.unflatten(problem.weight, 0, (s.H, -1)).split_with_sizes(
        (s.nope, s.value), dim=1
    )
    memory, values = problem.memory, problem.latents

    def step() -> Tensor:
        with torch.no_grad():
            q = torch.einsum("bhtd,hdr->bhtr", problem.q_nope, w_k)
            q = torch.cat((q, problem.q_rope), dim=-1)
            z = attend(q, memory, values, scale=problem.scale)
            return torch.einsum("bhtr,her->bhte", z, w_v)

    q = problem.memory.new_zeros(s.B, s.H, 1, s.rank + s.rope)
    kernel = plan(q, memory, values, scale=problem.scale).kernel
    return Way(step, lambda out: {"out": out}, kernel)


def model(problem: ModelProblem) -> Way:
    """A decoder of ours, one token behind a `Fixed` cache, which is cropped to where it was."""
    caches, S = problem.caches(problem.dtype), problem.sizes.S
    decoder = problem.decoder
    settle(decoder)

    def step() -> Tensor:
        with torch.no_grad():
            logits: Tensor = decoder(problem.ids, caches=caches)
        for cache in caches:
            cache.crop(S)
        return logits

    def read(logits: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"logits": logits, "prompt": decoder(problem.prompt, last=1)}

    k, v = problem.memory(0)
    q = k.new_zeros(problem.sizes.B, problem.sizes.H, 1, k.shape[3])
    return Way(step, read, plan(q, k, v).kernel)


ATTENTION = Peer("regard", "regard.attend, backend auto.", attention)
OVER_SDPA = Peer("regard", "regard.attend, backend sdpa.", partial(attention, backend="sdpa"))
KERNELS = tuple(
    Peer(
        f"regard {name}",
        f"regard.attend, backend {name}.",
        partial(attention, backend=name),
        why_not=partial(refusal, backend=name),
        bytes=partial(kernel_bytes, backend=name),
    )
    for name in ("cpu", "gemm", "sdpa", "tiled", "flex", "reference")
)
CODES = Peer("regard, codes", "regard.attend over a Quantised cache.", codes, why_not=no_codes)
LATENT = Peer("regard", "regard.attend over the latents, absorbed.", latent)
MODEL = Peer("regard", "A model of regard's with a Fixed cache.", model)
