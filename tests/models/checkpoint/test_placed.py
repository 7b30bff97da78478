"""Names with a prefix too many or too few: exactly one mapping fits; and base models that were
saved alone.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import regard
from regard import ArgumentError, FileError
from regard.cli.app import run
from regard.configs.base import ModelConfig
from regard.inspect import head_scores, record
from regard.models import Model
from regard.models.checkpoint.family import SAME_NAMES, Family
from regard.models.checkpoint.weights import map_names, name_matcher
from regard.models.convert import ConversionOptions, convert
from regard.models.families import FAMILIES, family
from regard.models.save import save
from tests.models import small
from tests.models.small import change_config

gpt_neox = family("gpt_neox")

NAMED = [name for name in FAMILIES if name != "regard"]
WITH_PREFIX = [name for name in NAMED if name not in ("t5", "deepseek_v4")]
"""The tables of the two others, in the makers' spelling, have no prefix."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    made = tmp_path / "made"
    made.mkdir()
    return small.write(made, small.model())


def rename(folder: Path, change: Callable[[str], str | None]) -> None:
    """None takes a tensor out."""
    path = folder / "model.safetensors"
    held = {change(name): x for name, x in load_file(path).items()}
    path.unlink()
    save_file({name: x for name, x in held.items() if name is not None}, path)


def base(name: str) -> str | None:
    """What `LlamaModel.save_pretrained` calls a tensor of `LlamaForCausalLM`."""
    return None if name == "lm_head.weight" else name.removeprefix("model.")


def logits(model: Any) -> Tensor:
    found: Tensor = model(torch.tensor([[1, 2, 3, 4]]))
    return found


def names_of(name: str) -> tuple[Family, list[str]]:
    """A family, and the names of its table with a number for each {}."""
    found = family(name)
    assert found.names is not SAME_NAMES
    return found, sorted({theirs.replace("{}", "3") for theirs in found.names})


@pytest.mark.full(keep=20)
@pytest.mark.parametrize("wrapper", ["", "module.", "_orig_mod.module."])
@pytest.mark.parametrize("name", NAMED)
def test_prefixes_of_every_family(name: str, wrapper: str) -> None:
    found, names = names_of(name)
    where = map_names(Path(), [wrapper + n for n in names], found, name_matcher(found))
    assert where.names == {wrapper + n: n for n in names}
    assert (where.unmatched, where.is_base_model) == ((), False)


@pytest.mark.full(keep=20)
@pytest.mark.parametrize("name", WITH_PREFIX)
def test_the_base_model_of_every_family(name: str) -> None:
    found, names = names_of(name)
    (prefix,) = found.prefixes
    own = [n for n in names if n.startswith(prefix)]
    for stored in (own, names):  # without the head, and with it
        where = map_names(
            Path(), [n.removeprefix(prefix) for n in stored], found, name_matcher(found)
        )
        assert where.names == {n.removeprefix(prefix): n for n in stored}
        assert (where.unmatched, where.is_base_model) == ((), True)
    assert not map_names(Path(), own, found, name_matcher(found)).is_base_model
    mixed = [own[0], *(n.removeprefix(prefix) for n in own[1:])]
    assert map_names(Path(), mixed, found, name_matcher(found)).unmatched == (own[0],)


def test_names_of_many_parts_cost_few_passes() -> None:
    found, names = names_of("llama")
    deep = [".".join("a" * 200) + "." + n for n in names]
    assert set(map_names(Path(), deep, found, name_matcher(found)).unmatched) == set(deep)


def test_two_mappings_that_fit_are_refused() -> None:
    both = Family(
        ModelConfig, lambda _: torch.nn.Identity(), {"w": "w", "a.w": "a", "b": "b", "a.b": "c"}
    )
    with pytest.raises(FileError, match=r"can be read in two ways: 'a\.w' is a\.w or w; rename"):
        map_names(Path(), ["a.w", "a.b"], both, name_matcher(both))


def test_a_wrapped_checkpoint_is_the_same_model(folder: Path) -> None:
    before = logits(regard.load(folder))
    for wrapper in ("module.", "_orig_mod."):
        rename(folder, lambda name: wrapper + name)  # noqa: B023
        assert torch.equal(logits(regard.load(folder)), before)


def test_the_base_model_of_a_tied_one(tmp_path: Path) -> None:
    made = small.model(tie_word_embeddings=True)
    small.write(tmp_path, made)
    rename(tmp_path, base)
    model = regard.load(tmp_path, kind=Model)
    assert model.has_head
    assert torch.equal(logits(model), logits(made))


