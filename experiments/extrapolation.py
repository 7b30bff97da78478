"""Claims about contexts beyond the trained length: rotary extensions, and ALiBi.

Perplexity is measured on text with the model "tiny", and retrieval with two small models, rotary
and ALiBi, that are trained to find a passkey. The rotary base of the small model is b = (T / 2
pi)^(d / d_extra) with d_extra / d = 92 / 128: the share of dims that rotate by a full turn within
the trained length T is that of Llama 2. With b = 10000 hardly any dim of so small a model would
rotate by a full turn, and an extension would have little to extend.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from random import Random
from typing import get_args

import torch
from torch import nn

import regard
from experiments.claim import OUTLINE, Claim, Criterion, NoteSection, num_steps
from experiments.small_training import answer_accuracy, small_decoder, train_on_task
from regard.compare.context_extension import losses_by_length
from regard.compare.experiment import Numbers
from regard.configs.llama import LlamaConfig
from regard.language import Phrase
from regard.models.convert.attention_maps import Checkpoint
from regard.models.convert.rotary_positions import Extension, extend_context
from regard.models.decoder import Decoder
from regard.models.families import family
from regard.positions import critical_dimension
from regard.train.corpus import load_documents, split_documents
from regard.train.losses import AnswerLoss, evaluate
from regard.train.tasks import TASKS
from regard.train.tasks.task import Example, PaddedBatch, Task, pad
from regard.view.charts import Line, Picture

T, TIMES = 56, (1, 2, 4)
"""The trained length of the small models, and the multiples of it that are measured."""
DIM, HEADS, LAYERS, BATCH = 64, 4, 2, 24
STEPS, TUNING_STEPS = 420, 40
BASE = (T / math.tau) ** (128 / 92)
TASK = replace(TASKS["passkey"], lengths=(27, T, max(TIMES) * T))
CLOSE = 0.3
"""The largest increase of the loss, in nats per token, with which a model still counts as working:
it multiplies the perplexity by 1.35.
"""
METHODS: tuple[Extension, ...] = tuple(get_args(Extension))


class TextAndAnswerLoss:
    """The mean loss of all next tokens plus that of the answers, which are few."""

    def __call__(self, model: nn.Module, rows: PaddedBatch) -> torch.Tensor:
        """Return the mean over all tokens plus the mean over the answers."""
        logits = model(rows.source)
        text = nn.functional.cross_entropy(
            logits[:, :-1].transpose(1, 2), rows.source[:, 1:], ignore_index=0
        )
        answers = nn.functional.cross_entropy(logits.transpose(1, 2), rows.target)
        return text + answers


def passkey_of_length(length: int) -> Task:
    """Return the passkey task with examples of `length` tokens, or slightly fewer.

    Examples consist of whole sentences and are never longer than `length`.

    >>> {example.length <= 112 for example in passkey_of_length(112).examples("longer", 4)}
    {True}
    """

    def draw(random: Random, _: int) -> Example:
        while (example := TASK.draw(random, length)).length > length:
            continue
        return example

    shortest = 1 if length > T else TASK.lengths[0]
    split_lengths = (length - 8, length) if length > T else (T, T + 1)
    return replace(TASK, draw=draw, lengths=(shortest, *split_lengths))


def _trained(seed: int, count: int) -> tuple[LlamaConfig, Decoder, Decoder]:
    """Return a trained Llama with the small base, its config, and a trained decoder with ALiBi."""
    V = len(TASK.vocabulary)
    config = LlamaConfig(
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
    rope = family("llama").build(config)
    assert isinstance(rope, Decoder)
    _, alibi = small_decoder(V, dim=DIM, layers=LAYERS, heads=HEADS, position="alibi", seed=seed)
    for model in (rope, alibi):
        train_on_task(model, TASK, count, batch=BATCH, seed=seed, loss=TextAndAnswerLoss())
    return config, rope, alibi


def _loss_and_accuracy(model: nn.Module, length: int, examples: int) -> dict[str, float]:
    """Return the loss in nats per token, and the passkey's accuracy, at a length."""
    task, split = passkey_of_length(length), "longer" if length > T else "validation"
    rows = pad(task, task.examples(split, examples, "read"))
    model.eval()
    loss_function = TextAndAnswerLoss()
    with torch.no_grad():
        total_loss = evaluate(model, rows, loss=loss_function)
        answer_loss = evaluate(model, rows, loss=AnswerLoss())
    return {
        "nats": total_loss - answer_loss,
        "passkey": answer_accuracy(model, task, split, examples, "read"),
    }


