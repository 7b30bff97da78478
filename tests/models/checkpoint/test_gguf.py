"""Models in GGUF files: they compute what the same weights compute, and what is refused."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import regard
from regard.cli import _as_note
from regard.cli.app import run
from regard.errors import ArgumentError, FileError
from regard.files.gguf_files import read_gguf_header
from regard.language import use_language
from regard.models.checkpoint.family import bind_names
from regard.models.checkpoint.gguf_blocks import RECORD_FORMS
from regard.models.families import family
from regard.models.model import Model
from regard.models.text_encoder import TextEncoder
from regard.nn.weights import stored_modules
from tests.models import small
from tests.models.checkpoint import gguf_writer as gguf

gemma = family("gemma")
llama = family("llama")
qwen2 = family("qwen2")
qwen3 = family("qwen3")

MODULES: dict[str, Any] = {"llama": llama, "qwen2": qwen2, "qwen3": qwen3, "gemma": gemma}
IDS = torch.arange(3, 40)[None]
Stored = dict[str, tuple[str, tuple[int, ...], bytes]]


def config_of(architecture: str, **change: Any) -> Any:
    sizes = {
        "vocab_size": 96,
        "hidden_size": 256,
        "intermediate_size": 256,
        "num_hidden_layers": 1,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 64,
        "tie_word_embeddings": architecture in ("gemma", "qwen2"),
    }
    return MODULES[architecture].config(**{**sizes, **change})


def build(config: Any, architecture: str) -> Any:
    network = MODULES[architecture].build(config)
    small.randomize(network)
    for parameter in network.parameters():
        if parameter.ndim == 2:
            parameter.data *= 0.3
    return network.eval().requires_grad_(False)


def checkpoint(network: Any, architecture: str) -> dict[str, Tensor]:
    """The weights under the names of Hugging Face's checkpoints."""
    parameters = dict(network.named_parameters(remove_duplicate=False))
    its_family = family(architecture)
    found: dict[int, tuple[str, Tensor]] = {}
    for name, binding in bind_names(network, its_family.names).items():
        x = parameters[binding.parameters[0]]
        found.setdefault(id(x), (name, x.detach()))
    return dict(found.values())


def stored(
    weights: dict[str, Tensor], config: Any, architecture: str, kind: str = "F32"
) -> tuple[Stored, dict[str, Tensor]]:
    """The tensors of a file, and the weights that they stand for."""
    tensors: Stored = {}
    meant: dict[str, Tensor] = {}
    heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
    for name, x in weights.items():
        part = next((p for p in heads if p in name and architecture == "llama"), None)
        own = kind if x.ndim == 2 else "F32"
        in_file = gguf.interleave(x, heads[part]) if part else x
        if architecture == "gemma" and name.endswith("norm.weight"):
            in_file = in_file + 1
        raw = gguf.encode(own, in_file)
        tensors[gguf.name_in_file(name)] = (own, tuple(x.shape), raw)
        if own in gguf.BLOCK:
            rows = np.frombuffer(raw, np.uint8).reshape(x.shape[0], -1)
            value = gguf.numbers_of(own, rows)
            if part:  # back from the order of the file
                order = gguf.interleave(torch.arange(x.shape[0]), heads[part])
                value = torch.empty_like(value).index_copy(0, order, value)
            meant[name] = value.float()
        else:
            meant[name] = x
    return tensors, meant


def write(
    folder: Path, architecture: str, kind: str = "F32", **metadata: Any
) -> tuple[Path, Any, Any]:
    """Write a file, and return it with a network that has the weights that it stands for."""
    config = config_of(architecture)
    network = build(config, architecture)
    tensors, meant = stored(checkpoint(network, architecture), config, architecture, kind)
    keys = {**gguf.metadata_of(config, architecture), **metadata}
    path = gguf.write(folder / f"{architecture}-{kind}.gguf", keys, tensors)
    parameters = dict(network.named_parameters(remove_duplicate=False))
    its_family = family(architecture)
    for name, binding in bind_names(network, its_family.names).items():
        if name in meant:
            parameters[binding.parameters[0]].data.copy_(meant[name])
    return path, network, config


