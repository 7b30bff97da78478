"""A kernel, a compared mechanism, a claim, a task, a peer and a word, each added as the row of
CONTRIBUTING's table says: in a copy of the repository, whose own suites then accept them, and which
refuse them while the entry that the row asks for is missing.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

TOYS = Path(__file__).parent / "toys" / "tables"

Edit = tuple[str, str, str]
"""A file, a text in it, and what stands in its place."""

HOMES = {
    "whole_rows_kernel.py": "src/regard/ops/softmax/whole_rows.py",
    "counting_claim.py": "experiments/counting.py",
    "reverse_task.py": "src/regard/train/tasks/reverse_task.py",
    "einsum_peer.py": "benchmarks/einsum.py",
}
"""A file of the toys -> the one file that its row asks for."""

ENTRIES: list[Edit] = [
    # a softmax kernel
    (
        "src/regard/ops/softmax/dispatch.py",
        "    ReferenceKernel(),\n)",
        "    ReferenceKernel(),\n    WholeRowsKernel(),\n)",
    ),
    (
        "src/regard/ops/softmax/dispatch.py",
        "from regard.ops.softmax.sdpa import",
        (
            "from regard.ops.softmax.whole_rows import WholeRowsKernel\n"
            "from regard.ops.softmax.sdpa import"
        ),
    ),
    (
        "pyproject.toml",
        '    "regard.ops.softmax.reference",\n',
        '    "regard.ops.softmax.reference",\n    "regard.ops.softmax.whole_rows",\n',
    ),
    # a mechanism that is always compared
    (
        "src/regard/compare/mechanisms.py",
        '    "mqa": "mqa",\n',
        ('    "mqa": "mqa",\n    "gated": "gated",\n'),
    ),
    # a claim, in a new file
    ("experiments/__init__.py", "    dropout,\n", "    counting,\n    dropout,\n"),
    (
        "experiments/__init__.py",
        "        *embeddings.CLAIMS,\n",
        "        *embeddings.CLAIMS,\n        *counting.CLAIMS,\n",
    ),
    # a task
    (
        "src/regard/train/tasks/__init__.py",
        "from regard.train.tasks.recall_tasks import",
        (
            "from regard.train.tasks.reverse_task import REVERSE\n"
            "from regard.train.tasks.recall_tasks import"
        ),
    ),
    ("src/regard/train/tasks/__init__.py", "MQAR, PASSKEY)\n", "MQAR, PASSKEY, REVERSE)\n"),
    # a peer
    (
        "benchmarks/cases.py",
        "from benchmarks import architectures, attention_peers, engines,",
        "from benchmarks import architectures, attention_peers, einsum, engines,",
    ),
    (
        "benchmarks/cases.py",
        "    attention_peers.X_TRANSFORMERS,\n)",
        "    attention_peers.X_TRANSFORMERS,\n    einsum.ATTENTION,\n)",
    ),
    # a word
    (
        "src/regard/notation.py",
        '    "window": Entry(',
        (
            '    "widget": Entry("A thing that stands for any other.", ("gadget",)),\n'
            '    "window": Entry('
        ),
    ),
]
"""What the rows say under "you enter it in", in the package."""

DEMANDED: list[Edit] = [
    (
        "tests/ops/softmax/test_contract.py",
        '    "gemm": 85,\n    "reference": 105,\n}\nLEAST_GRADIENTS',
        '    "gemm": 85,\n    "reference": 105,\n    "whole-rows": 105,\n}\nLEAST_GRADIENTS',
    ),
    (
        "tests/ops/softmax/test_contract.py",
        '    "gemm": 85,\n    "reference": 105,\n}\n"""',
        '    "gemm": 85,\n    "reference": 105,\n    "whole-rows": 105,\n}\n"""',
    ),
    ("src/regard/cli/train.py", '"mqar", "passkey")\n', '"mqar", "passkey", "reverse")\n'),
    (
        "tests/compare/test_mechanisms.py",
        '    softmax = {"mha", ',
        '    softmax = {"mha", "gated", ',
    ),
    (
        "tests/experiments/planted.py",
        '    "features": features,\n',
        '    "features": features,\n    "counting": lambda: {"seen": [1, 2, 3, 4]},\n',
    ),
    (
        "tests/experiments/planted.py",
        '    ("image-text", ("image",), 64, LIMITS),\n',
        '    ("image-text", ("image",), 64, LIMITS),\n    ("counting", ("seen", 3), 5, NO),\n',
    ),
]
"""What the rows say under "the suite that finds it": without it, the suites fail."""

