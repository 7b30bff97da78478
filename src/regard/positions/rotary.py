"""Rotary position embeddings: frequencies, the rotation of queries and keys, and XPos."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal, TypeAlias

import torch
from jaxtyping import Float
from torch import Tensor, nn

from regard.argument_checks import check_number, check_positions, check_tensor
from regard.errors import ArgumentError, ArgumentTypeError
from regard.positions.scalings import (
    LinearScaling,
    RopeFrequencies,
    Scaling,
    UnscaledFrequencies,
    base_frequencies,
    check_above,
)
from regard.process_state import ConstantTensor, is_compiling
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
    """Compute the rotary frequencies of pairs of dims, and the factors of a scaling.

    theta_i = base^(-2i/d) for pairs i < rotary_dim / 2, with d = rotary_dim

    If proportional, d = dim, and the other pairs up to dim / 2 have frequency 0.

    Args:
        dim: the head dim D, even.
        base: the base b.
        scaling: a scaling for longer contexts, such as `YaRN`, applied to theta, or None.
        rotary_dim: the number of dims that are rotated; all by default.
        proportional: whether exponents are divided by the head dim (p-RoPE, as in Gemma 4), with
            D/2 pairs in the result.
        length: the length of the sequence, for scalings that depend on it.

    Returns:
        The frequencies, fp64 [rotary_dim / 2] or [D / 2], in radians per position; both factors.

    Raises:
        ArgumentError: a number is out of range, or the scaling does not fit.
        ArgumentTypeError: scaling is not a scaling.

    >>> rope_frequencies(4).inv_freq.tolist()
    [1.0, 0.01]
    >>> rope_frequencies(8, rotary_dim=4, proportional=True).inv_freq.tolist()
    [1.0, 0.1, 0.0, 0.0]

    Source: Su et al. 2021 (arXiv 2104.09864), section 3.2; Barbero et al. 2024 (arXiv 2410.06205).
    """
    rotated_dims = dim if rotary_dim is None else rotary_dim
    _check_frequencies(dim, base, rotated_dims, scaling, length, proportional=proportional)
    divisor = dim if proportional else rotated_dims
    theta = base_frequencies(base, divisor, rotated_dims // 2)
    if scaling is None:
        result = RopeFrequencies(theta, 1.0, 1.0)
    else:
        result = scaling.scale(UnscaledFrequencies(theta, base, divisor, length))
    if not proportional:
        return result
    zeros = theta.new_zeros((dim - rotated_dims) // 2)
    return result._replace(inv_freq=torch.cat((result.inv_freq, zeros)))


def _check_frequencies(
    dim: int,
    base: float,
    rotated_dims: int,
    scaling: Scaling | None,
    length: int | None,
    *,
    proportional: bool,
) -> None:
    """Check the arguments of `rope_frequencies`."""
    if dim < 2 or dim % 2:
        raise ArgumentError(f"dim is {dim}; rotary pairs need an even head dim of at least 2")
    if not 0 <= rotated_dims <= dim or rotated_dims % 2:
        raise ArgumentError(
            f"rotary_dim is {rotated_dims}; it must be even, from 0 to the head dim {dim}"
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
            f"scaling {type(scaling).__name__} with proportional=True is not defined; "
            "use LinearScaling or None"
        )


Layout: TypeAlias = Literal["half", "interleaved"]
"""Which dims form pair i. "half": (i, i + d/2), as in Hugging Face's Llama and GPT-NeoX;
"interleaved": (2i, 2i + 1), as in GPT-J and Meta's Llama.
"""


def rotate(
    x: Float[Tensor, "B H L D"],
    positions: Positions,
    inv_freq: Float[Tensor, " n"],
    *,
    layout: Layout = "half",
    factor: float = 1.0,
) -> Float[Tensor, "B H L D"]:
    """Rotate the first 2n dims of each head by its position; the other dims are unchanged.

    (a, b) -> factor (a cos - b sin, b cos + a sin), angle = position * inv_freq_i for pair i

    Angle, cos and sin are computed in fp64 and then cast, so that positions stay distinct at any
    length. The result at an empty slot (-1) is finite and has no meaning.

    Args:
        x: queries or keys [B,H,L,D].
        positions: a `Span`, or integers [B or 1, L].
        inv_freq: radians per position [n], from `rope_frequencies`; 2n <= D.
        layout: which dims form a pair: "half" or "interleaved", as the weights were trained.
        factor: the factor on cos and sin.

    Returns:
        The rotated queries or keys [B,H,L,D].

    Raises:
        ArgumentError: a shape or the positions do not fit, or layout is unknown.
        ArgumentTypeError: x, inv_freq or positions have a wrong type.

    >>> x = torch.tensor([1.0, 2.0, 3.0, 4.0], dtype=torch.float64)[None, None, None]
    >>> rotated = rotate(x, Span(1, 1), rope_frequencies(4).inv_freq)
    >>> [round(y, 6) for y in rotated.flatten().tolist()]
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
    """Return factor * cos and factor * sin of position * inv_freq, each [B or 1, 1, L, n]."""
    compute_device = torch.device("cpu") if device.type == "mps" else device  # mps has no fp64
    p = as_tensor(positions, compute_device).to(compute_device, torch.float64)
    angle = p[:, None, :, None] * inv_freq.to(compute_device, torch.float64)
    cos, sin = (angle.cos() * factor).to(dtype), (angle.sin() * factor).to(dtype)
    return cos.to(device), sin.to(device)


