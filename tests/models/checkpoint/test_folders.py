"""Sources that are no whole model folder: what they are instead, and the next step."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

import regard
from regard import FileError
from regard.cli.app import run
from tests.models import small

ADAPTER = (
    "an adapter, which needs its base model; merge it into that first (peft: merge_and_unload)"
)
WITHOUT_CONFIG = {
    "an adapter alone": (
        ["adapter_config.json", "adapter_model.safetensors"],
        f"the folder has 'adapter_config.json', {ADAPTER}",
    ),
    "an older adapter": (["adapter_model.bin"], f"the folder has 'adapter_model.bin', {ADAPTER}"),
    "pickles alone": (["pytorch_model.bin"], "the folder has 'pytorch_model.bin', PyTorch"),
    "weights alone": (["model.safetensors"], "the folder has the weights without it; get it from"),
    "shards alone": (["model.safetensors.index.json"], "the folder has the weights without"),
    "a training run": (
        ["checkpoint-500/config.json", "checkpoint-900/config.json"],
        "its subfolder 'checkpoint-500' has one (2 subfolders in all): give that folder",
    ),
    "nothing": (["README.md"], "a model folder has config.json and model.safetensors"),
}


@pytest.mark.parametrize("name", WITHOUT_CONFIG)
def test_folders_without_a_config(name: str, tmp_path: Path) -> None:
    files, says = WITHOUT_CONFIG[name]
    for file in files:
        (tmp_path / file).parent.mkdir(exist_ok=True)
        (tmp_path / file).write_text("{}")
    with pytest.raises(FileError) as error:
        regard.load(tmp_path)
    assert str(error.value).startswith(f"{tmp_path}/config.json is missing; {says}")


def test_a_whole_repository_of_the_cache(tmp_path: Path) -> None:
    folder = tmp_path / "models--org--small"
    (folder / "snapshots" / ("a" * 40)).mkdir(parents=True)
    with pytest.raises(FileError, match="a whole repository of Hugging Face's cache; give one of"):
        regard.load(folder)


def test_an_adapter_with_the_config_of_its_base(tmp_path: Path) -> None:
    """Without any weights of the model, the adapter is what is told."""
    small.write(tmp_path, small.model())
    (tmp_path / "model.safetensors").rename(tmp_path / "adapter_model.safetensors")
    (tmp_path / "adapter_config.json").write_text("{}")
    with pytest.raises(FileError) as error:
        regard.load(tmp_path)
    assert str(error.value) == (
        f"{tmp_path}/model.safetensors is missing; the folder has 'adapter_config.json', {ADAPTER}"
    )


@pytest.mark.parametrize(
    "content, says",
    [
        (b"PK\x03\x04", "is a file: it is a zip or a PyTorch pickle, which regard does not open"),
        (b"\x08\0\0\0\0\0\0\0{}", "is a file; a model is a folder with config.json"),
    ],
)
def test_a_file_is_no_folder(content: bytes, says: str, tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(content)
    with pytest.raises(FileError) as error:
        regard.load(tmp_path / "m.gguf")
    assert str(error.value).startswith(f"{tmp_path}/m.gguf {says}")


def test_names_that_are_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(FileError) as error:
        regard.load("tny")
    assert str(error.value) == (
        "no model 'tny': it is neither a named model (tiny, minilm, smollm2, gemma3) nor a folder, "
        "and nothing is downloaded for such a name. "
        'A repository of the Hugging Face hub is named as "org/name" or "hub:org/name" and '
        "downloaded where the extra hub "
        "is installed: python -m pip install 'regard[hub]'"
    )
    assert run(["cost", "no-such-model"]) == 2
    assert "hub" in capsys.readouterr().err


def test_the_cost_of_a_folder_takes_no_revision(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small.write(tmp_path, small.model())
    assert run(["cost", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["parameters"] > 0
    assert run(["cost", str(tmp_path), "--revision", "v1"]) == 2
    assert (
        "'--revision': applies only to a repository on the hub"
        in capsys.readouterr().err.replace("\n", " ")
    )
