"""What starts without torch, and what it imports: proved in fresh processes, without the hooks of
this one.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import regard

PACKAGE = Path(regard.__file__).parent
HEAVY = ("torch", "transformers", "tokenizers", "safetensors", "matplotlib")


def fresh(code: str, *flags: str) -> str:
    """What a new Python prints that finds the same regard and nothing of the test's own setting."""
    environment = {
        **os.environ,
        "PYTHONPATH": str(PACKAGE.parent),
        "NO_COLOR": "1",
        "COLUMNS": "80",
    }
    done = subprocess.run(
        [sys.executable, *flags, "-c", code],
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def loaded(code: str) -> set[str]:
    """The heavy modules that a new process holds after running the code."""
    tail = f"import sys, json; print(json.dumps([m for m in {HEAVY!r} if m in sys.modules]))"
    return set(json.loads(fresh(f"{code}\n{tail}").splitlines()[-1]))


def command(*arguments: str) -> str:
    """Code that runs the command, and goes on."""
    return f"""
import contextlib
from regard.cli import main
with contextlib.suppress(SystemExit):
    main({list(arguments)})
"""


HELP = command("--help")


@pytest.mark.parametrize(
    "code",
    [
        "import regard",
        "import regard.span, regard.errors, regard.tracing, regard.argument_checks",
        "import regard.notation",
        "import regard.view",
        "import regard.cost",
        "import regard; dir(regard); regard.Span(0, 3); regard.ArgumentError; regard.Trace",
        HELP,
        command("describe", "--json"),
        command("compare", "--list"),
        command("generate", "--help"),
        command("cost", "tiny"),
        command("train", "--help"),
    ],
)
def test_starts_without_torch(code: str) -> None:
    assert loaded(code) == set()


@pytest.mark.full
def test_attention_and_models_start_without_dynamo() -> None:
    """torch.compile's front end takes a second to import, and only a compilation needs it."""
    code = """
import sys, torch, regard, regard.parallel
x = torch.randn(1, 2, 300, 64)
regard.attend(x, x, x)
"".join(regard.load("tiny").generate("a text", max_tokens=2))
print("torch._dynamo" in sys.modules)
"""
    assert fresh(code).split() == ["False"]


def test_every_module_of_view_and_cost_starts_without_torch() -> None:
    names = [
        "regard." + ".".join(path.relative_to(PACKAGE).with_suffix("").parts)
        for folder in ("view", "cost")
        for path in sorted((PACKAGE / folder).rglob("*.py"))
    ]
    assert names
    assert loaded("import " + ", ".join(n.removesuffix(".__init__") for n in names)) == set()


@pytest.mark.full
def test_the_test_would_see_torch() -> None:
    assert "torch" in loaded("import regard; regard.attend")


def test_help_imports_no_command_module() -> None:
    out = fresh(HELP + "import sys; print([m for m in sys.modules if m.startswith('regard.cli.')])")
    assert out.splitlines()[-1] == "['regard.cli._help_page', 'regard.cli.app']"


def imported(code: str) -> set[str]:
    """The modules that the code imports in a new process, those of Python's own start left out."""
    tail = "import json; print(); print(json.dumps(sorted({*sys.modules} - before)))"
    return set(
        json.loads(fresh(f"import sys; before = {{*sys.modules}}\n{code}\n{tail}").splitlines()[-1])
    )


def foreign(modules: set[str]) -> set[str]:
    """The packages among them that are neither Python's nor ours."""
    return {name.split(".")[0] for name in modules} - {*sys.stdlib_module_names, "regard"}


# Time follows from what is imported: `python -m benchmarks startup` measures it.
def test_import_loads_one_module_of_ours_and_no_package() -> None:
    found = imported("import regard")
    assert {name for name in found if name.startswith("regard")} == {"regard"}
    assert foreign(found) == set()
    assert len(found) <= 60, "Python's own modules take time, too"


def test_help_loads_little() -> None:
    found = imported(HELP)
    ours = {
        name for name in found if name.startswith("regard.") and not name.startswith("regard.cli")
    }
    texts = {
        "regard.did_you_mean",
        "regard.language",
        "regard.text_table",
        "regard.units",
        "regard.untrusted_text",
    }
    assert ours <= {"regard.errors", "regard.standard_output", *texts}
    assert not foreign(found) & {"numpy", *HEAVY}
    assert len(found) <= 400


def test_costs_load_little(tmp_path: Path) -> None:
    found = imported(command("cost", "gpt3", "--json"))
    assert not foreign(found) & {"numpy", *HEAVY}
    assert len(found) <= 450
    assert "torch" not in loaded(command("cost", "gpt2", "--plot", str(tmp_path / "a.svg")))
    assert (tmp_path / "a.svg").exists()


def test_the_count_would_see_what_is_imported() -> None:
    """A negative control."""
    found = imported("import regard; regard.Span; import numpy")
    assert "regard.span" in found
    assert "numpy" in foreign(found)
    assert len(found) > 60


def test_a_default_device_is_kept_under_pytest() -> None:
    """The poisoned `torch.empty` of conftest.py must not hide from `with torch.device`."""
    import torch

    with torch.device("meta"):
        assert torch.nn.Linear(4, 4).weight.is_meta
