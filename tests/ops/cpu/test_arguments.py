"""The structs of arguments: what Python packs is what the C++ compiler lays out."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from regard.ops.cpu.arguments import MAX_RUNS, StructLayout, _structs, struct_layout
from regard.ops.cpu.instruction_sets import SOURCES
from tests.ops.cpu.compiled import BUILD, compiler, run

HEADER = (SOURCES / "arguments.h").read_text("utf-8")
NAMES = sorted({*_structs()} - {"Array"})
LAYOUTS = {name: struct_layout(name) for name in NAMES if _structs()[name][0].name == "taken"}


def test_every_struct_of_the_header_is_known() -> None:
    written = re.findall(r"\bstruct\s+(\w+)", re.sub(r"//.*", "", HEADER))
    assert sorted({*written} - {"Array"}) == NAMES
    assert {"Gemv", "RmsNorm", "GatedProduct"} < LAYOUTS.keys()


def test_every_line_of_a_struct_is_read() -> None:
    """What the pattern of a field does not match would be left out in silence."""
    text = re.sub(r"//.*", "", HEADER)
    for name, body in re.findall(r"^struct (\w+)[^{;]*\{(.*?)^\};", text, re.MULTILINE | re.DOTALL):
        base = (
            len(_structs()[match[1]])
            if (match := re.search(rf"struct {name} : (\w+)", text))
            else 0
        )
        assert len(_structs()[name]) - base == body.count(";"), name


def assertions(name: str, dtype: np.dtype[Any]) -> list[str]:
    """C++ that compiles only if a struct has this layout."""
    lines = [f'static_assert(sizeof({name}) == {dtype.itemsize}, "{name}");']
    for field in _structs()[name]:
        offset = dtype.fields[field.parts[0].name][1]  # type: ignore[index]
        lines.append(f'static_assert(offsetof({name}, {field.name}) == {offset}, "{field.name}");')
    return lines


def compiles(lines: list[str], folder: Path) -> None:
    source = folder / "layouts.cpp"
    source.write_text("\n".join(["#include <cstddef>", '#include "arguments.h"', *lines]) + "\n")
    options = ["-std=c++17", "-fsyntax-only", "-Wno-invalid-offsetof", "-I", SOURCES]
    run(*compiler(), *options, source)


def test_the_compiler_lays_out_what_python_packs(tmp_path: Path) -> None:
    lines = [f"static_assert(kMaxRuns == {MAX_RUNS});"]
    for name in NAMES:
        lines += assertions(name, struct_layout(name).dtype)
    compiles(lines, tmp_path)


def test_another_layout_is_noticed(tmp_path: Path) -> None:
    """A negative control: two fields in the other order."""
    wrong = [x.replace(", M)", ", N)") for x in assertions("Gemv", struct_layout("Gemv").dtype)]
    with pytest.raises(AssertionError, match="static assertion failed"):
        compiles(wrong, tmp_path)


EVERY = struct_layout("DecodePlain"), struct_layout("DecodeQuantized")


def given(layout: StructLayout) -> dict[str, Any]:
    """An argument for each field, all different."""
    made: dict[str, Any] = {}
    for i, field in enumerate(layout.fields):
        size = sum(part.count for part in field.parts)
        if field.dtype is not None:
            made[field.name] = torch.ones(i + 1, 2).to(field.dtype)
        elif size > 1:
            made[field.name] = tuple(range(100 * i, 100 * i + size))
        else:
            made[field.name] = i + 0.5 if field.parts[0].kind == "d" else -i
    return made


@pytest.mark.parametrize("layout", EVERY, ids=["plain", "quantized"])
def test_a_record_is_what_its_fields_say(layout: StructLayout) -> None:
    arguments = given(layout)
    packed = layout.pack(**arguments)
    read = np.frombuffer(packed, layout.dtype)[0]
    assert (read["taken"], read["done"]) == (0, 0)
    for field in layout.fields[2:]:
        value = arguments[field.name]
        numbers = [x for part in field.parts for x in np.atleast_1d(read[part.name]).tolist()]
        if field.dtype is not None:
            assert numbers == [value.data_ptr(), 1, 1, *value.shape]
        else:
            assert numbers == [*value] if isinstance(value, tuple) else numbers == [value]
    assert len(packed) * 8 == layout.dtype.itemsize


def test_numbers_alone_are_given_in_the_order_of_the_list() -> None:
    layout = struct_layout("RmsNorm")
    numbers = dict(
        zip(("R", "M", "x", "w", "y", "eps", "offset"), (1, 2, 3, 4, 5, 0.5, 1.0), strict=True)
    )
    assert layout.pack_numbers(*numbers.values()) == layout.pack(**numbers)
    with pytest.raises(Exception, match="expected 9 items"):
        layout.pack_numbers(5)


def test_what_is_missing_or_too_long_is_an_error() -> None:
    arguments = given(EVERY[0])
    with pytest.raises(KeyError, match="'v'"):
        EVERY[0].pack(**{name: x for name, x in arguments.items() if name != "v"})
    with pytest.raises(Exception, match="expected"):
        EVERY[0].pack(**arguments | {"k": (1, 2, 3)})


def test_flags_and_machines_are_those_of_the_library() -> None:
    from regard.ops.cpu.instruction_sets import INSTRUCTION_SETS

    compiled = {name for sets in BUILD.INSTRUCTION_SETS.values() for name in sets}
    assert compiled == {*INSTRUCTION_SETS}
