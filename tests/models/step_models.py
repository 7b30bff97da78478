"""Small decoders whose matrices are large enough for the compiled step, and their decoding."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from regard import masks
from regard.biases import ALiBi
from regard.caches import Cache, Fixed, Growing, Paged, Quantized
from regard.models import compiled_step
from regard.models.compiled_step import PreparedDecoder
from regard.models.decoder import Decoder
from regard.nn import (
    Attention,
    Block,
    GatedFeedForward,
    HeadProjection,
    InputEmbedding,
    OffsetRMSNorm,
    OutputNorm,
    PreNorm,
    RMSNorm,
    SandwichNorm,
    SeparateQKV,
    SwiGLU,
)
from regard.nn.blocks.embedding import CappedLogits
from regard.nn.weights.linear import Linear
from regard.ops.cpu import threads
from regard.positions import LinearScaling, Rotary
from tests.models import small
from tests.rules import InOrders, in_orders

M, V, F = 128, 300, 136
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def llama(H: int = 4, G: int = 2, D: int = 32, *, seed: int = 0, **parts: object) -> Decoder:
    """Two Llama-like blocks; `parts` change the ingredients."""
    rotary = parts.get("rotary", Rotary(D))
    bias = bool(parts.get("bias"))
    norm: Callable[[int], nn.Module] = parts.get("norm", RMSNorm)  # type: ignore[assignment]
    residual = parts.get("residual", PreNorm)
    sandwich = residual is SandwichNorm

    def block(mask: masks.Mask) -> Block:
        steps = [[norm(D)] if parts.get("head_norms") else [] for _ in range(2)]
        last = [] if rotary is None else [rotary]
        q = HeadProjection(M, H, D, *steps[0], *last, bias=bias)
        k = HeadProjection(M, G, D, *steps[1], *last, bias=bias)
        v = HeadProjection(M, G, D, bias=bias)
        attention = Attention(
            SeparateQKV(q, k, v),
            Linear(H * D, M, bias=bias),
            mask=mask,
            bias=parts.get("alibi"),  # type: ignore[arg-type]
            softcap=parts.get("softcap"),  # type: ignore[arg-type]
            sink=nn.Parameter(torch.zeros(H)) if parts.get("sink") else None,
        )
        activation, make = parts.get("activation"), parts.get("network")
        network: nn.Module = (
            make()  # type: ignore[operator]
            if make is not None
            else SwiGLU(M, F, bias=bias)
            if activation is None
            else GatedFeedForward(M, F, activation, bias=bias)  # type: ignore[arg-type]
        )
        paths = (residual(*(norm(M) for _ in range(1 + sandwich))) for _ in range(2))  # type: ignore[operator]
        return Block(attention, network, *paths)

    first: masks.Mask = parts.get("mask", masks.Causal())  # type: ignore[assignment]
    rest = int(parts.get("layers", 2)) - 1  # type: ignore[call-overload]
    layers = [block(first), *(block(masks.Causal()) for _ in range(rest))]
    head = CappedLogits(M, V, cap=5.0) if parts.get("cap") else Linear(M, V, bias=bias)
    decoder = Decoder(InputEmbedding(nn.Embedding(V, M)), layers, norm(M), head)
    small.randomize(decoder, seed)
    return decoder.eval().requires_grad_(False)


KINDS: dict[str, dict[str, object]] = {
    "llama": {},
    "qwen2": {"bias": True},
    "qwen3": {"head_norms": True, "G": 1},
    "gemma2": {
        "norm": OffsetRMSNorm,
        "residual": SandwichNorm,
        "activation": nn.GELU("tanh"),
        "softcap": 3.0,
        "cap": True,
    },
    "output-norm": {"residual": OutputNorm, "activation": nn.ReLU()},
    "window": {"mask": masks.Causal() & masks.Window(9), "D": 24},
    "interleaved": {"rotary": Rotary(32, layout="interleaved", rotary_dim=16)},
    "scaled": {"rotary": Rotary(32, scaling=LinearScaling(4.0)), "H": 3, "G": 3},
    "no-rotary": {"rotary": None},
    "sink": {"sink": True, "mask": masks.Causal() & masks.Window(9)},
    "alibi": {"rotary": None, "alibi": ALiBi(4)},
    "symmetric-alibi": {
        "rotary": None,
        "alibi": ALiBi(slopes=(0.5, 0.2, 0.1, 0.3), symmetric=True),
    },
}


CACHES: dict[str, Callable[[int], Cache]] = {
    "growing": lambda _: Growing(),
    "fixed": Fixed,
    "8 bits": lambda _: Quantized(8, group=8, residual=9),
    "4 bits": lambda _: Quantized(4, group=4, residual=5),
    "paged": lambda slots: Paged(4, slots),
    "2 bits": lambda _: Quantized(2, group=4, residual=1),
}


def why_not(decoder: Decoder, caches: Sequence[Cache], rows: int = 1) -> list[str]:
    """The reasons why generation with a decoder does not use the compiled step now."""
    return PreparedDecoder(decoder).why_not(caches, rows)


def full_caches(decoder: Decoder, kind: str, slots: int = 64) -> list[Cache]:
    return [CACHES[kind](slots) for _ in decoder.layers]


def decode(
    decoder: Decoder,
    ids: Tensor,
    prompt: int,
    *,
    kind: str = "growing",
    backend: str = "auto",
    positions: Tensor | None = None,
) -> tuple[Tensor, list[Cache]]:
    """Logits of each token after the prompt, decoded one by one, and the caches."""
    caches, T = full_caches(decoder, kind), ids.shape[1]
    out, prepared = [], PreparedDecoder(decoder)
    with torch.inference_mode():
        first = None if positions is None else positions[:, :prompt]
        decoder(ids[:, :prompt], first, caches)
        for t in range(prompt, T):
            out.append(step(prepared, ids[:, t : t + 1], caches, backend))
    return torch.cat(out, 1), caches


def step(
    decoder: Decoder | PreparedDecoder, ids: Tensor, caches: list[Cache], backend: str = "auto"
) -> Tensor:
    """Logits of the next token, in one compiled call where it is possible, or by a kernel."""
    if isinstance(decoder, Decoder):
        decoder = PreparedDecoder(decoder)
    if backend == "auto":
        return decoder(ids, None, caches)
    logits: Tensor = decoder.decoder(ids, None, caches, backend=backend)
    return logits


def plain_logits(decoder: Decoder, ids: Tensor, prompt: int) -> InOrders[Tensor]:
    """What the modules compute of each token after the prompt, in several orders of the sums."""
    return in_orders(lambda: decode(decoder, ids, prompt, backend="reference")[0])


def prompted(decoder: Decoder, kind: str = "growing") -> list[Cache]:
    """Caches that have read three tokens."""
    caches = full_caches(decoder, kind)
    with torch.inference_mode():
        decoder(torch.tensor([[1, 2, 3]]), caches=caches)
    return caches


@contextmanager
def counted_steps(patch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The number of threads of every compiled step that runs."""
    counted: list[int] = []
    run = compiled_step.DecodeStep.run

    def counting(self: object, *inputs: object, **options: object) -> Tensor:
        counted.append(threads.thread_count())
        return run(self, *inputs, **options)  # type: ignore[arg-type]

    with patch.context() as patched:
        patched.setattr(compiled_step.DecodeStep, "run", counting)
        yield counted


def assert_threads_change_no_bit(decoder: Decoder, count: int) -> None:
    """Every step reads the same caches: torch's products, which read the prompt, may have other
    bits with another number of threads.
    """
    before, caches, ids = (
        torch.get_num_threads(),
        full_caches(decoder, "growing"),
        torch.arange(33).view(3, 11),
    )
    logits = []
    with torch.inference_mode(), pytest.MonkeyPatch.context() as patch, counted_steps(patch) as ran:
        decoder(ids[:, :3], caches=caches)
        prepared = PreparedDecoder(decoder)
        try:
            for n in (before, count):
                torch.set_num_threads(n)
                own = copy.deepcopy(caches)
                logits.append([prepared(x, caches=own) for x in ids[:, 3:].split(1, 1)])
        finally:
            torch.set_num_threads(before)
    assert ran == [before] * 8 + [count] * 8
    assert all(torch.equal(x, y) for x, y in zip(*logits, strict=True))
