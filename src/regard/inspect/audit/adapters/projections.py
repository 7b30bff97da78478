"""The linear maps of a module, where they have names that people use."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor, nn

from regard.inspect.audit.adapters.names import SIZES
from regard.inspect.audit.subject import Claim, Projections

Q = (
    "q_proj",
    "W_query",
    "to_q",
    "wq",
    "w_q",
    "W_q",
    "Wq",
    "query",
    "q_linear",
    "linear_q",
    "q",
    "query_proj",
)
K = (
    "k_proj",
    "W_key",
    "to_k",
    "wk",
    "w_k",
    "W_k",
    "Wk",
    "key",
    "k_linear",
    "linear_k",
    "k",
    "key_proj",
)
V = (
    "v_proj",
    "W_value",
    "to_v",
    "wv",
    "w_v",
    "W_v",
    "Wv",
    "value",
    "v_linear",
    "linear_v",
    "v",
    "value_proj",
)
O = ("o_proj", "out_proj", "wo", "w_o", "W_o", "Wo", "to_out", "c_proj", "proj", "dense", "out", "output", "fc_out", "fc", "proj_out")  # fmt: skip
FUSED = ("c_attn", "qkv", "qkv_proj", "Wqkv", "to_qkv", "in_proj", "query_key_value")
BASES = ("rope_theta", "theta", "rope_base", "base", "rotary_base")

Map = tuple[Tensor, Tensor | None]


def read(module: nn.Module, claim: Claim, width: int) -> Projections | None:
    """Its q, k, v and output maps as weights [out, in], or None where they are not all found.

    >>> read(nn.MultiheadAttention(8, 2), Claim(), 8).heads
    2
    """
    maps = _separate(module) or _fused(module, claim)
    out = _find(module, O)
    heads = claim.heads or _size(module, "heads")
    if maps is None or out is None or not heads:
        return None
    q, k, v = maps
    rows = q[0].shape[0]
    if rows % heads or any(x[0].shape[1] != width for x in maps):
        return None
    D = rows // heads
    if k[0].shape[0] % D or heads % max(k[0].shape[0] // D, 1) or v[0].shape[0] != k[0].shape[0]:
        return None
    if out[0].shape[1] != rows:
        return None
    return Projections(q, k, v, out, heads, k[0].shape[0] // D, _bases(module))


def _separate(module: nn.Module) -> tuple[Map, Map, Map] | None:
    q, k, v = (_find(module, names) for names in (Q, K, V))
    return None if q is None or k is None or v is None else (q, k, v)


def _fused(module: nn.Module, claim: Claim) -> tuple[Map, Map, Map] | None:
    """Rows of one map: queries, then keys, then values."""
    found = _find(module, FUSED)
    weight = getattr(module, "in_proj_weight", None)
    if isinstance(weight, Tensor):
        found = (weight.detach(), _detached(getattr(module, "in_proj_bias", None)))
    heads = claim.heads or _size(module, "heads")
    if found is None or not heads:
        return None
    groups = claim.kv_heads or _size(module, "kv_heads") or heads
    rows, parts = found[0].shape[0], heads + 2 * groups
    if rows % parts:
        return None
    sizes = [heads * (rows // parts), groups * (rows // parts), groups * (rows // parts)]
    weights = found[0].split(sizes)
    biases: Iterable[Any] = (None,) * 3 if found[1] is None else found[1].split(sizes)
    q, k, v = zip(weights, biases, strict=True)
    return q, k, v


def _find(module: nn.Module, names: tuple[str, ...]) -> Map | None:
    """The first child of one of the names that is a linear map."""
    for name in names:
        child = getattr(module, name, None)
        if isinstance(child, nn.Sequential) and len(child):
            child = child[0]
        weight = getattr(child, "weight", None)
        if not isinstance(child, nn.Module) or not isinstance(weight, Tensor) or weight.ndim != 2:
            continue
        weight = weight.detach()
        if type(child).__name__ == "Conv1D":  # GPT-2's keeps [in, out]
            weight = weight.T
        elif not isinstance(child, nn.Linear) and not hasattr(child, "in_features"):
            continue
        return weight, _detached(getattr(child, "bias", None))
    return None


def _detached(x: Any) -> Tensor | None:
    return x.detach() if isinstance(x, Tensor) else None


def _size(module: nn.Module, what: str) -> int | None:
    found = (getattr(module, name, None) for name in SIZES[what])
    return next(
        (x for x in found if isinstance(x, int) and not isinstance(x, bool) and x > 0), None
    )


def _bases(module: nn.Module) -> tuple[float, ...]:
    """Rotary bases that the module names, and the one that most use."""
    found = [getattr(child, name, None) for child in module.modules() for name in BASES]
    named = [
        float(x) for x in found if isinstance(x, (int, float)) and not isinstance(x, bool) and x > 1
    ]
    return tuple(dict.fromkeys([*named, 10000.0]))
