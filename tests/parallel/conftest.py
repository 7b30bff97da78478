"""The process from which the ranks of all tests are forked."""

from __future__ import annotations

import multiprocessing
import multiprocessing.forkserver

import pytest

from regard.parallel.spawn import PRELOADED


@pytest.fixture(scope="session", autouse=True)
def process_to_fork_from() -> None:
    """Start it with dynamo, too: `torch.optim` imports it in each rank that trains, which takes a
    second.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([*PRELOADED, "torch._dynamo"])
    multiprocessing.forkserver.ensure_running()
