"""Beyond the trained length: rotary positions as they are and extended five ways, and ALiBi; perplexity and a passkey.

tiny, a trained model of text, for perplexity; and two toys, rotary and ALiBi, that learn a passkey. The toy's
base is b = (T / 2 pi)^(d / d_extra) with d_extra / d = 92 / 128: as many dims have turned fully within the trained length T as
in Llama 2. With b = 10000 a toy's dims had hardly turned at all, and every effect of an extension would be confounded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, get_args

import torch
from torch import nn

import regard
from regard.compare.claims.base import Check, Claim, steps
from regard.compare.claims.training import decoder, learn, right
from regard.compare.experiment import Numbers
from regard.compare.reach import losses
from regard.models.convert.checkpoint import Checkpoint
from regard.models.convert.context import Extension, to_context
from regard.models.families import llama
from regard.positions import critical_dimension
from regard.train.corpus import read, split
from regard.train.losses import evaluate
from regard.train.seq2seq import AnswerLoss
from regard.train.tasks import TASKS
from regard.train.tasks.base import Example, Task
from regard.train.tasks.made import Padded, pad
from regard.view.curves import Line, Picture

T, TIMES = 56, (1, 2, 4)
DIM, HEADS, LAYERS, BATCH = 64, 4, 2, 24
STEPS, TUNED = 420, 40
BASE = (T / math.tau) ** (128 / 92)
TASK = replace(TASKS["passkey"], lengths=(27, T, max(TIMES) * T))
METHODS: tuple[Extension, ...] = tuple(get_args(Extension))


class TalkLoss:
    """The loss of every next token, of talk and of answers; the answers count as much as all of the talk."""

    def __call__(self, model: nn.Module, rows: Padded) -> torch.Tensor:
        """The mean over tokens, plus the mean over answers."""
        logits = model(rows.source)
        talk = nn.functional.cross_entropy(logits[:, :-1].transpose(1, 2), rows.source[:, 1:], ignore_index=0)  # fmt: skip
        answers = nn.functional.cross_entropy(logits.transpose(1, 2), rows.target)
        return talk + answers


def at_length(length: int) -> Task:
    """The passkey in exactly so many tokens, or as near as whole sentences come, and never more.

    >>> {example.length <= 112 for example in at_length(112).examples("longer", 4)}
    {True}
    """

    def draw(random: Random, _: int) -> Example:
        while (example := TASK.draw(random, length)).length > length:
            continue
        return example

    shortest = 1 if length > T else TASK.lengths[0]
    split = (length - 8, length) if length > T else (T, T + 1)
    return replace(TASK, draw=draw, lengths=(shortest, *split))


def _trained(seed: int, count: int) -> tuple[Any, nn.Module, nn.Module]:
    """A Llama with the toy base, and a decoder with ALiBi."""
    V = len(TASK.vocabulary)
    config = llama.Config(
        vocab_size=V, hidden_size=DIM, intermediate_size=192, num_hidden_layers=LAYERS, num_attention_heads=HEADS,
        num_key_value_heads=HEADS, head_dim=DIM // HEADS, rope_theta=BASE, max_position_embeddings=T,
    )  # fmt: skip
    torch.manual_seed(seed)
    rope = llama.build(config)
    _, alibi = decoder(V, dim=DIM, layers=LAYERS, heads=HEADS, position="alibi", seed=seed)
    for model in (rope, alibi):
        learn(model, TASK, count, batch=BATCH, seed=seed, loss=TalkLoss())
    return config, rope, alibi


def _read(model: nn.Module, length: int, asked: int) -> dict[str, float]:
    """Nats per token of talk, and the share of key digits that are right, in rows of one length."""
    task, split = at_length(length), "longer" if length > T else "validation"
    rows = pad(task, task.examples(split, asked, "read"))
    model.eval()
    talk = TalkLoss()
    with torch.no_grad():
        whole = evaluate(model, rows, loss=talk)
        answers = evaluate(model, rows, loss=AnswerLoss())
    return {"nats": whole - answers, "passkey": right(model, task, split, asked, "read")}


def _measure(budget: float, seed: int) -> Numbers:
    asked, count = steps(budget, 40, least=4), steps(budget, STEPS)
    config, rope, alibi = _trained(seed, count)
    found: dict[str, dict[str, Any]] = {"unscaled": {}, "alibi": {}, **{m: {} for m in METHODS}}
    for times in TIMES:
        length = times * T
        found["unscaled"][str(times)] = _read(rope, length, asked)
        found["alibi"][str(times)] = _read(alibi, length, asked)
        for method in METHODS if times > 1 else ():
            held = Checkpoint(rope, config)  # type: ignore[arg-type]
            found[method][str(times)] = _read(to_context(held, length, method)[0].network, length, asked)  # fmt: skip
    real = _on_text(steps(budget, 8), METHODS)
    for method in ("linear", "yarn"):
        found[f"{method}, tuned"] = {"2": _tuned(rope, config, method, steps(budget, TUNED), asked, seed)}  # fmt: skip
    return {
        "trained": T, "base": BASE, "steps": count, "asked": asked,
        "critical_dimension": critical_dimension(DIM // HEADS, BASE, T), "head_dim": DIM // HEADS, "by_method": found, "tiny": real,
    }  # fmt: skip


def _on_text(windows: int, methods: Sequence[Extension]) -> dict[str, Any]:
    """Nats per token of the model that comes with regard, on text that it was not trained on."""
    tiny = regard.load("tiny")
    held = split(read())[1]
    ids = tiny.encode("\n\n".join(document.text for document in held)[:40_000])[0]
    trained = tiny.config.max_position_embeddings
    lengths = [trained, max(TIMES) * trained]
    made = {"unscaled": tiny.decoder}
    for method in methods:
        made[method] = to_context(Checkpoint(tiny.decoder, tiny.config), lengths[-1], method)[0].network  # fmt: skip
    found = {name: losses(model, ids, lengths, counted=64, windows=windows).tolist() for name, model in made.items()}  # fmt: skip
    return {"trained": trained, "lengths": lengths, "windows": windows, "nats": found}


def _tuned(
    rope: nn.Module, config: Any, method: Extension, count: int, asked: int, seed: int
) -> dict[str, float]:
    """An extension to twice the length, and a few steps on rows that long."""
    held = Checkpoint(copy.deepcopy(rope), config)  # type: ignore[arg-type]
    model = to_context(held, 2 * T, method)[0].network.requires_grad_(True)
    longer = replace(TASK, lengths=(T, 2 * T, 2 * T + 1))
    learn(model, longer, count, lr=1e-3, batch=BATCH, seed=seed, loss=TalkLoss())
    return _read(model, 2 * T, asked)


def _checks(numbers: Mapping[str, Any]) -> list[Check]:
    by, far = numbers["by_method"], str(max(TIMES))
    text = numbers["tiny"]["nats"]

    def nats(name: str) -> float:
        return float(by[name][far]["nats"])

    bare = text["unscaled"][1]
    found = [Check("a trained model of text breaks at four times its length: nats more than as trained", bare - text["unscaled"][0], low=0.5)]  # fmt: skip
    found += [
        Check(f"{name}: nats less there than without an extension, untuned", bare - text[name][1], low=0.1, essential=name != "linear")
        for name in METHODS
    ]  # fmt: skip
    for name in ("ntk", "yarn"):
        found.append(Check(f"{name} is nearly as good there as within the trained length: nats more", text[name][1] - text["unscaled"][0], high=0.3, essential=False))  # fmt: skip
        gain = nats("unscaled") - nats(name)
        found.append(Check(f"{name} helps the toy, whose base is small: nats less", gain, low=0.0, essential=False))  # fmt: skip
        gain = by[name]["2"]["passkey"] - by["unscaled"]["2"]["passkey"]
        found.append(Check(f"{name} lets it find the key at twice the length more often: share more", gain, low=0.0, essential=False))  # fmt: skip
    alibi = by["alibi"]
    return [
        *found,
        Check("ALiBi is as good at four times the length, on the toy: nats more than as trained", nats("alibi") - alibi["1"]["nats"], high=0.05),
        Check("... and finds the key there as often: share less than as trained", alibi["1"]["passkey"] - alibi[far]["passkey"], high=0.1, essential=False),
        Check("a few steps of tuning help interpolation at twice the length: nats less", by["linear"]["2"]["nats"] - by["linear, tuned"]["2"]["nats"], low=0.0, essential=False),
    ]  # fmt: skip


def _picture(numbers: Mapping[str, Any]) -> Picture:
    told = numbers["tiny"]
    lines = tuple(
        Line(name, tuple((float(n), math.exp(min(x, 20))) for n, x in zip(told["lengths"], nats, strict=True)))
        for name, nats in told["nats"].items()
    )  # fmt: skip
    return Picture("Perplexity of tiny, as trained and at four times its length, no weight changed", "tokens", "perplexity", lines, "xy", told["trained"])  # fmt: skip


CLAIM = Claim(
    id="longer",
    seeds=("S5.18", "S5.22", "S5.23", "S5.24", "S5.25", "S5.26", "E5.5"),
    says="Position interpolation, NTK, dynamic NTK, YaRN and ALiBi let a model read beyond its trained length.",
    predicts="Rotary as it is breaks; NTK and YaRN hold without tuning, interpolation wants a little; ALiBi stays flat, and sees less far than it reads.",
    scale="tiny (3.5 million parameters, 256 tokens) for perplexity; two models of 0.1 million, trained on 56 tokens of made talk with a key in it, for the key and for ALiBi: the order of methods shows, the figures do not carry over.",
    measure=_measure,
    checks=_checks,
    picture=_picture,
    lesson="Perplexity is not retrieval: look at both. The base is chosen from the critical dimension, or nothing is shown.",
)
"""S5.18."""
