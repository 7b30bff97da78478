"""Compressive memory: a matrix of fixed size to which keys and values are written, and from
which queries read a weighted mean of the values.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.argument_checks import check_groups, check_sizes, check_tensor
from regard.deprecation import renamed_attribute
from regard.errors import ArgumentTypeError

UpdateRule: TypeAlias = Literal["linear", "delta"]
"""How values are written to the memory: "linear" adds the value itself, "delta" adds its difference
from the value that the memory already returns for the key.
"""


class CompressiveState(NamedTuple):
    """The content of a compressive memory, in fp32 (fp64 for fp64 inputs).

    Args:
        M: `[B, G, D, E]`, the sum of sigma(k)^T v over the tokens that were written.
        z: `[B, G, D]`, the sum of sigma(k).
    """

    M: Tensor
    z: Tensor


class MemoryRead(NamedTuple):
    """The result of reading a compressive memory.

    Args:
        values: `[B, H, T, E]`, the weighted mean of the stored values; 0 where nothing was stored.
        has_memory: `[B, H, T]`, whether anything was stored for the query to read.
    """

    values: Tensor
    has_memory: Tensor


_old_attribute = renamed_attribute("has_memory")
_old_attribute.__set_name__(MemoryRead, "found")  # a named tuple does not do this itself
setattr(MemoryRead, "found", _old_attribute)  # noqa: B010  (mypy rejects a plain assignment)


def elu_plus_one(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """Apply the feature map sigma(x) = elu(x) + 1: x + 1 above 0, exp(x) below.

    It is computed as exp(x) rather than expm1(x) + 1, which would round values below the precision
    of 1 to 0.

    Args:
        x: a floating-point tensor of any shape.

    Returns:
        A tensor of the same shape and dtype.

    >>> elu_plus_one(torch.tensor([-200.0, 0.0, 2.0], dtype=torch.float64)).tolist()
    [1.3838965267367376e-87, 1.0, 3.0]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equation 7.
    """
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def empty_state(k: Tensor, v: Tensor) -> CompressiveState:
    """Return the memory before the first token, filled with zeros, for keys `[B, G, S, D]` and
    values `[B, G, S, E]`.
    """
    B, G, _, D = k.shape
    dtype = state_dtype(k)
    return CompressiveState(
        torch.zeros(B, G, D, v.shape[-1], dtype=dtype, device=k.device),
        torch.zeros(B, G, D, dtype=dtype, device=k.device),
    )


def state_dtype(k: Tensor) -> torch.dtype:
    """Return the dtype of a memory: fp64 for fp64 keys, else fp32, because it sums over a whole
    sequence.
    """
    return torch.float64 if k.dtype == torch.float64 else torch.float32


def retrieve(
    q: Float[Tensor, "B H T D"],
    state: tuple[Float[Tensor, "B G D E"], Float[Tensor, "B G D"]],
    where: Bool[Tensor, "#B T"] | None = None,
) -> MemoryRead:
    """Read from the memory the mean of the stored values, weighted by sigma(q) . sigma(k) with
    their keys k.

    A = sigma(q) M / (sigma(q) z), with sigma(x) = elu(x) + 1

    Query head h reads memory h // (H/G). Where nothing was stored the output is 0 rather than 0/0.

    Args:
        q: queries `[B, H, T, D]` without position encoding.
        state: M `[B, G, D, E]` and z `[B, G, D]`.
        where: bool `[B or 1, T]`, which queries read the memory. The others get 0, whatever they
            contain. None: all.

    Returns:
        The values that were read, and for which queries anything was stored.

    Raises:
        ArgumentError, ArgumentTypeError: sizes, dtypes or devices do not agree.

    >>> k, v = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 3)
    >>> state = write(k, v, empty_state(k, v))
    >>> torch.allclose(retrieve(k, state).values, v)
    True

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), equation 7.
    """
    M, z = state
    mask_size = {} if where is None else {"where": (where, "#B T")}
    sizes = check_sizes(q=(q, "B H T D"), M=(M, "B G D E"), z=(z, "B G D"), **mask_size)
    check_groups(sizes["H"], sizes["G"])
    _check_dtypes(state, where, q=q)
    q = q.to(M.dtype) if where is None else torch.where(_as_row_mask(where), q, 0).to(M.dtype)
    # The features are multiplied by exp(-largest), so that they do not underflow for a query far
    # below 0. Numerator and denominator contain this factor, so that it cancels.
    largest = q.detach().amax(-1, keepdim=True).clamp(max=0)
    features = torch.where(q > 0, q + 1, (q.clamp(max=0) - largest).exp())
    G, shape = M.shape[1], (q.shape[1] // M.shape[1], q.shape[2])
    grouped = torch.unflatten(features, 1, (G, shape[0])).flatten(2, 3)  # [B,G,(H/G)*T,D]
    total = torch.unflatten(grouped @ z.unsqueeze(-1), 2, shape).flatten(1, 2)  # [B,H,T,1]
    mixed = torch.unflatten(grouped @ M, 2, shape).flatten(1, 2)  # [B,H,T,E]
    is_zero = total == 0 if where is None else (total == 0) | ~_as_row_mask(where)
    values = torch.where(is_zero, 0, mixed / total.masked_fill(is_zero, 1))
    return MemoryRead(values, ~is_zero.squeeze(-1))


def write(
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    state: tuple[Float[Tensor, "B G D E"], Float[Tensor, "B G D"]],
    update: UpdateRule = "linear",
    where: Bool[Tensor, "#B S"] | None = None,
) -> CompressiveState:
    """Add the keys and values of one segment to the memory.

    M' = M + sigma(k)^T u,  z' = z + sum_t sigma(k_t)
    u = v, or with update="delta" v - sigma(k) M / (sigma(k) z)

    With "delta" all keys of the segment read the memory as it was before the segment. A key and
    value that are stored already leave M unchanged, but z grows: after v was written twice for one
    key, a read with that key returns v / 2. With "linear" it returns v.

    Args:
        k: keys `[B, G, S, D]` without position encoding.
        v: values `[B, G, S, E]`.
        state: M `[B, G, D, E]` and z `[B, G, D]`; they are not changed.
        update: the update rule, "linear" or "delta".
        where: bool `[B or 1, S]`, which keys and values are written. The others have no effect,
            whatever they contain. None: all.

    Returns:
        The memory with the segment added.

    Raises:
        ArgumentError, ArgumentTypeError: sizes, dtypes or devices do not agree.

    >>> k, v = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 3)
    >>> once = write(k, v, empty_state(k, v), "delta")
    >>> retrieve(k, write(k, v, once, "delta")).values.flatten().tolist()
    [0.5, 0.5, 0.5]

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), equations 8 (linear) and 9 (delta).
    """
    M, z = state
    mask_size = {} if where is None else {"where": (where, "#B S")}
    check_sizes(k=(k, "B G S D"), v=(v, "B G S E"), M=(M, "B G D E"), z=(z, "B G D"), **mask_size)
    _check_dtypes(state, where, k=k, v=v)
    if where is not None:
        k, v = torch.where(_as_row_mask(where), k, 0), torch.where(_as_row_mask(where), v, 0)
    k, v = k.to(M.dtype), v.to(M.dtype)
    features = elu_plus_one(k)
    if update == "delta":
        v = v - retrieve(k, state).values
    if where is not None:
        features = torch.where(_as_row_mask(where), features, 0)
    return CompressiveState(M + features.transpose(-1, -2) @ v, z + features.sum(2))


def _check_dtypes(state: tuple[Tensor, Tensor], where: Tensor | None, **tokens: Tensor) -> None:
    """Check that the tokens are floating-point tensors of one dtype, that the memory has the
    `state_dtype` of that dtype, and that `where` is bool.
    """
    (name, first), *others = tokens.items()
    check_tensor(name, first)
    for other, x in others:
        if x.dtype != first.dtype:
            raise ArgumentTypeError(
                f"{name} is {first.dtype} and {other} is {x.dtype}; both must have one dtype: "
                "convert one with .to()"
            )
    for other, x in zip(("M", "z"), state, strict=True):
        if x.dtype != state_dtype(first):
            raise ArgumentTypeError(
                f"{other} is {x.dtype} for tokens of {first.dtype}; it must be "
                f"{state_dtype(first)}, as regard.memory.write returns it"
            )
    if where is not None and where.dtype != torch.bool:
        raise ArgumentTypeError(
            f"where is {where.dtype}; it must be bool, with True = a token: use where.bool()"
        )


def _as_row_mask(where: Tensor) -> Tensor:
    """Reshape a mask `[B, L]` to `[B, 1, L, 1]`."""
    return where[:, None, :, None]
