"""Gradients of attention over parts of the keys, from the output and the lse over all of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import biases, masks
from regard.errors import ArgumentError, KernelRefusal
from regard.ops.softmax import Partial, attend_partial, merge
from regard.ops.softmax.attend import part_gradients
from regard.ops.softmax.kernel import Kernel
from regard.ops.softmax.merge import merge_into
from regard.ops.softmax.reference import ReferenceKernel
from regard.span import Span
from tests.kernels import require_backend
from tests.rules import GRADIENT, assert_close_rule

B, H, G, T, S, D, E = 2, 4, 2, 12, 40, 16, 8
PARTS = (slice(0, 17), slice(17, 18), slice(18, S))
LONG_PARTS = (slice(0, 19), slice(19, S))
"""Parts of at least 16 keys each, which the kernel "sdpa" needs."""
MASKS = {"full": masks.Full(), "window": masks.Causal() & masks.Window(20)}
OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "small": {"scale": 0.1},
    "softcap": {"softcap": 3.0, "scale": -0.3},
    "alibi": {"bias": biases.ALiBi(H)},
    "t5": {"bias": biases.T5Relative(torch.linspace(-1, 1, 8 * H).view(8, H))},
}
CASES = [
    *((kernel, "plain") for kernel in ("reference", "tiled", "gemm", "another")),
    ("sdpa", "small"),  # it computes gradients of small scores only
    *((kernel, "softcap") for kernel in ("reference", "tiled", "gemm", "another")),
    *((kernel, "alibi") for kernel in ("tiled", "gemm")),
    *((kernel, "t5") for kernel in ("reference", "tiled", "another")),
]


class Another(ReferenceKernel):
    """A caller's own kernel, which does not compute the gradients of a part itself."""

    name = "another"

    part_gradients = Kernel.part_gradients

    def priority(self, call: object) -> None:
        """Run only by name."""


def tensors(dtype: torch.dtype) -> tuple[Tensor, ...]:
    """q, k, v, the gradient of the output, and that of the lse."""
    numbers = torch.Generator().manual_seed(3)
    sizes = ((H, T, D), (G, S, D), (G, S, E), (H, T, E))
    found = [torch.randn(B, *size, generator=numbers).to(dtype) for size in sizes]
    return *found, torch.randn(B, H, T, generator=numbers)


def of_all(dtype: torch.dtype, computed_in: torch.dtype, mask: str, option: str) -> list[Tensor]:
    """Gradients of q, k, v and the bias, from one call over all keys."""
    q, k, v, d_out, d_lse = (x.to(computed_in) for x in tensors(dtype))
    inputs = [x.requires_grad_() for x in (q, k, v)]
    options = dict(OPTIONS[option])
    if option == "t5":
        (table,) = options["bias"].tensors()
        inputs.append(table.to(computed_in).requires_grad_())
        options["bias"] = options["bias"].with_tensors(inputs[3:])
    part = attend_partial(*inputs[:3], mask=MASKS[mask], backend="reference", **options)
    grads = torch.autograd.grad((part.out, part.lse), inputs, (d_out, d_lse.to(part.lse.dtype)))
    return list(grads)


def of_parts(
    dtype: torch.dtype, kernel: str, mask: str, option: str, *, joined: bool = True
) -> list[Tensor]:
    """The same gradients, from one call for each part."""
    q, k, v, d_out, d_lse = tensors(dtype)
    wide = torch.float32 if kernel != "sdpa" else dtype
    shared = {"mask": MASKS[mask], "q_positions": Span(S - T, T), "backend": kernel}
    shared |= {"out_dtype": wide, **OPTIONS[option]}
    cuts = LONG_PARTS if kernel == "sdpa" else PARTS
    places = [{"k_positions": Span(p.start, p.stop - p.start)} for p in cuts]
    pieces = [(k[:, :, p], v[:, :, p]) for p in cuts]
    learned = "bias" in shared and shared["bias"].tensors()
    parts = [
        attend_partial(q, *piece, **shared, **place)
        for piece, place in zip(pieces, places, strict=True)
    ]
    assert parts[0].out.dtype == wide
    whole = merge([Partial(part.out.float(), part.lse) for part in parts])
    if learned:
        table = [x.detach().clone().requires_grad_() for x in learned]
        shared["bias"] = shared["bias"].with_tensors(table)
    found = [
        part_gradients(q, *piece, whole if joined else part, (d_out, d_lse), **shared, **place)
        for piece, place, part in zip(pieces, places, parts, strict=True)
    ]
    d_q = torch.stack([x[0] for x in found]).sum(0)
    d_k, d_v = (torch.cat([x[i] for x in found], 2) for i in (1, 2))
    d_bias = [torch.stack([x[3] for x in found]).sum(0)] if learned and option == "t5" else []
    return [d_q, d_k, d_v, *d_bias]


