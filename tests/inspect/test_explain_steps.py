"""Who computes what an explanation prints, step by step, gets the numbers that it prints."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import numpy as np
import pytest
import torch

from regard.inspect import explain, random_model
from regard.inspect.explain.head_choice import choose_head
from regard.inspect.model_run import prepare_run
from regard.language import LANGUAGES
from regard.models.text_model import TextModel
from regard.view.explanation_summary import summary
from tests.models.small import named_model

TEXT = "a fluffy blue creature roamed the verdant forest"
MECHANISMS: dict[str, dict[str, Any]] = {
    "mha": {},
    "gpt": {},
    "gqa": {},
    "qk_norm": {},
    "qk_norm_flat": {},
    "softcap": {"cap": 2.0},
    "learned_sink": {},
    "alibi": {},
    "t5": {},
    "ngpt": {},
    "value_norm": {},
    "mla": {},
}
ROUNDING = 2e-5


def trained(name: str) -> Any:
    """A real model: one by name."""
    return named_model(name, TextModel)


def rotate(x: np.ndarray, data: dict[str, Any], angle: list[float]) -> np.ndarray:
    """(a, b) -> (a cos - b sin, b cos + a sin) for the dims of each pair."""
    result, pairs = x.copy(), np.array(data["pairs"])
    for pair, phi in enumerate(angle):
        first, second = np.flatnonzero(pairs == pair)
        a, b = x[first], x[second]
        result[first] = a * math.cos(phi) - b * math.sin(phi)
        result[second] = b * math.cos(phi) + a * math.sin(phi)
    return result


@torch.no_grad()
def follow(data: dict[str, Any], attention: Any, letter: str, head: int) -> np.ndarray:
    """Compute q, k or v from x by the printed equations alone, with the model's own weights."""
    index = "i" if letter == "q" else "j"
    steps = data["values" if letter == "v" else letter]
    x = np.array(data["normed" if letter == "q" else "normed_key"])
    angle = data["angle"] if letter == "q" else data["angles"][data["key"]]
    project = attention.project
    heads = getattr(project, letter, project)
    functions = [*getattr(heads, "steps", []), getattr(project, "key_transform", None)]
    width = len(steps[0]["values"] if letter == "q" else steps[0]["values"][0])
    if hasattr(project, "order"):  # one matrix with the rows of q, k and v
        head = project._head_rows["qkv".index(letter)][head]
    value = np.zeros(0)
    for step in steps:
        right = re.sub(rf"^{letter}_{index} (=|←) ", "", step["equation"])
        if "W_" in right:
            bias = heads.linear(torch.zeros(1, len(x)))[0]
            value = heads.linear(torch.from_numpy(x).float()[None])[0] - bias
            if f"+ b_{letter.upper()}" in right:
                value = value + bias
            if "(" in right:  # a function of all heads together
                value = heads.flat(value)
            value = value.double().numpy()[head * width : (head + 1) * width]
        elif right == f"R(p) {letter}_{index}":
            value = rotate(value, data, angle)
        else:  # a named function of the model, such as a norm
            name = right.split()[0]
            (function,) = [f for f in functions if type(f).__name__.lower() == name]
            every = torch.from_numpy(value).float().expand(1, heads.heads, 1, -1)
            value = function(every, None)[0, head, 0].double().numpy()
    return value


NUMBER = r"-?\d+\.?\d*(?:e-?\d+)?"