def apply_rotary(x: Tensor, cos: Tensor, sin: Tensor, layout: Layout) -> Tensor:
    """Rotate each pair of the first 2n dims of x: (a, b) -> (a cos - b sin, b cos + a sin)."""
    n = cos.shape[-1]
    if layout == "half":
        # the gradient of `split` is one `cat`; that of each slice would be a tensor of zeros
        rest = x.shape[-1] - 2 * n
        a, b, *others = x.split((n, n, rest) if rest else n, dim=-1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin, *others), dim=-1)
    a, b = x[..., 0 : 2 * n : 2], x[..., 1 : 2 * n : 2]
    rotated = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    return torch.cat((rotated, x[..., 2 * n :]), dim=-1)


class Rotary(nn.Module):
    """A rotary embedding (RoPE) as a step on heads, with frequencies that casts do not change.

    A scaling that depends on the length (`DynamicNTK`, `DynamicYaRN`, `LongRoPE`) needs `length`:

    - a number: its frequencies are used for every call, so that cached keys stay valid.
    - "current": the largest position of the call plus 1, over the batch. Rotated keys must not be
    cached, and positions in a tensor are copied to the CPU, a graph break.

    Args:
        dim: the head dim D.
        base, scaling, rotary_dim, proportional: as in `rope_frequencies`.
        layout: which dims form a pair: "half" or "interleaved".
        length: as above; ignored by scalings that do not depend on it.

    Attributes:
        inv_freq: the frequencies in fp64; with "current", those of the trained length.
        rotary_factor: the factor on cos and sin, which this module applies.
        softmax_factor: a factor for the scale of the attention, which is not applied here.
        follows_length: whether the frequencies follow the length of each call.

    Raises:
        ArgumentError: an argument does not suit `rope_frequencies` or the layout, or the scaling
            has no length.

    >>> rotary = Rotary(8)
    >>> rotary(torch.ones(1, 2, 3, 8), Span(0, 3)).shape
    torch.Size([1, 2, 3, 8])
    """

    inv_freq: Tensor

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
                f"length is None, but {type(scaling).__name__} depends on it; pass a number, "
                'which fixes the frequencies (a cache stays valid), or "current" (no cache of '
                "rotated keys)"
            )
        fixed_length = (
            length if isinstance(length, int) else getattr(scaling, "original_length", None)
        )
        self.inv_freq, self.rotary_factor, self.softmax_factor = self._frequencies(fixed_length)
        self._last: tuple[object, Positions, Tensor, Tensor] | None = None

    def forward(
        self, x: Float[Tensor, "B H L D"], positions: Positions
    ) -> Float[Tensor, "B H L D"]:
        """Rotate queries or keys by their positions.

        Args:
            x: queries or keys [B,H,L,D].
            positions: a `Span`, or integers [B or 1, L].

        Returns:
            The rotated queries or keys [B,H,L,D].

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
        if not fits:  # this fast test covers the usual case; the full checks take longer
            _check_rotate(x, positions, self.layout, self.inv_freq)
        if x.shape[-1] != self.dim:
            raise ArgumentError(
                f"x has head dim {x.shape[-1]}; it must be {self.dim}, the dim of this Rotary"
            )
        return apply_rotary(x, *self._cos_sin(x, positions), self.layout)

    def tables(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return the factors by which `forward` rotates.

        Args:
            x: a tensor with the dtype and the device of the tables; its values are not read.
            positions: a `Span`, or integers [B or 1, L].

        Returns:
            cos and sin, each [B or 1, 1, L, n] for n rotated pairs.
        """
        return self._cos_sin(x, positions)

    def _cos_sin(self, x: Tensor, positions: Positions) -> tuple[Tensor, Tensor]:
        """Return cos and sin for x, from the last call if it had the same arguments."""
        # All layers use the same tables for queries and for keys, so the last ones are stored. The
        # attribute is read once, because another thread may replace it at any time.
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
        """Return the frequencies and factors for a length."""
        return rope_frequencies(
            self.dim,
            self.base,
            scaling=self.scaling,
            rotary_dim=self.rotary_dim,
            proportional=self.proportional,
            length=length,
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Rotary:  # noqa: FBT001, FBT002  (torch's)
        # The frequencies follow the module to its device, but stay in fp64. The device "meta" has
        # no values, and "mps" has no fp64.
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        device = fn(torch.empty(0, dtype=torch.float32, device="cpu")).device
        if device.type not in ("meta", "mps"):
            self.inv_freq, self._last = self.inv_freq.to(device), None
        return self

    def __getstate__(self) -> dict[str, object]:
        state: dict[str, object] = super().__getstate__()  # type: ignore[no-untyped-call]
        return {**state, "_last": None}

    def extra_repr(self) -> str:
        """Return the head dim, the base, the layout, and what differs from the defaults."""
        parts = [f"{self.dim}", f"base={self.base}"]
        if self.rotary_dim not in (None, self.dim):
            parts.append(f"rotary_dim={self.rotary_dim}{', proportional' * self.proportional}")
        if self.scaling is not None:
            parts.append(f"scaling={self.scaling}")
        if self.scaling is not None and self.scaling.needs_length:
            parts.append(f"length={self.length!r}")
        return ", ".join([*parts, f"layout={self.layout!r}"])


class TrailingRotary(nn.Module):
    """A rotary embedding of the last dims of each head; the dims before them are unchanged.

    Args:
        rotary: a `Rotary` of as many dims as are rotated.

    >>> step = TrailingRotary(Rotary(2))
    >>> [round(y, 4) for y in step(torch.ones(1, 1, 1, 4), Span(1, 1)).flatten().tolist()]
    [1.0, 1.0, -0.3012, 1.3818]

    Source: the code of DeepSeek-V4 in transformers.
    """

    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.rotary = rotary

    def forward(
        self, x: Float[Tensor, "B H L D"], positions: Positions
    ) -> Float[Tensor, "B H L D"]:
        """Rotate the last dims of queries or keys [B,H,L,D] by their positions.

        Args:
            x: queries or keys [B,H,L,D].
            positions: a `Span`, or integers [B or 1, L].

        Returns:
            The rotated queries or keys [B,H,L,D].
        """
        first, last = x.tensor_split((x.shape[-1] - self.rotary.dim,), -1)
        return torch.cat((first, self.rotary(last, positions)), -1)


def _table_key(x: Tensor, positions: Positions) -> tuple[object, ...] | None:
    """Return everything that the tables depend on, or None if they must not be reused."""
    if is_compiling() or type(x) is not Tensor:
        return None
    if x.is_cuda and torch.cuda.is_current_stream_capturing():
        return None  # a captured graph needs its own tables

    position_key: object = positions
    if isinstance(positions, Tensor):
        if positions.is_inference():
            return None  # it has no version counter, so a change of its values would go unnoticed
        position_key = (id(positions), positions._version)
    # Tables that were computed in inference mode cannot be used in a backward pass.
    return position_key, x.dtype, x.device, torch.is_inference_mode_enabled()


def _sequence_length(positions: Positions) -> int:
    """Return one more than the largest position, at least 0."""
    if isinstance(positions, Span):
        return max(0, positions.stop) if positions.length else 0
    return max(0, int(positions.max()) + 1) if positions.numel() else 0


def check_layout(layout: str) -> None:
    """Check that the layout is "half" or "interleaved"."""
    if layout not in ("half", "interleaved"):
        raise ArgumentError(
            f'layout is {layout!r}; it must be "half" (Hugging Face Llama, GPT-NeoX) or '
            '"interleaved" (GPT-J, Meta Llama)'
        )


def _check_rotate(x: Tensor, positions: Positions, layout: str, inv_freq: Tensor) -> None:
    """Check the arguments of `rotate`."""
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
            f"pairs for the head dim {x.shape[3]}"
        )
    check_positions("positions", positions, x.shape[0], x.shape[2])


