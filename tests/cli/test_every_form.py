"""Every command on every form of a model: each cell computes what the loaded model computes when it
is called in Python, or is refused with the words that say what to do.
"""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor

import regard
from regard.cli.app import COMMANDS
from regard.cli.inspect import TASKS
from regard.models import Model, TextEncoder
from regard.models.convert import Checkpoint
from regard.nn.weights import count_parameters
from tests.cli.command import Said
from tests.cli.test_few_bit_models import small_model, write_as_gguf
from tests.models.checkpoint.test_quantized_folders import MXFP4, bytes_, pack
from tests.models.small import named_model

TEXT, OTHER = "the cat sat on", "the dog sat on"
FORMS = ("tiny", "smollm2", "int8", "int4", "gguf", "mxfp4", "transformers", "minilm")


class Form(NamedTuple):
    """A model as `--model` takes it, and the same model in Python."""

    name: str
    source: str
    model: Model | TextEncoder

    @property
    def decodes(self) -> bool:
        return isinstance(self.model, Model)

    @property
    def depth(self) -> int:
        return int(self.model.config.num_hidden_layers)

    @cache  # noqa: B019  (a form lives as long as the module)
    def traced(self, text: str = TEXT) -> tuple[Tensor, Mapping[str, Tensor]]:
        """What the model returns for a text, and the pattern of each layer."""
        with torch.no_grad(), regard.Trace("layers.*.pattern") as trace:
            encoded = self.model.encode(text)
            out = self.model(encoded) if isinstance(encoded, Tensor) else self.model(*encoded)
        return out, {name: trace[name] for name in trace}

    def logs(self, text: str = TEXT) -> Tensor:
        """Log probabilities of the next token."""
        return self.traced(text)[0][0, -1].float().log_softmax(-1)


@pytest.fixture(scope="module")
def form_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Form]:
    @cache
    def make(name: str) -> Form:
        folder = tmp_path_factory.mktemp(name) / "model"
        source: str | Path = name
        if name in ("smollm2", "minilm"):
            return Form(name, name, named_model(name, Model if name == "smollm2" else TextEncoder))
        if name in ("int8", "int4"):
            source = regard.load(small_model().save(folder.parent / "wide"), weights=name).save(
                folder
            )
        elif name == "gguf":
            source = write_as_gguf(small_model(), folder)
        elif name == "mxfp4":
            source = _mxfp4_folder(folder)
        elif name == "transformers":
            source = _transformers_folder(folder)
        return Form(name, str(source), regard.load(source))

    return make


def _transformers_folder(folder: Path) -> Path:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 64}
    tiny = regard.load("tiny")
    config = transformers.Qwen2Config(vocab_size=tiny.config.vocab_size, **sizes, **heads)
    torch.manual_seed(0)
    transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    tiny.tokenizer.save(folder)
    return folder


