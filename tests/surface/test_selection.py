"""Which tests the quick run takes: what is marked full is left out, but for the cases that stand
for the others.
"""

from __future__ import annotations

import importlib
from collections import Counter
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import regard
from experiments import CLAIMS
from regard import biases, masks, scores
from regard.cli.app import COMMANDS
from regard.configs import CONFIGS
from regard.nn.variants.registry import VARIANTS
from regard.ops.softmax import dispatch
from regard.train.tasks import TASKS
from tests import selection


@dataclass(eq=False)
class Item:
    nodeid: str
    marks: dict[str, Any] | None = field(default_factory=dict)
    nightly: dict[str, Any] | None = None
    callspec: Any = field(default_factory=lambda: SimpleNamespace(params={"case": object()}))

    def get_closest_marker(self, name: str) -> Any:
        found = {"full": self.marks, "nightly": self.nightly}[name]
        return None if found is None else SimpleNamespace(args=(), kwargs=found)


def quick(*items: Item) -> list[str]:
    return [item.nodeid for item in selection.quick(items)]  # type: ignore[arg-type]


def cases(n: int, **marks: Any) -> list[Item]:
    return [Item(f"a.py::test_a[{i}]", marks) for i in range(n)]


def test_what_is_not_marked_runs() -> None:
    assert quick(Item("a.py::test_a", None), Item("a.py::test_b")) == ["a.py::test_a"]


@pytest.mark.parametrize(
    ("n", "keep", "kept"),
    [
        (10, 1, [7]),
        (10, 2, [2, 7]),
        (10, 3, [2, 5, 8]),
        (2, 5, [0, 1]),
        (3, 3, [0, 1, 2]),
        (3, 0, []),
    ],
)
def test_some_cases_stand_for_the_others(n: int, keep: int, kept: list[int]) -> None:
    assert quick(*cases(n, keep=keep)) == [f"a.py::test_a[{i}]" for i in kept]


def test_tests_over_the_same_cases_keep_different_ones() -> None:
    kept = [
        quick(*(Item(f"a.py::test_{name}[{i}]", {"keep": 2}) for i in range(20)))[0].partition("[")
        for name in "abcdefgh"
    ]
    assert len({number for _, _, number in kept}) > 3


@pytest.mark.parametrize("sizes", [(5, 4, 3), (7,), (2, 9), (1, 1)])
def test_each_value_of_each_parameter_occurs_in_few_cases(sizes: tuple[int, ...]) -> None:
    items = [
        Item(
            f"a.py::test_a[{at}]",
            {"keep": "each"},
            callspec=SimpleNamespace(params=dict(enumerate(at))),
        )
        for at in product(*map(range, sizes))
    ]
    found = selection.quick(items)  # type: ignore[arg-type]
    for i, n in enumerate(sizes):
        assert {x.callspec.params[i] for x in found} == {*range(n)}  # type: ignore[attr-defined]
    assert len(found) == max(sizes)


def test_the_full_run_has_its_own_cases_and_those_of_the_quick_run() -> None:
    items = [Item(f"a.py::test_a[{i}]", {"keep": ["3", "7"]}, {"keep": 5}) for i in range(20)]
    items += [Item("a.py::test_b", None), Item("a.py::test_c", None, {}), Item("a.py::test_d", {})]
    full = [item.nodeid for item in selection.full(items)]  # type: ignore[arg-type]
    assert quick(*items) == ["a.py::test_a[3]", "a.py::test_a[7]", "a.py::test_b"]
    assert {*quick(*items), "a.py::test_d"} < {*full}
    assert 5 + 2 <= len(full) <= 7 + 2
    assert "a.py::test_c" not in full


def test_the_full_run_takes_few_of_many_cases_unless_a_mark_says_how_many() -> None:
    items = [Item(f"a.py::test_a[{i}]", {"keep": 2}) for i in range(100)]
    items += [Item(f"a.py::test_b[{i}]", {"keep": 2}, {"keep": 30}) for i in range(100)]
    items += [Item(f"a.py::test_c[{i}]", None) for i in range(100)]
    items += [Item(f"a.py::test_d[{i}]", {}) for i in range(3)]
    full = Counter(x.nodeid.partition("[")[0] for x in selection.full(items))  # type: ignore[arg-type]
    few, many = selection.FULL_CASES, 30
    assert few <= full["a.py::test_a"] <= few + 2
    assert many <= full["a.py::test_b"] <= many + 2
    assert (full["a.py::test_c"], full["a.py::test_d"]) == (100, 3)


def test_the_full_run_takes_each_value_of_each_parameter_if_few_cases_have_all() -> None:
    values = [*product(range(selection.FULL_CASES), "abc")]
    items = [
        Item(f"a.py::test_a[{number}-{letter}]", {}, callspec=SimpleNamespace(params=params))
        for number, letter in values
        for params in [{"number": number, "letter": letter}]
    ]
    full = [x.callspec.params for x in selection.full(items)]  # type: ignore[arg-type,attr-defined]
    assert [x["number"] for x in full] == [*range(selection.FULL_CASES)]
    assert {x["letter"] for x in full} == {*"abc"}


