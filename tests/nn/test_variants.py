"""What the catalogue's softmax mechanisms compute, against loops over the definition, and against
one another.
"""

from __future__ import annotations

import inspect
import math
import re
from itertools import product
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import masks
from regard.errors import ArgumentError, RegardError
from regard.nn import Attention, HeadProjection, SeparateQKV
from regard.nn.attention.windowed import Longformer
from regard.nn.projections.fused import FusedQKV, PerHeadProjection
from regard.nn.projections.latent import LatentProjection
from regard.nn.projections.steps import DifferentialProjection, GatedProjection
from regard.nn.variants import (
    bigbird,
    build,
    causal,
    differential,
    gated,
    gpt,
    gqa,
    learned_sink,
    local_global,
    longformer,
    mha,
    mha_per_head,
    mqa,
    packed,
    prefix_lm,
    qk_norm,
    qk_norm_after_rotary,
    qk_norm_flat,
    single_head,
    sliding_window,
    softcap,
    sparse_fixed,
    sparse_strided,
    stacked,
    weightless,
)
from regard.nn.variants.registry import Variant, option_names, parse_options
from regard.positions import Rotary
from regard.span import Span
from tests.nn.catalogue import DIM, VARIANTS, example, randomize, tokens

T = 11


def assert_near(x: Tensor, y: Tensor) -> None:
    """Equal but for the order of sums in fp64."""
    assert x.shape == y.shape
    assert float((x - y).detach().abs().max()) <= 1e-11 * max(1.0, float(y.detach().abs().max()))


def made(module: Attention | Longformer, seed: int = 0) -> Any:
    return randomize(module.double(), seed).eval()


def attention_by_loops(
    q: Tensor, k: Tensor, v: Tensor, sees: Tensor, scale: float | None = None
) -> Tensor:
    """q [B,H,T,D], k [B,G,S,D], v [B,G,S,E], sees [T,S]: each row by itself, in Python."""
    q, k, v = q.detach(), k.detach(), v.detach()
    B, H, T_, D = q.shape
    out = torch.zeros(B, H, T_, v.shape[-1], dtype=torch.float64)
    scale = D**-0.5 if scale is None else scale
    for b in range(B):
        for h in range(H):
            g = h // (H // k.shape[1])
            for i in range(T_):
                keys = [j for j in range(k.shape[2]) if bool(sees[i, j])]
                scores = [
                    scale
                    * sum(float(x) * float(y) for x, y in zip(q[b, h, i], k[b, g, j], strict=True))
                    for j in keys
                ]
                most = max(scores)
                weights = [math.exp(s - most) for s in scores]
                for w, j in zip(weights, keys, strict=True):
                    out[b, h, i] += w / sum(weights) * v[b, g, j]
    return out


def joined(z: Tensor) -> Tensor:
    return torch.cat([z[:, h] for h in range(z.shape[1])], -1)


CAUSAL = torch.ones(T, T, dtype=torch.bool).tril()
EVERY = torch.ones(T, T, dtype=torch.bool)


def test_attention_without_weights() -> None:
    x = tokens(T, B=1)
    assert_near(
        weightless(DIM)(x),
        joined(attention_by_loops(x[:, None], x[:, None], x[:, None], EVERY, 1.0)),
    )


def test_one_head_with_weights() -> None:
    module, x = made(single_head(DIM, head_dim=6)), tokens(T, B=1)
    q, k, v = (
        x @ part.linear.weight.T for part in (module.project.q, module.project.k, module.project.v)
    )
    assert_near(module(x), joined(attention_by_loops(q[:, None], k[:, None], v[:, None], EVERY)))


