"""`regard cost`: known models, configs and sizes; JSON, ranges, two models, machines, charts, and
what is refused.
"""

from __future__ import annotations

import json
import shlex
from pathlib import Path
from typing import Any

import pytest

import regard
from regard.configs.published import PUBLISHED_MODELS, model_of
from regard.cost.report import CostReport, Setting
from regard.cost.roofline import MACHINES
from tests.cli.command import Said

KEYS = {
    *("parameters", "attention_parameters", "kv_bytes_per_token", "kv_bytes"),
    *("prefill_flops", "decode_flops", "decode_bytes", "parts"),
}


def figures(said: Said, *arguments: str) -> dict[str, Any]:
    found = json.loads(said("cost", *arguments, "--json"))
    assert isinstance(found, dict)
    return found


@pytest.mark.parametrize("name", ["gpt3", "llama-3-8b", "gemma-3-1b", "deepseek-v3", "gpt-oss-20b"])
def test_the_keys_of_json(name: str, said: Said) -> None:
    told = figures(said, name, "--context", "2k")
    assert set(told) >= KEYS
    report = CostReport(model_of(name), Setting(2048, dtype=model_of(name).dtype))
    for key in KEYS - {"parts"}:
        source = report if hasattr(report, key) else report.model
        value = getattr(source, key)
        assert told[key] == (value() if callable(value) else value), key
    assert sum(part["parameters"] for part in told["parts"].values()) == told["parameters"]
    active = sum(part["active_parameters"] for part in told["parts"].values())
    assert active == told["active_parameters"]
    assert told["parts"]["attention"]["parameters"] == told["attention_parameters"]


def test_gpt3_is_explained(said: Said) -> None:
    out = said("cost", "gpt3")
    assert "attention of one layer: 603,979,776 = M (H D + G D + G E + H E); of 96 layers" in out
    assert "57,982,058,496: a third of 175 billion" in out
    assert "5.95 billion of 17.5 billion take the 96 heads of one layer for the whole model" in out


def test_gemma_keeps_139_mib(said: Said) -> None:
    out = said("cost", "gemma-3-1b", "--context", "32k", "--machine", "l4")
    assert "139 MiB" in out
    assert "22 x MQA 4/1 heads of 256, window 512" in out
    assert "on l4 at best: 300 GB/s, 121 TFLOP/s" in out


def test_latents_in_both_forms(said: Said) -> None:
    told = figures(said, "deepseek-v3", "--context", "8192")
    forms = told["decode_flops_by_form"]
    assert forms["expand"] - forms["absorb"] == 61 * (275_548_995_584 - 2_315_255_808)
    out = said("cost", "deepseek-v3", "--context", "8192")
    assert "latents, expand" in out
    assert "latents, absorb" in out


def test_a_config_and_its_folder(tmp_path: Path, said: Said) -> None:
    raw = {**PUBLISHED_MODELS["qwen3-0.6b"].config, "torch_dtype": "bfloat16"}
    (tmp_path / "config.json").write_text(json.dumps(raw))
    for source in (tmp_path, tmp_path / "config.json"):
        assert figures(said, str(source))["parameters"] == 596_049_920
    tiny = Path(regard.__file__).parent / "assets" / "tiny"
    model = regard.load("tiny")
    counted = sum(p.numel() for p in model.decoder.parameters())
    assert figures(said, str(tiny), "--context", "64")["parameters"] == counted


def test_sizes_as_flags(said: Said) -> None:
    sizes = ("--layers", "32", "--dim", "4096", "--heads", "32")
    told = figures(said, *sizes, "--kv-heads", "8", "--ff", "14336", "--vocab", "128256")
    assert told["parameters"] == 8_030_261_248
    local = figures(said, *sizes, "--window", "1024", "--global-every", "6", "--context", "32k")
    assert local["kv_bytes"] == 3_137_339_392
    latent = [
        f"--set={x}"
        for x in ("kv_rank=512", "nope_dim=128", "rope_dim=64", "value_dim=128", "q_rank=1536")
    ]
    experts = shlex.split("--experts 160 --active 6 --expert-ff 1536 --shared 2 --dense-layers 1")
    v2 = shlex.split("--layers 60 --dim 5120 --heads 128 --ff 12288 --vocab 102400 --attention mla")
    assert figures(said, *v2, *latent, *experts)["parameters"] == 235_741_434_880
    small = figures(said, *shlex.split("--layers 1 --dim 32 --heads 4 --plain --tied --vocab 100"))
    assert small["parameters"] == 4 * 32 * 32 + 2 * 32 * 128 + 100 * 32 + 3 * 32
    memory = figures(said, *sizes, "--attention", "infini", "--context", "1M")
    assert memory["state_bytes"] == memory["kv_bytes"] == 4 * 32 * 32 * 128 * 129


