"""`regard describe`: the list, one mechanism, JSON, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from regard.configs.catalogue import GROUPS
from regard.configs.suggested_sizes import ALIASES
from regard.nn.variants import VARIANTS
from regard.nn.variants.registry import in_teaching_order
from tests.cli.command import Said


@pytest.fixture(autouse=True)
def unwrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lines of a pipe are not wrapped, unless COLUMNS is set."""
    monkeypatch.delenv("COLUMNS", raising=False)


def test_the_list_has_every_mechanism_with_its_sentence(said: Said) -> None:
    out = said("describe")
    for name, entry in VARIANTS.items():
        assert any(row.split()[:1] == [name] and entry.summary in row for row in out.splitlines())
    assert set(json.loads(said("describe", "--json"))) == set(VARIANTS)


@pytest.mark.full(keep=10)
@pytest.mark.parametrize("name", VARIANTS)
def test_one_mechanism(name: str, said: Said) -> None:
    out = said("describe", name)
    assert VARIANTS[name].equation in out
    assert VARIANTS[name].source in out


def test_figures_at_real_sizes(said: Said) -> None:
    """Llama-3-8B: 131,072 bytes of cache per token in bf16 over 32 layers."""
    sizes = ("--dim", "4096", "--heads", "32", "--set", "groups=8", "--context", "8192", "--json")
    told = json.loads(said("describe", "gqa", *sizes))
    assert told["kv_per_token"]["value"] * 32 * 2 == 131_072
    assert told["cached_values"] == 2048 * 8192
    assert told["parameters"]["value"] == 2 * 4096 * 4096 + 2 * 4096 * 1024
    assert told["options"] == {"dim": 4096, "heads": 32, "groups": 8}
    window = json.loads(said("describe", "sliding_window", *sizes, "--set", "window=512"))
    assert window["kv_tokens"] == {"value": 512, "formula": "min(S, 512)"}


def test_names_in_any_case_and_sizes_of_a_published_model(said: Said) -> None:
    assert said("describe", "MLA") == said("describe", "mla")
    assert said("describe", "Gated-Delta-Net") == said("describe", "gated_delta_net")
    told = json.loads(said("describe", "mla", "--json"))
    assert told["options"]["kv_rank"] == 512
    assert told["kv_per_token"]["value"] == 576


def test_options_symbols_and_advice_are_printed(
    said: Said, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = said("describe", "sliding_window")
    entry = VARIANTS["sliding_window"]
    for text in (entry.users, entry.choose, entry.avoid, "the window: how many", "(here 4096)"):
        assert text in out
    monkeypatch.setenv("COLUMNS", "60")
    narrow = said("describe", "sliding_window")
    # figures of a layer are formulas in a table, which is not wrapped
    assert max(map(len, narrow.partition("One layer")[0].splitlines())) <= 60


def test_figures_of_heads_and_masks(said: Said, refused: Said, tmp_path: Path) -> None:
    heads, mask = tmp_path / "heads.svg", tmp_path / "mask.svg"
    said("describe", "gqa", "--figure", heads)
    said("describe", "bigbird", "--figure", mask)
    assert all(f"{x} a token" in heads.read_text() for x in ("16.0 KiB", "4.00 KiB", "512 B"))
    assert "bigbird" in mask.read_text()
    message = refused("describe", "retention", "--figure", tmp_path / "no.svg")
    assert "there is no figure of retention" in message
    assert not (tmp_path / "no.svg").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("gqaa",), "did you mean 'gqa'?"),
        (("gqa", "--set", "group=2"), "gqa has no option group; did you mean 'groups'? Its"),
        (("gqa", "--set", "groups"), "give name=value"),
        (("gqa", "--set", "groups=3"), "not divisible by 3 key/value heads"),
        (("gqa", "--dim", "0"), "--dim"),
    ],
)
def test_wrong_usage(arguments: tuple[str, ...], message: str, refused: Said) -> None:
    assert message in refused("describe", *arguments)


@pytest.mark.parametrize(
    ("short", "name"),
    [
        ("linear", "linear_attention"),
        ("Gated-Delta", "gated_delta_net"),
        ("WINDOW", "sliding_window"),
    ],
)
def test_short_names_are_those_of_cost(short: str, name: str, said: Said) -> None:
    assert said("describe", short).startswith(f"{name}: ")
    assert set(ALIASES.values()) <= set(VARIANTS)


def test_groups_are_in_a_teaching_order(said: Said) -> None:
    headings = [x for x in said("describe").splitlines() if x and not x.startswith(" ")]
    assert headings == [f"{group.family} attention: {group.title}" for group in GROUPS]
    families = dict.fromkeys(group.family for group in GROUPS)
    assert list(families) == [
        *("additive", "softmax", "cross", "latent", "selected", "linear", "memory")
    ]


def test_every_mechanism_has_one_group() -> None:
    grouped = {name: x for group in GROUPS for name, x in group.summaries().items()}
    assert sorted(grouped) == sorted(VARIANTS)
    taught = [(entry.name, entry.summary) for entry in in_teaching_order()]
    assert taught == list(grouped.items()), "the text of the files says what the registry says"
