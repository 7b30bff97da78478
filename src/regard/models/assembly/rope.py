"""The rotary settings of a config.json in all of their forms, and the rotary modules that follow
from them.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn

from regard.cost.layer_types import FULL, SLIDING
from regard.errors import ArgumentError
from regard.foreign import shown
from regard.models.checkpoint.family import UnknownKey
from regard.nn import Heads, Separate
from regard.nn.dynamic_rotary import Recomputed, RowRotary
from regard.positions import DynamicNTK, Linear, Llama3, LongRoPE, Rotary, Scaling, YaRN
from regard.positions.rotary import Layout

ORIGINAL = "original_max_position_embeddings"


class Keys(NamedTuple):
    """The keys of a rope type, beside the type itself and what `regard.models.assembly.rope.plain`
    lifts out.
    """

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


TYPES: dict[str, Keys] = {
    "default": Keys(),
    "dynamic": Keys(("factor",)),
    "linear": Keys(("factor",)),
    "llama3": Keys(("factor", "low_freq_factor", "high_freq_factor"), (ORIGINAL,)),
    "longrope": Keys(("short_factor", "long_factor"), (ORIGINAL, "factor", "attention_factor")),
    "proportional": Keys((), ("factor",)),
    "yarn": Keys(
        ("factor",),
        (
            ORIGINAL,
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
            "finetuned",
        ),
    ),
}
"""Rope type -> its keys. `finetuned`, of the first YaRN checkpoints, says how they were made and
shapes nothing.
"""

OLD_NAMES = {"su": "longrope"}
"""Rope types that were renamed."""


def normal(given: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """A rope_scaling with its type as `rope_type`, by its present name, and keys that are checked;
    None if default.

    Keys that are null are left out, as if absent, except a yarn's factor, which then follows from
    the lengths.

    Args:
        given: the mapping in a config.json, without rope_theta and partial_rotary_factor.
        where: what it is called there, for messages.

    Raises:
        ArgumentError: the type is unknown, absent beside other keys, or given twice and
            differently; a key of the type is missing, unknown, or has a value of another kind.

    >>> normal({"type": "linear", "factor": 4.0}, "rope_scaling")
    {'rope_type': 'linear', 'factor': 4.0}
    """
    kind = _kind(given, where)
    required, known = TYPES[kind].required, (*TYPES[kind].required, *TYPES[kind].optional)
    found: dict[str, Any] = {"rope_type": kind}
    for key, value in given.items():
        if key in ("type", "rope_type"):
            continue
        if key not in known:
            raise UnknownKey(
                (*where.split("."), key),
                f"{where} of rope_type {kind!r} has the unknown key "
                f"{shown(key)}{near(key, known)}; "
                f"its keys are {', '.join(known) or 'none'}",
            )
        if value is not None or (kind, key) == ("yarn", "factor"):
            found[key] = _checked(f"{where}.{key}", key, value)
    if lacking := [key for key in required if key not in found]:
        raise ArgumentError(f"{where} of rope_type {kind!r} lacks {', '.join(lacking)}")
    return None if kind == "default" else found


def near(word: object, known: Iterable[str]) -> str:
    """A hint at the known word that is nearest, or nothing.

    >>> near("yarm", TYPES)
    "; did you mean 'yarn'?"
    """
    close = difflib.get_close_matches(str(word)[:60], list(known), 1)
    return f"; did you mean {close[0]!r}?" if close else ""


def _kind(given: Mapping[str, Any], where: str) -> str:
    said = {name: given[name] for name in ("rope_type", "type") if given.get(name) is not None}
    if not said:
        if rest := [key for key in given if key not in ("rope_type", "type")]:
            raise ArgumentError(
                f"{where} has {', '.join(map(repr, rest))} and no rope_type; say which of "
                f"{', '.join(TYPES)} it is"
            )
        return "default"
    for name, kind in said.items():
        if not isinstance(kind, str) or OLD_NAMES.get(kind, kind) not in TYPES:
            raise ArgumentError(
                f"{where}.{name} is {short(kind)}{near(kind, (*TYPES, *OLD_NAMES))}; supported: "
                f"{', '.join(TYPES)}"
            )
    kinds: list[str] = [OLD_NAMES.get(kind, kind) for kind in said.values()]
    if kinds[0] != kinds[-1]:
        raise ArgumentError(
            f"{where}.rope_type is {said['rope_type']!r} and {where}.type is {said['type']!r}; "
            "remove the wrong one"
        )
    return kinds[0]


def number(where: str, value: object) -> float:
    """A finite number as JSON has it, or an error: no string, no boolean, and no integer beyond the
    range of a float.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e300:
        raise ArgumentError(f"{where} is {short(value)}; it must be a finite number")
    return value


