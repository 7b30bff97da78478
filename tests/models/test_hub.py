"""Repositories of the hub, from a stand-in server on loopback: what is asked for, what is refused,
and what is said.
"""

from __future__ import annotations

import builtins
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard import ArgumentError, FileError
from regard.cli.app import run
from regard.models import hub
from tests.models import small
from tests.models.hub_server import COMMIT, OLDER, REPOSITORY, Hub, serving

pytest.importorskip("huggingface_hub")
from huggingface_hub import constants


@pytest.fixture
def origin(tmp_path: Path) -> Path:
    """The repository's files: a small model, and what must never be asked for."""
    folder = tmp_path / "origin"
    folder.mkdir()
    small.write(folder, small.model())
    for name in ("pytorch_model.bin", "modeling_mine.py", "onnx/model.onnx", "README.md"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_bytes(b"\x80 no")
    return folder


@pytest.fixture
def server(origin: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """The stand-in, and a cache of its own; the library reads the environment when it is imported,
    so its constants are set.
    """
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_XET_CACHE", str(tmp_path / "xet"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_IMPLICIT_TOKEN", True)
    monkeypatch.setattr(socket, "getaddrinfo", on_loopback)
    with serving(origin) as found:
        point_at(found.url, monkeypatch)
        yield found


def point_at(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "ENDPOINT", url)
    template = f"{url}/{{repo_id}}/resolve/{{revision}}/{{filename}}"
    monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)


lookup = socket.getaddrinfo


def on_loopback(host: Any, *args: Any, **more: Any) -> Any:
    """No name is looked up, and no other machine is asked."""
    assert host in ("127.0.0.1", b"127.0.0.1"), host
    return lookup(host, *args, **more)


def logits(model: Any) -> torch.Tensor:
    found: torch.Tensor = model(torch.tensor([[1, 2, 3]]))
    return found


def shard(folder: Path) -> None:
    """The same weights in two files and an index."""
    path = folder / "model.safetensors"
    held = load_file(path)
    path.unlink()
    names = sorted(held)
    places = {}
    for i, some in enumerate((names[::2], names[1::2])):
        file = f"model-0000{i + 1}-of-00002.safetensors"
        save_file({name: held[name] for name in some}, folder / file)
        places |= dict.fromkeys(some, file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))


def refusal(source: str = REPOSITORY, **options: Any) -> str:
    with pytest.raises(FileError) as error:
        regard.load(source, **options)
    return str(error.value)


@pytest.mark.parametrize("form", ["", "hub:"])
def test_a_repository_is_the_folder_that_it_was_made_from(
    form: str, server: Hub, origin: Path
) -> None:
    model = regard.load(form + REPOSITORY)
    assert torch.equal(logits(model), logits(regard.load(origin)))
    assert model.has_tokenizer
    assert server.downloaded == {"config.json", "tokenizer.json", "model.safetensors"}, (
        "no code, no pickle, nothing that is not read"
    )


def test_the_second_time_nothing_is_downloaded(server: Hub) -> None:
    regard.load(REPOSITORY)
    server.asked.clear()
    regard.load(REPOSITORY)
    assert server.downloaded == set()


def test_shards(server: Hub, origin: Path) -> None:
    wanted = logits(regard.load(origin))
    shard(origin)
    (origin / "consolidated.safetensors").write_bytes(b"the same weights again")
    assert torch.equal(logits(regard.load(REPOSITORY)), wanted)
    read = {"config.json", "tokenizer.json", "model.safetensors.index.json"}
    assert server.downloaded == read | {f"model-0000{i}-of-00002.safetensors" for i in (1, 2)}


@pytest.mark.parametrize(
    "file, says",
    [
        ("../../secrets.safetensors", "'../../secrets.safetensors' is not a plain file name"),
        ("pytorch_model.bin", "refers to 'pytorch_model.bin', which is not a safetensors file"),
    ],
)
def test_an_index_that_leads_elsewhere(file: str, says: str, server: Hub, origin: Path) -> None:
    shard(origin)
    index = origin / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": {"a": file}}))
    assert says in refusal()
    assert server.downloaded == {"config.json", "tokenizer.json", index.name}