def test_a_range(said: Said) -> None:
    told = figures(said, "llama-3-8b", "--sweep", "context=1k..1M", "--machine", "h100-sxm")
    rows = told["sweep"]["llama-3-8b"]
    assert [row["context"] for row in rows] == [2**n for n in range(10, 21)]
    assert [row["kv_bytes"] for row in rows] == [131_072 * 2**n for n in range(10, 21)]
    assert all(row["decode_seconds"] >= row["decode_bytes"] / 3350e9 for row in rows)
    out = said("cost", "gpt2", "--sweep", "context=256..2k", "--vs", "mistral-7b")
    assert [line.split()[0] for line in out.splitlines()[2:5]] == ["256", "512", "1,024"]
    assert "mistral-7b" in out


def test_two_models(said: Said) -> None:
    told = figures(said, "llama-2-7b", "--vs", "llama-3-8b", "--machine", "l4")
    assert [one["model"] for one in told["models"]] == ["llama-2-7b", "llama-3-8b"]
    assert told["ratios"]["kv_bytes"] == 4
    assert told["models"][0]["roofline"]["machine"] == "l4"
    out = said("cost", "llama-2-7b", "--vs", "llama-3-8b")
    row = next(line for line in out.splitlines() if "each token" in line)
    assert row.split() == ["cache,", "for", "each", "token", "512", "KiB", "128", "KiB", "4x"]
    assert "the last column is llama-2-7b divided by llama-3-8b: above 1x, llama-2-7b needs" in out
    assert "llama-2-7b / llama-3-8b" in out.splitlines()[1]


def test_two_models_of_which_one_does_not_fit(said: Said) -> None:
    """627 GiB of weights have no speed on a card of 80 GiB."""
    out = said("cost", "deepseek-v3", "--vs", "llama-3-8b", "--machine", "h100-sxm")
    rows = {line[:22].strip(): line[22:].split() for line in out.splitlines()}
    assert rows["fits h100-sxm"] == ["no", "yes"]
    assert rows["decode on h100-sxm"][:3] == ["does", "not", "fit"]
    assert rows["decode on h100-sxm"][-2:] == ["ms", "-"]
    assert "deepseek-v3: weights and cache are 627 GiB, and 874 MiB to run them; 90 % of its" in out
    assert "memory: 81,559 MiB in all by nvidia-smi, sold as 80 GB" in out
    swept = said("cost", "llama-3-8b", "--sweep", "context=512k..1M", "--machine", "h100-sxm")
    assert [line.split()[-1] for line in swept.splitlines()[1:]] == ["fits", "tight", "no"]


def test_a_machine_of_ones_own(said: Said) -> None:
    told = figures(said, "llama-3-8b", "--bandwidth", "5e10", "--flops", "1e12")
    seconds = told["decode_bytes"] / 5e10
    wanted = {"seconds": seconds, "bound_by": "memory", "reached": None}
    assert told["roofline"]["decode"] == wanted
    assert told["roofline"]["prefill"]["seconds"] == told["prefill_flops"] / 1e12


def test_this_machine_is_measured(said: Said, monkeypatch: pytest.MonkeyPatch) -> None:
    from regard import timing

    real = timing.Ceilings.measure

    def small(dtypes: Any, device: Any) -> timing.Ceilings:
        return real(dtypes, device, rounds=1, read_bytes=1 << 20, side=32)

    monkeypatch.setattr(timing.Ceilings, "measure", staticmethod(small))
    told = figures(said, "gpt2", "--machine", "here")["roofline"]
    assert told["machine"] == "here"
    assert told["bandwidth"] > 0
    assert told["source"].startswith("measured now")
    assert told["decode"]["seconds"] > 0


def test_a_model_that_does_not_fit(said: Said) -> None:
    out = said("cost", "llama-3-70b", "--machine", "h100-sxm")
    assert "they do not fit" in out
    assert "batch that fits" not in out
    out = said("cost", "llama-3-70b", "--machine", "mi300x")
    assert "they fit, with " in out
    assert "batch that fits: 32" in out
    assert "tight: it needs 133 GiB" in said("cost", "llama-3-70b", "--machine", "h200-sxm")
    alone = ("llama-3-70b", "--machine", "h200-sxm", "--utilization", "1", "--reserve", "0.5")
    assert "they fit, with " in said("cost", *alone)
    assert "its memory is not known" in said("cost", "gpt2", "--machine", "xeon-8380")


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("kind", ["svg", "png", "pdf"])
def test_a_chart(kind: str, tmp_path: Path, said: Said) -> None:
    first, second = tmp_path / f"a.{kind}", tmp_path / f"b.{kind}"
    for path in (first, second):
        said("cost", "gemma-3-1b", "--vs", "llama-3.2-1b", "--plot", path, "--machine", "l4")
    assert first.read_bytes() == second.read_bytes()
    if kind == "svg":
        text = first.read_text("utf-8")
        for words in ("gemma-3-1b", "llama-3.2-1b", "cache, bytes", "one token, seconds at best"):
            assert words in text
    assert sorted(p.name for p in tmp_path.iterdir()) == [f"a.{kind}", f"b.{kind}"]