def _checked(where: str, key: str, value: Any) -> Any:
    """The value, if it is of the kind that its key asks for."""
    if key in ("truncate", "finetuned"):
        if not isinstance(value, bool):
            raise ArgumentError(f"{where} is {short(value)}; it must be true or false")
    elif key in ("short_factor", "long_factor"):
        if not isinstance(value, (list, tuple)):
            raise ArgumentError(f"{where} is {short(value)}; it must be a list of numbers")
        for i, x in enumerate(value):
            number(f"{where}[{i}]", x)
    elif key == ORIGINAL:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 53:
            raise ArgumentError(f"{where} is {short(value)}; it must be an integer of at least 1")
    elif value is not None:
        number(where, value)
    return value


def short(value: object) -> str:
    """A value as a message shows it, cut where it is long.

    >>> short("x" * 100)[-5:]
    'xx...'
    """
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


def scaling_of(
    found: Mapping[str, Any], pairs: int, max_positions: int, original: int | None
) -> Scaling | None:
    """The scaling of a checked rope_scaling (`normal`); None for default, and proportional without
    a factor.

    Args:
        found: the rope_scaling.
        pairs: rotary pairs, which LongRoPE's lists must fit.
        max_positions: max_position_embeddings.
        original: original_max_position_embeddings at the top level of the config, where Phi-3 has
            it.

    Raises:
        ArgumentError: a number is out of range, the trained length is missing (llama3) or given
            twice and differently, or a list of factors has another length.

    >>> scaling_of({"rope_type": "dynamic", "factor": 2.0}, 32, 4096, None)
    DynamicNTK(factor=2.0, original_length=4096)
    """
    kind = found["rope_type"]
    rest = {k: v for k, v in found.items() if k not in ("rope_type", "finetuned", ORIGINAL)}
    if kind in ("linear", "proportional"):
        return Linear(**rest) if rest else None
    if kind == "dynamic":
        return DynamicNTK(original_length=max_positions, **rest)
    length = _trained(found, kind, max_positions, original)
    if kind == "llama3":
        return Llama3(original_length=length, **rest)
    if rest.get("factor") is None:
        rest["factor"] = max_positions / length
    if kind == "yarn":
        return YaRN(original_length=length, **rest)
    for name in ("short_factor", "long_factor"):
        if len(rest[name]) != pairs:
            raise ArgumentError(
                f"rope_scaling.{name} has {len(rest[name])} numbers and a head has {pairs} rotary "
                "pairs; "
                "give one number per pair"
            )
    return LongRoPE(original_length=length, **rest)


def _trained(found: Mapping[str, Any], kind: str, max_positions: int, original: int | None) -> int:
    """The length that the frequencies were trained at."""
    inner = found.get(ORIGINAL)
    if original is not None and inner is not None and original != inner:
        raise ArgumentError(
            f"{ORIGINAL} is {original} at the top level and {inner} in rope_scaling; remove the "
            "wrong one"
        )
    length = inner if original is None else original
    if length is not None:
        return length
    if kind == "llama3":
        raise ArgumentError(
            f"rope_scaling of rope_type 'llama3' lacks {ORIGINAL}, the length before it was "
            "stretched"
        )
    return max_positions


LIFTED = ("rope_theta", "partial_rotary_factor")
"""Keys that files have at the top level or inside, and `plain` at the top level."""


