"""The compiled step of a decoder against its modules, and what makes a decoder leave it."""

from __future__ import annotations

import copy
import functools
import gc
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import regard
from regard.biases import ALiBi
from regard.caches import Cache
from regard.errors import ArgumentError, ArgumentTypeError
from regard.models.compiled_step import PreparedDecoder
from regard.models.decoder import Decoder
from regard.models.generation import DecodeSession
from regard.models.generation.decode_session import pad_left
from regard.nn import Attention, RMSNorm, SwiGLU
from regard.ops.cpu import threads
from regard.ops.cpu.arguments import PackedStruct, struct_layout
from regard.span import Span
from tests.kernels import require_kernels
from tests.models import small
from tests.models.step_models import (
    DTYPES,
    KINDS,
    F,
    M,
    V,
    assert_changes_are_used,
    assert_equals_modules,
    assert_leaves_step,
    assert_same_bits,
    assert_threads_change_no_bit,
    decode,
    full_caches,
    llama,
    prompted,
    step,
    why_not,
)
from tests.rules import assert_close_rule, in_orders

require_kernels()


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("cache", ["growing", "fixed"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("kind", KINDS)
def test_a_compiled_step_equals_the_modules(kind: str, dtype: torch.dtype, cache: str) -> None:
    decoder = llama(**KINDS[kind]).to(dtype)  # type: ignore[arg-type]
    ids = torch.randint(V, (2, 21), generator=torch.Generator().manual_seed(1))
    caches = assert_equals_modules(decoder, ids, 15, kind=cache)
    _, plain_caches = decode(decoder, ids, 15, kind=cache, backend="reference")
    for one, other in zip(caches, plain_caches, strict=True):
        assert len(one) == 21
        assert one.next(1) == Span(21, 1)
        assert one.contents()["positions"] == other.contents()["positions"]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_where_the_sums_are_the_same_all_bits_are(dtype: torch.dtype) -> None:
    """All matrices are large enough for `gemv`, and the kernel "cpu" is the one of the step. In
    fp32 the activation differs in the last bit, so that a ReLU takes its place.
    """
    decoder = llama(H=8, G=4, activation=nn.ReLU(), bias=True).to(dtype)
    ids = torch.randint(V, (3, 14), generator=torch.Generator().manual_seed(2))
    assert_same_bits(decoder, ids, 9)


@pytest.mark.parametrize("kind", ["alibi", "symmetric-alibi"])
def test_alibi_has_all_bits_of_the_kernel(kind: str, steps: list[int]) -> None:
    parts = {**KINDS[kind], "D": 64, "G": 4, "activation": nn.ReLU()}
    decoder = llama(**parts)  # type: ignore[arg-type]
    ids = torch.randint(V, (2, 14), generator=torch.Generator().manual_seed(3))
    found, _ = decode(decoder, ids, 9)
    assert len(steps) == 5
    assert torch.equal(found, decode(decoder, ids, 9, backend="cpu")[0])
    for layer in decoder.layers:
        layer.attention.bias = None
    assert not torch.allclose(found, decode(decoder, ids, 9)[0], rtol=1e-3)


@pytest.mark.parametrize(("dtype", "prompt"), [(torch.bfloat16, 9), (torch.float32, 1100)], ids=str)
def test_sinks_have_all_bits_of_the_kernel(
    dtype: torch.dtype, prompt: int, steps: list[int]
) -> None:
    """Also where the keys of a head are divided into splits. The values of a sink may change."""
    decoder = llama(H=8, G=4, activation=nn.ReLU(), bias=True, sink=True).to(dtype)
    generator = torch.Generator().manual_seed(4)
    ids, logits = torch.randint(V, (2, prompt + 3), generator=generator), []
    for sink in (8.0, -torch.inf):
        decoder.layers[0].attention.sink.data.add_(sink)
        found, _ = decode(decoder, ids, prompt)
        assert torch.equal(found, decode(decoder, ids, prompt, backend="cpu")[0])
        logits.append(found)
    assert len(steps) == 6
    assert not torch.allclose(*logits, rtol=1e-2)


@pytest.mark.parametrize("cache", ["growing", "fixed", "paged"])
def test_padded_rows_equal_single_rows(cache: str, steps: list[int]) -> None:
    decoder = llama(seed=3)
    rows = [[5, 6, 7, 8, 9, 10], [11, 12], [13, 14, 15]]
    ids, positions = pad_left(rows)
    ids = torch.cat([ids, torch.tensor([[1, 2, 3]] * 3)], 1)
    assert isinstance(positions, Tensor)
    found, _ = decode(decoder, ids, 6, kind=cache, positions=positions)
    assert len(steps) == 3
    wide = copy.deepcopy(decoder).double()
    for row, tokens in enumerate(rows):
        alone, n = torch.tensor([[*tokens, 1, 2, 3]]), len(tokens)
        plain = in_orders(partial(decode, decoder, alone, n, kind=cache, backend="reference"))
        exact, _ = decode(wide, alone, n, kind=cache, backend="reference")
        assert_close_rule(found[row], (out[0] for out, _ in plain), exact[0])


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_the_number_of_threads_changes_no_bit(threads: int) -> None:
    """More threads than cores, and fewer: a phase ends when its tasks do."""
    assert_threads_change_no_bit(llama(seed=4), threads)


def test_a_thread_whose_first_task_is_not_the_first_of_a_phase(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """One thread alone, with the number 1 of two: it takes the second half of each phase first."""
    decoder, real, changed = llama(seed=4), threads.run_entry, []

    def as_second_thread(entry: int, record: PackedStruct, workers: int) -> None:
        if 8 * len(record) == struct_layout("Step").dtype.itemsize and workers > 1:
            changed.append(record)
            record[0], workers = 1, 1
        real(entry, record, workers)

    monkeypatch.setattr(threads, "thread_count", lambda: 2)
    caches, logits = [prompted(decoder) for _ in range(2)], []
    for run, own in zip((real, as_second_thread), caches, strict=True):
        monkeypatch.setattr(threads, "run_entry", run)
        with torch.inference_mode():
            logits.append([step(decoder, torch.tensor([[i]]), own) for i in range(3)])
    assert len(changed) == 3
    assert all(torch.equal(x, y) for x, y in zip(*logits, strict=True))


def test_two_threads_decode_with_one_model() -> None:
    decoder = llama(seed=5)
    ids = torch.randint(V, (4, 30), generator=torch.Generator().manual_seed(4))
    expected = [decode(decoder, row[None], 10)[0] for row in ids]
    found: list[Tensor | None] = [None] * 4
    prepared = PreparedDecoder(decoder)

    def work(i: int) -> None:
        caches = full_caches(decoder, "growing")
        with torch.inference_mode():
            decoder(ids[i : i + 1, :10], caches=caches)
            steps = [prepared(ids[i : i + 1, t : t + 1], None, caches) for t in range(10, 30)]
        found[i] = torch.cat(steps, 1)

    workers = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in workers:
        thread.start()
    for thread in workers:
        thread.join()
    assert all(torch.equal(x, y) for x, y in zip(found, expected, strict=True))  # type: ignore[arg-type]


@contextmanager
def _hooked(register: Callable[..., Any]) -> Iterator[None]:
    handle = register(lambda *_: None)
    yield
    handle.remove()


CHANGES: dict[str, tuple[Callable[[Decoder], object], str]] = {
    "hook": (lambda d: d.layers[1].feed_forward.down.register_forward_hook(print), "has a hook"),
    "forward": (lambda d: setattr(d.norm, "forward", abs), "was replaced"),
    "mechanism": (lambda d: setattr(d.layers[1].attention, "bias", object()), "has a bias"),
    "bias of heads": (
        lambda d: setattr(d.layers[1].attention, "bias", ALiBi(slopes=[1.0])),
        "ALiBi has 1 slope for 4 heads",
    ),
    "learned slopes": (
        lambda d: setattr(d.layers[1].attention, "bias", ALiBi(slopes=torch.ones(4))),
        "which may change",
    ),
    "size of sinks": (
        lambda d: setattr(d.layers[1].attention, "sink", nn.Parameter(torch.ones(3))),
        "layer 1: the sink has another size than the heads",
    ),
    "subclass": (
        lambda d: setattr(d.layers[0], "feed_forward", type("Other", (SwiGLU,), {})(M, F)),
        "layer 0: the feed-forward layer is Other",
    ),
    "parametrization": (
        lambda d: nn.utils.parametrizations.weight_norm(d.layers[0].feed_forward.up),
        "linear map",
    ),
    "activation": (
        lambda d: setattr(d.layers[0].feed_forward, "activation", nn.Tanh()),
        "the activation is Tanh()",
    ),
    "dtype": (lambda d: d.layers[1].feed_forward.half(), "torch.float16 on cpu"),
    "turned in place": (lambda d: d.layers[0].attention.output.weight.t_(), "contiguous"),
    "turned": (
        lambda d: setattr(d.layers[0].attention.output.weight, "data", torch.ones(M, M).T),
        "contiguous",
    ),
    "own class": (
        lambda d: setattr(d.layers[0].feed_forward, "__class__", type("Other", (SwiGLU,), {})),
        "layer 0: the feed-forward layer is Other",
    ),
    "strides": (lambda d: setattr(d.head.weight, "data", torch.randn(M, V).T), "contiguous"),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_changed_decoder_leaves_the_step_and_says_why(change: str) -> None:
    make, reason = CHANGES[change]
    assert_leaves_step(llama(), make, reason)


def _doubled(method: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """What a user writes to change every module of a class."""
    return functools.wraps(method)(
        lambda self, *args, **options: 2 * method(self, *args, **options)
    )


PATCHES = {
    "norm": (RMSNorm, "forward"),
    "linear": (torch.nn.Linear, "forward"),
    "call": (nn.Module, "__call__"),
    "mechanism": (Attention, "forward"),
}


@pytest.mark.parametrize("patch", PATCHES)
def test_a_patched_class_gets_the_modules(patch: str) -> None:
    decoder, (owner, name) = llama(), PATCHES[patch]
    caches = prompted(decoder)
    with torch.no_grad():
        with pytest.MonkeyPatch.context() as own:
            own.setattr(owner, name, _doubled(getattr(owner, name)))
            assert "was replaced" in why_not(decoder, caches)[0]
        assert why_not(decoder, caches) == []


STATES: dict[str, tuple[Callable[[], AbstractContextManager[object]], str]] = {
    "gradient": (torch.enable_grad, "gradients are recorded"),
    "trace": (lambda: regard.Trace("z", missing="ignore"), "a trace is open"),
    "autocast": (lambda: torch.autocast("cpu", torch.bfloat16), "autocast is on"),
    "checks": (lambda: regard.checks(finite=True), "looks at every input"),
    "flops": (lambda: torch.utils.flop_counter.FlopCounterMode(display=False), "a dispatch mode"),
    "global hook": (lambda: _hooked(register_module_forward_hook), "a global module hook"),
    "global pre-hook": (lambda: _hooked(register_module_forward_pre_hook), "a global module hook"),
}


@pytest.mark.parametrize("state", STATES)
def test_who_listens_gets_the_modules(state: str, steps: list[int]) -> None:
    """Whatever begins after the decoder was prepared is seen by the next token."""
    decoder = PreparedDecoder(llama())
    open_state, reason = STATES[state]
    caches = prompted(decoder.decoder)
    with torch.no_grad():
        decoder(torch.tensor([[5]]), caches=caches)
        with open_state():
            caches = full_caches(decoder.decoder, "growing")
            decoder(torch.tensor([[1, 2, 3]]), caches=caches)
            said = decoder.why_not(caches)
            decoder(torch.tensor([[4]]), caches=caches)
    assert any(reason in x for x in said)
    assert len(steps) == 1
    caches = prompted(decoder.decoder)
    with torch.no_grad():
        PreparedDecoder(decoder.decoder)(torch.tensor([[5]]), caches=caches)
    assert len(steps) == 2


def test_a_hook_between_two_tokens_is_called(steps: list[int]) -> None:
    decoder, calls = PreparedDecoder(llama()), []
    caches = prompted(decoder.decoder)
    with torch.inference_mode():
        step(decoder, torch.tensor([[5]]), caches)
        up = decoder.decoder.layers[0].feed_forward.up
        handle = up.register_forward_hook(lambda *_: calls.append(1))
        decoder(torch.tensor([[6]]), caches=caches)
        handle.remove()
        PreparedDecoder(decoder.decoder)(torch.tensor([[7]]), caches=caches)
    assert calls == [1]
    assert len(steps) == 2


def test_a_prepared_decoder_keeps_its_parts(steps: list[int]) -> None:
    """Numbers in place are used at once, other parts and other memory by the next preparation."""
    decoder, token = llama(seed=7), torch.tensor([[4]])
    prepared, up, logits = PreparedDecoder(decoder), decoder.layers[0].feed_forward.up, []
    caches = prompted(decoder, "fixed")
    changes: list[Callable[[], object]] = [
        lambda: None,
        lambda: setattr(decoder.layers[1], "feed_forward", SwiGLU(M, F).requires_grad_(False)),
        lambda: setattr(up.weight, "data", torch.full_like(up.weight, torch.nan)),
        lambda: decoder.head.weight.mul_(2),
    ]
    with torch.inference_mode():
        for change in changes:
            change()
            logits.append(prepared(token, caches=caches))
            for cache in caches:
                cache.crop(3)
        again = step(decoder, token, caches)
    assert len(steps) == 5
    assert torch.equal(logits[0], logits[1])
    assert torch.equal(logits[0], logits[2])
    assert torch.equal(logits[3], 2 * logits[0])
    assert again.isnan().all()


def test_a_trace_between_compiled_steps_sees_all_keys() -> None:
    decoder = llama(seed=6)
    ids = torch.randint(V, (1, 8), generator=torch.Generator().manual_seed(5))
    _, caches = decode(decoder, ids, 4)
    with torch.inference_mode(), regard.Trace("layers.1.pattern") as trace:
        step(decoder, torch.tensor([[7]]), caches)
    whole = torch.cat([ids, torch.tensor([[7]])], 1)
    with torch.inference_mode(), regard.Trace("layers.1.pattern") as one_pass:
        decoder(whole)
    torch.testing.assert_close(trace["pattern"], one_pass["pattern"][:, :, -1:])


REFUSED: dict[str, tuple[Callable[[Decoder, list[Cache]], list[str]], str]] = {
    "empty": (lambda d, _: why_not(d, full_caches(d, "growing")), "opens no slot"),
    "full": (lambda d, _: why_not(d, prompted_in(d, 3)), "opens no slot"),
    "other kind": (lambda d, c: why_not(d, [c[0], regard.caches.State()]), "State cache"),
    "number": (lambda d, c: why_not(d, c[:1]), "not one cache for each layer"),
    "rows": (lambda d, c: why_not(d, c, 2), "other parts"),
    "many rows": (lambda d, c: why_not(d, c, 40), "40 rows of torch.float32"),
}


def prompted_in(decoder: Decoder, slots: int) -> list[Cache]:
    caches = full_caches(decoder, "fixed", slots)
    with torch.inference_mode():
        decoder(torch.tensor([[1, 2, 3]]), caches=caches)
    return caches


@pytest.mark.parametrize("case", REFUSED)
def test_caches_that_the_step_cannot_write(case: str) -> None:
    decoder = llama()
    ask, reason = REFUSED[case]
    with torch.inference_mode():
        (said,) = ask(decoder, prompted(decoder))
    assert reason in said


def test_hooks_outside_the_blocks_are_called(steps: list[int]) -> None:
    decoder, calls = llama(), []
    caches = prompted(decoder)
    for module in (decoder.embed, decoder.embed.embedding):
        module.register_forward_hook(lambda *_: calls.append(1))
    with torch.inference_mode():
        step(decoder, torch.tensor([[4]]), caches)
    assert len(calls) == 2
    assert len(steps) == 1


@pytest.mark.parametrize("positions", [torch.tensor([3]), torch.tensor([[3], [3]])], ids=str)
def test_wrong_positions_are_refused_by_name(positions: Tensor) -> None:
    decoder = llama()
    caches = prompted(decoder)
    with torch.inference_mode(), pytest.raises((ArgumentError, ArgumentTypeError)):
        PreparedDecoder(decoder)(torch.tensor([[4]]), positions, caches)
    assert [len(cache) for cache in caches] == [3, 3]


def test_caches_of_different_lengths(steps: list[int]) -> None:
    decoder, logits = llama(), []
    for backend in ("auto", "reference"):
        caches = prompted(decoder)
        caches[1].crop(2)
        with torch.inference_mode():
            logits.append(step(decoder, torch.tensor([[4]]), caches, backend))
    assert len(steps) == 1
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_small_matrices_are_left_to_the_modules() -> None:
    made = small.model().decoder
    with torch.inference_mode():
        (said,) = why_not(made, prompted(made))
    assert "at most 960 elements" in said


def test_changed_weights_are_used() -> None:
    """Values in place, memory, parameters and modules: whatever changes, the next step sees it."""
    decoder = llama(seed=7)
    first, second = decoder.layers
    linear, norm = first.feed_forward.up, second.attention_residual.norm
    changes: list[Callable[[], object]] = [
        lambda: linear.weight.mul_(1.5),
        lambda: setattr(linear.weight, "data", linear.weight.data * 0.5),
        lambda: setattr(linear, "weight", nn.Parameter(linear.weight.flip(0), requires_grad=False)),
        lambda: setattr(norm, "eps", 0.5),
        lambda: setattr(second.attention, "softcap", 0.5),
        lambda: setattr(first, "feed_forward", SwiGLU(M, 2 * F).requires_grad_(False)),
        lambda: decoder.layers.append(copy.deepcopy(second)),
    ]
    assert_changes_are_used(decoder, torch.tensor([[1, 2, 3, 4]]), 3, changes)


def test_tensors_that_a_growing_cache_gave_never_change() -> None:
    """Also after a crop, which lets later tokens take the same slots."""
    decoder = llama(seed=8)
    caches = prompted(decoder)
    given: list[tuple[Tensor, Tensor]] = []
    with torch.inference_mode():
        for token in (4, 5, 6, 7):
            step(decoder, torch.tensor([[token]]), caches)
            keys = caches[0].contents()["memory.0"]
            assert isinstance(keys, Tensor)
            given.append((keys, keys.clone()))
            if token == 5:
                caches[0].crop(3), caches[1].crop(3)
    assert [x.shape[2] for x, _ in given] == [4, 5, 4, 5]
    assert all(torch.equal(x, y) for x, y in given)


def test_forks_and_reordered_rows_stay_apart() -> None:
    decoder = llama(seed=9)
    session = DecodeSession(decoder)
    session.append(torch.tensor([[1, 2, 3]]))
    session.append(torch.tensor([[4]]))
    twins = session.fork(2)
    twins.append(torch.tensor([[5], [6]]))
    twins.select(torch.tensor([1, 0]))
    found = twins.append(torch.tensor([[7], [7]]))
    for row, tokens in enumerate([[1, 2, 3, 4, 6, 7], [1, 2, 3, 4, 5, 7]]):
        with torch.inference_mode():
            alone = decoder(torch.tensor([tokens]), last=1)[0, -1]
        torch.testing.assert_close(found[row], alone, rtol=1e-4, atol=1e-4)
    assert len(session.caches[0]) == 4


def test_an_embedding_that_raises_changes_no_cache() -> None:
    decoder = llama()
    caches = prompted(decoder)
    with torch.inference_mode():
        with pytest.raises(IndexError):
            step(decoder, torch.tensor([[V]]), caches)
        step(decoder, torch.tensor([[4]]), caches)
    assert [len(cache) for cache in caches] == [4, 4]


@pytest.mark.full
def test_a_prepared_decoder_keeps_no_cache_alive() -> None:
    decoder = llama()
    prepared, caches = PreparedDecoder(decoder), prompted(decoder)
    with torch.inference_mode():
        step(prepared, torch.tensor([[4]]), caches)
    slot = caches[0].open_slot(Span(4, 1))
    assert slot is not None
    memory = weakref.ref(slot.buffers[0])
    weight = weakref.ref(decoder.layers[0].attention.output.weight)
    assert memory() is not None
    assert weight() is not None
    del caches, slot
    gc.collect()
    assert memory() is None
    del decoder, prepared
    gc.collect()
    assert weight() is None


def test_a_step_is_few_calls_of_kernels(steps: list[int]) -> None:
    """Torch's operations in a step, of which every one launches a kernel: they do not grow with
    the layers.
    """
    counts = []
    for layers in (2, 6):
        decoder = PreparedDecoder(llama(layers=layers))
        caches = prompted(decoder.decoder, "fixed")
        with torch.inference_mode():
            step(decoder, torch.tensor([[4]]), caches)
            with torch.profiler.profile() as profile:
                step(decoder, torch.tensor([[5]]), caches)
        counts.append(len([e for e in profile.events() if e.name.startswith("aten::")]))
    assert len(steps) == 4
    assert counts[0] == counts[1] < 60
