"""Full and read-only disks under the commands: the package's own error, exit code 1, nothing half
written or left behind.
"""

from __future__ import annotations

import resource
import shlex
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from regard.cli.app import run
from regard.files.atomic_write import folder_locked
from regard.train import checkpoints


@contextmanager
def longest(size: int) -> Iterator[None]:
    """No file grows beyond `size` bytes: writing then fails as it does on a full disk."""
    before, handler = resource.getrlimit(resource.RLIMIT_FSIZE), signal.getsignal(signal.SIGXFSZ)
    compiled, sys.dont_write_bytecode = sys.dont_write_bytecode, True  # or modules are cut off, too
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        sys.dont_write_bytecode = compiled
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    """Nothing can be written in a folder, by root neither."""
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "ro", "none", str(folder)], capture_output=True, check=False
    )
    if done.returncode:
        pytest.skip("this user may not mount a read-only disk")
    try:
        yield
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def tree(folder: Path) -> dict[str, bytes | None]:
    """What is in a folder, folders as None."""
    return {
        str(p.relative_to(folder)): p.read_bytes() if p.is_file() else None
        for p in folder.rglob("*")
    }


LAYER = ("layer", "mha", "--dim", "16", "--heads", "2")
EXPLAIN = ("explain", "to be", "--attention", "mqa")


@pytest.mark.full(keep=2)
@pytest.mark.parametrize(
    "arguments",
    [
        (*LAYER, "--html", "old.html"),
        (*LAYER, "--figure", "old.png"),
        (*LAYER, "--figure", "new.svg"),
        (*EXPLAIN, "--figure", "old.svg"),
        ("cost", "gpt2", "--plot", "old.svg"),
        ("explain", "to be", "--html", "new.html"),
    ],
)
def test_a_page_or_figure_on_a_full_disk_leaves_the_old_one(
    arguments: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("old.html", "old.png", "old.svg"):
        Path(name).write_text("old")
    before = tree(tmp_path)
    with longest(500):
        assert run(arguments) == 1
    assert f"{arguments[-1]} cannot be written: File too large" in capsys.readouterr().err
    assert tree(tmp_path) == before


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((*LAYER, "--html", "a.html"), "a.html cannot be written: permission denied; choose"),
        (("explain", "x", "--html", "a.html"), "a.html cannot be written: permission denied"),
        (("compare", "--html", "a.html"), "a.html cannot be written: permission denied"),
        (("extend", "--plot", "a.svg"), "a.svg cannot be written: permission denied"),
        (("convert", "tiny", "out", "--to", "mqa"), "out: cannot write the folder: Read-only file"),
        (("train", "--out", "out"), "out: cannot create the folder: Read-only file system; choose"),
    ],
)
def test_a_read_only_disk_is_told_before_anything_is_computed(
    arguments: tuple[str, ...],
    message: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    with read_only(tmp_path), monkeypatch.context() as patch:
        patch.chdir(tmp_path)
        assert run(arguments) == 1
        assert tree(tmp_path) == {}
    assert message in capsys.readouterr().err


TRAIN = shlex.split(
    "train text.txt --out out --steps 4 --batch 2 --context 8 --dim 16 --layers 1 --heads 2 "
    "--vocab 280 --save-every 2"
)


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("".join(f"Line {i}, written {i * i} times.\n" for i in range(200)))
    return tmp_path


@pytest.mark.parametrize("more", [(), ("--task", "copy", "--model", "transformer")])
def test_a_run_on_a_full_disk_does_not_begin_and_leaves_nothing(
    more: tuple[str, ...],
    text: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr(checkpoints, "free_bytes", lambda _: checkpoints.EXTRA_BYTES - 1)
    before = tree(text)
    assert run(["train", "--out", "a/b", *more] if more else TRAIN) == 1
    where = "a/b" if more else "out"
    assert f"needs 1 MiB, and 0 MiB are free in {where}; free some space" in capsys.readouterr().err
    assert tree(text) == before


def test_a_run_whose_first_checkpoint_would_not_fit_does_not_train(
    text: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The tensors alone would fit; what else a checkpoint needs would not, which was told at the
    first save only.
    """
    monkeypatch.setattr(checkpoints, "free_bytes", lambda _: checkpoints.EXTRA_BYTES)
    assert run(TRAIN) == 1
    said = capsys.readouterr().err
    assert "needs 2 MiB, and 1 MiB are free in out/checkpoints" in said
    assert "step" not in said


def test_a_full_disk_while_training_leaves_the_checkpoint_before(
    text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(TRAIN) == 0
    whole = tree(Path("out/checkpoints"))
    for path in (Path("out/model.safetensors"), Path("out/config.json")):
        path.unlink()
    with longest(2000):  # the export
        assert run([*TRAIN, "--resume"]) == 1
    assert "cannot write the weights" in capsys.readouterr().err
    with longest(40):  # the log
        assert run([*TRAIN, "--resume"]) == 1
    assert "train.csv: cannot write the log: File too large" in capsys.readouterr().err
    assert tree(Path("out/checkpoints")) == whole
    assert not [path for path in tree(text) if ".writing-" in path]
    assert run([*TRAIN, "--resume"]) == 0
    assert Path("out/model.safetensors").exists()


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("more", [(), ("--task", "copy", "--model", "transformer")])
def test_one_run_at_a_time_writes_into_a_folder(
    more: tuple[str, ...], text: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    Path("out").mkdir()
    with folder_locked(Path("out")):
        assert run(["train", "--out", "out", *more] if more else TRAIN) == 1
    assert "out is being written by another run; wait until that ends" in capsys.readouterr().err
    assert tree(Path("out")) == {}


@pytest.mark.nightly(keep=1)
@pytest.mark.full
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="there is no /dev/full")
@pytest.mark.parametrize("arguments", [("generate", "a", "--max-tokens", "2"), ("show", "causal")])
def test_output_to_a_full_disk(arguments: tuple[str, ...]) -> None:
    command = [sys.executable, "-m", "regard", *arguments]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr) == (1, "error: the output: No space left on device\n")
