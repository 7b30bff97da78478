"""Short convolutions as modules: `CausalConvolution` with filters of its own, and
`JoinedConvolution`, several of them over neighbouring channels.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.caches import Parts
from regard.cost.fixed_state import ShortConvolution
from regard.errors import ArgumentError
from regard.ops.linear.short_convolution import Activation, short_convolution
from regard.span import Positions


class CausalConvolution(nn.Module):
    """A causal convolution over the last few tokens, with one filter per channel. It has a state:
    the inputs of the last n - 1 tokens.

    y_t = activation(bias + sum_{i < n} weight[:, n - 1 - i] * x_{t - i})

    Args:
        channels: the number of channels c.
        kernel: the number of tokens n of a filter, the present one included.
        bias: whether each channel has a bias.
        activation: "silu" for x sigmoid(x), or None.

    Raises:
        ArgumentError: a size is less than 1, or the activation is unknown.

    >>> convolution = CausalConvolution(3, 4)
    >>> y, state = convolution(torch.ones(1, 5, 3), None, None)
    >>> last, state = convolution(torch.ones(1, 1, 3), state, None)
    >>> y.shape, [tuple(part.shape) for part in state], torch.equal(last[:, 0], y[:, 4])
    (torch.Size([1, 5, 3]), [(1, 3, 3)], True)

    Source: Yang et al. 2024 (arXiv 2406.06484), section 3.3; Gu and Dao 2023 (arXiv 2312.00752),
    section 3.4.
    """

    def __init__(
        self, channels: int, kernel: int, *, bias: bool = False, activation: Activation = "silu"
    ) -> None:
        super().__init__()
        if min(channels, kernel) < 1:
            raise ArgumentError(
                f"CausalConvolution(channels={channels}, kernel={kernel}): each must be at least 1"
            )
        if activation not in ("silu", None):
            raise ArgumentError(f"activation is {activation!r}; it must be 'silu' or None")
        bound = kernel**-0.5  # the initial values of torch.nn.Conv1d
        self.weight = nn.Parameter(torch.empty(channels, kernel).uniform_(-bound, bound))
        self.bias = nn.Parameter(torch.empty(channels).uniform_(-bound, bound)) if bias else None
        self.activation = activation

    def forward(
        self, x: Float[Tensor, "B T c"], state: Parts | None, positions: Positions | None
    ) -> tuple[Float[Tensor, "B T c"], Parts]:
        """Convolve the tokens of a call."""
        return _convolve(self, x, state, positions)

    @property
    def cost(self) -> ShortConvolution:
        """The sizes of the convolution, for the cost of a layer."""
        return ShortConvolution(*self.weight.shape)

    def extra_repr(self) -> str:
        """Return the sizes and the activation."""
        channels, kernel = self.weight.shape
        return f"{channels} channels, kernel={kernel}, activation={self.activation!r}"


class JoinedConvolution(nn.Module):
    """Several causal convolutions over neighbouring channels, run as one. A model has it whose
    checkpoints store the filters of queries, of keys and of values apart.

    Args:
        parts: at least one `CausalConvolution`; all have the same number of tokens, the same
            activation, and no bias.

    >>> joined = JoinedConvolution([CausalConvolution(c, 4) for c in (2, 2, 3)])
    >>> y, (past,) = joined(torch.ones(1, 5, 7), None, None)
    >>> torch.equal(y[..., 4:], joined.parts[2](torch.ones(1, 5, 3), None, None)[0]), past.shape
    (True, torch.Size([1, 3, 7]))
    """

    def __init__(self, parts: Sequence[CausalConvolution]) -> None:
        super().__init__()
        kinds = {(part.weight.shape[1], part.activation, part.bias is None) for part in parts}
        if len(kinds) != 1 or not next(iter(kinds))[2]:
            raise ArgumentError(
                f"parts are {list(parts)}; they must have the same kernel and activation, and no "
                "bias"
            )
        self.parts = nn.ModuleList(parts)
        self.activation = parts[0].activation

    @property
    def weight(self) -> Float[Tensor, "c n"]:
        """The filters of all channels."""
        return torch.cat([cast("CausalConvolution", part).weight for part in self.parts])

    @property
    def bias(self) -> None:
        """Always None: the channels have no biases."""
        return

    def forward(
        self, x: Float[Tensor, "B T c"], state: Parts | None, positions: Positions | None
    ) -> tuple[Float[Tensor, "B T c"], Parts]:
        """Convolve the tokens of a call, as `CausalConvolution` does, with the channels of all
        parts one after another.
        """
        return _convolve(self, x, state, positions)

    @property
    def cost(self) -> ShortConvolution:
        """The sizes of the convolution, for the cost of a layer."""
        return ShortConvolution(*self.weight.shape)


def _convolve(
    convolution: CausalConvolution | JoinedConvolution,
    x: Tensor,
    state: Parts | None,
    positions: Positions | None,
) -> tuple[Tensor, Parts]:
    """Convolve the tokens of a call with the filters of a module."""
    weight: Tensor = convolution.weight
    bias: Tensor | None = convolution.bias
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        # the maps before it gave x another dtype than that of the filters
        weight, bias = weight.to(x.dtype), None if bias is None else bias.to(x.dtype)
    activation = convolution.activation
    return short_convolution(
        x, weight, bias, activation=activation, state=state, positions=positions
    )
