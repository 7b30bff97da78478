"""Recordings of single calls of attention."""

from __future__ import annotations

from collections.abc import Collection
from typing import Any

import torch
from torch import Tensor

import regard
from regard.inspect import Recorder, Recording


def recorded_call(
    q: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    *,
    keep: Collection[str] = ("v", "out"),
    **options: Any,
) -> Recording:
    """Record one call of `regard.attend`; keys are the queries, and values the keys, by default."""
    k = q if k is None else k
    with torch.no_grad(), Recorder(keep=keep) as recorder:
        regard.attend(q, k, k if v is None else v, **options)
    return recorder.recording()
