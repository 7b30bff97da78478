"""A linear map that is fast on a CPU in half precision, too."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from regard.ops.gemv import check_map, few_rows

FP16_MATMUL_ROWS = 16
"""Rows from which on fp16 matrices are multiplied in fp32 on a CPU."""
CONVERTED_BLOCK = 1 << 23
"""Numbers of a weight that are converted at a time: 32 MiB in fp32."""


def linear(
    x: Float[Tensor, "*L M"],
    weight: Float[Tensor, "N M"],
    bias: Float[Tensor, " N"] | None = None,
    *,
    block: int = CONVERTED_BLOCK,
) -> Float[Tensor, "*L N"]:
    """y = W x + b.

    A few rows on a CPU are `regard.ops.gemv`, which reads weights at the memory's speed in every
    dtype. Torch's product of an fp16 matrix with many rows is three times slower than in fp32
    (LOG.md): from `FP16_MATMUL_ROWS` rows on the weight is converted block by block, and the result is rounded
    once.

    Args:
        block: numbers of a weight that are converted at a time.

    Raises:
        ArgumentError, ArgumentTypeError: sizes, dtypes or devices do not agree.

    >>> linear(torch.ones(20, 2).half(), torch.eye(2).half()).dtype
    torch.float16
    """
    y = few_rows(x, weight, bias)
    return _many_rows(x, weight, bias, block) if y is None else y


def _many_rows(x: Tensor, weight: Tensor, bias: Tensor | None, block: int) -> Tensor:
    """W x + b by torch's products of matrices."""
    check_map(x, weight, bias)
    rows = x.numel() // max(1, x.shape[-1])
    if x.dtype != torch.float16 or x.device.type != "cpu" or rows < FP16_MATMUL_ROWS:
        return F.linear(x, weight, bias)
    wide = x.float()
    step = max(1, block // max(1, weight.shape[1]))
    biases = torch.split(bias, step) if bias is not None else [None] * -(-weight.shape[0] // step)
    parts = [
        F.linear(wide, w.float(), b if b is None else b.float()).to(x.dtype)
        for w, b in zip(torch.split(weight, step), biases, strict=True)
    ]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


class Linear(nn.Linear):
    """`torch.nn.Linear`, computed by `linear`.

    >>> Linear(3, 2)(torch.zeros(1, 3)).shape
    torch.Size([1, 2])
    """

    def forward(self, x: Float[Tensor, "*L M"]) -> Float[Tensor, "*L N"]:
        """x [..., in] -> [..., out]."""
        # Read from the dictionary, which takes a fifth of the time of `self.weight`.
        held = self._parameters
        weight: Tensor | None = held.get("weight")
        bias: Tensor | None = held.get("bias")
        if weight is None or "bias" not in held:  # a parametrization makes them on demand
            weight, bias = self.weight, self.bias
        y = few_rows(x, weight, bias)
        return _many_rows(x, weight, bias, CONVERTED_BLOCK) if y is None else y
