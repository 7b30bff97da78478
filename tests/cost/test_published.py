"""Figures that papers and model cards print come out: each with where it stands."""

from __future__ import annotations

from dataclasses import replace

import pytest

from regard.configs.published import PUBLISHED_MODELS
from regard.cost import CostReport, Setting, model_of
from regard.cost.fixed_state import (
    InfiniSpec,
    infini_state,
    memorizing_cache,
    memory_token_values,
    segment_cache,
)
from regard.cost.latent import LatentSpec, latent_values
from regard.cost.mechanisms import Sizes
from regard.cost.selected import NSASpec, nsa_tokens
from regard.cost.softmax import SoftmaxSpec
from regard.cost.spec import HeadShape
from tests.cost.test_mixed_models import PUBLISHED as PUBLISHED_MIXED

# numbers of parameters that the files of these checkpoints hold; of GPT-3, which was never
# released, what its sizes make
PARAMETERS = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "gpt3": 174_604_259_328,
    "gpt-oss-20b": 20_914_757_184,
    "gpt-oss-120b": 116_829_156_672,
    "llama-2-7b": 6_738_415_616,
    "llama-2-13b": 13_015_864_320,
    "llama-2-70b": 68_976_648_192,
    "llama-3-8b": 8_030_261_248,
    "llama-3-70b": 70_553_706_496,
    "llama-3-405b": 405_853_388_800,
    "llama-3.2-1b": 1_235_814_400,
    "llama-3.2-3b": 3_212_749_824,
    "mistral-7b": 7_241_732_096,
    "mistral-7b-v0.3": 7_248_023_552,
    "mistral-nemo": 12_247_782_400,
    "mixtral-8x7b": 46_702_792_704,
    "qwen2-0.5b": 494_032_768,
    "qwen2-1.5b": 1_543_714_304,
    "qwen2-7b": 7_615_616_512,
    "qwen2-72b": 72_706_203_648,
    "qwen2.5-0.5b": 494_032_768,
    "qwen2.5-1.5b": 1_543_714_304,
    "qwen2.5-3b": 3_085_938_688,
    "qwen2.5-7b": 7_615_616_512,
    "qwen2.5-14b": 14_770_033_664,
    "qwen2.5-32b": 32_763_876_352,
    "qwen2.5-72b": 72_706_203_648,
    "qwen3-0.6b": 596_049_920,
    "qwen3-1.7b": 1_720_574_976,
    "qwen3-4b": 4_022_468_096,
    "qwen3-8b": 8_190_735_360,
    "qwen3-14b": 14_768_307_200,
    "qwen3-32b": 32_762_123_264,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
    "gemma-2-2b": 2_614_341_888,
    "gemma-2-9b": 9_241_705_984,
    "gemma-2-27b": 27_227_128_320,
    "gemma-3-1b": 999_885_952,
    "deepseek-v2": 235_741_434_880,
    "deepseek-v2-lite": 15_706_484_224,
    "deepseek-v3": 671_026_419_200,
    "mistral-small-24b": 23_572_403_200,
    "mistral-large-2": 122_610_069_504,
    "phi-3-mini": 3_821_079_552,
    "phi-4": 14_659_507_200,
    "olmo-2-7b": 7_298_617_344,
    "olmo-2-13b": 13_716_198_400,
    "olmo-2-32b": 32_234_279_936,
    "kimi-k2": 1_026_408_232_448,
    "qwen3-coder-480b-a35b": 480_154_875_392,
    "smollm2-135m": 134_515_008,
    "smollm2-1.7b": 1_711_376_384,
    "smollm3-3b": 3_075_098_624,
    "tinyllama-1.1b": 1_100_048_384,
    "falcon3-7b": 7_455_550_464,
    "pythia-6.9b": 6_857_302_016,
    "mpt-7b": 6_649_286_656,
    "bloom": 176_247_271_424,
    "gemma-2b": 2_506_172_416,
    "gemma-7b": 8_537_680_896,
    "mixtral-8x22b": 140_630_071_296,
    "ministral-8b": 8_019_808_256,
    "bert-base": 109_482_240,
    "bert-large": 335_141_888,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "flan-t5-xl": 2_849_757_184,
    "whisper-tiny": 37_760_640,
    "whisper-base": 72_593_920,
    "whisper-small": 241_734_912,
    "whisper-medium": 763_857_920,
    "whisper-large-v3": 1_543_490_560,
    "whisper-large-v3-turbo": 808_878_080,
    "kimi-k2-thinking": 1_026_408_232_448,
    "kimi-k2.5": 1_026_408_232_448,
}


