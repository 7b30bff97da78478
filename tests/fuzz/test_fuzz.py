"""A hundred damaged files a time: each is refused with the package's own error or loads, in bounded
time and memory.
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from regard.configs import MODEL_TYPES
from regard.configs.reader import read_sizes_file
from regard.errors import RegardError
from tests.fuzz import box, mutations

CASES = int(os.environ.get("REGARD_FUZZ", "105"))


@pytest.mark.nightly
@pytest.mark.full
def test_damaged_files_are_refused_or_load(root: Path) -> None:
    """In a process of its own, without the checked annotations, whose errors are not the
    package's.
    """
    command = [sys.executable, "-m", "tests.fuzz", "--cases", str(CASES), "--seed", "0"]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    assert f"{CASES} cases" in done.stdout


@pytest.mark.full
def test_counts_are_bounded_before_a_list_is_made(tmp_path: Path) -> None:
    """20 million layers under any key of any model type, and gpt_neo's repeats."""
    sizes = {"vocab_size": 300, "hidden_size": 16, "num_attention_heads": 4, "num_heads": 2}
    repeats = [[["global", "local"], 2**40]]
    configs: list[dict[str, object]] = [
        {"model_type": "gpt_neo", "num_layers": 4, "attention_types": repeats}
    ]
    for word in " ".join(MODEL_TYPES.values()).split():
        for key in ("num_hidden_layers", "n_layer", "num_layers", "n_layers"):
            configs.append({"model_type": word, key: 20_000_000})
    assert len(configs) > 300
    tracemalloc.start()
    for config in configs:
        (tmp_path / "config.json").write_text(json.dumps(sizes | config))
        with pytest.raises(RegardError):
            read_sizes_file(tmp_path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 50 << 20


def _wait_for_a_pipe() -> None:
    reader, _ = os.pipe()
    os.read(reader, 1)


@pytest.mark.full(keep=2)
@pytest.mark.parametrize(
    "work, kind",
    [
        (lambda: None, "loaded"),
        (lambda: {}["x"], "foreign"),
        (lambda: bytearray(2 << 30), "memory"),
        (lambda: os.abort(), "crash"),
        (_wait_for_a_pipe, "hang"),
    ],
)
def test_the_box_tells_what_happened(work: object, kind: str) -> None:
    assert box.run(work, idle_seconds=1).kind == kind  # type: ignore[arg-type]


def test_raw_messages_are_found() -> None:
    from regard.errors import FileError

    def refuse(said: str) -> None:
        raise FileError(said)

    found = [
        box.run(lambda x=x: refuse(x)).kind for x in ("plain", "a\x1b[2J", "\u202e", "x" * 5000)
    ]  # type: ignore[misc]
    assert found == ["refused", "raw", "raw", "raw"]


def test_mutations_are_seeded_and_change_something(tmp_path: Path) -> None:
    content = b'{"a": 1, "b": [2, {"c": "x"}], "d": null}'
    made = [mutations.in_json(content, random.Random(i)) for i in range(200)]
    assert made == [mutations.in_json(content, random.Random(i)) for i in range(200)]
    assert Counter(made).most_common(1)[0][1] < 20
    assert sum(x != content for x in made) > 190
