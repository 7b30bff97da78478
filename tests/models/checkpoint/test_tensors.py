"""Folders of weights: which files are read, what may stand in them, and that tensors are what was
stored.
"""

from __future__ import annotations

import gc
import json
import os
import re
import socket
import struct
import threading
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save, save_file
from torch import Tensor

from regard.errors import ArgumentError, FileError
from regard.files import safetensors_files
from regard.files.reading import checked_path, open_regular, read_bytes, read_exactly
from regard.files.safetensors_files import DTYPES, ReadBuffering
from regard.models.checkpoint.tensors import CheckpointTensors, check_finite

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
UNKNOWN = ("F8_E8M0",)
"""Dtypes that the official package writes from torch and does not read into it."""
ONE, TWO = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


def raw_bytes(x: Tensor) -> bytes:
    return x.reshape(-1).view(torch.uint8).numpy().tobytes() if x.numel() else b""


def assert_same(found: dict[str, Tensor], stored: dict[str, Tensor]) -> None:
    assert found.keys() == stored.keys()
    for name, x in found.items():
        assert (x.dtype, x.shape) == (stored[name].dtype, stored[name].shape), name
        assert x.is_contiguous()
        assert raw_bytes(x) == raw_bytes(stored[name]), name


def error_of(folder: Path) -> str:
    """What Store.open says of a folder, without the folder."""
    with pytest.raises(FileError) as error:
        CheckpointTensors.open(folder)
    return str(error.value).replace(f"{folder}/", "")


def single(folder: Path, **tensors: Tensor) -> Path:
    save_file(tensors or {"a": torch.arange(6.0), "b": torch.ones(2)}, folder / SINGLE)
    return folder / SINGLE


def sharded(folder: Path, **change: Any) -> dict[str, Tensor]:
    """Two shards and their index; a change replaces keys of the index."""
    first = {"a": torch.randn(3, 2), "b": torch.randn(4).half()}
    second = {"c": torch.arange(5), "d": torch.randn(2, 2)}
    save_file(first, folder / ONE)
    save_file(second, folder / TWO)
    places = dict.fromkeys(first, ONE) | dict.fromkeys(second, TWO)
    index = {"metadata": {"total_size": 88}, "weight_map": places, **change}
    (folder / INDEX).write_text(json.dumps(index))
    return first | second


@pytest.mark.parametrize("threads", [1, 2, 5])
def test_what_is_read_is_what_was_written(threads: int, tmp_path: Path) -> None:
    """Every dtype; with pieces so small that most tensors have several, and a window that most
    fill.
    """
    buffering = ReadBuffering(piece=64, ahead=500, threads=threads)
    tensors = {"scalar": torch.tensor(2.5), "empty": torch.zeros(3, 0, 2)}
    for i, (name, dtype) in enumerate(DTYPES.items()):
        raw = torch.randint(0, 256, (7 + i, 3 * dtype.itemsize), dtype=torch.uint8)
        tensors[name] = (raw % 2).bool() if dtype is torch.bool else raw.view(dtype)
    path = single(tmp_path, **tensors)
    store = CheckpointTensors.open(tmp_path)
    found = dict(store.read(buffering=buffering))
    assert list(found) == list(store.tensors), "in the order of the file"
    starts = [x.start for x in store.tensors.values()]
    assert starts == sorted(starts)
    assert_same(found, tensors)
    path.write_bytes(save({n: x for n, x in tensors.items() if n not in UNKNOWN}))
    assert_same(dict(CheckpointTensors.open(tmp_path).read(buffering=buffering)), load_file(path))
    assert store.bytes == sum(x.nbytes for x in tensors.values())


