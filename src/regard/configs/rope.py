"""The rotary settings of a config.json, which stand at the top level, in `rope_scaling` or in
`rope_parameters`: checks, and conversion to one form.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

from regard.configs.base import FULL, SLIDING, UnknownKey
from regard.did_you_mean import suggest
from regard.errors import ArgumentError
from regard.untrusted_text import short_repr

ORIGINAL = "original_max_position_embeddings"


class RopeTypeKeys(NamedTuple):
    """The keys of a rope type, without those that `normalize_rope` moves up."""

    required: tuple[str, ...] = ()
    optional: tuple[str, ...] = ()


ROPE_TYPES: dict[str, RopeTypeKeys] = {
    "default": RopeTypeKeys(),
    "dynamic": RopeTypeKeys(("factor",)),
    "linear": RopeTypeKeys(("factor",)),
    "llama3": RopeTypeKeys(("factor", "low_freq_factor", "high_freq_factor"), (ORIGINAL,)),
    "longrope": RopeTypeKeys(
        ("short_factor", "long_factor"), (ORIGINAL, "factor", "attention_factor")
    ),
    "proportional": RopeTypeKeys((), ("factor",)),
    "yarn": RopeTypeKeys(
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
"""Rope type -> its keys. `finetuned`, of the first YaRN checkpoints, does not change anything."""

OLD_NAMES = {"su": "longrope"}
"""Old name of a rope type -> its present name."""


LENGTH_DEPENDENT_TYPES = ("dynamic", "longrope")
"""Rope types whose frequencies depend on the length of the text."""


class RopeSettings(NamedTuple):
    """The part of a config that `regard.models.assembly.building_blocks.rotary_module` needs.

    Attributes:
        scaling: rope_scaling, as `normalize_rope` or a file has it; None is no scaling.
        layout: which dims form a pair.
        original: original_max_position_embeddings at the top level, where Phi-3 has it.
        backwards: whether the pairs turn in the other direction.
    """

    head_dim: int
    theta: float
    scaling: Mapping[str, object] | None
    max_positions: int
    partial: float = 1.0
    layout: Literal["half", "interleaved"] = "half"
    original: int | None = None
    backwards: bool = False

    @property
    def is_length_dependent(self) -> bool:
        """Whether the frequencies depend on the length of the text."""
        return check_rope(self)["rope_type"] in LENGTH_DEPENDENT_TYPES


def without_own_keys(
    scaling: Mapping[str, object] | None, own: Collection[str]
) -> Mapping[str, object] | None:
    """Return a rope_scaling without the keys that only one family has."""
    if scaling is None or not own:
        return scaling
    return {key: value for key, value in scaling.items() if key not in own} or None


def temperature(
    scaling: Mapping[str, object] | None, key: str = "llama_4_scaling_beta"
) -> tuple[float, float] | None:
    """Return the factor and the length of the temperature of Mistral's queries; None without it."""
    if scaling is None or (beta := scaling.get(key)) is None:
        return None
    length = check_finite(f"rope_scaling.{ORIGINAL}", scaling.get(ORIGINAL))
    return check_finite(f"rope_scaling.{key}", beta), length


def check_rope(settings: RopeSettings) -> Mapping[str, object]:
    """Check the keys of rotary settings and the types of values, not their ranges."""
    check_finite("rope_theta", settings.theta)
    partial = settings.partial
    if not 0 < check_finite("partial_rotary_factor", partial) <= 1:
        raise ArgumentError(f"partial_rotary_factor is {partial}; it must be above 0 and at most 1")
    scaling = settings.scaling
    normalized = None if scaling is None else normalize_scaling(scaling, "rope_scaling")
    return {"rope_type": "default"} if normalized is None else normalized


def normalize_scaling(scaling: Mapping[str, object], where: str) -> dict[str, object] | None:
    """Return a rope_scaling with checked keys and its type as `rope_type`; None if default. A null
    is left out, except the factor of yarn, which then follows from the lengths.
    """
    kind = _rope_type(scaling, where)
    required, known = (
        ROPE_TYPES[kind].required,
        (*ROPE_TYPES[kind].required, *ROPE_TYPES[kind].optional),
    )
    normalized: dict[str, object] = {"rope_type": kind}
    for key, value in scaling.items():
        if key in ("type", "rope_type"):
            continue
        if (kind, key) == ("yarn", "attn_factor"):
            _check_attn_factor(value, where)
            continue
        if key not in known:
            raise UnknownKey(
                (*where.split("."), key),
                f"{where} of rope_type {kind!r} has the unknown key "
                f"{short_repr(key)}{suggest(key, known, otherwise='.')} "
                f"Its keys are {', '.join(known) or 'none'}",
            )
        if value is not None or (kind, key) == ("yarn", "factor"):
            normalized[key] = _check_value(f"{where}.{key}", key, value)
    if lacking := [key for key in required if key not in normalized]:
        raise ArgumentError(f"{where} of rope_type {kind!r} lacks {', '.join(lacking)}")
    if kind == "yarn":
        _check_mscales(normalized, where)
    return None if kind == "default" else normalized


