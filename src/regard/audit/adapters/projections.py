"""Read the linear maps of an attention module from its parameters, by their names and shapes."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import permutations

import torch
from torch import Tensor, nn

from regard.audit.adapters.base import AuditClaims, CheckNotPossible, LinearMap, Projections
from regard.audit.adapters.call_arguments import SIZE_NAMES
from regard.language import Phrase, counted

ROLES = {
    "q": ("q", "query", "queries", "qs"),
    "k": ("k", "key", "keys", "ks"),
    "v": ("v", "value", "values", "vs"),
    "kv": ("kv",),
    "qkv": ("qkv", "querykeyvalue", "pack"),
}
OUTPUT_WORDS = ("o", "out", "output", "os", "dense", "fc", "fcout", "final", "unifyheads", "ofc")
"""Names of output maps, without prefixes and suffixes such as "w_" or "_proj"."""
FUSED_NAMES = ("c_attn", "in_proj", "att", "attn")
OUTPUT_NAMES = ("c_proj", "proj", "projection", "proj_out", "linear")
ROTARY_BASE_NAMES = ("rope_theta", "theta", "rope_base", "base", "rotary_base")
SINK_NAME = "sink"


def read_projections(module: nn.Module, claims: AuditClaims, width: int) -> tuple[Projections, ...]:
    """Return the interpretations of a module's q, k, v and output maps, the most likely first."""
    head_modules = _modules_per_head(module)
    if head_modules:
        return _join_heads(module, head_modules, width)
    cores = [child for child in module.modules() if _has_maps(child)]
    if not cores:
        raise CheckNotPossible(
            "it has no linear maps or parameters with names of queries, keys and values (q_proj, "
            "W_query, to_q, wq, c_attn, qkv, in_proj_weight, ...)"
        )
    if len(cores) > 1:
        raise CheckNotPossible(
            Phrase(
                "it has {cores} sets of query, key and value maps instead of one", cores=len(cores)
            )
        )
    core = cores[0]
    interpretations = list(_interpretations(module, core, claims, width))
    if not interpretations:
        q = next(iter(_maps(core, 1, 1)))[0][0]
        n_heads = _heads(module, core, claims, q[0].shape[0])
        raise CheckNotPossible(
            Phrase(
                "the query map is {shape}, which does not fit tokens of {features} and {heads}; "
                "give --dim and --heads",
                shape=list(q[0].shape),
                features=counted(width, "feature"),
                heads=counted(n_heads, "head"),
            )
        )
    return tuple(interpretations)


def unused_parameters(module: nn.Module, interpretations: Sequence[Projections]) -> list[str]:
    """Return the names of the parameters that belong to none of the projections."""
    tensors: list[Tensor | None] = []
    for maps in interpretations:
        tensors += [t for m in (maps.q, maps.k, maps.v, maps.o) if m is not None for t in m]
        tensors += [maps.sinks, *(maps.norm[:2] if maps.norm else ())]
    parts = [t for t in tensors if t is not None]
    storages = {t.untyped_storage().data_ptr() for t in parts}
    values = torch.cat([t.detach().flatten() for t in parts]).unique() if parts else torch.empty(0)

    parameters = dict(module.named_parameters())

    def is_used(name: str, p: Tensor) -> bool:
        if p.untyped_storage().data_ptr() in storages:
            return True
        # the maps of a fused parameter, or of one with a head dimension, are copies of its rows;
        # a bias, which may still be zero, belongs to its weight
        weight = parameters.get(name.replace("bias", "weight"), p)
        return bool(torch.isin(weight.detach(), values).all())

    return [name for name, p in parameters.items() if not is_used(name, p)]


def projection_role(name: str) -> str | None:
    """Return the role that a name gives to a map: "q", "k", "v", "kv", "qkv", "o", or None.

    >>> names = ("W_query", "to_kv", "linear_v", "query_key_value", "o_proj", "gate")
    >>> [projection_role(name) for name in names]
    ['q', 'kv', 'v', 'qkv', 'o', None]
    """
    if name.removesuffix("_weight") in FUSED_NAMES:
        return "qkv"
    if name in OUTPUT_NAMES:
        return "o"
    words = re.sub(
        r"proj(ection)?|weights?|kernel|linear|layer|attn|states|matrix", "", name.lower()
    )
    word = re.sub(r"^(to|fc|lin|w|c)_?(?=[a-z_])", "", words.strip("_")).replace("_", "")
    word = re.sub(r"(lin|w)$", "", word) or word
    return next(
        (r for r, known in ROLES.items() if word in known), "o" if word in OUTPUT_WORDS else None
    )


