"""The linear maps of a module, read from its parameters by the names and shapes that people give
them.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations
from typing import Any

import torch
from torch import Tensor, nn

from regard.audit.adapters.arguments import SIZES
from regard.audit.subject import CannotTry, Claim, Map, Projections

ROLES = {
    "q": ("q", "query", "queries", "qs"),
    "k": ("k", "key", "keys", "ks"),
    "v": ("v", "value", "values", "vs"),
    "kv": ("kv",),
    "qkv": ("qkv", "querykeyvalue", "pack"),
}
OUT = ("o", "out", "output", "os", "dense", "fc", "fcout", "final", "unifyheads", "ofc")
"""Words that remain of a name when its ornaments are taken away."""
FUSED = ("c_attn", "in_proj", "att", "attn")
O_NAMES = ("c_proj", "proj", "projection", "proj_out", "linear")
BASES = ("rope_theta", "theta", "rope_base", "base", "rotary_base")
SINK = "sink"


def read(module: nn.Module, claim: Claim, width: int) -> tuple[Projections, ...]:
    """The ways to read its q, k, v and output maps, weights [out, in]: the likeliest first.

    Raises:
        CannotTry: they cannot be read; the message says what is missing.

    >>> read(nn.MultiheadAttention(8, 2), Claim(), 8)[0].heads
    2
    """
    listed = _listed(module)
    if listed:
        return _of_heads(module, listed, width)
    cores = [child for child in module.modules() if _has_maps(child)]
    if not cores:
        raise CannotTry(
            "it has no linear maps or parameters whose names say query, key and value (q_proj, "
            "W_query, to_q, wq, "
            "c_attn, qkv, in_proj_weight, ...)"
        )
    if len(cores) > 1:
        raise CannotTry(f"it has {len(cores)} sets of query, key and value maps, not one")
    core = cores[0]
    found = list(_readings(module, core, claim, width))
    if not found:
        q = next(iter(_maps(core, 1, 1)))[0][0]
        raise CannotTry(
            f"its query map is {list(q[0].shape)}, which does not fit tokens of {width} numbers "
            "and "
            f"{_heads(module, core, claim, q[0].shape[0])} heads; say --dim and --heads"
        )
    return tuple(found)


def unread(module: nn.Module, found: Sequence[Projections]) -> list[str]:
    """The parameters that are no part of the projections.

    >>> unread(nn.MultiheadAttention(8, 2), read(nn.MultiheadAttention(8, 2), Claim(), 8))
    ['in_proj_weight', 'in_proj_bias', 'out_proj.weight', 'out_proj.bias']
    """
    known: set[int] = set()
    for maps in found:
        tensors = [t for m in (maps.q, maps.k, maps.v, maps.o) if m is not None for t in m]
        tensors += [maps.sinks, *(maps.norm[:2] if maps.norm else ())]
        known |= {t.untyped_storage().data_ptr() for t in tensors if t is not None}
    return [
        name for name, p in module.named_parameters() if p.untyped_storage().data_ptr() not in known
    ]


def role(name: str) -> str | None:
    """What a name says that a map makes: "q", "k", "v", "kv", "qkv", "o", or None.

    >>> names = ("W_query", "to_kv", "linear_v", "query_key_value", "o_proj", "gate")
    >>> [role(name) for name in names]
    ['q', 'kv', 'v', 'qkv', 'o', None]
    """
    if name.removesuffix("_weight") in FUSED:
        return "qkv"
    if name in O_NAMES:
        return "o"
    words = re.sub(
        r"proj(ection)?|weights?|kernel|linear|layer|attn|states|matrix", "", name.lower()
    )
    word = re.sub(r"^(to|fc|lin|w|c)_?(?=[a-z_])", "", words.strip("_")).replace("_", "")
    word = re.sub(r"(lin|w)$", "", word) or word
    return next((r for r, known in ROLES.items() if word in known), "o" if word in OUT else None)


def _has_maps(module: nn.Module) -> bool:
    return next(iter(_maps(module, 1, 1)), None) is not None


def _named(module: nn.Module) -> dict[str, list[Map]]:
    """Role -> the maps that a module itself has in it; a parameter whose orientation is open is
    there twice.
    """
    found: dict[str, list[Map]] = {}
    for name, child in module.named_children():
        what = role(name)
        read_map = _map(child) if what else None
        if what and read_map is not None:
            found.setdefault(what, [read_map])
    for name, p in module.named_parameters(recurse=False):
        what = role(name)
        if what and p.ndim in (2, 3) and "bias" not in name:
            bias = getattr(module, name.replace("weight", "bias"), None)
            bias = bias.detach() if isinstance(bias, Tensor) and bias is not p else None
            found.setdefault(what, [(w, bias) for w in _oriented(p.detach(), out=what == "o")])
    return found


def _oriented(p: Tensor, *, out: bool) -> list[Tensor]:
    """A parameter as weights [out, in]: of two dims either way, of three with a dim of heads."""
    if p.ndim == 2:
        return [p.T, p]  # x @ p, or F.linear(x, p)
    if out:  # [H,D,M]: what a head gives
        return [p.flatten(0, 1).T, p.permute(2, 0, 1).flatten(1), p.flatten(1)]
    # [H,M,D], [M,H,D], [H,D,M]
    return [p.transpose(1, 2).flatten(0, 1), p.flatten(1).T, p.flatten(0, 1)]


def _maps(
    module: nn.Module, heads: int, groups: int
) -> Iterator[tuple[tuple[Map, Map, Map], bool, bool]]:
    """q, k and v, whether they have names of their own, and whether faults are looked for under
    this reading.
    """
    named = _named(module)
    ways = range(max((len(maps) for maps in named.values()), default=1))
    for way in ways:
        one = {what: maps[min(way, len(maps) - 1)] for what, maps in named.items()}
        if {"q", "k", "v"} <= set(one):
            yield (one["q"], one["k"], one["v"]), True, True
        elif {"q", "kv"} <= set(one):
            for n, (k, v) in enumerate(_cut(one["kv"], (1, 1), groups)):
                yield (one["q"], k, v), False, n in (0, 1)
        elif "qkv" in one:
            yield from _fused(one["qkv"], heads, groups)


def _fused(
    whole: Map, heads: int, groups: int
) -> Iterator[tuple[tuple[Map, Map, Map], bool, bool]]:
    """One map of queries, keys and values, in each layout and order."""
    found = []
    if heads == groups:
        found = list(_cut(whole, (1, 1, 1), heads))
    elif whole[0].shape[0] % (heads + 2 * groups) == 0:
        found = list(_cut(whole, (heads // groups, 1, 1), groups))[:2]
    for parts in found:
        yield (parts[0], parts[1], parts[2]), False, True
    for parts in found if heads == groups else ():
        for order in list(permutations(range(3)))[1:]:
            a, b, c = (parts[n] for n in order)
            yield (a, b, c), False, False


def _cut(whole: Map, shares: tuple[int, ...], groups: int) -> Iterator[tuple[Map, ...]]:
    """A fused map in parts: one after the other; each head's together; each feature's together;
    reversed.
    """
    weight, bias = whole
    rows, total = weight.shape[0], sum(shares)
    if rows % (groups * total):
        return
    D = rows // (groups * total)
    index = torch.arange(rows)
    blocks = index.split_with_sizes([groups * n * D for n in shares])
    by_head = index.view(groups, total, D).split_with_sizes(shares, 1)
    layouts = [blocks, tuple(x.reshape(-1) for x in by_head)]
    if len(set(shares)) == 1:
        by_feature = index.view(groups, D, total)
        layouts.append(tuple(by_feature[..., n].reshape(-1) for n in range(total)))
    if total == 2:
        layouts += [tuple(reversed(parts)) for parts in layouts]
    for parts in layouts:
        yield tuple((weight[n], None if bias is None else bias[n]) for n in parts)


def _readings(
    module: nn.Module, core: nn.Module, claim: Claim, width: int
) -> Iterator[Projections]:
    """Every reading of one core, in the module that it stands in."""
    outs, norm = _output(module, core)
    first = next(iter(_maps(core, 1, 1)))[0][0][0].shape[0]
    heads = _heads(module, core, claim, first)
    groups = claim.kv_heads or _size((core, module), "kv_heads") or heads
    bases = _bases(module)
    sinks = next(
        (p.detach() for n, p in module.named_parameters() if SINK in n and p.numel() == heads), None
    )
    for (q, k, v), named, standard in _maps(core, heads, groups):
        rows = q[0].shape[0]
        if rows % heads or any(m[0].shape[1] != width for m in (q, k, v)):
            continue
        D = rows // heads
        G = k[0].shape[0] // D
        if not G or k[0].shape[0] % D or heads % G or v[0].shape != k[0].shape:
            continue
        for o in outs:
            if o is not None and o[0].shape[1] != rows:
                continue
            yield Projections(q, k, v, o, heads, G, bases, named, sinks, norm, standard)


def _output(module: nn.Module, core: nn.Module) -> tuple[list[Map | None], Any]:
    """The output map in each orientation, or [None]; and BERT's norm over it and the input."""
    own = _named(core).get("o")
    if own:
        return list(own), None
    for child in module.modules():
        if child is core or core in list(child.modules()):
            inner = _named(child).get("o") if child is not core else None
        else:
            inner = _named(child).get("o")
        if inner:
            norms = [c for c in child.children() if isinstance(c, nn.LayerNorm)]
            norm = norms[0] if norms and child is not module else None
            if norm is None or norm.weight is None or norm.bias is None:
                return list(inner), None
            return list(inner), (norm.weight.detach(), norm.bias.detach(), norm.eps)
    return [None], None


