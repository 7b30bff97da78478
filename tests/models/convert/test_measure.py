"""What is measured, against loops over tokens; windows; dtypes."""

from __future__ import annotations

import math
import platform
import re
import sys

import numpy as np
import pytest
import torch

import regard
from regard.errors import ArgumentError, FileError
from regard.models.convert import compare_models, to_dtype, to_groups, to_latent
from regard.models.convert.attention_maps import Checkpoint
from regard.models.convert.report import ConversionReport, _spread, evaluation_windows, pydoc_topics
from regard.models.model import Model
from tests.models import small
from tests.models.convert import some


def test_every_figure_by_loops() -> None:
    before = some.llama()
    after, _ = to_groups(before, 1)
    ids = some.ids(before, 9)
    found = compare_models(before.network, after.network, ids)
    largest, moved, whole, n = 0.0, 0.0, 0.0, 0
    means: dict[str, list[float]] = {"before": [], "after": [], "change": [], "kl": [], "same": []}
    for row in ids:
        old, new = (m.network(row[None])[0].numpy() for m in (before, after))
        sums = dict.fromkeys(means, 0.0)
        for t in range(len(row) - 1):
            p, q = (np.exp(x[t] - x[t].max()) / np.exp(x[t] - x[t].max()).sum() for x in (old, new))
            sums["before"] -= math.log(p[row[t + 1]])
            sums["after"] -= math.log(q[row[t + 1]])
            largest = max(largest, float(np.abs(new[t] - old[t]).max()))
            sums["kl"] += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            sums["same"] += int(old[t].argmax() == new[t].argmax())
            a, b = old[t] - old[t].mean(), new[t] - new[t].mean()
            moved, whole, n = moved + ((a - b) ** 2).sum(), whole + (a**2).sum(), n + 1
        sums["change"] = sums["after"] - sums["before"]
        for name, x in sums.items():
            means[name].append(x / (len(row) - 1))

    def mean(name: str) -> float:
        return sum(means[name]) / len(ids)

    def error(name: str) -> float:
        squares = sum((x - mean(name)) ** 2 for x in means[name])
        return math.sqrt(squares / (len(ids) - 1) / len(ids))

    assert (found.tokens, found.rows, found.length) == (16, 2, 9) == (n, 2, 9)
    assert (found.loss_before, found.loss_after) == pytest.approx((mean("before"), mean("after")))
    assert found.perplexity_after == pytest.approx(math.exp(mean("after")))
    assert (found.loss_change, found.loss_change_error) == pytest.approx(
        (mean("change"), error("change"))
    )
    assert (found.divergence, found.divergence_error) == pytest.approx((mean("kl"), error("kl")))
    assert (found.agreement, found.agreement_error) == pytest.approx((mean("same"), error("same")))
    assert found.largest == pytest.approx(largest)
    assert found.relative == pytest.approx((moved / whole) ** 0.5)
    one = compare_models(before.network, after.network, ids[:1])
    assert math.isnan(one.divergence_error)
    assert math.isnan(one.loss_change_error)


def test_a_model_beside_itself() -> None:
    held = some.llama()
    found = compare_models(held.network, held.network, some.ids(held), text="")
    assert (found.largest, found.relative, found.divergence, found.agreement) == (0, 0, 0, 1)
    assert (found.divergence_error, found.agreement_error) == (0, 0)
    assert math.isnan(found.perplexity_before)
    assert math.isnan(found.loss_change)
    assert not found.short, "drawn ids are no text"