def assert_a_reader_gets_the_weight(data: dict[str, Any]) -> None:
    """Compute s from q, k and the printed links, and p from the printed s and lse."""
    q, k = np.array(data["q"][-1]["values"]), np.array(data["k"][-1]["values"][data["key"]])
    for lang in LANGUAGES:
        text = " ".join(" ".join(map(str, summary(data, lang))).split())
        dot = float(re.search(rf"q_i · k_j = ({NUMBER})", text)[1])  # type: ignore[index]
        assert dot == pytest.approx(float(q @ k), abs=2e-5 * max(1, abs(dot)))
        s = dot
        links = text[text.index("q_i · k_j = ") : text.index(" = s [")].split(" = ")
        links = re.split(r"[,，] ?", " = ".join(links[1:]))[1:]
        for link in links:
            formula, _, printed = link.rpartition(" = ")
            if formula.startswith("×"):
                s *= float(formula.split()[-1])
            elif formula.startswith("+"):
                s += float(formula.split()[-1])
            else:
                cap = float(re.fullmatch(rf"s_ij ← ({NUMBER}) tanh\(s_ij / \1\)", formula)[1])  # type: ignore[index]
                s = cap * math.tanh(s / cap)
            assert s == pytest.approx(float(printed), abs=2e-5)
            s = float(printed)
        found = re.search(rf"exp\(({NUMBER}) - ({NUMBER})\) = (\S+?)[;；]", text)
        assert found is not None
        assert float(found[1]) == s
        shown = found[3]
        p = math.exp(float(found[1]) - float(found[2]))
        assert (p < 5e-5) if shown == "<.0001" else abs(p - float(shown)) <= 1.01e-4
        assert p == pytest.approx(data["weights"][data["key"]], abs=1e-4)


@pytest.mark.full(keep=4)
@pytest.mark.parametrize("name", MECHANISMS)
def test_a_mechanism_is_computed_by_what_is_printed(name: str) -> None:
    prepared = random_model(name, TEXT, options=MECHANISMS[name])
    f = explain(prepared, layer=1, head=3, query=6, key=2)
    data = json.loads(json.dumps(f.as_dict(), allow_nan=False))
    attention = prepared.site(1).attention
    if name != "mla":  # its latents have equations of their own
        for letter, head in (("q", 3), ("k", f.group), ("v", f.group)):
            last = data["values" if letter == "v" else letter][-1]["values"]
            wanted = np.array(last if letter == "q" else last[2])
            found = follow(data, attention, letter, head)
            assert np.abs(found - wanted).max() < ROUNDING * (1 + np.abs(wanted).max()), letter
    assert_a_reader_gets_the_weight(data)


@pytest.mark.parametrize("name", ["tiny", "minilm", "smollm2"])
def test_a_real_model_is_computed_by_what_is_printed(name: str) -> None:
    model = trained(name)
    prepared = prepare_run(model, TEXT)
    choice = choose_head(prepared, 6)
    f = explain(prepared, layer=choice.layer, head=choice.head, query=6, key=choice.key)
    data = json.loads(json.dumps(f.as_dict(), allow_nan=False))
    attention = prepared.site(choice.layer).attention
    for letter, head in (("q", f.head), ("k", f.group), ("v", f.group)):
        last = data["values" if letter == "v" else letter][-1]["values"]
        wanted = np.array(last if letter == "q" else last[f.key])
        found = follow(data, attention, letter, head)
        assert np.abs(found - wanted).max() < 1e-4 * (1 + np.abs(wanted).max()), letter
    assert_a_reader_gets_the_weight(data)


@pytest.mark.parametrize("name, missing", [("gpt", " + b_Q"), ("gqa", "q_i ← R(p) q_i")])
def test_the_comparison_would_find_a_step_that_is_left_out(name: str, missing: str) -> None:
    prepared = random_model(name, TEXT)
    data = explain(prepared, layer=1, head=3, query=6, key=2).as_dict()
    wanted = data["q"][-1]["values"]
    data["q"] = [{**x, "equation": x["equation"].replace(" + b_Q", "")} for x in data["q"]
                 if x["equation"] != missing]  # fmt: skip
    module = prepared.site(1).attention
    if name == "gpt":
        torch.nn.init.ones_(module.project.linear.bias)
        wanted = explain(prepared, layer=1, head=3, query=6, key=2).q[-1].values
    assert np.abs(follow(data, module, "q", 3) - wanted).max() > 0.01
