"""Mamba-2 of transformers, saved by it and loaded here; wrong variants must be far."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import regard
from tests.parity.families.changes import Change, each
from tests.parity.families.harness import assert_decoder, assert_differs, ids_of, saved, theirs
from tests.parity.families.published import assert_saved
from tests.parity.families.state_space_changes import COMMON, part, swap_b_and_c, zero

N, E, GROUPS, STATE, M = 6, 8, 2, 5, 24
SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": M,
    "num_hidden_layers": 2,
    "num_heads": N,
    "head_dim": E,
    "expand": 2,
    "state_size": STATE,
    "n_groups": GROUPS,
    "conv_kernel": 3,
    "layer_norm_epsilon": 1e-3,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 2,
}
CASES: dict[str, dict[str, Any]] = {
    "biases and limits": {"use_bias": True, "time_step_limit": (0.4, 0.9)},
    "no biases": {"use_conv_bias": False, "residual_in_fp32": False, "n_groups": 1},
}


WRONG: dict[str, tuple[Change, ...]] = {
    "biases and limits": (
        *COMMON,
        part("project.convolution", zero("bias")),
        part("rule.linear", zero("bias")),
        each("the gate behind the norm", gate_before_norm=False),
    ),
    "no biases": (part("", swap_b_and_c), each("another gate", gate_activation="sigmoid")),
}


@pytest.mark.parametrize("case", CASES)
def test_mamba2(case: str, tmp_path: Path) -> None:
    model = theirs("Mamba2", SIZES | CASES[case])
    mine = assert_decoder(model, tmp_path)
    assert_saved(mine, model, tmp_path)


@pytest.mark.parametrize("case", CASES)
def test_wrong_variants_are_far(case: str, tmp_path: Path) -> None:
    model = theirs("Mamba2", SIZES | CASES[case])
    mine = regard.load(saved(model, tmp_path))
    for change in WRONG[case]:
        assert_differs(mine, model, change)


def test_infinity_as_python_writes_it(tmp_path: Path) -> None:
    """Older files have the constant Infinity, newer ones an object in its place."""
    model = theirs("Mamba2", SIZES)
    first = regard.load(saved(model, tmp_path)).config
    file = tmp_path / "config.json"
    keys = json.loads(file.read_text())
    assert keys["time_step_limit"] == [0.0, {"__float__": "Infinity"}]
    keys["time_step_limit"] = [0.0, float("inf")]
    file.write_text(json.dumps(keys))
    assert "Infinity]" in file.read_text()
    assert regard.load(tmp_path).config == first
    for wrong in ([0.5, 0.1], [0.1], [-1.0, 1.0], [0.0, {"__float__": "NaN"}]):
        file.write_text(json.dumps(keys | {"time_step_limit": wrong}))
        with pytest.raises(regard.FileError, match=r"time_step_limit is .*; it must be two"):
            regard.load(tmp_path)


def test_the_residual_stream_stays_in_float32(tmp_path: Path) -> None:
    """As the key says: with weights in bf16, the sum is in fp32 and every sublayer in bf16."""
    model = theirs("Mamba2", SIZES)
    mine = regard.load(saved(model, tmp_path), dtype=torch.bfloat16)
    ids = ids_of(model)
    with torch.no_grad(), regard.Trace("layers.*.residual", "layers.*.out") as trace:
        logits = mine(ids)
    assert {trace[f"layers.{i}.residual"].dtype for i in range(2)} == {torch.float32}
    assert {trace[f"layers.{i}.out"].dtype for i in range(2)} == {torch.bfloat16}
    assert logits.dtype == torch.bfloat16
    exact = model(input_ids=ids, use_cache=False).logits
    narrow = model.bfloat16()(input_ids=ids, use_cache=False).logits.float()
    error, theirs_error = (float((x - exact).abs().max()) for x in (logits.float(), narrow))
    assert error <= 2 * theirs_error
