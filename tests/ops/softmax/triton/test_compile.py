"""The Triton kernels compiled for GPUs that need not be there: tensor-core instructions, shared
memory and spilled registers, for every row of the table of block sizes.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from regard import Span, biases, masks
from regard.caches import Float8, Paged, Quantized
from regard.ops.softmax.call import make_call
from regard.ops.softmax.triton.call_data import bias_data
from regard.ops.triton_support import Launch, launches_for
from tests.ops.triton_compiler import SHARED_LIMIT, compile_launch

pytest.importorskip("triton", reason="triton is not installed: pip install 'regard[gpu]'")

TENSOR_CORES = {80: "mma.sync", 90: "wgmma.mma_async", 100: "tcgen05.mma"}
SPILLS = {
    ("forward", torch.float32, 64): 16,
    ("backward_q", torch.bfloat16, 128): 24,
    ("backward_kv", torch.bfloat16, 128): 24,
}
"""Bytes of registers that a row may spill, where no other block that was tried spills less."""
PLAIN = {"mask": masks.Causal()}
RICH = {
    "mask": masks.Causal() & (masks.Window(70) | masks.Sinks(4)),
    "softcap": 3.0,
    "bias": biases.ALiBi(2),
}


def launches_of(dtype: torch.dtype, D: int, options: dict[str, Any]) -> dict[str, Any]:
    from regard.ops.softmax.triton.launch import (
        WantedGradients,
        backward_launches,
        forward_launches,
    )

    q, k = (torch.zeros(1, h, 256, D, dtype=dtype) for h in (2, 1))
    call = make_call(q, k, k, **options)
    bias = bias_data(call, call.bias)
    forward, result = forward_launches(call, bias)
    wanted = WantedGradients(slopes=bias.slopes is not None)
    backward, _ = backward_launches(call, bias, result, torch.zeros_like(q), None, wanted)
    lean = [x for x in (*forward, *backward) if x.options.get("CAREFUL") is False]
    return {x.kernel.__name__.removeprefix("attention_"): x for x in lean}


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))


@pytest.mark.full
@pytest.mark.parametrize("options", [PLAIN, RICH], ids=["causal", "window, sinks, softcap, alibi"])
@pytest.mark.parametrize("D", [64, 128, 256])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_every_row_of_the_table_on_hopper(
    dtype: torch.dtype, D: int, options: dict[str, Any]
) -> None:
    for name, launch in launches_of(dtype, D, options).items():
        found = compile_launch(launch, 90)
        assert found.shared <= SHARED_LIMIT[90], (name, found.shared)
        assert found.spilled <= SPILLS.get((name, dtype, D), 0), (name, found.spilled)
        if dtype == torch.bfloat16:
            promised = "mma" if (name, D) in SMALL_BLOCKS else TENSOR_CORES[90]
            assert promised in found.ptx, name
            if launch.options["num_stages"] > 1:
                assert "cp.async" in found.ptx, name


SMALL_BLOCKS = {("backward_q", 256), ("backward_kv", 256)}
"""Blocks of 32 rows, which are below the size of a wgmma instruction."""


@pytest.mark.full
def test_every_form_of_a_mask_and_a_bias_compiles() -> None:
    """Bits, buckets and a table with their gradients, and the launches that look for NaN."""
    from regard.ops.softmax.triton.launch import (
        WantedGradients,
        backward_launches,
        forward_launches,
    )

    q, k = (torch.zeros(1, h, 256, 64, dtype=torch.bfloat16) for h in (4, 2))
    bias = biases.T5Relative(torch.zeros(32, 4)) + biases.DenseBias(torch.zeros(1, 4, 256, 256))
    mask = masks.Causal() & masks.Dilated(4, 3)
    call = make_call(q, k, k, mask=mask, bias=bias + biases.ALiBi(4), softcap=2.0)
    data = bias_data(call, call.bias)
    forward, result = forward_launches(call, data)
    wanted, d_lse = WantedGradients(True, True, True), torch.zeros(1, 4, 256)
    backward, _ = backward_launches(call, data, result, torch.zeros_like(q), d_lse, wanted)
    for launch in (*forward, *backward):
        assert compile_launch(launch, 90).shared <= SHARED_LIMIT[90], launch.kernel.__name__


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 100])
def test_other_gpus(capability: int) -> None:
    for name, launch in launches_of(torch.bfloat16, 128, PLAIN).items():
        found = compile_launch(launch, capability)
        assert found.shared <= SHARED_LIMIT[capability], (name, found.shared)
        assert re.search(r"mma\.sync|tcgen05\.mma", found.ptx), name


@pytest.mark.full
def test_a_block_that_does_not_fit_is_found() -> None:
    """The negative control: four stages of 128 keys need more shared memory than there is."""
    launch = launches_of(torch.bfloat16, 128, PLAIN)["forward"]
    large = {**launch.options, "BN": 256, "num_stages": 5}
    assert compile_launch(launch._replace(options=large), 90).shared > SHARED_LIMIT[90]


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize(
    "dtype, D", [(torch.bfloat16, 128), (torch.bfloat16, 256), (torch.float32, 128)], ids=str
)
def test_decoding(dtype: torch.dtype, D: int, capability: int) -> None:
    from regard.ops.softmax.triton.launch import decode_launches

    q, k = torch.zeros(1, 8, 1, D, dtype=dtype), torch.zeros(1, 1, 2048, D, dtype=dtype)
    call = make_call(q, k, k, **RICH | {"bias": biases.ALiBi(8)})
    launches = decode_launches(call, bias_data(call, call.bias))[0]
    for launch in [x for x in launches if not x.options.get("CAREFUL")]:
        found = compile_launch(launch, capability)
        assert found.shared <= SHARED_LIMIT[capability]
        assert found.spilled <= (0 if dtype == torch.bfloat16 else 16), launch.kernel.__name__
        if dtype == torch.bfloat16 and launch.kernel.__name__ == "attention_decode":
            assert "mma.sync" in found.ptx
            assert "cp.async" in found.ptx


@pytest.mark.full
@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("stored", [8, 4, 2, "pages", "e4m3", "e5m2"])
def test_decoding_from_a_cache(stored: int | str, capability: int) -> None:
    """Codes of 8, 4 and 2 bits, 8-bit floats, and pages of 16 slots: in the registers, and by wide
    loads.
    """
    from regard.ops.softmax.triton.launch import decode_launches

    q = torch.zeros(1, 8, 1, 128, dtype=torch.bfloat16)
    k = torch.randn(1, 2, 256, 128).to(torch.bfloat16)
    caches = {"pages": lambda: Paged(16, 20), "e4m3": Float8, "e5m2": lambda: Float8("e5m2")}
    cache = caches.get(stored, lambda: Quantized(int(stored), residual=0))()
    memory, _ = cache.update((k, k), Span(0, 256))
    if isinstance(cache, Paged):
        memory, _ = cache.lazy_memory()
    call = make_call(q, *memory, mask=masks.Causal())
    with launches_for(capability):
        launch = decode_launches(call, bias_data(call, None))[0][0]
    names = ("PAGE", "CODE_BITS", "FLOAT8")
    expected = {"pages": (16, 0, 0), "e4m3": (0, 0, 3), "e5m2": (0, 0, 2)}
    assert tuple(map(launch.options.get, names)) == expected.get(stored, (0, stored, 0))
    found = compile_launch(launch, capability)
    assert found.shared <= SHARED_LIMIT[capability]
    assert found.spilled == 0
    assert "mma.sync" in found.ptx
    wide = "cp.async.cg" in found.ptx, "ld.global.v4" in found.ptx
    assert any(wide), "16 bytes at a time"
    assert wide[0] == (stored == "pages") or "m" in str(stored)


def looked_at(launch: Launch) -> list[tuple[bool, bool]]:
    """What triton asks of each number for which it may compile a kernel of its own."""
    numbers = zip(launch.args, launch.kernel.params, strict=False)
    integers = [x for x, y in numbers if isinstance(x, int) and not y.do_not_specialize]
    return [(x == 1, x % 16 == 0) for x in integers]


def test_nothing_is_compiled_for_a_longer_cache() -> None:
    """A page table, codes and their scales grow; the arguments that triton looks at do not."""
    from regard.ops.softmax.triton.launch import decode_launches

    def key_of(kind: str, S: int) -> list[object]:
        cache = Paged(16, 70) if kind == "pages" else Quantized(4, residual=0)
        q, k = (torch.zeros(1, h, n, 64, dtype=torch.bfloat16) for h, n in ((8, 1), (2, S)))
        memory, _ = cache.update((k, k), Span(0, S))
        memory = cache.lazy_memory()[0] if isinstance(cache, Paged) else memory
        call = make_call(q, *memory, mask=masks.Causal())
        launch = decode_launches(call, bias_data(call, None))[0][0]
        return [looked_at(launch), launch.options]

    for kind in ("pages", "codes"):
        keys = [key_of(kind, S) for S in (32, 64, 416, 1024)]
        assert all(x == keys[0] for x in keys)


@pytest.mark.full
def test_decoding_of_latents() -> None:
    """128 heads that share one key of 576 channels, of which the first 512 are the value."""
    from regard.ops.softmax.triton.launch import decode_launches

    q, k = torch.zeros(1, 128, 1, 576), torch.zeros(1, 1, 2048, 576)
    q, k = q.to(torch.bfloat16), k.to(torch.bfloat16)
    call = make_call(q, k, k[..., :512], mask=masks.Causal())
    launch = decode_launches(call, bias_data(call, None))[0][0]
    assert launch.options["SHARED_VALUES"]
    assert launch.options["REST"] == 64
    found = compile_launch(launch, 90)
    assert found.shared <= SHARED_LIMIT[90]
    assert found.spilled == 0
    assert "mma.sync" in found.ptx
    assert "cp.async" in found.ptx


def test_nothing_is_compiled_for_another_length() -> None:
    """The arguments by which triton keys its compiled kernels are the same for every length."""
    from regard.ops.softmax.triton.launch import decode_launches

    def key_of(S: int) -> list[object]:
        q, k = (torch.zeros(1, h, n, 64, dtype=torch.bfloat16) for h, n in ((8, 1), (2, 4096)))
        call = make_call(q, k[:, :, :S], k[:, :, :S], mask=masks.Causal())
        launch = decode_launches(call, bias_data(call, None))[0][0]
        return [looked_at(launch), launch.options]

    keys = [key_of(S) for S in (2, 16, 17, 512, 513, 4096)]
    assert all(x == keys[0] for x in keys)
    assert len(keys[0][0]) >= 9  # the strides of q, k and v


def test_one_compiled_kernel_serves_every_mask_of_as_many_ranges() -> None:
    def options_of(mask: masks.Mask) -> dict[str, Any]:
        launch = launches_of(torch.bfloat16, 64, {"mask": mask})["forward"]
        return {**launch.options, "looked_at": looked_at(launch)}

    causal = options_of(masks.Causal())
    assert options_of(masks.Causal() & masks.Window(9)) == causal
    assert options_of(masks.Chunk(7)) == causal
    assert options_of(masks.Causal() & (masks.Window(9) | masks.Sinks(2))) != causal
