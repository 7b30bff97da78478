"""What threads share gives every thread the bits that it has alone: kept tables, kernels, modules,
models, files, caches, names.

Two kinds of test stand here. A crowd of 8 threads shares one object at a switch interval of 1e-6,
and every result is compared bitwise with that of one thread. Where a race is possible, threads are
also made to take turns at the very step that matters, which is certain to fail where the step is
unprotected: a broken form, written out here, shows it.
"""

from __future__ import annotations

import subprocess
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.attention.flex_attention as torch_flex
from safetensors.torch import save_file
from torch import Tensor, nn

import regard
from regard import biases, masks, process_state
from regard.audit import audit
from regard.caches import Cache, Paged, Quantized
from regard.caches.paged import PagePool
from regard.caches.quantization import LazyDequantizedTensor
from regard.files import atomic_write
from regard.inspect import Recorder
from regard.inspect.explain import captured_run, layer_stages
from regard.inspect.model_run import prepare_run
from regard.models.checkpoint.tensors import CheckpointTensors
from regard.models.tokenizer import Tokenizer
from regard.nn.projections import dynamic_rotary
from regard.ops.cpu import attention, threads
from regard.ops.softmax import cpu, flex
from regard.ops.softmax.dispatch import KERNELS
from regard.ops.tokenwise import gemv, rms_norm
from regard.positions import DynamicNTK, Rotary
from regard.span import Span
from tests.caches.kinds import KINDS
from tests.kernels import require_backend, require_kernels
from tests.nn.catalogue import MIXERS, example, tokens

CROWD = 8


@pytest.fixture(autouse=True)
def hasty() -> Iterator[None]:
    """Threads take turns as often as they can."""
    usual = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    yield
    sys.setswitchinterval(usual)


def crowd(work: Callable[[int], Any], count: int = CROWD) -> list[Any]:
    """What so many threads return that begin together; an exception of any of them is raised."""
    ready = threading.Barrier(count)

    def begin(i: int) -> Any:
        ready.wait(60)
        return work(i)

    with ThreadPoolExecutor(count) as threads:
        return list(threads.map(begin, range(count)))


def in_another(work: Callable[[], Any]) -> Any:
    """What a thread returns that runs from beginning to end here and now."""
    with ThreadPoolExecutor(1) as one:
        return one.submit(work).result(60)


def same(x: Any, y: Any) -> bool:
    """Equal to the last bit, of tensors, and of lists and texts of anything."""
    if isinstance(x, Tensor):
        return bool(torch.equal(x, y))
    if isinstance(x, (list, tuple)):
        return len(x) == len(y) and all(map(same, x, y))
    return bool(x == y)


def assert_same_in_a_crowd(calls: Sequence[Callable[[], Any]], rounds: int = 2) -> None:
    """Each thread makes all calls, beginning with another one; every result is the one that a
    single thread had before.
    """
    alone = [call() for call in calls]

    def work(i: int) -> list[int]:
        turns = [(i + n) % len(calls) for _ in range(rounds) for n in range(len(calls))]
        return [n for n in turns if not same(calls[n](), alone[n])]

    assert crowd(work) == [[]] * CROWD


