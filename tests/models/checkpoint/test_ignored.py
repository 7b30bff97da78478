"""Keys, tensors and files that may be passed over: harmless ones always, others where the caller
says so, never in silence.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import regard
from regard import ArgumentError, ArgumentTypeError, FileError
from regard.cli.app import run
from regard.configs.reader import IGNORED_KEYS, TOOL_KEYS, is_harmless, parse
from regard.models.families import FAMILIES, family
from regard.models.save import save
from tests.models import small
from tests.parity.families.published import published

bert = family("bert")
mpt = family("mpt")

HARMLESS: dict[str, Any] = {
    "_attn_implementation": "flash_attention_2",
    "_attn_implementation_autoset": True,
    "_attn_implementation_internal": None,
    "_flash_attn_2_enabled": True,
    "transformers.js_config": {"dtype": "q4"},
    "unsloth_fixed": True,
    "unsloth_version": "2026.3.3",
    "use_flash_attention_2": False,
    "auto_map": {
        "AutoTokenizer": ["tokenization_mine.Mine", None],
        "AutoProcessor": "processing_mine.Mine",
    },
}
"""What other tools leave in any folder, which is told."""
QUIET: dict[str, Any] = {
    "_num_labels": 2,
    "output_past": True,
    "num_labels": 3,
    "summary_type": "cls_index",
    "summary_use_proj": True,
    "gradient_checkpointing": True,
    "finetuning_task": "squad",
    "task_specific_params": {"a": 1},
    "cls_token_id": 1,
    "max_new_tokens": 7,
    "classifier_dropout": 0.1,
    "_commit_hash": "0" * 40,
    "language": "english",
}
"""Keys of transformers itself that shape no network."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    return small.write(made, small.model())


def change_config(folder: Path, **change: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | change))


def add_tensors(folder: Path, **tensors: Tensor) -> None:
    more = {name.replace("__", "."): x for name, x in tensors.items()}
    small.change_weights(folder, lambda held: held.update(more))


def test_harmless_keys_change_nothing_and_are_told(folder: Path) -> None:
    before = regard.load(folder)
    assert before.ignored == ()
    change_config(folder, **HARMLESS, **QUIET)
    model = regard.load(folder)
    assert set(model.ignored) == set(HARMLESS)
    assert model.config == before.config
    ids = before.encode("the quick fox")
    assert torch.equal(model(ids), before(ids))


@pytest.mark.parametrize("name", FAMILIES)
def test_they_are_harmless_in_every_family(name: str) -> None:
    """No key of the lists shapes a family's network; and a family lists only what is its own."""
    found = family(name)
    own = {*found.config.__dataclass_fields__, *found.config.fixed}
    for key in (*HARMLESS, *QUIET):
        assert is_harmless(key), key
        assert key not in own, key
    assert not any(is_harmless(key) for key in found.config.fixed)
    assert not found.config.ignored & IGNORED_KEYS
    assert not any(key in IGNORED_KEYS for key in TOOL_KEYS)


@pytest.mark.parametrize("keep", [{}, {"AutoModel": "modeling_mine.Mine"}])
def test_code_for_a_tokenizer_is_harmless_and_code_for_a_network_is_not(
    keep: dict[str, str], folder: Path
) -> None:
    change_config(folder, auto_map={"AutoTokenizer": "a.B"} | keep)
    if not keep:
        assert regard.load(folder).ignored == ("auto_map",)
        return
    with pytest.raises(FileError, match="auto_map names code in the checkpoint"):
        regard.load(folder)
    assert regard.load(folder, ignore=["auto_map"]).ignored == ("auto_map",)


def test_an_unknown_key_says_how_to_go_on(folder: Path) -> None:
    change_config(folder, quality="good", **{"a\x1b[2Jb": 1})
    with pytest.raises(FileError) as error:
        regard.load(folder)
    assert str(error.value) == (
        f"{folder}/config.json: unknown key 'quality'. If it does not change the computation, "
        "ignore it: "
        "regard.load(folder, ignore=('quality',)), or --ignore 'quality'"
    )
    with pytest.raises(FileError, match=r"unknown key 'a\\x1b\[2Jb'"):
        regard.load(folder, ignore=["quality"])
    assert regard.load(folder, ignore=["quality", "a*b"]).ignored == ("quality", "a\x1b[2Jb")


def test_an_unknown_key_of_an_inner_object(folder: Path) -> None:
    change_config(folder, rope_scaling={"rope_type": "linear", "factor": 2.0, "note": "x"})
    with pytest.raises(FileError, match=r"or --ignore 'rope_scaling\.note'"):
        regard.load(folder)
    model = regard.load(folder, ignore=["rope_scaling.note"])
    assert model.ignored == ("rope_scaling.note",)
    assert model.config.rope_scaling == {"rope_type": "linear", "factor": 2.0}
    raw = published("mpt-7b")
    raw |= {"attn_config": raw["attn_config"] | {"colour": 1}}
    with pytest.raises(ArgumentError, match=r"or --ignore 'attn_config\.colour'"):
        parse(mpt.config, raw)