@pytest.fixture
def another_kernel() -> Any:
    """A registered kernel without the method `part_gradients`."""
    with regard.register_kernel(Another()):
        yield


@pytest.mark.full(keep=6)
@pytest.mark.usefixtures("another_kernel")
@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kernel, option", CASES)
def test_parts_have_the_gradients_of_the_whole(
    kernel: str, option: str, dtype: torch.dtype, mask: str
) -> None:
    if kernel == "sdpa" and dtype == torch.bfloat16:
        pytest.skip("sdpa rounds its output to bfloat16")
    try:
        found = of_parts(dtype, kernel, mask, option)
    except KernelRefusal as refusal:
        pytest.skip(str(refusal))
    exact = of_all(dtype, torch.float64, mask, option)
    usual = of_all(dtype, dtype, mask, option)
    for i, (x, plain, reference) in enumerate(zip(found, usual, exact, strict=True)):
        assert x.dtype == torch.float32
        what = f"{kernel}, {option}, {mask}, gradient {i}"
        assert_close_rule(x.to(dtype), plain, reference, factor=GRADIENT, what=what)


def test_the_lse_of_a_part_alone_is_noticed() -> None:
    """The negative control: gradients from the output and lse of the part itself."""
    exact = of_all(torch.float32, torch.float64, "full", "plain")
    usual = of_all(torch.float32, torch.float32, "full", "plain")
    found = of_parts(torch.float32, "tiled", "full", "plain", joined=False)
    for x, plain, reference in zip(found, usual, exact, strict=True):
        with pytest.raises(AssertionError):
            assert_close_rule(x, plain, reference, factor=GRADIENT)


@pytest.mark.parametrize("kernel", ["cpu", "reference", "tiled", "gemm"])
def test_a_part_leaves_the_kernel_unrounded(kernel: str) -> None:
    require_backend(kernel)
    q, k, v, *_ = tensors(torch.bfloat16)
    wide = attend_partial(q, k, v, backend=kernel, out_dtype=torch.float32)
    rounded = attend_partial(q, k, v, backend=kernel)
    assert (wide.out.dtype, rounded.out.dtype) == (torch.float32, torch.bfloat16)
    assert torch.equal(wide.out.bfloat16(), rounded.out)
    assert torch.equal(wide.lse, rounded.lse)
    assert not torch.equal(wide.out, rounded.out.float())


def test_what_cannot_leave_a_kernel_unrounded_is_refused() -> None:
    q, k, v, *_ = tensors(torch.bfloat16)
    with pytest.raises(KernelRefusal, match=r"sdpa \(rounds its output to bfloat16\)"):
        attend_partial(q, k, v, backend="sdpa", out_dtype=torch.float32)
    with pytest.raises(ArgumentError, match=r"out_dtype is torch\.float16; it must be torch\.bf"):
        attend_partial(q, k, v, out_dtype=torch.float16)


def test_parts_are_joined_in_place_as_by_merge() -> None:
    q, k, v, *_ = tensors(torch.float32)
    options: dict[str, Any] = {"q_positions": Span(S - T, T), "mask": MASKS["window"]}
    parts = [
        attend_partial(
            q, k[:, :, p], v[:, :, p], k_positions=Span(p.start, len(k[0, 0, p])), **options
        )
        for p in (slice(0, 2), *PARTS)  # no query sees the first two keys
    ]
    assert bool(parts[0].lse.isneginf().all())
    parts[0].out.fill_(torch.nan)  # a NaN with the share 0
    expected = merge(parts[1:])
    for order in (parts, parts[::-1]):
        total = Partial(*(x.clone() for x in order[0]))
        for part in order[1:]:
            merge_into(total, part)
        torch.testing.assert_close(total.out, expected.out)
        torch.testing.assert_close(total.lse, expected.lse)
