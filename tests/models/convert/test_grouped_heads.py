"""Other numbers of key/value heads: exact where they can be, optimal where they are not, never
strided.
"""

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest
import torch

from regard.errors import ArgumentError
from regard.models.assembly import building_blocks
from regard.models.convert import Checkpoint, to_groups
from regard.models.convert.attention_maps import AttentionMaps, rebuild
from tests.models.convert import oracle, some
from tests.models.convert.some import FAR, ROUNDING, distance

WITH_HEADS: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {"sliding_window": 7},
    "qwen2": {},
    "qwen3": {},
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "olmo2": {},
    "phi3": {},
    "gemma": {},
    "gemma2": {"query_pre_attn_scalar": 10},
    "gemma3_text": {"query_pre_attn_scalar": 10},
}


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("name", WITH_HEADS)
def test_more_heads_are_exact(name: str) -> None:
    before = some.of(name, **WITH_HEADS[name])
    after, step = to_groups(before, 4)
    assert after.config.num_key_value_heads == 4
    assert after.network.layers[0].attention.project.k.heads == 4
    assert distance(before, after) < ROUNDING
    assert step.layers == ((0.0, 0.0),) * 2
    back, step = to_groups(after, 2)
    assert distance(before, back) < ROUNDING
    assert max(max(errors) for errors in step.layers) == 0


def test_a_norm_of_all_keys_is_pooled_like_them() -> None:
    before = some.of("olmo2")
    layers = [x.attention.project.k for x in before.network.layers]
    for layer in layers:
        layer.flat.weight.data.normal_()
    after, _ = to_groups(before, 1)
    for old, new in zip(layers, after.network.layers, strict=True):
        mean = old.flat.weight.unflatten(0, (2, -1)).mean(0)
        assert torch.equal(new.attention.project.k.flat.weight, mean)


def test_more_heads_give_the_same_bits_in_float32() -> None:
    before = some.llama()
    before.network.float()
    after, _ = to_groups(before, 4)
    assert torch.equal(some.logits(before), some.logits(after))


def test_a_layer_is_what_the_definition_says() -> None:
    """Three of six key/value heads against loops: the mean of neighbours, read by the right
    queries.
    """
    before = some.llama(num_attention_heads=6, num_key_value_heads=6)
    after, _ = to_groups(before, 3)
    block, old = after.network.layers[1], oracle.maps(before.network.layers[1])
    for name in "kv":
        old[name] = np.stack([(old[name][2 * g] + old[name][2 * g + 1]) / 2 for g in range(3)])
    x = np.random.default_rng(0).standard_normal((9, 24))
    freq = building_blocks.rotary_module(before.config.rope).inv_freq.numpy()
    expected = oracle.attention(x, **old, freq=freq)
    found = block.attention(torch.from_numpy(x)[None])[0].numpy()
    assert np.abs(found - expected).max() < ROUNDING * np.abs(expected).max()
    # heads that are pooled with a stride: the mistake that this is here to find
    old["k"], old["v"] = (
        np.stack([(m[g] + m[g + 3]) / 2 for g in range(3)])
        for m in (oracle.maps(before.network.layers[1])[n] for n in "kv")
    )
    strided = oracle.attention(x, **old, freq=freq)
    assert np.abs(found - strided).max() > FAR * np.abs(expected).max()


def equal_neighbours(stride: bool = False) -> Checkpoint:
    """Four key/value heads of which two and two are equal."""
    held = some.llama(num_key_value_heads=4)
    for block in held.network.layers:
        maps = oracle.maps(block)
        order = [0, 1, 0, 1] if stride else [0, 0, 1, 1]
        oracle.set_maps(block, k=maps["k"][order], v=maps["v"][order])
    return held


@pytest.mark.parametrize("pooling", ["mean", "svd"])
def test_equal_heads_lose_nothing(pooling: Any) -> None:
    before = equal_neighbours()
    after, step = to_groups(before, 2, pooling)
    assert distance(before, after) < ROUNDING
    assert max(max(errors) for errors in step.layers) < 1e-13
    strided = equal_neighbours(stride=True)
    wrong, step = to_groups(strided, 2, pooling)
    assert distance(strided, wrong) > FAR
    assert min(min(errors) for errors in step.layers) > 0.1