@pytest.mark.parametrize(
    "name", ["hidden_act", "num_hidden_layers", "model.norm.weight", "torch_dtype"]
)
def test_what_the_family_needs_cannot_be_passed_over(name: str, folder: Path) -> None:
    change_config(folder, hidden_act="silu")
    message = (
        f"ignore names '{name}', which is not an unknown key or tensor: llama needs it; "
        "leave it out"
    )
    with pytest.raises(ArgumentError, match=message):
        regard.load(folder, ignore=[name])


@pytest.mark.parametrize("name", ["ignore", "allow_missing"])
def test_one_name_is_not_several(name: str, folder: Path) -> None:
    with pytest.raises(
        ArgumentTypeError, match=rf"{name} is a str; give a sequence of patterns: {name}=\['key'\]"
    ):
        regard.load(folder, **{name: "key"})


def test_a_value_that_is_not_supported_cannot_be_passed_over(folder: Path) -> None:
    change_config(folder, hidden_act="gelu")
    with pytest.raises(FileError, match="hidden_act is 'gelu'; only 'silu' is supported"):
        regard.load(folder, ignore=["*"])


def test_weights_in_a_file_of_another_name(folder: Path) -> None:
    change_config(folder, transformers_weights="model.safetensors")
    regard.load(folder)
    change_config(folder, transformers_weights="other.safetensors")
    with pytest.raises(FileError, match=r"transformers_weights is 'other\.safetensors'; only None"):
        regard.load(folder)


def test_many_unknown_keys_end_in_bounded_time(folder: Path) -> None:
    change_config(folder, **{f"x{i}": 1 for i in range(70)})
    with pytest.raises(FileError, match="it has more than 64 unknown keys"):
        regard.load(folder, ignore=["x*"])


def test_tensors_of_another_head(tmp_path: Path) -> None:
    """A base family from the checkpoint of a classifier: what sorts texts is no part of it."""
    config = bert.config(300, 8, 1, 2, 16, 32, pooler=False)
    network = bert.build(config)
    small.randomize(network)
    save(network, config, tmp_path)
    add_tensors(tmp_path, classifier__weight=torch.ones(2, 8), classifier__bias=torch.ones(2))
    with pytest.raises(FileError) as error:
        regard.load(tmp_path)
    assert "2 unexpected ['classifier.bias (2,)', 'classifier.weight (2, 8)']" in str(error.value)
    names = "'classifier.bias', 'classifier.weight'"
    assert f"ignore=[{names}]" in str(error.value)
    assert "--ignore 'classifier.bias' --ignore 'classifier.weight'; *" in str(error.value)
    model = regard.load(tmp_path, ignore=["classifier.*"])
    assert model.ignored == ("classifier.bias", "classifier.weight")
    ids = torch.tensor([[1, 2, 3]])
    with torch.no_grad():  # the kernel is then the same whether or not weights want a gradient
        assert torch.equal(model.hidden(ids), network.eval()(ids))


@pytest.mark.parametrize("name", ["adapter_config.json", "adapter_model.safetensors"])
def test_a_model_beside_an_adapter(name: str, folder: Path) -> None:
    (folder / name).write_text("{}")
    with pytest.raises(FileError, match=rf"--adapter; or .*--ignore {name}"):
        regard.load(folder)
    assert regard.load(folder, ignore=[name]).ignored == (name,)


def test_the_commands_have_the_option(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    change_config(folder, quality="good", unsloth_fixed=True)
    commands = [
        ["generate", "the key", "--max-tokens", "1", "--model", str(folder)],
        ["explain", "the key", "--model", str(folder), "--json"],
        ["convert", str(folder), str(tmp_path / "out"), "--to", "mqa", "--tokens", "8", "--json"],
    ]
    for command in commands:
        assert run(command) == 1
        assert "--ignore 'quality'" in capsys.readouterr().err
        assert run([*command, "--ignore", "quality"]) == 0
        err = capsys.readouterr().err
        assert "ignored in the model's folder: 'unsloth_fixed', 'quality'" in err, command
    written = json.loads((tmp_path / "out" / "config.json").read_text())
    assert not {"quality", "unsloth_fixed"} & set(written)


def test_options_without_a_model_to_load(capsys: pytest.CaptureFixture[str]) -> None:
    assert run(["audit", "torch.nn:MultiheadAttention", "--ignore", "a"]) == 2
    assert "--ignore" in capsys.readouterr().err
    assert run(["explain", "a b", "--attention", "gqa", "--ignore", "a"]) == 2
    assert "--ignore" in capsys.readouterr().err