def test_a_revision(server: Hub, origin: Path, tmp_path: Path) -> None:
    older = tmp_path / "older"
    older.mkdir()
    small.write(older, small.model(seed=1))
    server.commits[OLDER] = older
    server.refs["v1"] = OLDER
    wanted = logits(regard.load(older))
    assert torch.equal(logits(regard.load(REPOSITORY, revision="v1")), wanted)
    assert torch.equal(logits(regard.load(REPOSITORY, revision=OLDER)), wanted)
    assert not torch.equal(logits(regard.load(REPOSITORY)), wanted)
    assert "org/small on the hub has no revision 'v9'" in refusal(revision="v9")
    with pytest.raises(ArgumentError, match="revision is empty"):
        regard.load(REPOSITORY, revision="")


@pytest.mark.parametrize("source", ["tiny", "origin"])
def test_a_revision_of_what_is_not_on_the_hub(source: str, server: Hub) -> None:
    with pytest.raises(ArgumentError, match=f"and '{source}' is not a repository"):
        regard.load(source, revision="v1")
    assert server.asked == []


def test_repositories_that_are_not_given(server: Hub) -> None:
    assert "org/nothing on the hub does not exist, or is private" in refusal("org/nothing")
    server.gated = True
    assert "may be read only by those who have accepted its conditions" in refusal()