@pytest.mark.parametrize("said", [False, None])
def test_a_base_model_without_a_head_gives_states(said: bool | None, folder: Path) -> None:
    """A Llama's head is its own unless config.json ties it: one that is absent is never made up."""
    made = regard.load(folder, kind=Model)
    rename(folder, base)
    change_config(folder, tie_word_embeddings=said)
    model = regard.load(folder, kind=Model)
    assert not model.has_head
    assert not model.config.tie_word_embeddings
    ids = model.encode("the quick fox")
    states = model.hidden(ids)
    assert torch.equal(states, made.hidden(ids))
    head = made.decoder.head
    assert head is not None
    assert torch.equal(head(states), made(ids))
    message = (
        "this model has no head: a base model was saved alone, .*; hidden\\(ids\\) gives its states"
    )
    for ask in (
        lambda: model(ids),
        lambda: "".join(model.generate("the", max_tokens=2)),
        lambda: model.cache_prefix("the"),
        lambda: model.beam_search("the", max_tokens=2),
    ):
        with pytest.raises(ArgumentError, match=message):
            ask()


def test_a_head_is_not_thought_absent_where_only_it_is_lost(folder: Path) -> None:
    """Names with the prefix are those of a model with a head: without it the file is not whole."""
    rename(folder, lambda name: None if name == "lm_head.weight" else name)
    with pytest.raises(FileError, match=r"1 missing \['lm_head\.weight'\]"):
        regard.load(folder)


def test_a_base_model_is_saved_as_one(folder: Path, tmp_path: Path) -> None:
    rename(folder, base)
    model = regard.load(folder, kind=Model)
    again = tmp_path / "again"
    again.mkdir()
    save(model.decoder, model.config, again)
    assert (
        load_file(again / "model.safetensors").keys()
        == load_file(folder / "model.safetensors").keys()
    )
    ids = torch.tensor([[1, 2, 3]])
    assert torch.equal(regard.load(again, kind=Model).hidden(ids), model.hidden(ids))


def test_a_base_model_with_a_tensor_too_many(folder: Path) -> None:
    """The message speaks of the mapping that fits all the others."""
    rename(folder, lambda name: base(name) or "score.weight")
    with pytest.raises(FileError, match=r"0 missing \[\], 1 unexpected \['score\.weight"):
        regard.load(folder)
    assert regard.load(folder, ignore=["score.weight"], kind=Model).ignored == ("score.weight",)


def test_another_name_of_the_head(tmp_path: Path) -> None:
    config = gpt_neox.config(300, 32, 2, 4, 40, rotary_pct=0.5)
    network = gpt_neox.build(config)
    small.randomize(network)
    save(network, config, tmp_path)
    ids = torch.tensor([[1, 2, 3]])
    rename(
        tmp_path,
        lambda name: None if name == "embed_out.weight" else name.removeprefix("gpt_neox."),
    )
    model = regard.load(tmp_path, kind=Model)
    assert not model.has_head
    with torch.no_grad():  # the kernel is then the same whether or not weights want a gradient
        assert torch.equal(model.hidden(ids), network.eval().hidden(ids))


def test_commands_on_a_base_model(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rename(folder, base)
    assert run(["generate", "the", "--model", str(folder), "--max-tokens", "1"]) == 2
    assert "this model has no head" in capsys.readouterr().err.replace("\n", " ")
    assert run(["explain", "the key", "--model", str(folder), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["sizes"]["T"] > 1
    model = regard.load(folder)
    found, wanted = (
        record(m, "the key").places["layers.1"].steps[0] for m in (model, small.model())
    )
    assert torch.equal(found.q, wanted.q)
    ids = torch.tensor([[1, 2, 3, 1, 2, 3]])
    assert head_scores(model, ids).keys() == head_scores(small.model(), ids).keys()
    with pytest.raises(ArgumentError, match="is a base model without a head"):
        convert(folder, tmp_path / "out", ConversionOptions(to="mqa"))


@pytest.mark.parametrize("kind", ["llama", "qwen3"])
def test_what_transformers_saves_of_a_base_model(kind: str, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.AutoConfig.for_model(
        kind,
        vocab_size=99,
        hidden_size=24,
        intermediate_size=40,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=10,
        tie_word_embeddings=False,
        pad_token_id=None,
        bos_token_id=None,
        eos_token_id=None,
    )
    theirs = transformers.AutoModel.from_config(config).eval()
    small.randomize(theirs)
    theirs.save_pretrained(tmp_path)
    assert not any(n.startswith("model.") for n in load_file(tmp_path / "model.safetensors"))
    ids = torch.tensor([[1, 2, 3, 4, 5]])
    with torch.no_grad():
        wanted = theirs(ids).last_hidden_state
    found = regard.load(tmp_path, kind=Model).hidden(ids)
    assert (found - wanted).abs().max() <= 1e-5 * wanted.abs().max()
