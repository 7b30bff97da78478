"""The integration is optional: regard never imports transformers, and its absence is said with the
next step.
"""

from __future__ import annotations

import subprocess
import sys

import pytest

ABSENT = "import sys; sys.modules['transformers'] = None\n"
OLD = """
import sys, types
old = types.ModuleType("transformers")
old.__version__ = "5.0.0"
old.masking_utils = types.SimpleNamespace(sdpa_mask=lambda cache_position: None)
sys.modules["transformers"] = old
"""


def run(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120
    )


def test_without_transformers_the_message_has_the_line_to_install_it() -> None:
    done = run(ABSENT + "import regard.integrations.transformers")
    assert done.returncode == 1
    assert "ImportError: regard.integrations.transformers needs transformers" in done.stderr
    assert "pip install 'regard[transformers]'" in done.stderr


def test_an_old_transformers_is_refused() -> None:
    done = run(OLD + "import regard.integrations.transformers")
    assert done.returncode == 1
    assert "transformers 5.0.0 is too old" in done.stderr
    assert "its masking_utils.sdpa_mask has no q_offset; pip install -U transformers" in done.stderr


@pytest.mark.full
def test_regard_itself_never_imports_it() -> None:
    code = (
        "import regard, regard.models, regard.nn, regard.inspect, regard.integrations, sys\n"
        "assert 'transformers' not in sys.modules"
    )
    done = run(code)
    assert done.returncode == 0, done.stderr
