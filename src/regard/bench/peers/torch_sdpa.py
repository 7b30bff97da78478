"""torch's scaled_dot_product_attention, called as well as it can be: its causal flag, a mask where
there is no other way.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.bench.interfaces import Peer, Way
from regard.bench.problems import AttentionProblem, LatentProblem, way


def attention(problem: AttentionProblem) -> Way:
    """`enable_gqa`; one query sees all and needs no mask."""
    options = {**_options(problem), "enable_gqa": problem.sizes.G != problem.sizes.H}
    q, k, v = problem.q, problem.k, problem.v
    return way(problem, partial(F.scaled_dot_product_attention, q, k, v, **options))


def folded(problem: AttentionProblem) -> Way:
    """The query heads that share a key head as queries of one head: each key is read once."""
    s = problem.sizes
    q = problem.q.detach().view(s.B, s.G, s.H // s.G, s.D)
    call = partial(F.scaled_dot_product_attention, q, problem.k, problem.v)
    return way(problem, call, lambda out: out.view(problem.q.shape))


def no_fold(problem: AttentionProblem) -> str | None:
    """Why queries cannot be folded."""
    s = problem.sizes
    if s.queries > 1 or s.G == s.H or s.alibi or s.padded or s.train or s.window:
        return "folds one query that sees every key"
    return None


def in_chunks(problem: AttentionProblem) -> Way:
    """A window of W in one fused call: chunks of W queries, each with a view of 2 W keys."""
    s = problem.sizes
    assert s.window is not None, "`no_chunks` has looked"
    B, H, G, D, T, W = s.B, s.H, s.G, s.D, s.S, s.window
    n = -(-T // W)
    L = n * W
    i, j = torch.arange(W)[:, None], torch.arange(2 * W)[None]
    mask = ((j - W <= i) & (j - W > i - W)).expand(n, 1, W, 2 * W).clone()
    mask[0] &= j >= W
    mask = mask.to(problem.device)

    def call() -> Tensor:
        q = F.pad(problem.q, (0, 0, 0, L - T)).contiguous()
        k, v = (F.pad(x, (0, 0, W, L - T)).contiguous() for x in (problem.k, problem.v))
        qs = q.as_strided((n, B * H, W, D), (W * D, L * D, D, 1))
        ks, vs = (x.as_strided((n, B * G, 2 * W, D), (W * D, (L + W) * D, D, 1)) for x in (k, v))
        out = F.scaled_dot_product_attention(qs, ks, vs, attn_mask=mask, enable_gqa=G != H)
        return out.view(n, B, H, W, D).permute(1, 2, 0, 3, 4).reshape(B, H, L, D)[:, :, :T]

    return way(problem, call)


def no_chunks(problem: AttentionProblem) -> str | None:
    """Why a problem cannot be cut into chunks."""
    s = problem.sizes
    if s.window is None or s.queries != s.S or s.alibi or s.padded:
        return "chunks are for a causal window without padding or bias"
    return None


def absorbed(problem: LatentProblem) -> Way:
    """The absorbed form with the latents as keys and values, heads folded into queries, as torch's
    kernel likes it.
    """
    s = problem.sizes
    w_k, w_v = torch.unflatten(problem.weight, 0, (s.H, -1)).split_with_sizes(
        (s.nope, s.value), dim=1
    )
    memory = problem.memory

    def step() -> Tensor:
        with torch.no_grad():
            q = torch.einsum("bhtd,hdr->bhtr", problem.q_nope, w_k)
            q = torch.cat((q, problem.q_rope), dim=-1).transpose(1, 2)
            # keys as values, so that the fused kernel takes the call; what is behind the rank is
            # cut off
            z = F.scaled_dot_product_attention(q, memory, memory, scale=problem.scale)
            return torch.einsum("bthr,her->bhte", z[..., : s.rank], w_v)

    return Way(step, lambda out: {"out": out})


def _options(problem: AttentionProblem) -> dict[str, Any]:
    """The causal flag where it says it all; else a dense mask, float with a bias."""
    s = problem.sizes
    plain = s.window is None and not s.alibi and not s.padded
    if plain and s.queries == 1:
        return {}
    if plain and s.queries == s.S:
        return {"is_causal": True}
    seen = problem.visible()
    if s.alibi:
        return {"attn_mask": problem.bias().masked_fill(~seen, float("-inf"))}
    return {"attn_mask": seen}


def mask_bytes(problem: AttentionProblem) -> int:
    """A dense mask, which torch copies as numbers; a bias has one for each head."""
    s = problem.sizes
    pairs = s.queries * s.S * (s.B if s.padded else 1)
    if s.alibi:
        return 3 * s.H * pairs * problem.dtype.itemsize
    return pairs * (2 + problem.dtype.itemsize) if s.window or s.padded else 0


ATTENTION = Peer(
    "torch SDPA", "F.scaled_dot_product_attention, enable_gqa.", attention, bytes=mask_bytes
)
FOLDED = Peer(
    "torch SDPA folded", "SDPA with the groups folded into queries.", folded, why_not=no_fold
)
CHUNKED = Peer(
    "torch SDPA in chunks", "SDPA over strided views of a window.", in_chunks, why_not=no_chunks
)
ABSORBED = Peer("torch SDPA absorbed", "SDPA over latents, the absorbed form by hand.", absorbed)
