"""Registries: who may have a name, what is found, what is forgotten."""

from __future__ import annotations

from abc import ABC, abstractmethod

import pytest

from regard.errors import ArgumentError
from regard.registry import Registry


def kind(name: str, module: str = "elsewhere") -> type[object]:
    return type(name, (), {"__module__": module})


def test_a_name_of_the_package_stays_its_own() -> None:
    found: Registry[object] = Registry("mask")
    ours, theirs, later = kind("Ours", "regard.masks"), kind("Theirs"), kind("Later")
    found.register("a", ours)
    with pytest.raises(ArgumentError) as error:
        found.register("a", theirs)
    assert str(error.value) == (
        "elsewhere.Theirs cannot be the mask 'a', because regard.masks.Ours has this name; set "
        '`kind = "..."` in the class, or rename the class'
    )
    assert found.get("a") is ours
    found.register("b", theirs)
    found.register("b", later)  # a notebook that runs a cell again
    assert found.get("b") is later
    again = kind("Ours", "regard.masks")
    found.register("a", again)
    assert found.get("a") is again


def test_what_starts_like_the_package_is_not_of_it() -> None:
    found: Registry[object] = Registry("mask")
    found.register("a", kind("A", "regard.masks"))
    with pytest.raises(ArgumentError, match=r"regardless\.A cannot be the mask 'a'"):
        found.register("a", kind("A", "regardless"))


def test_an_unknown_name_is_refused_with_the_list() -> None:
    found: Registry[object] = Registry("cache")
    for name in ("growing", "fixed", "ring"):
        found.register(name, kind(name))
    with pytest.raises(ArgumentError) as error:
        found.find("rings")
    assert str(error.value) == (
        "unknown cache \"rings\"; did you mean 'ring' or 'growing'? known: growing, fixed, ring"
    )
    with pytest.raises(ArgumentError, match='unknown cache "ring"; known: fixed'):
        found.find("ring", ["fixed"])
    assert found.find("ring", ["ring"]) is found.get("ring")


def test_abstract_and_private_classes_are_not_found() -> None:
    class Abstract(ABC):
        """No rule yet."""

        @abstractmethod
        def rule(self) -> None:
            """A rule."""

    found: Registry[object] = Registry("mask")
    for made in (Abstract, kind("_Private"), kind("Public")):
        found.register(made.__name__, made)
    assert [name for name, _ in found] == ["Public"]


def test_what_is_entered_for_a_while_is_forgotten() -> None:
    found: Registry[object] = Registry("mask")
    found.register("a", kind("A"))

    def fail() -> None:
        with found.temporary():
            found.register("b", kind("B"))
            found.remove(found.find("a"))
            assert [name for name, _ in found] == ["b"]
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [name for name, _ in found] == ["a"]
