"""Compiled code gets the address of a tensor through `regard.ops.cpu.arguments` only, which checks
its dtype, layout and device. Other modules compare where tensors are, and read nothing there.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

import regard
from regard.ops.cpu import arguments

PACKAGE = Path(regard.__file__).parent
DOOR = "ops/cpu/arguments.py"
COMPARED = {
    "audit/adapters/projections.py": "whether parameters are views of one storage",
    "audit/checks/calls.py": "whether two parameters are one",
    "caches/lazy_tensor.py": "a tensor that makes its numbers when asked: it has the method",
    "inspect/record/recorder.py": "whether values are the first part of keys",
    "integrations/pytorch/module_places.py": "whether keys are those of the last call",
    "models/packed_encoder.py": "whether a parameter has been moved",
    "nn/blocks/experts.py": "whether a parameter has been moved",
    "ops/softmax/operators.py": "whether an output is an input",
    "ops/softmax/sdpa.py": "whether keys and values are one tensor",
    "ops/softmax/triton/launch.py": "whether keys and values are one tensor",
    "train/checkpoints.py": "whether two names stand for one tensor",
}
"""Where else addresses are asked for, and what for: they are compared, none is read."""


def asks_for_addresses(source: str) -> bool:
    """Whether code calls `data_ptr`, defines it, or names it as text, as `getattr` would."""
    return any(
        (isinstance(x, ast.Attribute) and x.attr == "data_ptr")
        or (isinstance(x, ast.Constant) and x.value == "data_ptr")
        for x in ast.walk(ast.parse(source))
    )


def files() -> Iterator[str]:
    for path in sorted(PACKAGE.rglob("*.py")):
        name = path.relative_to(PACKAGE).as_posix()
        text = path.read_text("utf-8")
        if "data_ptr" in text and asks_for_addresses(text):
            yield name


def test_there_is_one_door() -> None:
    assert {*files()} == COMPARED.keys() | {DOOR}


def test_another_door_is_noticed() -> None:
    assert asks_for_addresses("run(x.data_ptr())")
    assert asks_for_addresses("map(Tensor.data_ptr, xs)")
    assert asks_for_addresses("getattr(x, 'data_ptr')()")
    assert not asks_for_addresses("'''the address `data_ptr()`'''\nx.data")


def test_the_door_is_closed_to_other_tensors() -> None:
    x = torch.ones(4, 6)
    assert arguments.address(x, torch.float32) == x.data_ptr()
    assert arguments.row_address(x[:, 2:], torch.float32) == x.data_ptr() + 8
    wrong = [x.double(), x[:, ::2], x.T, x.to("meta"), x.to_sparse(), x.half()]
    for y in wrong:
        with pytest.raises(regard.KernelRefusal, match="compiled code was given a"):
            arguments.address(y, torch.float32)
        with pytest.raises(regard.KernelRefusal, match="it reads float32 on a CPU"):
            arguments.row_address(y, torch.float32)


def test_memory_that_is_not_aligned_is_refused() -> None:
    memory = bytearray(41)
    x = torch.frombuffer(memory, dtype=torch.uint8)
    start = next(i for i in range(1, 8) if (x.data_ptr() + i) % 4)
    y = torch.frombuffer(memory, dtype=torch.float32, offset=start, count=8)
    for ask in (arguments.address, arguments.row_address):
        with pytest.raises(regard.KernelRefusal, match="contiguous"):
            ask(y, torch.float32)