def _mxfp4_folder(folder: Path) -> Path:
    """A gpt-oss whose experts are packed."""
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 64, "intermediate_size": 32, "num_hidden_layers": 2, "head_dim": 8}
    heads = {"num_attention_heads": 4, "num_key_value_heads": 2, "num_local_experts": 3}
    rope = {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}
    tiny = regard.load("tiny")
    config = transformers.GptOssConfig(
        vocab_size=tiny.config.vocab_size,
        num_experts_per_tok=2,
        max_position_embeddings=64,
        **sizes,
        **heads,
        **rope,
    )
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config)
    model.save_pretrained(folder)
    change: dict[str, Tensor | None] = {}
    for i in range(2):
        for name, inside, outside in (("gate_up_proj", 64, 64), ("down_proj", 32, 64)):
            stored = f"model.layers.{i}.mlp.experts.{name}"
            scales = bytes_(3, outside, inside // 32, low=118, high=124)
            change |= {stored: None, f"{stored}_scales": scales}
            change[f"{stored}_blocks"] = bytes_(3, outside, inside // 32, 16)
    pack(folder, change, MXFP4)
    tiny.tokenizer.save(folder)
    return folder


def near(value: float, wanted: float | Tensor) -> bool:
    return value == pytest.approx(float(wanted), rel=2e-3, abs=2e-5)


def greedy(model: Model, ids: Sequence[int], count: int) -> str:
    """The likeliest continuation, one whole pass for each token."""
    row = list(ids)
    for _ in range(count):
        row.append(int(model(torch.tensor([row]))[0, -1].argmax()))
    return model.tokenizer.decode(row[len(ids) :])


class Command(NamedTuple):
    """How a cell of the table runs its command."""

    said: Said
    form: Form
    folder: Path

    def json(self, *words: object) -> Any:
        """What `... --model FORM --json` prints."""
        return json.loads(self.said(*words, "--model", self.form.source, "--json"))


def assert_explain(run: Command, form: Form) -> None:
    told = run.json("explain", TEXT)
    row = form.traced()[1][f"{told['place']}.pattern"][0, told["head"], told["query"]]
    assert len(told["weights"]) == len(row) > 3
    assert all(near(x, y) for x, y in zip(told["weights"], row, strict=True))


def assert_ablate(run: Command, form: Form) -> None:
    told = run.json("inspect", "ablate", TEXT)
    assert near(told["baseline"], form.logs().max() if form.decodes else 1)
    assert len(told["values"]) == form.depth


def assert_patch(run: Command, form: Form) -> None:
    told = run.json("inspect", "patch", TEXT, "--corrupt", OTHER)
    best = form.logs().argmax()
    assert near(told["target"], form.logs()[best] if form.decodes else 1)
    if form.decodes:  # the state of the last token after the last layer is all that the head reads
        assert near(told["baseline"], form.logs(OTHER)[best])
        assert near(told["values"][-1][-1], told["target"] - told["baseline"])


def assert_attribute(run: Command, form: Form) -> None:
    told, logit = run.json("inspect", "attribute", TEXT), form.traced()[0][0, -1].max()
    assert near(told["baseline"], logit)
    assert near(sum(sum(row) for row in told["values"]), logit)


def assert_knockout(run: Command, form: Form) -> None:
    told = run.json("inspect", "knockout", TEXT, "--keys", "0", "--layers", "0")
    assert near(told["baseline"], form.logs().max() if form.decodes else 1)
    assert told["values"][0][0] != 0


def assert_circuit(run: Command, form: Form) -> None:
    told = run.json("inspect", "circuit", TEXT, "--corrupt", OTHER, "--threshold", "0.5")
    best = form.logs().argmax()
    assert near(told["clean"], form.logs()[best])
    assert near(told["corrupt"], form.logs(OTHER)[best])
    assert abs(told["faithfulness"] - 1) <= 0.5


def assert_weights(run: Command, form: Form) -> None:
    told = run.json("inspect", "weights")
    assert len(told["values"]) == form.depth
    assert all(-1 <= x <= 1 for row in told["values"] for x in row)


def assert_lens(run: Command, form: Form) -> None:
    told = run.json("inspect", "lens", TEXT)
    assert near(told["values"][-1][-1], form.logs().max().exp())


def assert_rollout(run: Command, form: Form) -> None:
    p = [x[0].mean(0).double() for x in form.traced()[1].values()]
    product = torch.eye(len(p[0]), dtype=torch.float64)
    for pattern in p:
        product = (pattern + torch.eye(len(pattern))) / 2 @ product
    product = product / product.sum(-1, keepdim=True)  # a sink takes some of a row
    told = run.json("inspect", "rollout", TEXT)["values"]
    for row, wanted in zip(told, product, strict=True):
        assert all(near(x, y) for x, y in zip(row, wanted, strict=True) if y > 0)


def assert_compare(run: Command, form: Form) -> None:
    told = run.json("inspect", "compare", TEXT, "--other", OTHER)["values"]
    a, b = (form.traced(x)[1]["layers.0.pattern"][0, 0].double() for x in (TEXT, OTHER))
    middle = (a + b) / 2
    parts = [(x * (x / middle).log2()).nansum(-1).mean() for x in (a, b)]
    assert near(told[0][0], sum(parts) / 2)


def assert_measure(run: Command, form: Form) -> None:
    told = run.json("inspect", "measure", TEXT)["heads"]
    p = form.traced()[1]["layers.0.pattern"][0]
    assert all(near(told[h]["previous_token"], x.diagonal(-1).mean()) for h, x in enumerate(p))


def assert_taps(run: Command, form: Form) -> None:
    patterns = [x for x in run.json("inspect", "taps") if x.endswith(".pattern")]
    assert patterns == [f"layers.{i}.pattern" for i in range(form.depth)]


def assert_view(run: Command, form: Form) -> None:
    pytest.importorskip("starlette")
    file = run.folder / "recording.safetensors"
    assert run.said("view", form.source, TEXT, "--save", file).startswith("http://")
    recording = regard.inspect.load(file)
    assert len(recording) == form.depth
    wanted = form.traced()[1]["layers.0.pattern"][0, 1]
    assert torch.allclose(recording.weights(0, 1).to(wanted), wanted, atol=1e-5)
    assert run.said("view", file).startswith("http://")
    assert "regard view" in run.said("explain", TEXT, "--model", file, code=1)
    told = json.loads(run.said("audit", file, "--json"))
    assert told["clean"]
    assert [x["name"] for x in told["passed"]] == list(recording.places)


def assert_extend(run: Command, form: Form) -> None:
    assert isinstance(form.model, Model)
    trained = form.model.config.max_position_embeddings
    text = run.folder / "text.txt"
    text.write_text(" ".join([TEXT, OTHER] * trained), "utf-8")
    few = ("--windows", 1, "--trials", 1, "--steps", 2, "--length", trained + 16)
    options = ("--method", "linear", "--text", text, *few, "--json")
    told = json.loads(run.said("extend", form.source, *options))
    assert set(told["methods"]) == {"unscaled", "linear"}
    found, counted = told["methods"]["unscaled"]["by_length"][1], told["counted"]
    row = form.model.encode(text.read_text("utf-8"))[:, : trained + 1]
    losses = form.model(row[:, :-1])[0].double().log_softmax(-1).gather(1, row[0, 1:, None])
    assert near(found["nats"], -losses[-counted:].mean())


def assert_cost(run: Command, form: Form) -> None:
    told = json.loads(run.said("cost", form.source, "--context", 16, "--json"))
    network = form.model.decoder if isinstance(form.model, Model) else form.model.network
    assert told["parameters"] == count_parameters(network)
    assert told["active_parameters"] <= told["parameters"]


def assert_convert(run: Command, form: Form) -> None:
    out = run.folder / "out"
    text = run.folder / "text.txt"
    text.write_text(" ".join([TEXT, OTHER] * 40), "utf-8")
    run.said("convert", form.source, out, "--dtype", "float16", "--text", text)
    made = dict(regard.load(out, kind=Model).decoder.named_parameters())
    assert isinstance(form.model, Model)
    checkpoint = Checkpoint(form.model.decoder, form.model.config)
    records = {name: x.dequantize(torch.float32) for name, x in checkpoint.records().items()}
    wanted = {**checkpoint.weights(), **records}
    assert made.keys() <= wanted.keys()
    assert all(torch.equal(x, wanted[name].half()) for name, x in made.items())


def assert_generate(run: Command, form: Form) -> None:
    assert isinstance(form.model, Model)
    wanted = greedy(form.model, form.model.encode(TEXT)[0].tolist(), 3)
    assert run.json("generate", TEXT, "--max-tokens", 3)["text"] == wanted


def assert_chat(run: Command, form: Form) -> None:
    assert isinstance(form.model, Model)
    ids = form.model.encode([{"role": "user", "content": TEXT}])[0].tolist()
    out = run.said("chat", form.source, "--max-tokens", 3)
    assert out == f"{greedy(form.model, ids, 3)}\n"


def assert_audit(run: Command, form: Form) -> None:
    told = json.loads(run.said("audit", "--model", form.source, "--json"))
    assert told["clean"]
    passed = {x["name"] for x in told["passed"]}
    assert {"padding", "future" if form.decodes else "batch"} <= passed


CELLS: Mapping[str, Callable[[Command, Form], None]] = {
    "explain": assert_explain,
    "view": assert_view,
    "extend": assert_extend,
    "cost": assert_cost,
    "convert": assert_convert,
    "generate": assert_generate,
    "chat": assert_chat,
    "audit": assert_audit,
    "ablate": assert_ablate,
    "patch": assert_patch,
    "attribute": assert_attribute,
    "lens": assert_lens,
    "knockout": assert_knockout,
    "circuit": assert_circuit,
    "weights": assert_weights,
    "rollout": assert_rollout,
    "compare": assert_compare,
    "measure": assert_measure,
    "taps": assert_taps,
}
NEEDS_DECODER = "a Model is needed here: give another model"
NO_TEMPLATE = "no chat template"
REFUSED: Mapping[tuple[str, str], tuple[int, str]] = {
    ("attribute", "minilm"): (2, "measure its vector with ablate"),
    ("lens", "minilm"): (2, "measure its vector with ablate"),
    ("weights", "minilm"): (2, "it must be a Model"),
    ("circuit", "minilm"): (2, "edges are those of a Model"),
    ("extend", "minilm"): (1, NEEDS_DECODER),
    ("convert", "minilm"): (1, NEEDS_DECODER),
    ("chat", "minilm"): (1, NEEDS_DECODER),
    ("generate", "minilm"): (2, "regard.load('minilm').embed"),
} | {("chat", form): (1, NO_TEMPLATE) for form in FORMS if form not in ("smollm2", "minilm")}
"""(command, form) -> the exit code of a refusal, and the words that say what to do."""
SAME_CODE = "audit runs a network some hundred times, and a GGUF file takes the same path"
MANY_HEADS = "270 heads and 30 layers take a minute, and a GGUF file takes the same path"
SKIPPED = {
    ("ablate", "smollm2"): MANY_HEADS,
    ("patch", "smollm2"): MANY_HEADS,
    ("circuit", "smollm2"): MANY_HEADS,
    ("weights", "smollm2"): MANY_HEADS,
    ("extend", "smollm2"): "it is trained on 8,192 tokens, of which a test reads too many",
    ("audit", "smollm2"): SAME_CODE,
    ("audit", "int8"): SAME_CODE,
    ("audit", "int4"): SAME_CODE,
    ("audit", "tiny"): SAME_CODE,
}


@pytest.mark.full(keep="each")
@pytest.mark.parametrize("name", FORMS)
@pytest.mark.parametrize("command", CELLS)
def test_cell(
    command: str,
    name: str,
    form_of: Callable[[str], Form],
    said: Said,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if (command, name) in SKIPPED:
        pytest.skip(SKIPPED[command, name])
    monkeypatch.setattr("regard.inspect.tile_server.serve.Server.wait", lambda self: self.close())
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(TEXT.encode()), "utf-8"))
    form = form_of(name)
    if (command, name) not in REFUSED:
        CELLS[command](Command(said, form, tmp_path), form)
        return
    code, words = REFUSED[command, name]
    arguments: dict[str, tuple[object, ...]] = {
        "convert": ("convert", form.source, tmp_path / "out", "--dtype", "float16"),
        "extend": ("extend", form.source),
        "chat": ("chat", form.source),
        "circuit": ("inspect", "circuit", TEXT, "--corrupt", OTHER, "--model", form.source),
        "generate": ("generate", TEXT, "--model", form.source),
    }
    task = ("inspect", command, TEXT, "--model", form.source)
    text = said(*arguments.get(command, task), code=code)
    assert words in " ".join(text.split())


def test_every_command_is_here() -> None:
    no_model = {"compare", "describe", "inspect", "layer", "show", "train"}
    assert set(CELLS) == (set(COMMANDS) - no_model) | set(TASKS)


def test_what_would_say_nothing_is_refused(
    form_of: Callable[[str], Form], said: Said, tmp_path: Path
) -> None:
    """A gradient that is 0 by definition, and a text where a recording belongs."""
    text = tmp_path / "notes.txt"
    text.write_text(TEXT, "utf-8")
    assert "--file" in said("view", text, code=2)
    minilm = form_of("minilm").source
    gradient = ("inspect", "attribute", TEXT, "--method", "gradient", "--model", minilm)
    assert "gradient there is 0" in " ".join(said(*gradient, code=2).split())
    told = json.loads(said(*gradient, "--answer", "a dog", "--json"))
    assert max(abs(x) for row in told["values"] for x in row) > 1e-3
