"""Rotary positions of a config.json: both forms, transformers' own frequencies in float64,
published configs, every error.
"""

from __future__ import annotations

import math
import os
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from regard.configs.rope import RopeSettings, normalize_rope
from regard.errors import ArgumentError
from regard.models.assembly import building_blocks
from regard.models.assembly.building_blocks import rotary_heads
from regard.positions import DynamicNTK, Rotary, YaRN

os.environ.setdefault("HF_HUB_OFFLINE", "1")
transformers = pytest.importorskip("transformers", reason="needs the transformers extra")
from transformers import modeling_rope_utils as theirs  # noqa: E402

YARN = {"rope_type": "yarn", "factor": 4.0}
LISTS = {
    # invented: the published lists are long; the lengths are right
    "short_factor": [1.0 + i / 64 for i in range(48)],
    "long_factor": [1.5 + i for i in range(48)],
}


class Float64:
    """A torch whose float is float64, so that their formulas can be compared without their
    rounding.
    """

    float = float32 = torch.float64

    def __getattr__(self, name: str) -> Any:
        return getattr(torch, name)


def their_frequencies(
    monkeypatch: pytest.MonkeyPatch,
    scaling: dict[str, Any],
    head_dim: int,
    max_positions: int,
    length: int | None = None,
    original: int | None = None,
) -> tuple[Tensor, float]:
    """What transformers turns by; scaling has its rope_theta."""
    top = {} if original is None else {"original_max_position_embeddings": original}
    config = transformers.LlamaConfig(
        hidden_size=head_dim * 2,
        num_attention_heads=2,
        head_dim=head_dim,
        max_position_embeddings=max_positions,
        rope_parameters=dict(scaling),
        **top,
    )
    monkeypatch.setattr(theirs, "torch", Float64())
    kind = config.rope_parameters["rope_type"]
    found, factor = theirs.ROPE_INIT_FUNCTIONS[kind](config, "cpu", seq_len=length)
    return found.double(), float(factor)


def turned(made: Rotary, positions: list[int]) -> Tensor:
    """What the rotary does to the first unit vector of each pair: cos and sin of every pair at
    every position.
    """
    n = made.rotary_dim if not made.proportional else made.dim
    assert n is not None
    one = torch.zeros(1, 1, len(positions), made.dim, dtype=torch.float64)
    one[..., : n // 2] = 1  # layout half: pair i is (i, i + n/2)
    return made(one, torch.tensor([positions]))[0, 0, :, :n]


def by_hand(frequencies: Tensor, factor: float, positions: list[int]) -> Tensor:
    rows = [
        [factor * f(p * w) for f in (math.cos, math.sin) for w in frequencies.tolist()]
        for p in positions
    ]
    return torch.tensor(rows, dtype=torch.float64)


THETAS = (10000.0, 5e5)
TRAINED = {"original_max_position_embeddings": 32}
BOUNDS = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0}
PROPORTIONAL = {"rope_type": "proportional"}
SETTINGS: dict[str, dict[str, Any]] = {
    "linear": {"rope_type": "linear", "factor": 8.0},
    "linear, partial": {"rope_type": "linear", "factor": 2.5, "partial_rotary_factor": 0.75},
    "dynamic": {"rope_type": "dynamic", "factor": 2.0},
    "dynamic by 1": {"rope_type": "dynamic", "factor": 1.0},
    "dynamic, partial": {"rope_type": "dynamic", "factor": 4.0, "partial_rotary_factor": 0.5},
    "yarn": YARN,
    "yarn from L": YARN | TRAINED,
    "yarn, its factor from the lengths": YARN
    | {"factor": None, "original_max_position_embeddings": 8},
    "yarn, betas": YARN | TRAINED | {"beta_fast": 16.0, "beta_slow": 2},
    "yarn, betas null": YARN | {"beta_fast": None, "beta_slow": None},
    "yarn untruncated": YARN | TRAINED | {"truncate": False},
    "yarn, factor of attention": YARN | {"attention_factor": 0.5},
    "yarn, two mscales": YARN | {"mscale": 1.0, "mscale_all_dim": 0.707},
    "yarn, equal mscales": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707},
    "yarn, all against mscale": YARN
    | {"mscale": 0.5, "mscale_all_dim": 2.0, "attention_factor": 1.25},
    "yarn, partial": YARN | {"partial_rotary_factor": 0.5},
    "llama3": BOUNDS | {"factor": 8.0, "original_max_position_embeddings": 48},
    "llama3, other bounds": BOUNDS
    | {"low_freq_factor": 2.0, "high_freq_factor": 3.0}
    | {"factor": 32.0, "original_max_position_embeddings": 64},
    "proportional": PROPORTIONAL | {"partial_rotary_factor": 0.25},
    "proportional, a factor": PROPORTIONAL | {"partial_rotary_factor": 0.3, "factor": 8.0},
    "proportional, whole": PROPORTIONAL,
}
MAX = 64


