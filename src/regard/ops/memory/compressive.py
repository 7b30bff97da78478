"""Compressive memory: a matrix of fixed size that keys and values are written to, and that queries
read a mean from.
"""

from __future__ import annotations

from typing import Literal, NamedTuple, TypeAlias

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from regard.argument_checks import check_groups, check_sizes, check_tensor
from regard.errors import ArgumentTypeError

Update: TypeAlias = Literal["linear", "delta"]
"""How values are written: as they are, or less what the memory answers to their keys already."""


class Compressed(NamedTuple):
    """What was written: M [B,G,D,E], the sum of sigma(k)^T v, and z [B,G,D], the sum of sigma(k);
    fp32, or fp64 for fp64.
    """

    M: Tensor
    z: Tensor


class Read(NamedTuple):
    """What queries read: values [B,H,T,E], and found [B,H,T], whether anything was there; values
    are 0 where not.
    """

    values: Tensor
    found: Tensor


def sigma(x: Float[Tensor, "*shape"]) -> Float[Tensor, "*shape"]:
    """The feature map elu(x) + 1: x + 1 above 0, exp(x) below.

    exp(x) itself, not expm1(x) + 1, which rounds what is below the precision of 1 away.

    >>> sigma(torch.tensor([-200.0, 0.0, 2.0], dtype=torch.float64)).tolist()
    [1.3838965267367376e-87, 1.0, 3.0]

    Source: Katharopoulos et al. 2020 (arXiv 2006.16236), equation 7.
    """
    return torch.where(x > 0, x + 1, x.clamp(max=0).exp())


def nothing(k: Tensor, v: Tensor) -> Compressed:
    """The memory in front of the first token: zeros, for k [B,G,S,D] and v [B,G,S,E]."""
    B, G, _, D = k.shape
    dtype = state_dtype(k)
    return Compressed(
        torch.zeros(B, G, D, v.shape[-1], dtype=dtype, device=k.device),
        torch.zeros(B, G, D, dtype=dtype, device=k.device),
    )


def state_dtype(k: Tensor) -> torch.dtype:
    """What a memory is held in: sums over a whole text need fp32 at least."""
    return torch.float64 if k.dtype == torch.float64 else torch.float32


def retrieve(
    q: Float[Tensor, "B H T D"],
    state: tuple[Float[Tensor, "B G D E"], Float[Tensor, "B G D"]],
    where: Bool[Tensor, "#B T"] | None = None,
) -> Read:
    """Read a mean of the values that were written, weighted by how their keys' features match the
    query's.

    A = sigma(q) M / sigma(q) z; query head h reads memory h // (H/G). Where nothing was written the
    output is 0, not 0/0.

    Args:
        q: queries without position encoding.
        state: M and z.
        where: the queries that read; what another one holds is not looked at, and it reads 0.

    Raises:
        ArgumentError, ArgumentTypeError: sizes, dtypes or devices do not agree.

    >>> k, v = torch.randn(1, 1, 1, 4), torch.randn(1, 1, 1, 3)
    >>> state = write(k, v, nothing(k, v))
    >>> torch.allclose(retrieve(k, state).values, v)
    True

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), equation 7.
    """
    M, z = state
    own = {} if where is None else {"where": (where, "#B T")}
    sizes = check_sizes(q=(q, "B H T D"), M=(M, "B G D E"), z=(z, "B G D"), **own)
    check_groups(sizes["H"], sizes["G"])
    _check_kinds(state, where, q=q)
    q = q.to(M.dtype) if where is None else torch.where(_rows(where), q, 0).to(M.dtype)
    # The factor exp(-top) is in the numerator and in the denominator: with it neither becomes 0 for
    # a query far below 0.
    top = q.detach().amax(-1, keepdim=True).clamp(max=0)
    features = torch.where(q > 0, q + 1, (q.clamp(max=0) - top).exp())
    G, shape = M.shape[1], (q.shape[1] // M.shape[1], q.shape[2])
    grouped = torch.unflatten(features, 1, (G, shape[0])).flatten(2, 3)  # [B,G,n*T,D]
    total = torch.unflatten(grouped @ z.unsqueeze(-1), 2, shape).flatten(1, 2)  # [B,H,T,1]
    mixed = torch.unflatten(grouped @ M, 2, shape).flatten(1, 2)  # [B,H,T,E]
    none = total == 0 if where is None else (total == 0) | ~_rows(where)
    values = torch.where(none, 0, mixed / total.masked_fill(none, 1))
    return Read(values, ~none.squeeze(-1))


def write(
    k: Float[Tensor, "B G S D"],
    v: Float[Tensor, "B G S E"],
    state: tuple[Float[Tensor, "B G D E"], Float[Tensor, "B G D"]],
    update: Update = "linear",
    where: Bool[Tensor, "#B S"] | None = None,
) -> Compressed:
    """Add one segment's keys and values to the memory.

    M' = M + sigma(k)^T u,  z' = z + sum_t sigma(k_t)
    u = v, or under "delta" v - sigma(k) M / sigma(k) z

    Under "delta" all keys of the segment read the memory in front of it. A binding that is there
    already leaves M as it is, but z grows: after v was written twice under one key, that key reads
    v / 2. Under "linear" it reads v.

    Args:
        k, v: keys without position encoding, and values.
        state: M and z; they are not changed.
        update: the rule.
        where: the slots to write; what another one holds is not looked at.

    Raises:
        ArgumentError, ArgumentTypeError: sizes, dtypes or devices do not agree.

    >>> k, v = torch.zeros(1, 1, 1, 4), torch.ones(1, 1, 1, 3)
    >>> once = write(k, v, nothing(k, v), "delta")
    >>> retrieve(k, write(k, v, once, "delta")).values.flatten().tolist()
    [0.5, 0.5, 0.5]

    Source: Munkhdalai et al. 2024 (arXiv 2404.07143), equations 8 (linear) and 9 (delta).
    """
    M, z = state
    own = {} if where is None else {"where": (where, "#B S")}
    check_sizes(k=(k, "B G S D"), v=(v, "B G S E"), M=(M, "B G D E"), z=(z, "B G D"), **own)
    _check_kinds(state, where, k=k, v=v)
    if where is not None:
        k, v = torch.where(_rows(where), k, 0), torch.where(_rows(where), v, 0)
    k, v = k.to(M.dtype), v.to(M.dtype)
    features = sigma(k)
    if update == "delta":
        v = v - retrieve(k, state).values
    if where is not None:
        features = torch.where(_rows(where), features, 0)
    return Compressed(M + features.transpose(-1, -2) @ v, z + features.sum(2))


def _check_kinds(state: tuple[Tensor, Tensor], where: Tensor | None, **given: Tensor) -> None:
    """Tokens are floating and of one dtype, the memory is of the dtype that sums over them need,
    and `where` is bool.
    """
    (name, first), *others = given.items()
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
                f"{state_dtype(first)}, in which `nothing` makes it"
            )
    if where is not None and where.dtype != torch.bool:
        raise ArgumentTypeError(
            f"where is {where.dtype}; it must be bool, True = a token: use where.bool()"
        )


def _rows(where: Tensor) -> Tensor:
    """[B,L] -> [B,1,L,1]."""
    return where[:, None, :, None]
