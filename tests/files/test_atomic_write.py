"""Files and folders written whole or not at all, by one process at a time, and the rests of killed
ones.
"""

from __future__ import annotations

import errno
import os
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from regard.errors import FileError
from regard.files.atomic_write import (
    WRITING_PREFIX,
    check_writable,
    delete_abandoned,
    folder_locked,
    temporary_folder,
    try_lock,
    write_atomically,
    write_user_file,
)


@contextmanager
def another(target: Path, *, alone: bool) -> Iterator[int]:
    """Another process that has a workplace for a target, until the block ends, or it is killed."""
    ready, tell = os.pipe()
    child = os.fork()
    if child == 0:
        with temporary_folder(target, alone=alone):
            os.write(tell, b"x")
            signal.pause()
    os.read(ready, 1)
    try:
        yield child
    finally:
        with suppress(ProcessLookupError, ChildProcessError):  # killed by the test
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
        os.close(ready)
        os.close(tell)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize("alone", [True, False])
def test_a_living_writer_is_left_alone_and_a_killed_one_is_swept(
    alone: bool, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    with another(out, alone=alone) as child:
        (mine,) = names(tmp_path)
        assert mine.startswith(f"{WRITING_PREFIX}out")
        assert delete_abandoned(tmp_path) == 0
        assert names(tmp_path) == [mine], "a living run keeps its folder"
        if alone:
            with (
                pytest.raises(FileError, match="out is being written by another run; wait until"),
                temporary_folder(out, alone=True),
            ):
                pass
        else:
            with temporary_folder(out) as place:
                assert place.name != mine
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
        assert names(tmp_path) == [mine], "a kill leaves it"
        with temporary_folder(out, alone=alone) as place:
            assert names(tmp_path) == [place.name]
            assert names(place) == []
    assert names(tmp_path) == []


def test_only_what_was_to_have_the_name_is_swept(tmp_path: Path) -> None:
    for name in ("a", "a-1", "ab", "b-2"):
        (tmp_path / f"{WRITING_PREFIX}{name}").mkdir()
    (tmp_path / f"{WRITING_PREFIX}a-link").symlink_to(tmp_path / f"{WRITING_PREFIX}b-2")
    (tmp_path / f"{WRITING_PREFIX}a-file").write_text("a user's own")
    assert delete_abandoned(tmp_path, "a") == 2
    assert names(tmp_path) == [f"{WRITING_PREFIX}{x}" for x in ("a-file", "a-link", "ab", "b-2")]
    assert delete_abandoned(tmp_path) == 2
    assert names(tmp_path) == [f"{WRITING_PREFIX}{x}" for x in ("a-file", "a-link")]


def test_a_lock_ends_with_its_block(tmp_path: Path) -> None:
    (tmp_path / f"{WRITING_PREFIX}left-by-a-killed-process").mkdir()
    with folder_locked(tmp_path):
        assert try_lock(tmp_path) is None
        assert names(tmp_path) == []
    with folder_locked(tmp_path):
        pass
    with (
        pytest.raises(FileError, match="cannot be locked: No such file"),
        folder_locked(tmp_path / "no"),
    ):
        pass


def test_a_file_is_replaced_whole_and_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    path.chmod(0o640)
    with suppress(ZeroDivisionError), write_atomically(path) as place:
        place.write_text("half")
        raise ZeroDivisionError
    assert (path.read_text(), names(tmp_path)) == ("old", ["a"])
    with write_atomically(path) as place:
        place.write_text("new")
    assert (path.read_text(), names(tmp_path)) == ("new", ["a"])
    assert stat.S_IMODE(path.stat().st_mode) == 0o640
    with write_atomically(tmp_path / ("n" * 255)) as place:
        place.write_text("a name as long as they are")
    assert (tmp_path / ("n" * 255)).exists()


def test_a_file_is_on_the_disk_before_it_has_its_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced = tmp_path / "a", []

    def fsync(handle: int) -> None:
        synced.append((Path(f"/proc/self/fd/{handle}").readlink().name, path.exists()))

    monkeypatch.setattr(os, "fsync", fsync)
    with write_atomically(path) as place:
        place.write_text("new")
        written = place.stat()
    assert synced == [("a", False), (tmp_path.name, True)]
    assert os.path.samestat(written, path.stat()), "renamed, not copied"


def test_a_link_is_no_workplace(tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    link = tmp_path / f"{WRITING_PREFIX}a"
    link.symlink_to(tmp_path / "other")
    with pytest.raises(OSError, match=r"Not a directory|symbolic links") as error:
        try_lock(link)
    assert error.value.errno in (errno.ENOTDIR, errno.ELOOP)


def test_a_folder_of_another_is_not_deleted(tmp_path: Path) -> None:
    with temporary_folder(tmp_path / "a", alone=True) as place:
        place.rename(tmp_path / "mine")
        place.mkdir()
        (place / "another's").write_text("kept")
    assert names(place) == ["another's"]


def test_a_device_is_not_replaced_by_a_file(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(FileError, match="pipe is a device or a pipe; give the name of a file"):
        check_writable(tmp_path / "pipe")
    with (
        pytest.raises(FileError, match="/dev/null is a device or a pipe"),
        write_user_file(Path("/dev/null")),
    ):
        pass
    assert stat.S_ISCHR(Path("/dev/null").stat().st_mode)
