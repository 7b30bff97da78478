"""Which kernel serves a call on a CUDA device, asked with tensors that stand for one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from regard import biases, masks
from regard.caches import Paged, Quantized
from regard.caches.paged import LazyPagedTensor, PagesOfRows
from regard.ops.softmax import dispatch
from regard.ops.softmax.call import Call, make_call
from regard.ops.softmax.sdpa import SdpaKernel, attend_range_on_cuda, cuda_backends
from regard.ops.softmax.triton import kernel
from regard.ops.softmax.triton.kernel import TritonKernel
from regard.span import Span
from tests.oracles.plain import plain_attention

CAUSAL = masks.Causal()
WINDOW = CAUSAL & masks.Window(64)


def cuda_call(
    dtype: torch.dtype = torch.bfloat16,
    shape: tuple[int, ...] = (2, 8, 2, 512, 512, 64, 64),
    **options: Any,
) -> Call:
    """A call on a CUDA device that is not there. Its sizes and devices can be read as on a real
    one, and its values cannot.
    """
    B, H, G, T, S, D, E = shape
    with FakeTensorMode():
        sizes = ((B, H, T, D), (B, G, S, D), (B, G, S, E))
        q, k, v = (torch.empty(x, dtype=dtype, device="cuda") for x in sizes)
    call = make_call(q, k, v, **options)
    object.__setattr__(call, "readable", True)
    return call


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "has_triton", lambda: True)
    monkeypatch.setattr(kernel, "interprets", lambda: False)


def first_three(call: Call) -> list[str]:
    return [x.name for x in dispatch.kernels_by_priority(call)][:3]


@pytest.mark.parametrize(
    "options, order",
    [
        ({"mask": CAUSAL}, ["sdpa", "triton", "flex"]),
        ({}, ["sdpa", "triton", "flex"]),
        ({"mask": WINDOW}, ["triton", "flex", "sdpa"]),
        ({"mask": CAUSAL, "bias": biases.ALiBi(8)}, ["triton", "flex", "sdpa"]),
        ({"mask": CAUSAL, "q_positions": Span(7, 512)}, ["triton", "flex", "sdpa"]),
        ({"mask": CAUSAL, "dtype": torch.float32}, ["triton", "flex", "sdpa"]),
    ],
    ids=str,
)
def test_the_order_on_a_gpu(options: dict[str, Any], order: list[str]) -> None:
    """Dense causal and full calls in half precision go to torch's flash attention, all others to
    this kernel, then to generated kernels.
    """
    call = cuda_call(**options)
    assert first_three(call) == order
    names = [x.name for x in dispatch.kernels_by_priority(call)]
    assert names.index("tiled") > names.index("sdpa")


@pytest.mark.parametrize(
    "options",
    [
        {"mask": WINDOW},
        {"mask": CAUSAL, "softcap": 30.0},
        {"mask": CAUSAL, "sink": True},
        {"bias": biases.ALiBi(8), "dtype": torch.float32},
        {"bias": biases.T5Relative(torch.zeros(32, 8))},
        {"shape": (2, 8, 2, 512, 512, 192, 128)},
        {"mask": masks.Dilated(4, 3), "dtype": torch.float16},
    ],
    ids=str,
)
@pytest.mark.usefixtures("installed")
def test_it_serves_the_call(options: dict[str, Any]) -> None:
    if options.get("sink"):
        with FakeTensorMode():
            options = {**options, "sink": torch.empty(8, device="cuda", dtype=torch.bfloat16)}
    call = cuda_call(**options, wants_lse=True)
    assert TritonKernel().why_not(call) == []
    chosen, same = dispatch.choose_kernel(call)
    assert chosen.name == "triton"
    assert same is call


@pytest.mark.usefixtures("installed")
def test_what_it_refuses() -> None:
    why = TritonKernel().why_not
    assert why(cuda_call(dtype=torch.float64)) == ["no float64"]
    assert why(cuda_call(dropout=0.1)) == ["no dropout"]
    (reason,) = why(cuda_call(shape=(1, 2, 2, 17, 17, 512, 512)))
    assert reason == (
        "head dimensions above 256 (D 512, E 512), unless few queries decode with D up to 576 and "
        "E up to 512"
    )
    assert why(cuda_call(shape=(1, 128, 1, 1, 4096, 576, 512))) == []
    assert why(cuda_call(k_positions=Span(2**31, 512))) == ["positions above 2147483646"]
    assert why(cuda_call(shape=(1, 2, 2, 0, 16, 8, 8))) == [
        "nothing to compute (B 1, T 0, S 16, E 8)"
    ]
    fn = masks.Fn(lambda q, k: (q + k) % 5 != 0, "fifth")
    assert why(cuda_call(shape=(1, 64, 2, 65536, 65536, 64, 64), mask=fn)) == [
        "the bits of fifth may take 32 GiB; limit 2.00 GiB"
    ]
    hidden = cuda_call()
    object.__setattr__(hidden, "readable", False)
    assert why(hidden) == ["not inside a transform of torch.func, nor without values"]
    q = torch.zeros(1, 2, 4, 8)
    assert why(make_call(q, q, q)) == ["runs on cuda, not on cpu"]
    object.__setattr__(hidden, "compiling", True)
    assert "not inside a compiled graph" in why(hidden)


def test_without_triton_it_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernel, "has_triton", lambda: False)
    assert TritonKernel().why_not(cuda_call()) == [
        "triton is not installed: pip install 'regard[gpu]'"
    ]


def test_it_says_how_it_would_run_a_call() -> None:
    q = torch.zeros(1, 2, 300, 64, dtype=torch.bfloat16)
    sinks = CAUSAL & (masks.Window(9) | masks.Sinks(2))
    say = TritonKernel().describe
    assert say(make_call(q, q, q, mask=sinks)) == (
        "triton reads the mask as 2 ranges of positions for each query, in blocks of 128 queries "
        "and 64 keys, and compiles nothing for a new mask"
    )
    assert "as positions, in" in say(make_call(q, q, q))
    assert "as one bit for each pair" in say(make_call(q, q, q, mask=masks.Dilated(4, 3)))
    q = torch.zeros(1, 2, 512, 64, dtype=torch.bfloat16)
    work = TritonKernel().work(make_call(q, q, q, mask=CAUSAL))
    # 4 blocks of 128 queries see 2, 4, 6 and 8 tiles of 64 keys
    assert work.pairs == 2 * 128 * 64 * (2 + 4 + 6 + 8)
    # m, l and lse of each row, int32 positions, one range a query, counts, tiles and kinds
    assert work.bytes == 3 * 2 * 512 * 4 + 2 * 512 * 4 + 2 * 512 * 4 + 4 * 2 * 4 + 4 * 8 * 5


def stored_cuda_call(T: int) -> Call:
    """T queries and a paged cache on a CUDA device that is not there."""
    call = cuda_call(shape=(1, 8, 2, T, 64, 64, 64), mask=CAUSAL)
    with FakeTensorMode():
        pages = torch.empty(9, 16, 2, 64, dtype=torch.bfloat16, device="cuda")
        table = torch.zeros(1, 5, dtype=torch.int32, device="cuda")
    k, v = (LazyPagedTensor.of(PagesOfRows(pages, table), Span(0, 64)) for _ in range(2))
    call = make_call(call.q, k, v, mask=CAUSAL)
    object.__setattr__(call, "readable", True)
    return call


@pytest.mark.usefixtures("installed")
def test_a_stored_cache_comes_here_first() -> None:
    """Torch's kernel would gather or dequantize the whole cache in every step."""
    assert first_three(stored_cuda_call(1))[0] == "triton"
    assert first_three(cuda_call(shape=(1, 8, 2, 1, 64, 64, 64), mask=CAUSAL))[:2] != ["triton"]
    assert first_three(stored_cuda_call(64))[0] == "sdpa"  # a prompt


