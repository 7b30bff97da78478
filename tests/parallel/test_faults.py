"""Faults between ranks: every rank is told by name, and none hangs."""

from __future__ import annotations

import time
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

import regard
from regard.errors import ArgumentError, ArgumentTypeError, ParallelError
from regard.parallel import Shards, attend, spawn
from tests.parallel import ranks

DIFFERENT = {
    "mask": "the ranks differ in the mask: causal on most, but causal & window(3) on rank 1",
    "dtype": "the ranks differ in the dtypes",
    "shards": "the ranks differ in the shards of the keys",
    "option": "the ranks differ in the options",
    "order": "the ranks differ in call: attend on most, but decode on rank 1",
}


@pytest.mark.full(keep=2)
@pytest.mark.parametrize("kind", DIFFERENT)
def test_every_rank_is_told_what_differs(kind: str) -> None:
    said = spawn(ranks.fault, 3, kind, timeout=20)
    for text in said:
        assert text.startswith("ArgumentError")
        assert DIFFERENT[kind] in text
        assert "rank 1" in text


def test_a_rank_that_ends_is_an_error_of_the_others() -> None:
    with pytest.raises(ParallelError, match="rank 1 of 3 failed") as error:
        spawn(ranks.fault, 3, "ends", timeout=20)
    assert "SystemExit" in str(error.value)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    "kind, stage, timeout",
    [
        ("killed", "keys and values failed at its step", 20),
        ("late", "attend failed at its hand", 3),
    ],
)
def test_a_killed_or_late_rank_is_an_error_that_names_rank_step_and_call(
    kind: str, stage: str, timeout: float, tmp_path: Path
) -> None:
    start = time.monotonic()
    with pytest.raises(ParallelError, match="of 3 failed"):
        spawn(ranks.fault_in_a_step, 3, tmp_path, kind, timeout=timeout)
    assert time.monotonic() - start < 120
    told = {path.name: path.read_text() for path in tmp_path.iterdir()}
    assert {"0", "2"} <= set(told)
    for rank in ("0", "2"):
        assert told[rank].startswith(f"ParallelError: rank {rank} of 3: {stage}")
        assert "Nothing was retried" in told[rank]


def test_an_error_comes_back_with_its_rank_and_traceback() -> None:
    # whichever rank fails first: the other one may still be joining the group, and then sees only
    # that its message failed
    told = r"rank [01] of 2 failed:\nTraceback(.|\n)*KeyError: 'no such mask'"
    with pytest.raises(ParallelError, match=told):
        spawn(ranks.decoding, 2, "no such mask", "plain", timeout=20)


def test_torch_distributed_must_run() -> None:
    q = torch.randn(1, 2, 4, 8)
    with pytest.raises(ArgumentError, match=r"torch\.distributed is not initialized"):
        attend(q, q, q, shards=Shards.even(4, 1))


@dataclass(frozen=True, eq=False)
class Places(regard.masks.Full):
    """A caller's own mask that depends on slots."""

    by_slot = True


def one_rank(rank: int) -> list[str]:
    """Calls that are refused before anything is sent."""
    q = torch.randn(1, 2, 4, 8)
    shards = Shards.even(4, 1)
    said = []
    for options in (
        {"shards": Shards.even(5, 1)},
        {"shards": Shards.even(4, 2)},
        {"shards": 4},
        {"shards": shards, "mask": regard.masks.Dense(torch.ones(4, 4, dtype=torch.bool))},
        {"shards": shards, "mask": torch.ones(4, 4, dtype=torch.bool)},
        {"shards": shards, "bias": regard.biases.DenseBias(torch.zeros(4, 4)[None, None])},
        {"shards": shards, "mask": Places()},
        {"shards": shards, "dropout": 0.5},
        {"shards": shards, "method": "ring"},
    ):
        try:
            attend(q, q, q, **options)  # type: ignore[arg-type]
        except (ArgumentError, ArgumentTypeError) as error:
            said.append(str(error))
        else:
            said.append("")
    return said


def test_arguments_that_do_not_fit_are_refused() -> None:
    (said,) = spawn(one_rank, 1)
    wanted = (
        "q has 4 tokens on rank 0, but its shard has 5",
        "the shards of q are for 2 ranks, but the group has 1",
        "the shards of q are int",
        "depends on the indices of one call's tensors",
        "depends on the indices of one call's tensors",
        "depends on the indices of one call's tensors",
        "depends on the indices of one call's tensors",
        "has no argument dropout",
        "method is 'ring'; it must be auto or one of exchange, gather, heads, both",
    )
    for text, message in zip(said, wanted, strict=True):
        assert message in text