def plain(raw: Mapping[str, Any], *, layered: bool = False) -> dict[str, Any]:
    """A config.json with its rotary positions in one form, whichever it came in.

    rope_theta and partial_rotary_factor stand at the top level if they are given at all;
    rope_scaling is None, or a mapping with `rope_type` and the keys of the type; rope_parameters is
    gone.

    Args:
        raw: the parsed config.json; it is not changed.
        layered: for families whose layer types have frequencies of their own (Gemma 3): these keys
            then stand in `rope_parameters`, a mapping for "full_attention" and one for
            "sliding_attention", and nowhere else. In a file of the hub the sliding layers have the
            base `rope_local_base_freq` and no scaling.

    Raises:
        ArgumentError: two places contradict each other, a rope type is not known, or its keys are
            not as they should be; or rope_parameters are per layer type where the family has one
            for all, or the reverse.

    >>> plain({"rope_parameters": {"rope_type": "linear", "rope_theta": 5e5, "factor": 2.0}, "vocab_size": 8})
    {'vocab_size': 8, 'rope_theta': 500000.0, 'rope_scaling': {'rope_type': 'linear', 'factor': 2.0}}
    >>> plain({"rope_theta": 1e6, "rope_local_base_freq": 1e4}, layered=True)["rope_parameters"]["sliding_attention"]
    {'rope_theta': 10000.0, 'rope_scaling': None}
    """
    ours = {*LIFTED, "rope_scaling", "rope_parameters"}
    if layered:
        ours.add("rope_local_base_freq")
    rest = {key: value for key, value in raw.items() if key not in ours}
    top = {key: raw[key] for key in (*LIFTED, "rope_scaling") if raw.get(key) is not None}
    nested = raw.get("rope_parameters")
    types = _layer_types(nested)
    if not layered:
        if types:
            raise ArgumentError(
                f"rope_parameters are given per layer type ({', '.join(types)}); this family has "
                "one for all layers"
            )
        return rest | _one(top, nested, "rope_parameters")
    if nested and not types:
        raise ArgumentError(
            f"rope_parameters has {', '.join(nested)} for all layers; this family has them per "
            "layer type, "
            f"{FULL} and {SLIDING}"
        )
    local = {k: raw[k] for k in ("rope_local_base_freq", "partial_rotary_factor") if k in raw}
    return rest | {
        "rope_parameters": {
            kind: _one(said, (nested or {}).get(kind), f"rope_parameters.{kind}", base)
            for kind, said, base in (
                (FULL, top, "rope_theta"),
                (SLIDING, local, "rope_local_base_freq"),
            )
        }
    }