def test_windows_of_a_given_text_are_its_beginning() -> None:
    tiny = regard.load("tiny")
    text = pydoc_topics()[:3000]
    whole = len(tiny.encode(text)[0])
    rows, told = evaluation_windows(tiny, text, 100, 10_000)
    assert told == "the given text"
    assert rows.shape[0] == -(-whole // 100)
    assert whole - len(rows) < rows.numel() <= whole
    assert rows.flatten().tolist() == tiny.encode(text)[0, : rows.numel()].tolist()
    assert evaluation_windows(tiny, text, 512, 50).ids.shape == (1, 50)


@pytest.mark.full
def test_the_built_in_text_is_long_and_read_all_over() -> None:
    tiny = regard.load("tiny")
    ids = tiny.encode(pydoc_topics())[0].tolist()
    rows, told = evaluation_windows(tiny, None, 256, 4096)
    assert rows.shape == (16, 256)
    assert told == f"the topics of pydoc, Python {platform.python_version()}"
    starts = [i * len(ids) // 16 for i in range(16)]
    assert rows.tolist() == [ids[a : a + 256] for a in starts]
    assert evaluation_windows(tiny, None, 256, 300).ids.shape == (1, 256)
    assert _spread(torch.arange(1000), 256, 10**6).tolist() == [
        list(range(a, a + 256)) for a in (0, 333, 666)
    ], "as many as there are, none over another"


def test_a_python_without_topics(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pydoc_data.topics", None)
    with pytest.raises(FileError, match=r"this Python has no pydoc_data, .*--text FILE"):
        pydoc_topics()


@pytest.mark.full
def test_the_loss_of_a_latent_is_seen() -> None:
    """MLA of half the cache looked free on 891 characters (3.27 to 3.29 nats); on several thousand
    tokens it costs half a nat.
    """
    tiny = regard.load("tiny")
    after, _ = to_latent(Checkpoint(tiny.decoder, tiny.config), 96)
    ids, told = evaluation_windows(tiny, None, 256, 2560)
    found = compare_models(tiny.decoder, after.network, ids, text=told)
    assert found.loss_change > 0.3
    assert found.loss_change > 5 * found.loss_change_error
    assert found.divergence > 5 * found.divergence_error
    assert not found.short


def test_a_model_without_tokenizer_meets_drawn_ids() -> None:
    made = small.model()
    bare = Model(made.decoder, None, made.config)
    rows, text = evaluation_windows(bare, None, 16, 64)
    assert text == ""
    assert rows.shape == (4, 16)
    assert torch.equal(rows, evaluation_windows(bare, None, 16, 64).ids)
    with pytest.raises(regard.FileError, match="this model has no tokenizer"):
        evaluation_windows(bare, "a text", 16, 64)


@pytest.mark.parametrize(
    "text, length, tokens, message",
    [
        (None, 1, 64, "length is 1; it must be at least 2"),
        (None, 16, 1, "tokens is 1; it must be at least 2"),
        ("a", 16, 64, "the text has 1 token; give at least 2"),
    ],
)
def test_too_little(text: str | None, length: int, tokens: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        evaluation_windows(regard.load("tiny"), text, length, tokens)


def test_dtypes() -> None:
    before = some.llama()
    for parameter in before.network.parameters():
        parameter.data /= 3  # numbers that float32 has not
    after, step = to_dtype(before, "float32")
    for name, x in before.weights().items():
        assert torch.equal(after.weights()[name], x.float())
    # the relative error of a rounding to 24 bits is 2^-24 at most, and half of it or so as a mean
    assert all(2**-27 < error < 2**-24 for errors in step.layers for error in errors)
    with pytest.raises(ArgumentError, match="the weights are float32 already"):
        to_dtype(after, "float32")
    with pytest.raises(ArgumentError, match="dtype is 'int8'; it is one of float32, float16"):
        to_dtype(after, "int8")
    after.network.norm.weight.data[0] = 1e5
    with pytest.raises(ArgumentError, match=r"norm.weight has the value 1e\+05, which is too"):
        to_dtype(after, "float16")


def test_json_has_no_nan() -> None:
    held = some.llama()
    sizes = regard.models.convert.folder.summarize(held)
    found = compare_models(held.network, held.network, some.ids(held), text="")
    figures = ConversionReport("a", "b", (), sizes, sizes, found, None).figures()
    assert figures["measured"]["loss_before"] is figures["measured"]["loss_change"] is None
    assert figures["measured"]["divergence_error"] == 0
    assert figures["before"]["cached_values"] == 2 * 40
