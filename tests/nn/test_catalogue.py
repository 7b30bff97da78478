"""Contracts of every mechanism in the catalogue: caches, leaks, padding, batches, gradients,
dtypes, copies, compilation.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

from regard.caches import (
    Compressed,
    Fixed,
    Growing,
    Paged,
    Quantized,
    Ring,
    State,
    Streaming,
)
from regard.errors import ArgumentError
from regard.nn import Attention
from regard.nn.variants import VARIANTS
from regard.span import Span
from tests.nn.catalogue import CAUSAL, MIXERS, example, in_chunks, tokens, with_every_part
from tests.rules import assert_close_rule

T = 17
"""Longer than three windows of the small examples."""

CHUNKS = ([1] * T, [T], [2, 7, 1, 1, 6], [5, 5, 5, 2], [16, 1], [1, 16], [3, 0, 14])


def assert_close(x: Tensor, y: Tensor, what: str = "") -> None:
    """Equal but for the order of sums in fp64."""
    bound = 1e-10 * max(1.0, float(y.detach().abs().max()))
    error = float((x - y).detach().abs().max()) if x.numel() else 0.0
    assert error <= bound, f"{what}: {error:.3g} above {bound:.3g}"


def forward(module: nn.Module, x: Tensor, positions: Tensor | None = None) -> Tensor:
    with torch.no_grad():
        out: Tensor = module(x, positions)
    return out


@pytest.mark.full(
    keep=[*(name for name in MIXERS if name not in CAUSAL), "gqa", "mla", "delta_net"]
)
@pytest.mark.parametrize("name", MIXERS)
def test_any_chunks_with_a_cache_are_one_pass_or_refused(name: str) -> None:
    module, x, refusals = example(MIXERS[name]), tokens(T), []
    whole = forward(module, x)
    for sizes in CHUNKS:
        try:
            with torch.no_grad():
                found = in_chunks(module, x, sizes, module.new_cache())
        except ArgumentError as error:
            refusals.append(str(error))
        else:
            assert_close(found, whole, f"{name} {sizes}")
    assert all(f"this {type(module).__name__}" in x and "later tokens" in x for x in refusals)
    assert bool(refusals) != MIXERS[name].causal
    assert len(refusals) < len(CHUNKS), "one call for all tokens is served"


def test_a_prefix_is_read_in_one_call() -> None:
    """Rows of other lengths: a part of the prefix alone is refused, and the cache stays."""
    module, x = example(MIXERS["prefix_lm"]), tokens(T)
    (length,) = module.mask.members()[1]._lengths
    positions = torch.stack([torch.arange(T), torch.arange(T) - 2]).clamp(min=-1)
    whole, cache = forward(module, x, positions), module.new_cache()
    with torch.no_grad():
        first = module(x[:, : length + 2], positions[:, : length + 2], cache)
        rest = module(x[:, length + 2 :], positions[:, length + 2 :], cache)
        assert_close(torch.cat([first, rest], 1), whole)
        cache = module.new_cache()
        module(x[:, : length + 1], positions[:, : length + 1], cache)
        with pytest.raises(ArgumentError, match="sees later tokens"):
            module(x[:, length + 1 :], positions[:, length + 1 :], cache)
        assert cache.next(1)[0].tolist() == [length + 1]


EVERYTHING = {
    "growing": lambda parts: Growing(),
    "fixed": lambda parts: Fixed(T),
    "paged": lambda parts: Paged(page_size=3, pages=2 * -(-T // 3)),
    # all of it is recent, so that nothing is rounded
    "quantized": lambda parts: Quantized(8, residual=T, axes=("token",) * parts),
    "ring": lambda parts: Ring(T),
    "streaming": lambda parts: Streaming(2, T),
}
"""Caches that hold all T tokens exactly: they serve every mechanism that remembers tokens."""
TOKENS = {
    n: v for n, v in CAUSAL.items() if not isinstance(example(v).new_cache(), State | Compressed)
}


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("kind", EVERYTHING)
@pytest.mark.parametrize("name", TOKENS)
def test_a_mechanism_that_remembers_tokens_takes_every_cache_of_tokens(
    name: str, kind: str
) -> None:
    module, x = example(TOKENS[name]), tokens(T)
    whole, first = forward(module, x), Growing()
    with torch.no_grad():
        module(x[:, :1], None, first)
        parts = len(first.contents()) - 1  # the positions are no part
        for sizes in ([2, 7, 1, 1, 6], [16, 1]):
            found = in_chunks(module, x, sizes, EVERYTHING[kind](parts))
            assert_close(found, whole, f"{name} {kind} {sizes}")


@pytest.mark.full(keep=11)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_fork_goes_its_own_way(name: str) -> None:
    module, x, y = example(CAUSAL[name]), tokens(T), tokens(T, seed=1)
    cache = module.new_cache()
    with torch.no_grad():
        module(x[:, :9], None, cache)
        fork = cache.fork()
        other = module(y[:, 9:], None, fork)
        assert_close(module(x[:, 9:], None, cache), forward(module, x)[:, 9:])
        assert_close(other, forward(module, torch.cat([x[:, :9], y[:, 9:]], 1))[:, 9:])


@pytest.mark.full(keep=11)
@pytest.mark.parametrize("name", CAUSAL)
def test_selected_rows_go_on_as_those_rows(name: str) -> None:
    module, x = example(CAUSAL[name]), tokens(T, B=3)
    rows, cache = torch.tensor([2, 0, 2]), module.new_cache()
    with torch.no_grad():
        module(x[:, :9], None, cache)
        cache.reorder(rows)
        assert_close(module(x[rows][:, 9:], None, cache), forward(module, x[rows])[:, 9:])


EXACT_ZEROS = ("dynamic_mask", "relu_attention", "softpick", "entmax", "top_k")
"""Mechanisms that may give a visible key no weight."""


def leaks(module: nn.Module, x: Tensor) -> Tensor:
    """[T, T]: whether output i depends on token j, by gradients of a random sum of each output
    row.
    """
    weight = torch.randn(x.shape[-1], dtype=x.dtype, generator=torch.Generator().manual_seed(5))

    def total(x: Tensor) -> Tensor:
        out: Tensor = module(x)[0]
        return out @ weight[: out.shape[-1]]

    found = torch.autograd.functional.jacobian(total, x)[:, 0]  # [T, T, M]
    return found.abs().amax(-1) > 0


@pytest.mark.full(keep=13)
@pytest.mark.parametrize("name", MIXERS)
def test_the_leak_matrix_is_the_mask(name: str) -> None:
    module, x = example(MIXERS[name]), tokens(T, B=1)
    found, mask = leaks(module, x), getattr(module, "mask", None)
    if MIXERS[name].causal:
        assert not bool(found.triu(1).any()), "the future leaks"
    keys = Span(0, T)
    right = torch.ones(T, T, dtype=torch.bool) if mask is None else mask.block(keys, keys)[0, 0]
    own = right.any(-1)  # a token without keys, as the first of stick-breaking, gives 0
    assert torch.equal(found.diagonal(), own), "a token does not see itself"
    if VARIANTS[name].family != "softmax":
        return
    right = right | own.diag_embed()  # its query
    if name == "longformer":
        right = right | right.diagonal().new_tensor([p in (0, 6) for p in range(T)])[:, None]
    if name in EXACT_ZEROS:
        assert not bool((found & ~right).any())
        assert int(found.sum()) > T
    else:
        assert torch.equal(found, right)


@pytest.mark.full(keep=11)
@pytest.mark.parametrize("name", CAUSAL)
def test_nan_in_the_future_changes_nothing(name: str) -> None:
    module, x = example(CAUSAL[name]), tokens(T)
    whole = forward(module, x)
    for first in (1, 8, T - 1):
        poisoned = x.clone()
        poisoned[:, first:] = float("nan")
        assert_close(forward(module, poisoned)[:, :first], whole[:, :first], f"{name} {first}")


@pytest.mark.full(keep=5)
@pytest.mark.parametrize("name", CAUSAL)
def test_large_numbers_in_the_future_change_roundings_only(name: str) -> None:
    """Of 1e20, whose products overflow float32, only digits may change; of 1e3 no bit."""
    module, x = example(CAUSAL[name], dtype=torch.float32), tokens(T, dtype=torch.float32)
    whole = forward(module, x)
    for size, most in ((1e3, 0.0), (1e20, 1e-5)):
        large = x.clone()
        large[:, T // 2 :] = size
        found = forward(module, large)
        changed = (found - whole)[:, : T // 2].abs().max()
        assert changed <= most * whole.abs().max(), f"{name} {size}"
        assert not torch.equal(found[:, T // 2 :], whole[:, T // 2 :]), "the negative control"


def padded(n: int, left: int, right: int) -> Tensor:
    positions = torch.full((left + n + right,), -1)
    positions[left : left + n] = torch.arange(n)
    return positions


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize(("left", "right"), [(4, 0), (0, 4), (3, 2)])
def test_padding_changes_nothing(name: str, left: int, right: int) -> None:
    module, x = example(MIXERS[name]), tokens(T, B=1)
    n = T - left - right
    alone = forward(module, x[:, left : left + n])
    positions = torch.stack([padded(n, left, right), torch.arange(T)])
    for garbage in (1e4, float("nan")):
        row = x[0].clone()
        row[positions[0] < 0] = garbage
        both = torch.stack([row, tokens(T, B=1, seed=3)[0]])
        assert_close(
            forward(module, both, positions)[:1, left : left + n], alone, f"{name} {garbage}"
        )


@pytest.mark.full(keep=11)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_padded_batch_decodes_as_each_row_alone(name: str) -> None:
    """Rows of 9 and 5 tokens, the short one padded on the left, then three steps of one token."""
    module, x = example(CAUSAL[name]), tokens(12)
    rows = [x[:1], x[1:, 4:]]
    alone = [forward(module, row)[:, -3:] for row in rows]
    prompt = x[:, :9].clone()
    prompt[1, :4] = float("nan")
    positions = torch.stack([torch.arange(9), padded(5, 4, 0)])
    cache = module.new_cache()
    with torch.no_grad():
        module(prompt, positions, cache)
        steps = [module(x[:, i : i + 1], None, cache) for i in (9, 10, 11)]
    assert_close(torch.cat(steps, 1), torch.cat(alone), name)


@pytest.mark.full(keep=13)
@pytest.mark.parametrize("name", MIXERS)
def test_a_row_does_not_depend_on_the_others(name: str) -> None:
    module, x = example(MIXERS[name]), tokens(T, B=3)
    assert_close(forward(module, x)[1:2], forward(module, x[1:2]))


@pytest.mark.full(keep=13)
@pytest.mark.parametrize("name", MIXERS)
def test_gradients(name: str) -> None:
    module, x = example(MIXERS[name]), tokens(6, B=1).requires_grad_()
    assert torch.autograd.gradcheck(lambda x: module(x), (x,), fast_mode=True)
    module(x).square().sum().backward()
    without = [n for n, p in module.named_parameters() if p.grad is None or not bool(p.grad.any())]
    # an indexer chooses, and a choice has no gradient: it learns by a loss of its own
    assert [n for n in without if not n.startswith(("selector.", "indexer."))] == [], (
        "nothing reaches these"
    )


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("name", MIXERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision(name: str, dtype: torch.dtype) -> None:
    x = tokens(T, dtype=dtype)
    module = example(MIXERS[name], dtype=dtype)
    wide = copy.deepcopy(module).double()
    plain = [module(x.flip(0), backend="reference").flip(0), module(x[:1], backend="reference")]
    plain = [plain[0], torch.cat([plain[1], plain[0][1:]])]
    assert_close_rule(module(x), [p.detach() for p in plain], wide(x.double()), what=name)
    assert module(x).dtype == dtype


@pytest.mark.full(keep=13)
@pytest.mark.parametrize("name", MIXERS)
def test_copies_and_state_dicts(name: str) -> None:
    module, x = example(MIXERS[name]), tokens(T)
    out, kept = forward(module, x), module.state_dict()
    assert set(kept) == {n for n, _ in module.named_parameters()}, "no buffers, parameters only"
    other = example(MIXERS[name], seed=1)
    assert not torch.allclose(forward(other, x), out) or name == "weightless"
    other.load_state_dict(kept)
    assert torch.equal(forward(other, x), out)
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    assert torch.equal(forward(twin, x), out)


STEPS = with_every_part(
    # a step of these adds an entry where it closes a block: a graph of its own
    {n: v for n, v in CAUSAL.items() if not isinstance(example(v).new_cache(), Compressed)}
)
"""Mechanisms whose steps are compiled: what is in none of them is compiled for a whole sequence."""
WHOLE = [n for n, v in MIXERS.items() if n not in STEPS or type(example(v)) is not Attention]


@pytest.mark.nightly(keep=5)  # two to nine seconds a mechanism
@pytest.mark.full(keep=1)
@pytest.mark.parametrize("name", WHOLE)
def test_compiles_without_a_graph_break(name: str) -> None:
    torch._dynamo.reset()
    module, x = example(MIXERS[name]), tokens(T)
    compiled = torch.compile(module, backend="eager", fullgraph=True)
    assert_close(forward(compiled, x), forward(module, x))


@pytest.mark.nightly(keep=5)  # five seconds a mechanism
@pytest.mark.full
@pytest.mark.parametrize("name", STEPS)
def test_decoding_compiles_at_most_three_times(name: str) -> None:
    """Behind a prompt: once, and at most two recompilations over 64 steps."""
    torch._dynamo.reset()
    module, x, counter = example(CAUSAL[name]), tokens(84, B=1), CompileCounter()
    compiled, cache = torch.compile(module, backend=counter, fullgraph=True), module.new_cache()
    with torch.no_grad():
        prompt = module(x[:, :20], None, cache)
        out = [compiled(x[:, i : i + 1], None, cache) for i in range(20, 84)]
    assert counter.frame_count <= 3
    assert_close(torch.cat([prompt, *out], 1), forward(module, x), name)


@pytest.mark.full(keep=11)
@pytest.mark.parametrize("name", CAUSAL)
def test_describe_tells_what_a_cache_really_holds(name: str) -> None:
    module = example(CAUSAL[name], dtype=torch.float32)
    for n in (3, 40):
        cache = module.new_cache()
        if n == 3 and not isinstance(cache, (Growing, State)):
            continue  # preallocated: it holds its size from the first token on
        with torch.no_grad():
            module(tokens(n, B=1, dtype=torch.float32), None, cache)
        told = module.describe(n)
        assert cache.bytes == 4 * told.cached_values, f"{n}: {told}"
        assert told.parameters.value == sum(p.numel() for p in module.parameters())
        assert told.flops_per_token.value > 0


@pytest.mark.full(keep=11)
@pytest.mark.parametrize("name", CAUSAL)
def test_a_refused_call_changes_no_cache(name: str) -> None:
    module, x = example(CAUSAL[name]), tokens(T)
    cache = module.new_cache()
    with torch.no_grad():
        module(x[:, :9], None, cache)
        held = {n: v.clone() if isinstance(v, Tensor) else v for n, v in cache.contents().items()}
        for wrong in (x[:1, 9:12], x[:, 9:12, :5], x[:, 9:12].float()):
            with pytest.raises((ValueError, TypeError, RuntimeError)):
                module(wrong, None, cache)
        now = cache.contents()
        assert list(now) == list(held)
        for key, value in held.items():
            same = torch.equal(now[key], value) if isinstance(value, Tensor) else now[key] == value
            assert same, key
        assert_close(module(x[:, 9:], None, cache), forward(module, x)[:, 9:])
