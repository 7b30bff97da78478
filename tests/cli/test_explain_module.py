"""`regard explain --module`: any module of the caller's, named by a function that builds it."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import nn

from regard.cli.app import run
from regard.inspect import record
from regard.inspect.explain import head_choice
from tests.cli.command import Said

SOURCE = '''
import torch
from torch import nn

FRAMES, WORDS = [f"{10 * i} ms" for i in range(6)], ["<bos>", "to", "be"]
MADE = []


def pair():
    """Six frames of sound to three words."""
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 8, batch_first=True)
    MADE.append(model)
    return model, (torch.randn(2, 6, 16), torch.randn(2, 3, 16)), (WORDS, FRAMES)


def by_name():
    model, (src, tgt), _ = pair()
    return model, {"src": src, "tgt": tgt}


def only_a_model():
    return nn.Linear(2, 2)


def fails():
    raise KeyError("weights")


def no_attention():
    return nn.Linear(2, 2), torch.ones(1, 2)
'''
CROSS = "decoder.layers.0.multihead_attn"


@pytest.fixture(autouse=True)
def own_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    (tmp_path / "own_speech.py").write_text(SOURCE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("COLUMNS", "300")  # messages on one line
    yield
    sys.modules.pop("own_speech", None)


def made(said: Said, *arguments: str) -> dict[str, object]:
    found: dict[str, object] = json.loads(said("explain", "--module", *arguments, "--json"))
    return found


def test_labels_places_and_numbers_are_those_of_record(said: Said) -> None:
    asked = ["--place", CROSS, "--head", "1", "--query", "be", "--batch", "1"]
    found = made(said, "own_speech:pair", *asked)
    assert (found["place"], found["head"], found["query"]) == (CROSS, 1, 2)
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 8, batch_first=True).eval()
    recording = record(model, torch.randn(2, 6, 16), torch.randn(2, 3, 16))
    weights = recording.weights(CROSS, 1, 2, batch=1)[0]
    assert torch.tensor(found["weights"]) == pytest.approx(weights, abs=1e-6)
    assert sys.modules["own_speech"].MADE[0].training  # its mode is restored


def test_the_head_with_the_largest_weight_is_chosen(said: Said) -> None:
    found = made(said, "own_speech:pair", "--query", "be", "--key", "20 ms")
    assert found["place"] == CROSS  # no other place has both labels
    assert found["chosen_by"] == head_choice.HEAD_FOR_KEY_RULE
    torch.manual_seed(0)
    model = nn.Transformer(16, 2, 1, 1, 8, batch_first=True).eval()
    recording = record(model, torch.randn(2, 6, 16), torch.randn(2, 3, 16))
    by_head = [float(recording.weights(CROSS, h, 2)[0, 2]) for h in range(2)]
    assert found["head"] == by_head.index(max(by_head))


def test_places_are_listed(said: Said) -> None:
    sizes = {"place": CROSS, "heads": 2, "queries": 3, "keys": 6}
    listed = json.loads(said("explain", "--module", "own_speech:by_name", "--list", "--json"))
    assert listed[-1] == sizes
    heads = said("explain", "--module", "own_speech:pair", "--list").splitlines()[0]
    assert heads.split() == list(sizes)
    chinese = said("explain", "--module", "own_speech:pair", "--list", "--lang", "zh")
    assert chinese.splitlines()[0].split() == ["位置（模块）", "头", "查询", "键"]


@pytest.mark.parametrize(
    ("options", "first"),
    [
        ([], f"{CROSS}, head 1 of Transformer (3 places recorded; 2 heads here, counted from 0):"),
        (["--full"], f"{CROSS[:27]}…, head 1 (reads key/value head 1), query token 2 be"),
        (
            ["--lang", "zh"],
            f"Transformer（记录了 3 处注意力；此处 2 个头，从 0 数起）的 {CROSS} 头 1：",
        ),
    ],
    ids=["screen", "full", "zh"],
)
def test_the_place_is_named_as_it_is_no_layer(said: Said, options: list[str], first: str) -> None:
    asked = ["--place", CROSS, "--head", "1", "--query", "be", *options]
    out = said("explain", "--module", "own_speech:pair", *asked)
    assert first.replace(" ", "") in "".join(out.split()), "a line may be broken"


def test_the_page_has_labels_and_names(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    asked = ["--query", "be", "--key", "20 ms", "--html", "page.html", "--lang", "en"]
    assert run(["explain", "--module", "own_speech:pair", *asked]) == 0
    page = (tmp_path / "page.html").read_text()
    for text in ("own_speech:pair", CROSS, "encoder.layers.0.self_attn", "20 ms", "be"):
        assert text in page
    assert capsys.readouterr().out.startswith("page.html: ")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--module", "own_speech"], "'own_speech' must be package.module:name"),
        (["--module", "nowhere_at_all:f"], "nowhere_at_all cannot be imported"),
        (["--module", "own_speech:WORDS"], "is list; it must be a function that returns"),
        (["--module", "own_speech:only_a_model"], "returned Linear; it must return (model"),
        (["--module", "own_speech:fails"], "own_speech:fails() raised KeyError: 'weights'"),
        (["--module", "own_speech:no_attention"], "no attention was recorded"),
        (["--module", "own_speech:pair", "--query", "what"], "query is 'what'"),
        (["--module", "own_speech:pair", "--place", "head"], "head"),
        (["--module", "own_speech:pair", "--layer", "0", "--place", CROSS], "leave --layer out"),
        (["hello", "--module", "own_speech:pair"], "does not apply to --module"),
        (["--module", "own_speech:pair", "--dtype", "float64"], "does not apply to --module"),
        (["hello", "--batch", "1"], "applies to --module only"),
        ([], "give a TEXT or --file PATH"),
    ],
    ids=str,
)
@pytest.mark.full(keep=3)
def test_what_is_refused(arguments: list[str], message: str, refused: Said) -> None:
    assert message in refused("explain", *arguments)
