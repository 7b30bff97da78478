"""Rotary position embeddings: the frequency of each pair of dims, and the rotation of queries and
keys.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.arguments import check_number, check_positions, check_tensor
from regard.deprecation import renamed_attribute
from regard.errors import ArgumentError, ArgumentTypeError
from regard.positions.scalings import (
    LinearScaling,
    RopeFrequencies,
    Scaling,
    UnscaledFrequencies,
    base_frequencies,
)
from regard.process import is_compiling
from regard.span import Positions, Span, as_tensor


def rope_frequencies(
    dim: int,
    base: float = 10000.0,
    *,
    scaling: Scaling | None = None,
    rotary_dim: int | None = None,
    proportional: bool = False,
    length: int | None = None,
) -> RopeFrequencies:
    """Radians per position of each rotary pair, fp64, and the factors on cos and sin and on the
    softmax scale.

    theta_i = base^(-2i/d), i < rotary_dim / 2, with d = rotary_dim; if proportional, d = dim and
    the pairs beyond rotary_dim / 2 stand still (frequency 0). Then the scaling.

    Args:
        dim: the head dim D, even.
        base: b.
        scaling: one of `LinearScaling`, `NTK`, `DynamicNTK`, `YaRN`, `DynamicYaRN`, `Llama3`, `LongRoPE`.
        rotary_dim: how many dims turn, all by default.
        proportional: whether to divide exponents by the head dim: p-RoPE, as in Gemma 4. The result
            then has D/2 pairs, so that with layout "half" other dims turn than under partial
            rotary.
        length: how long the sequence is; for the scalings that depend on it.

    Raises:
        ArgumentError: dim or rotary_dim is odd or out of range, base is not above 1, or the scaling
            does not fit.
        ArgumentTypeError: scaling is not a scaling.

    >>> rope_frequencies(4).inv_freq.tolist()
    [1.0, 0.01]
    >>> rope_frequencies(8, rotary_dim=4).inv_freq.tolist()
    [1.0, 0.01]
    >>> rope_frequencies(8, rotary_dim=4, proportional=True).inv_freq.tolist()
    [1.0, 0.1, 0.0, 0.0]

    Source: Su et al. 2021 (arXiv 2104.09864), section 3.2; proportional: Barbero et al. 2024 (arXiv
    2410.06205).
    """
    turning = dim if rotary_dim is None else rotary_dim
    _check_frequencies(dim, base, turning, scaling, length, proportional=proportional)
    divisor = dim if proportional else turning
    theta = base_frequencies(base, divisor, turning // 2)
    if scaling is None:
        result = RopeFrequencies(theta, 1.0, 1.0)
    else:
        result = scaling.scale(UnscaledFrequencies(theta, base, divisor, length))
    if not proportional:
        return result
    still = theta.new_zeros((dim - turning) // 2)
    return result._replace(inv_freq=torch.cat((result.inv_freq, still)))


def _check_frequencies(
    dim: int,
    base: float,
    turning: int,
    scaling: Scaling | None,
    length: int | None,
    *,
    proportional: bool,
) -> None:
    if dim < 2 or dim % 2:
        raise ArgumentError(f"dim is {dim}; rotary pairs need an even head dim of at least 2")
    if not 0 <= turning <= dim or turning % 2:
        raise ArgumentError(
            f"rotary_dim is {turning}; it must be even, from 0 to the head dim {dim}"
        )
    check_number("base", base, 1, float("inf"), "above 1")
    if length is not None and length < 0:
        raise ArgumentError(f"length is {length}; it must be 0 or more")
    if scaling is not None and not isinstance(scaling, Scaling):
        raise ArgumentTypeError(
            f"scaling is {type(scaling).__name__}; it must be a scaling of regard.positions, such "
            "as YaRN(...), or None"
        )
    if proportional and not isinstance(scaling, LinearScaling | None):
        raise ArgumentError(
            f"scaling {type(scaling).__name__} with proportional=True is not defined anywhere; "
            "use Linear or None"
        )


Layout: TypeAlias = Literal["half", "interleaved"]
"""Which dims make pair i: (i, i + d/2), as in Hugging Face's Llama and GPT-NeoX, or (2i, 2i + 1),
as in GPT-J and Meta's.
"""


def rotate(
    x: Float[Tensor, "B H L D"],
    positions: Positions,
    inv_freq: Float[Tensor, " n"],
    *,
    layout: Layout = "half",
    factor: float = 1.0,
) -> Float[Tensor, "B H L D"]:
    """Turn the first 2n dims of each head by its position, and pass the rest.

    (a, b) -> factor (a cos - b sin, b cos + a sin), angle = position * inv_freq_i for pair i

    The angle, its cos and its sin are computed in fp64 whatever the dtype of x, and cos and sin are
    then cast to it: positions stay distinct at any length. Scores of rotated queries and keys
    depend on the difference of positions only. The angle of an empty slot (-1) is finite, and means
    nothing.

    Args:
        x: queries or keys.
        positions: a Span, or integers [B or 1, L].
        inv_freq: radians per position, from `rope_frequencies`; 2n <= D.
        layout: which dims make a pair; it must be the one the weights were trained with.
        factor: the rotary factor.

    Raises:
        ArgumentError: x is not 4-D, inv_freq not 1-D or too long, positions do not fit, or layout
            is unknown.
        ArgumentTypeError: x, inv_freq or positions have a wrong type.

    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)[None, None, None]
    >>> turned = rotate(x, Span(1, 1), rope_frequencies(4).inv_freq)
    >>> [round(y, 6) for y in turned.flatten().tolist()]
    [-1.984111, 1.959901, 2.462378, 4.0198]

    Source: Su et al. 2021 (arXiv 2104.09864), equation 34 (interleaved); in halves: GPT-NeoX.
    """
    _check_rotate(x, positions, layout, inv_freq)
    check_number("factor", factor, -math.inf, math.inf, "finite")
    return apply_rotary(x, *cos_sin(positions, inv_freq, x.dtype, x.device, factor), layout)


def cos_sin(
    positions: Positions,
    inv_freq: Tensor,
    dtype: torch.dtype,
    device: torch.device,
    factor: float = 1.0,
) -> tuple[Tensor, Tensor]:
    """factor * cos and factor * sin of position * inv_freq, each [B or 1, 1, L, n] in the dtype."""
    where = torch.device("cpu") if device.type == "mps" else device  # mps has no fp64
    p = as_tensor(positions, where).to(where, torch.float64)
    angle = p[:, None, :, None] * inv_freq.to(where, torch.float64)
    cos, sin = (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)
    return cos.to(device), sin.to(device)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """(a, b) -> (a cos - b sin, b cos + a sin) for each pair of the first 2n dims."""
    n = cos.shape[-1]
    if layout == "half":
        a, b = x[..., :n], x[..., n : 2 * n]
        both = a * cos - b * sin, b * cos + a * sin
        return torch.cat(both if 2 * n == x.shape[-1] else (*both, x[..., 2 * n :]), dim=-1)
    a, b = x[..., 0 : 2 * n : 2], x[..., 1 : 2 * n : 2]
    turned = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((turned, x[..., 2 * n :]), dim=-1)


class Rotary(nn.Module):
    """`rotate` as a step of a head. Its frequencies are no parameter and no buffer: no cast and no
    checkpoint touches them.

    **Length.** A scaling that depends on the length (`DynamicNTK`, `DynamicYaRN`, `LongRoPE`) must
    be told which:

    - a number, "frozen": the frequencies of that length for every position and call. Whatever is
        cached stays valid.
    - "current": the largest position of the call, plus 1, over the whole batch. Keys that an
      earlier call rotated under a shorter length are then stale: right for a single pass, wrong
      with a cache of rotated keys. With positions in a tensor it reads them, which breaks a
      compiled graph; with a `Span` it does not.

    Args:
        dim: the head dim D.
        base, scaling, rotary_dim, proportional: as in `rope_frequencies`.
        layout: "half" or "interleaved".
        length: above; ignored by scalings that do not depend on it.

    Attributes:
        inv_freq: fp64, on the device of the module. With "current", those of the trained length, as
            the factors.
        rotary_factor: multiplies cos and sin; applied here.
        softmax_factor: the attention's scale has to be multiplied by it; not applied here.
        follows_length: whether the frequencies follow the length of each call, so that rotated keys must
            not be cached.

    Raises:
        ArgumentError: as `rope_frequencies`; layout is unknown; or the scaling needs a length and
            has none.

    >>> rotary = Rotary(8)
    >>> rotary(torch.ones(1, 2, 3, 8), Span(0, 3)).shape
    torch.Size([1, 2, 3, 8])
    >>> rotary
    Rotary(8, base=10000.0, layout='half')
    """

    inv_freq: Tensor
    follows = renamed_attribute("follows_length")

    def __init__(
        self,
        dim: int,
        base: float = 10000.0,
        *,
        scaling: Scaling | None = None,
        rotary_dim: int | None = None,
        proportional: bool = False,
        layout: Layout = "half",
        length: int | Literal["current"] | None = None,
    ) -> None:
        super().__init__()
        check_layout(layout)
        if isinstance(length, str) and length != "current":
            raise ArgumentError(f'length is {length!r}; it must be a number or "current"')
        self.dim, self.base, self.scaling, self.layout = dim, base, scaling, layout
        self.rotary_dim, self.proportional, self.length = rotary_dim, proportional, length
        self.follows_length = (
            length == "current" and isinstance(scaling, Scaling) and scaling.needs_length
        )
        if length is None and isinstance(scaling, Scaling) and scaling.needs_length:
            raise ArgumentError(
                f"length is None, and {type(scaling).__name__} depends on it; pass a number to "
                "freeze the frequencies at "
                '(a cache stays valid), or "current" (no cache of rotated keys)'
            )
        known = length if isinstance(length, int) else getattr(scaling, "original_length", None)
        self.inv_freq, self.rotary_factor, self.softmax_factor = self._frequencies(known)
        self._last: tuple[object, Positions, Tensor, Tensor] | None = None

    def forward(
        self, x: Float[Tensor, "B H L D"], positions: Positions
    ) -> Float[Tensor, "B H L D"]:
        """Turn x [B,H,L,D] by its positions.

        Raises:
            ArgumentError: x is not [B, H, L, dim], or positions do not fit it.
        """
        fits = (
            isinstance(x, Tensor)
            and isinstance(positions, Span)
            and x.ndim == 4
            and x.shape[2:] == (positions.length, self.dim)
            and x.is_floating_point()
        )
        if not fits:  # what is wrong is found out only when something is
            _check_rotate(x, positions, self.layout, self.inv_freq)
        if x.shape[-1] != self.dim:
            raise ArgumentError(
                f"x has head dim {x.shape[-1]}; this rotary was made for {self.dim}"
            )
        return apply_rotary(x, *self._cos_sin(x, positions), self.layout)

    def _cos_sin(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        # Every layer asks for the same table, for queries and for keys: the last one is kept. It is
        # read once, because another thread may put another one there at any time.
        key, last = _table_key(x, positions), self._last
        if key is not None and last is not None and last[0] == key:
            return last[2:]
        inv_freq, factor = self.inv_freq, self.rotary_factor
        if self.follows_length:
            inv_freq, factor, _ = self._frequencies(_sequence_length(positions))
        cos, sin = cos_sin(positions, inv_freq, x.dtype, x.device, factor)
        if key is not None:
            self._last = (key, positions, cos, sin)
        return cos, sin

    def _frequencies(self, length: int | None) -> RopeFrequencies:
        return rope_frequencies(
            self.dim,
            self.base,
            scaling=self.scaling,
            rotary_dim=self.rotary_dim,
            proportional=self.proportional,
            length=length,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:  # noqa: FBT001, FBT002  (torch's)
        # Follow the module to its device, in fp64; "meta" has no numbers, and "mps" no fp64.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(torch.empty(0)).device
        if device.type not in ("meta", "mps"):
            self.inv_freq, self._last = self.inv_freq.to(device), None
        return self

    def __getstate__(self) -> dict[str, Any]:
        state: dict[str, Any] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_last": None}

    def extra_repr(self) -> str:
        """The head dim, the base, and what is not the default."""
        parts = [f"{self.dim}", f"base={self.base}"]
        if self.rotary_dim not in (None, self.dim):
            parts.append(f"rotary_dim={self.rotary_dim}{', proportional' * self.proportional}")
        if self.scaling is not None:
            parts.append(f"scaling={self.scaling}")
        if self.scaling is not None and self.scaling.needs_length:
            parts.append(f"length={self.length!r}")
        return ", ".join([*parts, f"layout={self.layout!r}"])


def _table_key(x: Tensor, positions: Positions) -> tuple[object, ...] | None:
    """What the tables depend on, or None where they must not be kept."""
    if is_compiling() or type(x) is not Tensor:
        return None
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a captured graph must own its tables
    where: object = positions
    if isinstance(positions, Tensor):
        if positions.is_inference():
            return None  # nobody would notice a change of its values
        where = (id(positions), positions._version)
    # tables made in inference mode cannot serve a backward pass
    return where, x.dtype, x.device, torch.is_inference_mode_enabled()


def _sequence_length(positions: Positions) -> int:
    """One past the largest position, at least 0."""
    if isinstance(positions, Span):
        return max(0, positions.stop) if positions.length else 0
    return max(0, int(positions.max()) + 1) if positions.numel() else 0


def check_layout(layout: str) -> None:
    """The layout is one of the two."""
    if layout not in ("half", "interleaved"):
        raise ArgumentError(
            f'layout is {layout!r}; it must be "half" (Hugging Face Llama, GPT-NeoX) or '
            '"interleaved" (GPT-J, Meta Llama)'
        )


def _check_rotate(x: Tensor, positions: Positions, layout: str, inv_freq: Tensor) -> None:
    check_tensor("x", x)
    check_tensor("inv_freq", inv_freq)
    check_layout(layout)
    if x.ndim != 4:
        raise ArgumentError(
            f"x has {x.ndim} dimensions, {tuple(x.shape)}; it must be [batch, heads, length, dim]"
        )
    if inv_freq.ndim != 1 or 2 * inv_freq.shape[0] > x.shape[3]:
        raise ArgumentError(
            f"inv_freq is {tuple(inv_freq.shape)}; it must be 1-D, of at most {x.shape[3] // 2} "
            "pairs for the "
            f"head dim {x.shape[3]}"
        )
    check_positions("positions", positions, x.shape[0], x.shape[2])
