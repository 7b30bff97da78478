"""Values carried over from the first layer, through a whole decoder: the definition, every way to
run it with caches, what an explanation shows, and what is refused.
"""

from __future__ import annotations

import copy
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard.caches import Evicting, Growing, Ring, State, load, save
from regard.caches.cross_layer import FirstValues, WithFirstValues
from regard.errors import ArgumentError
from regard.inspect import explain
from regard.inspect.explain.random_model import random_model
from regard.masks import Document
from regard.models.decoder import Decoder
from regard.models.families.regard import Config, build
from regard.models.generation.cache_config import CacheConfig
from regard.nn.variants import gqa, rwkv7, value_residual
from regard.sequence_scope import use_scope
from regard.span import Span
from tests.integrations.pytorch.matrix.transforms import onnx_session, traced_onnx_file
from tests.models.step_models import why_not
from tests.nn.catalogue import randomize
from tests.oracles.carried import rwkv7_layer
from tests.rules import assert_close_rule

T = 13
OPTIONS: dict[str, dict[str, Any]] = {
    "value_residual": {"groups": 2},
    "rwkv7": {"rank": 3, "value_rank": 2, "gate_rank": 5},
}
every = pytest.mark.parametrize("name", OPTIONS)


def decoder(name: str, layers: int = 3, seed: int = 0, **config: Any) -> Decoder:
    torch.manual_seed(seed)
    built = build(
        Config(
            vocab_size=23,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=layers,
            num_attention_heads=4,
            attention=name,
            attention_options=OPTIONS[name],
            **config,
        )
    )
    return randomize(built.double(), seed).eval()  # type: ignore[return-value]


def ids(B: int = 2, n: int = T) -> Tensor:
    return torch.randint(0, 23, (B, n), generator=torch.Generator().manual_seed(3))