def test_it_says_in_which_form_it_reads_a_cache() -> None:
    draw = torch.Generator().manual_seed(0)
    q, k = torch.randn(1, 4, 1, 16), torch.randn(1, 2, 40, 16, generator=draw)
    quantized, paged = Quantized(4, group=16, residual=5), Paged(8, pages=5)
    coded = quantized.update((k, k), Span(0, 40))[0]
    say = TritonKernel().describe
    assert say(make_call(q, *coded, mask=CAUSAL)).endswith(
        "mask; it reads 32 slots of keys and values as codes of 4 bits, and 8 recent slots in full "
        "precision"
    )
    paged.update((k, k), Span(0, 40))
    assert say(make_call(q, *paged.lazy_memory()[0], mask=CAUSAL)).endswith(
        "mask; it reads keys and values in pages of 8 slots, and gathers none"
    )
    # of another form, or gathered before, they are tensors like any others
    keys, values = coded
    assert say(make_call(q, keys, values.clone())).endswith("for a new mask")
    assert "codes" not in say(make_call(q, keys, values)), "clone() made the numbers"


@pytest.mark.parametrize(
    "options, words",
    [
        ({"mask": CAUSAL}, "flash attention"),
        ({"mask": WINDOW}, "efficient attention"),
        ({"mask": CAUSAL, "dtype": torch.float32}, "efficient attention"),
        ({"dtype": torch.float64}, "math"),
    ],
    ids=str,
)
def test_sdpa_names_torchs_kernel(options: dict[str, Any], words: str) -> None:
    said = SdpaKernel().describe(cuda_call(**options))
    assert said == f"sdpa asks torch for its {words} kernel, never for cuDNN"
    q = torch.zeros(1, 2, 4, 8)
    assert SdpaKernel().describe(make_call(q, q, q)) == ""