def _listed(module: nn.Module) -> list[nn.Module]:
    """Heads that are modules of their own, in one list."""
    for child in module.children():
        if isinstance(child, nn.ModuleList) and len(child) and all(_has_maps(c) for c in child):
            return list(child)
    return []


def _of_heads(module: nn.Module, listed: list[nn.Module], width: int) -> tuple[Projections, ...]:
    """One head each, joined in their order."""
    each = [read(head, Claim(heads=1), width)[0] for head in listed]

    def joined(maps: list[Map]) -> Map:
        biases = [b for _, b in maps if b is not None]
        weight = torch.cat([w for w, _ in maps])
        return weight, torch.cat(biases) if len(biases) == len(maps) else None

    q, k, v = (joined([getattr(maps, name) for maps in each]) for name in "qkv")
    outs: list[Map | None] = [*_named(module).get("o", [])] or [None]
    n = len(listed)
    found = (
        replace(each[0], q=q, k=k, v=v, o=o, heads=n, groups=n, bases=_bases(module)) for o in outs
    )
    return tuple(maps for maps in found if maps.o is None or maps.o[0].shape[1] == q[0].shape[0])


def _heads(module: nn.Module, core: nn.Module, claim: Claim, rows: int) -> int:
    """H: as claimed, or as an attribute says, or from the size of a head, or one."""
    found = claim.heads or _size((core, module), "heads")
    if found:
        return found
    D = claim.head_dim or _size((core, module), "head_dim")
    return rows // D if D and rows % D == 0 else 1