@pytest.mark.parametrize("order", ["parts", "heads", "groups"])
def test_fused_rows_in_every_order(order: str) -> None:
    """[Q|K|V], per head [q k v], per group [queries, k, v]: same shapes, other functions."""
    groups = 4 if order == "heads" else 2
    module, x = made(gpt(DIM, 4, groups=groups, order=order)), tokens(T, B=1)
    rows = (x @ module.project.linear.weight.T + module.project.linear.bias)[0].unflatten(
        -1, (-1, 8)
    )
    where = {
        "parts": ([0, 1, 2, 3], [4, 5], [6, 7]),
        "heads": ([0, 3, 6, 9], [1, 4, 7, 10], [2, 5, 8, 11]),
        "groups": ([0, 1, 4, 5], [2, 6], [3, 7]),
    }[order]
    q, k, v = (torch.stack([rows[:, i] for i in part])[None] for part in where)
    z = joined(attention_by_loops(q, k, v, CAUSAL))
    assert_near(module(x), z @ module.output.weight.T + module.output.bias)
    other = "groups" if order == "parts" else "parts"
    wrong = gpt(DIM, 4, groups=groups, order=other).double()
    wrong.load_state_dict(module.state_dict())
    assert float((wrong(x) - module(x)).detach().abs().max()) > 0.1


def test_heads_one_by_one_are_heads_stacked() -> None:
    split = made(mha_per_head(DIM, 4, bias=True))
    whole, x = stacked(split), tokens(T)
    assert_near(whole(x), split(x))
    assert isinstance(whole.project.q, HeadProjection)
    assert not isinstance(whole.project.q, PerHeadProjection)
    assert torch.equal(whole.project.q.linear.weight[8:16], split.project.q.linear[1].weight)
    mixed = stacked(split)
    with torch.no_grad():
        mixed.project.q.linear.weight.copy_(whole.project.q.linear.weight.flip(0))
    assert float((mixed(x) - split(x)).detach().abs().max()) > 0.1