@pytest.mark.parametrize("name", PARAMETERS)
def test_parameters(name: str) -> None:
    assert model_of(name).parameters == PARAMETERS[name]


# what the names of the others say, in billions
ROUNDED = {
    "gpt3-6.7b": 6.7,
    "llama-3.1-8b": 8,
    "llama-3.1-70b": 70,
    "llama-3.1-405b": 405,
    "llama-3.3-70b": 70,
    "mistral-7b-v0.1": 7,
    "gemma-3-4b": 4,
    "gemma-3-12b": 12,
    "gemma-3-27b": 27,
    "deepseek-r1": 671,
}


def test_a_context_beyond_what_the_maker_gives_is_noted() -> None:
    model = model_of("gemma-4-31b")
    assert model.stated_context == 262144
    within, beyond = (CostReport(model, Setting(n)).notes for n in (262144, 262145))
    assert within == model.notes
    assert "longer than the 262,144 tokens" in beyond[-1]
    stated = {x for x in PUBLISHED_MODELS if model_of(x).stated_context}
    learned = {x for x in PUBLISHED_MODELS if model_of(x).max_context}
    assert stated | learned == set(PUBLISHED_MODELS)
    assert not stated & learned


def test_every_known_model_is_compared() -> None:
    assert set(PUBLISHED_MODELS) == PARAMETERS.keys() | ROUNDED.keys() | PUBLISHED_MIXED.keys()
    for name, billions in ROUNDED.items():
        assert model_of(name).parameters / 1e9 == pytest.approx(billions, rel=0.04), name


def test_gpt3_attention_is_a_third() -> None:
    """4 x 12288 x 128 per head, 96 heads, 96 layers; one layer is 0.6 billion, not all of it."""
    model = model_of("gpt3")
    assert model.attention_parameters == 57_982_058_496 == 96 * 603_979_776
    assert 603_979_776 == 96 * 6_291_456 == model.layers[0].mixer.weights.matrices
    assert round(model.attention_parameters / 175e9, 3) == 0.331
    assert round(model.attention_parameters / model.parameters, 3) == 0.332
    assert any(
        "603,979,776 in one layer" in note and "0.604 billion" in note for note in model.notes
    )


@pytest.mark.parametrize(
    ("name", "experts", "attention", "tables", "active"),
    [("gpt-oss-120b", 114.71, 0.96, 1.16, 5.13), ("gpt-oss-20b", 19.12, 0.64, 1.16, 3.61)],
)
def test_the_table_of_the_gpt_oss_card(
    name: str, experts: float, attention: float, tables: float, active: float
) -> None:
    """arXiv 2508.10925, table 1: billions, embedding and head together, biases with their parts."""
    model = model_of(name)
    parts = {part.name: part.parameters for part in model.parts}
    layers = len(model.layers)
    feed = model.layers[0].feed_forward
    assert feed is not None
    biases = layers * sum(w.biases for w in feed.weights.values())
    assert round((parts["experts"] + parts["router"] + biases) / 1e9, 2) == experts
    assert round(parts["attention"] / 1e9, 2) == attention
    assert round((parts["embedding"] + parts["head"]) / 1e9, 2) == tables
    assert round(model.active_parameters / 1e9, 2) == active


@pytest.mark.parametrize(
    ("name", "billions"),
    [
        ("deepseek-v2", 21),
        ("qwen3-235b-a22b", 22),
        ("qwen3-30b-a3b", 3),
        ("mixtral-8x7b", 13),
        ("deepseek-v3", 37),
        ("qwen3-coder-480b-a35b", 35),
        ("kimi-k2", 32),
    ],
)
def test_active_parameters(name: str, billions: int) -> None:
    assert round(model_of(name).active_parameters / 1e9) == billions


@pytest.mark.parametrize(
    ("name", "size"),
    [
        ("llama-3-8b", 131_072),
        ("llama-3-70b", 327_680),
        ("llama-2-7b", 524_288),
        ("deepseek-v3", 70_272),
        ("deepseek-v2", 2 * 34_560),
        ("gpt3", 4_718_592),
    ],
)
def test_cache_bytes_per_token(name: str, size: int) -> None:
    assert CostReport(model_of(name), Setting(1)).kv_bytes_per_token == size


def test_gemma_3_1b_keeps_139_of_832_mib() -> None:
    report = CostReport(model_of("gemma-3-1b"), Setting(32768))
    assert report.kv_bytes == 139 * 2**20
    assert report.kv_bytes_per_token * 32768 == 832 * 2**20
    assert report.kv_growth == 4 * 1024
    assert [m.window for m in report.model.mixers if isinstance(m, SoftmaxSpec)].count(512) == 22


