"""Single faults of the package and the tests that must notice them: `python -m tests.mutants`.

Each file `<package>.toml` of this folder is a table of mutants. A mutant replaces one text of one
file, which occurs there exactly once, and names the tests that concern it. Who
moves or rewrites that code carries its mutants along; who deletes a test runs those of its package.
"""

from __future__ import annotations

import subprocess
import tomllib
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[2]


def commit() -> str:
    """The commit of the checkout, with a plus sign if the package or the tests differ from it."""
    git = ["git", "-C", str(ROOT)]
    head = subprocess.run(
        [*git, "rev-parse", "--short=8", "HEAD"], capture_output=True, check=False
    )
    changed = subprocess.run([*git, "diff", "--quiet", "HEAD", "--", "src", "tests"], check=False)
    return head.stdout.decode().strip() + "+" * (changed.returncode == 1)


@dataclass(frozen=True)
class Mutant:
    """One fault.

    file: its path below the repository.
    old, new: what is replaced, and by what.
    tests: files, folders or test functions (`file.py::name`) below the repository.
    equivalent: the reason why no test can notice it; "" if one must.
    compiled_for: the instruction sets, by the beginning of their names, whose kernels have the old
        text; "" is every one.
    """

    name: str
    file: str
    old: str
    new: str
    tests: tuple[str, ...]
    equivalent: str = ""
    compiled_for: str = ""
    package: str = ""

    def source(self, root: Path) -> Path:
        """The file that it changes."""
        return root / self.file

    def why_not(self, root: Path) -> str:
        """Why it cannot be applied to a tree; "" if it can."""
        path = self.source(root)
        if not path.is_file():
            return f"there is no file {self.file}"
        count = path.read_text("utf-8").count(self.old)
        if count != 1:
            return f"its old text occurs {count} times in {self.file}"
        files = [test.partition("::")[0] for test in self.tests]
        missing = [file for file in files if not (root / file).exists()]
        return f"there is no test {missing[0]}" if missing else ""

    def digest(self, root: Path) -> str:
        """What its result depends on: the fault, the file that it changes, and its tests."""
        paths = [self.source(root), *(root / test.partition("::")[0] for test in self.tests)]
        files = [y for x in paths for y in (sorted(x.rglob("*.py")) if x.is_dir() else [x])]
        texts = [x.read_bytes() if x.is_file() else b"" for x in files]
        facts = repr((self.file, self.old, self.new, self.tests)).encode()
        return sha256(b"\0".join([facts, *texts])).hexdigest()[:16]


def read_mutants(folder: Path = Path(__file__).parent) -> list[Mutant]:
    """The mutants of all tables of a folder, each named `<package>.<name>`."""
    mutants = []
    for path in sorted(folder.glob("*.toml")):
        for name, fields in tomllib.loads(path.read_text("utf-8")).items():
            tests = tuple(fields.pop("tests"))
            mutants.append(Mutant(f"{path.stem}.{name}", tests=tests, package=path.stem, **fields))
    return mutants
