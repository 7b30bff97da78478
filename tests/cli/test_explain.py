"""`regard explain`: pages, JSON, choices and refusals."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest
from rich.cells import cell_len

import regard
from regard.cli.app import run
from regard.inspect import strongest_head
from regard.inspect.explain.head_choice import HEAD_RULE
from regard.view.heatmaps import draw_explanation, recipe
from tests.cli.command import Said
from tests.inspect.small_model import TEXT, model


@pytest.fixture(autouse=True)
def stand_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """A small random model under the name of the embedded one."""
    monkeypatch.setattr(regard, "load", lambda source, **_: model(), raising=False)
    monkeypatch.setenv("COLUMNS", "200")  # messages on one line


def test_a_text_gives_a_page_of_80_columns(said: Said) -> None:
    out = said("explain", TEXT, "--full")
    assert "━━ 9 next token" in out
    assert "\x1b" not in out
    assert max(map(len, out.splitlines())) <= 80
    choice = strongest_head(model(), model().encode(TEXT), -1)
    assert f"layer {choice.layer}, head {choice.head} " in out
    assert f"chosen: {HEAD_RULE}" in " ".join(out.split())


@pytest.mark.parametrize(
    ("text", "installed", "name"),
    [
        (TEXT, {"smollm2", "minilm", "gemma3"}, "smollm2"),
        (TEXT, {"minilm"}, "minilm"),
        (TEXT, {"gemma3"}, "tiny"),
        ("小明", {"smollm2", "gemma3"}, "gemma3"),
        ("小明", {"smollm2"}, "tiny"),
    ],
)
def test_without_a_model_the_best_that_reads_the_language_is_taken(
    text: str,
    installed: set[str],
    name: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setattr("regard.files.named_packages.is_installed", installed.__contains__)
    assert run(["explain", text, "--json"]) == 0
    out, err = capsys.readouterr()
    assert json.loads(out)["model"] == name
    assert f"without --model, {name}" in " ".join(err.split())
    assert ("pip install --no-deps" in err) == (name == "tiny")
    assert run(["explain", text, "--model", "tiny", "--json"]) == 0
    assert "without --model" not in capsys.readouterr().err


def test_json_has_the_numbers_of_what_was_asked_for(said: Said) -> None:
    asked = ["--layer", "1", "--head", "-1", "--query", "creature", "--json"]
    found = json.loads(said("explain", TEXT, *asked))
    assert (found["layer"], found["head"], found["group"]) == (1, 3, 1)
    assert found["model"] == "tiny"
    assert found["chosen_by"] == ""
    expected = regard.inspect.explain(model(), TEXT, layer=1, head=3, query="creature").as_dict()
    for one in (*found["tensors"], *expected["tensors"]):
        assert one.pop("seconds") > 0  # the one thing that differs from run to run
    assert found == {**expected, "model": "tiny"}


def test_html_is_written_where_it_was_asked_for_and_nowhere_else(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run(["explain", TEXT, "--html", "a page.html"]) == 0
    static = re.search("<noscript>(.*?)</noscript>", Path("a page.html").read_text(), re.DOTALL)
    assert static is not None
    assert "1 inputs" in static[1], "without JavaScript the page shows the screen"
    captured = capsys.readouterr()
    assert captured.out.startswith("a page.html: ")
    assert [file.name for file in tmp_path.iterdir()] == ["a page.html"]
    text = (tmp_path / "a page.html").read_text("utf-8")
    assert text.startswith("<!doctype html>")
    assert run(["explain", TEXT, "--html", "b.html", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out)["schema"] == 3
    assert captured.err.splitlines()[-1].startswith("b.html: ")


def test_every_head_can_be_listed(said: Said) -> None:
    lines = said("explain", TEXT, "--list").splitlines()
    assert len(lines) == 2 + 3 * 4
    assert sum(line.startswith("▶") for line in lines) == 1
    found = json.loads(said("explain", TEXT, "--list", "--json"))
    order = [(row["layer"], row["head"]) for row in found["heads"]]
    assert order == [(layer, head) for layer in range(3) for head in range(4)]
    choice = strongest_head(model(), model().encode(TEXT), -1)
    best = max(found["heads"], key=lambda row: row["weight"])
    assert (best["layer"], best["head"]) == (choice.layer, choice.head)


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([""], "the text '' has no tokens"),
        (["xy", "--place", "layers.0", "--layer", "0"], "already names the layer; leave --layer"),
        (["xy", "--set", "groups=1"], "applies only to a mechanism with random weights; name one"),
        (["xy", "--attention", "gqa", "--set", "widow=1"], "--set widow=1: gqa has no option"),
        (["xy", "--attention", "gqa", "--model", "other"], "builds a network with random weights"),
        (["xy", "--attention", "retention", "--list"], "Recurrent ran no softmax for query 1"),
        (["xy", "--figure", "a.jpg"], "a.jpg is no picture; its name must end in .svg, .png, .pdf"),
        (["xy", "--layer", "one"], "Invalid value for '--layer'"),
        (["xy", "--html", "."], "is a folder; give the name of a file"),
        (["xy", "--html", "no/page.html"], "there is no folder 'no'; make it first"),
        ([], "give a TEXT or --file PATH; neither was given"),
    ],
)
def test_wrong_usage_exits_with_2_and_says_why(
    arguments: list[str], message: str, refused: Said
) -> None:
    assert message in refused("explain", *arguments)


def test_a_bad_target_is_refused_before_anything_is_computed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(source: str, **_: object) -> None:
        raise AssertionError("a model was loaded")

    monkeypatch.setattr(regard, "load", refuse, raising=False)
    assert run(["explain", "xy", "--html", str(tmp_path)]) == 2


def test_help_has_an_example_that_runs(said: Said) -> None:
    out = said("explain", "--help")
    assert 'regard explain "a fluffy blue creature roamed the verdant' in " ".join(out.split())
    assert run(["explain", TEXT, "--query", "creature"]) == 0


def test_the_key_is_chosen_or_named(said: Said) -> None:
    asked = ["--layer", "1", "--head", "0", "--query", "forest", "--json"]
    named = json.loads(said("explain", TEXT, *asked, "--key", "fluffy"))
    assert named["key_chosen_by"] == ""
    assert named["pieces"][named["key"]].endswith("y")
    chosen = json.loads(said("explain", TEXT, *asked))
    others = {j: p for j, p in enumerate(chosen["weights"]) if j not in (0, chosen["query"])}
    assert chosen["key"] == max(others, key=lambda j: others[j])
    assert "leaving out the query and the first token" in chosen["key_chosen_by"]
    assert [link["name"] for link in chosen["chain"]] == ["dot", "scaled", "masked"]
    assert chosen["chain"][-1]["value"] == chosen["scores"][-1]["values"][chosen["key"]]


def test_a_mechanism_with_random_weights(said: Said) -> None:
    asked = ["--attention", "sliding_window", "--set", "window=3", "--seed", "4", "--json"]
    found = json.loads(said("explain", TEXT, *asked))
    assert found["model"] == "sliding_window (random)"
    assert sum(not why for why in found["masked"]) == 3
    assert set(found["masked"]) == {"", "outside window 3"}
    assert any("from seed 4" in note for note in found["notes"])
    asked = ["--attention", "nsa", "--call", "window", "--place", "layers.1"]
    assert "call 'window' of compressed" in said("explain", TEXT, *asked)
    out = said("explain", TEXT, *asked, "--full")
    assert "call 'window' of compressed, selected, window" in " ".join(out.split())
    assert "layers.1: NSA" in out
    asked = ["--attention", "retention", "--head", "2", "--layer", "1"]
    assert "no score: this mechanism weights each value by a recurrence" in said(
        "explain", TEXT, *asked
    )
    assert "no softmax: the weights of the row are not normalized" in said(
        "explain", TEXT, *asked, "--full"
    )


def test_a_page_is_over_recorded_softmax_attention(tmp_path: Path, refused: Said) -> None:
    target = tmp_path / "a.html"
    error = refused("explain", TEXT, "--attention", "retention", "--html", target)
    assert "the page shows recorded softmax attention, but Recurrent computes none" in error
    assert not target.exists()
    for mechanism in ("nsa", "cross_attention", "streaming", "mla"):
        assert run(["explain", TEXT, "--attention", mechanism, "--html", str(target)]) == 0
        assert target.read_text("utf-8").startswith("<!doctype html>")


def test_the_page_speaks_the_language_that_is_asked_for(
    tmp_path: Path, said: Said, refused: Said
) -> None:
    target = tmp_path / "a.html"
    page = ("explain", TEXT, "--html", target, "--lang")
    for lang in ("zh", "en"):
        said(*page, lang)
        assert f'lang="{lang}' in target.read_text("utf-8")
    assert "lang is 'fr'; it must be one of en" in refused(*page, "fr")


@pytest.mark.parametrize("ending", [".png", ".svg"])
def test_a_figure_is_drawn_with_its_recipe(ending: str, tmp_path: Path, said: Said) -> None:
    target = tmp_path / f"a{ending}"
    assert said("explain", TEXT, "--layer", "1", "--head", "2", "--figure", target).startswith(
        f"{target}: "
    )
    content = target.read_bytes()
    assert content.startswith(b"\x89PNG" if ending == ".png" else b"<svg")
    assert [file.name for file in tmp_path.iterdir()] == [target.name]


def test_the_recipe_says_what_was_reduced() -> None:
    found = regard.inspect.explain(
        model(), TEXT, layer=1, head=2, query="creature", key=0
    ).as_dict()
    said = recipe(found)
    parts = "layers.1, head 2", "key 0 a", "rows are queries (8)", "every weight", "scale 0.353553"
    assert all(part in said for part in parts), said
    assert "the largest weight of 3 x 3" in recipe({**found, "pool": 3})
    assert "‹202E›" in recipe({**found, "model": "a\u202eb"})


def test_a_figure_of_hostile_tokens_is_drawn(tmp_path: Path) -> None:
    """Dollar signs are no mathematics, and control characters show by number."""
    found = regard.inspect.explain(model(), TEXT, layer=0, head=0).as_dict()
    names = ["$x_{", "</svg>", "\x00\x1b[31m", "\u202e", "&", "'", '"', "a$b$"][
        : len(found["pieces"])
    ]
    hostile = {**found, "pieces": names, "row_pieces": names, "query_piece": "$\\frac{"}
    target = tmp_path / "a.svg"
    assert draw_explanation(hostile, target) == target.stat().st_size > 1000
    text = target.read_text("utf-8")
    assert text.count("</svg>") == 1
    assert "\x1b" not in text


def test_another_text_beside_it(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], said: Said
) -> None:
    """The page carries both runs and opens at their comparison; without a page there is nothing to
    compare on.
    """
    file = tmp_path / "two.html"
    assert run(["explain", TEXT, "--beside", "to be or not", "--html", str(file)]) == 0
    text = file.read_text("utf-8")
    meta = json.loads(text.split('id="data">')[1].split("</script>")[0])
    meta = meta.get("meta", meta)
    assert meta["start"]["view"] == "compare"
    assert len(meta["places"]) == 2 * len(model().decoder.layers)
    capsys.readouterr()
    assert "add --html FILE" in said("explain", TEXT, "--beside", "to be", code=2)


def test_one_screen_by_default(said: Said) -> None:
    asked = ["--query", "creature", "--layer", "1", "--head", "2"]
    out = said("explain", TEXT, *asked)
    found = json.loads(said("explain", TEXT, *asked, "--json"))
    lines = out.splitlines()
    assert len(lines) <= 26
    assert max(map(len, lines)) <= 80
    assert "Layer 1, head 2 of tiny" in out
    key = found["key"]
    word = found["words"][key]["text"]
    assert f"◆ {word} (token {key}): {found['weights'][key]:.1%}" in out
    order = sorted(range(len(found["weights"])), key=lambda j: -found["weights"][j])
    listed = [line.split()[-5:] for line in lines if line[:6].strip("◆ ").isdigit()]
    assert len(listed) == min(5, sum(not why for why in found["masked"]))
    for step in ("1 inputs", "2 score", "3 mask", "4 softmax", "5 output"):
        assert any(line.startswith(step) for line in lines)
    assert f"{found['weights'][order[0]]:.4f}" in out
    for symbol in ("W, b are learned", "q_i = W_Q x_i", "k_j ← R(p) k_j", "v_j = W_V x_j"):
        assert symbol in " ".join(out.split()), symbol
    assert "docs/walkthrough.md" in out


def test_the_sections_of_the_walkthrough_exist() -> None:
    from regard.view.explanation_summary import SECTIONS

    page = (Path(__file__).parents[2] / "docs" / "walkthrough.md").read_text("utf-8")
    for named in SECTIONS.values():
        for number in named:
            assert f"\n## {number}. " in page


def test_one_screen_in_chinese(
    capsys: pytest.CaptureFixture[str], said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The numbers are those of the English screen, and nothing is left in English."""
    asked = ["explain", TEXT, "--layer", "1", "--head", "2"]
    assert run(asked) == 0
    english = capsys.readouterr().out
    chinese = said(*asked, "--lang", "zh")
    lines = chinese.splitlines()
    assert len(lines) <= 26
    assert max(map(cell_len, lines)) <= 80
    assert numbers_of(english) == numbers_of(chinese)
    words = [x for x in re.findall(r"[a-z]{3,}", english) if x not in TEXT and x != "softmax"]
    left = [x for x in words if re.search(rf"(?<![-/a-z.]){x}(?![/a-z])", chinese)]
    assert {*left} <= {"tiny", "exp", "scale", "token"}, "only names and symbols are not translated"
    for step in ("1 输入", "2 分数", "3 掩码", "4 softmax", "5 输出"):
        assert any(line.startswith(step) for line in lines)
    page = "docs/walkthrough.zh-CN.md"
    assert page in chinese
    assert (Path(__file__).parents[2] / page).is_file()
    monkeypatch.setenv("LC_ALL", "zh_CN.UTF-8")
    assert run(asked) == 0
    assert capsys.readouterr().out == chinese, "the locale chooses it too"


