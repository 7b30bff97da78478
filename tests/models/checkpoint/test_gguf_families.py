"""Every architecture of GGUF files: a tiny model, written as llama.cpp's converter does, computes
what its checkpoint computes.

`python -m tests.models.checkpoint.gguf_convert FOLDER` writes the files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from gguf import GGMLQuantizationType, PoolingType, dequantize, quantize

import regard
from regard.errors import FileError
from regard.models.checkpoint.gguf_config import ARCHITECTURES
from regard.models.text_encoder import TextEncoder
from regard.nn.weights import stored_modules
from tests.models.checkpoint.gguf_convert import CASES, convert, stored_tensors, tiny_network
from tests.models.small import named_model

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
    ends = (
        "q_proj.weight",
        "q_b_proj.weight",
        "in_proj.weight",
        "query_key_value.weight",
        "c_attn.weight",
        "Wqkv.weight",
    )
    return name.endswith((*ends, "qkv_proj.weight"))


@pytest.mark.full
@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same(case: str, tmp_path: Path) -> None:
    """Within 2e-5, or 2e-2 where llama.cpp looks up GELU in a table of 16-bit numbers; 1e-4 where a
    state adds up the roundings of all tokens.
    """
    pytest.importorskip("xllamacpp", reason="python -m pip install xllamacpp")
    architecture, model_type, keys = CASES[case]
    network, config = tiny_network(model_type, keys)
    stored = stored_tensors(network, model_type)
    path = convert(tmp_path / "m.gguf", architecture, model_type, config, stored)
    # the server tells probabilities only beside a token that is a printable character
    drawn = (
        torch.randint(3, 250, (1, 24), generator=torch.Generator().manual_seed(i))
        for i in range(99)
    )
    ids = next(ids for ids in drawn if network(ids)[0, -1].argmax() < 94)
    script = Path(__file__).with_name("llama_cpp.py")
    command = [sys.executable, str(script), str(path), "288", *map(str, ids[0].tolist())]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    theirs = json.loads(answer.stdout.splitlines()[-1])
    model = regard.load(path)

    def difference(ids: torch.Tensor) -> float:
        ours = torch.log_softmax(model(ids)[0, -1].double(), -1)
        return max(abs(float(ours[int(i)]) - x) for i, x in theirs.items())

    gelu = {"bloom", "falcon-7b", "falcon-40b", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "phi"}
    gelu |= {"gemma", "gemma2", "gemma3", "starcoder2"}
    states = {"mamba", "falcon_mamba", "mamba2", "qwen3_5", "qwen3_5_moe", "qwen3_next"}
    assert difference(ids) < (2e-2 if case in gelu else 1e-4 if case in states else 2e-5)
    assert difference(ids.roll(1, 1)) > 0.1


READ_BY_TRANSFORMERS = ["bloom", "falcon-7b", "lfm2", "llama", "mamba", "nemotron", "qwen2"]
READ_BY_TRANSFORMERS += ["stablelm", "starcoder2"]


@pytest.mark.full
@pytest.mark.parametrize("case", READ_BY_TRANSFORMERS)
def test_transformers_reads_the_same(case: str, tmp_path: Path) -> None:
    """Of the others, transformers 5.23 refuses the tiny sizes, or computes something else than
    llama.cpp: it leaves out the biases of llama, for example.
    """
    pytest.importorskip("accelerate", reason="python -m pip install accelerate")
    from transformers import AutoModelForCausalLM

    architecture, model_type, keys = CASES[case]
    network, config = tiny_network(model_type, keys)
    stored = stored_tensors(network, model_type)
    path = convert(tmp_path / "m.gguf", architecture, model_type, config, stored)
    theirs = AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    with torch.no_grad():
        wanted = theirs.eval()(IDS).logits
    logits = regard.load(path)(IDS)
    torch.testing.assert_close(logits, wanted, atol=2e-5, rtol=2e-5)
    assert (logits.roll(1, 1) - wanted).abs().max() > 0.1


@pytest.mark.parametrize("case", ["gpt2", "gpt_oss", "lfm2", "phi3", "qwen3_5", "qwen3_moe"])
def test_parts_of_a_matrix_stay_in_few_bits(case: str, tmp_path: Path) -> None:
    """Queries, keys and values that are rows of one matrix, matrices of experts, and heads of
    values in another order, whose columns change places in whole groups.
    """
    architecture, model_type, keys = CASES[case]
    keys = keys | ({"linear_value_head_dim": 128} if case == "qwen3_5" else {})
    network, config = tiny_network(model_type, keys)
    stored = stored_tensors(network, model_type)
    where = architecture, model_type, config
    model = regard.load(convert(tmp_path / "m.gguf", *where, stored, kind="Q8_0"))
    records = [record for _, record in stored_modules(model.decoder)]
    assert {record.form for record in records} == {"int8"}
    in_few_bits = sum(x.shape.numel() for x in {id(x): x for x in records}.values())
    wide = ("mlp.gate.weight", "router.weight", "_bias", "conv.weight", "conv1d.weight")
    wide += ("wpe.weight", "in_proj_a.weight", "in_proj_b.weight")
    matrices = {n: x for n, x in stored.items() if x.ndim > 1 and not n.endswith(wide)}
    assert in_few_bits == sum(x.numel() for x in matrices.values())
    kind = GGMLQuantizationType.Q8_0
    turned = (".c_attn.weight", ".c_fc.weight", ".c_proj.weight", "gate_up_proj", "down_proj")

    def rounded_rows(x: torch.Tensor) -> torch.Tensor:
        return torch.from_numpy(dequantize(quantize(x.contiguous().numpy(), kind), kind))

    rounded = {
        n: rounded_rows(x.mT).mT if n.endswith(turned) else rounded_rows(x)
        for n, x in matrices.items()
    }
    plain = regard.load(convert(tmp_path / "p.gguf", *where, stored | rounded))
    torch.testing.assert_close(model(IDS), plain(IDS), atol=1e-4, rtol=1e-4)
    assert (model(IDS) - network(IDS)).abs().max() > 1e-3


@pytest.mark.full
def test_an_encoder(tmp_path: Path) -> None:
    """MiniLM as a file with the tokenizer of BERT gives the vectors of its folder."""
    own = named_model("minilm", TextEncoder)
    vocabulary = own.tokenizer.vocabulary()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)

    def write(writer: Any, _: int) -> None:
        writer.add_tokenizer_model("bert")
        writer.add_token_list([spelling(token) for token in tokens])
        writer.add_token_type_count(2)
        writer.add_causal_attention(False)
        writer.add_pooling_type(PoolingType.MEAN)

    def spelling(token: str) -> str:
        if token.startswith("[") and token.endswith("]"):
            return token
        return token[2:] if token.startswith("##") else "\u2581" + token

    def write_with_cls(writer: Any, n: int) -> None:
        write(writer, n)
        writer.kv_data[0]["bert.pooling_type"].value = PoolingType.CLS

    stored = stored_tensors(own._network, "bert")
    path = convert(
        tmp_path / "m.gguf", "bert", "bert", own.config, stored, write, add_context_length=512
    )
    model = regard.load(path, kind=TextEncoder)
    texts = ["The capital of France is Paris.", "naïve DON'T 12345 unbelievably", "中文 🙂 Füße"]
    for text in texts:
        assert model.tokenizer.encode(text, template=True) == own.tokenizer.encode(
            text, template=True
        )
    assert torch.equal(model.embed(texts), own.embed(texts))
    path = convert(
        *(tmp_path / "c.gguf", "bert", "bert", own.config, stored, write_with_cls),
        add_context_length=512,
    )
    first = regard.load(path, kind=TextEncoder)
    assert (first.embed(texts) - own.embed(texts)).abs().max() > 0.01


def test_every_architecture_has_a_case() -> None:
    cases = {architecture for architecture, _, _ in CASES.values()}
    assert cases | {"bert"} == ARCHITECTURES.keys()


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
