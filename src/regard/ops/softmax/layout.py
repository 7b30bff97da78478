"""Queries, keys and values as torch's fused kernels want them in memory."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from regard.process import is_compiling


def last_contiguous(x: Tensor) -> Tensor:
    """x, copied if its last dimension is strided: torch would leave its fused kernel."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def same_dim(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Zero columns until D and E are equal: they change neither a score nor a value."""
    missing = v.shape[-1] - q.shape[-1]
    if missing > 0:
        q, k = F.pad(q, (0, missing)), F.pad(k, (0, missing))
    elif missing < 0:
        v = k if _begins(v, k) else F.pad(v, (0, -missing))
    return q, k, v


def _begins(v: Tensor, k: Tensor) -> bool:
    """Whether values are the first numbers of their keys, in the same memory, as those of absorbed MLA: no copy is needed."""
    learns = torch.is_grad_enabled() and (k.requires_grad or v.requires_grad)
    return (
        not learns
        and type(k) is type(v) is Tensor
        and not is_compiling()
        and v.data_ptr() == k.data_ptr()
        and v.shape[:3] == k.shape[:3]
        and v.stride() == k.stride()
    )
