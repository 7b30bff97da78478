"""Tables of inverse frequencies. Numbers: computed in float64 from the formulas, twice, by
independent code.
"""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from regard.errors import ArgumentError, ArgumentTypeError
from regard.positions import (
    NTK,
    DynamicNTK,
    DynamicYaRN,
    LinearScaling,
    Llama3,
    LongRoPE,
    YaRN,
    pair_index,
    rope_frequencies,
    yarn_mscale,
)

GPT_OSS = YaRN(32.0, 4096, truncate=False)
DEEPSEEK = YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=1.0)
LLAMA = Llama3(8.0, 1.0, 4.0, 8192)

WARM = 0.1 * math.log(16.0) + 1
"""The factor of YaRN for 16 times the length."""

# name: dim, base, scaling, {pair: inverse frequency}, their sum, rotary factor
TABLES = {
    "base": (128, 1e4, None, {1: 0.86596432336, 32: 0.01}, 7.4599541336, 1),
    "yarn": (128, 1e4, YaRN(16.0, 4096), {30: 0.00852684377297}, 7.365234700807, WARM),
    "yarn, not truncated": (
        128,
        1e4,
        YaRN(16.0, 4096, truncate=False),
        {21: 0.0485915058627, 30: 0.00863427296554, 45: 9.78568746724e-5},
        7.371371807158,
        WARM,
    ),
    "yarn, the paper's ramp": (
        128,
        1e4,
        YaRN(16.0, 4096, ramp="rotations"),
        {21: 0.048321729215, 30: 0.00393598859068, 45: 9.64259154583e-5},
        7.296146509751,
        WARM,
    ),
    "yarn, DeepSeek": (64, 1e4, DEEPSEEK, {21: 4.14990398491e-4}, 3.948936274079, 1.0),
    "yarn, gpt-oss": (64, 150000.0, GPT_OSS, {}, 3.18043827693, 1.346573590279973),
    "Llama 3.1": (128, 5e5, LLAMA, {29: 0.0021665707635, 34: 1.78507812768e-4}, 5.386058200729, 1),
    "yarn, tiny": (32, 1e4, YaRN(4.0, 128), {}, 1.92945623139, 1.138629436111989),
}