PAIRS = [("llama", kind) for kind in (*sorted(gguf.BLOCK), "F16", "BF16")]
PAIRS += [(name, kind) for name in ("qwen2", "qwen3", "gemma") for kind in ("Q8_0", "Q4_K")]


@pytest.mark.full(keep=["llama-Q4_K", "qwen2-Q8_0"])
@pytest.mark.parametrize(("architecture", "kind"), PAIRS)
def test_quantized_files_compute_what_they_stand_for(
    architecture: str, kind: str, tmp_path: Path
) -> None:
    path, network, _ = write(tmp_path, architecture, kind)
    model = regard.load(path, dtype=torch.float32)
    if kind in ("F16", "BF16"):
        half = {"F16": torch.float16, "BF16": torch.bfloat16}[kind]
        assert regard.load(path).dtype == half
        for p in network.parameters():
            p.data = p.data.to(half).float() if p.ndim == 2 else p.data
    wanted, logits = network(IDS), model(IDS)
    assert wanted.std() > 0.01
    assert (logits - wanted).abs().max() <= 2e-4 * wanted.abs().max()
    forms = {record.form for _, record in stored_modules(model.decoder)}
    assert forms == ({RECORD_FORMS[kind]} if kind in RECORD_FORMS else set())
    caches = model.new_caches()
    steps = [model(IDS[:, i : i + 1], caches=caches) for i in range(IDS.shape[1])]
    assert (torch.cat(steps, 1) - wanted).abs().max() <= 2e-4 * wanted.abs().max()


def test_keys_that_a_file_may_lack(tmp_path: Path) -> None:
    config = config_of("llama", num_key_value_heads=4)
    network = build(config, "llama")
    tensors, _ = stored(checkpoint(network, "llama"), config, "llama")
    keys = gguf.metadata_of(config, "llama")
    optional = ("head_count_kv", "key_length", "value_length", "freq_base", "context_length")
    keys = {key: x for key, x in keys.items() if not key.endswith(optional)}
    model = regard.load(gguf.write(tmp_path / "m.gguf", keys, tensors))
    assert model.config == config
    assert torch.equal(model(IDS), network(IDS))


def test_dtype_and_weights(tmp_path: Path) -> None:
    path, network, _ = write(tmp_path, "llama", "Q6_K")
    wanted = network(IDS)
    with pytest.warns(
        UserWarning, match=r"9 matrices in Q6_K \(354 KiB\).*\(864 KiB\) here"
    ) as warned:
        half = regard.load(path, dtype=torch.bfloat16)
    with use_language("zh"):
        assert "Q6_K 格式的 9 个矩阵（354 KiB）在这里成为" in _as_note(warned[0].message)
    assert half.decoder.head.weight.dtype == torch.bfloat16
    int8 = regard.load(path, weights="int8")
    assert {r.form for _, r in stored_modules(int8.decoder)} == {"int8"}
    error = (int8(IDS) - wanted).abs().max() / wanted.abs().max()
    assert 1e-5 < error < 0.05
    path, network, _ = write(tmp_path, "llama", "Q4_K")
    kept, again = regard.load(path), regard.load(path, weights="int4")
    assert torch.equal(kept(IDS), again(IDS))  # a matrix that has the form already stays
    other = regard.load(path, weights="bfloat16")
    assert {r.form for _, r in stored_modules(other.decoder)} == {"half"}


