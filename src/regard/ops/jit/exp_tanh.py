"""The exponential and the hyperbolic tangent without calls to libm, which would keep the compiler
from vectorizing the loops that compute them.
"""

from __future__ import annotations

import math

import numpy as np

from regard.ops.jit.compile import njit_fastmath, njit_linked
from regard.ops.jit.half_precision import bits_to_float

_LOG2E, _LN2_HIGH, _LN2_LOW = (
    np.float32(1.4426950408889634),
    np.float32(0.693359375),
    np.float32(-2.12194440e-4),
)
_C0, _C1, _C2, _C3, _C4, _C5 = (
    np.float32(1.9875691500e-4),
    np.float32(1.3981999507e-3),
    np.float32(8.3334519073e-3),
    np.float32(4.1665795894e-2),
    np.float32(1.6666665459e-1),
    np.float32(5.0000001201e-1),
)
_HALF, _ONE, _ZERO, _LEAST = np.float32(0.5), np.float32(1), np.float32(0), np.float32(-87)


@njit_linked(fastmath=("contract", "nsz"))
def exp(x: np.float32) -> np.float32:
    """Return e^x for x <= 0, accurate to about one rounding. It is 0 for x below -87, where e^x
    would be subnormal in fp32, and NaN for NaN.

    e^x = 2^n e^r,  n = round(x / ln 2),  r = x - n ln 2 in two parts

    e^r is a polynomial of degree 7 with the coefficients of Cephes' expf.
    """
    y = max(x, _LEAST)
    n = np.floor(y * _LOG2E + _HALF)
    r = y - n * _LN2_HIGH - n * _LN2_LOW
    p = ((((_C0 * r + _C1) * r + _C2) * r + _C3) * r + _C4) * r + _C5
    e = (p * r * r + r + _ONE) * bits_to_float((np.int32(n) + np.int32(127)) << np.int32(23))
    if x >= _LEAST:
        return e
    return _ZERO if x < _LEAST else x


@njit_fastmath
def tanh(x):
    """Return tanh x, accurate to a few roundings: by the odd polynomial of Cephes' tanhf near
    0, otherwise by the exponential.
    """
    a = abs(x)
    z = x * x
    p = (
        (
            (np.float32(-5.70498872745e-3) * z + np.float32(2.06390887954e-2)) * z
            - np.float32(5.37397155531e-2)
        )
        * z
        + np.float32(1.33314422036e-1)
    ) * z - np.float32(3.33332819422e-1)
    e = exp(np.float32(-2) * a)
    far = (_ONE - e) / (_ONE + e)
    return x + x * z * p if a < np.float32(0.625) else math.copysign(far, x)


_GELU_SCALE, _GELU_CUBE = np.float32(math.sqrt(2 / math.pi)), np.float32(0.044715)


@njit_fastmath
def gelu_tanh(x):
    """Return the approximation of GELU by tanh:

    x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3))) / 2
    """
    return _HALF * x * (_ONE + tanh(_GELU_SCALE * (x + _GELU_CUBE * x * x * x)))
