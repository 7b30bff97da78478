"""Latents of grouped queries: exact where nothing turns and at one head, optimal at a rank, and
what transformers computes.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import regard
from regard.errors import ArgumentError
from regard.models.assembly import building_blocks
from regard.models.convert import Checkpoint, to_dtype, to_groups, to_latent
from regard.models.convert import latent_attention as subject
from regard.models.convert.attention_maps import AttentionMaps
from regard.models.convert.latent_attention import mean_rotation
from regard.models.model import Model
from regard.models.save import save
from tests.models.convert import oracle, some
from tests.models.convert.some import FAR, distance
from tests.models.convert.test_grouped_heads import related

os.environ.setdefault("HF_HUB_OFFLINE", "1")


def undone(held: Checkpoint) -> float:
    """How far the norm on latents may be off, of each number: |c|^2 / 2 C^2 with |c|^2 at most M +
    1 and C at least 2^14.
    """
    return (held.config.hidden_size + 1) / 2 / 2.0**28


@pytest.mark.parametrize("groups", [1, 2, 4])
def test_without_rotary_the_full_rank_is_exact(groups: int) -> None:
    before = some.own(groups=groups)
    after, step = to_latent(before)
    assert after.model_type == "deepseek_v2"
    # what an error of a latent does behind two layers and three more norms: some tens of times as
    # much
    assert distance(before, after) < 50 * undone(before)
    assert max(max(errors) for errors in step.layers) < 1e-12
    project = after.network.layers[0].attention.project
    assert project.kv_rank == min(2 * 10 * groups, 25) + 1


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}]
)
def test_one_head_with_rotary_is_exact(scaling: Any) -> None:
    """The rotary key is the head's; the latent has its values."""
    before = some.llama(num_key_value_heads=1, rope_scaling=scaling)
    after, step = to_latent(before)
    assert distance(before, after) < 50 * undone(before)
    assert max(max(errors) for errors in step.layers) < 1e-12
    assert after.config.kv_lora_rank == 10 + 1
    assert after.config.rope_scaling == scaling
    assert after.network.layers[0].attention.project.shape.memory == (11 + 10,)


def test_heads_whose_keys_differ_by_a_factor_are_exact() -> None:
    before = related(some.llama(num_key_value_heads=4), rotary=True)
    after, _ = to_latent(before)
    assert distance(before, after) < 50 * undone(before)
    far, _ = to_latent(some.llama(num_key_value_heads=4))
    assert distance(some.llama(num_key_value_heads=4), far) > FAR