@pytest.mark.full
def test_save_and_load_again(tmp_path: Path) -> None:
    config = config_of("qwen2")
    network = build(config, "qwen2")
    weights = checkpoint(network, "qwen2")
    four, _ = stored(weights, config, "qwen2", "Q4_0")
    eight, _ = stored(weights, config, "qwen2", "Q8_0")
    mixed = {name: eight[name] if "ffn_down" in name else x for name, x in four.items()}
    path = gguf.write(tmp_path / "m.gguf", gguf.metadata_of(config, "qwen2"), mixed)
    model = regard.load(path)
    assert {r.form for _, r in stored_modules(model.decoder)} == {"int8", "int4"}
    again = regard.load(model.save(tmp_path / "saved"))
    assert torch.equal(model(IDS), again(IDS))


def test_folders(tmp_path: Path) -> None:
    path, network, _ = write(tmp_path, "qwen3")
    assert torch.equal(regard.load(tmp_path)(IDS), network(IDS))
    assert torch.equal(regard.load(str(path), kind=Model)(IDS), network(IDS))
    write(tmp_path, "qwen3", "F16")
    with pytest.raises(FileError, match=r"has 2 GGUF files: 'qwen3-F16\.gguf', 'qwen3-F32\.gguf'"):
        regard.load(tmp_path)
    with pytest.raises(FileError, match="a TextEncoder is needed here"):
        regard.load(path, kind=TextEncoder)


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("factor", [8.0, 32.0])
def test_factors_of_llama_3(factor: float, tmp_path: Path) -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    config = config_of("llama", head_dim=64, rope_theta=500000.0, rope_scaling=scaling)
    network = build(config, "llama")
    tensors, _ = stored(checkpoint(network, "llama"), config, "llama")
    factors = []
    for i in range(32):  # the code of llama.cpp's converter, in words: by wavelength
        length = 2 * torch.pi * 500000.0 ** (2 * i / 64)
        if length < 8192 / 4:
            factors.append(1.0)
        elif length > 8192:
            factors.append(factor)
        else:
            smooth = (8192 / length - 1) / 3
            factors.append(1 / ((1 - smooth) / factor + smooth))
    freqs = torch.tensor(factors)
    tensors["rope_freqs.weight"] = ("F32", (32,), gguf.encode("F32", freqs))
    keys = gguf.metadata_of(config, "llama")
    model = regard.load(gguf.write(tmp_path / "m.gguf", keys, tensors))
    assert model.config.rope_scaling == scaling
    torch.testing.assert_close(model(IDS), network(IDS))
    tensors["rope_freqs.weight"] = ("F32", (32,), gguf.encode("F32", 1.1 * freqs))
    with pytest.raises(FileError, match=r"rope_freqs\.weight is F32 \(32,\) and not one of"):
        regard.load(gguf.write(tmp_path / "m.gguf", keys, tensors))


WRONG_KEYS: dict[str, tuple[dict[str, Any], str]] = {
    "an architecture": ({"general.architecture": "rwkv7"}, "general.architecture is 'rwkv7'"),
    "an adapter": ({"general.type": "adapter"}, "general.type is 'adapter'; only models"),
    "an unknown key": ({"llama.attention.sliding_window": 4}, "sliding_window' is not known"),
    "experts": ({"llama.expert_count": 8}, "it lacks num_experts_per_tok"),
    "value heads": ({"llama.attention.value_length": 32}, "attention.value_length is 32"),
    "partial rotary": ({"llama.rope.dimension_count": 32}, "rope.dimension_count is 32"),
    "heads per layer": ({"llama.attention.head_count": [4, 2]}, "the same for all layers"),
    "a scaling": ({"llama.rope.scaling.type": "longrope"}, "rope.scaling.type is 'longrope'"),
    "no factor": ({"llama.rope.scaling.type": "linear"}, "factor"),
    "layers": ({"llama.block_count": 2}, "missing"),
    "many layers": ({"llama.block_count": 500}, "num_hidden_layers is 500"),
    "a width": ({"llama.feed_forward_length": 512}, "the metadata requires|the config requires"),
    "group": ({"llama.attention.head_count_kv": 3}, "not divisible by 3 key/value heads"),
    "no heads": ({"llama.attention.head_count": 0}, "attention.head_count is 0"),
}


