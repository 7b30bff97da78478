"""regard: `attend` with the kernel that it chooses or with a named one, and a model of regard."""

from __future__ import annotations

import copy
from functools import partial
from typing import Any

import torch
from torch import Tensor

from regard.bench.interfaces import Peer, PreparedCall
from regard.bench.problems import AttentionProblem, LatentProblem, ModelProblem, prepared_call
from regard.biases import ALiBi
from regard.huge_pages import module_to_huge_pages
from regard.masks import Causal, Window
from regard.models.decoder import Decoder
from regard.nn.stored import can_store_weight, store_weight
from regard.ops.softmax import attend, dispatch, plan
from regard.ops.stored_weights import Int4Weight, Int8Weight, StoredWeight


def attention(problem: AttentionProblem, backend: str = "auto") -> PreparedCall:
    """Prepare `regard.attend` with the kernel that it chooses, or with a named kernel."""
    options = {**_options(problem), "backend": backend}
    kernel = plan(problem.q, problem.k, problem.v, **options).kernel
    return prepared_call(
        problem, lambda: attend(problem.q, problem.k, problem.v, **options), kernel=kernel
    )


def why_not(problem: AttentionProblem, backend: str) -> str | None:
    """Return why a kernel cannot run the problem, or None."""
    choice = plan(problem.q, problem.k, problem.v, **_options(problem))[backend]
    return "; ".join(choice.reasons) or None


def kernel_bytes(problem: AttentionProblem, backend: str) -> int:
    """Return the memory that a kernel reports to need beyond its inputs and outputs, in bytes."""
    work = plan(problem.q, problem.k, problem.v, **_options(problem))[backend].work
    return 0 if work is None else work.bytes


def _options(problem: AttentionProblem) -> dict[str, Any]:
    """Return the mask, the bias and the positions of a problem, as arguments of `attend`."""
    sizes = problem.sizes
    options: dict[str, object] = {}
    if sizes.queries > 1:
        options["mask"] = Causal() if sizes.window is None else Causal() & Window(sizes.window)
    if sizes.alibi:
        options["bias"] = ALiBi(sizes.H)
    if any(problem.pads):
        positions = _positions(problem)
        options |= {"k_positions": positions, "q_positions": positions[:, -sizes.queries :]}
    return options


def quantized_attention(problem: AttentionProblem) -> PreparedCall:
    """Prepare `regard.attend` over keys and values from a `Quantised` cache."""
    assert problem.quantized is not None, "`not_quantized` refuses other problems"
    keys, values = problem.quantized
    return PreparedCall(lambda: attend(problem.q, keys, values), lambda out: {"out": out}, "cpu")


def not_quantized(problem: AttentionProblem) -> str | None:
    """Return why there is no quantised cache in the problem, or None."""
    return "the cache of this problem is not quantised" if problem.quantized is None else None


def _positions(problem: AttentionProblem) -> Tensor:
    """Return the positions `[B, S]`: 0, 1, ... from each row's first token, and -1 for padding."""
    pads = torch.tensor(problem.pads, device=problem.device)[:, None]
    return (torch.arange(problem.sizes.S, device=problem.device)[None] - pads).clamp(min=-1)


def latent(problem: LatentProblem) -> PreparedCall:
    """Prepare latent attention in the absorbed form of `nn.Latent`.

    Queries are projected to the latent space, `attend` computes mean latents, and these are
    projected to the outputs of the heads.
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
    return PreparedCall(step, lambda out: {"out": out}, kernel)


def model(problem: ModelProblem) -> PreparedCall:
    """Prepare a decoding step of a model of regard with a `Fixed` cache.

    The cache is cropped to its former length after each step.
    """
    caches, S = problem.caches(problem.dtype), problem.sizes.S
    decoder = problem.decoder
    module_to_huge_pages(decoder)
    if problem.sizes.bits is not None:
        decoder = with_stored_weights(decoder, problem.sizes.bits)

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
    return PreparedCall(step, read, plan(q, k, v).kernel)


def with_stored_weights(decoder: Decoder, bits: int) -> Decoder:
    """Return a copy of a decoder whose matrices are stored in 8 or 4 bits.

    Args:
        decoder: the decoder, which keeps its weights.
        bits: 8 or 4.

    Returns:
        The copy; what is not stored in few bits is shared.
    """
    record_type = Int8Weight if bits == 8 else Int4Weight
    shared = {id(x): x for x in decoder.parameters()}
    copied = copy.deepcopy(decoder, dict(shared))
    records: dict[int, StoredWeight] = {}
    for module in list(copied.modules()):
        weight = module._parameters.get("weight")
        if weight is not None and weight.ndim == 2 and can_store_weight(module):
            if id(weight) not in records:
                records[id(weight)] = record_type.quantize(weight)
            store_weight(module, records[id(weight)])
    return copied


ATTENTION = Peer("regard", "regard.attend, backend auto.", attention)
OVER_SDPA = Peer("regard", "regard.attend, backend sdpa.", partial(attention, backend="sdpa"))
KERNELS = tuple(
    Peer(
        f"regard {kernel.name}",
        f"regard.attend, backend {kernel.name}.",
        partial(attention, backend=kernel.name),
        why_not=partial(why_not, backend=kernel.name),
        bytes=partial(kernel_bytes, backend=kernel.name),
    )
    for kernel in dispatch.KERNELS
)
QUANTIZED = Peer(
    "regard, codes",
    "regard.attend over a Quantised cache.",
    quantized_attention,
    why_not=not_quantized,
)
LATENT = Peer("regard", "regard.attend over the latents, absorbed.", latent)
MODEL = Peer("regard", "A model of regard with a Fixed cache.", model)