def test_the_list(said: Said) -> None:
    out = said("cost", "--list")
    for name in (*PUBLISHED_MODELS, *MACHINES):
        assert any(line.split()[:1] == [name] for line in out.splitlines())
    assert all(machine.source in out for machine in MACHINES.values())
    told = json.loads(said("cost", "--list", "--json"))
    assert set(told["models"]) == set(PUBLISHED_MODELS)
    assert told["machines"]["l4"]["bandwidth"] == 300e9


SIZES = ("--layers", "2", "--dim", "32", "--heads", "4")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("llama3-8b",), "did you mean 'llama-3-8b'"),
        ((), "give a model, or its sizes: --layers, --dim, --heads missing"),
        (("--layers", "2"), "--dim, --heads missing. regard cost --list shows the known models"),
        (("gpt2", "--layers", "2", "--window", "4"), "gpt2 already has all sizes, but --layers"),
        ((*SIZES, "--attention", "mla", "--window", "4"), "attention 'mla' needs a value for"),
        ((*SIZES, "--attention", "linear_attention", "--window", "4"), "'linear_attention' has no"),
        ((*SIZES, "--set", "groups"), "must be name=value"),
        ((*SIZES, "--set", "groups=\u00b2"), "must be name=value"),
        ((*SIZES, "--kv-heads", "2", "--set", "groups=2"), "groups is given twice; give it once"),
        ((*SIZES, "--experts", "8"), "--experts and --active belong together"),
        (("gpt2", "--bandwidth", "1e9"), "--bandwidth and --flops need each other"),
        (("gpt2", "--machine", "l4", "--bandwidth", "1e9", "--flops", "1e9"), "already has a"),
        (("gpt2", "--bandwidth", "0", "--flops", "1e9"), "must be above 0, per second"),
        (("gpt2", "--context", "2k"), "gpt2 has learned positions for 1,024 tokens"),
        (("gpt2", "--context", "1k", "--sweep", "context=1..2"), "--context is one length, but"),
        (("gpt2", "--sweep", "heads=1..2"), "is not a range of contexts; write for example"),
        (("gpt2", "--kv-dtype", "fp4"), "'fp4' is not a number format"),
        (("gpt2", "--plot", "a.gif"), "a.gif is no picture; its name must end in .svg, .png, .pdf"),
        (("gpt2", "--plot", "nowhere/a.svg"), "there is no folder 'nowhere'"),
        (("gpt2", "--batch", "0"), "--batch"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str, refused: Said) -> None:
    assert message in refused("cost", *arguments)


def test_a_broken_file_is_a_failure(tmp_path: Path, said: Said) -> None:
    (tmp_path / "config.json").write_text("{")
    assert "is not JSON" in said("cost", tmp_path, code=1)


def test_a_model_without_known_sizes_says_why(refused: Said) -> None:
    error = refused("cost", "mistral-medium-3")
    assert "has not published the sizes" in error
    assert "--layers" in error


def test_a_name_that_begins_a_known_one_suggests_it(refused: Said) -> None:
    assert "did you mean 'gemma-4-26b-a4b' or" in refused("cost", "Gemma-4-26B")


def test_weights_as_files_hold_them(said: Said) -> None:
    told = figures(said, "llama-3.1-70b", "--weights", "awq", "--machine", "a100-40gb")
    assert told["weights"] == "awq"
    assert told["weight_bytes"] == pytest.approx(39.77e9, rel=0.01)
    assert told["roofline"]["fit"] == "tight"
    assert figures(said, "gpt-oss-20b")["weights"] == "mxfp4", "as it was released"
    assert figures(said, "gpt-oss-20b", "--dtype", "bf16")["weight_bytes"] == 2 * 20_914_757_184
    cached = figures(said, "llama-3-8b", "--kv-dtype", "int8")
    assert (cached["kv_dtype"], cached["kv_bytes_per_token"]) == ("int8", 65536 * 9 / 8)
    swapped = figures(said, "gpt-oss-20b", "--mechanisms", "mha")["mechanisms"][0]
    assert swapped["parameters"] > 21e9
