"""config.json: every key is understood, or the folder is refused by name."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

import regard
from regard import FileError
from regard.files.reading import MAX_BYTES
from regard.models.checkpoint.config import read_json
from tests.models import small
from tests.models.small import change_config


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small.write(tmp_path, small.model())


def assert_refused(folder: Path, message: str) -> None:
    """load raises FileError, an OSError, whose message begins so; {} is the folder."""
    with pytest.raises(FileError) as error:
        regard.load(folder)
    assert str(error.value).startswith(message.replace("{}", str(folder), 1))
    assert isinstance(error.value, OSError)


def test_older_and_newer_configs(folder: Path) -> None:
    """rope_theta beside the rest or nested; head_dim and num_key_value_heads left out where they
    are the usual ones.
    """
    change_config(
        folder, rope_theta=None, rope_parameters={"rope_theta": 777.0, "rope_type": "default"}
    )
    assert regard.load(folder).config.rope_theta == 777.0
    change_config(folder, use_cache=True, bos_token_id=1, _name_or_path="somewhere")
    assert regard.load(folder).config.head_dim == 10
    change_config(folder, head_dim=None, num_key_value_heads=None)
    with pytest.raises(FileError, match=r"k_proj\.weight is \(20, 24\); the config requires \(24"):
        regard.load(folder)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "{}/config.json is not JSON: Expecting value: line 1 column 1 (char 0)"),
        (b'{"a": 1,', "{}/config.json is not JSON: Expecting property name enclosed in double"),
        (b"\xff\xfe", "{}/config.json is not JSON: 'utf-8' codec can"),
        (b"[1]", "{}/config.json is a JSON list; it must be an object"),
        (b'{"a": 1, "a": 2}', "{}/config.json has the key 'a' twice"),
    ],
)
def test_files_that_are_no_config(folder: Path, content: bytes, message: str) -> None:
    (folder / "config.json").write_bytes(content)
    assert_refused(folder, message)


@pytest.mark.parametrize(
    "content, says",
    [
        ({}, "model_type None is not supported. Supported: apertus, arcee, bamba, bart, "),
        ({"model_type": ["llama"]}, "model_type ['llama'] is not supported. Supported: "),
        ({"model_type": "../x"}, "model_type '../x' is not supported. Supported: "),
        ({"model_type": "lama"}, "model_type 'lama' is not supported; did you mean 'llama'?"),
    ],
)
def test_families_that_are_not_there(folder: Path, content: dict[str, Any], says: str) -> None:
    (folder / "config.json").write_text(json.dumps(content))
    with pytest.raises(FileError, match=re.escape(f"{folder}/config.json: {says}")):
        regard.load(folder)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"num_hiden_layers": 2}, "unknown key 'num_hiden_layers'; did you mean"),
        ({"auto_map": {"AutoModel": "evil.py"}}, "auto_map names code in the checkpoint, which"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'; only 'silu' is supported for llama"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder is True; only False is supported"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads is {'0': [1]}; only {} or None is supported"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers is '2'; it must be int"),
        ({"num_hidden_layers": True}, "num_hidden_layers is True; it must be int"),
        ({"num_hidden_layers": 2.0}, "num_hidden_layers is 2.0; it must be int"),
        ({"tie_word_embeddings": 0}, "tie_word_embeddings is 0; it must be bool"),
        ({"rms_norm_eps": "1e-6"}, "rms_norm_eps is '1e-6'; it must be float"),
        ({"num_hidden_layers": -1}, "num_hidden_layers is -1; it must be at least 1"),
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, and the folder has 21"),
        ({"head_dim": 10**9}, "head_dim is 1000000000; the largest accepted value is 1048576"),
        ({"hidden_size": 10**19}, "hidden_size is 10000000000000000000; the largest accepted"),
        ({"vocab_size": 2**63}, "vocab_size is 9223372036854775808; the largest accepted value"),
        ({"max_position_embeddings": 2**62}, "max_position_embeddings is 4611686018427387904"),
        ({"num_attention_heads": 10**6}, "num_attention_heads is 1000000; the largest accepted"),
        ({"num_hidden_layers": 300}, "num_hidden_layers is 300, and the folder has 21 tensors"),
        ({"hidden_act": "\x1b[2J"}, "hidden_act is '\\x1b[2J'; only 'silu' is supported for llama"),
        ({"rope_scaling": [2]}, "rope_scaling is [2]; it must be an object"),
        ({"dtype": "float16"}, "dtype is 'float16' and torch_dtype is 'float32'; they mean"),
        ({"num_key_value_heads": 3}, "4 query heads are not divisible by 3 key/value heads"),
    ],
)
def test_configs_that_say_something_wrong(
    folder: Path, change: dict[str, Any], message: str
) -> None:
    change_config(folder, **change)
    assert_refused(folder, f"{{}}/config.json: {message}")


def test_configs_that_lack_something(folder: Path) -> None:
    change_config(folder, vocab_size=None, hidden_size=None)
    assert_refused(folder, "{}/config.json: it lacks vocab_size, hidden_size")


def test_a_config_that_lies_elsewhere(folder: Path, tmp_path: Path) -> None:
    there = tmp_path / "there"
    there.mkdir()
    (folder / "config.json").rename(there / "config.json")
    (folder / "config.json").symlink_to(there / "config.json")
    with pytest.raises(FileError, match=r"config\.json is a link out of its folder"):
        regard.load(folder)


def test_a_config_longer_than_configs_are(folder: Path) -> None:
    size = (folder / "config.json").stat().st_size
    assert read_json(folder, "config.json", limit=size)["model_type"] == "llama"
    with pytest.raises(FileError, match=rf"config\.json has {size} bytes; at most 10 are read"):
        read_json(folder, "config.json", limit=10)
    with (folder / "config.json").open("wb") as file:
        file.truncate(MAX_BYTES + 1)
    with pytest.raises(
        FileError, match=rf"config\.json has {MAX_BYTES + 1} bytes; at most {MAX_BYTES}"
    ):
        regard.load(folder)


@pytest.mark.parametrize(
    "named, wanted",
    [
        ({}, "float32"),
        ({"torch_dtype": "bfloat16"}, "bfloat16"),
        ({"torch_dtype": "torch.float16"}, "float16"),
    ],
)
def test_the_dtype_that_the_config_names(folder: Path, named: dict[str, Any], wanted: str) -> None:
    import torch

    change_config(folder, **{"torch_dtype": None, **named})
    assert regard.load(folder).decoder.head.weight.dtype == getattr(torch, wanted)
    assert regard.load(folder, dtype=torch.float64).decoder.head.weight.dtype == torch.float64
    change_config(folder, torch_dtype="int8")
    assert_refused(
        folder,
        "{}/config.json: torch_dtype is 'int8'; it must be float32, float16, bfloat16 or float64",
    )
    with pytest.raises(regard.ArgumentError, match=r"dtype is torch\.int64; weights are float32"):
        regard.load(folder, dtype=torch.int64)


@pytest.mark.parametrize(
    "generation, config, wanted",
    [(None, None, set()), (None, 7, {7}), ([5, 6], 7, {5, 6}), (4, None, {4})],
)
def test_which_ids_end_a_text(folder: Path, generation: Any, config: Any, wanted: set[int]) -> None:
    change_config(folder, eos_token_id=config)
    if generation is not None:
        (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": generation}))
    model = regard.load(folder)
    assert model.eos_ids == (wanted or {model.tokenizer.end_of_text})


def test_ends_that_are_no_ids(folder: Path) -> None:
    change_config(folder, eos_token_id=["a"])
    assert_refused(
        folder, "{}: eos_token_id is ['a']; it must be a token id or a list of token ids"
    )