def softmax_layer(a: Any, n: Tensor, first: Tensor | None) -> tuple[Tensor, Tensor]:
    """Grouped attention over one text [T, M], by hand, and its values [G, T, E]."""
    where, project = Span(0, len(n)), a.project
    q, k = project.q(n[None], where)[0], project.k(n[None], where)[0]
    v = (n @ project.v.linear.weight.mT).unflatten(-1, (2, 4)).transpose(0, 1)
    if first is not None:
        s = project.share.item()
        v = s * v + (1 - s) * first
    heads = []
    for h in range(4):
        scores = (q[h] @ k[h // 2].mT / 2).masked_fill(torch.ones(T, T).triu(1) > 0, -torch.inf)
        heads.append(scores.softmax(-1) @ v[h // 2])
    return torch.cat(heads, -1) @ a.output.weight.mT, v


def by_hand(network: Decoder, x: Tensor, *, last: bool = False) -> Tensor:
    """The definition of one text: each layer behind the first one gets the values of the first
    (with `last`, a wrong variant, those of the layer before).
    """
    h, given = network.embed(x, Span(0, T))[0], None
    for layer in network.layers:
        a: Any = layer.attention
        norms: list[Any] = [layer.attention_residual, layer.feed_forward_residual]
        run = softmax_layer if hasattr(a, "project") else rwkv7_layer
        out, v = run(a, norms[0].norm(h[None])[0], given)  # type: ignore[operator]
        given = v if given is None or last else given
        h = h + out
        h = h + layer.feed_forward(norms[1].norm(h[None]))[0]
    return network.head(network.norm(h[None]))[0]  # type: ignore[misc]


def far(x: Tensor, y: Tensor) -> float:
    return float((x - y).abs().max()) / float(y.abs().max())


@every
@torch.no_grad()
def test_a_decoder_is_its_definition(name: str) -> None:
    network, x = decoder(name), ids(1)
    assert far(network(x)[0], by_hand(network, x)) < 1e-11
    assert far(by_hand(network, x, last=True), by_hand(network, x)) > 1e-3, "negative control"


@torch.no_grad()
def test_a_share_of_1_is_grouped_query_attention() -> None:
    network, x = decoder("value_residual"), ids()
    plain = decoder("value_residual")
    for ours, other in zip(network.layers, plain.layers, strict=True):
        a: Any = ours.attention
        other.attention = gqa(16, 4, groups=2).double()
        other.attention.load_state_dict(
            {k: v for k, v in a.state_dict().items() if "share" not in k}
        )
        if a.project.share is not None:
            a.project.share.fill_(1.0)
    plain._carriers = frozenset()
    assert torch.equal(network(x), plain(x))


@torch.no_grad()
def test_a_share_of_0_is_svformer() -> None:
    """Every layer reads the values of the first one at its own keys."""
    network: Any = decoder("value_residual")
    caches = network.new_caches()
    for layer in network.layers[1:]:
        layer.attention.project.share.zero_()
    network(ids(), None, caches)
    keys, values = ([cache.contents()[f"memory.{i}"] for cache in caches] for i in (0, 1))
    assert all(torch.equal(x, values[0]) for x in values)
    assert far(keys[1], keys[0]) > 1e-3, "negative control"


@every
@pytest.mark.parametrize("sizes", [[T], [2, 7, 1, 1, 2], [9] + [1] * 4])
@torch.no_grad()
def test_any_chunks_are_one_pass(name: str, sizes: list[int]) -> None:
    network, x = decoder(name), ids()
    caches, out, start = network.new_caches(), [], 0
    for n in sizes:
        out.append(network(x[:, start : start + n], None, caches))
        start += n
    assert far(torch.cat(out, 1), network(x)) < 1e-11
    kind = State if name == "rwkv7" else Growing
    assert [type(cache) for cache in caches] == [kind] * 3, "nothing else is kept between calls"


@every
@torch.no_grad()
def test_padding_forks_crops_and_files(name: str, tmp_path: Any) -> None:
    network, x = decoder(name), ids()
    positions = torch.stack([torch.arange(9), torch.tensor([-1] * 4 + list(range(5)))])
    caches = network.new_caches()
    network(x[:, :9], positions, caches)
    forks = [cache.fork() for cache in caches]
    for cache in forks:
        cache.reorder(torch.tensor([1, 0]))
    out, swapped = network(x[:, 9:], None, caches), network(x[:, 9:].flip(0), None, forks)
    alone = network(x[1:, 4:])[:, -4:]
    assert far(out[1:], alone) < 1e-11
    assert far(out, swapped.flip(0)) < 1e-11
    stored = []
    for i, cache in enumerate(caches):
        save(cache, tmp_path / f"{i}.safetensors")
        stored.append(load(tmp_path / f"{i}.safetensors"))
    assert torch.equal(network(x[:, :1], None, caches), network(x[:, :1], None, stored))
    if name == "value_residual":
        again = network.new_caches()
        network(x, None, again)
        for cache in again:
            cache.crop(9)
        assert far(network(x[:, 9:], None, again), network(x)[:, 9:]) < 1e-11


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("kind", ["ring", "streaming", "fixed", "paged", "h2o", "tova"])
@torch.no_grad()
def test_every_cache_of_generation_serves_it(kind: str) -> None:
    network, x = decoder("value_residual"), ids()
    forgets = kind not in ("fixed", "paged")
    config = CacheConfig(kind, 8 if forgets else T)
    narrow = config.restrict(network)
    whole = narrow(x)
    assert (far(whole, network(x)) > 1e-4) == forgets
    caches = config.new_caches(narrow, 2)
    assert all(isinstance(cache, Evicting) for cache in caches) == (kind in ("h2o", "tova"))
    assert all(isinstance(cache, Ring) for cache in caches) or kind != "ring"
    out = [narrow(x[:, :9], None, caches)]
    out += [narrow(x[:, i : i + 1], None, caches) for i in range(9, T)]
    assert far(torch.cat(out, 1), whole) < 1e-11


@every
def test_gradients_reach_the_first_layer_through_the_values(name: str) -> None:
    network, x = decoder(name, layers=2), ids(1, 5)
    network(x).square().sum().backward()
    assert [n for n, p in network.named_parameters() if p.grad is None] == []
    a: Any = network.layers[0].attention
    weight = (a.project if name == "value_residual" else a).v.linear.weight
    found, step = weight.grad[1, 2].item(), 1e-6
    sums = []
    with torch.no_grad():
        for sign in (1, -1):
            weight[1, 2] += sign * step
            sums.append(float(network(x).square().sum()))
            weight[1, 2] -= sign * step
    assert found == pytest.approx((sums[0] - sums[1]) / (2 * step), rel=1e-6)


@every
@pytest.mark.full
def test_it_compiles_and_the_compiled_step_says_why_not(name: str) -> None:
    network, x = decoder(name), ids()
    torch._dynamo.reset()
    compiled = torch.compile(network, backend="eager", fullgraph=True)
    with torch.no_grad():
        assert far(compiled(x), network(x)) < 1e-11
        single = network.float()
        reasons = str(why_not(single, single.new_caches()))
    assert ("ValueResidualQKV" if name == "value_residual" else "RWKV7") in reasons


@pytest.mark.full
def test_an_onnx_file_holds_the_mix() -> None:
    """RWKV-7 is refused, as every recurrence is."""
    pytest.importorskip("onnx")
    network = decoder("value_residual").float()
    run = onnx_session(traced_onnx_file(network, (ids(),), ((1, "T"),)))
    for n in (1, 5, 19):
        x = ids(2, n)
        with torch.no_grad():
            wide = copy.deepcopy(network).double()(x)
            assert_close_rule(run(x)[0], [network(x)], wide, what=str(n))
    with pytest.raises(ArgumentError, match="RWKV7, which splits the sequence into chunks"):
        traced_onnx_file(decoder("rwkv7").float(), (ids(),), ((1, "T"),))


@pytest.mark.parametrize("layer", [0, 1])
@every
def test_an_explanation_shows_the_mixed_values(name: str, layer: int) -> None:
    """Its checks compare the steps of v with what the run gave the kernel."""
    model = random_model(name, "a fluffy blue creature roamed the verdant forest")
    f = explain(model, layer=layer, head=1, query=7)
    assert f.check < 2e-5, f.checks
    assert "v" in f.checks
    names = [step.name for step in f.inputs.values]
    if name == "value_residual":
        assert ("mixed with the first layer" in names) == (layer > 0)
    else:
        assert ("of the first layer" in f.inputs.values[-1].equation) == (layer > 0)


@every
@torch.no_grad()
def test_a_recording_has_every_layer(name: str) -> None:
    network, x = decoder(name), ids(1)
    with regard.Trace("v") as trace:
        network(x)
    a: Any = network.layers[2].attention
    with regard.Trace("norm") as norms:
        network(x)
    n = norms["layers.2.attention.norm"]
    part = a.project.v if name == "value_residual" else a.v
    before = part(n, Span(0, T))
    assert far(trace["layers.2.v"], before) > 1e-2, "the tap has the mixed values"


@every
@torch.no_grad()
def test_a_call_that_raises_changes_no_cache(name: str) -> None:
    network, x = decoder(name), ids()
    caches = network.new_caches()
    network(x[:, :5], None, caches)
    held = caches[0].bytes
    wrong = [*caches[:2], Growing() if name == "rwkv7" else caches[2].fork()]
    if name == "value_residual":
        wrong[2].reset()
        wrong[2].update((torch.zeros(1, 2, 5, 4).double(),) * 2, Span(0, 5))
    with pytest.raises((ArgumentError, TypeError)):
        network(x[:, 5:7], None, wrong)
    assert caches[0].bytes == held
    assert far(network(x[:, 5:], None, caches), network(x)[:, 5:]) < 1e-11


@torch.no_grad()
def test_packed_documents_of_rwkv7_do_not_see_one_another() -> None:
    """Neither the state nor the token before reaches the next document."""
    layer: Any = randomize(rwkv7(16, 4, **OPTIONS["rwkv7"]).double(), 0).eval()
    x = torch.randn(1, T, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    right = torch.cat([layer(x[:, :4]), layer(x[:, 4:])], 1)
    assert far(layer(x), right) > 1e-3, "negative control"
    layer.documents = Document((0, 4, T))
    cache = layer.new_cache()
    assert far(layer(x), right) < 1e-11
    steps = [layer(part, None, cache) for part in x.split([2, 5, T - 7], 1)]
    assert far(torch.cat(steps, 1), right) < 1e-11


@every
def test_several_ranks_are_refused(name: str) -> None:
    with (
        use_scope(SimpleNamespace()),  # type: ignore[arg-type]
        pytest.raises(ArgumentError, match="shares keys and values between layers"),
    ):
        decoder(name)(ids(1), Span(0, T))


def test_what_is_refused() -> None:
    x = torch.zeros(1, 3, 16)
    later = {
        "value_residual": value_residual(16, 4, groups=2, layer=1),
        "rwkv7": rwkv7(16, 4, layer=1, **OPTIONS["rwkv7"]),
    }
    for layer in later.values():
        with pytest.raises(ArgumentError, match="mixes its values with those of the first layer"):
            layer(x)
        with pytest.raises(ArgumentError, match="no earlier layer of this call has given any"):
            layer(x, cache=WithFirstValues(None, FirstValues()))
        narrow = FirstValues(torch.zeros(1, 3, 6))
        with pytest.raises(ArgumentError, match="the first layer have 6 channels, and this layer"):
            layer(x, cache=WithFirstValues(None, narrow))
    first = value_residual(16, 4, groups=2)
    shared = FirstValues()
    first(x, cache=WithFirstValues(None, shared))
    with pytest.raises(ArgumentError, match="two layers of this call give the values of the first"):
        first(x, cache=WithFirstValues(None, shared))
    with pytest.raises(ArgumentError, match="layer is -1; it must be at least 0"):
        value_residual(16, 4, groups=2, layer=-1)
    with pytest.raises(ArgumentError, match="layer is -1; it must be at least 0"):
        rwkv7(16, 4, layer=-1)
    with pytest.raises(ArgumentError, match="share is nan; it must be finite"):
        value_residual(16, 4, groups=2, share=float("nan"))
    with pytest.raises(ArgumentError, match="eps is 0"):
        type(later["rwkv7"])(16, 4, 4, is_first=True, eps=0.0)


def test_positions_a_window_and_the_cost_of_each_layer() -> None:
    """The mix is a part of the projection, so that other positions and windows apply as elsewhere;
    the share of each later layer is counted.
    """
    for position, window in (("alibi", None), ("rope", 4)):
        network, x = decoder("value_residual", position=position, window=window), ids()
        with torch.no_grad():
            caches = network.new_caches()
            steps = [network(x[:, i : i + 1], None, caches) for i in range(T)]
            assert far(torch.cat(steps, 1), network(x)) < 1e-11
    for name, options in OPTIONS.items():
        config = Config(
            vocab_size=23,
            hidden_size=16,
            intermediate_size=24,
            num_hidden_layers=3,
            num_attention_heads=4,
            attention=name,
            attention_options=options,
        )
        counted = config.sizes("x").parameters
        assert counted == sum(p.numel() for p in build(config).parameters()), name