def related(held: Checkpoint, *, rotary: bool) -> Checkpoint:
    """Neighbours of one key up to a factor that commutes with the rotation, and of one value up to
    a matrix.
    """
    make = np.random.default_rng(3)
    for block in held.network.layers:
        maps = oracle.maps(block)
        k, v = maps["k"], maps["v"]
        n = k.shape[1] // 2
        for g in range(1, len(k)):
            v[g] = make.standard_normal((v.shape[1],) * 2) @ v[0]
            if rotary:
                c = make.standard_normal(n) + 1j * make.standard_normal(n)
                z = c[:, None] * (k[0, :n] + 1j * k[0, n:])
                k[g] = np.concatenate([z.real, z.imag])
            else:
                k[g] = make.standard_normal((2 * n, 2 * n)) @ k[0]
        oracle.set_maps(block, k=k, v=v)
    return held


@pytest.mark.parametrize("rotary", [True, False])
def test_svd_finds_what_heads_have_in_common(rotary: bool) -> None:
    """Such heads become one without loss, which no mean can do."""
    made = some.llama(num_key_value_heads=4) if rotary else some.own(groups=4)
    before = related(made, rotary=rotary)
    after, step = to_groups(before, 1, "svd")
    assert distance(before, after) < 1e-9
    assert max(max(errors) for errors in step.layers) < 1e-9
    pooled, _ = to_groups(before, 1, "mean")
    assert distance(before, pooled) > FAR


def biased(name: str = "qwen2") -> Checkpoint:
    return some.of(name, num_key_value_heads=4)


@pytest.mark.parametrize("groups", [1, 2])
def test_svd_is_as_good_as_can_be(groups: int) -> None:
    """Eckart and Young from the whole matrices: values [n M, M] of each group; keys one complex row
    for each pair.
    """
    before = biased()
    _, step = to_groups(before, groups, "svd")
    for block, errors in zip(before.network.layers, step.layers, strict=True):
        layer = AttentionMaps.of(block)
        q, k, v, o = (x.numpy() for x in (layer.q, layer.k, layer.v, layer.o))
        g, n = layer.gain.numpy(), len(k) // groups
        assert g[:-1] == pytest.approx(oracle.gain(block))
        lost, whole = 0.0, 0.0
        for group in range(groups):
            heads = range(group * n, (group + 1) * n)  # of queries and of keys: there are as many
            s = np.linalg.svd(np.concatenate([o[h] @ v[h] * g for h in heads]), compute_uv=False)
            lost, whole = lost + (s[v.shape[1] :] ** 2).sum(), whole + (s**2).sum()
        assert errors.values == pytest.approx((lost / whole) ** 0.5, rel=1e-9)
        lost, whole, P = 0.0, 0.0, k.shape[1] // 2
        for i in range(P):
            for group in range(groups):
                rows = []
                for h in range(group * n, (group + 1) * n):
                    query, key = (m[h, i] + 1j * m[h, i + P] for m in (q, k))
                    rows.append(np.linalg.norm(query * g) * key * g)
                s = np.linalg.svd(np.stack(rows), compute_uv=False)
                lost, whole = lost + (s[1:] ** 2).sum(), whole + (s**2).sum()
        assert errors.keys == pytest.approx((lost / whole) ** 0.5, rel=1e-9)


def test_svd_loses_less_than_the_mean() -> None:
    before = biased()
    _, better = to_groups(before, 2, "svd")
    _, worse = to_groups(before, 2, "mean")
    for a, b in zip(better.layers, worse.layers, strict=True):
        assert a.keys < b.keys
        assert a.values < b.values