def _check_attn_factor(value: object, where: str) -> None:
    """Raise unless YaRN's `attn_factor` changes nothing."""
    if value is not None and check_finite(f"{where}.attn_factor", value) != 1:
        raise ArgumentError(
            f"{where}.attn_factor is {shorten(value)}: YaRN's released code multiplies the factor "
            "0.1 ln(factor) + 1 by it, and transformers ignores it. Remove it, or give the product "
            "as attention_factor"
        )


def _check_mscales(scaling: Mapping[str, object], where: str) -> None:
    """Raise where one of YaRN's mscales without the other means two things."""
    own, all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
    has_both = own and all_dim
    # f(1) in both readings
    is_default = own in (None, 1) and not all_dim
    if scaling.get("attention_factor") is None and not has_both and not is_default:
        raise ArgumentError(
            f"{where} has mscale {own} and mscale_all_dim {all_dim}: DeepSeek's code takes 1 and 0 "
            "for what is absent, and transformers ignores one without the other. Give both, not 0, "
            "or give attention_factor"
        )


def _rope_type(scaling: Mapping[str, Any], where: str) -> str:
    """Return the rope type of a scaling; an old name is replaced by its present one."""
    types = {name: scaling[name] for name in ("rope_type", "type") if scaling.get(name) is not None}
    if not types:
        if rest := [key for key in scaling if key not in ("rope_type", "type")]:
            raise ArgumentError(
                f"{where} has {', '.join(map(repr, rest))} and no rope_type; add one "
                f"of {', '.join(ROPE_TYPES)}"
            )
        return "default"
    for name, kind in types.items():
        if not isinstance(kind, str) or OLD_NAMES.get(kind, kind) not in ROPE_TYPES:
            raise ArgumentError(
                f"{where}.{name} is "
                f"{shorten(kind)}{suggest(kind, (*ROPE_TYPES, *OLD_NAMES), otherwise='.')} "
                f"Supported: {', '.join(ROPE_TYPES)}"
            )
    kinds = [OLD_NAMES.get(kind, kind) for kind in types.values()]
    if kinds[0] != kinds[-1]:
        raise ArgumentError(
            f"{where}.rope_type is {types['rope_type']!r} and {where}.type is {types['type']!r}; "
            "remove the wrong one"
        )
    return str(kinds[0])


