"""A norm as a linear map: its scale is that of one run and is not computed anew.

    norm(x) = A x + b,  A = diag(g) C / sigma(x)

C subtracts the mean (LayerNorm) or is the identity (RMSNorm). With sigma fixed, the norm of a sum
is the sum of the norms of its terms, and the direct effect of every term is defined.
"""

from __future__ import annotations

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.errors import ArgumentError
from regard.tolerance import allowed_error

_PROBE = 2.0**12
"""The size of the probes, at which the epsilon of a norm has no influence."""

_NUDGE = 2.0**-20
"""The relative change of states which shows how a norm rounds."""


class FrozenNorm:
    """A norm with the scale that it had for given states.

    Gain, bias and centring are measured from the module's results for simple inputs, so that the
    class of the norm need not be known. The linear map is compared with the module's own result.

    Args:
        norm: the module.
        x: the states `[B, T, M]` that it normalised.
        y: its result for them.

    Raises:
        ArgumentError: the module is not a LayerNorm or RMSNorm in disguise: the linear map does not
            give its result.

    >>> norm, x = nn.LayerNorm(4), torch.randn(1, 3, 4)
    >>> frozen = FrozenNorm(norm, x, norm(x))
    >>> total = frozen(x - 1) + frozen(torch.ones_like(x)) + frozen.bias
    >>> bool(torch.allclose(total, norm(x).double(), atol=1e-5))
    True

    Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits", section
    "handling layer normalization".
    """

    @torch.no_grad()
    def __init__(
        self, norm: nn.Module, x: Float[Tensor, "B T M"], y: Float[Tensor, "B T M"]
    ) -> None:
        M = x.shape[-1]
        self.is_centred = False
        self.gain, self.bias = (torch.full((M,), n, dtype=torch.float64) for n in (1.0, 0.0))
        self.scale = torch.ones(*x.shape[:-1], 1, dtype=torch.float64)
        if isinstance(norm, nn.Identity):
            return
        wide = copy.deepcopy(norm).double().cpu()
        zeros = torch.zeros(M, dtype=torch.float64)
        signs = zeros + _PROBE
        signs[1::2] *= -1
        self.bias = _apply(wide, zeros)
        alternating = _apply(wide, signs) - self.bias
        # a LayerNorm makes nothing of equal entries
        ones = _apply(wide, zeros + _PROBE) - self.bias
        self.is_centred = bool(ones.abs().max() < alternating.abs().max() / 2)
        size = self._centre(signs)
        self.gain = alternating * size.square().mean().sqrt() / size
        x64, y64 = x.double().cpu(), wide(x.double().cpu()).double()
        centred = self.gain * self._centre(x64)
        wanted = y64 - self.bias
        # 1 / sigma of each position, by least squares over the M dims
        self.scale = (centred * wanted).sum(-1, keepdim=True)
        self.scale /= centred.square().sum(-1, keepdim=True)
        error = float((self(x) + self.bias - y64).abs().max())
        # Many norms compute in fp32 whatever the dtype of their input, so that y64 is rounded, too.
        # A norm of slightly longer states is the same with other roundings.
        others = [wide(x64 * (1 + n * _NUDGE)).float() for n in (1, 2, 3)]
        if not error <= allowed_error([y.float().cpu(), *others], y64):
            raise ArgumentError(
                f"{type(norm).__name__} is not a linear map with a fixed scale (the difference is "
                f"{error:.1e}); direct attribution needs a LayerNorm or an RMSNorm"
            )

    def __call__(self, x: Tensor) -> Tensor:
        """Apply the linear part to terms `[..., T, M]`, in fp64."""
        return self._centre(x.double().cpu()) * self.gain * self.scale

    def _centre(self, x: Tensor) -> Tensor:
        return x - x.mean(-1, keepdim=True) if self.is_centred else x


def _apply(norm: nn.Module, x: Tensor) -> Tensor:
    """Return norm(x) of one vector `[M]`, in fp64."""
    result: Tensor = norm(x[None, None])
    return result[0, 0].double()
