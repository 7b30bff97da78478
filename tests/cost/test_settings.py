"""Formats of caches, machines, bounds, ranges and sizes given by hand: values worked out here, and
what is refused.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from regard.configs.reader import read_sizes, read_sizes_file, sizes_config
from regard.cost import CostReport, Setting, machine_of, model_of
from regard.cost.mechanisms import Sizes
from regard.cost.model import DenseSpec, MoESpec
from regard.cost.report import KVFormat, bits_per_value
from regard.cost.roofline import MACHINES, Machine, as_json, memory_fit, roofline_bounds
from regard.cost.spec import CacheContents
from regard.cost.sweep import (
    compare_models,
    contexts_within_positions,
    model_figures,
    parse_context_range,
    parse_tokens,
    sweep,
)
from regard.errors import ArgumentError, FileError
from regard.view import cost_text
from tests.cost.tiny import DEEPSEEK, LLAMA, TINY


@pytest.mark.parametrize(("bits", "group", "each"), [(2, 32, 3), (2, 128, 2.25), (4, 64, 4.5)])
def test_bits_of_kivi(bits: int, group: int, each: float) -> None:
    assert bits_per_value(bits, group) == Fraction(each)


@pytest.mark.parametrize(("name", "bits"), [("int8", 8), ("int4", 4), ("int2", 2)])
@pytest.mark.parametrize("count", [0, 128, 159, 160, 1000])
def test_bytes_of_codes(name: str, bits: int, count: int) -> None:
    """Keys and values of 2 heads of 48: groups of 24 channels, and of as many tokens, behind the
    last 128.
    """
    memory = CacheContents(((2, 48), (2, 48)), count)
    coded = max(0, count - 128) // 24 * 24
    codes = 2 * 2 * 48 * coded * bits / 8
    scales = 2 * (2 * 48 * coded / 24) * 2 * 2
    rest = 2 * 2 * 48 * (count - coded) * 2
    assert KVFormat(name).total_bytes(memory) == math.ceil(codes + scales + rest)


def test_windows_and_states_stay_as_they_are() -> None:
    held = CacheContents(((2, 48), (2, 48)), 1000, bounded=True)
    for name in ("int4", "bf16", "fp8"):
        assert KVFormat(name).total_bytes(held) == 1000 * 192 * 2
    assert KVFormat("int4").total_bytes(CacheContents(state=10)) == 40


def test_a_batch_reads_weights_once_and_experts_as_they_are_met() -> None:
    experts = MoESpec(DenseSpec(8, 4), 4, 2)
    assert experts.active_weights(1)["experts"].matrices == 2 * 96
    assert experts.active_weights(2)["experts"].matrices == 3 * 96  # 4 (1 - 1/4)
    assert experts.active_weights(10**6)["experts"].matrices == 4 * 96
    model = model_of("llama-3-8b")
    one, many = CostReport(model, Setting(1000)), CostReport(model, Setting(1000, batch=8))
    assert many.decode_flops == 8 * one.decode_flops
    assert many.kv_bytes == 8 * one.kv_bytes
    tables = 7 * 4096 * 2  # seven more rows of the embedding
    assert (
        many.decode_bytes() - one.decode_bytes()
        == 7 * (one.kv_bytes + one.kv_bytes_per_token) + tables
    )


def test_bytes_of_one_token_by_hand() -> None:
    """Weights but for the embedding, of which one row is read; the cache, and the new token's part
    of it.
    """
    report = CostReport(model_of("llama-3-8b"), Setting(8192))
    weights = 2 * (8_030_261_248 - 128256 * 4096 + 4096)
    assert report.decode_bytes() == weights + 8192 * 131_072 + 131_072
    flops = 2 * (8_030_261_248 - 128256 * 4096 - 65 * 4096) + 4 * 32 * 32 * 128 * 8192
    assert report.decode_flops == flops


def test_an_encoder_decodes_nothing() -> None:
    report = CostReport(read_sizes(TINY["bert"], "bert"), Setting(10))
    assert report.kv_bytes == report.kv_bytes_per_token == 0
    assert report.decode_flops == report.decode_bytes() == 0
    layer = 4 * 24 * 24 + 2 * 24 * 40
    assert report.prefill_flops == 2 * (2 * 10 * layer + 2 * 100 * 2 * 24) + 2 * 24 * 24
    assert set(roofline_bounds(report, machine_of("l4"))) == {"prefill"}


def test_an_encoder_decoder_reads_one_text_and_writes_another() -> None:
    report = CostReport(read_sizes(TINY["t5"], "t5"), Setting(10, dtype="fp32"))
    each = 2 * 4 * 8  # keys and values of a token
    assert report.kv_bytes_per_token == 3 * each * 4
    assert report.kv_bytes == 3 * 2 * 10 * each * 4  # own text and source
    half = CostReport(report.model, Setting(10))
    assert half.kv_bytes_per_token == report.kv_bytes_per_token / 2
    assert half.kv_bytes == report.kv_bytes / 2
    matrix, feed, head = 24 * 32, 2 * 24 * 40, 97 * 24
    one = 2 * (3 * (4 * matrix + 2 * matrix + feed) + head)
    assert report.decode_flops == one + 3 * 2 * (4 * 4 * 8 * 10)
    reading = 2 * (2 * 10 * (4 * matrix + feed) + 4 * 4 * 8 * 100)
    across = 3 * 2 * 10 * 2 * matrix
    assert report.prefill_flops == reading + across + one + 3 * (4 * 4 * 8 * (10 + 1))


def test_every_machine_says_where_from() -> None:
    for name, machine in MACHINES.items():
        assert machine.name == name
        assert machine.bandwidth > 1e10
        assert min(machine.flops.values()) > 1e11
        assert machine.source.startswith(("NVIDIA", "AMD", "Intel", "Apple", "Google"))
    assert MACHINES["epyc-9654"].bandwidth == 12 * 4800e6 * 8
    assert MACHINES["epyc-9654"].flops["fp32"] == pytest.approx(96 * 32 * 2.4e9)


def test_a_rate_falls_back_to_what_codes_are_computed_in() -> None:
    h100, cpu = machine_of("h100-sxm"), machine_of("xeon-8380")
    assert h100.rate("int4") == h100.rate("fp16") == h100.flops["bf16"]
    assert h100.rate("fp8") == 2 * h100.rate("bf16")
    assert cpu.rate("int8") == cpu.rate("bf16") == cpu.flops["fp32"]
    assert machine_of("t4").rate("bf16") == machine_of("t4").flops["fp32"]  # it has no bf16
    assert Machine("x", 1.0, {"bf16": 2.0}, 0, "").rate("fp32") == 2.0


def test_bounds_by_hand() -> None:
    report, machine = CostReport(model_of("llama-3-8b"), Setting(8192)), machine_of("h100-sxm")
    found = roofline_bounds(report, machine)
    assert (found["decode"].by, found["prefill"].by) == ("memory", "compute")
    assert found["decode"].seconds == report.decode_bytes() / 3350e9
    assert found["prefill"].seconds == report.prefill_flops / 989.5e12
    assert as_json(report, machine)["fit"] == "fits"
    assert as_json(report, machine_of("xeon-8380"))["fit"] is None


DRIVERS = {  # MiB in all: memory.total of nvidia-smi, and rocminfo's 201,310,208 KiB
    "v100-sxm": 32510,
    "t4": 15360,
    "a100-40gb": 40960,
    "a100-80gb": 81920,
    "a10g": 23028,
    "l4": 23034,
    "l40s": 46068,
    "h100-pcie": 81559,
    "h100-sxm": 81559,
    "h200-sxm": 143771,
    "b200": 183359,
    "rtx-3090": 24576,
    "rtx-4090": 24564,
    "rtx-6000-ada": 49140,
    "rtx-pro-6000": 97887,
    "rtx-5090": 32607,
    "mi300x": 201_310_208 // 1024,
    "rtx-a6000": 49140,
}
UNCONFIRMED = {"b300": 288, "mi325x": 256, "gaudi-3": 128}
"""GB that makers name, of cards of which no report of the driver is known."""


def test_memory_is_what_the_driver_reports() -> None:
    for name, machine in MACHINES.items():
        if name in UNCONFIRMED:
            assert 0 <= UNCONFIRMED[name] * 10**9 - machine.memory < 2**20
            assert "unconfirmed" in machine.memory_source
            continue
        if "Apple sells" in machine.memory_source:
            assert f"{machine.memory >> 30} GB, shared with the CPU" in machine.memory_source
            continue
        assert machine.memory == DRIVERS.get(name, 0) * 2**20, name
        if not machine.memory:
            assert machine.memory_source == ""
            continue
        assert machine.memory_source.startswith(f"{DRIVERS[name]:,} MiB in all by ")
        sold = int(machine.memory_source.removesuffix(" GB").rpartition(" ")[2])
        wrong = sold * 10**9  # what was taken before
        assert 0.93 * sold * 2**30 < machine.memory <= sold * 2**30, "makers' GB are GiB, nearly"
        assert machine.memory != wrong
    llama = CostReport(model_of("llama-3-70b"), Setting(4096))
    assert llama.weight_bytes == 141_107_412_992
    room = memory_fit(llama, machine_of("h200-sxm"))
    assert (room.needed, room.memory) == (142_449_590_272, 150_754_820_096)
    assert room.verdict == "tight", "94 % of the card are weights and cache"
    longer = CostReport(model_of("llama-3-70b"), Setting(32768))
    assert memory_fit(longer, machine_of("h200-sxm")).verdict == "does not fit"
    told = as_json(llama, machine_of("h100-sxm"))
    assert told["fit"] == "does not fit"
    assert (told["memory_bytes"], told["needed_bytes"]) == (81559 * 2**20, 142_449_590_272)
    assert told["memory_source"] == "81,559 MiB in all by nvidia-smi, sold as 80 GB"
    assert as_json(llama, machine_of("xeon-8380"))["memory_bytes"] is None


def test_ranges() -> None:
    assert parse_context_range("context=1k..1M") == [1024 * 2**i for i in range(11)]
    assert parse_context_range("context=3..3") == [3]
    both = model_of("gpt2"), model_of("llama-3-8b")
    assert contexts_within_positions([512, 1024, 2048], *both) == [512, 1024]


def test_a_sweep_and_two_models() -> None:
    model, machine = model_of("llama-3-8b"), machine_of("l4")
    report = CostReport(model, Setting())
    rows = sweep(model, Setting(), [1000, 2000], machine)
    assert [row["kv_bytes"] for row in rows] == [1000 * 131_072, 2000 * 131_072]
    assert rows[0]["decode_seconds"] == rows[0]["decode_bytes"] / 300e9
    both = compare_models([CostReport(model_of("llama-2-7b"), Setting()), report], machine)
    assert both["ratios"]["kv_bytes"] == 4
    assert both["ratio"] == "llama-2-7b / llama-3-8b"
    seconds = [one["roofline"]["decode"]["seconds"] for one in both["models"]]
    assert both["ratios"]["decode_seconds"] == seconds[0] / seconds[1]
    large = CostReport(model_of("deepseek-v3"), Setting())
    huge = compare_models([large, report], machine_of("h100-sxm"))
    assert [one["roofline"]["fit"] for one in huge["models"]] == ["does not fit", "fits"]
    assert huge["ratios"]["decode_seconds"] is None, "there is no such time"
    rows = sweep(model, Setting(), [2**10, 2**15, 2**18], machine)
    assert [row["fit"] for row in rows] == ["fits", "fits", "does not fit"]
    assert both["models"][1] == model_figures(report, machine)
    encoder = CostReport(read_sizes(TINY["bert"], "bert"), Setting(9))
    assert compare_models([report, encoder])["ratios"]["kv_bytes"] is None
    json.dumps(both, allow_nan=False)


def test_sizes_by_hand_are_the_model_that_they_describe() -> None:
    mixtral = Sizes(32, 4096, 32, options={"groups": 8}, ff=14336, vocab=32000, experts=8, active=2)
    assert mixtral.model().parameters == model_of("mixtral-8x7b").parameters
    latent = {"kv_rank": 512, "q_rank": 1536, "nope_dim": 128, "rope_dim": 64, "value_dim": 128}
    experts = {"experts": 160, "active": 6, "expert_ff": 1536, "shared": 2, "dense_layers": 1}
    v2 = Sizes(60, 5120, 128, "mla", latent, ff=12288, vocab=102400, **experts)
    assert v2.model().parameters == model_of("deepseek-v2").parameters
    plain = Sizes(1, 32, 4, ff=64, gated=False, vocab=100, tied=True).model()
    assert plain.parameters == 4 * 32 * 32 + 2 * 32 * 64 + 100 * 32 + 3 * 32


def tiny(family: str, change: dict[str, Any]) -> dict[str, Any]:
    return {**(DEEPSEEK if "deepseek" in family else LLAMA), "model_type": family, **change}


SLIDING = {"sliding_window": None, "layer_types": ["sliding_attention"] * 3}
OWN = TINY["regard"]
CONFIGS: list[tuple[dict[str, Any], str]] = [
    ({"model_type": "lama"}, r"'lama' is not known; did you mean 'llama'\? Known are apertus"),
    ({}, "model_type None is not known"),
    ({"model_type": "llama"}, r"config\.json: it lacks vocab_size, hidden_size"),
    (tiny("llama", {"hidden_size": "24"}), "hidden_size is '24'; it must be int"),
    (tiny("llama", {"num_hidden_layers": True}), "num_hidden_layers is True"),
    (tiny("llama", {"num_key_value_heads": 4}), "6 query heads are not divisible by 4"),
    (tiny("llama", {"tie_word_embeddings": 1}), "tie_word_embeddings is 1; it must be bool"),
    (tiny("llama", {"head_dim": None, "hidden_size": 25}), "and head_dim is not given"),
    (tiny("gemma2", {"layer_types": ["full_attention"]}), "layer_types has 1 entry and"),
    (tiny("gemma2", {"layer_types": ["full"] * 3}), r"layer_types\[0\] is 'full'; supported"),
    (tiny("gemma2", SLIDING), "layer 0 'sliding_attention', and sliding_window is null"),
    (tiny("deepseek_v2", {"n_routed_experts": None}), "it lacks n_routed_experts"),
    (tiny("deepseek_v2", {"moe_layer_freq": 2}), "moe_layer_freq is 2; only 1 is supported"),
    ({**OWN, "attention": "moba"}, "the cost of attention 'moba' cannot be counted"),
    ({**OWN, "attention": "mha", "attention_options": {"bias": True}}, "bias is not counted"),
]
NSA = Sizes(2, 32, 4, attention="nsa", options={"groups": 2, "window": 6}, global_every=2)
WRONG: list[tuple[Callable[[], Any], str]] = [
    (lambda: Setting(context=0), "context is 0; it must be at least 1"),
    (lambda: Setting(batch=-1), "batch is -1; it must be at least 1"),
    (lambda: Setting(dtype="fp4"), "the dtype is 'fp4'; it must be one of fp32, bf16"),
    (lambda: Setting(kv_dtype="bf8"), "'bf8' is not a number format; it must be one of"),
    (lambda: CostReport(model_of("gpt2"), Setting(1025)), "context is 1,025 tokens, but gpt2 has"),
    (lambda: machine_of("h100"), "did you mean 'h100-sxm' or 'h100-pcie'"),
    (lambda: parse_context_range("heads=1..4"), r"write for example context=1k\.\.1M"),
    (lambda: parse_context_range("context=1k"), "is not a range of contexts"),
    (lambda: parse_context_range("context=4k..1k"), "ends before it starts"),
    (lambda: parse_tokens("1G"), "'1G' is not a number of tokens"),
    (lambda: parse_tokens("0"), "'0' is not a number of tokens"),
    (lambda: parse_tokens("9" * 18), "is not a number of tokens"),
    (lambda: contexts_within_positions([2048], model_of("gpt2")), "start the range at or below"),
    (lambda: Sizes(0, 32, 4), "layers is 0; it must be at least 1"),
    (lambda: Sizes(2, 32, 4, global_every=6), "--global-every needs a window"),
    (lambda: Sizes(2, 32, 4, experts=8), "--experts and --active belong together"),
    (lambda: Sizes(2, 32, 4, experts=8, active=9), "--active is 9, but --experts is 8"),
    (lambda: Sizes(2, 32, 4, dense_layers=-1), "dense_layers is -1; it must be at least 0"),
    (lambda: Sizes(2, 32, 4, shared=1), "--dense-layers need experts"),
    (NSA.model, "--global-every needs one of mha, gqa, mqa, value_residual; --att"),
    (lambda: model_of("llama3-8b"), "did you mean 'llama-3-8b'"),
    *((lambda raw=raw: read_sizes(raw, "x"), message) for raw, message in CONFIGS),
]


@pytest.mark.parametrize(("call", "message"), WRONG)
def test_what_is_refused(call: Callable[[], Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        call()


def test_files(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    refused = {"{": "is not JSON", "[" * 100_000: "is nested too deep", "[]": "is a JSON list"}
    for text, message in refused.items():
        path.write_text(text)
        with pytest.raises(FileError, match=message):
            read_sizes_file(path)
    path.write_text(json.dumps({**TINY["llama"], "torch_dtype": "float16"}))
    found = read_sizes_file(tmp_path)
    assert (found.name, found.dtype) == (tmp_path.name, "fp16")
    assert found == read_sizes_file(path) == model_of(str(tmp_path))
    os.truncate(path, (16 << 20) + 1)
    with pytest.raises(FileError, match=r"has 16777217 bytes; at most 16777216 are read"):
        read_sizes_file(path)
    path.unlink()
    with pytest.raises(FileError, match=r"config\.json does not exist; give a config.json"):
        read_sizes_file(tmp_path)


def test_names_in_any_case() -> None:
    assert model_of("LLaMA-3-8B") == model_of("llama-3-8b")


def test_names_that_are_imported_when_used() -> None:
    import regard.cost

    assert regard.cost.CostReport is CostReport
    with pytest.raises(AttributeError, match="no attribute 'Bil'"):
        _ = regard.cost.Bil


def test_keys_that_a_config_lacks() -> None:
    """A size that config.json lacks is the one that transformers takes."""
    mapping = pytest.importorskip("transformers", reason="needs the extra").CONFIG_MAPPING
    refusals = pytest.importorskip("huggingface_hub.errors").StrictDataclassError
    compared, wrong = 0, {}
    for name, raw in TINY.items():
        if raw["model_type"] == "regard" or "text_config" in raw or "global_head_dim" in raw:
            continue  # the last: transformers names no size of all layers
        unused = {"num_key_value_heads"} if "kv_lora_rank" in raw else set()  # by latent attention
        for key in {*raw, "head_dim", "num_key_value_heads"} - {"model_type"} - unused:
            rest = {k: v for k, v in raw.items() if k not in (key, "model_type")}
            try:
                ours = getattr(sizes_config(rest | {"model_type": raw["model_type"]}), key, None)
                theirs = mapping[raw["model_type"]](**{"pad_token_id": None, **rest})
            except (ValueError, TypeError, refusals):
                continue  # needed, or contradicts another key
            wanted = getattr(theirs, key, None)
            if key == "head_dim" and wanted is None and type(ours) is int:
                wanted = theirs.hidden_size // theirs.num_attention_heads
            if type(ours) is type(wanted) is int:
                compared += 1
                if ours != wanted:
                    wrong[name, key] = ours, wanted
    assert not wrong
    assert compared > 150


def test_parts_that_are_not_counted() -> None:
    text = TINY["gemma3"]["text_config"]
    both = {"model_type": "gemma3", "text_config": text}
    one = read_sizes(both | {"vision_config": {"hidden_size": 8}}, "x")
    assert any("vision_config" in note for note in one.notes)
    assert any("text_config" in note for note in read_sizes(both, "x").notes)
    further = {"model_type": "deepseek_v3", **DEEPSEEK, "num_nextn_predict_layers": 1}
    assert any("num_nextn" in note for note in read_sizes(further, "x").notes)
    assert not read_sizes({"model_type": "llama", **LLAMA}, "x").notes


def test_a_batch_is_not_one_token() -> None:
    report = CostReport(model_of("gpt2"), Setting(8, batch=8))
    other = replace(report, setting=Setting(8))
    pages = [cost_text.page(x, None) for x in (report, other)]
    tables = [cost_text.sweep_table("", sweep(x.model, x.setting, [8])) for x in (report, other)]
    pairs = [cost_text.comparison([x, x], None) for x in (report, other)]
    for many, one in (pages, tables, pairs):
        assert "one token each" in many
        assert "prompts" in many
        assert "one token" in one
        assert "one token each" not in one
        assert "prompts" not in one
