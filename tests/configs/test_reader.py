"""One reader of config.json: loading and counting read the same config, and counting needs less."""

from __future__ import annotations

import copy
import json
import math
import os
import random
import subprocess
import sys
import tracemalloc
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.configs import CONFIG_MODULES, CONFIGS, config_class
from regard.configs.base import ModelConfig, UnknownKey
from regard.configs.reader import FIXED_VALUES, ROPE_KEYS, SIZE_KEYS, parse, read_sizes
from regard.errors import ArgumentError, RegardError
from regard.files.reading import INFINITY
from regard.models.families import find_family
from tests.cost.tiny import TINY

CODE = """
import json, sys
from regard.configs.reader import parse, read_sizes
from regard.configs import config_class
for name, raw in json.load(sys.stdin).items():
    parse(config_class(raw["model_type"]), raw)
    read_sizes(raw, name)
json.dump(sorted(sys.modules), sys.stdout)
"""


def config_of(raw: dict[str, Any]) -> type[ModelConfig]:
    found = config_class(raw["model_type"])
    assert found is not None
    return found


def test_every_model_type_has_one_class_and_a_small_config() -> None:
    assert {raw["model_type"] for raw in TINY.values()} == set(CONFIGS) == set(CONFIG_MODULES)
    for name in CONFIGS:
        found = config_class(name)
        assert found is not None
        assert name in found.model_types
        assert found.model_types[0] in CONFIGS
    assert config_class("lama") is None
    assert find_family("lama") is None


@pytest.mark.parametrize("name", CONFIGS)
def test_loading_and_counting_read_through_one_class(name: str) -> None:
    found, counted = find_family(name), config_class(name)
    assert counted is not None
    # the class of regard's own decoders also builds its mechanism, which needs torch
    assert found.config is counted or (name == "regard" and issubclass(found.config, counted))
    assert [f.name for f in fields(found.config)] == [f.name for f in fields(counted)]


@pytest.mark.parametrize("name", TINY)
def test_the_strict_config_has_the_sizes_that_are_counted(name: str) -> None:
    raw = TINY[name]
    assert parse(config_of(raw), raw).sizes(name) == read_sizes(raw, name)


def test_all_of_it_without_torch() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(regard.__file__).parents[1])}
    done = subprocess.run(
        [sys.executable, "-c", CODE],
        input=json.dumps(TINY),
        env=environment,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    )
    found = set(json.loads(done.stdout))
    assert {"torch", "numpy", "safetensors", "tokenizers"}.isdisjoint(found)
    assert "regard.configs.llama" in found


@pytest.mark.parametrize("name", TINY)
def test_counting_passes_over_what_loading_refuses(name: str) -> None:
    raw = {**TINY[name], "a_key_of_tomorrow": 1}
    with pytest.raises(UnknownKey, match="unknown key 'a_key_of_tomorrow'"):
        parse(config_of(raw), raw)
    assert read_sizes(raw, name) == read_sizes(TINY[name], name)


@pytest.mark.parametrize(
    "change",
    [
        {"hidden_act": "gelu"},
        {"rope_scaling": {"rope_type": "of tomorrow", "factor": 2}},
        {"rope_theta": "large"},
        {"auto_map": {"AutoModel": "mine.Model"}},
        {"is_decoder": True},
        {"tie_word_embeddings": None},
    ],
)
def test_counting_passes_over_what_changes_no_size(change: dict[str, Any]) -> None:
    raw = {**TINY["llama"], **change}
    with pytest.raises(ArgumentError):
        parse(config_of(raw), raw)
    assert read_sizes(raw, "llama") == read_sizes(TINY["llama"], "llama")


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("phi3", {"attention_bias": True}),
        ("phi3", {"mlp_bias": True}),
        ("bloom", {"n_inner": 7}),
        ("mpt", {"expansion_ratio": 2}),
        ("mpt", {"no_bias": False}),
        ("gpt2", {"add_cross_attention": True}),
        ("bert", {"position_embedding_type": "relative_key"}),
        ("deepseek_v3", {"moe_layer_freq": 2}),
        ("qwen3_moe", {"mlp_only_layers": [0]}),
        ("qwen3_moe", {"decoder_sparse_step": 2}),
    ],
)
def test_what_changes_sizes_is_refused_by_both(name: str, change: dict[str, Any]) -> None:
    raw = {**TINY[name], **change}
    (key,) = change
    for read in (lambda: parse(config_of(raw), raw), lambda: read_sizes(raw, name)):
        with pytest.raises(ArgumentError, match=f"{key} is .*; only .* is supported for {name}"):
            read()
    assert key in SIZE_KEYS


def test_the_lists_of_keys_do_not_contradict_each_other() -> None:
    assert not SIZE_KEYS & ROPE_KEYS
    sized = {
        key
        for name in CONFIGS
        for key in {**FIXED_VALUES, **(config_class(name) or ModelConfig).fixed}
        if key in SIZE_KEYS
    }
    assert sized == SIZE_KEYS, "every one of them is fixed in some family"