def test_a_server_that_fails(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    server.broken["config.json"] = 404
    assert refusal().startswith("org/small on the hub ")
    point_at("http://127.0.0.1:9", monkeypatch)  # nobody listens there
    text = refusal()
    assert "org/small on the hub was not downloaded completely: ConnectError" in text
    assert "With HF_HUB_OFFLINE=1 only the cache is read" in text


def test_a_download_that_ends_early(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.sleep", lambda _: None)
    server.broken["model.safetensors"] = "short"
    text = refusal()
    assert text.startswith("org/small on the hub was not downloaded completely: ")
    assert "The finished part is kept; load it again" in text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert "org/small on the hub is not complete in the cache" in refusal()
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    server.broken.clear()
    regard.load(REPOSITORY)


@pytest.mark.parametrize(
    "file, says",
    [
        ("pytorch_model.bin", "it has 'pytorch_model.bin', PyTorch weights, a pickle"),
        ("model.gguf", "it has 'model.gguf', a GGUF file of llama.cpp"),
        ("adapter_model.safetensors", "it has 'adapter_model.safetensors', an adapter"),
        ("README.md", "it has 2 other files"),
    ],
)
def test_repositories_without_safetensors(
    file: str, says: str, server: Hub, tmp_path: Path
) -> None:
    folder = tmp_path / "other"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}')
    (folder / file).write_bytes(b"\x80")
    server.commits[COMMIT] = folder
    assert f"has no model.safetensors, and nothing was downloaded; {says}" in refusal()
    assert server.downloaded == set()


def test_what_is_not_understood_is_refused_before_its_weights_come(
    server: Hub, origin: Path
) -> None:
    small.change_config(origin, quality=1)
    assert "unknown key 'quality'" in refusal()
    small.change_config(origin, model_type="nothing")
    server.commits[OLDER] = origin
    assert "model_type 'nothing' is not supported" in refusal(revision=OLDER)
    assert not any(name.endswith(".safetensors") for name in server.downloaded)


def test_offline_is_the_cache(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    text = refusal()
    assert "is not complete in the cache at its main branch, and HF_HUB_OFFLINE forbids" in text
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    wanted = logits(regard.load(REPOSITORY))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    server.asked.clear()
    assert torch.equal(logits(regard.load(REPOSITORY)), wanted)
    assert server.asked == []


@pytest.mark.parametrize(
    "source",
    ["origin/nothing", "./org/small", "a/b/c", "org--x/y", "nothing", "none/model.safetensors"],
)
def test_a_mistyped_path_asks_nobody(source: str, server: Hub) -> None:
    text = refusal(source)
    assert text.startswith(f"no model '{source}'")
    assert "nothing is downloaded" in text
    assert server.asked == []


def test_a_path_and_a_folder_of_that_name_are_no_repositories(server: Hub, tmp_path: Path) -> None:
    with pytest.raises(FileError, match="neither a named model"):
        regard.load(Path(REPOSITORY))
    there = tmp_path / "org" / "small"
    there.mkdir(parents=True)
    small.write(there, small.model(seed=2))
    regard.load(REPOSITORY)
    assert server.asked == []
    assert refusal("hub:a b").startswith("'hub:a b' is not the name of a repository")


def test_without_the_extra(server: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    plain = builtins.__import__

    def without(name: str, *args: Any, **more: Any) -> Any:
        if name.split(".")[0] == "huggingface_hub":
            raise ImportError(name)
        return plain(name, *args, **more)

    monkeypatch.setattr(builtins, "__import__", without)
    text = refusal()
    assert text.startswith(
        "no model 'org/small': it is not a folder here, and it is not downloaded"
    )
    assert text.endswith(f"because the extra hub is not installed; install it with {hub.INSTALL}")


@pytest.mark.full
def test_the_commands_take_a_repository(
    server: Hub, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    server.refs["v1"] = COMMIT
    common = ["--revision", "v1"]
    assert run(["generate", "the", "--max-tokens", "1", "--model", REPOSITORY, *common]) == 0
    assert run(["explain", "the key", "--model", REPOSITORY, "--json", *common]) == 0
    assert run(["convert", REPOSITORY, "out", "--to", "mqa", "--tokens", "8", *common]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()
    capsys.readouterr()
    server.asked.clear()
    assert run(["cost", REPOSITORY, "--json", *common]) == 0
    assert json.loads(capsys.readouterr().out)["model"] == REPOSITORY
    assert server.downloaded <= {"config.json"}
    assert run(["cost", "gpt2", *common]) == 2
    assert run(["generate", "the", "--model", REPOSITORY, "--revision", "v9"]) == 1
    assert "has no revision 'v9'" in capsys.readouterr().err


@pytest.mark.full
def test_the_environment_names_the_server_and_a_bar_shows_the_progress(
    server: Hub, tmp_path: Path
) -> None:
    """In a process of its own: the library reads the environment once."""
    given = {
        "HF_ENDPOINT": server.url,
        "HF_HOME": str(tmp_path / "home"),
        "TQDM_POSITION": "-1",
        "HF_HUB_DISABLE_IMPLICIT_TOKEN": "1",
        "HF_HUB_DISABLE_TELEMETRY": "1",
    }
    code = "import regard, sys; print(regard.load(sys.argv[1]).config.vocab_size)"
    environment = {k: v for k, v in os.environ.items() if k != "HF_HUB_OFFLINE"} | given
    command = [sys.executable, "-c", code, REPOSITORY]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment)
    assert done.stdout == "300\n"
    assert "Downloading" in done.stderr
    assert "%" in done.stderr


def test_blobs_that_all_repositories_share(tmp_path: Path) -> None:
    """huggingface_hub 2 lays files of its newer storage in one store for the whole cache, behind
    two links.
    """
    cache = tmp_path / "hub"
    repository = cache / "models--org--small"
    snapshot, blobs, digest = repository / "snapshots" / COMMIT, repository / "blobs", "c" * 64
    shared = cache / "blobs" / digest[:2]
    for folder in (snapshot, blobs, shared):
        folder.mkdir(parents=True)
    small.write(snapshot, small.model())
    (snapshot / "model.safetensors").rename(shared / digest)
    (blobs / "etag").symlink_to(f"../../blobs/{digest[:2]}/{digest}")
    (snapshot / "model.safetensors").symlink_to("../../blobs/etag")
    regard.load(snapshot)
    (blobs / "etag").unlink()
    (blobs / "etag").symlink_to("../../blobs/secrets")
    (cache / "blobs" / "secrets").write_bytes(b"")
    with pytest.raises(FileError, match="is a link out of its folder"):
        regard.load(snapshot)