@pytest.mark.parametrize("wrong", ["factor", "turn", "interleaved", "scale", "constant"])
def test_wrong_conversions_are_far(wrong: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The factor on the wrong side, a rotary key left in halves, a scale of other dims, a constant
    that counts.
    """
    before = related(some.llama(num_key_value_heads=4), rotary=True)
    if wrong == "factor":
        split = subject.split_rotary

        def conjugated(*arguments: Any) -> Any:
            from dataclasses import replace

            found = split(*arguments)
            return replace(found, factor=found.factor.conj())

        monkeypatch.setattr(subject, "split_rotary", conjugated)
    after, _ = to_latent(before)
    for block in after.network.layers:
        project = block.attention.project
        if wrong == "interleaved":
            project.rotary.layout, project.rotary._last = "half", None
        if wrong == "scale":
            block.attention.scale = 10**-0.5
        if wrong == "constant":
            project.kv_norm.weight.data[:] = 1
        if wrong == "turn":
            project.q.linear.weight.data[-5:] *= -1
    assert distance(before, after) > FAR


def test_the_error_is_that_of_eckart_and_young() -> None:
    """Whole matrices in numpy: score forms [H M, M] and value-output maps [H M, M], each over its
    norm.
    """
    before = some.own(groups=2)
    for rank in (4, 9, 16):
        _, step = to_latent(before, rank)
        for block, errors in zip(before.network.layers, step.layers, strict=True):
            m, g = oracle.maps(block), oracle.gain(block)
            scores = np.concatenate([(m["q"][h] * g).T @ (m["k"][h // 2] * g) for h in range(4)])
            values = np.concatenate([m["o"][:, h] @ (m["v"][h // 2] * g) for h in range(4)])
            both = np.concatenate([x / np.linalg.norm(x) for x in (scores, values)])
            s = np.linalg.svd(both, compute_uv=False)
            bound = float((s[rank - 1 :] ** 2).sum()) ** 0.5
            assert np.hypot(*errors) == pytest.approx(bound, rel=1e-9)


def test_the_curve_falls_and_is_what_ranks_lose() -> None:
    before = some.own(groups=2)
    _, step = to_latent(before, 9)
    values = list(step.curve.values())
    assert values == sorted(values, reverse=True)
    assert values[-1] < 1e-12
    worst = []
    for rank in range(2, 27, 4):
        _, found = to_latent(before, rank)
        worst.append(found.layers[0])
        expected = np.sqrt(np.mean([np.square(e).sum() / 2 for e in found.layers]))
        if rank in step.curve:
            assert step.curve[rank] == pytest.approx(expected, rel=1e-9, abs=1e-12)
    assert len({*range(2, 27, 4)} & {*step.curve}) >= 4
    totals = [np.hypot(*errors) for errors in worst]
    assert totals == sorted(totals, reverse=True)
    assert totals[0] > 0.5


def test_a_layer_at_a_rank_is_what_the_definition_says() -> None:
    """Loops in which each head has its own key and value again, projected on the subspace that
    numpy finds.
    """
    before, rank = some.own(groups=2), 12
    after, _ = to_latent(before, rank)
    block = before.network.layers[0]
    m, g = oracle.maps(block), oracle.gain(block)
    scores = np.concatenate([(m["q"][h] * g).T @ (m["k"][h // 2] * g) for h in range(4)])
    values = np.concatenate([m["o"][:, h] @ (m["v"][h // 2] * g) for h in range(4)])
    both = np.concatenate([x / np.linalg.norm(x) for x in (scores, values)])
    rows = np.linalg.svd(both)[2][: rank - 1]
    onto = (rows.T @ rows) * g / g[:, None]  # x g -> x g projected, as a map of x
    x = np.random.default_rng(0).standard_normal((7, 24))
    expected = oracle.attention(
        x, m["q"], m["k"] @ onto.T, m["v"] @ onto.T, m["o"], freq=np.zeros(0)
    )
    found = after.network.layers[0].attention(torch.from_numpy(x)[None])[0].numpy()
    assert np.abs(found - expected).max() < 1e-5 * np.abs(expected).max()
    assert np.abs(found - oracle.attention(x, **m, freq=np.zeros(0))).max() > FAR


def test_what_turns_is_lost_as_its_mean_rotation_says() -> None:
    """At full rank, with rotary: keys differ by rows of which 1 - |mean turn|^2 is lost; pair by
    pair, in numpy.
    """
    before = some.llama(num_key_value_heads=4, max_position_embeddings=64)
    _, step = to_latent(before)
    freq = building_blocks.rotary_module(before.config.rope).inv_freq.numpy()
    for block, errors in zip(before.network.layers, step.layers, strict=True):
        m, g = oracle.maps(block), oracle.gain(block)
        lost = whole = 0.0
        for i in range(5):
            weights = 1 / np.arange(1, 65)
            turn = (np.exp(-1j * freq[i] * np.arange(64)) * weights).sum() / weights.sum()
            query, key = (m[n][:, i] + 1j * m[n][:, i + 5] for n in "qk")
            rows = np.linalg.norm(query * g, axis=1)[:, None] * key * g
            s = np.linalg.svd(rows, compute_uv=False)
            whole += (s**2).sum()
            lost += (s[1:] ** 2).sum() * (1 - abs(turn) ** 2)
        assert errors.keys == pytest.approx((lost / whole) ** 0.5, rel=1e-9)
        assert errors.values < 1e-12


def test_the_mean_rotation_is_the_best_constant() -> None:
    """Against a direct search around it: no other constant is nearer to the turns, with the weights
    1 / (d + 1).
    """
    freq = torch.tensor([1.0, 0.1, 1e-3, 0.0], dtype=torch.float64)
    for theta, turn in zip(freq.tolist(), mean_rotation(freq, 300).tolist(), strict=True):
        d = np.arange(300)
        turns, weights = np.exp(-1j * theta * d), 1 / (d + 1)
        at = [
            (weights * np.abs(turns - turn - step) ** 2).sum()
            for step in (0, 1e-3, -1e-3, 1e-3j, -1e-3j)
        ]
        assert at[0] == min(at)
    assert mean_rotation(freq, 1).tolist() == [1, 1, 1, 1]
    long = mean_rotation(freq, (1 << 16) + 5)  # in two pieces
    d = torch.arange((1 << 16) + 5, dtype=torch.float64)
    direct = torch.polar(torch.ones(()).double(), -0.1 * d)
    assert complex(long[1]) == pytest.approx(
        complex((direct / (d + 1)).sum() / (1 / (d + 1)).sum()), rel=1e-9
    )


def loaded(held: Checkpoint, folder: Path) -> Model:
    folder.mkdir(exist_ok=True)
    save(held.network, held.config, folder, torch.float32)
    return regard.load(folder, kind=Model)


@pytest.mark.parametrize(
    "scaling", [None, {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 16}]
)
def test_transformers_computes_the_same(scaling: Any, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers", reason="parity needs the transformers extra")
    after, _ = to_latent(some.llama(rope_scaling=scaling, tie_word_embeddings=True), 24)
    mine = loaded(after, tmp_path)
    theirs = transformers.DeepseekV2ForCausalLM.from_pretrained(
        tmp_path, attn_implementation="eager", dtype=torch.float32
    ).eval()
    ids = some.ids(after, 40)
    with torch.no_grad():
        exact = theirs(ids, use_cache=False).logits
    assert float((mine(ids) - exact).abs().max()) < 1e-5 * float(exact.abs().max())


def test_a_cache_keeps_latents_and_a_rotary_key(tmp_path: Path) -> None:
    after, _ = to_latent(some.llama(), 16)
    mine = loaded(after, tmp_path)
    ids, caches = some.ids(after)[:1], mine.new_caches()
    parts = [mine(ids[:, :11], caches=caches)] + [
        mine(ids[:, i : i + 1], caches=caches) for i in range(11, 24)
    ]
    assert [cache.bytes for cache in caches] == [24 * (16 + 10) * 4] * 2
    whole = mine(ids)
    assert float((torch.cat(parts, 1) - whole).abs().max()) < 1e-5 * float(whole.abs().max())


@pytest.mark.parametrize("dtype, near", [("float16", 2e-2), ("bfloat16", 2e-1)])
def test_the_constant_survives_a_narrow_dtype(dtype: str, near: float) -> None:
    """C and its weight are numbers of both; a weight's rounding is all that is left: a hundred
    times less than a wrong constant.
    """
    before, _ = to_groups(some.llama(), 1)
    plain, _ = to_dtype(before, dtype)
    latent, _ = to_latent(before)
    narrow, _ = to_dtype(latent, dtype)
    for block in narrow.network.layers:
        project = block.attention.project
        C, w = float(project.kv_down.bias[10]), float(project.kv_norm.weight[0])
        assert C == float(torch.tensor(C).bfloat16()) < 65504
        assert w == float(torch.tensor(w).bfloat16())
    exact = some.logits(before)
    ours, usual = (some.logits(x).double() - exact for x in (narrow, plain))
    assert bool(ours.isfinite().all())
    # a rounded model as it is, in the same dtype, is the measure of what rounding does
    assert float(ours.abs().mean()) < 3 * float(usual.abs().mean())
    assert float(usual.abs().mean()) < near * float(exact.abs().max())


REFUSED: list[tuple[Any, dict[str, Any], str]] = [
    ("qwen2", {}, "this model has a bias on queries, which DeepSeek's layers do not have"),
    ("qwen3", {}, "norms or other steps on heads"),
    ("olmo2", {}, "norms or other steps on heads and norms of another kind"),
    ("mistral", {"sliding_window": 8}, "a mask of causal & window(8)"),
    ("phi3", {"partial_rotary_factor": 0.4}, "a rotary that rotates a part of each head"),
    ("gemma2", {"query_pre_attn_scalar": 10}, "and a softcap and norms of another kind"),
    ("gemma", {}, "this model has a scaled embedding"),
    ("llama", {"mlp_bias": True}, "another feed-forward layer"),
    ("llama", {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}}, "rotary positions"),
]


@pytest.mark.parametrize("name, change, message", REFUSED)
def test_what_deepseek_has_not_is_named(name: str, change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        to_latent(some.of(name, **change))


@pytest.mark.parametrize("position", ["learned", "sinusoidal", "alibi"])
def test_other_positions_are_not_dropped(position: str) -> None:
    said = "a bias on scores" if position == "alibi" else "positions in its embedding"
    with pytest.raises(ArgumentError, match=f"this model has {said}"):
        to_latent(some.own(position=position))


@pytest.mark.parametrize("rank", [1, 32])
def test_ranks_that_do_not_fit(rank: int) -> None:
    message = re.escape(f"rank is {rank}; it must be 2 to 26, at which nothing is truncated")
    with pytest.raises(ArgumentError, match=message):
        to_latent(some.llama(num_key_value_heads=4), rank)


def test_latents_of_latents() -> None:
    after, _ = to_latent(some.llama())
    with pytest.raises(ArgumentError, match="the model has latent attention already"):
        to_latent(after)
    with pytest.raises(ArgumentError, match="uses LatentProjection, not separate maps"):
        to_groups(after, 2)


def test_the_gain_of_a_norm_is_what_the_layer_sees() -> None:
    layer = AttentionMaps.of(some.of("gemma").network.layers[0])
    assert layer.gain[:-1].tolist() == pytest.approx(
        (1 + some.of("gemma").network.layers[0].attention_residual.norm.weight.double()).tolist()
    )