def test_page_and_figure_in_chinese(said: Said, tmp_path: Path) -> None:
    """The line that names the page, and every label of the figure and its tooltips."""
    asked = ["explain", "to be or not", "--layer", "1", "--head", "2", "--lang", "zh"]
    page, figure = tmp_path / "page.html", tmp_path / "head.svg"
    out = said(*asked, "--html", page, "--figure", figure)
    assert re.search(r"page\.html：\d+ [KM]iB，layers\.1，头 2\n", out)
    texts = re.findall(r"<(?:text|title)[^>]*>([^<]+)<", figure.read_text("utf-8"))
    words = {x for text in texts for x in re.findall(r"[a-z]{3,}", text)}
    assert words == {"layers", "tiny", "tiled", "float"}, "names are not translated"
    assert {"键", "查询", "权重"} <= {*texts}


def numbers_of(text: str) -> list[str]:
    return sorted(re.findall(r"\d+(?:\.\d+)?(?:e-?\d+)?", text))


def test_the_heads_are_listed_in_chinese(said: Said) -> None:
    out = said("explain", TEXT, "--list", "--lang", "zh")
    assert "在每个头里的最大权重" in out
    rows = said("explain", TEXT, "--list").splitlines()[2:]
    assert out.splitlines()[2:] == rows
    assert len(rows) == 12


def test_the_full_walk_in_chinese(said: Said) -> None:
    """Every line of the English walk has its line, no sentence stays English, and none is wide."""
    english = said("explain", TEXT, "--full").splitlines()
    chinese = said("explain", TEXT, "--full", "--lang", "zh").splitlines()
    headings = [[x for x in lines if x.startswith("━━")] for lines in (english, chinese)]
    assert len(headings[0]) == len(headings[1]) > 10
    assert max(map(cell_len, chinese)) <= 80
    assert [x for x in chinese if re.search("[a-z]{3,} [a-z]{2,} [a-z]{2,}", x)] == []