def _has_maps(module: nn.Module) -> bool:
    """Whether the module itself has query, key and value maps."""
    return next(iter(_maps(module, 1, 1)), None) is not None


def _maps_by_role(module: nn.Module) -> dict[str, list[LinearMap]]:
    """Return the module's own maps by role, one for each orientation that is possible."""
    maps: dict[str, list[LinearMap]] = {}
    for name, child in module.named_children():
        role = projection_role(name)
        read_map = _map(child) if role else None
        if role and read_map is not None:
            maps.setdefault(role, [read_map])
    for name, p in module.named_parameters(recurse=False):
        role = projection_role(name)
        if role and p.ndim in (2, 3) and "bias" not in name:
            bias = getattr(module, name.replace("weight", "bias"), None)
            bias = bias.detach() if isinstance(bias, Tensor) and bias is not p else None
            maps.setdefault(role, [(w, bias) for w in _orientations(p.detach(), out=role == "o")])
    return maps


def _orientations(p: Tensor, *, out: bool) -> list[Tensor]:
    """Return a parameter of two or three dimensions as weights [out, in], in each orientation."""
    if p.ndim == 2:
        return [p.T, p]  # x @ p, or F.linear(x, p)
    if out:  # [H,D,M]: what a head gives
        return [p.flatten(0, 1).T, p.permute(2, 0, 1).flatten(1), p.flatten(1)]
    # [H,M,D], [M,H,D], [H,D,M]
    return [p.transpose(1, 2).flatten(0, 1), p.flatten(1).T, p.flatten(0, 1)]


def _maps(
    module: nn.Module, heads: int, groups: int
) -> Iterator[tuple[tuple[LinearMap, LinearMap, LinearMap], bool, bool]]:
    """Yield each (q, k, v), whether names tell them apart, and whether faults are searched."""
    maps_by_role = _maps_by_role(module)
    orientations = range(max((len(maps) for maps in maps_by_role.values()), default=1))
    for n_orientation in orientations:
        map_of_role = {
            role: maps[min(n_orientation, len(maps) - 1)] for role, maps in maps_by_role.items()
        }
        if {"q", "k", "v"} <= set(map_of_role):
            yield (map_of_role["q"], map_of_role["k"], map_of_role["v"]), True, True
        elif {"q", "kv"} <= set(map_of_role):
            for n, (k, v) in enumerate(_split_fused(map_of_role["kv"], (1, 1), groups)):
                yield (map_of_role["q"], k, v), False, n in (0, 1)
        elif "qkv" in map_of_role:
            yield from _fused(map_of_role["qkv"], heads, groups)


