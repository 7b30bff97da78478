"""The rope types of config.json: which keys each has, and the scaling that it means."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

from regard.errors import ArgumentError
from regard.foreign import shown
from regard.models.checkpoint.family import UnknownKey
from regard.positions import DynamicNTK, Linear, Llama3, LongRoPE, Scaling, YaRN

ORIGINAL = "original_max_position_embeddings"


class Keys(NamedTuple):
    """The keys of a rope type, beside the type itself and what `regard.models.assembly.rope.plain` lifts out."""

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
            ORIGINAL, "attention_factor", "beta_fast", "beta_slow", "mscale", "mscale_all_dim",
            "truncate", "finetuned",
        ),
    ),
}  # fmt: skip
"""Rope type -> its keys. `finetuned`, of the first YaRN checkpoints, says how they were made and shapes nothing."""

OLD_NAMES = {"su": "longrope"}
"""Rope types that were renamed."""


def normal(given: Mapping[str, Any], where: str) -> dict[str, Any] | None:
    """A rope_scaling with its type as `rope_type`, by its present name, and keys that are checked; None if default.

    Keys that are null are left out, as if absent, except a yarn's factor, which then follows from the lengths.

    Args:
        given: the mapping in a config.json, without rope_theta and partial_rotary_factor.
        where: what it is called there, for messages.

    Raises:
        ArgumentError: the type is unknown, absent beside other keys, or given twice and differently; a key of the type
            is missing, unknown, or has a value of another kind.

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
                f"{where} of rope_type {kind!r} has the unknown key {shown(key)}{near(key, known)}; "
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
                f"{where} has {', '.join(map(repr, rest))} and no rope_type; say which of {', '.join(TYPES)} it is"
            )
        return "default"
    for name, kind in said.items():
        if not isinstance(kind, str) or OLD_NAMES.get(kind, kind) not in TYPES:
            raise ArgumentError(
                f"{where}.{name} is {short(kind)}{near(kind, (*TYPES, *OLD_NAMES))}; supported: {', '.join(TYPES)}"
            )
    kinds = [OLD_NAMES.get(kind, kind) for kind in said.values()]
    if kinds[0] != kinds[-1]:
        raise ArgumentError(
            f"{where}.rope_type is {said['rope_type']!r} and {where}.type is {said['type']!r}; remove the wrong one"
        )
    return kinds[0]


def number(where: str, value: object) -> float:
    """A finite number as JSON has it, or an error: no string, no boolean, and no integer beyond the range of a float."""
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
    """The scaling of a checked rope_scaling (`normal`); None for default, and proportional without a factor.

    Args:
        found: the rope_scaling.
        pairs: rotary pairs, which LongRoPE's lists must fit.
        max_positions: max_position_embeddings.
        original: original_max_position_embeddings at the top level of the config, where Phi-3 has it.

    Raises:
        ArgumentError: a number is out of range, the trained length is missing (llama3) or given twice and differently,
            or a list of factors has another length.

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
                f"rope_scaling.{name} has {len(rest[name])} numbers and a head has {pairs} rotary pairs; "
                "give one number per pair"
            )
    return LongRoPE(original_length=length, **rest)


def _trained(found: Mapping[str, Any], kind: str, max_positions: int, original: int | None) -> int:
    """The length that the frequencies were trained at."""
    inner = found.get(ORIGINAL)
    if original is not None and inner is not None and original != inner:
        raise ArgumentError(
            f"{ORIGINAL} is {original} at the top level and {inner} in rope_scaling; remove the wrong one"
        )
    length = inner if original is None else original
    if length is not None:
        return length
    if kind == "llama3":
        raise ArgumentError(
            f"rope_scaling of rope_type 'llama3' lacks {ORIGINAL}, the length before it was stretched"
        )
    return max_positions
