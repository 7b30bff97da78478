"""Multi-head latent attention against the paper's equations, its forms against one another, and
what a cache keeps.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import masks
from regard.caches import Cache, Contents, Fixed, Growing, Parts
from regard.caches import Latent as LatentCache
from regard.cost import attention_flops
from regard.cost import latent as cost
from regard.nn import Attention, LatentProjection
from regard.nn.projections.latent import (
    AbsorbedLatentProjection,
    LowRankProjection,
    NaiveLatentProjection,
)
from regard.nn.variants import mla
from regard.positions import DynamicNTK, Rotary, YaRN
from regard.span import Positions, Span, as_tensor
from tests.nn.catalogue import in_chunks
from tests.oracles import latent as oracle
from tests.rules import assert_close_rule, assert_refused

pytestmark = pytest.mark.usefixtures("no_gradients")

FORMS = ("naive", "expand", "absorb", "auto")
M, H = 12, 3
SMALL: dict[str, int] = {"kv_rank": 6, "nope_dim": 5, "rope_dim": 4, "value_dim": 7}
YARN = YaRN(8.0, 64, mscale=0.707, mscale_all_dim=1.0)  # a factor on cos and sin, too
V3: dict[str, Any] = {
    "q_rank": 1536,
    "kv_rank": 512,
    "nope_dim": 128,
    "rope_dim": 64,
    "value_dim": 128,
}


def build(form: str = "auto", seed: int = 0, **options: Any) -> Any:
    """A small one whose parameters are all random, norm weights too; what comes out of a matrix is
    of order 1.
    """
    layer = mla(M, H, **{**SMALL, "form": form, **options})
    make = torch.Generator().manual_seed(seed)
    for p in layer.parameters():
        p.normal_(0, p.shape[1] ** -0.5 if p.ndim == 2 else 1, generator=make)
    return layer


def weights_of(layer: Any) -> oracle.Weights:
    """The matrices of a layer, for the oracle."""
    p, down = layer.project, (None, None)
    up = p.q
    if isinstance(p.q, LowRankProjection):
        down, up = (p.q.down.weight, p.q.norm.weight), p.q.up
    return oracle.Weights(
        *down,
        up.linear.weight,
        p.kv_down.weight,
        p.kv_norm.weight,
        p.kv_up.linear.weight,
        layer.output.weight,
    )


def sizes_of(scaling: YaRN | None = None) -> oracle.Sizes:
    yarn = None
    if scaling is not None:
        yarn = oracle.Yarn(
            scaling.factor,
            scaling.original_length,
            scaling.beta_fast,
            scaling.beta_slow,
            1.0 if scaling.mscale is None else scaling.mscale,
            scaling.mscale_all_dim or 0.0,
        )
    return oracle.Sizes(H, SMALL["nope_dim"], SMALL["rope_dim"], SMALL["value_dim"], yarn=yarn)


def exact(layer: Any, x: Tensor, scaling: YaRN | None = None, start: int = 0) -> Tensor:
    positions = [range(start, start + x.shape[1])] * x.shape[0]
    return oracle.latent_attention(x, weights_of(layer), sizes_of(scaling), positions)


def assert_same(x: Tensor, y: Tensor, parts: int = 1) -> None:
    """Equal in float64 up to a few thousand roundings of numbers of this size."""
    assert float((x - y).abs().max()) <= 1e-12 * parts * max(1.0, float(y.abs().max()))


# The equations.


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("q_rank", [None, 8])
@pytest.mark.parametrize("scaling", [None, YARN])
def test_is_the_paper(form: str, q_rank: int | None, scaling: YaRN | None) -> None:
    layer = build(form, q_rank=q_rank, scaling=scaling).double()
    for scale in (0.1, 1.0, 10.0):
        x = torch.randn(1, 7, M, dtype=torch.float64) * scale
        assert_same(layer(x, Span(1000, 7)), exact(layer, x, scaling, start=1000), parts=10)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_low_precision_follows_the_error_rule(form: str, dtype: torch.dtype) -> None:
    layer = build(form, q_rank=8, scaling=YARN).to(dtype)
    x = torch.randn(2, 9, M).to(dtype)
    ref = exact(layer, x, YARN, start=1000)
    plains = [
        oracle.plain(weights_of(layer), x, sizes_of(YARN), 1000, absorb=absorb)
        for absorb in (False, True)
    ]
    assert_close_rule(layer(x, Span(1000, 9)), plains, ref, what=form)
    steps = in_chunks(layer, x, [1] * 9, positions=Span(1000, 9))
    assert_close_rule(steps, plains, ref, what=f"{form}, step by step")


@pytest.mark.parametrize("form", FORMS)
def test_padding_changes_nothing_and_is_never_seen(form: str) -> None:
    """Rows of 3 and 6 tokens, padded on the left with NaN, at scattered positions."""
    layer = build(form, scaling=YARN).double()
    x = torch.randn(2, 6, M, dtype=torch.float64)
    positions = torch.tensor([[-1, -1, -1, 5, 6, 90], [0, 3, 4, 5, 70, 71]])
    poisoned = x.masked_fill((positions < 0)[..., None], math.nan)
    ref = oracle.latent_attention(x, weights_of(layer), sizes_of(YARN), positions.tolist())
    real = positions >= 0
    assert_same(layer(poisoned, positions)[real], ref[real], parts=10)
    cached = in_chunks(layer, poisoned, (2, 3, 1), layer.new_cache(), positions)
    assert_same(cached[real], ref[real], parts=10)


# The forms, and caches.


class Scattered(Growing):
    """Answers slots in another order, between empty ones that hold NaN: their positions alone tell
    what they are.
    """

    def update(self, memory: Parts, positions: Positions) -> tuple[Parts, Positions]:
        memory, positions = super().update(memory, positions)
        n = memory[0].shape[2]
        order = torch.randperm(n + 3)
        hole = order >= n
        order = order.clamp(max=n - 1)
        holed = (m[:, :, order].masked_fill(hole[:, None], math.nan) for m in memory)
        return tuple(holed), as_tensor(positions)[:, order].masked_fill(hole, -1)


@pytest.mark.full
@pytest.mark.parametrize("scaling", [None, YARN])
def test_all_forms_are_equal_under_any_cache_and_chunks(scaling: YaRN | None) -> None:
    x = torch.randn(2, 24, M, dtype=torch.float64)
    whole = build("naive", scaling=scaling).double()(x)
    for form in FORMS:
        layer = build(form, scaling=scaling).double()
        assert_same(layer(x), whole)
        for chunks in ((1,) * 24, (17, 1, 2, 3, 1), (3, 20, 1)):
            for cache in (layer.new_cache(), Scattered(), Fixed(24)):
                assert_same(in_chunks(layer, x, chunks, cache), whole)
                assert len(cache) == 24


def test_forms_may_alternate_on_one_cache() -> None:
    """Expand, absorb and auto remember the same."""
    x = torch.randn(1, 20, M, dtype=torch.float64)
    layers = [build(form).double() for form in ("expand", "absorb", "auto")]
    cache, parts = Growing(), []
    for i in range(0, 20, 4):
        parts.append(layers[i // 4 % 3](x[:, i : i + 4], None, cache))
    assert_same(torch.cat(parts, 1), layers[0](x))


@pytest.mark.parametrize(
    "form, numbers", [("naive", 48), ("expand", 10), ("absorb", 10), ("auto", 10)]
)
def test_a_cache_keeps_the_latent(form: str, numbers: int) -> None:
    """r + d_rope numbers per token; only the naive form keeps H (d_nope + d_rope + E)."""
    layer, cache = build(form), Growing()
    layer(torch.randn(2, 5, M), None, cache)
    assert cache.bytes == 2 * 5 * numbers * 4
    assert sum(layer.project.shape.memory) == numbers
    assert layer.describe(100).kv_per_token.value == numbers


@pytest.mark.parametrize("capacity", [None, 24])
def test_the_cache_of_latents_takes_latents_only(capacity: int | None) -> None:
    x = torch.randn(2, 24, M, dtype=torch.float64)
    whole = build("naive").double()(x)
    for form in ("expand", "absorb", "auto"):
        cache = LatentCache(6, 4, capacity=capacity)
        assert_same(in_chunks(build(form).double(), x, (17, 1, 2, 3, 1), cache), whole)
    cache = LatentCache(6, 4, capacity=capacity)
    with pytest.raises(regard.ArgumentError, match="store the latent, and expand it"):
        build("naive").double()(x, None, cache)
    assert len(cache) == 0


def test_absorbing_copies_nothing_and_expands_nothing() -> None:
    layer, cache = build(), Growing()
    expanded: list[int] = []
    layer.project.kv_up.register_forward_hook(
        lambda module, given, out: expanded.append(given[0].shape[1])
    )
    layer(torch.randn(1, 30, M), None, cache)
    assert expanded == [30], "a prompt is expanded"
    calls: list[Any] = []

    class Watch(regard.Trace):
        observes_calls = True

        def on_attention_call(self, call: Any, result: Any, kernel: str) -> None:
            calls.append(call)

    with regard.Trace("q", "k", "v") as trace, Watch():
        layer(torch.randn(1, 1, M), None, cache)
    assert expanded == [30], "a step is not"
    assert [trace[name].shape for name in "qkv"] == [(1, H, 1, 10), (1, 1, 31, 10), (1, 1, 31, 6)]
    (memory,) = (x for name, x in cache.contents().items() if name == "memory.0")
    (call,) = calls
    assert call.k.data_ptr() == call.v.data_ptr() == memory.data_ptr()


def test_z_is_the_same_in_every_form() -> None:
    x, heard = torch.randn(2, 6, M, dtype=torch.float64), []
    for form in FORMS:
        with regard.Trace("z", "out") as trace:
            out = build(form).double()(x)
        assert trace["z"].shape == (2, H, 6, SMALL["value_dim"])
        assert torch.equal(trace["out"], out)
        heard.append(trace["z"])
        with regard.Trace(edit={"z": lambda z: z * 0}):
            assert build(form).double()(x).eq(0).all()
    for z in heard[1:]:
        assert_same(z, heard[0])


# Which form, and what it costs.


def test_auto_takes_the_cheaper_form() -> None:
    """The condition is the comparison of the two formulas, for every heads, rotary dim and
    length.
    """
    make = torch.Generator().manual_seed(0)
    chosen = set()
    for _ in range(300):
        n, r, dn, dr, dv, T, more = (
            int(torch.randint(1, 40, (), generator=make)) for _ in range(7)
        )
        S = T + (more - 1) ** 2
        dear = cost.expand_flops(T, S, n, r, dn, dr, dv)
        cheap = cost.absorb_flops(T, S, n, r, dn, dr, dv)
        absorb = cost.absorbing_is_cheaper(T, S, kv_rank=r, nope_dim=dn, value_dim=dv)
        assert absorb == (cheap < dear), (n, r, dn, dr, dv, T, S)
        chosen.add(absorb)
    assert chosen == {True, False}
    layer = build()
    assert layer.project.select_form(40, 40) is layer.project
    assert isinstance(layer.project.select_form(1, 40), AbsorbedLatentProjection)
    for form, kind in (
        ("naive", NaiveLatentProjection),
        ("expand", LatentProjection),
        ("absorb", AbsorbedLatentProjection),
    ):
        assert {type(build(form).project.select_form(*n)) for n in ((1, 9), (9, 9))} == {kind}


def test_pairs_are_those_of_the_mask() -> None:
    for T, S in ((1, 1), (3, 5), (5, 5), (1, 7)):
        seen = masks.Causal().visible(Span(S - T, T), Span(0, S)).sum()
        assert cost.causal_pairs(T, S) == int(seen)


def test_the_figures_of_decoding_at_the_shape_of_v3() -> None:
    """One step, one layer, GFLOP."""
    size = (128, 512, 128, 64, 128)
    table = {
        1024: (34.443624448, 0.318767104, 108),
        8192: (275.548995584, 2.315255808, 119),
        65536: (2204.391964672, 18.28716544, 121),
    }
    for S, (dear, cheap, ratio) in table.items():
        assert cost.expand_flops(1, S, *size) == round(dear * 1e9)
        assert cost.absorb_flops(1, S, *size) == round(cheap * 1e9)
        assert round(dear / cheap) == ratio
    assert [attention_flops(1, D, E) for D, E in ((128, 128), (192, 128), (576, 512))] == [
        512,
        640,
        2176,
    ]


def test_the_figures_of_the_papers() -> None:
    """DeepSeek-V2, tables 1 and 9, and V3: numbers per token over all layers."""
    latent = cost.latent_values(512, 64)
    assert latent == 576
    assert latent * 60 == 34_560  # V2: "34.6K"
    assert 2 * 128 * 3360 == 860_160  # its large MHA model: n_h l = 3360, "860.2K"
    assert round(100 * 34_560 / 860_160) == 4
    assert (2 * 16 * 128 * 27, latent * 27) == (
        110_592,
        15_552,
    )  # the small ones: "110.6K", "15.6K"
    assert round(100 * 15_552 / 110_592) == 14
    assert 2 * latent * 61 == 70_272  # V3: bytes in bf16
    assert 128 * (128 + 64 + 128) == 40_960  # keys and values of every head
    assert round(40_960 / latent, 1) == 71.1
    assert latent == 9 * 128 // 2  # as much as 2.25 key/value heads of 128
    assert round(2 * 128 * 128 / latent) == 57


def test_the_shape_of_v3_without_its_memory() -> None:
    with torch.device("meta"):
        layer, naive = (mla(7168, 128, form=form, **V3) for form in ("auto", "naive"))
        (memory,) = layer.project.remember(torch.zeros(1, 3, 7168), Span(7, 3))
    assert memory.shape == (1, 1, 3, 576)
    assert memory.is_meta
    assert sum(naive.project.shape.memory) == 40_960
    matrices = (7168 + 128 * 192) * 1536 + 7168 * 576 + 128 * 256 * 512 + 128 * 128 * 7168
    assert layer.describe(1024).parameters.value == matrices + 1536 + 512
    form = layer.project.select_form(1, 1024)
    assert form.shape == (128, 1, 576, 512, (576,))
    assert layer.project.shape[:4] == (128, 128, 192, 128)


@pytest.mark.parametrize("form", FORMS)
def test_describe_counts_what_a_step_does(form: str) -> None:
    """FLOPs of all matrices once, and what the form adds: this is what torch counts in the
    reference kernel.
    """
    S, layer = 50, build(form, q_rank=8)
    cache = layer.new_cache()
    layer(torch.randn(1, S - 1, M), None, cache)
    from torch.utils.flop_counter import FlopCounterMode

    with FlopCounterMode(display=False) as counter:
        layer(torch.randn(1, 1, M), None, cache, backend="reference")
    told = layer.describe(S)
    assert told.flops_per_token.value == counter.get_total_flops()
    assert told.cached_values == S * sum(layer.project.shape.memory)
    again = "(expansion)" in told.flops_per_token.formula
    assert again == (form == "expand")
    assert told.parameters.value == sum(p.numel() for p in layer.parameters())


def test_the_scale() -> None:
    """1/sqrt(192) f(mscale_all_dim)^2: V3 has 1, V2 and V2-Lite 0.707; cos and sin keep the factor
    1.
    """
    for m, scale in ((1.0, 0.1352337788608801), (0.707, 0.11472138679292611)):
        scaling = YaRN(40.0, 4096, mscale=m, mscale_all_dim=m)
        with torch.device("meta"):
            layer = mla(64, 2, **{**V3, "scaling": scaling})
        assert layer.scale == layer.project.scale == pytest.approx(scale, rel=1e-15)
        assert layer.project.rotary.rotary_factor == 1.0
        assert layer.project.rotary.inv_freq[21] == pytest.approx(4.14990398491e-4, rel=1e-11)
        assert layer.project.rotary.inv_freq[31] == pytest.approx(3.33380358041e-6, rel=1e-11)
    with torch.device("meta"):
        assert mla(64, 2, **V3).scale == 192**-0.5


def test_the_default_scale_is_that_of_the_defined_heads() -> None:
    """An absorbed query is longer than a head; its scale is not."""
    x, outs = torch.randn(1, 6, M, dtype=torch.float64), []
    for form in ("expand", "absorb"):
        project = build(form).project
        layer = Attention(project, nn.Identity(), mask=masks.Causal()).double()
        outs.append(layer(x))
    assert_same(outs[1], outs[0])


# Negative controls: each is a mistake somebody shipped; tests/mutants/nn.toml has more.


class RotaryInFront(LatentProjection):
    """Turns the first dims of a query, where it has its part without position."""

    def parts(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        q = self.q(x, positions)
        d = self.rotary.dim
        q = torch.cat((self.rotary(q[..., :d], positions), q[..., d:]), -1)
        return q[..., : self.nope_dim], q[..., self.nope_dim :]


class NormOverAll(LatentProjection):
    """Norms the latent after the shared key was put beside it."""

    def remember(self, x: Tensor, positions: Positions) -> Parts:
        c, turned = self.kv_down(x).split((self.kv_rank, self.rotary.dim), -1)
        turned = self.rotary(turned[:, None], positions)[:, 0]
        whole = torch.cat((c, turned), -1)
        rms = (whole.square().mean(-1, keepdim=True) + 1e-6).sqrt()
        return (torch.cat((c / rms * self.kv_norm.weight, turned), -1)[:, None],)


def swap_up(layer: Any) -> None:
    """Values in front of keys."""
    weight = layer.project.kv_up.linear.weight
    up = weight.unflatten(0, (H, -1))
    dn = SMALL["nope_dim"]
    weight.copy_(torch.cat((up[:, dn:], up[:, :dn]), 1).flatten(0, 1))


def turn_halves(layer: Any) -> None:
    layer.project.rotary = Rotary(SMALL["rope_dim"], scaling=YARN, layout="half")


def forget_mscale(layer: Any) -> None:
    layer.scale = layer.project.shape.D**-0.5


@pytest.mark.parametrize("form", ["expand", "absorb"])
@pytest.mark.parametrize("mistake", [swap_up, turn_halves, forget_mscale], ids=lambda f: f.__name__)
def test_a_mistake_is_caught(form: str, mistake: Callable[[Any], None]) -> None:
    layer = build(form, scaling=YARN)
    x = torch.randn(1, 7, M)
    ref = exact(layer, x, YARN, start=1000)
    right = [
        oracle.plain(weights_of(layer), x, sizes_of(YARN), 1000, absorb=a) for a in (False, True)
    ]
    assert_close_rule(layer(x, Span(1000, 7)), right, ref)
    mistake(layer)
    with pytest.raises(AssertionError, match="error"):
        assert_close_rule(layer(x, Span(1000, 7)), right, ref)


@pytest.mark.parametrize("kind", [RotaryInFront, NormOverAll])
def test_a_mistaken_projection_is_caught(kind: type[LatentProjection]) -> None:
    layer = build()
    rotary = layer.project.rotary
    wrong = kind(M, H, rotary, kv_rank=6, nope_dim=5, value_dim=7)
    wrong.load_state_dict(layer.project.state_dict())
    x = torch.randn(1, 7, M)
    ref = exact(layer, x, start=1000)
    right = [oracle.plain(weights_of(layer), x, sizes_of(), 1000, absorb=a) for a in (False, True)]
    assert_close_rule(layer(x, Span(1000, 7)), right, ref)
    layer.project = wrong
    with pytest.raises(AssertionError, match="error"):
        assert_close_rule(layer(x, Span(1000, 7)), right, ref)


def test_a_rotary_key_per_head_is_caught() -> None:
    """Another key for each head, as in a well-known course: the shared one rolled by the head."""
    layer = build("naive").double()
    x = torch.randn(1, 7, M, dtype=torch.float64)
    dn = SMALL["nope_dim"]

    def differ(k: Tensor) -> Tensor:
        rolled = [torch.roll(k[:, h, :, dn:], h, -1) for h in range(H)]
        return torch.cat((k[..., :dn], torch.stack(rolled, 1)), -1)

    assert_same(layer(x), exact(layer, x), parts=10)
    with regard.Trace(edit={"k": differ}):
        wrong = layer(x)
    assert float((wrong - exact(layer, x)).abs().max()) > 1e-3
    with regard.Trace("k") as trace:
        layer(x)
    for h in range(1, H):
        assert torch.equal(trace["k"][:, h, :, dn:], trace["k"][:, 0, :, dn:]), "one key for all"


# What a module owes.


@pytest.mark.parametrize("form", FORMS)
def test_gradients(form: str) -> None:
    sizes = {"kv_rank": 4, "nope_dim": 3, "rope_dim": 2, "value_dim": 3, "q_rank": 3}
    layer = mla(4, 2, **sizes, form=form, scaling=YARN).double()
    names = [name for name, _ in layer.named_parameters()]
    start = [torch.randn_like(p).requires_grad_() for p in layer.parameters()]
    x = torch.randn(1, 3, 4, dtype=torch.float64, requires_grad=True)

    def run(x: Tensor, *parameters: Tensor) -> Tensor:
        state = dict(zip(names, parameters, strict=True))
        return torch.func.functional_call(layer, state, (x, Span(1000, 3)))

    with torch.enable_grad():
        assert torch.autograd.gradcheck(run, (x, *start), fast_mode=True)


def test_state_dict_is_parameters_and_fits_every_form() -> None:
    layer = build(q_rank=8)
    assert set(layer.state_dict()) == {
        "project.q.down.weight",
        "project.q.norm.weight",
        "project.q.up.linear.weight",
        "project.kv_down.weight",
        "project.kv_norm.weight",
        "project.kv_up.linear.weight",
        "output.weight",
    }
    assert list(layer.buffers()) == []
    x = torch.randn(1, 6, M)
    for form in FORMS:
        other = build(form, seed=1, q_rank=8)
        other.load_state_dict(layer.state_dict())
        assert_close_rule(
            other(x),
            oracle.plain(weights_of(layer), x, sizes_of(), 0, absorb=True),
            exact(layer, x),
        )
    other = copy.deepcopy(layer)
    assert torch.equal(other(x), layer(x))
    other.project.kv_up.linear.weight.zero_()
    assert other(x).eq(0).all()
    assert layer(x).ne(0).any()


def test_maps_down_may_have_a_bias() -> None:
    latent = LatentProjection(
        M, H, Rotary(4), kv_rank=6, nope_dim=5, value_dim=7, q_rank=8, bias=True
    )
    biased = [name for name in latent.state_dict() if name.endswith("bias")]
    assert biased == ["q.down.bias", "kv_down.bias"]


def test_a_rotary_that_follows_the_length_takes_no_cache() -> None:
    rotary = Rotary(4, scaling=DynamicNTK(2.0, 8), length="current")
    latent = LatentProjection(M, H, rotary, kv_rank=6, nope_dim=5, value_dim=7)
    layer = Attention(latent, nn.Linear(H * 7, M), mask=masks.Causal())
    assert layer(torch.randn(1, 12, M)).shape == (1, 12, M)
    for form in (latent, AbsorbedLatentProjection(latent)):
        assert form.cache_unsafe_reason is not None
    with pytest.raises(regard.ArgumentError, match=r"a cache was given, but .* follow the length"):
        layer(torch.randn(1, 2, M), None, Growing())


def test_errors() -> None:
    def latent(**sizes: Any) -> LatentProjection:
        given = {"dim": M, "heads": H, "kv_rank": 6, "nope_dim": 5, "value_dim": 7, **sizes}
        return LatentProjection(given.pop("dim"), given.pop("heads"), Rotary(4), **given)

    cases: list[tuple[Callable[[], object], str]] = [
        *[
            (lambda name=name: latent(**{name: 0}), f"{name} is 0; it must be at least 1")
            for name in ("dim", "heads", "kv_rank", "nope_dim", "value_dim")
        ],
        (lambda: latent(q_rank=-2), "q_rank is -2; it must be at least 1; None computes queries"),
        (lambda: latent(form="fast"), "form is 'fast'; it must be one of auto, expand, absorb"),
        (lambda: build("fast"), "form is 'fast'; it must be one of naive, auto, expand, absorb"),
        (lambda: build(rope_dim=5), "rope_dim is 5; it must be even and at least 2, since rotary"),
        (lambda: build(rope_dim=0), "rope_dim is 0; it must be even and at least 2, since rotary"),
        (lambda: build(kv_rank=0), "kv_rank is 0; it must be at least 1"),
    ]
    assert_refused(cases)


def test_a_cache_of_another_shape_is_refused() -> None:
    """What one rank remembered, another cannot read."""
    cache: Cache = Growing()
    build()(torch.randn(1, 3, M), None, cache)
    held: Mapping[str, Any] | Contents = cache.contents()
    with pytest.raises(regard.ArgumentError, match="does not fit the contents of the cache"):
        build(kv_rank=8)(torch.randn(1, 1, M), None, cache)
    with pytest.raises(regard.ArgumentError, match=r"memory .* does not fit"):
        build("naive")(torch.randn(1, 1, M), None, cache)
    assert cache.contents().keys() == held.keys()
    assert len(cache) == 3