def check_finite(where: str, value: object) -> float:
    """Return a finite number of JSON; raise for a str, a bool, or an int beyond floats."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not abs(value) <= 1e300:
        raise ArgumentError(f"{where} is {shorten(value)}; it must be a finite number")
    return value


def _check_value(where: str, key: str, value: object) -> object:
    """Return the value if it has the type that its key needs."""
    if key in ("truncate", "finetuned"):
        if not isinstance(value, bool):
            raise ArgumentError(f"{where} is {shorten(value)}; it must be true or false")
    elif key in ("short_factor", "long_factor"):
        if not isinstance(value, (list, tuple)):
            raise ArgumentError(f"{where} is {shorten(value)}; it must be a list of numbers")
        for i, x in enumerate(value):
            check_finite(f"{where}[{i}]", x)
    elif key == ORIGINAL:
        if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value < 1 << 53:
            raise ArgumentError(f"{where} is {shorten(value)}; it must be an integer of at least 1")
    elif value is not None:
        check_finite(where, value)
    return value


def shorten(value: object) -> str:
    """Return the repr of a value for a message, shortened if it is long."""
    text = repr(value)
    return text if len(text) <= 60 else f"{text[:60]}..."


TOP_LEVEL_KEYS = ("rope_theta", "partial_rotary_factor")
"""Keys that may be nested in files, and that `normalize_rope` moves to the top level."""


def normalize_rope(
    raw: Mapping[str, Any],
    *,
    layered: bool = False,
    own: Collection[str] = (),
    absent: Mapping[str, object] | None = None,
) -> dict[str, Any]:
    """Return the keys with rope_theta and partial_rotary_factor at the top level, and rope_scaling
    None or a mapping with `rope_type`; rope_parameters goes. Keys in `own` stay in rope_scaling;
    `absent` are the rope_parameters of a file without any.
    """
    if own or absent:
        is_scaled = any(raw.get(name) is not None for name in ("rope_scaling", "rope_parameters"))
        rest = dict(raw) if is_scaled or absent is None else {**raw, "rope_parameters": absent}
        of_family: dict[str, Any] = {}
        for name in ("rope_scaling", "rope_parameters"):
            if isinstance(scaling := rest.get(name), Mapping):
                of_family |= {key: scaling[key] for key in own if scaling.get(key) is not None}
                rest[name] = {key: x for key, x in scaling.items() if key not in own}
        keys = normalize_rope(rest, layered=layered)
        default = {} if absent is None else {"rope_type": "default"}
        keys["rope_scaling"] = default | (keys["rope_scaling"] or {}) | of_family or None
        return keys
    rope_keys = {*TOP_LEVEL_KEYS, "rope_scaling", "rope_parameters"}
    if layered:
        rope_keys.add("rope_local_base_freq")
    rest = {key: value for key, value in raw.items() if key not in rope_keys}
    top = {key: raw[key] for key in (*TOP_LEVEL_KEYS, "rope_scaling") if raw.get(key) is not None}
    nested = raw.get("rope_parameters")
    types = _layer_types(nested)
    if not layered:
        if types:
            raise ArgumentError(
                f"rope_parameters are given per layer type ({', '.join(types)}); this family has "
                "one for all layers"
            )
        return rest | _merge_settings(top, nested, "rope_parameters")
    if nested and not types:
        raise ArgumentError(
            f"rope_parameters has {', '.join(nested)} for all layers; this family has them per "
            f"layer type, {FULL} and {SLIDING}"
        )
    local = {k: raw[k] for k in ("rope_local_base_freq", "partial_rotary_factor") if k in raw}
    return rest | {
        "rope_parameters": {
            kind: _merge_settings(keys, (nested or {}).get(kind), f"rope_parameters.{kind}", base)
            for kind, keys, base in (
                (FULL, top, "rope_theta"),
                (SLIDING, local, "rope_local_base_freq"),
            )
        }
    }


def _layer_types(nested: object) -> tuple[str, ...]:
    """Return the layer types in rope_parameters; none if it is flat or missing."""
    if nested is None:
        return ()
    if not isinstance(nested, Mapping):
        raise ArgumentError(
            f"rope_parameters is {shorten(nested)}; it must be an object of keys and values"
        )
    if not any(isinstance(value, Mapping) for value in nested.values()):
        return ()
    for key, value in nested.items():
        if key not in (FULL, SLIDING):
            raise ArgumentError(
                f"rope_parameters has the unknown layer type {key!r}"
                f"{suggest(key, (FULL, SLIDING), otherwise='.')} "
                f"Supported are {FULL} and {SLIDING}"
            )
        if value is not None and not isinstance(value, Mapping):
            raise ArgumentError(f"rope_parameters.{key} is {shorten(value)}; it must be an object")
    return tuple(nested)


def _merge_settings(
    top: Mapping[str, Any],
    nested: Mapping[str, object] | None,
    where: str,
    base: str = "rope_theta",
) -> dict[str, object]:
    """Return rope_theta, partial_rotary_factor and rope_scaling from all places."""
    nested_at = {"rope_scaling": top.get("rope_scaling") or {}, where: nested or {}}
    if not isinstance(nested_at["rope_scaling"], Mapping):
        raise ArgumentError(
            f"rope_scaling is {shorten(nested_at['rope_scaling'])}; it must be an object"
        )
    settings: dict[str, object] = {}
    for key, at_top in (("rope_theta", base), ("partial_rotary_factor", "partial_rotary_factor")):
        values_at = {at_top: top.get(at_top)} | {
            f"{place}.{key}": keys.get(key) for place, keys in nested_at.items()
        }
        values = {place: check_finite(place, x) for place, x in values_at.items() if x is not None}
        if len({*values.values()}) > 1:
            both = " and ".join(f"{place} is {value}" for place, value in values.items())
            raise ArgumentError(f"{both}; remove the wrong one")
        if values:
            settings[key] = next(iter(values.values()))
    rests = {
        place: {k: keys[k] for k in keys if k not in TOP_LEVEL_KEYS}
        for place, keys in nested_at.items()
    }
    scalings = [normalize_scaling(keys, place) for place, keys in rests.items() if keys]
    if len(scalings) == 2 and scalings[0] != scalings[1]:
        raise ArgumentError(
            f"rope_scaling is {shorten(scalings[0])} and {where} is {shorten(scalings[1])}; remove "
            "the wrong one"
        )
    return settings | {"rope_scaling": scalings[0] if scalings else None}


def ropes_of_both_kinds(
    raw: Mapping[str, Any], family: str
) -> tuple[dict[str, Any], dict[str, Any], dict[str, Any]]:
    """Return the keys without rotary settings, and those of layers without a window and with one,
    which must have no scaling.
    """
    keys = normalize_rope(raw, layered=True)
    both = keys.pop("rope_parameters")
    if (scaling := both[SLIDING]["rope_scaling"]) is not None:
        raise ArgumentError(
            f"rope_parameters.{SLIDING} has the scaling {scaling}; {family} supports one only for "
            f"{FULL}"
        )
    return keys, both[FULL], both[SLIDING]


def rotated_share(keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with `partial_rotary_factor` in place of `rotary_dim`."""
    rest = dict(keys)
    rotated, dim = rest.pop("rotary_dim", None), rest.get("head_dim")
    if isinstance(rotated, int) and isinstance(dim, int) and dim > 0:
        share = rest.setdefault("partial_rotary_factor", rotated / dim)
        if share != rotated / dim:
            raise ArgumentError(
                f"rotary_dim is {rotated} of {dim}, and partial_rotary_factor is "
                f"{rest['partial_rotary_factor']}; they mean the same: keep one"
            )
    return rest