@pytest.mark.parametrize("name", TABLES)
def test_the_table(name):
    dim, base, scaling, at, total, factor = TABLES[name]
    inv_freq, rotary_factor, _ = rope_frequencies(dim, base, scaling=scaling)
    assert inv_freq.dtype == torch.float64
    assert inv_freq.shape == (dim // 2,)
    for i, value in at.items():
        assert float(inv_freq[i]) == pytest.approx(value, rel=1e-11), i
    assert float(inv_freq.sum()) == pytest.approx(total, rel=1e-11)
    assert rotary_factor == pytest.approx(factor, rel=1e-14)


@pytest.mark.parametrize(
    "dim, base, yarn, raw, used",
    [
        (128, 1e4, YaRN(16.0, 4096), (20.944481620636, 45.026881273755), (20, 46)),
        (128, 1e4, YaRN(16.0, 2048), (16.128001690012, 40.210401343131), (16, 41)),
        (128, 1e6, YaRN(4.0, 32768), (23.595947608338, 39.650880710417), (23, 40)),
        (64, 1e4, DEEPSEEK, (10.472240810318, 22.513440636877), (10, 23)),
        (64, 150000.0, GPT_OSS, (8.092779115512402, 17.39802450158856), None),
        (64, 1e4, YaRN(4.0, 256), (0.83928094907, 12.88048077563), (0, 13)),
        (32, 1e4, YaRN(4.0, 128), (-0.78447950812, 5.23612040516), (0, 6)),
    ],
)
def test_yarn_ramps_between_these_pairs(dim, base, yarn, raw, used):
    L = yarn.original_length
    found = pair_index(32, dim, base, L), pair_index(1, dim, base, L)
    assert found == pytest.approx(raw, rel=1e-11)
    assert yarn.bounds(dim, base) == (pytest.approx(raw, rel=1e-11) if used is None else used)


def test_the_two_ramps_of_yarn_are_different_tables():
    code = rope_frequencies(128, scaling=YaRN(16.0, 4096)).inv_freq
    paper = rope_frequencies(128, scaling=YaRN(16.0, 4096, ramp="rotations")).inv_freq
    ratio = code / paper
    assert (int(ratio.argmax()), round(float(ratio.max()), 4)) == (38, 3.0414)
    assert (int(ratio.argmin()), round(float(ratio.min()), 4)) == (21, 0.9714)


def test_a_high_clamped_at_the_last_pair_is_another_table():
    # negative control: d/2 - 1 in place of d - 1, seen where the ramp would end beyond the last
    # pair
    yarn = YaRN(4.0, 4096, beta_slow=1e-3)
    low, high = yarn.bounds(32, 1e4)
    assert (low, high) == (5, 24)  # pairs end at 15
    wrong = ((torch.arange(16, dtype=torch.float64) - low) / (15 - low)).clamp(0, 1)
    theta = rope_frequencies(32).inv_freq
    wrong = theta * (1 - wrong) + theta / 4 * wrong
    assert (rope_frequencies(32, scaling=yarn).inv_freq / wrong).max() > 1.5


def test_where_the_ramp_has_no_width_the_released_code_gives_it_a_thousandth():
    assert YaRN(4.0, 40, beta_fast=8.0, beta_slow=7.0).bounds(32, 1e4) == (0, 0.001)
    assert YaRN(4.0, 10**9, beta_fast=2.0, beta_slow=1.0).bounds(32, 1e4) == (31, 31.001)
    with pytest.raises(ArgumentError, match=r"YaRN's ramp would run from pair 0 down to -1 \(dim"):
        rope_frequencies(32, scaling=YaRN(4.0, 20, beta_fast=8.0, beta_slow=7.0))


def test_deepseeks_two_factors_stay_apart():
    assert yarn_mscale(40.0) == pytest.approx(1.3688879454113936, rel=1e-15)
    assert yarn_mscale(40.0, 0.707) == pytest.approx(1.2608037774058554, rel=1e-15)
    assert yarn_mscale(1.0) == yarn_mscale(0.5) == 1.0
    v3 = rope_frequencies(64, scaling=DEEPSEEK)
    v2 = rope_frequencies(64, scaling=YaRN(40.0, 4096, mscale=0.707, mscale_all_dim=0.707))
    assert v3.rotary_factor == v2.rotary_factor == 1.0
    assert v3.softmax_factor == pytest.approx(1.8738542070926265, rel=1e-14)
    assert v2.softmax_factor == pytest.approx(1.5896261651208736, rel=1e-14)
    assert 192**-0.5 * v3.softmax_factor == pytest.approx(0.1352337788608801, rel=1e-14)
    assert 192**-0.5 * v2.softmax_factor == pytest.approx(0.11472138679292611, rel=1e-14)
    uneven = rope_frequencies(64, scaling=YaRN(40.0, 4096, mscale=1.0, mscale_all_dim=0.707))
    assert uneven.rotary_factor == pytest.approx(1.3688879454113936 / 1.2608037774058554, rel=1e-14)
    assert uneven.softmax_factor == pytest.approx(1.5896261651208736, rel=1e-14)
    given = rope_frequencies(64, scaling=YaRN(40.0, 4096, attention_factor=1.5))
    assert given[1:] == (1.5, 1.0)
    assert YaRN(16.0, 4096).rotary_factor ** 2 == pytest.approx(1.631390226675, rel=1e-12)


@pytest.mark.parametrize(
    "s, base",
    [
        (2, 20221.261689737912),
        (4, 40889.94243248622),
        (8, 82684.62264056221),
        (16, 167198.73921320363),
    ],
)
def test_the_base_of_ntk(s, base):
    assert NTK(s).base(1e4, 128) == pytest.approx(base, rel=1e-13)
    ntk, plain = (rope_frequencies(128, scaling=x).inv_freq for x in (NTK(s), None))
    assert float(ntk[63] * s) == pytest.approx(float(plain[63]), rel=1e-14)
    assert ntk[0] == plain[0] == 1


@pytest.mark.parametrize(
    "a, length, base",
    [
        (1, 8192, 20221.2616897379),
        (1, 16384, 40889.9424324862),
        (2, 100, 10000.0),
        (2, 4096, 10000.0),
        (2, 4097, 10004.9603366797),
        (2, 8192, 30527.7367488067),
        (2, 16384, 72195.8600865094),
        (4, 8192, 51293.7872681524),
    ],
)
def test_the_base_of_dynamic_ntk(a, length, base):
    scaling = DynamicNTK(a, 4096)
    assert scaling.base(1e4, 128, length) == pytest.approx(base, rel=1e-13)
    scaled = rope_frequencies(128, scaling=scaling, length=length).inv_freq
    torch.testing.assert_close(scaled, rope_frequencies(128, base).inv_freq, rtol=1e-11, atol=0)


def test_llama3_keeps_blends_and_divides():
    for dim, scaling, counts in (
        (128, Llama3(8.0, 1.0, 4.0, 8192), (29, 6, 29)),
        (64, Llama3(32.0, 1.0, 4.0, 8192), (15, 3, 14)),
        (128, Llama3(16.0, 1.0, 1.0, 8192), (35, 0, 29)),  # Llama 4 Scout
    ):
        theta = rope_frequencies(dim, 5e5).inv_freq
        ratio = rope_frequencies(dim, 5e5, scaling=scaling).inv_freq / theta
        kept, divided = ratio == 1, (ratio * scaling.factor - 1).abs() < 1e-14
        assert (int(kept.sum()), int((~kept & ~divided).sum()), int(divided.sum())) == counts


def test_longrope_changes_its_list_beyond_the_trained_length():
    short, long = [1.0, 2.0], [4.0, 8.0]  # lists, as a config has them
    scaling = LongRoPE(short, long, 4096, 32.0)
    theta = rope_frequencies(4).inv_freq
    for length, ext in ((1, short), (4096, short), (4097, long), (10**6, long)):
        found = rope_frequencies(4, scaling=scaling, length=length)
        assert found.inv_freq.tolist() == (theta / torch.tensor(ext)).tolist()
        assert found.rotary_factor == pytest.approx(1.1902380714238083, rel=1e-14)
    assert LongRoPE(short, long, 8192, 16.0).rotary_factor == pytest.approx(1.1435437497937313)
    assert LongRoPE(short, long, 8192, 0.5).rotary_factor == 1.0
    assert LongRoPE(short, long, 8192, 16.0, attention_factor=1.25).rotary_factor == 1.25
    assert hash(scaling) == hash(LongRoPE((1.0, 2.0), (4.0, 8.0), 4096, 32.0))


def test_partial_and_proportional_quarter_are_two_things():
    partial = rope_frequencies(128, rotary_dim=32).inv_freq
    proportional = rope_frequencies(128, rotary_dim=32, proportional=True).inv_freq
    assert partial.shape == (16,)
    assert proportional.shape == (64,)
    assert float(partial[15]) == pytest.approx(1.7782794100389227e-4, rel=1e-14)
    assert float(proportional[15]) == pytest.approx(0.11547819846894582, rel=1e-14)
    assert not proportional[16:].any()
    whole = rope_frequencies(128, rotary_dim=128, proportional=True).inv_freq
    assert torch.equal(whole, rope_frequencies(128).inv_freq)
    assert not rope_frequencies(128, rotary_dim=0, proportional=True).inv_freq.any()
    assert rope_frequencies(128, rotary_dim=0).inv_freq.shape == (0,)
    slow = rope_frequencies(
        128, rotary_dim=32, proportional=True, scaling=LinearScaling(8.0)
    ).inv_freq
    assert torch.equal(slow, proportional / 8)


@given(
    pairs=st.integers(2, 64),
    base=st.floats(100.0, 1e7),
    factor=st.floats(1.0, 64.0),
    length=st.integers(256, 10**6),
)
def test_laws_of_the_scalings(pairs, base, factor, length):
    dim = 2 * pairs
    theta = rope_frequencies(dim, base).inv_freq

    def scaled(scaling, length=None):
        return rope_frequencies(dim, base, scaling=scaling, length=length).inv_freq

    one_ulp = {"rtol": 1e-14, "atol": 0.0}
    assert torch.equal(scaled(LinearScaling(factor)), theta / factor)
    torch.testing.assert_close(scaled(NTK(1.0)), theta, **one_ulp)
    torch.testing.assert_close(scaled(DynamicNTK(factor, length), length), theta, **one_ulp)
    torch.testing.assert_close(scaled(Llama3(1.0, 1.0, 4.0, length)), theta, **one_ulp)
    torch.testing.assert_close(scaled(YaRN(1.0, length, ramp="rotations")), theta, **one_ulp)
    for scaling in (Llama3(factor, 1.0, 4.0, length), YaRN(factor, length, ramp="rotations")):
        assert (scaled(scaling) <= theta * (1 + 1e-14)).all()  # between theta / s and theta
        assert (scaled(scaling) >= theta / factor * (1 - 1e-14)).all()
    if math.floor(pair_index(32, dim, base, length)) <= dim - 1:
        torch.testing.assert_close(scaled(YaRN(1.0, length)), theta, **one_ulp)
        torch.testing.assert_close(scaled(DynamicYaRN(length), length), theta, **one_ulp)
        twice = YaRN(2.0, length)
        assert torch.equal(scaled(DynamicYaRN(length), 2 * length), scaled(twice))
        found = rope_frequencies(dim, base, scaling=DynamicYaRN(length), length=2 * length)
        assert found.rotary_factor == twice.rotary_factor


def test_frequencies_are_made_on_the_cpu_whatever_the_default():
    with torch.device("meta"):
        assert rope_frequencies(8, scaling=YaRN(4.0, 128)).inv_freq.device.type == "cpu"
        scaling = LongRoPE((1.0,) * 4, (1.0,) * 4, 64, 2.0)
        assert rope_frequencies(8, scaling=scaling, length=3).inv_freq[0] == 1


@pytest.mark.parametrize(
    "call, error, message",
    [
        (lambda: rope_frequencies(7), ArgumentError, "dim is 7; rotary pairs need an even head"),
        (lambda: rope_frequencies(0), ArgumentError, "dim is 0"),
        (lambda: rope_frequencies(8, rotary_dim=3), ArgumentError, "rotary_dim is 3; it must be"),
        (lambda: rope_frequencies(8, rotary_dim=10), ArgumentError, "rotary_dim is 10"),
        (lambda: rope_frequencies(8, 1.0), ArgumentError, "base is 1.0; it must be above 1"),
        (lambda: rope_frequencies(8, math.nan), ArgumentError, "base is nan"),
        (lambda: rope_frequencies(8, "1e4"), ArgumentTypeError, "base is str; it must be a number"),
        (lambda: rope_frequencies(8, length=-1), ArgumentError, "length is -1; it must be 0 or"),
        (
            lambda: rope_frequencies(8, scaling={"type": "yarn"}),
            ArgumentTypeError,
            "scaling is dict; it must be a scaling of",
        ),
        (
            lambda: rope_frequencies(8, proportional=True, scaling=NTK(2.0)),
            ArgumentError,
            "scaling NTK with proportional=True",
        ),
        (
            lambda: rope_frequencies(8, scaling=DynamicNTK(2.0, 8)),
            ArgumentError,
            "length is None, but the frequencies of DynamicNTK depend on it",
        ),
        (lambda: rope_frequencies(8, scaling=DynamicYaRN(8)), ArgumentError, "length is None, but"),
        (lambda: rope_frequencies(2, scaling=NTK(2.0)), ArgumentError, "the rotary dim is 2; NTK"),
        (
            lambda: rope_frequencies(8, scaling=LongRoPE((1.0,), (1.0,), 8, 2.0), length=3),
            ArgumentError,
            "short_factor has length 1; it must have one number for each of the 4 rotary pairs",
        ),
        (
            lambda: rope_frequencies(8, scaling=LongRoPE((1.0,), (1.0,), 8, 2.0), length=9),
            ArgumentError,
            "long_factor has length 1; it must have one number for each of the 4 rotary pairs",
        ),
        (lambda: LongRoPE((0.0,), (1.0,), 8, 2.0), ArgumentError, r"short_factor\[0\] is 0.0; it"),
        (lambda: LongRoPE((1.0,), (1.0,), 1, 2.0), ArgumentError, "original_length is 1; it must"),
        (lambda: LongRoPE((1.0,), (1.0,), 8, 2.0, -1.0), ArgumentError, "attention_factor is -1.0"),
        (lambda: LinearScaling(0.0), ArgumentError, "factor is 0.0; it must be above 0"),
        (lambda: LinearScaling(None), ArgumentTypeError, "factor is None; it must be a number"),
        (lambda: NTK(-1.0), ArgumentError, "factor is -1.0"),
        (lambda: DynamicNTK(1.0, 0), ArgumentError, "original_length is 0"),
        (lambda: Llama3(8.0, 4.0, 1.0, 8192), ArgumentError, "low_freq_factor is 4.0 and"),
        (lambda: YaRN(4.0, 128, beta_fast=1.0, beta_slow=32.0), ArgumentError, "beta_slow is 32.0"),
        (lambda: YaRN(4.0, 128, ramp="linear"), ArgumentError, r"ramp is 'linear'; it must be"),
        (lambda: YaRN(4.0, 128, mscale=-1.0), ArgumentError, "mscale is -1.0; it must be at least"),
        (lambda: YaRN(4.0, 128, attention_factor=0.0), ArgumentError, "attention_factor is 0.0"),
        (lambda: YaRN(0.0, 128), ArgumentError, "factor is 0.0"),
        (lambda: DynamicYaRN(0), ArgumentError, "original_length is 0"),
    ],
)
def test_bad_arguments(call, error, message):
    with pytest.raises(error, match=message):
        call()
