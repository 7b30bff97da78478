"""Checkpoints under faults: kills at every point, no space, flipped bits, missing parts."""

from __future__ import annotations

import hashlib
import json
import os
import resource
import shutil
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from regard.errors import ArgumentError, FileError
from regard.files import atomic_write
from regard.files.atomic_write import delete_abandoned
from regard.train import TrainingCheckpoint, checkpoints
from tests.train.parts import Small, run


def make(step: int) -> TrainingCheckpoint:
    generator = torch.Generator().manual_seed(step)
    weight = torch.randn(40, 50, generator=generator)
    model = {"a": weight, "tied": weight, "half": weight[:3].bfloat16(), "none": torch.empty(0)}
    return TrainingCheckpoint(
        step, {"model": model, "optimizer": {"0.step": torch.tensor(1.5)}}, {"at": step}
    )


def same(a: TrainingCheckpoint, b: TrainingCheckpoint) -> bool:
    pairs = [(a.tensors[f][k], b.tensors[f][k]) for f in b.tensors for k in b.tensors[f]]
    whole = all(x.dtype == y.dtype and torch.equal(x, y) for x, y in pairs)
    return whole and (a.step, a.state) == (b.step, b.state) and a.tensors.keys() == b.tensors.keys()


def test_what_is_saved_comes_back(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, make(3))
    assert path.name == "step-00000003"
    assert sorted(p.name for p in path.iterdir()) == [
        "manifest.json",
        "model.safetensors",
        "optimizer.safetensors",
        "state.json",
    ]
    assert same(checkpoints.load(path), make(3))
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert same(found, make(3))
    one = checkpoints.load(path).tensors["model"]
    assert one["a"].data_ptr() == one["tied"].data_ptr()  # stored once


def test_a_transposed_view_is_not_taken_for_its_base(tmp_path: Path) -> None:
    x = torch.randn(3, 3)
    named = {"x": x, "t": x.t(), "part": x[:2]}
    back = checkpoints.load(checkpoints.save(tmp_path, TrainingCheckpoint(1, {"m": named}, {})))
    assert all(torch.equal(back.tensors["m"][name], named[name]) for name in named)


def test_the_newest_are_kept(tmp_path: Path) -> None:
    for step in (5, 10, 123456789, 20):
        checkpoints.save(tmp_path, make(step), keep=2)
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "step-00000010",
        "step-00000020",
        "step-123456789",
    ]
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.step == 123456789
    with pytest.raises(ArgumentError, match="keep is 0; it must be at least 1"):
        checkpoints.save(tmp_path, make(30), keep=0)


def test_the_same_step_is_written_over(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, make(3))
    (path / "state.json").write_text("{}", "utf-8")
    checkpoints.save(tmp_path, make(3))
    assert same(checkpoints.load(path), make(3))
    assert len(list(tmp_path.iterdir())) == 1