def _map(child: nn.Module) -> Map | None:
    """A linear map, or the first one of a sequence."""
    if isinstance(child, nn.Sequential) and len(child):
        child = child[0]
    weight = getattr(child, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    weight = weight.detach()
    if type(child).__name__ == "Conv1D":  # GPT-2's keeps [in, out]
        weight = weight.T
    elif not isinstance(child, nn.Linear) and not hasattr(child, "in_features"):
        return None
    bias = getattr(child, "bias", None)
    return weight, bias.detach() if isinstance(bias, Tensor) else None


def attribute(owners: Sequence[Any], names: Sequence[str]) -> int | None:
    """The first whole number that the owners, or their configurations, keep under one of the
    names.
    """
    for owner in owners:
        for holder in (owner, getattr(owner, "config", None), getattr(owner, "cfg", None)):
            for name in names:
                value = (
                    holder.get(name) if isinstance(holder, dict) else getattr(holder, name, None)
                )
                if isinstance(value, int) and not isinstance(value, bool) and value > 0:
                    return value
    return None


def _size(owners: Sequence[nn.Module], what: str) -> int | None:
    return attribute(owners, SIZES[what])


def _bases(module: nn.Module) -> tuple[float, ...]:
    """Rotary bases that the module names, and the one that most use."""
    owners = [m for child in module.modules() for m in (child, getattr(child, "config", None))]
    found = [getattr(owner, name, None) for owner in owners for name in BASES]
    named = [
        float(x) for x in found if isinstance(x, (int, float)) and not isinstance(x, bool) and x > 1
    ]
    return tuple(dict.fromkeys([*named, 10000.0]))
