"""What is timed is what runs: caches as large as the formulas say, kernels that ran, and a slow one
is shown as slow.
"""

from __future__ import annotations

from dataclasses import asdict, replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from regard import attend, timing
from regard.compare import speed_and_memory
from regard.compare.mechanisms import (
    DEFAULT_NAMES,
    Candidate,
    Shape,
    build_decoder,
    candidates,
    configs,
)
from regard.compare.speed_and_memory import Timing
from regard.configs.reader import read_sizes
from regard.cost.report import CostReport, Setting
from regard.errors import ArgumentError
from regard.models.assembly.catalogue_mixer import decoder_variants
from regard.models.decoder import Decoder
from regard.nn.variants import VARIANTS
from tests.compare.small import SHAPE, TIMING, plan

COUNTED = [
    name for name in DEFAULT_NAMES if name != "sinks"
]  # `regard cost` has no entry for streaming

IDLE = {"process_time": lambda: 0.0, "sleep": lambda _: None}
"""The parts of a clock by which no thread computes between two timings."""


def kept(name: str, context: int, shape: Shape = SHAPE) -> int:
    """Numbers that a layer holds, from the mechanism's definition: H/2 key/value heads where a
    mechanism can share them, one for NSA, and 2 H value heads for gated delta.
    """
    D, H, W = shape.head_dim, shape.heads, shape.window
    per_token = {"mha": 2 * H * D, "gqa": H * D, "mqa": 2 * D, "mla": 2 * D + D // 2, "nsa": 6 * D}
    if name in per_token:
        return per_token[name] * context
    if name in ("window", "sinks"):
        return H * D * min(context, W)
    if name == "infini":
        return H * D * (D + 1) + 2 * H * D * (context % W)
    if name == "gated-delta":
        return 2 * H * D * D
    return H * D * (D + (name == "linear"))


def timed(names: list[str], kind: str, length: int, **more: Any) -> dict[str, Any]:
    """The rows of these mechanisms, timed in turns."""
    made, limits = configs(candidates(names, SHAPE), SHAPE), replace(TIMING, **more)
    rows: dict[str, Any] = speed_and_memory.time_in_turns(made, kind, length, limits)["rows"]
    return rows


@pytest.mark.full(keep=10)
@pytest.mark.parametrize("name", DEFAULT_NAMES)
@pytest.mark.parametrize("context", [9, 20, 24])
def test_cache_bytes_are_the_formulas(name: str, context: int) -> None:
    shape = replace(SHAPE, layers=2)
    made = configs(candidates([name], shape), shape)
    row = speed_and_memory.time_in_turns(made, "decode", context, TIMING)["rows"][name]
    assert row["kv_bytes"] == row["kv_bytes_formula"] == 2 * 4 * kept(name, context)
    if name in COUNTED:
        raw = {"model_type": "regard", **asdict(made[name])}
        report = CostReport(read_sizes(raw, name), Setting(context, dtype="fp32"))
        assert row["kv_bytes"] == report.kv_bytes


@pytest.mark.full(keep=12)
@pytest.mark.parametrize("name", decoder_variants())
def test_a_timed_token_is_the_token_behind_the_prompt(name: str) -> None:
    """It has the logits of one whole pass, and is taken back: further calls say the same, whatever
    the cache.
    """
    made = Candidate(name, name, VARIANTS[name].example_options).config(SHAPE)
    model = _drawn(build_decoder(made))
    with torch.inference_mode():
        whole = model(speed_and_memory.random_ids(made, 2, 21))[:, -1:]
    step = speed_and_memory.decode_step(model, made, 21, batch=2)
    first, second, third = step(), step(), step()
    assert torch.equal(first, second)
    assert torch.equal(first, third)
    scale = float(whole.abs().max())
    assert float((first - whole).abs().max()) <= 1e-12 * scale
    with torch.inference_mode():
        other = model(speed_and_memory.random_ids(made, 2, 20))[:, -1:]
    assert float((first - other).abs().max()) > 1e-3 * scale


def test_the_first_token_has_no_prompt() -> None:
    made = configs(candidates(["mha"], SHAPE), SHAPE)["mha"]
    model = _drawn(build_decoder(made))
    with torch.inference_mode():
        whole = model(speed_and_memory.random_ids(made, 1, 1))
    found = speed_and_memory.decode_step(model, made, 1)()
    assert float((found - whole).abs().max()) <= 1e-12 * float(whole.abs().max())


def _drawn(model: Decoder) -> Decoder:
    """Weights with which every layer matters, in fp64."""
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for p in model.parameters():
            p.normal_(std=p.shape[-1] ** -0.5, generator=generator)
    return model.double().eval()


def test_prompts_fill_new_caches_each_time() -> None:
    made = configs(candidates(["mha", "window"], SHAPE), SHAPE)
    for config in made.values():
        step = speed_and_memory.prefill_step(build_decoder(config), config, 20)
        one, two = step(), step()
        assert one is not two
        assert {len(cache) for cache in (*one, *two)} == {20 if config.attention == "gqa" else 8}


def test_training_steps_train() -> None:
    made = configs(candidates(["linear"], SHAPE), SHAPE)["linear"]
    step = speed_and_memory.training_step(build_decoder(made), made, 12, 2)
    losses = [step() for _ in range(4)]
    assert losses == sorted(losses, reverse=True)


def test_kernels_that_ran() -> None:
    rows = timed(["mha", "linear"], "prefill", 6)
    assert rows["linear"]["kernels"] == []
    assert rows["mha"]["kernels"]
    q = torch.zeros(1, 1, 2, 4)
    used = speed_and_memory.kernels_used(
        lambda: [attend(q, q, q, backend=b) for b in ("tiled", "reference", "tiled")]
    )
    assert used == ["tiled", "reference"]


def test_a_slow_mechanism_is_shown_as_slower(monkeypatch: pytest.MonkeyPatch) -> None:
    """The same mechanism twice, by a clock that only their models move: one second in one, three in
    the other.
    """
    made = configs(candidates(["mqa", "gqa:groups=1"], SHAPE), SHAPE)
    real, now = speed_and_memory.build_decoder, [0.0]

    def slowed(config: Any) -> Decoder:
        model = real(config)
        model.register_forward_pre_hook(
            lambda *_: now.append(now[-1] + (3.0 if config.attention == "gqa" else 1.0))
        )
        return model

    monkeypatch.setattr(speed_and_memory, "build_decoder", slowed)
    clock = SimpleNamespace(perf_counter=lambda: now[-1], **IDLE)
    monkeypatch.setattr(timing, "time", clock)
    for kind in speed_and_memory.KINDS:
        found = speed_and_memory.time_in_turns(
            made, kind, 6, replace(TIMING, rounds=5, seconds=100.0)
        )
        fast, slow = found["rows"]["mqa"], found["rows"]["gqa:groups=1"]
        assert {fast["rounds"], slow["rounds"]} == {5}
        assert (fast["seconds"], fast["ratio"], fast["quartiles"]) == (1.0, 1.0, [1.0, 1.0])
        assert (slow["seconds"], slow["ratio"], slow["quartiles"]) == (3.0, 3.0, [3.0, 3.0])


def test_no_round_begins_behind_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0.0]
    clock = SimpleNamespace(perf_counter=lambda: now.append(now[-1] + 1.0) or now[-1], **IDLE)
    monkeypatch.setattr(timing, "time", clock)
    rows = timed(["mqa"], "decode", 6, rounds=50, seconds=9.0)
    assert 1 <= rows["mqa"]["rounds"] < 10