def xpos_zeta(dim: int, gamma: float = 0.4) -> list[float]:
    """Compute zeta_i = (2i + gamma d) / ((1 + gamma) d), the factor of pair i per scale_base.

    Args:
        dim: the head dim d.
        gamma: the parameter gamma.

    Returns:
        The factors, one per pair of dims.

    >>> [round(zeta, 6) for zeta in xpos_zeta(4)]
    [0.285714, 0.642857]
    """
    return [(2 * i + gamma * dim) / ((1 + gamma) * dim) for i in range(dim // 2)]


def xpos_reach(
    dim: int, dtype: torch.dtype, *, gamma: float = 0.4, scale_base: float = 512.0
) -> int:
    """Compute the largest distance |p - c| at which zeta_0^((p - c) / scale_base) is finite.

    Args:
        dim: the head dim d.
        dtype: the dtype of queries and keys.
        gamma: the parameter gamma of `xpos_zeta`.
        scale_base: the number of positions over which the scale changes by one factor zeta.

    Returns:
        The largest distance from the center, in positions.

    >>> xpos_reach(64, torch.float16), xpos_reach(64, torch.float32)
    (4532, 36260)
    """
    slope = -math.log(xpos_zeta(dim, gamma)[0])
    return math.floor(scale_base * math.log(torch.finfo(dtype).max) / slope)


class XPos(nn.Module):
    """A rotary embedding times a scale that grows with the position for queries, not for keys.

    q' = R(p) q * zeta^((p - c) / scale_base),  k' = R(p) k * zeta^(-(p - c) / scale_base)

    A score then contains zeta_i^((p_q - p_k) / scale_base): it decays with the distance to past
    keys, and **grows** with the distance to later ones, so use it with causal masks only.

    Args:
        dim: the head dim D, even.
        role: whether this module is applied to queries ("query") or to keys ("key").
        base: the base of the rotary frequencies.
        layout: which dims form a pair, as in `Rotary`.
        center: the center c, equal for queries and keys; half of the expected length is best.
        scale_base: the number of positions over which the scale changes by one factor zeta.
        gamma: the parameter gamma of `xpos_zeta`.

    Raises:
        ArgumentError: an argument is out of range; when called, a position is too far from the
            center for the dtype (`xpos_reach`).

    >>> q = XPos(4, "query")(torch.ones(1, 1, 1, 4), Span(100, 1))
    >>> k = XPos(4, "key")(torch.ones(1, 1, 1, 4), Span(100, 1))
    >>> round(float((q * k).sum()), 5)
    4.0

    Source: Sun et al. 2022 (arXiv 2212.10554), algorithm 1.
    """

    def __init__(
        self,
        dim: int,
        role: Literal["query", "key"],
        *,
        base: float = 10000.0,
        layout: Layout = "half",
        center: int = 0,
        scale_base: float = 512.0,
        gamma: float = 0.4,
    ) -> None:
        super().__init__()
        check_layout(layout)
        check_above("scale_base", scale_base)
        check_above("gamma", gamma)
        if role not in ("query", "key"):
            raise ArgumentError(f'role is {role!r}; it must be "query" or "key"')
        self.frequencies = rope_frequencies(dim, base)
        self._inv_freq = ConstantTensor(self.frequencies.inv_freq)
        self.dim, self.role, self.layout, self.center = dim, role, layout, center
        self.scale_base, self.gamma = scale_base, gamma

    def forward(
        self, x: Float[Tensor, "B H L D"], positions: Positions
    ) -> Float[Tensor, "B H L D"]:
        """Rotate and scale queries or keys x [B,H,L,D] at their positions."""
        self._check_reach(positions, x.dtype)
        dtype = torch.promote_types(x.dtype, torch.float32)
        at_cpu = x.device.type in ("cpu", "mps")
        inv_freq = self._inv_freq.tensor if at_cpu else self._inv_freq.on(x.device)
        cos, sin = cos_sin(positions, inv_freq, dtype, x.device)
        scale = self.scale(positions, x.device)[:, None].to(dtype)
        return apply_rotary(x, (cos * scale).to(x.dtype), (sin * scale).to(x.dtype), self.layout)

    def scale(
        self, positions: Positions, device: torch.device | None = None
    ) -> Float[Tensor, "B L n"]:
        """Compute the scale of each pair.

        Args:
            positions: positions [B or 1, L].
            device: the device of the result; by default that of the positions.

        Returns:
            The factors [B or 1, L, D/2] in fp64; 1 at empty slots.
        """
        p = as_tensor(positions, device)
        power = torch.where(p < 0, 0, p - self.center).to(torch.float64) / self.scale_base
        log_zeta = torch.tensor(
            xpos_zeta(self.dim, self.gamma), dtype=torch.float64, device=p.device
        ).log()
        return (power[..., None] * (log_zeta if self.role == "query" else -log_zeta)).exp()

    def _check_reach(self, positions: Positions, dtype: torch.dtype) -> None:
        """Check that no position is too far from the center for the dtype."""
        if isinstance(positions, Span):
            extremes = [positions.start, positions.stop - 1] if positions.length else []
        elif is_compiling() or not positions.numel():
            extremes = []
        else:
            used = positions[positions >= 0]
            extremes = [int(used.min()), int(used.max())] if used.numel() else []
        reach = xpos_reach(self.dim, dtype, gamma=self.gamma, scale_base=self.scale_base)
        for p in extremes:
            if p >= 0 and abs(p - self.center) > reach:
                name = str(dtype).removeprefix("torch.")
                raise ArgumentError(
                    f"position {p} is {abs(p - self.center)} from the center {self.center}, but "
                    f"in {name} the scale of XPos overflows beyond {reach}; move the center, or "
                    "use Rotary"
                )

    def extra_repr(self) -> str:
        """Return the head dim, the role, the center and the layout."""
        return f"{self.dim}, {self.role}, center={self.center}, layout={self.layout!r}"
