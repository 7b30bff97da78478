"""Filling a model: each stored tensor is used, each parameter is filled, or the folder is
refused.
"""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from regard import FileError
from regard.configs.base import ModelConfig
from regard.models.checkpoint.family import Family, TensorRule, bind_names, stacked_rows, transposed
from regard.models.checkpoint.tensors import CheckpointTensors
from regard.models.checkpoint.weights import fill_parameters
from regard.models.save import save
from tests.models import small
from tests.models.small import change_config, change_weights


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return small.write(tmp_path, small.model())


def refusal(folder: Path, **options: Any) -> str:
    with pytest.raises(FileError) as error:
        regard.load(folder, **options)
    return str(error.value).replace(str(folder), "{}")


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
    wide, weight = regard.load(tmp_path, dtype=torch.float32), made.decoder.head.weight
    assert torch.equal(wide.decoder.head.weight, weight.bfloat16().float())
    assert regard.load(tmp_path).decoder.head.weight.dtype == torch.bfloat16


def test_missing_and_unexpected_tensors(folder: Path) -> None:
    def rename(tensors: dict[str, Tensor]) -> None:
        tensors["norm.weight"] = tensors.pop("model.norm.weight")

    change_weights(folder, rename)
    assert refusal(folder) == (
        "{}: 1 missing ['model.norm.weight'], 1 unexpected ['norm.weight (24,)']"
        "; is norm.weight meant to be model.norm.weight?"
    ), "some names with the prefix and some without: no one mapping fits"


def test_a_layer_too_few(folder: Path) -> None:
    change_config(folder, num_hidden_layers=3)
    text = refusal(folder)
    assert text.startswith("{}: 9 missing ['model.layers.2.")
    assert "is a shard missing? --allow-missing PATTERN gives them random weights" in text
    change_config(folder, num_hidden_layers=1)
    assert refusal(folder).startswith("{}: 0 missing [], 9 unexpected ['model.layers.1.")


def test_what_may_be_missing_is_fresh_and_said(folder: Path) -> None:
    change_weights(folder, lambda t: t.pop("model.layers.1.input_layernorm.weight"))
    change_weights(folder, lambda t: t.pop("model.layers.0.mlp.up_proj.weight"))
    assert "2 missing" in refusal(folder)
    assert "1 missing ['model.layers.0.mlp.up_proj.weight']" in refusal(
        folder, allow_missing=["*input_layernorm*"]
    )
    model = regard.load(folder, allow_missing=["*input_layernorm*", "*.up_proj.weight"])
    missing = {"model.layers.1.input_layernorm.weight", "model.layers.0.mlp.up_proj.weight"}
    assert set(model.newly_initialized) == missing
    layers: Any = model.decoder.layers
    assert layers[1].attention_residual.norm.weight.eq(1).all()
    assert layers[0].feed_forward.up.weight.std() > 0.1
    assert not any(p.requires_grad or p.is_meta for p in model.decoder.parameters())


def test_shapes_and_types(folder: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"

    def cut(tensors: dict[str, Tensor]) -> None:
        tensors[name] = tensors[name][:39].clone()

    change_weights(folder, cut)
    assert refusal(folder) == (
        "{}/model.safetensors: model.layers.1.mlp.up_proj.weight is (39, 24); the config requires "
        "(40, 24)"
    )
    change_weights(folder, lambda t: t.update({name: torch.zeros(40, 24, dtype=torch.int8)}))
    assert refusal(folder) == (
        "{}/model.safetensors: model.layers.1.mlp.up_proj.weight is torch.int8; "
        "a weight must be a floating-point number"
    )


def test_weights_that_are_not_finite(folder: Path) -> None:
    change_weights(folder, lambda t: t["model.norm.weight"][3].fill_(float("nan")))
    assert regard.load(folder).decoder.norm.weight.isnan().sum() == 1, "nobody looked"
    assert (
        "'model.norm.weight' has values that are not finite: 1 of 24 NaN, 0 infinite, "
        "the first at [3]" in refusal(folder, finite=True)
    )


def test_an_absent_head_is_tied_unless_the_config_says_no(folder: Path) -> None:
    change_weights(folder, lambda t: t.pop("lm_head.weight"))
    assert "1 missing ['lm_head.weight']" in refusal(folder)
    change_config(folder, tie_word_embeddings=None)
    decoder = regard.load(folder).decoder
    assert decoder.head.weight is decoder.embed.embedding.weight


def test_a_tied_tensor_that_is_stored_twice(tmp_path: Path) -> None:
    small.write(tmp_path, small.model(tie_word_embeddings=True))
    change_weights(
        tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()})
    )
    decoder = regard.load(tmp_path).decoder
    assert decoder.head.weight is decoder.embed.embedding.weight
    change_weights(tmp_path, lambda t: t["lm_head.weight"][0, 0].add_(1))
    assert refusal(tmp_path) == (
        "{}/model.safetensors: lm_head.weight and model.embed_tokens.weight are tied by the "
        "config, and their values "
        "differ; set tie_word_embeddings to false if that is meant"
    )
    change_weights(tmp_path, lambda t: t.pop("model.embed_tokens.weight"))
    decoder = regard.load(tmp_path).decoder
    assert decoder.head.weight is decoder.embed.embedding.weight, "either name will do"


