"""What is measured, against loops over tokens; windows; dtypes."""

from __future__ import annotations

import math
import re

import numpy as np
import pytest
import torch

import regard
from regard.errors import ArgumentError
from regard.models.convert import measure, to_dtype, to_groups
from regard.models.convert.measure import TEXT, windows
from regard.models.convert.report import Report
from regard.models.model import Model
from tests.models import small
from tests.models.convert import some


def test_every_figure_by_loops() -> None:
    before = some.llama()
    after, _ = to_groups(before, 1)
    ids = some.ids(before, 9)
    found = measure(before.network, after.network, ids)
    loss, largest, kl, same, moved, whole, n = [0.0, 0.0], 0.0, 0.0, 0, 0.0, 0.0, 0
    for row in ids:
        old, new = (m.network(row[None])[0].numpy() for m in (before, after))
        for t in range(len(row) - 1):
            p, q = (np.exp(x[t] - x[t].max()) / np.exp(x[t] - x[t].max()).sum() for x in (old, new))
            loss[0] -= math.log(p[row[t + 1]])
            loss[1] -= math.log(q[row[t + 1]])
            largest = max(largest, float(np.abs(new[t] - old[t]).max()))
            kl += sum(a * math.log(a / b) for a, b in zip(p, q, strict=True))
            same += int(old[t].argmax() == new[t].argmax())
            a, b = old[t] - old[t].mean(), new[t] - new[t].mean()
            moved, whole, n = moved + ((a - b) ** 2).sum(), whole + (a**2).sum(), n + 1
    assert (found.tokens, found.rows, found.length) == (16, 2, 9) == (n, 2, 9)
    assert (found.loss_before, found.loss_after) == pytest.approx((loss[0] / n, loss[1] / n))
    assert found.perplexity_after == pytest.approx(math.exp(loss[1] / n))
    assert found.largest == pytest.approx(largest)
    assert found.divergence == pytest.approx(kl / n)
    assert found.agreement == same / n
    assert found.relative == pytest.approx((moved / whole) ** 0.5)


def test_a_model_beside_itself() -> None:
    held = some.llama()
    found = measure(held.network, held.network, some.ids(held), is_text=False)
    assert (found.largest, found.relative, found.divergence, found.agreement) == (0, 0, 0, 1)
    assert math.isnan(found.perplexity_before)


def test_windows_hold_nearly_all_of_a_text() -> None:
    tiny = regard.load("tiny")
    whole = len(tiny.encode(TEXT)[0])
    rows, is_text = windows(tiny, None, 100, 10_000)
    assert is_text
    assert rows.shape[0] == -(-whole // 100)
    assert whole - len(rows) < rows.numel() <= whole
    assert rows.flatten().tolist() == tiny.encode(TEXT)[0, : rows.numel()].tolist()
    assert windows(tiny, TEXT, 512, 50)[0].shape == (1, 50)


def test_a_model_without_tokenizer_meets_drawn_ids() -> None:
    made = small.model()
    bare = Model(made.decoder, None, made.config)
    rows, is_text = windows(bare, None, 16, 64)
    assert not is_text
    assert rows.shape == (4, 16)
    assert torch.equal(rows, windows(bare, None, 16, 64)[0])
    with pytest.raises(regard.FileError, match="this model has no tokenizer"):
        windows(bare, "a text", 16, 64)


@pytest.mark.parametrize(
    "text, length, tokens, message",
    [
        (None, 1, 64, "length is 1; it must be at least 2"),
        (None, 16, 1, "tokens is 1; it must be at least 2"),
        ("a", 16, 64, "the text has 1 tokens; give at least 2"),
    ],
)
def test_too_little(text: str | None, length: int, tokens: int, message: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(message)):
        windows(regard.load("tiny"), text, length, tokens)


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
    with pytest.raises(
        ArgumentError, match=r"norm.weight holds 1e\+05, which is too large for float16"
    ):
        to_dtype(after, "float16")


def test_json_has_no_nan() -> None:
    held = some.llama()
    sizes = regard.models.convert.run.sizes(held)
    found = measure(held.network, held.network, some.ids(held), is_text=False)
    figures = Report("a", "b", (), sizes, sizes, found, None).figures()
    assert figures["measured"]["loss_before"] is None
    assert figures["before"]["kept"] == 2 * 40
