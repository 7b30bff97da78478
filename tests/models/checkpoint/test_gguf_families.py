"""Every architecture of GGUF files: a tiny model, written as llama.cpp's converter does, computes
what its checkpoint computes.

All files gave the probabilities of llama.cpp (xllamacpp 2026.10) within 1e-5, or 7e-3 where it
computes GELU with 16 bits; `python -m tests.models.checkpoint.gguf_convert FOLDER` writes them.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import regard
from regard.errors import FileError
from regard.models.checkpoint.gguf_config import ARCHITECTURES
from tests.models.checkpoint.gguf_convert import CASES, convert, stored_tensors, tiny_network

IDS = torch.randint(3, 250, (1, 24), generator=torch.Generator().manual_seed(1))


@pytest.mark.full(keep=["gemma3", "falcon-40b", "granitemoe", "gpt2", "phi3"])
@pytest.mark.parametrize("case", CASES)
def test_a_file_computes_what_its_checkpoint_computes(case: str, tmp_path: Path) -> None:
    architecture, model_type, keys = CASES[case]
    network, config = tiny_network(model_type, keys)
    stored = stored_tensors(network, model_type)
    path = convert(tmp_path / "m.gguf", architecture, model_type, config, stored)
    model = regard.load(path)
    wanted, logits = network(IDS), model(IDS)
    assert wanted.std() > 0.1
    torch.testing.assert_close(logits, wanted)
    # two heads of a matrix that changed places
    name = next(n for n in stored if n.endswith("weight") and _first_map(n))
    wrong = {**stored, name: stored[name].roll(1, 0)}
    other = regard.load(convert(tmp_path / "w.gguf", architecture, model_type, config, wrong))
    assert (other(IDS) - wanted).abs().max() > 1e-3


def _first_map(name: str) -> bool:
    """Whether a stored matrix makes the queries."""
    ends = ("q_proj.weight", "query_key_value.weight", "c_attn.weight", "Wqkv.weight")
    return name.endswith((*ends, "qkv_proj.weight"))


def test_every_architecture_has_a_case() -> None:
    assert {architecture for architecture, _, _ in CASES.values()} == ARCHITECTURES.keys()


def test_a_file_of_another_pattern_of_windows(tmp_path: Path) -> None:
    """The layers with windows are those that the file names, and a window needs its size."""
    architecture, model_type, keys = CASES["olmo3"]
    network, config = tiny_network(model_type, keys)
    path = convert(
        tmp_path / "m.gguf",
        architecture,
        model_type,
        config,
        stored_tensors(network, model_type),
        add_sliding_window_pattern=[False, True, True, True],
    )
    model = regard.load(path)
    assert model.config.layer_types[0] == "full_attention"
    assert (model(IDS) - network(IDS)).abs().max() > 1e-3
    with pytest.raises(FileError, match="layer_types"):
        regard.load(
            convert(
                tmp_path / "n.gguf",
                architecture,
                model_type,
                config,
                stored_tensors(network, model_type),
                add_sliding_window_pattern=[True],
            )
        )
