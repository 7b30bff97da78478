"""Frequencies that follow the length, with a cache: each policy guarantees what it says, and no
more.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import masks
from regard.caches import Growing
from regard.models.decoder import Decoder
from regard.nn import (
    Attention,
    Block,
    HeadProjection,
    InputEmbedding,
    PrefixRecomputer,
    PreNorm,
    RMSNorm,
    SeparateQKV,
    SwiGLU,
    rotary_projection,
)
from regard.nn.projections.dynamic_rotary import (
    PerRowRotary,
    PreRopeQKV,
)
from regard.positions import DynamicNTK, DynamicYaRN, LongRoPE, Rotary, Scaling
from regard.span import Span
from tests.nn.catalogue import in_chunks
from tests.rules import assert_close_rule, assert_refused

pytestmark = pytest.mark.usefixtures("no_gradients")

M, H, G, D, TRAINED, TOTAL = 12, 4, 2, 8, 6, 15
NTK = DynamicNTK(2.0, TRAINED)
LONG = LongRoPE((1.0, 1.1, 1.3, 1.7), (2.0, 3.0, 5.0, 9.0), TRAINED, 4.0)
SCALINGS = {"dynamic": NTK, "longrope": LONG}
LATE = ("pre_rope", "re_rotate")


def rotary(scaling: Scaling, policy: str) -> Rotary:
    return Rotary(D, 100.0, scaling=scaling, length=TOTAL if policy == "frozen" else "current")


def layer(scaling: Scaling, policy: str, seed: int = 0) -> Attention:
    project = rotary_projection(M, H, G, D, rotary(scaling, policy), policy=policy)  # type: ignore[arg-type]
    return filled(Attention(project, nn.Linear(H * D, M, bias=False), mask=masks.Causal()), seed)


def filled(module: nn.Module, seed: int = 0) -> nn.Module:  # type: ignore[misc]
    make = torch.Generator().manual_seed(seed)
    for parameter in module.parameters():
        parameter.data.normal_(generator=make)
        if parameter.ndim > 1:
            parameter.data *= parameter.shape[-1] ** -0.5 * 1.5
    return module.double()


def naive(scaling: Scaling, seed: int = 0) -> Attention:
    """What `Attention` refuses: rotated keys in a cache, whose frequencies followed each call."""
    r = rotary(scaling, "pre_rope")
    project = Naive(HeadProjection(M, H, D, r), HeadProjection(M, G, D, r), HeadProjection(M, G, D))
    return filled(Attention(project, nn.Linear(H * D, M, bias=False), mask=masks.Causal()), seed)


class Naive(SeparateQKV):
    """Says that its keys do not go stale, and is wrong."""

    def __init__(self, *heads: HeadProjection) -> None:
        super().__init__(*heads)
        self.cache_unsafe_reason = None


def frequencies(scaling: Scaling, length: int) -> tuple[list[float], float]:
    """inv_freq and factor, from the definitions."""
    if isinstance(scaling, DynamicNTK):
        stretch = 2.0 * max(length, TRAINED) / TRAINED - 1
        base = 100.0 * stretch ** (D / (D - 2))
        return [base ** (-2 * i / D) for i in range(D // 2)], 1.0
    assert isinstance(scaling, LongRoPE)
    ext = scaling.short_factor if length <= TRAINED else scaling.long_factor
    factor = math.sqrt(1 + math.log(4.0) / math.log(TRAINED))
    return [100.0 ** (-2 * i / D) / e for i, e in enumerate(ext)], factor


def turned(x: Tensor, p: int, freq: tuple[list[float], float]) -> Tensor:
    y = x.clone()
    for i, f in enumerate(freq[0]):
        c, s = freq[1] * math.cos(p * f), freq[1] * math.sin(p * f)
        a, b = x[i], x[i + D // 2]
        y[i], y[i + D // 2] = a * c - b * s, b * c + a * s
    return y


def one_query(
    module: Attention, x: Tensor, p: Sequence[int], t: int, freq: tuple[list[float], float]
) -> Tensor:
    """What the token t of x [T,M] finds among the tokens up to its position, all rotated with the
    same frequencies.
    """
    project, joined = module.project, []
    q, k, v = (x @ part.linear.weight.T for part in (project.q, project.k, project.v))  # type: ignore[union-attr, attr-defined]
    for h in range(H):
        g = h // (H // G)
        asks = turned(q[t, h * D : (h + 1) * D], p[t], freq)
        seen = [j for j in range(len(p)) if 0 <= p[j] <= p[t]]
        s = torch.stack([asks @ turned(k[j, g * D : (g + 1) * D], p[j], freq) for j in seen])
        w = (s / math.sqrt(D)).softmax(0)
        joined.append(sum(w[i] * v[j, g * D : (g + 1) * D] for i, j in enumerate(seen)))
    return module.output(torch.cat(joined))  # type: ignore[arg-type]


def cached(module: Attention, x: Tensor, chunks: Sequence[int]) -> Tensor:
    """The output of each call, one behind the other."""
    return in_chunks(module, x, chunks, Growing(), Span(0, x.shape[1]))


CHUNKS = [(4, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1), (1, 6, 7, 1), (15,), (8, 7)]


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("name", SCALINGS)
@pytest.mark.parametrize("policy", LATE)
def test_one_layer_the_last_query_is_one_pass_at_that_length(name: str, policy: str) -> None:
    scaling, x = SCALINGS[name], torch.randn(1, TOTAL, M).double()
    module = layer(scaling, policy)
    for chunks in CHUNKS:
        out, end = cached(module, x, chunks), 0
        for n in chunks:
            end += n
            right = one_query(module, x[0, :end], range(end), end - 1, frequencies(scaling, end))
            one_pass = module(x[:, :end])[0, -1]
            assert float((out[0, end - 1] - right).abs().max()) < 1e-12
            assert float((one_pass - right).abs().max()) < 1e-12


@pytest.mark.parametrize("name", SCALINGS)
def test_the_naive_cache_is_wrong_and_refused(name: str) -> None:
    """Negative control: keys stay rotated for the lengths of their calls."""
    scaling, x = SCALINGS[name], torch.randn(1, TOTAL, M).double()
    module, chunks = naive(scaling), (4,) + (1,) * 11
    out = cached(module, x, chunks)
    right = one_query(module, x[0], range(TOTAL), TOTAL - 1, frequencies(scaling, TOTAL))
    assert float((module(x)[0, -1] - right).abs().max()) < 1e-12
    assert float((out[0, -1] - right).abs().max()) > 1e-2
    r = rotary(scaling, "pre_rope")
    honest = SeparateQKV(
        HeadProjection(M, H, D, r), HeadProjection(M, G, D, r), HeadProjection(M, G, D)
    )
    refused = Attention(honest, nn.Linear(H * D, M), mask=masks.Causal()).double()
    with pytest.raises(regard.ArgumentError, match="cache keys before they are rotated"):
        refused(x, None, Growing())


@pytest.mark.parametrize("name", SCALINGS)
def test_frozen_is_one_pass_everywhere(name: str) -> None:
    scaling, x = SCALINGS[name], torch.randn(1, TOTAL, M).double()
    module = layer(scaling, "frozen")
    freq = frequencies(scaling, TOTAL)
    rows = [one_query(module, x[0], range(TOTAL), t, freq) for t in range(TOTAL)]
    for chunks in CHUNKS:
        assert float((cached(module, x, chunks)[0] - torch.stack(rows)).abs().max()) < 1e-12
    short = module(x[:, :3])[0]  # the length of the table, not of the call
    assert float((short - torch.stack(rows)[:3]).abs().max()) < 1e-12


@pytest.mark.parametrize("policy", LATE)
def test_low_precision_by_the_rule(policy: str) -> None:
    """A re-rotated key is rounded once more than plain math of one pass: compared with that, at
    every step.
    """
    exact = layer(NTK, policy)
    for dtype in (torch.float32, torch.bfloat16):
        low = copy.deepcopy(exact).to(dtype)
        x = torch.randn(1, TOTAL, M).to(dtype)
        wide = copy.deepcopy(low).double()
        right = wide(x.double())[0, -1]
        plain = low(x)[0, -1]
        twice = cached(low, x, (7, 7, 1))[0, -1]
        others = [
            plain,
            one_query(low, x[0], range(TOTAL), TOTAL - 1, frequencies(NTK, TOTAL)).to(dtype),
        ]
        assert_close_rule(twice, others, right)


def test_re_rotated_keys_do_not_gather_roundings() -> None:
    module = layer(NTK, "re_rotate").bfloat16()
    x = torch.randn(1, 60, M).bfloat16()
    cache, project = Growing(), module.project
    for t in range(60):
        memory, seen = cache.update(project.remember(x[:, t : t + 1], Span(t, 1)), Span(t, 1))
    wide = copy.deepcopy(project).double()
    k64, _ = wide.recall(wide.remember(x.double(), Span(0, 60)), Span(0, 60))
    k, _ = project.recall(memory, seen)
    once = k64.bfloat16().double() - k64
    # the map's rounding, the rotation's, and the second rotation's; each of the size of one
    # rounding of the largest
    assert float((k.double() - k64).abs().max()) <= 8 * float(once.abs().max())


def decoder(scaling: Scaling, policy: str, layers: int = 3) -> Decoder:
    blocks = [
        Block(layer(scaling, policy), SwiGLU(M, 20), PreNorm(RMSNorm(M)), PreNorm(RMSNorm(M)))
        for _ in range(layers)
    ]
    made = Decoder(InputEmbedding(nn.Embedding(20, M)), blocks, RMSNorm(M), nn.Linear(M, 20))
    return filled(made, 1).eval()  # type: ignore[return-value]


def steps(call: Callable[..., Tensor], ids: Tensor, chunks: Sequence[int]) -> list[Tensor]:
    return [call(part)[:, -1] for part in ids.split(list(chunks), 1)]


@pytest.mark.full
@pytest.mark.parametrize("name", SCALINGS)
def test_a_model_of_several_layers(name: str) -> None:
    """Only "recompute" and "frozen" equal one pass; "pre_rope" and "re_rotate" equal one
    another.
    """
    scaling, ids, chunks = SCALINGS[name], torch.randint(20, (2, TOTAL)), (4,) + (1,) * 11
    ends = [sum(chunks[: i + 1]) for i in range(len(chunks))]
    models = {policy: decoder(scaling, policy) for policy in (*LATE, "frozen", "recompute")}
    got = {}
    for policy, model in models.items():
        caches = model.new_caches()
        prefix = PrefixRecomputer(model)
        call = prefix if policy == "recompute" else lambda x, m=model, c=caches: m(x, None, c)
        got[policy] = torch.stack(steps(call, ids, chunks))
    one_pass = {p: torch.stack([m(ids[:, :n])[:, -1] for n in ends]) for p, m in models.items()}
    for policy in ("frozen", "recompute"):
        assert float((got[policy] - one_pass[policy]).abs().max()) < 1e-11, policy
    for policy in LATE:
        assert float((got[policy] - one_pass[policy])[-1].abs().max()) > 1e-3, policy
        within = [i for i, n in enumerate(ends) if n <= TRAINED]
        assert float((got[policy] - one_pass[policy])[within].abs().max()) < 1e-11, policy
    assert float((got["pre_rope"] - got["re_rotate"]).abs().max()) < 1e-11
    assert float((one_pass["pre_rope"] - one_pass["recompute"]).abs().max()) < 1e-11


def test_when_the_prefix_is_run_again() -> None:
    """LongRoPE once, at L -> L + 1; dynamic NTK at every token behind L."""
    for scaling, chunks, reruns in (
        (LONG, (4,) + (1,) * 11, 1),
        (NTK, (4,) + (1,) * 11, TOTAL - TRAINED),
        (NTK, (6, 9), 1),
        (LONG, (15,), 0),
    ):
        prefix = PrefixRecomputer(decoder(scaling, "recompute", 1))
        steps(prefix, torch.randint(20, (1, TOTAL)), chunks)
        assert prefix.reruns == reruns
        assert [len(cache) for cache in prefix.caches] == [TOTAL]


def test_a_refused_call_leaves_the_prefix_as_it_was() -> None:
    prefix, ids = PrefixRecomputer(decoder(LONG, "recompute", 1)), torch.randint(20, (1, 8))
    whole = PrefixRecomputer(decoder(LONG, "recompute", 1))
    prefix(ids[:, :4])
    for wrong in (
        torch.full((1, 1), 99),
        torch.full((1, 4), 99),
    ):  # the second runs the prefix again
        with pytest.raises(IndexError):
            prefix(wrong)
    assert torch.equal(prefix(ids[:, 4:])[:, -1], whole(ids)[:, -1])


def test_without_prefix_a_stale_key_is_refused() -> None:
    module, x = layer(LONG, "recompute"), torch.randn(1, 8, M).double()
    cache = Growing()
    module(x[:, :4], None, cache)
    module(x[:, 4:6], None, cache)
    with pytest.raises(regard.ArgumentError, match="a cached key was rotated for length 4, but"):
        module(x[:, 6:7], None, cache)
    assert len(cache) == 6
    padded = torch.tensor([[-1, -1, 6]])  # padding has no frequencies
    fresh = Growing()
    module(x[:, :3], padded, fresh)
    assert len(fresh) == 3


@pytest.mark.parametrize("policy", [*LATE, "recompute"])
def test_a_row_does_not_depend_on_the_others(policy: str) -> None:
    """The batch effect: `Rotary` takes the largest position of the batch, the policies that of the
    row.
    """
    x = torch.randn(2, TOTAL, M).double()
    p = torch.stack([torch.arange(TOTAL), torch.arange(TOTAL) - 10])
    p = p.where(p >= 0, -1)
    module = layer(NTK, policy)
    alone = module(x[1:, 10:], Span(0, 5))
    assert float((module(x, p)[1, 10:] - alone[0]).abs().max()) < 1e-12
    batchwise = naive(NTK)
    alone = batchwise(x[1:, 10:], Span(0, 5))
    assert float((batchwise(x, p)[1, 10:] - alone[0]).abs().max()) > 1e-4


@pytest.mark.parametrize("policy", LATE)
def test_rows_of_their_own_length_in_one_cache(policy: str) -> None:
    x = torch.randn(2, TOTAL, M).double()
    p = torch.stack([torch.arange(TOTAL), torch.arange(TOTAL) - 6])
    p = p.where(p >= 0, -1)
    module = layer(NTK, policy)
    out = in_chunks(module, x, (9, 1, 5), Growing(), p)
    for row, first in ((0, 0), (1, 6)):
        n = TOTAL - first
        right = one_query(module, x[row, first:], range(n), n - 1, frequencies(NTK, n))
        assert float((out[row, -1] - right).abs().max()) < 1e-12


@pytest.mark.parametrize("policy", LATE)
def test_a_query_has_the_frequencies_of_the_largest_key(policy: str) -> None:
    """A query in front of keys that the cache already holds."""
    x, module = torch.randn(1, TOTAL, M).double(), layer(NTK, policy)
    cache = Growing()
    p = [*range(4), *range(5, TOTAL), 4]
    module(x[:, :-1], torch.tensor([p[:-1]]), cache)
    late = module(x[:, -1:], torch.tensor([[4]]), cache)[0, 0]
    right = one_query(module, x[0], p, TOTAL - 1, frequencies(NTK, TOTAL))
    own = one_query(module, x[0], p, TOTAL - 1, frequencies(NTK, 5))
    assert float((late - right).abs().max()) < 1e-12
    assert float((right - own).abs().max()) > 1e-3


def test_while_nothing_changed_recall_is_free() -> None:
    project = layer(NTK, "re_rotate").project
    memory = project.remember(torch.randn(1, TRAINED, M).double(), Span(0, TRAINED))
    assert project.recall(memory, Span(0, TRAINED))[0] is memory[0]
    assert memory[2].dtype == torch.int64
    assert memory[2].unique().tolist() == [TRAINED]


def test_dynamic_yarn_changes_its_factor_too() -> None:
    scaling = DynamicYaRN(TRAINED)
    project = {}
    for policy in LATE:
        r = Rotary(D, 100.0, scaling=scaling, length="current")
        project[policy] = filled(rotary_projection(M, H, G, D, r, policy=policy))  # type: ignore[arg-type]
    x, keys = torch.randn(1, TOTAL, M).double(), {}
    for policy, made in project.items():
        cache = Growing()
        for a, b in ((0, 5), (5, 9), (9, TOTAL)):
            memory, seen = cache.update(made.remember(x[:, a:b], Span(a, b - a)), Span(a, b - a))
        keys[policy] = made.recall(memory, seen)[0]
    assert float((keys["pre_rope"] - keys["re_rotate"]).abs().max()) < 1e-13
    stretch = Rotary(D, 100.0, scaling=scaling, length=TOTAL).rotary_factor
    assert stretch > 1
    plain = project["pre_rope"].k(x, None)
    assert float((keys["re_rotate"].norm() / plain.norm() - stretch).abs()) < 1e-12


def test_steps_sizes_and_figures() -> None:
    norms = RMSNorm(D), RMSNorm(D)
    project = rotary_projection(
        M,
        H,
        G,
        D,
        rotary(NTK, "pre_rope"),
        q_steps=norms[:1],
        k_steps=norms[1:],
        value_dim=5,
        bias=True,
    )
    assert project.shape == (H, G, D, 5, (G * D, G * 5))
    assert list(project.q.steps) == [norms[0]]
    assert list(project.k.steps) == [norms[1]]
    assert project.v.linear.bias is not None
    assert isinstance(project, PreRopeQKV)
    assert layer(NTK, "re_rotate").describe(64).kv_per_token.value == 2 * G * D + 1
    # a scaling without a length goes with every policy
    plain = rotary_projection(M, H, G, D, Rotary(D), policy="frozen")
    late = rotary_projection(M, H, G, D, Rotary(D), policy="pre_rope")
    late.load_state_dict(plain.state_dict())
    x = torch.randn(1, 4, M)
    first, then = (p.recall(p.remember(x, Span(3, 4)), Span(3, 4))[0] for p in (plain, late))
    assert torch.equal(first, then)


def test_gradients_pass_the_rotation() -> None:
    with torch.enable_grad():
        turn = PerRowRotary(rotary(NTK, "pre_rope"))
        x = torch.randn(2, 1, 3, D).double().requires_grad_()
        p = torch.tensor([[0, 1, 2], [7, 8, 9]])
        assert torch.autograd.gradcheck(lambda x: turn(x, p), (x,))
        old = torch.tensor([[3, 3, 3], [8, 8, 10]])
        assert torch.autograd.gradcheck(lambda x: turn.rerotate(x, p, old, (3, 10)), (x,))


def test_errors() -> None:
    cases = [
        (
            lambda: rotary_projection(M, H, G, D, rotary(NTK, "x"), policy="late"),  # type: ignore[arg-type]
            "policy is 'late'; it must be one of pre_rope, re_rotate, frozen, recompute",
        ),
        (lambda: rotary_projection(M, H, G, 4, rotary(NTK, "x")), "rotary has dim 8; it must be"),
        (
            lambda: rotary_projection(M, H, G, D, Rotary(D, scaling=NTK, length=9)),
            (
                f"{Rotary(D, scaling=NTK, length=9)} does not suit policy 'pre_rope'; "
                'construct it with length="current"'
            ),
        ),
        (
            lambda: rotary_projection(M, H, G, D, rotary(NTK, "x"), policy="frozen"),
            f"{rotary(NTK, 'x')} does not suit policy 'frozen'; construct it with length=<number>",
        ),
        (
            lambda: layer(NTK, "pre_rope").project.query(torch.zeros(1, 2, M).double(), None),
            "positions is None; a projection with rotary positions needs them",
        ),
    ]
    assert_refused(cases)
