"""Recording runs of models: ours of every kind, and transformers' under the registered
attention.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import regard
from regard.errors import ArgumentError, ArgumentTypeError
from regard.inspect import Recording, record
from regard.models import Model, Seq2Seq, TextEncoder, recurrent
from regard.models.families import family
from tests.inspect.small_model import TEXT, model, tokenizer

bert = family("bert")
t5 = family("t5")


@pytest.fixture(scope="module")
def stand_in() -> Model:
    return model()


@pytest.fixture(scope="module")
def encoder() -> TextEncoder:
    torch.manual_seed(0)
    config = bert.config(tokenizer().vocab_size, 16, 2, 4, 24, 64)
    return TextEncoder(bert.build(config).eval(), tokenizer(), config)


@pytest.fixture(scope="module")
def translator() -> Seq2Seq:
    torch.manual_seed(0)
    config = t5.config(tokenizer().vocab_size, 16, 4, 32, 2, 4)
    return Seq2Seq(t5.build(config).eval(), tokenizer(), config, start=0, eos_ids=[1])


def assert_right_sums(found: Recording, *, ahead: bool = False) -> None:
    """Every token's row of every head sums to 1; padding sees nothing, unless all may look at
    all.
    """
    for name, place in found.places.items():
        for h in place.heads:
            for b in range(place.B):
                sums = found.sums(name, h, batch=b)
                blind = found.positions(name, batch=b) < 0
                assert ahead or bool((sums[blind] == 0).all())
                assert bool(((sums[~blind] - 1).abs() < 1e-5).all()), (name, h, b)


def test_a_text(stand_in: Model) -> None:
    found = record(stand_in, TEXT)
    ids = stand_in.encode(TEXT)
    assert found.ids is not None
    assert torch.equal(found.ids, ids)
    assert found.pieces == tuple(stand_in.tokenizer.pieces(ids[0].tolist()))
    assert list(found.places) == ["layers.0", "layers.1", "layers.2"]
    assert len(found) == 3
    assert found.labels(1) == (found.pieces, found.pieces)
    said = {"model": "llama", "dtype": "float32", "device": "cpu", "training": "False"}
    assert found.metadata == said
    assert found.sound
    assert_right_sums(found)


def test_ids_and_positions_and_several_texts(stand_in: Model) -> None:
    texts = [TEXT, "the blue forest"]
    found = record(stand_in, texts)
    short = stand_in.encode(texts[1]).shape[1]
    T = found[0].T
    assert found.positions(0, batch=1).tolist() == [-1] * (T - short) + list(range(short))
    assert_right_sums(found)
    assert found.sound
    alone = record(stand_in, texts[1])
    for h in range(4):
        part = found.weights(1, h, slice(T - short, T), slice(T - short, T), batch=1)
        assert (part - alone.weights(1, h)).abs().max() < 1e-4  # a padded batch rounds otherwise
    again = record(stand_in, found.ids, positions=found[0].row_positions)
    assert torch.equal(again.weights(2, 1, batch=1), found.weights(2, 1, batch=1))


@pytest.mark.parametrize("chunk", [None, 1, 4])
def test_a_prompt_in_pieces(stand_in: Model, chunk: int | None) -> None:
    whole, found = record(stand_in, TEXT), record(stand_in, TEXT, chunk=chunk)
    T = whole[0].T
    assert len(found[0].steps) == (1 if chunk is None else -(-T // chunk))
    for layer in range(3):
        assert (found[layer].T, found[layer].N) == (T, T)
        for h in range(4):
            assert (found.weights(layer, h) - whole.weights(layer, h)).abs().max() < 1e-4
    assert found.sound


@pytest.mark.full(keep=1)
@pytest.mark.parametrize(
    "cache", [None, "growing", "fixed", "paged", "quantized", "ring", "streaming"]
)
def test_going_on_by_some_tokens(stand_in: Model, cache: str | None) -> None:
    forgets = cache in ("ring", "streaming")
    n = stand_in.encode(TEXT).shape[1]
    room = n + 4 if forgets else None
    said = "".join(stand_in.generate(TEXT, max_tokens=8, cache=cache, max_context=room))
    found = record(stand_in, TEXT, tokens=8, cache=cache, max_context=room)
    assert found.ids is not None
    decode = stand_in.tokenizer.decode
    assert decode(found.ids[0].tolist()) == decode(stand_in.encode(TEXT)[0].tolist()) + said
    place = found[0]
    assert [step.T for step in place.steps] == [n, *[1] * 7]
    assert found.sound
    assert found.labels(0)[0] == found.pieces[: n + 7]
    if cache != "streaming":
        assert place.T == place.N == n + 7
        assert_right_sums(found)
    if forgets:
        return
    whole = record(stand_in, found.ids[:, :-1])  # the last token is said, not read
    for h in range(4):
        assert (found.weights(2, h) - whole.weights(2, h)).abs().max() < 1e-4


def test_an_encoder(encoder: TextEncoder) -> None:
    found = record(encoder, [TEXT, "the blue forest"])
    assert list(found.places) == ["layers.0", "layers.1"]
    assert found.sound
    assert_right_sums(found, ahead=True)
    ids, positions, _ = encoder.encode([TEXT, "the blue forest"])
    again = record(encoder, ids, positions=positions)
    assert torch.equal(again.weights(1, 3, batch=1), found.weights(1, 3, batch=1))
    n = int((positions[1] >= 0).sum())
    assert found.weights(0, 0, 0, slice(n, None), batch=1).abs().max() == 0  # padding behind
    assert found.weights(0, 0, 0, slice(1, n), batch=1).min() > 0  # both ways


@pytest.mark.parametrize("target", [None, "the blue forest"])
def test_an_encoder_and_a_decoder(translator: Seq2Seq, target: str | None) -> None:
    found = record(translator, TEXT, target, **({} if target else {"tokens": 5}))
    source = translator.tokenizer.pieces(translator.encode(TEXT)[0][0].tolist())
    parts = [f"decoder.layers.{i}.{part}" for i in (0, 1) for part in ("attention", "cross")]
    assert list(found.places) == ["encoder.layers.0", "encoder.layers.1", *parts]
    assert found.sound
    assert_right_sums(found)
    assert list(found.source_pieces) == source
    rows, columns = found.labels("decoder.layers.1.cross")
    assert list(columns) == source
    assert rows == found.pieces[: found["decoder.layers.1.cross"].T]
    assert found.labels("encoder.layers.0")[0] == found.labels("encoder.layers.0")[1] == columns
    place = found["decoder.layers.1.cross"]
    # the memory is kept once, however many tokens read it
    assert place.column_positions.shape[1] == len(source)
    assert place.pools[0].k.shape[2] == place.N
    assert len(place.steps) == (1 if target else place.T)


def test_what_is_not_named_is_not_run_differently(stand_in: Model) -> None:
    found = record(stand_in, TEXT, places=[1], heads=[2], rows=1, keep=())
    assert (list(found.places), found[0].heads, found[0].T) == (["layers.1"], (2,), 1)
    assert found.labels(0)[0] == found.pieces[-1:]


@pytest.mark.parametrize(
    ("which", "arguments", "options", "kind", "message"),
    [
        ("stand_in", (TEXT,), {"places": [9]}, ArgumentError, "Model called no softmax"),
        ("stand_in", (TEXT, "x"), {}, ArgumentError, "target does not apply to a Model"),
        ("stand_in", (TEXT,), {"cache": "ring"}, ArgumentError, "no tokens are generated; set"),
        ("stand_in", (TEXT,), {"chunk": 0}, ArgumentError, "chunk is 0; it must be at least 1"),
        ("stand_in", ([TEXT, TEXT],), {"tokens": 2}, ArgumentError, "after one text only"),
        (
            "stand_in",
            (TEXT,),
            {"positions": regard.Span(0, 3)},
            ArgumentError,
            "only with a",
        ),
        ("stand_in", ([],), {}, ArgumentTypeError, "messages, ids, or several"),
        ("encoder", (TEXT,), {"tokens": 3}, ArgumentError, "tokens does not apply to a TextEnc"),
        ("translator", (torch.tensor([[1]]),), {}, ArgumentTypeError, "for a Seq2Seq"),
        ("encoder", (TEXT,) * 3, {}, ArgumentTypeError, "got 3 inputs for a TextEncoder; give"),
        ("encoder", (TEXT,), {"text": TEXT}, ArgumentTypeError, "got 1 input .* and text tw"),
        ("encoder", (), {"tokens": 3}, ArgumentTypeError, "got 0 inputs for a TextEncoder; give"),
    ],
)
def test_what_does_not_go_together_is_refused(
    request: Any, which: str, arguments: Any, options: Any, kind: type[Exception], message: str
) -> None:
    with pytest.raises(kind, match=message):
        record(request.getfixturevalue(which), *arguments, **options)


def test_a_name_is_no_model() -> None:
    with pytest.raises(ArgumentTypeError, match="model is str; it must be a Model, a TextEncoder"):
        record("tiny", TEXT)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def families() -> Any:
    pytest.importorskip("transformers", reason="needs the extra `transformers`")
    from tests.integrations import families

    return families


class TestTransformers:
    """Under the registered attention implementation; q, k and lse are the kernel's there, too."""

    @pytest.mark.full(keep=2)
    @pytest.mark.parametrize(
        "name", ["Llama", "Mistral", "Gemma2", "GptOss", "DeepseekV3", "Llama4"]
    )
    def test_decoders_and_generation_with_padding(self, families: Any, name: str) -> None:
        network, ids = families.decoder(name, "regard"), families.tokens(2, 9)
        mask = families.keep([9, 6], 9, "left")
        given = {"input_ids": ids, "attention_mask": mask}
        found = record(network, given, tokens=4)
        assert torch.equal(found.ids, network.generate(**given, max_new_tokens=4, do_sample=False))
        assert list(found.places) == ["layers.0", "layers.1"]
        place = found[0]
        assert [step.T for step in place.steps] == [9, 1, 1, 1]
        assert place.T == place.N == 12
        assert place.has_one_key_per_column
        assert found.sound, [str(x) for x in found.row_sums.values()]
        one, part = record(network, given).weights(1, 3, batch=1), slice(0, 9)
        assert (one - found.weights(1, 3, part, part, batch=1)).abs().max() < 1e-5
        for row in range(3, 12):  # nobody looks at padding
            assert found.weights(1, 0, row, slice(0, 3), batch=1).abs().max() == 0

    @pytest.mark.parametrize("name", ["T5", "Bart"])
    def test_encoders_and_decoders_have_names_in_full(self, families: Any, name: str) -> None:
        given = {"input_ids": families.tokens(2, 9), "decoder_input_ids": families.tokens(2, 5)}
        found = record(families.other(name, "regard"), given)
        assert len(found) == 6
        assert all("coder." in place for place in found.places)
        sizes = sorted((place.T, place.N) for place in found.places.values())
        assert sizes == [(5, 5)] * 2 + [(5, 9)] * 2 + [(9, 9)] * 2
        assert found.sound
        assert found.metadata["model"] == name.lower()

    def test_the_weights_are_those_that_eager_attention_returns(self, families: Any) -> None:
        network, ids = families.decoder("Llama", "regard"), families.tokens(1, 9)
        found = record(network, ids)
        eager = families.decoder("Llama", "eager")
        with torch.no_grad():
            theirs: tuple[Tensor, ...] = eager(ids, output_attentions=True).attentions
        for layer in range(2):
            for h in range(4):
                assert (found.weights(layer, h) - theirs[layer][0, h]).abs().max() < 1e-5

    def test_another_attention_and_a_text_are_refused(self, families: Any) -> None:
        with pytest.raises(ArgumentError, match=r"call model.set_attn_implementation\("):
            record(families.decoder("Llama", "eager"), families.tokens(1, 9))
        with pytest.raises(ArgumentTypeError, match=r"text must be ids \[B,T\], or a mapping"):
            record(families.decoder("Llama", "regard"), "to be")


def test_a_module_without_attention_is_named() -> None:
    with pytest.raises(ArgumentError, match="the run of Linear called no softmax attention"):
        record(nn.Linear(2, 2), torch.zeros(1, 2))


def test_a_network_without_a_tokenizer_is_recorded() -> None:
    network = recurrent(9, 8, 8, attention="luong")
    found = record(network, torch.tensor([[1, 2, 3]]), torch.tensor([[2, 4]]))
    assert [(place.T, place.N) for place in found.places.values()] == [(2, 3)]
    assert found.sound
