"""BERT models of transformers, saved by it and loaded here: states, pooler, head for hidden words,
padding, pairs.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

import regard
from regard import Trace
from regard.models.text_encoder import TextEncoder
from tests.parity.families.changes import put, swap, zeros
from tests.parity.families.harness import (
    assert_far,
    assert_near,
    assert_refused,
    distance,
    saved,
    theirs,
    transformers,
)
from tests.parity.families.sequence_pairs import saved_twice

SMALL: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 36,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 6,
    "max_position_embeddings": 48,
    "type_vocab_size": 3,
}
LENGTH = 40


class Pair:
    """A model of theirs, ours with its weights, and a batch of pairs of texts."""

    def __init__(self, folder: Path, head: str = "ForPreTraining", **change: Any) -> None:
        self.theirs = theirs("Bert", SMALL | change, head=head)
        self.folder = saved(self.theirs, folder)
        self.mine = regard.load(folder, kind=TextEncoder)
        make = torch.Generator().manual_seed(7)
        self.ids = torch.randint(0, 96, (3, LENGTH), generator=make)
        self.segments = torch.randint(0, 3, (3, LENGTH), generator=make)

    def exact(self, **call: Any) -> Any:
        given = {"input_ids": self.ids, "token_type_ids": self.segments} | call
        return self.theirs(**given, output_hidden_states=True, output_attentions=True)


def test_states_pooler_and_head(tmp_path: Path) -> None:
    pair = Pair(tmp_path)
    mine, exact = pair.mine, pair.exact()
    for backend in ("auto", "reference"):
        states = mine.hidden(pair.ids, segments=pair.segments, backend=backend)
        assert_near(states, exact.hidden_states[-1])
    assert_near(mine.network.logits(states), exact.prediction_logits)
    assert_near(
        mine.network.pooled(states),
        pair.theirs.bert(pair.ids, token_type_ids=pair.segments).pooler_output,
    )
    assert_near(
        mine.hidden(pair.ids),
        pair.exact(token_type_ids=torch.zeros_like(pair.ids)).hidden_states[-1],
    )
    assert_near(mine.hidden(pair.ids[1:2], segments=pair.segments[1:2]), states[1:2])


def test_every_layer_and_every_pattern(tmp_path: Path) -> None:
    pair = Pair(tmp_path, "Model")
    exact, heard = pair.exact(), []
    layers = [pair.mine.network.encoder.embed, *pair.mine.network.encoder.layers]
    hooks = [x.register_forward_hook(lambda _, __, out: heard.append(out)) for x in layers]
    with Trace("pattern") as trace:
        pair.mine.hidden(pair.ids, segments=pair.segments)
    for hook in hooks:
        hook.remove()
    assert len(heard) == len(exact.hidden_states) == 3
    for states, other in zip(heard, exact.hidden_states, strict=True):
        assert_near(states, other)
    for i, pattern in enumerate(exact.attentions):
        assert_near(trace[f"layers.{i}.pattern"], pattern)


def test_padding_on_either_side_changes_nothing(tmp_path: Path) -> None:
    """Rows of 40, 17 and 1 tokens: each is what it is alone, wherever its padding stands, and
    whatever ids are there.
    """
    pair = Pair(tmp_path, "Model")
    sizes = (LENGTH, 17, 1)
    alone = [
        pair.exact(input_ids=pair.ids[i : i + 1, :n], token_type_ids=pair.segments[i : i + 1, :n])
        for i, n in enumerate(sizes)
    ]
    for left in (False, True):
        ids, segments = torch.full((3, LENGTH), 10_000), torch.zeros(3, LENGTH, dtype=torch.int64)
        positions = torch.full((3, LENGTH), -1)
        at = [slice(LENGTH - n, LENGTH) if left else slice(0, n) for n in sizes]
        for i, (n, where) in enumerate(zip(sizes, at, strict=True)):
            ids[i, where], segments[i, where] = pair.ids[i, :n], pair.segments[i, :n]
            positions[i, where] = torch.arange(n)
        states = pair.mine.hidden(ids, positions, segments)
        for i, where in enumerate(at):
            assert_near(states[i : i + 1, where], alone[i].last_hidden_state)
            assert_near(
                pair.mine.network.pooled(states, positions)[i : i + 1], alone[i].pooler_output
            )


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    ("head", "change"),
    [
        ("ForMaskedLM", {}),
        ("ForMaskedLM", {"hidden_act": "gelu_new"}),
        ("ForPreTraining", {"hidden_act": "relu"}),
        ("Model", {}),
    ],
)
def test_saving_gives_the_same_file_again_and_transformers_reads_it(
    head: str, change: dict[str, Any], tmp_path: Path
) -> None:
    (tmp_path / "a").mkdir()
    pair = Pair(tmp_path / "a", head, **change)
    model, first = saved_twice(pair.mine, tmp_path)
    states = model.hidden(pair.ids, segments=pair.segments)
    kind: Any = getattr(transformers, "BertModel" if head == "Model" else f"Bert{head}")
    again = kind.from_pretrained(first, attn_implementation="eager").requires_grad_(False)
    exact = again(pair.ids, token_type_ids=pair.segments, output_hidden_states=True)
    assert_near(states, exact.hidden_states[-1])
    assert_near(exact.hidden_states[-1], pair.exact().hidden_states[-1])
    if head == "Model":
        assert_near(model.network.pooled(states), exact.pooler_output)
    else:
        logits = exact[0]
        assert_near(model.network.logits(states), logits)


def test_what_is_not_stored_is_not_there(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    pair = Pair(tmp_path / "a", "ForMaskedLM")
    states = pair.mine.hidden(pair.ids)
    with pytest.raises(regard.ArgumentError, match="this model has no pooler, because"):
        pair.mine.network.pooled(states)
    (tmp_path / "b").mkdir()
    other = Pair(tmp_path / "b", "Model")
    with pytest.raises(regard.ArgumentError, match="no head, because the checkpoint has none"):
        other.mine.network.logits(states)


def test_older_spellings(tmp_path: Path) -> None:
    """gamma and beta, no prefix, stored positions, a tied matrix beside its twin; a twin that
    differs is refused.
    """
    pair = Pair(tmp_path)
    before = pair.mine.hidden(pair.ids)
    file = tmp_path / "model.safetensors"
    stored = load_file(file)
    ends = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}

    def old(name: str) -> str:
        for new, end in ends.items():
            name = name.replace(new, end)
        return name.removeprefix("bert.")

    renamed = {old(name): x for name, x in stored.items()}
    renamed["embeddings.position_ids"] = torch.arange(48)[None]
    words = "cls.predictions.decoder.weight"
    renamed[words] = renamed["embeddings.word_embeddings.weight"].clone()
    assert "embeddings.LayerNorm.gamma" in renamed
    assert "cls.seq_relationship.weight" in renamed
    save_file(renamed, file)
    again = regard.load(tmp_path, kind=TextEncoder)
    assert torch.equal(again.hidden(pair.ids), before)
    other, more = {words: renamed[words] + 1}, {"classifier.weight": torch.zeros(2, 36)}
    message = "are tied by the config, and their values differ"
    assert_refused(tmp_path, message, renamed | other)
    message = r"1 unexpected \['classifier.weight \(2, 36\)'\]"
    assert_refused(tmp_path, message, renamed | more)


# Negative controls: what must be told apart.


def pre_norm(network: nn.Module) -> None:
    for layer in cast("Any", network).encoder.layers:
        for name in ("attention_residual", "feed_forward_residual"):
            path = getattr(layer, name)
            setattr(layer, name, regard.nn.PreNorm(path.norm))


def one_segment(network: nn.Module) -> None:
    segments = cast("Any", network).encoder.embed.segments
    segments.weight.data[:] = segments.weight.data[:1].clone()


WRONG: list[Callable[[nn.Module], None]] = [
    pre_norm,
    swap("encoder.layers.*", "attention_residual.norm", "feed_forward_residual.norm"),
    one_segment,
    zeros("encoder.embed.positional.weight"),
    put("encoder.embed", norm=nn.Identity()),
    put("encoder.layers.*.attention", scale=1.0),
    put("encoder.layers.*.attention", mask=regard.masks.Causal()),
    swap("encoder.layers.*.attention.project", "k", "v"),
]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Pair:
    return Pair(tmp_path_factory.mktemp("bert"))


@pytest.mark.parametrize("change", WRONG, ids=lambda x: x.__name__)
def test_a_wrong_variant_is_far(right: Pair, change: Callable[[nn.Module], None]) -> None:
    assert_far(wrong(right, change), right.exact().hidden_states[-1])


def test_the_other_gelu_is_not_near(right: Pair) -> None:
    other = put("encoder.layers.*.feed_forward", activation=nn.GELU("tanh"))
    assert distance(wrong(right, other), right.exact().hidden_states[-1]) > 10


def test_a_wrong_head_is_far(right: Pair) -> None:
    """Its norm left out; and its matrix not that of the embedding."""
    states = right.mine.hidden(right.ids, segments=right.segments)
    exact = right.exact().prediction_logits
    head: Any = copy.deepcopy(right.mine.network.head)
    assert_near(head(states), exact)
    head.norm = nn.Identity()
    assert_far(head(states), exact)
    head = copy.deepcopy(right.mine.network.head)
    head.words.weight = nn.Parameter(torch.randn_like(head.words.weight), requires_grad=False)
    assert_far(head(states), exact)


def wrong(pair: Pair, change: Callable[[nn.Module], None]) -> Tensor:
    network = copy.deepcopy(pair.mine.network)
    change(network)
    found: Tensor = network(pair.ids, segments=pair.segments)
    return found
