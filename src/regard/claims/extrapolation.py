"""Beyond the trained length: rotary positions as they are and extended five ways, and ALiBi;
perplexity and a passkey.

tiny, a trained model of text, for perplexity; and two toys, rotary and ALiBi, that learn a passkey.
The toy's base is b = (T / 2 pi)^(d / d_extra) with d_extra / d = 92 / 128: as many dims have turned
fully within the trained length T as in Llama 2. With b = 10000 a toy's dims had hardly turned at
all, and every effect of an extension would be confounded.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from random import Random
from typing import Any, get_args

import torch
from torch import nn

import regard
from regard.claims.claim import OUTLINE, Claim, Criterion, NoteSection, num_steps
from regard.claims.small_training import answer_accuracy, small_decoder, train_on_task
from regard.compare.experiment import Numbers
from regard.compare.reach import losses
from regard.models.convert.context import Extension, to_context
from regard.models.convert.layer import Checkpoint
from regard.models.families import llama
from regard.positions import critical_dimension
from regard.train.corpus import load_documents, split_documents
from regard.train.losses import AnswerLoss, evaluate
from regard.train.tasks import TASKS
from regard.train.tasks.task import Example, PaddedBatch, Task, pad
from regard.view.charts import Line, Picture

T, TIMES = 56, (1, 2, 4)
DIM, HEADS, LAYERS, BATCH = 64, 4, 2, 24
STEPS, TUNED = 420, 40
BASE = (T / math.tau) ** (128 / 92)
TASK = replace(TASKS["passkey"], lengths=(27, T, max(TIMES) * T))
CLOSE = 0.3
"""Nats per token within which a model reads as well: a perplexity of at most 1.35 times."""
METHODS: tuple[Extension, ...] = tuple(get_args(Extension))


class TextAndAnswerLoss:
    """The loss of every next token, of talk and of answers; the answers count as much as all of the
    talk.
    """

    def __call__(self, model: nn.Module, rows: PaddedBatch) -> torch.Tensor:
        """The mean over tokens, plus the mean over answers."""
        logits = model(rows.source)
        talk = nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), rows.source[:, 1:], ignore_index=0
        )
        answers = nn.functional.cross_entropy(logits.transpose(1, 2), rows.target)
        return talk + answers


def passkey_of_length(length: int) -> Task:
    """The passkey in exactly so many tokens, or as near as whole sentences come, and never more.

    >>> {example.length <= 112 for example in passkey_of_length(112).examples("longer", 4)}
    {True}
    """

    def draw(random: Random, _: int) -> Example:
        while (example := TASK.draw(random, length)).length > length:
            continue
        return example

    shortest = 1 if length > T else TASK.lengths[0]
    split_documents = (length - 8, length) if length > T else (T, T + 1)
    return replace(TASK, draw=draw, lengths=(shortest, *split_documents))


def _trained(seed: int, count: int) -> tuple[Any, nn.Module, nn.Module]:
    """A Llama with the toy base, and a decoder with ALiBi."""
    V = len(TASK.vocabulary)
    config = llama.Config(
        vocab_size=V,
        hidden_size=DIM,
        intermediate_size=192,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS,
        head_dim=DIM // HEADS,
        rope_theta=BASE,
        max_position_embeddings=T,
    )
    torch.manual_seed(seed)
    rope = llama.build(config)
    _, alibi = small_decoder(V, dim=DIM, layers=LAYERS, heads=HEADS, position="alibi", seed=seed)
    for model in (rope, alibi):
        train_on_task(model, TASK, count, batch=BATCH, seed=seed, loss=TextAndAnswerLoss())
    return config, rope, alibi


def _read(model: nn.Module, length: int, asked: int) -> dict[str, float]:
    """Nats per token of talk, and the share of key digits that are right, in rows of one length."""
    task, split_documents = passkey_of_length(length), "longer" if length > T else "validation"
    rows = pad(task, task.examples(split_documents, asked, "read"))
    model.eval()
    talk = TextAndAnswerLoss()
    with torch.no_grad():
        whole = evaluate(model, rows, loss=talk)
        answers = evaluate(model, rows, loss=AnswerLoss())
    return {
        "nats": whole - answers,
        "passkey": answer_accuracy(model, task, split_documents, asked, "read"),
    }


def _measure(budget: float, seed: int) -> Numbers:
    asked, count = num_steps(budget, 40, least=4), num_steps(budget, STEPS)
    config, rope, alibi = _trained(seed, count)
    found: dict[str, dict[str, Any]] = {"unscaled": {}, "alibi": {}, **{m: {} for m in METHODS}}
    for times in TIMES:
        length = times * T
        found["unscaled"][str(times)] = _read(rope, length, asked)
        found["alibi"][str(times)] = _read(alibi, length, asked)
        for method in METHODS if times > 1 else ():
            held = Checkpoint(rope, config)  # type: ignore[arg-type]
            found[method][str(times)] = _read(
                to_context(held, length, method)[0].network, length, asked
            )
    real = _on_text(num_steps(budget, 8), METHODS)
    for method in ("linear", "yarn"):
        found[f"{method}, tuned"] = {
            "2": _tuned(rope, config, method, num_steps(budget, TUNED), asked, seed)
        }
    return {
        "trained": T,
        "base": BASE,
        "steps": count,
        "asked": asked,
        "critical_dimension": critical_dimension(DIM // HEADS, BASE, T),
        "head_dim": DIM // HEADS,
        "by_method": found,
        "tiny": real,
    }


def _on_text(windows: int, methods: Sequence[Extension]) -> dict[str, Any]:
    """Nats per token of the model that comes with regard, on text that it was not trained on."""
    tiny = regard.load("tiny")
    held = split_documents(load_documents())[1]
    ids = tiny.encode("\n\n".join(document.text for document in held)[:40_000])[0]
    trained = tiny.config.max_position_embeddings
    lengths = [trained, max(TIMES) * trained]
    made = {"unscaled": tiny.decoder}
    for method in methods:
        made[method] = to_context(Checkpoint(tiny.decoder, tiny.config), lengths[-1], method)[
            0
        ].network
    found = {
        name: losses(model, ids, lengths, counted=64, windows=windows).tolist()
        for name, model in made.items()
    }
    return {"trained": trained, "lengths": lengths, "windows": windows, "nats": found}


def _tuned(
    rope: nn.Module, config: Any, method: Extension, count: int, asked: int, seed: int
) -> dict[str, float]:
    """An extension to twice the length, and a few steps on rows that long."""
    held = Checkpoint(copy.deepcopy(rope), config)  # type: ignore[arg-type]
    model = to_context(held, 2 * T, method)[0].network.requires_grad_(True)
    longer = replace(TASK, lengths=(T, 2 * T, 2 * T + 1))
    train_on_task(model, longer, count, lr=1e-3, batch=BATCH, seed=seed, loss=TextAndAnswerLoss())
    return _read(model, 2 * T, asked)


def _checks_bare(numbers: Mapping[str, Any]) -> list[Criterion]:
    short, long = numbers["tiny"]["nats"]["unscaled"]
    return [
        Criterion(
            "tiny, at four times its trained length: nats per token more than within it",
            long - short,
            high=CLOSE,
        ),
        Criterion(
            "the toy finds the key at twice its trained length: share right",
            numbers["by_method"]["unscaled"]["2"]["passkey"],
            role="reported",
        ),
    ]


def _checks_of(method: str) -> Callable[[Mapping[str, Any]], list[Criterion]]:
    def checks(numbers: Mapping[str, Any]) -> list[Criterion]:
        text, toy = numbers["tiny"]["nats"], numbers["by_method"]
        return [
            Criterion(
                "tiny, at four times its trained length, no weight changed: nats per token more "
                "than within it",
                text[method][1] - text["unscaled"][0],
                high=CLOSE,
            ),
            Criterion(
                "it breaks there without an extension: nats more",
                text["unscaled"][1] - text["unscaled"][0],
                low=CLOSE,
                role="control",
            ),
            Criterion(
                "less than without an extension: nats",
                text["unscaled"][1] - text[method][1],
                role="reported",
            ),
            Criterion(
                "the toy finds the key at twice its trained length: share right, by that within it",
                toy[method]["2"]["passkey"] / max(toy["unscaled"]["1"]["passkey"], 1e-9),
                low=0.5,
                role="limit",
            ),
        ]

    return checks


def _checks_alibi(numbers: Mapping[str, Any]) -> list[Criterion]:
    alibi, far = numbers["by_method"]["alibi"], str(max(TIMES))
    return [
        Criterion(
            "the toy, at four times its trained length: nats per token more than within it",
            alibi[far]["nats"] - alibi["1"]["nats"],
            high=CLOSE,
        ),
        Criterion(
            "it finds the key there: share right, by that within the trained length",
            alibi[far]["passkey"] / max(alibi["1"]["passkey"], 1e-9),
            low=0.9,
            role="limit",
        ),
    ]


def _checks_tuning(numbers: Mapping[str, Any]) -> list[Criterion]:
    text = numbers["tiny"]["nats"]
    toy = numbers["by_method"]
    return [
        Criterion(
            "YaRN without any tuning, tiny at four times its length: nats per token more than "
            "within it",
            text["yarn"][1] - text["unscaled"][0],
            low=CLOSE,
        ),
        Criterion(
            "what a few steps of tuning give the toy at twice its length: nats less",
            toy["yarn"]["2"]["nats"] - toy["yarn, tuned"]["2"]["nats"],
            role="reported",
        ),
    ]


def _picture(numbers: Mapping[str, Any]) -> Picture:
    told = numbers["tiny"]
    lines = tuple(
        Line(
            name,
            tuple(
                (float(n), math.exp(min(x, 20))) for n, x in zip(told["lengths"], nats, strict=True)
            ),
        )
        for name, nats in told["nats"].items()
    )
    return Picture(
        "Perplexity of tiny, as trained and at four times its length, no weight changed",
        "tokens",
        "perplexity",
        lines,
        "xy",
        told["trained"],
    )


_TOYS = (
    "tiny (3.5 million parameters, 256 tokens) for perplexity; for the key, models of 0.1 "
    "million, trained on 56 tokens of made talk with a key in it: the order of methods shows, "
    "the figures do not carry over."
)


def _claim(
    id_: str,
    sources: tuple[NoteSection, ...],
    says: str,
    checks: Callable[[Mapping[str, Any]], list[Criterion]],
    lesson: str,
    predicts: str = "",
) -> Claim:
    """A claim over the one experiment that all of this file share."""
    close = (
        f"Within {CLOSE:g} nats per token of what it is at the trained length, at four times "
        "that length."
    )
    return Claim(
        id=id_,
        sources=sources,
        statement=says,
        prediction=predicts or close,
        scope=_TOYS,
        measure=_measure,
        checks=checks,
        picture=_picture,
        measured_with="longer",
        takeaway=lesson,
    )


_SPOKEN = {
    "linear": (
        "Position interpolation",
        (NoteSection(OUTLINE, "position encodings"),),
        (
            "Positions between those that were trained want a little tuning: untuned it is nearly "
            "as bad as nothing."
        ),
    ),
    "ntk": (
        "NTK-aware scaling",
        (NoteSection(OUTLINE, "position encodings"),),
        (
            "One base for all lengths: it turns the slow pairs less and leaves some of them beyond "
            "what they were trained on."
        ),
    ),
    "dynamic": (
        "Dynamic NTK",
        (NoteSection(OUTLINE, "position encodings"),),
        (
            "The base follows the length of the text, and stays as trained for short ones; it is "
            "another method than NTK-aware scaling."
        ),
    ),
    "yarn": (
        "YaRN",
        (NoteSection(OUTLINE, "position encodings"),),
        (
            "Interpolation by parts and a temperature: slow pairs are interpolated, fast ones left "
            "alone."
        ),
    ),
    "llama3": (
        "Llama 3's scaling",
        (NoteSection(OUTLINE, "long contexts"),),
        "Interpolation by parts as well, with a ramp of its own.",
    ),
}

CLAIMS = (
    _claim(
        "longer",
        (NoteSection(OUTLINE, "long contexts"),),
        "A model with rotary positions reads beyond its trained length as it is.",
        _checks_bare,
        "It does not: angles that training never showed break it. That is what the extensions are "
        "for.",
    ),
    *(
        _claim(
            f"longer-{name}",
            sources,
            f"{title} lets a model read beyond its trained length without training.",
            _checks_of(name),
            lesson,
        )
        for name, (title, sources, lesson) in _SPOKEN.items()
    ),
    _claim(
        "longer-alibi",
        (NoteSection(OUTLINE, "position encodings"),),
        "A model with ALiBi reads beyond its trained length.",
        _checks_alibi,
        "Perplexity is not retrieval: far tokens are read and hardly seen.",
    ),
    _claim(
        "yarn-tuning",
        (NoteSection(OUTLINE, "position encodings"),),
        "YaRN needs fine-tuning.",
        _checks_tuning,
        "It gains from some, and works without.",
        f"Untuned it loses {CLOSE:g} nats per token or more at four times the trained length.",
    ),
)
