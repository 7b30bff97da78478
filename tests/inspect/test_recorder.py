"""Recording changes nothing, misses nothing, and keeps each key once: kernels, caches, mechanisms,
selections.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import biases, masks
from regard.caches import Cache, Fixed, Growing, Paged, Quantized, Ring
from regard.errors import ArgumentError
from regard.inspect import Recorder, Recording
from regard.inspect.record import recorder as recorder_module
from regard.nn.variants import VARIANTS
from regard.ops.softmax import dispatch
from regard.ops.softmax.call import Call, make_call
from regard.ops.softmax.dispatch import KERNELS
from regard.ops.softmax.kernel import Kernel, KernelResult
from regard.ops.softmax.sdpa import SdpaKernel
from tests.inspect.recorded import recorded_call
from tests.nn.catalogue import CAUSAL, example, tokens

T = 17
CHUNKS = (5, 3, *[1] * 9)
NO_SOFTMAX = {"delta_net", "gated_delta_net", "linear_attention", "retention", "gated_linear"}
NO_SOFTMAX |= {"kimi_delta", "gated_delta_2", "comba", "preconditioned_delta", "mesa"}
NO_SOFTMAX |= {"delta_product", "titans_linear", "short_convolution"}
NO_SOFTMAX |= {"abc", "gsa", "hgrn2", "lightnet", "lightning", "mamba2", "mlstm", "rwkv4", "rwkv6"}
NO_SOFTMAX |= {"mamba", "rwkv7", "based", "cosformer", "performer", "power_attention", "rebased"}
NO_SOFTMAX |= {"log_linear"}


def in_chunks(
    module: nn.Module, x: Tensor, cache: Cache, positions: Tensor | None = None
) -> Tensor:
    out, start = [], 0
    for n in CHUNKS:
        where = None if positions is None else positions[:, start : start + n]
        out.append(module(x[:, start : start + n], where, cache))
        start += n
    return torch.cat(out, 1)


def watched(call: Callable[[], Any], **select: Any) -> tuple[Any, Recording]:
    with torch.no_grad(), Recorder(**select) as recorder:
        out = call()
    return out, recorder.recording()


def apart(a: Recording, b: Recording, place: str = "", batch: int = 1) -> float:
    pairs = ([x.weights(place, h, batch=batch) for x in (a, b)] for h in a[place].heads)
    return max(float((x - y).abs().max()) for x, y in pairs)


OPTIONS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"mask": masks.Causal()},
    "window": {"mask": masks.Causal() & masks.Window(20)},
    "alibi": {"mask": masks.Causal(), "bias": biases.ALiBi(4)},
    "softcap": {"mask": masks.Causal(), "softcap": 2.0},
    "sink": {"mask": masks.Causal(), "sink": torch.tensor([0.5, -1.0, 2.0, 0.0])},
    "padded": {
        "mask": masks.Causal(),
        "k_positions": torch.tensor([[-1, -1, -1, *range(45)], [*range(48)]]),
        "q_positions": torch.tensor([[*range(5, 45)], [*range(8, 48)]]),
    },
}


CELLS = [
    (kernel, name, dtype)
    for kernel in KERNELS
    for name in OPTIONS
    for dtype in (torch.float32, torch.bfloat16)
    # flex is slow to start: one call of it must do
    if kernel.name != "flex" or (name, dtype) == ("alibi", torch.float32)
]


def made(
    name: str, dtype: torch.dtype, rows: slice = slice(None)
) -> tuple[tuple[Tensor, Tensor, Tensor], dict[str, Any]]:
    """q, k and v, and the options of a call; of the queries some rows."""
    options = dict(OPTIONS[name])
    q = torch.randn(2, 4, 40, 16).to(dtype)[:, :, rows]
    k, v = torch.randn(2, 2, 2, 48, 16).to(dtype).unbind(0)
    if "sink" in options:
        options["sink"] = options["sink"].to(dtype)
    if "q_positions" in options:
        options["q_positions"] = options["q_positions"][:, rows]
    return (q, k, v), options


def made_for(kernel: Kernel) -> slice:
    """The rows of the queries: the last few for the kernel that decodes."""
    return slice(34, 40) if kernel.name == "cpu" else slice(None)


@pytest.mark.full(keep=8)
@pytest.mark.parametrize("kernel, name, dtype", CELLS, ids=lambda x: getattr(x, "name", str(x)))
def test_every_kernel_gives_the_same_bits_with_and_without(
    kernel: Kernel, name: str, dtype: torch.dtype
) -> None:
    given, options = made(name, dtype, made_for(kernel))
    if refused := kernel.why_not(make_call(*given, **options)):
        pytest.skip(f"{kernel.name}: {'; '.join(refused)}")
    call = partial(regard.attend, *given, backend=kernel.name, **options)
    alone, (seen, found) = call(), watched(call)
    assert torch.equal(seen, alone), kernel.name
    assert found[0].steps[0].kernel == kernel.name
    assert torch.equal(found[0].steps[0].out, alone)
    assert found.sound, [str(x) for x in found.row_sums.values()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", OPTIONS)
def test_the_kernel_chosen_is_the_one_without_a_recorder(name: str, dtype: torch.dtype) -> None:
    given, options = made(name, dtype)
    chosen = regard.plan(*given, **options).kernel
    assert watched(lambda: regard.attend(*given, **options))[1][0].steps[0].kernel == chosen


class Mute(SdpaKernel):
    """A kernel as on an accelerator: it gives no lse."""

    name = "mute"

    def why_not(self, call: Call) -> list[str]:
        return ["gives no lse"] if call.wants_lse else super().why_not(call)

    def run(self, call: Call) -> KernelResult:
        assert not call.wants_lse, "it was asked for what it does not have"
        return super().run(call)


def test_a_kernel_without_lse_runs_and_another_one_gives_the_lse(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(dispatch, "_registered", (Mute(), *KERNELS))
    q = torch.randn(1, 2, 40, 16)
    alone = regard.attend(q, q, q, mask=masks.Causal())
    seen, found = watched(lambda: regard.attend(q, q, q, mask=masks.Causal()))
    assert torch.equal(seen, alone)
    kernel, _, other = found[0].steps[0].kernel.partition(", lse by ")
    assert kernel == "mute"
    assert other in {x.name for x in KERNELS}
    assert found.sound


IN_PARTS = ("streaming", "dual_chunk", "self_extend", "rerope", "lm_infinite", "hca", "csa")
"""Mechanisms whose short chunks are one call, and longer ones several."""
EVICTING = ("adakv", "expected_attention", "h2o", "key_norm", "keydiff", "snapkv", "tova")
"""Mechanisms whose key/value heads hold different tokens, so that each is a row of the batch, and
columns are slots.
"""


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", sorted(CAUSAL))
def test_every_mechanism_with_its_cache(name: str) -> None:
    """Outputs bit for bit; sound sums; and the patterns of chunks and tokens are those of one
    pass.
    """
    module, x = example(CAUSAL[name]), tokens(T)
    none = pytest.warns(UserWarning, match="softmax attention was never called")
    with none if name in NO_SOFTMAX else nullcontext():
        seen, found = watched(lambda: in_chunks(module, x, module.new_cache()))
    with torch.no_grad():
        assert torch.equal(seen, in_chunks(module, x, module.new_cache()))
    if name in NO_SOFTMAX:
        assert not found.places
        return
    _, whole = watched(lambda: module(x))
    assert found.sound, [str(x) for x in found.row_sums.values()]
    assert whole.sound
    for place in found.places:
        if place.endswith("part2") or place == "compressed" or name in (*IN_PARTS, *EVICTING):
            # keys are no tokens, or rows are not all tokens: soundness is all that is asked
            continue
        assert found[place].T == found[place].N == T
        assert apart(found, whole, place) <= 1e-10, place
    if name == "mla":
        assert found[0].key_kind == "keys and latents"
        assert [pool.G for pool in found[0].pools] == [4, 1]


def test_streaming_is_recorded_in_parts() -> None:
    """One softmax over the sinks and one over the rest, from the token on at which something is
    evicted.
    """
    module, x = example(VARIANTS["streaming"]), tokens(T)
    _, found = watched(lambda: in_chunks(module, x, module.new_cache()))
    assert list(found.places) == ["", "part2"]
    assert len(found["part2"].pools[0].columns) == module.sinks
    assert found["part2"].T < found[""].T == T


CACHES: dict[str, Callable[[], Cache]] = {
    "growing": Growing,
    "fixed": lambda: Fixed(T),
    "paged": lambda: Paged(page_size=3, pages=12),
    "ring": lambda: Ring(6),
}
PADDED = torch.tensor([[-1, -1, -1, *range(T - 3)], [*range(T)]])


@pytest.mark.full(keep=3)
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("kind", CACHES)
def test_every_cache_under_chunks_tokens_and_left_padding(kind: str, padded: bool) -> None:
    """The same pattern as one pass over the same padded batch, though a ring hands its keys out in
    another order.
    """
    module, x = example(VARIANTS["sliding_window"]), tokens(T)
    at = PADDED if padded else None
    _, whole = watched(lambda: module(x, at))
    seen, found = watched(lambda: in_chunks(module, x, CACHES[kind](), at))
    with torch.no_grad():
        assert torch.equal(seen, in_chunks(module, x, CACHES[kind](), at))
    place = found[0]
    assert (place.T, place.N, place.has_one_key_per_column) == (T, T, True)
    for batch in (0, 1):
        assert apart(found, whole, batch=batch) <= 1e-10
        assert torch.equal(place.column_positions[batch], whole[0].column_positions[batch])
    assert found.sound
    if padded:
        assert found.sums(0, 0, batch=0)[:3].tolist() == [0, 0, 0]
        assert found.positions(0, batch=0)[:4].tolist() == [-1, -1, -1, 0]


def test_a_dense_mask_follows_its_keys_when_a_ring_reorders_them() -> None:
    """A table speaks of slots: what it says of a slot must stay with the key that stood there."""
    table = torch.rand(1, 9, generator=torch.Generator().manual_seed(1)) < 0.6
    q = torch.randn(2, 4, 1, 8)
    k = torch.randn(2, 4, 9, 8)
    order = torch.stack([torch.randperm(9), torch.randperm(9)])
    for rows in (order, order[:1]):
        each = rows[:, None, :, None].expand(2, 4, -1, 8)
        bias = torch.randn(1, 9)
        with Recorder() as recorder:
            regard.attend(q + 1, k, k, mask=masks.Causal(), q_positions=torch.tensor([[8]]))
            mixed = k.gather(2, each)
            options = {"mask": masks.Dense(table), "bias": bias, "k_positions": rows}
            regard.attend(q, mixed, mixed, q_positions=torch.tensor([[9]]), **options)
        found = recorder.recording()
        assert found[0].N == 9
        direct = regard.attention_weights(q, mixed, q_positions=torch.tensor([[9]]), **options)
        for b in range(2):
            back = rows[b if len(rows) > 1 else 0].argsort()
            got = torch.stack([found.row(0, h, 1, batch=b) for h in range(4)])
            assert (got - direct[b, :, 0, back]).abs().max() < 1e-5


def test_keys_are_kept_once_and_seldom_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    """40 tokens one by one: 48 keys, not 48 + 47 + ...; and memory that doubles moves them a few
    times only.
    """
    moved, grown = [], recorder_module._grow

    def counted(x: Tensor, used: int, size: int) -> Tensor:
        moved.append(used)
        return grown(x, used, size)

    monkeypatch.setattr(recorder_module, "_grow", counted)
    q, cache = torch.randn(1, 4, 48, 8), Growing()
    with Recorder() as recorder:
        for start, stop in [(0, 8), *((i, i + 1) for i in range(8, 48))]:
            (k, v), at = cache.update(
                (q[:, :2, start:stop], q[:, 2:, start:stop]), regard.Span(start, stop - start)
            )
            regard.attend(q[:, :, start:stop], k, v, mask=masks.Causal(), k_positions=at)
    place = recorder.recording()[0]
    assert len(place.pools) == 1
    assert place.pools[0].k.shape[2] == place.N == place.T == 48
    assert sum(moved) <= 2 * 2 * 48  # of keys and of values


def test_a_quantized_cache_says_what_its_codes_say() -> None:
    module, x = example(VARIANTS["gqa"], dtype=torch.float32), tokens(T, dtype=torch.float32)
    _, exact = watched(lambda: in_chunks(module, x, Growing()))
    _, found = watched(lambda: in_chunks(module, x, Quantized(8, group=4, residual=4)))
    place = found[0]
    # the first call got what it gave, as it was
    assert place.key_kind == "keys and keys from a quantized cache"
    assert found.sound, [str(x) for x in found.row_sums.values()]
    # a key, and what became of it
    assert place.N == T < sum(pool.k.shape[2] for pool in place.pools)
    assert not place.has_one_key_per_column
    assert 0 < apart(found, exact) < 0.1
    with pytest.raises(ArgumentError, match=r"several keys for one token .*place.keys\(step\)"):
        _ = place.k
    last = place.steps[-1]
    assert torch.equal(place.keys(last)[:, :, -4:], exact[0].k[:, :, -4:])
    assert not torch.equal(place.keys(last), exact[0].k)
    assert place.values(last) is not None


def test_selections_keep_what_was_asked_for() -> None:
    q, k = torch.randn(2, 8, 12, 4), torch.randn(2, 4, 12, 4)

    def call() -> Tensor:
        return regard.attend(q, k, k, mask=masks.Causal())

    _, whole = watched(call)
    _, found = watched(call, heads=[1, 4, 5], rows=3, keep=())
    place = found[0]
    assert (place.H, place.G, place.heads, place.T, place.N) == (8, 4, (1, 4, 5), 3, 12)
    assert place.pools[0].groups == (0, 2)
    assert place.k.shape == (2, 2, 12, 4)
    assert place.v is None
    assert place.values(place.steps[0]) is None
    assert place.steps[0].out is None
    for h, b in itertools.product((1, 4, 5), range(2)):
        part = whole.weights(0, h, slice(9, 12), batch=b)
        assert torch.equal(found.weights(0, h, batch=b), part)
    assert found.positions(0).tolist() == [9, 10, 11]
    assert found.sound
    with pytest.raises(ArgumentError, match=r"head 0 of .* recorded heads: 1, 4, 5 of 8"):
        found.weights(0, 0)


def test_places_by_name_and_by_number() -> None:
    model = regard.load("tiny")
    ids = torch.tensor([[1, 2, 3]])

    def places(**select: Any) -> dict[str, tuple[int, ...]]:
        _, found = watched(lambda: model.forward(ids), **select)
        return {name: place.heads for name, place in found.places.items()}

    assert list(places(places=["layers.2", 0])) == ["layers.0", "layers.2"]
    assert places(heads={1: [0], "layers.3": [2, 1]}) == {"layers.1": (0,), "layers.3": (1, 2)}
    assert places(places=[]) == {}
    assert list(places()) == [f"layers.{i}" for i in range(4)]


def test_a_call_that_asks_again_is_another_part() -> None:
    q = torch.randn(1, 2, 6, 4)
    with Recorder() as recorder:
        for _ in range(3):
            regard.attend(q, q, q)
        regard.attend(q[:, :, :2], q, q, q_positions=regard.Span(6, 2))  # goes on from the first
    found = recorder.recording()
    assert list(found.places) == ["", "part2", "part3"]
    assert [found[i].T for i in range(3)] == [8, 6, 6]
    other = torch.randn(3, 2, 6, 4)
    with Recorder() as recorder:
        regard.attend(q, q, q)
        regard.attend(other, other, other, q_positions=regard.Span(6, 6))  # of another batch
    assert [place.B for place in recorder.recording().places.values()] == [1, 3]


def test_what_is_done_to_tensors_afterwards_changes_nothing() -> None:
    q, table = torch.randn(1, 2, 6, 4), torch.ones(2, 8)
    bias, sink = biases.T5Relative(table.T.clone().contiguous()), torch.zeros(2)
    keep = torch.ones(6, 6).tril().bool()
    blocks = masks.Blocks(torch.ones(3, 3).bool(), 2)
    mask = (masks.Dense(keep) & blocks) | ~masks.Heads((masks.Full(), masks.Full()))
    found = recorded_call(q, mask=mask, bias=bias, sink=sink)
    before = found.weights(0, 1)
    for x in (q, bias.table, sink, keep, blocks.table):
        x.zero_()
    assert torch.equal(found.weights(0, 1), before)
    assert found.sound


def test_selections_that_mean_nothing_are_refused() -> None:
    with pytest.raises(ArgumentError, match="rows is 0; it must be at least 1, or None for all"):
        Recorder(rows=0)
    with pytest.raises(ArgumentError, match=r"keep is \['q'\]; it may contain v, out"):
        Recorder(keep=("q",))


def test_dropout_is_recorded_and_the_pattern_is_that_before_it() -> None:
    q = torch.randn(1, 2, 30, 4)
    found = recorded_call(q, dropout=0.5)
    assert found[0].steps[0].dropout == 0.5
    assert found.sound
    assert found.row_sums[""].output is None
    assert (found.sums(0, 0) - 1).abs().max() < 1e-5


def test_negative_control_a_key_of_another_step_is_noticed() -> None:
    """Were a key that changed taken for the one before, the pattern would be another one: this test
    could fail.
    """
    module, x = example(VARIANTS["gqa"], dtype=torch.float32), tokens(T, dtype=torch.float32)
    _, found = watched(lambda: in_chunks(module, x, Quantized(2, group=4, residual=4)))
    place = found[0]
    stale = tuple(replace(step, pool_index=step.columns) for step in place.steps)
    wrong = replace(found, places={"": replace(place, steps=stale)})
    assert apart(found, wrong) > 1e-3
    assert not wrong.sound
