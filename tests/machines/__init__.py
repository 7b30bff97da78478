"""Other machines on which the suite must pass, as rows of a matrix: `python -m tests.machines`.

A row says how its machine differs from the developer's, which tests run on it, and why these. Its
process gets the row's environment; tests/process_environment.py then pins what the tests' texts
depend on, so each row also runs commands whose environment nobody pins.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

TEXTS = "what prints, draws or parses texts"
WRITERS = "what writes files"
NUMBERS = "what computes"
SHARED = "what counts processors, or starts threads and processes"
ALL = "the quick run"
TESTS = {
    TEXTS: (
        "tests/cli",
        "tests/view",
        "tests/docs/test_docs.py",
        "tests/surface/test_command_line.py",
        "tests/surface/test_language.py",
        "tests/surface/test_start.py",
    ),
    WRITERS: ("tests/files", "tests/models/checkpoint", "tests/train", "tests/cli/test_train.py"),
    NUMBERS: ("tests/ops", "tests/laws", "tests/models/generation"),
    SHARED: ("tests/laws/test_threads.py", "tests/ops/cpu", "tests/parallel", "tests/timing"),
    ALL: ("tests",),
}
BRIEF = {
    TEXTS: (
        "tests/cli/test_cost.py",
        "tests/cli/test_describe.py",
        "tests/cli/test_explain.py",
        "tests/cli/test_hostile.py",
        "tests/cli/test_show.py",
        "tests/surface/test_command_line.py",
        "tests/surface/test_language.py",
        "tests/view/test_figures.py",
    ),
    WRITERS: ("tests/files", "tests/train/test_checkpoints.py", "tests/cli/test_train.py"),
    NUMBERS: ("tests/ops/softmax", "tests/ops/cpu", "tests/models/generation"),
    SHARED: ("tests/laws/test_threads.py", "tests/timing", "tests/ops/cpu/test_threads.py"),
    ALL: ("tests/files", "tests/masks", "tests/caches", "tests/ops/softmax", "tests/cli"),
}
"""The fewer tests of `--brief`, which continuous integration runs."""

COMMANDS = (
    ("--version",),
    ("describe", "mla", "--context", "8192"),
    ("cost", "llama-3-8b", "--context", "32k", "--machine", "h100-sxm", "--json"),
    ("show", "causal & window(4) | sinks(1)", "--queries", "12"),
    ("layer", "mha", "gpt", "mla", "--tokens", "64"),
    ("explain", "a fluffy blue creature roamed the forest", "--query", "creature", "--json"),
    ("generate", "3+4=", "--model", "tiny", "--max-tokens", "4"),
    ("audit", "torch.nn:MultiheadAttention", "--dim", "64", "--heads", "4"),
    ("explain", "to be or not to be", "--figure", "{out}/图 figure.svg"),
    ("train", "--out", "{out}/mine", "--steps", "2", "--dim", "16", "--context", "16"),
)
"""What each row runs in its own environment; `{out}` is an empty folder."""
EXIT = {"audit": (0, 1, 3)}
"""The exit statuses of a command that did its work, where it is not 0 alone."""


@dataclass(frozen=True)
class Row:
    """One other machine.

    why: which tests run, as keys of `TESTS`.
    environment: variables that are set for every process of the row.
    folder: the name of the folder of the copy.
    version: the version of Python, such as "3.12"; "" is any.
    cuda: needs a build of torch for CUDA, on a machine without a GPU.
    umask, cores: the permissions that new files lack, and how many cores may be used; 0 for all.
    read_only: the checkout and HOME cannot be written.
    ci: whether continuous integration runs the row.
    """

    why: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    folder: str = "regard"
    version: str = ""
    cuda: bool = False
    umask: int = 0o022
    cores: int = 0
    read_only: bool = False
    ci: bool = False

    @property
    def brief(self) -> tuple[str, ...]:
        """The fewer tests of a short run, and of continuous integration."""
        return tuple(test for key in self.why for test in BRIEF[key])

    @property
    def all_tests(self) -> tuple[str, ...]:
        """The folders and files whose quick tests run."""
        return tuple(test for key in self.why for test in TESTS[key])


THREADS = "REGARD_TEST_THREADS"
"""The number of torch's threads in tests/conftest.py; 1 where it is not set."""
CHINESE = {
    "LC_ALL": "zh_CN.UTF-8",
    "FORCE_COLOR": "1",
    "COLUMNS": "37",
    "TZ": "Asia/Shanghai",
    "OMP_NUM_THREADS": "2,1",
}

ROWS = {
    "folder named regard": Row((TEXTS,)),
    "path with spaces and 中文": Row((TEXTS, WRITERS), folder="a 中文 path/regard 2", ci=True),
    "zh_CN.UTF-8": Row((TEXTS,), {"LC_ALL": "zh_CN.UTF-8"}),
    "tr_TR.UTF-8": Row((TEXTS,), {"LC_ALL": "tr_TR.UTF-8"}),
    "locale C": Row((TEXTS,), {"LC_ALL": "C"}),
    "FORCE_COLOR=1": Row((TEXTS,), {"FORCE_COLOR": "1"}),
    "40 columns": Row((TEXTS,), {"COLUMNS": "40"}),
    "Chinese, colours, 37 columns, another time zone, umask 077": Row(
        (TEXTS,), CHINESE, umask=0o077, ci=True
    ),
    "one core": Row((SHARED,), cores=1),
    "3 threads": Row((NUMBERS,), {"OMP_NUM_THREADS": "3", THREADS: "3"}),
    "OMP_NUM_THREADS=2,1": Row((SHARED,), {"OMP_NUM_THREADS": "2,1"}),
    "umask 077": Row((WRITERS,), umask=0o077),
    "package and HOME read-only": Row((TEXTS, WRITERS), read_only=True, ci=True),
    **{f"Python 3.{n}": Row((ALL,), version=f"3.{n}") for n in (11, 12, 13, 14)},
    "torch for CUDA without a GPU": Row((ALL,), cuda=True),
    **{
        f"kernels of {x}": Row((NUMBERS,), {"REGARD_CPU_ISA": x})
        for x in ("x86-64-v4-bf16", "x86-64-v4", "x86-64-v3", "armv8")
    },
    "no compiled kernels": Row((NUMBERS,), {"REGARD_CPU_ISA": "none"}, ci=True),
}