def test_a_mechanism_that_refuses_says_why_and_the_others_are_timed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(speed_and_memory, "free_memory", lambda _: 3000)
    rows = timed(["mha", "mqa"], "decode", 8)
    # 8 tokens of 64 numbers are 2048 bytes, of 16 numbers 512
    assert "choose shorter contexts" in rows["mha"]["why"]
    assert "seconds" not in rows["mha"]
    assert rows["mqa"]["ratio"] == 1.0


def test_experiments_depend_on_models_sizes_and_machine() -> None:
    models = plan("mha", "mqa").configs
    found = {
        one.name: one for one in speed_and_memory.timing_experiments(models, TIMING, {"threads": 1})
    }
    assert list(found) == ["prefill/6", "decode/6", "prefill/20", "decode/20", "training/12"]
    keys = {one.key for one in found.values()}
    assert len(keys) == 5
    for other in (
        speed_and_memory.timing_experiments(models, TIMING, {"threads": 2}),
        speed_and_memory.timing_experiments(plan("mha").configs, TIMING, {"threads": 1}),
        speed_and_memory.timing_experiments(models, replace(TIMING, rounds=3), {"threads": 1}),
    ):
        assert keys.isdisjoint({one.key for one in other})
    assert found["decode/20"].measure()["rows"]["mqa"]["kv_bytes"] == 4 * kept("mqa", 20)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"contexts": ()}, "contexts is empty"),
        ({"contexts": (0, 4)}, r"contexts are \(0, 4\)"),
        ({"rounds": 0}, "rounds is 0; it must be 1 or more"),
        ({"batch": 0}, "batch is 0"),
        ({"length": 0}, "length is 0"),
    ],
)
def test_timings_that_are_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        Timing(**change)


def test_an_unknown_kind() -> None:
    with pytest.raises(ArgumentError, match="kind is 'sleep'; it must be one of prefill, decode"):
        speed_and_memory.time_in_turns(
            {"mqa": Candidate("mqa", "mqa").config(SHAPE)}, "sleep", 4, TIMING
        )