def _fused(
    whole: LinearMap, heads: int, groups: int
) -> Iterator[tuple[tuple[LinearMap, LinearMap, LinearMap], bool, bool]]:
    """Yield the interpretations of one map for queries, keys and values: each layout and order."""
    splits = []
    if heads == groups:
        splits = list(_split_fused(whole, (1, 1, 1), heads))
    elif whole[0].shape[0] % (heads + 2 * groups) == 0:
        splits = list(_split_fused(whole, (heads // groups, 1, 1), groups))[:2]
    for parts in splits:
        yield (parts[0], parts[1], parts[2]), False, True
    for parts in splits if heads == groups else ():
        for order in list(permutations(range(3)))[1:]:
            a, b, c = (parts[n] for n in order)
            yield (a, b, c), False, False


def _split_fused(
    whole: LinearMap, shares: tuple[int, ...], groups: int
) -> Iterator[tuple[LinearMap, ...]]:
    """Yield the parts of a fused map for each layout: by part, head, feature, or reversed."""
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


def _interpretations(
    module: nn.Module, core: nn.Module, claims: AuditClaims, width: int
) -> Iterator[Projections]:
    """Yield every interpretation of the module `core` inside `module`."""
    outs, norm = _output(module, core)
    first = next(iter(_maps(core, 1, 1)))[0][0][0].shape[0]
    heads = _heads(module, core, claims, first)
    groups = claims.kv_heads or _size((core, module), "kv_heads") or heads
    bases = _bases(module)
    sinks = next(
        (p.detach() for n, p in module.named_parameters() if SINK_NAME in n and p.numel() == heads),
        None,
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


def _output(
    module: nn.Module, core: nn.Module
) -> tuple[list[LinearMap | None], tuple[Tensor, Tensor, float] | None]:
    """Return the output map in each orientation, or [None]; and BERT's norm after it, or None."""
    own = _maps_by_role(core).get("o")
    if own:
        return list(own), None
    for child in module.modules():
        if child is core or core in list(child.modules()):
            inner = _maps_by_role(child).get("o") if child is not core else None
        else:
            inner = _maps_by_role(child).get("o")
        if inner:
            norms = [c for c in child.children() if isinstance(c, nn.LayerNorm)]
            norm = norms[0] if norms and child is not module else None
            if norm is None or norm.weight is None or norm.bias is None:
                return list(inner), None
            return list(inner), (norm.weight.detach(), norm.bias.detach(), norm.eps)
    return [None], None


def _modules_per_head(module: nn.Module) -> list[nn.Module]:
    """Return the modules of a list that has one module for each head, or []."""
    for child in module.children():
        if isinstance(child, nn.ModuleList):
            heads = [head for head in child if head is not None]
            if heads and all(map(_has_maps, heads)):
                return heads
    return []


def _join_heads(
    module: nn.Module, head_modules: list[nn.Module], width: int
) -> tuple[Projections, ...]:
    """Return the projections of one module for each head, joined in their order."""
    first_maps = [read_projections(head, AuditClaims(heads=1), width)[0] for head in head_modules]

    def joined(maps: list[LinearMap]) -> LinearMap:
        biases = [b for _, b in maps if b is not None]
        weight = torch.cat([w for w, _ in maps])
        return weight, torch.cat(biases) if len(biases) == len(maps) else None

    q, k, v = (joined([getattr(maps, name) for maps in first_maps]) for name in "qkv")
    outs: list[LinearMap | None] = [*_maps_by_role(module).get("o", [])] or [None]
    n = len(head_modules)
    interpretations = (
        replace(first_maps[0], q=q, k=k, v=v, o=o, heads=n, groups=n, bases=_bases(module))
        for o in outs
    )
    return tuple(
        maps for maps in interpretations if maps.o is None or maps.o[0].shape[1] == q[0].shape[0]
    )


def _heads(module: nn.Module, core: nn.Module, claims: AuditClaims, rows: int) -> int:
    """Return H: the claim, an attribute, rows divided by the head dimension, or 1."""
    heads = claims.heads or _size((core, module), "heads")
    if heads:
        return heads
    D = claims.head_dim or _size((core, module), "head_dim")
    return rows // D if D and rows % D == 0 else 1


def _map(child: nn.Module) -> LinearMap | None:
    """Return the weight and bias of a linear map, or of the first module of a sequence."""
    if isinstance(child, nn.Sequential) and len(child):
        child = child[0]
    weight = getattr(child, "weight", None)
    if not isinstance(weight, Tensor) or weight.ndim != 2:
        return None
    weight = weight.detach()
    if type(child).__name__ == "Conv1D":  # GPT-2's Conv1D stores its weight as [in, out]
        weight = weight.T
    elif not isinstance(child, nn.Linear) and not hasattr(child, "in_features"):
        return None
    bias = getattr(child, "bias", None)
    return weight, bias.detach() if isinstance(bias, Tensor) else None


def attribute(owners: Sequence[object], names: Sequence[str]) -> int | None:
    """Return the first positive integer of these names in the owners or their configs."""
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
    """Return a size that the owners or their configs have as an attribute."""
    return attribute(owners, SIZE_NAMES[what])


def _bases(module: nn.Module) -> tuple[float, ...]:
    """Return the rotary bases that the module names, and 10000, which is the most common."""
    owners = [m for child in module.modules() for m in (child, getattr(child, "config", None))]
    values = [getattr(owner, name, None) for owner in owners for name in ROTARY_BASE_NAMES]
    bases = [
        float(x)
        for x in values
        if isinstance(x, (int, float)) and not isinstance(x, bool) and x > 1
    ]
    return tuple(dict.fromkeys([*bases, 10000.0]))