def rotary(
    head_dim: int,
    theta: float,
    scaling: Mapping[str, Any] | None,
    max_positions: int,
    *,
    partial: float = 1.0,
    layout: Layout = "half",
    original: int | None = None,
) -> Rotary:
    """The `Rotary` of a config, with the formulas of transformers' `modeling_rope_utils`.

    int(head_dim * partial) dims turn, and the exponents divide by that number; for "proportional"
    the head dim divides. "dynamic" and "longrope" follow the length of what is read, so that a
    cache of rotated keys needs `heads`.

    Three things to know. "dynamic" counts from max_positions, "longrope" and "yarn" from the length
    before stretching (max_positions where it is not given). LongRoPE's factor, if absent, is
    max_positions over that length. `mscale` and `mscale_all_dim` are read as DeepSeek's code does,
    1 and 0 when absent: transformers ignores one without the other. The latter's effect on the
    softmax is in `Rotary.softmax_factor`, for families that apply it.

    Args:
        head_dim: D.
        theta: rope_theta, the base.
        scaling: rope_scaling, as `plain` gives it or as a file has it.
        max_positions: max_position_embeddings.
        partial: partial_rotary_factor.
        layout: which dims make a pair.
        original: original_max_position_embeddings at the top level, where Phi-3 has it.

    Raises:
        ArgumentError: a number is out of range, the scaling's type or a key of it is not as it
            should be, or the list of a LongRoPE has not one number per pair.

    >>> rotary(64, 150000.0, {"rope_type": "linear", "factor": 8.0}, 4096)
    Rotary(64, base=150000.0, scaling=Linear(factor=8.0), layout='half')

    Source: see `regard.positions` for each scaling.
    """
    number("rope_theta", theta)
    if not 0 < number("partial_rotary_factor", partial) <= 1:
        raise ArgumentError(f"partial_rotary_factor is {partial}; it must be above 0 and at most 1")
    found = None if scaling is None else normal(scaling, "rope_scaling")
    proportional = found is not None and found["rope_type"] == "proportional"
    turning = 2 * int(partial * head_dim // 2) if proportional else int(head_dim * partial)
    how = None if found is None else scaling_of(found, turning // 2, max_positions, original)
    return Rotary(
        head_dim,
        theta,
        scaling=how,
        rotary_dim=turning,
        proportional=proportional,
        layout=layout,
        length="current" if how is not None and how.needs_length else None,
    )


def heads(
    dim: int,
    H: int,
    G: int,
    head_dim: int,
    rotary: Rotary,
    *,
    q_steps: Sequence[nn.Module] = (),
    k_steps: Sequence[nn.Module] = (),
    q_flat: nn.Module | None = None,
    k_flat: nn.Module | None = None,
    bias: bool = False,
) -> Separate:
    """Queries, keys and values with rotary as the last step of the first two, fit for a cache
    whatever the scaling.

    Where the frequencies follow the length, keys that were rotated for another are refused on
    recall, and the prefix has to be run again (`regard.nn.Prefix`): then decoding with a cache
    equals one pass. Parameters have the same names in both cases.

    Args:
        dim, H, G, head_dim: model dim, query heads, key/value heads, and D.
        rotary: from `rotary`.
        q_steps, k_steps: steps on heads before the rotation, such as a norm per head.
        q_flat, k_flat: a norm over all heads at once (OLMo 2).
        bias: whether the three linear maps have one.

    Raises:
        ArgumentError: rotary is for another head dim; or what `Separate` refuses.

    >>> heads(32, 4, 2, 8, rotary(8, 1e4, None, 64)).shape.memory
    (16, 16)
    >>> heads(32, 4, 2, 8, rotary(8, 1e4, {"rope_type": "dynamic", "factor": 2.0}, 64)).shape.memory
    (16, 16, 1)
    """
    if rotary.dim != head_dim:
        raise ArgumentError(f"rotary is for heads of {rotary.dim}, and head_dim is {head_dim}")
    last = () if rotary.follows else (rotary,)
    q = Heads(dim, H, head_dim, *q_steps, *last, flat=q_flat, bias=bias)
    k = Heads(dim, G, head_dim, *k_steps, *last, flat=k_flat, bias=bias)
    v = Heads(dim, G, head_dim, bias=bias)
    return Recomputed(q, k, v, RowRotary(rotary)) if rotary.follows else Separate(q, k, v)


def _layer_types(nested: object) -> tuple[str, ...]:
    """The layer types that rope_parameters speak of; none if they are flat, or not there."""
    if nested is None:
        return ()
    if not isinstance(nested, Mapping):
        raise ArgumentError(
            f"rope_parameters is {short(nested)}; it must be an object of keys and values"
        )
    if not any(isinstance(value, Mapping) for value in nested.values()):
        return ()
    for key, value in nested.items():
        if key not in (FULL, SLIDING):
            raise ArgumentError(
                f"rope_parameters has the unknown layer type {key!r}{near(key, (FULL, SLIDING))}; "
                f"supported are {FULL} and {SLIDING}"
            )
        if value is not None and not isinstance(value, Mapping):
            raise ArgumentError(f"rope_parameters.{key} is {short(value)}; it must be an object")
    return tuple(nested)


def _one(
    top: Mapping[str, Any], nested: Mapping[str, Any] | None, where: str, base: str = "rope_theta"
) -> dict[str, Any]:
    """rope_theta, partial_rotary_factor and rope_scaling from the top level and from
    rope_parameters, which must agree.
    """
    inner = {"rope_scaling": top.get("rope_scaling") or {}, where: nested or {}}
    if not isinstance(inner["rope_scaling"], Mapping):
        raise ArgumentError(f"rope_scaling is {short(inner['rope_scaling'])}; it must be an object")
    found: dict[str, Any] = {}
    for key, at_top in (("rope_theta", base), ("partial_rotary_factor", "partial_rotary_factor")):
        said = {at_top: top.get(at_top)} | {
            f"{place}.{key}": keys.get(key) for place, keys in inner.items()
        }
        values = {place: number(place, x) for place, x in said.items() if x is not None}
        if len({*values.values()}) > 1:
            both = " and ".join(f"{place} is {value}" for place, value in values.items())
            raise ArgumentError(f"{both}; remove the wrong one")
        if values:
            found[key] = next(iter(values.values()))
    rests = {place: {k: keys[k] for k in keys if k not in LIFTED} for place, keys in inner.items()}
    scalings = [normal(keys, place) for place, keys in rests.items() if keys]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ArgumentError(
            f"rope_scaling is {short(scalings[0])} and {where} says {short(scalings[1])}; remove "
            "the wrong one"
        )
    return found | {"rope_scaling": scalings[0] if scalings else None}
