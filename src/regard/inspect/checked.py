"""A place out of a file: do its parts fit together?"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.inspect.kept import Pool, Step
from regard.inspect.place import Place
from regard.span import Span, as_tensor, count


def check_place(place: Place) -> None:
    """See that every shape, index and number is one that recording could have made.

    Raises:
        ArgumentError: one is not.
    """
    H, heads = place.H, place.heads
    if H < 1 or place.N < 0:
        raise ArgumentError(f"{place.name} has {H} heads and {place.N} columns")
    _check_indices(f"heads of {place.name}", heads, H)
    if not place.steps or not place.pools or not heads:
        raise ArgumentError(f"{place.name} has no steps, pools or heads")
    B = place.steps[0].q.shape[0]
    for pool in place.pools:
        _check_pool(place, pool, B)
    if sum(len(pool.columns) for pool in place.pools) < place.N:
        raise ArgumentError(f"{place.name} has {place.N} columns, and fewer keys")
    for number, step in enumerate(place.steps):
        where = f"step {number} of {place.name}"
        if not 0 <= step.pool < len(place.pools):
            raise ArgumentError(f"{where} has the pool {step.pool} of {len(place.pools)}")
        _check_step(where, place, step, place.pools[step.pool], B)


def _check_pool(place: Place, pool: Pool, B: int) -> None:
    G = pool.G
    if G < 1 or place.H % G:
        raise ArgumentError(f"{place.name} has {place.H} heads, and keys of {G}")
    _check_indices(f"groups of {place.name}", pool.groups, G)
    if {head // (place.H // G) for head in place.heads} != set(pool.groups):
        raise ArgumentError(f"{place.name} has other groups than its heads read")
    n = len(pool.columns) if pool.columns.ndim == 1 else -1
    for name, x in (("k", pool.k), ("v", pool.v)):
        if x is not None:
            _check_floats(f"{name} of {place.name}", x, (B, len(pool.groups), n, None))
    _check_range(f"columns of {place.name}", pool.columns, n, place.N)


def _check_step(where: str, place: Place, step: Step, pool: Pool, B: int) -> None:
    h, t, s = len(place.heads), step.q.shape[2] if step.q.ndim == 4 else -1, len(step.columns)
    E = None if pool.v is None else pool.v.shape[3]
    shapes: dict[str, tuple[Tensor | None, tuple[int | None, ...]]] = {
        "q": (step.q, (B, h, t, pool.k.shape[3])),
        "lse": (step.lse, (B, h, t)),
        "out": (step.out, (B, h, t, E)),
        "scores": (step.scores, (B, h, t, s)),
        "pattern": (step.pattern, (B, h, t, s)),
        "sink": (step.sink, (h,)),
    }
    for name, (x, shape) in shapes.items():
        if x is not None:
            _check_floats(f"{name} of {where}", x, shape)
    _check_range(f"columns of {where}", step.columns, s, place.N)
    if len(torch.unique(step.columns)) < s:
        raise ArgumentError(f"columns of {where} name one twice")
    _check_range(
        f"keys of {where}", step.columns if step.keys is None else step.keys, s, len(pool.columns)
    )
    for name, n in (("first", step.first), ("token", step.token)):
        if n < 0:
            raise ArgumentError(f"{name} of {where} is {n}; it must be 0 or more")
    asked = count(step.q_positions)
    if asked < step.first + t or count(step.k_positions) != s:
        raise ArgumentError(
            f"{where} has {t} queries behind {step.first} and {s} keys, and positions of {asked} "
            "and "
            f"{count(step.k_positions)}"
        )
    for positions in (step.q_positions, step.k_positions):
        if not isinstance(positions, Span):
            at = as_tensor(positions)
            if (
                at.ndim != 2
                or at.shape[0] not in (1, B)
                or at.dtype not in (torch.int32, torch.int64)
            ):
                raise ArgumentError(f"positions of {where} are {at.dtype} {tuple(at.shape)}")
    capped = step.softcap is None or (math.isfinite(step.softcap) and step.softcap > 0)
    if not (math.isfinite(step.scale) and capped and 0 <= step.dropout < 1):
        raise ArgumentError(f"scale, softcap or dropout of {where} is out of range")
    step.mask.require(B, place.H, asked, s)
    if step.bias is not None:
        step.bias.require(B, place.H, asked, s)


def _check_indices(name: str, found: tuple[int, ...], n: int) -> None:
    inside = all(0 <= x < n for x in found)
    if not inside or list(found) != sorted(set(found)):
        raise ArgumentError(f"{name} are {found}; they must rise, from 0 to {n - 1}")


def _check_range(name: str, found: Tensor, length: int, n: int) -> None:
    if found.dtype != torch.int64 or found.shape != (length,):
        raise ArgumentError(
            f"{name} are {found.dtype} {tuple(found.shape)}; they must be int64 ({length},)"
        )
    if length and not 0 <= int(found.min()) <= int(found.max()) < n:
        raise ArgumentError(
            f"{name} go from {int(found.min())} to {int(found.max())}, out of 0 to {n - 1}"
        )


def _check_floats(name: str, x: Tensor, shape: tuple[int | None, ...]) -> None:
    fits = x.ndim == len(shape) and all(n in (None, m) for n, m in zip(shape, x.shape, strict=True))
    if not fits or not x.is_floating_point() or x.element_size() == 1:
        raise ArgumentError(f"{name} is {x.dtype} {tuple(x.shape)}; it must be floats {shape}")