def test_no_list_of_torchs_kernels_has_cudnn() -> None:
    for dtype in (torch.float64, torch.float32, torch.bfloat16, torch.float16):
        for masked in (False, True):
            assert not any("CUDNN" in name for name in cuda_backends(dtype, masked=masked))


def test_a_rectangle_is_one_range_on_a_gpu() -> None:
    """Several ranges are merged by their lse, which torch's public function does not return."""
    from regard.ops.softmax.lowering import lower_mask

    for options in ({"mask": CAUSAL, "q_positions": Span(7, 512)}, {"mask": CAUSAL}, {}):
        blocks = lower_mask(cuda_call(**options))
        assert [len(block.ranges) for block in blocks] == [1]


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("masked", [False, True])
def test_the_function_for_a_gpu_is_right_on_a_cpu(masked: bool, causal: bool) -> None:
    """Its switches are torch's own, and rows that see nothing have no NaN and no gradient."""
    draw = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(2, h, 20, 8, generator=draw).requires_grad_() for h in (4, 2, 2))
    visible = torch.rand(2, 1, 20, 20, generator=draw) < 0.5
    visible[:, :, 3] = False
    if causal and masked:
        pytest.skip("torch takes a mask or the causal flag")
    mask = torch.where(visible, 0.0, -torch.inf) if masked else None
    out = attend_range_on_cuda(q, k, v, mask, 0.4, causal=causal)
    triangle = torch.ones(20, 20, dtype=torch.bool).tril()[None, None]
    seen = visible if masked else (triangle if causal else torch.ones_like(triangle))
    right, _ = plain_attention(q, k, v, visible=seen.expand(2, 4, 20, 20), scale=0.4)
    torch.testing.assert_close(out, right, rtol=1e-5, atol=1e-5)
    for x in torch.autograd.grad(out.pow(2).sum(), (q, k, v)):
        assert x.isfinite().all()