def rotary(*settings: Any, **more: Any) -> Rotary:
    return building_blocks.rotary_module(RopeSettings(*settings, **more))


def make(scaling: dict[str, Any], head_dim: int, theta: float, **more: Any) -> Rotary:
    """As a family does: the config in one form, then the rotary."""
    found = normalize_rope({"rope_parameters": scaling | {"rope_theta": theta}})
    assert found["rope_theta"] == theta
    partial = found.get("partial_rotary_factor", 1.0)
    return rotary(head_dim, theta, found["rope_scaling"], MAX, partial=partial, **more)


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("name", SETTINGS)
@pytest.mark.parametrize("theta", THETAS)
@pytest.mark.parametrize("head_dim", [64, 80])
def test_every_type_turns_as_transformers_has_it(
    name: str, theta: float, head_dim: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also beyond the trained length. Both sides compute in fp64, from other orders of the same
    formulas.
    """
    scaling = SETTINGS[name] | {"rope_theta": theta}
    made = make(SETTINGS[name], head_dim, theta)
    for length in (MAX // 2, MAX, MAX + 1, 3 * MAX):
        want, factor = their_frequencies(monkeypatch, scaling, head_dim, MAX, length)
        positions = [0, 1, length // 2, length - 1]
        worst = (turned(made, positions) - by_hand(want, factor, positions)).abs().max()
        assert (
            worst <= 1e-12 * length
        )  # a relative error of some 1e-13 in a frequency, times the position
    assert made.follows_length == ("dynamic" in name)


LONG: dict[str, tuple[dict[str, Any], int | None]] = {
    "as in Phi-3": ({}, 32),
    "inside": ({"original_max_position_embeddings": 32}, None),
    "in both places": ({"original_max_position_embeddings": 32}, 32),
    "with a factor": ({"factor": 8.0}, 32),
    "with a factor of attention": ({"attention_factor": 1.5, "factor": 8.0}, 32),
    "nowhere": ({}, None),
}


@pytest.mark.parametrize("case", LONG)
@pytest.mark.parametrize("old", [False, True])
def test_longrope(case: str, old: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list changes behind the trained length; by its old name too."""
    inside, original = LONG[case]
    scaling = {"rope_type": "longrope", **LISTS, **inside}
    mine = {"type": "su", **LISTS, **inside} if old else scaling
    made = make(mine, 96, 1e4, original=original)
    assert made.follows_length
    L = original or inside.get("original_max_position_embeddings", MAX)
    for length in (L, L + 1, 3 * MAX):
        full = scaling | {"rope_theta": 1e4}
        want, factor = their_frequencies(monkeypatch, full, 96, MAX, length, original)
        lists = LISTS["short_factor" if length <= L else "long_factor"]
        exact = torch.tensor(
            [1 / x / 1e4 ** (2 * i / 96) for i, x in enumerate(lists)], dtype=torch.float64
        )
        # they compute exponents in fp32: an error of ln(base) * 2^-24 each, and as much for the
        # power
        assert (want / exact - 1).abs().max() <= 2 * math.log(1e4) * 2**-24
        positions = [0, 1, length - 1]
        worst = (turned(made, positions) - by_hand(exact, factor, positions)).abs().max()
        assert worst <= 1e-12 * length
    if case == "as in Phi-3":
        assert made.rotary_factor == pytest.approx(math.sqrt(1 + math.log(2) / math.log(32)))


@pytest.mark.parametrize("name", SETTINGS)
def test_another_setting_is_told_apart(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the bound: no scaling at all, and a base that is off by one in ten
    thousand.
    """
    scaling = SETTINGS[name] | {"rope_theta": 1e4}
    want, factor = their_frequencies(monkeypatch, scaling, 64, MAX, 3 * MAX)
    positions = [0, 1, 3 * MAX - 1]
    right = by_hand(want, factor, positions)
    wrong = [make(SETTINGS[name], 64, 1.0001e4)]
    if name != "proportional, whole":
        wrong.append(rotary(64, 1e4, None, MAX))
    for made in wrong:
        other = turned(made, positions)
        assert other.shape != right.shape or (other - right).abs().max() > 1e-9 * 3 * MAX


# Published configs: the facts of their config.json, and numbers computed from the formulas
# (float64).

LLAMA_31: dict[str, Any] = {
    "rope_theta": 500000.0,
    "max_position_embeddings": 131072,
    "rope_scaling": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
        "rope_type": "llama3",
    },
}


def test_gemma_3_in_both_forms() -> None:
    hub = {
        "rope_theta": 1000000,
        "rope_local_base_freq": 10000,
        "vocab_size": 7,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
    }
    inside = {
        "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1000000},
        "sliding_attention": {"rope_type": "default", "rope_theta": 10000},
    }
    new = {"vocab_size": 7, "rope_parameters": inside}
    want = {
        "full_attention": {
            "rope_theta": 1000000,
            "rope_scaling": {"rope_type": "linear", "factor": 8.0},
        },
        "sliding_attention": {"rope_theta": 10000, "rope_scaling": None},
    }
    for raw in (hub, new, hub | new):
        assert normalize_rope(raw, layered=True) == {"vocab_size": 7, "rope_parameters": want}
    bare = normalize_rope({"partial_rotary_factor": 0.5}, layered=True)["rope_parameters"]
    only = {"partial_rotary_factor": 0.5, "rope_scaling": None}
    assert bare == {"full_attention": only, "sliding_attention": only}
    half = normalize_rope({"rope_parameters": inside | {"sliding_attention": None}}, layered=True)
    assert half["rope_parameters"]["sliding_attention"] == {"rope_scaling": None}


# One form from many.

LINEAR = {"rope_type": "linear", "factor": 2.0}
BASE = {"rope_theta": 5e5}
ONE = {**BASE, "rope_scaling": LINEAR}
HALF = {"partial_rotary_factor": 0.5}
FORMS: list[tuple[dict[str, Any], dict[str, Any]]] = [
    ({}, {"rope_scaling": None}),
    ({**BASE, "rope_scaling": None}, {**BASE, "rope_scaling": None}),
    ({"rope_scaling": {}, "rope_parameters": {}}, {"rope_scaling": None}),
    ({"rope_parameters": None, "x": 1}, {"x": 1, "rope_scaling": None}),
    ({"rope_parameters": {"rope_type": "default", **BASE}}, {**BASE, "rope_scaling": None}),
    ({"rope_parameters": BASE}, {**BASE, "rope_scaling": None}),
    (ONE, ONE),
    ({**BASE, "rope_scaling": {"type": "linear", "factor": 2.0}}, ONE),
    ({**BASE, "rope_scaling": {"type": "linear", "rope_type": "linear", "factor": 2}}, ONE),
    ({"rope_scaling": {"type": "linear", "factor": 2.0, **BASE}}, ONE),
    ({**BASE, "rope_parameters": LINEAR}, ONE),
    ({"rope_parameters": LINEAR | BASE}, ONE),
    ({**ONE, "rope_parameters": LINEAR | BASE}, ONE),
    ({**ONE, "rope_parameters": BASE}, ONE),
    ({**ONE, "rope_parameters": BASE | HALF}, {**ONE, **HALF}),
    ({**ONE, **HALF}, {**ONE, **HALF}),
]


@pytest.mark.parametrize("raw, want", FORMS)
def test_every_form_is_one(raw: dict[str, Any], want: dict[str, Any]) -> None:
    before = repr(raw)
    assert normalize_rope(raw) == want
    assert normalize_rope(normalize_rope(raw)) == want
    assert repr(raw) == before


def test_null_is_absent_and_finetuned_shapes_nothing() -> None:
    scaling = {"type": "yarn", "factor": 16.0, "beta_fast": None, "finetuned": True}
    found = normalize_rope({"rope_scaling": scaling})["rope_scaling"]
    assert found == {"rope_type": "yarn", "factor": 16.0, "finetuned": True}
    assert rotary(64, 1e4, found, 4096).scaling == YaRN(16.0, 4096)


def test_a_scaling_straight_from_a_file_is_checked_too() -> None:
    made = rotary(64, 1e4, {"type": "dynamic", "factor": 2.0}, 128)
    assert made.scaling == DynamicNTK(2.0, 128)
    assert rotary(64, 1e4, {"rope_type": "default"}, 128).scaling is None
    assert rotary(64, 1e4, None, 128, layout="interleaved").layout == "interleaved"


@pytest.mark.parametrize("alone", [{"mscale": 0.707}, {"mscale_all_dim": 1.0}, {"mscale": 0.0}])
def test_one_mscale_alone_means_two_things(
    monkeypatch: pytest.MonkeyPatch, alone: dict[str, float]
) -> None:
    """DeepSeek's code reads it, transformers ignores it."""
    with pytest.raises(ArgumentError, match=r"transformers ignores .* attention_factor"):
        make(YARN | alone, 64, 1e4)
    _, factor = their_frequencies(monkeypatch, YARN | alone | {"rope_theta": 1e4}, 64, MAX)
    assert factor == pytest.approx(0.1 * math.log(4) + 1)
    for agreed in ({"mscale": 1.0}, {"mscale_all_dim": 0.0}, {"attn_factor": 1.0}):
        assert make(YARN | agreed, 64, 1e4).rotary_factor == pytest.approx(factor)


# What is wrong is named.

LLAMA3: dict[str, Any] = LLAMA_31["rope_scaling"]
LONG_LISTS: dict[str, Any] = {"rope_type": "longrope", **LISTS}


def scaled(**scaling: Any) -> dict[str, Any]:
    return {"rope_scaling": scaling}


def yarn(**change: Any) -> dict[str, Any]:
    return {"rope_theta": 1e4, "rope_scaling": YARN | change}


def inside(**parameters: Any) -> dict[str, Any]:
    return {"rope_parameters": parameters}


FLAWS: list[tuple[dict[str, Any], str]] = [
    (scaled(rope_type="yarm"), "rope_scaling.rope_type is 'yarm'; did you mean 'yarn'?"),
    (inside(rope_type=["yarn"]), "rope_parameters.rope_type is ['yarn']"),
    (scaled(type="mrope", mrope_section=[16]), "rope_scaling.type is 'mrope'"),
    (scaled(type="linear", rope_type="dynamic"), "and rope_scaling.type is 'linear'; remove"),
    (scaled(factor=2.0), "rope_scaling has 'factor' and no rope_type; add one of"),
    (scaled(rope_type="linear"), "'linear' lacks factor"),
    (scaled(rope_type="yarn"), "'yarn' lacks factor"),
    (scaled(rope_type="dynamic", factor=None), "'dynamic' lacks factor"),
    (inside(rope_type="llama3", factor=8.0), "lacks low_freq_factor, high_freq_factor"),
    (scaled(rope_type="longrope", short_factor=[1.0]), "'longrope' lacks long_factor"),
    (yarn(beta_fasst=32), "unknown key 'beta_fasst'; did you mean 'beta_fast'? Its keys are"),
    (yarn(attn_factor=1.5), "rope_scaling.attn_factor is 1.5: YaRN's released code multiplies"),
    (scaled(rope_type="default", factor=2.0), "unknown key 'factor'. Its keys are none"),
    (
        scaled(rope_type="dynamic", factor=2.0, original_max_position_embeddings=32),
        "unknown key 'original_max_position_embeddings'",
    ),
    (yarn(truncate="no"), "rope_scaling.truncate is 'no'; it must be true or false"),
    (yarn(factor="4"), "rope_scaling.factor is '4'; it must be a finite number"),
    (yarn(factor=True), "rope_scaling.factor is True"),
    (yarn(factor=math.nan), "rope_scaling.factor is nan"),
    (yarn(beta_slow=10**400), "rope_scaling.beta_slow is 1000"),
    (yarn(original_max_position_embeddings=32.0), "is 32.0; it must be an integer of at least 1"),
    (yarn(original_max_position_embeddings=0), "is 0; it must be an integer of at least 1"),
    (scaled(**LONG_LISTS | {"long_factor": 4.0}), "long_factor is 4.0; it must be a list"),
    (scaled(**LONG_LISTS | {"long_factor": [1.0, "2"]}), "rope_scaling.long_factor[1] is '2'"),
    ({"rope_scaling": "yarn"}, "rope_scaling is 'yarn'; it must be an object"),
    ({"rope_parameters": ["yarn"]}, "rope_parameters is ['yarn']; it must be an object"),
    ({"rope_theta": "1e4"}, "rope_theta is '1e4'; it must be a finite number"),
    (inside(rope_theta=math.inf), "rope_parameters.rope_theta is inf"),
    ({"rope_theta": 1e4, **inside(rope_theta=5e5)}, "rope_theta is 10000.0"),
    (yarn(rope_theta=5e5), "rope_theta is 10000.0 and rope_scaling.rope_theta is 500000.0"),
    (
        {"partial_rotary_factor": 0.5, **inside(partial_rotary_factor=0.25)},
        "partial_rotary_factor is 0.5 and rope_parameters.partial_rotary_factor is 0.25",
    ),
    (yarn() | inside(rope_type="yarn", factor=2.0), "'factor': 2.0}; remove the wrong one"),
    (yarn() | inside(rope_type="default"), "and rope_parameters is None; remove the wrong one"),
    (inside(full_attention={}, sliding_attention={}), "this family has one for all layers"),
]
LAYERED_FLAWS: list[tuple[dict[str, Any], str]] = [
    (inside(rope_type="default", rope_theta=1e4), "has rope_type, rope_theta for all layers"),
    (inside(full_attention={}, sliding_atention={}), "'sliding_atention'; did you mean"),
    (inside(full_attention={}, sliding_attention=3), "sliding_attention is 3"),
    ({"rope_theta": 1e6, **inside(full_attention={"rope_theta": 1e4})}, "rope_theta is 1000000.0"),
    (
        {"rope_local_base_freq": 1e4, **inside(sliding_attention={"rope_theta": 1e6})},
        "base_freq is 10000.0 and rope_parameters.sliding_attention.rope_theta is 1000000.0",
    ),
    (inside(full_attention={"rope_type": "yarn"}), "full_attention of rope_type 'yarn' lacks"),
]


@pytest.mark.parametrize(
    "raw, message, layered",
    [*((*flaw, False) for flaw in FLAWS), *((*flaw, True) for flaw in LAYERED_FLAWS)],
)
def test_what_is_wrong_is_named(raw: dict[str, Any], message: str, layered: bool) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        normalize_rope(raw, layered=layered)


BUILT: list[tuple[dict[str, Any] | None, dict[str, Any], str]] = [
    ({**LLAMA3, "original_max_position_embeddings": None}, {}, "lacks original_max_position_emb"),
    (LONG_LISTS, {}, "short_factor has 48 numbers and a head has 32 rotary pairs"),
    (
        LONG_LISTS | {"short_factor": [1.0] * 32, "long_factor": [1.0] * 31},
        {},
        "long_factor has 31 numbers and a head has 32 rotary pairs",
    ),
    (
        YARN | {"original_max_position_embeddings": 32},
        {"original": 64},
        "original_max_position_embeddings is 64 at the top level and 32 in rope_scaling",
    ),
    ({"rope_type": "linear", "factor": -1.0}, {}, "factor is -1.0; it must be above 0"),
    (LLAMA3 | {"low_freq_factor": 8.0}, {}, "low_freq_factor is 8.0 and high_freq_factor is 4.0"),
    ({"rope_type": "yam"}, {}, "rope_scaling.rope_type is 'yam'"),
    (None, {"partial": 0.0}, "partial_rotary_factor is 0.0; it must be above 0 and at most 1"),
    (None, {"partial": 1.5}, "partial_rotary_factor is 1.5"),
    (None, {"partial": 0.4}, "rotary_dim is 25; it must be even"),
    (None, {"layout": "halves"}, "layout is 'halves'"),
    (None, {"theta": 1.0}, "base is 1.0; it must be above 1"),
    (None, {"theta": "1e4"}, "rope_theta is '1e4'"),
]


@pytest.mark.parametrize("scaling, change, message", BUILT)
def test_what_cannot_be_built_is_named(
    scaling: dict[str, Any] | None, change: dict[str, Any], message: str
) -> None:
    rest = {name: x for name, x in change.items() if name != "theta"}
    with pytest.raises(ArgumentError, match=re.escape(message)):
        rotary(64, change.get("theta", 1e4), scaling, MAX, **rest)


# Heads.


def test_heads_of_another_size_are_refused() -> None:
    with pytest.raises(ArgumentError, match="rotary is for heads of 8, and head_dim is 16"):
        rotary_heads(32, 4, 2, 16, rotary(8, 1e4, None, 64))
