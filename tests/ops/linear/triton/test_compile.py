"""The recurrences in Triton compiled for GPUs that need not be there: tensor-core instructions,
shared memory and spilled registers, for every row of the table of sizes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from regard.ops.linear.call import RecurrenceCall
from regard.ops.triton_support import launches_for
from tests.ops.triton_compiler import SHARED_LIMIT, compile_launch

pytest.importorskip("triton", reason="triton is not installed: pip install 'regard[gpu]'")

SPILLED = 40
"""Bytes of registers that a kernel may spill, whatever the device is."""
FORMS = {"sums": (0, False), "gated": (2, False), "gated delta": (1, True), "kimi": (2, True)}
"""Name -> the form of the decay, and whether tokens correct what is stored."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


def launches_of(
    form: str, dtype: torch.dtype, D: int, T: int = 256, capability: int = 90
) -> list[Any]:
    with launches_for(capability):
        return _launches_of(form, dtype, D, T)


def _launches_of(form: str, dtype: torch.dtype, D: int, T: int) -> list[Any]:
    from regard.ops.linear.triton.launch import backward_launches, forward_launches

    decay, delta = FORMS[form]
    q, k = (torch.zeros(1, heads, T, D, dtype=dtype) for heads in (2, 1))
    g = None if decay == 0 else torch.zeros(1, 2, T, 1 if decay == 1 else D, dtype=dtype)
    beta = torch.zeros(1, 2, T, 1, dtype=dtype) if delta else None
    v, state = torch.zeros(1, 2, T, D, dtype=dtype), torch.zeros(1, 2, D, D)
    call = RecurrenceCall(q, k, v, state, beta, g, 0.5, dtype, dtype)
    forward, buffers = forward_launches(call)
    backward, _ = backward_launches(call, buffers, torch.zeros_like(buffers.out), state)
    return [*forward, *backward]


def assert_compiles(launches: list[Any], capability: int, D: int, *, half: bool) -> None:
    for launch in launches:
        found, name = compile_launch(launch, capability), launch.kernel.__name__
        assert found.shared <= SHARED_LIMIT[capability], (name, found.shared)
        assert found.spilled <= SPILLED, (name, half, D, found.spilled)
        if half and name != "write_nans":
            assert any(x in found.ptx for x in ("wgmma", "mma.sync", "tcgen05.mma")), name
        if half and name == "chunk_states" and launch.options["num_stages"] > 1:
            assert "cp.async" in found.ptx or not launch.options["DELTA"], name


@pytest.mark.full
@pytest.mark.parametrize("form", FORMS)
def test_half_precision_on_hopper(form: str) -> None:
    assert_compiles(launches_of(form, torch.bfloat16, 128), 90, 128, half=True)


@pytest.mark.full
@pytest.mark.parametrize("D", [64, 256])
def test_other_numbers_of_channels(D: int) -> None:
    for form in ("gated delta", "gated"):
        assert_compiles(launches_of(form, torch.bfloat16, D), 90, D, half=True)


@pytest.mark.full
def test_fp32_uses_no_tensor_cores_and_fits() -> None:
    launches = launches_of("gated delta", torch.float32, 128)
    assert_compiles(launches, 90, 128, half=False)


@pytest.mark.full
@pytest.mark.parametrize("form", ["gated delta", "kimi"])
@pytest.mark.parametrize("capability", [80, 100])
def test_other_gpus(capability: int, form: str) -> None:
    launches = launches_of(form, torch.bfloat16, 128, capability=capability)
    assert_compiles(launches, capability, 128, half=True)


def test_chunks_are_shorter_where_longer_ones_spill() -> None:
    """All kernels of a call have one chunk, on every device."""
    for capability, D, length in ((80, 128, 32), (89, 64, 32), (90, 256, 64), (100, 256, 32)):
        launches = launches_of("gated delta", torch.bfloat16, D, capability=capability)
        assert {x.options["C"] for x in launches} == {length}


@pytest.mark.full
def test_a_chunk_that_does_not_fit_is_found() -> None:
    """The negative control: registers for chunks of 256 tokens are not there."""
    launch = next(
        x for x in launches_of("kimi", torch.bfloat16, 128)
        if x.kernel.__name__ == "gradients_of_updates"
    )  # fmt: skip
    large = {**launch.options, "C": 128, "LEVELS": 7, "BD": 64}
    assert compile_launch(launch._replace(options=large), 90).spilled > 100


def test_nothing_is_compiled_for_another_length() -> None:
    def key_of(T: int) -> list[object]:
        launches = launches_of("kimi", torch.bfloat16, 64, T)
        looked_at = [
            (x == 1, x % 16 == 0)
            for launch in launches
            for x, param in zip(launch.args, launch.kernel.params, strict=False)
            if isinstance(x, int) and not param.do_not_specialize
        ]
        return [looked_at, [x.options for x in launches]]

    keys = [key_of(T) for T in (9, 16, 17, 512, 1000)]
    assert all(x == keys[0] for x in keys)