def inputs(T: int, S: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    make = torch.Generator().manual_seed(seed)
    sizes = ((4, T), (2, S), (2, S))
    return tuple(torch.randn(1, n, L, 16, generator=make).to(dtype) for n, L in sizes)


# kernels, and what they keep

RULES: tuple[dict[str, Any], ...] = (
    {},
    {"mask": masks.Causal()},
    {"mask": masks.Causal() & masks.Window(7)},
    {"mask": masks.Causal() & (masks.Window(5) | masks.Sinks(2))},
    {"mask": masks.BigBird(8, 16, seed=3)},
    {"mask": masks.Causal(), "bias": biases.ALiBi(4)},
    {"bias": biases.T5Relative(torch.linspace(-1, 1, 32)[:, None].expand(32, 4).contiguous())},
)


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", [x.name for x in KERNELS if x.name != "triton"])  # needs a GPU
def test_kernels(name: str) -> None:
    """Ranges, tables and plans of masks are kept for the layers of a model, and shared by all
    threads.
    """
    require_backend(name)
    calls, T = [], 3 if name == "cpu" else 40
    for n, rule in enumerate(RULES[1::2] if name == "flex" else RULES):  # flex compiles each anew
        q, k, v = inputs(T, 40 + n, n)
        try:
            regard.attend(q, k, v, backend=name, **rule)
        except regard.KernelRefusal:
            continue
        calls.append(lambda q=q, k=k, v=v, rule=rule: regard.attend(q, k, v, backend=name, **rule))
    assert len(calls) > 1
    assert_same_in_a_crowd(calls, 1)


def test_kept_tables_are_read_only_and_survive_being_thrown_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """More positions and masks than are kept: every thread throws out what the others have just
    asked for.
    """
    require_kernels()
    calls = []
    for n in range(20):
        q, k, v = inputs(2, 30 + n, n)
        rule = masks.Causal() & masks.Window(3 + n)
        for mask in (masks.Causal(), rule):
            calls.append(
                lambda q=q, k=k, v=v, mask=mask: regard.attend(q, k, v, mask=mask, backend="cpu")
            )
    assert_same_in_a_crowd(calls, 1)
    where, rule = Span(7, 2), masks.Causal() & masks.Window(4)
    kept = [*cpu._span_positions(where), *(cpu._cached_intervals(rule, where) or ())]
    q, k, v = inputs(2, 9)
    for mask in (masks.Causal(), rule):
        regard.attend(q, k, v, mask=mask, backend="cpu")
    assert [x._version for x in kept] == [x._version for x in map(torch.clone, kept)]
    assert kept[0].tolist() == [[7, 8]]


def test_compiled_maps_and_norms() -> None:
    require_kernels()
    weight, x = torch.randn(64, 300), torch.randn(2, 300)
    calls = []
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        w, y = weight.to(dtype), x.to(dtype)
        calls.append(lambda w=w, y=y: gemv(y, w))
        calls.append(lambda w=w, y=y: rms_norm(y, w[0], 1e-6))
    assert_same_in_a_crowd(calls, 5)


@pytest.mark.parametrize("own", [False, True], ids=["torch's team", "threads of ours"])
def test_several_workers_for_each_caller(own: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Callers share one team."""
    require_kernels()
    if own:
        monkeypatch.setattr(threads, "torch_openmp", lambda: None)
    count = threading.local()
    monkeypatch.setattr(threads, "thread_count", lambda: getattr(count, "n", 2))
    q, k, v = inputs(1, 4 * attention.ELEMENTS_PER_THREAD // 64)  # work for four threads
    alone = {}
    for n in (2, 3, 4):
        count.n = n
        alone[n] = regard.attend(q, k, v, backend="cpu")

    def work(i: int) -> bool:
        count.n = 2 + i % 3
        return all(
            torch.equal(regard.attend(q, k, v, backend="cpu"), alone[count.n]) for _ in range(5)
        )

    assert all(crowd(work))


def test_a_pool_grows_while_others_wait_for_it() -> None:
    """Every part of every caller runs once, while the callers ask for more and more threads."""
    pool = threads.ThreadPool()

    def work(i: int) -> list[int]:
        done: list[int] = []
        pool.run(lambda part, of: done.append(part * of), 2 + i % 3)
        return sorted(done)

    expected = [[part * of for part in range(of)] for of in (2, 3, 4)]
    assert crowd(work) == [expected[i % 3] for i in range(CROWD)]


def test_a_mask_owns_its_table() -> None:
    """Equal masks were one tensor: who wrote to one changed all others, for good."""
    first, right = masks.BigBird(4, 9), masks.BigBird(4, 9).table.clone()
    first.table.fill_(True)
    assert torch.equal(masks.BigBird(4, 9).table, right)
    assert_same_in_a_crowd(
        [lambda seed=seed: masks.BigBird(4, 80 + seed, seed=seed).table for seed in range(9)]
    )


def test_rotaries() -> None:
    x = torch.randn(2, 2, 3, 8)
    where = [Span(50 * n, 3) for n in range(4)] + [
        torch.tensor([[n, n + 1, 7], [0, 1, 2]]) for n in range(4)
    ]
    followed = Rotary(8, scaling=DynamicNTK(2.0, 4), length="current")
    for module in (Rotary(8), followed, dynamic_rotary.PerRowRotary(followed)):
        assert_same_in_a_crowd([lambda p=p, module=module: module(x, p) for p in where], 5)


# modules and models

SHARED_STATE = {"_last"}
"""What a call may leave in a module: the rotary's last table, which is read once and replaced
whole.
"""


@pytest.mark.full
@pytest.mark.parametrize("family", sorted({v.family for v in MIXERS.values()}))
def test_every_mechanism(family: str) -> None:
    """A module holds nothing of a call, so one module serves all threads."""
    x, others = tokens(5, dtype=torch.float32), tokens(6, seed=1, dtype=torch.float32)
    calls = []
    for variant in (v for v in MIXERS.values() if v.family == family):
        module = example(variant, dtype=torch.float32)
        before = [dict(m.__dict__) for m in module.modules()]
        for given in (x, others):
            calls.append(lambda module=module, given=given: torch.no_grad()(module)(given))
        calls[-1]()
        for m, held in zip(module.modules(), before, strict=True):
            changed = {n for n in m.__dict__ if n not in held or m.__dict__[n] is not held[n]}
            assert changed <= SHARED_STATE, f"{variant.name}: a call changed {changed}"
    assert_same_in_a_crowd(calls, 1)


def test_a_module_that_remembers_its_last_call_is_caught() -> None:
    class Remembers(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            self.x = x
            in_another(lambda: None if turns.pop() else self(x + 1))
            return self.x

    turns = [True, False]
    x = torch.zeros(2)
    assert not torch.equal(Remembers()(x), x)


@pytest.fixture(scope="module")
def model() -> Any:
    return regard.load("tiny")


@pytest.mark.full
def test_a_model_is_read_and_continued(model: Any) -> None:
    texts = ["to be", "or not", "that is the question", "whether"]
    ids = [torch.tensor([model.tokenizer.encode(text)]) for text in texts]
    forward = torch.inference_mode()(model.forward)
    calls: list[Callable[[], Any]] = [lambda x=x: forward(x) for x in ids]
    calls.append(lambda: "".join(model.generate(texts[0], max_tokens=2)))
    calls += [
        lambda s=s: "".join(model.generate("to", max_tokens=2, temperature=1.0, seed=s))
        for s in (1, 2)
    ]
    assert_same_in_a_crowd(calls, 1)


@pytest.mark.full
@pytest.mark.parametrize("cache", [None, "fixed", "paged", "quantized"])
def test_a_text_that_was_read_once_is_continued_by_all(cache: str | None, model: Any) -> None:
    read = model.cache_prefix("to be or not to be", cache=cache, max_context=64 if cache else None)
    assert_same_in_a_crowd(
        [
            lambda s=s: "".join(
                model.generate("x", prefix=read, max_tokens=2, temperature=1.0, seed=s)
            )
            for s in (1, 2)
        ],
        1,
    )


def test_a_tokenizer() -> None:
    tokenizer = Tokenizer.train(["low lower lowest", "né 你好"] * 9, vocab_size=270)
    texts = ["low lower", "é 你 <|endoftext|>", "x" * 50]

    def streamed(text: str) -> list[str]:
        stream = tokenizer.stream()
        return [*(stream.push(i) for i in tokenizer.encode(text)), stream.flush()]

    calls: list[Callable[[], Any]] = [lambda t=t: streamed(t) for t in texts]
    calls += [lambda t=t: tokenizer.encode(t, special=True) for t in texts]
    calls += [lambda: tokenizer.encode_batch(texts)]
    assert_same_in_a_crowd(calls, 5)


# caches: one belongs to one thread; its forks do not


def filled(cache: Cache, shapes: Sequence[tuple[int, int]], start: int, T: int, seed: int) -> Any:
    make = torch.Generator().manual_seed(seed)
    return cache.update(
        tuple(torch.randn(2, n, T, d, generator=make) for n, d in shapes), Span(start, T)
    )


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("name", KINDS)
def test_each_thread_has_a_fork(name: str) -> None:
    kind = KINDS[name]
    root: Cache = Paged(3, 400) if name == "paged" else kind.make()
    filled(root, kind.shapes, 0, 7, 0)

    def go_on(seed: int) -> Callable[[], Any]:
        def work() -> list[Tensor]:
            fork, found = root.fork(), []
            for n in range(3):
                memory, _ = filled(fork, kind.shapes, 7 + n, 1, 10 * seed + n)
                found += [x * 1 for x in memory]
            return found

        return work

    assert_same_in_a_crowd([go_on(seed) for seed in (1, 2, 3)], 3)
    if isinstance(root, Paged):
        root.reset()
        assert root.pool.free == root.pool.pages
        assert not any(root.pool.counts)


class Unlocked:
    """No lock at all: the broken form."""

    def __enter__(self) -> None:
        return

    def __exit__(self, *_: object) -> None:
        return


class Counts(list[int]):
    """Counts between whose reading and writing another thread does as much; where a lock is held,
    it has to wait.
    """

    other: Callable[[], Any] | None = None
    thread: threading.Thread | None = None

    def __getitem__(self, at: Any) -> Any:
        found = super().__getitem__(at)
        if self.other is not None:
            self.thread, self.other = threading.Thread(target=self.other), None
            self.thread.start()
            self.thread.join(0.2)
        return found


@pytest.mark.parametrize("lock", [True, False])
def test_two_threads_refer_to_a_page_at_once(lock: bool) -> None:
    held = PagePool(2, 4)
    if not lock:
        held.lock = Unlocked()  # type: ignore[assignment]
    (page,) = held.take(1)
    held.counts = counts = Counts(held.counts)
    counts.other = lambda: held.share([page])
    held.share([page])
    assert counts.thread is not None
    counts.thread.join()
    assert (held.counts[page] == 3) is lock


def packed(kind: type[LazyDequantizedTensor] = LazyDequantizedTensor) -> LazyDequantizedTensor:
    cache = Quantized(8, group=4, residual=2)
    (k, _), _ = filled(cache, ((1, 8), (1, 8)), 0, 16, 0)
    assert isinstance(k, LazyDequantizedTensor)
    assert k.coded is not None
    return kind.of(k.coded)


class Replaced(LazyDequantizedTensor):
    """Numbers as they were made before: those of whoever comes last."""

    def numbers(self) -> Tensor:
        if self._numbers is None:
            found = packed().numbers().clone()
            overtake(self)
            self._numbers = found
        return self._numbers


def overtake(x: LazyDequantizedTensor) -> None:
    if not x.__dict__.get("overtaken"):
        x.__dict__["overtaken"] = True
        in_another(lambda: x.add_(1))


@pytest.mark.parametrize("kind", [LazyDequantizedTensor, Replaced])
def test_numbers_that_another_thread_has_written_to_stay(
    kind: type[LazyDequantizedTensor], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A thread makes the numbers and writes to them while another one makes them, too."""
    x, real = packed(kind), packed().numbers().clone()
    if kind is LazyDequantizedTensor:
        from regard.caches import quantization as home

        made = home.dequantize

        def slow(*given: Any, **more: Any) -> Tensor:
            found = made(*given, **more)
            overtake(x)
            return found

        monkeypatch.setattr(home, "dequantize", slow)
    x.numbers()
    assert torch.equal(x.numbers(), real + 1) is (kind is LazyDequantizedTensor)


def test_codes_are_opened_by_all() -> None:
    whole = packed().numbers()
    for _ in range(20):
        x = packed()
        assert len({id(y) for y in crowd(lambda _, x=x: x.numbers())}) == 1
        assert torch.equal(x.numbers(), whole)


# what belongs to the process


def taking_turns(block: Callable[[], Any]) -> None:
    """Two threads enter a block and leave it in the order in which they came, where the second may
    enter at all.
    """
    inside, out = threading.Event(), threading.Event()

    def second() -> None:
        with block():
            inside.set()
            out.wait(60)

    with block():
        thread = threading.Thread(target=second)
        thread.start()
        inside.wait(0.2)
    out.set()
    thread.join()


@contextmanager
def quiet_alone() -> Iterator[None]:
    """The broken form of `process.quiet`."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


@pytest.mark.parametrize("block", [process_state.ignore_warnings, quiet_alone])
def test_filters_are_put_back(block: Callable[[], Any]) -> None:
    with warnings.catch_warnings():
        before = list(warnings.filters)
        taking_turns(block)
        assert (warnings.filters == before) is (block is process_state.ignore_warnings)


@pytest.mark.full
def test_flex_leaves_filters_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """It says nothing, and changes no filter: not even for a moment, for that moment is
    everybody's.
    """
    flex._flex_attention_for.cache_clear()
    monkeypatch.setattr(torch_flex, "_WARNINGS_SHOWN", set())
    monkeypatch.setattr(warnings, "filters", before := list(warnings.filters))
    seen: list[bool] = []

    def look(allowed: Tensor) -> Tensor:
        seen.append(warnings.filters is before)
        return allowed

    mask = masks.Fn(lambda q, k: look(k <= q))
    q, k, v = inputs(4, 4)
    regard.attend(q, k, v, mask=mask, backend="flex")
    assert seen
    assert all(seen)


def test_a_block_may_hold_another_and_a_child_of_a_fork_waits_for_nobody() -> None:
    with process_state.exclusive(), process_state.ignore_warnings(), process_state.seeded(0):
        assert in_another(lambda: process_state._lock.acquire(timeout=0.01)) is False
        held = process_state._lock
        process_state._new_lock_after_fork()
        try:
            in_another(lambda: process_state.ignore_warnings().__enter__())
        finally:
            process_state._lock = held


@contextmanager
def seeded_alone(seed: int) -> Iterator[None]:
    """The broken form of `process.seeded`."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        yield


@pytest.mark.parametrize("seeded", [process_state.seeded, seeded_alone])
def test_weights_from_a_seed(seeded: Callable[[int], Any]) -> None:
    """A thread draws between two numbers that are drawn here; where it may not, it waits until this
    block has ended.
    """
    with seeded(0):
        right = torch.rand(2).tolist()
    drawn, ended = threading.Event(), threading.Event()

    def other() -> None:
        with seeded(1):
            torch.rand(3)
            drawn.set()
            ended.wait(60)

    thread = threading.Thread(target=other)
    with seeded(0):
        found = [float(torch.rand(1))]
        thread.start()
        drawn.wait(0.2)
        found.append(float(torch.rand(1)))
    ended.set()
    thread.join()
    assert (found == right) is (seeded is process_state.seeded)


@pytest.mark.full
def test_layers_and_audits_of_a_seed() -> None:
    x = torch.randn(1, 3, 8)

    def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return torch.softmax(q @ k.mT, -1) @ v

    def stages(seed: int) -> list[Tensor]:
        return [s.values for s in layer_stages.run_layer("mha", x, 2, None, seed).stages]

    def audited() -> tuple[str, ...]:
        return audit(attend, heads=1, head_dim=4).names

    right, state, before = (
        [stages(s) for s in range(3)],
        torch.get_rng_state(),
        list(warnings.filters),
    )
    found = crowd(lambda i: audited() if i % 4 == 0 else [stages(s) for s in range(3)])
    assert found[0] == found[4] == ("scale-missing",)
    assert all(same(x, right) for i, x in enumerate(found) if i % 4)
    assert torch.equal(torch.get_rng_state(), state)
    assert warnings.filters == before


@contextmanager
def compiled_elsewhere() -> Iterator[None]:
    """Another thread compiles while the block runs."""
    ready, done = threading.Event(), threading.Event()

    def backend(graph: Any, _given: Any) -> Any:
        ready.set()
        done.wait(60)
        return graph.forward

    thread = threading.Thread(
        target=lambda: torch.compile(torch.sin, backend=backend)(torch.ones(2))
    )
    thread.start()
    assert ready.wait(60)
    try:
        yield
    finally:
        done.set()
        thread.join()
        torch.compiler.reset()


def test_a_compilation_concerns_its_own_thread_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels, garbage behind a mask, refusals: nothing in this thread may change while another one
    compiles.
    """
    require_kernels()
    q, k, v = inputs(3, 40)
    v[:, :, -1] = torch.nan
    hidden = torch.ones(3, 40, dtype=torch.bool).tril(30)

    def work() -> list[Tensor]:
        by_flex = regard.attend(q[:, :, :1], k, v.nan_to_num(), backend="cpu")
        return [
            regard.attend(q, k, v, mask=hidden),
            regard.attend(q, k, v, mask=hidden, backend="reference"),
            by_flex,
        ]

    alone = work()
    assert not any(x.isnan().any() for x in alone)
    with compiled_elsewhere():
        assert torch.compiler.is_compiling()  # torch's flag is one for all threads
        assert not process_state.is_compiling()
        assert same(work(), alone)
        with pytest.raises(regard.ArgumentError), regard.checks(finite=True):
            regard.attend(q, k, v)
        # the broken form: in this thread it is as if it compiled
        monkeypatch.setattr(process_state, "_this_thread_compiles", lambda: True)
        with pytest.raises(regard.KernelRefusal, match="needs memory addresses"):
            work()


def test_a_graph_of_this_thread_is_known() -> None:
    seen = []

    class Asks(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if process_state.is_compiling() else x

    class Eager(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            seen.append(process_state.is_compiling())
            return x + 1

    x = torch.zeros(2)
    assert torch.compile(Asks(), backend="eager", fullgraph=True)(x).tolist() == [1, 1]
    torch.export.export(Eager(), (x,), strict=False)
    assert seen
    assert all(seen)
    assert Asks()(x).tolist() == [0, 0]


# those who look on


def test_hooks_hear_their_own_thread_only(model: Any) -> None:
    """While a text is explained, another thread runs the same model."""
    read = prepare_run(model, "to be or not to be")
    site, turns = read.sites[0], [True]
    alone = captured_run.capture_site(read, site)

    def interrupt(*_: Any) -> None:
        if turns:
            turns.clear()
            in_another(lambda: prepare_run(model, "something else altogether").call())

    handle = read.last.register_forward_pre_hook(interrupt)
    try:
        found = captured_run.capture_site(read, site)
    finally:
        handle.remove()
    assert not turns
    assert {n: x.shape for n, x in found.hidden.items()} == {
        n: x.shape for n, x in alone.hidden.items()
    }
    assert all(same(found.hidden[n], alone.hidden[n]) for n in alone.hidden)


def test_a_recorder_is_asked_while_others_record() -> None:
    """What was met, and what was recorded, may grow between two looks."""
    q, k, v = inputs(3, 3)

    class Grows(dict[str, Any]):
        def items(self) -> Any:
            return _while(super().items(), self)

        def __iter__(self) -> Iterator[str]:
            return _while(super().__iter__(), self)

    started: list[threading.Thread] = []

    def _while(found: Any, of: Any) -> Iterator[Any]:
        for n, x in enumerate(found):
            if n == 0 and len(started) < 2:
                started.append(threading.Thread(target=record, args=(f"new.{len(started)}",)))
                started[-1].start()
                started[-1].join(0.2)
            yield x

    def record(name: str) -> None:
        with recorder, regard.tracing.named_scope(name):
            regard.attend(q, k, v)

    recorder = Recorder(places=[7, "new", "old"])
    recorder.missing = "ignore"
    record("old")
    recorder._builders, recorder.seen_places = (
        Grows(recorder._builders),
        Grows(recorder.seen_places),
    )
    assert "old" in recorder.recording().places
    assert recorder.missing_selection().startswith("there were no calls at the places [7")
    for thread in started:
        thread.join()
    recorder._builders, recorder.seen_places = dict(recorder._builders), dict(recorder.seen_places)
    assert set(recorder.recording().places) == {"old", "new.0", "new.1"}


def test_a_trace_is_read_while_others_capture() -> None:
    trace = regard.Trace("q")

    def hear(name: str) -> None:
        with trace, regard.tracing.named_scope(name):
            regard.tracing.tap("q", torch.zeros(1))

    hear("first")
    names = []
    for name in trace:
        in_another(lambda: hear("second"))
        names.append(name)
    assert names == ["first.q"]
    assert list(trace) == ["first.q", "second.q"]


def test_checks_are_of_one_thread() -> None:
    q, k, v = inputs(2, 2)
    q = q.masked_fill(torch.ones(1, dtype=torch.bool), float("nan"))
    with regard.checks(finite=True):
        assert in_another(lambda: bool(regard.attend(q, k, v).isnan().all()))
        with pytest.raises(regard.ArgumentError, match="query"):
            regard.attend(q, k, v)


# files and names


def test_files(tmp_path: Path) -> None:
    """Readers share a store; of writers of one file the last wins, and none sees a part of
    another's.
    """
    save_file(
        {f"x{n}": torch.full((50,), float(n)) for n in range(5)}, tmp_path / "model.safetensors"
    )
    store = CheckpointTensors.open(tmp_path)
    assert_same_in_a_crowd([lambda n=n: dict(store.read([f"x{n}"]))[f"x{n}"] for n in range(5)])
    target = tmp_path / "notes"

    def put(i: int) -> bool:
        for _ in range(20):  # often enough to meet a writer that sweeps what others left
            with atomic_write.write_atomically(target) as place:
                place.write_text(str(i) * 1000)
            if len(set(target.read_text())) != 1:
                return False
        return True

    assert all(crowd(put))
    assert sorted(x.name for x in tmp_path.iterdir()) == ["model.safetensors", "notes"]


FRESH = """
import sys, threading
sys.setswitchinterval(1e-6)
import regard
names = [n for n in regard.__all__ if n not in ("view",)]
ready, wrong = threading.Barrier(8), []
def work(i):
    ready.wait()
    try:
        for n in names[3 * i:] + names[:3 * i]:
            getattr(regard, n)
        import torch
        q = torch.ones(1, 2, 16, 8)
        for kernel in ("cpu", "sdpa", "tiled", "reference"):
            if not bool((regard.attend(q, q, q, backend=kernel) == 1).all()):
                wrong.append(kernel)
        regard.nn.variants.build("gqa", 8, 2, groups=1)
    except BaseException as error:
        wrong.append(repr(error))
threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
[t.start() for t in threads], [t.join() for t in threads]
sys.exit(str(wrong) if wrong else 0)
"""


@pytest.mark.full
def test_threads_that_are_the_first_to_ask() -> None:
    """In a fresh process 8 threads import, compile and call everything for the first time at
    once.
    """
    done = subprocess.run(
        [sys.executable, "-c", FRESH], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
