"""Small decoders whose matrices are large enough for the compiled step, and their decoding."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
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
from regard.nn.weights import Linear, plain_class, store_weight, stored_modules
from regard.ops.cpu import threads
from regard.ops.stored_weights import StoredWeight
from regard.positions import LinearScaling, Rotary
from tests.models import small
from tests.rules import InOrders, assert_close_rule, in_orders

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


def plain_logits(
    decoder: Decoder, ids: Tensor, prompt: int, *, kind: str = "growing"
) -> InOrders[Tensor]:
    """What the modules compute of each token after the prompt, in several orders of the sums."""
    return in_orders(lambda: decode(decoder, ids, prompt, kind=kind, backend="reference")[0])


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


Store = Callable[[Tensor], StoredWeight]


def in_few_bits(decoder: Decoder, *stores: Store | None) -> Decoder:
    """Store the linear maps of a decoder, in the given forms in turn; None leaves one as it is. The
    embedding shares the record of the head.
    """
    linears = [m for m in decoder.modules() if isinstance(m, nn.Linear)]
    for i, linear in enumerate(linears):
        store = stores[i % len(stores)]
        if store is not None:
            store_weight(linear, store(linear.weight.detach()))
    record = decoder.head.__dict__.get("stored_weight")
    if record is not None:
        store_weight(decoder.embed.embedding, record)  # type: ignore[arg-type]
    return decoder


def in_double(decoder: Decoder) -> Decoder:
    """The same decoder with dequantized matrices in fp64."""
    exact = copy.deepcopy(decoder)
    for name, record in dict(stored_modules(decoder)).items():
        module = exact.get_submodule(name.rpartition(".")[0])
        module.__class__ = plain_class(module)
        del module.stored_weight
        module.weight = nn.Parameter(record.dequantize(torch.float64), requires_grad=False)
    return exact.double()


def assert_equals_modules(
    decoder: Decoder, ids: Tensor, prompt: int, *, kind: str = "growing"
) -> list[Cache]:
    """Every token after the prompt is one compiled step, and has the numbers of the modules; the
    caches afterwards.
    """
    count = ids.shape[1] - prompt
    with pytest.MonkeyPatch.context() as patch, counted_steps(patch) as steps:
        found, caches = decode(decoder, ids, prompt, kind=kind)
        assert len(steps) == count
        plain: Iterable[Tensor] = plain_logits(decoder, ids, prompt, kind=kind)
        exact, _ = decode(in_double(decoder), ids, prompt, kind=kind, backend="reference")
        if kind in ("growing", "fixed"):
            with torch.inference_mode():
                one_pass = decoder(ids, backend="reference", last=count)
            plain = itertools.chain(plain, [one_pass])
        assert_close_rule(found, plain, exact)
        assert len(steps) == count
    return caches


def assert_same_bits(
    decoder: Decoder, ids: Tensor, prompt: int, *, kind: str = "growing"
) -> tuple[list[Cache], list[Cache]]:
    """Every token after the prompt is one compiled step, with all bits of the modules; the caches
    of both.
    """
    with pytest.MonkeyPatch.context() as patch, counted_steps(patch) as steps:
        found, caches = decode(decoder, ids, prompt, kind=kind)
        assert len(steps) == ids.shape[1] - prompt
    plain, plain_caches = decode(decoder, ids, prompt, kind=kind, backend="cpu")
    assert torch.equal(found, plain)
    assert_same_contents(caches, plain_caches)
    return caches, plain_caches


def assert_same_contents(ones: Sequence[Cache], others: Sequence[Cache]) -> None:
    for one, other in zip(ones, others, strict=True):
        assert_contents(one, other.contents())


def assert_contents(cache: Cache, contents: Mapping[str, object]) -> None:
    found = cache.contents()
    assert found.keys() == contents.keys()
    for name, x in contents.items():
        y = found[name]
        assert torch.equal(y, x) if isinstance(x, Tensor) else y == x  # type: ignore[arg-type]


def assert_changes_are_used(
    decoder: Decoder, ids: Tensor, prompt: int, changes: Sequence[Callable[[], object]]
) -> None:
    """Each change also is a negative control of the last one: it changes the numbers."""
    seen: list[Tensor] = []
    with pytest.MonkeyPatch.context() as patch, counted_steps(patch) as steps:
        for change in [lambda: None, *changes]:
            change()
            found, _ = decode(decoder, ids, prompt)
            plain, _ = decode(decoder, ids, prompt, backend="reference")
            torch.testing.assert_close(found, plain, rtol=1e-4, atol=1e-4)
            seen.append(found)
    assert len(steps) == (ids.shape[1] - prompt) * len(seen)
    assert not any(torch.equal(x, y) for x, y in itertools.pairwise(seen))


def assert_leaves_step(
    decoder: Decoder, change: Callable[[Decoder], object], reason: str, rows: int = 1
) -> None:
    """A decoder that had no reason has one after the change."""
    caches = prompted(decoder)
    with torch.inference_mode():
        assert why_not(decoder, caches) == []
        change(decoder)
        (said,) = why_not(decoder, caches, rows)
    assert reason in said


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
