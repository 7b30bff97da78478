"""A decoder under each extension: spectra by loops, the policies of a cache, the report, and what
is refused.
"""

from __future__ import annotations

import json
import math
import re

import pytest
import torch
from torch import Tensor

from regard.compare.context_extension import (
    METHODS,
    POLICIES,
    CachePolicy,
    ExtensionOptions,
    ExtensionResults,
    cache_consistency,
    consistency_by_policy,
    default_lengths,
    extend_all,
    extended_decoder,
    rotary_metadata,
    rotary_of,
    rotary_spectrum,
    with_cache_policy,
)
from regard.compare.context_extension_report import (
    column_heads,
    plots,
    render_page,
    render_table,
    result_rows,
)
from regard.errors import ArgumentError
from regard.language import use_language
from regard.models.model import Model
from regard.view.plotting import unit_in
from tests.models import small

TRAINED, TARGET, START, STEPS = 16, 48, 12, 12


@pytest.fixture(scope="module")
def model() -> Model:
    return small.model(max_position_embeddings=TRAINED)


@pytest.fixture
def ids() -> Tensor:
    return torch.randint(300, (200,))


def test_methods_scale_the_angles_and_nothing_else(model: Model) -> None:
    D, base, s = 10, 10000.0, TARGET / TRAINED
    plain = [base ** (-2 * i / D) for i in range(D // 2)]
    ntk = base * s ** (D / (D - 2))
    wanted = {
        "unscaled": plain,
        "linear": [theta / s for theta in plain],
        "ntk": [ntk ** (-2 * i / D) for i in range(D // 2)],
        "dynamic": [
            (base * (s * s - (s - 1)) ** (D / (D - 2))) ** (-2 * i / D) for i in range(D // 2)
        ],
    }
    for method in METHODS:
        network = extended_decoder(model, method, TARGET)
        found = rotary_spectrum(network, TARGET)
        if method in wanted:
            assert found["theta"] == pytest.approx(wanted[method], rel=1e-12)
        factor = 0.1 * math.log(s) + 1 if method == "yarn" else 1.0
        assert found["rotary_factor"] == pytest.approx(factor, rel=1e-12)
        for m, share in found["decay"]:
            by_hand = factor**2 * sum(math.cos(m * theta) for theta in found["theta"]) / (D // 2)
            assert share == pytest.approx(by_hand, abs=1e-12)
        shared = {p.data_ptr() for p in model.decoder.parameters()}
        assert {p.data_ptr() for p in network.parameters()} == shared, "no weight is another's"
    facts = {"trained": 16, "rotary_dim": 10, "base": base, "critical_dimension": 2}
    assert rotary_metadata(model) == facts
    assert math.ceil(5 * math.log(16 / (2 * math.pi)) / math.log(base)) == 1


def test_policies_keep_what_they_promise(model: Model, ids: Tensor) -> None:
    network = extended_decoder(model, "dynamic", TARGET)
    found = consistency_by_policy(network, ids[None, : START + STEPS], START, TARGET)
    assert tuple(found) == POLICIES
    for exact in ("frozen", "recompute"):
        assert found[exact]["difference"] < 1e-4
        assert found[exact]["agreement"] == 1.0
    for close in ("pre_rope", "re_rotate"):  # right in one layer, and here are two
        assert 1e-3 < found[close]["difference"] < found["stale"]["difference"]
    assert found["pre_rope"]["difference"] == pytest.approx(
        found["re_rotate"]["difference"], rel=1e-2
    )
    assert found["stale"]["difference"] > 0.05, "the negative control"
    reruns = {p: found[p]["reruns"] for p in POLICIES}
    assert reruns == {**dict.fromkeys(POLICIES, 0), "recompute": START + STEPS - TRAINED}
    assert {one["steps"] for one in found.values()} == {STEPS}


def test_within_the_trained_length_no_policy_matters(model: Model, ids: Tensor) -> None:
    network = extended_decoder(model, "dynamic", TARGET)
    for policy in ("stale", "pre_rope", "re_rotate", "recompute"):
        made = with_cache_policy(network, policy, TARGET)
        assert cache_consistency(made, ids[None, :15], 8)["difference"] < 1e-4


def test_one_layer_is_right_where_keys_are_turned_anew(ids: Tensor) -> None:
    network = extended_decoder(
        small.model(num_hidden_layers=1, max_position_embeddings=TRAINED), "dynamic", TARGET
    )
    found = consistency_by_policy(network, ids[None, : START + STEPS], START, TARGET)
    assert found["pre_rope"]["difference"] < 1e-4
    assert found["re_rotate"]["difference"] < 1e-4
    assert found["stale"]["difference"] > 0.05


@pytest.mark.parametrize("method", ["unscaled", "linear", "yarn"])
def test_a_fixed_scaling_suits_any_cache(model: Model, ids: Tensor, method: str) -> None:
    network = extended_decoder(model, method, TARGET)
    found = consistency_by_policy(network, ids[None, : START + STEPS], START, TARGET)
    assert tuple(found) == ("as it is",)
    assert found["as it is"]["difference"] < 1e-4
    with pytest.raises(ArgumentError, match="do not depend on the length, so that it needs no"):
        with_cache_policy(network, "frozen", TARGET)


def test_policies_share_the_parameters(model: Model) -> None:
    network = extended_decoder(model, "dynamic", TARGET)
    names: list[CachePolicy] = ["stale", "frozen", "re_rotate"]
    for policy in names:
        made = with_cache_policy(network, policy, TARGET)
        one, other = ({p.data_ptr() for p in x.parameters()} for x in (made, network))
        assert one == other
    assert rotary_of(network).follows_length, "what it was made from is as before"


@pytest.fixture(scope="module")
def found(model: Model) -> ExtensionResults:
    ids = torch.arange(400) * 37 % 300
    asked = ExtensionOptions(128, ("yarn", "dynamic"), windows=2, trials=2, steps=6)
    names = {"model": "small", "text": "numbers"}
    return extend_all(small.model(max_position_embeddings=64), ids, asked, names)


def test_the_report_has_every_number(found: ExtensionResults) -> None:
    assert found.metadata["lengths"] == [32, 64, 128]
    assert tuple(found.methods) == ("unscaled", "yarn", "dynamic")
    cells = result_rows(found)
    assert [len(row) for row in cells] == [len(column_heads(found))] * 3
    for row, numbers in zip(cells, found.methods.values(), strict=True):
        assert row[1:4] == [f"{one['perplexity']:.4g}" for one in numbers["by_length"]]
    text = render_table(found)
    assert "trained on 64 tokens, base 10000" in text
    assert "frequencies of dynamic depend on the length: cached decoding of 6 tokens across" in text
    assert re.search(r"stale +[\d.e-]+ +\d+% +0", text)
    told = found.as_dict("regard extend")
    assert json.loads(json.dumps(told, allow_nan=False))["methods"].keys() == found.methods.keys()


def test_the_page_draws_five_pictures_and_runs_nothing(found: ExtensionResults) -> None:
    drawn = plots(found)
    assert len(drawn) == 5
    for picture in drawn:
        (axes,) = picture.draw().figure.axes
        lines = [line for line in axes.lines if str(line.get_gid()).startswith("line")]
        assert [line.get_label() for line in lines] == [line.name for line in picture.lines]
        assert len(lines) == 3
    text = render_page(found, "regard extend <small>")
    assert text.count("<svg") == 5
    assert "regard extend &lt;small&gt;" in text
    assert "<script" not in text
    assert "http" not in text.replace("http://www.w3.org/2000/svg", "").replace("http-equiv", "")


def test_text_page_and_plots_in_chinese(found: ExtensionResults) -> None:
    with use_language("zh"):
        text, page, drawn = render_table(found), render_page(found, ""), plots(found)
    assert "训练长度 64 个词元，底数 10000" in text
    of_results = (line for line in text.splitlines() if "torch" not in line)
    assert [line for line in of_results if re.search("[a-z]{3,} [a-z]{2,}", line)] == []
    titles = re.findall(r"<h[12]>([^<]*)<", page) + [picture.title for picture in drawn]
    assert [x for x in titles if not re.search("[\u4e00-\u9fff]", x)] == []
    assert [picture.x for picture in drawn if picture.x.isascii()] == []
    assert unit_in(drawn[4].y) == "share"


def test_lengths() -> None:
    assert default_lengths(100, 150) == (50, 100, 150)
    assert default_lengths(100, 200) == (50, 100, 200)
    assert default_lengths(100, 900) == (50, 100, 200, 400, 800, 900)


def test_refusals(model: Model, ids: Tensor) -> None:
    with pytest.raises(ArgumentError, match="the method is 'alibi'; it must be one of unscaled"):
        extended_decoder(model, "alibi", TARGET)
    with pytest.raises(ArgumentError, match="the context is 8, and max_position_embeddings is 16"):
        extended_decoder(model, "yarn", 8)
    with pytest.raises(ArgumentError, match="no rotary positions"):
        rotary_of(torch.nn.Linear(1, 1))
    for start in (0, 12):
        message = f"start is {start}; it must be 1 to 11, for 12 tokens"
        with pytest.raises(ArgumentError, match=message):
            cache_consistency(model.decoder, ids[None, :12], start)
    with pytest.raises(ArgumentError, match="the text has 40 tokens, but 65 are needed for a"):
        extend_all(model, ids[:40], ExtensionOptions(64), {"model": "small", "text": "short"})
