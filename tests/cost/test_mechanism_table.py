"""The table of mechanisms of `regard cost --mechanisms`: its rows against counts by hand, the sizes
that it suggests, its limits, its page, and what is refused.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import regard
from regard.cli import main
from regard.configs.published import PUBLISHED_MODELS, model_of
from regard.configs.reader import read_sizes
from regard.configs.suggested_sizes import (
    MECHANISM_CHOICES,
    MODELS_WITH_LATENTS,
    MODELS_WITH_LOCAL_LAYERS,
    REFERENCE_MODELS,
    BaseModel,
    DecoderSizes,
    base_model,
    mechanism_costs,
    parse_mechanism,
    reference_model,
)
from regard.cost import CostReport, Setting, machine_of
from regard.cost.evidence import QUALITY_EVIDENCE
from regard.cost.mechanism_table import replace_attention, replace_mixers
from regard.cost.roofline import memory_fit
from regard.models.assembly.catalogue_mixer import decoder_variants
from regard.models.assembly.counted_layers import count_layer
from tests.cost.tiny import TINY

LLAMA = BaseModel.of(model_of("llama-3.1-8b"))
SETTING = Setting(32768)


def output_of(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    with pytest.raises(SystemExit) as end:
        main(["cost", *arguments])
    assert end.value.code == code
    output = capsys.readouterr()
    return output.out if code == 0 else " ".join(output.err.replace("│", " ").split())


def test_the_cache_of_each_mechanism_by_hand() -> None:
    layers, width, tokens, value = 32, 128, 32768, 2
    rows = mechanism_costs(
        ["mha", "gqa:8", "mqa", "mla", "window:4096", "local_global:1024:every=6"], LLAMA, SETTING
    )
    local = sum((i + 1) % 6 != 0 for i in range(layers))
    expected = [
        layers * tokens * 2 * 32 * width * value,
        layers * tokens * 2 * 8 * width * value,
        layers * tokens * 2 * 1 * width * value,
        layers * tokens * (512 + 64) * value,
        layers * 4096 * 2 * 8 * width * value,
        (local * 1024 + (layers - local) * tokens) * 2 * 8 * width * value,
    ]
    assert [row.report.kv_bytes for row in rows] == expected


def test_linear_mechanisms_have_a_state_and_no_cache_that_grows() -> None:
    short, long = (
        mechanism_costs(["linear_attention", "gated_delta_net"], LLAMA, Setting(n))
        for n in (1024, 65536)
    )
    for a, b in zip(short, long, strict=True):
        assert a.report.kv_bytes == b.report.kv_bytes == a.report.state_bytes > 0
    # 32 layers, 32 states of 128 x 128 and their sums of 128, in fp32
    assert short[0].report.kv_bytes == 32 * 32 * (128 * 128 + 128) * 4


def test_only_the_attention_of_the_model_differs() -> None:
    own, changed = LLAMA.model, replace_attention(LLAMA.model, "mqa", 32, {})
    assert replace_attention(own, "gqa", 32, {"groups": 8}).parameters == own.parameters
    # keys and values of 7 of 8 heads of width 128 are gone, in 32 layers of width 4,096
    assert own.parameters - changed.parameters == 32 * 4096 * 2 * 7 * 128
    assert [x.feed_forward for x in own.layers] == [x.feed_forward for x in changed.layers]


def test_the_limits_are_the_largest_numbers_that_fit() -> None:
    machine = machine_of("h100-sxm")
    (row,) = mechanism_costs(["gqa:8"], LLAMA, SETTING, machine)
    assert row.max_batch is not None
    assert row.max_context is not None
    for batch, verdict in ((row.max_batch, "fits"), (row.max_batch + 1, "tight")):
        report = CostReport(row.report.model, Setting(32768, batch))
        assert memory_fit(report, machine).verdict == verdict
    for context, verdict in ((row.max_context, "fits"), (row.max_context + 1, "tight")):
        report = CostReport(row.report.model, Setting(context))
        assert memory_fit(report, machine).verdict == verdict
    (none,) = mechanism_costs(["mha"], LLAMA, SETTING, machine_of("t4"))
    assert none.max_batch == none.max_context == 0  # the weights alone do not fit


def test_suggested_sizes_are_those_of_the_published_models() -> None:
    latent = parse_mechanism("mla").sized(DecoderSizes.of(4096, 32, 8))
    config = PUBLISHED_MODELS["deepseek-v2"].config
    assert latent.options == {
        "kv_rank": config["kv_lora_rank"],
        "q_rank": config["q_lora_rank"],
        "nope_dim": config["qk_nope_head_dim"],
        "rope_dim": config["qk_rope_head_dim"],
        "value_dim": config["v_head_dim"],
    }
    assert set(latent.suggested.values()) == {"deepseek-v2"}
    small = parse_mechanism("mla").sized(DecoderSizes.of(2048, 16, 16))
    assert "q_rank" not in small.options  # DeepSeek-V2-Lite has none
    given = parse_mechanism("mla:256:rope_dim=32").sized(DecoderSizes.of(4096, 32, 8))
    assert given.options["kv_rank"] == 256
    assert given.options["rope_dim"] == 32
    assert {"kv_rank", "rope_dim"}.isdisjoint(given.suggested)
    local = parse_mechanism("local_global").sized(DecoderSizes.of(3840, 16, 8))
    gemma = PUBLISHED_MODELS["gemma-3-12b"].config
    assert local.options["window"] == gemma["sliding_window"]
    assert local.global_every == 6


def test_a_base_model_completes_its_sizes_from_a_published_one() -> None:
    base = base_model({"dim": 4096, "layers": 32})
    assert base.model.vocab == 128256
    assert (base.heads, base.groups) == (32, 8)
    assert base.model.parameters - LLAMA.model.parameters == 3 * 8 * 128 * 2 * 4096 * 32
    assert base_model({"dim": 4096}, groups=4).groups == 4
    assert [reference_model(dim) for dim in (512, 2048, 5120, 16384)] == [
        "qwen2.5-0.5b",
        "llama-3.2-1b",
        "qwen2.5-14b",
        "llama-3.1-405b",
    ]


def test_every_choice_has_evidence_and_can_be_counted() -> None:
    assert set(QUALITY_EVIDENCE) == set(MECHANISM_CHOICES)
    names = {*REFERENCE_MODELS, *MODELS_WITH_LATENTS, *MODELS_WITH_LOCAL_LAYERS}
    assert names <= set(PUBLISHED_MODELS)
    rows = mechanism_costs(MECHANISM_CHOICES, LLAMA, SETTING)
    assert [row.label for row in rows] == list(MECHANISM_CHOICES)
    assert all(row.report.decode_flops > 0 for row in rows)
    sourced = [x for x in QUALITY_EVIDENCE.values() if x.source]
    assert all("arXiv" in x.source for x in sourced)
    unknown = {name: x.finding for name, x in QUALITY_EVIDENCE.items() if not x.source}
    assert {"sliding_window", "comba", "mrope"} <= unknown.keys()
    assert set(unknown.values()) == {"no comparison at equal size and training is known to us"}
    assert len(sourced) >= 15


def test_a_layer_says_the_same_as_the_count_without_torch() -> None:
    for name in ("gqa", "mqa", "sliding_window", "nope", "value_norm", "kimi_delta"):
        choice = parse_mechanism(name)
        sized = choice.sized(LLAMA.sizes)
        layer = count_layer(replace(choice, sizes=sized.options), LLAMA)
        wanted = mechanism_costs([name], LLAMA, SETTING)[0].report
        found = CostReport(replace_mixers(LLAMA.model, layer.spec), SETTING)
        assert found.kv_bytes == wanted.kv_bytes, name
        assert found.prefill_flops == wanted.prefill_flops, name
        assert found.decode_flops == wanted.decode_flops, name
        assert found.model.parameters == wanted.model.parameters, name


def test_every_mechanism_of_a_decoder_has_a_row() -> None:
    names = [name for name in decoder_variants() if name != "packed"]  # it depends on the texts
    rows = mechanism_costs(names, LLAMA, SETTING, count_layer=count_layer)
    by_name = {row.label: row for row in rows}
    assert list(by_name) == names
    assert all(row.report.decode_flops > 0 for row in rows)
    gqa = by_name["gqa"].report
    assert by_name["chunked"].suggested == {
        "groups": "llama-3.1-8b",
        "chunk": "regard describe chunked",
    }
    assert by_name["chunked"].report.kv_bytes * 4 == gqa.kv_bytes  # 8,192 of 32,768 tokens
    assert by_name["softpick"].report.kv_bytes == gqa.kv_bytes
    # one number for each head and token: the sum of the gates
    assert by_name["forgetting"].report.kv_bytes_per_token - gqa.kv_bytes_per_token == 32 * 32 * 2
    small = mechanism_costs(["h2o:2048"], LLAMA, SETTING, count_layer=count_layer)[0]
    assert small.options["budget"] == 2048
    assert "budget" not in small.suggested


def test_the_command_prints_the_rows_of_the_library(
    capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    arguments = ("llama-3.1-8b", "--mechanisms", "mha, gqa:8", "--context", "32k")
    printed = json.loads(output_of(capsys, *arguments, "--machine", "h100-sxm", "--json"))
    rows = mechanism_costs(["mha", "gqa:8"], LLAMA, SETTING, machine_of("h100-sxm"))
    assert printed["mechanisms"] == [row.as_json() for row in rows]
    page, chart = tmp_path / "page.html", tmp_path / "chart.svg"
    text = output_of(capsys, *arguments, "--html", str(page), "--plot", str(chart))
    assert "16.0 GiB" in text
    assert "4.00 GiB" in text
    assert "Ainslie et al. 2023" in text
    assert "batch that fits" not in text  # there is no machine
    assert "16.0 GiB" in page.read_text(encoding="utf-8")
    assert "<script" not in page.read_text(encoding="utf-8")
    assert "gqa:8" in chart.read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--dim", "64", "--mechanisms", "mhaa"), "named 'mhaa'; did you mean 'mha'"),
        (("--dim", "64", "--mechanisms", "deberta"), "attends to later tokens, so it cannot be"),
        (("--dim", "64", "--mechanisms", "packed"), "packed depends on bounds"),
        (("--dim", "64", "--mechanisms", "luong"), "attends to a second sequence, so it cannot be"),
        (("--dim", "64", "--mechanisms", "chunked:chunks=3"), "did you mean 'chunk'? Its options"),
        (("--dim", "64", "--mechanisms", "gqa:x"), "write for example gqa:groups=8"),
        (("--dim", "64", "--mechanisms", "gqa:2:groups=2"), "groups is given twice"),
        (("--dim", "64", "--mechanisms", " , "), "no mechanism is named"),
        (("--dim", "64", "--mechanisms", "mha,mha"), "mha is named twice"),
        (("--dim", "64", "--window", "8", "--mechanisms", "mha"), "give them inside --mechanisms"),
        (("--layers", "2", "--mechanisms", "mha"), "--dim missing"),
        (("gpt2", "--vs", "gpt2-xl", "--mechanisms", "mha"), "leave out --vs"),
        (("gpt2", "--html", "page.html"), "'--html': belongs to --mechanisms"),
        (("gpt2", "--mechanisms", "mla:window=3"), "has no option window"),
    ],
)
def test_what_is_refused(
    arguments: tuple[str, ...], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in output_of(capsys, *arguments, code=2)


def test_an_encoder_has_no_mechanisms_to_compare() -> None:
    with pytest.raises(regard.ArgumentError, match="is not a decoder"):
        replace_attention(read_sizes(TINY["bert"], "bert", "bert"), "mha", 4, {})


def test_several_models_beside_each_other(capsys: pytest.CaptureFixture[str]) -> None:
    names = ("llama-2-7b", "llama-3-8b", "deepseek-v2-lite")
    arguments = (names[0], "--vs", names[1], "--vs", names[2])
    printed = json.loads(output_of(capsys, *arguments, "--json"))
    assert [one["model"] for one in printed["models"]] == list(names)
    assert set(printed["ratios"]) == {f"{names[0]} / {name}" for name in names[1:]}
    assert printed["ratios"]["llama-2-7b / llama-3-8b"]["kv_bytes"] == 4.0
    table = output_of(capsys, *arguments)
    assert all(name in table for name in names)


def test_tiny_is_a_known_model(capsys: pytest.CaptureFixture[str]) -> None:
    parameters = sum(x.numel() for x in regard.load("tiny").decoder.parameters())
    assert json.loads(output_of(capsys, "tiny", "--json"))["parameters"] == parameters


def test_short_names_and_spellings(capsys: pytest.CaptureFixture[str]) -> None:
    """Nine mechanisms by the names that people write, with one size given and the others shown."""
    names = "mha,gqa:8,mqa,mla,window:4096,local_global,linear,gated_delta_net,nsa"
    sizes = ["--layers", "32", "--dim", "4096", "--context", "32k", "--machine", "h100-sxm"]
    text = output_of(capsys, "--mechanisms", names, *sizes)
    memory = text.partition("\nmemory\n")[2].partition("\n\n")[0].splitlines()[1:]
    assert [line.split()[0] for line in memory] == names.split(",")
    for name, same in (
        ("linear", "linear_attention"),
        ("Gated-Delta", "gated_delta_net"),
        ("gated-delta-net", "gated_delta_net"),
        ("LOCAL-global", "local_global"),
    ):
        assert parse_mechanism(name).name == same


def test_a_hybrid_model_lends_the_heads_of_its_attention(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert BaseModel.of(model_of("qwen3-next-80b-a3b")).groups == 2
    assert "kv_rank" in output_of(capsys, "kimi-linear-48b-a3b", "--mechanisms", "mla,gqa")
