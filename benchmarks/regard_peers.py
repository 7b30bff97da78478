"""regard: `attend` with the kernel that it chooses or with a named one, and a model of regard."""

from __future__ import annotations

import copy
from functools import partial
from itertools import count
from typing import Any

import torch
from torch import Tensor

from benchmarks.attention import (
    SINK_KEYS,
    AttentionProblem,
    AttentionSizes,
    LatentProblem,
    prepared_call,
)
from benchmarks.interfaces import Peer, PreparedCall
from benchmarks.model import ModelProblem
from regard.biases import ALiBi
from regard.caches import Paged
from regard.caches.base import Parts, StaticSize
from regard.caches.static import StaticSlots, to_static
from regard.huge_pages import module_to_huge_pages
from regard.masks import Causal, Document, Mask, Prefix, Sinks, Window
from regard.models.compiled_step import PreparedDecoder
from regard.models.decoder import Decoder
from regard.models.generation.captured_step import WARM_UP_STEPS, CudaGraphRecorder
from regard.nn.weights import can_store_weight, store_weight, stored_to_huge_pages
from regard.ops.softmax import attend, dispatch, plan
from regard.ops.stored_weights import Int4Weight, Int8Weight, StoredWeight
from regard.span import Span
from regard.timing import peak_bytes_on


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
        options["mask"] = _mask(sizes)
    if sizes.alibi:
        options["bias"] = ALiBi(sizes.H)
    if sizes.softcap is not None:
        options["softcap"] = sizes.softcap
    if problem.sink is not None:
        options["sink"] = problem.sink
    if any(problem.pads):
        positions = _positions(problem)
        options |= {"k_positions": positions, "q_positions": positions[:, -sizes.queries :]}
    return options


def _mask(sizes: AttentionSizes) -> Mask:
    """Return the mask of a problem."""
    mask = Causal() if sizes.window is None else Causal() & Window(sizes.window)
    if sizes.pattern == "sinks":
        return mask | Causal() & Sinks(SINK_KEYS)
    if sizes.pattern == "prefix":
        return mask | Prefix(sizes.prefix)
    if sizes.pattern == "documents":
        bounds = [*range(0, sizes.S, sizes.document), sizes.S]
        return mask & Document(bounds)
    return mask


def stored_attention(problem: AttentionProblem, memory: Parts) -> PreparedCall:
    """Prepare `regard.attend` over keys and values as a cache returned them."""
    kernel = plan(problem.q, *memory).kernel
    return PreparedCall(lambda: attend(problem.q, *memory), lambda out: {"out": out}, kernel)


def quantized_attention(problem: AttentionProblem) -> PreparedCall:
    """Prepare `regard.attend` over keys and values from a `Quantized` or `Float8` cache."""
    assert problem.quantized is not None, "`not_quantized` refuses other problems"
    return stored_attention(problem, problem.quantized)


