"""Adapters merged into their base: W + s B A in fp64 by the published formulas, and PEFT itself."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import regard
from regard.cli.app import run
from regard.errors import FileError
from regard.nn.weights import stored_modules
from tests.cli.test_few_bit_models import small_model, write_as_gguf

Q, UP = "model.layers.0.self_attn.q_proj", "model.layers.1.mlp.up_proj"
EMBED, NORM = "model.embed_tokens", "model.norm"
OURS = {
    Q: "layers.0.attention.project.q.linear",
    UP: "layers.1.feed_forward.up",
    EMBED: "embed.embedding",
    NORM: "norm",
}
CONFIG: dict[str, Any] = {
    "peft_type": "LORA",
    "r": 4,
    "lora_alpha": 6,
    "target_modules": ["q_proj", "up_proj"],
    "bias": "none",
    "task_type": "CAUSAL_LM",
}


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return regard.load("tiny").save(tmp_path_factory.mktemp("base") / "model")


def drawn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)) / 8


def low_rank(
    base: Path, module: str, rank: int = 4, ends: str = "lora_{}.weight"
) -> dict[str, Tensor]:
    """B and A of a module of the base, under the names of PEFT."""
    N, M = load_file(base / "model.safetensors")[f"{module}.weight"].shape
    inputs, outputs = (N, M) if "embed" in ends else (M, N)
    return {
        f"base_model.model.{module}.{ends.format(key)}": drawn(*shape, seed=len(module) + rank)
        for key, shape in (("A", (rank, inputs)), ("B", (outputs, rank)))
    }


def adapter(folder: Path, tensors: dict[str, Tensor], **change: Any) -> Path:
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {key: x for key, x in (CONFIG | change).items() if x != "absent"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def merged(base: Path, tensors: dict[str, Tensor], module: str, scale: float) -> Tensor:
    """W + s B A, each number a sum in fp64."""
    weight = load_file(base / "model.safetensors")[f"{module}.weight"].double()
    A, B = (tensors[f"base_model.model.{module}.lora_{x}.weight"].double() for x in "AB")
    for n in range(len(weight)):
        for r in range(len(A)):
            weight[n] += scale * B[n, r] * A[r]
    return weight


def assert_weight(model: Any, module: str, exact: Tensor) -> None:
    found = model.decoder.get_submodule(OURS[module]).weight
    assert (found - exact).abs().max() <= 1e-6 * exact.abs().max()


@pytest.mark.parametrize(
    "change, rank, scale",
    [
        ({}, 4, 6 / 4),
        ({"use_rslora": True}, 4, 6 / math.sqrt(4)),
        ({"rank_pattern": {"layers.0.self_attn.q_proj": 2}}, 2, 6 / 2),
        ({"rank_pattern": {"q_proj": 2}, "alpha_pattern": {f"^{Q}": 5}}, 2, 5 / 2),
    ],
)
def test_a_change_of_low_rank_is_added(
    base: Path, tmp_path: Path, change: dict[str, Any], rank: int, scale: float
) -> None:
    tensors = low_rank(base, Q, rank) | low_rank(base, UP)
    folder = adapter(tmp_path / "lora", tensors, **change)
    model, plain = regard.load(base, adapter=folder), regard.load(base)
    assert_weight(model, Q, merged(base, tensors, Q, scale))
    other = 6 / 2 if change.get("use_rslora") else 6 / 4
    assert_weight(model, UP, merged(base, tensors, UP, other))
    with pytest.raises(AssertionError):  # a wrong scale is far
        assert_weight(model, Q, merged(base, tensors, Q, 1.1 * scale))
    for (name, one), two in zip(
        model.decoder.named_parameters(), plain.decoder.parameters(), strict=True
    ):
        assert torch.equal(one, two) == (name.removesuffix(".weight") not in (OURS[Q], OURS[UP]))


def test_directions_embeddings_and_whole_modules(base: Path, tmp_path: Path) -> None:
    tensors = low_rank(base, Q)
    magnitude = drawn(len(tensors[f"base_model.model.{Q}.lora_B.weight"]), seed=3) + 1
    dora = tensors | {f"base_model.model.{Q}.lora_magnitude_vector": magnitude}
    model = regard.load(base, adapter=adapter(tmp_path / "dora", dora, use_dora=True))
    exact = merged(base, tensors, Q, 6 / 4)
    assert_weight(model, Q, exact * (magnitude / exact.square().sum(1).sqrt())[:, None])

    tensors = low_rank(base, EMBED, ends="lora_embedding_{}")
    norm = drawn(len(load_file(base / "model.safetensors")[f"{NORM}.weight"]), seed=5)
    tensors[f"base_model.model.{NORM}.weight"] = norm
    change = {"target_modules": ["embed_tokens"], "modules_to_save": ["norm"]}
    model = regard.load(base, adapter=adapter(tmp_path / "embed", tensors, **change))
    A, B = (tensors[f"base_model.model.{EMBED}.lora_embedding_{x}"].double() for x in "AB")
    weight = load_file(base / "model.safetensors")[f"{EMBED}.weight"].double()
    assert_weight(model, EMBED, weight + 1.5 * (B @ A).T)
    assert_weight(model, NORM, norm.double())


def test_a_quantized_base_is_merged_as_plain_numbers(base: Path, tmp_path: Path) -> None:
    from tests.models.checkpoint.test_group_quantized import CASES, STORED, folder_with

    tensors, exact = CASES["packed-8"].make()
    quantized = folder_with(tmp_path, tensors, CASES["packed-8"].settings)
    folder = adapter(tmp_path / "lora", change := low_rank(base, STORED))
    A, B = (change[f"base_model.model.{STORED}.lora_{x}.weight"].double() for x in "AB")
    model = regard.load(quantized, adapter=folder)
    assert_weight(model, STORED, exact + 1.5 * B @ A)
    assert model.converted is not None
    assert model.converted.converted == 1


def dequantized_copy(few: Any, plain: Any, folder: Path) -> Path:
    """The model with the same numbers in fp32, saved."""
    values = dict(stored_modules(few.decoder)) | dict(few.decoder.named_parameters())
    for name, x in plain.decoder.named_parameters():
        value = values[name]
        x.data.copy_(value if isinstance(value, Tensor) else value.dequantize())
    written: Path = plain.save(folder)
    return written


@pytest.mark.parametrize("form", ["int8", "int4", "gguf"])
def test_matrices_in_few_bits_that_change_are_dequantized_first(form: str, tmp_path: Path) -> None:
    wide = small_model().save(tmp_path / "wide")
    if form == "gguf":
        source = write_as_gguf(small_model(), tmp_path / "gguf")
    else:
        source = regard.load(wide, weights=form).save(tmp_path / form)
    few = regard.load(source)
    plain = dequantized_copy(few, small_model(), tmp_path / "plain")
    tensors = low_rank(plain, Q) | low_rank(plain, UP)
    norm = drawn(len(few.decoder.norm.weight), seed=5)
    tensors[f"base_model.model.{NORM}.weight"] = norm
    folder = adapter(tmp_path / "lora", tensors, modules_to_save=["norm"])
    mine, exact = (regard.load(x, adapter=folder) for x in (source, plain))
    records, before = dict(stored_modules(mine.decoder)), dict(stored_modules(few.decoder))
    changed = {f"{OURS[name]}.weight" for name in (Q, UP)}
    assert before.keys() - records.keys() == changed
    for name, record in records.items():
        assert record.tensors().keys() == before[name].tensors().keys()
        for key, x in record.tensors().items():
            assert torch.equal(x, before[name].tensors()[key])
    for name in (*changed, f"{NORM.removeprefix('model.')}.weight"):
        parameters = (x.decoder.get_parameter(name) for x in (mine, exact))
        assert torch.equal(*parameters)
    sizes = sum(before[name].bytes for name in changed), sum(records_size(exact, changed))
    assert mine.converted == ("int8" if form == "gguf" else form, 2, len(before), *sizes)
    ids = torch.arange(3, 20)[None]
    want = exact(ids)
    assert (mine(ids) - want).abs().max() <= 1e-5 * want.abs().max()
    assert (few(ids) - want).abs().max() > 1e-2 * want.abs().max()
    far = {name.replace("layers.0", "layers.77"): x for name, x in tensors.items()}
    with pytest.raises(FileError, match=r"which .* does not have"):
        regard.load(source, adapter=adapter(tmp_path / "far", far, modules_to_save=["norm"]))


def records_size(model: Any, names: set[str]) -> list[int]:
    """The bytes of parameters in fp32."""
    return [4 * model.decoder.get_parameter(name).numel() for name in names]


def test_an_adapter_beside_its_base_is_merged_on_request(
    base: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = regard.load(base).save(tmp_path / "model")
    tensors = low_rank(base, Q)
    adapter(folder, tensors)
    with pytest.raises(FileError, match="adapter=folder"):
        regard.load(folder)
    assert_weight(regard.load(folder, adapter=folder), Q, merged(base, tensors, Q, 1.5))
    command = ["generate", "to be", "--model", str(folder), "--max-tokens", "2"]
    assert run(command) == 1
    assert run([*command, "--adapter", str(folder)]) == 0
    capsys.readouterr()


def test_what_contradicts_itself_or_is_unknown_is_refused(base: Path, tmp_path: Path) -> None:
    tensors, folder = low_rank(base, Q), tmp_path / "lora"
    stranger = {name.replace("layers.0", "layers.99"): x for name, x in tensors.items()}
    renamed = {name.removeprefix("base_model."): x for name, x in tensors.items()}
    short = {name: x[..., :-1].contiguous() for name, x in tensors.items()}
    for changed, change, match in (
        (tensors, {"r": 8}, "gives it the rank 8"),
        (tensors, {"target_modules": ["k_proj"]}, "are the two files from one adapter"),
        (tensors, {"fan_in_fan_out": True}, "fan_in_fan_out is True"),
        (tensors, {"use_dora": True}, "it must have A, B, magnitude"),
        (tensors, {"modules_to_save": ["lm_head"]}, "lacks 'lm_head'"),
        (tensors, {"init_lora_weights": "pissa"}, "init_lora_weights is 'pissa'"),
        (tensors, {"target_parameters": ["experts.w"]}, "target_parameters is"),
        (tensors, {"peft_type": "IA3"}, "peft_type is 'IA3'"),
        (tensors, {"lora_alfa": 3}, "unknown key 'lora_alfa'.*lora_alpha"),
        (tensors, {"rank_pattern": {"q_.*|k": 4}}, "no other patterns"),
        (tensors, {"lora_alpha": "absent"}, "lora_alpha is None"),
        (stranger, {}, "adapter of another model"),
        (renamed, {}, "does not begin with 'base_model.model.'"),
        (short, {}, "must be"),
    ):
        with pytest.raises(FileError, match=match):
            regard.load(base, adapter=adapter(folder, changed, **change))
    (folder / "adapter_model.safetensors").rename(folder / "adapter_model.bin")
    with pytest.raises(FileError, match=r"adapter_model.safetensors is missing.*\.bin"):
        regard.load(base, adapter=folder)
    with pytest.raises(FileError, match=r"adapter_config.json is missing"):
        regard.load(base, adapter=base)


@pytest.mark.full
@pytest.mark.filterwarnings("ignore::FutureWarning")
@pytest.mark.parametrize("dora", [False, True])
@pytest.mark.parametrize("form", [None, "int8", "int4"])
@pytest.mark.parametrize("name", ["Llama", "GPT2", "Phi3"])
def test_peft_merges_the_same(name: str, form: str | None, dora: bool, tmp_path: Path) -> None:
    peft = pytest.importorskip("peft", reason="pip install --no-deps peft accelerate")
    from tests.parity.families.harness import theirs

    llama = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 2}
    sizes = {
        "Phi3": llama | {"num_key_value_heads": 1, "pad_token_id": 0},
        "Llama": llama,
        "GPT2": {"n_embd": 32, "n_head": 2, "n_layer": 2, "n_positions": 32},
    }[name]
    head = "LMHeadModel" if name == "GPT2" else "ForCausalLM"
    model = theirs(name, {"vocab_size": 40, "num_hidden_layers": 2} | sizes, head=head)
    base = tmp_path / "base"
    model.save_pretrained(base)
    if form is not None:
        few = regard.load(base, weights=form)
        plain = dequantized_copy(few, regard.load(base), tmp_path / "plain")
        model.load_state_dict(load_file(plain / "model.safetensors"), strict=False)
        base = few.save(tmp_path / "few")
    targets = {
        "Llama": ["q_proj", "down_proj"],
        "GPT2": ["c_attn", "mlp.c_proj"],
        "Phi3": ["qkv_proj", "gate_up_proj"],
    }[name]
    config = peft.LoraConfig(
        r=4,
        lora_alpha=6,
        target_modules=targets,
        use_rslora=True,
        use_dora=dora,
        rank_pattern={targets[1]: 2},
        modules_to_save=["lm_head"] if name == "Llama" else None,
        init_lora_weights=False,
        fan_in_fan_out=name == "GPT2",
        task_type="CAUSAL_LM",
    )
    tuned = peft.get_peft_model(model, config)
    for seed, (key, parameter) in enumerate(tuned.named_parameters()):
        if parameter.requires_grad:
            noise = drawn(*parameter.shape, seed=seed)
            parameter.data = noise if "magnitude" not in key else 1 + noise
    tuned.save_pretrained(tmp_path / "lora")
    mine = regard.load(base, adapter=tmp_path / "lora")
    ids = torch.arange(3, 20)[None]
    exact = tuned.merge_and_unload()(input_ids=ids, use_cache=False).logits
    assert (mine(ids) - exact).abs().max() <= 1e-5 * exact.abs().max()
    if form is not None:
        assert mine.converted is not None
        assert mine.converted.converted == {"Llama": 5, "GPT2": 4, "Phi3": 10}[name]
    assert (regard.load(base)(ids) - exact).abs().max() > 1e-2 * exact.abs().max()