SUITES = {
    "tests/ops/softmax/test_contract.py": "whole-rows",
    "tests/compare/test_mechanisms.py": "default_set or other_sizes",
    "tests/experiments/test_rules.py": "counting or every_claim",
    "tests/train/tasks/test_tasks.py": "reverse",
    "tests/train/tasks/test_run.py": "list_of_tasks",
    "tests/benchmarks/test_peers.py": "einsum or unique or every_kernel",
    "tests/test_notation.py": "",
}
"""A suite of the repository -> which of its tests are about the toys."""


def copy_of_the_repository(root: Path, folder: Path) -> Path:
    """The repository with the toys and their entries in the package, and nothing for the suites."""
    for name in ("src", "benchmarks", "experiments", "tests"):
        ignored = shutil.ignore_patterns("__pycache__", ".*cache*")
        shutil.copytree(root / name, folder / name, ignore=ignored)
    (folder / "docs").mkdir()
    for name in ("pyproject.toml", "docs/seeds.md"):
        shutil.copy(root / name, folder / name)
    for toy, home in HOMES.items():
        shutil.copy(TOYS / toy, folder / home)
    enter(folder, ENTRIES)
    return folder


def enter(folder: Path, entries: list[Edit]) -> None:
    """Make the entries of a table."""
    for name, before, after in entries:
        text = (folder / name).read_text(encoding="utf-8")
        if text.count(before) != 1:
            raise ValueError(f"{name} has {text.count(before)} times {before!r}")
        (folder / name).write_text(text.replace(before, after), encoding="utf-8")


def failures(folder: Path) -> tuple[set[str], int]:
    """The tests about the toys that fail, and how many pass."""
    code = (
        "import sys, pytest\nfrom tests.surface.test_adding_to_the_tables import Chosen, SUITES\n"
        "sys.exit(pytest.main([*SUITES, '-q', '-n', '0', '-p', 'no:cacheprovider', '-rfE', "
        "'--nightly', '--no-header', '--tb=no'], plugins=[Chosen()]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": f"{folder / 'src'}{os.pathsep}{folder}"},
        capture_output=True,
        text=True,
        check=False,
    )
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed, done.stdout + done.stderr
    found = set(re.findall(r"^(?:FAILED|ERROR) \S+?::(\S+)", done.stdout, re.MULTILINE))
    return found, int(passed[1])


class Chosen:
    """A plugin: of the suites, only the tests about the toys are run."""

    def pytest_collection_modifyitems(
        self, config: pytest.Config, items: list[pytest.Item]
    ) -> None:
        """Leave out the others."""
        names = {Path(config.rootpath) / suite: words for suite, words in SUITES.items()}
        items[:] = [
            item
            for item in items
            if any(word in item.name for word in names[item.path].split(" or "))
        ]


@pytest.mark.full
def test_what_the_rows_say_is_enough_and_is_needed(root: Path, tmp_path: Path) -> None:
    folder = copy_of_the_repository(root, tmp_path)
    missing, _ = failures(folder)
    assert missing == {
        "test_each_kernel_runs_its_cells[whole-rows-forward]",
        "test_each_kernel_runs_its_cells[whole-rows-gradients]",
        "test_the_default_set",
        "test_the_list_of_tasks",
        "test_every_claim_is_listed_under_its_id_and_names_a_section_of_a_note",
        "test_the_page_of_the_notes_lists_the_lines_of_every_claim",
    }
    enter(folder, DEMANDED)
    page = (folder / "docs" / "seeds.md").read_text(encoding="utf-8")
    (like,) = re.findall(r"^\| `features` \|.*\n", page, re.MULTILINE)
    enter(folder, [("docs/seeds.md", like, like + like.replace("features", "counting"))])
    left, passed = failures(folder)
    assert left == set()
    assert passed > 250