@pytest.mark.parametrize("name", ["mixtral", "qwen3_moe"])
def test_mixtures_that_are_counted_only(name: str) -> None:
    """By hand: a router and gated experts in each of 3 layers."""
    raw = TINY[name]
    width = raw.get("moe_intermediate_size", 40)
    parts = {part.name: part.parameters for part in read_sizes(raw, name).parts}
    assert parts["experts"] == 3 * 4 * 3 * 24 * width
    assert parts["router"] == 3 * 4 * 24
    with pytest.raises(ArgumentError, match="num_experts_per_tok is 5"):
        read_sizes({**raw, "num_experts_per_tok": 5}, name)


def test_too_many_unknown_keys_inside() -> None:
    raw = {**TINY["mpt"], "attn_config": {f"key {i}": 1 for i in range(99)}}
    with pytest.raises(ArgumentError, match="more than 64 unknown keys"):
        read_sizes(raw, "mpt")
    raw["attn_config"] = {"one more": 1}
    assert read_sizes(raw, "mpt") == read_sizes(TINY["mpt"], "mpt")


@pytest.mark.parametrize(
    ("named", "wanted"),
    [({}, "bf16"), ({"torch_dtype": "float16"}, "fp16"), ({"dtype": "torch.float32"}, "fp32")],
)
def test_the_dtype_that_is_counted(named: dict[str, str], wanted: str) -> None:
    assert read_sizes({**TINY["llama"], **named}, "llama").dtype == wanted
    text = {**TINY["gemma3"]["text_config"], **named}
    assert read_sizes({**TINY["gemma3"], "text_config": text}, "gemma3").dtype == wanted


HOSTILE: tuple[Any, ...] = (
    *(None, True, 97, 0, -1, 2 * 10**7, -(10**12), 10**19, 0.5, -0.5, 1e308, math.nan, math.inf),
    *("", "x", "97", "🙂" * 50, [], {}, [[]], [1], [-1], [10**9], ["x"], [None], [[[[[[1]]]]]]),
    *([math.nan, 0.0], [0.0, INFINITY], INFINITY, {"x": 1}, {"x": {"x": []}}),
    *([[["global"], 2 * 10**7]], [[["global"], "x"]], [["x", 1]], [3]),
    *({"rope_type": ["x"]}, {"rope_type": "yarn", "factor": math.nan}, {"full_attention": 3}),
)
NOT_FIELDS: tuple[str, ...] = (
    "attention_types",
    "layer_types",
    "rope_scaling",
    "rope_parameters",
    "text_config",
)
NOT_FIELDS += ("auto_map", "model_type", "dtype", "hybrid_override_pattern", "num_hidden_layers")
NOT_FIELDS += ("n_layer", "num_layers", "sliding_window_pattern", "attn_config", "time_step_min")


def hostile_config(draw: random.Random) -> dict[str, Any]:
    """A small config with a value of another kind or size, also in its text_config."""
    raw = copy.deepcopy(draw.choice([*TINY.values()]))
    keys = [*raw, *(f.name for f in fields(config_of(raw))), *NOT_FIELDS]
    inner = raw.get("text_config")
    place = inner if isinstance(inner, dict) and draw.random() < 0.7 else raw
    place[draw.choice([*place, *keys])] = draw.choice(HOSTILE)
    return raw


def read_in_every_way(raw: dict[str, Any]) -> int:
    """Read the config as `regard cost` and as `regard.load` do; return how many could."""
    could = 0
    for read in (lambda: read_sizes(raw, "x"), lambda: checked(raw)):
        with suppress(RegardError):
            read()
            could += 1
    return could


def checked(raw: dict[str, Any]) -> None:
    name = raw["model_type"]
    found = find_family(name) if isinstance(name, str) else None
    if found is not None:
        found.check(parse(found.config, raw))


def test_a_hostile_config_is_refused_or_read() -> None:
    draw = random.Random(0)
    counts = [read_in_every_way(hostile_config(draw)) for _ in range(300)]
    assert {0, 2} <= set(counts), "some are refused, and some are read"


@pytest.mark.full
def test_no_count_of_a_file_decides_on_memory() -> None:
    """A number of layers or of repetitions, 2 * 10^7, is refused before a list is made of it."""
    tracemalloc.start()
    for raw in TINY.values():
        for key in {*raw, *NOT_FIELDS}:
            if "layer" in key or key == "attention_types":
                read_in_every_way({**raw, key: 2 * 10**7})
                read_in_every_way({**raw, key: [[["global"], 2 * 10**7]]})
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 1 << 24


def test_sizes_that_name_layers_or_experts_are_no_counts() -> None:
    """The largest published values: Gemma 3n and Qwen2-57B-A14B."""
    for key, value in (("vocab_size_per_layer_input", 262144), ("intermediate_size", 20480)):
        assert read_sizes({**TINY["gemma3n_text"], key: value}, "x").parameters > value
    large = {"shared_expert_intermediate_size": 20480}
    assert read_sizes({**TINY["qwen2_moe"], **large}, "x").parameters > 20480
    with pytest.raises(ArgumentError, match="num_hidden_layers is 513; the largest"):
        read_sizes({**TINY["llama"], "num_hidden_layers": 513}, "x")