def kept(groups: int, heads_by_layers: int) -> int:
    """Numbers per token of so many key/value heads of 128, in all layers."""
    return (
        groups
        * heads_by_layers
        * SoftmaxSpec.of(128, HeadShape(1, 1, 128, 128)).cached(1).values_per_token
    )


def test_deepseek_v2_tables() -> None:
    """Table 1: numbers per token of the model, which equal those of 2.25 groups; table 9: a small
    and a large model.
    """
    v2 = model_of("deepseek-v2").layers[0].mixer
    assert isinstance(v2, LatentSpec)
    assert latent_values(512, 64) * 60 == 60 * v2.cached(1).values_per_token == 34_560
    assert 2.25 * kept(1, 60) == 34_560
    assert kept(16, 27) == 110_592
    assert latent_values(512, 64) * 27 == 15_552
    assert round(15_552 / 110_592, 2) == 0.14
    assert kept(1, 3360) == 860_160
    assert round(34_560 / 860_160, 2) == 0.04
    v3 = model_of("deepseek-v3")
    assert sum(m.cached(1).values_per_token for m in v3.mixers) == 35_136
    assert round(128 * (128 + 64 + 128) / latent_values(512, 64), 1) == 71.1


@pytest.mark.parametrize(
    ("context", "expand", "absorb", "times"),
    [
        (1024, 34_443_624_448, 318_767_104, 108),
        (8192, 275_548_995_584, 2_315_255_808, 119),
        (65536, 2_204_391_964_672, 18_287_165_440, 121),
    ],
)
def test_one_token_of_latent_attention(context: int, expand: int, absorb: int, times: int) -> None:
    """One layer of DeepSeek-V3, without the matrices that both forms share."""
    mixer = model_of("deepseek-v3").layers[0].mixer
    assert isinstance(mixer, LatentSpec)
    assert mixer.flops(1, context, "expand") == expand
    assert mixer.flops(1, context, "absorb") == absorb == mixer.decode_flops(context)
    assert round(expand / absorb) == times
    forms = CostReport(model_of("deepseek-v3"), Setting(context)).decode_forms
    assert forms["expand"] - forms["absorb"] == 61 * (expand - absorb)


def test_infini_table_2() -> None:
    """12 layers, 8 heads of 128, segments of 2048; factors against the Memorizing Transformer."""
    memory = infini_state(8, 128, 128, 12)
    assert (
        memory
        == 1_585_152
        == 12 * InfiniSpec.of(1024, HeadShape(8, 8, 128, 128), 2048).cached(4096).values
    )
    largest = memorizing_cache(8, 128, 128, 2048, 65_000, 12)
    assert largest == 183_451_648
    assert memorizing_cache(8, 128, 128, 2048, 65_536, 12) == 184_549_376
    others = {
        segment_cache(8, 128, 128, 2048, 12): (50_331_648, 3.7),
        memory_token_values(1024, 100, 12): (2_457_600, 73),
    }
    for numbers, (printed, times) in others.items():
        assert numbers == printed
        assert 183e6 / numbers == pytest.approx(times, rel=0.025)
    assert 183e6 / memory == pytest.approx(114, rel=0.02)


@pytest.mark.parametrize(
    ("context", "read", "times"),
    [(8192, 2048, 4), (16384, 2560, 6.4), (32768, 3584, 9.1), (65536, 5632, 11.6)],
)
def test_nsa_table_4(context: int, read: int, times: float) -> None:
    """The table counts s / d compressed tokens; of those that are complete there is one less, l / d
    - 1.
    """
    assert nsa_tokens(context, 16, 64, 16, 512) == read
    assert round(context / read, 1) == times
    assert NSASpec.of(2560, HeadShape(64, 4, 192, 128)).read(context).tokens == read - 1


@pytest.mark.parametrize(
    ("groups", "window", "size"),
    [
        (None, None, 17_179_869_184),
        (8, None, 4_294_967_296),
        (None, 1024, 3_137_339_392),
        (8, 1024, 784_334_848),
    ],
)
def test_the_estimator_of_llms_from_scratch(
    groups: int | None, window: int | None, size: int
) -> None:
    """32 layers, 32 heads, width 4096, 32768 tokens in bf16; five layers with a window, then one
    without.
    """
    options = {"groups": groups, "window": window}
    sizes = Sizes(32, 4096, 32, options={k: v for k, v in options.items() if v is not None})
    sizes = sizes if window is None else replace(sizes, global_every=6)
    assert CostReport(sizes.model(), Setting(32768)).kv_bytes == size
