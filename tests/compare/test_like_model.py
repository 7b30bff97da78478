"""Comparisons at the sizes of real models: the shapes, and what the machine has no memory for."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard.cli import main
from regard.compare.mechanisms import candidates, configs, count_parameters
from regard.compare.speed_and_memory import Timing, check_fits, needed_memory, shape_like
from regard.configs.published import model_of
from regard.errors import ArgumentError

QUICK = ["--context", "8", "--rounds", "1", "--seconds", "0.1"]


def test_the_sizes_of_qwen2() -> None:
    """The decoders lack the biases of queries, keys and values: 14 x 64 + 2 x 2 x 64 a layer."""
    shape = shape_like("qwen2-0.5b")
    gqa = configs(candidates(["gqa"], shape), shape)["gqa"]
    biases = 24 * (14 * 64 + 2 * 2 * 64)
    assert count_parameters(gqa) == model_of("qwen2-0.5b").parameters - biases
    (window,) = candidates(["window"], shape)
    assert window.options == {"groups": 2, "window": 4096}  # as cost --mechanisms suggests
    assert shape_like("qwen2-0.5b", 64).window == 64
    assert shape_like("mistral-7b-v0.1").window == 4096


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("qwen3-0.6b", "has heads of 128, but .* 1024 / 16"),
        ("mixtral-8x7b", "does not have one dense feed-forward layer"),
        ("deepseek-v3", "does not have one dense feed-forward layer"),
        ("falcon-h1-0.5b", "regard compare replaces attention by one mechanism"),
        ("qwen2-0.6b", "neither a known model nor a path. did you mean"),
    ],
)
def test_models_that_a_comparison_cannot_have(name: str, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        shape_like(name)


@pytest.mark.full
def test_memory_is_counted_before_anything_is_built() -> None:
    shape = shape_like("qwen2-0.5b")
    made = configs(candidates(["mha", "gqa"], shape), shape)
    parameters = sum(map(count_parameters, made.values()))
    timing = Timing(length=256, batch=8)
    assert needed_memory(made, timing) == 16 * parameters + 4 * 3 * 8 * 256 * 151936
    check_fits(made, timing, "qwen2-0.5b", free=needed_memory(made, timing))
    with pytest.raises(ArgumentError, match=r"2 models like qwen2-0\.5b need .* GiB of memory"):
        check_fits(made, timing, "qwen2-0.5b", free=needed_memory(made, timing) - 1)
    with pytest.raises(ArgumentError, match=r"\(--no-training\) 3.8"):
        check_fits(made, timing, "qwen2-0.5b", free=1 << 30)


def run(*arguments: str) -> int:
    with pytest.raises(SystemExit) as end:
        main(["compare", *arguments])
    return int(end.value.code or 0)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    page = tmp_path / "page.html"
    like = ["--like", "tiny", *QUICK, "--no-memory", "--no-training"]
    assert run("mha", "gqa", *like, "--json", "--html", str(page)) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["shape"]["like"] == "tiny"
    assert [found["shape"][key] for key in ("dim", "layers", "heads", "groups")] == [256, 4, 8, 4]
    assert all(entry["training"] is None for entry in found["mechanisms"])
    cached = [entry["decode"]["8"]["kv_bytes"] for entry in found["mechanisms"]]
    assert cached == [4 * 8 * 2 * heads * 32 * 4 for heads in (8, 4)]
    html = page.read_text("utf-8")
    assert html.count("<svg") >= 2, "plots of costs, also with one context and without training"
    assert run("mha", *like) == 0
    text = capsys.readouterr().out
    assert "4 layers, dim 256, 8 heads (like tiny)" in text
    assert "training steps" not in text


def test_sizes_beside_a_model_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("mha", "--like", "tiny", "--dim", "64") == 2
    said = " ".join(capsys.readouterr().err.replace("│", "").split())
    assert "is one of the sizes of tiny, which --like gives" in said