def paged_attention(problem: AttentionProblem) -> PreparedCall:
    """Prepare `regard.attend` over the pages of a `Paged` cache."""
    s = problem.sizes
    cache = Paged(PAGE_TOKENS, s.B * -(-s.S // PAGE_TOKENS))
    cache.update((problem.k, problem.v), Span(0, s.S))
    return stored_attention(problem, cache.lazy_memory()[0])


def one_query_of_all(problem: AttentionProblem) -> str | None:
    """Return why the problem is not one query that sees every key of a cache, or None."""
    s = problem.sizes
    plain = s.causal_only and not s.train and s.queries == 1
    return None if plain else "only one query that sees every key is measured"


def with_new_masks(problem: AttentionProblem) -> PreparedCall:
    """Prepare `regard.attend` with a new mask in each call; all masks mean the same."""
    options, larger = _options(problem), count(problem.sizes.S + 1)
    mask = options.pop("mask")

    def call() -> Tensor:
        same = mask & Window(next(larger))
        return attend(problem.q, problem.k, problem.v, mask=same, **options)

    return prepared_call(
        problem, call, kernel=plan(problem.q, problem.k, problem.v, mask=mask).kernel
    )


def measured_memory(problem: AttentionProblem) -> PreparedCall:
    """Prepare `regard.attend`, with the bytes that it plans and allocates as figures."""
    call = attention(problem)
    inputs = sum(x.nbytes for x in (problem.q, problem.k, problem.v))
    extra = plan(problem.q, problem.k, problem.v, **_options(problem))[call.kernel].work

    def figures() -> dict[str, float]:
        shares = {"planned bytes / bytes of q, k, v": (extra.bytes if extra else 0) / inputs}
        if problem.device.type == "cuda":
            peak = peak_bytes_on(problem.device, call.step)
            shares["allocated bytes / bytes of q, k, v"] = (peak or 0) / inputs
        return shares

    return call._replace(figures=figures)


def not_quantized(problem: AttentionProblem) -> str | None:
    """Return why there is no quantized cache in the problem, or None."""
    return "the cache of this problem is not quantized" if problem.quantized is None else None


def _positions(problem: AttentionProblem) -> Tensor:
    """Return the positions `[B, S]`: 0, 1, ... from each row's first token, and -1 for padding."""
    pads = torch.tensor(problem.pads, device=problem.device)[:, None]
    return (torch.arange(problem.sizes.S, device=problem.device)[None] - pads).clamp(min=-1)


def latent(problem: LatentProblem) -> PreparedCall:
    """Prepare latent attention in the absorbed form of `nn.Latent`."""
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
    """Prepare a step of a model with a `Fixed` cache, which is cropped after each step."""
    caches, S = problem.caches(problem.dtype), problem.sizes.S
    decoder = problem.decoder
    module_to_huge_pages(decoder)
    if problem.sizes.bits is not None:
        decoder = with_stored_weights(decoder, problem.sizes.bits)
    prepared = PreparedDecoder(decoder)

    def step() -> Tensor:
        with torch.no_grad():
            logits = prepared(problem.ids, caches=caches)
        for cache in caches:
            cache.crop(S)
        return logits

    def read(logits: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"logits": logits, "prompt": decoder(problem.prompt, last=1)}

    k, v = problem.memory(0)
    q = k.new_zeros(problem.sizes.B, problem.sizes.H, 1, k.shape[3])
    return PreparedCall(step, read, plan(q, k, v).kernel)


SPARE_STEPS = 8
"""Steps that run without a graph, for which the static caches of `captured_model` have slots."""


def captured_model(problem: ModelProblem) -> PreparedCall:
    """Prepare a step as a CUDA graph, whose positions go back; on a CPU, the plain step."""
    decoder, sizes = problem.decoder, problem.sizes
    size = StaticSize(sizes.S + SPARE_STEPS, sizes.B, problem.device)
    caches = to_static(problem.caches(problem.dtype), size)
    tables = {id(x.table): x.table for x in caches if isinstance(x, StaticSlots)}.values()
    before = [(x, x.positions.clone(), x.last.clone()) for x in tables]

    def step() -> Tensor:
        with torch.no_grad():
            logits: Tensor = decoder(problem.ids, caches=caches)
            for table, positions, last in before:
                table.positions.copy_(positions)
                table.last.copy_(last)
        return logits

    def read(logits: Tensor) -> dict[str, Tensor]:
        with torch.no_grad():
            return {"logits": logits, "prompt": decoder(problem.prompt, last=1)}

    if problem.device.type != "cuda":
        return PreparedCall(step, read)
    recorder = CudaGraphRecorder(problem.device)
    for _ in range(WARM_UP_STEPS):
        recorder.warm_up(step)
    replay, logits = recorder.record(step)

    def run_again() -> Tensor:
        replay()
        return logits

    return PreparedCall(run_again, read)


def with_stored_weights(decoder: Decoder, bits: int) -> Decoder:
    """Return a copy of a decoder with matrices in 8 or 4 bits, as `regard.load` stores them."""
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
    stored_to_huge_pages(copied)
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
PAGE_TOKENS = 16
"""The tokens of a page of the measured cache, as generation creates it."""

PAGED = Peer(
    "regard, pages", "regard.attend over a Paged cache.", paged_attention, why_not=one_query_of_all
)
ATTENTION_AGAIN = Peer("regard, same mask", "regard.attend with a mask it knows.", attention)
NEW_MASKS = Peer("regard", "regard.attend with a new mask in each call.", with_new_masks)
MEASURED_MEMORY = Peer("regard", "regard.attend, with the memory it takes.", measured_memory)
QUANTIZED = Peer(
    "regard, codes",
    "regard.attend over a Quantized or Float8 cache.",
    quantized_attention,
    why_not=not_quantized,
)
LATENT = Peer("regard", "regard.attend over the latents, absorbed.", latent)
MODEL = Peer("regard", "A model of regard with a Fixed cache.", model)
STEP_BY_STEP = Peer("regard, no graph", "The same, with a launch for every operation.", model)
CAPTURED_MODEL = Peer(
    "regard", "A step of regard as a CUDA graph, with static caches.", captured_model
)
