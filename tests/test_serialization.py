"""Objects as plain data and back: what is written, what is not, what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from regard.errors import ArgumentError
from regard.registry import Registry
from regard.serialization import NotSerializable, Serializable, from_data, to_data


@dataclass(frozen=True)
class Box(Serializable):
    """A field of each kind."""

    kind: ClassVar[str] = "box"

    number: float
    word: str = "a"
    many: tuple[Any, ...] = ()
    inner: Box | None = None
    tensor: Tensor | None = None
    made: int = field(default=0, init=False)


@dataclass(frozen=True)
class Empty(Serializable):
    """No field at all."""

    kind: ClassVar[str] = "empty"


@dataclass(frozen=True)
class Rule(Serializable):
    """A function."""

    kind: ClassVar[str] = "rule"

    function: Callable[[], None]


class Bare(Box):
    """No dataclass of its own."""


BOXES: Registry[Serializable] = Registry("box")
for _kind in (Box, Empty):
    BOXES.register(_kind.kind, _kind)


def written(x: Serializable, kept: dict[str, Tensor]) -> dict[str, object]:
    def keep(y: Tensor) -> str:
        kept[f"t{len(kept)}"] = y
        return f"t{len(kept) - 1}"

    return to_data(x, keep, lambda y: written(y, kept))


def read(data: object, kept: dict[str, Tensor]) -> Serializable:
    return from_data(BOXES, data, kept, lambda y: read(y, kept))


def test_every_kind_of_field_comes_back() -> None:
    x, kept = torch.ones(2), {}
    box = Box(1.5, "word", (1, None, (True, "b"), Box(2, tensor=x)), Box(3), x)
    data = written(box, kept)
    assert data == {
        "box": 1.5,
        "word": {"word": "word"},
        "many": [
            1,
            None,
            [True, {"word": "b"}],
            {"box": 2, "word": {"word": "a"}, "many": [], "tensor": "t0"},
        ],
        "inner": {"box": 3, "word": {"word": "a"}, "many": []},
        "tensor": "t1",
    }
    assert repr(read(data, kept)) == repr(box)
    assert written(Empty(), kept) == {"empty": None}
    assert read({"empty": None}, kept) == Empty()


def test_what_is_no_plain_data() -> None:
    with pytest.raises(NotSerializable, match="function cannot be stored as plain data"):
        written(Rule(lambda: None), {})
    with pytest.raises(NotSerializable, match="Bare is not a dataclass"):
        written(Bare(1), {})


@pytest.mark.parametrize(
    "data, error, message",
    [
        (3, ArgumentError, "a box is 3; it must be a JSON object"),
        ({}, ArgumentError, r"a box with \[\] is unknown; import the module"),
        ({"bag": 1}, ArgumentError, r"a box with \['bag'\] is unknown; .* Known: box, empty"),
        ({"box": 1, "size": 2}, TypeError, "unexpected keyword argument 'size'"),
        ({"box": 1, "tensor": "t9"}, KeyError, "t9"),
        ({"box": 1, "inner": {"bag": 1}}, ArgumentError, r"a box with \['bag'\] is unknown"),
    ],
)
def test_data_that_describes_nothing(data: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        read(data, {})
