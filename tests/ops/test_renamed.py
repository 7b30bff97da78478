"""Old names of the operations: they work for one release, with a warning that says the new name."""

from __future__ import annotations

import pytest
import torch

import regard
import regard.ops.selection
import regard.ops.softmax
from regard import Span
from regard.ops.selection import NSABlocks, block_layout, selection_mask

RENAMED = {
    regard.memory: {
        "Compressed": "CompressiveState",
        "Read": "MemoryRead",
        "sigma": "elu_plus_one",
    },
    regard.ops.selection: {"Order": "BlockLayout", "order": "block_layout", "top": "top_k_mask"},
    regard.ops.softmax: {
        "Options": "AttentionOptions",
        "Result": "KernelResult",
        "Work": "WorkEstimate",
    },
}


@pytest.mark.parametrize(
    "module, old", [(module, old) for module, names in RENAMED.items() for old in names], ids=str
)
def test_an_old_name_is_the_new_object(module: object, old: str) -> None:
    new = RENAMED[module][old]  # type: ignore[index]
    with pytest.warns(DeprecationWarning, match=f"{old} is now .*{new}; "):
        assert getattr(module, old) is getattr(module, new)
    assert old not in module.__all__  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    "old, new",
    [
        ("held", "occupied"),
        ("filled", "token_counts"),
        ("number", "block_numbers"),
        ("lay", "to_position_order"),
        ("split", "to_blocks"),
        ("own", "block_of"),
    ],
)
def test_old_attributes_of_a_block_layout(old: str, new: str) -> None:
    layout = regard.ops.selection.block_layout(Span(0, 5), 2)
    with pytest.warns(DeprecationWarning, match=f"BlockLayout.{old} is now BlockLayout.{new}; "):
        value = getattr(layout, old)
    if isinstance(value, torch.Tensor):
        assert torch.equal(value, getattr(layout, new))
    else:
        assert value == getattr(layout, new)


def test_the_old_attribute_of_a_memory_read() -> None:
    read = regard.memory.MemoryRead(torch.zeros(1), torch.ones(1))
    assert read._fields == ("values", "has_memory")
    with pytest.warns(DeprecationWarning, match="MemoryRead.found is now MemoryRead.has_memory; "):
        assert read.found is read.has_memory  # type: ignore[attr-defined]


def test_the_old_parameter_of_a_selection_mask() -> None:
    q, k = torch.randn(1, 1, 4, 2), torch.randn(1, 1, 2, 2)
    sizes = NSABlocks(compress=2, stride=2, select=2, count=3, window=2)
    layout, at = block_layout(Span(0, 4), 2), torch.tensor([[1, 3]])
    options = {"sizes": sizes, "q_positions": Span(0, 4), "k_positions": at}
    new = selection_mask(q, k, layout=layout, **options)  # type: ignore[arg-type]
    with pytest.warns(DeprecationWarning, match="laid=.* is now .*layout="):
        old = selection_mask(q, k, laid=layout, **options)
    assert torch.equal(*(x.block(Span(0, 4), Span(0, 4)) for x in (old, new)))