def test_queries_take_the_factor_of_their_own_head() -> None:
    """A layer pooled by svd against loops, in which each head has its own key again: the row and
    the best factor.
    """
    before = some.llama(num_key_value_heads=4)
    after, _ = to_groups(before, 2, "svd")
    block, new, old = (
        after.network.layers[0],
        *(oracle.maps(m.network.layers[0]) for m in (after, before)),
    )
    g, P = oracle.gain(before.network.layers[0]), 5
    k, v, o = np.zeros_like(old["k"]), np.zeros_like(old["v"]), old["o"].copy()
    for j in range(4):
        row, mine = (m["k"][i, :P] + 1j * m["k"][i, P:] for m, i in ((new, j // 2), (old, j)))
        c = ((mine * g) * (row * g).conj()).sum(1) / (np.abs(row * g) ** 2).sum(1)
        z = c[:, None] * row
        k[j] = np.concatenate([z.real, z.imag])
        shared = new["v"][j // 2]
        v[j] = (old["v"][j] * g) @ np.linalg.pinv(shared * g) @ shared
    x = np.random.default_rng(0).standard_normal((7, 24))
    freq = building_blocks.rotary_module(before.config.rope).inv_freq.numpy()
    expected = oracle.attention(x, old["q"], k, v, o, freq=freq)
    found = block.attention(torch.from_numpy(x)[None])[0].numpy()
    # the values' best matrix is weighted by the outputs, which a square one leaves alone
    assert np.abs(found - expected).max() < 1e-9 * np.abs(expected).max()


def test_tied_heads_stay_tied_and_the_source_stays_as_it_was() -> None:
    before = some.llama(tie_word_embeddings=True)
    copies = {name: x.clone() for name, x in before.weights().items()}
    for pooling in ("mean", "svd"):
        after, _ = to_groups(before, 1, pooling)  # type: ignore[arg-type]
        assert after.network.head.weight is after.network.embed.embedding.weight
    assert all(torch.equal(x, copies[name]) for name, x in before.weights().items())


def test_regards_own_grouped_queries() -> None:
    before = some.own(position="rope")
    after, _ = to_groups(before, 4)
    assert after.config.attention_options["groups"] == 4
    assert distance(before, after) < ROUNDING


def test_a_scaling_that_follows_the_length() -> None:
    scaling = {"rope_type": "dynamic", "factor": 2.0}
    before = related(
        some.llama(num_key_value_heads=4, rope_scaling=scaling, max_position_embeddings=8),
        rotary=True,
    )
    after, _ = to_groups(before, 1, "svd")
    assert distance(before, after) < 1e-9


@pytest.mark.parametrize(
    "groups, pooling, message",
    [
        (3, "mean", "2 key/value heads cannot become 3 for 4 query heads; possible are 1, 4"),
        (8, "mean", "2 key/value heads cannot become 8"),
        (2, "mean", "the model has 2 key/value heads for 4 query heads already; possible numbers"),
        (1, "first", "groups are pooled by 'first'; it is mean or svd"),
    ],
)
def test_numbers_that_do_not_fit(groups: int, pooling: Any, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        to_groups(some.llama(), groups, pooling)


def test_models_that_cannot() -> None:
    with pytest.raises(ArgumentError, match="a norm follows the maps of queries and keys"):
        to_groups(some.of("qwen3"), 1, "svd")
    with pytest.raises(ArgumentError, match="a norm follows"):
        to_groups(some.of("olmo2"), 1, "svd")
    gpt = some.of("gpt2", n_positions=32, n_embd=24, n_layer=1, n_head=4)
    with pytest.raises(ArgumentError, match="uses FusedQKV, not separate maps"):
        to_groups(gpt, 2)
    other = some.of("regard", attention="mha", position="none")
    with pytest.raises(ArgumentError, match="the config regard has no number of key/value heads"):
        to_groups(other, 2)


def test_weights_must_be_of_the_model() -> None:
    held = some.llama()
    weights = held.weights()
    weights["norm.weight"] = torch.ones(3)
    with pytest.raises(AssertionError, match="norm"):
        rebuild(held.config, weights)
    with pytest.raises(AssertionError, match="the network has no parameters"):
        rebuild(held.config, held.weights() | {"embed.positional.weight": torch.ones(3)})


def test_measured_inputs_weight_what_is_lost() -> None:
    """Values pooled on ids: the error of the report is that of the outputs for the real inputs, and
    less than without ids, whose report is of other inputs.
    """
    before = biased()
    ids = some.ids(before)
    seen = {}
    for i, layer in enumerate(before.network.layers):

        def keep(_: Any, inputs: Any, i: int = i) -> None:
            seen.setdefault(i, inputs[0].flatten(0, 1))

        layer.attention.register_forward_pre_hook(keep)
    some.logits(before)

    def lost(after: Checkpoint, i: int) -> float:
        x = torch.cat([seen[i], torch.ones(len(seen[i]), 1).double()], 1)
        old, new = (AttentionMaps.of(c.network.layers[i]) for c in (before, after))
        wrong, whole = 0.0, 0.0
        for h in range(len(old.q)):
            was = x @ (old.o[h] @ old.v[h // old.share]).mT
            now = x @ (new.o[h] @ new.v[h // new.share]).mT
            wrong, whole = (
                wrong + float((was - now).square().sum()),
                whole + float(was.square().sum()),
            )
        return (wrong / whole) ** 0.5

    on_inputs, step = to_groups(before, 1, "svd", ids)
    without, _ = to_groups(before, 1, "svd")
    for i, errors in enumerate(step.layers):
        assert errors.values == pytest.approx(lost(on_inputs, i), rel=0.02), "but for the ridge"
        assert lost(on_inputs, i) < 0.98 * lost(without, i)
