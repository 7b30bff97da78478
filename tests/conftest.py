"""What every test has: a pinned environment, checked annotations, a seed, poisoned uninitialized
memory, one thread, no state left behind.
"""

from __future__ import annotations

import ast
import gc
import os
import random
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

# small shapes: threads cost more than they give, and a process that has some cannot be forked
os.environ["OMP_NUM_THREADS"] = "1"

import hypothesis
import numpy as np
import pytest
import torch
from torch.utils._device import _device_constructors

from tests import annotations, process_environment, selection

process_environment.pin()
# to look for garbage among what is imported and collected, all of which stays, takes a fourth of
# the time that they take
gc.disable()

if sys.version_info < (3, 11, 8):
    # CPython counts the depth of a syntax tree in one place for all threads (python/cpython, issue
    # 106905), so threads that parse at once can fail: they take turns
    _parse, _turn = ast.parse, threading.RLock()

    def _parse_alone(*args: Any, **options: Any) -> Any:
        with _turn:
            return _parse(*args, **options)

    ast.parse = _parse_alone

if not torch.backends.cuda.is_built():
    # torch.manual_seed notes three times, with the whole stack, how it was called, for devices that
    # may be found later: that takes most of the time between two short tests
    for module in (torch.cuda.random, torch.xpu.random, torch.mtia):
        module._lazy_call = lambda *_, **__: None  # type: ignore[attr-defined]

for package in ("regard", "benchmarks", "experiments"):
    annotations.install(package)
torch.set_num_threads(int(os.environ.get("REGARD_TEST_THREADS", "1")))
ROOT = Path(__file__).parents[1]

EXAMPLES = int(os.environ.get("REGARD_EXAMPLES", "25"))
hypothesis.settings.register_profile(
    "regard",
    derandomize=True,  # the suite says the same twice
    deadline=None,  # a loaded machine is not a failure
    max_examples=EXAMPLES,
    database=None,
    suppress_health_check=[
        hypothesis.HealthCheck.too_slow,
        hypothesis.HealthCheck.function_scoped_fixture,
    ],
)
hypothesis.settings.register_profile(
    "quick", hypothesis.settings.get_profile("regard"), max_examples=min(10, EXAMPLES)
)


FULL = (
    "run the tests marked full, too: compilation, training, every family, browser pages, all "
    "doctests"
)
NIGHTLY = "run all tests, those marked nightly, too: hours"
LEFT_OUT = pytest.StashKey[int]()


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--full", action="store_true", help=FULL)
    parser.addoption("--nightly", action="store_true", help=NIGHTLY)


def runs_all(config: pytest.Config) -> bool:
    """Whether nothing is left out: asked for by --nightly, or by naming tests (`::`, -k or -m)."""
    named = config.option.keyword or config.option.markexpr or any("::" in x for x in config.args)
    return bool(config.option.nightly or named)


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Leave out what is marked nightly and, without --full, what is marked full."""
    config.stash[selection.COLLECTED] = [*items]
    if runs_all(config):
        return
    chosen = {*(selection.full if config.option.full else selection.quick)(items)}
    left_out = [item for item in items if item not in chosen]
    items[:] = [item for item in items if item in chosen]
    config.hook.pytest_deselected(items=left_out)
    if hasattr(config, "workeroutput"):  # a worker of xdist tells the process that reports
        config.workeroutput["left out"] = len(left_out)
    config.stash[LEFT_OUT] = len(left_out)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    """Show in the last line how many tests the workers left out, as a run in one process does."""
    count = getattr(node, "workeroutput", {}).get("left out", 0)
    reporter = node.config.pluginmanager.get_plugin("terminalreporter")
    if count and reporter is not None:  # every worker collects the same tests
        reporter.stats["deselected"] = [SimpleNamespace()] * count
        node.config.stash[LEFT_OUT] = count


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if count := config.stash.get(LEFT_OUT, 0):
        longer = "nightly" if config.option.full else "full"
        terminalreporter.write_line(f"{count} tests wait for a longer run: `pytest --{longer}`")


def pytest_collection_finish() -> None:
    """What was imported and collected stays: the garbage collector need not look at it again, and
    looks at what is new less often.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(10_000)
    gc.enable()


def pytest_configure(config: pytest.Config) -> None:
    whole = config.option.full or runs_all(config)
    hypothesis.settings.load_profile("regard" if whole else "quick")
    annotations.sampled = not runs_all(config)
    # `with torch.device(...)` knows constructors by identity: let it learn the real ones first
    _device_constructors()
    for owner, name in (
        (torch, "empty"),
        (torch, "empty_like"),
        (torch, "empty_strided"),
        (torch.Tensor, "new_empty"),
    ):
        setattr(owner, name, _poisoned(getattr(owner, name)))


def _poisoned(make: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """Uninitialized memory holds NaN (the largest number for integers): what reads it shows."""

    def make_and_fill(*args: Any, **kwargs: Any) -> torch.Tensor:
        x = make(*args, **kwargs)
        if torch.compiler.is_compiling() or x.is_meta:
            return x
        with torch.no_grad():
            if x.is_floating_point() or x.is_complex():
                x.fill_(float("nan"))
            elif x.dtype is not torch.bool and not x.is_quantized:
                x.fill_(torch.iinfo(x.dtype).max)
        return x

    make_and_fill.poisoned = True  # type: ignore[attr-defined]
    return make_and_fill


@pytest.fixture(autouse=True)
def clean_state() -> Iterator[None]:
    """Each test starts from the same seed, and leaves torch's global switches as it found them."""
    random.seed(0)
    np.random.seed(0)  # noqa: NPY002  (the global state is what must be pinned)
    torch.manual_seed(0)
    before = _switches()
    yield
    if "torch._dynamo" in sys.modules:  # what one test compiled counts against no other
        torch._dynamo.reset()
    after = _switches()
    torch.set_default_dtype(torch.float32)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    assert after == before, f"torch's switches were left changed: {before} -> {after}"


def _switches() -> tuple[Any, ...]:
    return (
        torch.get_default_dtype(),
        torch.is_grad_enabled(),
        torch.are_deterministic_algorithms_enabled(),
        torch.get_num_threads(),
        _autocast_depth(),
    )


def _autocast_depth() -> int:
    """How many autocast contexts are open. One that is never closed keeps its casts of weights for
    ever.
    """
    torch.autocast_increment_nesting()
    return int(torch.autocast_decrement_nesting())


@pytest.fixture
def root() -> Path:
    """The folder of the checkout: for tests that read the sources, the docs or the
    configuration.
    """
    return ROOT