def _measure(budget: float, seed: int) -> Numbers:
    examples, count = num_steps(budget, 40, least=4), num_steps(budget, STEPS)
    config, rope, alibi = _trained(seed, count)
    by_method: dict[str, Numbers] = {"unscaled": {}, "alibi": {}, **{m: {} for m in METHODS}}
    for times in TIMES:
        length = times * T
        by_method["unscaled"][str(times)] = _loss_and_accuracy(rope, length, examples)
        by_method["alibi"][str(times)] = _loss_and_accuracy(alibi, length, examples)
        for method in METHODS if times > 1 else ():
            checkpoint = Checkpoint(rope, config)
            by_method[method][str(times)] = _loss_and_accuracy(
                extend_context(checkpoint, length, method)[0].network, length, examples
            )
    on_text = _on_text(num_steps(budget, 8), METHODS)
    for method in ("linear", "yarn"):
        by_method[f"{method}, tuned"] = {
            "2": _tuned(rope, config, method, num_steps(budget, TUNING_STEPS), examples, seed)
        }
    return {
        "trained": T,
        "base": BASE,
        "steps": count,
        "asked": examples,
        "critical_dimension": critical_dimension(DIM // HEADS, BASE, T),
        "head_dim": DIM // HEADS,
        "by_method": by_method,
        "tiny": on_text,
    }


def _on_text(windows: int, methods: Sequence[Extension]) -> Numbers:
    """Return the loss of the model "tiny" in nats per token, on text that it was not trained on."""
    tiny = regard.load("tiny")
    validation = split_documents(load_documents())[1]
    ids = tiny.encode("\n\n".join(document.text for document in validation)[:40_000])[0]
    trained = tiny.config.max_position_embeddings
    lengths = [trained, max(TIMES) * trained]
    networks = {"unscaled": tiny.decoder}
    for method in methods:
        networks[method] = extend_context(
            Checkpoint(tiny.decoder, tiny.config), lengths[-1], method
        )[0].network
    nats = {
        name: losses_by_length(model, ids, lengths, counted=64, windows=windows).tolist()
        for name, model in networks.items()
    }
    return {"trained": trained, "lengths": lengths, "windows": windows, "nats": nats}


def _tuned(
    rope: Decoder, config: LlamaConfig, method: Extension, count: int, examples: int, seed: int
) -> dict[str, float]:
    """Return an extension's results after training steps at twice the length."""
    checkpoint = Checkpoint(copy.deepcopy(rope), config)
    model = extend_context(checkpoint, 2 * T, method)[0].network.requires_grad_(True)
    longer = replace(TASK, lengths=(T, 2 * T, 2 * T + 1))
    train_on_task(model, longer, count, lr=1e-3, batch=BATCH, seed=seed, loss=TextAndAnswerLoss())
    return _loss_and_accuracy(model, 2 * T, examples)


def _checks_unscaled(numbers: Numbers) -> list[Criterion]:
    within, beyond = numbers["tiny"]["nats"]["unscaled"]
    return [
        Criterion(
            "tiny at four times its trained length: loss minus the loss within it, nats per token",
            beyond - within,
            high=CLOSE,
        ),
        Criterion(
            "small model at twice its trained length: accuracy of the key",
            numbers["by_method"]["unscaled"]["2"]["passkey"],
            role="reported",
        ),
    ]


def _checks_of(method: str) -> Callable[[Numbers], list[Criterion]]:
    """Return the function that returns the criteria of one extension."""

    def checks(numbers: Numbers) -> list[Criterion]:
        text, small_model = numbers["tiny"]["nats"], numbers["by_method"]
        return [
            Criterion(
                "tiny at four times its trained length, without training: loss minus the loss "
                "within it, nats per token",
                text[method][1] - text["unscaled"][0],
                high=CLOSE,
            ),
            Criterion(
                "the same without an extension: loss minus the loss within it, nats per token",
                text["unscaled"][1] - text["unscaled"][0],
                low=CLOSE,
                role="control",
            ),
            Criterion(
                "loss without the extension minus loss with it, nats per token",
                text["unscaled"][1] - text[method][1],
                role="reported",
            ),
            Criterion(
                "small model: accuracy of the key at twice its trained length / accuracy within it",
                small_model[method]["2"]["passkey"]
                / max(small_model["unscaled"]["1"]["passkey"], 1e-9),
                low=0.5,
                role="limit",
            ),
        ]

    return checks


def _checks_alibi(numbers: Numbers) -> list[Criterion]:
    alibi, far = numbers["by_method"]["alibi"], str(max(TIMES))
    return [
        Criterion(
            "small model at four times its trained length: loss minus the loss within it, nats per "
            "token",
            alibi[far]["nats"] - alibi["1"]["nats"],
            high=CLOSE,
        ),
        Criterion(
            "small model: accuracy of the key at four times its trained length / accuracy within "
            "it",
            alibi[far]["passkey"] / max(alibi["1"]["passkey"], 1e-9),
            low=0.9,
            role="limit",
        ),
    ]


def _checks_tuning(numbers: Numbers) -> list[Criterion]:
    text = numbers["tiny"]["nats"]
    small_model = numbers["by_method"]
    return [
        Criterion(
            "YaRN without fine-tuning, tiny at four times its trained length: loss minus the loss "
            "within it, nats per token",
            text["yarn"][1] - text["unscaled"][0],
            low=CLOSE,
        ),
        Criterion(
            "small model at twice its trained length: loss without fine-tuning minus loss after a "
            "few steps of it, nats per token",
            small_model["yarn"]["2"]["nats"] - small_model["yarn, tuned"]["2"]["nats"],
            role="reported",
        ),
    ]


def _picture(numbers: Numbers) -> Picture:
    on_text = numbers["tiny"]
    lines = tuple(
        Line(
            name,
            tuple(
                (float(n), math.exp(min(x, 20)))
                for n, x in zip(on_text["lengths"], nats, strict=True)
            ),
        )
        for name, nats in on_text["nats"].items()
    )
    return Picture(
        "Perplexity of tiny at its trained length and at four times that, without training",
        "tokens",
        "perplexity",
        lines,
        "xy",
        on_text["trained"],
    )


_SMALL_MODELS = (
    "The model tiny (3.9 million parameters, 256 tokens) for perplexity; models of 0.1 million "
    "parameters, trained on 56 tokens, for the key. The order of the methods is meaningful; the "
    "figures do not apply to large models."
)


def _claim(
    id_: str,
    sources: tuple[NoteSection, ...],
    statement: str,
    checks: Callable[[Numbers], list[Criterion]],
    takeaway: str,
    prediction: str = "",
) -> Claim:
    """Return a claim that is tested by the one experiment of this file."""
    default_prediction = Phrase(
        "At four times the trained length the loss is at most {CLOSE:g} nats per token higher "
        "than within it.",
        CLOSE=CLOSE,
    )
    return Claim(
        id=id_,
        sources=sources,
        statement=statement,
        prediction=prediction or default_prediction,
        scope=_SMALL_MODELS,
        measure=_measure,
        checks=checks,
        picture=_picture,
        measured_with="longer",
        takeaway=takeaway,
    )


_EXTENSIONS = {
    "linear": (
        "Position interpolation",
        (NoteSection(OUTLINE, "position encodings"),),
        (
            "It needs some fine-tuning on the positions between the trained ones; without it, it "
            "is nearly as bad as no extension."
        ),
    ),
    "ntk": (
        "NTK-aware scaling",
        (NoteSection(OUTLINE, "position encodings"),),
        (
            "It has one base for all lengths, which rotates slow pairs less but leaves some of "
            "them at angles that they were not trained on."
        ),
    ),
    "dynamic": (
        "Dynamic NTK",
        (NoteSection(OUTLINE, "position encodings"),),
        (
            "The base depends on the length of the text, and is the trained one for short texts; "
            "it is a different method from NTK-aware scaling."
        ),
    ),
    "yarn": (
        "YaRN",
        (NoteSection(OUTLINE, "position encodings"),),
        ("It interpolates slow pairs, leaves fast pairs unchanged, and adds a temperature."),
    ),
    "llama3": (
        "Llama 3's scaling",
        (NoteSection(OUTLINE, "long contexts"),),
        "It also interpolates slow pairs only, with a different transition between slow and fast.",
    ),
}

CLAIMS = (
    _claim(
        "longer",
        (NoteSection(OUTLINE, "long contexts"),),
        "A model with rotary positions works beyond its trained length without any change.",
        _checks_unscaled,
        "It fails, because it meets angles that never occurred in training; the extensions avoid "
        "them.",
    ),
    *(
        _claim(
            f"longer-{name}",
            sources,
            Phrase(
                "{title} lets a model work beyond its trained length without training.",
                title=Phrase(title),
            ),
            _checks_of(name),
            takeaway,
        )
        for name, (title, sources, takeaway) in _EXTENSIONS.items()
    ),
    _claim(
        "longer-alibi",
        (NoteSection(OUTLINE, "position encodings"),),
        "A model with ALiBi works beyond its trained length.",
        _checks_alibi,
        "A good perplexity does not imply good retrieval: far tokens get very small weights.",
    ),
    _claim(
        "yarn-tuning",
        (NoteSection(OUTLINE, "position encodings"),),
        "YaRN needs fine-tuning.",
        _checks_tuning,
        "It gains from some fine-tuning and works without it.",
        Phrase(
            "Without fine-tuning, the loss at four times the trained length is {CLOSE:g} nats per "
            "token higher or more.",
            CLOSE=CLOSE,
        ),
    ),
)