def flip(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 4
    file.write_bytes(content)


DAMAGE: dict[str, tuple[Callable[[Path], Any], str]] = {
    "bit": (lambda p: flip(p / "model.safetensors", -400), r"not match its checksum \(tensor "),
    "header": (
        lambda p: flip(p / "model.safetensors", 3),
        r"not match its checksum \(its header\)",
    ),
    "state": (lambda p: flip(p / "state.json", 9), "state.json does not match its checksum"),
    "cut": (lambda p: os.truncate(p / "model.safetensors", 500), "model.safetensors has 500 bytes"),
    "no file": (
        lambda p: (p / "optimizer.safetensors").unlink(),
        "optimizer.safetensors is missing",
    ),
    "no manifest": (lambda p: (p / "manifest.json").unlink(), "manifest.json is missing"),
    "bad manifest": (
        lambda p: (p / "manifest.json").write_text("[1"),
        r"cannot be read: .*manifest\.json is not JSON",
    ),
    "odd manifest": (
        lambda p: (p / "manifest.json").write_text("[1]"),
        r"cannot be read: .*manifest\.json is a JSON list",
    ),
    "newer": (lambda p: rewrite(p, format=2), "has format 2; this version reads 1"),
    "outside": (lambda p: rewrite(p, files={"../x": {}}), "names '../x', which is outside"),
    "empty": (lambda p: rewrite(p, files={}), "state.json is not in the manifest"),
    "file for folder": (
        lambda p: (shutil.rmtree(p), p.write_text("x")),
        r"cannot be read: .*manifest\.json cannot be read: Not a dir",
    ),
}


def rewrite(path: Path, **change: Any) -> None:
    manifest = path / "manifest.json"
    manifest.write_text(json.dumps(json.loads(manifest.read_text()) | change))


@pytest.mark.parametrize("kind", DAMAGE)
def test_damage_is_named_and_passed_over(
    tmp_path: Path, kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    checkpoints.save(tmp_path, make(1))
    newest = checkpoints.save(tmp_path, make(2))
    harm, message = DAMAGE[kind]
    harm(newest)
    with pytest.raises(FileError, match=f"step-00000002: .*{message}.*; use an older checkpoint"):
        checkpoints.load(newest)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert same(found, make(1))
    assert f"{newest} is ignored: " in caplog.text


def test_the_flipped_bit_s_tensor_is_named(tmp_path: Path) -> None:
    path = checkpoints.save(
        tmp_path, TrainingCheckpoint(1, {"m": {"x": torch.ones(9), "y": torch.ones(9)}})
    )
    flip(path / "m.safetensors", -1)
    with pytest.raises(FileError, match=r"\(tensor 'y'\)"):
        checkpoints.load(path)


def test_one_whole_checkpoint_survives_when_a_damaged_one_is_newer(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, make(10), keep=1)
    (checkpoints.save(tmp_path, make(20), keep=2) / "manifest.json").unlink()
    checkpoints.save(tmp_path, make(15), keep=1)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.step == 15


def in_child(work: Callable[[], None], kill_after: float | None = None) -> int:
    """Run `work` in a forked process; gives minus the signal, or the exit code (3 for a
    FileError).
    """
    child = os.fork()
    if child == 0:
        code = 9
        try:
            work()
            code = 0
        except FileError:
            code = 3
        finally:
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


@pytest.mark.full
def test_killed_at_every_write_the_old_or_the_new_one_loads(tmp_path: Path) -> None:
    """SIGKILL at the n-th system call that matters, for every n, over a folder that has a
    checkpoint.
    """
    points = 0
    while True:
        folder = tmp_path / str(points)
        checkpoints.save(folder, make(1), keep=1)
        status = in_child(lambda folder=folder, n=points: save_and_die(folder, n))  # type: ignore[misc]
        found = checkpoints.latest(folder)
        assert found is not None
        assert same(found, make(found.step))
        delete_abandoned(folder)
        assert all(path.name.startswith("step-") for path in folder.iterdir())
        if status == 0:
            break
        assert status == -signal.SIGKILL
        points += 1
    assert found.step == 2
    assert points >= 10  # files, syncs, the rename, the deletion


def save_and_die(folder: Path, calls: int) -> None:
    left = calls

    def deadly(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return original(*args, **kwargs)

        return call

    for owner, name in (
        (checkpoints, "sync_to_disk"),
        (checkpoints, "save_file"),
        (checkpoints, "size_and_checksum"),
        (Path, "write_text"),
        (Path, "rename"),
        (os, "unlink"),
        (os, "rmdir"),
    ):
        setattr(owner, name, deadly(getattr(owner, name)))
    checkpoints.save(folder, make(2), keep=1)


def test_too_little_space_is_told_before_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    checkpoints.save(tmp_path, make(1), keep=1)
    monkeypatch.setattr(checkpoints, "free_bytes", lambda _: 2**19)
    monkeypatch.setattr(checkpoints, "_write", None)  # must not be reached
    with pytest.raises(FileError, match=r"checkpoint needs 2 MiB, and 0 MiB are free in .*; free"):
        checkpoints.save(tmp_path, make(2), keep=1)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert found.step == 1
    assert len(list(tmp_path.iterdir())) == 1


def test_a_run_without_space_does_not_begin(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checkpoints, "free_bytes", lambda _: 1000)
    with pytest.raises(FileError, match=r"0 MiB are free in .*checkpoints; free some space"):
        run(Small(), tmp_path)


def test_a_quota_in_the_middle_of_a_file_leaves_the_old_one(tmp_path: Path) -> None:
    checkpoints.save(tmp_path, make(1), keep=1)

    def limited() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        sys.dont_write_bytecode = True  # or modules that are imported now are cut off, too
        resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
        checkpoints.save(tmp_path, make(2), keep=1)

    assert in_child(limited) == 3
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert same(found, make(1))


def broken(*_: Any) -> None:
    raise OSError(5, "Input/output error")


def test_a_failing_disk_and_an_impossible_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("x", "utf-8")
    with pytest.raises(FileError, match="file: cannot create the folder: File exists; choose"):
        checkpoints.save(tmp_path / "file", make(1))
    with monkeypatch.context() as patch:
        patch.setattr(checkpoints, "_write", broken)
        with pytest.raises(FileError, match=r"01: cannot write the checkpoint: .*; older"):
            checkpoints.save(tmp_path, make(1))
    monkeypatch.setattr(checkpoints, "find_damage", lambda _: "state.json is missing")
    with pytest.raises(FileError, match=r"differs from what was written: state.json is missing"):
        checkpoints.save(tmp_path, make(1))


def test_what_is_synced_and_in_which_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    events: list[str] = []
    plain_sync, plain_rename = atomic_write.sync_to_disk, Path.rename

    def sync(path: Path) -> None:
        events.append(f"sync {path.name}")
        plain_sync(path)

    def rename(self: Path, target: Path) -> Path:
        events.append(f"rename {Path(target).name}")
        return plain_rename(self, target)

    monkeypatch.setattr(checkpoints, "sync_to_disk", sync)
    monkeypatch.setattr(Path, "rename", rename)
    folder = tmp_path / "all"
    checkpoints.save(folder, make(1))
    at = events.index("rename step-00000001")
    files = {"manifest.json", "model.safetensors", "optimizer.safetensors", "state.json"}
    assert {f"sync {name}" for name in files} == set(events[: at - 1])
    assert events[at - 1].startswith("sync .writing-")
    assert events[at + 1 :] == ["sync all"]


FORGED: dict[str, tuple[str, bytes]] = {
    "header": ("model.safetensors", b"\x02\0\0\0\0\0\0\0[]"),
    "state": ("state.json", b'{"step": 2'),
    "step": ("state.json", b'{"step": 1e999, "same": {}, "state": {}}'),
    "same": ("state.json", b'{"step": 2, "same": {"no:x": "y"}, "state": {}}'),
    "list": ("state.json", b'{"step": 2, "same": [], "state": {}}'),
}


@pytest.mark.parametrize("kind", FORGED)
def test_right_sums_prove_nothing_and_latest_passes_over(tmp_path: Path, kind: str) -> None:
    checkpoints.save(tmp_path, make(1))
    newest = checkpoints.save(tmp_path, make(2))
    name, content = FORGED[kind]
    (newest / name).write_bytes(content)
    files = json.loads((newest / "manifest.json").read_text())["files"]
    files[name] |= {"bytes": len(content), "sha256": hashlib.sha256(content).hexdigest()}
    rewrite(newest, files=files)
    with pytest.raises(FileError, match="step-00000002"):
        checkpoints.load(newest)
    found = checkpoints.latest(tmp_path)
    assert found is not None
    assert same(found, make(1))


def test_a_pipe_for_a_manifest_is_not_waited_for(tmp_path: Path) -> None:
    path = checkpoints.save(tmp_path, make(1))
    (path / "manifest.json").unlink()
    os.mkfifo(path / "manifest.json")
    assert checkpoints.latest(tmp_path) is None


def test_two_runs_do_not_write_in_one_folder(tmp_path: Path) -> None:
    (tmp_path / "checkpoints").mkdir()
    left = tmp_path / "checkpoints" / ".writing-step-00000009-1"
    left.mkdir()
    handle = atomic_write.try_lock(left)
    assert delete_abandoned(tmp_path / "checkpoints") == 0, "another run is writing it"
    os.close(handle)  # type: ignore[arg-type]
    with (
        atomic_write.folder_locked(tmp_path / "checkpoints"),
        pytest.raises(FileError, match="checkpoints is being written by another run"),
    ):
        run(Small(), tmp_path)
    run(Small(), tmp_path)
    assert not left.exists()