@pytest.mark.parametrize("case", WRONG_KEYS)
@pytest.mark.parametrize("kind", ["F32", "Q8_0"])
@pytest.mark.full(keep=4)
def test_refused_metadata(case: str, kind: str, tmp_path: Path) -> None:
    change, says = WRONG_KEYS[case]
    path, _, _ = write(tmp_path, "llama", kind, **change)
    with pytest.raises(FileError, match=says) as error:
        regard.load(path)
    assert path.name in str(error.value)


def test_scalings_of_the_metadata(tmp_path: Path) -> None:
    scaling = {"llama.rope.scaling.type": "linear", "llama.rope.scaling.factor": 4.0}
    path, _, _ = write(tmp_path, "llama", **scaling)
    assert regard.load(path).config.rope_scaling == {"rope_type": "linear", "factor": 4.0}
    scaling["llama.rope.scaling.type"] = "yarn"
    original = {"llama.rope.scaling.original_context_length": 1024}
    path, _, _ = write(tmp_path, "llama", **scaling, **original)
    assert regard.load(path).config.rope_scaling == {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 1024,
    }


def test_missing_and_unknown_tensors(tmp_path: Path) -> None:
    config = config_of("llama")
    tensors, _ = stored(checkpoint(build(config, "llama"), "llama"), config, "llama")
    keys = gguf.metadata_of(config, "llama")
    without = {name: x for name, x in tensors.items() if name != "blk.0.attn_v.weight"}
    with pytest.raises(FileError, match=r"1 missing \['model\.layers\.0\.self_attn\.v_proj"):
        regard.load(gguf.write(tmp_path / "a.gguf", keys, without))
    more = {**tensors, "blk.0.attn_sinks.weight": ("F32", (4,), bytes(16))}
    path = gguf.write(tmp_path / "b.gguf", keys, more)
    with pytest.raises(FileError, match=r"'blk\.0\.attn_sinks\.weight' is not known"):
        regard.load(path)
    assert "blk.0.attn_sinks.weight" in regard.load(path, ignore=["*.attn_sinks.*"]).ignored
    no_embedding = {name: x for name, x in tensors.items() if name != "token_embd.weight"}
    with pytest.raises(FileError, match=r"no matrix token_embd\.weight"):
        regard.load(gguf.write(tmp_path / "c.gguf", keys, no_embedding))
    without_size = {key: x for key, x in keys.items() if not key.endswith("block_count")}
    with pytest.raises(FileError, match=r"the keys llama\.block_count are missing"):
        regard.load(gguf.write(tmp_path / "d.gguf", without_size, tensors))
    extra = {**tensors, "blk.7.attn_v.weight": tensors["blk.0.attn_v.weight"]}
    with pytest.raises(FileError, match="1 unexpected"):
        regard.load(gguf.write(tmp_path / "e.gguf", keys, extra))


def test_values_that_are_not_finite(tmp_path: Path) -> None:
    path, _, _ = write(tmp_path, "qwen2", "Q8_0")
    assert regard.load(path, finite=True).dtype == torch.float32
    raw = bytearray(path.read_bytes())
    start = read_gguf_header(path).tensors["blk.0.ffn_up.weight"].start
    raw[start : start + 2] = b"\x00\x7e"  # the scale of a block is NaN
    path.write_bytes(raw)
    with pytest.raises(FileError, match="not finite"):
        regard.load(path, finite=True)
    with pytest.raises(ArgumentError, match="weights is 'int2'"):
        regard.load(path, weights="int2")


@pytest.mark.full
def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, _, _ = write(tmp_path, "llama", "Q8_0")
    assert run(["generate", "hello", "--model", str(path)]) != 0
    assert "tokenizer" in capsys.readouterr().err
