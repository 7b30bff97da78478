"""Checks of arguments that raise errors with the actual values, before torch's fused CPU kernel can
read past the keys: constructors and public functions check, internal ones rely on it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Iterable
from typing import TYPE_CHECKING, SupportsIndex

from regard.did_you_mean import suggest
from regard.errors import ArgumentError, ArgumentTypeError
from regard.span import Positions, Span
from regard.units import plural
from regard.untrusted_text import short_repr

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def check_keyword_names(function: str, names: Collection[str], allowed: Collection[str]) -> None:
    """Raise if a keyword argument is not one of those that a function accepts."""
    for name in names:
        if name not in allowed:
            hint = suggest(name, allowed, otherwise=".")
            raise ArgumentTypeError(
                f"{function}() has no argument {name!r}{hint} It has {', '.join(allowed)}",
                argument=name,
                allowed=", ".join(allowed),
            )


def check_tensor(name: str, x: object) -> None:
    """Raise unless x is a torch tensor of a floating dtype."""
    import torch

    if not isinstance(x, torch.Tensor):
        raise ArgumentTypeError(
            f"{name} is {type(x).__name__}; it must be a torch tensor", argument=name
        )
    if not x.is_floating_point():
        raise ArgumentTypeError(
            f"{name} is {_dtype(x)}; it must be float64, float32, bfloat16 or float16: use "
            f"{name}.float()",
            argument=name,
        )


def check_query_key(q: Tensor, k: Tensor) -> None:
    """Raise unless q `[B, H, T, D]` and k `[B, G, S, D]` fit: one batch, D > 0, G divides H."""
    for name, x in (("query", q), ("key", k)):
        check_tensor(name, x)
        if x.ndim != 4:
            hint = "add a batch dimension with [None]" if x.ndim == 3 else "reshape it"
            raise ArgumentError(
                f"{name} has {plural(x.ndim, 'dimension')}, {_shape(x)}; it must be [batch, "
                "heads, length, "
                f"dim]: {hint}",
                argument=name,
            )
    if q.dtype != k.dtype:
        raise ArgumentTypeError(
            f"query is {_dtype(q)} and key is {_dtype(k)}; all must have one dtype: convert one "
            "with .to()",
            argument="key",
        )
    if q.device != k.device:
        raise ArgumentError(
            f"query is on {q.device} and key on {k.device}; move one with .to()", argument="key"
        )
    check_batch("key", k, q.shape[0])
    if q.shape[3] != k.shape[3] or q.shape[3] == 0:
        raise ArgumentError(
            f"query dim {q.shape[3]} and key dim {k.shape[3]} must be equal and at least 1 (query "
            f"{_shape(q)}, key {_shape(k)})"
        )
    check_groups(q.shape[1], k.shape[1])


def check_query_key_value(
    q: Tensor, k: Tensor, v: Tensor, *, check_heads: Callable[[int, int, int], None] | None = None
) -> None:
    """Raise unless q and k fit together, and v `[B, G, S, E]` fits k."""
    if _all_fit(q, k, v):
        return
    check_query_key(q, k)
    check_tensor("value", v)
    if v.ndim != 4:
        raise ArgumentError(
            f"value has {plural(v.ndim, 'dimension')}, {_shape(v)}; it must be [batch, heads, "
            "length, dim]",
            argument="value",
        )
    if v.dtype != q.dtype:
        raise ArgumentTypeError(
            f"query is {_dtype(q)} and value is {_dtype(v)}; all must have one dtype: convert one "
            "with .to()",
            argument="value",
        )
    if v.device != q.device:
        raise ArgumentError(
            f"query is on {q.device} and value on {v.device}; move one with .to()", argument="value"
        )
    check_batch("value", v, q.shape[0])
    if check_heads is not None:
        check_heads(q.shape[1], k.shape[1], v.shape[1])
    elif k.shape[1] != v.shape[1]:
        raise ArgumentError(
            f"key heads {k.shape[1]} != value heads {v.shape[1]} (key {_shape(k)}, value "
            f"{_shape(v)})"
        )
    if k.shape[2] != v.shape[2]:
        raise ArgumentError(
            f"key length {k.shape[2]} != value length {v.shape[2]} (key {_shape(k)}, value "
            f"{_shape(v)})"
        )


def _all_fit(q: object, k: object, v: object) -> bool:
    """Return whether all conditions hold; only if not, each detail is checked."""
    import torch

    if not (
        isinstance(q, torch.Tensor) and isinstance(k, torch.Tensor) and isinstance(v, torch.Tensor)
    ):
        return False
    if not (q.ndim == k.ndim == v.ndim == 4 and q.is_floating_point()):
        return False
    (B, H, _, D), (b, G, S, d) = q.shape, k.shape
    same = q.dtype == k.dtype == v.dtype and q.device == k.device == v.device
    return (
        same
        and b == B
        and D == d > 0
        and G > 0
        and H > 0
        and H % G == 0
        and v.shape[:3] == (b, G, S)
    )


def check_batch(name: str, x: Tensor, batch: int) -> None:
    """Raise unless x has the batch size of the query; batches are never broadcast."""
    if x.shape[0] != batch:
        raise ArgumentError(
            f"{name} batch {x.shape[0]} != query batch {batch}; batches do not broadcast: if one "
            f"{name} serves all rows, pass {name}.expand({batch}, -1, -1, -1)",
            argument=name,
        )


def check_groups(heads: int, groups: int) -> None:
    """Raise unless G key/value heads can serve H query heads, that is, unless G divides H."""
    if groups < 1 or heads < 1 or heads % groups:
        allowed = ", ".join(map(str, divisors(heads)))
        raise ArgumentError(
            f"{heads} query heads are not divisible by {groups} key/value heads; allowed key/value "
            f"heads: {allowed or 'none'}",
            argument="groups",
            value=groups,
        )


def resolve_head_dim(dim: int, heads: int, head_dim: int | None) -> int:
    """Return `head_dim` if it is given, else dim / heads."""
    if head_dim is not None:
        return head_dim
    if heads < 1 or dim % heads:
        allowed = ", ".join(map(str, divisors(dim)))
        raise ArgumentError(
            f"dim {dim} is not divisible by {plural(heads, 'head')}; give head_dim, or heads among "
            f"{allowed}",
            argument="heads",
            value=heads,
        )
    return dim // heads


def divisors(n: int) -> list[int]:
    """Return the divisors of a number in increasing order; none for n < 1 or n >= 2^40."""
    if not 1 <= n < 1 << 40:
        return []
    small = [i for i in range(1, math.isqrt(n) + 1) if n % i == 0]
    return [*small, *(n // i for i in reversed(small) if i * i != n)]


def check_positions(name: str, positions: Positions, batch: int, length: int) -> None:
    """Raise unless positions are a `Span` of the length, or integers `[batch or 1, length]`."""
    import torch

    if isinstance(positions, Span):
        if positions.length != length:
            raise ArgumentError(
                f"{name} is {positions} but there are {length} slots; give Span({positions.start}, "
                f"{length})"
            )
        return
    if not isinstance(positions, torch.Tensor):
        raise ArgumentTypeError(
            f"{name} is {type(positions).__name__}; it must be a regard.Span or an integer tensor "
            "[batch, length]"
        )
    if positions.is_floating_point() or positions.is_complex() or positions.dtype == torch.bool:
        raise ArgumentTypeError(
            f"{name} is {_dtype(positions)}; positions are integers: use .long()"
        )
    if positions.ndim != 2 or positions.shape[1] != length or positions.shape[0] not in (1, batch):
        raise ArgumentError(
            f"{name} is {_shape(positions)}; it must be ({batch}, {length}) or (1, {length})"
        )


def check_number(name: str, x: float | None, low: float, high: float, allowed: str) -> None:
    """Raise unless x is None or a finite number with low < x < high."""
    if x is None:
        return
    if isinstance(x, bool) or not isinstance(x, (int, float)):
        raise ArgumentTypeError(
            f"{name} is {type(x).__name__}; it must be a number, {allowed}",
            argument=name,
            value=x,
            allowed=allowed,
        )
    if not low < x < high:  # which NaN and infinities are not, and a graph can ask
        raise ArgumentError(
            f"{name} is {x}; it must be {allowed}", argument=name, value=x, allowed=allowed
        )


def check_seed(seed: int) -> int:
    """Return a random seed, and raise unless it is one that NumPy and torch can take."""
    allowed = f"an int from 0 to {MAX_SEED}"
    if isinstance(seed, bool) or not isinstance(seed, int):
        raise ArgumentTypeError(
            f"seed is {type(seed).__name__}; it must be {allowed}", argument="seed", value=seed
        )
    if not 0 <= seed <= MAX_SEED:
        raise ArgumentError(
            f"seed is {short_repr(seed)}; it must be {allowed}",
            argument="seed",
            value=seed,
            allowed=allowed,
        )
    return seed


def check_positive_sizes(name: str, **sizes: int) -> None:
    """Raise unless all sizes that `name` got are integers of at least 1."""
    for key, size in sizes.items():
        if not isinstance(size, SupportsIndex):
            raise ArgumentTypeError(
                f"{name}: {key} is {type(size).__name__} {short_repr(size)}; it must be an int, "
                "1 or more",
                argument=key,
                value=size,
                allowed="an int, 1 or more",
            )
    if min(sizes.values()) < 1:
        arguments = ", ".join(f"{key}={size}" for key, size in sizes.items())
        raise ArgumentError(f"{name}({arguments}): each must be at least 1")


def check_choice(name: str, value: object, allowed: Iterable[object]) -> None:
    """Raise unless a value is one of those that are allowed."""
    allowed = tuple(allowed)
    if value not in allowed:
        words = ", ".join(map(str, allowed))
        raise ArgumentError(f"{name} is {value!r}; it must be one of {words}")


def check_sizes(**tensors: tuple[Tensor, str]) -> dict[str, int]:
    """Check that dimensions with the same letter agree, and tensors are on one device."""
    import torch

    sizes: dict[str, tuple[int, str]] = {"1": (1, "")}
    device = None
    for name, (x, letters) in tensors.items():
        words = letters.split()
        if not isinstance(x, torch.Tensor):
            raise ArgumentTypeError(
                f"{name} is {type(x).__name__}; it must be a torch tensor [{', '.join(words)}]",
                argument=name,
            )
        if x.ndim != len(words):
            raise ArgumentError(
                f"{name} has {plural(x.ndim, 'dimension')}, {_shape(x)}; it must be "
                f"[{', '.join(words)}]"
            )
        for n, word in zip(x.shape, words, strict=True):
            if word.startswith("#") and n == 1:
                continue
            letter = word.removeprefix("#")
            size, first = sizes.setdefault(letter, (n, name))
            if n != size:
                conflict = (
                    f"{letter} is {size} in {first} {_shape(tensors[first][0])}" if first else ""
                )
                raise ArgumentError(
                    f"{name} is {_shape(x)}, which is [{', '.join(words)}], but "
                    f"{conflict or 'it must be 1'}; all must agree"
                )
        if device is not None and x.device != device[0]:
            raise ArgumentError(
                f"{device[1]} is on {device[0]} and {name} on {x.device}; move one with .to()"
            )
        device = device or (x.device, name)
    return {letter: n for letter, (n, _) in sizes.items() if letter != "1"}


def check_device(name: str, x: Tensor, like: Tensor, other: str = "query") -> None:
    """Raise unless x is on the device of another tensor of the call."""
    if x.device != like.device:
        raise ArgumentError(
            f"{other} is on {like.device} and {name} on {x.device}; move one with .to()"
        )


def check_usable_device(device: torch.device | str) -> None:
    """Raise unless tensors can be created on a device, and read."""
    import torch

    try:
        torch.zeros(1, device=device).item()  # "meta" creates tensors, but holds no numbers
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).partition("\n")[0]
        device = str(device)
        raise ArgumentError(
            f"device {device!r} cannot be used: {reason}; use cpu", argument="device", value=device
        ) from error


def check_sink(sink: Tensor | None, heads: int, like: Tensor) -> None:
    """Raise unless the sink is None or a float tensor `[H]` on the device of `like`."""
    if sink is None:
        return
    check_tensor("sink", sink)
    check_device("sink", sink, like)
    if tuple(sink.shape) != (heads,):
        raise ArgumentError(
            f"sink is {_shape(sink)}; it holds one logit per query head, ({heads},)"
        )


def _shape(x: Tensor) -> str:
    return str(tuple(x.shape))


def _dtype(x: Tensor) -> str:
    return str(x.dtype).removeprefix("torch.")


def check_value_heads(heads: int, groups: int, value_heads: int) -> None:
    """Raise unless G divides N, and of H and N, query and value heads, one divides the other."""
    if value_heads < 1 or value_heads % groups:
        raise ArgumentError(
            f"value heads {value_heads} must be a multiple of key heads {groups}, because each key "
            "head serves the same number of value heads"
        )
    if heads % value_heads and value_heads % heads:
        raise ArgumentError(
            f"query heads {heads} and value heads {value_heads} do not fit; one must be a multiple "
            "of the other, because each output reads one state with one query"
        )


MAX_INT = (1 << 62) - 1
"""The largest integer that `check_int` accepts; the sum of two such numbers fits into 64 bits."""


MAX_SEED = (1 << 32) - 1
"""The largest random seed, which is NumPy's."""


def check_int(name: str, x: object, least: int, advice: str = "") -> int:
    """Return `x` if it is an int from `least` to `MAX_INT`, and raise otherwise."""
    if isinstance(x, bool) or not isinstance(x, int):
        raise ArgumentTypeError(
            f"{name} is {type(x).__name__} {x!r}; it must be an int, {least} or more"
        )
    if x < least:
        raise ArgumentError(f"{name} is {x}; it must be {least} or more{advice and ': ' + advice}")
    if x > MAX_INT:
        raise ArgumentError(
            f"{name} is {short_repr(x)}; it must be at most {MAX_INT}, since positions have 64 bits"
        )
    return x
