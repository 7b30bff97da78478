"""torch's scaled_dot_product_attention, with the causal flag where possible, else a mask."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from benchmarks.interfaces import Peer, PreparedCall
from benchmarks.problems import AttentionProblem, LatentProblem, prepared_call


def attention(problem: AttentionProblem) -> PreparedCall:
    """Prepare SDPA with `enable_gqa`; one query sees every key and needs no mask."""
    options = {**_options(problem), "enable_gqa": problem.sizes.G != problem.sizes.H}
    q, k, v = problem.q, problem.k, problem.v
    return prepared_call(problem, partial(F.scaled_dot_product_attention, q, k, v, **options))


def pinned(problem: AttentionProblem, backend: SDPBackend) -> PreparedCall:
    """Prepare SDPA that may run one of its kernels only."""
    call = attention(problem)

    def step() -> object:
        with sdpa_kernel([backend]):
            return call.step()

    return call._replace(step=step, kernel=backend.name.lower())


def why_not_pinned(problem: AttentionProblem, backend: SDPBackend) -> str | None:
    """Return why a kernel of SDPA cannot run the problem, or None."""
    if problem.device.type != "cuda":
        return "torch has this kernel on cuda only"
    masked = "attn_mask" in _options(problem)
    if masked and backend != SDPBackend.EFFICIENT_ATTENTION:
        return "takes no dense mask"
    return why_not_everything(problem)


def why_not_everything(problem: AttentionProblem) -> str | None:
    """Return why SDPA cannot compute the scores of the problem, or None."""
    s = problem.sizes
    return "has neither softcap nor sink" if s.softcap is not None or s.sink else None


def folded(problem: AttentionProblem) -> PreparedCall:
    """Prepare SDPA with the query heads of a key/value head as queries of one head.

    Each key is then read once.
    """
    s = problem.sizes
    q = problem.q.detach().view(s.B, s.G, s.H // s.G, s.D)
    call = partial(F.scaled_dot_product_attention, q, problem.k, problem.v)
    return prepared_call(problem, call, lambda out: out.view(problem.q.shape))


def why_not_folded(problem: AttentionProblem) -> str | None:
    """Return why the queries of the problem cannot be folded, or None."""
    s = problem.sizes
    other = s.pattern or s.softcap or s.sink
    if s.queries > 1 or s.G == s.H or s.alibi or s.padded or s.train or s.window or other:
        return "only one query that sees every key can be folded"
    return None


def chunked(problem: AttentionProblem) -> PreparedCall:
    """Prepare a window of W keys as one fused call: chunks of W queries, each with a view of 2 W
    keys.
    """
    s = problem.sizes
    assert s.window is not None, "`why_not_chunked` refuses other problems"
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

    return prepared_call(problem, call)


def why_not_chunked(problem: AttentionProblem) -> str | None:
    """Return why the problem cannot be split into chunks, or None."""
    s = problem.sizes
    other = s.pattern or s.softcap or s.sink
    if s.window is None or s.queries != s.S or s.alibi or s.padded or other:
        return "only a causal window without padding or bias can be split into chunks"
    return None


def absorbed(problem: LatentProblem) -> PreparedCall:
    """Prepare latent attention in the absorbed form, with the latents as keys and values.

    The heads are folded into queries, a shape that torch's fused kernel supports.
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
            # keys also as values, so that the fused kernel supports the call; the columns after
            # the rank are removed
            z = F.scaled_dot_product_attention(q, memory, memory, scale=problem.scale)
            return torch.einsum("bthr,her->bhte", z[..., : s.rank], w_v)

    return PreparedCall(step, lambda out: {"out": out})


def _options(problem: AttentionProblem) -> dict[str, Any]:
    """Return the causal flag if it describes the mask, else a dense mask: float with a bias, else
    bool.
    """
    s = problem.sizes
    causal_only = s.window is None and s.pattern is None and not s.alibi and not s.padded
    if causal_only and s.queries == 1:
        return {}
    if causal_only and s.queries == s.S:
        return {"is_causal": True}
    visible = problem.visible()
    if s.alibi:
        return {"attn_mask": problem.bias().masked_fill(~visible, float("-inf"))}
    return {"attn_mask": visible}


def mask_bytes(problem: AttentionProblem) -> int:
    """Return the memory in bytes of a dense mask, which torch converts to numbers; a bias has one
    per head.
    """
    s = problem.sizes
    pairs = s.queries * s.S * (s.B if s.padded else 1)
    if s.alibi:
        return 3 * s.H * pairs * problem.dtype.itemsize
    masked = s.window or s.padded or s.pattern
    return pairs * (2 + problem.dtype.itemsize) if masked else 0


ATTENTION = Peer(
    "torch SDPA",
    "F.scaled_dot_product_attention, enable_gqa.",
    attention,
    why_not=why_not_everything,
    bytes=mask_bytes,
)
FLASH, CUDNN, EFFICIENT = (
    Peer(
        f"torch SDPA {name}",
        f"SDPA that may run its {name} kernel only.",
        partial(pinned, backend=backend),
        why_not=partial(why_not_pinned, backend=backend),
        bytes=mask_bytes,
    )
    for name, backend in (
        ("flash", SDPBackend.FLASH_ATTENTION),
        ("cuDNN", SDPBackend.CUDNN_ATTENTION),
        ("efficient", SDPBackend.EFFICIENT_ATTENTION),
    )
)
FOLDED = Peer(
    "torch SDPA folded", "SDPA with the groups folded into queries.", folded, why_not=why_not_folded
)
CHUNKED = Peer(
    "torch SDPA in chunks", "SDPA over strided views of a window.", chunked, why_not=why_not_chunked
)
ABSORBED = Peer("torch SDPA absorbed", "SDPA over latents, the absorbed form by hand.", absorbed)