def test_some_tensors(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    store = CheckpointTensors.open(tmp_path)
    assert store.folder == tmp_path
    assert [name for name, _ in store.read(["d", "a", "d"])] == ["a", "d"]
    assert_same(dict(store.read(x for x in "cb")), {n: tensors[n] for n in "cb"})
    assert list(store.read([])) == []
    message = f"^names: {re.escape(str(tmp_path))} has no tensor 'layer'$"
    with pytest.raises(ArgumentError, match=message):
        store.read(["a", "layer"])
    with pytest.raises(ArgumentError, match="has no tensor 'dd'; did you mean 'd'"):
        store.read(["dd"])


def test_shards(tmp_path: Path) -> None:
    tensors = sharded(tmp_path)
    store = CheckpointTensors.open(tmp_path)
    places = {n: x.file.name for n, x in store.tensors.items()}
    assert places == {"a": ONE, "b": ONE, "c": TWO, "d": TWO}
    assert_same(dict(store.read()), tensors)
    single(tmp_path, z=torch.ones(1))
    assert list(CheckpointTensors.open(tmp_path).tensors) == ["z"], (
        "model.safetensors comes before an index"
    )


def test_an_index_may_lack_sizes(tmp_path: Path) -> None:
    for metadata in ({}, {"total_size": 87}, {"total_size": "many"}, None):
        sharded(tmp_path, metadata=metadata)
        assert CheckpointTensors.open(tmp_path).bytes == 88


A_B = {"a": ONE, "b": ONE}
MAP = f"{INDEX}: weight_map "
MISPLACED = "1 tensor that the index does not place there: "
INDICES: dict[str, tuple[str | dict[str, Any], str]] = {
    "a list": ("[]", f"{INDEX} is a JSON list; it must be an object"),
    "no JSON": ("{", f"{INDEX} is not JSON: Expecting property name"),
    "a web page": ("<html>", f"{INDEX} is not JSON: Expecting value"),
    "a tensor twice": ('{"weight_map": {"a": "x", "a": "y"}}', f"{INDEX} has the key 'a' twice"),
    "nothing": ({}, f"{MAP}is {{}}; it must map every tensor to a shard"),
    "no map": ([1], f"{MAP}is [1]; it must map every tensor to a shard"),
    "no file": ({"a": 1}, f"{MAP}gives 'a' 1; it must be a file name"),
    "a shard that is not there": (A_B | {"c": "x.safetensors"}, "x.safetensors is missing ("),
    "a tensor that is not there": (
        A_B | {"c": TWO, "d": TWO, "x\n": ONE},
        f"{ONE}: 1 tensor missing that the index places there: 'x\\n'; are {INDEX} and",
    ),
    "a tensor in another shard": ({"a": ONE, "b": TWO, "c": TWO}, f"{ONE}: {MISPLACED}'b'"),
    "tensors that are not named": (A_B | {"c": TWO}, f"{TWO}: {MISPLACED}'d'"),
}


@pytest.mark.parametrize("name", INDICES)
def test_indices_that_are_wrong(name: str, tmp_path: Path) -> None:
    index, says = INDICES[name]
    sharded(tmp_path, **({} if isinstance(index, str) else {"weight_map": index}))
    if isinstance(index, str):
        (tmp_path / INDEX).write_text(index)
    said = error_of(tmp_path)
    assert said.startswith(says)
    assert ("it is a web page" in said) is (name == "a web page")


def test_a_tensor_in_two_shards(tmp_path: Path) -> None:
    sharded(tmp_path)
    save_file({"a": torch.ones(1), "c": torch.arange(5), "d": torch.ones(2, 2)}, tmp_path / TWO)
    assert error_of(tmp_path).startswith(f"{TWO}: {MISPLACED}'a'; ")
    sharded(tmp_path)
    (tmp_path / TWO).write_bytes((tmp_path / ONE).read_bytes())
    assert "2 tensors missing that the index places there: 'c', 'd'; " in error_of(tmp_path)


OUTSIDE = ["../secret.safetensors", "/etc/passwd", "..", ".", "", "sub/x.safetensors"]
OF_WINDOWS = ["..\\x.safetensors", "C:x.safetensors", "\\\\host\\x"]
UNPRINTABLE = ["a\0b", "a\nb", "\u202ex", "\ud800", "n" * 256]


@pytest.mark.parametrize("name", [*OUTSIDE, *OF_WINDOWS, *UNPRINTABLE], ids=ascii)
def test_a_shard_lies_in_the_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / "model"
    (folder / "sub").mkdir(parents=True)
    for place in (tmp_path / "secret.safetensors", folder / "sub" / "x.safetensors"):
        save_file({"a": torch.ones(1)}, place)
    with pytest.raises(FileError, match=r"a model's files lie in its own folder$"):
        checked_path(folder, name)
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": name}}))
    said = error_of(folder)
    # half a character is no text of JSON
    says = "an unpaired surrogate" if name == "\ud800" else f"its own folder ({INDEX} refers to it)"
    assert says in said


def test_links(tmp_path: Path) -> None:
    """Inside the folder, yes; out of it, no, by whatever way; a folder that is a link itself is the
    user's choice.
    """
    folder, secret = tmp_path / "model", tmp_path / "secret"
    (folder / "sub").mkdir(parents=True)
    secret.mkdir()
    real = single(secret)
    link = folder / SINGLE
    (folder / "kept.safetensors").write_bytes(real.read_bytes())
    link.symlink_to("kept.safetensors")
    assert checked_path(folder, SINGLE) == link
    assert len(CheckpointTensors.open(folder).tensors) == 2
    (tmp_path / "other").symlink_to(folder)
    assert len(CheckpointTensors.open(tmp_path / "other").tensors) == 2
    for target in (real, "../secret/model.safetensors", "sub/../../secret/model.safetensors"):
        link.unlink()
        link.symlink_to(target)
        says = f"{SINGLE} is a link out of its folder, to {str(real)!r}, and is not followed; "
        assert error_of(folder).startswith(says)
    link.unlink()
    (folder / "way").symlink_to(real)
    link.symlink_to("way")
    assert "is a link out of its folder" in error_of(folder), "over a link that lies inside"
    link.unlink()
    link.symlink_to("gone")
    assert "is a link to 'gone', which is missing" in error_of(folder)
    link.unlink()
    link.symlink_to(SINGLE)
    assert error_of(folder).startswith(f"{SINGLE} cannot be read: ")


def cached(root: Path, repository: str = "models--x--y", snapshots: str = "snapshots") -> Path:
    """A snapshot as huggingface_hub lays it out."""
    snapshot = root / repository / snapshots / "0123"
    snapshot.mkdir(parents=True)
    (root / repository / "blobs").mkdir()
    save_file({"a": torch.ones(3)}, root / repository / "blobs" / "abcd")
    (snapshot / SINGLE).symlink_to("../../blobs/abcd")
    return snapshot


def test_the_cache_of_the_hub(tmp_path: Path) -> None:
    snapshot = cached(tmp_path)
    assert CheckpointTensors.open(snapshot).tensors["a"].file == snapshot / SINGLE
    assert raw_bytes(dict(CheckpointTensors.open(snapshot).read())["a"]) == raw_bytes(torch.ones(3))
    below = snapshot / "1_Part"
    below.mkdir()
    (below / SINGLE).symlink_to("../../../blobs/abcd")
    assert checked_path(below, SINGLE).exists(), "a folder of a snapshot"
    (tmp_path / "model").symlink_to(snapshot)
    assert len(CheckpointTensors.open(tmp_path / "model").tensors) == 1
    other = cached(tmp_path, "models--x--z")
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to(os.path.relpath(other.parents[1] / "blobs" / "abcd", snapshot))
    assert "is a link out of its folder" in error_of(snapshot), "the blobs of another repository"
    blob = tmp_path / "models--x--y" / "blobs" / "abcd"
    (snapshot / SINGLE).unlink()
    (snapshot / SINGLE).symlink_to("../../blobs/abcd")
    blob.unlink()
    blob.symlink_to(single(tmp_path))
    assert "is a link out of its folder" in error_of(snapshot), "a blob that is a link itself"


@pytest.mark.parametrize(
    ("repository", "snapshots"), [("model", "snapshots"), ("models--x--y", "versions")]
)
def test_what_only_looks_like_the_cache(repository: str, snapshots: str, tmp_path: Path) -> None:
    assert "is a link out of its folder" in error_of(cached(tmp_path, repository, snapshots))


def test_what_is_no_regular_file(tmp_path: Path) -> None:
    """Nothing is waited for: a pipe without a writer would block for ever."""
    path = tmp_path / SINGLE
    path.mkdir()
    assert error_of(tmp_path) == f"{SINGLE} is a folder; it must be a regular file"
    path.rmdir()
    os.mkfifo(path)
    assert error_of(tmp_path) == f"{SINGLE} is a named pipe; it must be a regular file"
    with pytest.raises(FileError, match="is a named pipe"), open_regular(path):
        pass
    path.unlink()
    here = Path.cwd()
    with socket.socket(socket.AF_UNIX) as listener:
        os.chdir(tmp_path)  # the name of a socket may have 108 bytes
        try:
            listener.bind(SINGLE)
        finally:
            os.chdir(here)
    assert error_of(tmp_path) == f"{SINGLE} is a socket; it must be a regular file"
    with pytest.raises(FileError, match=r"^/dev/zero is a device; it must be a regular file$"):
        checked_path(Path("/dev"), "zero")
    with pytest.raises(FileError, match=r"^/dev/zero is a device; it must be"):
        read_bytes(Path("/dev/zero"), 10)


def test_what_cannot_be_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = single(tmp_path)
    assert read_bytes(path, 10**6) == path.read_bytes()
    with pytest.raises(FileError, match=r"has \d+ bytes; at most 10 are read$"):
        read_bytes(path, 10)
    with (
        open_regular(path) as (file, _),
        pytest.raises(FileError, match="ended 7 bytes early: it became shorter"),
    ):
        read_exactly(file, path.stat().st_size + 7, path)
    with pytest.raises(FileError, match=r"gone is missing$"):
        checked_path(tmp_path, "gone")
    with pytest.raises(FileError, match=r"gone is missing$"), open_regular(tmp_path / "gone"):
        pass
    for place, reason in ((tmp_path / "gone", "No such file or directory"), (path, "Not a")):
        assert f"cannot be read as a folder: {reason}" in error_of(place)

    def refuse(*_: Any) -> int:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(os, "open", refuse)
    assert error_of(tmp_path) == f"{SINGLE} cannot be read: Permission denied"


FOLDERS: dict[str, tuple[list[str], str]] = {
    "nothing": ([], "a model folder has it, or model.safetensors.index.json and its shards"),
    "a pickle": (["pytorch_model.bin", "config.json"], "PyTorch weights, a pickle, which"),
    "pickles": (["b.pt", "a.pt"], "the folder has 'a.pt' and 1 more, PyTorch weights"),
    "an index of pickles": (["pytorch_model.bin.index.json"], "an index"),
    "GGUF": (["M.Q4.GGUF"], "a GGUF file of llama.cpp, which regard.load reads"),
    "Keras": (["tf_model.h5"], "TensorFlow weights; convert them to"),
    "Flax": (["flax_model.msgpack"], "Flax weights; convert"),
    "an adapter": (["adapter_model.safetensors"], "an adapter, which needs its base model"),
    "a shard alone": ([ONE], "a shard; download model.safetensors.index.json"),
    "another name": (["consolidated.safetensors"], "a safetensors file of another name"),
    "a name that plays": (["a\x1b[2J.pt"], "the folder has 'a\\x1b[2J.pt', PyTorch weights"),
}


@pytest.mark.parametrize("name", FOLDERS)
def test_folders_without_safetensors(name: str, tmp_path: Path) -> None:
    files, says = FOLDERS[name]
    for file in files:
        (tmp_path / file).write_bytes(b"\x80\x02")
    said = error_of(tmp_path)
    assert said.startswith(f"{SINGLE} is missing; ")
    assert says in said
    assert not files or "the folder has '" in said


@pytest.mark.parametrize("how", ["replaced", "longer", "shorter", "touched", "gone", "a pipe"])
@pytest.mark.parametrize("threads", [1, 3])
def test_a_file_that_changes_after_its_header_was_checked(
    threads: int, how: str, tmp_path: Path
) -> None:
    buffering = ReadBuffering(threads=threads)
    path = single(tmp_path, a=torch.arange(100_000.0))
    store = CheckpointTensors.open(tmp_path)
    content = path.read_bytes()
    if how == "longer":
        path.write_bytes(content + b"x")
    elif how == "shorter":
        os.truncate(path, 1000)  # under a mapping this is SIGBUS
    elif how == "touched":
        os.utime(path, (1, 1))
    else:
        path.unlink()
        if how == "replaced":
            path.write_bytes(content)
        elif how == "a pipe":
            os.mkfifo(path)
    says = {"gone": "is missing", "a pipe": "is a named pipe"}.get(how, "was changed after its")
    with pytest.raises(FileError, match=says):
        dict(store.read(buffering=buffering))


def test_a_file_that_changes_while_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = single(tmp_path, a=torch.ones(6))  # a second one would be opened again
    store = CheckpointTensors.open(tmp_path)
    fill = safetensors_files.read_into

    def write_after(*args: Any) -> None:
        fill(*args)
        os.utime(path, (1, 1))

    monkeypatch.setattr(safetensors_files, "read_into", write_after)
    with pytest.raises(FileError, match="was changed after its header was read"):
        dict(store.read())


def test_the_header_is_checked_before_anything_is_allocated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Tensor:
        raise RuntimeError("out of memory")

    single(tmp_path)
    monkeypatch.setattr(torch, "empty", refuse)
    store = CheckpointTensors.open(tmp_path)
    with pytest.raises(FileError, match=r"'a' needs 24 bytes of memory, which are not available$"):
        next(store.read())


def test_booleans_are_0_or_1(tmp_path: Path) -> None:
    path = single(tmp_path, a=torch.tensor([True, False, True]))
    path.write_bytes(path.read_bytes()[:-1] + b"\x02")
    with pytest.raises(FileError, match="holds a byte 2; only 0 and 1 are booleans"):
        dict(CheckpointTensors.open(tmp_path).read())


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_tensor_owns_its_memory(threads: int, tmp_path: Path) -> None:
    """Nothing shares it, nobody but the caller keeps it, and the file can go."""
    buffering = ReadBuffering(threads=threads)
    path = single(tmp_path, a=torch.ones(64), b=torch.ones(64), c=torch.ones(64))
    coming = CheckpointTensors.open(tmp_path).read(buffering=buffering)
    _, first = next(coming)
    _, second = next(coming)
    first.zero_()
    assert second.sum() == 64
    assert first.untyped_storage().nbytes() == 256
    gone = weakref.ref(second)
    del second
    gc.collect()
    assert gone() is None, "it is not kept while the caller has the turn"
    next(coming)
    path.unlink()
    assert first.sum() == 0


@pytest.mark.parametrize("threads", [1, 3])
def test_little_is_read_ahead(
    threads: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of a caller who keeps nothing: at most the window, and the one tensor that is larger."""
    buffering = ReadBuffering(piece=1000, ahead=4000, threads=threads)
    sizes = [100, 9000, 1000, 1000, 1000, 2000, 3000, 5000, 100, 100]
    single(tmp_path, **{f"t{i}": torch.zeros(n, dtype=torch.uint8) for i, n in enumerate(sizes)})
    live, most, make = [0], [0], torch.empty

    def count(*args: Any, **kwargs: Any) -> Tensor:
        made = make(*args, **kwargs)
        live[0] += made.nbytes
        most[0] = max(most[0], live[0])
        weakref.finalize(made, drop, made.nbytes)
        return made

    def drop(size: int) -> None:
        live[0] -= size

    monkeypatch.setattr(torch, "empty", count)
    for _, x in CheckpointTensors.open(tmp_path).read(buffering=buffering):
        del x
    assert live == [0]
    assert most[0] <= 9000 + (4000 if threads > 1 else 0)


@pytest.mark.full
def test_no_thread_is_left_behind(tmp_path: Path) -> None:
    buffering = ReadBuffering(piece=16, threads=3)
    single(tmp_path, a=torch.ones(64), b=torch.ones(64))
    before = threading.active_count()
    coming = CheckpointTensors.open(tmp_path).read(buffering=buffering)
    next(coming)
    assert threading.active_count() > before, "there were some"
    coming.close()
    assert threading.active_count() == before
    for _ in CheckpointTensors.open(tmp_path).read(buffering=buffering):
        break
    gc.collect()
    assert threading.active_count() == before


def test_many_readers_at_once(tmp_path: Path) -> None:
    buffering = ReadBuffering(threads=2)
    tensors = sharded(tmp_path)
    store, wrong = CheckpointTensors.open(tmp_path), []

    def read() -> None:
        for _ in range(5):
            found = dict(store.read(buffering=buffering))
            wrong.extend(n for n in tensors if raw_bytes(found[n]) != raw_bytes(tensors[n]))

    threads = [threading.Thread(target=read) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


def test_a_device_of_the_caller_changes_nothing(tmp_path: Path) -> None:
    single(tmp_path, a=torch.ones(3))
    with torch.device("meta"):
        assert dict(CheckpointTensors.open(tmp_path).read())["a"].device.type == "cpu"


def test_a_sparse_file_costs_nothing_to_look_at(tmp_path: Path) -> None:
    """A terabyte that the disk does not hold: the header is right, and nothing is allocated for
    looking at it.
    """
    size = 2**40
    header = json.dumps({"a": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    path = tmp_path / SINGLE
    path.write_bytes(struct.pack("<Q", len(header)) + header)
    os.truncate(path, 8 + len(header) + size)
    assert CheckpointTensors.open(tmp_path).bytes == size


NUMBERS = [x for x in DTYPES.values() if x.is_floating_point or x.is_complex]


@pytest.mark.parametrize("dtype", NUMBERS, ids=str)
def test_finite(dtype: torch.dtype) -> None:
    """NaN and infinity are found wherever they are; the largest and smallest numbers are none."""
    real = torch.float32 if dtype.is_complex else dtype
    limits = torch.finfo(real)
    numbers = torch.tensor([limits.max, limits.tiny, 1.0] * 50, dtype=torch.float64)
    x = numbers.to(dtype).reshape(3, 50)
    check_finite("a", x)
    check_finite("a", x[:0])
    for at in ((0, 0), (1, 7), (2, 49)):
        bad = x.clone()
        bad[at] = float("nan")
        says = f"'a' has values that are not finite: 1 of 150 NaN, 0 infinite, the first at {[*at]}"
        with pytest.raises(FileError, match=re.escape(says)):
            check_finite("a", bad)
    infinite = torch.tensor([float("inf"), -float("inf")]).to(dtype)
    if bool(infinite.to(torch.complex64).isinf().all()):  # some of 8 bits have no infinity
        with pytest.raises(FileError, match=r"0 of 2 NaN, 2 infinite, the first at \[0\]"):
            check_finite("a", infinite)


def test_finite_counts_over_all_pieces() -> None:
    x = torch.zeros(3, 1 << 19, 2)
    x[1, 5, 1] = float("nan")
    x[2, -1, -1] = float("inf")
    x[2, 0, 0] = float("nan")
    says = r"^'x\\n' has .*: 2 of 3145728 NaN, 1 infinite, the first at \[1, 5, 1\]"
    with pytest.raises(FileError, match=says):
        check_finite("x\n", x)
    for dtype in (torch.int64, torch.bool):
        check_finite("a", torch.ones(3, dtype=dtype))
    check_finite("a", torch.tensor(1.0))
    with pytest.raises(FileError, match=r"1 of 1 NaN, 0 infinite, the first at \[\]"):
        check_finite("a", torch.tensor(float("nan")))
    check_finite("a", torch.ones(4, 6).T)


def test_the_official_reader_forgives_what_we_refuse(tmp_path: Path) -> None:
    """The controls of these tests: files that a reader without our checks opens."""
    path = tmp_path / SINGLE
    path.write_bytes(save({"a": torch.tensor([True])})[:-1] + b"\x02")
    assert load_file(path)["a"].dtype is torch.bool
