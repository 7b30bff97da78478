"""Every architecture of GGUF files: a tiny model, written as llama.cpp's converter does, computes
what its checkpoint computes.

`python -m tests.models.checkpoint.gguf_convert FOLDER` writes the files.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from types import MethodType
from typing import Any

import pytest
import torch
from gguf import (
    ExpertGatingFuncType,
    GGMLQuantizationType,
    PoolingType,
    RopeScalingType,
    dequantize,
    quantize,
)

import regard
from regard.errors import FileError
from regard.files.gguf_writer import write_gguf
from regard.masks import Causal, Window
from regard.models.checkpoint.gguf_architectures import REFUSED
from regard.models.checkpoint.gguf_config import ARCHITECTURES
from regard.models.encoder_decoder import EncoderDecoder
from regard.models.seq2seq import Seq2Seq
from regard.models.text_encoder import TextEncoder
from regard.nn import MoE, SoftmaxRouter
from regard.nn.blocks.feed_forward import GaussianTopK
from regard.nn.weights import stored_modules
from regard.positions import Rotary, rope_frequencies
from tests.models.checkpoint.gguf_convert import (
    CASES,
    WINDOW,
    YARN,
    convert,
    stored_tensors,
    tiny_network,
)
from tests.models.checkpoint.gguf_keys import keys_of, keys_of_yarn
from tests.models.small import named_model

PATTERN_OF_5_2 = {"indexer_types": ("full",) * 3 + ("shared",) * 2}
IDS = torch.randint(3, 250, (1, 24), generator=torch.Generator().manual_seed(1))
SEQ2SEQ = [case for case, (architecture, _, _) in CASES.items() if architecture == "t5"]


def logits_of(model: Any, case: str = "") -> torch.Tensor:
    """The logits of `IDS`, which an encoder-decoder has as its source and its target; of more than
    128 ids for DeepSeek-V4, whose entries have up to so many.
    """
    both = isinstance(model, EncoderDecoder | Seq2Seq)
    ids = IDS.repeat(1, 6) if case == "deepseek_v4" else IDS
    logits: torch.Tensor = model(ids, ids[:, :9]) if both else model(ids)
    return logits


@pytest.mark.full(
    keep=[
        "gemma3",
        "falcon-40b",
        "granitemoe",
        "gpt2",
        "phi3",
        "gemma4",
        "nemotron_h",
        "step3p5",
        "t5 of version 1.1",
    ]
)
@pytest.mark.parametrize("case", CASES)
def test_a_file_computes_what_its_checkpoint_computes(case: str, tmp_path: Path) -> None:
    architecture, model_type, keys = CASES[case]
    network, config = tiny_network(model_type, keys)
    stored = stored_tensors(network, model_type)
    path = convert(tmp_path / "m.gguf", architecture, model_type, config, stored)
    model = regard.load(path)
    wanted, logits = logits_of(network, case), logits_of(model, case)
    assert wanted.std() > 0.1
    torch.testing.assert_close(logits, wanted)
    # two heads of a matrix that changed places
    name = next(n for n in stored if n.endswith("weight") and _first_map(n))
    wrong = {**stored, name: stored[name].roll(1, 0)}
    other = regard.load(convert(tmp_path / "w.gguf", architecture, model_type, config, wrong))
    assert (logits_of(other, case) - wanted).abs().max() > 1e-3


def _first_map(name: str) -> bool:
    """Whether a stored matrix makes the queries."""
    ends = (
        ".q.weight",
        "attn.wq_b.weight",
        "q_proj.weight",
        "q_b_proj.weight",
        "in_proj.weight",
        "query_key_value.weight",
        "c_attn.weight",
        "Wqkv.weight",
    )
    return name.endswith((*ends, "qkv_proj.weight"))


def as_llama_cpp(case: str, model: Any) -> None:
    """Give a model the definitions that llama.cpp has in place of the makers': in PhiMoE, norms
    without the mean and weights of experts that add up to 1; in Gemma 3n, the deviation of a
    sample; in MiMo, windows of a key less; in Step-3.5, factors of the frequencies that all dims
    would have.
    """

    def root_mean_square(self: Any, x: torch.Tensor) -> Any:
        return x * (x.pow(2).mean(-1, keepdim=True) + self.eps).rsqrt() * self.weight + self.bias

    def top_k(self: Any, x: torch.Tensor) -> Any:
        cutoff = x.mean(-1, keepdim=True) + 1.6448534 * x.std(-1, keepdim=True)
        return self.activation(torch.relu(x - cutoff))

    for module in model.decoder.modules():
        if case == "phimoe" and isinstance(module, torch.nn.LayerNorm):
            module.forward = MethodType(root_mean_square, module)
        if case == "phimoe" and isinstance(module, MoE):
            linear = module.router.linear
            module.router = SoftmaxRouter(64, 4, 2, normalize=True)
            module.router.linear = linear
        if isinstance(module, GaussianTopK):
            module.forward = MethodType(top_k, module)
        if case == "mimo_v2_flash" and "window" in str(getattr(module, "mask", "")):
            module.mask = Causal() & Window(WINDOW - 1)
        if case == "step3p5" and isinstance(module, Rotary) and module.scaling is not None:
            factors = rope_frequencies(16, module.base).inv_freq
            factors /= rope_frequencies(16, module.base, scaling=module.scaling).inv_freq
            module.inv_freq = rope_frequencies(8, module.base).inv_freq / factors[:4]


@pytest.mark.full
@pytest.mark.parametrize("case", [case for case in CASES if case not in SEQ2SEQ])
def test_llama_cpp_computes_the_same(case: str, tmp_path: Path) -> None:
    """Within 2e-5, or 2e-2 where llama.cpp looks up GELU in a table of 16-bit numbers; 1e-4 where a
    state adds up the roundings of all tokens; 5e-2 in MiniMax-M3, whose chosen keys and values have
    16 bits there (4.9e-6 if all blocks are chosen).
    """
    pytest.importorskip("xllamacpp", reason="python -m pip install xllamacpp")
    architecture, model_type, keys = CASES[case]
    network, config = tiny_network(model_type, keys)
    stored = stored_tensors(network, model_type)
    path = convert(tmp_path / "m.gguf", architecture, model_type, config, stored)
    # the server tells probabilities only beside a token that is a printable character
    # differences of the cutoffs of Gemma 3n add up; an entry of DeepSeek-V4 has up to 128 tokens
    length = {"gemma3n": 2, "deepseek_v4": 140}.get(case, 24)
    drawn = (
        torch.randint(3, 250, (1, length), generator=torch.Generator().manual_seed(i))
        for i in range(99)
    )
    ids = next(ids for ids in drawn if network(ids)[0, -1].argmax() < 94)
    script = Path(__file__).with_name("llama_cpp.py")
    command = [sys.executable, str(script), str(path), "288", *map(str, ids[0].tolist())]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    theirs = json.loads(answer.stdout.splitlines()[-1])
    model = regard.load(path)
    as_llama_cpp(case, model)

    def difference(ids: torch.Tensor) -> float:
        ours = torch.log_softmax(model(ids)[0, -1].double(), -1)
        return max(abs(float(ours[int(i)]) - x) for i, x in theirs.items())

    gelu = {"bloom", "falcon-7b", "falcon-40b", "gpt2", "gpt_bigcode", "gpt_neox", "mpt", "phi"}
    gelu |= {"gemma", "gemma2", "gemma3", "gemma3n", "gemma4", "gemma4 with experts", "starcoder2"}
    states = {
        "kimi_linear",
        "mamba",
        "falcon_mamba",
        "mamba2",
        "qwen3_5",
        "qwen3_5_moe",
        "qwen3_next",
    }
    bounds = dict.fromkeys(gelu, 2e-2) | dict.fromkeys(states, 1e-4) | {"minimax_m3": 5e-2}
    assert difference(ids) < bounds.get(case, 2e-5)
    assert difference(ids.roll(1, 1)) > 0.1


@pytest.mark.full
@pytest.mark.parametrize("case", SEQ2SEQ)
def test_llama_cpp_computes_the_same_target(case: str, tmp_path: Path) -> None:
    """Within 2e-2, because keys and values are 16-bit numbers there. The states of version 1 are
    not scaled there, so that its logits are sqrt(M) times as large.
    """
    pytest.importorskip("xllamacpp", reason="python -m pip install xllamacpp")
    architecture, model_type, keys = CASES[case]
    network, config = tiny_network(model_type, keys)
    path = convert(
        tmp_path / "m.gguf", architecture, model_type, config, stored_tensors(network, model_type)
    )
    ids = [str(i) for i in IDS[0].tolist()]
    command = [sys.executable, str(Path(__file__).with_name("llama_cpp.py")), str(path), "encoder"]
    command += ["288", *ids, "-", *ids[:9]]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, timeout=100)
    theirs = torch.tensor(json.loads(answer.stdout.splitlines()[-1]))
    ours = logits_of(regard.load(path))[0] * (8 if config.scale_decoder_outputs else 1)
    assert (ours[-1] - theirs).abs().max() < 2e-2
    assert (ours[-2] - theirs).abs().max() > 0.5


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


@pytest.mark.parametrize("case", ["gpt2", "gpt_oss", "lfm2", "phi3", "qwen3_5", "qwen3_moe", "t5"])
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
    records = [record for _, record in stored_modules(model._network)]
    assert {record.form for record in records} == {"int8"}
    in_few_bits = sum(x.shape.numel() for x in {id(x): x for x in records}.values())
    wide = ("mlp.gate.weight", "router.weight", "_bias", "conv.weight", "conv1d.weight")
    wide += ("wpe.weight", "in_proj_a.weight", "in_proj_b.weight", "attention_bias.weight")
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
    torch.testing.assert_close(logits_of(model), logits_of(plain), atol=1e-4, rtol=1e-4)
    assert (logits_of(model) - logits_of(network)).abs().max() > 1e-3


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


@pytest.mark.full
def test_the_latent_in_one_matrix(tmp_path: Path) -> None:
    """Files of DeepSeek from before its latent matrix was divided hold it as the makers do."""
    architecture, model_type, keys = CASES["deepseek_v3"]
    network, config = tiny_network(model_type, keys)
    stored = stored_tensors(network, model_type)
    where = (architecture, model_type, config, stored)
    path = convert(
        *(tmp_path / "m.gguf", *where),
        divided=False,
        add_key_length_mla=None,
        add_value_length_mla=None,
        add_key_length=config.qk_nope_head_dim + config.qk_rope_head_dim,
        add_value_length=config.v_head_dim,
        add_head_count_kv=config.num_attention_heads,
    )
    torch.testing.assert_close(regard.load(path)(IDS), network(IDS))


def test_a_t5_as_released(tmp_path: Path) -> None:
    """Version 1 has a table for cross-attention that no code reads; UMT5 has one in each layer, and
    is another network. A text ends with the end token, as in llama.cpp.
    """
    architecture, model_type, keys = CASES["t5"]
    network, config = tiny_network(model_type, keys)
    stored = stored_tensors(network, model_type)
    end = ".relative_attention_bias.weight"
    table = torch.ones(32, 4)
    where = (architecture, model_type, config)

    def vocabulary(writer: Any, count: int) -> None:
        writer.add_tokenizer_model("t5")
        pieces = ["<pad>", "</s>", "<unk>", "\u2581be", "\u2581to"]
        writer.add_token_list([*pieces, *(f"<extra{i}>" for i in range(count - 5))])
        writer.add_token_scores([0.0, 0.0, 0.0, -2.0, -1.0, *[-1e4] * (count - 5)])
        writer.add_token_types([3, 3, 2, 1, 1, *[5] * (count - 5)])
        writer.add_eos_token_id(1)

    unread = stored | {f"decoder.block.0.layer.1.EncDecAttention{end}": table}
    model = regard.load(convert(tmp_path / "m.gguf", *where, unread, vocabulary), kind=Seq2Seq)
    assert torch.equal(logits_of(model), logits_of(network))
    assert model.encode("to be")[0].tolist() == [[4, 3, 1]]
    assert (model.start, model.eos_ids) == (0, {1})
    own = stored | {f"decoder.block.1.layer.0.SelfAttention{end}": table}
    with pytest.raises(FileError, match="it is a UMT5, which has a table of positions in each"):
        regard.load(convert(tmp_path / "u.gguf", *where, own))


@pytest.mark.full
@pytest.mark.parametrize("case", ["glm4_moe", "hy_v3", "mimo_v2_flash", "step3p5"])
def test_layers_that_predict_further_tokens_are_not_loaded(case: str, tmp_path: Path) -> None:
    architecture, model_type, keys = CASES[case]
    network, config = tiny_network(model_type, keys)
    stored = stored_tensors(network, model_type)
    last = {n: x for n, x in stored.items() if ".layers.3." in n}
    further = {n.replace(".3.", ".4.", 1): -x for n, x in last.items()}
    where = (architecture, model_type, config)
    lists = {k: [*x, x[-1]] for k, x in keys_of(config, model_type).items() if isinstance(x, list)}
    counts = lists | {"add_nextn_predict_layers": 1, "add_block_count": 5}
    path = convert(tmp_path / "m.gguf", *where, stored | further, **counts)
    model = regard.load(path)
    assert len(model.decoder.layers) == config.num_hidden_layers
    torch.testing.assert_close(model(IDS), network(IDS))
    with pytest.raises(FileError, match=r"layers\.4\."):
        regard.load(convert(tmp_path / "n.gguf", *where, stored | further))


@pytest.mark.full(keep=["hy_v3"])
@pytest.mark.parametrize(
    ("case", "change", "says"),
    [
        ("mimo_v2_flash", {"add_head_count_kv": [1, 3, 1, 3]}, "3 key heads; with 1"),
        ("mimo_v2_flash", {"add_head_count_kv": [1, 2, 2, 2]}, "one for all with one"),
        ("mimo_v2_flash", {"add_leading_dense_block_count": 2}, r"is 2, and .* \[1, 2, 3\]"),
        ("mimo_v2_flash", {"add_rope_scaling_type": RopeScalingType.YARN}, "'yarn', which is not"),
        ("step3p5", {"add_head_count": [4, 6, 4]}, r"head_count is \[4, 6, 4\]"),
        ("step3p5", {"add_expert_weights_norm": False}, "weights_norm is False; it must be True"),
        ("step3p5", {"add_rope_freq_base": 1e6}, "not one of the factors"),
        ("step3p5", {"add_moe_every_n_layers": 2}, "moe_every_n_layers is 2; it must be 1"),
        ("step3p5", {"add_swiglu_clamp_exp": [1.0]}, "swiglu_limits has 1 entry"),
        ("hy_v3", {"add_expert_shared_feed_forward_length": 40}, "is 40, which is no multiple"),
        (
            "hy_v3",
            {"add_expert_gating_func": ExpertGatingFuncType.SOFTMAX},
            "hy_v3.expert_gating_func",
        ),
        ("minimax_m3", {"add_leading_dense_block_count": 0}, "leading_dense_block_count is 0"),
        ("minimax_m3", {"attention.indexer.local_blocks": 9}, "index_local_blocks is 9"),
        ("minimax_m3", {"add_expert_weights_norm": None}, "expert_weights_norm is None"),
    ],
)
def test_contradictions_are_refused_by_name(
    case: str, change: dict[str, Any], says: str, tmp_path: Path
) -> None:
    architecture, model_type, keys = CASES[case]
    network, config = tiny_network(model_type, keys)
    where = (architecture, model_type, config, stored_tensors(network, model_type))
    with pytest.raises(FileError, match=says):
        regard.load(convert(tmp_path / "m.gguf", *where, **change))


def test_glm_5_as_written(tmp_path: Path) -> None:
    """Files have copies of an indexer in layers that share a choice, which are not read; first
    files of GLM-5.2 do not name these layers, and files of GLM-5 have none.
    """
    architecture, model_type, keys = CASES["glm_moe_dsa"]
    network, config = tiny_network(model_type, keys | {"num_hidden_layers": 5} | PATTERN_OF_5_2)
    stored = stored_tensors(network, model_type)
    where = (architecture, model_type, config)
    part = ".self_attn.indexer."
    copies = {n.replace(".2.", ".3.", 1): -x for n, x in stored.items() if f".2{part}" in n}
    unnamed = {"attention.indexer.types": None, "add_context_length": 1 << 20}
    for change in ({}, unnamed):
        model = regard.load(
            convert(tmp_path / f"{len(change)}.gguf", *where, stored | copies, **change)
        )
        assert model.config.indexer_types == ("full", "full", "full", "shared", "shared")
        torch.testing.assert_close(model(IDS), network(IDS))
    every = copies | {n.replace(".3.", ".4.", 1): x for n, x in copies.items()}
    unnamed["add_context_length"] = 1 << 17
    older = regard.load(convert(tmp_path / "5.gguf", *where, stored | every, **unnamed))
    assert (older(IDS) - network(IDS)).abs().max() > 1e-3


def test_deepseek_v4_as_written(tmp_path: Path) -> None:
    """Some files name layers that predict further tokens and do not have them; another bound for
    the shared expert, or whole numbers as weights, are refused.
    """
    architecture, model_type, keys = CASES["deepseek_v4"]
    network, config = tiny_network(model_type, keys)
    where = (architecture, model_type, config)
    stored = stored_tensors(network, model_type)
    model = regard.load(convert(tmp_path / "m.gguf", *where, stored, add_nextn_predict_layers=1))
    assert torch.equal(logits_of(model), logits_of(network))
    assert model.decoder.layers[0].feed_forward.router.table.dtype == torch.int64
    for change, says in (
        ({"add_swiglu_clamp_shexp": [9.0] * 4}, "swiglu_clamp_exp"),
        ({"attention.compress_ratios": [0, 4, 128, 5]}, "compress_ratios"),
        ({"expert_gating_func": 2}, "expert_gating_func is 2"),
        ({"hash_layer_count": -1.0}, "hash_layer_count"),
    ):
        with pytest.raises(FileError, match=says):
            regard.load(convert(tmp_path / "n.gguf", *where, stored, **change))


@pytest.mark.full(keep=1)
@pytest.mark.parametrize("architecture", REFUSED)
def test_architectures_that_are_refused_with_a_reason(architecture: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    write_gguf(path, {"general.architecture": architecture}, [])
    with pytest.raises(FileError, match=f"'{architecture}', which is not read, because"):
        regard.load(path)


@pytest.mark.full
def test_gpt_oss_as_released(tmp_path: Path) -> None:
    """Experts in MXFP4, and a yarn scaling whose bounds the makers do not round."""
    architecture, model_type, keys = CASES["gpt_oss"]
    scaling = YARN | {"factor": 32.0, "truncate": False}
    network, config = tiny_network(model_type, keys | {"rope_scaling": scaling})
    stored = stored_tensors(network, model_type)
    where = (architecture, model_type, config)
    path = convert(
        *(tmp_path / "m.gguf", *where, stored),
        **{**keys_of_yarn(scaling), "experts_kind": "MXFP4"},
    )
    kind = GGMLQuantizationType.MXFP4
    rounded = {
        n: torch.from_numpy(dequantize(quantize(x.mT.contiguous().numpy(), kind), kind)).mT
        for n, x in stored.items()
        if n.endswith(("gate_up_proj", "down_proj"))
    }
    model = regard.load(path)
    plain = convert(tmp_path / "p.gguf", *where, stored | rounded, **keys_of_yarn(scaling))
    torch.testing.assert_close(model(IDS), regard.load(plain)(IDS), atol=1e-4, rtol=1e-4)
    assert (model(IDS) - network(IDS)).abs().max() > 1e-3
    truncated = tiny_network(model_type, keys | {"rope_scaling": scaling | {"truncate": True}})[0]
    unrounded = convert(tmp_path / "u.gguf", *where, stored, **keys_of_yarn(scaling))
    torch.testing.assert_close(regard.load(unrounded)(IDS), network(IDS))
    assert (truncated(IDS) - network(IDS)).abs().max() > 1e-5


def test_modern_bert(tmp_path: Path) -> None:
    """Global layers first, windows to both sides, and two bases."""
    sizes = {"num_attention_heads": 4, "max_position_embeddings": 256, "local_attention": 6}
    sizes |= {"vocab_size": 288, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 4}
    network, config = tiny_network("modernbert", sizes)
    stored = stored_tensors(network, "modernbert")
    path = convert(tmp_path / "m.gguf", "modern-bert", "modernbert", config, stored)
    model = regard.load(path, kind=TextEncoder)
    assert model.pooling.modes == ("cls",)
    states = network.encoder(IDS)
    torch.testing.assert_close(model._network.encoder(IDS), states)
    wider = tiny_network("modernbert", sizes | {"local_attention": 8})[0].encoder(IDS)
    assert (wider - states).abs().max() > 1e-2


def test_every_architecture_has_a_case() -> None:
    cases = {architecture for architecture, _, _ in CASES.values()}
    assert cases | {"bert", "modern-bert"} == ARCHITECTURES.keys()


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