def test_a_folder_without_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    model = regard.load(folder)
    assert model(torch.tensor([[1, 2]])).shape == (1, 2, 300)
    with pytest.raises(FileError, match="this model has no tokenizer: its folder holds no"):
        model.encode("text")


def test_sources_that_are_none(tmp_path: Path) -> None:
    message = (
        "no model '{}/x': it is neither a named model (tiny, minilm, smollm2, gemma3) nor a "
        "folder, and nothing is downloaded for such a name. "
    )
    with pytest.raises(FileError) as error:
        regard.load(tmp_path / "x")
    assert str(error.value).startswith(message.replace("{}", str(tmp_path)))
    assert str(error.value).endswith(
        "downloaded where the extra hub is installed: python -m pip install 'regard[hub]'"
    )


class Pair(nn.Module):
    """Two layers whose parts are stored in several ways."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.ModuleDict({n: nn.Linear(3, w) for n, w in SIZES.items()}) for _ in range(2)
        )
        self.experts = nn.ModuleList(nn.Linear(2, 5, bias=False) for _ in range(3))


SIZES = {"up": 4, "gate": 2}
TABLE: dict[str, str | TensorRule] = {
    "model.h.{}.both.weight": stacked_rows("layers.{}.up.weight", "layers.{}.gate.weight"),
    "model.h.{}.up.bias": "layers.{}.up.bias",
    "model.h.{}.gate.bias": "layers.{}.gate.bias",
    "model.experts": TensorRule(
        ("experts.*.weight",),
        lambda stored, _: stored.unbind(),
        lambda parts: torch.stack(list(parts)),
    ),
}
FAMILY = Family(ModelConfig, lambda _: Pair(), TABLE, prefixes=("model.",), buffers=(r".*\.cache",))


def stored(model: Pair) -> dict[str, Tensor]:
    tensors = {}
    for name, binding in bind_names(model, TABLE).items():
        tensors[name] = binding.rule.pack(
            [model.get_parameter(o) for o in binding.parameters]
        ).detach()
    return tensors


def test_rules_take_what_they_give(tmp_path: Path) -> None:
    model = Pair()
    tensors = stored(model)
    assert {n: tuple(t.shape) for n, t in tensors.items()} == {
        "model.h.0.both.weight": (6, 3),
        "model.h.1.both.weight": (6, 3),
        "model.h.0.up.bias": (4,),
        "model.h.1.up.bias": (4,),
        "model.h.0.gate.bias": (2,),
        "model.h.1.gate.bias": (2,),
        "model.experts": (3, 5, 2),
    }
    renamed = {n.removeprefix("model."): t.contiguous() for n, t in tensors.items()}
    save_file(renamed | {"h.0.cache": torch.zeros(2)}, tmp_path / "model.safetensors")
    with torch.device("meta"):
        other = Pair()
    assert fill_parameters(
        other, FAMILY, CheckpointTensors.open(tmp_path), dtype=torch.float32
    ) == ([], [], None)
    for name, parameter in model.named_parameters():
        assert torch.equal(other.get_parameter(name), parameter), name
    storages = [p.untyped_storage().data_ptr() for p in other.parameters()]
    assert len(set(storages)) == len(storages), "no parameter keeps another one's memory"


def test_two_spellings_of_one_tensor(tmp_path: Path) -> None:
    tensors = {n: t.contiguous() for n, t in stored(Pair()).items()}
    tensors["model.specialists"] = tensors["model.experts"].clone()
    save_file(tensors, tmp_path / "model.safetensors")
    older = replace(FAMILY, rename_stored=lambda name: name.replace("specialists", "experts"))
    with pytest.raises(FileError, match=r"'model.specialists' and 'model.experts' are two names"):
        fill_parameters(Pair(), older, CheckpointTensors.open(tmp_path), dtype=torch.float32)


def test_a_transposed_matrix() -> None:
    weight = torch.randn(4, 3)
    rule = transposed("w")
    assert torch.equal(rule.unpack(rule.pack([weight]), [weight.shape])[0], weight)
    assert rule.pack([weight]).shape == (3, 4)


MEMORY = """
import resource, sys
import regard
from regard.models.checkpoint.tensors import CheckpointTensors
def peak():
    return int(next(x for x in open("/proc/self/status") if x.startswith("VmHWM")).split()[1]) << 10
import torch
regard.load(sys.argv[2])
before = peak()
model = regard.load(sys.argv[1])
print(peak() - before, sum(p.nbytes for p in model.decoder.parameters()))
"""


@pytest.mark.full
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="peak memory is read from /proc")
def test_memory_is_that_of_the_checkpoint(tmp_path: Path) -> None:
    """At most the checkpoint and a tenth; a second copy would be seen."""
    made, other = tmp_path / "made", tmp_path / "small"
    for folder, change in (
        (
            made,
            {
                "vocab_size": 6000,
                "hidden_size": 1024,
                "intermediate_size": 4096,
                "num_hidden_layers": 4,
            },
        ),
        (other, {}),
    ):
        folder.mkdir()
        config = small.config(**change)
        save(small.llama.build(config), config, folder, torch.float16)
    run = subprocess.run(
        [sys.executable, "-c", MEMORY, str(made), str(other)],
        capture_output=True,
        text=True,
        check=True,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
    )
    grown, held = map(int, run.stdout.split())
    assert held > 100 << 20
    assert held * 0.9 < grown <= held * 1.1
