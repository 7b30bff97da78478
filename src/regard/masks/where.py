"""Which rows, columns and slots of a call a mask is asked about."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from regard.span import Positions, Span, as_tensor, part


class Part(NamedTuple):
    """Some rows and columns of a call, and the device to compute on."""

    q_positions: Positions
    k_positions: Positions
    rows: slice
    columns: slice
    device: torch.device

    @property
    def q(self) -> Tensor:
        """The positions of the queries, [B or 1, t]."""
        return as_tensor(part(self.q_positions, self.rows), self.device).to(self.device)

    @property
    def k(self) -> Tensor:
        """The positions of the keys, [B or 1, s]."""
        return as_tensor(part(self.k_positions, self.columns), self.device).to(self.device)

    @property
    def keys(self) -> Positions:
        """The positions of all keys, a Span as it is."""
        keys = self.k_positions
        return keys if isinstance(keys, Span) else keys.to(self.device)


class Slot(NamedTuple):
    """One pair of slots of a call, scalars: its batch row, head and places, and the positions stored there."""

    b: Tensor
    h: Tensor
    q_idx: Tensor
    kv_idx: Tensor
    q: Tensor
    k: Tensor


def device_of(q: Positions, k: Positions, device: torch.device | str | None) -> torch.device:
    """The device that was asked for, else that of the stored positions, else the CPU."""
    if device is None:
        device = next((x.device for x in (k, q) if isinstance(x, Tensor)), "cpu")
    return torch.device(device)