def test_the_cases_of_each_test_are_counted_apart() -> None:
    other = [Item(f"a.py::test_b[{i}]", {"keep": 1}) for i in range(3)]
    assert quick(*cases(3, keep=1), *other) == ["a.py::test_a[2]", "a.py::test_b[1]"]


def test_cases_are_kept_by_a_word_of_their_ids() -> None:
    items = [
        Item(f"a.py::test_a[{x}]", {"keep": ["llama", "t5-x", "gpt"]})
        for x in ("llama", "llama3", "1-t5-x", "t5-2-x", "t5-xl")
    ]
    assert quick(*items) == ["a.py::test_a[llama]", "a.py::test_a[1-t5-x]"]
    kept_nothing = selection.words_that_keep_nothing(items)  # type: ignore[arg-type]
    assert kept_nothing == ["a.py::test_a: gpt"]


def test_only_some_cases_may_be_marked() -> None:
    assert quick(Item("a.py::test_a[0]", None), Item("a.py::test_a[1]", {})) == ["a.py::test_a[0]"]
    assert quick(Item("a.py::test_a[0]", {}), Item("a.py::test_a[1]", None)) == ["a.py::test_a[1]"]


def test_a_misspelt_mark_is_an_error() -> None:
    with pytest.raises(pytest.UsageError, match=r"test_a\[0\]: full takes keep=, not \{'kep'\}"):
        quick(*cases(2, kep=1))
    with pytest.raises(pytest.UsageError, match=r"test_a\[0\]: keep is 'all', not 'each' or a"):
        quick(*cases(2, keep="all"))


# what the quick run touches

PACKAGES = [
    *("masks", "biases", "scores", "positions", "linear", "memory", "caches", "nn", "inspect"),
    *("models", "train", "compare", "cost", "ops.softmax", "audit", "parallel"),
]


ANSWERS = {
    *("biases.Bias", "positions.RopeFrequencies", "models.BeamCompletion", "models.Generation"),
    *(
        "models.PrefixCache",
        "cost.Description",
        "cost.Quantity",
    ),
    *(
        "nn.BlockCaches",
        "nn.Unprojected",
        "memory.MemoryRead",
        "masks.Refusal",
        "train.TrainResult",
    ),
    *("inspect.Audit", "inspect.Finding", "inspect.Measures", "inspect.RowSums"),
    *("inspect.Sampled", "inspect.RecordingOptions", "inspect.Tile", "inspect.TopKeys"),
    *("inspect.ComputationStep", "inspect.MAX_PATTERN_TOKENS", "ops.softmax.AttentionOptions"),
    *("audit.PassedCheck", "audit.NotTried", "parallel.ParallelPlan"),
    *("inspect.Circuit", "inspect.Edge", "inspect.HeadCircuits", "inspect.Probe"),
    "inspect.SparseAutoencoder",
}
"""Names that a test has no need to write: what functions give back, bases and protocols, one
limit.
"""


def kinds(module: ModuleType, base: type) -> list[str]:
    """The public classes of a module below a base."""
    found = {name: getattr(module, name) for name in module.__all__}
    return [
        n for n, x in found.items() if isinstance(x, type) and issubclass(x, base) and x != base
    ]


def features() -> dict[str, str]:
    """What regard offers -> where in the tests it must be named: each public name anywhere, each
    kernel, mechanism, family, claim, task and command in the tests of its own.
    """
    found = {name: "tests" for name in regard.__all__ if not name.startswith("_")}
    for package in PACKAGES:
        module = importlib.import_module(f"regard.{package}")
        found |= {f"{package}.{name}": "tests" for name in module.__all__}
    homes = {
        "masks": kinds(masks, masks.Mask),
        "biases": kinds(biases, biases.Bias),
        "scores": kinds(scores, scores.ScoreRule),
        "ops/softmax": [kernel.name for kernel in dispatch.KERNELS],
        "nn": [*VARIANTS],
        "parity": sorted({*CONFIGS} - {"regard"}),
        "experiments": [*CLAIMS],
        "train": [*TASKS],
    }
    for home, names in homes.items():
        found |= {f"{home}.{name}": f"tests/{home}" for name in names}
    found |= {f"cli.{name}": f"tests/cli/test_{name}.py" for name in COMMANDS}
    return {name: home for name, home in found.items() if name not in ANSWERS}


def test_the_quick_run_touches_every_feature(request: pytest.FixtureRequest) -> None:
    items = request.config.stash[selection.COLLECTED]
    if len({item.path for item in items}) < 200:
        pytest.skip("only some files were collected")
    assert len(features()) > 300
    assert selection.untouched(features(), selection.quick(items)) == []
    assert selection.words_that_keep_nothing(items) == []


def test_a_feature_that_the_quick_run_leaves_out_is_found(request: pytest.FixtureRequest) -> None:
    """The negative control: this file alone names neither kernels nor commands."""
    mine = [x for x in request.config.stash[selection.COLLECTED] if x.path == Path(__file__)]
    command = f"cli.{next(x for x in COMMANDS if x not in PACKAGES)}"  # not written here
    wanted = {"Item": "tests/surface", "cpu": "tests/ops", command: "tests/surface"}
    assert selection.untouched(wanted, mine) == ["cpu", command]
    assert selection.untouched(wanted, []) == [*wanted]
