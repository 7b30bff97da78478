"""Model folders: what is written is what is read, and each way in which a folder can be wrong."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import regard
from regard import FileError
from regard.models.save import save
from tests.models import small


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small.write(tmp_path, small.model())


def change_config(folder: Path, **change: Any) -> None:
    """None takes a key out."""
    path = folder / "config.json"
    raw = json.loads(path.read_text()) | change
    path.write_text(json.dumps({k: v for k, v in raw.items() if v is not None}))


def change_weights(folder: Path, change: Callable[[dict[str, torch.Tensor]], Any]) -> None:
    path = folder / "model.safetensors"
    tensors = load_file(path)
    change(tensors)
    path.unlink()
    save_file(tensors, path)


def fails(folder: Path, message: str) -> None:
    """load raises FileError, an OSError, with the whole message; {} is the folder."""
    with pytest.raises(FileError) as error:
        regard.load(folder)
    assert str(error.value) == message.replace("{}", str(folder))
    assert isinstance(error.value, OSError)


@pytest.mark.parametrize("tied", [False, True])
def test_what_is_written_is_what_is_read(tied: bool, tmp_path: Path) -> None:
    made = small.model(tie_word_embeddings=tied, rope_theta=777.0)
    small.write(tmp_path, made)
    model = regard.load(tmp_path)
    assert model.config == made.config
    assert not model.decoder.training
    assert not any(p.requires_grad for p in model.decoder.parameters())
    assert (model.decoder.head.weight is model.decoder.embed.embedding.weight) == tied
    ids = model.encode("the quick né 你好")
    assert torch.equal(model(ids), made(ids))
    assert model.tokenizer.decode(ids[0].tolist()) == "the quick né 你好"
    again = tmp_path / "again"
    again.mkdir()
    small.write(again, model)
    for name in ("model.safetensors", "config.json", "tokenizer.json"):
        assert (again / name).read_bytes() == (tmp_path / name).read_bytes(), (
            "save, load, save: the same bytes"
        )
    stored = load_file(tmp_path / "model.safetensors")
    assert ("lm_head.weight" in stored) == (not tied)
    assert len(stored) == 2 * 9 + 3 - tied


def test_half_weights(tmp_path: Path) -> None:
    made = small.model()
    small.write(tmp_path, made)
    save(made.decoder, made.config, tmp_path, torch.bfloat16)
    assert {x.dtype for x in load_file(tmp_path / "model.safetensors").values()} == {torch.bfloat16}
    assert json.loads((tmp_path / "config.json").read_text())["torch_dtype"] == "bfloat16"
    model = regard.load(str(tmp_path))
    weight = made.decoder.embed.embedding.weight
    assert torch.equal(model.decoder.embed.embedding.weight, weight.bfloat16().float())


def test_older_and_newer_configs(folder: Path) -> None:
    """rope_theta beside the rest or nested; head_dim and num_key_value_heads left out where they are the usual ones."""
    change_config(
        folder, rope_theta=None, rope_parameters={"rope_theta": 777.0, "rope_type": "default"}
    )
    assert checkpoint.read_config(folder).rope_theta == 777.0
    change_config(folder, head_dim=None, num_key_value_heads=None, use_cache=True, bos_token_id=1)
    found = checkpoint.read_config(folder)
    assert (found.head_dim, found.num_key_value_heads) == (6, 4)


def test_missing_things(folder: Path, tmp_path: Path) -> None:
    nowhere = tmp_path / "nowhere"
    fails(nowhere, "no model '{}': it is neither an embedded one (tiny) nor a folder")
    fails(
        folder / "config.json", "no model '{}': it is neither an embedded one (tiny) nor a folder"
    )
    for name, message in (
        ("tokenizer.json", "{}/tokenizer.json: cannot read a tokenizer: No such file or directory"),
        ("model.safetensors", "{}/model.safetensors is missing"),
        (
            "config.json",
            "{}/config.json is missing; a model folder holds config.json and model.safetensors",
        ),
    ):
        (folder / name).unlink()
        fails(folder, message)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "{}/config.json cannot be read as JSON: Expecting value: line 1 column 1 (char 0)"),
        (b'{"a": 1,', "{}/config.json cannot be read as JSON: Expecting property name enclosed in double quotes: line 1 column 9 (char 8)"),
        (b"\xff\xfe", "{}/config.json cannot be read as JSON: 'utf-8' codec can't decode byte 0xff in position 0: invalid start byte"),
        (b"[1]", "{}/config.json holds list; it must be a JSON object"),
        (b"{}", "{}/config.json: model_type None is not supported; supported: llama"),
        (b'{"model_type": ["llama"]}', "{}/config.json: model_type ['llama'] is not supported; supported: llama"),
        (b'{"model_type": "../x"}', "{}/config.json: model_type '../x' is not supported; supported: llama"),
    ],
)  # fmt: skip
def test_configs_that_are_none(folder: Path, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    with pytest.raises(FileError) as error:
        regard.load(folder)
    assert str(error.value) == message.replace("{}", str(folder), 1)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hiden_layers": 2}, "unknown key 'num_hiden_layers'; did you mean num_hidden_layers?"),
        ({"auto_map": {"AutoModel": "evil.py"}}, "unknown key 'auto_map'"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported for llama"),
        ({"attention_bias": True}, "attention_bias is True; only False is supported for llama"),
        ({"rope_scaling": {"factor": 2}}, "rope_scaling is {'factor': 2}; only None is supported for llama"),
        (
            {"rope_parameters": {"rope_type": "yarn", "factor": 2}},
            "rope_parameters is {'rope_type': 'yarn', 'factor': 2}; only None is supported for llama",
        ),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'; it must be int"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be int"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0; it must be int"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings is 0; it must be bool"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; it must be float"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be at least 1"),
        (
            {"num_key_value_heads": 3},
            "4 query heads are not divisible by 3 key/value heads; allowed key/value heads: 1, 2, 4",
        ),
    ],
)  # fmt: skip
def test_configs_that_say_something_wrong(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    change_config(folder, **change)
    fails(folder, f"{{}}/config.json: {message}")


def test_configs_that_lack_something(folder: Path) -> None:
    change_config(folder, vocab_size=None, hidden_size=None)
    fails(folder, "{}/config.json lacks vocab_size, hidden_size")


@pytest.mark.parametrize(
    "content, says",
    [
        (
            b"version https://git-lfs.github.com/spec/v1\noid sha256:12\nsize 3\n",
            ": it is a Git LFS pointer; fetch the file itself with `git lfs pull`",
        ),
        (b"<!DOCTYPE html><html>not found</html>", ": it is a web page, not the file; download it again"),
        (b"\n <html>", ": it is a web page, not the file; download it again"),
        (b"PK\x03\x04 and so on", ": it is a zip or a PyTorch pickle, which is never opened; convert it to safetensors elsewhere"),
        (b"\x80\x02}q\x00.", ": it is a pickle, which is never opened; convert it to safetensors elsewhere"),
        (b"", ": 0 bytes; is it a partial download?"),
        (b"\x10\x00\x00\x00\x00\x00\x00\x00{\"a\": ", ": 14 bytes; is it a partial download?"),
        (b"\x02\x00\x00\x00\x00\x00\x00\x00[]", ": 10 bytes; is it a partial download?"),
    ],
    ids=["lfs", "html", "html after space", "zip", "pickle", "empty", "cut header", "no table"],
)  # fmt: skip
def test_weights_that_are_none(folder: Path, content: bytes, says: str) -> None:
    path = folder / "model.safetensors"
    path.write_bytes(content)
    with pytest.raises(
        FileError,
        match=f"^{re.escape(str(path))} is not a whole safetensors file \\(.+\\){re.escape(says)}$",
    ):
        regard.load(folder)


def test_truncated_weights(folder: Path) -> None:
    path = folder / "model.safetensors"
    whole = path.read_bytes()
    for keep in (len(whole) - 1, len(whole) // 2):
        path.write_bytes(whole[:keep])
        with pytest.raises(FileError) as error:
            regard.load(folder)
        assert str(error.value).startswith(f"{path} is not a whole safetensors file (")
        assert str(error.value).endswith(
            f"): it has {keep} of {len(whole)} bytes; is it a partial download?"
        )
    path.write_bytes(whole[:100])
    with pytest.raises(FileError, match=r": 100 bytes; is it a partial download\?$"):
        regard.load(folder)


def test_weights_that_are_a_folder(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").mkdir()
    with pytest.raises(FileError, match=r"model\.safetensors is not a whole safetensors file"):
        regard.load(folder)


def test_missing_and_unexpected_tensors(folder: Path) -> None:
    def rename(tensors: dict[str, torch.Tensor]) -> None:
        tensors["norm.weight"] = tensors.pop("model.norm.weight")

    change_weights(folder, rename)
    fails(
        folder,
        "{}/model.safetensors: 1 missing ['model.norm.weight'], 1 unexpected ['norm.weight']",
    )

    def prefix(tensors: dict[str, torch.Tensor]) -> None:
        for name in list(tensors):
            tensors[f"module.{name}"] = tensors.pop(name)

    change_weights(folder, prefix)
    with pytest.raises(FileError) as error:
        regard.load(folder)
    text = str(error.value)
    assert "21 missing ['lm_head.weight', 'model.embed_tokens.weight', " in text
    assert "21 unexpected ['module.lm_head.weight', " in text
    assert text.count("'") == 2 * 2 * 10, "the first ten of each"


def test_shapes(folder: Path) -> None:
    def cut(tensors: dict[str, torch.Tensor]) -> None:
        name = "model.layers.1.mlp.up_proj.weight"
        tensors[name] = tensors[name][:39].clone()

    change_weights(folder, cut)
    fails(
        folder,
        "{}/model.safetensors: model.layers.1.mlp.up_proj.weight is (39, 24); the config says (40, 24)",
    )


def test_more_layers_than_stored(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)
    with pytest.raises(
        FileError,
        match=r"9 missing \['model\.layers\.2\.input_layernorm\.weight'.*, 0 unexpected \[\]",
    ):
        regard.load(folder)
