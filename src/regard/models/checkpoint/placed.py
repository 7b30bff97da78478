"""Which parameter name of the table each stored tensor has: prefixes that a file lacks, or has too
many of.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path

from regard.errors import FileError
from regard.foreign import shown
from regard.models.checkpoint.family import Family
from regard.models.checkpoint.names import pattern

_DEEPEST = 8  # wrappers around a model; each costs a pass over all names


@dataclass(frozen=True)
class Placed:
    """The stored tensors of a folder by the names of a family's table.

    Attributes:
        names: stored name -> name of the table, for those that have one.
        homeless: stored names that have none, and are no buffers: what a folder is refused for.
        bare: whether the names lack the family's prefix, because the base model was saved alone.
    """

    names: dict[str, str]
    homeless: tuple[str, ...]
    bare: bool


def placed(
    folder: Path, stored: Collection[str], family: Family, known: Callable[[str], bool]
) -> Placed:
    """The one way in which all names of a file are names of the table; or else the way that places
    the most.

    Tried are the names as they are, and without each prefix that all of them share, such as
    "module." of training on several devices; and both with the family's own prefix in front, which
    a base model that was saved alone lacks. A file in which some names have that prefix and others
    lack it fits no way: it was put together from two models.

    Args:
        folder: for messages.
        stored: the names in its files.
        family: its prefixes, buffers and older spellings.
        known: whether a name is one of the table.

    Raises:
        FileError: two ways fit all names, and give them to different parameters; or two stored
            names mean one parameter.

    >>> from regard.configs.base import ModelConfig
    >>> family = Family(ModelConfig, str, {}, prefixes=("model.",))
    >>> known = {"model.layers.0.w", "head"}.__contains__
    >>> placed(Path("a"), ["layers.0.w", "head"], family, known).names
    {'layers.0.w': 'model.layers.0.w', 'head': 'head'}
    >>> placed(Path("a"), ["module.model.layers.0.w", "module.head"], family, known).homeless
    ()
    """
    ways = [
        way
        for taken_off in ("", *_shared_prefixes(stored))
        for added in ("", *family.prefixes)
        if (way := _way(folder, stored, taken_off, added, family, known)) is not None
    ]
    fitting = [way for way in ways if not way.homeless]
    other = next((way for way in fitting if way.names != fitting[0].names), None)
    if other is not None:
        name = next(name for name in stored if other.names.get(name) != fitting[0].names.get(name))
        raise FileError(
            f"{folder}: the stored names can be read in two ways: {shown(name)} is "
            f"{fitting[0].names.get(name)} or "
            f"{other.names.get(name)}; rename the tensors as the family's published checkpoints "
            "have them"
        )
    # of equally good ways the first, which takes the names as they are
    return fitting[0] if fitting else max(ways, key=lambda way: len(way.names))


def table(family: Family) -> Callable[[str], bool]:
    """Whether a name is one of a family's table, in a model of any number of layers.

    >>> from regard.configs.base import ModelConfig
    >>> has = table(Family(ModelConfig, str, {"h.{}.w": "layers.{}.weight"}))
    >>> has("h.12.w"), has("h.w")
    (True, False)
    """
    patterns = {pattern(name) for name in family.names}
    found: dict[str, bool] = {}

    def known(name: str) -> bool:
        if name not in found:
            found[name] = pattern(name) in patterns
        return found[name]

    return known


def _way(
    folder: Path,
    stored: Collection[str],
    taken_off: str,
    added: str,
    family: Family,
    known: Callable[[str], bool],
) -> Placed | None:
    """The names without one prefix and with another; None where that makes two names one.

    A name of the table that never has the family's prefix, such as a head's, gets none.
    """
    names: dict[str, str] = {}
    homeless: list[str] = []
    taken: dict[str, str] = {}
    bare = False
    for name in stored:
        plain = family.respell(name[len(taken_off) :])
        found = added + plain
        if not known(found) and added and not plain.startswith(added):
            found = plain
        if not known(found):
            spellings = (name, name[len(taken_off) :], plain, added + plain)
            if not any(re.fullmatch(buffer, s) for s in spellings for buffer in family.buffers):
                homeless.append(name)
            continue
        if found in taken:
            if taken_off or added:
                return None
            raise FileError(
                f"{folder}: {shown(name)} and {shown(taken[found])} are two names of {found}; "
                "keep one"
            )
        names[name], taken[found] = found, name
        bare = bare or found != plain
    return Placed(names, tuple(homeless), bare)


def _shared_prefixes(stored: Collection[str]) -> list[str]:
    """What stands in front of every name, whole parts of it, shortest first.

    >>> _shared_prefixes(["a.b.w", "a.b.c"])
    ['a.', 'a.b.']
    """
    if not stored:
        return []
    first, last = min(stored).split("."), max(stored).split(".")
    found = []
    for n in range(1, min(len(first), len(last), _DEEPEST + 1)):
        if first[:n] != last[:n]:
            break
        found.append(".".join(first[:n]) + ".")
    return found