def test_mha_is_gqa_with_as_many_groups_and_gqa_is_mha_with_repeated_heads() -> None:
    x = tokens(T)
    grouped, whole = made(gqa(DIM, 4, groups=4)), gqa(DIM, 4, groups=4).double()
    whole.load_state_dict(grouped.state_dict())
    plain = mha(DIM, 4, is_causal=True).double()
    plain.load_state_dict(grouped.state_dict())
    plain.project.q.steps, plain.project.k.steps = grouped.project.q.steps, grouped.project.k.steps
    assert_near(plain(x), grouped(x))
    for groups in (1, 2):
        few = made(gqa(DIM, 4, groups=groups), seed=groups)
        many = gqa(DIM, 4, groups=4).double()
        with torch.no_grad():
            many.project.q.linear.weight.copy_(few.project.q.linear.weight)
            many.output.weight.copy_(few.output.weight)
            for mine, theirs in ((many.project.k, few.project.k), (many.project.v, few.project.v)):
                heads = theirs.linear.weight.unflatten(0, (groups, 8))
                mine.linear.weight.copy_(heads.repeat_interleave(4 // groups, 0).flatten(0, 1))
        assert_near(many(x), few(x))
        with (
            torch.no_grad()
        ):  # repeat in place of repeat_interleave is another model, with two groups
            heads = few.project.k.linear.weight.unflatten(0, (groups, 8))
            many.project.k.linear.weight.copy_(heads.repeat(4 // groups, 1, 1).flatten(0, 1))
        assert (float((many(x) - few(x)).detach().abs().max()) > 0.01) == (groups == 2)
    single = made(mqa(DIM, 4))
    same = gqa(DIM, 4, groups=1).double()
    same.load_state_dict(single.state_dict())
    assert torch.equal(same(x), single(x))


def test_norm_before_rotary_is_not_norm_after() -> None:
    before, x = made(qk_norm(DIM, 4, groups=2)), tokens(T)
    after = qk_norm_after_rotary(DIM, 4, groups=2).double()
    for name, parameter in before.named_parameters():
        other = name.replace("steps.0", "steps.1")
        after.get_parameter(other).data.copy_(parameter.data)
    assert float((before(x) - after(x)).detach().abs().max()) > 0.01
    for module in (before, after):  # without weights in the norms, the order means nothing
        for part in (module.project.q, module.project.k):
            for step in part.steps:
                if hasattr(step, "weight"):
                    step.weight.data.fill_(1.0)
    assert_near(before(x), after(x))


@pytest.mark.parametrize("name", ["flat norms", "cap", "sinks"])
def test_norms_over_all_heads_capped_scores_and_sinks(name: str) -> None:
    """Of queries and keys before their rotation, written out with torch's softmax."""
    module, x = (
        made(
            {
                "flat norms": qk_norm_flat(DIM, 4, groups=2),
                "cap": softcap(DIM, 4, groups=2, cap=1.5, scale=0.7),
                "sinks": learned_sink(DIM, 4, groups=2, bias=False),
            }[name]
        ),
        tokens(T),
    )
    project, positions = module.project, torch.arange(T)[None]
    q, k = x @ project.q.linear.weight.T, x @ project.k.linear.weight.T
    if name == "flat norms":
        q, k = (
            y / (y.square().mean(-1, keepdim=True) + 1e-6).sqrt() * part.flat.weight
            for y, part in ((q, project.q), (k, project.k))
        )
    q, k = (Rotary(8).double()(y.unflatten(-1, (-1, 8)).transpose(1, 2), positions) for y in (q, k))
    v = (x @ project.v.linear.weight.T).unflatten(-1, (-1, 8)).transpose(1, 2)
    scores = q @ k.repeat_interleave(2, 1).mT * (0.7 if name == "cap" else 8**-0.5)
    scores = 1.5 * (scores / 1.5).tanh() if name == "cap" else scores
    sink = module.sink if name == "sinks" else torch.full((4,), -torch.inf)
    scores = scores.masked_fill(~CAUSAL, -torch.inf)
    weights = torch.cat([scores, sink[:, None, None].expand(2, 4, T, 1)], -1).softmax(-1)
    z = weights[..., :T] @ v.repeat_interleave(2, 1)
    assert_near(module(x), joined(z) @ module.output.weight.T)


def test_differential_by_loops() -> None:
    module, x = made(differential(DIM, 4, groups=2, head_dim=4, depth=3)), tokens(T, B=1)
    project = module.project
    q, k = project.q(x, Span(0, T)), project.k(x, Span(0, T))
    v = project.v(x, None)
    start = 0.8 - 0.6 * math.exp(-0.3 * 3)
    a, b = (
        float((x @ y).detach()) for x, y in ((project.a1, project.b1), (project.a2, project.b2))
    )
    share = math.exp(a) - math.exp(b) + start
    first = attention_by_loops(q[:, :4], k[:, :2], v, CAUSAL)
    second = attention_by_loops(q[:, 4:], k[:, 2:], v, CAUSAL)
    z = first - share * second
    z = z / (z.square().mean(-1, keepdim=True) + 1e-5).sqrt() * project.norm.weight * (1 - start)
    assert_near(module(x), joined(z) @ module.output.weight.T)
    assert module.project.shape.memory == (16, 16)


def test_a_gate_acts_on_every_number_of_the_heads() -> None:
    module, x = made(gated(DIM, 4, groups=2)), tokens(T)
    plain = Attention(module.project.project, nn.Identity(), mask=masks.Causal())
    gate = (x @ module.project.gate.linear.weight.T).sigmoid()
    assert_near(module(x), (plain(x) * gate) @ module.output.weight.T)


@pytest.mark.parametrize("step", [1, 2, 3])
@pytest.mark.parametrize("is_causal", [False, True])
def test_longformer_by_loops(is_causal: bool, step: int) -> None:
    module = made(longformer(DIM, 4, window=4, positions=(2, 7), step=step, is_causal=is_causal))
    x, every = tokens(T, B=1), Span(0, T)
    near_, wide = (
        [part.query(x, every), *part.remember(x, every)]
        for part in (module.local_project, module.global_project)
    )
    at = torch.arange(T)
    glob = (at == 2) | (at == 7)
    apart = (at[:, None] - at).abs()
    sees = ((apart <= 2 * step) & (apart % step == 0)) | glob[None]
    past = CAUSAL if is_causal else EVERY
    z = attention_by_loops(*near_, sees & past)
    z[:, :, glob] = attention_by_loops(*wide, past)[:, :, glob]
    assert_near(module(x), joined(z) @ module.output.weight.T + module.output.bias)
    assert_near(module(x, at[None]), module(x))
    single = copy_of_local(module, step)
    assert float((single(x) - module(x)).detach().abs().max()) > 0.1


def copy_of_local(module: Any, step: int) -> Longformer:
    """Wrong: global tokens use the projection of the others."""
    return Longformer(
        module.local_project,
        module.local_project,
        module.output,
        positions=(2, 7),
        window=3,
        ahead=None if module.causal else 2,
        step=step,
    )


def test_a_window_as_long_as_the_text_is_no_window() -> None:
    whole, x = made(gqa(DIM, 4, groups=2)), tokens(T)
    for wide in (
        sliding_window(DIM, 4, groups=2, window=T),
        local_global(DIM, 4, groups=2, window=2, layer=1, every=2),
        packed(DIM, 4, groups=2, bounds=(0, T)),
        prefix_lm(DIM, 4, groups=2, prefix=0),
        build("chunked", DIM, 4, groups=2, chunk=T),
    ):
        wide.double().load_state_dict(whole.state_dict())
        assert_near(wide(x), whole(x))
    short = sliding_window(DIM, 4, groups=2, window=T - 1).double()
    short.load_state_dict(whole.state_dict())
    assert float((short(x) - whole(x)).detach()[:, -1].abs().max()) > 1e-3


def test_sparse_patterns_that_see_everything_are_dense() -> None:
    whole, x = made(mha(DIM, 4, is_causal=True)), tokens(T)
    for name, module in {
        "strided 1": sparse_strided(DIM, 4, stride=1),
        "fixed, every column": sparse_fixed(DIM, 4, stride=3, columns=3),
        "all blocks random": bigbird(DIM, 4, block=2, blocks=6, random=6, is_causal=True),
    }.items():
        module.double().load_state_dict(whole.state_dict())
        assert_near(module(x), whole(x))
        assert name


def test_bigbird_draws_the_same_blocks_in_training_and_evaluation_and_at_every_length() -> None:
    """transformers' draws none in evaluation, and flips to full attention below 704 tokens (bug
    class 31).
    """
    module, x = made(bigbird(DIM, 4, block=2, blocks=16, random=2, seed=3)), tokens(32)
    assert torch.equal(module.train()(x), module.eval()(x))
    table = module.mask.table
    drawn = table.sum(1)[2:-2]
    assert set(drawn.tolist()) == {2 + 3 + 2}
    other = bigbird(DIM, 4, block=2, blocks=16, random=2, seed=4).mask
    assert not torch.equal(other.table, table)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gqa(DIM, 4, groups=3), "allowed key/value heads: 1, 2, 4"),
        (lambda: mha(30, 4), "dim 30 is not divisible by 4 heads; give head_dim, or heads among 1"),
        (lambda: mha(30, 0), "dim 30 is not divisible by 0 heads"),
        (lambda: mha(0, 4, head_dim=2), "HeadProjection(dim=0, heads=4, head_dim=2): each must"),
        (lambda: mha(8, 2, dropout=1.0), "dropout is 1.0"),
        (lambda: weightless(0), "dim is 0"),
        (lambda: gpt(8, 4, groups=2, order="heads"), 'order "heads" has one key and value per'),
        (lambda: gpt(8, 4, order="qkv"), "order is 'qkv'"),
        (lambda: FusedQKV(0, 2, 2, 2), "dim is 0 and head_dim 2"),
        (lambda: local_global(8, 4, groups=2, window=2, every=0), "layer is 0 and every is 0"),
        (lambda: sliding_window(8, 4, groups=2, window=0), "Window size is 0"),
        (lambda: longformer(8, 4, window=4, step=-1), "Dilated step is -1"),
        (lambda: longformer(8, 4, window=3), "window is 3; it is the total width"),
        (lambda: differential(8, 2, depth=-1), "depth is -1; q must have an even number of heads"),
        (
            lambda: DifferentialProjection(
                HeadProjection(8, 4, 2), HeadProjection(8, 2, 2), HeadProjection(8, 2, 2)
            ),
            "k is 2 heads of 2, v is 2 heads of 2, depth is 0; q must have",
        ),
        (
            lambda: GatedProjection(
                SeparateQKV(
                    HeadProjection(8, 4, 2), HeadProjection(8, 2, 2), HeadProjection(8, 2, 2)
                ),
                HeadProjection(8, 4, 1),
            ),
            "gate is 4 heads of 1; it must be 4 heads of 2",
        ),
    ],
)
def test_bad_sizes_are_refused(make: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        make()


def built_with(entry: Variant, setting: str) -> nn.Module:
    options = {**entry.example_options, **parse_options([setting], entry)}
    with torch.device("meta"):
        return entry.build(DIM, 4, **options)


@pytest.mark.full(keep=["mha", "cope", "rwkv7"])
@pytest.mark.parametrize("name", VARIANTS)
def test_a_size_of_another_type_or_below_0_is_refused(name: str) -> None:
    entry = VARIANTS[name]
    parameters = inspect.signature(entry.build).parameters
    sizes = [x for x in option_names(entry) if parameters[x].annotation in (int, int | None)]
    for option, value in product(sizes, ("x", "[1, 2]", "2.5", "-1")):
        with pytest.raises(RegardError):
            built_with(entry, f"{option}={value}")


def test_two_projections_of_other_shapes_make_no_longformer() -> None:
    local_project, other = (
        SeparateQKV(*(HeadProjection(8, n, 2) for _ in range(3))) for n in (2, 4)
    )
    with pytest.raises(ArgumentError, match=r"^local_project is ProjectionShape\(H=2.*both need"):
        Longformer(local_project, other, nn.Identity(), window=2)


def test_a_padded_slot_of_a_global_position_is_not_global() -> None:
    module, x = example(VARIANTS["longformer"]), tokens(9, B=1)
    positions = torch.tensor([[-1, -1, 0, 1, 2, 3, 4, 5, 6]])
    assert_near(module(x, positions)[:, 2:], module(x[:, 2:]))


def test_a_gate_leaves_a_latent_its_forms() -> None:
    """One query against many keys is absorbed, gated or not, and both forms give the same."""
    latent = LatentProjection(DIM, 4, Rotary(4), kv_rank=16, nope_dim=8, value_dim=8)
    module = made(
        Attention(
            GatedProjection(latent, HeadProjection(DIM, 4, 8)),
            nn.Linear(DIM, DIM),
            mask=masks.Causal(),
        )
    )
    assert isinstance(module.project.select_form(40, 40), GatedProjection)
    assert module.project.select_form(1, 40).shape.G == 1
    x, cache = tokens(T), module.new_cache()
    with torch.no_grad():
        steps = [module(x[:, i : i + 1], None, cache) for i in range(T)]
        assert_near(torch.cat(steps, 1), module(x))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("make", [causal, mha, gpt])
def test_dropout_acts_on_the_weights_in_training_only(make: Any) -> None:
    """Off in evaluation, bit for bit (bug class 26); what is shown is never dropped: rows sum to 1
    (27).
    """
    module, plain, x = made(make(DIM, 4, dropout=0.5)), make(DIM, 4).double().eval(), tokens(T)
    plain.load_state_dict(module.state_dict())
    assert torch.equal(module(x), plain(x))
    module.train()
    with regard.Trace("pattern") as trace:
        first = module(x)
    assert not torch.equal(first, module(x))
    assert_near(trace["pattern"].sum(-1), torch.ones_like(trace["pattern"].sum(-1)))
    draws = torch.stack([module(x).detach() for _ in range(100)])
    spread = draws.std(0) / 10  # of the mean of 100
    assert float(((draws.mean(0) - plain(x).detach()).abs() / (spread + 1e-12)).max()) < 6
