"""A constant tensor with one copy per device, so that a constant travels to a device once."""

from __future__ import annotations

import torch
from torch import Tensor

from regard.process_state import is_compiling, values_are_readable


class ConstantTensor:
    """A constant on the CPU, and its copies on other devices.

    `tensor.to(device)` would copy it in every layer and step, and wait for the device.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor
        self._copies: dict[torch.device, Tensor] = {}

    def on(self, device: torch.device) -> Tensor:
        """Return the constant on a device."""
        if device == self.tensor.device:
            return self.tensor
        copy = self._copies.get(device)
        if copy is not None:
            return copy
        if is_compiling():  # a graph's tensors end with it
            return self.tensor.to(device)
        with torch.inference_mode(False):  # a later call may save the copy for its gradient
            copy = self.tensor.to(device)
        if values_are_readable(copy):
            self._copies[device] = copy
        return copy

    def __deepcopy__(self, memo: dict[int, object]) -> ConstantTensor:
        return type(self)(self.tensor)

    def __reduce__(self) -> tuple[object, ...]:
        return type(self), (self.tensor,)
