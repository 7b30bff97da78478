"""What `regard cost --mechanisms` prints for a mechanism without sizes is what `train`, `compare`
and `layer` use, and can be pasted into each of them.
"""

from __future__ import annotations

import inspect
from pathlib import Path

import pytest

from regard.cli import main
from regard.compare.mechanisms import Shape, candidates
from regard.configs.suggested_sizes import DecoderSizes, base_model, mechanism_costs
from regard.cost import Setting
from regard.errors import ArgumentError
from regard.models.assembly.catalogue_mixer import build_mixer, decoder_variants
from regard.models.assembly.counted_layers import count_layer
from regard.nn.variants import VARIANTS
from regard.nn.variants.registry import named_options, sized_options
from regard.train.pretraining import make_config
from regard.view.cost_text import suggested_sizes

SIZES = {"layers": 2, "dim": 64, "heads": 4}
TRAIN = {**SIZES, "hidden": 32, "context": 16, "tie": False}
COUNTED = [name for name in decoder_variants() if name != "packed"]  # its bounds are of one text


def with_defaults(name: str, options: object) -> dict[str, object]:
    """The options with the defaults of the constructor."""
    parameters = list(inspect.signature(VARIANTS[name].build).parameters.values())[2:]
    assert isinstance(options, dict)
    return {x.name: x.default for x in parameters} | options


@pytest.fixture(scope="module")
def printed() -> dict[str, str]:
    """Mechanism -> its text with the sizes that `cost --mechanisms` prints."""
    base = base_model({**SIZES, "vocab": 256})
    rows = mechanism_costs(COUNTED, base, Setting(4096), count_layer=count_layer)
    return {name: name for name in COUNTED} | {
        text.partition(":")[0]: text for text, _ in suggested_sizes(rows)
    }


@pytest.mark.parametrize("name", COUNTED)
def test_every_command_takes_and_uses_what_cost_prints(printed: dict[str, str], name: str) -> None:
    wanted = None
    for text in (printed[name], name):
        entry, given = named_options(text)  # as layer reads it
        found = [sized_options(entry, given, DecoderSizes.of(SIZES["dim"], SIZES["heads"]))]
        found.append(make_config({**TRAIN, "attention": text}, 256).attention_options)
        if name != "mha":  # in compare, that has rotary positions
            shape = Shape(SIZES["dim"], SIZES["layers"], SIZES["heads"])
            found.append(dict(candidates([text], shape)[0].options))
        wanted = wanted or with_defaults(name, found[0])
        assert all(with_defaults(name, options) == wanted for options in found), text
    build_mixer(name, SIZES["dim"], SIZES["heads"], found[0])


def test_latents_and_windows_by_hand(printed: dict[str, str]) -> None:
    # heads of 16: an eighth of DeepSeek's 128, and half of its latent for fewer than 16 heads
    assert printed["mla"] == "mla:kv_rank=32:nope_dim=16:rope_dim=8:value_dim=16"
    assert printed["sliding_window"] == "sliding_window:groups=2:window=8"
    assert printed["gated_delta_net"] == "gated_delta_net:value_heads=8"
    # nothing is scaled in a wide model
    wide = DecoderSizes.of(4096, 32)
    assert {k: v for k, (v, _) in wide.suggest("mla").items()} == {
        "kv_rank": 512,
        "q_rank": 1536,
        "nope_dim": 128,
        "rope_dim": 64,
        "value_dim": 128,
    }
    assert wide.suggest("sliding_window")["window"] == (4096, "mistral-7b-v0.1")


@pytest.mark.parametrize("name", sorted({*VARIANTS} - {*COUNTED}))
def test_what_no_decoder_can_have_is_refused_by_each_command(name: str) -> None:
    base = base_model({**SIZES, "vocab": 256})
    with pytest.raises(ArgumentError):
        mechanism_costs([name], base, Setting(4096), count_layer=count_layer)
    with pytest.raises(ArgumentError):
        make_config({**TRAIN, "attention": name}, 256)
    with pytest.raises(ArgumentError):
        candidates([name], Shape(64, 2, 4))


def test_the_commands_print_the_sizes_that_they_use(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    text = tmp_path / "text.txt"
    text.write_text("one two three four five six seven eight nine ten. " * 40, encoding="utf-8")
    sizes = "--dim 64 --heads 4 --layers 2"
    quick = "--context 8 --no-training --no-memory --rounds 1"
    train = f"{sizes} --steps 1 --batch 1 --context 8 --vocab 280"
    full = "sliding_window:groups=2:window=5"
    for command in (
        f"cost {sizes} --mechanisms sliding_window:window=5,mqa",
        f"train {text} --out {tmp_path / 'out'} {train} --attention sliding_window:window=5",
        f"compare sliding_window:window=5 {sizes} {quick}",
        "layer sliding_window:window=5 --dim 64 --heads 4",
    ):
        with pytest.raises(SystemExit) as end:
            main(command.split())
        output = capsys.readouterr()
        assert end.value.code == 0, output.err
        seen = "".join((output.out + output.err).split())
        given_first = "sliding_window:window=5:groups=2"
        assert (given_first if command.startswith("cost") else full) in seen, command
